package lun

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// An initiatorPort is the initiator's end of an I_T nexus.
type initiatorPort struct {
	name string // normalised: in lower case
	isid [6]byte
}

// A nexusName names an I_T nexus. Registrations belong to one, and so does a
// reservation (SPC-4, section 5.13.1).
type nexusName struct {
	initiator initiatorPort
	target    uint16 // relative target port identifier
}

func (n nexusName) String() string {
	return fmt.Sprintf("%s through target port %d", n.initiator, n.target)
}

const isidSeparator = ",i,0x"

// String is the initiator port name (RFC 7143, section 4.2.7): the iSCSI name,
// ",i,0x" and the twelve hex digits of the ISID.
func (p initiatorPort) String() string {
	return p.name + isidSeparator + hex.EncodeToString(p.isid[:])
}

// parseInitiatorPort is the reverse of String.
func parseInitiatorPort(s string) (p initiatorPort, ok bool) {
	i := strings.LastIndex(s, isidSeparator)
	if i < 0 || len(s)-i-len(isidSeparator) != hex.EncodedLen(len(p.isid)) {
		return p, false
	}
	if _, err := hex.Decode(p.isid[:], []byte(s[i+len(isidSeparator):])); err != nil {
		return p, false
	}
	p.name, ok = parseInitiatorName(s[:i])
	return p, ok
}

// parseInitiatorName normalises what can be the name of an initiator. Whether
// one of that name may log in is not asked.
func parseInitiatorName(s string) (string, bool) {
	const maxName = 223 // RFC 7143, section 4.2.7.1
	unfit := func(r rune) bool { return r <= ' ' || r == ',' || r == 0x7f }
	if !utf8.ValidString(s) || strings.ContainsFunc(s, unfit) {
		return "", false
	}
	s = strings.ToLower(s) // which some letters make longer
	return s, s != "" && len(s) <= maxName
}

// A transportID names an initiator port, or all of an initiator device.
//
// iSCSI TransportID (SPC-4, section 7.6.4.6):
//
//	0                1          2                    4                  n
//	+----------------+----------+--------------------+------------------+
//	| TPID FORMAT,   | reserved | ADDITIONAL LENGTH, | name, NULs to a  |
//	| PROTOCOL ID 5h |          | at least 20        | multiple of 4    |
//	+----------------+----------+--------------------+------------------+
type transportID struct {
	port   initiatorPort
	device bool // TPID FORMAT 00b: only the name of port counts
}

const (
	transportIDHeader  = 4
	minTransportIDName = 20
	tpidISCSI          = 0x05
	tpidPort           = 0x40 // TPID FORMAT 01b: the name has an ISID
)

// parseTransportID decodes the TransportID that b starts with, and returns how
// long it is. If it is invalid, wrong is the offset of the field that is, else
// noField.
func parseTransportID(b []byte) (id transportID, n, wrong int) {
	const length, name = 2, transportIDHeader
	if len(b) < transportIDHeader {
		return id, 0, 0
	}
	id.device = b[0] == tpidISCSI
	if !id.device && b[0] != tpidISCSI|tpidPort {
		return id, 0, 0
	}
	n = transportIDHeader + int(binary.BigEndian.Uint16(b[length:]))
	if n < transportIDHeader+minTransportIDName || n%4 != 0 || n > len(b) {
		return id, 0, length
	}
	text := strings.TrimRight(string(b[name:n]), "\x00")
	ok := len(text) < n-name // at least one NUL
	if ok && id.device {
		id.port.name, ok = parseInitiatorName(text)
	} else if ok {
		id.port, ok = parseInitiatorPort(text)
	}
	if !ok {
		return id, 0, name
	}
	return id, n, noField
}

// appendTransportID appends the TransportID of p, with TPID FORMAT 01b.
func (p initiatorPort) appendTransportID(b []byte) []byte {
	name := terminated(p.String())
	b = append(b, tpidISCSI|tpidPort, 0)
	b = binary.BigEndian.AppendUint16(b, uint16(len(name)))
	return append(b, name...)
}

// prTypes are the persistent reservation types (SPC-4, section 5.13.4), by
// the value of TYPE.
var prTypes = [16]struct {
	valid       bool
	exclusive   bool // keeps out readers as well as writers
	registrants bool // keeps out nobody who is registered
	all         bool // is held by all who are registered
}{
	1: {valid: true},                                                // Write Exclusive
	3: {valid: true, exclusive: true},                               // Exclusive Access
	5: {valid: true, registrants: true},                             // Write Exclusive - Registrants Only
	6: {valid: true, exclusive: true, registrants: true},            // Exclusive Access - Registrants Only
	7: {valid: true, registrants: true, all: true},                  // Write Exclusive - All Registrants
	8: {valid: true, exclusive: true, registrants: true, all: true}, // Exclusive Access - All Registrants
}

// maxRegistrations is how many I_T nexuses can register with a unit.
const maxRegistrations = 512

// A prState is the registrations and the persistent reservation of a unit.
// Methods that change it leave a copy of it as it was.
type prState struct {
	generation    uint32 // PRGENERATION
	aptpl         bool   // survives the loss of power
	registrations []registration
	typ           byte      // 0: no reservation
	holder        nexusName // of a type that not all registrants hold
}

type registration struct {
	nexus          nexusName
	key            uint64 // not 0
	allTargetPorts bool   // made with ALL_TG_PT, as were those of the other target ports
}

// find returns the index of the registration of n, or -1.
func (s *prState) find(n nexusName) int {
	return slices.IndexFunc(s.registrations, func(r registration) bool { return r.nexus == n })
}

// holds tells whether n holds the reservation.
func (s *prState) holds(n nexusName) bool {
	if prTypes[s.typ].all {
		return s.find(n) >= 0
	}
	return s.typ != 0 && s.holder == n
}

// release ends the reservation.
func (s *prState) release() { s.typ, s.holder = 0, nexusName{} }

// put registers a nexus, or changes its registration.
func (s *prState) put(r registration) {
	if i := s.find(r.nexus); i >= 0 {
		s.registrations = slices.Clone(s.registrations)
		s.registrations[i] = r
		return
	}
	s.registrations = append(s.registrations, r)
}

// remove takes away the registrations that match, and the reservation if that
// leaves no holder. It returns whose they were.
func (s *prState) remove(match func(registration) bool) (gone []nexusName) {
	var rest []registration
	for _, r := range s.registrations {
		if match(r) {
			gone = append(gone, r.nexus)
		} else {
			rest = append(rest, r)
		}
	}
	s.registrations = rest
	if all := prTypes[s.typ].all; all && len(rest) == 0 || !all && slices.Contains(gone, s.holder) {
		s.release()
	}
	return gone
}

// nexuses are those that are registered.
func (s *prState) nexuses() []nexusName {
	list := make([]nexusName, len(s.registrations))
	for i, r := range s.registrations {
		list[i] = r.nexus
	}
	return list
}

// covers tells whether r stands for registrations of its initiator port through
// all of these target ports: made with ALL_TG_PT, and still the same in key and
// reservation (SPC-4, section 6.15.5).
func (s *prState) covers(r registration, targets []uint16) bool {
	if !r.allTargetPorts || !slices.Contains(targets, r.nexus.target) {
		return false
	}
	for _, target := range targets {
		n := nexusName{r.nexus.initiator, target}
		if i := s.find(n); i < 0 || !s.registrations[i].allTargetPorts || s.registrations[i].key != r.key || s.holds(n) != s.holds(r.nexus) {
			return false
		}
	}
	return true
}

// Reservations keeps the persistent reservations that are to survive the loss
// of power (APTPL), those of all logical units in one file. It may be used by
// several goroutines at once.
type Reservations struct{ *keeper[unitEntry] }

var reservationsKind = recordKind[unitEntry]{name: "reservations", version: 2, upgrade: upgradeReservations}

// unitEntry is what is kept of a unit.
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
}

// reservationsState1 is the file of version 1, when there was one target port,
// with the relative identifier 1.
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

// upgradeReservations is the upgrade of the kind.
func upgradeReservations(b []byte) (units []unitEntry, written any, err error) {
	var s reservationsState1
	if err := decodeState(b, 1, &s); err != nil || s.Units == nil {
		return nil, nil, err
	}
	units = make([]unitEntry, len(s.Units))
	for i, old := range s.Units {
		e := unitEntry{NAA: old.NAA, Type: old.Type, Registrations: make([]registrationEntry, len(old.Registrations))}
		held := old.Holder == ""
		for j, r := range old.Registrations {
			holder := r.Initiator == old.Holder
			e.Registrations[j] = registrationEntry{r.Initiator, 1, r.Key, r.AllTargetPorts, holder}
			held = held || holder
		}
		if !held {
			return nil, nil, fmt.Errorf("units[%d]: holder %.300q is not registered", i, old.Holder)
		}
		units[i] = e
	}
	return units, &s, nil
}

// OpenReservations opens the file at path, as OpenIdentities does. A file that
// is not wholly as Reservations has written it is an error and stays as it is:
// without its reservations two nodes of a cluster might write to one disk.
func OpenReservations(path string) (*Reservations, error) {
	k, err := openKeeper(reservationsKind, path)
	if err != nil {
		return nil, err
	}
	return &Reservations{k}, nil
}

// load returns what was kept of the unit with that NAA.
func (r *Reservations) load(naa string) (prState, error) {
	e, ok, err := r.get(naa)
	if !ok {
		return prState{}, err
	}
	return e.decode()
}

// save keeps s for the unit with that NAA or, if it is not to survive the loss
// of power, nothing. When it returns nil that is on stable storage.
func (r *Reservations) save(naa string, s *prState) (err error) {
	if s.aptpl && len(s.registrations) > 0 {
		_, err = r.put(encodeUnit(naa, s))
	} else {
		_, err = r.remove(naa)
	}
	return err
}

func encodeUnit(naa string, s *prState) unitEntry {
	e := unitEntry{NAA: naa, Type: s.typ, Registrations: make([]registrationEntry, len(s.registrations))}
	for i, r := range s.registrations {
		e.Registrations[i] = registrationEntry{
			r.nexus.initiator.String(), r.nexus.target, fmt.Sprintf("0x%016x", r.key), r.allTargetPorts, r.nexus == s.holder,
		}
	}
	return e
}

func (e unitEntry) unit() string { return e.NAA }

func (e unitEntry) check() error {
	_, err := e.decode()
	return err
}

// decode is the reverse of encodeUnit. All that a unit could not have got into
// is an error.
func (e unitEntry) decode() (s prState, err error) {
	if n := len(e.Registrations); n == 0 || n > maxRegistrations {
		return s, fmt.Errorf("%d registrations, want 1 to %d", n, maxRegistrations)
	}
	s.aptpl = true
	holders := 0
	for i, entry := range e.Registrations {
		r := registration{allTargetPorts: entry.AllTargetPorts}
		var ok bool
		if r.nexus.initiator, ok = parseInitiatorPort(entry.Initiator); !ok || r.nexus.initiator.String() != entry.Initiator {
			return s, fmt.Errorf("registrations[%d]: %.300q is no initiator port", i, entry.Initiator)
		}
		if r.nexus.target = entry.TargetPort; entry.TargetPort == 0 {
			return s, fmt.Errorf("registrations[%d]: target port 0, want 1 to 65535", i)
		}
		if r.key, err = strconv.ParseUint(entry.Key, 0, 64); err != nil || r.key == 0 || fmt.Sprintf("0x%016x", r.key) != entry.Key {
			return s, fmt.Errorf("registrations[%d]: key %.40q: want 0x and 16 lower-case hex digits, not all of them 0", i, entry.Key)
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
	if e.Type != 0 && (int(e.Type) >= len(prTypes) || !prTypes[e.Type].valid) {
		return s, fmt.Errorf("type %d: there is no such persistent reservation", e.Type)
	}
	s.typ = e.Type
	want := 1
	if e.Type == 0 || prTypes[e.Type].all {
		want = 0
	}
	if holders != want {
		return s, fmt.Errorf("%d registrations with holder, want %d for a reservation of type %d", holders, want, e.Type)
	}
	return s, nil
}
