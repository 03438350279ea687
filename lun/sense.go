package lun

import (
	"cmp"
	"encoding/binary"
	"errors"
	"math"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/iser-target/iser-target/backend"
)

// SAM status codes.
const (
	StatusGood           = 0x00
	StatusCheckCondition = 0x02
	StatusBusy           = 0x08
	StatusTaskSetFull    = 0x28
	StatusTaskAborted    = 0x40
)

// Sense keys (SPC-4, section 4.5.6).
const (
	keyNoSense        = 0x00
	keyNotReady       = 0x02
	keyMediumError    = 0x03
	keyHardwareError  = 0x04
	keyIllegalRequest = 0x05
	keyUnitAttention  = 0x06
	keyDataProtect    = 0x07
	keyCopyAborted    = 0x0a
	keyAbortedCommand = 0x0b
	keyMiscompare     = 0x0e
)

// A Sense is the core of sense data: the sense key, the additional sense code, and its qualifier.
type Sense struct{ Key, ASC, ASCQ byte }

var (
	condNone                       = Sense{keyNoSense, 0x00, 0x00}
	condHeldUp                     = Sense{keyNotReady, 0x04, 0x00}      // CAUSE NOT REPORTABLE
	condNotReadyStopped            = Sense{keyNotReady, 0x04, 0x02}      // INITIALIZING COMMAND REQUIRED
	condBecomingReady              = Sense{keyNotReady, 0x04, 0x01}      // IN PROCESS OF BECOMING READY
	condNoStore                    = Sense{keyNotReady, 0x04, 0x03}      // MANUAL INTERVENTION REQUIRED
	condTransition                 = Sense{keyNotReady, 0x04, 0x0a}      // ASYMMETRIC ACCESS STATE TRANSITION
	condStandby                    = Sense{keyNotReady, 0x04, 0x0b}      // TARGET PORT IN STANDBY STATE
	condUnavailable                = Sense{keyNotReady, 0x04, 0x0c}      // TARGET PORT IN UNAVAILABLE STATE
	condAccessChanged              = Sense{keyUnitAttention, 0x2a, 0x06} // ASYMMETRIC ACCESS STATE CHANGED
	condSanitizing                 = Sense{keyNotReady, 0x04, 0x1b}      // SANITIZE IN PROGRESS
	condFormatting                 = Sense{keyNotReady, 0x04, 0x04}      // FORMAT IN PROGRESS
	condFormatCorrupted            = Sense{keyMediumError, 0x31, 0x00}   // MEDIUM FORMAT CORRUPTED
	condFormatFailed               = Sense{keyMediumError, 0x31, 0x01}   // FORMAT COMMAND FAILED
	condSelfTestFailed             = Sense{keyHardwareError, 0x3e, 0x03} // LOGICAL UNIT FAILED SELF-TEST
	condSanitizeFailed             = Sense{keyMediumError, 0x31, 0x03}   // SANITIZE COMMAND FAILED
	condNoMedium                   = Sense{keyNotReady, 0x3a, 0x02}      // MEDIUM NOT PRESENT - TRAY OPEN
	condWriteError                 = Sense{keyMediumError, 0x0c, 0x00}
	condReadError                  = Sense{keyMediumError, 0x11, 0x00} // UNRECOVERED READ ERROR
	condUnsynced                   = Sense{keyHardwareError, 0x0c, 0x00}
	condInternal                   = Sense{keyHardwareError, 0x44, 0x00}
	condTooLittle                  = Sense{keyIllegalRequest, 0x0e, 0x03} // INVALID FIELD IN COMMAND INFORMATION UNIT
	condListLength                 = Sense{keyIllegalRequest, 0x1a, 0x00} // PARAMETER LIST LENGTH ERROR
	condOpcode                     = Sense{keyIllegalRequest, 0x20, 0x00}
	condLBARange                   = Sense{keyIllegalRequest, 0x21, 0x00}
	condCDBField                   = Sense{keyIllegalRequest, 0x24, 0x00}
	condNoLUN                      = Sense{keyIllegalRequest, 0x25, 0x00}
	condListField                  = Sense{keyIllegalRequest, 0x26, 0x00}
	condNoSavedPages               = Sense{keyIllegalRequest, 0x39, 0x00}
	condRemovalPrevented           = Sense{keyIllegalRequest, 0x53, 0x02} // MEDIUM REMOVAL PREVENTED
	condWriteProtected             = Sense{keyDataProtect, 0x27, 0x00}
	condSoftwareProtected          = Sense{keyDataProtect, 0x27, 0x02} // LOGICAL UNIT SOFTWARE WRITE PROTECTED
	condSpace                      = Sense{keyDataProtect, 0x27, 0x07} // SPACE ALLOCATION FAILED WRITE PROTECT
	condAborted                    = Sense{keyAbortedCommand, 0x00, 0x00}
	condGuardCheck                 = Sense{keyAbortedCommand, 0x10, 0x01} // LOGICAL BLOCK GUARD CHECK FAILED
	condAppCheck                   = Sense{keyAbortedCommand, 0x10, 0x02} // LOGICAL BLOCK APPLICATION TAG CHECK FAILED
	condRefCheck                   = Sense{keyAbortedCommand, 0x10, 0x03} // LOGICAL BLOCK REFERENCE TAG CHECK FAILED
	condMiscompare                 = Sense{keyMiscompare, 0x1d, 0x00}
	condPowerOn                    = Sense{keyUnitAttention, 0x29, 0x00}
	condReset                      = Sense{keyUnitAttention, 0x29, 0x03} // BUS DEVICE RESET FUNCTION OCCURRED
	condClearedByTransport         = Sense{keyUnitAttention, 0x47, 0x7f} // SOME COMMANDS CLEARED BY ISCSI PROTOCOL EVENT
	condOperationInProgress        = Sense{keyIllegalRequest, 0x00, 0x16}
	condTooManyCSCDs               = Sense{keyIllegalRequest, 0x26, 0x06} // TOO MANY TARGET DESCRIPTORS
	condCSCDType                   = Sense{keyIllegalRequest, 0x26, 0x07} // UNSUPPORTED TARGET DESCRIPTOR TYPE CODE
	condTooManySegments            = Sense{keyIllegalRequest, 0x26, 0x08} // TOO MANY SEGMENT DESCRIPTORS
	condSegmentType                = Sense{keyIllegalRequest, 0x26, 0x09} // UNSUPPORTED SEGMENT DESCRIPTOR TYPE CODE
	condInlineData                 = Sense{keyIllegalRequest, 0x26, 0x0b} // INLINE DATA LENGTH EXCEEDED
	condCopyAborted                = Sense{keyCopyAborted, 0x00, 0x00}
	condUnreachableCopyTarget      = Sense{keyCopyAborted, 0x08, 0x04}
	condThirdPartyFailure          = Sense{keyCopyAborted, 0x0d, 0x01}   // THIRD PARTY DEVICE FAILURE
	condCopyUnderrun               = Sense{keyCopyAborted, 0x0d, 0x04}   // COPY TARGET DEVICE DATA UNDERRUN
	condCopyTargetNotReachable     = Sense{keyCopyAborted, 0x0d, 0x02}   // COPY TARGET DEVICE NOT REACHABLE
	condInexactSegment             = Sense{keyCopyAborted, 0x26, 0x0a}   // UNEXPECTED INEXACT SEGMENT
	condInquiryChanged             = Sense{keyUnitAttention, 0x3f, 0x03} // INQUIRY DATA HAS CHANGED
	condMediumChanged              = Sense{keyUnitAttention, 0x28, 0x00} // NOT READY TO READY CHANGE
	condModeChanged                = Sense{keyUnitAttention, 0x2a, 0x01} // MODE PARAMETERS CHANGED
	condSoftThreshold              = Sense{keyUnitAttention, 0x38, 0x07} // THIN PROVISIONING SOFT THRESHOLD REACHED
	condLogChanged                 = Sense{keyUnitAttention, 0x2a, 0x02} // LOG PARAMETERS CHANGED
	condTimestampChanged           = Sense{keyUnitAttention, 0x2a, 0x10} // TIMESTAMP CHANGED
	condCapacityChanged            = Sense{keyUnitAttention, 0x2a, 0x09} // CAPACITY DATA HAS CHANGED
	condLUNsChanged                = Sense{keyUnitAttention, 0x3f, 0x0e} // REPORTED LUNS DATA HAS CHANGED
	noField                    int = -1
)

// senseLen is the length in bytes of fixed format sense data, and maxSenseLen that of the longest in
// descriptor format: a header, INFORMATION, command-specific information, and sense key specific data.
const (
	senseLen    = 18
	maxSenseLen = 8 + 12 + 12 + 8
)

// senseData is the sense data of a command before it is encoded.
type senseData struct {
	Sense
	field    int    // offset of the wrong byte in the CDB or parameter list, or noField
	bit      int    // the most significant bit of the wrong field, or noField
	inList   bool   // field is in the parameter list
	info     uint64 // INFORMATION, if infoOK
	infoOK   bool
	command  uint32 // COMMAND-SPECIFIC INFORMATION; 0: none
	progress bool   // field is the PROGRESS INDICATION
}

// newSense returns sense data that says only k.
func newSense(k Sense) senseData { return senseData{Sense: k, field: noField, bit: noField} }

// withInfo returns s with INFORMATION.
func (s senseData) withInfo(info uint64) senseData {
	s.info, s.infoOK = info, true
	return s
}

// put encodes s into b, which has room for maxSenseLen bytes, and returns the part of b that it
// filled: in descriptor format (SPC-4, section 4.5.2), or in fixed format (4.5.3). Fixed format leaves
// out an INFORMATION of more than 32 bits.
func (s *senseData) put(b []byte, descriptors bool) []byte {
	be := binary.BigEndian
	if descriptors {
		b = append(b[:0], 0x72, s.Key, s.ASC, s.ASCQ, 0, 0, 0, 0)
		if s.infoOK {
			b = append(b, 0x00, 10, 0x80, 0) // Information; VALID
			b = be.AppendUint64(b, s.info)
		}
		if s.command != 0 {
			b = append(b, 0x01, 10, 0, 0) // Command specific information
			b = be.AppendUint64(b, uint64(s.command))
		}
		if s.field != noField {
			b = append(b, 0x02, 6, 0, 0, 0, 0, 0, 0) // Sense key specific
			s.putSpecific(b[len(b)-4:])
		}
		b[7] = byte(len(b) - 8) // ADDITIONAL SENSE LENGTH
		return b
	}
	b = b[:senseLen]
	clear(b)
	b[0], b[2], b[7] = 0x70, s.Key, senseLen-8
	be.PutUint32(b[8:], s.command)
	b[12], b[13] = s.ASC, s.ASCQ
	if s.infoOK && s.info <= math.MaxUint32 {
		b[0] |= 0x80 // VALID
		be.PutUint32(b[3:], uint32(s.info))
	}
	if s.field != noField {
		s.putSpecific(b[15:])
	}
	return b
}

// hasDescriptors reports whether sense data of the unit is in descriptor format (D_SENSE). u may be
// nil: what is not there uses fixed format.
func (u *Unit) hasDescriptors() bool { return u != nil && u.mode.Load()&modeDSense != 0 }

// putSpecific encodes the sense key specific data, which is field, into three bytes of b.
func (s *senseData) putSpecific(b []byte) {
	b[0] = 0x80 // SKSV
	if !s.inList && !s.progress {
		b[0] |= 0x40 // C/D
	}
	if s.bit != noField {
		b[0] |= 0x08 | byte(s.bit) // BPV
	}
	binary.BigEndian.PutUint16(b[1:], uint16(s.field))
}

// fail ends c with CHECK CONDITION and returns false.
func (c *Command) fail(k Sense) bool { return c.failSense(newSense(k)) }

// failCDB fails c because of a field of the CDB that begins in that byte, at bit.
func (c *Command) failCDB(octet, bit int) bool {
	return c.failSense(senseData{Sense: condCDBField, field: octet, bit: bit})
}

// failList fails c because of a field of the parameter list.
func (c *Command) failList(octet int) bool {
	return c.failSense(senseData{Sense: condListField, field: octet, bit: noField, inList: true})
}

// failRange fails c because blocks from lba on are not all on the unit.
func (c *Command) failRange(lba uint64) bool { return c.failSense(c.unit.outOfRange(lba)) }

// outOfRange returns the sense data for blocks from lba on that are not all on the unit. INFORMATION has the first that is not
// (SBC-4, section 4.18.1).
func (u *Unit) outOfRange(lba uint64) senseData {
	return newSense(condLBARange).withInfo(max(lba, u.blocks.Load()))
}

// failSense fails c with more sense data than fail.
func (c *Command) failSense(s senseData) bool {
	c.Status = StatusCheckCondition
	c.failed = true
	c.sense, c.cond = s.put(c.senseBuf[:], c.unit.hasDescriptors()), s.Sense
	return false
}

// storeErrorInterval is the shortest time between two StoreFailed events of a unit.
const storeErrorInterval = time.Second

// A storeErrorLog keeps a store that fails often from filling the log.
type storeErrorLog struct {
	last       atomic.Int64  // when the last event was reported, in ns since 1970
	suppressed atomic.Uint64 // failures since then
}

// notStoreErrors are errors of commands that no store began to execute.
var notStoreErrors = []error{errAborted, errSanitizing, errErased, backend.ErrReadOnly, backend.ErrClosed, backend.ErrMoved, backend.ErrRange}

// storeFailed reports whether err came from a store that failed an operation.
func storeFailed(err error) bool {
	return !slices.ContainsFunc(notStoreErrors, func(other error) bool { return errors.Is(err, other) })
}

// A placedError is an error of a store for a copy, which uses two of them: the unit, and the range that failed.
type placedError struct {
	at *itl
	byteRange
	err error
}

func (e *placedError) Error() string { return e.err.Error() }

func (e *placedError) Unwrap() error { return e.err }

// placed returns err as one of that range of l, unless it says already where it is from.
func placed(l *itl, pos, n int64, err error) error {
	if err == nil {
		return nil
	}
	if _, ok := errors.AsType[*placedError](err); ok {
		return err
	}
	return &placedError{l, byteRange{pos, n}, err}
}

// reportStoreError reports that the store failed c, if err says so. The sense data tells the
// initiator what that means for it, but not the reason.
func (c *Command) reportStoreError(err error) {
	if !storeFailed(err) {
		return
	}
	l, lba, blocks := c.itl, c.lba, c.count
	if p, ok := errors.AsType[*placedError](err); ok {
		l, lba, blocks = p.at, uint64(p.pos)>>p.at.unit.shift, uint64(p.n)>>p.at.unit.shift
	}
	u := l.unit
	u.noteError(err)
	e := &u.storeErrors
	now, last := time.Now().UnixNano(), e.last.Load()
	since := time.Duration(now - last)
	if since >= 0 && since < storeErrorInterval || !e.last.CompareAndSwap(last, now) {
		e.suppressed.Add(1)
		return
	}
	u.opt.Events(StoreFailedEvent{
		Target: l.nexus.port.TargetName, LUN: l.id, Initiator: c.nexus.port.InitiatorName,
		Command: c.row.name, LBA: lba, Blocks: blocks, Err: err, Suppressed: e.suppressed.Swap(0),
	})
}

// writeDone returns true if err is nil. Otherwise it fails c because the store could not change the
// medium.
func (c *Command) writeDone(err error) bool {
	if err == nil {
		return true
	}
	if errors.Is(err, errHeldUp) {
		return c.busy()
	}
	return c.failSense(c.writeSense(err))
}

// writeSense reports err, with which the store could not change the medium, and returns what the initiator gets.
func (c *Command) writeSense(err error) senseData {
	c.reportStoreError(err)
	if k, ok := injectedSense(err); ok {
		return newSense(k)
	}
	switch {
	case errors.Is(err, errAborted), errors.Is(err, errErased): // initiators send it again
		return newSense(condAborted)
	case errors.Is(err, errSanitizing):
		return c.unit.sanitizing()
	case errors.Is(err, backend.ErrNoSpace):
		return newSense(condSpace)
	case errors.Is(err, backend.ErrReadOnly), errors.Is(err, syscall.EROFS): // its file system was remounted
		return newSense(condWriteProtected)
	case errors.Is(err, backend.ErrUnsynced):
		return newSense(condUnsynced)
	case errors.Is(err, backend.ErrMoved):
		return newSense(c.unit.moved(c.nexus))
	case errors.Is(err, backend.ErrClosed):
		return newSense(c.unit.closed())
	case errors.Is(err, backend.ErrRange):
		return c.unit.outOfRange(c.lba) // the unit became smaller meanwhile
	case errors.Is(err, backend.ErrCorrupt): // the rest of a block of which a part is written
		return c.unit.corrupt(err)
	}
	return newSense(condWriteError)
}

// readDone returns true if err is nil. Otherwise it fails c because the store could not read the
// medium.
func (c *Command) readDone(err error) bool {
	if err == nil {
		return true
	}
	c.reportStoreError(err)
	if k, ok := injectedSense(err); ok {
		return c.fail(k)
	}
	switch {
	case errors.Is(err, errAborted), errors.Is(err, errErased): // initiators send it again
		return c.fail(condAborted)
	case errors.Is(err, errSanitizing):
		return c.failSense(c.unit.sanitizing())
	case errors.Is(err, backend.ErrMoved):
		return c.fail(c.unit.moved(c.nexus))
	case errors.Is(err, backend.ErrClosed):
		return c.failClosed()
	case errors.Is(err, backend.ErrRange):
		return c.failRange(c.lba)
	case errors.Is(err, backend.ErrCorrupt):
		return c.failSense(c.unit.corrupt(err))
	}
	return c.fail(condReadError)
}

// corrupt returns the sense data for a block that differs from its checksum or protection information. INFORMATION has its LBA
// (SBC-3, section 4.18.1).
func (u *Unit) corrupt(err error) senseData {
	s := newSense(condReadError)
	if corrupt, ok := errors.AsType[*backend.CorruptError](err); ok {
		if corrupt.Field != 0 {
			s.Sense = checkFailed(corrupt.Field)
		}
		s = s.withInfo(uint64(corrupt.Offset) >> u.shift)
	}
	return s
}

// failClosed ends a command that meets a closed store.
func (c *Command) failClosed() bool { return c.fail(c.unit.closed()) }

// closed returns why the store is closed: the initiators lost the unit, another unit takes its place, or the target shuts down.
func (u *Unit) closed() Sense {
	switch {
	case u.gone.Load():
		return condNoLUN
	case u.replaced.Load():
		return condBecomingReady
	}
	return condInternal
}

// requestSense executes REQUEST SENSE (SPC-4, section 6.39): it returns a pending unit attention,
// or the state of the unit. DESC chooses the format, whatever D_SENSE says.
func requestSense(u *Unit, c *Command) bool {
	s := newSense(condNone)
	if u == nil {
		s.Sense = condNoLUN
	} else if attention, ok := c.itl.takeAttention(); ok {
		s = attention
	} else if u.sanitizer.state.Load() == sanitizeRunning {
		s = u.sanitizing()
	} else {
		s.Sense = cmp.Or(u.obstacle(c.nexus, 0), u.absent, u.readiness())
	}
	return c.report(s.put(c.zeroed(maxSenseLen), c.CDB[1]&1 != 0), uint32(c.CDB[4]))
}
