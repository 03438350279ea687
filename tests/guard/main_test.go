package main

import (
	"testing"
	"time"
)

// A path is slower if it is beyond the tolerance, and beyond chance.
func TestJudge(t *testing.T) {
	for _, tc := range []struct {
		name         string
		old, present []float64
		slower       bool
	}{
		{"the same", []float64{7.1, 7.0, 7.2, 7.1, 7.0}, []float64{7.0, 7.1, 7.2, 7.1, 7.0}, false},
		{"10 % more", []float64{7.1, 7.0, 7.2, 7.1, 7.0}, []float64{7.8, 7.7, 7.9, 7.8, 7.7}, true},
		{"3 % more is tolerated", []float64{7.1, 7.0, 7.2, 7.1, 7.0}, []float64{7.3, 7.2, 7.4, 7.3, 7.2}, false},
		{"10 % more in noise", []float64{5, 9, 7, 8, 6}, []float64{6, 10, 7.7, 9, 7}, false},
		{"10 % less", []float64{7.1, 7.0, 7.2, 7.1, 7.0}, []float64{6.4, 6.3, 6.5, 6.4, 6.3}, false},
	} {
		if v := judge(tc.old, tc.present, 5, chance/12); v.slower != tc.slower {
			t.Errorf("%s: %+v", tc.name, v)
		}
	}
}

func TestParseStat(t *testing.T) {
	const stat = "4711 (a) b (c)) S 1 2 3 4 5 6 7 8 9 10 250 50 0 0 20 0 9 0 100"
	if d, err := parseStat(stat); err != nil || d != 3*time.Second {
		t.Errorf("%v, %v, want 3s", d, err)
	}
	for _, bad := range []string{"", "1 (a) S 1", "1 (a) S 1 2 3 4 5 6 7 8 9 10 x 50 0"} {
		if _, err := parseStat(bad); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}
