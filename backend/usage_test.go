package backend

import (
	"errors"
	"path/filepath"
	"testing"
)

// What Usage says follows what is written and discarded.
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
			const most = 1 << 20 // of what a file system takes beside the data
			empty, room := usage()
			if empty > most {
				t.Errorf("%d octets without data", empty)
			}
			data := make([]byte, n)
			for i := range data {
				data[i] = byte(i)
			}
			if err := errors.Join(s.WriteAt(data, 0), s.Sync()); err != nil {
				t.Fatal(err)
			}
			full, left := usage()
			if full < n || full > n+most {
				t.Errorf("%d octets with %d octets of data", full, n)
			}
			switch m, ok := s.(*Memory); {
			case ok && (room-left != n || left+full > size || m.limit > 0 && left+full != m.limit):
				t.Errorf("%d octets are free, %d before %d octets of data", left, room, n)
			case left <= 0:
				t.Errorf("%d octets are free", left)
			}
			if s.Info().DiscardGranularity == 0 {
				return
			}
			if err := s.Discard(0, n); err != nil {
				t.Fatal(err)
			}
			if used, _ := usage(); used > most {
				t.Errorf("%d octets after Discard", used)
			}
		})
	}
}

// Of a device nobody knows.
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
