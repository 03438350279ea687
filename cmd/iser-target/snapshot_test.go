package main

import (
	"path/filepath"
	"testing"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// lun snapshot and lun clone, where files can share blocks and where not, with their exit codes. LUN 0 is on memory.
func TestSnapshotCommands(t *testing.T) {
	disks := backendtest.ReflinkFS(t, "xfs")
	plain := backendtest.Mount(t, "none", "tmpfs", "size=16m")
	in := func(name string) string { return filepath.Join(disks, name) }
	s := newStation(t)
	s.ok(t, "lun", "create", storeName, "--id", "1", "--path", in("1.img"), "--size", "1MiB", "--block-size", "4096")
	s.ok(t, "lun", "create", storeName, "--id", "2", "--path", filepath.Join(plain, "2.img"), "--size", "1MiB")

	s.says(t, cli.ExitOK, "make snapshot one of LUN 1", "lun", "snapshot", "create", storeName, "1", "one", "--dry-run")
	s.says(t, cli.ExitOK, "REASON", "lun", "snapshot", "list")
	s.says(t, cli.ExitOK, in("1.img@one.snap"), "lun", "snapshot", "create", "1", "one")
	s.says(t, cli.ExitError, "exists, and was not overwritten", "lun", "snapshot", "create", "1", "one")
	list := read[[]schema.Snapshot](t, s, "lun", "snapshots", "ls", "store")
	if len(list) != 1 || list[0].Name != "one" || list[0].LUN != 1 || list[0].Target != storeName || list[0].Size != 1<<20 || list[0].Created.IsZero() {
		t.Errorf("snapshots %+v", list)
	}
	s.says(t, cli.ExitRefused, "require the backend file, not memory", "lun", "snapshot", "create", storeName, "0", "one")
	for _, args := range [][]string{
		{"lun", "snapshot", "create", "2", "one"}, {"lun", "snapshot", "create", "2", "one", "--dry-run"},
		{"lun", "clone", "2", "--path", filepath.Join(plain, "3.img")}, {"lun", "clone", "2", "--path", filepath.Join(plain, "3.img"), "--dry-run"},
	} {
		s.says(t, cli.ExitRefused, "cannot share blocks between files (reflink)", args...)
	}
	s.says(t, cli.ExitUsage, `begin with a letter or digit, not "a/b"`, "lun", "snapshot", "create", "1", "a/b")
	s.says(t, cli.ExitNotFound, "LUN 9", "lun", "snapshot", "create", "9", "one")

	s.says(t, cli.ExitOK, "add LUN 3 of "+storeName, "lun", "clone", "1@one", "--path", in("3.img"), "--dry-run")
	s.says(t, cli.ExitOK, "add LUN 3 of "+storeName+" (done)", "lun", "clone", "1@one", "--path", in("3.img"))
	s.says(t, cli.ExitOK, "add LUN 7 of "+storeName+" (done)", "lun", "clone", storeName, "1", "--path", in("7.img"), "--id", "7", "--read-only")
	for _, id := range []string{"3", "7"} {
		if l := read[schema.LUNState](t, s, "lun", "show", id); l.State != schema.Ready || l.Size != 1<<20 || l.BlockSize != 4096 || l.ReadOnly != (id == "7") {
			t.Errorf("clone %+v", l)
		}
	}
	s.says(t, cli.ExitRefused, "--copy", "lun", "clone", "1@one", "--path", filepath.Join(plain, "4.img"))
	s.says(t, cli.ExitOK, "add LUN 4 of "+storeName+" (done)", "lun", "clone", "1@one", "--path", filepath.Join(plain, "4.img"), "--copy")
	s.says(t, cli.ExitUsage, "--copy requires a snapshot", "lun", "clone", "1", "--path", in("5.img"), "--copy")
	s.says(t, cli.ExitUsage, "--path is required", "lun", "clone", "1")
	s.says(t, cli.ExitUsage, `LUN "x" is not a number`, "lun", "clone", storeName, "x@one", "--path", in("5.img"))
	s.says(t, cli.ExitNotFound, "snapshot two of LUN 1", "lun", "clone", "1@two", "--path", in("5.img"))
	s.says(t, cli.ExitError, "was not overwritten", "lun", "clone", "1@one", "--path", in("3.img"))

	s.says(t, cli.ExitOK, "delete snapshot one of LUN 1", "lun", "snapshot", "delete", "1", "one", "--dry-run")
	s.says(t, cli.ExitOK, "(done)", "lun", "snapshot", "delete", "1", "one")
	s.says(t, cli.ExitNotFound, "snapshot one of LUN 1", "lun", "snapshot", "delete", "1", "one")
}
