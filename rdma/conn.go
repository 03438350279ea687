// Package rdma is an iWARP engine in user space: RDMAP (RFC 5040) over DDP
// (RFC 5041) over MPA (RFC 5044, RFC 6581) over a TCP connection, as either
// end of it.
//
// # Receiving
//
// Conn.Receive is the whole receive side: it reads the socket, checks and
// places segments, and returns when the peer's Send or the answer to a posted
// Read is complete. It is called by one goroutine at a time, and as long as
// nobody calls it, TCP holds the peer back. That replaces posted receive
// buffers: no Send can arrive without a buffer (RFC 5041, section 7.1, allows
// it), and a connection's memory is known beforehand.
//
// # Sending
//
// Post puts a WorkRequest into the send queue and never waits; Flush sends
// what the queue holds. Of several goroutines in Flush the first sends for
// all, gathering the queue into as few system calls as it can.
package rdma

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/rdma/wire"
)

// A Conn is one RDMAP stream. Receive belongs to one goroutine at a time; all
// other methods may be called at any time.
type Conn struct {
	nc         net.Conn
	raw        syscall.RawConn // nil if nc is no socket
	opt        Options
	peer       Request // what the peer's startup frame said
	initiator  bool
	crc        bool // both directions carry CRCs
	markersOut bool // the peer wants Markers
	ird, ord   int

	mem    memory
	counts *countShard
	rx     receiver
	tx     sender

	// peerStarted: the first FPDU has come. Until then a Responder may not send
	// (RFC 5044, section 7.1.2).
	peerStarted atomic.Bool
	rtrSend     bool         // the first FPDU may be an empty Send as RTR
	rtr         *WorkRequest // our own RTR, which is nobody's completion

	// mu guards what the sending and the receiving side share.
	mu              sync.Mutex
	queue           list   // posted, not yet taken by a Flush
	due             list   // Read Responses, not yet taken by a Flush
	reads           list   // RDMA Reads that wait for their Response, in order
	nreads          int    // len of reads
	flushed         list   // Reads that will not be answered; Receive returns them
	err             error  // why nothing more can be posted
	readErr         error  // why no Read can be posted
	ending          bool   // our direction ends behind queue and due
	terminateFPDU   []byte // FPDU of the Terminate that is its end, if any
	terminateReason wire.Reason
	ended           bool // it has ended
	broken          bool // a write has failed
	dead            bool // abandon has been called
	flushing        bool // a goroutine is in Flush
	answers         list // free Read Responses
	requests        list // free stand-ins for Reads
	closed          bool

	// The goroutine that flushes for Receive; it is started when needed.
	wake     chan struct{} // has room for one
	gone     chan struct{} // closed by Close
	deferred atomic.Bool   // what is queued leaves before Receive waits

	aside sync.WaitGroup // the goroutine of flushAside

	// dmu guards the receive deadline and whether a Deregister has put it
	// into the past to make the reader look up.
	dmu       sync.Mutex
	deadline  time.Time
	interrupt bool
}

var liveConns atomic.Int64

// Stats counts what lives in the process.
type Stats struct {
	Conns int64 // streams that are not closed
	STags int64 // STags that a peer could use, among them sinks of RDMA Reads
}

// ReadStats returns the current counts.
func ReadStats() Stats { return Stats{Conns: liveConns.Load(), STags: liveSTags.Load()} }

// allocate returns a stream with all of its memory, but without a connection.
func allocate(o Options) *Conn {
	c := &Conn{opt: o, counts: o.Domain.counts.shard(), wake: make(chan struct{}, 1), gone: make(chan struct{})}
	c.mem.init()
	c.rx.init(c.read, o.MaxSend, o.Markers)
	c.tx.init()
	// A peer may ask again as soon as a Response has reached it, and then that
	// is still in the batch that Flush is sending: IRD of them in the batch and
	// IRD behind it are no fault.
	answers := make([]WorkRequest, 2*o.IRD)
	for i := range answers {
		answers[i].Op = readResponse
		c.answers.push(&answers[i])
	}
	return c
}

// attach gives c its connection, and what startup has agreed on. prefix, at most
// llp.WindowLen bytes, is what has been read from nc behind the startup frame.
func (c *Conn) attach(nc net.Conn, prefix []byte, ird, ord int, crc, markersOut bool) {
	c.nc, c.ird, c.ord, c.crc, c.markersOut = nc, ird, ord, crc, markersOut
	c.tx.out.SetConn(nc)
	if sc, ok := nc.(syscall.Conn); ok {
		c.raw, _ = sc.SyscallConn()
	}
	for range 2 * (c.opt.IRD - ird) {
		c.answers.pop()
	}
	c.rx.win.Preload(prefix)
	c.opt.Domain.add(c)
	liveConns.Add(1)
}

// Peer is what the peer's startup frame said.
func (c *Conn) Peer() *Request { return &c.peer }

// IRD and ORD are the depths in force.
func (c *Conn) IRD() int { return c.ird }
func (c *Conn) ORD() int { return c.ord }

// CRC tells whether FPDUs carry CRCs.
func (c *Conn) CRC() bool { return c.crc }

func (c *Conn) LocalAddr() net.Addr  { return c.nc.LocalAddr() }
func (c *Conn) RemoteAddr() net.Addr { return c.nc.RemoteAddr() }

// SetReceiveDeadline bounds Receive; the zero time means no bound. After a
// time-out Receive may be called again.
func (c *Conn) SetReceiveDeadline(t time.Time) error {
	c.dmu.Lock()
	defer c.dmu.Unlock()
	c.deadline = t
	if c.interrupt {
		return nil // interrupted does it
	}
	return c.nc.SetReadDeadline(t)
}

// interruptRead makes a Receive that waits for the socket look up.
func (c *Conn) interruptRead() {
	c.dmu.Lock()
	defer c.dmu.Unlock()
	c.interrupt = true
	c.nc.SetReadDeadline(time.Unix(1, 0))
}

// interrupted tells whether err is no time-out but the work of interruptRead,
// which it undoes.
func (c *Conn) interrupted(err error) bool {
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		return false
	}
	c.dmu.Lock()
	defer c.dmu.Unlock()
	was := c.interrupt
	if was {
		c.interrupt = false
		c.nc.SetReadDeadline(c.deadline)
	}
	return was
}

// Close ends the stream at once. Everything in the send queue is done with
// ErrClosed; Receive returns the Reads that are not answered, and then an
// error.
func (c *Conn) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	c.mu.Unlock()
	close(c.gone)
	err := c.nc.Close()
	c.abandon(ErrClosed)
	c.mem.close()
	c.opt.Domain.remove(c)
	liveConns.Add(-1)
	return err
}

// CloseWrite sends what the queue holds and then ends our direction of the
// stream (RFC 5041, section 6.2.1): what is posted later fails. It does not
// wait for Reads that ORD holds up; the end comes behind them.
func (c *Conn) CloseWrite() error {
	c.end(nil, wire.Reason{})
	return nil
}

// Terminate ends the stream because of a failure on this side that no message
// of the peer has caused. The peer is told reason and nothing else (RFC 5040,
// section 7.1); why is what a later Post returns.
func (c *Conn) Terminate(reason wire.Reason, why error) {
	c.terminate(&StreamError{Reason: reason, Err: why}, nil, 0, nil)
}

// abandon fails what is posted and what will be.
func (c *Conn) abandon(err error) {
	c.mu.Lock()
	c.dead = true
	if c.err == nil {
		c.err = err
	}
	err = c.err
	c.flushReads(err)
	dead, due := c.queue.take(), c.due.take()
	c.mu.Unlock()
	c.finish(dead, err)
	c.finish(due, err)
}

// flushReads leaves the Reads that are not sent to Receive, and takes no more.
//
// Preconditions: c.mu is held.
func (c *Conn) flushReads(err error) {
	if c.readErr == nil {
		c.readErr = err
	}
	queue := c.queue.take()
	for wr := queue.pop(); wr != nil; wr = queue.pop() {
		if wr.Op == Read {
			c.flushed.push(wr)
		} else {
			c.queue.push(wr)
		}
	}
}

// emss is the effective segment size of the TCP connection in octets, or 0 if
// nc does not tell.
func (c *Conn) emss() (n int) {
	if c.raw == nil {
		return 0
	}
	c.raw.Control(func(fd uintptr) {
		n, _ = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_MAXSEG)
	})
	return n
}

// mulpdu is the size in octets of the largest ULPDU to send.
func (c *Conn) mulpdu() int {
	emss := c.emss()
	if emss <= 0 {
		emss = 1 << 16
	}
	return max(min(wire.MULPDU(emss, c.markersOut), c.opt.MaxULPDU), wire.MinMULPDU)
}

func (c *Conn) String() string {
	return fmt.Sprintf("iWARP %v-%v", c.LocalAddr(), c.RemoteAddr())
}

// STag names a tagged buffer.
type STag = wire.STag
