package config

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/iser-target/iser-target/security"
)

// write creates a file with a mode and returns its path.
func write(t *testing.T, name, content string, mode os.FileMode) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(content), mode); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, mode); err != nil { // whatever the umask
		t.Fatal(err)
	}
	return path
}

// secured is good with authentication of the target; "%" stands for the keys of
// auth.
const secured = good + "    auth: {%}\n"

func TestCHAP(t *testing.T) {
	file := write(t, "a", "0x00112233445566778899aabbccddeeff\n", 0o600)
	c, err := load("f", []byte(strings.Replace(secured, "%", `method: chap, algorithms: [sha256, md5], mutual: {name: t, secret: tttttttttttt},
      users: [{name: a, secret_file: `+file+`, initiator: "iqn.1993-08.org.debian:*"}, {name: b, secret: bbbbbbbbbbbb, mutual: {name: u, secret: uuuuuuuuuuuu}}]`, 1)))
	if err != nil {
		t.Fatal(err)
	}
	chap, err := c.Targets[0].Auth.CHAP()
	if err != nil {
		t.Fatal(err)
	}
	a, _ := chap.Choose([]security.CHAPAlgorithm{5, 6, 7, 8})
	if a != security.CHAPSHA256 {
		t.Errorf("algorithm %d", a)
	}
	ch := security.NewCHAPChallenge(a)
	for _, tc := range []struct{ user, secret, initiator, target string }{
		{"a", "\x00\x11\x22\x33\x44\x55\x66\x77\x88\x99\xaa\xbb\xcc\xdd\xee\xff", "iqn.1993-08.org.debian:x", "t"},
		{"b", "bbbbbbbbbbbb", "iqn.2001-04.com.example", "u"},
		{"a", "bbbbbbbbbbbb", "iqn.1993-08.org.debian:x", ""},
		{"a", "\x00\x11\x22\x33\x44\x55\x66\x77\x88\x99\xaa\xbb\xcc\xdd\xee\xff", "iqn.2001-04.com.example", ""},
	} {
		login, err := chap.Authenticate(ch, tc.user, ch.Response(security.Secret(tc.secret)), tc.initiator)
		id := login.Target
		if id.Name != tc.target || (err == nil) != (tc.target != "") {
			t.Errorf("%q: %v, %v", tc.user, id, err)
		}
	}
	for _, auth := range []Auth{{}, {Method: "none"}, c.DiscoveryAuth} {
		if chap, err := auth.CHAP(); chap != nil || err != nil {
			t.Errorf("%+v: %v, %v", auth, chap, err)
		}
	}
	if _, err := (&Auth{Method: "chap", Users: []User{{Name: "a"}}}).CHAP(); err == nil {
		t.Error("user without secret")
	}

	// SEC-3723.5.8-2: no secret shows.
	var out bytes.Buffer
	fmt.Fprintf(&out, "%v %+v %#v", *c, *c, *c)
	if err := json.NewEncoder(&out).Encode(c); err != nil {
		t.Error(err)
	}
	for _, s := range []string{"bbbbbbbb", "tttttttt", "00112233", "\x00\x11"} {
		if strings.Contains(out.String(), s) {
			t.Errorf("%q shows in %s", s, out.String())
		}
	}
}

// A file has one line with a secret, and only its owner can read it.
func TestSecretFiles(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for path, reason := range map[string]string{
		write(t, "s", "aaaaaaaaaaaa", 0o600):                        "",
		write(t, "s", "aaaaaaaaaaaa\n", 0o400):                      "",
		write(t, "s", "aaaaaaaaaaaa\r\n", 0o600):                    "",
		write(t, "s", "0x"+strings.Repeat("00", 256)+"\r\n", 0o600): "",                                // SEC-7143.9.2.1-2
		write(t, "s", "aaaaaaaaaaaa", 0o640):                        "its mode is 0640. Run chmod 600", // SEC-3723.5.8-2
		write(t, "s", "aaaaaaaaaaaa", 0o604):                        "its mode is 0604",
		write(t, "s", "", 0o600):                                    "secret has 0 bytes",
		write(t, "s", "aaaaaaaaaaaa\nbbbbbbbbbbbb\n", 0o600):        "more than one line",
		write(t, "s", strings.Repeat("a", 100000), 0o600):           "larger than 516 bytes",
		write(t, "s", "0x"+strings.Repeat("00", 257), 0o600):        "secret has 257 bytes",
		dir:                           "not a regular file",
		fifo:                          "not a regular file",
		filepath.Join(dir, "missing"): "no such file",
	} {
		_, err := load("f", []byte(strings.Replace(secured, "%", "method: chap, users: [{name: a, secret_file: "+path+"}]", 1)))
		if reason == "" {
			if err != nil {
				t.Error(err)
			}
			continue
		}
		wantErrors(t, err, []string{reason})
		if s := unplaced(err); !strings.HasPrefix(s, "f: targets[0].auth.users[0].secret_file: "+path+": ") || strings.Contains(s, "aaaa") {
			t.Error(s)
		}
	}
}

// SEC-3723.5.8-2: only the owner can read a configuration that has secrets.
func TestFileWithSecrets(t *testing.T) {
	inline := strings.Replace(secured, "%", "method: chap, users: [{name: a, secret: aaaaaaaaaaaa}]", 1)
	for mode, ok := range map[os.FileMode]bool{0o600: true, 0o400: true, 0o640: false, 0o644: false} {
		path := write(t, "c.yaml", inline, mode)
		if _, err := Load(path); (err == nil) != ok || !ok && !strings.HasPrefix(err.Error(), path+": has secrets, but other users can read it: its mode is 0") {
			t.Errorf("mode %o: %v", mode, err)
		}
	}
	file := write(t, "a", "aaaaaaaaaaaa", 0o600)
	if _, err := Load(write(t, "c.yaml", strings.Replace(secured, "%", "method: chap, users: [{name: a, secret_file: "+file+"}]", 1), 0o644)); err != nil {
		t.Error(err)
	}
}

// The environment can name files of secrets, but not have secrets.
func TestDiscoveryAuthEnvironment(t *testing.T) {
	const discovery = good + "discovery_auth: {method: none, users: [{name: a, secret_file: %}]}\n"
	in := []byte(strings.Replace(discovery, "%", write(t, "a", "aaaaaaaaaaaa", 0o600), 1))
	t.Setenv("ISER_TARGET_DISCOVERY_AUTH_METHOD", "chap")
	t.Setenv("ISER_TARGET_DISCOVERY_AUTH_MUTUAL_NAME", "t")
	t.Setenv("ISER_TARGET_DISCOVERY_AUTH_MUTUAL_SECRET_FILE", write(t, "t", "tttttttttttt", 0o600))
	c, err := load("f", in)
	if err != nil {
		t.Fatal(err)
	}
	if chap, err := c.DiscoveryAuth.CHAP(); chap == nil || err != nil || c.DiscoveryAuth.Mutual.Secret != "tttttttttttt" {
		t.Error(chap, err)
	}
	t.Setenv("ISER_TARGET_DISCOVERY_AUTH_MUTUAL_SECRET_FILE", "/nowhere/t")
	t.Setenv("ISER_TARGET_DISCOVERY_AUTH_MUTUAL_SECRET", "tttttttttttt")
	_, err = load("f", in)
	wantErrors(t, err, []string{
		"environment: ISER_TARGET_DISCOVERY_AUTH_MUTUAL_SECRET: unknown variable",
		"environment: ISER_TARGET_DISCOVERY_AUTH_MUTUAL_SECRET_FILE: /nowhere/t: no such file",
	})
}

func TestWarnings(t *testing.T) {
	const chap = "method: chap, users: [{name: a, secret: aaaabbbbcccd}"
	for _, tc := range []struct{ listen, auth, more, want string }{
		{"127.0.0.1:3260", "", "", ""},
		{`"[::1]:3260"`, "", "", ""},
		{"localhost:3260", "", "", ""},
		{"0.0.0.0:3260", "", "", "targets[0].auth: no authentication: any host that can connect to portals[0] (0.0.0.0:3260)"}, // ISCSI-9-1, SEC-3723.2.1-2
		{`":3260"`, "", "", "targets[0].auth: no authentication"},
		{"storage.example.com:3260", "method: none", "", "targets[0].auth: no authentication"},
		{"127.0.0.1:3260\n  - listen: 192.0.2.1:3260", "", "", "any host that can connect to portals[1] (192.0.2.1:3260)"},
		{"127.0.0.1:3260\n  - listen: 192.0.2.1:3260\n    tpgt: 2", "", "    portal_groups: [1]", ""},
		{"127.0.0.1:3260\n  - listen: 192.0.2.1:3260\n    tpgt: 2", "", "    portal_groups: [1, 2]", "any host that can connect to portals[1] (192.0.2.1:3260)"},
		{"192.0.2.1:3260", chap + "]", "", ""},
		{"192.0.2.1:3260", "", "    redirect: {to: 192.0.2.2:3260}", ""},
		{"192.0.2.1:3260", chap + ", {name: b, secret: aaaabbbbcccd}]", "", "targets[0].auth.users[1]: has the secret of targets[0].auth.users[0]"}, // SEC-7143.9.2.1-11
		{"192.0.2.1:3260", chap + "]", "discovery_auth: {" + chap + "]}", ""},                                                                       // one initiator
		{"192.0.2.1:3260", chap + "]", "discovery_auth: {method: chap, users: [{name: b, secret: aaaabbbbcccd}]}", "discovery_auth.users[0]: has the secret of targets[0].auth.users[0]"},
		{"192.0.2.1:3260", chap + "]", "metrics: {listen: \"127.0.0.1:80\"}", ""},
		{"192.0.2.1:3260", chap + "]", "metrics: {listen: \":80\"}", "metrics.listen: any host that can connect to :80 sees"},
		{"192.0.2.1:3260", chap + "]", "dashboard: {listen: \"[::1]:80\"}", ""},
		{"192.0.2.1:3260", chap + "]", "dashboard: {listen: \":80\"}", "dashboard.listen: any host that can connect to :80 sees"},
		{"192.0.2.1:3260", chap + "]", "mpa: {crc: off}", "mpa.crc: off: unless the initiator asks for CRCs"}, // MPA-4.4-6
		{"192.0.2.1:3260", chap + "]", "mpa: {crc: auto}", ""},
		{"192.0.2.1:3260\n    transports: [tcp]", chap + "]", "mpa: {crc: off}", ""},
		{"127.0.0.1:3260", chap + "]", "mpa: {crc: off}", ""},
	} {
		in := strings.Replace(strings.Replace(secured, "127.0.0.1:3260", tc.listen, 1), "%", tc.auth, 1) + tc.more
		c, err := load("f", []byte(in))
		if err != nil {
			t.Errorf("%v in\n%s", err, in)
			continue
		}
		got := c.Warnings()
		if tc.want == "" && len(got) > 0 || tc.want != "" && (len(got) != 1 || !strings.Contains(got[0], tc.want)) {
			t.Errorf("%q, want %q", got, tc.want)
		}
		if slices.ContainsFunc(got, func(s string) bool { return strings.Contains(s, "aaaa") }) {
			t.Errorf("secret in %q", got)
		}
	}
}

// A CHAP user without an initiator pattern can use any initiator name, and LUN masks go by
// that name.
func TestWarningsOfMasks(t *testing.T) {
	const users = "method: chap, users: [{name: a, secret: aaaabbbbcccd, initiator: \"*:a\"}, {name: b, secret: bbbccdddeeff}]"
	for lun, want := range map[string]bool{
		"size: 1GiB":                         false,
		"size: 1GiB, read_only: true":        false,
		`size: 1GiB, initiators: ["*:a"]`:    true,
		`size: 1GiB, read_only_for: ["*:b"]`: true,
	} {
		c, err := load("f", []byte(strings.Replace(strings.Replace(secured, "%", users, 1), "size: 1GiB", lun, 1)))
		if err != nil {
			t.Fatal(err)
		}
		got := c.Warnings()
		if !want && len(got) > 0 || want && (len(got) != 1 || !strings.HasPrefix(got[0], "targets[0].auth.users[1].initiator: is not set")) {
			t.Errorf("%s: %q", lun, got)
		}
	}
}

// A secret that is easy to guess, and directories in which others can replace a file, are named.
func TestWarningsOfSecrets(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "s")
	if err := os.WriteFile(file, []byte("0123456789abcdef\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	warnings := func(users string) []string {
		t.Helper()
		c, err := load("f", []byte(strings.Replace(secured, "%", "method: chap, users: ["+users+"]", 1)))
		if err != nil {
			t.Fatal(err)
		}
		return c.Warnings()
	}
	got := warnings("{name: a, secret: abcabcabcabc, initiator: \"*:a\"}")
	if len(got) != 1 || !strings.HasPrefix(got[0], "targets[0].auth.users[0].secret: has only 3 different characters") || strings.Contains(got[0], "abc") {
		t.Errorf("%q", got)
	}
	if got := warnings("{name: a, secret_file: " + file + ", initiator: \"*:a\"}"); len(got) != 0 {
		t.Errorf("%q", got)
	}
	for mode, want := range map[fs.FileMode]string{
		0o777:                 file + ": other users can replace it: the mode of " + dir + " is 0777. Run chmod go-w " + dir,
		0o770:                 file + ": other users can replace it: the mode of " + dir + " is 0770. Run chmod go-w " + dir,
		0o777 | fs.ModeSticky: "", 0o755: "",
	} {
		if err := os.Chmod(dir, mode); err != nil {
			t.Fatal(err)
		}
		if got := warnings("{name: a, secret_file: " + file + ", initiator: \"*:a\"}"); strings.Join(got, "\n") != want {
			t.Errorf("mode %v: %q, want %q", mode, got, want)
		}
	}
}

// A target that redirects needs no LUNs.
func TestRedirect(t *testing.T) {
	in := good[:strings.Index(good, "    luns")] + "    redirect: {to: \"[2001:db8::1]:3260\", permanent: true}\n"
	c, err := load("f", []byte(in))
	if err != nil {
		t.Fatal(err)
	}
	if r := c.Targets[0].Redirect; r != (Redirect{"[2001:db8::1]:3260", true}) || len(c.Targets[0].LUNs) != 0 {
		t.Errorf("%+v", c.Targets[0])
	}
}

// A previous secret follows the rules of secrets, and its errors name its keys.
func TestPreviousSecret(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "old.secret")
	if err := os.WriteFile(file, []byte("secret-of-before\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	user := func(more string) string {
		return good + "    auth: {method: chap, users: [{name: a, secret: aaaaaaaaaaaa, " + more + "}], mutual: {name: t, secret: tttttttttttt}}\n"
	}
	c, err := load("f", []byte(user("previous_secret_file: "+file)))
	if err != nil || c.Targets[0].Auth.Users[0].Previous != "secret-of-before" {
		t.Fatalf("%+v, %v", c, err)
	}
	chap, err := c.Targets[0].Auth.CHAP()
	if err != nil {
		t.Fatal(err)
	}
	ch := security.NewCHAPChallenge(security.CHAPSHA256)
	for _, secret := range []security.Secret{"aaaaaaaaaaaa", "secret-of-before"} {
		if _, err := chap.Authenticate(ch, "a", ch.Response(secret), "iqn.2001-04.com.example"); err != nil {
			t.Error(err)
		}
	}
	for more, want := range map[string]string{
		"previous_secret: short": "f: targets[0].auth.users[0].previous_secret: secret has 5 bytes, less than 12",
		"previous_secret: bbbbbbbbbbbb, previous_secret_file: " + file: "f: targets[0].auth.users[0].previous_secret_file: cannot be combined with previous_secret",
		"previous_secret_file: " + dir + "/none":                       "f: targets[0].auth.users[0].previous_secret_file: " + dir + "/none: no such file",
		"previous_secret: tttttttttttt":                                "f: targets[0].auth.mutual: has the secret of targets[0].auth.users[0]",
	} {
		if _, err := load("f", []byte(user(more))); err == nil || !strings.Contains(unplaced(err), want) || strings.Contains(err.Error(), "bbbb") {
			t.Errorf("%s: %v, want %q", more, err, want)
		}
	}
}

// Files that another user can change are refused, as sshd does: who changes them decides what is served.
func TestFilesOfOthersAreRefused(t *testing.T) {
	dir := t.TempDir()
	path, secret := filepath.Join(dir, "c.yaml"), filepath.Join(dir, "a.secret")
	text := good + "    auth: {method: chap, users: [{name: a, secret_file: " + secret + "}]}\n"
	for name, content := range map[string]string{path: text, secret: "aaaaaaaaaaaa\n"} {
		if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	check := func(what, want string) {
		t.Helper()
		if _, err := Load(path); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", what, err, want)
		}
	}
	chmod := func(name string, mode os.FileMode) {
		t.Helper()
		if err := os.Chmod(name, mode); err != nil {
			t.Fatal(err)
		}
	}
	for mode, want := range map[os.FileMode]string{
		0o600: "", 0o644: "", 0o400: "", 0o660: path + ": other users can write to it: its mode is 0660. Run chmod go-w", 0o602: path + ": other users can write to it",
	} {
		chmod(path, mode)
		check(mode.String(), want)
	}
	chmod(path, 0o644)
	chmod(secret, 0o620)
	check("a secret that others can write", secret+": has secrets, but other users can write to it: its mode is 0620. Run chmod 600")
	chmod(secret, 0o600)
	if os.Geteuid() != 0 {
		t.Log("not root: the owners of files cannot change")
		return
	}
	for _, name := range []string{path, secret} {
		if err := os.Chown(name, 1001, -1); err != nil {
			t.Fatal(err)
		}
		check("of another user", name+": belongs to uid 1001, which can change it: it must belong to root or to uid 0. Run chown")
		if err := os.Chown(name, 0, -1); err != nil {
			t.Fatal(err)
		}
	}
	check("of root again", "")
}

// Errors about YAML show neither a secret nor a value where one may be.
func TestErrorsOfYAMLShowNoSecret(t *testing.T) {
	for text, want := range map[string]string{
		"    auth: {method: chap, users: [{name: a, secret: *hunter2-hunter2}]}\n":       "unknown anchor. Put a value that begins with * in quotes",
		"    auth: {method: chap, users: [{name: a, secret: !!int hunter2-hunter2}]}\n":  "cannot decode !!str a value as a !!int",
		"    auth: {method: chap, users: hunter2-hunter2}\n":                             "targets[0].auth.users: must be a list, not a string",
		"    auth: {method: chap, users: [hunter2-hunter2]}\n":                           "must be a map with the keys",
		"    auth: {method: chap, mutual: hunter2-hunter2}\n":                            "must be a map with the keys",
		"    auth: {method: chap, users: [{name: a, secret: [hunter2-hunter2]}]}\n":      "secret: must be a string",
		"    auth: {method: chap, users: [{name: a, secert: hunter2-hunter2}]}\n":        "unknown key, did you mean secret?",
		"    auth: {method: chap, users: [{name: a, secret: hunter2-hunter2: more}]}\n":  "yaml",
		"    auth: {method: chap, users: [{name: a, secret: \"hunter2-hunter2\\q\"}]}\n": "yaml",
	} {
		_, err := load("f", []byte(good+text))
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v, want %q and no secret", text, err, want)
		}
	}
}
