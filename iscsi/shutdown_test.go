package iscsi

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// ISCSI-11.9-1, ISCSI-11.13-4: while a node is emptied it sends new logins to another portal, or refuses them.
// Sessions are served until their initiators log out, and discovery continues.
func TestEmpty(t *testing.T) {
	for _, c := range []struct {
		name, to string
		status   pdu.LoginStatus
		answers  []string
	}{
		{"elsewhere", "192.0.2.9:3261", pdu.LoginMovedTemporarily, []string{"TargetAddress=192.0.2.9:3261"}},
		{"nowhere", "", pdu.LoginUnavailable, []string{""}},
	} {
		bubble(t, c.name, func(t *testing.T) {
			n := newTestNode(t)
			tc := n.connect().login()
			inLogin := n.connect(func(tc *testConn) { tc.isid[5] = 7 })
			inLogin.writeLogin(inLogin.loginRequest(false, 1, 0), names...)
			inLogin.wantLogin(pdu.LoginSuccess)
			done := make(chan error, 1)
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			go func() {
				left, err := n.Empty(ctx, c.to)
				if left != 0 {
					t.Errorf("%d sessions are left", left)
				}
				done <- err
			}()
			tc.wantAsync("\x01\x00\x00\x00\x00\x00\x00\x1e", [8]byte{}) // 30 s

			for _, isid := range []byte{tc.isid[5], 8} { // the session itself, reinstated, and another one
				other := n.connect(func(tc *testConn) { tc.isid[5] = isid })
				other.writeLogin(other.loginRequest(true, 1, 3), names...)
				if _, answers := other.wantLogin(c.status); !slices.Equal(answers, c.answers) {
					t.Errorf("%q", answers)
				}
				other.close()
				if other.wait() == nil {
					t.Error("no error")
				}
			}
			inLogin.writeLogin(inLogin.loginRequest(true, 1, 3), linuxKeys...) // was admitted before
			inLogin.wantRefused(pdu.LoginUnavailable)
			d := n.connect(func(tc *testConn) { tc.isid[5] = 9 }).discover()

			time.Sleep(20 * time.Second)
			tc.wantStatus(tc.command(readF, 4096, cdb.Read10(0, 8), nil), 0)
			tc.logout()
			if err := <-done; err != nil { // although the discovery session is there
				t.Error(err)
			}
			d.close()
			d.wait()
		})
	}
}

// An initiator that does not log out costs its neighbor nothing: that one leaves, and Empty returns in time.
func TestEmptyWithADeafInitiator(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		deaf := n.connect(func(tc *testConn) { tc.isid[5] = 2 }).login()
		deaf.m.mu.Lock()
		deaf.m.holdFlush = true
		deaf.m.mu.Unlock()
		tc := n.connect().login()
		begun := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		done := make(chan int, 1)
		go func() {
			left, err := n.Empty(ctx, "")
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
			done <- left
		}()
		tc.wantAsync("\x01\x00\x00\x00\x00\x00\x00\x03", [8]byte{})
		tc.logout()
		if left := <-done; left != 1 {
			t.Errorf("%d sessions are left, want 1", left)
		}
		if err := n.Shutdown(t.Context()); err != nil {
			t.Error(err)
		}
		if took := time.Since(begun); took > 3*time.Second+2*partingWait {
			t.Errorf("the end took %v", took)
		}
		if err := deaf.wait(); !errors.Is(err, errShutdown) {
			t.Error(err)
		}
	})
}
