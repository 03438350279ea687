package rpcrdma

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/rdma/rpcrdma/oncrpc"
	"github.com/iser-target/iser-target/rdma/rpcrdma/wire"
)

// BRPC-2.3-1: 1000 calls each way at once, and none is mixed up. BRPC-4.3.2-2: all credits of both directions are in
// use.
func TestBothDirections(t *testing.T) {
	cfg := Config{Programs: testPrograms(newWaits()), Credits: 8}
	client, service := connPair(t, cfg, cfg)
	doNull(t, client)
	service.EnableReverse()
	var wg sync.WaitGroup
	errs := make(chan error, 32)
	for i := range cap(errs) {
		c := client
		if i%2 == 1 {
			c = service
		}
		wg.Go(func() {
			call := &Call{Program: testProgram, Version: testVersion, Procedure: procPlain, MaxReply: 200}
			data := bytes.Repeat([]byte{byte(i)}, 100)
			for n := range 64 {
				data[0] = byte(n)
				call.Begin().Opaque(data)
				err := c.Do(patient(t), call)
				if got := call.Results.Opaque(100); err == nil && !bytes.Equal(got, data) {
					err = fmt.Errorf("BRPC-2.4-2: the reply is %x", got)
				}
				if err != nil {
					errs <- err
					return
				}
			}
		})
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		t.Error(err)
	}
}

// A service makes no call before its program has enabled that.
func TestEnableReverse(t *testing.T) {
	p, c := rawClient(t, private4096, Config{})
	p.silent("before")
	call, _ := newCall(0)
	if err := c.Do(patient(t), call); err != ErrReverse {
		t.Errorf("BRPC-6-3: %v", err)
	}
	p.silent("BRPC-6-2: a call was sent") // no probe either
	c.EnableReverse()
	s := begin(t, patient(t), c, call)
	r := p.call()
	// V-BRPC-1 with other numbers: a fresh XID, version 1, CALL.
	if want := header(r.xid, "00000020", noChunks) + nullOf(r.xid); fmt.Sprintf("%x%x", r.Append(nil), r.payload) !=
		strings.ReplaceAll(want, " ", "") || r.XID != call.XID() {
		t.Errorf("BRPC-5.1-1 BRPC-5.1-2 BRPC-5.1-4 BRPC-5.1-5: %x%x", r.Append(nil), r.payload)
	}
	p.send(header(r.xid, "00000010", noChunks) + okReply(r.xid))
	if err := s.wait(t); err != nil {
		t.Error(err)
	}
	next, _ := newCall(0)
	if next.XID() == call.XID() {
		t.Error("BRPC-5.1-1: the XID is not fresh")
	}
}

// The reverse direction has credits of its own.
func TestReverseCredits(t *testing.T) {
	w := newWaits()
	p, c := rawClient(t, private4096, Config{Programs: testPrograms(w), Credits: 32, Ask: 16})
	c.EnableReverse()
	p.silent("start")
	first, _ := newCall(0)
	s := begin(t, patient(t), c, first)
	r := p.call()
	if r.Credits != 16 {
		t.Errorf("BRPC-4.1-5: a reverse call asks for %d", r.Credits)
	}
	p.send(header(r.xid, "00000004", noChunks) + okReply(r.xid)) // BRPC-4.1-4: 4 in reverse, 32 forward
	if err := s.wait(t); err != nil {
		t.Fatal(err)
	}
	var calls []*started
	var held []received
	for range 10 {
		call, _ := newCall(0)
		calls = append(calls, begin(t, patient(t), c, call))
	}
	for range 4 {
		held = append(held, p.call())
	}
	p.idle("BRPC-4.1-3: more reverse calls than were granted")
	p.silent("BRPC-4.1-1 BRPC-4.1-2: the forward direction with its own grant") // the grant is 0x20
	// A forward call that asks for other credits changes nothing in reverse.
	p.send(header(xid, "00000007", noChunks) + nullOf(xid))
	p.want("BRPC-4.1-5", header(xid, "00000020", noChunks)+okReply(xid))
	p.idle("BRPC-4.1-5: a call has changed the credits")
	// An RDMA_ERROR, too, whose direction is not certain.
	p.send(held[0].xid + "00000001 000f4240 00000004 00000002")
	held = append(held[1:], p.call())
	p.idle("BRPC-4.1-6: an RDMA_ERROR has changed the credits")
	for n := 1; n < 10; n++ {
		p.send(header(held[0].xid, "00000004", noChunks) + okReply(held[0].xid))
		if held = held[1:]; n+1+len(held) < 10 {
			held = append(held, p.call())
		}
	}
	failed := 0
	for _, s := range calls {
		var refused *RefusedError
		if err := s.wait(t); errors.As(err, &refused) {
			failed++
		} else if err != nil {
			t.Error(err)
		}
	}
	if failed != 1 {
		t.Errorf("%d calls were refused", failed)
	}
}

// BRPC-2.4.1-1, BRPC-2.4-3: the same XID in both directions is two calls.
func TestSameXID(t *testing.T) {
	w := newWaits()
	p, c := rawClient(t, private4096, Config{Programs: testPrograms(w)})
	p.silent("start")
	c.EnableReverse()
	call, _ := newCall(0)
	s := begin(t, patient(t), c, call)
	r := p.call()
	p.send(header(r.xid, "00000020", noChunks) + callOf(r.xid, procWait))
	<-w.entered
	p.send(header(r.xid, "00000020", noChunks) + okReply(r.xid))
	if err := s.wait(t); err != nil {
		t.Errorf("BRPC-2.4.1-1: %v", err)
	}
	w.leave <- struct{}{}
	p.want("BRPC-2.4.1-1", header(r.xid, "00000020", noChunks)+okReply(r.xid))
}

// What a client answers to reverse calls.
func TestReverseAnswers(t *testing.T) {
	p, c := rawService(t, private4096, Config{Programs: testPrograms(newWaits()), Credits: 16})
	call, _ := newCall(0)
	s := begin(t, patient(t), c, call)
	r := p.call()
	p.send(header(r.xid, "00000020", noChunks) + okReply(r.xid))
	if err := s.wait(t); err != nil {
		t.Fatal(err)
	}
	answer := header(xid, "00000010", noChunks) + okReply(xid)
	for range 2 {
		p.send(header(xid, "00000010", noChunks) + nullOf(xid))
		p.want("BRPC-5.2-1 BRPC-5.2-2 BRPC-5.2-3 BRPC-5.2-4 BRPC-5.2-5", answer)
		chunk := "00000001 00000004 0000000000000000"
		for _, lists := range []string{
			"00000001 00000028" + chunk + "00000000 00000000 00000000",
			"00000000 00000001 00000001" + chunk + "00000000 00000000",
			"00000000 00000000 00000001 00000001" + chunk,
		} {
			p.send(header(xid, "00000010", lists) + nullOf(xid))
			p.want("BRPC-5.3-2 BRPC-5.3-5", xid+"00000001 00000010 00000004 00000002")
		}
	}
}

// BRPC-4.3.1-1, BRPC-4.3.1-2, BRPC-4.2-1: a client with calls of its own takes as many reverse calls as it has
// granted.
func TestClientReceives(t *testing.T) {
	w := newWaits()
	p, c := rawService(t, private4096, Config{Programs: testPrograms(w), Credits: 8, Ask: 8})
	var calls []*started
	var held []received
	for range 8 {
		call, _ := newCall(0)
		calls = append(calls, begin(t, patient(t), c, call))
	}
	r := p.call()
	p.send(header(r.xid, "00000008", noChunks) + okReply(r.xid))
	for range 7 {
		held = append(held, p.call())
	}
	for i := range 8 {
		x := fmt.Sprintf("%08x", i)
		p.send(header(x, "00000008", noChunks) + callOf(x, procWait))
	}
	for range 8 {
		<-w.entered
	}
	for _, r := range held {
		p.send(header(r.xid, "00000008", noChunks) + okReply(r.xid))
	}
	for _, s := range calls {
		if err := s.wait(t); err != nil {
			t.Errorf("BRPC-4.1-1: a forward call while the reverse credits are used up: %v", err)
		}
	}
	for range 8 {
		w.leave <- struct{}{}
	}
	for range 8 {
		p.message()
	}
}

// The thresholds of the two directions are those of the connection.
func TestReverseThresholds(t *testing.T) {
	// Calls of the client have at most 1024 bytes, and its peer sends at most 4096.
	client, service := connPair(t, Config{InlineSend: 1024, Programs: testPrograms(newWaits())},
		Config{InlineReceive: 1024, Programs: testPrograms(newWaits())})
	doNull(t, client)
	service.EnableReverse()
	if s, r := client.Thresholds(); s != 1024 || r != 4096 {
		t.Fatal(s, r)
	}
	if s, r := service.Thresholds(); s != 4096 || r != 1024 {
		t.Fatalf("BRPC-4.2-2: %d, %d", s, r)
	}
	call := func(n, most int) error {
		call := &Call{Program: testProgram, Version: testVersion, Procedure: procRead, MaxReply: most}
		e := call.Begin()
		e.Uint32(4)
		e.Fixed(make([]byte, n))
		return service.Do(patient(t), call)
	}
	// 28 bytes of header and 44 of the call with its first argument.
	if err := call(4096-28-44, 100); !isStatus(err, oncrpc.GarbageArgs) {
		t.Errorf("BRPC-4.2-2: a reverse call of 4096 bytes: %v", err)
	}
	if err := call(4096-28-40, 100); !errors.Is(err, ErrTooLong) {
		t.Errorf("BRPC-5.3-3: a reverse call of 4100 bytes: %v", err)
	}
	if err := call(0, 600); !errors.Is(err, ErrTooLong) {
		t.Errorf("BRPC-5.3-3: a reverse call with a reply above 1024 bytes: %v", err)
	}
	doNull(t, service)
}

// BRPC-7-1: a message carries what may move in a chunk as Item, whatever its direction. A reverse call without chunks has it inline.
func TestReverseItems(t *testing.T) {
	p, c := rawClient(t, private4096, Config{})
	p.silent("start")
	c.EnableReverse()
	call := &Call{Program: testProgram, Version: testVersion, Procedure: procEcho, Into: [][]byte{make([]byte, 100)}}
	call.Begin().Item([]byte("twelve bytes"))
	s := begin(t, patient(t), c, call)
	r := p.call()
	if r.Proc != wire.Msg || len(r.Reads)+len(r.Writes) > 0 || r.HasReply || !bytes.HasSuffix(r.payload, []byte("\x00\x00\x00\x0ctwelve bytes")) {
		t.Errorf("BRPC-7-1: %x", r.payload)
	}
	p.send(header(r.xid, "00000002", noChunks) + okReply(r.xid) + "00000004 61626364")
	if err := s.wait(t); err != nil || string(call.Results.Item(100)) != "abcd" {
		t.Errorf("BRPC-7-1: %v", err)
	}
}

// BRPC-8-1: the credential of a forward call says nothing of a reverse call.
func TestCredentials(t *testing.T) {
	var got []uint32
	programs := &Programs{}
	programs.Register(testProgram, testVersion, procPlain, func(_ context.Context, r *Request) error {
		got = append(got, r.Header.Credential.Flavor)
		return nil
	})
	client, service := connPair(t, Config{Programs: programs}, Config{Programs: programs})
	service.EnableReverse()
	for _, c := range []*Conn{client, service} {
		call, _ := newCall(procPlain)
		if c == client {
			call.Credential = (&oncrpc.Sys{Machine: "test"}).Auth()
			call.Begin()
		}
		do(t, c, call)
	}
	if fmt.Sprint(got) != fmt.Sprint([]uint32{oncrpc.AuthSys, oncrpc.AuthNone}) {
		t.Errorf("BRPC-8-1: flavors %v", got)
	}
}

// RPCRDMA-4-2, BRPC-7-2: a connection that is only used in reverse. Its first message must come from the
// client, though (RFC 5044, section 7.1.2).
func TestReverseOnly(t *testing.T) {
	cfg := Config{Programs: testPrograms(newWaits()), ReverseChunks: true, RDMA: rdma.Options{NoCRC: true}}
	client, service := connPair(t, cfg, Config{ReverseChunks: true, RDMA: rdma.Options{NoCRC: true}})
	doNullUnknown(t, client)
	service.EnableReverse()
	for range 100 {
		call := &Call{Program: testProgram, Version: testVersion, Procedure: procRead, MaxReply: 4,
			Into: [][]byte{make([]byte, 10000)}}
		call.Begin().Uint32(10000)
		do(t, service, call)
		if !bytes.Equal(call.Results.Item(10000), pattern(10000)) {
			t.Fatal("BRPC-7-2: other data")
		}
	}
}

func doNullUnknown(t *testing.T, c *Conn) {
	call, _ := newCall(0)
	if err := c.Do(patient(t), call); !isStatus(err, oncrpc.ProgUnavail) {
		t.Fatal(err)
	}
}
