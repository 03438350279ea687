package config

import (
	"bytes"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"

	"go.yaml.in/yaml/v3"
)

// A Document can have a shared part: the targets that all gateways of a cluster have. It is a document of its own, with the key targets
// alone, and is kept elsewhere than the file. Config returns the targets of both. An edit changes the part that has the target.

// NewShared makes the document of the targets that a cluster has, for SetShared and ReplaceShared. text is YAML with the key targets
// alone. Errors name it by source. revision names the text where it is kept.
func NewShared(source string, text []byte, revision int64) (*Document, error) {
	d, err := NewDocument(source, text)
	if err != nil {
		return nil, err
	}
	d.revision = revision
	var errs errorList
	for _, key := range slices.Sorted(maps.Keys(d.settings)) {
		if key != "targets" {
			errs.addf(join("", key), "does not belong to the configuration of a cluster, which has the key targets alone. Put it into the file of each gateway")
		}
	}
	switch list := d.settings["targets"].(type) {
	case []any:
	case nil: // could be a mistake, and would remove all targets
		errs.addf("targets", "is required: a list of targets, or [] for no target")
	default:
		errs.addf("targets", "must be a list, not %s", describeAt("targets", list))
	}
	l := newLocator(d.version)
	for _, e := range errs[:min(len(errs), maxErrors)] {
		e.Source, e.At = source, l.position(e)
	}
	if err := errs.join(); err != nil {
		return nil, err
	}
	return d, nil
}

// Shared returns a copy of the shared part, or nil.
func (d *Document) Shared() *Document {
	if d.shared == nil {
		return nil
	}
	return d.shared.Clone()
}

// SetShared makes s, as it is kept already, the shared part of d. nil: d has none.
func (d *Document) SetShared(s *Document) {
	if d.shared = nil; s != nil {
		d.shared = s.Clone()
		d.shared.unkept = false
	}
}

// ReplaceShared makes s the shared part of d, in the place of the text with the revision base.
func (d *Document) ReplaceShared(s *Document, base int64) {
	d.shared = s.Clone()
	d.shared.revision, d.shared.unkept = base, true
}

// MoveShared removes the targets from the file that the shared part has, too. It returns their names.
func (d *Document) MoveShared() (names []string, err error) {
	if d.shared == nil {
		return nil, nil
	}
	list, _ := d.shared.settings["targets"].([]any)
	for _, item := range list {
		m, _ := item.(map[string]any)
		name, _ := m["name"].(string)
		x := targetEntry(name)
		if name == "" || x.index(d.top()) < 0 {
			continue
		}
		if err := d.edit(removal(x)); err != nil {
			return nil, err
		}
		names = append(names, name)
	}
	return names, nil
}

// SharedKept notes that the shared part is kept with a revision, and that errors name it by source.
func (d *Document) SharedKept(source string, revision int64) {
	s := d.shared.Clone()
	s.source, s.revision, s.unkept, s.changed = source, revision, false, false
	d.shared = s
}

// Revision returns what names the text of a shared part where it is kept, or the text that it replaces; 0: no text.
func (d *Document) Revision() int64 { return d.revision }

// Unkept reports whether the text of a shared part is an edit that is to be kept in the place of Revision.
func (d *Document) Unkept() bool { return d.unkept }

// Equal reports whether d and o have the same text and the same shared part.
func (d *Document) Equal(o *Document) bool {
	return bytes.Equal(d.text, o.text) && (d.shared == nil) == (o.shared == nil) && (d.shared == nil || bytes.Equal(d.shared.text, o.shared.text))
}

// AddSharedTarget appends a target to the shared part.
func (d *Document) AddSharedTarget(t Target) error {
	if d.shared == nil {
		return &Error{Source: d.source, Key: "cluster", Reason: "the targets of the cluster are not known yet", class: ErrNotFound}
	}
	x := targetEntry(t.Name)
	if i := x.index(d.top()); i >= 0 {
		return &Error{Source: d.source, Key: index("targets", i), Reason: "is " + x.name + " already", class: ErrExists}
	}
	return d.editShared(adding(x, t))
}

// top returns the map of d.
func (d *Document) top() *yaml.Node {
	if len(d.tree.Content) == 0 {
		return &yaml.Node{}
	}
	return d.tree.Content[0]
}

// isShared reports whether the shared part has the target of x, and the file has not.
func (d *Document) isShared(x *entry) bool {
	for x.in != nil {
		x = x.in
	}
	return d.shared != nil && x.list == "targets" && x.index(d.top()) < 0 && x.index(d.shared.top()) >= 0
}

// editShared applies one change to the shared part.
func (d *Document) editShared(change func(*editor) error) error {
	s := d.shared.Clone()
	before := s.version
	if err := s.edit(change); err != nil {
		return err
	}
	s.unkept = s.unkept || s.version != before
	d.shared = s
	return nil
}

// A sharedPart says which targets of a configuration are those of the shared part.
type sharedPart struct {
	own    int    // targets before them
	file   string // source of these
	source string
	v      *version // nil: nobody has the text
}

// merged returns the settings of d, with the targets of the shared part after those of the file. p is nil if there is no such part, or if the
// file has no list of targets, which Config reports.
func (d *Document) merged() (settings map[string]any, p *sharedPart) {
	own, ok := d.settings["targets"].([]any)
	if d.shared == nil || !ok {
		return d.settings, nil
	}
	shared, _ := d.shared.settings["targets"].([]any)
	settings = maps.Clone(d.settings)
	settings["targets"] = slices.Concat(own, shared)
	p = &sharedPart{own: len(own), file: d.source, source: d.shared.source}
	if !d.shared.changed {
		p.v = d.shared.version
	}
	return settings, p
}

// Located returns a text about the configuration of d, in which the numbers of targets are those of the part that has them.
func (d *Document) Located(text string) string {
	_, p := d.merged()
	if p == nil {
		return text
	}
	return p.located(text, false)
}

var (
	targetKey = regexp.MustCompile(`^targets\[(\d+)\]`)
	// targetInText matches the key of a target, and what is below it.
	targetInText = regexp.MustCompile(`targets\[(\d+)\]((?:\.\w+|\[\d+\])*)`)
)

// located returns text with the numbers of targets in their parts. It names the part unless the text is about it.
func (p *sharedPart) located(text string, about bool) string {
	return targetInText.ReplaceAllStringFunc(text, func(key string) string {
		m := targetInText.FindStringSubmatch(key)
		n, err := strconv.Atoi(m[1])
		switch {
		case err != nil:
		case n >= p.own && about:
			return fmt.Sprintf("targets[%d]%s", n-p.own, m[2])
		case n >= p.own:
			return fmt.Sprintf("targets[%d]%s of %s", n-p.own, m[2], p.source)
		case about:
			return key + " of " + p.file
		}
		return key
	})
}

// assign gives e the source that it is about, and reports whether that is p, which may be nil.
func (p *sharedPart) assign(e *Error, source string) (shared bool) {
	e.Source = source
	if p == nil {
		return false
	}
	if m := targetKey.FindStringSubmatch(e.Key); m != nil {
		if n, err := strconv.Atoi(m[1]); err == nil && n >= p.own {
			shared = true
			e.Source = p.source
			e.Key = fmt.Sprintf("targets[%d]%s", n-p.own, e.Key[len(m[0]):])
		}
	}
	e.Reason = p.located(e.Reason, shared)
	return shared
}

// checkSharedTargets checks the targets from number own on, which are those of a cluster.
func (c *Config) checkSharedTargets(own int, errs *errorList) {
	for i := own; i < len(c.Targets); i++ {
		for j, l := range c.Targets[i].LUNs {
			if !l.Shared {
				errs.addf(index("targets", i, "luns", j)+".shared", "must be true: gateways share all LUNs of a target of the cluster. Put a LUN of one gateway into a target of its file")
			}
		}
	}
}

// SharedTargets returns the number of targets in the text of a shared part.
func (d *Document) SharedTargets() int {
	list, _ := d.settings["targets"].([]any)
	return len(list)
}
