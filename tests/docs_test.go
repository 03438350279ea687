package tests

import (
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/iscsi/pdu"
)

var (
	mdLink    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	mdHeading = regexp.MustCompile(`(?m)^#+ +(.*)$`)
	mdFence   = regexp.MustCompile("(?ms)^```.*?^```")
	mdCode    = regexp.MustCompile("`[^`\n]*`")
	mdStyle   = regexp.MustCompile("[`*]|\\]\\([^)]*\\)|\\[")
	notAnchor = regexp.MustCompile(`[^\p{L}\p{N}_\- ]`)
)

// anchors returns those of the headings of a page, as GitHub makes them.
func anchors(page string) map[string]bool {
	found := map[string]bool{}
	for _, m := range mdHeading.FindAllStringSubmatch(mdFence.ReplaceAllString(page, ""), -1) {
		anchor := strings.ReplaceAll(notAnchor.ReplaceAllString(strings.ToLower(mdStyle.ReplaceAllString(m[1], "")), ""), " ", "-")
		for n, base := 1, anchor; found[anchor]; n++ {
			anchor = fmt.Sprintf("%s-%d", base, n)
		}
		found[anchor] = true
	}
	return found
}

// brokenLinks returns the links of the page at name that lead nowhere. read returns a file of the tree.
func brokenLinks(name, page string, read func(name string) (string, error)) (broken []string) {
	for _, m := range mdLink.FindAllStringSubmatch(mdCode.ReplaceAllString(mdFence.ReplaceAllString(page, ""), ""), -1) {
		if strings.Contains(m[1], "://") || strings.HasPrefix(m[1], "mailto:") {
			continue
		}
		file, anchor, _ := strings.Cut(m[1], "#")
		to, text := name, page
		if file != "" {
			to = path.Join(path.Dir(name), file)
			var err error
			if text, err = read(to); err != nil {
				broken = append(broken, m[1])
				continue
			}
		}
		if anchor != "" && strings.HasSuffix(to, ".md") && !anchors(text)[anchor] {
			broken = append(broken, m[1])
		}
	}
	return broken
}

// Links of the pages to files and headings of the tree lead somewhere.
func TestLinks(t *testing.T) {
	read := func(name string) (string, error) {
		name = filepath.Join("..", name)
		if fi, err := os.Stat(name); err != nil || fi.IsDir() {
			return "", err
		}
		b, err := os.ReadFile(name)
		return string(b), err
	}
	pages := 0
	walkTree(t, ".md", func(file, name string) error {
		b, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		pages++
		for _, link := range brokenLinks(filepath.ToSlash(name), string(b), read) {
			t.Errorf("%s: the link %s leads nowhere", name, link)
		}
		return nil
	})
	if pages < 30 {
		t.Errorf("%d pages", pages)
	}
}

func TestLinkRules(t *testing.T) {
	files := map[string]string{"docs/b.md": "# The `a.b` (list, required)\n## Two\n## Two\n```\n# no heading\n```\n", "c.go": ""}
	read := func(name string) (string, error) {
		if text, ok := files[name]; ok {
			return text, nil
		}
		return "", os.ErrNotExist
	}
	page := "[x](b.md) [x](b.md#the-ab-list-required) [x](b.md#two-1) [x](../c.go) [x](https://example.com/none) [x](#one) `[x](none)`\n# One\n" +
		"[x](none.md) [x](b.md#two-2) [x](b.md#no-heading) [x](#two)\n"
	if got := fmt.Sprint(brokenLinks("docs/a.md", page, read)); got != "[none.md b.md#two-2 b.md#no-heading #two]" {
		t.Error(got)
	}
}

// README.md, or a page that it leads to, links to each page of docs.
func TestEachPageIsLinked(t *testing.T) {
	reached := map[string]bool{}
	var visit func(name string)
	visit = func(name string) {
		if reached[name] {
			return
		}
		reached[name] = true
		b, err := os.ReadFile(filepath.Join("..", name))
		if err != nil || !strings.HasSuffix(name, ".md") {
			return
		}
		for _, m := range mdLink.FindAllStringSubmatch(string(b), -1) {
			if file, _, _ := strings.Cut(m[1], "#"); file != "" && !strings.Contains(file, "://") {
				visit(path.Join(path.Dir(name), file))
			}
		}
	}
	visit("README.md")
	walkTree(t, ".md", func(_, name string) error {
		if name = filepath.ToSlash(name); strings.HasPrefix(name, "docs/") && !reached[name] {
			t.Errorf("no page links to %s", name)
		}
		return nil
	})
}

// docs/troubleshooting.md has each status of a Login Response under its name.
func TestTroubleshootingHasEachStatus(t *testing.T) {
	b, err := os.ReadFile("../docs/troubleshooting.md")
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for s := range pdu.LoginStatus(0x0400) {
		name, known := strings.CutSuffix(s.String(), fmt.Sprintf(" (0x%04x)", uint16(s)))
		if !known || s == pdu.LoginSuccess {
			continue
		}
		found++
		if row := fmt.Sprintf("\n| %04x | %s |", uint16(s), name); !strings.Contains(string(b), row) {
			t.Errorf("no row %q", row)
		}
	}
	if found < 15 || found != strings.Count(string(b), "\n| 0") {
		t.Errorf("%d statuses, %d rows", found, strings.Count(string(b), "\n| 0"))
	}
}
