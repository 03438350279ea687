package lun

import (
	"encoding/binary"
	"math"
	"slices"

	"github.com/iser-target/iser-target/backend/protection"
	"github.com/iser-target/iser-target/lun/invariant"
)

// Mode parameters that can have another value than the default one.
const (
	modeWCE       uint32 = 1 << iota // the volatile cache may be used
	modeSWP                          // software write protect
	modeDSense                       // sense data in descriptor format
	modeTST                          // TST 001b: each I_T nexus has a task set of its own
	modeLBPERE                       // reached thresholds are unit attentions: see thresholds.go
	modeSITUA                        // for one nexus
	modeAvailable                    // the threshold of available space is enabled
	modeUsed                         // so is that of used space
	modeATO                          // initiators own the application tags: what they write is kept
	modeATMPE                        // the Application Tag mode page is enabled: see apptags.go
)

// modeNames are the names of the settings that mode parameters are, in the order of Settings.
var modeNames = []struct {
	mode uint32
	name string
}{
	{modeSWP, settingWriteProtect},
	{modeWCE, settingWriteCache},
	{modeDSense, settingDescriptorSense},
	{modeTST, settingTaskSets},
	{modeLBPERE, settingThresholdReports},
	{modeSITUA, settingThresholdSingle},
	{modeATMPE, settingAppTags},
}

// initModes sets the default modes, and those that initiators can change. A cache
// that does not exist, or that options forbid, cannot be enabled.
func (u *Unit) initModes() {
	info, o := u.info, u.opt
	set, mutable := uint32(0), modeSWP|modeDSense|modeTST
	if info.VolatileCache && !o.WriteThrough {
		set |= modeWCE
		mutable |= modeWCE
	}
	modes, l := u.defaultThresholds()
	if u.hasThresholds() {
		mutable |= provisioningModes
	}
	if u.protected != nil {
		set |= modeATO
		mutable |= modeATMPE
	}
	u.modeMutable = mutable
	u.modeDefault.Store(set | modes)
	u.levelsDefault.Store(uint64(l))
}

// A modeValues has all mode parameters that can have another value than the default one.
type modeValues struct {
	modes  uint32
	levels levels
	tags   protection.AppTags
}

// current returns the mode parameters of now.
func (u *Unit) current() modeValues {
	return modeValues{u.mode.Load(), levels(u.levels.Load()), tagsOf(&u.tags)}
}

// saved returns the mode parameters after a reset.
func (u *Unit) saved() modeValues {
	return modeValues{u.modeSaved.Load(), levels(u.levelsSaved.Load()), tagsOf(&u.tagsSaved)}
}

// defaults returns the mode parameters that nobody has changed.
func (u *Unit) defaults() modeValues {
	return modeValues{modes: u.modeDefault.Load(), levels: levels(u.levelsDefault.Load())}
}

// A modeList is what the pages of a MODE SELECT set.
type modeList struct {
	touched uint32 // the modes that they have
	values  modeValues
	levels  bool // they have the thresholds
	tags    bool // they have the application tags
}

// over returns v with what s sets.
func (s *modeList) over(v modeValues) modeValues {
	v.modes = v.modes&^s.touched | s.values.modes&s.touched
	if s.levels {
		v.levels = s.values.levels
	}
	if s.tags {
		v.tags = s.values.tags
	}
	return v
}

// saveModes stores for c the mode parameters for the time after a reset or a restart: those of now, with what sent sets. If that fails it ends
// c and returns false.
func (u *Unit) saveModes(c *Command, sent modeList) bool {
	p, err := u.settings.take(c, u.opt.Settings)
	if err != nil {
		return c.failStore(err)
	}
	defer u.settings.give()
	v := sent.over(u.current())
	err = u.keep(p, func(e settingsEntry) settingsEntry {
		e.Mode = u.newModeEntry(v)
		return e
	}, func(settingsEntry) { u.setSaved(v) })
	if err != nil {
		return c.failStore(err)
	}
	return true
}

// selectShared executes a MODE SELECT whose pages are those of all gateways. Those that it does not have are as the last gateway has left
// them.
func (c *Command) selectShared(sent modeList) bool {
	u := c.unit
	p, err := u.settings.take(c, u.opt.Settings)
	if err != nil {
		return c.failStore(err)
	}
	var old, now modeValues
	err = u.keep(p, func(e settingsEntry) settingsEntry {
		e.Mode = u.newModeEntry(sent.over(u.modesOf(e.Mode)))
		return e
	}, func(e settingsEntry) { old, now, _ = u.adopt(e, c.nexus) })
	u.settings.give()
	if err != nil {
		return c.failStore(err)
	}
	c.changedValues(old, now)
	if now.modes&^old.modes&modeSWP != 0 { // the writes that began before end before GOOD; each is durable
		u.ranges.exclude(allStripes).release()
	}
	return true
}

// changedValues calls changed for the mode parameters that differ.
func (c *Command) changedValues(old, now modeValues) {
	c.changedModes(old.modes, now.modes)
	c.changedThresholds(old.modes, now.modes, old.levels, now.levels)
	if now.tags != old.tags {
		c.changed(settingAppTagRanges, tagsText(now.tags))
	}
}

// newModeEntry returns the record of saved mode parameters.
func (u *Unit) newModeEntry(v modeValues) *modeEntry {
	return &modeEntry{
		WCE: v.modes&modeWCE != 0, SWP: v.modes&modeSWP != 0,
		DescriptorSense: v.modes&modeDSense != 0, SeparateTaskSets: v.modes&modeTST != 0,
		Thresholds: u.newThresholdsEntry(v.modes, v.levels), AppTags: newAppTagsEntry(v.modes, v.tags),
	}
}

func (e *modeEntry) modes() (modes uint32) {
	for _, has := range []struct {
		mode uint32
		set  bool
	}{{modeWCE, e.WCE}, {modeSWP, e.SWP}, {modeDSense, e.DescriptorSense}, {modeTST, e.SeparateTaskSets}} {
		if has.set {
			modes |= has.mode
		}
	}
	return modes
}

// cached reports whether writes may be lost until a sync (WCE).
func (u *Unit) cached() bool { return u.info.VolatileCache && u.mode.Load()&modeWCE != 0 }

// writeThrough reports whether writes have to be durable before their status, or they may be
// lost. Without a volatile cache, both are false.
func (u *Unit) writeThrough() bool { return u.info.VolatileCache && u.mode.Load()&modeWCE == 0 }

// modePages are the mode pages that MODE SENSE returns, in order.
var modePages = []modePage{
	{code: 0x01, size: 12, fixed: func(p []byte) { p[2] = 0xc0 }, bits: []modeBit{{7, 0x80, modeLBPERE}}}, // Read-Write Error Recovery: AWRE, ARRE
	{code: 0x08, size: 20, bits: []modeBit{{2, 0x04, modeWCE}}},                                           // Caching
	{code: 0x0a, size: 12, fixed: func(p []byte) { // Control
		p[2] |= 0x02                              // GLTSD
		p[3] = 0x10                               // QUEUE ALGORITHM MODIFIER: unrestricted reordering
		p[5] |= 0x40                              // TAS: an initiator that clears it makes commands of others vanish
		binary.BigEndian.PutUint16(p[8:], 0xffff) // BUSY TIMEOUT PERIOD: unlimited
	}, bits: []modeBit{{2, 0x20, modeTST}, {2, 0x04, modeDSense}, {4, 0x08, modeSWP}, {5, 0x80, modeATO}, {5, 0x20, modeATMPE}}},
	{code: 0x0a, subpage: 0x02, size: tagPageLen, has: (*Unit).hasAppTags, tags: true}, // Application Tag
	{code: 0x1c, size: 12, fixed: func(p []byte) { p[2] = 0x08 }},                      // Informational Exceptions Control: DEXCPT
	{code: 0x1c, subpage: 0x02, size: thresholdPageLen, has: (*Unit).hasThresholds, levels: true, // Logical Block Provisioning
		bits: []modeBit{{4, 0x01, modeSITUA}, {thresholdHeader, 0x80, modeAvailable}, {thresholdHeader + thresholdDescriptor, 0x80, modeUsed}}},
}

type modePage struct {
	code    byte
	subpage byte             // 0: the page has no subpage code
	size    int              // bytes, including a header of two, or four with a subpage code
	has     func(*Unit) bool // reports whether the unit has the page; nil: all have it
	fixed   func(p []byte)   // sets what never changes
	bits    []modeBit        // what can change
	levels  bool             // the page has the thresholds, which can change, too
	tags    bool             // the page has the application tags, which can change
}

// is reports whether u has the page, and it is one of those that the codes ask for.
func (m *modePage) is(u *Unit, code, subpage byte) bool {
	return (code == allPages || code == m.code) && (subpage == allSubpages || subpage == m.subpage) && (m.has == nil || m.has(u))
}

// putHeader writes the header of the page to p, and zeros behind it.
func (m *modePage) putHeader(p []byte) {
	clear(p)
	if p[0], p[1] = m.code, byte(m.size-2); m.subpage != 0 {
		p[0], p[1] = m.code|spf, m.subpage
		binary.BigEndian.PutUint16(p[2:], uint16(m.size-4))
	}
}

// A modeBit is the bit of a byte of a page that is set when mode is.
type modeBit struct {
	offset int
	bit    byte
	mode   uint32
}

// modes returns the modes that the page has.
func (m *modePage) modes() (all uint32) {
	for _, b := range m.bits {
		all |= b.mode
	}
	return all
}

// read returns the modes that are set in the page p.
func (m *modePage) read(p []byte) (set uint32) {
	for _, b := range m.bits {
		if p[b.offset]&b.bit != 0 {
			set |= b.mode
		}
	}
	return set
}

// put writes the page with those mode parameters to p. MODE SENSE adds PS.
func (m *modePage) put(p []byte, v modeValues) {
	m.putHeader(p)
	m.putBits(p, v.modes)
	if m.fixed != nil {
		m.fixed(p)
	}
	if m.levels {
		putLevels(p, v.levels)
	}
	if m.tags {
		putTags(p, v.tags)
	}
}

// putMutable writes the page to p with those bits set that can change.
func (m *modePage) putMutable(p []byte, mutable uint32) {
	m.putHeader(p)
	m.putBits(p, mutable)
	if m.levels {
		maskLevels(p)
	}
	if m.tags {
		maskTags(p)
	}
}

func (m *modePage) putBits(p []byte, modes uint32) {
	for _, b := range m.bits {
		if modes&b.mode != 0 {
			p[b.offset] |= b.bit
		}
	}
}

const (
	allPages    = 0x3f
	allSubpages = 0xff
	ps          = 0x80 // the page can be saved
	spf         = 0x40 // the page has a subpage code

	pageControlCurrent    = 0
	pageControlChangeable = 1
	pageControlSaved      = 3

	dbd, llbaa       = 0x08, 0x10
	wp, dpofua       = 0x80, 0x10
	longLBA          = 0x01
	shortDesc        = 8
	longDesc         = 16
	modeHeader6Len   = 4
	modeHeader10Len  = 8
	maxShortCapacity = 1<<32 - 1
)

// modeSense executes MODE SENSE(6) and MODE SENSE(10) (SPC-4, sections 6.11 and 6.12).
func modeSense(u *Unit, c *Command) bool {
	cdb := c.CDB
	six := cdb[0] == opModeSense6
	allocation := uint32(binary.BigEndian.Uint16(cdb[7:]))
	header := modeHeader10Len
	if six {
		allocation, header = uint32(cdb[4]), modeHeader6Len
	}
	control, page, subpage := cdb[2]>>6, cdb[2]&0x3f, cdb[3]
	if control == pageControlSaved && u.opt.Settings == nil {
		return c.fail(condNoSavedPages)
	}
	b := c.zeroed(header)
	specific := byte(dpofua)
	if c.itl.protection() != condNone {
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
			binary.BigEndian.PutUint64(d, u.blocks.Load())
			binary.BigEndian.PutUint32(d[12:], u.info.BlockSize)
			b[4] = longLBA
		} else {
			binary.BigEndian.PutUint32(d[4:], u.info.BlockSize)
			binary.BigEndian.PutUint32(d, uint32(min(u.blocks.Load(), maxShortCapacity)))
		}
		if b[header-1] = byte(n); !six {
			binary.BigEndian.PutUint16(b[6:], uint16(n))
		}
	}
	found := false
	for i := range modePages {
		m := &modePages[i]
		if !m.is(u, page, subpage) || page == allPages && subpage != 0 && subpage != allSubpages {
			continue
		}
		found = true
		at := len(b)
		b = append(b, make([]byte, m.size)...)
		switch control {
		case pageControlCurrent:
			m.put(b[at:], u.current())
		case pageControlChangeable:
			m.putMutable(b[at:], u.modeMutable)
		case pageControlSaved:
			m.put(b[at:], u.saved())
		default:
			m.put(b[at:], u.defaults())
		}
		if u.opt.Settings != nil {
			b[at] |= ps
		}
	}
	switch {
	case found:
	case subpage != 0 && subpage != allSubpages:
		return c.failCDB(3, noField)
	default:
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

const (
	pf = 0x10
	sp = 0x01
)

// beginModeSelect checks the CDB of MODE SELECT(6) and MODE SELECT(10).
func beginModeSelect(u *Unit, c *Command) bool {
	if c.CDB[1]&sp != 0 && u.opt.Settings == nil {
		return c.failCDB(1, 0) // nothing is saved
	}
	if c.CDB[1]&sp == 0 && u.opt.Settings.Shared() {
		return c.failCDB(1, 0) // current values are saved values
	}
	c.DataOut, c.Whole = uint64(binary.BigEndian.Uint16(c.CDB[7:])), true
	if c.CDB[0] == opModeSelect6 {
		c.DataOut = uint64(c.CDB[4])
	}
	if c.DataOut > 0 && c.CDB[1]&pf == 0 {
		return c.failCDB(1, 4) // vendor specific pages: the unit has none
	}
	return true
}

// consumeModeSelect executes MODE SELECT(6) and MODE SELECT(10) (SPC-4, sections 6.9 and 6.10).
// It checks the whole list before any of it has an effect.
func consumeModeSelect(u *Unit, c *Command, p []byte, _ uint64) bool {
	at, ok := c.modeSelectPages(p)
	if !ok {
		return false
	}
	var sent modeList
	for at < len(p) {
		m, ok := c.modeSelectPage(p[at:], at)
		if !ok {
			return false
		}
		sent.touched |= m.modes() & u.modeMutable
		sent.values.modes = sent.values.modes&^m.modes() | m.read(p[at:])
		switch {
		case m.levels:
			sent.values.levels, sent.levels = readLevels(p[at:]), true
		case m.tags:
			var wrong int
			if sent.values.tags, wrong = u.readTags(p[at:]); wrong != noField {
				return c.failList(at + wrong)
			}
			sent.tags = true
		}
		at += m.size
	}
	// Save first: if that fails, nothing has changed.
	switch {
	case u.opt.Settings.Shared():
		return c.selectShared(sent)
	case c.CDB[1]&sp != 0 && !u.saveModes(c, sent):
		return false
	}
	u.settingsMu.Lock()
	defer u.settingsMu.Unlock()
	old := u.current()
	next := sent.over(old)
	u.levels.Store(uint64(next.levels))
	u.tags.Store(&next.tags)
	err := u.setModes(c, sent.touched, next.modes)
	u.useTags()
	if next != old {
		u.raise(condModeChanged, c.nexus)
		c.changedValues(old, next)
	}
	return c.writeDone(err)
}

// modeSelectPages checks the header and the block descriptor of the list p of MODE SELECT. It
// returns the offset of the first page.
func (c *Command) modeSelectPages(p []byte) (at int, ok bool) {
	six, header := c.CDB[0] == opModeSelect6, modeHeader10Len
	if six {
		header = modeHeader6Len
	}
	if len(p) < header {
		return 0, c.fail(condListLength)
	}
	// MODE DATA LENGTH, WP and DPOFUA mean nothing here.
	n, size := int(p[header-1]), shortDesc
	if six && p[1] != 0 {
		return 0, c.failList(1) // MEDIUM TYPE
	} else if !six {
		n = int(binary.BigEndian.Uint16(p[6:]))
		if p[4]&longLBA != 0 {
			size = longDesc
		}
		if p[2] != 0 {
			return 0, c.failList(2)
		}
	}
	switch {
	case n != 0 && n != size:
		return 0, c.failList(header - 1) // BLOCK DESCRIPTOR LENGTH
	case n > len(p)-header:
		return 0, c.fail(condListLength)
	case n != 0:
		if wrong, ok := c.unit.sameDescriptor(p[header:][:n]); !ok {
			return 0, c.failList(header + wrong)
		}
	}
	return header + n, true
}

// modeSelectPage checks the page of MODE SELECT at the start of page, which is at that offset in
// the list.
func (c *Command) modeSelectPage(page []byte, at int) (m *modePage, ok bool) {
	if len(page) < 2 {
		return nil, c.fail(condListLength)
	}
	// PS is reserved here, but some initiators return what MODE SENSE gave them.
	code, subpage := page[0]&^(ps|spf), byte(0)
	if page[0]&spf != 0 {
		if subpage = page[1]; subpage == 0 || subpage == allSubpages {
			return nil, c.failList(at + 1)
		}
	}
	i := slices.IndexFunc(modePages, func(m modePage) bool { return m.code == code && m.is(c.unit, code, subpage) })
	if i < 0 {
		return nil, c.failList(at)
	}
	m = &modePages[i]
	switch {
	case subpage == 0 && int(page[1]) != m.size-2:
		return nil, c.failList(at + 1)
	case subpage != 0 && len(page) < 4:
		return nil, c.fail(condListLength)
	case subpage != 0 && int(binary.BigEndian.Uint16(page[2:])) != m.size-4:
		return nil, c.failList(at + 2)
	case len(page) < m.size:
		return nil, c.fail(condListLength)
	}
	// All other bits than the changeable ones have to be as they are.
	now, mutable := make([]byte, m.size), make([]byte, m.size)
	m.put(now, c.unit.current())
	m.putMutable(mutable, c.unit.modeMutable)
	for o := 2; o < m.size; o++ {
		if (now[o]^page[o])&^mutable[o] != 0 {
			return nil, c.failList(at + o)
		}
	}
	return m, true
}

// endModeSelect saves the current parameters if none came with SP.
func endModeSelect(u *Unit, c *Command) {
	if c.DataOut == 0 && c.CDB[1]&sp != 0 && !u.opt.Settings.Shared() {
		u.saveModes(c, modeList{})
	}
}

// sameDescriptor reports whether a block descriptor describes the medium as it is. If not, it
// returns the offset of the byte that does not.
func (u *Unit) sameDescriptor(d []byte) (octet int, ok bool) {
	be := binary.BigEndian
	blocks, most, size, sizeAt := uint64(be.Uint32(d)), uint64(maxShortCapacity), be.Uint32(d[4:])&0xffffff, 5
	if len(d) == longDesc {
		blocks, most, size, sizeAt = be.Uint64(d), math.MaxUint64, be.Uint32(d[12:]), 12
	}
	// 0 and all ones leave the capacity as it is (SBC-3, section 6.5.2).
	switch {
	case blocks != 0 && blocks != most && blocks != u.blocks.Load():
		return 0, false
	case size != u.info.BlockSize:
		return sizeAt, false
	}
	return 0, true
}

// setModes changes the modes of touched to those of set. When the cache is disabled, or writing
// is, the content of the cache is durable before setModes returns. c is nil if a reset does that.
//
// Preconditions: u.settingsMu is held.
func (u *Unit) setModes(c *Command, touched, set uint32) error {
	invariant.Held(&u.settingsMu)
	old := u.mode.Load()
	now := old&^touched | set&touched
	if now == old {
		return nil
	}
	if (old^now)&(modeWCE|modeSWP) == 0 { // nothing that writes depend on
		u.mode.Store(now)
		return nil
	}
	// No write is in progress here. So writes that began with a cache end before
	// the sync, and those that begin after it are durable.
	all := u.ranges.exclude(allStripes)
	u.mode.Store(now)
	all.release()
	if old&^now&modeWCE != 0 || now&^old&modeSWP != 0 {
		return u.sync(c)
	}
	return nil
}
