package iscsi

import (
	"testing"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/security"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

const intruder = "iqn.1993-08.org.debian:intruder"

// mayReset makes only initiators that match a pattern reset others.
func (n *testNode) mayReset(patterns ...string) {
	n.tb.Helper()
	var of [2]security.Patterns
	for i, list := range [][]string{{"*"}, patterns} {
		var err error
		if of[i], err = security.Compile(list); err != nil {
			n.tb.Fatal(err)
		}
	}
	cfg := TargetConfig{Name: targetName, Alias: "store", Initiators: of[0], ResetsFor: of[1], LUNs: n.inv}
	if err := n.UpdateTarget(cfg); err != nil {
		n.tb.Fatal(err)
	}
}

// intrude logs in as the initiator intruder.
func (n *testNode) intrude(last byte) *testConn {
	n.tb.Helper()
	tc := n.connect(func(tc *testConn) { tc.isid[5] = last })
	tc.writeLogin(tc.loginRequest(true, 1, 3),
		append([]string{"InitiatorName=" + intruder, "TargetName=" + targetName, "SessionType=Normal"}, linuxKeys...)...)
	return tc.loggedIn()
}

// A reset of an initiator without the right is answered, so that its error handling succeeds. It ends
// the commands of its own sessions. The neighbour's command ends well, and it gets no unit attention.
func TestResetWithoutRight(t *testing.T) {
	for name, function := range map[string]byte{"LOGICAL UNIT RESET": pdu.LogicalUnitReset,
		"CLEAR TASK SET": pdu.ClearTaskSet, "TARGET WARM RESET": pdu.TargetWarmReset} {
		bubble(t, name, func(t *testing.T) {
			n := newTestNode(t)
			n.mayReset("*:another")
			neighbour := n.connect(func(tc *testConn) { tc.isid[5] = 9 }).login()
			tc, own := n.intrude(1), n.intrude(2)
			gate := n.store.Shut()
			read := neighbour.command(readF, 4096, cdb.Read10(0, 8), nil)
			tc.command(readF, 4096, cdb.Read10(0, 8), nil)
			taken := own.command(readF, 4096, cdb.Read10(0, 8), nil)
			for range 3 {
				<-gate.Entered
			}
			f := tc.tmf(function, [8]byte{}, pdu.ReservedTag, 0)
			tc.wantNothing()
			gate.Open()
			tc.wantTMF(f, pdu.FunctionComplete)
			neighbour.wantStatus(read, 0)
			neighbour.wantStatus(neighbour.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 0)
			own.wantAborted(taken, 4096)
			if function != pdu.ClearTaskSet {
				own.wantSense(own.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 0x06, 0x29, 0x03)
				tc.wantSense(tc.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 0x06, 0x29, 0x03)
			}
			for _, c := range []*testConn{neighbour, tc, own} {
				c.wantStatus(c.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 0)
				c.logout()
			}
		})
	}
}

// TARGET COLD RESET would end all sessions, so it needs the right. A change of the configuration gives
// it to sessions that exist, and takes it away.
func TestColdResetNeedsRight(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		neighbour := n.connect(func(tc *testConn) { tc.isid[5] = 9 }).login()
		n.mayReset(intruder)
		tc := n.intrude(1)
		n.mayReset()
		tc.wantTMF(tc.tmf(pdu.TargetColdReset, [8]byte{}, pdu.ReservedTag, 0), pdu.FunctionNotAuthorized)
		neighbour.wantStatus(neighbour.command(readF, 4096, cdb.Read10(0, 8), nil), 0)
		n.mayReset("*:INTRUDER")
		tc.wantTMF(tc.tmf(pdu.LogicalUnitReset, [8]byte{}, pdu.ReservedTag, 0), pdu.FunctionComplete)
		neighbour.wantSense(neighbour.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 0x06, 0x29, 0x03)
		tc.wantTMF(tc.tmf(pdu.TargetColdReset, [8]byte{}, pdu.ReservedTag, 0), pdu.FunctionComplete)
		neighbour.wait()
		tc.wait()
	})
}
