package rdma

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/rdma/llp"
	"github.com/iser-target/iser-target/tests/testkit"
)

// handOver continues the stream of c on a copy of its socket, by a State that went through JSON, as in
// another process. c and its socket are gone then.
func handOver(t *testing.T, c *Conn) *Conn {
	t.Helper()
	s, err := c.State()
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	f, err := c.nc.(*net.TCPConn).File()
	if err != nil {
		t.Fatal(err)
	}
	nc, err := net.FileConn(f)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	c.Close()
	var back State
	if err := json.Unmarshal(text, &back); err != nil {
		t.Fatal(err)
	}
	next, err := Continue(nc, Options{}, back)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { next.Close() })
	return next
}

// A stream that rests continues in another Conn: with Sends, Writes and Reads in both directions, with and
// without CRCs and Markers, ten times. The peer notices nothing.
func TestContinue(t *testing.T) {
	for _, tt := range []struct {
		name   string
		oi, or Options
	}{
		{"plain", Options{}, Options{}},
		{"no CRC", Options{NoCRC: true}, Options{NoCRC: true}},
		{"Markers", Options{Markers: true}, Options{Markers: true}},
		{"depths", Options{IRD: 3, ORD: 2}, Options{IRD: 1, ORD: 1, MaxULPDU: 512}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			peer, c := pair(t, tt.oi, tt.or)
			mem := random(40000)
			var region Region
			stag := peer.Register(&region, mem, 0, RemoteRead|RemoteWrite)
			events := serve(peer)
			for round := range uint32(10) {
				post(t, peer, &WorkRequest{Op: Send, Data: binary.BigEndian.AppendUint32(nil, round)})
				post(t, peer, &WorkRequest{Op: Send, Data: []byte("not received before the hand-over")})
				if ev := receive(t, c); binary.BigEndian.Uint32(ev.Data) != round {
					t.Fatalf("round %d: %x", round, ev.Data)
				}
				got := make([]byte, len(mem))
				post(t, c, &WorkRequest{Op: Read, Data: got, STag: stag})
				if ev := receive(t, c); string(ev.Data) != "not received before the hand-over" {
					t.Fatalf("round %d: %+v", round, ev)
				}
				if ev := receive(t, c); ev.Err != nil || !bytes.Equal(got, mem) {
					t.Fatalf("round %d: Read: %v, or other data", round, ev.Err)
				}
				post(t, c, &WorkRequest{Op: Write, Data: binary.BigEndian.AppendUint32(nil, round), STag: stag})
				post(t, c, &WorkRequest{Op: Send, Data: []byte{byte(round)}})
				if o := next(t, events); o.err != nil || o.Data[0] != byte(round) || binary.BigEndian.Uint32(mem) != round {
					t.Fatalf("round %d: the peer got %+v, %x", round, o, mem[:4])
				}
				c.Pause()
				if err := c.Receive(&Event{}); !errors.Is(err, os.ErrDeadlineExceeded) {
					t.Fatalf("Receive of a paused stream: %v", err)
				}
				c = handOver(t, c)
			}
		})
	}
}

// Pause ends a Receive that waits, at once between two messages, and in a message when the rest of it is
// there. What has come of an FPDU is in the State.
func TestPause(t *testing.T) {
	short := "4143 00000000 00000000 00000001 00000000 61"
	long := strings.Repeat("61", llp.LongData+100)
	for _, tt := range []struct {
		name  string
		ulpdu []string // of the one Send
		cut   int      // bytes of the last FPDU that come before the pause
		in    bool     // Pause waits for the rest
	}{
		{"nothing", []string{short}, 0, false},
		{"length", []string{short}, 1, false},
		{"short", []string{short}, 9, false},
		{"in long data", []string{"4143 00000000 00000000 00000001 00000000" + long}, 3000, true},
		{"between segments", []string{"0143 00000000 00000000 00000001 00000000 61", "4143 00000000 00000000 00000001 00000001 61"}, 0, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p, c := responder(t, Options{MaxSend: 1 << 20})
			last := len(tt.ulpdu) - 1
			p.send(tt.ulpdu[:last]...)
			fpdu := frame(unhex(tt.ulpdu[last]))
			p.write(fpdu[:tt.cut])
			events := serve(c)
			time.Sleep(20 * time.Millisecond) // in any of the states the result is the same
			c.Pause()
			if tt.in {
				select {
				case o := <-events:
					t.Fatalf("Receive returned in a message: %+v", o)
				case <-time.After(50 * time.Millisecond):
				}
				if _, err := c.State(); !errors.Is(err, ErrNotAtRest) {
					t.Errorf("State in a message: %v", err)
				}
				p.write(fpdu[tt.cut:])
				if o := next(t, events); o.err != nil || len(o.Data) == 0 {
					t.Fatalf("the message: %+v", o)
				}
			}
			if o := next(t, events); !errors.Is(o.err, os.ErrDeadlineExceeded) {
				t.Fatalf("after Pause: %+v", o)
			}
			c.Unpause()
			c.Pause()
			n := handOver(t, c)
			if !tt.in {
				p.write(fpdu[tt.cut:])
				if ev := receive(t, n); len(ev.Data) == 0 {
					t.Error("an empty Send")
				}
			}
			post(t, n, &WorkRequest{Op: Send, Data: []byte{1}})
			p.want("the first Send of the other Conn", "4143 00000000 00000000 00000001 00000000 01")
		})
	}
}

// A paused stream receives again after Unpause, with the deadline that it had.
func TestUnpause(t *testing.T) {
	p, c := responder(t, Options{})
	events := serve(c)
	c.Pause()
	if o := next(t, events); !errors.Is(o.err, os.ErrDeadlineExceeded) {
		t.Fatalf("%+v", o)
	}
	c.Unpause()
	p.send(send1)
	receive(t, c)
	c.SetReceiveDeadline(time.Now().Add(30 * time.Millisecond))
	begin := time.Now()
	if err := c.Receive(&Event{}); !errors.Is(err, os.ErrDeadlineExceeded) || time.Since(begin) < 20*time.Millisecond {
		t.Errorf("deadline: %v after %v", err, time.Since(begin))
	}
}

// A stream that is not at rest has no State, and a State that cannot be is refused.
func TestNotAtRest(t *testing.T) {
	peer, c := pair(t, Options{}, Options{})
	post(t, peer, &WorkRequest{Op: Send, Data: []byte{1}})
	receive(t, c)
	var region Region
	for name, unrest := range map[string]func() (undo func()){
		"registered memory": func() func() {
			c.Register(&region, make([]byte, 1), 0, RemoteRead)
			return func() { c.Deregister(&region) }
		},
		"an unanswered Read": func() func() {
			stag := peer.Register(&Region{}, make([]byte, 1), 0, RemoteRead)
			post(t, c, &WorkRequest{Op: Read, Data: make([]byte, 1), STag: stag})
			return func() {
				events := serve(peer)
				receive(t, c)
				peer.Pause()
				next(t, events)
			}
		},
		"a queued Send": func() func() {
			if err := c.Post(&WorkRequest{Op: Send}); err != nil {
				t.Fatal(err)
			}
			return c.Flush
		},
	} {
		undo := unrest()
		if _, err := c.State(); !errors.Is(err, ErrNotAtRest) {
			t.Errorf("%s: %v", name, err)
		}
		undo()
	}
	testkit.Eventually(t, "a stream at rest", func() bool { _, err := c.State(); return err == nil })
	good, _ := c.State()
	for want, spoil := range map[string]func(s *State){
		"IRD -1":         func(s *State) { s.IRD = -1 },
		"ORD 70000":      func(s *State) { s.ORD = 70000 },
		"unread":         func(s *State) { s.Unread = make([]byte, llp.WindowLen+1) },
		"positions 0 an": func(s *State) { s.GridOut = 512 },
		"MaxULPDU":       func(s *State) { s.MaxULPDU = 1 << 20 },
	} {
		s := good
		spoil(&s)
		if _, err := Continue(c.nc, Options{}, s); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
	c.CloseWrite()
	if _, err := c.State(); !errors.Is(err, ErrNotAtRest) {
		t.Errorf("a stream that ends: %v", err)
	}
}
