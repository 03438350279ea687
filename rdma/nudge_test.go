package rdma

import (
	"fmt"
	"testing"
	"time"

	"github.com/iser-target/iser-target/rdma/wire"
)

const (
	plainReply = repKey + "40010000" // revision 1, CRC
	nudged     = "c140 00000001 0000000000000000"
)

// A peer that leaves the first message in its socket gets empty Writes (RFC 5040, section 5.1), also while a Read waits for ORD. They
// do not count on, so that a peer that never answers does not get them forever.
func TestNudge(t *testing.T) {
	p, c := initiator(t, Options{Rev: 1, ORD: 1, Nudge: 5 * time.Millisecond}, plainReply)
	time.Sleep(20 * time.Millisecond)
	p.silent("nothing was sent that could be nudged")
	for i := range 2 {
		postRead(t, c, &WorkRequest{Op: Read, Data: make([]byte, 4), STag: 7}, wire.STag(9+i))
	}
	c.Flush()
	p.want("the first Read", "4141 00000000 00000001 00000001 00000000 00000009 0000000000000000 00000004 00000007 0000000000000000")
	for n := range nudges {
		p.want(fmt.Sprintf("Write %d", n), nudged)
	}
	c.aside.Wait()
	p.silent("the peer has been nudged often enough")
	p.send("c142 00000009 0000000000000000 01020304")
	if ev := receive(t, c); ev.Err != nil {
		t.Error(ev.Err)
	}
	p.want("the second Read", "4141 00000000 00000001 00000002 00000000 0000000a 0000000000000000 00000004 00000007 0000000000000000")
}

// A message of the peer is no proof that it has read what was sent before, so one Write follows it, unless something else does.
func TestNudgeOnceHeard(t *testing.T) {
	const message = "4143 00000000 00000000 00000001 00000000"
	for _, tt := range []struct {
		name          string
		before, after bool // a Send leaves before, after the message of the peer
		nudged        bool
	}{
		{"first message unread", true, false, true},
		{"second message", true, true, false},
		{"the peer was first", false, true, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			pause := 2 * time.Second // in which the test sends what it does
			if tt.nudged {
				pause = 5 * time.Millisecond
			}
			p, c := initiator(t, Options{Rev: 1, Nudge: pause}, plainReply)
			msn := 1
			send := func() {
				post(t, c, &WorkRequest{Op: Send})
				p.want("Send", fmt.Sprintf("4143 00000000 00000000 %08x 00000000", msn))
				msn++
			}
			if tt.before {
				send()
			}
			p.send(message)
			receive(t, c)
			if tt.after {
				send()
			}
			if tt.nudged {
				p.want("Write", nudged)
			}
			c.aside.Wait()
			p.silent(tt.name)
		})
	}
}

// An Initiator does not nudge a peer that has the end of its stream.
func TestNudgeEnds(t *testing.T) {
	for name, end := range map[string]func(*Conn){
		"closed": func(c *Conn) { c.Close() },
		"ended":  func(c *Conn) { c.CloseWrite() },
	} {
		t.Run(name, func(t *testing.T) {
			p, c := initiator(t, Options{Rev: 1, Nudge: 50 * time.Millisecond}, plainReply)
			post(t, c, &WorkRequest{Op: Send})
			p.want("Send", "4143 00000000 00000000 00000001 00000000")
			end(c)
			c.aside.Wait()
			p.wantEOF()
		})
	}
	if _, err := (Options{Nudge: -1}).complete(); err == nil {
		t.Error("a negative Nudge")
	}
}
