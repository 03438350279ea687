package dashboard

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

const (
	// Interval is the time between two samples.
	Interval = 2 * time.Second
	// maxPoints bounds the points of the charts, to five minutes.
	maxPoints = 150
	// maxEvents and maxRefused bound the events and refused logins of an answer.
	maxEvents  = 100
	maxRefused = 50
)

// A point is one point of the charts.
type point struct {
	Number uint64    `json:"number"` // from 1, one more each time
	Time   time.Time `json:"time"`
	schema.Load
}

type sessionRow struct {
	TSIH        uint16    `json:"tsih"`
	Initiator   string    `json:"initiator"`
	Target      string    `json:"target,omitempty"`
	Transport   string    `json:"transport"`
	Discovery   bool      `json:"discovery,omitempty"`
	LUNs        []int     `json:"luns"`
	Connections int       `json:"connections"`
	Remote      string    `json:"remote,omitempty"`      // of the first connection
	IPsec       string    `json:"ipsec,omitempty"`       // how the least protected connection is protected; empty: nothing is required
	Unprotected string    `json:"unprotected,omitempty"` // why it is not protected as required
	Started     time.Time `json:"started"`
	schema.Load
}

type lunRow struct {
	Target      string     `json:"target"`
	ID          int        `json:"id"`
	State       string     `json:"state"`
	Health      string     `json:"health,omitempty"` // of a LUN that is ready and not healthy
	Since       *time.Time `json:"since,omitempty"`  // of Health
	Reason      string     `json:"reason,omitempty"`
	Size        int64      `json:"size"` // bytes
	Backend     string     `json:"backend"`
	ReadOnly    bool       `json:"read_only,omitempty"`
	Reservation string     `json:"reservation,omitempty"`
	Idle        bool       `json:"idle,omitempty"` // no command for idleAfter
	schema.Load
}

// A table has the rows of a list that a query selects.
type table[T any] struct {
	All      int `json:"all"`
	Matching int `json:"matching"`
	Rows     []T `json:"rows"`
}

// A lunTable has the LUNs that a query selects, by target.
type lunTable struct {
	table[lunRow]
	Hidden  int      `json:"hidden"`  // idle LUNs without a row
	Targets int      `json:"targets"` // that match
	Groups  []*group `json:"groups"`  // the first maxGroups targets
}

const (
	// maxTrouble bounds answer.Trouble.
	maxTrouble = 20
	// maxGateways bounds the gateways of answer.Cluster.
	maxGateways = 200
)

// A cluster is what the page shows of the group that the target is in.
type cluster struct {
	Name     string                `json:"name"`               // of this gateway
	Reason   string                `json:"reason,omitempty"`   // why it serves no shared LUN
	Conflict string                `json:"conflict,omitempty"` // what is wrong with the portal groups
	Unserved int                   `json:"unserved"`           // shared LUNs that no gateway serves
	All      int                   `json:"all"`                // gateways
	Gateways []schema.GatewayState `json:"gateways"`           // the first maxGateways
}

// An answer has all that the page shows.
type answer struct {
	Time     time.Time            `json:"time"` // of the sample
	Interval float64              `json:"interval"`
	Version  string               `json:"version,omitempty"`
	Started  time.Time            `json:"started"`
	Pending  []string             `json:"pending"`
	Limits   []string             `json:"limits"` // that are near their bounds, or were reached lately
	Portals  []schema.PortalState `json:"portals"`
	Targets  int                  `json:"targets"`
	Cluster  *cluster             `json:"cluster,omitempty"`
	NotReady int                  `json:"not_ready"` // LUNs
	Unwell   int                  `json:"unwell"`    // LUNs that are ready and not healthy
	Failed   int                  `json:"failed"`    // those of Unwell whose data initiators cannot rely on
	Total    schema.Load          `json:"total"`
	Points   []point              `json:"points"`
	Sessions table[sessionRow]    `json:"sessions"`
	LUNs     lunTable             `json:"luns"`
	Trouble  []lunRow             `json:"trouble"` // the first LUNs that are not ready or not healthy
	Events   []schema.Event       `json:"events"`  // the last one first
	Refused  []schema.Event       `json:"refused"` // logins, the last one first
}

// A sampler keeps the last sample of a target, and the points of the charts.
type sampler struct {
	src Source
	now func() time.Time

	mu       sync.Mutex // held only to read or replace the fields below
	at       time.Time
	state    schema.State
	cluster  *cluster // nil: none
	limits   []string
	sessions []sessionRow
	luns     []lunRow
	points   []point
	history  history // its marks belong to the goroutine that samples
}

// newSampler returns a sampler with a first sample.
func newSampler(src Source) *sampler {
	s := &sampler{src: src, now: time.Now}
	s.sample()
	return s
}

// run samples every Interval until stop is closed.
func (s *sampler) run(stop <-chan struct{}) {
	tick := time.NewTicker(Interval)
	defer tick.Stop()
	for {
		select {
		case <-stop:
			return
		case <-tick.C:
			s.sample()
		}
	}
}

type sessionKey struct {
	tsih    uint16
	started time.Time
}

type lunKey struct {
	target string
	id     int
}

// counters returns the counters of st by session and LUN.
func counters(st *schema.State) (sessions map[sessionKey]*schema.CounterState, luns map[lunKey]*schema.CounterState) {
	sessions, luns = map[sessionKey]*schema.CounterState{}, map[lunKey]*schema.CounterState{}
	for i := range st.Sessions {
		sessions[sessionKey{st.Sessions[i].TSIH, st.Sessions[i].Started}] = &st.Sessions[i].Counters
	}
	for i := range st.Targets {
		for j := range st.Targets[i].LUNs {
			if l := &st.Targets[i].LUNs[j]; l.State != schema.Draining { // a new LUN may have the number
				luns[lunKey{l.Target, l.ID}] = &l.Counters
			}
		}
	}
	return sessions, luns
}

// sample reads the state of the target and computes rates. In the first sample all rates are 0.
func (s *sampler) sample() {
	st := s.src.State()
	group, served := s.gateways()
	pressing := []string{}
	now := s.now() // after State, which may wait
	for _, l := range s.src.Limits() {
		if l.Pressing(now) {
			pressing = append(pressing, l.String())
		}
	}
	seconds := now.Sub(s.at).Seconds()
	first := s.at.IsZero() || seconds <= 0
	oldSessions, oldLUNs := counters(&s.state)
	begun := &mark{at: now}
	begun.sessions, begun.luns = counters(&st)
	ended := s.history.due(begun, st.LatencyBounds)
	recent := &loads{luns: map[lunKey]*schema.Load{}, sessions: map[sessionKey]*schema.Load{}}
	var all schema.Tally
	sessions, luns := []sessionRow{}, []lunRow{}
	for i := range st.Sessions {
		c := &st.Sessions[i]
		row := sessionRow{
			TSIH: c.TSIH, Initiator: c.Initiator, Target: c.Target, Transport: c.Transport, Discovery: c.Discovery,
			LUNs: c.LUNs, Connections: len(c.Connections), Started: c.Started, Load: schema.Load{InFlight: c.Tasks, Depth: float64(c.Tasks)},
		}
		if len(c.Connections) > 0 {
			row.Remote = c.Connections[0].Remote
		}
		if p := c.Protection(); p != nil {
			row.IPsec = p.Details()
			if p.Verdict != "permit" {
				row.IPsec, row.Unprotected = "not protected", p.Reason
			}
		}
		if !first {
			var t schema.Tally
			t.Add(oldSessions[sessionKey{c.TSIH, c.Started}], &c.Counters)
			row.Load = t.Load(seconds, st.LatencyBounds)
			row.InFlight = c.Tasks
			load := row.Load
			recent.sessions[sessionKey{c.TSIH, c.Started}] = &load
		}
		sessions = append(sessions, row)
	}
	for i := range st.Targets {
		for j := range st.Targets[i].LUNs {
			l := &st.Targets[i].LUNs[j]
			row := lunRow{
				Target: l.Target, ID: l.ID, State: l.State, Reason: l.Reason, Size: l.Size, Backend: l.Backend,
				ReadOnly: l.ReadOnly, Reservation: reservation(l.Reservation), Load: schema.Load{InFlight: l.Counters.InFlight, Depth: float64(l.Counters.InFlight)},
			}
			if l.State == schema.Ready && l.Health != schema.Healthy {
				row.Health, row.Since = l.Health, l.HealthSince
			}
			if row.Reason == "" {
				row.Reason = served[lunKey{l.Target, l.ID}]
			}
			if !first && l.State != schema.Draining {
				var t schema.Tally
				old := oldLUNs[lunKey{l.Target, l.ID}]
				t.Add(old, &l.Counters)
				all.Add(old, &l.Counters)
				row.Load = t.Load(seconds, st.LatencyBounds)
				load := row.Load
				recent.luns[lunKey{l.Target, l.ID}] = &load
			}
			luns = append(luns, row)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.at, s.state, s.cluster, s.limits, s.sessions, s.luns = now, st, group, pressing, sessions, luns
	if first {
		return
	}
	recent.total = all.Load(seconds, st.LatencyBounds)
	s.history.add(0, now, recent)
	for i, l := range ended {
		s.history.add(i, now, l)
	}
	for i := range s.luns {
		r := &s.luns[i]
		of := s.history.luns[lunKey{r.Target, r.ID}]
		r.Idle = !busy(&r.Load) && (of == nil || now.Sub(of.active) >= idleAfter)
	}
	number := uint64(1)
	if n := len(s.points); n > 0 {
		number = s.points[n-1].Number + 1
	}
	if len(s.points) == maxPoints {
		s.points = slices.Delete(s.points, 0, 1)
	}
	s.points = append(s.points, point{number, now, recent.total})
}

// gateways returns the group that the target is in, and who serves the shared LUNs, in words.
func (s *sampler) gateways() (c *cluster, served map[lunKey]string) {
	st, err := s.src.Cluster()
	if err != nil {
		return nil, nil
	}
	c = &cluster{Name: st.Name, Reason: st.Reason, Conflict: st.Conflict, All: len(st.Gateways), Gateways: st.Gateways[:min(maxGateways, len(st.Gateways))]}
	served = map[lunKey]string{}
	for i := range st.LUNs {
		l := &st.LUNs[i]
		text := "served by " + l.Owner
		switch {
		case l.Here:
			text = "served here"
		case l.Owner == "":
			text = "served by no gateway"
			c.Unserved++
		}
		served[lunKey{l.Target, l.ID}] = text
	}
	return c, served
}

// reservation describes r in a few words.
func reservation(r *schema.ReservationState) string {
	switch {
	case r == nil:
		return ""
	case r.Legacy != "":
		return "RESERVE by " + r.Legacy
	case r.Type == "":
		return fmt.Sprintf("none, %d registered", len(r.Registrations))
	}
	var holders []string
	for _, reg := range r.Registrations {
		if reg.Holder {
			holders = append(holders, reg.Initiator)
		}
	}
	if len(holders) != 1 {
		return fmt.Sprintf("%s, %d registered", r.Type, len(r.Registrations))
	}
	return r.Type + " by " + holders[0]
}

// orders lists the orders of rows: the highest value first, names alphabetically.
var orders = []string{"iops", "bytes", "latency", "name"}

// answer returns the part of the last sample that q selects, with events.
func (s *sampler) answer(q query, events []schema.Event) *answer {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := &answer{
		Time: s.at, Interval: Interval.Seconds(), Version: s.state.Version, Started: s.state.Started,
		Pending: s.state.Pending, Limits: s.limits, Portals: s.state.Portals, Targets: len(s.state.Targets), Cluster: s.cluster,
		Points: []point{}, Events: []schema.Event{}, Refused: []schema.Event{}, Trouble: []lunRow{},
	}
	if a.Pending == nil {
		a.Pending = []string{}
	}
	if n := len(s.points); n == 0 || q.after > s.points[n-1].Number {
		q.after = 0 // a number of an earlier process
	}
	for _, p := range s.points {
		if p.Number > q.after {
			a.Points = append(a.Points, p)
		}
		a.Total = p.Load // that of the last point remains
	}
	targets := map[string]*group{}
	for i := range s.state.Targets {
		t := &s.state.Targets[i]
		targets[t.Name] = &group{Target: t.Name, Alias: t.Alias, Sessions: len(t.Sessions)}
	}
	for i := range s.luns {
		r := &s.luns[i]
		if r.State == schema.NotReady {
			a.NotReady++
		}
		if r.Health != "" {
			a.Unwell++
			if r.Health != "degraded" {
				a.Failed++
			}
		}
		g := targets[r.Target]
		if g == nil { // the target was removed, and the LUN still ends
			g = &group{Target: r.Target}
			targets[r.Target] = g
		}
		g.LUNs++
		g.Trouble += r.trouble()
		g.Size += r.Size
		sum(&g.Load, &r.Load)
	}
	a.Sessions = selectRows(s.sessions, q.sessions, (*sessionRow).text, func(a, b *sessionRow) int {
		return cmp.Or(byRates(q.sessions.sort, &a.Load, &b.Load), cmp.Compare(a.Initiator, b.Initiator), cmp.Compare(a.TSIH, b.TSIH))
	})
	order := func(a, b *lunRow) int {
		return cmp.Or(b.trouble()-a.trouble(), byRates(q.luns.sort, &a.Load, &b.Load), cmp.Compare(a.Target, b.Target), cmp.Compare(a.ID, b.ID))
	}
	match := matching(s.luns, q.luns, (*lunRow).text, order)
	groups, rows := groupLUNs(match, targets, &q.luns)
	a.LUNs = lunTable{table[lunRow]{len(s.luns), len(match), []lunRow{}}, len(match) - len(rows), len(groups), groups[:min(maxGroups, len(groups))]}
	for _, r := range rows[:min(q.luns.rows, len(rows))] {
		a.LUNs.Rows = append(a.LUNs.Rows, *r)
	}
	for _, r := range matching(s.luns, list{}, nil, order) {
		if r.trouble() == 0 || len(a.Trouble) == maxTrouble {
			break
		}
		a.Trouble = append(a.Trouble, *r)
	}
	for _, e := range slices.Backward(events) {
		if len(a.Events) < maxEvents {
			a.Events = append(a.Events, e)
		}
		if len(a.Refused) < maxRefused && e.Event == "login" && e.Attrs["outcome"] == "refused" {
			a.Refused = append(a.Refused, e)
		}
	}
	return a
}

// trouble returns 1 for a LUN that is not ready or not healthy, and comes first in any order, else 0.
func (r *lunRow) trouble() int {
	if r.State == schema.Ready && r.Health == "" {
		return 0
	}
	return 1
}

// text returns the text in which a query finds a row.
func (r *lunRow) text() string {
	return fmt.Sprintf("%s lun %d %s %s %s %s %s", r.Target, r.ID, r.State, r.Health, r.Reason, r.Backend, r.Reservation)
}

// text returns the text in which a query finds a row.
func (r *sessionRow) text() string {
	return fmt.Sprintf("%d %s %s %s %s %s", r.TSIH, r.Initiator, r.Target, r.Transport, r.Remote, r.IPsec)
}

// byRates compares a and b in one of orders. It returns 0 if that is name.
func byRates(order string, a, b *schema.Load) int {
	switch order {
	case "iops":
		return cmp.Compare(b.IOPS, a.IOPS)
	case "bytes":
		return cmp.Compare(b.ReadBytes+b.WriteBytes, a.ReadBytes+a.WriteBytes)
	case "latency":
		return cmp.Compare(orZero(b.P99), orZero(a.P99))
	}
	return 0
}

func orZero(v *float64) float64 {
	if v == nil {
		return 0
	}
	return *v
}

// sum adds the rates of load to total. Latencies are not added.
func sum(total, load *schema.Load) {
	total.IOPS += load.IOPS
	total.ReadBytes += load.ReadBytes
	total.WriteBytes += load.WriteBytes
	total.InFlight += load.InFlight
	total.Depth += load.Depth
	total.Errors += load.Errors
	for _, of := range [][2]*schema.OperationLoad{{&total.Read, &load.Read}, {&total.Write, &load.Write}} {
		of[0].IOPS += of[1].IOPS
		of[0].Errors += of[1].Errors
		// That of the slowest LUN.
		if v := of[1].P99; v != nil && (of[0].P99 == nil || *v > *of[0].P99) {
			of[0].P99 = v
		}
	}
	if v := load.P99; v != nil && (total.P99 == nil || *v > *total.P99) {
		total.P99 = v
	}
}

// matching returns the rows that l finds, in order.
func matching[T any](all []T, l list, text func(*T) string, order func(a, b *T) int) (match []*T) {
	for i := range all {
		if l.find == "" || strings.Contains(strings.ToLower(text(&all[i])), l.find) {
			match = append(match, &all[i])
		}
	}
	slices.SortFunc(match, order)
	return match
}

// selectRows returns the rows that l selects.
func selectRows[T any](all []T, l list, text func(*T) string, order func(a, b *T) int) table[T] {
	match := matching(all, l, text, order)
	t := table[T]{All: len(all), Matching: len(match), Rows: []T{}}
	for _, r := range match[:min(l.rows, len(match))] {
		t.Rows = append(t.Rows, *r)
	}
	return t
}
