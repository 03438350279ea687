package lun

import "encoding/binary"

// Bits of FORMAT UNIT and its parameter list.
const (
	formatProtection = 0xc0 // FMTPINFO
	formatLongList   = 0x20 // LONGLIST
	formatData       = 0x10 // FMTDATA

	formatPattern = 0x08 // IP, in byte 1 of the list
	formatImmed   = 0x02

	formatShortHeader = 4
	formatLongHeader  = 8
)

// beginFormat checks the CDB of FORMAT UNIT (SBC-3, section 5.3). The list has only its header: the medium
// has no defects, and its blocks become zeros.
//
// The protection type is that of the configuration. A FORMAT UNIT that asks for another one is refused, because the unit
// would say something else than its administrator did.
func beginFormat(u *Unit, c *Command) bool {
	if want, usage := u.formatInfo(); c.CDB[1]>>6 != want || usage != 0 && c.CDB[1]&formatData == 0 {
		return c.failCDB(1, 7)
	}
	switch b := c.CDB[1]; {
	case b&formatData == 0:
		// Without a list, CMPLST, LONGLIST and the format of the list mean nothing.
	case b&formatLongList != 0:
		c.DataOut, c.Whole = formatLongHeader, true
	default:
		c.DataOut, c.Whole = formatShortHeader, true
	}
	return true
}

// consumeFormat executes FORMAT UNIT with a parameter list.
func consumeFormat(u *Unit, c *Command, p []byte, _ uint64) bool {
	const protectionUsage = 0x07
	be := binary.BigEndian
	_, usage := u.formatInfo()
	switch {
	case p[0]&protectionUsage != usage:
		return c.failList(0)
	case p[1]&formatPattern != 0:
		return c.failList(1)
	case len(p) == formatShortHeader && be.Uint16(p[2:]) != 0:
		return c.failList(2) // DEFECT LIST LENGTH
	case len(p) == formatLongHeader && p[3] != 0:
		return c.failList(3) // P_I_INFORMATION, PROTECTION INTERVAL EXPONENT
	case len(p) == formatLongHeader && be.Uint32(p[4:]) != 0:
		return c.failList(4) // DEFECT LIST LENGTH
	}
	return u.runJob(c, &sanitizeJob{action: formatUnit}, p[1]&formatImmed != 0)
}

// endFormat executes FORMAT UNIT without a parameter list.
func endFormat(u *Unit, c *Command) {
	if c.DataOut == 0 {
		u.runJob(c, &sanitizeJob{action: formatUnit}, false)
	}
}

// formatStep is how many bytes format erases at a time.
const formatStep = 16 << 20

// format makes all blocks zeros. The medium gives their space back if it can.
func (u *Unit) format() error {
	step := int64(formatStep)
	if g := int64(u.info.DiscardGranularity); g > step {
		step = g
	}
	size := u.Size()
	for off := int64(0); off < size; off += step {
		n := min(step, size-off)
		err := u.inSanitize(heavyStep(0), func() error {
			switch {
			case u.protected != nil:
				return u.storeFormat(off, n)
			case u.isThin():
				return u.storeDiscard(off, n)
			}
			return u.storeZero(off, n)
		})
		if err == nil {
			err = u.sanitizer.step(off, size, 0, 1)
		}
		if err != nil {
			return err
		}
	}
	return u.sanitizeSync()
}

// failure returns the sense data of the command whose job fails.
func (j *sanitizeJob) failure() Sense {
	if j.action == formatUnit {
		return condFormatFailed
	}
	return condSanitizeFailed
}

// failure returns why the medium is not accessible after a job that failed. A new FORMAT UNIT makes it accessible
// again if that was a FORMAT UNIT.
func (s *sanitizer) failure() Sense {
	if s.formats.Load() {
		return condFormatCorrupted
	}
	return condSanitizeFailed
}
