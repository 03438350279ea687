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

// hold sends a request whose body does not come, and waits until the server works on it.
func hold(t *testing.T, c net.Conn) {
	t.Helper()
	if _, err := io.WriteString(c, "POST / HTTP/1.1\r\nHost: target\r\nContent-Length: 1\r\nExpect: 100-continue\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(c).ReadString('\n'); err != nil || !strings.Contains(line, "100") {
		t.Fatalf("%q, %v", line, err)
	}
}

// from dials from 127.0.0.host.
func from(t *testing.T, host byte, addr string) net.Conn {
	t.Helper()
	c, err := dialer(host).Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(20 * time.Second))
	return c
}

// A connection beyond the limit is told so, a crowd of them displaces each other, and the end of an
// open connection makes room for another.
func TestConnectionsBeyondTheLimitAreRefused(t *testing.T) {
	const limit = 3
	addr := serve(t, limit)
	var open []net.Conn
	for range limit {
		c := dial(t, addr)
		open = append(open, c)
		hold(t, c)
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
	if rsp, _, err := ask(dial(t, addr)); err != nil || rsp.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("beside a silent crowd: %+v, %v", rsp, err)
	}
	for _, c := range crowd {
		c.Close()
	}
	wg.Wait()
	if _, err := io.WriteString(open[1], "x"); err != nil {
		t.Fatal(err)
	}
	if rsp, err := http.ReadResponse(bufio.NewReader(open[1]), nil); err != nil || rsp.StatusCode != http.StatusOK {
		t.Errorf("an open connection: %+v, %v", rsp, err)
	}
	open[0].Close()
	testkit.Eventually(t, "a new connection is served", func() bool {
		_, text, err := ask(dial(t, addr))
		return err == nil && text == "ok"
	})
}

// Connections without a request, and requests that one address does not end, keep nobody else out.
func TestSilentConnectionsKeepNobodyOut(t *testing.T) {
	const limit = 16
	addr := serve(t, limit)
	busy := from(t, 2, addr) // an open connection of a neighbour, with a request in progress
	hold(t, busy)
	works := func(host byte) {
		t.Helper()
		if _, text, err := ask(from(t, host, addr)); err != nil || text != "ok" {
			t.Errorf("from 127.0.0.%d: %q, %v", host, text, err)
		}
	}
	for range 3 { // of one address, of four, and with answered requests
		for range 80 {
			from(t, 3, addr)
		}
		works(2)
		for i := range 80 {
			from(t, 4+byte(i%4), addr)
		}
		works(2)
		for range 80 {
			ask(from(t, 8, addr))
		}
		works(2)
	}
	held := 0
	for range limit {
		c := from(t, 9, addr)
		io.WriteString(c, "POST / HTTP/1.1\r\nHost: target\r\nContent-Length: 1\r\nExpect: 100-continue\r\n\r\n")
		if line, _ := bufio.NewReader(c).ReadString('\n'); strings.Contains(line, "100") {
			held++
		}
	}
	if want := limit - limit/8; held != want {
		t.Errorf("one address has %d requests in progress, want %d", held, want)
	}
	works(2)
	if _, err := io.WriteString(busy, "x"); err != nil {
		t.Fatal(err)
	}
	if rsp, err := http.ReadResponse(bufio.NewReader(busy), nil); err != nil || rsp.StatusCode != http.StatusOK {
		t.Errorf("the neighbour's request: %+v, %v", rsp, err)
	}
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
