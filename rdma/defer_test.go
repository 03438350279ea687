package rdma

import (
	"runtime"
	"testing"
	"time"

	"github.com/iser-target/iser-target/rdma/llp"
)

// What Defer kept back leaves before Receive waits for the peer, whatever FPDU is pending, and whether
// Receive returns for it or not.
func TestDefer(t *testing.T) {
	const send3, emptyWrite = "4143 00000000 00000000 00000003 00000000", "c140 00000001 0000000000000000"
	long := frame(append(unhex("c140 00000001 0000000000000000"), make([]byte, llp.LongData+1)...))
	for _, tt := range []struct {
		name   string
		behind []byte // comes together with the first Send
		want   bool
	}{
		{"a Send", frame(unhex(send3)), true},
		{"a segment that is no event", frame(unhex(emptyWrite)), true},
		{"a segment that is no event, and a long one begins", append(frame(unhex(emptyWrite)), long[:100]...), true},
		{"nothing", nil, false},
		{"half a length", []byte{0}, false},
		{"a Send without its last byte", frame(unhex(send3))[:23], false},
		{"a long segment begins", long[:100], false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p, c := responder(t, Options{})
			expose(c, 1, make([]byte, 2*llp.LongData), 0, RemoteWrite)
			// The first FPDU releases what was kept back before.
			if err := c.Post(&WorkRequest{Op: Send}); err != nil {
				t.Fatal(err)
			}
			p.send(send1)
			receive(t, c)
			p.want("the first FPDU", send1)
			for flushing := true; flushing; runtime.Gosched() {
				c.mu.Lock()
				flushing = c.flushing
				c.mu.Unlock()
			}

			p.write(append(frame(unhex(send2)), tt.behind...))
			receive(t, c)
			if err := c.Post(&WorkRequest{Op: Send}); err != nil {
				t.Fatal(err)
			}
			if got := c.Pending(); got != tt.want {
				t.Fatalf("Pending: %t", got)
			}
			if !tt.want {
				return
			}
			c.Defer()
			p.silent("it is kept back")
			serve(c)
			p.want(tt.name, send2)
		})
	}
	t.Run("no Receive follows", func(t *testing.T) {
		p, c := responder(t, Options{})
		bad := frame(unhex(send1))
		bad[len(bad)-1] ^= 1
		p.write(append(bad, frame(unhex(send1))...))
		if err := c.Receive(new(Event)); err == nil {
			t.Fatal("a wrong CRC was received")
		}
		if c.Pending() {
			t.Error("something is pending")
		}
	})
}

// A gate is a Completer that waits, which a Completer must not do.
type gate struct{ entered, open chan struct{} }

func (g gate) WorkDone(*WorkRequest, error) { close(g.entered); <-g.open }

// When Receive fails after Close, nothing of the Conn is still running.
func TestNothingRunsAfterClose(t *testing.T) {
	p, c := responder(t, Options{})
	g := gate{make(chan struct{}), make(chan struct{})}
	if err := c.Post(&WorkRequest{Op: Send, Done: g}); err != nil {
		t.Fatal(err)
	}
	events := serve(c) // the first FPDU sends what was kept back until then
	p.want("the first FPDU", "4143 00000000 00000000 00000001 00000000")
	<-g.entered
	c.Close()
	select {
	case o := <-events:
		t.Errorf("%v, and a WorkRequest is not ours again", o.err)
	case <-time.After(20 * time.Millisecond):
	}
	close(g.open)
	if o := next(t, events); o.err == nil {
		t.Error(o)
	}
}
