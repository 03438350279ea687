package rpcrdma

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/rdma/rpcrdma/oncrpc"
	"github.com/iser-target/iser-target/rdma/rpcrdma/wire"
	rdmap "github.com/iser-target/iser-target/rdma/wire"
	"github.com/iser-target/iser-target/tests/testkit"
)

// started is a call that runs in another goroutine.
type started struct {
	*Call
	done chan error
}

// begin makes a call in another goroutine.
func begin(t testing.TB, ctx context.Context, c *Conn, call *Call) *started {
	s := &started{call, make(chan error, 1)}
	go func() { s.done <- c.Do(ctx, call) }()
	return s
}

func (s *started) wait(t testing.TB) error {
	t.Helper()
	select {
	case err := <-s.done:
		return err
	case <-patient(t).Done():
		t.Fatal("the call does not return")
		return nil
	}
}

// received is a call as a rawPeer sees it.
type received struct {
	wire.Header
	payload []byte
	xid     string
}

func (p *rawPeer) call() (r received) {
	p.t.Helper()
	ev, err := p.event()
	if err != nil {
		p.t.Fatal(err)
	}
	payload, err := r.Parse(ev.Data)
	if err != nil {
		p.t.Fatal(err)
	}
	r.payload, r.xid = bytes.Clone(payload), fmt.Sprintf("%08x", r.XID)
	return r
}

// idle reports that the peer sends nothing for a moment.
func (p *rawPeer) idle(name string) {
	p.t.Helper()
	var ev rdma.Event
	p.rc.SetReceiveDeadline(time.Now().Add(50 * time.Millisecond))
	if err := p.rc.Receive(&ev); err == nil {
		p.t.Fatalf("%s: %x", name, ev.Data)
	}
}

// lists returns the write list and the reply chunk of r with the lengths replaced, as for a reply.
func (r *received) lists(writes []int, reply int) string {
	h := wire.Header{Proc: wire.Msg, Version: 1, HasReply: r.HasReply}
	for i, chunk := range r.Writes {
		chunk = append(wire.Chunk(nil), chunk...)
		for k := range chunk {
			chunk[k].Length = uint32(writes[i])
		}
		h.Writes = append(h.Writes, chunk)
	}
	for _, s := range r.Reply {
		s.Length = uint32(reply)
		h.Reply = append(h.Reply, s)
	}
	return fmt.Sprintf("%x", h.Append(nil)[16:])
}

// The requester keeps to the credits: one before the first reply, then the least of what it asks for
// and what was granted.
func TestRequesterCredits(t *testing.T) {
	for _, tt := range []struct {
		name   string
		ask    int
		grants []int // of the replies
		limits []int // calls in flight after each
	}{
		{"RPCRDMA-3.3.3-1 RPCRDMA-3.3.1-1 a grant of 4", 32, []int{4}, []int{4}},
		{"RPCRDMA-3.3.1-3 8 asked for, 32 granted", 8, []int{32}, []int{8}},
		{"RPCRDMA-3.3.1-4 the grant changes", 32, []int{12, 3, 12, 1}, []int{12, 3, 12, 1}},
		{"a grant of 0 counts as 1", 32, []int{0}, []int{1}},
		{"a grant of 2^32-1", 16, []int{1<<32 - 1}, []int{16}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p, c := rawService(t, private4096, Config{Ask: tt.ask})
			ctx := patient(t)
			const total = 100
			var calls []*started
			for range total {
				call, _ := newCall(0)
				calls = append(calls, begin(t, ctx, c, call))
			}
			held := []received{p.call()}
			p.idle("RPCRDMA-3.3.3-1: a second call before the first reply")
			answered := 0
			reply := func(grant int) {
				r := held[0]
				held = held[1:]
				p.send(header(r.xid, fmt.Sprintf("%08x", uint32(grant)), noChunks) + okReply(r.xid))
				answered++
			}
			for i, grant := range tt.grants {
				reply(grant)
				for len(held) > tt.limits[i] { // until the requester may send again
					reply(grant)
				}
				for len(held) < tt.limits[i] {
					r := p.call()
					if int(r.Credits) != tt.ask || r.Version != 1 {
						t.Fatalf("RPCRDMA-4.2.3-1 RPCRDMA-4.2.2-1: a call asks for %d credits, version %d", r.Credits, r.Version)
					}
					held = append(held, r)
				}
				p.idle("RPCRDMA-3.3.1-1: more calls than credits")
			}
			for answered < total {
				if len(held) == 0 {
					held = append(held, p.call())
				}
				reply(tt.grants[len(tt.grants)-1])
			}
			for _, s := range calls {
				if err := s.wait(t); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// What the requester sends, by the sizes of a call.
func TestRequesterForms(t *testing.T) {
	p, c := rawService(t, private4096, Config{})
	ctx := patient(t)
	for _, tt := range []struct {
		name            string
		item, opaque    int
		maxReply, into  int
		long            bool
		proc            wire.Proc
		reads           []int // positions
		writes, replies int
	}{
		{"RPCRDMA-4.2.4-4 a call of 4096 bytes", 0, 4096 - 28 - 40 - 8, 0, 0, false, wire.Msg, nil, 0, 0},
		{"RPCRDMA-3.3-1 RPCRDMA-3.5.3-1 a call of 4100 bytes", 0, 4096 - 28 - 40 - 4, 0, 0, false, wire.NoMsg, []int{0}, 0, 0},
		{"RPCRDMA-3.5.3-1 100 KiB", 0, 100 << 10, 0, 0, false, wire.NoMsg, []int{0}, 0, 0},
		{"an item of 4 KiB", 4096, 0, 0, 0, false, wire.Msg, []int{44}, 0, 0},
		{"a short item stays in the message", 100, 0, 0, 0, false, wire.Msg, nil, 0, 0},
		{"RPCRDMA-3.5.3-7 both", 5001, 5000, 0, 0, false, wire.NoMsg, []int{0, 44}, 0, 0},
		{"RPCRDMA-3.5.3-3 a short long call", 0, 8, 0, 0, true, wire.NoMsg, []int{0}, 0, 0},
		{"RPCRDMA-4.3.3-1 RPCRDMA-6.2-1 a long reply", 0, 0, 4096, 0, false, wire.Msg, nil, 0, 1},
		{"a short reply", 0, 0, 3000, 0, false, wire.Msg, nil, 0, 0},
		{"RPCRDMA-3.4.6-1 memory for an item", 0, 0, 100, 1 << 20, false, wire.Msg, nil, 1, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			call := &Call{Program: testProgram, Version: testVersion, Procedure: procEcho, MaxReply: tt.maxReply, Long: tt.long}
			if tt.into > 0 {
				call.Into = [][]byte{make([]byte, tt.into)}
			}
			e := call.Begin()
			e.Item(pattern(tt.item))
			e.Opaque(pattern(tt.opaque))
			s := begin(t, ctx, c, call)
			r := p.call()
			var reads []int
			whole := r.payload
			for _, seg := range r.Reads {
				reads = append(reads, int(seg.Position))
				b := p.read(seg.Handle, seg.Offset, int(seg.Length))
				if seg.Position == 0 {
					whole = b
				} else if !bytes.Equal(b, pattern(tt.item)) {
					t.Error("the chunk has other data")
				}
			}
			if r.Proc != tt.proc || fmt.Sprint(reads) != fmt.Sprint(tt.reads) || len(r.Writes) != tt.writes ||
				len(r.Reply) != tt.replies {
				t.Errorf("%v, reads at %v, %d write chunks, reply chunk %v", r.Proc, reads, len(r.Writes), r.Reply)
			}
			if xid, kind, _ := oncrpc.PeekType(whole); xid != r.XID || kind != oncrpc.MsgCall || len(whole)%4 != 0 {
				t.Errorf("RPCRDMA-4.2.1-1 RPCRDMA-3.5.3-6: XID %#x, type %d, %d bytes", xid, kind, len(whole))
			}
			p.send(header(r.xid, "00000020", r.lists([]int{0}, 0)) + okReply(r.xid))
			if err := s.wait(t); err != nil {
				t.Error(err)
			}
		})
	}
}

// Replies of the peer, and what becomes of the call.
func TestReplies(t *testing.T) {
	for _, tt := range []struct {
		name  string
		reply func(p *rawPeer, r *received) string
		want  func(call *Call, err error) bool
	}{
		{"a result in the write chunk", func(p *rawPeer, r *received) string {
			p.write(r.Writes[0][0].Handle, r.Writes[0][0].Offset, pattern(5001))
			return header(r.xid, "00000020", r.lists([]int{5001}, 0)) + okReply(r.xid) + "00001389"
		}, func(call *Call, err error) bool {
			return err == nil && bytes.Equal(call.Results.Item(8192), pattern(5001)) && call.Results.End() == nil
		}},
		{"a long reply", func(p *rawPeer, r *received) string {
			p.write(r.Reply[0].Handle, r.Reply[0].Offset, unhex(okReply(r.xid)+"00000000"))
			return r.xid + "00000001 00000020 00000001" + r.lists([]int{0}, 28)
		}, func(call *Call, err error) bool {
			return err == nil && len(call.Results.Item(8192)) == 0 && call.Results.End() == nil
		}},
		{"RPCRDMA-4.3.2.2-3 an unused chunk", func(p *rawPeer, r *received) string {
			p.write(r.Writes[0][0].Handle, r.Writes[0][0].Offset, pattern(5001))
			return header(r.xid, "00000020", r.lists([]int{0}, 0)) + okReply(r.xid) + "00000000"
		}, func(call *Call, err error) bool {
			return err == nil && len(call.Results.Item(8192)) == 0 && call.Results.End() == nil
		}},
		{"data in the message despite the chunk", func(p *rawPeer, r *received) string {
			return header(r.xid, "00000020", r.lists([]int{0}, 0)) + okReply(r.xid) + "00000004 01020304"
		}, func(call *Call, err error) bool {
			return err == nil && call.Results.Item(8192) == nil && errors.Is(call.Results.Err(), oncrpc.ErrNotReduced)
		}},
		{"a chunk for something that is no item", func(p *rawPeer, r *received) string {
			return header(r.xid, "00000020", r.lists([]int{8}, 0)) + okReply(r.xid) + "00000000"
		}, func(call *Call, err error) bool {
			return err == nil && call.Results.Uint32() == 0 && errors.Is(call.Results.End(), oncrpc.ErrNotEligible)
		}},
		{"more than the chunk holds", func(p *rawPeer, r *received) string {
			return header(r.xid, "00000020", r.lists([]int{8193}, 0)) + okReply(r.xid) + "00002001"
		}, func(call *Call, err error) bool { return errors.Is(err, ErrReply) }},
		{"another write list", func(p *rawPeer, r *received) string {
			return header(r.xid, "00000020", noChunks) + okReply(r.xid)
		}, func(call *Call, err error) bool { return errors.Is(err, ErrReply) }},
		{"another handle", func(p *rawPeer, r *received) string {
			r.Writes[0][0].Handle++
			return header(r.xid, "00000020", r.lists([]int{0}, 0)) + okReply(r.xid)
		}, func(call *Call, err error) bool { return errors.Is(err, ErrReply) }},
		{"a long reply that is empty", func(p *rawPeer, r *received) string {
			return r.xid + "00000001 00000020 00000001" + r.lists([]int{0}, 0)
		}, func(call *Call, err error) bool { return errors.Is(err, ErrReply) }},
		{"BRPC-5.2-4 BRPC-5.2-5 a call in the reply chunk", func(p *rawPeer, r *received) string {
			p.write(r.Reply[0].Handle, r.Reply[0].Offset, unhex(nullOf(r.xid)))
			return r.xid + "00000001 00000020 00000001" + r.lists([]int{0}, 40)
		}, func(call *Call, err error) bool { return errors.Is(err, ErrReply) }},
		{"a reply that is cut off", func(p *rawPeer, r *received) string {
			return header(r.xid, "00000020", r.lists([]int{0}, 0)) + r.xid + "00000001 00000000"
		}, func(call *Call, err error) bool { return errors.Is(err, ErrReply) }},
		{"RPCRDMA-4.5-7 ERR_CHUNK", func(p *rawPeer, r *received) string {
			return r.xid + "00000001 000f4240 00000004 00000002"
		}, func(call *Call, err error) bool {
			var e *RefusedError
			return errors.As(err, &e) && e.Code == wire.CodeChunk
		}},
		{"RPCRDMA-4.5-7 ERR_VERS", func(p *rawPeer, r *received) string {
			return r.xid + "00000001 00000000 00000004 00000001 00000002 00000003"
		}, func(call *Call, err error) bool {
			var e *RefusedError
			return errors.As(err, &e) && e.Code == wire.CodeVersion && e.Low == 2 && e.High == 3
		}},
		{"AUTH_ERROR", func(p *rawPeer, r *received) string {
			return header(r.xid, "00000020", r.lists([]int{0}, 0)) + r.xid + "00000001 00000001 00000001 00000005"
		}, func(call *Call, err error) bool { return isStatus(err, oncrpc.AuthError) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p, c := rawService(t, private4096, Config{})
			if limit, _ := c.Credits(); limit != 1 {
				t.Fatal(limit)
			}
			call := &Call{Program: testProgram, Version: testVersion, Procedure: procEcho, MaxReply: 8000,
				Into: [][]byte{make([]byte, 8192)}}
			call.Begin()
			s := begin(t, patient(t), c, call)
			r := p.call()
			p.send(tt.reply(p, &r))
			if err := s.wait(t); !tt.want(call, err) {
				t.Errorf("%v", err)
			}
			limit, inflight := c.Credits()
			if refused := strings.Contains(tt.name, "ERR_"); refused && limit != 1 || !refused && limit != 32 || inflight != 0 {
				t.Errorf("BRPC-4.1-6: limit %d, in flight %d", limit, inflight)
			}
			// RPCRDMA-4.5-7: nothing is sent again, and the connection works.
			next, _ := newCall(0)
			s = begin(t, patient(t), c, next)
			if r = p.call(); r.XID != next.XID() {
				t.Errorf("XID %#x, want %#x", r.XID, next.XID())
			}
			p.send(header(r.xid, "00000020", noChunks) + okReply(r.xid))
			if err := s.wait(t); err != nil {
				t.Error(err)
			}
		})
	}
}

// A requester drops these, and the call waits for its reply. It answers none of them.
func TestRequesterDrops(t *testing.T) {
	for _, tt := range []struct{ name, message string }{
		{"RPCRDMA-4.5-3 a flag of 2", header("XID", "00000020", "00000000 00000002 00000000")},
		{"RPCRDMA-4.5-3 a truncated list", header("XID", "00000020", "00000000 00000001 00000007")},
		{"RPCRDMA-4.5-3 another version", "XID 00000002 00000020 00000000" + noChunks},
		{"RPCRDMA-4.5-3 RDMA_MSGP", "XID 00000001 00000020 00000002" + noChunks},
		{"RPCRDMA-4.3.1-1 a read list", header("XID", "00000020",
			"00000001 00000018 00000001 00000004 0000000000000000 00000000 00000000 00000000") + okReply("XID")},
		{"BRPC-5.2-4 another XID in the reply", header("XID", "00000020", noChunks) + okReply("00000bad")},
		{"BRPC-2-2 an unknown XID", header("00000bad", "00000020", noChunks) + okReply("00000bad")},
		{"an rdma_err of 3", "XID 00000001 00000020 00000004 00000003"},
		{"a truncated ERR_VERS", "XID 00000001 00000020 00000004 00000001 00000001"},
		{"RDMA_DONE", "XID 00000001 00000020 00000003" + noChunks},
		{"RPCRDMA-4.2.4-2 a malformed call", header("00000bad", "00000020", "00000002 00000000 00000000")},
		{"a msg_type of 2", header("XID", "00000020", noChunks) + "XID 00000002"},
		{"short", "XID 00000001 00000020"}, {"empty", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p, c := rawService(t, private4096, Config{})
			call, _ := newCall(0)
			s := begin(t, patient(t), c, call)
			r := p.call()
			for range 40 {
				p.send(strings.ReplaceAll(tt.message, "XID", r.xid))
			}
			p.idle("RPCRDMA-4.2.4-2: the requester answers")
			if limit, inflight := c.Credits(); limit != 1 || inflight != 1 {
				t.Errorf("limit %d, in flight %d", limit, inflight)
			}
			p.send(header(r.xid, "00000020", noChunks) + okReply(r.xid))
			if err := s.wait(t); err != nil {
				t.Error(err)
			}
		})
	}
}

// The peer invalidates an STag of the call, of another call, and one that does not exist.
func TestForeignInvalidation(t *testing.T) {
	call := func(c *Conn, t *testing.T) *started {
		call := &Call{Program: testProgram, Version: testVersion, Procedure: procEcho, Into: [][]byte{make([]byte, 64)}}
		call.Begin()
		return begin(t, patient(t), c, call)
	}
	for _, tt := range []struct {
		name   string
		stag   func(own, other uint32) uint32
		reason rdmap.Reason
	}{
		{"its own", func(own, _ uint32) uint32 { return own }, rdmap.Reason{}},
		{"RPCRDMA-8797.4.1-2 of another call", func(_, other uint32) uint32 { return other }, rdmap.ReasonProtection},
		{"one that does not exist", func(own, other uint32) uint32 { return own ^ other ^ 0x5555 }, rdmap.ReasonNotInvalidated},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p, c := rawService(t, private4096, Config{})
			neighbour, _ := connPair(t, Config{}, Config{Programs: testPrograms(newWaits())})
			first := call(c, t)
			r := p.call()
			p.send(header(r.xid, "00000020", r.lists([]int{0}, 0)) + okReply(r.xid))
			if err := first.wait(t); err != nil {
				t.Fatal(err)
			}
			one, two := call(c, t), call(c, t)
			a, b := p.call(), p.call()
			if a.XID != one.XID() {
				a, b = b, a
			}
			p.post(&rdma.WorkRequest{Op: rdma.SendInvalidate, STag: rdma.STag(tt.stag(a.Writes[0][0].Handle, b.Writes[0][0].Handle)),
				Data: unhex(header(a.xid, "00000020", a.lists([]int{0}, 0)) + okReply(a.xid))})
			p.rc.Flush()
			if tt.reason == (rdmap.Reason{}) {
				if err := one.wait(t); err != nil {
					t.Error(err)
				}
				p.send(header(b.xid, "00000020", b.lists([]int{0}, 0)) + okReply(b.xid))
				if err := two.wait(t); err != nil {
					t.Error(err)
				}
				return
			}
			p.ends(tt.name, tt.reason)
			for _, s := range []*started{one, two} {
				if err := s.wait(t); !errors.Is(err, ErrLost) {
					t.Errorf("the call: %v", err)
				}
			}
			doNull(t, neighbour)
		})
	}
}

// A call that is given up is fenced, and keeps its credit until the peer has answered.
func TestCancel(t *testing.T) {
	p, c := rawService(t, private4096, Config{Ask: 1})
	ctx, cancel := context.WithCancel(t.Context())
	into := make([]byte, 64)
	call := &Call{Program: testProgram, Version: testVersion, Procedure: procEcho, Into: [][]byte{into}}
	call.Begin()
	s := begin(t, ctx, c, call)
	r := p.call()
	cancel()
	if err := s.wait(t); err != context.Canceled {
		t.Fatal(err)
	}
	queued, _ := newCall(0)
	short, stop := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer stop()
	if err := c.Do(short, queued); err != context.DeadlineExceeded {
		t.Errorf("a call while the credit is in use: %v", err)
	}
	next, _ := newCall(0)
	waits := begin(t, patient(t), c, next)
	p.idle("RPCRDMA-3.3.1-1: a call without a credit")
	p.send(header(r.xid, "00000020", r.lists([]int{0}, 0)) + okReply(r.xid)) // late
	r2 := p.call()
	if r2.XID != next.XID() {
		t.Errorf("BRPC-2.4-1: XID %#x, want %#x", r2.XID, next.XID())
	}
	p.send(header(r2.xid, "00000020", noChunks) + okReply(r2.xid))
	if err := waits.wait(t); err != nil {
		t.Fatal(err)
	}
	// RPCRDMA-4.4.1-1: the memory of the call is out of reach.
	p.write(r.Writes[0][0].Handle, r.Writes[0][0].Offset, []byte("late"))
	p.ends("RPCRDMA-4.4.1-1", rdmap.ReasonInvalidSTag)
	if !bytes.Equal(into, make([]byte, 64)) {
		t.Error("RPCRDMA-4.4.1-1: the peer has written to the memory of a call that was given up")
	}
}

// When Do returns, the peer can reach nothing of the call any longer.
func TestFence(t *testing.T) {
	p, c := rawService(t, private4096, Config{})
	into := make([]byte, 64)
	call := &Call{Program: testProgram, Version: testVersion, Procedure: procEcho, Into: [][]byte{into}}
	call.Begin()
	s := begin(t, patient(t), c, call)
	r := p.call()
	p.send(header(r.xid, "00000020", r.lists([]int{0}, 0)) + okReply(r.xid))
	if err := s.wait(t); err != nil {
		t.Fatal(err)
	}
	p.write(r.Writes[0][0].Handle, 0, []byte("late"))
	p.ends("RPCRDMA-4.4.1-1", rdmap.ReasonInvalidSTag)
	if !bytes.Equal(into, make([]byte, 64)) {
		t.Error("RPCRDMA-4.4.1-1: the peer has written to the memory of a call that is over")
	}
}

// RPCRDMA-8.1-1: a write beyond the region of a call ends the connection and changes nothing.
func TestBounds(t *testing.T) {
	p, c := rawService(t, private4096, Config{})
	memory := make([]byte, 128)
	call := &Call{Program: testProgram, Version: testVersion, Procedure: procEcho, Into: [][]byte{memory[:64]}}
	call.Begin()
	s := begin(t, patient(t), c, call)
	r := p.call()
	p.write(r.Writes[0][0].Handle, r.Writes[0][0].Offset+60, []byte("8 bytes."))
	p.ends("RPCRDMA-8.1-1", rdmap.ReasonBounds)
	if err := s.wait(t); !errors.Is(err, ErrLost) {
		t.Error(err)
	}
	if !bytes.Equal(memory, make([]byte, 128)) {
		t.Error("RPCRDMA-8.1-1: memory outside of the region was written")
	}
}

// RPCRDMA-4.5.4-1: a requester closes the connection if it cannot fence the memory, because the peer reads it
// without an end.
func TestFenceFails(t *testing.T) {
	p, c := rawService(t, private4096, Config{})
	ctx, cancel := context.WithCancel(t.Context())
	call := &Call{Program: testProgram, Version: testVersion, Procedure: procEcho}
	call.Begin().Item(make([]byte, 64<<20))
	s := begin(t, ctx, c, call)
	r := p.call()
	p.post(&rdma.WorkRequest{Op: rdma.Read, Data: make([]byte, 64<<20), STag: rdma.STag(r.Reads[0].Handle)})
	p.rc.Flush() // and it does not receive the response
	testkit.Eventually(t, "the response is stuck", func() bool {
		before, owed := c.rc.Taken()
		time.Sleep(20 * time.Millisecond)
		after, _ := c.rc.Taken()
		return before == after && owed > 1<<10
	})
	cancel()
	if err := s.wait(t); err != context.Canceled {
		t.Errorf("the call: %v", err)
	}
	within(t, "RPCRDMA-4.5.4-1", c.Done())
	if err := c.Err(); err != errFence {
		t.Errorf("RPCRDMA-4.5.4-1: %v", err)
	}
}

// V-RPCRDMA-2: the NULL call as FPDU, and RPCRDMA-3.4.6.1-1: segments are joined by the lengths that come back.
func TestFilled(t *testing.T) {
	sent := wire.Chunk{{Handle: 0x6601, Length: 4096, Offset: 0x1000}, {Handle: 0x6602, Length: 4096, Offset: 0x9000}}
	got := wire.Chunk{{Handle: 0x6601, Length: 4096, Offset: 0x1000}, {Handle: 0x6602, Length: 905, Offset: 0x9000}}
	if n, ok := filled(got, sent); n != 5001 || !ok {
		t.Errorf("RPCRDMA-3.4.6.1-1: %d bytes, %t", n, ok)
	}
	if _, ok := filled(got[:1], sent); ok {
		t.Error("RPCRDMA-3.4.6-3: a segment is missing")
	}
}
