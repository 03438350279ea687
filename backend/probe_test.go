package backend_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
)

// A probe of a file says what opening it says, and neither creates nor changes anything.
func TestProbeFile(t *testing.T) {
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	content := bytes.Repeat([]byte{7}, 4096)
	for name, b := range map[string][]byte{"good": content, "empty": nil, "ragged": content[:1000], "locked": content} {
		if err := os.WriteFile(path(name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mkfifo(path("pipe"), 0o600); err != nil {
		t.Fatal(err)
	}
	openFile(t, backend.FileConfig{Path: path("locked")})
	list := func() (names []string) {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			fi, err := e.Info()
			if err != nil {
				t.Fatal(err)
			}
			names = append(names, e.Name()+" "+fi.ModTime().String())
		}
		return names
	}
	before := strings.Join(list(), "\n")
	for _, tt := range []struct {
		c      backend.FileConfig
		reason string // "": it can be opened
	}{
		{backend.FileConfig{Path: "good"}, ""},
		{backend.FileConfig{Path: "good", Size: 4096, BlockSize: 4096}, ""},
		{backend.FileConfig{Path: "good", ReadOnly: true}, ""},
		{backend.FileConfig{Path: "empty", Size: 1 << 20}, ""},
		{backend.FileConfig{Path: "new", Size: 1 << 40}, ""},
		{backend.FileConfig{Path: "good", Size: 8192}, "the file is 4KiB (4096 bytes), but its size is configured as 8KiB (8192 bytes)"},
		{backend.FileConfig{Path: "good", Size: 1000}, "size"},
		{backend.FileConfig{Path: "empty"}, "the file is empty"},
		{backend.FileConfig{Path: "ragged"}, "not a multiple of the block size"},
		{backend.FileConfig{Path: "locked"}, "locked by another target"},
		{backend.FileConfig{Path: "pipe"}, "not a regular file"},
		{backend.FileConfig{Path: "new"}, "not found"},
		{backend.FileConfig{Path: "new", Size: 1 << 20, ReadOnly: true}, "not found, and a read-only file is not created"},
		{backend.FileConfig{Path: "none/new", Size: 1 << 20}, "no such file or directory"},
		{backend.FileConfig{Path: "new", Size: 1 << 62}, "file too large"},
		{backend.FileConfig{Path: ".", Size: 1 << 20}, "is a directory"},
	} {
		name := tt.c.Path
		tt.c.Path = path(name)
		check := func(how string, err error) {
			if tt.reason == "" && err != nil || tt.reason != "" && (err == nil || !strings.Contains(err.Error(), tt.reason)) {
				t.Errorf("%s of %s, %+v: %v, want %q", how, name, tt.c, err, tt.reason)
			}
		}
		check("probe", backend.ProbeFile(tt.c))
		if after := strings.Join(list(), "\n"); after != before {
			t.Fatalf("the probe of %s changed the directory:\n%s", name, after)
		}
		if tt.reason != "" { // it leaves nothing, too
			_, _, err := backend.OpenFile(tt.c)
			check("opening", err)
		}
	}
	if err := backend.ProbeSize(path("good"), 1<<40); err != nil {
		t.Error(err)
	}
	if err := backend.ProbeSize(path("good"), 1<<62); err == nil {
		t.Error("a file of 4 EiB")
	}
}

// Probes of memory and of devices say what opening them says.
func TestProbeOthers(t *testing.T) {
	if err := backend.ProbeMemory(backend.MemoryConfig{Size: 1 << 45}); err != nil {
		t.Error(err)
	}
	for _, c := range []backend.MemoryConfig{{Size: 1 << 50}, {Size: 1000}} {
		_, err := backend.OpenMemory(c)
		if probed := backend.ProbeMemory(c); err == nil || probed == nil || err.Error() != probed.Error() {
			t.Errorf("%+v: %v, and the probe %v", c, err, probed)
		}
	}
	device, _ := backendtest.LoopDevice(t, make([]byte, 1<<20), 512, false)
	for range 2 { // the first leaves it free
		if err := backend.ProbeBlock(backend.BlockConfig{Path: device}); err != nil {
			t.Error(err)
		}
	}
	s, err := backend.OpenBlock(backend.BlockConfig{Path: device})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := backend.ProbeBlock(backend.BlockConfig{Path: device}); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("a device in use: %v", err)
	}
}
