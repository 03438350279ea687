package interop_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/interop/harness"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// A cgroup is a control group of this machine with a limit of memory, of version 1 or 2.
type cgroup struct {
	dir   string
	kills string // the file that counts processes that were killed for want of memory
	peak  string // the file with the most that was in use; version 2 has it since Linux 5.19
}

// newCgroup makes a group that may use that many bytes and lives as long as t. The error says why it cannot.
func newCgroup(t *testing.T, memory int64) (*cgroup, error) {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return nil, err
	}
	err = errors.New("no cgroup hierarchy is mounted that has the memory controller")
	for line := range strings.Lines(string(mounts)) {
		f := strings.Fields(line) // source, directory, type, options
		g := &cgroup{dir: filepath.Join(f[1], fmt.Sprint("iser-target-test-", os.Getpid()))}
		limit := ""
		switch {
		case f[2] == "cgroup2":
			// Without the controller the group has no memory.max.
			os.WriteFile(filepath.Join(f[1], "cgroup.subtree_control"), []byte("+memory"), 0)
			limit, g.kills, g.peak = "memory.max", "memory.events", "memory.peak"
		case f[2] == "cgroup" && strings.Contains(","+f[3]+",", ",memory,"):
			limit, g.kills, g.peak = "memory.limit_in_bytes", "memory.oom_control", "memory.max_usage_in_bytes"
		default:
			continue
		}
		left, _ := filepath.Glob(filepath.Join(f[1], "iser-target-test-*"))
		for _, dir := range left {
			os.Remove(dir) // of a test that was killed; the kernel refuses it for one that runs
		}
		if err = os.Mkdir(g.dir, 0o755); err != nil {
			continue
		}
		if err = os.WriteFile(filepath.Join(g.dir, limit), fmt.Append(nil, memory), 0); err != nil {
			os.Remove(g.dir)
			continue
		}
		t.Cleanup(func() {
			testkit.Eventually(t, "the cgroup is removed", func() bool { return !errors.Is(os.Remove(g.dir), syscall.EBUSY) })
		})
		return g, nil
	}
	return nil, err
}

// killed returns how many processes the kernel has killed in g.
func (g *cgroup) killed(t *testing.T) (n int) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(g.dir, g.kills))
	_, after, ok := strings.Cut("\n"+string(b), "\noom_kill ")
	if err != nil || !ok {
		t.Fatalf("%s has no oom_kill: %v\n%s", g.kills, err, b)
	}
	if _, err := fmt.Sscan(after, &n); err != nil {
		t.Fatal(err)
	}
	return n
}

// most returns the most memory that was in use in g, for the log.
func (g *cgroup) most() string {
	b, err := os.ReadFile(filepath.Join(g.dir, g.peak))
	if errors.Is(err, fs.ErrNotExist) {
		return "unknown"
	}
	return strings.TrimSpace(string(b))
}

// A glutton is one way to make the target use memory, on a session whose initiator takes no answers. It
// ends when the connection does.
type glutton struct {
	what string
	run  func(s *initiator.Dialog)
}

var gluttons = []glutton{
	{"READs whose data nobody takes", func(s *initiator.Dialog) {
		for range 64 {
			h := s.Request(pdu.SCSICommand, pdu.FlagF|pdu.FlagR, false)
			block := cdb.Read16(0, 2048)
			h.SetEDTL(1 << 20)
			h.SetCDB(block[:])
			s.Send(h, nil)
		}
	}},
	{"WRITEs whose immediate data comes, and the rest does not", func(s *initiator.Dialog) {
		for range 64 {
			h := s.Request(pdu.SCSICommand, pdu.FlagF|pdu.FlagW, false)
			block := cdb.Write16(0, 2048)
			h.SetEDTL(1 << 20)
			h.SetCDB(block[:])
			s.Send(h, make([]byte, 64<<10))
		}
	}},
	{"pings whose answers nobody takes", func(s *initiator.Dialog) {
		data := make([]byte, 64<<10)
		for s.Send(s.Request(pdu.NOPOut, pdu.FlagF, true), data) == nil {
		}
	}},
}

// startGluttons lets up to 15 sessions of each kind do that, until stop is called, next to connections that say
// nothing. When the memory is used up, the target refuses further sessions.
func startGluttons(t *testing.T, d *harness.Target) (stop func()) {
	t.Helper()
	const each, strangers = 15, 500
	refused := 0
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	stop = sync.OnceFunc(func() { cancel(); wg.Wait() })
	t.Cleanup(stop)
	var dialer net.Dialer
	for range strangers {
		c, err := dialer.DialContext(ctx, "tcp", d.Listen()[0])
		if err != nil {
			t.Fatal(err)
		}
		context.AfterFunc(ctx, func() { c.Close() })
	}
	for i, g := range gluttons {
		for k := range each {
			o := initiator.Options{Name: fmt.Sprint("iqn.2026-11.io.example:glutton", i), Target: honestIQN, ISID: [6]byte{0: 0x80, 5: byte(k)}}
			s, err := initiator.Dial(ctx, "tcp", d.Listen()[0], o)
			if err != nil {
				t.Fatal(err)
			}
			var refusal *initiator.LoginError
			switch err := s.LogIn(nil); {
			case errors.As(err, &refusal) && refusal.Status == pdu.LoginOutOfResources:
				s.Close()
				refused++
			case err != nil:
				t.Fatalf("%s: %v", g.what, err)
			default:
				wg.Go(func() { g.run(s) })
			}
		}
	}
	t.Logf("%d of %d sessions refused", refused, each*len(gluttons))
	return stop
}

// The target in a cgroup of 128 MiB takes a quarter of that for initiators. Floods of sessions, of immediate
// data, of READs and of pings do not get it killed, an honest initiator is answered meanwhile, and the memory
// is given back afterwards.
//
// docs/limits.md: "memory".
func TestMemoryOfACgroup(t *testing.T) {
	const (
		memory = 128 << 20 // bytes
		budget = memory / 4
		rest   = 12 << 10 // KiB that may stay after a flood
	)
	g, err := newCgroup(t, memory)
	if err != nil {
		lack(t, err)
	}
	d := harness.Config{
		Targets: "  - name: " + honestIQN + "\n    initiators: [\"*\"]\n    luns:\n      - {id: 0, backend: memory, size: 16MiB}\n",
		Cgroup:  g.dir,
	}.Start(t)
	if got := d.Metrics(t)[`iser_target_limit_max{limit="memory"}`]; got != budget {
		t.Errorf("limits.memory is %.0f, want %d", got, budget)
	}
	honest := logIn(t, d, honestIQN, "honest")
	block := &initiator.Command{CDB: cdb.Write16(0, 2048), Out: bytes.Repeat([]byte{1}, 1<<20)}
	for lba := uint64(0); lba < 16<<20/512; lba += 2048 { // the LUN has its memory
		block.CDB = cdb.Write16(lba, 2048)
		if err := good(honest, block); err != nil {
			t.Fatal(err)
		}
	}
	before := residentKiB(t, d.PID())
	for round := range 2 {
		stop := startGluttons(t, d)
		testkit.Eventually(t, "initiators wait for memory", func() bool {
			return d.Metrics(t)[`iser_target_limit_reached_total{limit="memory"}`] > 0
		})
		most, slowest := 0, time.Duration(0)
		for i := range 300 {
			begun := time.Now()
			if err := good(honest, &initiator.Command{CDB: cdb.Read16(0, 128), In: make([]byte, 64<<10)}); err != nil {
				t.Fatal(err)
			}
			slowest = max(slowest, time.Since(begun))
			if i%10 == 0 {
				most = max(most, residentKiB(t, d.PID()))
			}
		}
		if slowest > promptly {
			t.Errorf("the honest initiator waited for %v", slowest)
		}
		used := d.Metrics(t)[`iser_target_limit_used{limit="memory"}`]
		stop()
		if n := g.killed(t); n > 0 {
			t.Fatalf("the kernel has killed %d processes", n)
		}
		d.AwaitVars(t, map[string]float64{"sessions": 1, "tasks": 0}, time.Minute)
		var after int
		begun := time.Now()
		testkit.Eventually(t, "the memory is given back", func() bool {
			after = residentKiB(t, d.PID())
			return after < before+rest
		})
		t.Logf("round %d: resident: %d MiB before, %d MiB at most, %d MiB %v after the flood; limits.memory %d MiB in use; slowest READ %v; most in the cgroup %s bytes",
			round, before>>10, most>>10, after>>10, time.Since(begun).Round(time.Millisecond), int(used)>>20, slowest, g.most())
	}
}

// On a target with 128 MiB, a flood of half-open logins from many addresses would take more memory than there
// is, long before it has all places. An initiator that is 50 ms away gets in.
//
// docs/limits.md: "Places".
func TestLoginDuringAFloodInACgroup(t *testing.T) {
	enoughFiles(t)
	const memory = 128 << 20 // bytes
	g, err := newCgroup(t, memory)
	if err != nil {
		lack(t, err)
	}
	d := harness.Config{Targets: chapTarget, Cgroup: g.dir}.Start(t)
	f := startFlood(t, d.Listen()[0], 8000, halfOpen())
	f.full(t, d, "memory")
	f.getIn(t, farAway(t, d.Listen()[0]))
	if n := g.killed(t); n > 0 {
		t.Fatalf("the kernel has killed %d processes", n)
	}
	if used := d.Metrics(t)[`iser_target_limit_used{limit="memory"}`]; used > memory/4 {
		t.Errorf("%.0f bytes of limits.memory are in use, which is %d", used, memory/4)
	}
	t.Logf("most in the cgroup: %s bytes", g.most())
}
