// Package apitest makes certificates for tests of the control API by TLS.
package apitest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// An Authority signs certificates and writes each with its key to NAME.pem and NAME.key in
// a directory. Its own are ca.pem and ca.key.
type Authority struct {
	Cert *x509.Certificate
	t    testing.TB
	dir  string
	key  *ecdsa.PrivateKey
}

// New returns an authority for the time of a test.
func New(t testing.TB) *Authority {
	a := &Authority{t: t, dir: t.TempDir()}
	a.Cert, a.key = a.Sign("ca", &x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign})
	return a
}

// Server signs a certificate for a target on 127.0.0.1.
func (a *Authority) Server(name string) {
	a.Sign(name, &x509.Certificate{IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
}

// Client signs a certificate for a client, in these organizational units.
func (a *Authority) Client(name string, units ...string) {
	a.Sign(name, &x509.Certificate{
		Subject: pkix.Name{OrganizationalUnit: units}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
}

// Sign fills in the fields that c lacks, signs c and writes the files. By default, a certificate is
// valid from an hour ago for two hours. Sign returns the certificate and its key.
func (a *Authority) Sign(name string, c *x509.Certificate) (*x509.Certificate, *ecdsa.PrivateKey) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	c.SerialNumber = big.NewInt(1)
	c.Subject.CommonName = name
	if c.NotAfter.IsZero() {
		c.NotBefore, c.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	}
	parent, signer := a.Cert, a.key
	if parent == nil {
		parent, signer = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, signer)
	if err != nil {
		a.t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	for ext, block := range map[string]*pem.Block{".pem": {Type: "CERTIFICATE", Bytes: der}, ".key": {Type: "PRIVATE KEY", Bytes: private}} {
		if err := os.WriteFile(a.Path(name+ext), pem.EncodeToMemory(block), 0o600); err != nil {
			a.t.Fatal(err)
		}
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Fatal(err)
	}
	return cert, key
}

// Path returns the path of a file that Sign wrote.
func (a *Authority) Path(file string) string { return filepath.Join(a.dir, file) }
