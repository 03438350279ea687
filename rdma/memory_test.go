package rdma

import (
	"bytes"
	"encoding/binary"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/rdma/wire"
	"github.com/iser-target/iser-target/rdma/wire/vectors"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A deadline that the ULP sets does not make a Deregister wait for the peer.
func TestDeadlineDuringDeregister(t *testing.T) {
	_, c := responder(t, Options{})
	c.interruptRead()
	if err := c.SetReceiveDeadline(time.Now().Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	c.nc.Read(make([]byte, 100)) // the first FPDU, if the interrupt is lost
	_, err := c.nc.Read(make([]byte, 1))
	if !c.interrupted(err) {
		t.Fatal(err)
	}
	if c.interrupted(err) || c.deadline.IsZero() {
		t.Fatal("interrupted twice")
	}
}

// DDP-8.3-1, DDP-8.3.1-6, RDMAP-8.1.1-6: after Deregister no byte changes, although a long
// Write is coming in and its sender stalls, continues, or does both.
func TestDeregisterDuringWrite(t *testing.T) {
	const size = 60000
	for _, part := range []int{0, 20, 5000, 30000, size} {
		p, c := responder(t, Options{})
		buf := make([]byte, size)
		r := expose(c, 0x100, buf, 0, RemoteWrite)
		f := frame(append(unhex("c140 00000100 0000000000000000"), bytes.Repeat([]byte{0xff}, size)...))
		events := serve(c)
		p.write(f[:part])
		if part > 10000 {
			testkit.Eventually(t, "data is being placed",
				func() bool { c.mem.mu.Lock(); defer c.mem.mu.Unlock(); return r.busy > 0 })
		}
		c.Deregister(r)
		before := bytes.Clone(buf)
		go p.nc.Write(f[part:])
		p.want("the rest goes nowhere",
			"4147 00000000 00000002 00000001 00000000 1100c000 ea6e c140 00000100 0000000000000000")
		p.nc.Close()
		asFault(t, next(t, events).err, wire.ReasonInvalidSTag, false)
		if !bytes.Equal(buf, before) {
			t.Fatalf("SEC-5042.6.2.2-2: %d bytes of the Write had come: memory changed after Deregister", part)
		}
	}
}

// The memory can be reused right after Deregister. The race detector checks that.
func TestDeregisterRace(t *testing.T) {
	for i := range 30 {
		p, c := responder(t, Options{NoCRC: i%2 == 0})
		buf := make([]byte, 50000)
		r := expose(c, 0x100, buf, 0, RemoteWrite)
		f := frame(append(unhex("c140 00000100 0000000000000000"), bytes.Repeat([]byte{0xff}, len(buf))...))
		go func() {
			for {
				if _, err := p.nc.Write(f); err != nil {
					return
				}
			}
		}()
		events := serve(c)
		for range i * 50 {
			runtime.Gosched()
		}
		// A receive deadline of the ULP does not disturb that.
		if i%3 == 0 {
			go c.SetReceiveDeadline(time.Now().Add(time.Hour))
		}
		c.Deregister(r)
		clear(buf)
		c.Deregister(r) // twice does no harm
		c.Close()
		p.nc.Close()
		next(t, events)
		for _, b := range buf {
			if b != 0 {
				t.Fatal("written after Deregister")
			}
		}
	}
}

// RDMAP-4.8-15: Deregister waits for a Response that is being sent, so that none is cut
// short. Close ends the wait.
func TestDeregisterDuringRead(t *testing.T) {
	for _, stall := range []bool{false, true} {
		p, c := responder(t, Options{})
		buf := make([]byte, 32<<20)
		r := expose(c, 0x100, buf, 0, RemoteRead)
		events := serve(c)
		p.send(vectors.ReadRequestHex("00000001", "00000001", "02000000", "00000100", "0000000000000000"))
		first := p.fpdu()
		back := make(chan struct{})
		go func() { c.Deregister(r); clear(buf); close(back) }()
		if stall {
			testkit.Eventually(t, "Deregister waits",
				func() bool { c.mem.mu.Lock(); defer c.mem.mu.Unlock(); return r.waiting })
			c.Close()
			<-back
			next(t, events)
			continue
		}
		for n := len(first) - 14; n < len(buf); {
			u := p.fpdu()
			n += len(u) - 14
		}
		<-back
	}
}

// RDMAP-8.1.1-8: STags use all 32 bits. None is 0, and no two are equal at the same time.
func TestSTags(t *testing.T) {
	c := bufferConn(Options{ORD: 16000}, 0)
	defer c.Close()
	seen := map[wire.STag]bool{}
	const n = 100000
	var ones [32]int
	regions := make([]Region, n)
	for i := range regions {
		s := c.Register(&regions[i], nil, 0, RemoteRead)
		if s == 0 || seen[s] || s != regions[i].STag() {
			t.Fatal("STag", s)
		}
		seen[s] = true
		for b := range ones {
			ones[b] += int(s >> b & 1)
		}
	}
	for b, k := range ones {
		if k < n*48/100 || k > n*52/100 {
			t.Errorf("SEC-5042.6.1.1-4: bit %d is set in %d of %d STags", b, k, n)
		}
	}
	for i := range regions {
		c.Deregister(&regions[i])
	}
	other := bufferConn(Options{}, 0)
	defer other.Close()
	var r Region
	if seen[other.Register(&r, nil, 0, RemoteRead)] {
		t.Error("two streams draw the same STags")
	}
}

// The sink of an RDMA Read has an STag, too, and the streams of a domain know it. It grants nothing but the
// Response to its Read, and that to its own stream only.
func TestSinksGrantNothing(t *testing.T) {
	const own, foreign, later = "11111111", "22222222", "33333333"
	for _, tt := range []struct {
		id, ulpdu string
		reason    wire.Reason
		terminate string
	}{
		{"DDP-7.2-5 SEC-5042.6.1.1-1 Write to the sink of another stream", "c140 " + foreign + " 0000000000000000 01",
			wire.ReasonStream, "1102c000 000f c140 " + foreign + " 0000000000000000"},
		{"DDP-7.2-5 Read Response to the sink of another stream", "c142 " + foreign + " 0000000000000000 01020304",
			wire.ReasonStream, "1102c000 0012 c142 " + foreign + " 0000000000000000"},
		{"RDMAP-4.8-20 RDMAP-7.2-8 Read of the sink of another stream",
			vectors.ReadRequestHex("00000001", "00000001", "00000004", foreign, "0000000000000000"), wire.ReasonReadStream,
			"0103e000 002e" + vectors.ReadRequestHex("00000001", "00000001", "00000004", foreign, "0000000000000000")},
		{"RDMAP-4.8-19 SEC-5042.6.3.5-1 Read of a sink",
			vectors.ReadRequestHex("00000001", "00000001", "00000004", own, "0000000000000000"), wire.ReasonReadAccess,
			"0102e000 002e" + vectors.ReadRequestHex("00000001", "00000001", "00000004", own, "0000000000000000")},
		{"DDP-7.1-11 Write to a sink", "c140 " + own + " 0000000000000000 01", wire.ReasonInvalidSTag,
			"1100c000 000f c140 " + own + " 0000000000000000"},
		{"DDP-7.2-3 Read Response to the sink of a later Read", "c142 " + later + " 0000000000000000 01020304",
			wire.ReasonInvalidSTag, "1100c000 0012 c142 " + later + " 0000000000000000"},
		{"RDMAP-7.2-5 invalidation of a sink", "4144 " + own + " 00000000 00000001 00000000", wire.ReasonNotInvalidated,
			"0109c000 0012 4144 " + own + " 00000000 00000001 00000000"},
	} {
		t.Run(tt.id, func(t *testing.T) {
			domain := NewDomain()
			p, c := responder(t, Options{Domain: domain})
			q, other := responder(t, Options{Domain: domain})
			var mem [3][4]byte
			events, others := serve(c), serve(other)
			for i, s := range []struct {
				c    *Conn
				p    *rawPeer
				stag string
			}{{c, p, own}, {other, q, foreign}, {c, p, later}} {
				postRead(t, s.c, &WorkRequest{Op: Read, STag: 1, Data: mem[i][:]}, wire.STag(binary.BigEndian.Uint32(unhex(s.stag))))
				s.c.Flush()
				s.p.fpdu()
			}
			p.send(tt.ulpdu)
			p.wantTerminate(tt.terminate)
			p.nc.Close()
			for next(t, events).Read != nil {
			}
			if mem != [3][4]byte{} {
				t.Errorf("memory was written: %x", mem)
			}
			// The neighbour's Read is not disturbed.
			q.send("c142 " + foreign + " 0000000000000000 01020304")
			if o := next(t, others); o.Read == nil || o.Err != nil || mem[1] != [4]byte{1, 2, 3, 4} {
				t.Errorf("%+v, %x", o, mem[1])
			}
			if c.err == nil || c.rx.failed == nil || asFault(t, c.rx.failed, tt.reason, false) == nil {
				t.Error("not ended")
			}
		})
	}
}

// DDP-7.1-14, RDMAP-7.2-11: tagged offsets go up to 2^64-1. A buffer may end there, and no access goes beyond.
func TestEndOfTaggedOffsets(t *testing.T) {
	const last = "fffffffffffffff0" // of 16 bytes
	for _, tt := range []struct {
		id, ulpdu, terminate string
	}{
		{"Write", "c140 00000100 " + last + strings.Repeat("ab", 17), "1103c000 001f c140 00000100 " + last},
		{"Write after the end", "c140 00000100 0000000000000000 01", "1101c000 000f c140 00000100 0000000000000000"},
		{"Read", vectors.ReadRequestHex("00000001", "00000002", "00000011", "00000100", last),
			"0104e000 002e" + vectors.ReadRequestHex("00000001", "00000002", "00000011", "00000100", last)},
	} {
		t.Run(tt.id, func(t *testing.T) {
			p, c := responder(t, Options{})
			buf := make([]byte, 16)
			expose(c, 0x100, buf, 1<<64-16, RemoteRead|RemoteWrite)
			events := serve(c)
			p.send("8140 00000100 "+last+strings.Repeat("cd", 15), "c140 00000100 ffffffffffffffff cd",
				vectors.ReadRequestHex("00000001", "00000001", "00000010", "00000100", last))
			p.want("16 bytes", "c142 11111111 2222222233333333"+strings.Repeat("cd", 16))
			p.send(tt.ulpdu)
			p.wantTerminate(tt.terminate)
			p.nc.Close()
			next(t, events)
			if !bytes.Equal(buf, bytes.Repeat([]byte{0xcd}, 16)) {
				t.Errorf("%x", buf)
			}
		})
	}
}

// DDP-8.2-1, DDP-8.3.1-1, RDMAP-8.1.1-1: an STag of another domain gets the same error as one
// that never existed.
func TestOtherDomain(t *testing.T) {
	p, c := responder(t, Options{})
	_, other := responder(t, Options{})
	buf := make([]byte, 4)
	expose(other, 0x400, buf, 0, RemoteWrite)
	p.send("c140 00000400 0000000000000000 01020304")
	events := serve(c)
	p.wantTerminate("1100c000 0012 c140 00000400 0000000000000000")
	p.nc.Close()
	next(t, events)
	if !bytes.Equal(buf, make([]byte, 4)) {
		t.Fatal("SEC-5042.6.1.1-2: written")
	}
}
