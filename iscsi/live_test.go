package iscsi

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/security"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// ISCSI-11.9-1, ISCSI-11.9-3: the initiator of a session that is to end is asked to log
// out, and if it does not, told that the session is dropped. Other sessions continue.
func TestEndSession(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		reason := errors.New("not wanted any more")
		n := newTestNode(t)
		stays := n.connect(func(tc *testConn) { tc.isid[5] = 9 }).login()
		tc := n.connect().login()
		end := func(grace time.Duration) <-chan error {
			done := make(chan error, 1)
			go func() { done <- n.EndSession(t.Context(), tc.tsih, grace, reason) }()
			return done
		}
		done := end(200 * time.Millisecond)
		tc.wantAsync("\x01\x00\x00\x00\x00\x00\x00\x01", [8]byte{}) // 200 ms are a second
		tc.wantAsync("\x03\x00\x00\x00\x00\x02\x00\x00", [8]byte{})
		tc.close()
		if err := tc.wait(); !errors.Is(err, reason) {
			t.Error(err)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}

		// One that logs out in time.
		tc = n.connect().login()
		done = end(time.Minute)
		tc.wantAsync("\x01\x00\x00\x00\x00\x00\x00\x3c", [8]byte{})
		if s, err := n.Session(tc.tsih); err != nil || len(s.Conns) != 1 || s.Initiator != initiatorName ||
			s.Target != targetName || !slices.Equal(s.LUNs, []uint16{0}) {
			t.Errorf("%+v, %v", s, err)
		}
		tc.logoutOf(pdu.LogoutCloseSession, 0)
		tc.want(pdu.LogoutResp)
		tc.close()
		if err := <-done; err != nil {
			t.Error(err)
		}

		// Without grace it is told and dropped.
		tc = n.connect().login()
		done = end(0)
		tc.wantAsync("\x03\x00\x00\x00\x00\x02\x00\x00", [8]byte{})
		tc.close()
		if err := <-done; err != nil {
			t.Error(err)
		}

		// It ends although its initiator does not read, when ctx does.
		tc = n.connect().login()
		tc.m.mu.Lock()
		tc.m.holdFlush = true
		tc.m.mu.Unlock()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		if err := n.EndSession(ctx, tc.tsih, time.Minute, reason); err != nil {
			t.Error(err)
		}
		if err := n.EndSession(t.Context(), tc.tsih, 0, reason); !errors.Is(err, ErrNoSession) {
			t.Errorf("a session that has ended: %v", err)
		}
		stays.ping()
		if l := n.Sessions(); len(l) != 1 || l[0].TSIH != stays.tsih {
			t.Errorf("sessions %+v", l)
		}
	})
}

// A target that changes while a login to it is under way refuses that login: what has
// admitted it holds no more. Sessions stay, and logins from then on meet the new rules.
func TestUpdateTarget(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		compile := func(pattern string) security.Patterns {
			p, err := security.Compile([]string{pattern})
			if err != nil {
				t.Fatal(err)
			}
			return p
		}
		n := newTestNode(t)
		stays := n.connect(func(tc *testConn) { tc.isid[5] = 9 }).login()
		begin := func() *testConn {
			tc := n.connect()
			tc.writeLogin(tc.loginRequest(false, 1, 0), names...)
			tc.wantLogin(pdu.LoginSuccess)
			return tc
		}
		finish := func(tc *testConn, status pdu.LoginStatus) {
			t.Helper()
			tc.writeLogin(tc.loginRequest(true, 1, 3), linuxKeys...)
			tc.wantLogin(status)
		}
		update := TargetConfig{Name: targetName, Initiators: compile("*:somebody-else"), LUNs: n.inv}
		tc := begin()
		if err := n.UpdateTarget(update); err != nil {
			t.Fatal(err)
		}
		finish(tc, pdu.LoginUnavailable)
		tc = n.connect()
		tc.writeLogin(tc.loginRequest(true, 1, 3), append(slices.Clone(names), linuxKeys...)...)
		tc.wantLogin(pdu.LoginAuthorization)
		stays.ping()

		update.Initiators = compile("*")
		if err := n.UpdateTarget(update); err != nil {
			t.Fatal(err)
		}
		tc = begin()
		if err := n.RemoveTarget(targetName); err != nil {
			t.Fatal(err)
		}
		finish(tc, pdu.LoginUnavailable)
		tc = n.connect()
		tc.writeLogin(tc.loginRequest(true, 1, 3), append(slices.Clone(names), linuxKeys...)...)
		tc.wantLogin(pdu.LoginNotFound)
		stays.ping()

		// What is given back has the order of commands that its sessions have.
		gate := stays.session(t).shared.gate
		if err := n.AddTarget(update); err != nil || n.targets[0].gate != gate {
			t.Errorf("%v, or another order", err)
		}
		for _, err := range []error{n.RemoveTarget("iqn.2026-11.io.example:nothing"),
			n.UpdateTarget(TargetConfig{Name: "iqn.2026-11.io.example:nothing", LUNs: n.inv})} {
			if !errors.Is(err, ErrNoTarget) {
				t.Errorf("a target that is not there: %v", err)
			}
		}
		if err := n.UpdateTarget(TargetConfig{Name: targetName, LUNs: newInventory(t, newStore(t))}); err == nil {
			t.Error("another inventory")
		}
	})
}

func (tc *testConn) session(t *testing.T) *session {
	t.Helper()
	s, err := tc.Node.session(tc.tsih)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// Drain waits for the commands that have come, not for those that come.
func TestDrain(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		gate := n.store.Shut()
		h := tc.command(readF, 512, cdb.Read10(0, 1), nil)
		testkit.Eventually(n.tb, "the command is running",
			func() bool { s, err := n.Session(tc.tsih); return err == nil && s.Tasks == 1 })
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		if left, err := n.Drain(ctx, n.inv, 0); left != 1 || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%d left, %v", left, err)
		}
		if left, err := n.Drain(t.Context(), n.inv, 1); left != 0 || err != nil {
			t.Errorf("another LUN: %d left, %v", left, err)
		}
		done := make(chan error, 1)
		go func() {
			_, err := n.Drain(t.Context(), n.inv, 0)
			done <- err
		}()
		synctest.Wait()
		select {
		case err := <-done:
			t.Fatalf("it has not waited: %v", err)
		default:
		}
		gate.Open()
		if err := <-done; err != nil {
			t.Error(err)
		}
		tc.wantStatus(h, 0)
	})
}

// SetOptions is for connections from then on.
func TestSetOptions(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, func(o *Options) { o.QueueDepth = 8 })
		before := n.connect().login()
		o := *n.opt.Load()
		o.QueueDepth = 3
		n.SetOptions(o)
		after := n.connect(func(tc *testConn) { tc.isid[5] = 9 }).login()
		for tc, want := range map[*testConn]uint32{before: 8, after: 3} {
			tc.ping()
			if got := tc.maxCmdSN - tc.expCmdSN + 1; got != want {
				t.Errorf("window of %d commands, want %d", got, want)
			}
		}
	})
}

// Joined hears of each connection of a session before its initiator knows that it is one,
// and SessionEnd of the last one.
func TestJoined(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, several(4))
		of := func(tc *testConn) uint16 { return uint16(tc.joined.Load()) }
		tc := n.lead()
		refused := n.connect()
		refused.writeLogin(refused.loginRequest(true, 1, 3), "InitiatorName="+initiatorName,
			"TargetName=iqn.2026-11.io.example:none")
		refused.wantLogin(pdu.LoginNotFound)
		refused.close()
		second := tc.join(1)
		if of(tc) != tc.tsih || of(second) != tc.tsih || of(refused) != 0 {
			t.Errorf("joined %d and %d, want %d; refused: %d", of(tc), of(second), tc.tsih, of(refused))
		}
		end, err := n.SessionEnd(tc.tsih)
		if err != nil {
			t.Fatal(err)
		}
		select {
		case <-end:
			t.Error("the session has ended")
		default:
		}
		tc.logoutOf(pdu.LogoutCloseSession, 0)
		tc.want(pdu.LogoutResp)
		tc.close()
		second.close()
		select {
		case <-end:
		case <-time.After(20 * time.Second):
			t.Error("the session does not end")
		}
		if _, err := n.SessionEnd(tc.tsih); !errors.Is(err, ErrNoSession) {
			t.Error(err)
		}
	})
}
