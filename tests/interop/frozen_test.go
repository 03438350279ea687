package interop_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/interop/harness"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

const (
	statusGood           = 0x00
	statusCheckCondition = 0x02
	statusBusy           = 0x08

	// promptly is how long anything may take that does not depend on a store that hangs. The target
	// promises 2 s and less; the rest is for a busy machine.
	promptly = 10 * time.Second
	// stopping is how long SIGTERM may take with drain: 1s while stores hang (docs/service.md, "The end").
	stopping = 30 * time.Second
)

// volume returns a file system that can be frozen.
func volume(t *testing.T) *harness.Volume {
	t.Helper()
	v, err := harness.NewVolume(t, 128<<20)
	if err != nil {
		lack(t, err)
	}
	return v
}

// ports counts the initiator ports of logIn.
var ports atomic.Uint32

// logIn logs in over iSER, from an initiator port of its own. The session ends with t.
func logIn(t *testing.T, d *harness.Target, target, name string) *initiator.Session {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), promptly)
	defer cancel()
	o := initiator.Options{Name: "iqn.2026-11.io.example:" + name, Target: target, ISID: [6]byte{0: 0x80}}
	binary.BigEndian.PutUint32(o.ISID[2:], ports.Add(1))
	s, err := initiator.Login(ctx, d.Listen()[0], o)
	if err != nil {
		t.Fatalf("login of %s: %v", name, err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// in runs f, which must end within limit.
func in(t *testing.T, limit time.Duration, what string, f func()) (took time.Duration) {
	t.Helper()
	begun, done := time.Now(), make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(limit):
		t.Fatalf("%s: not within %v", what, limit)
	}
	return time.Since(begun)
}

// good runs a command until it ends with GOOD: unit attentions are taken, and BUSY is repeated.
func good(s *initiator.Session, c *initiator.Command) error {
	for end := time.Now().Add(testkit.Patience); ; time.Sleep(20 * time.Millisecond) {
		err := s.Do(c)
		attention := c.Status == statusCheckCondition && len(c.Sense) > 2 && c.Sense[2]&0x0f == 0x06
		switch {
		case err != nil || c.Status == statusGood:
			return err
		case c.Status != statusBusy && !attention || time.Now().After(end):
			return fmt.Errorf("command %#x of LUN %d: status %#x, sense % x", c.CDB[0], c.LUN, c.Status, c.Sense)
		}
	}
}

// shareOf measures what an initiator of attacked has in comparison with one of control: the same target in
// another process, on the same machine and at the same time, that nobody attacks. Both have 8 READs of 4 KiB
// of LUN 0 in flight, in turn for a moment each.
func shareOf(t *testing.T, attacked, control *initiator.Session) (percent float64) {
	t.Helper()
	const turns, turn = 16, 100 * time.Millisecond
	var rates [2][]float64
	for range turns {
		for i, s := range []*initiator.Session{attacked, control} {
			n, err := readsIn(s, turn)
			if err != nil {
				t.Fatalf("the honest initiator: %v", err)
			}
			rates[i] = append(rates[i], n)
		}
	}
	for i := range rates {
		slices.Sort(rates[i])
	}
	percent = 100 * rates[0][turns/2] / rates[1][turns/2]
	t.Logf("the honest initiator has %.0f READs/s, without the attack %.0f: %.0f %%", rates[0][turns/2], rates[1][turns/2], percent)
	return percent
}

// readsIn keeps 8 READs of 4 KiB in flight for d, and returns how many end per second.
func readsIn(s *initiator.Session, d time.Duration) (perSecond float64, err error) {
	var wg sync.WaitGroup
	var n [8]int
	var errs [len(n)]error
	begun := time.Now()
	for i := range n {
		wg.Go(func() {
			c := &initiator.Command{CDB: cdb.Read16(uint64(8*i), 8), In: make([]byte, 4096)}
			for ; time.Since(begun) < d && errs[i] == nil; n[i]++ {
				errs[i] = good(s, c)
			}
		})
	}
	wg.Wait()
	sum := 0
	for _, n := range n {
		sum += n
	}
	return float64(sum) / time.Since(begun).Seconds(), errors.Join(errs[:]...)
}

// threads returns how many threads a process has, and how many of them hang in the kernel.
func threads(t *testing.T, pid int) (all, hung int) {
	t.Helper()
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil || len(tasks) == 0 {
		t.Fatalf("no process %d: %v", pid, err)
	}
	for _, name := range tasks {
		b, err := os.ReadFile(name)
		if err != nil {
			continue // it has just ended
		}
		all++
		if _, rest, _ := strings.Cut(string(b), ") "); rest[0] == 'D' {
			hung++
		}
	}
	return all, hung
}

const (
	frozenIQN = "iqn.2026-11.io.example:frozen"
	honestIQN = "iqn.2026-11.io.example:honest"
)

// A siege is a target of whose LUNs some are on a volume, and initiators that write to these.
type siege struct {
	v      *harness.Volume
	d      *harness.Target
	luns   int
	writes []*besieged
}

// A besieged is one WRITE to a block of its own.
type besieged struct {
	initiator.Command
	s    *initiator.Session
	lba  uint64
	done chan error
}

// block returns the data of a WRITE: that of version 1 or 2 of a block.
func (b *besieged) block(version byte) []byte {
	data := bytes.Repeat([]byte{version}, 4096)
	binary.BigEndian.PutUint64(data, b.lba)
	return data
}

// begin starts WRITEs of version 1, n in each session, to the LUNs in turn.
func (g *siege) begin(t *testing.T, sessions []*initiator.Session, n int) {
	t.Helper()
	g.writes = nil
	for i, s := range sessions {
		for k := range n {
			b := &besieged{s: s, lba: uint64(i*n+k) * 8, done: make(chan error, 1)}
			b.LUN, b.CDB = byte(i%g.luns), cdb.Write16(b.lba, 8)
			b.Out, b.Immediate = b.block(1), 4096
			g.writes = append(g.writes, b)
			if err := s.Start(&b.Command); err != nil {
				t.Fatal(err)
			}
			go func() { b.done <- b.Wait() }()
		}
	}
}

var notReady = regexp.MustCompile(`^the store has not answered since (\d\d:\d\d:\d\d); (\d+) commands? waits?$`)

// hung waits until lun list says of all LUNs of the volume that their stores hang, and since when. It
// returns how many commands wait, as the list says.
func (g *siege) hung(t *testing.T, since time.Time) (waiting int) {
	t.Helper()
	var list []schema.LUNState
	testkit.Eventually(t, "lun list tells of each store that hangs", func() bool {
		list, waiting = harness.Ask[[]schema.LUNState](t, g.d, "lun", "list", frozenIQN), 0
		for _, l := range list {
			m := notReady.FindStringSubmatch(l.Reason)
			if l.State != schema.NotReady || m == nil {
				return false
			}
			n, _ := strconv.Atoi(m[2])
			waiting += n
		}
		return true
	})
	for _, l := range list {
		at, err := time.ParseInLocation(time.TimeOnly, notReady.FindStringSubmatch(l.Reason)[1], time.Local)
		if err != nil {
			t.Fatal(err)
		}
		// The date is not said; what is before midnight is a day off.
		y, m, d := since.Local().Date()
		at = at.AddDate(y, int(m)-1, d-1)
		if off := at.Sub(since.Truncate(time.Second)); off < 0 && off > -23*time.Hour || off > promptly {
			t.Errorf("LUN %d: %q, but it hangs since %v", l.ID, l.Reason, since.Format(time.TimeOnly))
		}
	}
	return waiting
}

// A file system hangs for real, below 8 LUNs and 100 sessions with 400 WRITEs. The threads of the target stay
// within their bound, an honest initiator of another LUN keeps its share, aborts and resets are answered, and
// lun list says since when it is so. When the file system works again all that was not aborted completes, and
// no WRITE that was aborted lands after one that was acknowledged later. Once more frozen, the target ends.
//
// docs/limits.md: "Fencing in bounded time" and "Threads".
func TestFrozenFileSystem(t *testing.T) {
	v := volume(t)
	const (
		luns     = 8
		sessions = 100
		each     = 4
		calls    = 16       // backend_calls_per_lun: fewer than the sessions of a LUN ask for
		own      = 128      // threads of the program itself
		device   = luns - 2 // the LUN on a block device
		reset    = luns - 1 // the LUN that is reset
	)
	honest := "  - name: " + honestIQN + "\n    initiators: [\"*\"]\n    luns:\n      - {id: 0, backend: file, path: %s/honest.img, size: 16MiB}\n"
	frozen := "  - name: " + frozenIQN + "\n    initiators: [\"*\"]\n    resets_for: [\"*\"]\n    luns:\n"
	for i := range luns - 2 {
		frozen += fmt.Sprintf("      - {id: %d, backend: file, path: %s/%d.img, size: 8MiB}\n", i, v.Dir, i)
	}
	dev, err := loopDevice(t, v.Dir, 8<<20) // one LUN is a block device, which hangs in READs, too
	if err != nil {
		lack(t, err)
	}
	frozen += fmt.Sprintf("      - {id: %d, backend: block, path: %s, write_through: true}\n", device, dev)
	frozen += fmt.Sprintf("      - {id: %d, backend: file, path: %s/reset.img, size: 8MiB}\n", reset, v.Dir)
	limits := fmt.Sprintf("drain: 1s\nlimits: {backend_calls: %d, backend_calls_per_lun: %d, store_timeout: 2s}\n", luns*calls, calls)
	control := harness.Config{Targets: fmt.Sprintf(honest, t.TempDir()), More: limits}.Start(t)
	d := harness.Config{Targets: fmt.Sprintf(honest, t.TempDir()) + frozen, More: limits}.Start(t)
	g := &siege{v: v, d: d, luns: luns}
	var crowd []*initiator.Session
	for i := range sessions {
		s := logIn(t, d, frozenIQN, fmt.Sprint("crowd", i/10))
		if err := good(s, &initiator.Command{LUN: byte(i % luns)}); err != nil {
			t.Fatal(err)
		}
		crowd = append(crowd, s)
	}
	near, far := logIn(t, d, honestIQN, "honest"), logIn(t, control, honestIQN, "honest")

	defer v.Thaw(t)
	since := time.Now() // a call may hang before Freeze returns
	v.Freeze(t)
	g.begin(t, crowd, each)
	waiting := g.hung(t, since)
	if share := shareOf(t, near, far); share < 80 {
		t.Errorf("the honest initiator keeps %.0f %%, want 80 %%", share)
	}
	all, stuck := threads(t, d.PID())
	t.Logf("%d threads, %d of them hang; %d commands wait", all, stuck, waiting)
	if most := luns * calls; stuck < luns || stuck > most || all > most+own {
		t.Errorf("%d threads, %d of them hang; want at most %d and %d", all, stuck, most+own, most)
	}

	// In LUN 0 each session gives up a WRITE, and writes something else in its place as soon as it can.
	given := make(map[*besieged]bool)
	var aborts, rewrites sync.WaitGroup
	took := in(t, promptly, "ABORT TASK", func() {
		for _, b := range g.writes {
			if b.LUN == 0 && b.lba/8%each == 0 {
				given[b] = true
				aborts.Go(func() { b.giveUp(t, &rewrites) })
			}
		}
		aborts.Wait()
	})
	t.Logf("%d ABORT TASK took %v", len(given), took)
	// LUN 7 is reset by another initiator, over TCP. Its commands are gone, and their sessions.
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	other, err := initiator.Dial(ctx, "tcp", d.Listen()[0], initiator.Options{Name: "iqn.2026-11.io.example:other", Target: frozenIQN})
	if err == nil {
		err = other.LogIn(nil)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	took = in(t, promptly, "LOGICAL UNIT RESET", func() {
		if response, err := other.TMF(pdu.LogicalUnitReset, [8]byte{1: reset}); err != nil || response != pdu.FunctionComplete {
			t.Errorf("LOGICAL UNIT RESET: %v, response %d", err, response)
		}
	})
	t.Logf("LOGICAL UNIT RESET took %v", took)
	for i, s := range crowd {
		if i%luns == reset {
			s.Close()
			s.Err()
		}
	}
	ready := make([]byte, 6)
	for id := range byte(luns) {
		status, sense, _, err := other.Do([8]byte{1: id}, ready, nil, 0)
		if err != nil || status != statusCheckCondition || len(sense) < 14 || sense[2] != 2 || sense[12] != 4 {
			t.Errorf("TEST UNIT READY of LUN %d: %v, status %#x, sense % x; want NOT READY", id, err, status, sense)
		}
	}

	v.Thaw(t)
	g.complete(t, given, reset)
	rewrites.Wait()
	testkit.Eventually(t, "all LUNs are ready", func() bool {
		return !slices.ContainsFunc(harness.Ask[[]schema.LUNState](t, d, "lun", "list", frozenIQN),
			func(l schema.LUNState) bool { return l.State != schema.Ready })
	})
	for b := range given { // what was aborted has ended by now
		g.holds(t, b, 2)
	}
	d.AwaitVars(t, map[string]float64{"tasks": 0, "buffers": 0}, promptly)

	// The process may have fewer calls now than its LUNs. A call that hangs counts for a second.
	d.Manage(t, "limits", "set", fmt.Sprint("backend_calls=", calls))
	since = time.Now() // a call may hang before Freeze returns
	v.Freeze(t)
	crowd = slices.DeleteFunc(crowd, func(s *initiator.Session) bool {
		select {
		case <-s.Done():
			return true
		default:
			return false
		}
	})
	g.begin(t, crowd, each)
	g.hung(t, since)
	if _, stuck := threads(t, d.PID()); stuck > 2*calls+luns {
		t.Errorf("%d threads hang, want at most %d", stuck, 2*calls+luns)
	}
	wait := d.Terminate(t, stopping)
	for _, s := range append(crowd, near) {
		in(t, promptly, "the end of a session", func() { s.Err() })
	}
	if c, err := net.Dial("tcp", d.Listen()[0]); err == nil {
		c.Close()
		t.Error("the portal is still open")
	}
	v.Thaw(t)
	in(t, testkit.Patience, "the end of the process", func() {
		if code := wait(); code != 1 {
			t.Errorf("exit code %d, want 1", code)
		}
	})
	if log := d.Log(); !strings.Contains(log, "LUN 3 of "+frozenIQN) {
		t.Error("the target does not name what it could not close")
	}
}

// giveUp aborts the WRITE, and has rewrites write version 2 until that succeeds.
func (b *besieged) giveUp(t *testing.T, rewrites *sync.WaitGroup) {
	response, err := b.s.Abort(t.Context(), &b.Command)
	if err != nil || response != pdu.FunctionComplete {
		t.Errorf("ABORT TASK: %v, response %d", err, response)
	}
	if err := <-b.done; !errors.Is(err, initiator.ErrAborted) {
		t.Errorf("the WRITE that was aborted: %v, status %#x", err, b.Status)
	}
	rewrites.Go(func() {
		if err := good(b.s, &initiator.Command{CDB: b.CDB, Out: b.block(2), Immediate: 4096}); err != nil {
			t.Error(err)
		}
	})
}

// complete waits for all WRITEs but those that were given up and those to a LUN that was reset. Those that
// succeeded are in the LUN, those that ended with BUSY are not.
func (g *siege) complete(t *testing.T, given map[*besieged]bool, reset byte) {
	t.Helper()
	late := time.After(testkit.Patience)
	ended := make(map[byte]int) // by status
	for _, b := range g.writes {
		if given[b] || b.LUN == reset {
			continue
		}
		select {
		case err := <-b.done:
			if err != nil {
				t.Fatal(err)
			}
		case <-late:
			t.Fatalf("WRITE of block %d of LUN %d has not ended", b.lba, b.LUN)
		}
		ended[b.Status]++
		switch b.Status {
		case statusGood:
			g.holds(t, b, 1)
		case statusBusy:
			g.holds(t, b, 0)
		default:
			t.Errorf("WRITE: status %#x, sense % x", b.Status, b.Sense)
		}
	}
	t.Logf("WRITEs that were not aborted, by their status: %v", ended)
	if ended[statusGood] == 0 {
		t.Error("no WRITE has succeeded")
	}
}

// holds fails t unless the block of a WRITE has the data of that version; 0: that of a new LUN.
func (g *siege) holds(t *testing.T, b *besieged, version byte) {
	t.Helper()
	want := make([]byte, 4096)
	if version != 0 {
		want = b.block(version)
	}
	read := &initiator.Command{LUN: b.LUN, CDB: cdb.Read16(b.lba, 8), In: make([]byte, 4096)}
	if err := good(b.s, read); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(read.In, want) {
		t.Errorf("block %d of LUN %d: % x..., want % x...", b.lba, b.LUN, read.In[:12], want[:12])
	}
}
