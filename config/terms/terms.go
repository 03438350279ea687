// Package terms has what plans and states say about a configuration: Changes, sizes and durations. It imports
// nothing but the standard library, so that clients of the control API need no more of the configuration than this.
package terms

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// An Op is what a Change does to an object or key.
type Op int

// What a Change does.
const (
	Add Op = iota + 1
	Remove
	Update
)

var opNames = map[Op]string{Add: "add", Remove: "remove", Update: "update"}

// String returns add, remove or update.
func (o Op) String() string { return opNames[o] }

// MarshalText implements encoding.TextMarshaler.
func (o Op) MarshalText() ([]byte, error) { return []byte(opNames[o]), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (o *Op) UnmarshalText(b []byte) error {
	for op, name := range opNames {
		if name == string(b) {
			*o = op
			return nil
		}
	}
	return fmt.Errorf("%q is not add, remove or update", b)
}

// The Kinds of Changes whose objects have names or numbers.
const (
	KindPortal = "portal"
	KindTarget = "target"
	KindLUN    = "lun"
)

// A Change is one difference between two configurations: an object that is added or
// removed, or one key with another value.
type Change struct {
	Op     Op     `json:"op"`
	Kind   string `json:"kind"`             // one of the Kinds of package config
	Target string `json:"target,omitempty"` // name of the target; of a LUN, too
	LUN    int    `json:"lun"`
	Portal string `json:"portal,omitempty"` // its listen address
	// Key is the key that an Update changes, below the object: size, auth.users. It is
	// empty for a key at the top of the file that has one value, like state_dir.
	Key string `json:"key,omitempty"`
	// Old and New are values as YAML on one line; those of a target leave its LUNs out.
	// Each is empty without a value. Both are empty if the difference is a secret.
	Old string `json:"old,omitempty"`
	New string `json:"new,omitempty"`
}

// Object names what c changes, like "LUN 0 of iqn.2026-11.io.example:store".
func (c Change) Object() string {
	switch c.Kind {
	case KindPortal:
		return "portal " + c.Portal
	case KindTarget:
		return "target " + c.Target
	case KindLUN:
		return fmt.Sprintf("LUN %d of %s", c.LUN, c.Target)
	}
	return c.Kind
}

// String puts c into words, like "set size of LUN 0 of iqn.2026-11.io.example:store: 1GiB -> 2GiB".
func (c Change) String() string {
	if c.Op != Update {
		return c.Op.String() + " " + c.Object()
	}
	what := c.Object()
	if c.Key != "" {
		what = c.Key + " of " + what
	}
	if c.Old == "" && c.New == "" {
		return "set " + what
	}
	return fmt.Sprintf("set %s: %s -> %s", what, cmp.Or(c.Old, "none"), cmp.Or(c.New, "none"))
}

// FormatSize returns a number of bytes in the largest binary unit that it is a multiple of, like 10GiB.
func FormatSize(n int64) string {
	for i := len(units) - 1; i >= 0; i-- {
		if u := int64(1) << (10 * (i + 1)); n != 0 && n%u == 0 {
			return strconv.FormatInt(n/u, 10) + units[i]
		}
	}
	return strconv.FormatInt(n, 10)
}

var units = [...]string{"KiB", "MiB", "GiB", "TiB", "PiB"}

// FormatDuration returns d without zero units at its end: 2m, not 2m0s.
func FormatDuration(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}
