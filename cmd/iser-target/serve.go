package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/iscsi/tcp"
	"github.com/iser-target/iser-target/iser"
	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/security"
)

const (
	// portalGroup is the TargetPortalGroupTag of all portals.
	portalGroup = 1
	// ird and ord are the RDMA Read depths: no initiator reads from us; siw
	// takes in up to 128 Reads.
	ird, ord = 16, 128
	// shutdownTime bounds the end of the sessions at SIGTERM.
	shutdownTime = 15 * time.Second
	// userTimeout is after which time of unacknowledged data TCP gives up.
	userTimeout = 60 * time.Second
)

// A server is a running target: portals, targets and what serves them.
type server struct {
	cfg     *config.Config
	log     *slog.Logger
	node    *iscsi.Node
	units   *units
	policy  security.ConnPolicy
	rdma    rdma.Options
	portals []*portal
	debug   *http.Server
	dbgAddr net.Addr

	conns atomic.Int64 // TCP connections
	wg    sync.WaitGroup
}

type portal struct {
	*iscsi.Portal
	l   net.Listener
	cfg config.Portal
}

// newServer opens the stores and the listeners. Nothing is served yet, but
// initiators can connect.
func newServer(cfg *config.Config, logTo io.Writer) (*server, error) {
	s := &server{
		cfg:    cfg,
		log:    newLogger(cfg.Log, logTo),
		policy: security.AllowAll{},
		rdma: rdma.Options{
			IRD: ird, ORD: ord,
			MaxULPDU:       cfg.Limits.MaxFPDU,
			NoCRC:          !bool(cfg.MPA.CRC),
			StartupTimeout: cfg.Limits.LoginTimeout,
			Domain:         rdma.NewDomain(),
		},
	}
	discovery, err := cfg.DiscoveryAuth.CHAP()
	if err != nil {
		return nil, fmt.Errorf("discovery_auth: %w", err)
	}
	nop := cfg.Limits.NOPInterval
	if nop == 0 {
		nop = -1
	}
	s.node = iscsi.NewNode(iscsi.Options{
		QueueDepth:       cfg.Limits.QueueDepth,
		ConnectionMemory: int(cfg.Limits.ConnectionMemory),
		LoginTimeout:     cfg.Limits.LoginTimeout,
		NopInterval:      nop,
		NopTimeout:       cfg.Limits.NOPTimeout,
		DiscoveryAuth:    discovery,
		Limits:           keys.Limits{Digests: true},
		Logger:           s.log,
	})
	if err := s.open(); err != nil {
		s.closeListeners()
		return nil, errors.Join(err, s.units.close())
	}
	return s, nil
}

// open opens stores, portals and the debug server.
func (s *server) open() (err error) {
	if s.units, err = openUnits(s.cfg, s.node); err != nil {
		return err
	}
	for _, pc := range s.cfg.Portals {
		l, err := listen(pc.Listen)
		if err != nil {
			return fmt.Errorf("portal %s: %w", pc.Listen, err)
		}
		s.portals = append(s.portals, &portal{s.node.AddPortal(iscsi.PortalConfig{
			Listen: l.Addr().String(), Advertise: pc.Advertise, TPGT: portalGroup,
		}), l, pc})
	}
	if addr := s.cfg.Debug.Listen; addr != "" {
		if err := s.listenDebug(addr); err != nil {
			return fmt.Errorf("debug server %s: %w", addr, err)
		}
	}
	return nil
}

func newLogger(c config.Log, w io.Writer) *slog.Logger {
	o := &slog.HandlerOptions{Level: c.SlogLevel()}
	if c.Format == "json" {
		return slog.New(slog.NewJSONHandler(w, o))
	}
	return slog.New(slog.NewTextHandler(w, o))
}

// listen opens a portal. Accepted connections inherit the socket options.
func listen(addr string) (net.Listener, error) {
	lc := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		var err error
		cerr := raw.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(userTimeout.Milliseconds()))
		})
		return errors.Join(cerr, err)
	}}
	return lc.Listen(context.Background(), "tcp", addr)
}

// run serves until ctx ends, then ends the sessions and closes the stores.
func (s *server) run(ctx context.Context) error {
	for _, w := range s.cfg.Warnings() {
		s.log.Warn("configuration", "reason", w)
	}
	for _, p := range s.portals {
		s.log.Info("serving", "portal", p.l.Addr(), "advertise", p.Advertise)
		s.wg.Add(1)
		go func() {
			defer s.wg.Done()
			s.acceptLoop(ctx, p)
		}()
	}
	if s.debug != nil {
		s.log.Info("debug server", "url", fmt.Sprintf("http://%v/debug/vars", s.dbgAddr))
	}
	<-ctx.Done()
	s.log.Info("shutting down")
	s.closeListeners()
	end, cancel := context.WithTimeout(context.Background(), shutdownTime)
	defer cancel()
	err := s.node.Shutdown(end)
	if err != nil {
		err = fmt.Errorf("sessions did not end within %v: %w", shutdownTime, err)
	} else {
		s.wg.Wait()
	}
	if err = errors.Join(err, s.units.close()); err == nil {
		s.log.Info("stopped")
	}
	return err
}

func (s *server) closeListeners() {
	for _, p := range s.portals {
		p.l.Close()
	}
	if s.debug != nil {
		s.debug.Close()
	}
}

// acceptLoop takes connections until the listener is closed.
func (s *server) acceptLoop(ctx context.Context, p *portal) {
	for {
		nc, err := p.l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			// Out of file descriptors, most likely: others may be closed soon.
			s.log.Error("accept", "portal", p.l.Addr(), "reason", err)
			select {
			case <-ctx.Done():
				return
			case <-time.After(100 * time.Millisecond):
			}
			continue
		}
		if n := s.conns.Add(1); n > int64(s.cfg.Limits.MaxConnections) {
			s.refused(nc, "limit", fmt.Errorf("limits.max_connections is %d", s.cfg.Limits.MaxConnections))
			s.conns.Add(-1)
			nc.Close()
			continue
		}
		s.wg.Add(1)
		go func() {
			defer s.wg.Done()
			defer s.conns.Add(-1)
			s.serve(ctx, p, nc)
		}()
	}
}

// serve runs one connection from its first octet to its end.
func (s *server) serve(ctx context.Context, p *portal, nc net.Conn) {
	if err := s.policy.Admit(nc.LocalAddr(), nc.RemoteAddr()); err != nil {
		s.refused(nc, "policy", err)
		nc.Close()
		return
	}
	dm, stage, err := s.mover(ctx, p, nc)
	if err != nil {
		s.refused(nc, stage, err)
		nc.Close()
		return
	}
	defer dm.Close()
	p.Serve(dm) // which logs the outcome
}

// mover finds out what the initiator speaks, which the portal has to allow, and
// returns the datamover for it. The stage is where it failed.
func (s *server) mover(ctx context.Context, p *portal, nc net.Conn) (dm iscsi.Datamover, stage string, err error) {
	speaks, err := sniff(nc, s.cfg.Limits.LoginTimeout)
	if err != nil {
		return nil, "first octet", err
	}
	if !p.cfg.Serves(string(speaks)) {
		return nil, "portal", fmt.Errorf("the initiator speaks %s, transports of the portal are %v", speaks, p.cfg.Transports)
	}
	if speaks == transportTCP {
		return tcp.New(nc, tcp.Options{}), "", nil
	}
	c, err := iser.Accept(ctx, nc, iser.Options{RDMA: s.rdma})
	if err != nil {
		return nil, "mpa", err
	}
	return c, "", nil
}

// refused leaves the one line of a connection that did not get as far as
// iSCSI login, in the form of the line about a login.
func (s *server) refused(nc net.Conn, stage string, reason error) {
	s.log.Warn("login", "remote", nc.RemoteAddr(), "local", nc.LocalAddr(), "outcome", "refused", "stage", stage, "reason", reason)
}

// invitation tells a newcomer what to type.
func (s *server) invitation() string {
	var b strings.Builder
	addr := s.portals[0].l.Addr()
	name := s.cfg.Targets[0].Name
	fmt.Fprintf(&b, `Serving %s at %v: one memory disk, for this machine only.
Without --config nothing is kept; see docs/config.md for a lasting set-up.

A Linux initiator on this machine, as root, over TCP:
    iscsiadm -m discovery -t st -p %v
    iscsiadm -m node -T %s -p %v --login
With libiscsi:
    iscsi-ls -s iscsi://%v
The same over RDMA, with "-I iser" behind both iscsiadm lines and iser:// for
iscsi://. siw of Linux 6.1 cannot use lo: there, and from other machines, take a
portal on the address of a real interface, as README.md describes.
    modprobe siw && modprobe ib_iser && rdma link add siw0 type siw netdev lo

`, name, addr, addr, name, addr, addr)
	return b.String()
}
