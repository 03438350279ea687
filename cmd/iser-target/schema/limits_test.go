package schema

import (
	"testing"
	"time"
)

func TestLimitAmounts(t *testing.T) {
	for _, tc := range []struct {
		unit string
		n    int64
		want string
	}{
		{Count, 1024, "1024"},
		{PerSecond, 10, "10/s"},
		{Duration, int64(2 * time.Minute), "2m"},
		{Duration, int64(15 * time.Second), "15s"},
		{Bytes, 0, "0"},
		{Bytes, 1000, "1000"},
		{Bytes, 4 << 10, "4KiB"},
		{Bytes, 64 << 20, "64MiB"},
		{Bytes, 3 << 30, "3GiB"},
		{Bytes, 123456789, "117.7MiB"},
		{Bytes, 123456 << 10, "120.6MiB"},
		{Bytes, 1025, "1.0KiB"},
	} {
		if got := (&LimitState{Unit: tc.unit}).Amount(tc.n); got != tc.want {
			t.Errorf("%d %s: %s, want %s", tc.n, tc.unit, got, tc.want)
		}
	}
}

// A limit is pressing from 80 % on, and for an hour after it was reached.
func TestLimitIsPressing(t *testing.T) {
	now := time.Date(2026, 11, 22, 12, 0, 0, 0, time.Local)
	for _, tc := range []struct {
		l    LimitState
		want bool
		text string
	}{
		{LimitState{Name: "a", Unit: Count, Max: 10, Used: 7}, false, "a: 7 of 10 in use"},
		{LimitState{Name: "a", Unit: Count, Max: 10, Used: 8, By: "192.0.2.1"}, true, "a: 8 of 10 in use by 192.0.2.1"},
		{LimitState{Name: "a", Unit: Bytes, Max: 1 << 62, Used: 1 << 62}, true, "a: 4096PiB of 4096PiB in use"},
		{LimitState{Name: "a", Unit: Count, Max: 0, Used: 3}, false, "a: 3 of 0 in use"},
		{LimitState{Name: "a", Unit: Duration, Max: int64(time.Minute), Reached: 1, Last: now.Add(-time.Minute)}, true,
			"a: 1m; reached once, last at 2026-11-22 11:59:00"},
		{LimitState{Name: "a", Unit: Count, Max: 10, Reached: 3, Last: now.Add(-time.Hour)}, false,
			"a: 0 of 10 in use; reached 3 times, last at 2026-11-22 11:00:00"},
	} {
		if got := tc.l.Pressing(now); got != tc.want || tc.l.String() != tc.text {
			t.Errorf("%+v: %v, %q", tc.l, got, tc.l.String())
		}
	}
}
