package lun

// maxCompareWrite is the longest COMPARE AND WRITE, in bytes: both halves of its data-out come in
// one piece.
const maxCompareWrite = MaxParameterList / 2

// lightCompareWrite is the longest COMPARE AND WRITE, in bytes, that does no more work than a WRITE.
const lightCompareWrite = 4096

func beginCompareAndWrite(u *Unit, c *Command) bool {
	if !u.beginExtent(c, maxCompareWrite) {
		return false
	}
	c.DataOut, c.Whole = 2*c.count<<u.shift, true
	return true
}

// consumeCompareAndWrite writes the second half of p where the medium equals the first (SBC-3,
// section 5.2). Meanwhile no other command has access to the range.
func consumeCompareAndWrite(u *Unit, c *Command, p []byte, _ uint64) bool {
	want, instead := p[:len(p)/2], p[len(p)/2:]
	pos := u.at(c, 0)
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
	return c.writeDone(u.writeLocked(instead, pos, wantsFUA(c.CDB)))
}

// consumeOrWrite executes ORWRITE(16) (SBC-3, section 5.12) for one piece of its data-out. No
// other command changes the range between the read and the write.
func consumeOrWrite(u *Unit, c *Command, p []byte, off uint64) bool {
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
	return c.writeDone(u.writeLocked(b, pos, wantsFUA(c.CDB)))
}

func beginWriteAtomic(u *Unit, c *Command) bool {
	if !u.beginExtent(c, uint64(u.info.AtomicWrite)) {
		return false
	}
	c.DataOut = c.count << u.shift
	return true
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
// failure.
func endWriteAtomic(u *Unit, c *Command) {
	p := c.whole
	c.whole = nil
	pos := u.at(c, 0)
	if err := u.enter(c, moved(2*len(p))); err != nil {
		c.writeDone(err)
		return
	}
	defer u.leave(c)
	defer u.ranges.exclude(stripesOf(pos, int64(len(p)))).release()
	old := make([]byte, len(p))
	if !c.readDone(u.storeRead(old, pos)) {
		return
	}
	if err := u.writeLocked(p, pos, wantsFUA(c.CDB)); err != nil {
		// The old data had room before, so they have it again. If the store fails
		// here too, the unit can only report that the blocks are unreliable.
		if storeFailed(err) && u.storeWrite(old, pos) != nil {
			c.reportStoreError(err)
			c.fail(condWriteError)
			return
		}
		c.writeDone(err)
	}
}
