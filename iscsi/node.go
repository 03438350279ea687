package iscsi

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/invariant"
	"github.com/iser-target/iser-target/security"
	"github.com/iser-target/iser-target/security/limits"
)

// Params is what a login agreed on.
type Params = keys.Params

// Options are the options of a Node. The zero value of a field means its default.
type Options struct {
	// QueueDepth is how many commands a session may have in flight; 128, as many as ib_iser's
	// cmds_max.
	QueueDepth int

	// ConnectionMemory bounds the data buffers of one connection, in bytes; 64 MiB. A value below
	// one piece of data counts as one piece. Shared.Memory bounds that, and all else, for the process.
	ConnectionMemory int

	// MaxTransferPiece is how many bytes of a command's data are moved at once; 1 MiB. It is
	// rounded up to 4 KiB times a power of two. It is never less than 64 KiB or FirstBurstLength,
	// nor more than 16 MiB.
	MaxTransferPiece int

	LoginTimeout      time.Duration // of a whole login; 15 s
	DiscoveryTimeout  time.Duration // between two requests of a discovery session; 60 s
	NopInterval       time.Duration // silence after which a normal session is pinged; 15 s; negative: never
	NopTimeout        time.Duration // silence after a ping that ends the connection; 30 s
	AckWait           time.Duration // for acknowledgements, before the target gives up what it keeps for SNACKs; 5 s
	LogoutWait        time.Duration // for the initiator to close first after the last response; 2 s
	ReinstatementWait time.Duration // for the tasks of a session that a login replaces; 10 s

	// DiscoveryAuth, unless it is nil, authenticates initiators before discovery.
	DiscoveryAuth *security.CHAP

	// Shared has the bounds of what sessions, addresses and initiators share; a Set with default
	// bounds. A Node keeps the Set that it began with.
	Shared *limits.Set

	Limits keys.Limits  // what login may agree on; RDMA is set for each connection
	Logger *slog.Logger // for Events that are nil; slog.Default()
	Events func(Event)  // returns soon and does not call the Node; nil: Logger gets a line for each event
}

// setDefault replaces the zero value of v by def.
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
	setDefault(&o.Logger, slog.Default())
	if o.Events == nil {
		o.Events = func(e Event) { e.Log(o.Logger) }
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
	Initiators security.Patterns // the initiators that may log in
	Networks   security.Networks // that they may log in from
	// ResetsFor are the initiators whose resets and CLEAR TASK SET end the commands of others, too; those
	// of all others reach only what their own initiator began.
	ResetsFor security.Patterns
	Auth      *security.CHAP // nil: initiators need not authenticate themselves
	Redirect  Redirect       // where initiators are sent instead, if its Address is not empty
	LUNs      *lun.Inventory
	// PortalGroups are the tags of those that lead to the target; empty: all.
	PortalGroups []uint16
	Limits       TargetLimits // what login may agree on
	// Protected says that its sessions are protected by IPsec, through whatever portal: see PortalConfig.Protected.
	Protected bool
}

// TargetLimits are the values of keys.Limits that targets have for themselves. A zero value means that of the Node.
// A FirstBurstLength is at most what the Node moves at once (Options.MaxTransferPiece).
type TargetLimits struct {
	InitialR2T               *bool
	FirstBurstLength         uint32
	MaxBurstLength           uint32
	MaxOutstandingR2T        uint16
	MaxRecvDataSegmentLength uint32
}

// apply puts the values of t in the place of those of l. A FirstBurstLength is cut to piece.
func (t *TargetLimits) apply(l *keys.Limits, piece int) {
	l.InitialR2T = cmp.Or(t.InitialR2T, l.InitialR2T)
	l.MaxBurstLength = cmp.Or(t.MaxBurstLength, l.MaxBurstLength)
	l.FirstBurstLength = min(cmp.Or(t.FirstBurstLength, l.FirstBurstLength), uint32(piece))
	if t.FirstBurstLength == 0 && t.MaxBurstLength != 0 {
		l.FirstBurstLength = min(l.FirstBurstLength, t.MaxBurstLength)
	}
	l.MaxOutstandingR2T = cmp.Or(t.MaxOutstandingR2T, l.MaxOutstandingR2T)
	l.MaxRecvDataSegmentLength = cmp.Or(t.MaxRecvDataSegmentLength, l.MaxRecvDataSegmentLength)
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

// servedBy reports whether the portal leads to t.
func (t *target) servedBy(p *Portal) bool {
	return len(t.PortalGroups) == 0 || slices.Contains(t.PortalGroups, p.TPGT)
}

// A PortalConfig describes a portal.
type PortalConfig struct {
	Listen    string   // host:port; for an empty host or port 0 the local address of the connection counts
	Advertise []string // what discovery answers instead, host:port each
	TPGT      uint16   // TargetPortalGroupTag; one that leads to a target is a port of its inventory
	StepUp    StepUp   // to RDMA mode, on connections whose Datamover is an Upgrader; nil: never
	// Protected says that connections through the portal are protected by IPsec. Over them discovery names only protected
	// portals and targets (RFC 7143, section 9.3.3).
	Protected bool
}

// A Portal is one listening address of a Node.
type Portal struct {
	PortalConfig
	node *Node
}

// ErrNoTarget and ErrNoSession answer calls about a target or session that the node does not have.
var (
	ErrNoTarget  = errors.New("no such target")
	ErrNoSession = errors.New("no such session")
)

// A Node is an iSCSI target node: its targets, portals and sessions.
type Node struct {
	opt     atomic.Pointer[Options] // complete; replaced as a whole
	buffers bufferPool
	memory  memory
	// detached is charged for the Buffers of tasks that are detached. It bounds nothing: the logical
	// units that have those tasks begin no others.
	detached budget
	fenced   fencingCounts
	shared   *limits.Set
	stats    counters
	logins   loginCounts

	slow     slowCommands
	lookout  lookout
	laggards laggards // by Lag

	challenges sync.Map // CHAP challenges, as strings, of the logins in progress

	mu       sync.Mutex
	targets  []*target // ascending by name
	portals  []*Portal
	peers    map[string][]*Portal // see SetPeers; a new map takes its place
	sessions map[uint16]*session  // by TSIH
	lastTSIH uint16
	ended    [lun.Transports]timings // of sessions that have ended
	conns    map[*conn]struct{}      // from the call of Serve to its end
	stopping atomic.Bool             // Shutdown has been called
	pausing  atomic.Bool             // Pause has been called, and not Resume. Stored with mu held
	closing  atomic.Pointer[closing] // by Empty; nil: logins are welcome. Stored with mu held
}

// counters are the parts of Stats that change without a lock.
type counters struct {
	accepted, refused, sessionsEnded atomic.Uint64
	detached                         atomic.Int64
	strays                           atomic.Int64 // task slots in use of connections that have ended
}

// Stats are the numbers of a Node.
type Stats struct {
	Sessions         int    // in full feature phase, discovery included
	Connections      int    // from Serve to its return
	TasksInFlight    int    // task slots in use: requests, and PDUs on their way out
	DetachedTasks    int    // commands that nobody waits for, and that have not come back from their store
	BuffersOut       int    // data buffers in use
	BufferOctets     int    // their size, bytes
	LoginsAccepted   uint64 // since the start
	LoginsRefused    uint64
	SessionsFinished uint64
}

// NewNode returns a Node without targets and portals.
func NewNode(o Options) *Node {
	if o.Shared == nil {
		o.Shared = limits.New()
	}
	nd := &Node{
		slow:     slowCommands{list: make(chan SlowCommand, maxSlow)},
		shared:   o.Shared,
		sessions: make(map[uint16]*session),
		conns:    make(map[*conn]struct{}),
	}
	nd.memory.limit = &o.Shared.Memory
	nd.detached.pool = &nd.buffers
	nd.memory.open(&nd.detached)
	nd.SetOptions(o)
	return nd
}

// SetOptions replaces the options. Connections that exist keep those that they began with. The bounds
// of Shared hold at once; tasks that a new bound lets continue do so now.
func (nd *Node) SetOptions(o Options) {
	o = o.complete()
	nd.opt.Store(&o)
	nd.memory.changed()
}

// AddTarget adds a target. An error is about its name, or says that it has no inventory.
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
		if s.target != nil && s.target.LUNs == cfg.LUNs { // a target that was removed comes back
			t.gate = s.target.gate
		}
	}
	nd.targets = slices.Insert(slices.Clone(nd.targets), i, t) // sendTargets may be walking the old list
	return nil
}

// UpdateTarget replaces the description of the target of that name and the rules for its logins. It
// affects logins from now on. A login in progress was admitted by the old rules, and is refused
// with "service unavailable". Sessions stay as they are. The inventory must be the one that the
// target has. The error is ErrNoTarget if there is no such target.
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
	nd.targets = slices.Clone(nd.targets) // sendTargets may be walking the old list
	nd.targets[i] = &target{cfg, nd.targets[i].gate}
	return nil
}

// RemoveTarget removes the target: initiators do not find it, and cannot log in. Its sessions stay;
// see EndSession. The error is ErrNoTarget if there is no such target.
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

// searchTarget returns the index of the name in nd.targets, or where it would be inserted.
//
// Preconditions: nd.mu is held.
func (nd *Node) searchTarget(name string) (int, bool) {
	invariant.Held(&nd.mu)
	return slices.BinarySearchFunc(nd.targets, name, func(t *target, name string) int { return strings.Compare(t.Name, name) })
}

// AddPortal adds a portal.
func (nd *Node) AddPortal(cfg PortalConfig) *Portal {
	p := &Portal{PortalConfig: cfg, node: nd}
	nd.mu.Lock()
	defer nd.mu.Unlock()
	nd.portals = append(nd.portals, p)
	return p
}

// SetPeers sets the portals of other machines that lead to targets, by the names of these. Discovery answers with them, too. One without Advertise
// that listens on all addresses has none that others know, and is left out.
func (nd *Node) SetPeers(peers map[string][]PortalConfig) {
	next := map[string][]*Portal{}
	for name, list := range peers {
		for _, cfg := range list {
			if len(cfg.Advertise) > 0 || !listensEverywhere(cfg.Listen) {
				next[name] = append(next[name], &Portal{PortalConfig: cfg})
			}
		}
	}
	nd.mu.Lock()
	defer nd.mu.Unlock()
	nd.peers = next
}

// listensEverywhere reports whether an address to listen on has no host.
func listensEverywhere(listen string) bool {
	host, _, err := net.SplitHostPort(listen)
	ip := net.ParseIP(host)
	return err != nil || host == "" || ip != nil && ip.IsUnspecified()
}

// RemovePortal removes p from the answers to discovery. Its connections stay. The caller accepts no
// new ones.
func (nd *Node) RemovePortal(p *Portal) {
	nd.mu.Lock()
	defer nd.mu.Unlock()
	nd.portals = slices.DeleteFunc(slices.Clone(nd.portals), func(o *Portal) bool { return o == p })
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

// has reports whether t is a target now, and has not been updated.
//
// Preconditions: nd.mu is held.
func (nd *Node) has(t *target) bool {
	i, ok := nd.searchTarget(t.Name)
	return ok && nd.targets[i] == t
}

// Stats returns the present numbers.
func (nd *Node) Stats() Stats {
	nd.mu.Lock()
	defer nd.mu.Unlock()
	pieces, octets := nd.pieces()
	tasks := int(nd.stats.strays.Load())
	for c := range nd.conns {
		tasks += c.slots.tasks()
	}
	return Stats{
		Sessions:         len(nd.sessions),
		Connections:      len(nd.conns),
		TasksInFlight:    tasks,
		DetachedTasks:    int(nd.stats.detached.Load()),
		BuffersOut:       pieces,
		BufferOctets:     octets,
		LoginsAccepted:   nd.stats.accepted.Load(),
		LoginsRefused:    nd.stats.refused.Load(),
		SessionsFinished: nd.stats.sessionsEnded.Load(),
	}
}

// A TargetInfo is a target at one time.
type TargetInfo struct {
	Name string // normalised
	LUNs *lun.Inventory
}

// Targets returns all targets, ascending by name.
func (nd *Node) Targets() []TargetInfo {
	nd.mu.Lock()
	defer nd.mu.Unlock()
	list := make([]TargetInfo, len(nd.targets))
	for i, t := range nd.targets {
		list[i] = TargetInfo{t.Name, t.LUNs}
	}
	return list
}

// Memory returns how many bytes of data buffers the connections have in use, and how many they may
// have.
func (nd *Node) Memory() (used, limit int64) {
	nd.mu.Lock()
	defer nd.mu.Unlock()
	for c := range nd.conns {
		limit += int64(c.opt.ConnectionMemory)
	}
	_, octets := nd.pieces()
	return int64(octets), min(limit, nd.shared.Memory.Max())
}

// pieces returns how many Buffers have pieces of data, and how many bytes.
func (nd *Node) pieces() (pieces, octets int) {
	pieces, octets = nd.memory.out()
	late, n := nd.detached.out()
	return pieces + late, octets + n
}
