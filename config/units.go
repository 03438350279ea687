package config

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// A Size is a number of bytes.
type Size int64

// units has the longest suffixes first.
var units = []struct {
	suffix string
	bytes  int64
}{
	{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"TiB", 1 << 40}, {"PiB", 1 << 50},
	{"KB", 1e3}, {"kB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12}, {"PB", 1e15},
	{"B", 1},
}

// ParseSize parses a whole number of bytes or of a unit: 4096, 10GiB, "1 TB".
func ParseSize(s string) (Size, error) {
	digits, unit := s, int64(1)
	for _, u := range units {
		if d, ok := strings.CutSuffix(s, u.suffix); ok {
			digits, unit = strings.TrimSuffix(d, " "), u.bytes
			break
		}
	}
	n, err := strconv.ParseUint(digits, 10, 63)
	if err != nil && digits != "" && strings.Trim(digits, "0123456789") == "" || n > uint64(math.MaxInt64/unit) {
		return 0, fmt.Errorf("%q is more than 8 EiB", s)
	}
	if err != nil {
		return 0, fmt.Errorf("%q is not a whole number of bytes, or of KiB, MiB, GiB, TiB, PiB, KB, MB, GB, TB or PB", s)
	}
	return Size(int64(n) * unit), nil
}

// String returns s in the largest binary unit that s is a multiple of.
func (s Size) String() string {
	for i := 4; i >= 0; i-- {
		if u := units[i]; s != 0 && int64(s)%u.bytes == 0 {
			return strconv.FormatInt(int64(s)/u.bytes, 10) + u.suffix
		}
	}
	return strconv.FormatInt(int64(s), 10)
}

// A Switch is on or off.
type Switch bool

// String returns on or off.
func (s Switch) String() string {
	if s {
		return "on"
	}
	return "off"
}

// A CRCPolicy says when the target asks for CRCs. It uses them whenever the initiator asks.
type CRCPolicy uint8

// Values of a CRCPolicy. With CRCAuto the target asks unless TCP could cut a CRC in two, which siw of
// Linux 6.1 takes for a wrong CRC: see rdma.Options.WholeCRC.
const (
	CRCAuto CRCPolicy = iota
	CRCOn
	CRCOff
)

// String returns auto, on or off.
func (p CRCPolicy) String() string { return [...]string{"auto", "on", "off"}[p] }

func parseCRCPolicy(s string) (any, error) {
	switch s {
	case "auto":
		return CRCAuto, nil
	case "on", "true":
		return CRCOn, nil
	case "off", "false":
		return CRCOff, nil
	}
	return nil, strconv.ErrSyntax
}

func parseDuration(s string) (time.Duration, error) {
	d, err := time.ParseDuration(s)
	if err != nil {
		return 0, fmt.Errorf("%q is not a duration like 15s or 2m", s)
	}
	return d, nil
}
