package iscsi

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/invariant"
)

// Tasks wait for each other: an ORDERED command for older ones, a task management function for the commands that it
// ends, a command for those that its initiator has not sent yet. Each wait alone has a reason and most have a bound, but a
// chain of them can be long, and what shows is only its last task. A task that waits for longer than
// limits.task_wait is reported with its chain. The timer of the connection looks for such tasks, a few times per limit. So
// a command that does not wait takes no time for this.

// A waitsFor is what a task waits for, among other tasks. A goroutine notes it before it waits.
type waitsFor = int32

const (
	waitsNot     waitsFor = iota
	waitsOlder            // for commands of its session that come first: awaitOlder
	waitsOthers           // for commands of other sessions that have an earlier place: awaitOthers
	waitsAborted          // for the tasks that it ends
	waitsMissing          // for commands that its initiator has sent before, or will
)

// maxChain bounds the tasks that a TaskWaitEvent names.
const maxChain = 8

// A WaitLink is a task of a chain, and what it waits for.
type WaitLink struct {
	Session SessionName
	LUN     uint16
	ITT     uint32
	What    string // the command or function
	Waits   string // for what
	More    int    // tasks that it waits for besides the next link
}

// String returns one line.
func (l WaitLink) String() string {
	s := fmt.Sprintf("%s with ITT %#x to LUN %d of %s (tsih %d) waits for %s", l.What, l.ITT, l.LUN, l.Session.Initiator, l.Session.TSIH, l.Waits)
	if l.More > 0 {
		s += fmt.Sprintf(" (and %d more)", l.More)
	}
	return s
}

// A TaskWaitEvent says that a task has waited for other tasks for longer than limits.task_wait.
type TaskWaitEvent struct {
	ConnAddr
	Waited time.Duration // at least
	Limit  time.Duration
	Others int        // tasks of the connection that have waited as long, and are not reported alone
	Chain  []WaitLink // each waits for the next; the first is the task
}

// sampledTask identifies a task between two looks: slots are used again.
type sampledTask struct {
	t   *Task
	seq uint64
	itt uint32
	sn  uint32
}

// A sample is what the timer knows of a task that waits.
type sample struct {
	since    time.Duration // when it was first seen to wait, by clock
	reported bool
}

// identity returns what tells t from others that use its slot.
//
// Preconditions: t.conn.mu is held.
func (t *Task) identity() sampledTask {
	return sampledTask{t, t.seq, t.header().ITT(), t.header().CmdSN()}
}

// waitsForTasks returns what t waits for, if that is other tasks.
//
// Preconditions: t.conn.mu is held.
func (t *Task) waitsForTasks() waitsFor {
	switch {
	case t.state == taskWaiting && t.needsSN:
		return waitsMissing
	case t.state == taskRunning:
		return t.waits.Load()
	}
	return waitsNot
}

// lookWaits reports the task of the connection that has waited longest for other tasks, if that is longer than
// limits.task_wait, once. It returns when to look again.
func (k *keeper) lookWaits(now time.Duration) (next time.Duration) {
	c, limit := k.c, &k.c.node.shared.TaskWait
	bound := limit.Time()
	var (
		waiting map[sampledTask]*sample
		first   sampledTask
		oldest  *sample
		others  int
	)
	c.mu.Lock()
	c.shared.tasks.each(func(t *Task) {
		if t.conn != c || t.waitsForTasks() == waitsNot {
			return
		}
		id := t.identity()
		s := k.waits[id]
		if s == nil {
			s = &sample{since: now}
		}
		if waiting == nil {
			waiting = map[sampledTask]*sample{}
		}
		waiting[id] = s
		if s.reported || now-s.since < bound {
			return
		}
		s.reported = true
		if oldest != nil {
			others++
		}
		if oldest == nil || s.since < oldest.since || s.since == oldest.since && pdu.Before(id.sn, first.sn) {
			first, oldest = id, s
		}
	})
	c.mu.Unlock()
	k.waits = waiting
	if oldest != nil {
		e := TaskWaitEvent{ConnAddr: c.addr(), Waited: now - oldest.since, Limit: bound, Others: others, Chain: c.chain(first)}
		if len(e.Chain) > 0 { // else it has ended meanwhile
			limit.Bite(c.sess.key.initiator)
			c.opt.Events(e)
		}
	}
	return lookInterval(bound)
}

// A chainEnd is where a chain continues.
type chainEnd struct {
	s  *session
	id sampledTask
}

// chain returns the tasks of which each waits for the next, beginning with one of the session of c.
func (c *conn) chain(first sampledTask) (links []WaitLink) {
	seen := map[sampledTask]bool{}
	for at := (chainEnd{c.sess, first}); at.s != nil && !seen[at.id] && len(links) < maxChain; {
		seen[at.id] = true
		link, kind, next, ok := at.look()
		if !ok {
			break
		}
		if kind == waitsOthers || kind == waitsAborted && next.s == nil {
			next = at.amongOthers(kind, &link)
		}
		links = append(links, link)
		at = next
	}
	return links
}

// look describes the task, and finds what it waits for in its session. It returns false if the task has ended.
func (e chainEnd) look() (link WaitLink, kind waitsFor, next chainEnd, ok bool) {
	s, t := e.s, e.id.t
	sh := s.shared
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if !sh.tasks.any(func(u *Task) bool { return u == t }) || t.identity() != e.id {
		return link, waitsNot, next, false
	}
	number, _ := lun.DecodeLUN(t.header().LUN())
	kind = t.waitsForTasks()
	link = WaitLink{Session: s.name(), LUN: number, ITT: e.id.itt, What: t.what(), Waits: t.waitsText(kind)}
	if kind == waitsOlder || kind == waitsAborted {
		sh.tasks.each(func(u *Task) {
			if u == t || kind == waitsOlder && !t.mustFollow(u) || kind == waitsAborted && !(u.aborted.Load() && t.ends(u)) {
				return
			}
			link.More++
			if next.s == nil || u.seq < next.id.seq {
				next = chainEnd{s, u.identity()}
			}
		})
		link.More = max(link.More-1, 0)
	}
	return link, kind, next, true
}

// amongOthers finds what the task waits for in other sessions, and counts that in link.
func (e chainEnd) amongOthers(kind waitsFor, link *WaitLink) (next chainEnd) {
	s, t := e.s, e.id.t
	s.shared.mu.Lock()
	field, ordered, place, preempts := t.header().LUN(), t.isOrdered(), t.place.Load(), t.preempts
	s.shared.mu.Unlock()
	found := 0
	for _, o := range s.node.otherSessions(s) {
		o.shared.mu.Lock()
		o.shared.tasks.each(func(u *Task) {
			at := u.place.Load()
			switch {
			case !u.isCommand() || !s.nexus.SameUnit(u.header().LUN(), field):
				return
			case kind == waitsAborted:
				if !u.aborted.Load() || preempts != nil && preempts != o.shared {
					return
				}
			case at == 0 || ordered && at >= place || !ordered && (!u.isOrdered() || at > place):
				return
			}
			found++
			if next.s == nil {
				next = chainEnd{o, u.identity()}
			}
		})
		o.shared.mu.Unlock()
	}
	link.More = max(found-1, 0)
	return next
}

// ends reports whether t, a function or a PREEMPT AND ABORT, may have aborted u.
//
// Preconditions: t.conn.mu is held.
func (t *Task) ends(u *Task) bool {
	if t.header().Function() == pdu.AbortTask && !t.isCommand() {
		return u.header().ITT() == t.header().ReferencedTaskTag()
	}
	return u.isCommand()
}

// what returns the name of the command or function of t.
func (t *Task) what() string {
	h := t.header()
	switch op := h.Opcode(); op {
	case pdu.SCSICommand:
		name := lun.CommandName(h.CDB())
		if t.isOrdered() {
			name = "ORDERED " + name
		}
		return name
	case pdu.TaskMgmtReq:
		if name, ok := functionNames[h.Function()]; ok {
			return name
		}
		return fmt.Sprintf("task management function %d", h.Function())
	default:
		return op.String()
	}
}

// functionNames are the names of RFC 7143, section 11.5.1.
var functionNames = map[byte]string{
	pdu.AbortTask: "ABORT TASK", pdu.AbortTaskSet: "ABORT TASK SET", pdu.ClearTaskSet: "CLEAR TASK SET",
	pdu.LogicalUnitReset: "LOGICAL UNIT RESET", pdu.TargetWarmReset: "TARGET WARM RESET",
	pdu.TargetColdReset: "TARGET COLD RESET", pdu.TaskReassign: "TASK REASSIGN", pdu.ITNexusReset: "I_T NEXUS RESET",
}

// waitsText returns what t waits for, in words.
//
// Preconditions: t.conn.mu is held.
func (t *Task) waitsText(kind waitsFor) string {
	invariant.Held(&t.conn.mu)
	switch kind {
	case waitsOlder:
		return "older commands of its session"
	case waitsOthers:
		return "commands of other sessions that came before it"
	case waitsAborted:
		return "tasks that it ends"
	case waitsMissing:
		return fmt.Sprintf("CmdSN %d, which its initiator has not sent", t.conn.shared.win.exp)
	}
	_, missing, owes := t.progress()
	switch {
	case owes:
		return fmt.Sprintf("%d bytes of data from its initiator", missing)
	case t.state == taskWaiting || t.state == taskReady:
		return "its turn on its connection"
	case t.state == taskHeld:
		return "its initiator to acknowledge earlier responses"
	case t.state == taskParked:
		return "a connection of its session"
	case t.cmd.Inside():
		return "its LUN"
	}
	return "memory, or the network of its initiator"
}

// Kind implements Event.
func (TaskWaitEvent) Kind() string { return "session" }

// Log writes e as a warning of one line with the attributes extra.
func (e TaskWaitEvent) Log(l *slog.Logger, extra ...slog.Attr) {
	first, parts := &e.Chain[0], make([]string, len(e.Chain))
	for i := range e.Chain {
		parts[i] = e.Chain[i].String()
	}
	attrs := append(append(e.ConnAddr.attrs(), first.Session.handle()...), extra...)
	l.LogAttrs(context.Background(), slog.LevelWarn, "a task waits for others", append(append(attrs, first.Session.names()...),
		slog.Int("lun", int(first.LUN)), slog.String("itt", fmt.Sprintf("%#x", first.ITT)), slog.Duration("waited", e.Waited.Round(time.Millisecond)),
		slog.Duration("limit", e.Limit), slog.Int("others", e.Others), slog.String("chain", strings.Join(parts, "; ")))...)
}
