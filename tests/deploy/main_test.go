package deploy

import (
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
)

// built is the directory of what the tests build, for all of them.
var built string

func TestMain(m *testing.M) {
	os.Exit(func() int {
		var err error
		if built, err = os.MkdirTemp("", "deploy"); err != nil {
			panic(err)
		}
		defer os.RemoveAll(built)
		return m.Run()
	}())
}

var build = sync.OnceValues(func() (string, error) {
	path := filepath.Join(built, "iser-target")
	out, err := exec.Command("go", "build", "-o", path, "../../cmd/iser-target").CombinedOutput()
	return string(out), err
})

// program returns the path of the program.
func program(t *testing.T) string {
	t.Helper()
	if out, err := build(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return filepath.Join(built, "iser-target")
}
