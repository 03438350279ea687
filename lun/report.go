package lun

import "encoding/binary"

// portGroup is the only target port group there is.
const portGroup = 1

// reportPortGroups is REPORT TARGET PORT GROUPS (SPC-4, section 6.37): one group,
// active/optimized, with one port.
func reportPortGroups(_ *Unit, c *Command) bool {
	const (
		formatMask, formatExtended = 0xe0, 0x20
		activeOptimized            = 0x00
		supportsActiveOptimized    = 0x01 // AO_SUP
	)
	b := append(c.buf[:0], 0, 0, 0, 0)
	if c.CDB[1]&formatMask == formatExtended {
		b = append(b, formatExtended>>1, 0, 0, 0) // RETURN DATA FORMAT 001b, no transitions
	}
	b = append(b, activeOptimized, supportsActiveOptimized, 0, portGroup, 0, 0, 0, 1, // one port
		0, 0, 0, relativePort)
	binary.BigEndian.PutUint32(b, uint32(len(b)-4))
	return c.report(b, binary.BigEndian.Uint32(c.CDB[6:]))
}

// logPages are the log pages, in order. A page appends what follows its header.
var logPages = []struct {
	code   byte
	append func(b []byte) []byte
}{
	{0x00, nil}, // Supported Log Pages
	{0x2f, func(b []byte) []byte { // Informational Exceptions: nothing to report, temperature unknown
		return append(b, 0, 0, 0x03, 4, 0, 0, 0xff, 0)
	}},
}

// logSense is LOG SENSE (SPC-4, section 6.7) for cumulative values; there are
// no others that differ from them.
func logSense(_ *Unit, c *Command) bool {
	code, subpage := c.CDB[2]&0x3f, c.CDB[3]
	pointer := binary.BigEndian.Uint16(c.CDB[5:])
	allocation := uint32(binary.BigEndian.Uint16(c.CDB[7:]))
	if subpage != 0 && (subpage != allSubpages || code != 0) {
		return c.failCDB(3, noField)
	}
	for _, page := range logPages {
		if page.code != code {
			continue
		}
		if pointer != 0 { // beyond the last parameter
			return c.failCDB(5, noField)
		}
		b := append(c.buf[:0], code, subpage, 0, 0)
		switch {
		case page.append != nil:
			b = page.append(b)
		case subpage == 0:
			for _, p := range logPages {
				b = append(b, p.code)
			}
		default: // Supported Log Pages and Subpages
			b[0] |= 0x40 // SPF
			b = append(b, 0x00, 0x00, 0x00, allSubpages)
			for _, p := range logPages[1:] {
				b = append(b, p.code, 0)
			}
		}
		binary.BigEndian.PutUint16(b[2:], uint16(len(b)-4))
		return c.report(b, allocation)
	}
	return c.failCDB(2, 5)
}
