package backendtest

import (
	"errors"
	"sync"
	"testing"

	"github.com/iser-target/iser-target/backend"
)

func openMemory(t *testing.T) backend.Store {
	t.Helper()
	s, err := backend.OpenMemory(backend.MemoryConfig{Size: MinSize})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// Without faults, Faulty is what it wraps.
func TestFaultyIsAStore(t *testing.T) {
	Run(t, func(t *testing.T) backend.Store { return &Faulty{Store: openMemory(t)} })
}

func TestFaulty(t *testing.T) {
	calls := map[Op]func(s backend.Store) error{
		ReadAt:       func(s backend.Store) error { return s.ReadAt(make([]byte, 512), 1024) },
		WriteAt:      func(s backend.Store) error { return s.WriteAt(pattern(512, 1), 1024) },
		WriteDurable: func(s backend.Store) error { return s.WriteDurable(pattern(512, 1), 1024) },
		Sync:         backend.Store.Sync,
		Discard:      func(s backend.Store) error { return s.Discard(1024, 512) },
		Zero:         func(s backend.Store) error { return s.Zero(1024, 512) },
		Prefetch:     func(s backend.Store) error { return backend.Prefetch(s, 1024, 512) },
	}
	boom, bang := errors.New("boom"), errors.New("bang")
	for op, call := range calls {
		t.Run(op.String(), func(t *testing.T) {
			f := &Faulty{Store: openMemory(t)}
			content := pattern(4096, 2)
			if err := f.Store.WriteAt(content, 0); err != nil {
				t.Fatal(err)
			}
			unchanged := func() {
				t.Helper()
				got := make([]byte, 4096)
				if err := f.Store.ReadAt(got, 0); err != nil {
					t.Fatal(err)
				}
				diff(t, "a failing call changed the store", got, content)
			}
			f.Fail(op, boom)
			for other, call := range calls {
				if other == ReadAt || other == op {
					want := error(nil)
					if other == op {
						want = boom
					}
					if err := call(f); err != want {
						t.Errorf("%v: %v, want %v", other, err, want)
					}
				}
			}
			unchanged()
			f.Fail(op, nil)
			var gotOp Op
			var off, n int64
			f.Hook(func(o Op, at, len int64) error { gotOp, off, n = o, at, len; return bang })
			if err := call(f); err != bang {
				t.Errorf("with a hook: %v, want %v", err, bang)
			}
			if gotOp != op || op != Sync && (off != 1024 || n != 512) || op == Sync && (off != 0 || n != 0) {
				t.Errorf("the hook saw %v of %d bytes at %d", gotOp, n, off)
			}
			unchanged()
			f.Hook(nil)
			if err := call(f); err != nil {
				t.Errorf("healed: %v", err)
			}
			if got := f.Calls(op); got != 3 {
				t.Errorf("%d calls were counted, want 3", got)
			}
			f.Fail(Close, boom)
			if err := f.Close(); err != boom {
				t.Errorf("Close: %v, want %v", err, boom)
			}
			if err := f.Store.Close(); !errors.Is(err, backend.ErrClosed) {
				t.Errorf("the store below was not closed: %v", err)
			}
		})
	}
}

// Extent fails on demand, too, and is otherwise that of the Store below.
func TestFaultyExtent(t *testing.T) {
	f := &Faulty{Store: openMemory(t)}
	boom := errors.New("boom")
	f.Fail(Extent, boom)
	if _, _, err := f.Extent(0); err != boom {
		t.Errorf("error %v, want %v", err, boom)
	}
	f.Fail(Extent, nil)
	if mapped, n, err := f.Extent(512); mapped || n != MinSize-512 || err != nil {
		t.Errorf("Extent(512) = %v, %d, %v", mapped, n, err)
	}
}

// A hook may hold a call up while others run and while it is replaced.
func TestFaultyHookBlocks(t *testing.T) {
	f := &Faulty{Store: openMemory(t)}
	held, release := make(chan struct{}), make(chan struct{})
	f.Hook(func(op Op, _, _ int64) error {
		if op == WriteAt {
			close(held)
			<-release
		}
		return nil
	})
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := f.WriteAt([]byte{1}, 0); err != nil {
			t.Error(err)
		}
	})
	<-held
	f.Hook(nil)
	if err := f.Sync(); err != nil {
		t.Error(err)
	}
	got := []byte{9}
	if err := f.ReadAt(got, 0); err != nil || got[0] != 0 {
		t.Errorf("a write that is held up was done: %v, %v", got, err)
	}
	close(release)
	wg.Wait()
	if err := f.ReadAt(got, 0); err != nil || got[0] != 1 {
		t.Errorf("after the write: %v, %v", got, err)
	}
}
