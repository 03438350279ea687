package tcp

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// ISCSI-4.2.3.4-1, ISCSI-4.2.3.4-2: with FastAbort a function does not wait for data. The tags of another
// session stay valid until its initiator has answered the message about the logical unit. Then its
// buffers are free.
func TestFastAbort(t *testing.T) {
	tg := startTarget(t)
	data := random(16384)
	before := tg.stored(0, 16384)
	c, d := tg.login(t, "TaskReporting=FastAbort"), tg.login(t, "TaskReporting=FastAbort")
	c.openWrite(data)
	cmd, r2t := d.openWrite(data)
	buffers := func(want int) {
		t.Helper()
		testkit.Eventually(t, fmt.Sprint(want, " buffers in use"),
			func() bool { return tg.node.Stats().BuffersOut == want })
	}
	buffers(2)
	start := time.Now()
	c.tmf(pdu.LogicalUnitReset, pdu.ReservedTag, 0)
	c.wantFunctionComplete()
	if took := time.Since(start); took >= 1500*time.Millisecond { // the standard semantics waits that long
		t.Errorf("answered after %v", took)
	}
	buffers(1)
	p := d.want(pdu.AsyncMessage)
	if p.h.AsyncEvent() != pdu.AsyncTaskTermination || p.h.LUN() != [8]byte{} || len(p.data) != 0 {
		t.Fatalf("%x %x", []byte(p.h), p.data)
	}
	nop := func(lun byte, expStatSN uint32) {
		h := make(pdu.BHS, pdu.BHSLen)
		h.Reset(pdu.NOPOut, pdu.FlagF)
		h.SetImmediate()
		h.SetLUN([8]byte{1: lun})
		h.SetITT(pdu.ReservedTag)
		h.SetTTT(pdu.ReservedTag)
		h.SetCmdSN(d.CmdSN)
		h.SetExpStatSN(expStatSN)
		d.send(h, nil)
	}
	d.send(dataOut(cmd.ITT(), r2t, 0, 0, false), data[:8192]) // on its way when the message came
	nop(1, p.h.StatSN()+1)                                    // about another LUN
	nop(0, p.h.StatSN())                                      // does not acknowledge the message
	d.quiet()
	buffers(1)
	nop(0, p.h.StatSN()+1)
	buffers(0)
	if p := d.wantAborted(cmd, 16384); p.h.MaxCmdSN()-p.h.ExpCmdSN() != 127 {
		t.Fatalf("%x", []byte(p.h))
	}
	nop(0, p.h.StatSN()+1) // again: no effect
	d.quiet()
	for _, x := range []*client{c, d} {
		x.wantSense(x.command(0, cdb.TestUnitReady, 0), 0x06, 0x29, 0x03)
	}
	if !bytes.Equal(tg.stored(0, 16384), before) {
		t.Error("an aborted command has written")
	}
}
