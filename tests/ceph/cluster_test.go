package main

import (
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

// newCluster returns a cluster for the time of a test. make cluster requires it.
func newCluster(t testing.TB, o options) *cluster {
	t.Helper()
	required := os.Getenv("ISER_TARGET_CLUSTER") == "1"
	if err := missing(); required && err != nil {
		t.Fatal(err)
	} else if err != nil {
		t.Skip(err)
	}
	if !required {
		t.Skip("make cluster runs the tests on Ceph")
	}
	dir, err := os.MkdirTemp("", "ceph") // a path of a socket is short
	if err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	c, err := start(t.Context(), dir, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("a cluster of %d OSDs and %d copies is up after %v", o.osds, o.copies, time.Since(begun).Round(100*time.Millisecond))
	t.Cleanup(func() {
		if err := c.stop(); err != nil {
			t.Error(err)
		}
		os.RemoveAll(dir)
	})
	return c
}

// must returns the output of a program of Ceph.
func (c *cluster) must(t testing.TB, program string, args ...string) string {
	t.Helper()
	out, err := c.run(t.Context(), program, args...)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// A cluster with two copies serves an image after one of its OSDs was killed, and nothing of it is left at the end.
func TestCluster(t *testing.T) {
	var all []*daemon
	t.Run("up", func(t *testing.T) {
		c := newCluster(t, options{osds: 3, copies: 2, gib: 1})
		all = c.all
		c.must(t, "rbd", "create", "--size", "16M", pool+"/a")
		if out := c.must(t, "rbd", "ls", pool); strings.TrimSpace(out) != "a" {
			t.Errorf("images: %q", out)
		}
		c.signal("osd.1", syscall.SIGKILL)
		c.must(t, "rbd", "bench", "--io-type", "write", "--io-size", "64K", "--io-total", "16M", pool+"/a")
	})
	for _, d := range all {
		if d.cmd.ProcessState == nil {
			t.Errorf("%s has not ended", d.name)
		}
	}
}

// What a cluster cannot be is refused.
func TestOptions(t *testing.T) {
	if err := missing(); err != nil {
		t.Skip(err)
	}
	for _, o := range []options{{}, {osds: 1, copies: 2}, {osds: -1, copies: 1}} {
		if _, err := start(t.Context(), t.TempDir(), o); err == nil || !strings.Contains(err.Error(), "no more copies than OSDs") {
			t.Errorf("%+v: %v", o, err)
		}
	}
}
