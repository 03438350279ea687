package backendtest

import (
	"cmp"
	"sync"

	"github.com/iser-target/iser-target/backend"
)

// An Op names a method of backend.Store, or of an interface that some Stores have, that can fail.
type Op int

// The methods that can fail.
const (
	ReadAt Op = iota
	WriteAt
	WriteDurable
	Sync
	Discard
	Zero
	Close
	Extent
	Prefetch
	CopyFrom
	WriteAtomic
	numOps
)

// String returns the name of the method.
func (o Op) String() string {
	return [numOps]string{"ReadAt", "WriteAt", "WriteDurable", "Sync", "Discard", "Zero", "Close", "Extent",
		"Prefetch", "CopyFrom", "WriteAtomic"}[o]
}

// Faulty is a Store that fails on demand. A call that fails does not reach the Store below,
// except Close. All methods are safe for concurrent use. The zero value of the unexported
// fields is ready: use &Faulty{Store: s}.
//
// Faulty injects only the errors that it is told: a test that needs the failure of Sync to be
// final must make later calls fail, too.
type Faulty struct {
	backend.Store

	mu    sync.Mutex
	errs  [numOps]error
	hook  func(op Op, off, n int64) error
	gate  *Gate
	calls [numOps]int
}

// Fail makes every later call of op fail with err, or succeed again with nil.
func (f *Faulty) Fail(op Op, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.errs[op] = err
}

// data has the methods that read or change data.
var data = []Op{ReadAt, WriteAt, WriteDurable, Discard, Zero}

// FailIO makes every later ReadAt, WriteAt, WriteDurable, Discard and Zero fail with err, or
// succeed again with nil.
func (f *Faulty) FailIO(err error) {
	for _, op := range data {
		f.Fail(op, err)
	}
}

// Hook makes every later call, unless Fail makes it fail, call h first without a lock held,
// with the range of the call in bytes (0, 0 for Sync and Close). If h returns an error the call
// fails with it. h may block to hold the call. Hook(nil) removes the hook.
func (f *Faulty) Hook(h func(op Op, off, n int64) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.hook = h
}

// Calls returns how often op was called, including failed calls.
func (f *Faulty) Calls(op Op) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls[op]
}

// call counts a call of op and fails it, or calls below.
func (f *Faulty) call(op Op, off, n int64, below func() error) error {
	f.mu.Lock()
	f.calls[op]++
	err, hook, gate := f.errs[op], f.hook, f.gate
	f.mu.Unlock()
	gate.pass(op, off)
	if err == nil && hook != nil {
		err = hook(op, off, n)
	}
	if err != nil {
		return err
	}
	return below()
}

// ReadAt implements backend.Store.
func (f *Faulty) ReadAt(p []byte, off int64) error {
	return f.call(ReadAt, off, int64(len(p)), func() error { return f.Store.ReadAt(p, off) })
}

// WriteAt implements backend.Store.
func (f *Faulty) WriteAt(p []byte, off int64) error {
	return f.call(WriteAt, off, int64(len(p)), func() error { return f.Store.WriteAt(p, off) })
}

// WriteDurable implements backend.Store.
func (f *Faulty) WriteDurable(p []byte, off int64) error {
	return f.call(WriteDurable, off, int64(len(p)), func() error { return f.Store.WriteDurable(p, off) })
}

// Sync implements backend.Store.
func (f *Faulty) Sync() error { return f.call(Sync, 0, 0, f.Store.Sync) }

// Discard implements backend.Store.
func (f *Faulty) Discard(off, n int64) error {
	return f.call(Discard, off, n, func() error { return f.Store.Discard(off, n) })
}

// Zero implements backend.Store.
func (f *Faulty) Zero(off, n int64) error {
	return f.call(Zero, off, n, func() error { return f.Store.Zero(off, n) })
}

// Extent implements backend.Mapper. n of the call is 1.
func (f *Faulty) Extent(off int64) (mapped bool, n int64, err error) {
	err = f.call(Extent, off, 1, func() (err error) {
		mapped, n, err = backend.Extent(f.Store, off)
		return err
	})
	return mapped, n, err
}

// WriteAtomic implements backend.AtomicWriter. A Store below that does not is written to with WriteAt.
func (f *Faulty) WriteAtomic(p []byte, off int64, durable bool) error {
	return f.call(WriteAtomic, off, int64(len(p)), func() error {
		if _, ok := f.Store.(backend.AtomicWriter); !ok {
			return f.Store.WriteAt(p, off)
		}
		return backend.WriteAtomic(f.Store, p, off, durable)
	})
}

// Usage implements backend.Gauge.
func (f *Faulty) Usage() (used, free int64, err error) { return backend.Usage(f.Store) }

// Prefetch implements backend.Prefetcher.
func (f *Faulty) Prefetch(off, n int64) error {
	return f.call(Prefetch, off, n, func() error { return backend.Prefetch(f.Store, off, n) })
}

// CopyFrom implements backend.Copier. Between two Faultys it copies between the Stores below.
func (f *Faulty) CopyFrom(off int64, src backend.Store, srcOff, n int64) (done int64, err error) {
	if s, ok := src.(*Faulty); ok {
		src = s.Store
	}
	err = f.call(CopyFrom, off, n, func() (err error) {
		if c, ok := f.Store.(backend.Copier); ok {
			done, err = c.CopyFrom(off, src, srcOff, n)
		}
		return err
	})
	return done, err
}

// Close implements backend.Store. It closes the Store below even if it fails.
func (f *Faulty) Close() error {
	err := f.call(Close, 0, 0, func() error { return nil })
	return cmp.Or(err, f.Store.Close())
}
