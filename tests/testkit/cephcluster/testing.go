package cephcluster

import (
	"os"
	"testing"
	"time"
)

// New returns a cluster for the time of a test. make cluster requires it.
func New(t testing.TB, o Options) *Cluster {
	t.Helper()
	required := os.Getenv("ISER_TARGET_CLUSTER") == "1"
	if err := Missing(); required && err != nil {
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
	c, err := Start(t.Context(), dir, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("a cluster of %d OSDs and %d copies is up after %v", o.OSDs, o.Copies, time.Since(begun).Round(100*time.Millisecond))
	t.Cleanup(func() {
		if err := c.Stop(); err != nil {
			t.Error(err)
		}
		os.RemoveAll(dir)
	})
	return c
}
