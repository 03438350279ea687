package iscsi

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/security"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// wantAsync takes an Asynchronous Message with these bytes 36 to 43 and LUN field
// (RFC 7143, section 11.9).
func (tc *testConn) wantAsync(event string, lun [8]byte) *sentPDU {
	tc.tb.Helper()
	p := tc.want(pdu.AsyncMessage)
	if string(p.h[36:44]) != event || p.h.LUN() != lun || p.h.ITT() != pdu.ReservedTag || p.h[1] != 0x80 ||
		p.h[0] != 0x32 {
		tc.tb.Fatalf("%x, want event %x and LUN %x", []byte(p.h), event, lun)
	}
	return p
}

// ISCSI-11.9-3: an initiator is told before its connection is dropped, and that it may come back at once. One
// that does not read is dropped, too.
func TestShutdownIsAnnounced(t *testing.T) {
	for _, rdma := range []bool{true, false} {
		bubble(t, map[bool]string{true: "RDMA", false: "TCP"}[rdma], func(t *testing.T) {
			n := newTestNode(t)
			tc := n.connect(func(tc *testConn) { tc.m.rdma, tc.cid = rdma, 0x0708 }).login()
			deaf := n.connect(func(tc *testConn) { tc.m.rdma, tc.isid[5] = rdma, 2 }).login()
			deaf.m.mu.Lock()
			deaf.m.holdFlush = true
			deaf.m.mu.Unlock()
			done, begun := make(chan error, 1), time.Now()
			go func() { done <- n.Shutdown(context.Background()) }()
			// Event 2: CID, Time2Wait 0, Time2Retain 0.
			if p := tc.wantAsync("\x02\x00\x07\x08\x00\x00\x00\x00", [8]byte{}); len(p.data) != 0 {
				t.Errorf("data %x", p.data)
			}
			for _, c := range []*testConn{tc, deaf} {
				if err := c.wait(); !errors.Is(err, errShutdown) {
					t.Error(err)
				}
			}
			if !rdma && !tc.m.finSent {
				t.Error("no FIN after the message")
			}
			if err := <-done; err != nil {
				t.Error(err)
			}
			if took := time.Since(begun); took > 2*partingWait {
				t.Errorf("the shutdown took %v", took)
			}
		})
	}
}

// ISCSI-11.9-3: event 3 goes to the sessions that a cold reset of another one ends.
func TestColdResetIsAnnounced(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		other := n.connect(func(tc *testConn) { tc.isid[5], tc.cid = 2, 5 }).login()
		f := tc.tmf(pdu.TargetColdReset, [8]byte{}, pdu.ReservedTag, 0)
		tc.wantTMF(f, pdu.FunctionComplete)
		other.wantAsync("\x03\x00\x00\x00\x00\x02\x00\x00", [8]byte{})
		synctest.Wait() // the goroutine that sent the message gives the reason after it
		for _, c := range []*testConn{tc, other} {
			c.close()
			if err := c.wait(); !errors.Is(err, errColdReset) {
				t.Error(err)
			}
		}
	})
}

// Event 0: another initiator has changed the medium. The unit attention stays for
// the next command, and an attention that is still due is not reported again.
func TestSCSIEvent(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		const name = "iqn.2026-11.io.example:jukebox"
		u, err := lun.New(newStore(t), lun.Options{Identity: state.Identity{NAA: [8]byte{0x30, 7: 9},
			Serial: "3000000000000009"}, Removable: true})
		if err != nil {
			t.Fatal(err)
		}
		inv := lun.NewInventory()
		if err := inv.Add(300, u); err != nil {
			t.Fatal(err)
		}
		all, err := security.Compile([]string{"*"})
		if err != nil {
			t.Fatal(err)
		}
		if err := n.AddTarget(TargetConfig{Name: name, Initiators: all, LUNs: inv}); err != nil {
			t.Fatal(err)
		}
		field := [8]byte{0x41, 0x2c} // flat space addressing
		command := func(tc *testConn, block [16]byte) pdu.BHS {
			h := tc.scsi(pdu.FlagF, 0, block)
			h.SetLUN(field)
			tc.write(h, nil)
			return h
		}
		login := func(last byte) *testConn {
			tc := n.connect(func(tc *testConn) { tc.isid[5] = last })
			tc.writeLogin(tc.loginRequest(true, 1, 3),
				slices.Concat(without(names, "TargetName"), []string{"TargetName=" + name}, linuxKeys)...)
			r, _ := tc.wantLogin(pdu.LoginSuccess)
			tc.tsih = r.TSIH
			tc.wantSense(command(tc, cdb.TestUnitReady), 6, 0x29, 0)
			return tc
		}
		change := func(tc *testConn) {
			t.Helper()
			tc.wantStatus(command(tc, [16]byte{0x1b, 0, 0, 0, 2}), 0) // eject
			tc.wantStatus(command(tc, [16]byte{0x1b, 0, 0, 0, 3}), 0) // load
		}
		tc, other := login(1), login(2)
		for range 3 {
			change(tc)
			p := other.wantAsync("\x00\x00\x00\x00\x00\x00\x00\x00", field)
			// SenseLength, fixed format, UNIT ATTENTION, NOT READY TO READY CHANGE.
			want := []byte{0, 18, 0x70, 0, 6, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x28, 0, 0, 0, 0, 0}
			if !bytes.Equal(p.data, want) {
				t.Fatalf("data %x, want %x", p.data, want)
			}
			change(tc)
			other.wantNothing()
			other.wantSense(command(other, cdb.TestUnitReady), 6, 0x28, 0)
			other.wantStatus(command(other, cdb.TestUnitReady), 0)
		}
		tc.wantNothing() // that session did it, and is not told
		// ISER-8.1.2-1: an initiator without a buffer for it is not told.
		for range maxUnexpected {
			other.write(other.Request(pdu.SNACK, pdu.FlagF, true), nil)
		}
		other.want(pdu.Reject)
		ping := other.want(pdu.NOPIn) // ISER-8.1.2-7: the second Reject is held back
		change(tc)
		other.wantNothing()
		ack := other.Request(pdu.NOPOut, pdu.FlagF, true) // without an answer
		ack.SetITT(pdu.ReservedTag)
		ack.SetTTT(ping.h.TTT())
		other.write(ack, nil)
		other.want(pdu.Reject)
		other.wantSense(command(other, cdb.TestUnitReady), 6, 0x28, 0)
		tc.logout()
		other.logout()
	})
}
