package iscsi

import (
	"bytes"
	"net"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/security"
	"github.com/iser-target/iser-target/tests/testkit"
)

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
		if p.h.ITT() != itt || p.h.Final() != (p.h.TTT() == pdu.ReservedTag) || p.h.Continue() &&
			(p.h.Final() || len(p.data) == 0) {
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

// Discovery returns the targets that an initiator may use, with the addresses that it can reach.
func TestSendTargets(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		n.AddPortal(PortalConfig{Listen: "[2001:db8::1]:3260", TPGT: 0}) // ISCSI-13.9-1
		n.AddPortal(PortalConfig{Listen: "127.0.0.1:3260", TPGT: 2})     // out of reach
		n.AddPortal(PortalConfig{Listen: "[fe80::1]:0", TPGT: 2})
		n.AddPortal(PortalConfig{Listen: "nonsense", TPGT: 2})
		// everywhere
		n.AddPortal(PortalConfig{Listen: ":3261", TPGT: 3})
		// behind NAT
		n.AddPortal(PortalConfig{Listen: "10.0.0.1:3260", Advertise: []string{"store.example:3260"}, TPGT: 4})
		other, err := security.Compile([]string{"iqn.2001-04.com.example:*"})
		if err != nil {
			t.Fatal(err)
		}
		all, err := security.Compile([]string{"*"})
		if err != nil {
			t.Fatal(err)
		}
		// ISCSI-C-4: not for this initiator
		n.AddTarget(TargetConfig{Name: "iqn.2026-11.io.example:secret", Initiators: other, LUNs: n.inv})
		n.AddTarget(TargetConfig{Name: "iqn.2026-11.io.example:another", Initiators: all, LUNs: n.inv})
		n.AddTarget(TargetConfig{Name: "iqn.2026-11.io.example:group3", Initiators: all, LUNs: n.inv,
			PortalGroups: []uint16{3, 2}})
		// out of reach
		n.AddTarget(TargetConfig{Name: "iqn.2026-11.io.example:group2", Initiators: all, LUNs: n.inv,
			PortalGroups: []uint16{2}})
		// ISCSI-13.8-1
		addresses := []string{"TargetAddress=192.0.2.1:3260,1", "TargetAddress=[2001:db8::1]:3260,0",
			"TargetAddress=192.0.2.1:3261,3",
			"TargetAddress=store.example:3260,4"}
		one := append([]string{"TargetName=" + targetName}, addresses...)
		group3 := []string{"TargetName=iqn.2026-11.io.example:group3", "TargetAddress=192.0.2.1:3261,3"}
		every := slices.Concat([]string{"TargetName=iqn.2026-11.io.example:another"}, addresses, group3, one)
		rejected := []string{"SendTargets=Reject"}

		tc := n.connect().discover() // ISCSI-C-1, ISCSI-C-2
		for request, want := range map[string][]string{
			"All": every, "iqn.2026-11.io.example:group3": group3, "iqn.2026-11.io.example:group2": nil,
			targetName: one, strings.ToUpper(targetName): one, "iqn.2026-11.io.example:secret": nil,
			"nobody": nil, "": rejected,
		} {
			if got := tc.readText("SendTargets=" + request); !slices.Equal(got, want) {
				t.Errorf("discovery of %q: %q, want %q", request, got, want)
			}
		}
		tc.close() // ISER-5.2.3.2-1: no logout, and yet a normal end
		if err := tc.wait(); err != nil {
			t.Errorf("end of discovery: %v", err)
		}

		tc = n.connect().login() // ISCSI-C-3
		for request, want := range map[string][]string{
			"": one, targetName: one, "All": rejected, "iqn.2026-11.io.example:another": rejected,
		} { // in parts of 128 bytes
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
	testkit.Bubble(t, func(t *testing.T) {
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
		if err := n.AddTarget(TargetConfig{Name: "iqn.2026-11.io.example:t" + strconv.Itoa(i), Initiators: all,
			LUNs: n.inv}); err != nil {
			n.tb.Fatal(err)
		}
	}
}

// Text negotiation in the full feature phase has one ITT (ISCSI-6.4-1). The target rejects what
// breaks the rules, and the connection survives.
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
		if !p.h.Continue() || !q.h.Continue() || !bytes.Equal(p.data, q.data) || p.h.TTT() == q.h.TTT() ||
			len(p.data) != 128 {
			t.Fatalf("%x %q, %x %q", []byte(p.h), p.data, []byte(q.h), q.data)
		}
		h = req(pdu.FlagF, h.ITT(), q.h.TTT())
		tc.write(h, text("X=1")) // ISCSI-6.2-3
		tc.wantReject(pdu.RejectProtocolError, h)
	})
	exchange("ISCSI-6.4-4 begins again with another ITT", func(t *testing.T, tc *testConn, req request) {
		var long []string
		for i := range 50 {
			long = append(long, "X"+strconv.Itoa(i)+"=1")
		}
		first := req(pdu.FlagF, 0, pdu.ReservedTag)
		tc.write(first, text(long...))
		p := tc.want(pdu.TextResp)
		tc.write(req(pdu.FlagF, 0, pdu.ReservedTag), text("X=1"))
		q := tc.want(pdu.TextResp)
		if !p.h.Continue() || !q.h.Final() || string(q.data) != "X=NotUnderstood\x00" {
			t.Fatalf("%x %q, %x %q", []byte(p.h), p.data, []byte(q.h), q.data)
		}
		stale := req(pdu.FlagF, first.ITT(), p.h.TTT()) // ISCSI-11.10-2, ISCSI-6.2-4: that exchange has ended
		tc.write(stale, nil)
		tc.wantReject(pdu.RejectInvalidField, stale)
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
	testkit.Bubble(t, func(t *testing.T) {
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
				testkit.Eventually(n.tb, "the answer waits",
					func() bool { return n.Stats().TasksInFlight == i+1 && n.Sessions()[0].Tasks == 0 })
			}
			if more := int(heap() - before); more > 4<<20 {
				t.Errorf("%s: %d bytes for %d requests of %d", name, more, tc.m.full, len(data))
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

// Discovery answers with the portals of other machines that lead to a target, too, but not with those that nobody can reach, and over a protected portal not
// with those that are not protected.
func TestSendTargetsWithPeers(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		const own, name = "TargetAddress=192.0.2.1:3260,1", "TargetName=" + targetName
		ask := func(want ...string) {
			t.Helper()
			c := n.connect().discover()
			if got := c.readText("SendTargets=All"); !slices.Equal(got, want) {
				t.Errorf("%q, want %q", got, want)
			}
			c.close()
			c.wait()
		}
		peers := map[string][]PortalConfig{
			targetName: {
				{Listen: "192.0.2.2:3260", TPGT: 2},
				{Listen: "0.0.0.0:3260", Advertise: []string{"192.0.2.3:860", "[2001:db8::3]:860"}, TPGT: 3, Protected: true},
				{Listen: ":3260", TPGT: 4},
				{Listen: "[::]:3260", TPGT: 5},
				{Listen: "127.0.0.1:3260", TPGT: 6},
				{Listen: "no address", TPGT: 7},
			},
			"iqn.2026-11.io.example:absent": {{Listen: "192.0.2.9:3260", TPGT: 9}},
		}
		n.SetPeers(peers)
		ask(name, own, "TargetAddress=192.0.2.2:3260,2", "TargetAddress=192.0.2.3:860,3", "TargetAddress=[2001:db8::3]:860,3")
		safe := n.AddPortal(PortalConfig{Listen: "192.0.2.1:3261", TPGT: 1, Protected: true})
		n.portal = safe
		ask(name, "TargetAddress=192.0.2.1:3260,1", "TargetAddress=192.0.2.3:860,3", "TargetAddress=[2001:db8::3]:860,3")
		n.RemovePortal(safe)
		n.portal = n.Node.portals[0]
		n.SetPeers(nil)
		ask(name, own)
	})
}
