package backend_test

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// BenchmarkRing compares pread and pwrite, which the file store calls, with the same through io_uring: cached
// reads and writes, and reads from the disk. The ring has the best case that a Go program can give it: one
// system call submits, the caller takes what has completed with it, and only otherwise waits for the goroutine
// that takes completions. It is here to decide whether a store should use it; see docs/performance.md.
//
//	go test ./backend -run '^$' -bench Ring -benchtime 1s -count 5
func BenchmarkRing(b *testing.B) {
	const size = 64 << 20
	for _, c := range []struct {
		name   string
		length int
		write  bool
		flags  int
	}{
		{"read 4 KiB cached", 4 << 10, false, 0},
		{"read 64 KiB cached", 64 << 10, false, 0},
		{"write 4 KiB cached", 4 << 10, true, 0},
		{"read 4 KiB from the disk", 4 << 10, false, unix.O_DIRECT},
	} {
		b.Run(c.name, func(b *testing.B) {
			name := filepath.Join(b.TempDir(), "lun.img")
			if err := os.WriteFile(name, make([]byte, size), 0o600); err != nil {
				b.Fatal(err)
			}
			f, err := os.OpenFile(name, os.O_RDWR|c.flags, 0)
			if err != nil {
				b.Fatal(err)
			}
			defer f.Close()
			if err := f.Sync(); err != nil {
				b.Fatal(err)
			}
			fd := int(f.Fd())
			r, err := newRing(64)
			if err != nil {
				b.Skipf("io_uring_setup: %v", err)
			}
			defer r.close()
			system := func(p []byte, off int64) (int, error) {
				if c.write {
					return unix.Pwrite(fd, p, off)
				}
				return unix.Pread(fd, p, off)
			}
			ring := func(p []byte, off int64) (int, error) { return r.do(c.write, fd, p, off) }
			for _, callers := range []int{1, 32} {
				for _, by := range []struct {
					name string
					call func(p []byte, off int64) (int, error)
				}{{"system call", system}, {"ring", ring}} {
					b.Run(fmt.Sprintf("%d/%s", callers, by.name), func(b *testing.B) {
						measureCalls(b, callers, c.length, size, by.call)
					})
				}
			}
		})
	}
}

// measureCalls makes b.N calls from several goroutines, and reports the CPU time of one.
func measureCalls(b *testing.B, callers, length int, size int64, call func(p []byte, off int64) (int, error)) {
	var done atomic.Int64
	var wg sync.WaitGroup
	before := processorTime(b)
	b.ResetTimer()
	for range callers {
		p, err := unix.Mmap(-1, 0, length, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
		if err != nil {
			b.Fatal(err)
		}
		wg.Go(func() {
			defer unix.Munmap(p)
			for n := done.Add(1); n <= int64(b.N); n = done.Add(1) {
				off := n * 7919 * int64(length) % size
				if got, err := call(p, off); got != length || err != nil {
					b.Errorf("%d of %d bytes at %d: %v", got, length, off, err)
					return
				}
			}
		})
	}
	wg.Wait()
	b.StopTimer()
	b.ReportMetric(float64(processorTime(b)-before)/float64(b.N), "cpu-ns/op")
}

// processorTime returns the CPU time of this process in nanoseconds.
func processorTime(b *testing.B) int64 {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return u.Utime.Nano() + u.Stime.Nano()
}

// A ring is an io_uring that many goroutines share (io_uring_setup(2)).
type ring struct {
	fd     int
	shared []byte // both rings
	sqes   []byte

	mu     sync.Mutex
	sqTail *uint32
	sqMask uint32
	array  []uint32
	free   []uint64 // indices of waiters
	slots  chan struct{}

	cqMu    sync.Mutex
	cqHead  *uint32
	cqTail  *uint32
	cqMask  uint32
	cqes    unsafe.Pointer
	waiters []waiter

	ending atomic.Bool
	reaper sync.WaitGroup
}

// A waiter is a call in progress.
type waiter struct {
	done chan int32
}

// ringParams is struct io_uring_params.
type ringParams struct {
	sqEntries, cqEntries, flags, sqThreadCPU, sqThreadIdle, features, wqFD uint32
	_                                                                      [3]uint32
	sq                                                                     struct {
		head, tail, mask, entries, flags, dropped, array, _ uint32
		_                                                   uint64
	}
	cq struct {
		head, tail, mask, entries, overflow, cqes, flags, _ uint32
		_                                                   uint64
	}
}

// ringEntry is struct io_uring_sqe.
type ringEntry struct {
	op, flags     uint8
	ioprio        uint16
	fd            int32
	off, addr     uint64
	length, other uint32
	user          uint64
	_             [3]uint64
}

// ringResult is struct io_uring_cqe.
type ringResult struct {
	user   uint64
	result int32
	_      uint32
}

const (
	opNop, opRead, opWrite = 0, 22, 23
	offsetOfEntries        = 0x10000000
	enterGetEvents         = 1
	endOfRing              = ^uint64(0)
)

func newRing(entries uint32) (*ring, error) {
	var p ringParams
	fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, uintptr(entries), uintptr(unsafe.Pointer(&p)), 0)
	if errno != 0 {
		return nil, errno
	}
	r := &ring{fd: int(fd), slots: make(chan struct{}, entries/2)}
	size := max(int(p.sq.array+4*p.sqEntries), int(p.cq.cqes+16*p.cqEntries))
	var err error
	if r.shared, err = unix.Mmap(r.fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE); err != nil {
		return nil, err
	}
	if r.sqes, err = unix.Mmap(r.fd, offsetOfEntries, int(64*p.sqEntries), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE); err != nil {
		return nil, err
	}
	word := func(off uint32) *uint32 { return (*uint32)(unsafe.Pointer(&r.shared[off])) }
	r.sqTail, r.sqMask, r.array = word(p.sq.tail), *word(p.sq.mask), unsafe.Slice(word(p.sq.array), p.sqEntries)
	r.cqHead, r.cqTail, r.cqMask, r.cqes = word(p.cq.head), word(p.cq.tail), *word(p.cq.mask), unsafe.Pointer(&r.shared[p.cq.cqes])
	for i := range uint64(cap(r.slots)) {
		r.free = append(r.free, i)
		r.waiters = append(r.waiters, waiter{make(chan int32, 1)})
	}
	r.reaper.Go(func() {
		for !r.ending.Load() {
			r.enter(0, 1)
			r.take()
		}
	})
	return r, nil
}

func (r *ring) enter(submit, want uintptr) error {
	var flags uintptr
	if want > 0 {
		flags = enterGetEvents
	}
	for {
		_, _, errno := unix.Syscall6(unix.SYS_IO_URING_ENTER, uintptr(r.fd), submit, want, flags, 0, 0)
		if errno == 0 {
			return nil
		}
		if errno != unix.EINTR {
			return errno
		}
	}
}

// push queues an operation.
func (r *ring) push(e ringEntry) {
	tail := *r.sqTail
	i := tail & r.sqMask
	*(*ringEntry)(unsafe.Pointer(&r.sqes[64*i])) = e
	r.array[i] = i
	atomic.StoreUint32(r.sqTail, tail+1)
}

// do reads or writes p, and returns how many bytes.
func (r *ring) do(write bool, fd int, p []byte, off int64) (int, error) {
	r.slots <- struct{}{}
	defer func() { <-r.slots }()
	op := uint8(opRead)
	if write {
		op = opWrite
	}
	r.mu.Lock()
	slot := r.free[len(r.free)-1]
	r.free = r.free[:len(r.free)-1]
	r.push(ringEntry{op: op, fd: int32(fd), off: uint64(off), addr: uint64(uintptr(unsafe.Pointer(&p[0]))), length: uint32(len(p)), user: slot})
	r.mu.Unlock()
	err := r.enter(1, 0)
	if err != nil {
		return 0, err
	}
	r.take()
	n := <-r.waiters[slot].done
	runtime.KeepAlive(p)
	r.mu.Lock()
	r.free = append(r.free, slot)
	r.mu.Unlock()
	if n < 0 {
		return 0, unix.Errno(-n)
	}
	return int(n), nil
}

// take hands out what has completed.
func (r *ring) take() {
	r.cqMu.Lock()
	defer r.cqMu.Unlock()
	for head := *r.cqHead; head != atomic.LoadUint32(r.cqTail); head++ {
		c := *(*ringResult)(unsafe.Add(r.cqes, 16*(head&r.cqMask)))
		if c.user != endOfRing {
			r.waiters[c.user].done <- c.result
		}
		atomic.StoreUint32(r.cqHead, head+1)
	}
}

func (r *ring) close() {
	r.ending.Store(true)
	r.mu.Lock()
	r.push(ringEntry{op: opNop, user: endOfRing})
	r.mu.Unlock()
	r.enter(1, 0)
	r.reaper.Wait()
	unix.Munmap(r.sqes)
	unix.Munmap(r.shared)
	unix.Close(r.fd)
}
