package tests

import (
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestEventKinds: the table in docs/cli.md has the events that there are.
func TestEventKinds(t *testing.T) {
	attr := regexp.MustCompile(`(?:(?:eventKey|"event"), |Kind\(\) string { return )"(\w+)"`)
	emitted := map[string]bool{}
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
			return err
		}
		b, err := os.ReadFile(path)
		for _, m := range attr.FindAllSubmatch(b, -1) {
			emitted[string(m[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	doc, err := os.ReadFile("../docs/cli.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, ok := strings.Cut(string(doc), "\n## Events\n")
	section, _, _ = strings.Cut(section, "\n## ")
	if !ok {
		t.Fatal("docs/cli.md: no section Events")
	}
	documented := map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^\\| `(\\w+)` \\|").FindAllStringSubmatch(section, -1) {
		documented[m[1]] = true
	}
	if len(emitted) == 0 || !maps.Equal(emitted, documented) {
		t.Errorf("events are of kinds %v; docs/cli.md has %v", slices.Sorted(maps.Keys(emitted)),
			slices.Sorted(maps.Keys(documented)))
	}
}
