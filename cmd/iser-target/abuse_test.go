package main

import (
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

// A file that is not a configuration is refused with one line that names it, and changes
// nothing.
func TestFileThatIsNotAConfigurationIsRefused(t *testing.T) {
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
		{s.dir, ": is a directory"},
		{pipe, ": is a pipe that no process writes to"},
		{large, ": is larger than 1MiB"},
		{s.socket, ": no such device or address"},
		{filepath.Join(s.dir, "none"), ": no such file or directory"},
		{file("binary", "\x7fELF\x02\x01\x01\x00\xff\xfe"), ": yaml: "},
		{file("bomb", bomb), ": yaml: document contains excessive aliasing"},
		{file("itself", "a: &a [*a]\n"), ": yaml: anchor 'a' value contains itself"},
		{file("deep", "a: "+strings.Repeat("[", 100000)), ": yaml: exceeded max depth"},
		{file("twice", "portals: []\nportals: []\n"), `:2: yaml: mapping key "portals" already defined at line 1`},
		{file("two", before+"---\n"+before), ":9: yaml: a second document begins"},
	} {
		for _, verb := range []string{"validate", "plan", "apply"} {
			begin := time.Now()
			out, errOut, code := s.run(t, "config", verb, tt.path)
			first, more, _ := strings.Cut(errOut, "\n")
			if code != cli.ExitError || out != "" || !strings.HasPrefix(first, "iser-target: "+tt.path+tt.want) || strings.Count(more, "\n") > 1 {
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

// createMemory is a command that creates a LUN.
var createMemory = []string{"lun", "create", storeName, "--backend", "memory", "--size", "1MiB"}

// A fileStation is a station whose configuration file a test replaces.
type fileStation struct {
	*station
	luns int
}

func newFileStation(t *testing.T) *fileStation {
	t.Helper()
	return &fileStation{newStation(t), 1}
}

// changes makes a change, and checks that it is in effect and in the file.
func (s *fileStation) changes(t *testing.T) {
	t.Helper()
	s.ok(t, createMemory...)
	s.luns++
	s.same(t, s.luns)
}

// refuses checks that a command fails with want, and that neither it nor SIGHUP changes
// anything.
func (s *fileStation) refuses(t *testing.T, want string) {
	t.Helper()
	s.says(t, cli.ExitError, want, createMemory...)
	if err := s.cmd.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	s.wait(t, `(configuration file was not applied.*because=SIGHUP)`)
	if got := len(read[[]schema.LUNState](t, s.station, "lun", "list")); got != s.luns {
		t.Errorf("%d LUNs, want %d", got, s.luns)
	}
}

// replace replaces the file with what put creates, until back is called.
func (s *fileStation) replace(t *testing.T, put func() error) (back func()) {
	t.Helper()
	was := s.text(t)
	if err := os.Remove(s.file); err != nil {
		t.Fatal(err)
	}
	if err := put(); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := os.Remove(s.file); err != nil {
			t.Error(err)
		}
		if err := os.WriteFile(s.file, []byte(was), 0o600); err != nil {
			t.Error(err)
		}
	}
}

// A change writes the configuration file again if it was removed.
func TestChangeRestoresARemovedFile(t *testing.T) {
	s := newFileStation(t)
	if err := os.Remove(s.file); err != nil {
		t.Fatal(err)
	}
	s.changes(t)
}

// A change writes through a symbolic link.
func TestChangeKeepsALink(t *testing.T) {
	s := newFileStation(t)
	other := filepath.Join(t.TempDir(), "other.yaml")
	if err := os.WriteFile(other, []byte(s.text(t)), 0o600); err != nil {
		t.Fatal(err)
	}
	s.replace(t, func() error { return os.Symlink(other, s.file) })
	s.changes(t)
	if fi, err := os.Lstat(s.file); err != nil || fi.Mode()&os.ModeSymlink == 0 {
		t.Errorf("the link was replaced: %v, %v", fi, err)
	}
}

// Changes are refused while the configuration file is something else than a file.
func TestChangeIsRefusedWithoutAFile(t *testing.T) {
	s := newFileStation(t)
	for name, tt := range map[string]struct {
		put  func() error
		want string
	}{
		"a pipe":           {func() error { return unix.Mkfifo(s.file, 0o600) }, "is a pipe that no process writes to"},
		"a directory":      {func() error { return os.Mkdir(s.file, 0o700) }, "is a directory"},
		"a link to itself": {func() error { return os.Symlink(s.file, s.file) }, "too many levels of symbolic links"},
	} {
		t.Run(name, func(t *testing.T) {
			back := s.replace(t, tt.put)
			s.refuses(t, s.file+": "+tt.want)
			back()
			s.changes(t)
		})
	}
}

// A change fails as a whole if the file system of the file is full or read-only.
func TestChangeFailsOnAFullFileSystem(t *testing.T) {
	small := backendtest.Mount(t, "none", "tmpfs", "size=16k")
	s := newFileStation(t)
	path := filepath.Join(small, "c.yaml")
	was := s.text(t)
	if err := os.WriteFile(path, []byte(was), 0o600); err != nil {
		t.Fatal(err)
	}
	back := s.replace(t, func() error { return os.Symlink(path, s.file) })
	fill, err := os.Create(filepath.Join(small, "fill"))
	if err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = fill.Write(make([]byte, 4096))
	}
	fill.Close()
	s.says(t, cli.ExitError, "no space left on device", createMemory...)
	s.same(t, s.luns)
	if got := s.text(t); got != was {
		t.Errorf("the file says\n%s", got)
	}
	if err := unix.Mount("none", small, "tmpfs", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	s.says(t, cli.ExitError, "read-only file system", createMemory...)
	s.same(t, s.luns)
	back()
	s.changes(t)
}

// A change is made during a storm of SIGHUP.
func TestChangeDuringManySIGHUPs(t *testing.T) {
	s := newFileStation(t)
	for range 500 {
		if err := s.cmd.Process.Signal(syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
	}
	s.changes(t)
}

// A second daemon cannot use the state directory or the socket of the first.
func TestSecondDaemonNeedsItsOwnStateAndSocket(t *testing.T) {
	s := newStation(t)
	text := s.text(t)
	for name, tt := range map[string]struct{ old, new, want string }{
		"state":  {"", "", "state_dir: identities " + s.dir + "/state/identities.json: in use: "},
		"socket": {"/state", "/other", "control.socket, by ISER_TARGET_CONTROL_SOCKET: " + s.socket + ": another target serves on this socket"},
	} {
		t.Run(name, func(t *testing.T) {
			other := write(t, "other.yaml", strings.Replace(text, tt.old, tt.new, 1))
			at := *s
			if name == "state" { // the target opens sockets first
				at.socket = filepath.Join(t.TempDir(), "s")
				t.Setenv("ISER_TARGET_CONTROL_SOCKET", at.socket)
			}
			out, errOut, code := at.run(t, "serve", "--config", other)
			lines := strings.Split(strings.TrimSpace(errOut), "\n")
			if code != cli.ExitError || out != "" || !strings.HasPrefix(lines[len(lines)-1], "iser-target: "+tt.want) {
				t.Errorf("exit code %d\n%s%s", code, out, errOut)
			}
		})
	}
	s.same(t, 1)
}
