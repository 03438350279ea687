package tests

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// walkTree calls f for each file of the repository whose name ends in suffix, with its path from the
// top. It leaves out testdata and directories whose names begin with a dot.
func walkTree(t *testing.T, suffix string, f func(file, local string) error) {
	t.Helper()
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != ".." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata"):
			return fs.SkipDir
		case d.IsDir() || !strings.HasSuffix(path, suffix):
			return nil
		}
		return f(path, filepath.ToSlash(strings.TrimPrefix(path, "../")))
	})
	if err != nil {
		t.Fatal(err)
	}
}

// testkit.Bubble says why.
func TestNoTestMakesABubbleItself(t *testing.T) {
	walkTree(t, ".go", func(file, local string) error {
		b, err := os.ReadFile(file)
		if local != "tests/testkit/bubble.go" && strings.Contains(string(b), "synctest."+"Test(") {
			t.Errorf("%s calls synctest.Test, want testkit.Bubble", local)
		}
		return err
	})
}
