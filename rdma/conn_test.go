package rdma

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"math"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/iser-target/iser-target/rdma/wire"
	"github.com/iser-target/iser-target/tests/testkit"
)

// tcpPair returns both ends of a TCP connection over loopback.
func tcpPair(t testing.TB) (a, b net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if a, err = net.Dial("tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if b, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	return a, b
}

// pair starts MPA between an Initiator and a Responder.
func pair(t testing.TB, oi, or Options) (i, r *Conn) {
	t.Helper()
	a, b := tcpPair(t)
	done := make(chan error, 1)
	go func() {
		var err error
		r, err = Respond(context.Background(), b, or, func(*Request) Answer { return Answer{} })
		done <- err
	}()
	i, _, err := Initiate(context.Background(), a, oi)
	if rerr := <-done; err != nil || rerr != nil {
		t.Fatalf("startup: initiator %v, responder %v", err, rerr)
	}
	t.Cleanup(func() { i.Close(); r.Close() })
	return i, r
}

type sent chan error

func (s sent) WorkDone(_ *WorkRequest, err error) { s <- err }

func post(t testing.TB, c *Conn, wr *WorkRequest) {
	t.Helper()
	if err := c.Post(wr); err != nil {
		t.Fatal(err)
	}
	c.Flush()
}

func random(n int) []byte {
	b := make([]byte, n)
	rand.Read(b)
	return b
}

func TestOperations(t *testing.T) {
	for _, tt := range []struct {
		name   string
		oi, or Options
	}{
		{"CRC", Options{}, Options{}},
		{"no CRC", Options{NoCRC: true}, Options{NoCRC: true}},
		{"small FPDUs", Options{MaxULPDU: 512}, Options{MaxULPDU: 1460}},
		{"Markers", Options{Markers: true}, Options{Markers: true}},
		{"revision 1", Options{Rev: 1}, Options{}},
		{"Write as RTR", Options{PeerToPeer: true}, Options{}},
		{"Read as RTR", Options{PeerToPeer: true, RTR: RTR{Read: true}}, Options{}},
		{"Send as RTR", Options{PeerToPeer: true, RTR: RTR{Send: true}}, Options{}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.oi.MaxSend, tt.or.MaxSend = 100<<10, 100<<10
			i, r := pair(t, tt.oi, tt.or)
			events := make(chan Event, 100)
			errs := make(chan error, 1)
			go func() { // the initiator serves RDMA Reads by receiving
				for {
					var ev Event
					if err := i.Receive(&ev); err != nil {
						errs <- err
						return
					}
					ev.Data = bytes.Clone(ev.Data)
					events <- ev
				}
			}()
			for _, n := range []int{0, 1, 76, 8192, 8193, 70000} {
				msg := random(n)
				post(t, i, &WorkRequest{Op: SendSE, Head: msg[:n/3], Data: msg[n/3:]})
				var ev Event
				if err := r.Receive(&ev); err != nil || !bytes.Equal(ev.Data, msg) || !ev.Solicited {
					t.Fatalf("Send of %d bytes: %d came, %v", n, len(ev.Data), err)
				}
			}
			source, sink := random(1<<20), make([]byte, 1<<20)
			var from, to Region
			const base = 0xffff888012345000
			fromSTag := i.Register(&from, source, base, RemoteRead)
			toSTag := i.Register(&to, sink, base, RemoteWrite)
			for _, n := range []int{0, 1, 4096, 65536, 1 << 20} {
				got := make([]byte, n)
				wr := &WorkRequest{Op: Read, Data: got, STag: fromSTag, TO: base + uint64(len(source)-n)}
				post(t, r, wr)
				var ev Event
				if err := r.Receive(&ev); err != nil || ev.Read != wr || ev.Err != nil ||
					!bytes.Equal(got, source[len(source)-n:]) {
					t.Fatalf("Read of %d bytes: %v, %v", n, ev.Err, err)
				}
				want := random(n)
				done := make(sent, 1)
				if err := r.Post(&WorkRequest{Op: Write, Data: want, STag: toSTag, TO: base, Done: done}); err != nil {
					t.Fatal(err)
				}
				post(t, r, &WorkRequest{Op: Send, Data: []byte("written")})
				if err := <-done; err != nil {
					t.Fatal(err)
				}
				if ev := <-events; string(ev.Data) != "written" || !bytes.Equal(sink[:n], want) {
					t.Fatalf("Write of %d bytes did not arrive before the Send after it", n)
				}
			}
			post(t, r, &WorkRequest{Op: SendInvalidate, STag: toSTag})
			if ev := <-events; !ev.Invalidates || ev.Invalidated != toSTag || i.mem.find(toSTag) != nil {
				t.Fatalf("Send with Invalidate: %+v", ev)
			}
			i.Deregister(&from)
			i.Deregister(&to)
			r.CloseWrite()
			if err := <-errs; err != io.EOF {
				t.Fatalf("orderly end: %v", err)
			}
		})
	}
}

func TestTerminateReachesThePeer(t *testing.T) {
	i, r := pair(t, Options{}, Options{})
	post(t, i, &WorkRequest{Op: Write, STag: 0x1234, Data: make([]byte, 20000)})
	var ev Event
	err := r.Receive(&ev)
	var se *StreamError
	if !errors.As(err, &se) || se.Reason != wire.ReasonInvalidSTag || se.Remote {
		t.Fatalf("responder: %v", err)
	}
	err = i.Receive(&ev)
	if !errors.As(err, &se) || se.Reason != wire.ReasonInvalidSTag || !se.Remote {
		t.Fatalf("initiator: %v", err)
	}
	if n := i.opt.Domain.Counts(); n.TerminatesReceived[wire.ReasonInvalidSTag] != 1 ||
		len(n.TerminatesReceived) != 1 || len(n.TerminatesSent) != 0 {
		t.Errorf("counts %+v", n)
	}
}

// All Reasons that a peer invents share one count.
func TestCountsStayBounded(t *testing.T) {
	d := NewDomain()
	for i := range 256 {
		d.counts.terminateReceived(wire.Reason{Layer: 2, EType: uint8(i), Code: 2})
		d.counts.terminateReceived(wire.Reason{Layer: 3, EType: 1, Code: uint8(i)})
	}
	if n := d.Counts().TerminatesReceived; len(n) != 2 || n[wire.ReasonCRC] != 256 || n[Unknown] != 256 {
		t.Errorf("counts %v", n)
	}
}

// Where Unread reports that an FPDU begins, one does: among short ones, long ones, and those whose
// payload goes straight to its destination.
func TestUnread(t *testing.T) {
	a, b := tcpPair(t)
	w := &testkit.Watcher{Conn: b, Begins: map[int]bool{}}
	accepted := make(chan *Conn, 1)
	o := Options{MaxSend: 100 << 10}
	go func() {
		r, _ := Respond(t.Context(), w, o, func(*Request) Answer { return Answer{} })
		accepted <- r
	}()
	i, _, err := Initiate(t.Context(), a, o)
	r := <-accepted
	if err != nil || r == nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer i.Close()
	w.Unread = r.Unread
	go func() { // the initiator serves RDMA Reads by receiving
		var ev Event
		for i.Receive(&ev) == nil {
		}
	}()
	var region Region
	stag := i.Register(&region, random(1<<20), 0, RemoteRead)
	post(t, i, &WorkRequest{Op: Send}) // the first FPDU is the Initiator's
	var ev Event
	if err := r.Receive(&ev); err != nil {
		t.Fatal(err)
	}
	const rounds = 20
	for range rounds {
		for _, n := range []int{1 << 20, 20, 9000} {
			post(t, r, &WorkRequest{Op: Read, Data: make([]byte, n), STag: stag})
		}
		for _, n := range []int{0, 76, 8193, 70000, 1} {
			if err := i.Post(&WorkRequest{Op: Send, Data: random(n)}); err != nil {
				t.Fatal(err)
			}
		}
		i.Flush() // of all, so that short ones come together
		for range 8 {
			if err := r.Receive(&ev); err != nil || ev.Err != nil {
				t.Fatal(err, ev.Err)
			}
		}
	}
	begins := map[int]bool{}
	at := wire.StartupLen + int(w.Got[wire.StartupLen-1]) // PD_Length ends the frame's fixed part
	for at < len(w.Got) {
		begins[at] = true
		n := int(w.Got[at])<<8 | int(w.Got[at+1])
		at += wire.LengthLen + n + wire.Pad(n) + wire.CRCLen
	}
	begins[at] = true
	for at := range w.Begins {
		if !begins[at] {
			t.Errorf("byte %d is no beginning", at)
		}
	}
	if len(w.Begins) < rounds || w.Ahead < rounds/2 || w.Later < rounds {
		t.Errorf("%d beginnings, %d with bytes unread, %d with a rest", len(w.Begins), w.Ahead, w.Later)
	}

	// After a fault nobody knows where FPDUs begin.
	bad := append(make([]byte, wire.LengthLen+18+wire.CRCLen), "more"...)
	bad[1] = 18
	a.Write(bad)
	a.(*net.TCPConn).CloseWrite()
	asFault(t, r.Receive(&ev), wire.ReasonCRC, false)
	if unread, rest := r.Unread(); len(unread) > 0 || rest != math.MaxInt {
		t.Errorf("%d bytes unread, %d belong to an FPDU", len(unread), rest)
	}
}

// The sink of a Read that nobody answers is gone after Close, whether or not its owner calls Receive again.
func TestCloseUncountsSinks(t *testing.T) {
	before := ReadStats()
	i, r := pair(t, Options{}, Options{})
	wr := WorkRequest{Op: Read, Data: make([]byte, 100), STag: 1}
	post(t, i, &wr)
	testkit.Eventually(t, "the Read is outstanding", func() bool { return ReadStats().STags == before.STags+1 })
	var ev Event
	i.SetReceiveDeadline(time.Now())
	if err := i.Receive(&ev); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("a silent peer: %v", err)
	}
	i.Close()
	r.Close()
	if s := ReadStats(); s != before {
		t.Errorf("after Close %+v, want %+v", s, before)
	}
	if err := i.Receive(&ev); err != nil || ev.Read != &wr || !errors.Is(ev.Err, ErrClosed) {
		t.Errorf("Receive returns %v and %+v, want the Read with ErrClosed", err, ev)
	}
	if err := i.Receive(&ev); !errors.Is(err, ErrClosed) {
		t.Errorf("then %v", err)
	}
	if s := ReadStats(); s != before {
		t.Errorf("after the last Receive %+v, want %+v", s, before)
	}
}

// The kernel reports a reset once. If a write has found it, Receive does not take the end of the stream for one that the peer has
// meant.
func TestResetFoundByWrite(t *testing.T) {
	i, r := pair(t, Options{}, Options{})
	done := make(sent, 1)
	flushed := make(chan bool)
	if err := i.Post(&WorkRequest{Op: Write, STag: 1, Data: make([]byte, 64<<20), Done: done}); err != nil {
		t.Fatal(err)
	}
	go func() { // until the peer, which reads nothing, takes no more
		i.Flush()
		close(flushed)
	}()
	testkit.Eventually(t, "the peer takes no more", func() bool {
		_, owed := i.Taken()
		time.Sleep(10 * time.Millisecond)
		_, later := i.Taken()
		return owed > 0 && later == owed
	})
	if err := r.Socket().(*net.TCPConn).SetLinger(0); err != nil {
		t.Fatal(err)
	}
	r.Close()
	<-flushed
	if err := <-done; !errors.Is(err, syscall.ECONNRESET) {
		t.Fatalf("the Write ends by %v", err)
	}
	var ev Event
	var se *StreamError
	if err := i.Receive(&ev); !errors.As(err, &se) || se.Reason != wire.ReasonClosed || !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("Receive returns %v", err)
	}
}
