package config

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/iser-target/iser-target/config/terms"
	"github.com/iser-target/iser-target/security"
)

var (
	// ErrNotFound reports an edit of an object that the document does not have.
	ErrNotFound = errors.New("not found")
	// ErrExists reports that the document has the object that an edit adds.
	ErrExists = errors.New("exists")
	// ErrShared reports an edit of YAML that aliases use in several places, so that the
	// edit would change all of them.
	ErrShared = errors.New("shared by an alias")
)

const mergedReason = "comes from an alias by <<: a change would change every use of it. Change the file with an editor"

// A Document is the text of a configuration file. Edits keep the comments, the order and the
// layout of everything that they do not change. An edited Document need not be valid: Config
// checks it. Its methods must not be called concurrently.
type Document struct {
	*version
	source string

	changed bool        // by an edit
	mode    fs.FileMode // of its file; 0: no file
	owner   error       // why others than its owner can change the file; nil: they cannot

	shared *Document // targets of a cluster, which nobody changes; nil: none
	// Of a shared part: what names its text, and whether the text is not kept yet.
	revision int64
	unkept   bool
}

// A version of a document is immutable: an edit creates another one.
type version struct {
	text     []byte
	tree     *yaml.Node
	settings map[string]any
	layout   layout
}

func parseVersion(text []byte) (*version, error) {
	tree, settings, err := parseYAML(text)
	if err != nil {
		return nil, err
	}
	walk(tree, func(n *yaml.Node) {
		if n.Tag == "!!merge" {
			n.Tag = "" // or the encoder would write it
		}
	})
	return &version{text, tree, settings, layoutOf(tree)}, nil
}

// OpenDocument reads the file at path. It fails if the file is not YAML that Load would read.
// Config checks whether it is a valid configuration.
func OpenDocument(path string) (*Document, error) {
	b, fi, err := readFile(path)
	if err != nil {
		return nil, &Error{Source: path, Reason: reasonOf(err)}
	}
	d, err := NewDocument(path, b)
	if err != nil {
		return nil, err
	}
	d.mode, d.owner = fi.Mode(), CheckOwner(fi)
	return d, nil
}

// NewDocument makes a document of text; errors name it by source.
func NewDocument(source string, b []byte) (*Document, error) {
	if len(b) > MaxFile {
		return nil, &Error{Source: source, Reason: errTooLarge.Error()}
	}
	v, err := parseVersion(bytes.Clone(b))
	if err != nil {
		return nil, syntaxError(source, b, err)
	}
	return &Document{version: v, source: source}, nil
}

// DefaultDocument returns the document that the target uses without a file: one memory LUN
// on the loopback address, for any initiator.
func DefaultDocument() (*Document, error) { return NewDocument(defaultSource, defaultYAML) }

// Clone returns a copy, which edits of d do not change.
func (d *Document) Clone() *Document {
	c := *d
	return &c
}

// Bytes returns the text, which the caller must not change.
func (d *Document) Bytes() []byte { return d.text }

// Config returns what Load would return for a file with this text: the configuration,
// including the environment, or an error that joins one *Error for each problem. The targets
// of the shared part follow those of the file.
func (d *Document) Config() (*Config, error) {
	v := d.version
	if d.changed {
		v = nil // no file has this text yet
	}
	settings, shared := d.merged()
	c, err := configOf(d.source, settings, v, shared)
	if err != nil {
		return nil, err
	}
	file := *c
	if shared != nil {
		file.Targets = c.Targets[:shared.own]
	}
	if err = file.checkFileMode(d.mode); err == nil {
		err = d.owner
	}
	if err != nil {
		return nil, &Error{Source: d.source, Reason: err.Error()}
	}
	return c, nil
}

// AddTarget appends a target to the file.
func (d *Document) AddTarget(t Target) error { return d.add(targetEntry(t.Name), t) }

// RemoveTarget removes a target with its LUNs.
func (d *Document) RemoveTarget(name string) error { return d.remove(targetEntry(name)) }

// SetTarget sets a key of a target, like alias or auth.method, to value, which is YAML. The
// empty string removes the key.
func (d *Document) SetTarget(name, key, value string) error {
	return d.set(targetEntry(name), key, value, reflect.TypeFor[Target](), "name", "luns")
}

// AddLUN appends a LUN to a target.
func (d *Document) AddLUN(target string, l LUN) error { return d.add(lunEntry(target, l.ID), l) }

// RemoveLUN removes a LUN of a target.
func (d *Document) RemoveLUN(target string, id int) error { return d.remove(lunEntry(target, id)) }

// SetLUN sets a key of a LUN, like size, to value, which is YAML. The empty string removes the key.
func (d *Document) SetLUN(target string, id int, key, value string) error {
	return d.set(lunEntry(target, id), key, value, reflect.TypeFor[LUN](), "id")
}

// SetLimit sets a key of limits to value, which is YAML. The empty string removes the key, which
// restores its default.
func (d *Document) SetLimit(key, value string) error {
	path := "limits." + key
	if _, names, _ := readEnvironment(); names[path] != "" {
		return &Error{Source: d.source, Key: path, Reason: fmt.Sprintf("%s of the environment overrides the file. Change that variable, and restart the target", names[path])}
	}
	return d.edit(func(e *editor) error { return e.set(e.root(), "", path, value, reflect.TypeFor[Config]()) })
}

// AddPortal appends a portal.
func (d *Document) AddPortal(p Portal) error { return d.add(portalEntry(p.Listen), p) }

// SetPortal sets a key of a portal, like ipsec, to value, which is YAML. The empty string removes the key.
func (d *Document) SetPortal(listen, key, value string) error {
	return d.set(portalEntry(listen), key, value, reflect.TypeFor[Portal](), "listen")
}

// RemovePortal removes the portal with the address listen.
func (d *Document) RemovePortal(listen string) error { return d.remove(portalEntry(listen)) }

// AllowInitiator appends a pattern to the initiators that may log in to a target.
func (d *Document) AllowInitiator(target, pattern string) error {
	return d.add(initiatorEntry(target, pattern), pattern)
}

// DenyInitiator removes a pattern, in any case of letters, from the initiators that may log
// in to a target. Other patterns may still admit the same initiators.
func (d *Document) DenyInitiator(target, pattern string) error {
	return d.remove(initiatorEntry(target, pattern))
}

// AddUser appends a CHAP user to those of a target. If the target says nothing about authentication, it requires CHAP
// from then on.
func (d *Document) AddUser(target string, u User) error {
	if err := d.add(userEntry(target, u.Name), u); err != nil {
		return err
	}
	return d.editOf(targetEntry(target), func(e *editor) error {
		t, path, err := e.item(targetEntry(target))
		if err != nil {
			return err
		}
		auth, path, err := e.within(t, path, "auth")
		if err != nil || lookup(auth, "method") != nil {
			return err
		}
		return e.setValue(auth, path, "method", "chap", reflect.TypeFor[string]())
	})
}

// RemoveUser removes a CHAP user of a target.
func (d *Document) RemoveUser(target, name string) error { return d.remove(userEntry(target, name)) }

// RotateUser gives a CHAP user of a target the secret of u, or that of its SecretFile. The present one stays valid as the previous
// secret. An earlier rotation must have ended.
func (d *Document) RotateUser(target string, u User) error {
	return d.editOf(targetEntry(target), func(e *editor) error {
		m, path, err := e.item(userEntry(target, u.Name))
		if err != nil {
			return err
		}
		for _, key := range []string{"previous_secret", "previous_secret_file"} {
			if lookup(m, key) != nil {
				return e.fail(ErrExists, under(path, key), "is set: end the rotation before another one")
			}
		}
		found := false
		for _, key := range []string{"secret", "secret_file"} {
			i := directIndex(m, key)
			if i < 0 {
				continue
			}
			if err := e.own(m.Content[i], path); err != nil {
				return err
			}
			moved := *m.Content[i]
			moved.Value = "previous_" + key
			m.Content[i], found = &moved, true
		}
		if !found {
			return e.fail(ErrShared, under(path, "secret"), mergedReason)
		}
		next := writeNode(reflect.ValueOf(User{Secret: u.Secret, SecretFile: u.SecretFile}))
		m.Content = append(m.Content, next.Content...)
		if m.Style&yaml.FlowStyle != 0 {
			flowed(m)
		}
		return nil
	})
}

// EndRotation removes the previous secret of a CHAP user of a target.
func (d *Document) EndRotation(target, name string) error {
	return d.editOf(targetEntry(target), func(e *editor) error {
		m, path, err := e.item(userEntry(target, name))
		if err != nil {
			return err
		}
		found := false
		for _, key := range []string{"previous_secret", "previous_secret_file"} {
			if lookup(m, key) == nil {
				continue
			}
			found = true
			if err := e.setValue(m, path, key, "", reflect.TypeFor[string]()); err != nil {
				return err
			}
		}
		if !found {
			return e.fail(ErrNotFound, under(path, "previous_secret"), "is not set: the user has one secret")
		}
		return nil
	})
}

// add appends an item to the list of x, which must not have x.
func (d *Document) add(x *entry, item any) error {
	return d.editOf(x, adding(x, item))
}

// adding returns the change that appends an item to the list of x.
func adding(x *entry, item any) func(*editor) error {
	return func(e *editor) error {
		m, path, err := e.parent(x)
		if err != nil {
			return err
		}
		if i := x.index(m); i >= 0 {
			return e.fail(ErrExists, index(under(path, x.list), i), "%s already", x.taken)
		}
		return e.appendTo(m, path, x.list, writeNode(reflect.ValueOf(item)))
	}
}

// remove removes x. It keeps an empty list.
func (d *Document) remove(x *entry) error { return d.editOf(x, removal(x)) }

// removal returns the change that removes x.
func removal(x *entry) func(*editor) error {
	return func(e *editor) error {
		list, i, path, err := e.locate(x)
		if err != nil {
			return err
		}
		if err := e.free(list.Content[i], path); err != nil {
			return err
		}
		list.Content = slices.Delete(list.Content, i, i+1)
		if len(list.Content) == 0 {
			list.Style = yaml.FlowStyle
		}
		return nil
	}
}

// set sets a key of x, which is a map.
func (d *Document) set(x *entry, key, value string, t reflect.Type, fixed ...string) error {
	return d.editOf(x, func(e *editor) error {
		m, path, err := e.item(x)
		if err != nil {
			return err
		}
		return e.set(m, path, key, value, t, fixed...)
	})
}

// editOf applies one change of x to the part of d that has its target.
func (d *Document) editOf(x *entry, change func(*editor) error) error {
	if d.isShared(x) {
		return d.editShared(change)
	}
	return d.edit(change)
}

// edit applies one change of the tree to the text.
func (d *Document) edit(change func(*editor) error) error {
	e := &editor{source: d.source, doc: cloneTree(d.tree)}
	if err := change(e); err != nil {
		return err
	}
	if sameTree(d.tree, e.doc) {
		return nil
	}
	for _, text := range splice(d.text, d.tree, e.doc, d.layout) {
		text := text()
		if len(text) > MaxFile {
			return &Error{Source: d.source, Reason: "would become larger than " + Size(MaxFile).String()}
		}
		if v, err := parseVersion(text); err == nil && sameTree(v.tree, e.doc) {
			d.version, d.changed = v, true
			return nil
		}
	}
	return &Error{Source: d.source, Reason: "the YAML is written in a way that only an editor can change. Change the file with an editor"}
}

// An entry describes an item of a list in a document.
type entry struct {
	in    *entry // target that has the list; nil: the list is at the top
	below string // key of the map in the target that has the list; empty: the target has it
	list  string // key of the list
	name  string // for the error that the list lacks the item
	taken string // for the error that the list has the item
	is    func(item *yaml.Node) bool
}

func targetEntry(name string) *entry {
	want := normalName(name)
	return &entry{nil, "", "targets", "target " + name, "is target " + name, func(n *yaml.Node) bool {
		s, ok := scalarOf(n, "name")
		return ok && normalName(s) == want
	}}
}

func lunEntry(target string, id int) *entry {
	name := "LUN " + strconv.Itoa(id)
	return &entry{targetEntry(target), "", "luns", name, "is " + name, func(n *yaml.Node) bool {
		s, ok := scalarOf(n, "id")
		got, err := strconv.Atoi(s)
		return ok && err == nil && got == id
	}}
}

func userEntry(target, user string) *entry {
	name := "user " + strconv.Quote(user)
	return &entry{targetEntry(target), "auth", "users", name, "is " + name, func(n *yaml.Node) bool {
		s, ok := scalarOf(n, "name")
		return ok && s == user
	}}
}

func portalEntry(listen string) *entry {
	want, reason := parseAddress(listen, true)
	return &entry{nil, "", "portals", "portal " + listen, "listens on " + listen, func(n *yaml.Node) bool {
		s, ok := scalarOf(n, "listen")
		got, bad := parseAddress(s, true)
		return ok && (s == listen || reason == "" && bad == "" && got == want)
	}}
}

func initiatorEntry(target, pattern string) *entry {
	name := strconv.Quote(pattern)
	return &entry{targetEntry(target), "", "initiators", name, "is " + name, func(n *yaml.Node) bool {
		n = resolve(n)
		return n.Kind == yaml.ScalarNode && strings.EqualFold(n.Value, pattern)
	}}
}

// index returns the index of the first item that is x, in the list that the map m has; -1: not
// found.
func (x *entry) index(m *yaml.Node) int {
	if list := lookup(m, x.list); list != nil && resolve(list).Kind == yaml.SequenceNode {
		return slices.IndexFunc(resolve(list).Content, x.is)
	}
	return -1
}

// An editor changes the tree of a document. Paths are keys in the form of errors.
type editor struct {
	source string
	doc    *yaml.Node
}

func (e *editor) fail(class error, key, format string, args ...any) error {
	return &Error{Source: e.source, Key: key, Reason: fmt.Sprintf(format, args...), class: class}
}

// root returns the map at the top of the document, which it creates if it is missing.
func (e *editor) root() *yaml.Node {
	if len(e.doc.Content) == 0 {
		e.doc.Kind = yaml.DocumentNode
		e.doc.Content = []*yaml.Node{{Kind: yaml.MappingNode}}
	}
	root := e.doc.Content[0]
	if root.Tag == "!!null" { // nothing but comments, or ---
		*root = yaml.Node{Kind: yaml.MappingNode, HeadComment: root.HeadComment, LineComment: root.LineComment, FootComment: root.FootComment}
	}
	return root
}

// parent returns the map that has the list of x, for changes, and its path.
func (e *editor) parent(x *entry) (*yaml.Node, string, error) {
	if x.in == nil {
		return e.root(), "", nil
	}
	m, path, err := e.item(x.in)
	if err != nil || x.below == "" {
		return m, path, err
	}
	return e.within(m, path, x.below)
}

// within returns the map under a key, for changes, and its path. It creates the map if it is missing.
func (e *editor) within(m *yaml.Node, path, key string) (*yaml.Node, string, error) {
	next := direct(m, key)
	switch {
	case next == nil && lookup(m, key) != nil:
		return nil, "", e.fail(ErrShared, under(path, key), mergedReason)
	case next == nil:
		next = &yaml.Node{Kind: yaml.MappingNode, Style: m.Style & yaml.FlowStyle}
		m.Content = append(m.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: key}, next)
	}
	if err := e.own(next, under(path, key)); err != nil {
		return nil, "", err
	}
	if next.Kind != yaml.MappingNode {
		return nil, "", e.fail(nil, under(path, key), "must be a map")
	}
	return next, under(path, key), nil
}

// locate returns the list of x, for changes, and the index and the path of x.
func (e *editor) locate(x *entry) (list *yaml.Node, i int, path string, err error) {
	m, path, err := e.parent(x)
	if err != nil {
		return nil, 0, "", err
	}
	if i = x.index(m); i < 0 {
		return nil, 0, "", e.fail(ErrNotFound, under(path, x.list), "has no %s", x.name)
	}
	list, err = e.list(m, path, x.list)
	return list, i, index(under(path, x.list), i), err
}

// item returns x, which is a map, for changes, and its path.
func (e *editor) item(x *entry) (*yaml.Node, string, error) {
	list, i, path, err := e.locate(x)
	if err != nil {
		return nil, "", err
	}
	return list.Content[i], path, e.own(list.Content[i], path)
}

func normalName(name string) string {
	if n, err := security.NormalizeName(name); err == nil {
		return n
	}
	return name
}

// list returns the list under a key, for changes; nil if the key is missing.
func (e *editor) list(m *yaml.Node, path, key string) (*yaml.Node, error) {
	list := direct(m, key)
	if list == nil {
		if lookup(m, key) != nil {
			return nil, e.fail(ErrShared, under(path, key), mergedReason)
		}
		return nil, nil
	}
	if err := e.own(list, under(path, key)); err != nil {
		return nil, err
	}
	if list.Kind != yaml.SequenceNode && list.Tag != "!!null" {
		return nil, e.fail(nil, under(path, key), "must be a list")
	}
	return list, nil
}

// own returns an ErrShared if a change of n would change other places, too.
func (e *editor) own(n *yaml.Node, path string) error {
	if n.Kind == yaml.AliasNode {
		return e.fail(ErrShared, path, "is the alias *%s: a change would change every use of it. Change the file with an editor", n.Value)
	}
	if n.Anchor != "" && uses(e.doc)[n] > 0 {
		return e.fail(ErrShared, path, "has the anchor &%s: a change would change every *%[1]s. Change the file with an editor", n.Anchor)
	}
	return nil
}

// free returns an ErrShared if n cannot be removed because an alias elsewhere needs an anchor
// in it.
func (e *editor) free(n *yaml.Node, path string) error {
	var err error
	all, own := uses(e.doc), uses(n)
	walk(n, func(a *yaml.Node) {
		if err == nil && all[a] > own[a] {
			err = e.fail(ErrShared, path, "has the anchor &%s, which *%[1]s needs elsewhere. Change the file with an editor", a.Anchor)
		}
	})
	return err
}

// appendTo appends an item to the list under a key, in the style of the last item.
func (e *editor) appendTo(m *yaml.Node, path, key string, item *yaml.Node) error {
	list, err := e.list(m, path, key)
	if err != nil {
		return err
	}
	if list == nil {
		list = &yaml.Node{Kind: yaml.SequenceNode}
		if item.Kind == yaml.ScalarNode {
			list.Style = yaml.FlowStyle
		}
		m.Content = append(m.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: key}, list)
	}
	if list.Tag == "!!null" {
		*list = yaml.Node{Kind: yaml.SequenceNode, HeadComment: list.HeadComment, LineComment: list.LineComment, FootComment: list.FootComment}
	}
	if len(list.Content) == 0 && item.Kind == yaml.MappingNode {
		list.Style = 0 // an empty list is written as []
	}
	if n := len(list.Content); n > 0 {
		last := list.Content[n-1]
		switch {
		case item.Kind != yaml.MappingNode || last.Kind != yaml.MappingNode:
		case last.Style&yaml.FlowStyle != 0:
			flowed(item)
		default:
			item.Style = 0
		}
	}
	list.Content = append(list.Content, item)
	if list.Style&yaml.FlowStyle != 0 {
		flowed(list)
	}
	return nil
}

// set sets a key of the map m of type t; dots in key lead to nested maps. It refuses the
// fixed keys.
func (e *editor) set(m *yaml.Node, path, key, value string, t reflect.Type, fixed ...string) error {
	if slices.Contains(fixed, key) {
		return e.fail(nil, under(path, key), "cannot be changed: remove the object and add another")
	}
	for {
		first, rest, nested := strings.Cut(key, ".")
		i := slices.Index(keysOf(t), first)
		if i < 0 {
			return e.fail(nil, under(path, first), "unknown key%s", suggest(first, keysOf(t)))
		}
		t = t.Field(i).Type
		if !nested {
			return e.setValue(m, path, first, value, t)
		}
		if t.Kind() != reflect.Struct {
			return e.fail(nil, under(path, first), "has no keys of its own")
		}
		next := direct(m, first)
		switch {
		case next == nil && lookup(m, first) != nil:
			return e.fail(ErrShared, under(path, first), mergedReason)
		case next == nil && value == "":
			return nil
		case next == nil:
			next = &yaml.Node{Kind: yaml.MappingNode, Style: yaml.FlowStyle}
			m.Content = append(m.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: first}, next)
		}
		if err := e.own(next, under(path, first)); err != nil {
			return err
		}
		if next.Kind != yaml.MappingNode {
			return e.fail(nil, under(path, first), "must be a map")
		}
		m, path, key = next, under(path, first), rest
	}
}

// setValue sets a key of the map m itself.
func (e *editor) setValue(m *yaml.Node, path, key, value string, t reflect.Type) error {
	path = under(path, key)
	i := directIndex(m, key)
	if i >= 0 {
		old := m.Content[i+1]
		if old.Kind != yaml.AliasNode { // an alias can be replaced
			if err := e.free(old, path); err != nil {
				return err
			}
		}
	}
	if value == "" {
		if i < 0 && lookup(m, key) != nil {
			return e.fail(ErrShared, path, mergedReason)
		}
		if i >= 0 {
			m.Content = slices.Delete(m.Content, i, i+2)
		}
		return nil
	}
	n, err := valueNode(value, t)
	if err != nil {
		return e.fail(nil, path, "%v", err)
	}
	if m.Style&yaml.FlowStyle != 0 {
		flowed(n)
	}
	if i < 0 {
		m.Content = append(m.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: key}, n)
		return nil
	}
	old := m.Content[i+1]
	n.HeadComment, n.LineComment, n.FootComment = old.HeadComment, old.LineComment, old.FootComment
	m.Content[i+1] = n
	return nil
}

// valueNode parses a value in YAML for a key of type t. A key that is a string takes any
// scalar as its text.
func valueNode(value string, t reflect.Type) (*yaml.Node, error) {
	var doc yaml.Node
	if err := yaml.Unmarshal([]byte(value), &doc); err != nil {
		return nil, errors.New(oneLine(err))
	}
	if len(doc.Content) != 1 || secondDocument([]byte(value)) > 0 {
		return nil, errors.New("must be one value in YAML")
	}
	n := doc.Content[0]
	bad := false
	walk(n, func(n *yaml.Node) {
		bad = bad || n.Kind == yaml.AliasNode || n.Anchor != ""
		n.HeadComment, n.LineComment, n.FootComment = "", "", ""
	})
	if bad {
		return nil, errors.New("must not have anchors or aliases")
	}
	if n.Kind != yaml.ScalarNode {
		flowed(n)
	} else if t.Kind() == reflect.String && n.Tag != "!!str" {
		return writeNode(reflect.ValueOf(n.Value)), nil
	}
	return n, nil
}

// under extends a path by a key.
func under(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

// resolve follows an alias.
func resolve(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}

// directIndex returns the index of a key in the map itself; -1: not found.
func directIndex(m *yaml.Node, key string) int {
	if m.Kind != yaml.MappingNode {
		return -1
	}
	for i := 0; i+1 < len(m.Content); i += 2 {
		if k := resolve(m.Content[i]); k.Kind == yaml.ScalarNode && k.Value == key {
			return i
		}
	}
	return -1
}

// direct returns the value of a key in the map itself; nil: not found.
func direct(m *yaml.Node, key string) *yaml.Node {
	if i := directIndex(m, key); i >= 0 {
		return m.Content[i+1]
	}
	return nil
}

// lookup returns the value of a key in a map or in the maps that it merges in with <<;
// nil: not found.
func lookup(m *yaml.Node, key string) *yaml.Node { return lookupBelow(m, key, 8) }

// lookupBelow implements lookup for a limited number of levels of <<.
func lookupBelow(m *yaml.Node, key string, levels int) *yaml.Node {
	m = resolve(m)
	if n := direct(m, key); n != nil || m.Kind != yaml.MappingNode || levels == 0 {
		return n
	}
	for i := 0; i+1 < len(m.Content); i += 2 {
		if k := m.Content[i]; k.Value != "<<" || k.Tag != "" { // parseVersion clears the tag
			continue
		}
		from := resolve(m.Content[i+1])
		if from.Kind != yaml.SequenceNode {
			return lookupBelow(from, key, levels-1)
		}
		for _, f := range from.Content {
			if n := lookupBelow(f, key, levels-1); n != nil {
				return n
			}
		}
	}
	return nil
}

// scalarOf returns the text of a scalar in a map.
func scalarOf(m *yaml.Node, key string) (string, bool) {
	n := lookup(m, key)
	if n == nil {
		return "", false
	}
	n = resolve(n)
	return n.Value, n.Kind == yaml.ScalarNode
}

// walk calls f for n and all nodes below it. It does not follow aliases.
func walk(n *yaml.Node, f func(*yaml.Node)) {
	f(n)
	for _, c := range n.Content {
		walk(c, f)
	}
}

// uses counts the aliases in n by the node that they refer to.
func uses(n *yaml.Node) map[*yaml.Node]int {
	counts := map[*yaml.Node]int{}
	walk(n, func(n *yaml.Node) {
		if n.Alias != nil {
			counts[n.Alias]++
		}
	})
	return counts
}

// writeNode returns a value of a configuration as YAML nodes, by its key tags, without fields
// that have their zero value or default.
func writeNode(v reflect.Value) *yaml.Node {
	plain := func(s string) *yaml.Node { return &yaml.Node{Kind: yaml.ScalarNode, Value: s} }
	switch x := v.Interface().(type) {
	case time.Duration:
		return plain(FormatDuration(x))
	case security.Secret:
		return stringNode(secretText(x))
	}
	switch v.Kind() {
	case reflect.String:
		return stringNode(v.String())
	case reflect.Slice:
		n := &yaml.Node{Kind: yaml.SequenceNode}
		if e := v.Type().Elem(); e.Kind() != reflect.Struct || v.Len() == 0 {
			n.Style = yaml.FlowStyle
		}
		for i := range v.Len() {
			n.Content = append(n.Content, writeNode(v.Index(i)))
		}
		return n
	case reflect.Struct:
		n := &yaml.Node{Kind: yaml.MappingNode}
		switch v.Interface().(type) {
		case LUN, Rate, User, Credential, Redirect:
			n.Style = yaml.FlowStyle
		}
		for i, key := range keysOf(v.Type()) {
			if f := v.Field(i); written(v, key, f) {
				n.Content = append(n.Content, plain(key), writeNode(f))
			}
		}
		if n.Style == yaml.FlowStyle {
			flowed(n)
		}
		return n
	}
	return plain(fmt.Sprint(v.Interface()))
}

// written reports whether YAML has to contain the field f of the struct v.
func written(v reflect.Value, key string, f reflect.Value) bool {
	switch key {
	case "id":
		return true
	case "tpgt":
		return !f.IsZero() && f.Int() != defaultTPGT
	case "initial_r2t":
		return !f.Bool()
	case "first_burst_length", "max_burst_length", "max_outstanding_r2t", "max_recv_data_segment_length":
		d := reflect.ValueOf(NewTarget())
		return !f.IsZero() && f.Int() != d.Field(slices.Index(keysOf(d.Type()), key)).Int()
	case "secret":
		return !f.IsZero() && v.FieldByName("SecretFile").IsZero() // or the secret comes from SecretFile
	case "previous_secret":
		return !f.IsZero() && v.FieldByName("PreviousFile").IsZero()
	}
	return !f.IsZero()
}

// flowed sets the flow style of n and all collections below, so that they take one line. It
// sets double quotes where the encoder would use single ones, for strings with a colon.
func flowed(n *yaml.Node) {
	walk(n, func(n *yaml.Node) {
		if n.Kind != yaml.ScalarNode {
			n.Style |= yaml.FlowStyle
		} else if n.Style == 0 && n.ShortTag() == "!!str" && strings.Contains(n.Value, ":") {
			n.Style = yaml.DoubleQuotedStyle
		}
	})
}

// stringNode returns a string as a node, in quotes if YAML would read another type.
func stringNode(s string) *yaml.Node {
	n := &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: s}
	// YAML 1.1 has booleans like yes and numbers of base 60, and a flow list would split
	// some strings.
	if s == "" || strings.ContainsAny(s, "*?&!%@`#,[]{}:\"'|>\\\t\r\n") && !plainAddress(s) || s != strings.TrimSpace(s) || !yamlString(s) {
		n.Style = yaml.DoubleQuotedStyle
	}
	return n
}

// plainAddress reports whether s is a string with colons that needs no quotes: a name like
// iqn.2026-11.io.example:store or an address like 192.0.2.1:3260.
func plainAddress(s string) bool {
	if strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.:-_/") != "" {
		return false
	}
	if host, _, err := net.SplitHostPort(s); err == nil && strings.Trim(host, "0123456789") != "" {
		return true
	}
	return strings.HasPrefix(s, "iqn.") && !strings.HasSuffix(s, ":")
}

// yamlString reports whether YAML reads s without quotes as a string.
func yamlString(s string) bool {
	var v any
	if yaml.Unmarshal([]byte(s), &v) != nil {
		return false
	}
	if got, ok := v.(string); !ok || got != s {
		return false
	}
	switch strings.ToLower(s) {
	case "y", "yes", "n", "no", "on", "off":
		return false
	}
	return true
}

// FormatDuration returns d without zero units at its end: 2m, not 2m0s.
func FormatDuration(d time.Duration) string { return terms.FormatDuration(d) }

// secretText returns the text that ParseSecret parses to s.
func secretText(s security.Secret) string {
	if again, err := security.ParseSecret(string(s)); err == nil && again == s && strings.Trim(string(s), printable) == "" {
		return string(s)
	}
	return "0x" + hex.EncodeToString([]byte(s))
}

const printable = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789!#$%&()*+,-./:;<=>?@[]^_{|}~"
