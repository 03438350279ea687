// Package rdma is an iWARP engine in user space: RDMAP (RFC 5040) over DDP (RFC 5041) over MPA (RFC
// 5044, RFC 6581) over a TCP connection. It implements both the Initiator and the Responder.
//
// # Starting
//
// Respond and Initiate exchange the MPA startup frames and return a Conn. A protocol that starts on
// the byte stream and changes to RDMA later allocates the stream first, with NewResponder.
//
// # Receiving
//
// Conn.Receive is the whole receive side. It reads the socket, checks and places segments, and
// returns when a Send of the peer or the answer to a posted Read is complete. One goroutine at a
// time calls it. While nobody calls it, TCP holds the peer back. That replaces posted receive
// buffers: no Send can arrive without a buffer (RFC 5041, section 7.1, allows it), and the memory
// of a connection has a limit that is known in advance.
//
// # Sending
//
// Post puts a WorkRequest into the send queue and never waits. Flush sends what the queue holds. If
// several goroutines call Flush, the first one sends for all, in as few system calls as it can.
//
// # Memory
//
// Register gives the peer access to a buffer under a new STag, for RDMA Reads, RDMA Writes or both.
// Deregister takes the access back and waits until nothing uses the buffer.
//
// # Endings
//
// A message that breaks a rule ends the stream: the peer gets a Terminate and
// Receive returns a *StreamError. Before Receive returns its final error it returns
// every posted Read, and every other WorkRequest goes back through its Done.
package rdma

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/rdma/llp"
	"github.com/iser-target/iser-target/rdma/wire"
)

// A Conn is one RDMAP stream. Receive, Pending and Unread belong to one goroutine at
// a time. All other methods may be called at any time.
type Conn struct {
	nc         net.Conn
	raw        syscall.RawConn // nil if nc is no socket
	opt        Options
	peer       Request // what the peer's startup frame said
	crc        bool    // both directions carry CRCs
	markersOut bool    // the peer requires Markers
	ird        int

	mem     memory
	counts  *countShard
	fetched atomic.Uint64 // bytes of Read Responses that have come
	rx      receiver
	tx      sender

	// peerStarted says that the first FPDU has come. Until then a Responder must not
	// send (RFC 5044, section 7.1.2).
	peerStarted atomic.Bool
	unheard     atomic.Bool  // nudge waits for the first FPDU
	rtrSend     bool         // the first FPDU may be an empty Send as RTR
	rtr         *WorkRequest // our own RTR; Receive does not return it

	// mu guards what the sending and the receiving side share.
	mu              sync.Mutex
	queue           list   // posted, not taken by a Flush yet
	due             list   // Read Responses, not taken by a Flush yet
	reads           list   // RDMA Reads that wait for their Response, in order
	nreads          int    // len of reads
	uncounted       bool   // Close has subtracted the sinks of reads from liveSTags
	ord             int    // limit of nreads
	mostORD         int    // limit of ord
	flushed         list   // Reads that nobody will answer; Receive returns them
	err             error  // why nothing more can be posted
	readErr         error  // why no Read can be posted
	ending          bool   // our direction ends after queue and due
	terminateFPDU   []byte // the last FPDU of our direction, a Terminate; or nil
	terminateReason wire.Reason
	ended           bool   // our direction of the stream has ended
	broken          error  // of a write that has failed
	dead            bool   // abandon has been called
	flushing        bool   // a goroutine is in Flush
	batches         uint64 // that Flush has sent
	sentUnheard     uint64 // of these, those that may have left before the peer's first FPDU; for nudge
	answers         list   // free Read Responses
	unmade          int    // Read Responses that can be made
	requests        list   // free stand-ins for Reads
	closed          bool

	paused    atomic.Bool // see Pause
	impatient bool        // see SetImpatient; for the goroutine in Receive

	// The goroutine that flushes for Receive, started when first needed.
	wake       chan struct{} // has room for one
	gone       chan struct{} // closed by Close
	afterFlush func()        // of SetFlushed, or nil
	deferred   atomic.Bool   // Defer was called: Flush before Receive waits
	refers     atomic.Bool   // see RefersPages; written by the goroutine in Flush

	aside sync.WaitGroup // that goroutine, and nudge

	// dmu guards the receive deadline. interrupt says that a Deregister has put the
	// deadline of the socket into the past, to interrupt the reader.
	dmu       sync.Mutex
	deadline  time.Time
	interrupt bool
}

var liveConns atomic.Int64

// Stats counts what exists in the process.
type Stats struct {
	Conns int64 // open streams
	STags int64 // STags that a peer can use, including the sinks of RDMA Reads
}

// ReadStats returns the current counts.
func ReadStats() Stats { return Stats{Conns: liveConns.Load(), STags: liveSTags.Load()} }

// allocate returns a stream with the memory for its startup, before it has a connection.
func allocate(o Options) *Conn {
	c := &Conn{opt: o, counts: o.Domain.counts.shard(), wake: make(chan struct{}, 1), gone: make(chan struct{})}
	c.mem.init()
	c.rx.init(c.read, o.MaxSend, o.Markers)
	c.tx.init()
	return c
}

// attach gives c its connection and the result of the startup. prefix is what was
// read from nc after the startup frame, at most llp.WindowLen bytes.
func (c *Conn) attach(nc net.Conn, prefix []byte, ird, ord int, crc, markersOut bool) {
	c.nc, c.ird, c.ord, c.mostORD, c.crc, c.markersOut = nc, ird, ord, ord, crc, markersOut
	c.tx.out.SetConn(nc)
	c.rx.one, c.rx.both = llp.Readers(nc)
	if sc, ok := nc.(syscall.Conn); ok {
		c.raw, _ = sc.SyscallConn()
	}
	// A peer may send its next Read Request as soon as a Response has arrived, when
	// that Response is still in the batch that Flush is sending. So IRD Responses
	// in the batch and IRD more in the queue are no fault.
	c.unmade = 2 * ird
	c.rx.win.Preload(prefix)
	c.opt.Domain.conns.Store(c, nil)
	liveConns.Add(1)
}

// Grow gives the stream its full receive window and memory of its own for sending, for a peer that the ULP trusts with that memory. The
// goroutine that calls Receive calls it.
func (c *Conn) Grow() {
	c.rx.win.Grow()
	if c.rx.both != nil {
		c.rx.win.Scatter(c.readBoth)
	}
	c.rx.long = llp.LongData
	c.tx.out.Keep()
}

// SetImpatient makes Receive return an os.ErrDeadlineExceeded when it would wait, unless it is in an FPDU that it cannot leave: one with
// Markers, or longer than its window. SetImpatient(false) undoes that. It returns false if the stream is no socket. The goroutine that calls
// Receive calls it.
func (c *Conn) SetImpatient(on bool) bool {
	c.impatient = on && c.raw != nil
	c.rx.win.Patience = nil
	if c.impatient {
		c.rx.win.Patience = c.patience
	}
	return c.raw != nil
}

// Missing returns how many bytes Receive wanted when SetImpatient made it return.
func (c *Conn) Missing() int { return c.rx.win.Missing() }

// SetMaxSend changes how long a Send of the peer may be, in bytes. The goroutine that calls Receive calls it, between two Sends.
func (c *Conn) SetMaxSend(n int) { c.rx.maxSend = n }

// SetSink makes Sends that do not stay in the window of the stream go to memory of the ULP: their first bytes, as many as head says, to Event.Head, and the
// others to what sink returns for those. That is too little, or nil, if the Send shall go to memory of the stream, as shorter ones do. The stream writes to
// the memory until it returns the Send. Receive calls sink. SetSink is called before Receive.
func (c *Conn) SetSink(head int, sink func(head []byte) []byte) {
	c.rx.head, c.rx.sink = make([]byte, head), sink
}

// SetFlushed makes Flush call f after the WorkDones of messages that have left together. The WorkDones without an error, and f, come from one goroutine at a
// time. SetFlushed is called before the first Flush.
func (c *Conn) SetFlushed(f func()) { c.afterFlush = f }

// Size returns how many bytes the buffers of the stream can have after SetMaxSend(maxSend): window, queue, a Send in several
// segments, and with Markers two FPDUs.
func (c *Conn) Size(maxSend int) int {
	n := llp.WindowLen + llp.GatherLen + maxSend
	if c.rx.markers {
		n += 2 * llp.WindowLen
	}
	return n
}

// Peer returns the content of the peer's startup frame.
func (c *Conn) Peer() *Request { return &c.peer }

// IRD returns how many RDMA Read Requests of the peer may be unanswered.
func (c *Conn) IRD() int { return c.ird }

// ORD returns how many RDMA Read Requests of ours may be unanswered.
func (c *Conn) ORD() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ord
}

// SetORD sets ORD to n, for a ULP that has agreed on it with the peer (RFC 5040, section 6.1), and
// returns the new ORD. That is never more than Options.ORD and what the peer's startup frame has stated.
func (c *Conn) SetORD(n int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ord = max(0, min(n, c.mostORD))
	return c.ord
}

// CRC reports whether FPDUs carry CRCs.
func (c *Conn) CRC() bool { return c.crc }

// Markers reports whether the FPDUs of the peer and ours carry Markers.
func (c *Conn) Markers() (in, out bool) { return c.rx.markers, c.markersOut }

// LocalAddr returns the local address of the TCP connection.
func (c *Conn) LocalAddr() net.Addr { return c.nc.LocalAddr() }

// RemoteAddr returns the peer's address of the TCP connection.
func (c *Conn) RemoteAddr() net.Addr { return c.nc.RemoteAddr() }

// SetReceiveDeadline limits how long Receive waits. The zero time means no limit.
// After a time-out Receive may be called again.
func (c *Conn) SetReceiveDeadline(t time.Time) error {
	c.dmu.Lock()
	defer c.dmu.Unlock()
	c.deadline = t
	if c.interrupt {
		return nil // interrupted sets the deadline
	}
	return c.nc.SetReadDeadline(t)
}

// interruptRead interrupts a Receive that waits for the socket.
func (c *Conn) interruptRead() {
	c.dmu.Lock()
	defer c.dmu.Unlock()
	c.interrupt = true
	c.nc.SetReadDeadline(time.Unix(1, 0))
}

// interrupted reports whether err comes from interruptRead and not from the
// caller's deadline. It restores that deadline.
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

// Close ends the stream at once. Every WorkRequest in the send queue is done with
// ErrClosed. Receive returns the Reads without an answer, and then an error.
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
	c.mu.Lock()
	liveSTags.Add(-int64(c.nreads)) // the owner need not call Receive again
	c.uncounted = true
	c.mu.Unlock()
	c.mem.close()
	c.opt.Domain.conns.Delete(c)
	liveConns.Add(-1)
	return err
}

// CloseWrite sends what the queue holds and then ends our direction of the stream
// (RFC 5041, section 6.2.1). A later Post fails. CloseWrite does not wait for Reads
// that ORD holds up; the end follows them.
func (c *Conn) CloseWrite() error {
	c.end(nil, wire.Reason{})
	return nil
}

// Terminate ends the stream because of a local failure that no message of the peer has caused. The
// Terminate carries only reason (RFC 5040, section 7.1). A later Post returns why.
func (c *Conn) Terminate(reason wire.Reason, why error) {
	c.terminate(&StreamError{Reason: reason, Err: why}, nil, 0, nil)
}

// abandon fails every WorkRequest that is in the queue and every later Post.
func (c *Conn) abandon(err error) {
	c.mu.Lock()
	c.dead = true
	c.err = cmp.Or(c.err, err)
	err = c.err
	c.flushReads(err)
	dead, due := c.queue.take(), c.due.take()
	c.mu.Unlock()
	c.finish(dead, err)
	c.finish(due, err)
}

// flushReads moves the queued Reads to flushed, and lets Post refuse Reads with err.
//
// Preconditions: c.mu is held.
func (c *Conn) flushReads(err error) {
	held(&c.mu)
	c.readErr = cmp.Or(c.readErr, err)
	queue := c.queue.take()
	for wr := queue.pop(); wr != nil; wr = queue.pop() {
		if wr.Op == Read {
			c.flushed.push(wr)
		} else {
			c.queue.push(wr)
		}
	}
}

// popRead removes the oldest Read that waits for its Response. It returns nil if no Read waits.
//
// Preconditions: c.mu is held.
func (c *Conn) popRead() *WorkRequest {
	held(&c.mu)
	wr := c.reads.pop()
	if wr == nil {
		return nil
	}
	c.nreads--
	if !c.uncounted {
		liveSTags.Add(-1)
	}
	return wr
}

// Taken returns a number that grows as the peer takes what was flushed, and by how much it grows until
// the peer has taken all that the network has now: bytes, unless the stream is no socket.
func (c *Conn) Taken() (taken, owed uint64) {
	if taken, owed, ok := llp.Taken(c.nc); ok {
		return taken, owed
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.flushing {
		owed = 1
	}
	return c.batches, owed
}

// emss returns the effective segment size of a TCP connection in bytes, or 0 if nc is no socket.
func emss(nc net.Conn) int {
	sc, ok := nc.(syscall.Conn)
	if !ok {
		return 0
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return 0
	}
	return emssOf(raw)
}

func emssOf(raw syscall.RawConn) (n int) {
	raw.Control(func(fd uintptr) {
		n, _ = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_MAXSEG)
	})
	return n
}

// mulpdu returns the size in bytes of the largest ULPDU to send.
func (c *Conn) mulpdu() int {
	emss := 0
	if c.raw != nil {
		emss = emssOf(c.raw)
	}
	if emss <= 0 {
		emss = 1 << 16
	}
	return max(min(wire.MULPDU(emss, c.markersOut), c.opt.MaxULPDU), wire.MinMULPDU)
}

// String returns the protocol and both addresses.
func (c *Conn) String() string {
	return fmt.Sprintf("iWARP %v-%v", c.LocalAddr(), c.RemoteAddr())
}

// STag names a tagged buffer: memory that a peer can reach.
type STag = wire.STag
