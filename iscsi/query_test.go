package iscsi

import (
	"bytes"
	"errors"
	"slices"
	"testing"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// loginLevel logs in as Linux would, had it iSCSIProtocolLevel, and leaves the unit
// attention of the power on where it is.
func (tc *testConn) loginLevel(level string) *testConn {
	tc.tb.Helper()
	tc.writeLogin(tc.loginRequest(true, 1, 3),
		slices.Concat(names, linuxKeys, []string{"iSCSIProtocolLevel=" + level})...)
	r, answers := tc.wantLogin(pdu.LoginSuccess)
	if !slices.Contains(answers, "iSCSIProtocolLevel="+level) {
		tc.tb.Fatalf("answers %q", answers)
	}
	tc.tsih = r.TSIH
	return tc
}

// wantInfo takes a TMF Response with Additional Response Information.
func (tc *testConn) wantInfo(h pdu.BHS, response byte, info [3]byte) {
	tc.tb.Helper()
	p := tc.want(pdu.TaskMgmtResp)
	// Bytes 8 to 10: RFC 7144, section 6.4.1; the bytes after it are reserved.
	if p.h.ITT() != h.ITT() || p.h.Response() != response ||
		!bytes.Equal(p.h[8:16], append(info[:], 0, 0, 0, 0, 0)) || len(p.data) != 0 {
		tc.tb.Fatalf("TMF Response %x, want response %d and information %x", []byte(p.h), response, info)
	}
}

var noInfo [3]byte

// until skips what the target sends before the answer to h, and returns that.
func (tc *testConn) until(h pdu.BHS) *sentPDU {
	tc.tb.Helper()
	for {
		p := tc.next(testkit.Patience)
		if p == nil {
			tc.tb.Fatalf("no answer to %x", []byte(h))
		}
		tc.statSeen, tc.ExpStatSN = true, p.h.StatSN()+1
		if p.h.ITT() == h.ITT() {
			return p
		}
	}
}

// ISCSI-7144.4.1-1: below iSCSIProtocolLevel 2 there are no new functions, and none
// of them does anything.
func TestFunctionsOfLevel2(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		for _, level := range []string{"0", "1"} {
			n := newTestNode(t)
			tc := n.connect().loginLevel(level)
			for _, f := range []byte{pdu.QueryTask, pdu.QueryTaskSet, pdu.ITNexusReset, pdu.QueryAsyncEvent} {
				tc.wantInfo(tc.tmf(f, [8]byte{}, pdu.ReservedTag, 0), pdu.FunctionNotSupported, noInfo)
			}
			tc.logout()
		}
	})
}

// ISCSI-7144.6.3-1: QUERY TASK.
func TestQueryTask(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().loginLevel("2")
		tc.wantSense(tc.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 6, 0x29, 0)
		tc.m.holdGets = true
		h := tc.command(writeF, 4096, cdb.Write10(0, 8), nil)
		tc.wantGets(1)
		gap := tc.scsi(pdu.FlagF, 0, cdb.TestUnitReady)
		ahead := tc.command(pdu.FlagF, 0, cdb.TestUnitReady, nil)
		for _, c := range []struct {
			what          string
			lun           byte
			rtt, refCmdSN uint32
			want          byte
		}{
			{"present", 0, h.ITT(), h.CmdSN(), pdu.FunctionSucceeded},
			{"present, after a gap", 0, ahead.ITT(), ahead.CmdSN(), pdu.FunctionSucceeded},
			{"another LUN's", 1, h.ITT(), h.CmdSN(), pdu.LUNDoesNotExist},
			{"answered long ago", 0, 0x7777, tc.CmdSN - 50, pdu.FunctionComplete},
			{"to come", 0, 0x7777, tc.CmdSN, pdu.FunctionComplete},
		} {
			t.Log(c.what)
			tc.wantInfo(tc.tmf(pdu.QueryTask, [8]byte{1: c.lun}, c.rtt, c.refCmdSN), c.want, noInfo)
		}
		if tc.expCmdSN != gap.CmdSN() {
			t.Fatalf("ExpCmdSN %d instead of %d", tc.expCmdSN, gap.CmdSN())
		}
		reset := tc.tmf(pdu.LogicalUnitReset, [8]byte{}, pdu.ReservedTag, 0)
		tc.wantNothing() // it waits for the gap
		tc.wantInfo(tc.tmf(pdu.QueryTask, [8]byte{}, reset.ITT(), reset.CmdSN()), pdu.FunctionRejected, noInfo)
		// Section 6.3.3: a command that never came does not come later.
		q := tc.tmf(pdu.QueryTask, [8]byte{}, gap.ITT(), gap.CmdSN())
		if p := tc.until(q); p.h.Response() != pdu.FunctionComplete || p.h.AdditionalInfo() != noInfo {
			t.Errorf("%x", []byte(p.h))
		}
		tc.m.releaseGets()
		if p := tc.until(reset); p.h.Response() != pdu.FunctionComplete || p.h.ExpCmdSN() != tc.CmdSN {
			t.Errorf("%x", []byte(p.h))
		}
		// Aborted and gone: section 6.4.2.
		tc.wantInfo(tc.tmf(pdu.QueryTask, [8]byte{}, h.ITT(), h.CmdSN()), pdu.FunctionComplete, noInfo)
		tc.logout()
	})
}

// ISCSI-7144.6.4-1: QUERY TASK SET and QUERY ASYNCHRONOUS EVENT.
func TestQueryTaskSet(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().loginLevel("2")
		other := n.connect(func(tc *testConn) { tc.isid[5] = 2 }).loginLevel("2")
		tc.wantSense(tc.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 6, 0x29, 0)
		query := func(c *testConn, want byte) {
			t.Helper()
			c.wantInfo(c.tmf(pdu.QueryTaskSet, [8]byte{}, pdu.ReservedTag, 0), want, noInfo)
		}
		query(tc, pdu.FunctionComplete)
		tc.m.holdGets = true
		h := tc.command(writeF, 4096, cdb.Write10(0, 8), nil)
		tc.wantGets(1)
		query(tc, pdu.FunctionSucceeded)
		query(other, pdu.FunctionComplete) // of another nexus
		tc.wantInfo(tc.tmf(pdu.QueryTaskSet, [8]byte{1: 9}, pdu.ReservedTag, 0), pdu.LUNDoesNotExist, noInfo)
		tc.m.releaseGets()
		tc.wantStatus(h, 0)
		query(tc, pdu.FunctionComplete)
		tc.logout()
		other.logout()
	})
}

func TestQueryAsyncEvent(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().loginLevel("2")
		other := n.connect(func(tc *testConn) { tc.isid[5] = 2 }).loginLevel("2")
		query := func(want byte, info [3]byte) {
			t.Helper()
			tc.wantInfo(tc.tmf(pdu.QueryAsyncEvent, [8]byte{}, pdu.ReservedTag, 0), want, info)
		}
		// UADE DEPTH and SENSE KEY, ASC, ASCQ: one, POWER ON.
		query(pdu.FunctionSucceeded, [3]byte{0x16, 0x29, 0x00})
		query(pdu.FunctionSucceeded, [3]byte{0x16, 0x29, 0x00}) // asking does not take it away
		other.wantSense(other.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 6, 0x29, 0)
		other.wantTMF(other.tmf(pdu.LogicalUnitReset, [8]byte{}, pdu.ReservedTag, 0), pdu.FunctionComplete)
		query(pdu.FunctionSucceeded, [3]byte{0x26, 0x29, 0x00}) // more than one
		tc.wantSense(tc.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 6, 0x29, 0)
		query(pdu.FunctionSucceeded, [3]byte{0x16, 0x29, 0x03})
		tc.wantSense(tc.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 6, 0x29, 3)
		query(pdu.FunctionComplete, noInfo)
		tc.wantInfo(tc.tmf(pdu.QueryAsyncEvent, [8]byte{1: 9}, pdu.ReservedTag, 0), pdu.LUNDoesNotExist, noInfo)
		tc.logout()
		other.logout()
	})
}

// ISCSI-7144.6.3-2: I_T NEXUS RESET ends the tasks, answers, and drops the
// connection without any waiting time. A new login is a new nexus.
func TestITNexusReset(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().loginLevel("2")
		other := n.connect(func(tc *testConn) { tc.isid[5] = 2 }).login()
		tc.wantSense(tc.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 6, 0x29, 0)
		tc.wantStatus(tc.command(pdu.FlagF, 0, [16]byte{0x16}, nil), 0) // RESERVE(6)
		before := n.stored(0, 4096)
		tc.m.holdGets, other.m.holdGets = true, true
		tc.command(writeF, 4096, cdb.Write10(0, 8), nil)
		tc.wantGets(1)
		tc.CmdSN += 3 // these never come
		f := tc.tmf(pdu.ITNexusReset, [8]byte{}, pdu.ReservedTag, 0)
		tc.wantNothing() // the data is on its way
		tc.m.releaseGets()
		tc.wantInfo(f, pdu.FunctionComplete, noInfo)
		if err := tc.wait(); !errors.Is(err, errNexusReset) {
			t.Error(err)
		}
		if p := tc.next(0); p != nil {
			t.Errorf("%v after the response", p.h.Opcode())
		}
		if !bytes.Equal(n.stored(0, 4096), before) {
			t.Error("data of an aborted write is on the medium")
		}
		// Nexus loss: the reservation is gone at once. The other nexus is not touched.
		h := other.command(writeF, 4096, cdb.Write10(0, 8), nil)
		other.wantGets(1)
		other.m.releaseGets()
		other.wantStatus(h, 0)
		again := n.connect().loginLevel("2")
		if p := again.wantStatus(again.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 2); len(p.data) < 20 ||
			p.data[4] != 6 || p.data[14] != 0x29 {
			t.Errorf("sense %x", p.data)
		}
		again.logout()
		other.logout()
	})
}

// ISCSI-7144.4.2-1, and what REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS says, is
// as the session has agreed.
func TestInquiryOfLevel(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		for level, want := range map[string]struct {
			descriptor byte
			functions  [2]byte
		}{
			"0": {0x60, [2]byte{0, 0}},
			"1": {0x61, [2]byte{0, 0}},
			"2": {0x62, [2]byte{0x04, 0x07}}, // QTS; QAES, QTSS, ITNRS
		} {
			tc := n.connect().loginLevel(level)
			tc.wantSense(tc.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 6, 0x29, 0)
			h := tc.command(readF, 96, [16]byte{0x12, 0, 0, 0, 96, 0}, nil)
			tc.wantStatus(h, 0)
			if d := tc.sinkOf(h)[58:74]; !bytes.Contains(d, []byte{0x09, want.descriptor}) ||
				bytes.Count(d, []byte{0x09}) != 1 {
				t.Errorf("level %s: version descriptors %x", level, d)
			}
			h = tc.command(readF, 4, [16]byte{0xa3, 0x0d, 0, 0, 0, 0, 0, 0, 0, 4}, nil)
			tc.wantStatus(h, 0)
			if f := tc.sinkOf(h); f[0]&0x04 != want.functions[0] || f[1] != want.functions[1] {
				t.Errorf("level %s: functions %x", level, f)
			}
			tc.logout()
		}
	})
}

// ISCSI-7144.6.3-2, ISCSI-7144.6.4-1: the functions are about the nexus, whichever its
// connections.
func TestQueriesOfASession(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, several(4))
		a := n.connect()
		a.writeLogin(a.loginRequest(true, 1, 3), slices.Concat(names, leadingKeys, []string{"iSCSIProtocolLevel=2"})...)
		a.loggedIn()
		b := a.join(1)
		b.m.holdGets = true
		b.command(writeF, 4096, cdb.Write10(0, 8), nil)
		b.wantGets(1)
		a.on(b).wantInfo(a.tmf(pdu.QueryTaskSet, [8]byte{}, pdu.ReservedTag, 0), pdu.FunctionSucceeded, noInfo)
		f := a.tmf(pdu.ITNexusReset, [8]byte{}, pdu.ReservedTag, 0)
		a.wantNothing()
		b.m.releaseGets()
		a.wantInfo(f, pdu.FunctionComplete, noInfo)
		a.wantEnd(errNexusReset)
		b.wantEnd(errNexusReset)
		if p := b.next(0); p != nil {
			t.Errorf("%v for a task that was reset", p.h.Opcode())
		}
	})
}
