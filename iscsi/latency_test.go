package iscsi

import (
	"io"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// stopClock stops the clock, which moves only when the test adds to the result. It has to
// be called before the node is made.
func stopClock(t *testing.T) *atomic.Int64 {
	now, real := &atomic.Int64{}, clock
	now.Store(int64(time.Hour))
	clock = func() time.Duration { return time.Duration(now.Load()) }
	t.Cleanup(func() { clock = real })
	return now
}

// sums returns what the commands so far have spent in each phase.
func (n *testNode) sums() (d [lun.Phases]time.Duration) {
	for _, l := range n.Latencies() {
		for p := range d {
			d[p] += l[p].Sum
		}
	}
	return d
}

// received waits until so many PDUs have come since the login, which counts as some.
func (tc *testConn) received(more uint64) func() {
	before := tc.Sessions()[0].Conns[0].Received
	return func() {
		testkit.Eventually(tc.tb, "PDUs", func() bool { return tc.Sessions()[0].Conns[0].Received >= before+more })
	}
}

// stuck makes the network take nothing from now on, and returns what waits until so many
// goroutines want to send.
func (tc *testConn) stuck() (until func(flushes int)) {
	tc.m.mu.Lock()
	defer tc.m.mu.Unlock()
	tc.m.holdFlush = true
	before := tc.m.flushes
	return func(flushes int) {
		testkit.Eventually(tc.tb, "flushes", func() bool {
			tc.m.mu.Lock()
			defer tc.m.mu.Unlock()
			return tc.m.flushes == before+flushes
		})
	}
}

// spent is the time that commands spend in their phases.
type spent = map[lun.Phase]time.Duration

// A phaseCase is what makes a command wait.
type phaseCase struct {
	name   string
	change []func(*Options)
	// of a connection that has logged in, up to the end of all commands
	run  func(tc *testConn, pass func(time.Duration))
	want spent
}

// onePiece gives a connection the memory of one piece.
func onePiece(o *Options) { o.ConnectionMemory, o.MaxTransferPiece = 1, 1 }

var phaseCases = []phaseCase{
	{"nothing waits", nil, func(tc *testConn, _ func(time.Duration)) {
		tc.wantStatus(tc.command(readF, 4096, cdb.Read10(0, 8), nil), 0)
		tc.wantStatus(tc.command(writeF, 4096, cdb.Write10(0, 8), nil), 0)
		tc.wantStatus(tc.command(writeF, 4096, cdb.Write10(0, 8), make([]byte, 4096)), 0)
	}, spent{}},
	{"READ of a slow backend", nil, func(tc *testConn, pass func(time.Duration)) {
		gate := tc.store.Shut()
		h := tc.command(readF, 4096, cdb.Read10(0, 8), nil)
		<-gate.Entered
		pass(3 * time.Second)
		gate.Open()
		tc.wantStatus(h, 0)
	}, spent{lun.PhaseBackend: 3 * time.Second}},
	{"WRITE to a slow backend", nil, func(tc *testConn, pass func(time.Duration)) {
		gate := tc.store.Shut()
		h := tc.command(writeF, 4096, cdb.Write10(0, 8), nil)
		<-gate.Entered
		pass(3 * time.Second)
		gate.Open()
		tc.wantStatus(h, 0)
	}, spent{lun.PhaseBackend: 3 * time.Second}},
	{"READ that fails", nil, func(tc *testConn, pass func(time.Duration)) {
		tc.store.FailIO(io.ErrUnexpectedEOF)
		gate := tc.store.Shut()
		h := tc.command(readF, 4096, cdb.Read10(0, 8), nil)
		<-gate.Entered
		pass(time.Second)
		gate.Open()
		tc.wantStatus(h, 2)
	}, spent{lun.PhaseBackend: time.Second}},
	{"data that is slow to come", nil, func(tc *testConn, pass func(time.Duration)) {
		tc.m.holdGets = true
		h := tc.command(writeF, 4096, cdb.Write10(0, 8), make([]byte, 512))
		tc.wantGets(1)
		pass(2 * time.Second)
		tc.m.releaseGets()
		tc.wantStatus(h, 0)
	}, spent{lun.PhaseReadWait: 2 * time.Second}},
	{"data that is slow to come in each of 3 pieces", nil, func(tc *testConn, pass func(time.Duration)) {
		tc.m.holdGets = true
		h := tc.command(writeF, 3<<20, cdb.Write10(0, 6144), nil)
		for range 3 {
			tc.wantGets(1)
			pass(time.Second)
			tc.m.mu.Lock()
			tc.m.endGet(tc.m.gets[0], nil)
			tc.m.mu.Unlock()
		}
		tc.wantStatus(h, 0)
	}, spent{lun.PhaseReadWait: 3 * time.Second}},
	{"unsolicited data that is slow to come", []func(*Options){func(o *Options) {
		no := false
		o.Limits.InitialR2T, o.Limits.FirstBurstLength = &no, 32768
	}}, func(tc *testConn, pass func(time.Duration)) {
		come := tc.received(1)
		h := tc.scsi(pdu.FlagW, 4096, cdb.Write10(0, 8))
		tc.write(h, nil)
		come()
		pass(time.Second)
		tc.write(tc.dataOutPDU(h, true, 0, 0), make([]byte, 4096))
		tc.wantStatus(h, 0)
	}, spent{lun.PhaseReadWait: time.Second}},
	{"an initiator that is slow to take the response", nil, func(tc *testConn, pass func(time.Duration)) {
		until := tc.stuck()
		h := tc.command(readF, 4096, cdb.Read10(0, 8), nil)
		until(1)
		pass(5 * time.Second)
		tc.takes()
		tc.wantStatus(h, 0)
	}, spent{lun.PhaseSend: 5 * time.Second}},
	{"an initiator that is slow to take the first of 2 pieces", nil, func(tc *testConn, pass func(time.Duration)) {
		until := tc.stuck()
		h := tc.command(readF, 2<<20, cdb.Read10(0, 4096), nil)
		until(1)
		pass(time.Second)
		tc.takes()
		tc.wantStatus(h, 0)
	}, spent{lun.PhaseSend: time.Second}},
	{"READs that have to wait until the initiator takes others", nil, func(tc *testConn, pass func(time.Duration)) {
		until := tc.stuck()
		var hs []pdu.BHS
		for range 6 { // of 1 MiB, of which 4 fit
			hs = append(hs, tc.command(readF, 1<<20, cdb.Read10(0, 2048), nil))
		}
		until(6)
		pass(time.Second)
		tc.takes()
		tc.wantAllGood(hs)
	}, spent{lun.PhaseSend: 6 * time.Second}},
	{"CmdSN that is missing", nil, func(tc *testConn, pass func(time.Duration)) {
		come := tc.received(1)
		gap := tc.scsi(pdu.FlagF, 0, cdb.TestUnitReady)
		tc.command(writeF, 4096, cdb.Write10(0, 8), nil)
		come()
		pass(time.Second)
		tc.write(gap, nil)
		tc.want(pdu.SCSIResponse)
		tc.want(pdu.SCSIResponse)
	}, spent{lun.PhaseReceive: time.Second}},
	{"task slots that are all in use", nil, func(tc *testConn, pass func(time.Duration)) {
		tc.stuck()
		come := tc.received(uint64(tc.m.full) + 1)
		for range tc.m.full {
			tc.write(tc.Request(pdu.NOPOut, pdu.FlagF, true), nil)
		}
		tc.command(pdu.FlagF, 0, cdb.TestUnitReady, nil)
		come()
		pass(time.Second)
		tc.takes()
		for range tc.m.full + 1 { // in any order
			p := tc.next(testkit.Patience)
			if p == nil {
				tc.tb.Fatal("no answer")
			}
			tc.ExpStatSN = p.h.StatSN() + 1
		}
	}, spent{lun.PhaseReceive: time.Second}},
	{"ORDERED command before", nil, func(tc *testConn, pass func(time.Duration)) {
		gate := tc.store.Shut()
		hs := []pdu.BHS{tc.command(readF|pdu.AttrOrdered, 4096, cdb.Read10(0, 8), nil)}
		<-gate.Entered
		hs = append(hs, tc.command(readF, 4096, cdb.Read10(0, 8), nil))
		testkit.Eventually(tc.tb, "tasks", func() bool { return tc.Sessions()[0].Tasks == 2 })
		pass(time.Second)
		gate.Open()
		tc.wantAllGood(hs)
	}, spent{lun.PhaseReceive: time.Second, lun.PhaseBackend: time.Second}},
	{"memory that others have", []func(*Options){onePiece}, func(tc *testConn, pass func(time.Duration)) {
		gate := tc.store.Shut()
		hs := []pdu.BHS{tc.command(readF, 65536, cdb.Read10(0, 128), nil)}
		<-gate.Entered
		hs = append(hs, tc.command(readF, 65536, cdb.Read10(0, 128), nil))
		testkit.Eventually(tc.tb, "a wait for memory", tc.ours().budget.contended)
		pass(time.Second)
		gate.Open()
		tc.wantAllGood(hs)
	}, spent{lun.PhaseReceive: time.Second, lun.PhaseBackend: time.Second}},
	{"aborted", nil, func(tc *testConn, pass func(time.Duration)) {
		tc.m.holdGets = true
		h := tc.command(writeF, 4096, cdb.Write10(0, 8), nil)
		tc.wantGets(1)
		f := tc.tmf(pdu.AbortTask, [8]byte{}, h.ITT(), h.CmdSN())
		testkit.Eventually(tc.tb, "abort", func() bool {
			c := tc.ours()
			c.mu.Lock()
			defer c.mu.Unlock()
			return c.shared.tasks.any(func(t *Task) bool { return t.aborted.Load() })
		})
		pass(time.Second)
		tc.m.releaseGets()
		tc.wantTMF(f, pdu.FunctionComplete)
	}, spent{}},
}

// Time is spent in the phase that waits, and in no other: the clock of the test stands
// still otherwise.
func TestPhases(t *testing.T) {
	for _, c := range phaseCases {
		bubble(t, c.name, func(t *testing.T) {
			now := stopClock(t)
			n := newTestNode(t, c.change...)
			tc := n.connect().login()
			c.run(tc, func(d time.Duration) { now.Add(int64(d)) })
			tc.logout()
			n.checkIdle()
			total := time.Duration(0)
			got := n.sums()
			for p, d := range got[:lun.PhaseTotal] {
				total += d
				if want := c.want[lun.Phase(p)]; d != want {
					t.Errorf("%v: %v, want %v", lun.Phase(p), d, want)
				}
			}
			if got[lun.PhaseTotal] != total {
				t.Errorf("%v in all, %v in the phases", got[lun.PhaseTotal], total)
			}
		})
	}
}

// ours returns the target's end of the only connection.
func (n *testNode) ours() (c *conn) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for c = range n.conns {
	}
	return c
}

// takes lets the network take what it was offered.
func (tc *testConn) takes() {
	tc.m.mu.Lock()
	defer tc.m.mu.Unlock()
	tc.m.holdFlush = false
	tc.m.cond.Broadcast()
}

// A command that continues on another connection counts once. The time between is part
// of what it waited for.
func TestPhasesOfReassignedCommands(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		now := stopClock(t)
		n := newTestNode(t, recovering)
		a := n.leadRecovering()
		b := a.join(1)
		a.m.holdGets = true
		h := a.on(b).command(writeF, 4096, cdb.Write10(0, 8), nil)
		a.wantGets(1)
		now.Add(int64(time.Second))
		a.close()
		a.wantEnd(io.EOF)
		b.on(a).hearOf(a)
		b.recoverFrom(a, a.ExpStatSN)
		now.Add(int64(2 * time.Second))
		b.takeOver(a, h)
		b.wantTMF(b.reassign(h), pdu.FunctionComplete)
		b.wantStatus(h, 0)
		s := n.Sessions()[0]
		b.logout()
		n.checkIdle()
		d := n.sums()
		if d[lun.PhaseReadWait] != 3*time.Second || d[lun.PhaseTotal] != 3*time.Second {
			t.Errorf("%v", d)
		}
		c := s.Counts.Commands
		ended := c[lun.KindRead] + c[lun.KindWrite] + c[lun.KindOther]
		if all := n.Latencies()[lun.ISER][lun.PhaseTotal].Count; all != ended ||
			s.Latencies[lun.PhaseTotal].Count != ended {
			t.Errorf("%d commands took their time, %d those of the session; %d have ended", all,
				s.Latencies[lun.PhaseTotal].Count, ended)
		}
	})
}
