package handed

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// A file that was given is taken once, by any of its names, with the lock of its description.
func TestTake(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	if _, ok := Take(path); ok {
		t.Error("a file that was not given")
	}
	if err := Give(f); err != nil {
		t.Fatal(err)
	}
	again, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if err := Give(again); err == nil {
		t.Error("a file was given twice")
	}
	link := path + ".link"
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	if _, ok := Take(filepath.Dir(path)); ok {
		t.Error("a directory was taken")
	}
	fd, ok := TakeDescriptor(link)
	if !ok {
		t.Fatal("the file was not found")
	}
	if err := unix.Flock(int(again.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != unix.EWOULDBLOCK {
		t.Errorf("the lock is gone: %v", err)
	}
	if _, ok := Take(path); ok {
		t.Error("the file was taken twice")
	}
	if err := unix.Close(fd); err != nil {
		t.Error(err)
	}
	if err := unix.Flock(int(again.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		t.Errorf("after Close: %v", err)
	}
	if err := Give(again); err != nil {
		t.Error(err)
	}
	if err := Close(); err != nil {
		t.Error(err)
	}
	if _, ok := Take(path); ok {
		t.Error("a file was taken after Close")
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	if err := Give(r); err == nil {
		t.Error("a pipe was given")
	}
}
