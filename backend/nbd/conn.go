package nbd

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"sync"

	"github.com/iser-target/iser-target/backend"
	"golang.org/x/sys/unix"
)

// A request is one that the server has not answered yet. Its fields change only before do and in complete, except those with
// another rule.
type request struct {
	command, flags uint16
	off, n         int64
	p              []byte // what is written, or where what is read goes
	copy           *buffer
	replayed       bool   // it is a change of the journal
	mark           uint64 // of a flush: the end of the journal when it was requested
	done           chan struct{}
	err            error
	shutdowns      int // times that the server has answered ESHUTDOWN

	// Of the answer; of the goroutine that receives, and reset before the request is sent again.
	got    int64 // bytes of a read
	answer error // of a chunk
	mapped bool  // of the status of blocks: of the first run bytes
	run    int64
	after  bool // another run has begun

	sending sync.Mutex // held while the request is being sent, so that p is not used after its caller has it back
	cookie  uint64     // changes with sending held; 0: answered
}

var requests = sync.Pool{New: func() any { return &request{done: make(chan struct{}, 1)} }}

func newRequest(command, flags uint16, off, n int64, p []byte) *request {
	r := requests.Get().(*request)
	r.command, r.flags, r.off, r.n, r.p = command, flags, off, n, p
	return r
}

// free gives r back after do. A send that still has r sees by the cookie that it is another request.
func (r *request) free() {
	r.p, r.copy, r.replayed, r.mark, r.err, r.shutdowns = nil, nil, false, 0, nil, 0
	requests.Put(r)
}

// A conn is one connection to the server.
type conn struct {
	s  *Store
	nc net.Conn
	e  export
	r  *bufio.Reader

	mu   sync.Mutex // held while a request is being sent
	head [requestLen]byte
	two  [2][]byte
}

func newConn(s *Store, nc net.Conn, e export) *conn {
	return &conn{s: s, nc: nc, e: e, r: bufio.NewReaderSize(nc, 32<<10)}
}

// send sends r if it still has that cookie. A failure ends the connection, and r is sent again on the next one.
func (c *conn) send(r *request, cookie uint64) {
	r.sending.Lock()
	defer r.sending.Unlock()
	if r.cookie != cookie {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	flags := r.flags
	if r.command == cmdRead && c.e.structured && c.e.flags&flagSendDF != 0 {
		flags |= cmdDF // qemu would look for holes first
	}
	putRequest(c.head[:], flags, r.command, cookie, r.off, r.n)
	var err error
	if r.command == cmdWrite {
		c.two = [2][]byte{c.head[:], r.p}
		v := net.Buffers(c.two[:])
		_, err = v.WriteTo(c.nc)
		c.two = [2][]byte{}
	} else {
		_, err = c.nc.Write(c.head[:])
	}
	if err != nil {
		c.nc.Close() // receive finds it
	}
}

// receive completes requests until the connection ends, and returns why.
func (c *conn) receive() error {
	defer c.nc.Close()
	var buf [structuredLen]byte
	for {
		h, err := readHeader(c.r, buf[:])
		if err != nil {
			return err
		}
		r := c.s.find(h.cookie)
		if r == nil {
			return violation("an answer to a request that does not exist")
		}
		last := true
		if h.structured {
			last, err = c.chunk(r, &h)
		} else {
			err = c.simple(r, &h)
		}
		if err != nil {
			return err
		}
		if last && !c.s.complete(r) {
			return ErrShutdown
		}
	}
}

// simple takes the rest of a simple answer.
func (c *conn) simple(r *request, h *header) error {
	if h.errno != 0 {
		r.answer = &serverError{errno: unix.Errno(h.errno)}
		return nil
	}
	switch r.command {
	case cmdRead:
		if c.e.structured {
			return violation("a simple answer to a read")
		}
		if _, err := io.ReadFull(c.r, r.p); err != nil {
			return unexpected(err)
		}
		r.got = r.n
	case cmdBlockStatus:
		return violation("a simple answer about the status of blocks")
	}
	return nil
}

// chunk takes the rest of a chunk of a structured answer. last reports whether it was the last one.
func (c *conn) chunk(r *request, h *header) (last bool, err error) {
	if !c.e.structured {
		return false, violation("a structured answer, which was not negotiated")
	}
	last = h.flags&chunkDone != 0
	switch {
	case h.kind == chunkNone:
		if h.length != 0 || !last {
			err = violation("a chunk without data that has %d bytes, or is not the last one", h.length)
		}
	case h.kind == chunkData && r.command == cmdRead:
		err = c.data(r, h.length)
	case h.kind == chunkHole && r.command == cmdRead:
		err = c.hole(r, h.length)
	case h.kind == chunkBlockStatus && r.command == cmdBlockStatus:
		err = c.status(r, h.length)
	case h.kind&chunkErrorBit != 0:
		err = c.error(r, h)
	default:
		err = violation("chunk %d for command %d", h.kind, r.command)
	}
	return last, err
}

// within checks that a part of an answer is within what r reads.
func (r *request) within(off uint64, n int64) error {
	if off < uint64(r.off) || off-uint64(r.off) > uint64(r.n) || n > r.n-int64(off-uint64(r.off)) || n == 0 || r.got+n > r.n {
		return violation("%d bytes at offset %d for a read of %d bytes at %d", n, off, r.n, r.off)
	}
	return nil
}

func (c *conn) data(r *request, length uint32) error {
	var b [8]byte
	if length <= uint32(len(b)) {
		return violation("a chunk of data has %d bytes", length)
	}
	if _, err := io.ReadFull(c.r, b[:]); err != nil {
		return unexpected(err)
	}
	off, n := be.Uint64(b[:]), int64(length)-int64(len(b))
	if err := r.within(off, n); err != nil {
		return err
	}
	at := int64(off) - r.off
	if _, err := io.ReadFull(c.r, r.p[at:at+n]); err != nil {
		return unexpected(err)
	}
	r.got += n
	return nil
}

func (c *conn) hole(r *request, length uint32) error {
	var b [12]byte
	if length != uint32(len(b)) {
		return violation("a chunk about a hole has %d bytes", length)
	}
	if _, err := io.ReadFull(c.r, b[:]); err != nil {
		return unexpected(err)
	}
	off, n := be.Uint64(b[:]), int64(be.Uint32(b[8:]))
	if err := r.within(off, n); err != nil {
		return err
	}
	at := int64(off) - r.off
	clear(r.p[at : at+n])
	r.got += n
	return nil
}

func (c *conn) status(r *request, length uint32) error {
	var b [8]byte
	if length < 4+8 || (length-4)%8 != 0 || length > 4+8*maxExtents {
		return violation("a chunk about the status of blocks has %d bytes", length)
	}
	if _, err := io.ReadFull(c.r, b[:4]); err != nil {
		return unexpected(err)
	}
	if be.Uint32(b[:]) != c.e.context {
		return violation("the status of blocks in context %d", be.Uint32(b[:]))
	}
	for range (length - 4) / 8 {
		if _, err := io.ReadFull(c.r, b[:]); err != nil {
			return unexpected(err)
		}
		n, state := int64(be.Uint32(b[:])), be.Uint32(b[4:])
		if n == 0 {
			return violation("the status of no blocks")
		}
		mapped := state&(stateHole|stateZero) != stateHole|stateZero
		if r.run == 0 {
			r.mapped = mapped
		}
		if r.after = r.after || mapped != r.mapped; !r.after {
			r.run += n
		}
	}
	return nil
}

func (c *conn) error(r *request, h *header) error {
	if h.length < 6 || h.length > 6+maxErrorText+8 {
		return violation("a chunk about an error has %d bytes", h.length)
	}
	b := make([]byte, h.length)
	if _, err := io.ReadFull(c.r, b); err != nil {
		return unexpected(err)
	}
	errno, n := be.Uint32(b), int(be.Uint16(b[4:]))
	rest := len(b) - 6 - n
	if errno == 0 || rest < 0 || h.kind == chunkErrorOffset && rest != 8 {
		return violation("a chunk about error %d has a text of %d bytes, and %d bytes", errno, n, len(b))
	}
	r.answer = &serverError{unix.Errno(errno), string(b[6 : 6+n])}
	return nil
}

// outcome returns the error of r after the last part of its answer.
func (r *request) outcome() error {
	switch {
	case r.answer != nil:
		return r.answer
	case r.command == cmdRead && r.got != r.n:
		return fmt.Errorf("the NBD server has answered %d of %d bytes", r.got, r.n)
	case r.command == cmdBlockStatus && r.run == 0:
		return fmt.Errorf("the NBD server has not told the status of blocks")
	}
	return nil
}

// again reports that an answer of r means that the server is about to end.
func (r *request) again() bool {
	e, ok := r.answer.(*serverError)
	return ok && e.errno == unix.ESHUTDOWN && r.shutdowns < maxShutdowns
}

var _ backend.Mapper = (*mapper)(nil)
