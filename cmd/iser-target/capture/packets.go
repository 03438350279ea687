package capture

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"net/netip"
)

const (
	// maxSegment is how many octets of a stream a packet has at most: what fits into an
	// IPv4 packet, whose length is of 16 bits.
	maxSegment = 63 << 10
	// maxGap is how far a sequence number jumps at most. It has 32 bits, and what is
	// more than half of them ahead would be taken for a repetition.
	maxGap = 1 << 30
	// markerGrid is the distance of MPA's Markers (RFC 5044, section 4.3), to which
	// maxGap is true.
	markerGrid = 512

	windowScale = 14 // RFC 7323, section 2.3: nobody is ever out of window
	window      = 1<<16 - 1
)

// Flags of a TCP header (RFC 9293, section 3.1).
const (
	fin = 1 << iota
	syn
	rst
	psh
	ack
)

// A flow is a connection in a file: a TCP connection that begins with a handshake which
// nobody has seen, but which is understood.
type flow struct {
	initiator, target netip.AddrPort
	open              bool // the handshake has been written
	streams           [2]stream
	id                uint16 // of the next IPv4 packet
}

// A stream is one direction of a flow.
type stream struct {
	pos   uint64 // octets up to here
	seq   uint32 // the sequence number of the next one
	live  bool   // what was captured has begun
	ended bool
	framing
}

// newFlow returns the flow of that number. The sequence numbers differ from flow to
// flow, so that a port that is used again makes no repetition.
func newFlow(number uint32, initiator, target netip.AddrPort) *flow {
	f := &flow{initiator: initiator, target: target}
	for d := range f.streams {
		f.streams[d].seq = (2*number + uint32(d)) * 0x9e3779b1
	}
	return f
}

// skip goes on at pos, and returns how many octets are missing before.
func (s *stream) skip(pos uint64) (gap uint64) {
	gap = pos - s.pos
	jump := gap
	if jump > maxGap {
		jump = maxGap + gap%markerGrid
	}
	s.pos, s.seq = pos, s.seq+uint32(jump)
	return gap
}

// header appends the IP and TCP headers of a packet of f, whose payload follows.
func (f *flow) header(b []byte, d direction, flags byte, payload []byte) []byte {
	from, to := f.initiator, f.target
	if d == toInitiator {
		from, to = to, from
	}
	var options []byte
	if flags&syn != 0 {
		options = []byte{3, 3, windowScale, 1} // Window Scale, No-Operation
	}
	n := tcpHeaderLen + len(options) + len(payload)
	src, dst := from.Addr().AsSlice(), to.Addr().AsSlice()
	sum := uint64(protocolTCP + n) // of the pseudo header
	sum = add(add(sum, src), dst)
	if from.Addr().Is4() {
		start := len(b)
		b = append(b, 4<<4|ipv4HeaderLen/4, 0) // version, header length; DSCP
		b = binary.BigEndian.AppendUint16(b, uint16(ipv4HeaderLen+n))
		b = binary.BigEndian.AppendUint16(b, f.id)
		b = append(b, 1<<6, 0, hops, protocolTCP, 0, 0) // Don't Fragment
		b = append(append(b, src...), dst...)
		binary.BigEndian.PutUint16(b[start+10:], checksum(add(0, b[start:])))
		f.id++
	} else {
		b = append(b, 6<<4, 0, 0, 0) // version, traffic class, flow label
		b = binary.BigEndian.AppendUint16(b, uint16(n))
		b = append(b, protocolTCP, hops)
		b = append(append(b, src...), dst...)
	}
	start := len(b)
	b = binary.BigEndian.AppendUint16(b, from.Port())
	b = binary.BigEndian.AppendUint16(b, to.Port())
	b = binary.BigEndian.AppendUint32(b, f.streams[d].seq)
	acked := uint32(0)
	if flags&ack != 0 {
		acked = f.streams[d.other()].seq
	}
	b = binary.BigEndian.AppendUint32(b, acked)
	b = append(b, byte(tcpHeaderLen+len(options))/4<<4, flags)
	b = binary.BigEndian.AppendUint16(b, window)
	b = append(b, 0, 0, 0, 0) // checksum, urgent pointer
	b = append(b, options...)
	binary.BigEndian.PutUint16(b[start+16:], checksum(add(add(sum, b[start:]), payload)))
	return b
}

const (
	protocolTCP   = 6
	ipv4HeaderLen = 20
	ipv6HeaderLen = 40
	tcpHeaderLen  = 20
	hops          = 64
)

// add adds b, in which only the end may have an odd length, to an Internet checksum
// (RFC 1071). The sum of 64 bits is folded by checksum.
func add(sum uint64, b []byte) uint64 {
	var carry uint64
	for ; len(b) >= 8; b = b[8:] {
		sum, carry = bits.Add64(sum, binary.BigEndian.Uint64(b), carry)
	}
	var last [8]byte
	copy(last[:], b)
	sum, carry = bits.Add64(sum, binary.BigEndian.Uint64(last[:]), carry)
	return sum + carry
}

func checksum(sum uint64) uint16 {
	for sum>>16 != 0 {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// packets writes a record as packets. It returns false if they would be more than most
// octets of file.
func (k *Capture) packets(r *record, octets []byte) bool {
	f := k.flows[r.flow]
	if f == nil {
		return true
	}
	if !f.open {
		f.open = true
		for _, h := range []struct {
			d     direction
			flags byte
		}{{toTarget, syn}, {toInitiator, syn | ack}, {toTarget, ack}} {
			if !k.packet(f, h.d, h.flags, r.time, nil, "") {
				return false
			}
			if h.flags&syn != 0 {
				f.streams[h.d].seq++
			}
		}
	}
	s := &f.streams[r.dir]
	if r.kind == end {
		if s.ended {
			return true
		}
		s.ended = true
		if !k.packet(f, r.dir, fin|ack, r.time, nil, "") {
			return false
		}
		s.seq++
		return true
	}
	if r.pos == 0 && s.begin(r.dir, octets) {
		f.streams[r.dir.other()].markers = true
	}
	comment := ""
	if gap := s.skip(r.pos); gap > 0 {
		s.resume()
		if s.live {
			comment = fmt.Sprintf("%d octets before this are lost: the capture was not read fast enough", gap)
			k.lostOctets += gap
		} else {
			comment = fmt.Sprintf("the capture of this direction begins here; %d octets before it had passed", gap)
		}
	}
	s.live = s.live || r.kind == data
	for len(octets) > 0 {
		n := s.next(octets[:min(len(octets), maxSegment)])
		if !k.packet(f, r.dir, psh|ack, r.time, octets[:n], comment) {
			return false
		}
		k.sum.Octets += uint64(n)
		s.pos, s.seq = s.pos+uint64(n), s.seq+uint32(n)
		octets, comment = octets[n:], ""
	}
	return true
}

// packet writes one packet, if there is room for it.
func (k *Capture) packet(f *flow, d direction, flags byte, time int64, payload []byte, comment string) bool {
	k.header = f.header(k.header[:0], d, flags, payload)
	if k.file.size+packetLen(len(k.header)+len(payload), len(comment))+statisticsLen > k.max {
		return false
	}
	k.file.packet(time, d, k.header, payload, comment)
	k.sum.Packets++
	return true
}
