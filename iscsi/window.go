package iscsi

import (
	"math/bits"

	"github.com/iser-target/iser-target/iscsi/pdu"
)

// A window is the CmdSN window of a session (RFC 7143, section 4.2.2.1): the commands that have
// arrived without a gap end before exp (ExpCmdSN), the initiator may send up to max (MaxCmdSN), and
// slots has the commands that have arrived ahead of a gap. shared.mu guards it.
//
// MaxCmdSN advances as commands end, not as they arrive. So the commands in flight and those ahead
// of a gap are together never more than the depth.
type window struct {
	exp, max uint32
	told     uint32       // the last MaxCmdSN that a PDU has carried
	depth    int          // commands in flight at most
	slots    []windowSlot // by the low bits of CmdSN; one until the first command comes
}

// A windowSlot is one CmdSN ahead of the gap. A CmdSN that counts as received although no command
// came has no task.
type windowSlot struct {
	received bool
	task     *Task
}

// open makes cmdSN the first one expected.
func (w *window) open(cmdSN uint32, depth int) {
	w.exp, w.max, w.depth = cmdSN, cmdSN+uint32(depth)-1, depth
	w.told = w.max // the Login Response carries it
	w.slots = make([]windowSlot, 1)
}

// slot returns the slot of cmdSN, which lies in the window.
func (w *window) slot(cmdSN uint32) *windowSlot {
	return &w.slots[cmdSN%uint32(len(w.slots))]
}

// contains reports whether cmdSN lies in [ExpCmdSN, MaxCmdSN].
func (w *window) contains(cmdSN uint32) bool {
	return cmdSN-w.exp < w.max-w.exp+1
}

// accepts reports whether the target takes a non-immediate command with this CmdSN: it lies in the
// window and has not come before.
func (w *window) accepts(cmdSN uint32) bool {
	return w.contains(cmdSN) && !w.slot(cmdSN).received
}

// receive notes that cmdSN, which the window accepts, has come with t, or counts as received if t is
// nil.
func (w *window) receive(cmdSN uint32, t *Task) {
	// A power of two, so that slots of consecutive CmdSNs differ where CmdSN wraps.
	if n := 1 << bits.Len(uint(w.depth-1)); len(w.slots) < n {
		w.slots = make([]windowSlot, n)
	}
	*w.slot(cmdSN) = windowSlot{received: true, task: t}
}

// next moves ExpCmdSN past the next command if it has come. A CmdSN without a command ends at once.
func (w *window) next() (t *Task, ok bool) {
	s := w.slot(w.exp)
	if !s.received {
		return nil, false
	}
	t = s.task
	*s = windowSlot{}
	w.exp++
	if t == nil {
		w.max++
	}
	return t, true
}

// ended gives the initiator room for one more command.
func (w *window) ended() { w.max++ }

// skip makes the CmdSNs that are missing before cmdSN count as received, as target resets do (section
// 4.2.3.3). It skips nothing beyond the window.
func (w *window) skip(cmdSN uint32) {
	for sn := w.exp; pdu.Before(sn, cmdSN) && w.contains(sn); sn++ {
		if w.accepts(sn) {
			w.receive(sn, nil)
		}
	}
}
