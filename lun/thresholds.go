package lun

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/lun/invariant"
)

// The thresholds of thin provisioning (SBC-3, section 4.7.3.7). Each unit that knows how much space it takes has two: one is
// reached when the medium has too little space left, the other when the unit takes too much. The operator sets them in
// bytes, which makes events and metrics. These values are also the defaults of the Logical Block Provisioning mode page, by which
// initiators have their own, in threshold sets. These raise unit attentions. SampleSpace compares both with the space, outside of I/O.
const (
	thresholdAvailable = iota
	thresholdUsed
	thresholds
)

// ThresholdNames are the names of the thresholds.
var ThresholdNames = [thresholds]string{"available", "used"}

// thresholdModes are the modes that enable the thresholds.
var thresholdModes = [thresholds]uint32{modeAvailable, modeUsed}

// provisioningModes are all modes about thresholds.
const provisioningModes = modeLBPERE | modeSITUA | modeAvailable | modeUsed

// The Logical Block Provisioning mode page: a header, then the descriptors of the thresholds.
const (
	thresholdHeader     = 16
	thresholdDescriptor = 8
	thresholdPageLen    = thresholdHeader + thresholds*thresholdDescriptor
)

// thresholdSet is the least size of a threshold set in bytes.
const thresholdSet = 64 << 10

// levels are the THRESHOLD COUNTs of a unit, in threshold sets: that of available space in the upper half.
type levels uint64

func newLevels(available, used uint32) levels { return levels(available)<<32 | levels(used) }

// of returns the count of a threshold.
func (l levels) of(threshold int) uint32 {
	if threshold == thresholdAvailable {
		return uint32(l >> 32)
	}
	return uint32(l)
}

// A spaceWatch has what is known of the space of a unit, and which thresholds it has reached.
type spaceWatch struct {
	gauged   bool // the store knows its space
	exponent uint // THRESHOLD EXPONENT: log2 of the blocks in a threshold set; 0: the unit has no thresholds
	known    atomic.Bool
	used     atomic.Int64 // bytes
	free     atomic.Int64

	mu      sync.Mutex
	limits  [thresholds]int64 // guarded by mu: of the operator, in bytes; 0: none
	alarms  [thresholds]bool  // guarded by mu: those limits that are reached
	at      levels            // guarded by mu: the counts that reached is about
	enabled uint32            // guarded by mu: the modes that reached is about
	reached [thresholds]bool  // guarded by mu: of the mode page
}

// initSpace finds out whether the store knows its space, and whether the unit has thresholds: it is thin, too.
func (u *Unit) initSpace() {
	s := &u.space
	used, free, err := backend.Usage(u.store)
	if err != nil {
		return
	}
	s.gauged = true
	s.note(used, free)
	if !u.isThin() {
		return
	}
	s.exponent = uint(max(bits.Len32(thresholdSet/u.info.BlockSize)-1, 1))
	for u.blocks.Load()>>s.exponent > math.MaxUint32 {
		s.exponent++
	}
	s.limits = [thresholds]int64{u.opt.ThresholdAvailable, u.opt.ThresholdUsed}
}

// hasThresholds reports whether the unit has thresholds.
func (u *Unit) hasThresholds() bool { return u.space.exponent > 0 }

// setShift returns log2 of the bytes in a threshold set.
func (u *Unit) setShift() uint { return u.shift + u.space.exponent }

// defaultThresholds returns the modes and levels that the limits of the operator stand for.
//
// Preconditions: u.space.mu is held, or nothing else uses u.
func (u *Unit) defaultThresholds() (modes uint32, l levels) {
	if !u.hasThresholds() {
		return 0, 0
	}
	var counts [thresholds]uint32
	for i, limit := range u.space.limits {
		if limit > 0 {
			modes |= modeLBPERE | thresholdModes[i]
			counts[i] = uint32(min(max(uint64(limit)>>u.setShift(), 1), math.MaxUint32))
		}
	}
	return modes, newLevels(counts[thresholdAvailable], counts[thresholdUsed])
}

// SetThresholds changes the limits of the operator, in bytes; 0: none. Where initiators have the defaults, they get the new ones.
func (u *Unit) SetThresholds(available, used int64) {
	if !u.hasThresholds() {
		return
	}
	u.settingsMu.Lock()
	defer u.settingsMu.Unlock()
	s := &u.space
	s.mu.Lock()
	wasModes, wasLevels := u.modeDefault.Load()&provisioningModes, levels(u.levelsDefault.Load())
	s.limits = [thresholds]int64{available, used}
	modes, l := u.defaultThresholds()
	s.mu.Unlock()
	u.modeDefault.Store(u.modeDefault.Load()&^provisioningModes | modes)
	u.levelsDefault.Store(uint64(l))
	changed := false
	for _, v := range []struct {
		mode   *atomic.Uint32
		levels *atomic.Uint64
	}{{&u.mode, &u.levels}, {&u.modeSaved, &u.levelsSaved}} {
		if v.mode.Load()&provisioningModes == wasModes && levels(v.levels.Load()) == wasLevels {
			v.mode.Store(v.mode.Load()&^provisioningModes | modes)
			v.levels.Store(uint64(l))
			changed = changed || modes != wasModes || l != wasLevels
		}
	}
	if changed {
		u.raise(condModeChanged, nil)
	}
}

// putLevels writes the descriptors of the Logical Block Provisioning mode page p, except ENABLED (SBC-3, section 6.5.8).
func putLevels(p []byte, l levels) {
	const soft, decreasing, increasing = 0 << 3, 0, 1
	for i, resource := range [thresholds]byte{thresholdAvailable: 0x01, thresholdUsed: 0x02} {
		d := p[thresholdHeader+i*thresholdDescriptor:]
		d[0] |= soft | [thresholds]byte{decreasing, increasing}[i]
		d[1] = resource
		binary.BigEndian.PutUint32(d[4:], l.of(i))
	}
}

// readLevels returns the counts of that page.
func readLevels(p []byte) levels {
	count := func(i int) uint32 {
		return binary.BigEndian.Uint32(p[thresholdHeader+i*thresholdDescriptor+4:])
	}
	return newLevels(count(thresholdAvailable), count(thresholdUsed))
}

// maskLevels sets those bits of that page that can be changed, except those of modes.
func maskLevels(p []byte) {
	for i := range thresholds {
		binary.BigEndian.PutUint32(p[thresholdHeader+i*thresholdDescriptor+4:], math.MaxUint32)
	}
}

// textOf returns the value of a threshold as a Setting: a number of bytes, or off.
func (u *Unit) textOf(threshold int, modes uint32, l levels) string {
	if modes&thresholdModes[threshold] == 0 {
		return "off"
	}
	return fmt.Sprint(uint64(l.of(threshold)) << u.setShift())
}

// thresholdSettings returns the thresholds of initiators as Settings; none if all of them are off.
func (u *Unit) thresholdSettings() (list []Setting) {
	if !u.hasThresholds() || (u.mode.Load()|u.modeDefault.Load()|u.modeSaved.Load())&provisioningModes == 0 {
		return nil
	}
	for _, m := range []struct {
		mode uint32
		name string
	}{{modeLBPERE, settingThresholdReports}, {modeSITUA, settingThresholdSingle}} {
		list = append(list, Setting{
			Name: m.name, Value: onOff(u.mode.Load(), m.mode), Default: onOff(u.modeDefault.Load(), m.mode), Saved: onOff(u.modeSaved.Load(), m.mode),
		})
	}
	for i, name := range ThresholdNames {
		list = append(list, Setting{
			Name: settingThreshold + name, Value: u.textOf(i, u.mode.Load(), levels(u.levels.Load())),
			Default: u.textOf(i, u.modeDefault.Load(), levels(u.levelsDefault.Load())),
			Saved:   u.textOf(i, u.modeSaved.Load(), levels(u.levelsSaved.Load())),
		})
	}
	return list
}

// changedThresholds calls changed for the thresholds that differ.
func (c *Command) changedThresholds(oldModes, modes uint32, old, now levels) {
	for i, name := range ThresholdNames {
		if text := c.unit.textOf(i, modes, now); text != c.unit.textOf(i, oldModes, old) {
			c.changed(settingThreshold+name, text)
		}
	}
}

// A Space is what a unit takes of its medium.
type Space struct {
	Used, Free int64 // bytes; others may share what is free
	Thresholds [thresholds]Threshold
}

// A Threshold is a limit of the operator.
type Threshold struct {
	Limit   int64 // bytes; 0: none
	Reached bool
}

// note notes the space, in bytes.
func (s *spaceWatch) note(used, free int64) {
	s.used.Store(used)
	s.free.Store(free)
	s.known.Store(true)
}

// Space returns what New or SampleSpace has found last; ok is false for a unit whose store does not know it.
func (u *Unit) Space() (v Space, ok bool) {
	s := &u.space
	if !s.known.Load() {
		return v, false
	}
	v.Used, v.Free = s.used.Load(), s.free.Load()
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range thresholds {
		v.Thresholds[i] = Threshold{s.limits[i], s.alarms[i]}
	}
	return v, true
}

// SampleSpace asks the store for its space, and reports thresholds that it has reached. It waits for the file system, so a
// goroutine that serves no initiator calls it from time to time. An error changes nothing.
func (u *Unit) SampleSpace() {
	if !u.space.gauged || u.gone.Load() || u.replaced.Load() {
		return
	}
	switch used, free, err := backend.Usage(u.store); {
	case err != nil:
	case u.hasThresholds():
		u.noteSpace(used, free)
	default:
		u.space.note(used, free)
	}
}

// hysteresis returns how far the space has to move back before a threshold can be reached again: a sixteenth, so that space
// that goes up and down around it does not notify each time.
func hysteresis(level int64) int64 { return max(level/16, 1) }

// beyond reports whether a threshold that was reached or not is reached now.
func beyond(threshold int, was bool, now, level int64) bool {
	switch {
	case threshold == thresholdAvailable && was:
		return now <= level+hysteresis(level)
	case threshold == thresholdAvailable:
		return now <= level
	case was:
		return now >= level-hysteresis(level)
	}
	return now >= level
}

// noteSpace notes the space of the unit, in bytes, and reports thresholds, which the unit has.
func (u *Unit) noteSpace(used, free int64) {
	s := &u.space
	s.mu.Lock()
	s.note(used, free)
	var events []ThresholdEvent
	for i, now := range [thresholds]int64{free, used} {
		was, limit := s.alarms[i], s.limits[i]
		s.alarms[i] = limit > 0 && beyond(i, was, now, limit)
		if s.alarms[i] != was {
			events = append(events, ThresholdEvent{
				Serial: u.opt.Identity.Serial, Threshold: ThresholdNames[i], Limit: limit, Used: used, Free: free, Ended: was,
			})
		}
	}
	modes, at := u.mode.Load(), levels(u.levels.Load())
	var notify []int
	sets := [thresholds]int64{free >> u.setShift(), (used + 1<<u.setShift() - 1) >> u.setShift()}
	for i, now := range sets {
		if (modes^s.enabled)&(thresholdModes[i]|modeLBPERE) != 0 || at.of(i) != s.at.of(i) {
			s.reached[i] = false // it is another threshold
		}
		was := s.reached[i]
		s.reached[i] = modes&thresholdModes[i] != 0 && beyond(i, was, now, int64(at.of(i)))
		if s.reached[i] && !was && modes&modeLBPERE != 0 {
			notify = append(notify, i)
		}
	}
	s.at, s.enabled = at, modes
	s.mu.Unlock()
	for _, e := range events {
		u.opt.Events(e)
	}
	for _, i := range notify {
		u.raiseThreshold(i, modes&modeSITUA != 0)
	}
}

// raiseThreshold makes THIN PROVISIONING SOFT THRESHOLD REACHED due for all nexuses, or with single true for one: the first
// that may write, by its name.
func (u *Unit) raiseThreshold(threshold int, single bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	list := u.seenLocked()
	if single {
		list = slices.DeleteFunc(list, func(l *itl) bool { return l.readOnly.Load() })
		list = list[:min(len(list), 1)]
	}
	for _, l := range list {
		l.reached.Or(1 << threshold)
		l.raise(condSoftThreshold)
	}
}

// seenLocked returns the nexuses of the unit, by the names of their initiator ports.
//
// Preconditions: u.mu is held.
func (u *Unit) seenLocked() (list []*itl) {
	invariant.Held(&u.mu)
	for l := range u.seen {
		list = append(list, l)
	}
	slices.SortFunc(list, func(a, b *itl) int {
		if c := strings.Compare(a.nexus.name.initiator.name, b.nexus.name.initiator.name); c != 0 {
			return c
		}
		return slices.Compare(a.nexus.port.ISID[:], b.nexus.port.ISID[:])
	})
	return list
}

// takeThreshold adds to the sense data of a threshold that a nexus meets which one it is: INFORMATION has the offset of its
// descriptor in the mode page (SBC-3, section 4.7.3.7.6). If another one is reached, too, that remains due.
func (l *itl) takeThreshold(s senseData) senseData {
	for {
		reached := l.reached.Load()
		if reached == 0 { // it was due in another process
			return s
		}
		rest := reached & (reached - 1)
		if !l.reached.CompareAndSwap(reached, rest) {
			continue
		}
		if rest != 0 {
			l.due.Or(dueBit(condSoftThreshold))
		}
		return s.withInfo(uint64(thresholdHeader + thresholdDescriptor*bits.TrailingZeros32(reached)))
	}
}

// A thresholdsEntry has what initiators set of thresholds.
type thresholdsEntry struct {
	LBPERE bool                       `json:"lbpere"` // Read-Write Error Recovery
	SITUA  bool                       `json:"situa"`  // Logical Block Provisioning
	Counts [thresholds]thresholdEntry `json:"counts"` // by thresholdAvailable and thresholdUsed
}

type thresholdEntry struct {
	Enabled bool   `json:"enabled"`
	Count   uint32 `json:"count"` // threshold sets
}

// newThresholdsEntry returns what initiators set, or nil if these are the defaults: those follow the operator.
func (u *Unit) newThresholdsEntry(modes uint32, l levels) *thresholdsEntry {
	if !u.hasThresholds() || modes&provisioningModes == u.modeDefault.Load()&provisioningModes && uint64(l) == u.levelsDefault.Load() {
		return nil
	}
	e := &thresholdsEntry{LBPERE: modes&modeLBPERE != 0, SITUA: modes&modeSITUA != 0}
	for i := range e.Counts {
		e.Counts[i] = thresholdEntry{modes&thresholdModes[i] != 0, l.of(i)}
	}
	return e
}

// values returns the modes and levels of e, or the defaults if e is nil.
func (e *thresholdsEntry) values(defaults uint32, def levels) (modes uint32, l levels) {
	if e == nil {
		return defaults & provisioningModes, def
	}
	if e.LBPERE {
		modes |= modeLBPERE
	}
	if e.SITUA {
		modes |= modeSITUA
	}
	for i, t := range e.Counts {
		if t.Enabled {
			modes |= thresholdModes[i]
		}
	}
	return modes, newLevels(e.Counts[thresholdAvailable].Count, e.Counts[thresholdUsed].Count)
}

// crossed returns which thresholds are reached, for another process, and cross takes that over.
func (u *Unit) crossed() (bits uint8) {
	s := &u.space
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range thresholds {
		if s.alarms[i] {
			bits |= 1 << i
		}
		if s.reached[i] {
			bits |= 1 << (thresholds + i)
		}
	}
	return bits
}

func (u *Unit) cross(bits uint8) {
	s := &u.space
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range thresholds {
		s.alarms[i], s.reached[i] = bits>>i&1 != 0, bits>>(thresholds+i)&1 != 0
	}
	s.at, s.enabled = levels(u.levels.Load()), u.mode.Load()
}
