// Package wire encodes and decodes what RPC-over-RDMA version 1 adds to RPC messages: the transport
// header with its chunk lists (RFC 8166, section 4), and the private data that peers exchange when
// they connect (RFC 8797). It does no I/O and keeps no state.
package wire

import "encoding/binary"

var be = binary.BigEndian
