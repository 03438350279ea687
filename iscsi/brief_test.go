package iscsi

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// warm reads until the next command is brief.
func (tc *testConn) warm() {
	tc.tb.Helper()
	for range 150 {
		tc.wantStatus(tc.command(readF, 512, cdb.Read10(0, 1), nil), 0)
	}
	synctest.Wait() // for a goroutine that was woken before, and found the baton taken
}

// briefRig returns a hungRig whose victim's commands were brief until the one that hangs.
func briefRig(t *testing.T) *hungRig {
	r := newHungRig(t)
	r.gate.Open()
	r.victim.wantStatus(r.hung, 0)
	r.victim.skipAttentions()
	r.victim.warm()
	return r
}

// While a brief command runs, nobody receives. If the store lets it wait, somebody does after 1 to 2 looks, and
// from then on at once.
func TestBriefCommandInAHungStore(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := briefRig(t)
		gate := r.store.Shut()
		hung := r.victim.command(readF, 512, cdb.Read10(7, 1), nil)
		<-gate.Entered
		served := func() time.Duration {
			begin := time.Now()
			r.victim.wantStatus(r.victim.onLUN(1, readF, 512, cdb.Read10(0, 1), nil), 0)
			return time.Since(begin)
		}
		if took := served(); took < lookEvery || took > 2*lookEvery {
			t.Errorf("the next command has waited %v, want %v to %v", took, lookEvery, 2*lookEvery)
		}
		for range 8 {
			if took := served(); took != 0 {
				t.Errorf("a later command has waited %v", took)
			}
		}
		also := r.victim.command(readF, 512, cdb.Read10(9, 1), nil)
		<-gate.Entered
		if took := served(); took != 0 {
			t.Errorf("behind the second command that hangs: %v", took)
		}
		begin := time.Now()
		r.victim.wantTMF(r.victim.tmf(pdu.AbortTask, [8]byte{}, hung.ITT(), hung.CmdSN()), pdu.FunctionComplete)
		if took := time.Since(begin); took > fencingTime {
			t.Errorf("ABORT TASK took %v", took)
		}
		gate.Open()
		r.victim.wantStatus(also, 0)
	})
}

// Other commands than a small READ or WRITE never keep others waiting.
func TestOnlySmallReadsAndWritesAreBrief(t *testing.T) {
	for name, send := range map[string]func(tc *testConn) pdu.BHS{
		"SYNCHRONIZE CACHE": func(tc *testConn) pdu.BHS { return tc.command(pdu.FlagF, 0, [16]byte{0x35}, nil) },
		"READ of 65 KiB":    func(tc *testConn) pdu.BHS { return tc.command(readF, 65<<10, cdb.Read10(0, 130), nil) },
	} {
		bubble(t, name, func(t *testing.T) {
			r := briefRig(t)
			gate := r.store.Shut(backendtest.Sync, backendtest.ReadAt)
			h := send(r.victim)
			<-gate.Entered
			begin := time.Now()
			r.victim.wantStatus(r.victim.onLUN(1, readF, 512, cdb.Read10(0, 1), nil), 0)
			if took := time.Since(begin); took != 0 {
				t.Errorf("the next command has waited %v", took)
			}
			gate.Open()
			r.victim.wantStatus(h, 0)
		})
	}
}

// A READ of 64 KiB is brief.
func TestLongestBriefRead(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := briefRig(t)
		gate := r.store.Shut()
		h := r.victim.command(readF, 64<<10, cdb.Read10(0, 128), nil)
		<-gate.Entered
		begin := time.Now()
		r.victim.wantStatus(r.victim.onLUN(1, readF, 512, cdb.Read10(0, 1), nil), 0)
		if took := time.Since(begin); took < lookEvery || took > 2*lookEvery {
			t.Errorf("the next command has waited %v, want %v to %v", took, lookEvery, 2*lookEvery)
		}
		gate.Open()
		r.victim.wantStatus(h, 0)
	})
}

// What may be brief: READs of up to 64 KiB, and WRITEs, over TCP those of up to 16 KiB.
func TestBriefSizes(t *testing.T) {
	for _, tt := range []struct {
		name string
		rdma bool
		flag byte
		size uint32
		cdb  [16]byte
		want bool
	}{
		{"READ", false, readF, 64 << 10, cdb.Read10(0, 128), true},
		{"longer READ", false, readF, 64<<10 + 512, cdb.Read10(0, 129), false},
		{"longer READ over RDMA", true, readF, 64<<10 + 512, cdb.Read10(0, 129), false},
		{"WRITE", false, writeF, 16 << 10, cdb.Write10(0, 32), true},
		{"longer WRITE", false, writeF, 16<<10 + 512, cdb.Write10(0, 33), false},
		{"WRITE over RDMA", true, writeF, 64 << 10, cdb.Write10(0, 128), true},
		{"longer WRITE over RDMA", true, writeF, 64<<10 + 512, cdb.Write10(0, 129), false},
		{"TEST UNIT READY", true, pdu.FlagF, 0, cdb.TestUnitReady, false},
	} {
		task := newSlot(&conn{dm: &fakeMover{rdma: tt.rdma}}, nil)
		h := task.header()
		h.Reset(pdu.SCSICommand, tt.flag)
		h.SetEDTL(tt.size)
		copy(h.CDB(), tt.cdb[:])
		if got := task.small(); got != tt.want {
			t.Errorf("%s of %d bytes: %v, want %v", tt.name, tt.size, got, tt.want)
		}
	}
}

// The neighbour in another session does not wait.
func TestBriefCommandsAndTheNeighbour(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := briefRig(t)
		r.other.warm()
		gate := r.store.Shut()
		hung := r.victim.command(readF, 512, cdb.Read10(7, 1), nil)
		<-gate.Entered
		r.other.wantServed()
		gate.Open()
		r.victim.wantStatus(hung, 0)
	})
}

// lookout has no work, and no timer, where nothing comes. It has again when commands come.
func TestLookoutRests(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := briefRig(t)
		looks := func() int {
			r.lookout.mu.Lock()
			defer r.lookout.mu.Unlock()
			return len(r.lookout.conns)
		}
		if looks() != 1 {
			t.Fatalf("%d connections after brief commands, want 1", looks())
		}
		time.Sleep((looksInVain + 2) * lookEvery)
		synctest.Wait()
		if looks() != 0 || r.lookout.timer.Stop() {
			t.Errorf("%d connections without commands, and the timer may run", looks())
		}
		r.victim.wantStatus(r.victim.command(readF, 512, cdb.Read10(0, 1), nil), 0)
		if looks() != 1 {
			t.Errorf("%d connections after another one, want 1", looks())
		}
		gate := r.store.Shut()
		hung := r.victim.command(readF, 512, cdb.Read10(7, 1), nil)
		<-gate.Entered
		time.Sleep((looksInVain + 2) * lookEvery) // it watches a command that runs, however long that takes
		r.victim.wantStatus(r.victim.onLUN(1, readF, 512, cdb.Read10(0, 1), nil), 0)
		gate.Open()
		r.victim.wantStatus(hung, 0)
	})
}

// The average says that memory and the page cache are fast, and that a disk is not, also if most blocks are cached.
func TestBrevity(t *testing.T) {
	for name, c := range map[string]struct {
		took  func(i int) time.Duration
		brief bool
	}{
		"memory":                     {func(int) time.Duration { return 2 * time.Microsecond }, true},
		"page cache":                 {func(int) time.Duration { return 25 * time.Microsecond }, true},
		"memory of a busy machine":   {func(i int) time.Duration { return time.Duration(1+i%1000/999*2000) * time.Microsecond }, true},
		"NVMe":                       {func(int) time.Duration { return 80 * time.Microsecond }, false},
		"a disk, 1 of 10 not cached": {func(i int) time.Duration { return time.Duration(max(0, i%10-8)*5) * time.Millisecond }, false},
	} {
		var b brevity
		b.average.Store(int64(longestCounted))
		for i := range 10_000 {
			b.note(c.took(i))
			if brief := b.average.Load() < int64(briefTime); i > 200 && i%1000 > 100 && i%1000 < 999 && brief != c.brief {
				t.Errorf("%s: after %d commands brief is %t", name, i, brief)
				break
			}
		}
	}
}
