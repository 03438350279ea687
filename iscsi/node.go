package iscsi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/security"
)

// Params is what a login agreed on.
type Params = keys.Params

// Options of a Node. The zero value of a field means its default.
type Options struct {
	// QueueDepth is how many commands a session may have in flight; 128, as
	// many as ib_iser's cmds_max.
	QueueDepth int

	// ConnectionMemory bounds, in octets, the data buffers of one connection;
	// 64 MiB. A value below one piece of data counts as one piece. Immediate
	// data has small buffers of its own beside it: FirstBurstLength for each
	// command in flight at most.
	ConnectionMemory int

	// MaxTransferPiece is how much data, in octets, of a command is moved at
	// once; 1 MiB. It is rounded up to 4 KiB times a power of two and is never
	// less than 64 KiB or FirstBurstLength, nor more than 16 MiB.
	MaxTransferPiece int

	LoginTimeout      time.Duration // of a whole login; 15 s
	DiscoveryTimeout  time.Duration // between two requests of a discovery session; 60 s
	NopInterval       time.Duration // silence after which a normal session is pinged; 15 s; negative: never
	NopTimeout        time.Duration // silence after a ping that ends the connection; 30 s
	AckWait           time.Duration // for acknowledgements, before what is kept for SNACKs is given up; 5 s
	LogoutWait        time.Duration // for the initiator to close first after the last response; 2 s
	ReinstatementWait time.Duration // for the tasks of a session that a login replaces; 10 s
	ShutdownWait      time.Duration // for initiators to log out when the node shuts down; 3 s

	// DiscoveryAuth, unless it is nil, authenticates initiators before discovery.
	DiscoveryAuth *security.CHAP

	Limits keys.Limits  // what login may agree on; RDMA is set for each connection
	Logger *slog.Logger // for Events that are nil; slog.Default()
	Events Events       // nil: Logger gets a line for each event
}

// setDefault replaces the zero value.
func setDefault[T comparable](v *T, def T) {
	var zero T
	if *v == zero {
		*v = def
	}
}

func (o Options) complete() Options {
	setDefault(&o.QueueDepth, 128)
	setDefault(&o.ConnectionMemory, 64<<20)
	setDefault(&o.MaxTransferPiece, 1<<20)
	setDefault(&o.LoginTimeout, 15*time.Second)
	setDefault(&o.DiscoveryTimeout, 60*time.Second)
	setDefault(&o.NopInterval, 15*time.Second)
	setDefault(&o.NopTimeout, 30*time.Second)
	setDefault(&o.AckWait, 5*time.Second)
	setDefault(&o.LogoutWait, 2*time.Second)
	setDefault(&o.ReinstatementWait, 10*time.Second)
	setDefault(&o.ShutdownWait, 3*time.Second)
	setDefault(&o.Logger, slog.Default())
	if o.Events == nil {
		o.Events = logEvents{o.Logger}
	}
	setDefault(&o.Limits.FirstBurstLength, 65536)
	setDefault(&o.Limits.MaxRecvDataSegmentLength, 262144)

	o.QueueDepth = max(o.QueueDepth, 1)
	piece := max(o.MaxTransferPiece, lun.MaxParameterList, int(o.Limits.FirstBurstLength))
	o.MaxTransferPiece = min(1<<(minBufferShift+bufferClass(piece)), maxBuffer)
	o.ConnectionMemory = max(o.ConnectionMemory, o.MaxTransferPiece)
	return o
}

// A TargetConfig describes a target.
type TargetConfig struct {
	Name       string            // iSCSI name
	Alias      string            // TargetAlias; may be empty
	Initiators security.Patterns // who may log in
	Auth       *security.CHAP    // how they prove who they are; nil: they need not
	Redirect   Redirect          // where they are sent instead, if its Address is not empty
	LUNs       *lun.Inventory
	// PortalGroups are the tags of those that lead to the target; empty: all.
	PortalGroups []uint16
}

// A Redirect is where a target has moved to.
type Redirect struct {
	Address   string // host:port, or host alone; an IPv6 address is in brackets
	Permanent bool
}

type target struct {
	TargetConfig
	gate *orderedGate // of all that have, or had, the same LUNs
}

// servedBy tells whether the portal leads to t.
func (t *target) servedBy(p *Portal) bool {
	return len(t.PortalGroups) == 0 || slices.Contains(t.PortalGroups, p.TPGT)
}

// A PortalConfig describes a portal.
type PortalConfig struct {
	Listen    string   // host:port; an empty host or port 0 is known better per connection
	Advertise []string // what discovery answers instead, host:port each
	TPGT      uint16   // TargetPortalGroupTag; one that leads to a target is a port of its inventory
	StepUp    StepUp   // to RDMA mode, on connections whose Datamover is an Upgrader; nil: not here
}

// A Portal is one listening address of a Node.
type Portal struct {
	PortalConfig
	node *Node
}

// A Node is an iSCSI target node: its targets, portals and sessions.
type Node struct {
	opt     atomic.Pointer[Options] // complete; a new value takes the place of the old one
	buffers bufferPool
	stats   counters
	logins  loginCounts

	challenges sync.Map // CHAP challenges, as strings, of the logins under way

	mu       sync.Mutex
	targets  []*target // ascending by name
	portals  []*Portal
	sessions map[uint16]*session // by TSIH
	failed   atomic.Int32        // sessions that wait for a connection
	lastTSIH uint16
	ended    [lun.Transports]lun.Latencies // of sessions that are not there any more
	conns    map[*conn]struct{}            // from the first octet to the end of Serve
	stopping bool
}

// counters are the parts of Stats that change without a lock.
type counters struct {
	accepted, refused, sessionsEnded atomic.Uint64
	tasks                            atomic.Int64
}

// Stats is what a Node has to do and has done.
type Stats struct {
	Sessions         int    // in full feature phase, discovery included
	Connections      int    // from Serve to its return
	TasksInFlight    int    // task slots in use: requests, and PDUs on their way out
	BuffersOut       int    // data buffers in use
	BufferOctets     int    // their size
	LoginsAccepted   uint64 // since the start
	LoginsRefused    uint64
	SessionsFinished uint64
}

// NewNode makes a Node without targets and portals.
func NewNode(o Options) *Node {
	nd := &Node{
		sessions: make(map[uint16]*session),
		conns:    make(map[*conn]struct{}),
	}
	nd.SetOptions(o)
	return nd
}

// AddTarget adds a target. An error is about its name.
func (nd *Node) AddTarget(cfg TargetConfig) error {
	name, err := security.NormalizeName(cfg.Name)
	if err != nil {
		return fmt.Errorf("target %q: %w", cfg.Name, err)
	}
	if cfg.LUNs == nil {
		return fmt.Errorf("target %q: no LUN inventory", name)
	}
	cfg.Name = name
	nd.mu.Lock()
	defer nd.mu.Unlock()
	i, taken := nd.searchTarget(name)
	if taken {
		return fmt.Errorf("target %q: name is used twice", name)
	}
	t := &target{cfg, newOrderedGate()}
	for _, s := range nd.sessions {
		if s.target != nil && s.target.LUNs == cfg.LUNs { // of a target that is given back
			t.gate = s.target.gate
		}
	}
	nd.targets = slices.Insert(slices.Clone(nd.targets), i, t) // sendTargets may be walking the old one
	return nil
}

// AddPortal adds a portal.
func (nd *Node) AddPortal(cfg PortalConfig) *Portal {
	p := &Portal{PortalConfig: cfg, node: nd}
	nd.mu.Lock()
	defer nd.mu.Unlock()
	nd.portals = append(nd.portals, p)
	return p
}

// target returns the target of that normalised name, or nil.
func (nd *Node) target(name string) *target {
	nd.mu.Lock()
	defer nd.mu.Unlock()
	if i, ok := nd.searchTarget(name); ok {
		return nd.targets[i]
	}
	return nil
}

// has tells whether t is a target now, and as it is.
//
// Preconditions: mu is held.
func (nd *Node) has(t *target) bool {
	i, ok := nd.searchTarget(t.Name)
	return ok && nd.targets[i] == t
}

func (nd *Node) isStopping() bool {
	nd.mu.Lock()
	defer nd.mu.Unlock()
	return nd.stopping
}

// Stats is a snapshot.
func (nd *Node) Stats() Stats {
	nd.mu.Lock()
	defer nd.mu.Unlock()
	return Stats{
		Sessions:         len(nd.sessions),
		Connections:      len(nd.conns),
		TasksInFlight:    int(nd.stats.tasks.Load()),
		BuffersOut:       int(nd.buffers.out.Load()),
		BufferOctets:     int(nd.buffers.octets.Load()),
		LoginsAccepted:   nd.stats.accepted.Load(),
		LoginsRefused:    nd.stats.refused.Load(),
		SessionsFinished: nd.stats.sessionsEnded.Load(),
	}
}

var errShutdown = errors.New("target shuts down")

// Shutdown ends everything: no more logins are accepted, the initiators of
// normal sessions are asked to log out (Asynchronous Message 1, RFC 7143,
// section 11.9.1), and those who have not done so after ShutdownWait are told so
// and disconnected. It returns nil when all Serve calls have ended, or the error of
// ctx if that is done earlier.
func (nd *Node) Shutdown(ctx context.Context) error {
	wait := nd.opt.Load().ShutdownWait
	nd.mu.Lock()
	nd.stopping = true
	conns := make([]*conn, 0, len(nd.conns))
	for c := range nd.conns {
		conns = append(conns, c)
	}
	nd.mu.Unlock()

	asked := conns[:0:0]
	for _, c := range conns {
		if c.askLogout(wait) {
			asked = append(asked, c)
		} else {
			c.stop(errShutdown)
		}
	}
	grace := time.NewTimer(wait)
	defer grace.Stop()
	late := false
	for _, c := range asked {
		if late {
			break
		}
		select {
		case <-c.done:
		case <-grace.C:
			late = true
		case <-ctx.Done():
			late = true
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

// addresses are what discovery answers for p to an initiator that reached the
// node at local: host:port each.
func (p *Portal) addresses(own *Portal, local net.Addr) []string {
	if len(p.Advertise) > 0 {
		return p.Advertise
	}
	here, ok := local.(*net.TCPAddr)
	if p == own {
		if !ok {
			return []string{local.String()}
		}
		return []string{hostPort(here.IP, here.Port)}
	}
	// Another portal: where it listens, or if that is everywhere, the address
	// at which the initiator has reached us, with that portal's port.
	host, service, err := net.SplitHostPort(p.Listen)
	port, err2 := strconv.Atoi(service)
	if err != nil || err2 != nil || port == 0 {
		return nil
	}
	host, zone, _ := strings.Cut(host, "%")
	there := net.ParseIP(host)
	switch {
	case host == "" || there != nil && there.IsUnspecified():
		if !ok || there != nil && there.To4() != nil && here.IP.To4() == nil {
			return nil
		}
		return []string{hostPort(here.IP, port)}
	case there == nil: // a name
		return []string{p.Listen}
	case ok && there.IsLoopback() && !here.IP.IsLoopback(),
		there.To4() == nil && there.IsLinkLocalUnicast() && !(ok && here.IP.IsLinkLocalUnicast() && here.Zone == zone):
		return nil // out of the initiator's reach
	}
	return []string{hostPort(there, port)}
}

// hostPort leaves out the zone of a link-local address, which means something
// on this machine only. IPv6 addresses come in brackets.
func hostPort(ip net.IP, port int) string {
	return (&net.TCPAddr{IP: ip, Port: port}).String()
}
