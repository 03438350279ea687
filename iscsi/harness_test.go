package iscsi

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/security"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
	"github.com/iser-target/iser-target/tests/testkit/header"
)

const (
	blockLen      = 512
	storeLen      = 4 << 20
	initiatorName = "iqn.1993-08.org.debian:01:host"
	targetName    = "iqn.2026-11.io.example:store"
)

// newStore returns the medium of a LUN in tests.
func newStore(tb testing.TB) *backendtest.Faulty {
	tb.Helper()
	m, err := backend.OpenMemory(backend.MemoryConfig{Size: storeLen, BlockSize: blockLen})
	if err != nil {
		tb.Fatal(err)
	}
	return &backendtest.Faulty{Store: m}
}

// A testNode is a Node with one target of one memory LUN, and one portal.
type testNode struct {
	*Node
	tb     testing.TB
	portal *Portal
	store  *backendtest.Faulty
	inv    *lun.Inventory
	log    *testkit.Log
	before int // goroutines
}

func newTestNode(tb testing.TB, change ...func(*Options)) *testNode {
	tb.Helper()
	return newStoreNode(tb, newStore(tb), change...)
}

func newStoreNode(tb testing.TB, store *backendtest.Faulty, change ...func(*Options)) *testNode {
	tb.Helper()
	log := &testkit.Log{}
	o := Options{
		LogoutWait: 2 * time.Second, ReinstatementWait: 10 * time.Second,
		NopInterval: -1, Logger: slog.New(slog.NewTextHandler(log, nil)),
	}
	for _, f := range change {
		f(&o)
	}
	n := &testNode{tb: tb, Node: NewNode(o), store: store, log: log, before: runtime.NumGoroutine()}
	n.inv = newInventory(tb, n.store)
	all, err := security.Compile([]string{"iqn.1993-08.org.debian:*"})
	if err != nil {
		tb.Fatal(err)
	}
	if err := n.AddTarget(TargetConfig{Name: targetName, Alias: "store", Initiators: all, ResetsFor: all, LUNs: n.inv}); err != nil {
		tb.Fatal(err)
	}
	n.portal = n.AddPortal(PortalConfig{Listen: "0.0.0.0:3260", TPGT: 1})
	tb.Cleanup(n.checkIdle)
	return n
}

// bubble runs a subtest in a bubble of testing/synctest. The clock of a bubble moves only while
// all of its goroutines wait, so a test that expects nothing to happen need not wait for it.
func bubble(t *testing.T, name string, f func(t *testing.T)) {
	t.Helper()
	t.Run(name, func(t *testing.T) { testkit.Bubble(t, f) })
}

// newInventory makes LUN 0 of each store, LUN 1 of the second and so on.
func newInventory(tb testing.TB, stores ...backend.Store) *lun.Inventory {
	tb.Helper()
	inv := lun.NewInventory()
	for i, s := range stores {
		u, err := lun.New(s, lun.Options{Identity: state.Identity{NAA: [8]byte{0x30, 7: byte(i)},
			Serial: "300000000000000" + string(rune('0'+i))}})
		if err != nil {
			tb.Fatal(err)
		}
		if err := inv.Add(uint16(i), u); err != nil {
			tb.Fatal(err)
		}
	}
	return inv
}

// checkIdle fails the test if anything is left of its connections.
func (n *testNode) checkIdle() {
	testkit.Eventually(n.tb, "an idle node, without goroutines", func() bool {
		s := n.Stats()
		if s.Sessions != 0 || s.Connections != 0 || s.TasksInFlight != 0 || s.DetachedTasks != 0 || s.BuffersOut != 0 || s.BufferOctets != 0 {
			return false
		}
		if runtime.NumGoroutine() <= n.before {
			return true
		}
		// One outside the bubble, of a finalizer for example, needs time by the clock of the machine.
		_ = syscall.Nanosleep(&syscall.Timespec{Nsec: 1e6}, nil)
		return false
	})
	n.checkCounts()
}

// checkCounts fails the test if a command counts as in flight that has ended, or if it
// has ended with a status and what it took is not known.
func (n *testNode) checkCounts() {
	for _, t := range n.Targets() {
		for _, e := range t.LUNs.Entries() {
			latencies, operations := e.Unit.Latencies(), e.Unit.Operations()
			for tr, c := range e.Unit.Counts() {
				if c.InFlight != 0 {
					n.tb.Errorf("%s, LUN %d: %d commands in flight by %v on an idle node", t.Name, e.LUN, c.InFlight,
						lun.Transport(tr))
				}
				ended := c.Commands[lun.KindRead] + c.Commands[lun.KindWrite] + c.Commands[lun.KindOther]
				for k, o := range operations[tr] {
					if o.Count != c.Commands[k] {
						n.tb.Errorf("%s, LUN %d: %d %v commands by %v took their time, of %d", t.Name, e.LUN, o.Count, lun.Kind(k), lun.Transport(tr), c.Commands[k])
					}
				}
				for p, l := range latencies[tr] {
					if l.Count != ended && lun.Phase(p) != lun.PhaseReadWait || l.Count > ended {
						n.tb.Errorf("%s, LUN %d: %v of %d commands by %v, of %d that have ended", t.Name, e.LUN,
							lun.Phase(p), l.Count, lun.Transport(tr), ended)
					}
				}
			}
		}
	}
}

// A testConn is the initiator's end of one connection.
type testConn struct {
	*testNode
	m         *fakeMover
	dm        Datamover // m, or what is around it
	isid      [6]byte
	cid, tsih uint16
	header.Numbers
	expCmdSN uint32 // as last told by the target
	maxCmdSN uint32
	statSeen bool
	result   chan error
	joined   *atomic.Uint32 // the TSIH that ServeOptions.Joined was told
	options  ServeOptions   // of Serve, except Joined
}

// connect starts a connection; login comes later.
func (n *testNode) connect(change ...func(*testConn)) *testConn {
	tc := &testConn{testNode: n, m: newFakeMover(), isid: [6]byte{0, 2, 0x3d, 0, 0, 1},
		Numbers: header.Numbers{CmdSN: 1, ITT: 0x100}, result: make(chan error, 1), joined: &atomic.Uint32{}}
	for _, f := range change {
		f(tc)
	}
	if tc.dm == nil {
		tc.dm = tc.m
	}
	o := tc.options
	o.Joined = func(tsih uint16, _ bool) { tc.joined.Store(uint32(tsih)) }
	go func() { tc.result <- n.portal.Serve(tc.dm, o) }()
	n.tb.Cleanup(func() { tc.m.Close() }) // before checkIdle
	return tc
}

// text returns the data segment that says pairs, "key=value" each.
func text(pairs ...string) []byte {
	if len(pairs) == 0 {
		return nil
	}
	return []byte(strings.Join(pairs, "\x00") + "\x00")
}

// names are what every normal login begins with.
var names = []string{"InitiatorName=" + initiatorName, "TargetName=" + targetName, "SessionType=Normal"}

// linuxKeys are what open-iscsi offers with ib_iser.
var linuxKeys = []string{
	"DefaultTime2Wait=2", "DefaultTime2Retain=0", "IFMarker=No", "OFMarker=No", "ErrorRecoveryLevel=0", "InitialR2T=No",
	"ImmediateData=Yes", "MaxBurstLength=16776192", "FirstBurstLength=262144", "MaxOutstandingR2T=1",
	"MaxConnections=1",
	"DataPDUInOrder=Yes", "DataSequenceInOrder=Yes", "InitiatorRecvDataSegmentLength=262144",
	"TargetRecvDataSegmentLength=8192",
	"RDMAExtensions=Yes",
}

// write sends a PDU.
func (tc *testConn) write(h pdu.BHS, data []byte) { tc.writeAHS(h, nil, data) }

func (tc *testConn) writeAHS(h pdu.BHS, ahs, data []byte) {
	h = bytes.Clone(h)
	h.SetDataSegmentLength(len(data))
	h.SetTotalAHSLength(len(ahs))
	tc.m.mu.Lock()
	defer tc.m.mu.Unlock()
	tc.m.in = append(tc.m.in, Notice{BHS: h, AHS: bytes.Clone(ahs), Data: bytes.Clone(data)})
	tc.m.cond.Broadcast()
}

// close sends the initiator's FIN.
func (tc *testConn) close() {
	tc.m.mu.Lock()
	defer tc.m.mu.Unlock()
	tc.m.eof = true
	tc.m.cond.Broadcast()
}

// wait returns what Serve has returned.
func (tc *testConn) wait() error {
	tc.tb.Helper()
	select {
	case err := <-tc.result:
		tc.m.mu.Lock()
		defer tc.m.mu.Unlock()
		for _, v := range tc.m.violation {
			tc.tb.Error("datamover contract: " + v)
		}
		if len(tc.m.bound) > 0 {
			tc.tb.Errorf("%d tasks are still bound", len(tc.m.bound))
		}
		return err
	case <-time.After(testkit.Patience):
		tc.tb.Fatalf("Serve has not returned\n%s", testkit.Stacks())
		return nil
	}
}

// next returns the next PDU of the target, or nil if none comes within d or the
// connection is closed.
func (tc *testConn) next(d time.Duration) *sentPDU {
	tc.m.mu.Lock()
	defer tc.m.mu.Unlock()
	late := d <= 0
	timer := time.AfterFunc(d, func() {
		tc.m.mu.Lock()
		late = true
		tc.m.mu.Unlock()
		tc.m.cond.Broadcast()
	})
	defer timer.Stop()
	for len(tc.m.sent) == 0 && !late && !tc.m.closed {
		tc.m.cond.Wait()
	}
	if len(tc.m.sent) == 0 {
		return nil
	}
	p := tc.m.sent[0]
	tc.m.sent = tc.m.sent[1:]
	return &p
}

// want returns the next PDU, which must be an op, and checks its serial numbers.
func (tc *testConn) want(op pdu.Opcode) *sentPDU {
	tc.tb.Helper()
	p := tc.next(testkit.Patience)
	if p == nil {
		tc.tb.Fatalf("no %v", op)
	}
	if p.h.Opcode() != op {
		tc.tb.Fatalf("%v instead of %v: %x %q", p.h.Opcode(), op, []byte(p.h), p.data)
	}
	if op == pdu.LoginResp && pdu.ParseLoginResponse(p.h).Status != 0 {
		return p
	}
	// ISCSI-4.2.2.2-1: StatSN is gapless, whatever the PDU; ISCSI-11.19-3: an
	// unsolicited NOP-In does not advance it.
	if tc.statSeen && p.h.StatSN() != tc.ExpStatSN {
		tc.tb.Fatalf("%v with StatSN %d instead of %d", op, p.h.StatSN(), tc.ExpStatSN)
	}
	if !(op == pdu.NOPIn && p.h.ITT() == pdu.ReservedTag) {
		tc.statSeen, tc.ExpStatSN = true, p.h.StatSN()+1
	}
	tc.expCmdSN, tc.maxCmdSN = p.h.ExpCmdSN(), p.h.MaxCmdSN()
	// ISCSI-4.2.2.1-5: MaxCmdSN is never below ExpCmdSN - 1.
	if pdu.Before(tc.maxCmdSN, tc.expCmdSN-1) {
		tc.tb.Fatalf("%v with ExpCmdSN %d and MaxCmdSN %d", op, tc.expCmdSN, tc.maxCmdSN)
	}
	return p
}

// wantNothing fails if the target has sent anything, or is about to. It needs a bubble.
func (tc *testConn) wantNothing() {
	tc.tb.Helper()
	synctest.Wait()
	tc.m.mu.Lock()
	defer tc.m.mu.Unlock()
	if len(tc.m.sent) > 0 {
		p := tc.m.sent[0]
		tc.tb.Fatalf("unexpected %v: %x %q", p.h.Opcode(), []byte(p.h), p.data)
	}
}

// wantGets waits until so many GetDatas have not been done.
func (tc *testConn) wantGets(n int) {
	tc.tb.Helper()
	testkit.Eventually(tc.tb, fmt.Sprintf("%d GetDatas", n), func() bool { return tc.m.getting() == n })
}

// wantOpenWindow checks that the target expects the next command, and takes as many
// as ever.
func (tc *testConn) wantOpenWindow() {
	tc.tb.Helper()
	if tc.expCmdSN != tc.CmdSN || tc.maxCmdSN != tc.CmdSN+127 {
		tc.tb.Errorf("the window is %d..%d, and the next command %d", tc.expCmdSN, tc.maxCmdSN, tc.CmdSN)
	}
}

// wantReject takes a Reject of the PDU h.
func (tc *testConn) wantReject(reason pdu.RejectReason, h pdu.BHS) {
	tc.tb.Helper()
	p := tc.want(pdu.Reject)
	// ISCSI-11.17-1, ISCSI-11.17-2, ISER-7.3.12-1: the data is the header.
	if p.h.Reason() != reason || p.h.ITT() != pdu.ReservedTag || len(p.data) < 48 || p.data[0] != h[0] ||
		!bytes.Equal(p.data[8:48], h[8:48]) {
		tc.tb.Fatalf("Reject %x of %x with reason %#x, want %#x", []byte(p.h), p.data, p.h.Reason(), reason)
	}
}

// loginRequest returns a Login Request of this connection.
func (tc *testConn) loginRequest(transit bool, csg, nsg pdu.Stage) pdu.LoginRequest {
	return pdu.LoginRequest{Transit: transit, CSG: csg, NSG: nsg, ISID: tc.isid, TSIH: tc.tsih, CID: tc.cid,
		ITT: 0x10, CmdSN: tc.CmdSN, ExpStatSN: tc.ExpStatSN}
}

func (tc *testConn) writeLogin(r pdu.LoginRequest, pairs ...string) {
	tc.write(r.Append(nil), text(pairs...))
}

// wantLogin takes a Login Response with a status and returns it with its text.
func (tc *testConn) wantLogin(status pdu.LoginStatus) (pdu.LoginResponse, []string) {
	tc.tb.Helper()
	p := tc.want(pdu.LoginResp)
	r := pdu.ParseLoginResponse(p.h)
	if r.Status != status {
		tc.tb.Fatalf("login: %v, want %v", r.Status, status)
	}
	// ISCSI-11.12-1: versions 0. ISCSI-11.13-5: C implies not T.
	if p.h[2] != 0 || p.h[3] != 0 || r.Continue && r.Transit || r.ISID != tc.isid {
		tc.tb.Fatalf("Login Response %x", []byte(p.h))
	}
	return r, strings.Split(strings.TrimSuffix(string(p.data), "\x00"), "\x00")
}

// login logs in as Linux does.
func (tc *testConn) login() *testConn {
	tc.tb.Helper()
	tc.writeLogin(tc.loginRequest(true, 1, 3), append(slices.Clone(names), linuxKeys...)...)
	return tc.loggedIn()
}

// loggedIn takes the final Login Response and clears unit attentions.
func (tc *testConn) loggedIn() *testConn {
	tc.tb.Helper()
	r, answers := tc.wantLogin(pdu.LoginSuccess)
	if !r.Transit || r.NSG != pdu.FullFeaturePhase || r.TSIH == 0 {
		tc.tb.Fatalf("final Login Response %+v %q", r, answers)
	}
	tc.tsih = r.TSIH
	for range 3 {
		tc.command(pdu.FlagF, 0, cdb.TestUnitReady, nil)
		if tc.want(pdu.SCSIResponse).h.Status() == 0 {
			return tc
		}
	}
	tc.tb.Fatal("unit attentions without end")
	return nil
}

// discover logs in to a discovery session.
func (tc *testConn) discover() *testConn {
	tc.tb.Helper()
	tc.writeLogin(tc.loginRequest(true, 1, 3), "InitiatorName="+initiatorName, "SessionType=Discovery",
		"HeaderDigest=None", "DataDigest=None", "DefaultTime2Wait=2", "MaxRecvDataSegmentLength=32768")
	r, _ := tc.wantLogin(pdu.LoginSuccess)
	tc.tsih = r.TSIH
	return tc
}

// scsi returns a SCSI Command with memory for its data.
func (tc *testConn) scsi(flags byte, edtl uint32, block [16]byte) pdu.BHS {
	h := tc.Request(pdu.SCSICommand, flags, false)
	h.SetEDTL(edtl)
	h.SetCDB(block[:])
	tc.m.mu.Lock()
	defer tc.m.mu.Unlock()
	tc.m.sink[h.ITT()] = make([]byte, edtl)
	tc.m.source[h.ITT()] = pattern(int(edtl), h.ITT())
	return h
}

// pattern returns the write data of a task.
func pattern(n int, itt uint32) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i>>9 + int(itt)*13)
	}
	return b
}

// command sends a SCSI Command and returns its header.
func (tc *testConn) command(flags byte, edtl uint32, block [16]byte, immediate []byte) pdu.BHS {
	h := tc.scsi(flags, edtl, block)
	tc.write(h, immediate)
	return h
}

// wantStatus takes the SCSI Response to h with a status and no residual.
func (tc *testConn) wantStatus(h pdu.BHS, status byte) *sentPDU {
	tc.tb.Helper()
	p := tc.want(pdu.SCSIResponse)
	// ISCSI-4.2.2.1-11: no response precedes the acknowledgement.
	if p.h.ITT() != h.ITT() || p.h.Status() != status || p.h.Response() != 0 || !h.Immediate() &&
		!pdu.Before(h.CmdSN(), p.h.ExpCmdSN()) {
		tc.tb.Fatalf("SCSI Response %x %x, want status %#x of task %#x", []byte(p.h), p.data, status, h.ITT())
	}
	return p
}

// wantAborted takes TASK ABORTED for h, of whose data so many bytes have not moved (ISCSI-11.4-5).
func (tc *testConn) wantAborted(h pdu.BHS, rest uint32) {
	tc.tb.Helper()
	p := tc.wantStatus(h, lun.StatusTaskAborted)
	flag := byte(pdu.FlagUnderflow)
	if rest == 0 {
		flag = 0
	}
	wantResidual(tc.tb, p, flag, rest)
	if len(p.data) != 0 {
		tc.tb.Fatalf("TASK ABORTED with data %x", p.data)
	}
}

// wantSense takes CHECK CONDITION with a sense.
func (tc *testConn) wantSense(h pdu.BHS, key, asc, ascq byte) {
	tc.tb.Helper()
	p := tc.wantStatus(h, 2)
	// ISCSI-11.4-7, ISER-7.3.2-1: SenseLength, then the sense data.
	if len(p.data) < 16 || int(binary.BigEndian.Uint16(p.data)) != len(p.data)-2 || p.data[2]&0x7f != 0x70 {
		tc.tb.Fatalf("response data %x", p.data)
	}
	if s := p.data[2:]; s[2] != key || s[12] != asc || s[13] != ascq {
		tc.tb.Fatalf("sense %x/%02x%02x, want %x/%02x%02x", s[2], s[12], s[13], key, asc, ascq)
	}
}

// wantResidual checks flags and count: ISCSI-11.4-1.
func wantResidual(tb testing.TB, p *sentPDU, flag byte, n uint32) {
	tb.Helper()
	if p.h.Flags() != pdu.FlagF|flag || p.h.Residual() != n || p.h.BidiResidual() != 0 {
		tb.Fatalf("flags %#x, residual %d; want %#x, %d", p.h.Flags(), p.h.Residual(), pdu.FlagF|flag, n)
	}
}

// ping sends an immediate NOP-Out and takes its answer: the connection lives.
func (tc *testConn) ping() {
	tc.tb.Helper()
	h := tc.Request(pdu.NOPOut, pdu.FlagF, true)
	h.SetTTT(pdu.ReservedTag)
	tc.write(h, nil)
	p := tc.want(pdu.NOPIn)
	if p.h.ITT() != h.ITT() || p.h.TTT() != pdu.ReservedTag || len(p.data) != 0 {
		tc.tb.Fatalf("NOP-In %x %x", []byte(p.h), p.data)
	}
}

// tmf sends an immediate task management function.
func (tc *testConn) tmf(function byte, lun [8]byte, rtt, refCmdSN uint32) pdu.BHS {
	h := tc.Request(pdu.TaskMgmtReq, pdu.FlagF|function, true)
	h.SetLUN(lun)
	h.SetReferencedTaskTag(rtt)
	h.SetRefCmdSN(refCmdSN)
	tc.write(h, nil)
	return h
}

// wantTMF takes a TMF Response.
func (tc *testConn) wantTMF(h pdu.BHS, response byte) {
	tc.tb.Helper()
	p := tc.want(pdu.TaskMgmtResp)
	// ISCSI-11.6-3: no data.
	if p.h.ITT() != h.ITT() || p.h.Response() != response || len(p.data) != 0 {
		tc.tb.Fatalf("TMF Response %x, want response %d", []byte(p.h), response)
	}
}

// logout logs out and waits for the end.
func (tc *testConn) logout() {
	tc.tb.Helper()
	h := tc.Request(pdu.LogoutReq, pdu.FlagF|pdu.LogoutCloseSession, true)
	tc.write(h, nil)
	if p := tc.want(pdu.LogoutResp); p.h.Response() != pdu.LogoutSuccess || p.h.ITT() != h.ITT() || len(p.data) != 0 {
		tc.tb.Fatalf("Logout Response %x", []byte(p.h))
	}
	if !tc.m.rdma { // ISCSI-11.14-3
		testkit.Eventually(tc.tb, "FIN", func() bool {
			tc.m.mu.Lock()
			defer tc.m.mu.Unlock()
			return tc.m.finSent
		})
	}
	tc.close()
	if err := tc.wait(); err != nil {
		tc.tb.Fatalf("Serve after logout: %v", err)
	}
}
