package daemon

import (
	"cmp"
	"context"
	"encoding/hex"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/invariant"
	"github.com/iser-target/iser-target/security"
	"github.com/iser-target/iser-target/security/ipsec"
)

// reservationTypes are the names of persistent reservation types (SPC-4, section 5.13.4).
var reservationTypes = map[byte]string{
	1: "write exclusive",
	3: "exclusive access",
	5: "write exclusive, registrants only",
	6: "exclusive access, registrants only",
	7: "write exclusive, all registrants",
	8: "exclusive access, all registrants",
}

// sessionName names a session in a plan.
func sessionName(tsih uint16, initiator string) string {
	return fmt.Sprintf("session %d of %s", tsih, initiator)
}

// State returns the current state.
func (d *Daemon) State() schema.State {
	sessions, now := d.node.Sessions(), time.Now()
	certificates := d.Certificates()
	d.mu.Lock()
	defer d.mu.Unlock()
	st := schema.State{Certificates: certificates, Version: d.version, Started: d.started, PID: os.Getpid(), Config: absolute(d.path), Portals: []schema.PortalState{}, Targets: []schema.TargetState{}, Sessions: []schema.SessionState{},
		LatencyBounds: latencyBounds, CPUSeconds: cpuSeconds()}
	for _, ch := range d.served.pending {
		st.Pending = append(st.Pending, ch.String())
	}
	for _, p := range d.served.portals {
		cur := p.cur.Load()
		ps := schema.PortalState{Listen: cur.cfg.Listen, Address: p.l.Addr().String(), TPGT: cur.cfg.TPGT, Advertise: cur.cfg.Advertise, IPsec: string(cur.cfg.Demand()), Control: cur.cfg.Control}
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
	for _, t := range d.served.targets {
		st.Targets = append(st.Targets, d.targetState(t, sessions))
	}
	previous := previousProofs(d.served.cfg)
	for i := range sessions {
		s := sessionState(&sessions[i])
		s.Depth = d.depths.mean(&sessions[i], now)
		for j, c := range sessions[i].Conns {
			s.Connections[j].IPsec = d.ipsec.protectionState(d.ipsec.known(c.Local, c.Remote))
		}
		s.OutdatedSecret = s.User != "" && previous[s.Target+" "+sessions[i].Params.CHAPProof]
		st.Sessions = append(st.Sessions, s)
	}
	return st
}

// cpuSeconds returns the CPU time of the process.
func cpuSeconds() float64 {
	var u unix.Rusage
	unix.Getrusage(unix.RUSAGE_SELF, &u) // cannot fail
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
}

// previousProofs returns the target and the proof of each session that would use a previous secret.
func previousProofs(cfg *config.Config) map[string]bool {
	proofs := map[string]bool{}
	for _, t := range cfg.Targets {
		for _, u := range t.Auth.Users {
			if u.Previous != "" && u.Previous != u.Secret {
				proofs[t.Name+" "+string(security.Proof(u.Name, u.Previous))] = true
			}
		}
	}
	return proofs
}

// ShowCertificates makes State and the metrics show what list returns: the certificates of the control API.
func (d *Daemon) ShowCertificates(list func() []schema.CertificateState) { d.certificates.Store(&list) }

// Certificates returns the certificates of the control API, the metrics server and the dashboard. It takes about two seconds
// if a file system does not answer.
func (d *Daemon) Certificates() (all []schema.CertificateState) {
	if list := d.certificates.Load(); list != nil {
		all = slices.Clone((*list)())
	}
	for _, kind := range []string{config.KindMetrics, config.KindDashboard} {
		s := d.side[kind]
		for _, c := range s.web.Load().Certificates() {
			all = append(all, schema.CertificateState{Key: s.key + ".web_config", Path: c.File, Subject: c.Subject, Expires: c.Expires})
		}
	}
	return all
}

// expiries returns when the first certificate of each key expires.
func (d *Daemon) expiries() map[string]time.Time {
	first := map[string]time.Time{}
	for _, c := range d.Certificates() {
		if at, ok := first[c.Key]; !ok || c.Expires.Before(at) {
			first[c.Key] = c.Expires
		}
	}
	return first
}

// Limits returns the limits of what initiators, addresses and LUNs share, in the order of the
// documentation.
func (d *Daemon) Limits() []schema.LimitState {
	list := []schema.LimitState{}
	for _, l := range d.net.limits.State() {
		list = append(list, schema.LimitState{
			Name: l.Name, Per: string(l.Scope), Unit: string(l.Unit), Help: l.Help,
			Max: l.Max, Used: l.Used, By: l.By, Reached: l.Bites, Last: l.Last,
		})
	}
	return list
}

// rateState returns a rate of the configuration.
func rateState(r config.Rate) schema.RateState {
	return schema.RateState{
		IOPS: r.IOPS, Bandwidth: int64(r.Bandwidth), Burst: r.Burst.Seconds(),
		MinIOPS: r.MinIOPS, MinBandwidth: int64(r.MinBandwidth),
	}
}

// absolute returns the path for users in another directory.
func absolute(path string) string {
	if abs, err := filepath.Abs(path); err == nil && path != "" {
		return abs
	}
	return path
}

// targetState returns the state of t.
//
// Preconditions: d.mu is held.
func (d *Daemon) targetState(t *servedTarget, sessions []iscsi.SessionInfo) schema.TargetState {
	invariant.Held(&d.mu)
	ts := schema.TargetState{Name: t.name, Auth: "none", IPsec: string(ipsec.Off), LUNs: []schema.LUNState{}, PortalGroups: []int{}}
	if c := targetOf(d.served.cfg, t.name); c != nil { // nil while t is being added
		ts.Alias, ts.Initiators, ts.Networks, ts.ResetsFor, ts.Redirect = c.Alias, c.Initiators, c.Networks, c.ResetsFor, c.Redirect.To
		ts.Permanent = c.Redirect.Permanent
		if c.Auth.Method == "chap" {
			ts.Auth, ts.Algorithms, ts.Mutual = c.Auth.Method, c.Auth.Algorithms, c.Auth.Mutual.Name
			for _, u := range c.Auth.Users {
				ts.Users = append(ts.Users, cmp.Or(u.Initiator, "*")+" as "+u.Name)
			}
		}
		ts.Negotiation = schema.LoginState{
			InitialR2T: c.InitialR2T, FirstBurstLength: int64(c.FirstBurst), MaxBurstLength: int64(c.MaxBurst),
			MaxOutstandingR2T: c.MaxOutstandingR2T, MaxRecvDataSegmentLength: int64(c.MaxRecvSegment),
		}
		ts.IPsec, ts.IPsecProfile = string(c.Demand()), c.IPsecProfile
		for _, tag := range d.served.cfg.TPGTs(c) {
			ts.PortalGroups = append(ts.PortalGroups, int(tag))
		}
	}
	for _, id := range slices.Sorted(maps.Keys(t.luns)) {
		l := lunState(t.name, t.luns[id])
		if l.State == schema.Ready {
			if err := d.calls.stuck(storeKey(t.name, &t.luns[id].LUN)); err != nil {
				l.State, l.Reason = schema.NotReady, err.Error()
			}
		}
		ts.LUNs = append(ts.LUNs, l)
	}
	for _, r := range d.ending.removals {
		if r.t == t {
			l := lunState(t.name, r.l)
			l.State, l.Reason = schema.Draining, "it was removed: "+r.progress()
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

// spaceState returns what u takes of its medium, or nil if that is not known.
func spaceState(u *lun.Unit) *schema.SpaceState {
	v, ok := u.Space()
	if !ok {
		return nil
	}
	s := &schema.SpaceState{Used: v.Used, Available: v.Free}
	for i, t := range v.Thresholds {
		if t.Limit > 0 {
			s.Thresholds = append(s.Thresholds, schema.ThresholdState{Threshold: lun.ThresholdNames[i], Limit: t.Limit, Reached: t.Reached})
		}
	}
	return s
}

// lunState returns the state of l.
func lunState(target string, l *servedLUN) schema.LUNState {
	info, names := l.unit.Info(), l.unit.Naming()
	s := schema.LUNState{
		Target: target, ID: l.ID, Backend: l.Backend, Path: l.Path, Size: info.Size, BlockSize: int(info.BlockSize),
		NAA: hex.EncodeToString(names.NAA), Serial: names.Serial, Vendor: names.Vendor, Product: names.Product, State: schema.Ready,
		ReadOnly: l.ReadOnly || info.ReadOnly, WriteThrough: l.WriteThrough, Removable: l.Removable, Identity: l.Identity, Sanitize: l.Sanitize, Shared: l.Shared, Protection: l.Protection,
		Initiators: l.Initiators, ReadOnlyFor: l.ReadOnlyFor,
		RateState: rateState(l.Rate()), Waiting: l.unit.StoreCalls().Waiting,
	}
	s.Checksums, s.Space = checksumState(l), spaceState(l.unit)
	for _, r := range l.Rates {
		s.Rates = append(s.Rates, schema.InitiatorRate{Initiators: r.Initiators, RateState: rateState(r)})
	}
	for _, n := range l.unit.Counts() {
		addCounts(&s.Counters, &n)
	}
	latencies := l.unit.Latencies()
	latencies[lun.TCP].Add(&latencies[lun.ISER])
	s.Counters.Latency = phases(&latencies[lun.TCP])
	operations := l.unit.Operations()
	operations[lun.TCP].Add(&operations[lun.ISER])
	addOperations(&s.Counters, &operations[lun.TCP])
	switch status := l.unit.Status(); {
	case l.fault != nil:
		s.State, s.Reason, s.Size = schema.NotReady, l.fault.Error(), int64(l.Size)
	case l.unit.Absent():
		s.State, s.Reason, s.Size = schema.NotReady, "it is being opened again", int64(l.Size)
	case status != schema.Ready:
		s.State, s.Reason = schema.NotReady, status
	}
	s.Health = l.unit.Health().String()
	if s.State == schema.Ready && s.Health != lun.Healthy.String() {
		s.Reason = l.health.reason
		if !l.health.since.IsZero() {
			s.HealthSince = &l.health.since
		}
	}
	s.Faults = faultState(l.unit)
	for _, set := range l.unit.Settings() {
		s.Settings = append(s.Settings, schema.SettingState{
			Setting: set.Name, Value: set.Value, Default: set.Default, Saved: set.Saved, By: set.By,
		})
	}
	if r := l.unit.Reservation(); len(r.Registrations) > 0 || r.Legacy != "" {
		s.Reservation = &schema.ReservationState{Type: reservationTypes[r.Type], Generation: r.Generation, APTPL: r.APTPL, Legacy: r.Legacy}
		for _, reg := range r.Registrations {
			s.Reservation.Registrations = append(s.Reservation.Registrations,
				schema.RegistrationState{Initiator: reg.Initiator, TargetPort: int(reg.TargetPort), Key: fmt.Sprintf("%#016x", reg.Key), Holder: reg.Holder})
		}
	}
	return s
}

// sessionState returns the state of s.
func sessionState(s *iscsi.SessionInfo) schema.SessionState {
	p := &s.Params
	st := schema.SessionState{
		TSIH: s.TSIH, Initiator: s.Initiator, ISID: hex.EncodeToString(s.ISID[:]), Target: s.Target, TPGT: int(s.TPGT),
		Discovery: s.Discovery, User: p.CHAPName, Started: s.Started, Tasks: s.Tasks, LUNs: []int{}, Connections: []schema.ConnectionState{},
		Parameters: map[string]string{
			"ErrorRecoveryLevel": fmt.Sprint(p.ErrorRecoveryLevel),
			"MaxConnections":     fmt.Sprint(p.MaxConnections),
			"MaxBurstLength":     fmt.Sprint(p.MaxBurstLength),
			"FirstBurstLength":   fmt.Sprint(p.FirstBurstLength),
			"MaxOutstandingR2T":  fmt.Sprint(p.MaxOutstandingR2T),
			"InitialR2T":         either(p.InitialR2T, "Yes", "No"),
			"ImmediateData":      either(p.ImmediateData, "Yes", "No"),
			"HeaderDigest":       either(p.HeaderDigest, "CRC32C", "None"),
			"DataDigest":         either(p.DataDigest, "CRC32C", "None"),
			"iSCSIProtocolLevel": fmt.Sprint(p.ISCSIProtocolLevel),
		},
	}
	addCounts(&st.Counters, &s.Counts)
	if s.Latencies != nil {
		st.Counters.Latency = phases(s.Latencies)
		addOperations(&st.Counters, s.Operations)
	}
	for _, id := range s.LUNs {
		st.LUNs = append(st.LUNs, int(id))
	}
	for _, c := range s.Conns {
		st.Transport = c.Transport
		var framing *schema.FramingState
		if f := c.Framing; f != nil {
			framing = &schema.FramingState{CRC: f.CRC, MarkersIn: f.MarkersToUs, MarkersOut: f.MarkersOut, ORD: f.ORD}
		}
		st.Connections = append(st.Connections, schema.ConnectionState{
			Framing: framing,
			CID:     int(c.CID), Transport: c.Transport, Remote: c.Remote.String(), Local: c.Local.String(), Started: c.Started, Received: c.Received,
		})
	}
	return st
}

// addCounts adds n to c.
func addCounts(c *schema.CounterState, n *lun.Counts) {
	c.Reads += n.Commands[lun.KindRead]
	c.Writes += n.Commands[lun.KindWrite]
	c.Others += n.Commands[lun.KindOther]
	c.ReadBytes += n.Bytes[lun.KindRead]
	c.WriteBytes += n.Bytes[lun.KindWrite]
	c.Errors += n.Failed()
	c.Aborted += n.Aborted
	c.Residuals += n.Underflows + n.Overflows
	c.InFlight += int(n.InFlight)
	if c.Operations == nil {
		for k := range lun.Kinds {
			c.Operations = append(c.Operations, schema.OperationState{Op: k.String()})
		}
	}
	for k := range lun.Kinds {
		c.Operations[k].Errors += n.FailedOf(k)
	}
}

// addOperations adds what o took to the Operations of c, which has all kinds.
func addOperations(c *schema.CounterState, o *lun.Operations) {
	for k := range o {
		c.Operations[k].Timing, c.Operations[k].Sizes = timing(&o[k].Latency), withoutZeros(o[k].Sizes[:])
	}
}

// withoutZeros returns a copy of buckets without the zeros at the end.
func withoutZeros(buckets []uint64) []uint64 {
	for len(buckets) > 0 && buckets[len(buckets)-1] == 0 {
		buckets = buckets[:len(buckets)-1]
	}
	return slices.Clone(buckets)
}

// timing returns l with its quantiles.
func timing(l *lun.Latency) schema.Timing {
	t := schema.Timing{Count: l.Count, Seconds: l.Sum.Seconds(), Buckets: withoutZeros(l.Buckets[:])}
	if t.Count > 0 {
		t.P50, t.P99 = *schema.Quantile(0.5, latencyBounds, t.Buckets), *schema.Quantile(0.99, latencyBounds, t.Buckets)
	}
	return t
}

var _ = [1]struct{}{}[schema.SizeBuckets-lun.SizeBuckets] // the API has the buckets of package lun

// latencyBounds are the upper bounds of the latency buckets, in seconds.
var latencyBounds = func() (bounds []float64) {
	for i := range lun.LatencyBuckets - 1 {
		bounds = append(bounds, lun.LatencyBound(i).Seconds())
	}
	return bounds
}()

// phases returns the phases that commands have been in.
func phases(l *lun.Latencies) (list []schema.PhaseState) {
	for p := range l {
		if l[p].Count > 0 {
			list = append(list, schema.PhaseState{Phase: lun.Phase(p).String(), Timing: timing(&l[p])})
		}
	}
	return list
}

// either returns the text value of an iSCSI key.
func either(b bool, yes, no string) string {
	if b {
		return yes
	}
	return no
}

// KillSession ends a session at once. It notifies the initiator, which may log in again.
func (d *Daemon) KillSession(ctx context.Context, tsih uint16, reason string) error {
	reason = cmp.Or(reason, "an operator ended the session")
	s, err := d.node.Session(tsih)
	if err != nil {
		return fmt.Errorf("session %d: %w", tsih, ErrNotFound)
	}
	d.log.InfoContext(ctx, "session killed", eventKey, "session", "tsih", tsih, "initiator", s.Initiator, "target", s.Target, "reason", reason)
	return d.endSession(context.WithoutCancel(ctx), tsih, 0, reason)
}

// ClearReservation ends the reservation of a LUN and removes all its registrations.
func (d *Daemon) ClearReservation(ctx context.Context, target string, id int) error {
	l, err := d.lun(target, id)
	if err != nil {
		return err
	}
	cleared, err := l.unit.ClearReservation()
	switch {
	case err != nil:
		return err
	case !cleared:
		return fmt.Errorf("reservation of LUN %d of %s: %w", id, target, ErrNotFound)
	}
	d.log.WarnContext(ctx, "reservation cleared", eventKey, "reservation", "target", target, "lun", id)
	return nil
}

// ResetSettings restores the defaults of what initiators set of a LUN for all.
func (d *Daemon) ResetSettings(ctx context.Context, target string, id int) error {
	l, err := d.lun(target, id)
	if err != nil {
		return err
	}
	unit := l.unit
	note := func(err error) { // after a sync that failed, the defaults are in force, too
		d.log.WarnContext(ctx, "settings reset", eventKey, "setting", "target", target, "lun", id, "reason", err)
	}
	err = d.calls.do(ctx, d.waits.slow, storeKey(target, &l.LUN), "resetting its settings", func(*call) error {
		_, err := unit.ResetSettings()
		return err
	}, note)
	if err == nil {
		d.log.WarnContext(ctx, "settings reset", eventKey, "setting", "target", target, "lun", id)
	}
	return err
}

// Effective returns the running configuration. The caller must not change it.
func (d *Daemon) Effective() *config.Config {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.served.cfg
}

// Path returns the path of the configuration file, or an empty string.
func (d *Daemon) Path() string { return d.path }

// Document returns a copy of the running document.
func (d *Daemon) Document() *config.Document {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.served.doc.Clone()
}

// Node returns the iSCSI node, for metrics.
func (d *Daemon) Node() *iscsi.Node { return d.node }
