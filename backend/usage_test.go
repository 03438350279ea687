package backend

import (
	"errors"
	"path/filepath"
	"testing"
)

// Usage follows writes and discards.
func TestUsage(t *testing.T) {
	const size, n = 64 << 20, 4 << 20
	for name, open := range map[string]func() (Store, error){
		"memory":         func() (Store, error) { return OpenMemory(MemoryConfig{Size: size}) },
		"limited memory": func() (Store, error) { return OpenMemory(MemoryConfig{Size: size, Limit: 2 * n}) },
		"file": func() (Store, error) {
			s, _, err := OpenFile(FileConfig{Path: filepath.Join(t.TempDir(), "f"), Size: size})
			return s, err
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := open()
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			usage := func() (used, free int64) {
				t.Helper()
				used, free, err := Usage(s)
				if err != nil {
					t.Fatal(err)
				}
				return used, free
			}
			const overhead = 1 << 20 // bytes that a file system takes for metadata
			empty, room := usage()
			if empty > overhead {
				t.Errorf("%d bytes without data", empty)
			}
			data := make([]byte, n)
			for i := range data {
				data[i] = byte(i)
			}
			if err := errors.Join(s.WriteAt(data, 0), s.Sync()); err != nil {
				t.Fatal(err)
			}
			full, left := usage()
			if full < n || full > n+overhead {
				t.Errorf("%d bytes with %d bytes of data", full, n)
			}
			switch m, ok := s.(*Memory); {
			case ok && (room-left != n || left+full > size || m.limit > 0 && left+full != m.limit):
				t.Errorf("%d bytes are free, %d before %d bytes of data", left, room, n)
			case left <= 0:
				t.Errorf("%d bytes are free", left)
			}
			if s.Info().DiscardGranularity == 0 {
				return
			}
			if err := s.Discard(0, n); err != nil {
				t.Fatal(err)
			}
			if used, _ := usage(); used > overhead {
				t.Errorf("%d bytes after Discard", used)
			}
		})
	}
}

// The usage of a block device is not known.
func TestUsageOfDevice(t *testing.T) {
	s, _, err := OpenFile(FileConfig{Path: filepath.Join(t.TempDir(), "f"), Size: 4096})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	s.(*disk).regular = false
	if _, _, err := Usage(s); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("error %v, want ErrUnsupported", err)
	}
}
