package tests

import (
	"go/ast"
	"go/parser"
	"go/token"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestComments holds the rules for doc comments of CONTRIBUTING.md: every
// exported name outside of tests has one, it begins with the name, and in that of
// a function a verb follows that says what the function does.
func TestComments(t *testing.T) {
	walkTree(t, ".go", func(path, _ string) error {
		fset := token.NewFileSet()
		file, err := parser.ParseFile(fset, path, nil, parser.ParseComments)
		if err != nil {
			return err
		}
		for _, c := range commentFaults(file, strings.HasSuffix(path, "_test.go")) {
			t.Errorf("%s: %s", strings.TrimPrefix(fset.Position(c.pos).String(), "../"), c.text)
		}
		return nil
	})
}

type commentFault struct {
	pos  token.Pos
	text string
}

// commentFaults returns the doc comments of a file that break the rules. In a
// test file exported names need no comment.
func commentFaults(file *ast.File, test bool) (faults []commentFault) {
	check := func(name *ast.Ident, doc *ast.CommentGroup, function bool) {
		text := doc.Text()
		switch {
		case text == "" && (test || !name.IsExported()):
		case text == "":
			faults = append(faults, commentFault{name.Pos(), name.Name + " is exported and has no comment"})
		default:
			if why := commentFaultOf(name.Name, text, function); why != "" {
				faults = append(faults, commentFault{doc.Pos(), why})
			}
		}
	}
	for _, decl := range file.Decls {
		switch decl := decl.(type) {
		case *ast.FuncDecl:
			// go doc shows neither a method of a hidden type nor a test.
			hidden := decl.Recv != nil && !ast.IsExported(receiver(decl)) || isTest.MatchString(decl.Name.Name)
			if decl.Doc != nil && !isTest.MatchString(decl.Name.Name) || !hidden {
				check(decl.Name, decl.Doc, true)
			}
		case *ast.GenDecl:
			for _, spec := range decl.Specs {
				switch spec := spec.(type) {
				case *ast.TypeSpec:
					doc := spec.Doc
					if doc == nil && !decl.Lparen.IsValid() {
						doc = decl.Doc
					}
					check(spec.Name, doc, false)
				case *ast.ValueSpec:
					// A group of constants has one comment, which need not name each.
					if decl.Doc == nil && spec.Doc == nil && spec.Comment == nil && spec.Names[0].IsExported() &&
						!test {
						faults = append(faults,
							commentFault{spec.Pos(), spec.Names[0].Name + " is exported and has no comment"})
					}
				}
			}
		}
	}
	return faults
}

// isTest matches the functions that the testing package calls.
var isTest = regexp.MustCompile(`^(Test|Fuzz|Benchmark|Example)([^a-z]|$)`)

// receiver returns the name of the type that a method belongs to.
func receiver(decl *ast.FuncDecl) string {
	t := decl.Recv.List[0].Type
	for {
		switch x := t.(type) {
		case *ast.StarExpr:
			t = x.X
		case *ast.IndexExpr:
			t = x.X
		case *ast.IndexListExpr:
			t = x.X
		case *ast.Ident:
			return x.Name
		}
	}
}

// noVerb matches second words that define the function instead of saying what it
// does, and words that CONTRIBUTING.md replaces by others.
var noVerb = regexp.MustCompile(`^(is|are|was|were|be|has|have|had|tells|says|but|for|of|in|on|and|as|what|who|whose|which|where|when|the|a|an)$`)

// commentFaultOf returns what is wrong with the doc comment of name, or "".
func commentFaultOf(name, text string, function bool) string {
	words := strings.Fields(text)
	if !function && len(words) > 1 && slices.Contains([]string{"A", "An", "The"}, words[0]) {
		words = words[1:]
	}
	if first := strings.TrimRight(words[0], ",:;."); first != name {
		return "the comment of " + name + " begins with " + words[0] + ", not with the name"
	}
	if !function {
		return ""
	}
	if len(words) < 2 || noVerb.MatchString(words[1]) {
		return "the comment of " + name + " does not go on with what it does: " +
			strings.Join(words[:min(len(words), 8)], " ")
	}
	return ""
}

// The rules refuse what they are there to refuse.
func TestCommentRules(t *testing.T) {
	for _, tc := range []struct {
		name, text string
		function   bool
		ok         bool
	}{
		{"Close", "Close ends the connection.", true, true},
		{"Close", "Close is the end of the connection.", true, false},
		{"Close", "closes the connection.", true, false},
		{"Close", "Close", true, false},
		{"Targets", "Targets are all.", true, false},
		{"Ready", "Ready reports whether the target serves.", true, true},
		{"Ready", "Ready tells whether the target serves.", true, false},
		{"Task", "A Task is one request.", false, true},
		{"Task", "Task is one request.", false, true},
		{"Task", "One request.", false, false},
	} {
		if why := commentFaultOf(tc.name, tc.text, tc.function); (why == "") != tc.ok {
			t.Errorf("%q of %s: %q, want ok: %v", tc.text, tc.name, why, tc.ok)
		}
	}
}
