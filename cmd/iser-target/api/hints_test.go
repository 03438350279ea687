package api

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

// TestHints: what the system does not let the target do has a hint of its own, also where
// the configuration file is what it is about.
func TestHints(t *testing.T) {
	dir := t.TempDir()
	_, missing := config.ReadFile(dir + "/none.yaml")
	for _, tc := range []struct {
		err  error
		code schema.Code
		hint string
	}{
		{&os.PathError{Op: "open", Path: "/x/y", Err: unix.ENOENT}, schema.Failed, "has to be there"},
		{&os.PathError{Op: "open", Path: "/x/y", Err: unix.EACCES}, schema.Failed, "has to be allowed"},
		{fmt.Errorf("f: %w", &os.PathError{Op: "mkdir", Path: "/x/y", Err: unix.EROFS}), schema.Failed, "has to be allowed"},
		{fmt.Errorf("f: %w", unix.ENOSPC), schema.Failed, "make room"},
		{&os.PathError{Op: "open", Path: "/x/y", Err: unix.EEXIST}, schema.Exists, "give another path"},
		{missing, schema.Invalid, "nothing has changed"},
		{errors.New("what nobody has thought of"), schema.Failed, ""},
	} {
		if e := errorOf(tc.err); e.Code != tc.code || !strings.Contains(e.Hint, tc.hint) || tc.hint == "" && e.Hint != "" {
			t.Errorf("%v: code %s, hint %q; want %s, %q", tc.err, e.Code, e.Hint, tc.code, tc.hint)
		}
	}
}
