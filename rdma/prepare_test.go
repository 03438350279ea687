package rdma

import (
	"context"
	"encoding/binary"
	"errors"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/rdma/wire"
)

// Both ends name memory in their private data, as rsockets does, and use it at once.
func TestPrepare(t *testing.T) {
	before := ReadStats()
	var bufs [2][8]byte
	var regions [2]Region
	prepare := func(i int) func(*Conn) []byte {
		return func(c *Conn) []byte {
			return binary.BigEndian.AppendUint32(nil, uint32(c.Register(&regions[i], bufs[i][:], 0, RemoteWrite)))
		}
	}
	peer, nc := tcpPair(t)
	type result struct {
		c   *Conn
		req []byte
		err error
	}
	done := make(chan result, 1)
	go func() {
		var req []byte
		c, err := Respond(context.Background(), peer, Options{}, func(r *Request) Answer {
			req = append(req, r.Private...)
			return Answer{Private: []byte("not sent"), Prepare: prepare(1)}
		})
		done <- result{c, req, err}
	}()
	i, private, err := Initiate(context.Background(), nc, Options{Private: []byte("not sent"), Prepare: prepare(0)})
	r := <-done
	if err = errors.Join(err, r.err); err != nil {
		t.Fatal(err)
	}
	write := func(c *Conn, private []byte, text string) {
		t.Helper()
		if len(private) != 4 {
			t.Fatalf("private data %q", private)
		}
		post(t, c, &WorkRequest{Op: Write, Data: []byte(text), STag: wire.STag(binary.BigEndian.Uint32(private))})
		post(t, c, &WorkRequest{Op: Send})
	}
	write(i, private, "to the r")
	receive(t, r.c)
	write(r.c, r.req, "to the i")
	receive(t, i)
	if string(bufs[1][:]) != "to the r" || string(bufs[0][:]) != "to the i" {
		t.Errorf("%q", bufs)
	}
	i.Close()
	r.c.Close()
	if after := ReadStats(); after != before {
		t.Errorf("%+v is left, %+v was before", after, before)
	}
}

// An Initiator whose Request is refused leaves no STag. The error says that it asked for Markers, which a responder may
// refuse for that: siw does.
func TestPrepareRejected(t *testing.T) {
	before := ReadStats()
	p, nc := rawPair(t)
	done := make(chan error, 1)
	go func() {
		var region Region
		_, _, err := Initiate(context.Background(), nc, Options{Rev: 1, Markers: true, Prepare: func(c *Conn) []byte {
			c.Register(&region, make([]byte, 8), 0, RemoteRead)
			return nil
		}})
		done <- err
	}()
	p.startupFrame()
	p.write(unhex(repKey + "60010000"))
	err := <-done
	var rejected *RejectedError
	if !errors.As(err, &rejected) || !strings.Contains(err.Error(), "asked for Markers") {
		t.Errorf("MPA-7.1.2-12: %v", err)
	}
	if after := ReadStats(); after != before {
		t.Errorf("%+v is left, %+v was before", after, before)
	}
}

// A Responder that cannot send its Reply leaves no STag.
func TestPrepareTooLong(t *testing.T) {
	before := ReadStats()
	p, nc := rawPair(t)
	p.write(unhex(reqKey + "40010000"))
	var region Region
	c, err := Respond(context.Background(), nc, Options{}, func(*Request) Answer {
		return Answer{Prepare: func(c *Conn) []byte {
			c.Register(&region, make([]byte, 8), 0, RemoteRead)
			return make([]byte, wire.MaxPrivateData+1)
		}}
	})
	if c != nil || err == nil {
		t.Errorf("%v, %v", c, err)
	}
	if after := ReadStats(); after != before {
		t.Errorf("%+v is left, %+v was before", after, before)
	}
}
