package client

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// TLSFiles are the PEM files of a client.
type TLSFiles struct {
	Cert, Key string // what it proves who it is by
	CA        string // certificates of those who sign for targets; empty: those of the system
}

// clientTLS is how a client and a target prove who they are.
type clientTLS struct {
	files  TLSFiles
	config *tls.Config
}

// NewTLS returns a client of the target that serves on a TCP address, host:port,
// by TLS 1.3. The error names the file that is of no use.
func NewTLS(address string, files TLSFiles) (*Client, error) {
	host, port, err := net.SplitHostPort(address)
	if err == nil && (host == "" || port == "") {
		err = errors.New("want host:port")
	}
	if err != nil {
		return nil, &schema.Error{Code: schema.Failed, Message: fmt.Sprintf("address %q: %v", address, err), Hint: "--address wants host:port"}
	}
	unusable := func(file string, err error) error {
		return &schema.Error{Code: schema.Failed, Message: fmt.Sprintf("%s: %v", file, err), Hint: "nothing was asked"}
	}
	for _, file := range []string{files.Cert, files.Key} { // LoadX509KeyPair does not say which it is about
		if _, err := os.ReadFile(file); err != nil {
			return nil, unusable(file, reasonOf(err))
		}
	}
	cert, err := tls.LoadX509KeyPair(files.Cert, files.Key)
	if err != nil {
		return nil, unusable(files.Cert+" with "+files.Key, err)
	}
	t := &clientTLS{files: files, config: &tls.Config{
		ServerName: host,
		MinVersion: tls.VersionTLS13,
		// Whoever the target says it trusts: its refusal says more than our silence.
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &cert, nil },
	}}
	if files.CA != "" {
		b, err := os.ReadFile(files.CA)
		if err != nil {
			return nil, unusable(files.CA, reasonOf(err))
		}
		t.config.RootCAs = x509.NewCertPool()
		if !t.config.RootCAs.AppendCertsFromPEM(b) {
			return nil, unusable(files.CA, errNoCertificate)
		}
	}
	dialer := &net.Dialer{Timeout: dialTime}
	c := newClient(address, &http.Transport{
		DialContext:         dialer.DialContext,
		TLSClientConfig:     t.config,
		TLSHandshakeTimeout: dialTime,
	})
	c.tls = t
	return c, nil
}

var errNoCertificate = errors.New("there is no certificate in it")

// reasonOf is err without the path that is said beside it.
func reasonOf(err error) error {
	var path *os.PathError
	if errors.As(err, &path) {
		return path.Err
	}
	return err
}

// Alerts by which a target turns a client away (RFC 8446, section 6.2).
const (
	alertBadCertificate      tls.AlertError = 42
	alertCertificateExpired  tls.AlertError = 45
	alertUnknownCA           tls.AlertError = 48
	alertProtocolVersion     tls.AlertError = 70
	alertCertificateRequired tls.AlertError = 116
)

// explain is what is wrong between client and target, or nil if it is not TLS.
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
	ca := t.files.CA
	if ca == "" {
		ca = "the certificates of the system"
	}
	switch {
	case errors.As(err, &authority):
		return fail("--tls-ca wants the certificate of those who have signed control.tls.cert",
			"the certificate of the target at %s is not signed by any of %s", address, ca)
	case errors.As(err, &hostname):
		return fail("--address wants a name or IP address that is in control.tls.cert",
			"the certificate of the target at %s is for another: %v", address, hostname)
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return fail("look at the clocks of both, and at control.tls.cert", "the certificate of the target at %s is not valid now: %s to %s",
			address, invalid.Cert.NotBefore.Format(time.RFC3339), invalid.Cert.NotAfter.Format(time.RFC3339))
	case errors.As(err, &invalid):
		return fail("see control.tls.cert", "the certificate of the target at %s: %v", address, invalid)
	case errors.As(err, &record), errors.Is(err, http.ErrSchemeMismatch):
		return fail("--address wants what control.listen says", "what listens at %s does not speak TLS", address)
	}
	alert, ok := alertOf(err)
	if !ok {
		var op *net.OpError
		if errors.Is(err, context.Canceled) || errors.As(err, &op) && op.Op == "dial" {
			return nil
		}
		// A target refuses after the client has done its part, and what it says of that
		// can get lost behind a request that it does not read.
		if alert, ok = t.verdict(address); !ok {
			return nil
		}
	}
	const clientCA = "control.tls.client_ca has to have the certificate of those who have signed it"
	switch alert {
	case alertUnknownCA:
		return fail(clientCA, "the target at %s does not know who has signed %s", address, t.files.Cert)
	case alertCertificateExpired:
		return fail("look at the clocks of both, and have it signed anew", "the target at %s does not take %s, which is not valid now: %s",
			address, t.files.Cert, t.validity())
	case alertBadCertificate:
		return fail(clientCA+", and to be for clients", "the target at %s does not take %s", address, t.files.Cert)
	case alertCertificateRequired:
		return fail("say by --tls-cert and --tls-key", "the target at %s wants a certificate", address)
	case alertProtocolVersion:
		return fail("--address wants what control.listen says", "what listens at %s does not speak TLS 1.3", address)
	}
	return fail("the log of the target may say more", "the target at %s refuses: %v", address, alert)
}

// alertOf is the alert that the other side has sent, for which package tls has a type
// that it does not export, with the text of one that it does.
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

// verdict is the alert that answers a client which says nothing.
func (t *clientTLS) verdict(address string) (tls.AlertError, bool) {
	ctx, cancel := context.WithTimeout(context.Background(), dialTime)
	defer cancel()
	c, err := (&tls.Dialer{Config: t.config}).DialContext(ctx, "tcp", address)
	if err == nil {
		defer c.Close()
		c.SetReadDeadline(time.Now().Add(verdictTime))
		_, err = c.Read(make([]byte, 1))
	}
	return alertOf(err)
}

// verdictTime is what a target has to turn a client away, however busy it is.
const verdictTime = 5 * time.Second

// validity is when the certificate of the client is valid.
func (t *clientTLS) validity() string {
	cert, err := t.config.GetClientCertificate(nil)
	if err != nil || cert.Leaf == nil {
		return "see when it is"
	}
	return cert.Leaf.NotBefore.Format(time.RFC3339) + " to " + cert.Leaf.NotAfter.Format(time.RFC3339)
}
