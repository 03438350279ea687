package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/checked"
	"github.com/iser-target/iser-target/backend/handed"
	"github.com/iser-target/iser-target/cmd/iser-target/handover"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/tcp"
	"github.com/iser-target/iser-target/iser"
)

// What the daemon gets from another process (Options.Received): its listeners and locked files before it opens
// anything, then the state of LUNs, and the sessions. An error ends the hand-over, and the other process
// continues.

// receive makes the files of the other process available to those who open them.
func (d *Daemon) receive() error {
	r := d.received
	if r == nil {
		return nil
	}
	if !r.Kept {
		d.started = r.Started
	}
	if f := r.Take(handover.KindSupervisor, ""); f != nil {
		d.supervisor = handover.NewSupervisor(f, r.Supervised)
	}
	if err := r.TakeAll(handover.KindListener, d.listeners.Receive); err != nil {
		return err
	}
	return r.TakeAll(handover.KindLock, func(name string, f *os.File) error {
		if err := handed.Give(f); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		return nil
	})
}

// adoptSerials gives LUNs without a state directory the identities that they had.
func (d *Daemon) adoptSerials() error {
	if d.received == nil {
		return nil
	}
	for key, serial := range d.received.Serials {
		if _, err := d.state.ids.Adopt(key, serial); err != nil {
			return err
		}
	}
	return nil
}

// receiveMemory fills a memory store with the data that it had in the other process.
func (d *Daemon) receiveMemory(target string, id int, s backend.Store) error {
	m, ok := s.(*backend.Memory)
	if !ok || d.received == nil {
		return nil
	}
	f := d.received.Take(handover.KindMemory, handover.MemoryName(target, id))
	if f == nil {
		return nil
	}
	defer f.Close()
	return m.Take(f)
}

// receiveChecksums returns what the other process knows about the checksums of a LUN, or nil. It is true once. A process
// that has ended since (Kept) may have failed to write checksums.
func (d *Daemon) receiveChecksums(target string, id int) *checked.Rested {
	if d.received == nil || d.received.Kept {
		return nil
	}
	for i := range d.received.LUNs {
		if st := &d.received.LUNs[i]; st.Target == target && st.ID == id {
			r := st.Checksums
			st.Checksums = nil
			return r
		}
	}
	return nil
}

// continueAll restores the LUNs, and makes the sessions again. Run runs them.
func (d *Daemon) continueAll() error {
	r := d.received
	if r == nil {
		return nil
	}
	defer r.Close()
	lost := map[string]error{} // targets of which a LUN is not what it was
	for _, st := range r.LUNs {
		if err := d.restoreLUN(&st); err != nil {
			err = fmt.Errorf("LUN %d of %s: %w", st.ID, st.Target, err)
			if !r.Kept {
				return err
			}
			lost[st.Target] = err
		}
	}
	for _, st := range r.Sessions {
		err := lost[st.Target]
		if err == nil {
			err = d.continueSession(st)
		}
		if err != nil {
			err = fmt.Errorf("session %d of %s: %w", st.TSIH, st.Initiator, err)
			if !r.Kept {
				return err
			}
			d.log.Warn("session does not continue after the restart", eventKey, "service", "reason", err)
		}
	}
	if r.Kept {
		d.listeners.CloseReceived()
		d.listeners.Own()
		if n := len(d.continued); n > 0 {
			d.log.Info("sessions continue after the restart", eventKey, "service", "connections", n, "before", r.Version)
		}
	}
	return nil
}

// restoreLUN gives a LUN the state that it had.
func (d *Daemon) restoreLUN(st *handover.LUN) error {
	l, err := d.lun(st.Target, st.ID)
	if err != nil {
		return err
	}
	switch naa := l.unit.Identity().Serial; {
	case l.fault != nil:
		return l.fault
	case naa != st.NAA:
		return fmt.Errorf("its NAA is %s, and not %s", naa, st.NAA)
	}
	if err := l.unit.Restore(st.State); err != nil {
		return err
	}
	d.locked(func() {
		l.health = initialHealth(l.unit)
		if is := l.unit.Health(); l.health.is < is {
			l.health = health{is: is, reason: reasonBefore, since: time.Now()}
		}
	})
	return nil
}

// CheckReceived closes the files that nobody has taken. A listener among them is an error: clients that connect to
// it would wait forever.
func (d *Daemon) CheckReceived() error {
	if names := d.listeners.CloseReceived(); len(names) > 0 {
		return fmt.Errorf("listeners that the configuration does not have: %q", names)
	}
	return handed.Close()
}

// continueSession makes a session again.
func (d *Daemon) continueSession(st iscsi.SessionState) (err error) {
	var (
		ends      []iscsi.End
		newcomers []*newcomer
		known     []*guarded
	)
	defer func() {
		if err == nil {
			return
		}
		for _, n := range newcomers {
			d.net.newcomers.end(n)
		}
		for _, g := range known {
			d.ipsec.leave(g)
		}
	}()
	for i := range st.Conns {
		end, n, g, err := d.continueConnection(&st, &st.Conns[i])
		if n != nil {
			newcomers = append(newcomers, n)
		}
		if g != nil {
			known = append(known, g)
		}
		if err != nil {
			for _, e := range ends {
				e.Mover.Close()
			}
			return fmt.Errorf("connection %d: %w", st.Conns[i].CID, err)
		}
		ends = append(ends, end)
	}
	run, err := d.node.Continue(st, ends)
	if err != nil {
		return err
	}
	for i, serve := range run {
		dm, n, g := ends[i].Mover, newcomers[i], known[i]
		d.continued = append(d.continued, func() {
			defer d.net.newcomers.end(n)
			defer d.ipsec.leave(g)
			defer dm.Close()
			serve() // which logs the end
		})
	}
	return nil
}

// continueConnection returns where a connection of st continues. n is nil if it got no place.
func (d *Daemon) continueConnection(st *iscsi.SessionState, c *iscsi.ConnState) (end iscsi.End, n *newcomer, g *guarded, err error) {
	f := d.received.Take(handover.KindConnection, handover.ConnectionName(st.TSIH, c.CID))
	if f == nil {
		return end, nil, nil, errors.New("its socket is missing")
	}
	defer f.Close()
	nc, err := net.FileConn(f)
	if err != nil {
		return end, nil, nil, err
	}
	defer func() {
		if err != nil {
			nc.Close()
		}
	}()
	socket, ok := nc.(*net.TCPConn)
	p := d.portalAt(c.Portal)
	switch {
	case !ok:
		return end, nil, nil, fmt.Errorf("its socket is one of %s", nc.LocalAddr().Network())
	case p == nil:
		return end, nil, nil, fmt.Errorf("its portal %s is missing", c.Portal)
	}
	if n, err = d.net.newcomers.add(context.Background(), socket, p.l.Addr()); err != nil {
		return end, nil, nil, err
	}
	tap := d.net.captures.Tap(socket)
	n.abortBy(tap.Abort)
	g = d.ipsec.add(p, n, tap)
	d.ipsec.resume(g, iscsi.Claim{Initiator: st.Initiator, Target: st.Target, Discovery: st.Params.Discovery})
	end = iscsi.End{Portal: p.cur.Load().Portal, Options: iscsi.ServeOptions{
		Accepted: c.Accepted,
		Joined:   func(tsih uint16, discovery bool) { d.joined(n, tap, tsih, discovery) },
	}}
	switch transport(c.Transport) {
	case transportTCP:
		var state tcp.State
		if err := json.Unmarshal(c.Mover, &state); err != nil {
			return end, n, g, err
		}
		dm, err := tcp.Continue(tap, state)
		if err != nil {
			return end, n, g, err
		}
		tap.Unread(dm.Unread)
		end.Mover = dm
	case transportISER:
		var state iser.State
		if err := json.Unmarshal(c.Mover, &state); err != nil {
			return end, n, g, err
		}
		dm, err := iser.Continue(tap, iser.Options{RDMA: *d.net.rdma.Load()}, state)
		if err != nil {
			return end, n, g, err
		}
		tap.Unread(dm.Stream().Unread)
		end.Mover = dm
	default:
		return end, n, g, fmt.Errorf("its transport is %q", c.Transport)
	}
	return end, n, g, nil
}

// portalAt returns the portal with that address, or nil.
func (d *Daemon) portalAt(addr string) *portal {
	for _, p := range d.served.portals {
		if p.l.Addr().String() == addr {
			return p
		}
	}
	return nil
}
