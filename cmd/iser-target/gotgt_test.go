package main

import (
	"debug/buildinfo"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
)

// gotgt's init function would run getent(1) and sh(1) without $HOME.
func TestCommandsRunNoOtherProgram(t *testing.T) {
	dir := t.TempDir()
	ran := filepath.Join(dir, "ran")
	for _, name := range []string{"getent", "sh"} {
		trap := "#!/bin/sh\necho $0 $* >>" + ran + "\n"
		if err := os.WriteFile(filepath.Join(dir, name), []byte(trap), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	file := write(t, "c.yaml", "targets: []\nportals: [{listen: \"127.0.0.1:0\"}]\n")
	for _, args := range [][]string{{"version"}, {"config", "validate", file}, {"help"}} {
		cmd := exec.Command(executable(t), args...)
		cmd.Env = []string{"BE_ISER_TARGET=1", "PATH=" + dir}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%q: %v\n%s", args, err, out)
		}
		if b, err := os.ReadFile(ran); !os.IsNotExist(err) {
			t.Fatalf("%q ran %s (error %v)", args, b, err)
		}
	}
}

// The tag nogotgt leaves gotgt and the modules that only gotgt needs out of the program.
func TestBuildWithoutGotgt(t *testing.T) {
	exe := filepath.Join(t.TempDir(), "iser-target")
	if out, err := exec.Command("go", "build", "-tags", "nogotgt", "-o", exe, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	info, err := buildinfo.ReadFile(exe)
	if err != nil {
		t.Fatal(err)
	}
	var modules []string
	for _, m := range info.Deps {
		modules = append(modules, m.Path)
	}
	if !slices.Contains(modules, "github.com/spf13/cobra") {
		t.Errorf("modules %q: cobra is missing, so the list is not complete", modules)
	}
	for _, m := range []string{"github.com/gostor/gotgt", "github.com/mitchellh/go-homedir", "github.com/satori/go.uuid", "github.com/sirupsen/logrus"} {
		if slices.Contains(modules, m) {
			t.Errorf("the program contains %s", m)
		}
	}
	p := launch(t, exec.Command(exe, "serve", "--config", write(t, "c.yaml", `
state_dir: `+t.TempDir()+`
portals: [{listen: "127.0.0.1:0"}]
control: {socket: ""}
targets:
  - name: iqn.2026-11.io.example:store
    initiators: ["*"]
    luns: [{id: 0, backend: gotgt, plugin: file, path: /dev/null}]
`)))
	p.wait(t, `backend gotgt: left out of this program, which was built with the tag nogotgt`)
}
