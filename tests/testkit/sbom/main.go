// Command sbom writes the bill of materials of a Go program to standard output: the modules in it, as the linker
// has recorded them, in the format CycloneDX 1.5. The same program has the same bill.
//
//	go run ./tests/testkit/sbom bin/iser-target > bin/iser-target.cdx.json
package main

import (
	"cmp"
	"debug/buildinfo"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"os"
	"runtime/debug"
	"slices"
	"strings"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: sbom PROGRAM")
		os.Exit(2)
	}
	info, err := buildinfo.ReadFile(os.Args[1])
	if err == nil {
		err = write(os.Stdout, info)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "sbom:", err)
		os.Exit(1)
	}
}

// A bill is a BOM of CycloneDX.
type bill struct {
	Format     string      `json:"bomFormat"`
	Spec       string      `json:"specVersion"`
	Version    int         `json:"version"`
	Metadata   metadata    `json:"metadata"`
	Components []component `json:"components"`
}

type metadata struct {
	Component component `json:"component"`
}

// A component is the program, or a module in it.
type component struct {
	Type       string     `json:"type"`
	Ref        string     `json:"bom-ref"`
	Name       string     `json:"name"`
	Version    string     `json:"version"`
	PURL       string     `json:"purl"`
	Properties []property `json:"properties,omitempty"`
}

type property struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// write writes the bill of a program.
func write(w io.Writer, info *debug.BuildInfo) error {
	b := bill{Format: "CycloneDX", Spec: "1.5", Version: 1, Metadata: metadata{module("application", &info.Main)}}
	for _, s := range info.Settings {
		switch s.Key {
		case "GOOS", "GOARCH", "CGO_ENABLED", "-tags", "-trimpath", "vcs.revision", "vcs.modified":
			b.Metadata.Component.Properties = append(b.Metadata.Component.Properties, property{"go:build:" + s.Key, s.Value})
		}
	}
	b.Components = []component{module("library", &debug.Module{Path: "stdlib", Version: strings.TrimPrefix(info.GoVersion, "go")})}
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		b.Components = append(b.Components, module("library", m))
	}
	slices.SortFunc(b.Components[1:], func(x, y component) int { return cmp.Compare(x.Ref, y.Ref) })
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(&b)
}

// module returns m as a component. Package URLs of Go are in lower case.
func module(kind string, m *debug.Module) component {
	version := cmp.Or(m.Version, "(devel)")
	parts := strings.Split(strings.ToLower(m.Path), "/")
	for i := range parts {
		parts[i] = url.PathEscape(parts[i])
	}
	purl := "pkg:golang/" + strings.Join(parts, "/") + "@" + url.PathEscape(version)
	c := component{Type: kind, Ref: purl, Name: m.Path, Version: version, PURL: purl}
	if m.Sum != "" {
		c.Properties = []property{{"go:sum", m.Sum}}
	}
	return c
}
