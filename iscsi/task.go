package iscsi

import (
	"sync/atomic"

	"github.com/iser-target/iser-target/iscsi/fifo"
	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/invariant"
)

// A taskState says where a task is. The picture is in doc.go.
type taskState uint8

const (
	taskFree     taskState = iota // not in the task table
	taskWaiting                   // for its CmdSN or for unsolicited data
	taskReady                     // in conn.ready
	taskRunning                   // a goroutine works on it
	taskFetching                  // a GetData is outstanding; no goroutine
	taskHeld                      // a fence holds its response back; no goroutine
	taskParked                    // its connection is lost; no goroutine, no mover
)

// taskMoves has the states that may follow each state, one bit each. A task can leave the table
// from every state but one: GetData ends before.
var taskMoves = [...]uint8{
	taskFree: 1<<taskWaiting |
		1<<taskReady | // a PDU that no request asked for
		1<<taskRunning, // an answer that is sent again on another connection
	taskWaiting:  1<<taskReady | 1<<taskRunning | 1<<taskParked | 1<<taskFree,
	taskReady:    1<<taskRunning | 1<<taskHeld | 1<<taskParked | 1<<taskFree,
	taskRunning:  1<<taskFetching | 1<<taskHeld | 1<<taskParked | 1<<taskFree,
	taskFetching: 1 << taskRunning,
	taskHeld:     1<<taskParked | 1<<taskFree,
	taskParked:   1<<taskRunning | 1<<taskFree,
}

// maxResponseData is the longest data segment of a SCSI Response: SenseLength and 126 bytes of
// sense. That is what ib_iser's receive buffers hold.
const maxResponseData = 128

// A Task is a slot for one request from its PDU to its response, or for one PDU that no request
// asked for. Slots are used again and again. A connection has QueueDepth and a few more.
type Task struct {
	// Header and Segment are the PDU that SendControl queues. They do not change until the mover
	// has called Sent.
	Header  [pdu.BHSLen]byte
	Segment []byte

	// Mover is the mover's own state: what Datamover.NewTask made.
	Mover any

	conn *conn
	cmd  lun.Command

	req     [pdu.BHSLen]byte      // the request's BHS
	scratch [maxResponseData]byte // room for a short Segment
	stash   *Buffer               // room for data of the request; a free slot may keep it

	aborted atomic.Bool // set under conn.mu: stop soon, with no response unless taken

	// The order among sessions: see ordered.go.
	place atomic.Uint64 // 0: none yet, or no longer
	hold  atomic.Int32  // placeKept, placeIdle or placeLost
	waits atomic.Int32  // a waitsFor; waitsNot unless its goroutine waits

	link                fifo.Link[Task] // in a taskQueue; under conn.mu
	nextByITT, nextFree *Task           // in taskTable (conn.mu), of free slots (slotPool.mu)

	// Of quota.
	waiter  fifo.Link[Task]
	wake    chan struct{} // ends a wait for a quota; capacity 1
	wants   int           // bytes that it waits for, or has got
	least   int           // bytes that it can continue with
	granted bool

	resend resendState
	taskVars
}

// taskVars is the part of a Task that is zero in a free slot.
type taskVars struct {
	watch // of the goroutine that has the task

	// Under conn.mu.
	state     taskState
	seq       uint64  // order of becoming ready
	needsSN   bool    // waits for CmdSNs before its own
	needsData bool    // waits for unsolicited Data-Out PDUs
	taken     bool    // aborted by another session: TASK ABORTED is its answer; see settle
	cleared   bool    // ended because a connection or session ends, not by a function
	preempts  *shared // where this PREEMPT AND ABORT waits for the commands that it has aborted
	abortedIn uint64  // the call of detachLater that will detach it; 0: none
	await     awaited // the latest data that it waits, or waited, for

	recovery taskRecovery

	// Of the goroutine that runs the task, or of the holder of the baton before.
	fromTarget bool      // no request: never in the table
	unexpected bool      // of these: counts as unexpected
	bound      bool      // the mover has a binding
	mayWait    bool      // the session has ORDERED tasks, possibly this one
	data       []byte    // data segment of a Text Request or NOP-Out
	refusal    lun.Sense // why the transport fails the command; zero: it does not
	noMemory   bool      // for the data of the request: TASK SET FULL, or Reject
	isFence    bool      // no other response may overtake the response of this task
	info       [3]byte   // Additional Response Information of a task management function

	// Data phase of a command. Offsets and lengths are bytes.
	begun       bool
	unsolicited uint32 // write data that came, or comes, unsolicited
	arrived     uint32 // of that
	dataSN      uint32 // of the next unsolicited Data-Out
	total       uint64 // how much data moves in all
	off         uint64 // what is done
	buf         *Buffer
	placed      bool // the unsolicited data is in buf, not in stash
	piece       int  // length of the piece that is being fetched into buf
	fetched     bool // that has ended
	fetchErr    error
	transfers   uint32 // PutData and GetData calls
}

// A taskQueue is a queue of tasks.
type taskQueue = fifo.Queue[Task]

// Request returns the BHS of the request that t serves.
func (t *Task) Request() pdu.BHS { return t.header() }

// Sent frees the slot of t, unless the PDU may have to be sent again. The mover calls it when
// Header and Segment have left, or when the connection has ended. It takes no lock that the core
// holds while it calls the mover.
func (t *Task) Sent() {
	if t.recovery.kept {
		var tally lun.Tally
		t.countSpent(clock(), &tally)
		tally.End()
		t.conn.keptSent(t)
		return
	}
	t.conn.freeTask(t)
}

func (t *Task) header() pdu.BHS { return pdu.BHS(t.req[:]) }
func (t *Task) immediate() bool { return t.header().Immediate() }
func (t *Task) isCommand() bool { return t.header().Opcode() == pdu.SCSICommand }
func (t *Task) isOrdered() bool { return t.isCommand() && t.header().Attr() == pdu.AttrOrdered }

// become changes the state of t.
//
// Preconditions: t.conn.mu is held.
func (t *Task) become(s taskState) {
	if invariant.Enabled {
		invariant.Held(&t.conn.mu)
		invariant.Check(taskMoves[t.state]&(1<<s) != 0, "task moves from state %d to %d", t.state, s)
	}
	t.state = s
}

// reset empties the slot. Its memory keeps nothing alive that belonged to the task.
func (t *Task) reset() {
	t.taskVars = taskVars{}
	// A store that other processors see costs much more than a load.
	if t.aborted.Load() {
		t.aborted.Store(false)
	}
	if t.resend.refused.Load() {
		t.resend.refused.Store(false)
	}
	if t.place.Load() != 0 {
		t.place.Store(0)
	}
	if t.hold.Load() != placeKept {
		t.hold.Store(placeKept)
	}
	t.Segment, t.cmd.CDB = nil, nil
}

// run starts the request of t, or continues it after a GetData or on another connection.
func (t *Task) run() {
	switch {
	case t.recovery.isSNACK:
		t.runSNACK()
	case t.fromTarget:
		t.conn.sendFromTarget(t)
	case t.recovery.reassigned:
		t.recovery.reassigned = false
		t.resumeReassigned()
	case t.fetched:
		t.fetched = false
		t.afterFetch()
	default:
		requests[t.header().Opcode()].run(t)
	}
}

// takeData keeps the data segment of a ping, as much of it as the answer can carry.
func (t *Task) takeData(n *Notice) error {
	t.noMemory = n.Reject != 0
	t.keepData(n.Data[:min(len(n.Data), t.conn.dm.MaxSendSegment())])
	return nil
}

// takeText keeps the data segment of a Text Request. If that is too long it keeps just enough to
// show it.
func (t *Task) takeText(n *Notice) error {
	t.noMemory = n.Reject != 0
	t.keepData(n.Data[:min(len(n.Data), keys.MaxText+1)])
	return nil
}

// keepData copies data to t.data. Without memory for it the request will be rejected.
func (t *Task) keepData(data []byte) {
	if len(data) == 0 {
		return
	}
	room := t.room(len(data))
	if room == nil {
		t.noMemory = true
		return
	}
	t.data = room[:copy(room, data)]
}

// room returns at least n bytes of memory that t has until it ends, or nil if memory is short. What
// it has returned before is not valid any longer.
func (t *Task) room(n int) []byte {
	if t.stash != nil && len(t.stash.data) < n {
		t.giveStash()
	}
	if t.stash == nil {
		if t.stash = t.conn.budget.other(n); t.stash == nil {
			return nil
		}
	}
	return t.stash.data
}

// giveStash gives back the memory of room.
func (t *Task) giveStash() {
	if b := t.stash; b != nil {
		t.stash = nil
		b.Release()
	}
}
