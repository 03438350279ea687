package initiator

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"strconv"

	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/iser"
	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/tests/testkit/header"
)

// A Dialog is an initiator that does one thing at a time, the same over iSER and
// over plain TCP, and gives up with the context of its Dial. It takes no part in
// what the two differ in: tests of that use Session or send PDUs themselves.
type Dialog struct {
	Login  pdu.LoginResponse // the last one
	Keys   []keys.Pair       // the target's answers during login
	Mutual bool              // the target has proved who it is

	link link
	ctx  context.Context
	stop func() bool // context.AfterFunc
	o    Options
	n    header.Numbers
}

// A link carries PDUs. Memory for data-in and data-out of the command is
// announced with the PDU where that is done.
type link interface {
	send(bhs pdu.BHS, data []byte) error
	receive() (PDU, error)
	// command sends a SCSI Command with out as immediate data, and takes data-in
	// until the SCSI Response; status is the response, or the last Data-In.
	command(bhs pdu.BHS, out, in []byte) (status PDU, n int, err error)
	// loginKeys are the operational keys that this kind of link needs.
	loginKeys(discovery bool) []string
	// enter is called after login with the last answers, and returns the link
	// for the full feature phase.
	enter(ctx context.Context, answers map[string]string) (link, error)
	Close() error
}

// A CHAP is who an initiator says it is.
type CHAP struct {
	Name, Secret string
	// Target is the secret that the target has to prove that it knows; empty:
	// it need not.
	Target string
}

// Dial connects by "iser", "tcp", or "step-up": TCP whose normal sessions continue over
// iSER, if the target agrees (RFC 7145, section 5.1).
func Dial(ctx context.Context, transport, addr string, o Options) (*Dialog, error) {
	d := &Dialog{o: o.Complete(), ctx: ctx}
	d.n.CmdSN = d.o.CmdSN
	switch transport {
	case "iser":
		s, err := Connect(ctx, addr, o)
		if err != nil {
			return nil, err
		}
		d.link = &rdmaLink{s: s}
	case "tcp", "step-up":
		var dialer net.Dialer
		nc, err := dialer.DialContext(ctx, "tcp", addr)
		if err != nil {
			return nil, err
		}
		d.link = &tcpLink{nc}
		if transport == "step-up" {
			d.link = &stepUpLink{tcpLink{nc}, d.o}
		}
	default:
		return nil, fmt.Errorf("no transport %q", transport)
	}
	first := d.link // whatever follows it has the same connection
	d.stop = context.AfterFunc(ctx, func() { first.Close() })
	return d, nil
}

// Close drops the connection.
func (d *Dialog) Close() error {
	d.stop()
	return d.link.Close()
}

// LogIn logs in; with auth it begins in the security stage. A refusal is a
// *LoginError, and d.Keys has what came with it.
func (d *Dialog) LogIn(auth *CHAP) error {
	names := []string{"InitiatorName=" + d.o.Name, "SessionType=Discovery"}
	if d.o.Target != "" {
		names = []string{"InitiatorName=" + d.o.Name, "TargetName=" + d.o.Target, "SessionType=Normal"}
	}
	if auth != nil {
		if err := d.authenticate(names, auth); err != nil {
			return err
		}
		names = nil
	}
	text := append(names, d.link.loginKeys(d.o.Target == "")...)
	answers, err := d.login(pdu.LoginOperationalNegotiation, pdu.FullFeaturePhase, append(text, d.o.Keys...)...)
	if err == nil && !d.Login.Transit {
		err = fmt.Errorf("login takes another round: %+v", d.Login)
	}
	if err == nil {
		d.link, err = d.link.enter(d.ctx, answers)
	}
	return err
}

// login does one exchange. The answers are also appended to d.Keys.
func (d *Dialog) login(csg, nsg pdu.Stage, text ...string) (map[string]string, error) {
	var data []byte
	for _, kv := range text {
		data = append(append(data, kv...), 0)
	}
	req := pdu.LoginRequest{Transit: nsg != csg, CSG: csg, NSG: nsg, ISID: d.o.ISID, CmdSN: d.n.CmdSN,
		ExpStatSN: d.n.ExpStatSN}
	bhs := pdu.BHS(req.Append(nil))
	bhs.SetDataSegmentLength(len(data))
	if err := d.link.send(bhs, data); err != nil {
		return nil, err
	}
	p, err := d.link.receive()
	if err != nil {
		return nil, err
	}
	if p.BHS.Opcode() != pdu.LoginResp {
		return nil, fmt.Errorf("%v where a Login Response is due", p.BHS.Opcode())
	}
	d.Login = pdu.ParseLoginResponse(p.BHS)
	d.n.ExpStatSN = d.Login.StatSN + 1
	pairs, err := keys.ParseText(p.Data)
	if err != nil {
		return nil, err
	}
	d.Keys = append(d.Keys, pairs...)
	if d.Login.Status != 0 {
		return nil, &LoginError{d.Login.Status}
	}
	answers := map[string]string{}
	for _, p := range pairs {
		answers[p.Key] = p.Value
	}
	return answers, nil
}

// authenticate completes the security stage with CHAP (RFC 7143, section 12.1.3), by SHA-256.
func (d *Dialog) authenticate(names []string, auth *CHAP) error {
	const sha256ID = "7"
	response := func(id byte, secret string, challenge []byte) []byte {
		h := sha256.New()
		h.Write([]byte{id})
		io.WriteString(h, secret)
		h.Write(challenge)
		return h.Sum(nil)
	}
	answers, err := d.login(pdu.SecurityNegotiation, pdu.SecurityNegotiation, append(names, "AuthMethod=CHAP,None")...)
	if err != nil {
		return err
	}
	if m := answers["AuthMethod"]; m != "CHAP" {
		return fmt.Errorf("AuthMethod=%s", m)
	}
	if answers, err = d.login(pdu.SecurityNegotiation, pdu.SecurityNegotiation, "CHAP_A="+sha256ID); err != nil {
		return err
	}
	id, err := strconv.ParseUint(answers["CHAP_I"], 0, 8)
	if err != nil || answers["CHAP_A"] != sha256ID {
		return fmt.Errorf("CHAP_A=%s CHAP_I=%s", answers["CHAP_A"], answers["CHAP_I"])
	}
	challenge, err := keys.ParseBinary(answers["CHAP_C"])
	if err != nil {
		return err
	}
	say := []string{"CHAP_N=" + auth.Name, "CHAP_R=0x" + hex.EncodeToString(response(byte(id), auth.Secret, challenge))}
	own := make([]byte, 1+16) // identifier and challenge
	if auth.Target != "" {
		if _, err := rand.Read(own); err != nil {
			return err
		}
		say = append(say, "CHAP_I="+strconv.Itoa(int(own[0])), "CHAP_C=0x"+hex.EncodeToString(own[1:]))
	}
	if answers, err = d.login(pdu.SecurityNegotiation, pdu.LoginOperationalNegotiation, say...); err != nil {
		return err
	}
	if auth.Target != "" {
		proof, err := keys.ParseBinary(answers["CHAP_R"])
		if err != nil || answers["CHAP_N"] == "" {
			return fmt.Errorf("CHAP_N=%s CHAP_R=%s", answers["CHAP_N"], answers["CHAP_R"])
		}
		d.Mutual = bytes.Equal(proof, response(own[0], auth.Target, own[1:]))
	}
	return nil
}

// want takes the answer to a request.
func (d *Dialog) want(op pdu.Opcode, itt uint32) (PDU, error) {
	p, err := d.link.receive()
	if err != nil {
		return p, err
	}
	if p.BHS.Opcode() != op || p.BHS.ITT() != itt {
		return p, fmt.Errorf("%v of task %#x where %v of %#x is due", p.BHS.Opcode(), p.BHS.ITT(), op, itt)
	}
	d.n.ExpStatSN = p.BHS.StatSN() + 1
	return p, nil
}

// Request returns the header of a request with the next tag and, unless it is immediate, the next CmdSN.
func (d *Dialog) Request(op pdu.Opcode, flags byte, immediate bool) pdu.BHS {
	return d.n.Request(op, flags, immediate)
}

// Send sends a request and does not wait for an answer. After that, methods that take answers may take this one.
func (d *Dialog) Send(h pdu.BHS, data []byte) error {
	h.SetDataSegmentLength(len(data))
	return d.link.send(h, data)
}

// SendTargets returns the answer to SendTargets=which.
func (d *Dialog) SendTargets(which string) ([]keys.Pair, error) {
	var text []byte
	h := d.n.Request(pdu.TextReq, pdu.FlagF, false)
	itt, ttt, data := h.ITT(), uint32(pdu.ReservedTag), []byte("SendTargets="+which+"\x00")
	for {
		h.SetITT(itt)
		h.SetTTT(ttt)
		h.SetDataSegmentLength(len(data))
		if err := d.link.send(h, data); err != nil {
			return nil, err
		}
		p, err := d.want(pdu.TextResp, itt)
		if err != nil {
			return nil, err
		}
		if text = append(text, p.Data...); p.BHS.Final() {
			return keys.ParseText(text)
		}
		ttt, data = p.BHS.TTT(), nil
		h = d.n.Request(pdu.TextReq, pdu.FlagF, false)
	}
}

// TMF runs a task management function and returns the response code.
func (d *Dialog) TMF(function byte, lun [8]byte) (byte, error) {
	h := d.n.Request(pdu.TaskMgmtReq, pdu.FlagF|function, true)
	h.SetLUN(lun)
	h.SetReferencedTaskTag(pdu.ReservedTag)
	if err := d.link.send(h, nil); err != nil {
		return 0, err
	}
	p, err := d.want(pdu.TaskMgmtResp, h.ITT())
	if err != nil {
		return 0, err
	}
	return p.BHS.Response(), nil
}

// Do runs a command with immediate data, or with memory for data-in. Unit
// attentions are taken first. in is what has come.
func (d *Dialog) Do(lun [8]byte, cdb, out []byte, in int) (status byte, sense, data []byte, err error) {
	for {
		flags := byte(pdu.FlagF | pdu.AttrSimple)
		memory := make([]byte, in)
		switch {
		case in > 0:
			flags |= pdu.FlagR
		case len(out) > 0:
			flags |= pdu.FlagW
		}
		h := d.n.Request(pdu.SCSICommand, flags, false)
		h.SetLUN(lun)
		h.SetEDTL(uint32(in + len(out)))
		h.SetCDB(append(cdb[:len(cdb):len(cdb)], make([]byte, 16-len(cdb))...))
		h.SetDataSegmentLength(len(out))
		p, n, err := d.link.command(h, out, memory)
		if err != nil {
			return 0, nil, nil, err
		}
		d.n.ExpStatSN = p.BHS.StatSN() + 1
		if in > 0 && p.BHS.Flags()&pdu.FlagUnderflow != 0 {
			n = in - int(p.BHS.Residual())
		}
		if sense = nil; len(p.Data) >= 2 && p.BHS.Opcode() == pdu.SCSIResponse {
			sense = p.Data[2:][:binary.BigEndian.Uint16(p.Data)]
		}
		if p.BHS.Status() == 0x02 && len(sense) > 2 && sense[2]&0x0f == 0x06 {
			continue
		}
		return p.BHS.Status(), sense, memory[:n], nil
	}
}

// An rdmaLink is a Session that does not serve.
type rdmaLink struct{ s *Session }

func (l *rdmaLink) Close() error { return l.s.Close() }

func (l *rdmaLink) loginKeys(discovery bool) []string {
	if discovery {
		return linuxKeys
	}
	return append(append([]string(nil), linuxKeys...), linuxNormalKeys...)
}

func (l *rdmaLink) enter(context.Context, map[string]string) (link, error) { return l, nil }

func (l *rdmaLink) send(bhs pdu.BHS, data []byte) error { return l.s.Send(iser.Header{}, bhs, data) }

func (l *rdmaLink) receive() (PDU, error) { return l.s.Receive() }

func (l *rdmaLink) command(bhs pdu.BHS, out, in []byte) (PDU, int, error) {
	var h iser.Header
	if len(in) > 0 {
		var region rdma.Region
		h.Read = iser.Remote{Valid: true, STag: l.s.rc.Register(&region, in, l.s.o.BaseOffset, rdma.RemoteWrite),
			Base: l.s.o.BaseOffset}
		defer l.s.rc.Deregister(&region)
	}
	if err := l.s.Send(h, bhs, out); err != nil {
		return PDU{}, 0, err
	}
	p, err := l.s.Receive()
	if err == nil && (p.BHS.Opcode() != pdu.SCSIResponse || p.BHS.ITT() != bhs.ITT()) {
		err = fmt.Errorf("%v of task %#x instead of the status of %#x", p.BHS.Opcode(), p.BHS.ITT(), bhs.ITT())
	}
	return p, len(in), err
}

// A tcpLink is plain TCP without digests.
type tcpLink struct{ net.Conn }

func (l *tcpLink) loginKeys(discovery bool) []string {
	if discovery {
		return linuxKeys
	}
	return append([]string{
		"HeaderDigest=None", "DataDigest=None", "InitialR2T=No", "ImmediateData=Yes", "MaxBurstLength=262144",
		"FirstBurstLength=65536",
		"MaxOutstandingR2T=1", "MaxConnections=1", "DataPDUInOrder=Yes", "DataSequenceInOrder=Yes",
		"MaxRecvDataSegmentLength=65536",
	}, linuxKeys...)
}

func (l *tcpLink) enter(context.Context, map[string]string) (link, error) { return l, nil }

func (l *tcpLink) send(bhs pdu.BHS, data []byte) error {
	b := append(append([]byte(nil), bhs...), data...)
	_, err := l.Write(append(b, make([]byte, pdu.Padded(len(data))-len(data))...))
	return err
}

func (l *tcpLink) receive() (PDU, error) {
	bhs := make(pdu.BHS, 48)
	if _, err := io.ReadFull(l, bhs); err != nil {
		return PDU{}, err
	}
	n := bhs.DataSegmentLength()
	data := make([]byte, pdu.Padded(n))
	if _, err := io.ReadFull(l, data); err != nil {
		return PDU{}, err
	}
	return PDU{BHS: bhs, Data: data[:n], Len: len(bhs) + len(data)}, nil
}

func (l *tcpLink) command(bhs pdu.BHS, out, in []byte) (PDU, int, error) {
	if err := l.send(bhs, out); err != nil {
		return PDU{}, 0, err
	}
	n := 0
	for {
		p, err := l.receive()
		if err != nil {
			return p, n, err
		}
		if p.BHS.Opcode() == pdu.AsyncMessage && p.BHS.AsyncEvent() == pdu.AsyncSCSIEvent {
			continue // a SCSI event, for example of a change of the LUNs
		}
		if p.BHS.ITT() != bhs.ITT() {
			return p, n, fmt.Errorf("%v of task %#x, not of %#x", p.BHS.Opcode(), p.BHS.ITT(), bhs.ITT())
		}
		switch op := p.BHS.Opcode(); op {
		case pdu.SCSIResponse:
			return p, n, nil
		case pdu.DataIn:
			off := int(p.BHS.BufferOffset())
			if off != n || off+len(p.Data) > len(in) {
				return p, n, fmt.Errorf("Data-In of %d bytes at %d, behind %d of %d", len(p.Data), off, n, len(in))
			}
			n += copy(in[off:], p.Data)
			if p.BHS.Flags()&pdu.FlagS != 0 {
				return p, n, nil
			}
		default:
			return p, n, fmt.Errorf("%v instead of data or status", op)
		}
	}
}

// A stepUpLink is TCP until the end of a login that agrees on RDMAExtensions=Yes.
type stepUpLink struct {
	tcpLink
	o Options
}

func (l *stepUpLink) loginKeys(discovery bool) []string {
	if discovery {
		return l.tcpLink.loginKeys(true)
	}
	return append(l.tcpLink.loginKeys(false), "InitiatorRecvDataSegmentLength=262144",
		"TargetRecvDataSegmentLength=8192", "RDMAExtensions=Yes")
}

func (l *stepUpLink) enter(ctx context.Context, answers map[string]string) (link, error) {
	if answers["RDMAExtensions"] != "Yes" {
		return &l.tcpLink, nil
	}
	s := &Session{nc: l.Conn, o: l.o}
	if err := s.startRDMA(ctx); err != nil {
		return l, err
	}
	return &rdmaLink{s: s}, nil
}
