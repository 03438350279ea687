package main

import (
	"strings"
	"syscall"
	"testing"

	"github.com/iser-target/iser-target/tests/testkit/cephcluster"
)

// A cluster is a Ceph cluster with what the tests do with it.
type cluster struct{ *cephcluster.Cluster }

func newCluster(t testing.TB, o cephcluster.Options) *cluster {
	t.Helper()
	return &cluster{cephcluster.New(t, o)}
}

// must returns the output of a program of Ceph.
func (c *cluster) must(t testing.TB, program string, args ...string) string {
	t.Helper()
	out, err := c.Run(t.Context(), program, args...)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// A cluster with two copies serves an image after one of its OSDs was killed, and nothing of it is left at the end.
func TestCluster(t *testing.T) {
	var all []*cephcluster.Daemon
	t.Run("up", func(t *testing.T) {
		c := newCluster(t, cephcluster.Options{OSDs: 3, Copies: 2, GiB: 1})
		all = c.All
		c.must(t, "rbd", "create", "--size", "16M", cephcluster.Pool+"/a")
		if out := c.must(t, "rbd", "ls", cephcluster.Pool); strings.TrimSpace(out) != "a" {
			t.Errorf("images: %q", out)
		}
		c.Signal("osd.1", syscall.SIGKILL)
		c.must(t, "rbd", "bench", "--io-type", "write", "--io-size", "64K", "--io-total", "16M", cephcluster.Pool+"/a")
	})
	for _, d := range all {
		if !d.Ended() {
			t.Errorf("%s has not ended", d.Name)
		}
	}
}

// An OSD that was killed comes back with what it had.
func TestRestart(t *testing.T) {
	c := newCluster(t, cephcluster.Options{OSDs: 3, Copies: 2, GiB: 2, BlueStore: true})
	c.must(t, "rbd", "create", "--size", "16M", cephcluster.Pool+"/a")
	c.Signal("osd.0", syscall.SIGKILL)
	c.must(t, "rbd", "bench", "--io-type", "write", "--io-size", "64K", "--io-total", "16M", cephcluster.Pool+"/a")
	if err := c.Restart(t.Context(), "osd.0"); err != nil {
		t.Fatal(err, c.must(t, "ceph", "-s"))
	}
}

// What a cluster cannot be is refused.
func TestOptions(t *testing.T) {
	if err := cephcluster.Missing(); err != nil {
		t.Skip(err)
	}
	for _, o := range []cephcluster.Options{{}, {OSDs: 1, Copies: 2}, {OSDs: -1, Copies: 1}} {
		if _, err := cephcluster.Start(t.Context(), t.TempDir(), o); err == nil || !strings.Contains(err.Error(), "no more copies than OSDs") {
			t.Errorf("%+v: %v", o, err)
		}
	}
}
