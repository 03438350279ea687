package lun

import (
	"bytes"
	"encoding/binary"
	"sync"

	"github.com/iser-target/iser-target/backend"
)

// Limits of EXTENDED COPY, which RECEIVE COPY OPERATING PARAMETERS and VPD page
// 8Fh report.
const (
	maxCSCDs        = 16
	maxSegments     = 32
	maxCopyList     = 4096     // octets of descriptors
	maxSegment      = 32 << 20 // octets
	maxCopies       = 255
	copyGranularity = 9 // log2 of octets
)

const (
	copyHeader = 16

	// CSCD descriptors, and the one type that is known.
	cscdLen            = 32
	cscdIdentification = 0xe4

	// Segment descriptors begin with a header that has the length of the rest.
	segmentHeader     = 4
	segmentBlockBlock = 0x02
	segmentBlockLen   = 28

	listIDNone = 3 // LIST ID USAGE 11b: there is no list identifier
)

// Copy manager status of RECEIVE COPY STATUS.
const (
	copyInProgress = 0
	copyGood       = 1
	copyFailed     = 2
)

// copies is what RECEIVE COPY STATUS tells of the EXTENDED COPY commands of an
// I_T_L nexus, by list identifier.
type copies struct {
	mu sync.Mutex
	of map[byte]copyStatus // guarded by mu
}

type copyStatus struct {
	status   byte
	segments uint16 // done
	octets   uint64 // written
}

func (l *copies) set(id byte, s copyStatus) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.of == nil {
		l.of = map[byte]copyStatus{}
	}
	l.of[id] = s
}

// take returns a status, and forgets it if it is final.
func (l *copies) take(id byte) (s copyStatus, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if s, ok = l.of[id]; s.status != copyInProgress {
		delete(l.of, id)
	}
	return s, ok
}

// beginExtendedCopy is for EXTENDED COPY(LID1).
func beginExtendedCopy(_ *Unit, c *Command) bool {
	c.DataOut, c.Whole = uint64(binary.BigEndian.Uint32(c.CDB[10:])), true
	if c.DataOut > MaxParameterList {
		return c.failCDB(10, noField)
	}
	return true
}

// A segment is a copy of n octets.
type segment struct {
	from, to       *Unit
	fromPos, toPos int64
	n              int64
}

// consumeExtendedCopy is EXTENDED COPY(LID1) (SPC-4, section 6.4): copies from
// blocks to blocks among the logical units that the initiator sees.
//
//	header of 16 │ CSCD descriptors of 32 │ segment descriptors of 28
func consumeExtendedCopy(_ *Unit, c *Command, p []byte, _ uint64) bool {
	be := binary.BigEndian
	if len(p) < copyHeader {
		return c.fail(condListLength)
	}
	id, usage := p[0], p[1]>>3&3
	cscdsLen, segmentsLen, inline := int(be.Uint16(p[2:])), be.Uint32(p[8:]), be.Uint32(p[12:])
	switch {
	case usage == 1, usage == listIDNone && id != 0:
		return c.failList(1)
	case uint64(cscdsLen)+uint64(segmentsLen) > maxCopyList,
		uint64(cscdsLen)+uint64(segmentsLen) > uint64(len(p)-copyHeader):
		return c.fail(condListLength)
	case inline != 0:
		return c.fail(condInlineData)
	case cscdsLen%cscdLen != 0:
		return c.failList(2)
	case cscdsLen > maxCSCDs*cscdLen:
		return c.fail(condTooManyCSCDs)
	}
	at := copyHeader
	var units []*Unit // nil: there is none with that name
	for end := at + cscdsLen; at < end; at += cscdLen {
		u, ok := c.parseCSCD(p[at:][:cscdLen], at)
		if !ok {
			return false
		}
		units = append(units, u)
	}
	end := at + int(segmentsLen)
	var segments [][]byte
	for at < end {
		switch {
		case end-at < segmentHeader:
			return c.fail(condListLength)
		case p[at] != segmentBlockBlock:
			return c.fail(condSegmentType)
		case end-at < segmentBlockLen:
			return c.fail(condListLength)
		case be.Uint16(p[at+2:]) != segmentBlockLen-segmentHeader:
			return c.failList(at + 2)
		case len(segments) == maxSegments:
			return c.fail(condTooManySegments)
		}
		segments = append(segments, p[at:][:segmentBlockLen])
		at += segmentBlockLen
	}

	todo := make([]segment, len(segments))
	for i, d := range segments {
		var ok bool
		if todo[i], ok = c.parseSegment(d, i, units); !ok {
			return false
		}
	}

	s := copyStatus{status: copyInProgress}
	note := func() {
		if usage != listIDNone {
			c.itl.copies.set(id, s)
		}
	}
	note()
	for i, seg := range todo {
		if !c.copySegment(seg, i) {
			s.status = copyFailed
			note()
			return false
		}
		s.segments++
		s.octets += uint64(seg.n)
		note()
	}
	s.status = copyGood
	note()
	return true
}

// parseCSCD finds the unit that an identification descriptor (SPC-4, section
// 6.4.5.5) names by its NAA; our other designators are longer than it has room
// for. The descriptor is at that octet of the list.
func (c *Command) parseCSCD(d []byte, at int) (u *Unit, ok bool) {
	const peripheralType, setMask, associationAndType = 0x1f, 0x0f, 0x3f
	switch {
	case d[0] != cscdIdentification:
		return nil, c.fail(condCSCDType)
	case d[1]&peripheralType != typeDisk:
		return nil, c.failList(at + 1)
	case d[7] > 20:
		return nil, c.failList(at + 7)
	}
	if d[4]&setMask != setBinary || d[5]&associationAndType != assocUnit|desNAA {
		return nil, true
	}
	for _, l := range c.nexus.luns {
		if !bytes.Equal(d[8:][:d[7]], l.unit.opt.Identity.NAA[:]) {
			continue
		}
		// DISK BLOCK LENGTH
		if n := binary.BigEndian.Uint32(d[28:]) & 0xffffff; n != l.unit.info.BlockSize {
			return nil, c.failList(at + 29)
		}
		return l.unit, true
	}
	return nil, true
}

// parseSegment decodes segment descriptor number i (SPC-4, section 6.4.6.3).
func (c *Command) parseSegment(d []byte, i int, units []*Unit) (s segment, ok bool) {
	const dc = 0x02 // the number of blocks is that of the destination
	be := binary.BigEndian
	unit := func(index uint16) (*Unit, bool) {
		switch {
		case int(index) >= len(units):
			return nil, c.failCopy(condUnreachableCopyTarget, i)
		case units[index] == nil:
			return nil, c.failCopy(condCopyTargetNotReachable, i)
		}
		return units[index], true
	}
	if s.from, ok = unit(be.Uint16(d[4:])); !ok {
		return s, false
	}
	if s.to, ok = unit(be.Uint16(d[6:])); !ok {
		return s, false
	}
	s.n = int64(be.Uint16(d[10:])) << s.from.shift
	if d[1]&dc != 0 {
		s.n = int64(be.Uint16(d[10:])) << s.to.shift
	}
	from, to := be.Uint64(d[12:]), be.Uint64(d[20:])
	switch {
	case s.n > maxSegment:
		return s, c.failCopy(condCopyAborted, i)
	case s.n&int64(s.from.info.BlockSize-1) != 0, s.n&int64(s.to.info.BlockSize-1) != 0:
		return s, c.failCopy(condInexactSegment, i)
	case !s.from.within(from, uint64(s.n)>>s.from.shift), !s.to.within(to, uint64(s.n)>>s.to.shift):
		return s, c.failCopy(condCopyAborted, i)
	}
	s.fromPos, s.toPos = int64(from<<s.from.shift), int64(to<<s.to.shift)
	return s, true
}

// failCopy is fail for segment descriptor number i.
func (c *Command) failCopy(k cond, i int) bool {
	return c.failSense(sense{cond: k, field: noField, bit: noField, command: uint32(i)})
}

// copySegment copies. Where the source has a hole, the destination gets one.
func (c *Command) copySegment(s segment, i int) bool {
	if !c.mayUse(s.from, 0x88) || !c.mayUse(s.to, 0x8a) { // as READ(16) and WRITE(16) could
		return c.failCopy(condThirdPartyFailure, i)
	}
	sp := scratch.Get().(*[]byte)
	defer scratch.Put(sp)
	// The ranges may overlap: what has not been copied is not written over.
	back := s.from == s.to && s.toPos > s.fromPos
	for done := int64(0); done < s.n; {
		n := min(s.n-done, int64(len(*sp)))
		off := done
		if back {
			off = s.n - done - n
		}
		if err := s.copyPiece((*sp)[:n], off); err != nil {
			return c.failCopy(condThirdPartyFailure, i)
		}
		done += n
	}
	if s.to.writeThrough() && s.to.store.Sync() != nil {
		return c.failCopy(condThirdPartyFailure, i)
	}
	return true
}

// mayUse tells whether a command with that operation code would be let to u.
func (c *Command) mayUse(u *Unit, op byte) bool {
	row := byOpcode[op][0]
	if f := u.reservations.fence.Load(); f != nil && f.keepsOut(&Command{nexus: c.nexus, row: row}) {
		return false
	}
	return u.sanitizer.state.Load() != sanitizeRunning && u.readiness() == condNone &&
		(row.flags&writes == 0 || u.protection() == condNone)
}

// copyPiece copies what is off octets into the segment; p is memory for it.
func (s segment) copyPiece(p []byte, off int64) error {
	n := int64(len(p))
	mapped, run, err := backend.Extent(s.from.store, s.fromPos+off)
	if err != nil {
		return err
	}
	if !mapped && run >= n && s.to.isThin() {
		return s.to.shared(s.toPos+off, n, s.to.store.Discard)
	}
	if err := s.from.read(p, s.fromPos+off); err != nil {
		return err
	}
	return s.to.write(p, s.toPos+off, false)
}

// receiveCopyStatus is RECEIVE COPY STATUS(LID1) (SPC-4, section 6.24).
func receiveCopyStatus(_ *Unit, c *Command) bool {
	const kib = 1 // TRANSFER COUNT UNITS
	s, ok := c.itl.copies.take(c.CDB[2])
	if !ok {
		return c.failCDB(2, noField)
	}
	b := c.zeroed(12)
	binary.BigEndian.PutUint32(b, 8)
	b[4] = s.status
	binary.BigEndian.PutUint16(b[5:], s.segments)
	b[7] = kib
	binary.BigEndian.PutUint32(b[8:], uint32(s.octets>>10))
	return c.report(b, binary.BigEndian.Uint32(c.CDB[10:]))
}

// receiveCopyParameters is RECEIVE COPY OPERATING PARAMETERS (SPC-4, section
// 6.22).
func receiveCopyParameters(_ *Unit, c *Command) bool {
	be := binary.BigEndian
	b := c.zeroed(44)
	b[4] = 1 // SNLID: LIST ID USAGE 11b is known
	be.PutUint16(b[8:], maxCSCDs)
	be.PutUint16(b[10:], maxSegments)
	be.PutUint32(b[12:], maxCopyList)
	be.PutUint32(b[16:], maxSegment)
	be.PutUint16(b[34:], maxCopies)
	b[36], b[37] = maxCopies, copyGranularity
	b[43] = 2
	b = append(b, segmentBlockBlock, cscdIdentification)
	be.PutUint32(b, uint32(len(b)-4))
	return c.report(b, be.Uint32(c.CDB[10:]))
}

// appendThirdPartyCopy is the Third-party Copy page (SPC-4, section 7.8.17).
func appendThirdPartyCopy(_ *Unit, _ *Nexus, b []byte) []byte {
	be := binary.BigEndian
	b = append(b, 0x00, 0x01, 0, 8, // Supported Commands
		7, 0x83, 1, 0x00, 0x84, 2, 0x00, 0x03)
	parameters := [32]byte{1: 0x04, 3: 28} // Parameter Data
	be.PutUint16(parameters[8:], maxCSCDs)
	be.PutUint16(parameters[10:], maxSegments)
	be.PutUint32(parameters[12:], maxCopyList)
	b = append(b, parameters[:]...)
	b = append(b, 0x00, 0x08, 0, 4, // Supported Descriptors
		2, segmentBlockBlock, cscdIdentification, 0)
	b = append(b, 0x00, 0x0c, 0, 4, // Supported CSCD Descriptor IDs: none
		0, 0, 0, 0)
	general := [36]byte{0: 0x80, 1: 0x01, 3: 32} // General Copy Operations
	be.PutUint32(general[4:], maxCopies)
	be.PutUint32(general[8:], maxCopies)
	be.PutUint32(general[12:], maxSegment)
	general[16] = copyGranularity
	return append(b, general[:]...)
}
