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
)

// good is a configuration of which the tests below replace a part.
const good = `
portals:
  - listen: 127.0.0.1:3260
targets:
  - name: iqn.2026-11.io.example:store
    initiators: ["*"]
    luns:
      - {id: 0, backend: memory, size: 1GiB}
`

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
		LUNs:       []LUN{{ID: 0, Backend: "memory", Size: 1 << 30, BlockSize: 512}},
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
limits: {queue_depth: 1, connection_memory: 4194304, max_fpdu: 512, login_timeout: 1m30s, nop_interval: 0, nop_timeout: 1h, max_connections: 65536, connections_per_session: 64, error_recovery_level: 0}
mpa: {crc: on}
state_dir: /tmp/x
debug: {listen: "[::1]:6060"}
log: {level: debug, format: json}
watch: true
drain: 0
control: {socket: /tmp/s, listen: ":1", tls: {cert: c, key: k, client_ca: a}}
metrics: {listen: "[::]:2"}
dashboard: {listen: "[::]:3"}
`))
	if err != nil {
		t.Fatal(err)
	}
	if want := (Limits{1, 4 << 20, 512, 90 * time.Second, 0, time.Hour, 65536, 64, 0}); c.Limits != want {
		t.Errorf("limits %+v, want %+v", c.Limits, want)
	}
	if !c.MPA.CRC || c.StateDir != "/tmp/x" || c.Debug.Listen != "[::1]:6060" || c.Log != (Log{"debug", "json"}) || c.Targets[0].Alias != "a b" {
		t.Errorf("%+v", c)
	}
	if want := (Control{"/tmp/s", ":1", ControlTLS{"c", "k", "a"}}); c.Control != want {
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

func TestNamesAreNormalised(t *testing.T) {
	c, err := load("f", []byte(strings.Replace(good, "iqn.2026-11.io.example:store", "IQN.2026-11.io.example:Store", 1)))
	if err != nil {
		t.Fatal(err)
	}
	if got := c.Targets[0].Name; got != "iqn.2026-11.io.example:store" {
		t.Error(got)
	}
}

// Each row changes one part of good; want are the errors, all of them, by key
// and a part of the reason.
func TestErrors(t *testing.T) {
	const lun = "{id: 0, backend: memory, size: 1GiB}"
	luns := func(s string) [2]string { return [2]string{lun, s} }
	auth := func(s string) [2]string { return [2]string{"initiators:", "auth: {" + s + "}\n    initiators:"} }
	for _, tc := range []struct {
		name string
		edit [2]string // old, new; old empty: new is appended
		want []string
	}{
		// Keys.
		{"unknown section", [2]string{"", "limit: {}"}, []string{"f: limit: unknown key, did you mean limits?"}},
		{"unknown section without value", [2]string{"", "foo:"}, []string{"f: foo: unknown key"}},
		{"unknown key in a section", [2]string{"", "limits: {quue_depth: 1}"}, []string{"f: limits.quue_depth: unknown key, did you mean queue_depth?"}},
		{"unknown key in a list", luns("{id: 0, backend: memory, sise: 1, size: 1GiB}"), []string{"f: targets[0].luns[0].sise: unknown key, did you mean size?"}},
		{"unknown key, unlike any", luns("{id: 0, backend: memory, size: 1GiB, serial: x}"), []string{"f: targets[0].luns[0].serial: unknown key"}},
		{"case", [2]string{"", "Log: {}"}, []string{"f: Log: unknown key, did you mean log?"}},
		{"dotted key", [2]string{"", "log.level: info"}, []string{`f: "log.level": unknown key`}},
		{"strange key", [2]string{"", `"a\nb": 1`}, []string{`f: "a\nb": unknown key`}},
		{"two errors", [2]string{"", "foo: 1\nlog: {level: x}"}, []string{"f: foo: unknown key", `f: log.level: must be debug, info, warn or error, not "x"`}},
		// Types.
		{"section is a list", [2]string{"", "log: []"}, []string{"f: log: must be a map with the keys level, format, not a list"}},
		{"section is empty", [2]string{"", "log:"}, []string{"f: log: must be a map with the keys level, format, not empty"}},
		{"keys are numbers", [2]string{"", "log: {1: 2}"}, []string{"f: log: must be a map with the keys level, format, not a map with keys that are not strings"}},
		{"list is a string", [2]string{`["*"]`, `"*"`}, []string{`f: targets[0].initiators: must be a list, not "*"`}},
		{"string is a number", [2]string{`["*"]`, `[1]`}, []string{"f: targets[0].initiators[0]: must be a string, not 1"}},
		{"number is a string", [2]string{"", `limits: {queue_depth: "12"}`}, []string{`f: limits.queue_depth: must be a whole number, not "12"`}},
		{"number is a float", [2]string{"", "limits: {queue_depth: 1.5}"}, []string{"f: limits.queue_depth: must be a whole number, not 1.5"}},
		{"number is huge", [2]string{"", "limits: {queue_depth: 18446744073709551615}"}, []string{"f: limits.queue_depth: must be a whole number"}},
		{"bool is a string", luns(`{id: 0, backend: memory, size: 1GiB, read_only: "yes"}`), []string{`f: targets[0].luns[0].read_only: must be true or false, not "yes"`}},
		{"duration without unit", [2]string{"", "limits: {nop_timeout: 15}"}, []string{`f: limits.nop_timeout: "15" is not a duration like 15s or 2m`}},
		{"duration is a list", [2]string{"", "limits: {nop_timeout: []}"}, []string{"f: limits.nop_timeout: must be a duration like 15s, not a list"}},
		{"switch", [2]string{"", "mpa: {crc: maybe}"}, []string{`f: mpa.crc: must be on or off, not "maybe"`}},
		{"size", luns("{id: 0, backend: memory, size: 1Gib}"), []string{`f: targets[0].luns[0].size: "1Gib" is not a whole number of bytes`}},
		{"size is a list", luns("{id: 0, backend: memory, size: []}"), []string{"f: targets[0].luns[0].size: must be a size like 10GiB, not a list"}},
		// YAML.
		{"not YAML", [2]string{"", "log: {"}, []string{"f: yaml: line"}},
		{"a list", [2]string{good, "- a"}, []string{"f: yaml: "}},
		{"key twice", [2]string{"", "portals: []"}, []string{"f: yaml: unmarshal errors: line"}},
		{"second document", [2]string{"", "---\nfoo: 1"}, []string{"f: yaml: line 9: a second document begins"}},
		{"empty", [2]string{good, ""}, []string{"f: portals: is required", "f: targets: is required"}},
		// Portals.
		{"no portal", [2]string{"portals:\n  - listen: 127.0.0.1:3260", "portals: []"}, []string{"f: portals: is required"}},
		{"transports", [2]string{"listen: 127.0.0.1:3260", "listen: 127.0.0.1:3260\n    transports: [tcp, udp, tcp]"}, []string{
			`f: portals[0].transports[1]: must be iser or tcp, not "udp"`, `f: portals[0].transports[2]: "tcp" appears twice`}},
		{"tpgt", [2]string{"listen: 127.0.0.1:3260", "listen: 127.0.0.1:3260\n    tpgt: 0\n  - {listen: 127.0.0.1:3261, tpgt: 65536}\n  - {listen: 127.0.0.1:3262, tpgt: one}"}, []string{
			"f: portals[2].tpgt: must be a whole number, not \"one\"", "f: portals[0].tpgt: must be 1 to 65535, not 0", "f: portals[1].tpgt: must be 1 to 65535, not 65536"}},
		{"portal groups", [2]string{"initiators:", "portal_groups: [2, 1, 1, x]\n    initiators:"}, []string{
			"f: targets[0].portal_groups[3]: must be a whole number, not \"x\"", "f: targets[0].portal_groups[0]: no portal has the tpgt 2", "f: targets[0].portal_groups[2]: 1 appears twice"}},
		{"too many portal groups", [2]string{"  - listen: 127.0.0.1:3260\n", manyPortals(256)}, []string{"f: portals[255].tpgt: 256 is one portal group too many"}},
		{"no portal group", [2]string{"initiators:", "portal_groups: []\n    initiators:"}, []string{"f: targets[0].portal_groups: is empty"}},
		{"no listen", [2]string{"listen: 127.0.0.1:3260", "advertise: []"}, []string{"f: portals[0].listen: is required"}},
		{"no port", [2]string{"127.0.0.1:3260", "127.0.0.1"}, []string{`f: portals[0].listen: "127.0.0.1" is not host:port`}},
		{"port 65536", [2]string{"127.0.0.1:3260", "127.0.0.1:65536"}, []string{"f: portals[0].listen: \"127.0.0.1:65536\" has no port from 1 to 65535"}},
		{"port by name", [2]string{"127.0.0.1:3260", "127.0.0.1:iscsi"}, []string{"has no port"}},
		{"IPv6 without brackets", [2]string{"127.0.0.1:3260", `"2001:db8::1:3260"`}, []string{"in brackets"}},
		{"IPv6 without port", [2]string{"127.0.0.1:3260", `"[2001:db8::1]"`}, []string{"in brackets"}},
		{"no address", [2]string{"127.0.0.1:3260", "127.0.0.256:3260"}, []string{"neither an IP address nor a DNS name"}},
		{"no name", [2]string{"127.0.0.1:3260", "a_b:3260"}, []string{"neither an IP address nor a DNS name"}},
		{"many keys", [2]string{"", "x: {" + manyKeys(maxKeys+1) + "}"}, []string{"f: yaml: line 9: a mapping has 257 keys, more than 256"}},
		{"same portal, any port", [2]string{"127.0.0.1:3260", "\"[0::1]:0\"\n  - listen: \"[::1]:0\""}, []string{`f: portals[1].listen: "[::1]:0" is the address of portals[0], too. Give one of them a port or another address`}},
		{"same portal", [2]string{"127.0.0.1:3260", "\"[0::1]:3260\"\n  - listen: \"[::1]:3260\""}, []string{`f: portals[1].listen: "[::1]:3260" is the address of portals[0] already`}},
		{"advertise nobody", [2]string{"127.0.0.1:3260", "127.0.0.1:3260\n    advertise: [0.0.0.0:3260, \"[::]:3260\", \":3260\", \"a:0\", \"[fe80::1%eth0]:3260\", b:1, B:1]"}, []string{
			"f: portals[0].advertise[0]: \"0.0.0.0:3260\" is an address that initiators cannot reach", "f: portals[0].advertise[1]: \"[::]:3260\" is an address",
			"f: portals[0].advertise[2]: \":3260\" has no host", "f: portals[0].advertise[3]: \"a:0\" has no port", "f: portals[0].advertise[4]: \"[fe80::1%eth0]:3260\" has a zone", "f: portals[0].advertise[6]: \"B:1\" appears twice"}},
		// Targets.
		{"no targets", [2]string{good[strings.Index(good, "targets"):], "log: {}"}, []string{"f: targets: is required: a list of targets, or []"}},
		{"targets without value", [2]string{good[strings.Index(good, "targets"):], "targets:"}, []string{"f: targets: must be a list"}},
		{"no name", [2]string{"name: iqn.2026-11.io.example:store", "alias: a"}, []string{"f: targets[0].name: is required"}},
		{"bad name", [2]string{"iqn.2026-11.io.example:store", "store"}, []string{`f: targets[0].name: iSCSI name "store" does not begin with`}},
		{"same name", [2]string{"", "  - name: IQN.2026-11.io.example:STORE\n    initiators: [\"*\"]\n    luns: [" + lun + "]"}, []string{"f: targets[1].name: \"iqn.2026-11.io.example:store\" is the name of targets[0]"}},
		{"long alias", [2]string{"initiators:", "alias: " + strings.Repeat("a", 256) + "\n    initiators:"}, []string{"f: targets[0].alias: must have at most 255"}},
		{"no initiators", [2]string{`initiators: ["*"]`, "alias: a"}, []string{`f: targets[0].initiators: is required: the initiators that may log in. initiators: ["*"] admits all`}},
		{"empty initiators", [2]string{`["*"]`, "[]"}, []string{`f: targets[0].initiators: is required`}},
		{"bad initiators", [2]string{`["*"]`, `["*", host, ""]`}, []string{"f: targets[0].initiators[1]: iSCSI name", "f: targets[0].initiators[2]: pattern is empty"}},
		// Authentication.
		{"method missing", auth("users: [{name: a, secret: aaaaaaaaaaaa}]"), []string{"f: targets[0].auth.method: is required: chap or none"}},
		{"method unknown", auth("method: CHAP"), []string{`f: targets[0].auth.method: must be chap or none, not "CHAP"`}},
		{"no user", auth("method: chap"), []string{"f: targets[0].auth.users: is required"}},
		{"no user for discovery", [2]string{"", "discovery_auth: {method: chap}"}, []string{"f: discovery_auth.users: is required"}},
		{"algorithm unknown", auth("method: none, algorithms: [md5, md4]"), []string{`f: targets[0].auth.algorithms: "md4" is not one of sha3-256, sha256, sha1, md5`}},
		{"no name, no secret", auth("method: chap, users: [{initiator: \"*\"}], mutual: {name: t}"), []string{
			"f: targets[0].auth.users[0].name: is required", "f: targets[0].auth.users[0].secret: is required, or secret_file", "f: targets[0].auth.mutual.secret: is required, or secret_file"}},
		{"no mutual name", auth("method: chap, users: [{name: a, secret: aaaaaaaaaaaa, mutual: {secret: bbbbbbbbbbbb}}]"), []string{"f: targets[0].auth.users[0].mutual.name: is required"}},
		{"long name", auth("method: chap, users: [{name: " + strings.Repeat("n", 256) + ", secret: aaaaaaaaaaaa}]"), []string{"f: targets[0].auth.users[0].name: must have at most 255 bytes"}},
		{"same user", auth("method: chap, users: [{name: a, secret: aaaaaaaaaaaa}, {name: a, secret: bbbbbbbbbbbb}]"), []string{`f: targets[0].auth.users[1].name: "a" is the name of targets[0].auth.users[0]`}},
		{"bad initiator", auth("method: chap, users: [{name: a, secret: aaaaaaaaaaaa, initiator: host}]"), []string{"f: targets[0].auth.users[0].initiator: iSCSI name"}},
		{"SEC-3723.2.4.1-3 short secret", auth("method: chap, users: [{name: a, secret: 0123456789a}], mutual: {name: t, secret: \"0x00\"}"), []string{
			"f: targets[0].auth.mutual.secret: secret has 1 bytes", "f: targets[0].auth.users[0].secret: secret has 11 bytes, less than 12 (96 bits)"}},
		{"SEC-7143.9.2.1-5 half a byte", auth("method: chap, users: [{name: a, secret: 0x00112233445566778899aabbc}]"), []string{"f: targets[0].auth.users[0].secret: secret begins with 0x: an even number"}},
		{"secret is a number", auth("method: chap, users: [{name: a, secret: 123456789012}]"), []string{"f: targets[0].auth.users[0].secret: must be a string. Put a secret that looks like a number in quotes"}},
		{"SEC-7143.9.2.1-6 same secret in both directions", auth("method: chap, users: [{name: a, secret: aaaaaaaaaaaa}], mutual: {name: t, secret: aaaaaaaaaaaa}"), []string{
			"f: targets[0].auth.mutual: has the secret of targets[0].auth.users[0]: initiators and target must have different ones"}},
		{"SEC-7143.9.2.1-6 in different places", [2]string{lun, lun + "\n    auth: {method: chap, users: [{name: a, secret: aaaaaaaaaaaa}]}\ndiscovery_auth: {method: chap, users: [{name: d, secret: dddddddddddd, mutual: {name: t, secret: \"0x616161616161616161616161\"}}]}"}, []string{
			"f: discovery_auth.users[0].mutual: has the secret of targets[0].auth.users[0]"}},
		{"secret and secret_file", auth("method: chap, users: [{name: a, secret: aaaaaaaaaaaa, secret_file: /nowhere}]"), []string{"f: targets[0].auth.users[0].secret_file: cannot be combined with secret"}},
		{"no secret_file", auth("method: chap, users: [{name: a, secret_file: /nowhere/a}]"), []string{"f: targets[0].auth.users[0].secret_file: /nowhere/a: no such file or directory"}},
		{"redirect without address", [2]string{"initiators:", "redirect: {permanent: true}\n    initiators:"}, []string{"f: targets[0].redirect.to: is required"}},
		{"redirect nowhere", [2]string{"initiators:", "redirect: {to: 0.0.0.0:3260}\n    initiators:"}, []string{`f: targets[0].redirect.to: "0.0.0.0:3260" is an address that initiators cannot reach`}},
		{"redirect to itself", [2]string{"initiators:", "redirect: {to: 127.0.0.1:3260}\n    initiators:"}, []string{`f: targets[0].redirect.to: "127.0.0.1:3260" is portals[0]`}},
		// LUNs.
		{"LUN is null", luns(""), []string{"f: targets[0].luns[0]: must be a map"}},
		{"no id", luns("{backend: memory, size: 1GiB}"), []string{"f: targets[0].luns[0].id: is required"}},
		{"id -2", luns("{id: -2, backend: memory, size: 1GiB}"), []string{"f: targets[0].luns[0].id: must be 0 to 16383, not -2"}},
		{"id 16384", luns("{id: 16384, backend: memory, size: 1GiB}"), []string{"f: targets[0].luns[0].id: must be 0 to 16383, not 16384"}},
		{"id -1", luns("{id: -1, backend: memory, size: 1GiB}"), []string{"f: targets[0].luns[0].id: must be 0 to 16383, not -1"}},
		{"same id", luns(lun + "\n      - " + lun), []string{"f: targets[0].luns[1].id: 0 is the id of targets[0].luns[0]"}},
		{"no backend", luns("{id: 0, size: 1GiB}"), []string{"f: targets[0].luns[0].backend: is required: block, file, gotgt, memory"}},
		{"bad backend", luns("{id: 0, backend: nvme, size: 1GiB}"), []string{`f: targets[0].luns[0].backend: must be one of block, file, gotgt, memory, not "nvme"`}},
		{"memory without size", luns("{id: 0, backend: memory}"), []string{"f: targets[0].luns[0].size: is required for backend memory"}},
		{"memory with path", luns("{id: 0, backend: memory, size: 1GiB, path: /x}"), []string{"f: targets[0].luns[0].path: cannot be set for backend memory"}},
		{"file without anything", luns("{id: 0, backend: file}"), []string{"f: targets[0].luns[0].path: is required for backend file", "f: targets[0].luns[0].size: is required for backend file"}},
		{"file with plugin", luns("{id: 0, backend: file, path: /x, size: 1GiB, plugin: file, options: x}"), []string{"f: targets[0].luns[0].plugin: cannot be set for", "f: targets[0].luns[0].options: cannot be set for"}},
		{"block without path", luns("{id: 0, backend: block}"), []string{"f: targets[0].luns[0].path: is required for backend block"}},
		{"block with size", luns("{id: 0, backend: block, path: /dev/sdb, size: 1GiB, block_size: 512}"), []string{"f: targets[0].luns[0].size: cannot be set for backend block", "f: targets[0].luns[0].block_size: cannot be set for backend block"}},
		{"gotgt without anything", luns("{id: 0, backend: gotgt}"), []string{"f: targets[0].luns[0].path: is required", "f: targets[0].luns[0].plugin: is required"}},
		{"gotgt with size", luns("{id: 0, backend: gotgt, path: /x, plugin: file, size: 1GiB}"), []string{"f: targets[0].luns[0].size: cannot be set for backend gotgt"}},
		{"block size", luns("{id: 0, backend: memory, size: 1GiB, block_size: 1024}"), []string{"f: targets[0].luns[0].block_size: must be 512 or 4096, not 1024"}},
		{"size is odd", luns("{id: 0, backend: memory, size: 1000}"), []string{"f: targets[0].luns[0].size: 1000 is not a multiple of the block size, 512"}},
		{"size is odd for 4096", luns("{id: 0, backend: memory, size: 512, block_size: 4096}"), []string{"f: targets[0].luns[0].size: 512 is not a multiple of the block size, 4096"}},
		{"LUN for nobody", luns("{id: 0, backend: memory, size: 1GiB, initiators: []}"), []string{"f: targets[0].luns[0].initiators: is empty: no initiator would see the LUN"}},
		{"LUN for whom", luns(`{id: 0, backend: memory, size: 1GiB, initiators: [host, "*"], read_only_for: ["*", ""]}`), []string{
			"f: targets[0].luns[0].initiators[0]: iSCSI name", "f: targets[0].luns[0].read_only_for[1]: pattern is empty"}},
		{"read_only twice", luns(`{id: 0, backend: memory, size: 1GiB, read_only: true, read_only_for: ["*"]}`), []string{"f: targets[0].luns[0].read_only_for: cannot be combined with read_only"}},
		{"same path", luns("{id: 0, backend: file, path: /a/../x, size: 1GiB}\n      - {id: 1, backend: block, path: /x}"), []string{`f: targets[0].luns[1].path: "/x" is the path of targets[0].luns[0]`}},
		// The rest.
		{"limits low", [2]string{"", "limits: {queue_depth: 0, connection_memory: 1MiB, max_fpdu: 511, login_timeout: 0, nop_interval: 1ms, nop_timeout: 0, max_connections: 0, connections_per_session: 0, error_recovery_level: -1}"}, []string{
			"f: limits.queue_depth: must be 1 to 1024, not 0", "f: limits.max_fpdu: must be 512 to 64768, not 511", "f: limits.max_connections: must be 1 to 65536, not 0",
			"f: limits.connections_per_session: must be 1 to 64, not 0", "f: limits.error_recovery_level: must be 0 to 2, not -1",
			"f: limits.connection_memory: must be 4MiB to 64GiB, not 1MiB", "f: limits.login_timeout: must be 1s to 1h, not 0s", "f: limits.nop_interval: must be 1s to 1h, or 0, not 1ms", "f: limits.nop_timeout: must be 1s"}},
		{"limits high", [2]string{"", "limits: {queue_depth: 1025, connection_memory: 65GiB, max_fpdu: 64769, login_timeout: 61m, nop_interval: 61m, nop_timeout: 61m, max_connections: 65537, connections_per_session: 65, error_recovery_level: 3}"}, []string{
			"f: limits.queue_depth", "f: limits.max_fpdu", "f: limits.max_connections", "f: limits.connections_per_session", "f: limits.error_recovery_level", "f: limits.connection_memory", "f: limits.login_timeout", "f: limits.nop_interval", "f: limits.nop_timeout"}},
		{"debug for all", [2]string{"", "debug: {listen: 0.0.0.0:6060}"}, []string{`f: debug.listen: must be a loopback address, not "0.0.0.0:6060"`}},
		{"debug without host", [2]string{"", `debug: {listen: ":6060"}`}, []string{`f: debug.listen: must be a loopback address, not ":6060"`}},
		{"debug is not an address", [2]string{"", "debug: {listen: x}"}, []string{`f: debug.listen: "x" is not host:port`}},
		{"control without TLS", [2]string{"", "control: {listen: 192.0.2.1:3261}"}, []string{
			"f: control.tls.cert: is required with control.listen", "f: control.tls.key: is required", "f: control.tls.client_ca: is required"}},
		{"control is not an address", [2]string{"", "control: {listen: x, tls: {cert: c, key: k, client_ca: a}}"}, []string{`f: control.listen: "x" is not host:port`}},
		{"control is a portal", [2]string{"", "control: {listen: \"127.0.0.1:3260\", tls: {cert: c, key: k, client_ca: a}}"}, []string{`f: control.listen: "127.0.0.1:3260" is the address of portals[0] already`}},
		{"control is debug", [2]string{"", "debug: {listen: \"[::1]:1\"}\ncontrol: {listen: \"[0::1]:1\", tls: {cert: c, key: k, client_ca: a}}"}, []string{`f: control.listen: "[0::1]:1" is the address of debug already`}},
		{"control socket", [2]string{"", "control: {socket: " + strings.Repeat("s", 108) + "}"}, []string{"f: control.socket: must have at most 107 bytes"}},
		{"metrics is not an address", [2]string{"", "metrics: {listen: x}"}, []string{`f: metrics.listen: "x" is not host:port`}},
		{"metrics is a portal", [2]string{"", "metrics: {listen: \"127.0.0.1:3260\"}"}, []string{`f: metrics.listen: "127.0.0.1:3260" is the address of portals[0] already`}},
		{"dashboard is not an address", [2]string{"", "dashboard: {listen: x}"}, []string{`f: dashboard.listen: "x" is not host:port`}},
		{"dashboard is a portal", [2]string{"", "dashboard: {listen: \"127.0.0.1:3260\"}"}, []string{`f: dashboard.listen: "127.0.0.1:3260" is the address of portals[0] already`}},
		{"drain is long", [2]string{"", "drain: 601s"}, []string{"f: drain: must be 0 to 10m, not 10m1s"}},
		{"drain is negative", [2]string{"", "drain: -1s"}, []string{"f: drain: must be 0 to 10m, not -1s"}},
		{"log format", [2]string{"", "log: {format: xml}"}, []string{`f: log.format: must be text or json, not "xml"`}},
		{"no state_dir for a file", [2]string{lun, "{id: 0, backend: file, path: /x, size: 1GiB}\nstate_dir: \"\""}, []string{"f: state_dir: is required: targets[0].luns[0] keeps its data"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			in := good + tc.edit[1]
			if tc.edit[0] != "" {
				if !strings.Contains(good, tc.edit[0]) {
					t.Fatalf("%q is not in the configuration", tc.edit[0])
				}
				in = strings.Replace(good, tc.edit[0], tc.edit[1], 1)
			}
			c, err := load("f", []byte(in))
			wantErrors(t, err, tc.want)
			if err != nil && c != nil {
				t.Error("an error, and a configuration")
			}
		})
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

// wantErrors compares the lines of err.
func wantErrors(t *testing.T, err error, want []string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error, want %q", want)
	}
	var e *Error
	if !errors.As(err, &e) {
		t.Errorf("%T is no *Error", err)
	}
	got := strings.Split(err.Error(), "\n")
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
	want.MPA.CRC, want.StateDir, want.Debug.Listen, want.Log = true, "/tmp/state", "127.0.0.1:0", Log{"warn", "json"}
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
	} {
		if got, err := ParseSize(in); got != want || err != nil {
			t.Errorf("ParseSize(%q) = %d, %v; want %d", in, got, err, want)
		}
	}
	for _, in := range []string{"", "B", "GiB", "-1", "+1", "1.5GiB", "1gib", "1G", "1 ", " 1", "1  GiB", "0x10", "9223372036854775808", "8192PiB", "99999999999999999999GiB"} {
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
