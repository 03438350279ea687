package config

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/security/limits"
)

// good is a configuration; tests replace a part of it.
const good = `
portals:
  - listen: 127.0.0.1:3260
targets:
  - name: iqn.2026-11.io.example:store
    initiators: ["*"]
    luns:
      - {id: 0, backend: memory, size: 1GiB}
`

// load returns the configuration of a file with this text. It fails if the schema refuses what Load accepts.
func load(source string, file []byte) (*Config, error) {
	d, err := NewDocument(source, file)
	if err != nil {
		return nil, err
	}
	c, err := d.Config()
	if err != nil {
		return nil, err
	}
	if err := bySchema(file); err != nil {
		return nil, fmt.Errorf("Load accepts it, but not schema.json: %w", err)
	}
	return c, nil
}

func TestLoadStore(t *testing.T) {
	c, err := Load("../examples/store.yaml")
	if err != nil {
		t.Fatal(err)
	}
	want := base()
	want.Portals = []Portal{{Listen: "0.0.0.0:3260", Advertise: []string{"192.0.2.10:3260"}, TPGT: 1}}
	want.Targets = []Target{{
		Name:       "iqn.2026-11.io.example:store",
		Initiators: []string{"iqn.1993-08.org.debian:*"},
		InitialR2T: true, FirstBurst: 64 << 10, MaxBurst: 1 << 20, MaxOutstandingR2T: 1, MaxRecvSegment: 256 << 10,
		LUNs: []LUN{
			{ID: 0, Backend: "memory", Size: 1 << 30, BlockSize: 512},
			{ID: 1, Backend: "file", Path: "/var/lib/iser-target/one.img", Size: 10 << 30, BlockSize: 4096},
			{ID: 2, Backend: "block", Path: "/dev/sdb", ReadOnly: true},
		},
	}}
	if !reflect.DeepEqual(*c, want) {
		t.Errorf("%+v\nwant %+v", *c, want)
	}
}

func TestDefault(t *testing.T) {
	c, err := load(defaultSource, defaultYAML)
	if err != nil {
		t.Fatal(err)
	}
	want := base()
	want.StateDir = ""
	want.Portals = []Portal{{Listen: "127.0.0.1:3260", TPGT: 1}}
	want.Targets = []Target{{
		Name:       "iqn.2026-11.io.github.iser-target:default",
		Initiators: []string{"*"},
		InitialR2T: true, FirstBurst: 64 << 10, MaxBurst: 1 << 20, MaxOutstandingR2T: 1, MaxRecvSegment: 256 << 10,
		LUNs: []LUN{{ID: 0, Backend: "memory", Size: 1 << 30, BlockSize: 512}},
	}}
	if !reflect.DeepEqual(*c, want) {
		t.Errorf("%+v\nwant %+v", *c, want)
	}
}

// ISCSI-15-1: a portal can have any port. The examples and the default use 3260, never 860.
func TestExamples(t *testing.T) {
	if c, err := load("f", []byte(strings.Replace(good, "127.0.0.1:3260", "127.0.0.1:860", 1))); err != nil || c.Portals[0].Listen != "127.0.0.1:860" {
		t.Errorf("%+v, %v", c, err)
	}
	if c, err := load(defaultSource, defaultYAML); err != nil || len(c.Portals) != 1 || !strings.HasSuffix(c.Portals[0].Listen, ":3260") {
		t.Errorf("%+v, %v", c, err)
	}
	files, err := filepath.Glob("../examples/*.yaml")
	if err != nil || len(files) < 7 {
		t.Fatalf("%q, %v", files, err)
	}
	for _, f := range files {
		c, err := Load(f)
		if c != nil {
			for _, p := range c.Portals {
				if !strings.HasSuffix(p.Listen, ":3260") {
					t.Errorf("%s listens on %s", f, p.Listen)
				}
			}
		}
		if filepath.Base(f) == "chap.yaml" { // all that is missing are the secrets
			file := func(key, name string) string {
				return f + ": " + key + ".secret_file: /etc/iser-target/" + name + ".secret: no such file or directory"
			}
			wantErrors(t, err, []string{
				file("targets[0].auth.users[0]", "host1"), file("targets[0].auth.users[1]", "host2"), file("targets[0].auth.mutual", "target"),
				file("discovery_auth.users[0]", "discovery"),
			})
		} else if err != nil {
			t.Error(err)
		}
	}
}

// The keys of access.yaml have the documented effect.
func TestLoadAccess(t *testing.T) {
	c, err := Load("../examples/access.yaml")
	if err != nil {
		t.Fatal(err)
	}
	cluster, images := &c.Targets[0], &c.Targets[1]
	if got := c.TPGTs(cluster); !slices.Equal(got, []uint16{1, 2}) {
		t.Errorf("groups of cluster: %d", got)
	}
	if got := c.TPGTs(images); !slices.Equal(got, []uint16{1}) || images.ServedBy(c.Portals[2]) || !images.ServedBy(c.Portals[1]) {
		t.Errorf("groups of images: %d", got)
	}
	if l := cluster.LUNs[0]; !slices.Equal(l.Initiators, []string{"*:node1"}) || l.ReadOnlyFor != nil {
		t.Errorf("%+v", l)
	}
	if l := cluster.LUNs[2]; !slices.Equal(l.ReadOnlyFor, []string{"*:backup"}) || l.Initiators != nil {
		t.Errorf("%+v", l)
	}
}

func TestEveryKey(t *testing.T) {
	c, err := load("f", []byte(good+`
    alias: a b
limits: {queue_depth: 1, connection_memory: 4194304, memory: 16MiB, backend_calls: 4096, backend_calls_per_lun: 1024, heavy_commands: 1024, max_fpdu: 512, login_timeout: 1m30s, nop_interval: 0, nop_timeout: 1h, poll_time: 1ms, order_timeout: 2s, data_timeout: 1s, send_timeout: 1h, task_wait: 2m, max_time2wait: 2s, max_time2retain: 1h, lost_sessions: 1, lost_sessions_per_initiator: 1, tokens: 16384, tokens_per_initiator: 1, max_connections: 65536, connections_per_session: 64, error_recovery_level: 0,
  reserved_connections: 65535, connections_per_address: 1, connections_per_portal: 2, sessions_per_initiator: 3, sessions_per_user: 4,
  discovery_per_address: 5, log_lines_per_address: 6,
  registrations_per_initiator: 512, state_timeout: 30s, fence_timeout: 30s, store_timeout: 1h, descriptors: 128}
mpa: {crc: on, markers: on, unstated_ord: 128}
state_dir: /tmp/x
debug: {listen: "[::1]:6060"}
log: {level: debug, format: json}
watch: true
drain: 0
control: {socket: /tmp/s, socket_group: storage, listen: ":1", tls: {cert: c, key: k, client_ca: a, crl: r},
  access: [{user: alice, role: admin}, {group: "100", role: read}, {certificate: ops, role: operate}, {ou: monitoring, role: read}], paths: [/srv/luns]}
metrics: {listen: "[::]:2"}
dashboard: {listen: "[::]:3"}
`))
	if err != nil {
		t.Fatal(err)
	}
	want := Limits{
		QueueDepth: 1, ConnectionMemory: 4 << 20, Memory: 16 << 20, BackendCalls: 4096, BackendCallsPerLUN: 1024, HeavyCommands: 1024, MaxFPDU: 512, LoginTimeout: 90 * time.Second, NOPTimeout: time.Hour, PollTime: time.Millisecond,
		OrderTimeout: 2 * time.Second, DataTimeout: time.Second, SendTimeout: time.Hour, TaskWait: 2 * time.Minute, LostSessionsByName: 1, Tokens: 16384, TokensByName: 1, LostSessions: 1, MaxTime2Wait: 2 * time.Second, MaxTime2Retain: time.Hour, MaxConnections: 65536, PerSession: 64,
		Reserved: 65535, PerAddress: 1, PerPortal: 2, Sessions: 3, PerUser: 4, Discoveries: 5, LogLines: 6,
		Registrations: 512, StateTimeout: 30 * time.Second, FenceTimeout: 30 * time.Second, StoreTimeout: time.Hour, Descriptors: 128,
	}
	if c.Limits != want {
		t.Errorf("limits %+v, want %+v", c.Limits, want)
	}
	if c.MPA != (MPA{CRC: CRCOn, Markers: true, UnstatedORD: 128}) || c.StateDir != "/tmp/x" || c.Debug.Listen != "[::1]:6060" || c.Log != (Log{"debug", "json", 10 * time.Second}) || c.Targets[0].Alias != "a b" {
		t.Errorf("%+v", c)
	}
	if want := (Control{"/tmp/s", "storage", ":1", ControlTLS{"c", "k", "a", "r"}, []Access{
		{User: "alice", Role: "admin"}, {Group: "100", Role: "read"}, {Certificate: "ops", Role: "operate"}, {OU: "monitoring", Role: "read"},
	}, []string{"/srv/luns"}}); !reflect.DeepEqual(c.Control, want) {
		t.Errorf("control %+v, want %+v", c.Control, want)
	}
	if c.Metrics.Listen != "[::]:2" {
		t.Errorf("metrics %+v", c.Metrics)
	}
	if c.Dashboard.Listen != "[::]:3" {
		t.Errorf("dashboard %+v", c.Dashboard)
	}
	if !c.Watch || c.Drain != 0 {
		t.Errorf("watch %v, drain %v", c.Watch, c.Drain)
	}
	if c.Log.SlogLevel().String() != "DEBUG" {
		t.Error(c.Log.SlogLevel())
	}
}

func TestNamesAreNormalized(t *testing.T) {
	c, err := load("f", []byte(strings.Replace(good, "iqn.2026-11.io.example:store", "IQN.2026-11.io.example:Store", 1)))
	if err != nil {
		t.Fatal(err)
	}
	if got := c.Targets[0].Name; got != "iqn.2026-11.io.example:store" {
		t.Error(got)
	}
}

func TestDefaultSocket(t *testing.T) {
	want := "/run/iser-target.sock"
	t.Setenv("XDG_RUNTIME_DIR", "/run/user/7")
	if os.Geteuid() != 0 {
		want = "/run/user/7/iser-target.sock"
	}
	if got := base().Control.Socket; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	t.Setenv("XDG_RUNTIME_DIR", "")
	if got := base().Control.Socket; os.Geteuid() != 0 && got != "" {
		t.Errorf("%q without a directory", got)
	}
}

// manyPortals returns n portals, each in its own portal group.
func manyPortals(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "  - {listen: \"127.0.0.1:%d\", tpgt: %d}\n", 3260+i, 1+i)
	}
	return b.String()
}

// placed matches the place in an error about a file. TestPositions checks places.
var placed = regexp.MustCompile(`(?m)^([^: ]+)(:\d+){1,2}: `)

// unplaced returns the text of an error without places.
func unplaced(err error) string { return placed.ReplaceAllString(err.Error(), "$1: ") }

// wantErrors compares the lines of err without places.
func wantErrors(t *testing.T, err error, want []string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error, want %q", want)
	}
	var e *Error
	if !errors.As(err, &e) {
		t.Errorf("%T is not an *Error", err)
	}
	got := strings.Split(unplaced(err), "\n")
	ok := len(got) == len(want)
	for i := range min(len(got), len(want)) {
		ok = ok && strings.Contains(got[i], want[i])
	}
	if !ok {
		t.Errorf("errors\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestEnvironment(t *testing.T) {
	for name, val := range map[string]string{
		"ISER_TARGET_LIMITS_QUEUE_DEPTH":       "17",
		"ISER_TARGET_LIMITS_CONNECTION_MEMORY": "8MiB",
		"ISER_TARGET_LIMITS_NOP_INTERVAL":      "0",
		"ISER_TARGET_MPA_CRC":                  "on",
		"ISER_TARGET_STATE_DIR":                "/tmp/state",
		"ISER_TARGET_DEBUG_LISTEN":             "127.0.0.1:0",
		"ISER_TARGET_LOG_LEVEL":                "warn",
		"ISER_TARGET_LOG_FORMAT":               "", // not set
		"ISER_TARGET_REQUIRE_INTEROP":          "1",
		"ISER_TARGET_CLIENT_TLS_CA":            "/etc/ca.pem",
	} {
		t.Setenv(name, val)
	}
	c, err := load("f", []byte(good+"log: {level: debug, format: json}\nlimits: {queue_depth: 3, max_fpdu: 1024}"))
	if err != nil {
		t.Fatal(err)
	}
	want := base()
	want.Portals, want.Targets = c.Portals, c.Targets
	want.Limits.QueueDepth, want.Limits.ConnectionMemory, want.Limits.NOPInterval, want.Limits.MaxFPDU = 17, 8<<20, 0, 1024
	want.MPA.CRC, want.StateDir, want.Debug.Listen, want.Log = CRCOn, "/tmp/state", "127.0.0.1:0", Log{"warn", "json", 10 * time.Second}
	if !reflect.DeepEqual(*c, want) {
		t.Errorf("%+v\nwant %+v", *c, want)
	}
}

func TestEnvironmentErrors(t *testing.T) {
	t.Setenv("ISER_TARGET_LOG_LEVL", "warn")
	t.Setenv("ISER_TARGET_LOG_LEVEL", "loud")
	t.Setenv("ISER_TARGET_LIMITS_QUEUE_DEPTH", "many")
	t.Setenv("ISER_TARGET_LIMITS_MAX_FPDU", "1")
	_, err := load("f", []byte(good+"foo: 1"))
	wantErrors(t, err, []string{
		"f: foo: unknown key",
		"environment: ISER_TARGET_LOG_LEVL: unknown variable, did you mean ISER_TARGET_LOG_LEVEL?",
		"environment: ISER_TARGET_LIMITS_QUEUE_DEPTH: must be a whole number, not \"many\"",
		"environment: ISER_TARGET_LIMITS_MAX_FPDU: must be 512 to 64768, not 1",
		"environment: ISER_TARGET_LOG_LEVEL: must be debug, info, warn or error, not \"loud\"",
	})
}

func TestLoadFile(t *testing.T) {
	dir := t.TempDir()
	missing := filepath.Join(dir, "missing.yaml")
	if _, err := Load(missing); err == nil || err.Error() != missing+": no such file or directory" {
		t.Error(err)
	}
	if _, err := Load(dir); err == nil || err.Error() != dir+": is a directory" {
		t.Error(err)
	}
	large := filepath.Join(dir, "large.yaml")
	if err := os.WriteFile(large, []byte(strings.Repeat("#\n", MaxFile/2+1)), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(large); err == nil || err.Error() != large+": is larger than 1MiB" {
		t.Error(err)
	}
}

// Aliases that expand exponentially are refused.
func TestAliasBomb(t *testing.T) {
	s := "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n"
	for i := 1; i < 10; i++ {
		s += fmt.Sprintf("a%d: &a%d [%s]\n", i, i, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*a%d,", i-1), 10), ","))
	}
	if _, err := load("f", []byte(s)); err == nil {
		t.Error("no error")
	}
}

func TestSize(t *testing.T) {
	for in, want := range map[string]Size{
		"0": 0, "1": 1, "4096": 4096, "512B": 512, "1KiB": 1024, "10GiB": 10 << 30, "1 TiB": 1 << 40, "7PiB": 7 << 50,
		"1KB": 1000, "1kB": 1000, "2MB": 2e6, "3GB": 3e9, "4TB": 4e12, "5PB": 5e15, "9223372036854775807": 1<<63 - 1,
		"10G": 10 << 30, "10g": 10 << 30, "1k": 1024, "1.5T": 3 << 39, "1.5GiB": 3 << 29, "0.5K": 512, "1gib": 1 << 30, "10gb": 10e9, "1.25 MB": 1250000, "7P": 7 << 50,
	} {
		if got, err := ParseSize(in); got != want || err != nil {
			t.Errorf("ParseSize(%q) = %d, %v; want %d", in, got, err, want)
		}
	}
	for _, in := range []string{"", "B", "GiB", "-1", "+1", "1.5", "1.5B", "1.0001K", ".5G", "1.G", "1.5.5G", "1e3", "1/2G", "G", "10X", "1 ", " 1", "1  GiB", "0x10", "9223372036854775808", "8192PiB", "8192P", "99999999999999999999GiB", "0." + strings.Repeat("0", 100) + "G"} {
		if got, err := ParseSize(in); err == nil {
			t.Errorf("ParseSize(%q) = %d", in, got)
		}
	}
	for in, want := range map[Size]string{0: "0", 1: "1", 1536: "1536", 1024: "1KiB", 64 << 20: "64MiB", 1 << 50: "1PiB"} {
		if got := in.String(); got != want {
			t.Errorf("%d is %s, want %s", int64(in), got, want)
		}
	}
}

// The reference has every key and variable, and only known variables.
func TestReference(t *testing.T) {
	b, err := os.ReadFile("../docs/config.md")
	if err != nil {
		t.Fatal(err)
	}
	doc := string(b)
	var walk func(t2 reflect.Type)
	walk = func(t2 reflect.Type) {
		for i, key := range keysOf(t2) {
			f := t2.Field(i).Type
			if f.Kind() == reflect.Slice {
				f = f.Elem()
			}
			if f.Kind() == reflect.Struct {
				if !strings.Contains(doc, "## "+key) && !strings.Contains(doc, "."+key+"\n") {
					t.Errorf("docs/config.md has no section on %s", key)
				}
				walk(f)
			} else if !strings.Contains(doc, "\n| `"+key+"` |") {
				t.Errorf("docs/config.md has no row for %s", key)
			}
		}
	}
	walk(reflect.TypeFor[Config]())
	for name := range EnvNames() {
		if !strings.Contains(doc, "`"+name+"`") {
			t.Errorf("docs/config.md does not name %s", name)
		}
	}
	for _, name := range regexp.MustCompile(`ISER_TARGET_\w+`).FindAllString(doc, -1) {
		if EnvNames()[name] == "" && !slices.Contains(envOfOthers, name) {
			t.Errorf("docs/config.md names %s, which is not read", name)
		}
	}
}

func FuzzLoad(f *testing.F) {
	f.Add([]byte(good))
	f.Add(defaultYAML)
	f.Add([]byte("portals: [{listen: \"[::1]:1\", advertise: [a:1]}]\nlimits: {nop_interval: 1h}\n"))
	f.Add([]byte("a: &a [*a]\n---\n"))
	f.Add([]byte("portals: [{listen: \":1\"}]\ntargets: []\n"))
	f.Add([]byte("portals: [{listen: \":1\", tpgt: 65535}, {listen: \"[fe80::1%eth0]:1\"}]\n" + good[strings.Index(good, "targets"):] +
		"    portal_groups: [1]\n  - luns: [{id: 1, backend: memory, size: 1MiB, initiators: [\"*\"], read_only_for: [\"?\"]}]\n"))
	f.Add([]byte(good + "    auth: {method: chap, algorithms: [md5], users: [{name: a, secret: aaaaaaaaaaaa, initiator: \"*\", mutual: {name: t, secret: tttttttttttt}}]}\n" +
		"    redirect: {to: a:1, permanent: true}\ndiscovery_auth: {method: chap, users: [{name: a, secret_file: /dev/null}]}\n"))
	f.Add([]byte(good + "      - {id: 1, backend: memory, size: 1MiB, iops: 9, burst: 2s, min_bandwidth: 1, rates: [{initiators: [\"*\"], bandwidth: 1MiB, min_iops: 9}]}\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := load("f", b)
		if (c == nil) == (err == nil) {
			t.Fatalf("%v, %v", c, err)
		}
		if err == nil && c.Validate() != nil {
			t.Fatalf("loaded, but %v", c.Validate())
		}
		if err != nil {
			return
		}
		auths := []Auth{c.DiscoveryAuth}
		for _, target := range c.Targets {
			auths = append(auths, target.Auth)
		}
		for _, auth := range auths {
			if chap, err := auth.CHAP(); err != nil || (chap != nil) != (auth.Method == "chap") {
				t.Fatalf("loaded, but %v, %v", chap, err)
			}
		}
	})
}

func manyKeys(n int) string {
	var keys []string
	for i := range n {
		keys = append(keys, fmt.Sprintf("k%d: 1", i))
	}
	return strings.Join(keys, ", ")
}

// At most maxErrors errors are reported, and soon.
func TestManyErrors(t *testing.T) {
	var luns []string
	for i := range 10000 {
		luns = append(luns, fmt.Sprintf("{id: %d, bckend: memory, size: 1}", i))
	}
	begin := time.Now()
	_, err := load("f", []byte(strings.Replace(good, "{id: 0, backend: memory, size: 1GiB}", "\n      - "+strings.Join(luns, "\n      - "), 1)))
	if err == nil {
		t.Fatal("it is valid")
	}
	lines := strings.Split(err.Error(), "\n")
	if len(lines) != maxErrors+1 || !strings.HasPrefix(lines[maxErrors], "f: and ") || !strings.HasSuffix(lines[maxErrors], " more errors") {
		t.Errorf("%d lines, the last one %q", len(lines), lines[len(lines)-1])
	}
	if d := time.Since(begin); d > 30*time.Second {
		t.Errorf("that took %v", d)
	}
}

// ReadFile reads a pipe to its end, and refuses other files that are not regular.
func TestReadFile(t *testing.T) {
	dir := t.TempDir()
	pipe := filepath.Join(dir, "pipe")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	large := filepath.Join(dir, "large")
	if err := os.WriteFile(large, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(large, 1<<30); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		dir: "is a directory", pipe: "is a pipe that no process writes to", large: "is larger than 1MiB", "/dev/zero": "is larger than 1MiB",
		filepath.Join(dir, "none"): "no such file or directory",
	} {
		for what, read := range map[string]func(string) error{
			"ReadFile":     func(p string) error { _, err := ReadFile(p); return err },
			"Load":         func(p string) error { _, err := Load(p); return err },
			"OpenDocument": func(p string) error { _, err := OpenDocument(p); return err },
		} {
			if err := read(path); err == nil || err.Error() != path+": "+want {
				t.Errorf("%s: %v, want %s: %s", what, err, path, want)
			}
		}
	}
	w, err := os.OpenFile(pipe, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		defer w.Close()
		time.Sleep(20 * time.Millisecond) // Load reads before there is anything
		io.WriteString(w, good)
	}()
	if c, err := Load(pipe); err != nil || len(c.Portals) != 1 {
		t.Errorf("what somebody writes into a pipe: %v", err)
	}
}

// The places that the file does not bound follow from max_connections.
func TestBoundsOfPlacesFollowFromOthers(t *testing.T) {
	for text, want := range map[string][4]int64{
		"":                     {256, 1792, 2048, 1792},
		"max_connections: 800": {100, 700, 800, 700},
		"max_connections: 4":   {0, 4, 4, 4},
		"reserved_connections: 48, connections_per_address: 7, sessions_per_user: 9": {48, 7, 2048, 9},
	} {
		c, err := load("f", []byte(good+"limits: {"+text+"}\n"))
		if err != nil {
			t.Fatal(err)
		}
		b := c.Limits.Bounds()
		got := [4]int64{b["reserved_connections"], b["connections_per_address"], b["connections_per_portal"], b["sessions_per_user"]}
		if got != want {
			t.Errorf("{%s}: %d, want %d", text, got, want)
		}
	}
}

// The defaults of the package that has the limits are those of the configuration.
func TestDefaultsOfPlacesAgree(t *testing.T) {
	c := base()
	bounds := c.Limits.Bounds()
	for _, l := range limits.New().State() {
		if n := bounds[l.Name]; n != 0 && n != l.Max { // 0: from the machine
			t.Errorf("limits.%s: the default of config is %d, that of limits %d", l.Name, n, l.Max)
		}
	}
}
