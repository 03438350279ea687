package config

import (
	"errors"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

// commented has comments, blank lines and both styles of lists.
const commented = `# Of the storage machine.

portals:
  - listen: 127.0.0.1:3260     # loopback
    transports: [iser,  tcp]

  # The second network.
  - {listen: "[::1]:3261", tpgt: 2}

targets:
  # The first one.
  - name: iqn.2026-11.io.example:a   # name
    initiators: ["*:one",   '*:two'] # who

    luns:
      # Scratch.
      - {id: 0, backend: memory,   size: 1GiB}  # zero

      - id: 7
        backend: memory   # of all
        size: 2GiB
      # - {id: 8, backend: memory, size: 1GiB}

  - name: iqn.2026-11.io.example:b
    initiators:
    - "*"
    luns:
    - {id: 0, backend: memory, size: 1MiB}

# The rest.
limits: {queue_depth: 12}   # few
state_dir: ""
# The end.
`

const (
	nameA = "iqn.2026-11.io.example:a"
	nameB = "iqn.2026-11.io.example:b"
)

func memoryLUN(id int, size Size) LUN { return LUN{ID: id, Backend: "memory", Size: size} }

// mustDocument returns the document of a valid configuration.
func mustDocument(t *testing.T, text string) *Document {
	t.Helper()
	d, err := NewDocument("f", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.Config(); err != nil {
		t.Fatal(err)
	}
	return d
}

// Each edit replaces one part of the text and keeps the rest.
func TestDocumentEdits(t *testing.T) {
	for _, tc := range []struct {
		name     string
		edit     func(*Document) error
		old, new string // part of commented; old empty: new is at the end
	}{
		{"AddLUN in a flow style", func(d *Document) error { return d.AddLUN(nameB, memoryLUN(3, 1<<20)) },
			"size: 1MiB}\n", "size: 1MiB}\n    - {id: 3, backend: memory, size: 1MiB}\n"},
		{"AddLUN in a block style", func(d *Document) error { return d.AddLUN(nameA, memoryLUN(3, 3<<30)) },
			"        size: 2GiB\n", "        size: 2GiB\n      - id: 3\n        backend: memory\n        size: 3GiB\n"},
		{"RemoveLUN", func(d *Document) error { return d.RemoveLUN(nameA, 0) },
			"      # Scratch.\n      - {id: 0, backend: memory,   size: 1GiB}  # zero\n\n", ""},
		{"SetLUN in a flow style", func(d *Document) error { return d.SetLUN(nameA, 0, "size", "5GiB") },
			"{id: 0, backend: memory,   size: 1GiB}  # zero", "{id: 0, backend: memory, size: 5GiB} # zero"},
		{"SetLUN in a block style", func(d *Document) error { return d.SetLUN(nameA, 7, "size", "5GiB") },
			"size: 2GiB", "size: 5GiB"},
		{"SetLUN with a new key", func(d *Document) error { return d.SetLUN(nameA, 7, "read_only", "true") },
			"size: 2GiB\n", "size: 2GiB\n        read_only: true\n"},
		{"SetLUN takes a key away", func(d *Document) error { return d.SetLUN(nameA, 7, "size", "") },
			"        size: 2GiB\n", ""},
		{"SetLUN with a list", func(d *Document) error { return d.SetLUN(nameA, 7, "read_only_for", `["*:x", '*:y']`) },
			"size: 2GiB\n", "size: 2GiB\n        read_only_for: [\"*:x\", '*:y']\n"},
		{"SetLUN keeps a comment", func(d *Document) error { return d.SetLUN(nameA, 7, "backend", "file") },
			"backend: memory   # of all", "backend: file # of all"},
		{"SetLUN rates", func(d *Document) error {
			return errors.Join(d.SetLUN(nameA, 0, "iops", "5000"), d.SetLUN(nameA, 0, "rates", "[{initiators: ['*'], bandwidth: 1MiB}]"))
		}, "{id: 0, backend: memory,   size: 1GiB}  # zero", "{id: 0, backend: memory, size: 1GiB, iops: 5000, rates: [{initiators: ['*'], bandwidth: 1MiB}]} # zero"},
		{"AddTarget", func(d *Document) error {
			return d.AddTarget(Target{Name: "iqn.2026-11.io.example:c", Alias: "yes", InitialR2T: true, Initiators: []string{"*"}, LUNs: []LUN{memoryLUN(0, 512)}})
		}, "size: 1MiB}\n", "size: 1MiB}\n  - name: iqn.2026-11.io.example:c\n    alias: \"yes\"\n    initiators: [\"*\"]\n    luns:\n      - {id: 0, backend: memory, size: 512}\n"},
		{"RemoveTarget", func(d *Document) error { return d.RemoveTarget(strings.ToUpper(nameB)) },
			"  - name: iqn.2026-11.io.example:b\n    initiators:\n    - \"*\"\n    luns:\n    - {id: 0, backend: memory, size: 1MiB}\n\n", ""},
		{"SetTarget", func(d *Document) error { return d.SetTarget(nameA, "alias", "123") },
			"size: 2GiB\n      # - {id: 8, backend: memory, size: 1GiB}\n", "size: 2GiB\n      # - {id: 8, backend: memory, size: 1GiB}\n    alias: \"123\"\n"},
		{"SetTarget below", func(d *Document) error { return d.SetTarget(nameB, "redirect.to", "192.0.2.1:3260") },
			"size: 1MiB}\n", "size: 1MiB}\n    redirect: {to: \"192.0.2.1:3260\"}\n"},
		{"AddPortal", func(d *Document) error { return d.AddPortal(Portal{Listen: "[::]:3262", TPGT: 2}) },
			"tpgt: 2}\n", "tpgt: 2}\n  - {listen: \"[::]:3262\", tpgt: 2}\n"},
		{"RemovePortal", func(d *Document) error { return d.RemovePortal("[0::1]:3261") },
			"  # The second network.\n  - {listen: \"[::1]:3261\", tpgt: 2}\n\n", ""},
		{"AllowInitiator in a flow style", func(d *Document) error { return d.AllowInitiator(nameA, "*:three") },
			`["*:one",   '*:two']`, `["*:one", '*:two', "*:three"]`},
		{"AllowInitiator in a block style", func(d *Document) error { return d.AllowInitiator(nameB, "iqn.1993-08.org.debian:01:x") },
			"    - \"*\"\n", "    - \"*\"\n    - iqn.1993-08.org.debian:01:x\n"},
		{"SetLimit", func(d *Document) error { return d.SetLimit("max_connections", "7") },
			"limits: {queue_depth: 12}   # few", "limits: {queue_depth: 12, max_connections: 7} # few"},
		{"DenyInitiator", func(d *Document) error { return d.DenyInitiator(nameA, "*:ONE") },
			`["*:one",   '*:two']`, `['*:two']`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d := mustDocument(t, commented)
			before := d.Clone()
			if err := tc.edit(d); err != nil {
				t.Fatal(err)
			}
			if strings.Count(commented, tc.old) != 1 {
				t.Fatalf("%q is not once in the text", tc.old)
			}
			if want := strings.Replace(commented, tc.old, tc.new, 1); string(d.Bytes()) != want {
				t.Errorf("%s\nwant\n%s", d.Bytes(), want)
			}
			if string(before.Bytes()) != commented {
				t.Error("the clone has changed, too")
			}
		})
	}
}

// An edit that fails names the key and changes nothing.
func TestDocumentEditErrors(t *testing.T) {
	const nobody = "iqn.2026-11.io.example:nobody"
	for _, tc := range []struct {
		name string
		edit func(*Document) error
		is   error
		want string
	}{
		{"AddTarget", func(d *Document) error { return d.AddTarget(Target{Name: strings.ToUpper(nameA)}) }, ErrExists, "f: targets[0]: is target " + strings.ToUpper(nameA) + " already"},
		{"RemoveTarget", func(d *Document) error { return d.RemoveTarget(nobody) }, ErrNotFound, "f: targets: has no target " + nobody},
		{"SetTarget", func(d *Document) error { return d.SetTarget(nobody, "alias", "a") }, ErrNotFound, "f: targets: has no target " + nobody},
		{"SetTarget name", func(d *Document) error { return d.SetTarget(nameA, "name", nobody) }, nil, "f: targets[0].name: cannot be changed: remove the object and add another"},
		{"SetTarget luns", func(d *Document) error { return d.SetTarget(nameA, "luns", "[]") }, nil, "f: targets[0].luns: cannot be changed: remove the object and add another"},
		{"SetTarget unknown", func(d *Document) error { return d.SetTarget(nameA, "alais", "a") }, nil, "f: targets[0].alais: unknown key, did you mean alias?"},
		{"SetTarget unknown below", func(d *Document) error { return d.SetTarget(nameA, "redirect.too", "a") }, nil, "f: targets[0].redirect.too: unknown key, did you mean to?"},
		{"SetTarget below a string", func(d *Document) error { return d.SetTarget(nameA, "alias.x", "a") }, nil, "f: targets[0].alias: has no keys of its own"},
		{"SetTarget no YAML", func(d *Document) error { return d.SetTarget(nameA, "initiators", "[a") }, nil, "f: targets[0].initiators: yaml: "},
		{"SetTarget two documents", func(d *Document) error { return d.SetTarget(nameA, "alias", "a\n---\nb") }, nil, "f: targets[0].alias: must be one value in YAML"},
		{"SetTarget nothing", func(d *Document) error { return d.SetTarget(nameA, "alias", "# a") }, nil, "f: targets[0].alias: must be one value in YAML"},
		{"SetTarget anchor", func(d *Document) error { return d.SetTarget(nameA, "alias", "&a b") }, nil, "f: targets[0].alias: must not have anchors or aliases"},
		{"AddLUN no target", func(d *Document) error { return d.AddLUN(nobody, memoryLUN(0, 512)) }, ErrNotFound, "f: targets: has no target " + nobody},
		{"AddLUN", func(d *Document) error { return d.AddLUN(nameA, memoryLUN(7, 512)) }, ErrExists, "f: targets[0].luns[1]: is LUN 7 already"},
		{"RemoveLUN", func(d *Document) error { return d.RemoveLUN(nameB, 7) }, ErrNotFound, "f: targets[1].luns: has no LUN 7"},
		{"SetLUN", func(d *Document) error { return d.SetLUN(nameB, 7, "size", "1KiB") }, ErrNotFound, "f: targets[1].luns: has no LUN 7"},
		{"SetLUN id", func(d *Document) error { return d.SetLUN(nameB, 0, "id", "1") }, nil, "f: targets[1].luns[0].id: cannot be changed: remove the object and add another"},
		{"SetLimit unknown", func(d *Document) error { return d.SetLimit("max_connection", "1") }, nil, "f: limits.max_connection: unknown key, did you mean max_connections?"},
		{"AddPortal", func(d *Document) error { return d.AddPortal(Portal{Listen: "[0:0::1]:3261"}) }, ErrExists, "f: portals[1]: listens on [0:0::1]:3261 already"},
		{"RemovePortal", func(d *Document) error { return d.RemovePortal("[::2]:3261") }, ErrNotFound, "f: portals: has no portal [::2]:3261"},
		{"AllowInitiator", func(d *Document) error { return d.AllowInitiator(nameB, "*") }, ErrExists, `f: targets[1].initiators[0]: is "*" already`},
		{"DenyInitiator", func(d *Document) error { return d.DenyInitiator(nameB, "*:one") }, ErrNotFound, `f: targets[1].initiators: has no "*:one"`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d := mustDocument(t, commented)
			err := tc.edit(d)
			if err == nil || !strings.HasPrefix(err.Error(), tc.want) || tc.is != nil && !errors.Is(err, tc.is) {
				t.Errorf("%v, want %s", err, tc.want)
			}
			if string(d.Bytes()) != commented {
				t.Errorf("the text has changed:\n%s", d.Bytes())
			}
		})
	}
}

// An edited document is checked like a file.
func TestDocumentConfigErrors(t *testing.T) {
	d := mustDocument(t, commented)
	if err := errors.Join(d.SetLUN(nameA, 0, "size", "1000"), d.DenyInitiator(nameB, "*"), d.SetTarget(nameA, "alias", "{}")); err != nil {
		t.Fatal(err)
	}
	_, err := d.Config()
	wantErrors(t, err, []string{
		"f: targets[0].alias: must be a string, not a map",
		"f: targets[0].luns[0].size: 1000 is not a multiple of the block size, 512",
		"f: targets[1].initiators: is required: the initiators that may log in",
	})
}

// shared has anchors and aliases at the places of edits.
const shared = `
lun: &lun {id: 0, backend: memory, size: 1MiB}
portals: &portals
  - listen: 127.0.0.1:3260
targets:
  - name: iqn.2026-11.io.example:a
    initiators: &all ["*"]
    luns: &luns
      - *lun
      - &one {id: 1, backend: memory, size: &size 1MiB}
  - &b
    name: iqn.2026-11.io.example:b
    initiators: *all
    luns: *luns
  - <<: *b
    name: iqn.2026-11.io.example:c
    redirect: {to: "192.0.2.1:3260"}
  - name: iqn.2026-11.io.example:d
    initiators: ["*"]
    luns:
      - {<<: *one, id: 2, size: *size}
`

// An edit that would change other places through an alias is refused.
func TestDocumentAliases(t *testing.T) {
	const nameC, nameD = "iqn.2026-11.io.example:c", "iqn.2026-11.io.example:d"
	for _, tc := range []struct {
		name string
		edit func(*Document) error
		want string // an error, or what is new in the text
	}{
		{"an alias in a list", func(d *Document) error { return d.SetLUN(nameA, 0, "size", "2MiB") }, "f: targets[0].luns: has the anchor &luns: a change would change every *luns."},
		{"below an alias", func(d *Document) error { return d.AddLUN(nameB, memoryLUN(5, 512)) }, "f: targets[1]: has the anchor &b: a change would change every *b."},
		{"a target that others need", func(d *Document) error { return d.RemoveTarget(nameA) }, "f: targets[0]: has the anchor &all, which *all needs elsewhere."},
		{"initiators that others need", func(d *Document) error { return d.AllowInitiator(nameA, "*:x") }, "f: targets[0].initiators: has the anchor &all: a change would change every *all."},
		{"all initiators that others need", func(d *Document) error { return d.SetTarget(nameA, "initiators", "[\"*:x\"]") }, "f: targets[0].initiators: has the anchor &all, which *all needs elsewhere."},
		{"merged initiators", func(d *Document) error { return d.AllowInitiator(nameC, "*:x") }, "f: targets[2].initiators: comes from an alias by <<: a change would change every use of it."},
		{"merged LUNs", func(d *Document) error { return d.RemoveLUN(nameC, 0) }, "f: targets[2].luns: comes from an alias by <<: a change would change every use of it."},
		{"a merged key", func(d *Document) error { return d.SetTarget(nameC, "initiators", "") }, "f: targets[2].initiators: comes from an alias by <<"},
		{"a merged key gets a value of its own", func(d *Document) error { return d.SetTarget(nameC, "initiators", "[\"*:x\"]") }, "\n    initiators: [\"*:x\"]\n"},
		{"a value instead of an alias", func(d *Document) error { return d.SetLUN(nameD, 2, "size", "2MiB") }, "{<<: *one, id: 2, size: 2MiB}"},
		{"next to a merge", func(d *Document) error { return d.SetLUN(nameD, 2, "read_only", "true") }, "{<<: *one, id: 2, size: *size, read_only: true}"},
		{"an anchor that nobody uses", func(d *Document) error { return d.AddPortal(Portal{Listen: "127.0.0.1:3261"}) }, "\n  - listen: 127.0.0.1:3261\n"},
		{"what has an alias in it", func(d *Document) error { return d.RemoveTarget(nameD) }, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d, err := NewDocument("f", []byte(shared))
			if err != nil {
				t.Fatal(err)
			}
			err = tc.edit(d)
			switch {
			case strings.HasPrefix(tc.want, "f: "):
				if !errors.Is(err, ErrShared) || !strings.HasPrefix(err.Error(), tc.want) {
					t.Errorf("%v, want %s", err, tc.want)
				}
				if string(d.Bytes()) != shared {
					t.Errorf("the text has changed:\n%s", d.Bytes())
				}
			case err != nil || !strings.Contains(string(d.Bytes()), tc.want) || string(d.Bytes()) == shared:
				t.Errorf("%v\n%s", err, d.Bytes())
			}
		})
	}
}

// Edits keep other layouts.
func TestDocumentLayouts(t *testing.T) {
	const rest = "    initiators: [\"*\"]\n    luns: [{id: 0, backend: memory, size: 1MiB}]\n"
	edit := func(d *Document) error { return d.AddLUN(nameA, memoryLUN(1, 1<<20)) }
	for _, tc := range []struct{ name, text, want string }{
		{"four spaces", "portals:\n    - listen: 127.0.0.1:1\ntargets:\n    - name: " + nameA + "\n      initiators:\n          - \"*\"\n      luns:\n          - id: 0\n            backend: memory\n            size: 1MiB\nlog:\n    level: info\n",
			"            size: 1MiB\n          - id: 1\n            backend: memory\n            size: 1MiB\nlog:"},
		{"lists that are not indented", "portals:\n- listen: 127.0.0.1:1\ntargets:\n- name: " + nameA + "\n  initiators: [\"*\"]\n  luns:\n  - id: 0\n    backend: memory\n    size: 1MiB\n",
			"    size: 1MiB\n  - id: 1\n    backend: memory\n    size: 1MiB\n"},
		{"no line end", "portals: [{listen: \"127.0.0.1:1\"}]\ntargets:\n- name: " + nameA + "\n  initiators: [\"*\"]\n  luns:\n    - {id: 0, backend: memory, size: 1MiB}",
			"\n    - {id: 0, backend: memory, size: 1MiB}\n    - {id: 1, backend: memory, size: 1MiB}\n"},
		{"a flow list on many lines", "# a\nportals: [{listen: \"127.0.0.1:1\"}]   # b\ntargets:\n- name: " + nameA + "\n  initiators: [\"*\"]\n  luns: [\n    {id: 0, backend: memory, size: 1MiB},\n  ]\n\n# c\nlog: {level:   info}\n",
			"  luns: [{id: 0, backend: memory, size: 1MiB}, {id: 1, backend: memory, size: 1MiB}]\n\n# c\nlog: {level:   info}\n"},
		{"comments in a flow list", "portals: [\n  # one\n  {listen: \"127.0.0.1:1\"}, # first\n  # two\n  {listen: \"127.0.0.1:2\"}\n]\ntargets:\n  - name: " + nameA + "\n    initiators: [\"*\"] # who\n    luns: [\n      # zero\n      {id: 0, backend: memory, size: 1MiB}, # first\n    ]\n",
			"    luns: [\n      # zero\n      {id: 0, backend: memory, size: 1MiB} # first\n    , {id: 1, backend: memory, size: 1MiB}]\n"},
		{"JSON", `{"portals": [{"listen": "127.0.0.1:1"}], "targets": [{"name": "` + nameA + `", "initiators": ["*"], "luns": [{"id": 0, "backend": "memory", "size": "1MiB"}]}]}`,
			`"size": "1MiB"}, {id: 1, backend: memory, size: 1MiB}]}]}`},
		{"line ends of Windows", "portals:\r\n- listen: 127.0.0.1:1\r\ntargets:\r\n- name: " + nameA + "\r\n  initiators: [\"*\"]\r\n  luns:\r\n  - {id: 0, backend: memory, size: 1MiB}\r\nlog: {level: info}\r\n",
			"\r\n  - {id: 0, backend: memory, size: 1MiB}\r\n  - {id: 1, backend: memory, size: 1MiB}\r\nlog: {level: info}\r\n"},
		{"a marker and a comment in the list", "---\n# a\nportals: [{listen: \"127.0.0.1:1\"}]\ntargets:\n  - name: " + nameA + "\n" + rest + "    # b\n",
			"---\n# a\nportals: [{listen: \"127.0.0.1:1\"}]\ntargets:\n  - name: " + nameA + "\n    initiators: [\"*\"]\n    luns: [{id: 0, backend: memory, size: 1MiB}, {id: 1, backend: memory, size: 1MiB}]\n    # b\n"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d := mustDocument(t, tc.text)
			if err := edit(d); err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(string(d.Bytes()), tc.want) {
				t.Errorf("%q\nlacks\n%q", d.Bytes(), tc.want)
			}
			if c, err := d.Config(); err != nil || len(c.Targets[0].LUNs) != 2 {
				t.Errorf("%v", err)
			}
		})
	}
}

// Edits can create a document from an empty text.
func TestDocumentFromNothing(t *testing.T) {
	for text, head := range map[string]string{"": "", "# a\n\n": "# a\n\n", "---\n": ""} {
		d, err := NewDocument("f", []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		if err := d.RemoveTarget(nameA); !errors.Is(err, ErrNotFound) {
			t.Error(err)
		}
		err = errors.Join(d.AddPortal(Portal{Listen: "127.0.0.1:3260", TPGT: 1}), d.AddTarget(Target{Name: nameA, InitialR2T: true}), d.AllowInitiator(nameA, "*"), d.AddLUN(nameA, LUN{ID: 3, Backend: "file", Path: "/x", Size: 1 << 40}))
		if err != nil {
			t.Fatal(err)
		}
		want := head + "portals:\n  - listen: 127.0.0.1:3260\ntargets:\n  - name: " + nameA + "\n    initiators: [\"*\"]\n    luns:\n      - {id: 3, backend: file, path: /x, size: 1TiB}\n"
		if got := string(d.Bytes()); got != want && got != "---\n"+want {
			t.Errorf("%s\nwant\n%s", got, want)
		}
		if _, err := d.Config(); err != nil {
			t.Error(err)
		}
	}
}

// Every value that is written reads as the same value.
func TestDocumentWritesEverything(t *testing.T) {
	d := mustDocument(t, good)
	target := Target{
		Name: nameA, Alias: "0x10", Initiators: []string{"*", "?:a"}, PortalGroups: []int{1},
		Auth: Auth{Method: "chap", Algorithms: []string{"md5"}, Users: []User{
			{Name: "null", Secret: "# 'secret\": of u", Initiator: "*:a", Mutual: Credential{Name: "t", Secret: "12345678901234567890"}},
			{Name: "ä\n", Secret: "\x00\xff0123456789"},
		}, Mutual: Credential{Name: "~", Secret: "0x0123456789"}},
		Redirect:   Redirect{To: "[2001:db8::1]:3260", Permanent: true},
		InitialR2T: false, FirstBurst: 512, MaxBurst: 1 << 20, MaxOutstandingR2T: 65535, MaxRecvSegment: 1<<24 - 1,
		LUNs: []LUN{
			{ID: 0, Backend: "gotgt", Path: "/x: y", BlockSize: 4096, ReadOnly: true, WriteThrough: true, Removable: true, Sanitize: true, Plugin: "file", Options: "{a, b}", Initiators: []string{"*"},
				Serial: "0123", NAA: "6001405000000000000000000000000f", Vendor: "#v", Product: "a: b"},
			{ID: 16383, Backend: "file", Path: " ", Size: 4096, BlockSize: 512, ReadOnlyFor: []string{"*:b"},
				IOPS: 5000, Bandwidth: 100 << 20, Burst: 90 * time.Second / 2, MinIOPS: 1, MinBandwidth: 3, Rates: []Rate{
					{Initiators: []string{"*:c", "?"}, IOPS: 9, Bandwidth: 1 << 20, Burst: time.Minute, MinIOPS: 2, MinBandwidth: 4}, {Initiators: []string{"*"}, IOPS: 1}}},
		},
	}
	portal := Portal{Listen: ":0", Advertise: []string{"a:1", "[2001:db8::2]:2"}, Transports: []string{"tcp"}, TPGT: 9}
	if err := errors.Join(d.AddTarget(target), d.AddPortal(portal)); err != nil {
		t.Fatal(err)
	}
	c, err := d.Config()
	if err != nil {
		t.Fatalf("%v\n%s", err, d.Bytes())
	}
	if !reflect.DeepEqual(c.Targets[1], target) || !reflect.DeepEqual(c.Portals[1], portal) {
		t.Errorf("%#v\nwant\n%#v\n%s", c.Targets[1], target, d.Bytes())
	}
}

// Config includes the environment, and edits do not write it into the text.
func TestDocumentEnvironment(t *testing.T) {
	t.Setenv("ISER_TARGET_LIMITS_QUEUE_DEPTH", "77")
	d := mustDocument(t, commented)
	if err := d.SetLUN(nameA, 0, "size", "5GiB"); err != nil {
		t.Fatal(err)
	}
	c, err := d.Config()
	if err != nil || c.Limits.QueueDepth != 77 || strings.Contains(string(d.Bytes()), "77") {
		t.Errorf("%v, %v\n%s", c.Limits, err, d.Bytes())
	}
}

func TestOpenDocumentErrors(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "missing.yaml")
	if _, err := OpenDocument(missing); err == nil || err.Error() != missing+": no such file or directory" {
		t.Error(err)
	}
	for text, want := range map[string]string{
		"a: [":             "f:1: yaml: did not find expected",
		"- a":              "f:1: yaml: a configuration must be a mapping of keys",
		"a: 1\na: 2":       `f:2: yaml: mapping key "a" already defined at line 1`,
		"a: 1\n---\nb: 1":  "f:2: yaml: a second document begins",
		"a: *x":            "f: yaml: unknown anchor. Put a value that begins with * in quotes",
		"a: &x [*x]":       "f: yaml: anchor 'x' value contains itself",
		string(manyNULs()): "f: is larger than 1MiB",
	} {
		if _, err := NewDocument("f", []byte(text)); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%.20q: %v, want %s", text, err, want)
		}
	}
	d := mustDocument(t, good)
	if err := d.SetTarget("iqn.2026-11.io.example:store", "alias", strings.Repeat("a", MaxFile)); err == nil || err.Error() != "f: would become larger than 1MiB" {
		t.Errorf("%.100v", err)
	}
}

func manyNULs() []byte { return make([]byte, MaxFile+1) }

// SetLimit keeps the comments of the section. It refuses a key that the environment overrides.
func TestSetLimit(t *testing.T) {
	const head, tail = "portals: [{listen: \":1\"}] # one\ntargets: []\n", "log: {level: warn}\n"
	for _, tc := range []struct{ name, text, key, value, want string }{
		{"block style", "limits: # all\n  # Of one host.\n  queue_depth: 4 # few\n", "queue_depth", "8", "limits: # all\n  # Of one host.\n  queue_depth: 8 # few\n"},
		{"new key", "limits: # all\n  queue_depth: 4 # few\n", "nop_timeout", "1m", "limits: # all\n  queue_depth: 4 # few\n  nop_timeout: 1m\n"},
		{"flow style", "limits: {queue_depth: 4, max_connections: 9}\n", "max_connections", "", "limits: {queue_depth: 4}\n"},
		{"the last key", "limits: {queue_depth: 4}\n", "queue_depth", "", "limits: {}\n"},
	} {
		d := mustDocument(t, head+tc.text+tail)
		if err := d.SetLimit(tc.key, tc.value); err != nil {
			t.Errorf("%s: %v", tc.name, err)
		} else if want := head + tc.want + tail; string(d.Bytes()) != want {
			t.Errorf("%s:\n%s\nwant\n%s", tc.name, d.Bytes(), want)
		}
		if _, err := d.Config(); err != nil {
			t.Errorf("%s: %v", tc.name, err)
		}
	}
	t.Setenv("ISER_TARGET_LIMITS_QUEUE_DEPTH", "5")
	d := mustDocument(t, head)
	if err := d.SetLimit("queue_depth", "6"); err == nil || !strings.HasPrefix(err.Error(), "f: limits.queue_depth: ISER_TARGET_LIMITS_QUEUE_DEPTH of the environment overrides") {
		t.Errorf("error %v", err)
	}
}
