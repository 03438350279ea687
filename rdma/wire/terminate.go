package wire

import (
	"errors"
	"fmt"
)

// Layers of a Terminate (RFC 5040, section 4.8).
const (
	LayerRDMAP = 0
	LayerDDP   = 1
	LayerLLP   = 2
)

// A Reason is why a stream ended: the layer that saw the error, the type and the code
// (RFC 5040, section 4.8, Figure 9). Reasons are comparable.
type Reason struct{ Layer, EType, Code uint8 }

// The Reasons of RFC 5040 Figure 9, RFC 5041 section 7.2, RFC 5044 section 8 and RFC
// 6581 section 8.
var (
	ReasonLocalCatastrophic = Reason{0, 0, 0x00}
	ReasonReadInvalidSTag   = Reason{0, 1, 0x00}
	ReasonReadBounds        = Reason{0, 1, 0x01}
	ReasonReadAccess        = Reason{0, 1, 0x02}
	ReasonReadStream        = Reason{0, 1, 0x03}
	ReasonReadWrap          = Reason{0, 1, 0x04}
	ReasonNotInvalidated    = Reason{0, 1, 0x09}
	ReasonProtection        = Reason{0, 1, 0xff}
	ReasonRDMAPVersion      = Reason{0, 2, 0x05}
	ReasonOpcode            = Reason{0, 2, 0x06}
	ReasonCatastrophic      = Reason{0, 2, 0x07}
	ReasonGlobal            = Reason{0, 2, 0x08}
	ReasonNotInvalidatedOp  = Reason{0, 2, 0x09}
	ReasonOperation         = Reason{0, 2, 0xff}

	ReasonDDPCatastrophic = Reason{1, 0, 0x00}
	ReasonInvalidSTag     = Reason{1, 1, 0x00}
	ReasonBounds          = Reason{1, 1, 0x01}
	ReasonStream          = Reason{1, 1, 0x02}
	ReasonWrap            = Reason{1, 1, 0x03}
	ReasonTaggedVersion   = Reason{1, 1, 0x04}
	ReasonQN              = Reason{1, 2, 0x01}
	ReasonNoBuffer        = Reason{1, 2, 0x02}
	ReasonMSN             = Reason{1, 2, 0x03}
	ReasonMO              = Reason{1, 2, 0x04}
	ReasonTooLong         = Reason{1, 2, 0x05}
	ReasonUntaggedVersion = Reason{1, 2, 0x06}

	ReasonClosed          = Reason{2, 0, 0x01}
	ReasonCRC             = Reason{2, 0, 0x02}
	ReasonMarker          = Reason{2, 0, 0x03}
	ReasonStartup         = Reason{2, 0, 0x04}
	ReasonMPACatastrophic = Reason{2, 0, 0x05}
	ReasonIRD             = Reason{2, 0, 0x06}
	ReasonRTR             = Reason{2, 0, 0x07}
)

var reasonText = map[Reason]string{
	ReasonLocalCatastrophic: "RDMAP: local catastrophic error",
	ReasonReadInvalidSTag:   "RDMAP: invalid STag",
	ReasonReadBounds:        "RDMAP: base or bounds violation",
	ReasonReadAccess:        "RDMAP: access rights violation",
	ReasonReadStream:        "RDMAP: STag not associated with the stream",
	ReasonReadWrap:          "RDMAP: TO wrap",
	ReasonNotInvalidated:    "RDMAP: STag cannot be invalidated",
	ReasonProtection:        "RDMAP: unspecified protection error",
	ReasonRDMAPVersion:      "RDMAP: invalid version",
	ReasonOpcode:            "RDMAP: unexpected opcode",
	ReasonCatastrophic:      "RDMAP: catastrophic error of the stream",
	ReasonGlobal:            "RDMAP: catastrophic global error",
	ReasonNotInvalidatedOp:  "RDMAP: STag cannot be invalidated (operation)",
	ReasonOperation:         "RDMAP: unspecified operation error",
	ReasonDDPCatastrophic:   "DDP: local catastrophic error",
	ReasonInvalidSTag:       "DDP: invalid STag",
	ReasonBounds:            "DDP: base or bounds violation",
	ReasonStream:            "DDP: STag not associated with the stream",
	ReasonWrap:              "DDP: TO wrap",
	ReasonTaggedVersion:     "DDP: invalid version in a tagged segment",
	ReasonQN:                "DDP: invalid queue number",
	ReasonNoBuffer:          "DDP: no buffer for this MSN",
	ReasonMSN:               "DDP: MSN out of range",
	ReasonMO:                "DDP: invalid MO",
	ReasonTooLong:           "DDP: message too long for its buffer",
	ReasonUntaggedVersion:   "DDP: invalid version in an untagged segment",
	ReasonClosed:            "MPA: connection lost",
	ReasonCRC:               "MPA: CRC mismatch",
	ReasonMarker:            "MPA: Marker and ULPDU_Length disagree",
	ReasonStartup:           "MPA: bad startup frame",
	ReasonMPACatastrophic:   "MPA: local catastrophic error",
	ReasonIRD:               "MPA: insufficient IRD",
	ReasonRTR:               "MPA: no matching RTR",
}

// Canonical returns the Reason above that r means. known is false if no RFC defines r.
func (r Reason) Canonical() (k Reason, known bool) {
	k = r
	switch {
	case r.Layer == LayerRDMAP && r.EType == 0:
		k.Code = 0 // it has no codes
	case r.Layer == LayerLLP:
		k.EType = 0 // some adapters say 3
	}
	_, known = reasonText[k]
	return k, known
}

// Text returns the meaning of r, or "" if no RFC defines r.
func (r Reason) Text() string {
	k, _ := r.Canonical()
	return reasonText[k]
}

// String returns the meaning of r, or its numbers if no RFC defines r.
func (r Reason) String() string {
	k, _ := r.Canonical()
	if s, ok := reasonText[k]; ok {
		return fmt.Sprintf("%s (%d/%d/%02x)", s, r.Layer, r.EType, r.Code)
	}
	return fmt.Sprintf("unknown reason %d/%d/%02x", r.Layer, r.EType, r.Code)
}

// MaxTerminateLen is the size of the largest Terminate header in bytes.
const MaxTerminateLen = 4 + 2 + UntaggedLen + ReadRequestLen

const (
	hdrctLength = 0x80 // M
	hdrctDDP    = 0x40 // D
	hdrctRDMAP  = 0x20 // R
)

// A Terminate is the header of a Terminate message (RFC 5040, section 4.8).
//
//	0       1      2       4                    6             20 or 24
//	+-------+------+-------+--------------------+-------------+---------------+
//	|Lay|ETy| Code |MDR -  | DDP Segment Length | DDP header  | Read Request  |
//	+-------+------+-------+--------------------+-------------+---------------+
type Terminate struct {
	Reason Reason
	// Segment is the length in bytes of the refused DDP segment, including its
	// header. DDP is that header, or nil.
	Segment uint16
	DDP     []byte // 14 or 18 bytes
	// ReadRequest is the header of the refused RDMA Read Request, or nil.
	ReadRequest []byte // 28 bytes
	// Swapped says that the header came in the bit order of siw on little-endian
	// machines, which differs from the RFC.
	Swapped bool
}

// Append appends t to b.
func (t *Terminate) Append(b []byte) []byte {
	var ct byte
	if t.DDP != nil {
		ct |= hdrctLength | hdrctDDP
	}
	if t.ReadRequest != nil {
		ct |= hdrctRDMAP
	}
	b = append(b, t.Reason.Layer<<4|t.Reason.EType, t.Reason.Code, ct, 0)
	if t.DDP != nil {
		b = be.AppendUint16(b, t.Segment)
		b = append(b, t.DDP...)
	}
	return append(b, t.ReadRequest...)
}

// ErrTerminate reports a truncated Terminate header.
var ErrTerminate = errors.New("truncated Terminate header")

// ParseTerminate decodes b, the whole message. It ignores the bytes after those that
// HdrCt announces. t keeps slices of b.
//
// siw fills the header through bit-fields, so on little-endian machines the nibbles of
// the first byte and the bits of HdrCt come mirrored. ParseTerminate reads the RFC's
// order unless only the mirrored one is valid.
func ParseTerminate(b []byte) (t Terminate, err error) {
	if len(b) < 4 {
		return t, ErrTerminate
	}
	r := Reason{b[0] >> 4, b[0] & 0x0f, b[1]}
	ct := b[2]
	swapped := Reason{r.EType, r.Layer, r.Code}
	if ct&0x07 != 0 && ct&0xe0 == 0 && len(b) > 4 || !known(r) && known(swapped) {
		t.Swapped = true
		r = swapped
		ct = ct&1<<7 | ct&2<<5 | ct&4<<3
	}
	t.Reason = r
	rest := b[4:]
	if ct&(hdrctLength|hdrctDDP) != 0 {
		if len(rest) < 2 {
			return t, ErrTerminate
		}
		t.Segment = be.Uint16(rest)
		rest = rest[2:]
	}
	if ct&hdrctDDP != 0 {
		n := UntaggedLen
		if len(rest) > 0 && IsTagged(rest) {
			n = TaggedLen
		}
		if len(rest) < n {
			return t, ErrTerminate
		}
		t.DDP, rest = rest[:n], rest[n:]
	}
	if ct&hdrctRDMAP != 0 {
		if len(rest) < ReadRequestLen {
			return t, ErrTerminate
		}
		t.ReadRequest = rest[:ReadRequestLen]
	}
	return t, nil
}

func known(r Reason) bool {
	if r.Layer == LayerLLP && r.EType == 3 {
		r.EType = 0
	}
	if r.Layer == LayerRDMAP && r.EType == 0 {
		r.Code = 0
	}
	_, ok := reasonText[r]
	return ok
}
