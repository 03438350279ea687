package daemon

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

// dieAt is the variable that makes a test the process that is killed before the step with
// that number, from 0.
const dieAt = "DAEMON_TEST_DIE_AT"

// runKilled runs the test in another process, with dieAt n and a file or directory. It
// returns false if the process was not killed because it has fewer steps.
func runKilled(t *testing.T, n int, file string) (killed bool) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe, "-test.run=^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), dieAt+"="+strconv.Itoa(n), "DAEMON_TEST_FILE="+file)
	out, err := cmd.CombinedOutput()
	killed = cmd.ProcessState.Sys().(syscall.WaitStatus).Signal() == unix.SIGKILL
	if !killed && err != nil {
		t.Fatalf("before %d: %v\n%s", n, err, out)
	}
	return killed
}

// After kill -9 before any step of a change, the next process runs either the old or the new
// configuration, completely.
func TestKilledChangeIsMadeWhollyOrNotAtAll(t *testing.T) {
	if n, err := strconv.Atoi(os.Getenv(dieAt)); err == nil {
		changeAndDie(t, os.Getenv("DAEMON_TEST_FILE"), n)
		return
	}
	const most = 30
	seen := map[bool]int{}
	for n := range most {
		path, old, next := killedLab(t)
		killed := runKilled(t, n, path)
		d := serveFile(t, path, io.Discard)
		isOld, isNew := len(config.Diff(old, d.Effective())) == 0, len(config.Diff(next, d.Effective())) == 0
		if !isOld && !isNew || !killed && !isNew {
			t.Fatalf("before %d (killed: %v): what runs is neither the old state nor the new:\n%s", n, killed, d.Document().Bytes())
		}
		seen[isNew]++
		for _, l := range d.State().Targets[0].LUNs {
			if c := lunOf(targetOf(d.Effective(), store), l.ID); c == nil || l.State != schema.Ready || l.Size != int64(c.Size) {
				t.Errorf("before %d: LUN %d is %s (%s) with %d octets; configured: %+v", n, l.ID, l.State, l.Reason, l.Size, c)
			}
		}
		if !killed {
			if seen[false] == 0 || seen[true] < 5 {
				t.Errorf("%d ended with the old state, %d with the new: want both, and one for each step", seen[false], seen[true])
			}
			return
		}
	}
	t.Errorf("a change does more than %d things", most)
}

// killedText returns a configuration.
func killedText(dir, portals, luns string) string {
	return fmt.Sprintf(`
state_dir: %s/state
portals: [{listen: "127.0.0.1:0"}%s]
targets:
  - name: %s
    initiators: ["*"]
    luns:
%s`, dir, portals, store, luns)
}

// killedLab returns a configuration file, and the configurations before and after the change.
func killedLab(t *testing.T) (path string, old, next *config.Config) {
	t.Helper()
	dir := t.TempDir()
	path = filepath.Join(dir, "c.yaml")
	lun := func(id int, size string) string {
		return fmt.Sprintf("      - {id: %d, backend: file, path: %s/%d.img, size: %s}\n", id, dir, id, size)
	}
	before := killedText(dir, "", lun(0, "1MiB")+lun(1, "2MiB")+lun(2, "1MiB"))
	after := killedText(dir, `, {listen: "127.0.0.2:0", tpgt: 2}`, lun(0, "2MiB")+lun(1, "1MiB")+lun(3, "1MiB"))
	if err := os.WriteFile(path, []byte(before), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path+".next", []byte(after), 0o600); err != nil {
		t.Fatal(err)
	}
	for text, to := range map[string]**config.Config{before: &old, after: &next} {
		doc, err := config.NewDocument(path, []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		if *to, err = doc.Config(); err != nil {
			t.Fatal(err)
		}
	}
	return path, old, next
}

// changeAndDie applies the file path.next. The process is killed before the n-th step, if
// there are that many.
func changeAndDie(t *testing.T, path string, n int) {
	d := serveFile(t, path, io.Discard)
	d.before = func(string) error {
		if n--; n < 0 {
			unix.Kill(os.Getpid(), unix.SIGKILL)
		}
		return nil
	}
	doc, err := config.OpenDocument(path + ".next")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if _, err := d.Apply(ctx, doc, ChangeOptions{Disrupt: true, AllowShrink: true}); err != nil {
		t.Fatal(err)
	}
}
