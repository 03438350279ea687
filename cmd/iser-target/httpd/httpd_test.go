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
)

// serve answers "ok" to all that Limit lets through.
func serve(t *testing.T, most int, edit ...func(*http.Server)) (addr string) {
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
	go s.Serve(Limit(l, most))
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

// ask sends a request and returns the answer with its body; with an error there is none.
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

// One connection too many is told so, a whole crowd of them is closed, and when one of
// those that are open ends there is room for another one.
func TestLimit(t *testing.T) {
	const most = 3
	addr := serve(t, most)
	var open []net.Conn
	for i := range most {
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
	for range excess + 4 { // which say nothing
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
	for range 4 { // at once; the others have their time
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
		t.Errorf("one of those that were there before: %q, %v", text, err)
	}
	open[0].Close()
	for end := time.Now().Add(headerTime + 10*time.Second); ; time.Sleep(20 * time.Millisecond) {
		if _, text, err := ask(dial(t, addr)); err == nil && text == "ok" {
			return
		}
		if time.Now().After(end) {
			t.Fatal("there is no room again")
		}
	}
}

// Who begins something and does not go on is disconnected.
func TestTimes(t *testing.T) {
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
func TestHeader(t *testing.T) {
	c := dial(t, serve(t, 9))
	go io.WriteString(c, "GET / HTTP/1.1\r\nHost: target\r\nX: "+strings.Repeat("x", 2*maxHeader)+"\r\n\r\n")
	rsp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil || rsp.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("%+v, %v", rsp, err)
	}
}
