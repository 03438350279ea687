package lun

import (
	"encoding/binary"
	"errors"
	"math"

	"github.com/iser-target/iser-target/backend"
)

// SAM status codes.
const (
	StatusGood           = 0x00
	StatusCheckCondition = 0x02

	statusGood           = StatusGood
	statusCheckCondition = StatusCheckCondition
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

type cond = Sense

var (
	condNone                       = cond{keyNoSense, 0x00, 0x00}
	condNotReadyStopped            = cond{keyNotReady, 0x04, 0x02}      // INITIALIZING COMMAND REQUIRED
	condBecomingReady              = cond{keyNotReady, 0x04, 0x01}      // IN PROCESS OF BECOMING READY
	condNoStore                    = cond{keyNotReady, 0x04, 0x03}      // MANUAL INTERVENTION REQUIRED
	condStandby                    = cond{keyNotReady, 0x04, 0x0b}      // TARGET PORT IN STANDBY STATE
	condUnavailable                = cond{keyNotReady, 0x04, 0x0c}      // TARGET PORT IN UNAVAILABLE STATE
	condAccessChanged              = cond{keyUnitAttention, 0x2a, 0x06} // ASYMMETRIC ACCESS STATE CHANGED
	condSanitizing                 = cond{keyNotReady, 0x04, 0x1b}      // SANITIZE IN PROGRESS
	condSanitizeFailed             = cond{keyMediumError, 0x31, 0x03}   // SANITIZE COMMAND FAILED
	condNoMedium                   = cond{keyNotReady, 0x3a, 0x02}      // MEDIUM NOT PRESENT - TRAY OPEN
	condWriteError                 = cond{keyMediumError, 0x0c, 0x00}
	condReadError                  = cond{keyMediumError, 0x11, 0x00} // UNRECOVERED READ ERROR
	condUnsynced                   = cond{keyHardwareError, 0x0c, 0x00}
	condInternal                   = cond{keyHardwareError, 0x44, 0x00}
	condTooLittle                  = cond{keyIllegalRequest, 0x0e, 0x03} // INVALID FIELD IN COMMAND INFORMATION UNIT
	condListLength                 = cond{keyIllegalRequest, 0x1a, 0x00} // PARAMETER LIST LENGTH ERROR
	condOpcode                     = cond{keyIllegalRequest, 0x20, 0x00}
	condLBARange                   = cond{keyIllegalRequest, 0x21, 0x00}
	condCDBField                   = cond{keyIllegalRequest, 0x24, 0x00}
	condNoLUN                      = cond{keyIllegalRequest, 0x25, 0x00}
	condListField                  = cond{keyIllegalRequest, 0x26, 0x00}
	condNoSavedPages               = cond{keyIllegalRequest, 0x39, 0x00}
	condRemovalPrevented           = cond{keyIllegalRequest, 0x53, 0x02} // MEDIUM REMOVAL PREVENTED
	condWriteProtected             = cond{keyDataProtect, 0x27, 0x00}
	condSoftwareProtected          = cond{keyDataProtect, 0x27, 0x02} // LOGICAL UNIT SOFTWARE WRITE PROTECTED
	condSpace                      = cond{keyDataProtect, 0x27, 0x07} // SPACE ALLOCATION FAILED WRITE PROTECT
	condAborted                    = cond{keyAbortedCommand, 0x00, 0x00}
	condMiscompare                 = cond{keyMiscompare, 0x1d, 0x00}
	condPowerOn                    = cond{keyUnitAttention, 0x29, 0x00}
	condReset                      = cond{keyUnitAttention, 0x29, 0x03} // BUS DEVICE RESET FUNCTION OCCURRED
	condClearedByTransport         = cond{keyUnitAttention, 0x47, 0x7f} // SOME COMMANDS CLEARED BY ISCSI PROTOCOL EVENT
	condOperationInProgress        = cond{keyIllegalRequest, 0x00, 0x16}
	condTooManyCSCDs               = cond{keyIllegalRequest, 0x26, 0x06} // TOO MANY TARGET DESCRIPTORS
	condCSCDType                   = cond{keyIllegalRequest, 0x26, 0x07} // UNSUPPORTED TARGET DESCRIPTOR TYPE CODE
	condTooManySegments            = cond{keyIllegalRequest, 0x26, 0x08} // TOO MANY SEGMENT DESCRIPTORS
	condSegmentType                = cond{keyIllegalRequest, 0x26, 0x09} // UNSUPPORTED SEGMENT DESCRIPTOR TYPE CODE
	condInlineData                 = cond{keyIllegalRequest, 0x26, 0x0b} // INLINE DATA LENGTH EXCEEDED
	condCopyAborted                = cond{keyCopyAborted, 0x00, 0x00}
	condUnreachableCopyTarget      = cond{keyCopyAborted, 0x08, 0x04}
	condThirdPartyFailure          = cond{keyCopyAborted, 0x0d, 0x01}   // THIRD PARTY DEVICE FAILURE
	condCopyTargetNotReachable     = cond{keyCopyAborted, 0x0d, 0x02}   // COPY TARGET DEVICE NOT REACHABLE
	condInexactSegment             = cond{keyCopyAborted, 0x26, 0x0a}   // UNEXPECTED INEXACT SEGMENT
	condMediumChanged              = cond{keyUnitAttention, 0x28, 0x00} // NOT READY TO READY CHANGE
	condModeChanged                = cond{keyUnitAttention, 0x2a, 0x01} // MODE PARAMETERS CHANGED
	condCapacityChanged            = cond{keyUnitAttention, 0x2a, 0x09} // CAPACITY DATA HAS CHANGED
	condLUNsChanged                = cond{keyUnitAttention, 0x3f, 0x0e} // REPORTED LUNS DATA HAS CHANGED
	condCleared                    = cond{keyUnitAttention, 0x2f, 0x00} // COMMANDS CLEARED BY ANOTHER INITIATOR
	noField                    int = -1
)

// senseLen is the size in octets of fixed format sense data.
const senseLen = 18

// sense is the sense data of a command before it is encoded.
type sense struct {
	cond
	field    int    // offset of the octet in the CDB or parameter list that is wrong, or noField
	bit      int    // the most significant bit of the field that is wrong, or noField
	inList   bool   // field is in the parameter list
	info     uint32 // INFORMATION, if infoOK
	infoOK   bool
	command  uint32 // COMMAND-SPECIFIC INFORMATION
	progress bool   // field is the PROGRESS INDICATION
	descType bool   // REQUEST SENSE with DESC: descriptor format
}

// put encodes s into b, which it fills, and returns how much that is: fixed
// format (SPC-4, section 4.5.3), or descriptor format (4.5.2).
func (s *sense) put(b []byte) []byte {
	b = b[:senseLen]
	clear(b)
	if s.descType {
		b[0], b[1], b[2], b[3] = 0x72, s.Key, s.ASC, s.ASCQ
		if s.field == noField {
			return b[:8]
		}
		b[7], b[8], b[9] = 8, 0x02, 6 // a sense key specific descriptor
		s.putSpecific(b[12:])
		return b[:16]
	}
	b[0], b[2], b[7] = 0x70, s.Key, senseLen-8
	binary.BigEndian.PutUint32(b[8:], s.command)
	b[12], b[13] = s.ASC, s.ASCQ
	if s.infoOK {
		b[0] |= 0x80
		binary.BigEndian.PutUint32(b[3:], s.info)
	}
	if s.field != noField {
		s.putSpecific(b[15:])
	}
	return b
}

// putSpecific encodes the sense key specific data, which is field, into three octets of b.
func (s *sense) putSpecific(b []byte) {
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
func (c *Command) fail(k cond) bool {
	return c.failSense(sense{cond: k, field: noField, bit: noField})
}

// failCDB is fail for a field of the CDB that begins in octet, at bit.
func (c *Command) failCDB(octet, bit int) bool {
	return c.failSense(sense{cond: condCDBField, field: octet, bit: bit})
}

// failList is fail for a field of the parameter list.
func (c *Command) failList(octet int) bool {
	return c.failSense(sense{cond: condListField, field: octet, bit: noField, inList: true})
}

// failRange is fail for blocks from lba on that are not all on the unit. The first that is
// not is INFORMATION (SBC-4, section 4.18.1), if fixed format has room for it.
func (c *Command) failRange(lba uint64) bool {
	first := max(lba, c.unit.blocks.Load())
	return c.failSense(sense{cond: condLBARange, field: noField, bit: noField, infoOK: first <= math.MaxUint32, info: uint32(first)})
}

// failSense is fail with more to say.
func (c *Command) failSense(s sense) bool {
	c.Status = statusCheckCondition
	c.failed = true
	c.sense = s.put(c.senseBuf[:])
	return false
}

// failWrite reports that the store could not change the medium, failRead that
// it could not read it.
func (c *Command) failWrite(err error) bool {
	c.logTrouble(err)
	switch {
	case errors.Is(err, errAborted):
		return c.fail(condAborted)
	case errors.Is(err, errSanitizing):
		return c.failSense(c.unit.sanitizing())
	case errors.Is(err, backend.ErrNoSpace):
		return c.fail(condSpace)
	case errors.Is(err, backend.ErrReadOnly):
		return c.fail(condWriteProtected)
	case errors.Is(err, backend.ErrUnsynced):
		return c.fail(condUnsynced)
	case errors.Is(err, backend.ErrClosed):
		return c.failClosed()
	case errors.Is(err, backend.ErrRange):
		return c.failRange(c.lba) // the unit was made smaller meanwhile
	}
	return c.fail(condWriteError)
}

func (c *Command) failRead(err error) bool {
	c.logTrouble(err)
	switch {
	case errors.Is(err, backend.ErrClosed):
		return c.failClosed()
	case errors.Is(err, backend.ErrRange):
		return c.failRange(c.lba)
	}
	return c.fail(condReadError)
}

// failClosed ends a command that meets a closed store: its unit has been taken away
// from the initiators, another one takes its place, or the target ends.
func (c *Command) failClosed() bool {
	switch {
	case c.unit.gone.Load():
		return c.fail(condNoLUN)
	case c.unit.replaced.Load():
		return c.fail(condBecomingReady)
	}
	return c.fail(condInternal)
}
