package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend/protection"
	"github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
	"github.com/iser-target/iser-target/tests/testkit/ports"
)

// withFile adds LUNs to a configuration: of files LUN 0, with checksums, LUN 2, and LUN 3, with protection information, and LUN 4 with
// protection information in memory. The memory LUN becomes LUN 1.
func withFile(dir string) func(string) string {
	return func(text string) string {
		return strings.Replace(text, "{id: 0, backend: memory", fmt.Sprintf("{id: 0, backend: file, path: %s/d.img, size: 4MiB, checksums: true}, {id: 2, backend: file, path: %[1]s/plain.img, size: 4MiB}, {id: 3, backend: file, path: %[1]s/pi.img, size: 4MiB, protection: 1}, {id: 4, backend: memory, size: 4MiB, protection: 3}, {id: 1, backend: memory", dir), 1)
	}
}

// withProtect sets RDPROTECT or WRPROTECT 001b.
func withProtect(c [16]byte) [16]byte {
	c[1] |= 1 << 5
	return c
}

// A traffic is verified load of one session over iSER, on the LUN without checksums, and one over TCP.
type traffic struct {
	done    atomic.Int64
	stop    chan struct{}
	running sync.WaitGroup
	failed  chan error
}

// newTraffic logs in and begins.
func newTraffic(t *testing.T, addr string) *traffic {
	t.Helper()
	l := &traffic{stop: make(chan struct{}), failed: make(chan error, 2)}
	s := login(t, addr, initiator.Options{Name: hostName + "-iser"})
	ready := &initiator.Command{LUN: 2, CDB: cdb.TestUnitReady}
	if err := s.Do(ready); err != nil || ready.Status != 2 { // the unit attention of the login
		t.Fatalf("TEST UNIT READY: %v, status %#x", err, ready.Status)
	}
	d, err := initiator.Dial(t.Context(), "tcp", addr, initiator.Options{Name: hostName + "-tcp", Target: storeName})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	if err := d.LogIn(nil); err != nil {
		t.Fatal(err)
	}
	l.running.Go(func() { l.failed <- (&initiator.Region{LUN: 2, First: 1000}).Pipeline(s, l.stop, &l.done) })
	l.running.Go(func() { l.failed <- (&initiator.Region{First: 2000}).Steps(d, l.stop, &l.done) })
	return l
}

// flows waits until commands end.
func (l *traffic) flows(t *testing.T) {
	t.Helper()
	before := l.done.Load()
	testkit.Eventually(t, "commands", func() bool { return l.done.Load() > before+50 || len(l.failed) > 0 })
	if len(l.failed) > 0 {
		t.Fatal(<-l.failed)
	}
}

// end ends the load, which must have been without an error.
func (l *traffic) end(t *testing.T) {
	t.Helper()
	close(l.stop)
	l.running.Wait()
	for range cap(l.failed) {
		if err := <-l.failed; err != nil {
			t.Error(err)
		}
	}
}

// serving returns the ID of the process that serves.
func (s *station) serving(t *testing.T) int {
	t.Helper()
	children := testkit.Children(s.cmd.Process.Pid)
	if len(children) != 1 {
		t.Fatalf("the supervisor has the children %d, want one", children)
	}
	return children[0]
}

// Ten upgrades under load cost no session, no command and no data, neither of a file nor of memory. Afterwards the
// first process stands for the last: it passes signals on, and ends with its exit code.
func TestUpgrade(t *testing.T) {
	dir := t.TempDir()
	s := &station{dir: dir}
	s.configure(t, withFile(dir), func(text string) string { return text + "metrics: {listen: \"127.0.0.1:0\"}\n" })
	s.startProgram(t, executable(t))
	owner := s.login(t)
	block := bytes.Repeat([]byte("protect!"), 64)
	wire := binary.BigEndian.AppendUint64(block, uint64(protection.New(protection.CRC(block), 0xcafe, 7)))
	for _, c := range []*initiator.Command{
		{CDB: cdb.TestUnitReady},
		{LUN: 1, CDB: cdb.TestUnitReady},
		{LUN: 1, CDB: cdb.Write16(7, 1), Out: bytes.Repeat([]byte("memory! "), 64)},
		{LUN: 1, CDB: [16]byte{0x56}}, // RESERVE(10)
		{LUN: 3, CDB: cdb.TestUnitReady},
		{LUN: 4, CDB: cdb.TestUnitReady},
		{LUN: 3, CDB: withProtect(cdb.Write16(7, 1)), Out: wire},
		{LUN: 4, CDB: withProtect(cdb.Write16(7, 1)), Out: wire},
	} {
		if err := owner.Do(c); err != nil {
			t.Fatal(err)
		}
	}
	load := newTraffic(t, s.addr)
	before := read[[]schema.SessionState](t, s, "session", "list")
	pids := map[string]bool{}
	for range 10 {
		load.flows(t)
		out := s.ok(t, "upgrade")
		t.Log(strings.TrimSpace(out))
		if !strings.Contains(out, "sessions 3 continue after a pause of ") || strings.Contains(out, "cut") {
			t.Errorf("upgrade: %s", out)
		}
		pids[strings.Fields(out)[1]] = true
	}
	load.flows(t)
	load.end(t)
	if len(pids) != 10 {
		t.Errorf("%d processes have served, want 10", len(pids))
	}
	if got := s.serving(t); !pids[strconv.Itoa(got)] {
		t.Errorf("process %d serves", got)
	}
	after := read[[]schema.SessionState](t, s, "session", "list")
	for i := range after {
		if len(after) != len(before) || after[i].TSIH != before[i].TSIH || !after[i].Started.Equal(before[i].Started) {
			t.Errorf("sessions %+v, before %+v", after, before)
		}
	}
	in := make([]byte, 512)
	if err := owner.Do(&initiator.Command{LUN: 1, CDB: cdb.Read16(7, 1), In: in}); err != nil || !bytes.HasPrefix(in, []byte("memory! ")) {
		t.Errorf("READ of the memory LUN: %v, %q", err, in[:16])
	}
	for _, lun := range []byte{3, 4} {
		in := make([]byte, len(wire))
		if err := owner.Do(&initiator.Command{LUN: lun, CDB: withProtect(cdb.Read16(7, 1)), In: in}); err != nil || !bytes.Equal(in, wire) {
			t.Errorf("READ of LUN %d with protection information: %v, % x", lun, err, in[504:])
		}
		if l := read[schema.LUNState](t, s, "lun", "show", storeName, strconv.Itoa(int(lun))); l.Checksums == nil || l.Checksums.Pending != 0 {
			t.Errorf("LUN %d: protection information is computed again: %+v", lun, l.Checksums)
		}
	}
	other := login(t, s.addr, initiator.Options{Name: hostName + "-other"})
	c := &initiator.Command{LUN: 1, CDB: cdb.Read16(7, 1), In: make([]byte, 512)}
	if err := other.Do(&initiator.Command{LUN: 1, CDB: cdb.TestUnitReady}); err != nil {
		t.Fatal(err)
	}
	if err := other.Do(c); err != nil || c.Status != 0x18 {
		t.Errorf("READ of a reserved LUN: %v, status %#x, want RESERVATION CONFLICT", err, c.Status)
	}
	// Corruption of what was written a moment ago is not taken for data, and not forgotten.
	damage(t, filepath.Join(dir, "d.img"), 2000*512+17)
	s.ok(t, "upgrade")
	s.says(t, cli.ExitError, "has 1 corrupt blocks", "lun", "scrub", storeName, "0", "--wait")
	s.ok(t, "upgrade")
	s.says(t, cli.ExitOK, "corrupt blocks      1", "lun", "show", storeName, "0")
	s.ok(t, "lun", "create", storeName, "--id", "9", "--backend", "memory", "--size", "1MiB") // it can be managed
	s.cmd.Process.Signal(unix.SIGTERM)
	if err := s.cmd.Wait(); err != nil {
		t.Errorf("the end: %v", err)
	}
	if _, err := os.Lstat(s.socket); err == nil {
		t.Error("the control socket was left behind")
	}
}

// SIGHUP right after an upgrade ends neither the first process, which is about to stand for the other one, nor that. SIGTERM ends both in order as soon as
// the first has begun to do so.
func TestSignalsAfterUpgrade(t *testing.T) {
	for _, after := range []time.Duration{0, 5 * time.Millisecond, 20 * time.Millisecond, 60 * time.Millisecond, 150 * time.Millisecond} {
		s := &station{dir: t.TempDir()}
		s.configure(t)
		s.startProgram(t, executable(t))
		s.ok(t, "upgrade")
		time.Sleep(after)
		s.cmd.Process.Signal(unix.SIGHUP)
		s.supervised(t)
		s.ok(t, "lun", "list")
		s.cmd.Process.Signal(unix.SIGTERM)
		if err := s.cmd.Wait(); err != nil {
			t.Errorf("SIGHUP %v after the upgrade, and SIGTERM: %v", after, err)
		}
		if _, err := os.Lstat(s.socket); err == nil {
			t.Error("the control socket was left behind")
		}
	}
}

// supervised waits until the first process stands for the one that serves, and passes signals on.
func (s *station) supervised(t *testing.T) {
	t.Helper()
	name := fmt.Sprintf("/proc/%d/", s.cmd.Process.Pid)
	testkit.Eventually(t, "the first process is a supervisor", func() bool {
		args, _ := os.ReadFile(name + "cmdline")
		comm, _ := os.ReadFile(name + "comm")
		return bytes.Contains(args, []byte("\x00"+supervisorName+"\x00")) && string(comm) == "iser-target\n"
	})
}

// damage changes a byte of a file.
func damage(t *testing.T, path string, off int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, 1)
	if _, err := f.ReadAt(b, off); err != nil {
		t.Fatal(err)
	}
	b[0]++
	if _, err := f.WriteAt(b, off); err != nil {
		t.Fatal(err)
	}
}

// An upgrade to a program that does not work changes nothing: neither for the sessions nor for a second, good, upgrade.
func TestFailedUpgrade(t *testing.T) {
	t.Run("child", func(t *testing.T) { failUpgrade(t, nil) })
	t.Run("sibling", func(t *testing.T) { failUpgrade(t, newMainManager(t)) })
}

// failUpgrade tries programs that do not work, under m if that is not nil. Then only m learns the exit status of the new process.
func failUpgrade(t *testing.T, m *mainManager) {
	dir := t.TempDir()
	program := filepath.Join(dir, "program")
	put := func(text string) {
		t.Helper()
		if err := os.WriteFile(program+".new", []byte(text), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(program+".new", program); err != nil {
			t.Fatal(err)
		}
	}
	s := &station{dir: dir}
	how := func(status string) string { return "ended: exit status " + status }
	if m != nil {
		s.env = m.environment()
		how = func(string) string { return "ended. Its messages" }
	}
	s.configure(t, withFile(dir))
	if err := os.Symlink(executable(t), program); err != nil {
		t.Fatal(err)
	}
	s.startProgram(t, program)
	load := newTraffic(t, s.addr)
	for _, tt := range []struct{ program, want string }{
		{"no program", "exec format error"},
		{"#!/bin/sh\necho at work; exit 7\n", how("7")},
		{"#!/bin/sh\nexec 3<&-\nexec sleep 1\n", how("0")},
		{"#!/bin/sh\nexec 3<&-\nexec sleep 60\n", "does not answer. It is no version of this program"},
	} {
		load.flows(t)
		put(tt.program)
		s.says(t, cli.ExitError, tt.want, "upgrade")
		s.says(t, cli.ExitError, "The target continues as it was", "upgrade")
	}
	if err := os.Remove(program); err != nil {
		t.Fatal(err)
	}
	s.says(t, cli.ExitError, "no such file", "upgrade")
	load.flows(t)
	if err := os.Symlink(executable(t), program); err != nil {
		t.Fatal(err)
	}
	s.says(t, cli.ExitOK, "sessions 2 continue", "upgrade")
	load.flows(t)
	load.end(t)
}

// Each process is killed at each message of an upgrade: before it sends one, and when it has received one. The other one
// serves. The sessions continue, unless the old process is killed before the new one has its state: then the new one starts
// like any other. The same holds for the sibling of a process under a service manager, which learns of the new process only after that serves.
func TestKilledUpgrade(t *testing.T) {
	type point struct {
		at   string
		ends bool // the sessions
	}
	for _, tt := range []struct {
		who    string
		points []point
	}{
		{"old", []point{
			{"received hello", true}, {"send prepare", true}, {"received ready", true}, {"send files", true}, {"send state", true},
			{"received prepared", false}, {"send go", false}, {"received serving", false},
		}},
		{"new", []point{
			{"send hello", false}, {"received prepare", false}, {"send ready", false}, {"received files", false}, {"received state", false},
			{"send prepared", false}, {"received go", false}, {"send serving", false},
		}},
	} {
		for _, p := range tt.points {
			t.Run(tt.who+" "+p.at, func(t *testing.T) { killUpgrade(t, nil, tt.who, p.at, p.ends) })
			t.Run("managed "+tt.who+" "+p.at, func(t *testing.T) { killUpgrade(t, newMainManager(t), tt.who, p.at, p.ends) })
		}
	}
}

// killUpgrade checks an upgrade in which a process is killed, under m if that is not nil.
func killUpgrade(t *testing.T, m *mainManager, who, at string, ends bool) {
	s := &station{dir: t.TempDir()}
	if m != nil {
		s.env = m.environment()
	}
	s.configure(t, withFile(s.dir), func(text string) string { return strings.Replace(text, "127.0.0.1:0", freeAddress(t), 1) })
	program := filepath.Join(s.dir, "program")
	link := func(to string) {
		t.Helper()
		if err := os.Symlink(to, program+".new"); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(program+".new", program); err != nil {
			t.Fatal(err)
		}
	}
	script := filepath.Join(s.dir, "killed")
	if err := os.WriteFile(script, fmt.Appendf(nil, "#!/bin/sh\nKILL_AT=%q exec %s \"$@\"\n", at, executable(t)), 0o700); err != nil {
		t.Fatal(err)
	}
	link(executable(t))
	if who == "old" {
		link(script)
	}
	s.startProgram(t, program)
	if link(executable(t)); who == "new" {
		link(script)
	}
	session, neighbour := s.login(t), login(t, s.addr, initiator.Options{Name: hostName + "-2"})
	data := bytes.Repeat([]byte("written!"), 64)
	for _, c := range []*initiator.Command{{CDB: cdb.TestUnitReady}, {CDB: cdb.Write16(7, 1), Out: data}} {
		if err := session.Do(c); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, code := s.run(t, "upgrade"); code == cli.ExitOK && at != "received serving" {
		t.Error("the upgrade succeeded")
	}
	// The new process of an ordinary start does not serve yet.
	testkit.Eventually(t, "one process that serves", func() bool {
		_, _, code := s.run(t, "lun", "list")
		return code == cli.ExitOK && len(s.processes(t)) == 1
	})
	for i, live := range []*initiator.Session{session, neighbour} {
		if ends {
			endsSoon(t, live)
			live = login(t, s.addr, initiator.Options{Name: fmt.Sprintf("%s-again-%d", hostName, i)})
		}
		if err := live.Do(&initiator.Command{CDB: cdb.TestUnitReady}); err != nil {
			t.Fatal(err)
		}
		c := &initiator.Command{CDB: cdb.Read16(7, 1), In: make([]byte, 512)}
		if err := live.Do(c); err != nil || c.Status != 0 || !bytes.Equal(c.In, data) {
			t.Errorf("READ after the upgrade: %v, status %#x, data %q", err, c.Status, c.In[:16])
		}
	}
	newcomer := login(t, s.addr, initiator.Options{Name: hostName + "-newcomer"})
	if err := newcomer.Do(&initiator.Command{CDB: cdb.TestUnitReady}); err != nil {
		t.Error(err)
	}
	s.says(t, cli.ExitOK, "ready", "lun", "list")
	if m != nil && who == "new" {
		link(executable(t))
		s.survive(t, m)
	}
}

// startProgram serves with that program file.
func (s *station) startProgram(t *testing.T, program string) {
	t.Helper()
	if testkit.Race { // see run
		s.environment(t)
	}
	cmd := exec.Command(program, "serve", "--config", s.file)
	cmd.Env = append(os.Environ(), s.env...)
	t.Cleanup(reap)
	s.process = launch(t, cmd)
	t.Cleanup(func() { s.killAll(t) }) // a process whose supervisor is killed before it has begun continues
	s.addr = s.wait(t, `msg=serving portal=(\S+)`)
}

// processes returns the processes that serve the configuration of s.
func (s *station) processes(t *testing.T) (pids []int) {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range all {
		line, err := os.ReadFile(path) // it may have ended
		pid, err2 := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if err == nil && err2 == nil && bytes.Contains(line, []byte("\x00serve\x00--config\x00"+s.file)) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// killAll ends the processes that serve the configuration of s.
func (s *station) killAll(t *testing.T) {
	for _, pid := range s.processes(t) {
		unix.Kill(pid, unix.SIGKILL)
	}
}

// freeAddress returns an address that nobody listens on.
func freeAddress(t *testing.T) string {
	t.Helper()
	addr, err := ports.FreeAddress()
	if err != nil {
		t.Fatal(err)
	}
	return addr
}

// What does not continue in another process is refused with the reason, and initiators notice nothing.
func TestRefusedUpgrade(t *testing.T) {
	dir := t.TempDir()
	s := &station{dir: dir}
	s.configure(t, withFile(dir))
	s.startProgram(t, executable(t))
	load := newTraffic(t, s.addr)
	text := s.text(t)
	edited := strings.Replace(text, "# of a test", "# of another test", 1)
	if err := os.WriteFile(s.file, []byte(edited), 0o600); err != nil {
		t.Fatal(err)
	}
	s.says(t, cli.ExitError, "edited", "upgrade")
	if err := os.WriteFile(s.file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	load.flows(t)
	for _, lun := range []string{"0", "2"} {
		s.ok(t, "lun", "fault", storeName, lun, "--hang", "1")
	}
	testkit.Eventually(t, "commands that hang", func() bool {
		before := load.done.Load()
		time.Sleep(100 * time.Millisecond)
		return load.done.Load() == before
	})
	s.says(t, cli.ExitRefused, "its store has not done all commands within 500ms", "upgrade")
	for _, lun := range []string{"0", "2"} {
		s.ok(t, "lun", "fault", storeName, lun, "--clear")
	}
	load.flows(t)
	s.says(t, cli.ExitOK, "sessions 2 continue", "upgrade")
	load.flows(t)
	load.end(t)
	disk := filepath.Join(dir, "d.img")
	if err := os.Rename(disk, disk+".away"); err != nil {
		t.Fatal(err)
	}
	s.says(t, cli.ExitRefused, "is orphaned", "upgrade") // the new process could not open it
	if err := os.Rename(disk+".away", disk); err != nil {
		t.Fatal(err)
	}
	s.says(t, cli.ExitOK, "sessions 2 continue", "upgrade")
}
