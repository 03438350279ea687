package dashboard

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// A span is a length of the charts: a ring of points at equal distances.
type span struct {
	name   string
	every  time.Duration
	points int
}

// spans are the lengths of the charts. The first has a point for each sample.
var spans = [...]span{{"5m", Interval, 150}, {"1h", 30 * time.Second, 120}, {"24h", 5 * time.Minute, 288}}

// maxSeries bounds the LUNs and sessions whose history is kept. The points of one have less than 32 KiB, so those of all have
// less than 16 MiB.
const maxSeries = 512

// idleAfter is the time without a command after which a LUN or session is idle.
const idleAfter = 5 * time.Minute

// A moment is the load of one period. It has float32 because there are many.
type moment struct {
	at                             int64 // the end of the period, in Unix milliseconds
	reads, writes, others          float32
	readBytes, writeBytes          float32 // per second
	read50, read99, write50, wrt99 float32 // seconds; negative: no command ended
	depth, errors                  float32
}

// momentOf returns the moment of a load.
func momentOf(at time.Time, l *schema.Load) moment {
	or := func(v *float64) float32 {
		if v == nil {
			return -1
		}
		return float32(*v)
	}
	return moment{at: at.UnixMilli(), reads: float32(l.Read.IOPS), writes: float32(l.Write.IOPS),
		others: float32(max(0, l.IOPS-l.Read.IOPS-l.Write.IOPS)), readBytes: float32(l.ReadBytes), writeBytes: float32(l.WriteBytes),
		read50: or(l.Read.P50), read99: or(l.Read.P99), write50: or(l.Write.P50), wrt99: or(l.Write.P99),
		depth: float32(l.Depth), errors: float32(l.Errors)}
}

// A chartPoint is a moment as the page gets it.
type chartPoint struct {
	At      int64    `json:"at"` // Unix milliseconds
	Reads   float64  `json:"reads"`
	Writes  float64  `json:"writes"`
	Others  float64  `json:"others"`
	Read    float64  `json:"read"` // bytes per second
	Write   float64  `json:"write"`
	Read50  *float64 `json:"read50,omitempty"` // seconds
	Read99  *float64 `json:"read99,omitempty"`
	Write50 *float64 `json:"write50,omitempty"`
	Write99 *float64 `json:"write99,omitempty"`
	// ReadSize and WriteSize are mean bytes of a command; nil: no command ended.
	ReadSize  *float64 `json:"read_size,omitempty"`
	WriteSize *float64 `json:"write_size,omitempty"`
	Depth     float64  `json:"depth"`
	Errors    float64  `json:"errors"` // commands in the period
}

func (m *moment) point() chartPoint {
	// Four digits are enough for a chart.
	round := func(v float64) float64 {
		if v == 0 {
			return 0
		}
		p := math.Pow(10, 3-math.Floor(math.Log10(math.Abs(v))))
		if p > 1 && !math.IsInf(p, 0) {
			return math.Round(v*p) / p
		}
		return math.Round(v)
	}
	latency := func(v float32) *float64 {
		if v < 0 {
			return nil
		}
		r := round(float64(v))
		return &r
	}
	size := func(bytes, commands float32) *float64 {
		if commands == 0 {
			return nil
		}
		r := round(float64(bytes) / float64(commands))
		return &r
	}
	return chartPoint{At: m.at, Reads: round(float64(m.reads)), Writes: round(float64(m.writes)), Others: round(float64(m.others)),
		Read: round(float64(m.readBytes)), Write: round(float64(m.writeBytes)), Read50: latency(m.read50), Read99: latency(m.read99),
		Write50: latency(m.write50), Write99: latency(m.wrt99), ReadSize: size(m.readBytes, m.reads), WriteSize: size(m.writeBytes, m.writes),
		Depth: round(float64(m.depth)), Errors: float64(m.errors)}
}

// A series has the moments of an object, or of all LUNs together.
type series struct {
	rings  [len(spans)]ring
	active time.Time // when the object had a command last
}

// A ring has the last moments of a span.
type ring struct {
	list []moment // the moment after n others is at n % its capacity
	n    int
}

func (r *ring) add(m moment, most int) {
	if r.list == nil {
		r.list = make([]moment, 0, most)
	}
	if len(r.list) < most {
		r.list = append(r.list, m)
	} else {
		r.list[r.n%most] = m
	}
	r.n++
}

// since returns the points after a time in Unix milliseconds, oldest first.
func (r *ring) since(after int64) []chartPoint {
	list := []chartPoint{}
	for i := range r.list {
		if m := &r.list[(r.n+i)%len(r.list)]; m.at > after { // the oldest is at n % len once the ring is full, else at 0
			list = append(list, m.point())
		}
	}
	return list
}

// A history has the series of the total and of objects. Its methods are called by the sampler alone, except those that say so.
type history struct {
	total series
	luns  map[lunKey]*series
	sess  map[sessionKey]*series
	marks [len(spans)]mark // of the spans whose points are longer than a sample
}

// A mark has the counters at the beginning of a period.
type mark struct {
	at       time.Time
	sessions map[sessionKey]*schema.CounterState
	luns     map[lunKey]*schema.CounterState
}

// A loads has the load of each object, and of all LUNs together.
type loads struct {
	total    schema.Load
	luns     map[lunKey]*schema.Load
	sessions map[sessionKey]*schema.Load
}

// since returns the loads from m to now.
func (m *mark) since(now *mark, bounds []float64) *loads {
	seconds := now.at.Sub(m.at).Seconds()
	l := &loads{luns: map[lunKey]*schema.Load{}, sessions: map[sessionKey]*schema.Load{}}
	var all schema.Tally
	for k, c := range now.luns {
		var t schema.Tally
		t.Add(m.luns[k], c)
		all.Add(m.luns[k], c)
		load := t.Load(seconds, bounds)
		l.luns[k] = &load
	}
	for k, c := range now.sessions {
		var t schema.Tally
		t.Add(m.sessions[k], c)
		load := t.Load(seconds, bounds)
		l.sessions[k] = &load
	}
	l.total = all.Load(seconds, bounds)
	return l
}

// due returns the loads of the longer spans whose period ends at now, by their index, and begins the next periods.
func (h *history) due(now *mark, bounds []float64) map[int]*loads {
	ended := map[int]*loads{}
	for i := 1; i < len(spans); i++ {
		m := &h.marks[i]
		if !m.at.IsZero() {
			if now.at.Sub(m.at) < spans[i].every-Interval/2 {
				continue
			}
			ended[i] = m.since(now, bounds)
		}
		*m = *now
	}
	return ended
}

// add adds a moment of span i to each series, and begins those of objects that had a command.
func (h *history) add(i int, now time.Time, l *loads) {
	add := func(s *series, load *schema.Load) {
		if i == 0 && busy(load) { // longer periods end later than their last command
			s.active = now
		}
		s.rings[i].add(momentOf(now, load), spans[i].points)
	}
	add(&h.total, &l.total)
	if h.luns == nil {
		h.luns, h.sess = map[lunKey]*series{}, map[sessionKey]*series{}
	}
	for k := range h.luns {
		if l.luns[k] == nil {
			delete(h.luns, k) // the LUN was removed
		}
	}
	for k := range h.sess {
		if l.sessions[k] == nil {
			delete(h.sess, k)
		}
	}
	for k, load := range l.luns {
		if s := h.luns[k]; s != nil {
			add(s, load)
		} else if i == 0 && busy(load) && h.room(now) {
			s = &series{}
			h.luns[k] = s
			add(s, load)
		}
	}
	for k, load := range l.sessions {
		if s := h.sess[k]; s != nil {
			add(s, load)
		} else if i == 0 && busy(load) && h.room(now) {
			s = &series{}
			h.sess[k] = s
			add(s, load)
		}
	}
}

// room reports whether one more series may begin. If there are maxSeries, it drops the one that has been idle longest.
func (h *history) room(now time.Time) bool {
	if len(h.luns)+len(h.sess) < maxSeries {
		return true
	}
	older := func(a, b time.Time) bool { return b.IsZero() || a.Before(b) }
	var (
		last time.Time
		drop func()
	)
	for k, s := range h.luns {
		if older(s.active, last) {
			last, drop = s.active, func() { delete(h.luns, k) }
		}
	}
	for k, s := range h.sess {
		if older(s.active, last) {
			last, drop = s.active, func() { delete(h.sess, k) }
		}
	}
	if now.Sub(last) < idleAfter {
		return false
	}
	drop()
	return true
}

// busy reports whether a load has commands.
func busy(l *schema.Load) bool {
	return l.IOPS > 0 || l.ReadBytes > 0 || l.WriteBytes > 0 || l.Errors > 0 || l.InFlight > 0
}

// A group has the totals of the LUNs of a target.
type group struct {
	Target   string `json:"target"`
	Alias    string `json:"alias,omitempty"`
	LUNs     int    `json:"luns"`
	Matching int    `json:"matching"`
	Trouble  int    `json:"trouble"` // LUNs that are not ready or not healthy
	Hidden   int    `json:"hidden"`  // idle LUNs that have no rows
	Sessions int    `json:"sessions"`
	Size     int64  `json:"size"` // bytes
	schema.Load
}

// maxGroups bounds the groups of an answer.
const maxGroups = 200

// fewLUNs is how many LUNs are shown although they are idle.
const fewLUNs = 10

// groupLUNs returns the targets of rows, which are in the order of the list, and the rows in the order of the groups. Idle LUNs
// have no row if there are many, unless the query opens their target or looks for something.
func groupLUNs(match []*lunRow, targets map[string]*group, l *list) (groups []*group, rows []*lunRow) {
	byTarget := map[string][]*lunRow{}
	for _, r := range match {
		byTarget[r.Target] = append(byTarget[r.Target], r)
	}
	groups = slices.AppendSeq(make([]*group, 0, len(targets)), maps.Values(targets))
	if l.find != "" {
		groups = slices.DeleteFunc(groups, func(g *group) bool { return len(byTarget[g.Target]) == 0 })
	}
	slices.SortFunc(groups, func(a, b *group) int {
		return cmp.Or(min(b.Trouble, 1)-min(a.Trouble, 1), byRates(l.sort, &a.Load, &b.Load), cmp.Compare(a.Target, b.Target))
	})
	for _, g := range groups {
		all := byTarget[g.Target]
		g.Matching = len(all)
		for _, r := range all {
			if r.Idle && r.trouble() == 0 && len(match) > fewLUNs && l.find == "" && !slices.Contains(l.open, g.Target) {
				g.Hidden++
				continue
			}
			rows = append(rows, r)
		}
	}
	return groups, rows
}
