package tests

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the tests of each row to "+rowPage)

const (
	rowPage = "../docs/conformance-rdma.md"
	// rowHead begins the part of the page that the test writes.
	rowHead = "## The tests of each row\n"
)

// rowTables are the tables whose rows the page lists.
var rowTables = []string{"mpa.md", "mpa2.md", "ddp.md", "rdmap.md", "rpcrdma.md", "brpc.md"}

// quotingTests returns the tests that quote each id: package and function, or package and file where a table of cases has it.
func quotingTests(t *testing.T) map[string]map[string]bool {
	t.Helper()
	tests := map[string]map[string]bool{}
	walkTree(t, ".go", func(file, local string) error {
		dir := path.Dir(local)
		by := runBy[dir]
		if by == "" && !strings.HasSuffix(local, "_test.go") {
			return nil
		}
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		found := requirementID.FindAllStringIndex(string(text), -1)
		if len(found) == 0 {
			return nil
		}
		fset := token.NewFileSet()
		parsed, err := parser.ParseFile(fset, file, text, parser.ParseComments)
		if err != nil {
			return err
		}
		for _, at := range found {
			name := local
			if by != "" {
				name = path.Clean("tests/"+by) + ", cases in " + local
			}
			for _, d := range parsed.Decls {
				f, ok := d.(*ast.FuncDecl)
				if !ok || !strings.HasPrefix(f.Name.Name, "Test") && !strings.HasPrefix(f.Name.Name, "Fuzz") {
					continue
				}
				begin := f.Pos()
				if f.Doc != nil {
					begin = f.Doc.Pos()
				}
				if offset := fset.Position(begin).Offset; at[0] >= offset && at[0] < fset.Position(f.End()).Offset {
					name = dir + " " + f.Name.Name
				}
			}
			id := string(text[at[0]:at[1]])
			if tests[id] == nil {
				tests[id] = map[string]bool{}
			}
			tests[id][name] = true
		}
		return nil
	})
	return tests
}

// TestConformancePage checks that docs/conformance-rdma.md lists the tests that quote each row. With -update it writes them.
func TestConformancePage(t *testing.T) {
	b, err := os.ReadFile(rowPage)
	if err != nil {
		t.Fatal(err)
	}
	before, _, ok := strings.Cut(string(b), rowHead)
	if !ok {
		t.Fatalf("%s has no %q", rowPage, rowHead)
	}
	rows, _ := readRequirements(t)
	tests := quotingTests(t)
	var page strings.Builder
	page.WriteString(before + rowHead + "\n`make requirements` writes this list. A row without a test has its reason in its table.\n")
	for _, table := range rowTables {
		fmt.Fprintf(&page, "\n### [%s](requirements/%s)\n\n| row | tests |\n|---|---|\n", table, table)
		var ids []string
		for id, r := range rows {
			if r.table == table {
				ids = append(ids, id)
			}
		}
		if len(ids) < 50 {
			t.Errorf("%s has only %d rows", table, len(ids))
		}
		slices.Sort(ids)
		for _, id := range ids {
			list := "-"
			if of := tests[id]; len(of) > 0 {
				list = "`" + strings.Join(slices.Sorted(maps.Keys(of)), "`, `") + "`"
			}
			fmt.Fprintf(&page, "| %s | %s |\n", id, list)
		}
	}
	if page.String() == string(b) {
		return
	}
	if !*update {
		t.Fatalf("%s is not of these tests: run make requirements", rowPage)
	}
	if err := os.WriteFile(rowPage, []byte(page.String()), 0o644); err != nil {
		t.Fatal(err)
	}
}
