package httpd

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/testkit"
)

// serve starts a server with that limit of connections. It answers "ok".
func serve(t *testing.T, limit int, edit ...func(*http.Server)) (addr string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		io.WriteString(w, "ok")
	}), nil)
	for _, f := range edit {
		f(s)
	}
	go s.Serve(Limit(l, limit))
	t.Cleanup(func() { s.Close() })
	return l.Addr().String()
}

func dial(t *testing.T, addr string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(20 * time.Second))
	return c
}

// ask sends a request and returns the answer with its body.
func ask(c net.Conn) (*http.Response, string, error) {
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: target\r\n\r\n"); err != nil {
		return nil, "", err
	}
	rsp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return nil, "", err
	}
	b, err := io.ReadAll(rsp.Body)
	return rsp, string(b), err
}

// A connection beyond the limit is told so, a crowd of them is closed, and the end of an
// open connection makes room for another.
func TestConnectionsBeyondTheLimitAreRefused(t *testing.T) {
	const limit = 3
	addr := serve(t, limit)
	var open []net.Conn
	for i := range limit {
		c := dial(t, addr)
		open = append(open, c)
		if _, text, err := ask(c); err != nil || text != "ok" {
			t.Fatalf("connection %d: %q, %v", i, text, err)
		}
	}
	rsp, text, err := ask(dial(t, addr))
	if err != nil || rsp.StatusCode != http.StatusServiceUnavailable || !rsp.Close || !strings.Contains(text, "3 connections are open") {
		t.Fatalf("one too many: %+v, %q, %v", rsp, text, err)
	}
	began := time.Now()
	var crowd []net.Conn
	for range excess + 4 { // all silent
		crowd = append(crowd, dial(t, addr))
	}
	closed := make(chan struct{}, len(crowd))
	var wg sync.WaitGroup
	for _, c := range crowd {
		wg.Go(func() {
			c.Read(make([]byte, 1))
			closed <- struct{}{}
		})
	}
	for range 4 { // at once; the others after headerTime
		<-closed
	}
	if d := time.Since(began); d >= headerTime {
		t.Errorf("the excess of a crowd was closed after %v", d)
	}
	for _, c := range crowd {
		c.Close()
	}
	wg.Wait()
	if _, text, err := ask(open[1]); err != nil || text != "ok" {
		t.Errorf("an open connection: %q, %v", text, err)
	}
	open[0].Close()
	testkit.Eventually(t, "a new connection is served", func() bool {
		_, text, err := ask(dial(t, addr))
		return err == nil && text == "ok"
	})
}

// A client that stops in the middle of something is disconnected.
func TestStalledClientIsDisconnected(t *testing.T) {
	addr := serve(t, 9, func(s *http.Server) {
		s.ReadHeaderTimeout, s.ReadTimeout, s.IdleTimeout = 100*time.Millisecond, 300*time.Millisecond, 100*time.Millisecond
	})
	for name, begin := range map[string]string{
		"nothing":         "",
		"half a header":   "GET / HTTP/1.1\r\nHost: ta",
		"half a body":     "POST / HTTP/1.1\r\nHost: target\r\nContent-Length: 10\r\n\r\n12345",
		"a whole request": "GET / HTTP/1.1\r\nHost: target\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			c := dial(t, addr)
			if _, err := io.WriteString(c, begin); err != nil {
				t.Fatal(err)
			}
			if _, err := io.Copy(io.Discard, c); err != nil && !strings.Contains(err.Error(), "reset") {
				t.Errorf("the connection was not closed: %v", err)
			}
		})
	}
	d := NewServer(nil, nil)
	if d.ReadHeaderTimeout != headerTime || d.ReadTimeout != readTime || d.IdleTimeout != idleTime || d.MaxHeaderBytes != maxHeader {
		t.Errorf("server %+v", d)
	}
}

// A header that is too large is refused.
func TestLargeHeaderIsRefused(t *testing.T) {
	c := dial(t, serve(t, 9))
	go io.WriteString(c, "GET / HTTP/1.1\r\nHost: target\r\nX: "+strings.Repeat("x", 2*maxHeader)+"\r\n\r\n")
	rsp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil || rsp.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("%+v, %v", rsp, err)
	}
}
