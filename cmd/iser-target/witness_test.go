package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/etcdserver"
	"github.com/iser-target/iser-target/tests/testkit/rbdfake"
)

// childOf returns the ID of the child of a process that runs the command, or 0.
func childOf(pid int, command string) int {
	for _, child := range testkit.Children(pid) {
		line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", child))
		if slices.Contains(strings.Split(string(line), "\x00"), command) {
			return child
		}
	}
	return 0
}

// When a gateway is killed, the other one takes over long before the lease expires, also after an upgrade, and after its witness was killed once. If the
// witness is killed with it, as by systemd, the next process makes sure of that. The
// supervisor of an upgraded target then ends as that did. A LUN that is not shared is served all the time.
func TestWitness(t *testing.T) {
	rbdfake.Install(t, "p")
	member := etcdserver.Start(t, 1)[0]
	a, b := startGateway(t, "a", 1, member.Endpoint(), "1m"), startGateway(t, "b", 2, member.Endpoint(), "6s")
	both := func(what string) {
		testkit.Eventually(t, what+": both gateways are there", func() bool {
			st := read[schema.ClusterState](t, a, "cluster", "status")
			return len(st.Gateways) == 2 && st.Reason == "" && st.LUNs[0].Owner != ""
		})
	}
	both("start")
	a.ok(t, "cluster", "handover", "1", "a")
	pa := &path{name: "a", addr: a.addr}
	w := watch(t, pa, &path{name: "b", addr: b.addr})
	ready := func(pid int) {
		testkit.Eventually(t, "the owner answers", func() bool {
			w.mu.Lock()
			defer w.mu.Unlock()
			return w.owner == "a" && w.acked > 0
		})
		testkit.Eventually(t, "it has a witness", func() bool { return childOf(pid, witnessName) != 0 })
		w.fresh()
	}
	defer useOwn(t, "all the time", b)()

	pid := a.cmd.Process.Pid
	ready(pid)
	before := childOf(pid, witnessName)
	if err := syscall.Kill(before, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "there is another witness", func() bool { n := childOf(pid, witnessName); return n != 0 && n != before })
	time.Sleep(500 * time.Millisecond) // until it is told of the leases
	if err := a.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	w.moved("kill -9", "b", 20*time.Second)
	again := func() {
		a.cmd.Wait()
		a.startProgram(t, executable(t)) // at once, under the same name
		pid = a.cmd.Process.Pid
		pa.set(a.addr)
	}
	again()
	both("restart")
	a.ok(t, "cluster", "handover", "1", "a")

	ready(pid)
	if err := syscall.Kill(childOf(pid, witnessName), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := a.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	again()
	w.moved("kill -9 with the witness, and a new process", "b", 20*time.Second)
	both("restart after that")
	a.ok(t, "cluster", "handover", "1", "a")

	a.ok(t, "upgrade")
	both("upgrade")
	a.ok(t, "cluster", "handover", "1", "a")
	pid = childOf(pid, "serve") // the supervisor also has what its descendants leave
	ready(pid)
	ended := make(chan error, 1)
	go func() { ended <- a.cmd.Wait() }()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	w.moved("kill -9 after an upgrade", "b", 20*time.Second)
	select {
	case <-ended:
	case <-time.After(testkit.Patience):
		t.Fatal("the supervisor does not end")
	}
	testkit.Eventually(t, "no file of leases is left", func() bool {
		files, err := filepath.Glob(filepath.Join(a.dir, "state", "leases.*"))
		return err == nil && len(files) == 0
	})
	if st := a.cmd.ProcessState.Sys().(syscall.WaitStatus); !st.Signaled() || st.Signal() != syscall.SIGKILL {
		t.Errorf("the supervisor ends with %v", a.cmd.ProcessState)
	}
}
