package httpd

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// Over the loopback, requests name the server by an address or localhost.
func TestGuardRefusesForeignNames(t *testing.T) {
	l, err := net.Listen("tcp", ":0") // the loopback is one of its addresses
	if err != nil {
		t.Fatal(err)
	}
	s := NewServer(Guard(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "ok") })), nil)
	go s.Serve(Limit(l, 9))
	t.Cleanup(func() { s.Close() })
	_, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	for host, want := range map[string]int{
		"127.0.0.1:" + port: 200, "localhost": 200, "LocalHost:9": 200, "[::1]:9": 200, "192.0.2.1": 200,
		"evil.example": 421, "evil.example:" + port: 421, "localhost.evil.example": 421, "127.0.0.1.evil.example": 421, "": 421,
	} {
		c := dial(t, "127.0.0.1:"+port)
		fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", host)
		b, err := io.ReadAll(c)
		if err != nil || !strings.HasPrefix(string(b), fmt.Sprintf("HTTP/1.1 %d ", want)) {
			t.Errorf("Host %q: %q, %v, want %d", host, b, err, want)
		}
	}
	w := httptest.NewRecorder()
	r := httptest.NewRequest("GET", "http://storage.example/", nil)
	r = r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, net.Addr(&net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 80})))
	Guard(http.NotFoundHandler()).ServeHTTP(w, r)
	if w.Code != http.StatusNotFound {
		t.Errorf("a name on another network: %d", w.Code)
	}
}
