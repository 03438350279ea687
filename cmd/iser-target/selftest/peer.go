package selftest

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"

	"github.com/iser-target/iser-target/iscsi/initiator"
	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/iser"
	"github.com/iser-target/iser-target/iser/vectors"
	"github.com/iser-target/iser-target/rdma/crc32c"
	"github.com/iser-target/iser-target/rdma/wire"
)

// segmentLimit is the longest data segment or FPDU that a peer takes, in bytes.
const segmentLimit = 1 << 20

// A peer is an initiator that sends and sees single PDUs, and over iSER single FPDUs. Each fault of the target ends the case.
type peer struct {
	t    *T
	nc   net.Conn
	iser bool // after MPA startup
	// crc says that FPDUs have CRCs. The Reply decides.
	crc                bool
	header, data       bool // digests
	names, answers     []string
	isid               [6]byte
	itt, cmdSN, statSN uint32
	sendMSN, recvMSN   uint32 // of the next Send in either direction
	readMSN            uint32 // of the target's next RDMA Read Request
}

// A message is one PDU or one FPDU of the target.
type message struct {
	op      wire.Opcode // over iSER
	payload []byte      // of the FPDU, without the DDP header
	tagged  wire.Tagged // of a tagged FPDU
	bhs     pdu.BHS     // of a PDU; nil: it is none
	data    []byte      // of the PDU
}

// String describes m.
func (m *message) String() string {
	switch {
	case m.bhs != nil:
		return fmt.Sprintf("%v (% x)", m.bhs.Opcode(), []byte(m.bhs))
	case m.op == wire.OpTerminate:
		r, err := wire.ParseTerminate(m.payload)
		if err != nil {
			return fmt.Sprintf("a Terminate that is cut short (% x)", m.payload)
		}
		return fmt.Sprintf("Terminate: %v", r.Reason)
	}
	return m.op.String()
}

// dial connects to the target.
func (t *T) dial() *peer {
	var d net.Dialer
	nc, err := d.DialContext(t.ctx, "tcp", t.o.Address)
	t.check(err, "connect")
	if deadline, ok := t.ctx.Deadline(); ok {
		nc.SetDeadline(deadline)
	}
	t.cleanup(func() { nc.Close() })
	p := &peer{t: t, nc: nc, sendMSN: 1, recvMSN: 1, readMSN: 1, cmdSN: 1}
	p.isid[0] = 0x80 // a random qualifier
	rand.Read(p.isid[1:])
	p.names = []string{"InitiatorName=" + t.o.Name, "TargetName=" + t.o.Target, "SessionType=Normal"}
	return p
}

// stream connects, and with the iSER transport also completes MPA startup, so that Login Requests can follow.
func (t *T) stream() *peer {
	p := t.dial()
	if t.transport == "iser" {
		p.startMPA(wire.Startup{Rev: 2, CRC: true, Enhanced: true, Depths: wire.Depths{IRD: 16, ORD: 1}, Private: []byte{0x80, 0, 0, 0}})
	}
	return p
}

// startMPA exchanges startup frames.
func (p *peer) startMPA(req wire.Startup) wire.Startup {
	b, err := req.Append(nil)
	p.t.check(err, "MPA Request")
	p.write(b)
	reply, n, err := wire.ParseStartup(p.read(wire.StartupLen), true)
	p.t.check(err, "MPA Reply")
	reply.SetPrivate(p.read(n))
	switch {
	case reply.Reject:
		p.t.failf("MPA Reply: the target rejects the connection")
	case reply.Markers:
		p.t.skipf("the target asks for Markers (mpa.markers), which selftest does not send")
	}
	p.iser, p.crc = true, req.CRC || reply.CRC
	return reply
}

// peer logs in, with keys besides those that each transport requires.
func (t *T) peer(more ...string) *peer {
	p := t.stream()
	p.login(more...)
	return p
}

// keys returns what p offers, without the names.
func (p *peer) keys() []string {
	common := []string{"InitialR2T=Yes", "ImmediateData=Yes", "MaxBurstLength=262144", "FirstBurstLength=65536", "MaxOutstandingR2T=1",
		"MaxConnections=1", "DataPDUInOrder=Yes", "DataSequenceInOrder=Yes", "ErrorRecoveryLevel=0", "DefaultTime2Wait=0", "DefaultTime2Retain=0"}
	if p.iser {
		return append(common, "InitiatorRecvDataSegmentLength=8192", "TargetRecvDataSegmentLength=8192", "RDMAExtensions=Yes")
	}
	return append(common, "HeaderDigest=None", "DataDigest=None", "MaxRecvDataSegmentLength=65536")
}

// loginRequest returns the Login Request of a login in one exchange.
func (p *peer) loginRequest() pdu.LoginRequest {
	return pdu.LoginRequest{Transit: true, CSG: pdu.LoginOperationalNegotiation, NSG: pdu.FullFeaturePhase, ISID: p.isid, CmdSN: p.cmdSN}
}

// sendLogin sends a Login Request with keys.
func (p *peer) sendLogin(r pdu.LoginRequest, pairs []string) {
	var text []byte
	for _, kv := range pairs {
		text = append(append(text, kv...), 0)
	}
	p.send(pdu.BHS(r.Append(nil)), text)
}

// wantLogin takes a Login Response with a status.
func (p *peer) wantLogin(status pdu.LoginStatus) pdu.LoginResponse {
	m := p.want(pdu.LoginResp)
	r := pdu.ParseLoginResponse(m.bhs)
	if r.Status != status {
		p.t.failf("login status %v, where %v is due", r.Status, status)
	}
	pairs, err := keys.ParseText(m.data)
	p.t.check(err, "keys of the target")
	for _, kv := range pairs {
		p.answers = append(p.answers, kv.Key+"="+kv.Value)
	}
	return r
}

// login logs in with one exchange. Keys of more override those of p.
func (p *peer) login(more ...string) {
	own := slices.DeleteFunc(p.keys(), func(kv string) bool {
		key, _, _ := strings.Cut(kv, "=")
		return slices.ContainsFunc(more, func(m string) bool { return strings.HasPrefix(m, key+"=") })
	})
	p.sendLogin(p.loginRequest(), slices.Concat(p.names, own, more))
	r := p.wantLogin(pdu.LoginSuccess)
	if !r.Transit || r.NSG != pdu.FullFeaturePhase {
		p.t.failf("the login takes another exchange: %+v", r)
	}
	p.cmdSN, p.statSN = r.ExpCmdSN, r.StatSN+1
	p.header, p.data = p.answer("HeaderDigest") == "CRC32C", p.answer("DataDigest") == "CRC32C"
	// Take the unit attention that a new nexus gets.
	for range 4 {
		h := p.command(0, 0, [16]byte{})
		p.send(h, nil)
		m := p.wantFor(pdu.SCSIResponse, h)
		if m.bhs.Status() == initiator.Good {
			return
		}
	}
	p.t.failf("TEST UNIT READY: the LUN is not ready")
}

// answer returns the answer of the target to a key, or "" without one.
func (p *peer) answer(key string) string {
	for _, kv := range p.answers {
		if k, v, _ := strings.Cut(kv, "="); k == key {
			return v
		}
	}
	return ""
}

// request returns the header of a request with the next tag and, unless it is immediate, the next CmdSN.
func (p *peer) request(op pdu.Opcode, flags byte, immediate bool) pdu.BHS {
	h := make(pdu.BHS, pdu.BHSLen)
	h.Reset(op, flags)
	p.itt++
	h.SetITT(p.itt)
	h.SetCmdSN(p.cmdSN)
	h.SetExpStatSN(p.statSN)
	if immediate {
		h.SetImmediate()
	} else {
		p.cmdSN++
	}
	return h
}

// command returns the header of a SCSI command to the LUN. flags are FlagR or FlagW.
func (p *peer) command(flags byte, edtl int, cdb [16]byte) pdu.BHS {
	h := p.request(pdu.SCSICommand, flags|pdu.FlagF|pdu.AttrSimple, false)
	h.SetLUN(initiator.EncodeLUN(p.t.o.LUN))
	h.SetEDTL(uint32(edtl))
	h.SetCDB(cdb[:])
	return h
}

// nop returns the header of a NOP-Out that asks for an answer.
func (p *peer) nop() pdu.BHS {
	h := p.request(pdu.NOPOut, pdu.FlagF, true)
	h.SetTTT(pdu.ReservedTag)
	return h
}

// ping checks that the target answers.
func (p *peer) ping() {
	h := p.nop()
	p.send(h, nil)
	p.wantFor(pdu.NOPIn, h)
}

func (p *peer) write(b []byte) {
	_, err := p.nc.Write(b)
	p.t.check(err, "send")
}

func (p *peer) read(n int) []byte {
	b, err := p.tryRead(n)
	p.t.check(err, "receive")
	return b
}

func (p *peer) tryRead(n int) ([]byte, error) {
	b := make([]byte, n)
	_, err := io.ReadFull(p.nc, b)
	return b, err
}

// encode returns the bytes of a PDU, over iSER those of the message after the header h.
func (p *peer) encode(h iser.Header, bhs pdu.BHS, data []byte) []byte {
	bhs = slices.Clone(bhs)
	bhs.SetDataSegmentLength(len(data))
	pad := make([]byte, pdu.Padded(len(data))-len(data))
	if p.iser {
		b := make([]byte, iser.HeaderLen)
		h.Put(b)
		if op := bhs.Opcode(); op != pdu.LoginReq && op != pdu.TextReq {
			pad = nil
		}
		return slices.Concat(b, bhs, data, pad)
	}
	b := slices.Clone([]byte(bhs))
	if p.header {
		b = binary.LittleEndian.AppendUint32(b, crc32c.Checksum(bhs))
	}
	if len(data) == 0 {
		return b
	}
	body := slices.Concat(data, pad)
	if b = append(b, body...); p.data {
		b = binary.LittleEndian.AppendUint32(b, crc32c.Checksum(body))
	}
	return b
}

// send sends a PDU.
func (p *peer) send(bhs pdu.BHS, data []byte) { p.sendWith(iser.Header{}, bhs, data) }

// sendWith sends a PDU, over iSER after the header h.
func (p *peer) sendWith(h iser.Header, bhs pdu.BHS, data []byte) {
	b := p.encode(h, bhs, data)
	if p.iser {
		p.sendMessage(b)
		return
	}
	p.write(b)
}

// sendMessage sends b as the next Send, over iSER.
func (p *peer) sendMessage(b []byte) {
	p.write(fpdu(vectors.Untagged(wire.OpSend, p.sendMSN, b)))
	p.sendMSN++
}

// fpdu returns the FPDU of a ULPDU.
func fpdu(ulpdu []byte) []byte {
	b := binary.BigEndian.AppendUint16(nil, uint16(len(ulpdu)))
	b = append(append(b, ulpdu...), make([]byte, wire.Pad(len(ulpdu)))...)
	return binary.LittleEndian.AppendUint32(b, wire.UpdateCRC(0, b))
}

// next takes the next PDU or FPDU.
func (p *peer) next() *message {
	m, err := p.tryNext()
	p.t.check(err, "receive")
	return m
}

// tryNext takes the next PDU or FPDU, or returns the error that ends the connection.
func (p *peer) tryNext() (*message, error) {
	if p.iser {
		return p.tryFPDU()
	}
	h, err := p.tryRead(pdu.BHSLen)
	if err != nil {
		return nil, err
	}
	bhs := pdu.BHS(h)
	if p.header {
		d, err := p.tryRead(4)
		if err != nil {
			return nil, err
		}
		if binary.LittleEndian.Uint32(d) != crc32c.Checksum(h) {
			p.t.failf("%v: wrong header digest", bhs.Opcode())
		}
	}
	n := bhs.DataSegmentLength()
	if n > segmentLimit || bhs.TotalAHSLength() > 0 {
		p.t.failf("%v: %d bytes of data, %d of AHS", bhs.Opcode(), n, bhs.TotalAHSLength())
	}
	data, err := p.tryRead(pdu.Padded(n))
	if err != nil {
		return nil, err
	}
	if p.data && n > 0 {
		d, err := p.tryRead(4)
		if err != nil {
			return nil, err
		}
		if binary.LittleEndian.Uint32(d) != crc32c.Checksum(data) {
			p.t.failf("%v: wrong data digest", bhs.Opcode())
		}
	}
	m := &message{bhs: bhs, data: data[:n]}
	p.count(m)
	return m, nil
}

// count checks StatSN of m, and counts it.
func (p *peer) count(m *message) {
	switch op := m.bhs.Opcode(); {
	case op == pdu.LoginResp:
	case op == pdu.R2T || op == pdu.NOPIn && m.bhs.ITT() == pdu.ReservedTag || op == pdu.DataIn && m.bhs.Flags()&pdu.FlagS == 0:
	case m.bhs.StatSN() != p.statSN:
		p.t.failf("ISCSI-4.2.2.2-1: %v with StatSN %d, where %d is due", op, m.bhs.StatSN(), p.statSN)
	default:
		p.statSN++
	}
}

// tryFPDU takes the next FPDU.
func (p *peer) tryFPDU() (*message, error) {
	b, err := p.tryRead(wire.LengthLen)
	if err != nil {
		return nil, err
	}
	n := wire.ULPDULength(b)
	rest, err := p.tryRead(n + wire.Pad(n) + wire.CRCLen)
	if err != nil {
		return nil, err
	}
	b = append(b, rest...)
	if body := b[:len(b)-wire.CRCLen]; p.crc && wire.CRC(b[len(body):]) != wire.UpdateCRC(0, body) {
		p.t.failf("MPA-4.4-18: an FPDU with a wrong CRC")
	}
	u := b[wire.LengthLen : wire.LengthLen+n]
	if n < wire.TaggedLen || !wire.VersionOK(u) {
		p.t.failf("a ULPDU of %d bytes, or of another version", n)
	}
	m := &message{}
	m.op, _ = wire.ParseControl(u[1])
	if wire.IsTagged(u) {
		if m.tagged, err = wire.ParseTagged(u); err != nil {
			p.t.failf("%v", err)
		}
		m.payload = u[wire.TaggedLen:]
		return m, nil
	}
	h, err := wire.ParseUntagged(u)
	if err != nil {
		p.t.failf("%v", err)
	}
	m.payload = u[wire.UntaggedLen:]
	switch m.op {
	case wire.OpSend, wire.OpSendInvalidate:
		if h.MSN != p.recvMSN || !h.Last {
			p.t.failf("ISER-4.1-3: a message with MSN %d, where %d is due; last: %t", h.MSN, p.recvMSN, h.Last)
		}
		p.recvMSN++
		p.pdu(m)
	case wire.OpReadRequest:
		if h.MSN != p.readMSN || len(m.payload) != wire.ReadRequestLen {
			p.t.failf("an RDMA Read Request of %d bytes with MSN %d, where %d is due", len(m.payload), h.MSN, p.readMSN)
		}
		p.readMSN++
	}
	return m, nil
}

// pdu takes the PDU of a Send.
func (p *peer) pdu(m *message) {
	const head = iser.HeaderLen + pdu.BHSLen
	b := m.payload
	if len(b) < head || !bytes.Equal(b[:iser.HeaderLen], append([]byte{0x10}, make([]byte, iser.HeaderLen-1)...)) {
		p.t.failf("ISER-9.2-4: iSER header % x", b[:min(len(b), iser.HeaderLen)])
	}
	bhs := pdu.BHS(b[iser.HeaderLen:head])
	n := bhs.DataSegmentLength()
	if n > len(b)-head || len(b)-head > pdu.Padded(n) {
		p.t.failf("%v: it announces %d bytes of data and has %d", bhs.Opcode(), n, len(b)-head)
	}
	m.bhs, m.data = bhs, b[head:head+n]
	p.count(m)
}

// want takes the next PDU, which must have that opcode. Pings of the target are passed over.
func (p *peer) want(op pdu.Opcode) *message {
	for {
		m := p.next()
		switch {
		case m.bhs != nil && m.bhs.Opcode() == pdu.NOPIn && m.bhs.ITT() == pdu.ReservedTag && op != pdu.NOPIn:
			continue
		case m.bhs == nil || m.bhs.Opcode() != op:
			p.t.failf("%v, where %v is due", m, op)
		}
		return m
	}
}

// wantFor takes the answer to the request h.
func (p *peer) wantFor(op pdu.Opcode, h pdu.BHS) *message {
	m := p.want(op)
	if m.bhs.ITT() != h.ITT() {
		p.t.failf("%v of task %#x, where that of %#x is due", op, m.bhs.ITT(), h.ITT())
	}
	return m
}

// wantReject takes a Reject of the request h.
func (p *peer) wantReject(h pdu.BHS, reason pdu.RejectReason) {
	m := p.want(pdu.Reject)
	if m.bhs.Reason() != reason {
		p.t.failf("Reject %v, where %v is due", m.bhs.Reason(), reason)
	}
	if len(m.data) < pdu.BHSLen || !bytes.Equal(m.data[:pdu.BHSLen], h) {
		p.t.failf("ISCSI-11.17-2: the Reject has % x, not the header of the PDU % x", m.data, []byte(h))
	}
}

// wantStatus takes the status of the command h.
func (p *peer) wantStatus(h pdu.BHS, status byte) {
	if m := p.wantFor(pdu.SCSIResponse, h); m.bhs.Status() != status {
		p.t.failf("status %#x, where %#x is due", m.bhs.Status(), status)
	}
}

// wantRead takes an RDMA Read Request.
func (p *peer) wantRead() wire.ReadRequest {
	m := p.next()
	if m.op != wire.OpReadRequest {
		p.t.failf("%v, where an RDMA Read Request is due", m)
	}
	r, err := wire.ParseReadRequest(m.payload)
	p.t.check(err, "RDMA Read Request")
	return r
}

// wantTerminate takes a Terminate and the end of the stream. message is all of it in hexadecimal digits; empty: only the reason counts.
func (p *peer) wantTerminate(reason wire.Reason, message string) {
	m := p.next()
	if m.op != wire.OpTerminate {
		p.t.failf("%v, where a Terminate is due: %v", m, reason)
	}
	got, err := wire.ParseTerminate(m.payload)
	p.t.check(err, "Terminate")
	if got.Reason != reason {
		p.t.failf("Terminate: %v, where %v is due", got.Reason, reason)
	}
	if want, err := unhex(message); err != nil || message != "" && !bytes.Equal(m.payload, want) {
		p.t.failf("Terminate % x, where % x is due", m.payload, want)
	}
	p.wantEnd()
}

// wantEnd sees the end of the connection, after which nothing is sent.
func (p *peer) wantEnd() {
	b := make([]byte, 1)
	n, err := p.nc.Read(b)
	switch {
	case n > 0:
		p.t.failf("the target sends %#x, where the connection should end", b[0])
	case errors.Is(err, os.ErrDeadlineExceeded):
		p.t.failf("the target does not close the connection")
	}
	p.nc.Close()
}

// unhex decodes hexadecimal digits with spaces in between.
func unhex(s string) ([]byte, error) { return hex.DecodeString(strings.ReplaceAll(s, " ", "")) }
