package main

import (
	"crypto/x509"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/api/apitest"
	"github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// listensTLS adds the control API over TCP to a configuration, with the certificate name. The client named
// client is an administrator, and may name files in the directory of the socket.
func listensTLS(of *apitest.Authority, name string) func(string) string {
	return func(text string) string {
		_, rest, _ := strings.Cut(text, "control: {socket: ")
		socket, _, _ := strings.Cut(rest, "}")
		return strings.Replace(text, "control: {", fmt.Sprintf("control: {listen: '127.0.0.1:0', access: [{certificate: client, role: admin}], paths: [%s], tls: {cert: %s, key: %s, client_ca: %s}, ",
			filepath.Dir(socket), of.Path(name+".pem"), of.Path(name+".key"), of.Path("ca.pem")), 1)
	}
}

// controlAddress returns the TCP address of the control API of s.
func (s *station) controlAddress(t *testing.T) string {
	t.Helper()
	return s.wait(t, `msg="control API" address=(127\S+)`)
}

// newRemote starts a station whose control API is also at the TCP address.
func newRemote(t *testing.T, of *apitest.Authority, name string) (*station, string) {
	t.Helper()
	var address string
	s := newStation(t, listensTLS(of, name))
	for line := range strings.Lines(s.output.all.String()) {
		if _, rest, ok := strings.Cut(line, `msg="control API" address=127.`); ok {
			address = "127." + strings.TrimSpace(rest)
		}
	}
	if address == "" {
		address = s.controlAddress(t)
	}
	return s, address
}

// All commands work over TCP, as with a target on another machine.
func TestCommandsOverTCP(t *testing.T) {
	ca := apitest.New(t)
	ca.Server("server")
	ca.Client("client")
	s, address := newRemote(t, ca, "server")
	const a, cert, key, authority = "ISER_TARGET_CLIENT_ADDRESS", "ISER_TARGET_CLIENT_TLS_CERT", "ISER_TARGET_CLIENT_TLS_KEY", "ISER_TARGET_CLIENT_TLS_CA"
	flags := []string{"--address", address, "--tls-cert", ca.Path("client.pem"), "--tls-key", ca.Path("client.key"), "--tls-ca", ca.Path("ca.pem")}
	with := func(args ...string) []string { return append(args, flags...) }
	s.says(t, cli.ExitOK, storeName, with("target", "list")...)
	s.says(t, cli.ExitUsage, "exclude", with("target", "list", "--socket", s.socket)...)
	s.says(t, cli.ExitUsage, "--tls-cert", "target", "list", "--address", address)
	s.says(t, cli.ExitUsage, "--tls-key", "target", "list", "--address", address, "--tls-cert", "x")
	for name, value := range map[string]string{a: address, cert: ca.Path("client.pem"), key: ca.Path("client.key"), authority: ca.Path("ca.pem"), "ISER_TARGET_CONTROL_SOCKET": "/nowhere"} {
		t.Setenv(name, value)
	}
	s.says(t, cli.ExitOK, storeName, "target", "list", "--socket", s.socket)
	socket := s.socket
	s.socket = "/nowhere" // from here on, the variables count
	s.says(t, cli.ExitOK, storeName, "target", "list")
	s.says(t, cli.ExitOK, storeName, "__complete", "lun", "show", "iqn")
	s.says(t, cli.ExitUsage, "another machine", "lun", "create", storeName, "--path", "a.img", "--size", "1MiB")
	image := filepath.Join(s.dir, "a.img")
	s.says(t, cli.ExitOK, "(done)", "lun", "create", storeName, "--path", image, "--size", "1MiB")
	s.says(t, cli.ExitOK, "(done)", "lun", "create", storeName, "--path", image+"2", "--size", "1MiB", "--preallocate")
	s.says(t, cli.ExitUsage, "another machine", "lun", "create", storeName, "--path", image+"3", "--from", "a.img")
	file := filepath.Join(s.dir, "f.pcapng")
	s.says(t, cli.ExitOK, "ended: 100ms have passed", "capture", "--session", fmt.Sprint(s.login(t).TSIH), "-w", file, "--duration", "100ms")
	if b, err := os.ReadFile(file); err != nil || len(b) < 1000 { // the login
		t.Errorf("a capture of %d bytes: %v", len(b), err)
	}
	if n := len(read[[]schema.LUNState](t, s, "lun", "list")); n != 3 {
		t.Errorf("%d LUNs, want 3", n)
	}
	s.says(t, cli.ExitUsage, "name a FILE", "config", "plan")
	s.says(t, cli.ExitUsage, "name a FILE", "config", "apply")
	s.says(t, cli.ExitOK, "nothing to do", "config", "plan", s.file)
	s.says(t, cli.ExitOK, "run doctor there", "doctor")
	s.says(t, cli.ExitOK, "CN=client", "events")
	s.says(t, cli.ExitOK, "valid", "config", "validate", s.file) // the target does not read the variables
	s.socket = socket
}

// The error says why a command cannot reach a target over TCP, and names the file.
func TestErrorsOverTCPNameTheFile(t *testing.T) {
	ours, theirs := apitest.New(t), apitest.New(t)
	past := x509.Certificate{NotBefore: time.Now().Add(-2 * time.Hour), NotAfter: time.Now().Add(-time.Hour)}
	for _, a := range []*apitest.Authority{ours, theirs} {
		a.Server("server")
		a.Client("client")
	}
	expired, other := past, x509.Certificate{DNSNames: []string{"other.example"}}
	expired.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)}
	ours.Sign("expired", &expired)
	ours.Sign("other", &other)
	old := past
	old.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	ours.Sign("old", &old)
	_, address := newRemote(t, ours, "server")
	_, expiredAddress := newRemote(t, ours, "expired")
	s, otherAddress := newRemote(t, ours, "other")
	plain, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	go func() {
		for {
			c, err := plain.Accept()
			if err != nil {
				return
			}
			c.Write([]byte("220 example.com ESMTP\r\n"))
			c.Close()
		}
	}()
	nobody, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nobody.Close()
	empty := filepath.Join(s.dir, "empty.pem")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	client, key, ca := ours.Path("client.pem"), ours.Path("client.key"), ours.Path("ca.pem")
	for _, tc := range []struct {
		name                   string
		address, cert, key, ca string
		code                   int
		want                   string
	}{
		{"as it should be", address, client, key, ca, cli.ExitOK, storeName},
		{"another CA of the target", address, client, key, theirs.Path("ca.pem"), cli.ExitUnreachable, "is not signed by an authority in " + theirs.Path("ca.pem")},
		{"the CA of the system", address, client, key, "", cli.ExitUnreachable, "is not signed by an authority in the certificates of the system"},
		{"another CA of the client", address, theirs.Path("client.pem"), theirs.Path("client.key"), ca, cli.ExitUnreachable, "does not know the authority that signed " + theirs.Path("client.pem")},
		{"a client of the past", address, ours.Path("old.pem"), ours.Path("old.key"), ca, cli.ExitUnreachable, "refuses " + ours.Path("old.pem") + ", which is not valid now: " + past.NotBefore.UTC().Format("2006-01-02T15:04")},
		{"no certificate for clients", address, ours.Path("server.pem"), ours.Path("server.key"), ca, cli.ExitUnreachable, "refuses " + ours.Path("server.pem")},
		{"a target of the past", expiredAddress, client, key, ca, cli.ExitUnreachable, "is not valid now"},
		{"a target of another name", otherAddress, client, key, ca, cli.ExitUnreachable, "is for another name"},
		{"no TLS", plain.Addr().String(), client, key, ca, cli.ExitUnreachable, "does not speak TLS"},
		{"nobody", nobody.Addr().String(), client, key, ca, cli.ExitUnreachable, "connection refused"},
		{"no port", "127.0.0.1", client, key, ca, cli.ExitError, "missing port"},
		{"no file", address, client, key + "2", ca, cli.ExitError, key + "2: no such file"},
		{"no CA file", address, client, key, ca + "2", cli.ExitError, ca + "2: no such file"},
		{"an empty CA file", address, client, key, empty, cli.ExitError, empty + ": the file has no certificate"},
		{"an empty certificate", address, empty, key, ca, cli.ExitError, empty + " with " + key},
		{"the key of another", address, client, ours.Path("old.key"), ca, cli.ExitError, "does not match"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s.says(t, tc.code, tc.want, "target", "list", "--address", tc.address, "--tls-cert", tc.cert, "--tls-key", tc.key, "--tls-ca", tc.ca)
		})
	}
}
