package lun

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/lun/fair"
	"github.com/iser-target/iser-target/lun/invariant"
	"github.com/iser-target/iser-target/lun/state"
)

// A sanitizer overwrites a medium in the background (SBC-3, section 4.11), or formats it (section 4.33). Neither a reset nor the
// end of the nexus or the task that requested it stops it. The end of the process interrupts it, and so does the move of
// the store to another gateway: Options.Sanitizations has it, and New or ResumeSanitize restarts it.
//
//	idle ── SANITIZE ──▶ running ── done ──▶ idle
//	  ▲                   ▲  │
//	  │                   │  └─ an error ──▶ failed: no access to the medium
//	  │                   └── SANITIZE ────────┤
//	  └── EXIT FAILURE MODE, if AUSE was set ──┘
type sanitizer struct {
	state    atomic.Uint32
	progress atomic.Uint32 // in 1/65536
	stop     atomic.Bool   // the job has to end: the unit is being closed, or its store moves
	formats  atomic.Bool   // the job that runs, or failed, is a FORMAT UNIT
	begun    atomic.Uint32 // jobs: see Command.begun

	mu           sync.Mutex
	unrestricted bool         // guarded by mu: AUSE of the last SANITIZE
	run          *sanitizeRun // guarded by mu: the last job; nil: none
	closed       bool         // guarded by mu: no job begins any longer

	call fair.Call // of the goroutine of the job
}

const (
	sanitizeIdle = iota
	sanitizeRunning
	sanitizeFailed
)

// A sanitizeRun is a job on its way.
type sanitizeRun struct {
	done chan struct{}
	// What is known after done:
	state uint32 // of the sanitizer
	moved bool   // the next gateway that has the store runs the job again
}

// errSanitizing answers a command that began before the sanitize did.
var errSanitizing = errors.New("the medium is being sanitized")

// errErased answers a command that began before a sanitize that ended.
var errErased = errors.New("the medium was erased meanwhile")

// Bits of SANITIZE, byte 1.
const (
	sanitizeImmed = 0x80
	sanitizeAUSE  = 0x20
)

// Service actions of SANITIZE.
const (
	sanitizeOverwrite       = 0x01
	sanitizeBlockErase      = 0x02
	sanitizeCryptoErase     = 0x03
	sanitizeExitFailureMode = 0x1f

	// formatUnit is the action of a FORMAT UNIT. No service action has that value.
	formatUnit = 0x20
)

const (
	overwriteHeader = 4
	maxOverwrites   = 0x1f // OVERWRITE COUNT has five bits
	maxPattern      = 4096 // bytes: the longest block
)

// A sanitizeJob is what a SANITIZE command asks for.
type sanitizeJob struct {
	action       byte
	unrestricted bool
	passes       int // of OVERWRITE, like invert and pattern
	invert       bool
	pattern      []byte
}

// beginOverwrite checks the length of the list of SANITIZE OVERWRITE.
func beginOverwrite(u *Unit, c *Command) bool {
	c.DataOut, c.Whole = uint64(binary.BigEndian.Uint16(c.CDB[7:])), true
	if c.DataOut <= overwriteHeader || c.DataOut > overwriteHeader+uint64(u.info.BlockSize) {
		return c.failCDB(7, noField)
	}
	return true
}

// consumeOverwrite executes SANITIZE with the OVERWRITE service action (SBC-3, section 5.24.2.2).
func consumeOverwrite(u *Unit, c *Command, p []byte, _ uint64) bool {
	const invert = 0x80
	count, pattern := int(p[0]&maxOverwrites), p[overwriteHeader:]
	n := int(binary.BigEndian.Uint16(p[2:]))
	switch {
	case count == 0:
		return c.failList(0)
	case n == 0 || n > len(pattern):
		return c.failList(2)
	}
	return u.sanitize(c, &sanitizeJob{passes: count, invert: p[0]&invert != 0, pattern: bytes.Clone(pattern[:n])})
}

// endErase executes SANITIZE with the BLOCK ERASE and CRYPTOGRAPHIC ERASE service actions (SBC-3,
// sections 5.24.2.3 and 5.24.2.4). The medium has no key to forget, so the second erases the
// data, too.
func endErase(u *Unit, c *Command) { u.sanitize(c, &sanitizeJob{}) }

// run sanitizes the medium.
func (j *sanitizeJob) run(u *Unit) error {
	switch j.action {
	case sanitizeOverwrite:
	case formatUnit:
		return u.format()
	default:
		return u.erase()
	}
	block := make([]byte, u.info.BlockSize)
	for at := 0; at < len(block); {
		at += copy(block[at:], j.pattern)
	}
	for pass := range j.passes {
		if j.invert && pass > 0 {
			for i := range block {
				block[i] = ^block[i]
			}
		}
		if err := u.overwrite(block, pass, j.passes); err != nil {
			return err
		}
	}
	return nil
}

// overwrite fills the medium with copies of block and syncs. It is one pass of so many.
func (u *Unit) overwrite(block []byte, pass, passes int) error {
	p := make([]byte, 1<<20)
	for i := 0; i < len(p); i += len(block) {
		copy(p[i:], block)
	}
	size := u.Size()
	for off := int64(0); off < size; off += int64(len(p)) {
		if err := u.sanitizeWrite(p[:min(int64(len(p)), size-off)], off); err != nil {
			return err
		}
		if err := u.sanitizer.step(off, size, pass, passes); err != nil {
			return err
		}
	}
	return u.sanitizeSync()
}

// erase writes zeros to all space that the medium takes, before it gives the space back if it
// can: others may get it.
func (u *Unit) erase() error {
	zeros := make([]byte, 1<<20)
	size := u.Size()
	for off := int64(0); off < size; {
		var mapped bool
		var n int64
		err := u.inSanitize(heavyStep(0), func() (err error) {
			mapped, n, err = u.storeExtent(off)
			return err
		})
		if err == nil && mapped {
			n = min(n, int64(len(zeros)))
			err = u.sanitizeWrite(zeros[:n], off)
		}
		if err == nil {
			err = u.sanitizer.step(off, size, 0, 1)
		}
		if err != nil {
			return err
		}
		off += n
	}
	if err := u.sanitizeSync(); err != nil || !u.isThin() {
		return err
	}
	if err := u.inSanitize(heavyStep(0), func() error { return u.storeDiscard(0, size) }); err != nil {
		return err
	}
	return u.sanitizeSync()
}

// step notes the progress of a sanitize, and stops it when the unit is being closed.
func (s *sanitizer) step(off, size int64, pass, passes int) error {
	s.progress.Store(uint32((float64(pass) + float64(off)/float64(size)) / float64(passes) * 65536))
	if s.stop.Load() {
		return backend.ErrClosed
	}
	return nil
}

// abortPoll is how often a command that waits for a sanitize checks whether it was aborted.
const abortPoll = 10 * time.Millisecond

// sanitize runs the job of a SANITIZE in the background and, without IMMED, waits for its end.
func (u *Unit) sanitize(c *Command, job *sanitizeJob) bool {
	job.action, job.unrestricted = c.CDB[1]&saMask, c.CDB[1]&sanitizeAUSE != 0
	return u.runJob(c, job, c.CDB[1]&sanitizeImmed != 0)
}

// runJob runs a job in the background and, unless it is immediate, waits for its end.
func (u *Unit) runJob(c *Command, job *sanitizeJob, immediate bool) bool {
	run, ok := u.beginSanitize(c, job)
	if !ok || immediate {
		return ok
	}
	tick := time.NewTicker(abortPoll)
	defer tick.Stop()
	for {
		select {
		case <-run.done:
			switch {
			case run.moved:
				return c.fail(u.moved(c.nexus))
			case run.state == sanitizeFailed:
				return c.fail(job.failure())
			}
			return true
		case <-tick.C:
			if c.aborted() {
				return c.fail(condAborted)
			}
		}
	}
}

// beginSanitize stores the job of c, and runs it in the background.
func (u *Unit) beginSanitize(c *Command, job *sanitizeJob) (run *sanitizeRun, ok bool) {
	s := &u.sanitizer
	s.mu.Lock()
	defer s.mu.Unlock()
	switch state := s.state.Load(); {
	case c.aborted():
		return nil, c.fail(condAborted)
	case state == sanitizeRunning: // another command was faster
		return nil, c.failSense(u.sanitizing())
	case state == sanitizeFailed && job.action == formatUnit && !s.formats.Load():
		return nil, c.fail(condSanitizeFailed)
	case state == sanitizeFailed && !s.formats.Load() && !s.unrestricted && job.unrestricted:
		return nil, c.failCDB(1, 5)
	case s.closed:
		return nil, c.fail(condInternal)
	}
	if unsure, err := u.keepSanitize(job, false); err != nil {
		k := condInternal
		if errors.Is(err, state.ErrConflict) {
			k = u.moved(c.nexus)
		}
		if unsure {
			// The next start may erase the medium, so nobody may write to it.
			s.unrestricted = job.unrestricted
			s.formats.Store(job.action == formatUnit)
			s.state.Store(sanitizeFailed)
			k = job.failure()
		}
		return nil, c.fail(k)
	}
	u.sanitizeEvent(SanitizeEvent{Stage: SanitizeBegun, Action: job.action, Initiator: c.nexus.port.InitiatorName})
	s.call.Who = c.call.Who
	return u.startSanitize(job), true
}

// startSanitize runs a job that is stored already.
//
// Preconditions: u.sanitizer.mu is held.
func (u *Unit) startSanitize(job *sanitizeJob) *sanitizeRun {
	s := &u.sanitizer
	invariant.Held(&s.mu)
	s.unrestricted = job.unrestricted
	s.formats.Store(job.action == formatUnit)
	run := &sanitizeRun{done: make(chan struct{})}
	s.run = run
	s.stop.Store(false)
	s.call.Abort = &s.stop
	s.progress.Store(0)
	// Writes in progress end here, and later ones see the state.
	all := u.ranges.exclude(allStripes)
	s.begun.Add(1)
	u.endTokens(condTokenCancelled) // before a copy sees the state, or it would not know why it may not read
	s.state.Store(sanitizeRunning)
	all.release()
	go func() {
		defer close(run.done)
		u.sanitizeViews()
		run.state, run.moved = u.endSanitize(job, job.run(u))
		s.state.Store(run.state)
	}()
	return run
}

// endSanitize returns the state after a job that ended with err, and whether the next gateway that has the store runs the job again.
func (u *Unit) endSanitize(job *sanitizeJob, err error) (next uint32, moved bool) {
	if err == nil {
		if err = u.forgetSanitize(); err == nil {
			u.sanitizeEvent(SanitizeEvent{Stage: SanitizeDone, Action: job.action})
			return sanitizeIdle, false
		}
	}
	switch {
	case errors.Is(err, errNotForgotten):
		// The next start would erase what initiators write from now on.
	case errors.Is(err, backend.ErrClosed):
		u.sanitizeEvent(SanitizeEvent{Stage: SanitizeInterrupted, Action: job.action})
		if u.opt.Sanitizations.Shared() && !u.sanitizer.isClosed() {
			return sanitizeIdle, true
		}
	default:
		u.sanitizeEvent(SanitizeEvent{Stage: SanitizeFailed, Action: job.action, Err: err})
		// If this fails too, the next start restarts the job, which is as good.
		u.keepSanitize(job, true)
	}
	return sanitizeFailed, false
}

// errNotForgotten reports a job that ended well, but that the next start would find.
var errNotForgotten = errors.New("the end of a sanitize is not stored")

// forgetSanitize removes the record of a job that ended well. If gateways share the unit, it tries that until the store moves: the home of the
// record may be away for a moment only, and the initiators cannot end the job.
func (u *Unit) forgetSanitize() error {
	for {
		switch _, err := u.keepSanitize(nil, false); {
		case err == nil:
			return nil
		case !u.opt.Sanitizations.Shared():
			return errNotForgotten
		}
		if !u.sanitizer.pause(sanitizeRetry) {
			return backend.ErrClosed
		}
	}
}

// sanitizeRetry is the time between two attempts of a job on a store that gateways share.
const sanitizeRetry = 500 * time.Millisecond

// pause waits, and reports false if the job has to end.
func (s *sanitizer) pause(d time.Duration) bool {
	for end := time.Now().Add(d); !s.stop.Load() && time.Now().Before(end); {
		time.Sleep(abortPoll)
	}
	return !s.stop.Load()
}

// isClosed reports whether the unit is being closed.
func (s *sanitizer) isClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

// sanitizeEvent reports e about u.
func (u *Unit) sanitizeEvent(e SanitizeEvent) {
	e.Serial = u.opt.Identity.Serial
	u.opt.Events(e)
}

// keepSanitize stores the job, or with nil forgets it, if Options.Sanitizations is set. It returns
// what Put of the Keeper does.
func (u *Unit) keepSanitize(job *sanitizeJob, failed bool) (unsure bool, err error) {
	switch k, naa := u.opt.Sanitizations, u.opt.Identity.Serial; {
	case k == nil:
	case job == nil:
		unsure, err = k.Remove(naa, state.Patience{})
	default:
		unsure, err = k.Put(encodeJob(naa, job, failed), state.Patience{})
	}
	if err != nil {
		u.notStored(err)
	}
	return unsure, err
}

// ResumeSanitize makes a unit whose store moves here know what Options.Sanitizations says, which is up to date: it continues, from the
// beginning, what another gateway or process has begun. Call it while no command can use the store.
func (u *Unit) ResumeSanitize(ctx context.Context) error {
	if !u.opt.Sanitizations.Shared() {
		return nil
	}
	if run := u.sanitizer.halt(); run != nil { // until its end it may write
		select {
		case <-run.done:
		case <-ctx.Done():
			return fmt.Errorf("a sanitize that was interrupted has not ended yet: %w", context.Cause(ctx))
		}
	}
	return u.resumeSanitize()
}

// resumeSanitize restarts what the end of the process interrupted, even if the options do not
// allow SANITIZE any longer.
func (u *Unit) resumeSanitize() error {
	if u.opt.Sanitizations == nil {
		return nil
	}
	s := &u.sanitizer
	s.mu.Lock()
	defer s.mu.Unlock()
	e, ok, err := u.opt.Sanitizations.Get(u.opt.Identity.Serial)
	if err != nil || s.closed {
		return err
	}
	if !ok {
		s.state.Store(sanitizeIdle)
		return nil
	}
	job, err := e.decode()
	switch {
	case err != nil:
		return err
	case e.Failed || u.readOnly:
		u.sanitizeEvent(SanitizeEvent{Stage: SanitizeStuck, Action: job.action})
		s.unrestricted = job.unrestricted
		s.formats.Store(job.action == formatUnit)
		s.state.Store(sanitizeFailed)
	default:
		u.sanitizeEvent(SanitizeEvent{Stage: SanitizeRestarted, Action: job.action})
		u.startSanitize(job)
	}
	return nil
}

// close stops a sanitize that is running. None begins after that.
func (s *sanitizer) close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	if run := s.halt(); run != nil {
		<-run.done
	}
}

// halt makes the last job end soon, and returns it, or nil if none has begun.
func (s *sanitizer) halt() *sanitizeRun {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stop.Store(true)
	s.call.Cancel()
	return s.run
}

// endExitFailureMode executes SANITIZE with the EXIT FAILURE MODE service action (SBC-3, section
// 5.24.2.5).
func endExitFailureMode(u *Unit, c *Command) {
	s := &u.sanitizer
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.state.Load() != sanitizeFailed, s.formats.Load():
	case !s.unrestricted:
		c.failCDB(1, 4)
	default:
		if _, err := u.keepSanitize(nil, false); err != nil {
			c.fail(condInternal)
			return
		}
		s.state.Store(sanitizeIdle)
	}
}

// barredTo returns nil, or why c, which is for u and in progress, may not change the medium.
//
// Preconditions: stripes of u are held.
func (u *Unit) barredTo(c *Command) error {
	if err := u.barred(); err != nil {
		return err
	}
	return u.erased(c)
}

// erased returns nil, or that a sanitize has begun since c, which is for u, did. Then c reads nothing any longer: a part of its data
// would be from before the erasure, and the rest from after it.
//
// Preconditions: stripes of u are held.
func (u *Unit) erased(c *Command) error {
	switch {
	case u.isSanitizing():
		return errSanitizing
	case u.sanitizer.begun.Load() != c.begun:
		return errErased
	}
	return nil
}

// barred returns nil, or why no command in progress may change the medium.
func (u *Unit) barred() error {
	switch {
	case u.isSanitizing():
		return errSanitizing
	case u.detached.Load():
		return backend.ErrClosed
	}
	return nil
}

// isSanitizing reports whether a sanitize is running, and nobody may read or write.
func (u *Unit) isSanitizing() bool { return u.sanitizer.state.Load() == sanitizeRunning }

// sanitizing returns the sense data of a command that meets a running sanitize.
func (u *Unit) sanitizing() senseData {
	s := newSense(condSanitizing)
	if u.sanitizer.formats.Load() {
		s = newSense(condFormatting)
	}
	s.field, s.progress = int(min(u.sanitizer.progress.Load(), 0xffff)), true
	return s
}

// Sanitizations keeps which logical units are being sanitized, or failed to be, all in one file, or where gateways share them.
// A sanitize continues when the process starts again, or at the next gateway, and nobody has access to a medium that is
// half erased. Several goroutines may use it at once.
type Sanitizations = state.Keeper[sanitizeEntry]

var sanitizationsFormat = state.Format[state.Records[sanitizeEntry]]{Name: "sanitizations", Version: 1}

// A sanitizeEntry is the record of a unit that is not idle.
type sanitizeEntry struct {
	NAA          string `json:"naa"`          // Identity.Serial
	Action       byte   `json:"action"`       // service action of SANITIZE, or formatUnit
	Unrestricted bool   `json:"unrestricted"` // AUSE
	Failed       bool   `json:"failed"`
	Passes       int    `json:"passes"`  // of OVERWRITE, else 0; so are these
	Invert       bool   `json:"invert"`  // every second pass writes the complement
	Pattern      string `json:"pattern"` // hex digits
}

// OpenSanitizations opens the file at path, as OpenReservations does.
func OpenSanitizations(path string) (*Sanitizations, error) {
	return state.OpenKeeper(sanitizationsFormat, path)
}

// SharedSanitizeKey and the NAA are the key of a sanitizeEntry in a home that gateways share.
const SharedSanitizeKey = "sanitize/"

// OpenSharedSanitizations opens the records of units that gateways share. Only the gateway that has the store may change the record of a
// unit: home has to see to that, with an ErrConflict for the others. Before a gateway opens a store, it calls Refresh.
func OpenSharedSanitizations(ctx context.Context, home state.Home) (*Sanitizations, error) {
	return state.OpenKeeperIn(ctx, sanitizationsFormat, home, SharedSanitizeKey)
}

// ExamineSanitizations looks at the file of OpenSanitizations.
func ExamineSanitizations(path string, known []string) state.Condition {
	return state.ExamineRecords(sanitizationsFormat, path, known)
}

// SalvageSanitizations does what state.Salvage does, for that file.
func SalvageSanitizations(path string, known []string) ([]state.Loss, error) {
	return state.Salvage(sanitizationsFormat, path, known)
}

func encodeJob(naa string, j *sanitizeJob, failed bool) sanitizeEntry {
	return sanitizeEntry{naa, j.action, j.unrestricted, failed, j.passes, j.invert, hex.EncodeToString(j.pattern)}
}

func (e sanitizeEntry) Unit() string { return e.NAA }

func (e sanitizeEntry) Check() error {
	_, err := e.decode()
	return err
}

// decode reverses encodeJob. It refuses what no SANITIZE could have asked for.
func (e sanitizeEntry) decode() (*sanitizeJob, error) {
	pattern, err := hex.DecodeString(e.Pattern)
	if err != nil || hex.EncodeToString(pattern) != e.Pattern {
		return nil, fmt.Errorf("pattern %.40q: want lower-case hex digits", e.Pattern)
	}
	switch overwrite := e.Action == sanitizeOverwrite; {
	case !overwrite && e.Action != sanitizeBlockErase && e.Action != sanitizeCryptoErase && e.Action != formatUnit:
		return nil, fmt.Errorf("action %d: want %d, %d, %d or %d", e.Action,
			sanitizeOverwrite, sanitizeBlockErase, sanitizeCryptoErase, formatUnit)
	case !overwrite && (e.Passes != 0 || e.Invert || len(pattern) != 0):
		return nil, fmt.Errorf("action %d has no passes and no pattern", e.Action)
	case overwrite && (e.Passes < 1 || e.Passes > maxOverwrites):
		return nil, fmt.Errorf("%d passes, want 1 to %d", e.Passes, maxOverwrites)
	case overwrite && (len(pattern) < 1 || len(pattern) > maxPattern):
		return nil, fmt.Errorf("a pattern of %d bytes, want 1 to %d", len(pattern), maxPattern)
	}
	return &sanitizeJob{e.Action, e.Unrestricted, e.Passes, e.Invert, pattern}, nil
}
