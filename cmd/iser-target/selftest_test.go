package main

import (
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/cmd/iser-target/selftest"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// scratchTarget matches the names of scratch targets.
var scratchTarget = regexp.MustCompile(`iqn\.2026-11\.io\.github\.iser-target:selftest\.[0-9.a-f]+`)

// A selftestOutput is the JSON of selftest.
type selftestOutput struct {
	Kernel  string
	Target  string
	Config  string   `json:"config_sha256"`
	Removed []string `json:"removed_leftovers"`
	Passed  int
	Failed  int
	Skipped int
	Cases   []selftest.Result
}

// selftest passes on both transports, disturbs no neighbour, and leaves nothing behind.
func TestSelftest(t *testing.T) {
	const secret = "no ticket may have this"
	s := newStation(t, func(text string) string {
		return strings.Replace(text, "    luns:", "    auth: {method: none, users: [{name: anna, secret: "+secret+"}]}\n    luns:", 1)
	})
	before := s.text(t)
	neighbour := s.login(t)
	read := func() *initiator.Command { return &initiator.Command{CDB: cdb.Read16(0, 1), In: make([]byte, 512)} }
	if st := status(t, neighbour, read()); st != 0 {
		t.Fatalf("READ: status %#x", st)
	}
	stop, ended := make(chan struct{}), make(chan int)
	go func() { // the neighbour reads all the time
		n := 0
		defer func() { ended <- n }()
		for {
			select {
			case <-stop:
				return
			default:
			}
			c := read()
			if err := neighbour.Do(c); err != nil || c.Status != 0 {
				t.Errorf("the neighbour's READ: status %#x, %v, sense % x", c.Status, err, c.Sense)
				return
			}
			n++
		}
	}()
	text := s.ok(t, "selftest", "-o", "json")
	close(stop)
	if n := <-ended; n == 0 {
		t.Error("the neighbour has read nothing")
	}
	var out selftestOutput
	if err := json.Unmarshal([]byte(text), &out); err != nil {
		t.Fatal(err)
	}
	for _, c := range out.Cases {
		if c.Outcome != selftest.Pass {
			t.Errorf("%s: %s: %s: %s", c.Transport, c.Case, c.Outcome, c.Reason)
		}
	}
	if out.Failed+out.Skipped > 0 || out.Passed < 200 || out.Passed != len(out.Cases) || out.Kernel == "" || len(out.Config) != 64 {
		t.Errorf("%d passed, %d failed, %d skipped; kernel %q, configuration %q", out.Passed, out.Failed, out.Skipped, out.Kernel, out.Config)
	}
	for _, group := range []string{"login", "iSCSI", "iWARP", "iSER", "SCSI"} {
		for _, transport := range selftest.Transports {
			has := slices.ContainsFunc(out.Cases, func(c selftest.Result) bool { return c.Group == group && c.Transport == transport })
			if want := transport == "iser" || group != "iWARP" && group != "iSER"; has != want {
				t.Errorf("cases of %s over %s: %t", group, transport, has)
			}
		}
	}
	if strings.Contains(text, secret) {
		t.Error("the report has a secret")
	}
	if got := s.text(t); got != before {
		t.Errorf("the configuration is\n%s\nand was\n%s", got, before)
	}
	if name := scratchTarget.FindString(s.ok(t, "target", "list")); name != "" {
		t.Errorf("%s is left", name)
	}
}

// A fault of the LUN fails cases, and the exit code says so. The report of a person has these cases with their reasons.
func TestSelftestFindsFaults(t *testing.T) {
	s := newStation(t, func(text string) string { return strings.Replace(text, "size: 1MiB", "size: 16MiB", 1) })
	s.ok(t, "lun", "fault", storeName, "0", "--write-error", "1", "--for", "10m")
	url := "iscsi://" + s.addr + "/" + storeName + "/0"
	out, errOut, code := s.run(t, "selftest", url, "--destructive", "--transport", "tcp")
	if code != cli.ExitError || !strings.Contains(errOut, "cases have failed") || !regexp.MustCompile(`(?m)^fail +tcp +SCSI +WRITE and READ of many lengths`).MatchString(out) {
		t.Errorf("exit code %d\n%s%s", code, out, errOut)
	}
	s.says(t, cli.ExitRefused, "Nothing was written", "selftest", url)
	s.says(t, cli.ExitError, "LUN 7: ", "selftest", "iscsi://"+s.addr+"/"+storeName+"/7", "--destructive")
}

// An interrupted selftest removes its target. What a killed one leaves, the next one removes, but not the target of one that runs.
func TestSelftestInterrupted(t *testing.T) {
	if testkit.Race {
		t.Skip("the command runs in this process with the race detector")
	}
	s := newStation(t)
	scratch := func() string {
		for _, target := range read[[]schema.TargetState](t, s, "target", "list") {
			if scratchTarget.MatchString(target.Name) && len(target.LUNs) > 0 {
				return target.Name
			}
		}
		return ""
	}
	// stopped starts a selftest, and stops it when its target is there.
	stopped := func() (end func(unix.Signal)) {
		cmd := s.command(t, "selftest")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		testkit.Eventually(t, "the scratch target", func() bool { return scratch() != "" })
		cmd.Process.Signal(unix.SIGSTOP)
		return func(sig unix.Signal) {
			cmd.Process.Signal(sig)
			cmd.Process.Signal(unix.SIGCONT)
			if err := cmd.Wait(); err == nil {
				t.Error("selftest was not interrupted")
			}
		}
	}
	stopped()(unix.SIGINT)
	if name := scratch(); name != "" {
		t.Fatalf("%s is left after SIGINT", name)
	}
	end := stopped()
	running := scratch()
	if out := read[selftestOutput](t, s, "selftest", "--transport", "tcp"); len(out.Removed) > 0 || scratch() != running {
		t.Errorf("a second selftest has removed %q of the first; %q is left of %q", out.Removed, scratch(), running)
	}
	end(unix.SIGKILL)
	if scratch() != running {
		t.Errorf("%q is left, not %q", scratch(), running)
	}
	if out := read[selftestOutput](t, s, "selftest", "--transport", "tcp"); !slices.Equal(out.Removed, []string{running}) {
		t.Errorf("the next selftest has removed %q, not %q", out.Removed, running)
	}
	if name := scratch(); name != "" {
		t.Errorf("%s is left", name)
	}
}

// Wrong command lines of selftest end in errors that name the flag.
func TestSelftestUsage(t *testing.T) {
	s := newStation(t)
	url := "iscsi://" + s.addr + "/" + storeName + "/0"
	for _, tc := range []struct {
		want string
		args []string
	}{
		{"wrong number of arguments", []string{url, url}},
		{"--transport must be tcp, iser or both", []string{"--transport", "rdma"}},
		{`--initiator-name: "me"`, []string{"--initiator-name", "me"}},
		{`--portal: "here" is not HOST:PORT`, []string{"--portal", "here"}},
		{"--destructive requires a URL", []string{"--destructive"}},
		{"names no LUN", []string{"iscsi://" + s.addr + "/" + storeName}},
		{"does not begin with iscsi:// or iser://", []string{"host"}},
		{"--portal is not for a URL", []string{url, "--destructive", "--portal", s.addr}},
		{"--transport tcp is not for iser://", []string{"iser" + strings.TrimPrefix(url, "iscsi"), "--destructive", "--transport", "tcp"}},
		{"--output must be table, json, yaml or jsonpath=EXPR", []string{"-o", "xml"}},
	} {
		s.says(t, cli.ExitUsage, tc.want, append([]string{"selftest"}, tc.args...)...)
	}
	s.says(t, cli.ExitNotFound, "no portal serves", "selftest", "--portal", "192.0.2.1:3260")
	s.says(t, cli.ExitUnreachable, "nowhere", "selftest", "--socket", s.dir+"/nowhere")
	if _, err := os.Stat(s.file); err != nil || scratchTarget.MatchString(s.text(t)) {
		t.Errorf("the configuration has a scratch target, %v", err)
	}
	s.says(t, cli.ExitError, "LUN 0: it has 1048576 bytes, and selftest requires 8388608", "selftest", url, "--destructive")
}
