package tests

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/iser"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/rdma/wire"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
	"github.com/iser-target/iser-target/tests/testkit/header"
)

var unhex = testkit.Unhex

// A raw is an initiator without an RDMA engine: it sends FPDUs, and the test
// sees every FPDU of the target and answers RDMA Reads when it likes.
type raw struct {
	t     testing.TB
	nc    net.Conn
	reply wire.Startup
	o     initiator.Options

	sendMSN          uint32 // of our next Send
	recvMSN, readMSN uint32 // of the target's next Send and RDMA Read
	full             bool   // full feature phase of a normal session
	pong             bool   // the target's pings are answered and not returned

	header.Numbers
	maxCmdSN uint32
}

// A message is one DDP segment of the target.
type message struct {
	op      wire.Opcode
	fpdu    []byte // without PAD and CRC
	tagged  wire.Tagged
	untag   wire.Untagged
	payload []byte

	read wire.ReadRequest // of an RDMA Read Request
	bhs  pdu.BHS          // of a PDU
	data []byte
}

// dial connects and exchanges startup frames as ib_iser over siw does.
func (tg *target) dial(t testing.TB, o initiator.Options) *raw {
	t.Helper()
	p := tg.dialStream(t, o)
	p.startMPA()
	return p
}

// dialStream connects.
func (tg *target) dialStream(t testing.TB, o initiator.Options) *raw {
	t.Helper()
	nc, err := net.Dial("tcp", tg.addr)
	if err != nil {
		t.Fatal(err)
	}
	nc.SetDeadline(time.Now().Add(testkit.Patience))
	t.Cleanup(func() { nc.Close() })
	return &raw{t: t, nc: nc, o: o.Complete(), sendMSN: 1, recvMSN: 1, readMSN: 1}
}

// mpaRequest returns what ib_iser over siw sends, with CRCs unless the Options say otherwise.
func (p *raw) mpaRequest() []byte {
	p.t.Helper()
	ird := uint16(128)
	if p.o.RDMA.IRD != 0 {
		ird = uint16(p.o.RDMA.IRD)
	}
	req := wire.Startup{Rev: 2, CRC: !p.o.RDMA.NoCRC, Enhanced: true, Depths: wire.Depths{IRD: ird, ORD: 1},
		Private: []byte{0x80, 0, 0, 0}}
	if p.o.NoInvalidate {
		req.Private[0] |= 0x40
	}
	b, err := req.Append(nil)
	if err != nil {
		p.t.Fatal(err)
	}
	return b
}

// startMPA exchanges startup frames.
func (p *raw) startMPA() {
	p.t.Helper()
	p.write(p.mpaRequest())
	p.wantReply()
}

// startMPAAs exchanges startup frames with another Request.
func (p *raw) startMPAAs(req wire.Startup) {
	p.t.Helper()
	b, err := req.Append(nil)
	if err != nil {
		p.t.Fatal(err)
	}
	p.write(b)
	p.wantReply()
}

// wantReply takes the MPA Reply.
func (p *raw) wantReply() {
	p.t.Helper()
	f, n, err := wire.ParseStartup(p.read(wire.StartupLen), true)
	if err != nil {
		p.t.Fatal(err)
	}
	f.SetPrivate(p.read(n))
	if p.reply = f; f.Reject {
		p.t.Fatal("rejected")
	}
}

// rawLogin connects and logs in; unit attentions of the LUNs are taken.
func (tg *target) rawLogin(t testing.TB, o initiator.Options, luns ...byte) *raw {
	t.Helper()
	o.Target = targetName
	p := tg.dial(t, o)
	p.login()
	for _, l := range luns {
		h := p.scsi(0, 0, cdb.TestUnitReady)
		h.SetLUN([8]byte{1: l})
		p.send(iser.Header{}, h, nil)
		p.wantStatus(h, 0x02)
	}
	return p
}

func (p *raw) write(b []byte) {
	p.t.Helper()
	if _, err := p.nc.Write(b); err != nil {
		p.t.Fatal(err)
	}
}

func (p *raw) read(n int) []byte {
	p.t.Helper()
	b := make([]byte, n)
	if m, err := io.ReadFull(p.nc, b); err != nil {
		p.t.Fatalf("%x, then %v", b[:m], err)
	}
	return b
}

// fpdu frames ULPDUs.
func fpdu(ulpdus ...[]byte) (b []byte) {
	for _, u := range ulpdus {
		start := len(b)
		b = binary.BigEndian.AppendUint16(b, uint16(len(u)))
		b = append(b, u...)
		b = append(b, make([]byte, wire.Pad(len(u)))...)
		b = binary.LittleEndian.AppendUint32(b, wire.UpdateCRC(0, b[start:]))
	}
	return b
}

func tagged(op wire.Opcode, last bool, stag wire.STag, to uint64, data []byte) []byte {
	b := make([]byte, wire.TaggedLen, wire.TaggedLen+len(data))
	wire.Tagged{Last: last, ULP: op.Control(), STag: stag, TO: to}.Put(b)
	return append(b, data...)
}

func untagged(op wire.Opcode, msn uint32, data []byte) []byte {
	b := make([]byte, wire.UntaggedLen, wire.UntaggedLen+len(data))
	wire.Untagged{Last: true, ULP: op.Control(), QN: op.QN(), MSN: msn}.Put(b)
	return append(b, data...)
}

// message makes the next Send of b; it is not sent.
func (p *raw) message(b []byte) []byte {
	p.sendMSN++
	return fpdu(untagged(wire.OpSend, p.sendMSN-1, b))
}

// sendRaw sends any message.
func (p *raw) sendRaw(b []byte) {
	p.t.Helper()
	p.write(p.message(b))
}

// pduBytes returns an iSER message; data is padded as in Linux.
func pduBytes(h iser.Header, bhs pdu.BHS, data []byte) []byte {
	b := make([]byte, iser.HeaderLen)
	h.Put(b)
	bhs.SetDataSegmentLength(len(data))
	b = append(append(b, bhs...), data...)
	if op := bhs.Opcode(); op == pdu.LoginReq || op == pdu.TextReq {
		b = append(b, make([]byte, pdu.Padded(len(data))-len(data))...)
	}
	return b
}

func (p *raw) send(h iser.Header, bhs pdu.BHS, data []byte) {
	p.t.Helper()
	p.sendRaw(pduBytes(h, bhs, data))
}

// next takes the next segment of the target, and checks what goes for all.
func (p *raw) next() *message {
	p.t.Helper()
	m, err := p.tryNext()
	if err != nil {
		p.t.Fatal(err)
	}
	return m
}

func (p *raw) tryNext() (*message, error) {
	p.t.Helper()
	for {
		m, err := p.segment()
		if err != nil || !p.pong || m.bhs == nil || m.bhs.Opcode() != pdu.NOPIn || m.bhs.TTT() == pdu.ReservedTag {
			return m, err
		}
		p.answerPing(m)
	}
}

func (p *raw) answerPing(m *message) {
	p.t.Helper()
	if m.bhs.ITT() != pdu.ReservedTag || m.bhs.TTT() == pdu.ReservedTag || len(m.payload) != 76 ||
		m.bhs.StatSN() != p.ExpStatSN {
		p.t.Fatalf("ping % x", m.payload)
	}
	h := p.Request(pdu.NOPOut, pdu.FlagF, true)
	h.SetITT(pdu.ReservedTag)
	h.SetTTT(m.bhs.TTT())
	p.send(iser.Header{}, h, nil)
}

// segment takes the next segment as it is.
func (p *raw) segment() (*message, error) {
	p.t.Helper()
	b := make([]byte, 2, 2048)
	if _, err := io.ReadFull(p.nc, b); err != nil {
		return nil, err
	}
	n := int(binary.BigEndian.Uint16(b))
	b = append(b, make([]byte, n+wire.Pad(n)+wire.CRCLen)...)
	if _, err := io.ReadFull(p.nc, b[2:]); err != nil {
		return nil, err
	}
	if body, crc := b[:len(b)-4], b[len(b)-4:]; !p.o.RDMA.NoCRC && wire.CRC(crc) != wire.UpdateCRC(0, body) {
		p.t.Fatal("bad CRC")
	}
	m := &message{fpdu: b[:2+n]}
	u := b[2 : 2+n]
	m.op, _ = wire.ParseControl(u[1])
	if wire.IsTagged(u) {
		m.tagged, _ = wire.ParseTagged(u)
		m.payload = u[wire.TaggedLen:]
		return m, nil
	}
	m.untag, _ = wire.ParseUntagged(u)
	m.payload = u[wire.UntaggedLen:]
	switch m.op {
	case wire.OpReadRequest:
		if m.untag.MSN != p.readMSN {
			p.t.Fatalf("RDMA Read with MSN %d, due is %d", m.untag.MSN, p.readMSN)
		}
		p.readMSN++
		m.read, _ = wire.ParseReadRequest(m.payload)
	case wire.OpSend, wire.OpSendInvalidate:
		if m.untag.MSN != p.recvMSN || !m.untag.Last {
			p.t.Fatalf("ISER-4.1-3: message with MSN %d, due is %d; last: %t", m.untag.MSN, p.recvMSN, m.untag.Last)
		}
		p.recvMSN++
		p.parse(m)
	case wire.OpTerminate:
	default:
		p.t.Fatalf("ISER-1.5.2-2 ISER-7.2-1: %v", m.op)
	}
	return m, nil
}

func (p *raw) parse(m *message) {
	p.t.Helper()
	if m.payload[0]>>4 == 3 && len(m.payload) == iser.HeaderLen {
		return // HelloReply
	}
	if len(m.payload) < 76 || !bytes.Equal(m.payload[:28], append([]byte{0x10}, make([]byte, 27)...)) {
		p.t.Fatalf("ISER-9.1-1 ISER-9.1-2 ISER-9.2-4 ISER-9.2-6: header % x", m.payload[:28])
	}
	m.bhs, m.data = m.payload[28:76], m.payload[76:]
	op, n := m.bhs.Opcode(), m.bhs.DataSegmentLength()
	want := n // no padding but in Login and Text Responses
	if op == pdu.LoginResp || op == pdu.TextResp {
		want = pdu.Padded(n)
	}
	if len(m.data) != want {
		p.t.Fatalf("%v with %d bytes of data and %d of padding", op, n, len(m.data)-n)
	}
	m.data = m.data[:n]
	if p.full && len(m.payload) > 76+128 {
		p.t.Fatalf("%v of %d bytes; ib_iser has room for 204", op, len(m.payload))
	}
	if op != pdu.LoginResp && (op != pdu.NOPIn || m.bhs.ITT() != pdu.ReservedTag) {
		if m.bhs.StatSN() != p.ExpStatSN {
			p.t.Fatalf("%v with StatSN %d, due is %d", op, m.bhs.StatSN(), p.ExpStatSN)
		}
		p.ExpStatSN++
	}
	if op != pdu.LoginResp {
		p.maxCmdSN = m.bhs.MaxCmdSN()
	}
	switch op {
	case pdu.DataIn, pdu.R2T:
		p.t.Fatalf("ISER-7.1-1: %v on the wire", op)
	}
}

// want takes the next segment, which must be this PDU.
func (p *raw) want(op pdu.Opcode) *message {
	p.t.Helper()
	m := p.next()
	if m.bhs == nil || m.bhs.Opcode() != op {
		p.t.Fatalf("%v (% x) where %v is due", m.op, m.payload[:min(len(m.payload), 76)], op)
	}
	return m
}

// wantRead takes the next segment, which must be an RDMA Read Request.
func (p *raw) wantRead() wire.ReadRequest {
	p.t.Helper()
	m := p.next()
	if m.op != wire.OpReadRequest {
		p.t.Fatalf("%v (% x) where an RDMA Read Request is due", m.op, m.payload[:min(len(m.payload), 76)])
	}
	return m.read
}

// wantTerminate takes a Terminate and the end of the stream, and closes.
func (p *raw) wantTerminate(reason wire.Reason) {
	p.t.Helper()
	m := p.next()
	if m.op != wire.OpTerminate {
		p.t.Fatalf("%v (% x) where a Terminate is due", m.op, m.payload[:min(len(m.payload), 76)])
	}
	if t, err := wire.ParseTerminate(m.payload); err != nil || t.Reason != reason {
		p.t.Fatalf("Terminate %v, %v; want %v", t.Reason, err, reason)
	} else if reason.Layer == wire.LayerRDMAP && reason.EType > 0 && len(t.DDP) == 0 {
		p.t.Fatal("RDMAP-4.8-11: the Terminate does not describe the message")
	}
	p.wantEOF()
	p.nc.Close()
}

// wantEOF sees the end of the stream without a reset.
func (p *raw) wantEOF() {
	p.t.Helper()
	if n, err := p.nc.Read(make([]byte, 1)); n != 0 || err != io.EOF {
		p.t.Fatalf("read %d bytes, %v, where the stream should end", n, err)
	}
}

// wantEnd sees the end of the connection, orderly or not.
func (p *raw) wantEnd() {
	p.t.Helper()
	for {
		if _, err := p.tryNext(); err == io.EOF || errors.Is(err, syscall.ECONNRESET) ||
			errors.Is(err, io.ErrUnexpectedEOF) {
			return
		} else if errors.Is(err, os.ErrDeadlineExceeded) {
			p.t.Fatal("the connection does not end")
		}
	}
}

// reset ends the connection with a RST.
func (p *raw) reset() {
	p.nc.(*net.TCPConn).SetLinger(0)
	p.nc.Close()
}

// answer sends an RDMA Read Response in segments of at most 32 KiB.
func (p *raw) answer(r wire.ReadRequest, data []byte) {
	p.t.Helper()
	if len(data) != int(r.Size) {
		p.t.Fatalf("%d bytes for a Read of %d", len(data), r.Size)
	}
	const most = 32 << 10
	for off := 0; off < len(data); off += most {
		end := min(off+most, len(data))
		p.write(fpdu(tagged(wire.OpReadResponse, end == len(data), r.SinkSTag, r.SinkTO+uint64(off), data[off:end])))
	}
}

// login logs in with one exchange and returns the target's text.
func (p *raw) login() string {
	p.t.Helper()
	bhs, data := p.o.LoginRequest()
	p.CmdSN = p.o.CmdSN
	p.send(iser.Header{}, bhs, data)
	m := p.want(pdu.LoginResp)
	rsp := pdu.ParseLoginResponse(m.bhs)
	if rsp.Status != 0 || !rsp.Transit || rsp.NSG != pdu.FullFeaturePhase {
		p.t.Fatalf("%+v", rsp)
	}
	p.CmdSN, p.maxCmdSN, p.ExpStatSN = rsp.ExpCmdSN, rsp.MaxCmdSN, rsp.StatSN+1
	p.full = p.o.Target != ""
	return string(m.data)
}

// scsi makes a SCSI Command to LUN 0.
func (p *raw) scsi(flags byte, edtl uint32, block [16]byte) pdu.BHS {
	h := p.Request(pdu.SCSICommand, flags|pdu.FlagF|pdu.AttrSimple, false)
	h.SetEDTL(edtl)
	h.SetCDB(block[:])
	return h
}

// sink advertises memory for data-in, which does not exist.
func sink(stag wire.STag, base uint64) iser.Header {
	return iser.Header{Read: iser.Remote{Valid: true, STag: stag, Base: base}}
}

// source advertises memory for data-out, which does not exist.
func source(stag wire.STag, base uint64) iser.Header {
	return iser.Header{Write: iser.Remote{Valid: true, STag: stag, Base: base}}
}

// writeCommand starts a WRITE of blocks to LUN 0 without immediate data.
func (p *raw) writeCommand(lba uint64, blocks uint32) pdu.BHS {
	p.t.Helper()
	block := cdb.Write16(lba, blocks)
	h := p.scsi(pdu.FlagW, blocks*512, block)
	p.send(source(wire.STag(h.ITT()<<8), p.o.BaseOffset), h, nil)
	return h
}

func (p *raw) wantStatus(h pdu.BHS, status byte) *message {
	p.t.Helper()
	m := p.want(pdu.SCSIResponse)
	if m.bhs.ITT() != h.ITT() || m.bhs.Status() != status {
		p.t.Fatalf("response of task %d with status %#x, want task %d, status %#x; data % x", m.bhs.ITT(),
			m.bhs.Status(), h.ITT(), status, m.data)
	}
	return m
}

// wantAborted takes TASK ABORTED for h, of whose data so many bytes have not moved.
func (p *raw) wantAborted(h pdu.BHS, rest uint32) *message {
	p.t.Helper()
	m := p.wantStatus(h, lun.StatusTaskAborted)
	if m.bhs.Flags() != pdu.FlagF|pdu.FlagUnderflow || m.bhs.Residual() != rest || len(m.data) != 0 {
		p.t.Fatalf("flags %#x, residual %d, data % x; want residual %d", m.bhs.Flags(), m.bhs.Residual(), m.data, rest)
	}
	return m
}

// wantSense takes a CHECK CONDITION.
func (p *raw) wantSense(h pdu.BHS, key, asc, ascq byte) *message {
	p.t.Helper()
	m := p.wantStatus(h, 0x02)
	if s := m.data; len(s) < 16 || int(s[0])<<8|int(s[1]) != len(s)-2 || s[4]&0x0f != key || s[14] != asc ||
		s[15] != ascq {
		p.t.Fatalf("ISER-7.3.2-1: sense % x, want %x/%x/%x", s, key, asc, ascq)
	}
	return m
}

// ping sends a NOP-Out and takes its answer. Nothing else may come in between.
func (p *raw) ping() {
	p.t.Helper()
	h := p.Request(pdu.NOPOut, pdu.FlagF, true)
	h.SetTTT(pdu.ReservedTag)
	p.send(iser.Header{}, h, nil)
	m := p.want(pdu.NOPIn)
	if m.bhs.ITT() != h.ITT() || m.bhs.TTT() != pdu.ReservedTag || len(m.payload) != 76 {
		p.t.Fatalf("NOP-In % x", m.payload)
	}
}

func (p *raw) tmf(function byte, lun byte, rtt, refCmdSN uint32) pdu.BHS {
	p.t.Helper()
	h := p.Request(pdu.TaskMgmtReq, pdu.FlagF|function, true)
	h.SetLUN([8]byte{1: lun})
	h.SetReferencedTaskTag(rtt)
	h.SetRefCmdSN(refCmdSN)
	p.send(iser.Header{}, h, nil)
	return h
}

func (p *raw) wantTMF(h pdu.BHS, response byte) {
	p.t.Helper()
	m := p.want(pdu.TaskMgmtResp)
	if m.bhs.ITT() != h.ITT() || m.bhs.Response() != response || len(m.payload) != 76 {
		p.t.Fatalf("TMF Response % x, want response %d of task %d", m.payload, response, h.ITT())
	}
}

// wantReject takes a Reject with the header of h.
func (p *raw) wantReject(h pdu.BHS, reason pdu.RejectReason) {
	p.t.Helper()
	m := p.want(pdu.Reject)
	if m.bhs.Reason() != reason || m.bhs.ITT() != pdu.ReservedTag || !bytes.Equal(m.data, h) || len(m.payload) != 124 {
		p.t.Fatalf("ISER-7.3.12-1: Reject % x, want reason %#x of % x", m.payload, reason, h)
	}
}

// logout logs out, and closes first as Linux does.
func (p *raw) logout() {
	p.t.Helper()
	h := p.Request(pdu.LogoutReq, pdu.FlagF, true)
	p.send(iser.Header{}, h, nil)
	m := p.want(pdu.LogoutResp)
	if m.bhs.ITT() != h.ITT() || m.bhs.Response() != 0 || len(m.payload) != 76 || m.op != wire.OpSend {
		p.t.Fatalf("ISER-5.2.2-2: %v % x", m.op, m.payload)
	}
	p.nc.Close()
}
