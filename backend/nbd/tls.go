package nbd

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/iser-target/iser-target/backend/nbd/nbduri"
)

// tlsConfig reads the certificates, so that each new connection uses the present ones.
func tlsConfig(a *nbduri.Address) (*tls.Config, error) {
	c := &tls.Config{ServerName: a.ServerName, MinVersion: tls.VersionTLS12}
	if a.Certificates == "" {
		return c, nil
	}
	in := func(name string) string { return filepath.Join(a.Certificates, name) }
	b, err := os.ReadFile(in("ca-cert.pem"))
	if err != nil {
		return nil, err
	}
	c.RootCAs = x509.NewCertPool()
	if !c.RootCAs.AppendCertsFromPEM(b) {
		return nil, fmt.Errorf("%s has no certificate", in("ca-cert.pem"))
	}
	if _, err := os.Stat(in("client-cert.pem")); errors.Is(err, os.ErrNotExist) {
		return c, nil
	}
	pair, err := tls.LoadX509KeyPair(in("client-cert.pem"), in("client-key.pem"))
	if err != nil {
		return nil, err
	}
	c.Certificates = []tls.Certificate{pair}
	return c, nil
}
