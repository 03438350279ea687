package lun

import (
	"bytes"

	"github.com/iser-target/iser-target/backend/checked"
	"github.com/iser-target/iser-target/backend/protection"
)

// A unit with protection information keeps 8 bytes with each block (SBC-3, section 4.22). A command whose RDPROTECT,
// WRPROTECT, VRPROTECT or ORPROTECT field is not 0 transfers them behind each block: the block on the wire. All
// other commands see blocks without them, and the store computes and checks them.
//
// Pieces of data are no multiple of a block on the wire. One that lies in two pieces is read twice, and is
// written when its second part has come.

// fieldBit is the most significant bit of the protect field in byte 1 of a CDB.
const fieldBit = 7

// withProtection makes s the source of the protection information of u, if it has some.
func (u *Unit) withProtection(s *checked.Store) {
	if u.protection = s.Protection(); u.protection != protection.None {
		u.protected = s
	}
}

// Protection returns the protection type of the unit.
func (u *Unit) Protection() protection.Type { return u.protection }

// protectMask returns the bits of byte 1 of a CDB that a command evaluates only if the unit has protection information.
func (row *command) protectMask(u *Unit) byte {
	switch {
	case row.flags&(protects|formatsTypes) == 0 || u == nil || u.protection == protection.None:
		return 0
	case row.flags&formatsTypes != 0:
		return formatProtection
	}
	return 0xe0
}

// protectChecks says what the values of the protect fields check (SBC-3, tables 73, 108 and others). Of application tags,
// those count that the target knows: see apptags.go.
var protectChecks = [...]protection.Checks{
	1: protection.CheckAll,
	2: protection.CheckApp | protection.CheckRef,
	3: protection.CheckNothing,
	4: protection.CheckGuard,
	5: protection.CheckAll,
}

// beginProtect decodes the protect field of c, in whose CDB that bit is the first one that is not evaluated without protection
// information. Commands with a field of 0 never come here.
func (c *Command) beginProtect(octet, bit int) bool {
	mask := c.row.protectMask(c.unit)
	if octet != 1 || mask>>bit&1 == 0 {
		return c.failCDB(octet, bit)
	}
	cdb := [16]byte(c.CDB)
	cdb[1] &^= mask
	if octet, bit, ok := c.row.reserved(cdb[:]); !ok {
		return c.failCDB(octet, bit)
	}
	if c.row.flags&protects == 0 {
		return true
	}
	field := c.CDB[1] >> 5
	if int(field) >= len(protectChecks) {
		return c.failCDB(1, fieldBit)
	}
	c.wire, c.checks = field != 0, protectChecks[field]
	return true
}

// transfer returns how many bytes that many blocks of c have on the wire.
func (u *Unit) transfer(c *Command, blocks uint64) uint64 {
	n := blocks << u.shift
	if c.wire {
		n += blocks * protection.Len
	}
	return n
}

// partOfBlock reports whether n bytes end within a block on the wire.
func (u *Unit) partOfBlock(c *Command, n uint64) bool {
	if c.wire {
		return n%u.wireLen() != 0
	}
	return n&uint64(u.info.BlockSize-1) != 0
}

// wireLen returns the bytes of a block with its protection information.
func (u *Unit) wireLen() uint64 { return uint64(u.info.BlockSize) + protection.Len }

// atBlock returns the offset in the store of a block of the extent of c.
func (u *Unit) atBlock(c *Command, block uint64) int64 { return u.at(c, block<<u.shift) }

// wireBlock returns memory for one block on the wire.
func (c *Command) wireBlock() []byte {
	n := int(c.unit.wireLen())
	if cap(c.carry) < n {
		c.carry = make([]byte, n)
	}
	return c.carry[:n]
}

// failProtection fails c because of the protection information of the block at lba (SBC-3, section 4.18.1).
func (c *Command) failProtection(f protection.Field, lba uint64) bool {
	return c.failSense(newSense(checkFailed(f)).withInfo(lba))
}

// checkFailed returns the Sense of a check that fails.
func checkFailed(f protection.Field) Sense {
	switch f {
	case protection.App:
		return condAppCheck
	case protection.Ref:
		return condRefCheck
	}
	return condGuardCheck
}

// readWire fills p with blocks on the wire, from that block of the extent on.
func (u *Unit) readWire(c *Command, p []byte, block uint64) error {
	pos, n := u.atBlock(c, block), u.dataLen(p)
	if err := u.enter(c, moved(int(n))); err != nil {
		return err
	}
	defer u.leave(c)
	defer u.ranges.share(stripesOf(pos, n)).release()
	if err := u.erased(c); err != nil {
		return err
	}
	return u.storeReadProtected(p, pos, c.checks)
}

// dataLen returns how many bytes of data are in blocks on the wire.
func (u *Unit) dataLen(p []byte) int64 { return int64(uint64(len(p)) / u.wireLen() << u.shift) }

// produceWire does what produceRead does for blocks on the wire.
func (u *Unit) produceWire(c *Command, p []byte, off uint64) bool {
	wire := u.wireLen()
	block := off / wire
	if skip := off % wire; skip > 0 {
		b := c.wireBlock()
		if !c.readDone(u.readWire(c, b, block)) {
			return false
		}
		p = p[copy(p, b[skip:]):]
		block++
	}
	if n := uint64(len(p)) / wire; n > 0 {
		if !c.readDone(u.readWire(c, p[:n*wire], block)) {
			return false
		}
		p, block = p[n*wire:], block+n
	}
	if len(p) == 0 {
		return true
	}
	b := c.wireBlock()
	if !c.readDone(u.readWire(c, b, block)) {
		return false
	}
	copy(p, b)
	return true
}

// eachWire calls f for the blocks on the wire that p, at off of the data-out, completes, with the number of the first.
// It keeps the beginning of a last one.
func (u *Unit) eachWire(c *Command, p []byte, off uint64, f func(*Unit, *Command, []byte, uint64) bool) bool {
	wire := u.wireLen()
	block := off / wire
	if skip := off % wire; skip > 0 {
		b := c.wireBlock()
		n := copy(b[skip:], p)
		if p = p[n:]; skip+uint64(n) < wire {
			return true
		}
		if !f(u, c, b, block) {
			return false
		}
		block++
	}
	if n := uint64(len(p)) / wire; n > 0 {
		if !f(u, c, p[:n*wire], block) {
			return false
		}
		p = p[n*wire:]
	}
	if len(p) > 0 {
		copy(c.wireBlock(), p)
	}
	return true
}

// checkWire checks the protection information of blocks that the initiator has sent, the first of which is for that block.
func (u *Unit) checkWire(c *Command, p []byte, block uint64) bool {
	bs, wire, tags := int(u.info.BlockSize), int(u.wireLen()), u.protected.AppTags()
	for lba := c.lba + block; len(p) > 0; p, lba = p[wire:], lba+1 {
		if f := u.protection.Check(p[:bs], protection.Get(p[bs:]), lba, c.checks, tags); f != 0 {
			return c.failProtection(f, lba)
		}
	}
	return true
}

// writeWire writes blocks on the wire whose protection information is what c says it is.
func (u *Unit) writeWire(c *Command, p []byte, block uint64) bool {
	return u.checkWire(c, p, block) && c.writeDone(u.writeBlocks(c, p, block, wantsFUA(c.CDB)))
}

// writeVerifyWire does what consumeWriteVerify does.
func (u *Unit) writeVerifyWire(c *Command, p []byte, block uint64) bool {
	return u.checkWire(c, p, block) && c.writeDone(u.writeBlocks(c, p, block, true)) &&
		(bytchk(c.CDB) == bytchkNone || u.compareWire(c, p, block, block))
}

// writeBlocks writes blocks on the wire, apart from COMPARE AND WRITE and its like.
func (u *Unit) writeBlocks(c *Command, p []byte, block uint64, durable bool) error {
	pos, n := u.atBlock(c, block), u.dataLen(p)
	if err := u.enter(c, moved(int(n))); err != nil {
		return err
	}
	defer u.leave(c)
	defer u.ranges.share(stripesOf(pos, n)).release()
	return u.writeBlocksLocked(c, p, pos, durable)
}

// writeBlocksLocked does what writeLocked does for blocks on the wire.
//
// Preconditions: the stripes of the range are held.
func (u *Unit) writeBlocksLocked(c *Command, p []byte, pos int64, durable bool) error {
	u.ranges.assertHeld(pos, u.dataLen(p))
	if err := u.barredTo(c); err != nil {
		return err
	}
	durable = u.writeThrough() || u.cached() && durable
	return u.storeWriteProtected(p, pos, durable)
}

// verifyWire does what consumeVerify does with BYTCHK 01b.
func (u *Unit) verifyWire(c *Command, p []byte, block uint64) bool {
	return u.checkWire(c, p, block) && u.compareWire(c, p, block, block)
}

// verifySameWire does what consumeVerify does with BYTCHK 11b: p is one block, whose reference tag is for the first block of the extent.
func (u *Unit) verifySameWire(c *Command, p []byte, _ uint64) bool {
	if !u.checkWire(c, p, 0) {
		return false
	}
	tag := p[u.info.BlockSize:]
	for i := range c.count {
		if c.aborted() {
			return c.fail(condAborted)
		}
		if !u.compareWire(c, p, i, 0) {
			return false
		}
		u.protection.Next(protection.Get(tag)).Put(tag)
	}
	return true
}

// compareWire ends c with MISCOMPARE if blocks on the medium differ from p. from is the number of p's first block in the
// data-out, for INFORMATION.
func (u *Unit) compareWire(c *Command, p []byte, block, from uint64) bool {
	pos, n := u.atBlock(c, block), u.dataLen(p)
	if err := u.enter(c, heavyStep(n)); err != nil {
		return c.readDone(err)
	}
	defer u.leave(c)
	defer u.ranges.share(stripesOf(pos, n)).release()
	return u.compareWireLocked(c, p, pos, from)
}

// compareWireLocked does what compareWire does.
//
// Preconditions: c has entered the gate.
func (u *Unit) compareWireLocked(c *Command, p []byte, pos int64, from uint64) bool {
	if err := u.erased(c); err != nil {
		return c.readDone(err)
	}
	sp := scratch.Get().(*[]byte)
	defer scratch.Put(sp)
	wire := int(u.wireLen())
	for len(p) > 0 {
		part := (*sp)[:min(len(*sp)/wire*wire, len(p))]
		if !c.readDone(u.storeReadProtected(part, pos, c.checks)) {
			return false
		}
		read := u.dataLen(part)
		for lba := uint64(pos) >> u.shift; len(part) > 0; part, p, from, lba = part[wire:], p[wire:], from+1, lba+1 {
			if k, i := u.difference(part[:wire], p[:wire], lba, c.CDB[1]>>5); i >= 0 {
				return c.failSense(newSense(k).withInfo(from*uint64(wire) + uint64(i)))
			}
		}
		pos += read
	}
	return true
}

// difference returns the offset of the first byte that counts in which two blocks on the wire differ, and the Sense for it, or -1. Of
// protection information, the protect field says what counts (SBC-4, table with BYTCHK 01b and the compare operation): the
// application tag only if it is known, and nothing if one of both tags disables checks.
func (u *Unit) difference(a, b []byte, lba uint64, field byte) (k Sense, at int) {
	if bytes.Equal(a, b) {
		return k, -1
	}
	bs := int(u.info.BlockSize)
	for i := range bs {
		if a[i] != b[i] {
			return condMiscompare, i
		}
	}
	x, y := protection.Get(a[bs:]), protection.Get(b[bs:])
	miscompare := func(f protection.Field, offset int) (Sense, int) {
		k := checkFailed(f)
		k.Key = keyMiscompare
		return k, bs + offset
	}
	_, known := u.protected.AppTags().Of(lba)
	switch {
	case u.protection.Escapes(x) || u.protection.Escapes(y):
	case field != 2 && x.Guard() != y.Guard():
		return miscompare(protection.Guard, 0)
	case known && x.App() != y.App():
		return miscompare(protection.App, 2)
	case field != 5 && x.Ref() != y.Ref():
		return miscompare(protection.Ref, 4)
	}
	return k, -1
}

// readAllWire reads and checks the extent for VERIFY without data.
func (u *Unit) readAllWire(c *Command) {
	sp := scratch.Get().(*[]byte)
	defer scratch.Put(sp)
	wire := u.wireLen()
	for block, most := uint64(0), uint64(len(*sp))/wire; block < c.count; {
		if c.aborted() {
			c.fail(condAborted)
			return
		}
		n := min(most, c.count-block)
		if !c.readDone(u.readWireHeavily(c, (*sp)[:n*wire], block)) {
			return
		}
		block += n
	}
}

// readWireHeavily does what readWire does for a command that sends none of it to the initiator.
func (u *Unit) readWireHeavily(c *Command, p []byte, block uint64) error {
	pos, n := u.atBlock(c, block), u.dataLen(p)
	if err := u.enter(c, heavyStep(n)); err != nil {
		return err
	}
	defer u.leave(c)
	defer u.ranges.share(stripesOf(pos, n)).release()
	if err := u.erased(c); err != nil {
		return err
	}
	return u.storeReadProtected(p, pos, c.checks)
}

// writeSameWire does what endWriteSame does with a block on the wire. The reference tag of type 1 grows from block to
// block (SBC-3, section 5.46).
func (u *Unit) writeSameWire(c *Command) {
	bs, wire := int(u.info.BlockSize), int(u.wireLen())
	if !u.checkWire(c, c.buf, 0) {
		return
	}
	tag := protection.Get(c.buf[bs:])
	pos, n := u.at(c, 0), int64(c.count<<u.shift)
	if c.CDB[1]&wsUnmap != 0 && tag == protection.Unwritten && allZero(c.buf[:bs]) {
		c.writeDone(u.syncThrough(c, u.inSteps(c, pos, n, u.storeDiscard)))
		return
	}
	sp := scratch.Get().(*[]byte)
	defer scratch.Put(sp)
	for most := uint64(len(*sp) / wire); n > 0; {
		if c.aborted() {
			c.fail(condAborted)
			return
		}
		p := (*sp)[:min(most, uint64(n)>>u.shift)*uint64(wire)]
		for b := p; len(b) > 0; b = b[wire:] {
			copy(b, c.buf[:bs])
			tag.Put(b[bs:])
			tag = u.protection.Next(tag)
		}
		m := u.dataLen(p)
		if !c.writeDone(u.shared(c, pos, m, m, func(pos, _ int64) error { return u.storeWriteProtected(p, pos, false) })) {
			return
		}
		pos, n = pos+m, n-m
	}
	c.writeDone(u.syncThrough(c, nil))
}

// orWire does what consumeOrWrite does. The tags are those of the data-out.
func (u *Unit) orWire(c *Command, p []byte, block uint64) bool {
	if !u.checkWire(c, p, block) {
		return false
	}
	sp := scratch.Get().(*[]byte)
	defer scratch.Put(sp)
	wire := int(u.wireLen())
	for len(p) > 0 {
		b := (*sp)[:min(len(*sp)/wire*wire, len(p))]
		if !u.orBlocks(c, b, p[:len(b)], block) {
			return false
		}
		p, block = p[len(b):], block+uint64(len(b)/wire)
	}
	return true
}

// orBlocks sets the bits of p in blocks on the medium; b is memory of p's length.
func (u *Unit) orBlocks(c *Command, b, p []byte, block uint64) bool {
	pos, n := u.atBlock(c, block), u.dataLen(p)
	if err := u.enter(c, moved(int(2*n))); err != nil {
		return c.writeDone(err)
	}
	defer u.leave(c)
	defer u.ranges.exclude(stripesOf(pos, n)).release()
	if !c.readDone(u.storeReadProtected(b, pos, c.checks)) {
		return false
	}
	bs, wire := int(u.info.BlockSize), int(u.wireLen())
	for at := 0; at < len(b); at += wire {
		data := b[at:][:bs]
		for i, x := range p[at:][:bs] {
			data[i] |= x
		}
		old := protection.Get(p[at+bs:])
		protection.New(protection.CRC(data), old.App(), old.Ref()).Put(b[at+bs:])
	}
	return c.writeDone(u.writeBlocksLocked(c, b, pos, wantsFUA(c.CDB)))
}

// compareAndWriteWire does what consumeCompareAndWrite does.
func (u *Unit) compareAndWriteWire(c *Command, p []byte) bool {
	want, instead := p[:len(p)/2], p[len(p)/2:]
	if !u.checkWire(c, want, 0) || !u.checkWire(c, instead, 0) {
		return false
	}
	pos, n := u.at(c, 0), u.dataLen(want)
	work := moved(len(p))
	work.Heavy = n > lightCompareWrite
	if err := u.enter(c, work); err != nil {
		return c.writeDone(err)
	}
	defer u.leave(c)
	defer u.ranges.exclude(stripesOf(pos, n)).release()
	return u.compareWireLocked(c, want, pos, 0) && c.writeDone(u.writeBlocksLocked(c, instead, pos, wantsFUA(c.CDB)))
}

// readOld returns the n bytes at pos of the store, for writeOld. With protection information they are blocks on the
// wire, whatever that says of them: a block that is damaged can be overwritten.
func (u *Unit) readOld(pos, n int64) ([]byte, error) {
	if u.protected == nil {
		p := make([]byte, n)
		return p, u.storeRead(p, pos)
	}
	p := make([]byte, uint64(n)>>u.shift*u.wireLen())
	return p, u.storeReadProtected(p, pos, protection.CheckNothing)
}

// writeOld puts back what readOld has returned.
func (u *Unit) writeOld(p []byte, pos int64) error {
	if u.protected == nil {
		return u.storeWrite(p, pos)
	}
	return u.storeWriteProtected(p, pos, false)
}

// formatInfo returns the FMTPINFO and PROTECTION FIELD USAGE fields of a FORMAT UNIT that gives the unit the protection
// type that it has (SBC-3, table 33).
func (u *Unit) formatInfo() (fmtpinfo, usage byte) {
	switch u.protection {
	case protection.Type1:
		return 2, 0
	case protection.Type3:
		return 3, 1
	}
	return 0, 0
}

// protectionTypes returns the SPT field of the Extended INQUIRY Data page: the only type is that of the unit (SPC-4, table 581).
func (u *Unit) protectionTypes() byte {
	if u.protection == protection.Type3 {
		return 4
	}
	return 0
}
