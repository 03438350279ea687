package lun

import (
	"encoding/binary"
	"maps"
	"slices"
	"time"
)

// An AccessState is an asymmetric access state of a target port group (SPC-4, section 5.11.2).
type AccessState byte

// Values of AccessState.
const (
	ActiveOptimized    AccessState = 0x0
	ActiveNonOptimized AccessState = 0x1
	Standby            AccessState = 0x2
	Unavailable        AccessState = 0x3
	Transitioning      AccessState = 0xf // no target port is active, and one will be soon
)

// accessStates defines each state: its name in the file of settings, and what commands meet in
// it, except those that it serves. States that initiators set change in no time, so that no command meets a
// transition between them.
var accessStates = [...]struct {
	name   string
	cond   Sense
	served flags // commands with any of these
}{
	ActiveOptimized:    {"active/optimized", condNone, 0},
	ActiveNonOptimized: {"active/non-optimized", condNone, 0},
	Standby:            {"standby", condStandby, absentLUN | anyAccess | inStandby},
	Unavailable:        {"unavailable", condUnavailable, absentLUN | anyAccess},
	Transitioning:      {"transitioning", condTransition, absentLUN | anyAccess | inStandby},
}

// String returns the name of the state.
func (s AccessState) String() string { return accessStates[s].name }

// portGroups are the states of a unit's target port groups that initiators set, by tag. The
// others are active/optimized. A value does not change; a new one takes its place. Each target
// port is a group of its own: initiators set the states of paths one by one.
type portGroups map[uint16]AccessState

// obstacle returns condNone, or what commands with these flags meet on the target port of n.
func (u *Unit) obstacle(n *Nexus, class flags) Sense {
	if g := u.access.Load(); g != nil {
		if s := &accessStates[(*g)[n.port.TPGT]]; class&s.served == 0 {
			return s.cond
		}
	}
	return condNone
}

// reportPortGroups executes REPORT TARGET PORT GROUPS (SPC-4, section 6.37).
func reportPortGroups(u *Unit, c *Command) bool {
	const (
		formatMask, formatExtended = 0xe0, 0x20
		// STATUS CODE
		alteredByCommand, alteredImplicitly = 0x01, 0x02
	)
	supported := byte(0x0f) // U_SUP, S_SUP, AN_SUP, AO_SUP
	if u.opt.ImplicitAccess {
		supported = 0x85 // T_SUP, S_SUP, AO_SUP
	}
	b := append(c.buf[:0], 0, 0, 0, 0)
	if c.CDB[1]&formatMask == formatExtended {
		b = append(b, formatExtended>>1, 0, 0, 0) // RETURN DATA FORMAT 001b, no transitions
	}
	u.awaitAccess(c)
	var set portGroups
	if g := u.access.Load(); g != nil {
		set = *g
	}
	for _, tag := range c.nexus.targets(u) {
		state, altered := set[tag]
		d := [12]byte{0: byte(state), 1: supported, 7: 1} // one port
		switch {
		case u.opt.ImplicitAccess:
			d[5] = alteredImplicitly
		case altered:
			d[5] = alteredByCommand
		}
		binary.BigEndian.PutUint16(d[2:], tag)
		binary.BigEndian.PutUint16(d[10:], tag)
		b = append(b, d[:]...)
	}
	binary.BigEndian.PutUint32(b, uint32(len(b)-4))
	return c.report(b, binary.BigEndian.Uint32(c.CDB[6:]))
}

// beginSetPortGroups checks the length of the list of SET TARGET PORT GROUPS.
func beginSetPortGroups(_ *Unit, c *Command) bool {
	n := binary.BigEndian.Uint32(c.CDB[6:])
	if n > MaxParameterList {
		return c.fail(condListLength)
	}
	c.DataOut, c.Whole = uint64(n), true
	return true
}

// consumeSetPortGroups executes SET TARGET PORT GROUPS (SPC-4, section 6.45) for primary states.
// With Options.Settings, the states are on stable storage before they are in force.
func consumeSetPortGroups(u *Unit, c *Command, p []byte, _ uint64) bool {
	const header, descriptor = 4, 4
	if len(p) < header || len(p)%descriptor != 0 {
		return c.fail(condListLength)
	}
	patience, err := u.settings.take(c, u.opt.Settings)
	if err != nil {
		return c.failStore(err)
	}
	defer u.settings.give()
	old := portGroups{}
	if g := u.access.Load(); g != nil {
		old = *g
	}
	next := maps.Clone(old)
	changed := false
	for at := header; at < len(p); at += descriptor {
		state, tag := AccessState(p[at]&0x0f), binary.BigEndian.Uint16(p[at+2:])
		switch {
		case state > Unavailable: // load balancing, offline, transitioning
			return c.failList(at)
		case !slices.Contains(c.nexus.targets(u), tag):
			return c.failList(at + 2)
		}
		next[tag] = state
	}
	for tag, state := range next {
		changed = changed || old[tag] != state
	}
	err = u.keep(patience, func(e settingsEntry) settingsEntry {
		e.PortGroups = next.entries()
		return e
	}, func(settingsEntry) { u.access.Store(&next) })
	if err != nil {
		return c.failStore(err)
	}
	if changed {
		u.raise(condAccessChanged, c.nexus)
		c.changedAccess(old, next)
	}
	return true
}

// entries returns g in the form of the file of settings.
func (g portGroups) entries() []portGroupEntry {
	list := make([]portGroupEntry, 0, len(g))
	for _, tag := range slices.Sorted(maps.Keys(g)) {
		list = append(list, portGroupEntry{tag, accessStates[g[tag]].name})
	}
	return list
}

// SetAccess sets the states of target port groups, by tag, of a unit with Options.ImplicitAccess; others are
// active/optimized. It notifies the initiators if that is news. Until settles, unless that is the zero time or another SetAccess comes,
// other states are expected, and REPORT TARGET PORT GROUPS waits for them.
func (u *Unit) SetAccess(states map[uint16]AccessState, settles time.Time) {
	next := portGroups(maps.Clone(states))
	if old := u.access.Swap(&next); old == nil || !maps.Equal(*old, next) {
		u.raise(condAccessChanged, nil)
	}
	if settles.IsZero() {
		u.settles.Store(nil)
	} else {
		u.settles.Store(&settles)
	}
}

// awaitAccess waits for the states that SetAccess has announced. An initiator that got the present ones would give up the path that is
// about to be active: Linux does not use one whose group was reported as standby last.
func (u *Unit) awaitAccess(c *Command) {
	for {
		settles := u.settles.Load()
		if settles == nil || time.Now().After(*settles) || c.aborted() {
			return
		}
		time.Sleep(accessPoll)
	}
}

// accessPoll is how often awaitAccess looks.
const accessPoll = 2 * time.Millisecond
