package cli

import (
	"cmp"
	"slices"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// A Frame has the activity between two samples.
type Frame struct {
	Time     time.Time `json:"time"`    // of the second one
	Seconds  float64   `json:"seconds"` // between them
	Sessions []Load    `json:"sessions"`
	LUNs     []Load    `json:"luns"`
}

// A Load is the activity of a session or of a LUN in a Frame.
type Load struct {
	TSIH      uint16 `json:"tsih,omitempty"` // of a session
	Initiator string `json:"initiator,omitempty"`
	Transport string `json:"transport,omitempty"`
	LUN       *int   `json:"lun,omitempty"`
	Target    string `json:"target"`

	schema.Load
}

// A sample is the state of a target at a time.
type sample struct {
	time  time.Time
	state *schema.State
}

type sessionKey struct {
	tsih    uint16
	started time.Time
}

type lunKey struct {
	target, naa string
	id          int
}

// frame returns the activity between two samples. A session or LUN that is missing in before
// counts from zero.
func frame(before, now sample) Frame {
	f := Frame{Time: now.time, Seconds: now.time.Sub(before.time).Seconds(), Sessions: []Load{}, LUNs: []Load{}}
	was := map[any]*schema.CounterState{}
	for i := range before.state.Sessions {
		s := &before.state.Sessions[i]
		was[sessionKey{s.TSIH, s.Started}] = &s.Counters
	}
	for _, t := range before.state.Targets {
		for i := range t.LUNs {
			was[lunKey{t.Name, t.LUNs[i].NAA, t.LUNs[i].ID}] = &t.LUNs[i].Counters
		}
	}
	fill := func(l Load, key any, c *schema.CounterState) Load {
		var t schema.Tally
		t.Add(was[key], c)
		l.Load = t.Load(f.Seconds, now.state.LatencyBounds)
		return l
	}
	for i := range now.state.Sessions {
		if s := &now.state.Sessions[i]; !s.Discovery {
			f.Sessions = append(f.Sessions, fill(Load{TSIH: s.TSIH, Initiator: s.Initiator, Transport: s.Transport, Target: s.Target}, sessionKey{s.TSIH, s.Started}, &s.Counters))
		}
	}
	for _, t := range now.state.Targets {
		for i := range t.LUNs {
			l := &t.LUNs[i]
			f.LUNs = append(f.LUNs, fill(Load{LUN: &l.ID, Target: t.Name}, lunKey{t.Name, l.NAA, l.ID}, &l.Counters))
		}
	}
	return f
}

// orders lists the orders of Loads, the highest first.
var orders = []struct {
	name string
	by   func(*Load) float64
}{
	{"iops", func(l *Load) float64 { return l.IOPS }},
	{"read", func(l *Load) float64 { return l.ReadBytes }},
	{"write", func(l *Load) float64 { return l.WriteBytes }},
	{"latency", func(l *Load) float64 { return deref(l.Average) }},
	{"p99", func(l *Load) float64 { return deref(l.P99) }},
	{"depth", func(l *Load) float64 { return l.Depth }},
	{"errors", func(l *Load) float64 { return float64(l.Errors) }},
}

// deref returns *v, or -1 if v is nil.
func deref(v *float64) float64 {
	if v == nil {
		return -1
	}
	return *v
}

// sort sorts f by the order of that index. Equal Loads stay in the order of the target.
func (f *Frame) sort(order int) {
	for _, list := range [][]Load{f.Sessions, f.LUNs} {
		slices.SortStableFunc(list, func(a, b Load) int { return cmp.Compare(orders[order].by(&b), orders[order].by(&a)) })
	}
}
