package rpcrdma

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"github.com/iser-target/iser-target/rdma/rpcrdma/oncrpc"
	"github.com/iser-target/iser-target/tests/testkit"
)

// The program of the tests, and its procedures.
const (
	testProgram = 0x20000001
	testVersion = 3

	procEcho  = 1 // item -> item
	procWait  = 2 // waits until it may answer
	procRead  = 3 // n -> item of n bytes, byte i is i
	procPlain = 4 // opaque -> opaque
	procTwo   = 5 // two counts -> status and item, twice; 0 means no item
)

// waits is what procWait does.
type waits struct{ entered, leave chan struct{} }

func newWaits() *waits { return &waits{make(chan struct{}, 2000), make(chan struct{}, 2000)} }

// testPrograms returns the program of the tests.
func testPrograms(w *waits) *Programs {
	p := &Programs{}
	p.Register(testProgram, testVersion, procEcho, func(_ context.Context, r *Request) error {
		data := r.Args.Item(4 << 20)
		if err := r.Args.End(); err != nil {
			return err
		}
		r.Results.Item(data)
		return nil
	})
	p.Register(testProgram, testVersion, procWait, func(ctx context.Context, r *Request) error {
		w.entered <- struct{}{}
		select {
		case <-w.leave:
		case <-ctx.Done():
		}
		return nil
	})
	p.Register(testProgram, testVersion, procRead, func(_ context.Context, r *Request) error {
		n := int(r.Args.Uint32())
		if err := r.Args.End(); err != nil {
			return err
		}
		data, err := r.Buffer(n)
		if err != nil {
			return err
		}
		fill(data)
		r.Results.Item(data)
		return nil
	})
	p.Register(testProgram, testVersion, procPlain, func(_ context.Context, r *Request) error {
		data := r.Args.Opaque(4 << 20)
		if err := r.Args.End(); err != nil {
			return err
		}
		r.Results.Opaque(data)
		return nil
	})
	p.Register(testProgram, testVersion, procTwo, func(_ context.Context, r *Request) error {
		n := [2]int{int(r.Args.Uint32()), int(r.Args.Uint32())}
		if err := r.Args.End(); err != nil {
			return err
		}
		for _, n := range n {
			r.Results.Bool(n > 0)
			if n > 0 {
				data, err := r.Buffer(n)
				if err != nil {
					return err
				}
				fill(data)
				r.Results.Item(data)
			}
		}
		return nil
	})
	return p
}

func fill(b []byte) {
	for i := range b {
		b[i] = byte(i) ^ byte(i>>8)
	}
}

// pattern returns n bytes of what procRead returns.
func pattern(n int) []byte {
	b := make([]byte, n)
	fill(b)
	return b
}

func tcpPair(t testing.TB) (a, b net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if a, err = net.Dial("tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if b, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	return a, b
}

// connPair returns both ends of a connection: the client endpoint, which has connected, and the service.
func connPair(t testing.TB, cc, sc Config) (client, service *Conn) {
	t.Helper()
	a, b := tcpPair(t)
	done := make(chan error, 1)
	go func() {
		var err error
		service, err = Accept(context.Background(), b, sc)
		done <- err
	}()
	client, err := Initiate(context.Background(), a, cc)
	if serr := <-done; err != nil || serr != nil {
		t.Fatalf("startup: client %v, service %v", err, serr)
	}
	t.Cleanup(func() {
		client.Close()
		service.Close()
		client.workers.Wait()
		service.workers.Wait()
	})
	return client, service
}

// newCall returns a call of the test program, and its Encoder.
func newCall(procedure uint32) (*Call, *oncrpc.Encoder) {
	call := &Call{Program: testProgram, Version: testVersion, Procedure: procedure}
	return call, call.Begin()
}

// patient returns a context that ends the test if it hangs.
func patient(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	t.Cleanup(cancel)
	return ctx
}

func do(t testing.TB, c *Conn, call *Call) {
	t.Helper()
	if err := c.Do(patient(t), call); err != nil {
		t.Fatal(err)
	}
}

// doNull makes a NULL call.
func doNull(t testing.TB, c *Conn) {
	t.Helper()
	call, _ := newCall(0)
	do(t, c, call)
}

func isStatus(err error, s oncrpc.Status) bool {
	var e *StatusError
	return errors.As(err, &e) && e.Status == s
}

func within(t testing.TB, what string, ch <-chan struct{}) {
	t.Helper()
	select {
	case <-ch:
	case <-time.After(testkit.Patience):
		t.Fatalf("%s: not within %v\n%s", what, testkit.Patience, testkit.Stacks())
	}
}
