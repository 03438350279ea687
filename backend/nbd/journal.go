package nbd

import (
	"math/bits"
	"sync"
)

const (
	// maxJournal bounds what a Store keeps of changes that are not flushed, in bytes. A Store with more flushes first.
	maxJournal = 32 << 20
	// maxEntries bounds the changes themselves.
	maxEntries = 1 << 16
	// maxPiece is the longest data of a request, in bytes.
	maxPiece = 1 << 20
	// smallest is the least memory that an entry counts with, in bytes.
	smallest = 4096
)

// A change is what the server has done since the last flush: a write of data, or zeros.
type change struct {
	off, n int64
	data   *buffer // nil: zeros
	flags  uint16  // of the zeros
}

func (e *change) overlaps(off, n int64) bool { return off < e.off+e.n && e.off < off+n }

// A journal has changes in the order of the server's answers. Changes have numbers.
type journal struct {
	list  []change
	first uint64 // number of the first change
}

// end returns the number of the next change.
func (j *journal) end() uint64 { return j.first + uint64(len(j.list)) }

func (j *journal) add(e change) { j.list = append(j.list, e) }

// overlaps reports whether a change has bytes of a range.
func (j *journal) overlaps(off, n int64) bool {
	for i := range j.list {
		if j.list[i].overlaps(off, n) {
			return true
		}
	}
	return false
}

// drop forgets the changes before a number, and returns how many bytes they counted.
func (j *journal) drop(before uint64) (size int64) {
	if before <= j.first {
		return 0
	}
	n := int(min(before, j.end()) - j.first)
	for i := range j.list[:n] {
		size += j.list[i].data.size()
		j.list[i].data.free()
	}
	rest := copy(j.list, j.list[n:])
	clear(j.list[rest:])
	j.list = j.list[:rest]
	j.first += uint64(n)
	return size
}

// discard forgets all changes, and returns how many bytes they counted. Their memory is not used again: replay may still send it.
func (j *journal) discard() (size int64) {
	for i := range j.list {
		size += j.list[i].data.size()
	}
	j.first, j.list = j.end(), nil
	return size
}

// A buffer is memory for the data of one request.
type buffer struct{ b []byte }

// buffers has free ones, of smallest bytes and powers of two more.
var buffers [9]sync.Pool

// class returns which of buffers has those of n bytes.
func class(n int) int { return bits.Len(uint(max(n-1, 0)) / smallest) }

// newBuffer returns a copy of p.
func newBuffer(p []byte) *buffer {
	c := class(len(p))
	b, ok := buffers[c].Get().(*buffer)
	if !ok {
		b = &buffer{make([]byte, smallest<<c)}
	}
	b.b = b.b[:len(p)]
	copy(b.b, p)
	return b
}

// size returns what b counts with. b may be nil.
func (b *buffer) size() int64 {
	if b == nil {
		return 0
	}
	return int64(cap(b.b))
}

// free gives b back. b may be nil.
func (b *buffer) free() {
	if b != nil {
		b.b = b.b[:cap(b.b)]
		buffers[class(cap(b.b))].Put(b)
	}
}
