package main

import (
	"testing"

	"github.com/iser-target/iser-target/cmd/iser-target/cli"
)

// A target has its full name, its alias, and the ends of its name that no other target has. One that is alone needs no name.
func TestTargetsHaveShortNames(t *testing.T) {
	s := newStation(t)
	for _, args := range [][]string{
		{"lun", "show", "0"}, {"lun", "show", "store", "0"}, {"luns", "show", "STORE", "0"}, {"lun", "show", "example:store", "0"},
	} {
		s.says(t, cli.ExitOK, storeName, args...)
	}
	s.says(t, cli.ExitOK, storeName, "target", "show")
	s.says(t, cli.ExitOK, "set alias", "target", "set", "alias=vault")
	s.says(t, cli.ExitOK, storeName, "lun", "show", "vault", "0")
	s.says(t, cli.ExitOK, "add LUN", "lun", "create", "--backend", "memory", "--size", "1.5M")
	s.says(t, cli.ExitOK, "1572864 bytes", "lun", "show", "1")
	s.says(t, cli.ExitOK, `"*:more"`, "initiator", "allow", "*:more")
	s.says(t, cli.ExitOK, "initiators", "explain", "--initiator", hostName, "--target", "vault")

	// Nobody deletes a target that has no name in the command.
	s.says(t, cli.ExitUsage, "wrong number of arguments", "target", "delete")

	s.ok(t, "target", "create", secondName, "--initiator", hostName)
	s.says(t, cli.ExitUsage, "name the target: there are 2 ("+storeName+", "+secondName+")", "lun", "show", "0")
	s.says(t, cli.ExitOK, storeName, "lun", "show", "store", "0") // the other one ends in store2
	s.says(t, cli.ExitOK, secondName, "target", "show", "2")
	s.ok(t, "target", "create", storeName+"-2", "--initiator", hostName)
	s.says(t, cli.ExitError, "2 may be 2 targets: "+secondName+", "+storeName+"-2", "target", "show", "2")
	s.says(t, cli.ExitOK, "remove target "+secondName, "target", "rm", "store2")
}

// What does not exist is answered with what may be meant.
func TestNotFoundSuggests(t *testing.T) {
	s := newStation(t)
	s.says(t, cli.ExitNotFound, "not found; did you mean "+storeName+"?", "lun", "show", "stroe", "0")
	s.says(t, cli.ExitNotFound, "not found; did you mean "+storeName+"?", "lun", "show", storeName[:len(storeName)-1], "0")
	s.says(t, cli.ExitNotFound, "See iser-target target list.", "lun", "show", "elsewhere", "0")
	s.says(t, cli.ExitNotFound, "See iser-target lun list.", "lun", "show", "99")
	s.says(t, cli.ExitNotFound, "See iser-target session list.", "session", "show", "99")
	s.says(t, cli.ExitUsage, "did you mean delete?", "lun", "delte", "store", "0")
	s.says(t, cli.ExitUsage, "did you mean list", "portal", "lst")
}

// A portal without a port has that of iSCSI, and LUNs can grow by a difference.
func TestDefaultsOfArguments(t *testing.T) {
	s := newStation(t)
	s.says(t, cli.ExitOK, "add portal 127.0.0.7:3260", "portal", "add", "127.0.0.7", "--dry-run")
	s.says(t, cli.ExitOK, "add portal [::1]:3260", "portal", "add", "::1", "--dry-run")
	s.says(t, cli.ExitOK, "add portal [::1]:3260", "portal", "create", "[::1]", "--dry-run")
	s.says(t, cli.ExitError, `"host" is not`, "portal", "add", "host", "--dry-run")
	s.ok(t, "lun", "create", "--id", "9", "--path", "nine.img", "--size", "1M")
	s.says(t, cli.ExitOK, "1MiB -> 3MiB", "lun", "resize", "9", "+2M")
	s.says(t, cli.ExitOK, "3MiB -> 3584KiB", "lun", "resize", "store", "9", "+0.5m")
	s.says(t, cli.ExitError, "is not a size", "lun", "resize", "9", "+")
	s.says(t, cli.ExitNotFound, "LUN 8", "lun", "resize", "8", "+1M")
}
