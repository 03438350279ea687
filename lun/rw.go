package lun

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"slices"
	"sync"

	"github.com/iser-target/iser-target/backend"
)

// Limits of the medium access commands, in bytes; VPD page B0h reports them in blocks.
const (
	maxTransfer     = 32 << 20
	optimalTransfer = 1 << 20
	// Less than 65536 blocks of 4096: from a longer one, libiscsi's suite
	// concludes that WRITE takes as many.
	maxWriteSame  = 256<<20 - 4096
	maxUnmap      = 512 << 20
	maxUnmapDescs = 256
)

const fua = 0x08 // in byte 1 of READ and WRITE, except those of 6 bytes

// extent decodes the first block and the number of blocks of a medium access CDB. A length of 0
// means 256 blocks only in a CDB of 6 bytes.
func extent(cdb []byte) (lba, count uint64) {
	be := binary.BigEndian
	switch cdb[0] >> 5 {
	case 0: // 6 bytes
		lba, count = uint64(be.Uint32(cdb)&0x1fffff), uint64(cdb[4])
		if count == 0 {
			count = 256
		}
	case 1, 2: // 10
		lba, count = uint64(be.Uint32(cdb[2:])), uint64(be.Uint16(cdb[7:]))
	case 4: // 16
		lba, count = be.Uint64(cdb[2:]), uint64(be.Uint32(cdb[10:]))
	case 5: // 12
		lba, count = uint64(be.Uint32(cdb[2:])), uint64(be.Uint32(cdb[6:]))
	}
	return lba, count
}

// lengthOffset returns the offset of the length field of a medium access CDB.
func lengthOffset(cdb []byte) int {
	switch cdb[0] {
	case opCompareAndWrite:
		return 13
	case opWriteAtomic16:
		return 12
	}
	return [...]int{4, 7, 7, 0, 10, 6, 0, 0}[cdb[0]>>5]
}

// lend appends to list the n bytes at pos, apart from COMPARE AND WRITE and its like. After an error it has appended nothing.
func (u *Unit) lend(c *Command, pos, n int64, list []Lent) ([]Lent, error) {
	if err := u.enter(c, moved(int(n))); err != nil {
		return list, err
	}
	defer u.leave(c)
	defer u.ranges.share(stripesOf(pos, n)).release()
	if err := u.erased(c); err != nil {
		return list, err
	}
	return u.storeLend(pos, n, list)
}

// within reports whether count blocks from lba on are on the unit. An empty range may start at
// its end.
func (u *Unit) within(lba, count uint64) bool {
	blocks := u.blocks.Load()
	return lba <= blocks && count <= blocks-lba
}

// beginExtent decodes and checks the extent of c, which may cover up to limit bytes.
func (u *Unit) beginExtent(c *Command, limit uint64) bool {
	c.lba, c.count = extent(c.CDB)
	switch {
	case !u.within(c.lba, c.count) || c.lba == u.blocks.Load():
		return c.failRange(c.lba)
	case c.count > limit>>u.shift:
		return c.failCDB(lengthOffset(c.CDB), noField)
	}
	return true
}

// toEnd extends the extent of c, which begins on the unit, to the end of the unit. The unit may
// be smaller than when c began.
func (u *Unit) toEnd(c *Command) bool {
	blocks := u.blocks.Load()
	if c.lba >= blocks {
		return c.failRange(c.lba)
	}
	c.count = blocks - c.lba
	return true
}

// at returns the offset in the store of byte off of a command's data.
func (u *Unit) at(c *Command, off uint64) int64 { return int64(c.lba<<u.shift + off) }

// wantsFUA reports whether the FUA bit of a READ or WRITE is set.
func wantsFUA(cdb []byte) bool { return cdb[0]>>5 != 0 && cdb[1]&fua != 0 }

// read fills p from pos, apart from COMPARE AND WRITE and its like.
func (u *Unit) read(c *Command, p []byte, pos int64) error {
	if err := u.enter(c, moved(len(p))); err != nil {
		return err
	}
	defer u.leave(c)
	defer u.ranges.share(stripesOf(pos, int64(len(p)))).release()
	if err := u.erased(c); err != nil {
		return err
	}
	return u.storeRead(p, pos)
}

// write writes p at pos, apart from COMPARE AND WRITE and its like.
func (u *Unit) write(c *Command, p []byte, pos int64, durable bool) error {
	a, err := u.announce(c, pos, int64(len(p)), false)
	defer a.end()
	if err != nil {
		return err
	}
	if err := u.enter(c, moved(len(p))); err != nil {
		return err
	}
	defer u.leave(c)
	defer u.ranges.share(stripesOf(pos, int64(len(p)))).release()
	return u.writeLocked(c, p, pos, durable)
}

// writeLocked writes p at pos, durably if asked for or without a cache.
//
// Preconditions: the stripes of the range are held.
func (u *Unit) writeLocked(c *Command, p []byte, pos int64, durable bool) error {
	u.ranges.assertHeld(pos, int64(len(p)))
	if err := u.barredTo(c); err != nil {
		return err
	}
	if u.writeThrough() || u.cached() && durable {
		if u.unsynced.Load() {
			return backend.ErrUnsynced
		}
		return u.storeWriteDurable(p, pos)
	}
	return u.storeWrite(p, pos)
}

// shared calls f, which changes a range and moves that many bytes, apart from COMPARE AND WRITE and
// its like.
func (u *Unit) shared(c *Command, pos, n, bytes int64, f func(pos, n int64) error) error {
	a, err := u.announce(c, pos, n, false)
	defer a.end()
	if err != nil {
		return err
	}
	if err := u.enter(c, heavyStep(bytes)); err != nil {
		return err
	}
	defer u.leave(c)
	defer u.ranges.share(stripesOf(pos, n)).release()
	if err := u.barredTo(c); err != nil {
		return err
	}
	return f(pos, n)
}

func beginRead(u *Unit, c *Command) bool {
	if !u.beginExtent(c, maxTransfer) {
		return false
	}
	c.DataIn = u.transfer(c, c.count)
	if wantsFUA(c.CDB) && u.cached() {
		// FUA asks for the data on the medium, which must not be older than those
		// in the cache (SBC-3, section 5.8).
		return c.writeDone(u.sync(c))
	}
	return true
}

func produceRead(u *Unit, c *Command, p []byte, off uint64) bool {
	if c.wire {
		return u.produceWire(c, p, off)
	}
	return c.readDone(u.read(c, p, u.at(c, off)))
}

func beginWrite(u *Unit, c *Command) bool {
	if !u.beginExtent(c, maxTransfer) {
		return false
	}
	c.DataOut = u.transfer(c, c.count)
	if c.Expected < c.DataOut && u.partOfBlock(c, c.Expected) {
		// With fewer blocks than the CDB says, those that arrive are written. A part
		// of a block is not: GOOD would mean that all of it was.
		c.Overflow = true
		return c.fail(condTooLittle)
	}
	return true
}

func consumeWrite(u *Unit, c *Command, p []byte, off uint64) bool {
	if c.wire {
		return u.eachWire(c, p, off, (*Unit).writeWire)
	}
	return c.writeDone(u.write(c, p, u.at(c, off), wantsFUA(c.CDB)))
}

func beginSync(u *Unit, c *Command) bool {
	if u.orphaned() {
		return c.fail(condNoStore)
	}
	return u.beginExtent(c, math.MaxInt64)
}

// endSync syncs the whole store, whatever the range. It does so before the status even if IMMED
// allows it later, because a failure could not be reported otherwise.
func endSync(u *Unit, c *Command) { c.writeDone(u.sync(c)) }

// endPrefetch executes PRE-FETCH (SBC-3, section 5.13). It ends with GOOD and never with
// CONDITION MET, which would promise that all blocks stay in the cache.
func endPrefetch(u *Unit, c *Command) {
	if c.count == 0 && !u.toEnd(c) {
		return
	}
	c.readDone(u.prefetch(c, u.at(c, 0), int64(c.count<<u.shift)))
}

// scratch is memory for commands that read or write more than the initiator sends.
var scratch = sync.Pool{New: func() any { b := make([]byte, 256<<10); return &b }}

// What VERIFY compares the medium with (BYTCHK).
const (
	bytchkNone  = 0
	bytchkAll   = 1
	bytchkBlock = 3 // compares one block with every block of the extent
)

func bytchk(cdb []byte) byte { return cdb[1] >> 1 & 3 }

func beginVerify(u *Unit, c *Command) bool {
	if !u.beginExtent(c, maxTransfer) {
		return false
	}
	switch bytchk(c.CDB) {
	case bytchkNone:
	case bytchkAll:
		c.DataOut = u.transfer(c, c.count)
	case bytchkBlock:
		c.DataOut = u.transfer(c, min(c.count, 1))
	default:
		return c.failCDB(1, 2)
	}
	return true
}

func consumeVerify(u *Unit, c *Command, p []byte, off uint64) bool {
	switch {
	case c.wire && bytchk(c.CDB) == bytchkAll:
		return u.eachWire(c, p, off, (*Unit).verifyWire)
	case c.wire:
		return u.eachWire(c, p, off, (*Unit).verifySameWire)
	}
	if bytchk(c.CDB) == bytchkAll {
		return u.compareShared(c, p, u.at(c, off), off)
	}
	if uint64(len(p)) < c.DataOut {
		return true // End refuses it
	}
	for i := uint64(0); i < c.count; i += verifyBlocks {
		if !u.compareBlocks(c, p, i, min(verifyBlocks, c.count-i)) {
			return false
		}
	}
	return true
}

// verifyBlocks is how many blocks VERIFY compares with one at a time.
const verifyBlocks = 64

// compareBlocks ends c with MISCOMPARE if one of n blocks from block first of its extent on differs
// from p.
func (u *Unit) compareBlocks(c *Command, p []byte, first, n uint64) bool {
	if err := u.enter(c, heavyStep(int64(n<<u.shift))); err != nil {
		return c.readDone(err)
	}
	defer u.leave(c)
	for i := first; i < first+n; i++ {
		if c.aborted() {
			return c.fail(condAborted)
		}
		if !u.compareApart(c, p, u.at(c, i<<u.shift), i<<u.shift) {
			return false
		}
	}
	return true
}

// consumeWriteVerify writes to the medium, past the cache, and with BYTCHK compares the result
// (SBC-3, section 5.36).
func consumeWriteVerify(u *Unit, c *Command, p []byte, off uint64) bool {
	if c.wire {
		return u.eachWire(c, p, off, (*Unit).writeVerifyWire)
	}
	return c.writeDone(u.write(c, p, u.at(c, off), true)) &&
		(bytchk(c.CDB) == bytchkNone || u.compareShared(c, p, u.at(c, off), off))
}

// endVerify reads the extent if it has no data to compare it with.
func endVerify(u *Unit, c *Command) {
	switch {
	case bytchk(c.CDB) != bytchkNone:
		return
	case c.wire:
		u.readAllWire(c)
		return
	}
	sp := scratch.Get().(*[]byte)
	defer scratch.Put(sp)
	for off, n := uint64(0), c.count<<u.shift; off < n; {
		if c.aborted() {
			c.fail(condAborted)
			return
		}
		p := (*sp)[:min(uint64(len(*sp)), n-off)]
		if !c.readDone(u.readHeavily(c, p, u.at(c, off))) {
			return
		}
		off += uint64(len(p))
	}
}

// readHeavily does what read does for a command that sends none of it to the initiator.
func (u *Unit) readHeavily(c *Command, p []byte, pos int64) error {
	if err := u.enter(c, heavyStep(int64(len(p)))); err != nil {
		return err
	}
	defer u.leave(c)
	defer u.ranges.share(stripesOf(pos, int64(len(p)))).release()
	if err := u.erased(c); err != nil {
		return err
	}
	return u.storeRead(p, pos)
}

// compareShared does what compare does, for callers that do not hold the range.
func (u *Unit) compareShared(c *Command, p []byte, pos int64, base uint64) bool {
	if err := u.enter(c, moved(len(p))); err != nil {
		return c.readDone(err)
	}
	defer u.leave(c)
	return u.compareApart(c, p, pos, base)
}

// compareApart does what compare does, apart from COMPARE AND WRITE and its like.
//
// Preconditions: c has entered the gate.
func (u *Unit) compareApart(c *Command, p []byte, pos int64, base uint64) bool {
	defer u.ranges.share(stripesOf(pos, int64(len(p)))).release()
	return u.compare(c, p, pos, base)
}

// compare ends c with MISCOMPARE if the medium at pos differs from p. base is the offset of p for
// INFORMATION.
func (u *Unit) compare(c *Command, p []byte, pos int64, base uint64) bool {
	if err := u.erased(c); err != nil {
		return c.readDone(err)
	}
	sp := scratch.Get().(*[]byte)
	defer scratch.Put(sp)
	for done := 0; done < len(p); {
		part := (*sp)[:min(len(*sp), len(p)-done)]
		if !c.readDone(u.storeRead(part, pos+int64(done))) {
			return false
		}
		want := p[done:][:len(part)]
		if !bytes.Equal(part, want) {
			i := 0
			for part[i] == want[i] {
				i++
			}
			return c.failSense(newSense(condMiscompare).withInfo(base + uint64(done+i)))
		}
		done += len(part)
	}
	return true
}

// Bits of WRITE SAME, byte 1.
const (
	wsUnmap = 0x08
	wsNDOB  = 0x01 // no data-out: zeros; only in 16 bytes
)

// wsnz returns the WSNZ bit: the unit refuses a WRITE SAME of 0 blocks, which means all to the
// end of the medium, unless that can never be too much.
func (u *Unit) wsnz() bool { return u.blocks.Load() > maxWriteSame>>u.shift }

func beginWriteSame(u *Unit, c *Command) bool {
	if !u.beginExtent(c, maxWriteSame) {
		return false
	}
	switch {
	case c.count == 0 && u.wsnz():
		return c.failCDB(lengthOffset(c.CDB), noField)
	case c.CDB[1]&wsUnmap != 0 && !u.isThin():
		return c.failCDB(1, 3)
	case c.wire && c.CDB[0]>>5 == 4 && c.CDB[1]&wsNDOB != 0: // there is no protection information to check
		return c.failCDB(1, fieldBit)
	}
	if c.count == 0 && !u.toEnd(c) {
		return false
	}
	c.buf = c.buf[:0]
	if c.CDB[1]&wsNDOB == 0 {
		c.DataOut = u.transfer(c, 1)
	} else {
		c.buf = c.zeroed(int(u.info.BlockSize))
	}
	return true
}

func consumeWriteSame(_ *Unit, c *Command, p []byte, _ uint64) bool {
	c.buf = append(c.buf, p...)
	return true
}

func endWriteSame(u *Unit, c *Command) {
	if c.wire {
		u.writeSameWire(c)
		return
	}
	block := c.buf
	pos, n := u.at(c, 0), int64(c.count<<u.shift)
	var err error
	switch {
	case allZero(block) && c.CDB[1]&wsUnmap != 0:
		err = u.inSteps(c, pos, n, u.storeDiscard)
	case allZero(block):
		err = u.inSteps(c, pos, n, u.storeZero)
	default:
		err = u.repeat(c, block, pos, n)
	}
	c.writeDone(u.syncThrough(c, err))
}

// syncThrough returns err, or without one, makes the changes of c durable if there is no cache.
func (u *Unit) syncThrough(c *Command, err error) error {
	if err == nil && u.writeThrough() {
		return u.sync(c)
	}
	return err
}

// errAborted ends a command that was aborted.
var errAborted = errors.New("the command was aborted")

func (c *Command) aborted() bool { return c.Abort != nil && c.Abort.Load() }

// stepLength and deviceStepLength are about how many bytes inSteps erases at a time; after each step the
// command checks whether it was aborted, and others have their turns. The second one is for stores that
// wait for a device: each step costs such a store an operation, however short it is.
const (
	stepLength       = 1 << 20
	deviceStepLength = 16 << 20
)

// inSteps calls f, which erases a range, for n bytes at pos piece by piece. Pieces meet where the
// store can give space back on both sides.
func (u *Unit) inSteps(c *Command, pos, n int64, f func(pos, n int64) error) error {
	step := int64(stepLength)
	if !u.info.Nonblocking {
		step = deviceStepLength
	}
	if g := int64(u.info.DiscardGranularity); g > 0 {
		step = max(step-step%g, g)
	}
	first := max(u.info.DiscardAlignment, 0)
	for end := pos + n; pos < end; {
		if c.aborted() {
			return errAborted
		}
		next := first
		if pos >= first {
			next = pos - (pos-first)%step + step
		}
		next = min(next, end)
		if err := u.shared(c, pos, next-pos, 0, f); err != nil {
			return err
		}
		pos = next
	}
	return nil
}

// repeat fills n bytes at pos with copies of block.
func (u *Unit) repeat(c *Command, block []byte, pos, n int64) error {
	sp := scratch.Get().(*[]byte)
	defer scratch.Put(sp)
	p := (*sp)[:min(int64(len(*sp)), n)]
	for i := 0; i < len(p); i += len(block) {
		copy(p[i:], block)
	}
	for n > 0 {
		if c.aborted() {
			return errAborted
		}
		p = p[:min(int64(len(p)), n)]
		m := int64(len(p))
		err := u.shared(c, pos, m, m, func(pos, _ int64) error { return u.storeWrite(p, pos) })
		if err != nil {
			return err
		}
		pos, n = pos+int64(len(p)), n-int64(len(p))
	}
	return nil
}

func allZero(b []byte) bool { return !slices.ContainsFunc(b, func(x byte) bool { return x != 0 }) }

// isThin reports whether the unit gives space back.
func (u *Unit) isThin() bool { return u.info.DiscardGranularity > 0 }

const (
	unmapHeader = 8
	unmapDesc   = 16
)

func beginUnmap(_ *Unit, c *Command) bool {
	c.DataOut = uint64(binary.BigEndian.Uint16(c.CDB[7:]))
	c.Whole = true
	if 0 < c.DataOut && c.DataOut < unmapHeader {
		return c.fail(condListLength)
	}
	return true
}

// consumeUnmap executes UNMAP (SBC-3, section 5.28). It checks all descriptors before it obeys
// the first.
func consumeUnmap(u *Unit, c *Command, p []byte, _ uint64) bool {
	be := binary.BigEndian
	descs := p[unmapHeader:]
	n := int(be.Uint16(p[2:]))
	if n > len(descs) {
		return c.fail(condListLength)
	}
	descs = descs[:n-n%unmapDesc]
	if len(descs) > maxUnmapDescs*unmapDesc {
		return c.failList(2)
	}
	total := uint64(0)
	for i := 0; i < len(descs); i += unmapDesc {
		lba, count := be.Uint64(descs[i:]), uint64(be.Uint32(descs[i+8:]))
		if !u.within(lba, count) {
			return c.failRange(lba)
		}
		if total += count; total > uint64(maxUnmap)>>u.shift {
			return c.failList(unmapHeader + i + 8)
		}
	}
	for i := 0; i < len(descs); i += unmapDesc {
		c.lba, c.count = be.Uint64(descs[i:]), uint64(be.Uint32(descs[i+8:]))
		if !c.writeDone(u.inSteps(c, u.at(c, 0), int64(c.count<<u.shift), u.storeDiscard)) {
			return false
		}
	}
	return !u.writeThrough() || c.writeDone(u.sync(c))
}
