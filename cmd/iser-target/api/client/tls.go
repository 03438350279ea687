package client

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/cmd/iser-target/tunnel"
)

// TLSFiles names the PEM files of a client.
type TLSFiles struct {
	Cert, Key string // of the client
	CA        string // certificates that sign those of targets; empty: those of the system
}

// A clientTLS authenticates client and target to each other.
type clientTLS struct {
	files  TLSFiles
	tcp    string // host:port
	portal bool   // of a portal
	config *tls.Config
}

// SchemeRDMA begins the address of a portal.
const SchemeRDMA = "rdma://"

// NewTLS returns a client of the target that serves on a TCP address, host:port, or at its portal rdma://host:port, with TLS
// 1.3. It does not connect before the first request. An error about a file names it.
func NewTLS(address string, files TLSFiles) (*Client, error) {
	tcp, portal := strings.CutPrefix(address, SchemeRDMA)
	host, port, err := net.SplitHostPort(tcp)
	switch {
	case strings.Contains(tcp, "://"):
		err = errors.New("the only scheme is " + SchemeRDMA)
	case err == nil && (host == "" || port == ""):
		err = errors.New("not host:port")
	}
	if err != nil {
		return nil, &schema.Error{Code: schema.Failed, Message: fmt.Sprintf("address %q: %v", address, err), Cause: err, Hint: "give --address as host:port, or as rdma://host:port"}
	}
	unusable := func(file string, err error) error {
		return &schema.Error{Code: schema.Failed, Message: fmt.Sprintf("%s: %v", file, err), Cause: err, Hint: "nothing was sent to the target"}
	}
	for _, file := range []string{files.Cert, files.Key} { // LoadX509KeyPair does not name the file in its error
		if _, err := os.ReadFile(file); err != nil {
			return nil, unusable(file, reasonOf(err))
		}
	}
	cert, err := tls.LoadX509KeyPair(files.Cert, files.Key)
	if err != nil {
		return nil, unusable(files.Cert+" with "+files.Key, err)
	}
	t := &clientTLS{files: files, tcp: tcp, portal: portal, config: &tls.Config{
		ServerName: host,
		MinVersion: tls.VersionTLS13,
		// Send it whatever authorities the target names: the alert of the target says more
		// than a missing certificate.
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &cert, nil },
	}}
	if files.CA != "" {
		b, err := os.ReadFile(files.CA)
		if err != nil {
			return nil, unusable(files.CA, reasonOf(err))
		}
		t.config.RootCAs = x509.NewCertPool()
		if !t.config.RootCAs.AppendCertsFromPEM(b) {
			return nil, unusable(files.CA, errors.New("the file has no certificate"))
		}
	}
	c := newClient(address, &http.Transport{
		DialContext:         func(ctx context.Context, _, _ string) (net.Conn, error) { return t.dial(ctx) },
		TLSClientConfig:     t.config,
		TLSHandshakeTimeout: dialTime,
	})
	c.tls = t
	return c, nil
}

// dial connects to the target, without TLS.
func (t *clientTLS) dial(ctx context.Context) (net.Conn, error) {
	if t.portal {
		return tunnel.Dial(ctx, t.tcp)
	}
	return (&net.Dialer{Timeout: dialTime}).DialContext(ctx, "tcp", t.tcp)
}

// reasonOf returns err without its path, which the message names already.
func reasonOf(err error) error {
	var path *os.PathError
	if errors.As(err, &path) {
		return path.Err
	}
	return err
}

// Alerts by which a target refuses a client (RFC 8446, section 6.2).
const (
	alertBadCertificate      tls.AlertError = 42
	alertCertificateExpired  tls.AlertError = 45
	alertUnknownCA           tls.AlertError = 48
	alertProtocolVersion     tls.AlertError = 70
	alertCertificateRequired tls.AlertError = 116
)

// explain returns the error of a TLS handshake in terms of the options of client and
// target, or nil if err is not about TLS.
func (t *clientTLS) explain(address string, err error) *schema.Error {
	fail := func(hint, format string, a ...any) *schema.Error {
		return &schema.Error{Code: schema.Unreached, Message: fmt.Sprintf(format, a...), Hint: hint}
	}
	var (
		authority x509.UnknownAuthorityError
		hostname  x509.HostnameError
		invalid   x509.CertificateInvalidError
		record    tls.RecordHeaderError
	)
	var request *url.Error // which names the address, too
	if errors.As(err, &request) {
		err = request.Err
	}
	switch {
	case errors.Is(err, tunnel.ErrNoChannel):
		return fail("set control of that portal, and restart the target if control.tls was not set before; its log has the reason", "%s: %v", address, err)
	case errors.Is(err, tunnel.ErrNoRDMA):
		return fail("the portal must serve the transport iser, and take this address; the log of the target may have the reason", "%s: %v", address, err)
	case errors.As(err, &authority):
		return fail("give the certificate of the authority that signed control.tls.cert with --tls-ca",
			"the certificate of the target at %s is not signed by an authority in %s",
			address, cmp.Or(t.files.CA, "the certificates of the system"))
	case errors.As(err, &hostname):
		return fail("give --address a name or IP address that control.tls.cert has",
			"the certificate of the target at %s is for another name: %v", address, hostname)
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return fail("check the clocks of both machines, and control.tls.cert", "the certificate of the target at %s is not valid now: %s to %s",
			address, invalid.Cert.NotBefore.Format(time.RFC3339), invalid.Cert.NotAfter.Format(time.RFC3339))
	case errors.As(err, &invalid):
		return fail("check control.tls.cert", "the certificate of the target at %s: %v", address, invalid)
	case errors.As(err, &record), errors.Is(err, http.ErrSchemeMismatch):
		return fail("give --address the address of control.listen", "the server at %s does not speak TLS", address)
	}
	alert, ok := alertOf(err)
	if !ok {
		var op *net.OpError
		if errors.Is(err, context.Canceled) || errors.As(err, &op) && op.Op == "dial" {
			return nil
		}
		// A target refuses after the client has completed its handshake. Its alert can get
		// lost if it closes the connection without reading the request.
		if alert, ok = t.verdict(); !ok {
			return nil
		}
	}
	const clientCA = "control.tls.client_ca must have the certificate of the authority that signed it"
	switch alert {
	case alertUnknownCA:
		return fail(clientCA, "the target at %s does not know the authority that signed %s", address, t.files.Cert)
	case alertCertificateExpired:
		return fail("check the clocks of both machines, or renew the certificate", "the target at %s refuses %s, which is not valid now: %s",
			address, t.files.Cert, t.validity())
	case alertBadCertificate:
		return fail(clientCA+". The certificate must be for clients and not revoked, and the list of control.tls.crl valid. The log of the target says which of these",
			"the target at %s refuses %s", address, t.files.Cert)
	case alertCertificateRequired:
		return fail("give one with --tls-cert and --tls-key", "the target at %s requires a certificate", address)
	case alertProtocolVersion:
		return fail("give --address the address of control.listen", "the server at %s does not speak TLS 1.3", address)
	}
	return fail("the log of the target may have the reason", "the target at %s refuses the connection: %v", address, alert)
}

// alertOf returns the alert that the other side sent. Package tls does not export the type
// of that error, so alertOf compares its text.
func alertOf(err error) (tls.AlertError, bool) {
	var op *net.OpError
	if !errors.As(err, &op) || op.Op != "remote error" {
		return 0, false
	}
	for code := range tls.AlertError(math.MaxUint8) {
		if op.Err.Error() == code.Error() {
			return code, true
		}
	}
	return 0, false
}

// verdict returns the alert that the target sends to a client which sends nothing.
func (t *clientTLS) verdict() (tls.AlertError, bool) {
	ctx, cancel := context.WithTimeout(context.Background(), dialTime)
	defer cancel()
	nc, err := t.dial(ctx)
	if err != nil {
		return 0, false
	}
	c := tls.Client(nc, t.config)
	defer c.Close()
	if err = c.HandshakeContext(ctx); err == nil {
		c.SetReadDeadline(time.Now().Add(verdictTime))
		_, err = c.Read(make([]byte, 1))
	}
	return alertOf(err)
}

// verdictTime bounds the wait for that alert. It allows for a busy target.
const verdictTime = 5 * time.Second

// validity returns the time for which the certificate of the client is valid.
func (t *clientTLS) validity() string {
	cert, err := t.config.GetClientCertificate(nil)
	if err != nil || cert.Leaf == nil {
		return "unknown"
	}
	return cert.Leaf.NotBefore.Format(time.RFC3339) + " to " + cert.Leaf.NotAfter.Format(time.RFC3339)
}
