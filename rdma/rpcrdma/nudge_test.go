package rpcrdma

import (
	"io"
	"net"
	"testing"
	"time"

	"github.com/iser-target/iser-target/rdma"
)

// A deafConn leaves the first call in its socket until something follows it. So does siw of Linux with a message that comes just after
// its Reply (docs/conformance-rdma.md).
type deafConn struct {
	net.Conn
	request int // bytes of the MPA Request that are still to be read
	deaf    bool
	came    []byte
	pause   time.Duration // between the call and what followed it
}

// Read implements net.Conn. After the Request it returns nothing until bytes have come at two different times.
func (c *deafConn) Read(b []byte) (int, error) {
	if c.request > 0 {
		n, err := c.Conn.Read(b[:min(len(b), c.request)])
		c.request -= n
		return n, err
	}
	if c.deaf {
		c.deaf = false
		call := make([]byte, 4096)
		n, err := io.ReadAtLeast(c.Conn, call, 1)
		if err != nil {
			return 0, err
		}
		begun := time.Now()
		more, err := io.ReadAtLeast(c.Conn, call[n:], 1)
		if err != nil {
			return 0, err
		}
		c.came, c.pause = call[:n+more], time.Since(begun)
	}
	if len(c.came) == 0 {
		return c.Conn.Read(b)
	}
	n := copy(b, c.came)
	c.came = c.came[n:]
	return n, nil
}

// requestLen is the length of the MPA Request of a Conn: the frame of revision 2 with 4 bytes of depths, and 8 of private data (RFC 6581,
// section 9.1; RFC 8797, section 4).
const requestLen = 20 + 4 + 8

// The first call of a client is answered by a server that leaves it in its socket.
func TestNudge(t *testing.T) {
	a, b := tcpPair(t)
	deaf := &deafConn{Conn: b, request: requestLen, deaf: true}
	p, c := rawServiceOn(t, a, deaf, private4096, Config{})
	call, _ := newCall(0)
	s := begin(t, patient(t), c, call)
	r := p.call()
	if deaf.pause < defaultNudge/2 {
		t.Errorf("the first call was followed by something after %v", deaf.pause)
	}
	p.send(header(r.xid, "00000020", noChunks) + okReply(r.xid))
	if err := s.wait(t); err != nil {
		t.Error(err)
	}
}

// A negative Nudge sends nothing, and other options stay what they are.
func TestNudgeIsOptional(t *testing.T) {
	for given, want := range map[time.Duration]time.Duration{0: defaultNudge, -1: 0, time.Second: time.Second} {
		cfg, err := Config{RDMA: rdma.Options{Nudge: given, NoCRC: true}}.complete()
		if err != nil {
			t.Fatal(err)
		}
		if o := cfg.initiator(); o.Nudge != want || !o.NoCRC || o.MaxSend != cfg.InlineReceive {
			t.Errorf("%v: %+v", given, o)
		}
	}
	d := rdma.NewDomain()
	p, c := rawService(t, private4096, Config{RDMA: rdma.Options{Nudge: -1, Domain: d}})
	call, _ := newCall(0)
	s := begin(t, patient(t), c, call)
	r := p.call()
	time.Sleep(2 * defaultNudge)
	p.send(header(r.xid, "00000020", noChunks) + okReply(r.xid))
	if err := s.wait(t); err != nil {
		t.Error(err)
	}
	if n := d.Counts().Sent.Writes; n != 0 {
		t.Errorf("%d RDMA Writes although Nudge is off", n)
	}
}
