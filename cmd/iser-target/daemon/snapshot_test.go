package daemon

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// reflinkLab returns a lab with LUN 0 and 1 on files that can share blocks, and LUN 2 on memory.
func reflinkLab(t *testing.T) *lab {
	dir := backendtest.ReflinkFS(t, "xfs")
	return newLab(t, func(l *lab) {
		l.dir = dir
		l.luns = l.disk(0, "0.img", "") + ", " + l.disk(1, "1.img", "") + ", {id: 2, backend: memory, size: 4MiB}"
	})
}

// A snapshot under load has each write whose status came before the request, and none that was sent after the answer. A
// neighbor at another LUN writes meanwhile, and keeps its data.
func TestSnapshotUnderLoad(t *testing.T) {
	const rounds, area = 12, 512 // blocks
	l := reflinkLab(t)
	var (
		stop atomic.Bool
		wg   sync.WaitGroup
		done [2]atomic.Uint64
		slow [2]time.Duration
	)
	for id := range 2 { // initiator 0 writes to LUN 0, of which the snapshots are, and initiator 1 to LUN 1
		s := l.login(fmt.Sprint("host", id), store)
		attentions(t, s, byte(id))
		wg.Go(func() {
			block := make([]byte, 512)
			for n := uint64(1); !stop.Load(); n++ {
				binary.BigEndian.PutUint64(block, n)
				c := &initiator.Command{LUN: byte(id), CDB: cdb.Write10(uint32(n%area), 1), Out: block}
				began := time.Now()
				if err := s.Do(c); err != nil || c.Status != 0 {
					t.Errorf("write %d to LUN %d: status %#x, %v", n, id, c.Status, err)
					return
				}
				slow[id] = max(slow[id], time.Since(began))
				done[id].Store(n)
			}
		})
	}
	for i := range rounds {
		name := fmt.Sprint("s", i)
		neighbor, before := done[1].Load(), done[0].Load()
		snap, err := l.Snapshot(t.Context(), store, 0, name, false)
		if err != nil {
			t.Fatal(err)
		}
		after := done[0].Load() + 1 // that one may be in progress
		data, err := os.ReadFile(snap.Path)
		if err != nil || int64(len(data)) != snap.Size {
			t.Fatalf("%d bytes, want %d: %v", len(data), snap.Size, err)
		}
		last := uint64(0)
		for b := range area {
			last = max(last, binary.BigEndian.Uint64(data[512*b:]))
		}
		if last < before || last > after {
			t.Errorf("round %d: %d writes had their status before the request, %d were sent before the answer, and the snapshot has %d", i, before, after, last)
		}
		for n := max(1, int64(last)-area+1); n <= int64(last); n++ { // none is missing
			if got := binary.BigEndian.Uint64(data[512*(n%area):]); got != uint64(n) {
				t.Fatalf("round %d: the snapshot has write %d and not %d, but %d in its place", i, last, n, got)
			}
		}
		for done[1].Load() < neighbor+2 && !t.Failed() {
			time.Sleep(time.Millisecond)
		}
	}
	stop.Store(true)
	wg.Wait()
	t.Logf("%d and %d writes; the slowest took %v and %v", done[0].Load(), done[1].Load(), slow[0], slow[1])
	list, err := l.Snapshots(t.Context(), store)
	if err != nil || len(list) != rounds || list[0].Name != "s0" || list[0].Created.IsZero() || list[0].Used == 0 {
		t.Errorf("%d snapshots, want %d: %+v, %v", len(list), rounds, list, err)
	}
}

// A snapshot can be served and cloned, is not written to, and is deleted when nobody uses it.
func TestSnapshotServedAndCloned(t *testing.T) {
	l := reflinkLab(t)
	s := l.login("host0", store)
	attentions(t, s, 0)
	write := func(lun byte, fill byte) {
		t.Helper()
		if got := do(t, s, &initiator.Command{LUN: lun, CDB: cdb.Write10(0, 1), Out: bytes.Repeat([]byte{fill}, 512)}); got != "" {
			t.Fatalf("WRITE to LUN %d: %s", lun, got)
		}
	}
	read := func(lun byte) byte {
		t.Helper()
		c := &initiator.Command{LUN: lun, CDB: cdb.Read10(0, 1), In: make([]byte, 512)}
		if got := do(t, s, c); got != "" {
			t.Fatalf("READ of LUN %d: %s", lun, got)
		}
		return c.In[0]
	}
	write(0, 1)
	snap, err := l.Snapshot(t.Context(), store, 0, "one", false)
	if err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(snap.Path); err != nil || fi.Mode().Perm() != 0o400 || filepath.Dir(snap.Path) != l.dir {
		t.Errorf("%s: %v, %v", snap.Path, fi.Mode(), err)
	}
	write(0, 2)
	clone := func(id int, from schema.CloneSource, path string) error {
		c := backend.BuildConfig{Path: path}
		if err := l.CloneConfig(t.Context(), &c, &from); err != nil {
			return err
		}
		b, err := l.NewFileBuilder(c)
		if err != nil {
			return err
		}
		defer b.Abort()
		if err := b.Build(t.Context(), func(backend.Progress) {}); err != nil {
			return err
		}
		n := config.LUN{ID: id, Backend: "file", Path: path, Size: config.Size(b.Size()), BlockSize: int(c.BlockSize)}
		_, err = l.Change(t.Context(), func(d *config.Document) error { return d.AddLUN(store, n) }, ChangeOptions{File: b})
		return err
	}
	if err := clone(7, schema.CloneSource{Target: store, LUN: 0, Snapshot: "one"}, filepath.Join(l.dir, "7.img")); err != nil {
		t.Fatal(err)
	}
	if err := clone(8, schema.CloneSource{Target: store, LUN: 0}, filepath.Join(l.dir, "8.img")); err != nil {
		t.Fatal(err)
	}
	attentions(t, s, 0)
	attentions(t, s, 7)
	attentions(t, s, 8)
	if a, b, c := read(0), read(7), read(8); a != 2 || b != 1 || c != 2 {
		t.Errorf("LUN %d, clone of the snapshot %d, clone of the LUN %d", a, b, c)
	}
	write(7, 7)
	write(8, 8)
	if got := read(0); got != 2 {
		t.Errorf("the LUN has %d after its clones were written to", got)
	}
	if a, b := l.lunState(0), l.lunState(7); a.NAA == b.NAA || a.Size != b.Size || a.BlockSize != b.BlockSize {
		t.Errorf("the clone is %+v, and the LUN %+v", b, a)
	}
	serve := func(more string) error {
		_, err := l.Change(t.Context(), func(d *config.Document) error {
			return d.AddLUN(store, config.LUN{ID: 9, Backend: "file", Path: snap.Path, Size: config.Size(snap.Size), BlockSize: 512, ReadOnly: more != ""})
		}, ChangeOptions{})
		return err
	}
	if err := serve(""); err == nil || !strings.Contains(err.Error(), "is a snapshot") {
		t.Errorf("serving it for writing: %v", err)
	}
	if err := serve("read only"); err != nil {
		t.Fatal(err)
	}
	attentions(t, s, 0)
	attentions(t, s, 9)
	if got := read(9); got != 1 {
		t.Errorf("the snapshot has %d", got)
	}
	wantCode := func(what string, err error, code schema.Code) {
		t.Helper()
		var e *schema.Error
		if !errors.As(err, &e) || e.Code != code {
			t.Errorf("%s: %v, want %s", what, err, code)
		}
	}
	_, err = l.DeleteSnapshot(t.Context(), store, 0, "one", false)
	wantCode("deleting what is served", err, schema.Refused)
	if _, err := l.Change(t.Context(), func(d *config.Document) error { return d.RemoveLUN(store, 9) }, ChangeOptions{Disrupt: true, Now: true}); err != nil {
		t.Fatal(err)
	}
	other, err := os.Open(snap.Path)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Flock(int(other.Fd()), unix.LOCK_SH|unix.LOCK_NB); err != nil { // another target
		t.Fatal(err)
	}
	_, err = l.DeleteSnapshot(t.Context(), store, 0, "one", false)
	wantCode("deleting what another target serves", err, schema.Refused)
	other.Close()

	// What is refused changes nothing.
	_, err = l.Snapshot(t.Context(), store, 0, "one", false)
	wantCode("a name twice", err, schema.Exists)
	_, err = l.Snapshot(t.Context(), store, 2, "one", true)
	wantCode("of memory", err, schema.Refused)
	_, err = l.Snapshot(t.Context(), store, 0, "../one", false)
	wantCode("a path as name", err, schema.Invalid)
	if _, err = l.Snapshot(t.Context(), store, 5, "one", false); !errors.Is(err, ErrNotFound) {
		t.Errorf("of no LUN: %v", err)
	}
	wantCode("a clone elsewhere", clone(10, schema.CloneSource{Target: store, LUN: 0, Snapshot: "one"}, filepath.Join(t.TempDir(), "x")), schema.Refused)
	wantCode("a clone of a LUN elsewhere", clone(10, schema.CloneSource{Target: store, LUN: 0}, filepath.Join(t.TempDir(), "x")), schema.Refused)
	wantCode("a clone of nothing", clone(10, schema.CloneSource{Target: store, LUN: 0, Snapshot: "two"}, filepath.Join(l.dir, "x")), schema.NotFound)
	if err := clone(11, schema.CloneSource{Target: store, LUN: 0, Snapshot: "one", Copy: true}, filepath.Join(t.TempDir(), "x")); err != nil {
		t.Errorf("a copy elsewhere: %v", err)
	}

	if _, err := l.DeleteSnapshot(t.Context(), store, 0, "one", true); err != nil {
		t.Error(err)
	}
	if list, err := l.Snapshots(t.Context(), ""); err != nil || len(list) != 1 || list[0].Name != "one" || list[0].LUN != 0 {
		t.Errorf("snapshots %+v, %v", list, err)
	}
	if _, err := l.DeleteSnapshot(t.Context(), store, 0, "one", false); err != nil {
		t.Error(err)
	}
	_, err = l.DeleteSnapshot(t.Context(), store, 0, "one", false)
	wantCode("deleting it twice", err, schema.NotFound)
	if _, err := os.Lstat(snap.Path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file: %v", err)
	}
	attentions(t, s, 7)
	if got := read(7); got != 7 {
		t.Errorf("the clone has %d after its snapshot was deleted", got)
	}
}

// After kill -9 before any step, there is no snapshot, or a whole one, and no other file.
func TestKilledSnapshotIsWholeOrAbsent(t *testing.T) {
	text := func(dir string) string {
		return fmt.Sprintf("state_dir: %s/state\nportals: [{listen: \"127.0.0.1:0\"}]\ntargets: [{name: %s, initiators: [\"*\"], luns: [{id: 0, backend: file, path: %s/0.img, size: 1MiB}]}]\n", dir, store, dir)
	}
	if n, err := strconv.Atoi(os.Getenv(dieAt)); err == nil {
		d := serveFile(t, os.Getenv("DAEMON_TEST_FILE")+"/c.yaml", io.Discard)
		d.before = func(string) error {
			if n--; n < 0 {
				unix.Kill(os.Getpid(), unix.SIGKILL)
			}
			return nil
		}
		if _, err := d.Snapshot(t.Context(), store, 0, "one", false); err != nil {
			t.Fatal(err)
		}
		return
	}
	mount := backendtest.ReflinkFS(t, "xfs")
	seen := map[int]int{}
	for n := range 10 {
		dir := filepath.Join(mount, fmt.Sprint(n))
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		data := bytes.Repeat([]byte{byte(n + 1)}, 1<<20)
		if err := errors.Join(os.WriteFile(dir+"/c.yaml", []byte(text(dir)), 0o600), os.WriteFile(dir+"/0.img", data, 0o600)); err != nil {
			t.Fatal(err)
		}
		killed := runKilled(t, n, dir)
		d, end := run(t, dir+"/c.yaml", Options{})
		list, err := d.Snapshots(t.Context(), "")
		if err != nil {
			t.Fatal(err)
		}
		seen[len(list)]++
		for _, s := range list {
			if got, err := os.ReadFile(s.Path); err != nil || !bytes.Equal(got, data) {
				t.Errorf("killed before %d: the snapshot is not whole: %v", n, err)
			}
		}
		files, err := filepath.Glob(dir + "/*0.img*")
		hidden, _ := filepath.Glob(dir + "/.*")
		if err != nil || len(files)+len(hidden) != 1+len(list) {
			t.Errorf("killed before %d: files %q %q, and snapshots %+v", n, files, hidden, list)
		}
		if err := end(); err != nil {
			t.Error(err)
		}
		if !killed {
			if seen[0] < 2 || seen[1] < 2 {
				t.Errorf("without and with a snapshot: %v", seen)
			}
			return
		}
	}
	t.Error("a snapshot has more steps than this test knows")
}
