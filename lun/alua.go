package lun

import (
	"encoding/binary"
	"maps"
	"slices"
)

// An accessState is an asymmetric access state of a target port group (SPC-4, section 5.11.2).
type accessState byte

const (
	activeOptimized    accessState = 0x0
	activeNonOptimized accessState = 0x1
	standby            accessState = 0x2
	unavailable        accessState = 0x3
)

// accessStates defines each state: its name in the file of settings, and what commands meet in
// it, except those that it serves. A transition takes no time, so that no command meets one.
var accessStates = [...]struct {
	name   string
	cond   Sense
	served flags // commands with any of these
}{
	activeOptimized:    {"active/optimized", condNone, 0},
	activeNonOptimized: {"active/non-optimized", condNone, 0},
	standby:            {"standby", condStandby, absentLUN | anyAccess | inStandby},
	unavailable:        {"unavailable", condUnavailable, absentLUN | anyAccess},
}

// portGroups are the states of a unit's target port groups that initiators set, by tag. The
// others are active/optimized. A value does not change; a new one takes its place. Each target
// port is a group of its own: initiators set the states of paths one by one.
type portGroups map[uint16]accessState

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
		supported                  = 0x0f // U_SUP, S_SUP, AN_SUP, AO_SUP
		alteredByCommand           = 0x01 // STATUS CODE
	)
	b := append(c.buf[:0], 0, 0, 0, 0)
	if c.CDB[1]&formatMask == formatExtended {
		b = append(b, formatExtended>>1, 0, 0, 0) // RETURN DATA FORMAT 001b, no transitions
	}
	var set portGroups
	if g := u.access.Load(); g != nil {
		set = *g
	}
	for _, tag := range c.nexus.targets() {
		state, altered := set[tag]
		d := [12]byte{0: byte(state), 1: supported, 7: 1} // one port
		if altered {
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
		state, tag := accessState(p[at]&0x0f), binary.BigEndian.Uint16(p[at+2:])
		switch {
		case int(state) >= len(accessStates): // load balancing, offline, transitioning
			return c.failList(at)
		case !slices.Contains(c.nexus.targets(), tag):
			return c.failList(at + 2)
		}
		next[tag] = state
	}
	for tag, state := range next {
		changed = changed || old[tag] != state
	}
	e := u.keptSettings()
	e.PortGroups = next.entries()
	if err := u.keep(e, patience, func() { u.access.Store(&next) }); err != nil {
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
