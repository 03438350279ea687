package rdma

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"time"

	"github.com/iser-target/iser-target/rdma/llp"
	"github.com/iser-target/iser-target/rdma/wire"
)

// Options configures a stream. The zero value of a field means its default.
type Options struct {
	// IRD limits how many RDMA Read Requests of the peer may be unanswered, ORD how many of ours.
	// Both are upper limits for what startup agrees on. Default 32, at most 16382.
	IRD, ORD int
	// MinORD makes a Responder reject a peer that accepts fewer Read Requests.
	MinORD int
	// UnstatedORD replaces ORD towards a peer whose startup frame does not say how many Read Requests
	// it accepts: that of revision 1, or one without enhanced data. Default 1, which any peer that
	// accepts Read Requests can serve; at most ORD. The ULP may know more: see Conn.SetORD.
	UnstatedORD int
	// MaxSend is the longest Send that the Conn accepts, in bytes. Default 16384.
	// The Conn needs as much memory to assemble a Send of several segments.
	MaxSend int
	// MaxULPDU limits the ULPDUs that are sent, in bytes. The segment size of the TCP
	// connection limits them, too. Default and at most 64768.
	MaxULPDU int
	// NoCRC does not ask for CRCs. They are left out if the peer does not ask for
	// them, either. RFC 5044, section 4.4, allows that where something else protects
	// the data end to end as well as a CRC32c does.
	NoCRC bool
	// WholeCRC makes a Responder ask for CRCs only if TCP segments have a multiple of 4 bytes, and at most
	// 16 KiB. FPDUs have that multiple, too, so no segment then ends within a CRC. siw of Linux 6.1 takes a
	// CRC that comes in two segments for a wrong one. The size of larger segments, on the loopback for
	// example, changes while the window of the peer grows.
	WholeCRC bool
	// Markers asks the peer to send Markers (RFC 5044, section 4.3). They are of no
	// use on a TCP socket, cost a copy of all that comes, and siw refuses them.
	Markers bool
	// StartupTimeout limits the exchange of startup frames. Default 10 s.
	StartupTimeout time.Duration
	// Domain is the protection domain. Default: a new one.
	Domain *Domain

	// RTR restricts the ready-to-receive messages that are offered or accepted in the peer-to-peer
	// model (RFC 6581, section 9.2). Default: all three.
	RTR RTR

	// Private, Rev and PeerToPeer are for an Initiator: the private data of the
	// Request (at most 512 bytes, 508 in revision 2), the revision (1 or 2, default
	// 2), and whether to ask for the peer-to-peer model.
	Private    []byte
	Rev        uint8
	PeerToPeer bool
	// Prepare, if not nil, is for an Initiator that names memory in its private data. It is called before the Request
	// is sent, may only Register memory with the stream, and returns the private data instead of Private.
	Prepare func(*Conn) (private []byte)
	// Nudge, if not 0, is for an Initiator whose peer may be siw of Linux. A message that reaches siw just after it has
	// sent the Reply waits in its socket until more data comes (see docs/conformance-rdma.md). If the peer sends nothing for so
	// long after the first message, the Initiator sends an empty RDMA Write, which changes nothing (RFC 5041, section 5.2),
	// and repeats that 4 times, each time after twice as long. It also sends one after the first message of the peer, unless
	// something else follows that.
	Nudge time.Duration
}

// RTR is a set of ready-to-receive messages (RFC 6581, section 4.4).
type RTR = wire.RTR

const (
	defaultDepth   = 32
	maxDepth       = wire.NoDepth - 1
	defaultMaxSend = 16384
	defaultStartup = 10 * time.Second
)

// complete returns a copy of o with its defaults filled in.
func (o Options) complete() (Options, error) {
	if o.Domain == nil {
		o.Domain = NewDomain()
	}
	o.StartupTimeout = cmp.Or(o.StartupTimeout, defaultStartup)
	o.RTR = cmp.Or(o.RTR, RTR{Send: true, Write: true, Read: true})
	o.Rev = cmp.Or(o.Rev, 2)
	o.UnstatedORD = cmp.Or(o.UnstatedORD, 1)
	var errs []error
	for _, f := range []struct {
		name             string
		v                *int
		def, least, most int
	}{
		{"IRD", &o.IRD, defaultDepth, 1, maxDepth},
		{"ORD", &o.ORD, defaultDepth, 1, maxDepth},
		{"MaxSend", &o.MaxSend, defaultMaxSend, 1, math.MaxInt32},
		{"MaxULPDU", &o.MaxULPDU, wire.MaxULPDU, wire.MinMULPDU, wire.MaxULPDU},
	} {
		if *f.v = cmp.Or(*f.v, f.def); *f.v < f.least || *f.v > f.most {
			errs = append(errs, fmt.Errorf("rdma: %s %d is outside %d..%d", f.name, *f.v, f.least, f.most))
		}
	}
	if o.UnstatedORD < 0 || o.UnstatedORD > o.ORD {
		errs = append(errs, fmt.Errorf("rdma: UnstatedORD %d is outside 1..%d, which is ORD", o.UnstatedORD, o.ORD))
	}
	if o.MinORD > o.ORD {
		errs = append(errs, fmt.Errorf("rdma: MinORD %d is more than ORD %d", o.MinORD, o.ORD))
	}
	if o.Nudge < 0 {
		errs = append(errs, fmt.Errorf("rdma: Nudge %v is negative", o.Nudge))
	}
	if o.Rev > 2 {
		errs = append(errs, fmt.Errorf("rdma: MPA revision %d is not 1 or 2", o.Rev))
	}
	return o, errors.Join(errs...)
}

// A Request is the content of an Initiator's startup frame. Its Depths are as the Initiator sees
// them.
type Request = wire.Startup

// An Answer is the reply of the ULP to a Request.
type Answer struct {
	Private []byte // at most 512 bytes, 508 in an enhanced Reply
	Reject  error  // if not nil, the Reply rejects the connection
	// Prepare, if not nil, is called before a Reply that accepts is sent. It may only Register memory with the stream, and
	// returns the private data instead of Private.
	Prepare func(*Conn) (private []byte)
}

// Respond performs MPA startup as the Responder: it waits for the Request, asks the ULP through
// answer, and sends the Reply. After an error the TCP connection is closed. After a reject the
// error is the ULP's, and the caller closes the TCP connection (RFC 5044, section 7.1.2).
func Respond(ctx context.Context, nc net.Conn, o Options, answer func(*Request) Answer) (*Conn, error) {
	o, err := o.complete()
	if err != nil {
		return nil, err
	}
	return (&Responder{o: o}).Respond(ctx, nc, nil, o.StartupTimeout, answer)
}

// A Responder holds the memory of a future stream. It is for a ULP that starts in streaming mode,
// and has to allocate the stream before it agrees to RDMA mode (RFC 5044, section 7.1.3).
type Responder struct {
	o Options
	c *Conn // nil: allocated when the Request has come
}

// NewResponder allocates a stream.
func NewResponder(o Options) (*Responder, error) {
	o, err := o.complete()
	if err != nil {
		return nil, err
	}
	return &Responder{o, allocate(o)}, nil
}

// Respond performs MPA startup like the function Respond, once. The stream of nc
// begins with prefix, at most 64 KiB, which the ULP has already read. timeout limits
// the exchange of startup frames instead of Options.StartupTimeout.
func (r *Responder) Respond(ctx context.Context, nc net.Conn, prefix []byte, timeout time.Duration,
	answer func(*Request) Answer) (*Conn, error) {
	if len(prefix) > llp.WindowLen {
		nc.Close()
		return nil, fmt.Errorf("rdma: %d bytes were read before the startup, the limit is %d", len(prefix),
			llp.WindowLen)
	}
	return start(ctx, nc, timeout, func() (*Conn, bool, error) {
		return r.respond(nc, bytes.NewReader(prefix), answer)
	})
}

func (r *Responder) respond(nc net.Conn, prefix *bytes.Reader,
	answer func(*Request) Answer) (c *Conn, rejected bool, err error) {
	o := r.o
	f, err := readStartup(io.MultiReader(prefix, nc), false)
	if err != nil {
		return nil, false, err
	}
	crc := !o.NoCRC && (!o.WholeCRC || keepsCRCs(emss(nc)))
	reply := wire.Startup{Reply: true, Rev: f.Rev, CRC: crc, Markers: o.Markers, Enhanced: f.Enhanced}

	ird := o.IRD
	if f.Enhanced {
		reply.Depths = replyDepths(f.Depths, o)
		ird = min(ird, int(reply.Depths.IRD)) // NoDepth is above every limit
	}
	ord, most := agreedORD(&f, o)
	var a Answer
	if f.Enhanced && ord < o.MinORD {
		a.Reject = fmt.Errorf("the initiator accepts %d RDMA Reads, %d are required", f.Depths.IRD, o.MinORD)
		reply.Depths.IRD, reply.Depths.ORD = 0, uint16(o.MinORD) // flag A stays: RFC 6581, section 9.2
	} else {
		a = answer(&f)
	}
	reply.Private, reply.Reject = a.Private, a.Reject != nil
	if reply.Reject {
		return nil, true, errors.Join(a.Reject, writeStartup(nc, &reply))
	}
	if c = r.c; c == nil {
		c = allocate(o)
	}
	rest, _ := io.ReadAll(prefix)
	c.attach(nc, rest, ird, ord, f.CRC || reply.CRC, f.Markers)
	c.peer, c.mostORD = f, most
	c.rtrSend = reply.Depths.RTR.Send
	if a.Prepare != nil {
		reply.Private = a.Prepare(c)
	}
	return c, false, writeStartup(nc, &reply)
}

// keepsCRCs reports whether no TCP segment ends within a CRC if segments have n bytes. 0 means that it is no TCP.
func keepsCRCs(n int) bool { return n%4 == 0 && n <= 16<<10 }

// agreedORD returns how many RDMA Reads startup allows towards the sender of f, and how many a ULP may
// allow that has asked the peer.
func agreedORD(f *wire.Startup, o Options) (ord, most int) {
	if !f.Enhanced {
		return o.UnstatedORD, o.ORD
	}
	ord = min(o.ORD, int(f.Depths.IRD)) // NoDepth is above every limit
	return ord, ord
}

// replyDepths computes the depths of the Reply (RFC 6581, section 9). ORD stays within the
// Initiator's IRD. IRD is the Initiator's ORD or our own limit, whichever is less.
func replyDepths(req wire.Depths, o Options) (d wire.Depths) {
	if d.ORD = min(req.IRD, uint16(o.ORD)); req.IRD == wire.NoDepth {
		d.ORD = wire.NoDepth
	}
	if d.IRD = min(req.ORD, uint16(o.IRD)); req.ORD == wire.NoDepth {
		d.IRD = wire.NoDepth
	}
	if !req.PeerToPeer {
		return d
	}
	d.PeerToPeer = true
	both := RTR{Send: req.RTR.Send && o.RTR.Send, Write: req.RTR.Write && o.RTR.Write,
		Read: req.RTR.Read && o.RTR.Read}
	d.RTR = cmp.Or(both, o.RTR)
	if d.RTR.Read {
		d.IRD = max(d.IRD, 1)
	}
	return d
}

// Initiate performs MPA startup as the Initiator. It returns the stream and the
// private data of the Reply. After an error the TCP connection is closed. After a
// *RejectedError the caller closes it (RFC 5044, section 7.1.2).
func Initiate(ctx context.Context, nc net.Conn, o Options) (c *Conn, private []byte, err error) {
	if o, err = o.complete(); err != nil {
		return nil, nil, err
	}
	c, err = start(ctx, nc, o.StartupTimeout, func() (c *Conn, rejected bool, err error) {
		c, private, err = initiate(nc, o)
		var reject *RejectedError
		return c, errors.As(err, &reject), err
	})
	return c, private, err
}

func initiate(nc net.Conn, o Options) (*Conn, []byte, error) {
	c, attached := allocate(o), false
	defer func() {
		if !attached {
			c.mem.close()
		}
	}()
	if o.Prepare != nil {
		o.Private = o.Prepare(c)
	}
	req := wire.Startup{Rev: o.Rev, CRC: !o.NoCRC, Markers: o.Markers, Enhanced: o.Rev >= 2, Private: o.Private}
	if req.Enhanced {
		req.Depths = wire.Depths{IRD: uint16(o.IRD), ORD: uint16(o.ORD)}
		if o.PeerToPeer {
			req.Depths.PeerToPeer, req.Depths.RTR = true, o.RTR
		}
	}
	if err := writeStartup(nc, &req); err != nil {
		return nil, nil, err
	}
	f, err := readStartup(nc, true)
	if err != nil {
		return nil, nil, err
	}
	if f.Reject {
		err := &RejectedError{Private: f.Private, Depths: f.Depths, Enhanced: f.Enhanced}
		if o.Markers {
			return nil, nil, fmt.Errorf("the Request asked for Markers, which the responder may not support: %w", err)
		}
		return nil, nil, err
	}
	if f.Enhanced != req.Enhanced {
		return nil, nil, fault(wire.ReasonStartup,
			"the Reply is not in the format of the Request (RFC 6581, section 10)")
	}
	ord, most := agreedORD(&f, o)
	attached = true
	c.attach(nc, nil, o.IRD, ord, f.CRC || req.CRC, f.Markers)
	c.peerStarted.Store(true) // an Initiator may send at once
	c.peer, c.mostORD = f, most
	if o.Nudge > 0 {
		c.unheard.Store(true)
		c.aside.Go(c.nudge)
	}
	if !f.Enhanced {
		return c, f.Private, nil
	}
	if f.Depths.ORD != wire.NoDepth && int(f.Depths.ORD) > o.IRD {
		err := fault(wire.ReasonIRD, "the responder uses %d RDMA Reads, the local limit is %d", f.Depths.ORD, o.IRD)
		c.terminate(err, nil, 0, nil)
		return c, nil, err
	}
	if f.Depths.PeerToPeer && o.PeerToPeer {
		return c, f.Private, c.sendRTR(f.Depths)
	}
	return c, f.Private, nil
}

// sendRTR sends one of the agreed ready-to-receive messages (RFC 6581, section 9.2).
// A receiver ignores the STag of an empty tagged message, but some adapters refuse 0.
func (c *Conn) sendRTR(d wire.Depths) error {
	wr := &WorkRequest{}
	switch {
	case d.RTR.Write && c.opt.RTR.Write:
		wr.Op, wr.STag = Write, 1
	case d.RTR.Read && c.opt.RTR.Read && c.ord > 0:
		wr.Op, wr.STag = Read, 1
	case d.RTR.Send && c.opt.RTR.Send:
		wr.Op = Send
	default:
		err := fault(wire.ReasonRTR, "the responder accepts no ready-to-receive message that can be sent")
		c.terminate(err, nil, 0, nil)
		return err
	}
	c.rtr = wr
	if err := c.Post(wr); err != nil {
		return err
	}
	c.Flush()
	return nil
}

// start runs f, the exchange of startup frames, with a deadline on nc, and closes nc if ctx ends
// first. After an error it closes everything, except the TCP connection after a reject.
func start(ctx context.Context, nc net.Conn, limit time.Duration,
	f func() (c *Conn, rejected bool, err error)) (*Conn, error) {
	if err := nc.SetDeadline(time.Now().Add(limit)); err != nil {
		nc.Close()
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { nc.Close() })
	c, rejected, err := f()
	if !stop() {
		err = ctx.Err()
	} else if e := nc.SetDeadline(time.Time{}); err == nil {
		err = e
	}
	if err == nil {
		return c, nil
	}
	if c != nil {
		c.Close()
	}
	if !rejected {
		nc.Close()
	}
	return nil, err
}

// readStartup reads exactly one startup frame, and no byte after it.
func readStartup(nc io.Reader, reply bool) (f wire.Startup, err error) {
	var fixed [wire.StartupLen]byte
	if n, err := io.ReadFull(nc, fixed[:]); err != nil {
		return f, fault(wire.ReasonStartup, "after %d bytes of an MPA startup frame: %w", n, err)
	}
	f, n, err := wire.ParseStartup(fixed[:], reply)
	if err != nil {
		return f, &StreamError{Reason: wire.ReasonStartup, Err: err}
	}
	private := make([]byte, n)
	if m, err := io.ReadFull(nc, private); err != nil {
		return f, fault(wire.ReasonStartup, "after %d of %d bytes of private data: %w", m, n, err)
	}
	f.SetPrivate(private)
	return f, nil
}

func writeStartup(nc net.Conn, f *wire.Startup) error {
	b, err := f.Append(make([]byte, 0, wire.StartupLen+wire.MaxPrivateData))
	if err != nil {
		return err
	}
	_, err = nc.Write(b)
	return err
}
