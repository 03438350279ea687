package lun

import (
	"bytes"
	"encoding/binary"
	"math"
	"sync"

	"github.com/iser-target/iser-target/backend"
)

// Limits of the medium access commands, in octets; VPD page B0h reports them
// in blocks.
const (
	maxTransfer     = 32 << 20
	optimalTransfer = 1 << 20
	// Less than 65536 blocks of 4096: from a longer one, libiscsi's suite
	// concludes that WRITE takes as many.
	maxWriteSame  = 256<<20 - 4096
	maxUnmap      = 512 << 20
	maxUnmapDescs = 256
)

const fua = 0x08 // in octet 1 of READ and WRITE, except of six octets

// extent decodes the first block and the number of blocks of a medium access
// CDB. A length of 0 means 256 blocks in a CDB of 6 octets only.
func extent(cdb []byte) (lba, count uint64) {
	be := binary.BigEndian
	switch cdb[0] >> 5 {
	case 0: // 6 octets
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

// lengthOctet is where the length field of a medium access CDB is.
func lengthOctet(cdb []byte) int {
	switch cdb[0] {
	case opCompareAndWrite:
		return 13
	case opWriteAtomic16:
		return 12
	}
	return [...]int{4, 7, 7, 0, 10, 6, 0, 0}[cdb[0]>>5]
}

// within tells whether count blocks from lba on are on the unit. An empty
// range may start at its end.
func (u *Unit) within(lba, count uint64) bool { return lba <= u.blocks && count <= u.blocks-lba }

// beginExtent decodes and checks the extent of c, which may cover most octets.
func (u *Unit) beginExtent(c *Command, most uint64) bool {
	c.lba, c.count = extent(c.CDB)
	switch {
	case !u.within(c.lba, c.count) || c.lba == u.blocks:
		return c.fail(condLBARange)
	case c.count > most>>u.shift:
		return c.failCDB(lengthOctet(c.CDB), noField)
	}
	return true
}

// at is the offset in the store of the octet off of a command's data.
func (u *Unit) at(c *Command, off uint64) int64 { return int64(c.lba<<u.shift + off) }

// wantsFUA tells whether the FUA bit of a READ or WRITE is set.
func wantsFUA(cdb []byte) bool { return cdb[0]>>5 != 0 && cdb[1]&fua != 0 }

// read fills p from pos, and write writes p there, with what COMPARE AND WRITE
// and its like do kept apart.
func (u *Unit) read(p []byte, pos int64) error {
	s := stripesOf(pos, int64(len(p)))
	u.ranges.share(s)
	defer u.ranges.unshare(s)
	return u.store.ReadAt(p, pos)
}

func (u *Unit) write(p []byte, pos int64, durable bool) error {
	s := stripesOf(pos, int64(len(p)))
	u.ranges.share(s)
	defer u.ranges.unshare(s)
	return u.writeLocked(p, pos, durable)
}

// Preconditions: the stripes of the range are held.
func (u *Unit) writeLocked(p []byte, pos int64, durable bool) error {
	if u.sanitizer.state.Load() == sanitizeRunning {
		return errSanitizing
	}
	if u.writeThrough() || u.cached() && durable {
		return u.store.WriteDurable(p, pos)
	}
	return u.store.WriteAt(p, pos)
}

// shared calls f, which changes a range, with the same kept apart.
func (u *Unit) shared(pos, n int64, f func(pos, n int64) error) error {
	s := stripesOf(pos, n)
	u.ranges.share(s)
	defer u.ranges.unshare(s)
	if u.sanitizer.state.Load() == sanitizeRunning {
		return errSanitizing
	}
	return f(pos, n)
}

func beginRead(u *Unit, c *Command) bool {
	if !u.beginExtent(c, maxTransfer) {
		return false
	}
	c.DataIn = c.count << u.shift
	if wantsFUA(c.CDB) && u.cached() {
		// FUA asks for what is on the medium, and that it is not older than
		// what the cache has (SBC-3, section 5.8).
		if err := u.store.Sync(); err != nil {
			return c.failWrite(err)
		}
	}
	return true
}

func produceRead(u *Unit, c *Command, p []byte, off uint64) bool {
	if err := u.read(p, u.at(c, off)); err != nil {
		return c.failRead(err)
	}
	return true
}

func beginWrite(u *Unit, c *Command) bool {
	if !u.beginExtent(c, maxTransfer) {
		return false
	}
	c.DataOut = c.count << u.shift
	return true
}

// consumeWrite writes what comes, also if that ends inside a block because the
// initiator sends less than the CDB says: the rest of the block stays as it is.
func consumeWrite(u *Unit, c *Command, p []byte, off uint64) bool {
	if err := u.write(p, u.at(c, off), wantsFUA(c.CDB)); err != nil {
		return c.failWrite(err)
	}
	return true
}

func beginSync(u *Unit, c *Command) bool {
	return u.beginExtent(c, math.MaxInt64)
}

// endSync syncs the whole store, whatever the range, and before the status also
// if IMMED allows it later: a failure could not be reported otherwise.
func endSync(u *Unit, c *Command) {
	if err := u.store.Sync(); err != nil {
		c.failWrite(err)
	}
}

// endPrefetch is PRE-FETCH (SBC-3, section 5.13). It ends with GOOD and never
// with CONDITION MET, which would promise that all blocks stay in the cache.
func endPrefetch(u *Unit, c *Command) {
	n := c.count
	if n == 0 { // to the end of the medium
		n = u.blocks - c.lba
	}
	if err := backend.Prefetch(u.store, u.at(c, 0), int64(n<<u.shift)); err != nil {
		c.failRead(err)
	}
}

// scratch is memory for the commands that read or write more than they are
// sent.
var scratch = sync.Pool{New: func() any { b := make([]byte, 256<<10); return &b }}

// What VERIFY compares the medium with (BYTCHK).
const (
	bytchkNone  = 0
	bytchkAll   = 1
	bytchkBlock = 3 // one block, with every block of the extent
)

func bytchk(cdb []byte) byte { return cdb[1] >> 1 & 3 }

func beginVerify(u *Unit, c *Command) bool {
	if !u.beginExtent(c, maxTransfer) {
		return false
	}
	switch bytchk(c.CDB) {
	case bytchkNone:
	case bytchkAll:
		c.DataOut = c.count << u.shift
	case bytchkBlock:
		if c.count > 0 {
			c.DataOut = uint64(u.info.BlockSize)
		}
	default:
		return c.failCDB(1, 2)
	}
	return true
}

func consumeVerify(u *Unit, c *Command, p []byte, off uint64) bool {
	if bytchk(c.CDB) == bytchkAll {
		return u.compareShared(c, p, u.at(c, off), off)
	}
	if uint64(len(p)) < c.DataOut {
		return true // End refuses it
	}
	for i := range c.count {
		if !u.compareShared(c, p, int64((c.lba+i)<<u.shift), i<<u.shift) {
			return false
		}
	}
	return true
}

// consumeWriteVerify writes to the medium, past the cache, and with BYTCHK
// compares what is there then (SBC-3, section 5.36).
func consumeWriteVerify(u *Unit, c *Command, p []byte, off uint64) bool {
	if err := u.write(p, u.at(c, off), true); err != nil {
		return c.failWrite(err)
	}
	return bytchk(c.CDB) == bytchkNone || u.compareShared(c, p, u.at(c, off), off)
}

// endVerify reads the extent where there is nothing to compare it with.
func endVerify(u *Unit, c *Command) {
	if bytchk(c.CDB) != bytchkNone {
		return
	}
	sp := scratch.Get().(*[]byte)
	defer scratch.Put(sp)
	for off, n := uint64(0), c.count<<u.shift; off < n; {
		p := (*sp)[:min(uint64(len(*sp)), n-off)]
		if err := u.store.ReadAt(p, u.at(c, off)); err != nil {
			c.failRead(err)
			return
		}
		off += uint64(len(p))
	}
}

// compareShared is compare for those that do not hold the range.
func (u *Unit) compareShared(c *Command, p []byte, pos int64, base uint64) bool {
	s := stripesOf(pos, int64(len(p)))
	u.ranges.share(s)
	defer u.ranges.unshare(s)
	return u.compare(c, p, pos, base)
}

// compare ends c with MISCOMPARE if the medium at pos differs from p; base is
// the offset of p for INFORMATION.
func (u *Unit) compare(c *Command, p []byte, pos int64, base uint64) bool {
	sp := scratch.Get().(*[]byte)
	defer scratch.Put(sp)
	for done := 0; done < len(p); {
		part := (*sp)[:min(len(*sp), len(p)-done)]
		if err := u.store.ReadAt(part, pos+int64(done)); err != nil {
			return c.failRead(err)
		}
		want := p[done:][:len(part)]
		if !bytes.Equal(part, want) {
			i := 0
			for part[i] == want[i] {
				i++
			}
			return c.failSense(sense{cond: condMiscompare, field: noField, bit: noField, infoOK: true, info: uint32(base) + uint32(done+i)})
		}
		done += len(part)
	}
	return true
}

// Bits of WRITE SAME, octet 1.
const (
	wsUnmap = 0x08
	wsNDOB  = 0x01 // no data-out: zeros; in 16 octets only
)

func beginWriteSame(u *Unit, c *Command) bool {
	if !u.beginExtent(c, maxWriteSame) {
		return false
	}
	switch {
	case c.count == 0: // WSNZ: "all to the end" is not offered
		return c.failCDB(lengthOctet(c.CDB), noField)
	case c.CDB[1]&wsUnmap != 0 && !u.isThin():
		return c.failCDB(1, 3)
	}
	c.buf = c.buf[:0]
	if c.CDB[1]&wsNDOB == 0 {
		c.DataOut = uint64(u.info.BlockSize)
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
	block := c.buf
	pos, n := u.at(c, 0), int64(c.count<<u.shift)
	var err error
	switch {
	case allZero(block) && c.CDB[1]&wsUnmap != 0:
		err = u.shared(pos, n, u.store.Discard)
	case allZero(block):
		err = u.shared(pos, n, u.store.Zero)
	default:
		err = u.repeat(block, pos, n)
	}
	if err == nil && u.writeThrough() {
		err = u.store.Sync()
	}
	if err != nil {
		c.failWrite(err)
	}
}

// repeat fills n octets at pos with copies of block.
func (u *Unit) repeat(block []byte, pos, n int64) error {
	sp := scratch.Get().(*[]byte)
	defer scratch.Put(sp)
	p := (*sp)[:min(int64(len(*sp)), n)]
	for i := 0; i < len(p); i += len(block) {
		copy(p[i:], block)
	}
	for n > 0 {
		p = p[:min(int64(len(p)), n)]
		if err := u.shared(pos, int64(len(p)), func(pos, _ int64) error { return u.store.WriteAt(p, pos) }); err != nil {
			return err
		}
		pos, n = pos+int64(len(p)), n-int64(len(p))
	}
	return nil
}

func allZero(b []byte) bool {
	for _, x := range b {
		if x != 0 {
			return false
		}
	}
	return true
}

// isThin tells whether the unit gives space back.
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

// consumeUnmap takes the parameter list of UNMAP (SBC-3, section 5.28). All
// descriptors are checked before the first is obeyed.
func consumeUnmap(u *Unit, c *Command, p []byte, _ uint64) bool {
	be := binary.BigEndian
	descs := p[unmapHeader:]
	if n := int(be.Uint16(p[2:])); n > len(descs) {
		return c.fail(condListLength)
	} else {
		descs = descs[:n-n%unmapDesc]
	}
	if len(descs) > maxUnmapDescs*unmapDesc {
		return c.failList(2)
	}
	total := uint64(0)
	for i := 0; i < len(descs); i += unmapDesc {
		lba, count := be.Uint64(descs[i:]), uint64(be.Uint32(descs[i+8:]))
		if !u.within(lba, count) {
			return c.fail(condLBARange)
		}
		if total += count; total > uint64(maxUnmap)>>u.shift {
			return c.failList(unmapHeader + i + 8)
		}
	}
	for i := 0; i < len(descs); i += unmapDesc {
		lba, count := be.Uint64(descs[i:]), uint64(be.Uint32(descs[i+8:]))
		if err := u.shared(int64(lba<<u.shift), int64(count<<u.shift), u.store.Discard); err != nil {
			return c.failWrite(err)
		}
	}
	if u.writeThrough() {
		if err := u.store.Sync(); err != nil {
			return c.failWrite(err)
		}
	}
	return true
}
