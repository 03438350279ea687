package initiator

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"strings"

	"github.com/iser-target/iser-target/iscsi/initiator"
	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/iscsi/pdu"
	iserinitiator "github.com/iser-target/iser-target/iser/initiator"
	"github.com/iser-target/iser-target/security"
	"github.com/iser-target/iser-target/tests/testkit/header"
)

// A Dialog is an initiator that does one thing at a time, the same over iSER and
// over plain TCP, and gives up with the context of its Dial. It drives a Carrier of iscsi/initiator, and writes requests of its
// own. It takes no part in what the transports differ in: tests of that use Session or send PDUs themselves.
type Dialog struct {
	Login  pdu.LoginResponse // the last one
	Keys   []keys.Pair       // the target's answers during login
	Mutual bool              // the target has proved who it is

	transport string
	nc        net.Conn
	carrier   initiator.Carrier
	ctx       context.Context
	stop      func() bool // context.AfterFunc
	o         Options
	n         header.Numbers
	cmd       *initiator.Command // in progress; nil: none
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
	d := &Dialog{transport: transport, o: o.Complete(), ctx: ctx}
	d.n.CmdSN = d.o.CmdSN
	var dialer net.Dialer
	var err error
	if d.nc, err = dialer.DialContext(ctx, "tcp", addr); err != nil {
		return nil, err
	}
	switch transport {
	case "iser":
		if err := d.startRDMA(); err != nil {
			return nil, err
		}
	case "tcp", "step-up":
		d.carrier = initiator.NewTCP(d.nc)
	default:
		d.nc.Close()
		return nil, fmt.Errorf("no transport %q", transport)
	}
	first := d.carrier // whatever follows it has the same connection
	d.stop = context.AfterFunc(ctx, func() { first.Close() })
	return d, nil
}

func (d *Dialog) startRDMA() (err error) {
	c, err := iserinitiator.Transport{RDMA: d.o.RDMA}.Start(d.ctx, d.nc)
	if err == nil {
		d.carrier = c
	}
	return err
}

// Close drops the connection.
func (d *Dialog) Close() error {
	d.stop()
	return d.carrier.Close()
}

// LogIn logs in; with auth it begins in the security stage. A refusal is a
// *LoginError, and d.Keys has what came with it.
func (d *Dialog) LogIn(auth *CHAP) error {
	names := pairs("InitiatorName="+d.o.Name, "SessionType=Discovery")
	if d.o.Target != "" {
		names = pairs("InitiatorName="+d.o.Name, "TargetName="+d.o.Target, "SessionType=Normal")
	}
	if auth != nil {
		chap := initiator.CHAP{Name: auth.Name, Secret: security.Secret(auth.Secret), TargetSecret: security.Secret(auth.Target)}
		var err error
		if d.Mutual, err = chap.Authenticate(names, d.authenticate); err != nil {
			return err
		}
		names = nil
	}
	text := append(append(names, pairs(d.loginKeys()...)...), pairs(d.o.Keys...)...)
	answers, err := d.login(pdu.LoginOperationalNegotiation, pdu.FullFeaturePhase, text)
	if err != nil {
		return err
	}
	if !d.Login.Transit {
		return fmt.Errorf("login takes another round: %+v", d.Login)
	}
	// All data-out goes with the command, as far as the Carrier can send it.
	p := initiator.Params{TSIH: d.Login.TSIH, Answers: answers, ImmediateData: true, FirstBurstLength: pdu.MaxData,
		MaxBurstLength: pdu.MaxData, MaxSendSegment: pdu.MaxData}
	if d.transport == "step-up" && answers["RDMAExtensions"] == "Yes" {
		if err := d.startRDMA(); err != nil {
			return err
		}
	}
	if d.transport == "iser" || answers["RDMAExtensions"] == "Yes" {
		p.MaxSendSegment = 8192 // TargetRecvDataSegmentLength of linuxNormalKeys
	}
	return d.carrier.EnterFullFeature(p, d.find)
}

// find returns the command in progress, if it has that tag.
func (d *Dialog) find(itt uint32) *initiator.Command {
	if d.cmd == nil || d.cmd.BHS().ITT() != itt {
		return nil
	}
	return d.cmd
}

// loginKeys returns the operational keys of d's transport.
func (d *Dialog) loginKeys() []string {
	var text []string
	switch {
	case d.o.Target == "":
	case d.transport == "iser":
		return append(append(text, linuxKeys...), linuxNormalKeys...)
	default:
		text = append(text, "HeaderDigest=None", "DataDigest=None", "InitialR2T=No", "ImmediateData=Yes", "MaxBurstLength=262144",
			"FirstBurstLength=65536", "MaxOutstandingR2T=1", "MaxConnections=1", "DataPDUInOrder=Yes", "DataSequenceInOrder=Yes",
			"MaxRecvDataSegmentLength=65536")
		if d.transport == "step-up" {
			text = append(text, joiningKeys...)
			text = append(text, "RDMAExtensions=Yes")
		}
	}
	return append(text, linuxKeys...)
}

// pairs returns each "key=value" as a Pair.
func pairs(text ...string) (list []keys.Pair) {
	for _, kv := range text {
		key, value, _ := strings.Cut(kv, "=")
		list = append(list, keys.Pair{Key: key, Value: value})
	}
	return list
}

// authenticate does one exchange of initiator.CHAP. A target that does without CHAP is an error.
func (d *Dialog) authenticate(csg, nsg pdu.Stage, text []keys.Pair) (map[string]string, bool, error) {
	answers, err := d.login(csg, nsg, text)
	if m, ok := answers["AuthMethod"]; ok && m != "CHAP" {
		err = fmt.Errorf("AuthMethod=%s", m)
	}
	return answers, d.Login.Transit, err
}

// login does one exchange. The answers are also appended to d.Keys.
func (d *Dialog) login(csg, nsg pdu.Stage, text []keys.Pair) (map[string]string, error) {
	req := pdu.LoginRequest{Transit: nsg != csg, CSG: csg, NSG: nsg, ISID: d.o.ISID, CmdSN: d.n.CmdSN,
		ExpStatSN: d.n.ExpStatSN}
	if err := d.Send(pdu.BHS(req.Append(nil)), keys.AppendPair(nil, text...)); err != nil {
		return nil, err
	}
	var p initiator.PDU
	if err := d.carrier.Receive(&p); err != nil {
		return nil, err
	}
	if p.BHS.Opcode() != pdu.LoginResp {
		return nil, fmt.Errorf("%v where a Login Response is due", p.BHS.Opcode())
	}
	d.Login = pdu.ParseLoginResponse(p.BHS)
	d.n.ExpStatSN = d.Login.StatSN + 1
	list, err := keys.ParseText(p.Data)
	if err != nil {
		return nil, err
	}
	d.Keys = append(d.Keys, list...)
	if d.Login.Status != 0 {
		return nil, &LoginError{Status: d.Login.Status}
	}
	answers := map[string]string{}
	for _, p := range list {
		answers[p.Key] = p.Value
	}
	return answers, nil
}

// want takes the answer to a request.
func (d *Dialog) want(op pdu.Opcode, itt uint32) (p initiator.PDU, err error) {
	if err := d.carrier.Receive(&p); err != nil {
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
	if err := d.carrier.Post(h, data); err != nil {
		return err
	}
	d.carrier.Flush()
	return nil
}

// SendTargets returns the answer to SendTargets=which.
func (d *Dialog) SendTargets(which string) ([]keys.Pair, error) {
	var text []byte
	h := d.n.Request(pdu.TextReq, pdu.FlagF, false)
	itt, ttt, data := h.ITT(), uint32(pdu.ReservedTag), []byte("SendTargets="+which+"\x00")
	for {
		h.SetITT(itt)
		h.SetTTT(ttt)
		if err := d.Send(h, data); err != nil {
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
	if err := d.Send(h, nil); err != nil {
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
		c := &initiator.Command{In: make([]byte, in), Out: out}
		switch {
		case in > 0 && len(out) > 0:
			return 0, nil, nil, errors.New("a Dialog runs no bidirectional commands")
		case in > 0:
			flags |= pdu.FlagR
		case len(out) > 0:
			flags |= pdu.FlagW
		}
		h := d.n.Request(pdu.SCSICommand, flags, false)
		h.SetLUN(lun)
		h.SetEDTL(uint32(in + len(out)))
		h.SetCDB(append(cdb[:len(cdb):len(cdb)], make([]byte, 16-len(cdb))...))
		copy(c.BHS(), h)
		status, sense, err := d.run(c)
		if err != nil {
			return 0, nil, nil, err
		}
		if status == 0x02 && len(sense) > 2 && sense[2]&0x0f == 0x06 {
			continue
		}
		return status, sense, c.In[:in-int(max(c.Residual, 0))], nil
	}
}

// run runs c, whose BHS is complete, and sets c.Residual.
func (d *Dialog) run(c *initiator.Command) (status byte, sense []byte, err error) {
	c.Hold() // Dialog's own: c comes back to nobody
	d.cmd = c
	defer func() { d.cmd = nil }()
	if err := d.carrier.PostCommand(c); err != nil {
		return 0, nil, err
	}
	defer d.carrier.End(c)
	d.carrier.Flush()
	var p initiator.PDU
	for {
		if err := d.carrier.Receive(&p); err != nil {
			return 0, nil, err
		}
		if p.BHS.Opcode() != pdu.AsyncMessage || p.BHS.AsyncEvent() != pdu.AsyncSCSIEvent {
			break
		} // else a SCSI event, for example of a change of the LUNs
	}
	op := p.BHS.Opcode()
	if op != pdu.SCSIResponse && op != pdu.DataIn || p.BHS.ITT() != c.BHS().ITT() {
		return 0, nil, fmt.Errorf("%v of task %#x instead of the status of %#x", op, p.BHS.ITT(), c.BHS().ITT())
	}
	d.n.ExpStatSN = p.BHS.StatSN() + 1
	if status = p.BHS.Status(); len(c.In) > 0 && p.BHS.Flags()&pdu.FlagUnderflow != 0 {
		if c.Residual = int64(p.BHS.Residual()); c.Residual > int64(len(c.In)) {
			return 0, nil, fmt.Errorf("%d bytes are missing of %d", c.Residual, len(c.In))
		}
	}
	if op == pdu.SCSIResponse && len(p.Data) >= 2 {
		sense = append(sense, p.Data[2:][:binary.BigEndian.Uint16(p.Data)]...)
	}
	if status == 0 {
		err = d.carrier.Check(c)
	}
	return status, sense, err
}
