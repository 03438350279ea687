package iscsi

import (
	"cmp"
	"fmt"
	"maps"
	"net"
	"slices"
	"time"

	"github.com/iser-target/iser-target/lun"
)

// A SessionInfo is a session at one time.
type SessionInfo struct {
	TSIH       uint16
	Initiator  string // normalised iSCSI name
	ISID       [6]byte
	Target     string // normalised; empty in an unnamed discovery session
	TPGT       uint16
	Discovery  bool
	Params     Params // what the leading login agreed on
	Started    time.Time
	LUNs       []uint16 // that the initiator sees, ascending
	Tasks      int      // requests that have come and are not answered
	Transport  lun.Transport
	Counts     lun.Counts
	Latencies  *lun.Latencies // nil in a discovery session; so is Operations
	Operations *lun.Operations
	Conns      []ConnInfo
}

// A ConnInfo is a connection of a session at one time.
type ConnInfo struct {
	CID           uint16
	Transport     string // of the Datamover: "iser" or "tcp"
	Remote, Local net.Addr
	Portal        *Portal
	Started       time.Time
	Received      uint64   // PDUs and ends of RDMA Reads or R2Ts
	Framing       *Framing // nil over TCP
	Memory        int      // bytes of data buffers in use
	MemoryLimit   int      // bound of Memory
}

// Sessions returns the sessions in full feature phase, ascending by TSIH.
func (nd *Node) Sessions() []SessionInfo {
	nd.mu.Lock()
	all := slices.SortedFunc(maps.Values(nd.sessions), func(a, b *session) int { return cmp.Compare(a.tsih, b.tsih) })
	nd.mu.Unlock()
	list := make([]SessionInfo, len(all))
	for i, s := range all {
		list[i] = s.info()
	}
	return list
}

// Session returns the session with that handle, or ErrNoSession.
func (nd *Node) Session(tsih uint16) (SessionInfo, error) {
	s, err := nd.session(tsih)
	if err != nil {
		return SessionInfo{}, err
	}
	return s.info(), nil
}

// SessionEnd returns a channel that is closed when nothing is left of the session with that handle,
// or ErrNoSession.
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
		info.Latencies, info.Operations = new(s.nexus.Latencies()), new(s.nexus.Operations())
	}
	s.shared.mu.Lock()
	defer s.shared.mu.Unlock()
	s.shared.tasks.each(func(*Task) { info.Tasks++ })
	for _, c := range s.conns {
		var framing *Framing
		if f, ok := c.dm.(Framed); ok {
			framing = new(f.Framing())
		}
		info.Conns = append(info.Conns, ConnInfo{
			CID: c.cid, Transport: c.dm.Transport(), Remote: c.dm.RemoteAddr(), Local: c.dm.LocalAddr(),
			Portal: c.portal, Started: c.serveOptions.Accepted, Received: c.received.Load(), Framing: framing,
			Memory: c.opt.ConnectionMemory - c.budget.left(), MemoryLimit: c.opt.ConnectionMemory,
		})
	}
	return info
}
