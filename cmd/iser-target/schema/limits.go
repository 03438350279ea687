package schema

import (
	"fmt"
	"strings"
	"time"

	"github.com/iser-target/iser-target/config/terms"
)

// A LimitState describes a limit of what initiators, addresses and LUNs share, and its present use.
type LimitState struct {
	Name string `json:"name"` // the key below limits in the configuration
	Per  string `json:"per"`  // for whom it counts: process, address, initiator and others
	Unit string `json:"unit"` // of Max and Used: one of the constants
	Help string `json:"help"`
	Max  int64  `json:"max"`
	Used int64  `json:"used"`         // in the process, or by the one that uses most
	By   string `json:"by,omitempty"` // who that is; empty: the limit is of the process
	// Reached counts how often the limit refused or delayed something since the start of the target.
	Reached uint64    `json:"reached"`
	Last    time.Time `json:"last,omitzero"` // when Reached counted last
}

// Values of LimitState.Unit.
const (
	Count     = "count"
	Bytes     = "bytes"
	Duration  = "duration" // nanoseconds
	PerSecond = "per second"
)

// nearPercent is the share of a limit from which Near reports it.
const nearPercent = 80

// Percent returns the share of the bound that is in use, and whether the limit has one. A duration has
// none.
func (l *LimitState) Percent() (p int64, ok bool) {
	if l.Unit == Duration || l.Max <= 0 {
		return 0, false
	}
	return int64(100 * (float64(l.Used) / float64(l.Max))), true
}

// Near reports whether at least 80 % of the bound are in use.
func (l *LimitState) Near() bool {
	p, ok := l.Percent()
	return ok && p >= nearPercent
}

// recent is how long LimitState.Pressing remembers that a limit was reached.
const recent = time.Hour

// Pressing reports whether an administrator should look at the limit at time now: it is near its bound,
// or was reached within the last hour.
func (l *LimitState) Pressing(now time.Time) bool {
	return l.Near() || !l.Last.IsZero() && now.Sub(l.Last) < recent
}

// Amount returns n, a value of Max or Used, with its unit.
func (l *LimitState) Amount(n int64) string {
	switch l.Unit {
	case Bytes:
		return bytesText(n)
	case Duration:
		return terms.FormatDuration(time.Duration(n))
	case PerSecond:
		return fmt.Sprintf("%d/s", n)
	}
	return fmt.Sprint(n)
}

// bytesText returns a size as in the configuration if that is short, and otherwise with one decimal.
func bytesText(n int64) string {
	const kib = 1 << 10
	text := terms.FormatSize(n)
	if n < kib || strings.HasSuffix(text, "B") && len(text) <= len("1023MiB") {
		return text
	}
	v, unit := float64(n), ""
	for _, u := range []string{"KiB", "MiB", "GiB", "TiB", "PiB"} {
		if v, unit = v/kib, u; v < kib {
			break
		}
	}
	return fmt.Sprintf("%.1f%s", v, unit)
}

// String returns the limit, its use, and how often it was reached, in one line.
func (l *LimitState) String() string {
	text := fmt.Sprintf("%s: %s of %s in use", l.Name, l.Amount(l.Used), l.Amount(l.Max))
	if l.Unit == Duration {
		text = fmt.Sprintf("%s: %s", l.Name, l.Amount(l.Max))
	} else if l.By != "" {
		text += " by " + l.By
	}
	if l.Reached == 0 {
		return text
	}
	times := "once"
	if l.Reached > 1 {
		times = fmt.Sprintf("%d times", l.Reached)
	}
	return fmt.Sprintf("%s; reached %s, last at %s", text, times, l.Last.Local().Format(time.DateTime))
}
