package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// What is no configuration is refused, in one line that names it and says why, and
// changes nothing.
func TestApplyNonsense(t *testing.T) {
	s := newStation(t)
	before := s.text(t)
	file := func(name, text string) string {
		path := filepath.Join(s.dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	bomb := "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
	for i := 'b'; i < 'm'; i++ {
		bomb += fmt.Sprintf("%c: &%c [%s]\n", i, i, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*%c, ", i-1), 10), ", "))
	}
	pipe, large := filepath.Join(s.dir, "pipe"), file("large", "")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(large, 1<<30); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ path, want string }{
		{s.dir, "is a directory"},
		{pipe, "is a pipe that no process writes to"},
		{large, "is larger than 1MiB"},
		{s.socket, "no such device or address"},
		{filepath.Join(s.dir, "none"), "no such file or directory"},
		{file("binary", "\x7fELF\x02\x01\x01\x00\xff\xfe"), "yaml: "},
		{file("bomb", bomb), "yaml: document contains excessive aliasing"},
		{file("itself", "a: &a [*a]\n"), "yaml: anchor 'a' value contains itself"},
		{file("deep", "a: "+strings.Repeat("[", 100000)), "yaml: exceeded max depth"},
		{file("twice", "portals: []\nportals: []\n"), `yaml: unmarshal errors: line 2: mapping key "portals" already defined at line 1`},
		{file("two", before+"---\n"+before), "yaml: line 9: a second document begins"},
	} {
		for _, verb := range []string{"validate", "plan", "apply"} {
			begin := time.Now()
			out, errOut, code := s.run(t, "config", verb, tt.path)
			first, more, _ := strings.Cut(errOut, "\n")
			if code != cli.ExitError || out != "" || !strings.HasPrefix(first, "iser-target: "+tt.path+": "+tt.want) || strings.Count(more, "\n") > 1 {
				t.Errorf("config %s %s: exit code %d\n%s%s", verb, tt.path, code, out, errOut)
			}
			if d := time.Since(begin); d > 20*time.Second {
				t.Errorf("config %s %s took %v", verb, tt.path, d)
			}
		}
	}
	if got := s.text(t); got != before {
		t.Errorf("the file says\n%s", got)
	}
	s.same(t, 1)
}

// Whatever becomes of the configuration file while the target runs, changes are made or
// refused as a whole, and the target goes on.
func TestFileUnderneath(t *testing.T) {
	dir := t.TempDir()
	real := filepath.Join(dir, "real")
	if err := os.Mkdir(real, 0o700); err != nil {
		t.Fatal(err)
	}
	s := newStation(t)
	create := []string{"lun", "create", storeName, "--backend", "memory", "--size", "1MiB"}
	luns := 1
	made := func(t *testing.T) {
		t.Helper()
		s.ok(t, create...)
		luns++
		s.same(t, luns)
	}
	refused := func(t *testing.T, want string) {
		t.Helper()
		before := len(read[[]schema.LUNState](t, s, "lun", "list"))
		s.says(t, cli.ExitError, want, create...)
		if err := s.cmd.Process.Signal(syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
		s.wait(t, `(configuration file was not applied.*because=SIGHUP)`)
		if got := len(read[[]schema.LUNState](t, s, "lun", "list")); got != before {
			t.Errorf("%d LUNs, want %d", got, before)
		}
	}
	text := func(t *testing.T) []byte {
		t.Helper()
		b, err := os.ReadFile(s.file)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	replace := func(t *testing.T, f func() error) (back func()) {
		t.Helper()
		was := text(t)
		if err := os.Remove(s.file); err != nil {
			t.Fatal(err)
		}
		if err := f(); err != nil {
			t.Fatal(err)
		}
		return func() {
			if err := os.Remove(s.file); err != nil {
				t.Error(err)
			}
			if err := os.WriteFile(s.file, was, 0o600); err != nil {
				t.Error(err)
			}
		}
	}
	t.Run("removed", func(t *testing.T) {
		if err := os.Remove(s.file); err != nil {
			t.Fatal(err)
		}
		made(t)
	})
	t.Run("a link", func(t *testing.T) {
		behind := filepath.Join(real, "behind.yaml")
		if err := os.WriteFile(behind, text(t), 0o600); err != nil {
			t.Fatal(err)
		}
		back := replace(t, func() error { return os.Symlink(behind, s.file) })
		made(t)
		if fi, err := os.Lstat(s.file); err != nil || fi.Mode()&os.ModeSymlink == 0 {
			t.Errorf("it is no link any more: %v, %v", fi, err)
		}
		b := text(t)
		back()
		if err := os.WriteFile(s.file, b, 0o600); err != nil {
			t.Fatal(err)
		}
	})
	for name, tt := range map[string]struct {
		put  func() error
		want string
	}{
		"a pipe":           {func() error { return unix.Mkfifo(s.file, 0o600) }, "is a pipe that no process writes to"},
		"a directory":      {func() error { return os.Mkdir(s.file, 0o700) }, "is a directory"},
		"a link to itself": {func() error { return os.Symlink(s.file, s.file) }, "too many levels of symbolic links"},
	} {
		t.Run(name, func(t *testing.T) {
			back := replace(t, tt.put)
			refused(t, s.file+": "+tt.want)
			back()
			made(t)
		})
	}
	t.Run("a full disk", func(t *testing.T) {
		small := backendtest.Mount(t, "none", "tmpfs", "size=16k")
		path := filepath.Join(small, "c.yaml")
		was := text(t)
		if err := os.WriteFile(path, was, 0o600); err != nil {
			t.Fatal(err)
		}
		back := replace(t, func() error { return os.Symlink(path, s.file) })
		fill, err := os.Create(filepath.Join(small, "fill"))
		if err != nil {
			t.Fatal(err)
		}
		for err == nil {
			_, err = fill.Write(make([]byte, 4096))
		}
		fill.Close()
		s.says(t, cli.ExitError, "no space left on device", create...)
		s.same(t, luns)
		if b := text(t); !bytes.Equal(b, was) {
			t.Errorf("the file says\n%s", b)
		}
		if err := unix.Mount("none", small, "tmpfs", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
			t.Fatal(err)
		}
		s.says(t, cli.ExitError, "read-only file system", create...)
		s.same(t, luns)
		back()
		made(t)
	})
	t.Run("a storm of SIGHUP", func(t *testing.T) {
		for range 500 {
			if err := s.cmd.Process.Signal(syscall.SIGHUP); err != nil {
				t.Fatal(err)
			}
		}
		made(t)
	})
}

// Two targets do not share a directory of state, nor what only one can have.
func TestSecondTarget(t *testing.T) {
	s := newStation(t)
	text := s.text(t)
	for name, tt := range map[string]struct{ old, new, want string }{
		"state":  {"/s}", "/other}", "state_dir: identities " + s.dir + "/state/identities.json: in use: "},
		"socket": {"/state", "/other", "control.socket, by ISER_TARGET_CONTROL_SOCKET: " + s.socket + ": another target serves on this socket"},
	} {
		t.Run(name, func(t *testing.T) {
			other := write(t, "other.yaml", strings.Replace(text, tt.old, tt.new, 1))
			out, errOut, code := s.run(t, "serve", "--config", other)
			lines := strings.Split(strings.TrimSpace(errOut), "\n")
			if code != cli.ExitError || out != "" || !strings.HasPrefix(lines[len(lines)-1], "iser-target: "+tt.want) {
				t.Errorf("exit code %d\n%s%s", code, out, errOut)
			}
		})
	}
	s.same(t, 1)
}
