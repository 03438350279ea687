package tcp

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/security/limits"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// A bounded target has limits that a test can change, and a log that it can read.
type bounded struct {
	*target
	limits *limits.Set
	log    *testkit.Log
}

// startBounded starts one with that data_timeout.
func startBounded(t *testing.T, timeout time.Duration, change ...func(*target, *iscsi.Options)) *bounded {
	b := &bounded{limits: limits.New(), log: &testkit.Log{}}
	b.limits.DataTimeout.SetMax(int64(timeout))
	b.target = startTarget(t, append(change, func(_ *target, o *iscsi.Options) {
		o.Shared, o.Logger = b.limits, slog.New(slog.NewTextHandler(b.log, nil))
	})...)
	return b
}

// told waits for a line of the log, the only one, that data did not come.
func (b *bounded) told(t *testing.T, part string) {
	t.Helper()
	var lines []string
	testkit.Eventually(t, "a line of log", func() bool {
		lines = b.log.Lines("data of a command did not come")
		return len(lines) > 0
	})
	if len(lines) != 1 || !strings.Contains(lines[0], part) {
		t.Errorf("log: %q, want %q", lines, part)
	}
}

// neighbour starts an initiator that reads without a pause. stop fails the test if a READ failed, or
// if none was answered.
func (tg *target) neighbour(t *testing.T) (stop func()) {
	c := tg.login(t)
	quit, done := make(chan struct{}), make(chan error, 1)
	go func() {
		reads := 0
		for {
			select {
			case <-quit:
				if reads == 0 {
					done <- fmt.Errorf("no READ was answered")
				}
				close(done)
				return
			default:
			}
			h := c.scsi(pdu.FlagR, cdb.Read16(0, 8), 4096)
			if _, err := c.nc.Write(c.encode(h, nil, nil)); err != nil {
				done <- err
				return
			}
			p, err := c.next()
			if err == nil && p.h.Opcode() == pdu.DataIn && p.h.Flags()&pdu.FlagS == 0 {
				p, err = c.next()
			}
			if err != nil || p.h.ITT() != h.ITT() || p.h.Opcode() != pdu.DataIn && p.h.Opcode() != pdu.SCSIResponse || p.h.Status() != 0 {
				done <- fmt.Errorf("READ %d: %x, error %v", reads, []byte(p.h), err)
				return
			}
			reads++
		}
	}()
	return func() {
		t.Helper()
		close(quit)
		if err := <-done; err != nil {
			t.Errorf("neighbour: %v", err)
		}
	}
}

// Solicited data that does not come, in part only, or without the F bit that ends it, ends its command. What comes of it later is
// dropped: the session works on, and nothing is written.
func TestDataOutThatDoesNotCome(t *testing.T) {
	for name, part := range map[string]int{"nothing": 0, "a part": 8192, "all, but no F": 16384} {
		t.Run(name, func(t *testing.T) {
			tg := startBounded(t, 300*time.Millisecond)
			stop := tg.neighbour(t)
			c := tg.login(t)
			data := random(16384)
			before := tg.stored(0, len(data))
			cmd, r2t := c.openWrite(data)
			sn := uint32(0)
			if part > 0 {
				c.send(dataOut(cmd.ITT(), r2t, sn, 0, false), data[:part])
				sn++
			}
			p := c.want(pdu.SCSIResponse)
			c.wantSense(p, 0x0b, 0x4b, 0x06)
			if p.h.ITT() != cmd.ITT() || p.h.Flags() != pdu.FlagF|pdu.FlagUnderflow || int(p.h.Residual()) != len(data) {
				t.Errorf("SCSI Response %x", []byte(p.h))
			}
			tg.limits.DataTimeout.SetMax(int64(time.Hour))
			tg.told(t, fmt.Sprintf("lun=0 itt=%#x missing=%d ", cmd.ITT(), len(data)-part))
			c.send(dataOut(cmd.ITT(), r2t, sn, uint32(part), true), data[part:])
			c.quiet()
			if got := tg.stored(0, len(data)); !bytes.Equal(got, before) {
				t.Error("a command that has ended has written")
			}
			c.writeAll(0, data, 0, 8192, 262144)
			c.send(dataOut(cmd.ITT(), r2t, sn, uint32(part), true), data[part:]) // a slot has been used again
			c.quiet()
			if !bytes.Equal(tg.stored(0, len(data)), data) {
				t.Error("wrong data")
			}
			stop()
		})
	}
}

// Unsolicited data that does not come ends its command, and late data is rejected.
func TestUnsolicitedDataOutThatDoesNotCome(t *testing.T) {
	no := false
	tg := startBounded(t, 300*time.Millisecond, func(_ *target, o *iscsi.Options) { o.Limits.InitialR2T = &no })
	stop := tg.neighbour(t)
	c := tg.login(t, "InitialR2T=No")
	h := c.scsi(pdu.FlagW, cdb.Write16(0, 32), 16384)
	h.SetFlags(pdu.FlagW | pdu.AttrSimple)
	c.send(h, make([]byte, 512))
	c.wantSense(c.want(pdu.SCSIResponse), 0x0b, 0x4b, 0x06)
	late := dataOut(h.ITT(), nil, 0, 512, true)
	c.send(late, make([]byte, 512))
	c.wantReject(pdu.RejectInvalidField, late)
	c.read(0, 32, 262144)
	stop()
}

// The end of a Data-Out PDU that does not come holds up all that follows. The connection ends, and the
// log says why.
func TestDataOutThatEndsEarly(t *testing.T) {
	tg := startBounded(t, 300*time.Millisecond)
	stop := tg.neighbour(t)
	c := tg.login(t)
	data := random(65536)
	cmd, r2t := c.openWrite(data)
	b := c.encode(dataOut(cmd.ITT(), r2t, 0, 0, true), nil, data)
	c.write(b[:len(b)-100])
	c.wantClosed()
	testkit.Eventually(t, "the reason in the log", func() bool {
		l := tg.log.Lines("session ended")
		return len(l) == 1 && strings.Contains(l[0], fmt.Sprintf("rest of a Data-Out PDU for the SCSI Command with ITT %#x to LUN 0 "+
			"has not come, 100 bytes are missing: limits.data_timeout is 300ms", cmd.ITT()))
	})
	stop()
}

// ISCSI-7.8-3: at ErrorRecoveryLevel 1 the target first asks again, for what is missing. Only if that is
// in vain, too, the command ends.
func TestDataOutIsAskedForAgain(t *testing.T) {
	no := false
	for _, tt := range []struct {
		name        string
		unsolicited int // bytes, of 16384
		solicited   int // bytes that come for the first R2T
		answered    bool
	}{
		{"all", 0, 0, true},
		{"the rest", 0, 8192, true},
		{"unsolicited data", 1024, 0, true},
		{"in vain", 0, 4096, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tg := startBounded(t, 2*time.Second, level1, func(_ *target, o *iscsi.Options) { o.Limits.InitialR2T = &no })
			stop := tg.neighbour(t)
			c := tg.login1(t, "InitialR2T=No")
			data := random(16384)
			cmd := c.scsi(pdu.FlagW, cdb.Write16(0, 32), len(data))
			had, sn := tt.solicited, uint32(1)
			var first pdu.BHS
			if tt.unsolicited > 0 {
				cmd.SetFlags(pdu.FlagW | pdu.AttrSimple)
				had, sn = tt.unsolicited, 0
			}
			c.send(cmd, data[:tt.unsolicited])
			if tt.unsolicited == 0 {
				first = c.want(pdu.R2T).h
			}
			if tt.solicited > 0 {
				c.send(dataOut(cmd.ITT(), first, 0, 0, false), data[:tt.solicited])
			}
			again := c.want(pdu.R2T).h
			if again.ITT() != cmd.ITT() || again.R2TSN() != sn || int(again.BufferOffset()) != had ||
				int(again.DesiredDataTransferLength()) != len(data)-had || first != nil && again.TTT() == first.TTT() {
				t.Fatalf("R2T %x after %x", []byte(again), []byte(first))
			}
			if l := tg.log.Lines("did not come"); len(l) != 0 {
				t.Errorf("log: %q", l)
			}
			if !tt.answered {
				c.wantSense(c.want(pdu.SCSIResponse), 0x0b, 0x4b, 0x06)
				tg.told(t, fmt.Sprintf("lun=0 itt=%#x missing=%d ", cmd.ITT(), len(data)-had))
				stop()
				return
			}
			tg.limits.DataTimeout.SetMax(int64(time.Hour))
			if first != nil { // it was late: a duplicate now
				c.send(dataOut(cmd.ITT(), first, 1, uint32(had), true), random(len(data)-had))
				c.quiet()
			}
			c.answer(cmd, again, data, 4096)
			if p := c.want(pdu.SCSIResponse); p.h.Status() != 0 || !bytes.Equal(tg.stored(0, len(data)), data) {
				t.Errorf("SCSI Response %x, or wrong data", []byte(p.h))
			}
			stop()
		})
	}
}

// stalledReader logs in and asks for more data than the network holds, without taking any.
func (b *bounded) stalledReader(t *testing.T) *client {
	t.Helper()
	c := b.login(t, "MaxRecvDataSegmentLength=65536")
	if err := c.nc.(*net.TCPConn).SetReadBuffer(64 << 10); err != nil {
		t.Fatal(err)
	}
	const blocks = 1 << 20 / blockLen
	for range 24 {
		c.send(c.scsi(pdu.FlagR, cdb.Read16(0, blocks), 1<<20), nil)
	}
	testkit.Eventually(t, "full buffers", func() bool { return b.node.Stats().BuffersOut >= 4 })
	return c
}

// An initiator that talks without taking its answers loses its connection, and all that waits for it is
// free. Its neighbour notices nothing.
func TestAnswersThatAreNotTaken(t *testing.T) {
	for name, wrap := range map[string]func(net.Conn) net.Conn{
		"a socket":       nil,
		"another stream": func(nc net.Conn) net.Conn { return struct{ net.Conn }{nc} },
	} {
		t.Run(name, func(t *testing.T) {
			tg := startBounded(t, time.Hour, func(tg *target, _ *iscsi.Options) { tg.wrap = wrap })
			tg.limits.SendTimeout.SetMax(int64(time.Second))
			stop := tg.neighbour(t)
			c := tg.stalledReader(t)
			began := time.Now()
			ended := func() bool { return len(tg.log.Lines("session ended")) > 0 }
			for !ended() && time.Since(began) < testkit.Patience {
				h := c.nopOut()
				h.SetITT(pdu.ReservedTag)
				c.nc.Write(c.encode(h, nil, nil)) // fails at the end, which the log shows
				time.Sleep(10 * time.Millisecond)
			}
			l := tg.log.Lines("session ended")
			if len(l) != 1 || !strings.Contains(l[0], "initiator takes no answers") || !strings.Contains(l[0], "limits.send_timeout is 1s") {
				t.Fatalf("log: %q", l)
			}
			if d := time.Since(began); d < 900*time.Millisecond {
				t.Errorf("ended after %v", d)
			}
			stop()
			testkit.Eventually(t, "free Buffers", func() bool { return tg.node.Stats().BuffersOut == 0 })
		})
	}
}

// An initiator that takes its data slowly keeps its connection for as long as that lasts.
func TestAnswersThatAreTakenSlowly(t *testing.T) {
	tg := startBounded(t, time.Hour)
	tg.limits.SendTimeout.SetMax(int64(4 * time.Second))
	stop := tg.neighbour(t)
	c := tg.stalledReader(t)
	b := make([]byte, 128<<10)
	for began := time.Now(); time.Since(began) < 7*time.Second; time.Sleep(50 * time.Millisecond) {
		if _, err := io.ReadFull(c.nc, b); err != nil {
			t.Fatal(err)
		}
	}
	if l := tg.log.Lines("session ended"); len(l) != 0 {
		t.Errorf("log: %q", l)
	}
	stop()
}
