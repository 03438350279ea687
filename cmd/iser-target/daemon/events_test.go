package daemon

import (
	"log/slog"
	"slices"
	"testing"
)

// A flood of one kind of event, like refused logins, displaces no other kind.
func TestEventFloodDisplacesNoOtherKind(t *testing.T) {
	var ev events
	log := slog.New(&eventHandler{next: slog.DiscardHandler, events: &ev})
	first := []func(){
		func() { log.Info("change", eventKey, "config") },
		func() { log.Info("login", eventKey, "login", "outcome", "accepted") },
		func() { log.Warn("login", eventKey, "login", "outcome", "refused") },
		func() { log.Info("reservation changed", eventKey, "reservation") },
		func() { log.Info("no event") },
	}
	const flood = maxEvents + 10
	for _, tc := range []struct {
		name string
		kind []func()
		kept []uint64 // of the first four events
	}{
		{"none", nil, []uint64{1, 2, 3, 4}},
		{"refused logins", first[2:3], []uint64{1, 2, 4}},
		{"accepted logins", first[1:2], []uint64{1, 3, 4}},
		{"reservations", first[3:4], []uint64{1, 2, 3}},
		{"reservations and refusals", first[2:4], []uint64{1, 2}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ev = events{}
			for _, event := range first {
				event()
			}
			want := slices.Clone(tc.kept)
			for range flood {
				for _, event := range tc.kind {
					event()
				}
			}
			last := 4 + uint64(flood*len(tc.kind))
			for n := last - uint64(maxEvents*len(tc.kind)) + 1; n <= last; n++ {
				if n > 4 {
					want = append(want, n)
				}
			}
			for since, want := range map[uint64][]uint64{0: want, want[1]: want[2:], last - 1: {last}, last: nil, last + 1: nil} {
				var got []uint64
				for _, e := range ev.since(since) {
					got = append(got, e.Number)
				}
				if !slices.Equal(got, want) {
					t.Errorf("since %d: %d events %v, want %d %v", since, len(got), got[:min(8, len(got))], len(want), want[:min(8, len(want))])
				}
			}
		})
	}
}
