package lun

import (
	"encoding/binary"

	"github.com/iser-target/iser-target/backend"
)

const (
	lbaStatusHeader = 8
	lbaStatusDesc   = 16
	maxLBAStatus    = 256 // descriptors in one answer

	statusMapped      = 0
	statusDeallocated = 1
)

// getLBAStatus is GET LBA STATUS (SBC-3, section 5.4): where the store has data
// and where it has holes.
func getLBAStatus(u *Unit, c *Command) bool {
	be := binary.BigEndian
	lba, allocation := be.Uint64(c.CDB[2:]), be.Uint32(c.CDB[10:])
	blocks := u.blocks.Load()
	if lba >= blocks {
		return c.failRange(lba)
	}
	b := c.zeroed(lbaStatusHeader)
	// One descriptor more than there is room for would not be seen.
	most := min(max(int(allocation)-lbaStatusHeader, lbaStatusDesc)/lbaStatusDesc, maxLBAStatus)
	for range most {
		if lba == blocks {
			break
		}
		mapped, n, err := u.blockStatus(lba)
		if err != nil {
			return c.failRead(err)
		}
		if n == 0 { // the unit has been made smaller
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

// blockStatus tells whether the block takes space, for it and those that follow it
// with the same answer, of which there are n in all.
func (u *Unit) blockStatus(lba uint64) (mapped bool, n uint32, err error) {
	const most = 1<<32 - 1 // what the descriptor can say
	blocks := u.blocks.Load()
	for first := lba; lba < blocks; {
		m, octets, err := backend.Extent(u.store, int64(lba<<u.shift))
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
		if n = uint32(min(lba-first, most)); n == most {
			break
		}
	}
	return mapped, n, nil
}

// readDefectData10 and readDefectData12 are READ DEFECT DATA(10) and (12)
// (SBC-3, sections 5.17 and 5.18). There are no defects, in any format.
func readDefectData10(_ *Unit, c *Command) bool {
	b := c.zeroed(4)
	b[1] = c.CDB[2] // REQ_PLIST, REQ_GLIST and format become PLISTV, GLISTV and format
	return c.report(b, uint32(binary.BigEndian.Uint16(c.CDB[7:])))
}

func readDefectData12(_ *Unit, c *Command) bool {
	b := c.zeroed(8)
	b[1] = c.CDB[1]
	return c.report(b, binary.BigEndian.Uint32(c.CDB[6:]))
}
