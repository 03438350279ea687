package iscsi

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// ISCSI-4.2.2.1-1, ISCSI-4.2.2.1-2, ISCSI-4.2.2.1-7: serial numbers wrap, and
// immediate requests do not count.
func TestCmdSNWraps(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect(func(tc *testConn) { tc.CmdSN = 0xfffffffe }).login()
		for range 8 {
			tc.wantStatus(tc.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 0)
			tc.ping()
			tc.wantOpenWindow()
		}
		h := tc.Request(pdu.NOPOut, pdu.FlagF, true) // far outside the window
		h.SetCmdSN(tc.CmdSN + 100000)
		tc.write(h, nil)
		tc.want(pdu.NOPIn)
		tc.logout()
	})
}

// Commands are executed in the order of CmdSN. Retries, duplicates and commands outside the
// window are ignored (ISER-10.2.1-1 makes them rare, and RFC 7143 allows them).
func TestCmdSNOrder(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		gap := tc.scsi(pdu.FlagF, 0, cdb.TestUnitReady)
		second := tc.scsi(writeF, 4096, cdb.Write10(0, 8))
		tc.write(second, pattern(4096, second.ITT()))
		tc.write(second, pattern(4096, second.ITT())) // ISCSI-7.2.1-1, ISCSI-4.2.2.1-10: a retry is found by its tag
		third := tc.command(pdu.FlagF, 0, cdb.TestUnitReady, nil)
		again := bytes.Clone(third) // another tag, the same CmdSN while the gap is open
		pdu.BHS(again).SetITT(0x999)
		tc.write(again, nil)
		// ISCSI-4.2.2.1-6: outside the window
		old := tc.scsi(pdu.FlagF, 0, cdb.TestUnitReady)
		old.SetCmdSN(gap.CmdSN() - 1)
		tc.write(old, nil)
		beyond := tc.scsi(pdu.FlagF, 0, cdb.TestUnitReady)
		beyond.SetCmdSN(tc.maxCmdSN + 1)
		tc.write(beyond, nil)
		tc.CmdSN -= 2
		tc.wantNothing()
		tc.ping()
		if tc.expCmdSN != gap.CmdSN() { // ISCSI-4.2.2.1-4
			t.Errorf("ExpCmdSN %d passed the gap at %d", tc.expCmdSN, gap.CmdSN())
		}
		tc.write(gap, nil)
		tc.wantAllGood([]pdu.BHS{gap, second, third}) // ISCSI-4.2.2.1-3
		tc.wantNothing()
		if tc.expCmdSN != tc.CmdSN {
			t.Errorf("ExpCmdSN %d instead of %d", tc.expCmdSN, tc.CmdSN)
		}
		tc.logout()
	})
}

// ISCSI-11.2-3: a tag in use is refused.
func TestTagInUse(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		tc.m.holdGets = true
		h := tc.command(writeF, 4096, cdb.Write10(0, 8), nil)
		twin := bytes.Clone(h)
		pdu.BHS(twin).SetCmdSN(tc.CmdSN)
		tc.write(twin, nil)
		tc.wantReject(pdu.RejectTaskInProgress, twin)
		nop := tc.Request(pdu.NOPOut, pdu.FlagF, true)
		nop.SetITT(h.ITT())
		tc.write(nop, nil)
		tc.wantReject(pdu.RejectTaskInProgress, nop)
		reserved := tc.scsi(pdu.FlagF, 0, cdb.TestUnitReady)
		reserved.SetITT(pdu.ReservedTag)
		tc.CmdSN--
		tc.write(reserved, nil)
		tc.wantReject(pdu.RejectInvalidField, reserved)
		tc.m.releaseGets()
		tc.wantStatus(h, 0)
		if tc.expCmdSN != tc.CmdSN { // ISCSI-7.3-2
			t.Errorf("a rejected command counts in ExpCmdSN %d", tc.expCmdSN)
		}
		tc.logout()
	})
}

// While the whole window is in use, each of a flood of immediate requests is answered.
func TestFullWindow(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		tc.m.holdGets = true
		var hs []pdu.BHS
		for range 128 {
			hs = append(hs, tc.command(writeF, 4096, cdb.Write10(0, 8), nil))
		}
		testkit.Eventually(n.tb, "all GetDatas", func() bool { return tc.m.getting() == 128 })
		tc.ping()
		if tc.maxCmdSN != tc.expCmdSN-1 { // ISCSI-4.2.2.1-5
			t.Errorf("MaxCmdSN %d, ExpCmdSN %d", tc.maxCmdSN, tc.expCmdSN)
		}
		tc.command(pdu.FlagF, 0, cdb.TestUnitReady, nil) // outside the window: ignored
		tc.CmdSN--
		// ISCSI-4.2.2.1-8, ISER-8.1-1: there is always room for immediate requests.
		tc.wantTMF(tc.tmf(pdu.AbortTask, [8]byte{}, 0x7777, tc.CmdSN-200), pdu.TaskDoesNotExist)
		for range 100 {
			tc.write(tc.Request(pdu.NOPOut, pdu.FlagF, true), nil)
		}
		for range 100 { // ISER-8.1.1.2-2, ISER-8.1.1.3-1
			tc.want(pdu.NOPIn)
		}
		// ISCSI-4.2.2.1-9: immediate commands that stay are limited.
		var immediate []pdu.BHS
		rejected := 0
		for range 2 * maxImmediateCommands {
			h := tc.scsi(writeF, 4096, cdb.Write10(0, 8))
			h.SetImmediate()
			tc.CmdSN--
			tc.write(h, nil)
			immediate = append(immediate, h)
		}
		for range maxImmediateCommands {
			if p := tc.want(pdu.Reject); p.h.Reason() == pdu.RejectTooManyImmediate {
				rejected++
			}
		}
		if rejected != maxImmediateCommands {
			t.Errorf("%d of %d rejected", rejected, len(immediate))
		}
		tc.m.releaseGets()
		tc.wantAllGood(append(hs, immediate[:maxImmediateCommands]...))
		tc.wantOpenWindow()
		if tc.m.slots > tc.m.full {
			t.Errorf("%d task slots, %d announced", tc.m.slots, tc.m.full)
		}
		tc.logout()
	})
}

// A peer that takes no answers stops being read, and costs no more than its
// slots.
func TestBackPressure(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		tc.m.mu.Lock()
		tc.m.holdFlush = true
		tc.m.mu.Unlock()
		for range 1000 {
			tc.write(tc.Request(pdu.NOPOut, pdu.FlagF, true), make([]byte, 64))
		}
		testkit.Eventually(n.tb, "all slots in use", func() bool { return n.Stats().TasksInFlight == tc.m.full })
		synctest.Wait()
		if s := n.Stats(); s.TasksInFlight != tc.m.full {
			t.Errorf("%+v", s)
		}
		tc.m.mu.Lock()
		tc.m.holdFlush = false
		tc.m.cond.Broadcast()
		tc.m.mu.Unlock()
		for range 1000 {
			tc.want(pdu.NOPIn)
		}
		// And once more, but it goes away instead.
		tc.m.mu.Lock()
		tc.m.holdFlush = true
		tc.m.mu.Unlock()
		for range 1000 {
			tc.write(tc.Request(pdu.NOPOut, pdu.FlagF, true), nil)
		}
		testkit.Eventually(n.tb, "all slots in use", func() bool { return n.Stats().TasksInFlight == tc.m.full })
		tc.m.Close()
		if err := tc.wait(); err == nil {
			t.Error("no error")
		}
	})
}

// The target answers pings.
func TestNOPOut(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		for _, size := range []int{0, 1, 100, 128, 8192} {
			h := tc.Request(pdu.NOPOut, pdu.FlagF, size%2 == 0)
			h.SetTTT(pdu.ReservedTag)
			h.SetLUN([8]byte{1: 0})
			tc.write(h, pattern(size, 1))
			p := tc.want(pdu.NOPIn) // ISCSI-11.18-1
			// ISCSI-11.19-1, ISER-6.2-4: as much of the data as the initiator takes
			if p.h.ITT() != h.ITT() || p.h.TTT() != pdu.ReservedTag ||
				!bytes.Equal(p.data, pattern(size, 1)[:min(size, 128)]) {
				t.Errorf("%d bytes: %x %x", size, []byte(p.h), p.data)
			}
		}
		h := tc.Request(pdu.NOPOut, pdu.FlagF, true)
		h.SetITT(pdu.ReservedTag)
		for _, ttt := range []uint32{pdu.ReservedTag, 5} { // ISCSI-11.18-3: an unknown tag is ignored
			h.SetTTT(ttt)
			tc.write(h, nil)
		}
		tc.wantNothing()
		h = tc.Request(pdu.NOPOut, pdu.FlagF, false)
		tc.CmdSN--
		h.SetITT(pdu.ReservedTag)
		tc.write(h, nil)
		tc.wantReject(pdu.RejectInvalidField, h) // ISCSI-11.18-2: not immediate
		tc.logout()
	})
}

// The target pings an initiator that says nothing, and gives up one that does not answer.
func TestKeepalive(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, func(o *Options) { o.NopInterval = 0 }) // default
		tc := n.connect()
		tc.writeLogin(tc.loginRequest(true, 1, 3), append(slices.Clone(names), linuxKeys...)...)
		tc.wantLogin(pdu.LoginSuccess)
		var ttts []uint32
		for range 5 {
			start := time.Now()
			p := tc.want(pdu.NOPIn) // which checks ISCSI-11.19-3
			// ISCSI-11.19-2, ISER-8.1.2-4
			if p.h.ITT() != pdu.ReservedTag || p.h.TTT() == pdu.ReservedTag || len(p.data) != 0 ||
				slices.Contains(ttts, p.h.TTT()) {
				t.Fatalf("NOP-In %x %x", []byte(p.h), p.data)
			}
			ttts = append(ttts, p.h.TTT())
			if d := time.Since(start); d < 15*time.Second || d > 45*time.Second {
				t.Errorf("ping after %v", d)
			}
			h := tc.Request(pdu.NOPOut, pdu.FlagF, true)
			h.SetITT(pdu.ReservedTag)
			h.SetTTT(p.h.TTT())
			h.SetExpStatSN(tc.ExpStatSN - 1) // ISER-8.1.2-3: the answer alone retires it
			tc.write(h, nil)
		}
		tc.want(pdu.NOPIn)
		start := time.Now()
		if err := tc.wait(); err == nil || !strings.Contains(err.Error(), "silent") {
			t.Error(err)
		}
		if d := time.Since(start); d != 30*time.Second {
			t.Errorf("gave up after %v", d)
		}
	})
}

// The connection of an initiator that vanishes ends NopInterval and NopTimeout after its last word,
// whenever that was.
func TestKeepaliveCountsFromTheLastWord(t *testing.T) {
	for _, after := range []time.Duration{time.Second, 7 * time.Second, 14 * time.Second} {
		bubble(t, after.String(), func(t *testing.T) {
			n := newTestNode(t, func(o *Options) { o.NopInterval = 0 }) // default
			tc := n.connect().login()
			time.Sleep(after)
			tc.ping()
			began := time.Now()
			if err := tc.wait(); err == nil || !strings.Contains(err.Error(), "silent for 45s") {
				t.Error(err)
			}
			if d := time.Since(began); d != 45*time.Second {
				t.Errorf("ended after %v", d)
			}
		})
	}
}

// An initiator that is busy is not silent: data that it sends or takes counts,
// although no PDU of its own comes. When that ends, too, it is given up.
func TestKeepaliveOfABusyInitiator(t *testing.T) {
	const blocks = 2048
	for _, tt := range []struct {
		name  string
		start func(tc *testConn) // makes work for 18 steps at least
		step  func(m *fakeMover)
	}{
		{"receiving", func(tc *testConn) {
			tc.m.mu.Lock()
			tc.m.holdFlush = true
			tc.m.mu.Unlock()
			for range 20 {
				h := tc.scsi(pdu.FlagF|pdu.FlagR, blocks*blockLen, cdb.Read10(0, blocks))
				tc.m.mu.Lock()
				tc.m.sink[h.ITT()] = make([]byte, blocks*blockLen)
				tc.m.mu.Unlock()
				tc.write(h, nil)
			}
		}, func(m *fakeMover) { m.sendOne() }},
		{"sending", func(tc *testConn) {
			tc.m.mu.Lock()
			tc.m.holdGets = true
			tc.m.mu.Unlock()
			for range 20 {
				tc.command(pdu.FlagW, blocks*blockLen, cdb.Write10(0, blocks), nil)
			}
		}, func(m *fakeMover) {
			m.mu.Lock()
			defer m.mu.Unlock()
			m.endGet(m.gets[0], nil)
		}},
	} {
		bubble(t, tt.name, func(t *testing.T) {
			n := newTestNode(t, func(o *Options) { o.NopInterval, o.NopTimeout = time.Second, 6*time.Second })
			tc := n.connect().login()
			tt.start(tc)
			for range 18 {
				time.Sleep(500 * time.Millisecond) // of the clock of the bubble
				if tc.m.isClosed() {
					t.Fatal("given up")
				}
				tt.step(tc.m)
			}
			begin := time.Now()
			if err := tc.wait(); err == nil || !strings.Contains(err.Error(), "silent") {
				t.Error(err)
			}
			if d := time.Since(begin); d < 5*time.Second || d > 8*time.Second { // 7 s, less 500 ms for each of the last steps that was a status
				t.Errorf("given up after %v of silence", d)
			}
		})
	}
}

// ISCSI-7.4-4, ISER-8.1.2-5: nothing but answers in a discovery session, which
// ends when it is idle.
func TestDiscoveryIsQuiet(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, func(o *Options) { o.NopInterval = 0 })
		tc := n.connect().discover()
		start := time.Now()
		if err := tc.wait(); err == nil {
			t.Error("no error")
		}
		if p := tc.next(0); p != nil {
			t.Errorf("%v in an idle discovery session", p.h.Opcode())
		}
		if d := time.Since(start); d != 60*time.Second {
			t.Errorf("ended after %v", d)
		}
	})
}

// Over iSER, iscsiadm loses an answer that comes at once. Nobody else waits for its answer.
func TestDiscoveryPause(t *testing.T) {
	for _, c := range []struct {
		name            string
		rdma, discovery bool
		want            time.Duration // for each answer
	}{
		{"discovery over iSER", true, true, discoveryPause},
		{"discovery over TCP", false, true, 0},
		{"normal session over iSER", true, false, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			testkit.Bubble(t, func(t *testing.T) {
				n := newTestNode(t)
				tc := n.connect(func(tc *testConn) { tc.m.rdma = c.rdma })
				start := time.Now()
				if c.discovery {
					tc.discover()
				} else {
					tc.login()
				}
				if d := time.Since(start); d != c.want {
					t.Errorf("login took %v, want %v", d, c.want)
				}
				start = time.Now()
				h := tc.Request(pdu.TextReq, pdu.FlagF, true)
				h.SetTTT(pdu.ReservedTag)
				tc.write(h, text("SendTargets=All"))
				if len(tc.want(pdu.TextResp).data) == 0 {
					t.Error("no target in the answer")
				}
				if d := time.Since(start); d != c.want {
					t.Errorf("SendTargets took %v, want %v", d, c.want)
				}
				tc.logout()
			})
		})
	}
}

// A refused discovery waits, too: iscsiadm has to learn why.
func TestDiscoveryPauseOfARefusal(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, func(o *Options) { o.DiscoveryAuth = chap(t, "store") })
		tc := n.connect()
		start := time.Now()
		tc.writeLogin(tc.loginRequest(true, 1, 3), "InitiatorName="+initiatorName, "SessionType=Discovery")
		tc.wantLogin(pdu.LoginAuthentication)
		if d := time.Since(start); d != discoveryPause {
			t.Errorf("refused after %v", d)
		}
		tc.wait()
	})
}

// A discovery session ends, too, when its initiator asks and takes no answers.
func TestDiscoveryThatDoesNotRead(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().discover()
		tc.m.mu.Lock()
		tc.m.holdFlush = true
		tc.m.mu.Unlock()
		for range 1000 {
			tc.write(tc.Request(pdu.TextReq, pdu.FlagF, true), text("SendTargets=All"))
		}
		time.Sleep(2*time.Minute + time.Second)
		synctest.Wait()
		if !tc.m.isClosed() {
			t.Error("still there")
			tc.m.Close()
		}
		if err := tc.wait(); err == nil {
			t.Error("no error")
		}
	})
}

// A normal session rejects what it does not support.
func TestRejectsOfANormalSession(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		for _, c := range []struct {
			op     pdu.Opcode
			flags  byte
			reason pdu.RejectReason
		}{
			{pdu.SNACK, pdu.FlagF, pdu.RejectProtocolError}, // ISCSI-11.16-1, ISER-7.3.11-3
			{pdu.SNACK, pdu.FlagF | 1, pdu.RejectProtocolError},
			{pdu.SNACK, pdu.FlagF | 4, pdu.RejectProtocolError},
			{pdu.LoginReq, 0x87, pdu.RejectProtocolError}, // ISCSI-4.2.4-3, ISER-7.3.9-4
			{0x07, pdu.FlagF, pdu.RejectNotSupported},     // ISCSI-11.2-2
			{0x1c, pdu.FlagF, pdu.RejectNotSupported},
			{pdu.SCSIResponse, pdu.FlagF, pdu.RejectProtocolError}, // ISCSI-11.2-1
			{pdu.Reject, pdu.FlagF, pdu.RejectProtocolError},
			{pdu.LogoutReq, pdu.FlagF | 3, pdu.RejectProtocolError}, // ISCSI-11-2
		} {
			h := tc.Request(c.op, c.flags, true)
			tc.write(h, nil)
			tc.wantReject(c.reason, h)
		}
		tc.wantStatus(tc.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 0)
		tc.logout()
	})
}

// ISCSI-4.3-1: a discovery session takes only SendTargets and the Logout of the session.
func TestRejectsOfADiscoverySession(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().discover()
		for _, h := range []pdu.BHS{
			tc.Request(pdu.SCSICommand, pdu.FlagF, true),
			tc.Request(pdu.TaskMgmtReq, pdu.FlagF|pdu.TargetWarmReset, true),
			tc.Request(pdu.NOPOut, pdu.FlagF, true),
		} {
			tc.write(h, nil)
			tc.wantReject(pdu.RejectNotSupported, h)
		}
		h := tc.Request(pdu.LogoutReq, pdu.FlagF|pdu.LogoutCloseConnection, true)
		tc.write(h, nil)
		tc.wantReject(pdu.RejectProtocolError, h)
		h = tc.Request(pdu.TextReq, pdu.FlagF, true)
		h.SetTTT(pdu.ReservedTag)
		tc.write(h, text("MaxRecvDataSegmentLength=512"))
		tc.wantReject(pdu.RejectProtocolError, h)
		tc.logout()
	})
}

// ISER-8.1.2-1, ISER-8.1.2-2, ISER-8.1.2-7: at most two unexpected PDUs are on their way to the
// initiator, and the second is a ping, whose answer acknowledges both.
func TestTwoUnexpectedPDUsAtMost(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		snacks := func(n int) (h pdu.BHS) {
			for range n {
				h = tc.Request(pdu.SNACK, pdu.FlagF, true)
				h.SetITT(5)
				tc.write(h, nil)
			}
			return h
		}
		for range 3 {
			h := snacks(10)
			tc.wantReject(pdu.RejectProtocolError, h)
			ping := tc.want(pdu.NOPIn)
			if ping.h.ITT() != pdu.ReservedTag || ping.h.TTT() == pdu.ReservedTag {
				t.Fatalf("%x", []byte(ping.h))
			}
			tc.wantNothing()
			// The answer acknowledges both, and what was held back comes.
			pong := tc.Request(pdu.NOPOut, pdu.FlagF, true)
			pong.SetITT(pdu.ReservedTag)
			pong.SetTTT(ping.h.TTT())
			tc.write(pong, nil)
			tc.wantReject(pdu.RejectProtocolError, h)
			tc.wantNothing()
			tc.ping() // acknowledges that
		}
		// One alone asks for nothing.
		tc.wantReject(pdu.RejectProtocolError, snacks(1))
		tc.wantNothing()
		tc.ping()
		// Logout and the end of the connection with one held back.
		tc.wantReject(pdu.RejectProtocolError, snacks(2))
		tc.want(pdu.NOPIn)
		tc.close()
		tc.wait()
	})
}

// Logout stops all tasks, and then the target closes the connection if the initiator does not.
func TestLogout(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		tc.m.holdGets = true
		for range 5 {
			tc.command(writeF, 4096, cdb.Write10(0, 8), nil)
		}
		tc.wantGets(5)
		for _, c := range []struct {
			reason byte
			cid    uint16
			want   byte
		}{
			{pdu.LogoutForRecovery, 0, pdu.LogoutRecoveryNotSupported}, // ISCSI-11.14-2
			{pdu.LogoutCloseConnection, 77, pdu.LogoutCIDNotFound},     // ISCSI-11.14-4
		} {
			h := tc.Request(pdu.LogoutReq, pdu.FlagF|c.reason, true)
			h.SetCID(c.cid)
			tc.write(h, nil)
			if p := tc.want(pdu.LogoutResp); p.h.Response() != c.want {
				t.Errorf("reason %d: response %d", c.reason, p.h.Response())
			}
		}
		h := tc.Request(pdu.LogoutReq, pdu.FlagF|pdu.LogoutCloseConnection, true) // ISER-5.2.2-1
		tc.write(h, nil)
		tc.wantNothing() // ISCSI-11.14-1: RDMA Reads are outstanding
		tc.m.releaseGets()
		p := tc.want(pdu.LogoutResp)
		if p.h.Response() != 0 || p.h.Time2Wait() != 2 || p.h.Time2Retain() != 0 { // ISCSI-11.15-2
			t.Errorf("Logout Response %x", []byte(p.h))
		}
		tc.command(pdu.FlagF, 0, cdb.TestUnitReady, nil) // ignored
		if err := tc.wait(); err != nil {                // ISCSI-11.15-1, ISER-5.2.2-3
			t.Errorf("Serve after logout: %v", err)
		}
		if tc.next(0) != nil {
			t.Error("PDU after the Logout Response")
		}
	})
}

// ISCSI-11.9-1, ISCSI-4.2.6-1: initiators are asked to log out before the shutdown, which does
// not wait forever for those that do not.
func TestShutdown(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		polite := n.connect().login()
		stubborn := n.connect(func(tc *testConn) { tc.isid[5] = 2 }).login()
		discovery := n.connect(func(tc *testConn) { tc.isid[5] = 3 }).discover()
		login := n.connect(func(tc *testConn) { tc.isid[5] = 4 })
		login.writeLogin(login.loginRequest(false, 1, 0), names...)
		login.wantLogin(pdu.LoginSuccess)
		gate := n.store.Shut()
		stubborn.command(readF, 4096, cdb.Read10(0, 8), nil)
		<-gate.Entered

		done := make(chan error, 1)
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			if left, err := n.Empty(ctx, ""); left != 1 || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%d sessions are left, %v", left, err)
			}
			done <- n.Shutdown(context.Background())
		}()
		p := polite.want(pdu.AsyncMessage)
		if p.h.AsyncEvent() != pdu.AsyncLogoutRequest || p.h.ITT() != pdu.ReservedTag || p.h.Parameter(3) == 0 ||
			len(p.data) != 0 {
			t.Errorf("%x %x", []byte(p.h), p.data)
		}
		polite.logout()
		late := n.connect(func(tc *testConn) { tc.isid[5] = 5 })
		late.writeLogin(late.loginRequest(true, 1, 3), names...)
		late.wantRefused(pdu.LoginUnavailable)
		if p := stubborn.want(pdu.AsyncMessage); p.h.AsyncEvent() != pdu.AsyncLogoutRequest {
			t.Errorf("%x %x", []byte(p.h), p.data)
		}
		for _, tc := range []*testConn{discovery, login} {
			if err := tc.wait(); !errors.Is(err, errShutdown) {
				t.Error(err)
			}
		}
		if p := stubborn.want(pdu.AsyncMessage); p.h.AsyncEvent() != pdu.AsyncConnectionDropped {
			t.Errorf("%x %x", []byte(p.h), p.data)
		}
		select {
		case err := <-done:
			t.Errorf("Shutdown returned %v with a task in the backend", err)
		case <-time.After(50 * time.Millisecond):
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
		defer cancel()
		if err := n.Shutdown(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		gate.Open()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if err := stubborn.wait(); !errors.Is(err, errShutdown) {
			t.Error(err)
		}
	})
}

// The window alone: every CmdSN once, in order, whatever comes.
func TestWindow(t *testing.T) {
	for _, start := range []uint32{0, 1, 0xfffffff0, 0x7ffffff0} {
		for _, depth := range []int{1, 2, 3, 100, 128} {
			var w window
			w.open(start, depth)
			if w.accepts(start-1) || w.accepts(start+uint32(depth)) || !w.accepts(start) ||
				!w.accepts(start+uint32(depth)-1) {
				t.Fatalf("window of %d at %#x: %+v", depth, start, w)
			}
			tasks := make([]*Task, depth)
			for i := depth - 1; i >= 0; i-- {
				if _, ok := w.next(); ok {
					t.Fatal("next passed a gap")
				}
				tasks[i] = &Task{}
				w.receive(start+uint32(i), tasks[i])
				if w.accepts(start + uint32(i)) {
					t.Fatal("accepted twice")
				}
			}
			for i := range depth {
				if got, ok := w.next(); !ok || got != tasks[i] {
					t.Fatalf("%d of %d at %#x: %p, %v", i, depth, start, got, ok)
				}
			}
			if w.max != w.exp-1 || w.accepts(w.exp) {
				t.Fatalf("%+v", w)
			}
			for range depth {
				w.ended()
			}
			w.skip(w.exp + uint32(depth) + 5)
			for range depth {
				if got, ok := w.next(); !ok || got != nil {
					t.Fatal("skipped CmdSN")
				}
			}
			if w.max != w.exp+uint32(depth)-1 {
				t.Fatalf("%+v", w)
			}
		}
	}
}

// A successful Logout of the session, or of its last connection, is the loss of the nexus (sections
// 6.3.5 and 6.3.5.1): when the response leaves, its RESERVE is over.
func TestLogoutEndsTheNexusFirst(t *testing.T) {
	for name, reason := range map[string]byte{"session": pdu.LogoutCloseSession, "connection": pdu.LogoutCloseConnection} {
		bubble(t, name, func(t *testing.T) {
			n := newTestNode(t)
			a, b := n.connect().login(), n.enter()
			a.wantStatus(a.command(pdu.FlagF, 0, [16]byte{0x16}, nil), 0)
			h := b.command(readF, 512, cdb.Read10(0, 1), nil)
			b.wantStatus(h, 0x18) // RESERVATION CONFLICT
			a.wantLogout(a.logoutOf(reason, 0), pdu.LogoutSuccess)
			began := time.Now()
			b.wantStatus(b.command(readF, 512, cdb.Read10(0, 1), nil), 0)
			if took := time.Since(began); took != 0 {
				t.Errorf("the neighbour waited %v", took)
			}
			a.close()
			a.wantEnd(nil)
			b.logout()
		})
	}
}
