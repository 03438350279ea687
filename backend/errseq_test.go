package backend

import (
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/iser-target/iser-target/tests/testkit"
	"golang.org/x/sys/unix"
)

// A medium is a file as the kernel has it: a page cache, and a device that may lose what it writes
// back. It keeps errors as errseq_t does (lib/errseq.c).
type medium struct {
	mu     sync.Mutex
	cached map[int64]byte // what was written last
	dirty  map[int64]bool
	stable map[int64]byte
	fail   bool   // write-back fails, and marks the pages clean all the same
	errseq uint64 // number of errors, shifted by one; the lowest bit: somebody has seen the last
}

// A description is an open file description of a medium.
type description struct {
	osFile // nil: nothing else is called
	m      *medium
	since  uint64        // the errors that this description has reported, or that were seen before it
	gate   chan struct{} // if it is not nil, syncs wait until it is closed
}

func newMedium() *medium {
	return &medium{cached: map[int64]byte{}, dirty: map[int64]bool{}, stable: map[int64]byte{}}
}

// open opens a description. An error that nobody has seen counts for newcomers, too (errseq_sample).
func (m *medium) open() (osFile, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	d := &description{m: m}
	if m.errseq&1 != 0 {
		d.since = m.errseq
	}
	return d, nil
}

// writeBack writes dirty pages back: those of only, or all. A failure loses them.
func (m *medium) writeBack(only ...int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if only == nil {
		for off := range m.dirty {
			only = append(only, off)
		}
	}
	for _, off := range only {
		switch {
		case !m.dirty[off]:
			continue
		case m.fail && (m.errseq == 0 || m.errseq&1 != 0): // errseq_set
			m.errseq = m.errseq&^1 + 2
		case !m.fail:
			m.stable[off] = m.cached[off]
		}
		delete(m.dirty, off)
	}
}

// advance reports an error once, as file_check_and_advance_wb_err does.
func (d *description) advance() error {
	d.m.mu.Lock()
	defer d.m.mu.Unlock()
	if d.m.errseq == d.since {
		return nil
	}
	d.m.errseq |= 1
	d.since = d.m.errseq
	return unix.EIO
}

func (d *description) pwrite(p []byte, off int64, flags int) (int, error) {
	d.m.mu.Lock()
	d.m.cached[off], d.m.dirty[off] = p[0], true
	d.m.mu.Unlock()
	if flags&unix.RWF_DSYNC == 0 {
		return len(p), nil
	}
	return len(p), d.sync(off)
}

func (d *description) fdatasync() error { return d.sync() }

func (d *description) sync(only ...int64) error {
	if d.gate != nil {
		<-d.gate
	}
	d.m.writeBack(only...)
	runtime.Gosched()
	err := d.advance()
	for range rand.IntN(4) { // between the kernel and the caller's next statement
		runtime.Gosched()
	}
	return err
}

func (d *description) close() error { return nil }

// newMediumDisk returns a disk on m.
func newMediumDisk(m *medium) *disk {
	f, _ := m.open()
	return newDiskOn("medium", f, m.open, Info{Size: 1 << 20, BlockSize: 512, PhysicalBlockSize: 512}, 1, false)
}

// No call reports that data is safe which the device has lost, even if
// another call saw the error first.
func TestNoErrorIsLost(t *testing.T) {
	rounds := 3000
	if testing.Short() {
		rounds = 300
	}
	for range rounds {
		m := newMedium()
		d := newMediumDisk(m)
		var lost atomic.Bool
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				off := int64(i)
				for v := byte(1); v < 10 && !d.failed.Load(); v++ {
					var err error
					if durable := i%2 == 0; durable {
						err = d.WriteDurable([]byte{v}, off)
					} else if err = d.WriteAt([]byte{v}, off); err == nil {
						err = d.Sync()
					}
					m.mu.Lock()
					if err == nil && m.stable[off] != v {
						lost.Store(true)
					}
					m.mu.Unlock()
				}
			})
		}
		wg.Go(func() {
			for range rand.IntN(20) {
				m.writeBack()
				runtime.Gosched()
			}
			m.mu.Lock()
			m.fail = true
			m.mu.Unlock()
		})
		if wg.Wait(); lost.Load() {
			t.Fatal("a call succeeded although its data is lost")
		}
	}
}

// A sync reports the loss of data that was written before all spare descriptions were opened, also
// when a durable write has seen the error before.
func TestSyncIsOlderThanTheData(t *testing.T) {
	m := newMedium()
	d := newMediumDisk(m)
	if err := d.WriteAt([]byte{1}, 0); err != nil {
		t.Fatal(err)
	}
	m.fail = true
	m.writeBack()
	m.fail = false
	other, _ := m.open() // another process, which syncs the same file
	if err := other.fdatasync(); err != unix.EIO {
		t.Fatalf("the other process: %v, want EIO", err)
	}
	if err := d.WriteDurable([]byte{2}, 512); err != nil {
		t.Errorf("a durable write of other data: %v", err)
	}
	if err := d.Sync(); !errors.Is(err, unix.EIO) {
		t.Errorf("Sync: %v, want EIO", err)
	}
}

// A description that was opened after somebody has seen an error does not serve a Sync.
func TestSyncUsesNoNewDescription(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		m := newMedium()
		d := newMediumDisk(m)
		if err := d.WriteAt([]byte{1}, 0); err != nil {
			t.Fatal(err)
		}
		m.fail = true
		m.writeBack()
		m.fail = false
		other, _ := m.open()
		if err := other.fdatasync(); err != unix.EIO {
			t.Fatalf("another process: %v, want EIO", err)
		}
		gate := make(chan struct{})
		d.fd.(*description).gate = gate
		var wg sync.WaitGroup
		for i := range 4 { // the first holds disk.fd, the second opens a spare
			wg.Go(func() {
				if err := d.Sync(); !errors.Is(err, unix.EIO) && !errors.Is(err, ErrUnsynced) {
					t.Errorf("sync %d: %v, want EIO: the data is lost", i, err)
				}
			})
			synctest.Wait()
		}
		close(gate)
		wg.Wait()
	})
}
