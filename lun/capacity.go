package lun

import "encoding/binary"

// readCapacity10 executes READ CAPACITY(10) (SBC-3, section 5.15).
func readCapacity10(u *Unit, c *Command) bool {
	const pmi = 0x01
	if binary.BigEndian.Uint32(c.CDB[2:]) != 0 && c.CDB[8]&pmi == 0 {
		return c.failCDB(2, noField)
	}
	b := c.zeroed(8)
	binary.BigEndian.PutUint32(b, uint32(min(u.blocks.Load()-1, maxShortCapacity)))
	binary.BigEndian.PutUint32(b[4:], u.info.BlockSize)
	return c.report(b, uint32(len(b)))
}

// readCapacity16 executes READ CAPACITY(16) (SBC-3, section 5.16).
func readCapacity16(u *Unit, c *Command) bool {
	const pmi, lbpme, lbprz = 0x01, 0x80, 0x40
	if binary.BigEndian.Uint64(c.CDB[2:]) != 0 && c.CDB[14]&pmi == 0 {
		return c.failCDB(2, noField)
	}
	b := c.zeroed(32)
	binary.BigEndian.PutUint64(b, u.blocks.Load()-1)
	binary.BigEndian.PutUint32(b[8:], u.info.BlockSize)
	for per := u.info.PhysicalBlockSize >> u.shift; per > 1; per >>= 1 {
		b[13]++ // LOGICAL BLOCKS PER PHYSICAL BLOCK EXPONENT
	}
	if u.isThin() {
		b[14] = lbpme | lbprz
	}
	return c.report(b, binary.BigEndian.Uint32(c.CDB[10:]))
}
