package daemon

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/cmd/iser-target/capture"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/tcp"
	"github.com/iser-target/iser-target/iser"
)

// userTimeout is the time after which TCP gives up on unacknowledged data.
const userTimeout = 60 * time.Second

// A portal is a listener and its current description.
type portal struct {
	l net.Listener
	// passed says that the service manager has the socket, too. Then the address stays in
	// use when l is closed, and initiators that connect wait.
	passed bool
	cur    atomic.Pointer[servedPortal]

	mu  sync.Mutex
	had []*iscsi.Portal // all that cur has pointed to; guarded by mu
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

// A servedPortal is the description of a portal for new connections. It does not change;
// another one replaces it.
type servedPortal struct {
	*iscsi.Portal
	cfg config.Portal
}

// listen listens on a portal, on the socket from the service manager if there is one.
func (d *Daemon) listen(c config.Portal) (*portal, error) {
	p := &portal{}
	if s := d.manager.Match(c.Listen); s != nil {
		p.l, p.passed = s.Listener, true
		if err := control(s.Listener.(*net.TCPListener)); err != nil {
			s.Close()
			return nil, fmt.Errorf("portal %s: %w", c.Listen, err)
		}
	} else {
		var err error
		if p.l, err = listenTCP(c.Listen); err != nil {
			return nil, fmt.Errorf("portal %s: %w", c.Listen, err)
		}
	}
	d.describePortal(p, c)
	return p, nil
}

// describePortal describes p by c to new connections and to discovery. It returns the
// description before, or nil.
func (d *Daemon) describePortal(p *portal, c config.Portal) (old *servedPortal) {
	pc := iscsi.PortalConfig{Listen: p.l.Addr().String(), Advertise: c.Advertise, TPGT: uint16(c.TPGT)}
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

// listenTCP listens on addr. Accepted connections inherit the socket options.
func listenTCP(addr string) (net.Listener, error) {
	lc := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error { return setOptions(raw) }}
	return lc.Listen(context.Background(), "tcp", addr)
}

// control sets the socket options of an open listener.
func control(l *net.TCPListener) error {
	raw, err := l.SyscallConn()
	if err != nil {
		return err
	}
	return setOptions(raw)
}

// setOptions sets the socket options of a portal.
func setOptions(raw syscall.RawConn) error {
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
	d.log.Info("serving", "portal", p.l.Addr(), "tpgt", cur.TPGT, "advertise", cur.Advertise, eventKey, "service")
	d.net.wg.Add(1)
	go func() {
		defer d.net.wg.Done()
		d.acceptLoop(ctx, p)
	}()
}

// acceptLoop accepts connections until the listener is closed.
func (d *Daemon) acceptLoop(ctx context.Context, p *portal) {
	for {
		nc, err := p.l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			// Probably no file descriptor is left, and another one is closed soon.
			d.log.Error("accept", "portal", p.l.Addr(), "reason", err)
			select {
			case <-ctx.Done():
				return
			case <-time.After(100 * time.Millisecond):
			}
			continue
		}
		if n, limit := d.net.conns.Add(1), d.net.limits.Load().MaxConnections; n > int64(limit) {
			limit := fmt.Errorf("limits.max_connections is %d", limit)
			displaced := d.net.newcomers.displace(fmt.Errorf("%w, and this one had not logged in: %w", limit, errDisplaced))
			d.net.conns.Add(-1) // of the displaced connection, which may end later
			if !displaced {
				d.refused(nc, "limit", limit)
				nc.Close()
				continue
			}
		}
		d.net.wg.Add(1)
		tap := d.net.captures.Tap(nc.(*net.TCPConn))
		ctx, end := d.net.newcomers.add(ctx, tap)
		go func() {
			defer d.net.wg.Done()
			defer end(nil)
			d.serve(ctx, p.cur.Load(), tap)
			d.net.newcomers.remove(tap)
			if !errors.Is(context.Cause(ctx), errDisplaced) {
				d.net.conns.Add(-1)
			}
		}()
	}
}

// serve runs a connection from its first byte to its end.
func (d *Daemon) serve(ctx context.Context, p *servedPortal, nc *capture.Conn) {
	accepted := time.Now()
	if err := d.net.policy.Admit(nc.LocalAddr(), nc.RemoteAddr()); err != nil {
		d.refused(nc, "policy", err)
		nc.Close()
		return
	}
	dm, stage, err := d.mover(ctx, p, nc, accepted.Add(d.net.limits.Load().LoginTimeout))
	if err != nil {
		if cause := context.Cause(ctx); errors.Is(cause, errDisplaced) {
			err = cause
		}
		d.refused(nc, stage, err)
		nc.Close()
		return
	}
	defer dm.Close()
	p.Serve(dm, iscsi.ServeOptions{ // which logs the outcome
		Accepted: accepted,
		Joined:   func(tsih uint16, discovery bool) { d.joined(nc, tsih, discovery) },
	})
}

// mover returns the Datamover for what the initiator speaks, which the portal has to
// allow. It fails at the deadline; stage says where.
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
	c, err := iser.Accept(ctx, nc, iser.Options{RDMA: o})
	if err != nil {
		return nil, "mpa", err
	}
	nc.Unread(c.Stream().Unread)
	return c, "", nil
}

// refused logs a connection that ends before the iSCSI login, on one line like that of a
// login.
func (d *Daemon) refused(nc net.Conn, stage string, reason error) {
	d.log.Warn("login", eventKey, "login", "remote", nc.RemoteAddr(), "local", nc.LocalAddr(), "outcome", "refused", "stage", stage, "reason", reason)
}
