package tests

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/backend/backendtest"
)

// fio reads the jobs of examples/fio, each says whether it overwrites the disk, and each does its I/O in a short run.
func TestFioExamples(t *testing.T) {
	files, err := filepath.Glob("../examples/fio/*.fio")
	if err != nil || len(files) < 6 {
		t.Fatalf("%v, %v", files, err)
	}
	fio, noFio := exec.LookPath("fio")
	for _, path := range files {
		t.Run(filepath.Base(path), func(t *testing.T) {
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			text := string(b)
			writes := regexp.MustCompile(`(?m)^rw=(rand)?(rw|write)$`).MatchString(text)
			if writes != strings.Contains(text, "It OVERWRITES the disk.") {
				t.Errorf("it writes: %v, and its comment says otherwise", writes)
			}
			if !strings.Contains(text, "DISK=/dev/sdX fio examples/fio/"+filepath.Base(path)) {
				t.Error("its comment does not say how to run it")
			}
			if noFio != nil {
				backendtest.Unavailable(t, "%v (tests/interop/setup.sh installs it)", noFio)
			}
			dir := t.TempDir()
			disk := filepath.Join(dir, "disk")
			run := func(args ...string) []byte {
				cmd := exec.Command(fio, args...)
				cmd.Env = append(os.Environ(), "DISK="+disk)
				out, err := cmd.Output()
				if err != nil {
					t.Fatalf("fio %v: %v: %s", args, err, out)
				}
				return out
			}
			run("--parse-only", path)
			// On a small file, in the page cache, for a second.
			if err := os.WriteFile(disk, make([]byte, 32<<20), 0o600); err != nil {
				t.Fatal(err)
			}
			short := strings.NewReplacer("runtime=60", "runtime=1", "ramp_time=5\n", "", "direct=1", "direct=0").Replace(text)
			job := filepath.Join(dir, "short.fio")
			if err := os.WriteFile(job, []byte(short), 0o600); err != nil {
				t.Fatal(err)
			}
			var result struct {
				Jobs []struct {
					Name        string `json:"jobname"`
					Error       int
					Read, Write struct {
						IOs int `json:"total_ios"`
					}
				}
			}
			if err := json.Unmarshal(run("--output-format=json", job), &result); err != nil {
				t.Fatal(err)
			}
			for _, j := range result.Jobs {
				if j.Error != 0 || j.Read.IOs+j.Write.IOs == 0 {
					t.Errorf("%+v", j)
				}
			}
		})
	}
}
