package iscsi

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// ISCSI-11.12-4: an ISID is six bytes that are compared, whatever its type
// field says, the reserved type included.
func TestISIDTypes(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		var all []*testConn
		for _, isid := range [][6]byte{
			{0x00, 2, 0x3d, 0, 0, 1}, // OUI
			{0x40, 2, 0x3d, 0, 0, 1}, // IANA enterprise number
			{0x80, 2, 0x3d, 0, 0, 1}, // random
			{0xc0, 2, 0x3d, 0, 0, 1}, // reserved
		} {
			all = append(all, n.connect(func(tc *testConn) { tc.isid = isid }).login())
		}
		if s := n.Stats().Sessions; s != len(all) {
			t.Errorf("%d sessions of %d initiator ports", s, len(all))
		}
		// Each is reinstated by its own ISID and by no other.
		for i, old := range all {
			all[i] = n.connect(func(tc *testConn) { tc.isid = old.isid }).login()
			if err := old.wait(); !errors.Is(err, errReinstated) {
				t.Errorf("ISID %x: %v", old.isid, err)
			}
			for _, tc := range all {
				tc.ping()
			}
		}
		for _, tc := range all {
			tc.logout()
		}
	})
}

// ISCSI-6.3-1: initiators must not send a Login Request before the last one is
// answered. Those that do get their answers in order.
func TestLoginRequestsAhead(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect()
		for i, keys := range [][]string{names, linuxKeys, nil} {
			r := tc.loginRequest(i == 2, 1, map[bool]pdu.Stage{true: 3}[i == 2])
			r.ITT += uint32(i)
			tc.writeLogin(r, keys...)
		}
		for i := range 2 {
			r, _ := tc.wantLogin(pdu.LoginSuccess)
			if r.ITT != 0x10+uint32(i) || r.Transit {
				t.Fatalf("answer %d: %+v", i, r)
			}
		}
		tc.loggedIn().logout()
	})
}

// ISCSI-7.4-1: discovery has no error recovery, wherever the session
// type stands among the keys.
func TestDiscoveryErrorRecoveryLevel(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, func(o *Options) { o.Limits.ErrorRecoveryLevel = 2 })
		for _, pairs := range [][]string{
			{"InitiatorName=" + initiatorName, "SessionType=Discovery", "ErrorRecoveryLevel=2"},
			{"InitiatorName=" + initiatorName, "ErrorRecoveryLevel=2", "SessionType=Discovery"},
		} {
			tc := n.connect(func(tc *testConn) { tc.m.rdma = false })
			tc.writeLogin(tc.loginRequest(true, 1, 3), pairs...)
			if _, answers := tc.wantLogin(pdu.LoginSuccess); !slices.Contains(answers, "ErrorRecoveryLevel=0") {
				t.Errorf("%q answered with %q", pairs, answers)
			}
			h := tc.Request(pdu.SNACK, pdu.FlagF, true)
			tc.write(h, nil)
			if p := tc.want(pdu.Reject); p.h.Reason() != pdu.RejectProtocolError &&
				p.h.Reason() != pdu.RejectNotSupported {
				t.Errorf("SNACK in discovery: %x", []byte(p.h))
			}
			tc.logout()
		}
	})
}

// ISCSI-11.4-3: whatever goes wrong with a command, it has been carried out as
// far as iSCSI is concerned: response 00h, with a status of SCSI.
func TestResponseCode(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		failing := func(what string, flags byte, edtl uint32, block [16]byte, data []byte, field [8]byte, key, asc,
			ascq byte) {
			t.Helper()
			t.Log(what)
			h := tc.scsi(flags, edtl, block)
			h.SetLUN(field)
			tc.write(h, data)
			tc.wantSense(h, key, asc, ascq) // which looks at the response code
		}
		var lun0 [8]byte
		failing("no such logical unit", pdu.FlagF, 0, cdb.TestUnitReady, nil, [8]byte{1: 9}, 5, 0x25, 0)
		failing("no such command", pdu.FlagF, 0, [16]byte{0xff}, nil, lun0, 5, 0x20, 0)
		failing("beyond the end", readF, 512, cdb.Read10(storeLen/blockLen, 1), nil, lun0, 5, 0x21, 0)
		failing("wrong direction", readF, 512, cdb.Write10(0, 1), nil, lun0, 5, 0x0e, 3)
		failing("both directions", pdu.FlagF|pdu.FlagR|pdu.FlagW, 512, cdb.Read10(0, 1), nil, lun0, 5, 0x0e, 3)
		failing("more data than expected", writeF, 512, cdb.Write10(0, 1), make([]byte, 1024), lun0, 0xb, 0x0c, 0x0d)
		n.store.FailIO(errors.New("broken"))
		failing("medium error of a read", readF, 512, cdb.Read10(0, 1), nil, lun0, 3, 0x11, 0)
		failing("medium error of a write", writeF, 512, cdb.Write10(0, 1), make([]byte, 512), lun0, 3, 0x0c, 0)
		tc.logout()
	})
}

// ISCSI-11.9-2: an initiator that was asked to log out may continue until it does:
// its commands are served, not rejected.
func TestCommandsAfterLogoutRequest(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		done := make(chan error, 1)
		go func() {
			_, err := n.Empty(context.Background(), "")
			done <- err
		}()
		tc.want(pdu.AsyncMessage)
		h := tc.command(writeF, 4096, cdb.Write10(8, 8), pattern(4096, 7))
		tc.wantStatus(h, 0)
		if !bytes.Equal(n.stored(8, 4096), pattern(4096, 7)) {
			t.Error("the medium has something else")
		}
		tc.logout()
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(testkit.Patience):
			t.Error("Empty has not returned")
		}
	})
}
