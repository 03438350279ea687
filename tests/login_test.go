package tests

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/iser"
	"github.com/iser-target/iser-target/rdma/wire"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// What ib_iser and libiscsi get for what they offer.
func TestLoginAnswers(t *testing.T) {
	tg := startTarget(t, targetOptions{})
	t.Run("ISER-5.1-1 ISER-5.1-3 ISER-5.1-7 ISER-6.3-5 ISER-6-1", func(t *testing.T) {
		s := tg.login(t, initiator.Options{})
		want := []keys.Pair{
			{Key: "RDMAExtensions", Value: "Yes"}, // decided first: section 6.3
			{Key: "DefaultTime2Wait", Value: "2"}, {Key: "DefaultTime2Retain", Value: "0"},
			{Key: "IFMarker", Value: "Reject"}, {Key: "OFMarker", Value: "Reject"}, // ISER-6.6-1
			{Key: "ErrorRecoveryLevel", Value: "0"}, // ISER-10.2-1
			{Key: "InitialR2T", Value: "Yes"},       // L14
			{Key: "ImmediateData", Value: "Yes"},
			{Key: "MaxBurstLength", Value: "1048576"}, {Key: "FirstBurstLength", Value: "65536"},
			{Key: "MaxOutstandingR2T", Value: "1"},
			{Key: "MaxConnections", Value: "1"},
			{Key: "DataPDUInOrder", Value: "Yes"}, {Key: "DataSequenceInOrder", Value: "Yes"},
			// ISER-6.4-1, ISER-6.5-1
			{Key: "InitiatorRecvDataSegmentLength", Value: "8192"}, {Key: "TargetRecvDataSegmentLength", Value: "8192"},
			{Key: "TargetPortalGroupTag", Value: "1"}, // L11: nothing else is volunteered
		}
		if !slices.Equal(s.Keys, want) {
			t.Errorf("answers %v\nwant %v", s.Keys, want)
		}
	})
	for _, tt := range []struct{ id, offer, want string }{
		{"ISER-5.1-10 ISER-6.1-1", "HeaderDigest=CRC32C,None", "None"},
		{"ISER-5.1-10 ISER-6.1-1", "DataDigest=CRC32C,None", "None"},
		{"ISER-6.2-1", "MaxRecvDataSegmentLength=512", ""},
		{"ISER-3.3-7 ISER-6.7-1 ISER-6.7-2", "MaxOutstandingUnexpectedPDUs=2", ""},
		{"ISER-3.3-7 ISER-6.8-1", "MaxAHSLength=0", ""},
		{"ISER-3.3-7 ISER-6.9-1", "TaggedBufferForSolicitedDataOnly=Yes", ""},
		{"ISER-3.3-7 ISER-6.10-1", "iSERHelloRequired=No", ""},
	} {
		t.Run(tt.id+" "+tt.offer, func(t *testing.T) {
			s := tg.login(t, initiator.Options{Keys: []string{tt.offer}, ISID: [6]byte{1}})
			key, _, _ := strings.Cut(tt.offer, "=")
			if got := s.Key(key); got != tt.want {
				t.Errorf("answer %q, want %q", got, tt.want)
			}
			do(t, s, &initiator.Command{CDB: cdb.Read16(0, 8), In: make([]byte, 4096)})
		})
	}
	t.Run("ISER-5.1-5 ISER-6.3-1 discovery", func(t *testing.T) {
		for _, offer := range [][]string{nil, {"RDMAExtensions=Yes"}} {
			p := tg.dial(t, initiator.Options{Keys: offer})
			text := p.login()
			if want := len(offer) > 0; strings.Contains(text, "RDMAExtensions=Irrelevant\x00") != want ||
				strings.Contains(text, "RDMAExtensions") != want {
				t.Errorf("%q answered by %q", offer, text)
			}
			p.nc.Close()
		}
	})
	t.Run("ISER-6.3-2 ISER-3.3-1 ISER-3.3-2 RDMAExtensions=No", func(t *testing.T) {
		// The connection carries iSER already (order B) and cannot go back.
		p := tg.dial(t, initiator.Options{Target: targetName})
		bhs, data := p.o.LoginRequest()
		data = []byte(strings.Replace(string(data), "RDMAExtensions=Yes", "RDMAExtensions=No", 1))
		p.send(iser.Header{}, bhs, data)
		m := p.want(pdu.LoginResp)
		if st := pdu.ParseLoginResponse(m.bhs).Status; st != pdu.LoginInitiatorError {
			t.Errorf("status %v", st)
		}
		p.nc.Close()
	})
}

// The MPA private data of both sides decide about Send with Invalidate.
func TestPrivateData(t *testing.T) {
	tg := startTarget(t, targetOptions{})
	for _, tt := range []struct {
		name  string
		o     initiator.Options
		flags byte
		op    wire.Opcode
	}{
		{"V-ISER-12 Linux", initiator.Options{}, 0x80, wire.OpSendInvalidate},
		{"V-ISER-12 libiscsi", initiator.Options{NoInvalidate: true}, 0xc0, wire.OpSend},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := tg.rawLogin(t, tt.o, 0)
			if got := p.reply.Private; len(got) != 4 || [4]byte(got) != [4]byte{tt.flags} || !p.reply.Enhanced ||
				p.reply.Rev != 2 {
				t.Errorf("L9: Reply %+v", p.reply)
			}
			if p.reply.Depths.IRD != 1 || p.reply.Depths.ORD != 32 {
				t.Errorf("ISER-5.1.2-4 ISER-5.1.2-5 ISER-5.1.1-2 ISER-5.1.1-5: %+v", p.reply.Depths)
			}
			block := cdb.Read16(0, 1)
			h := p.scsi(pdu.FlagR, 512, block)
			p.send(sink(7, p.o.BaseOffset), h, nil)
			if m := p.next(); m.op != wire.OpWrite {
				t.Fatalf("ISER-3.3-5 ISER-3.3-6 ISER-7.3.2-2 ISER-7.3.2-10 ISER-7.3.5-13: %v", m.op)
			}
			m := p.wantStatus(h, 0)
			if want := wire.STag(7); m.op != tt.op || m.op.Invalidates() && m.untag.Invalidate != want ||
				!m.op.Invalidates() && m.untag.Invalidate != 0 {
				t.Errorf("ISER-1.5.2-2 ISER-1.5.2-3 ISER-7.3.2-4: %v of %#x", m.op, m.untag.Invalidate)
			}
			h = p.scsi(0, 0, cdb.TestUnitReady)
			p.send(iser.Header{}, h, nil)
			if m := p.wantStatus(h, 0); m.op != wire.OpSend || m.untag.Invalidate != 0 {
				t.Errorf("ISER-7.3.2-3: %v of %#x", m.op, m.untag.Invalidate)
			}
			// STag 0, as ib_iser has it for memory that is not there.
			h = p.scsi(pdu.FlagW, 512, cdb.TestUnitReady)
			p.send(source(0, 0), h, nil)
			if m := p.wantStatus(h, 0); m.op != wire.OpSend {
				t.Errorf("L2: %v of STag 0", m.op)
			}
			p.logout()
		})
	}
}

// SendTargets over iSER, in discovery and in a normal session.
func TestDiscovery(t *testing.T) {
	for _, tt := range []struct {
		name      string
		advertise []string
	}{
		{name: "the address that was accepted"},
		{"the portal's list", []string{"192.0.2.10:3260", "[2001:db8::1]:3260"}},
	} {
		t.Run("ISER-5.1-6 ISER-7.3.8-1 "+tt.name, func(t *testing.T) {
			tg := startTarget(t, targetOptions{portal: iscsi.PortalConfig{Advertise: tt.advertise}})
			want := "TargetName=" + targetName + "\x00"
			addrs := tt.advertise
			if len(addrs) == 0 {
				addrs = []string{tg.addr}
			}
			for _, a := range addrs {
				want += "TargetAddress=" + a + ",1\x00"
			}
			for _, o := range []initiator.Options{{}, {Target: targetName, ISID: [6]byte{1}}} {
				p := tg.dial(t, o)
				p.login()
				offer := "SendTargets=All\x00"
				if p.full {
					offer = "SendTargets=\x00"
				}
				h := p.Request(pdu.TextReq, pdu.FlagF, false)
				h.SetTTT(pdu.ReservedTag)
				p.send(iser.Header{}, h, []byte(offer))
				// ISER-6.5-2, L4: in a normal session in parts of 128 bytes.
				var got []byte
				for {
					m := p.want(pdu.TextResp)
					got = append(got, m.data...)
					if m.bhs.Final() {
						break
					}
					ttt := m.bhs.TTT()
					h2 := p.Request(pdu.TextReq, pdu.FlagF, false)
					h2.SetITT(h.ITT())
					h2.SetTTT(ttt)
					p.send(iser.Header{}, h2, nil)
				}
				if string(got) != want {
					t.Errorf("%+v:\n%q, want\n%q", o, got, want)
				}
				p.nc.Close()
			}
		})
	}
}

// Every refusal has its status, ends the connection, and leaves one log line.
func TestRefusals(t *testing.T) {
	text := func(pairs ...string) []byte { return []byte(strings.Join(pairs, "\x00") + "\x00") }
	const name = "InitiatorName=iqn.2026-11.io.github.iser-target:initiator"
	for _, tt := range []struct {
		id     string
		text   []byte
		limits keys.Limits
		status pdu.LoginStatus
		log    []string
	}{
		{id: "ISER-10.1.4.6-2 no such target", text: text(name, "TargetName=iqn.2026-11.io.example:nothing"),
			status: pdu.LoginNotFound,
			log:    []string{"target=iqn.2026-11.io.example:nothing", "no such target"}},
		{id: "initiator is not admitted", text: text("InitiatorName=iqn.2026-11.io.example:stranger",
			"TargetName="+targetName), status: pdu.LoginAuthorization,
			log: []string{"initiator=iqn.2026-11.io.example:stranger", "target=" + targetName}},
		{id: "no InitiatorName", text: text("TargetName=" + targetName), status: pdu.LoginMissingParameter,
			log: []string{"InitiatorName: is missing"}},
		{id: "no TargetName", text: text(name), status: pdu.LoginMissingParameter,
			log: []string{"TargetName: is missing"}},
		{id: "ISER-6.7-1 1", text: text(name, "TargetName="+targetName, "MaxOutstandingUnexpectedPDUs=1"),
			status: pdu.LoginInitiatorError, log: []string{"MaxOutstandingUnexpectedPDUs"}},
		{id: "ISER-3.3-3 ISER-5.1.2-6 ISER-10.1.3.1-2 ISER-10.1.3.1-3 ISER-10.1.3.1-4 ISER-10.1.4.6-1",
			text:   text(name, "TargetName="+targetName, "TargetRecvDataSegmentLength=131072", "RDMAExtensions=Yes"),
			limits: keys.Limits{TargetRecvDataSegmentLength: 131072}, status: pdu.LoginOutOfResources,
			log: []string{"more than the limit of 65536"}},
	} {
		t.Run(tt.id, func(t *testing.T) {
			tg := startTarget(t, targetOptions{node: iscsi.Options{Limits: tt.limits,
				LogoutWait: 200 * time.Millisecond}})
			p := tg.dial(t, initiator.Options{Target: targetName})
			bhs, _ := p.o.LoginRequest()
			p.send(iser.Header{}, bhs, tt.text)
			m := p.want(pdu.LoginResp)
			if rsp := pdu.ParseLoginResponse(m.bhs); rsp.Status != tt.status || rsp.Transit {
				t.Errorf("%+v, want status %v", rsp, tt.status)
			}
			tg.log.wantLine("login", append(tt.log, "level=WARN", "outcome=refused", "stage=operational",
				"transport=iser",
				"remote="+p.nc.LocalAddr().String(), "local="+tg.addr, fmt.Sprintf("%#04x", uint16(tt.status)))...)
			p.wantEOF()
			tg.waitIdle(t)
			if st := tg.node.Stats(); st.LoginsRefused != 1 || st.LoginsAccepted != 0 {
				t.Errorf("%+v", st)
			}
		})
	}
	t.Run("accepted", func(t *testing.T) {
		tg := startTarget(t, targetOptions{})
		s := tg.login(t, initiator.Options{})
		tg.log.wantLine("login", "level=INFO", "outcome=accepted", "session=normal", "isid=00023d000001",
			"target="+targetName, fmt.Sprint("tsih=", s.TSIH))
		s.Close()
		tg.log.wantLine(`"session ended"`, "initiator closed the connection")
	})
	t.Run("ISER-10.1.1.1-1 nothing after MPA", func(t *testing.T) {
		tg := startTarget(t, targetOptions{})
		tg.dial(t, initiator.Options{}).nc.Close()
		tg.log.wantLine("login", "outcome=refused", `stage="before login"`, "initiator closed the connection")
		tg.waitIdle(t)
	})
	t.Run("ISER-10.1.1.1-2 lost during login", func(t *testing.T) {
		tg := startTarget(t, targetOptions{})
		p := tg.dial(t, initiator.Options{})
		bhs, _ := p.o.LoginRequest()
		bhs.SetFlags(pdu.FlagC | byte(pdu.LoginOperationalNegotiation)<<2)
		p.send(iser.Header{}, bhs, []byte("InitiatorName=iqn.2026-11.io.gi"))
		p.want(pdu.LoginResp)
		p.reset()
		tg.log.wantLine("login", "outcome=refused", "stage=operational", "connection failed")
		tg.waitIdle(t)
	})
	t.Run("initiator", func(t *testing.T) {
		tg := startTarget(t, targetOptions{})
		_, err := initiator.Login(testContext(t), tg.addr, initiator.Options{Target: "iqn.2026-11.io.example:nothing"})
		var le *initiator.LoginError
		if !errors.As(err, &le) || le.Status != pdu.LoginNotFound {
			t.Error(err)
		}
	})
}

// Nothing but login buffers is there before login has succeeded.
func TestNoBuffersBeforeLogin(t *testing.T) {
	t.Run("ISER-5.1.2-2 ISER-5.1.2-3 ISER-11-3 SEC-5042.6.4.2-2", func(t *testing.T) {
		tg := startTarget(t, targetOptions{})
		for range 50 {
			p := tg.dial(t, initiator.Options{Target: targetName})
			req := pdu.LoginRequest{CSG: pdu.SecurityNegotiation}
			p.send(iser.Header{}, req.Append(nil),
				[]byte("InitiatorName=iqn.2026-11.io.github.x\x00TargetName="+targetName+"\x00AuthMethod=None\x00"))
			p.want(pdu.LoginResp)
			defer p.nc.Close()
		}
		if st := tg.node.Stats(); st.Connections != 50 || st.BuffersOut != 0 || st.BufferOctets != 0 ||
			st.Sessions != 0 {
			t.Errorf("%+v", st)
		}
	})
}

func hello(maxVer, minVer byte, ird uint16) []byte {
	b := make([]byte, iser.HeaderLen)
	iser.Hello{MaxVer: maxVer, MinVer: minVer, IRD: ird}.Put(b)
	return b
}

// wantHelloReply takes a HelloReply with exactly these bytes in front.
func (p *raw) wantHelloReply(head string) {
	p.t.Helper()
	want := append(unhex(head), make([]byte, 24)...)
	if m := p.next(); string(m.payload) != string(want) || m.op != wire.OpSend {
		p.t.Fatalf("ISER-9.4-1 ISER-9.4-2 ISER-9.4-3 ISER-9.4-4: %v % x, want % x", m.op, m.payload, want)
	}
}

func TestHello(t *testing.T) {
	tg := startTarget(t, targetOptions{})
	t.Run("ISER-5.1.3-3 ISER-5.1.3-9 ISER-5.1.2-9 ISER-6.7-3 before login", func(t *testing.T) {
		p := tg.dial(t, initiator.Options{Target: targetName})
		p.sendRaw(hello(10, 10, 128))
		p.wantHelloReply("30aa0020")
		p.login()
		p.ping()
		p.logout()
	})
	t.Run("ISER-6.10-2 ISER-5.1.3-4 iSERHelloRequired=Yes", func(t *testing.T) {
		p := tg.rawLogin(t, initiator.Options{Keys: []string{"iSERHelloRequired=Yes"}})
		p.sendRaw(hello(10, 1, 4))
		p.wantHelloReply("30aa0004")
		p.ping()
		p.logout()
	})
	t.Run("ISER-5.1.2-10 ISER-10.1.3.4-2 iSERHelloRequired=No", func(t *testing.T) {
		p := tg.rawLogin(t, initiator.Options{Keys: []string{"iSERHelloRequired=No"}})
		p.sendRaw(hello(10, 10, 4))
		p.wantTerminate(wire.ReasonOperation)
	})
	t.Run("ISER-5.1.3-1 ISER-10.1.3.4-1 none where it is required", func(t *testing.T) {
		p := tg.rawLogin(t, initiator.Options{Keys: []string{"iSERHelloRequired=Yes"}})
		h := p.Request(pdu.NOPOut, pdu.FlagF, true)
		p.send(iser.Header{}, h, nil)
		p.wantTerminate(wire.ReasonOperation)
	})
	t.Run("twice", func(t *testing.T) {
		p := tg.rawLogin(t, initiator.Options{})
		p.sendRaw(hello(10, 10, 4))
		p.wantHelloReply("30aa0004")
		p.sendRaw(hello(10, 10, 4))
		p.wantTerminate(wire.ReasonOperation)
	})
	t.Run("ISER-5.1.3-7 ISER-10.1.3.2-1 ISER-10.1.3.2-2 no common version", func(t *testing.T) {
		p := tg.dial(t, initiator.Options{Target: targetName})
		p.sendRaw(hello(11, 11, 4))
		p.wantHelloReply("31aa0004")
		p.wantTerminate(wire.ReasonOperation)
	})
	// An initiator that accepts no RDMA Reads can write what comes with the command.
	for id, start := range map[string]func(t *testing.T) *raw{
		"ISER-5.1.1-3 ISER-7.3.6-4 iSER-IRD 0": func(t *testing.T) *raw {
			p := tg.rawLogin(t, initiator.Options{})
			p.sendRaw(hello(10, 10, 0))
			p.wantHelloReply("30aa0000")
			return p
		},
		"ISER-5.1.1-2 ISER-5.1.1-3 IRD 0 in the MPA Request": func(t *testing.T) *raw {
			p := tg.dialStream(t, initiator.Options{Target: targetName})
			p.startMPAAs(wire.Startup{Rev: 2, CRC: true, Enhanced: true})
			if p.reply.Depths.ORD != 0 {
				t.Errorf("Reply %+v", p.reply)
			}
			p.login()
			return p
		},
	} {
		t.Run(id, func(t *testing.T) {
			p := start(t)
			h := p.scsi(0, 0, cdb.TestUnitReady)
			p.send(iser.Header{}, h, nil)
			p.wantStatus(h, 0x02) // unit attention
			h = p.scsi(pdu.FlagW, 512, cdb.Write16(0, 1))
			data := random(512)
			p.send(iser.Header{}, h, data)
			p.wantStatus(h, 0)
			if got := tg.stored(t, 0, 512); string(got) != string(data) {
				t.Error("ISER-1.5.1-1: what came with the command is not stored")
			}
			before := len(tg.log.Lines("accepts no RDMA Reads"))
			p.writeCommand(8, 8)
			p.wantEnd()
			testkit.Eventually(t, "the reason in the log",
				func() bool { return len(tg.log.Lines("accepts no RDMA Reads")) == before+1 })
		})
	}
	t.Run("ISER-6.10-3 ISER-5.1.1-8 no HelloReply unasked", func(t *testing.T) {
		p := tg.rawLogin(t, initiator.Options{})
		p.ping()
		p.logout()
	})
}
