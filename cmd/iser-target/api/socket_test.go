package api

import (
	"errors"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/cmd/iser-target/handover"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A socket belongs to one process, and only its owner can connect.
func TestSocketHasOneOwner(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := Listen(path, "", &handover.Listeners{})
	if err != nil {
		t.Fatal(err)
	}
	fi, err := os.Lstat(path)
	if err != nil || fi.Mode() != fs.ModeSocket|0o600 {
		t.Errorf("socket has mode %v, error %v; want 0600", fi.Mode(), err)
	}
	if _, err := Listen(path, "", &handover.Listeners{}); !errors.Is(err, ErrInUse) {
		t.Errorf("a second Listen: %v, want ErrInUse", err)
	}
	if c, err := net.Dial("unix", path); err != nil {
		t.Errorf("the socket was taken from the first: %v", err)
	} else {
		c.Close()
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the socket is there after Close: %v", err)
	}
}

// The socket of a dead process is replaced.
func TestStaleSocketIsReplaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(path, "", &handover.Listeners{}); !errors.Is(err, ErrInUse) {
		t.Errorf("Listen where another serves without a lock: %v, want ErrInUse", err)
	}
	dead.SetUnlinkOnClose(false)
	dead.Close()
	l, err := Listen(path, "", &handover.Listeners{})
	if err != nil {
		t.Fatalf("a stale socket: %v", err)
	}
	defer l.Close()
	if fi, err := os.Lstat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("socket has mode %v, error %v; want 0600", fi.Mode(), err)
	}
}

// A file that is not a socket stays.
func TestListenKeepsAFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(path, "", &handover.Listeners{}); err == nil || !strings.Contains(err.Error(), "not a socket") {
		t.Errorf("error %v, want that it is not a socket", err)
	}
	if b, err := os.ReadFile(path); string(b) != "precious" {
		t.Errorf("the file has %q, error %v", b, err)
	}
}

// A target whose socket is in use says what to set. If the socket is only the default, it
// serves without.
func TestSocketInUseNamesTheSettings(t *testing.T) {
	taken := func(path, text string) {
		t.Helper()
		want := "set control.socket in its configuration, or ISER_TARGET_CONTROL_SOCKET, to a path of its own, like " + strings.TrimSuffix(path, ".sock") + "-2.sock"
		if !strings.Contains(text, ErrInUse.Error()) || !strings.Contains(text, want) {
			t.Errorf("%q, want %q and %q in it", text, ErrInUse, want)
		}
	}
	path := filepath.Join(t.TempDir(), "mine.sock")
	l, err := Listen(path, "", &handover.Listeners{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := Open(&handover.Listeners{}, config.Control{Socket: path}, slog.New(slog.DiscardHandler)); err == nil {
		t.Error("two targets have one socket")
	} else {
		taken(path, err.Error())
	}

	if os.Geteuid() != 0 {
		t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	}
	path = config.DefaultSocket()
	if l, err := Listen(path, "", &handover.Listeners{}); err == nil {
		defer l.Close()
	} else if !errors.Is(err, ErrInUse) { // by a target that runs on this machine
		t.Fatal(err)
	}
	var log testkit.Log
	serve(t, config.Control{Socket: path}, &log)
	taken(path, log.String())
}
