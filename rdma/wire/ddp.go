package wire

import "errors"

// Header sizes in bytes (RFC 5041, sections 4.2 and 4.3).
const (
	TaggedLen   = 14
	UntaggedLen = 18
)

// Queue numbers of RDMAP (RFC 5040, section 3.1).
const (
	QNSend uint32 = iota
	QNReadRequest
	QNTerminate
)

const (
	ctrlTagged  = 0x80
	ctrlLast    = 0x40
	ctrlVersion = 0x03
	ddpVersion  = 1
)

// ErrShort reports a buffer that ends inside the header.
var ErrShort = errors.New("segment shorter than its header")

// IsTagged reports whether the DDP header that b starts with has T set.
func IsTagged(b []byte) bool { return b[0]&ctrlTagged != 0 }

// VersionOK reports whether the DDP version of the header is 1.
func VersionOK(b []byte) bool { return b[0]&ctrlVersion == ddpVersion }

// Tagged is the header of a tagged DDP segment (RFC 5041, section 4.2).
//
//	0        1        2                 6                       14
//	+--------+--------+-----------------+------------------------+
//	|T L - DV| RDMAP  |      STag       |           TO           |
//	+--------+--------+-----------------+------------------------+
type Tagged struct {
	Last bool
	ULP  byte // RsvdULP: RDMAP's version and opcode
	STag STag
	TO   uint64
}

// Put encodes h into b[:TaggedLen].
func (h Tagged) Put(b []byte) {
	b[0] = ctrlTagged | ddpVersion | bit[byte](h.Last, ctrlLast)
	b[1] = h.ULP
	be.PutUint32(b[2:], uint32(h.STag))
	be.PutUint64(b[6:], h.TO)
}

// ParseTagged decodes the tagged header that b starts with. The caller has checked T
// and DV. ParseTagged ignores the reserved bits.
func ParseTagged(b []byte) (h Tagged, err error) {
	if len(b) < TaggedLen {
		return h, ErrShort
	}
	return Tagged{
		Last: b[0]&ctrlLast != 0,
		ULP:  b[1],
		STag: STag(be.Uint32(b[2:])),
		TO:   be.Uint64(b[6:]),
	}, nil
}

// Untagged is the header of an untagged DDP segment (RFC 5041, section 4.3).
//
//	0        1        2                 6        10       14       18
//	+--------+--------+-----------------+--------+--------+--------+
//	|T L - DV| RDMAP  | Invalidate STag |   QN   |  MSN   |   MO   |
//	+--------+--------+-----------------+--------+--------+--------+
type Untagged struct {
	Last       bool
	ULP        byte
	Invalidate STag // the other four bytes of RsvdULP
	QN         uint32
	MSN        uint32
	MO         uint32
}

// Put encodes h into b[:UntaggedLen].
func (h Untagged) Put(b []byte) {
	b[0] = ddpVersion | bit[byte](h.Last, ctrlLast)
	b[1] = h.ULP
	be.PutUint32(b[2:], uint32(h.Invalidate))
	be.PutUint32(b[6:], h.QN)
	be.PutUint32(b[10:], h.MSN)
	be.PutUint32(b[14:], h.MO)
}

// ParseUntagged decodes the untagged header that b starts with, like ParseTagged.
func ParseUntagged(b []byte) (h Untagged, err error) {
	if len(b) < UntaggedLen {
		return h, ErrShort
	}
	return Untagged{
		Last:       b[0]&ctrlLast != 0,
		ULP:        b[1],
		Invalidate: STag(be.Uint32(b[2:])),
		QN:         be.Uint32(b[6:]),
		MSN:        be.Uint32(b[10:]),
		MO:         be.Uint32(b[14:]),
	}, nil
}
