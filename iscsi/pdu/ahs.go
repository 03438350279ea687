package pdu

import (
	"encoding/binary"
	"errors"
)

// AHS types (section 11.2.2.2).
const (
	AHSExtendedCDB    = 1
	AHSBidiReadLength = 2
)

// Format errors of the AHS area. They end the connection (section 7.7).
var (
	ErrAHSTruncated = errors.New("additional header segment is longer than the AHS area")
	ErrAHSCDB       = errors.New("extended CDB is shorter than 17 bytes")
	ErrAHSBidi      = errors.New("bidirectional read length does not have 5 bytes")
	ErrAHSRepeated  = errors.New("additional header segment is repeated")
)

const ahsHeader = 3 // AHSLength and AHSType, which AHSLength does not count

// Extensions holds what the AHS area of a SCSI Command adds to its BHS.
type Extensions struct {
	CDB        []byte // bytes 16 and up of the CDB: a view of the area; nil without an extended CDB
	Bidi       bool   // ReadLength was given
	ReadLength uint32 // Bidirectional Read Expected Data Transfer Length, bytes
}

// ParseAHS decodes the AHS area of a PDU: segments of
//
//	+---------------+---------------+---------------+---------------+
//	| AHSLength                     | AHSType       | AHS-Specific  |
//	+---------------+---------------+---------------+---------------+
//	: AHS-Specific, padded to a multiple of 4 bytes                :
//
// AHSLength counts AHS-Specific without padding. ParseAHS skips segments of unknown
// type. Every segment has at least 4 bytes, so a length of 0 causes no endless loop.
func ParseAHS(area []byte) (x Extensions, err error) {
	for len(area) > 0 {
		if len(area) < ahsHeader {
			return Extensions{}, ErrAHSTruncated
		}
		n := int(binary.BigEndian.Uint16(area))
		end := Padded(ahsHeader + n)
		if end > len(area) {
			return Extensions{}, ErrAHSTruncated
		}
		specific := area[ahsHeader : ahsHeader+n]
		switch cdb, bidi := area[2] == AHSExtendedCDB, area[2] == AHSBidiReadLength; {
		case cdb && n < 2:
			return Extensions{}, ErrAHSCDB
		case bidi && n != 5:
			return Extensions{}, ErrAHSBidi
		case cdb && x.CDB != nil, bidi && x.Bidi:
			return Extensions{}, ErrAHSRepeated
		case cdb: // a reserved byte, then byte 16 of the CDB
			x.CDB = specific[1:]
		case bidi: // a reserved byte, then the length
			x.Bidi, x.ReadLength = true, binary.BigEndian.Uint32(specific[1:])
		}
		area = area[end:]
	}
	return x, nil
}

// AppendExtendedCDB appends the AHS that carries the bytes of cdb after the first 16.
// The length of cdb must be above 16 and at most MaxCDB.
func AppendExtendedCDB(dst, cdb []byte) []byte {
	rest := cdb[CDBLen:]
	dst = binary.BigEndian.AppendUint16(dst, uint16(1+len(rest)))
	dst = append(dst, AHSExtendedCDB, 0)
	dst = append(dst, rest...)
	return append(dst, make([]byte, Padded(len(rest))-len(rest))...)
}

// AppendBidiReadLength appends the AHS that carries the read length of a bidirectional command.
func AppendBidiReadLength(dst []byte, n uint32) []byte {
	return binary.BigEndian.AppendUint32(append(dst, 0, 5, AHSBidiReadLength, 0), n)
}
