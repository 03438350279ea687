package tests

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/iscsi/pdu"
	iscsivectors "github.com/iser-target/iser-target/iscsi/vectors"
	"github.com/iser-target/iser-target/iser"
	iservectors "github.com/iser-target/iser-target/iser/vectors"
	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/rdma/wire"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

func TestNOPOut(t *testing.T) {
	tg := startTarget(t, targetOptions{})
	p := tg.rawLogin(t, initiator.Options{})
	for _, tt := range []struct {
		id         string
		sent, back int
	}{
		{"ISER-7.3.13-1 L8 L16 without data, 76 octets", 0, 0},
		{"short data, not padded", 5, 5},
		{"ISER-6.2-4 ISER-6.2-2 more than ib_iser has room for", 1000, 128},
	} {
		t.Run(tt.id, func(t *testing.T) {
			p.t = t
			data := random(tt.sent)
			h := p.Request(pdu.NOPOut, pdu.FlagF, true)
			h.SetTTT(pdu.ReservedTag)
			h.SetLUN([8]byte{1: 3})
			p.send(iser.Header{}, h, data)
			m := p.want(pdu.NOPIn)
			if len(m.payload) != 76+tt.back || !bytes.Equal(m.data, data[:tt.back]) || m.bhs.ITT() != h.ITT() ||
				m.bhs.TTT() != pdu.ReservedTag ||
				m.bhs.LUN() != h.LUN() || m.bhs.ExpCmdSN() != p.CmdSN || m.op != wire.OpSend {
				t.Errorf("%v % x", m.op, m.payload)
			}
		})
	}
	t.Run("ITT ffffffff is not answered", func(t *testing.T) {
		p.t = t
		h := p.Request(pdu.NOPOut, pdu.FlagF, true)
		h.SetITT(pdu.ReservedTag)
		h.SetTTT(pdu.ReservedTag)
		p.send(iser.Header{}, h, nil)
		p.ping()
	})
	p.logout()
}

// The target pings, and gives up when nothing comes back.
func TestKeepalive(t *testing.T) {
	t.Run("ISER-7.3.6-12 ISER-8.1.2-3 ISER-8.1.2-4 ISER-8.1.1.2-2 answered", func(t *testing.T) {
		tg := startTarget(t, targetOptions{node: iscsi.Options{NopInterval: 5 * time.Millisecond,
			NopTimeout: 700 * time.Millisecond}})
		p := tg.dial(t, initiator.Options{Target: targetName})
		p.login()
		p.pong = true
		h := p.writeCommand(0, 8)
		p.wantStatus(h, 0x02) // unit attention
		h = p.writeCommand(0, 8)
		read := p.wantRead()
		p.pong = false
		for range 3 { // during a long write; more than may be unanswered at a time
			p.answerPing(p.want(pdu.NOPIn))
		}
		p.pong = true
		p.answer(read, make([]byte, 4096))
		p.wantStatus(h, 0)
		p.logout()
	})
	t.Run("not answered", func(t *testing.T) {
		tg := startTarget(t, targetOptions{node: iscsi.Options{NopInterval: 5 * time.Millisecond,
			NopTimeout: 5 * time.Millisecond}})
		p := tg.dial(t, initiator.Options{Target: targetName})
		p.login()
		p.wantEnd()
		tg.log.wantLine(`"session ended"`, "silent")
	})
}

func TestRejects(t *testing.T) {
	for level := range uint8(2) { // ISER-10.2-1: both are one and the same with RDMA
		t.Run(fmt.Sprintf("ErrorRecoveryLevel %d", level), func(t *testing.T) {
			tg := startTarget(t, targetOptions{node: iscsi.Options{Limits: keys.Limits{ErrorRecoveryLevel: level}}})
			p := tg.rawLogin(t, initiator.Options{Keys: []string{fmt.Sprintf("ErrorRecoveryLevel=%d", level)}}, 0)
			testRejects(t, tg, p)
			if s := tg.node.Stats(); s.BuffersOut != 0 || s.TasksInFlight > 1 { // nothing is kept
				t.Errorf("%+v", s)
			}
			p.logout()
		})
	}
}

func testRejects(t *testing.T, tg *target, p *raw) {
	for _, tt := range slices.Concat(iscsivectors.Rejects, iscsivectors.IserRejects) {
		t.Run(tt.ID, func(t *testing.T) {
			p.t = t
			h := p.Request(tt.Op, tt.Flags, true)
			p.send(iser.Header{}, h, nil)
			p.wantReject(h, tt.Reason)
			p.ping()
		})
	}
	t.Run("Data-Out for a task without unsolicited data", func(t *testing.T) {
		p.t = t
		w := p.writeCommand(0, 8)
		read := p.wantRead()
		h := p.Request(pdu.DataOut, pdu.FlagF, true)
		h.SetITT(w.ITT())
		h.SetTTT(pdu.ReservedTag)
		p.send(iser.Header{}, h, random(512))
		m := p.want(pdu.Reject)
		if m.bhs.Reason() != pdu.RejectProtocolError {
			t.Errorf("reason %#x", m.bhs.Reason())
		}
		want := random(4096)
		p.answer(read, want)
		p.wantStatus(w, 0)
		if !bytes.Equal(tg.stored(t, 0, 4096), want) {
			t.Error("ISER-7.3.4-4: unsolicited data is on the medium")
		}
	})
}

func TestLogout(t *testing.T) {
	logout := func(p *raw) {
		h := p.Request(pdu.LogoutReq, pdu.FlagF, true)
		p.send(iser.Header{}, h, nil)
		m := p.want(pdu.LogoutResp)
		if m.bhs.ITT() != h.ITT() || m.bhs.Response() != 0 || len(m.payload) != 76 || m.op != wire.OpSend ||
			m.bhs.Time2Wait() != 2 || m.bhs.Time2Retain() != 0 {
			p.t.Fatalf("%v % x", m.op, m.payload)
		}
	}
	t.Run("ISER-5.2.2-1 ISER-5.2.2-2 ISER-7.3.10-1 L20 the initiator closes first", func(t *testing.T) {
		tg := startTarget(t, targetOptions{node: iscsi.Options{LogoutWait: time.Hour}})
		p := tg.rawLogin(t, initiator.Options{})
		logout(p)
		h := p.Request(pdu.NOPOut, pdu.FlagF, true) // is no longer served
		p.send(iser.Header{}, h, nil)
		if tg.node.Stats().Connections != 1 {
			t.Error("the target did not wait")
		}
		p.nc.(interface{ CloseWrite() error }).CloseWrite()
		p.wantEOF()
		tg.log.wantLine(`"session ended"`, "reason=logout")
		tg.waitIdle(t)
	})
	t.Run("ISER-5.2.2-3 ISER-5.2.2-4 ISER-3.2.4-2 the target closes in the end", func(t *testing.T) {
		tg := startTarget(t, targetOptions{})
		p := tg.rawLogin(t, initiator.Options{})
		logout(p)
		p.wantEOF()
		tg.log.wantLine(`"session ended"`, "reason=logout")
	})
	t.Run("with tasks under way", func(t *testing.T) {
		tg := startTarget(t, targetOptions{})
		attempts(t, func() bool {
			p := tg.rawLogin(t, initiator.Options{}, 0)
			hs, reads := p.held(2)
			h := p.Request(pdu.LogoutReq, pdu.FlagF, true)
			p.send(iser.Header{}, h, nil)
			stopped := tg.ending(p, h, pdu.LogoutResp, hs, reads)
			p.nc.Close()
			tg.waitIdle(t)
			return stopped == 2
		})
	})
}

// 100 logins leave nothing behind; startTarget's end looks.
func TestLoginCycles(t *testing.T) {
	t.Run("ISER-5.2.2-5 ISER-5.2.1-1 ISER-5.2.1-2 ISER-5.2.1-3 ISER-3.1.5-1", func(t *testing.T) {
		tg := startTarget(t, targetOptions{})
		for i := range 100 {
			s, err := initiator.Login(testContext(t), tg.addr,
				initiator.Options{Target: targetName, ISID: [6]byte{5: byte(i)}})
			if err != nil {
				t.Fatal(err)
			}
			do(t, s, &initiator.Command{CDB: cdb.Write16(0, 8), Out: random(4096)})
			if err := s.Logout(testContext(t)); err != nil {
				t.Fatal(err)
			}
		}
		tg.waitIdle(t)
		if n := len(tg.log.Lines("reason=logout")); n != 100 {
			t.Errorf("%d logouts in the log", n)
		}
	})
}

// What an initiator sends beyond MaxCmdSN is ignored, as is what it repeats.
func TestWindow(t *testing.T) {
	t.Run("ISER-8.1-1 ISER-8.1-2 ISER-8.1-3 ISER-10.2.1-1", func(t *testing.T) {
		const depth = 4
		tg := startTarget(t, targetOptions{node: iscsi.Options{QueueDepth: depth}})
		other := tg.login(t, initiator.Options{ISID: [6]byte{1}})
		p := tg.rawLogin(t, initiator.Options{}, 0)
		if p.maxCmdSN != p.CmdSN+depth-1 {
			t.Fatalf("CmdSN %d, MaxCmdSN %d", p.CmdSN, p.maxCmdSN)
		}
		var hs []pdu.BHS
		for range depth {
			hs = append(hs, p.writeCommand(0, 1))
		}
		var reads []wire.ReadRequest
		for range depth {
			reads = append(reads, p.wantRead())
		}
		for range 3 * depth { // too much
			p.writeCommand(0, 1)
		}
		p.CmdSN -= 3 * depth
		again := make(pdu.BHS, pdu.BHSLen) // a repetition
		copy(again, hs[0])
		p.send(source(wire.STag(hs[0].ITT()<<8), p.o.BaseOffset), again, nil)
		p.ping()
		do(t, other, &initiator.Command{CDB: cdb.Read16(0, 1), In: make([]byte, 512)})
		for _, r := range reads {
			p.answer(r, make([]byte, 512))
		}
		got := map[uint32]bool{}
		for range depth {
			got[p.want(pdu.SCSIResponse).bhs.ITT()] = true
		}
		for _, h := range hs {
			if !got[h.ITT()] {
				t.Errorf("no response of task %d", h.ITT())
			}
		}
		p.ping()
		if p.maxCmdSN != p.CmdSN+depth-1 {
			t.Errorf("CmdSN %d, MaxCmdSN %d", p.CmdSN, p.maxCmdSN)
		}
		p.logout()
	})
}

// All that the window and the unexpected PDUs allow may come at once; a peer
// that does not read its answers costs a bounded amount of memory.
func TestSlowReader(t *testing.T) {
	t.Run("ISER-8.1-3 ISER-8.1.1.3-1 SEC-5042.6.4.1-1", func(t *testing.T) {
		const memory = 4 << 20
		tg := startTarget(t, targetOptions{node: iscsi.Options{ConnectionMemory: memory}})
		p := tg.rawLogin(t, initiator.Options{}, 0)
		// 128 READs of 1 MiB, none of which it receives, and pings.
		var b []byte
		for i := range 128 {
			block := cdb.Read16(0, 2048)
			b = append(b, p.message(pduBytes(sink(wire.STag(i+1), p.o.BaseOffset), p.scsi(pdu.FlagR, 1<<20, block),
				nil))...)
			ping := p.Request(pdu.NOPOut, pdu.FlagF, true)
			ping.SetTTT(pdu.ReservedTag)
			b = append(b, p.message(pduBytes(iser.Header{}, ping, nil))...)
		}
		p.write(b)
		testkit.Eventually(t, "buffers in use", func() bool { return tg.node.Stats().BufferOctets >= memory })
		s := tg.login(t, initiator.Options{ISID: [6]byte{1}})
		for range 20 {
			want := random(1 << 20)
			r := &initiator.Command{CDB: cdb.Read16(0, 2048), In: make([]byte, len(want))}
			do(t, s, &initiator.Command{CDB: cdb.Write16(0, 2048), Out: want})
			do(t, s, r)
			if !bytes.Equal(r.In, want) {
				t.Fatal("what is read is not what was written")
			}
			if st := tg.node.Stats(); st.BufferOctets > 2*memory {
				t.Fatalf("%+v", st)
			}
		}
		// Then it reads after all, and everything is there.
		responses, pings, data := 0, 0, 0
		for responses < 128 || pings < 128 {
			m := p.next()
			switch {
			case m.op == wire.OpWrite:
				data += len(m.payload)
			case m.bhs.Opcode() == pdu.SCSIResponse && m.bhs.Status() == 0:
				responses++
			case m.bhs.Opcode() == pdu.NOPIn:
				pings++
			case m.bhs.Opcode() == pdu.Reject && m.bhs.Reason() == pdu.RejectTooManyImmediate:
				pings++
			default:
				t.Fatalf("%v % x", m.op, m.payload)
			}
		}
		if data != 128<<20 {
			t.Errorf("%d bytes of data", data)
		}
		p.logout()
	})
}

// The answer to a ping is ahead of data: however much was requested and is in
// memory, it waits for a few MiB at most.
func TestPingUnderLoad(t *testing.T) {
	const reads, each, rate = 40, 1 << 20, 64 << 20
	tg := startTarget(t, targetOptions{wrap: func(nc net.Conn) net.Conn {
		return testkit.SlowConn{Conn: nc,
			Rate: rate}
	}})
	p := tg.rawLogin(t, initiator.Options{}, 0)
	var b []byte
	for i := range reads {
		block := cdb.Read16(0, each/512)
		b = append(b, p.message(pduBytes(sink(wire.STag(i+1), p.o.BaseOffset), p.scsi(pdu.FlagR, each, block), nil))...)
	}
	p.write(b)
	p.next()
	testkit.Eventually(t, "data in memory", func() bool { return tg.node.Stats().BuffersOut >= reads-12 })
	ping := p.Request(pdu.NOPOut, pdu.FlagF, true)
	ping.SetTTT(pdu.ReservedTag)
	p.write(p.message(pduBytes(iser.Header{}, ping, nil)))
	sent := time.Now()
	before, after, responses := 0, 0, 0
	var took time.Duration
	for responses < reads {
		m := p.next()
		switch {
		case m.op == wire.OpWrite && took == 0:
			before += len(m.payload)
		case m.op == wire.OpWrite:
			after += len(m.payload)
		case m.bhs.Opcode() == pdu.SCSIResponse && m.bhs.Status() == 0:
			responses++
		case m.bhs.Opcode() == pdu.NOPIn:
			took = time.Since(sent)
		default:
			t.Fatalf("%v % x", m.op, m.payload)
		}
	}
	// 4 MiB at most were queued; what is in the buffers of TCP comes on top.
	if took == 0 || before > 18<<20 || after < 18<<20 {
		t.Errorf("answer after %v and %d bytes; %d came after it", took, before, after)
	}
	p.logout()
}

// Initiators are asked to log out before a shutdown, once they have shown that they have buffers for that.
func TestShutdown(t *testing.T) {
	t.Run("ISER-7.3.7-1 ISER-5.1.3-10 ISER-5.2.3.1-1", func(t *testing.T) {
		tg := startTarget(t, targetOptions{})
		p := tg.rawLogin(t, initiator.Options{})
		p.ping()
		quiet := tg.rawLogin(t, initiator.Options{ISID: [6]byte{1}})
		done := make(chan error, 1)
		ctx, leave := context.WithTimeout(context.Background(), time.Hour)
		defer leave()
		go func() {
			if left, err := tg.node.Empty(ctx, ""); left != 1 || !errors.Is(err, context.Canceled) {
				t.Errorf("%d sessions are left, %v", left, err)
			}
			done <- tg.node.Shutdown(context.Background())
		}()
		m := p.want(pdu.AsyncMessage)
		if m.bhs.AsyncEvent() != pdu.AsyncLogoutRequest || len(m.payload) != 76 || m.op != wire.OpSend {
			t.Errorf("% x", m.payload)
		}
		p.logout()
		testkit.Eventually(t, "the end of the session", func() bool { return tg.node.Stats().Sessions == 1 })
		leave()
		quiet.wantEOF() // it has sent nothing yet and gets nothing but the end
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// Every kind of Send is understood, and none other than Send is needed.
func TestSendVariants(t *testing.T) {
	t.Run("ISER-1.5.2-1 ISER-1.5.2-4 ISER-1.5.2-5", func(t *testing.T) {
		tg := startTarget(t, targetOptions{})
		s := tg.login(t, initiator.Options{})
		var b [48]byte
		r := pdu.BHS(b[:])
		r.Reset(pdu.NOPOut, pdu.FlagF)
		r.SetImmediate()
		r.SetITT(s.NewITT())
		r.SetTTT(pdu.ReservedTag)
		r.SetCmdSN(1)
		if err := s.Stream().Post(&rdma.WorkRequest{Op: rdma.SendSE,
			Head: pduBytes(iser.Header{}, r, nil)}); err != nil {
			t.Fatal(err)
		}
		s.Stream().Flush()
		if m, err := s.Next(testContext(t)); err != nil || m.BHS.Opcode() != pdu.NOPIn || m.Len != 76 {
			t.Fatalf("%+v, %v", m, err)
		}
	})
	t.Run("ISER-11-4 ISER-4.1-7 an STag of nobody", func(t *testing.T) {
		tg := startTarget(t, targetOptions{})
		p := tg.rawLogin(t, initiator.Options{}, 0)
		u := untagged(wire.OpSendInvalidate, p.sendMSN,
			pduBytes(iser.Header{}, p.Request(pdu.NOPOut, pdu.FlagF, true), nil))
		copy(u[2:], unhex("12345678"))
		p.write(fpdu(u))
		p.wantTerminate(wire.ReasonNotInvalidated)
	})
}

// A peer's Terminate is in the log, in the RFC's bit order and in siw's.
func TestTerminateFromPeer(t *testing.T) {
	for name, head := range map[string]string{"RFC 5040": "11000000", "siw 1/2/02": "21020000",
		"RFC 5040 1/2/02": "12020000"} {
		t.Run("ISER-10.1.2.2-1 ISER-4.1-8 ISER-5.2.3.2-1 L32 "+name, func(t *testing.T) {
			tg := startTarget(t, targetOptions{})
			p := tg.rawLogin(t, initiator.Options{}, 0)
			p.writeCommand(0, 8)
			p.wantRead()
			p.write(fpdu(untagged(wire.OpTerminate, 1, unhex(head))))
			want := "DDP: invalid STag"
			if strings.Contains(name, "1/2/02") {
				want = "DDP: no buffer for this MSN"
			}
			tg.log.wantLine(`"session ended"`, "peer terminated the stream: "+want)
			tg.waitIdle(t)
		})
	}
}

// ISCSI-4.2.4-1, ISER-10.1.3.3-2: a connection that begins with another request than a login ends with a Terminate.
func TestRequestBeforeLogin(t *testing.T) {
	tg := startTarget(t, targetOptions{})
	p := tg.dial(t, initiator.Options{Target: targetName})
	p.send(iser.Header{}, p.Request(pdu.NOPOut, pdu.FlagF, true), nil)
	p.write(make([]byte, 4096)) // which the target has to read, or else a reset overtakes the Terminate
	p.wantTerminate(wire.ReasonOperation)
	tg.log.wantLine("login", `stage="before login"`, "outcome=refused", "NOP-Out before the end of login")
}

// A message that is no iSER message, or no PDU, ends its connection with a
// Terminate, and no other one.
func TestFormatErrors(t *testing.T) {
	tg := startTarget(t, targetOptions{})
	other := tg.login(t, initiator.Options{ISID: [6]byte{1}})
	nop := func(p *raw, change func(pdu.BHS), data int, behind int) []byte {
		h := p.Request(pdu.NOPOut, pdu.FlagF, true)
		h.SetTTT(pdu.ReservedTag)
		b := pduBytes(iser.Header{}, h, make([]byte, data))
		change(b[28:76])
		return append(b, make([]byte, behind)...)
	}
	asIs := func(pdu.BHS) {}
	for _, tt := range iservectors.FormatErrors {
		t.Run(tt.ID, func(t *testing.T) {
			p := tg.rawLogin(t, initiator.Options{}, 0)
			p.writeCommand(0, 8)
			p.wantRead() // which is never answered
			p.sendRaw(tt.Message(func(change func(pdu.BHS), data, behind int) []byte { return nop(p, change, data, behind) }))
			p.wantTerminate(wire.ReasonOperation)
			do(t, other, &initiator.Command{CDB: cdb.Read16(0, 1), In: make([]byte, 512)})
		})
	}
	t.Run("3.2 pads of 0 to 3 octets", func(t *testing.T) {
		p := tg.rawLogin(t, initiator.Options{})
		for pad := range 4 {
			p.sendRaw(nop(p, asIs, 5, min(pad, 3)))
			if m := p.want(pdu.NOPIn); len(m.data) != 5 {
				t.Errorf("% x", m.payload)
			}
		}
		p.logout()
	})
	t.Run("ISER-9.2-6 reserved bits", func(t *testing.T) {
		p := tg.rawLogin(t, initiator.Options{})
		b := nop(p, asIs, 0, 0)
		copy(b, unhex("13ffffff ffffffff ffffffffffffffff ffffffff ffffffffffffffff"))
		p.sendRaw(b)
		p.want(pdu.NOPIn)
		p.logout()
	})
	t.Run("ISER-6.2-2 ISER-6.4-2 data segment of 8193 octets", func(t *testing.T) {
		p := tg.rawLogin(t, initiator.Options{})
		p.sendRaw(nop(p, asIs, 8192, 0))
		if m := p.want(pdu.NOPIn); len(m.data) != 128 {
			t.Errorf("% x", m.payload)
		}
		p.sendRaw(nop(p, asIs, 8193, 0))
		p.wantTerminate(wire.ReasonOperation)
		testkit.Eventually(t, "the reason in the log",
			func() bool { return len(tg.log.Lines("data segment of 8193 bytes")) == 1 })
	})
	t.Run("ISER-10.1.2.1-1 ISER-10.1.2.1-2 longer than any PDU", func(t *testing.T) {
		p := tg.rawLogin(t, initiator.Options{})
		p.sendRaw(make([]byte, 76+256+8192+4))
		p.wantTerminate(wire.ReasonTooLong)
	})
	t.Run("ISER-4.1-6 ISER-3.2.1-1 the longest PDU", func(t *testing.T) {
		p := tg.rawLogin(t, initiator.Options{})
		h := p.Request(pdu.NOPOut, pdu.FlagF, true)
		h.SetTTT(pdu.ReservedTag)
		b := pduBytes(iser.Header{}, h, bytes.Repeat([]byte{7}, 8189))
		pdu.BHS(b[28:76]).SetTotalAHSLength(256)
		b = append(b[:76:76], append(make([]byte, 256), b[76:]...)...)
		p.sendRaw(append(b, 0, 0, 0))
		if m := p.want(pdu.NOPIn); !bytes.Equal(m.data, bytes.Repeat([]byte{7}, 128)) {
			t.Errorf("% x", m.payload)
		}
		p.logout()
	})
}

// ISER-8.1.1.1-2: each request has one answer, of its kind, and nothing else
// follows, for which the initiator would have no buffer. A Reject stands in before
// a task is active.
func TestOneAnswerEach(t *testing.T) {
	tg := startTarget(t, targetOptions{})
	p := tg.rawLogin(t, initiator.Options{}, 0)
	read, write := cdb.Read16(0, 8), cdb.Write16(0, 8)
	for _, tt := range []struct {
		name string
		send func() pdu.BHS
		want pdu.Opcode
	}{
		{"SCSI Command", func() pdu.BHS {
			h := p.scsi(0, 0, cdb.TestUnitReady)
			p.send(iser.Header{}, h,
				nil)
			return h
		}, pdu.SCSIResponse},
		{"READ", func() pdu.BHS { h := p.scsi(pdu.FlagR, 4096, read); p.send(sink(1, 0), h, nil); return h },
			pdu.SCSIResponse},
		{"WRITE", func() pdu.BHS {
			h := p.scsi(pdu.FlagW, 4096, write)
			p.send(source(1, 0), h, nil)
			p.answer(p.wantRead(), make([]byte, 4096))
			return h
		}, pdu.SCSIResponse},
		{"CHECK CONDITION", func() pdu.BHS {
			h := p.scsi(0, 0, [16]byte{0xff})
			p.send(iser.Header{}, h,
				nil)
			return h
		}, pdu.SCSIResponse},
		{"TMF", func() pdu.BHS { return p.tmf(pdu.AbortTask, 0, 0x1234, p.CmdSN) }, pdu.TaskMgmtResp},
		{"Text", func() pdu.BHS {
			h := p.Request(pdu.TextReq, pdu.FlagF, false)
			h.SetTTT(pdu.ReservedTag)
			p.send(iser.Header{}, h, []byte("SendTargets=\x00"))
			return h
		}, pdu.TextResp},
		{"ping", func() pdu.BHS {
			h := p.Request(pdu.NOPOut, pdu.FlagF, false)
			h.SetTTT(pdu.ReservedTag)
			p.send(iser.Header{}, h, []byte("data"))
			return h
		}, pdu.NOPIn},
		{"an opcode that is not supported", func() pdu.BHS {
			h := p.Request(0x1c, pdu.FlagF,
				true)
			p.send(iser.Header{}, h, nil)
			return h
		}, pdu.Reject},
		{"Logout", func() pdu.BHS {
			h := p.Request(pdu.LogoutReq, pdu.FlagF, true)
			p.send(iser.Header{}, h, nil)
			return h
		}, pdu.LogoutResp},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p.t = t
			h := tt.send()
			m := p.next()
			for m.op == wire.OpWrite {
				m = p.next()
			}
			if m.bhs == nil || m.bhs.Opcode() != tt.want || tt.want != pdu.Reject && m.bhs.ITT() != h.ITT() {
				t.Fatalf("%v % x", m.op, m.payload)
			}
			if tt.want != pdu.LogoutResp {
				p.ping() // is answered next
			}
		})
	}
	p.t = t
	p.nc.(*net.TCPConn).CloseWrite()
	p.wantEOF() // nothing after the Logout Response
}
