package rpcrdma

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A silent peer costs only its own connection: it ends after StallTimeout.
func TestStall(t *testing.T) {
	cfg := Config{Programs: testPrograms(newWaits()), StallTimeout: 200 * time.Millisecond, Credits: 4}
	for _, tt := range []struct {
		name  string
		stall func(p *rawPeer)
	}{
		{"it does not answer an RDMA Read", func(p *rawPeer) {
			s := p.expose(make([]byte, 1<<20), 0, rdma.RemoteRead)
			p.send(header(xid, "00000020", "00000001 0000002c"+s+"00000000 00000000 00000000") + callOf(xid, procEcho) + "00100000")
		}},
		{"it does not take a result", func(p *rawPeer) {
			s := p.expose(make([]byte, 1<<20), 0, rdma.RemoteWrite)
			for i := range 4 {
				x := fmt.Sprintf("%08x", i)
				p.send(header(x, "00000020", "00000000 00000001 00000001"+s+"00000000 00000000") + callOf(x, procRead) + "00100000")
			}
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			neighbour, _ := connPair(t, Config{}, cfg)
			p, c := rawClient(t, noInvalid, cfg)
			p.silent("start")
			tt.stall(p)
			begun := time.Now()
			for range 10 {
				doNull(t, neighbour)
			}
			within(t, "the end", c.Done())
			if err := c.Err(); err != errStalled || time.Since(begun) < 100*time.Millisecond {
				t.Errorf("%v after %v", err, time.Since(begun))
			}
			c.workers.Wait()
			if c.busy != 0 || c.reserved != 0 {
				t.Errorf("in use: %d slots, %d bytes", c.busy, c.reserved)
			}
			doNull(t, neighbour)
		})
	}
}

func TestIdle(t *testing.T) {
	w := newWaits()
	client, service := connPair(t, Config{}, Config{Programs: testPrograms(w), IdleTimeout: 200 * time.Millisecond})
	call, _ := newCall(procWait)
	s := begin(t, patient(t), client, call)
	<-w.entered
	time.Sleep(500 * time.Millisecond) // a call in progress is not idle
	w.leave <- struct{}{}
	if err := s.wait(t); err != nil {
		t.Fatal(err)
	}
	within(t, "the end", client.Done())
	if err := service.Err(); err != errIdle {
		t.Error(err)
	}
}

// The peer vanishes with calls outstanding in both directions.
func TestVanish(t *testing.T) {
	w := newWaits()
	cfg := Config{Programs: testPrograms(w)}
	a, b := tcpPair(t)
	var service *Conn
	accepted := make(chan error)
	go func() {
		var err error
		service, err = Accept(context.Background(), b, cfg)
		accepted <- err
	}()
	client, err := Initiate(context.Background(), a, cfg)
	if aerr := <-accepted; err != nil || aerr != nil {
		t.Fatal(err, aerr)
	}
	doNull(t, client)
	service.EnableReverse()
	doNull(t, service)
	var calls []*started
	for i := range 20 {
		call, _ := newCall(procWait)
		calls = append(calls, begin(t, patient(t), []*Conn{client, service}[i%2], call))
		<-w.entered
	}
	a.(*net.TCPConn).SetLinger(0)
	a.Close()
	for _, s := range calls {
		if err := s.wait(t); !errors.Is(err, ErrLost) {
			t.Errorf("%v", err)
		}
	}
	for _, c := range []*Conn{client, service} {
		within(t, "the end", c.Done())
		c.workers.Wait() // the contexts of the procedures have ended
		if c.busy != 0 || c.inflight != 0 {
			t.Errorf("%d slots are in use, %d calls are in flight", c.busy, c.inflight)
		}
		call, _ := newCall(0)
		if err := c.Do(patient(t), call); !errors.Is(err, ErrLost) {
			t.Errorf("a call after the end: %v", err)
		}
	}
}

// failingConn fails each Write once it is told to.
type failingConn struct {
	net.Conn
	fail atomic.Bool
}

func (c *failingConn) Write(b []byte) (int, error) {
	if c.fail.Load() {
		return 0, io.ErrClosedPipe
	}
	return c.Conn.Write(b)
}

// RPCRDMA-4.5.4-2: a responder that cannot send a reply closes the connection.
func TestSendFails(t *testing.T) {
	for _, message := range []string{header(xid, "00000020", noChunks) + nullOf(xid), header(xid, "00000020", "00000005")} {
		a, b := tcpPair(t)
		nc := &failingConn{Conn: b}
		p, c := rawOn(t, a, nc, private4096, Config{Programs: testPrograms(newWaits())}, rdma.Options{})
		p.silent("start")
		nc.fail.Store(true)
		p.send(message + strings.Repeat("00000000", 4))
		within(t, "RPCRDMA-4.5.4-2", c.Done())
		c.workers.Wait()
		if c.busy != 0 {
			t.Errorf("RPCRDMA-4.5.4-2: %d slots are in use", c.busy)
		}
	}
}

func TestShutdown(t *testing.T) {
	w := newWaits()
	cfg := Config{Programs: testPrograms(w)}
	for _, who := range []string{"client", "service"} {
		t.Run(who, func(t *testing.T) {
			client, service := connPair(t, cfg, cfg)
			doNull(t, client)
			service.EnableReverse()
			doNull(t, service)
			forward, _ := newCall(procWait)
			reverse, _ := newCall(procWait)
			f := begin(t, patient(t), client, forward)
			r := begin(t, patient(t), service, reverse)
			<-w.entered
			<-w.entered
			c := client
			if who == "service" {
				c = service
			}
			done := make(chan error, 1)
			go func() { done <- c.Shutdown(patient(t)) }()
			testkit.Eventually(t, "draining", func() bool {
				late, _ := newCall(0)
				return c.Do(patient(t), late) == ErrClosed
			})
			w.leave <- struct{}{}
			w.leave <- struct{}{}
			if err := errors.Join(f.wait(t), r.wait(t), <-done); err != nil {
				t.Error(err)
			}
			within(t, "the end of the client", client.Done())
			within(t, "the end of the service", service.Done())
			if !inOrder(client.Err()) || !inOrder(service.Err()) {
				t.Errorf("%v, %v", client.Err(), service.Err())
			}
		})
	}
	t.Run("out of time", func(t *testing.T) {
		client, service := connPair(t, cfg, cfg)
		call, _ := newCall(procWait)
		s := begin(t, patient(t), client, call)
		<-w.entered
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		if err := service.Shutdown(ctx); err != context.DeadlineExceeded {
			t.Error(err)
		}
		if err := s.wait(t); !errors.Is(err, ErrLost) {
			t.Error(err)
		}
	})
}

// testServer runs s on loopback and returns its address.
func testServer(t testing.TB, s *Server) (addr string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Close()
		if err := <-done; err != ErrClosed {
			t.Error(err)
		}
	})
	return l.Addr().String()
}

func dialer(addr string) func(context.Context) (net.Conn, error) {
	return func(ctx context.Context) (net.Conn, error) { return new(net.Dialer).DialContext(ctx, "tcp", addr) }
}

// A Client retransmits what was not answered on its next connection, with the same XIDs. BRPC-4.3.1-3 and BRPC-4.3.2-3:
// the calls of both directions find their place there.
func TestRetransmission(t *testing.T) {
	w := newWaits()
	var mu sync.Mutex
	seen := map[uint32]int{}
	programs := testPrograms(w)
	programs.Register(testProgram, testVersion, 20, func(ctx context.Context, r *Request) error {
		mu.Lock()
		seen[r.Header.XID]++
		again := seen[r.Header.XID] > 1
		mu.Unlock()
		w.entered <- struct{}{}
		if !again {
			<-ctx.Done() // lost
		}
		return nil
	})
	times := func(c *Call) int {
		mu.Lock()
		defer mu.Unlock()
		return seen[c.XID()]
	}
	conns := make(chan *Conn, 10)
	addr := testServer(t, &Server{Config: Config{Programs: programs}, OnConn: func(c *Conn) { conns <- c }})
	client := NewClient(func(ctx context.Context) (net.Conn, error) { return dialer(addr)(ctx) },
		Config{Programs: testPrograms(newWaits())}, func(ctx context.Context, c *Conn) error {
			call, _ := newCall(0)
			return c.Do(ctx, call)
		})
	defer client.Close()
	var calls []*started
	for range 10 {
		call, _ := newCall(20)
		s := &started{call, make(chan error, 1)}
		go func() { s.done <- client.Do(patient(t), call) }()
		calls = append(calls, s)
		<-w.entered
	}
	once, _ := newCall(20)
	once.Once = true
	o := &started{once, make(chan error, 1)}
	go func() { o.done <- client.Do(patient(t), once) }()
	<-w.entered
	first := <-conns
	first.EnableReverse()
	reverse := &Call{Program: testProgram, Version: testVersion, Procedure: procPlain, MaxReply: 4}
	reverse.Begin().Opaque(nil)
	first.kill(errStalled)
	for _, s := range calls {
		if err := s.wait(t); err != nil {
			t.Error(err)
		}
		if n := times(s.Call); n != 2 {
			t.Errorf("BRPC-5.4-1: the service has seen XID %#x %d times", s.XID(), n)
		}
	}
	if err := o.wait(t); !errors.Is(err, ErrLost) || times(once) != 1 {
		t.Errorf("a call to be made once: %v, seen %d times", err, times(once))
	}
	// The service cannot call before the client is back, and not before it is enabled again.
	if err := first.Do(patient(t), reverse); !errors.Is(err, ErrLost) {
		t.Errorf("BRPC-5.4-2: %v", err)
	}
	second := <-conns
	if err := second.Do(patient(t), reverse); err != ErrReverse {
		t.Errorf("BRPC-6-1: %v", err)
	}
	second.EnableReverse()
	do(t, second, reverse) // BRPC-4.3.2-3: the same message, on the new connection
	// BRPC-5.4-4, BRPC-2-1: a client that serves calls connects again without a call of its own. The service never connects.
	second.Close()
	select {
	case <-conns:
	case <-patient(t).Done():
		t.Error("BRPC-5.4-4: the client did not come back")
	}
}

// A Client that shuts down makes no further calls. Its calls are answered first, even if the connection is lost meanwhile, and so are those of the peer.
func TestClientShutdown(t *testing.T) {
	theirs, ours := newWaits(), newWaits()
	conns, reasons := make(chan *Conn, 10), make(chan error, 10)
	addr := testServer(t, &Server{Config: Config{Programs: testPrograms(theirs)}, OnConn: func(c *Conn) { conns <- c },
		OnError: func(_ net.Addr, err error) { reasons <- err }})
	var dials atomic.Int32
	newClient := func() *Client {
		dials.Store(0)
		return NewClient(func(ctx context.Context) (net.Conn, error) { dials.Add(1); return dialer(addr)(ctx) },
			Config{Programs: testPrograms(ours)}, nil)
	}
	shutdown := func(ctx context.Context, c *Client) <-chan error {
		done := make(chan error, 1)
		go func() { done <- c.Shutdown(ctx) }()
		testkit.Eventually(t, "draining", func() bool { c.mu.Lock(); defer c.mu.Unlock(); return c.draining })
		late, _ := newCall(0)
		if err := c.Do(patient(t), late); err != ErrClosed {
			t.Errorf("a call after Shutdown: %v", err)
		}
		return done
	}
	wait := func(c *Client) *started {
		call, _ := newCall(procWait)
		s := &started{call, make(chan error, 1)}
		go func() { s.done <- c.Do(patient(t), call) }()
		<-theirs.entered
		return s
	}
	t.Run("the connection is lost", func(t *testing.T) {
		client := newClient()
		defer client.Close()
		s := wait(client)
		done := shutdown(patient(t), client)
		(<-conns).kill(errStalled)
		if err := <-reasons; err != errStalled {
			t.Error(err)
		}
		<-theirs.entered // retransmitted
		second := <-conns
		second.EnableReverse()
		reverse, _ := newCall(procWait)
		r := begin(t, patient(t), second, reverse)
		<-ours.entered
		theirs.leave <- struct{}{}
		if err := s.wait(t); err != nil {
			t.Error(err)
		}
		select {
		case err := <-done:
			t.Fatalf("Shutdown returns while a call of the peer is in progress: %v", err)
		case <-time.After(50 * time.Millisecond):
		}
		ours.leave <- struct{}{}
		if err := errors.Join(r.wait(t), <-done); err != nil {
			t.Error(err)
		}
		within(t, "the end", second.Done())
		if !inOrder(second.Err()) || dials.Load() != 2 {
			t.Errorf("%v after %d connections", second.Err(), dials.Load())
		}
	})
	t.Run("out of time", func(t *testing.T) {
		client := newClient()
		s := wait(client)
		ctx, cancel := context.WithCancel(t.Context())
		done := shutdown(ctx, client)
		cancel()
		if err := <-done; err != context.Canceled {
			t.Error(err)
		}
		if err := s.wait(t); !errors.Is(err, ErrLost) && !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
		within(t, "the end", (<-conns).Done())
	})
	t.Run("closed meanwhile", func(t *testing.T) {
		client := newClient()
		s := wait(client)
		done := shutdown(patient(t), client)
		client.Close()
		if err := errors.Join(<-done, client.Shutdown(patient(t))); err != nil {
			t.Error(err)
		}
		if err := s.wait(t); !errors.Is(err, ErrLost) && !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
		within(t, "the end", (<-conns).Done())
	})
	t.Run("never connected", func(t *testing.T) {
		client := newClient()
		if err := <-shutdown(patient(t), client); err != nil || dials.Load() != 0 {
			t.Errorf("%v after %d connections", err, dials.Load())
		}
	})
}

// BRPC-5.4-3: a call that waits for a connection ends with its context.
func TestClientTimeout(t *testing.T) {
	client := NewClient(func(context.Context) (net.Conn, error) { return nil, io.ErrUnexpectedEOF }, Config{}, nil)
	defer client.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	call, _ := newCall(0)
	if err := client.Do(ctx, call); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("BRPC-5.4-3: %v", err)
	}
}

// RPCRDMA-8797.4-3: the next connection has the sizes that its peer announces then.
func TestSizesOfTheNextConnection(t *testing.T) {
	for _, tt := range []struct{ mine, peer, send, receive int }{
		{4096, 4096, 4096, 4096}, {4096, 1024, 1024, 1024}, {1024, 4096, 1024, 1024}, {65536, 4096, 4096, 4096},
	} {
		client, _ := connPair(t, Config{InlineSend: tt.mine, InlineReceive: tt.mine},
			Config{InlineSend: tt.peer, InlineReceive: tt.peer})
		if s, r := client.Thresholds(); s != tt.send || r != tt.receive {
			t.Errorf("RPCRDMA-8797.4-3: %+v: %d, %d", tt, s, r)
		}
	}
}

// More connections than allowed are closed, and a peer that says nothing does not stay.
func TestServerLimits(t *testing.T) {
	reasons := make(chan error, 10)
	addr := testServer(t, &Server{Config: Config{Programs: testPrograms(newWaits()), RDMA: rdma.Options{
		StartupTimeout: 200 * time.Millisecond}}, MaxConns: 2, OnError: func(_ net.Addr, err error) { reasons <- err }})
	silent, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	good, err := Dial(patient(t), "tcp", addr, Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer good.Close()
	third, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer third.Close()
	third.SetReadDeadline(time.Now().Add(testkit.Patience))
	if _, err := third.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("the third connection: %v", err)
	}
	if err := <-reasons; err != errMaxConns {
		t.Error(err)
	}
	doNull(t, good)
	if err := <-reasons; err == nil { // the silent one
		t.Error("no reason")
	}
	doNull(t, good)
	next, err := Dial(patient(t), "tcp", addr, Config{})
	if err != nil {
		t.Fatal(err)
	}
	doNull(t, next)
	next.Close()
}

// failingListener returns errors before it accepts.
type failingListener struct {
	net.Listener
	errs []error
}

func (l *failingListener) Accept() (net.Conn, error) {
	if len(l.errs) > 0 {
		err := l.errs[0]
		l.errs = l.errs[1:]
		return nil, err
	}
	return l.Listener.Accept()
}

// A server that has no descriptors for a moment continues, and a broken listener ends it.
func TestAcceptErrors(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &Server{Config: Config{Programs: testPrograms(newWaits())}}
	done := make(chan error, 1)
	fl := &failingListener{l, []error{&net.OpError{Op: "accept", Err: syscall.EMFILE}, syscall.ECONNABORTED}}
	go func() { done <- s.Serve(fl) }()
	c, err := Dial(patient(t), "tcp", l.Addr().String(), Config{})
	if err != nil {
		t.Fatal(err)
	}
	doNull(t, c)
	c.Close()
	s.Close()
	if err := <-done; err != ErrClosed {
		t.Error(err)
	}
	if l, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	if err := new(Server).Serve(&failingListener{l, []error{syscall.EBADF}}); err != syscall.EBADF {
		t.Errorf("a broken listener: %v", err)
	}
}

func TestServerShutdown(t *testing.T) {
	w := newWaits()
	s := &Server{Config: Config{Programs: testPrograms(w)}}
	addr := testServer(t, s)
	var calls []*started
	for range 3 {
		c, err := Dial(patient(t), "tcp", addr, Config{})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		call, _ := newCall(procWait)
		calls = append(calls, begin(t, patient(t), c, call))
		<-w.entered
	}
	done := make(chan error)
	go func() { done <- s.Shutdown(patient(t)) }()
	for range calls {
		w.leave <- struct{}{}
	}
	for _, c := range calls {
		if err := c.wait(t); err != nil {
			t.Error(err)
		}
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	if _, err := Dial(patient(t), "tcp", addr, Config{}); err == nil {
		t.Error("the server accepts after Shutdown")
	}
}

func TestConfig(t *testing.T) {
	for _, tt := range []struct {
		cfg  Config
		want string
	}{
		{Config{Credits: 1025}, "Credits 1025 is outside 1..1024"},
		{Config{Ask: -1}, "Ask -1 is outside 1..1024"},
		{Config{InlineSend: 1000}, "InlineSend 1000 is outside 1024..262144"},
		{Config{InlineReceive: 5000}, "InlineReceive 5000 is not a multiple of 1024"},
		{Config{MaxArgs: 2 << 20, Memory: 2 << 20}, "Memory 2097152 is outside"},
		{Config{StallTimeout: -1}, "must not be negative"},
	} {
		if _, err := tt.cfg.complete(); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%+v: %v, want %q", tt.cfg, err, tt.want)
		}
	}
	if Port != 20049 || NetID != "rdma" || NetID6 != "rdma6" {
		t.Error("RPCRDMA-5-1")
	}
}

// V-RPCRDMA-2: what leaves for a NULL call of NFS version 4, as an FPDU.
func TestFPDU(t *testing.T) {
	a, b := tcpPair(t)
	go func() {
		request := make([]byte, 20+4+8)
		io.ReadFull(b, request)
		b.Write(append(unhex("4d504120494420526570204672616d65 5002000c 00200020"), unhex(private4096)...))
	}()
	c, err := Initiate(patient(t), a, Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	call := &Call{Program: 100003, Version: 4}
	nextXID.Store(0x12345677)
	call.Begin()
	s := begin(t, patient(t), c, call)
	want := unhex("00564143 00000000 00000000 00000001 00000000 12345678 00000001 00000020 00000000 00000000 00000000 00000000" +
		"12345678 00000000 00000002 000186a3 00000004 00000000 00000000 00000000 00000000 00000000 7171f018")
	got := make([]byte, len(want))
	if _, err := io.ReadFull(b, got); err != nil || !bytes.Equal(got, want) {
		t.Errorf("V-RPCRDMA-2: %v\n got %x\nwant %x", err, got, want)
	}
	c.Close()
	s.wait(t)
}
