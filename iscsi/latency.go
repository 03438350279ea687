package iscsi

import (
	"time"

	"github.com/iser-target/iser-target/lun"
)

// epoch is what clock counts from.
var epoch = time.Now()

// clock is the monotonic clock alone, which is read in half the time of time.Now. It is a
// variable for tests.
var clock = func() time.Duration { return time.Since(epoch) }

// A watch takes the time that a command spends in each phase.
type watch struct {
	lapBegan time.Duration // by clock
	late     bool          // the command has waited for its turn
	spent    lun.Spent
	counts   bool // the command has ended with a status, spent is to be counted when that has left
}

// lap ends a phase; the next one begins.
func (w *watch) lap(p lun.Phase) { w.lapAt(p, clock()) }

func (w *watch) lapAt(p lun.Phase, now time.Duration) {
	w.spent[p] += now - w.lapBegan
	w.lapBegan = now
}

// takeTurn ends the time that a command waits for its turn. For one that has not waited
// that is 0, and the clock need not be read.
func (w *watch) takeTurn() {
	if w.late {
		w.late = false
		w.lap(lun.PhaseReceive)
	}
}

// countSpent counts what the phases of t took, which end here, unless that has been
// done.
func (t *Task) countSpent() {
	if !t.counts {
		return
	}
	t.counts = false
	t.lap(lun.PhaseSend)
	t.conn.sess.nexus.CountSpent(&t.cmd, &t.spent)
}

// Latencies are those of the commands of all sessions since the start, by transport.
func (nd *Node) Latencies() (all [lun.Transports]lun.Latencies) {
	nd.mu.Lock()
	defer nd.mu.Unlock()
	all = nd.ended
	for _, s := range nd.sessions {
		if s.nexus != nil {
			took := s.nexus.Latencies()
			all[s.nexus.Transport()].Add(&took)
		}
	}
	return all
}
