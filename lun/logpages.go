package lun

import (
	"encoding/binary"
	"maps"
	"math"
)

// A logPage is a log page with the subpage code 00h.
type logPage struct {
	code     byte
	has      func(u *Unit, c *Command) bool             // reports whether the unit has the page; nil: all have it
	append   func(u *Unit, c *Command, b []byte) []byte // appends its parameters, in the order of their codes
	counters bool                                       // LOG SELECT resets its data counters
}

// Page codes of the log pages with data counters.
const (
	logWriteErrors = 0x02
	logReadErrors  = 0x03
	logStatistics  = 0x19
)

// logPages are the log pages, in order.
var logPages = []logPage{
	{code: 0x00}, // Supported Log Pages
	{code: logWriteErrors, counters: true, append: func(u *Unit, _ *Command, b []byte) []byte {
		return u.appendErrorCounters(b, logWriteErrors, KindWrite)
	}},
	{code: logReadErrors, counters: true, append: func(u *Unit, _ *Command, b []byte) []byte {
		return u.appendErrorCounters(b, logReadErrors, KindRead)
	}},
	{code: 0x0c, has: (*Unit).knowsResources, append: (*Unit).appendResources},
	{code: logStatistics, counters: true, append: (*Unit).appendStatistics},
	{code: 0x2f, append: func(_ *Unit, _ *Command, b []byte) []byte { // Informational Exceptions: nothing to report, temperature unknown
		return append(b, 0, 0, logList, 4, 0, 0, 0xff, 0)
	}},
}

// Values of the control byte of a log parameter (SPC-4, section 7.3.2.2.2).
const (
	logIsList  = 0x01             // FORMAT AND LINKING is that of a list, not of a data counter
	logList    = 0x02 | logIsList // binary format list
	logCounter = 0x20 | 0x02      // data counter that is not saved (TSD) and compared with no threshold (ETC 0)
)

// logHeader is the length of the header of a log page, and of a log parameter.
const logHeader = 4

// appendLogCounters appends a log parameter of counters.
func appendLogCounters(b []byte, code uint16, counters ...uint64) []byte {
	b = binary.BigEndian.AppendUint16(b, code)
	b = append(b, logCounter, byte(8*len(counters)))
	for _, n := range counters {
		b = binary.BigEndian.AppendUint64(b, n)
	}
	return b
}

// logCounts are the counts of a unit over all transports.
type logCounts struct{ commands, bytes, mediumErrors [Kinds]uint64 }

// logBases has what was counted when LOG SELECT last reset a page, by its code. A page reports what was counted since then, and
// metrics continue.
type logBases map[byte]logCounts

// counted returns what was counted of the unit since it opened.
func (u *Unit) counted() (sum logCounts) {
	for _, c := range u.Counts() {
		for k := range Kinds {
			sum.commands[k] += c.Commands[k]
			sum.bytes[k] += c.Bytes[k]
			sum.mediumErrors[k] += c.MediumErrors[k]
		}
	}
	return sum
}

// countedSince returns what was counted since LOG SELECT last reset that page.
func (u *Unit) countedSince(page byte) logCounts {
	base := u.loggedSince()[page] // first: counters only grow
	sum := u.counted()
	for k := range Kinds {
		sum.commands[k] -= base.commands[k]
		sum.bytes[k] -= base.bytes[k]
		sum.mediumErrors[k] -= base.mediumErrors[k]
	}
	return sum
}

// loggedSince returns the logBases of now, which do not change.
func (u *Unit) loggedSince() logBases {
	if p := u.logBases.Load(); p != nil {
		return *p
	}
	return nil
}

// appendErrorCounters appends an error counter page (SPC-4, section 7.3.6). It leaves out what
// the store corrected, because the unit does not know it.
func (u *Unit) appendErrorCounters(b []byte, page byte, kind Kind) []byte {
	const bytesProcessed, uncorrected = 0x0005, 0x0006
	sum := u.countedSince(page)
	b = appendLogCounters(b, bytesProcessed, sum.bytes[kind])
	return appendLogCounters(b, uncorrected, sum.mediumErrors[kind])
}

// appendStatistics appends the General Statistics and Performance page (SPC-4, section 7.3.9). It
// counts commands and blocks. The unit does not measure intervals of time, so these are 0, as in
// drives that do not either.
func (u *Unit) appendStatistics(_ *Command, b []byte) []byte {
	const access, idle, interval = 0x0001, 0x0002, 0x0003
	sum := u.countedSince(logStatistics)
	b = appendLogCounters(b, access, sum.commands[KindRead], sum.commands[KindWrite],
		sum.bytes[KindWrite]>>u.shift, sum.bytes[KindRead]>>u.shift, 0, 0, 0, 0)
	b = appendLogCounters(b, idle, 0)
	return append(b, 0, interval, logList, 8,
		0, 0, 0, 3, // the interval is 10^-3 s
		0, 0, 0, 1)
}

// knowsResources reports whether the unit has the Logical Block Provisioning page: the store
// knows how much space it takes.
func (u *Unit) knowsResources(c *Command) bool {
	_, _, err := u.usage(c)
	return err == nil && u.hasThresholds()
}

// appendResources appends the Logical Block Provisioning page (SBC-3, section 6.4.5). It counts threshold sets.
func (u *Unit) appendResources(c *Command, b []byte) []byte {
	const available, used = 0x0001, 0x0002
	const dedicated, shared = 1, 2 // SCOPE
	taken, free, err := u.usage(c)
	if err != nil {
		return b
	}
	resource := func(code uint16, octets int64, scope byte) {
		b = binary.BigEndian.AppendUint16(b, code)
		b = append(b, logList, 8)
		b = binary.BigEndian.AppendUint32(b, uint32(min(uint64(octets)>>u.setShift(), math.MaxUint32)))
		b = append(b, scope, 0, 0, 0)
	}
	resource(available, free, shared)
	resource(used, min(taken, u.Size())+1<<u.setShift()-1, dedicated) // rounded up
	return b
}

// logSense executes LOG SENSE (SPC-4, section 6.7).
func logSense(u *Unit, c *Command) bool {
	const ds, spf = 0x80, 0x40
	const cumulative = 0b01 // PC
	pc, code, subpage := c.CDB[2]>>6, c.CDB[2]&0x3f, c.CDB[3]
	pointer := binary.BigEndian.Uint16(c.CDB[5:])
	allocation := uint32(binary.BigEndian.Uint16(c.CDB[7:]))
	if subpage != 0 && subpage != allSubpages {
		return c.failCDB(3, noField)
	}
	b := append(c.buf[:0], code, subpage, 0, 0)
	known := false
	for _, page := range logPages {
		if page.has != nil && !page.has(u, c) {
			continue
		}
		known = known || page.code == code
		switch {
		case subpage != 0 && (code == 0 || page.code == code):
			// Supported Log Pages and Subpages, or Supported Subpages
			b = append(b, page.code, 0, page.code, allSubpages)
		case subpage == 0 && code == 0:
			b = append(b, page.code)
		case subpage == 0 && page.code == code:
			b[0] |= ds
			b = page.append(u, c, b)
			if pc != cumulative {
				clearCounters(b[logHeader:])
			}
		}
	}
	if !known {
		return c.failCDB(2, 5)
	}
	if subpage != 0 {
		b[0] |= spf
	}
	if pointer != 0 && (b[0]&ds == 0 || !skipParameters(&b, pointer)) {
		return c.failCDB(5, noField)
	}
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)-logHeader))
	return c.report(b, allocation)
}

// logSelect executes LOG SELECT (SPC-4, section 6.6). It resets the data counters of a page, or of all pages, for all initiators. A
// parameter list, and SP, which saves parameters, are no bits of its usage. Thresholds are 0, and so they are after a reset.
func logSelect(u *Unit, c *Command) bool {
	const pcr = 0x02
	const cumulative, defaultCumulative = 0b01, 0b11 // PC
	pc, code, subpage := c.CDB[2]>>6, c.CDB[2]&0x3f, c.CDB[3]
	if subpage != 0 && subpage != allSubpages {
		return c.failCDB(3, noField)
	}
	var reset []byte
	known := code == 0 // all pages
	for _, page := range logPages {
		if (page.code == code || code == 0) && (page.has == nil || page.has(u, c)) {
			known = true
			if page.counters {
				reset = append(reset, page.code)
			}
		}
	}
	if !known {
		return c.failCDB(2, 5)
	}
	resets := pc == defaultCumulative || pc == cumulative && c.CDB[1]&pcr != 0
	if !resets || len(reset) == 0 {
		return true
	}
	for {
		old := u.logBases.Load()
		next := maps.Clone(u.loggedSince())
		if next == nil {
			next = logBases{}
		}
		now := u.counted()
		for _, code := range reset {
			next[code] = now
		}
		if u.logBases.CompareAndSwap(old, &next) {
			break
		}
	}
	u.raise(condLogChanged, c.nexus)
	return true
}

// clearCounters sets data counters to the value of all that are not cumulative: thresholds are 0,
// which is never compared with, and so are defaults. Lists have no such values and stay (SPC-4,
// sections 6.6.1 and 6.7).
func clearCounters(parameters []byte) {
	for p := parameters; len(p) > 0; {
		end := logHeader + int(p[3])
		if p[2]&logIsList == 0 {
			clear(p[logHeader:end])
		}
		p = p[end:]
	}
}

// skipParameters removes the parameters with codes below first from a log page. It returns false
// if no others are left.
func skipParameters(page *[]byte, first uint16) bool {
	b := *page
	p := b[logHeader:]
	for len(p) > 0 && binary.BigEndian.Uint16(p) < first {
		p = p[logHeader+int(p[3]):]
	}
	*page = append(b[:logHeader], p...)
	return len(p) > 0
}
