package initiator

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/iser"
	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/rdma/wire"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// A script is a target that does what a test says.
type script struct {
	t       *testing.T
	ctx     context.Context
	nc      net.Conn
	rc      *rdma.Conn
	request *rdma.Request
	opcodes []pdu.Opcode // of all PDUs in the full feature phase
	statSN  uint32
	login   chan outcome
}

type outcome struct {
	s   *Session
	err error
}

// start makes an initiator log in to a script.
func start(t *testing.T, o Options) *script {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	tg := &script{t: t, ctx: ctx, login: make(chan outcome, 1)}
	o.Target = "iqn.2026-11.io.example:script"
	go func() {
		s, err := Login(ctx, l.Addr().String(), o)
		tg.login <- outcome{s, err}
	}()
	if tg.nc, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	tg.nc.SetDeadline(time.Now().Add(testkit.Patience))
	t.Cleanup(func() {
		cancel()
		tg.nc.Close()
		if tg.rc != nil {
			tg.rc.Close()
		}
	})
	return tg
}

// session returns the result of the login.
func (tg *script) session() (*Session, error) {
	o := <-tg.login
	if o.s != nil {
		tg.t.Cleanup(func() { o.s.Close(); <-o.s.Done() })
	}
	return o.s, o.err
}

// silence sees nothing of the initiator for a while.
func (tg *script) silence(when string) {
	tg.t.Helper()
	tg.nc.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	var b [1]byte
	if n, err := tg.nc.Read(b[:]); n != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		tg.t.Fatalf("%s: % x, %v", when, b[:n], err)
	}
	tg.nc.SetReadDeadline(time.Now().Add(testkit.Patience))
}

// end sees the end of the stream, and nothing before it.
func (tg *script) end() {
	tg.t.Helper()
	if b, err := io.ReadAll(tg.nc); len(b) > 0 || err != nil {
		tg.t.Fatalf("% x, %v where the stream should end", b, err)
	}
}

// streamLogin takes the Login Request from the byte stream.
func (tg *script) streamLogin() (text string) {
	tg.t.Helper()
	bhs := make(pdu.BHS, pdu.BHSLen)
	if _, err := io.ReadFull(tg.nc, bhs); err != nil {
		tg.t.Fatal(err)
	}
	data := make([]byte, pdu.Padded(bhs.DataSegmentLength()))
	if _, err := io.ReadFull(tg.nc, data); err != nil || bhs.Opcode() != pdu.LoginReq {
		tg.t.Fatalf("%v, %v", bhs.Opcode(), err)
	}
	return string(data[:bhs.DataSegmentLength()])
}

// response returns a final Login Response, or a refusal.
func (tg *script) response(status pdu.LoginStatus, keys ...string) []byte {
	text := strings.Join(keys, "\x00") + "\x00"
	rsp := pdu.LoginResponse{Status: status, ISID: Options{}.Complete().ISID, TSIH: 1, ExpCmdSN: 1, MaxCmdSN: 64,
		DataSegmentLength: len(text)}
	if status == 0 {
		rsp.Transit, rsp.CSG, rsp.NSG = true, pdu.LoginOperationalNegotiation, pdu.FullFeaturePhase
	}
	b := make([]byte, pdu.BHSLen)
	rsp.Put(b)
	tg.statSN = 1
	return append(b, text+strings.Repeat("\x00", pdu.Padded(len(text))-len(text))...)
}

func (tg *script) write(b []byte) {
	tg.t.Helper()
	if _, err := tg.nc.Write(b); err != nil {
		tg.t.Fatal(err)
	}
}

// startMPA answers the MPA Request.
func (tg *script) startMPA() {
	tg.t.Helper()
	rc, err := rdma.Respond(tg.ctx, tg.nc, rdma.Options{}, func(r *rdma.Request) rdma.Answer {
		tg.request = r
		return rdma.Answer{Private: []byte{0x80, 0, 0, 0}}
	})
	if err != nil {
		tg.t.Fatal(err)
	}
	tg.rc = rc
	rc.SetReceiveDeadline(time.Now().Add(testkit.Patience))
}

// full logs in on the byte stream, up to the full feature phase.
func full(t *testing.T, o Options, keys ...string) (*script, *Session) {
	t.Helper()
	o.Stream = true
	tg := start(t, o)
	tg.streamLogin()
	tg.write(tg.response(0, append(keys, "RDMAExtensions=Yes")...))
	tg.startMPA()
	s, err := tg.session()
	if err != nil {
		t.Fatal(err)
	}
	return tg, s
}

// next takes the next Send.
func (tg *script) next() []byte {
	tg.t.Helper()
	var ev rdma.Event
	for {
		if err := tg.rc.Receive(&ev); err != nil {
			tg.t.Fatal(err)
		}
		if ev.Read == nil {
			return bytes.Clone(ev.Data)
		}
	}
}

// want takes a PDU.
func (tg *script) want(op pdu.Opcode) (h iser.Header, bhs pdu.BHS, data []byte) {
	tg.t.Helper()
	b := tg.next()
	h, hello, err := iser.ParseHeader(b)
	if err != nil || hello || len(b) < headLen {
		tg.t.Fatalf("% x: %v", b, err)
	}
	bhs = b[iser.HeaderLen:headLen]
	tg.opcodes = append(tg.opcodes, bhs.Opcode())
	if bhs.Opcode() != op {
		tg.t.Fatalf("%v where %v is due", bhs.Opcode(), op)
	}
	return h, bhs, b[headLen:]
}

// post runs a work request.
func (tg *script) post(wr rdma.WorkRequest) {
	tg.t.Helper()
	if err := tg.rc.Post(&wr); err != nil {
		tg.t.Fatal(err)
	}
	tg.rc.Flush()
}

// answer sends a PDU that answers the request with that tag.
func (tg *script) answer(op pdu.Opcode, itt uint32, stag rdma.STag, data ...byte) {
	tg.t.Helper()
	head := make([]byte, headLen)
	iser.Header{}.Put(head)
	bhs := pdu.BHS(head[iser.HeaderLen:])
	bhs.Reset(op, pdu.FlagF)
	bhs.SetITT(itt)
	if op == pdu.NOPIn {
		bhs.SetTTT(pdu.ReservedTag)
	}
	bhs.SetStatSN(tg.statSN)
	bhs.SetExpCmdSN(1)
	bhs.SetMaxCmdSN(64)
	bhs.SetDataSegmentLength(len(data))
	tg.statSN++
	wr := rdma.WorkRequest{Op: rdma.Send, Head: head, Data: data}
	if stag != 0 {
		wr.Op, wr.STag = rdma.SendInvalidate, stag
	}
	tg.post(wr)
}

// refused sees the initiator refuse an RDMA operation on memory that is not
// advertised any longer.
func (tg *script) refused(stag rdma.STag, base uint64) {
	tg.t.Helper()
	tg.post(rdma.WorkRequest{Op: rdma.Write, STag: stag, TO: base, Data: []byte{0x5a}})
	var ev rdma.Event
	var err error
	for err == nil {
		err = tg.rc.Receive(&ev)
	}
	var se *rdma.StreamError
	if !errors.As(err, &se) || !se.Remote || se.Reason != (wire.Reason{Layer: wire.LayerDDP, EType: 1, Code: 0}) {
		tg.t.Errorf("a Write to STag %#x after the end: %v", stag, err)
	}
}

// RDMA mode begins when login has succeeded, and not before (RFC 7145, section
// 5.1.1); then Hello comes first, or does not come.
func TestStreamLogin(t *testing.T) {
	for _, hello := range []bool{false, true} {
		t.Run(fmt.Sprint("ISER-5.1.1-7 ISER-5.1.1-8 ISER-5.1.3-2 Hello: ", hello), func(t *testing.T) {
			tg := start(t, Options{Stream: true, Hello: hello, RDMA: rdma.Options{IRD: 7}})
			if text := tg.streamLogin(); strings.Contains(text, "iSERHelloRequired=Yes\x00") != hello ||
				!strings.Contains(text, "RDMAExtensions=Yes\x00") {
				t.Errorf("%q", text)
			}
			tg.silence("before the final Login Response")
			tg.write(tg.response(0, "RDMAExtensions=Yes"))
			tg.startMPA()
			if tg.request.Depths.IRD != 7 {
				t.Errorf("ISER-5.1.1-2: %+v", tg.request)
			}
			if hello {
				want := append([]byte{0x20, 0xaa, 0, 7}, make([]byte, 24)...)
				if b := tg.next(); !bytes.Equal(b, want) {
					t.Errorf("ISER-5.1.1-4 ISER-9.3-2 ISER-9.3-3: % x", b)
				}
				tg.post(rdma.WorkRequest{Op: rdma.Send, Head: append([]byte{0x30, 0xaa, 0, 3}, make([]byte, 24)...)})
			}
			s, err := tg.session()
			if err != nil {
				t.Fatal(err)
			}
			if hello && s.ORD != 3 {
				t.Errorf("iSER-ORD %d", s.ORD)
			}
			if err := s.Start(&Command{}); err != nil {
				t.Fatal(err)
			}
			tg.want(pdu.SCSICommand)
		})
	}
	for _, tt := range []struct {
		id     string
		status pdu.LoginStatus
		key    string
		o      Options
		want   string
	}{
		{"ISER-5.1.1-7 login is refused", pdu.LoginNotFound, "RDMAExtensions=Yes", Options{}, "refused the login"},
		{"ISER-3.3-2 RDMAExtensions=No", 0, "RDMAExtensions=No", Options{}, "no RDMA mode"},
		{"ISER-10.1.3.1-1 ISER-10.1.3.1-4 no resources", 0, "RDMAExtensions=Yes",
			Options{RDMA: rdma.Options{IRD: -1}}, "IRD"},
	} {
		t.Run(tt.id, func(t *testing.T) {
			tt.o.Stream = true
			tg := start(t, tt.o)
			tg.streamLogin()
			tg.write(tg.response(tt.status, tt.key))
			if _, err := tg.session(); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Error(err)
			}
			tg.end()
		})
	}
	for _, reply := range []string{"\x31\xaa\x00\x00", "\x30\xaa\x00\x21", "\x30\x11\x00\x01", "\x20\xaa\x00\x01",
		"\x30"} {
		t.Run(fmt.Sprintf("ISER-10.1.3.4-1 HelloReply % x", reply), func(t *testing.T) {
			tg := start(t, Options{Stream: true, Hello: true})
			tg.streamLogin()
			tg.write(tg.response(0, "RDMAExtensions=Yes"))
			tg.startMPA()
			tg.next()
			b := []byte(reply)
			if len(b) > 1 {
				b = append(b, make([]byte, 24)...)
			}
			tg.post(rdma.WorkRequest{Op: rdma.Send, Head: b})
			if _, err := tg.session(); err == nil {
				t.Error("taken")
			}
		})
	}
}

// checkSTags fails the test at its end if it leaves more STags than there were before.
func checkSTags(t *testing.T) {
	settled := rdma.ReadStats().STags
	t.Cleanup(func() {
		testkit.Eventually(t, "no more STags than before", func() bool { return rdma.ReadStats().STags == settled })
	})
}

// A command has its data, immediate or advertised, and its memory can be reached
// until its response, with or without Invalidate, and no longer.
func TestMemoryIsInvalidatedWhenItsCommandEnds(t *testing.T) {
	checkSTags(t)
	for _, invalidate := range []bool{false, true} {
		id := "ISER-1.5.1-4 ISER-1.5.1-6 ISER-7.3.1-5 ISER-7.3.2-7 ISER-7.3.2-9"
		t.Run(fmt.Sprint(id, " Invalidate: ", invalidate), func(t *testing.T) {
			tg, s := full(t, Options{})
			var cs [2]*Command
			var hs [2]iser.Header
			var itts [2]uint32
			for i := range cs {
				cs[i] = &Command{CDB: cdb.Read16(0, 1), In: make([]byte, 512)}
				if err := s.Start(cs[i]); err != nil {
					t.Fatal(err)
				}
				h, bhs, _ := tg.want(pdu.SCSICommand)
				hs[i], itts[i] = h, bhs.ITT()
			}
			for _, i := range []int{1, 0} { // the other way round
				want := bytes.Repeat([]byte{byte(i + 1)}, 512)
				tg.post(rdma.WorkRequest{Op: rdma.Write, STag: hs[i].Read.STag, TO: hs[i].Read.Base, Data: want})
				stag := rdma.STag(0)
				if invalidate {
					stag = hs[i].Read.STag
				}
				before := rdma.ReadStats().STags
				tg.answer(pdu.SCSIResponse, itts[i], stag)
				if err := cs[i].Wait(); err != nil || cs[i].Invalidated != invalidate || !bytes.Equal(cs[i].In, want) {
					t.Errorf("command %d: %v, invalidated: %t", i, err, cs[i].Invalidated)
				}
				if now := rdma.ReadStats().STags; now != before-1 { // ISER-7.3.2-9: already
					t.Errorf("%d STags, were %d", now, before)
				}
			}
			tg.refused(hs[0].Read.STag, hs[0].Read.Base)
			if cs[0].In[0] != 1 {
				t.Error("memory has changed after the end of its command")
			}
		})
	}
}

// ISER-7.3.1-2, ISER-7.3.1-3, ISER-9.5.1-1: immediate data comes with the command, and the rest
// is advertised.
func TestUnsolicitedDataIsNotAdvertised(t *testing.T) {
	checkSTags(t)
	tg, s := full(t, Options{Keys: []string{"TaggedBufferForSolicitedDataOnly=Yes"}})
	out := bytes.Repeat([]byte{1, 2, 3, 4}, 512)
	c := &Command{CDB: cdb.Write16(0, 4), Out: out, Immediate: 512}
	if err := s.Start(c); err != nil {
		t.Fatal(err)
	}
	h, bhs, data := tg.want(pdu.SCSICommand)
	if bhs.DataSegmentLength() != 512 || !bytes.Equal(data, out[:512]) || bhs.EDTL() != 2048 || !h.Write.Valid ||
		h.Read.Valid {
		t.Errorf("%+v % x, %d bytes", h, []byte(bhs), len(data))
	}
	got := make([]byte, 1536)
	tg.post(rdma.WorkRequest{Op: rdma.Read, Data: got, STag: h.Write.STag, TO: h.Write.Base})
	var ev rdma.Event
	if err := tg.rc.Receive(&ev); err != nil || ev.Read == nil || ev.Err != nil || !bytes.Equal(got, out[512:]) {
		t.Errorf("%v, %v", err, ev.Err)
	}
	tg.answer(pdu.SCSIResponse, bhs.ITT(), h.Write.STag)
	if err := c.Wait(); err != nil || !c.Invalidated {
		t.Error(err, c.Invalidated)
	}
	// ISER-1.5.1-1, ISER-9.2-5: nothing is advertised that nobody has to ask for.
	if err := s.Start(&Command{CDB: cdb.Write16(0, 1), Out: out[:512], Immediate: 512}); err != nil {
		t.Fatal(err)
	}
	if h, _, _ := tg.want(pdu.SCSICommand); h.Write.Valid || h.Read.Valid {
		t.Errorf("%+v", h)
	}
}

// ISER-1.5.1-6: a response invalidates the STag of its own command only.
func TestInvalidatingTheSTagOfAnotherCommandEndsTheSession(t *testing.T) {
	checkSTags(t)
	tg, s := full(t, Options{})
	c, other := &Command{CDB: cdb.Read16(0, 1), In: make([]byte, 512)},
		&Command{CDB: cdb.Read16(0, 1), In: make([]byte, 512)}
	s.Start(c)
	s.Start(other)
	_, bhs, _ := tg.want(pdu.SCSICommand)
	h, _, _ := tg.want(pdu.SCSICommand)
	tg.answer(pdu.SCSIResponse, bhs.ITT(), h.Read.STag)
	if err := other.Wait(); err == nil || !strings.Contains(err.Error(), "invalidated STag") {
		t.Error(err)
	}
}

// ISER-1.5.2-3: a target that was told not to must not invalidate.
func TestInvalidateInSpiteOfThePrivateDataEndsTheSession(t *testing.T) {
	checkSTags(t)
	tg, s := full(t, Options{NoInvalidate: true})
	if tg.request.Private[0] != 0xc0 {
		t.Errorf("% x", tg.request.Private)
	}
	c := &Command{CDB: cdb.Read16(0, 1), In: make([]byte, 512)}
	s.Start(c)
	h, bhs, _ := tg.want(pdu.SCSICommand)
	tg.answer(pdu.SCSIResponse, bhs.ITT(), h.Read.STag)
	if err := c.Wait(); err == nil || !strings.Contains(err.Error(), "with Invalidate") {
		t.Error(err)
	}
}

// ISER-1.5.1-5, ISER-8.3.2-1: the target may write until it has answered the abort, and not after.
func TestAbortedCommandKeepsItsMemoryUntilTheAnswer(t *testing.T) {
	checkSTags(t)
	tg, s := full(t, Options{})
	c := &Command{CDB: cdb.Read16(0, 1), In: make([]byte, 512)}
	if err := s.Start(c); err != nil {
		t.Fatal(err)
	}
	h, bhs, _ := tg.want(pdu.SCSICommand)
	done := make(chan error, 1)
	go func() {
		response, err := s.Abort(tg.ctx, c)
		if response != 0 && err == nil {
			err = fmt.Errorf("response %d", response)
		}
		done <- err
	}()
	_, tmf, _ := tg.want(pdu.TaskMgmtReq)
	if tmf.Function() != pdu.AbortTask || tmf.ReferencedTaskTag() != bhs.ITT() || tmf.RefCmdSN() != bhs.CmdSN() {
		t.Errorf("% x", []byte(tmf))
	}
	tg.post(rdma.WorkRequest{Op: rdma.Write, STag: h.Read.STag, TO: h.Read.Base, Data: []byte{7}}) // until the answer
	tg.answer(pdu.TaskMgmtResp, tmf.ITT(), 0)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if err := c.Wait(); !errors.Is(err, ErrAborted) || c.In[0] != 7 {
		t.Error(err, c.In[0])
	}
	tg.refused(h.Read.STag, h.Read.Base)
}

// TargetRecvDataSegmentLength bounds what the initiator sends, and
// InitiatorRecvDataSegmentLength what it takes.
func TestDataSegmentLengths(t *testing.T) {
	keys := []string{"TargetRecvDataSegmentLength=1024", "InitiatorRecvDataSegmentLength=64"}
	tg, s := full(t, Options{}, keys...)
	if err := s.Start(&Command{CDB: cdb.Write16(0, 4), Out: make([]byte, 2048), Immediate: 1025}); err == nil {
		t.Error("ISER-6.2-3: 1025 bytes leave")
	}
	c := &Command{CDB: cdb.Write16(0, 4), Out: make([]byte, 2048), Immediate: 1024}
	if err := s.Start(c); err != nil {
		t.Fatal(err)
	}
	_, bhs, _ := tg.want(pdu.SCSICommand)
	tg.answer(pdu.NOPIn, 0x7777, 0, make([]byte, 64)...)
	if _, err := s.Next(tg.ctx); err != nil {
		t.Errorf("64 bytes: %v", err)
	}
	tg.answer(pdu.SCSIResponse, bhs.ITT(), 0, make([]byte, 65)...)
	if err := s.Err(); err == nil || !strings.Contains(err.Error(), "bytes") {
		t.Errorf("ISER-6.2-3: 65 bytes: %v", err)
	}
}

// A session runs commands, pings and logs out.
func TestWholeSession(t *testing.T) {
	tg, s := full(t, Options{})
	for _, c := range []*Command{{}, {CDB: cdb.Read16(0, 8), In: make([]byte, 4096)},
		{CDB: cdb.Write16(0, 8), Out: make([]byte, 4096), Immediate: 512}} {
		if err := s.Start(c); err != nil {
			t.Fatal(err)
		}
		_, bhs, _ := tg.want(pdu.SCSICommand)
		tg.answer(pdu.SCSIResponse, bhs.ITT(), 0) // a READ without data, too
		if err := c.Wait(); err != nil {
			t.Fatal(err)
		}
	}
	tg.answer(pdu.SCSIResponse, 0x999, 0) // of nobody
	ping := make(pdu.BHS, pdu.BHSLen)
	ping.Reset(pdu.NOPOut, pdu.FlagF)
	ping.SetImmediate()
	ping.SetITT(s.NewITT())
	ping.SetTTT(pdu.ReservedTag)
	if err := s.Control(ping, nil); err != nil {
		t.Fatal(err)
	}
	tg.want(pdu.NOPOut)
	done := make(chan error, 1)
	go func() { done <- s.Logout(tg.ctx) }()
	_, bhs, _ := tg.want(pdu.LogoutReq) // ISER-5.2.1-1
	tg.answer(pdu.LogoutResp, bhs.ITT(), 0)
	if err := <-done; err != nil { // ISER-5.2.1-2
		t.Fatal(err)
	}
	var ev rdma.Event
	if err := tg.rc.Receive(&ev); err != io.EOF { // ISER-5.2.1-3
		t.Errorf("%v where the initiator should close", err)
	}
	// ISER-3.3-8, ISER-7.3.11-1: no SNACK
	if want := []pdu.Opcode{pdu.SCSICommand, pdu.SCSICommand, pdu.SCSICommand, pdu.NOPOut,
		pdu.LogoutReq}; !slices.Equal(tg.opcodes, want) {
		t.Errorf("%v", tg.opcodes)
	}
}
