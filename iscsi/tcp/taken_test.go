package tcp

import (
	"bytes"
	"testing"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// Commands that another session takes away are answered. One whose data is on its way is answered after
// the last Data-Out (ISCSI-11.4-2), and its Buffer is in use until then. One that hangs in the store has
// sent a piece: its ExpDataSN counts that (ISCSI-11.4-9), and its residual count the rest (ISCSI-11.4-5).
func TestTakenCommands(t *testing.T) {
	const piece = 64 << 10
	no := false
	tg := startTarget(t, func(_ *target, o *iscsi.Options) {
		o.MaxTransferPiece, o.Limits.InitialR2T, o.Limits.FirstBurstLength = piece, &no, 32768
	})
	for name, function := range map[string]byte{"CLEAR TASK SET": pdu.ClearTaskSet, "LOGICAL UNIT RESET": pdu.LogicalUnitReset,
		"TARGET WARM RESET": pdu.TargetWarmReset} {
		t.Run(name, func(t *testing.T) {
			victim := tg.login(t, "InitialR2T=No", "FirstBurstLength=32768", "MaxRecvDataSegmentLength=8192")
			other := tg.login(t)
			before := tg.stored(0, 16384)
			data := random(16384)
			write, r2t := victim.openWrite(data)
			unsolicited := victim.scsi(pdu.FlagW, cdb.Write16(0, 32), len(data))
			unsolicited.SetFlags(pdu.FlagW | pdu.AttrSimple) // F 0: more comes
			victim.send(unsolicited, data[:512])
			gate := tg.store.ShutFrom(piece, backendtest.ReadAt)
			defer gate.Open()
			read := victim.scsi(pdu.FlagR, cdb.Read16(0, 4*piece/blockLen), 4*piece)
			victim.send(read, nil)
			for sn := range uint32(piece / 8192) {
				if p := victim.want(pdu.DataIn); p.h.ITT() != read.ITT() || p.h.DataSN() != sn {
					t.Fatalf("%x", []byte(p.h))
				}
			}
			<-gate.Entered
			ordered := victim.scsi(pdu.FlagR, cdb.Read16(0, 1), 512)
			ordered.SetFlags(pdu.FlagF | pdu.FlagR | pdu.AttrOrdered)
			victim.send(ordered, nil)
			victim.quiet()
			buffers := tg.node.Stats().BuffersOut

			other.tmf(function, pdu.ReservedTag, 0)
			victim.wantAborted(ordered, 512)
			p := victim.wantAborted(read, 3*piece)
			if p.h.ExpDataSN() != piece/8192 {
				t.Errorf("ExpDataSN %d", p.h.ExpDataSN())
			}
			other.wantFunctionComplete()
			victim.quiet()
			if got := tg.node.Stats().BuffersOut; got != buffers { // data can still come into them
				t.Errorf("%d Buffers in use, want %d", got, buffers)
			}
			victim.send(dataOut(write.ITT(), r2t, 0, 0, false), data[:8192])
			victim.send(dataOut(unsolicited.ITT(), nil, 0, 512, false), data[512:8192])
			victim.quiet()
			victim.send(dataOut(unsolicited.ITT(), nil, 1, 8192, true), data[8192:])
			victim.wantAborted(unsolicited, 16384)
			victim.quiet()
			victim.send(dataOut(write.ITT(), r2t, 1, 8192, true), data[8192:])
			victim.wantAborted(write, 16384)
			gate.Open()
			testkit.Eventually(t, "the return of the READ", func() bool {
				s := tg.node.Stats()
				return s.DetachedTasks == 0 && s.BuffersOut == 0
			})
			for _, c := range []*client{victim, other} {
				if function != pdu.ClearTaskSet {
					c.wantSense(c.command(0, cdb.TestUnitReady, 0), 0x06, 0x29, 0x03)
				}
				if !bytes.Equal(c.read(0, 32, 256<<10), before) {
					t.Error("an aborted command has written")
				}
			}
		})
	}
}
