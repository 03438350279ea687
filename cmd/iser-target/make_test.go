package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
	"github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
)

// lun create builds files with all their space, and copies of files.
func TestMakeLUN(t *testing.T) {
	s := newStation(t)
	content := bytes.Repeat([]byte("iser"), 5000)
	if err := os.WriteFile(filepath.Join(s.dir, "from.img"), content, 0o600); err != nil {
		t.Fatal(err)
	}
	plan := read[schema.Plan](t, s, "lun", "create", storeName, "--path", "a.img", "--size", "8MiB", "--preallocate")
	if len(plan.Steps) != 1 || !plan.Steps[0].Done || !plan.Persisted {
		t.Errorf("plan %+v", plan)
	}
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(s.dir, "a.img"), &st); err != nil || st.Size != 8<<20 || st.Blocks*512 < st.Size {
		t.Errorf("preallocated: %d bytes, %d blocks of 512, error %v", st.Size, st.Blocks, err)
	}
	s.says(t, cli.ExitOK, "add LUN 2 of "+storeName+" (done)", "lun", "create", storeName, "--path", "b.img", "--from", "from.img")
	s.says(t, cli.ExitOK, "add LUN 3 of "+storeName+" (done)", "lun", "create", storeName, "--path", "c.img", "--from", "from.img", "--size", "1MiB", "--preallocate")
	s.says(t, cli.ExitOK, "add LUN 9 of "+storeName, "lun", "create", storeName, "--id", "9", "--path", "d.img", "--size", "1MiB", "--preallocate", "--dry-run")

	s.says(t, cli.ExitOK, "8MiB -> 12MiB (done)", "lun", "resize", storeName, "1", "12MiB", "--preallocate")
	s.says(t, cli.ExitOK, "12MiB -> 16MiB", "lun", "resize", storeName, "1", "16MiB", "--preallocate", "--dry-run")
	if err := unix.Stat(filepath.Join(s.dir, "a.img"), &st); err != nil || st.Size != 12<<20 || st.Blocks*512 < st.Size {
		t.Errorf("grown: %d bytes, %d blocks of 512, error %v", st.Size, st.Blocks, err)
	}
	s.says(t, cli.ExitError, "the backend file", "lun", "resize", storeName, "0", "2MiB", "--preallocate")
	s.says(t, cli.ExitNotFound, "LUN 9", "lun", "resize", storeName, "9", "2MiB", "--preallocate")

	session := s.login(t)
	for lun, size := range map[byte]int64{2: 20480, 3: 1 << 20} {
		if l := read[schema.LUNState](t, s, "lun", "show", storeName, fmt.Sprint(lun)); l.Size != size || l.State != schema.Ready {
			t.Errorf("LUN %+v, want %d bytes", l, size)
		}
		c := &initiator.Command{LUN: lun, In: make([]byte, 40*512)} // READ (10)
		c.CDB[0], c.CDB[8] = 0x28, 40
		for c.Status = 2; c.Status != 0; { // the first meets a unit attention
			if err := session.Do(c); err != nil {
				t.Fatal(err)
			}
		}
		if !bytes.Equal(c.In[:len(content)], content) || len(bytes.Trim(c.In[len(content):], "\x00")) > 0 {
			t.Errorf("LUN %d has another content than the file", lun)
		}
	}
	for _, tc := range []struct {
		code int
		want string
		args string
	}{
		{cli.ExitError, "It was not overwritten", "--path from.img --size 1MiB --preallocate"},
		{cli.ExitError, "more than the size", "--path d.img --size 512 --from from.img"},
		{cli.ExitError, "locked by a target", "--path d.img --from a.img"},
		{cli.ExitError, "no such file", "--path d.img --from none.img"},
		{cli.ExitError, "no such file", "--path none/d.img --size 1MiB --preallocate"},
		{cli.ExitUsage, "requires --size", "--path d.img --preallocate"},
		{cli.ExitError, "already", "--path d.img --from from.img --id 0"},
		{cli.ExitUsage, "backend file", "--backend memory --size 1MiB --preallocate"},
	} {
		s.says(t, tc.code, tc.want, append([]string{"lun", "create", storeName}, strings.Fields(tc.args)...)...)
	}
	if _, err := os.Lstat(filepath.Join(s.dir, "d.img")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file of a refused LUN: %v", err)
	}
	s.same(t, 4)
}

// slowly creates a LUN on a file that takes about a second to build, and calls while with
// the command when the target has begun. It returns the output of the command.
func (s *station) slowly(t *testing.T, path string, while func(*exec.Cmd)) (output string, code int) {
	t.Helper()
	cmd := s.command(t, "lun", "create", storeName, "--path", path, "--size", "1GiB", "--preallocate")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Process.Kill()
	s.wait(t, `(creating a file).*path=`+path)
	while(cmd)
	cmd.Wait()
	return out.String(), cmd.ProcessState.ExitCode()
}

// shared returns a directory in memory, where allocating space takes time.
func shared(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "iser-target-test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func empty(t *testing.T, dir string) bool {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	return len(list) == 0
}

// On a terminal, lun create draws a bar there, and writes its usual output.
func TestMakeLUNDrawsABar(t *testing.T) {
	s, p := newStation(t), newTerminal(t, 80, 24)
	var out bytes.Buffer
	cmd := s.command(t, "lun", "create", storeName, "--path", filepath.Join(shared(t), "a"), "--size", "256MiB", "--preallocate", "-o", "json")
	cmd.Stdout, cmd.Stderr = &out, p.tty
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v: %s", err, p.text())
	}
	var plan schema.Plan
	if err := json.Unmarshal(out.Bytes(), &plan); err != nil || len(plan.Steps) != 1 {
		t.Errorf("output %q: %v", out.String(), err)
	}
	bar := regexp.MustCompile(`^\rpreallocating \[=+ *\] .*% 128.0 MiB of 256.0 MiB\x1b\[K`)
	testkit.Eventually(t, "a progress bar on the terminal", func() bool {
		return bar.MatchString(p.text()) && strings.HasSuffix(p.text(), "\n")
	})
}

// attempts bounds how often a test tries to act before a file is complete.
const attempts = 10

// Other changes work while a file is built. The file itself cannot be built twice.
func TestChangesWhileAFileIsBuilt(t *testing.T) {
	s, dir := newStation(t), shared(t)
	c := client.New(s.socket)
	for i := range attempts {
		path := filepath.Join(dir, fmt.Sprint(i))
		meanwhile := false
		output, code := s.slowly(t, path, func(*exec.Cmd) {
			_, twice := c.AddLUN(t.Context(), storeName, schema.LUN{Backend: "file", Path: path, Size: "1GiB", Preallocate: true}, schema.Options{})
			var e *schema.Error
			busy := errors.As(twice, &e) && e.Code == schema.Busy && strings.Contains(e.Message, "another request is creating this file")
			if _, err := c.AddLUN(t.Context(), storeName, schema.LUN{Backend: "memory", Size: "1MiB"}, schema.Options{}); err != nil {
				t.Error(err)
			}
			_, err := os.Lstat(path)
			meanwhile = errors.Is(err, fs.ErrNotExist)
			if meanwhile && !busy {
				t.Errorf("the same file at the same time: %v", twice)
			}
		})
		if code != cli.ExitOK {
			t.Fatalf("exit code %d\n%s", code, output)
		}
		id := fmt.Sprint(2 * (i + 1))
		s.says(t, cli.ExitOK, "remove LUN "+id, "lun", "delete", storeName, id)
		os.Remove(path)
		if meanwhile {
			return
		}
	}
	t.Error("no change was faster than 1 GiB")
}

// An interrupted build leaves no file, whether the command or the target ends, and by
// whatever signal.
func TestInterruptedBuildLeavesNothing(t *testing.T) {
	s, dir, whole := newStation(t), shared(t), t
	for name, tc := range map[string]struct {
		signal syscall.Signal
		target bool // the target gets the signal
		says   string
		code   int
	}{
		"SIGINT":            {unix.SIGINT, false, "was not created", cli.ExitError},
		"SIGKILL":           {unix.SIGKILL, false, "", -1},
		"SIGKILL of target": {unix.SIGKILL, true, "ended before it answered", cli.ExitUnreachable},
		"SIGTERM of target": {unix.SIGTERM, true, "the target ends", cli.ExitError},
	} {
		t.Run(name, func(t *testing.T) {
			for i := range attempts {
				if i == attempts-1 {
					t.Fatal("no signal was faster than 1 GiB")
				}
				path := filepath.Join(dir, strings.ReplaceAll(name, " ", "-")+fmt.Sprint(i)) // the previous file may not be removed yet
				output, code := s.slowly(t, path, func(cmd *exec.Cmd) {
					victim := cmd
					if tc.target {
						victim = s.cmd
					}
					if err := victim.Process.Signal(tc.signal); err != nil {
						t.Error(err)
					}
				})
				if tc.target {
					s.cmd.Wait()
					if !empty(t, dir) && code != cli.ExitOK {
						t.Error("the target left a file")
					}
					s.process = start(whole, "serve", "--config", s.file)
				} else if code != cli.ExitOK {
					s.wait(t, `(file was not created).*path=`+path)
				}
				if n := len(read[[]schema.LUNState](t, s, "lun", "list", storeName)); code == cli.ExitOK || n == 2 { // too late
					s.says(t, cli.ExitOK, "remove LUN 1", "lun", "delete", storeName, "1")
					os.Remove(path)
					continue
				}
				if code != tc.code || !strings.Contains(output, tc.says) {
					t.Errorf("exit code %d, want %d with %q in\n%s", code, tc.code, tc.says, output)
				}
				testkit.Eventually(t, "nothing is left in the directory", func() bool { return empty(t, dir) })
				s.same(t, 1)
				return
			}
		})
	}
}

// A build that fails for lack of space leaves the file system as it was.
func TestBuildWithoutSpaceLeavesNothing(t *testing.T) {
	dir := backendtest.Mount(t, "none", "tmpfs", "size=4m")
	s := newStation(t)
	path := filepath.Join(dir, "a")
	s.says(t, cli.ExitError, "medium is full: 8388608 more bytes are required, and 4194304 are free", "lun", "create", storeName, "--path", path, "--size", "8MiB", "--preallocate")
	s.says(t, cli.ExitError, "Free space", "lun", "create", storeName, "--path", path, "--size", "8MiB", "--preallocate")
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil || st.Bfree != st.Blocks || !empty(t, dir) {
		t.Errorf("error %v, %d of %d blocks are free", err, st.Bfree, st.Blocks)
	}
	s.same(t, 1)
	s.says(t, cli.ExitOK, "add LUN 1", "lun", "create", storeName, "--path", path, "--size", "2MiB", "--preallocate")
	for _, want := range []string{"nothing was changed: " + path + ": medium is full", "Free space"} {
		s.says(t, cli.ExitError, want, "lun", "resize", storeName, "1", "8MiB", "--preallocate")
	}
	s.says(t, cli.ExitRefused, "--allow-shrink", "lun", "resize", storeName, "1", "1MiB", "--preallocate")
	if err := unix.Statfs(dir, &st); err != nil || st.Bfree != st.Blocks/2 {
		t.Errorf("error %v, %d of %d blocks are free, want half of them", err, st.Bfree, st.Blocks)
	}
	if l := read[schema.LUNState](t, s, "lun", "show", storeName, "1"); l.Size != 2<<20 || l.State != schema.Ready {
		t.Errorf("LUN %+v, want it unchanged", l)
	}
	s.says(t, cli.ExitOK, "2MiB -> 4MiB (done)", "lun", "resize", storeName, "1", "4MiB", "--preallocate")
}

// A LUN keeps its new size if the space of its file cannot be allocated.
func TestResizeWithoutAllocation(t *testing.T) {
	dir := backendtest.Mount(t, backendtest.MakeFS(t, "ext2", 16<<20, "-q"), "ext2", "") // it lacks fallocate(2)
	s := newStation(t)
	s.ok(t, "lun", "create", storeName, "--path", filepath.Join(dir, "a"), "--size", "2MiB")
	s.says(t, cli.ExitError, "the LUN has its new size, but not all its space is allocated", "lun", "resize", storeName, "1", "4MiB", "--preallocate")
	if l := read[schema.LUNState](t, s, "lun", "show", storeName, "1"); l.Size != 4<<20 || l.State != schema.Ready {
		t.Errorf("LUN %+v, want its new size", l)
	}
}
