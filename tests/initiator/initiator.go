// Package initiator is an iSER initiator for tests and benchmarks: it logs in
// as Linux does, runs SCSI commands, and lets a test send whatever it wants
// and see what comes back. It is no part of the target.
package initiator

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"

	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/iser"
	"github.com/iser-target/iser-target/rdma"
)

// Options of a connection. The zero value of a field means its default.
type Options struct {
	Name   string   // InitiatorName; default iqn.2026-11.io.github.iser-target:initiator
	Target string   // TargetName; empty: a discovery session
	ISID   [6]byte  // default 00023d000001
	Keys   []string // further "key=value" of the first Login Request, behind Linux's
	RDMA   rdma.Options
	// NoInvalidate tells the target not to use Send with Invalidate.
	NoInvalidate bool
	// CmdSN is the first one; default 1.
	CmdSN uint32
	// BaseOffset is where the tagged offsets of advertised memory start;
	// default a number like Linux's kernel addresses.
	BaseOffset uint64
}

// PDU is one that the target sent, with memory of its own.
type PDU struct {
	BHS         pdu.BHS
	Data        []byte
	Invalidated rdma.STag // by Send with Invalidate; 0: none
	Len         int       // of the message, in octets
}

// A Session is one connection in full feature phase or on its way there.
type Session struct {
	rc   *rdma.Conn
	o    Options
	TSIH uint16
	Keys []keys.Pair // the target's answers during login

	// Other receives every PDU that is no SCSI Response, and every SCSI
	// Response that nobody waits for.
	Other chan PDU
	done  chan struct{} // closed when the connection has ended
	err   error         // why; valid when done is closed

	mu       sync.Mutex
	room     sync.Cond // MaxCmdSN has moved, or the connection has ended
	cmdSN    uint32    // of the next command
	maxCmdSN uint32
	statSN   uint32 // ExpStatSN
	itt      uint32
	cmds     map[uint32]*Command
	ended    bool
}

// LoginError is a refusal of the login.
type LoginError struct{ Status pdu.LoginStatus }

func (e *LoginError) Error() string { return fmt.Sprintf("login refused: %v", e.Status) }

// Connect starts MPA on a new connection to addr.
func Connect(ctx context.Context, addr string, o Options) (*Session, error) {
	var d net.Dialer
	nc, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	o = o.Complete()
	flags := byte(0x80)
	if o.NoInvalidate {
		flags |= 0x40
	}
	o.RDMA.Private = []byte{flags, 0, 0, 0}
	if o.RDMA.MaxSend == 0 {
		o.RDMA.MaxSend = 28 + 48 + 8192
	}
	rc, _, err := rdma.Initiate(ctx, nc, o.RDMA)
	if err != nil {
		return nil, err
	}
	s := &Session{rc: rc, o: o, Other: make(chan PDU, 256), done: make(chan struct{}), cmdSN: o.CmdSN, cmds: map[uint32]*Command{}}
	s.room.L = &s.mu
	return s, nil
}

// Complete returns o with defaults in place of zeros.
func (o Options) Complete() Options {
	if o.Name == "" {
		o.Name = "iqn.2026-11.io.github.iser-target:initiator"
	}
	if o.ISID == [6]byte{} {
		o.ISID = [6]byte{0, 2, 0x3d, 0, 0, 1}
	}
	if o.CmdSN == 0 {
		o.CmdSN = 1
	}
	if o.BaseOffset == 0 {
		o.BaseOffset = 0xffff888012345000
	}
	return o
}

// Login connects and logs in.
func Login(ctx context.Context, addr string, o Options) (*Session, error) {
	s, err := Connect(ctx, addr, o)
	if err != nil {
		return nil, err
	}
	if err := s.Login(); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// linuxKeys is what open-iscsi offers for an iser interface.
var linuxKeys = []string{
	"DefaultTime2Wait=2", "DefaultTime2Retain=0", "IFMarker=No", "OFMarker=No", "ErrorRecoveryLevel=0",
}

var linuxNormalKeys = []string{
	"InitialR2T=No", "ImmediateData=Yes", "MaxBurstLength=16776192", "FirstBurstLength=262144", "MaxOutstandingR2T=1",
	"MaxConnections=1", "DataPDUInOrder=Yes", "DataSequenceInOrder=Yes", "InitiatorRecvDataSegmentLength=262144",
	"TargetRecvDataSegmentLength=8192", "RDMAExtensions=Yes",
}

// LoginRequest is the one Login Request of a login in one exchange.
func (o Options) LoginRequest() (bhs pdu.BHS, data []byte) {
	text := []string{"InitiatorName=" + o.Name, "InitiatorAlias=test"}
	if o.Target == "" {
		text = append(text, "SessionType=Discovery")
	} else {
		text = append(text, "TargetName="+o.Target, "SessionType=Normal")
	}
	text = append(text, linuxKeys...)
	if o.Target != "" {
		text = append(text, linuxNormalKeys...)
	}
	text = append(text, o.Keys...)
	for _, kv := range text {
		data = append(append(data, kv...), 0)
	}
	req := pdu.LoginRequest{Transit: true, CSG: pdu.LoginOperationalNegotiation, NSG: pdu.FullFeaturePhase, ISID: o.ISID, CmdSN: o.CmdSN}
	bhs = req.Append(nil)
	bhs.SetDataSegmentLength(len(data))
	return bhs, data
}

// Login runs the login phase in one exchange and starts to receive.
func (s *Session) Login() error {
	bhs, data := s.o.LoginRequest()
	if err := s.Send(iser.Header{}, bhs, data); err != nil {
		return err
	}
	p, err := s.Receive()
	if err != nil {
		return err
	}
	if p.BHS.Opcode() != pdu.LoginResp {
		return fmt.Errorf("%v where a Login Response is due", p.BHS.Opcode())
	}
	rsp := pdu.ParseLoginResponse(p.BHS)
	if rsp.Status != 0 {
		return &LoginError{rsp.Status}
	}
	if !rsp.Transit || rsp.NSG != pdu.FullFeaturePhase {
		return fmt.Errorf("login takes another round: %+v", rsp)
	}
	if s.Keys, err = keys.ParseText(p.Data); err != nil {
		return err
	}
	s.TSIH, s.cmdSN, s.maxCmdSN, s.statSN = rsp.TSIH, rsp.ExpCmdSN, rsp.MaxCmdSN, rsp.StatSN+1
	go s.serve()
	return nil
}

// Key is the target's answer to a key, or "".
func (s *Session) Key(name string) string {
	for _, p := range s.Keys {
		if p.Key == name {
			return p.Value
		}
	}
	return ""
}

// Stream is the RDMAP stream below.
func (s *Session) Stream() *rdma.Conn { return s.rc }

// Send sends any PDU behind any iSER header. data is padded for Login and Text
// Requests, as Linux does.
func (s *Session) Send(h iser.Header, bhs pdu.BHS, data []byte) error {
	head := make([]byte, iser.HeaderLen, iser.HeaderLen+len(bhs))
	h.Put(head)
	if op := bhs.Opcode(); op == pdu.LoginReq || op == pdu.TextReq {
		data = append(data[:len(data):len(data)], make([]byte, pdu.Padded(len(data))-len(data))...)
	}
	return s.SendRaw(append(head, bhs...), data)
}

// SendRaw sends any message.
func (s *Session) SendRaw(head, data []byte) error {
	if err := s.rc.Post(&rdma.WorkRequest{Op: rdma.Send, Head: head, Data: data}); err != nil {
		return err
	}
	s.rc.Flush()
	return nil
}

// Receive returns the next PDU before login has succeeded.
func (s *Session) Receive() (PDU, error) {
	var ev rdma.Event
	for {
		if err := s.rc.Receive(&ev); err != nil {
			return PDU{}, err
		}
		if ev.Read == nil {
			return parse(&ev)
		}
	}
}

const headLen = iser.HeaderLen + 48

// check looks at what every message of a target must have: an iSER header
// without STags (RFC 7145, section 9.2), all zero but for the opcode, and a BHS.
func check(b []byte) error {
	if len(b) < headLen || [iser.HeaderLen]byte(b) != [iser.HeaderLen]byte{0x10} {
		return fmt.Errorf("message of %d octets: % x", len(b), b[:min(len(b), iser.HeaderLen)])
	}
	return nil
}

func parse(ev *rdma.Event) (PDU, error) {
	if err := check(ev.Data); err != nil {
		return PDU{}, err
	}
	b := append([]byte(nil), ev.Data...)
	p := PDU{BHS: pdu.BHS(b[iser.HeaderLen:headLen]), Data: b[headLen:], Len: len(b)}
	if ev.Invalidates {
		p.Invalidated = ev.Invalidated
	}
	n := p.BHS.DataSegmentLength()
	if n > len(p.Data) || len(p.Data) > pdu.Padded(n) {
		return PDU{}, fmt.Errorf("%v announces %d octets of data and has %d", p.BHS.Opcode(), n, len(p.Data))
	}
	p.Data = p.Data[:n]
	return p, nil
}

// serve receives until the connection ends.
func (s *Session) serve() {
	var ev rdma.Event
	var err error
	for err == nil {
		if err = s.rc.Receive(&ev); err == nil && ev.Read == nil {
			err = s.dispatch(&ev)
		}
	}
	s.mu.Lock()
	s.ended, s.err = true, err
	cmds := s.cmds
	s.cmds = nil
	s.mu.Unlock()
	s.room.Broadcast()
	close(s.done)
	for _, c := range cmds {
		c.finish(s, err)
	}
}

func (s *Session) dispatch(ev *rdma.Event) error {
	b := ev.Data
	if err := check(b); err != nil {
		return err
	}
	bhs := pdu.BHS(b[iser.HeaderLen:headLen])
	switch op := bhs.Opcode(); {
	case s.o.Target != "" && len(b) > headLen+128: // longer than what ib_iser posts
		return fmt.Errorf("%v of %d octets", op, len(b))
	case (op == pdu.TaskMgmtResp || op == pdu.LogoutResp) && len(b) != headLen:
		return fmt.Errorf("%v of %d octets instead of %d", op, len(b), headLen)
	}
	s.mu.Lock()
	if bhs.Opcode() != pdu.NOPIn || bhs.ITT() != pdu.ReservedTag {
		s.statSN = bhs.StatSN() + 1
	}
	if bhs.MaxCmdSN() != s.maxCmdSN && pdu.Before(s.maxCmdSN, bhs.MaxCmdSN()) {
		s.maxCmdSN = bhs.MaxCmdSN()
		s.room.Broadcast()
	}
	c := s.cmds[bhs.ITT()]
	if bhs.Opcode() == pdu.SCSIResponse {
		delete(s.cmds, bhs.ITT())
	} else {
		c = nil
	}
	s.mu.Unlock()
	if c != nil {
		return c.response(s, bhs, b[iser.HeaderLen+48:], ev)
	}
	p, err := parse(ev)
	if err != nil {
		return err
	}
	if bhs.Opcode() == pdu.NOPIn && bhs.ITT() == pdu.ReservedTag && bhs.TTT() != pdu.ReservedTag {
		return s.pong(bhs)
	}
	select {
	case s.Other <- p:
		return nil
	default:
		return errors.New("nobody takes the target's PDUs")
	}
}

// pong answers the target's ping.
func (s *Session) pong(ping pdu.BHS) error {
	var b [48]byte
	r := pdu.BHS(b[:])
	r.Reset(pdu.NOPOut, pdu.FlagF)
	r.SetImmediate()
	r.SetLUN(ping.LUN())
	r.SetITT(pdu.ReservedTag)
	r.SetTTT(ping.TTT())
	return s.Control(r, nil)
}

// Control stamps CmdSN and ExpStatSN into an immediate PDU and sends it.
func (s *Session) Control(bhs pdu.BHS, data []byte) error {
	s.mu.Lock()
	bhs.SetCmdSN(s.cmdSN)
	bhs.SetExpStatSN(s.statSN)
	s.mu.Unlock()
	bhs.SetDataSegmentLength(len(data))
	return s.Send(iser.Header{}, bhs, data)
}

// NewITT draws a task tag.
func (s *Session) NewITT() uint32 {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.itt++
	return s.itt
}

// Next waits for a PDU on Other.
func (s *Session) Next(ctx context.Context) (PDU, error) {
	select {
	case p := <-s.Other:
		return p, nil
	case <-s.done:
		select {
		case p := <-s.Other:
			return p, nil
		default:
			return PDU{}, s.err
		}
	case <-ctx.Done():
		return PDU{}, ctx.Err()
	}
}

// Done is closed when the connection has ended; Err tells why.
func (s *Session) Done() <-chan struct{} { return s.done }
func (s *Session) Err() error            { <-s.done; return s.err }

// Close drops the connection.
func (s *Session) Close() error { return s.rc.Close() }

// Logout ends the session in an orderly way.
func (s *Session) Logout(ctx context.Context) error {
	var b [48]byte
	r := pdu.BHS(b[:])
	r.Reset(pdu.LogoutReq, pdu.FlagF)
	r.SetImmediate()
	r.SetITT(s.NewITT())
	if err := s.Control(r, nil); err != nil {
		return err
	}
	for {
		p, err := s.Next(ctx)
		if err != nil {
			return err
		}
		if p.BHS.Opcode() != pdu.LogoutResp {
			continue
		}
		err = s.rc.Close()
		<-s.done
		return err
	}
}
