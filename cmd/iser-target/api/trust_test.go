package api

import (
	"bytes"
	"crypto/x509"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/api/apitest"
	"github.com/iser-target/iser-target/cmd/iser-target/daemon"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/tests/testkit"
)

// serveTLS runs a daemon with the control API over TLS, for clients of a that are named in roles.
func serveTLS(t *testing.T, a *apitest.Authority, crl string, roles ...string) (url string, d *daemon.Daemon, log *testkit.Log) {
	t.Helper()
	log = &testkit.Log{}
	c := config.Control{Socket: filepath.Join(t.TempDir(), "s"), Listen: "127.0.0.1:0", TLS: config.ControlTLS{
		Cert: a.Path("server.pem"), Key: a.Path("server.key"), ClientCA: a.Path("ca.pem"), CRL: crl,
	}}
	for _, r := range roles {
		name, role, _ := strings.Cut(r, "=")
		c.Access = append(c.Access, config.Access{Certificate: name, Role: role})
	}
	d = serve(t, c, log)
	<-d.Ready()
	return "https://" + regexp.MustCompile(`address=(127\S+)`).FindStringSubmatch(log.String())[1], d, log
}

// get returns the status and the body of a GET, or an error.
func get(c *http.Client, url string) (string, error) {
	rsp, err := c.Get(url)
	if err != nil {
		return "", err
	}
	defer rsp.Body.Close()
	b, err := io.ReadAll(rsp.Body)
	return fmt.Sprintf("%d %s", rsp.StatusCode, b), err
}

// A new certificate is presented to the next client, and a wrong file changes nothing.
func TestChangedCertificatesAreReadAgain(t *testing.T) {
	a := apitest.New(t)
	a.Server("server")
	a.Client("alice")
	url, d, log := serveTLS(t, a, "", "alice=admin")
	presented := func() string {
		t.Helper()
		c := overTLS(t, a, "alice")
		rsp, err := c.Get(url + "/v1/state")
		if err != nil {
			return err.Error()
		}
		defer c.CloseIdleConnections()
		defer rsp.Body.Close()
		return rsp.TLS.PeerCertificates[0].SerialNumber.String()
	}
	first := presented()
	if want := a.Certificate("server").SerialNumber.String(); first != want {
		t.Fatalf("certificate %s, want %s", first, want)
	}
	events := func(text string) int { return strings.Count(log.String(), `msg="`+text) }
	key, err := os.ReadFile(a.Path("server.key"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(a.Path("server.key"), []byte("nonsense"), 0o600); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the wrong key is reported", func() bool {
		if got := presented(); got != first {
			t.Fatalf("with a wrong key: %s, want certificate %s", got, first)
		}
		return events("changed certificates are not used") >= 1 // more if it was read while it was written
	})
	if err := os.WriteFile(a.Path("server.key"), key, 0o600); err != nil {
		t.Fatal(err)
	}
	a.Server("server")
	next := a.Certificate("server").SerialNumber.String()
	testkit.Eventually(t, "the new certificate is presented", func() bool { return presented() == next })
	if n := events("a certificate expires soon"); n == 0 { // those of a test are valid for an hour
		t.Error("no event about certificates that expire soon")
	}
	found := map[string]bool{}
	for _, c := range d.State().Certificates {
		found[c.Key] = time.Until(c.Expires) > 50*time.Minute && time.Until(c.Expires) < 61*time.Minute
	}
	if !found["control.tls.cert"] || !found["control.tls.client_ca"] || len(found) != 2 {
		t.Errorf("state: %+v", d.State().Certificates)
	}
}

// A certificate that is revoked opens no connection, and its open connections end. Those of others stay.
func TestRevokedCertificateIsRefused(t *testing.T) {
	a := apitest.New(t)
	a.Server("server")
	a.Client("alice")
	a.Client("mallory")
	a.Revoke("crl", time.Now().Add(time.Hour))
	url, _, _ := serveTLS(t, a, a.Path("crl.pem"), "alice=admin", "mallory=read")
	alice, mallory := overTLS(t, a, "alice"), overTLS(t, a, "mallory")
	for name, c := range map[string]*http.Client{"alice": alice, "mallory": mallory} {
		if got, err := get(c, url+"/v1/portals"); err != nil || !strings.HasPrefix(got, "200") {
			t.Fatalf("%s: %s, %v", name, got, err)
		}
	}
	follow, err := mallory.Get(url + "/v1/events?follow=true") // on another connection
	if err != nil {
		t.Fatal(err)
	}
	defer follow.Body.Close()
	a.Revoke("crl", time.Now().Add(time.Hour), a.Certificate("mallory"))
	testkit.Eventually(t, "the open connection is refused", func() bool {
		got, err := get(mallory, url+"/v1/portals")
		if err != nil { // a new connection
			return strings.Contains(err.Error(), "tls:")
		}
		return strings.HasPrefix(got, "403") && strings.Contains(got, "certificate CN=mallory is not trusted any longer: the certificate of CN=mallory was revoked at")
	})
	if got, err := get(overTLS(t, a, "mallory"), url+"/v1/portals"); err == nil || !strings.Contains(err.Error(), "tls:") {
		t.Errorf("a new connection of the revoked certificate: %s, %v", got, err)
	}
	for name, c := range map[string]*http.Client{"open": alice, "new": overTLS(t, a, "alice")} {
		if got, err := get(c, url+"/v1/portals"); err != nil || !strings.HasPrefix(got, "200") {
			t.Errorf("the neighbour on a connection that is %s: %s, %v", name, got, err)
		}
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		io.Copy(io.Discard, follow.Body)
	}()
	select {
	case <-ended:
	case <-time.After(heartbeat + 10*time.Second):
		t.Error("the stream of the revoked certificate does not end")
	}
}

// Each list must be valid, and that of another authority says nothing.
func TestRevocationLists(t *testing.T) {
	ours, theirs := apitest.New(t), apitest.New(t)
	ours.Server("server")
	ours.Client("alice")
	for _, tc := range []struct {
		name string
		of   *apitest.Authority
		next time.Time
		want string
	}{
		{"valid", ours, time.Now().Add(time.Hour), ""},
		{"expired", ours, time.Now().Add(-time.Minute), "the revocation list of CN=ca has expired at"},
		{"of another authority", theirs, time.Now().Add(time.Hour), "control.tls.crl has no list that CN=ca has signed"},
	} {
		tc.of.Revoke("crl", tc.next)
		var log testkit.Log
		tr, err := newTrust(config.ControlTLS{Cert: ours.Path("server.pem"), Key: ours.Path("server.key"), ClientCA: ours.Path("ca.pem"), CRL: tc.of.Path("crl.pem")}, slog.New(slog.NewTextHandler(&log, nil)))
		if err != nil {
			t.Fatal(err)
		}
		err = tr.current().verify([]*x509.Certificate{ours.Certificate("alice")}, time.Now())
		if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", tc.name, err, tc.want)
		}
	}
	if err := os.WriteFile(ours.Path("crl.pem"), bytes.Repeat([]byte("x"), 100), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := newTrust(config.ControlTLS{Cert: ours.Path("server.pem"), Key: ours.Path("server.key"), ClientCA: ours.Path("ca.pem"), CRL: ours.Path("crl.pem")}, slog.New(slog.DiscardHandler)); err == nil ||
		!strings.Contains(err.Error(), "crl.pem: the file has no certificate revocation list") {
		t.Errorf("a file without a list: %v", err)
	}
}

// Pages of other sites, and names of other servers, change nothing and read nothing. A program is served.
func TestForeignPagesAreRefused(t *testing.T) {
	a := apitest.New(t)
	a.Server("server")
	a.Client("alice")
	url, d, _ := serveTLS(t, a, "", "alice=admin")
	c := overTLS(t, a, "alice")
	before := string(d.Document().Bytes())
	alias := `{"alias": "evil"}`
	for _, tc := range []struct {
		name, method, host, body string
		header                   []string
		status                   int
		want                     string
	}{
		{"a form of another site", "POST", "", alias, []string{"Content-Type", "text/plain", "Origin", "https://evil.example"}, 403, "a page of another site asks for it"},
		{"a script of another site", "PATCH", "", alias, []string{"Content-Type", "application/json", "Sec-Fetch-Site", "cross-site"}, 403, "a page of another site asks for it"},
		{"another port of the host", "PATCH", "", alias, []string{"Content-Type", "application/json", "Origin", "https://127.0.0.1:1"}, 403, "a page of another site asks for it"},
		{"text", "PATCH", "", alias, []string{"Content-Type", "text/plain"}, 400, "must be application/json, not \\\"text/plain\\\""},
		{"a form", "PATCH", "", alias, []string{"Content-Type", "application/x-www-form-urlencoded"}, 400, "must be application/json"},
		{"no type", "PATCH", "", alias, nil, 400, "must be application/json, not \\\"\\\""},
		{"another name", "GET", "evil.example", "", nil, 403, "evil.example\\\" is not a name in the certificate of this target"},
		{"another name with a port", "PATCH", "evil.example:3261", alias, []string{"Content-Type", "application/json"}, 403, "is not a name in the certificate"},
	} {
		req, err := http.NewRequestWithContext(t.Context(), tc.method, url+"/v1/targets/"+store, strings.NewReader(tc.body))
		if err != nil {
			t.Fatal(err)
		}
		for i := 0; i < len(tc.header); i += 2 {
			req.Header.Set(tc.header[i], tc.header[i+1])
		}
		req.Host = tc.host
		if tc.method == "POST" {
			req.URL.Path = "/v1/targets"
		}
		rsp, err := c.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(rsp.Body)
		rsp.Body.Close()
		if err != nil || rsp.StatusCode != tc.status || !strings.Contains(string(b), tc.want) {
			t.Errorf("%s: %d %s, %v, want %d with %q", tc.name, rsp.StatusCode, b, err, tc.status, tc.want)
		}
	}
	if got := string(d.Document().Bytes()); got != before {
		t.Errorf("refused requests changed the configuration:\n%s", got)
	}
	req, err := http.NewRequestWithContext(t.Context(), "PATCH", url+"/v1/targets/"+store, strings.NewReader(`{"alias": "good"}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json; charset=utf-8")
	req.Header.Set("Origin", url)
	rsp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	rsp.Body.Close()
	if alias := d.State().Targets[0].Alias; rsp.StatusCode != 200 || alias != "good" {
		t.Errorf("a request of our own origin: %d, alias %q", rsp.StatusCode, alias)
	}
}

// Readers that follow the events leave places to administrators.
func TestReadersLeavePlacesToAdministrators(t *testing.T) {
	a := apitest.New(t)
	a.Server("server")
	a.Client("alice")
	a.Client("bob")
	url, _, _ := serveTLS(t, a, "", "alice=admin", "bob=read")
	bob, alice := overTLS(t, a, "bob"), overTLS(t, a, "alice")
	for i := range maxFollowers/2 + 1 {
		rsp, err := bob.Get(url + "/v1/events?follow=true")
		if err != nil {
			t.Fatal(err)
		}
		defer rsp.Body.Close()
		if want := map[bool]int{true: 200, false: 503}[i < maxFollowers/2]; rsp.StatusCode != want {
			t.Fatalf("reader %d: status %d, want %d", i, rsp.StatusCode, want)
		}
	}
	rsp, err := alice.Get(url + "/v1/events?follow=true")
	if err != nil {
		t.Fatal(err)
	}
	defer rsp.Body.Close()
	if rsp.StatusCode != 200 {
		t.Errorf("an administrator next to %d readers: status %d", maxFollowers/2, rsp.StatusCode)
	}
}
