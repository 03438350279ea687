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

// userTimeout is after which time of unacknowledged data TCP gives up.
const userTimeout = 60 * time.Second

// A portal is a listener, and what is said of it at the time.
type portal struct {
	l net.Listener
	// passed tells that the service manager has the socket, too: as long as it has, the
	// address is taken, and who connects waits for somebody to accept.
	passed bool
	cur    atomic.Pointer[servedPortal]

	mu  sync.Mutex
	had []*iscsi.Portal // guarded by mu: all that it has been
}

// connections is how many the session has by way of p.
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

// A servedPortal is a portal as new connections meet it. It is not changed; a new one
// takes its place.
type servedPortal struct {
	*iscsi.Portal
	cfg config.Portal
}

// listen opens a portal, on the socket that the service manager has passed for it if
// there is one.
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

// describePortal makes c what new connections and discovery meet on p. It returns what
// there was before, or nil.
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

// listenTCP opens a listener. Accepted connections inherit the socket options.
func listenTCP(addr string) (net.Listener, error) {
	lc := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error { return setOptions(raw) }}
	return lc.Listen(context.Background(), "tcp", addr)
}

// control sets the socket options of a listener that is open.
func control(l *net.TCPListener) error {
	raw, err := l.SyscallConn()
	if err != nil {
		return err
	}
	return setOptions(raw)
}

func setOptions(raw syscall.RawConn) error {
	var err error
	cerr := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(userTimeout.Milliseconds()))
	})
	return errors.Join(cerr, err)
}

// accept serves p from now on, if Run has begun.
func (d *Daemon) accept(p *portal) {
	ctx := d.running
	if ctx == nil {
		return
	}
	cur := p.cur.Load()
	d.log.Info("serving", "portal", p.l.Addr(), "tpgt", cur.TPGT, "advertise", cur.Advertise, eventKey, "service")
	d.wg.Add(1)
	go func() {
		defer d.wg.Done()
		d.acceptLoop(ctx, p)
	}()
}

// acceptLoop takes connections until the listener is closed.
func (d *Daemon) acceptLoop(ctx context.Context, p *portal) {
	for {
		nc, err := p.l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			// Out of file descriptors, most likely: others may be closed soon.
			d.log.Error("accept", "portal", p.l.Addr(), "reason", err)
			select {
			case <-ctx.Done():
				return
			case <-time.After(100 * time.Millisecond):
			}
			continue
		}
		if n, most := d.conns.Add(1), d.limits.Load().MaxConnections; n > int64(most) {
			limit := fmt.Errorf("limits.max_connections is %d", most)
			gaveWay := d.newcomers.giveWay(fmt.Errorf("%w, and this one had not logged in: %w", limit, errGaveWay))
			d.conns.Add(-1) // that place is taken, even before its connection has ended
			if !gaveWay {
				d.refused(nc, "limit", limit)
				nc.Close()
				continue
			}
		}
		d.wg.Add(1)
		tap := d.captures.Tap(nc.(*net.TCPConn))
		ctx, end := d.newcomers.add(ctx, tap)
		go func() {
			defer d.wg.Done()
			defer end(nil)
			d.serve(ctx, p.cur.Load(), tap)
			d.newcomers.remove(tap)
			if !errors.Is(context.Cause(ctx), errGaveWay) {
				d.conns.Add(-1)
			}
		}()
	}
}

// serve runs one connection from its first octet to its end.
func (d *Daemon) serve(ctx context.Context, p *servedPortal, nc *capture.Conn) {
	accepted := time.Now()
	if err := d.policy.Admit(nc.LocalAddr(), nc.RemoteAddr()); err != nil {
		d.refused(nc, "policy", err)
		nc.Close()
		return
	}
	dm, stage, err := d.mover(ctx, p, nc, accepted.Add(d.limits.Load().LoginTimeout))
	if err != nil {
		if cause := context.Cause(ctx); errors.Is(cause, errGaveWay) {
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

// mover finds out what the initiator speaks, which the portal has to allow, and
// returns the datamover for it, until deadline. The stage is where it failed.
func (d *Daemon) mover(ctx context.Context, p *servedPortal, nc *capture.Conn, deadline time.Time) (dm iscsi.Datamover, stage string, err error) {
	speaks, err := sniff(ctx, nc, deadline)
	if err != nil {
		return nil, "first octet", err
	}
	if !p.cfg.Serves(string(speaks)) {
		return nil, "portal", fmt.Errorf("the initiator speaks %s, transports of the portal are %v", speaks, p.cfg.Transports)
	}
	if speaks == transportTCP {
		c := tcp.New(nc, tcp.Options{})
		nc.Unread(c.Unread)
		return c, "", nil
	}
	o := *d.rdma.Load()
	o.StartupTimeout = max(time.Until(deadline), 1) // 0 is the default
	c, err := iser.Accept(ctx, nc, iser.Options{RDMA: o})
	if err != nil {
		return nil, "mpa", err
	}
	nc.Unread(c.Stream().Unread)
	return c, "", nil
}

// refused leaves the one line of a connection that did not get as far as
// iSCSI login, in the form of the line about a login.
func (d *Daemon) refused(nc net.Conn, stage string, reason error) {
	d.log.Warn("login", eventKey, "login", "remote", nc.RemoteAddr(), "local", nc.LocalAddr(), "outcome", "refused", "stage", stage, "reason", reason)
}
