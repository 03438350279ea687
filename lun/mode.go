package lun

import "encoding/binary"

// modePages are the mode pages that MODE SENSE returns, in order. None of
// their values can be changed.
var modePages = []struct {
	code byte
	size int // octets, header of two included
	put  func(u *Unit, p []byte)
}{
	{0x01, 12, func(_ *Unit, p []byte) { p[2] = 0xc0 }}, // Read-Write Error Recovery: AWRE, ARRE
	{0x08, 20, func(u *Unit, p []byte) { // Caching
		if u.cached {
			p[2] = 0x04 // WCE
		}
	}},
	{0x0a, 12, func(_ *Unit, p []byte) { // Control
		p[2] = 0x02                               // GLTSD
		p[3] = 0x10                               // QUEUE ALGORITHM MODIFIER: unrestricted reordering
		binary.BigEndian.PutUint16(p[8:], 0xffff) // BUSY TIMEOUT PERIOD: unlimited
	}},
	{0x1c, 12, func(_ *Unit, p []byte) { p[2] = 0x08 }}, // Informational Exceptions Control: DEXCPT
}

const (
	allPages    = 0x3f
	allSubpages = 0xff

	pageControlChangeable = 1
	pageControlSaved      = 3

	dbd, llbaa       = 0x08, 0x10
	wp, dpofua       = 0x80, 0x10
	longLBA          = 0x01
	shortDesc        = 8
	longDesc         = 16
	opModeSense6     = 0x1a
	modeHeader6Len   = 4
	modeHeader10Len  = 8
	maxShortCapacity = 1<<32 - 1
)

// modeSense is MODE SENSE(6) and MODE SENSE(10) (SPC-4, sections 6.11 and
// 6.12).
func modeSense(u *Unit, c *Command) bool {
	cdb := c.CDB
	six := cdb[0] == opModeSense6
	allocation := uint32(binary.BigEndian.Uint16(cdb[7:]))
	header := modeHeader10Len
	if six {
		allocation, header = uint32(cdb[4]), modeHeader6Len
	}
	control, page, subpage := cdb[2]>>6, cdb[2]&0x3f, cdb[3]
	if control == pageControlSaved {
		return c.fail(condNoSavedPages)
	}
	if subpage != 0 && subpage != allSubpages {
		return c.failCDB(3, noField)
	}
	b := c.zeroed(header)
	specific := byte(dpofua)
	if u.readOnly {
		specific |= wp
	}
	if cdb[1]&dbd == 0 {
		n := shortDesc
		if !six && cdb[1]&llbaa != 0 {
			n = longDesc
		}
		b = append(b, make([]byte, n)...)
		d := b[header:]
		if n == longDesc {
			binary.BigEndian.PutUint64(d, u.blocks)
			binary.BigEndian.PutUint32(d[12:], u.info.BlockSize)
			b[4] = longLBA
		} else {
			binary.BigEndian.PutUint32(d[4:], u.info.BlockSize)
			binary.BigEndian.PutUint32(d, uint32(min(u.blocks, maxShortCapacity)))
		}
		if b[header-1] = byte(n); !six {
			binary.BigEndian.PutUint16(b[6:], uint16(n))
		}
	}
	found := false
	for _, m := range modePages {
		if page != m.code && page != allPages {
			continue
		}
		found = true
		at := len(b)
		b = append(b, make([]byte, m.size)...)
		p := b[at:]
		p[0], p[1] = m.code, byte(m.size-2)
		if control != pageControlChangeable {
			m.put(u, p)
		}
	}
	if !found {
		return c.failCDB(2, 5)
	}
	if six {
		b[0], b[2] = byte(len(b)-1), specific
	} else {
		binary.BigEndian.PutUint16(b, uint16(len(b)-2))
		b[3] = specific
	}
	return c.report(b, allocation)
}

// readCapacity10 is READ CAPACITY(10) (SBC-3, section 5.15).
func readCapacity10(u *Unit, c *Command) bool {
	const pmi = 0x01
	if binary.BigEndian.Uint32(c.CDB[2:]) != 0 && c.CDB[8]&pmi == 0 {
		return c.failCDB(2, noField)
	}
	b := c.zeroed(8)
	binary.BigEndian.PutUint32(b, uint32(min(u.blocks-1, maxShortCapacity)))
	binary.BigEndian.PutUint32(b[4:], u.info.BlockSize)
	return c.report(b, uint32(len(b)))
}

// readCapacity16 is READ CAPACITY(16) (SBC-3, section 5.16).
func readCapacity16(u *Unit, c *Command) bool {
	const pmi, lbpme, lbprz = 0x01, 0x80, 0x40
	if binary.BigEndian.Uint64(c.CDB[2:]) != 0 && c.CDB[14]&pmi == 0 {
		return c.failCDB(2, noField)
	}
	b := c.zeroed(32)
	binary.BigEndian.PutUint64(b, u.blocks-1)
	binary.BigEndian.PutUint32(b[8:], u.info.BlockSize)
	for per := u.info.PhysicalBlockSize >> u.shift; per > 1; per >>= 1 {
		b[13]++ // LOGICAL BLOCKS PER PHYSICAL BLOCK EXPONENT
	}
	if u.isThin() {
		b[14] = lbpme | lbprz
	}
	return c.report(b, binary.BigEndian.Uint32(c.CDB[10:]))
}

// requestSense is REQUEST SENSE (SPC-4, section 6.39): it returns a unit
// attention that waits, or the state of the unit.
func requestSense(u *Unit, c *Command) bool {
	s := sense{cond: condNone, field: noField, bit: noField, descType: c.CDB[1]&1 != 0}
	if u == nil {
		s.cond = condNoLUN
	} else if k, ok := c.itl.takeAttention(); ok {
		s.cond = k
	} else if u.stopped.Load() {
		s.cond = condNotReadyStopped
	}
	return c.report(s.put(c.zeroed(senseLen)), uint32(c.CDB[4]))
}

// startStop is START STOP UNIT (SBC-3, section 5.25). The medium is not
// removable, and there are no power conditions. NO_FLUSH may be set but saves
// nothing: a stop syncs in any case.
func startStop(_ *Unit, _ *Command) bool { return true }

func endStartStop(u *Unit, c *Command) {
	const start = 0x01
	if c.CDB[4]&start != 0 {
		u.stopped.Store(false)
		return
	}
	if err := u.store.Sync(); err != nil {
		c.failWrite(err)
		return
	}
	u.stopped.Store(true)
}
