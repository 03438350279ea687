package rbd

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/rbdfake"
)

func TestMain(m *testing.M) {
	rbdfake.Main()
	os.Exit(m.Run())
}

const size = 1 << 20

// makeImage makes an image of pool p, and returns its URI.
func makeImage(t *testing.T, name string) string {
	t.Helper()
	uri := "rbd:p/" + name
	if created, err := Create(uri, size); err != nil || !created {
		t.Fatalf("Create: %v, %v", created, err)
	}
	return uri
}

// mustOpen opens a Store for the time of a test.
func mustOpen(t *testing.T, c Config) *Store {
	t.Helper()
	c.Said = func(line string) { t.Log(line) }
	s, err := Open(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil && !errors.Is(err, backend.ErrClosed) {
			t.Error("Close: ", err)
		}
	})
	return s
}

func must(t *testing.T, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// process returns the daemon that runs.
func (s *Store) process() *process {
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	return s.d.p
}

// want requires that data is at off.
func want(t *testing.T, s backend.Store, off int64, data []byte) {
	t.Helper()
	got := make([]byte, len(data))
	must(t, "ReadAt", s.ReadAt(got, off))
	if !bytes.Equal(got, data) {
		t.Errorf("the data at %d is not what was written", off)
	}
}

func TestContract(t *testing.T) {
	rbdfake.Install(t, "p")
	n := 0
	backendtest.Run(t, func(t *testing.T) backend.Store {
		n++
		return mustOpen(t, Config{URI: makeImage(t, fmt.Sprint(n)), Dir: t.TempDir()})
	})
}

// A daemon that is killed is back in time, although it leaves a lock behind that lasts for half a minute, and nothing is lost. A neighbor
// does not notice. At the end nothing is left but the images.
func TestDaemonIsKilled(t *testing.T) {
	images := rbdfake.Install(t, "p")
	dir := t.TempDir()
	s := mustOpen(t, Config{URI: makeImage(t, "a"), Dir: dir})
	neighbor := mustOpen(t, Config{URI: makeImage(t, "b"), Dir: dir})
	data := bytes.Repeat([]byte("0123456789abcdef"), 256)
	for i := range 3 {
		off := int64(i * len(data))
		must(t, "WriteAt", s.WriteAt(data, off))
		killed := s.process()
		must(t, "kill", killed.cmd.Process.Signal(syscall.SIGKILL))
		for range 20 {
			must(t, "the neighbor's WriteAt", neighbor.WriteAt(data, 0))
		}
		begun := time.Now()
		must(t, "WriteAt", s.WriteAt(data, off+8192))
		if d := time.Since(begun); d > 10*time.Second { // half a minute with the lock; tests/ceph measures it
			t.Errorf("a write took %v after the daemon was killed", d)
		}
		want(t, s, off, data)
		// The process may have answered until now.
		testkit.Eventually(t, "another daemon serves the Store", func() bool { return s.process() != killed && s.Inspect() == nil })
	}
	must(t, "Close", s.Close())
	must(t, "Close", neighbor.Close())
	for _, pattern := range []string{filepath.Join(dir, "*"), filepath.Join(images, ".locks", "*")} {
		if left, _ := filepath.Glob(pattern); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	}
}

// A daemon that cannot be started again makes the Store wait with the reason, until it can.
func TestDaemonStaysAway(t *testing.T) {
	images := rbdfake.Install(t, "p")
	s := mustOpen(t, Config{URI: makeImage(t, "a"), Dir: t.TempDir()})
	image := filepath.Join(images, "p", "a")
	must(t, "Rename", os.Rename(image, image+"-away"))
	must(t, "kill", s.process().cmd.Process.Signal(syscall.SIGKILL))
	testkit.Eventually(t, "the reason is known", func() bool {
		err := s.Inspect()
		return err != nil && strings.Contains(err.Error(), "the pool has no image a")
	})
	written := make(chan error, 1)
	go func() { written <- s.WriteAt([]byte("later"), 0) }()
	select {
	case err := <-written:
		t.Errorf("WriteAt without a daemon: %v", err)
	case <-time.After(300 * time.Millisecond):
	}
	must(t, "Rename", os.Rename(image+"-away", image))
	must(t, "WriteAt", <-written)
	want(t, s, 0, []byte("later"))
}

// Resize and Grow change the size while the Store is in use.
func TestSize(t *testing.T) {
	images := rbdfake.Install(t, "p")
	uri := makeImage(t, "a")
	s := mustOpen(t, Config{URI: uri, Dir: t.TempDir()})
	must(t, "WriteAt", s.WriteAt([]byte("begin"), 0))
	must(t, "Resize", s.Resize(2*size))
	must(t, "WriteAt", s.WriteAt([]byte("end"), 2*size-3))
	must(t, "Truncate", os.Truncate(filepath.Join(images, "p", "a"), 3*size))
	if n, err := s.Grow(); n != 3*size || err != nil {
		t.Errorf("Grow: %d, %v", n, err)
	}
	if n, err := s.Grow(); n != 3*size || err != nil {
		t.Errorf("Grow again: %d, %v", n, err)
	}
	must(t, "WriteAt", s.WriteAt([]byte("end"), 3*size-3))
	must(t, "Resize", s.Resize(size))
	if err := s.ReadAt(make([]byte, 1), size); !errors.Is(err, backend.ErrRange) {
		t.Errorf("ReadAt behind the end: %v", err)
	}
	killed := s.process()
	must(t, "kill", killed.cmd.Process.Signal(syscall.SIGKILL)) // the next daemon has the new size
	testkit.Eventually(t, "another daemon", func() bool {
		p := s.process()
		return p != nil && p != killed
	})
	want(t, s, 0, []byte("begin"))
	must(t, "Close", s.Close())
	if err := s.Resize(2 * size); !errors.Is(err, backend.ErrClosed) {
		t.Errorf("Resize after Close: %v", err)
	}
	s = mustOpen(t, Config{URI: uri, Size: 2 * size})
	if n := s.Info().Size; n != 2*size {
		t.Errorf("an image that was smaller than configured has %d bytes", n)
	}
}

// A target that was killed leaves a lock behind, which the next one knows and breaks. The lock of a daemon that runs stays.
func TestRecall(t *testing.T) {
	images := rbdfake.Install(t, "p")
	dir := t.TempDir()
	c := Config{URI: makeImage(t, "a"), Dir: dir}
	open := func() *Store {
		s, err := Open(c)
		must(t, "Open", err)
		return s
	}
	first := open()
	must(t, "WriteAt", first.WriteAt([]byte("first"), 0))
	lock := filepath.Join(images, ".locks", "p+a")
	second := open() // as in an upgrade
	if len(second.d.dead) > 0 {
		t.Error("the client of a daemon that runs counts as dead")
	}
	want(t, second, 0, []byte("first"))
	// As if both processes were gone.
	for _, s := range []*Store{first, second} {
		s.d.closing()
		s.process().kill()
		<-s.d.ended
	}
	if _, err := os.Stat(lock); err != nil {
		t.Fatal("a daemon that was killed has left no lock: ", err)
	}
	begun := time.Now()
	third := mustOpen(t, c)
	if d := time.Since(begun); d > 10*time.Second {
		t.Errorf("opened after %v", d)
	}
	want(t, third, 0, []byte("first"))
	var closing sync.WaitGroup
	for _, s := range []*Store{first, second} {
		closing.Go(func() { s.Close() }) // it has no daemon
	}
	closing.Wait()
}

// Open and Probe name what is wrong.
func TestErrors(t *testing.T) {
	images := rbdfake.Install(t, "p")
	uri := makeImage(t, "a")
	for _, tt := range []struct {
		c    Config
		want string
	}{
		{Config{URI: "rbd:p"}, "not a URI like rbd:POOL/IMAGE"},
		{Config{URI: "rbd:p/none"}, "rbd:p/none: the pool has no image none. rbd create p/none makes one"},
		{Config{URI: "rbd:none/a"}, "the cluster has no pool none"},
		{Config{URI: uri, Size: size / 2}, fmt.Sprintf("the image has %d bytes, but size says %d. Leave size out", size, size/2)},
		{Config{URI: uri, Size: 2 * size, ReadOnly: true}, fmt.Sprintf("less than %d", 2*size)},
		{Config{URI: uri, BlockSize: 513}, "block size 513"},
		{Config{URI: uri, Dir: "/none"}, "/none"},
	} {
		if tt.c.Dir == "" {
			tt.c.Dir = t.TempDir()
		}
		if _, err := Open(tt.c); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("Open %+v: %v, want %q", tt.c, err, tt.want)
		}
		if left, _ := filepath.Glob(tt.c.Dir + "/rbd-*-*"); len(left) > 0 {
			t.Errorf("Open %+v left %v behind", tt.c, left)
		}
	}
	for _, c := range []Config{{URI: uri}, {URI: uri, Size: 2 * size}, {URI: "rbd:p/new", Size: size}} {
		must(t, "Probe", Probe(c))
	}
	if err := Probe(Config{URI: "rbd:p/new"}); err == nil {
		t.Error("Probe of an image that does not exist, and is not created: no error")
	}
	if fi, err := os.Stat(filepath.Join(images, "p", "a")); err != nil || fi.Size() != size {
		t.Errorf("after Probe: %v, %v", fi, err)
	}
	if created, err := Create(uri, 2*size); created || err != nil {
		t.Errorf("Create of an image that exists: %v, %v", created, err)
	}
	t.Setenv("PATH", t.TempDir())
	if _, err := Open(Config{URI: uri}); err == nil || !strings.Contains(err.Error(), "apt-get install") {
		t.Errorf("without programs: %v", err)
	}
}

// A read-only Store takes no lock.
func TestReadOnly(t *testing.T) {
	rbdfake.Install(t, "p")
	uri := makeImage(t, "a")
	w := mustOpen(t, Config{URI: uri})
	must(t, "WriteAt", w.WriteAt([]byte("x"), 0))
	must(t, "Sync", w.Sync())
	r := mustOpen(t, Config{URI: uri, ReadOnly: true})
	want(t, r, 0, []byte("x"))
	if err := r.WriteAt([]byte("y"), 0); !errors.Is(err, backend.ErrReadOnly) {
		t.Errorf("WriteAt: %v", err)
	}
	if err := r.Resize(2 * size); !errors.Is(err, backend.ErrReadOnly) {
		t.Errorf("Resize: %v", err)
	}
}

// A daemon that does not answer does not keep Close longer than its limits.
func TestCloseWhileFrozen(t *testing.T) {
	rbdfake.Install(t, "p")
	defer func(d time.Duration) { closeTime = d }(closeTime)
	closeTime = 100 * time.Millisecond
	s := mustOpen(t, Config{URI: makeImage(t, "a"), Dir: t.TempDir()})
	real := childOf(t, s.process().cmd.Process.Pid)
	must(t, "SIGSTOP", syscall.Kill(real, syscall.SIGSTOP))
	written := make(chan error, 1)
	go func() { written <- s.WriteAt([]byte("x"), 0) }()
	time.Sleep(100 * time.Millisecond)
	begun := time.Now()
	if err := s.Close(); !errors.Is(err, backend.ErrUnsynced) {
		t.Errorf("Close: %v", err)
	}
	if d := time.Since(begun); d > closeTime+2*endTime+10*time.Second {
		t.Errorf("Close took %v", d)
	}
	if err := <-written; !errors.Is(err, backend.ErrClosed) {
		t.Errorf("WriteAt: %v", err)
	}
}

// childOf returns the only child of a process.
func childOf(t *testing.T, pid int) (child int) {
	t.Helper()
	files, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, f := range files {
		b, _ := os.ReadFile(f)
		i := bytes.LastIndexByte(b, ')')
		if i < 0 {
			continue
		}
		if fields := strings.Fields(string(b[i+1:])); fields[1] == fmt.Sprint(pid) {
			fmt.Sscan(filepath.Base(filepath.Dir(f)), &child)
			return child
		}
	}
	t.Fatalf("process %d has no child", pid)
	return 0
}

// A Store that gateways share ends when its client is fenced, or its daemon is killed, and writes nothing after that. Its clients are known
// by their addresses until they have closed the image, and a neighbor is not fenced.
func TestShared(t *testing.T) {
	images := rbdfake.Install(t, "p")
	uri, dir := makeImage(t, "a"), t.TempDir()
	neighbor := mustOpen(t, Config{URI: makeImage(t, "b"), Dir: dir, Shared: true})
	lost := make(chan error, 1)
	open := func() *Store {
		return mustOpen(t, Config{URI: uri, Dir: t.TempDir(), Shared: true, Lost: func(reason error) { lost <- reason }})
	}
	data := bytes.Repeat([]byte("0123456789abcdef"), 32)
	for name, end := range map[string]func(s *Store){
		"fenced by address": func(s *Store) {
			address, err := s.Address(t.Context())
			must(t, "Address", err)
			must(t, "Fence", Fence(t.Context(), uri, address))
		},
		"fenced as a watcher": func(*Store) { must(t, "Fence", Fence(t.Context(), uri, "")) },
		"daemon killed":       func(s *Store) { must(t, "kill", s.process().cmd.Process.Kill()) },
	} {
		t.Run(name, func(t *testing.T) {
			s := open()
			if s.Info().VolatileCache {
				t.Error("the Store says that it has a cache")
			}
			must(t, "WriteAt", s.WriteAt(data, 0))
			end(s)
			if err := <-lost; err == nil {
				t.Error("Lost was called without a reason")
			}
			if err := s.WriteAt(data, 512); !errors.Is(err, backend.ErrClosed) {
				t.Errorf("WriteAt after that: %v", err)
			}
			if err := s.Close(); err == nil {
				t.Error("Close says that nothing is under way")
			}
			must(t, "Fence", Fence(t.Context(), uri, "")) // the lock of a client that was killed goes with that, too
			next := open()
			want(t, next, 0, data)
			must(t, "Close", next.Close())
		})
	}
	s := open()
	must(t, "Resize", s.Resize(2*size))
	if err := <-lost; err == nil {
		t.Error("Lost was called without a reason after Resize")
	}
	if err := s.Close(); err == nil {
		t.Error("Close after Resize says that nothing is under way")
	}
	must(t, "Fence", Fence(t.Context(), uri, ""))
	s = open()
	if n := s.Info().Size; n != 2*size {
		t.Errorf("the image has %d bytes after Resize", n)
	}
	must(t, "Close", s.Close())
	must(t, "the neighbor's WriteAt", neighbor.WriteAt(data, 0))
	if _, err := neighbor.Address(t.Context()); err != nil {
		t.Error(err)
	}
	for _, address := range []string{"-h", "a b", "10.0.0.1;x"} {
		if err := Fence(t.Context(), uri, address); err == nil || !strings.Contains(err.Error(), "is not an address") {
			t.Errorf("Fence of %q: %v", address, err)
		}
	}
	must(t, "Close", neighbor.Close())
	if left, _ := filepath.Glob(filepath.Join(images, ".watchers", "*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}
