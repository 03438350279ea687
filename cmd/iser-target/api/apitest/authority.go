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

	serial int64
}

// New returns an authority for the time of a test.
func New(t testing.TB) *Authority {
	a := &Authority{t: t, dir: t.TempDir()}
	a.Cert, a.key = a.Sign("ca", &x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign})
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
	a.serial++
	c.SerialNumber = big.NewInt(a.serial)
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

// Revoke writes a revocation list with these certificates to NAME.pem, which is valid until next.
func (a *Authority) Revoke(name string, next time.Time, certs ...*x509.Certificate) {
	a.t.Helper()
	a.serial++
	l := &x509.RevocationList{Number: big.NewInt(a.serial), ThisUpdate: time.Now().Add(-time.Hour), NextUpdate: next}
	for _, c := range certs {
		l.RevokedCertificateEntries = append(l.RevokedCertificateEntries, x509.RevocationListEntry{SerialNumber: c.SerialNumber, RevocationTime: time.Now()})
	}
	der, err := x509.CreateRevocationList(rand.Reader, l, a.Cert, a.key)
	if err == nil {
		err = os.WriteFile(a.Path(name+".pem"), pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: der}), 0o600)
	}
	if err != nil {
		a.t.Fatal(err)
	}
}

// Certificate reads the certificate that Sign wrote for name.
func (a *Authority) Certificate(name string) *x509.Certificate {
	a.t.Helper()
	b, err := os.ReadFile(a.Path(name + ".pem"))
	if err != nil {
		a.t.Fatal(err)
	}
	block, _ := pem.Decode(b)
	c, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		a.t.Fatal(err)
	}
	return c
}

// Path returns the path of a file that Sign wrote.
func (a *Authority) Path(file string) string { return filepath.Join(a.dir, file) }
