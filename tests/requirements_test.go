package tests

import (
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// requirement is a row of a table in docs/requirements.
type requirement struct {
	table, id string
	reason    string // why no test quotes the row; "" if one has to
	test      string // a test that quotes the row, or ""
}

var requirementID = regexp.MustCompile(`\b(?:(?:MPA2?|DDP|RDMAP|ISER|ISCSI|SEC|RPCRDMA|BRPC)-[0-9A-Z][0-9A-Z.]*|V-[A-Z0-9]+)-[0-9]+\b`)

// runBy contains the packages with tables of cases that tests share with the program, and the test file that runs them all.
var runBy = map[string]string{
	"iscsi/vectors":     "../iscsi/login_test.go",
	"iser/vectors":      "../tests/control_test.go",
	"rdma/wire/vectors": "../rdma/terminate_test.go",
}

// readRequirements parses the tables of docs/requirements, by id, and notes which rows
// the Go files quote. Each fault that it finds on the way is a line of faults.
func readRequirements(t *testing.T) (rows map[string]*requirement, faults []string) {
	t.Helper()
	rows = map[string]*requirement{}
	err := filepath.WalkDir("../docs/requirements", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".md") || filepath.Base(path) == "README.md" {
			return err
		}
		text, err := os.ReadFile(path)
		for line := range strings.Lines(string(text)) {
			cells := strings.Split(line, "|")
			if len(cells) < 2 || !requirementID.MatchString(cells[1]) {
				continue // not a row
			}
			switch id := strings.TrimSpace(cells[1]); {
			case len(cells) != 7:
				faults = append(faults, fmt.Sprintf("%s: the row of %s has no five columns", path, id))
			case rows[id] != nil:
				faults = append(faults, fmt.Sprintf("%s: %s is defined twice", path, id))
			default:
				rows[id] = &requirement{table: filepath.Base(path), id: id, reason: strings.TrimSpace(cells[5])}
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	walkTree(t, ".go", func(path, name string) error {
		text, err := os.ReadFile(path)
		dir := filepath.ToSlash(filepath.Dir(name))
		for _, id := range requirementID.FindAllString(string(text), -1) {
			switch r := rows[id]; {
			case r == nil:
				faults = append(faults, fmt.Sprintf("%s: %s is not defined in docs/requirements", path, id))
			case strings.HasSuffix(path, "_test.go"):
				r.test = path
			case runBy[dir] != "":
				r.test = runBy[dir]
			}
		}
		return err
	})
	return rows, faults
}

// TestRequirements checks that docs/requirements defines each id that the code quotes,
// and that each row has either a test that quotes it or a reason why none does.
func TestRequirements(t *testing.T) {
	rows, faults := readRequirements(t)
	for _, r := range rows {
		switch {
		case r.test == "" && r.reason == "":
			faults = append(faults, fmt.Sprintf("%s: no test quotes %s, and its last column gives no reason", r.table,
				r.id))
		case r.test != "" && r.reason != "":
			faults = append(faults, fmt.Sprintf("%s: %s quotes %s, so its last column has to be empty", r.table,
				r.test, r.id))
		}
	}
	slices.Sort(faults)
	for _, fault := range faults {
		t.Error(fault)
	}
}

// TestRequirementCoverage prints the table of `make requirements` under -v.
func TestRequirementCoverage(t *testing.T) {
	if !testing.Verbose() {
		t.Skip("without -v there is nothing to print")
	}
	rows, _ := readRequirements(t)
	total, quoted, reasons := map[string]int{}, map[string]int{}, map[string]int{}
	for _, r := range rows {
		for _, table := range []string{r.table, "total"} {
			total[table]++
			if r.test != "" {
				quoted[table]++
			}
			if r.reason != "" {
				reasons[table]++
			}
		}
	}
	fmt.Printf("%-12s %6s %7s %12s %8s\n", "table", "rows", "quoted", "with reason", "percent")
	for _, table := range slices.Sorted(maps.Keys(total)) {
		fmt.Printf("%-12s %6d %7d %12d %7d%%\n", table, total[table], quoted[table], reasons[table],
			quoted[table]*100/total[table])
	}
}
