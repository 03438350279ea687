package tests

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestThreatsNameTests: each test that docs/security.md names exists, and each threat names one.
func TestThreatsNameTests(t *testing.T) {
	doc, err := os.ReadFile(filepath.Join("..", "docs", "security.md"))
	if err != nil {
		t.Fatal(err)
	}
	exists := map[string]bool{}
	function := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)\(`)
	walkTree(t, "_test.go", func(path, _ string) error {
		b, err := os.ReadFile(path)
		for _, m := range function.FindAllStringSubmatch(string(b), -1) {
			exists[m[1]] = true
		}
		return err
	})
	name := regexp.MustCompile("`((?:Test|Fuzz)\\w+)`")
	threats := 0
	for _, section := range strings.Split(string(doc), "\n## ") {
		if !strings.Contains(section, "| test |") {
			continue
		}
		for line := range strings.Lines(section) {
			if !strings.HasPrefix(line, "| ") || strings.HasPrefix(line, "| threat |") {
				continue
			}
			threats++
			found := name.FindAllStringSubmatch(line, -1)
			if len(found) == 0 {
				t.Errorf("no test against: %s", line)
			}
			for _, m := range found {
				if !exists[m[1]] {
					t.Errorf("docs/security.md names %s, which does not exist", m[1])
				}
			}
		}
	}
	if threats < 20 {
		t.Errorf("docs/security.md has %d threats", threats)
	}
}
