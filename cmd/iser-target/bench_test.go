package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/tests/testkit"
)

// bench measures over both transports, with the CPU time and the phases of the target, and refuses to overwrite data.
func TestBench(t *testing.T) {
	s := newStation(t)
	url := "://" + s.addr + "/" + storeName + "/0"
	table := s.ok(t, "bench", "iscsi"+url, "--bs", "512,4k", "--iodepth", "1,4", "--runtime", "1")
	if rows := strings.Count(table, "  read  "); rows != 4 || !strings.Contains(table, "TARGET CPU") || !strings.Contains(table, "target: backend") {
		t.Errorf("the table:\n%s", table)
	}
	s.ok(t, "bench", "iscsi"+url, "--bs", "128k", "--iodepth", "4", "--runtime", "1", "--skip-rx-copy", "--hipri")
	// The LUN is empty: it may be written once.
	write := []string{"bench", "iser" + url, "--rw", "randrw", "--rwmixread", "30", "--verify", "--runtime", "1", "--iodepth", "8", "-o", "json"}
	var out struct {
		Jobs []struct {
			Own struct {
				Verified int
				Target   struct {
					CPU    float64 `json:"cpu_seconds"`
					Phases []struct {
						Phase   string
						Count   int
						Seconds float64
					}
				}
			} `json:"iser_target"`
		}
	}
	if err := json.Unmarshal([]byte(s.ok(t, write...)), &out); err != nil {
		t.Fatal(err)
	}
	if len(out.Jobs) != 1 || out.Jobs[0].Own.Verified == 0 || out.Jobs[0].Own.Target.CPU <= 0 || len(out.Jobs[0].Own.Target.Phases) < 4 {
		t.Errorf("%+v", out)
	}
	s.says(t, cli.ExitRefused, "LUN 0 has data: the data of an earlier bench, at byte ", write...)
	base := filepath.Join(s.dir, "base.json")
	if err := os.WriteFile(base, []byte(s.ok(t, append(write, "--destructive", "--runtime", "3")...)), 0o600); err != nil {
		t.Fatal(err)
	}
	compared := s.ok(t, "bench", "iser"+url, "--rw", "randrw", "--rwmixread", "30", "--destructive", "--runtime", "2", "--iodepth", "8", "--baseline", base)
	if !strings.Contains(compared, "BASE IOPS") || !strings.Contains(compared, "Welch") || strings.Count(compared, "%") < 6 {
		t.Errorf("the comparison:\n%s", compared)
	}
	// Without the control API there is no column of the target. With its flag, that is an error.
	none := filepath.Join(s.dir, "none")
	t.Setenv("ISER_TARGET_CONTROL_SOCKET", none)
	s.says(t, cli.ExitUnreachable, none, "bench", "iscsi"+url, "--socket", none, "--runtime", "1")
}

// Ctrl-C prints what there is.
func TestBenchInterrupted(t *testing.T) {
	if testkit.Race {
		t.Skip("the command runs in this process with the race detector")
	}
	s := newStation(t)
	cmd := s.command(t, "bench", "iscsi://"+s.addr+"/"+storeName+"/0", "--runtime", "1h")
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the session of a run", func() bool { return len(read[[]schema.SessionState](t, s, "session", "list")) > 0 })
	time.Sleep(time.Second)
	cmd.Process.Signal(unix.SIGINT)
	err := cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != cli.ExitError || !strings.Contains(out.String(), "  read  ") ||
		!strings.Contains(errOut.String(), "interrupted: 1 of 1 runs have results") {
		t.Errorf("exit code %d, %v\n%s%s", code, err, &out, &errOut)
	}
}

// Wrong command lines of bench end in errors that name the flag.
func TestBenchUsage(t *testing.T) {
	s := newStation(t)
	url := "iscsi://" + s.addr + "/" + storeName + "/0"
	for _, tc := range []struct {
		want string
		args []string
	}{
		{"wrong number of arguments", nil},
		{"does not begin with iscsi:// or iser://", []string{"host"}},
		{"names no target", []string{"iscsi://host"}},
		{"names no LUN", []string{"iscsi://host/" + storeName}},
		{"must not contain a user or a secret", []string{"iscsi://anna:secret@host/" + storeName + "/0"}},
		{`--rw: "trim" is not one of`, []string{url, "--rw", "trim"}},
		{`--bs: "x" is not a size`, []string{url, "--bs", "4k,x"}},
		{`--bs: "9000000000000" is too large`, []string{url, "--bs", "9000000000000"}},
		{"--bs: 1000 is not a multiple of 512", []string{url, "--bs", "1000"}},
		{`--iodepth: "1k" is not a number`, []string{url, "--iodepth", "1k"}},
		{"--iodepth: 0 is not from 1", []string{url, "--iodepth", "0"}},
		{"--numjobs: 100 is not from 1 to 64", []string{url, "--numjobs", "100"}},
		{"--rwmixread: -1 is not a percentage", []string{url, "--rwmixread", "-1"}},
		{`--runtime: "soon" is not a time`, []string{url, "--runtime", "soon"}},
		{"--runtime: 0s is not from 1s", []string{url, "--runtime", "0"}},
		{`--ramp: "-1" is not a time`, []string{url, "--ramp", "-1"}},
		{`--rate: "fast" is not a size`, []string{url, "--rate", "fast"}},
		{"--rate-iops: -1 is negative", []string{url, "--rate-iops", "-1"}},
		{`--size: "-1" is not a size`, []string{url, "--size", "-1"}},
		{"--size: 2097152 bytes at --offset 0 are behind the end of the LUN", []string{url, "--size", "2m"}},
		{"--offset: 1048576 is behind the end of the LUN", []string{url, "--offset", "1m"}},
		{"--verify: --rw randread writes nothing", []string{url, "--verify"}},
		{"--connections: 65 is not from 1 to 64", []string{url, "--connections", "65"}},
		{`--initiator-name: "me"`, []string{url, "--initiator-name", "me"}},
		{"--output must be table, json or json+", []string{url, "-o", "yaml"}},
		{"--baseline requires --output table", []string{url, "-o", "json", "--baseline", "x"}},
		{"iWARP has CRCs instead", []string{"iser://" + s.addr + "/" + storeName + "/0", "--data-digest"}},
		{"RDMA Writes place the data", []string{"iser://" + s.addr + "/" + storeName + "/0", "--skip-rx-copy"}},
		{"--chap-user requires --chap-secret-file", []string{url, "--chap-user", "anna"}},
		{"require --chap-user", []string{url, "--chap-secret-file", "x"}},
	} {
		s.says(t, cli.ExitUsage, tc.want, append([]string{"bench"}, tc.args...)...)
	}
	s.says(t, cli.ExitError, "--baseline: open none.json", "bench", url, "--baseline", "none.json")
	s.says(t, cli.ExitError, "--chap-secret-file: none: open none", "bench", url, "--chap-user", "anna", "--chap-secret-file", "none")
	s.says(t, cli.ExitError, "connection refused", "bench", "iscsi://127.0.0.1:1/"+storeName+"/0")
	s.says(t, cli.ExitError, "not found (0x0203)", "bench", "iscsi://"+s.addr+"/"+secondName+"/0")
	s.says(t, cli.ExitError, "LUN 5: ", "bench", "iscsi://"+s.addr+"/"+storeName+"/5")
}

// bench logs in with CHAP by files with secrets.
func TestBenchCHAP(t *testing.T) {
	s := newStation(t, func(text string) string {
		return strings.Replace(text, "    luns:", "    auth: {method: chap, users: [{name: anna, secret: in the dark of night, mutual: {name: store, secret: answer me target}}]}\n    luns:", 1)
	})
	secret, target := filepath.Join(s.dir, "secret"), filepath.Join(s.dir, "target")
	for path, text := range map[string]string{secret: "in the dark of night\n", target: "answer me target\n"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	args := []string{"bench", "iscsi://" + s.addr + "/" + storeName + "/0", "--runtime", "1", "--data-digest", "--connections", "2"}
	s.says(t, cli.ExitError, "authentication failure (0x0201)", args...)
	args = append(args, "--chap-user", "anna", "--chap-secret-file", secret)
	s.ok(t, append(args, "--chap-target-secret-file", target)...)
	short := filepath.Join(s.dir, "short")
	if err := os.WriteFile(short, []byte("short\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s.says(t, cli.ExitError, "--chap-target-secret-file: "+short+": the secret has 5 bytes, less than 12", append(args, "--chap-target-secret-file", short)...)
	s.says(t, cli.ExitError, "--chap-target-secret-file: "+secret+" has the same secret as --chap-secret-file", append(args, "--chap-target-secret-file", secret)...)
	if err := os.Chmod(secret, 0o644); err != nil {
		t.Fatal(err)
	}
	s.says(t, cli.ExitError, "--chap-secret-file: "+secret, args...)
}
