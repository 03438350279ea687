package etcd

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/etcdserver"
)

// certificate returns a certificate for all loopback addresses that its key has signed, with its files.
func certificate(t *testing.T, hosts ...string) (tls.Certificate, *x509.CertPool, *etcdserver.TLS) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "gateway"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	for _, h := range hosts {
		template.IPAddresses = append(template.IPAddresses, net.ParseIP(h))
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	files := &etcdserver.TLS{CA: filepath.Join(dir, "cert.pem"), Cert: filepath.Join(dir, "cert.pem"), Key: filepath.Join(dir, "key.pem")}
	for path, block := range map[string]*pem.Block{files.Cert: {Type: "CERTIFICATE", Bytes: der}, files.Key: {Type: "PRIVATE KEY", Bytes: keyDER}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	pair, err := tls.LoadX509KeyPair(files.Cert, files.Key)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(pair.Leaf)
	return pair, pool, files
}

// A home with TLS and users requires a certificate, the password and the right.
func TestTLSAndUsers(t *testing.T) {
	host := etcdserver.Host()
	pair, pool, files := certificate(t, host)
	members := etcdserver.StartAt(t, files, host)
	endpoints := etcdserver.Endpoints(members)
	good := &tls.Config{Certificates: []tls.Certificate{pair}, RootCAs: pool}

	h := open(t, Config{Endpoints: endpoints, TLS: good})
	r := put(t, h, "a", "one", 0)
	want(t, h, "a", "one", r)
	for name, c := range map[string]*tls.Config{"no certificate": {RootCAs: pool}, "another CA": {Certificates: []tls.Certificate{pair}, RootCAs: x509.NewCertPool()}} {
		bad := open(t, Config{Endpoints: endpoints, TLS: c, Timeout: time.Second})
		if _, err := bad.Put(t.Context(), "a", []byte("two"), r); !errors.Is(err, state.ErrUnreachable) || errors.Is(err, state.ErrUnsure) {
			t.Errorf("with %s Put = %v, want ErrUnreachable", name, err)
		}
	}

	c, err := clientv3.New(clientv3.Config{Endpoints: endpoints, TLS: good, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx := t.Context()
	for _, err := range []error{
		second(c.UserAdd(ctx, "root", "rootsecret")), second(c.UserGrantRole(ctx, "root", "root")),
		second(c.RoleAdd(ctx, "gateways")), second(c.UserAdd(ctx, "gateway1", "secret")), second(c.UserGrantRole(ctx, "gateway1", "gateways")),
		second(c.RoleGrantPermission(ctx, "gateways", "/test/", clientv3.GetPrefixRangeEnd("/test/"), clientv3.PermissionType(clientv3.PermReadWrite))),
		second(c.AuthEnable(ctx)),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	user := open(t, Config{Endpoints: endpoints, TLS: good, User: "gateway1", Password: "secret"})
	want(t, user, "a", "one", r)
	values, err := user.Watch(ctx, "")
	if err != nil {
		t.Fatal(err)
	}
	r = put(t, user, "a", "two", r)
	if v := <-values; v.Revision != r {
		t.Errorf("the watch has %v", v)
	}
	if err := user.raiseFence(ctx, 0); err != nil {
		t.Errorf("the rights do not suffice for a fence: %v", err)
	}
	if _, err := Open(Config{Endpoints: endpoints, Prefix: "/test", TLS: good, User: "gateway1", Password: "wrong", Timeout: testkit.Patience}); err == nil || errors.Is(err, state.ErrUnreachable) || !strings.Contains(err.Error(), "invalid user ID or password") {
		t.Errorf("with a wrong password Open = %v", err)
	}
	elsewhere := open(t, Config{Endpoints: endpoints, TLS: good, User: "gateway1", Password: "secret", Prefix: "/other"})
	_, err = elsewhere.Put(ctx, "a", []byte("x"), 0)
	_, err2 := elsewhere.Get(ctx, "a")
	for _, err := range []error{err, err2} {
		if err == nil || errors.Is(err, state.ErrUnreachable) || errors.Is(err, state.ErrUnsure) || !strings.Contains(err.Error(), "permission denied") {
			t.Errorf("without the right the error is %v", err)
		}
	}
	want(t, user, "a", "two", r)
}

func second[T any](_ T, err error) error { return err }
