package config

import (
	"errors"
	"strings"
	"testing"
)

const (
	ofFile = `# of gw-a
portals: [{listen: "127.0.0.1:3260", tpgt: 1}]
state_dir: /var/lib/iser-target
cluster: {name: gw-a, etcd: ["http://127.0.0.1:2379"], fence_program: /bin/true}
targets:
  - name: iqn.2026-11.io.example:own
    initiators: ["*"]
    luns: [{id: 0, backend: memory, size: 1MiB}]
`
	ofCluster = `# of all
targets:
  - name: iqn.2026-11.io.example:store # the store
    initiators: ["*"]
    portal_groups: [7]
    luns:
      - {id: 1, backend: nbd, path: "nbd://192.0.2.1/disk", shared: true, naa: "3000000000000001"} # disk
`
	own, store, source = "iqn.2026-11.io.example:own", "iqn.2026-11.io.example:store", "etcd: config"
)

// inCluster returns the document of a file with a shared part.
func inCluster(t *testing.T, file, shared string) *Document {
	t.Helper()
	d, err := NewDocument("c.yaml", []byte(file))
	if err != nil {
		t.Fatal(err)
	}
	s, err := NewShared(source, []byte(shared), 5)
	if err != nil {
		t.Fatal(err)
	}
	d.SetShared(s)
	return d
}

// The configuration has the targets of both parts. Those of the shared part may name portal groups of other gateways.
func TestSharedPart(t *testing.T) {
	d := inCluster(t, ofFile, ofCluster)
	c, err := d.Config()
	if err != nil {
		t.Fatal(err)
	}
	if len(c.Targets) != 2 || c.Targets[0].Name != own || c.Targets[1].Name != store || !c.Targets[1].LUNs[0].Shared {
		t.Errorf("the targets are %+v", c.Targets)
	}
	if got := c.TPGTs(&c.Targets[1]); len(got) != 0 {
		t.Errorf("portal groups %v lead to the target here", got)
	}
	named := false
	for _, p := range d.NamedPaths() {
		named = named || p == NamedPath{PathServer, "nbd://192.0.2.1/disk"}
	}
	if !named {
		t.Errorf("the paths %v lack that of the shared part", d.NamedPaths())
	}
	if got := d.Located("targets[0].auth and targets[1].luns[2].path: x"); got != "targets[0].auth and targets[0].luns[2].path of etcd: config: x" {
		t.Errorf("Located: %s", got)
	}
	if s := d.Shared(); s.Revision() != 5 || s.Unkept() || s.SharedTargets() != 1 {
		t.Errorf("the shared part has revision %d, unkept %v, %d targets", s.Revision(), s.Unkept(), s.SharedTargets())
	}
}

// Secrets of the shared part do not concern the mode of the file.
func TestSharedSecretsAreNotThoseOfTheFile(t *testing.T) {
	d := inCluster(t, ofFile, ofCluster)
	if err := d.AddUser(store, User{Name: "host", Secret: "aaaaaaaaaaaaaaaa"}); err != nil {
		t.Fatal(err)
	}
	d.mode = 0o644
	if _, err := d.Config(); err != nil {
		t.Error(err)
	}
	if err := d.AddUser(own, User{Name: "host", Secret: "bbbbbbbbbbbbbbbb"}); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Config(); err == nil || !strings.Contains(err.Error(), "chmod 600") {
		t.Errorf("secrets of the file: %v", err)
	}
}

// An edit changes the part that has the target, and keeps its comments.
func TestEditsOfSharedPart(t *testing.T) {
	lun := LUN{ID: 2, Backend: "nbd", Path: "nbd://192.0.2.1/two", Shared: true, NAA: "3000000000000002"}
	for what, c := range map[string]struct {
		edit   func(*Document) error
		shared bool
		has    string
	}{
		"AddLUN":                  {func(d *Document) error { return d.AddLUN(store, lun) }, true, "nbd://192.0.2.1/two"},
		"SetLUN":                  {func(d *Document) error { return d.SetLUN(store, 1, "read_only", "true") }, true, "read_only: true"},
		"RemoveLUN":               {func(d *Document) error { return d.RemoveLUN(store, 1) }, true, "luns: []"},
		"SetTarget":               {func(d *Document) error { return d.SetTarget(strings.ToUpper(store), "alias", "x") }, true, "alias: x"},
		"AllowInitiator":          {func(d *Document) error { return d.AllowInitiator(store, "iqn.2026-11.io.example:h") }, true, "example:h"},
		"AddUser":                 {func(d *Document) error { return d.AddUser(store, User{Name: "u", Secret: "aaaaaaaaaaaaaaaa"}) }, true, "method: chap"},
		"RemoveTarget":            {func(d *Document) error { return d.RemoveTarget(store) }, true, "targets: []"},
		"AddSharedTarget":         {func(d *Document) error { return d.AddSharedTarget(Target{Name: own + "2", Initiators: []string{"*"}}) }, true, own + "2"},
		"AddTarget":               {func(d *Document) error { return d.AddTarget(Target{Name: own + "2", Initiators: []string{"*"}}) }, false, own + "2"},
		"SetTarget of the file":   {func(d *Document) error { return d.SetTarget(own, "alias", "x") }, false, "alias: x"},
		"AddPortal":               {func(d *Document) error { return d.AddPortal(Portal{Listen: ":3261", TPGT: 2}) }, false, ":3261"},
		"SetLimit":                {func(d *Document) error { return d.SetLimit("queue_depth", "64") }, false, "queue_depth: 64"},
		"SetTarget, same value":   {func(d *Document) error { return d.SetTarget(store, "portal_groups", "[7]") }, false, "tpgt"},
		"DenyInitiator, AddUsers": {rotate, true, "previous_secret"},
	} {
		d := inCluster(t, ofFile, ofCluster)
		before := d.Clone()
		if err := c.edit(d); err != nil {
			t.Errorf("%s: %v", what, err)
			continue
		}
		file, shared := string(d.Bytes()), string(d.Shared().Bytes())
		if string(before.Bytes()) != ofFile || string(before.Shared().Bytes()) != ofCluster {
			t.Errorf("%s has changed the document that was cloned", what)
		}
		if c.shared != d.Shared().Unkept() || d.Shared().Revision() != 5 {
			t.Errorf("%s: unkept %v, revision %d", what, d.Shared().Unkept(), d.Shared().Revision())
		}
		if c.shared && (file != ofFile || !strings.Contains(shared, c.has) || !strings.HasPrefix(shared, "# of all\n")) || !c.shared && (shared != ofCluster || !strings.Contains(file, c.has)) {
			t.Errorf("%s: the file is\n%s\nand the shared part\n%s", what, file, shared)
		}
	}
}

func rotate(d *Document) error {
	return errors.Join(d.DenyInitiator(store, "*"), d.AllowInitiator(store, "iqn.2026-11.io.example:x"),
		d.AddUser(store, User{Name: "u", Secret: "aaaaaaaaaaaaaaaa"}), d.RotateUser(store, User{Name: "u", Secret: "bbbbbbbbbbbbbbbb"}))
}

// Edits that would give both parts the same target are refused.
func TestSharedTargetExists(t *testing.T) {
	d := inCluster(t, ofFile, ofCluster)
	for name, err := range map[string]error{
		"AddTarget":                          d.AddTarget(Target{Name: store, Initiators: []string{"*"}}),
		"AddSharedTarget":                    d.AddSharedTarget(Target{Name: own, Initiators: []string{"*"}}),
		"AddSharedTarget of the shared part": d.AddSharedTarget(Target{Name: store, Initiators: []string{"*"}}),
	} {
		if !errors.Is(err, ErrExists) {
			t.Errorf("%s: %v", name, err)
		}
	}
	alone, err := NewDocument("c.yaml", []byte(ofFile))
	if err != nil {
		t.Fatal(err)
	}
	if err := alone.AddSharedTarget(Target{Name: store, Initiators: []string{"*"}}); err == nil || !strings.Contains(err.Error(), "not known") {
		t.Errorf("AddSharedTarget without a shared part: %v", err)
	}
}

// Targets of the same name leave the file.
func TestMoveShared(t *testing.T) {
	d := inCluster(t, ofFile, strings.ReplaceAll(ofCluster, store, own))
	if _, err := d.Config(); err == nil {
		t.Error("a target in both parts is valid")
	}
	names, err := d.MoveShared()
	if err != nil || len(names) != 1 || names[0] != own {
		t.Errorf("MoveShared: %q, %v", names, err)
	}
	if c, err := d.Config(); err != nil || len(c.Targets) != 1 || !strings.Contains(string(d.Bytes()), "targets: []") {
		t.Errorf("after MoveShared: %v\n%s", err, d.Bytes())
	}
}

// Errors name the part, and the place in its text. An error about both parts names both.
func TestErrorsOfSharedPart(t *testing.T) {
	for what, c := range map[string]struct{ file, shared, want string }{
		"same name": {ofFile, strings.ReplaceAll(ofCluster, store, own),
			`etcd: config:3:11: targets[0].name: "` + own + `" is the name of targets[0] of c.yaml`},
		"same path": {strings.Replace(ofFile, "{id: 0, backend: memory, size: 1MiB}", `{id: 3, backend: nbd, path: "nbd://192.0.2.1/disk"}`, 1), ofCluster,
			`etcd: config:7:37: targets[0].luns[0].path: "nbd://192.0.2.1/disk" is the path of targets[0].luns[0] of c.yaml`},
		"not shared": {ofFile, strings.Replace(ofCluster, "shared: true, ", "", 1), "etcd: config:7:9: targets[0].luns[0].shared: must be true: "},
		"portal group out of range": {ofFile, strings.Replace(ofCluster, "[7]", "[70000]", 1),
			"etcd: config:5:21: targets[0].portal_groups[0]: must be 1 to 65535, not 70000"},
		"IPsec profile": {ofFile, strings.Replace(ofCluster, "portal_groups: [7]", "{}", 1), ""},
		"portal group of the file": {strings.Replace(ofFile, "luns: [", "portal_groups: [7]\n    luns: [", 1), ofCluster,
			"c.yaml:8:21: targets[0].portal_groups[0]: no portal has the tpgt 7"},
		"no state_dir": {strings.Replace(ofFile, "state_dir: /var/lib/iser-target", `state_dir: ""`, 1), ofCluster,
			"c.yaml:3:12: state_dir: is required: targets[0].luns[0] of etcd: config keeps its data"},
		"no targets in the file": {"portals: [{listen: \":1\"}]\n", ofCluster, "c.yaml: targets: is required: a list of targets"},
	} {
		if what == "IPsec profile" {
			c.shared = strings.Replace(ofCluster, "portal_groups: [7]", "ipsec: required\n    ipsec_profile: strong", 1)
			c.want = `etcd: config:6:20: targets[0].ipsec_profile: ipsec.profiles has no profile "strong"`
		}
		_, err := inCluster(t, c.file, c.shared).Config()
		if err == nil || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("%s: %v\nwant %s", what, err, c.want)
		}
	}
}

// A shared part has the key targets, and no other.
func TestNewShared(t *testing.T) {
	for text, want := range map[string]string{
		"targets: []\nportals: [{listen: \":1\"}]\n": "f:2:1: portals: does not belong to the configuration of a cluster",
		"targets: []\ntarget: x\n":                   "f:2:9: target: does not belong",
		"":                                           "f: targets: is required",
		"targets:\n":                                 "f:1:1: targets: is required",
		"targets: {}\n":                              "f:1:1: targets: must be a list, not a map",
		"targets: [\n":                               "f:1: yaml: ",
		strings.Repeat("#", MaxFile+1):               "f: is larger than 1MiB",
	} {
		if _, err := NewShared("f", []byte(text), 0); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%.40q: %v\nwant %s", text, err, want)
		}
	}
}

// Two documents are equal if both parts are.
func TestDocumentEqual(t *testing.T) {
	d := inCluster(t, ofFile, ofCluster)
	alone := d.Clone()
	alone.SetShared(nil)
	file, shared := d.Clone(), d.Clone()
	if err := errors.Join(file.SetTarget(own, "alias", "x"), shared.SetTarget(store, "alias", "x")); err != nil {
		t.Fatal(err)
	}
	for what, o := range map[string]*Document{"without a shared part": alone, "with another file": file, "with another shared part": shared} {
		if d.Equal(o) || o.Equal(d) {
			t.Errorf("the document is equal to one %s", what)
		}
	}
	if !d.Equal(d.Clone()) || !alone.Equal(alone.Clone()) {
		t.Error("a document is not equal to its copy")
	}
	shared.SharedKept("etcd", 6)
	if s := shared.Shared(); s.Unkept() || s.Revision() != 6 {
		t.Errorf("after SharedKept: unkept %v, revision %d", s.Unkept(), s.Revision())
	}
}
