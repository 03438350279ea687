package cli

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// latency returns the phase total, and another one that top ignores.
func latency(seconds float64, buckets ...uint64) []schema.PhaseState {
	var n uint64
	for _, b := range buckets {
		n += b
	}
	return []schema.PhaseState{{Phase: "backend", Timing: schema.Timing{Count: 5, Seconds: 1}}, {Phase: "total", Timing: schema.Timing{Count: n, Seconds: seconds, Buckets: buckets}}}
}

// A frame has the difference between the counters of two states.
func TestFrameIsTheDifferenceOfTwoStates(t *testing.T) {
	began := time.Date(2026, 11, 21, 19, 0, 0, 0, time.UTC)
	session := func(tsih uint16, started time.Time, c schema.CounterState) schema.SessionState {
		return schema.SessionState{TSIH: tsih, Started: started, Initiator: "i", Target: "t", Transport: "tcp", Counters: c}
	}
	state := func(luns []schema.LUNState, sessions ...schema.SessionState) *schema.State {
		return &schema.State{Targets: []schema.TargetState{{Name: "t", LUNs: luns}}, Sessions: sessions, LatencyBounds: []float64{0.001, 0.002, 0.004}}
	}
	c := schema.CounterState{Reads: 100, Writes: 10, Others: 1, ReadBytes: 1000, WriteBytes: 500, Errors: 3, Aborted: 1, InFlight: 7, Latency: latency(1, 50, 50)}
	more := schema.CounterState{Reads: 300, Writes: 20, Others: 1, ReadBytes: 5000, WriteBytes: 600, Errors: 4, Aborted: 3, InFlight: 2, Latency: latency(1.4, 50, 150, 90, 10)}
	a := sample{began, state([]schema.LUNState{{ID: 0, NAA: "x", Counters: c}, {ID: 1, NAA: "y", Counters: c}},
		session(1, began, c), session(2, began, c), session(3, began, c), schema.SessionState{TSIH: 9, Discovery: true})}
	b := sample{began.Add(2 * time.Second), state([]schema.LUNState{{ID: 0, NAA: "x", Counters: more}, {ID: 1, NAA: "new", Counters: more}},
		session(1, began, more), session(2, began, c), session(3, began.Add(time.Second), schema.CounterState{}), schema.SessionState{TSIH: 9, Discovery: true})}
	f := frame(a, b)
	if len(f.Sessions) != 3 || len(f.LUNs) != 2 || f.Seconds != 2 {
		t.Fatalf("%+v", f)
	}
	for _, l := range []Load{f.Sessions[0], f.LUNs[0]} {
		if l.IOPS != 105 || l.ReadBytes != 2000 || l.WriteBytes != 50 || l.InFlight != 2 || l.Errors != 3 {
			t.Errorf("%+v", l)
		}
		// 200 commands in 0.4 s: 100 up to 2 ms, 90 up to 4 ms, 10 above that.
		if l.Average == nil || math.Abs(*l.Average-0.002) > 1e-9 || l.P50 == nil || *l.P50 != 0.002 || l.P99 == nil || *l.P99 != 0.004 {
			t.Errorf("latencies: %v, %v, %v", deref(l.Average), deref(l.P50), deref(l.P99))
		}
	}
	if l := f.Sessions[1]; l.IOPS != 0 || l.Errors != 0 || l.Average != nil || l.P50 != nil || l.InFlight != 7 {
		t.Errorf("an idle session: %+v", l)
	}
	if l := f.Sessions[2]; l.IOPS != 0 || l.Errors != 0 || l.ReadBytes != 0 {
		t.Errorf("a new session with an old TSIH: %+v", l)
	}
	if l := f.LUNs[1]; l.IOPS != 160.5 || l.Errors != 7 {
		t.Errorf("a new LUN with an old number: %+v", l)
	}
	f.sort(0)
	if f.Sessions[0].TSIH != 1 || *f.LUNs[0].LUN != 1 {
		t.Errorf("by IOPS: %+v", f)
	}
	f.sort(5)
	if f.Sessions[0].TSIH != 2 {
		t.Errorf("by commands in flight: %+v", f)
	}
	lines := strings.Join((&top{}).lines(&f, 0, 100), "\n")
	for _, want := range []string{"19:00:02  3 sessions, 2 LUNs  266 IOPS", "  tcp   105     0.0     0.0      -      -      -      -    0.2    3  i          t"} {
		if !strings.Contains(lines, want) {
			t.Errorf("no %q in\n%s", want, lines)
		}
	}
}

// top fills the screen, and divides it between sessions and LUNs.
func TestTopFillsTheScreen(t *testing.T) {
	var f Frame
	for i := range 50 {
		f.Sessions = append(f.Sessions, Load{TSIH: uint16(i), Initiator: "\x1b[2J"})
		f.LUNs = append(f.LUNs, Load{LUN: &i, Target: "t"})
	}
	tp := &top{last: &f}
	for rows := range 120 {
		lines := tp.screenful(200, rows)
		if len(lines) != max(min(rows, 105), headRows) {
			t.Errorf("%d lines for %d rows", len(lines), rows)
		}
		if strings.Contains(strings.Join(lines, ""), "\x1b") {
			t.Fatal("a name controls the terminal")
		}
	}
	f = Frame{Sessions: []Load{{TSIH: 1, Transport: "iser", Initiator: "iqn.1993-08.org.debian:01:host", Target: "iqn.2026-11.io.example:store"}}}
	for columns, want := range map[int]string{200: "  iqn.1993-08.org.debian:01:host  iqn.2026-11.io.example:store", 120: "  ...org.debian:01:host  ..11.io.example:store", 80: "  ..-08.org.debian:01:host", 60: "", 1: ""} {
		lines := tp.screenful(columns, 24)
		if len(lines) != headRows+1 || !strings.HasSuffix(lines[3], want) || want != "" && len(lines[3]) >= columns {
			t.Errorf("in %d columns: %q", columns, lines)
		}
	}
	for _, tc := range []struct{ room, a, b, wantA, wantB int }{
		{10, 20, 20, 5, 5}, {10, 2, 20, 2, 8}, {10, 20, 2, 8, 2}, {10, 3, 3, 3, 3}, {0, 3, 3, 0, 0}, {-4, 3, 3, 0, 0}, {1, 3, 3, 0, 1},
	} {
		if a, b := share(tc.room, tc.a, tc.b); a != tc.wantA || b != tc.wantB {
			t.Errorf("%s: %d and %d", fmt.Sprint(tc), a, b)
		}
	}
}
