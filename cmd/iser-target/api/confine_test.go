package api

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/cmd/iser-target/api/apitest"
	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
	"github.com/iser-target/iser-target/cmd/iser-target/daemon"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/tests/testkit"
)

// makeAll creates the directories and files of a test in dir, with mode 0700 and 0600. A name that ends with
// a slash is a directory, and NAME -> TO a link.
func makeAll(t *testing.T, dir string, names ...string) {
	t.Helper()
	for _, name := range names {
		var err error
		link, to, isLink := strings.Cut(name, " -> ")
		switch {
		case isLink:
			err = os.Symlink(to, filepath.Join(dir, link))
		case strings.HasSuffix(name, "/"):
			err = os.Mkdir(filepath.Join(dir, name), 0o700)
		default:
			err = os.WriteFile(filepath.Join(dir, name), make([]byte, 1<<20), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// A path may not lead anywhere else than its text says, now or later.
func TestPathsAreConfined(t *testing.T) {
	dir := t.TempDir()
	makeAll(t, dir, "luns/", "luns/a", "luns/sub/", "luns/sub/b", "luns/mine/", "luns/group/", "luns/theirs/", "other/", "other/secret",
		"luns/link -> ../other/secret", "luns/dangling -> ../other/new", "luns/out -> ../other", "luns/in -> sub", "luns/magic -> /proc/self/root/etc",
		"luns/state.json", "luns/state.json.spare", "luns/c.yaml", "luns/c.yaml.history/", "luns/c.yaml.history/1", "luns/key", "luns/keys")
	for name, mode := range map[string]os.FileMode{"luns/group": 0o770, "luns/theirs": os.ModeSticky | 0o777} {
		if err := os.Chmod(filepath.Join(dir, name), mode); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Link(filepath.Join(dir, "luns/key"), filepath.Join(dir, "luns/hard")); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(filepath.Join(dir, "luns/fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := &confinement{dirs: []string{dir + "/luns", "/dev", "/proc"}, owner: uint32(os.Geteuid()),
		families: []string{dir + "/luns/state.json", dir + "/luns/c.yaml"}, protected: []string{dir + "/luns/key"}}
	for _, tc := range []struct{ path, want string }{ // of regular files; want "": permitted
		{dir + "/luns/a", ""},
		{dir + "/luns/new", ""},
		{dir + "/luns/sub/b", ""},
		{dir + "/luns/sub/new", ""},
		{dir + "/luns/keys", ""},
		{dir + "/luns", "not in a directory of control.paths"},
		{dir + "/luns2/a", "not in a directory of control.paths"},
		{dir + "/other/secret", "not in a directory of control.paths"},
		{"luns/a", "not a clean absolute path"},
		{dir + "/luns/../other/secret", "not a clean absolute path"},
		{dir + "/luns//a", "not a clean absolute path"},
		{dir + "/luns/a/", "not a clean absolute path"},
		{dir + "/luns/link", "it is a symbolic link"},
		{dir + "/luns/dangling", "it is a symbolic link"},
		{dir + "/luns/out/secret", "/luns/out is a link, or not a directory"},
		{dir + "/luns/in/b", "/luns/in is a link, or not a directory"},
		{dir + "/luns/magic/passwd", "/luns/magic is a link, or not a directory"},
		{dir + "/luns/a/b", "/luns/a is a link, or not a directory"},
		{dir + "/luns/none/b", "/luns/none: no such file or directory"},
		{dir + "/luns/sub", "not a file or device of the type that is needed"},
		{dir + "/luns/fifo", "not a file or device of the type that is needed"},
		{dir + "/luns/group/new", "other users can write to " + dir + "/luns/group, whose mode is 0770"},
		{dir + "/luns/theirs/new", "other users can write to " + dir + "/luns/theirs, whose mode is 01777"},
		{dir + "/luns/state.json", "the target itself uses it"},
		{dir + "/luns/state.json.spare", "the target itself uses it"},
		{dir + "/luns/state.json.lock", "the target itself uses it"},
		{dir + "/luns/c.yaml.history/1", "the target itself uses it"},
		{dir + "/luns/key", "the target itself uses it"},
		{dir + "/luns/hard", "the target itself uses it, as " + dir + "/luns/key"},
		{"/dev/null", "not a file or device of the type that is needed"},
		{fmt.Sprintf("/proc/%d/root/etc/passwd", os.Getpid()), "is a link, or not a directory"},
	} {
		err := c.check(tc.path, unix.S_IFREG)
		if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", strings.TrimPrefix(tc.path, dir), err, tc.want)
		}
	}
	if os.Geteuid() != 0 {
		backendtest.Unavailable(t, "root is needed to give a directory to another user")
	}
	if err := os.Chown(dir+"/luns/mine", 1001, -1); err != nil {
		t.Fatal(err)
	}
	if err := c.check(dir+"/luns/mine/new", unix.S_IFREG); err == nil || !strings.Contains(err.Error(), "belongs to uid 1001") {
		t.Errorf("a file in the directory of another user: %v", err)
	}
}

// Devices may have links as their names, if these stay in /dev.
func TestDevicesAreConfined(t *testing.T) {
	c := &confinement{dirs: []string{"/dev"}, owner: uint32(os.Geteuid())}
	for path, want := range map[string]string{
		"/dev/null":          "not a file or device of the type",
		"/dev/no-such-disk":  "no such file",
		"/dev/fd/0":          "is a link, or not a directory", // -> /proc/self/fd
		"/dev/stdin":         "leads out of /dev",
		"/etc/passwd":        "not in a directory of control.paths",
		"/dev/../etc/passwd": "not a clean absolute path",
	} {
		if err := c.check(path, unix.S_IFBLK); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", path, err, want)
		}
	}
	found, err := filepath.Glob("/dev/loop[0-9]*")
	if more, err2 := filepath.Glob("/dev/[sv]d[a-z]"); err == nil && err2 == nil {
		found = append(found, more...)
	}
	if len(found) == 0 {
		t.Log("this machine has no block device, so that none is permitted")
		return
	}
	if err := c.check(found[0], unix.S_IFBLK); err != nil {
		t.Errorf("%s: %v", found[0], err)
	}
}

// An administrator with a certificate is confined in all ways to name a file. A refusal changes nothing, and
// the owner of the target is not confined.
func TestRequestsAreConfined(t *testing.T) {
	a := apitest.New(t)
	a.Server("server")
	a.Client("admin")
	dir := t.TempDir()
	makeAll(t, dir, "luns/", "other/", "other/data", "other/host.secret")
	if err := os.WriteFile(filepath.Join(dir, "other/host.secret"), []byte("text-of-another-secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var log testkit.Log
	control := config.Control{Socket: filepath.Join(dir, "s"), Listen: "127.0.0.1:0", Paths: []string{dir + "/luns"}, TLS: config.ControlTLS{
		Cert: a.Path("server.pem"), Key: a.Path("server.key"), ClientCA: a.Path("ca.pem"),
	}, Access: []config.Access{{Certificate: "admin", Role: "admin"}}}
	d := serve(t, control, &log)
	<-d.Ready()
	url := "https://" + regexp.MustCompile(`address=(127\S+)`).FindStringSubmatch(log.String())[1]
	c := overTLS(t, a, "admin")
	send := func(method, path, body string) (int, string) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), method, url+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		if strings.HasPrefix(path, "/v1/config") || strings.HasPrefix(path, "/v1/cluster/config") {
			req.Header.Set("Content-Type", "application/yaml")
		}
		rsp, err := c.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer rsp.Body.Close()
		b, err := io.ReadAll(rsp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return rsp.StatusCode, string(b)
	}
	before := string(d.Document().Bytes())
	with := func(old, new string) string {
		t.Helper()
		if !strings.Contains(before, old) {
			t.Fatalf("the configuration lacks %q", old)
		}
		return strings.Replace(before, old, new, 1)
	}
	luns, target := "/v1/targets/"+store+"/luns", "/v1/targets/"+store
	data := filepath.Join(dir, "other/data")
	for _, tc := range []struct{ name, method, path, body, want string }{
		{"a file", "POST", luns, fmt.Sprintf(`{"backend": "file", "path": %q, "size": "1MiB"}`, data), data},
		{"a new file", "POST", luns, fmt.Sprintf(`{"backend": "file", "path": %q, "size": "1MiB"}`, data+"2"), data + "2"},
		{"a new full file", "POST", luns, fmt.Sprintf(`{"backend": "file", "path": %q, "size": "1MiB", "preallocate": true}`, data+"2"), data + "2"},
		{"a plan", "POST", luns + "?dry_run=true", fmt.Sprintf(`{"backend": "file", "path": %q, "size": "1MiB"}`, data), data},
		{"the source of a copy", "POST", luns, fmt.Sprintf(`{"backend": "file", "path": %q, "from": %q}`, dir+"/luns/copy", data), data},
		{"checksums", "POST", luns, fmt.Sprintf(`{"backend": "file", "path": %q, "size": "1MiB", "checksums": true, "checksums_path": %q}`, dir+"/luns/x", data+".sums"), data + ".sums"},
		{"a device", "POST", luns, `{"backend": "block", "path": "/dev/sda"}`, "/dev/sda"},
		{"a plug-in", "POST", luns, `{"backend": "gotgt", "plugin": "file", "path": "/etc/shadow"}`, "its plug-in decides what it opens"},
		{"the path of a LUN", "PATCH", luns + "/0", fmt.Sprintf(`{"backend": "file", "path": %q}`, data), data},
		{"a server of all gateways", "POST", "/v1/cluster/config/apply", "targets: [{name: " + store + "x, initiators: ['*'], luns: [{id: 1, backend: nbd, path: 'nbd://192.0.2.1/disk', shared: true, naa: '3000000000000001'}]}]\n", "nbd://192.0.2.1/disk"},
		{"a secret of all gateways", "POST", "/v1/cluster/config/apply?dry_run=true", fmt.Sprintf("targets: [{name: %sx, initiators: ['*'], auth: {method: chap, users: [{name: u, secret_file: %s}]}}]\n", store, dir+"/other/host.secret"), "host.secret"},
		{"a secret", "PATCH", target, fmt.Sprintf(`{"auth.users": "[{name: host, secret_file: %s}]"}`, dir+"/other/host.secret"), "host.secret"},
		{"the state", "POST", "/v1/config/apply", with("state_dir: ", "state_dir: "+dir+"/other/state #"), "other/state"},
		{"a document", "POST", "/v1/config/apply", with("backend: memory, size: 1MiB", "backend: file, path: "+data+", size: 1MiB"), data},
		{"a plan of a document", "POST", "/v1/config/plan", with("backend: memory, size: 1MiB", "backend: file, path: "+data+", size: 1MiB"), data},
		{"the paths", "POST", "/v1/config/apply", with("paths: [", "paths: [/etc, "), "control: only access may change by a request"},
		{"the rights of the process", "POST", "/v1/config/apply", with("state_dir: ", "process: {capabilities: [CAP_SYS_ADMIN]}\nstate_dir: "), "process: a request may not change"},
		{"the socket", "POST", "/v1/config/apply", with(dir+"/s\"", dir+"/s2\""), "control: only access may change by a request"},
	} {
		status, body := send(tc.method, tc.path, tc.body)
		if status != http.StatusForbidden || !strings.Contains(body, tc.want) || !strings.Contains(body, `"code":"forbidden"`) || !strings.Contains(body, "nothing was changed") {
			t.Errorf("%s: %d %s, want 403 with %q", tc.name, status, body, tc.want)
		}
		if strings.Contains(body, "text-of-another") {
			t.Errorf("%s: the answer has a secret: %s", tc.name, body)
		}
	}
	own := (&Server{d: d}).confinement()
	for _, name := range []string{"identities.json", "settings.json.spare", daemon.LeasesFile + ".X"} {
		if own.unprotected(filepath.Join(d.Effective().StateDir, name), nil) == nil {
			t.Errorf("callers may name %s of the state directory", name)
		}
	}
	refused := 0
	for _, e := range d.Events(0) {
		if e.Event == "control" && strings.Contains(fmt.Sprint(e.Attrs["reason"]), data+": callers may not name it") && strings.HasPrefix(fmt.Sprint(e.Attrs["by"]), "CN=admin at") {
			refused++
		}
	}
	if refused == 0 {
		t.Error("no event about refused paths")
	}
	if got := string(d.Document().Bytes()); got != before || len(d.State().Targets[0].LUNs) != 1 {
		t.Errorf("refused requests changed the configuration:\n%s", got)
	}
	for _, name := range []string{"other/data2", "other/data.sums", "luns/copy", "luns/x", "other/state"} {
		if _, err := os.Lstat(filepath.Join(dir, name)); err == nil {
			t.Errorf("a refused request created %s", name)
		}
	}

	for _, tc := range []struct{ method, path, body string }{ // each after those before
		{"POST", luns, fmt.Sprintf(`{"backend": "file", "path": %q, "size": "1MiB"}`, dir+"/luns/a")},
		{"POST", luns, fmt.Sprintf(`{"backend": "file", "path": %q, "size": "1MiB", "preallocate": true, "read_only": true}`, dir+"/luns/b")},
		{"POST", luns, fmt.Sprintf(`{"backend": "file", "path": %q, "from": %q}`, dir+"/luns/c", dir+"/luns/b")},
		{"PATCH", luns + "/1?disrupt=true", `{"checksums": "true"}`},
		{"POST", "/v1/config/apply?disrupt=true", with("role: admin}]", "role: admin}, {ou: new, role: read}]")},
	} {
		if status, body := send(tc.method, tc.path, tc.body); status != http.StatusOK {
			t.Errorf("%s %s %s: %d %s", tc.method, tc.path, tc.body, status, body)
		}
	}
	l := schema.LUN{Backend: "file", Path: data, Size: "1MiB"}
	if _, err := client.New(control.Socket).AddLUN(t.Context(), store, l, schema.Options{}); err != nil {
		t.Errorf("the owner of the target: %v", err)
	}

	// A snapshot of the owner's LUN would be a file where the administrator may name none.
	outside := luns + "/1" // the document of before removed the others
	for _, tc := range []struct{ name, method, path, body string }{
		{"a snapshot", "POST", outside + "/snapshots", `{"name": "one"}`},
		{"the plan of a snapshot", "POST", outside + "/snapshots?dry_run=true", `{"name": "one"}`},
		{"the end of a snapshot", "DELETE", outside + "/snapshots/one", ""},
		{"the clone of a snapshot", "POST", luns, fmt.Sprintf(`{"backend": "file", "path": %q, "clone": {"lun": 1, "snapshot": "one"}}`, dir+"/luns/d")},
		{"a clone there", "POST", luns, fmt.Sprintf(`{"backend": "file", "path": %q, "clone": {"lun": 1}}`, dir+"/other/d")},
	} {
		if status, body := send(tc.method, tc.path, tc.body); status != http.StatusForbidden || !strings.Contains(body, "callers may not name it") {
			t.Errorf("%s: %d %s, want 403", tc.name, status, body)
		}
	}
	for _, name := range []string{"..", "a/b", "a@b", ".x", ""} {
		if status, body := send("POST", luns+"/1/snapshots", fmt.Sprintf(`{"name": %q}`, name)); status != http.StatusBadRequest {
			t.Errorf("a snapshot named %q: %d %s, want 400", name, status, body)
		}
	}
	for _, name := range []string{"other/data@one.snap", "other/d", "luns/d"} {
		if _, err := os.Lstat(filepath.Join(dir, name)); err == nil {
			t.Errorf("a refused request created %s", name)
		}
	}
}
