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

// reasonText holds the meaning of every Reason that an RFC defines.
var reasonText = map[Reason]string{}

// reason returns a Reason after it has noted what it means.
func reason(layer, etype, code uint8, text string) Reason {
	r := Reason{layer, etype, code}
	reasonText[r] = text
	return r
}

// The Reasons of RFC 5040 Figure 9, RFC 5041 section 7.2, RFC 5044 section 8 and RFC
// 6581 section 8.
var (
	ReasonLocalCatastrophic = reason(0, 0, 0x00, "RDMAP: local catastrophic error")
	ReasonReadInvalidSTag   = reason(0, 1, 0x00, "RDMAP: invalid STag")
	ReasonReadBounds        = reason(0, 1, 0x01, "RDMAP: base or bounds violation")
	ReasonReadAccess        = reason(0, 1, 0x02, "RDMAP: access rights violation")
	ReasonReadStream        = reason(0, 1, 0x03, "RDMAP: STag not associated with the stream")
	ReasonReadWrap          = reason(0, 1, 0x04, "RDMAP: TO wrap")
	ReasonNotInvalidated    = reason(0, 1, 0x09, "RDMAP: STag cannot be invalidated")
	ReasonProtection        = reason(0, 1, 0xff, "RDMAP: unspecified protection error")
	ReasonRDMAPVersion      = reason(0, 2, 0x05, "RDMAP: invalid version")
	ReasonOpcode            = reason(0, 2, 0x06, "RDMAP: unexpected opcode")
	ReasonCatastrophic      = reason(0, 2, 0x07, "RDMAP: catastrophic error of the stream")
	ReasonGlobal            = reason(0, 2, 0x08, "RDMAP: catastrophic global error")
	ReasonNotInvalidatedOp  = reason(0, 2, 0x09, "RDMAP: STag cannot be invalidated (operation)")
	ReasonOperation         = reason(0, 2, 0xff, "RDMAP: unspecified operation error")

	ReasonDDPCatastrophic = reason(1, 0, 0x00, "DDP: local catastrophic error")
	ReasonInvalidSTag     = reason(1, 1, 0x00, "DDP: invalid STag")
	ReasonBounds          = reason(1, 1, 0x01, "DDP: base or bounds violation")
	ReasonStream          = reason(1, 1, 0x02, "DDP: STag not associated with the stream")
	ReasonWrap            = reason(1, 1, 0x03, "DDP: TO wrap")
	ReasonTaggedVersion   = reason(1, 1, 0x04, "DDP: invalid version in a tagged segment")
	ReasonQN              = reason(1, 2, 0x01, "DDP: invalid queue number")
	ReasonNoBuffer        = reason(1, 2, 0x02, "DDP: no buffer for this MSN")
	ReasonMSN             = reason(1, 2, 0x03, "DDP: MSN out of range")
	ReasonMO              = reason(1, 2, 0x04, "DDP: invalid MO")
	ReasonTooLong         = reason(1, 2, 0x05, "DDP: message too long for its buffer")
	ReasonUntaggedVersion = reason(1, 2, 0x06, "DDP: invalid version in an untagged segment")

	ReasonClosed          = reason(2, 0, 0x01, "MPA: connection lost")
	ReasonCRC             = reason(2, 0, 0x02, "MPA: CRC mismatch")
	ReasonMarker          = reason(2, 0, 0x03, "MPA: Marker and ULPDU_Length disagree")
	ReasonStartup         = reason(2, 0, 0x04, "MPA: bad startup frame")
	ReasonMPACatastrophic = reason(2, 0, 0x05, "MPA: local catastrophic error")
	ReasonIRD             = reason(2, 0, 0x06, "MPA: insufficient IRD")
	ReasonRTR             = reason(2, 0, 0x07, "MPA: no matching RTR")
)

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
	if s := r.Text(); s != "" {
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
	ct := bit[byte](t.DDP != nil, hdrctLength|hdrctDDP) | bit[byte](t.ReadRequest != nil, hdrctRDMAP)
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
		t.Segment, rest = be.Uint16(rest), rest[2:]
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

// known reports whether r is a Reason that a peer may mean.
func known(r Reason) bool {
	_, ok := r.Canonical()
	return ok && (r.Layer != LayerLLP || r.EType == 0 || r.EType == 3)
}
