package iscsi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/security"
)

// What an operator can look at and change while initiators are there.

// ErrNoTarget and ErrNoSession answer calls about what the node does not have.
var (
	ErrNoTarget  = errors.New("no such target")
	ErrNoSession = errors.New("no such session")
)

// SetOptions replaces the options. Connections that are there keep those they
// began with.
func (nd *Node) SetOptions(o Options) {
	o = o.complete()
	nd.opt.Store(&o)
}

// UpdateTarget replaces what the target of that name says of itself and who may
// log in. It is for logins from now on: one that is under way is refused with
// "service unavailable", for it was admitted by the old rules, and sessions stay
// as they are. The inventory must be the one that the target has.
func (nd *Node) UpdateTarget(cfg TargetConfig) error {
	name, err := security.NormalizeName(cfg.Name)
	if err != nil {
		return fmt.Errorf("target %q: %w", cfg.Name, err)
	}
	cfg.Name = name
	nd.mu.Lock()
	defer nd.mu.Unlock()
	i, ok := nd.searchTarget(name)
	switch {
	case !ok:
		return fmt.Errorf("target %q: %w", name, ErrNoTarget)
	case cfg.LUNs != nd.targets[i].LUNs:
		return fmt.Errorf("target %q: an inventory cannot be exchanged", name)
	}
	nd.targets = slices.Clone(nd.targets) // sendTargets may be walking the old one
	nd.targets[i] = &target{cfg, nd.targets[i].gate}
	return nil
}

// RemoveTarget takes the target away: nobody finds it or logs in any more. The
// sessions that it has go on; see EndSession.
func (nd *Node) RemoveTarget(name string) error {
	nd.mu.Lock()
	defer nd.mu.Unlock()
	i, ok := nd.searchTarget(name)
	if !ok {
		return fmt.Errorf("target %q: %w", name, ErrNoTarget)
	}
	nd.targets = slices.Delete(slices.Clone(nd.targets), i, i+1)
	return nil
}

// searchTarget is where in targets the name is, or is to be.
//
// Preconditions: mu is held.
func (nd *Node) searchTarget(name string) (int, bool) {
	return slices.BinarySearchFunc(nd.targets, name, func(t *target, name string) int { return strings.Compare(t.Name, name) })
}

// RemovePortal takes p out of what discovery answers. Its connections go on; that
// there are no new ones is up to the caller.
func (nd *Node) RemovePortal(p *Portal) {
	nd.mu.Lock()
	defer nd.mu.Unlock()
	nd.portals = slices.DeleteFunc(slices.Clone(nd.portals), func(o *Portal) bool { return o == p })
}

// A SessionInfo is a session at one time.
type SessionInfo struct {
	TSIH      uint16
	Initiator string // normalised iSCSI name
	ISID      [6]byte
	Target    string // normalised; empty in a discovery session without one
	TPGT      uint16
	Discovery bool
	Params    Params // what the leading login agreed on
	Started   time.Time
	LUNs      []uint16 // that the initiator sees, ascending
	Tasks     int      // requests that have come and are not answered
	Transport lun.Transport
	Counts    lun.Counts
	Latencies *lun.Latencies // nil in a discovery session
	Conns     []ConnInfo
}

// A ConnInfo is a connection of a session at one time.
type ConnInfo struct {
	CID           uint16
	Transport     string // of the Datamover: "iser" or "tcp"
	Remote, Local net.Addr
	Portal        *Portal
	Started       time.Time
	Received      uint64 // PDUs and ends of RDMA Reads or R2Ts
	Memory        int    // octets of data buffers in use
	MemoryLimit   int    // what those are bounded by
}

// Sessions are those in full feature phase, ascending by TSIH.
func (nd *Node) Sessions() []SessionInfo {
	nd.mu.Lock()
	all := make([]*session, 0, len(nd.sessions))
	for _, s := range nd.sessions {
		all = append(all, s)
	}
	nd.mu.Unlock()
	list := make([]SessionInfo, len(all))
	for i, s := range all {
		list[i] = s.info()
	}
	slices.SortFunc(list, func(a, b SessionInfo) int { return cmp.Compare(a.TSIH, b.TSIH) })
	return list
}

// Session is the one with that handle.
func (nd *Node) Session(tsih uint16) (SessionInfo, error) {
	s, err := nd.session(tsih)
	if err != nil {
		return SessionInfo{}, err
	}
	return s.info(), nil
}

// SessionEnd is closed when nothing is left of the session with that handle.
func (nd *Node) SessionEnd(tsih uint16) (<-chan struct{}, error) {
	s, err := nd.session(tsih)
	if err != nil {
		return nil, err
	}
	return s.done, nil
}

func (nd *Node) session(tsih uint16) (*session, error) {
	nd.mu.Lock()
	defer nd.mu.Unlock()
	if s := nd.sessions[tsih]; s != nil {
		return s, nil
	}
	return nil, fmt.Errorf("TSIH %d: %w", tsih, ErrNoSession)
}

func (s *session) info() SessionInfo {
	info := SessionInfo{
		TSIH: s.tsih, Initiator: s.key.initiator, ISID: s.key.isid, Target: s.key.target, TPGT: s.key.tpgt,
		Discovery: s.discovery, Params: s.params, Started: s.started,
	}
	if s.nexus != nil {
		info.LUNs, info.Counts, info.Transport = s.nexus.LUNs(), s.nexus.Counts(), s.nexus.Transport()
		took := s.nexus.Latencies()
		info.Latencies = &took
	}
	s.shared.mu.Lock()
	defer s.shared.mu.Unlock()
	s.shared.tasks.each(func(*Task) { info.Tasks++ })
	for _, c := range s.conns {
		info.Conns = append(info.Conns, ConnInfo{
			CID: c.cid, Transport: c.dm.Transport(), Remote: c.dm.RemoteAddr(), Local: c.dm.LocalAddr(),
			Portal: c.portal, Started: c.serveOptions.Accepted, Received: c.received.Load(),
			Memory: c.opt.ConnectionMemory - c.budget.left(), MemoryLimit: c.opt.ConnectionMemory,
		})
	}
	return info
}

// EndSession ends the session: its initiator is asked to log out (Asynchronous
// Message 1, RFC 7143, section 11.9.1) and has grace to do so, then it is told that
// the session is dropped (event 3) and disconnected. No connection joins the session
// any more. It returns when nothing of the session is left, or with the error of ctx,
// which makes the end immediate.
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
		wait := time.NewTimer(grace)
		defer wait.Stop()
		select {
		case <-s.done:
			return nil
		case <-wait.C:
		case <-ctx.Done():
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
	case <-time.After(cutOffWait):
		return fmt.Errorf("TSIH %d: %w: tasks of the session have not ended yet", tsih, ctx.Err())
	}
}

// cutOffWait is how long the tasks of a session may take that has been cut off.
const cutOffWait = time.Second

// drainPoll is how often Drain looks.
const drainPoll = 2 * time.Millisecond

// Drain waits until the commands that have come so far for a LUN of that inventory
// have ended, those of all sessions, or for the error of ctx. It returns how many
// are left.
func (nd *Node) Drain(ctx context.Context, inv *lun.Inventory, id uint16) (left int, err error) {
	type mark struct {
		*session
		seq uint64
	}
	var marks []mark
	nd.mu.Lock()
	for _, s := range nd.sessions {
		if s.nexus != nil && s.target.LUNs == inv {
			marks = append(marks, mark{session: s})
		}
	}
	nd.mu.Unlock()
	for i := range marks {
		m := &marks[i]
		m.shared.mu.Lock()
		m.seq = m.shared.seq
		m.shared.mu.Unlock()
	}
	field := lun.EncodeLUN(id)
	tick := time.NewTicker(drainPoll)
	defer tick.Stop()
	for {
		left = 0
		for _, m := range marks {
			m.shared.mu.Lock()
			m.shared.tasks.each(func(t *Task) {
				if t.isCommand() && t.seq <= m.seq && t.header().LUN() == field {
					left++
				}
			})
			m.shared.mu.Unlock()
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
