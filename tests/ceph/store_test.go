package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/backend/rbd"
	"github.com/iser-target/iser-target/tests/testkit/cephcluster"
)

// image makes an image and returns its URI.
func (c *cluster) image(t testing.TB, name, size string) string {
	t.Helper()
	c.must(t, "rbd", "create", "--size", size, cephcluster.Pool+"/"+name)
	return "rbd:" + cephcluster.Pool + "/" + name + "?conf=" + c.Conf
}

// open opens a Store for the time of a test.
func open(t testing.TB, c rbd.Config) *rbd.Store {
	t.Helper()
	c.Said = func(line string) { t.Log(line) }
	c.Lost = func(reason error) { t.Log("lost: ", reason) }
	c.Back = func(after time.Duration) { t.Log("back after ", after) }
	s, err := rbd.Open(c)
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

// One cluster with one OSD has all that the tests below need.
func TestStore(t *testing.T) {
	c := newCluster(t, cephcluster.Options{OSDs: 1, Copies: 1, GiB: 8})
	t.Run("contract", func(t *testing.T) {
		n := 0
		backendtest.Run(t, func(t *testing.T) backend.Store {
			n++
			return open(t, rbd.Config{URI: c.image(t, "contract"+string(rune('a'+n)), "1M"), Dir: t.TempDir()})
		})
	})
	t.Run("diagnose", func(t *testing.T) { c.diagnose(t) })
	t.Run("errors", func(t *testing.T) { c.errors(t) })
	t.Run("kill", func(t *testing.T) { c.kill(t) })
	t.Run("blocklist", func(t *testing.T) { c.blocklist(t) })
	t.Run("resize", func(t *testing.T) { c.resize(t) })
}

// errors requires that each thing that is wrong has its own error, in time.
func (c *cluster) errors(t *testing.T) {
	uri := c.image(t, "errors", "8M")
	other := filepath.Join(t.TempDir(), "other.conf")
	text, err := os.ReadFile(c.Conf)
	if err != nil {
		t.Fatal(err)
	}
	keyring := other + ".keyring"
	c.must(t, "ceph-authtool", "-C", keyring, "--gen-key", "-n", "client.admin")
	if err := os.WriteFile(other, bytes.Replace(text, []byte(c.Dir+"/keyring"), []byte(keyring), 1), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		c    rbd.Config
		want string
	}{
		{rbd.Config{URI: strings.Replace(uri, "/errors", "/none", 1)}, "the pool has no image none. rbd create rbd/none makes one"},
		{rbd.Config{URI: strings.Replace(uri, "rbd/errors", "none/errors", 1)}, "the cluster has no pool none"},
		{rbd.Config{URI: strings.Replace(uri, c.Conf, other, 1)}, "the cluster refuses client.admin"},
		{rbd.Config{URI: uri + "&id=nobody"}, "the cluster refuses client.nobody"},
		{rbd.Config{URI: uri + ".none"}, "conf cannot be read"},
		{rbd.Config{URI: uri, Size: 4 << 20}, "the image has 8388608 bytes, but size says 4194304"},
		{rbd.Config{URI: uri, Size: 16 << 20, ReadOnly: true}, "less than 16777216"},
		{rbd.Config{URI: "rbd:x"}, "not a URI like rbd:POOL/IMAGE"},
	} {
		begun := time.Now()
		s, err := rbd.Open(tt.c)
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%+v: %v, want %q", tt.c, err, tt.want)
		}
		if s != nil {
			s.Close()
		}
		if d := time.Since(begun); d > 20*time.Second {
			t.Errorf("%+v: an error after %v", tt.c, d)
		}
	}
}

// diagnose requires that rbd.Diagnose finds what keeps a user of this machine from an image, in the order in which an operator would mend it.
func (c *cluster) diagnose(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can act as another user")
	}
	nobody := &syscall.Credential{Uid: 65534, Gid: 65534}
	dir, err := os.MkdirTemp("", "diagnose")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	conf, keyring := filepath.Join(dir, "ceph.conf"), filepath.Join(dir, "keyring")
	text, err := os.ReadFile(c.Conf)
	if err != nil {
		t.Fatal(err)
	}
	text = bytes.Replace(text, []byte(c.Dir+"/keyring"), []byte(keyring), 1)
	write := func(path string, b []byte) {
		t.Helper()
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	find := func(image, want, mend string) {
		t.Helper()
		list := rbd.Diagnose(t.Context(), []string{"rbd:" + image + "?id=viewer&conf=" + conf}, nobody, 20*time.Second)
		switch {
		case want == "" && len(list) == 0:
		case len(list) != 1 || want == "" || !strings.Contains(list[0].Text, want) || !strings.Contains(list[0].Mend, mend):
			t.Errorf("%s: %+v, want %q and %q", image, list, want, mend)
		default:
			t.Logf("%s: %s: %s", image, list[0].Text, list[0].Mend)
		}
	}
	c.must(t, "rbd", "create", "--size", "4M", cephcluster.Pool+"/diagnose")
	chmod := func(path string, mode os.FileMode) {
		t.Helper()
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
	find(cephcluster.Pool+"/diagnose", "a directory that uid 65534 may not enter: "+dir, "chmod o+x "+dir)
	chmod(dir, 0o755)
	find(cephcluster.Pool+"/diagnose", conf+" does not exist", "ceph config generate-minimal-conf")
	write(conf, text)
	find(cephcluster.Pool+"/diagnose", conf+" is not readable for uid 65534", "chgrp 65534 "+conf)
	chmod(conf, 0o644)
	find(cephcluster.Pool+"/diagnose", "no keyring for client.viewer. Ceph looks for "+keyring, "ceph auth get-or-create client.viewer")
	c.must(t, "ceph-authtool", "-C", keyring, "--gen-key", "-n", "client.viewer")
	find(cephcluster.Pool+"/diagnose", keyring+" is not readable for uid 65534", "chgrp 65534 "+keyring)
	chmod(keyring, 0o644)
	find(cephcluster.Pool+"/diagnose", "the cluster refuses client.viewer", "ceph auth get-or-create client.viewer")
	write(keyring, []byte(c.must(t, "ceph", "auth", "get-or-create", "client.viewer", "mon", "allow r")))
	chmod(keyring, 0o644)
	find(cephcluster.Pool+"/diagnose", "client.viewer lacks capabilities for pool rbd", "ceph auth caps client.viewer mon 'profile rbd' osd 'profile rbd pool=rbd'")
	c.must(t, "ceph", "auth", "caps", "client.viewer", "mon", "profile rbd", "osd", "profile rbd pool=rbd")
	find(cephcluster.Pool+"/diagnose", "", "")
	find(cephcluster.Pool+"/none", "the pool rbd has no image none", "rbd create rbd/none")
	find(cephcluster.Pool+"/ns/none", "the pool rbd has no namespace ns", "rbd namespace create rbd/ns")
	find("none/none", "the cluster has no pool none", "ceph osd pool create none")
	for daemon, want := range map[string]string{"osd.0": "the monitors answer, but the OSDs of pool rbd do not within", "mon.a": "do not answer within"} {
		c.Signal(daemon, syscall.SIGSTOP)
		find(cephcluster.Pool+"/diagnose", want, "systemctl start ceph-"+daemon[:3]+".target")
		c.Signal(daemon, syscall.SIGCONT)
	}
	find(cephcluster.Pool+"/diagnose", "", "")
}

// pids returns the processes of that name that this one has started.
func pids(name string) (list []int) { return children(os.Getpid(), name) }

// A writer writes blocks at ever other places, and knows what it has written.
type writer struct {
	s       backend.Store
	content []byte
	n       int
	slowest time.Duration
}

const block = 64 << 10

func (w *writer) run(t *testing.T, until func() bool) {
	t.Helper()
	for ; !until(); w.n++ {
		off := w.n * 7 % (len(w.content) / block) * block
		b := w.content[off : off+block]
		for i := range b {
			b[i] = byte(w.n + i>>8)
		}
		begun := time.Now()
		if err := w.s.WriteAt(b, int64(off)); err != nil {
			t.Fatal("WriteAt: ", err)
		}
		w.slowest = max(w.slowest, time.Since(begun))
	}
}

func (w *writer) verify(t *testing.T, s backend.Store) {
	t.Helper()
	got := make([]byte, len(w.content))
	if err := s.ReadAt(got, 0); err != nil {
		t.Fatal("ReadAt: ", err)
	}
	if !bytes.Equal(got, w.content) {
		t.Error("what is read differs from what was written")
	}
}

// kill requires that a daemon that is killed while it writes is back within 2 s with all data, though its client has left a lock behind. A neighbor
// on another image does not notice.
func (c *cluster) kill(t *testing.T) {
	dir := t.TempDir()
	config := rbd.Config{URI: c.image(t, "kill", "32M"), Dir: dir}
	w := writer{s: open(t, config), content: make([]byte, 32<<20)}
	victim := pids("qemu-storage-daemon")
	neighbor := writer{s: open(t, rbd.Config{URI: c.image(t, "neighbor", "8M"), Dir: dir}), content: make([]byte, 8<<20)}
	var stop atomic.Bool
	aside := make(chan struct{})
	go func() {
		defer close(aside)
		neighbor.run(t, stop.Load)
	}()
	for range 3 {
		began := time.Now()
		w.run(t, func() bool { return time.Since(began) > time.Second })
		if err := syscall.Kill(victim[0], syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		w.slowest, began = 0, time.Now()
		w.run(t, func() bool { return time.Since(began) > 3*time.Second })
		t.Logf("the slowest write took %v", w.slowest)
		if w.slowest > 2*time.Second {
			t.Errorf("a write took %v after the daemon was killed", w.slowest)
		}
		all := pids("qemu-storage-daemon")
		victim = all[len(all)-1:] // the newest
	}
	stop.Store(true)
	<-aside
	if neighbor.slowest > 2*time.Second {
		t.Errorf("a write of the neighbor took %v", neighbor.slowest)
	}
	neighbor.verify(t, neighbor.s)
	w.verify(t, w.s)
	if err := w.s.Close(); err != nil {
		t.Error("Close: ", err)
	}
	w.verify(t, open(t, config))
}

// blocklist requires that a client on the blocklist is opened again, and no call fails.
func (c *cluster) blocklist(t *testing.T) {
	w := writer{s: open(t, rbd.Config{URI: c.image(t, "blocklist", "8M"), Dir: t.TempDir()}), content: make([]byte, 8<<20)}
	began := time.Now()
	w.run(t, func() bool { return time.Since(began) > time.Second })
	out := c.must(t, "rbd", "lock", "ls", cephcluster.Pool+"/blocklist")
	fields := strings.Fields(out)
	c.must(t, "ceph", "osd", "blocklist", "add", fields[len(fields)-1])
	before := pids("qemu-storage-daemon")
	w.slowest, began = 0, time.Now()
	w.run(t, func() bool { return time.Since(began) > 4*time.Second })
	t.Logf("the slowest write took %v", w.slowest)
	if after := pids("qemu-storage-daemon"); len(after) != 1 || after[0] == before[0] {
		t.Errorf("daemons %v, before %v: want another one", after, before)
	}
	w.verify(t, w.s)
}

// resize requires that an image grows under writes, by this target and by another program, with a short pause.
func (c *cluster) resize(t *testing.T) {
	config := rbd.Config{URI: c.image(t, "resize", "8M"), Dir: t.TempDir()}
	s := open(t, config)
	w := writer{s: s, content: make([]byte, 8<<20)}
	var stop atomic.Bool
	aside := make(chan struct{})
	go func() {
		defer close(aside)
		w.run(t, stop.Load)
	}()
	if err := s.Resize(16 << 20); err != nil {
		t.Error("Resize: ", err)
	}
	c.must(t, "rbd", "resize", "--size", "24M", "--no-progress", cephcluster.Pool+"/resize")
	if size, err := s.Grow(); err != nil || size != 24<<20 {
		t.Errorf("Grow: %d, %v", size, err)
	}
	if err := s.WriteAt([]byte("end"), 24<<20-3); err != nil {
		t.Error("WriteAt: ", err)
	}
	stop.Store(true)
	<-aside
	t.Logf("the slowest write took %v", w.slowest)
	if w.slowest > time.Second {
		t.Errorf("a write took %v", w.slowest)
	}
	if err := s.Resize(8 << 20); err != nil {
		t.Error("Resize: ", err)
	}
	if err := s.WriteAt([]byte("end"), 8<<20); !errors.Is(err, backend.ErrRange) {
		t.Errorf("WriteAt behind the end: %v", err)
	}
	w.verify(t, s)
	if err := s.Close(); err != nil {
		t.Error("Close: ", err)
	}
	config.Size = 12 << 20
	if size := open(t, config).Info().Size; size != 12<<20 {
		t.Errorf("an image that was smaller than configured has %d bytes", size)
	}
}
