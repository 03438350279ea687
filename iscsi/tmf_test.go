package iscsi

import (
	"bytes"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// ABORT TASK waits until the task has stopped (ISER-3.1.9-1), and its data is dropped
// (ISCSI-10.7-1). No response of the task follows (ISCSI-11.5-2), and it exists no more
// (ISCSI-7.11-2).
func TestAbortTaskWaitsForData(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		before := n.stored(0, 4096)
		tc.m.holdGets = true
		h := tc.command(writeF, 4096, cdb.Write10(0, 8), nil)
		tc.wantGets(1)
		f := tc.tmf(pdu.AbortTask, [8]byte{}, h.ITT(), h.CmdSN())
		tc.wantNothing()
		tc.m.releaseGets()
		tc.wantTMF(f, pdu.FunctionComplete)
		tc.wantNothing()
		if !bytes.Equal(n.stored(0, 4096), before) {
			t.Error("data of an aborted write is on the medium")
		}
		tc.wantTMF(tc.tmf(pdu.AbortTask, [8]byte{}, h.ITT(), h.CmdSN()), pdu.TaskDoesNotExist)
		tc.wantOpenWindow()
		if c := n.Sessions()[0].Counts; c.Aborted != 1 || c.Bytes[lun.KindWrite] != 0 || c.InFlight != 0 {
			t.Errorf("counts %+v", c)
		}
		tc.logout()
	})
}

// A task in the backend stops when the backend is done (ISCSI-11.6-1).
func TestAbortTaskWaitsForTheBackend(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		gate := n.store.Shut()
		h := tc.command(readF, 3<<20, cdb.Read10(0, 6144), nil)
		<-gate.Entered
		f := tc.tmf(pdu.AbortTask, [8]byte{}, h.ITT(), h.CmdSN())
		tc.wantNothing()
		gate.Open()
		tc.wantTMF(f, pdu.FunctionComplete)
		tc.wantNothing()
		if len(tc.m.puts) != 0 {
			t.Errorf("data of an aborted read was sent: %v", tc.m.puts)
		}
		tc.logout()
	})
}

// A command that takes long stops between two steps.
func TestAbortTaskStopsALongCommandBetweenTwoSteps(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		gate := n.store.Shut()
		h := tc.command(writeF, blockLen, cdb.RW16(0x93, 0, storeLen/blockLen), nil)
		<-gate.Entered
		f := tc.tmf(pdu.AbortTask, [8]byte{}, h.ITT(), h.CmdSN())
		tc.wantNothing()
		gate.Open()
		tc.wantTMF(f, pdu.FunctionComplete)
		tc.wantNothing()
		if !bytes.Equal(n.stored(storeLen/blockLen-1, blockLen), make([]byte, blockLen)) {
			t.Error("an aborted WRITE SAME went on to its end")
		}
		tc.logout()
	})
}

// A task that waits for memory ends at once, whatever the others do.
func TestAbortTaskEndsAWaitForMemory(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, func(o *Options) { o.ConnectionMemory = 1; o.MaxTransferPiece = 1 })
		tc := n.connect().login()
		gate := n.store.Shut()
		first := tc.command(readF, 65536, cdb.Read10(0, 128), nil)
		<-gate.Entered
		var waiting []pdu.BHS
		for range 3 {
			waiting = append(waiting, tc.command(readF, 65536, cdb.Read10(0, 128), nil))
		}
		synctest.Wait()
		for _, i := range []int{1, 0} { // at once, whatever the others do
			tc.wantTMF(tc.tmf(pdu.AbortTask, [8]byte{}, waiting[i].ITT(), waiting[i].CmdSN()), pdu.FunctionComplete)
		}
		gate.Open()
		tc.wantAllGood([]pdu.BHS{first, waiting[2]})
		tc.wantNothing()
		tc.logout()
	})
}

// A task that waits for an earlier CmdSN ends at once.
func TestAbortTaskEndsAWaitForCmdSN(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		gap := tc.scsi(pdu.FlagF, 0, cdb.TestUnitReady)
		h := tc.command(writeF, 4096, cdb.Write10(0, 8), make([]byte, 4096))
		next := tc.command(pdu.FlagF, 0, cdb.TestUnitReady, nil)
		tc.wantTMF(tc.tmf(pdu.AbortTask, [8]byte{}, h.ITT(), h.CmdSN()), pdu.FunctionComplete)
		tc.write(gap, nil)
		tc.wantAllGood([]pdu.BHS{gap, next})
		tc.wantNothing()
		tc.wantOpenWindow()
		tc.logout()
	})
}

// A task that waits for unsolicited data ends at once.
func TestAbortTaskEndsAWaitForUnsolicitedData(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := unsolicitedNode(t)
		tc := n.connect().login()
		h := tc.scsi(pdu.FlagW, 4096, cdb.Write10(0, 8))
		tc.write(h, make([]byte, 512))
		tc.wantTMF(tc.tmf(pdu.AbortTask, [8]byte{}, h.ITT(), h.CmdSN()), pdu.FunctionComplete)
		tc.wantNothing()
		tc.logout()
	})
}

// An ORDERED task that waits for its turn ends, and the next ones continue.
func TestAbortTaskEndsAnOrderedTaskBeforeItsTurn(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		tc.m.holdGets = true
		first := tc.command(writeF, 4096, cdb.Write10(0, 8), nil)
		tc.wantGets(1)
		h := tc.command(writeF|pdu.AttrOrdered, 4096, cdb.Write10(0, 8), make([]byte, 512))
		last := tc.command(pdu.FlagF|pdu.AttrSimple, 0, cdb.TestUnitReady, nil)
		f := tc.tmf(pdu.AbortTask, [8]byte{}, h.ITT(), h.CmdSN())
		tc.sortSent(pdu.TaskMgmtResp, 2)
		tc.wantTMF(f, pdu.FunctionComplete)
		tc.wantStatus(last, 0)
		tc.m.releaseGets()
		tc.wantStatus(first, 0)
		tc.logout()
	})
}

// ISCSI-7.11-1: a command that was never received counts as received.
func TestAbortTaskFillsTheGapOfALostCommand(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		gap := tc.scsi(pdu.FlagF, 0, cdb.TestUnitReady)
		next := tc.command(pdu.FlagF, 0, cdb.TestUnitReady, nil)
		tc.wantNothing()
		f := tc.tmf(pdu.AbortTask, [8]byte{}, gap.ITT(), gap.CmdSN())
		tc.sortSent(pdu.TaskMgmtResp, 2)
		tc.wantTMF(f, pdu.FunctionComplete)
		tc.wantStatus(next, 0)
		tc.write(gap, nil) // too late
		tc.wantNothing()
		tc.ping()
		tc.wantOpenWindow()
		// Outside the window, or not before the function: it does not exist.
		tc.wantTMF(tc.tmf(pdu.AbortTask, [8]byte{}, 0x7777, tc.CmdSN), pdu.TaskDoesNotExist)
		tc.wantTMF(tc.tmf(pdu.AbortTask, [8]byte{}, 0x7777, tc.CmdSN-1), pdu.TaskDoesNotExist)
		tc.logout()
	})
}

// ISCSI-11.5-3: functions cannot be aborted, nor tasks by the number of another LUN.
func TestAbortTaskOfAFunctionIsRejected(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		tc.m.holdGets = true
		h := tc.command(writeF, 4096, cdb.Write10(0, 8), nil)
		tc.wantGets(1)
		f := tc.tmf(pdu.LogicalUnitReset, [8]byte{}, pdu.ReservedTag, 0)
		tc.wantNothing()
		tc.wantTMF(tc.tmf(pdu.AbortTask, [8]byte{}, f.ITT(), 0), pdu.FunctionRejected)
		tc.wantTMF(tc.tmf(pdu.AbortTask, [8]byte{1: 1}, h.ITT(), h.CmdSN()), pdu.TaskDoesNotExist) // another LUN
		tc.m.releaseGets()
		tc.wantTMF(f, pdu.FunctionComplete)
		tc.logout()
	})
}

// ISCSI-11.5-1: every function is answered, and the answer has no data (ISCSI-11.6-3).
func TestTMFResponses(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		for _, c := range []struct {
			function byte
			lun      byte
			want     byte
		}{
			{pdu.AbortTask, 0, pdu.TaskDoesNotExist},
			{pdu.AbortTaskSet, 0, pdu.FunctionComplete},
			{pdu.AbortTaskSet, 99, pdu.LUNDoesNotExist}, // ISCSI-11.6-2
			{pdu.ClearACA, 0, pdu.FunctionNotSupported}, // ISCSI-10.2-1
			{pdu.ClearTaskSet, 0, pdu.FunctionComplete},
			{pdu.ClearTaskSet, 99, pdu.LUNDoesNotExist},
			{pdu.LogicalUnitReset, 0, pdu.FunctionComplete},
			{pdu.LogicalUnitReset, 99, pdu.LUNDoesNotExist},
			{pdu.TargetWarmReset, 0, pdu.FunctionComplete},
			{pdu.TaskReassign, 0, pdu.ReassignNotSupported}, // ISCSI-7.2.2-1
			{pdu.QueryTask, 0, pdu.FunctionNotSupported},    // ISCSI-7144.4.1-1
			{pdu.QueryAsyncEvent, 0, pdu.FunctionNotSupported},
			{0, 0, pdu.FunctionNotSupported},
			{13, 0, pdu.FunctionNotSupported},
			{127, 0, pdu.FunctionNotSupported},
		} {
			tc.wantTMF(tc.tmf(c.function, [8]byte{1: c.lun}, pdu.ReservedTag, tc.CmdSN-1), c.want)
		}
		tc.logout()
	})
}

// ABORT TASK SET stops the tasks of this session on one LUN that were sent before it.
func TestAbortTaskSet(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		other := n.connect(func(tc *testConn) { tc.isid[5] = 2 }).login()
		tc.m.holdGets, other.m.holdGets = true, true
		for range 32 {
			tc.command(writeF, 4096, cdb.Write10(0, 8), nil)
		}
		spared := other.command(writeF, 4096, cdb.Write10(0, 8), nil)
		testkit.Eventually(n.tb, "GetDatas", func() bool { return tc.m.getting() == 32 && other.m.getting() == 1 })
		f := tc.tmf(pdu.AbortTaskSet, [8]byte{}, pdu.ReservedTag, 0)
		later := tc.command(pdu.FlagF, 0, cdb.TestUnitReady, nil)
		tc.wantStatus(later, 0) // ISCSI-4.2.2.1-12: CmdSN of the function marks its scope
		tc.wantNothing()        // ISCSI-4.2.3.3-1, ISCSI-4.2.3.3-2: it waits for data
		tc.m.releaseGets()
		tc.wantTMF(f, pdu.FunctionComplete)
		tc.wantNothing() // ISCSI-4.2.2.3-1
		other.m.releaseGets()
		other.wantStatus(spared, 0) // ISCSI-11.5-4
		tc.logout()
		other.logout()
	})
}

// ISCSI-4.2.3.3-3: the function waits for commands sent before it that have not
// come.
func TestAbortTaskSetWaitsForEarlier(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		gap := tc.scsi(pdu.FlagF, 0, cdb.TestUnitReady)
		h := tc.command(pdu.FlagF, 0, cdb.TestUnitReady, nil)
		f := tc.tmf(pdu.AbortTaskSet, [8]byte{}, pdu.ReservedTag, 0)
		tc.wantNothing()
		tc.write(gap, nil)
		// The gap's command and the one behind may be answered or aborted; the
		// function's response comes last.
		for {
			r := tc.next(testkit.Patience)
			if r == nil {
				t.Fatal("no TMF Response")
			}
			tc.ExpStatSN = r.h.StatSN() + 1
			if r.h.Opcode() == pdu.TaskMgmtResp {
				if r.h.ITT() != f.ITT() || r.h.Response() != 0 || r.h.ExpCmdSN() != h.CmdSN()+1 {
					t.Errorf("%x", []byte(r.h))
				}
				break
			}
		}
		tc.wantNothing()
		tc.logout()
	})
}

// ISCSI-E-3: LOGICAL UNIT RESET, CLEAR TASK SET and TARGET WARM RESET stop the tasks of all
// sessions. Those of other sessions get TASK ABORTED.
func TestResetStopsOtherSessions(t *testing.T) {
	for name, function := range map[string]byte{"LOGICAL UNIT RESET": pdu.LogicalUnitReset,
		"CLEAR TASK SET": pdu.ClearTaskSet, "TARGET WARM RESET": pdu.TargetWarmReset} {
		bubble(t, name, func(t *testing.T) {
			n := newTestNode(t)
			tc := n.connect().login()
			other := n.connect(func(tc *testConn) { tc.isid[5] = 2 }).login()
			other.m.holdGets = true
			fetching := other.command(writeF, 4096, cdb.Write10(0, 8), nil)
			other.wantGets(1)
			gate := n.store.Shut()
			reading := other.command(readF, 4096, cdb.Read10(0, 8), nil)
			tc.command(readF, 4096, cdb.Read10(0, 8), nil)
			<-gate.Entered
			<-gate.Entered
			before := n.stored(0, 4096)
			f := tc.tmf(function, [8]byte{}, pdu.ReservedTag, 0)
			tc.wantNothing()
			gate.Open()
			// ISCSI-4.2.3.3-5
			tc.wantTMF(f, pdu.FunctionComplete) // data still to come to the other session is not waited for
			other.wantAborted(reading, 4096)
			other.wantNothing()
			other.m.releaseGets()
			other.wantAborted(fetching, 4096) // ISCSI-11.4-2
			other.wantNothing()
			if !bytes.Equal(n.stored(0, 4096), before) {
				t.Error("data of an aborted write is on the medium")
			}
			other.wantTMF(other.tmf(pdu.AbortTask, [8]byte{}, fetching.ITT(), fetching.CmdSN()), pdu.TaskDoesNotExist)
			for _, c := range []*testConn{tc, other} { // ISCSI-11.5-5, SEC-7143.9.5-1: unit attentions
				h := c.command(pdu.FlagF, 0, cdb.TestUnitReady, nil)
				if function != pdu.ClearTaskSet {
					c.wantSense(h, 0x06, 0x29, 0x03)
				} else {
					c.wantStatus(h, 0)
				}
				c.wantStatus(c.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 0)
				c.ping()
				c.wantOpenWindow()
				c.logout()
			}
		})
	}
}

// wantWindow takes a NOP-In that says how much room there is in the window, and
// answers it.
func (tc *testConn) wantWindow() {
	tc.tb.Helper()
	p := tc.want(pdu.NOPIn)
	if p.h.ITT() != pdu.ReservedTag || (p.h.TTT() != pdu.ReservedTag) != tc.m.rdma || tc.expCmdSN != tc.CmdSN {
		tc.tb.Fatalf("%x", []byte(p.h))
	}
	if tc.m.rdma {
		h := tc.Request(pdu.NOPOut, pdu.FlagF, true)
		h.SetITT(pdu.ReservedTag)
		h.SetTTT(p.h.TTT())
		tc.write(h, nil)
	}
}

// ISCSI-11.4-11: when tasks end without a response and nothing else is to be
// sent, a NOP-In says that the window is open again, once all of them have ended
// and as soon as the initiator has a buffer for it.
func TestWindowNews(t *testing.T) {
	for _, rdma := range []bool{true, false} {
		bubble(t, map[bool]string{true: "RDMA", false: "TCP"}[rdma], func(t *testing.T) {
			n := newTestNode(t, func(o *Options) { o.QueueDepth = 4 })
			other := n.connect(func(tc *testConn) { tc.m.rdma = rdma }).login()
			abort := func() { n.sessions[other.tsih].abort((*Task).isCommand, false) }
			for round := range 5 { // more than there are buffers
				gate := n.store.Shut()
				for range 4 {
					other.command(readF, 4096, cdb.Read10(0, 8), nil)
					<-gate.Entered
				}
				abort()
				other.wantNothing()
				gate.Open()
				other.wantWindow()
				if other.maxCmdSN != other.CmdSN+3 {
					t.Fatalf("round %d: MaxCmdSN %d, CmdSN %d", round, other.maxCmdSN, other.CmdSN)
				}
				// A response that carries the news itself: no NOP-In.
				for range 2 {
					other.command(pdu.FlagF, 0, cdb.TestUnitReady, nil)
					other.want(pdu.SCSIResponse)
				}
				other.wantNothing()
			}
			if rdma {
				// Both buffers are taken, by a Reject and a ping, and another Reject waits:
				// the news comes when one is free.
				gate := n.store.Shut()
				other.command(readF, 4096, cdb.Read10(0, 8), nil)
				<-gate.Entered
				h := other.Request(pdu.SNACK, pdu.FlagF, true)
				other.write(h, nil)
				other.write(h, nil)
				other.wantReject(pdu.RejectProtocolError, h)
				ping := other.want(pdu.NOPIn)
				abort()
				gate.Open()
				other.wantNothing()
				ack := other.Request(pdu.NOPOut, pdu.FlagF, true)
				ack.SetITT(pdu.ReservedTag)
				ack.SetTTT(pdu.ReservedTag)
				other.write(ack, nil)
				other.wantWindow() // in the place of the first Reject
				pong := other.Request(pdu.NOPOut, pdu.FlagF, true)
				pong.SetITT(pdu.ReservedTag)
				pong.SetTTT(ping.h.TTT())
				other.write(pong, nil)
				other.wantReject(pdu.RejectProtocolError, h)
				if other.maxCmdSN != other.CmdSN+3 {
					t.Errorf("MaxCmdSN %d, CmdSN %d", other.maxCmdSN, other.CmdSN)
				}
			}
			other.logout()
		})
	}
}

// While the network keeps the news no other goroutine waits to tell it, and what they had to
// tell is told when the network continues.
func TestWindowNewsOnSlowNetwork(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect(func(tc *testConn) { tc.m.rdma = false }).login()
		var c *conn
		for c = range n.conns {
		}
		hold := func(on bool) {
			tc.m.mu.Lock()
			defer tc.m.mu.Unlock()
			tc.m.holdFlush = on
			tc.m.cond.Broadcast()
		}
		end := func() <-chan struct{} { // a command that ends without a response
			c.mu.Lock()
			c.shared.win.ended()
			c.mu.Unlock()
			told := make(chan struct{})
			go func() {
				c.tellWindow()
				close(told)
			}()
			return told
		}
		hold(true)
		flushes := func() int {
			tc.m.mu.Lock()
			defer tc.m.mu.Unlock()
			return tc.m.flushes
		}
		before := flushes()
		first := end()
		testkit.Eventually(n.tb, "a NOP-In waits for the network", func() bool { return flushes() > before })
		select {
		case <-end():
		case <-time.After(testkit.Patience):
			t.Error("another goroutine waits for the network")
		}
		hold(false)
		<-first
		was := tc.maxCmdSN
		for tc.maxCmdSN != was+2 {
			tc.want(pdu.NOPIn)
		}
		tc.wantNothing()
		tc.logout()
	})
}

// ISCSI-4.2.3.3-4: before a target reset missing commands count as received.
func TestWarmResetSkipsGap(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		tc.CmdSN += 5
		tc.command(writeF, 4096, cdb.Write10(0, 8), make([]byte, 4096))
		tc.CmdSN += 2
		f := tc.tmf(pdu.TargetWarmReset, [8]byte{}, pdu.ReservedTag, 0)
		p := tc.want(pdu.TaskMgmtResp)
		if p.h.ITT() != f.ITT() || tc.expCmdSN != tc.CmdSN || tc.maxCmdSN != tc.CmdSN+127 {
			t.Errorf("ExpCmdSN %d instead of %d, MaxCmdSN %d", tc.expCmdSN, tc.CmdSN, tc.maxCmdSN)
		}
		tc.wantNothing() // nor the one that waited
		tc.ping()
		tc.logout()
	})
}

// The commands that waited for what a target reset skips never begin, on no connection of the session: they would
// overtake the commands that are missing.
func TestWarmResetBeginsNothing(t *testing.T) {
	for range 50 { // a goroutine that begins one would be a matter of time
		testkit.Bubble(t, func(t *testing.T) {
			n := newTestNode(t, several(4))
			tc := n.lead()
			other := tc.join(1)
			const commands = 8
			before := n.stored(0, commands*blockLen)
			data, missing := bytes.Repeat([]byte{0xee}, blockLen), tc.CmdSN
			for i := range uint32(commands) {
				on := []*testConn{tc, other}[i%2]
				on.CmdSN = missing + 1 + i
				on.command(writeF, blockLen, cdb.Write10(i, 1), data)
			}
			tc.CmdSN = missing + 1 + commands
			synctest.Wait()
			f := tc.tmf(pdu.TargetWarmReset, [8]byte{}, pdu.ReservedTag, 0)
			if p := tc.want(pdu.TaskMgmtResp); p.h.ITT() != f.ITT() || tc.expCmdSN != tc.CmdSN {
				t.Errorf("response for %#x, ExpCmdSN %d instead of %d", p.h.ITT(), tc.expCmdSN, tc.CmdSN)
			}
			tc.wantNothing()
			other.wantNothing()
			if !bytes.Equal(n.stored(0, commands*blockLen), before) {
				t.Error("a command that waited has written")
			}
			tc.logout()
		})
	}
}

// The target answers TARGET COLD RESET and then closes all connections, of discovery sessions
// too. New sessions get the unit attention of a power on.
func TestColdReset(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, func(o *Options) { o.LogoutWait = 20 * time.Millisecond })
		tc := n.connect().login()
		other := n.connect(func(tc *testConn) { tc.isid[5] = 2 }).login()
		discovery := n.connect(func(tc *testConn) { tc.isid[5] = 3 })
		discovery.writeLogin(discovery.loginRequest(true, 1, 3), "InitiatorName="+initiatorName,
			"SessionType=Discovery", "TargetName="+targetName)
		discovery.wantLogin(pdu.LoginSuccess)
		unnamed := n.connect(func(tc *testConn) { tc.isid[5] = 4 }).discover()
		other.m.holdGets = true
		before := n.stored(0, 4096)
		other.command(writeF, 4096, cdb.Write10(0, 8), nil)
		other.wantGets(1)
		tc.CmdSN += 5 // what is missing counts as received
		f := tc.tmf(pdu.TargetColdReset, [8]byte{}, pdu.ReservedTag, 0)
		tc.wantTMF(f, pdu.FunctionComplete)                   // ISCSI-11.5-6
		for _, c := range []*testConn{tc, other, discovery} { // ISCSI-11.5-7, ISCSI-E-3
			if err := c.wait(); !errors.Is(err, errColdReset) {
				t.Errorf("ended with %v", err)
			}
		}
		if !bytes.Equal(n.stored(0, 4096), before) {
			t.Error("data of an aborted write is on the medium")
		}
		again := n.connect().login() // ISCSI-E-4
		again.logout()
		unnamed.logout() // it is not with this target
	})
}

// A connection that ends while a function waits takes nothing down with it.
func TestTMFAtTheEnd(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		other := n.connect(func(tc *testConn) { tc.isid[5] = 2 }).login()
		gate := n.store.Shut()
		h := other.command(readF, 4096, cdb.Read10(0, 8), nil)
		tc.m.holdGets = true
		tc.command(writeF, 4096, cdb.Write10(0, 8), nil)
		tc.wantGets(1)
		<-gate.Entered
		tc.tmf(pdu.LogicalUnitReset, [8]byte{}, pdu.ReservedTag, 0)
		tc.tmf(pdu.AbortTaskSet, [8]byte{}, pdu.ReservedTag, 0)
		gap := tc.Request(pdu.TaskMgmtReq, pdu.FlagF|pdu.AbortTaskSet, true)
		gap.SetCmdSN(tc.CmdSN + 3)
		tc.write(gap, nil)
		synctest.Wait()
		tc.close()
		synctest.Wait()
		gate.Open()
		tc.wait()
		other.wantAborted(h, 4096)
		other.logout()
	})
}

// ISCSI-11.5-6: a target reset is about the logical units that the initiator
// knows; one that does not know all has no permission for TARGET COLD RESET.
func TestMaskedReset(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		hidden := newStore(t)
		u, err := lun.New(hidden, lun.Options{Identity: state.Identity{NAA: [8]byte{0x3f}, Serial: "3f00000000000000"}})
		if err != nil {
			t.Fatal(err)
		}
		const blind = "iqn.1993-08.org.debian:blind"
		if err := n.inv.AddMasked(1, u, func(initiator string) lun.Access {
			if initiator == blind {
				return lun.NoAccess
			}
			return lun.ReadWrite
		}); err != nil {
			t.Fatal(err)
		}
		lun1 := [8]byte{1: 1}
		on1 := func(tc *testConn, flags byte, edtl uint32, block [16]byte) pdu.BHS {
			h := tc.scsi(flags, edtl, block)
			h.SetLUN(lun1)
			tc.write(h, nil)
			return h
		}
		tc := n.connect()
		tc.writeLogin(tc.loginRequest(true, 1, 3),
			append([]string{"InitiatorName=" + blind, "TargetName=" + targetName, "SessionType=Normal"},
				linuxKeys...)...)
		tc.loggedIn()
		other := n.connect(func(tc *testConn) { tc.isid[5] = 2 }).login()
		other.wantSense(on1(other, pdu.FlagF, 0, cdb.TestUnitReady), 0x06, 0x29, 0x00)
		other.wantStatus(on1(other, pdu.FlagF, 0, cdb.TestUnitReady), 0)

		for _, function := range []byte{pdu.AbortTaskSet, pdu.ClearTaskSet, pdu.LogicalUnitReset} {
			tc.wantTMF(tc.tmf(function, lun1, pdu.ReservedTag, 0), pdu.LUNDoesNotExist)
		}
		gate := hidden.Shut()
		h := on1(other, readF, 4096, cdb.Read10(0, 8))
		<-gate.Entered
		tc.wantTMF(tc.tmf(pdu.TargetColdReset, [8]byte{}, pdu.ReservedTag, 0), pdu.FunctionNotAuthorized)
		tc.wantTMF(tc.tmf(pdu.TargetWarmReset, [8]byte{}, pdu.ReservedTag, 0), pdu.FunctionComplete)
		gate.Open()
		other.wantStatus(h, 0)
		other.wantStatus(on1(other, pdu.FlagF, 0, cdb.TestUnitReady), 0)
		for _, c := range []*testConn{tc, other} {
			c.wantSense(c.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 0x06, 0x29, 0x03)
			c.logout()
		}
	})
}
