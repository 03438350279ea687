package api

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/cmd/iser-target/daemon"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

// Errors of the operating system have hints of their own, also about the configuration file.
func TestErrorsOfTheSystemHaveHints(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(dir+"/file", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	_, missing := config.ReadFile(dir + "/none.yaml")
	doc, err := config.NewDocument("c.yaml", []byte("targets: []\n"))
	if err != nil {
		t.Fatal(err)
	}
	unsaved := doc.SaveAs(dir + "/file/c.yaml") // ENOTDIR stands for EIO: root meets no other error here
	for _, tc := range []struct {
		err  error
		code schema.Code
		hint string
	}{
		{&os.PathError{Op: "open", Path: "/x/y", Err: unix.ENOENT}, schema.Failed, "must exist"},
		{&os.PathError{Op: "open", Path: "/x/y", Err: unix.EACCES}, schema.Failed, "needs the permission"},
		{fmt.Errorf("f: %w", &os.PathError{Op: "mkdir", Path: "/x/y", Err: unix.EROFS}), schema.Failed, "needs the permission"},
		{fmt.Errorf("f: %w", unix.ENOSPC), schema.Failed, "free space"},
		{&os.PathError{Op: "open", Path: "/x/y", Err: unix.EEXIST}, schema.Exists, "choose another path"},
		{missing, schema.Invalid, "nothing was changed"},
		{unsaved, schema.Failed, "file system and the device of " + dir},
		{fmt.Errorf("reservations /x: %w", daemon.ErrStateStuck), schema.Failed, "state_dir"},
		{errors.New("an unknown error"), schema.Failed, ""},
	} {
		if e := errorOf(tc.err); e.Code != tc.code || !strings.Contains(e.Hint, tc.hint) || tc.hint == "" && e.Hint != "" {
			t.Errorf("%v: code %s, hint %q; want %s, %q", tc.err, e.Code, e.Hint, tc.code, tc.hint)
		}
	}
}
