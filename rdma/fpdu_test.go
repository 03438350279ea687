package rdma

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/rdma/wire"
	"github.com/iser-target/iser-target/tests/testkit"
)

const (
	send1 = "4143 00000000 00000000 00000001 00000000"
	send2 = "4143 00000000 00000000 00000002 00000000"
)

// CRCs are generated and checked unless neither side asks for them, in both roles and on
// all paths of the receiver (MPA-4.4-1). The ULP does not notice (MPA-4.4-7).
func TestCRCMatrix(t *testing.T) {
	for _, tt := range []struct {
		id         string
		peer, ours bool
	}{{"MPA-4.4-5 1/1", true, true}, {"MPA-7.1.1-8 1/0", true, false}, {"MPA-4.4-4 0/1", false, true},
		{"MPA-4.4-9 0/0", false, false}} {
		for _, role := range []string{"responder", "initiator"} {
			for _, n := range []int{4, 9000} {
				t.Run(fmt.Sprintf("%s %s %d", tt.id, role, n), func(t *testing.T) {
					flags := "00"
					if tt.peer {
						flags = "40"
					}
					o := Options{NoCRC: !tt.ours, Rev: 1}
					var p *rawPeer
					var c *Conn
					if role == "initiator" {
						p, c = initiator(t, o, repKey+flags+"010000")
					} else {
						p, c, _ = respondTo(t, reqKey+flags+"010000", o, Answer{})
						p.send("c140 00000001 0000000000000000")
					}
					on := tt.peer || tt.ours
					if p.crc = on; c.CRC() != on {
						t.Fatal("CRC in force:", c.CRC())
					}
					msg := bytes.Repeat([]byte{0xab}, n)
					good := frame(append(unhex(send1), msg...))
					bad := frame(append(unhex(send2), msg...))
					copy(bad[len(bad)-4:], unhex("deadbeef"))
					p.write(good)
					events := serve(c)
					if o := next(t, events); !bytes.Equal(o.Data, msg) {
						t.Fatal("the good FPDU did not arrive", o.err)
					}
					post(t, c, &WorkRequest{Op: Send, Data: []byte("x")})
					p.want("MPA-4.4-8 MPA-4.4-10 MPA-4.4-11", "4143 00000000 00000000 00000001 00000000 78")
					p.write(bad)
					if !on { // MPA-7.1.1-7, MPA-7.1.1-9
						if o := next(t, events); !bytes.Equal(o.Data, msg) {
							t.Fatal("MPA-4.1-7: not delivered", o.err)
						}
						return
					}
					p.wantTerminate("20020000") // MPA-4.1-6
					p.nc.Close()
					asFault(t, next(t, events).err, wire.ReasonCRC, false)
				})
			}
		}
	}
}

// MPA-4.4-8: the thousandth FPDU is checked like the first.
func TestCRCStaysOn(t *testing.T) {
	p, c := responder(t, Options{NoCRC: true})
	var b []byte
	for range 1000 {
		b = append(b, frame(unhex("c140 00000001 0000000000000000"))...)
	}
	b[len(b)-1] ^= 0x10
	p.write(b)
	events := serve(c)
	p.wantTerminate("20020000")
	p.nc.Close()
	asFault(t, next(t, events).err, wire.ReasonCRC, false)
}

// MPA-4.1-6, MPA-4.4-18, MPA-6-3, MPA-6-5: a flipped bit anywhere in an FPDU is code 2, and
// the receiver ignores what follows. The long FPDU is placed before its CRC has come.
func TestEveryFlipIsSeen(t *testing.T) {
	for _, n := range []int{7, 9001} {
		good := frame(append(unhex("c140 00000100 0000000000000000"), make([]byte, n)...))
		step := 1
		if n > 1000 {
			step = 173
		}
		flips := map[int]bool{}
		for i := 0; i < len(good); i += step {
			flips[i] = true
		}
		for i := range 20 { // both ends, whole
			flips[i], flips[len(good)-1-i] = true, true
		}
		for i := range flips {
			for _, mask := range []byte{0x01, 0x80} {
				c := bufferConn(Options{}, 0)
				buf := make([]byte, n)
				expose(c, 0x100, buf, 0, RemoteWrite)
				bad := slices.Clone(good)
				bad[i] ^= mask
				// ULPDU_Length may have grown: more bytes follow, none of them
				// with a good CRC after it.
				stream := append(bad, bytes.Repeat([]byte{0x55}, 70000)...)
				c.nc.(*bufferNet).in = bytes.NewReader(stream)
				var ev Event
				err := c.Receive(&ev)
				asFault(t, err, wire.ReasonCRC, false)
				if n < 1000 && !bytes.Equal(buf, make([]byte, n)) {
					t.Fatal("SEC-5042.5.1-2: a short segment was placed before its CRC was checked")
				}
				c.Close()
			}
		}
	}
}

// bufferNet is a net.Conn that reads from in, in pieces of at most chunk
// bytes, and keeps what is written.
type bufferNet struct {
	in    *bytes.Reader
	chunk func() int
	out   bytes.Buffer
}

func (b *bufferNet) Read(p []byte) (int, error) {
	if b.chunk != nil {
		p = p[:min(len(p), b.chunk())]
	}
	return b.in.Read(p)
}
func (b *bufferNet) Write(p []byte) (int, error)      { return b.out.Write(p) }
func (b *bufferNet) Close() error                     { return nil }
func (b *bufferNet) CloseWrite() error                { return nil }
func (b *bufferNet) LocalAddr() net.Addr              { return &net.TCPAddr{} }
func (b *bufferNet) RemoteAddr() net.Addr             { return &net.TCPAddr{} }
func (b *bufferNet) SetDeadline(time.Time) error      { return nil }
func (b *bufferNet) SetReadDeadline(time.Time) error  { return nil }
func (b *bufferNet) SetWriteDeadline(time.Time) error { return nil }

// bufferConn returns a Conn after a startup that agreed on CRCs and, if markers is not 0, on
// Markers in what the Conn receives (1), sends (2) or both (3).
func bufferConn(o Options, markers int) *Conn {
	o.Markers = markers&1 != 0
	o, err := o.complete()
	if err != nil {
		panic(err)
	}
	c := allocate(o)
	c.attach(&bufferNet{in: bytes.NewReader(nil)}, nil, o.IRD, o.ORD, !o.NoCRC, markers&2 != 0)
	c.peerStarted.Store(true)
	return c
}

// traffic returns a stream of messages in FPDUs, and what a receiver with region 0x100 of 64 KiB
// must deliver and place. Payloads look like startup frames and FPDUs (MPA-6-2).
func traffic(rng *rand.Rand, n int, markers bool) (stream []byte, sends [][]byte, memory []byte) {
	memory = make([]byte, 64<<10)
	var grid wire.MarkerGrid
	add := func(ulpdu []byte) {
		if f := frame(ulpdu); markers {
			stream, grid = grid.AppendFPDU(stream, f, true)
		} else {
			stream = append(stream, f...)
		}
	}
	fake := append(unhex(reqKey+"40010000"), frame(unhex(send1))...)
	payload := func(n int) []byte {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		copy(b, fake)
		return b
	}
	size := func() int {
		switch rng.IntN(8) {
		case 0:
			return 0
		case 1:
			return 8000 + rng.IntN(500) // around llp.FirstLong
		case 2:
			return rng.IntN(40000)
		}
		return rng.IntN(600)
	}
	for msn := uint32(1); len(sends) < n; {
		if rng.IntN(2) == 0 {
			b := payload(size())
			to := rng.IntN(len(memory) - len(b) + 1)
			copy(memory[to:], b)
			h := make([]byte, wire.TaggedLen)
			wire.Tagged{Last: rng.IntN(2) == 0, ULP: wire.OpWrite.Control(), STag: 0x100, TO: uint64(to)}.Put(h)
			add(append(h, b...))
			continue
		}
		msg := payload(size())
		for off := 0; ; {
			k := len(msg) - off
			if rng.IntN(2) == 0 {
				k = rng.IntN(k + 1)
			}
			h := make([]byte, wire.UntaggedLen)
			last := off+k == len(msg)
			wire.Untagged{Last: last, ULP: wire.OpSend.Control(), MSN: msn, MO: uint32(off)}.Put(h)
			add(append(h, msg[off:off+k]...))
			if off += k; last {
				break
			}
		}
		msn++
		sends = append(sends, msg)
	}
	return stream, sends, memory
}

// drinkUp receives stream in pieces, once to memory of the stream and once to that of a sink, and compares the result with sends and memory.
func drinkUp(t testing.TB, stream []byte, sends [][]byte, memory []byte, markers int, chunk func() int) {
	t.Helper()
	drinkTo(t, false, stream, sends, memory, markers, chunk)
	drinkTo(t, true, stream, sends, memory, markers, chunk)
}

// drinkTo does what drinkUp does, to one of the two.
func drinkTo(t testing.TB, sinks bool, stream []byte, sends [][]byte, memory []byte, markers int, chunk func() int) {
	t.Helper()
	c := bufferConn(Options{MaxSend: 64 << 10}, markers)
	defer c.Close()
	got := make([]byte, len(memory))
	expose(c, 0x100, got, 0, RemoteWrite)
	*c.nc.(*bufferNet) = bufferNet{in: bytes.NewReader(stream), chunk: chunk}
	const head = 48
	next := 0 // Send
	var sunk []byte
	if sinks {
		c.SetSink(head, func(b []byte) []byte {
			if !bytes.Equal(b, sends[next][:head]) {
				t.Fatalf("Send %d begins with % x", next, b)
			}
			rest := len(sends[next]) - head
			sunk = make([]byte, []int{0, rest / 2, rest - 1, rest, rest + 100}[next%5])
			return sunk
		})
	}
	for i, want := range sends {
		var ev Event
		next, sunk = i, nil
		if err := c.Receive(&ev); err != nil || !bytes.Equal(slices.Concat(ev.Head, ev.Data), want) {
			t.Fatalf("Send %d of %d bytes: %d and %d came, %v", i, len(want), len(ev.Head), len(ev.Data), err)
		}
		fits := len(sunk) > 0 && len(sunk) >= len(want)-head
		if (ev.Head != nil) != fits || fits && &ev.Data[0] != &sunk[0] {
			t.Fatalf("Send %d of %d bytes, with %d bytes of the sink: it is there: %t", i, len(want), len(sunk), ev.Head != nil)
		}
	}
	var ev Event
	if err := c.Receive(&ev); err != io.EOF {
		t.Fatal(err)
	}
	if !bytes.Equal(got, memory) {
		t.Fatal("the memory does not hold what was sent")
	}
}

// The receiver delivers the same messages however TCP cuts the stream into segments (MPA-A.4-1,
// MPA-A.4-2), with Markers and without. drinkUp checks them: their boundaries (MPA-4.3-13,
// DDP-3-4), lengths (MPA-3-7, DDP-3-7), bytes (MPA-4.3-14) and the memory (DDP-5.1-1, DDP-5.2-5).
func TestRechunking(t *testing.T) {
	for markers := range 2 {
		t.Run(fmt.Sprintf("markers %d", markers), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(1, uint64(markers)))
			stream, sends, memory := traffic(rng, 60, markers == 1)
			// The receiver finds FPDUs by their length: MPA-5.1-5, MPA-5.2-1, MPA-6-2, MPA-6-4.
			one := func() int { return 1 }
			drinkUp(t, stream, sends, memory, markers, nil)
			drinkUp(t, stream, sends, memory, markers, one)
			for range 20 {
				limit := 1 + rng.IntN(100000)
				drinkUp(t, stream, sends, memory, markers, func() int { return 1 + rng.IntN(limit) })
			}
			// One cut, at every offset of a short stream.
			stream, sends = nil, nil
			var grid wire.MarkerGrid
			for msn := range uint32(12) {
				h := make([]byte, wire.UntaggedLen)
				wire.Untagged{Last: true, ULP: wire.OpSend.Control(), MSN: msn + 1}.Put(h)
				sends = append(sends, bytes.Repeat([]byte{byte(msn)}, int(msn)*17))
				if f := frame(append(h, sends[msn]...)); markers == 1 {
					stream, grid = grid.AppendFPDU(stream, f, true)
				} else {
					stream = append(stream, f...)
				}
			}
			clear(memory)
			for cut := range stream {
				n := cut
				drinkUp(t, stream, sends, memory, markers, func() int {
					k := n
					n = len(stream)
					return max(k, 1)
				})
			}
		})
	}
}

// Between two segments of a Send that goes to the memory of a sink, a Read may end. Nothing changes that memory until the Send has come.
func TestReadWithinASunkSend(t *testing.T) {
	p, c := responder(t, Options{})
	memory := make([]byte, 3000)
	calls := 0
	c.SetSink(4, func(head []byte) []byte {
		calls++
		if string(head) != "head" {
			t.Errorf("it begins with %q", head)
		}
		return memory
	})
	read := &WorkRequest{Op: Read, Data: make([]byte, 4)}
	post(t, c, read)
	c.Flush()
	var ev Event
	ended := make(chan error)
	go func() { ended <- c.Receive(&ev) }()
	request, err := wire.ParseReadRequest(p.fpdu()[wire.UntaggedLen:])
	if err != nil {
		t.Fatal(err)
	}
	p.send("0143 00000000 00000000 00000001 00000000"+hex.EncodeToString(append([]byte("head"), bytes.Repeat([]byte{'a'}, 1000)...)),
		fmt.Sprintf("c142 %08x %016x", uint32(request.SinkSTag), request.SinkTO)+"01020304",
		"4143 00000000 00000000 00000001 000003ec"+hex.EncodeToString(bytes.Repeat([]byte{'b'}, 2000)))
	if err := <-ended; err != nil || ev.Read != read || ev.Err != nil {
		t.Fatalf("%+v, %v", ev, err)
	}
	if err := c.Receive(&ev); err != nil || string(ev.Head) != "head" || &ev.Data[0] != &memory[0] || len(ev.Data) != len(memory) ||
		bytes.Count(ev.Data, []byte{'a'}) != 1000 || bytes.Count(ev.Data, []byte{'b'}) != 2000 || calls != 1 {
		t.Fatalf("%q, %d bytes, %v; %d calls", ev.Head, len(ev.Data), err, calls)
	}
}

// What a Conn sends parses, for a peer that asks for Markers and for one that does not. fpdu of
// rawPeer checks the lengths (MPA-4.1-2, MPA-4.1-8) and the Markers (MPA-4.2-2, MPA-4.2-5,
// MPA-4.3-4, MPA-4.3-9, MPA-4.3-11, MPA-4.3-12, MPA-7.1.2-18).
func TestSentStream(t *testing.T) {
	for _, tt := range []struct {
		id      string
		markers int
		o       Options
	}{
		{"MPA-7.1.2-19 none", 0, Options{MaxULPDU: 1442}},
		{"MPA-7.1.1-6 we only receive them", 1, Options{MaxULPDU: 1442}},
		// MPA-4.3-2, MPA-7.1.1-5
		{"MPA-4.3-3 we send them", 2, Options{MaxULPDU: 1430}},
		{"MPA-C.3-1 both ways", 3, Options{MaxULPDU: 8882}},
		// MPA-3-6
		{"MPA-3-4 the largest FPDUs", 0, Options{}},
	} {
		t.Run(tt.id, func(t *testing.T) {
			c := bufferConn(tt.o, tt.markers)
			defer c.Close()
			rng := rand.New(rand.NewPCG(2, 3))
			var msgs [][]byte
			for i := range 200 {
				n := []int{0, 1, 5, 600, 1024, 1442, 5000, 100000}[rng.IntN(8)]
				msgs = append(msgs, random(n))
				op := Send
				if i%2 == 1 {
					op = Write
				}
				wr := &WorkRequest{Op: op, Data: msgs[i], STag: 0x100, TO: uint64(i) << 40}
				if op == Send {
					wr.Head, wr.Data = msgs[i][:n/4], msgs[i][n/4:]
					wr.STag = 0
				}
				if err := c.Post(wr); err != nil {
					t.Fatal(err)
				}
				if rng.IntN(3) == 0 { // several FPDUs in a segment: MPA-5.1-4, MPA-A.1-3
					c.Flush()
				}
			}
			c.Flush()
			p := &rawPeer{t: t, crc: true, nc: c.nc.(*bufferNet).peer()}
			if tt.markers&2 != 0 {
				p.in = new(wire.MarkerGrid)
			}
			msn := uint32(0)
			for i, msg := range msgs {
				for off := 0; ; {
					u := p.fpdu()
					if len(u) > c.mulpdu() { // DDP-5.2-1, DDP-5.2-2
						t.Fatalf("MPA-3-3: ULPDU of %d bytes", len(u))
					}
					h, hlen := make([]byte, wire.UntaggedLen), wire.TaggedLen
					if i%2 == 0 {
						hlen = wire.UntaggedLen
					}
					last := off+len(u)-hlen == len(msg) // DDP-4.1-3, DDP-4.1-4, DDP-4.1-5, DDP-4.1-6
					if i%2 == 1 {
						wire.Tagged{Last: last, ULP: 0x40, STag: 0x100, TO: uint64(i)<<40 + uint64(off)}.Put(h)
					} else {
						if off == 0 {
							msn++
						}
						wire.Untagged{Last: last, ULP: 0x43, MSN: msn, MO: uint32(off)}.Put(h)
					}
					if !bytes.Equal(u[:hlen], h[:hlen]) || !bytes.Equal(u[hlen:], msg[off:off+len(u)-hlen]) {
						t.Fatalf("message %d of %d bytes at %d: header %x, want %x", i, len(msg), off, u[:hlen],
							h[:hlen])
					}
					if !last && len(u) != c.mulpdu() {
						t.Fatalf("MPA-4.5-5: ULPDU of %d bytes in the middle of a message", len(u))
					}
					if off += len(u) - hlen; last {
						break
					}
				}
			}
			p.wantEOF() // DDP-5.2-4, MPA-3-1, MPA-A.1-2: all messages, and nothing else
		})
	}
}

// peer reads what was written.
func (b *bufferNet) peer() net.Conn { return &bufferNet{in: bytes.NewReader(b.out.Bytes())} }

// DDP-5.2-7, DDP-5.2-9 and the examples of RFC 5041: 2048 bytes, MULPDU 1500.
func TestSegmentationExamples(t *testing.T) {
	c := bufferConn(Options{MaxULPDU: 1500}, 0)
	defer c.Close()
	msg := random(2048)
	for _, wr := range []*WorkRequest{{Op: Send, Data: msg}, {Op: Write, Data: msg, STag: 7, TO: 16384}} {
		post(t, c, wr)
	}
	p := &rawPeer{t: t, crc: true, nc: c.nc.(*bufferNet).peer()}
	for _, want := range []struct {
		header  string
		payload []byte
	}{
		{"0143 00000000 00000000 00000001 00000000", msg[:1482]},
		{"4143 00000000 00000000 00000001 000005ca", msg[1482:]},
		{"8140 00000007 0000000000004000", msg[:1486]},
		{"c140 00000007 00000000000045ce", msg[1486:]},
	} {
		if u := p.fpdu(); !bytes.Equal(u, append(unhex(want.header), want.payload...)) {
			t.Fatalf("%d bytes with header %x, want %s", len(u), u[:18], want.header)
		}
	}
}

// The golden FPDUs, sent and received: their form (MPA-4.1-1) and their CRC (MPA-4.4-12,
// MPA-4.4-16).
func TestGoldenStreams(t *testing.T) {
	z := strings.Repeat("00", 24)
	for _, tt := range []struct {
		id      string
		markers bool
		sizes   []int // of Sends of zeros
		tail    string
	}{
		// MPA-4.4-13
		{"V-MPA-1 MPA-7.1.2-19", false, []int{24}, "002a" + send1 + z + "b7243ec3"},
		// A Marker right before an FPDU: MPA-4.2-1, MPA-4.3-7, MPA-4.4-15
		{"Figure 5 MPA-7.1.2-18", true, []int{24}, "00000000 002a" + send1 + z + "52239983"},
		// A Marker inside of an FPDU: MPA-4.2-4
		{"Figure 6 V-MPA-2", true, []int{464, 24}, "a01ee4fd 002a" + send2 + "00000014" + z + "84925898"},
		// A Marker after PAD: MPA-4.4-14
		{"V-MPA-3", true, []int{506 - 18}, "000001fc 38cf64e8"},
		// A Marker between two FPDUs: MPA-4.3-6
		{"V-MPA-4", true, []int{502 - 18, 24}, "a09bb55b 00000000 002a" + send2 + z + "cc08199e"},
		{"V-MPA-5", true, []int{1442 - 18}, "c4c7dc02"},
	} {
		t.Run(tt.id, func(t *testing.T) {
			markers := 0
			if tt.markers {
				markers = 3
			}
			c := bufferConn(Options{}, markers)
			defer c.Close()
			for _, n := range tt.sizes {
				post(t, c, &WorkRequest{Op: Send, Data: make([]byte, n)})
			}
			out := c.nc.(*bufferNet).out.Bytes()
			if !bytes.HasSuffix(out, unhex(tt.tail)) {
				t.Fatalf("sent %x", out)
			}
			in := bufferConn(Options{}, markers)
			defer in.Close()
			in.nc.(*bufferNet).in = bytes.NewReader(out)
			for _, n := range tt.sizes {
				if ev := receive(t, in); len(ev.Data) != n {
					t.Fatalf("MPA-4.4-17: %d bytes came", len(ev.Data))
				}
			}
		})
	}
}

// A receiver that asked for Markers ignores or refuses unusual ones, as the RFC says.
func TestReceivedMarkers(t *testing.T) {
	first, grid := wire.MarkerGrid(0).AppendFPDU(nil, frame(append(unhex(send1), make([]byte, 464)...)), true)
	fig6 := unhex("002a" + send2 + "00000014" + strings.Repeat("00", 24) + "84925898")
	if grid != 492 {
		t.Fatal("not the stream of Figure 6")
	}
	reseal := func(edit func(b []byte)) []byte {
		b := bytes.Clone(fig6)
		edit(b)
		return sealed(b[:len(b)-4])
	}
	long, _ := wire.MarkerGrid(0).AppendFPDU(nil, frame(append(unhex(send1), make([]byte, 1400)...)), true)
	long[1024+3] -= 4 // the third Marker
	binary.LittleEndian.PutUint32(long[len(long)-4:], wire.UpdateCRC(0, long[:len(long)-4]))
	for _, tt := range []struct {
		id     string
		stream []byte
		want   wire.Reason // zero: accepted
	}{
		{"MPA-4.4-17 Figure 6", append(first, fig6...), wire.Reason{}},
		{"MPA-4.2-3 RESERVED is ignored", append(first, reseal(func(b []byte) { b[20], b[21] = 0xff, 0xff })...),
			wire.Reason{}},
		{"MPA-4.2-6 MPA-4.3-8 low bits of FPDUPTR", append(first, reseal(func(b []byte) { b[23] = 0x17 })...),
			wire.Reason{}},
		{"MPA-4.2-6 low bits not in the CRC",
			append(first, func() []byte { b := bytes.Clone(fig6); b[23] = 0x17; return b }()...), wire.ReasonCRC},
		{"MPA-4.3-1 CRC without the Marker", append(first, append(bytes.Clone(fig6[:48]), unhex("290fbede")...)...),
			wire.ReasonCRC},
		{"MPA-8-5 MPA-5.2-2 MPA-8-7 FPDUPTR off by 4", append(first, reseal(func(b []byte) { b[23] = 0x10 })...),
			wire.ReasonMarker},
		{"MPA-8-6 FPDUPTR of the third Marker", long, wire.ReasonMarker},
		{"MPA-4.3-6 CRC without the Marker in front", func() []byte {
			b := frame(append(unhex(send1), make([]byte, 24)...))
			return append(make([]byte, 4), b...)
		}(), wire.ReasonCRC},
	} {
		t.Run(tt.id, func(t *testing.T) {
			c := bufferConn(Options{}, 1)
			defer c.Close()
			c.nc.(*bufferNet).in = bytes.NewReader(tt.stream)
			var ev Event
			err := c.Receive(&ev)
			for err == nil {
				err = c.Receive(&ev)
			}
			if tt.want == (wire.Reason{}) {
				if err != io.EOF {
					t.Fatal(err)
				}
				return
			}
			asFault(t, err, tt.want, false)
		})
	}
}

// MPA-4.3-5, MPA-4.3-10: the position of a Marker does not depend on a counter
// that could wrap.
func TestMarkerGridDoesNotWrap(t *testing.T) {
	for pos := range 3000 {
		if g := wire.MarkerGrid(0).Advance(pos); int(g) != pos%512 {
			t.Fatal(pos, g)
		}
	}
	g := wire.MarkerGrid(4)
	for range 1 << 16 { // 4 GiB further
		g = g.Advance(1 << 16)
	}
	if g != 4 {
		t.Fatal(g)
	}
}

// MPA-4.1-3, MPA-4.1-4, MPA-4.1-5, DDP-4.1-9, RDMAP-4.1-8: a receiver ignores these bits.
func TestIgnoredBits(t *testing.T) {
	for n := range 5 {
		p, c := responder(t, Options{})
		u := append(unhex("7d73 00000000 00000000 00000001 00000000"), bytes.Repeat([]byte{'a'}, n)...)
		b := binary.BigEndian.AppendUint16(nil, uint16(len(u)))
		b = append(append(b, u...), bytes.Repeat([]byte{0xff}, wire.Pad(len(u)))...)
		p.write(sealed(b))
		if ev := receive(t, c); string(ev.Data) != strings.Repeat("a", n) {
			t.Fatalf("%d bytes: %+v", n, ev)
		}
		post(t, c, &WorkRequest{Op: Send, Data: u})
		p.fpdu() // checks PAD
	}
}

// maxseg sets TCP_MAXSEG of a socket that is not connected.
func maxseg(n int) func(network, address string, c syscall.RawConn) error {
	return func(_, _ string, c syscall.RawConn) (err error) {
		c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_MAXSEG, n) })
		return err
	}
}

// MPA-3-2, MPA-5.1-1: MULPDU comes from the segment size of the TCP connection.
func TestMULPDUIsThatOfTCP(t *testing.T) {
	l, err := (&net.ListenConfig{Control: maxseg(1460)}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	nc, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	raw, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	p := &rawPeer{t: t, nc: raw, crc: true}
	p.write(unhex(repKey + "40010000")) // a Reply may well be there already
	c, _, err := Initiate(t.Context(), nc, Options{Rev: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	p.startupFrame()
	if n := emss(c.nc); n > 1460 || n < 1400 { // less what TCP options take
		t.Fatalf("EMSS %d", n)
	}
	want := wire.MULPDU(emss(c.nc), false)
	post(t, c, &WorkRequest{Op: Send, Data: make([]byte, 5000)})
	for off := 0; off < 5000; {
		u := p.fpdu()
		if off += len(u) - wire.UntaggedLen; len(u) != want && off != 5000 {
			t.Fatalf("ULPDU of %d bytes, MULPDU %d", len(u), want)
		}
	}
}

// MPA-4.4-3, MPA-4.4-4: with WholeCRC a Responder asks for CRCs if segments have a multiple of 4 bytes, and
// otherwise leaves it to the peer.
func TestWholeCRC(t *testing.T) {
	for _, tt := range []struct {
		mss  int // that the Responder announces; 0: of the loopback
		c    string
		asks bool
	}{{1448 + 12, "00", true}, {1446 + 12, "00", false}, {1446 + 12, "40", false}, {0, "00", false}, {1445 + 12, "00", false}} {
		l, err := (&net.ListenConfig{Control: maxseg(tt.mss)}).Listen(t.Context(), "tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		raw, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer raw.Close()
		nc, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		p := &rawPeer{t: t, nc: raw}
		p.write(unhex(reqKey + tt.c + "010000"))
		if n := emss(nc); n < 1400 || tt.mss > 0 && n != tt.mss-12 {
			t.Fatalf("EMSS %d", n)
		}
		c, err := Respond(t.Context(), nc, Options{WholeCRC: true}, func(*Request) Answer { return Answer{} })
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		want := map[bool]string{true: "40010000", false: "00010000"}[tt.asks]
		if got := p.startupFrame(); !bytes.Equal(got, unhex(repKey+want)) {
			t.Errorf("MSS %d: Reply %x", tt.mss, got)
		}
		if c.CRC() != (tt.asks || tt.c == "40") {
			t.Errorf("MSS %d, C %s: CRC %t", tt.mss, tt.c, c.CRC())
		}
	}
}

// anotherSocket is the RawConn of another socket.
type anotherSocket struct {
	syscall.RawConn
	fd int
}

func (s anotherSocket) Control(f func(fd uintptr)) error { f(uintptr(s.fd)); return nil }

// MPA-4.5-3, MPA-4.5-6, DDP-3-1, DDP-3-2, MPA-A.1-2: a new segment size applies after at most
// remeasure batches. MPA-4.5-7: the MULPDU does not fall below 128, even with a segment size of
// 88 bytes, the smallest of Linux.
func TestMULPDUFollowsTCP(t *testing.T) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	p, c := responder(t, Options{})
	c.raw = anotherSocket{c.raw, fd}
	p.send(send1)
	receive(t, c)
	for _, tt := range []struct{ emss, mulpdu int }{{1460, 1454}, {536, 530}, {88, 128}, {8960, 8954}} {
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_MAXSEG, tt.emss); err != nil {
			t.Fatal(err)
		}
		if n := c.mulpdu(); n != tt.mulpdu {
			t.Fatalf("SEC-3723.5.6-1: EMSS %d: MULPDU %d", tt.emss, n)
		}
		for range remeasure {
			post(t, c, &WorkRequest{Op: Write})
			p.fpdu()
		}
		post(t, c, &WorkRequest{Op: Write, Data: make([]byte, 10000)})
		for off := 0; off < 10000; {
			u := p.fpdu()
			if off += len(u) - wire.TaggedLen; len(u) != tt.mulpdu && off != 10000 {
				t.Fatalf("EMSS %d: ULPDU of %d bytes", tt.emss, len(u))
			}
		}
	}
}

// MPA-5.1-2, MPA-4.5-7, MPA-3-5: without TCP_MAXSEG, and with the option.
func TestMULPDULimits(t *testing.T) {
	for _, tt := range []struct{ option, want int }{{0, 64768}, {64768, 64768}, {1442, 1442}, {128, 128}} {
		c := bufferConn(Options{MaxULPDU: tt.option}, 0)
		if n := c.mulpdu(); n != tt.want {
			t.Errorf("MaxULPDU %d: MULPDU %d", tt.option, n)
		}
		c.Close()
	}
}

// MPA-5.1-3, MPA-A.2-1: small FPDUs leave without delay.
func TestNoDelay(t *testing.T) {
	_, c := responder(t, Options{})
	c.raw.Control(func(fd uintptr) {
		if on, err := unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NODELAY); on == 0 || err != nil {
			t.Error("TCP_NODELAY", on, err)
		}
	})
}

// MPA-A.5-1, MPA-9.1-2: a Conn receives the largest possible FPDUs, also those that siw sends over
// loopback and RFC 5044 does not allow, without more memory.
func TestLargestFPDU(t *testing.T) {
	for _, n := range []int{64768, 65474, 65535} {
		p, c := responder(t, Options{MaxSend: 1 << 16})
		p.nc.SetDeadline(time.Now().Add(testkit.Patience))
		msg := random(n - wire.UntaggedLen)
		go p.write(frame(append(unhex(send1), msg...)))
		if ev := receive(t, c); !bytes.Equal(ev.Data, msg) {
			t.Fatalf("ULPDU of %d bytes: %d came", n, len(ev.Data))
		}
		if cap(c.rx.asm) > 1<<16 {
			t.Fatal("the receiver has grown")
		}
	}
}

// A time-out loses nothing, even if part of an FPDU has come.
func TestReceiveTimeout(t *testing.T) {
	for _, n := range []int{1, 8000} {
		stream := frame(append(unhex(send1), bytes.Repeat([]byte{1}, n)...))
		for _, part := range []int{0, 1, 2, 10, len(stream) - 1} {
			p, c := responder(t, Options{})
			p.write(stream[:part])
			c.SetReceiveDeadline(time.Now().Add(5 * time.Millisecond))
			var ev Event
			if err := c.Receive(&ev); !os.IsTimeout(err) {
				t.Fatalf("%d bytes: %v", part, err)
			}
			c.SetReceiveDeadline(time.Time{})
			p.write(stream[part:])
			if ev := receive(t, c); len(ev.Data) != n {
				t.Fatalf("%d bytes before the time-out: %d came", part, len(ev.Data))
			}
			// DDP-6.2.1-6: that holds after the end of our direction, too.
			c.CloseWrite()
			p.wantEOF()
			c.SetReceiveDeadline(time.Now().Add(time.Millisecond))
			if err := c.Receive(&ev); !os.IsTimeout(err) {
				t.Fatal(err)
			}
			c.SetReceiveDeadline(time.Time{})
			p.send(send2)
			receive(t, c)
		}
	}
	// Inside of a long payload a time-out ends the stream.
	p, c := responder(t, Options{})
	var buf [20000]byte
	expose(c, 0x100, buf[:], 0, RemoteWrite)
	p.write(frame(append(unhex("c140 00000100 0000000000000000"), buf[:]...))[:10000])
	c.SetReceiveDeadline(time.Now().Add(300 * time.Millisecond)) // not over before Receive begins
	wantFault(t, c, wire.ReasonClosed)
	wantFault(t, c, wire.ReasonClosed) // and stays so
}
