package lun

import (
	"encoding/binary"
	"errors"
	"sync"
	"sync/atomic"

	"github.com/iser-target/iser-target/backend"
)

// A sanitizer overwrites a medium in the background (SBC-3, section 4.11).
// Neither a reset nor the end of the nexus that wanted it ends that; the end of
// the process does, and nothing resumes it.
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

	mu           sync.Mutex
	unrestricted bool          // guarded by mu: AUSE of the last SANITIZE
	done         chan struct{} // guarded by mu: closed when it is no longer running
}

const (
	sanitizeIdle = iota
	sanitizeRunning
	sanitizeFailed
)

// errSanitizing answers a write that began before the sanitize did.
var errSanitizing = errors.New("the medium is being sanitized")

// Bits of SANITIZE, octet 1.
const (
	sanitizeImmed = 0x80
	sanitizeAUSE  = 0x20
)

const overwriteHeader = 4

func beginOverwrite(u *Unit, c *Command) bool {
	c.DataOut, c.Whole = uint64(binary.BigEndian.Uint16(c.CDB[7:])), true
	if c.DataOut <= overwriteHeader || c.DataOut > overwriteHeader+uint64(u.info.BlockSize) {
		return c.failCDB(7, noField)
	}
	return true
}

// consumeOverwrite is SANITIZE with the OVERWRITE service action (SBC-3,
// section 5.24.2.2).
func consumeOverwrite(u *Unit, c *Command, p []byte, _ uint64) bool {
	const invert, countMask = 0x80, 0x1f
	count, pattern := int(p[0]&countMask), p[overwriteHeader:]
	n := int(binary.BigEndian.Uint16(p[2:]))
	switch {
	case count == 0:
		return c.failList(0)
	case n == 0 || n > len(pattern):
		return c.failList(2)
	}
	block := make([]byte, u.info.BlockSize)
	for at := 0; at < len(block); {
		at += copy(block[at:], pattern[:n])
	}
	inverted := p[0]&invert != 0
	return u.sanitize(c, func() error {
		for pass := range count {
			if inverted && pass > 0 {
				for i := range block {
					block[i] = ^block[i]
				}
			}
			if err := u.overwrite(block, pass, count); err != nil {
				return err
			}
		}
		return nil
	})
}

// overwrite fills the medium with copies of block and syncs; it is one pass of
// so many.
func (u *Unit) overwrite(block []byte, pass, passes int) error {
	p := make([]byte, 1<<20)
	for i := 0; i < len(p); i += len(block) {
		copy(p[i:], block)
	}
	for off := int64(0); off < u.info.Size; off += int64(len(p)) {
		if err := u.store.WriteAt(p[:min(int64(len(p)), u.info.Size-off)], off); err != nil {
			return err
		}
		if err := u.sanitizer.step(off, u.info.Size, pass, passes); err != nil {
			return err
		}
	}
	return u.store.Sync()
}

// endBlockErase is SANITIZE with the BLOCK ERASE service action (SBC-3, section
// 5.24.2.3). What takes space is overwritten before it is given back, for others
// may get it.
func endBlockErase(u *Unit, c *Command) {
	u.sanitize(c, func() error {
		zeros := make([]byte, 1<<20)
		for off := int64(0); off < u.info.Size; {
			mapped, n, err := backend.Extent(u.store, off)
			if err == nil && mapped {
				n = min(n, int64(len(zeros)))
				err = u.store.WriteAt(zeros[:n], off)
			}
			if err == nil {
				err = u.sanitizer.step(off, u.info.Size, 0, 1)
			}
			if err != nil {
				return err
			}
			off += n
		}
		if err := u.store.Sync(); err != nil {
			return err
		}
		if err := u.store.Discard(0, u.info.Size); err != nil {
			return err
		}
		return u.store.Sync()
	})
}

// step notes how far a sanitize is, and ends it when the unit is being closed.
func (s *sanitizer) step(off, size int64, pass, passes int) error {
	s.progress.Store(uint32((float64(pass) + float64(off)/float64(size)) / float64(passes) * 65536))
	if s.stop.Load() {
		return backend.ErrClosed
	}
	return nil
}

// sanitize runs f in the background and, without IMMED, waits for its end.
func (u *Unit) sanitize(c *Command, f func() error) bool {
	s := &u.sanitizer
	s.mu.Lock()
	unrestricted := c.CDB[1]&sanitizeAUSE != 0
	switch state := s.state.Load(); {
	case state == sanitizeRunning: // another one was faster
		s.mu.Unlock()
		return c.failSense(u.sanitizing())
	case state == sanitizeFailed && !s.unrestricted && unrestricted:
		s.mu.Unlock()
		return c.failCDB(1, 5)
	case s.stop.Load():
		s.mu.Unlock()
		return c.fail(condInternal)
	}
	s.unrestricted = unrestricted
	done := make(chan struct{})
	s.done = done
	s.progress.Store(0)
	// Writes that have begun are done then, and others find out.
	u.ranges.exclude(^stripeSet(0))
	s.state.Store(sanitizeRunning)
	u.ranges.admit(^stripeSet(0))
	s.mu.Unlock()
	go func() {
		defer close(done)
		if f() != nil {
			s.state.Store(sanitizeFailed)
		} else {
			s.state.Store(sanitizeIdle)
		}
	}()
	if c.CDB[1]&sanitizeImmed != 0 {
		return true
	}
	<-done
	if s.state.Load() == sanitizeFailed {
		return c.fail(condSanitizeFailed)
	}
	return true
}

// close ends a sanitize that is running.
func (s *sanitizer) close() {
	s.mu.Lock()
	s.stop.Store(true)
	done := s.done
	s.mu.Unlock()
	if done != nil {
		<-done
	}
}

// endExitFailureMode is SANITIZE with the EXIT FAILURE MODE service action
// (SBC-3, section 5.24.2.5).
func endExitFailureMode(u *Unit, c *Command) {
	s := &u.sanitizer
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.state.Load() != sanitizeFailed:
	case !s.unrestricted:
		c.failCDB(1, 4)
	default:
		s.state.Store(sanitizeIdle)
	}
}

// sanitizing is the sense data of a command that meets a running sanitize.
func (u *Unit) sanitizing() sense {
	return sense{cond: condSanitizing, field: int(min(u.sanitizer.progress.Load(), 0xffff)), bit: noField, progress: true}
}
