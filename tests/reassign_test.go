package tests

import (
	"bytes"
	"testing"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/iser"
	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// ISER-10.2.2-1: a READ and a WRITE of a connection that failed continue with the STags that TASK
// REASSIGN advertises on another one.
func TestReassignOverISER(t *testing.T) {
	tg := startTarget(t, targetOptions{node: iscsi.Options{Limits: keys.Limits{MaxConnections: 2,
		ErrorRecoveryLevel: 2}}})
	a := tg.login(t, initiator.Options{Connections: 2, Recovery: true})
	if got := a.Key("ErrorRecoveryLevel"); got != "2" {
		t.Fatalf("ErrorRecoveryLevel=%s", got)
	}
	b := tg.login(t, initiator.Options{Join: a, CID: 1})
	do(t, b, &initiator.Command{CDB: cdb.Read16(0, 1), In: make([]byte, 512)})
	const octets, immediate = 256 << 10, 4096
	old := random(octets)
	do(t, a, &initiator.Command{CDB: cdb.Write16(0, octets/512), Out: old})

	gate := tg.store.Shut()
	defer gate.Open()
	r := &initiator.Command{CDB: cdb.Read16(0, octets/512), In: make([]byte, octets)}
	if err := a.Start(r); err != nil {
		t.Fatal(err)
	}
	<-gate.Entered
	// A WRITE that waits until the READ has ended: nothing of it is fetched before.
	w := &initiator.Command{CDB: cdb.Write16(4096, octets/512), Out: random(octets), Immediate: immediate,
		Ordered: true}
	if err := a.Start(w); err != nil {
		t.Fatal(err)
	}
	ping := request(pdu.NOPOut, 0, a.NewITT())
	ping.SetTTT(pdu.ReservedTag)
	if err := a.Control(ping, nil); err != nil {
		t.Fatal(err)
	}
	next(t, a, pdu.NOPIn) // the WRITE has come
	a.Close()
	<-a.Done()
	if p := next(t, b, pdu.AsyncMessage); p.BHS.AsyncEvent() != pdu.AsyncConnectionDropped {
		t.Errorf("%x", []byte(p.BHS))
	}
	gate.Open()
	if err := b.Control(request(pdu.LogoutReq, pdu.LogoutForRecovery, b.NewITT()), nil); err != nil { // CID 0
		t.Fatal(err)
	}
	if p := next(t, b, pdu.LogoutResp); p.BHS.Response() != pdu.LogoutSuccess {
		t.Fatalf("%x", []byte(p.BHS))
	}

	const base = 0x123456789000
	// ISER-7.3.3-4: the target finds the task by the Referenced Task Tag. ExpDataSN is 0 (ISER-3.3-4,
	// ISER-7.3.3-3).
	reassign := func(c *initiator.Command, h iser.Header) {
		f := request(pdu.TaskMgmtReq, pdu.TaskReassign, b.NewITT())
		f.SetReferencedTaskTag(c.ITT())
		f.SetCmdSN(0)
		if err := b.Send(h, f, nil); err != nil {
			t.Fatal(err)
		}
		if p := next(t, b, pdu.TaskMgmtResp); p.BHS.Response() != pdu.FunctionComplete {
			t.Fatalf("%x", []byte(p.BHS))
		}
	}
	var in, out rdma.Region
	got := make([]byte, octets)
	// ISER-7.3.3-2: new STags. That of the WRITE is for everything but the immediate data
	// (ISER-10.2.2-2).
	readSTag := b.Stream().Register(&in, got, base, rdma.RemoteWrite)
	writeSTag := b.Stream().Register(&out, w.Out[immediate:], base, rdma.RemoteRead)
	reassign(w, iser.Header{Write: iser.Remote{Valid: true, STag: writeSTag, Base: base}})
	reassign(r, iser.Header{Read: iser.Remote{Valid: true, STag: readSTag, Base: base}})
	for _, c := range []*initiator.Command{r, w} { // it is still ORDERED
		p := next(t, b, pdu.SCSIResponse)
		// ISER-7.3.3-5, ISER-7.3.3-6, ISER-8.3.1-2: the new STag is invalidated, not the old one
		if p.BHS.ITT() != c.ITT() || p.BHS.Status() != 0 || p.Invalidated == 0 {
			t.Errorf("%x, invalidates %x", []byte(p.BHS), p.Invalidated)
		}
	}
	if !bytes.Equal(got, old) { // ISER-10.2.2-3
		t.Error("wrong data read")
	}
	back := &initiator.Command{CDB: cdb.Read16(4096, octets/512), In: make([]byte, octets)}
	do(t, b, back)
	if !bytes.Equal(back.In, w.Out) { // ISER-10.2.2-4
		t.Error("wrong data written")
	}

	// ISER-10.2.2-5, ISER-10.2.2-6: without the STag that the task needs it stays where it is.
	f := request(pdu.TaskMgmtReq, pdu.TaskReassign, b.NewITT())
	f.SetReferencedTaskTag(w.ITT())
	if err := b.Control(f, nil); err != nil {
		t.Fatal(err)
	}
	if p := next(t, b, pdu.TaskMgmtResp); p.BHS.Response() != pdu.TaskDoesNotExist {
		t.Errorf("%x", []byte(p.BHS))
	}
}

// A task that was answered on a connection that is lost, and is aborted: the status comes
// again on another one, with no STag of the connection that was.
func TestAbortAnswered(t *testing.T) {
	tg := startTarget(t, targetOptions{node: iscsi.Options{Limits: keys.Limits{MaxConnections: 2,
		ErrorRecoveryLevel: 2}}})
	a := tg.login(t, initiator.Options{Connections: 2, Recovery: true})
	b := tg.login(t, initiator.Options{Join: a, CID: 1})
	do(t, b, &initiator.Command{CDB: cdb.Read16(0, 1), In: make([]byte, 512)})
	r := &initiator.Command{CDB: cdb.Read16(0, 8), In: make([]byte, 4096)}
	do(t, a, r)
	a.Close()
	<-a.Done()
	if p := next(t, b, pdu.AsyncMessage); p.BHS.AsyncEvent() != pdu.AsyncConnectionDropped {
		t.Errorf("%x", []byte(p.BHS))
	}
	logout := request(pdu.LogoutReq, pdu.LogoutForRecovery, b.NewITT()) // CID 0, ExpStatSN 0: nothing is acknowledged
	if err := b.Send(iser.Header{}, logout, nil); err != nil {
		t.Fatal(err)
	}
	next(t, b, pdu.LogoutResp)
	f := request(pdu.TaskMgmtReq, pdu.AbortTask, b.NewITT())
	f.SetReferencedTaskTag(r.ITT())
	if err := b.Control(f, nil); err != nil {
		t.Fatal(err)
	}
	if p := next(t, b, pdu.SCSIResponse); p.BHS.ITT() != r.ITT() || p.BHS.Status() != 0 || p.Invalidated != 0 {
		t.Errorf("%x, invalidates %x", []byte(p.BHS), p.Invalidated)
	}
	if p := next(t, b, pdu.TaskMgmtResp); p.BHS.Response() != pdu.FunctionComplete {
		t.Errorf("%x", []byte(p.BHS))
	}
}

// A connection that breaks with many READs and WRITEs in every state: all that the
// target still has continues elsewhere, and the data is right.
func TestReassignUnderLoad(t *testing.T) {
	tg := startTarget(t, targetOptions{node: iscsi.Options{Limits: keys.Limits{MaxConnections: 2,
		ErrorRecoveryLevel: 2}}})
	reassigned := 0
	for round := range uint16(10) {
		a := tg.login(t, initiator.Options{Connections: 2, Recovery: true, ISID: [6]byte{0x80, 5: byte(round)}})
		b := tg.login(t, initiator.Options{Join: a, CID: 1, ISID: [6]byte{0x80, 5: byte(round)}})
		do(t, b, &initiator.Command{CDB: cdb.Read16(0, 1), In: make([]byte, 512)})
		const n, octets = 24, 64 << 10
		var cmds [n]*initiator.Command
		for i := range cmds {
			lba := uint64(i) * octets / 512
			cmds[i] = &initiator.Command{CDB: cdb.Write16(lba, octets/512), Out: random(octets)}
			do(t, a, cmds[i])
		}
		var reads [n]*initiator.Command
		for i := range reads {
			lba := uint64(i) * octets / 512
			reads[i] = &initiator.Command{CDB: cdb.Read16(lba, octets/512), In: make([]byte, octets)}
			if i%2 == 1 {
				reads[i] = &initiator.Command{CDB: cdb.Write16(lba, octets/512), Out: random(octets)}
				copy(cmds[i].Out, reads[i].Out)
			}
			if err := a.Start(reads[i]); err != nil {
				t.Fatal(err)
			}
		}
		if round%2 == 0 {
			reads[n/2].Wait()
		}
		a.Close()
		<-a.Done()
		if p := next(t, b, pdu.AsyncMessage); p.BHS.AsyncEvent() != pdu.AsyncConnectionDropped {
			t.Errorf("%x", []byte(p.BHS))
		}
		if err := b.Control(request(pdu.LogoutReq, pdu.LogoutForRecovery, b.NewITT()), nil); err != nil {
			t.Fatal(err)
		}
		if p := next(t, b, pdu.LogoutResp); p.BHS.Response() != pdu.LogoutSuccess {
			t.Fatalf("%x", []byte(p.BHS))
		}
		for i, c := range reads {
			f := request(pdu.TaskMgmtReq, pdu.TaskReassign, b.NewITT())
			f.SetReferencedTaskTag(c.ITT())
			var region rdma.Region
			var h iser.Header
			const base = 0x1000
			got := make([]byte, octets)
			if i%2 == 0 {
				h.Read = iser.Remote{Valid: true, STag: b.Stream().Register(&region, got, base, rdma.RemoteWrite),
					Base: base}
			} else {
				h.Write = iser.Remote{Valid: true, STag: b.Stream().Register(&region, c.Out, base, rdma.RemoteRead),
					Base: base}
			}
			if err := b.Send(h, f, nil); err != nil {
				t.Fatal(err)
			}
			switch p := next(t, b, pdu.TaskMgmtResp); p.BHS.Response() {
			case pdu.FunctionComplete:
				reassigned++
				p = next(t, b, pdu.SCSIResponse)
				if p.BHS.ITT() != c.ITT() || p.BHS.Status() != 0 || i%2 == 0 && !bytes.Equal(got, cmds[i].Out) {
					t.Errorf("%x, or wrong data", []byte(p.BHS))
				}
			case pdu.TaskDoesNotExist: // it has not come, or its status was acknowledged
			default:
				t.Errorf("%x", []byte(p.BHS))
			}
			b.Stream().Deregister(&region)
		}
		b.Close()
		<-b.Done()
	}
	if reassigned == 0 {
		t.Error("there was nothing to reassign")
	}
}

// request returns the header of an immediate request.
func request(op pdu.Opcode, flags byte, itt uint32) pdu.BHS {
	h := make(pdu.BHS, pdu.BHSLen)
	h.Reset(op, pdu.FlagF|flags)
	h.SetImmediate()
	h.SetITT(itt)
	return h
}

// next takes an op that is no answer to a command that somebody waits for.
func next(t *testing.T, s *initiator.Session, op pdu.Opcode) initiator.PDU {
	t.Helper()
	p, err := s.Next(testContext(t))
	if err != nil || p.BHS.Opcode() != op {
		t.Fatalf("%x, %v; want %v", []byte(p.BHS), err, op)
	}
	return p
}
