package iscsi

import (
	"bytes"
	"context"
	"errors"
	"net"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/security"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// ISCSI-4.2.2.1-1, ISCSI-4.2.2.1-2, ISCSI-4.2.2.1-7: serial numbers wrap, and
// immediate requests do not count.
func TestCmdSNWraps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
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

// ISCSI-4.2.2.1-3, ISCSI-4.2.2.1-4, ISCSI-4.2.2.1-6, ISCSI-4.2.2.1-10,
// ISER-10.2.1-1, ISCSI-7.2.1-1.
func TestCmdSNOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		gap := tc.scsi(pdu.FlagF, 0, cdb.TestUnitReady)
		second := tc.scsi(writeF, 4096, cdb.Write10(0, 8))
		tc.write(second, pattern(4096, second.ITT()))
		tc.write(second, pattern(4096, second.ITT())) // a retry: the tag is looked at first
		third := tc.command(pdu.FlagF, 0, cdb.TestUnitReady, nil)
		again := bytes.Clone(third) // another tag, the same CmdSN while the gap is open
		pdu.BHS(again).SetITT(0x999)
		tc.write(again, nil)
		old := tc.scsi(pdu.FlagF, 0, cdb.TestUnitReady)
		old.SetCmdSN(gap.CmdSN() - 1)
		tc.write(old, nil)
		beyond := tc.scsi(pdu.FlagF, 0, cdb.TestUnitReady)
		beyond.SetCmdSN(tc.maxCmdSN + 1)
		tc.write(beyond, nil)
		tc.CmdSN -= 2
		tc.wantNothing()
		tc.ping()
		if tc.expCmdSN != gap.CmdSN() {
			t.Errorf("ExpCmdSN %d passed the gap at %d", tc.expCmdSN, gap.CmdSN())
		}
		tc.write(gap, nil)
		tc.wantAllGood([]pdu.BHS{gap, second, third})
		tc.wantNothing()
		if tc.expCmdSN != tc.CmdSN {
			t.Errorf("ExpCmdSN %d instead of %d", tc.expCmdSN, tc.CmdSN)
		}
		tc.logout()
	})
}

// ISCSI-11.2-3: a tag in use is refused.
func TestTagInUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
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

// ISCSI-4.2.2.1-8, ISCSI-4.2.2.1-9, ISER-8.1-1, ISER-8.1.1.2-2, ISER-8.1.1.3-1: the whole
// window is in use and a flood of immediate requests comes: each is answered.
func TestFullWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
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
		tc.wantTMF(tc.tmf(pdu.AbortTask, [8]byte{}, 0x7777, tc.CmdSN-200), pdu.TaskDoesNotExist)
		for range 100 {
			tc.write(tc.Request(pdu.NOPOut, pdu.FlagF, true), nil)
		}
		for range 100 {
			tc.want(pdu.NOPIn)
		}
		// Immediate commands that stay are limited.
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
	synctest.Test(t, func(t *testing.T) {
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

// ISCSI-11.18-1, ISCSI-11.18-2, ISCSI-11.19-1, ISER-6.2-4: pings.
func TestNOPOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		for _, size := range []int{0, 1, 100, 128, 8192} {
			h := tc.Request(pdu.NOPOut, pdu.FlagF, size%2 == 0)
			h.SetTTT(pdu.ReservedTag)
			h.SetLUN([8]byte{1: 0})
			tc.write(h, pattern(size, 1))
			p := tc.want(pdu.NOPIn)
			if p.h.ITT() != h.ITT() || p.h.TTT() != pdu.ReservedTag || !bytes.Equal(p.data, pattern(size, 1)[:min(size, 128)]) {
				t.Errorf("%d octets: %x %x", size, []byte(p.h), p.data)
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
		tc.wantReject(pdu.RejectInvalidField, h)
		tc.logout()
	})
}

// ISCSI-11.19-2, ISCSI-11.19-3, ISER-8.1.2-3, ISER-8.1.2-4: the target pings an
// initiator that says nothing and gives up one that does not answer.
func TestKeepalive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newTestNode(t, func(o *Options) { o.NopInterval = 0 }) // default
		tc := n.connect()
		tc.writeLogin(tc.loginRequest(true, 1, 3), append(slices.Clone(names), linuxKeys...)...)
		tc.wantLogin(pdu.LoginSuccess)
		var ttts []uint32
		for range 5 {
			start := time.Now()
			p := tc.want(pdu.NOPIn)
			if p.h.ITT() != pdu.ReservedTag || p.h.TTT() == pdu.ReservedTag || len(p.data) != 0 || slices.Contains(ttts, p.h.TTT()) {
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
			if d := time.Since(begin); d < 7*time.Second || d > 8*time.Second {
				t.Errorf("given up after %v of silence", d)
			}
		})
	}
}

// ISCSI-7.4-4, ISER-8.1.2-5: nothing but answers in a discovery session, which
// ends when it is idle.
func TestDiscoveryIsQuiet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
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

// A discovery session ends, too, when its initiator asks and takes no answers.
func TestDiscoveryThatDoesNotRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
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
	synctest.Test(t, func(t *testing.T) {
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
	synctest.Test(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().discover()
		for _, h := range []pdu.BHS{
			tc.Request(pdu.SCSICommand, pdu.FlagF, true), tc.Request(pdu.TaskMgmtReq, pdu.FlagF|pdu.TargetWarmReset, true),
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
	synctest.Test(t, func(t *testing.T) {
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

// ISCSI-11.14-1, ISER-5.2.2-1, ISER-5.2.2-3, ISCSI-11.15-1, ISCSI-11.15-2:
// logout stops all tasks; the connection is closed even if the initiator does
// not do it.
func TestLogout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
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
		h := tc.Request(pdu.LogoutReq, pdu.FlagF|pdu.LogoutCloseConnection, true)
		tc.write(h, nil)
		tc.wantNothing() // RDMA Reads are outstanding
		tc.m.releaseGets()
		p := tc.want(pdu.LogoutResp)
		if p.h.Response() != 0 || p.h.Time2Wait() != 2 || p.h.Time2Retain() != 0 {
			t.Errorf("Logout Response %x", []byte(p.h))
		}
		tc.command(pdu.FlagF, 0, cdb.TestUnitReady, nil) // ignored
		if err := tc.wait(); err != nil {
			t.Errorf("Serve after logout: %v", err)
		}
		if tc.next(0) != nil {
			t.Error("PDU after the Logout Response")
		}
	})
}

// readText runs a text exchange to its end.
func (tc *testConn) readText(request ...string) []string {
	tc.tb.Helper()
	h := tc.Request(pdu.TextReq, pdu.FlagF, false)
	h.SetTTT(pdu.ReservedTag)
	itt := h.ITT()
	tc.write(h, text(request...))
	var all []byte
	for {
		p := tc.want(pdu.TextResp)
		all = append(all, p.data...)
		// ISCSI-11.11-1, ISCSI-6.4-2, ISCSI-11.11-3, ISER-6.5-2.
		if p.h.ITT() != itt || p.h.Final() != (p.h.TTT() == pdu.ReservedTag) || p.h.Continue() && (p.h.Final() || len(p.data) == 0) {
			tc.tb.Fatalf("Text Response %x", []byte(p.h))
		}
		if p.h.Final() {
			if len(all) == 0 {
				return nil
			}
			return strings.Split(strings.TrimSuffix(string(all), "\x00"), "\x00")
		}
		h = tc.Request(pdu.TextReq, pdu.FlagF, false)
		h.SetITT(itt)
		h.SetTTT(p.h.TTT())
		tc.write(h, nil)
	}
}

// ISCSI-C-1, ISCSI-C-2, ISCSI-C-3, ISCSI-C-4, ISCSI-13.8-1, ISCSI-13.9-1:
// discovery.
func TestSendTargets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newTestNode(t)
		n.AddPortal(PortalConfig{Listen: "[2001:db8::1]:3260", TPGT: 0})
		n.AddPortal(PortalConfig{Listen: "127.0.0.1:3260", TPGT: 2}) // out of reach
		n.AddPortal(PortalConfig{Listen: "[fe80::1]:0", TPGT: 2})
		n.AddPortal(PortalConfig{Listen: "nonsense", TPGT: 2})
		n.AddPortal(PortalConfig{Listen: ":3261", TPGT: 3})                                                    // everywhere
		n.AddPortal(PortalConfig{Listen: "10.0.0.1:3260", Advertise: []string{"store.example:3260"}, TPGT: 4}) // behind NAT
		other, err := security.Compile([]string{"iqn.2001-04.com.example:*"})
		if err != nil {
			t.Fatal(err)
		}
		all, err := security.Compile([]string{"*"})
		if err != nil {
			t.Fatal(err)
		}
		n.AddTarget(TargetConfig{Name: "iqn.2026-11.io.example:secret", Initiators: other, LUNs: n.inv})
		n.AddTarget(TargetConfig{Name: "iqn.2026-11.io.example:another", Initiators: all, LUNs: n.inv})
		n.AddTarget(TargetConfig{Name: "iqn.2026-11.io.example:group3", Initiators: all, LUNs: n.inv, PortalGroups: []uint16{3, 2}})
		n.AddTarget(TargetConfig{Name: "iqn.2026-11.io.example:group2", Initiators: all, LUNs: n.inv, PortalGroups: []uint16{2}}) // out of reach
		addresses := []string{"TargetAddress=192.0.2.1:3260,1", "TargetAddress=[2001:db8::1]:3260,0", "TargetAddress=192.0.2.1:3261,3",
			"TargetAddress=store.example:3260,4"}
		one := append([]string{"TargetName=" + targetName}, addresses...)
		group3 := []string{"TargetName=iqn.2026-11.io.example:group3", "TargetAddress=192.0.2.1:3261,3"}
		every := slices.Concat([]string{"TargetName=iqn.2026-11.io.example:another"}, addresses, group3, one)
		rejected := []string{"SendTargets=Reject"}

		tc := n.connect().discover()
		for request, want := range map[string][]string{
			"All": every, "iqn.2026-11.io.example:group3": group3, "iqn.2026-11.io.example:group2": nil, targetName: one, strings.ToUpper(targetName): one, "iqn.2026-11.io.example:secret": nil, "nobody": nil, "": rejected,
		} {
			if got := tc.readText("SendTargets=" + request); !slices.Equal(got, want) {
				t.Errorf("discovery of %q: %q, want %q", request, got, want)
			}
		}
		tc.close() // ISER-5.2.3.2-1: no logout, and yet a normal end
		if err := tc.wait(); err != nil {
			t.Errorf("end of discovery: %v", err)
		}

		tc = n.connect().login()
		for request, want := range map[string][]string{
			"": one, targetName: one, "All": rejected, "iqn.2026-11.io.example:another": rejected,
		} { // in parts of 128 octets
			if got := tc.readText("SendTargets=" + request); !slices.Equal(got, want) {
				t.Errorf("normal session, %q: %q, want %q", request, got, want)
			}
		}
		tc.logout()
	})
}

// ISCSI-13.8-1: what discovery answers for a portal, by where it listens and where
// the initiator has reached us. It may be the portal itself.
func TestTargetAddresses(t *testing.T) {
	for _, tc := range []struct {
		listen, local string
		own           bool
		want          string // "" is out of reach
	}{
		{"[2001:db8::1]:3260", "[2001:db8::1]:3260", true, "[2001:db8::1]:3260"},
		{"[2001:db8::1]:3260", "192.0.2.1:3260", false, "[2001:db8::1]:3260"},
		{"[2001:db8::1]:0", "192.0.2.1:3260", false, ""},
		{"[::]:3261", "[2001:db8::7]:3260", false, "[2001:db8::7]:3261"},
		{"[::]:3261", "192.0.2.1:3260", false, "192.0.2.1:3261"}, // which the kernel maps
		{"0.0.0.0:3261", "[2001:db8::7]:3260", false, ""},
		{"[::1]:3260", "[::1]:3261", false, "[::1]:3260"},
		{"[::1]:3260", "[2001:db8::7]:3260", false, ""},
		{"127.0.0.1:3260", "[::1]:3260", false, "127.0.0.1:3260"},
		// Zones mean something on this machine only.
		{"[fe80::1%eth0]:3260", "[fe80::1%eth0]:3260", true, "[fe80::1]:3260"},
		{"[::]:3260", "[fe80::1%eth0]:3260", true, "[fe80::1]:3260"},
		{"[::]:3261", "[fe80::1%eth0]:3260", false, "[fe80::1]:3261"},
		{"[fe80::2%eth0]:3260", "[fe80::1%eth0]:3260", false, "[fe80::2]:3260"},
		{"[fe80::2%eth1]:3260", "[fe80::1%eth0]:3260", false, ""},
		{"[fe80::2%eth0]:3260", "[2001:db8::7]:3260", false, ""},
		{"[fe80::2%eth0]:3260", "192.0.2.1:3260", false, ""},
	} {
		local, err := net.ResolveTCPAddr("tcp", tc.local)
		if err != nil {
			t.Fatal(err)
		}
		p := &Portal{PortalConfig: PortalConfig{Listen: tc.listen}}
		own := p
		if !tc.own {
			own = &Portal{}
		}
		if got := strings.Join(p.addresses(own, local), " "); got != tc.want {
			t.Errorf("portal %s, reached at %s: %q, want %q", tc.listen, tc.local, got, tc.want)
		}
	}
}

// ISCSI-C-5: many targets.
func TestSendManyTargets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newTestNode(t)
		n.addTargets(500)
		tc := n.connect().discover()
		if got := tc.readText("SendTargets=All"); len(got) != 2*501 {
			t.Errorf("%d lines", len(got))
		}
		tc.logout()
	})
}

// addTargets adds so many targets.
func (n *testNode) addTargets(count int) {
	n.tb.Helper()
	all, err := security.Compile([]string{"*"})
	if err != nil {
		n.tb.Fatal(err)
	}
	for i := range count {
		if err := n.AddTarget(TargetConfig{Name: "iqn.2026-11.io.example:t" + strconv.Itoa(i), Initiators: all, LUNs: n.inv}); err != nil {
			n.tb.Fatal(err)
		}
	}
}

// ISCSI-6.2-1, ISCSI-6.2-2, ISCSI-6.2-3, ISCSI-6.2-4, ISCSI-6.4-1, ISCSI-6.4-4,
// ISCSI-6.4-5, ISCSI-6.4-6, ISCSI-11.10-1, ISCSI-11.10-2, ISCSI-11.11-2.
func TestText(t *testing.T) {
	type request = func(flags byte, itt, ttt uint32) pdu.BHS
	exchange := func(name string, f func(t *testing.T, tc *testConn, req request)) {
		bubble(t, name, func(t *testing.T) {
			tc := newTestNode(t).connect().login()
			f(t, tc, func(flags byte, itt, ttt uint32) pdu.BHS {
				h := tc.Request(pdu.TextReq, flags, true)
				if itt != 0 {
					h.SetITT(itt)
				}
				h.SetTTT(ttt)
				return h
			})
			tc.ping() // the connection has survived
			tc.logout()
		})
	}
	exchange("ISCSI-6.2-1 F and C", func(t *testing.T, tc *testConn, req request) {
		h := req(pdu.FlagF|pdu.FlagC, 0, pdu.ReservedTag)
		tc.write(h, text("SendTargets="))
		tc.wantReject(pdu.RejectProtocolError, h)
	})
	exchange("ISCSI-6.2-2 request in two parts", func(t *testing.T, tc *testConn, req request) {
		h := req(pdu.FlagC, 0, pdu.ReservedTag)
		tc.write(h, []byte("Initia"))
		p := tc.want(pdu.TextResp)
		if p.h.Final() || len(p.data) != 0 || p.h.TTT() == pdu.ReservedTag {
			t.Fatalf("%x %q", []byte(p.h), p.data)
		}
		other := req(pdu.FlagF, 0, pdu.ReservedTag) // ISCSI-6.2-4, ISCSI-11.10-1
		tc.write(other, nil)
		tc.wantReject(pdu.RejectProtocolError, other)
		// That has reset the exchange.
		stale := req(pdu.FlagF, h.ITT(), p.h.TTT()) // ISCSI-11.10-2
		tc.write(stale, text("torAlias=x"))
		tc.wantReject(pdu.RejectInvalidField, stale)

		h = req(pdu.FlagC, 0, pdu.ReservedTag)
		tc.write(h, []byte("Initia"))
		p = tc.want(pdu.TextResp)
		h = req(pdu.FlagF, h.ITT(), p.h.TTT())
		tc.write(h, text("torAlias=x", "X-com.example.foo=1"))
		p = tc.want(pdu.TextResp)
		if !p.h.Final() || string(p.data) != "X-com.example.foo=NotUnderstood\x00" {
			t.Fatalf("%x %q", []byte(p.h), p.data)
		}
	})
	exchange("ISCSI-6.4-4 begins again", func(t *testing.T, tc *testConn, req request) {
		h := req(pdu.FlagF, 0, pdu.ReservedTag)
		var long []string
		for i := range 50 {
			long = append(long, "X"+strconv.Itoa(i)+"=1")
		}
		tc.write(h, text(long...))
		p := tc.want(pdu.TextResp)
		again := req(pdu.FlagF, h.ITT(), pdu.ReservedTag)
		tc.write(again, text(long...))
		q := tc.want(pdu.TextResp)
		if !p.h.Continue() || !q.h.Continue() || !bytes.Equal(p.data, q.data) || p.h.TTT() == q.h.TTT() || len(p.data) != 128 {
			t.Fatalf("%x %q, %x %q", []byte(p.h), p.data, []byte(q.h), q.data)
		}
		h = req(pdu.FlagF, h.ITT(), q.h.TTT())
		tc.write(h, text("X=1")) // ISCSI-6.2-3
		tc.wantReject(pdu.RejectProtocolError, h)
	})
	for id, pairs := range map[string][]string{
		"ISCSI-6.4-5 key repeated":     {"InitiatorAlias=a", "InitiatorAlias=b"},
		"ISCSI-6.4-6 leading-only key": {"MaxBurstLength=512"},
		"ISCSI-6.1-3 no text at all":   {"nothing"},
		"SendTargets repeated":         {"SendTargets=", "SendTargets="}, // the answer would grow with each
	} {
		exchange(id, func(t *testing.T, tc *testConn, req request) {
			h := req(pdu.FlagF, 0, pdu.ReservedTag)
			tc.write(h, text(pairs...))
			tc.wantReject(pdu.RejectProtocolError, h)
		})
	}
	exchange("ISCSI-11.11-2 text without end", func(t *testing.T, tc *testConn, req request) {
		h := req(pdu.FlagC, 0, pdu.ReservedTag)
		for range 3 {
			tc.write(h, bytes.Repeat([]byte{'x'}, 8192))
			p := tc.next(testkit.Patience)
			if p == nil {
				t.Fatal("no answer")
			}
			tc.ExpStatSN = p.h.StatSN() + 1
			if p.h.Opcode() == pdu.Reject {
				if p.h.Reason() != pdu.RejectOutOfResources {
					t.Errorf("reason %#x", p.h.Reason())
				}
				return
			}
			h = req(pdu.FlagC, h.ITT(), p.h.TTT())
		}
		t.Error("more than MaxText was taken")
	})
}

// What was asked does not stay in memory, nor does the rest of a long answer, while
// answers wait for an initiator that takes none: that would be some 40 MB for each
// connection of a stranger.
func TestTextOfWhoDoesNotRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newTestNode(t)
		n.addTargets(1000)
		tc := n.connect(func(tc *testConn) { tc.m.rdma = false }).discover()
		heap := func() uint64 {
			var m runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&m)
			return m.HeapAlloc
		}
		for name, data := range map[string][]byte{
			"too long":    make([]byte, 256<<10),
			"long answer": text("SendTargets=All"),
		} {
			tc.m.mu.Lock()
			tc.m.holdFlush, tc.m.maxSend = true, 512
			tc.m.mu.Unlock()
			before := heap()
			for i := range tc.m.full {
				h := tc.Request(pdu.TextReq, pdu.FlagF, true)
				h.SetTTT(pdu.ReservedTag)
				h.SetDataSegmentLength(len(data))
				tc.m.mu.Lock()
				tc.m.in = append(tc.m.in, Notice{BHS: h, Data: data})
				tc.m.cond.Broadcast()
				tc.m.mu.Unlock()
				testkit.Eventually(n.tb, "the answer waits", func() bool { return n.Stats().TasksInFlight == i+1 && n.Sessions()[0].Tasks == 0 })
			}
			if more := int(heap() - before); more > 4<<20 {
				t.Errorf("%s: %d octets for %d requests of %d", name, more, tc.m.full, len(data))
			}
			tc.m.mu.Lock()
			tc.m.holdFlush = false
			tc.m.cond.Broadcast()
			tc.m.mu.Unlock()
			for range tc.m.full {
				tc.next(testkit.Patience)
			}
		}
	})
}

// ISCSI-11.9-1, ISCSI-4.2.6-1: shutdown asks initiators to log out and does
// not wait for ever for those who do not.
func TestShutdown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newTestNode(t, func(o *Options) { o.ShutdownWait = time.Second })
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
		go func() { done <- n.Shutdown(context.Background()) }()
		p := polite.want(pdu.AsyncMessage)
		if p.h.AsyncEvent() != pdu.AsyncLogoutRequest || p.h.ITT() != pdu.ReservedTag || p.h.Parameter(3) == 0 || len(p.data) != 0 {
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
			if w.accepts(start-1) || w.accepts(start+uint32(depth)) || !w.accepts(start) || !w.accepts(start+uint32(depth)-1) {
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
