package lun

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
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
