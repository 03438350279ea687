package tunnel

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/rdma/rpcrdma"
	"github.com/iser-target/iser-target/tests/testkit"
)

// within returns a context for the time of a test.
func within(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	t.Cleanup(cancel)
	return ctx
}

// listen returns the address of a server that accepts one connection, and its end when that has come.
func listen(t testing.TB) (address string, accepted <-chan *Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	ends := make(chan *Conn, 1)
	go func() {
		defer close(ends)
		nc, err := l.Accept()
		if err != nil {
			return
		}
		rc, err := rdma.Respond(context.Background(), nc, rdma.Options{}, func(r *rdma.Request) rdma.Answer {
			if !Announced(r) {
				t.Error("the Request is not for RPC-over-RDMA")
			}
			return Answer()
		})
		if err != nil {
			nc.Close()
			return
		}
		c, err := Serve(rc)
		if err != nil {
			t.Error(err)
			return
		}
		ends <- c
	}()
	return l.Addr().String(), ends
}

// pair returns both ends of a stream. It checks that nothing is left of them after the test.
func pair(t testing.TB) (client, server *Conn) {
	t.Helper()
	goroutines := runtime.NumGoroutine()
	address, accepted := listen(t)
	client, err := Dial(within(t), address)
	if err != nil {
		t.Fatal(err)
	}
	server = <-accepted
	t.Cleanup(func() {
		client.Close()
		server.Close()
		<-client.Done()
		<-server.Done()
		testkit.Eventually(t, "no more goroutines than before", func() bool { return runtime.NumGoroutine() <= goroutines })
	})
	return client, server
}

// Bytes arrive in order and complete, in both directions at once, whatever sizes are written and read.
func TestBothDirections(t *testing.T) {
	client, server := pair(t)
	const total = 1 << 20
	var wg sync.WaitGroup
	send := func(c *Conn, seed uint64, sum *[32]byte) {
		random := rand.New(rand.NewPCG(seed, 0))
		b := make([]byte, total)
		for i := range b {
			b[i] = byte(random.Uint32())
		}
		*sum = sha256.Sum256(b)
		for len(b) > 0 {
			n := min(len(b), 1+random.IntN(3*MaxData))
			if m, err := c.Write(b[:n]); m != n || err != nil {
				t.Errorf("Write of %d: %d, %v", n, m, err)
				return
			}
			b = b[n:]
		}
	}
	receive := func(c *Conn, seed uint64, sum *[32]byte) {
		random := rand.New(rand.NewPCG(seed, 1))
		var all []byte
		for len(all) < total {
			b := make([]byte, 1+random.IntN(2*MaxData))
			n, err := c.Read(b)
			if err != nil {
				t.Error(err)
				return
			}
			all = append(all, b[:n]...)
		}
		*sum = sha256.Sum256(all)
	}
	var sent, received [2][32]byte
	for i, c := range []*Conn{client, server} {
		wg.Go(func() { send(c, uint64(i), &sent[i]) })
		wg.Go(func() { receive(c, uint64(i), &received[1-i]) })
	}
	wg.Wait()
	if sent != received {
		t.Errorf("sent %x, received %x", sent, received)
	}
}

// An end that closes has sent everything before, and the other one reads it and then EOF.
func TestCloseAfterWrite(t *testing.T) {
	for _, fromServer := range []bool{false, true} {
		client, server := pair(t)
		from, to := client, server
		if fromServer {
			from, to = server, client
		}
		if _, err := from.Write([]byte("the last words")); err != nil {
			t.Fatal(err)
		}
		from.Close()
		<-to.Done()
		if b, err := io.ReadAll(to); string(b) != "the last words" || err != nil {
			t.Errorf("read %q, %v", b, err)
		}
		if _, err := to.Write([]byte("x")); err == nil {
			t.Error("a write after the end has succeeded")
		}
		if _, err := from.Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
			t.Errorf("a read after Close: %v", err)
		}
		if _, err := from.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
			t.Errorf("a write after Close: %v", err)
		}
	}
}

// A reader that does not read stops the sender after one call, and a deadline ends the wait.
func TestSlowReaderStopsTheSender(t *testing.T) {
	client, server := pair(t)
	if n, err := server.Write(make([]byte, MaxData)); n != MaxData || err != nil {
		t.Fatalf("the first call: %d, %v", n, err)
	}
	written := make(chan error, 1)
	go func() {
		_, err := server.Write(make([]byte, 10*MaxData))
		written <- err
	}()
	select {
	case err := <-written:
		t.Fatalf("the sender did not wait: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	server.SetWriteDeadline(time.Unix(1, 0)) // holds for the write in progress, too
	if err := <-written; !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("write: %v", err)
	}
	server.SetWriteDeadline(time.Time{})
	if _, err := server.Write([]byte("x")); !errors.Is(err, errBroken) {
		t.Errorf("a write after one that failed: %v", err)
	}
	if n, err := client.Read(make([]byte, 2*MaxData)); n != MaxData || err != nil {
		t.Errorf("read %d, %v", n, err)
	}
}

// Deadlines of reads work as net.Conn says, also those that are set during a read.
func TestReadDeadlines(t *testing.T) {
	client, server := pair(t)
	b := make([]byte, 10)
	client.SetReadDeadline(time.Now().Add(-time.Second))
	if _, err := client.Read(b); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a deadline in the past: %v", err)
	}
	client.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	if _, err := client.Read(b); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a deadline: %v", err)
	}
	client.SetReadDeadline(time.Time{})
	result := make(chan error, 1)
	go func() {
		_, err := client.Read(b)
		result <- err
	}()
	client.SetReadDeadline(time.Unix(1, 0))
	if err := <-result; !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a deadline during a read: %v", err)
	}
	client.SetReadDeadline(time.Now().Add(time.Hour))
	if _, err := server.Write([]byte("still here")); err != nil {
		t.Fatal(err)
	}
	if n, err := client.Read(b); string(b[:n]) != "still here" || err != nil {
		t.Errorf("read %q, %v", b[:n], err)
	}
}

// Dial says what is wrong with a server.
func TestDialErrors(t *testing.T) {
	serve := func(f func(nc net.Conn)) string {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		go func() {
			if nc, err := l.Accept(); err == nil {
				f(nc)
			}
		}()
		return l.Addr().String()
	}
	for _, tc := range []struct {
		name    string
		address string
		is      error
		text    string
	}{
		{"it closes the connection", serve(func(nc net.Conn) { nc.Close() }), ErrNoRDMA, ""},
		{"it is a web server", serve(func(nc net.Conn) {
			io.ReadFull(nc, make([]byte, 20))
			io.WriteString(nc, "HTTP/1.1 400 Bad Request\r\n\r\n")
			nc.Close()
		}), ErrNoRDMA, ""},
		{"it rejects", serve(func(nc net.Conn) {
			rdma.Respond(context.Background(), nc, rdma.Options{}, func(*rdma.Request) rdma.Answer { return rdma.Answer{Reject: errors.New("no")} })
			nc.Close()
		}), ErrNoChannel, "rejects"},
		{"it speaks iSER", serve(func(nc net.Conn) {
			rc, err := rdma.Respond(context.Background(), nc, rdma.Options{}, func(*rdma.Request) rdma.Answer {
				return rdma.Answer{Private: []byte{0x80, 0, 0, 0}} // the header of iSER
			})
			if err == nil {
				defer rc.Close()
				var ev rdma.Event
				if err := rc.Receive(&ev); err == nil {
					t.Errorf("a message of %d bytes came to iSER", len(ev.Data))
				}
			}
		}), ErrNoChannel, "another protocol"},
		{"it has no such program", serve(func(nc net.Conn) {
			if c, err := rpcrdma.Accept(context.Background(), nc, rpcrdma.Config{InlineSend: inline, InlineReceive: inline}); err == nil {
				<-c.Done()
			}
		}), ErrNoChannel, "PROG_UNAVAIL"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, err := Dial(within(t), tc.address)
			if err == nil {
				c.Close()
			}
			if !errors.Is(err, tc.is) || !strings.Contains(err.Error(), tc.text) {
				t.Errorf("error %v, want %v with %q", err, tc.is, tc.text)
			}
		})
	}
}

// raw connects to a server end, and returns the client's connection for calls.
func raw(t testing.TB) (*rpcrdma.Conn, *Conn) {
	t.Helper()
	address, accepted := listen(t)
	c, err := rpcrdma.Dial(within(t), "tcp", address, config(nil))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c, <-accepted
}

// A client that breaks a rule loses the connection, and what it sent is not read.
func TestBrokenRules(t *testing.T) {
	open := func(e *rpcrdma.Call) { e.Procedure = procOpen; e.Begin() }
	data := func(at uint64, b []byte) func(*rpcrdma.Call) {
		return func(c *rpcrdma.Call) {
			c.Procedure = procData
			e := c.Begin()
			e.Uint64(at)
			e.Opaque(b)
		}
	}
	for _, tc := range []struct {
		name  string
		calls []func(*rpcrdma.Call) // the last one is wrong
	}{
		{"DATA before OPEN", []func(*rpcrdma.Call){data(0, []byte("x"))}},
		{"OPEN twice", []func(*rpcrdma.Call){open, open}},
		{"OPEN with arguments", []func(*rpcrdma.Call){func(c *rpcrdma.Call) { c.Procedure = procOpen; c.Begin().Uint32(1) }}},
		{"a gap", []func(*rpcrdma.Call){open, data(0, []byte("abc")), data(4, []byte("x"))}},
		{"a repetition", []func(*rpcrdma.Call){open, data(0, []byte("abc")), data(0, []byte("abc"))}},
		{"the largest offset", []func(*rpcrdma.Call){open, data(1<<64-1, []byte("x"))}},
		{"no bytes", []func(*rpcrdma.Call){open, data(0, nil)}},
		{"bytes behind the data", []func(*rpcrdma.Call){open, func(c *rpcrdma.Call) {
			data(0, []byte("abc"))(c)
			e := c.Begin()
			e.Uint64(0)
			e.Opaque([]byte("x"))
			e.Uint32(0)
		}}},
		{"a count beyond the call", []func(*rpcrdma.Call){open, func(c *rpcrdma.Call) { c.Procedure = procData; e := c.Begin(); e.Uint64(0); e.Uint32(1 << 31) }}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, server := raw(t)
			call := rpcrdma.Call{Program: Program, Version: Version}
			for i, set := range tc.calls {
				set(&call)
				err := c.Do(within(t), &call)
				if last := i == len(tc.calls)-1; last != (err != nil) {
					t.Fatalf("call %d: %v", i, err)
				}
			}
			select {
			case <-server.Done():
			case <-time.After(testkit.Patience):
				t.Fatal("the connection does not end")
			}
			b, err := io.ReadAll(server)
			if bytes.Contains(b, []byte("x")) {
				t.Errorf("read %q, %v", b, err)
			}
		})
	}
}

// Two DATA calls at once are no order, so they end the connection.
func TestTwoCallsAtOnce(t *testing.T) {
	c, server := raw(t)
	call := func() *rpcrdma.Call { return &rpcrdma.Call{Program: Program, Version: Version, Procedure: procData} }
	open := call()
	open.Procedure = procOpen
	open.Begin()
	if err := c.Do(within(t), open); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i, at := range []uint64{0, 1, 1} { // nobody reads, so the second one waits, and the third one is too much
		call := call()
		e := call.Begin()
		e.Uint64(at)
		e.Opaque([]byte{'x'})
		if i == 0 {
			if err := c.Do(within(t), call); err != nil {
				t.Fatal(err)
			}
			continue
		}
		wg.Go(func() {
			if err := c.Do(within(t), call); err == nil {
				t.Error("a call was answered")
			}
		})
	}
	select {
	case <-server.Done():
	case <-time.After(testkit.Patience):
		t.Fatal("the connection does not end")
	}
	wg.Wait()
}
