package lun

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode/utf8"
)

// An initiatorPort is the initiator's end of an I_T nexus. It names the nexus,
// because a target has one target port.
type initiatorPort struct {
	name string // normalised: in lower case
	isid [6]byte
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
	typ           byte          // 0: no reservation
	holder        initiatorPort // of a type that not all registrants hold
}

type registration struct {
	port           initiatorPort
	key            uint64 // not 0
	allTargetPorts bool   // made with ALL_TG_PT
}

// find returns the index of the registration of p, or -1.
func (s *prState) find(p initiatorPort) int {
	return slices.IndexFunc(s.registrations, func(r registration) bool { return r.port == p })
}

// holds tells whether p holds the reservation.
func (s *prState) holds(p initiatorPort) bool {
	if prTypes[s.typ].all {
		return s.find(p) >= 0
	}
	return s.typ != 0 && s.holder == p
}

// release ends the reservation.
func (s *prState) release() { s.typ, s.holder = 0, initiatorPort{} }

// put registers a port, or changes its registration.
func (s *prState) put(r registration) {
	if i := s.find(r.port); i >= 0 {
		s.registrations = slices.Clone(s.registrations)
		s.registrations[i] = r
		return
	}
	s.registrations = append(s.registrations, r)
}

// remove takes away the registrations that match, and the reservation if that
// leaves no holder. It returns whose they were.
func (s *prState) remove(match func(registration) bool) (ports []initiatorPort) {
	var rest []registration
	for _, r := range s.registrations {
		if match(r) {
			ports = append(ports, r.port)
		} else {
			rest = append(rest, r)
		}
	}
	s.registrations = rest
	if all := prTypes[s.typ].all; all && len(rest) == 0 || !all && slices.Contains(ports, s.holder) {
		s.release()
	}
	return ports
}

// ports are the initiator ports that are registered.
func (s *prState) ports() []initiatorPort {
	ports := make([]initiatorPort, len(s.registrations))
	for i, r := range s.registrations {
		ports[i] = r.port
	}
	return ports
}

// Reservations keeps the persistent reservations that are to survive the loss
// of power (APTPL), those of all logical units in one file. It may be used by
// several goroutines at once.
type Reservations struct {
	mu     sync.Mutex // guards all of it
	file   stateFile
	closed bool
	state  reservationsState
}

const reservationsVersion = 1

// reservationsState is the file: JSON, with the members in this order. A value
// of it is not changed; a new one takes its place.
type reservationsState struct {
	Version int         `json:"version"`
	Units   []unitEntry `json:"units"` // one per unit that has something to keep
}

type unitEntry struct {
	NAA           string              `json:"naa"`    // Identity.Serial
	Type          byte                `json:"type"`   // 0: no reservation
	Holder        string              `json:"holder"` // initiator port; empty without one, or if all registrants are
	Registrations []registrationEntry `json:"registrations"`
}

type registrationEntry struct {
	Initiator      string `json:"initiator"` // initiator port
	Key            string `json:"key"`       // 0x and 16 hex digits
	AllTargetPorts bool   `json:"all_target_ports"`
}

// OpenReservations opens the file at path, as OpenIdentities does. A file that
// is not wholly as Reservations has written it is an error and stays as it is:
// without its reservations two nodes of a cluster might write to one disk.
func OpenReservations(path string) (*Reservations, error) {
	r := &Reservations{
		file:  stateFile{fsync: (*os.File).Sync},
		state: reservationsState{reservationsVersion, []unitEntry{}},
	}
	if path == "" {
		return nil, errors.New("reservations: the path of the file is empty")
	}
	if err := r.file.open(path); err != nil {
		return nil, r.wrap(err)
	}
	b, err := r.file.read()
	if err == nil && b != nil {
		r.state, err = decodeReservations(b)
	}
	if err != nil {
		r.file.unlock()
		return nil, r.wrap(err)
	}
	return r, nil
}

// Close gives the file free for others. Commands that change what is kept fail
// from then on.
func (r *Reservations) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil
	}
	r.closed = true
	if err := r.file.unlock(); err != nil {
		return r.wrap(err)
	}
	return nil
}

func (r *Reservations) wrap(err error) error {
	return fmt.Errorf("reservations %s: %w", r.file.path, err)
}

// load returns what was kept of the unit with that NAA.
func (r *Reservations) load(naa string) (prState, error) {
	if _, err := parseIdentity(naa); err != nil {
		return prState{}, r.wrap(err) // and could not be saved
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if i := r.index(naa); i >= 0 {
		return r.state.Units[i].decode()
	}
	return prState{}, nil
}

// Preconditions: mu is held.
func (r *Reservations) index(naa string) int {
	return slices.IndexFunc(r.state.Units, func(e unitEntry) bool { return e.NAA == naa })
}

// save keeps s for the unit with that NAA or, if it is not to survive the loss
// of power, nothing. When it returns nil that is on stable storage.
func (r *Reservations) save(naa string, s *prState) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.saveLocked(naa, s); err != nil {
		return r.wrap(err)
	}
	return nil
}

// Preconditions: mu is held.
func (r *Reservations) saveLocked(naa string, s *prState) error {
	next := r.state
	keep := s.aptpl && len(s.registrations) > 0
	switch i := r.index(naa); {
	case i < 0 && !keep && !r.file.unsure:
		return nil
	case r.closed:
		return fs.ErrClosed
	case i < 0 && keep:
		next.Units = append(next.Units, encodeUnit(naa, s))
	case keep:
		next.Units = slices.Clone(next.Units)
		next.Units[i] = encodeUnit(naa, s)
	case i >= 0:
		next.Units = slices.Delete(slices.Clone(next.Units), i, i+1)
	}
	b, err := encodeState(next)
	if err != nil {
		return err
	}
	if err := r.file.replace(b); err != nil {
		return err
	}
	r.state = next
	return nil
}

func encodeUnit(naa string, s *prState) unitEntry {
	e := unitEntry{NAA: naa, Type: s.typ, Registrations: make([]registrationEntry, len(s.registrations))}
	if s.holder != (initiatorPort{}) {
		e.Holder = s.holder.String()
	}
	for i, r := range s.registrations {
		e.Registrations[i] = registrationEntry{r.port.String(), fmt.Sprintf("0x%016x", r.key), r.allTargetPorts}
	}
	return e
}

// decode is the reverse of encodeUnit. All that a unit could not have got into
// is an error.
func (e *unitEntry) decode() (s prState, err error) {
	if _, err := parseIdentity(e.NAA); err != nil {
		return s, err
	}
	if n := len(e.Registrations); n == 0 || n > maxRegistrations {
		return s, fmt.Errorf("%d registrations, want 1 to %d", n, maxRegistrations)
	}
	s.aptpl = true
	for i, entry := range e.Registrations {
		r := registration{allTargetPorts: entry.AllTargetPorts}
		var ok bool
		if r.port, ok = parseInitiatorPort(entry.Initiator); !ok || r.port.String() != entry.Initiator {
			return s, fmt.Errorf("registrations[%d]: %.300q is no initiator port", i, entry.Initiator)
		}
		if r.key, err = strconv.ParseUint(entry.Key, 0, 64); err != nil || r.key == 0 || fmt.Sprintf("0x%016x", r.key) != entry.Key {
			return s, fmt.Errorf("registrations[%d]: key %.40q: want 0x and 16 lower-case hex digits, not all of them 0", i, entry.Key)
		}
		if s.find(r.port) >= 0 {
			return s, fmt.Errorf("registrations[%d]: %s is there twice", i, r.port)
		}
		s.registrations = append(s.registrations, r)
	}
	if e.Type == 0 && e.Holder == "" {
		return s, nil
	}
	if int(e.Type) >= len(prTypes) || !prTypes[e.Type].valid {
		return s, fmt.Errorf("type %d: there is no such persistent reservation", e.Type)
	}
	s.typ = e.Type
	if prTypes[e.Type].all {
		if e.Holder != "" {
			return s, fmt.Errorf("holder %.300q of type %d, which all registrants hold", e.Holder, e.Type)
		}
		return s, nil
	}
	i := slices.IndexFunc(e.Registrations, func(r registrationEntry) bool { return r.Initiator == e.Holder })
	if i < 0 {
		return s, fmt.Errorf("holder %.300q is not registered", e.Holder)
	}
	s.holder = s.registrations[i].port
	return s, nil
}

// decodeReservations is the reverse of encodeState. Beside what decodeState and
// sameTokens refuse, entries that are bad or there twice are errors.
func decodeReservations(b []byte) (s reservationsState, err error) {
	fail := func(format string, a ...any) (reservationsState, error) {
		return reservationsState{}, fmt.Errorf(format, a...)
	}
	if err := decodeState(b, reservationsVersion, &s); err != nil {
		return reservationsState{}, err
	}
	if s.Units == nil {
		return fail("is damaged: want the member units, a list")
	}
	naas := map[string]bool{}
	for i, e := range s.Units {
		if _, err := e.decode(); err != nil {
			return fail("units[%d]: %w", i, err)
		}
		if naas[e.NAA] {
			return fail("units[%d]: naa %s is there twice", i, e.NAA)
		}
		naas[e.NAA] = true
	}
	if err := sameTokens(b, s); err != nil {
		return fail("is damaged: %w", err)
	}
	return s, nil
}
