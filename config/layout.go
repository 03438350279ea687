package config

import (
	"bytes"
	"slices"

	"go.yaml.in/yaml/v3"
)

// sameTree tells whether two trees say the same: style and comments do not
// count.
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

// cloneTree copies a tree; aliases in the copy stand for what is in the copy.
func cloneTree(doc *yaml.Node) *yaml.Node {
	copies := map[*yaml.Node]*yaml.Node{}
	var clone func(*yaml.Node) *yaml.Node
	clone = func(n *yaml.Node) *yaml.Node {
		c := *n
		if n.Anchor != "" {
			copies[n] = &c // before the aliases, which come behind it
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

// A layout is how a file is indented.
type layout struct {
	spaces  int  // per level; 0: not known
	compact bool // lists are not indented
	lists   bool // compact is known
}

// layoutOf takes the layout of what comes first.
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

// encode writes a tree in the layout.
func (l layout) encode(doc *yaml.Node) (out []byte, err error) {
	if len(doc.Content) == 0 {
		return nil, nil
	}
	var b bytes.Buffer
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(l.spaces)
	if l.compact {
		enc.CompactSeqIndent()
	}
	if err := enc.Encode(doc); err != nil {
		return nil, err
	}
	if err := enc.Close(); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// splice makes in text the change that leads from before to after: the
// encodings of the tree of text and of the changed tree. An encoding has its own
// idea of blank lines, of the space ahead of comments and of breaks in a list:
// what the change does not concern keeps that of the text. The candidates are
// ordered by how much they keep; the last one is after itself. It is for the
// caller to parse them.
func splice(text, before, after []byte) [][]byte {
	t, b, a := lines(text), lines(before), lines(after)
	at := align(t, b)

	// Lines that are the same at the front and at the end of before and after.
	head := 0
	for head < min(len(a), len(b)) && bytes.Equal(a[head], b[head]) {
		head++
	}
	tail := 0
	for tail < min(len(a), len(b))-head && bytes.Equal(a[len(a)-1-tail], b[len(b)-1-tail]) {
		tail++
	}
	if head == len(a) && head == len(b) {
		return [][]byte{text}
	}
	// The text has to have them, too, line by line.
	for head > 0 && at[head-1] < 0 {
		head--
	}
	for tail > 0 && at[len(b)-tail] < 0 {
		tail--
	}
	middle := slices.Clone(a[head : len(a)-tail])
	from, to := 0, len(t) // the lines of text that middle replaces
	if head > 0 {
		from = at[head-1] + 1
	}
	if tail > 0 {
		to = at[len(b)-tail]
	}
	shift := 0
	if head+tail == len(b) { // nothing goes; blank lines stay behind what comes
		if head > 0 || tail == 0 {
			if head == 0 {
				from = to
			}
			to = from
		} else {
			from = to
		}
		if head > 0 {
			shift = indentOf(t[from-1]) - indentOf(b[head-1])
		}
	} else {
		// Blank lines and the like around what goes stay.
		if first := at[head]; first >= 0 {
			shift = indentOf(t[first]) - indentOf(b[head])
		}
		for from < to && blank(t[from]) {
			from++
		}
		for to > from && blank(t[to-1]) {
			to--
		}
		if len(middle) == 0 && from > 0 && to < len(t) && blank(t[to]) &&
			(blank(t[from-1]) || indentOf(t[from-1]) < indentOf(t[from])) {
			to++ // one blank line is enough, and none ahead of what is now the first
		}
	}
	if len(t) > 0 && bytes.HasSuffix(t[0], []byte("\r\n")) {
		for i, l := range middle {
			middle[i] = slices.Concat(bytes.TrimSuffix(l, []byte("\n")), []byte("\r\n"))
		}
	}
	var out [][]byte
	for _, s := range slices.Compact([]int{shift, 0}) {
		var buf bytes.Buffer
		buf.Write(bytes.Join(t[:from], nil))
		if from > 0 && !bytes.HasSuffix(t[from-1], []byte("\n")) {
			buf.WriteByte('\n')
		}
		for _, l := range middle {
			buf.Write(indent(l, s))
		}
		buf.Write(bytes.Join(t[to:], nil))
		out = append(out, buf.Bytes())
	}
	return append(out, after)
}

// lines splits b behind each line end.
func lines(b []byte) [][]byte { return slices.Collect(bytes.Lines(b)) }

// align returns for each line of b the place of the same line in t, but for
// spaces; -1: there is none. Places ascend.
func align(t, b [][]byte) []int {
	at := make([]int, len(b))
	for j := range at {
		at[j] = -1
	}
	bare := func(lines [][]byte) []string {
		out := make([]string, len(lines))
		for i, l := range lines {
			out[i] = string(bytes.Join(bytes.Fields(l), nil))
		}
		return out
	}
	bt, bb := bare(t), bare(b)
	for i, j := 0, 0; i < len(t) && j < len(b); {
		switch {
		case bt[i] == bb[j]:
			if bt[i] != "" {
				at[j] = i
			}
			i, j = i+1, j+1
		case bt[i] == "":
			i++
		case bb[j] == "":
			j++
		default:
			i, j = meet(bt, bb, i, j)
		}
	}
	return at
}

// meet returns the next places where lines are the same again, if there are
// any not far behind.
func meet(t, b []string, i, j int) (int, int) {
	const far = 200
	for d := 1; d <= far; d++ {
		for k := range d + 1 {
			if x, y := i+d-k, j+k; x < len(t) && y < len(b) && t[x] == b[y] && t[x] != "" {
				return x, y
			}
		}
	}
	return len(t), len(b)
}

func blank(line []byte) bool { return len(bytes.TrimSpace(line)) == 0 }

// indentOf counts the spaces that a line begins with.
func indentOf(line []byte) int { return len(line) - len(bytes.TrimLeft(line, " ")) }

// indent moves a line to the right, or left as far as it goes.
func indent(line []byte, by int) []byte {
	if by >= 0 {
		return append(bytes.Repeat([]byte(" "), by), line...)
	}
	return line[min(-by, indentOf(line)):]
}
