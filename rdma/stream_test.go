package rdma

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/iser-target/iser-target/rdma/wire"
	"github.com/iser-target/iser-target/rdma/wire/vectors"
	"github.com/iser-target/iser-target/tests/testkit"
)

// TestOperationsOnTheWire compares each operation with its bytes on the wire. What holds for
// every row: RDMAP is the ULP of DDP (RDMAP-3.1-1), one RDMA message is one DDP message
// (RDMAP-3.1-3), and nothing else is sent (RDMAP-6.1-1). Operations leave in the order of
// Post (DDP-5.3-1, RDMAP-5.5-10, RDMAP-5.3-9, RDMAP-5.1-6, RDMAP-5.2.1-7). The headers have
// the form of DDP-4.2-1, DDP-4.3-1 and RDMAP-4.2-1; their first RsvdULP byte is RDMAP's
// control field (DDP-4.2-2, DDP-4.3-2, RDMAP-4.1-1, RDMAP-4.1-2, RDMAP-3.1-6).
func TestOperationsOnTheWire(t *testing.T) {
	p, c := responder(t, Options{MaxULPDU: 128})
	p.send(send1)
	receive(t, c)
	payload := func(from, to int) string {
		var b []byte
		for i := from; i < to; i++ {
			b = append(b, byte(i))
		}
		return hex.EncodeToString(b)
	}
	data := unhex(payload(0, 200))
	for _, tt := range []struct {
		id   string
		wr   WorkRequest
		want []string
	}{
		// An untagged segment on queue 0 with MSN 1 and MO 0: DDP-4.1-2, DDP-4.3-8, DDP-4.3-11,
		// RDMAP-3.1-2, RDMAP-3.1-5, RDMAP-3.2-1, RDMAP-3.2-3, RDMAP-3.2-4, RDMAP-4.6-1, RDMAP-5.3-1,
		// RDMAP-5.3-8. The Invalidate STag is 0: RDMAP-4.1-10.
		{"RDMAP-3.2-2 Send", WorkRequest{Op: Send, Data: data[:3]},
			[]string{"4143 00000000 00000000 00000001 00000000 000102"}},
		// DDP-4.4-2, DDP-4.3-7
		{"RDMAP-5.3-10 DDP-5.2-10 empty Send", WorkRequest{Op: Send},
			[]string{"4143 00000000 00000000 00000002 00000000"}},
		// RDMAP-4.1-3
		{"RDMAP-5.3-12 Send with Invalidate",
			WorkRequest{Op: SendInvalidate, STag: 0xcafef00d, Head: data[:1], Data: data[1:2]},
			[]string{"4144 cafef00d 00000000 00000003 00000000 0001"}},
		{"RDMAP-4.1-10 Send with SE", WorkRequest{Op: SendSE, STag: 0xcafef00d, Data: data[:1]},
			[]string{"4145 00000000 00000000 00000004 00000000 00"}},
		// L only in the last segment, which has the highest MO: DDP-4.1-3, DDP-4.1-4, DDP-4.1-5,
		// DDP-4.1-6, DDP-4.1-7, DDP-4.1-8, DDP-5.3-2
		{"DDP-4.3-4 DDP-4.3-6 DDP-4.3-10 Send with SE and Invalidate, two segments",
			WorkRequest{Op: SendSEInvalidate, STag: 0xcafef00d, Head: data[:10], Data: data[10:112]},
			[]string{"0146 cafef00d 00000000 00000005 00000000" + payload(0, 110),
				"4146 cafef00d 00000000 00000005 0000006e" + payload(110, 112)}},
		// A tagged segment without RDMAP header: DDP-4.1-1, RDMAP-4.3-1, RDMAP-5.1-1
		{"RDMAP-5.1-9 V-DDP-3 empty Write", WorkRequest{Op: Write, STag: 1},
			[]string{"c140 00000001 0000000000000000"}},
		// STag and TO are those of the ULP: DDP-4.2-3, DDP-4.2-4, DDP-4.2-6, DDP-4.2-8, DDP-4.2-11,
		// DDP-5.2-8, RDMAP-3.1-4, RDMAP-3.2-5, RDMAP-5.1-4, RDMAP-5.1-8
		{"DDP-4.2-5 DDP-4.2-7 DDP-4.2-9 DDP-4.2-10 Write, two segments",
			WorkRequest{Op: Write, STag: 0xffff0001, TO: 0xffff888000000001, Data: data[:115]},
			[]string{"8140 ffff0001 ffff888000000001" + payload(0, 114),
				"c140 ffff0001 ffff888000000073" + payload(114, 115)}},
		// Untagged, on queue 1, from any TO of one buffer: RDMAP-4.4-1, RDMAP-4.4-6, RDMAP-5.2.1-1,
		// RDMAP-5.2.1-6, RDMAP-5.2.1-9
		{"DDP-5.1-2 RDMAP-5.2.1-2 Read",
			WorkRequest{Op: Read, STag: 0x44444444, TO: 0x5555555566666666, Data: make([]byte, 0x1000)},
			[]string{"4141 00000000 00000001 00000001 00000000 11111111 0000000000000000 00001000 44444444 " +
				"5555555566666666"}},
		// RDMAP-5.2.1-12
		{"DDP-4.3-7 another Read", WorkRequest{Op: Read, STag: 3, TO: 4},
			[]string{"4141 00000000 00000001 00000002 00000000 11111111 0000000000000000 00000000 00000003 " +
				"0000000000000004"}},
		{"DDP-5.2-6 Send after Reads", WorkRequest{Op: Send}, []string{"4143 00000000 00000000 00000006 00000000"}},
	} {
		t.Run(tt.id, func(t *testing.T) {
			if err := c.Post(&tt.wr); err != nil {
				t.Fatal(err)
			}
			if tt.wr.Op == Read {
				sinkSTag(c, 0x11111111)
			}
			c.Flush()
			p.want(tt.id, tt.want...)
		})
	}
	t.Run("DDP-4.3-9 MSN 0 follows ffffffff", func(t *testing.T) {
		c.tx.sendMSN, c.tx.readMSN = math.MaxUint32, math.MaxUint32
		for _, msn := range []string{"ffffffff", "00000000", "00000001"} {
			post(t, c, &WorkRequest{Op: Send})
			p.want("DDP-4.3-9", "4143 00000000 00000000"+msn+"00000000")
			if err := c.Post(&WorkRequest{Op: Read, STag: 3}); err != nil {
				t.Fatal(err)
			}
			sinkSTag(c, 0x11111111)
			c.Flush()
			p.want("DDP-4.3-9", "4141 00000000 00000001"+msn+"00000000 11111111 0000000000000000 00000000 00000003 0000000000000000")
		}
		c.rx.sendMSN, c.rx.readMSN = math.MaxUint32, math.MaxUint32
		events := serve(c)
		for _, msn := range []string{"ffffffff", "00000000", "00000001"} {
			p.send(vectors.ReadRequestHex("00000001", msn, "00000000", "00000000", "0000000000000000"))
			p.want("DDP-4.3-9", "c142 11111111 2222222233333333")
			p.send("4143 00000000 00000000" + msn + "00000000 61")
			if ev := next(t, events); string(ev.Data) != "a" {
				t.Fatal(ev)
			}
		}
	})
	t.Run("DDP-5.2-3 a message of 2^32 bytes is refused", func(t *testing.T) {
		// The size check looks at lengths only. It touches no byte.
		huge := hugeSlice(t, 1<<32)
		if err := c.Post(&WorkRequest{Op: Send, Data: huge}); !errors.Is(err, errTooBig) {
			t.Fatal(err)
		}
		if err := c.Post(&WorkRequest{Op: Send, Data: huge[:1<<32-1], Head: []byte{1}}); !errors.Is(err, errTooBig) {
			t.Fatal(err)
		}
		if err := c.Post(&WorkRequest{Op: Send, Data: huge[:1<<32-1]}); err != nil {
			t.Fatal(err)
		}
		c.Close()
	})
}

// TestMessagesFromTheWire checks what the ULP learns of messages, and what the peer gets.
func TestMessagesFromTheWire(t *testing.T) {
	p, c := responder(t, Options{MaxSend: 64})
	mem := []byte("0123456789abcdef")
	expose(c, 0x100, mem, 0xffff888000001000, RemoteRead|RemoteWrite)
	events := serve(c)
	answered := func(id string, want ...string) {
		t.Helper()
		p.want(id, want...)
	}
	told := func(want Event) {
		t.Helper()
		if got := next(t, events); got.err != nil || string(got.Data) != string(want.Data) ||
			got.Solicited != want.Solicited ||
			got.Invalidates != want.Invalidates || got.Invalidated != want.Invalidated || got.Read != nil {
			t.Fatalf("the ULP got %+v, want %+v", got, want)
		}
	}
	// A Write is placed, but only the Send after it is delivered: RDMAP-3.2-6, RDMAP-5.1-2,
	// RDMAP-3.2-3, RDMAP-5.5-6, DDP-5.3-5, DDP-5.3-6, DDP-5.4-2. Its bytes: RDMAP-5.3-2,
	// RDMAP-5.3-3, DDP-5.1-3, DDP-5.4-3.
	p.send("c140 00000100 ffff888000001002 5859", send1+"61")
	told(Event{Data: []byte("a")})
	if string(mem) != "01XY456789abcdef" {
		t.Fatalf("RDMAP-5.1-5 RDMAP-5.1-7: %s", mem)
	}
	// Empty Writes: STag and TO mean nothing (DDP-5.2-11, DDP-5.2-12). A Send with SE may be
	// empty (RDMAP-5.3-10), raises an event (RDMAP-5.3-6, DDP-4.2-4, DDP-4.3-3, DDP-5.4-5), and
	// its Invalidate STag is ignored (RDMAP-4.1-10).
	p.send("c140 deadbeef ffffffffffffffff", "8140 00000000 0000000000000000",
		"4145 00000100 00000000 00000002 00000000")
	told(Event{Solicited: true})
	// The last byte of the buffer; overlapping Writes; a hole in a message (DDP-5.2-13).
	p.send("c140 00000100 ffff88800000100f 5a", "8140 00000100 ffff888000001000 4141",
		"c140 00000100 ffff888000001008 42", "4143 00000100 00000000 00000003 00000000")
	told(Event{})
	if string(mem) != "AAXY4567B9abcdeZ" {
		t.Fatalf("DDP-5.1-1: %s", mem)
	}
	// A Send in segments of different kinds: the last segment counts (DDP-4.3-5), and the
	// length is its end (DDP-5.4-4). A Write and a Read Request come in between (DDP-5.1-2).
	// The ULP sees nothing of the Request (RDMAP-3.2-9, RDMAP-5.2.1-3, RDMAP-5.2.1-4), which is
	// answered when it has come (RDMAP-5.5-14): by one tagged message (RDMAP-5.2-1,
	// RDMAP-5.2.1-11, RDMAP-5.2.2-1, RDMAP-5.2.2-2, RDMAP-5.2.2-9, RDMAP-4.5-1, DDP-6.1-1) to the
	// SinkSTag and SinkTO of the Request (RDMAP-4.4-2, RDMAP-4.4-4).
	p.send("0143 00000000 00000000 00000004 00000000 6162", "c140 00000100 ffff888000001004 2e",
		vectors.ReadRequestHex("00000001", "00000001", "00000005", "00000100", "ffff888000001000"))
	answered("RDMAP-5.5-8 RDMAP-4.4-3", "c142 11111111 2222222233333333 414158592e")
	select {
	case ev := <-events:
		t.Fatalf("DDP-4.1-8 RDMAP-5.5-13: %+v without a last segment", ev)
	default:
	}
	p.send("0145 00000000 00000000 00000004 00000002",
		"4145 00000000 00000000 00000004 00000002"+strings.Repeat("63", 62))
	told(Event{Data: []byte("ab" + strings.Repeat("c", 62)), Solicited: true})
	// Reads of all and of parts of the buffer (RDMAP-5.2.1-10, RDMAP-4.4-5, RDMAP-4.4-6), in order
	// (RDMAP-5.2.1-8, RDMAP-5.5-17, RDMAP-5.3-5, RDMAP-B-1). The second one is empty, and its STag
	// and TO mean nothing (RDMAP-5.2.1-12, RDMAP-5.2.1-14, RDMAP-5.2.1-15).
	p.send(vectors.ReadRequestHex("00000001", "00000002", "00000010", "00000100", "ffff888000001000"),
		vectors.ReadRequestHex("00000001", "00000003", "00000000", "deadbeef", "ffffffffffffffff"),
		vectors.ReadRequestHex("00000001", "00000004", "00000001", "00000100", "ffff88800000100f"))
	answered("RDMAP-5.2.2-7", "c142 11111111 2222222233333333"+hex.EncodeToString(mem),
		"c142 11111111 2222222233333333", "c142 11111111 2222222233333333 5a")
	// A Send with Invalidate, then a Write to the invalid STag: RDMAP-5.3-14.
	p.send("4146 00000100 00000000 00000005 00000000 7a", "c140 00000100 ffff888000001000 01")
	told(Event{Data: []byte("z"), Solicited: true, Invalidates: true, Invalidated: 0x100})
	p.wantTerminate("1100c000 000f c140 00000100 ffff888000001000")
	p.nc.Close()
	asFault(t, next(t, events).err, wire.ReasonInvalidSTag, false)
}

// TestReadResponseSegments reads lengths around the size of a segment: RDMAP-4.4-5,
// RDMAP-4.4-3, RDMAP-5.2.2-9, RDMAP-5.2.2-2.
func TestReadResponseSegments(t *testing.T) {
	p, c := responder(t, Options{MaxULPDU: 128})
	mem := random(300)
	expose(c, 0x100, mem, 0, RemoteRead)
	serve(c)
	for i, n := range []int{113, 114, 115, 300} { // MULPDU-14 and its neighbours
		p.send(vectors.ReadRequestHex("00000001", fmt.Sprintf("%08x", i+1), fmt.Sprintf("%08x", n), "00000100",
			"0000000000000000"))
		for off := 0; off < n; {
			k := min(114, n-off)
			ctl := "81"
			if off+k == n {
				ctl = "c1"
			}
			p.want("RDMAP-4.4-5", fmt.Sprintf("%s42 11111111 22222222%08x %x", ctl, 0x33333333+off, mem[off:off+k]))
			off += k
		}
	}
}

// TestReadResponses answers a Read of 8 bytes with SinkSTag 0x11111111.
func TestReadResponses(t *testing.T) {
	const at = "c142 11111111"
	const more = "8142 11111111"
	for _, tt := range []struct {
		id        string
		responses []string
		reason    wire.Reason // zero: the Read is complete
		terminate string
	}{
		// The requester's ULP learns of the end (RDMAP-3.2-8) after the data is placed (RDMAP-5.5-7);
		// the STag is its own (DDP-4.2-8).
		{"RDMAP-5.5-18 one segment", []string{at + "0000000000000000 3031323334353637"}, wire.Reason{}, ""},
		{"RDMAP-5.2.2-4 three, one of them empty",
			[]string{more + "0000000000000000 303132", more + "0000000000000003",
				at + "0000000000000003 3334353637"}, wire.Reason{}, ""},
		// The requester checks the Response: RDMAP-5.2.2-6, RDMAP-7.2-1.
		{"RDMAP-5.2.2-8 other STag", []string{"c142 11111112 0000000000000000 3031323334353637"},
			wire.ReasonInvalidSTag, "1100c000 0016 c142 11111112 0000000000000000"},
		{"DDP-4.2-9 STag changes",
			[]string{more + "0000000000000000 303132", "c142 00000001 0000000000000003 3334353637"},
			wire.ReasonInvalidSTag, "1100c000 0013 c142 00000001 0000000000000003"},
		{"DDP-5.2-13 a hole", []string{more + "0000000000000000 303132", at + "0000000000000004 34353637"},
			wire.ReasonBounds, "1101c000 0012 c142 11111111 0000000000000004"},
		{"RDMAP-5.2.2-8 other TO", []string{at + "0000000000000001 30313233343536"}, wire.ReasonBounds,
			"1101c000 0015 c142 11111111 0000000000000001"},
		{"RDMAP-5.2.2-8 too long", []string{at + "0000000000000000 303132333435363738"}, wire.ReasonBounds,
			"1101c000 0017 c142 11111111 0000000000000000"},
		{"RDMAP-5.2.2-8 too short", []string{at + "0000000000000000 30313233343536"}, wire.ReasonBounds,
			"1101c000 0015 c142 11111111 0000000000000000"},
		{"RDMAP-5.2.2-8 empty", []string{at + "0000000000000000"}, wire.ReasonBounds,
			"1101c000 000e c142 11111111 0000000000000000"},
		{"DDP-7.1-14 wrap", []string{at + "fffffffffffffffc 3031323334353637"}, wire.ReasonWrap,
			"1103c000 0016 c142 11111111 fffffffffffffffc"},
		{"RDMAP-5.2.2-5 two for one",
			[]string{at + "0000000000000000 3031323334353637", at + "0000000000000000 3031323334353637"},
			wire.ReasonOpcode, "0206c000 0016 c142 11111111 0000000000000000"},
		{"DDP-7.1-11 a Write to the sink", []string{"c140 11111111 0000000000000000 3031323334353637"},
			wire.ReasonInvalidSTag, "1100c000 0016 c140 11111111 0000000000000000"},
	} {
		t.Run(tt.id, func(t *testing.T) {
			p, c := responder(t, Options{})
			p.send(send1)
			receive(t, c)
			guarded := bytes.Repeat([]byte{0xee}, 24)
			wr := &WorkRequest{Op: Read, Data: guarded[8:16], STag: 0x44444444}
			if err := c.Post(wr); err != nil {
				t.Fatal(err)
			}
			sinkSTag(c, 0x11111111)
			c.Flush()
			p.fpdu()
			events := serve(c)
			p.send(tt.responses[:len(tt.responses)-1]...)
			p.send(tt.responses[len(tt.responses)-1])
			complete := tt.reason == wire.Reason{} || strings.Contains(tt.id, "two for one")
			if tt.terminate != "" {
				p.wantTerminate(tt.terminate)
				p.nc.Close()
			}
			o := next(t, events)
			if o.Read != wr || (o.Err == nil) != complete {
				t.Fatalf("%+v", o)
			}
			if complete && string(wr.Data) != "01234567" {
				t.Fatalf("read %q", wr.Data)
			}
			if !bytes.Equal(guarded[:8], guarded[16:]) || guarded[0] != 0xee {
				t.Fatalf("written outside of the sink: %x", guarded)
			}
			if tt.terminate != "" {
				asFault(t, next(t, events).err, tt.reason, false)
			} else if len(events) != 0 {
				t.Fatal("RDMAP-5.5-16: more events")
			}
		})
	}
}

// RDMAP-5.2.1-14, DDP-5.2-12: the STag of an empty Response does not matter.
func TestEmptyRead(t *testing.T) {
	p, c := responder(t, Options{})
	p.send(send1)
	receive(t, c)
	wr := &WorkRequest{Op: Read, STag: 1}
	post(t, c, wr)
	p.fpdu()
	p.send("c142 deadbeef 1111111111111111") // SEC-5042.6.3.5-2
	if ev := receive(t, c); ev.Read != wr || ev.Err != nil {
		t.Fatalf("%+v", ev)
	}
}

// MPA2-4.1-1, MPA2-4.1-3, MPA2-9.1-1, MPA2-9.1-12, RDMAP-6.1-2, RDMAP-6.1-4,
// RDMAP-6.1-6, RDMAP-8.1.1-11: at most ORD Reads are outstanding, and a Read that waits
// holds up what follows it.
func TestORD(t *testing.T) {
	for _, tt := range []struct{ ours, theirs, want int }{{4, 32, 4}, {32, 4, 4}, {32, 1, 1}} {
		t.Run(fmt.Sprintf("%+v", tt), func(t *testing.T) {
			p, c, _ := respondTo(t, fmt.Sprintf("%s50020004 %04x0000", reqKey, tt.theirs), Options{ORD: tt.ours},
				Answer{})
			p.send(send1)
			receive(t, c)
			events := serve(c)
			const reads = 20
			done := make(sent, 1)
			for range reads {
				if err := c.Post(&WorkRequest{Op: Read, Data: make([]byte, 2), STag: 5}); err != nil {
					t.Fatal(err)
				}
			}
			if err := c.Post(&WorkRequest{Op: Send, Done: done}); err != nil {
				t.Fatal(err)
			}
			c.Flush()
			sinks := make(chan []byte, reads)
			take := func() {
				if u := p.fpdu(); u[1] == 0x41 {
					sinks <- u[18:22]
				} else {
					t.Fatalf("MPA2-4.1-3: %x overtook a Read", u)
				}
			}
			for range tt.want {
				take()
			}
			for i := range reads {
				if i+tt.want < reads {
					p.silent("MPA2-4.1-1")
					if len(done) != 0 {
						t.Fatal("the Send is done before the Reads that precede it are sent")
					}
				}
				p.send("c142" + hex.EncodeToString(<-sinks) + "0000000000000000 6162")
				if ev := next(t, events); ev.Read == nil || string(ev.Read.Data) != "ab" {
					t.Fatalf("%+v", ev)
				}
				if i+tt.want < reads {
					take()
				}
				if i+tt.want == reads-1 { // the last Read is out
					p.want("MPA2-4.1-3", send1)
					if err := <-done; err != nil {
						t.Fatal(err)
					}
				}
			}
			if n := c.opt.Domain.Counts(); n.ORDStalls != uint64(reads-tt.want) || n.Sent.ReadRequests != reads ||
				n.Received.ReadResponses != reads || n.Sent.Sends != 1 {
				t.Errorf("counts %+v", n)
			}
		})
	}
	t.Run("MPA2-9.1-2 the peer accepts none", func(t *testing.T) {
		_, c, _ := respondTo(t, reqKey+"50020004 00000000", Options{}, Answer{})
		if err := c.Post(&WorkRequest{Op: Read}); !errors.Is(err, errNoORD) {
			t.Fatal(err)
		}
	})
}

// MPA2-4.1-2, MPA2-9.1-4, RDMAP-5.2.2-3, RDMAP-6.1-3, RDMAP-6.1-7, DDP-7.2-9,
// RDMAP-8.1.2-7, RDMAP-8.1.2-6, DDP-8.3.2-5: IRD Requests at once are always served. A peer
// that keeps sending them without taking the Responses gets a Terminate 1/2/02 when at most
// twice IRD wait.
func TestIRD(t *testing.T) {
	for _, ird := range []int{1, 4} {
		t.Run(fmt.Sprintf("IRD %d", ird), func(t *testing.T) {
			p, c, _ := respondTo(t, fmt.Sprintf("%s50020004 0000%04x", reqKey, ird), Options{}, Answer{})
			big := make([]byte, 32<<20) // more than the sockets hold
			expose(c, 0x100, big, 0, RemoteRead)
			events := serve(c)
			msn := 0
			request := func(n int) {
				msn++
				p.send(vectors.ReadRequestHex("00000001", fmt.Sprintf("%08x", msn), fmt.Sprintf("%08x", n), "00000100",
					"0000000000000000"))
			}
			for range 50 { // IRD at once, again and again
				for range ird {
					request(4)
				}
				for range ird {
					p.want("RDMAP-5.2.2-3", "c142 11111111 2222222233333333 00000000")
				}
			}
			for range ird { // a new one as soon as a Response is here
				request(4)
			}
			for range 200 {
				p.fpdu()
				request(4)
			}
			for range ird {
				p.fpdu()
			}
			p.silent("RDMAP-5.2-1: one Response for a Request")
			for range 2*ird + 1 { // SEC-5042.6.4.3-6, SEC-5042.6.4.3-7, SEC-5042.A-2
				request(len(big))
			}
			asFault(t, next(t, events).err, wire.ReasonNoBuffer, false)
		})
	}
	t.Run("MPA2-9.1-4 IRD 0", func(t *testing.T) {
		p, c, _ := respondTo(t, reqKey+"50020004 00040000", Options{}, Answer{})
		events := serve(c)
		rr := vectors.ReadRequestHex("00000001", "00000001", "00000000", "00000000", "0000000000000000")
		p.send(rr)
		p.wantTerminate("1202c000 002e 4141 00000000 00000001 00000001 00000000")
		p.nc.Close()
		asFault(t, next(t, events).err, wire.ReasonNoBuffer, false)
	})
}

// RDMAP-5.5-9, RDMAP-5.5-15: Responses do not queue after Reads that wait, so two ends with
// ORD 1 that both have more to read do not block each other.
func TestReadsBothWays(t *testing.T) {
	a, b := pair(t, Options{IRD: 1, ORD: 1}, Options{IRD: 1, ORD: 1})
	post(t, a, &WorkRequest{Op: Send})
	receive(t, b)
	var wg sync.WaitGroup
	for _, ends := range [][2]*Conn{{a, b}, {b, a}} {
		var r Region
		source := random(200000)
		stag := ends[1].Register(&r, source, 0, RemoteRead)
		wg.Go(func() {
			for range 20 {
				ends[0].Post(&WorkRequest{Op: Read, Data: make([]byte, len(source)), STag: stag})
			}
			ends[0].Flush()
			for range 20 {
				var ev Event
				if err := ends[0].Receive(&ev); err != nil || ev.Err != nil || !bytes.Equal(ev.Read.Data, source) {
					t.Errorf("%v, %v", err, ev.Err)
					return
				}
			}
			go ends[0].Receive(new(Event)) // answers the other end
		})
	}
	wg.Wait()
}

// ISER-4.1-2: a Read sees the data of the Write before it.
func TestReadAfterWrite(t *testing.T) {
	a, b := pair(t, Options{}, Options{})
	var r Region
	stag := b.Register(&r, make([]byte, 1<<20), 0, RemoteWrite|RemoteRead)
	go b.Receive(new(Event))
	for range 5 {
		data := random(1 << 20)
		read := &WorkRequest{Op: Read, Data: make([]byte, 1<<20), STag: stag}
		a.Post(&WorkRequest{Op: Write, Data: data, STag: stag})
		post(t, a, read)
		if ev := receive(t, a); ev.Read != read || ev.Err != nil || !bytes.Equal(read.Data, data) {
			t.Fatalf("%v, or other bytes", ev.Err)
		}
	}
}

// Two ends send more than the sockets hold, each with Reads that the other's data holds up.
// Both make progress: Receive does not wait for the peer to take data.
func TestFullSocketsBothWays(t *testing.T) {
	a, b := pair(t, Options{ORD: 1}, Options{ORD: 1})
	post(t, a, &WorkRequest{Op: Send})
	receive(t, b)
	data := make([]byte, 64<<20)
	var wg sync.WaitGroup
	for _, ends := range [][2]*Conn{{a, b}, {b, a}} {
		var from, to Region
		source := ends[1].Register(&from, make([]byte, 1), 0, RemoteRead)
		sink := ends[1].Register(&to, make([]byte, len(data)), 0, RemoteWrite)
		// The end of the first Read releases the second one and what follows it.
		for _, wr := range []*WorkRequest{
			{Op: Read, Data: make([]byte, 1), STag: source},
			{Op: Read, Data: make([]byte, 1), STag: source},
			{Op: Write, Data: data, STag: sink},
			{Op: Send},
		} {
			if err := ends[0].Post(wr); err != nil {
				t.Fatal(err)
			}
		}
	}
	var told sync.WaitGroup
	for _, c := range []*Conn{a, b} {
		told.Add(1)
		c.Flush()
		c.SetReceiveDeadline(time.Now().Add(testkit.Patience))
		wg.Go(func() {
			for range 3 { // two Reads and the Send after everything
				if err := c.Receive(new(Event)); err != nil {
					t.Error(err)
					break
				}
			}
			told.Done()
			c.Receive(new(Event)) // answer the other end until it has all
		})
	}
	told.Wait()
	a.Close()
	b.Close()
	wg.Wait()
}

// DDP-5.4-1, RDMAP-5.5-5, RDMAP-5.5-11, RDMAP-5.5-12: Done is called after TCP has taken a
// message, in the order of Post, and whether the peer reads or not.
func TestDone(t *testing.T) {
	p, c := responder(t, Options{})
	p.send(send1)
	receive(t, c)
	small := make(sent, 1)
	post(t, c, &WorkRequest{Op: Send, Data: make([]byte, 100), Done: small})
	select {
	case err := <-small: // the peer has not read
		if err != nil {
			t.Fatal(err)
		}
	default:
		t.Fatal("DDP-5.4-1")
	}
	var mu sync.Mutex
	var order []int
	big := make([]byte, 64<<20)
	all := make(chan struct{})
	for i := range 5 {
		c.Post(&WorkRequest{Op: Write, Data: big[:len(big)*(1-i%2)], Done: completer(func(*WorkRequest, error) {
			mu.Lock()
			defer mu.Unlock()
			if order = append(order, i); len(order) == 5 {
				close(all)
			}
		})})
	}
	go c.Flush()
	first := p.fpdu()
	if len(first) != 118 {
		t.Fatal(len(first))
	}
	p.fpdu() // the Writes have begun, but cannot end
	mu.Lock()
	if len(order) != 0 {
		t.Fatal("RDMAP-5.5-11: done before TCP has taken it")
	}
	mu.Unlock()
	go io.Copy(io.Discard, p.nc)
	<-all
	if fmt.Sprint(order) != "[0 1 2 3 4]" {
		t.Fatal("RDMAP-5.5-12:", order)
	}
}

type completer func(*WorkRequest, error)

func (f completer) WorkDone(wr *WorkRequest, err error) { f(wr, err) }

// The function of SetFlushed follows the WorkDones of each batch. Those without an error come from Flush; others may come at any time.
func TestSetFlushed(t *testing.T) {
	i, r := pair(t, Options{}, Options{})
	var order []string
	i.SetFlushed(func() { order = append(order, "flushed") })
	done := completer(func(wr *WorkRequest, err error) {
		if err == nil {
			order = append(order, string(wr.Data))
		}
	})
	for n, batch := range [][]string{{"a", "b", "c"}, {"d"}} {
		for _, data := range batch {
			if err := i.Post(&WorkRequest{Op: Send, Data: []byte(data), Done: done}); err != nil {
				t.Fatal(err)
			}
		}
		i.Flush()
		want := []string{"[a b c flushed]", "[a b c flushed d flushed]"}[n]
		if fmt.Sprint(order) != want {
			t.Fatalf("%v, want %v", order, want)
		}
		for _, data := range batch {
			if e := receive(t, r); string(e.Data) != data {
				t.Errorf("%q came, want %q", e.Data, data)
			}
		}
	}
	failed := make(sent, 1)
	if err := i.Post(&WorkRequest{Op: Send, Done: failed}); err != nil {
		t.Fatal(err)
	}
	i.Close()
	if err := <-failed; err == nil {
		t.Error("a Send that was not sent is done without an error")
	}
}

// MPA-7.1.2-14, MPA2-9.2-18: what a Responder posts early waits for the first FPDU, and so
// does the end of its stream.
func TestEarlyPosts(t *testing.T) {
	p, c, _ := respondTo(t, reqKey+"40010000", Options{}, Answer{})
	post(t, c, &WorkRequest{Op: Send, Data: []byte("early")})
	c.CloseWrite()
	p.silent("MPA-7.1.2-14")
	serve(c)
	p.send("8140 00000001 0000000000000000")
	p.want("MPA-7.1.2-14", "4143 00000000 00000000 00000001 00000000 6561726c79")
	p.wantEOF()
}

// DDP-6.2.1-5, MPA-7.2-1, RDMAP-6.2-1, RDMAP-6.2-2, DDP-6.2-2: CloseWrite sends everything that
// was posted, including what waits for ORD, and then ends our direction. The other
// direction stays open.
func TestCloseWrite(t *testing.T) {
	p, c := responder(t, Options{ORD: 1})
	p.send(send1)
	receive(t, c)
	events := serve(c)
	wr := []*WorkRequest{{Op: Read, Data: make([]byte, 1)}, {Op: Read, Data: make([]byte, 1)}}
	for i := range 100 {
		if err := c.Post(&WorkRequest{Op: Send, Data: make([]byte, i)}); err != nil {
			t.Fatal(err)
		}
	}
	c.Post(wr[0])
	c.Post(wr[1])
	c.Post(&WorkRequest{Op: Send, Data: []byte("last")})
	c.CloseWrite()
	if err := c.Post(&WorkRequest{Op: Send}); !errors.Is(err, ErrClosed) {
		t.Fatal("DDP-6.2.1-2:", err)
	}
	for i := range 100 {
		if u := p.fpdu(); len(u) != 18+i {
			t.Fatalf("Send %d: ULPDU of %d bytes", i, len(u))
		}
	}
	for i := range 2 {
		u := p.fpdu()
		if i == 0 {
			p.silent("ORD")
		} else {
			p.want("DDP-6.2.1-1", "4143 00000000 00000000 00000065 00000000 6c617374")
			p.wantEOF()
		}
		p.send("c142" + hex.EncodeToString(u[18:22]) + "0000000000000000 61")
		if ev := next(t, events); ev.Read != wr[i] {
			t.Fatalf("%+v", ev)
		}
	}
	p.send(send2)
	if ev := next(t, events); ev.err != nil {
		t.Fatal("DDP-6.2.1-6:", ev.err)
	}
	p.nc.Close()
	if ev := next(t, events); ev.err != io.EOF {
		t.Fatal(ev.err)
	}
}

// DDP-3-3, DDP-6.2.2-4, RDMAP-5.4-7, RDMAP-6.2.1-3, RDMAP-3.1-8, MPA-7.1-2: however the stream
// ends, every Send and Write is done once, every Read is returned once before the final
// error, and nothing of the Conn remains.
func TestNothingIsLost(t *testing.T) {
	before, goroutines := ReadStats(), runtime.NumGoroutine()
	ends := map[string]func(p *rawPeer, c *Conn){
		"Close":      func(p *rawPeer, c *Conn) { c.Close() },
		"reset":      func(p *rawPeer, c *Conn) { p.nc.(*net.TCPConn).SetLinger(0); p.nc.Close() },
		"peer's end": func(p *rawPeer, c *Conn) { p.nc.(*net.TCPConn).CloseWrite() },
		"Terminate": func(p *rawPeer,
			c *Conn) {
			p.send("4147 00000000 00000002 00000001 00000000 10000000")
			p.nc.Close()
		},
		"bad FPDU": func(p *rawPeer,
			c *Conn) {
			p.send("c140 deadbeef 0000000000000000 01")
			p.nc.Close()
		},
		"CloseWrite, then Close": func(p *rawPeer, c *Conn) { go c.CloseWrite(); c.Close() },
		"Terminate by ULP, reset": func(p *rawPeer,
			c *Conn) {
			c.Terminate(wire.ReasonLocalCatastrophic, io.ErrNoProgress)
			p.nc.Close()
		},
	}
	for name, end := range ends {
		for _, depth := range []int{0, 1, 7, 60} {
			t.Run(fmt.Sprintf("%s, %d", name, depth), func(t *testing.T) {
				p, c := responder(t, Options{ORD: 3})
				p.send(send1)
				receive(t, c)
				var mu sync.Mutex
				done := map[*WorkRequest]int{}
				reads := map[*WorkRequest]int{}
				count := completer(func(wr *WorkRequest, _ error) { mu.Lock(); done[wr]++; mu.Unlock() })
				var posted sync.WaitGroup
				events := serve(c)
				posted.Go(func() {
					data := make([]byte, 3<<20) // enough to fill the sockets
					for i := range depth {
						wr := &WorkRequest{Op: []Op{Write, Read, Send}[i%3], Data: data[:len(data)>>(i%4*4)],
							Done: count}
						if c.Post(wr) == nil {
							mu.Lock()
							if wr.Op == Read {
								reads[wr] += 0
							} else {
								done[wr] += 0
							}
							mu.Unlock()
						}
						if i%5 == 0 {
							go c.Flush()
						}
					}
					go c.Flush()
				})
				end(p, c)
				final := false
				for o := range events {
					if final = o.err != nil; !final {
						if o.Read == nil || o.Err == nil {
							t.Errorf("%+v", o)
						}
						mu.Lock()
						reads[o.Read]++
						mu.Unlock()
					}
				}
				posted.Wait()
				c.Close()
				var ev Event // a Read that is posted after the final error is refused, not lost
				if err := c.Receive(&ev); err == nil || !final {
					t.Fatalf("after the final error: %+v", ev)
				}
				testkit.Eventually(t, "every WorkRequest has come back once",
					func() bool { mu.Lock(); defer mu.Unlock(); return once(done) })
				if !once(reads) {
					t.Fatalf("Reads returned: %v", reads)
				}
			})
		}
	}
	testkit.Eventually(t, "no more goroutines and memory than before",
		func() bool { return runtime.NumGoroutine() <= goroutines && ReadStats() == before })
}

func once(counts map[*WorkRequest]int) bool {
	for _, n := range counts {
		if n != 1 {
			return false
		}
	}
	return true
}

// RDMAP-8.1.1-10, RDMAP-8.1.2-5, DDP-7.1-2, DDP-7.1-3, DDP-7.1-4, DDP-7.1-5, DDP-7.1-6,
// RDMAP-5.3-11, DDP-5.3-5: if nobody receives on a Conn, TCP holds its peer back and nothing
// is lost. Another Conn is not affected.
func TestBackPressure(t *testing.T) {
	p, c := responder(t, Options{})
	q, d := responder(t, Options{})
	const n = 30000
	var stream []byte
	for i := range n {
		stream = append(stream,
			frame(append(unhex(fmt.Sprintf("4143 00000000 00000000 %08x 00000000", i+1)), make([]byte, 1000)...))...)
	}
	written := make(chan struct{})
	go func() { p.write(stream); close(written) }()
	q.send(send1)
	receive(t, d) // SEC-5042.6.4.3-4, SEC-5042.6.4.6-1
	select {
	case <-written:
		t.Fatal("30 MB fit into the sockets; send more")
	default:
	}
	for range n {
		if ev := receive(t, c); len(ev.Data) != 1000 {
			t.Fatal(len(ev.Data))
		}
	}
	<-written
}

// RDMAP-6.2.1-5, RDMAP-6.2.1-4, RDMAP-7-1, RDMAP-7-4: a peer that has sent much after the bad
// message gets the Terminate and no reset.
func TestTerminateOvertakesNothing(t *testing.T) {
	p, c := responder(t, Options{})
	go func() {
		p.send("c140 deadbeef 0000000000000000 01")
		p.nc.Write(make([]byte, 4<<20))
		p.nc.(*net.TCPConn).CloseWrite()
	}()
	wantFault(t, c, wire.ReasonInvalidSTag)
	c.Close()
	p.wantTerminate("1100c000 000f c140 deadbeef 0000000000000000")
}

// After a write that fails, Receive returns the Terminate of the peer and does not wait. Until it has, the ULP can post: it must not take the
// failed write for the reason.
func TestWriteError(t *testing.T) {
	p, c := responder(t, Options{})
	p.send(send1, "4147 00000000 00000002 00000001 00000000 12050000")
	receive(t, c)
	p.nc.Close()
	done := make(sent, 1)
	var err error
	for err == nil {
		if perr := c.Post(&WorkRequest{Op: Write, Data: make([]byte, 1<<20), Done: done}); perr != nil {
			t.Fatal(perr)
		}
		c.Flush()
		err = <-done
	}
	if !errors.Is(err, errWriting) {
		t.Fatal(err)
	}
	read := &WorkRequest{Op: Read, Data: make([]byte, 1)}
	for _, wr := range []*WorkRequest{{Op: Write, Data: make([]byte, 1), Done: done}, read} {
		if err := c.Post(wr); err != nil {
			t.Fatal(err)
		}
	}
	c.Flush()
	if err := <-done; !errors.Is(err, errWriting) {
		t.Fatal(err)
	}
	var ev Event
	if err := c.Receive(&ev); err != nil || ev.Read != read {
		t.Fatalf("Receive: %v, %+v, want the Read", err, ev)
	}
	asFault(t, ev.Err, wire.ReasonTooLong, true)
	why := c.Receive(&ev)
	asFault(t, why, wire.ReasonTooLong, true)
	if err := c.Post(&WorkRequest{Op: Write, Data: make([]byte, 1)}); err != why {
		t.Errorf("Post: %v, want %v", err, why)
	}
}
