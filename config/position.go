package config

import (
	"bytes"
	"math"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode"

	"go.yaml.in/yaml/v3"
)

// A Position is where the text of a configuration has a problem. The zero value is nowhere.
type Position struct {
	Line, Column int    // from 1; Column in characters, 0: unknown
	Text         string // of the line; empty: unknown, or not shown because it may have a secret
}

// Caret returns the line and a mark below the column, on two lines; empty without Text and Column.
func (p Position) Caret() string {
	if p.Text == "" || p.Column == 0 {
		return ""
	}
	before := []rune(p.Text)[:min(p.Column-1, len([]rune(p.Text)))]
	for i, r := range before {
		if r != '\t' {
			before[i] = ' '
		}
	}
	return p.Text + "\n" + string(before) + "^"
}

// maxShown bounds the characters of a line that is shown.
const maxShown = 200

// A locator finds the places of keys in the text of a version.
type locator struct {
	tree  *yaml.Node
	lines []string // those that people can read; others are empty
	// Characters of a line that anybody may see, for lines with a part that not everybody may, and the first line from
	// which on nobody may see any: see mark.
	shown map[int]int
	end   int
}

func newLocator(v *version) *locator {
	l := &locator{tree: v.tree, shown: map[int]int{}, end: math.MaxInt}
	for b := range bytes.Lines(v.text) {
		s := strings.TrimRight(string(b), "\r\n")
		if len(s) > maxShown || strings.ContainsFunc(s, func(r rune) bool { return r != '\t' && !unicode.IsPrint(r) }) {
			s = ""
		}
		l.lines = append(l.lines, s)
	}
	l.mark(v.tree, false)
	return l
}

// mark hides what is or may be a secret: the value of its key, that of an unknown key, which may be misspelt, and in the
// authentication all that is not the value of a key that is no secret, because the key may be missing.
func (l *locator) mark(n *yaml.Node, auth bool) {
	switch n.Kind {
	case yaml.MappingNode:
		for i := 0; i+1 < len(n.Content); i += 2 {
			key, value := resolve(n.Content[i]).Value, n.Content[i+1]
			known := key == "<<" || knownKeys()[key]
			below := auth || key == "auth" || key == "discovery_auth"
			switch {
			case !known && auth && Nearest(key, authKeys) == "":
				l.hide(n.Content[i])
			case !known, isSecret(key), below && value.Kind == yaml.ScalarNode && !openKeys[key]:
				l.hide(value)
			}
			l.mark(value, below)
		}
	default:
		for _, item := range n.Content {
			if auth && item.Kind == yaml.ScalarNode {
				l.hide(item)
			}
			l.mark(item, auth)
		}
	}
}

// authKeys are the keys below the authentication.
var authKeys = slices.Concat(keysOf(reflect.TypeFor[Auth]()), keysOf(reflect.TypeFor[User]()))

// openKeys are the keys of the authentication whose scalar values are no secrets.
var openKeys = map[string]bool{"method": true, "name": true, "initiator": true, "secret_file": true, "previous_secret_file": true}

// hide hides a value, and all lines after its first one if it may have several.
func (l *locator) hide(value *yaml.Node) {
	if value.Line == 0 {
		return
	}
	begin := []rune(l.line(value.Line))
	if value.Kind != yaml.ScalarNode || value.Column > len(begin) || !strings.Contains(string(begin[value.Column-1:]), value.Value) {
		l.end = min(l.end, value.Line+1)
	}
	if end, ok := l.shown[value.Line]; !ok || value.Column-1 < end {
		l.shown[value.Line] = value.Column - 1
	}
}

func (l *locator) line(n int) string {
	if n < 1 || n > len(l.lines) {
		return ""
	}
	return l.lines[n-1]
}

// position returns where the text has the key of an error, or what would contain it.
func (l *locator) position(e *Error) Position {
	n := l.node(e.Key, strings.HasPrefix(e.Reason, "unknown key"))
	if n == nil {
		return Position{}
	}
	p := Position{Line: n.Line, Column: n.Column}
	text := []rune(l.line(n.Line))
	end, partly := l.shown[n.Line]
	switch {
	case n.Line >= l.end:
	case !partly:
		p.Text = string(text)
	case n.Column <= end && end < len(text):
		p.Text = string(text[:end]) + "..."
	}
	return p
}

// knownKeys returns the names of all keys of a configuration.
var knownKeys = sync.OnceValue(func() map[string]bool {
	known := map[string]bool{}
	var add func(t reflect.Type)
	add = func(t reflect.Type) {
		for t.Kind() == reflect.Slice {
			t = t.Elem()
		}
		if t.Kind() != reflect.Struct {
			return
		}
		for i, key := range keysOf(t) {
			known[key] = true
			add(t.Field(i).Type)
		}
	}
	add(reflect.TypeFor[Config]())
	return known
})

// node returns the node of a key like targets[0].luns[1].size: that of its value if that is a scalar, and else, or with
// ofKey, that of the key itself. If the document lacks the key, it returns the node of what would contain it; nil: the document itself.
func (l *locator) node(key string, ofKey bool) *yaml.Node {
	if len(l.tree.Content) == 0 {
		return nil
	}
	at := l.tree.Content[0]
	name := at // of at
	for key != "" {
		var next, nextName *yaml.Node
		var part string
		switch {
		case key[0] == '[':
			index, rest, _ := strings.Cut(key[1:], "]")
			n, err := strconv.Atoi(index)
			if list := resolve(at); err == nil && list.Kind == yaml.SequenceNode && n < len(list.Content) {
				next, nextName = list.Content[n], list.Content[n]
			}
			key = rest
		case key[0] == '"':
			quoted, err := strconv.QuotedPrefix(key)
			if err != nil {
				return name
			}
			part, _ = strconv.Unquote(quoted)
			key = key[len(quoted):]
			next, nextName = entryOf(at, part)
		default:
			i := strings.IndexAny(key, ".[")
			if i < 0 {
				i = len(key)
			}
			part, key = key[:i], key[i:]
			next, nextName = entryOf(at, part)
		}
		key = strings.TrimPrefix(key, ".")
		if next == nil && at == l.tree.Content[0] {
			return nil // to point at the whole file would not help
		}
		if next == nil {
			return name
		}
		at, name = next, nextName
	}
	if value := resolve(at); !ofKey && value.Kind == yaml.ScalarNode && value.Tag != "!!null" {
		return at
	}
	return name
}

// entryOf returns the value of a key of a map, and the key; of a key that << merges in, twice the value.
func entryOf(m *yaml.Node, key string) (value, name *yaml.Node) {
	m = resolve(m)
	if i := directIndex(m, key); i >= 0 {
		return m.Content[i+1], m.Content[i]
	}
	value = lookup(m, key)
	return value, value
}

var (
	// lineInError matches the place in an error of a YAML decoder.
	lineInError = regexp.MustCompile(`^yaml: (?:unmarshal errors: )?line (\d+): `)
	// aboutTAB matches its errors about a TAB in an indentation.
	aboutTAB = regexp.MustCompile(`cannot start any token|a tab character that violates`)
	// aboutAlias matches its errors about a * or & without a name.
	aboutAlias = regexp.MustCompile(`did not find expected alphabetic or numeric character$`)
	// ofParser matches errors of its parser and scanner, which are about a line.
	ofParser = regexp.MustCompile(`^yaml: (did not find|found|could not find|block |mapping values)`)
)

// syntaxError returns the error about a text that is not the YAML of a configuration.
func syntaxError(source string, text []byte, err error) *Error {
	e := &Error{Source: source, Reason: oneLine(err)}
	if aboutAlias.MatchString(e.Reason) {
		e.Reason += ". Put a value that begins with * or & in quotes"
	}
	m := lineInError.FindStringSubmatch(e.Reason)
	if m == nil {
		if ofParser.MatchString(e.Reason) { // it names no line if that is the first
			e.At.Line = 1
		}
		return e
	}
	e.Reason = "yaml: " + strings.TrimPrefix(e.Reason, m[0])
	e.At.Line, _ = strconv.Atoi(m[1])
	// The line of some errors is that before.
	lines := strings.Split(string(text), "\n")
	for n := e.At.Line; n <= min(e.At.Line+1, len(lines)); n++ {
		indent := lines[n-1][:len(lines[n-1])-len(strings.TrimLeft(lines[n-1], " \t"))]
		if tab := strings.IndexByte(indent, '\t'); tab >= 0 && aboutTAB.MatchString(e.Reason) {
			e.At.Line, e.At.Column, e.Reason = n, tab+1, "yaml: a TAB cannot indent. Use spaces"
			break
		}
	}
	return e
}
