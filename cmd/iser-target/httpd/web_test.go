package httpd

import (
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/api/apitest"
	"github.com/iser-target/iser-target/tests/testkit"
)

// CheckWeb names the file, the key and the reason.
func TestCheckWeb(t *testing.T) {
	ca := apitest.New(t)
	ca.Server("server")
	ca.Server("other")
	dir := t.TempDir()
	file := filepath.Join(dir, "web.yml")
	if err := os.WriteFile(filepath.Join(dir, "empty.pem"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	pair := "cert_file: " + ca.Path("server.pem") + ", key_file: " + ca.Path("server.key")
	const cost16 = "$2y$16$QOauhQNbBCuQDKes6eFzPeMqBSjb7Mr5DUmpZ/VcEd00UAV/LDeSi"
	for text, want := range map[string]string{
		"":                                  "",
		"tls_server_config: {" + pair + "}": "",
		"basic_auth_users: {a: " + strings.Replace(cost16, "16", "15", 1) + "}": "",
		"basic_auth_users: {a: " + cost16 + "}":                                 "basic_auth_users.a: has cost 16",
		"basic_auth_users: {a: b}":                                              "basic_auth_users.a: not a bcrypt hash",
		"basic_auth_users: [a]":                                                 "line 1: cannot unmarshal",
		"basic_auth: {}":                                                        "field basic_auth not found",
		"tls_server_config: {cert_file: none.pem, key_file: none.key}":          "tls_server_config: failed to read cert_file (" + dir + "/none.pem)",
		"tls_server_config: {cert_file: " + ca.Path("server.pem") + "}":         "tls_server_config: missing one of key or key_file",
		"tls_server_config: {cert_file: " + ca.Path("other.pem") + ", key_file: " + ca.Path("server.key") + "}": "private key does not match",
		"tls_server_config: {" + pair + ", client_ca_file: empty.pem, client_auth_type: RequireAnyClientCert}":  "tls_server_config.client_ca_file: has no certificate",
		"tls_server_config: {" + pair + ", client_ca_file: none.pem}":                                           "tls_server_config.client_ca_file: open",
		"tls_server_config: {" + pair + ", client_auth_type: Perhaps}":                                          "tls_server_config: invalid ClientAuth: Perhaps",
		"tls_server_config: {" + pair + ", min_version: TLS9}":                                                  "unknown TLS version: TLS9",
		"http_server_config: {headers: {Server: x}}":                                                            `HTTP header "Server" can not be configured`,
		strings.Repeat("#", maxWeb+1):                                                                           "must be a regular file of at most 1048576 bytes",
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		err := CheckWeb(file)
		if want == "" {
			if err != nil {
				t.Errorf("%.80s: %v", text, err)
			}
			continue
		}
		if err == nil || !strings.HasPrefix(err.Error(), file+": ") || !strings.Contains(err.Error(), want) {
			t.Errorf("%.80s: %v, want %q", text, err, want)
		}
		if w, err := NewWeb(file, slog.New(slog.DiscardHandler)); err == nil || w != nil {
			t.Errorf("%.80s: NewWeb takes it", text)
		}
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if err := CheckWeb(file); err == nil || !strings.Contains(err.Error(), file+": no such file") {
		t.Errorf("without the file: %v", err)
	}
	if err := syscall.Mkfifo(file, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := CheckWeb(file); err == nil || !strings.Contains(err.Error(), "must be a regular file") {
		t.Errorf("a FIFO: %v", err)
	}
}

// WebFiles returns the files that the process must be able to read, with names relative to the directory of the first.
func TestWebFiles(t *testing.T) {
	file := filepath.Join(t.TempDir(), "web.yml")
	if err := os.WriteFile(file, []byte("tls_server_config: {cert_file: a.pem, key_file: /b.key, client_ca_file: c/d.pem}"), 0o600); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Dir(file)
	want := []string{file, dir + "/a.pem", "/b.key", dir + "/c/d.pem"}
	if got, err := WebFiles(file); err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v; want %v", got, err, want)
	}
}

// The certificates are those of the files, of the file itself, and of what they name, chains included. A Web without TLS has none.
func TestCertificatesOfAWeb(t *testing.T) {
	ca := apitest.New(t)
	ca.Server("server")
	read := func(name string) []byte {
		b, err := os.ReadFile(ca.Path(name))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	file := filepath.Join(t.TempDir(), "web.yml")
	web := func(text string) *Web {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		w, err := NewWeb(file, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		return w
	}
	chain := slices.Concat(read("server.pem"), read("ca.pem"))
	if err := os.WriteFile(ca.Path("chain.pem"), chain, 0o600); err != nil {
		t.Fatal(err)
	}
	server, authority := ca.Certificate("server"), ca.Cert
	want := func(what string, w *Web, list ...Certificate) {
		t.Helper()
		var got []Certificate
		testkit.Eventually(t, what, func() bool {
			got = w.Certificates()
			return slices.Equal(got, list)
		})
	}
	indented := strings.ReplaceAll("\n"+string(read("server.pem")), "\n", "\n    ")
	key := strings.ReplaceAll("\n"+string(read("server.key")), "\n", "\n    ")
	one := func(from string) Certificate { return Certificate{from, "CN=server", server.NotAfter} }
	of := func(from string) Certificate {
		return Certificate{from, authority.Subject.String(), authority.NotAfter}
	}
	pair := "cert_file: " + ca.Path("server.pem") + ", key_file: " + ca.Path("server.key")
	want("a file", web("tls_server_config: {"+pair+"}"), one(ca.Path("server.pem")))
	want("with an authority", web("tls_server_config: {"+pair+", client_ca_file: "+ca.Path("ca.pem")+", client_auth_type: RequireAndVerifyClientCert}"),
		one(ca.Path("server.pem")), of(ca.Path("ca.pem")))
	want("a chain", web("tls_server_config: {"+strings.Replace(pair, "server.pem", "chain.pem", 1)+"}"), one(ca.Path("chain.pem")), of(ca.Path("chain.pem")))
	want("within the file", web("tls_server_config:\n  cert: |"+indented+"\n  key: |"+key+"\n"), one(file))
	want("no TLS", web(""))
	want("no file", nil)

	w := web("tls_server_config: {" + pair + "}")
	want("before", w, one(ca.Path("server.pem")))
	if err := os.WriteFile(file, []byte("tls_server_config: ["), 0o600); err != nil {
		t.Fatal(err)
	}
	w.expiries.mu.Lock()
	w.expiries.looked = time.Time{} // long ago
	w.expiries.mu.Unlock()
	want("while the file is bad", w, one(ca.Path("server.pem")))
}

// A client cannot make the server log more than one line per second.
func TestSeldom(t *testing.T) {
	var b strings.Builder
	h := &seldom{Handler: slog.NewTextHandler(&b, nil)}
	now := time.Now()
	for i := range 30 { // 100 ms each
		r := slog.NewRecord(now.Add(time.Duration(i)*reportEvery/10), slog.LevelError, "bad", 0)
		if err := h.Handle(t.Context(), r); err != nil {
			t.Fatal(err)
		}
	}
	if n := strings.Count(b.String(), "\n"); n != 3 {
		t.Errorf("%d lines, want 3:\n%s", n, b.String())
	}
}
