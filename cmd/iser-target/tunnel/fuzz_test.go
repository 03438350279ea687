package tunnel

import (
	"context"
	"io"
	"net"
	"testing"
	"time"

	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/tests/testkit"
)

// FuzzServer sends arbitrary messages to the end of the target. They cost the connection at most, and what the target reads is
// never more than what was sent. The first two bytes of a message are its length.
func FuzzServer(f *testing.F) {
	const (
		// XID, version, credits, RDMA_MSG, no chunks; XID, CALL, RPC 2, program, version
		begin = "00000001 00000001 00000002 00000000 00000000 00000000 00000000" + "00000001 00000000 00000002 20495352 00000001"
		none  = "00000000 00000000 00000000 00000000" // credential and verifier
		open  = begin + "00000001" + none
		data  = begin + "00000002" + none + "0000000000000000 00000003 61626300"
		more  = begin + "00000002" + none + "0000000000000003 00000001 64000000"
	)
	add := func(messages ...string) {
		var b []byte
		for _, m := range messages {
			m := testkit.Unhex(m)
			b = append(append(b, byte(len(m)>>8), byte(len(m))), m...)
		}
		f.Add(b)
	}
	add(open, data, more)
	add(data)
	add(open, open)
	add(open, data, data)
	add(open, begin+"00000002"+none+"0000000000000000 ffffffff")
	add(open, begin+"00000003"+none)
	add("00000001 00000001 00000002 00000000 00000001 00000028 00000001 00000001 0000000000000000 00000000 00000000 00000000" +
		"00000001 00000000 00000002 20495352 00000001 00000001" + none)
	f.Fuzz(fuzzServer)
}

func fuzzServer(t *testing.T, b []byte) {
	a, n := net.Pipe()
	defer a.Close()
	ends := make(chan *Conn, 1)
	go func() {
		defer close(ends)
		rc, err := rdma.Respond(context.Background(), n, rdma.Options{}, func(*rdma.Request) rdma.Answer { return Answer() })
		if err != nil {
			return
		}
		if c, err := Serve(rc); err == nil {
			ends <- c
		}
	}()
	rc, _, err := rdma.Initiate(context.Background(), a, rdma.Options{MaxSend: inline, Private: Answer().Private})
	server := <-ends
	if err != nil || server == nil {
		t.Fatalf("the startup failed: %v", err)
	}
	go func() { // takes what the target sends
		var ev rdma.Event
		for rc.Receive(&ev) == nil {
		}
	}()
	read := make(chan int, 1)
	go func() {
		all, _ := io.ReadAll(server)
		read <- len(all)
	}()
	sent := 0
	for len(b) >= 2 {
		n := min(int(b[0])<<8|int(b[1]), len(b)-2, inline)
		m := append([]byte(nil), b[2:2+n]...)
		b = b[2+n:]
		if len(m) == 0 {
			continue
		}
		sent += len(m)
		if rc.Post(&rdma.WorkRequest{Op: rdma.Send, Data: m}) != nil {
			break
		}
		rc.Flush()
	}
	rc.Close() // a pipe has no half close, and no buffer: all was received
	select {
	case n := <-read:
		if n > sent {
			t.Errorf("%d bytes were read, and %d were sent", n, sent)
		}
	case <-time.After(testkit.Patience):
		t.Fatal("the target hangs")
	}
	server.Close()
	<-server.Done()
}
