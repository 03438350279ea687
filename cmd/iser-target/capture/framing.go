package capture

import "encoding/binary"

// MPA's startup frames and FPDUs (RFC 5044, sections 7.1.1 and 4.1).
const (
	startupLen  = 20   // without private data
	keyLen      = 16   // of the key, their first field
	markersFlag = 0x80 // of byte 16: the sender requires Markers in what it receives
)

var keys = [2]string{toTarget: "MPA ID Req Frame", toInitiator: "MPA ID Rep Frame"}

// A framing knows where the FPDUs of a stream begin, so that each gets packets of its own: if a
// Send of several FPDUs ends and another one begins in the same packet, Wireshark misses that
// beginning. A framing does not cut a stream that is not MPA or has Markers.
type framing struct {
	mpa     bool
	markers bool
	rest    uint64 // bytes up to the next FPDU
	half    bool   // only the first byte of an FPDU, high, has passed
	high    byte
}

// begin examines the first bytes of a stream and reports whether they ask for Markers in
// the other direction.
func (f *framing) begin(d direction, b []byte) (markers bool) {
	if len(b) < startupLen || string(b[:keyLen]) != keys[d] {
		return false
	}
	f.mpa, f.rest = true, startupLen+uint64(binary.BigEndian.Uint16(b[18:]))
	return b[keyLen]&markersFlag != 0
}

// resume continues after a gap, where an FPDU begins.
func (f *framing) resume() { f.rest, f.half = 0, false }

// next returns how many bytes of b, which is not empty, go into the next packet.
func (f *framing) next(b []byte) int {
	switch {
	case !f.mpa || f.markers:
		return len(b)
	case f.rest > 0:
	case f.half:
		f.half, f.rest = false, fpduLen(f.high, b[0])-1
	case len(b) == 1:
		f.half, f.high = true, b[0]
		return 1
	default:
		f.rest = fpduLen(b[0], b[1])
	}
	n := int(min(f.rest, uint64(len(b))))
	f.rest -= uint64(n)
	return n
}

// fpduLen returns the length of an FPDU that begins with these bytes: the ULPDU with its
// length field, padded to words of 4 bytes, and the CRC.
func fpduLen(high, low byte) uint64 {
	n := 2 + uint64(high)<<8 + uint64(low)
	return (n+3)&^3 + 4
}
