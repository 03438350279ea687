package backend_test

import (
	"errors"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/tests/testkit"
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

// Syncs that arrive while one runs share the next one: they have written before it begins.
func TestSyncsShareRounds(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		s := openFile(t, backend.FileConfig{Size: 1 << 20})
		gate := make(chan struct{})
		var busy [16]atomic.Bool
		var syncs atomic.Int32
		backend.Intercept(s, &backend.Hooks{Fdatasync: func(n int) error {
			if busy[n].Swap(true) {
				t.Errorf("two syncs use description %d", n)
			}
			syncs.Add(1)
			<-gate
			busy[n].Store(false)
			return nil
		}})
		var wg sync.WaitGroup
		call := func() {
			wg.Go(func() {
				if err := s.Sync(); err != nil {
					t.Error(err)
				}
			})
			synctest.Wait()
		}
		for range 64 {
			call()
		}
		gate <- struct{}{}
		synctest.Wait()
		if syncs.Load() != 2 {
			t.Errorf("%d system calls, want 2: those that waited share one", syncs.Load())
		}
		call() // a third round, at the same time: the first one has checked the spare that it uses
		close(gate)
		wg.Wait()
		if n := syncs.Load(); n != 3 {
			t.Errorf("65 syncs made %d system calls, want 3", n)
		}
	})
}

// All syncs of a round that fails report its error, and none succeeds afterwards.
func TestFailedRound(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		s := openFile(t, backend.FileConfig{Size: 1 << 20})
		gate, syncs := make(chan error), 0
		backend.Intercept(s, &backend.Hooks{
			Reopen:    func() error { return unix.EMFILE }, // or the last sync does not share a round
			Fdatasync: func(int) error { syncs++; return <-gate },
		})
		var errs [5]error
		var wg sync.WaitGroup
		for i := range errs {
			wg.Go(func() { errs[i] = s.Sync() })
			synctest.Wait()
		}
		gate <- nil
		synctest.Wait()
		var late error
		wg.Go(func() { late = s.Sync() })
		synctest.Wait()
		gate <- unix.EIO
		wg.Wait()
		for i, err := range errs {
			if want := i > 0; errors.Is(err, unix.EIO) != want || err == nil == want {
				t.Errorf("sync %d: %v", i, err)
			}
		}
		if !errors.Is(late, backend.ErrUnsynced) || syncs != 2 {
			t.Errorf("a sync after the failure: %v, and %d system calls; want ErrUnsynced and 2", late, syncs)
		}
	})
}

// An idle store has one descriptor. Durable writes open more, each its own, and give them back.
func TestSpareDescriptors(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		s := openFile(t, backend.FileConfig{Size: 1 << 20})
		gate := make(chan struct{})
		var reopened, inside atomic.Int32
		backend.Intercept(s, &backend.Hooks{
			Reopen: func() error { reopened.Add(1); return nil },
			Pwrite: func(p []byte, off int64, flags int, below func([]byte, int64, int) (int, error)) (int, error) {
				inside.Add(1)
				<-gate
				return below(p, off, flags)
			},
		})
		before := backend.Spares()
		var wg sync.WaitGroup
		for i := range 20 {
			wg.Go(func() {
				if err := s.WriteDurable([]byte{1}, int64(i)); err != nil {
					t.Error(err)
				}
			})
			synctest.Wait()
		}
		if reopened.Load() != 8 || inside.Load() != 8 || backend.Spares() != before+8 {
			t.Errorf("20 durable writes opened %d descriptors, %d write at once, want 8 and 8", reopened.Load(), inside.Load())
		}
		close(gate)
		wg.Wait()
		time.Sleep(time.Minute)
		if n := backend.Spares(); n != before {
			t.Errorf("an idle store keeps %d spare descriptors", n-before)
		}
		if err := s.WriteDurable([]byte{1}, 0); err != nil || reopened.Load() != 9 {
			t.Errorf("then: %v, %d were opened, want 9", err, reopened.Load())
		}
		if s.Close(); backend.Spares() != before {
			t.Errorf("a closed store keeps %d spare descriptors", backend.Spares()-before)
		}
	})
}

// A durable write for which no descriptor is left writes and then joins a round of syncs.
func TestWriteDurableWithoutDescriptors(t *testing.T) {
	for _, reason := range []string{"/proc", "limit"} {
		s := openFile(t, backend.FileConfig{Size: 1 << 20})
		plain, syncs := 0, 0
		hooks := &backend.Hooks{
			Pwrite: func(p []byte, off int64, flags int, below func([]byte, int64, int) (int, error)) (int, error) {
				if plain++; flags != 0 {
					t.Errorf("%s: a write with flags %#x", reason, flags)
				}
				return below(p, off, flags)
			},
			Fdatasync: func(int) error { syncs++; return nil },
		}
		if reason == "limit" {
			backend.LimitSpares(0)
			t.Cleanup(func() { backend.LimitSpares(1 << 62) })
		} else {
			hooks.Reopen = func() error { return unix.EMFILE }
		}
		backend.Intercept(s, hooks)
		for range 10 { // more than a store opens: a failure takes no place
			if err := s.WriteDurable([]byte{1}, 0); err != nil {
				t.Fatal(err)
			}
		}
		if plain != 10 || syncs != 10 {
			t.Errorf("%s: %d writes and %d syncs, want 10 and 10", reason, plain, syncs)
		}
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
