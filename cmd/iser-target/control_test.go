package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/security/limits"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
)

const secondName = storeName + "2"

// target create and target list.
func TestTargetCommands(t *testing.T) {
	s := newStation(t)
	s.says(t, cli.ExitUsage, "--initiator is required", "target", "create", secondName)
	s.says(t, cli.ExitOK, "add target "+secondName+" (done)", "target", "create", secondName, "--initiator", hostName, "--alias", "second")
	s.says(t, cli.ExitError, "already", "target", "create", secondName, "--initiator", "*")
	s.says(t, cli.ExitError, "name", "target", "create", "no name", "--initiator", "*")
	list := read[[]schema.TargetState](t, s, "target", "list")
	if len(list) != 2 || list[1].Name != secondName || list[1].Alias != "second" || !slices.Equal(list[1].Initiators, []string{hostName}) {
		t.Errorf("targets %+v", list)
	}
	s.says(t, cli.ExitOK, "SESSIONS", "target", "list")
	s.says(t, cli.ExitOK, "name: "+secondName, "target", "list", "-o", "yaml")
}

// target show says everything that target set can set.
func TestTargetShowHasAllKeys(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("0123456789abcdef0123456789abcdef"), 0o600); err != nil {
		t.Fatal(err)
	}
	keys := map[string]struct{ set, shows string }{
		"alias":                        {"alias=vault", "vault"},
		"initiators":                   {`initiators=["*:vault-host"]`, "*:vault-host"},
		"networks":                     {`networks=["192.0.2.0/24"]`, "192.0.2.0/24"},
		"resets_for":                   {`resets_for=["*:vault-master"]`, "*:vault-master"},
		"auth":                         {"auth={method: chap, algorithms: [sha256], users: [{name: vault-user, initiator: \"*:a\", secret_file: " + secret + "}]}", "*:a as vault-user"},
		"redirect":                     {`redirect={to: "192.0.2.9:3260", permanent: true}`, "192.0.2.9:3260 (permanent)"},
		"ipsec":                        {"ipsec=audit", "audit"},
		"ipsec_profile":                {"ipsec_profile=vault-profile", "vault-profile"},
		"portal_groups":                {"portal_groups=[1]", "portal groups"},
		"initial_r2t":                  {"initial_r2t=false", "No"},
		"first_burst_length":           {"first_burst_length=4KiB", "4KiB"},
		"max_burst_length":             {"max_burst_length=128KiB", "128KiB"},
		"max_outstanding_r2t":          {"max_outstanding_r2t=3", "MaxOutstandingR2T"},
		"max_recv_data_segment_length": {"max_recv_data_segment_length=16KiB", "16KiB"},
	}
	target := reflect.TypeFor[config.Target]()
	for i := range target.NumField() {
		key := target.Field(i).Tag.Get("key")
		if _, ok := keys[key]; !ok && key != "name" && key != "luns" {
			t.Errorf("no test of %s", key)
		}
	}
	for key, c := range keys {
		t.Run(key, func(t *testing.T) {
			s := newStation(t, func(text string) string { return text + "\nipsec: {profiles: [{name: vault-profile}]}\n" })
			set := []string{"target", "set", storeName, c.set}
			if key == "ipsec_profile" {
				set = append(set, "ipsec=audit")
			}
			s.says(t, cli.ExitOK, "(done)", set...)
			s.says(t, cli.ExitOK, c.shows, "target", "show", storeName)
		})
	}
}

// target delete keeps the files of LUNs.
func TestTargetDeleteKeepsFiles(t *testing.T) {
	s := newStation(t)
	s.ok(t, "target", "create", secondName, "--initiator", hostName, "--alias", "second")
	s.ok(t, "lun", "create", secondName, "--path", "b.img", "--size", "1MiB")
	s.says(t, cli.ExitOK, "remove target "+secondName, "target", "delete", secondName)
	s.says(t, cli.ExitNotFound, secondName, "target", "delete", secondName)
	if _, err := os.Stat(filepath.Join(s.dir, "b.img")); err != nil {
		t.Errorf("the file went with its LUN: %v", err)
	}
}

// lun create chooses the first free number, and creates the file.
func TestLUNCreate(t *testing.T) {
	s := newStation(t)
	s.ok(t, "target", "create", secondName, "--initiator", hostName, "--alias", "second")
	image := filepath.Join(s.dir, "b.img")
	s.says(t, cli.ExitNotFound, "target list", "lun", "create", "iqn.2026-11.io.example:none", "--backend", "memory", "--size", "1MiB")
	s.says(t, cli.ExitUsage, "--size: ", "lun", "create", secondName, "--path", image, "--size", "some")
	s.says(t, cli.ExitOK, "add LUN 0 of "+secondName+" (done)", "lun", "create", secondName, "--path", "b.img", "--size", "1MiB")
	s.says(t, cli.ExitOK, "add LUN 7", "lun", "create", secondName, "--id", "7", "--backend", "memory", "--size", "1MiB", "--dry-run")
	s.says(t, cli.ExitOK, "add LUN 1", "lun", "create", secondName, "--backend", "memory", "--size", "1MiB")
	if fi, err := os.Stat(image); err != nil || fi.Size() != 1<<20 {
		t.Errorf("the file: %v, %v", fi, err)
	}
	s.says(t, cli.ExitOK, "remove LUN 1", "lun", "delete", secondName, "1")
	s.says(t, cli.ExitNotFound, "LUN", "lun", "delete", secondName, "1")
}

// lun resize and lun set change a LUN, and refuse wrong values.
func TestLUNResizeAndSet(t *testing.T) {
	s := newStation(t)
	s.ok(t, "target", "create", secondName, "--initiator", hostName, "--alias", "second")
	s.ok(t, "lun", "create", secondName, "--path", "b.img", "--size", "1MiB")
	image := filepath.Join(s.dir, "b.img")
	s.says(t, cli.ExitOK, "1MiB -> 2MiB (done)", "lun", "resize", secondName, "0", "2MiB")
	s.says(t, cli.ExitRefused, "--allow-shrink", "lun", "resize", secondName, "0", "1MiB")
	if l := read[schema.LUNState](t, s, "lun", "show", secondName, "0"); l.Size != 2<<20 || l.State != schema.Ready || l.Path != image {
		t.Errorf("LUN %+v", l)
	}
	s.says(t, cli.ExitOK, "(done)", "lun", "resize", secondName, "0", "1MiB", "--allow-shrink")
	s.says(t, cli.ExitOK, "(done)", "lun", "set", secondName, "0", "read_only=true", "initiators=["+hostName+"]")
	s.says(t, cli.ExitUsage, "KEY=VALUE", "lun", "set", secondName, "0", "read_only")
	s.says(t, cli.ExitUsage, "reed_only: unknown key, did you mean read_only?", "lun", "set", secondName, "0", "reed_only=true")
	if l := read[schema.LUNState](t, s, "lun", "show", secondName, "0"); l.Size != 1<<20 || !l.ReadOnly || !slices.Equal(l.Initiators, []string{hostName}) {
		t.Errorf("LUN %+v", l)
	}
}

// lun create and lun set give a LUN rates, and lun show shows them.
func TestLUNRates(t *testing.T) {
	s := newStation(t)
	s.ok(t, "lun", "create", storeName, "--backend", "memory", "--size", "1MiB", "--iops", "5000", "--bandwidth", "100MiB", "--min-iops", "10")
	rates := func() schema.RateState { return read[schema.LUNState](t, s, "lun", "show", storeName, "1").RateState }
	if got := rates(); got != (schema.RateState{IOPS: 5000, Bandwidth: 100 << 20, MinIOPS: 10}) {
		t.Errorf("created with %+v", got)
	}
	s.says(t, cli.ExitOK, "set burst of LUN 1 of "+storeName+": 0s -> 2s (done)", "lun", "set", storeName, "1", "--iops", "none", "--burst", "2s", "min_iops=0",
		"rates=[{initiators: [\"*:backup\"], iops: 500}]")
	if got := rates(); got != (schema.RateState{Bandwidth: 100 << 20, Burst: 2}) {
		t.Errorf("changed to %+v", got)
	}
	s.says(t, cli.ExitOK, "at most 100MiB/s, burst 2s\n", "lun", "show", storeName, "1")
	s.says(t, cli.ExitOK, "*:backup: at most 500 commands/s\n", "lun", "show", storeName, "1")
	if text := s.text(t); !strings.Contains(text, "bandwidth: 100MiB, ") || !strings.Contains(text, "burst: 2s, ") || strings.Contains(text, " iops: 5000") {
		t.Errorf("the file:\n%s", text)
	}
	s.says(t, cli.ExitUsage, "nothing to set", "lun", "set", storeName, "1")
	s.says(t, cli.ExitUsage, "exclude each other", "lun", "set", storeName, "1", "--iops", "1", "iops=2")
	s.says(t, cli.ExitUsage, "--iops must be a whole number", "lun", "create", storeName, "--backend", "memory", "--size", "1MiB", "--iops", "many")
	s.says(t, cli.ExitUsage, "--min-iops must be at most iops, 5, not 6", "lun", "set", storeName, "1", "--iops", "5", "--min-iops", "6")
	s.says(t, cli.ExitUsage, "--bandwidth: \"fast\" is not a size", "lun", "set", storeName, "1", "--bandwidth", "fast")
}

// lun list and lun show.
func TestLUNListAndShow(t *testing.T) {
	s := newStation(t)
	s.ok(t, "target", "create", secondName, "--initiator", hostName, "--alias", "second")
	s.ok(t, "lun", "create", secondName, "--path", "b.img", "--size", "1MiB")
	if n := len(read[[]schema.LUNState](t, s, "lun", "list")); n != 2 {
		t.Errorf("LUNs of all: %d, want 2", n)
	}
	if n := len(read[[]schema.LUNState](t, s, "lun", "list", secondName)); n != 1 {
		t.Errorf("LUNs of %s: %d, want 1", secondName, n)
	}
	s.says(t, cli.ExitOK, "block size", "lun", "show", secondName, "0")
	s.says(t, cli.ExitOK, "naa."+read[schema.LUNState](t, s, "lun", "show", secondName, "0").NAA, "lun", "show", secondName, "0")
	s.says(t, cli.ExitUsage, "not a number", "lun", "show", secondName, "x")
	s.says(t, cli.ExitNotFound, "LUN 9", "lun", "show", secondName, "9")
}

// initiator allow and initiator deny.
func TestInitiatorCommands(t *testing.T) {
	s := newStation(t)
	s.ok(t, "target", "create", secondName, "--initiator", hostName, "--alias", "second")
	s.says(t, cli.ExitOK, "(done)", "initiator", "allow", secondName, "iqn.2026-11.io.example:more.*")
	s.says(t, cli.ExitOK, "nothing to do", "initiator", "allow", secondName, "iqn.2026-11.io.example:more.*")
	s.says(t, cli.ExitOK, "(done)", "initiator", "deny", secondName, "iqn.2026-11.io.example:more.*")
	s.says(t, cli.ExitNotFound, "more", "initiator", "deny", secondName, "iqn.2026-11.io.example:more.*")
	s.says(t, cli.ExitError, "allow another one first, or delete the target", "initiator", "deny", secondName, hostName)
	s.says(t, cli.ExitNotFound, "not found; did you mean "+secondName, "initiator", "deny", secondName+"2", hostName)
}

// explain names the rule that refuses an initiator, and the remedy.
func TestExplain(t *testing.T) {
	s := newStation(t)
	s.ok(t, "target", "create", secondName, "--initiator", hostName, "--alias", "second")
	s.ok(t, "lun", "create", secondName, "--path", "b.img", "--size", "1MiB")
	s.ok(t, "lun", "set", secondName, "0", "read_only=true")
	s.says(t, cli.ExitOK, "admitted", "explain", "--initiator", hostName, "--target", secondName)
	s.says(t, cli.ExitError, "no pattern of the target matches", "explain", "--initiator", hostName+"2", "--target", secondName)
	s.says(t, cli.ExitError, "allow it with iser-target initiator allow "+secondName+" "+hostName+"2", "explain", "--initiator", hostName+"2", "--target", secondName)
	s.says(t, cli.ExitError, "iser-target target list", "explain", "--initiator", hostName, "--target", secondName+"2")
	s.says(t, cli.ExitUsage, "required", "explain", "--target", secondName)
	if e := read[schema.Explanation](t, s, "explain", "--initiator", hostName, "--target", secondName); !e.Admitted || len(e.LUNs) != 1 || e.LUNs[0].Access != "read only" {
		t.Errorf("explanation %+v", e)
	}
}

// limits shows each limit of the Set in its order, and limits set changes them and the file.
func TestLimitsCommands(t *testing.T) {
	s := newStation(t)
	want := limits.New().State()
	got := read[[]schema.LimitState](t, s, "limits")
	lines := strings.Split(s.ok(t, "limits"), "\n")
	if len(got) != len(want) || !regexp.MustCompile(`^LIMIT +PER +MAX +USED +% +REACHED +LAST +BY$`).MatchString(lines[0]) {
		t.Fatalf("%d limits, want %d; head %q", len(got), len(want), lines[0])
	}
	for i, w := range want {
		if got[i].Name != w.Name || got[i].Per != string(w.Scope) || !strings.HasPrefix(lines[i+1], w.Name+" ") {
			t.Errorf("limit %d: %+v, line %q, want %s", i, got[i], lines[i+1], w.Name)
		}
	}
	s.says(t, cli.ExitOK, "max_connections=", "__complete", "limits", "set", "")
	byDefault := fmt.Sprint(got[0].Max)
	s.says(t, cli.ExitOK, "set max_connections of limits: "+byDefault+" -> 2", "limits", "set", "max_connections=2", "--dry-run")
	s.says(t, cli.ExitOK, "(done)", "limits", "set", "max_connections=2", "login_timeout=20s")
	if text := s.text(t); !strings.Contains(text, "# the first") || !strings.Contains(text, "max_connections: 2") || !strings.Contains(text, "login_timeout: 20s") {
		t.Errorf("the file:\n%s", text)
	}
	for i := range byte(2) {
		login(t, s.addr, initiator.Options{ISID: [6]byte{0, 2, 0x3d, 0, 0, i}})
	}
	if near := s.ok(t, "limits", "--near"); !regexp.MustCompile(`(?m)^max_connections +process +2 +2 +100 `).MatchString(near) || strings.Contains(near, "registrations_per_initiator") {
		t.Errorf("limits --near:\n%s", near)
	}
	s.says(t, cli.ExitOK, "max_connections: 2 of 2 in use", "doctor")
	s.says(t, cli.ExitUsage, "KEY=VALUE", "limits", "set", "max_connections")
	s.says(t, cli.ExitUsage, "unknown command", "limits", "sett")
	s.says(t, cli.ExitError, "did you mean max_connections", "limits", "set", "max_connection=3")
	s.says(t, cli.ExitError, "must be 1 to 65536, not 0", "limits", "set", "max_connections=0")
	s.says(t, cli.ExitOK, "set max_connections of limits: 2 -> "+byDefault, "limits", "set", "max_connections=")
}

// Shells complete names of targets, LUNs with what they are, keys, portals, and initiators that are admitted or were refused.
func TestCompletion(t *testing.T) {
	s := newStation(t)
	s.ok(t, "target", "create", secondName, "--initiator", hostName, "--alias", "second")
	s.ok(t, "lun", "create", secondName, "--path", "b.img", "--size", "1MiB")
	s.says(t, cli.ExitOK, secondName, "__complete", "lun", "show", "iqn")
	s.says(t, cli.ExitOK, "0\t1MiB file "+s.dir+"/b.img\n", "__complete", "lun", "show", secondName, "")
	s.says(t, cli.ExitOK, "\nread_only=\n", "__complete", "lun", "set", secondName, "0", "")
	s.says(t, cli.ExitOK, "\nauth=\n", "__complete", "target", "set", secondName, "")
	s.says(t, cli.ExitOK, "\nipsec=\n", "__complete", "portal", "set", "127.0.0.1:0", "")
	for _, name := range []string{hostName + "$(x)", hostName + "-other"} {
		if _, err := initiator.Login(t.Context(), s.addr, initiator.Options{Name: name, Target: secondName}); err == nil {
			t.Fatalf("%s, which is not admitted, logs in", name)
		}
	}
	s.says(t, cli.ExitOK, hostName+"-other\trefused: ", "__complete", "initiator", "allow", "second", "")
	s.says(t, cli.ExitOK, hostName+"-other\trefused: ", "__complete", "explain", "--target", secondName, "--initiator", "")
	s.login(t)
	if out := s.says(t, cli.ExitOK, "\n"+hostName+"\n", "__complete", "explain", "--initiator", ""); strings.Contains(out, "$") {
		t.Errorf("a shell gets a name that is none:\n%s", out)
	}
	s.says(t, cli.ExitOK, "127.0.0.1:0", "__complete", "portal", "remove", "")
	s.says(t, cli.ExitOK, hostName, "__complete", "initiator", "deny", "second", "")
}

// portal add, portal list and portal remove, which are aliases of create and delete.
func TestPortalCommands(t *testing.T) {
	s := newStation(t)
	const more = "127.0.0.2:0"
	s.says(t, cli.ExitOK, "add portal "+more, "portal", "add", more, "--tpgt", "2", "--transport", "tcp")
	list := read[[]schema.PortalState](t, s, "portal", "list")
	if len(list) != 2 || list[1].TPGT != 2 || !slices.Equal(list[1].Transports, []string{"tcp"}) {
		t.Errorf("portals %+v", list)
	}
	s.says(t, cli.ExitError, "address already in use", "portal", "add", s.addr) // SEC-3723.5.8-1
	s.says(t, cli.ExitUsage, "--tpgt must be", "portal", "add", "127.0.0.3:0", "--tpgt", "0")
	s.says(t, cli.ExitUsage, "--tpgt must be 1 to 65535, not -5", "portal", "add", "127.0.0.3:0", "--tpgt", "-5")
	s.says(t, cli.ExitUsage, "--transport is empty", "portal", "add", "127.0.0.3:0", "--transport", "")
	s.says(t, cli.ExitOK, "remove portal "+more, "portal", "remove", more)
	s.says(t, cli.ExitNotFound, more, "portal", "remove", more)
	s.says(t, cli.ExitError, "add another one first", "portal", "remove", "127.0.0.1:0")
}

// Lists have wide columns, names and JSONPaths, without headings on request, and in the order of a field.
func TestListFormats(t *testing.T) {
	s := newStation(t)
	s.ok(t, "lun", "create", storeName, "--backend", "memory", "--size", "3MiB", "--serial", "S3")
	s.ok(t, "lun", "create", storeName, "--backend", "memory", "--size", "2MiB", "--serial", "S2")
	s.says(t, cli.ExitOK, "SERIAL", "lun", "list", "-o", "wide")
	for _, tc := range []struct {
		want string
		args []string
	}{
		{storeName + " 1\n" + storeName + " 2\n", []string{"lun", "list", "-o", "name", "--sort-by", "id"}},
		{"S2\nS3\n", []string{"lun", "list", "--sort-by", "serial", "-o", `jsonpath=$[?(@.serial == "S2" || @.serial == "S3")].serial`}},
		{"3145728\n2097152\n", []string{"luns", "ls", "--sort-by=-size", "-o", `jsonpath={[?(@.serial == "S2" || @.serial == "S3")].size}`}},
		{storeName + "\n", []string{"target", "list", "-o", "name"}},
		{storeName + "\n", []string{"target", "show", storeName, "-o", "jsonpath=.name"}},
		{"", []string{"session", "list", "--no-headers"}},
	} {
		out := s.ok(t, tc.args...)
		if tc.want == "" && out != "" || !strings.HasSuffix(out, tc.want) || strings.Contains(out, "\x1b") {
			t.Errorf("%q prints\n%s\nwant\n%s", tc.args, out, tc.want)
		}
	}
	if out := s.ok(t, "lun", "list", "--no-headers"); strings.Contains(out, "TARGET") || !strings.Contains(out, storeName) {
		t.Errorf("without headings:\n%s", out)
	}
	s.says(t, cli.ExitError, `no object has the field "nope"`, "lun", "list", "--sort-by", "nope")
	s.says(t, cli.ExitUsage, "is no JSONPath", "lun", "list", "-o", "jsonpath=[")
	s.says(t, cli.ExitUsage, "--sort-by", "lun", "list", "--sort-by", "[[")
	s.says(t, cli.ExitUsage, "--output must be table, wide, name, json, yaml or jsonpath=EXPR", "lun", "list", "-o", "csv")
	s.says(t, cli.ExitUsage, "--output must be table, json, yaml or jsonpath=EXPR", "lun", "show", storeName, "1", "-o", "wide")
	s.says(t, cli.ExitUsage, "--output must be", "top", "-n", "1", "-o", "jsonpath=x")
	s.says(t, cli.ExitOK, storeName+"  *\n", "initiator", "list", storeName)
	s.says(t, cli.ExitNotFound, "not found", "initiator", "list", storeName+"x")
	s.says(t, cli.ExitOK, "TPGT", "portal", "show", "127.0.0.1:0")
	s.says(t, cli.ExitNotFound, "portal 127.0.0.1:9: not found", "portal", "show", "127.0.0.1:9")
}

// The verbs are the same for all objects, and the old ones still work.
func TestVerbs(t *testing.T) {
	s := newStation(t)
	const more = "127.0.0.2:0"
	s.ok(t, "auth", "user", "create", storeName, "first")
	for _, verbs := range [][2]string{{"create", "delete"}, {"add", "remove"}, {"add", "rm"}} {
		s.ok(t, "portal", verbs[0], more)
		s.ok(t, "portals", verbs[1], more)
		s.ok(t, "initiator", verbs[0], storeName, "iqn.2026-11.io.example:verbs")
		s.ok(t, "initiator", verbs[1], storeName, "iqn.2026-11.io.example:verbs")
		s.ok(t, "auth", "user", verbs[0], storeName, "verbs")
		s.ok(t, "auth", "user", verbs[1], storeName, "verbs")
	}
	for _, name := range []string{"list", "ls", "show"} {
		s.ok(t, "reservation", name)
	}
}

// The history of the file can be listed, compared and restored.
func TestConfigHistory(t *testing.T) {
	s := newStation(t)
	s.says(t, cli.ExitNotFound, "has no earlier version", "config", "rollback")
	s.says(t, cli.ExitNotFound, "has no earlier version", "config", "diff")
	before := s.text(t)
	s.ok(t, "target", "create", secondName, "--initiator", hostName)
	s.ok(t, "lun", "create", secondName, "--backend", "memory", "--size", "1MiB")
	type version struct{ Version, Bytes, Added, Removed int }
	list := read[[]version](t, s, "config", "history")
	if len(list) != 2 || list[0].Version != 1 || list[0].Bytes != len(before) || list[0].Added == 0 {
		t.Errorf("history %+v of %d bytes", list, len(before))
	}
	for _, args := range [][]string{{"1"}, {"1", "2"}, {"2"}, {}} {
		out := s.ok(t, append([]string{"config", "diff"}, args...)...)
		if named := strings.Contains(out, "+  - name: "+secondName); named != (len(args) > 0 && args[0] == "1") || !strings.HasPrefix(out, "--- version ") {
			t.Errorf("diff %q:\n%s", args, out)
		}
	}
	s.says(t, cli.ExitError, "version 7", "config", "diff", "7")
	s.says(t, cli.ExitUsage, "VERSION must be a number", "config", "diff", "x")
	s.says(t, cli.ExitOK, "remove target "+secondName, "config", "rollback", "1", "--dry-run")
	if len(read[[]schema.TargetState](t, s, "target", "list")) != 2 {
		t.Error("a dry run rolled back")
	}
	s.ok(t, "config", "rollback", "1")
	if got := s.text(t); got != before || len(read[[]schema.TargetState](t, s, "target", "list")) != 1 {
		t.Errorf("after the rollback:\n%s", got)
	}
	if list := read[[]version](t, s, "config", "history"); len(list) != 3 {
		t.Errorf("after the rollback: %+v", list)
	}
}

// An edited text is checked and applied. One that is wrong, or whose file has changed meanwhile, changes nothing and is kept.
func TestConfigEdit(t *testing.T) {
	s := newStation(t)
	t.Setenv("TMPDIR", t.TempDir())
	kept := func() (list []string) {
		list, _ = filepath.Glob(os.Getenv("TMPDIR") + "/iser-target-edit-*/*")
		return list
	}
	before := s.text(t)
	t.Setenv("EDITOR", "true")
	s.says(t, cli.ExitOK, "the text is as before", "config", "edit")
	t.Setenv("EDITOR", "false")
	s.says(t, cli.ExitError, "editor false", "config", "edit")
	if s.text(t) != before || kept() != nil {
		t.Errorf("a text that was not edited: %q,\n%s", kept(), s.text(t))
	}
	t.Setenv("EDITOR", "sed -i s/targets:/tragets:/")
	s.says(t, cli.ExitError, "tragets: unknown key", "config", "edit")
	if s.text(t) != before || len(kept()) != 1 {
		t.Errorf("a wrong text: %q,\n%s", kept(), s.text(t))
	}
	t.Setenv("EDITOR", `sh -c 'echo "# mine" >>"$0"; echo "# of another" >>`+s.file+`'`)
	s.says(t, cli.ExitError, "changed while you edited it", "config", "edit")
	if err := os.WriteFile(s.file, []byte(before), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("EDITOR", `sed -i '$a# edited'`)
	s.says(t, cli.ExitOK, "nothing to do", "config", "edit")
	if got := s.text(t); got != before+"# edited\n" || len(kept()) != 2 {
		t.Errorf("an edited text: %q,\n%s", kept(), got)
	}
}

// Empty and missing arguments are refused.
func TestEmptyArgumentsAreRefused(t *testing.T) {
	s := newStation(t)
	s.says(t, cli.ExitUsage, "argument 1 is empty", "lun", "list", "")
	s.says(t, cli.ExitUsage, "argument 1 is empty", "initiator", "deny", "", "*")
	s.says(t, cli.ExitUsage, "argument 2 is empty", "initiator", "deny", storeName, "")
	s.says(t, cli.ExitUsage, "unknown command", "completion", "bsh")
	s.says(t, cli.ExitUsage, "requires a command", "completion")
	s.says(t, cli.ExitOK, "__start_iser-target", "completion", "bash")
}

// A change keeps the comments of the configuration file.
func TestChangeKeepsComments(t *testing.T) {
	s := newStation(t)
	s.ok(t, "target", "create", secondName, "--initiator", hostName)
	s.ok(t, "target", "delete", secondName)
	if got := s.text(t); !strings.HasPrefix(got, "# of a test\n") || !strings.Contains(got, storeName+" # the first\n") {
		t.Errorf("the file has lost its comments:\n%s", got)
	}
}

// The last target can be deleted. A daemon without targets starts, can be managed, and
// returns no targets in discovery.
func TestDaemonWithoutTargets(t *testing.T) {
	s := newStation(t)
	s.says(t, cli.ExitOK, "remove target "+storeName+" (done)", "target", "delete", storeName)
	if got := s.text(t); !strings.Contains(got, "targets: []") {
		t.Errorf("the file:\n%s", got)
	}
	for range 2 { // running, and restarted
		if list := read[[]schema.TargetState](t, s, "target", "list"); len(list) != 0 {
			t.Errorf("targets %+v", list)
		}
		d, err := initiator.Dial(t.Context(), "tcp", s.addr, initiator.Options{Name: hostName})
		if err != nil {
			t.Fatal(err)
		}
		err = d.LogIn(nil)
		found, err2 := d.SendTargets("All")
		if d.Close(); err != nil || err2 != nil || len(found) != 0 {
			t.Errorf("discovery: %v, errors %v and %v", found, err, err2)
		}
		if _, err := initiator.Login(t.Context(), s.addr, initiator.Options{Name: hostName, Target: storeName}); err == nil || !strings.Contains(err.Error(), "0203") {
			t.Errorf("login: %v", err)
		}
		s.says(t, cli.ExitOK, "no targets", "doctor")
		s.says(t, cli.ExitOK, "targets 0", "config", "validate", s.file)
		s.cmd.Process.Signal(syscall.SIGTERM)
		s.wait(t, `(msg=stopped)`)
		s.process = start(t, "serve", "--config", s.file)
	}
	s.says(t, cli.ExitOK, "(done)", "target", "create", storeName, "--initiator", "*")
	s.says(t, cli.ExitOK, "(done)", "lun", "create", storeName, "--backend", "memory", "--size", "1MiB")
	s.login(t)
	s.same(t, 1)
}

// registered logs in and registers a reservation key, and returns the session with its TSIH.
func registered(t *testing.T, s *station) (session *initiator.Session, tsih string) {
	t.Helper()
	session = s.login(t)
	register := &initiator.Command{Out: make([]byte, 24)} // PERSISTENT RESERVE OUT, REGISTER
	register.CDB[0], register.CDB[8], register.Out[15] = 0x5f, 24, 42
	for register.Status = 2; register.Status != 0; { // the first meets a unit attention
		if err := session.Do(register); err != nil {
			t.Fatal(err)
		}
	}
	return session, fmt.Sprint(session.TSIH)
}

// session list, session show and session kill.
func TestSessionCommands(t *testing.T) {
	s := newStation(t)
	session := s.login(t)
	list := read[[]schema.SessionState](t, s, "session", "list")
	if len(list) != 1 || list[0].Initiator != hostName || list[0].Transport != "iser" {
		t.Fatalf("sessions %+v", list)
	}
	id := fmt.Sprint(list[0].TSIH)
	s.says(t, cli.ExitOK, hostName, "session", "show", id)
	if f := list[0].Connections[0].Framing; f == nil || *f != (schema.FramingState{CRC: true, ORD: 32}) {
		t.Errorf("framing %+v", f)
	}
	s.says(t, cli.ExitOK, "CRC on, Markers off in and off out, ORD 32", "session", "show", id)
	s.says(t, cli.ExitNotFound, "session 65535", "session", "show", "65535")
	s.says(t, cli.ExitOK, id, "__complete", "session", "kill", "")

	var would cli.Killed
	if err := json.Unmarshal([]byte(s.says(t, cli.ExitOK, "", "session", "kill", id, "--dry-run", "-o", "json")), &would); err != nil ||
		would != (cli.Killed{TSIH: list[0].TSIH, Initiator: hostName, Target: storeName}) {
		t.Errorf("dry run: %+v, %v", would, err)
	}
	s.says(t, cli.ExitOK, "session "+id+" of "+hostName+" would end, with 0 tasks in progress", "session", "kill", id, "--dry-run")
	s.says(t, cli.ExitNotFound, "session 65535", "session", "kill", "65535", "--dry-run")
	s.says(t, cli.ExitOK, hostName, "session", "show", id) // it is still there
	s.says(t, cli.ExitOK, "ended", "session", "kill", id, "--reason", "a test")
	endsSoon(t, session)
	s.says(t, cli.ExitNotFound, "session", "session", "kill", id)
	s.says(t, cli.ExitOK, "a test", "events")
}

// show has the counters of a session and of a LUN, and only show has latencies.
func TestShowHasCounters(t *testing.T) {
	s := newStation(t)
	_, id := registered(t, s)
	// The counters include the commands with GOOD and the one with the unit attention, which is not an error.
	show := read[schema.SessionState](t, s, "session", "show", id)
	unit := read[schema.LUNState](t, s, "lun", "show", storeName, "0")
	if c := show.Counters; c.Others < 2 || c.Errors != 0 || c.Reads != 0 {
		t.Errorf("session show: %+v", c)
	}
	if c := unit.Counters; c.Others < 2 || c.Errors != 0 || c.Reads != 0 {
		t.Errorf("lun show: %+v", c)
	}
	s.says(t, cli.ExitOK, fmt.Sprintf("0 reads, 0 writes, %d others", show.Counters.Others), "session", "show", id)
	s.says(t, cli.ExitOK, fmt.Sprintf("0 reads, 0 writes, %d others", unit.Counters.Others), "lun", "show", storeName, "0")
	s.says(t, cli.ExitOK, "  others: ", "lun", "show", storeName, "0", "-o", "yaml")
	// Latencies are shown for one object only, so that lists stay short.
	s.says(t, cli.ExitOK, "total latency", "session", "show", id)
	s.says(t, cli.ExitOK, "total latency", "lun", "show", storeName, "0")
	if len(show.Counters.Latency) == 0 || len(unit.Counters.Latency) == 0 {
		t.Errorf("latencies of the session %+v, of the LUN %+v", show.Counters.Latency, unit.Counters.Latency)
	}
	for _, l := range read[[]schema.LUNState](t, s, "lun", "list") {
		if l.Counters.Others == 0 && l.ID == 0 || l.Counters.Latency != nil {
			t.Errorf("lun list: %+v", l)
		}
	}
	if l := read[[]schema.SessionState](t, s, "session", "list"); l[0].Counters.Others == 0 || l[0].Counters.Latency != nil {
		t.Errorf("session list: %+v", l)
	}
	if l := read[[]schema.TargetState](t, s, "target", "list"); l[0].LUNs[0].Counters.Latency != nil {
		t.Errorf("target list: %+v", l)
	}
}

// reservation show and reservation clear.
func TestReservationCommands(t *testing.T) {
	s := newStation(t)
	registered(t, s)
	s.says(t, cli.ExitOK, "registered only", "reservation", "show")
	s.says(t, cli.ExitOK, "0x000000000000002a", "reservation", "show", "-o", "yaml")
	s.says(t, cli.ExitRefused, "--disrupt", "reservation", "clear", storeName, "0")
	s.says(t, cli.ExitRefused, "LUN 0 of "+storeName+": the reservation (registered only) and 1 registration would be removed", "reservation", "clear", storeName, "0", "--dry-run")
	s.says(t, cli.ExitOK, `"removed": false`, "reservation", "clear", storeName, "0", "--disrupt", "--dry-run", "-o", "json")
	s.says(t, cli.ExitOK, "registered only", "reservation", "list") // it is still there
	s.says(t, cli.ExitOK, "were removed", "reservation", "clear", storeName, "0", "--disrupt")
	s.says(t, cli.ExitNotFound, "reservation", "reservation", "clear", storeName, "0", "--disrupt")
	s.says(t, cli.ExitNotFound, "reservation", "reservation", "clear", storeName, "0") // and not a refusal
}

// lun show names a setting that an initiator changed, and the initiator; events has the change; lun
// reset-settings undoes it. target set gives the right to reset others.
func TestSettingsCommands(t *testing.T) {
	s := newStation(t)
	session := s.login(t)
	protect := &initiator.Command{Out: []byte("\x00\x00\x00\x00\x0a\x0a\x02\x10\x08\x40\x00\x00\xff\xff\x00\x00")}
	copy(protect.CDB[:], "\x15\x11\x00\x00\x10")   // MODE SELECT(6) with SP: SWP
	for protect.Status = 2; protect.Status != 0; { // the first meets a unit attention
		if err := session.Do(protect); err != nil {
			t.Fatal(err)
		}
	}
	name := &initiator.Command{Out: []byte("rack 7\x1b[31m\x00")}
	copy(name.CDB[:], "\xa4\x06\x00\x00\x00\x00\x00\x00\x00\x0c\x04") // SET IDENTIFYING INFORMATION, a text
	if err := session.Do(name); err != nil || name.Status != 0 {
		t.Fatalf("SET IDENTIFYING INFORMATION: %v, status %d, sense % x", err, name.Status, name.Sense)
	}
	s.says(t, cli.ExitOK, `"rack 7\x1b[31m" (default "", set by `+hostName+")", "lun", "show", storeName, "0")
	s.says(t, cli.ExitOK, "on (default off, set by "+hostName+")", "lun", "show", storeName, "0")
	s.says(t, cli.ExitOK, "ro, by an initiator", "lun", "list")
	s.says(t, cli.ExitOK, `"saved": "on"`, "lun", "list", "-o", "json")
	s.says(t, cli.ExitOK, "setting=write_protect", "events")
	s.says(t, cli.ExitOK, `value="rack 7\x1b[31m"`, "events")
	s.says(t, cli.ExitOK, "have their defaults", "lun", "reset-settings", storeName, "0")
	for _, l := range read[[]schema.LUNState](t, s, "lun", "list") {
		for _, set := range l.Settings {
			if set.Value != set.Default || set.Saved != set.Default || set.By != "" {
				t.Errorf("LUN %d: %+v", l.ID, set)
			}
		}
	}
	s.says(t, cli.ExitNotFound, "LUN 99", "lun", "reset-settings", storeName, "99")

	s.says(t, cli.ExitOK, "resets_for", "target", "set", storeName, "resets_for=[\"*:nobody\"]")
	if list := read[[]schema.TargetState](t, s, "target", "list"); !slices.Equal(list[0].ResetsFor, []string{"*:nobody"}) {
		t.Errorf("resets_for is %v", list[0].ResetsFor)
	}
}

// A change that disturbs a session is refused, leaves the file as it is, and is made with a
// flag.
func TestDisturbingChangeRequiresAFlag(t *testing.T) {
	s := newStation(t)
	s.login(t)
	before := s.text(t)
	s.says(t, cli.ExitRefused, "--drain", "lun", "delete", storeName, "0")
	if got := s.text(t); got != before {
		t.Errorf("the file has a refused change:\n%s", got)
	}
	s.ok(t, "initiator", "allow", storeName, "iqn.2026-11.io.example:other")
	s.ok(t, "target", "create", storeName+"2", "--initiator", "*")
	before = s.text(t)
	s.says(t, cli.ExitRefused, hostName, "initiator", "deny", storeName, "*")
	s.says(t, cli.ExitRefused, hostName, "target", "delete", storeName)
	if got := s.text(t); got != before {
		t.Errorf("the file has a refused change:\n%s", got)
	}
	s.says(t, cli.ExitOK, "(done)", "lun", "create", storeName, "--backend", "memory", "--size", "1MiB")
	s.says(t, cli.ExitOK, "(done)", "lun", "delete", storeName, "0", "--drain", "5s")
	s.says(t, cli.ExitOK, "(done)", "lun", "delete", storeName, "1", "--now")
	s.says(t, cli.ExitUsage, "exclude", "lun", "delete", storeName, "1", "--now", "--drain", "1s")
}

// config validate, plan, apply and export.
func TestConfigCommands(t *testing.T) {
	s := newStation(t)
	s.says(t, cli.ExitOK, "valid", "config", "validate", s.file)
	s.says(t, cli.ExitError, "input: portals", "config", "validate", "-") // empty
	s.says(t, cli.ExitOK, "nothing to do", "config", "plan")
	if got := s.ok(t, "config", "export"); got != s.text(t) {
		t.Errorf("export is not the file:\n%s", got)
	}
	more := filepath.Join(s.dir, "more.yaml")
	text := strings.Replace(s.text(t), "size: 1MiB}", "size: 1MiB}, {id: 5, backend: memory, size: 1MiB}", 1)
	if err := os.WriteFile(more, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	s.says(t, cli.ExitOK, "add LUN 5", "config", "plan", more)
	if n := len(read[[]schema.LUNState](t, s, "lun", "list")); n != 1 {
		t.Errorf("a plan created LUNs: %d", n)
	}
	s.says(t, cli.ExitOK, "add LUN 5 of "+storeName+" (done)", "config", "apply", more)
	s.says(t, cli.ExitOK, "nothing to do", "config", "apply", more)
	if got := s.text(t); got != text {
		t.Errorf("the file is not what was applied:\n%s", got)
	}
	session := s.login(t)
	if err := os.WriteFile(s.file, []byte(strings.Replace(text, storeName, storeName+"2", 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	s.says(t, cli.ExitError, "config apply", "lun", "create", storeName, "--backend", "memory", "--size", "1MiB") // edited
	s.says(t, cli.ExitRefused, "requires --disrupt", "config", "plan")
	s.says(t, cli.ExitRefused, hostName, "config", "apply")
	s.says(t, cli.ExitOK, "remove target "+storeName, "config", "apply", "--disrupt", "--now")
	endsSoon(t, session)
	s.says(t, cli.ExitError, "portals", "config", "apply", "/dev/null")
	s.says(t, cli.ExitError, "no such file", "config", "apply", "/does/not/exist")
}

// Exit codes without a target, and of wrong command lines.
func TestExitCodes(t *testing.T) {
	s := &station{dir: t.TempDir()}
	s.socket = filepath.Join(s.dir, "none")
	if testkit.Race {
		s.environment(t)
	}
	s.says(t, cli.ExitUnreachable, "--socket", "target", "list")
	s.says(t, cli.ExitUnreachable, s.socket+"2", "target", "list", "--socket", s.socket+"2")
	s.says(t, cli.ExitUsage, "--help", "nonsense")
	s.says(t, cli.ExitUsage, "--help", "target", "nonsense")
	s.says(t, cli.ExitUsage, "--help", "target")
	s.says(t, cli.ExitUsage, "--help", "target", "list", "--nonsense")
	s.says(t, cli.ExitUsage, "--help", "target", "delete")
	s.says(t, cli.ExitUsage, "table, wide, name, json, yaml or jsonpath=EXPR", "target", "list", "-o", "xml")
	s.says(t, cli.ExitOK, "5  unreachable: no target answers", "exit-codes")
}

// Filters of events select what names their subject, and with --follow new events, too.
func TestFilteredEvents(t *testing.T) {
	s := newStation(t)
	other := login(t, s.addr, initiator.Options{Name: hostName + "-other"})
	s.ok(t, "lun", "create", storeName, "--id", "7", "--backend", "memory", "--size", "1MiB")
	other.Close()
	testkit.Eventually(t, "the end of the session", func() bool { return strings.Contains(s.ok(t, "events", "--kind", "session"), "-other") })
	follow := s.command(t, "events", "--follow", "--lun", "8", "-o", "json")
	out, err := follow.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := follow.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { follow.Process.Kill(); follow.Wait() })
	all := strings.Count(s.ok(t, "events"), "\n")
	for _, tt := range []struct {
		args         string
		want, unlike string // of each line
	}{
		{"--initiator " + hostName + "-other", hostName + "-other", "change="},
		{"--kind lun,login", "", " config: "},
		{"--kind session --initiator " + hostName + "-other", " session: ", " login: "},
		{"--lun 7", "lun=7", ""},
		{"--target " + storeName, "target=" + storeName, ""},
		{"--since 1h --kind login", " login: ", ""},
	} {
		got := s.ok(t, append([]string{"events"}, strings.Fields(tt.args)...)...)
		lines := strings.Split(strings.TrimSpace(got), "\n")
		if len(lines) >= all || got == "" {
			t.Errorf("%s: %d of %d events", tt.args, len(lines), all)
		}
		for _, line := range lines {
			if !strings.Contains(line, tt.want) || tt.unlike != "" && strings.Contains(line, tt.unlike) {
				t.Errorf("%s: %s", tt.args, line)
			}
		}
	}
	if got := strings.Count(s.ok(t, "events", "--since", "1h"), "\n"); got != all {
		t.Errorf("%d events of the last hour, want all %d", got, all)
	}
	for _, none := range []string{"--since 1ns", "--lun 99", "--session 65535", "--since 2099-01-01", "--initiator iqn.2026-11.io.example:nobody"} {
		if got := s.ok(t, append([]string{"events"}, strings.Fields(none)...)...); got != "" {
			t.Errorf("%s: %s", none, got)
		}
	}
	s.ok(t, "lun", "create", storeName, "--id", "8", "--backend", "memory", "--size", "1MiB")
	var e schema.Event
	if err := json.NewDecoder(out).Decode(&e); err != nil || e.Attrs["lun"] != 8.0 {
		t.Errorf("the first event that follows is %+v, %v", e, err)
	}
}

// events --follow shows events in order, continues with those of a target that was started again, and says so on standard error.
func TestFollowedEventsAreInOrder(t *testing.T) {
	s := newStation(t)
	cmd := s.command(t, "events", "--follow", "--since", "1", "-o", "json")
	said := &lockedBuffer{added: make(chan struct{}, 1)}
	cmd.Stderr = said
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	s.ok(t, "lun", "create", storeName, "--backend", "memory", "--size", "1MiB")
	d := json.NewDecoder(out)
	last := uint64(1)
	for {
		var e schema.Event
		if err := d.Decode(&e); err != nil {
			t.Fatal(err)
		}
		if e.Number != last+1 {
			t.Errorf("event %d follows %d", e.Number, last)
		}
		last = e.Number
		if e.Event == "config" && strings.Contains(fmt.Sprint(e.Attrs["change"]), "add LUN 1") {
			if by := fmt.Sprint(e.Attrs["by"]); !regexp.MustCompile(fmt.Sprintf(`^uid %d, process \d+$`, os.Getuid())).MatchString(by) {
				t.Errorf("the change is by %q", by)
			}
			break
		}
	}
	if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	s.wait(t, `(msg=stopped)`)
	if err := s.cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(s.socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is still there: %v", err)
	}
	follower := &process{output: said}
	follower.wait(t, `(waiting for it)`)
	s.process = start(t, "serve", "--config", s.file)
	follower.wait(t, `(the target is back; it was started again, and numbers begin at 1)`)
	for {
		var e schema.Event
		if err := d.Decode(&e); err != nil {
			t.Fatal(err)
		}
		if e.Number == last+1 { // of the end of the first process
			last = e.Number
			continue
		}
		if e.Number != 1 {
			t.Errorf("the first event of the new process is %d", e.Number)
		}
		break
	}
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	cmd.Wait()
	if got := cmd.ProcessState.ExitCode(); got != cli.ExitOK {
		t.Errorf("exit code %d after an interrupt, want %d\n%s", got, cli.ExitOK, said.all.String())
	}
}

// While a removed target drains, other commands work, and target delete --now ends the drain.
func TestDrainCanBeEnded(t *testing.T) {
	s := newStation(t)
	disk := filepath.Join(s.dir, "disk.img")
	s.ok(t, "target", "create", storeName+"2", "--initiator", "*")
	s.ok(t, "lun", "create", storeName, "--path", disk, "--size", "1MiB")
	session := s.login(t) // it does not log out
	if err := session.Do(&initiator.Command{}); err != nil {
		t.Fatal(err)
	}
	type outcome struct {
		out, errOut string
		code        int
	}
	deleted := make(chan outcome)
	go func() {
		out, errOut, code := s.run(t, "target", "delete", storeName, "--drain", "10m")
		deleted <- outcome{out, errOut, code}
	}()
	testkit.Eventually(t, "the target is removed", func() bool { return len(read[[]schema.TargetState](t, s, "target", "list")) == 1 })
	s.ok(t, "lun", "create", storeName+"2", "--backend", "memory", "--size", "1MiB")
	s.says(t, cli.ExitOK, "nothing to do", "config", "plan")
	s.says(t, cli.ExitError, "was removed and is still in use: the sessions of its target end", "lun", "create", storeName+"2", "--path", disk, "--size", "1MiB")
	s.says(t, cli.ExitNotFound, "was removed before: ", "target", "delete", storeName)
	s.says(t, cli.ExitOK, "was removed before; its commands are aborted now", "target", "delete", storeName, "--now")
	select {
	case o := <-deleted:
		if o.code != cli.ExitOK || !strings.Contains(o.out, "(done)") {
			t.Errorf("%+v", o)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the removal does not end")
	}
	<-session.Done()
	s.says(t, cli.ExitNotFound, storeName, "target", "delete", storeName, "--now")
	s.ok(t, "lun", "create", storeName+"2", "--path", disk, "--size", "1MiB")
}

// A second daemon does not take the socket of the first.
func TestSocketInUseIsKept(t *testing.T) {
	s := newStation(t)
	other := write(t, "other.yaml", strings.Replace(s.text(t), "/state", "/other", 1))
	s.says(t, cli.ExitError, "control.socket, by ISER_TARGET_CONTROL_SOCKET: "+s.socket, "serve", "--config", other)
	s.ok(t, "target", "list")
}

// No change is lost when two commands run at once.
func TestConcurrentChanges(t *testing.T) {
	s := newStation(t)
	const each = 8
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for range each {
				if out, errOut, code := s.run(t, "lun", "create", storeName, "--backend", "memory", "--size", "1MiB"); code != cli.ExitOK {
					t.Errorf("exit code %d\n%s%s", code, out, errOut)
				}
			}
		})
	}
	wg.Wait()
	s.same(t, 1+2*each)
}

// After kill -9 during a change, the file and the restarted daemon have the change as a whole
// or not at all.
func TestKilledWhileChanging(t *testing.T) {
	s := newStation(t)
	count := 1
	for i := range 12 {
		image := filepath.Join(s.dir, fmt.Sprintf("%d.img", i))
		cmd := s.command(t, "lun", "create", storeName, "--path", image, "--size", "1MiB")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(rand.N(60 * time.Millisecond)) // the change is at a random step
		s.cmd.Process.Kill()
		s.cmd.Wait()
		cmd.Wait()
		answered := cmd.ProcessState.ExitCode() == cli.ExitOK
		s.process = start(t, "serve", "--config", s.file)
		cfg, err := config.Load(s.file)
		if err != nil {
			t.Fatalf("the file after kill -9: %v", err)
		}
		switch n := len(cfg.Targets[0].LUNs); {
		case n == count+1:
			count++
		case n != count || answered:
			t.Fatalf("%d LUNs after kill -9, %d before; answered: %v", n, count, answered)
		}
		s.same(t, count)
	}
}

// doctor finds problems, and nothing on a healthy target.
func TestDoctor(t *testing.T) {
	s := newStation(t)
	s.says(t, cli.ExitOK, "is the running configuration", "doctor")
	if out := s.ok(t, "doctor"); strings.Contains(out, "problem") || strings.Contains(out, "warning") {
		t.Errorf("a healthy target:\n%s", out)
	}
	s.ok(t, "target", "create", storeName+"2", "--initiator", "iqn.2026-11.io.example:other")
	s.says(t, cli.ExitOK, "has no LUNs", "doctor")
	s.ok(t, "lun", "create", storeName+"2", "--path", filepath.Join(s.dir, "huge.img"), "--size", "8TiB")
	s.says(t, cli.ExitOK, "8.0 TiB more", "doctor")
	for range 3 {
		if _, err := initiator.Login(t.Context(), s.addr, initiator.Options{Name: hostName, Target: storeName + "2"}); err == nil {
			t.Fatal("the login was not refused")
		}
	}
	want := "explain --initiator " + hostName + " --target " + storeName + "2 --portal " + s.addr + "\n"
	if out := s.ok(t, "doctor"); strings.Count(out, want) != 1 {
		t.Errorf("the same refusal more than once:\n%s", out)
	}
	text := s.text(t)
	for _, tc := range []struct {
		text, want string
		code       int
	}{
		{strings.Replace(text, `initiators: ["*"]`, `initiators: ["iqn.*"]`, 1), "edited, but not applied", cli.ExitOK},
		{"targts: []", "correct the file", cli.ExitError},
	} {
		if err := os.WriteFile(s.file, []byte(tc.text), 0o600); err != nil {
			t.Fatal(err)
		}
		s.says(t, tc.code, tc.want, "doctor")
	}

	s = newStation(t, func(text string) string {
		return strings.Replace(text, "1MiB}]", "1MiB}, {id: 1, backend: block, path: /dev/none-such}]", 1)
	})
	s.says(t, cli.ExitError, "is not ready", "doctor")
	list := []cli.Finding{}
	out, _, code := s.run(t, "doctor", "-o", "json")
	if err := json.Unmarshal([]byte(out), &list); err != nil || code != cli.ExitError || !slices.ContainsFunc(list, func(f cli.Finding) bool { return f.About == "LUN 1 of "+storeName && f.Severity == "problem" }) {
		t.Errorf("exit code %d, error %v, findings %+v", code, err, list)
	}
}

// docs writes a man page for each visible command, and completions for each shell.
func TestDocsHaveAllCommands(t *testing.T) {
	dir := t.TempDir()
	if out, err := run(t, "docs", dir); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for file, want := range map[string]string{
		"man/iser-target.1":              "user space",
		"man/iser-target-lun-resize.1":   "allow-shrink",
		"man/iser-target-config-apply.1": "disrupt",
		"man/iser-target-exit-codes.1":   "no target answers",
		"man/iser-target.yaml.5":         "targets",
		"man/iser-target.8":              "SIGHUP",
		"completions/iser-target.bash":   "__start_iser-target",
		"completions/_iser-target":       "#compdef iser-target",
		"completions/iser-target.fish":   "complete -c iser-target",
	} {
		if b, err := os.ReadFile(filepath.Join(dir, file)); err != nil || !strings.Contains(string(b), want) {
			t.Errorf("%s: %d bytes, error %v, want %q in it", file, len(b), err, want)
		}
	}
	for _, group := range rootCommand(nil, nil).Commands() {
		if group.Name() == "help" {
			continue // cobra writes no page about it
		}
		for _, c := range append(group.Commands(), group) {
			page := filepath.Join(dir, "man", strings.ReplaceAll(c.CommandPath(), " ", "-")+".1")
			if _, err := os.Stat(page); (err == nil) == c.Hidden {
				t.Errorf("%s: hidden is %v, and its page: %v", c.CommandPath(), c.Hidden, err)
			}
		}
	}
}
