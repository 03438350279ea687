// Package wire encodes and decodes the parts of an iWARP stream: MPA startup frames
// and FPDUs (RFC 5044, RFC 6581), DDP segment headers (RFC 5041) and RDMAP headers
// (RFC 5040). It does no I/O and keeps no state.
package wire

import "encoding/binary"

var be = binary.BigEndian

// bit returns b if set, and 0 otherwise.
func bit[T byte | uint16](set bool, b T) T {
	if set {
		return b
	}
	return 0
}

// An STag names a tagged buffer (RFC 5041, section 4.2). A peer's STag is 32
// opaque bits; 0 is valid.
type STag uint32
