package tests

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// avoided lists the words that CONTRIBUTING.md replaces, with what to say instead.
var avoided = []struct{ pattern, instead string }{
	{`anew|afresh`, "again, or a verb with re-"},
	{`whoever|whosoever`, "name the actor"},
	{`(is|are|was|were|be|being) (waited|looked|asked|cared|paid|accounted|longed) (for|at|after)`,
		"name who waits, looks or asks"},
	{`left alone`, "abandoned, or untouched"},
	{`by the second`, "per second"},
	{`in one breath`, "at once, or in the same critical section"},
	{`for good`, "permanently"},
	{`(comes?|came) to (its|their|an) end`, "ends"},
	{`(gives?|gave) way`, "yields, or is closed to make room"},
	{`tells? (whether|that|if)`, "reports whether"},
	{`who (has|have|wants|can|is|are|was|does|do|may|must)`, "name the actor"},
	{`wants`, "requires, or asks for"},
	{`beside`, "in addition to, besides, next to"},
	{`but for`, "except for"},
	{`any more`, "any longer, or no longer"},
	{`(goes|go|went|going) on`, "continues"},
	{`by (itself|themselves) `, "automatically, or say how"},
	{`is no (number|name|file|directory|error|flag|key|value|size|address)`, "is not a"},
	{`there (is|are|was|were) (none|nothing|nobody)`, "say what is missing"},
	{`octets?`, "bytes, except where an RFC field is quoted"},
}

// octetsAllowed lists the directories that describe wire formats in the words of
// the RFCs, and that of openapi.yaml, where bytes is the name of a field.
var octetsAllowed = []string{"docs/requirements", "rdma/wire", "iscsi/pdu", "cmd/iser-target/api"}

var avoidedREs = func() (all []*regexp.Regexp) {
	for _, a := range avoided {
		all = append(all, regexp.MustCompile(`(?i)\b(?:`+a.pattern+`)\b`))
	}
	return all
}()

// TestProse holds the documents, the comments and the messages of the program to
// the word list.
func TestProse(t *testing.T) {
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != ".." && (strings.HasPrefix(d.Name(), ".git") || d.Name() == "testdata" ||
			d.Name() == "bin"):
			return fs.SkipDir
		case d.IsDir():
			return nil
		}
		local := filepath.ToSlash(strings.TrimPrefix(path, "../"))
		dir := filepath.ToSlash(filepath.Dir(local))
		lines, err := prose(path)
		if err != nil {
			return err
		}
		for _, l := range lines {
			why := avoidedIn(l.text, slices.Contains(octetsAllowed, dir))
			if why != "" {
				t.Errorf("%s:%d: %s", local, l.number, why)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// avoidedIn returns the first avoided word of text and what to say instead, or "".
func avoidedIn(text string, octets bool) string {
	for i, re := range avoidedREs {
		if octets && strings.HasPrefix(avoided[i].pattern, "octet") {
			continue
		}
		if word := re.FindString(text); word != "" {
			return fmt.Sprintf("%q: %s", word, avoided[i].instead)
		}
	}
	return ""
}

type proseLine struct {
	number int
	text   string
}

// prose returns what a person reads in a file: Markdown without code, comments
// and messages of Go, and all lines of scripts and pages. It returns nothing for
// other files.
func prose(path string) ([]proseLine, error) {
	switch ext := filepath.Ext(path); ext {
	case ".go", ".md", ".html", ".js", ".css", ".yaml", ".yml", ".lua", ".sh", ".socket":
		b, err := os.ReadFile(path)
		if err != nil || filepath.Base(path) == "prose_test.go" {
			return nil, err
		}
		switch ext {
		case ".go":
			return goProse(path, b)
		case ".md":
			return markdownProse(string(b)), nil
		}
		var lines []proseLine
		for i, text := range strings.Split(string(b), "\n") {
			lines = append(lines, proseLine{i + 1, text})
		}
		return lines, nil
	}
	return nil, nil
}

var inlineCode = regexp.MustCompile("`[^`]*`|\\]\\([^)]*\\)|https?://\\S+")

func markdownProse(s string) (lines []proseLine) {
	code := false
	for i, text := range strings.Split(s, "\n") {
		if strings.HasPrefix(strings.TrimSpace(text), "```") {
			code = !code
			continue
		}
		if !code {
			lines = append(lines, proseLine{i + 1, inlineCode.ReplaceAllString(text, "")})
		}
	}
	return lines
}

// goProse returns the comments of a Go file and, unless it is a test, its string
// literals that have more than one word.
func goProse(path string, src []byte) (lines []proseLine, err error) {
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, path, src, parser.ParseComments)
	if err != nil {
		return nil, err
	}
	for _, group := range file.Comments {
		for _, c := range group.List {
			from := fset.Position(c.Pos()).Line
			for i, text := range strings.Split(c.Text, "\n") {
				lines = append(lines, proseLine{from + i, text})
			}
		}
	}
	if strings.HasSuffix(path, "_test.go") {
		return lines, nil
	}
	ast.Inspect(file, func(n ast.Node) bool {
		if lit, ok := n.(*ast.BasicLit); ok && lit.Kind == token.STRING {
			if text, err := strconv.Unquote(lit.Value); err == nil && strings.Contains(text, " ") {
				lines = append(lines, proseLine{fset.Position(lit.Pos()).Line, text})
			}
		}
		return true
	})
	return lines, nil
}

// The word list finds what it is there to find.
func TestProseRules(t *testing.T) {
	for _, tc := range []struct {
		text string
		ok   bool
	}{
		{"the LUN is opened anew", false},
		{"the store, which is waited for for a time", false},
		{"%q is no number", false},
		{"Ready tells whether it serves.", false},
		{"4 octets of padding", false},
		{"the target waits 20 s", true},
		{"a number of bytes", true},
	} {
		if why := avoidedIn(tc.text, false); (why == "") != tc.ok {
			t.Errorf("%q: %q, want ok: %v", tc.text, why, tc.ok)
		}
	}
	lines := markdownProse("one `anew`\n```\nanew\n```\nanew\n")
	if len(lines) != 3 || avoidedIn(lines[0].text, false) != "" || lines[1].number != 5 {
		t.Errorf("the prose of a document with code is %+v", lines)
	}
}
