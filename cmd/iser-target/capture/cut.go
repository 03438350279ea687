package capture

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/iser-target/iser-target/rdma/crc32c"
)

// A Filter selects what of a session goes into the file. The zero Filter selects everything.
type Filter struct {
	// Snap is the most bytes of a packet that the file has, with the headers of IP and TCP; 0: all.
	Snap int
	// Headers leaves out the data: the file has each PDU and FPDU up to the end of its headers, but Sends, text and sense data as a whole.
	Headers bool
	// LUN is the only LUN whose commands, with their data and responses, are in the file, and what belongs to no LUN; nil: all.
	LUN *uint16
}

// MinSnap and MaxSnap bound Filter.Snap, in bytes. At least, the file has all headers of a PDU.
const (
	MinSnap = 192
	MaxSnap = 4 << 10
)

func (f *Filter) cuts() bool { return f.Snap > 0 || f.Headers || f.LUN != nil }

// Select makes Run write only what f selects. It must be called before Run.
func (k *Capture) Select(f Filter) { k.filter = f }

// A protocol is what a stream carries.
type protocol uint8

const (
	unknown protocol = iota // its first bytes have not come
	mpaStream
	iscsiStream
	opaque // not cut into units: with Markers, or its beginning is not known
)

// Lengths of headers in bytes, and fields of them.
const (
	bhsLen      = 48       // RFC 7143, section 11.2.1
	taggedLen   = 2 + 14   // of an FPDU with a tagged DDP segment, up to its data (RFC 5041, section 4.2)
	untaggedLen = 2 + 18   // of one with an untagged segment (section 4.3)
	iserLen     = 28       // RFC 7145, section 9.2
	readLen     = 28       // of an RDMA Read Request (RFC 5040, section 4.4)
	maxLogin    = 16 << 10 // of a Login Response; a longer one ends the filtering of its connection
	trailer     = 8        // a unit is whole if no more than that, digests or CRC and padding, follows its headers
	opaqueKeep  = 128      // of a read or write of an opaque stream whose data is left out
	maxTags     = 1 << 16  // commands, and STags, that a filter remembers
	digestLen   = 4
)

// Opcodes of iSCSI (RFC 7143, section 11.2.1.2) and RDMAP (RFC 5040, section 4.1).
const (
	opCommand, opTMF, opDataOut                = 0x01, 0x02, 0x05
	opText, opTextResponse                     = 0x04, 0x24
	opLogin, opLoginResponse                   = 0x03, 0x23
	opResponse, opTMFResponse, opDataIn, opR2T = 0x21, 0x22, 0x25, 0x31

	rdmaWrite, rdmaReadRequest, rdmaReadResponse, rdmaSend, rdmaSendLast = 0, 1, 2, 3, 6
)

// A piece is the PDU or FPDU of a stream that passes at present.
type piece struct {
	protocol protocol
	buf      []byte // its beginning, until it is decided
	decided  bool
	wanted   bool // it goes into the file
	whole    bool // with all of its bytes
	total    uint64
	passed   uint64 // bytes of it, from when it is decided
	last     bool   // whether the last Send that began was wanted

	lastStays bool // whether it stays as a whole
}

// next begins the next unit.
func (u *piece) next() { u.buf, u.decided, u.passed = u.buf[:0], false, 0 }

// A talk is what a filter knows about both directions of a connection.
type talk struct {
	headerDigest, dataDigest bool
	loggedIn                 bool
}

// A stag is an STag of a flow.
type stag struct {
	flow uint32
	stag uint32
}

// cut writes a part of a stream as packets, one for each PDU or FPDU that the filter selects. The sequence numbers are those of a stream
// of these packets. It returns false if the file would exceed its limit.
func (k *Capture) cut(f *flow, r *record, payload []byte, comment string) bool {
	s := &f.streams[r.dir]
	u := &s.unit
	if comment != "" { // after a gap, a unit begins
		u.next()
		if u.protocol == unknown || u.protocol == iscsiStream && !f.talk.loggedIn {
			u.protocol = opaque
		}
	}
	if s.markers {
		u.protocol = opaque
	}
	s.pos += uint64(len(payload))
	for len(payload) > 0 || u.protocol != opaque && !u.decided && len(u.buf) > 0 {
		if u.protocol == opaque {
			b := payload[:min(len(payload), maxSegment)]
			payload = payload[len(b):]
			keep := len(b)
			if k.filter.Headers {
				keep = min(keep, opaqueKeep)
			}
			if !k.emit(f, r, b[:k.snap(f, keep)], len(b), &comment) {
				return false
			}
			continue
		}
		if !u.decided {
			need, decided := k.need(f, r, u)
			if len(u.buf) < need {
				n := min(need-len(u.buf), len(payload))
				if n == 0 {
					return true
				}
				u.buf = append(u.buf, payload[:n]...)
				payload = payload[n:]
				continue // need may know more now
			}
			if !decided {
				continue // as opaque
			}
			u.decided, u.passed = true, uint64(len(u.buf))
			if u.wanted {
				b := u.buf
				if u.whole {
					more := min(u.total-u.passed, uint64(len(payload)), uint64(maxSegment-len(b)))
					k.unit = append(append(k.unit[:0], b...), payload[:more]...)
					payload, b = payload[more:], k.unit
					u.passed += more
				}
				reported := len(b)
				switch {
				case u.whole:
				case u.protocol == mpaStream && k.filter.Headers:
					b = k.emptied(b)
					reported = len(b)
					comment = strings.TrimPrefix(comment+fmt.Sprintf("; %d bytes of data are left out", u.total-uint64(len(b))), "; ")
				default:
					reported = int(min(u.total, maxSegment))
				}
				if !k.emit(f, r, b, reported, &comment) {
					return false
				}
			}
		}
		n := min(u.total-u.passed, uint64(len(payload)))
		for b := payload[:n]; u.wanted && u.whole && len(b) > 0; {
			part := b[:min(len(b), maxSegment)]
			if !k.emit(f, r, part, len(part), &comment) {
				return false
			}
			b = b[len(part):]
		}
		payload = payload[n:]
		if u.passed += n; u.passed == u.total {
			u.next()
		}
	}
	return true
}

// emptied returns an FPDU with only the headers b, with the length and the CRC that it has so (RFC 5044, section 4.1): Wireshark decodes no
// FPDU that is cut off.
func (k *Capture) emptied(b []byte) []byte {
	k.unit = append(k.unit[:0], b...)
	binary.BigEndian.PutUint16(k.unit, uint16(len(b)-2))
	k.unit = append(k.unit, "\x00\x00\x00"[:-len(b)&3]...)
	k.unit = le.AppendUint32(k.unit, crc32c.Checksum(k.unit))
	return k.unit
}

// emit writes a packet with the first bytes, b, of a segment of the stream.
func (k *Capture) emit(f *flow, r *record, b []byte, segment int, comment *string) bool {
	if !k.truncated(f, r.dir, psh|ack, r.time, b, segment, *comment) {
		return false
	}
	*comment = ""
	k.sum.Octets += uint64(len(b))
	f.streams[r.dir].seq += uint32(segment)
	return true
}

// snap returns how many of n bytes of a packet go into the file.
func (k *Capture) snap(f *flow, n int) int {
	if k.filter.Snap == 0 {
		return n
	}
	ip := ipv4HeaderLen
	if !f.initiator.Addr().Is4() {
		ip = ipv6HeaderLen
	}
	return min(n, k.filter.Snap-ip-tcpHeaderLen)
}

// need returns how many bytes of the unit u have to be in its buffer. decided reports whether that is all: u then has its
// length, and whether and how much of it goes into the file.
func (k *Capture) need(f *flow, r *record, u *piece) (n int, decided bool) {
	b := u.buf
	if u.protocol == unknown {
		if len(b) < startupLen {
			return startupLen, false
		}
		if string(b[:keyLen]) != keys[r.dir] {
			u.protocol = iscsiStream
		}
	}
	switch u.protocol {
	case unknown:
		u.total, u.wanted, u.whole = startupLen+uint64(binary.BigEndian.Uint16(b[18:])), true, true
		if len(b) < int(u.total) {
			return int(u.total), false
		}
		u.protocol = mpaStream
		return int(u.total), true
	case iscsiStream:
		if len(b) < bhsLen {
			return bhsLen, false
		}
		return k.needPDU(f, r, u)
	}
	if len(b) < 4 {
		return 4, false
	}
	return k.needFPDU(f, r, u)
}

// needPDU does what need does for a PDU of iSCSI over TCP whose basic header segment is there.
func (k *Capture) needPDU(f *flow, r *record, u *piece) (n int, decided bool) {
	b, t := u.buf, &f.talk
	data := uint64(b[5])<<16 | uint64(b[6])<<8 | uint64(b[7])
	head := bhsLen + 4*int(b[4])
	u.total = uint64(head) + (data+3)&^3
	login := b[0]&0x3f == opLogin || b[0]&0x3f == opLoginResponse
	if !login && t.headerDigest {
		u.total, head = u.total+digestLen, head+digestLen
	}
	if !login && t.dataDigest && data > 0 {
		u.total += digestLen
	}
	if b[0]&0x3f == opLoginResponse && r.dir == toInitiator {
		if u.total > maxLogin {
			f.streams[toTarget].unit.protocol, u.protocol = opaque, opaque
			u.next()
			return 0, false
		}
		if len(b) < int(u.total) {
			return int(u.total), false
		}
		t.answer(b, f)
		u.wanted, u.whole = true, true
		return int(u.total), true
	}
	if len(b) == bhsLen {
		u.wanted = k.selects(b)
	}
	if stays(b[0]) && u.total <= maxLogin {
		u.whole = true
		return bhsLen, true
	}
	return k.keep(f, u, head)
}

// answer notes what a Login Response agrees on.
func (t *talk) answer(b []byte, f *flow) {
	for text := range bytes.SplitSeq(b[bhsLen+4*int(b[4]):], []byte{0}) {
		switch string(text) {
		case "HeaderDigest=CRC32C":
			t.headerDigest = true
		case "DataDigest=CRC32C":
			t.dataDigest = true
		case "RDMAExtensions=Yes": // the connection may continue with MPA (RFC 7145, section 5)
			f.steps = true
		}
	}
	const transitToFullFeature = 0x83 // T and NSG
	if b[1]&transitToFullFeature == transitToFullFeature && b[36] == 0 {
		t.loggedIn = true
		if f.steps {
			f.streams[toTarget].unit.protocol, f.streams[toInitiator].unit.protocol = unknown, unknown
		}
	}
}

// needFPDU does what need does for an FPDU whose first 4 bytes are there.
func (k *Capture) needFPDU(f *flow, r *record, u *piece) (n int, decided bool) {
	b := u.buf
	u.total = fpduLen(b[0], b[1])
	tagged, op := b[2]&0x80 != 0, b[3]&0x0f
	head := untaggedLen
	switch {
	case tagged:
		head = taggedLen
	case op == rdmaReadRequest:
		head += readLen
	case op >= rdmaSend && op <= rdmaSendLast:
		if len(b) < untaggedLen && u.total >= untaggedLen {
			return untaggedLen, false
		}
		if len(b) >= untaggedLen && binary.BigEndian.Uint32(b[16:]) == 0 { // of the message, it has the beginning
			head += iserLen + bhsLen
		}
	}
	head = int(min(uint64(head), u.total))
	if len(b) < head {
		return head, false
	}
	send := !tagged && op >= rdmaSend && op <= rdmaSendLast
	begins := send && head > untaggedLen
	if begins && head == untaggedLen+iserLen+bhsLen && b[untaggedLen]>>4 == 1 {
		ahs := 4 * int(b[untaggedLen+iserLen+4])
		if len(b) == head {
			u.wanted = k.selectsSend(r, b[untaggedLen:])
			u.last = u.wanted
		}
		head = int(min(uint64(head+ahs), u.total))
		u.lastStays = stays(b[untaggedLen+iserLen])
	} else if len(b) == head {
		switch {
		case begins: // iSER Hello and HelloReply
			u.wanted, u.last = true, true
		case send:
			u.wanted = u.last
		default:
			u.wanted = k.selectsRDMA(r, b, tagged, op)
		}
	}
	if send && (k.filter.Headers || u.lastStays) { // with what it carries, because Wireshark decodes no FPDU without its end
		u.whole = true
		return len(b), true
	}
	return k.keep(f, u, head)
}

// stays reports whether a PDU with that first byte stays as a whole: its data are text or sense data, which are short.
func stays(first byte) bool {
	switch first & 0x3f {
	case opLogin, opLoginResponse, opText, opTextResponse, opResponse:
		return true
	}
	return false
}

// keep does what need does for a unit whose headers have head bytes.
func (k *Capture) keep(f *flow, u *piece, head int) (n int, decided bool) {
	n = head
	if k.filter.Headers && u.total > uint64(head+trailer) {
		u.whole = false
	} else if k.filter.Snap == 0 {
		u.whole = true
		return min(n, len(u.buf)), true
	} else {
		n, u.whole = int(min(u.total, maxSegment)), true
	}
	if most := k.snap(f, n); most < n || n < int(min(u.total, maxSegment)) {
		n, u.whole = most, false
	}
	if !u.wanted {
		return len(u.buf), true
	}
	if len(u.buf) < n {
		return n, false
	}
	return len(u.buf), true
}

// lunOf returns the number in a field of 8 bytes (SAM-5, section 4.7): peripheral or flat addressing.
func lunOf(b []byte) uint16 { return uint16(b[0]&0x3f)<<8 | uint16(b[1]) }

// selects reports whether the filter selects a PDU with that basic header segment.
func (k *Capture) selects(bhs []byte) bool {
	if k.filter.LUN == nil {
		return true
	}
	itt := binary.BigEndian.Uint32(bhs[16:])
	switch op := bhs[0] & 0x3f; op {
	case opCommand, opTMF:
		if len(k.tasks) >= maxTags {
			clear(k.tasks)
		}
		wanted := lunOf(bhs[8:]) == *k.filter.LUN
		k.tasks[itt] = wanted
		return wanted
	case opDataOut, opR2T, opDataIn, opResponse, opTMFResponse:
		return k.tasks[itt]
	}
	return true
}

// selectsSend reports whether the filter selects a Send that begins with an iSER header and a basic header segment.
func (k *Capture) selectsSend(r *record, b []byte) bool {
	wanted := k.selects(b[iserLen:])
	if k.filter.LUN != nil && r.dir == toTarget {
		if len(k.stags) >= maxTags {
			clear(k.stags)
		}
		if b[0]&0x08 != 0 {
			k.stags[stag{r.flow, binary.BigEndian.Uint32(b[4:])}] = wanted
		}
		if b[0]&0x04 != 0 {
			k.stags[stag{r.flow, binary.BigEndian.Uint32(b[16:])}] = wanted
		}
	}
	return wanted
}

// selectsRDMA reports whether the filter selects an FPDU that is no Send.
func (k *Capture) selectsRDMA(r *record, b []byte, tagged bool, op byte) bool {
	if k.filter.LUN == nil {
		return true
	}
	switch {
	case tagged && op == rdmaWrite && r.dir == toInitiator:
		return k.stags[stag{r.flow, binary.BigEndian.Uint32(b[4:])}]
	case !tagged && op == rdmaReadRequest && len(b) >= untaggedLen+readLen:
		if len(k.sinks) >= maxTags {
			clear(k.sinks)
		}
		wanted := k.stags[stag{r.flow, binary.BigEndian.Uint32(b[untaggedLen+16:])}]
		k.sinks[stag{r.flow, binary.BigEndian.Uint32(b[untaggedLen:])}] = wanted
		return wanted
	case tagged && op == rdmaReadResponse && r.dir == toTarget:
		return k.sinks[stag{r.flow, binary.BigEndian.Uint32(b[4:])}]
	}
	return true // a Terminate Message, for example
}
