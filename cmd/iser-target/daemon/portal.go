package daemon

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/cmd/iser-target/capture"
	"github.com/iser-target/iser-target/cmd/iser-target/handover"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/iscsi/tcp"
	"github.com/iser-target/iser-target/iser"
	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/rdma/llp"
	"github.com/iser-target/iser-target/rdma/wire"
	"github.com/iser-target/iser-target/security/ipsec"
	"github.com/iser-target/iser-target/security/limits"
)

// userTimeout is the time after which TCP gives up on unacknowledged data.
const userTimeout = 60 * time.Second

// A portal is a listener and its current description.
type portal struct {
	l *handover.Listener
	// v4 is a second listener, for IPv4, of a portal on all addresses that requires IPsec, because a policy is of one address
	// family; or nil.
	v4     *handover.Listener
	policy listenerPolicy // of both; the editor's
	// passed says that the service manager has the socket, too. Then the address stays in
	// use when l is closed, and initiators that connect wait.
	passed bool
	cur    atomic.Pointer[servedPortal]

	mu  sync.Mutex
	had []*iscsi.Portal // all that cur has pointed to; guarded by mu
}

// listeners returns those of p.
func (p *portal) listeners() []*handover.Listener {
	if p.v4 == nil {
		return []*handover.Listener{p.l}
	}
	return []*handover.Listener{p.l, p.v4}
}

// close closes the listeners of p.
func (p *portal) close() (err error) {
	for _, l := range p.listeners() {
		err = errors.Join(err, l.Close())
	}
	return err
}

// connections counts the connections of s through p.
func (p *portal) connections(s *iscsi.SessionInfo) (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range s.Conns {
		if slices.Contains(p.had, c.Portal) {
			n++
		}
	}
	return n
}

// carries reports whether s has a connection through p.
func (p *portal) carries(s *iscsi.SessionInfo) bool { return p.connections(s) > 0 }

// A servedPortal is the description of a portal for new connections. It does not change;
// another one replaces it.
type servedPortal struct {
	*iscsi.Portal
	cfg config.Portal
}

// portalName is how the name of the listener of a portal begins.
const portalName = "portal "

// listen listens on a portal, on the socket from another process or the service manager if there is one.
func (d *Daemon) listen(c config.Portal, policy listenerPolicy) (*portal, error) {
	p := &portal{}
	if err := d.openListeners(p, c, policy); err != nil {
		return nil, fmt.Errorf("portal %s: %w", c.Listen, err)
	}
	d.describePortal(p, c)
	return p, nil
}

// describePortal describes p by c to new connections and to discovery. It returns the
// description before, or nil.
func (d *Daemon) describePortal(p *portal, c config.Portal) (old *servedPortal) {
	pc := iscsi.PortalConfig{
		Listen: p.l.Addr().String(), Advertise: c.Advertise, TPGT: uint16(c.TPGT), Protected: c.Demand() == ipsec.Required,
	}
	if c.Serves(string(transportISER)) {
		pc.StepUp = d.stepUp
	}
	now := d.node.AddPortal(pc)
	p.mu.Lock()
	p.had = append(p.had, now)
	p.mu.Unlock()
	old = p.cur.Swap(&servedPortal{now, c})
	if old != nil {
		d.node.RemovePortal(old.Portal)
	}
	return old
}

// setOptions sets the socket options of a portal, which accepted connections inherit.
func setOptions(_, _ string, raw syscall.RawConn) error {
	var err error
	cerr := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(userTimeout.Milliseconds()))
	})
	return errors.Join(cerr, err)
}

// accept begins to serve p, if Run has begun.
func (e *editor) accept(p *portal) {
	d, ctx := e.d, e.d.changes.serving
	if ctx == nil {
		return
	}
	cur := p.cur.Load()
	d.log.Info("serving", "portal", p.l.Addr(), "tpgt", cur.TPGT, "advertise", cur.Advertise, "ipsec", cur.cfg.Demand(), eventKey, "service")
	for _, l := range p.listeners() {
		d.net.wg.Go(func() { d.acceptLoop(ctx, p, l) })
	}
}

// The times between two attempts to accept while the process is out of file descriptors or memory.
const (
	acceptPause    = 100 * time.Millisecond
	maxAcceptPause = time.Second
)

// acceptLoop accepts connections until the listener is closed.
func (d *Daemon) acceptLoop(ctx context.Context, p *portal, l *handover.Listener) {
	pause := acceptPause
	for {
		nc, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil {
			pause = acceptPause
			d.admit(ctx, p, l, nc)
			continue
		}
		d.acceptFailed(l, err)
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		pause = min(2*pause, maxAcceptPause)
	}
}

// acceptFailed logs that l cannot accept. If the process is out of file descriptors, the newcomer that
// yields first frees one.
func (d *Daemon) acceptFailed(l *handover.Listener, err error) {
	var also []any
	if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) {
		reason := fmt.Errorf("the process is out of file descriptors, and this one had not logged in: %w", errDisplaced)
		also = []any{"displaced", d.net.newcomers.shed(l.Addr(), reason)}
	}
	d.log.Error("accept", append([]any{"portal", l.Addr(), "reason", err}, also...)...)
}

// admit serves nc, which l of p has accepted, if there is a place for it.
func (d *Daemon) admit(ctx context.Context, p *portal, accepted *handover.Listener, nc net.Conn) {
	if d.fewDescriptors(nc.(*net.TCPConn)) {
		l := &d.net.limits.Descriptors
		l.Bite(limits.AddressKey(nc.RemoteAddr()))
		reason := fmt.Errorf("%v, and the last %d are kept", l, reservedDescriptors)
		if !d.net.newcomers.shed(nc.RemoteAddr(), fmt.Errorf("%w; this one had not logged in: %w", reason, errDisplaced)) {
			d.refuse(nc, "limit", reason)
			return
		}
	}
	n, err := d.net.newcomers.add(ctx, nc, accepted.Addr())
	if err != nil {
		d.refuse(nc, "limit", err)
		return
	}
	d.net.wg.Add(1)
	a := &arrival{d: d, portal: p, n: n, nc: nc.(*net.TCPConn), accepted: time.Now()}
	if p.cur.Load().cfg.Demand() == ipsec.Off {
		a.await()
	} else {
		go a.judge()
	}
}

// An arrival is a connection until its initiator has sent the first frame or PDU. It has no goroutine meanwhile.
type arrival struct {
	d        *Daemon
	portal   *portal
	n        *newcomer
	nc       *net.TCPConn
	accepted time.Time
	g        *guarded // nil: IPsec has not been asked for
}

// judge asks the Guard before the connection waits.
func (a *arrival) judge() {
	if a.protected(a.nc) {
		a.await()
	} else {
		a.end()
	}
}

// protected lets the Guard judge the connection, once. It refuses the connection if that denies it.
func (a *arrival) protected(nc net.Conn) bool {
	if a.g != nil {
		return true
	}
	x := a.d.ipsec
	a.g = x.add(a.portal, a.n, nc)
	err := x.accept(a.g)
	if err != nil {
		a.d.refuse(nc, "ipsec", err)
	}
	return err == nil
}

// await lets the connection wait for its first frame or PDU.
func (a *arrival) await() {
	w := a.d.net.waiting.Add(a.nc, a.deadline(), firstPDU, a.come)
	a.n.abortFirst(func(reason error) { w.Wake(reason) })
}

// deadline returns when the login must have ended.
func (a *arrival) deadline() time.Time { return a.accepted.Add(time.Duration(a.d.net.login.Load())) }

// come serves the connection, whose wait has ended for that reason.
func (a *arrival) come(error) { go a.serve() } // an error shows again

// end gives back what the connection has.
func (a *arrival) end() {
	if a.g != nil {
		a.d.ipsec.leave(a.g)
	}
	a.d.net.newcomers.end(a.n)
	a.d.net.wg.Done()
}

// maxLoginText is the longest data segment of a Login Request, in bytes (RFC 7143, section 6.3).
const maxLoginText = 8192

// firstPDU reports whether the first frame or PDU of a connection has come, or something else that does not wait for
// more. It consumes nothing.
func firstPDU(fd int) bool {
	var head [pdu.BHSLen]byte
	n, _, err := unix.Recvfrom(fd, head[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
	switch {
	case err == unix.EAGAIN || err == unix.EINTR:
		return false
	case err != nil || n == 0:
		return true
	}
	var whole int // 0: not known yet
	switch h := pdu.BHS(head[:]); {
	case head[0] == firstOfMPA:
		if n >= wire.StartupLen {
			private := int(binary.BigEndian.Uint16(head[wire.StartupLen-2:]))
			if private > wire.MaxPrivateData {
				return true
			}
			whole = wire.StartupLen + private
		}
	case head[0]&opcodeMask == loginRequest:
		if n == len(head) {
			text := h.DataSegmentLength()
			if text > maxLoginText {
				return true
			}
			whole = len(head) + h.TotalAHSLength() + pdu.Padded(text)
		}
	default:
		return true
	}
	return whole > 0 && llp.Come(fd, whole)
}

// lastLook is what a connection gets at its deadline to read what has come, so that the reason says how much that was.
const lastLook = 10 * time.Millisecond

// serve runs a connection from its first byte on.
func (a *arrival) serve() {
	if !a.begin() {
		a.end()
	}
}

// begin does the work of serve up to the login, whose end is that of the connection. It returns false if the connection was refused, or
// was that of a manager and has ended.
func (a *arrival) begin() bool {
	d, n := a.d, a.n
	p := a.portal.cur.Load()
	if err := n.ended(); err != nil {
		d.refuse(a.nc, "first byte", err)
		return false
	}
	nc := d.net.captures.Tap(a.nc)
	n.abortBy(nc.Abort)
	if !a.protected(nc) {
		return false
	}
	deadline := a.deadline()
	if soon := time.Now().Add(lastLook); deadline.Before(soon) {
		deadline = soon
	}
	dm, stage, err := d.mover(n.ctx, p, nc, deadline)
	var other *iser.Other
	if errors.As(err, &other) {
		d.manage(n, nc, other.Stream)
		return false
	}
	if err != nil {
		d.refuse(nc, stage, cmp.Or(n.ended(), err))
		return false
	}
	p.Start(dm, iscsi.ServeOptions{ // which logs the outcome
		Accepted:  a.accepted,
		Joined:    func(tsih uint16, discovery bool) { d.joined(n, nc, tsih, discovery) },
		Advanced:  func(p limits.Progress) { d.net.newcomers.advance(n, p) },
		Encrypted: a.g.encrypted,
		Authorize: func(c iscsi.Claim) error { return d.ipsec.authorize(a.g, c) },
	}, func(deadline time.Time, missing int, ready func(error)) {
		w := d.net.waiting.Add(nc, deadline, func(fd int) bool { return llp.Come(fd, missing) }, func(err error) { go ready(err) })
		nc.WhenClosed(func() { w.Wake(nil) })
	}, func(error) {
		dm.Close()
		a.end()
	})
	return true
}

// mover returns the Datamover for what the initiator speaks, which the portal has to
// allow. It fails at the deadline; stage says where. The error for a manager is an *iser.Other.
func (d *Daemon) mover(ctx context.Context, p *servedPortal, nc *capture.Conn, deadline time.Time) (dm iscsi.Datamover, stage string, err error) {
	speaks, err := sniff(ctx, nc, deadline)
	if err != nil {
		return nil, "first byte", err
	}
	if !p.cfg.Serves(string(speaks)) {
		return nil, "portal", fmt.Errorf("the initiator speaks %s, but the transports of the portal are %v", speaks, p.cfg.Transports)
	}
	if speaks == transportTCP {
		c := tcp.New(nc, tcp.Options{})
		nc.Unread(c.Unread)
		return c, "", nil
	}
	o := *d.net.rdma.Load()
	o.StartupTimeout = max(time.Until(deadline), 1) // 0 is the default
	c, err := iser.AcceptUnless(ctx, nc, iser.Options{RDMA: o}, func(r *rdma.Request) *rdma.Answer { return d.notISER(p, r) })
	if err != nil {
		return nil, "mpa", err
	}
	nc.Unread(c.Stream().Unread)
	return c, "", nil
}

// stepUp implements iscsi.StepUp for portals.
func (d *Daemon) stepUp(params iscsi.Params, tasks int) (iscsi.EnableDatamover, error) {
	enable, err := iser.Allocate(iser.Options{RDMA: *d.net.rdma.Load()}, params, tasks)
	if err != nil {
		return nil, err
	}
	return func(nc net.Conn, prefix []byte, timeout time.Duration) (iscsi.Datamover, error) {
		tap := nc.(*capture.Conn)
		tap.Unread(nil) // unknown until the stream exists
		dm, err := enable(nc, prefix, timeout)
		if c, ok := dm.(interface{ Stream() *rdma.Conn }); ok {
			tap.Unread(c.Stream().Unread)
		}
		return dm, err
	}, nil
}

// joined notes that nc belongs to a session, for the captures. Except in discovery, nc
// then is no longer a newcomer.
func (d *Daemon) joined(n *newcomer, nc *capture.Conn, tsih uint16, discovery bool) {
	d.net.captures.Join(nc, tsih)
	if !discovery {
		d.net.newcomers.joined(n)
		nc.Poll(&d.net.polling)
	}
}

// refuse closes a connection before the iSCSI login. It logs that on one line, like that of a login.
func (d *Daemon) refuse(nc net.Conn, stage string, reason error) {
	defer nc.Close()
	d.log.Warn("login", eventKey, "login", "remote", nc.RemoteAddr(), "local", nc.LocalAddr(), "outcome", "refused", "stage", stage, "reason", reason)
}

// A transport is what an initiator speaks on a connection to a portal.
type transport string

const (
	transportISER transport = "iser"
	transportTCP  transport = "tcp"
)

const (
	firstOfMPA   = 'M'  // of "MPA ID Req Frame" (RFC 5044, section 7.1.1)
	loginRequest = 0x03 // opcode of a Login Request, without the immediate bit
	opcodeMask   = 0x3f
)

// sniff waits for the first byte of a connection, without consuming it, and returns what
// the initiator speaks.
func sniff(ctx context.Context, nc *capture.Conn, deadline time.Time) (transport, error) {
	raw, err := nc.SyscallConn()
	if err != nil {
		return "", err
	}
	if err := nc.SetReadDeadline(deadline); err != nil {
		return "", err
	}
	defer context.AfterFunc(ctx, func() { nc.SetReadDeadline(time.Unix(1, 0)) })()
	var (
		first [1]byte
		n     int
		perr  error
	)
	err = raw.Read(func(fd uintptr) bool {
		n, _, perr = unix.Recvfrom(int(fd), first[:], unix.MSG_PEEK)
		return perr != unix.EAGAIN && perr != unix.EINTR
	})
	if err == nil {
		err = perr
	}
	if err != nil {
		return "", fmt.Errorf("waiting for the first byte: %w", err)
	}
	if n == 0 {
		return "", fmt.Errorf("the initiator sent nothing: %w", io.EOF)
	}
	if err := nc.SetReadDeadline(time.Time{}); err != nil {
		return "", err
	}
	switch {
	case first[0] == firstOfMPA:
		return transportISER, nil
	case first[0]&opcodeMask == loginRequest:
		return transportTCP, nil
	}
	return "", fmt.Errorf("first byte %#02x begins neither an MPA Request nor an iSCSI Login Request", first[0])
}
