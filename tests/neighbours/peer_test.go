package neighbours

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/testkit/header"
)

// A peer is a connection over TCP that sends PDUs without waiting for answers.
type peer struct {
	net.Conn
	header.Numbers
	r    *bufio.Reader
	name string
}

// A site is where attacks go: the target, or a bare socket.
type site struct {
	addr  string
	bare  bool
	ended *atomic.Int64 // commands of the attack that have ended
	rate  float64       // of a bare socket: how many a second have ended on the target
}

// connect opens a connection that ends with ctx.
func (s site) connect(ctx context.Context) (net.Conn, error) {
	var d net.Dialer
	nc, err := d.DialContext(ctx, "tcp", s.addr)
	if err == nil {
		context.AfterFunc(ctx, func() { nc.Close() })
	}
	return nc, err
}

// login logs in to a target, or sends the same bytes to a bare socket. id makes the ISID.
func (s site) login(ctx context.Context, name, target string, id int) (*peer, error) {
	nc, err := s.connect(ctx)
	if err != nil {
		return nil, err
	}
	p := newPeer(nc, name)
	err = p.logIn(s.bare, target, id)
	switch {
	case err != nil || target == "":
	case s.bare:
		err = p.start(&command{})
	default:
		_, err = p.do(&command{}) // takes the unit attentions
	}
	if err != nil {
		nc.Close()
		return nil, err
	}
	return p, nil
}

// newPeer returns a peer on a connection.
func newPeer(nc net.Conn, name string) *peer {
	return &peer{Conn: nc, r: bufio.NewReaderSize(nc, 64<<10), name: name, Numbers: header.Numbers{CmdSN: 1}}
}

// loginKeys returns the keys of a session, or of one in discovery, with whatever comes first.
func loginKeys(first ...string) (text []byte) {
	for _, kv := range append(first, "HeaderDigest=None", "DataDigest=None", "InitialR2T=Yes", "ImmediateData=Yes",
		"MaxBurstLength=262144", "FirstBurstLength=65536", "MaxRecvDataSegmentLength=65536") {
		text = append(append(text, kv...), 0)
	}
	return text
}

func (p *peer) logIn(bare bool, target string, id int) error {
	text := loginKeys("InitiatorName="+p.name, "TargetName="+target, "SessionType=Normal")
	if target == "" {
		text = loginKeys("InitiatorName="+p.name, "SessionType=Discovery")
	}
	req := pdu.LoginRequest{Transit: true, CSG: pdu.LoginOperationalNegotiation, NSG: pdu.FullFeaturePhase,
		ISID: [6]byte{0x80, byte(id >> 24), byte(id >> 16), byte(id >> 8), byte(id)}, CmdSN: p.CmdSN}
	if err := p.send(pdu.BHS(req.Append(nil)), text); err != nil || bare {
		return err
	}
	h, _, err := p.receive(nil)
	if err != nil {
		return err
	}
	res := pdu.ParseLoginResponse(h)
	if h.Opcode() != pdu.LoginResp || res.Status != 0 || res.NSG != pdu.FullFeaturePhase {
		return fmt.Errorf("login of %s: %v, status %v", p.name, h.Opcode(), res.Status)
	}
	p.ExpStatSN = res.StatSN + 1
	return nil
}

// send sends a PDU.
func (p *peer) send(h pdu.BHS, data []byte) error {
	h.SetDataSegmentLength(len(data))
	b := append(append(make([]byte, 0, len(h)+len(data)+3), h...), data...)
	_, err := p.Write(append(b, make([]byte, pdu.Padded(len(data))-len(data))...))
	return err
}

// receive reads a PDU. The data goes into buf as far as it fits.
func (p *peer) receive(buf []byte) (h pdu.BHS, data []byte, err error) {
	h = make(pdu.BHS, pdu.BHSLen)
	if _, err := io.ReadFull(p.r, h); err != nil {
		return nil, nil, err
	}
	n := h.DataSegmentLength()
	data = buf[:min(n, len(buf))]
	if _, err := io.ReadFull(p.r, data); err != nil {
		return nil, nil, err
	}
	_, err = p.r.Discard(pdu.Padded(n) - len(data))
	return h, data, err
}

// A command is a SCSI command of an attack.
type command struct {
	attr byte
	cdb  [16]byte
	out  []byte // immediate data
	edtl int    // bytes that are announced; 0: those of out
	read bool
	id   uint16 // LUN
}

// start sends c.
func (p *peer) start(c *command) error {
	flags := byte(pdu.FlagF) | c.attr
	edtl := c.edtl
	switch {
	case c.read:
		flags |= pdu.FlagR
	case len(c.out) > 0 || edtl > 0:
		flags |= pdu.FlagW
		edtl = max(edtl, len(c.out))
	}
	h := p.Request(pdu.SCSICommand, flags, false)
	h.SetLUN([8]byte{1: byte(c.id)})
	h.SetEDTL(uint32(edtl))
	h.SetCDB(c.cdb[:])
	return p.send(h, c.out)
}

// do executes one command and returns its data-in.
func (p *peer) do(c *command) ([]byte, error) {
	for range 4 { // unit attentions
		if err := p.start(c); err != nil {
			return nil, err
		}
		var in []byte
		buf := make([]byte, 4096)
		for {
			h, data, err := p.receive(buf)
			if err != nil {
				return nil, err
			}
			if h.Opcode() == pdu.DataIn {
				in = append(in, data...)
			}
			if h.Opcode() == pdu.SCSIResponse || h.Opcode() == pdu.DataIn && h.Flags()&pdu.FlagS != 0 {
				if h.Status() == 0 {
					return in, nil
				}
				break
			}
		}
	}
	return nil, fmt.Errorf("command %#x of %s fails", c.cdb[0], p.name)
}

// keep keeps depth copies of c in flight until the connection ends, and counts those that have ended.
// On a bare socket it sends as many a second as have ended on the target.
func (p *peer) keep(ctx context.Context, s site, c *command, depth int) {
	if s.bare {
		go p.drain()
		atRate(ctx, int(s.rate), func(int) { p.start(c) })
		return
	}
	for range depth {
		if p.start(c) != nil {
			return
		}
	}
	for {
		h, _, err := p.receive(nil)
		if err != nil {
			return
		}
		if h.Opcode() == pdu.SCSIResponse {
			s.ended.Add(1)
			if p.start(c) != nil {
				return
			}
		}
	}
}

// drain reads whatever comes until the connection ends.
func (p *peer) drain() { io.Copy(io.Discard, p.r) }

// atRate calls f so many times a second until ctx ends.
func atRate(ctx context.Context, perSecond int, f func(i int)) {
	const step = 10 * time.Millisecond
	tick := time.NewTicker(step)
	defer tick.Stop()
	begun, done := time.Now(), 0
	for {
		for due := int(time.Since(begun).Seconds() * float64(perSecond)); done < due; done++ {
			f(done)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
