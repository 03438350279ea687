package lun

// A unit whose store moves between gateways (package backend/gated) outlives the times in which its store is open here.

// moved returns what a command meets on the target port of n whose store another gateway has, or nobody.
func (u *Unit) moved(n *Nexus) Sense {
	if g := u.access.Load(); g != nil && (*g)[n.port.TPGT] == Standby {
		return condStandby
	}
	return condTransition
}

// AdoptSize makes the size of the store that of the unit, and notifies all initiators if that is news.
func (u *Unit) AdoptSize() {
	u.sanitizer.mu.Lock() // none begins with the old size
	defer u.sanitizer.mu.Unlock()
	blocks := uint64(u.store.Info().Size) >> u.shift
	if u.blocks.Swap(blocks) != blocks {
		u.raise(condCapacityChanged, nil)
	}
}

// Moved ends what a gateway keeps only as long as it has the store: reservations by RESERVE, ROD tokens, copies in the background, and
// that the medium must not be removed. It reports whether it has interrupted a sanitize, which ends when calls of the store do.
func (u *Unit) Moved() (interrupted bool) {
	u.sanitizer.halt()
	interrupted = u.isSanitizing()
	all := func(*Nexus) bool { return true }
	u.dropReserveOf(all)
	u.endBackground(all)
	u.endTokens(condTokenCancelled)
	u.mu.Lock()
	defer u.mu.Unlock()
	for l := range u.seen {
		l.prevents = false
	}
	return interrupted
}
