package lun

// readiness returns condNone, or why the medium is not accessible.
func (u *Unit) readiness() Sense {
	switch {
	case u.ejected.Load():
		return condNoMedium
	case u.stopped.Load():
		return condNotReadyStopped
	case u.sanitizer.state.Load() == sanitizeFailed:
		return u.sanitizer.failure()
	}
	return condNone
}

// protection returns condNone, or why the initiator cannot write.
func (l *itl) protection() Sense {
	switch {
	case l.readOnly.Load(), l.unit.readOnly:
		return condWriteProtected
	case l.unit.mode.Load()&modeSWP != 0:
		return condSoftwareProtected
	case l.unit.orphaned():
		return condNoStore
	}
	return condNone
}

// refusal returns condNone, or why the initiator cannot send c. An initiator that may only read
// changes nothing that others see: neither the data nor the state of the unit. SBC-3, section 4.12,
// protects only the medium; LIO refuses as much, and all of PERSISTENT RESERVE OUT.
func (c *Command) refusal() Sense {
	switch {
	case c.row.flags&writes != 0:
		return c.itl.protection()
	case c.itl.readOnly.Load() && !c.row.endsOwn(c.CDB):
		return condWriteProtected
	}
	return condNone
}

// endsOwn reports whether this CDB only ends what its own nexus began, unlike others of its row.
func (row *command) endsOwn(cdb []byte) bool {
	return row.op == opPreventAllow && cdb[4]&0x03 == 0 // PREVENT
}

// Bits of START STOP UNIT, byte 4. NO_FLUSH may be set but saves nothing: a stop syncs in any case.
const (
	powerCondition = 0xf0
	loej           = 0x02
	start          = 0x01
)

// startStop checks START STOP UNIT (SBC-3, section 5.25).
func startStop(u *Unit, c *Command) bool {
	if u.has&removable != 0 {
		return true
	}
	switch b := c.CDB[4]; {
	case b&powerCondition != 0: // not supported
		return c.failCDB(4, 7)
	case c.CDB[3] != 0:
		return c.failCDB(3, 3)
	case b&loej != 0:
		return c.failCDB(4, 1) // nothing to eject
	}
	return true
}

func endStartStop(u *Unit, c *Command) {
	defer c.changedMedium(u.medium())
	switch b := c.CDB[4]; {
	case b&powerCondition != 0:
		// Only a unit with a removable medium gets here. It is always in the
		// active condition, and START and LOEJ mean nothing.
	case b&loej != 0:
		u.moveMedium(c, b&start != 0)
	case u.ejected.Load():
		c.fail(condNoMedium)
	case b&start != 0:
		u.stopped.Store(false)
	default:
		if c.writeDone(u.sync(c)) {
			u.stopped.Store(u.has&removable == 0) // a removable medium stops when it is ejected
		}
	}
}

// moveMedium loads or ejects the medium.
func (u *Unit) moveMedium(c *Command, load bool) {
	if !load && !c.writeDone(u.sync(c)) {
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	for l := range u.seen {
		if l.prevents {
			c.fail(condRemovalPrevented)
			return
		}
	}
	if !load {
		u.endTokens(condTokenCancelled)
	}
	if was := u.ejected.Swap(!load); was && load {
		u.raiseLocked(condMediumChanged, c.nexus)
	}
}

// endPreventAllow executes PREVENT ALLOW MEDIUM REMOVAL (SBC-3, section 5.15). Removal stays
// prevented while a nexus exists that asked for it.
func endPreventAllow(u *Unit, c *Command) {
	u.mu.Lock()
	defer u.mu.Unlock()
	c.itl.prevents = c.CDB[4]&1 != 0
}
