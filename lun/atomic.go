package lun

import "github.com/iser-target/iser-target/backend/protection"

// maxCompareWrite is the longest COMPARE AND WRITE, in bytes: both halves of its data-out come in
// one piece.
const maxCompareWrite = MaxParameterList / 2

// maxCompareWrite returns the longest COMPARE AND WRITE, in blocks. Protection information has to fit in the piece, too.
func (u *Unit) maxCompareWrite() uint64 {
	if u.protection != protection.None {
		return maxCompareWrite / u.wireLen()
	}
	return maxCompareWrite >> u.shift
}

// lightCompareWrite is the longest COMPARE AND WRITE, in bytes, that does no more work than a WRITE.
const lightCompareWrite = 4096

func beginCompareAndWrite(u *Unit, c *Command) bool {
	if !u.beginExtent(c, u.maxCompareWrite()<<u.shift) {
		return false
	}
	c.DataOut, c.Whole = 2*u.transfer(c, c.count), true
	return true
}

// consumeCompareAndWrite writes the second half of p where the medium equals the first (SBC-3,
// section 5.2). Meanwhile no other command has access to the range.
func consumeCompareAndWrite(u *Unit, c *Command, p []byte, _ uint64) bool {
	if c.wire {
		return u.compareAndWriteWire(c, p)
	}
	want, instead := p[:len(p)/2], p[len(p)/2:]
	pos := u.at(c, 0)
	a, err := u.announce(c, pos, int64(len(want)), true)
	defer a.end()
	if err != nil {
		return c.writeDone(err)
	}
	work := moved(len(p))
	// A lock of a cluster file system is one block and has to be fast.
	work.Heavy = len(want) > lightCompareWrite
	if err := u.enter(c, work); err != nil {
		return c.writeDone(err)
	}
	defer u.leave(c)
	defer u.ranges.exclude(stripesOf(pos, int64(len(want)))).release()
	if !u.compare(c, want, pos, 0) {
		return false
	}
	return c.writeDone(u.writeLocked(c, instead, pos, wantsFUA(c.CDB)))
}

// consumeOrWrite executes ORWRITE(16) (SBC-3, section 5.12) for one piece of its data-out. No
// other command changes the range between the read and the write.
func consumeOrWrite(u *Unit, c *Command, p []byte, off uint64) bool {
	if c.wire {
		return u.eachWire(c, p, off, (*Unit).orWire)
	}
	sp := scratch.Get().(*[]byte)
	defer scratch.Put(sp)
	for len(p) > 0 {
		b := (*sp)[:min(len(*sp), len(p))]
		if !u.orWrite(c, b, p[:len(b)], u.at(c, off)) {
			return false
		}
		p, off = p[len(b):], off+uint64(len(b))
	}
	return true
}

// orWrite sets the bits of p in the medium at pos; b is memory of p's length.
func (u *Unit) orWrite(c *Command, b, p []byte, pos int64) bool {
	a, err := u.announce(c, pos, int64(len(p)), true)
	defer a.end()
	if err != nil {
		return c.writeDone(err)
	}
	if err := u.enter(c, moved(2*len(p))); err != nil {
		return c.writeDone(err)
	}
	defer u.leave(c)
	defer u.ranges.exclude(stripesOf(pos, int64(len(p)))).release()
	if !c.readDone(u.storeRead(b, pos)) {
		return false
	}
	for i, x := range p {
		b[i] |= x
	}
	return c.writeDone(u.writeLocked(c, b, pos, wantsFUA(c.CDB)))
}

func beginWriteAtomic(u *Unit, c *Command) bool {
	if !u.beginExtent(c, uint64(u.info.AtomicWrite)) {
		return false
	}
	c.DataOut = u.transfer(c, c.count)
	if unit := uint64(u.info.AtomicUnit); unit > 0 && c.count > 0 {
		pos, n := c.lba<<u.shift, c.count<<u.shift
		switch at, size := atomicCover(pos, n); {
		case pos&(unit-1) != 0, size > uint64(u.info.AtomicWrite), at+size > uint64(u.Size()):
			return c.failCDB(2, noField) // ATOMIC ALIGNMENT, or on both sides of a boundary that the medium has
		case n&(unit-1) != 0:
			return c.failCDB(lengthOffset(c.CDB), noField) // ATOMIC TRANSFER LENGTH GRANULARITY
		}
	}
	return true
}

// atomicCover returns the smallest range around n bytes at pos that has a length of a power of two, and begins at a multiple of
// it: the kernel writes only those atomically.
func atomicCover(pos, n uint64) (at, size uint64) {
	for size = 1; ; size <<= 1 {
		if at = pos &^ (size - 1); size == 0 || at+size >= pos+n {
			return at, size
		}
	}
}

// announceAtomic announces an atomic write of n bytes at pos, and of what the store writes around them.
func (u *Unit) announceAtomic(c *Command, pos, n int64) (announcement, error) {
	if u.info.AtomicUnit > 0 && n > 0 {
		at, size := atomicCover(uint64(pos), uint64(n))
		pos, n = int64(at), int64(max(size, uint64(u.info.AtomicUnit)))
	}
	return u.announce(c, pos, n, true)
}

// writeUnit writes p at pos by one atomic write of the store, which covers what is around p, too.
//
// Preconditions: c has entered the store.
func (u *Unit) writeUnit(c *Command, p []byte, pos int64) bool {
	if len(p) == 0 {
		return true
	}
	at, size := atomicCover(uint64(pos), uint64(len(p)))
	size = max(size, uint64(u.info.AtomicUnit))
	defer u.ranges.exclude(stripesOf(int64(at), int64(size))).release()
	if size != uint64(len(p)) {
		whole := make([]byte, size)
		if !c.readDone(u.storeRead(whole, int64(at))) {
			return false
		}
		copy(whole[uint64(pos)-at:], p)
		p = whole
	}
	return c.writeDone(u.storeWriteAtomic(c, p, int64(at), wantsFUA(c.CDB)))
}

// consumeWriteAtomic collects the data. It takes no memory before the first data arrive.
func consumeWriteAtomic(_ *Unit, c *Command, p []byte, off uint64) bool {
	if off == 0 {
		c.whole = make([]byte, 0, c.DataOut)
	}
	c.whole = append(c.whole, p...)
	return true
}

// endWriteAtomic writes all blocks or, when the store fails, none (SBC-4, section 4.29.4). Other
// commands see either. backend.Info promises with AtomicWrite that this also holds after a power
// failure. With protection information, both are written or none: such a unit has WRITE ATOMIC only if both are in memory.
func endWriteAtomic(u *Unit, c *Command) {
	p := c.whole
	c.whole = nil
	pos, n := u.at(c, 0), int64(c.count<<u.shift)
	if c.wire && !u.checkWire(c, p, 0) {
		return
	}
	a, err := u.announceAtomic(c, pos, n)
	defer a.end()
	if err != nil {
		c.writeDone(err)
		return
	}
	if err := u.enter(c, moved(2*len(p))); err != nil {
		c.writeDone(err)
		return
	}
	defer u.leave(c)
	if u.info.AtomicUnit > 0 {
		u.writeUnit(c, p, pos)
		return
	}
	defer u.ranges.exclude(stripesOf(pos, n)).release()
	old, err := u.readOld(pos, n)
	if !c.readDone(err) {
		return
	}
	if c.wire {
		err = u.writeBlocksLocked(c, p, pos, wantsFUA(c.CDB))
	} else {
		err = u.writeLocked(c, p, pos, wantsFUA(c.CDB))
	}
	if err != nil {
		// The old data had room before, so they have it again. If the store fails
		// here too, the unit can only report that the blocks are unreliable.
		if storeFailed(err) && u.writeOld(old, pos) != nil {
			c.reportStoreError(err)
			c.fail(condWriteError)
			return
		}
		c.writeDone(err)
	}
}
