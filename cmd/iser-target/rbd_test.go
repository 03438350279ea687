package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
	"github.com/iser-target/iser-target/tests/testkit/rbdfake"
)

// rbdDaemons returns the processes that have an image of rbdfake open.
func rbdDaemons(t *testing.T, images, image string) (pids []int) {
	t.Helper()
	list, err := filepath.Glob(filepath.Join(images, ".watchers", image+",*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range list {
		pid, err := strconv.Atoi(w[strings.LastIndexByte(w, ',')+1:])
		if err != nil {
			t.Fatal(err)
		}
		if syscall.Kill(pid, 0) == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// With process.paths, a LUN on an RBD image may be anywhere in its cluster: path is not a file. Its daemon can open no more than the target.
func TestRBDWithPaths(t *testing.T) {
	needsRoot(t)
	images := rbdfake.Install(t, "p", "out")
	for _, image := range []string{"p/disk", "out/disk"} {
		if err := os.WriteFile(filepath.Join(images, image), make([]byte, 1<<20), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	dir := t.TempDir()
	s := &station{dir: dir}
	s.configure(t, func(text string) string {
		text = strings.Replace(text, "{id: 0, backend: memory", "{id: 1, backend: rbd, path: 'rbd:p/disk'}, {id: 2, backend: rbd, path: 'rbd:out/disk'}, {id: 0, backend: memory", 1)
		return text + fmt.Sprintf("process: {paths: [%s, %s/p, %[2]s/.watchers, %[2]s/.locks]}\n", dir, images)
	})
	s.startProgram(t, executable(t))
	lun := func(id string) schema.LUNState { return read[schema.LUNState](t, s, "lun", "show", storeName, id) }
	testkit.Eventually(t, "the LUN is ready", func() bool { return lun("1").State == schema.Ready })
	testkit.Eventually(t, "the other is refused", func() bool {
		l := lun("2")
		return l.State == schema.NotReady && strings.Contains(l.Reason, "Permission denied")
	})
	session := login(t, s.addr, initiator.Options{Name: hostName})
	if err := session.Do(&initiator.Command{LUN: 1, CDB: cdb.TestUnitReady}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []*initiator.Command{
		{LUN: 1, CDB: cdb.Write16(0, 1), Out: make([]byte, 512)},
		{LUN: 1, CDB: [16]byte{0x35}},
	} {
		if err := session.Do(c); err != nil || c.Status != 0 {
			t.Errorf("%x: %v, status %#x", c.CDB, err, c.Status)
		}
	}
}

// A LUN on an RBD image: the image is created with the LUN, the daemon is killed under load, the image grows, the target is upgraded. No command
// fails, and a neighbor on another LUN does not wait. No daemon outlives the target, even if that is killed, and the next one has all data.
func TestRBD(t *testing.T) {
	images := rbdfake.Install(t, "p")
	dir := t.TempDir()
	s := &station{dir: dir}
	s.configure(t, func(text string) string {
		return strings.Replace(text, "{id: 0, backend: memory", fmt.Sprintf(
			"{id: 0, backend: file, path: %s/d.img, size: 4MiB}, {id: 2, backend: rbd, path: 'rbd:p/disk?id=x', size: 4MiB}, {id: 1, backend: memory", dir), 1)
	})
	s.startProgram(t, executable(t))
	image := filepath.Join(images, "p", "disk")
	if fi, err := os.Stat(image); err != nil || fi.Size() != 4<<20 {
		t.Fatalf("the image: %v, %v", fi, err)
	}
	lun := func() schema.LUNState { return read[schema.LUNState](t, s, "lun", "show", storeName, "2") }
	s.says(t, cli.ExitRefused, "make a snapshot with rbd snap create p/disk@NAME", "lun", "snapshot", "create", storeName, "2", "one")
	load := newTraffic(t, s.addr)
	neighbor := login(t, s.addr, initiator.Options{Name: hostName + "-neighbor"})
	if err := neighbor.Do(&initiator.Command{CDB: cdb.TestUnitReady}); err != nil {
		t.Fatal(err)
	}
	kill := func() {
		t.Helper()
		load.flows(t)
		for _, pid := range rbdDaemons(t, images, "p+disk") {
			syscall.Kill(pid, syscall.SIGKILL)
		}
		for until := time.Now().Add(500 * time.Millisecond); time.Now().Before(until); {
			c := &initiator.Command{CDB: cdb.Read16(0, 8), In: make([]byte, 4096)}
			if err := neighbor.Do(c); err != nil || c.Status != 0 {
				t.Errorf("the neighbor: %v, status %#x", err, c.Status)
			}
		}
		load.flows(t)
	}
	healthy := func() bool { return lun().Health == schema.Healthy }
	kill()
	testkit.Eventually(t, "the LUN is healthy", healthy)
	s.ok(t, "upgrade")
	kill()
	load.end(t)
	testkit.Eventually(t, "the LUN is healthy", healthy)
	s.says(t, cli.ExitOK, "the cluster answers, and has 1 image", "doctor", "--timeout", "2m")
	mend := rbdfake.Break(t, images, rbdfake.NoCaps)
	for _, want := range []string{"Ceph for LUN 2 of " + storeName, "client.x lacks capabilities for pool p", "ceph auth caps client.x mon 'profile rbd' osd 'profile rbd pool=p'"} {
		s.says(t, cli.ExitError, want, "doctor", "--timeout", "2m")
	}
	mend()
	s.ok(t, "lun", "resize", storeName, "2", "8MiB")
	if l := lun(); l.Size != 8<<20 {
		t.Errorf("the LUN has %d bytes", l.Size)
	}
	s.says(t, cli.ExitUsage, "not a URI like rbd:POOL/IMAGE", "lun", "create", storeName, "--id", "3", "--backend", "rbd", "--path", "p/other")
	s.says(t, cli.ExitError, "the pool has no image other", "lun", "create", storeName, "--id", "3", "--backend", "rbd", "--path", "rbd:p/other")
	s.ok(t, "lun", "create", storeName, "--id", "3", "--backend", "rbd", "--path", "rbd:p/other", "--size", "1MiB", "--dry-run")
	if _, err := os.Stat(filepath.Join(images, "p", "other")); err == nil {
		t.Error("a dry run has created an image")
	}

	daemons := rbdDaemons(t, images, "p+disk")
	if len(daemons) != 1 {
		t.Errorf("daemons of the image: %v", daemons)
	}
	content, err := os.ReadFile(image)
	if err != nil {
		t.Fatal(err)
	}
	s.killAll(t)
	testkit.Eventually(t, "no daemon runs", func() bool { return len(rbdDaemons(t, images, "p+disk")) == 0 })
	s.startProgram(t, executable(t))
	if l := lun(); l.State != schema.Ready || l.Size != 8<<20 {
		t.Errorf("after a kill of the target: %v, %d bytes, %s", l.State, l.Size, l.Reason)
	}
	session := login(t, s.addr, initiator.Options{Name: hostName})
	if err := session.Do(&initiator.Command{LUN: 2, CDB: cdb.TestUnitReady}); err != nil {
		t.Fatal(err)
	}
	const first, blocks = 1000, 64
	c := &initiator.Command{LUN: 2, CDB: cdb.Read16(first, blocks), In: make([]byte, blocks*512)}
	if err := session.Do(c); err != nil || c.Status != 0 || string(c.In) != string(content[first*512:(first+blocks)*512]) {
		t.Errorf("READ: %v, status %#x, or other data", err, c.Status)
	}
	s.cmd.Process.Signal(syscall.SIGTERM)
	if err := s.cmd.Wait(); err != nil {
		t.Errorf("the end: %v", err)
	}
	if left := rbdDaemons(t, images, "p+disk"); len(left) > 0 {
		t.Errorf("daemons after the end: %v", left)
	}

	// An image that is gone is not replaced by an empty one.
	if err := os.Rename(image, image+"-gone"); err != nil {
		t.Fatal(err)
	}
	s.startProgram(t, executable(t))
	testkit.Eventually(t, "the reason is known", func() bool { // on a slow machine an attempt may be in progress
		l := lun()
		return l.State == schema.NotReady && strings.Contains(l.Reason, "the pool has no image disk")
	})
}
