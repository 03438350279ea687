// Package initiator is an iSER initiator for tests and benchmarks: it logs in
// as Linux does, or on the byte stream as RFC 7145 describes it, runs SCSI commands, and lets a
// test send anything
// and see what comes back. It is no part of the target. The Carriers of iser/initiator and iscsi/initiator have its connections.
package initiator

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/iser-target/iser-target/iscsi/initiator"
	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/iser"
	iserinitiator "github.com/iser-target/iser-target/iser/initiator"
	"github.com/iser-target/iser-target/rdma"
)

// Options of a connection. The zero value of a field means its default.
type Options struct {
	Name   string  // InitiatorName; default iqn.2026-11.io.github.iser-target:initiator
	Target string  // TargetName; empty: a discovery session
	ISID   [6]byte // default 00023d000001
	// further "key=value" of the first Login Request, after Linux's; ErrorRecoveryLevel,
	// TargetRecvDataSegmentLength and the like instead of its
	Keys []string
	RDMA rdma.Options
	// NoInvalidate tells the target not to use Send with Invalidate.
	NoInvalidate bool
	// CmdSN is the first one; default 1.
	CmdSN uint32
	// Stream makes the login one on the byte stream, before MPA startup (RFC
	// 7145, section 5.1).
	Stream bool
	// Hello declares iSERHelloRequired=Yes and makes an iSER Hello the first
	// message after login.
	Hello bool
	// Connections is what MaxConnections offers; default 1.
	Connections int
	// Recovery offers ErrorRecoveryLevel 2 and Time2Retain 20.
	Recovery bool
	// Join makes the connection one of that session, with this CID.
	Join *Session
	CID  uint16
	// BaseOffset is where the tagged offsets of advertised memory start;
	// default a number like Linux's kernel addresses.
	BaseOffset uint64
}

// PDU is one that the target sent, with memory of its own.
type PDU struct {
	BHS         pdu.BHS
	Data        []byte
	Invalidated rdma.STag // by Send with Invalidate; 0: none
	Len         int       // of the message, in bytes
}

// A Session is one connection in full feature phase or on its way there.
type Session struct {
	nc      net.Conn
	carrier *iserinitiator.Carrier // nil before MPA startup
	o       Options
	TSIH    uint16
	Keys    []keys.Pair // the target's answers during login
	ORD     uint16      // iSER-ORD of the HelloReply

	// Other receives every PDU that is no SCSI Response, and every SCSI
	// Response that nobody waits for.
	Other chan PDU
	done  chan struct{} // closed when the connection has ended
	err   error         // why; valid when done is closed

	// The longest data segments that login has agreed on, in bytes: of a PDU to
	// the target, and of one from it (RFC 7145, section 6.2).
	maxSend, maxRecv int

	*numbers
	statSN uint32 // ExpStatSN
	cmds   map[uint32]*Command
	ended  bool
}

// numbers are what the connections of a session have in common. mu guards all of
// the connections.
type numbers struct {
	mu       sync.Mutex
	room     sync.Cond // MaxCmdSN has moved, or a connection has ended
	cmdSN    uint32    // of the next command
	maxCmdSN uint32
	itt      uint32
}

// A LoginError is a refusal of the login.
type LoginError = initiator.LoginError

// Connect makes a new connection to addr and, unless login is to be on the byte
// stream, starts MPA on it.
func Connect(ctx context.Context, addr string, o Options) (*Session, error) {
	var d net.Dialer
	nc, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	o = o.Complete()
	s := &Session{nc: nc, o: o, Other: make(chan PDU, 256), done: make(chan struct{}), cmds: map[uint32]*Command{}}
	if o.Join != nil {
		s.numbers, s.TSIH = o.Join.numbers, o.Join.TSIH
	} else {
		s.numbers = &numbers{cmdSN: o.CmdSN}
		s.room.L = &s.mu
	}
	if !o.Stream {
		if err := s.startRDMA(ctx); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// startRDMA completes MPA startup. After an error the connection is closed.
func (s *Session) startRDMA(ctx context.Context) (err error) {
	t := iserinitiator.Transport{RDMA: s.o.RDMA, Hello: s.o.Hello, NoInvalidate: s.o.NoInvalidate, WholeData: !s.o.solicitedOnly(),
		BaseOffset: s.o.BaseOffset}
	s.carrier, err = t.Start(ctx, s.nc)
	return err
}

// Complete returns o with defaults in place of zeros.
func (o Options) Complete() Options {
	if o.Name == "" {
		o.Name = "iqn.2026-11.io.github.iser-target:initiator"
	}
	if o.ISID == [6]byte{} {
		o.ISID = [6]byte{0, 2, 0x3d, 0, 0, 1}
	}
	if o.Connections == 0 {
		o.Connections = 1
	}
	if o.CmdSN == 0 {
		o.CmdSN = 1
	}
	if o.BaseOffset == 0 {
		o.BaseOffset = 0xffff888012345000
	}
	return o
}

// solicitedOnly reports whether the initiator advertises only memory that the target has to ask
// for (TaggedBufferForSolicitedDataOnly; RFC 7145, section 6.9). Without that key in Keys this
// holds for logins in RDMA mode, as in Linux.
func (o *Options) solicitedOnly() bool {
	const key = "TaggedBufferForSolicitedDataOnly="
	return slices.Contains(o.Keys, key+"Yes") || !o.Stream && !slices.Contains(o.Keys, key+"No")
}

// Login connects and logs in.
func Login(ctx context.Context, addr string, o Options) (*Session, error) {
	s, err := Connect(ctx, addr, o)
	if err != nil {
		return nil, err
	}
	if err := s.Login(ctx); err != nil {
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

// joiningKeys are those of them that a connection has which joins a session.
var joiningKeys = []string{"InitiatorRecvDataSegmentLength=262144", "TargetRecvDataSegmentLength=8192"}

// LoginRequest returns the Login Request of a login in one exchange.
func (o Options) LoginRequest() (bhs pdu.BHS, data []byte) {
	text := []string{"InitiatorName=" + o.Name, "InitiatorAlias=test"}
	if o.Target == "" {
		text = append(text, "SessionType=Discovery")
	} else {
		text = append(text, "TargetName="+o.Target, "SessionType=Normal")
	}
	switch {
	case o.Join != nil:
		text = append(text, joiningKeys...)
	case o.Target != "":
		text = append(append(text, linuxKeys...), linuxNormalKeys...)
		i := slices.Index(text, "MaxConnections=1")
		text[i] = fmt.Sprintf("MaxConnections=%d", o.Connections)
		if o.Recovery {
			text[slices.Index(text, "ErrorRecoveryLevel=0")] = "ErrorRecoveryLevel=2"
			text[slices.Index(text, "DefaultTime2Retain=0")] = "DefaultTime2Retain=20"
		}
	default:
		text = append(text, linuxKeys...)
	}
	text = slices.DeleteFunc(text, func(kv string) bool {
		key, _, _ := strings.Cut(kv, "=")
		return (slices.Contains(linuxKeys, kv) || key == "TargetRecvDataSegmentLength") &&
			slices.ContainsFunc(o.Keys, func(own string) bool { return strings.HasPrefix(own, key+"=") })
	})
	text = append(text, o.Keys...)
	if o.Hello {
		text = append(text, "iSERHelloRequired=Yes")
	}
	for _, kv := range text {
		data = append(append(data, kv...), 0)
	}
	req := pdu.LoginRequest{Transit: true, CSG: pdu.LoginOperationalNegotiation, NSG: pdu.FullFeaturePhase,
		ISID: o.ISID, CmdSN: o.CmdSN, CID: o.CID}
	if o.Join != nil {
		req.TSIH, req.CmdSN = o.Join.TSIH, o.Join.nextCmdSN()
	}
	bhs = req.Append(nil)
	bhs.SetDataSegmentLength(len(data))
	return bhs, data
}

// Login runs the login phase in one exchange, enters RDMA mode if that was on the
// byte stream, and starts to receive. ctx is for MPA startup.
func (s *Session) Login(ctx context.Context) error {
	bhs, data := s.o.LoginRequest()
	var p PDU
	var err error
	if s.o.Stream {
		p, err = s.exchange(bhs, data)
	} else if err = s.carrier.Post(bhs, data); err == nil {
		s.carrier.Flush()
		p, err = s.receive()
	}
	if err != nil {
		return err
	}
	if p.BHS.Opcode() != pdu.LoginResp {
		return fmt.Errorf("%v where a Login Response is due", p.BHS.Opcode())
	}
	rsp := pdu.ParseLoginResponse(p.BHS)
	if rsp.Status != 0 {
		return &LoginError{Status: rsp.Status}
	}
	if !rsp.Transit || rsp.NSG != pdu.FullFeaturePhase {
		return fmt.Errorf("login takes another round: %+v", rsp)
	}
	if s.Keys, err = keys.ParseText(p.Data); err != nil {
		return err
	}
	s.mu.Lock()
	s.TSIH, s.statSN = rsp.TSIH, rsp.StatSN+1
	if s.o.Join == nil {
		s.cmdSN, s.maxCmdSN = rsp.ExpCmdSN, rsp.MaxCmdSN
	}
	s.mu.Unlock()
	s.maxSend, s.maxRecv = s.length("TargetRecvDataSegmentLength"), s.length("InitiatorRecvDataSegmentLength")
	if s.o.Stream {
		if s.o.Join == nil && s.Key("RDMAExtensions") != "Yes" {
			return fmt.Errorf("RDMAExtensions=%s, there will be no RDMA mode", s.Key("RDMAExtensions"))
		}
		if err := s.startRDMA(ctx); err != nil {
			return err
		}
	}
	// What goes as immediate data is up to each command.
	params := initiator.Params{TSIH: s.TSIH, ImmediateData: true, FirstBurstLength: pdu.MaxData, MaxSendSegment: s.maxSend}
	if err := s.carrier.EnterFullFeature(params, s.find); err != nil {
		return err
	}
	s.ORD = uint16(s.carrier.ORD())
	go s.serve()
	return nil
}

// exchange sends a PDU on the byte stream and takes the answer. The target sends nothing after that before MPA.
func (s *Session) exchange(bhs pdu.BHS, data []byte) (PDU, error) {
	c := initiator.NewTCP(s.nc)
	if err := c.Post(bhs, data); err != nil {
		return PDU{}, err
	}
	c.Flush()
	var p initiator.PDU
	if err := c.Receive(&p); err != nil {
		return PDU{}, err
	}
	n := len(p.Data)
	return PDU{BHS: slices.Clone(p.BHS), Data: slices.Clone(p.Data), Len: pdu.BHSLen + pdu.Padded(n)}, nil
}

// find returns what the Carrier knows of the command with a tag, or nil.
func (s *Session) find(itt uint32) *initiator.Command {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.cmds[itt]; c != nil {
		return &c.carried
	}
	return nil
}

func (n *numbers) nextCmdSN() uint32 {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.cmdSN
}

// Key returns the target's answer to a key, or "".
func (s *Session) Key(name string) string {
	for _, p := range s.Keys {
		if p.Key == name {
			return p.Value
		}
	}
	return ""
}

// length returns the target's answer to the key of a length, or its default.
func (s *Session) length(name string) int {
	if n, err := strconv.Atoi(s.Key(name)); err == nil {
		return n
	}
	return 8192
}

// Stream returns the RDMAP stream below.
func (s *Session) Stream() *rdma.Conn { return s.carrier.Stream() }

// Send sends any PDU after any iSER header.
func (s *Session) Send(h iser.Header, bhs pdu.BHS, data []byte) error {
	head := make([]byte, iser.HeaderLen, iser.HeaderLen+len(bhs))
	h.Put(head)
	if err := s.Stream().Post(&rdma.WorkRequest{Op: rdma.Send, Head: append(head, bhs...), Data: data}); err != nil {
		return err
	}
	s.carrier.Flush()
	return nil
}

// receive returns the next PDU.
func (s *Session) receive() (PDU, error) {
	var p initiator.PDU
	if err := s.carrier.Receive(&p); err != nil {
		return PDU{}, err
	}
	return s.keep(&p), s.check()
}

const headLen = iser.HeaderLen + 48

// check looks at what every message of a target must have, besides what the Carrier checks: the reserved bits of its iSER header are
// zero (RFC 7145, section 9.2).
func (s *Session) check() error {
	if b := s.carrier.Message().Data; [iser.HeaderLen]byte(b) != [iser.HeaderLen]byte{0x10} {
		return fmt.Errorf("message of %d bytes: % x", len(b), b[:iser.HeaderLen])
	}
	return nil
}

// keep returns p with memory of its own.
func (s *Session) keep(p *initiator.PDU) PDU {
	m := s.carrier.Message()
	k := PDU{BHS: slices.Clone(p.BHS), Data: slices.Clone(p.Data), Len: len(m.Data)}
	if m.Invalidates {
		k.Invalidated = m.Invalidated
	}
	return k
}

// serve receives until the connection ends.
func (s *Session) serve() {
	var p initiator.PDU
	var err error
	for err == nil {
		if err = s.carrier.Receive(&p); err == nil {
			err = s.dispatch(&p)
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

func (s *Session) dispatch(p *initiator.PDU) error {
	if err := s.check(); err != nil {
		return err
	}
	bhs, n := p.BHS, len(s.carrier.Message().Data)
	switch op := bhs.Opcode(); {
	case s.o.Target != "" && n > headLen+min(s.maxRecv, 128): // longer than what ib_iser posts
		return fmt.Errorf("%v of %d bytes", op, n)
	case (op == pdu.TaskMgmtResp || op == pdu.LogoutResp) && n != headLen:
		return fmt.Errorf("%v of %d bytes instead of %d", op, n, headLen)
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
		return c.response(s, p)
	}
	if bhs.Opcode() == pdu.NOPIn && bhs.ITT() == pdu.ReservedTag && bhs.TTT() != pdu.ReservedTag {
		return s.pong(bhs)
	}
	select {
	case s.Other <- s.keep(p):
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
	if err := s.carrier.Post(bhs, data); err != nil {
		return err
	}
	s.carrier.Flush()
	return nil
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

// ErrAborted is the end of a command that Abort has ended.
var ErrAborted = errors.New("command was aborted")

// Abort ends c by ABORT TASK, after which the target cannot reach its memory any
// more, and returns the response of the function. A c that ends by itself
// meanwhile has its own end. Other PDUs that the target sends are lost.
func (s *Session) Abort(ctx context.Context, c *Command) (response byte, err error) {
	var b [48]byte
	r := pdu.BHS(b[:])
	r.Reset(pdu.TaskMgmtReq, pdu.FlagF|pdu.AbortTask)
	r.SetImmediate()
	r.SetITT(s.NewITT())
	r.SetLUN([8]byte{1: c.LUN})
	r.SetReferencedTaskTag(c.ITT())
	r.SetRefCmdSN(c.carried.BHS().CmdSN())
	if err := s.Control(r, nil); err != nil {
		return 0, err
	}
	for {
		p, err := s.Next(ctx)
		if err != nil {
			return 0, err
		}
		if p.BHS.Opcode() != pdu.TaskMgmtResp || p.BHS.ITT() != r.ITT() {
			continue
		}
		s.mu.Lock()
		open := s.cmds[c.ITT()] == c
		if open {
			delete(s.cmds, c.ITT())
		}
		s.mu.Unlock()
		if open {
			c.finish(s, ErrAborted)
		}
		return p.BHS.Response(), nil
	}
}

// Done returns a channel that is closed when the connection has ended. Err returns the reason.
func (s *Session) Done() <-chan struct{} { return s.done }

// Err waits for the end of the connection and returns the reason.
func (s *Session) Err() error { <-s.done; return s.err }

// Close drops the connection.
func (s *Session) Close() error {
	if s.carrier == nil {
		return s.nc.Close()
	}
	return s.carrier.Close()
}

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
		err = s.carrier.Close()
		<-s.done
		return err
	}
}
