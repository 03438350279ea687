package main

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/bcrypt"

	"github.com/iser-target/iser-target/cmd/iser-target/api/apitest"
	"github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// A webStation is a station whose metrics and dashboard have a web configuration file.
type webStation struct {
	*station
	file               string // of the web configuration
	metrics, dashboard string // URLs
}

func newWebStation(t *testing.T, web string) *webStation {
	t.Helper()
	w := &webStation{file: filepath.Join(t.TempDir(), "web.yml")}
	w.write(t, web)
	w.station = newStation(t, func(text string) string {
		return text + fmt.Sprintf("metrics: {listen: \"127.0.0.1:0\", web_config: %s}\ndashboard: {listen: \"127.0.0.1:0\", web_config: %s}\n", w.file, w.file)
	})
	urls := regexp.MustCompile(`msg="metrics server" url=(\S+)\n.* msg=dashboard url=(\S+)`).FindStringSubmatch(w.output.all.String())
	if urls == nil {
		t.Fatal("the servers are off")
	}
	w.metrics, w.dashboard = urls[1], urls[2]
	return w
}

func (w *webStation) write(t *testing.T, web string) {
	t.Helper()
	if err := os.WriteFile(w.file, []byte(web), 0o600); err != nil {
		t.Fatal(err)
	}
}

// fetch returns the status of a request, and the answer.
func fetch(t *testing.T, client *http.Client, url, user, password string) (int, string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	if user != "" {
		r.SetBasicAuth(user, password)
	}
	resp, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

func users(t *testing.T, name, password string) string {
	t.Helper()
	hash, err := bcrypt.GenerateFromPassword([]byte(password), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("basic_auth_users:\n  %s: %s\n", name, hash)
}

// ready fails t unless LUN 0 answers a session.
func ready(t *testing.T, session *initiator.Session) {
	t.Helper()
	if err := session.Do(&initiator.Command{CDB: cdb.TestUnitReady}); err != nil {
		t.Errorf("the neighbor: %v", err)
	}
}

// Metrics, probes and dashboard require the login of the web configuration file, as it is at the time of the
// request. A file that has become bad locks everybody out, until it is good again. A session is served all the time.
func TestWebLogin(t *testing.T) {
	w := newWebStation(t, users(t, "alice", "first"))
	session := w.login(t)
	outcome(t, session, &initiator.Command{CDB: cdb.TestUnitReady}) // UNIT ATTENTION
	pages := map[string]string{
		w.metrics: "iser_target_sessions", strings.TrimSuffix(w.metrics, "metrics") + "readyz": "",
		w.dashboard: "<title>iser-target</title>", w.dashboard + "api/state": `"targets"`,
	}
	want := func(code int, user, password string) {
		t.Helper()
		ready(t, session)
		for url, content := range pages {
			if got, body := fetch(t, http.DefaultClient, url, user, password); got != code || code == http.StatusOK && !strings.Contains(body, content) {
				t.Errorf("%s as %q with %q: status %d, want %d: %.200s", url, user, password, got, code, body)
			}
		}
	}
	want(http.StatusUnauthorized, "", "")
	want(http.StatusUnauthorized, "alice", "second")
	want(http.StatusUnauthorized, "bob", "first")
	want(http.StatusOK, "alice", "first")
	w.write(t, users(t, "alice", "second"))
	want(http.StatusUnauthorized, "alice", "first")
	want(http.StatusOK, "alice", "second")
	w.write(t, "basic_auth_user: {}\n")
	want(http.StatusInternalServerError, "alice", "second")
	w.wait(t, `msg="Unable to parse configuration" web_config=\S+ err=.*(basic_auth_user)`)
	w.write(t, users(t, "alice", "second"))
	want(http.StatusOK, "alice", "second")
}

// The web configuration file turns TLS on, and asks for the certificate of the client. A certificate that was renewed
// is the one of the next connection.
func TestWebTLS(t *testing.T) {
	ca := apitest.New(t)
	ca.Server("server")
	ca.Client("client")
	w := newWebStation(t, fmt.Sprintf("tls_server_config:\n  cert_file: %s\n  key_file: %s\n  client_ca_file: %s\n  client_auth_type: RequireAndVerifyClientCert\n",
		ca.Path("server.pem"), ca.Path("server.key"), ca.Path("ca.pem")))
	roots := x509.NewCertPool()
	roots.AddCert(ca.Cert)
	pair, err := tls.LoadX509KeyPair(ca.Path("client.pem"), ca.Path("client.key"))
	if err != nil {
		t.Fatal(err)
	}
	client := func(certs ...tls.Certificate) *http.Client {
		return &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: certs}}}
	}
	for _, url := range []string{w.metrics, w.dashboard} {
		if !strings.HasPrefix(url, "https://") {
			t.Fatalf("%s is not HTTPS", url)
		}
		if code, body := fetch(t, client(pair), url, "", ""); code != http.StatusOK {
			t.Errorf("%s: %d %s", url, code, body)
		}
		if err := refusal(t, url, &tls.Config{RootCAs: roots}); err == nil || !strings.Contains(err.Error(), "certificate required") {
			t.Errorf("%s without a certificate: %v", url, err)
		}
		if resp, err := http.Get("http" + strings.TrimPrefix(url, "https")); err == nil {
			t.Errorf("%s without TLS: %s", url, resp.Status)
		}
	}
	ca.Server("server")
	resp, err := client(pair).Get(w.metrics)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if got, want := resp.TLS.PeerCertificates[0].SerialNumber, ca.Certificate("server").SerialNumber; got.Cmp(want) != 0 {
		t.Errorf("after the certificate was renewed, the target shows %v, want %v", got, want)
	}
}

// refusal returns the error of the server of url after a handshake in which the client has done its part. It sends no
// request: a server that closes a connection with a request unread resets it, and the alert may be lost.
func refusal(t *testing.T, url string, config *tls.Config) error {
	t.Helper()
	address, _, _ := strings.Cut(strings.TrimPrefix(url, "https://"), "/")
	c, err := tls.DialWithDialer(&net.Dialer{Timeout: time.Minute}, "tcp", address, config)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	_, err = c.Read(make([]byte, 1))
	return err
}

// The metrics and the findings of status and doctor have the certificates of web configuration files. A renewed one
// counts without a restart, and while the file is bad, that before does. A session is served all the time.
func TestWebCertificatesExpire(t *testing.T) {
	ca := apitest.New(t)
	ca.Server("server")
	good := fmt.Sprintf("tls_server_config: {cert_file: %s, key_file: %s}\n", ca.Path("server.pem"), ca.Path("server.key"))
	w := newWebStation(t, good)
	session := w.login(t)
	outcome(t, session, &initiator.Command{CDB: cdb.TestUnitReady}) // UNIT ATTENTION
	roots := x509.NewCertPool()
	roots.AddCert(ca.Cert)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: roots}}}
	warned := func() (list []string) {
		for _, f := range read[cli.Status](t, w.station, "status").Findings {
			if f.About == "metrics.web_config" || f.About == "dashboard.web_config" {
				list = append(list, f.About+" "+f.Severity+" "+f.Text)
			}
		}
		return list
	}
	expires := func() time.Time { return ca.Certificate("server").NotAfter.UTC() }
	shows := func(at time.Time) func() bool {
		return func() bool {
			_, body := fetch(t, client, w.metrics, "", "")
			for _, key := range []string{"metrics", "dashboard"} {
				m := regexp.MustCompile(`(?m)^iser_target_certificate_expires_timestamp_seconds\{key="` + key + `.web_config"\} (\S+)$`).FindStringSubmatch(body)
				if m == nil {
					return false
				}
				if v, err := strconv.ParseFloat(m[1], 64); err != nil || int64(v) != at.Unix() {
					return false
				}
			}
			return true
		}
	}
	testkit.Eventually(t, "the metrics have both certificates", shows(expires()))
	want := " warning " + ca.Path("server.pem") + " of CN=server expires at " + expires().Format(time.RFC3339)
	if got := warned(); len(got) != 2 || got[0] != "metrics.web_config"+want || got[1] != "dashboard.web_config"+want {
		t.Errorf("warnings %q, want two with %q", got, want)
	}

	ca.Sign("server", &x509.Certificate{IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		NotAfter: time.Now().AddDate(1, 0, 0)})
	testkit.Eventually(t, "the metrics have the renewed certificates", shows(expires()))
	if got := warned(); len(got) != 0 {
		t.Errorf("after the renewal: %q", got)
	}
	w.write(t, "tls_server_config: {}}\n")
	if got := warned(); len(got) != 0 {
		t.Errorf("while the file is bad: %q", got)
	}
	w.write(t, good)
	if err := os.Remove(ca.Path("server.pem")); err != nil {
		t.Fatal(err)
	}
	if got := warned(); len(got) != 0 {
		t.Errorf("without the certificate: %q", got)
	}
	ca.Server("server")
	testkit.Eventually(t, "status warns again", func() bool { return len(warned()) == 2 })
	ready(t, session)
}

// A web configuration file that cannot be used is refused by a start, by config validate --check-paths, by a plan and by a
// change, with the file, the key and the reason. The change disturbs neither a session nor the servers.
func TestWebMistakes(t *testing.T) {
	w := newWebStation(t, users(t, "alice", "first"))
	session := w.login(t)
	outcome(t, session, &initiator.Command{CDB: cdb.TestUnitReady})
	bad := filepath.Join(t.TempDir(), "bad.yml")
	if err := os.WriteFile(bad, []byte("basic_auth_users: {bob: secret}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	reason := "metrics.web_config: " + bad + ": basic_auth_users.bob: not a bcrypt hash"
	next := filepath.Join(w.dir, "next.yaml")
	if err := os.WriteFile(next, []byte(strings.Replace(w.text(t), w.file, bad, 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	w.says(t, cli.ExitOK, "valid", "config", "validate", next)
	w.says(t, cli.ExitError, reason, "config", "validate", "--check-paths", next)
	w.says(t, cli.ExitError, reason, "config", "plan", next)
	w.says(t, cli.ExitError, reason, "config", "apply", next)
	ready(t, session)
	if code, _ := fetch(t, http.DefaultClient, w.metrics, "alice", "first"); code != http.StatusOK {
		t.Errorf("after the refused change: status %d", code)
	}
	cmd := exec.Command(executable(t), "serve", "--config", next)
	cmd.Env = append(os.Environ(), "BE_ISER_TARGET=1", "ISER_TARGET_CONTROL_SOCKET="+filepath.Join(t.TempDir(), "s"), "ISER_TARGET_STATE_DIR="+t.TempDir())
	if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), reason) {
		t.Errorf("start: %v\n%s", err, out)
	}
}
