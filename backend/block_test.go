package backend_test

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
)

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
				c.config.Path, _ = backendtest.LoopDevice(t, make([]byte, c.size), c.sector, false)
				return openBlock(t, c.config)
			})
		})
	}
	// A device that can neither unmap nor write zeros.
	t.Run("NoFallocate", func(t *testing.T) {
		backendtest.Run(t, func(t *testing.T) backend.Store {
			device, _ := backendtest.LoopDevice(t, make([]byte, 1<<20), 512, false)
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
				config.Path, _ = backendtest.LoopDevice(t, content, 512, !config.ReadOnly)
				return openBlock(t, config)
			})
		})
	}
}

func TestBlockInfo(t *testing.T) {
	for _, sector := range []uint32{512, 4096} {
		device, _ := backendtest.LoopDevice(t, make([]byte, 4<<20), sector, false)
		i := openBlock(t, backend.BlockConfig{Path: device}).Info()
		if i.Size != 4<<20 || i.BlockSize != sector || i.PhysicalBlockSize < sector || i.ReadOnly || !i.VolatileCache || i.Nonblocking {
			t.Errorf("Info() of a device with sectors of %d bytes = %+v", sector, i)
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
	refused("character device", backend.BlockConfig{Path: "/dev/null"}, "not a block device (Dc")
	refused("directory", backend.BlockConfig{Path: t.TempDir()}, "not a block device (d")

	device, _ := backendtest.LoopDevice(t, make([]byte, 4<<20), 4096, false)
	refused("sectors too small", backend.BlockConfig{Path: device, BlockSize: 512}, "has sectors of 4096 bytes. Configure 4096")
	refused("no block size", backend.BlockConfig{Path: device, BlockSize: 8192}, "block size 8192: must be 512 or 4096")
	s := openBlock(t, backend.BlockConfig{Path: device})
	refused("served twice", backend.BlockConfig{Path: device}, "in use")
	refused("served twice, read-only", backend.BlockConfig{Path: device, ReadOnly: true}, "in use")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	openBlock(t, backend.BlockConfig{Path: device}).Close() // free again

	odd, _ := backendtest.LoopDevice(t, make([]byte, 1<<20+512), 512, false)
	refused("odd size", backend.BlockConfig{Path: odd, BlockSize: 4096}, "not a multiple of the block size 4096")
}

func TestBlockMountedIsRefused(t *testing.T) {
	device := backendtest.MakeFS(t, "ext4", 4<<20, "-q")
	t.Run("mounted", func(t *testing.T) {
		backendtest.Mount(t, device, "ext4", "")
		if _, err := backend.OpenBlock(backend.BlockConfig{Path: device}); err == nil || !strings.Contains(err.Error(), "in use: mounted") {
			t.Errorf("%v, want a refusal", err)
		}
	})
	s, dir := openBlock(t, backend.BlockConfig{Path: device}), t.TempDir()
	if err := unix.Mount(device, dir, "ext4", 0, ""); err != unix.EBUSY {
		unix.Unmount(dir, 0)
		t.Errorf("mounting what is served: %v, want EBUSY", err)
	}
	s.Close()
}

// Synced data is on the device, and discarded ranges no longer take space there.
func TestBlockReachesTheDevice(t *testing.T) {
	device, file := backendtest.LoopDevice(t, make([]byte, 4<<20), 512, false)
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
		t.Errorf("Discard of 2 MiB gave back %d bytes", got)
	}
	copy(p[3<<20:], "closed")
	if err := errors.Join(s.WriteAt([]byte("closed"), 3<<20), s.Close()); err != nil {
		t.Fatal(err)
	}
	want("Close")
}

// A partition has the queue of its disk and its own alignment
// (Documentation/ABI/stable/sysfs-block).
func TestDiscardLimits(t *testing.T) {
	const disk, partition = 8, 9 // minor numbers
	for _, tt := range []struct {
		name        string
		dev         uint32
		files       map[string]string // different from below
		blockSize   uint32
		granularity uint32
		alignment   int64
	}{
		{"disk", disk, nil, 512, 65536, 0},
		{"partition", partition, nil, 512, 65536, 32256},
		{"partition, 4096", partition, nil, 4096, 65536, backend.DiscardUnaligned},
		{"partition, aligned", partition, map[string]string{"sda/sda1/discard_alignment": "61440"}, 4096, 65536, 61440},
		{"no alignment", disk, map[string]string{"sda/discard_alignment": "-1"}, 512, 65536, 0},
		{"small granules", disk, map[string]string{"sda/queue/discard_granularity": "512"}, 4096, 4096, backend.DiscardUnaligned},
		{"no discard", disk, map[string]string{"sda/queue/discard_max_bytes": "0"}, 512, 0, 0},
		{"no zeros", disk, map[string]string{"sda/queue/write_zeroes_max_bytes": "0"}, 512, 0, 0},
		{"no granularity", disk, map[string]string{"sda/queue/discard_granularity": "0"}, 512, 0, 0},
		{"no sysfs", 10, nil, 512, 0, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			files := map[string]string{
				"sda/queue/discard_granularity": "65536", "sda/queue/discard_max_bytes": "1048576", "sda/queue/write_zeroes_max_bytes": "1048576",
				"sda/discard_alignment": "0", "sda/sda1/discard_alignment": "32256",
			}
			maps.Copy(files, tt.files)
			for name, content := range files {
				path := filepath.Join(dir, "devices", name)
				if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(content+"\n"), 0o600)); err != nil {
					t.Fatal(err)
				}
			}
			links := filepath.Join(dir, "dev", "block")
			if err := errors.Join(os.MkdirAll(links, 0o700),
				os.Symlink("../../devices/sda", filepath.Join(links, fmt.Sprintf("7:%d", disk))),
				os.Symlink("../../devices/sda/sda1", filepath.Join(links, fmt.Sprintf("7:%d", partition)))); err != nil {
				t.Fatal(err)
			}
			g, a := backend.DiscardLimits(dir, unix.Mkdev(7, tt.dev), tt.blockSize)
			if g != tt.granularity || a != tt.alignment {
				t.Errorf("granularity %d, alignment %d; want %d, %d", g, a, tt.granularity, tt.alignment)
			}
		})
	}
}
