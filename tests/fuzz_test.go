package tests

import (
	"encoding/binary"
	"io"
	"net"
	"testing"
	"time"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/iser"
	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/rdma/wire"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
	"github.com/iser-target/iser-target/tests/testkit/header"
)

// script joins messages into the input of FuzzSession: each has its length, two
// bytes, in front.
func script(messages ...[]byte) (b []byte) {
	for _, m := range messages {
		b = append(binary.BigEndian.AppendUint16(b, uint16(len(m))), m...)
	}
	return b
}

// FuzzSession sends arbitrary iSER messages to a session in the full feature
// phase. RDMA Reads are answered with zeros. Whatever comes, the connection
// ends soon after the initiator has closed its side, nothing is left of it, and
// a session with another target is not disturbed. (One with the same target can be:
// by a reservation, START STOP UNIT, TARGET COLD RESET.)
func FuzzSession(f *testing.F) {
	r := &raw{Numbers: header.Numbers{CmdSN: 1}, o: initiator.Options{}.Complete()}
	cmd := func(flags byte, edtl uint32, block [16]byte) pdu.BHS { return r.scsi(flags, edtl, block) }
	both := iser.Header{Read: iser.Remote{Valid: true, STag: 1, Base: 1 << 63},
		Write: iser.Remote{Valid: true, STag: 2, Base: 1<<64 - 4096}}
	tur := pduBytes(both, cmd(0, 0, [16]byte{}), nil)
	read := pduBytes(both, cmd(pdu.FlagR, 4096, cdb.Read16(0, 8)), nil)
	write := pduBytes(both, cmd(pdu.FlagW, 4096, cdb.Write16(0, 8)), make([]byte, 512))
	abort := r.Request(pdu.TaskMgmtReq, pdu.FlagF|pdu.AbortTask, true)
	abort.SetReferencedTaskTag(r.ITT - 1)
	reset := r.Request(pdu.TaskMgmtReq, pdu.FlagF|pdu.TargetWarmReset, true)
	text := r.Request(pdu.TextReq, pdu.FlagF, true)
	text.SetTTT(pdu.ReservedTag)
	logout := r.Request(pdu.LogoutReq, pdu.FlagF, true)
	nop := r.Request(pdu.NOPOut, pdu.FlagF, true)
	f.Add(script(tur, read, write))
	f.Add(script(tur, write, pduBytes(iser.Header{}, abort, nil), write))
	f.Add(script(tur, write, pduBytes(iser.Header{}, reset, nil), pduBytes(iser.Header{}, logout, nil)))
	f.Add(script(pduBytes(iser.Header{}, text, []byte("SendTargets=\x00")),
		pduBytes(iser.Header{}, nop, make([]byte, 300))))
	f.Add(script(hello(10, 10, 0), tur, write))
	f.Add(script(make([]byte, 76)))
	f.Add(script(tur, pduBytes(both, r.Request(pdu.SNACK, pdu.FlagF, true), nil),
		pduBytes(both, r.Request(pdu.DataOut, pdu.FlagF, true), make([]byte, 64))))

	// What sessions with the same target feel.
	r = &raw{Numbers: header.Numbers{CmdSN: 1}, o: r.o}
	tur = pduBytes(both, cmd(0, 0, [16]byte{}), nil)
	stop := pduBytes(both, cmd(0, 0, [16]byte{0: 0x1b}), nil)
	start := pduBytes(both, cmd(0, 0, [16]byte{0: 0x1b, 4: 1}), nil) // for those who come after it
	cold := r.Request(pdu.TaskMgmtReq, pdu.FlagF|pdu.TargetColdReset, true)
	f.Add(script(tur, stop, start, pduBytes(iser.Header{}, cold, nil)))
	r = &raw{Numbers: header.Numbers{CmdSN: 2}, o: r.o}
	f.Add(script(tur, // PERSISTENT RESERVE OUT: REGISTER, RESERVE with type Exclusive Access
		pduBytes(both, cmd(pdu.FlagW, 24, [16]byte{0: 0x5f, 8: 24}), []byte{15: 1, 23: 0}),
		pduBytes(both, cmd(pdu.FlagW, 24, [16]byte{0: 0x5f, 1: 1, 2: 3, 8: 24}), []byte{7: 1, 23: 0})))

	tg := startTarget(f, targetOptions{quiet: true, node: iscsi.Options{
		QueueDepth: 16, LogoutWait: time.Second, ConnectionMemory: 1 << 20, MaxTransferPiece: 64 << 10,
	}})
	const other = targetName + ":other"
	tg.addTarget(f, other, 1)
	s, err := initiator.Login(testContext(f), tg.addr, initiator.Options{Target: other, ISID: [6]byte{9}})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() {
		s.Close()
		<-s.Done()
	})
	probe := &initiator.Command{CDB: cdb.Read16(0, 1), In: make([]byte, 512)}
	settled := rdma.ReadStats()

	f.Fuzz(func(t *testing.T, b []byte) {
		p := tg.dial(t, initiator.Options{Target: targetName})
		p.login()
		done := make(chan error, 1)
		go func() { done <- p.serveZeros() }()
		for sent := 0; len(b) >= 2 && sent < 64; sent++ {
			n := min(int(binary.BigEndian.Uint16(b)), len(b)-2, 16<<10)
			if _, err := p.nc.Write(p.message(b[2 : 2+n])); err != nil {
				break // the target has ended it
			}
			b = b[2+n:]
		}
		p.nc.(*net.TCPConn).CloseWrite()
		if err := <-done; isTimeout(err) {
			t.Fatal("the connection does not end")
		}
		p.nc.Close()
		testkit.Eventually(t, "the end of the session", func() bool {
			st := tg.node.Stats()
			return st.Connections == 1 && st.TasksInFlight == 0 && st.BuffersOut == 0 && rdma.ReadStats() == settled
		})
		for range 3 { // unit attentions
			if err := s.Do(probe); err != nil {
				t.Fatal("the other session has ended: ", err)
			}
		}
		if probe.Status != 0 {
			t.Fatalf("status %#x, sense % x", probe.Status, probe.Sense)
		}
	})
}

func isTimeout(err error) bool {
	ne, ok := err.(net.Error)
	return ok && ne.Timeout()
}

// serveZeros answers RDMA Reads with zeros until the connection ends. It uses
// nothing of p but its connection.
func (p *raw) serveZeros() error {
	var head [2 + wire.UntaggedLen + wire.ReadRequestLen]byte
	for {
		if _, err := io.ReadFull(p.nc, head[:4]); err != nil {
			return err
		}
		n := int(binary.BigEndian.Uint16(head[:]))
		rest := n + wire.Pad(n) + wire.CRCLen - 2
		if op, _ := wire.ParseControl(head[3]); op != wire.OpReadRequest {
			if _, err := io.CopyN(io.Discard, p.nc, int64(rest)); err != nil {
				return err
			}
			continue
		}
		b := make([]byte, rest)
		if _, err := io.ReadFull(p.nc, b); err != nil {
			return err
		}
		r, err := wire.ParseReadRequest(b[wire.UntaggedLen-2:][:wire.ReadRequestLen])
		if err != nil {
			return err
		}
		for off := uint32(0); off < r.Size; {
			k := min(r.Size-off, 32<<10)
			if _, err := p.nc.Write(fpdu(tagged(wire.OpReadResponse, off+k == r.Size, r.SinkSTag,
				r.SinkTO+uint64(off), make([]byte, k)))); err != nil {
				return err
			}
			off += k
		}
	}
}
