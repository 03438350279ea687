package backend_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
)

// cloneLimit is the time that changes in progress have in these tests.
const cloneLimit = 5 * time.Second

// newEmpty creates an empty file.
func newEmpty(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// A clone has the data of its moment, and both files change alone afterwards.
func TestClone(t *testing.T) {
	for _, fstype := range []string{"xfs", "btrfs"} {
		t.Run(fstype, func(t *testing.T) {
			dir := backendtest.ReflinkFS(t, fstype)
			s, _, err := backend.OpenFile(backend.FileConfig{Path: filepath.Join(dir, "lun"), Size: 8 << 20})
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			before := bytes.Repeat([]byte{1}, 1<<20)
			if err := s.WriteAt(before, 1<<20); err != nil { // not synced
				t.Fatal(err)
			}
			free := func() (n int64) {
				_, n, err := backend.Usage(s)
				if err != nil {
					t.Fatal(err)
				}
				return n
			}
			room := free()
			snap := s.(backend.Snapshotter)
			if err := snap.CanClone(""); err != nil {
				t.Errorf("CanClone: %v", err)
			}
			f := newEmpty(t, filepath.Join(dir, "snap"))
			if _, err := snap.CloneTo(int(f.Fd()), cloneLimit); err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(s.WriteAt(bytes.Repeat([]byte{2}, 1<<20), 1<<20), s.Sync()); err != nil {
				t.Fatal(err)
			}
			got := make([]byte, 8<<20)
			if n, err := f.ReadAt(got, 0); n != len(got) {
				t.Fatalf("the clone has %d bytes: %v", n, err)
			}
			if !bytes.Equal(got[1<<20:2<<20], before) || !bytes.Equal(got[:1<<20], make([]byte, 1<<20)) || !bytes.Equal(got[2<<20:], make([]byte, 6<<20)) {
				t.Error("the clone has other data")
			}
			if taken := room - free(); taken > 4<<20 {
				t.Errorf("clone and change took %d bytes", taken)
			}
			if _, err := f.WriteAt([]byte{3}, 1<<20); err != nil {
				t.Fatal(err)
			}
			p := make([]byte, 1)
			if err := s.ReadAt(p, 1<<20); err != nil || p[0] != 2 {
				t.Errorf("a write to the clone changed the store to %d: %v", p[0], err)
			}
		})
	}
}

// A clone under load is a prefix: it has all writes that returned before the call, none that began after it, and with each
// write all that returned before that one began. Every writer numbers its writes, and passes the number of another
// writer's last write on.
func TestCloneIsPrefix(t *testing.T) {
	const writers, block, rounds = 4, 4096, 25
	dir := backendtest.ReflinkFS(t, "xfs")
	s, _, err := backend.OpenFile(backend.FileConfig{Path: filepath.Join(dir, "lun"), Size: 64 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var (
		done [writers]atomic.Uint64 // number of the last write that returned
		stop atomic.Bool
		wg   sync.WaitGroup
	)
	// Write n of writer w is block n of its area, and has what the others had written when it began.
	area := int64(64<<20) / writers
	at := func(w int, n uint64) int64 { return int64(w)*area + int64(n%uint64(area/block))*block }
	for w := range writers {
		wg.Go(func() {
			p := make([]byte, block)
			for n := uint64(1); !stop.Load(); n++ {
				binary.BigEndian.PutUint64(p, n)
				for o := range writers {
					binary.BigEndian.PutUint64(p[8+8*o:], done[o].Load())
				}
				write := s.WriteAt
				if n%64 == 0 {
					write = s.WriteDurable
				}
				if err := write(p, at(w, n)); err != nil {
					t.Error(err)
					return
				}
				done[w].Store(n)
			}
		})
	}
	var longest time.Duration
	for i := range rounds {
		f := newEmpty(t, filepath.Join(dir, "snap"))
		var before, after [writers]uint64
		for w := range writers {
			before[w] = done[w].Load()
		}
		waited, err := s.(backend.Snapshotter).CloneTo(int(f.Fd()), cloneLimit)
		if err != nil {
			t.Fatal(err)
		}
		longest = max(longest, waited)
		for w := range writers {
			after[w] = done[w].Load() + 1 // that one may be in progress
		}
		var last [writers]uint64
		p := make([]byte, block)
		var seen [writers][writers]uint64
		for w := range writers {
			for n := before[w]; ; n++ { // up to the first that is missing
				if _, err := f.ReadAt(p, at(w, n)); err != nil {
					t.Fatal(err)
				}
				if binary.BigEndian.Uint64(p) != n && n > 0 {
					break
				}
				last[w] = n
				for o := range writers {
					seen[w][o] = max(seen[w][o], binary.BigEndian.Uint64(p[8+8*o:]))
				}
			}
			if last[w] < before[w] || last[w] > after[w] {
				t.Errorf("round %d: writer %d had written %d before and at most %d after, and the clone has %d", i, w, before[w], after[w], last[w])
			}
		}
		for w := range writers {
			for o := range writers {
				if seen[w][o] > last[o] {
					t.Errorf("round %d: the clone has a write that began after write %d of writer %d, and not that: the last is %d", i, seen[w][o], o, last[o])
				}
			}
		}
		if err := os.Remove(f.Name()); err != nil {
			t.Fatal(err)
		}
	}
	stop.Store(true)
	wg.Wait()
	t.Logf("writes waited %v at most", longest)
}

// While a file is cloned, writes wait, and reads and syncs do not. A write that hangs ends the clone, not the writes.
func TestCloneGate(t *testing.T) {
	dir := t.TempDir()
	s := openFile(t, backend.FileConfig{Path: filepath.Join(dir, "lun"), Size: 1 << 20})
	cloning, proceed := make(chan struct{}), make(chan struct{})
	writing, release := make(chan struct{}, 1), make(chan struct{})
	var hang atomic.Bool
	backend.Intercept(s, &backend.Hooks{
		Clone: func() error {
			close(cloning)
			<-proceed
			return unix.EOPNOTSUPP
		},
		Pwrite: func(p []byte, off int64, flags int, below func([]byte, int64, int) (int, error)) (int, error) {
			if hang.Load() {
				writing <- struct{}{}
				<-release
			}
			return below(p, off, flags)
		},
	})
	f := newEmpty(t, filepath.Join(dir, "snap"))
	clone := func(limit time.Duration) chan error {
		result := make(chan error, 1)
		go func() {
			_, err := s.(backend.Snapshotter).CloneTo(int(f.Fd()), limit)
			result <- err
		}()
		return result
	}

	hang.Store(true)
	wrote := make(chan error, 2)
	go func() { wrote <- s.WriteAt([]byte{1}, 0) }()
	<-writing
	if err := <-clone(50 * time.Millisecond); !errors.Is(err, backend.ErrUnsettled) {
		t.Fatalf("clone beside a write that hangs: %v", err)
	}
	hang.Store(false)
	if err := s.WriteAt([]byte{2}, 1); err != nil { // no write waits any longer
		t.Fatal(err)
	}
	close(release)
	if err := <-wrote; err != nil {
		t.Fatal(err)
	}

	result := clone(cloneLimit)
	<-cloning
	go func() { wrote <- s.WriteAt([]byte{3}, 2) }()
	go func() { wrote <- s.Discard(4096, 4096) }()
	p := make([]byte, 3)
	if err := errors.Join(s.ReadAt(p, 0), s.Sync()); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-wrote:
		t.Errorf("a write did not wait: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	if !bytes.Equal(p, []byte{1, 2, 0}) {
		t.Errorf("the store has %v", p)
	}
	close(proceed)
	if err := <-result; !errors.Is(err, backend.ErrNoReflink) {
		t.Errorf("clone: %v", err)
	}
	for range 2 {
		if err := <-wrote; err != nil {
			t.Error(err)
		}
	}
	if err := s.ReadAt(p, 0); err != nil || !bytes.Equal(p, []byte{1, 2, 3}) {
		t.Errorf("the store has %v: %v", p, err)
	}
}

// A store whose file system shares no blocks, or whose file is gone, says so, and closing it ends a wait.
func TestCloneRefused(t *testing.T) {
	dir := backendtest.Mount(t, "none", "tmpfs", "size=16m")
	path := filepath.Join(dir, "lun")
	s := openFile(t, backend.FileConfig{Path: path, Size: 1 << 20})
	snap := s.(backend.Snapshotter)
	f := newEmpty(t, filepath.Join(dir, "snap"))
	for name, err := range map[string]error{"CanClone": snap.CanClone(""), "CloneTo": cloneOf(snap, f)} {
		if !errors.Is(err, backend.ErrNoReflink) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := cloneOf(snap, f); !errors.Is(err, backend.ErrDeleted) {
		t.Errorf("after its end: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := cloneOf(snap, f); !errors.Is(err, backend.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
	f.Close()
	os.Remove(f.Name())
}

func cloneOf(s backend.Snapshotter, f *os.File) error {
	_, err := s.CloneTo(int(f.Fd()), cloneLimit)
	return err
}

// A FileBuilder that shares makes no copy where it cannot, and leaves nothing.
func TestBuildShared(t *testing.T) {
	build := func(c backend.BuildConfig) error {
		b, err := backend.NewFileBuilder(c)
		if err != nil {
			return err
		}
		defer b.Abort()
		if err := b.Build(t.Context(), func(backend.Progress) {}); err != nil {
			return err
		}
		defer b.Keep()
		return b.Publish()
	}
	for _, fstype := range []string{"xfs", "tmpfs"} {
		dir := ""
		if fstype == "tmpfs" {
			dir = backendtest.Mount(t, "none", "tmpfs", "size=16m")
		} else {
			dir = backendtest.ReflinkFS(t, fstype)
		}
		from, to := filepath.Join(dir, "from"), filepath.Join(dir, "to")
		data := bytes.Repeat([]byte{7}, 1<<20)
		if err := os.WriteFile(from, data, 0o600); err != nil {
			t.Fatal(err)
		}
		can := backend.CanShare(from, dir)
		if fstype == "tmpfs" != errors.Is(can, backend.ErrNoReflink) || fstype != "tmpfs" && can != nil {
			t.Errorf("CanShare on %s: %v", fstype, can)
		}
		err := build(backend.BuildConfig{Path: to, From: from, Share: true, Mode: 0o400})
		if fstype == "tmpfs" {
			if _, statErr := os.Lstat(to); !errors.Is(err, backend.ErrNoReflink) || !errors.Is(statErr, fs.ErrNotExist) {
				t.Errorf("tmpfs: %v, and the file: %v", err, statErr)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(to)
		st, _ := os.Stat(to)
		if err != nil || !bytes.Equal(got, data) || st.Mode().Perm() != 0o400 {
			t.Errorf("%d bytes, mode %v: %v", len(got), st.Mode(), err)
		}
	}
	dir := t.TempDir()
	boom := errors.New("a test")
	if err := build(backend.BuildConfig{Path: filepath.Join(dir, "a"), Size: 512, Fill: func(int) error { return boom }}); !errors.Is(err, boom) {
		t.Errorf("Fill: %v", err)
	}
	err := build(backend.BuildConfig{Path: filepath.Join(dir, "b"), Size: 512, Fill: func(fd int) error { return unix.Ftruncate(fd, 1024) }})
	if st, statErr := os.Stat(filepath.Join(dir, "b")); err != nil || statErr != nil || st.Size() != 1024 {
		t.Errorf("Fill: %v, %v", err, statErr)
	}
	if list, err := os.ReadDir(dir); err != nil || len(list) != 1 {
		t.Errorf("left: %v, %v", list, err)
	}
}
