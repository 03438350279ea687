package exec

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iser-target/iser-target/security/ipsec"
	"golang.org/x/sys/unix"
)

// script writes a program. It is a shell script, but the driver starts it without a shell.
func script(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "verdict")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

func driver(t *testing.T, o Options) *Driver {
	t.Helper()
	d, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

var asked = ipsec.Question{
	Moment: ipsec.AtLogin, Initiator: "iqn.2026-01.org.example:alice", Target: "iqn.2026-01.org.example:t", Demand: ipsec.Required,
	Flow:    ipsec.Flow{Local: netip.MustParseAddrPort("192.0.2.1:3260"), Remote: netip.MustParseAddrPort("[2001:db8::2]:40000")},
	Profile: &ipsec.Profile{Name: "p", Suites: []string{"aes128gcm16"}, MaxLifetime: time.Hour, Identities: []ipsec.IdentityRule{{Initiator: "*", ID: "*.example.org"}}},
}

const limit = 20 * time.Second // of a loaded machine

func TestDecide(t *testing.T) {
	for _, tc := range []struct {
		name, script string
		want         ipsec.Verdict
		fault        string
	}{
		{"permit", `cat >/dev/null; echo '{"action":"permit","suite":"esp-tunnel aes128gcm16","spi_in":4097,"identity":"alice"}'`, ipsec.Verdict{Action: ipsec.Permit, Suite: "esp-tunnel aes128gcm16", SPIIn: 4097, Identity: "alice"}, ""},
		{"deny", `echo '{"action":"deny","reason":"no keys. Ask the network team","keys_gone":true}'`, ipsec.Verdict{Action: ipsec.Deny, Reason: "no keys. Ask the network team", KeysGone: true}, ""},
		{"mark", `echo '{"action":"mark","reason":"old keys. Rekey"}'`, ipsec.Verdict{Action: ipsec.Mark, Reason: "old keys. Rekey"}, ""},
		{"control characters", `printf '{"action":"deny","reason":"a\\u001b[31mb\\nc. Do\\u202e"}'`, ipsec.Verdict{Action: ipsec.Deny, Reason: "a [31mb c. Do"}, ""},
		{"nothing", `cat >/dev/null`, ipsec.Verdict{}, "it writes no verdict"},
		{"no JSON", `echo permit`, ipsec.Verdict{}, "its verdict: invalid character 'p'"},
		{"another action", `echo '{"action":"allow"}'`, ipsec.Verdict{}, `action "allow" is not permit, mark or deny`},
		{"no action", `echo '{}'`, ipsec.Verdict{}, `action "" is not permit, mark or deny`},
		{"null", `echo null`, ipsec.Verdict{}, "null is not an object"},
		{"denial without a reason", `echo '{"action":"deny","reason":"  "}'`, ipsec.Verdict{}, "action deny needs a reason"},
		{"unknown field", `echo '{"action":"permit","because":"x"}'`, ipsec.Verdict{}, `unknown field "because"`},
		{"two verdicts", `echo '{"action":"permit"}{"action":"deny"}'`, ipsec.Verdict{}, "something follows the object"},
		{"failure", `echo '{"action":"permit"}'; echo 'database is down' >&2; exit 3`, ipsec.Verdict{}, "exit status 3: database is down"},
		{"killed", `kill -9 $$`, ipsec.Verdict{}, "signal: killed"},
		{"too much", `while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done`, ipsec.Verdict{}, "it writes more than 65536 bytes to standard output"},
		{"too much on standard error", `i=0; while [ $i -lt 3000 ]; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx >&2; i=$((i+1)); done; echo '{"action":"permit"}'`, ipsec.Verdict{Action: ipsec.Permit}, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			path := script(t, tc.script)
			v, err := driver(t, Options{Command: []string{path}, Timeout: limit}).Decide(t.Context(), asked)
			if tc.fault == "" && (err != nil || v != tc.want) {
				t.Errorf("%+v, %v; want %+v", v, err, tc.want)
			}
			if tc.fault != "" && (err == nil || !strings.Contains(err.Error(), tc.fault) || !strings.Contains(err.Error(), path) || len(err.Error()) > 1000) {
				t.Errorf("%+v, %v; want %q", v, err, tc.fault)
			}
		})
	}
}

// The program gets the question on standard input, its arguments as they are, and nothing of the environment or the descriptors of the target.
func TestQuestion(t *testing.T) {
	t.Setenv("CHAP_SECRET", "must not be seen")
	out := filepath.Join(t.TempDir(), "seen")
	path := script(t, `cat >"$1"; env >"$1.env"; echo "$2" >"$1.arg"; echo '{"action":"permit"}'`)
	d := driver(t, Options{Command: []string{path, out, `$(id) "a b"; c`}, Timeout: limit, Kernel: kernel{}})
	if _, err := d.Decide(t.Context(), asked); err != nil {
		t.Fatal(err)
	}
	read := func(name string) string {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	want := `{"version":1,"moment":"login","local":"192.0.2.1:3260","remote":"[2001:db8::2]:40000","initiator":"iqn.2026-01.org.example:alice",` +
		`"target":"iqn.2026-01.org.example:t","demand":"required","profile":{"name":"p","suites":["aes128gcm16"],"max_lifetime_seconds":3600,` +
		`"identities":[{"initiator":"*","id":"*.example.org"}]},"kernel":{"in":[{"spi":4097,"source":"192.0.2.2","destination":"192.0.2.1","reqid":7,` +
		`"mode":"tunnel","suite":"esp-tunnel aes128-sha1","replay_window":32,"lifetime_seconds":60}],"out":[],"in_policy":true,"out_policy":false}}` + "\n"
	if got := read(out); got != want {
		t.Errorf("question\n%s want\n%s", got, want)
	}
	if got := read(out + ".arg"); got != "$(id) \"a b\"; c\n" {
		t.Errorf("argument %q", got)
	}
	if got := read(out + ".env"); strings.Contains(got, "CHAP_SECRET") || !strings.Contains(got, "PATH=/usr/local/sbin") {
		t.Errorf("environment %q", got)
	}
}

// kernel is a driver that knows an SA.
type kernel struct{}

func (kernel) Name() string                  { return "kernel" }
func (kernel) Check(context.Context) []error { return []error{errors.New("missing")} }
func (kernel) Close() error                  { return nil }
func (kernel) Look(context.Context, ipsec.Flow) (ipsec.Protection, error) {
	return ipsec.Protection{InPolicy: true, In: []ipsec.SA{{
		SPI: 0x1001, Source: netip.MustParseAddr("192.0.2.2"), Destination: netip.MustParseAddr("192.0.2.1"), ReqID: 7, Mode: ipsec.Tunnel,
		Encryption: ipsec.Algorithm{Name: "cbc(aes)", KeyBits: 128}, Authentication: ipsec.Algorithm{Name: "hmac(sha1)", KeyBits: 160, ICVBits: 96},
		ReplayWindow: 32, Lifetime: time.Minute,
	}}}, nil
}
func (kernel) Watch(ctx context.Context, changed func(ipsec.Change)) error {
	changed(ipsec.Change{Kind: ipsec.Added, SPI: 5})
	<-ctx.Done()
	return ctx.Err()
}

// A program that hangs is killed at the end of the time limit, with all that it started.
func TestTimeLimit(t *testing.T) {
	pid := filepath.Join(t.TempDir(), "pid")
	path := script(t, `sleep 600 & echo $! >`+pid+`.tmp; mv `+pid+`.tmp `+pid+`; sleep 600`)
	d := driver(t, Options{Command: []string{path}, Timeout: 3 * time.Second})
	began := time.Now()
	_, err := d.Decide(t.Context(), asked)
	if took := time.Since(began); err == nil || !strings.Contains(err.Error(), "no verdict within 3s: it was killed") || took < 3*time.Second || took > limit {
		t.Errorf("%v after %v", err, took)
	}
	gone(t, pid)
	// The caller may have less patience.
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := d.Decide(ctx, asked); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

// What a program leaves behind is killed when it ends.
func TestGroupIsKilled(t *testing.T) {
	pid := filepath.Join(t.TempDir(), "pid")
	path := script(t, `sleep 600 >/dev/null 2>&1 & echo $! >`+pid+`; echo '{"action":"permit"}'`)
	if v, err := driver(t, Options{Command: []string{path}, Timeout: limit}).Decide(t.Context(), asked); err != nil || v.Action != ipsec.Permit {
		t.Errorf("%+v, %v", v, err)
	}
	gone(t, pid)
}

// gone fails if the process in the file does not end.
func gone(t *testing.T, file string) {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(limit); ; time.Sleep(10 * time.Millisecond) {
		// A zombie of an init that does not wait is gone, too.
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil || strings.Contains(string(stat), ") Z ") {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("process %d lives: %s", pid, stat)
		}
	}
}

// A bounded number of programs runs at a time. Questions beyond wait within their time limit.
func TestConcurrent(t *testing.T) {
	dir := t.TempDir()
	path := script(t, `mkdir `+dir+`/$$; n=$(ls `+dir+` | wc -l); sleep 0.1; rmdir `+dir+`/$$; echo "{\"action\":\"permit\",\"spi_in\":$n}"`)
	d := driver(t, Options{Command: []string{path}, Timeout: limit, Concurrent: 2})
	var most atomic.Uint32
	var all sync.WaitGroup
	for range 10 {
		all.Go(func() {
			v, err := d.Decide(t.Context(), asked)
			if err != nil {
				t.Error(err)
			}
			for old := most.Load(); v.SPIIn > old && !most.CompareAndSwap(old, v.SPIIn); old = most.Load() {
			}
		})
	}
	all.Wait()
	if n := most.Load(); n < 1 || n > 2 {
		t.Errorf("%d programs at a time", n)
	}
	slow := driver(t, Options{Command: []string{script(t, "sleep 600")}, Timeout: time.Second, Concurrent: 1})
	var busy atomic.Int32
	for range 4 {
		all.Go(func() {
			if _, err := slow.Decide(t.Context(), asked); err != nil && strings.Contains(err.Error(), "no verdict within 1s: 1 programs run already") {
				busy.Add(1)
			}
		})
	}
	all.Wait()
	if busy.Load() < 1 {
		t.Error("no question waited")
	}
}

// Close kills what runs.
func TestClose(t *testing.T) {
	started := filepath.Join(t.TempDir(), "started")
	d, err := New(Options{Command: []string{script(t, "echo $$ >"+started+".tmp; mv "+started+".tmp "+started+"; sleep 600")}, Timeout: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	result := make(chan error)
	go func() {
		_, err := d.Decide(context.Background(), asked)
		result <- err
	}()
	for deadline := time.Now().Add(limit); ; time.Sleep(5 * time.Millisecond) {
		if _, err := os.Stat(started); err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the program does not start")
		}
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	if err := <-result; !errors.Is(err, context.Canceled) {
		t.Errorf("Decide: %v", err)
	}
	gone(t, started)
	if _, err := d.Decide(context.Background(), asked); err == nil {
		t.Error("a question after Close gets a verdict")
	}
}

func TestWatch(t *testing.T) {
	d := driver(t, Options{Command: []string{"/bin/true"}, Recheck: 20 * time.Millisecond, Kernel: kernel{}})
	ctx, cancel := context.WithCancel(t.Context())
	kinds := map[ipsec.ChangeKind]int{}
	if err := d.Watch(ctx, func(c ipsec.Change) {
		kinds[c.Kind]++
		if kinds[ipsec.Lost] >= 2 && kinds[ipsec.Added] == 1 {
			cancel()
		}
	}); !errors.Is(err, context.Canceled) {
		t.Errorf("Watch: %v", err)
	}
}

func TestNew(t *testing.T) {
	for _, tc := range []struct {
		o     Options
		fault string
	}{
		{Options{}, "ipsec.exec.command: it is empty"},
		{Options{Command: []string{"verdict"}}, `"verdict" is not an absolute path`},
		{Options{Command: []string{"/bin/true", "a\x00b"}}, "it has a NUL"},
		{Options{Command: []string{"/bin/true"}, Concurrent: 65}, "at most 64 programs"},
		{Options{Command: []string{"/bin/true"}, Timeout: -1}, "must not be negative"},
	} {
		if d, err := New(tc.o); err == nil || !strings.Contains(err.Error(), tc.fault) {
			t.Errorf("%+v: %v, %v", tc.o, d, err)
		}
	}
}

func TestCheck(t *testing.T) {
	good := script(t, "exit 0")
	if errs := driver(t, Options{Command: []string{good}}).Check(t.Context()); len(errs) != 0 {
		t.Errorf("%v", errs)
	}
	if errs := driver(t, Options{Command: []string{good}, Kernel: kernel{}}).Check(t.Context()); len(errs) != 1 || errs[0].Error() != "missing" {
		t.Errorf("with a kernel: %v", errs)
	}
	if errs := driver(t, Options{Command: []string{good}, Kernel: kernel{}, ClearText: true}).Check(t.Context()); len(errs) != 0 {
		t.Errorf("without need of ESP: %v", errs)
	}
	plain := filepath.Join(t.TempDir(), "plain")
	open := filepath.Join(t.TempDir(), "open")
	for path, mode := range map[string]os.FileMode{plain: 0o644, open: 0o777} {
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
	for _, tc := range []struct{ path, fault string }{
		{"/nonexistent/verdict", "no such file or directory. Install the program"},
		{t.TempDir(), "is not a program"},
		{plain, "cannot be executed. Run: chmod 0755 "},
		{open, "others may change "},
	} {
		d := driver(t, Options{Command: []string{tc.path}})
		if errs := d.Check(t.Context()); len(errs) != 1 || !strings.Contains(errs[0].Error(), tc.fault) {
			t.Errorf("%s: %v, want %q", tc.path, errs, tc.fault)
		}
		if _, err := d.Decide(t.Context(), asked); err == nil {
			t.Errorf("%s: a verdict", tc.path)
		}
	}
	if os.Geteuid() == 0 {
		if err := os.Chown(good, 65534, 65534); err != nil {
			t.Fatal(err)
		}
		if errs := driver(t, Options{Command: []string{good}}).Check(t.Context()); len(errs) != 1 || !strings.Contains(errs[0].Error(), "Run: chown root ") {
			t.Errorf("a program of another user: %v", errs)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"action":"deny","reason":"a. b","keys_gone":true}`))
	f.Add([]byte(`{"action":"permit","suite":"esp","spi_in":1,"spi_out":4294967295,"identity":"x"}`))
	f.Add([]byte("{\"action\":\"mark\",\"reason\":\"\xff\\u0000\"}"))
	f.Fuzz(func(t *testing.T, b []byte) {
		v, err := parse(b)
		if err != nil {
			return
		}
		if len(v.Reason) > maxReason || len(v.Suite) > maxWord || v.Action != ipsec.Permit && v.Reason == "" {
			t.Errorf("%+v", v)
		}
		if _, err := json.Marshal(v); err != nil {
			t.Error(err)
		}
	})
}

// No program of these tests remains.
func TestMain(m *testing.M) {
	code := m.Run()
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, unix.WNOHANG, nil)
		if err == unix.EINTR {
			continue
		}
		if err != unix.ECHILD {
			fmt.Printf("a program remains: %d, %v\n", pid, err)
			code = 1
		}
		break
	}
	os.Exit(code)
}

// The program of docs/ipsec-exec.md decides as the page says.
func TestExampleOfThePage(t *testing.T) {
	page, err := os.ReadFile("../../../docs/ipsec-exec.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, ok := strings.Cut(string(page), "```sh\n#!/bin/sh\n")
	text, rest, ok2 := strings.Cut(text, "```\n")
	if !ok || !ok2 {
		t.Fatal("the page has no program")
	}
	d := driver(t, Options{Command: []string{script(t, text)}, Timeout: limit})
	v, err := d.Decide(t.Context(), asked)
	if err != nil || v.Action != ipsec.Deny || !strings.Contains(rest, `{"action":"deny","reason":"`+v.Reason+`"}`) {
		t.Errorf("%+v, %v", v, err)
	}
	q := asked
	q.Flow.Remote = netip.MustParseAddrPort("192.0.2.7:50000")
	if v, err := d.Decide(t.Context(), q); err != nil || v.Action != ipsec.Permit || v.Suite != "macsec" {
		t.Errorf("%+v, %v", v, err)
	}
}
