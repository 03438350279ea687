// Package capture records the traffic of a session at its sockets and writes it as packets
// that Wireshark reads.
//
// Each connection is a Conn. While a Capture of its session runs, a Conn copies its bytes
// into a buffer of limited size. Bytes that do not fit are lost and counted: a slow reader
// of the capture never delays the connection.
//
// A capture can begin in the middle of a connection. Wireshark needs the login and the MPA
// startup to decode the rest, so a Conn keeps the first bytes of both directions. After a
// gap, recording continues where a PDU or FPDU begins, which Unread tells.
package capture

import (
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/iser-target/iser-target/rdma/llp"
)

// headLen bounds the bytes that a Conn keeps of each direction. Startup frames and a login
// with CHAP have less.
const headLen = 4 << 10

// A direction of a connection.
type direction uint8

const (
	toTarget direction = iota
	toInitiator
)

func (d direction) other() direction { return 1 - d }

// A Conn is a connection whose bytes can be recorded. The Datamovers use it as their net.Conn.
type Conn struct {
	// Conn is a *net.TCPConn. Embedded with that type, it would promote methods that
	// bypass the recording.
	net.Conn
	hub    *Hub
	socket *llp.Socket // of Conn
	poll   *llp.Poller // for the reader only; nil: it does not poll

	received uint64               // bytes; for the reader only
	sent     uint64               // bytes; for the writer only
	unread   func() ([]byte, int) // for the reader only; see Unread
	on       atomic.Bool          // the head is incomplete, or a capture is running
	closed   bool                 // guarded by hub.mu
	aborted  atomic.Pointer[error]
	over     atomic.Bool // Close was called
	whenOver atomic.Pointer[func()]

	mu     sync.Mutex
	head   head
	to     *Capture  // nil: no capture
	flow   uint32    // number of this connection in it
	next   [2]uint64 // end of what it has, by direction
	passed [2]uint64 // end of what it should have
	live   [2]bool   // it has bytes that were not in the head
}

// A head is the beginning of a connection.
type head struct {
	bytes  []byte // of both directions, in the order of chunks
	chunks []chunk
	n      [2]int // bytes of each direction
	whole  bool   // add ignores what follows
}

type chunk struct {
	dir  direction
	n    int
	time int64 // Unix time in ns
}

// add appends what passes. If that is too much, the head stays as it is from then on.
func (h *head) add(d direction, now int64, parts ...[]byte) {
	n := size(parts)
	if h.whole = h.whole || h.n[d]+n > headLen; h.whole || n == 0 {
		return
	}
	b := h.bytes
	if len(b)+n > cap(b) { // append takes more than it needs
		b = append(make([]byte, 0, len(b)+n), b...)
	}
	for _, p := range parts {
		b = append(b, p...)
	}
	h.bytes = b
	h.n[d] += n
	if last := len(h.chunks) - 1; last >= 0 && h.chunks[last].dir == d {
		h.chunks[last].n += n
		return
	}
	h.chunks = append(h.chunks, chunk{d, n, now})
}

func size(parts [][]byte) (n int) {
	for _, p := range parts {
		n += len(p)
	}
	return n
}

// Unread sets the function by which Read asks its caller where a PDU begins. f returns the
// last bytes that Read returned and that the caller has not consumed, and how many of
// these and of the following bytes belong to a PDU that began before. If f is nil, bytes
// received after a gap are not recorded. Only the goroutine that reads c may call Unread.
func (c *Conn) Unread(f func() (unread []byte, rest int)) { c.unread = f }

// Poll lets Read poll as p says. Only the goroutine that reads c may call it.
func (c *Conn) Poll(p *llp.Polling) { c.poll = p.Reader(c.socket) }

// Read implements net.Conn.
func (c *Conn) Read(p []byte) (n int, err error) {
	if c.poll != nil {
		n, err = c.poll.Read(p)
	} else {
		n, err = c.socket.Read(p)
	}
	if c.on.Load() {
		c.read(p[:n], err)
	}
	c.received += uint64(n)
	if err != nil {
		if reason := c.aborted.Load(); reason != nil {
			err = *reason
		}
	}
	return n, err
}

// ReadBuffers reads to p, and to q what comes after it, with one system call. While c is recorded it reads to p only, so that Unread tells where the PDUs
// of what it returns begin.
func (c *Conn) ReadBuffers(p, q []byte) (int, error) {
	if c.on.Load() {
		return c.Read(p)
	}
	n, err := c.socket.ReadBuffers(p, q)
	c.received += uint64(n) // if the recording has begun meanwhile, it has a gap here
	if err != nil {
		if c.on.Load() {
			c.read(nil, err)
		}
		if reason := c.aborted.Load(); reason != nil {
			err = *reason
		}
	}
	return n, err
}

// Write implements net.Conn. Each Write, and each WriteBuffers, begins with a PDU.
func (c *Conn) Write(p []byte) (int, error) {
	if c.on.Load() {
		c.written(p)
	}
	n, err := c.socket.Write(p)
	c.sent += uint64(n)
	return n, err
}

// WriteBuffers writes b with one system call.
func (c *Conn) WriteBuffers(b [][]byte) (int64, error) {
	if c.on.Load() {
		c.written(b...)
	}
	n, err := c.socket.WriteBuffers(b)
	c.sent += uint64(n)
	return n, err
}

// WritePages does what WriteBuffers does, without a copy of the parts that pages has: see llp.Socket.WritePages. While c is recorded it copies them.
func (c *Conn) WritePages(b [][]byte, pages []llp.PagesPart) (int64, error) {
	if c.on.Load() {
		for _, p := range pages {
			if p.Pipe == nil {
				continue
			}
			b[p.Index] = make([]byte, p.Len)
			if _, err := io.ReadFull(p.Pipe, b[p.Index]); err != nil {
				return 0, err
			}
		}
		return c.WriteBuffers(b)
	}
	n, err := c.socket.WritePages(b, pages)
	c.sent += uint64(n)
	return n, err
}

// CloseWrite shuts down the writing side of the connection.
func (c *Conn) CloseWrite() error {
	if c.on.Load() {
		c.ended(toInitiator)
	}
	return c.Conn.(*net.TCPConn).CloseWrite()
}

// SyscallConn implements syscall.Conn.
func (c *Conn) SyscallConn() (syscall.RawConn, error) { return c.Conn.(*net.TCPConn).SyscallConn() }

// Close implements net.Conn.
func (c *Conn) Close() error {
	if c.on.Load() {
		c.ended(toInitiator)
	}
	c.hub.leave(c)
	err := c.Conn.Close()
	c.over.Store(true)
	if f := c.whenOver.Load(); f != nil {
		(*f)()
	}
	return err
}

// WhenClosed lets Close call f, or calls it if c is closed already. It replaces an earlier f. Close may call f more than once.
func (c *Conn) WhenClosed(f func()) {
	c.whenOver.Store(&f)
	if c.over.Load() {
		f()
	}
}

// Abort closes c. Read returns the reason from then on.
func (c *Conn) Abort(reason error) {
	c.aborted.Store(&reason)
	c.Close()
}

// read records the result of a Read.
func (c *Conn) read(p []byte, err error) {
	if len(p) > 0 {
		c.mu.Lock()
		now := time.Now().UnixNano()
		c.head.add(toTarget, now, p)
		if c.to != nil {
			c.receive(now, p)
		}
		c.settle()
		c.mu.Unlock()
	}
	if err == io.EOF {
		c.ended(toTarget)
	}
}

// receive records p, which was received at c.received. After a gap, it begins with a PDU.
//
// Preconditions: c.mu is held, and the caller is the goroutine that reads.
func (c *Conn) receive(now int64, p []byte) {
	pos, end, next := c.received, c.received+uint64(len(p)), &c.next[toTarget]
	c.passed[toTarget] = end
	if pos != *next {
		if c.unread == nil {
			return
		}
		before, rest := c.unread()
		begin := max(pos-uint64(len(before))+uint64(rest), *next)
		if begin < pos { // the reader still has it
			c.put(toTarget, begin, now, before[len(before)-int(pos-begin):])
			if *next != pos {
				return
			}
		} else {
			skip := min(begin, end) - pos
			pos, p = pos+skip, p[skip:]
		}
	}
	if len(p) > 0 {
		c.put(toTarget, pos, now, p)
	}
}

// written records what Write is about to write. It must precede the write, because the
// answer of the peer must not be recorded first.
func (c *Conn) written(parts ...[]byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now().UnixNano()
	c.head.add(toInitiator, now, parts...)
	if c.to != nil {
		pos := max(c.sent, c.next[toInitiator]) // TCP may have taken only a part of the last write
		c.put(toInitiator, pos, now, parts...)
		c.passed[toInitiator] = pos + uint64(size(parts))
	}
	c.settle()
}

// put records the bytes from pos on, as many as the capture takes.
//
// Preconditions: c.mu is held.
func (c *Conn) put(d direction, pos uint64, now int64, parts ...[]byte) {
	if n := c.to.put(record{kind: data, dir: d, flow: c.flow, time: now, pos: pos}, parts...); n > 0 {
		c.next[d], c.live[d] = pos+uint64(n), true
	}
}

// settle turns recording off if no capture runs and the head is complete.
//
// Preconditions: c.mu is held.
func (c *Conn) settle() {
	if c.to == nil && c.head.whole {
		c.on.Store(false)
	}
}

// ended records the end of a direction.
func (c *Conn) ended(d direction) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.to != nil {
		c.to.put(record{kind: end, dir: d, flow: c.flow, time: time.Now().UnixNano()})
	}
}

// attach records c in k from now on, beginning with the head.
func (c *Conn) attach(k *Capture) {
	c.mu.Lock()
	defer c.mu.Unlock()
	flow, ok := k.add(c.RemoteAddr(), c.LocalAddr())
	if !ok {
		return
	}
	c.to, c.flow = k, flow
	c.next, c.passed, c.live = [2]uint64{}, [2]uint64{}, [2]bool{}
	b := c.head.bytes
	for _, h := range c.head.chunks {
		n := k.put(record{kind: beginning, dir: h.dir, flow: flow, time: h.time, pos: c.next[h.dir]}, b[:h.n])
		c.next[h.dir] += uint64(n)
		if b = b[h.n:]; n < h.n {
			break
		}
	}
	c.on.Store(true)
}

// detach ends the recording that attach began.
func (c *Conn) detach() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.to == nil {
		return
	}
	for d, live := range c.live {
		if live && c.passed[d] > c.next[d] {
			c.to.lose(c.passed[d] - c.next[d])
		}
	}
	c.to = nil
	c.settle()
}
