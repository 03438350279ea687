package capture

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/rdma/llp"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A pair is the two ends of a connection over loopback. The target's end is tapped.
type pair struct {
	hub       *Hub
	target    *Conn
	initiator *net.TCPConn
}

func newPair(tb testing.TB, hub *Hub, addr string) *pair {
	tb.Helper()
	l, err := net.Listen("tcp", addr)
	if err != nil {
		tb.Skip(err) // no IPv6, say
	}
	defer l.Close()
	nc, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		tb.Fatal(err)
	}
	other, err := l.Accept()
	if err != nil {
		tb.Fatal(err)
	}
	p := &pair{hub, hub.Tap(other.(*net.TCPConn)), nc.(*net.TCPConn)}
	tb.Cleanup(func() { p.target.Close(); nc.Close() })
	return p
}

// send sends b from the initiator and reads it at the target.
func (p *pair) send(tb testing.TB, b []byte) {
	tb.Helper()
	go p.initiator.Write(b)
	if _, err := io.ReadFull(p.target, make([]byte, len(b))); err != nil {
		tb.Fatal(err)
	}
}

// answer writes parts at the target with one call and reads them at the initiator. Of three, half of the second may go by its pages, and the rest by a pipe.
func (p *pair) answer(tb testing.TB, parts ...[]byte) {
	tb.Helper()
	n := size(parts)
	done := make(chan error, 1)
	go func() {
		_, err := io.CopyN(io.Discard, p.initiator, int64(n))
		done <- err
	}()
	var err error
	switch len(parts) {
	case 1:
		_, err = p.target.Write(parts[0])
	case 3:
		half := min(len(parts[1])/2, 4096)
		pipe := llp.TakePipe(half, 0)
		if _, err := unix.Write(pipe.In(), parts[1][:half]); err != nil {
			tb.Fatal(err)
		}
		pipe.Filled(half)
		_, err = p.target.WritePages([][]byte{parts[0], nil, parts[1][half:], parts[2]}, []llp.PagesPart{{Index: 1, Pipe: pipe, Len: half}, {Index: 2}})
		pipe.Release()
	default:
		_, err = p.target.WriteBuffers(parts)
	}
	if err := errors.Join(err, <-done); err != nil {
		tb.Fatal(err)
	}
}

func random(n int) []byte {
	b := make([]byte, n)
	var seed [32]byte
	binary.NativeEndian.PutUint64(seed[:], rand.Uint64())
	rand.NewChaCha8(seed).Read(b)
	return b
}

// A run is a capture that is running.
type run struct {
	k    *Capture
	out  bytes.Buffer
	sum  schema.Summary
	err  error
	done chan struct{}
}

func start(tb testing.TB, h *Hub, tsih uint16, max int64, w io.Writer) *run {
	tb.Helper()
	k, err := h.Start(tsih)
	if err != nil {
		tb.Fatal(err)
	}
	r := &run{k: k, done: make(chan struct{})}
	if w == nil {
		w = &r.out
	}
	go func() {
		defer close(r.done)
		r.sum, r.err = k.Run(context.Background(), w, max, "test", "session", "of a test")
	}()
	tb.Cleanup(func() { k.Stop(errors.New("test over")); <-r.done })
	return r
}

// stop ends r and returns its packets.
func (r *run) stop(tb testing.TB) []packet {
	tb.Helper()
	r.k.Stop(errors.New("enough"))
	select {
	case <-r.done:
	case <-time.After(testkit.Patience):
		tb.Fatal("the capture does not end")
	}
	if r.err != nil {
		tb.Fatal(r.err)
	}
	list := packets(tb, r.out.Bytes())
	if int64(r.out.Len()) != r.sum.Size || uint64(len(list)) != r.sum.Packets {
		tb.Errorf("%d bytes with %d packets, the summary is %+v", r.out.Len(), len(list), r.sum)
	}
	return list
}

// A packet is what a file says about a packet. Its checksums are right.
type packet struct {
	from, to netip.AddrPort
	seq, ack uint32
	flags    byte
	inbound  bool
	payload  []byte
	comment  string
	time     time.Time
}

// Numbers of draft-ietf-opsawg-pcapng: types of blocks, codes of options, flags.
const (
	sectionHeader       = 0x0a0d0d0a
	interfaceBlock      = 1
	interfaceStatistics = 5
	enhancedPacket      = 6

	optEnd     = 0
	optComment = 1
	epbFlags   = 2
	inbound    = 1
)

// packets reads a file and checks its form.
func packets(tb testing.TB, b []byte) (list []packet) {
	tb.Helper()
	for kinds := ""; len(b) > 0; {
		kind, n := le.Uint32(b), int(le.Uint32(b[4:]))
		if n%4 != 0 || n > len(b) || le.Uint32(b[n-4:]) != uint32(n) {
			tb.Fatalf("block of type %#x with %d bytes, of which the file has %d", kind, n, len(b))
		}
		body := b[8 : n-4]
		b = b[n:]
		switch kind {
		case sectionHeader:
			kinds += "S"
		case interfaceBlock:
			kinds += "I"
		case interfaceStatistics:
			kinds += "E"
		case enhancedPacket:
			list = append(list, parsePacket(tb, body))
		default:
			tb.Fatalf("block of type %#x", kind)
		}
		if whole := "SIE"; !strings.HasPrefix(whole, kinds) || len(b) == 0 && kinds != whole {
			tb.Fatalf("blocks %s", kinds)
		}
	}
	return list
}

func parsePacket(tb testing.TB, b []byte) (p packet) {
	tb.Helper()
	p.time = time.Unix(0, int64(le.Uint32(b[4:]))<<32|int64(le.Uint32(b[8:])))
	n := int(le.Uint32(b[12:]))
	if le.Uint32(b) != 0 || int(le.Uint32(b[16:])) != n {
		tb.Fatalf("packet %x", b[:20])
	}
	ip, options := b[20:][:n], b[20+n+-n&3:]
	for le.Uint16(options) != optEnd {
		code, l := le.Uint16(options), int(le.Uint16(options[2:]))
		switch code {
		case optComment:
			p.comment = string(options[4:][:l])
		case epbFlags:
			p.inbound = le.Uint32(options[4:]) == inbound
		}
		options = options[4+l+-l&3:]
	}
	var tcp, pseudo []byte
	var src, dst netip.Addr
	if ip[0]>>4 == 4 {
		if int(binary.BigEndian.Uint16(ip[2:])) != len(ip) || ip[0] != 0x45 || onesSum(ip[:20]) != 0xffff {
			tb.Fatalf("IPv4 header %x of %d bytes, sum %#x", ip[:20], len(ip), onesSum(ip[:20]))
		}
		src, _ = netip.AddrFromSlice(ip[12:16])
		dst, _ = netip.AddrFromSlice(ip[16:20])
		tcp, pseudo = ip[20:], append([]byte{}, ip[12:20]...)
	} else {
		if int(binary.BigEndian.Uint16(ip[4:])) != len(ip)-40 || ip[0] != 0x60 || ip[6] != 6 {
			tb.Fatalf("IPv6 header %x of %d bytes", ip[:40], len(ip))
		}
		src, _ = netip.AddrFromSlice(ip[8:24])
		dst, _ = netip.AddrFromSlice(ip[24:40])
		tcp, pseudo = ip[40:], append([]byte{}, ip[8:40]...)
	}
	pseudo = binary.BigEndian.AppendUint32(pseudo, uint32(len(tcp)))
	pseudo = append(pseudo, 0, 0, 0, 6)
	if sum := onesSum(append(pseudo, tcp...)); sum != 0xffff { // RFC 9293, section 3.1
		tb.Fatalf("TCP header %x, sum %#x", tcp[:20], sum)
	}
	p.from = netip.AddrPortFrom(src, binary.BigEndian.Uint16(tcp))
	p.to = netip.AddrPortFrom(dst, binary.BigEndian.Uint16(tcp[2:]))
	p.seq, p.ack, p.flags = binary.BigEndian.Uint32(tcp[4:]), binary.BigEndian.Uint32(tcp[8:]), tcp[13]
	p.payload = tcp[tcp[12]>>4*4:]
	return p
}

// onesSum returns the one's complement sum of RFC 1071, computed the slow way.
func onesSum(b []byte) uint32 {
	var sum uint32
	for i, o := range b {
		if i%2 == 0 {
			sum += uint32(o) << 8
		} else {
			sum += uint32(o)
		}
		sum = sum>>16 + sum&0xffff
	}
	return sum
}

// A side is the stream that one end of a flow sent.
type side struct {
	data  []byte
	next  uint32
	begun bool
	gaps  []uint32 // lengths in bytes
	fin   bool
}

// reassemble returns the streams of a file by sender.
func reassemble(tb testing.TB, list []packet) map[netip.AddrPort]*side {
	tb.Helper()
	sides := map[netip.AddrPort]*side{}
	get := func(a netip.AddrPort) *side {
		if sides[a] == nil {
			sides[a] = &side{}
		}
		return sides[a]
	}
	for i, p := range list {
		s, o := get(p.from), get(p.to)
		if p.flags&syn != 0 {
			if len(p.payload) != 0 {
				tb.Fatalf("packet %d: SYN with data", i)
			}
			*s = side{next: p.seq + 1, begun: true}
			continue
		}
		if !s.begun || !o.begun || p.flags&ack == 0 || p.ack != o.next {
			tb.Fatalf("packet %d acknowledges %d, want %d", i, p.ack, o.next)
		}
		if gap := p.seq - s.next; gap != 0 {
			if gap > maxGap+markerGrid {
				tb.Fatalf("packet %d: sequence number %d, want %d", i, p.seq, s.next)
			}
			s.gaps = append(s.gaps, gap)
			if p.comment == "" {
				tb.Errorf("packet %d: no comment about the gap of %d bytes", i, gap)
			}
		}
		if s.fin {
			tb.Fatalf("packet %d follows the end", i)
		}
		s.data = append(s.data, p.payload...)
		s.next = p.seq + uint32(len(p.payload))
		if p.flags&fin != 0 {
			s.fin = true
			s.next++
		}
	}
	return sides
}

func addr(a net.Addr) netip.AddrPort { return addrPort(a) }

// A capture from the beginning of a connection has exactly the bytes that pass, in packets
// of a TCP connection that opens and closes.
func TestCaptureHasExactlyWhatPasses(t *testing.T) {
	for _, host := range []string{"127.0.0.1:0", "[::1]:0"} {
		t.Run(host, func(t *testing.T) {
			p := newPair(t, NewHub(), host)
			var in, out []byte
			pass := func(n int) {
				request, answer := random(n), random(3*n)
				in, out = append(in, request...), append(out, answer...)
				p.send(t, request)
				p.answer(t, answer[:n/2], answer[n/2:2*n], answer[2*n:])
			}
			pass(48) // into the head
			p.hub.Join(p.target, 1)
			r := start(t, p.hub, 1, 64<<20, nil)
			for _, n := range []int{1, 2, 100, maxSegment - 1, maxSegment, maxSegment + 1, 300_001} {
				pass(n)
			}
			last := random(7)
			out = append(out, last...)
			p.answer(t, last)
			p.initiator.CloseWrite()
			if _, err := p.target.Read(make([]byte, 1)); err != io.EOF {
				t.Fatal(err)
			}
			p.target.CloseWrite()
			p.target.Close()
			list := r.stop(t)
			sides := reassemble(t, list)
			for _, s := range []struct {
				name string
				of   net.Addr
				want []byte
			}{{"initiator", p.initiator.LocalAddr(), in}, {"target", p.initiator.RemoteAddr(), out}} {
				got := sides[addr(s.of)]
				if !bytes.Equal(got.data, s.want) || len(got.gaps) != 0 || !got.fin {
					t.Errorf("%s: %d bytes, want these %d; gaps %v, end %t", s.name, len(got.data), len(s.want), got.gaps, got.fin)
				}
			}
			for i, pkt := range list {
				if pkt.inbound != (pkt.from == addr(p.initiator.LocalAddr())) {
					t.Errorf("packet %d from %v: inbound is %t", i, pkt.from, pkt.inbound)
				}
				if time.Since(pkt.time).Abs() > time.Minute {
					t.Errorf("packet %d is of %v", i, pkt.time)
				}
			}
			want := schema.Summary{Packets: uint64(len(list)), Octets: uint64(len(in) + len(out)), Size: int64(r.out.Len()), Reason: "enough"}
			if r.sum != want {
				t.Errorf("%+v, want %+v", r.sum, want)
			}
		})
	}
}

// unit returns a stand-in for a PDU: n in four bytes, and n bytes.
func unit(n int) []byte {
	b := random(4 + n)
	binary.BigEndian.PutUint32(b, uint32(n))
	return b
}

// units parses the units of b and returns what follows the last whole one.
func units(tb testing.TB, b []byte) (rest []byte) {
	tb.Helper()
	for len(b) >= 4 {
		n := int(binary.BigEndian.Uint32(b))
		if n > maxUnit {
			tb.Fatalf("a unit of %d bytes: it does not begin here", n)
		}
		if 4+n > len(b) {
			break
		}
		b = b[4+n:]
	}
	return b
}

const maxUnit = 100_000

// anyLength returns a length for unit. Most are shorter than the window of a reader.
func anyLength() int {
	if rand.IntN(8) == 0 {
		return rand.IntN(maxUnit)
	}
	return rand.IntN(5000)
}

// A reader reads units from a Conn through a window, as the Datamovers do.
type reader struct {
	c    *Conn
	win  []byte
	r, w int
	rest int
	read atomic.Int64 // bytes of whole units
}

func newReader(c *Conn) *reader {
	r := &reader{c: c, win: make([]byte, 10_000)}
	c.Unread(func() ([]byte, int) { return r.win[r.r:r.w], r.rest })
	return r
}

func (r *reader) fill(n int) error {
	if r.w-r.r < n {
		r.w = copy(r.win, r.win[r.r:r.w])
		r.r = 0
	}
	for r.w-r.r < n {
		m, err := r.c.Read(r.win[r.w:])
		if r.w += m; m == 0 {
			return err
		}
	}
	return nil
}

func (r *reader) unit() error {
	if err := r.fill(4); err != nil {
		return err
	}
	n := int(binary.BigEndian.Uint32(r.win[r.r:]))
	defer r.read.Add(int64(4 + n))
	if 4+n <= len(r.win) {
		err := r.fill(4 + n)
		r.r += 4 + n
		return err
	}
	r.r, r.rest = r.r+4, n
	for dst := make([]byte, n); len(dst) > 0; {
		got := copy(dst, r.win[r.r:r.w])
		r.r += got
		if got == 0 {
			var err error
			r.r, r.w = 0, 0
			got, err = r.c.ReadBuffers(dst, r.win[:2000])
			r.w = max(got-len(dst), 0)
			if got -= r.w; got == 0 {
				return err
			}
		}
		dst, r.rest = dst[got:], r.rest-got
	}
	return nil
}

// exchange sends units of any length from the initiator, in pieces that end anywhere, and
// has the target answer each, until stop is closed. It returns when both ends have shut
// down.
func exchange(p *pair, r *reader, stop chan struct{}) {
	var wg sync.WaitGroup
	wg.Go(func() {
		for b := []byte{}; ; {
			for len(b) < maxUnit {
				b = append(b, unit(anyLength())...)
			}
			n := rand.IntN(maxUnit)
			select {
			case <-stop:
				n = len(b)
				defer p.initiator.CloseWrite()
			default:
			}
			if _, err := p.initiator.Write(b[:n]); err != nil || n == len(b) {
				return
			}
			b = b[n:]
		}
	})
	wg.Go(func() {
		for r.unit() == nil {
			if _, err := p.target.Write(unit(rand.IntN(200))); err != nil {
				return
			}
		}
		p.target.CloseWrite()
	})
	wg.Go(func() { io.Copy(io.Discard, p.initiator) })
	wg.Wait()
}

// A capture that begins in the middle has the beginning of the connection, and continues
// with a whole unit in both directions, wherever the reader is at that time.
func TestCaptureInTheMiddleBeginsWithAUnit(t *testing.T) {
	for range 30 {
		p := newPair(t, NewHub(), "127.0.0.1:0")
		p.hub.Join(p.target, 9)
		first, answer := unit(40), unit(30) // the login
		p.send(t, first)
		p.answer(t, answer)
		r, stop, done := newReader(p.target), make(chan struct{}), make(chan struct{})
		go func() {
			defer close(done)
			exchange(p, r, stop)
		}()
		until := func(n int64) {
			testkit.Eventually(t, "the target reads", func() bool { return r.read.Load() >= n })
		}
		until(rand.Int64N(1 << 20))
		k := start(t, p.hub, 9, 1<<30, nil)
		until(r.read.Load() + 512<<10)
		close(stop)
		<-done
		list := k.stop(t)
		sides := reassemble(t, list)
		in, out := sides[addr(p.initiator.LocalAddr())], sides[addr(p.initiator.RemoteAddr())]
		if in == nil || !bytes.HasPrefix(in.data, first) || !bytes.HasPrefix(out.data, answer) {
			t.Fatal("the capture lacks the beginning")
		}
		if len(in.gaps)+len(out.gaps) > 2 && k.sum.Lost == 0 { // else the machine was too slow
			t.Errorf("gaps %v and %v, lost %d", in.gaps, out.gaps, k.sum.Lost)
		}
		for _, a := range []net.Addr{p.initiator.LocalAddr(), p.initiator.RemoteAddr()} {
			parts := afterGaps(list, addr(a))
			if rest := units(t, parts[len(parts)-1]); len(rest) > 0 && k.sum.Lost == 0 {
				t.Errorf("%v: %d bytes after the last unit", a, len(rest))
			}
		}
	}
}

// afterGaps returns what a side sent after each gap, up to the next one.
func afterGaps(list []packet, of netip.AddrPort) (parts [][]byte) {
	next := uint32(0)
	for _, p := range list {
		if p.from != of {
			continue
		}
		if p.seq != next && p.flags&syn == 0 || len(parts) == 0 {
			parts = append(parts, nil)
		}
		parts[len(parts)-1] = append(parts[len(parts)-1], p.payload...)
		next = p.seq + uint32(len(p.payload)) + uint32(p.flags&syn/syn)
	}
	return parts
}

// A stalled is a Writer that waits until let is closed.
type stalled struct {
	bytes.Buffer
	once    sync.Once
	waiting chan struct{}
	let     chan struct{}
}

func (s *stalled) Write(b []byte) (int, error) {
	s.once.Do(func() { close(s.waiting) })
	<-s.let
	return s.Buffer.Write(b)
}

// A slow reader of a capture loses a part of it and delays nobody. Memory stays bounded,
// lost bytes are counted and shown, and what follows begins with a unit.
func TestSlowReaderLosesCountedBytes(t *testing.T) {
	p := newPair(t, NewHub(), "127.0.0.1:0")
	p.hub.Join(p.target, 2)
	r := newReader(p.target)
	sent, received := 0, 0
	pass := func(total int) {
		t.Helper()
		for end := received + total; received < end; {
			b := unit(rand.IntN(maxUnit))
			done := make(chan error, 1)
			go func() {
				_, err := p.initiator.Write(b)
				done <- err
			}()
			if err := errors.Join(r.unit(), <-done); err != nil {
				t.Fatal(err)
			}
			received += len(b)
			b = unit(rand.IntN(100))
			p.answer(t, b[:1], b[1:2], b[2:])
			sent += len(b)
		}
	}
	w := &stalled{waiting: make(chan struct{}), let: make(chan struct{})}
	k := start(t, p.hub, 2, 1<<40, w)
	<-w.waiting
	pass(5 * bufferLen)
	if n := cap(k.k.filling); n != bufferLen {
		t.Errorf("the buffer has grown to %d bytes", n)
	}
	close(w.let)
	before := received
	testkit.Eventually(t, "recording continues", func() bool {
		pass(maxUnit)
		p.target.mu.Lock()
		defer p.target.mu.Unlock()
		return p.target.next[toTarget] == p.target.received
	})
	pass(1 << 20)
	k.k.Stop(errors.New("enough"))
	<-k.done
	list := packets(t, w.Bytes())
	sides := reassemble(t, list)
	in, out := sides[addr(p.initiator.LocalAddr())], sides[addr(p.initiator.RemoteAddr())]
	missing := received + sent - len(in.data) - len(out.data)
	if k.sum.Lost != uint64(missing) || missing < 2*bufferLen || k.sum.Octets != uint64(len(in.data)+len(out.data)) {
		t.Errorf("%d bytes are missing, the summary is %+v", missing, k.sum)
	}
	if received-before < 1<<20 || len(in.gaps) == 0 {
		t.Errorf("gaps %v", in.gaps)
	}
	for _, of := range []net.Addr{p.initiator.LocalAddr(), p.initiator.RemoteAddr()} {
		for _, part := range afterGaps(list, addr(of)) {
			units(t, part)
		}
	}
	shown := 0
	for _, pkt := range list {
		if strings.Contains(pkt.comment, "are lost") {
			shown++
		}
	}
	if shown != len(in.gaps)+len(out.gaps) {
		t.Errorf("%d comments for the gaps %v and %v", shown, in.gaps, out.gaps)
	}
}

// Lost bytes that no record follows are counted, too.
func TestBytesLostAtTheEndAreCounted(t *testing.T) {
	p := newPair(t, NewHub(), "127.0.0.1:0")
	p.hub.Join(p.target, 2)
	w := &stalled{waiting: make(chan struct{}), let: make(chan struct{})}
	k := start(t, p.hub, 2, 1<<40, w)
	<-w.waiting
	n := 0
	for ; n < 3*bufferLen; n += 1 << 20 {
		p.answer(t, make([]byte, 1<<20))
	}
	p.target.Close()
	k.k.Stop(errors.New("enough"))
	close(w.let)
	<-k.done
	if k.sum.Octets+k.sum.Lost != uint64(n) || k.sum.Lost < bufferLen {
		t.Errorf("%d bytes have passed, the summary is %+v", n, k.sum)
	}
}

// A file does not exceed its limit, and is whole.
func TestFileStaysBelowItsLimit(t *testing.T) {
	for _, max := range []int64{MinSize, MinSize + 1, 100_000, 1 << 20} {
		p := newPair(t, NewHub(), "127.0.0.1:0")
		p.hub.Join(p.target, 3)
		k := start(t, p.hub, 3, max, nil)
		for done := false; !done; {
			n := 4000
			if max < 1<<20 { // so that the last packet comes close
				n = 1 + rand.IntN(40)
			}
			p.answer(t, random(n))
			select {
			case <-k.done:
				done = true
			default:
			}
		}
		packets(t, k.out.Bytes())
		if n := int64(k.out.Len()); n > max || n < max-6000-statisticsLen || k.err != nil || !strings.Contains(k.sum.Reason, fmt.Sprint("limit of ", max)) {
			t.Errorf("limit %d: %d bytes, %+v, %v", max, n, k.sum, k.err)
		}
	}
}

// A capture has the connections that join later from their first byte, and none of other
// sessions. The hub forgets closed connections.
func TestJoinedConnectionIsCapturedFromItsFirstByte(t *testing.T) {
	h := NewHub()
	first, other := newPair(t, h, "127.0.0.1:0"), newPair(t, h, "127.0.0.1:0")
	h.Join(first.target, 1)
	h.Join(other.target, 2)
	k := start(t, h, 1, 1<<20, nil)
	late := newPair(t, h, "127.0.0.1:0")
	late.send(t, []byte("login"))
	late.answer(t, []byte("welcome"))
	other.send(t, []byte("secret"))
	h.Join(late.target, 1)
	first.send(t, []byte("one"))
	late.send(t, []byte(", command"))
	gone := newPair(t, h, "127.0.0.1:0")
	gone.target.Close()
	h.Join(gone.target, 1)
	sides := reassemble(t, k.stop(t))
	for _, want := range []struct {
		of   net.Addr
		data string
	}{
		{first.initiator.LocalAddr(), "one"},
		{late.initiator.LocalAddr(), "login, command"},
		{late.initiator.RemoteAddr(), "welcome"},
	} {
		if s := sides[addr(want.of)]; s == nil || string(s.data) != want.data {
			t.Errorf("%v: %+v, want %s", want.of, s, want.data)
		}
	}
	if sides[addr(other.initiator.LocalAddr())] != nil {
		t.Error("the capture has data of another session")
	}
	first.target.Close()
	other.target.Close()
	late.target.Close()
	if len(h.conns) != 0 || len(h.captures) != 0 {
		t.Errorf("left behind: %v, %v", h.conns, h.captures)
	}
}

// A session has at most one capture, and all sessions together MaxCaptures.
func TestNumberOfCapturesIsBounded(t *testing.T) {
	h := NewHub()
	var all []*run
	for i := range MaxCaptures {
		all = append(all, start(t, h, uint16(i), 1<<20, nil))
	}
	if _, err := h.Start(MaxCaptures); err != ErrTooMany {
		t.Error(err)
	}
	all[0].stop(t)
	if _, err := h.Start(1); err != ErrTaken {
		t.Error(err)
	}
	k := start(t, h, 0, 1<<20, nil).k
	from, to := &net.TCPAddr{IP: net.IPv6loopback, Port: 1}, &net.TCPAddr{IP: net.IPv6loopback, Port: 2}
	for i := range uint32(maxFlows) {
		if n, ok := k.add(from, to); n != i || !ok {
			t.Fatalf("connection %d: %d, %t", i, n, ok)
		}
	}
	if _, ok := k.add(from, to); ok {
		t.Errorf("more than %d connections", maxFlows)
	}
}

// Run returns the error of its Writer.
func TestFailedWriterEndsTheCapture(t *testing.T) {
	h := NewHub()
	r, w := io.Pipe()
	r.CloseWithError(io.ErrClosedPipe)
	k := start(t, h, 1, 1<<20, w)
	<-k.done
	if k.err != io.ErrClosedPipe || h.Find(1) != nil {
		t.Error(k.err)
	}
}

// Recording costs nothing when nothing is to be recorded: no allocation and no lock.
func TestIdleTapCostsNothing(t *testing.T) {
	p := newPair(t, NewHub(), "127.0.0.1:0")
	p.hub.Join(p.target, 1)
	p.send(t, random(headLen+1))
	p.answer(t, random(headLen))
	idle := func(when string) {
		t.Helper()
		if p.target.on.Load() {
			t.Fatalf("%s: the tap is on", when)
		}
		p.target.mu.Lock() // a caller that locks it would block
		defer p.target.mu.Unlock()
		b, a := make([]byte, 1000), make([]byte, 2000)
		both := [][]byte{b, b}
		defer debug.SetGCPercent(debug.SetGCPercent(-1))
		if n := testing.AllocsPerRun(200, func() {
			p.initiator.Write(b)
			io.ReadFull(p.target, b)
			p.target.WriteBuffers(both)
			p.target.Write(b)
			io.ReadFull(p.initiator, a)
			p.initiator.Write(b)
			p.target.ReadBuffers(a[:len(b)-1], a[len(b)-1:])
			io.ReadFull(p.initiator, b)
		}); n != 0 {
			t.Errorf("%s: %v allocations", when, n)
		}
	}
	idle("before")
	k := start(t, p.hub, 1, 1<<20, nil)
	p.send(t, []byte("captured"))
	k.stop(t)
	idle("after")
}

// The sequence number after a large gap is still ahead, and on the grid of Markers.
func TestLargeGapKeepsSequenceNumbersAhead(t *testing.T) {
	for _, tt := range []struct {
		from, to uint64
		jump     uint32
	}{
		{0, 0, 0}, {100, 101, 1}, {0, maxGap, maxGap}, {0, maxGap + 1, maxGap + 1},
		{5, 5 + 1<<40 + 3, maxGap + 3}, {1<<32 - 1, 1<<32 + 1, 2}, {0, 1<<32 + 600, maxGap + 88},
	} {
		s := stream{pos: tt.from, seq: 1<<32 - 10}
		if gap := s.skip(tt.to); gap != tt.to-tt.from || s.seq != tt.jump-10 || s.pos != tt.to {
			t.Errorf("%+v: gap %d, %+v", tt, gap, s)
		}
	}
}

// Blocks have the bytes of draft-ietf-opsawg-pcapng, sections 4.1, 4.2, 4.3 and 4.6.
func TestBlocksAreThoseOfTheFormat(t *testing.T) {
	var out bytes.Buffer
	f := newFile(&out, "app", "if0", "what")
	f.packet(0x0102030405060708, toInitiator, []byte{0x45, 1, 2, 3, 4}, 2, "why")
	before := f.size()
	f.statistics(time.Unix(0, 1), time.Unix(0, 0x1_0000_0002), 7, 3, "end")
	f.flush()
	want := "" +
		// Section Header Block: type, length, magic, version 1.0, section length -1,
		// shb_userappl, opt_endofopt, length
		"\x0a\x0d\x0d\x0a" + "\x28\x00\x00\x00" + "\x4d\x3c\x2b\x1a" + "\x01\x00\x00\x00" + "\xff\xff\xff\xff\xff\xff\xff\xff" +
		"\x04\x00\x03\x00app\x00" + "\x00\x00\x00\x00" + "\x28\x00\x00\x00" +
		// Interface Description Block: type, length, LINKTYPE_RAW, reserved, snaplen,
		// if_name, if_description, if_tsresol 10^-9, opt_endofopt, length
		"\x01\x00\x00\x00" + "\x30\x00\x00\x00" + "\x65\x00\x00\x00" + "\x00\x00\x00\x00" +
		"\x02\x00\x03\x00if0\x00" + "\x03\x00\x04\x00what" + "\x09\x00\x01\x00\x09\x00\x00\x00" + "\x00\x00\x00\x00" + "\x30\x00\x00\x00" +
		// Enhanced Packet Block: type, length, interface, time (high, low), captured
		// and original length, packet, padding, opt_comment, epb_flags: outbound,
		// opt_endofopt, length
		"\x06\x00\x00\x00" + "\x3c\x00\x00\x00" + "\x00\x00\x00\x00" + "\x04\x03\x02\x01" + "\x08\x07\x06\x05" + "\x05\x00\x00\x00" + "\x07\x00\x00\x00" +
		"\x45\x01\x02\x03\x04\x00\x00\x00" + "\x01\x00\x03\x00why\x00" + "\x02\x00\x04\x00\x02\x00\x00\x00" + "\x00\x00\x00\x00" + "\x3c\x00\x00\x00" +
		// Interface Statistics Block: type, length, interface, time, opt_comment,
		// isb_starttime, isb_endtime, isb_ifrecv, isb_ifdrop, opt_endofopt, length
		"\x05\x00\x00\x00" + "\x54\x00\x00\x00" + "\x00\x00\x00\x00" + "\x01\x00\x00\x00" + "\x02\x00\x00\x00" + "\x01\x00\x03\x00end\x00" +
		"\x02\x00\x08\x00\x00\x00\x00\x00\x01\x00\x00\x00" + "\x03\x00\x08\x00\x01\x00\x00\x00\x02\x00\x00\x00" +
		"\x04\x00\x08\x00\x07\x00\x00\x00\x00\x00\x00\x00" + "\x05\x00\x08\x00\x03\x00\x00\x00\x00\x00\x00\x00" + "\x00\x00\x00\x00" + "\x54\x00\x00\x00"
	if got := out.String(); got != want {
		t.Errorf("%x, want\n%x", got, want)
	}
	if f.size() != int64(len(want)) || before != f.size()-0x54 || packetLen(5, 3) != 0x3c || packetLen(4, 0) != 0x30 {
		t.Errorf("%d bytes are counted, %d before the statistics; packets of %d and %d", f.size(), before, packetLen(5, 3), packetLen(4, 0))
	}
}
