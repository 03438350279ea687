package config

import (
	"strings"
	"testing"
)

// A mistake changes one part of good. want has a part of each error, in their order.
type mistake struct {
	name string
	edit [2]string // old, new; old empty: new is appended
	want []string
}

const lun = "{id: 0, backend: memory, size: 1GiB}"

// luns returns an edit that replaces the LUN.
func luns(s string) [2]string { return [2]string{lun, s} }

// auth returns an edit that adds keys of auth to the target.
func auth(s string) [2]string {
	return [2]string{"initiators:", "auth: {" + s + "}\n    initiators:"}
}

func refused(t *testing.T, mistakes []mistake) {
	for _, tc := range mistakes {
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

func TestUnknownKeysAreRefused(t *testing.T) {
	refused(t, []mistake{
		{"unknown section", [2]string{"", "limit: {}"}, []string{"f: limit: unknown key, did you mean limits?"}},
		{"unknown section without value", [2]string{"", "foo:"}, []string{"f: foo: unknown key"}},
		{"unknown key in a section", [2]string{"", "limits: {quue_depth: 1}"}, []string{"f: limits.quue_depth: unknown key, did you mean queue_depth?"}},
		{"unknown key in a list", luns("{id: 0, backend: memory, sise: 1, size: 1GiB}"), []string{"f: targets[0].luns[0].sise: unknown key, did you mean size?"}},
		{"unknown key, unlike any", luns("{id: 0, backend: memory, size: 1GiB, colour: x}"), []string{"f: targets[0].luns[0].colour: unknown key"}},
		{"case", [2]string{"", "Log: {}"}, []string{"f: Log: unknown key, did you mean log?"}},
		{"dotted key", [2]string{"", "log.level: info"}, []string{`f: "log.level": unknown key`}},
		{"strange key", [2]string{"", `"a\nb": 1`}, []string{`f: "a\nb": unknown key`}},
		{"two errors", [2]string{"", "foo: 1\nlog: {level: x}"}, []string{"f: foo: unknown key", `f: log.level: must be debug, info, warn or error, not "x"`}},
		{"many keys", [2]string{"", "x: {" + manyKeys(maxKeys+1) + "}"}, []string{"f: yaml: a mapping has 257 keys, more than 256"}},
	})
}

func TestWrongTypesAreRefused(t *testing.T) {
	refused(t, []mistake{
		{"section is a list", [2]string{"", "log: []"}, []string{"f: log: must be a map with the keys level, format, slow_io, not a list"}},
		{"section is empty", [2]string{"", "log:"}, []string{"f: log: must be a map with the keys level, format, slow_io, not empty"}},
		{"keys are numbers", [2]string{"", "log: {1: 2}"}, []string{"f: log: must be a map with the keys level, format, slow_io, not a map with keys that are not strings"}},
		{"list is a string", [2]string{`["*"]`, `"*"`}, []string{`f: targets[0].initiators: must be a list, not "*"`}},
		{"string is a number", [2]string{`["*"]`, `[1]`}, []string{"f: targets[0].initiators[0]: must be a string, not 1"}},
		{"number is a string", [2]string{"", `limits: {queue_depth: "12"}`}, []string{`f: limits.queue_depth: must be a whole number, not "12"`}},
		{"number is a float", [2]string{"", "limits: {queue_depth: 1.5}"}, []string{"f: limits.queue_depth: must be a whole number, not 1.5"}},
		{"number is huge", [2]string{"", "limits: {queue_depth: 18446744073709551615}"}, []string{"f: limits.queue_depth: must be a whole number"}},
		{"bool is a string", luns(`{id: 0, backend: memory, size: 1GiB, read_only: "yes"}`), []string{`f: targets[0].luns[0].read_only: must be true or false, not "yes"`}},
		{"duration without unit", [2]string{"", "limits: {nop_timeout: 15}"}, []string{`f: limits.nop_timeout: "15" is not a duration like 15s or 2m`}},
		{"duration is a list", [2]string{"", "limits: {nop_timeout: []}"}, []string{"f: limits.nop_timeout: must be a duration like 15s, not a list"}},
		{"mpa", [2]string{"", "mpa: {markers: 1, unstated_ord: 0}"}, []string{`f: mpa.markers: must be on or off, not 1`, "f: mpa.unstated_ord: must be 1 to 128, not 0"}},
		{"mpa high", [2]string{"", "mpa: {unstated_ord: 129}"}, []string{"f: mpa.unstated_ord: must be 1 to 128, not 129"}},
		{"switch", [2]string{"", "mpa: {crc: maybe}"}, []string{`f: mpa.crc: must be auto, on or off, not "maybe"`}},
		{"size", luns("{id: 0, backend: memory, size: 1Gig}"), []string{`f: targets[0].luns[0].size: "1Gig" is not a size: write a number of bytes, or of K, M, G, T or P (1024)`}},
		{"size of half a byte", luns("{id: 0, backend: memory, size: 0.00001K}"), []string{`f: targets[0].luns[0].size: "0.00001K" is not a whole number of bytes`}},
		{"size is a list", luns("{id: 0, backend: memory, size: []}"), []string{"f: targets[0].luns[0].size: must be a size like 10GiB, not a list"}},
	})
}

func TestWrongYAMLIsRefused(t *testing.T) {
	refused(t, []mistake{
		{"not YAML", [2]string{"", "log: {"}, []string{"f: yaml: did not find"}},
		{"a list", [2]string{good, "- a"}, []string{"f: yaml: "}},
		{"key twice", [2]string{"", "portals: []"}, []string{"f: yaml: mapping key"}},
		{"second document", [2]string{"", "---\nfoo: 1"}, []string{"f: yaml: a second document begins"}},
		{"empty", [2]string{good, ""}, []string{"f: portals: is required", "f: targets: is required"}},
	})
}

func TestWrongNegotiationsAreRefused(t *testing.T) {
	of := func(keys string) [2]string { return [2]string{"initiators:", keys + "\n    initiators:"} }
	refused(t, []mistake{
		{"initial_r2t", of("initial_r2t: maybe"), []string{`f: targets[0].initial_r2t: must be true or false, not "maybe"`}},
		{"first_burst_length", of("first_burst_length: 511"), []string{"f: targets[0].first_burst_length: must be 512 to 16777215 bytes, not 511"}},
		{"first_burst_length is 0", of("first_burst_length: 0"), []string{"f: targets[0].first_burst_length: must be 512 to 16777215 bytes, not 0"}},
		{"max_burst_length", of("max_burst_length: 16MiB"), []string{"f: targets[0].max_burst_length: must be 512 to 16777215 bytes, not 16777216"}},
		{"max_recv_data_segment_length", of("max_recv_data_segment_length: 100"), []string{
			"f: targets[0].max_recv_data_segment_length: must be 512 to 16777215 bytes, not 100"}},
		{"no R2T", of("max_outstanding_r2t: 0"), []string{"f: targets[0].max_outstanding_r2t: must be 1 to 65535, not 0"}},
		{"R2Ts", of("max_outstanding_r2t: 65536"), []string{"f: targets[0].max_outstanding_r2t: must be 1 to 65535, not 65536"}},
		{"bursts", of("first_burst_length: 128KiB\n    max_burst_length: 64KiB"), []string{
			"f: targets[0].first_burst_length: is 131072, more than max_burst_length, 65536"}},
		{"the default is more", of("max_burst_length: 4KiB"), []string{"f: targets[0].first_burst_length: is 65536, more than max_burst_length, 4096"}},
	})
}

func TestWrongPortalsAreRefused(t *testing.T) {
	refused(t, []mistake{
		{"no portal", [2]string{"portals:\n  - listen: 127.0.0.1:3260", "portals: []"}, []string{"f: portals: is required"}},
		{"transports", [2]string{"listen: 127.0.0.1:3260", "listen: 127.0.0.1:3260\n    transports: [tcp, udp, tcp]"}, []string{
			`f: portals[0].transports[1]: must be iser or tcp, not "udp"`, `f: portals[0].transports[2]: "tcp" appears twice`}},
		{"tpgt", [2]string{"listen: 127.0.0.1:3260", "listen: 127.0.0.1:3260\n    tpgt: 0\n  - {listen: 127.0.0.1:3261, tpgt: 65536}\n  - {listen: 127.0.0.1:3262, tpgt: one}"}, []string{
			"f: portals[2].tpgt: must be a whole number, not \"one\"", "f: portals[0].tpgt: must be 1 to 65535, not 0", "f: portals[1].tpgt: must be 1 to 65535, not 65536"}},
		{"portal groups", [2]string{"initiators:", "portal_groups: [2, 1, 1, x]\n    initiators:"}, []string{
			"f: targets[0].portal_groups[3]: must be a whole number, not \"x\"", "f: targets[0].portal_groups[0]: no portal has the tpgt 2", "f: targets[0].portal_groups[2]: 1 appears twice"}},
		{"too many portal groups", [2]string{"  - listen: 127.0.0.1:3260\n", manyPortals(256)}, []string{"f: portals[255].tpgt: 256 is one portal group too many"}},
		{"no portal group", [2]string{"initiators:", "portal_groups: []\n    initiators:"}, []string{"f: targets[0].portal_groups: is empty"}},
		{"all addresses and one", [2]string{"listen: 127.0.0.1:3260", "listen: 127.0.0.1:3260\n  - {listen: \"[::1]:3260\"}\n  - {listen: \"0.0.0.0:3260\"}\n  - {listen: \"[::]:3260\"}\n  - {listen: \"0.0.0.0:3261\"}\nmetrics: {listen: \":3261\"}\ndashboard: {listen: \"127.0.0.1:3261\"}"}, []string{
			`f: portals[2].listen: "0.0.0.0:3260" and "127.0.0.1:3260", the address of portals[0], share a port of the same address. Use one of them, or another port`,
			`f: portals[3].listen: "[::]:3260" and "[::1]:3260", the address of portals[1], share`,
			`f: metrics.listen: ":3261" and "127.0.0.1:3261", the address of dashboard, share`,
			`f: dashboard.listen: "127.0.0.1:3261" and ":3261", the address of metrics, share`}},
		{"no listen", [2]string{"listen: 127.0.0.1:3260", "advertise: []"}, []string{"f: portals[0].listen: is required"}},
		{"no port", [2]string{"127.0.0.1:3260", "127.0.0.1"}, []string{`f: portals[0].listen: "127.0.0.1" is not host:port`}},
		{"port 65536", [2]string{"127.0.0.1:3260", "127.0.0.1:65536"}, []string{"f: portals[0].listen: \"127.0.0.1:65536\" has no port from 1 to 65535"}},
		{"port by name", [2]string{"127.0.0.1:3260", "127.0.0.1:iscsi"}, []string{"has no port"}},
		{"IPv6 without brackets", [2]string{"127.0.0.1:3260", `"2001:db8::1:3260"`}, []string{"in brackets"}},
		{"IPv6 without port", [2]string{"127.0.0.1:3260", `"[2001:db8::1]"`}, []string{"in brackets"}},
		{"no address", [2]string{"127.0.0.1:3260", "127.0.0.256:3260"}, []string{"neither an IP address nor a DNS name"}},
		{"no name", [2]string{"127.0.0.1:3260", "a_b:3260"}, []string{"neither an IP address nor a DNS name"}},
		{"same portal, any port", [2]string{"127.0.0.1:3260", "\"[0::1]:0\"\n  - listen: \"[::1]:0\""}, []string{`f: portals[1].listen: "[::1]:0" is the address of portals[0], too. Give one of them a port or another address`}},
		{"same portal", [2]string{"127.0.0.1:3260", "\"[0::1]:3260\"\n  - listen: \"[::1]:3260\""}, []string{`f: portals[1].listen: "[::1]:3260" is the address of portals[0] already`}},
		{"advertise nobody", [2]string{"127.0.0.1:3260", "127.0.0.1:3260\n    advertise: [0.0.0.0:3260, \"[::]:3260\", \":3260\", \"a:0\", \"[fe80::1%eth0]:3260\", b:1, B:1]"}, []string{
			"f: portals[0].advertise[0]: \"0.0.0.0:3260\" is an address that initiators cannot reach", "f: portals[0].advertise[1]: \"[::]:3260\" is an address",
			"f: portals[0].advertise[2]: \":3260\" has no host", "f: portals[0].advertise[3]: \"a:0\" has no port", "f: portals[0].advertise[4]: \"[fe80::1%eth0]:3260\" has a zone", "f: portals[0].advertise[6]: \"B:1\" appears twice"}},
	})
}

func TestWrongTargetsAreRefused(t *testing.T) {
	refused(t, []mistake{
		{"no targets", [2]string{good[strings.Index(good, "targets"):], "log: {}"}, []string{"f: targets: is required: a list of targets, or []"}},
		{"targets without value", [2]string{good[strings.Index(good, "targets"):], "targets:"}, []string{"f: targets: must be a list"}},
		{"no name", [2]string{"name: iqn.2026-11.io.example:store", "alias: a"}, []string{"f: targets[0].name: is required"}},
		{"bad name", [2]string{"iqn.2026-11.io.example:store", "store"}, []string{`f: targets[0].name: iSCSI name "store" does not begin with`}},
		{"same name", [2]string{"", "  - name: IQN.2026-11.io.example:STORE\n    initiators: [\"*\"]\n    luns: [" + lun + "]"}, []string{"f: targets[1].name: \"iqn.2026-11.io.example:store\" is the name of targets[0]"}},
		{"long alias", [2]string{"initiators:", "alias: " + strings.Repeat("a", 256) + "\n    initiators:"}, []string{"f: targets[0].alias: must have at most 255"}},
		{"no initiators", [2]string{`initiators: ["*"]`, "alias: a"}, []string{`f: targets[0].initiators: is required: the initiators that may log in. initiators: ["*"] admits all`}},
		{"empty initiators", [2]string{`["*"]`, "[]"}, []string{`f: targets[0].initiators: is required`}},
		{"bad initiators", [2]string{`["*"]`, `["*", host, ""]`}, []string{"f: targets[0].initiators[1]: iSCSI name", "f: targets[0].initiators[2]: pattern is empty"}},
	})
}

func TestWrongAuthenticationIsRefused(t *testing.T) {
	refused(t, []mistake{
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
			"f: targets[0].auth.users[0].secret: secret has 11 bytes, less than 12 (96 bits), and portals[0] (127.0.0.1:3260) does not require IPsec",
			"f: targets[0].auth.mutual.secret: secret has 1 bytes"}},
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
	})
}

func TestWrongLUNsAreRefused(t *testing.T) {
	refused(t, []mistake{
		{"LUN is null", luns(""), []string{"f: targets[0].luns[0]: must be a map"}},
		{"no id", luns("{backend: memory, size: 1GiB}"), []string{"f: targets[0].luns[0].id: is required"}},
		{"id -2", luns("{id: -2, backend: memory, size: 1GiB}"), []string{"f: targets[0].luns[0].id: must be 0 to 16383, not -2"}},
		{"id 16384", luns("{id: 16384, backend: memory, size: 1GiB}"), []string{"f: targets[0].luns[0].id: must be 0 to 16383, not 16384"}},
		{"id -1", luns("{id: -1, backend: memory, size: 1GiB}"), []string{"f: targets[0].luns[0].id: must be 0 to 16383, not -1"}},
		{"same id", luns(lun + "\n      - " + lun), []string{"f: targets[0].luns[1].id: 0 is the id of targets[0].luns[0]"}},
		{"names", luns(`{id: 0, backend: memory, size: 1GiB, serial: " a", naa: 6001405000000000000000000000000, vendor: VENDOR-OF-9, product: "ä"}`), []string{
			`f: targets[0].luns[0].naa: must be a string, not 6.001405e+30. Put it in quotes`,
			`f: targets[0].luns[0].serial: must have up to 64 printable ASCII characters, without spaces at the ends, not " a"`,
			`f: targets[0].luns[0].vendor: must have up to 8 printable ASCII characters, without spaces at the ends, not "VENDOR-OF-9"`,
			`f: targets[0].luns[0].product: must have up to 16`}},
		{"length of naa", luns(`{id: 0, backend: memory, size: 1GiB, naa: naa.1001405000000000}`), []string{`f: targets[0].luns[0].naa: must be 32 hexadecimal digits that begin with 6, or 16 that begin with 2, 3 or 5, not "naa.1001405000000000"`}},
		{"same names", luns("{id: 0, backend: memory, size: 1GiB, serial: s, naa: 500140500000000a}\n      - {id: 1, backend: memory, size: 1GiB, serial: s, naa: naa.500140500000000A}"), []string{
			"f: targets[0].luns[1].serial: is that of targets[0].luns[0]: initiators would take the two for one disk", "f: targets[0].luns[1].naa: is that of targets[0].luns[0]"}},
		{"no backend", luns("{id: 0, size: 1GiB}"), []string{"f: targets[0].luns[0].backend: is required: block, file, gotgt, memory, nbd, rbd"}},
		{"bad backend", luns("{id: 0, backend: nvme, size: 1GiB}"), []string{`f: targets[0].luns[0].backend: must be one of block, file, gotgt, memory, nbd, rbd, not "nvme"`}},
		{"memory without size", luns("{id: 0, backend: memory}"), []string{"f: targets[0].luns[0].size: is required for backend memory"}},
		{"memory with path", luns("{id: 0, backend: memory, size: 1GiB, path: /x}"), []string{"f: targets[0].luns[0].path: cannot be set for backend memory"}},
		{"file without anything", luns("{id: 0, backend: file}"), []string{"f: targets[0].luns[0].path: is required for backend file", "f: targets[0].luns[0].size: is required for backend file"}},
		{"file with plugin", luns("{id: 0, backend: file, path: /x, size: 1GiB, plugin: file, options: x}"), []string{"f: targets[0].luns[0].plugin: cannot be set for", "f: targets[0].luns[0].options: cannot be set for"}},
		{"block without path", luns("{id: 0, backend: block}"), []string{"f: targets[0].luns[0].path: is required for backend block"}},
		{"block with size", luns("{id: 0, backend: block, path: /dev/sdb, size: 1GiB, block_size: 512}"), []string{"f: targets[0].luns[0].size: cannot be set for backend block", "f: targets[0].luns[0].block_size: cannot be set for backend block"}},
		{"nbd with a path", luns("{id: 0, backend: nbd, path: /dev/nbd0}"), []string{"f: targets[0].luns[0].path: not a URI like nbd://HOST/EXPORT or nbd+unix:///EXPORT?socket=PATH"}},
		{"rbd with a path", luns("{id: 0, backend: rbd, path: rbd/disk}"), []string{"f: targets[0].luns[0].path: not a URI like rbd:POOL/IMAGE"}},
		{"rbd with options", luns("{id: 0, backend: rbd, path: 'rbd:rbd/disk', options: x}"), []string{"f: targets[0].luns[0].options: cannot be set for backend rbd"}},
		{"rbd, two for one image", luns("{id: 0, backend: rbd, path: 'rbd:rbd/disk'}\n      - {id: 1, backend: rbd, path: 'rbd:rbd/disk?id=x'}"), []string{`f: targets[0].luns[1].path: "rbd:rbd/disk?id=x" is the path of targets[0].luns[0]`}},
		{"nbd with size", luns("{id: 0, backend: nbd, path: 'nbd://h/x', size: 1GiB}"), []string{"f: targets[0].luns[0].size: cannot be set for backend nbd"}},
		{"gotgt without anything", luns("{id: 0, backend: gotgt}"), []string{"f: targets[0].luns[0].path: is required", "f: targets[0].luns[0].plugin: is required"}},
		{"gotgt with size", luns("{id: 0, backend: gotgt, path: /x, plugin: file, size: 1GiB}"), []string{"f: targets[0].luns[0].size: cannot be set for backend gotgt"}},
		{"protection", luns("{id: 0, backend: memory, size: 1GiB, protection: 2}"), []string{"f: targets[0].luns[0].protection: must be 0 for none, 1 or 3, not 2"}},
		{"protection of a device", luns("{id: 0, backend: block, path: /dev/sdb, protection: 1}"), []string{"f: targets[0].luns[0].protection: cannot be set for backend block: only files and memory keep protection information. Put a file system on the device and a file in it, or leave protection out"}},
		{"protection and checksums", luns("{id: 0, backend: file, path: /a, size: 1GiB, protection: 1, checksums: true}"), []string{"f: targets[0].luns[0].protection: cannot be set together with checksums: protection information has a CRC of each block already. Leave checksums out"}},
		{"protection file of another LUN", luns("{id: 0, backend: file, path: /a, size: 1GiB, protection: 3}\n      - {id: 1, backend: file, path: /a.pi, size: 1GiB}"), []string{"f: targets[0].luns[1].path: \"/a.pi\" is the path of targets[0].luns[0]"}},
		{"block size", luns("{id: 0, backend: memory, size: 1GiB, block_size: 1024}"), []string{"f: targets[0].luns[0].block_size: must be 512 or 4096, not 1024"}},
		{"size is odd", luns("{id: 0, backend: memory, size: 1000}"), []string{"f: targets[0].luns[0].size: 1000 is not a multiple of the block size, 512"}},
		{"size is odd for 4096", luns("{id: 0, backend: memory, size: 512, block_size: 4096}"), []string{"f: targets[0].luns[0].size: 512 is not a multiple of the block size, 4096"}},
		{"LUN for nobody", luns("{id: 0, backend: memory, size: 1GiB, initiators: []}"), []string{"f: targets[0].luns[0].initiators: is empty: no initiator would see the LUN"}},
		{"LUN for whom", luns(`{id: 0, backend: memory, size: 1GiB, initiators: [host, "*"], read_only_for: ["*", ""]}`), []string{
			"f: targets[0].luns[0].initiators[0]: iSCSI name", "f: targets[0].luns[0].read_only_for[1]: pattern is empty"}},
		{"read_only twice", luns(`{id: 0, backend: memory, size: 1GiB, read_only: true, read_only_for: ["*"]}`), []string{"f: targets[0].luns[0].read_only_for: cannot be combined with read_only"}},
		{"rates low", luns("{id: 0, backend: memory, size: 1GiB, iops: -1, bandwidth: 1023KiB, burst: -1s, min_iops: -1, min_bandwidth: 2TiB}"), []string{
			"f: targets[0].luns[0].iops: must be 0 to 100000000, not -1", "f: targets[0].luns[0].min_iops: must be 0 to", "f: targets[0].luns[0].bandwidth: must be 1MiB to 1TiB per second, or 0, not 1023KiB",
			"f: targets[0].luns[0].min_bandwidth: must be 1 to 1TiB", "f: targets[0].luns[0].burst: must be 0 to 1m, not -1s",
			"f: targets[0].luns[0].min_bandwidth: must be at most bandwidth, 1023KiB, not 2TiB"}},
		{"guarantees above limits", luns("{id: 0, backend: memory, size: 1GiB, iops: 10, min_iops: 11, bandwidth: 1MiB, min_bandwidth: 2MiB, burst: 61s}"), []string{
			"f: targets[0].luns[0].burst: must be 0 to 1m", "f: targets[0].luns[0].min_iops: must be at most iops, 10, not 11", "f: targets[0].luns[0].min_bandwidth: must be at most bandwidth, 1MiB, not 2MiB"}},
		{"burst of nothing", luns("{id: 0, backend: memory, size: 1GiB, burst: 1s, min_iops: 1}"), []string{"f: targets[0].luns[0].burst: requires iops or bandwidth"}},
		{"rates of nobody", luns(`{id: 0, backend: memory, size: 1GiB, iops: 10, bandwidth: 1MiB, rates: [{iops: 1}, {initiators: ["*"]}, {initiators: [host], min_iops: 11, min_bandwidth: 2MiB}]}`), []string{
			"f: targets[0].luns[0].rates[0].initiators: is required", "f: targets[0].luns[0].rates[1]: has no rate: set iops, bandwidth, min_iops or min_bandwidth", "f: targets[0].luns[0].rates[2].initiators[0]: iSCSI name",
			"f: targets[0].luns[0].rates[2].min_iops: must be at most iops of the LUN, 10, not 11", "f: targets[0].luns[0].rates[2].min_bandwidth: must be at most bandwidth of the LUN, 1MiB, not 2MiB"}},
		{"same path", luns("{id: 0, backend: file, path: /a/../x, size: 1GiB}\n      - {id: 1, backend: block, path: /x}"), []string{`f: targets[0].luns[1].path: "/x" is the path of targets[0].luns[0]`}},
	})
}

func TestWrongSectionsAreRefused(t *testing.T) {
	refused(t, []mistake{
		{"limits low", [2]string{"", "limits: {queue_depth: 0, connection_memory: 1MiB, memory: 15MiB, max_fpdu: 511, login_timeout: 0, nop_interval: 1ms, nop_timeout: 0, poll_time: 999ns, max_connections: 0, connections_per_session: 0, error_recovery_level: -1, registrations_per_initiator: 0, state_timeout: 0, fence_timeout: 99ms, store_timeout: 0, descriptors: 127}"}, []string{
			"f: limits.queue_depth: must be 1 to 1024, not 0", "f: limits.max_fpdu: must be 512 to 64768, not 511", "f: limits.max_connections: must be 1 to 65536, not 0",
			"f: limits.connections_per_session: must be 1 to 64, not 0", "f: limits.error_recovery_level: must be 0 to 2, not -1", "f: limits.registrations_per_initiator: must be 1 to 512, not 0",
			"f: limits.connection_memory: must be 4MiB to 64GiB, not 1MiB", "f: limits.memory: must be 16MiB to 16TiB, or 0, not 15MiB", "f: limits.login_timeout: must be 1s to 1h, not 0s", "f: limits.nop_interval: must be 1s to 1h, or 0, not 1ms", "f: limits.nop_timeout: must be 1s", "f: limits.poll_time: must be ", "f: limits.state_timeout: must be 1s", "f: limits.fence_timeout: must be 100ms to 30s, not 99ms", "f: limits.store_timeout: must be 1s to 1h, not 0s", "f: limits.descriptors: must be 128 to"}},
		{"limits high", [2]string{"", "limits: {queue_depth: 1025, connection_memory: 65GiB, memory: 17TiB, max_fpdu: 64769, login_timeout: 61m, nop_interval: 61m, nop_timeout: 61m, poll_time: 1001us, max_connections: 65537, connections_per_session: 65, error_recovery_level: 3, registrations_per_initiator: 513, state_timeout: 61m, fence_timeout: 31s, store_timeout: 61m, descriptors: 1073741825}"}, []string{
			"f: limits.queue_depth", "f: limits.max_fpdu", "f: limits.max_connections", "f: limits.connections_per_session", "f: limits.error_recovery_level", "f: limits.registrations_per_initiator", "f: limits.connection_memory", "f: limits.memory", "f: limits.login_timeout", "f: limits.nop_interval", "f: limits.nop_timeout", "f: limits.poll_time", "f: limits.state_timeout", "f: limits.fence_timeout", "f: limits.store_timeout", "f: limits.descriptors"}},
		{"order_timeout", [2]string{"", "limits: {order_timeout: 1ms}"}, []string{"f: limits.order_timeout: must be 1s to 1h, not 1ms"}},
		{"store calls low", [2]string{"", "limits: {backend_calls: -1, backend_calls_per_lun: 0, heavy_commands: -1}"}, []string{
			"f: limits.backend_calls: must be 0 to 4096, not -1", "f: limits.backend_calls_per_lun: must be 1 to 1024, not 0", "f: limits.heavy_commands: must be 0 to 1024, not -1"}},
		{"store calls high", [2]string{"", "limits: {backend_calls: 4097, backend_calls_per_lun: 1025, heavy_commands: 1025}"}, []string{
			"f: limits.backend_calls: must", "f: limits.backend_calls_per_lun: must", "f: limits.heavy_commands: must"}},
		{"places low", [2]string{"", "limits: {reserved_connections: -1, connections_per_address: -1, connections_per_portal: -1, " +
			"sessions_per_initiator: 0, sessions_per_user: -1, discovery_per_address: 0, log_lines_per_address: 0}"}, []string{
			"f: limits.reserved_connections: must be 0 to 65535, not -1", "f: limits.connections_per_address: must be 0 to 65536, not -1",
			"f: limits.connections_per_portal: must be 0 to 65536, not -1", "f: limits.sessions_per_initiator: must be 1 to 65536, not 0",
			"f: limits.sessions_per_user: must be 0 to 65536, not -1", "f: limits.discovery_per_address: must be 1 to 65536, not 0",
			"f: limits.log_lines_per_address: must be 1 to 10000, not 0"}},
		{"nothing but reserved places", [2]string{"", "limits: {max_connections: 8, reserved_connections: 8}"}, []string{
			"f: limits.reserved_connections: must be less than max_connections, which is 8, not 8"}},
		{"max_time2wait", [2]string{"", "limits: {max_time2wait: 1ms}"}, []string{"f: limits.max_time2wait: must be 2s to 1h, not 1ms"}},
		{"max_time2retain", [2]string{"", "limits: {max_time2retain: 999ms}"}, []string{"f: limits.max_time2retain: must be 1s to 1h, not 999ms"}},
		{"data_timeout", [2]string{"", "limits: {data_timeout: 2h}"}, []string{"f: limits.data_timeout: must be 1s to 1h, not 2h0m0s"}},
		{"task_wait", [2]string{"", "limits: {task_wait: 100ms}"}, []string{"f: limits.task_wait: must be 1s to 1h, not 100ms"}},
		{"send_timeout", [2]string{"", "limits: {send_timeout: 100ms}"}, []string{"f: limits.send_timeout: must be 1s to 1h, not 100ms"}},
		{"lost_sessions", [2]string{"", "limits: {lost_sessions: 0}"}, []string{"f: limits.lost_sessions: must be 1 to 1024, not 0"}},
		{"tokens", [2]string{"", "limits: {tokens: 0, tokens_per_initiator: 16385}"}, []string{
			"f: limits.tokens: must be 1 to 16384, not 0", "f: limits.tokens_per_initiator: must be 1 to 16384, not 16385"}},
		{"lost_sessions_per_initiator", [2]string{"", "limits: {lost_sessions_per_initiator: 0}"}, []string{"f: limits.lost_sessions_per_initiator: must be 1 to 1024, not 0"}},
		{"debug for all", [2]string{"", "debug: {listen: 0.0.0.0:6060}"}, []string{`f: debug.listen: must be a loopback address, not "0.0.0.0:6060"`}},
		{"debug without host", [2]string{"", `debug: {listen: ":6060"}`}, []string{`f: debug.listen: must be a loopback address, not ":6060"`}},
		{"debug is not an address", [2]string{"", "debug: {listen: x}"}, []string{`f: debug.listen: "x" is not host:port`}},
		{"control without TLS", [2]string{"", "control: {listen: 192.0.2.1:3261}"}, []string{
			"f: control.access: is required with control.listen: no certificate has a role", "f: control.tls.cert: is required with control.listen", "f: control.tls.key: is required", "f: control.tls.client_ca: is required"}},
		{"networks", [2]string{"    initiators:", "    networks: [10.0.0.1/24, 10.0.0.0/24, host, 10.0.0.0/24]\n    initiators:"}, []string{
			`f: targets[0].networks[0]: "10.0.0.1/24" has an address beyond its length. The network is 10.0.0.0/24`, `f: targets[0].networks[2]: "host" is not a network like`, "f: targets[0].networks[3]: 10.0.0.0/24 appears twice"}},
		{"no network", [2]string{"    initiators:", "    networks: []\n    initiators:"}, []string{"f: targets[0].networks: is empty: no initiator could log in"}},
		{"a role for nobody", [2]string{"", "control: {access: [{role: read}]}"}, []string{"f: control.access[0]: must name one of user, group, certificate and ou"}},
		{"a role for two", [2]string{"", "control: {access: [{certificate: a, ou: b, role: read}]}"}, []string{"f: control.access[0]: must name one of"}},
		{"another role", [2]string{"", "control: {access: [{ou: b, role: root}, {ou: b}]}"}, []string{
			`f: control.access[0].role: must be read, operate or admin, not "root"`, `f: control.access[1].role: must be read, operate or admin, not ""`}},
		{"a user that cannot connect", [2]string{"", "control: {access: [{user: alice, role: read}]}"}, []string{"f: control.access[0].user: requires control.socket_group"}},
		{"paths", [2]string{"", "control: {paths: [luns, /srv/../etc, /srv/, /srv]}"}, []string{
			`f: control.paths[0]: must be an absolute path without . and .., and without a slash at its end, not "luns"`, "f: control.paths[1]: must be", "f: control.paths[2]: must be"}},
		{"a group without a role", [2]string{"", "control: {socket_group: storage, access: [{ou: a, role: read}]}"}, []string{
			"f: control.socket_group: gives its members no role. Add one: control.access: [{group: storage, role: read}]"}},
		{"a portal has control without certificates", [2]string{"  - listen: 127.0.0.1:3260", "  - {listen: 127.0.0.1:3260, control: true}"}, []string{
			"f: control.access: is required with portals[0].control: no certificate has a role", "f: control.tls.cert: is required with portals[0].control", "f: control.tls.key: is required", "f: control.tls.client_ca: is required"}},
		{"a portal has control without iser", [2]string{"  - listen: 127.0.0.1:3260", "  - {listen: 127.0.0.1:3260, control: true, transports: [tcp]}\ncontrol: {tls: {cert: c, key: k, client_ca: a}, access: [{ou: a, role: read}]}"}, []string{
			"f: portals[0].control: requires the transport iser, which portals[0].transports does not have"}},
		{"control is not an address", [2]string{"", "control: {listen: x, tls: {cert: c, key: k, client_ca: a}, access: [{ou: a, role: read}]}"}, []string{`f: control.listen: "x" is not host:port`}},
		{"control is a portal", [2]string{"", "control: {listen: \"127.0.0.1:3260\", tls: {cert: c, key: k, client_ca: a}, access: [{ou: a, role: read}]}"}, []string{`f: control.listen: "127.0.0.1:3260" is the address of portals[0] already`}},
		{"control is debug", [2]string{"", "debug: {listen: \"[::1]:1\"}\ncontrol: {listen: \"[0::1]:1\", tls: {cert: c, key: k, client_ca: a}, access: [{ou: a, role: read}]}"}, []string{`f: control.listen: "[0::1]:1" is the address of debug already`}},
		{"control socket", [2]string{"", "control: {socket: " + strings.Repeat("s", 108) + "}"}, []string{"f: control.socket: must have at most 107 bytes"}},
		{"metrics is not an address", [2]string{"", "metrics: {listen: x}"}, []string{`f: metrics.listen: "x" is not host:port`}},
		{"metrics is a portal", [2]string{"", "metrics: {listen: \"127.0.0.1:3260\"}"}, []string{`f: metrics.listen: "127.0.0.1:3260" is the address of portals[0] already`}},
		{"dashboard is not an address", [2]string{"", "dashboard: {listen: x}"}, []string{`f: dashboard.listen: "x" is not host:port`}},
		{"dashboard is a portal", [2]string{"", "dashboard: {listen: \"127.0.0.1:3260\"}"}, []string{`f: dashboard.listen: "127.0.0.1:3260" is the address of portals[0] already`}},
		{"drain is long", [2]string{"", "drain: 601s"}, []string{"f: drain: must be 0 to 10m, not 10m1s"}},
		{"drain_to without drain", [2]string{"", "drain_to: 192.0.2.9:3260"}, []string{"f: drain_to: requires drain, the time in which initiators go there"}},
		{"drain_to has no port", [2]string{"", "drain: 1s\ndrain_to: elsewhere"}, []string{"f: drain_to: "}},
		{"drain is negative", [2]string{"", "drain: -1s"}, []string{"f: drain: must be 0 to 10m, not -1s"}},
		{"log format", [2]string{"", "log: {format: xml}"}, []string{`f: log.format: must be text or json, not "xml"`}},
		{"no state_dir for a file", [2]string{lun, "{id: 0, backend: file, path: /x, size: 1GiB}\nstate_dir: \"\""}, []string{"f: state_dir: is required: targets[0].luns[0] keeps its data"}},
	})
}

// Nearest finds the name with the fewest typing mistakes, of which two letters in the wrong order are one.
func TestNearest(t *testing.T) {
	known := []string{"tpgt", "listen", "advertise", "ipsec", "id"}
	for name, want := range map[string]string{
		"tgpt": "tpgt", "ptgt": "tpgt", "tpg": "tpgt", "tgtp": "", "lsiten": "listen", "lisetne": "listen", "lsitne": "listen", "silten": "listen",
		"IPSEC": "ipsec", "di": "id", "": "", "x": "", strings.Repeat("listen", 11): "",
	} {
		if got := Nearest(name, known); got != want {
			t.Errorf("%q: %q, want %q", name, got, want)
		}
	}
}

func TestClusterMistakesAreRefused(t *testing.T) {
	const shared = `shared: true, naa: "3000000000000001"`
	of := func(group, lun string) [2]string {
		return [2]string{"{id: 0, backend: memory, size: 1GiB}", lun + "\ncluster: {" + group + "}"}
	}
	const rbd, nbd = "{id: 0, backend: rbd, path: rbd:p/i, " + shared, "{id: 0, backend: nbd, path: \"nbd://h\", " + shared
	const a = "name: a, etcd: [\"http://h:1\"]"
	refused(t, []mistake{
		{"no name", of("etcd: [\"http://h:1\"]", lun), []string{"f: cluster.name: is required with cluster.etcd"}},
		{"no etcd", of("name: a", lun), []string{"f: cluster.etcd: is required with cluster.name"}},
		{"names", of("name: \"a/b\", etcd: [\"http://h:1\"]", lun), []string{"f: cluster.name: must have up to 63 printable ASCII characters"}},
		{"members", of("name: a, etcd: [\"h:1\", \"http://h\", \"http://u@h:1\", \"http://h:1/x\"]", lun), []string{
			"f: cluster.etcd[0]: must be http://HOST:PORT", "f: cluster.etcd[1]: must be", "f: cluster.etcd[2]: must be", "f: cluster.etcd[3]: must be"}},
		{"http and https", of("name: a, etcd: [\"https://h:1\", \"http://h:2\"]", lun), []string{"f: cluster.etcd[1]: must be http or https like the others"}},
		{"prefix", of(a+", prefix: x", lun), []string{"f: cluster.prefix: must be a slash and a name"}},
		{"CA without TLS", of(a+", tls: {ca: /x}", lun), []string{"f: cluster.tls.ca: requires https in cluster.etcd"}},
		{"certificate without key", of("name: a, etcd: [\"https://h:1\"], tls: {cert: /x}", lun), []string{"f: cluster.tls: must have both cert and key, or neither"}},
		{"times", of(a+", lease: 1s, failback: -1s", lun), []string{"f: cluster.lease: must be 2s to 1m, not 1s", "f: cluster.failback: must be 0 to 24h, not -1s"}},
		{"fence", of(a+", fence_program: x", lun), []string{"f: cluster.fence_program: must be an absolute path"}},
		{"shared without a group", luns(rbd + "}"), []string{"f: targets[0].luns[0].shared: requires cluster.name and cluster.etcd"}},
		{"shared memory", of(a, "{id: 0, backend: memory, size: 1GiB, "+shared+"}"), []string{"f: targets[0].luns[0].shared: cannot be set for backend memory"}},
		{"shared without a fence", of(a, nbd+"}"), []string{"f: targets[0].luns[0].shared: requires cluster.fence_program for backend nbd"}},
		{"shared without NAA", of(a, "{id: 0, backend: rbd, path: rbd:p/i, shared: true}"), []string{"f: targets[0].luns[0].naa: is required with shared"}},
		{"removable", of(a, rbd+", sanitize: true, removable: true}"), []string{"f: targets[0].luns[0].removable: cannot be set together with shared"}},
	})
	for _, more := range []string{rbd + "}\ncluster: {" + a + "}", nbd + "}\ncluster: {" + a + ", fence_program: /bin/true}"} {
		if _, err := load("f", []byte(strings.Replace(good, lun, more, 1))); err != nil {
			t.Error(err)
		}
	}
}
