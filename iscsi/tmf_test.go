package iscsi

import (
	"bytes"
	"testing"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
)

// ISCSI-11.6-1, ISCSI-7.11-2, ISCSI-11.5-2, ISER-3.1.9-1, ISCSI-10.7-1: ABORT
// TASK waits until the task has stopped; its data is dropped.
func TestAbortTask(t *testing.T) {
	t.Run("GetData outstanding", func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		before := n.stored(0, 4096)
		tc.m.holdGets = true
		h := tc.command(writeF, 4096, write10(0, 8), nil)
		n.eventually("GetData", func() bool { return tc.m.getting() == 1 })
		f := tc.tmf(pdu.AbortTask, [8]byte{}, h.ITT(), h.CmdSN())
		tc.wantNothing()
		tc.m.releaseGets()
		tc.wantTMF(f, pdu.FunctionComplete)
		tc.wantNothing()
		if !bytes.Equal(n.stored(0, 4096), before) {
			t.Error("data of an aborted write is on the medium")
		}
		tc.wantTMF(tc.tmf(pdu.AbortTask, [8]byte{}, h.ITT(), h.CmdSN()), pdu.TaskDoesNotExist)
		if tc.maxCmdSN != tc.expCmdSN+127 {
			t.Errorf("MaxCmdSN %d, ExpCmdSN %d", tc.maxCmdSN, tc.expCmdSN)
		}
		tc.logout()
	})
	t.Run("in the backend", func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		open := n.store.shut()
		h := tc.command(readF, 3<<20, read10(0, 6144), nil)
		<-n.store.entered
		f := tc.tmf(pdu.AbortTask, [8]byte{}, h.ITT(), h.CmdSN())
		tc.wantNothing()
		open()
		tc.wantTMF(f, pdu.FunctionComplete)
		tc.wantNothing()
		if len(tc.m.puts) != 0 {
			t.Errorf("data of an aborted read was sent: %v", tc.m.puts)
		}
		tc.logout()
	})
	t.Run("waiting for memory", func(t *testing.T) {
		n := newTestNode(t, func(o *Options) { o.ConnectionMemory = 1; o.MaxTransferPiece = 1 })
		tc := n.connect().login()
		open := n.store.shut()
		first := tc.command(readF, 65536, read10(0, 128), nil)
		<-n.store.entered
		var waiting []pdu.BHS
		for range 3 {
			waiting = append(waiting, tc.command(readF, 65536, read10(0, 128), nil))
		}
		time.Sleep(5 * time.Millisecond)
		for _, i := range []int{1, 0} { // at once, whatever the others do
			tc.wantTMF(tc.tmf(pdu.AbortTask, [8]byte{}, waiting[i].ITT(), waiting[i].CmdSN()), pdu.FunctionComplete)
		}
		open()
		tc.wantAllGood([]pdu.BHS{first, waiting[2]})
		tc.wantNothing()
		tc.logout()
	})
	t.Run("waiting for CmdSN", func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		gap := tc.scsi(pdu.FlagF, 0, testUnitReady)
		h := tc.command(writeF, 4096, write10(0, 8), make([]byte, 4096))
		next := tc.command(pdu.FlagF, 0, testUnitReady, nil)
		tc.wantTMF(tc.tmf(pdu.AbortTask, [8]byte{}, h.ITT(), h.CmdSN()), pdu.FunctionComplete)
		tc.write(gap, nil)
		tc.wantAllGood([]pdu.BHS{gap, next})
		tc.wantNothing()
		if tc.expCmdSN != tc.cmdSN || tc.maxCmdSN != tc.cmdSN+127 {
			t.Errorf("ExpCmdSN %d, MaxCmdSN %d", tc.expCmdSN, tc.maxCmdSN)
		}
		tc.logout()
	})
	t.Run("waiting for unsolicited data", func(t *testing.T) {
		n := unsolicitedNode(t)
		tc := n.connect().login()
		h := tc.scsi(pdu.FlagW, 4096, write10(0, 8))
		tc.write(h, make([]byte, 512))
		tc.wantTMF(tc.tmf(pdu.AbortTask, [8]byte{}, h.ITT(), h.CmdSN()), pdu.FunctionComplete)
		tc.wantNothing()
		tc.logout()
	})
	t.Run("waiting for its turn", func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		tc.m.holdGets = true
		first := tc.command(writeF, 4096, write10(0, 8), nil)
		n.eventually("GetData", func() bool { return tc.m.getting() == 1 })
		h := tc.command(writeF|pdu.AttrOrdered, 4096, write10(0, 8), make([]byte, 512))
		last := tc.command(pdu.FlagF|pdu.AttrSimple, 0, testUnitReady, nil)
		f := tc.tmf(pdu.AbortTask, [8]byte{}, h.ITT(), h.CmdSN())
		tc.sortSent(pdu.TaskMgmtResp, 2)
		tc.wantTMF(f, pdu.FunctionComplete)
		tc.wantStatus(last, 0)
		tc.m.releaseGets()
		tc.wantStatus(first, 0)
		tc.logout()
	})
	t.Run("ISCSI-7.11-1 never received", func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		gap := tc.scsi(pdu.FlagF, 0, testUnitReady)
		next := tc.command(pdu.FlagF, 0, testUnitReady, nil)
		tc.wantNothing()
		f := tc.tmf(pdu.AbortTask, [8]byte{}, gap.ITT(), gap.CmdSN())
		tc.sortSent(pdu.TaskMgmtResp, 2)
		tc.wantTMF(f, pdu.FunctionComplete)
		tc.wantStatus(next, 0)
		tc.write(gap, nil) // too late
		tc.wantNothing()
		tc.ping()
		if tc.expCmdSN != tc.cmdSN || tc.maxCmdSN != tc.cmdSN+127 {
			t.Errorf("ExpCmdSN %d, MaxCmdSN %d", tc.expCmdSN, tc.maxCmdSN)
		}
		// Outside the window, or not before the function: it does not exist.
		tc.wantTMF(tc.tmf(pdu.AbortTask, [8]byte{}, 0x7777, tc.cmdSN), pdu.TaskDoesNotExist)
		tc.wantTMF(tc.tmf(pdu.AbortTask, [8]byte{}, 0x7777, tc.cmdSN-1), pdu.TaskDoesNotExist)
		tc.logout()
	})
	t.Run("ISCSI-11.5-3 not on a function", func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		tc.m.holdGets = true
		h := tc.command(writeF, 4096, write10(0, 8), nil)
		n.eventually("GetData", func() bool { return tc.m.getting() == 1 })
		f := tc.tmf(pdu.LogicalUnitReset, [8]byte{}, pdu.ReservedTag, 0)
		tc.wantNothing()
		tc.wantTMF(tc.tmf(pdu.AbortTask, [8]byte{}, f.ITT(), 0), pdu.FunctionRejected)
		tc.wantTMF(tc.tmf(pdu.AbortTask, [8]byte{1: 1}, h.ITT(), h.CmdSN()), pdu.TaskDoesNotExist) // another LUN
		tc.m.releaseGets()
		tc.wantTMF(f, pdu.FunctionComplete)
		tc.logout()
	})
}

// ISCSI-11.5-1, ISCSI-7.2.2-1, ISCSI-11.6-2, ISCSI-11.6-3, ISCSI-7144.4.1-1:
// every function is answered.
func TestTMFResponses(t *testing.T) {
	n := newTestNode(t)
	tc := n.connect().login()
	for _, c := range []struct {
		function byte
		lun      byte
		want     byte
	}{
		{pdu.AbortTask, 0, pdu.TaskDoesNotExist},
		{pdu.AbortTaskSet, 0, pdu.FunctionComplete},
		{pdu.AbortTaskSet, 99, pdu.LUNDoesNotExist},
		{pdu.ClearACA, 0, pdu.FunctionNotSupported},
		{pdu.ClearTaskSet, 0, pdu.FunctionComplete},
		{pdu.ClearTaskSet, 99, pdu.LUNDoesNotExist},
		{pdu.LogicalUnitReset, 0, pdu.FunctionComplete},
		{pdu.LogicalUnitReset, 99, pdu.LUNDoesNotExist},
		{pdu.TargetWarmReset, 0, pdu.FunctionComplete},
		{pdu.TargetColdReset, 0, pdu.FunctionNotSupported},
		{pdu.TaskReassign, 0, pdu.ReassignNotSupported},
		{pdu.QueryTask, 0, pdu.FunctionNotSupported},
		{pdu.QueryAsyncEvent, 0, pdu.FunctionNotSupported},
		{0, 0, pdu.FunctionNotSupported},
		{13, 0, pdu.FunctionNotSupported},
		{127, 0, pdu.FunctionNotSupported},
	} {
		tc.wantTMF(tc.tmf(c.function, [8]byte{1: c.lun}, pdu.ReservedTag, tc.cmdSN-1), c.want)
	}
	tc.logout()
}

// ISCSI-11.5-4, ISCSI-4.2.2.1-12, ISCSI-4.2.2.3-1, ISCSI-4.2.3.3-1,
// ISCSI-4.2.3.3-2: ABORT TASK SET stops the tasks of this session on one LUN
// that were sent before it.
func TestAbortTaskSet(t *testing.T) {
	n := newTestNode(t)
	tc := n.connect().login()
	other := n.connect(func(tc *testConn) { tc.isid[5] = 2 }).login()
	tc.m.holdGets, other.m.holdGets = true, true
	for range 32 {
		tc.command(writeF, 4096, write10(0, 8), nil)
	}
	spared := other.command(writeF, 4096, write10(0, 8), nil)
	n.eventually("GetDatas", func() bool { return tc.m.getting() == 32 && other.m.getting() == 1 })
	f := tc.tmf(pdu.AbortTaskSet, [8]byte{}, pdu.ReservedTag, 0)
	later := tc.command(pdu.FlagF, 0, testUnitReady, nil)
	tc.wantStatus(later, 0) // CmdSN of the function marks its scope
	tc.wantNothing()
	tc.m.releaseGets()
	tc.wantTMF(f, pdu.FunctionComplete)
	tc.wantNothing()
	other.m.releaseGets()
	other.wantStatus(spared, 0)
	tc.logout()
	other.logout()
}

// ISCSI-4.2.3.3-3: the function waits for commands sent before it that have not
// come.
func TestAbortTaskSetWaitsForEarlier(t *testing.T) {
	n := newTestNode(t)
	tc := n.connect().login()
	gap := tc.scsi(pdu.FlagF, 0, testUnitReady)
	h := tc.command(pdu.FlagF, 0, testUnitReady, nil)
	f := tc.tmf(pdu.AbortTaskSet, [8]byte{}, pdu.ReservedTag, 0)
	tc.wantNothing()
	tc.write(gap, nil)
	// The gap's command and the one behind may be answered or aborted; the
	// function's response comes last.
	for {
		r := tc.next(patience)
		if r == nil {
			t.Fatal("no TMF Response")
		}
		tc.expStatSN = r.h.StatSN() + 1
		if r.h.Opcode() == pdu.TaskMgmtResp {
			if r.h.ITT() != f.ITT() || r.h.Response() != 0 || r.h.ExpCmdSN() != h.CmdSN()+1 {
				t.Errorf("%x", []byte(r.h))
			}
			break
		}
	}
	tc.wantNothing()
	tc.logout()
}

// ISCSI-11.5-5, ISCSI-4.2.3.3-5, ISCSI-4.2.3.3-6, ISCSI-E-3: LOGICAL UNIT RESET
// stops the tasks of all sessions, and CLEAR TASK SET does.
func TestResetStopsOtherSessions(t *testing.T) {
	for name, function := range map[string]byte{"LOGICAL UNIT RESET": pdu.LogicalUnitReset, "CLEAR TASK SET": pdu.ClearTaskSet, "TARGET WARM RESET": pdu.TargetWarmReset} {
		t.Run(name, func(t *testing.T) {
			n := newTestNode(t)
			tc := n.connect().login()
			other := n.connect(func(tc *testConn) { tc.isid[5] = 2 }).login()
			other.m.holdGets = true
			fetching := other.command(writeF, 4096, write10(0, 8), nil)
			n.eventually("GetData", func() bool { return other.m.getting() == 1 })
			open := n.store.shut()
			other.command(readF, 4096, read10(0, 8), nil)
			tc.command(readF, 4096, read10(0, 8), nil)
			<-n.store.entered
			<-n.store.entered
			before := n.stored(0, 4096)
			f := tc.tmf(function, [8]byte{}, pdu.ReservedTag, 0)
			// The other session learns that there is room in its window again.
			if p := other.want(pdu.NOPIn); p.h.ITT() != pdu.ReservedTag || p.h.TTT() != pdu.ReservedTag {
				t.Errorf("%x", []byte(p.h))
			}
			tc.wantNothing()
			open()
			tc.wantTMF(f, pdu.FunctionComplete) // data still to come to the other session is not waited for
			other.m.releaseGets()
			other.wantNothing()
			if !bytes.Equal(n.stored(0, 4096), before) {
				t.Error("data of an aborted write is on the medium")
			}
			other.wantTMF(other.tmf(pdu.AbortTask, [8]byte{}, fetching.ITT(), fetching.CmdSN()), pdu.TaskDoesNotExist)
			for _, c := range []*testConn{tc, other} { // ISCSI-11.5-5: unit attention elsewhere
				for range 3 {
					c.command(pdu.FlagF, 0, testUnitReady, nil)
					if c.want(pdu.SCSIResponse).h.Status() == 0 {
						break
					}
				}
				c.ping()
				if c.expCmdSN != c.cmdSN || c.maxCmdSN != c.cmdSN+127 {
					t.Errorf("ExpCmdSN %d, MaxCmdSN %d", c.expCmdSN, c.maxCmdSN)
				}
				c.logout()
			}
		})
	}
}

// ISCSI-4.2.3.3-4: before a target reset missing commands count as received.
func TestWarmResetSkipsGap(t *testing.T) {
	n := newTestNode(t)
	tc := n.connect().login()
	tc.cmdSN += 5
	tc.command(writeF, 4096, write10(0, 8), make([]byte, 4096))
	tc.cmdSN += 2
	f := tc.tmf(pdu.TargetWarmReset, [8]byte{}, pdu.ReservedTag, 0)
	p := tc.want(pdu.TaskMgmtResp)
	if p.h.ITT() != f.ITT() || tc.expCmdSN != tc.cmdSN || tc.maxCmdSN != tc.cmdSN+127 {
		t.Errorf("ExpCmdSN %d instead of %d, MaxCmdSN %d", tc.expCmdSN, tc.cmdSN, tc.maxCmdSN)
	}
	tc.wantNothing() // nor the one that waited
	tc.ping()
	tc.logout()
}

// A connection that ends while a function waits takes nothing down with it.
func TestTMFAtTheEnd(t *testing.T) {
	n := newTestNode(t)
	tc := n.connect().login()
	other := n.connect(func(tc *testConn) { tc.isid[5] = 2 }).login()
	open := n.store.shut()
	other.command(readF, 4096, read10(0, 8), nil)
	tc.m.holdGets = true
	tc.command(writeF, 4096, write10(0, 8), nil)
	n.eventually("GetData", func() bool { return tc.m.getting() == 1 })
	<-n.store.entered
	tc.tmf(pdu.LogicalUnitReset, [8]byte{}, pdu.ReservedTag, 0)
	tc.tmf(pdu.AbortTaskSet, [8]byte{}, pdu.ReservedTag, 0)
	gap := tc.request(pdu.TaskMgmtReq, pdu.FlagF|pdu.AbortTaskSet, true)
	gap.SetCmdSN(tc.cmdSN + 3)
	tc.write(gap, nil)
	time.Sleep(5 * time.Millisecond)
	tc.close()
	time.Sleep(5 * time.Millisecond)
	open()
	tc.wait()
	other.want(pdu.NOPIn)
	other.logout()
}
