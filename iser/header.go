package iser

import (
	"encoding/binary"
	"fmt"

	"github.com/iser-target/iser-target/rdma/wire"
)

// HeaderLen is the size in bytes of the iSER header before every PDU (RFC 7145, section 9.2). The
// 12-byte header of RFC 5046 is not supported; no initiator is known to send it.
const HeaderLen = 28

// Messages of the iSER header (RFC 7145, section 9.1).
const (
	msgControl    = 1
	msgHello      = 2
	msgHelloReply = 3

	flagWSV = 0x08
	flagRSV = 0x04
	flagREJ = 0x01

	// protocolVersion is the version of sections 9.3 and 9.4. The figures of
	// appendix B show version 1, so a Hello may offer that, too.
	protocolVersion    = 10
	protocolVersionOld = 1
)

// A Remote names memory that the initiator has advertised.
type Remote struct {
	Valid bool
	STag  wire.STag // any value, also 0
	Base  uint64    // Base Offset: a tagged offset, often a kernel address
}

// check returns an error if r cannot be the source or sink of n bytes: their tagged
// offsets must not exceed 2^64.
func (r *Remote) check(n uint32) error {
	switch {
	case n == 0:
		return nil
	case !r.Valid:
		return fmt.Errorf("no STag for %d bytes", n)
	case r.Base+uint64(n-1) < r.Base:
		return fmt.Errorf("%d bytes from Base Offset %#x exceed 2^64", n, r.Base)
	}
	return nil
}

// Header is the iSER header of a control-type PDU (RFC 7145, section 9.2).
//
//	0          4            8                    16           20                    28
//	+----------+------------+--------------------+------------+---------------------+
//	|1|WR-| 0  | Write STag | Write Base Offset  | Read STag  | Read Base Offset    |
//	+----------+------------+--------------------+------------+---------------------+
//
// Write is the source of RDMA Reads by the target, Read the sink of its RDMA Writes.
type Header struct{ Write, Read Remote }

// Put encodes h into b[:HeaderLen].
func (h Header) Put(b []byte) {
	clear(b[:HeaderLen])
	b[0] = msgControl << 4
	if h.Write.Valid {
		b[0] |= flagWSV
		h.Write.put(b[4:])
	}
	if h.Read.Valid {
		b[0] |= flagRSV
		h.Read.put(b[16:])
	}
}

func (r Remote) put(b []byte) {
	binary.BigEndian.PutUint32(b, uint32(r.STag))
	binary.BigEndian.PutUint64(b[4:], r.Base)
}

func (r *Remote) parse(b []byte) {
	*r = Remote{true, wire.STag(binary.BigEndian.Uint32(b)), binary.BigEndian.Uint64(b[4:])}
}

// ParseHeader decodes the header that the message b starts with. hello says that b is
// a Hello instead, and h is not valid. ParseHeader ignores reserved bits and the fields
// of an STag that is not valid.
func ParseHeader(b []byte) (h Header, hello bool, err error) {
	if len(b) < HeaderLen {
		return h, false, fmt.Errorf("iSER message of %d bytes", len(b))
	}
	switch msg := b[0] >> 4; msg {
	case msgControl:
	case msgHello:
		if len(b) != HeaderLen {
			return h, false, fmt.Errorf("iSER Hello of %d bytes", len(b))
		}
		return h, true, nil
	default:
		return h, false, fmt.Errorf("iSER message with opcode %d", msg)
	}
	if b[0]&flagWSV != 0 {
		h.Write.parse(b[4:])
	}
	if b[0]&flagRSV != 0 {
		h.Read.parse(b[16:])
	}
	return h, false, nil
}

// Hello is the iSER Hello Message (RFC 7145, section 9.3).
type Hello struct {
	MaxVer, MinVer uint8
	IRD            uint16 // iSER-IRD: RDMA Reads that the initiator accepts
}

// Put encodes h into b[:HeaderLen].
func (h Hello) Put(b []byte) {
	clear(b[:HeaderLen])
	b[0], b[1] = msgHello<<4, h.MaxVer<<4|h.MinVer
	binary.BigEndian.PutUint16(b[2:], h.IRD)
}

func parseHello(b []byte) Hello {
	return Hello{b[1] >> 4, b[1] & 0x0f, binary.BigEndian.Uint16(b[2:])}
}

// speaks reports whether the versions of a Hello include one of ours.
func (h Hello) speaks() bool {
	within := func(v uint8) bool { return h.MinVer <= v && v <= h.MaxVer }
	return within(protocolVersion) || within(protocolVersionOld)
}

// HelloReply is the iSER HelloReply Message (RFC 7145, section 9.4).
type HelloReply struct {
	Reject         bool
	MaxVer, CurVer uint8
	ORD            uint16 // iSER-ORD: RDMA Reads that the target uses
}

// Put encodes r into b[:HeaderLen].
func (r HelloReply) Put(b []byte) {
	clear(b[:HeaderLen])
	b[0], b[1] = msgHelloReply<<4, r.MaxVer<<4|r.CurVer
	if r.Reject {
		b[0] |= flagREJ
	}
	binary.BigEndian.PutUint16(b[2:], r.ORD)
}

// The private data of the MPA frames of Linux: one byte of flags and three of zeros.
// Each end sets the flags of what it cannot do.
const (
	cmLen          = 4
	cmNoZBVA       = 0x80 // no zero-based virtual addresses: Base Offsets count
	cmNoInvalidate = 0x40 // no Send with Invalidate
)
