package api

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

const (
	// rereadEvery is the shortest time between two looks at the files.
	rereadEvery = time.Second
	// maxPEM bounds each file, in bytes.
	maxPEM = 4 << 20
	// warnEvery is how often the log warns about what expires soon.
	warnEvery = 24 * time.Hour
)

// A trust has the certificate of the target and what proves that of a client. It reads the files again when
// one of them has changed. If they are not good then, those before stay.
type trust struct {
	files config.ControlTLS
	log   *slog.Logger
	now   func() time.Time

	mu     sync.Mutex
	looked time.Time
	marks  []mark // of the files that were read last, good or not
	cur    *proofs
	warned time.Time
}

// A mark tells versions of a file apart.
type mark struct {
	dev, ino    uint64
	size        int64
	mtime, time unix.Timespec
}

// The proofs are what was read. They do not change.
type proofs struct {
	config *tls.Config
	roots  *x509.CertPool
	lists  []*x509.RevocationList // nil: revocation is not checked
	ends   []schema.CertificateState
}

// newTrust reads the files of c.
func newTrust(c config.ControlTLS, log *slog.Logger) (*trust, error) {
	t := &trust{files: c, log: log, now: time.Now}
	t.marks = t.look()
	var err error
	if t.cur, err = t.read(); err != nil {
		return nil, err
	}
	t.looked = t.now()
	t.warn()
	return t, nil
}

// paths returns the files by their keys.
func (t *trust) paths() []struct{ key, path string } {
	return []struct{ key, path string }{
		{"cert", t.files.Cert}, {"key", t.files.Key}, {"client_ca", t.files.ClientCA}, {"crl", t.files.CRL},
	}
}

// look returns the marks of the files.
func (t *trust) look() (list []mark) {
	for _, f := range t.paths() {
		var st unix.Stat_t
		var m mark
		if f.path != "" && unix.Stat(f.path, &st) == nil {
			m = mark{uint64(st.Dev), st.Ino, st.Size, st.Mtim, st.Ctim}
		}
		list = append(list, m)
	}
	return list
}

// current returns what the files have.
func (t *trust) current() *proofs {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.now()
	if now.Sub(t.looked) < rereadEvery {
		return t.cur
	}
	t.looked = now
	marks := t.look()
	changed := false
	for i := range marks {
		changed = changed || marks[i] != t.marks[i]
	}
	if changed {
		t.marks = marks
		next, err := t.read()
		if err != nil {
			t.log.Error("changed certificates are not used; those before stay", "event", "control", "reason", err)
		} else {
			t.cur, t.warned = next, time.Time{}
			t.log.Info("changed certificates are in use", "event", "control", "certificate", next.ends[0].Subject, "expires", next.ends[0].Expires)
		}
	}
	t.warn()
	return t.cur
}

// warn logs what expires soon, once a day.
//
// Preconditions: t.mu is held, or t is new.
func (t *trust) warn() {
	now := t.now()
	if now.Sub(t.warned) < warnEvery {
		return
	}
	for _, e := range t.cur.ends {
		if e.ExpiresSoon(now) {
			t.warned = now
			t.log.Warn("a certificate expires soon, or has expired", "event", "control", "key", e.Key, "path", e.Path, "certificate", e.Subject, "expires", e.Expires)
		}
	}
}

// read reads the files.
func (t *trust) read() (*proofs, error) {
	cert, err := readPEM(t.files.Cert)
	if err != nil {
		return nil, err
	}
	key, err := readPEM(t.files.Key)
	if err != nil {
		return nil, err
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, fmt.Errorf("%s with %s: %w", t.files.Cert, t.files.Key, err)
	}
	n := &proofs{roots: x509.NewCertPool()}
	n.add("control.tls.cert", t.files.Cert, pair.Leaf.Subject.String(), pair.Leaf.NotAfter)
	b, err := readPEM(t.files.ClientCA)
	if err != nil {
		return nil, err
	}
	for rest, found := b, false; ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			if !found {
				return nil, fmt.Errorf("%s: the file has no certificate", t.files.ClientCA)
			}
			break
		}
		if block.Type != "CERTIFICATE" {
			continue
		}
		ca, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", t.files.ClientCA, err)
		}
		found = true
		n.roots.AddCert(ca)
		n.add("control.tls.client_ca", t.files.ClientCA, ca.Subject.String(), ca.NotAfter)
	}
	if t.files.CRL != "" {
		if err := n.readLists(t.files.CRL); err != nil {
			return nil, err
		}
	}
	n.config = &tls.Config{
		Certificates: []tls.Certificate{pair},
		ClientAuth:   tls.RequireAndVerifyClientCert,
		ClientCAs:    n.roots,
		MinVersion:   tls.VersionTLS13,
		// A session that is resumed would skip what VerifyConnection checks of new files.
		SessionTicketsDisabled: true,
		VerifyConnection: func(c tls.ConnectionState) error {
			return n.verify(c.PeerCertificates, t.now())
		},
	}
	return n, nil
}

// readPEM reads a file of limited size.
func readPEM(path string) ([]byte, error) {
	fi, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !fi.Mode().IsRegular() || fi.Size() > maxPEM {
		return nil, fmt.Errorf("%s: not a regular file of at most %d bytes", path, maxPEM)
	}
	return os.ReadFile(path)
}

func (n *proofs) add(key, path, subject string, expires time.Time) {
	n.ends = append(n.ends, schema.CertificateState{Key: key, Path: path, Subject: subject, Expires: expires})
}

// readLists reads the revocation lists in a file, PEM or one in DER.
func (n *proofs) readLists(path string) error {
	b, err := readPEM(path)
	if err != nil {
		return err
	}
	var lists [][]byte
	for rest := b; ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		if block.Type == "X509 CRL" {
			lists = append(lists, block.Bytes)
		}
	}
	if lists == nil {
		lists = [][]byte{b}
	}
	for _, der := range lists {
		l, err := x509.ParseRevocationList(der)
		if err != nil {
			return fmt.Errorf("%s: the file has no certificate revocation list: %w", path, err)
		}
		n.lists = append(n.lists, l)
		if !l.NextUpdate.IsZero() {
			n.add(schema.RevocationKey, path, l.Issuer.String(), l.NextUpdate)
		}
	}
	return nil
}

// verify returns an error unless certs, of which the first is that of a client, is trusted at that time
// (RFC 5280, section 6).
func (n *proofs) verify(certs []*x509.Certificate, now time.Time) error {
	if len(certs) == 0 {
		return errors.New("the client has no certificate")
	}
	o := x509.VerifyOptions{Roots: n.roots, Intermediates: x509.NewCertPool(), CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}
	for _, c := range certs[1:] {
		o.Intermediates.AddCert(c)
	}
	chains, err := certs[0].Verify(o)
	if err != nil || n.lists == nil {
		return err
	}
	for _, chain := range chains {
		if err = n.revoked(chain, now); err == nil {
			return nil
		}
	}
	return err
}

// revoked returns an error if a certificate of the chain is revoked, or if no valid list says that the first one is not.
func (n *proofs) revoked(chain []*x509.Certificate, now time.Time) error {
	for i, c := range chain[:len(chain)-1] {
		issuer, listed := chain[i+1], false
		for _, l := range n.lists {
			if string(l.RawIssuer) != string(c.RawIssuer) || l.CheckSignatureFrom(issuer) != nil {
				continue
			}
			if !l.NextUpdate.IsZero() && now.After(l.NextUpdate) {
				return fmt.Errorf("the revocation list of %s has expired at %s", l.Issuer, l.NextUpdate.Format(time.RFC3339))
			}
			listed = true
			for _, r := range l.RevokedCertificateEntries {
				if r.SerialNumber.Cmp(c.SerialNumber) == 0 {
					return fmt.Errorf("the certificate of %s was revoked at %s", c.Subject, r.RevocationTime.Format(time.RFC3339))
				}
			}
		}
		if !listed && i == 0 {
			return fmt.Errorf("control.tls.crl has no list that %s has signed", issuer.Subject)
		}
	}
	return nil
}

// certificates returns when what the files have ends.
func (t *trust) certificates() []schema.CertificateState { return t.current().ends }

// serverConfig returns the configuration of a listener, which reads changed files at each handshake.
func (t *trust) serverConfig() *tls.Config {
	c := t.current().config.Clone()
	c.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) { return t.current().config, nil }
	return c
}
