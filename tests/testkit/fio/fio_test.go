package fio_test

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/testkit/fio"
)

func TestParse(t *testing.T) {
	jobs, err := fio.Parse("# a comment\n[global]\nruntime=60\nbs = 8k\n\n[one]\nrw=read\n; another\n[two]\nstonewall\nrw=write\n")
	want := fio.Jobs{{"one", []string{"runtime=60", "bs = 8k", "rw=read"}}, {"two", []string{"runtime=60", "bs = 8k", "stonewall", "rw=write"}}}
	if err != nil || !reflect.DeepEqual(jobs, want) {
		t.Errorf("got %q, %v; want %q", jobs, err, want)
	}
	if got, want := jobs.Short(1500*time.Millisecond, 500*time.Millisecond).String(), `[one]
bs = 8k
rw=read
runtime=1500ms
thread
ramp_time=500ms
stonewall
[two]
bs = 8k
rw=write
runtime=1500ms
thread
ramp_time=500ms
stonewall
`; got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	// Jobs that ran at the same time still do.
	both, _ := fio.Parse("[a]\n[b]\n")
	if got := both.Short(time.Second, 0).String(); strings.Count(got, "stonewall") != 1 {
		t.Error(got)
	}
	for text, want := range map[string]string{
		"":                     "no jobs",
		"[global]\nbs=4k\n":    "no jobs",
		"[a]\nbs=4k\n[global]": "line 3: [global] after a job",
		"\n[a":                 `line 2: "[a" is not a section`,
	} {
		if _, err := fio.Parse(text); err == nil || err.Error() != want {
			t.Errorf("%q: got %v, want %s", text, err, want)
		}
	}
}

func TestLoad(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := fio.Load(dir, time.Second, 0); err == nil {
		t.Error("no error without job files")
	}
	write("b.fio", "[b]\nbs=4k\n")
	write("a.fio", "[a]\n")
	if jobs, err := fio.Load(dir, time.Second, 0); err != nil || !reflect.DeepEqual(jobs.Names(), []string{"a", "b"}) {
		t.Errorf("%v, %v", jobs.Names(), err)
	}
	write("c.fio", "[a]\n")
	if _, err := fio.Load(dir, time.Second, 0); err == nil || !strings.Contains(err.Error(), `c.fio: another file has a job "a", too`) {
		t.Errorf("a name twice: %v", err)
	}
	write("c.fio", "[c")
	if _, err := fio.Load(dir, time.Second, 0); err == nil || !strings.Contains(err.Error(), "c.fio: line 1: ") {
		t.Errorf("a bad file: %v", err)
	}
}

func TestResults(t *testing.T) {
	results, failed, err := fio.Results([]byte(`fio: pid=3, err=5/file:io_u.c:1845, func=io_u error, error=Input/output error
{"jobs": [
  {"jobname": "mixed", "error": 0, "read": {"total_ios": 70, "iops": 35.5, "bw_bytes": 145408, "clat_ns": {"percentile": {"99.000000": 9000, "99.900000": 12000}}},
   "write": {"total_ios": 30, "iops": 15, "bw_bytes": 61440, "clat_ns": {"percentile": {"99.900000": 12500}}},
   "iser_target": {"url": "iscsi://h/i/0", "target": {"cpu_seconds": 0.0025, "phases": []}}},
  {"jobname": "broken", "error": 5, "read": {"total_ios": 1, "iops": 1, "bw_bytes": 4096}, "write": {}},
  {"jobname": "idle", "error": 0, "read": {"total_ios": 0}, "write": {"total_ios": 0}}]}`))
	if want := map[string]fio.Result{"mixed": {50.5, 206848, 25, 12.5}}; err != nil || !reflect.DeepEqual(results, want) {
		t.Errorf("got %v, %v; want %v", results, err, want)
	}
	if len(failed) != 2 || failed["broken"].Error() != "fio reports error 5" || failed["idle"].Error() != "no I/O completed" {
		t.Errorf("failed: %v", failed)
	}
	if _, _, err := fio.Results([]byte("fio: no such device\n")); err == nil {
		t.Error("no error without JSON")
	}
}
