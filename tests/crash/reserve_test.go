package crash

import (
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"

	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
)

// reservations are the registrations of two initiators with a LUN, all with APTPL, as the initiators
// know them.
type reservations struct {
	lun    byte
	ports  [2]port
	names  [2]string
	acked  registrations  // after the last command that was acknowledged
	flight *registrations // after the one whose answer has not come
}

// registrations are a state of the LUN.
type registrations struct {
	keys   map[string]uint64 // by initiator
	holder string
	typ    string // in the words of the control API
}

// String returns a form that can be compared.
func (r registrations) String() string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(r.keys)) {
		fmt.Fprintf(&b, "%s has key %#x; ", name, r.keys[name])
	}
	fmt.Fprintf(&b, "holder %q, type %q", r.holder, r.typ)
	return b.String()
}

// Service actions of PERSISTENT RESERVE OUT, and types (SPC-4, section 6.16).
const (
	register, reserve, release, clearAll, preempt, registerAnyway = 0, 1, 2, 3, 4, 6
)

// A kind is a type of a reservation.
type kind struct {
	code byte
	name string // in the control API
}

// types are the types of a reservation that the test makes, and their names in the control API.
var types = []kind{{1, "write exclusive"}, {3, "exclusive access"}, {5, "write exclusive, registrants only"}}

// step executes one random PERSISTENT RESERVE OUT that has to succeed.
func (r *reservations) step(rng *rand.Rand) (lost bool, err error) {
	who := rng.IntN(2)
	name, other := r.names[who], r.names[1-who]
	next := registrations{maps.Clone(r.acked.keys), r.acked.holder, r.acked.typ}
	key, registered := next.keys[name]
	var action, typ, aptpl byte
	var saKey uint64
	drop := func(name string) {
		delete(next.keys, name)
		if next.holder == name {
			next.holder, next.typ = "", ""
		}
	}
	switch k := rng.IntN(10); {
	case !registered || k < 3: // a new key
		action, aptpl, saKey = register, 1, versions.Add(1)
		next.keys[name] = saKey
	case k < 4:
		action, aptpl, saKey = registerAnyway, 1, versions.Add(1)
		next.keys[name], key = saKey, 0
	case k < 5: // unregister
		action, aptpl = register, 1
		drop(name)
	case k < 8 && next.holder == "":
		kind := types[rng.IntN(len(types))]
		action, typ, next.holder, next.typ = reserve, kind.code, name, kind.name
	case k < 8 && next.holder == name:
		i := slices.IndexFunc(types, func(k kind) bool { return k.name == next.typ })
		action, typ = release, types[i].code
		next.holder, next.typ = "", ""
	case next.keys[other] != 0 && next.keys[other] != key:
		action, typ, saKey = preempt, types[1].code, next.keys[other]
		if next.holder == other {
			next.holder, next.typ = name, types[1].name
		}
		drop(other)
	default:
		action = clearAll
		next = registrations{keys: map[string]uint64{}}
	}
	list := make([]byte, 24)
	binary.BigEndian.PutUint64(list, key)
	binary.BigEndian.PutUint64(list[8:], saKey)
	list[20] = aptpl
	r.flight = &next
	req := &request{lun: r.lun, cdb: [16]byte{0x5f, action, typ, 8: 24}, out: list, immediate: len(list)}
	if lost, err := good(r.ports[who], req); err != nil {
		return lost, fmt.Errorf("%s, with %v: %w", name, r.acked, err)
	}
	r.acked, r.flight = next, nil
	return false, nil
}

// check compares what the target has with what it may have.
func (r *reservations) check(ctx context.Context, c *client.Client, target string) (faults []string, err error) {
	all, err := c.Reservations(ctx)
	if err != nil {
		return nil, err
	}
	got := registrations{keys: map[string]uint64{}}
	for _, l := range all {
		if l.Target != target || l.LUN != int(r.lun) {
			continue
		}
		if len(l.Registrations) > 0 && !l.APTPL {
			faults = append(faults, "APTPL is gone")
		}
		for _, one := range l.Registrations {
			name, _, _ := strings.Cut(one.Initiator, ",")
			if got.keys[name], err = strconv.ParseUint(one.Key, 0, 64); err != nil {
				return nil, err
			}
			if one.Holder {
				got.holder, got.typ = name, l.Type
			}
		}
	}
	if got.String() != r.acked.String() && (r.flight == nil || got.String() != r.flight.String()) {
		faults = append(faults, fmt.Sprintf("reservations of LUN %d: %v, but acknowledged was %v, and in flight was %v",
			r.lun, got, r.acked, r.flight))
	}
	r.acked, r.flight = got, nil
	return faults, nil
}
