package httpd

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/testkit"
)

// certificate returns a certificate that signs itself, for both ends.
func certificate(t *testing.T) (tls.Certificate, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	b, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	if c, err = x509.ParseCertificate(b); err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(c)
	return tls.Certificate{Certificate: [][]byte{b}, PrivateKey: key}, pool
}

// A tlsServer answers "ok" to clients that have a certificate.
type tlsServer struct {
	listener *tlsListener
	addr     string
	log      testkit.Log
	cert     tls.Certificate
	pool     *x509.CertPool
}

func serveTLS(t *testing.T, timeout time.Duration) *tlsServer {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &tlsServer{addr: l.Addr().String()}
	s.cert, s.pool = certificate(t)
	c := &tls.Config{Certificates: []tls.Certificate{s.cert}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: s.pool}
	s.listener = listenTLS(l, c, slog.New(slog.NewTextHandler(&s.log, nil)), timeout).(*tlsListener)
	server := NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "ok") }), nil)
	go server.Serve(Limit(s.listener, 9))
	t.Cleanup(func() { server.Close() })
	return s
}

// inProgress waits until n handshakes are in progress. One that succeeded may still count
// for a moment.
func (s *tlsServer) inProgress(t *testing.T, n int) {
	t.Helper()
	testkit.Eventually(t, fmt.Sprint(n, " handshakes are in progress"), func() bool {
		s.listener.mu.Lock()
		defer s.listener.mu.Unlock()
		return s.listener.crowd.Len() == n
	})
}

// dialer returns a dialer from 127.0.0.from.
func dialer(from byte) *net.Dialer {
	return &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, from)}}
}

// get asks the server from 127.0.0.from, with a certificate.
func (s *tlsServer) get(from byte) error {
	c := http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{
		DialContext: dialer(from).DialContext, DisableKeepAlives: true,
		TLSClientConfig: &tls.Config{RootCAs: s.pool, Certificates: []tls.Certificate{s.cert}},
	}}
	rsp, err := c.Get("https://" + s.addr)
	if err != nil {
		return err
	}
	defer rsp.Body.Close()
	if rsp.StatusCode != http.StatusOK {
		return fmt.Errorf("status %s", rsp.Status)
	}
	return nil
}

// A client that does not finish its handshake is disconnected.
func TestSlowHandshakeIsEnded(t *testing.T) {
	s := serveTLS(t, time.Second)
	var silent []net.Conn
	for range peerHandshakes {
		silent = append(silent, dial(t, s.addr))
	}
	for i, c := range silent {
		if n, err := io.Copy(io.Discard, c); err != nil || n > 0 {
			t.Errorf("silent connection %d: %d bytes, %v; want its end", i, n, err)
		}
	}
	if err := s.get(1); err != nil {
		t.Errorf("after their end: %v", err)
	}
	if got := s.log.String(); !strings.Contains(got, "handshake took longer than 1s") {
		t.Errorf("log %q", got)
	}
}

// Silent clients of one address, and of as many addresses as it takes to fill all places, keep nobody
// out: the oldest handshake of the address with most yields.
func TestHandshakesAreLimited(t *testing.T) {
	s := serveTLS(t, time.Hour)
	if err := s.get(1); err != nil {
		t.Fatalf("before: %v", err)
	}
	s.inProgress(t, 0)
	silent := []net.Conn{dial(t, s.addr)}
	for range peerHandshakes {
		silent = append(silent, dial(t, s.addr))
	}
	if _, err := io.Copy(io.Discard, silent[0]); err != nil && !strings.Contains(err.Error(), "reset") {
		t.Errorf("the first one of that address: %v", err)
	}
	for from := byte(1); from < 3; from++ {
		if err := s.get(from); err != nil {
			t.Errorf("from 127.0.0.%d: %v", from, err)
		}
	}
	fill := func() {
		for from := byte(3); from < 3+maxHandshakes/peerHandshakes; from++ {
			for range peerHandshakes {
				c, err := dialer(from).Dial("tcp", s.addr)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { c.Close() })
			}
		}
		s.inProgress(t, maxHandshakes)
	}
	for range 3 { // they are renewed
		fill()
		if err := s.get(2); err != nil {
			t.Errorf("an administrator, with all places taken: %v", err)
		}
		if err := s.get(3); err != nil {
			t.Errorf("a neighbour at the attacker's address: %v", err)
		}
	}
	if got := s.log.String(); !strings.Contains(got, "8 TLS handshakes of this address are in progress") {
		t.Errorf("log %q", got)
	}
}
