package config

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// changeText returns a Change on one line.
func changeText(c Change) string {
	b, err := json.Marshal(c)
	if err != nil {
		return err.Error()
	}
	return strings.ReplaceAll(string(b), `"`, "'")
}

func loaded(t *testing.T, text string) *Config {
	t.Helper()
	c, err := load("f", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// Each row edits the text commented.
func TestDiff(t *testing.T) {
	const a, b = "'target':'iqn.2026-11.io.example:a'", "'target':'iqn.2026-11.io.example:b'"
	const auth = "    auth: {method: chap, users: [{name: u, secret: aaaaaaaaaaaa}]}\n    initiators:\n    - "
	base := strings.Replace(commented, "    initiators:\n    - ", auth, 1)
	for _, tc := range []struct {
		name  string
		edits []string // old, new, ...
		want  []string
	}{
		{"nothing", nil, nil},
		{"layout and order", []string{"# The first one.\n", "\n", "[iser,  tcp]", "[iser, tcp]", "size: 1GiB", "size: 1024MiB", "      - id: 7\n        backend: memory   # of all\n        size: 2GiB\n", "",
			"      # Scratch.\n", "      - {size: 2GiB, id: 7, backend: memory}\n", nameA, strings.ToUpper(nameA)}, nil},
		{"empty lists", []string{"tpgt: 2}", "tpgt: 2, advertise: [], transports: []}"}, nil},
		{"a size", []string{"size: 1GiB", "size: 2GiB"}, []string{"{'op':'update','kind':'lun'," + a + ",'lun':0,'key':'size','old':'1GiB','new':'2GiB'}"}},
		{"keys of a LUN", []string{"size: 1GiB", "size: 1GiB, read_only_for: [\"*:x\", iqn.2026-11.io.example:host], block_size: 4096"}, []string{
			"{'op':'update','kind':'lun'," + a + ",'lun':0,'key':'block_size','old':'512','new':'4096'}",
			"{'op':'update','kind':'lun'," + a + ",'lun':0,'key':'read_only_for','new':'[\\'*:x\\', \\'iqn.2026-11.io.example:host\\']'}"}},
		{"rates of a LUN", []string{"size: 1GiB", "size: 1GiB, iops: 5000, burst: 2s, rates: [{initiators: [\"*:x\"], bandwidth: 1MiB}]"}, []string{
			"{'op':'update','kind':'lun'," + a + ",'lun':0,'key':'iops','old':'0','new':'5000'}",
			"{'op':'update','kind':'lun'," + a + ",'lun':0,'key':'burst','old':'0s','new':'2s'}",
			"{'op':'update','kind':'lun'," + a + ",'lun':0,'key':'rates','new':'[{initiators: [\\'*:x\\'], bandwidth: 1MiB}]'}"}},
		{"a secret", []string{"aaaaaaaaaaaa", "bbbbbbbbbbbb"}, []string{"{'op':'update','kind':'target'," + b + ",'lun':0,'key':'auth.users'}"}},
		{"a user", []string{"{name: u, ", "{initiator: \"*\", name: u, "}, []string{
			"{'op':'update','kind':'target'," + b + ",'lun':0,'key':'auth.users','old':'[{name: u, secret: '********'}]','new':'[{name: u, secret: '********', initiator: \\'*\\'}]'}"}},
		{"sections", []string{"queue_depth: 12", "queue_depth: 13, nop_interval: 2m", "state_dir: \"\"", "state_dir: /x\nmpa: {crc: on}"}, []string{
			"{'op':'update','kind':'limits','lun':0,'key':'queue_depth','old':'12','new':'13'}",
			"{'op':'update','kind':'limits','lun':0,'key':'nop_interval','old':'15s','new':'2m'}",
			"{'op':'update','kind':'mpa','lun':0,'key':'crc','old':'auto','new':'on'}",
			"{'op':'update','kind':'state_dir','lun':0,'new':'/x'}"}},
		{"discovery", []string{"state_dir: \"\"", "state_dir: \"\"\ndiscovery_auth: {method: chap, users: [{name: d, secret: dddddddddddd}], mutual: {name: t, secret: tttttttttttt}}"}, []string{
			"{'op':'update','kind':'discovery_auth','lun':0,'key':'method','new':'chap'}",
			"{'op':'update','kind':'discovery_auth','lun':0,'key':'users','new':'[{name: d, secret: '********'}]'}",
			"{'op':'update','kind':'discovery_auth','lun':0,'key':'mutual.name','new':'t'}",
			"{'op':'update','kind':'discovery_auth','lun':0,'key':'mutual.secret','new':'********'}"}},
		// What goes first makes room: the new portal has the port of the old one.
		{"order", []string{"127.0.0.1:3260", "0.0.0.0:3260", "{id: 0, backend: memory,   size: 1GiB}", "{id: 3, backend: memory, size: 1GiB}", "size: 2GiB", "size: 3GiB", "queue_depth: 12", "queue_depth: 13",
			"*:one", "*:1", "iqn.2026-11.io.example:b", "iqn.2026-11.io.example:c", "tpgt: 2", "tpgt: 3"}, []string{
			"{'op':'update','kind':'limits','lun':0,'key':'queue_depth','old':'12','new':'13'}",
			"{'op':'remove','kind':'portal','lun':0,'portal':'127.0.0.1:3260','old':'{listen: \\'127.0.0.1:3260\\', transports: [iser, tcp]}'}",
			"{'op':'update','kind':'portal','lun':0,'portal':'[::1]:3261','key':'tpgt','old':'2','new':'3'}",
			"{'op':'add','kind':'portal','lun':0,'portal':'0.0.0.0:3260','new':'{listen: \\'0.0.0.0:3260\\', transports: [iser, tcp]}'}",
			"{'op':'remove','kind':'lun'," + a + ",'lun':0,'old':'{id: 0, backend: memory, size: 1GiB, block_size: 512}'}",
			"{'op':'remove','kind':'target'," + b + ",'lun':0,'old':'{name: \\'iqn.2026-11.io.example:b\\', initiators: [\\'*\\'], auth: {method: chap, users: [{name: u, secret: '********'}]}}'}",
			"{'op':'update','kind':'target'," + a + ",'lun':0,'key':'initiators','old':'[\\'*:one\\', \\'*:two\\']','new':'[\\'*:1\\', \\'*:two\\']'}",
			"{'op':'update','kind':'lun'," + a + ",'lun':7,'key':'size','old':'2GiB','new':'3GiB'}",
			"{'op':'add','kind':'target','target':'iqn.2026-11.io.example:c','lun':0,'new':'{name: \\'iqn.2026-11.io.example:c\\', initiators: [\\'*\\'], auth: {method: chap, users: [{name: u, secret: '********'}]}}'}",
			"{'op':'add','kind':'lun'," + a + ",'lun':3,'new':'{id: 3, backend: memory, size: 1GiB, block_size: 512}'}"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			text := base
			for i := 0; i < len(tc.edits); i += 2 {
				if !strings.Contains(text, tc.edits[i]) {
					t.Fatalf("%q is not there", tc.edits[i])
				}
				text = strings.Replace(text, tc.edits[i], tc.edits[i+1], 1)
			}
			old, next := loaded(t, base), loaded(t, text)
			var got []string
			for _, c := range Diff(old, next) {
				got = append(got, changeText(c))
			}
			if !reflect.DeepEqual(got, tc.want) {
				t.Errorf("\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(tc.want, "\n"))
			}
			if !reflect.DeepEqual(old, loaded(t, base)) || !reflect.DeepEqual(next, loaded(t, text)) {
				t.Error("the configurations are others now")
			}
			var again []Change
			if b, err := json.Marshal(Diff(next, old)); err != nil || json.Unmarshal(b, &again) != nil || !reflect.DeepEqual(again, Diff(next, old)) && len(again) > 0 {
				t.Errorf("JSON: %+v, %v", again, err)
			}
		})
	}
}

// Every key at the top of the file has a Kind, and every kind of change a text.
func TestChangeInWords(t *testing.T) {
	const target = "iqn.2026-11.io.example:a"
	for _, tc := range []struct {
		change Change
		want   string
	}{
		{Change{Op: Add, Kind: KindPortal, Portal: "[::1]:3260", New: "{}"}, "add portal [::1]:3260"},
		{Change{Op: Remove, Kind: KindTarget, Target: target, Old: "{}"}, "remove target " + target},
		{Change{Op: Remove, Kind: KindLUN, Target: target, LUN: 7}, "remove LUN 7 of " + target},
		{Change{Op: Update, Kind: KindLUN, Target: target, Key: "size", Old: "1GiB", New: "2GiB"}, "set size of LUN 0 of " + target + ": 1GiB -> 2GiB"},
		{Change{Op: Update, Kind: KindTarget, Target: target, Key: "alias", New: "a"}, "set alias of target " + target + ": none -> a"},
		{Change{Op: Update, Kind: KindTarget, Target: target, Key: "auth.users"}, "set auth.users of target " + target},
		{Change{Op: Update, Kind: KindStateDir, Old: "/x"}, "set state_dir: /x -> none"},
		{Change{Op: Update, Kind: KindLimits, Key: "queue_depth", Old: "1", New: "2"}, "set queue_depth of limits: 1 -> 2"},
	} {
		if got := tc.change.String(); got != tc.want {
			t.Errorf("%q, want %q", got, tc.want)
		}
	}
	kinds := []string{"portals", "targets", KindLimits, KindMPA, KindDiscoveryAuth, KindStateDir, KindDebug, KindLog,
		KindIPsec, KindControl, KindProcess, KindMetrics, KindDashboard, KindCluster, KindWatch, KindDrain, KindDrainTo}
	if got := keysOf(reflect.TypeFor[Config]()); !slices.Equal(got, kinds) {
		t.Errorf("keys %q, kinds %q", got, kinds)
	}
}

// apply applies a change to a document; next has the object that it adds.
func apply(d *Document, c Change, next *Config) error {
	t := slices.IndexFunc(next.Targets, func(t Target) bool { return t.Name == c.Target })
	switch c.Kind + " " + c.Op.String() {
	case "portal add":
		return d.AddPortal(next.Portals[slices.IndexFunc(next.Portals, func(p Portal) bool { return p.Listen == c.Portal })])
	case "portal remove":
		return d.RemovePortal(c.Portal)
	case "target add":
		return d.AddTarget(next.Targets[t])
	case "target remove":
		return d.RemoveTarget(c.Target)
	case "target update":
		return d.SetTarget(c.Target, c.Key, c.New)
	case "lun add":
		luns := next.Targets[t].LUNs
		return d.AddLUN(c.Target, luns[slices.IndexFunc(luns, func(l LUN) bool { return l.ID == c.LUN })])
	case "lun remove":
		return d.RemoveLUN(c.Target, c.LUN)
	case "lun update":
		return d.SetLUN(c.Target, c.LUN, c.Key, c.New)
	}
	return fmt.Errorf("no edit for %v", c)
}

// The Changes of Diff, applied in their order as edits, turn one configuration into the other,
// and an edit makes only the Changes that Diff returns.
func TestDiffIsWhatEditsDo(t *testing.T) {
	sorted := func(c *Config) *Config {
		c = cloneConfig(c)
		slices.SortFunc(c.Portals, func(a, b Portal) int { return strings.Compare(a.Listen, b.Listen) })
		slices.SortFunc(c.Targets, func(a, b Target) int { return strings.Compare(a.Name, b.Name) })
		for i := range c.Targets {
			slices.SortFunc(c.Targets[i].LUNs, func(a, b LUN) int { return a.ID - b.ID })
		}
		return c
	}
	applied := 0
	for seed := range uint64(30) {
		r := rand.New(rand.NewPCG(seed, 3))
		d := mustDocument(t, commented)
		other := d.Clone()
		var names []string
		for range 1 + r.IntN(8) {
			c, err := other.Config()
			if err != nil {
				t.Fatal(err)
			}
			next := other.Clone()
			e := randomEdit(r, c)
			if e.doc(next) != nil {
				continue
			}
			changed, err := next.Config()
			if err != nil {
				continue // the last of something, or a path that is taken
			}
			want := cloneConfig(c)
			e.config(want)
			if got := Diff(c, changed); !reflect.DeepEqual(got, Diff(c, want)) || len(Diff(want, changed)) > 0 || len(got) > 1 {
				t.Errorf("%s: %v", e.name, got)
			}
			other, names = next, append(names, e.name)
		}
		old, err := d.Config()
		if err != nil {
			t.Fatal(err)
		}
		next, err := other.Config()
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range Diff(old, next) {
			if err := apply(d, c, next); err != nil {
				t.Fatalf("%v: %s: %v", names, changeText(c), err)
			}
			applied++
		}
		got, err := d.Config()
		if err != nil || !reflect.DeepEqual(sorted(got), sorted(next)) || len(Diff(got, next)) > 0 {
			t.Errorf("%v: %v\n%+v\nwant\n%+v", names, err, got, next)
		}
		for _, comment := range []string{"# Of the storage machine.\n", "# The rest.\n", "   # few\n", "# The end.\n"} {
			if strings.Count(string(d.Bytes()), comment) != 1 {
				t.Errorf("%v: %q is gone from\n%s", names, comment, d.Bytes())
			}
		}
	}
	if applied < 30 {
		t.Errorf("only %d changes", applied)
	}
}

// The text without secrets has no secret and no comment, whatever the YAML looks like, and it is valid
// YAML with all other values.
func TestWithoutSecrets(t *testing.T) {
	doc, err := NewDocument("f", []byte(`# secret: first-comment
targets:
  - name: "iqn.2026-11.io.example:store" # second-comment
    auth:
      method: chap
      users:
        - &user {name: host1, "secret": one-two-three-four}
        - {<<: *user, name: host2}
        - name: host3
          secret: &shared >-
            five-six
            seven-eight
        - {name: host4, secret: *shared, secret_file: "", previous_secret: fifteen-sixteen}
        - {name: &bad nine-ten-eleven, secret: *bad}
        - name: host5 # third-comment
          secret: |
            twelve-thirteen
      # fourth-comment
discovery_auth: {mutual: {name: a, secret: 'it''s-fourteen'}, users: []}
`))
	if err != nil {
		t.Fatal(err)
	}
	before := string(doc.Bytes())
	text, n, err := doc.WithoutSecrets()
	if err != nil || n != 6 {
		t.Fatalf("%d secrets, error %v, want 6:\n%s", n, err, text)
	}
	for _, word := range []string{"comment", "one-two", "five-six", "seven", "nine", "twelve", "fourteen", "fifteen"} {
		if strings.Contains(string(text), word) {
			t.Errorf("the text has %q:\n%s", word, text)
		}
	}
	for _, word := range []string{"host1", "host2", "host3", "host4", "host5", "secret_file", "chap", "iqn.2026-11.io.example:store", "mutual"} {
		if !strings.Contains(string(text), word) {
			t.Errorf("the text lacks %q:\n%s", word, text)
		}
	}
	if _, err := NewDocument("g", text); err != nil {
		t.Errorf("%v:\n%s", err, text)
	}
	if string(doc.Bytes()) != before {
		t.Error("the document has changed")
	}
}
