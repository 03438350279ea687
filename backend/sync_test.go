package backend_test

import (
	"errors"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend"
)

// "A failure is final": the second sync of the kernel would succeed.
func TestFailedSyncIsFinal(t *testing.T) {
	for name, call := range map[string]func(s backend.Store) error{
		"Sync":         backend.Store.Sync,
		"WriteDurable": func(s backend.Store) error { return s.WriteDurable(make([]byte, 512), 0) },
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "lun.img")
			s := openFile(t, backend.FileConfig{Path: path, Size: 1 << 20})
			failing := true
			once := func() error {
				if failing {
					failing = false
					return unix.EIO
				}
				return nil
			}
			backend.Intercept(s, &backend.Hooks{
				Pwrite: func(p []byte, off int64, flags int, below func([]byte, int64, int) (int, error)) (int, error) {
					if flags == unix.RWF_DSYNC {
						if err := once(); err != nil {
							return 0, err
						}
					}
					return below(p, off, flags)
				},
				Fdatasync: func(int) error { return once() },
			})
			if err := call(s); !errors.Is(err, unix.EIO) {
				t.Errorf("the failing call: %v, want EIO", err)
			}
			for range 2 {
				if err := s.Sync(); !errors.Is(err, backend.ErrUnsynced) {
					t.Errorf("Sync afterwards: %v, want ErrUnsynced", err)
				}
				if err := s.WriteDurable([]byte{1}, 0); !errors.Is(err, backend.ErrUnsynced) {
					t.Errorf("WriteDurable afterwards: %v, want ErrUnsynced", err)
				}
			}
			// Calls that promise nothing still work.
			if err := errors.Join(s.WriteAt([]byte{1}, 0), s.Discard(0, 512), s.Zero(0, 512), s.ReadAt(make([]byte, 9), 0)); err != nil {
				t.Error(err)
			}
			if err := s.Close(); !errors.Is(err, backend.ErrUnsynced) {
				t.Errorf("Close: %v, want ErrUnsynced", err)
			}
			openFile(t, backend.FileConfig{Path: path}) // it has let go of the file
		})
	}
}

func TestFailedSyncInClose(t *testing.T) {
	s := openFile(t, backend.FileConfig{Size: 1 << 20})
	backend.Intercept(s, &backend.Hooks{Fdatasync: func(int) error { return unix.EIO }})
	if err := s.Close(); !errors.Is(err, unix.EIO) {
		t.Errorf("Close: %v, want EIO", err)
	}
}

// Without RWF_DSYNC a durable write is a write and a sync. A failure of the sync is final, a
// failure of the write is not.
func TestWriteDurableWithoutDsync(t *testing.T) {
	var writeErr, syncErr error
	var plain, syncs int
	s := openFile(t, backend.FileConfig{Size: 1 << 20})
	backend.Intercept(s, &backend.Hooks{
		Pwrite: func(p []byte, off int64, flags int, below func([]byte, int64, int) (int, error)) (int, error) {
			if flags != 0 {
				return 0, unix.ENOSYS
			}
			plain++
			if writeErr != nil {
				return 0, writeErr
			}
			return below(p, off, flags)
		},
		Fdatasync: func(int) error { syncs++; return syncErr },
	})
	for range 2 {
		if err := s.WriteDurable([]byte{1}, 0); err != nil {
			t.Fatal(err)
		}
	}
	if plain != 2 || syncs != 2 {
		t.Errorf("two durable writes took %d writes and %d syncs", plain, syncs)
	}
	writeErr = unix.ENOSPC
	if err := s.WriteDurable([]byte{1}, 0); !errors.Is(err, backend.ErrNoSpace) {
		t.Errorf("no room: %v, want ErrNoSpace", err)
	}
	writeErr, syncErr = nil, unix.EIO
	if err := s.WriteDurable([]byte{1}, 0); !errors.Is(err, unix.EIO) {
		t.Errorf("failing sync: %v, want EIO", err)
	}
	syncErr = nil
	if err := s.WriteDurable([]byte{1}, 0); !errors.Is(err, backend.ErrUnsynced) {
		t.Errorf("after it: %v, want ErrUnsynced", err)
	}
}

// A full medium does not count as a failed sync, unless write-back finds it full.
func TestWriteDurableWithoutSpace(t *testing.T) {
	for _, errno := range []unix.Errno{unix.ENOSPC, unix.EDQUOT} {
		var durable, plain error
		s := openFile(t, backend.FileConfig{Size: 1 << 20})
		backend.Intercept(s, &backend.Hooks{
			Pwrite: func(p []byte, off int64, flags int, below func([]byte, int64, int) (int, error)) (int, error) {
				if flags != 0 && durable != nil {
					return 0, durable
				}
				if flags == 0 && plain != nil {
					return 0, plain
				}
				return below(p, off, flags)
			},
		})
		durable, plain = errno, errno
		if err := s.WriteDurable([]byte{1}, 0); !errors.Is(err, backend.ErrNoSpace) || !errors.Is(err, errno) {
			t.Errorf("%v: %v, want ErrNoSpace", errno, err)
		}
		if err := s.WriteAt([]byte{1}, 0); !errors.Is(err, backend.ErrNoSpace) {
			t.Errorf("%v: %v, want ErrNoSpace", errno, err)
		}
		durable, plain = nil, nil
		if err := errors.Join(s.WriteDurable([]byte{1}, 0), s.Sync()); err != nil {
			t.Errorf("with room again: %v", err)
		}
		durable = errno
		if err := s.WriteDurable([]byte{1}, 0); err == nil || errors.Is(err, backend.ErrNoSpace) {
			t.Errorf("write-back fails with %v: %v, want another error than ErrNoSpace", errno, err)
		}
		if err := s.Sync(); !errors.Is(err, backend.ErrUnsynced) {
			t.Errorf("after that: %v, want ErrUnsynced", err)
		}
	}
}

// The kernel reports a failed write-back once to every file description. So no two syncs may
// use one description at the same time.
func TestSyncsShareNoDescription(t *testing.T) {
	s := openFile(t, backend.FileConfig{Size: 1 << 20})
	var busy [64]atomic.Int32
	var running, most atomic.Int32
	use := func(n int) func() {
		if busy[n].Add(1) != 1 {
			t.Errorf("two syncs use description %d", n)
		}
		if r := running.Add(1); r > most.Load() {
			most.Store(r)
		}
		time.Sleep(time.Millisecond)
		return func() { running.Add(-1); busy[n].Add(-1) }
	}
	backend.Intercept(s, &backend.Hooks{Fdatasync: func(n int) error { defer use(n)(); return nil }})
	var wg sync.WaitGroup
	for range 32 {
		wg.Go(func() {
			if err := s.Sync(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if most.Load() < 2 {
		t.Error("syncs wait for one another")
	}
}

// WriteAt does not sync. WriteDurable and all changes of a write-through store do.
func TestWhatIsSynced(t *testing.T) {
	var dsync, syncs int
	hooks := &backend.Hooks{
		Pwrite: func(p []byte, off int64, flags int, below func([]byte, int64, int) (int, error)) (int, error) {
			if flags == unix.RWF_DSYNC {
				dsync++
			}
			return below(p, off, flags)
		},
		Fdatasync: func(int) error { syncs++; return nil },
	}
	for _, c := range []struct {
		name                 string
		through              bool
		call                 func(s backend.Store) error
		wantDsync, wantSyncs int
	}{
		{"WriteAt", false, func(s backend.Store) error { return s.WriteAt([]byte{1}, 0) }, 0, 0},
		{"Discard", false, func(s backend.Store) error { return s.Discard(0, 4096) }, 0, 0},
		{"Zero", false, func(s backend.Store) error { return s.Zero(0, 4096) }, 0, 0},
		{"WriteDurable", false, func(s backend.Store) error { return s.WriteDurable([]byte{1}, 0) }, 1, 0},
		{"Sync", false, backend.Store.Sync, 0, 1},
		{"Close", false, backend.Store.Close, 0, 1},
		{"WriteAt", true, func(s backend.Store) error { return s.WriteAt([]byte{1}, 0) }, 1, 0},
		{"Discard", true, func(s backend.Store) error { return s.Discard(0, 4096) }, 0, 1},
		{"Zero", true, func(s backend.Store) error { return s.Zero(0, 4096) }, 0, 1},
	} {
		s := openFile(t, backend.FileConfig{Size: 1 << 20, WriteThrough: c.through})
		backend.Intercept(s, hooks)
		dsync, syncs = 0, 0
		if err := c.call(s); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		if dsync != c.wantDsync || syncs != c.wantSyncs {
			t.Errorf("%s (write-through: %v): %d durable writes and %d syncs, want %d and %d",
				c.name, c.through, dsync, syncs, c.wantDsync, c.wantSyncs)
		}
	}
}
