// Package oncrpc encodes and decodes XDR (RFC 4506) and the headers of ONC RPC messages (RFC 5531).
//
// It knows which data items a transport may move out of a message: Encoder.Item and Decoder.Item
// mark them (RFC 8166, section 3.4.2, calls them DDP-eligible). It does no I/O, never copies what it
// decodes, and allocates nothing once its buffers have grown.
package oncrpc

import "encoding/binary"

var be = binary.BigEndian

// Pad returns the number of zero bytes after opaque data of n bytes (RFC 4506, section 3).
func Pad(n int) int { return -n & 3 }
