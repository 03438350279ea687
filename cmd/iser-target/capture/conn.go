// Package capture records what passes through the sockets of a session, and writes it
// as packets that Wireshark reads.
//
// Each connection is a Conn, which counts octets and, when a Capture wants them, copies
// them into a buffer of limited size. What does not fit is lost and counted: the sender
// and receiver of the connection never wait for who reads the capture.
//
// A capture can begin in the middle of a connection. So that it is understood even so,
// a Conn keeps the first octets of both directions, in which login and MPA startup
// agree on what follows; and what is recorded behind a gap begins where a PDU or FPDU
// begins, which Unread knows.
package capture

import (
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// headLen is how many octets of each direction a Conn keeps: startup frames and a login
// with CHAP have less.
const headLen = 4 << 10

// A direction of a connection.
type direction uint8

const (
	toTarget direction = iota
	toInitiator
)

func (d direction) other() direction { return 1 - d }

// A Conn is a connection whose octets can be recorded. It is the net.Conn that the
// movers are given.
type Conn struct {
	// Conn is a *net.TCPConn; embedded as such it would hand out methods that pass by.
	net.Conn
	hub *Hub

	received uint64               // octets; of who reads
	sent     uint64               // octets; of who writes
	unread   func() ([]byte, int) // of who reads; see Unread
	on       atomic.Bool          // the head is not complete, or there is a capture
	closed   bool                 // guarded by hub.mu
	aborted  atomic.Pointer[error]

	mu     sync.Mutex
	head   head
	to     *Capture  // nil: there is none
	flow   uint32    // the name of this connection in it
	next   [2]uint64 // what it has of each direction ends here
	passed [2]uint64 // and what it should have ends here
	live   [2]bool   // it has something that was not in the head
}

// head is how a connection began, as long as that is complete.
type head struct {
	octets []byte // of both directions, in the order of chunks
	chunks []chunk
	n      [2]int // octets of each direction
	whole  bool   // nothing is added any more
}

type chunk struct {
	dir  direction
	n    int
	time int64 // Unix time in ns
}

// add appends what passes, unless that is too much.
func (h *head) add(d direction, now int64, parts ...[]byte) {
	n := size(parts)
	if h.whole = h.whole || h.n[d]+n > headLen; h.whole || n == 0 {
		return
	}
	for _, p := range parts {
		h.octets = append(h.octets, p...)
	}
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

// Unread has the reader of c tell, when Read calls f, where its PDUs begin: unread are
// the last octets that Read has returned, and the first rest octets of these and of what
// follows belong to a PDU that began before them. Without f, which can be nil, that is
// not known, and what is received behind a gap is not recorded. It is for who reads to
// call.
func (c *Conn) Unread(f func() (unread []byte, rest int)) { c.unread = f }

// Read implements net.Conn.
func (c *Conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
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

// Write implements net.Conn. Each Write, and each WriteBuffers, begins with a PDU.
func (c *Conn) Write(p []byte) (int, error) {
	if c.on.Load() {
		c.written(p)
	}
	n, err := c.Conn.Write(p)
	c.sent += uint64(n)
	return n, err
}

// WriteBuffers is what b.WriteTo(c) should be: one system call for all.
func (c *Conn) WriteBuffers(b *net.Buffers) (int64, error) {
	if c.on.Load() {
		c.written(*b...)
	}
	n, err := b.WriteTo(c.Conn)
	c.sent += uint64(n)
	return n, err
}

// CloseWrite ends our direction of the stream.
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
	return c.Conn.Close()
}

// Abort closes c, for which Read gives the reason from then on.
func (c *Conn) Abort(reason error) {
	c.aborted.Store(&reason)
	c.Close()
}

// read records what Read returns.
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

// receive gives the capture what was received at c.received. Behind a gap that begins with
// a PDU.
//
// Preconditions: mu is held, and the caller is who reads.
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

// written records what Write is about to write. That is before it has left, because the
// answer must not come before it.
func (c *Conn) written(parts ...[]byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now().UnixNano()
	c.head.add(toInitiator, now, parts...)
	if c.to != nil {
		pos := max(c.sent, c.next[toInitiator]) // of the last write TCP may not have taken all
		c.put(toInitiator, pos, now, parts...)
		c.passed[toInitiator] = pos + uint64(size(parts))
	}
	c.settle()
}

// put gives the capture octets from pos on, as many as it takes.
//
// Preconditions: mu is held.
func (c *Conn) put(d direction, pos uint64, now int64, parts ...[]byte) {
	if n := c.to.put(record{kind: data, dir: d, flow: c.flow, time: now, pos: pos}, parts...); n > 0 {
		c.next[d], c.live[d] = pos+uint64(n), true
	}
}

// settle makes recording cost nothing again when there is nothing to record.
//
// Preconditions: mu is held.
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

// attach has k record c from now on, beginning with the head.
func (c *Conn) attach(k *Capture) {
	c.mu.Lock()
	defer c.mu.Unlock()
	flow, ok := k.add(c.RemoteAddr(), c.LocalAddr())
	if !ok {
		return
	}
	c.to, c.flow = k, flow
	c.next, c.passed, c.live = [2]uint64{}, [2]uint64{}, [2]bool{}
	b := c.head.octets
	for _, h := range c.head.chunks {
		n := k.put(record{kind: beginning, dir: h.dir, flow: flow, time: h.time, pos: c.next[h.dir]}, b[:h.n])
		c.next[h.dir] += uint64(n)
		if b = b[h.n:]; n < h.n {
			break
		}
	}
	c.on.Store(true)
}

// detach ends what attach has begun.
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
