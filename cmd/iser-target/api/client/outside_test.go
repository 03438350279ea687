package client_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/iser-target/iser-target"

// outside is a program of another module. It uses each part of the API.
const outside = `package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"` + module + `/cmd/iser-target/api/client"
	"` + module + `/cmd/iser-target/schema"
)

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	c := client.New(os.Args[1])
	defer c.Close()
	targets, err := c.Targets(ctx)
	if errors.Is(err, schema.Unreached) {
		os.Exit(5)
	}
	for _, t := range targets {
		for _, l := range t.LUNs {
			fmt.Println(t.Name, l.ID, l.Size)
		}
	}
	plan, err := c.AddLUN(ctx, targets[0].Name, schema.LUN{Backend: "memory", Size: "1GiB"}, schema.Options{DryRun: true})
	if err != nil {
		os.Exit(1)
	}
	for _, s := range plan.Steps {
		fmt.Println(s.Change.Op, s.Change.Object())
	}
}
`

// Another module can import the client, and gets nothing of the target's other parts and no library of the command line.
func TestAnotherModuleImportsTheClient(t *testing.T) {
	root, err := filepath.Abs("../../../..")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	mod, err := os.ReadFile(filepath.Join(root, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	sys := regexp.MustCompile(`(?m)^\tgolang\.org/x/sys v\S+`).Find(mod)
	if sys == nil {
		t.Fatal("go.mod does not require golang.org/x/sys")
	}
	sum, err := os.ReadFile(filepath.Join(root, "go.sum"))
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		// All that the client needs, so that nothing is looked up or downloaded.
		"go.mod":  fmt.Sprintf("module example.org/outside\n\ngo 1.26\n\nrequire (\n\t%s v0.0.0\n%s // indirect\n)\n\nreplace %s => %s\n", module, sys, module, root),
		"go.sum":  string(sum),
		"main.go": outside,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	run := func(name string, args ...string) string {
		t.Helper()
		cmd := exec.Command(name, args...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "GOFLAGS=-mod=mod", "GOPROXY=off", "GOWORK=off", "CGO_ENABLED=0")
		var errs bytes.Buffer
		cmd.Stderr = &errs
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, errs.Bytes())
		}
		return string(out)
	}
	run("go", "vet", ".")
	ours := []string{"/cmd/iser-target/api/client", "/cmd/iser-target/schema", "/cmd/iser-target/tunnel", "/config/terms"}
	packages := json.NewDecoder(strings.NewReader(run("go", "list", "-deps", "-json=ImportPath,Module,Standard", ".")))
	n := 0
	for packages.More() {
		var p struct {
			ImportPath string
			Standard   bool
			Module     struct{ Path string }
		}
		if err := packages.Decode(&p); err != nil {
			t.Fatal(err)
		}
		below, own := strings.CutPrefix(p.ImportPath, module)
		switch {
		case p.Standard || p.Module.Path == "example.org/outside" || p.Module.Path == "golang.org/x/sys":
		case own && (slices.Contains(ours, below) || strings.HasPrefix(below, "/rdma")):
			n++
		default:
			t.Errorf("the client imports %s", p.ImportPath)
		}
		if own && slices.Contains(strings.Split(below, "/"), "internal") {
			t.Errorf("%s is internal", p.ImportPath)
		}
	}
	if n < len(ours) {
		t.Errorf("the client imports %d packages of the target", n)
	}
	s, err := serve(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer s.stop()
	if got, want := run("go", "run", ".", s.socket), store+" 0 16777216\nadd LUN 1 of "+store+"\n"; got != want {
		t.Errorf("the program prints %q, want %q", got, want)
	}
}
