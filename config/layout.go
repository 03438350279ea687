package config

import (
	"bytes"
	"math"
	"slices"

	"go.yaml.in/yaml/v3"
)

// sameTree reports whether two trees are equal, except for style and comments.
func sameTree(a, b *yaml.Node) bool {
	if a.Kind != b.Kind || len(a.Content) != len(b.Content) || a.Anchor != b.Anchor || a.Value != b.Value || a.ShortTag() != b.ShortTag() {
		return false
	}
	for i := range a.Content {
		if !sameTree(a.Content[i], b.Content[i]) {
			return false
		}
	}
	return true
}

// cloneTree copies a tree. Aliases in the copy refer to nodes of the copy.
func cloneTree(doc *yaml.Node) *yaml.Node {
	copies := map[*yaml.Node]*yaml.Node{}
	var clone func(*yaml.Node) *yaml.Node
	clone = func(n *yaml.Node) *yaml.Node {
		c := *n
		if n.Anchor != "" {
			copies[n] = &c // before its aliases, which come later in the tree
		}
		if n.Alias != nil {
			c.Alias = copies[n.Alias]
		}
		c.Content = make([]*yaml.Node, len(n.Content))
		for i := range n.Content {
			c.Content[i] = clone(n.Content[i])
		}
		return &c
	}
	return clone(doc)
}

// A layout describes the indentation of a file.
type layout struct {
	spaces  int  // per level; 0: not known
	compact bool // lists are not indented
	lists   bool // compact is known
}

// layoutOf returns the layout of the first block map and the first block list.
func layoutOf(doc *yaml.Node) layout {
	var l layout
	walk(doc, func(n *yaml.Node) {
		if n.Kind != yaml.MappingNode || n.Style&yaml.FlowStyle != 0 {
			return
		}
		for i := 0; i+1 < len(n.Content); i += 2 {
			key, v := n.Content[i], n.Content[i+1]
			deeper := v.Column - key.Column
			if v.Style&yaml.FlowStyle != 0 || v.Line <= key.Line || len(v.Content) == 0 {
				continue
			}
			switch {
			case v.Kind == yaml.MappingNode && l.spaces == 0:
				l.spaces = deeper
			case v.Kind == yaml.SequenceNode && !l.lists:
				l.lists, l.compact = true, deeper == 0
				if l.spaces == 0 && deeper > 0 {
					l.spaces = deeper
				}
			}
		}
	})
	if l.spaces < 2 || l.spaces > 8 {
		l.spaces = 2
	}
	return l
}

// encode encodes a tree in the layout; nil: it cannot be encoded.
func (l layout) encode(doc *yaml.Node) []byte {
	if len(doc.Content) == 0 {
		return nil
	}
	var b bytes.Buffer
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(l.spaces)
	if l.compact {
		enc.CompactSeqIndent()
	}
	if enc.Encode(doc) != nil || enc.Close() != nil {
		return nil
	}
	return b.Bytes()
}

// splice returns texts for the tree next, which one edit has made of old, the tree of text.
// The encoder has its own idea of blank lines, of spaces before comments and of line breaks
// in flow lists. So each text but the last encodes only one entry of a block map or list, and
// has the other lines as they are. The first text changes the fewest lines. A text can be
// wrong where YAML is written in unusual ways: the caller parses it and compares the trees.
func splice(text []byte, old, next *yaml.Node, l layout) []func() []byte {
	s := splicer{slices.Collect(bytes.Lines(text)), l}
	limit := len(s.lines)
	texts := []func() []byte{func() []byte { return s.layout.encode(next) }}
	if len(old.Content) == 0 || old.Content[0].Tag == "!!null" { // nothing but comments
		return append([]func() []byte{func() []byte {
			return s.replaceLines(limit, limit, nil, s.encode(yaml.MappingNode, next.Content[0].Content, 0))
		}}, texts...)
	}
	o, n := old.Content[0], next.Content[0]
	for o.Kind == n.Kind && len(o.Content) > 0 && (o.Style|n.Style)&yaml.FlowStyle == 0 {
		size := 1 // nodes of an entry
		if o.Kind == yaml.MappingNode {
			size = 2
		}
		i := 0 // first node of the entry that differs
		for i < min(len(o.Content), len(n.Content)) && slices.EqualFunc(o.Content[i:i+size], n.Content[i:i+size], sameTree) {
			i += size
		}
		m, entry, after := o, n.Content[i:min(i+size, len(n.Content))], limit
		if i+size < len(o.Content) {
			after = o.Content[i+size].Line - 1
		}
		switch {
		case i == len(o.Content):
			texts = append(texts, func() []byte { return s.appendEntry(m, len(m.Content)-size, entry, after) })
		case len(o.Content) > len(n.Content):
			texts = append(texts, func() []byte { return s.removeEntry(m, i, after) })
		default:
			texts = append(texts, func() []byte { return s.replaceEntry(m, i, entry, after) })
			o, n, limit = o.Content[i+size-1], n.Content[i+size-1], after
			continue
		}
		break
	}
	slices.Reverse(texts)
	return texts
}

// A splicer makes texts of other lines. A node i of a map or list o begins an entry, and limit
// is the line of the entry that follows. Lines count from 0.
type splicer struct {
	lines  [][]byte
	layout layout
}

// start returns the line and the indentation of an entry; ok reports whether the line has
// that place.
func (s *splicer) start(o *yaml.Node, i int) (line, indent int, ok bool) {
	line, indent = o.Content[i].Line-1, o.Content[i].Column-1
	if line < 0 || line >= len(s.lines) || indent > len(s.lines[line]) {
		return 0, 0, false
	}
	if o.Kind == yaml.SequenceNode {
		indent = bytes.LastIndexByte(s.lines[line][:indent], '-')
	}
	return line, indent, indent >= 0
}

// end returns the line after an entry. Blank lines and comments that follow are not part of
// the entry, except comments that are indented deeper than deep.
func (s *splicer) end(line, limit, deep int) int {
	end := limit
	for end > line+1 && (blank(s.lines[end-1]) || comment(s.lines[end-1])) {
		end--
	}
	for end < limit && comment(s.lines[end]) && indentOf(s.lines[end]) > deep {
		end++
	}
	return end
}

// appendEntry appends an entry after the last one, which is at i.
func (s *splicer) appendEntry(o *yaml.Node, i int, entry []*yaml.Node, limit int) []byte {
	line, indent, ok := s.start(o, i)
	if !ok {
		return nil
	}
	end := s.end(line, limit, indent)
	return s.replaceLines(end, end, nil, s.encode(o.Kind, entry, indent))
}

func (s *splicer) replaceEntry(o *yaml.Node, i int, entry []*yaml.Node, limit int) []byte {
	line, indent, ok := s.start(o, i)
	if !ok {
		return nil
	}
	text := s.encode(o.Kind, entry, indent)
	head := s.lines[line][:indent] // has the dash of the list item that a map is
	return s.replaceLines(line, s.end(line, limit, math.MaxInt), head, text[min(indent, len(text)):])
}

// removeEntry removes an entry with the comments above it.
func (s *splicer) removeEntry(o *yaml.Node, i, limit int) []byte {
	line, indent, ok := s.start(o, i)
	if !ok {
		return nil
	}
	end := s.end(line, limit, indent)
	for line > 0 && comment(s.lines[line-1]) && indentOf(s.lines[line-1]) == indent {
		line--
	}
	// Keep one blank line of two, and none before the new first entry.
	if line > 0 && end < len(s.lines) && blank(s.lines[end]) && (blank(s.lines[line-1]) || indentOf(s.lines[line-1]) < indent) {
		end++
	}
	return s.replaceLines(line, end, nil, nil)
}

// replaceLines returns the text with head and text instead of the lines [from, to).
func (s *splicer) replaceLines(from, to int, head, text []byte) []byte {
	if len(s.lines) > 0 && bytes.HasSuffix(s.lines[0], []byte("\r\n")) {
		text = bytes.ReplaceAll(text, []byte("\n"), []byte("\r\n"))
	}
	before := bytes.Join(s.lines[:from], nil)
	if from > 0 && !bytes.HasSuffix(before, []byte("\n")) {
		before = append(before, '\n')
	}
	return slices.Concat(before, head, text, bytes.Join(s.lines[to:], nil))
}

// encode encodes an entry of a collection, without the comments around it.
func (s *splicer) encode(kind yaml.Kind, entry []*yaml.Node, indent int) []byte {
	doc := cloneTree(&yaml.Node{Kind: yaml.DocumentNode, Content: []*yaml.Node{{Kind: kind, Content: entry}}})
	for n := doc.Content[0]; len(n.Content) > 0; n = n.Content[0] {
		n.Content[0].HeadComment = ""
	}
	for n := doc.Content[0]; len(n.Content) > 0; n = n.Content[len(n.Content)-1] {
		for _, last := range n.Content[max(len(n.Content)-2, 0):] {
			last.FootComment = ""
		}
	}
	var out []byte
	for line := range bytes.Lines(s.layout.encode(doc)) {
		if !blank(line) {
			out = append(out, bytes.Repeat([]byte(" "), indent)...)
		}
		out = append(out, line...)
	}
	return out
}

func blank(line []byte) bool { return len(bytes.TrimSpace(line)) == 0 }

func comment(line []byte) bool { return bytes.HasPrefix(bytes.TrimSpace(line), []byte("#")) }

// indentOf counts the spaces that a line begins with.
func indentOf(line []byte) int { return len(line) - len(bytes.TrimLeft(line, " ")) }
