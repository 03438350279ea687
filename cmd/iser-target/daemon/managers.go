package daemon

import (
	"context"
	"errors"
	"net"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/capture"
	"github.com/iser-target/iser-target/cmd/iser-target/tunnel"
	"github.com/iser-target/iser-target/rdma"
)

// managerGrace is what requests of managers have when the daemon ends, or continues in another process.
const managerGrace = time.Second

// errNoManagers refuses a manager at a portal for initiators only.
var errNoManagers = errors.New("the peer asks for RPC-over-RDMA, but control of the portal is not set")

// A Manager is a connection to the control API through a portal. Nobody has authenticated it yet.
type Manager struct {
	net.Conn // a *tunnel.Conn
	joined   func()
}

// Authenticated notes that the peer has proved its identity. The connection then yields to no other.
func (m *Manager) Authenticated() { m.joined() }

// ServeManagers makes serve get each Manager. serve returns at once, and closes the Manager when it is done with it. An error
// refuses it. Without ServeManagers, portals refuse all.
func (d *Daemon) ServeManagers(serve func(*Manager) error) { d.managers.Store(&serve) }

// notISER returns the answer to an MPA Request that is not for iSER, or nil if it is.
func (d *Daemon) notISER(p *servedPortal, r *rdma.Request) *rdma.Answer {
	if !tunnel.Announced(r) {
		return nil
	}
	a := tunnel.Answer()
	switch {
	case !p.cfg.Control:
		a.Reject = errNoManagers
	case d.managers.Load() == nil:
		a.Reject = errors.New("the control API does not run")
	}
	return &a
}

// manage serves the manager at the other end of rc until one side ends that. nc is the connection below.
func (d *Daemon) manage(n *newcomer, nc *capture.Conn, rc *rdma.Conn) {
	t, err := tunnel.Serve(rc)
	if err != nil {
		d.refuse(nc, "control", err)
		return
	}
	err = (*d.managers.Load())(&Manager{t, func() { d.net.newcomers.joined(n) }})
	if err != nil {
		d.refuse(nc, "control", err)
	}
	select {
	case <-t.Done():
	case <-n.ctx.Done():
		if context.Cause(n.ctx) == context.Canceled { // the daemon ends
			select {
			case <-t.Done():
			case <-time.After(managerGrace):
			}
		}
	}
	if cause := context.Cause(n.ctx); cause != nil && cause != context.Canceled {
		d.log.Warn("manager was disconnected", eventKey, "control", "remote", nc.RemoteAddr(), "local", nc.LocalAddr(), "reason", cause)
	}
	t.Close()
	<-t.Done()
}
