package rpcrdma

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/rdma"
	rdmap "github.com/iser-target/iser-target/rdma/wire"
	"github.com/iser-target/iser-target/tests/testkit"
)

var unhex = testkit.Unhex

// A rawPeer is the other end of a Conn. It handles messages as bytes, and uses only package rdma.
type rawPeer struct {
	t       testing.TB
	rc      *rdma.Conn
	private []byte // what the Conn announced
}

const (
	private4096 = "f6ab0e18 01010303" // R, 4096 both ways
	private1024 = "f6ab0e18 01010000"
	noInvalid   = "f6ab0e18 01000303" // without R
)

// rawClient returns a Conn that has accepted the connection, and its peer that announces private.
func rawClient(t testing.TB, private string, cfg Config) (*rawPeer, *Conn) {
	t.Helper()
	a, b := tcpPair(t)
	return rawOn(t, a, b, private, cfg, rdma.Options{})
}

func rawOn(t testing.TB, a, b net.Conn, private string, cfg Config, o rdma.Options) (*rawPeer, *Conn) {
	t.Helper()
	var c *Conn
	done := make(chan error, 1)
	go func() {
		var err error
		c, err = Accept(context.Background(), b, cfg)
		done <- err
	}()
	o.Private = unhex(private)
	o.MaxSend = 256 << 10
	rc, theirs, err := rdma.Initiate(context.Background(), a, o)
	if cerr := <-done; err != nil || cerr != nil {
		t.Fatalf("startup: raw %v, service %v", err, cerr)
	}
	return newRaw(t, rc, theirs, c)
}

// rawService returns a Conn that has opened the connection, and its peer.
func rawService(t testing.TB, private string, cfg Config) (*rawPeer, *Conn) {
	t.Helper()
	a, b := tcpPair(t)
	return rawServiceOn(t, a, b, private, cfg)
}

// rawServiceOn returns what rawService does, with the Conn on a and the peer on b.
func rawServiceOn(t testing.TB, a, b net.Conn, private string, cfg Config) (*rawPeer, *Conn) {
	t.Helper()
	var c *Conn
	done := make(chan error, 1)
	go func() {
		var err error
		c, err = Initiate(context.Background(), a, cfg)
		done <- err
	}()
	rc, err := rdma.Respond(context.Background(), b, rdma.Options{MaxSend: 256 << 10}, func(*rdma.Request) rdma.Answer {
		return rdma.Answer{Private: unhex(private)}
	})
	if cerr := <-done; err != nil || cerr != nil {
		t.Fatalf("startup: raw %v, client %v", err, cerr)
	}
	return newRaw(t, rc, rc.Peer().Private, c)
}

func newRaw(t testing.TB, rc *rdma.Conn, private []byte, c *Conn) (*rawPeer, *Conn) {
	t.Cleanup(func() {
		rc.Close()
		c.Close()
		c.workers.Wait()
	})
	return &rawPeer{t, rc, bytes.Clone(private)}, c
}

func (p *rawPeer) post(wr *rdma.WorkRequest) {
	p.t.Helper()
	if err := p.rc.Post(wr); err != nil {
		p.t.Fatal(err)
	}
}

// send sends a message in hexadecimal digits.
func (p *rawPeer) send(message string) {
	p.t.Helper()
	p.post(&rdma.WorkRequest{Op: rdma.Send, Data: unhex(message)})
	p.rc.Flush()
}

// event returns the next Event.
func (p *rawPeer) event() (rdma.Event, error) {
	var ev rdma.Event
	p.rc.SetReceiveDeadline(time.Now().Add(testkit.Patience))
	err := p.rc.Receive(&ev)
	return ev, err
}

// message returns the next message of the Conn, and its Event.
func (p *rawPeer) message() (string, rdma.Event) {
	p.t.Helper()
	ev, err := p.event()
	if err != nil {
		p.t.Fatal(err)
	}
	if ev.Read != nil {
		p.t.Fatal("a Read is done where a message was expected")
	}
	return hex.EncodeToString(ev.Data), ev
}

// want checks that the next message is this one.
func (p *rawPeer) want(name, message string) {
	p.t.Helper()
	got, _ := p.message()
	if want := hex.EncodeToString(unhex(message)); got != want {
		p.t.Fatalf("%s:\n got %s\nwant %s", name, got, want)
	}
}

// silent checks that the Conn sends nothing, and that the connection works: the answer to a NULL call is the next message.
func (p *rawPeer) silent(name string) {
	p.t.Helper()
	p.send(header("7e577e57", "00000020", noChunks) + nullOf("7e577e57"))
	if m, _ := p.message(); !strings.HasPrefix(m, "7e577e5700000001") {
		p.t.Fatalf("%s: %s", name, m)
	}
}

// ends checks that the Conn ends the connection, with reason in a Terminate unless it is zero.
func (p *rawPeer) ends(name string, reason rdmap.Reason) {
	p.t.Helper()
	for {
		_, err := p.event()
		if err == nil {
			continue
		}
		var se *rdma.StreamError
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			p.t.Fatalf("%s: the connection is up", name)
		case reason != rdmap.Reason{} && (!errors.As(err, &se) || se.Reason != reason):
			p.t.Fatalf("%s: %v, want %v", name, err, reason)
		}
		p.rc.Close()
		return
	}
}

// read reads memory of the Conn by RDMA Read.
func (p *rawPeer) read(stag uint32, to uint64, n int) []byte {
	p.t.Helper()
	b := make([]byte, n)
	p.post(&rdma.WorkRequest{Op: rdma.Read, Data: b, STag: rdma.STag(stag), TO: to})
	p.rc.Flush()
	ev, err := p.event()
	if err != nil || ev.Read == nil || ev.Err != nil {
		p.t.Fatalf("RDMA Read: %v %v", err, ev.Err)
	}
	return b
}

// write writes to memory of the Conn by RDMA Write.
func (p *rawPeer) write(stag uint32, to uint64, b []byte) {
	p.t.Helper()
	p.post(&rdma.WorkRequest{Op: rdma.Write, Data: b, STag: rdma.STag(stag), TO: to})
	p.rc.Flush()
}

// expose gives the Conn access to b, and returns the segment in hexadecimal digits.
func (p *rawPeer) expose(b []byte, base uint64, access rdma.Access) string {
	stag := p.rc.Register(new(rdma.Region), b, base, access)
	return fmt.Sprintf("%08x %08x %016x", uint32(stag), len(b), base)
}

// header returns a version 1 RDMA_MSG with these lists.
func header(xid, credits, lists string) string {
	return xid + "00000001" + credits + "00000000" + lists
}

const noChunks = "00000000 00000000 00000000"

// callOf returns a call of the test program.
func callOf(xid string, procedure int) string {
	return xid + fmt.Sprintf("00000000 00000002 20000001 00000003 %08x 0000000000000000 0000000000000000", procedure)
}

func nullOf(xid string) string { return callOf(xid, 0) }

// okReply returns an accepted reply with SUCCESS.
func okReply(xid string) string { return xid + "00000001 00000000 0000000000000000 00000000" }
