package verbs_test

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"testing"
	"time"

	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/rdma/wire"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/verbs"
)

// dial returns both ends of a TCP connection.
func dial(t *testing.T) (client, server net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if client, err = net.Dial("tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	if server, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Close() })
	for _, c := range []net.Conn{client, server} {
		if err := c.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
			t.Fatal(err)
		}
	}
	return client, server
}

// clean checks that no STag and no stream is left of a test.
func clean(t *testing.T) {
	t.Helper()
	before := rdma.ReadStats()
	t.Cleanup(func() {
		testkit.Eventually(t, "streams and STags are gone", func() bool { return rdma.ReadStats() == before })
	})
}

func TestPing(t *testing.T) {
	clean(t)
	for _, size := range []int{17, 64, 4096, 1 << 20} {
		client, server := dial(t)
		served := make(chan error, 1)
		pings := 0
		go func() {
			c, err := rdma.Respond(t.Context(), server, rdma.Options{}, func(*rdma.Request) rdma.Answer { return rdma.Answer{} })
			if err == nil {
				err = verbs.PingServer{Pinged: func(n int) error { pings = n; return nil }}.Serve(c)
				c.Close()
			}
			served <- err
		}()
		c, _, err := rdma.Initiate(t.Context(), client, rdma.Options{})
		if err != nil {
			t.Fatal(err)
		}
		g := verbs.NewPinger(c, size)
		for range 5 {
			if err := g.Ping(); err != nil {
				t.Fatalf("%d bytes: %v", size, err)
			}
		}
		g.Close()
		c.Close()
		if err := <-served; err != nil || pings != 5 {
			t.Errorf("%d bytes: the server has answered %d pings: %v", size, pings, err)
		}
	}
}

// A server that writes something else is found.
func TestPingDiffers(t *testing.T) {
	clean(t)
	client, server := dial(t)
	go func() {
		c, err := rdma.Respond(t.Context(), server, rdma.Options{}, func(*rdma.Request) rdma.Answer { return rdma.Answer{} })
		if err != nil {
			return
		}
		defer c.Close()
		var ev rdma.Event
		for range 2 { // it reads and writes nothing
			if c.Receive(&ev) != nil || c.Post(&rdma.WorkRequest{Op: rdma.Send, Data: make([]byte, 16)}) != nil {
				return
			}
			c.Flush()
		}
		c.Receive(&ev)
	}()
	c, _, err := rdma.Initiate(t.Context(), client, rdma.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := verbs.NewPinger(c, 64).Ping(); !errors.Is(err, verbs.ErrPingDiffers) {
		t.Errorf("%v", err)
	}
}

// The sockets go around their memory several times, with reads and writes of sizes that do not fit the halves.
func TestSocket(t *testing.T) {
	clean(t)
	client, server := dial(t)
	ended := make(chan error, 1)
	go func() {
		s, err := verbs.AcceptSocket(t.Context(), server, rdma.Options{})
		if err == nil {
			_, err = io.CopyBuffer(struct{ io.Writer }{s}, struct{ io.Reader }{s}, make([]byte, 7001))
			s.Close()
		}
		ended <- err
	}()
	s, err := verbs.ConnectSocket(t.Context(), client, rdma.Options{})
	if err != nil {
		t.Fatal(err)
	}
	random := rand.New(rand.NewPCG(1, 2))
	for round := range 200 {
		b := make([]byte, 1+random.IntN(60_000))
		for i := range b {
			b[i] = byte(random.Uint32())
		}
		if _, err := s.Write(b); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len(b))
		if _, err := io.ReadFull(s, got); err != nil || !bytes.Equal(got, b) {
			t.Fatalf("round %d, %d bytes: %v, or they differ", round, len(b), err)
		}
	}
	if err := s.Shutdown(); err != nil {
		t.Error(err)
	}
	s.Close()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// A socket refuses private data that is not of rsockets, and registers nothing for it.
func TestSocketRefuses(t *testing.T) {
	clean(t)
	client, server := dial(t)
	refused := make(chan error, 1)
	go func() {
		_, err := verbs.AcceptSocket(t.Context(), server, rdma.Options{})
		refused <- err
	}()
	_, _, err := rdma.Initiate(t.Context(), client, rdma.Options{Private: []byte("other")})
	var rejected *rdma.RejectedError
	if !errors.As(err, &rejected) {
		t.Errorf("%v", err)
	}
	if err := <-refused; err == nil {
		t.Error("accepted")
	}
}

// A run of perftest against our own server: what the client writes is what it reads.
func TestPerftest(t *testing.T) {
	for _, latency := range []bool{false, true} {
		clean(t)
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		served := make(chan error, 1)
		go func() { served <- verbs.PerftestServer{}.Serve(t.Context(), l, rdma.Options{}) }()
		c, err := verbs.DialPerftest(t.Context(), func() (net.Conn, error) { return net.Dial("tcp", l.Addr().String()) },
			rdma.Options{}, latency)
		if err != nil {
			t.Fatal(err)
		}
		b, got := bytes.Repeat([]byte("perftest"), 1000), make([]byte, 8000)
		if err := errors.Join(c.Write(b), c.Read(got), c.Ping(b)); err != nil || !bytes.Equal(b, got) {
			t.Errorf("%v, or the data differs", err)
		}
		if err := c.Finish(!latency); err != nil {
			t.Error(err)
		}
		c.Close()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}
}

// A peer that has stopped says nothing. What waits for it ends by the deadline, or by what ends one of its streams, and leaves nothing.
func TestSilentPeer(t *testing.T) {
	within := func(t *testing.T, ended <-chan error) error {
		t.Helper()
		select {
		case err := <-ended:
			return err
		case <-time.After(testkit.Patience):
			t.Fatalf("it has not ended\n%s", testkit.Stacks())
			return nil
		}
	}
	wantDeadline := func(t *testing.T, err error) {
		t.Helper()
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%v, want the deadline", err)
		}
	}
	deadline := func(c *rdma.Conn) { c.SetReceiveDeadline(time.Now().Add(100 * time.Millisecond)) }

	t.Run("PingServer in a Read", func(t *testing.T) {
		clean(t)
		client, server := dial(t)
		ended := make(chan error, 1)
		go func() {
			c, err := rdma.Respond(t.Context(), server, rdma.Options{}, func(*rdma.Request) rdma.Answer { return rdma.Answer{} })
			if err == nil {
				deadline(c)
				err = verbs.PingServer{}.Serve(c)
				c.Close()
			}
			ended <- err
		}()
		c, _, err := rdma.Initiate(t.Context(), client, rdma.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		g := verbs.NewPinger(c, 64)
		defer g.Close()
		if err := g.Advertise(g.Source()); err != nil { // it does not receive, so it does not answer the Read
			t.Fatal(err)
		}
		wantDeadline(t, within(t, ended))
	})
	t.Run("Socket without credits", func(t *testing.T) {
		clean(t)
		client, server := dial(t)
		accepted := make(chan error, 1)
		go func() {
			s, err := verbs.AcceptSocket(t.Context(), server, rdma.Options{}) // it reads nothing
			if err == nil {
				t.Cleanup(func() { s.Close() })
			}
			accepted <- err
		}()
		s, err := verbs.ConnectSocket(t.Context(), client, rdma.Options{})
		if err := errors.Join(err, <-accepted); err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		deadline(s.Conn())
		ended := make(chan error, 1)
		go func() {
			_, err := s.Write(make([]byte, 1<<20))
			ended <- err
		}()
		wantDeadline(t, within(t, ended))
	})
	for _, tt := range []struct {
		name string
		end  func(control, data *rdma.Conn)
		want error
	}{
		{"PerftestServer by its deadline", func(control, _ *rdma.Conn) { deadline(control) }, os.ErrDeadlineExceeded},
		{"PerftestServer by a Terminate of the operations",
			func(_, data *rdma.Conn) { data.Terminate(wire.ReasonCatastrophic, errEnough); deadline(data) }, os.ErrDeadlineExceeded},
		{"PerftestServer by the end of the control stream", func(control, _ *rdma.Conn) { control.Close() }, rdma.ErrClosed},
	} {
		t.Run(tt.name, func(t *testing.T) {
			clean(t)
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			streams, ended := make(chan *rdma.Conn, 2), make(chan error, 1)
			go func() {
				ended <- verbs.PerftestServer{Connected: func(c *rdma.Conn) { streams <- c }}.Serve(t.Context(), l, rdma.Options{})
			}()
			c, err := verbs.DialPerftest(t.Context(), func() (net.Conn, error) { return net.Dial("tcp", l.Addr().String()) },
				rdma.Options{}, false)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			tt.end(<-streams, <-streams)
			if err := within(t, ended); !errors.Is(err, tt.want) {
				t.Errorf("%v, want %v", err, tt.want)
			}
		})
	}
}

var errEnough = errors.New("enough")
