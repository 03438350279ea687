package lun

import (
	"bytes"
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
// end of the nexus or the task that requested it stops it. The end of the process interrupts it:
// Options.Sanitizations has it, and New restarts it.
//
//	idle ── SANITIZE ──▶ running ── done ──▶ idle
//	  ▲                   ▲  │
//	  │                   │  └─ an error ──▶ failed: no access to the medium
//	  │                   └── SANITIZE ────────┤
//	  └── EXIT FAILURE MODE, if AUSE was set ──┘
type sanitizer struct {
	state    atomic.Uint32
	progress atomic.Uint32 // in 1/65536
	stop     atomic.Bool   // the unit is being closed
	formats  atomic.Bool   // the job that runs, or failed, is a FORMAT UNIT
	begun    atomic.Uint32 // jobs: see Command.begun

	mu           sync.Mutex
	unrestricted bool          // guarded by mu: AUSE of the last SANITIZE
	done         chan struct{} // guarded by mu: closed when the job ends

	call fair.Call // of the goroutine of the job
}

const (
	sanitizeIdle = iota
	sanitizeRunning
	sanitizeFailed
)

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
	return u.sync(nil)
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
	if err := u.sync(nil); err != nil || !u.isThin() {
		return err
	}
	if err := u.inSanitize(heavyStep(0), func() error { return u.storeDiscard(0, size) }); err != nil {
		return err
	}
	return u.sync(nil)
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
	done, ok := u.beginSanitize(c, job)
	if !ok || immediate {
		return ok
	}
	tick := time.NewTicker(abortPoll)
	defer tick.Stop()
	for {
		select {
		case <-done:
			return u.sanitizer.state.Load() != sanitizeFailed || c.fail(job.failure())
		case <-tick.C:
			if c.aborted() {
				return c.fail(condAborted)
			}
		}
	}
}

// beginSanitize stores the job of c, and runs it in the background.
func (u *Unit) beginSanitize(c *Command, job *sanitizeJob) (done chan struct{}, ok bool) {
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
	case s.stop.Load():
		return nil, c.fail(condInternal)
	}
	if unsure, err := u.keepSanitize(job, false); err != nil {
		k := condInternal
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
func (u *Unit) startSanitize(job *sanitizeJob) (done chan struct{}) {
	s := &u.sanitizer
	invariant.Held(&s.mu)
	s.unrestricted = job.unrestricted
	s.formats.Store(job.action == formatUnit)
	done = make(chan struct{})
	s.done = done
	s.call.Abort = &s.stop
	s.progress.Store(0)
	// Writes in progress end here, and later ones see the state.
	all := u.ranges.exclude(allStripes)
	s.begun.Add(1)
	u.endTokens(condTokenCancelled) // before a copy sees the state, or it would not know why it may not read
	s.state.Store(sanitizeRunning)
	all.release()
	go func() {
		defer close(done)
		s.state.Store(u.endSanitize(job, job.run(u)))
	}()
	return done
}

// endSanitize returns the state after a job that ended with err.
func (u *Unit) endSanitize(job *sanitizeJob, err error) uint32 {
	switch {
	case err == nil:
		if _, err := u.keepSanitize(nil, false); err == nil {
			u.sanitizeEvent(SanitizeEvent{Stage: SanitizeDone, Action: job.action})
			return sanitizeIdle
		}
		// The next start would erase what initiators write from now on.
	case errors.Is(err, backend.ErrClosed):
		u.sanitizeEvent(SanitizeEvent{Stage: SanitizeInterrupted, Action: job.action})
	default:
		u.sanitizeEvent(SanitizeEvent{Stage: SanitizeFailed, Action: job.action, Err: err})
		// If this fails too, the next start restarts the job, which is as good.
		u.keepSanitize(job, true)
	}
	return sanitizeFailed
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
	if !ok {
		return err
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

// close stops a sanitize that is running.
func (s *sanitizer) close() {
	s.mu.Lock()
	s.stop.Store(true)
	s.call.Cancel()
	done := s.done
	s.mu.Unlock()
	if done != nil {
		<-done
	}
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

// Sanitizations keeps which logical units are being sanitized, or failed to be, all in one file.
// A sanitize continues when the process starts again, and nobody has access to a medium that is
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
