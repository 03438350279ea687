package lun

// readiness is condNone, or why there is no access to the medium.
func (u *Unit) readiness() Sense {
	switch {
	case u.ejected.Load():
		return condNoMedium
	case u.stopped.Load():
		return condNotReadyStopped
	case u.sanitizer.state.Load() == sanitizeFailed:
		return condSanitizeFailed
	}
	return condNone
}

// protection is condNone, or why the initiator can write nothing.
func (l *itl) protection() Sense {
	switch {
	case l.readOnly.Load(), l.unit.readOnly:
		return condWriteProtected
	case l.unit.mode.Load()&modeSWP != 0:
		return condSoftwareProtected
	}
	return condNone
}

// Bits of START STOP UNIT, octet 4. NO_FLUSH may be set but saves nothing: a
// stop syncs in any case.
const (
	powerCondition = 0xf0
	loej           = 0x02
	start          = 0x01
)

// startStop is START STOP UNIT (SBC-3, section 5.25).
func startStop(u *Unit, c *Command) bool {
	if u.has&removable != 0 {
		return true
	}
	switch b := c.CDB[4]; {
	case b&powerCondition != 0: // there are none
		return c.failCDB(4, 7)
	case c.CDB[3] != 0:
		return c.failCDB(3, 3)
	case b&loej != 0:
		return c.failCDB(4, 1) // nothing to eject
	}
	return true
}

func endStartStop(u *Unit, c *Command) {
	switch b := c.CDB[4]; {
	case b&powerCondition != 0:
		// A unit with a removable medium, which alone comes here, is in the
		// active condition always, whatever is asked of it: START and LOEJ
		// mean nothing then.
	case b&loej != 0:
		u.moveMedium(c, b&start != 0)
	case u.ejected.Load():
		c.fail(condNoMedium)
	case b&start != 0:
		u.stopped.Store(false)
	default:
		if err := u.sync(); err != nil {
			c.failWrite(err)
			return
		}
		// What stops a removable medium is its ejection.
		u.stopped.Store(u.has&removable == 0)
	}
}

// moveMedium loads or ejects the medium.
func (u *Unit) moveMedium(c *Command, load bool) {
	if !load {
		if err := u.sync(); err != nil {
			c.failWrite(err)
			return
		}
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	for l := range u.seen {
		if l.prevents {
			c.fail(condRemovalPrevented)
			return
		}
	}
	if was := u.ejected.Swap(!load); was && load {
		u.raiseLocked(attentionMedium, c.nexus)
	}
}

// endPreventAllow is PREVENT ALLOW MEDIUM REMOVAL (SBC-3, section 5.15). Removal
// is prevented as long as a nexus is there that has asked for it.
func endPreventAllow(u *Unit, c *Command) {
	u.mu.Lock()
	defer u.mu.Unlock()
	c.itl.prevents = c.CDB[4]&1 != 0
}
