package lun

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/iser-target/iser-target/lun/state"
)

// Reservations keeps the persistent reservations that have to survive the loss of power (APTPL),
// those of all logical units in one file. Several goroutines may use it at once.
type Reservations = state.Keeper[unitEntry]

var reservationsFormat = state.Format[unitEntries]{
	Name: "reservations", Version: 2,
	Upgrades: map[int]func([]byte) (unitEntries, any, error){1: upgradeReservations},
}

type unitEntries = state.Records[unitEntry]

// A unitEntry is the record of a unit.
type unitEntry struct {
	NAA           string              `json:"naa"`  // Identity.Serial
	Type          byte                `json:"type"` // 0: no reservation
	Registrations []registrationEntry `json:"registrations"`
}

type registrationEntry struct {
	Initiator      string `json:"initiator"`   // initiator port
	TargetPort     uint16 `json:"target_port"` // relative target port identifier
	Key            string `json:"key"`         // 0x and 16 hex digits
	AllTargetPorts bool   `json:"all_target_ports"`
	Holder         bool   `json:"holder"` // false of all where all registrants are
	// By is the iSCSI name of the initiator that has made the registration, and counts for its limit; empty: that of
	// Initiator.
	By string `json:"by,omitempty"`
}

// reservationsState1 is the file of version 1, when a target had one port, with the relative
// identifier 1.
type reservationsState1 struct {
	Version int          `json:"version"`
	Units   []unitEntry1 `json:"units"`
}

type unitEntry1 struct {
	NAA           string `json:"naa"`
	Type          byte   `json:"type"`
	Holder        string `json:"holder"` // initiator port; empty without one, or if all registrants are
	Registrations []struct {
		Initiator      string `json:"initiator"`
		Key            string `json:"key"`
		AllTargetPorts bool   `json:"all_target_ports"`
	} `json:"registrations"`
}

// upgradeReservations reads a file of version 1.
func upgradeReservations(b []byte) (next unitEntries, written any, err error) {
	var s reservationsState1
	if err := state.Decode(b, 1, &s); err != nil || s.Units == nil {
		return next, nil, err
	}
	next = unitEntries{Version: 2, Units: make([]unitEntry, len(s.Units))}
	for i, old := range s.Units {
		e := unitEntry{NAA: old.NAA, Type: old.Type, Registrations: make([]registrationEntry, len(old.Registrations))}
		held := old.Holder == ""
		for j, r := range old.Registrations {
			holder := r.Initiator == old.Holder
			e.Registrations[j] = registrationEntry{r.Initiator, 1, r.Key, r.AllTargetPorts, holder, ""}
			held = held || holder
		}
		if !held {
			return next, nil, fmt.Errorf("units[%d]: holder %.300q is not registered", i, old.Holder)
		}
		next.Units[i] = e
	}
	return next, &s, nil
}

// OpenReservations opens the file at path, as state.Open does. A damaged file is an error:
// without its reservations two nodes of a cluster might write to one disk.
func OpenReservations(path string) (*Reservations, error) {
	return state.OpenKeeper(reservationsFormat, path)
}

// ExamineReservations looks at the file of OpenReservations.
func ExamineReservations(path string, known []string) state.Condition {
	return state.ExamineRecords(reservationsFormat, path, known)
}

// SalvageReservations does what state.Salvage does, for that file.
func SalvageReservations(path string, known []string) ([]state.Loss, error) {
	return state.Salvage(reservationsFormat, path, known)
}

// keepReservations stores s, or nothing if s does not have to survive the loss of power, if
// Options.Reservations is set, and calls p.Commit. s is on stable storage when keepReservations
// returns nil.
func (o *Options) keepReservations(s *prState, p state.Patience) (err error) {
	switch naa := o.Identity.Serial; {
	case o.Reservations == nil:
		if !p.Commit() {
			err = state.ErrAborted
		}
	case s.aptpl && len(s.registrations) > 0:
		_, err = o.Reservations.Put(encodeUnit(naa, s), p)
	default:
		_, err = o.Reservations.Remove(naa, p)
	}
	return err
}

func encodeUnit(naa string, s *prState) unitEntry {
	e := unitEntry{NAA: naa, Type: s.typ, Registrations: make([]registrationEntry, len(s.registrations))}
	for i, r := range s.registrations {
		e.Registrations[i] = s.encode(r)
	}
	return e
}

// encode returns the entry of a registration of s.
func (s *prState) encode(r registration) registrationEntry {
	by := r.by
	if by == r.nexus.initiator.name {
		by = ""
	}
	return registrationEntry{r.nexus.initiator.String(), r.nexus.target, encodeKey(r.key), r.allTargetPorts, r.nexus == s.holder, by}
}

func (e unitEntry) Unit() string { return e.NAA }

func (e unitEntry) Check() error {
	_, err := e.decode()
	return err
}

func encodeKey(key uint64) string { return fmt.Sprintf("0x%016x", key) }

// decode reverses encodeUnit. It refuses what no unit could have got into.
func (e unitEntry) decode() (s prState, err error) {
	if n := len(e.Registrations); n == 0 {
		return s, fmt.Errorf("%d registrations, want 1 to %d", n, maxRegistrations)
	}
	s, err = decodeRegistrations(e.Type, e.Registrations)
	s.aptpl = true
	return s, err
}

// decodeRegistrations returns the registrations and the reservation of that type.
func decodeRegistrations(typ byte, entries []registrationEntry) (s prState, err error) {
	if n := len(entries); n > maxRegistrations {
		return s, fmt.Errorf("%d registrations, want at most %d", n, maxRegistrations)
	}
	holders := 0
	for i, entry := range entries {
		r, err := entry.decode()
		if err != nil {
			return s, fmt.Errorf("registrations[%d]: %w", i, err)
		}
		if s.find(r.nexus) >= 0 {
			return s, fmt.Errorf("registrations[%d]: %s is there twice", i, r.nexus)
		}
		s.registrations = append(s.registrations, r)
		if entry.Holder {
			s.holder = r.nexus
			holders++
		}
	}
	if typ != 0 && (int(typ) >= len(prTypes) || !prTypes[typ].valid) {
		return s, fmt.Errorf("type %d: not a persistent reservation", typ)
	}
	s.typ = typ
	want := 1
	if typ == 0 || prTypes[typ].all {
		want = 0
	}
	if holders != want {
		return s, fmt.Errorf("%d registrations with holder, want %d for type %d", holders, want, typ)
	}
	return s, nil
}

// decode returns the registration.
func (e registrationEntry) decode() (r registration, err error) {
	r.allTargetPorts = e.AllTargetPorts
	if r.nexus, err = decodeNexus(e.Initiator, e.TargetPort); err != nil {
		return r, err
	}
	r.by = r.nexus.initiator.name
	ok := true
	if e.By != "" {
		r.by, ok = parseInitiatorName(e.By)
	}
	if !ok || e.By == r.nexus.initiator.name || e.By != "" && e.By != r.by {
		return r, fmt.Errorf("by %.300q is not the name of another initiator", e.By)
	}
	if r.key, err = strconv.ParseUint(e.Key, 0, 64); err != nil || r.key == 0 || encodeKey(r.key) != e.Key {
		return r, fmt.Errorf("key %.40q: want 0x and 16 lower-case hex digits, not all 0", e.Key)
	}
	return r, nil
}

// decodeNexus returns the nexus between an initiator port and a target port.
func decodeNexus(initiator string, target uint16) (n nexusName, err error) {
	var ok bool
	n.initiator, ok = parseInitiatorPort(initiator)
	if !ok || n.initiator.String() != initiator {
		return n, fmt.Errorf("%.300q is not an initiator port", initiator)
	}
	if n.target = target; target == 0 {
		return n, errors.New("target port 0, want 1 to 65535")
	}
	return n, nil
}
