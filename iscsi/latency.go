package iscsi

import (
	"time"

	"github.com/iser-target/iser-target/lun"
)

// epoch is what clock counts from.
var epoch = time.Now()

// clock reads the monotonic clock only, in half the time of time.Now. It is a variable for tests.
var clock = func() time.Duration { return time.Since(epoch) }

// A watch takes the time that a command spends in each phase.
type watch struct {
	lapBegan time.Duration // by clock
	waited   bool          // the command has waited to begin, or to continue
	spent    lun.Spent
	timed    bool // the command has ended with a status: count spent when that has left
}

// lap ends a phase. The next one begins.
func (w *watch) lap(p lun.Phase) { w.lapAt(p, clock()) }

func (w *watch) lapAt(p lun.Phase, now time.Duration) {
	w.spent[p] += now - w.lapBegan
	w.lapBegan = now
}

// endWait ends the time that a command waits to begin. It does not read the clock for a command
// that has not waited.
func (w *watch) endWait() {
	if w.waited {
		w.waited = false
		w.lap(lun.PhaseReceive)
	}
}

// countSpent ends the last phase of t, at now, and counts what all phases took, once, in tally.
func (t *Task) countSpent(now time.Duration, tally *lun.Tally) {
	if !t.timed {
		return
	}
	t.timed = false
	t.lapAt(lun.PhaseSend, now)
	if t.small() {
		t.conn.brevity.note(t.spent[lun.PhaseBackend])
	}
	tally.Count(t.conn.sess.nexus, &t.cmd, &t.spent)
	if slow := t.conn.node.slow.threshold.Load(); slow > 0 {
		if took := t.spent.Total(); int64(took) >= slow {
			t.noteSlow(took)
		}
	}
}

// timings are how long commands took.
type timings struct {
	phases     lun.Latencies
	operations lun.Operations
}

// add adds the commands of n.
func (t *timings) add(n *lun.Nexus) {
	t.phases.Add(new(n.Latencies()))
	t.operations.Add(new(n.Operations()))
}

// Latencies returns how long the commands of all sessions took since the start, by transport.
func (nd *Node) Latencies() (all [lun.Transports]lun.Latencies) {
	timed := nd.timings()
	for t := range all {
		all[t] = timed[t].phases
	}
	return all
}

// Operations returns the operations of all sessions since the start, by transport.
func (nd *Node) Operations() (all [lun.Transports]lun.Operations) {
	timed := nd.timings()
	for t := range all {
		all[t] = timed[t].operations
	}
	return all
}

// A SessionTime is the time that the commands of a session took whose responses have left.
type SessionTime struct {
	TSIH    uint16
	Started time.Time
	Sum     time.Duration
}

// SessionTimes returns the times of all sessions with LUNs, in no order. It costs a few loads for each.
func (nd *Node) SessionTimes() []SessionTime {
	nd.mu.Lock()
	defer nd.mu.Unlock()
	list := make([]SessionTime, 0, len(nd.sessions))
	for _, s := range nd.sessions {
		if s.nexus != nil {
			list = append(list, SessionTime{s.tsih, s.started, s.nexus.Spent()})
		}
	}
	return list
}

func (nd *Node) timings() [lun.Transports]timings {
	nd.mu.Lock()
	defer nd.mu.Unlock()
	all := nd.ended
	for _, s := range nd.sessions {
		if s.nexus != nil {
			all[s.nexus.Transport()].add(s.nexus)
		}
	}
	return all
}
