package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cephcluster"
)

// A target with another user (process.user) and few files (process.paths) uses an image of Ceph: its qemu-storage-daemon has the same rights, reads the
// configuration and the keyring of Ceph, and is started again when it was killed.
func TestConfined(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root has rights to give up")
	}
	c := newCluster(t, cephcluster.Options{OSDs: 1, Copies: 1, GiB: 2})
	const nobody = 65534
	dir, err := os.MkdirTemp("", "confined")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	own, ceph := filepath.Join(dir, "own"), filepath.Join(dir, "ceph")
	for _, d := range []string{dir, own, ceph} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chown(own, nobody, nobody); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(c.Conf)
	if err != nil {
		t.Fatal(err)
	}
	key := c.must(t, "ceph", "auth", "get-or-create", "client.gateway", "mon", "profile rbd", "osd", "profile rbd pool="+cephcluster.Pool)
	for name, content := range map[string]string{
		"ceph.conf": strings.Replace(string(text), c.Dir+"/keyring", ceph+"/keyring", 1),
		"keyring":   key,
	} {
		path := filepath.Join(ceph, name)
		if err := os.WriteFile(path, []byte(content), 0o640); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(path, 0, nobody); err != nil {
			t.Fatal(err)
		}
	}
	c.must(t, "rbd", "create", "--size", "16M", cephcluster.Pool+"/confined")
	uri := fmt.Sprintf("rbd:%s/confined?id=gateway&conf=%s/ceph.conf", cephcluster.Pool, ceph)
	g := newGatewayIn(t, own, uri, fmt.Sprintf("process: {user: nobody, paths: [%s]}\n", own))
	g.ready(t)
	l := &load{session: g.login(t, "host")}
	l.start()
	l.flows(t)
	for range 2 {
		daemons := children(g.cmd.Process.Pid, "qemu-storage-daemon")
		if len(daemons) != 1 {
			t.Fatalf("daemons of the target: %v", daemons)
		}
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", daemons[0]))
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{"\nUid:\t65534\t65534\t", "\nCapEff:\t0000000000000400\n", "\nNoNewPrivs:\t1\n", "\nSeccomp:\t2\n"} {
			if !strings.Contains(string(status), want) {
				t.Errorf("the rights of the daemon lack %q:\n%s", want, status)
			}
		}
		if err := syscall.Kill(daemons[0], syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		testkit.Eventually(t, "another daemon", func() bool {
			now := children(g.cmd.Process.Pid, "qemu-storage-daemon")
			return len(now) == 1 && now[0] != daemons[0]
		})
		l.flows(t)
	}
	l.end(t)
	g.ready(t)
	l.verify(t, g.login(t, "second"))
}
