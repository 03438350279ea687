package crash

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/header"
)

// A request is a SCSI command and its result.
type request struct {
	lun       byte
	cdb       [16]byte
	out, in   []byte
	immediate int // bytes of out that go with the command
	status    byte
	sense     []byte
}

// A port is a session that any number of goroutines use at once.
type port interface {
	// do executes a command. After an error nobody knows whether it was executed.
	do(*request) error
	Close() error
}

// good executes a command, again after each unit attention, and returns an error unless it ends
// with GOOD. While the LUN is BUSY, because a sync takes long on this machine, good asks again. lost
// reports that the connection ended without an answer.
func good(p port, r *request) (lost bool, err error) {
	const checkCondition, busy, attention = 0x02, 0x08, 6
	for end := time.Now().Add(testkit.Patience); ; {
		if err := p.do(r); err != nil {
			return true, err
		}
		switch {
		case r.status == 0:
			return false, nil
		case r.status == busy && time.Now().Before(end):
			time.Sleep(10 * time.Millisecond) // of the sync
		case r.status == checkCondition && len(r.sense) > 2 && r.sense[2]&0x0f == attention:
		default:
			return false, &refusal{*r}
		}
	}
}

// A refusal is another status than GOOD.
type refusal struct{ request }

// Error implements error.
func (r *refusal) Error() string {
	return fmt.Sprintf("CDB % x to LUN %d: status %#x, sense % x", r.cdb, r.lun, r.status, r.sense)
}

// An iserPort is a session over iSER.
type iserPort struct{ *initiator.Session }

// loginISER logs in over iSER.
func loginISER(ctx context.Context, addr, name, target string) (port, error) {
	s, err := initiator.Connect(ctx, addr, initiator.Options{Name: name, Target: target})
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { s.Close() })
	defer stop()
	if err := s.Login(ctx); err != nil {
		s.Close()
		return nil, err
	}
	return iserPort{s}, nil
}

func (p iserPort) do(r *request) error {
	c := &initiator.Command{LUN: r.lun, CDB: r.cdb, In: r.in, Out: r.out, Immediate: min(r.immediate, len(r.out), 4096)}
	err := p.Do(c)
	r.status, r.sense = c.Status, c.Sense
	return err
}

// A tcpPort is a session over TCP.
type tcpPort struct {
	net.Conn
	r       *bufio.Reader
	segment int  // the longest data segment that the target takes
	digests bool // CRC32C of headers and data

	send sync.Mutex // held while PDUs leave, so that they leave in the order of their numbers

	mu sync.Mutex // guards what follows
	header.Numbers
	room     sync.Cond // MaxCmdSN has moved, or the connection has ended
	maxCmdSN uint32
	tasks    map[uint32]*task
	err      error // why the connection has ended
}

// A task is a command in flight.
type task struct {
	*request
	got    int        // bytes of data-in
	events chan event // has room for all R2Ts that the target may send, and for the end
}

// An event is what a task hears of the target: an R2T, or its end.
type event struct {
	bhs  pdu.BHS
	data []byte // of a SCSI Response
	err  error
}

// errDigest is the end of a connection on which a digest was wrong.
var errDigest = errors.New("wrong digest")

// loginTCP logs in over TCP, with digests or without.
func loginTCP(ctx context.Context, addr, name, target string, digests bool) (port, error) {
	var d net.Dialer
	nc, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { nc.Close() })
	defer stop()
	p := &tcpPort{Conn: nc, r: bufio.NewReaderSize(nc, 64<<10), segment: 8192, tasks: map[uint32]*task{},
		Numbers: header.Numbers{CmdSN: 1}}
	p.room.L = &p.mu
	if err := p.login(name, target, digests); err != nil {
		nc.Close()
		return nil, err
	}
	go p.serve()
	return p, nil
}

// login runs the login phase in one exchange.
func (p *tcpPort) login(name, target string, digests bool) error {
	digest := "None"
	if digests {
		digest = "CRC32C"
	}
	var text []byte
	for _, kv := range []string{"InitiatorName=" + name, "TargetName=" + target, "SessionType=Normal",
		"HeaderDigest=" + digest, "DataDigest=" + digest, "InitialR2T=Yes", "ImmediateData=Yes",
		"MaxBurstLength=65536", "FirstBurstLength=65536", "MaxRecvDataSegmentLength=65536"} {
		text = append(append(text, kv...), 0)
	}
	req := pdu.LoginRequest{Transit: true, CSG: pdu.LoginOperationalNegotiation, NSG: pdu.FullFeaturePhase,
		ISID: [6]byte{0, 2, 0x3d, 0, 0, 1}, CmdSN: p.CmdSN}
	if err := p.write(pdu.BHS(req.Append(nil)), text); err != nil {
		return err
	}
	h, data, err := p.receive()
	if err != nil {
		return err
	}
	res := pdu.ParseLoginResponse(h)
	if h.Opcode() != pdu.LoginResp || res.Status != 0 || res.NSG != pdu.FullFeaturePhase {
		return fmt.Errorf("login: %v, status %v", h.Opcode(), res.Status)
	}
	answers, err := keys.ParseText(data)
	if err != nil {
		return err
	}
	for _, a := range answers {
		switch {
		case a.Key == "MaxRecvDataSegmentLength":
			if p.segment, err = strconv.Atoi(a.Value); err != nil {
				return err
			}
		case a.Key == "HeaderDigest" && a.Value != digest, a.Key == "DataDigest" && a.Value != digest:
			return fmt.Errorf("login: %s=%s", a.Key, a.Value)
		}
	}
	p.ExpStatSN, p.maxCmdSN, p.digests = res.StatSN+1, res.MaxCmdSN, digests
	return nil
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// digest appends the CRC32C of b[from:] if the connection has digests.
func (p *tcpPort) digest(b []byte, from int) []byte {
	if !p.digests {
		return b
	}
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b[from:], castagnoli))
}

// write sends a PDU.
func (p *tcpPort) write(h pdu.BHS, data []byte) error {
	h.SetDataSegmentLength(len(data))
	b := make([]byte, 0, len(h)+len(data)+12)
	b = p.digest(append(b, h...), 0)
	if len(data) > 0 {
		from := len(b)
		b = append(append(b, data...), make([]byte, pdu.Padded(len(data))-len(data))...)
		b = p.digest(b, from)
	}
	_, err := p.Write(b)
	return err
}

// receive reads a PDU.
func (p *tcpPort) receive() (pdu.BHS, []byte, error) {
	h, err := p.checked(pdu.BHSLen)
	if err != nil {
		return nil, nil, err
	}
	n := pdu.BHS(h).DataSegmentLength()
	if n == 0 {
		return h, nil, nil
	}
	data, err := p.checked(pdu.Padded(n))
	if err != nil {
		return nil, nil, err
	}
	return h, data[:n], nil
}

// checked reads n bytes and their digest.
func (p *tcpPort) checked(n int) ([]byte, error) {
	b := make([]byte, n, n+4)
	if _, err := io.ReadFull(p.r, b); err != nil {
		return nil, err
	}
	if p.digests {
		if _, err := io.ReadFull(p.r, b[n:n+4]); err != nil {
			return nil, err
		}
		if binary.LittleEndian.Uint32(b[n:n+4]) != crc32.Checksum(b, castagnoli) {
			return nil, errDigest
		}
	}
	return b, nil
}

// do implements port.
func (p *tcpPort) do(r *request) error {
	flags := byte(pdu.FlagF | pdu.AttrSimple)
	switch {
	case len(r.in) > 0:
		flags |= pdu.FlagR
	case len(r.out) > 0:
		flags |= pdu.FlagW
	}
	events := make(chan event, 4)
	h, err := p.start(r, flags, events)
	if err != nil {
		return err
	}
	itt := h.ITT()
	for e := range events {
		switch {
		case e.err != nil:
			return e.err
		case e.bhs.Opcode() == pdu.R2T:
			if err := p.answer(r, itt, e.bhs); err != nil {
				return err
			}
		default:
			r.status, r.sense = e.bhs.Status(), nil
			if e.bhs.Opcode() == pdu.SCSIResponse && len(e.data) >= 2 {
				r.sense = e.data[2:][:min(int(binary.BigEndian.Uint16(e.data)), len(e.data)-2)]
			}
			return nil
		}
	}
	panic("unreachable")
}

// start sends a command when the window allows it.
func (p *tcpPort) start(r *request, flags byte, events chan event) (pdu.BHS, error) {
	p.send.Lock()
	defer p.send.Unlock()
	p.mu.Lock()
	for p.err == nil && pdu.Before(p.maxCmdSN, p.CmdSN) {
		p.room.Wait()
	}
	if p.err != nil {
		defer p.mu.Unlock()
		return nil, p.err
	}
	h := p.Request(pdu.SCSICommand, flags, false)
	p.tasks[h.ITT()] = &task{request: r, events: events}
	p.mu.Unlock()
	h.SetLUN([8]byte{1: r.lun})
	h.SetEDTL(uint32(len(r.in) + len(r.out)))
	h.SetCDB(r.cdb[:])
	return h, p.write(h, r.out[:min(r.immediate, p.segment, len(r.out))])
}

// answer sends the data that an R2T asks for.
func (p *tcpPort) answer(r *request, itt uint32, r2t pdu.BHS) error {
	from, n := int(r2t.BufferOffset()), int(r2t.DesiredDataTransferLength())
	if from+n > len(r.out) {
		return fmt.Errorf("R2T of %d bytes at %d, of %d", n, from, len(r.out))
	}
	for sn := uint32(0); n > 0; sn++ {
		m := min(n, p.segment)
		h := make(pdu.BHS, pdu.BHSLen)
		flags := byte(0)
		if m == n {
			flags = pdu.FlagF
		}
		h.Reset(pdu.DataOut, flags)
		h.SetITT(itt)
		h.SetTTT(r2t.TTT())
		h.SetLUN(r2t.LUN())
		h.SetDataSN(sn)
		h.SetBufferOffset(uint32(from))
		p.send.Lock()
		p.mu.Lock()
		h.SetExpStatSN(p.ExpStatSN)
		p.mu.Unlock()
		err := p.write(h, r.out[from:from+m])
		p.send.Unlock()
		if err != nil {
			return err
		}
		from, n = from+m, n-m
	}
	return nil
}

// serve receives until the connection ends, and then ends all tasks.
func (p *tcpPort) serve() {
	var err error
	for err == nil {
		var h pdu.BHS
		var data []byte
		if h, data, err = p.receive(); err == nil {
			err = p.take(h, data)
		}
	}
	p.Conn.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.err = err
	for _, t := range p.tasks {
		t.events <- event{err: err}
	}
	p.tasks = nil
	p.room.Broadcast()
}

// take takes a PDU of the target.
func (p *tcpPort) take(h pdu.BHS, data []byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if h.Opcode() != pdu.R2T && (h.Opcode() != pdu.DataIn || h.Flags()&pdu.FlagS != 0) && h.ITT() != pdu.ReservedTag {
		p.ExpStatSN = h.StatSN() + 1
	}
	if pdu.Before(p.maxCmdSN, h.MaxCmdSN()) {
		p.maxCmdSN = h.MaxCmdSN()
		p.room.Broadcast()
	}
	t := p.tasks[h.ITT()]
	switch op := h.Opcode(); {
	case op == pdu.NOPIn:
		return nil
	case op != pdu.R2T && op != pdu.DataIn && op != pdu.SCSIResponse:
		return fmt.Errorf("%v", op)
	case t == nil:
		return fmt.Errorf("%v of task %#x, which does not exist", op, h.ITT())
	case op == pdu.R2T:
		t.events <- event{bhs: h}
	case op == pdu.DataIn:
		if at := int(h.BufferOffset()); at != t.got || at+len(data) > len(t.in) {
			return fmt.Errorf("Data-In of %d bytes at %d, after %d of %d", len(data), at, t.got, len(t.in))
		}
		t.got += copy(t.in[t.got:], data)
		if h.Flags()&pdu.FlagS == 0 {
			break
		}
		fallthrough
	default:
		if h.Status() == 0 && t.got < len(t.in) { // data before it was lost
			return fmt.Errorf("GOOD after %d bytes of %d", t.got, len(t.in))
		}
		delete(p.tasks, h.ITT())
		t.events <- event{bhs: h, data: data}
	}
	return nil
}
