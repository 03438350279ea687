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
	name string // normalized: in lower case
	isid [6]byte
}

// A nexusName names an I_T nexus, which registrations and a reservation belong to (SPC-4, section
// 5.13.1).
type nexusName struct {
	initiator initiatorPort
	target    uint16 // relative target port identifier
}

func (n nexusName) String() string {
	return fmt.Sprintf("%s through target port %d", n.initiator, n.target)
}

const isidSeparator = ",i,0x"

// String returns the initiator port name (RFC 7143, section 4.2.7): the iSCSI name, ",i,0x" and
// the twelve hex digits of the ISID.
func (p initiatorPort) String() string {
	return p.name + isidSeparator + hex.EncodeToString(p.isid[:])
}

// parseInitiatorPort decodes what String returns.
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

// parseInitiatorName normalizes an initiator name. It does not check whether an initiator of that
// name may log in.
func parseInitiatorName(s string) (string, bool) {
	const maxName = 223 // RFC 7143, section 4.2.7.1
	unfit := func(r rune) bool { return r <= ' ' || r == ',' || r == 0x7f }
	if !utf8.ValidString(s) || strings.ContainsFunc(s, unfit) {
		return "", false
	}
	s = strings.ToLower(s) // this makes some letters longer
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

// parseTransportID decodes the TransportID at the start of b, and returns its length. If it is
// invalid, wrong is the offset of the wrong field, else noField.
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
