package capture

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/rdma/llp"
)

const (
	// MaxCaptures is how many captures may run at one time.
	MaxCaptures = 4
	// MinSize is the smallest limit of a file, in bytes.
	MinSize = 64 << 10

	// bufferLen is half of the memory of a capture, in bytes: one buffer is filled while
	// the other is written.
	bufferLen = 8 << 20
	// maxFlows bounds the connections of a capture, so that a session that reconnects all
	// the time does not take more memory.
	maxFlows = 4096
	// statisticsLen is reserved for the end of a file.
	statisticsLen = 1 << 10
	// maxReason bounds the reason that goes into the file, in bytes.
	maxReason = 512
)

// Start returns these errors.
var (
	ErrTooMany = fmt.Errorf("%d captures are running, the most that are possible", MaxCaptures)
	ErrTaken   = errors.New("a capture of the session is already running")
)

// A kind of record.
type kind uint8

const (
	data      kind = iota
	beginning      // data of the head
	end            // of a direction
)

// A record describes bytes that passed through a connection.
type record struct {
	kind kind
	dir  direction
	flow uint32
	time int64  // Unix time in ns
	pos  uint64 // of the first byte in its direction
}

// The bytes follow their record:
//
//	kind 1, direction 1, reserved 2, flow 4, time 8, pos 8, length 4
const recordLen = 28

func (r *record) append(b []byte, n int) []byte {
	b = append(b, byte(r.kind), byte(r.dir), 0, 0)
	b = le.AppendUint32(b, r.flow)
	b = le.AppendUint64(b, uint64(r.time))
	b = le.AppendUint64(b, r.pos)
	return le.AppendUint32(b, uint32(n))
}

func parse(b []byte) (r record, payload, rest []byte) {
	r = record{kind: kind(b[0]), dir: direction(b[1]), flow: le.Uint32(b[4:]), time: int64(le.Uint64(b[8:])), pos: le.Uint64(b[16:])}
	n := recordLen + int(le.Uint32(b[24:]))
	return r, b[recordLen:n], b[n:]
}

// A Capture records one session.
type Capture struct {
	hub  *Hub
	tsih uint16
	stop context.CancelCauseFunc
	ctx  context.Context

	more chan struct{} // holds a value when filling is not empty

	mu      sync.Mutex
	filling []byte  // records
	joined  []*flow // since the last take
	nflows  uint32
	dropped uint64 // records, or parts of them, that did not fit
	tails   uint64 // lost bytes that no record followed

	// Of Run:
	file      *file
	max       int64
	flows     map[uint32]*flow
	buf       []byte // one packet
	unit      []byte // one PDU or FPDU
	filter    Filter
	tasks     map[uint32]bool // by ITT: whether the filter selects it
	stags     map[stag]bool   // of initiators
	sinks     map[stag]bool   // of RDMA Reads
	lostBytes uint64
	sum       schema.Summary
}

// put appends a record of parts to the buffer, or of as much of them as fits, and returns
// how many bytes fit.
func (k *Capture) put(r record, parts ...[]byte) (n int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	want := size(parts)
	room := cap(k.filling) - len(k.filling) - recordLen
	if n = min(want, room); n < want {
		k.dropped++
	}
	if room < 0 || n == 0 && want > 0 {
		return 0
	}
	if len(k.filling) == 0 {
		select {
		case k.more <- struct{}{}:
		default:
		}
	}
	k.filling = r.append(k.filling, n)
	for _, p := range parts {
		k.filling = append(k.filling, p[:min(len(p), n)]...)
		n -= min(len(p), n)
	}
	return min(want, room)
}

// lose counts bytes that did not fit and that no record followed.
func (k *Capture) lose(n uint64) {
	k.mu.Lock()
	k.tails += n
	k.mu.Unlock()
}

// add creates a flow and returns its number.
func (k *Capture) add(initiator, target net.Addr) (number uint32, ok bool) {
	from, to := addrPort(initiator), addrPort(target)
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.nflows == maxFlows || !from.IsValid() || from.Addr().Is4() != to.Addr().Is4() {
		return 0, false
	}
	k.joined = append(k.joined, newFlow(k.nflows, from, to))
	k.nflows++
	return k.nflows - 1, true
}

func addrPort(a net.Addr) netip.AddrPort {
	t, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.AddrPort{}
	}
	p := t.AddrPort()
	return netip.AddrPortFrom(p.Addr().Unmap(), p.Port())
}

// take returns the buffer and replaces it with an empty one.
func (k *Capture) take(empty []byte) (full []byte) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, f := range k.joined {
		k.flows[uint32(len(k.flows))] = f
	}
	k.joined = nil
	full, k.filling = k.filling, empty[:0]
	return full
}

// Stop ends Run, which returns the reason in its Summary.
func (k *Capture) Stop(reason error) { k.stop(reason) }

// errFull returns the reason of a capture whose file has reached its limit.
func errFull(max int64) error { return fmt.Errorf("the file has reached its limit of %d bytes", max) }

// Run writes the file, of at most max bytes, to w. It returns when ctx ends, whose cause is
// the reason in the Summary, when Stop is called, when the file is full, or when w fails.
// Only in the last case it returns an error, which is that of w. The file names the
// application, and the session by name and description. Run must be called exactly once.
func (k *Capture) Run(ctx context.Context, w io.Writer, max int64, application, name, description string) (schema.Summary, error) {
	defer k.hub.end(k)
	defer context.AfterFunc(ctx, func() { k.stop(context.Cause(ctx)) })()
	start := time.Now()
	k.file, k.max, k.flows = newFile(w, application, name, description), max, map[uint32]*flow{}
	k.tasks, k.stags, k.sinks = map[uint32]bool{}, map[stag]bool{}, map[stag]bool{}
	k.file.flush()
	other := make([]byte, 0, bufferLen)
	for last := false; !last && k.file.err == nil; {
		select {
		case <-k.more:
		case <-k.ctx.Done():
			last = true
			k.hub.end(k) // no record follows
		}
		full := k.take(other)
		for b := full; len(b) > 0 && k.file.err == nil; {
			r, payload, rest := parse(b)
			if !k.packets(&r, payload) {
				k.stop(errFull(max))
				k.sum.Full = true
				last = true
				break
			}
			b = rest
		}
		k.file.flush()
		other = full
	}
	k.hub.end(k)
	k.mu.Lock()
	k.sum.Lost = k.lostBytes + k.tails
	dropped := k.dropped
	k.mu.Unlock()
	if k.file.err != nil {
		k.stop(k.file.err)
	}
	k.sum.Reason = context.Cause(k.ctx).Error()
	k.file.statistics(start, time.Now(), k.sum.Packets, dropped,
		fmt.Sprintf("bytes lost: %d; ended: %s", k.sum.Lost, k.sum.Reason[:min(len(k.sum.Reason), maxReason)]))
	k.file.flush()
	k.sum.Size = k.file.size()
	return k.sum, k.file.err
}

// A Hub knows the connections of all sessions, and the captures.
type Hub struct {
	mu       sync.Mutex
	conns    map[*Conn]uint16 // TSIHs
	captures map[uint16]*Capture
}

// NewHub returns a Hub without connections.
func NewHub() *Hub { return &Hub{conns: map[*Conn]uint16{}, captures: map[uint16]*Capture{}} }

// Tap returns nc as a connection that can be recorded.
func (h *Hub) Tap(nc *net.TCPConn) *Conn {
	c := &Conn{Conn: nc, hub: h, socket: llp.NewSocket(nc)}
	c.on.Store(true)
	return c
}

// Join assigns c to the session, whose capture, if one is running, records c from then on.
func (h *Hub) Join(c *Conn, tsih uint16) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if c.closed {
		return
	}
	h.conns[c] = tsih
	if k := h.captures[tsih]; k != nil {
		c.attach(k)
	}
}

func (h *Hub) leave(c *Conn) {
	h.mu.Lock()
	defer h.mu.Unlock()
	c.closed = true
	delete(h.conns, c)
	c.detach()
}

// Start begins to record all connections of a session and those that join it. The caller
// must call Run. The error is ErrTaken or ErrTooMany.
func (h *Hub) Start(tsih uint16) (*Capture, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.captures[tsih] != nil {
		return nil, ErrTaken
	}
	if len(h.captures) == MaxCaptures {
		return nil, ErrTooMany
	}
	k := &Capture{hub: h, tsih: tsih, more: make(chan struct{}, 1), filling: make([]byte, 0, bufferLen)}
	k.ctx, k.stop = context.WithCancelCause(context.Background())
	h.captures[tsih] = k
	for c, of := range h.conns {
		if of == tsih {
			c.attach(k)
		}
	}
	return k, nil
}

// Find returns the capture of the session, or nil.
func (h *Hub) Find(tsih uint16) *Capture {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.captures[tsih]
}

// end removes k and detaches its connections. It does nothing the second time.
func (h *Hub) end(k *Capture) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.captures[k.tsih] != k {
		return
	}
	delete(h.captures, k.tsih)
	for c, of := range h.conns {
		if of == k.tsih {
			c.detach()
		}
	}
}
