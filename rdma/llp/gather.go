package llp

import (
	"io"
	"net"
	"sync"
	"sync/atomic"
)

const (
	slabLen = 32 << 10
	iovLen  = 512

	// A Gather begins with these. That suffices for a login, and for an idle connection. Until Keep is called it has them only
	// from the first Room to Release.
	firstSlabLen = 2304 // a size class of Go that holds two times CopyBelow and headers
	firstIovLen  = 8

	// GatherLen is the size of a Gather in bytes: Slab, and 24 bytes for each part.
	GatherLen = slabLen + 24*(iovLen+2)

	// CopyBelow is the number of bytes below which data is copied to the Slab:
	// that is cheaper than one more entry for writev.
	CopyBelow = 1024
)

// A Gather collects what is to be written, so that many messages leave in one
// system call. It belongs to one goroutine at a time.
type Gather struct {
	// Slab holds headers, trailers and short data. Append to it, but never more
	// than Room has promised.
	Slab []byte

	nc    io.Writer
	vec   buffersWriter // nc, or nil if it does not implement that
	byRef pagesWriter   // nc, or nil
	conn  net.Conn      // of SetConn, until RefersPages has looked at it
	chunk int           // Slab[chunk:] is not in iov yet
	long  int           // bytes of data in iov
	small bool          // the first Slab and iov have not sufficed
	kept  atomic.Bool   // Keep was called
	lent  *firstMemory  // what Slab and iov are, to be given back; or nil
	iov   [][]byte      // parts of Slab and data, in the order of the stream
	pages []PagesPart   // those of ReferPages and ReferPipe
	bufs  net.Buffers   // iov while it is written without vec
}

// A buffersWriter is a Socket, or a net.Conn that wraps one and forwards to its WriteBuffers.
type buffersWriter interface {
	WriteBuffers(b [][]byte) (int64, error)
}

// A pagesWriter is a Socket, or a net.Conn that wraps one and forwards to its WritePages.
type pagesWriter interface {
	WritePages(b [][]byte, pages []PagesPart) (int64, error)
}

// firstMemory is the first memory of a Gather.
type firstMemory struct {
	slab [firstSlabLen]byte
	iov  [firstIovLen + 2][]byte
}

// firstMemories has those that no Gather uses.
var firstMemories = sync.Pool{New: func() any { return new(firstMemory) }}

// Keep lets the Gather keep its memory after Release, for a connection that sends often. It may be called at any time.
func (g *Gather) Keep() { g.kept.Store(true) }

// lend gives the Gather its first memory.
func (g *Gather) lend() {
	g.lent = firstMemories.Get().(*firstMemory)
	g.Slab, g.iov = g.lent.slab[:0], g.lent.iov[:0]
}

// Release gives back the memory of a Gather that holds nothing, unless Keep was called. Its owner calls it when it has nothing more to send.
func (g *Gather) Release() {
	if g.lent == nil || g.kept.Load() || len(g.Slab)+len(g.iov) > 0 {
		return
	}
	firstMemories.Put(g.lent)
	g.Slab, g.iov, g.bufs, g.lent = nil, nil, nil, nil
}

// SetConn sets what Flush writes to.
func (g *Gather) SetConn(nc net.Conn) {
	g.nc = nc
	if tcp, ok := nc.(*net.TCPConn); ok {
		g.nc = NewSocket(tcp)
	}
	g.vec, _ = g.nc.(buffersWriter)
	g.byRef, _ = g.nc.(pagesWriter)
	g.conn = nc
}

// Room reports whether n bytes and one call of Refer fit before a Flush.
func (g *Gather) Room(n int) bool { return g.RoomFor(n, 1) }

// RoomFor does what Room does, for that many calls of Refer.
func (g *Gather) RoomFor(n, calls int) bool {
	if cap(g.Slab)-len(g.Slab) >= n && len(g.iov)+calls+3 <= cap(g.iov) {
		return true
	}
	if cap(g.Slab) == 0 {
		g.lend()
		return g.RoomFor(n, calls)
	}
	g.small = cap(g.Slab) < slabLen
	return false
}

// Refer adds data after the Slab without copying it. data must not change until Flush has returned.
func (g *Gather) Refer(data []byte) {
	if g.chunk < len(g.Slab) {
		g.iov = append(g.iov, g.Slab[g.chunk:])
	}
	g.iov = append(g.iov, data)
	g.chunk = len(g.Slab)
	g.long += len(data)
}

// RefersPages reports whether ReferPages may be called, and is cheaper than Refer.
func (g *Gather) RefersPages() bool {
	if g.conn != nil && !RefersPages(g.conn) {
		g.byRef = nil
	}
	g.conn = nil
	return g.byRef != nil
}

// RefersPages reports whether a Gather that writes to nc refers to pages.
func RefersPages(nc net.Conn) bool {
	switch nc.(type) {
	case *net.TCPConn, pagesWriter:
		return !paces(nc)
	}
	return false
}

// ReferPages does what Refer does, for data that Socket.WritePages may write.
func (g *Gather) ReferPages(data []byte) {
	g.Refer(data)
	g.pages = append(g.pages, PagesPart{Index: len(g.iov) - 1})
}

// ReferPipe does what Refer does, for the next n bytes of p. RefersPages has returned true.
func (g *Gather) ReferPipe(p *Pipe, n int) {
	g.Refer(nil)
	g.pages = append(g.pages, PagesPart{len(g.iov) - 1, p, n})
	g.long += n
}

// Long returns how many bytes Refer has added.
func (g *Gather) Long() int { return g.long }

// Flush writes what has been collected, and waits until TCP has taken it.
func (g *Gather) Flush() error {
	if g.chunk < len(g.Slab) {
		g.iov = append(g.iov, g.Slab[g.chunk:])
	}
	var err error
	switch {
	case len(g.iov) == 0:
		return nil
	case len(g.iov) == 1 && len(g.pages) == 0:
		_, err = g.nc.Write(g.iov[0])
	default:
		switch {
		case len(g.pages) > 0:
			_, err = g.byRef.WritePages(g.iov, g.pages)
		case g.vec != nil:
			_, err = g.vec.WriteBuffers(g.iov)
		default:
			g.bufs = g.iov
			_, err = g.bufs.WriteTo(g.nc)
		}
		clear(g.iov) // do not keep the data alive
	}
	g.Reset()
	return err
}

// Reset forgets what has been collected.
func (g *Gather) Reset() {
	clear(g.pages)
	g.Slab, g.chunk, g.iov, g.long, g.pages = g.Slab[:0], 0, g.iov[:0], 0, g.pages[:0]
	if g.small {
		g.small, g.lent = false, nil
		g.Slab, g.iov = make([]byte, 0, slabLen), make([][]byte, 0, iovLen+2)
	}
}
