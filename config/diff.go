package config

import (
	"reflect"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/iser-target/iser-target/config/terms"
	"github.com/iser-target/iser-target/security"
)

// A Change is one difference between two configurations.
type Change = terms.Change

// An Op is what a Change does to an object or key.
type Op = terms.Op

// What a Change does.
const (
	Add    = terms.Add
	Remove = terms.Remove
	Update = terms.Update
)

// The Kinds of Changes: objects that can come and go, and the keys at the top of the file.
const (
	KindPortal        = terms.KindPortal
	KindTarget        = terms.KindTarget
	KindLUN           = terms.KindLUN
	KindLimits        = "limits"
	KindMPA           = "mpa"
	KindDiscoveryAuth = "discovery_auth"
	KindStateDir      = "state_dir"
	KindDebug         = "debug"
	KindLog           = "log"
	KindControl       = "control"
	KindProcess       = "process"
	KindMetrics       = "metrics"
	KindIPsec         = "ipsec"
	KindDashboard     = "dashboard"
	KindCluster       = "cluster"
	KindWatch         = "watch"
	KindDrain         = "drain"
	KindDrainTo       = "drain_to"
)

// Diff returns the Changes that turn old into next, in an order in which they can be made:
// objects are removed before others that may need their address or path are added, and
// portals, which are the likeliest to fail, change before targets. Diff matches targets by
// name, LUNs by target and id, and portals by listen address; the order in the file does not
// matter. A target that is added or removed includes its LUNs, which get no Change.
func Diff(old, next *Config) []Change {
	var sections []Change
	a, b := reflect.ValueOf(*old), reflect.ValueOf(*next)
	for i, kind := range keysOf(a.Type()) {
		if kind != "portals" && kind != "targets" {
			sections = appendUpdates(sections, Change{Kind: kind}, "", a.Field(i), b.Field(i))
		}
	}
	portals, _ := compare(old.Portals, next.Portals, func(p Portal) (Change, any) {
		return Change{Kind: KindPortal, Portal: p.Listen}, p
	})
	targets, kept := compare(old.Targets, next.Targets, func(t Target) (Change, any) {
		t.LUNs = nil
		return Change{Kind: KindTarget, Target: t.Name}, t
	})
	var luns changes
	for _, t := range kept {
		l, _ := compare(t[0].LUNs, t[1].LUNs, func(l LUN) (Change, any) {
			return Change{Kind: KindLUN, Target: t[0].Name, LUN: l.ID}, l
		})
		luns.remove = append(luns.remove, l.remove...)
		luns.update = append(luns.update, l.update...)
		luns.add = append(luns.add, l.add...)
	}
	return slices.Concat(sections, portals.remove, portals.update, portals.add,
		luns.remove, targets.remove, targets.update, luns.update, targets.add, luns.add)
}

// changes has the Changes of one kind of object.
type changes struct{ remove, update, add []Change }

// compare returns the Changes that turn the items of old into those of next, and the pairs of
// items that are in both, in the order of old. object returns a Change that names an item, and
// the struct that has the keys of the item.
func compare[T any](old, next []T, object func(T) (Change, any)) (l changes, kept [][2]T) {
	unmatched := map[Change]int{} // indexes in next
	for i, item := range next {
		c, _ := object(item)
		unmatched[c] = i
	}
	for _, item := range old {
		c, value := object(item)
		i, ok := unmatched[c]
		if !ok {
			c.Op, c.Old = Remove, flow(value)
			l.remove = append(l.remove, c)
			continue
		}
		delete(unmatched, c)
		_, now := object(next[i])
		l.update = appendUpdates(l.update, c, "", reflect.ValueOf(value), reflect.ValueOf(now))
		kept = append(kept, [2]T{item, next[i]})
	}
	for _, item := range next {
		c, value := object(item)
		if _, ok := unmatched[c]; ok {
			c.Op, c.New = Add, flow(value)
			l.add = append(l.add, c)
		}
	}
	return l, kept
}

// appendUpdates appends an Update for each key at or below path whose values differ. c names
// the object.
func appendUpdates(list []Change, c Change, path string, a, b reflect.Value) []Change {
	if a.Kind() == reflect.Struct {
		for i, key := range keysOf(a.Type()) {
			list = appendUpdates(list, c, under(path, key), a.Field(i), b.Field(i))
		}
		return list
	}
	if a.Kind() == reflect.Slice && a.Len() == 0 && b.Len() == 0 || reflect.DeepEqual(a.Interface(), b.Interface()) {
		return list
	}
	c.Op, c.Key = Update, path
	if c.Old, c.New = valueText(a), valueText(b); c.Old == c.New {
		c.Old, c.New = "", "" // a secret differs
	}
	return append(list, c)
}

// valueText returns a value as YAML on one line; "" for an empty string or list.
func valueText(v reflect.Value) string {
	if k := v.Kind(); (k == reflect.String || k == reflect.Slice) && v.Len() == 0 {
		return ""
	}
	return flow(v.Interface())
}

// hidden replaces a secret.
const hidden = "********"

// WithoutSecrets returns the text of d for readers that must not know its secrets, and how many it
// hides. It has no comments, because they may contain secrets, too.
func (d *Document) WithoutSecrets() (text []byte, secrets int, err error) {
	tree := cloneTree(d.tree)
	walk(tree, func(n *yaml.Node) {
		n.HeadComment, n.LineComment, n.FootComment = "", "", ""
		if n.Kind != yaml.MappingNode {
			return
		}
		for i := 0; i+1 < len(n.Content); i += 2 {
			if v := resolve(n.Content[i+1]); isSecret(resolve(n.Content[i]).Value) && v.Value != hidden {
				*v = yaml.Node{Kind: yaml.ScalarNode, Value: hidden, Anchor: v.Anchor}
				secrets++
			}
		}
	})
	if text, err = yaml.Marshal(tree); err != nil {
		return nil, 0, &Error{Source: d.source, Reason: oneLine(err)}
	}
	return text, secrets, nil
}

// IsSecretKey reports whether the value of a key, whose path is left out, is a secret.
func IsSecretKey(key string) bool { return isSecret(key) }

// isSecret reports whether the value of a key is a secret.
func isSecret(key string) bool { return key == "secret" || key == "previous_secret" }

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
			if isSecret(n.Content[i].Value) {
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
