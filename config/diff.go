package config

import (
	"cmp"
	"fmt"
	"reflect"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/iser-target/iser-target/security"
)

// An Op is what a Change does to an object or key.
type Op int

// What a Change does.
const (
	Add Op = iota + 1
	Remove
	Update
)

var opNames = map[Op]string{Add: "add", Remove: "remove", Update: "update"}

// String returns add, remove or update.
func (o Op) String() string { return opNames[o] }

// MarshalText implements encoding.TextMarshaler.
func (o Op) MarshalText() ([]byte, error) { return []byte(opNames[o]), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (o *Op) UnmarshalText(b []byte) error {
	for op, name := range opNames {
		if name == string(b) {
			*o = op
			return nil
		}
	}
	return fmt.Errorf("%q is not add, remove or update", b)
}

// The Kinds of Changes: objects that can come and go, and the keys at the top of the file.
const (
	KindPortal        = "portal"
	KindTarget        = "target"
	KindLUN           = "lun"
	KindLimits        = "limits"
	KindMPA           = "mpa"
	KindDiscoveryAuth = "discovery_auth"
	KindStateDir      = "state_dir"
	KindDebug         = "debug"
	KindLog           = "log"
	KindControl       = "control"
	KindMetrics       = "metrics"
	KindDashboard     = "dashboard"
	KindWatch         = "watch"
	KindDrain         = "drain"
)

// A Change is one difference between two configurations: an object that is added or
// removed, or one key with another value.
type Change struct {
	Op     Op     `json:"op"`
	Kind   string `json:"kind"`             // one of the constants
	Target string `json:"target,omitempty"` // name of the target; of a LUN, too
	LUN    int    `json:"lun"`
	Portal string `json:"portal,omitempty"` // its listen address
	// Key is the key that an Update changes, below the object: size, auth.users. It is
	// empty for a key at the top of the file that has one value, like state_dir.
	Key string `json:"key,omitempty"`
	// Old and New are values as YAML on one line; those of a target leave its LUNs out.
	// Each is empty without a value. Both are empty if the difference is a secret.
	Old string `json:"old,omitempty"`
	New string `json:"new,omitempty"`
}

// Object names what c changes, like "LUN 0 of iqn.2026-11.io.example:store".
func (c Change) Object() string {
	switch c.Kind {
	case KindPortal:
		return "portal " + c.Portal
	case KindTarget:
		return "target " + c.Target
	case KindLUN:
		return fmt.Sprintf("LUN %d of %s", c.LUN, c.Target)
	}
	return c.Kind
}

// String puts c into words, like "set size of LUN 0 of iqn.2026-11.io.example:store:
// 1GiB -> 2GiB".
func (c Change) String() string {
	if c.Op != Update {
		return c.Op.String() + " " + c.Object()
	}
	what := c.Object()
	if c.Key != "" {
		what = c.Key + " of " + what
	}
	if c.Old == "" && c.New == "" {
		return "set " + what
	}
	return fmt.Sprintf("set %s: %s -> %s", what, cmp.Or(c.Old, "none"), cmp.Or(c.New, "none"))
}

// Diff returns the Changes that turn old into next, in an order in which they can be made:
// objects are removed before others that may need their address or path are added, and
// portals, which are the likeliest to fail, change before targets. Diff matches targets by
// name, LUNs by target and id, and portals by listen address; the order in the file does not
// matter. A target that is added or removed includes its LUNs, which get no Change.
func Diff(old, next *Config) []Change {
	var d differ
	d.sections(old, next)

	gone, come, kept := match(old.Portals, next.Portals, func(p Portal) string { return p.Listen })
	for _, p := range gone {
		d.add(Change{Op: Remove, Kind: KindPortal, Portal: p.Listen, Old: flow(*p)})
	}
	for _, p := range kept {
		d.fields(Change{Kind: KindPortal, Portal: p[0].Listen}, "", *p[0], *p[1])
	}
	for _, p := range come {
		d.add(Change{Op: Add, Kind: KindPortal, Portal: p.Listen, New: flow(*p)})
	}
	d.targets(old, next)
	return d.list
}

type differ struct{ list []Change }

func (d *differ) add(c Change) { d.list = append(d.list, c) }

// sections compares the keys at the top of the file, except the lists.
func (d *differ) sections(old, next *Config) {
	a, b := reflect.ValueOf(*old), reflect.ValueOf(*next)
	for i, kind := range keysOf(a.Type()) {
		if kind != "portals" && kind != "targets" {
			d.field(Change{Kind: kind}, "", a.Field(i), b.Field(i))
		}
	}
}

func (d *differ) targets(old, next *Config) {
	byID := func(l LUN) int { return l.ID }
	gone, come, kept := match(old.Targets, next.Targets, func(t Target) string { return t.Name })
	type lunPairs struct {
		target string
		come   []*LUN
		kept   [][2]*LUN
	}
	var pairs []lunPairs
	for _, t := range kept {
		away, new, stay := match(t[0].LUNs, t[1].LUNs, byID)
		for _, l := range away {
			d.add(Change{Op: Remove, Kind: KindLUN, Target: t[0].Name, LUN: l.ID, Old: flow(*l)})
		}
		pairs = append(pairs, lunPairs{t[0].Name, new, stay})
	}
	for _, t := range gone {
		d.add(Change{Op: Remove, Kind: KindTarget, Target: t.Name, Old: flow(withoutLUNs(*t))})
	}
	for _, t := range kept {
		d.fields(Change{Kind: KindTarget, Target: t[0].Name}, "", withoutLUNs(*t[0]), withoutLUNs(*t[1]))
	}
	for _, p := range pairs {
		for _, l := range p.kept {
			d.fields(Change{Kind: KindLUN, Target: p.target, LUN: l[0].ID}, "", *l[0], *l[1])
		}
	}
	for _, t := range come {
		d.add(Change{Op: Add, Kind: KindTarget, Target: t.Name, New: flow(withoutLUNs(*t))})
	}
	for _, p := range pairs {
		for _, l := range p.come {
			d.add(Change{Op: Add, Kind: KindLUN, Target: p.target, LUN: l.ID, New: flow(*l)})
		}
	}
}

func withoutLUNs(t Target) Target {
	t.LUNs = nil
	return t
}

// match pairs the items of two lists that have the same name, in their order.
func match[T any, K comparable](old, next []T, name func(T) K) (gone, come []*T, kept [][2]*T) {
	places := map[K][]int{}
	for j := range next {
		places[name(next[j])] = append(places[name(next[j])], j)
	}
	taken := make([]bool, len(next))
	for i := range old {
		k := name(old[i])
		if p := places[k]; len(p) > 0 {
			kept = append(kept, [2]*T{&old[i], &next[p[0]]})
			places[k], taken[p[0]] = p[1:], true
		} else {
			gone = append(gone, &old[i])
		}
	}
	for j := range next {
		if !taken[j] {
			come = append(come, &next[j])
		}
	}
	return gone, come, kept
}

// fields compares structs by their keys.
func (d *differ) fields(c Change, path string, old, next any) {
	d.field(c, path, reflect.ValueOf(old), reflect.ValueOf(next))
}

// field adds an Update for each key at or below path whose values differ.
func (d *differ) field(c Change, path string, a, b reflect.Value) {
	if a.Kind() == reflect.Struct {
		for i, key := range keysOf(a.Type()) {
			d.field(c, under(path, key), a.Field(i), b.Field(i))
		}
		return
	}
	if a.Kind() == reflect.Slice && a.Len() == 0 && b.Len() == 0 || reflect.DeepEqual(a.Interface(), b.Interface()) {
		return
	}
	c.Op, c.Key = Update, path
	if c.Old, c.New = valueText(a), valueText(b); c.Old == c.New {
		c.Old, c.New = "", "" // a secret differs
	}
	d.add(c)
}

// valueText returns a value as YAML on one line; "" for an empty string, list or struct.
func valueText(v reflect.Value) string {
	switch v.Kind() {
	case reflect.String, reflect.Slice, reflect.Struct:
		if v.IsZero() || v.Kind() == reflect.Slice && v.Len() == 0 {
			return ""
		}
	}
	return flow(v.Interface())
}

// hidden replaces a secret.
const hidden = "********"

// flow returns a value as YAML on one line, without secrets.
func flow(v any) string {
	if _, ok := v.(security.Secret); ok {
		return hidden
	}
	n := writeNode(reflect.ValueOf(v))
	if n.Kind != yaml.ScalarNode {
		flowed(n)
	}
	walk(n, func(n *yaml.Node) {
		if n.Kind != yaml.MappingNode {
			return
		}
		for i := 0; i+1 < len(n.Content); i += 2 {
			if n.Content[i].Value == "secret" {
				n.Content[i+1] = &yaml.Node{Kind: yaml.ScalarNode, Value: hidden}
			}
		}
	})
	b, err := yaml.Marshal(n)
	if err != nil {
		return err.Error() // cannot happen for a value that was read from YAML
	}
	return strings.TrimSuffix(string(b), "\n")
}
