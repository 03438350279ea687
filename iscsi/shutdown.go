package iscsi

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/invariant"
)

var errShutdown = errors.New("target shuts down")

// partingWait is how long a connection may take to end after Shutdown has announced it.
const partingWait = 100 * time.Millisecond

// A closing is where initiators shall go while a node is emptied.
type closing struct{ to string }

// refusal returns the error of a login while the node is emptied.
func (c *closing) refusal() *loginError {
	if c.to == "" {
		return refuse(pdu.LoginUnavailable, "target is being drained")
	}
	return refuse(pdu.LoginMovedTemporarily, "target is being drained, and sends initiators to "+c.to)
}

// Empty makes the initiators leave. Logins to targets are sent to the address, which is as in a Redirect, or
// refused as "service unavailable" if it is empty. Initiators of normal sessions are asked to log out
// (Asynchronous Message 1, RFC 7143, section 11.9.1) before the deadline of ctx. Until they do, they are
// served. Empty returns how many sessions are left, with the error of ctx, or 0 and nil when all have ended.
// Logins stay refused. Shutdown follows.
func (nd *Node) Empty(ctx context.Context, to string) (left int, err error) {
	nd.mu.Lock()
	nd.closing.Store(&closing{to})
	nd.mu.Unlock()
	end, ok := ctx.Deadline()
	if !ok {
		end = time.Now().Add(time.Duration(1<<16-1) * time.Second) // the most that the message can say
	}
	asked := map[*conn]bool{}
	tick := time.NewTicker(emptyPoll)
	defer tick.Stop()
	for {
		var conns []*conn
		nd.mu.Lock()
		left = nd.normalSessions()
		for c := range nd.conns {
			if !asked[c] {
				conns = append(conns, c)
			}
		}
		nd.mu.Unlock()
		if left == 0 {
			return 0, nil
		}
		for _, c := range conns { // those in login are asked when they are through
			if c.askLogout(max(time.Until(end), 0)) {
				asked[c] = true
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			nd.mu.Lock()
			defer nd.mu.Unlock()
			if left = nd.normalSessions(); left == 0 {
				return 0, nil
			}
			return left, ctx.Err()
		}
	}
}

// emptyPoll is how often Empty looks.
const emptyPoll = 20 * time.Millisecond

// normalSessions returns how many sessions there are, except those for discovery.
//
// Preconditions: nd.mu is held.
func (nd *Node) normalSessions() (n int) {
	invariant.Held(&nd.mu)
	for _, s := range nd.sessions {
		if !s.discovery {
			n++
		}
	}
	return n
}

// Shutdown ends everything at once, so that initiators can go to the next process without delay. The node
// refuses logins from now on. It announces to the initiators of normal sessions that it drops the connection,
// and that they may come back at once (Asynchronous Message 2 with Time2Wait 0, RFC 7143, section 11.9.1).
// Shutdown returns nil when all Serve calls have ended, or the error of ctx if that is done earlier.
func (nd *Node) Shutdown(ctx context.Context) error {
	nd.mu.Lock()
	nd.stopping.Store(true)
	conns := slices.Collect(maps.Keys(nd.conns))
	nd.mu.Unlock()
	for _, c := range conns {
		c.dismiss(pdu.AsyncConnectionDropped, 0, partingWait, errShutdown)
	}
	for _, c := range conns {
		select {
		case <-c.done:
		case <-ctx.Done():
			for _, c := range conns {
				c.end(errShutdown)
			}
			return ctx.Err()
		}
	}
	nd.mu.Lock()
	left := slices.Collect(maps.Values(nd.sessions)) // which wait for a connection
	nd.mu.Unlock()
	for _, s := range left {
		s.end(errShutdown)
	}
	return nil
}

// cutOffWait is how long a session may take to end after EndSession has cut it off, in addition to
// limits.fence_timeout.
const cutOffWait = time.Second

// EndSession ends the session. Its initiator is asked to log out (Asynchronous Message 1, RFC 7143,
// section 11.9.1) within grace. Then the node tells it that the session is dropped (event 3), and
// disconnects it. No connection joins the session from now on. EndSession returns nil when nothing
// of the session is left. When ctx is done it cuts the session off and returns the error of ctx if
// tasks are left even then. The error is ErrNoSession if there is no such session.
func (nd *Node) EndSession(ctx context.Context, tsih uint16, grace time.Duration, reason error) error {
	s, err := nd.session(tsih)
	if err != nil {
		return err
	}
	conns := s.close(reason)
	asked := false
	if grace > 0 {
		for _, c := range conns {
			asked = c.askLogout(grace) || asked
		}
	}
	if asked {
		wait, cancel := context.WithTimeout(ctx, grace)
		defer cancel()
		select {
		case <-s.done:
			return nil
		case <-wait.Done():
		}
	}
	for _, c := range conns {
		c.dismiss(pdu.AsyncSessionDropped, c.params.DefaultTime2Wait, c.opt.LogoutWait, reason)
	}
	select {
	case <-s.done:
		return nil
	case <-ctx.Done():
	}
	for _, c := range conns {
		c.stop(reason)
	}
	select {
	case <-s.done:
		return nil
	case <-time.After(nd.shared.FenceTimeout.Time() + cutOffWait):
		return fmt.Errorf("TSIH %d: tasks of the session have not ended yet: %w", tsih, ctx.Err())
	}
}

// EndConnection ends the connection between these addresses at once, for that reason. Without recovery its session ends, too. It
// returns false if there is no such connection.
func (nd *Node) EndConnection(local, remote netip.AddrPort, reason error) bool {
	nd.mu.Lock()
	conns := slices.Collect(maps.Keys(nd.conns))
	nd.mu.Unlock()
	for _, c := range conns {
		c.mu.Lock() // a step-up replaces the Datamover
		a := c.addr()
		c.mu.Unlock()
		if addrPortOf(a.Local) == local && addrPortOf(a.Remote) == remote {
			c.end(reason)
			return true
		}
	}
	return false
}

// addrPortOf returns a without a zone, and as IPv4 if it is IPv4 in IPv6; the zero value if a is not of TCP.
func addrPortOf(a net.Addr) netip.AddrPort {
	t, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.AddrPort{}
	}
	ap := t.AddrPort()
	return netip.AddrPortFrom(ap.Addr().Unmap().WithZone(""), ap.Port())
}

// drainPoll is how often Drain looks.
const drainPoll = 2 * time.Millisecond

// Drain waits until the commands that have come so far for a LUN of that inventory have ended, those
// of all sessions. It returns how many are left, and the error of ctx if that is done earlier.
func (nd *Node) Drain(ctx context.Context, inv *lun.Inventory, id uint16) (left int, err error) {
	last := map[*shared]uint64{} // of each session: seq of the last task so far
	nd.mu.Lock()
	for _, s := range nd.sessions {
		if s.nexus != nil && s.target.LUNs == inv {
			last[s.shared] = 0
		}
	}
	nd.mu.Unlock()
	for s := range last {
		s.mu.Lock()
		last[s] = s.seq
		s.mu.Unlock()
	}
	field := lun.EncodeLUN(id)
	tick := time.NewTicker(drainPoll)
	defer tick.Stop()
	for {
		left = 0
		for s, seq := range last {
			s.mu.Lock()
			s.tasks.each(func(t *Task) {
				if t.isCommand() && t.seq <= seq && t.header().LUN() == field {
					left++
				}
			})
			s.mu.Unlock()
		}
		if left == 0 {
			return 0, nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return left, ctx.Err()
		}
	}
}
