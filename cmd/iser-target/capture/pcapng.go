package capture

import (
	"encoding/binary"
	"io"
)

// A file in the format of draft-ietf-opsawg-pcapng: a section header, one interface
// whose packets are IP, enhanced packets, and interface statistics at the end. All
// numbers are little-endian.
type file struct {
	w    io.Writer
	size int64  // octets, those in buf included
	buf  []byte // not written yet
	err  error  // of w
}

// Types of blocks.
const (
	sectionHeader       = 0x0a0d0d0a
	interfaceBlock      = 1
	interfaceStatistics = 5
	enhancedPacket      = 6
)

// Codes of options.
const (
	optEnd           = 0
	optComment       = 1
	shbUserAppl      = 4
	ifName           = 2
	ifDescription    = 3
	ifTSResol        = 9
	epbFlags         = 2
	isbStartTime     = 2
	isbEndTime       = 3
	isbReceived      = 4
	isbDropped       = 5
	byteOrderMagic   = 0x1a2b3c4d
	linkTypeRaw      = 101 // IPv4 or IPv6, by its version
	nanoseconds      = 9   // of ifTSResol: 10^-9 s
	inbound          = 1   // of epbFlags
	outbound         = 2
	packetHeaderLen  = 8 + 20 // block header and what is before the octets
	packetOptionsLen = 8 + 4  // flags, end of options
	blockTrailerLen  = 4
	// flushLen is from how many octets on the buffer is written.
	flushLen = 256 << 10
)

var le = binary.LittleEndian

// block appends a block whose body is what body appends.
func (f *file) block(kind uint32, body func(b []byte) []byte) {
	start := len(f.buf)
	f.buf = le.AppendUint32(f.buf, kind)
	f.buf = le.AppendUint32(f.buf, 0)
	f.buf = body(f.buf)
	n := len(f.buf) - start + blockTrailerLen
	le.PutUint32(f.buf[start+4:], uint32(n))
	f.buf = le.AppendUint32(f.buf, uint32(n))
	f.size += int64(n)
	if len(f.buf) >= flushLen {
		f.flush()
	}
}

// flush writes what there is.
func (f *file) flush() {
	if f.err == nil && len(f.buf) > 0 {
		_, f.err = f.w.Write(f.buf)
	}
	f.buf = f.buf[:0]
}

// option appends an option of at most 65535 octets.
func option[T []byte | string](b []byte, code uint16, value T) []byte {
	b = le.AppendUint16(b, code)
	b = le.AppendUint16(b, uint16(len(value)))
	b = append(b, value...)
	return pad(b, len(value))
}

func endOptions(b []byte) []byte { return le.AppendUint32(b, optEnd) }

// pad makes n octets a multiple of four.
func pad(b []byte, n int) []byte { return append(b, "\x00\x00\x00"[:-n&3]...) }

// timestamp appends a time in the two halves of the format.
func timestamp(b []byte, ns int64) []byte {
	b = le.AppendUint32(b, uint32(uint64(ns)>>32))
	return le.AppendUint32(b, uint32(ns))
}

// header begins the file.
func (f *file) header(application, name, description string) {
	f.block(sectionHeader, func(b []byte) []byte {
		b = le.AppendUint32(b, byteOrderMagic)
		b = le.AppendUint16(b, 1) // version 1.0
		b = le.AppendUint16(b, 0)
		b = le.AppendUint64(b, 1<<64-1) // length of the section: not known
		b = option(b, shbUserAppl, application)
		return endOptions(b)
	})
	f.block(interfaceBlock, func(b []byte) []byte {
		b = le.AppendUint16(b, linkTypeRaw)
		b = le.AppendUint16(b, 0)
		b = le.AppendUint32(b, 0) // packets are as long as they are
		b = option(b, ifName, name)
		b = option(b, ifDescription, description)
		b = option(b, ifTSResol, []byte{nanoseconds})
		return endOptions(b)
	})
}

// packetLen is how long the block of a packet of n octets is.
func packetLen(n, comment int) int64 {
	l := packetHeaderLen + n + -n&3 + packetOptionsLen + blockTrailerLen
	if comment > 0 {
		l += 4 + comment + -comment&3
	}
	return int64(l)
}

// packet appends a packet. Its octets are header and payload; comment may be empty.
func (f *file) packet(ns int64, d direction, header, payload []byte, comment string) {
	f.block(enhancedPacket, func(b []byte) []byte {
		n := len(header) + len(payload)
		b = le.AppendUint32(b, 0) // interface
		b = timestamp(b, ns)
		b = le.AppendUint32(b, uint32(n))
		b = le.AppendUint32(b, uint32(n))
		b = append(b, header...)
		b = append(b, payload...)
		b = pad(b, n)
		if comment != "" {
			b = option(b, optComment, comment)
		}
		flags := uint32(inbound)
		if d == toInitiator {
			flags = outbound
		}
		b = option(b, epbFlags, le.AppendUint32(nil, flags))
		return endOptions(b)
	})
}

// statistics end the file.
func (f *file) statistics(start, end int64, packets, dropped uint64, comment string) {
	f.block(interfaceStatistics, func(b []byte) []byte {
		b = le.AppendUint32(b, 0) // interface
		b = timestamp(b, end)
		b = option(b, optComment, comment)
		b = option(b, isbStartTime, timestamp(nil, start))
		b = option(b, isbEndTime, timestamp(nil, end))
		b = option(b, isbReceived, le.AppendUint64(nil, packets))
		b = option(b, isbDropped, le.AppendUint64(nil, dropped))
		return endOptions(b)
	})
}
