package daemon

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A LUN whose store cannot be opened at the start is not ready; other LUNs are. It becomes
// ready when the store can be opened.
func TestLUNWithoutStoreIsNotReady(t *testing.T) {
	dir := t.TempDir()
	disk, link := filepath.Join(dir, "disk.img"), filepath.Join(dir, "mnt", "disk.img")
	if err := os.Mkdir(filepath.Dir(link), 0o700); err != nil {
		t.Fatal(err)
	}
	yaml := fmt.Sprintf(`
state_dir: %s/state
portals: [{listen: "127.0.0.1:0"}]
targets:
  - name: %s
    initiators: ["*"]
    luns:
      - {id: 0, backend: memory, size: 4MiB}
      - {id: 1, backend: file, path: %s, size: 1MiB}
      - {id: 2, backend: block, path: %s/no-such-disk}
      - {id: 3, backend: gotgt, plugin: nonsense, path: /tmp/x}
      - {id: 4, backend: file, path: %s, size: 512}
`, dir, store, link, dir, write(t, "larger", strings.Repeat("x", 1024)))
	path := filepath.Join(dir, "c.yaml")
	if err := os.WriteFile(path, []byte(yaml), 0o600); err != nil {
		t.Fatal(err)
	}
	var naa string
	t.Run("first start", func(t *testing.T) { // creates the file
		l := &lab{Daemon: serveFile(t, path), t: t}
		s := l.login("a", store)
		if got := attentions(t, s, 1); got != "29/00" {
			t.Errorf("LUN 1: %s", got)
		}
		naa = l.State().Targets[0].LUNs[1].NAA
	})
	if err := os.Rename(link, disk); err != nil { // as if the file system were not mounted
		t.Fatal(err)
	}
	t.Run("missing", func(t *testing.T) {
		l := &lab{Daemon: serveFile(t, path), t: t}
		s := l.login("a", store)
		load(t, s)
		for lun, reason := range map[byte]string{1: "file is missing", 2: "no such file", 3: "nonsense", 4: "is 1KiB (1024 bytes), but its size is configured as 512 bytes"} {
			if got := attentions(t, s, lun); got != "29/00 2/04/03" { // LOGICAL UNIT NOT READY, MANUAL INTERVENTION REQUIRED
				t.Errorf("LUN %d: %s", lun, got)
			}
			inquiry := &initiator.Command{LUN: lun, In: make([]byte, 64), CDB: [16]byte{0x12, 1, 0x80, 0, 64}}
			st := l.State().Targets[0].LUNs[lun]
			if got := do(t, s, inquiry); got != "" || string(inquiry.In[4:20]) != st.NAA {
				t.Errorf("LUN %d: INQUIRY: %s, % x", lun, got, inquiry.In)
			}
			if st.State != schema.NotReady || !strings.Contains(st.Reason, reason) {
				t.Errorf("LUN %d: %+v", lun, st)
			}
		}
		if got := reportLUNs(t, s); !slices.Equal(got, []int{0, 1, 2, 3, 4}) {
			t.Errorf("LUNs %v", got)
		}
		if _, err := os.Stat(link); err == nil {
			t.Error("the missing file was created again")
		}
		if err := os.Rename(disk, link); err != nil {
			t.Fatal(err)
		}
		testkit.Eventually(t, "LUN 1 is ready", func() bool { return l.State().Targets[0].LUNs[1].State == schema.Ready })
		if got := attentions(t, s, 1); got != "28/00" || capacity(t, s, 1) != 1<<20 {
			t.Errorf("LUN 1 with its file: %s", got)
		}
		if got := l.State().Targets[0].LUNs[1].NAA; got != naa {
			t.Errorf("LUN 1 is %s, was %s", got, naa)
		}
		var texts []string
		for _, e := range l.Events(0) {
			if e.Event == "lun" && fmt.Sprint(e.Attrs["lun"]) == "1" {
				texts = append(texts, e.Text)
			}
		}
		if !slices.Equal(texts, []string{"LUN not ready", "LUN ready"}) {
			t.Errorf("events %q", texts)
		}
	})
}

// A file that the first start could not create is not missing: the next start creates it.
func TestFileThatNeverExistedIsCreatedLater(t *testing.T) {
	dir := t.TempDir()
	mnt := filepath.Join(dir, "mnt")
	path := write(t, "c.yaml", fmt.Sprintf(`
state_dir: %s/state
portals: [{listen: "127.0.0.1:0"}]
targets: [{name: %s, initiators: ["*"], luns: [{id: 0, backend: file, path: %s/disk.img, size: 1MiB}]}]
`, dir, store, mnt))
	var naa string
	t.Run("without its directory", func(t *testing.T) {
		l := serveFile(t, path).State().Targets[0].LUNs[0]
		if l.State != schema.NotReady {
			t.Errorf("%+v", l)
		}
		naa = l.NAA
	})
	if err := os.Mkdir(mnt, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Run("with it", func(t *testing.T) {
		if l := serveFile(t, path).State().Targets[0].LUNs[0]; l.State != schema.Ready || l.NAA != naa {
			t.Errorf("%+v; the NAA was %s", l, naa)
		}
	})
}

// A change that fails because its LUN is not ready changes nothing, and says so.
func TestFailedChangeOfLUNThatIsNotReady(t *testing.T) {
	var disk string
	with := func(lun string) string {
		return `{id: 0, backend: memory, size: 4MiB}, {id: 1, backend: file, ` + lun + `}`
	}
	l := newLab(t, func(l *lab) {
		disk = filepath.Join(l.dir, "mnt", "disk.img")
		l.luns = with(`path: ` + disk + `, size: 1MiB`)
	})
	before := l.State().Targets[0].LUNs[1]
	if before.State != schema.NotReady {
		t.Fatalf("LUN %+v", before)
	}
	for _, lun := range []string{`path: ` + disk + `, size: 2MiB`, `path: ` + disk + `, size: 1MiB, read_only: true`, `path: ` + disk + `.2, size: 1MiB`} {
		l.luns = with(lun)
		_, err := l.apply(ChangeOptions{Disrupt: true})
		if err == nil || !strings.HasSuffix(err.Error(), ". Nothing was changed") {
			t.Errorf("%s: %v", lun, err)
		}
		if after := l.State().Targets[0].LUNs[1]; !reflect.DeepEqual(after, before) {
			t.Errorf("%s: LUN %+v, was %+v", lun, after, before)
		}
	}
	if err := os.Mkdir(filepath.Dir(disk), 0o700); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the LUN is ready", func() bool { return l.State().Targets[0].LUNs[1].State == schema.Ready })
}
