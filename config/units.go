package config

import (
	"fmt"
	"math/big"
	"strconv"
	"strings"
	"time"

	"github.com/iser-target/iser-target/config/terms"
)

// A Size is a number of bytes.
type Size int64

// units has the longest suffixes first. A letter alone is a binary unit, as truncate(1), lvcreate(8) and targetcli have it.
var units = []struct {
	suffix string
	bytes  int64
}{
	{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"TiB", 1 << 40}, {"PiB", 1 << 50},
	{"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12}, {"PB", 1e15},
	{"K", 1 << 10}, {"M", 1 << 20}, {"G", 1 << 30}, {"T", 1 << 40}, {"P", 1 << 50},
	{"B", 1},
}

// ParseSize parses a number of bytes or of a unit, in upper or lower case: 4096, 10GiB, 1.5T, "1 TB".
func ParseSize(s string) (Size, error) {
	number, unit := s, int64(1)
	for _, u := range units {
		if n := len(s) - len(u.suffix); n >= 0 && strings.EqualFold(s[n:], u.suffix) {
			number, unit = strings.TrimSuffix(s[:n], " "), u.bytes
			break
		}
	}
	whole, fraction, point := strings.Cut(number, ".")
	if whole == "" || point && fraction == "" || strings.Trim(whole+fraction, "0123456789") != "" || len(number) > 64 {
		return 0, fmt.Errorf("%q is not a size: write a number of bytes, or of K, M, G, T or P (1024), KiB to PiB (the same) or KB to PB (1000), like 10G", s)
	}
	n, _ := new(big.Rat).SetString(number) // digits and one point
	n.Mul(n, new(big.Rat).SetInt64(unit))
	switch {
	case !n.IsInt():
		return 0, fmt.Errorf("%q is not a whole number of bytes", s)
	case !n.Num().IsInt64():
		return 0, fmt.Errorf("%q is more than 8 EiB", s)
	}
	return Size(n.Num().Int64()), nil
}

// String returns s in the largest binary unit that s is a multiple of.
func (s Size) String() string { return terms.FormatSize(int64(s)) }

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

// An ESNPolicy says when SAs must have extended sequence numbers.
type ESNPolicy uint8

// Values of an ESNPolicy. With ESNAuto they must where the interface has 1 Gbit/s or more (RFC 7146, section 2).
const (
	ESNAuto ESNPolicy = iota
	ESNOn
	ESNOff
)

// String returns auto, true or false.
func (p ESNPolicy) String() string { return [...]string{"auto", "true", "false"}[p] }

func parseESNPolicy(s string) (any, error) {
	switch s {
	case "auto":
		return ESNAuto, nil
	case "true":
		return ESNOn, nil
	case "false":
		return ESNOff, nil
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
