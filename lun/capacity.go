package lun

import (
	"encoding/binary"

	"github.com/iser-target/iser-target/backend/protection"
)

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
	const pmi = 0x01
	if binary.BigEndian.Uint64(c.CDB[2:]) != 0 && c.CDB[14]&pmi == 0 {
		return c.failCDB(2, noField)
	}
	b := c.zeroed(capacity16Len)
	u.putCapacity16(b)
	return c.report(b, binary.BigEndian.Uint32(c.CDB[10:]))
}

// capacity16Len is the length in bytes of the parameter data of READ CAPACITY(16).
const capacity16Len = 32

// putCapacity16 fills in the parameter data of READ CAPACITY(16).
func (u *Unit) putCapacity16(b []byte) {
	const lbpme, lbprz = 0x80, 0x40
	binary.BigEndian.PutUint64(b, u.blocks.Load()-1)
	binary.BigEndian.PutUint32(b[8:], u.info.BlockSize)
	if u.protection != protection.None {
		const protEn = 0x01
		b[12] = byte(u.protection-1)<<1 | protEn // P_TYPE; P_I_EXPONENT is 0
	}
	for per := u.info.PhysicalBlockSize >> u.shift; per > 1; per >>= 1 {
		b[13]++ // LOGICAL BLOCKS PER PHYSICAL BLOCK EXPONENT
	}
	if u.isThin() {
		b[14] = lbpme | lbprz
	}
}

const (
	lbaStatusHeader = 8
	lbaStatusDesc   = 16
	maxLBAStatus    = 256 // descriptors in one answer

	statusMapped      = 0
	statusDeallocated = 1
)

// getLBAStatus executes GET LBA STATUS (SBC-3, section 5.4): where the store has data and where
// it has holes.
func getLBAStatus(u *Unit, c *Command) bool {
	be := binary.BigEndian
	lba, allocation := be.Uint64(c.CDB[2:]), be.Uint32(c.CDB[10:])
	blocks := u.blocks.Load()
	if lba >= blocks {
		return c.failRange(lba)
	}
	b := c.zeroed(lbaStatusHeader)
	// The initiator would not see more descriptors than it has room for.
	descriptors := min(max(int(allocation)-lbaStatusHeader, lbaStatusDesc)/lbaStatusDesc, maxLBAStatus)
	for range descriptors {
		if lba == blocks {
			break
		}
		mapped, n, err := u.blockStatus(c, lba)
		if err != nil {
			return c.readDone(err)
		}
		if n == 0 { // the unit became smaller
			break
		}
		d := [lbaStatusDesc]byte{12: statusMapped}
		if !mapped {
			d[12] = statusDeallocated
		}
		be.PutUint64(d[:], lba)
		be.PutUint32(d[8:], n)
		b = append(b, d[:]...)
		lba += uint64(n)
	}
	be.PutUint32(b, uint32(len(b)-4))
	return c.report(b, allocation)
}

// blockStatus reports whether the block takes space, and how many blocks from there on have the
// same answer.
func (u *Unit) blockStatus(c *Command, lba uint64) (mapped bool, n uint32, err error) {
	const limit = 1<<32 - 1 // of the descriptor
	blocks := u.blocks.Load()
	for first := lba; lba < blocks; {
		m, octets, err := u.extent(c, int64(lba<<u.shift))
		if err != nil {
			return false, 0, err
		}
		blocks := uint64(octets) >> u.shift
		if blocks == 0 { // begins and ends within the block: some of it takes space
			m, blocks = true, 1
		} else if m && octets&int64(u.info.BlockSize-1) != 0 {
			blocks++
		}
		if lba != first && m != mapped {
			break
		}
		mapped = m
		lba += blocks
		if n = uint32(min(lba-first, limit)); n == limit {
			break
		}
	}
	return mapped, n, nil
}

// readDefectData10 executes READ DEFECT DATA(10) (SBC-3, section 5.17). The list is empty, in any
// format.
func readDefectData10(_ *Unit, c *Command) bool {
	b := c.zeroed(4)
	b[1] = c.CDB[2] // REQ_PLIST, REQ_GLIST and format become PLISTV, GLISTV and format
	return c.report(b, uint32(binary.BigEndian.Uint16(c.CDB[7:])))
}

// readDefectData12 executes READ DEFECT DATA(12) (SBC-3, section 5.18).
func readDefectData12(_ *Unit, c *Command) bool {
	b := c.zeroed(8)
	b[1] = c.CDB[1]
	return c.report(b, binary.BigEndian.Uint32(c.CDB[6:]))
}
