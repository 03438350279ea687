package daemon

import (
	"context"
	"encoding/hex"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"time"

	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/lun"
)

// A State is what runs at one time.
type State struct {
	Version  string         `json:"version,omitempty"` // of the program
	Started  time.Time      `json:"started"`
	Config   string         `json:"config,omitempty"`  // path of the file; empty: changes last as long as the process
	Pending  []string       `json:"pending,omitempty"` // what waits for a restart
	Portals  []PortalState  `json:"portals"`
	Targets  []TargetState  `json:"targets"`
	Sessions []SessionState `json:"sessions"`
	// LatencyBounds are the upper bounds of the buckets of all PhaseStates, in seconds, ascending.
	LatencyBounds []float64 `json:"latency_bounds,omitempty"`
}

// A PortalState is a portal.
type PortalState struct {
	Listen      string   `json:"listen"`  // as configured
	Address     string   `json:"address"` // where it listens
	TPGT        int      `json:"tpgt"`
	Advertise   []string `json:"advertise,omitempty"`
	Transports  []string `json:"transports"`
	Connections int      `json:"connections"` // of sessions
}

// A TargetState is a target.
type TargetState struct {
	Name         string     `json:"name"`
	Alias        string     `json:"alias,omitempty"`
	Initiators   []string   `json:"initiators,omitempty"`
	Auth         string     `json:"auth"` // none or chap
	Redirect     string     `json:"redirect,omitempty"`
	PortalGroups []int      `json:"portal_groups"` // those that lead to it
	LUNs         []LUNState `json:"luns"`
	Sessions     []uint16   `json:"sessions,omitempty"` // TSIHs
}

// What a LUN is.
const (
	Ready    = "ready"
	NotReady = "not ready"
	Draining = "draining" // nobody sees it any more, and what has begun ends
)

// A LUNState is a LUN of a target.
type LUNState struct {
	Target       string            `json:"target"`
	ID           int               `json:"id"`
	Backend      string            `json:"backend"`
	Path         string            `json:"path,omitempty"`
	Size         int64             `json:"size"` // octets; 0 when it is not known
	BlockSize    int               `json:"block_size"`
	NAA          string            `json:"naa"` // also the serial number
	State        string            `json:"state"`
	Reason       string            `json:"reason,omitempty"` // why it is not ready
	ReadOnly     bool              `json:"read_only"`
	WriteThrough bool              `json:"write_through"`
	Removable    bool              `json:"removable"`
	Sanitize     bool              `json:"sanitize"`
	Initiators   []string          `json:"initiators,omitempty"`    // who sees it; empty: all
	ReadOnlyFor  []string          `json:"read_only_for,omitempty"` // who may only read
	Counters     CounterState      `json:"counters"`
	Reservation  *ReservationState `json:"reservation,omitempty"` // or registrations; nil: there are none
}

// A ReservationState is who has registered with a LUN and who has reserved it.
type ReservationState struct {
	Type          string              `json:"type,omitempty"` // empty: registrations only
	Generation    uint32              `json:"generation"`
	APTPL         bool                `json:"aptpl"` // survives a restart
	Registrations []RegistrationState `json:"registrations,omitempty"`
	Legacy        string              `json:"legacy,omitempty"` // initiator port that has it by RESERVE
}

// A RegistrationState is a registration.
type RegistrationState struct {
	Initiator  string `json:"initiator"` // initiator port
	TargetPort int    `json:"target_port"`
	Key        string `json:"key"` // 0x and 16 hex digits
	Holder     bool   `json:"holder"`
}

// A SessionState is a session.
type SessionState struct {
	TSIH        uint16            `json:"tsih"`
	Initiator   string            `json:"initiator"`
	ISID        string            `json:"isid"`
	Target      string            `json:"target,omitempty"`
	TPGT        int               `json:"tpgt"`
	Discovery   bool              `json:"discovery"`
	Transport   string            `json:"transport"`      // iser or tcp
	User        string            `json:"user,omitempty"` // CHAP name
	Started     time.Time         `json:"started"`
	LUNs        []int             `json:"luns"`
	Tasks       int               `json:"tasks"` // requests that are not answered yet
	Counters    CounterState      `json:"counters"`
	Parameters  map[string]string `json:"parameters"`
	Connections []ConnectionState `json:"connections"`
}

// A ConnectionState is a connection of a session.
type ConnectionState struct {
	CID       int       `json:"cid"`
	Transport string    `json:"transport"`
	Remote    string    `json:"remote"`
	Local     string    `json:"local"`
	Started   time.Time `json:"started"`
	Received  uint64    `json:"received"` // PDUs
}

// A CounterState is what has become of the SCSI commands of a session, or of a LUN since
// it was opened. Two of them tell what was between.
type CounterState struct {
	Reads      uint64       `json:"reads"` // commands that have ended with a status
	Writes     uint64       `json:"writes"`
	Others     uint64       `json:"others"`
	ReadBytes  uint64       `json:"read_bytes"` // data that was moved
	WriteBytes uint64       `json:"write_bytes"`
	Errors     uint64       `json:"errors"`    // commands that have ended with CHECK CONDITION
	Aborted    uint64       `json:"aborted"`   // and without a status
	Residuals  uint64       `json:"residuals"` // and with a residual count
	InFlight   int          `json:"in_flight"`
	Latency    []PhaseState `json:"latency,omitempty"`
}

// A PhaseState is how long those commands took for a phase whose responses have left. In
// read_wait there are those only that waited for data.
type PhaseState struct {
	Phase   string  `json:"phase"` // receive, backend, read_wait, send or total
	Count   uint64  `json:"count"`
	Seconds float64 `json:"seconds"` // the sum
	P50     float64 `json:"p50"`     // of all so far, in seconds; estimated from Buckets
	P99     float64 `json:"p99"`
	// Buckets are how many took up to the bound of that index in State.LatencyBounds and
	// longer than the one before; one more is for those above all bounds. Zeros at the
	// end are left out.
	Buckets []uint64 `json:"buckets,omitempty"`
}

// reservationTypes are the names of persistent reservation types (SPC-4, section
// 5.13.4).
var reservationTypes = map[byte]string{
	1: "write exclusive",
	3: "exclusive access",
	5: "write exclusive, registrants only",
	6: "exclusive access, registrants only",
	7: "write exclusive, all registrants",
	8: "exclusive access, all registrants",
}

// An Explanation is whether an initiator would be let in, and why.
type Explanation struct {
	Admitted bool      `json:"admitted"`
	Status   string    `json:"status"` // of the Login Response
	Rules    []Rule    `json:"rules"`  // in the order in which a login meets them, up to the one that decides
	LUNs     []LUNView `json:"luns,omitempty"`
}

// A Rule is one thing that is looked at during login.
type Rule struct {
	Rule   string `json:"rule"`
	Passed bool   `json:"passed"`
	Why    string `json:"why"`
}

// A LUNView is what the initiator would find behind a LUN.
type LUNView struct {
	ID     int    `json:"id"`
	Access string `json:"access"` // "read and write", "read only" or "none"
	Why    string `json:"why"`
}

func sessionName(tsih uint16, initiator string) string {
	return fmt.Sprintf("session %d of %s", tsih, initiator)
}

// State is what runs now.
func (d *Daemon) State() State {
	sessions := d.node.Sessions()
	d.mu.Lock()
	defer d.mu.Unlock()
	st := State{Version: d.version, Started: d.started, Config: absolute(d.path), Portals: []PortalState{}, Targets: []TargetState{}, Sessions: []SessionState{},
		LatencyBounds: latencyBounds}
	for _, ch := range d.pending {
		st.Pending = append(st.Pending, describe(ch))
	}
	for _, p := range d.portals {
		cur := p.cur.Load()
		ps := PortalState{Listen: cur.cfg.Listen, Address: p.l.Addr().String(), TPGT: cur.cfg.TPGT, Advertise: cur.cfg.Advertise}
		for _, tr := range []transport{transportISER, transportTCP} {
			if cur.cfg.Serves(string(tr)) {
				ps.Transports = append(ps.Transports, string(tr))
			}
		}
		for i := range sessions {
			ps.Connections += p.connections(&sessions[i])
		}
		st.Portals = append(st.Portals, ps)
	}
	for _, t := range d.targets {
		st.Targets = append(st.Targets, d.targetState(t, sessions))
	}
	for i := range sessions {
		st.Sessions = append(st.Sessions, sessionState(&sessions[i]))
	}
	return st
}

// absolute is the path for those who work in another directory.
func absolute(path string) string {
	if abs, err := filepath.Abs(path); err == nil && path != "" {
		return abs
	}
	return path
}

// Preconditions: mu is held.
func (d *Daemon) targetState(t *servedTarget, sessions []iscsi.SessionInfo) TargetState {
	ts := TargetState{Name: t.name, Auth: "none", LUNs: []LUNState{}, PortalGroups: []int{}}
	if c := targetOf(d.cfg, t.name); c != nil { // it is not in there while it is being added
		ts.Alias, ts.Initiators, ts.Redirect = c.Alias, c.Initiators, c.Redirect.To
		if c.Auth.Method == "chap" {
			ts.Auth = c.Auth.Method
		}
		for _, tag := range d.cfg.TPGTs(c) {
			ts.PortalGroups = append(ts.PortalGroups, int(tag))
		}
	}
	for _, id := range slices.Sorted(maps.Keys(t.luns)) {
		l := lunState(t.name, t.luns[id])
		if l.State == Ready {
			if err := d.calls.stuck(storeKey(t.name, &t.luns[id].LUN)); err != nil {
				l.State, l.Reason = NotReady, err.Error()
			}
		}
		ts.LUNs = append(ts.LUNs, l)
	}
	for _, r := range d.leaving {
		if r.t == t {
			l := lunState(t.name, r.l)
			l.State, l.Reason = Draining, "it was removed: "+r.describe()
			ts.LUNs = append(ts.LUNs, l)
		}
	}
	for i := range sessions {
		if sessions[i].Target == t.name {
			ts.Sessions = append(ts.Sessions, sessions[i].TSIH)
		}
	}
	return ts
}

func lunState(target string, l *servedLUN) LUNState {
	info := l.unit.Info()
	s := LUNState{
		Target: target, ID: l.ID, Backend: l.Backend, Path: l.Path, Size: info.Size, BlockSize: int(info.BlockSize),
		NAA: l.unit.Identity().Serial, State: Ready,
		ReadOnly: l.ReadOnly || info.ReadOnly, WriteThrough: l.WriteThrough, Removable: l.Removable, Sanitize: l.Sanitize,
		Initiators: l.Initiators, ReadOnlyFor: l.ReadOnlyFor,
	}
	for _, n := range l.unit.Counts() {
		s.Counters.add(&n)
	}
	latencies := l.unit.Latencies()
	latencies[lun.TCP].Add(&latencies[lun.ISER])
	s.Counters.Latency = phases(&latencies[lun.TCP])
	switch status := l.unit.Status(); {
	case l.fault != nil:
		s.State, s.Reason, s.Size = NotReady, l.fault.Error(), int64(l.Size)
	case l.unit.Absent():
		s.State, s.Reason, s.Size = NotReady, "it is being opened anew", int64(l.Size)
	case status != Ready:
		s.State, s.Reason = NotReady, status
	}
	if r := l.unit.Reservation(); len(r.Registrations) > 0 || r.Legacy != "" {
		s.Reservation = &ReservationState{Type: reservationTypes[r.Type], Generation: r.Generation, APTPL: r.APTPL, Legacy: r.Legacy}
		for _, reg := range r.Registrations {
			s.Reservation.Registrations = append(s.Reservation.Registrations,
				RegistrationState{reg.Initiator, int(reg.TargetPort), fmt.Sprintf("%#016x", reg.Key), reg.Holder})
		}
	}
	return s
}

func sessionState(s *iscsi.SessionInfo) SessionState {
	p := &s.Params
	st := SessionState{
		TSIH: s.TSIH, Initiator: s.Initiator, ISID: hex.EncodeToString(s.ISID[:]), Target: s.Target, TPGT: int(s.TPGT),
		Discovery: s.Discovery, User: p.CHAPName, Started: s.Started, Tasks: s.Tasks, LUNs: []int{}, Connections: []ConnectionState{},
		Parameters: map[string]string{
			"ErrorRecoveryLevel": fmt.Sprint(p.ErrorRecoveryLevel),
			"MaxConnections":     fmt.Sprint(p.MaxConnections),
			"MaxBurstLength":     fmt.Sprint(p.MaxBurstLength),
			"FirstBurstLength":   fmt.Sprint(p.FirstBurstLength),
			"InitialR2T":         yesNo(p.InitialR2T),
			"ImmediateData":      yesNo(p.ImmediateData),
			"HeaderDigest":       digest(p.HeaderDigest),
			"DataDigest":         digest(p.DataDigest),
			"iSCSIProtocolLevel": fmt.Sprint(p.ISCSIProtocolLevel),
		},
	}
	st.Counters.add(&s.Counts)
	if s.Latencies != nil {
		st.Counters.Latency = phases(s.Latencies)
	}
	for _, id := range s.LUNs {
		st.LUNs = append(st.LUNs, int(id))
	}
	for _, c := range s.Conns {
		st.Transport = c.Transport
		st.Connections = append(st.Connections, ConnectionState{int(c.CID), c.Transport, c.Remote.String(), c.Local.String(), c.Started, c.Received})
	}
	return st
}

func (c *CounterState) add(n *lun.Counts) {
	c.Reads += n.Commands[lun.KindRead]
	c.Writes += n.Commands[lun.KindWrite]
	c.Others += n.Commands[lun.KindOther]
	c.ReadBytes += n.Octets[lun.KindRead]
	c.WriteBytes += n.Octets[lun.KindWrite]
	c.Errors += n.Failed()
	c.Aborted += n.Aborted
	c.Residuals += n.Underflows + n.Overflows
	c.InFlight += int(n.InFlight)
}

// latencyBounds are the upper bounds of the buckets, in seconds.
var latencyBounds = func() (bounds []float64) {
	for i := range lun.LatencyBuckets - 1 {
		bounds = append(bounds, lun.LatencyBound(i).Seconds())
	}
	return bounds
}()

// phases are those that commands were in.
func phases(l *lun.Latencies) (list []PhaseState) {
	for p := range l {
		if l[p].Count == 0 {
			continue
		}
		buckets := l[p].Buckets[:]
		for buckets[len(buckets)-1] == 0 {
			buckets = buckets[:len(buckets)-1]
		}
		list = append(list, PhaseState{
			Phase: lun.Phase(p).String(), Count: l[p].Count, Seconds: l[p].Sum.Seconds(),
			P50: *quantile(0.5, latencyBounds, buckets), P99: *quantile(0.99, latencyBounds, buckets), Buckets: slices.Clone(buckets),
		})
	}
	return list
}

func yesNo(b bool) string {
	if b {
		return "Yes"
	}
	return "No"
}

func digest(on bool) string {
	if on {
		return "CRC32C"
	}
	return "None"
}

// KillSession ends a session at once: its initiator is told, and disconnected. It may
// log in again.
func (d *Daemon) KillSession(ctx context.Context, tsih uint16, reason string) error {
	if reason == "" {
		reason = "an operator has ended the session"
	}
	s, err := d.node.Session(tsih)
	if err != nil {
		return fmt.Errorf("session %d: %w", tsih, ErrNotFound)
	}
	d.log.InfoContext(ctx, "session is killed", eventKey, "session", "tsih", tsih, "initiator", s.Initiator, "target", s.Target, "reason", reason)
	return d.endSession(context.WithoutCancel(ctx), tsih, 0, reason)
}

// ClearReservation ends all reservations of a LUN and all registrations with it.
func (d *Daemon) ClearReservation(ctx context.Context, target string, id int) error {
	d.mu.Lock()
	t := d.target(target)
	var l *servedLUN
	if t != nil {
		l = t.luns[id]
	}
	d.mu.Unlock()
	switch {
	case t == nil:
		return fmt.Errorf("target %s: %w", target, ErrNotFound)
	case l == nil:
		return fmt.Errorf("LUN %d of target %s: %w", id, target, ErrNotFound)
	}
	cleared, err := l.unit.ClearReservation()
	switch {
	case err != nil:
		return err
	case !cleared:
		return fmt.Errorf("reservation of LUN %d of target %s: %w", id, target, ErrNotFound)
	}
	d.log.WarnContext(ctx, "reservation is cleared", eventKey, "reservation", "target", target, "lun", id)
	return nil
}

// Effective is the configuration that runs. It is not to be changed.
func (d *Daemon) Effective() *config.Config {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.cfg
}

// Document is a copy of the document that runs.
func (d *Daemon) Document() *config.Document {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.doc.Clone()
}

// Node is what the daemon serves with: for metrics.
func (d *Daemon) Node() *iscsi.Node { return d.node }
