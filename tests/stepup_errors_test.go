package tests

import (
	"bytes"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/iser"
	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/rdma/wire"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
	"github.com/iser-target/iser-target/tests/testkit/header"
)

// What does not belong where it comes ends the connection, with a reason in the
// log, and leaves nothing behind.
func TestStepUpWrongSequence(t *testing.T) {
	none := func(p *raw) {}
	terminate := func(p *raw) { p.wantTerminate(wire.ReasonOperation) }
	send := func(b []byte) func(*raw) { return func(p *raw) { p.write(b) } }
	message := func(b []byte) func(*raw) { return func(p *raw) { p.startMPA(); p.sendRaw(b) } }
	ping := func() []byte {
		p := &raw{o: initiator.Options{}.Complete(), Numbers: header.Numbers{CmdSN: 1}}
		h := p.Request(pdu.NOPOut, pdu.FlagF, true)
		h.SetTTT(pdu.ReservedTag)
		return pduBytes(iser.Header{}, h, nil)
	}()
	startup := func(f wire.Startup) []byte {
		b, err := f.Append(nil)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	const key = "MPA ID Req Frame"
	for _, tt := range []struct {
		id   string
		keys []string
		do   func(p *raw) // after the final Login Response
		end  func(p *raw)
		line string // "login", or the end of the session
		log  []string
	}{
		// Until MPA has started the attempt counts as a login that failed.
		{"an FPDU instead of the MPA Request", nil, send(fpdu(untagged(wire.OpSend, 1, ping))), none, "login",
			[]string{"stage=mpa", "key"}},
		{"a PDU on the byte stream", nil, send(ping[iser.HeaderLen:]), none, "login", []string{"stage=mpa", "key"}},
		{"another Login Request", nil, func(p *raw) { p.write(streamPDU(p.o.LoginRequest())) }, none, "login",
			[]string{"stage=mpa", "key"}},
		{"MPA-7.1.2-20 the Reply", nil, send(startup(wire.Startup{Reply: true, Rev: 2, CRC: true, Enhanced: true})),
			none, "login", []string{"stage=mpa", "Reply"}},
		{"MPA revision 3", nil, send(append([]byte(key), 0x50, 3, 0, 4, 0, 1, 0, 1)), none, "login",
			[]string{"stage=mpa", "revision 3"}},
		{"too much private data", nil, send(append([]byte(key), 0x50, 2, 2, 1)), none, "login",
			[]string{"stage=mpa", "513"}},
		{"ISER-10.1.1.1-2 closed before the MPA Request", nil, func(p *raw) { p.nc.(*net.TCPConn).CloseWrite() },
			none, "login", []string{"stage=mpa", "after 0 bytes of an MPA startup frame"}},
		{"ISER-10.1.1.1-2 closed within the MPA Request", nil,
			func(p *raw) { p.write([]byte(key)[:7]); p.nc.(*net.TCPConn).CloseWrite() }, none, "login",
			[]string{"stage=mpa", "after 7 bytes"}},
		{"ISER-10.1.1.1-2 reset", nil, func(p *raw) { p.write([]byte(key)[:7]); p.reset() }, nil, "login",
			[]string{"stage=mpa", "reset"}},
		// From then on it is a session.
		{"closed after the MPA Request", nil, func(p *raw) { p.startMPA(); p.nc.(*net.TCPConn).CloseWrite() }, none,
			`"session ended"`, []string{"initiator closed the connection"}},
		{"closed within the first FPDU", nil,
			func(p *raw) { p.startMPA(); p.write([]byte{0}); p.nc.(*net.TCPConn).CloseWrite() }, none,
			`"session ended"`, []string{"connection failed"}},
		{"ISER-5.1.3-1 ISER-10.1.3.4-1 no Hello", []string{"iSERHelloRequired=Yes"}, message(ping), terminate,
			`"session ended"`, []string{"no iSER Hello came"}},
		{"ISER-5.1.2-10 a Hello in spite of No", []string{"iSERHelloRequired=No"}, message(hello(10, 10, 4)),
			terminate, `"session ended"`, []string{"iSERHelloRequired=No"}},
		{"Hello is not the first message", nil,
			func(p *raw) { p.startMPA(); p.sendRaw(ping); p.want(pdu.NOPIn); p.sendRaw(hello(10, 10, 4)) }, terminate,
			`"session ended"`, []string{"not the first message"}},
		{"Hello twice", []string{"iSERHelloRequired=Yes"}, func(p *raw) {
			p.startMPA()
			p.sendRaw(hello(10, 10, 4))
			p.wantHelloReply("30aa0004")
			p.sendRaw(hello(10, 10, 4))
		}, terminate, `"session ended"`, []string{"not the first message"}},
		{"ISER-5.1.3-7 ISER-10.1.3.2-1 no common version", []string{"iSERHelloRequired=Yes"},
			func(p *raw) { p.startMPA(); p.sendRaw(hello(11, 11, 4)); p.wantHelloReply("31aa0004") }, terminate,
			`"session ended"`, []string{"versions 11..11"}},
		{"ISER-9.3-1 a long Hello", []string{"iSERHelloRequired=Yes"}, message(append(hello(10, 10, 4), 0)),
			terminate, `"session ended"`, []string{"Hello of 29 bytes"}},
		{"a HelloReply", nil, message(append([]byte{0x30, 0xaa}, make([]byte, 26)...)), terminate, `"session ended"`,
			[]string{"opcode 3"}},
	} {
		t.Run(tt.id, func(t *testing.T) {
			tg := startTarget(t, targetOptions{stream: loginFirst})
			p := tg.dialStream(t, initiator.Options{Target: targetName, Keys: tt.keys})
			p.streamLogin()
			p.ExpStatSN = 1
			tt.do(p)
			if tt.end != nil {
				tt.end(p)
				p.nc.SetDeadline(time.Now().Add(testkit.Patience))
				io.Copy(io.Discard, p.nc) // ends: the target closes
			}
			if tt.line == "login" {
				tg.log.wantLine("login", append(tt.log, "outcome=refused", "transport=tcp")...)
			} else {
				tg.log.wantLine("login", "outcome=accepted", "transport=iser")
				tg.log.wantLine(tt.line, append(tt.log, "transport=iser")...)
			}
			tg.waitIdle(t)
			if st, refused := tg.node.Stats(), uint64(strings.Count(tt.line, "login")); st.LoginsRefused != refused ||
				st.LoginsAccepted != 1-refused {
				t.Errorf("%+v", st)
			}
		})
	}
}

// ISER-5.1.3-9, ISER-10.1.3.4-2: a Hello is answered although iSERHelloRequired was not agreed.
func TestHelloWithoutAgreementIsAnswered(t *testing.T) {
	tg := startTarget(t, targetOptions{stream: loginFirst})
	p := tg.stepUp(t, initiator.Options{})
	p.sendRaw(hello(10, 10, 4))
	p.wantHelloReply("30aa0004")
	p.ping()
	p.logout()
}

// ISCSI-8.1.4-2: LoginTimeout is for all of it, MPA startup included, and is over when
// login is.
func TestStepUpTimeout(t *testing.T) {
	const timeout, pause = 4 * time.Second, 2 * time.Second // a busy machine may be 2 s late
	cases := []struct {
		sent  int
		octet string
	}{
		{0, "after 0 bytes"},
		{10, "after 10 bytes"},                     // half a frame
		{20, "after 0 of 8 bytes of private data"}, // none of it
	}
	tg := startTarget(t, targetOptions{stream: loginFirst, node: iscsi.Options{LoginTimeout: timeout}})
	stays := tg.stepUp(t, initiator.Options{ISID: [6]byte{9}})
	begin := time.Now()
	var conns []*raw
	for i := range cases {
		conns = append(conns, tg.dialStream(t, initiator.Options{Target: targetName, ISID: [6]byte{byte(i + 1)}}))
	}
	time.Sleep(pause) // which MPA startup does not get back
	for i, p := range conns {
		p.streamLogin()
		p.write(p.mpaRequest()[:cases[i].sent])
	}
	for i, p := range conns {
		p.wantEnd()
		if d := time.Since(begin); d < timeout {
			t.Errorf("%d bytes: ended after %v", cases[i].sent, d)
		}
	}
	took := time.Since(begin)
	for _, c := range cases {
		testkit.Eventually(t, "the end in the log", func() bool { return len(tg.log.Lines(c.octet)) == 1 })
		for _, part := range []string{"msg=login ", "stage=mpa ", "i/o timeout"} {
			if line := tg.log.Lines(c.octet)[0]; !strings.Contains(line, part) {
				t.Errorf("no %q in the line\n%s", part, line)
			}
		}
	}
	stays.ping()
	stays.logout()
	tg.waitIdle(t)
	if took >= timeout+pause {
		t.Errorf("ended after %v: MPA startup has had %v of its own", took, timeout)
	}
}

// Another connection of a session uses iSER, without being asked, or none.
func TestStepUpOfAnotherConnection(t *testing.T) {
	tg := startTarget(t, targetOptions{stream: loginFirst,
		node: iscsi.Options{Limits: keys.Limits{MaxConnections: 2, Digests: true}}})
	lead := func(t *testing.T, key string) (p *raw, join func(offers ...string) (*raw, pdu.LoginResponse, string)) {
		p = tg.dialStream(t, initiator.Options{Target: targetName})
		req := pdu.LoginRequest{Transit: true, CSG: pdu.LoginOperationalNegotiation, NSG: pdu.FullFeaturePhase,
			ISID: p.o.ISID, CmdSN: 1}
		text := "InitiatorName=" + p.o.Name + "\x00TargetName=" + targetName + "\x00"
		p.write(streamPDU(req.Append(nil), []byte(text+key+"MaxConnections=2\x00")))
		bhs, _ := p.wantStream(pdu.LoginResp)
		rsp := pdu.ParseLoginResponse(bhs)
		p.CmdSN, p.ExpStatSN, p.full = 1, 1, true
		return p, func(offers ...string) (*raw, pdu.LoginResponse, string) {
			q := tg.dialStream(t, initiator.Options{})
			req.TSIH, req.CID = rsp.TSIH, 1
			q.write(streamPDU(req.Append(nil), []byte(text+strings.Join(offers, ""))))
			bhs, answers := q.wantStream(pdu.LoginResp)
			q.CmdSN, q.ExpStatSN, q.full = 1, 1, true
			return q, pdu.ParseLoginResponse(bhs), string(answers)
		}
	}
	t.Run("ISER-5.1-8 ISER-5.1-10 iSER", func(t *testing.T) {
		p, join := lead(t, "RDMAExtensions=Yes\x00")
		p.startMPA()
		h := p.scsi(0, 0, cdb.TestUnitReady)
		p.send(iser.Header{}, h, nil)
		p.wantStatus(h, 0x02) // unit attention
		q, rsp, answers := join("HeaderDigest=CRC32C,None\x00")
		if rsp.Status != 0 || answers != "HeaderDigest=None\x00TargetPortalGroupTag=1\x00" {
			t.Fatalf("%+v, %q", rsp, answers)
		}
		q.startMPA()
		q.CmdSN = p.CmdSN
		block := cdb.Write16(0, 1)
		data := random(512)
		h = q.scsi(pdu.FlagW, 512, block)
		q.send(source(9, q.o.BaseOffset), h, nil)
		q.answer(q.wantRead(), data)
		q.wantStatus(h, 0)
		p.CmdSN = q.CmdSN
		p.ping()
		if !bytes.Equal(tg.stored(t, 0, 512), data) {
			t.Error("other bytes are stored")
		}
		if got := tg.log.Lines("msg=login transport=iser"); len(got) != 2 {
			t.Errorf("%q", got)
		}
		p.logout()
		tg.waitIdle(t)
	})
	t.Run("ISER-5.1-9 plain", func(t *testing.T) {
		p, join := lead(t, "")
		q, rsp, _ := join("RDMAExtensions=Yes\x00")
		if rsp.Status != pdu.LoginInitiatorError {
			t.Errorf("%+v", rsp)
		}
		q.wantEOF()
		q.nc.Close()
		q, rsp, _ = join()
		if rsp.Status != 0 {
			t.Errorf("%+v", rsp)
		}
		p.nc.Close()
		q.nc.Close()
		tg.waitIdle(t)
	})
}

// The lengths that login on the byte stream has agreed on are in force in RDMA
// mode.
func TestStepUpLengths(t *testing.T) {
	tg := startTarget(t, targetOptions{stream: loginFirst})
	p := tg.dialStream(t, initiator.Options{Target: targetName})
	bhs, text := p.o.LoginRequest()
	text = bytes.Replace(text, []byte("TargetRecvDataSegmentLength=8192"),
		[]byte("TargetRecvDataSegmentLength=512\x00MaxRecvDataSegmentLength=16384"), 1)
	p.write(streamPDU(bhs, text))
	if text := p.streamLoggedIn(); !strings.Contains(text, "TargetRecvDataSegmentLength=512\x00") ||
		strings.Contains(text, "\x00MaxRecvDataSegmentLength") {
		t.Errorf("ISER-6.2-1: %q", text)
	}
	p.startMPA()
	for _, octets := range []int{512, 513} {
		h := p.Request(pdu.NOPOut, pdu.FlagF, true)
		h.SetTTT(pdu.ReservedTag)
		p.send(iser.Header{}, h, make([]byte, octets))
		if octets == 512 {
			p.want(pdu.NOPIn)
		} else {
			p.wantEnd() // ISER-6.2-2, ISER-6.4-2
		}
	}
	tg.log.wantLine(`"session ended"`, "data segment of 513 bytes, but the limit is 512")
}

// What does not succeed is refused on the byte stream.
func TestStepUpRefusals(t *testing.T) {
	for _, tt := range []struct {
		id     string
		o      initiator.Options
		limits keys.Limits
		status pdu.LoginStatus
		log    string
	}{
		{"ISER-10.1.4.6-2 no such target", initiator.Options{Target: "iqn.2026-11.io.example:nothing"}, keys.Limits{},
			pdu.LoginNotFound, "no such target"},
		{"ISER-5.1.2-1 ISER-5.1.2-7 ISER-3.3-3 ISER-10.1.3.1-2 ISER-10.1.3.1-3 ISER-10.1.3.1-4 no resources",
			initiator.Options{Target: targetName, Keys: []string{"MaxAHSLength=0"}},
			keys.Limits{TargetRecvDataSegmentLength: 131072}, pdu.LoginOutOfResources, "more than the limit of 65536"},
	} {
		t.Run(tt.id, func(t *testing.T) {
			tg := startTarget(t, targetOptions{stream: loginFirst, node: iscsi.Options{Limits: tt.limits}})
			p := tg.dialStream(t, tt.o)
			bhs, text := p.o.LoginRequest()
			p.write(streamPDU(bhs, bytes.Replace(text, []byte("TargetRecvDataSegmentLength=8192"),
				[]byte("TargetRecvDataSegmentLength=131072"), 1)))
			rsp, _ := p.wantStream(pdu.LoginResp)
			if got := pdu.ParseLoginResponse(rsp); got.Status != tt.status || got.Transit {
				t.Errorf("%+v", got)
			}
			p.wantEOF()
			p.nc.Close()
			tg.log.wantLine("login", "transport=tcp", "outcome=refused", "stage=operational", tt.log)
			tg.waitIdle(t)
		})
	}
}

// A connection that waits for the MPA Request can be ended by others.
func TestStepUpInterrupted(t *testing.T) {
	t.Run("session reinstatement", func(t *testing.T) {
		tg := startTarget(t, targetOptions{stream: loginFirst})
		p := tg.dialStream(t, initiator.Options{Target: targetName})
		p.streamLogin()
		q := tg.stepUp(t, initiator.Options{})
		p.wantEnd()
		testkit.Eventually(t, "the log", func() bool { return len(tg.log.Lines("replaced by a new login")) == 1 })
		h := q.scsi(0, 0, cdb.TestUnitReady)
		q.send(iser.Header{}, h, nil)
		q.wantStatus(h, 0x02)
		q.logout()
		if got := tg.log.Lines("outcome=refused"); len(got) != 1 || !strings.Contains(got[0], "stage=mpa") {
			t.Errorf("%q", got)
		}
	})
	t.Run("shutdown", func(t *testing.T) {
		tg := startTarget(t, targetOptions{stream: loginFirst})
		p := tg.dialStream(t, initiator.Options{Target: targetName})
		p.streamLogin()
		if err := tg.node.Shutdown(testContext(t)); err != nil {
			t.Fatal(err)
		}
		p.wantEnd()
		tg.log.wantLine("login", "outcome=refused", "stage=mpa", "target shuts down")
	})
	t.Run("many logins of one initiator port at once", func(t *testing.T) {
		tg := startTarget(t, targetOptions{stream: loginFirst})
		done := make(chan struct{})
		const n = 8
		for range n {
			go func() {
				defer func() { done <- struct{}{} }()
				for range 10 {
					s, err := initiator.Login(testContext(t), tg.addr,
						initiator.Options{Target: targetName, Stream: true})
					if err == nil { // replaced by another one at any time
						s.Do(&initiator.Command{CDB: cdb.Read16(0, 1), In: make([]byte, 512)})
						s.Close()
						<-s.Done()
					}
				}
			}()
		}
		for range n {
			<-done
		}
		tg.waitIdle(t)
		s := tg.login(t, initiator.Options{Stream: true})
		do(t, s, &initiator.Command{CDB: cdb.Read16(0, 1), In: make([]byte, 512)})
	})
}

// FuzzStepUp sends arbitrary bytes after a login on the byte stream: where the
// MPA Request is due, and behind it. The connection ends soon after the initiator
// has closed its side, and nothing is left of it.
func FuzzStepUp(f *testing.F) {
	tg := startTarget(f, targetOptions{quiet: true, stream: loginFirst,
		node: iscsi.Options{QueueDepth: 16, LogoutWait: time.Second, ConnectionMemory: 1 << 20,
			MaxTransferPiece: 64 << 10}})
	p := &raw{t: f, o: initiator.Options{}.Complete(), Numbers: header.Numbers{CmdSN: 1}, sendMSN: 1}
	request := p.mpaRequest()
	nop := p.Request(pdu.NOPOut, pdu.FlagF, true)
	nop.SetTTT(pdu.ReservedTag)
	block := cdb.Read16(0, 8)
	greet := p.message(hello(10, 10, 4))
	ping := p.message(pduBytes(iser.Header{}, nop, nil))
	read := p.message(pduBytes(sink(1, 1<<63), p.scsi(pdu.FlagR, 4096, block), nil))
	f.Add(false, request, greet)
	f.Add(true, slices.Concat(request, greet, ping, read), []byte{})
	f.Add(false, []byte{}, request)
	f.Add(true, request[:7], request[7:])
	f.Add(true, ping, request)
	f.Add(false, streamPDU(nop, nil), []byte{})
	f.Add(false, slices.Concat(request[:18], []byte{2, 1}), []byte{})
	f.Add(true, slices.Concat([]byte("MPA ID Rep Frame"), request[16:]), greet)
	settled := rdma.ReadStats()

	f.Fuzz(func(t *testing.T, hello bool, ahead, behind []byte) {
		var o initiator.Options
		o.Target = targetName
		if hello {
			o.Keys = []string{"iSERHelloRequired=Yes"}
		}
		p := tg.dialStream(t, o)
		p.write(slices.Concat(streamPDU(p.o.LoginRequest()), ahead[:min(len(ahead), 64<<10)]))
		p.streamLoggedIn()
		p.nc.Write(behind[:min(len(behind), 64<<10)]) // the target may have ended it
		p.nc.(*net.TCPConn).CloseWrite()
		if _, err := io.Copy(io.Discard, p.nc); isTimeout(err) {
			t.Fatal("the connection does not end")
		}
		p.nc.Close()
		testkit.Eventually(t, "the end of the session", func() bool { return tg.idle() && rdma.ReadStats() == settled })
	})
}
