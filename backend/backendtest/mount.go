package backendtest

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend"
)

// Mount mounts a file system until the test ends and returns the mount point.
func Mount(t testing.TB, source, fstype, options string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	if err := unix.Mount(source, dir, fstype, 0, options); err != nil {
		Unavailable(t, "mounting %s (%s): %v", fstype, options, err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("unmount %s: %v", dir, err)
		}
	})
	return dir
}

// SpliceDir returns a new directory on a file system on which a file is a backend.Splicer that splices.
func SpliceDir(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	s, _, err := backend.OpenFile(backend.FileConfig{Path: filepath.Join(dir, "trial"), Size: 4096})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if s.(backend.Splicer).CanSplice() {
		return dir
	}
	if err := unix.Mount(MakeFS(t, "ext4", 64<<20, "-q"), dir, "ext4", 0, ""); err != nil {
		Unavailable(t, "mounting ext4: %v", err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) }) // a file may still be open
	return dir
}

// MakeFS creates a file system on a new block device of size bytes.
func MakeFS(t testing.TB, fstype string, size int, args ...string) (device string) {
	t.Helper()
	mkfs, err := exec.LookPath("mkfs." + fstype)
	if err != nil {
		Unavailable(t, "%v", err)
	}
	device, _ = LoopDevice(t, make([]byte, size), 512, false)
	if out, err := exec.Command(mkfs, append(args, device)...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", mkfs, err, out)
	}
	return device
}

// ReflinkFS mounts a new file system whose files can share blocks, xfs or btrfs, until the test ends, and returns the mount point.
func ReflinkFS(t testing.TB, fstype string) (dir string) {
	t.Helper()
	if os.Geteuid() != 0 {
		Unavailable(t, "only root can mount file systems")
	}
	args := map[string][]string{"xfs": {"-q", "-m", "reflink=1"}, "btrfs": {"-q"}}[fstype]
	mkfs, err := exec.LookPath("mkfs." + fstype)
	if err != nil {
		Unavailable(t, "%v: make setup installs it", err)
	}
	f, err := os.Create(filepath.Join(t.TempDir(), "medium"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(512 << 20); err != nil { // xfs takes no less than 300 MiB
		t.Fatal(err)
	}
	device, detach := AttachLoop(t, f, 512, false)
	t.Cleanup(detach)
	if out, err := exec.Command(mkfs, append(args, device)...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", mkfs, err, out)
	}
	return Mount(t, device, fstype, "")
}
