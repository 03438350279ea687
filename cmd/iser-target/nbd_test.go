package main

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// An nbdServer is a qemu-nbd on an image of 4 MiB.
type nbdServer struct {
	t             *testing.T
	image, socket string
	cmd           *exec.Cmd
}

func newNBDServer(t *testing.T, dir string) *nbdServer {
	t.Helper()
	for _, p := range []string{"qemu-img", "qemu-nbd"} {
		if _, err := exec.LookPath(p); err != nil {
			backendtest.Unavailable(t, "%v. apt-get install qemu-utils", err)
		}
	}
	s := &nbdServer{t: t, image: filepath.Join(dir, "n.qcow2"), socket: filepath.Join(dir, "n")}
	if out, err := exec.Command("qemu-img", "create", "-q", "-f", "qcow2", s.image, "4M").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return s
}

func (s *nbdServer) start() {
	s.t.Helper()
	os.Remove(s.socket)
	s.cmd = exec.Command("qemu-nbd", "--socket", s.socket, "--persistent", "--shared", "0", "--export-name", "disk", "--discard", "unmap", "--format", "qcow2", s.image)
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := s.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	cmd := s.cmd
	s.t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	testkit.Eventually(s.t, "qemu-nbd listens", func() bool {
		nc, err := net.Dial("unix", s.socket)
		if err == nil {
			nc.Close()
		}
		return err == nil
	})
}

func (s *nbdServer) kill() {
	s.cmd.Process.Kill()
	s.cmd.Wait()
}

// A LUN on an NBD server: the server comes after the target, is killed and stopped under load, and the target is upgraded. No command fails, no data is
// lost, and a neighbor on another LUN does not wait.
func TestNBD(t *testing.T) {
	dir := t.TempDir()
	server := newNBDServer(t, dir)
	s := &station{dir: dir}
	s.configure(t, func(text string) string {
		return strings.Replace(text, "{id: 0, backend: memory", fmt.Sprintf(
			"{id: 0, backend: file, path: %s/d.img, size: 4MiB}, {id: 2, backend: nbd, path: 'nbd+unix:///disk?socket=%s'}, {id: 1, backend: memory", dir, server.socket), 1)
	})
	s.startProgram(t, executable(t))
	lun := func() schema.LUNState { return read[schema.LUNState](t, s, "lun", "show", storeName, "2") }
	if l := lun(); l.State != schema.NotReady || !strings.Contains(l.Reason, "no such file") {
		t.Errorf("without a server: %v, %q", l.State, l.Reason)
	}
	server.start()
	testkit.Eventually(t, "the LUN is ready", func() bool { return lun().State == schema.Ready })
	load := newTraffic(t, s.addr)
	neighbour := login(t, s.addr, initiator.Options{Name: hostName + "-neighbour"})
	if err := neighbour.Do(&initiator.Command{CDB: cdb.TestUnitReady}); err != nil {
		t.Fatal(err)
	}
	away := func(end, back func()) {
		t.Helper()
		load.flows(t)
		end()
		// The server is away until these have ended, so none of them waits for it.
		for range 100 {
			c := &initiator.Command{CDB: cdb.Read16(0, 8), In: make([]byte, 4096)}
			if err := neighbour.Do(c); err != nil || c.Status != 0 {
				t.Errorf("the neighbor: %v, status %#x", err, c.Status)
			}
		}
		back()
		load.flows(t)
	}
	away(server.kill, func() {
		testkit.Eventually(t, "the reason is shown", func() bool {
			l := lun()
			return l.Health == "degraded" && strings.Contains(l.Reason, "no connection to the NBD server")
		})
		server.start()
		testkit.Eventually(t, "the LUN is healthy", func() bool { return lun().Health == schema.Healthy })
	})
	away(func() { server.cmd.Process.Signal(syscall.SIGSTOP) }, func() { server.cmd.Process.Signal(syscall.SIGCONT) })
	s.ok(t, "upgrade")
	away(server.kill, server.start) // the new process has what the old one had not flushed, or the server has
	load.flows(t)
	load.end(t)
	s.supervised(t)
	s.cmd.Process.Signal(syscall.SIGTERM)
	if err := s.cmd.Wait(); err != nil {
		t.Errorf("the end: %v", err)
	}
}
