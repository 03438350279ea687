package lun

import (
	"strings"
	"sync/atomic"
	"testing"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A stuckCommand runs in a goroutine of its own, in a store that hangs.
type stuckCommand struct {
	c     Command
	abort atomic.Bool
	done  chan result
}

// stuck begins a command, and waits until it is at the gate.
func (r *rig) stuck(n *Nexus, gate *backendtest.Gate, cdb string, out []byte) *stuckCommand {
	r.t.Helper()
	s := &stuckCommand{done: make(chan result, 1)}
	s.c.Abort = &s.abort
	go func() { s.done <- do(n, &s.c, [8]byte{}, cdb, out, all) }()
	<-gate.Entered
	return s
}

// detach aborts the command as a transport does.
func (s *stuckCommand) detach(t *testing.T) {
	t.Helper()
	s.abort.Store(true)
	if !s.c.Detach() || !s.c.Detached() {
		t.Fatal("a command in the store could not be detached")
	}
}

// wantBusy checks for BUSY.
func wantBusy(t *testing.T, what string, res result) {
	t.Helper()
	if res.status != StatusBusy || res.sense != nil {
		t.Fatalf("%s: status %#x, sense % x; want BUSY", what, res.status, res.sense)
	}
}

// A detached command holds its unit up until it is back, and commands that need no store are served.
func TestDetachedCommandHoldsTheUnitUp(t *testing.T) {
	r := newRig(t, setup{opt: everything})
	gate := r.store.Shut(backendtest.WriteAt)
	other := r.login()
	s := r.stuck(other, gate, extentCDB(0x8a, 0, 3, 1), pattern(512, 1))
	r.good("00", nil) // a command that hangs, but is not given up, is nobody else's concern
	s.detach(t)
	wantSense(t, r.run("00", nil), 0x2, 0x04, 0x00)
	for i := range commands {
		row := &commands[i]
		if !r.unit.supports(row) || row.op == opTestUnitReady {
			continue
		}
		res := doCDB(r.nexus, &r.c, [8]byte{}, rowCDB(row), make([]byte, 1<<12), all)
		if row.flags&medium == 0 && row.op != opStartStop && (row.op != opExtendedCopy || row.sa == saCopyAbort) && row.op != opModeSelect6 &&
			row.op != opModeSelect10 || strings.HasPrefix(row.name, "READ CAPACITY") || strings.HasPrefix(row.name, "READ DEFECT") {
			wantDone(t, row, res)
		} else {
			wantBusy(t, row.name, res)
		}
	}
	if got := r.unit.Status(); got != "a command that was aborted is still in the store" {
		t.Errorf("status %q", got)
	}
	gate.Open()
	<-s.done
	r.good("00", nil)
	r.good(extentCDB(0x8a, 0, 3, 1), pattern(512, 2))
	wantBytes(t, r.good(extentCDB(0x88, 0, 3, 1), nil), pattern(512, 2))
}

// An EXTENDED COPY that is detached also holds up the unit that it writes to, and PREEMPT AND ABORT of
// that unit does not wait for it.
func TestDetachedCopyHoldsItsDestinationUp(t *testing.T) {
	r := newCopyRig(t, setup{size: 2 << 20}, setup{})
	r.good(extentCDB(0x8a, 0, 0, 8), pattern(4096, 1))
	gate := r.other.store.Shut(backendtest.WriteAt)
	list := copyList(0, listIDNone, []string{cscdZero, cscdOne}, []string{blocks(0, 1, 8, 0, 0)})
	s := r.stuck(r.nexus, gate, copyCDB(list), unhex(list))
	r.other.unit.endCopies() // returns
	s.detach(t)
	for lun, what := range []string{"the source", "the destination"} {
		res := do(r.nexus, &r.c, EncodeLUN(uint16(lun)), extentCDB(0x8a, 0, 0, 1), pattern(512, 2), all)
		wantBusy(t, what, res)
	}
	gate.Open()
	<-s.done
	testkit.Eventually(t, "nothing that holds a unit up", func() bool { return !r.unit.heldUp() && !r.other.unit.heldUp() })
	for lun := range uint16(2) {
		wantGood(t, "WRITE", do(r.nexus, &r.c, EncodeLUN(lun), extentCDB(0x8a, 0, 0, 1), pattern(512, 2), all))
	}
}

// A reset that has to wait for the store before it can restore the mode parameters does so aside.
func TestResetDoesNotWaitForTheStore(t *testing.T) {
	r := newRig(t, setup{info: volatile})
	wantGood(t, "WCE 0", r.modeSelect(false, "00 00 00 00"+cachingOff))
	if r.unit.cached() {
		t.Fatal("the cache is still enabled")
	}
	gate := r.store.Shut(backendtest.WriteDurable)
	s := r.stuck(r.nexus, gate, extentCDB(0x8a, 0, 0, 1), pattern(512, 1))
	s.detach(t)
	r.nexus.ResetUnit([8]byte{}, true) // returns
	gate.Open()
	<-s.done
	testkit.Eventually(t, "nothing that holds a unit up", func() bool { return !r.unit.heldUp() })
	if !r.unit.cached() {
		t.Error("the reset did not restore the mode parameters")
	}
	wantSense(t, r.run("00", nil), 0x6, 0x29, 0x03)
	r.good(extentCDB(0x8a, 0, 0, 1), pattern(512, 2))
}

// A command that is aborted between two of its steps is not in the unit, and does not get in again.
func TestAbortedCommandDoesNotGetIntoTheUnit(t *testing.T) {
	r := newRig(t, setup{})
	var abort atomic.Bool
	r.c.Abort = &abort
	r.c.LUN, r.c.CDB = [8]byte{}, unhex(extentCDB(0x8a, 0, 0, 16))
	if !r.nexus.Begin(&r.c) || !r.nexus.Consume(&r.c, pattern(4096, 1), 0) {
		t.Fatal("the WRITE has failed")
	}
	abort.Store(true)
	if r.c.Inside() || r.c.Detach() {
		t.Error("a command between two steps is in the unit")
	}
	if r.nexus.Consume(&r.c, pattern(4096, 2), 4096) || r.store.Calls(backendtest.WriteAt) != 1 {
		t.Error("an aborted command has written")
	}
	r.nexus.End(&r.c)
}
