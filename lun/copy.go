package lun

import (
	"cmp"
	"encoding/binary"
	"errors"
	"slices"
	"sync/atomic"

	"github.com/iser-target/iser-target/backend"
)

// Limits of EXTENDED COPY, which RECEIVE COPY OPERATING PARAMETERS and VPD page 8Fh report.
const (
	maxCSCDs        = 16
	maxSegments     = 32
	maxCopyList     = 4096     // bytes of descriptors
	maxSegment      = 32 << 20 // bytes
	maxCopies       = 255
	copyGranularity = 9 // log2 of bytes
)

const (
	copyHeader  = 16
	copyHeader4 = 48 // of EXTENDED COPY(LID4)

	// CSCD descriptors, and the only known type.
	cscdLen            = 32
	cscdIdentification = 0xe4

	// Segment descriptors begin with a header that has the length of the rest.
	segmentHeader     = 4
	segmentBlockBlock = 0x02
	segmentBlockLen   = 28

	listIDNone = 3 // LIST ID USAGE 11b: no list identifier
)

// beginExtendedCopy checks the length of the list of EXTENDED COPY.
func beginExtendedCopy(_ *Unit, c *Command) bool {
	c.DataOut, c.Whole = uint64(binary.BigEndian.Uint32(c.CDB[10:])), true
	if c.DataOut > MaxParameterList {
		return c.failCDB(10, noField)
	}
	return true
}

// A segment is a copy of n bytes.
type segment struct {
	from, to       *itl
	fromPos, toPos int64
	n              int64
	begun          [2]uint32 // sanitizer.begun of source and destination at the beginning
}

// A listHead is the header of a parameter list of EXTENDED COPY, and where its fields are.
type listHead struct {
	sa                     byte
	id                     uint32
	usage                  byte // LIST ID USAGE
	immediate              bool // GOOD comes before the copy
	header                 int  // bytes
	cscds, segments        int  // bytes of descriptors
	inline                 uint32
	usageField, cscdsField int // offsets
}

// consumeExtendedCopy executes EXTENDED COPY(LID1) (SPC-4, section 6.4): copies from blocks to
// blocks among the logical units that the initiator sees, also at other targets.
//
//	header of 16 │ CSCD descriptors of 32 │ segment descriptors of 28
func consumeExtendedCopy(u *Unit, c *Command, p []byte, _ uint64) bool {
	be := binary.BigEndian
	if len(p) < copyHeader {
		return c.fail(condListLength)
	}
	cscds, segments := be.Uint16(p[2:]), be.Uint32(p[8:])
	if uint64(cscds)+uint64(segments) > maxCopyList {
		return c.failHeavily(u, condListLength)
	}
	return c.extendedCopy(u, p, listHead{
		sa: saCopyLID1, id: uint32(p[0]), usage: p[1] >> 3 & 3, header: copyHeader, cscds: int(cscds), segments: int(segments),
		inline: be.Uint32(p[12:]), usageField: 1, cscdsField: 2,
	})
}

// consumeExtendedCopy4 executes EXTENDED COPY(LID4) (SPC-4, section 6.3), which does the same. Its list identifier has four
// bytes, and with IMMED the copy continues after GOOD.
//
//	header of 48 │ CSCD descriptors of 32 │ segment descriptors of 28
func consumeExtendedCopy4(u *Unit, c *Command, p []byte, _ uint64) bool {
	const (
		format       = 0x01
		headerCSCD   = 0x20 // bytes of the header from byte 16 on
		headerType   = 0xff
		immed, sense = 0x01, 0x02
	)
	be := binary.BigEndian
	if len(p) < copyHeader4 {
		return c.fail(condListLength)
	}
	l := listHead{
		sa: saCopyLID4, id: be.Uint32(p[20:]), usage: p[1] >> 3 & 3, immediate: p[15]&immed != 0, header: copyHeader4,
		cscds: int(be.Uint16(p[42:])), segments: int(be.Uint16(p[44:])), inline: uint32(be.Uint16(p[46:])), usageField: 1, cscdsField: 42,
	}
	switch {
	case p[0] != format:
		return c.failList(0)
	case be.Uint16(p[2:]) != headerCSCD:
		return c.failList(2)
	case p[15]&sense != 0: // G_SENSE: GOOD has no sense data here
		return c.failList(15)
	case p[16] != headerType:
		return c.failList(16)
	case l.immediate && l.usage == listIDNone: // nobody could ask for its end
		return c.failList(1)
	case l.cscds+l.segments > maxCopyList:
		return c.failHeavily(u, condListLength)
	}
	return c.extendedCopy(u, p, l)
}

// failHeavily fails c after it has waited for its turn at the store.
func (c *Command) failHeavily(u *Unit, k Sense) bool {
	if err := u.enter(c, heavyStep(0)); err != nil {
		return c.writeDone(err)
	}
	u.leave(c)
	return c.fail(k)
}

// extendedCopy reads the descriptors of the list p and copies.
func (c *Command) extendedCopy(u *Unit, p []byte, l listHead) bool {
	// Reading the list is work as well: who sends lists that fail waits for its turn.
	if err := u.enter(c, heavyStep(0)); err != nil {
		return c.writeDone(err)
	}
	u.leave(c)
	if l.usage != listIDNone {
		c.itl.copies.supersede(l.id)
	}
	be := binary.BigEndian
	switch {
	case l.usage == 1, l.usage == listIDNone && l.id != 0:
		return c.failList(l.usageField)
	case l.cscds+l.segments > len(p)-l.header:
		return c.fail(condListLength)
	case l.inline != 0:
		return c.fail(condInlineData)
	case l.cscds%cscdLen != 0:
		return c.failList(l.cscdsField)
	case l.cscds > maxCSCDs*cscdLen:
		return c.fail(condTooManyCSCDs)
	}
	at := l.header
	var others []*Nexus // with other targets
	release := func() {
		for _, n := range others {
			n.Close()
		}
	}
	keep := false
	defer func() {
		if !keep {
			release()
		}
	}()
	var units []*itl // nil: no unit has that name
	for end := at + l.cscds; at < end; at += cscdLen {
		l, ok := c.parseCSCD(p[at:][:cscdLen], at, &others)
		if !ok {
			return false
		}
		units = append(units, l)
	}
	end := at + l.segments
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

	var id *uint32
	if l.usage != listIDNone {
		id = &l.id
	}
	keep = true
	return c.thirdPartyCopy(u, &copyStatus{sa: l.sa}, id, l.immediate, release, func(c *Command, s *copyStatus) bool {
		return c.copySegments(todo, s)
	})
}

// thirdPartyCopy does the copy s, which has a list identifier unless id is nil. If it is immediate, it continues after c. When it
// has ended, or could not begin, release is called.
func (c *Command) thirdPartyCopy(u *Unit, s *copyStatus, id *uint32, immediate bool, release func(), do func(*Command, *copyStatus) bool) bool {
	l := &c.itl.copies
	if id != nil {
		if k := l.begin(*id, s, c); k != condNone {
			release()
			return c.fail(k)
		}
	}
	run := func(c *Command) bool {
		defer release()
		defer func() { l.finish(s, c) }()
		return do(c, s)
	}
	if immediate {
		if next := l.fork(s, c); next != nil {
			u.copying.add(next, 1) // see Unit.Busy
			go func() {
				defer u.copying.add(next, -1)
				run(next)
			}()
			return true
		}
		// Too many copies continue after their commands. This one does not.
	}
	return run(c)
}

// copySegments copies what todo says, and keeps s up to date.
func (c *Command) copySegments(todo []segment, s *copyStatus) bool {
	l := &c.itl.copies
	for i, seg := range todo {
		before := l.octetsOf(s)
		ok, done := c.copySegment(seg, i, func(octets int64) { l.note(s, octets) })
		if to := seg.to.unit; (ok || done > 0) && to.writeThrough() {
			if err := to.sync(c); err != nil {
				l.noteLoss(s, before)
				if ok {
					c.reportStoreError(placed(seg.to, seg.toPos, seg.n, err))
					return c.failCopy(condThirdPartyFailure, i)
				}
			}
		}
		if !ok {
			return false
		}
		l.noteSegment(s)
	}
	return true
}

// parseCSCD finds the unit that an identification descriptor (SPC-4, section 6.4.5.5) names by
// its NAA. Other designators of the target are too long for it. The descriptor is at that offset
// in the list. others are the nexuses with other targets so far.
func (c *Command) parseCSCD(d []byte, at int, others *[]*Nexus) (l *itl, ok bool) {
	const null, peripheralType, setMask, associationAndType = 0x20, 0x1f, 0x0f, 0x3f
	switch {
	case d[0] != cscdIdentification:
		return nil, c.fail(condCSCDType)
	case d[1]&peripheralType != typeDisk:
		return nil, c.failList(at + 1)
	case d[7] > 20:
		return nil, c.failList(at + 7)
	}
	if d[1]&null != 0 {
		// A null device (NUL): the rest of the descriptor names nothing. Segments cannot use it.
		return nil, true
	}
	if d[4]&setMask != setBinary || d[5]&associationAndType != assocUnit|desNAA {
		return nil, true
	}
	naa := d[8:][:d[7]]
	if l = c.find(func(u *Unit) bool { return u.isNamed(naa) }, others); l == nil {
		return nil, true
	}
	if n := binary.BigEndian.Uint32(d[28:]) & 0xffffff; n != l.unit.info.BlockSize { // DISK BLOCK LENGTH
		return nil, c.failList(at + 29)
	}
	return l, true
}

// find returns the unit that is selects among those that the initiator sees, first at its own target, then at others that it
// could log in to, or nil. A nexus with another target is added to others.
func (c *Command) find(is func(*Unit) bool, others *[]*Nexus) *itl {
	in := func(n *Nexus) *itl {
		list := n.list()
		if i := slices.IndexFunc(list, func(l *itl) bool { return is(l.unit) }); i >= 0 {
			return list[i]
		}
		return nil
	}
	for _, n := range append([]*Nexus{c.nexus}, *others...) {
		if l := in(n); l != nil {
			return l
		}
	}
	find := c.nexus.others.Load()
	if find == nil {
		return nil
	}
	n := (*find)(func(inv *Inventory) bool { return inv.has(is) })
	if n == nil {
		return nil
	}
	*others = append(*others, n)
	return in(n)
}

// parseSegment decodes segment descriptor number i (SPC-4, section 6.4.6.3).
func (c *Command) parseSegment(d []byte, i int, units []*itl) (s segment, ok bool) {
	const dc = 0x02 // the number of blocks is that of the destination
	be := binary.BigEndian
	for j, end := range [...]**itl{&s.from, &s.to} {
		switch index := int(be.Uint16(d[4+2*j:])); {
		case index >= len(units):
			return s, c.failCopy(condUnreachableCopyTarget, i)
		case units[index] == nil:
			return s, c.failCopy(condCopyTargetNotReachable, i)
		default:
			*end = units[index]
		}
	}
	s.n = int64(be.Uint16(d[10:])) << s.from.unit.shift
	if d[1]&dc != 0 {
		s.n = int64(be.Uint16(d[10:])) << s.to.unit.shift
	}
	from, to := be.Uint64(d[12:]), be.Uint64(d[20:])
	source, destination := s.from.unit, s.to.unit
	switch {
	case s.n > maxSegment:
		return s, c.failCopy(condCopyAborted, i)
	case s.n&int64(source.info.BlockSize-1) != 0, s.n&int64(destination.info.BlockSize-1) != 0:
		return s, c.failCopy(condInexactSegment, i)
	case !source.within(from, uint64(s.n)>>source.shift), !destination.within(to, uint64(s.n)>>destination.shift):
		return s, c.failCopy(condCopyAborted, i)
	}
	s.fromPos, s.toPos = int64(from<<source.shift), int64(to<<destination.shift)
	s.begun = s.erasures()
	return s, true
}

// erasures returns how many sanitizes have begun on the source and on the destination.
func (s *segment) erasures() [2]uint32 {
	return [2]uint32{s.from.unit.sanitizer.begun.Load(), s.to.unit.sanitizer.begun.Load()}
}

// failCopy fails c because of segment descriptor number i.
func (c *Command) failCopy(k Sense, i int) bool {
	s := newSense(k)
	s.command = uint32(i)
	return c.failSense(s)
}

// maxCopyStep and maxDeviceCopyStep are how many bytes are copied at a time; after each step the command
// checks whether it was aborted, and others have their turns. The second one is for stores that wait for a
// device. It is a multiple of what file systems can share.
const (
	maxCopyStep       = 1 << 20
	maxDeviceCopyStep = 4 << 20
)

// sharedUnit is the size in bytes of the blocks that file systems share, at the most usual one.
const sharedUnit = 4096

// alignShared returns how much of the first n bytes of a segment to copy first, so that the rest begins where file systems can
// share blocks.
func alignShared(from, to, n int64) int64 {
	if part := from % sharedUnit; part != 0 && part == to%sharedUnit {
		return min(n, sharedUnit-part)
	}
	return n
}

// copySegment copies, calls note with the number of bytes after each step, and returns the sum. Where the source
// has a hole, the destination gets one. Without a write cache, the caller makes what was copied durable.
func (c *Command) copySegment(s segment, i int, note func(octets int64)) (ok bool, done int64) {
	sp := scratch.Get().(*[]byte)
	defer scratch.Put(sp)
	s.to.unit.copying.add(c, 1) // before mayUse checks: see endCopies
	defer s.to.unit.copying.add(c, -1)
	c.copyTo.Store(s.to.unit)
	defer c.copyTo.Store(nil)
	// In overlapping ranges, do not overwrite what is not copied yet.
	overlap := s.from.unit == s.to.unit && s.fromPos < s.toPos+s.n && s.toPos < s.fromPos+s.n
	back := overlap && s.toPos > s.fromPos
	step := int64(maxDeviceCopyStep)
	if s.from.unit.info.Nonblocking && s.to.unit.info.Nonblocking {
		step = maxCopyStep
	}
	for done < s.n || s.n == 0 {
		n, off := min(s.n-done, step), done
		if overlap {
			n = min(n, int64(len(*sp)))
		}
		if back {
			off = s.n - done - n
		}
		if done == 0 && !overlap {
			n = alignShared(s.fromPos, s.toPos, n)
		}
		n, ok, err := c.copyStep(s, *sp, off, n, overlap)
		switch {
		case err == errCopyStopped, err == errAborted && c.stopped():
			return c.fail(condCopyStopped), done
		case err == errAborted:
			return c.fail(condAborted), done
		case errors.Is(err, errHeldUp):
			return c.busy(), done
		case err != nil:
			c.reportStoreError(err)
			fallthrough
		case !ok:
			return c.failCopy(condThirdPartyFailure, i), done
		}
		if s.n == 0 {
			break // only check it
		}
		done += n
		note(n)
	}
	return true, done
}

// copyStep copies at most n bytes, off bytes into the segment, and returns how many. ok is false
// if c may not copy them. copyStep checks that while it holds the ranges, so that a command that
// changes it and then waits for the ranges knows that no copy continues.
func (c *Command) copyStep(s segment, p []byte, off, n int64, overlap bool) (done int64, ok bool, err error) {
	a, err := s.to.unit.announce(c, s.toPos+off, n, false)
	defer a.end()
	if err != nil {
		return 0, false, err
	}
	leave, err := c.enterBoth(s, n)
	if err != nil {
		return 0, false, err
	}
	defer leave()
	unlock := s.lock(off, n)
	defer unlock()
	switch {
	case c.stopped():
		return 0, false, errCopyStopped
	case c.aborted():
		return 0, false, errAborted
	case s.from.unit.heldUp(), s.to.unit.heldUp():
		return 0, false, errHeldUp
	case !c.mayUse(s.from, opRead16), !c.mayUse(s.to, opWrite16), s.erasures() != s.begun:
		return 0, false, nil
	case n > 0:
		done, err = s.copyRun(p, off, n, overlap)
	}
	return done, true, err
}

// A copyCount counts the third-party copies of a unit by their command, in the order of copyCommands.
type copyCount [len(copyCommands)]atomic.Int32

// copyCommands are the service actions of EXTENDED COPY that copy.
var copyCommands = [...]int{saCopyLID1, saCopyLID4, saPopulateToken, saWriteUsingToken}

// add adds n copies of c.
func (k *copyCount) add(c *Command, n int32) { k[slices.Index(copyCommands[:], c.row.sa)].Add(n) }

// name returns the name of a command that copies, or an empty string if none does.
func (k *copyCount) name() string {
	for i := range k {
		if k[i].Load() > 0 {
			rows := byOpcode[opExtendedCopy]
			return rows[slices.IndexFunc(rows, func(row *command) bool { return row.sa == copyCommands[i] })].name
		}
	}
	return ""
}

// endCopies waits until every copy to the unit has checked again whether it may continue: an
// EXTENDED COPY of a preempted nexus may be a command for another logical unit.
func (u *Unit) endCopies() {
	if u.copying.name() != "" {
		u.aside(func() { u.ranges.exclude(allStripes).release() })
	}
}

// mayUse reports whether l would accept a command with that operation code. The initiator may have lost l since the list was
// read.
func (c *Command) mayUse(l *itl, op byte) bool {
	u, row := l.unit, byOpcode[op][0]
	if f := u.reservations.fence.Load(); f != nil && f.keepsOut(l.nexus, row, nil) {
		return false
	}
	return slices.Contains(l.nexus.list(), l) && u.obstacle(l.nexus, row.flags) == condNone && !u.isSanitizing() && u.readiness() == condNone &&
		(row.flags&writes == 0 || l.protection() == condNone)
}

// copyRun copies from offset off of the segment as far as the source has only data or only a hole,
// but no more than n bytes, and returns how many. If the ranges overlap it copies all n, which have
// room in p.
//
// Preconditions: the stripes of both ranges are held.
func (s segment) copyRun(p []byte, off, n int64, overlap bool) (int64, error) {
	s.assertLocked(off, n)
	from, to := s.from.unit, s.to.unit
	if err := cmp.Or(from.barred(), to.barred()); err != nil {
		return 0, err
	}
	fromPos, toPos := s.fromPos+off, s.toPos+off
	mapped, run, err := from.storeExtent(fromPos)
	if err != nil {
		return 0, placed(s.from, fromPos, n, err)
	}
	if !overlap {
		n = min(n, run)
	}
	switch {
	case !mapped && run >= n:
		return n, placed(s.to, toPos, n, to.makeHole(toPos, n))
	case !overlap:
		err := to.storeCopy(toPos, from, fromPos, n, p)
		if source, ok := errors.AsType[*backend.SourceError](err); ok {
			err = placed(s.from, fromPos, n, source.Err)
		}
		return n, placed(s.to, toPos, n, err)
	}
	if err := from.storeRead(p[:n], fromPos); err != nil {
		return 0, placed(s.from, fromPos, n, err)
	}
	return n, placed(s.to, toPos, n, to.storeWrite(p[:n], toPos))
}

// makeHole makes n bytes at pos zeros, which take no space if the store can give space back.
//
// Preconditions: the stripes of the range are held.
func (u *Unit) makeHole(pos, n int64) error {
	u.ranges.assertHeld(pos, n)
	if u.isThin() {
		return u.storeDiscard(pos, n)
	}
	return u.storeZero(pos, n)
}

// lock holds n bytes at offset off of the segment in both units, as READ and WRITE do, until
// unlock is called.
func (s segment) lock(off, n int64) (unlock func()) {
	first, second := s.from.unit, s.to.unit
	a, b := stripesOf(s.fromPos+off, n), stripesOf(s.toPos+off, n)
	if first == second {
		return first.ranges.share(a | b).release
	}
	// In the order of their numbers, or two copies could wait for one another.
	if second.number < first.number {
		first, second, a, b = second, first, b, a
	}
	heldA, heldB := first.ranges.share(a), second.ranges.share(b)
	return func() {
		heldB.release()
		heldA.release()
	}
}

// enterBoth enters the gates of both units of s, in the order of their numbers, for a step of n bytes.
// So no two copies wait for one another.
func (c *Command) enterBoth(s segment, n int64) (leave func(), err error) {
	first, second := s.from.unit, s.to.unit
	if first == second {
		if err := first.enter(c, heavyStep(2*n)); err != nil {
			return nil, err
		}
		return func() { first.leave(c) }, nil
	}
	if second.number < first.number {
		first, second = second, first
	}
	work := heavyStep(n)
	work.More = true
	if err := first.enter(c, work); err != nil {
		return nil, err
	}
	c.other.Who = c.call.Who
	if err := second.enterAs(c, &c.other, heavyStep(n)); err != nil {
		first.leave(c)
		return nil, err
	}
	return func() {
		second.gate.Leave(&c.other)
		first.leave(c)
	}, nil
}

// assertLocked asserts that both ranges of n bytes at offset off of the segment are locked.
func (s segment) assertLocked(off, n int64) {
	s.from.unit.ranges.assertHeld(s.fromPos+off, n)
	s.to.unit.ranges.assertHeld(s.toPos+off, n)
}

// receiveCopyParameters executes RECEIVE COPY OPERATING PARAMETERS (SPC-4, section 6.22).
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

// appendThirdPartyCopy appends the Third-party Copy page (SPC-4, section 7.8.17).
func appendThirdPartyCopy(u *Unit, _ *Nexus, b []byte) []byte {
	be := binary.BigEndian
	b = appendTokenLimits(u, b)
	b = append(b, 0x00, 0x01, 0, 16, // Supported Commands
		13, opExtendedCopy, 5, saCopyLID1, saCopyLID4, saPopulateToken, saWriteUsingToken, saCopyAbort,
		opReceiveCopy, 4, saStatusLID1, saCopyParameters, saStatusLID4, saTokenInformation, 0, 0)
	parameters := [32]byte{1: 0x04, 3: 28} // Parameter Data
	be.PutUint16(parameters[8:], maxCSCDs)
	be.PutUint16(parameters[10:], maxSegments)
	be.PutUint32(parameters[12:], maxCopyList)
	b = append(b, parameters[:]...)
	b = append(b, 0x00, 0x08, 0, 4, // Supported Descriptors
		2, segmentBlockBlock, cscdIdentification, 0)
	b = append(b, 0x00, 0x0c, 0, 4, // Supported CSCD Descriptor IDs: none
		0, 0, 0, 0)
	b = appendTokenFeatures(u, b)
	general := [36]byte{0: 0x80, 1: 0x01, 3: 32} // General Copy Operations
	be.PutUint32(general[4:], maxCopies)
	be.PutUint32(general[8:], maxCopies)
	be.PutUint32(general[12:], maxSegment)
	general[16] = copyGranularity
	return append(b, general[:]...)
}
