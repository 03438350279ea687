package api

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/api/apitest"
	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
	"github.com/iser-target/iser-target/cmd/iser-target/daemon"
	"github.com/iser-target/iser-target/cmd/iser-target/handover"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/tests/testkit"
)

const store = "iqn.2026-11.io.example:store"

// document returns the configuration of serve, with the roles and the group of the socket of c.
func document(t testing.TB, c config.Control, dir string) *config.Document {
	t.Helper()
	var access []string
	for _, a := range c.Access {
		for key, v := range map[string]string{"user": a.User, "group": a.Group, "certificate": a.Certificate, "ou": a.OU} {
			if v != "" {
				access = append(access, fmt.Sprintf("{%s: %q, role: %s}", key, v, a.Role))
			}
		}
	}
	doc, err := config.NewDocument("test", []byte(fmt.Sprintf(`
state_dir: %s
control: {socket: %q, socket_group: %q, access: [%s], paths: [%s]}
portals: [{listen: "127.0.0.1:0"}]
targets: # the secret "of a comment"
  - name: %q
    initiators: ["*"]
    auth: {method: none, users: [{name: host, secret: %s}]}
    luns: [{id: 0, backend: memory, size: 1MiB}]
`, dir, c.Socket, c.SocketGroup, strings.Join(access, ", "), strings.Join(c.Paths, ", "), store, secretText)))
	if err != nil {
		t.Fatal(err)
	}
	return doc
}

// secretText is a secret of the configuration of serve.
const secretText = "known-to-few-people"

// serve runs a daemon without a configuration file, and its control API on the addresses
// of c.
func serve(t testing.TB, c config.Control, log io.Writer) *daemon.Daemon {
	t.Helper()
	doc := document(t, c, t.TempDir())
	d, err := daemon.New(doc, daemon.Options{LogTo: t.Output()})
	if err != nil {
		t.Fatal(err)
	}
	sockets, err := Open(d.Listeners(), c, slog.New(slog.NewTextHandler(log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	end, err := sockets.Serve(d)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- d.Run(ctx) }()
	t.Cleanup(func() {
		end()
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return d
}

// overSocket returns an HTTP client whose requests all go to a Unix socket.
func overSocket(path string) *http.Client {
	return &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", path)
	}}}
}

// Each wrong request gets an error in JSON with its status, code and message.
func TestWrongRequestsAreAnsweredInJSON(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	d := serve(t, config.Control{Socket: socket}, io.Discard)
	c := overSocket(socket)
	luns := "/v1/targets/" + store + "/luns"
	for _, tc := range []struct {
		method, path, body string
		status             int
		code               schema.Code
		says               string
	}{
		{"GET", "/", "", 404, schema.NotFound, "/: no such path"},
		{"GET", "/v1/none", "", 404, schema.NotFound, "/v1/none: no such path"},
		{"PUT", "/v1/targets", "", 405, schema.Method, "does not support PUT"},
		{"GET", "/v1/targets?all=1", "", 400, schema.Invalid, "all is unknown"},
		{"GET", "/v1/luns?target=a&target=b", "", 400, schema.Invalid, "given 2 times"},
		{"GET", "/v1/targets?%zz", "", 400, schema.Invalid, "query"},
		{"GET", "/v1/targets/none", "", 404, schema.NotFound, "none"},
		{"GET", luns + "/9", "", 404, schema.NotFound, "LUN 9"},
		{"GET", luns + "/x", "", 400, schema.Invalid, "is not a number"},
		{"GET", "/v1/sessions/65536", "", 400, schema.Invalid, "65535"},
		{"GET", "/v1/sessions/1", "", 404, schema.NotFound, "session 1"},
		{"DELETE", "/v1/sessions/1?reason=" + strings.Repeat("a", 256), "", 400, schema.Invalid, "255 bytes"},
		{"GET", "/v1/events?since=-1", "", 400, schema.Invalid, "since"},
		{"GET", "/v1/events?follow=perhaps", "", 400, schema.Invalid, "true or false"},
		{"GET", "/v1/explain?target=a", "", 400, schema.Invalid, "initiator is required"},
		{"POST", luns, "", 400, schema.Invalid, "EOF"},
		{"POST", luns, "{", 400, schema.Invalid, "EOF"},
		{"POST", luns, `{"backend": "memory"} {}`, 400, schema.Invalid, "data after"},
		{"POST", luns, `{"bakend": "memory"}`, 400, schema.Invalid, "bakend"},
		{"POST", luns, `{"id": 0, "backend": "memory", "size": "1MiB"}`, 409, schema.Exists, "already"},
		{"POST", luns, `{"backend": "memory", "size": "1 furlong"}`, 400, schema.Invalid, "size"},
		{"POST", luns, `{"backend": "none", "size": "1MiB"}`, 400, schema.Invalid, "backend"},
		{"POST", luns, `{"backend": "` + strings.Repeat("m", maxBody) + `"}`, 413, schema.TooLarge, "65536 bytes"},
		{"POST", luns + "?drain=1s&now=true", `{"backend": "memory", "size": "1MiB"}`, 400, schema.Invalid, "exclude"},
		{"POST", luns, `{"backend": "memory", "size": "1MiB", "preallocate": true}`, 400, schema.Invalid, "require the backend file"},
		{"POST", luns + "?progress=perhaps", `{"backend": "memory", "size": "1MiB"}`, 400, schema.Invalid, "true or false"},
		{"POST", luns + "?progress=true", `{"backend": "file", "path": "/dev/null", "size": "1MiB", "preallocate": true}`, 409, schema.Exists, "overwritten"},
		{"POST", luns + "?drain=2h", `{"backend": "memory", "size": "1MiB"}`, 400, schema.Invalid, "1h"},
		{"PATCH", luns + "/0", `{}`, 400, schema.Invalid, "no key"},
		{"PATCH", luns + "/0", `{"size": "512KiB"}`, 409, schema.Refused, "cuts off"},
		{"POST", "/v1/config/apply", ":", 400, schema.Invalid, "request"},
		{"POST", "/v1/config/apply?own_file=perhaps", "portals: [{listen: '127.0.0.1:0'}]\ntargets: []", 400, schema.Invalid, "true or false"},
		{"POST", "/v1/config/apply?own_file=true", "portals: [{listen: '127.0.0.1:0'}]\ntargets: []", 404, schema.NotFound, "without one"},
		{"POST", "/v1/config/plan?own_file=true", "", 400, schema.Invalid, "unknown"},
		{"POST", "/v1/config/plan?source=mine", "portals: []", 400, schema.Invalid, "mine:1:1: portals"},
		{"POST", "/v1/config/plan", strings.Repeat("#", maxDocument+1), 413, schema.TooLarge, "bytes"},
	} {
		req, err := http.NewRequestWithContext(t.Context(), tc.method, "http://target"+tc.path, strings.NewReader(tc.body))
		if err != nil {
			t.Fatal(err)
		}
		if tc.body != "" {
			req.Header.Set("Content-Type", "application/json")
			if strings.HasPrefix(tc.path, "/v1/config/") {
				req.Header.Set("Content-Type", "application/yaml")
			}
		}
		rsp, err := c.Do(req)
		if err != nil {
			t.Errorf("%s %.60s: %v", tc.method, tc.path, err)
			continue
		}
		b, err := io.ReadAll(rsp.Body)
		rsp.Body.Close()
		var e schema.Error
		if err == nil {
			err = json.Unmarshal(b, &e)
		}
		if err != nil || rsp.StatusCode != tc.status || e.Code != tc.code || !strings.Contains(e.Message, tc.says) {
			t.Errorf("%s %.60s: status %d, %s, error %v; want %d, %s with %q", tc.method, tc.path, rsp.StatusCode, b, err, tc.status, tc.code, tc.says)
		}
	}
	if luns := d.State().Targets[0].LUNs; len(luns) != 1 || luns[0].Size != 1<<20 {
		t.Errorf("failed requests changed the LUNs: %+v", luns)
	}
	var b []byte
	rsp, err := c.Get("http://target/v1/openapi.yaml")
	if err == nil {
		b, err = io.ReadAll(rsp.Body)
		rsp.Body.Close()
	}
	if err != nil || !bytes.Equal(b, openAPI) {
		t.Errorf("the description that is served: %d bytes, error %v", len(b), err)
	}
}

// A client can follow the progress of creating a file.
func TestProgressOfAFile(t *testing.T) {
	dir := t.TempDir()
	socket := filepath.Join(dir, "s")
	serve(t, config.Control{Socket: socket}, io.Discard)
	c := client.New(socket)
	l := schema.LUN{Backend: "file", Path: filepath.Join(dir, "a"), Size: "1MiB", Preallocate: true}
	var last schema.Progress
	plan, err := c.MakeLUN(t.Context(), store, l, schema.Options{}, func(p schema.Progress) { last = p })
	if err != nil || len(plan.Steps) != 1 || !plan.Steps[0].Done || last != (schema.Progress{Phase: "preallocating", Done: 1 << 20, Total: 1 << 20}) {
		t.Errorf("plan %+v, error %v, progress %+v", plan, err, last)
	}
	l.From, l.Path, last = filepath.Join(dir, "none"), l.Path+"2", schema.Progress{}
	var e *schema.Error
	if _, err := c.MakeLUN(t.Context(), store, l, schema.Options{}, func(p schema.Progress) { last = p }); !errors.As(err, &e) || !strings.Contains(e.Message, "no such file") || last != (schema.Progress{}) {
		t.Errorf("error %v, progress %+v", err, last)
	}
	l.From = ""
	if plan, err := c.MakeLUN(t.Context(), store, l, schema.Options{DryRun: true}, func(p schema.Progress) { last = p }); err != nil || plan.Steps[0].Done || last != (schema.Progress{}) {
		t.Errorf("plan %+v, error %v, progress %+v", plan, err, last)
	}
	if plan, err := c.AddLUN(t.Context(), store, l, schema.Options{}); err != nil || !plan.Steps[0].Done {
		t.Errorf("plan %+v, error %v", plan, err)
	}
}

// A refusal has the missing options and the plan.
func TestRefusalNamesTheMissingOptions(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	serve(t, config.Control{Socket: socket}, io.Discard)
	c := client.New(socket)
	_, err := c.SetLUN(t.Context(), store, 0, schema.Values{"size": "512KiB"}, schema.Options{})
	var e *schema.Error
	if !errors.As(err, &e) || e.Code != schema.Refused || len(e.Needs) != 1 || e.Needs[0] != "allow_shrink" || e.Plan == nil || len(e.Plan.Steps) != 1 {
		t.Fatalf("answer %+v", err)
	}
	p, err := c.SetLUN(t.Context(), store, 0, schema.Values{"size": "512KiB"}, schema.Options{AllowShrink: true})
	if err != nil || len(p.Steps) != 1 || !p.Steps[0].Done || p.Persisted || !strings.Contains(p.Note, "without a configuration file") {
		t.Errorf("plan %+v, error %v", p, err)
	}
}

// Clients that follow the events get new ones, and their number is limited.
func TestFollowersGetNewEvents(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	serve(t, config.Control{Socket: socket}, io.Discard)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var followers []*http.Response
	for i := range maxFollowers + 1 {
		req, err := http.NewRequestWithContext(ctx, "GET", "http://target/v1/events?follow=true", nil)
		if err != nil {
			t.Fatal(err)
		}
		rsp, err := overSocket(socket).Do(req)
		if err != nil {
			t.Fatalf("follower %d: %v", i, err)
		}
		defer rsp.Body.Close()
		if i < maxFollowers {
			followers = append(followers, rsp)
			continue
		}
		var busy schema.Error
		if err := json.NewDecoder(rsp.Body).Decode(&busy); err != nil || busy.Code != schema.Busy || !strings.Contains(busy.Message, "64 clients follow the events") {
			t.Fatalf("follower %d: %+v, error %v", i, busy, err)
		}
	}
	if _, err := client.New(socket).AddLUN(t.Context(), store, schema.LUN{Backend: "memory", Size: "1MiB"}, schema.Options{}); err != nil {
		t.Fatal(err)
	}
	for i, rsp := range followers {
		d := json.NewDecoder(rsp.Body)
		for n, kind := range []string{"service", "config"} {
			var e schema.Event
			if err := d.Decode(&e); err != nil || e.Number != uint64(n)+1 || e.Event != kind {
				t.Errorf("follower %d: event %+v, error %v", i, e, err)
			}
		}
	}
}

// Silent connections keep nobody out. A request beyond the limit gets an error like any other. The end
// of an open one makes room.
func TestConnectionsAreLimited(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	serve(t, config.Control{Socket: socket}, io.Discard)
	var open []net.Conn
	for range maxConnections {
		c, err := net.Dial("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		open = append(open, c)
	}
	if _, err := client.New(socket).State(t.Context()); err != nil {
		t.Errorf("beside silent connections: %v", err)
	}
	for i := range maxConnections * 7 / 8 { // the most of one process
		c, err := net.Dial("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		io.WriteString(c, "POST /v1/targets HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n")
		if line, err := bufio.NewReader(c).ReadString('\n'); err != nil || !strings.Contains(line, "100 Continue") {
			t.Fatalf("request %d: %q, %v", i, line, err)
		}
		open[i] = c
	}
	_, err := client.New(socket).State(t.Context())
	var e *schema.Error
	if !errors.As(err, &e) || e.Code != schema.Busy || !strings.Contains(e.Message, "112 connections of this address are open") || e.Hint == "" {
		t.Fatalf("error %+v", err)
	}
	open[0].Close()
	testkit.Eventually(t, "room for another connection", func() bool {
		_, err := client.New(socket).State(t.Context())
		return err == nil
	})
}

// Over TCP, only clients with a certificate of the authority are served.
func TestTLSRequiresACertificateOfTheClient(t *testing.T) {
	ours, theirs := apitest.New(t), apitest.New(t)
	ours.Server("server")
	ours.Client("client")
	theirs.Client("client")
	var log testkit.Log
	d := serve(t, config.Control{Listen: "127.0.0.1:0", TLS: config.ControlTLS{
		Cert: ours.Path("server.pem"), Key: ours.Path("server.key"), ClientCA: ours.Path("ca.pem"),
	}, Access: []config.Access{{Certificate: "client", Role: "admin"}}}, &log)
	addr := regexp.MustCompile(`address=(\S+)`).FindStringSubmatch(log.String())
	if addr == nil {
		t.Fatalf("log %q", log.String())
	}
	get := func(of *apitest.Authority, version uint16) error {
		pool := x509.NewCertPool()
		pool.AddCert(ours.Cert)
		o := &tls.Config{RootCAs: pool, MaxVersion: version}
		if of != nil {
			cert, err := tls.LoadX509KeyPair(of.Path("client.pem"), of.Path("client.key"))
			if err != nil {
				t.Fatal(err)
			}
			o.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &cert, nil }
		}
		c := http.Client{Transport: &http.Transport{TLSClientConfig: o, DisableKeepAlives: true}, Timeout: 20 * time.Second}
		rsp, err := c.Get("https://" + addr[1] + "/v1/state")
		if err != nil {
			return err
		}
		defer rsp.Body.Close()
		if rsp.StatusCode != http.StatusOK {
			return fmt.Errorf("status %s", rsp.Status)
		}
		rsp, err = c.Post("https://"+addr[1]+"/v1/portals", "application/json", strings.NewReader(`{"listen": "127.0.0.2:0"}`))
		if err != nil {
			return err
		}
		if rsp.StatusCode != http.StatusOK {
			err = fmt.Errorf("adding a portal: status %s", rsp.Status)
		}
		return errors.Join(err, rsp.Body.Close())
	}
	if err := get(ours, 0); err != nil {
		t.Errorf("with our certificate: %v", err)
	}
	events := d.Events(0)
	if by := fmt.Sprint(events[len(events)-1].Attrs["by"]); !regexp.MustCompile(`^CN=client at 127\.0\.0\.1:\d+$`).MatchString(by) {
		t.Errorf("the change is by %q", by)
	}
	for name, err := range map[string]error{
		"without a certificate":          get(nil, 0),
		"with that of another authority": get(theirs, 0),
		"with our certificate, 1.2":      get(ours, tls.VersionTLS12),
	} {
		if err == nil || !strings.Contains(err.Error(), "tls") {
			t.Errorf("%s: error %v, want one of TLS", name, err)
		}
	}
}

// Start fails if it cannot listen as configured, and leaves nothing behind.
func TestStartFailsWithoutItsAddresses(t *testing.T) {
	dir := t.TempDir()
	socket := filepath.Join(dir, "s")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	a := apitest.New(t)
	if err := os.WriteFile(filepath.Join(dir, "empty"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name string
		c    config.Control
		want string
	}{
		{"no directory", config.Control{Socket: filepath.Join(dir, "none", "s")}, "control.socket"},
		{"no certificate", config.Control{Socket: socket, Listen: "127.0.0.1:0"}, "control.listen"},
		{"no authority", config.Control{Socket: socket, Listen: "127.0.0.1:0", TLS: config.ControlTLS{Cert: a.Path("ca.pem"), Key: a.Path("ca.key"), ClientCA: filepath.Join(dir, "empty")}}, "the file has no certificate"},
		{"port in use", config.Control{Socket: socket, Listen: l.Addr().String(), TLS: config.ControlTLS{Cert: a.Path("ca.pem"), Key: a.Path("ca.key"), ClientCA: a.Path("ca.pem")}}, "address already in use"},
	} {
		if _, err := Open(&handover.Listeners{}, tc.c, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: error %v, want %q", tc.name, err, tc.want)
		}
		if _, err := os.Lstat(socket); err == nil {
			t.Errorf("%s: the socket is still there", tc.name)
		}
	}
}
