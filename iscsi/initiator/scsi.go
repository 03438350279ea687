package initiator

import "fmt"

// SCSI status codes (SAM-5, section 5.3.1).
const (
	Good                = 0x00
	CheckCondition      = 0x02
	ConditionMet        = 0x04
	Busy                = 0x08
	ReservationConflict = 0x18
	TaskSetFull         = 0x28
	ACAActive           = 0x30
	TaskAborted         = 0x40
)

// Sense keys (SPC-4, section 4.5.6).
const (
	NotReady       = 0x2
	MediumError    = 0x3
	IllegalRequest = 0x5
	UnitAttention  = 0x6
	DataProtect    = 0x7
	Miscompare     = 0xe
)

// Sense is what sense data says.
type Sense struct{ Key, ASC, ASCQ byte }

// ParseSense parses sense data in fixed or descriptor format (SPC-4, section 4.5). It returns the zero value for other data.
func ParseSense(b []byte) (s Sense) {
	if len(b) == 0 {
		return s
	}
	switch b[0] & 0x7f {
	case 0x70, 0x71:
		if len(b) > 2 {
			s.Key = b[2] & 0x0f
		}
		if len(b) > 13 {
			s.ASC, s.ASCQ = b[12], b[13]
		}
	case 0x72, 0x73:
		if len(b) > 3 {
			s = Sense{b[1] & 0x0f, b[2], b[3]}
		}
	}
	return s
}

// String returns the sense key and the codes, in words where they are frequent.
func (s Sense) String() string {
	names := [16]string{"no sense", "recovered error", "not ready", "medium error", "hardware error", "illegal request", "unit attention",
		"data protect", "blank check", "vendor specific", "copy aborted", "aborted command", "reserved", "volume overflow", "miscompare", "completed"}
	text := names[s.Key&0x0f]
	if detail := senseTexts[[2]byte{s.ASC, s.ASCQ}]; detail != "" {
		text += ": " + detail
	}
	return fmt.Sprintf("%s (%x/%02x/%02x)", text, s.Key, s.ASC, s.ASCQ)
}

// senseTexts are the additional sense codes that initiators see often (SPC-4, annex F).
var senseTexts = map[[2]byte]string{
	{0x04, 0x00}: "logical unit not ready", {0x20, 0x00}: "invalid command operation code", {0x21, 0x00}: "logical block address out of range",
	{0x24, 0x00}: "invalid field in CDB", {0x25, 0x00}: "logical unit not supported", {0x27, 0x00}: "write protected",
	{0x28, 0x00}: "medium may have changed", {0x29, 0x00}: "power on, reset, or bus device reset occurred",
	{0x2a, 0x09}: "capacity data has changed", {0x3a, 0x00}: "medium not present", {0x3f, 0x0e}: "reported LUNs data has changed",
	{0x0c, 0x00}: "write error", {0x11, 0x00}: "unrecovered read error", {0x44, 0x00}: "internal target failure",
	{0x27, 0x07}: "space allocation failed",
}

// A StatusError is the end of a command with a status other than GOOD.
type StatusError struct {
	Operation byte // first byte of the CDB
	Status    byte
	Sense     Sense // of CHECK CONDITION
}

// Error implements error.
func (e *StatusError) Error() string {
	what := fmt.Sprintf("status %#02x", e.Status)
	switch e.Status {
	case CheckCondition:
		what = e.Sense.String()
	case Busy:
		what = "the LUN is busy"
	case ReservationConflict:
		what = "reservation conflict: another initiator has reserved the LUN"
	case TaskSetFull:
		what = "task set full"
	case TaskAborted:
		what = "the command was aborted by another initiator"
	}
	return operation(e.Operation) + ": " + what
}

// operation returns the name of an operation code.
func operation(op byte) string {
	switch op {
	case 0x00:
		return "TEST UNIT READY"
	case 0x12:
		return "INQUIRY"
	case 0x1a, 0x5a:
		return "MODE SENSE"
	case 0x28, 0x88, 0xa8:
		return "READ"
	case 0x2a, 0x8a, 0xaa:
		return "WRITE"
	case 0x35, 0x91:
		return "SYNCHRONIZE CACHE"
	case 0x9e:
		return "SERVICE ACTION IN(16)"
	case 0xa0:
		return "REPORT LUNS"
	}
	return fmt.Sprintf("command %#02x", op)
}
