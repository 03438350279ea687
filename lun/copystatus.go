package lun

import (
	"encoding/binary"
	"errors"
	"sync"
	"sync/atomic"
)

// Service actions of EXTENDED COPY and of RECEIVE COPY RESULTS (SPC-4, table of third-party copy commands).
const (
	saCopyLID1         = 0x00
	saCopyLID4         = 0x01
	saPopulateToken    = 0x10
	saWriteUsingToken  = 0x11
	saCopyAbort        = 0x1c
	saStatusLID1       = 0x00
	saCopyParameters   = 0x03
	saStatusLID4       = 0x05
	saTokenInformation = 0x07
	backgroundPerNexus = 16 // copies that continue after GOOD, of an I_T_L nexus
	backgroundCopies   = 64 // and of the process
)

// COPY OPERATION STATUS of RECEIVE COPY STATUS(LID4) (SPC-4, section 6.25). RECEIVE COPY STATUS(LID1) has 0 for
// both copies in progress, and copyFailed for copyTerminated.
const (
	copyGood         = 0x01
	copyFailed       = 0x02
	copyPartial      = 0x03 // no error, but the token had less data than the command requested
	copyInForeground = 0x11
	copyInBackground = 0x12
	copyTerminated   = 0x60
)

// TRANSFER COUNT UNITS.
const (
	countBytes  = 0x00
	countBlocks = 0xf1 // of the destination
)

// condNoCopyResources refuses a copy because too many are in progress: INSUFFICIENT RESOURCES.
var condNoCopyResources = Sense{keyIllegalRequest, 0x55, 0x03}

// condCopyStopped is the end of a copy that COPY OPERATION ABORT has ended: I/O PROCESS TERMINATED.
var condCopyStopped = Sense{keyCopyAborted, 0x00, 0x06}

// errCopyStopped ends a copy step after COPY OPERATION ABORT.
var errCopyStopped = errors.New("the copy was ended by COPY OPERATION ABORT")

// copies are the third-party copies of an I_T_L nexus, by list identifier. Those that ended stay until RECEIVE COPY STATUS
// has reported them, until their identifier is used again, or until maxCopies others began after them.
type copies struct {
	mu         sync.Mutex
	of         map[uint32]*copyStatus // guarded by mu
	begun      uint64                 // guarded by mu
	background int                    // guarded by mu: copies that run after their commands
}

// A copyStatus is a third-party copy in progress, or its outcome. Its fields are guarded by copies.mu, except stop.
type copyStatus struct {
	sa       byte // of the command
	status   byte
	end      byte // SCSI status of the end
	sense    [maxSenseLen]byte
	senseLen int
	segments uint16 // done
	steps    uint16 // modulo 2^16
	octets   uint64 // written, or of POPULATE TOKEN that the token stands for
	partial  bool   // the token had less data than the command requested
	token    *token // that POPULATE TOKEN made, and RECEIVE ROD TOKEN INFORMATION has not returned
	number   uint64 // in the order of begin
	op       *Command
	stop     atomic.Bool // the copy ends after its current step
}

func (s *copyStatus) inProgress() bool { return s.op != nil }

// begin enters the copy s, which op does, unless one with that identifier is in progress, or too many are.
func (l *copies) begin(id uint32, s *copyStatus, op *Command) Sense {
	l.mu.Lock()
	defer l.mu.Unlock()
	if was := l.of[id]; was != nil && was.inProgress() {
		return condOperationInProgress
	}
	delete(l.of, id)
	if len(l.of) >= maxCopies && !l.forgetOldest() {
		return condNoCopyResources
	}
	if l.of == nil {
		l.of = map[uint32]*copyStatus{}
	}
	l.begun++
	s.number, s.status, s.op = l.begun, copyInForeground, op
	op.stop = &s.stop
	l.of[id] = s
	return condNone
}

// supersede forgets the copy with that identifier unless it is in progress: the initiator has sent another command with it (SPC-4,
// sections 6.24 to 6.26). If that one is refused, the outcome of the copy before is not taken for its own.
func (l *copies) supersede(id uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if was := l.of[id]; was != nil && !was.inProgress() {
		delete(l.of, id)
	}
}

// forgetOldest forgets the copy that has ended and began first.
//
// Preconditions: l.mu is held.
func (l *copies) forgetOldest() bool {
	oldest, found := uint32(0), false
	for id, s := range l.of {
		if !s.inProgress() && (!found || s.number < l.of[oldest].number) {
			oldest, found = id, true
		}
	}
	delete(l.of, oldest)
	return found
}

// fork makes s, which op entered, a copy that continues after its command, and returns the Command that continues it. It
// returns nil if too many do.
func (l *copies) fork(s *copyStatus, op *Command) *Command {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.background >= backgroundPerNexus {
		return nil
	}
	if inBackground.Add(1) > backgroundCopies {
		inBackground.Add(-1)
		return nil
	}
	l.background++
	next := &Command{nexus: op.nexus, itl: op.itl, unit: op.unit, row: op.row, CDB: make([]byte, len(op.CDB)), Abort: &s.stop, stop: &s.stop, begun: op.begun}
	copy(next.CDB, op.CDB)
	next.call.Who = op.call.Who
	op.stop = nil
	s.status, s.op = copyInBackground, next
	return next
}

// inBackground counts the copies of the process that continue after their commands.
var inBackground atomic.Int32

// note adds a step that wrote that many bytes.
func (l *copies) note(s *copyStatus, octets int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s.octets += uint64(octets)
	s.steps++
}

// octetsOf returns how many bytes s has written.
func (l *copies) octetsOf(s *copyStatus) uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return s.octets
}

// noteLoss notes that what s has written may be lost, except for that many bytes.
func (l *copies) noteLoss(s *copyStatus, octets uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s.octets = octets
}

// noteSegment counts a segment as done.
func (l *copies) noteSegment(s *copyStatus) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s.segments++
}

// finish notes how op, which did the copy s, has ended.
func (l *copies) finish(s *copyStatus, op *Command) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case !op.failed:
		s.status = copyGood
	case op.stopped() || op.aborted():
		s.status = copyTerminated
	case s.partial:
		s.status = copyPartial
	default:
		s.status = copyFailed
	}
	s.end = op.Status
	s.senseLen = copy(s.sense[:], op.sense)
	if s.op != nil && s.op == op && op.Abort == &s.stop {
		l.background--
		inBackground.Add(-1)
	}
	s.op = nil
}

// take returns a status, and forgets it if it is final and has no token that is still to be returned.
func (l *copies) take(id uint32) (s copyReport, ok bool) {
	return l.takeIf(id, func(s *copyReport) bool { return s.token == nil })
}

// takeIf returns a status, and forgets it if it is final and complete says so.
func (l *copies) takeIf(id uint32, complete func(*copyReport) bool) (s copyReport, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.of[id]
	if c == nil {
		return s, false
	}
	s = c.report()
	if !c.inProgress() && complete(&s) {
		delete(l.of, id)
	}
	return s, true
}

// A copyReport is what RECEIVE COPY STATUS returns of a copyStatus.
type copyReport struct {
	sa, status, end byte
	segments, steps uint16
	octets          uint64
	sense           []byte
	token           *token
}

// report returns the present state of s.
//
// Preconditions: copies.mu is held.
func (s *copyStatus) report() copyReport {
	r := copyReport{s.sa, s.status, s.end, s.segments, s.steps, s.octets, append([]byte(nil), s.sense[:s.senseLen]...), nil}
	if s.status == copyGood {
		r.token = s.token
	}
	return r
}

// abort ends the copy with that identifier and returns once it writes no more. ok is false if none is in progress.
func (l *copies) abort(id uint32) (ok bool) {
	l.mu.Lock()
	s := l.of[id]
	if s == nil || !s.inProgress() {
		l.mu.Unlock()
		return false
	}
	to := s.halt()
	l.mu.Unlock()
	if to != nil {
		to.endCopies()
	}
	return true
}

// halt makes s end after its current step, and returns the unit to which that step may write, or nil.
//
// Preconditions: copies.mu is held, and s is in progress.
func (s *copyStatus) halt() *Unit {
	s.stop.Store(true)
	if s.status == copyInBackground {
		s.op.Cancel()
	}
	return s.op.copyTo.Load() // after stop: a later step sees it
}

// haltBackground makes all copies end that continue after their commands, and returns the units to which their current
// steps may write. Copies of commands in progress end with them.
func (l *copies) haltBackground() (to []*Unit) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for id, s := range l.of {
		if s.token != nil && !s.inProgress() { // its data is discarded (SPC-4, section 6.26)
			delete(l.of, id)
		}
	}
	if l.background == 0 {
		return nil
	}
	for _, s := range l.of {
		if s.inProgress() && s.status == copyInBackground {
			if u := s.halt(); u != nil {
				to = append(to, u)
			}
		}
	}
	return to
}

// endAll waits until no copy that haltBackground ended writes to the units any longer.
func endAll(units []*Unit) {
	for _, u := range units {
		u.endCopies()
	}
}

// stopped reports whether COPY OPERATION ABORT, or what ends a copy in the background, has ended c.
func (c *Command) stopped() bool { return c.stop != nil && c.stop.Load() }

// endCopyAbort executes COPY OPERATION ABORT (SPC-4, section 6.5): the copy of this I_T_L nexus with that list identifier
// writes nothing more once the command has ended.
func endCopyAbort(_ *Unit, c *Command) {
	if !c.itl.copies.abort(binary.BigEndian.Uint32(c.CDB[2:])) {
		c.failCDB(2, noField)
	}
}

// receiveCopyStatus executes RECEIVE COPY STATUS(LID1) (SPC-4, section 6.24).
func receiveCopyStatus(_ *Unit, c *Command) bool {
	const inProgress = 0
	s, ok := c.itl.copies.take(uint32(c.CDB[2]))
	if !ok {
		return c.failCDB(2, noField)
	}
	b := c.zeroed(12)
	binary.BigEndian.PutUint32(b, 8)
	switch b[4] = s.status; s.status {
	case copyInForeground, copyInBackground:
		b[4] = inProgress
	case copyTerminated:
		b[4] = copyFailed
	}
	binary.BigEndian.PutUint16(b[5:], s.segments)
	b[7] = countBytes // 32 segments of 32 MiB have room
	binary.BigEndian.PutUint32(b[8:], uint32(s.octets))
	return c.report(b, binary.BigEndian.Uint32(c.CDB[10:]))
}

// receiveCopyStatus4 executes RECEIVE COPY STATUS(LID4) (SPC-4, section 6.25).
func receiveCopyStatus4(_ *Unit, c *Command) bool {
	s, ok := c.itl.copies.take(binary.BigEndian.Uint32(c.CDB[2:]))
	if !ok {
		return c.failCDB(2, noField)
	}
	b := s.append(c.zeroed(copyReportLen), countBytes, s.octets)
	binary.BigEndian.PutUint32(b, uint32(len(b)-4))
	return c.report(b, binary.BigEndian.Uint32(c.CDB[10:]))
}

// copyReportLen is the length in bytes of RECEIVE COPY STATUS(LID4) before the sense data.
const copyReportLen = 32

// pollDelay is the ESTIMATED STATUS UPDATE DELAY of a copy in progress, in ms.
const pollDelay = 100

// paddedSense returns the sense data, which is a multiple of four bytes long.
func (s *copyReport) paddedSense() []byte {
	if s.status == copyTerminated { // nobody gets any of that
		return nil
	}
	return append(s.sense, make([]byte, -len(s.sense)&3)...)
}

// append fills b, the copyReportLen bytes before the sense data, and appends the sense data. count is the TRANSFER COUNT in
// those units.
func (s *copyReport) append(b []byte, units byte, count uint64) []byte {
	const never = 0xfffffffe // more than 2^32-3 ms: nothing is to come
	be := binary.BigEndian
	b[4], b[5] = s.sa, s.status
	be.PutUint16(b[6:], s.steps)
	be.PutUint32(b[8:], never)
	if s.status == copyInForeground || s.status == copyInBackground {
		be.PutUint32(b[8:], pollDelay)
	}
	sense := s.paddedSense()
	b[12], b[13], b[14], b[15] = s.end, byte(len(sense)), byte(len(s.sense)), units
	if s.status == copyTerminated {
		b[12], b[14] = StatusTaskAborted, 0
	}
	be.PutUint64(b[16:], count)
	be.PutUint16(b[24:], s.segments)
	return append(b, sense...)
}
