package tests

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/iser"
	"github.com/iser-target/iser-target/rdma/wire"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// held starts n WRITEs of 4 KiB, the i-th to block 8*i, and leaves their RDMA
// Reads unanswered.
func (p *raw) held(n int) (hs []pdu.BHS, reads []wire.ReadRequest) {
	p.t.Helper()
	for i := range n {
		hs = append(hs, p.writeCommand(uint64(8*i), 8))
		reads = append(reads, p.wantRead())
	}
	return hs, reads
}

// untouched checks that nothing has been written to the first n*4 KiB.
func (tg *target) untouched(t testing.TB, n int) {
	t.Helper()
	if !bytes.Equal(tg.stored(t, 0, n*4096), make([]byte, n*4096)) {
		t.Error("an aborted task has written")
	}
}

// ending answers the RDMA Reads of held WRITEs, after the request h that is to
// stop them, and takes what comes up to the answer op. A WRITE whose data arrives
// before the target has come to h may still succeed: then it has its response
// and has written. The others have done neither, and nothing more comes.
func (tg *target) ending(p *raw, h pdu.BHS, op pdu.Opcode, hs []pdu.BHS, reads []wire.ReadRequest) (stopped int) {
	p.t.Helper()
	if err := tg.store.Store.Zero(0, 1<<20); err != nil {
		p.t.Fatal(err)
	}
	if op != pdu.LogoutResp {
		p.ping() // the answer waits for the Reads, and nothing else does
	}
	data := make([][]byte, len(hs))
	for i, r := range reads {
		data[i] = random(4096)
		p.answer(r, data[i])
	}
	won := map[uint32]bool{}
	for {
		m := p.next()
		if m.bhs != nil && m.bhs.Opcode() == pdu.SCSIResponse && m.bhs.Status() == 0 {
			won[m.bhs.ITT()] = true
			continue
		}
		want := byte(0)
		if h.Opcode() == pdu.TaskMgmtReq && h.Function() == pdu.AbortTask && len(won) > 0 {
			want = pdu.TaskDoesNotExist
		}
		if m.bhs == nil || m.bhs.Opcode() != op || m.bhs.ITT() != h.ITT() || m.bhs.Response() != want ||
			len(m.payload) != 76 {
			p.t.Fatalf("%v % x", m.op, m.payload)
		}
		break
	}
	for i, c := range hs {
		stored := tg.stored(p.t, 8*i, 4096)
		untouched := bytes.Equal(stored, make([]byte, 4096))
		if !won[c.ITT()] && untouched {
			stopped++
		}
		if !bytes.Equal(stored, data[i]) && (won[c.ITT()] || !untouched) {
			p.t.Errorf("WRITE %d, response %t: other bytes are stored", i, won[c.ITT()])
		}
	}
	return stopped
}

// attempts repeats f until it has stopped what it was to stop before that could
// end by itself.
func attempts(t *testing.T, f func() bool) {
	t.Helper()
	for range 1000 {
		if f() {
			return
		}
	}
	t.Fatal("the tasks always end by themselves")
}

// A task that waits for an RDMA Read ends when that is answered: only then is
// the initiator's memory its own again (L10). The data is dropped.
func TestAbortTask(t *testing.T) {
	t.Run("ISER-7.3.3-1 ISER-3.1.9-1 ISER-8.3.2-4 ISER-8.3.2-2 L17 write in its data phase", func(t *testing.T) {
		tg := startTarget(t, targetOptions{})
		p := tg.rawLogin(t, initiator.Options{}, 0)
		var hs []pdu.BHS
		var reads []wire.ReadRequest
		attempts(t, func() bool {
			hs, reads = p.held(2)
			f := p.tmf(pdu.AbortTask, 0, hs[0].ITT(), hs[0].CmdSN())
			ok := tg.ending(p, f, pdu.TaskMgmtResp, hs[:1], reads[:1]) == 1
			want := random(4096)
			p.answer(reads[1], want)
			p.wantStatus(hs[1], 0)
			if !bytes.Equal(tg.stored(t, 8, 4096), want) {
				t.Error("the other task has not written")
			}
			return ok
		})
		f := p.tmf(pdu.AbortTask, 0, hs[0].ITT(), hs[0].CmdSN())
		p.wantTMF(f, pdu.TaskDoesNotExist)
		// The STag of the Read is gone.
		p.write(fpdu(tagged(wire.OpReadResponse, true, reads[0].SinkSTag, 0, make([]byte, 4096))))
		p.wantTerminate(wire.ReasonOpcode)
	})
	t.Run("read in the backend", func(t *testing.T) {
		tg := startTarget(t, targetOptions{})
		p := tg.rawLogin(t, initiator.Options{}, 0)
		attempts(t, func() bool {
			gate := tg.store.Shut()
			defer gate.Open()
			block := cdb.Read16(0, 8)
			h := p.scsi(pdu.FlagR, 4096, block)
			p.send(sink(1, 0), h, nil)
			<-gate.Entered
			f := p.tmf(pdu.AbortTask, 0, h.ITT(), h.CmdSN())
			p.ping()
			gate.Open()
			responded := false
			m := p.next()
			for ; m.bhs == nil || m.bhs.Opcode() != pdu.TaskMgmtResp; m = p.next() {
				responded = responded || m.bhs != nil && m.bhs.ITT() == h.ITT()
			}
			want := byte(pdu.FunctionComplete)
			if responded {
				want = pdu.TaskDoesNotExist
			}
			if m.bhs.ITT() != f.ITT() || m.bhs.Response() != want {
				t.Fatalf("% x", m.payload)
			}
			p.ping() // neither data nor a response behind the TMF Response
			return !responded
		})
		p.logout()
	})
	t.Run("waits for ORD", func(t *testing.T) {
		tg := startTarget(t, targetOptions{})
		o := initiator.Options{}
		o.RDMA.IRD = 1
		p := tg.rawLogin(t, o, 0)
		first := p.writeCommand(0, 8)
		read := p.wantRead()
		second := p.writeCommand(8, 8)
		f := p.tmf(pdu.AbortTask, 0, second.ITT(), second.CmdSN())
		p.answer(read, make([]byte, 4096))
		// The second Read was to come; it comes and is answered, or not at all.
		for answered := map[uint32]bool{}; !answered[first.ITT()] || !answered[f.ITT()]; {
			switch m := p.next(); {
			case m.op == wire.OpReadRequest:
				p.answer(m.read, make([]byte, 4096))
			case m.bhs.Opcode() == pdu.SCSIResponse && m.bhs.Status() == 0 && !answered[f.ITT()],
				m.bhs.Opcode() == pdu.SCSIResponse && m.bhs.ITT() == first.ITT(),
				m.bhs.Opcode() == pdu.TaskMgmtResp && m.bhs.ITT() == f.ITT() &&
					m.bhs.Response() == pdu.FunctionComplete:
				answered[m.bhs.ITT()] = true
			default:
				t.Fatalf("%v % x", m.op, m.payload)
			}
		}
		p.ping()
		p.logout()
	})
}

func TestAbortTaskSet(t *testing.T) {
	tg := startTarget(t, targetOptions{luns: 2})
	p := tg.rawLogin(t, initiator.Options{}, 0, 1)
	neighbour := tg.rawLogin(t, initiator.Options{ISID: [6]byte{1}}, 0, 1)
	const n = 4
	attempts(t, func() bool {
		own, reads := p.held(n)
		// A task on the other LUN and one of another session continue.
		block := cdb.Write16(0, 1)
		h := p.scsi(pdu.FlagW, 512, block)
		h.SetLUN([8]byte{1: 1})
		p.send(source(9, 0), h, nil)
		onOther := p.wantRead()
		hs, others := neighbour.held(1)

		f := p.tmf(pdu.AbortTaskSet, 0, pdu.ReservedTag, 0)
		stopped := tg.ending(p, f, pdu.TaskMgmtResp, own, reads)
		p.answer(onOther, random(512))
		p.wantStatus(h, 0)
		neighbour.answer(others[0], make([]byte, 4096))
		neighbour.wantStatus(hs[0], 0)
		return stopped == n
	})
	p.logout()
	neighbour.logout()
}

// Resets stop the tasks of all sessions, and the others hear of it.
func TestReset(t *testing.T) {
	for _, tt := range []struct {
		name     string
		function byte
	}{{"LOGICAL UNIT RESET", pdu.LogicalUnitReset}, {"TARGET WARM RESET", pdu.TargetWarmReset}} {
		t.Run("L17 "+tt.name, func(t *testing.T) {
			tg := startTarget(t, targetOptions{})
			a := tg.rawLogin(t, initiator.Options{}, 0)
			b := tg.rawLogin(t, initiator.Options{ISID: [6]byte{1}}, 0)
			taken, others := b.held(2)
			hs, reads := a.held(2)
			f := a.tmf(tt.function, 0, pdu.ReservedTag, 0)
			// The response does not wait for the network of b.
			tg.ending(a, f, pdu.TaskMgmtResp, hs, reads)
			if err := tg.store.Store.Zero(0, 1<<20); err != nil {
				t.Fatal(err)
			}
			for i, r := range others { // ISCSI-11.4-2: the initiator's memory is its own again
				b.ping()
				b.answer(r, random(4096))
				// ISER-7.3.2-5: its STag is invalidated.
				if m := b.wantAborted(taken[i], 4096); m.op != wire.OpSendInvalidate || m.untag.Invalidate != r.SrcSTag {
					t.Errorf("%v of %#x instead of %#x", m.op, m.untag.Invalidate, r.SrcSTag)
				}
			}
			h := b.scsi(0, 0, cdb.TestUnitReady)
			b.send(iser.Header{}, h, nil)
			b.wantSense(h, 0x06, 0x29, 0x03)
			tg.untouched(t, 2)
			h = a.scsi(0, 0, cdb.TestUnitReady) // the session that reset is told, too
			a.send(iser.Header{}, h, nil)
			a.wantSense(h, 0x06, 0x29, 0x03)
			for _, p := range []*raw{a, b} {
				hs, reads := p.held(1)
				p.answer(reads[0], make([]byte, 4096))
				p.wantStatus(hs[0], 0)
				p.logout()
			}
		})
	}
}

// A READ that hangs in the store when another session takes it away is answered from another slot. What
// it has moved came before (ISER-7.3.2-10), the residual count has the rest (ISCSI-11.4-5), and its STag is
// invalidated (ISER-7.3.2-4). An ORDERED command behind it is answered at once.
func TestTakenReadOfAHungStore(t *testing.T) {
	const piece = 64 << 10
	for name, function := range map[string]byte{"CLEAR TASK SET": pdu.ClearTaskSet, "LOGICAL UNIT RESET": pdu.LogicalUnitReset,
		"TARGET WARM RESET": pdu.TargetWarmReset} {
		t.Run(name, func(t *testing.T) {
			tg := startTarget(t, targetOptions{node: iscsi.Options{MaxTransferPiece: piece}})
			other := tg.rawLogin(t, initiator.Options{}, 0)
			victim := tg.rawLogin(t, initiator.Options{ISID: [6]byte{1}}, 0)
			gate := tg.store.ShutFrom(piece, backendtest.ReadAt)
			defer gate.Open()
			h := victim.scsi(pdu.FlagR, 4*piece, cdb.Read16(0, 4*piece/512))
			victim.send(sink(7, 0), h, nil)
			<-gate.Entered
			ordered := victim.scsi(pdu.FlagR, 512, cdb.Read16(0, 1))
			ordered.SetFlags(pdu.FlagF | pdu.FlagR | pdu.AttrOrdered)
			victim.send(sink(8, 0), ordered, nil)
			moved := 0
			for moved < piece {
				m := victim.next()
				if m.op != wire.OpWrite || m.tagged.STag != 7 || m.tagged.TO != uint64(moved) {
					t.Fatalf("%v % x", m.op, m.payload)
				}
				moved += len(m.payload)
			}
			victim.ping()
			f := other.tmf(function, 0, pdu.ReservedTag, 0)
			victim.wantAborted(ordered, 512)
			m := victim.wantAborted(h, 3*piece)
			if m.op != wire.OpSendInvalidate || m.untag.Invalidate != 7 {
				t.Errorf("%v of %#x", m.op, m.untag.Invalidate)
			}
			other.wantTMF(f, pdu.FunctionComplete)
			victim.ping()
			gate.Open()
			testkit.Eventually(t, "the return of the READ", func() bool { return tg.node.Stats().DetachedTasks == 0 })
			for _, p := range []*raw{victim, other} {
				if function != pdu.ClearTaskSet {
					tur := p.scsi(0, 0, cdb.TestUnitReady)
					p.send(iser.Header{}, tur, nil)
					p.wantSense(tur, 0x06, 0x29, 0x03)
				}
				hs, reads := p.held(1)
				p.answer(reads[0], make([]byte, 4096))
				p.wantStatus(hs[0], 0)
				p.logout()
			}
		})
	}
}

// ISCSI-4.2.3.4-2, ISCSI-4.2.3.4-3: over iSER a FastAbort session that loses tasks is
// told once for the logical unit; the buffers of its writes are in use until the RDMA
// Reads have ended, which the target cannot call off.
func TestFastAbort(t *testing.T) {
	tg := startTarget(t, targetOptions{})
	fast := []string{"TaskReporting=FastAbort"}
	a := tg.rawLogin(t, initiator.Options{Keys: fast}, 0)
	b := tg.rawLogin(t, initiator.Options{ISID: [6]byte{1}, Keys: fast}, 0)
	taken, reads := b.held(2)
	a.wantTMF(a.tmf(pdu.LogicalUnitReset, 0, pdu.ReservedTag, 0), pdu.FunctionComplete)
	m := b.want(pdu.AsyncMessage)
	if m.bhs.AsyncEvent() != pdu.AsyncTaskTermination || m.bhs.LUN() != [8]byte{} || m.bhs.ITT() != pdu.ReservedTag ||
		len(m.payload) != 76 {
		t.Fatalf("% x", m.payload)
	}
	h := b.Request(pdu.NOPOut, pdu.FlagF, true)
	h.SetITT(pdu.ReservedTag)
	h.SetTTT(pdu.ReservedTag)
	b.send(iser.Header{}, h, nil)
	b.ping()
	if n := tg.node.Stats().BuffersOut; n != 2 {
		t.Errorf("%d buffers in use with two RDMA Reads outstanding", n)
	}
	for i, r := range reads {
		b.answer(r, random(4096))
		b.wantAborted(taken[i], 4096)
	}
	if n := tg.node.Stats().BuffersOut; n != 0 {
		t.Errorf("%d buffers in use", n)
	}
	tg.untouched(t, 2)
	for _, p := range []*raw{a, b} {
		h := p.scsi(0, 0, cdb.TestUnitReady)
		p.send(iser.Header{}, h, nil)
		p.wantSense(h, 0x06, 0x29, 0x03)
		p.logout()
	}
}

// No TASK REASSIGN at ErrorRecoveryLevel 0, and no function that is not there.
func TestOtherFunctions(t *testing.T) {
	tg := startTarget(t, targetOptions{})
	p := tg.rawLogin(t, initiator.Options{}, 0)
	for _, tt := range []struct {
		function, lun, response byte
	}{
		{pdu.TaskReassign, 0, pdu.ReassignNotSupported},
		{pdu.ClearACA, 0, pdu.FunctionNotSupported},
		{pdu.QueryTask, 0, pdu.FunctionNotSupported},
		{pdu.LogicalUnitReset, 7, pdu.LUNDoesNotExist},
		{pdu.AbortTaskSet, 7, pdu.LUNDoesNotExist},
	} {
		t.Run(fmt.Sprintf("function %d, LUN %d", tt.function, tt.lun), func(t *testing.T) {
			p.t = t
			p.wantTMF(p.tmf(tt.function, tt.lun, pdu.ReservedTag, 0), tt.response)
		})
	}
	p.logout()
}
