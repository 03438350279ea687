package iscsi

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
)

var errShutdown = errors.New("target shuts down")

// Shutdown ends everything. The node refuses logins from now on, and asks the initiators of normal
// sessions to log out (Asynchronous Message 1, RFC 7143, section 11.9.1). After ShutdownWait it
// tells those that have not done so that it drops the connection, and disconnects them. Shutdown
// returns nil when all Serve calls have ended, or the error of ctx if that is done earlier.
func (nd *Node) Shutdown(ctx context.Context) error {
	wait := nd.opt.Load().ShutdownWait
	nd.mu.Lock()
	nd.stopping.Store(true)
	conns := slices.Collect(maps.Keys(nd.conns))
	nd.mu.Unlock()

	asked := conns[:0:0]
	for _, c := range conns {
		if c.askLogout(wait) {
			asked = append(asked, c)
		} else {
			c.stop(errShutdown)
		}
	}
	grace, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	for _, c := range asked {
		select {
		case <-c.done:
		case <-grace.Done():
		}
	}
	for _, c := range conns {
		c.dismiss(pdu.AsyncConnectionDropped, errShutdown) // section 11.9.1
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
		c.dismiss(pdu.AsyncSessionDropped, reason)
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
