package rpcrdma

import (
	"context"
	"encoding/binary"
	"net"
	"testing"
	"time"

	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/tests/testkit"
)

// FuzzMessages sends arbitrary messages to a client that has a call in flight, and to a service that has one. Each costs a
// connection at most, and neither hangs. The first byte of a message is its length in words, and its highest bit asks for
// an invalidation. An XID of ffffffff is that of the call.
func FuzzMessages(f *testing.F) {
	add := func(messages ...string) {
		var b []byte
		for _, m := range messages {
			m := unhex(m)
			if len(m)/4 < 128 {
				b = append(append(b, byte(len(m)/4)), m...)
			}
		}
		f.Add(b)
	}
	add(header(xid, "00000020", noChunks)+nullOf(xid), header("ffffffff", "00000020", noChunks)+okReply("ffffffff"))
	add(xid+"00000001 00000020 00000004 00000002", "ffffffff 00000001 00000020 00000004 00000002")
	add(header(xid, "00000020", "00000001 0000002c 00000001 00000008 0000000000000000 00000000 00000000 00000000") +
		callOf(xid, procEcho) + "00000008")
	add(header(xid, "00000020", "00000000 00000001 00000001 00000001 00000008 0000000000000000 00000000 00000000") +
		callOf(xid, procRead) + "00000008")
	add(xid + "00000001 00000020 00000001 00000001 00000000 00000001 00000028 0000000000000000 00000000 00000000 00000000")
	add("ffffffff 00000001 00000020 00000001 00000000 00000000 00000001 00000001 00000001 00000018 0000000000000000")
	add("ffffffff 00000007 00000020 00000000"+noChunks, xid+"00000001 00000020 00000003"+noChunks)
	programs := testPrograms(newWaits())
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, service := range []bool{false, true} {
			fuzzMessages(t, b, Config{Programs: programs, ReverseChunks: true, Credits: 4}, service)
		}
	})
}

func fuzzMessages(t testing.TB, b []byte, cfg Config, service bool) {
	a, n := net.Pipe()
	defer a.Close()
	var c *Conn
	done := make(chan error, 1)
	o := rdma.Options{MaxSend: 8192, Private: unhex(private4096)}
	var rc *rdma.Conn
	var err error
	if service {
		go func() {
			var err error
			c, err = Accept(context.Background(), n, cfg)
			done <- err
		}()
		rc, _, err = rdma.Initiate(context.Background(), a, o)
	} else {
		go func() {
			var err error
			c, err = Initiate(context.Background(), n, cfg)
			done <- err
		}()
		rc, err = rdma.Respond(context.Background(), a, o, func(*rdma.Request) rdma.Answer {
			return rdma.Answer{Private: o.Private}
		})
	}
	if cerr := <-done; err != nil || cerr != nil {
		t.Fatal(err, cerr)
	}
	defer rc.Close()
	if service { // the client speaks first
		rc.Post(&rdma.WorkRequest{Op: rdma.Send})
		rc.Flush()
		c.EnableReverse()
	}
	call := &Call{Program: testProgram, Version: testVersion, Procedure: procEcho, MaxReply: 8000, Into: [][]byte{make([]byte, 64)}}
	call.Begin().Item(make([]byte, 5000))
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- c.Do(ctx, call) }()
	var ev rdma.Event
	if err := rc.Receive(&ev); err != nil {
		t.Fatal(err)
	}
	go func() {
		for rc.Receive(&ev) == nil {
		}
	}()
	for len(b) > 0 {
		words, invalidate := int(b[0]&0x7f), b[0]&0x80 != 0
		b = b[1:]
		m := append([]byte(nil), b[:min(4*words, len(b))]...)
		b = b[len(m):]
		for i := 0; i+4 <= len(m); i += 4 {
			if binary.BigEndian.Uint32(m[i:]) == 0xffffffff {
				binary.BigEndian.PutUint32(m[i:], call.XID())
			}
		}
		wr := &rdma.WorkRequest{Op: rdma.Send, Data: m}
		if invalidate {
			wr.Op, wr.STag = rdma.SendInvalidate, 1
		}
		if rc.Post(wr) != nil {
			break
		}
		rc.Flush()
	}
	rc.Close()
	select {
	case <-c.Done():
	case <-time.After(testkit.Patience):
		t.Fatalf("the connection does not end\n%s", testkit.Stacks())
	}
	if err := <-ended; err == nil {
		call.Results.Item(64)
		call.Results.End()
	}
	c.workers.Wait()
	if c.busy != 0 || c.inflight != 0 || c.reserved != 0 || c.outstanding != 0 || c.fetching != 0 {
		t.Fatalf("in use: %d slots, %d calls, %d bytes, %d calls of the peer, %d fetches", c.busy, c.inflight, c.reserved,
			c.outstanding, c.fetching)
	}
}
