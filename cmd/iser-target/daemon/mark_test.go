package daemon

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A yard is a place where targets come and go with a file each.
type yard struct {
	t   *testing.T
	dir string
}

// serve runs a target with that state directory and a LUN on that file, whose key identity is as given, until
// the function returns. The neighbor is a LUN in memory.
func (y *yard) serve(stateDir, disk, identity string, f func(d *Daemon, l schema.LUNState, log string)) {
	y.t.Helper()
	if identity != "" {
		identity = ", identity: " + identity
	}
	path := filepath.Join(y.dir, "c.yaml")
	text := fmt.Sprintf("state_dir: %s\nportals: [{listen: \"127.0.0.1:0\"}]\ntargets:\n  - name: %s\n    initiators: [\"*\"]\n"+
		"    luns: [{id: 0, backend: file, path: %s, size: 1MiB%s}, {id: 1, backend: memory, size: 1MiB}]\n",
		filepath.Join(y.dir, stateDir), store, filepath.Join(y.dir, disk), identity)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		y.t.Fatal(err)
	}
	var log testkit.Log
	d, end := run(y.t, path, Options{LogTo: &log})
	defer func() {
		if err := end(); err != nil {
			y.t.Error(err)
		}
	}()
	luns := d.State().Targets[0].LUNs
	if luns[1].State != schema.Ready {
		y.t.Errorf("the neighbor is %s: %s", luns[1].State, luns[1].Reason)
	}
	f(d, luns[0], log.String())
}

// naa serves a file that must be ready, and returns its NAA.
func (y *yard) naa(stateDir, disk, identity, warning string) (naa string) {
	y.t.Helper()
	y.serve(stateDir, disk, identity, func(_ *Daemon, l schema.LUNState, log string) {
		y.t.Helper()
		if l.State != schema.Ready {
			y.t.Errorf("%s is %s: %s", disk, l.State, l.Reason)
		}
		if strings.Contains(log, "level=WARN msg=\"file of a LUN") != (warning != "") || !strings.Contains(log, warning) {
			y.t.Errorf("the log does not warn of %q:\n%s", warning, log)
		}
		naa = l.NAA
	})
	return naa
}

// copy copies a file with its attributes.
func (y *yard) copy(from, to string) {
	y.t.Helper()
	if out, err := exec.Command("cp", "-a", filepath.Join(y.dir, from), filepath.Join(y.dir, to)).CombinedOutput(); err != nil {
		y.t.Fatalf("cp: %v\n%s", err, out)
	}
}

// A state directory that was lost is noticed: the LUN is not ready, says why, and lun set decides what it
// becomes. Nobody loses the neighbor.
func TestLostStateDirectoryIsNoticed(t *testing.T) {
	for _, identity := range []string{"file", "new"} {
		t.Run(identity, func(t *testing.T) {
			y := &yard{t, t.TempDir()}
			before := y.naa("state", "disk.img", "", "")
			if again := y.naa("state", "disk.img", "", ""); again != before {
				t.Errorf("NAA %s, was %s", again, before)
			}
			y.serve("lost", "disk.img", "", func(d *Daemon, l schema.LUNState, _ string) {
				if l.State != schema.NotReady || !strings.Contains(l.Reason, before) || !strings.Contains(l.Reason, "identity") {
					t.Errorf("%s: %s", l.State, l.Reason)
				}
				set := func(doc *config.Document) error { return doc.SetLUN(store, 0, "identity", identity) }
				if _, err := d.Change(t.Context(), set, ChangeOptions{}); err != nil {
					t.Fatal(err)
				}
				testkit.Eventually(t, "the LUN is ready", func() bool { return d.State().Targets[0].LUNs[0].State == schema.Ready })
				if naa := d.State().Targets[0].LUNs[0].NAA; (naa == before) != (identity == "file") {
					t.Errorf("NAA %s, was %s", naa, before)
				}
			})
			y.serve("third", "disk.img", "", func(_ *Daemon, l schema.LUNState, _ string) {
				if l.State != schema.NotReady {
					t.Errorf("another lost state directory: %s", l.State)
				}
			})
		})
	}
}

// A file that was moved keeps its identity if the operator says so. A copy becomes another disk, with a
// warning, and two LUNs of one target never have the same identity.
func TestCopyOfAFileIsNoticed(t *testing.T) {
	y := &yard{t, t.TempDir()}
	first := y.naa("one", "disk.img", "", "")
	y.copy("disk.img", "moved.img")
	y.copy("disk.img", "copy.img")
	y.copy("disk.img", "twin.img")
	if moved := y.naa("two", "moved.img", "file", ""); moved != first {
		t.Errorf("the moved file has NAA %s, want %s", moved, first)
	}
	if moved := y.naa("two", "moved.img", "", ""); moved != first {
		t.Errorf("after a restart the moved file has NAA %s, want %s", moved, first)
	}
	if copied := y.naa("three", "copy.img", "", "is a copy of one with another identity"); copied == first {
		t.Error("the copy has the same NAA")
	}
	y.naa("three", "copy.img", "", "")
	y.serve("one", "twin.img", "file", func(_ *Daemon, l schema.LUNState, _ string) {
		if l.State != schema.NotReady || !strings.Contains(l.Reason, "two LUNs cannot have it") {
			t.Errorf("the twin is %s: %s", l.State, l.Reason)
		}
	})
	y.copy("copy.img", "disk.img") // in the place of the first
	if first != y.naa("one", "disk.img", "", "was served as another LUN before") {
		t.Error("a file in the place of another has another identity than its LUN had")
	}
}

// A device has no mark, so the log says when its target starts without the state directory that it had.
func TestLostStateDirectoryOfADeviceIsTold(t *testing.T) {
	const text = "LUNs on devices and servers get new ones"
	for _, c := range []struct {
		luns string
		want []bool // of each start
	}{
		{`{id: 0, backend: memory, size: 1MiB}, {id: 1, backend: block, path: /nonexistent/device}`, []bool{true, false}},
		{`{id: 0, backend: memory, size: 1MiB}`, []bool{false, false}},
	} {
		dir := t.TempDir()
		path := write(t, "c.yaml", fmt.Sprintf("state_dir: %s/state\nportals: [{listen: \"127.0.0.1:0\"}]\ntargets: [{name: \"%s\", initiators: [\"*\"], luns: [%s]}]\n", dir, store, c.luns))
		for start, want := range c.want {
			d, end := run(t, path, Options{})
			if got := strings.Contains(texts(d.Events(0)), text); got != want {
				t.Errorf("start %d with %s: told %v, want %v", start, c.luns, got, want)
			}
			if l := d.State().Targets[0].LUNs[0]; l.State != schema.Ready {
				t.Errorf("the neighbor is %s: %s", l.State, l.Reason)
			}
			if err := end(); err != nil {
				t.Error(err)
			}
		}
	}
}
