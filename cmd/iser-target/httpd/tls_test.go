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

// certificate makes one that signs itself, for both ends.
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

// Who has not proved who it is holds so many connections, for so long, and takes none from
// those who have.
func TestUnproved(t *testing.T) {
	for _, tt := range []struct {
		name    string
		time    time.Duration // of a handshake
		silence bool          // the peers wait for the end of it
	}{
		{"many", time.Hour, false},
		{"slow", time.Second, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cert, pool := certificate(t)
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			var log testkit.Log
			s := NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "ok") }), nil)
			listener := listenTLS(l, &tls.Config{Certificates: []tls.Certificate{cert}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool},
				slog.New(slog.NewTextHandler(&log, nil)), tt.time).(*tlsListener)
			go s.Serve(Limit(listener, 9))
			// Who has been served may count for a moment yet.
			underWay := func(n int) {
				t.Helper()
				for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
					listener.mu.Lock()
					all := listener.all
					listener.mu.Unlock()
					if all == n {
						return
					}
					if time.Now().After(end) {
						t.Fatalf("%d handshakes are under way, want %d", all, n)
					}
				}
			}
			defer s.Close()
			addr := l.Addr().String()
			get := func(from byte) error {
				d := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, from)}}
				c := http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{
					DialContext: d.DialContext, DisableKeepAlives: true,
					TLSClientConfig: &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{cert}},
				}}
				rsp, err := c.Get("https://" + addr)
				if err != nil {
					return err
				}
				defer rsp.Body.Close()
				if rsp.StatusCode != http.StatusOK {
					return fmt.Errorf("status %s", rsp.Status)
				}
				return nil
			}
			if err := get(1); err != nil {
				t.Fatalf("before: %v", err)
			}
			underWay(0)
			var silent []net.Conn
			for range peerHandshakes {
				silent = append(silent, dial(t, addr))
			}
			if tt.silence {
				for i, c := range silent {
					if n, err := io.Copy(io.Discard, c); err != nil || n > 0 {
						t.Errorf("silent connection %d: %d octets, %v; want its end", i, n, err)
					}
				}
				if err := get(1); err != nil {
					t.Errorf("when they have gone: %v", err)
				}
				if got := log.String(); !strings.Contains(got, "handshake was not over within 1s") {
					t.Errorf("log %q", got)
				}
				return
			}
			if _, err := io.Copy(io.Discard, dial(t, addr)); err != nil && !strings.Contains(err.Error(), "reset") {
				t.Errorf("one more of that address: %v", err)
			}
			if err := get(2); err != nil {
				t.Errorf("from another address: %v", err)
			}
			underWay(len(silent))
			for from := byte(3); len(silent) < maxHandshakes; from++ {
				for range peerHandshakes {
					d := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, from)}}
					c, err := d.Dial("tcp", addr)
					if err != nil {
						t.Fatal(err)
					}
					defer c.Close()
					silent = append(silent, c)
				}
			}
			underWay(maxHandshakes)
			if err := get(2); err == nil {
				t.Error("there are more handshakes than may be")
			}
			for _, c := range silent {
				c.Close()
			}
			for end := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
				err := get(1)
				if err == nil {
					break
				}
				if time.Now().After(end) {
					t.Fatalf("when they have gone: %v", err)
				}
			}
			if got := log.String(); !strings.Contains(got, "8 connections of this address have not proved") {
				t.Errorf("log %q", got)
			}
		})
	}
}
