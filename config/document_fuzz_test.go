package config

import (
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// A oneEdit changes a document, and a copy of its configuration in the same way.
type oneEdit struct {
	name   string
	doc    func(*Document) error
	config func(*Config)
}

// randomEdit returns a random edit that c allows.
func randomEdit(r *rand.Rand, c *Config) oneEdit {
	add := oneEdit{"AddTarget", func(d *Document) error {
		return d.AddTarget(Target{Name: "iqn.2026-11.io.example:new", Alias: "- a: #b", Initiators: []string{"*", "eui.0123456789abcdef"}, InitialR2T: true, LUNs: []LUN{{ID: 0, Backend: "memory", Size: 4096}}})
	}, func(c *Config) {
		t := NewTarget()
		t.Name, t.Alias, t.Initiators = "iqn.2026-11.io.example:new", "- a: #b", []string{"*", "eui.0123456789abcdef"}
		t.LUNs = []LUN{{ID: 0, Backend: "memory", Size: 4096, BlockSize: 512}}
		c.Targets = append(c.Targets, t)
	}}
	if len(c.Targets) == 0 {
		return add
	}
	i := r.IntN(len(c.Targets))
	t := c.Targets[i]
	name := t.Name
	id := r.IntN(100)
	j := slices.IndexFunc(t.LUNs, func(l LUN) bool { return l.ID == id })
	target := func(c *Config) *Target { return &c.Targets[i] }
	all := []oneEdit{
		add,
		{"RemoveTarget", func(d *Document) error { return d.RemoveTarget(name) }, func(c *Config) { c.Targets = slices.Delete(c.Targets, i, i+1) }},
		{"SetTarget alias", func(d *Document) error { return d.SetTarget(name, "alias", `"x: y"`) }, func(c *Config) { target(c).Alias = "x: y" }},
		{"SetTarget no alias", func(d *Document) error { return d.SetTarget(name, "alias", "") }, func(c *Config) { target(c).Alias = "" }},
		{"SetTarget initiators", func(d *Document) error { return d.SetTarget(name, "initiators", `["a*", iqn.2026-11.io.example:b]`) }, func(c *Config) { target(c).Initiators = []string{"a*", "iqn.2026-11.io.example:b"} }},
		{"AllowInitiator", func(d *Document) error { return d.AllowInitiator(name, "*:added") }, func(c *Config) { target(c).Initiators = append(slices.Clone(t.Initiators), "*:added") }},
		{"DenyInitiator", func(d *Document) error { return d.DenyInitiator(name, t.Initiators[0]) }, func(c *Config) { target(c).Initiators = slices.Delete(slices.Clone(t.Initiators), 0, 1) }},
		{"AddPortal", func(d *Document) error {
			return d.AddPortal(Portal{Listen: "192.0.2.77:7", Advertise: []string{"[2001:db8::1]:3260"}})
		}, func(c *Config) {
			c.Portals = append(c.Portals, Portal{Listen: "192.0.2.77:7", Advertise: []string{"[2001:db8::1]:3260"}, TPGT: 1})
		}},
		{"RemovePortal", func(d *Document) error { return d.RemovePortal(c.Portals[0].Listen) }, func(c *Config) { c.Portals = slices.Delete(c.Portals, 0, 1) }},
		{"AddLUN", func(d *Document) error {
			return d.AddLUN(name, LUN{ID: id, Backend: "file", Path: "/x y/#1", Size: 1 << 30, Initiators: []string{"*:h"}})
		}, func(c *Config) {
			target(c).LUNs = append(slices.Clone(t.LUNs), LUN{ID: id, Backend: "file", Path: "/x y/#1", Size: 1 << 30, BlockSize: 512, Initiators: []string{"*:h"}})
		}},
	}
	if len(t.LUNs) > 0 {
		j = r.IntN(len(t.LUNs))
		id := t.LUNs[j].ID
		lun := func(c *Config) *LUN { return &c.Targets[i].LUNs[j] }
		all = append(all,
			oneEdit{"RemoveLUN", func(d *Document) error { return d.RemoveLUN(name, id) }, func(c *Config) { target(c).LUNs = slices.Delete(slices.Clone(t.LUNs), j, j+1) }},
			oneEdit{"SetLUN size", func(d *Document) error { return d.SetLUN(name, id, "size", "8MiB") }, func(c *Config) { lun(c).Size = 8 << 20 }},
			oneEdit{"SetLUN sanitize", func(d *Document) error { return d.SetLUN(name, id, "sanitize", "true") }, func(c *Config) { lun(c).Sanitize = true }},
			oneEdit{"SetLUN initiators", func(d *Document) error { return d.SetLUN(name, id, "initiators", `["*"]`) }, func(c *Config) { lun(c).Initiators = []string{"*"} }},
		)
	}
	return all[r.IntN(len(all))]
}

// cloneConfig copies the lists that edits change.
func cloneConfig(c *Config) *Config {
	n := *c
	n.Portals, n.Targets = slices.Clone(c.Portals), slices.Clone(c.Targets)
	for i := range n.Targets {
		n.Targets[i].LUNs = slices.Clone(n.Targets[i].LUNs)
	}
	return &n
}

// tryEdit applies a random edit to d and checks the configuration.
func tryEdit(t *testing.T, r *rand.Rand, d *Document) {
	before, err := d.Config()
	if err != nil {
		return
	}
	text := string(d.Bytes())
	e := randomEdit(r, before)
	if err := e.doc(d); err != nil {
		if string(d.Bytes()) != text {
			t.Fatalf("%s failed, but changed the document", e.name)
		}
		var ce *Error
		if !errors.As(err, &ce) {
			t.Fatalf("%T is not an *Error", err)
		}
		return
	}
	want := cloneConfig(before)
	e.config(want)
	got, err := d.Config()
	if err != nil {
		if want.Validate() == nil {
			t.Fatalf("%s: %v\n%s\nwas\n%s", e.name, err, d.Bytes(), text)
		}
		return
	}
	if !reflect.DeepEqual(got, want) {
		t.Fatalf("%s: %+v\nwant %+v\n%s\nwas\n%s", e.name, got, want, d.Bytes(), text)
	}
}

// An edit changes only the lines of its entry.
func TestEditsKeepOtherLines(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 5))
		d := mustDocument(t, commented)
		for range 4 {
			c, err := d.Config()
			if err != nil {
				break // the last portal or pattern is gone
			}
			old := slices.Collect(strings.Lines(string(d.Bytes())))
			e := randomEdit(r, c)
			if err := e.doc(d); errors.Is(err, ErrExists) {
				continue
			} else if err != nil {
				t.Fatalf("%s: %v\n%s", e.name, err, d.Bytes())
			}
			next := slices.Collect(strings.Lines(string(d.Bytes())))
			head, tail, least := 0, 0, min(len(old), len(next))
			for head < least && old[head] == next[head] {
				head++
			}
			for tail < least-head && old[len(old)-1-tail] == next[len(next)-1-tail] {
				tail++
			}
			gone, come := len(old)-head-tail, len(next)-head-tail
			emptied := come == 1 && strings.HasSuffix(next[head], ": []\n")
			ok := gone <= 3 && come <= 3 // a value, which may be a block list
			switch {
			case strings.HasPrefix(e.name, "Add"):
				ok = gone == 0 || strings.HasSuffix(old[head], ": []\n")
			case strings.HasPrefix(e.name, "Remove"):
				ok = come == 0 || emptied
			}
			if !ok {
				t.Errorf("%s replaced %d lines by %d:\n%s\nwas\n%s", e.name, gone, come, strings.Join(next, ""), strings.Join(old, ""))
			}
		}
	}
}

func FuzzDocument(f *testing.F) {
	f.Add([]byte(good), uint64(1))
	f.Add([]byte(commented), uint64(2))
	f.Add(defaultYAML, uint64(3))
	files, err := filepath.Glob("../examples/*.yaml")
	if err != nil || len(files) == 0 {
		f.Fatal(files, err)
	}
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b, uint64(4))
	}
	f.Add([]byte("x: &x {id: 0, backend: memory, size: 1MiB}\nportals: [{listen: \":1\"}]\ntargets: [{name: iqn.2026-11.io.example:a, initiators: [\"*\"], luns: [*x, {<<: *x, id: 1}]}]\n"), uint64(5))
	f.Add([]byte("portals: [\n  {listen: \":1\"}, # one\n\n  {listen: \":2\"},\n]\ntargets:\n- name: iqn.2026-11.io.example:a\n  alias: >\n    a\n\n    b\n  initiators:\n  - '*'\n  luns:\n  -   id: 0\n      backend: memory\n      size: 1MiB\n"), uint64(6))
	f.Add([]byte(shared), uint64(7))
	f.Add([]byte(ofCluster), uint64(12))
	f.Add([]byte("portals: [{listen: \":1\"}]\ntargets: [] # none\n"), uint64(10))
	f.Add([]byte("targets: [\n]\nportals: [{listen: \":1\"}]\n"), uint64(11))
	f.Add([]byte("portals: # p\n  # q\n  - # r\n    listen: 127.0.0.1:1 # s\n  # t\n\n  # u\n\ntargets: # v\n  - name: >-\n      iqn.2026-11.io.example:a\n    # w\n    initiators: # x\n      # y\n      - '*' # z\n      # a\n\n    # b\n"+
		"    luns: # c\n    # d\n    - id: 0 # e\n      # f\n      backend: memory\n\n      size: 1MiB\n      # g\n\n    # h\n    - {id: 1, backend: memory,\n       size: 1MiB} # i\n    # j\n  # k\n\n# l\nlog: # m\n  # n\n  level: info\n# o\n"), uint64(8))
	f.Add([]byte("? portals\n: - listen: \":1\"\n? targets\n: - name: iqn.2026-11.io.example:a\n    alias: |\n      a # b\n\n      - c\n    initiators: !!seq [\"*\",\n      \"?\"]\n    luns:\n      - !!map {id: 0, backend: !!str memory, size: 1MiB}\n...\n"), uint64(9))
	f.Fuzz(func(t *testing.T, b []byte, seed uint64) {
		d, err := NewDocument("f", b)
		if err != nil {
			return
		}
		r := rand.New(rand.NewPCG(seed, seed))
		for range 3 {
			tryEdit(t, r, d)
		}
		s, err := NewShared("s", b, 1)
		if err != nil {
			return
		}
		in := mustDocument(t, ofFile)
		in.SetShared(s)
		c, err := in.Config()
		if err == nil && len(c.Targets) != 1+s.SharedTargets() {
			t.Fatalf("%d targets, want 1 and %d", len(c.Targets), s.SharedTargets())
		}
		if problem, ok := errors.AsType[*Error](err); ok && problem.Source != "s" { // the file is valid
			t.Fatalf("the error is about %q: %v", problem.Source, problem)
		}
	})
}
