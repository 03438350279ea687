package capture

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"net/netip"
)

const (
	// maxSegment bounds the bytes of a stream in one packet: the length of an IPv4 packet
	// has 16 bits.
	maxSegment = 63 << 10
	// maxGap bounds the jump of a sequence number. It has 32 bits, and Wireshark takes a
	// number that is more than half of that range ahead for a retransmission.
	maxGap = 1 << 30
	// markerGrid is the distance of MPA's Markers (RFC 5044, section 4.3). maxGap is a
	// multiple of it.
	markerGrid = 512

	windowScale = 14 // RFC 7323, section 2.3: no segment is ever out of window
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

// A flow is a TCP connection in a file. It begins with an invented handshake, so that
// Wireshark follows its streams.
type flow struct {
	initiator, target netip.AddrPort
	open              bool // the handshake has been written
	streams           [2]stream
	id                uint16 // of the next IPv4 packet
	talk              talk
	steps             bool // a login over TCP continues as iSER
}

// A stream is one direction of a flow.
type stream struct {
	pos   uint64 // of the next byte
	seq   uint32 // its sequence number
	live  bool   // a byte after the head was written
	ended bool
	framing
	unit piece // of a filter
}

// newFlow returns the flow with that number. The sequence numbers differ from flow to
// flow, so that Wireshark does not take a reused port for a retransmission.
func newFlow(number uint32, initiator, target netip.AddrPort) *flow {
	f := &flow{initiator: initiator, target: target}
	for d := range f.streams {
		f.streams[d].seq = (2*number + uint32(d)) * 0x9e3779b1
	}
	return f
}

// skip continues the stream at pos and returns how many bytes before it are missing.
func (s *stream) skip(pos uint64) (gap uint64) {
	gap = pos - s.pos
	jump := gap
	if jump > maxGap {
		jump = maxGap + gap%markerGrid
	}
	s.pos, s.seq = pos, s.seq+uint32(jump)
	return gap
}

// header appends the IP and TCP headers of a packet of f that begins with that payload, of a segment. Package layers
// could do it, but its checksum of two bytes a step would halve the speed of a capture.
func (f *flow) header(b []byte, d direction, flags byte, payload []byte, segment int) []byte {
	from, to := f.initiator, f.target
	if d == toInitiator {
		from, to = to, from
	}
	var options []byte
	if flags&syn != 0 {
		options = []byte{3, 3, windowScale, 1} // Window Scale, No-Operation
	}
	n := tcpHeaderLen + len(options) + segment
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

// add adds b to an Internet checksum (RFC 1071), eight bytes a step. Only the last b of a
// sum may have an odd length. checksum folds the result.
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

// packets writes a record as packets. It returns false if the file would exceed its limit.
func (k *Capture) packets(r *record, payload []byte) bool {
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
	if r.pos == 0 && s.begin(r.dir, payload) {
		f.streams[r.dir.other()].markers = true
	}
	comment := ""
	if gap := s.skip(r.pos); gap > 0 {
		s.resume()
		if s.live {
			comment = fmt.Sprintf("%d bytes before this packet are lost: the capture was not read fast enough", gap)
			k.lostBytes += gap
		} else {
			comment = fmt.Sprintf("the capture of this direction begins here; %d bytes passed before", gap)
		}
	}
	s.live = s.live || r.kind == data
	if k.filter.cuts() {
		return k.cut(f, r, payload, comment)
	}
	for len(payload) > 0 {
		n := s.next(payload[:min(len(payload), maxSegment)])
		if !k.packet(f, r.dir, psh|ack, r.time, payload[:n], comment) {
			return false
		}
		k.sum.Octets += uint64(n)
		s.pos, s.seq = s.pos+uint64(n), s.seq+uint32(n)
		payload, comment = payload[n:], ""
	}
	return true
}

// packet writes one packet and returns true, or returns false if the file has no room.
func (k *Capture) packet(f *flow, d direction, flags byte, time int64, payload []byte, comment string) bool {
	return k.truncated(f, d, flags, time, payload, len(payload), comment)
}

// truncated writes a packet like packet, of a segment that begins with the payload.
func (k *Capture) truncated(f *flow, d direction, flags byte, time int64, payload []byte, segment int, comment string) bool {
	k.buf = append(f.header(k.buf[:0], d, flags, payload, segment), payload...)
	if k.file.size()+packetLen(len(k.buf), len(comment))+statisticsLen > k.max {
		return false
	}
	k.file.packet(time, d, k.buf, segment-len(payload), comment)
	k.sum.Packets++
	return true
}
