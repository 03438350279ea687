package main

import (
	"bytes"
	"debug/buildinfo"
	"encoding/json"
	"os"
	"runtime/debug"
	"strings"
	"testing"
)

// The bill has the program, the standard library and each module, with the module that replaces another one.
func TestBillOfMaterials(t *testing.T) {
	info := &debug.BuildInfo{
		GoVersion: "go1.26.8", Main: debug.Module{Path: "github.com/iser-target/iser-target", Version: "v1.0.0"},
		Deps: []*debug.Module{
			{Path: "golang.org/x/sys", Version: "v0.49.0", Sum: "h1:abc="},
			{Path: "example.com/old", Version: "v1.0.0", Replace: &debug.Module{Path: "github.com/BurntSushi/toml", Version: "v1.4.1+incompatible"}},
		},
		Settings: []debug.BuildSetting{{Key: "GOARCH", Value: "amd64"}, {Key: "-ldflags", Value: "-X main.version=secret"}},
	}
	var b bytes.Buffer
	if err := write(&b, info); err != nil {
		t.Fatal(err)
	}
	const want = `{
  "bomFormat": "CycloneDX",
  "specVersion": "1.5",
  "version": 1,
  "metadata": {
    "component": {
      "type": "application",
      "bom-ref": "pkg:golang/github.com/iser-target/iser-target@v1.0.0",
      "name": "github.com/iser-target/iser-target",
      "version": "v1.0.0",
      "purl": "pkg:golang/github.com/iser-target/iser-target@v1.0.0",
      "properties": [
        {
          "name": "go:build:GOARCH",
          "value": "amd64"
        }
      ]
    }
  },
  "components": [
    {
      "type": "library",
      "bom-ref": "pkg:golang/stdlib@1.26.8",
      "name": "stdlib",
      "version": "1.26.8",
      "purl": "pkg:golang/stdlib@1.26.8"
    },
    {
      "type": "library",
      "bom-ref": "pkg:golang/github.com/burntsushi/toml@v1.4.1+incompatible",
      "name": "github.com/BurntSushi/toml",
      "version": "v1.4.1+incompatible",
      "purl": "pkg:golang/github.com/burntsushi/toml@v1.4.1+incompatible"
    },
    {
      "type": "library",
      "bom-ref": "pkg:golang/golang.org/x/sys@v0.49.0",
      "name": "golang.org/x/sys",
      "version": "v0.49.0",
      "purl": "pkg:golang/golang.org/x/sys@v0.49.0",
      "properties": [
        {
          "name": "go:sum",
          "value": "h1:abc="
        }
      ]
    }
  ]
}
`
	if b.String() != want {
		t.Errorf("bill:\n%s", b.String())
	}
}

// The bill of a real program is JSON, and the same each time.
func TestBillOfThisProgram(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var bills [2]bytes.Buffer
	for i := range bills {
		info, err := buildinfo.ReadFile(exe)
		if err != nil {
			t.Fatal(err)
		}
		if err := write(&bills[i], info); err != nil {
			t.Fatal(err)
		}
	}
	if !json.Valid(bills[0].Bytes()) || !bytes.Equal(bills[0].Bytes(), bills[1].Bytes()) || !strings.Contains(bills[0].String(), "pkg:golang/stdlib@") {
		t.Errorf("bills:\n%s\n%s", bills[0].String(), bills[1].String())
	}
}
