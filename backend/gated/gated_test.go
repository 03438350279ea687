package gated

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A valve is a Gate that a test turns.
type valve struct{ admits, answers atomic.Bool }

func (v *valve) Admits() bool { return v.admits.Load() }

func (v *valve) MayAnswer() bool { return v.answers.Load() }

func memory(t *testing.T, size int64) backend.Store {
	t.Helper()
	m, err := backend.OpenMemory(backend.MemoryConfig{Size: size, BlockSize: 512})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// opened returns a Store whose medium is open, behind an open gate.
func opened(t *testing.T, medium backend.Store) (*Store, *valve) {
	t.Helper()
	v := &valve{}
	v.admits.Store(true)
	v.answers.Store(true)
	s := New(medium.Info(), v)
	if err := s.Adopt(medium); err != nil {
		t.Fatal(err)
	}
	return s, v
}

// While this gateway has the medium, the Store is like it.
func TestContract(t *testing.T) {
	backendtest.Run(t, func(t *testing.T) backend.Store {
		s, _ := opened(t, memory(t, backendtest.MinSize))
		t.Cleanup(func() { s.Release() })
		return s
	})
}

// calls returns the calls that need the medium, by their names.
func calls(s *Store) map[string]func() error {
	return map[string]func() error{
		"ReadAt":       func() error { return s.ReadAt(make([]byte, 512), 0) },
		"WriteAt":      func() error { return s.WriteAt(make([]byte, 512), 0) },
		"WriteDurable": func() error { return s.WriteDurable(make([]byte, 512), 0) },
		"Sync":         s.Sync,
		"Discard":      func() error { return s.Discard(0, 512) },
		"Zero":         func() error { return s.Zero(0, 512) },
		"Extent":       func() error { _, _, err := s.Extent(0); return err },
		"Resize":       func() error { return s.Resize(1 << 20) },
	}
}

// Calls wait for a medium that nobody has, for a bounded time, and end at once if another gateway has it. Usage does not wait.
func TestHold(t *testing.T) {
	for name := range calls(nil) {
		testkit.Bubble(t, func(t *testing.T) {
			medium := memory(t, 1<<20)
			v := &valve{}
			s := New(medium.Info(), v)
			call := calls(s)[name]
			begun := time.Now()
			if err := call(); !errors.Is(err, backend.ErrMoved) || time.Since(begun) != MaxHold {
				t.Errorf("%s without a medium: %v after %v", name, err, time.Since(begun))
			}
			begun = time.Now()
			time.AfterFunc(time.Second, func() { s.SetAway(true) })
			if err := call(); !errors.Is(err, backend.ErrMoved) || time.Since(begun) > time.Second+poll {
				t.Errorf("%s while another gateway takes it: %v after %v", name, err, time.Since(begun))
			}
			s.SetAway(false)
			begun = time.Now()
			time.AfterFunc(time.Second, func() {
				if err := s.Adopt(medium); err != nil {
					t.Error(err)
				}
			})
			time.AfterFunc(2*time.Second, func() { v.answers.Store(true); v.admits.Store(true) })
			if err := call(); err != nil || time.Since(begun) < 2*time.Second || time.Since(begun) > 2*time.Second+poll {
				t.Errorf("%s while this gateway takes it: %v after %v", name, err, time.Since(begun))
			}
			v.answers.Store(false) // another gateway may have it already, and has the size, too
			if err := call(); errors.Is(err, backend.ErrMoved) == (name == "Resize") {
				t.Errorf("%s whose answer must not be given: %v", name, err)
			}
			if err := s.Release(); err != nil {
				t.Error(err)
			}
			begun = time.Now()
			if _, _, err := s.Usage(); !errors.Is(err, backend.ErrMoved) || time.Since(begun) > 0 {
				t.Errorf("Usage without a medium: %v after %v", err, time.Since(begun))
			}
			if err := s.Close(); err != nil {
				t.Error(err)
			}
			if err := call(); !errors.Is(err, backend.ErrClosed) {
				t.Errorf("%s after Close: %v", name, err)
			}
		})
	}
}

// After a medium has failed for ever, calls wait for the next one.
func TestFailedMedium(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		first := memory(t, 1<<20)
		s, _ := opened(t, first)
		if err := first.Close(); err != nil {
			t.Fatal(err)
		}
		if err := s.WriteAt(make([]byte, 512), 0); !errors.Is(err, backend.ErrMoved) {
			t.Errorf("WriteAt that finds out: %v", err)
		}
		begun := time.Now()
		time.AfterFunc(time.Second, func() {
			s.Release()
			if err := s.Adopt(memory(t, 1<<20)); err != nil {
				t.Error(err)
			}
		})
		if err := s.WriteAt(make([]byte, 512), 0); err != nil || time.Since(begun) < time.Second {
			t.Errorf("WriteAt after that: %v after %v", err, time.Since(begun))
		}
	})
}

// A medium may come back with another size, and with nothing else.
func TestAdopt(t *testing.T) {
	s, _ := opened(t, memory(t, 1<<20))
	if err := s.Release(); err != nil {
		t.Fatal(err)
	}
	if size := s.Info().Size; size != 1<<20 {
		t.Errorf("the size is %d after Release", size)
	}
	s.SetSize(3 << 20)
	if size, err := s.Grow(); size != 3<<20 || err != nil {
		t.Errorf("Grow where the medium is not open: %d, %v", size, err)
	}
	if err := s.Adopt(memory(t, 2<<20)); err != nil || s.Info().Size != 2<<20 {
		t.Errorf("Adopt of a larger medium: %v, %d bytes", err, s.Info().Size)
	}
	s.SetSize(4 << 20) // of no concern while it is open
	if size := s.Info().Size; size != 2<<20 {
		t.Errorf("the size is %d", size)
	}
	if err := s.Release(); err != nil {
		t.Fatal(err)
	}
	other, err := backend.OpenMemory(backend.MemoryConfig{Size: 2 << 20, BlockSize: 4096})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Adopt(other); !errors.Is(err, ErrOtherMedium) {
		t.Errorf("Adopt of a medium with other blocks: %v", err)
	}
}

// No call allocates.
func TestNoAllocations(t *testing.T) {
	s, _ := opened(t, memory(t, 1<<20))
	p := make([]byte, 4096)
	if n := testing.AllocsPerRun(100, func() {
		if err := errors.Join(s.WriteAt(p, 0), s.ReadAt(p, 0)); err != nil {
			t.Fatal(err)
		}
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
}
