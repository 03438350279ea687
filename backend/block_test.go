package backend_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
)

// loopDevice makes a block device of a new file with content and returns the
// paths of both. The device goes when the test ends, or the test process.
func loopDevice(t *testing.T, content []byte, sector uint32, readOnly bool) (device, file string) {
	t.Helper()
	if os.Geteuid() != 0 {
		unavailable(t, "only root makes loop devices")
	}
	file = filepath.Join(t.TempDir(), "loop.img")
	if err := os.WriteFile(file, content, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		unavailable(t, "no loop devices: %v", err)
	}
	defer control.Close()
	config := unix.LoopConfig{Fd: uint32(f.Fd()), Size: sector}
	config.Info.Flags = unix.LO_FLAGS_AUTOCLEAR
	if readOnly {
		config.Info.Flags |= unix.LO_FLAGS_READ_ONLY
	}
	for range 100 { // others look for free devices too
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			unavailable(t, "no free loop device: %v", err)
		}
		device = fmt.Sprintf("/dev/loop%d", n)
		fd, err := unix.Open(device, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			unavailable(t, "loop device: %v", err)
		}
		switch err := unix.IoctlLoopConfigure(fd, &config); err {
		case nil:
			t.Cleanup(func() { unix.Close(fd) }) // the last close clears it
			return device, file
		case unix.EBUSY:
			unix.Close(fd)
		default:
			unix.Close(fd)
			unavailable(t, "configuring %s: %v", device, err)
		}
	}
	unavailable(t, "no free loop device")
	return "", ""
}

func openBlock(t *testing.T, c backend.BlockConfig) backend.Store {
	t.Helper()
	s, err := backend.OpenBlock(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func TestBlock(t *testing.T) {
	for name, c := range map[string]struct {
		size   int
		sector uint32
		config backend.BlockConfig
	}{
		"512":          {size: 8 << 20, sector: 512},
		"4096":         {size: 8 << 20, sector: 4096},
		"4096On512":    {size: 1 << 20, sector: 512, config: backend.BlockConfig{BlockSize: 4096}},
		"RaggedEnd":    {size: 1<<20 + 512, sector: 512}, // the last page of the cache is cut short
		"WriteThrough": {size: 1 << 20, sector: 512, config: backend.BlockConfig{WriteThrough: true}},
	} {
		t.Run(name, func(t *testing.T) {
			backendtest.Run(t, func(t *testing.T) backend.Store {
				c.config.Path, _ = loopDevice(t, make([]byte, c.size), c.sector, false)
				return openBlock(t, c.config)
			})
		})
	}
	// A device without a way to unmap or write zeros by itself.
	t.Run("NoFallocate", func(t *testing.T) {
		backendtest.Run(t, func(t *testing.T) backend.Store {
			device, _ := loopDevice(t, make([]byte, 1<<20), 512, false)
			s := openBlock(t, backend.BlockConfig{Path: device})
			backend.Intercept(s, &backend.Hooks{Fallocate: func(uint32) error { return unix.EOPNOTSUPP }})
			return s
		})
	})
	for name, config := range map[string]backend.BlockConfig{
		"ReadOnly":       {ReadOnly: true},
		"ReadOnlyDevice": {}, // the kernel says so
	} {
		t.Run(name, func(t *testing.T) {
			backendtest.RunReadOnly(t, func(t *testing.T, content []byte) backend.Store {
				config.Path, _ = loopDevice(t, content, 512, !config.ReadOnly)
				return openBlock(t, config)
			})
		})
	}
}

func TestBlockInfo(t *testing.T) {
	for _, sector := range []uint32{512, 4096} {
		device, _ := loopDevice(t, make([]byte, 4<<20), sector, false)
		i := openBlock(t, backend.BlockConfig{Path: device}).Info()
		if i.Size != 4<<20 || i.BlockSize != sector || i.PhysicalBlockSize < sector || i.ReadOnly || !i.VolatileCache || i.Nonblocking {
			t.Errorf("Info() of a device with sectors of %d octets = %+v", sector, i)
		}
		want, err := os.ReadFile("/sys/block/" + filepath.Base(device) + "/queue/discard_granularity")
		if err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(i.DiscardGranularity); got != strings.TrimSpace(string(want)) {
			t.Errorf("discard granularity %s, sysfs has %s", got, want)
		}
	}
}

func TestBlockRefusals(t *testing.T) {
	refused := func(what string, c backend.BlockConfig, want string) {
		t.Helper()
		s, err := backend.OpenBlock(c)
		if err == nil {
			s.Close()
			t.Errorf("%s: opened", what)
		} else if !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), c.Path) {
			t.Errorf("%s: error %q, want the path and %q", what, err, want)
		}
	}
	refused("absent", backend.BlockConfig{Path: "/dev/absent"}, "no such file")
	refused("character device", backend.BlockConfig{Path: "/dev/null"}, "no block device (Dc")
	refused("directory", backend.BlockConfig{Path: t.TempDir()}, "no block device (d")

	device, _ := loopDevice(t, make([]byte, 4<<20), 4096, false)
	refused("sectors too small", backend.BlockConfig{Path: device, BlockSize: 512}, "has sectors of 4096 octets: configure 4096")
	refused("no block size", backend.BlockConfig{Path: device, BlockSize: 8192}, "block size 8192: want 512 or 4096")
	s := openBlock(t, backend.BlockConfig{Path: device})
	refused("served twice", backend.BlockConfig{Path: device}, "is in use")
	refused("served twice, read-only", backend.BlockConfig{Path: device, ReadOnly: true}, "is in use")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	openBlock(t, backend.BlockConfig{Path: device}).Close() // free again

	odd, _ := loopDevice(t, make([]byte, 1<<20+512), 512, false)
	refused("odd size", backend.BlockConfig{Path: odd, BlockSize: 4096}, "not a multiple of the block size 4096")
}

func TestBlockMountedIsRefused(t *testing.T) {
	device, _ := loopDevice(t, make([]byte, 4<<20), 512, false)
	mkfs, err := exec.LookPath("mkfs.ext4")
	if err != nil {
		unavailable(t, "mkfs.ext4: %v", err)
	}
	if out, err := exec.Command(mkfs, "-q", device).CombinedOutput(); err != nil {
		t.Fatalf("mkfs.ext4: %v: %s", err, out)
	}
	dir := t.TempDir()
	if err := unix.Mount(device, dir, "ext4", 0, ""); err != nil {
		unavailable(t, "mount: %v", err)
	}
	_, err = backend.OpenBlock(backend.BlockConfig{Path: device})
	if uerr := unix.Unmount(dir, 0); uerr != nil {
		t.Fatal(uerr)
	}
	if err == nil || !strings.Contains(err.Error(), "is in use: it is mounted") {
		t.Errorf("a mounted device: %v, want a refusal", err)
	}
	s := openBlock(t, backend.BlockConfig{Path: device})
	if err := unix.Mount(device, dir, "ext4", 0, ""); err != unix.EBUSY {
		unix.Unmount(dir, 0)
		t.Errorf("mounting what is served: %v, want EBUSY", err)
	}
	s.Close()
}

// What was synced is on the device, and what was discarded no longer takes
// space there.
func TestBlockReachesTheDevice(t *testing.T) {
	device, file := loopDevice(t, make([]byte, 4<<20), 512, false)
	s := openBlock(t, backend.BlockConfig{Path: device})
	p := bytes.Repeat([]byte{0x5a}, 4<<20)
	want := func(what string) {
		t.Helper()
		got, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, p) {
			t.Errorf("after %s the device has something else", what)
		}
	}
	if err := errors.Join(s.WriteAt(p, 0), s.Sync()); err != nil {
		t.Fatal(err)
	}
	want("Sync")
	copy(p[1000:], "durable")
	if err := s.WriteDurable(p[1000:1007], 1000); err != nil {
		t.Fatal(err)
	}
	want("WriteDurable")
	full := allocated(t, file)
	clear(p[100 : 100+2<<20])
	if err := errors.Join(s.Discard(100, 2<<20), s.Sync()); err != nil {
		t.Fatal(err)
	}
	want("Discard")
	if got := full - allocated(t, file); s.Info().DiscardGranularity != 0 && got < 2<<20-2*64<<10 {
		t.Errorf("Discard of 2 MiB gave back %d octets", got)
	}
	copy(p[3<<20:], "closed")
	if err := errors.Join(s.WriteAt([]byte("closed"), 3<<20), s.Close()); err != nil {
		t.Fatal(err)
	}
	want("Close")
}
