package rdma

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"runtime"
	"testing"
	"time"

	"github.com/iser-target/iser-target/rdma/wire"
	"github.com/iser-target/iser-target/rdma/wire/vectors"
	"github.com/iser-target/iser-target/tests/testkit"
)

var unhex = testkit.Unhex

// A rawPeer is the other end of a Conn. It handles startup frames and FPDUs as bytes, and uses only
// package wire of the engine.
type rawPeer struct {
	t       testing.TB
	nc      net.Conn
	crc     bool
	out, in *wire.MarkerGrid // nil: no Markers
}

const (
	reqKey = vectors.RequestKey
	repKey = vectors.ReplyKey
)

// rawPair returns a rawPeer and the TCP connection for the Conn.
func rawPair(t testing.TB) (p *rawPeer, nc net.Conn) {
	a, b := tcpPair(t)
	a.SetDeadline(time.Now().Add(testkit.Patience))
	return &rawPeer{t: t, nc: a, crc: true}, b
}

// respondTo starts a Responder against a rawPeer that sends request, in hexadecimal digits. It
// returns the Reply, too.
func respondTo(t testing.TB, request string, o Options, a Answer) (p *rawPeer, c *Conn, reply []byte) {
	t.Helper()
	p, nc := rawPair(t)
	p.write(unhex(request))
	c, err := Respond(context.Background(), nc, o, func(*Request) Answer { return a })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return p, c, p.startupFrame()
}

// responder returns a Responder that has received its first FPDU, an empty Write. Unless o says otherwise,
// its ORD is Options.ORD, although the peer states no depths.
func responder(t testing.TB, o Options) (*rawPeer, *Conn) {
	t.Helper()
	o.UnstatedORD = cmp.Or(o.UnstatedORD, o.ORD, defaultDepth)
	p, c, _ := respondTo(t, reqKey+"40010000", o, Answer{})
	p.write(unhex("000e c140 00000001 0000000000000000 ebd34c5f"))
	return p, c
}

// initiator returns an Initiator with a rawPeer as Responder.
func initiator(t testing.TB, o Options, reply string) (p *rawPeer, c *Conn) {
	t.Helper()
	p, nc := rawPair(t)
	done := make(chan error, 1)
	go func() {
		var err error
		c, _, err = Initiate(context.Background(), nc, o)
		done <- err
	}()
	p.startupFrame()
	p.write(unhex(reply))
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return p, c
}

func (p *rawPeer) write(b []byte) {
	p.t.Helper()
	if _, err := p.nc.Write(b); err != nil {
		p.t.Fatal(err)
	}
}

func (p *rawPeer) read(n int) []byte {
	p.t.Helper()
	b := make([]byte, n)
	if m, err := io.ReadFull(p.nc, b); err != nil {
		p.t.Fatalf("%x, then %v", b[:m], err)
	}
	return b
}

func (p *rawPeer) startupFrame() []byte {
	p.t.Helper()
	b := p.read(wire.StartupLen)
	return append(b, p.read(int(binary.BigEndian.Uint16(b[18:])))...)
}

// frame returns the FPDU of a ULPDU, with zeros as PAD and a good CRC.
func frame(ulpdu []byte) []byte {
	b := binary.BigEndian.AppendUint16(nil, uint16(len(ulpdu)))
	b = append(b, ulpdu...)
	return sealed(append(b, make([]byte, wire.Pad(len(ulpdu)))...))
}

// sealed appends the CRC to b.
func sealed(b []byte) []byte {
	return binary.LittleEndian.AppendUint32(b, wire.UpdateCRC(0, b))
}

// send sends each ULPDU, in hexadecimal digits, in its own FPDU.
func (p *rawPeer) send(ulpdus ...string) {
	p.t.Helper()
	var b []byte
	for _, u := range ulpdus {
		f := frame(unhex(u))
		if p.out == nil {
			b = append(b, f...)
		} else {
			b, *p.out = p.out.AppendFPDU(b, f, p.crc)
		}
	}
	p.write(b)
}

// fpdu reads an FPDU, checks PAD and CRC and returns the ULPDU.
func (p *rawPeer) fpdu() []byte {
	p.t.Helper()
	if p.in != nil {
		return p.markedFPDU()
	}
	b := p.read(2)
	n := int(binary.BigEndian.Uint16(b))
	b = append(b, p.read(n+wire.Pad(n)+wire.CRCLen)...)
	body, crc := b[:len(b)-wire.CRCLen], b[len(b)-wire.CRCLen:]
	if !bytes.Equal(body[2+n:], zeros[:wire.Pad(n)]) {
		p.t.Fatalf("MPA-4.1-3: PAD %x", body[2+n:])
	}
	if got, want := wire.CRC(crc), wire.UpdateCRC(0, body); p.crc && got != want {
		p.t.Fatalf("MPA-4.4-12: CRC %08x, want %08x", got, want)
	}
	return body[2:][:n]
}

// markedFPDU reads an FPDU with Markers (RFC 5044, section 4.3). It is written for clarity and
// without package wire.
func (p *rawPeer) markedFPDU() []byte {
	p.t.Helper()
	var raw, plain []byte
	start := 0 // of ULPDU_Length in raw
	take := func(n int) {
		for ; n > 0; n -= 4 {
			if *p.in%512 == 0 {
				m := p.read(4)
				if len(raw) == 0 {
					start = 4
				}
				if want := max(0, len(raw)-start); m[0] != 0 || m[1] != 0 || int(m[2])<<8|int(m[3]) != want {
					p.t.Fatalf("Marker %x at %d, want FPDUPTR %d", m, *p.in, want)
				}
				raw = append(raw, m...)
				*p.in += 4
			}
			w := p.read(4)
			raw, plain = append(raw, w...), append(plain, w...)
			*p.in += 4
		}
	}
	take(4)
	n := int(binary.BigEndian.Uint16(plain))
	take(2 + n + wire.Pad(n) - 4)
	if *p.in%512 == 0 { // between PAD and CRC
		m := p.read(4)
		if int(m[2])<<8|int(m[3]) != len(raw)-start {
			p.t.Fatalf("Marker %x before the CRC", m)
		}
		raw = append(raw, m...)
		*p.in += 4
	}
	*p.in += 4
	if crc := p.read(4); p.crc && wire.CRC(crc) != wire.UpdateCRC(0, raw) {
		p.t.Fatal("CRC of an FPDU with Markers")
	}
	return plain[2:][:n]
}

// want reads FPDUs and compares their ULPDUs.
func (p *rawPeer) want(id string, ulpdus ...string) {
	p.t.Helper()
	for _, u := range ulpdus {
		if got := p.fpdu(); !bytes.Equal(got, unhex(u)) {
			p.t.Fatalf("%s: ULPDU\n%x, want\n%x", id, got, unhex(u))
		}
	}
}

// wantTerminate reads one FPDU, which must be a Terminate with this header,
// and then the end of the stream.
func (p *rawPeer) wantTerminate(header string) {
	p.t.Helper()
	p.want("Terminate", "4147 00000000 00000002 00000001 00000000"+header)
	p.wantEOF()
}

func (p *rawPeer) wantEOF() {
	p.t.Helper()
	if n, err := p.nc.Read(make([]byte, 1)); n != 0 || err != io.EOF {
		p.t.Fatalf("RDMAP-5.4-8: read %d bytes, %v, where the stream should end", n, err)
	}
}

// silent fails if the Conn sends anything. The Conn has finished its work when this is called, so
// a short wait is enough.
func (p *rawPeer) silent(why string) {
	p.t.Helper()
	p.nc.SetReadDeadline(time.Now().Add(5 * time.Millisecond))
	n, err := p.nc.Read(make([]byte, 1))
	if n != 0 || !isTimeout(err) {
		p.t.Fatalf("%s: read %d bytes, %v", why, n, err)
	}
	p.nc.SetReadDeadline(time.Now().Add(testkit.Patience))
}

func isTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}

// expose registers buf with a chosen STag, so that tests can write it down.
func expose(c *Conn, stag wire.STag, buf []byte, base uint64, a Access) *Region {
	r := &Region{}
	old := c.Register(r, buf, base, a)
	c.mem.mu.Lock()
	defer c.mem.mu.Unlock()
	delete(c.mem.regions, old)
	r.stag = stag
	c.mem.regions[stag] = r
	return r
}

// postRead posts a Read with that sink, which no other goroutine sends before.
func postRead(t *testing.T, c *Conn, wr *WorkRequest, stag wire.STag) {
	t.Helper()
	c.mu.Lock()
	for c.flushing {
		c.mu.Unlock()
		runtime.Gosched()
		c.mu.Lock()
	}
	c.flushing = true
	c.mu.Unlock()
	if err := c.Post(wr); err != nil {
		t.Fatal(err)
	}
	sinkSTag(c, stag)
	c.mu.Lock()
	c.flushing = false
	c.mu.Unlock()
}

// sinkSTag overwrites the sink of the latest Read.
func sinkSTag(c *Conn, stag wire.STag) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.queue.tail.sink = stag
}

// outcome is a result of Receive; Data is a copy.
type outcome struct {
	Event
	err error
}

// serve receives in a goroutine of its own.
func serve(c *Conn) <-chan outcome {
	ch := make(chan outcome, 4096)
	go func() {
		defer close(ch)
		for {
			var o outcome
			if o.err = c.Receive(&o.Event); o.err != nil {
				ch <- o
				return
			}
			o.Data = bytes.Clone(o.Data)
			ch <- o
		}
	}()
	return ch
}

// next waits for an outcome.
func next(t testing.TB, ch <-chan outcome) outcome {
	t.Helper()
	select {
	case o := <-ch:
		return o
	case <-time.After(testkit.Patience):
		t.Fatal("nothing was received")
		panic("unreachable")
	}
}

// receive calls Receive, which must succeed.
func receive(t testing.TB, c *Conn) Event {
	t.Helper()
	var ev Event
	if err := c.Receive(&ev); err != nil {
		t.Fatal(err)
	}
	return ev
}

// wantFault receives until the stream ends by a local error with this reason.
func wantFault(t testing.TB, c *Conn, want wire.Reason) *StreamError {
	t.Helper()
	var ev Event
	err := c.Receive(&ev)
	return asFault(t, err, want, false)
}

func asFault(t testing.TB, err error, want wire.Reason, remote bool) *StreamError {
	t.Helper()
	var se *StreamError
	if !errors.As(err, &se) || se.Reason != want || se.Remote != remote {
		t.Fatalf("got %v, want %v, remote %t", err, want, remote)
	}
	return se
}
