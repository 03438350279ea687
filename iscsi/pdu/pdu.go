// Package pdu encodes and decodes iSCSI PDU headers. Section numbers without an RFC are
// those of RFC 7143. The package does no I/O.
//
// A Basic Header Segment is a view: type BHS is the 48 bytes themselves, with a getter
// for every field and the setters that somebody needs. Different PDUs use the same bytes
// for different fields. Each field has its own accessor, with its name in the standard;
// the caller checks the opcode first.
package pdu

import (
	"encoding/binary"
	"fmt"
)

// Lengths in bytes, and the reserved tag.
const (
	BHSLen      = 48
	CDBLen      = 16          // CDB bytes in the BHS of a SCSI Command
	MaxData     = 1<<24 - 1   // DataSegmentLength is a 24-bit field
	MaxAHS      = 255 * 4     // TotalAHSLength counts 4-byte words in 8 bits
	MaxCDB      = MaxAHS + 12 // longest CDB that the BHS and one AHS can carry
	ReservedTag = 0xffff_ffff // ITT or TTT that names no task
)

const (
	opcodeMask    = 0x3f // of byte 0
	immediate     = 0x40 // I bit of byte 0, requests only
	cmdAttrMask   = 0x07 // ATTR in byte 1 of a SCSI Command
	snackTypeMask = 0x0f // Type in byte 1 of a SNACK Request
	pad           = 4    // on a byte stream a segment is padded to a multiple of this
)

// An Opcode is the low six bits of byte 0 (section 11.2.1.2).
type Opcode byte

// Opcodes of the initiator and, from 0x20, of the target.
const (
	NOPOut        Opcode = 0x00
	SCSICommand   Opcode = 0x01
	TaskMgmtReq   Opcode = 0x02
	LoginReq      Opcode = 0x03
	TextReq       Opcode = 0x04
	DataOut       Opcode = 0x05
	LogoutReq     Opcode = 0x06
	SNACK         Opcode = 0x10
	NOPIn         Opcode = 0x20
	SCSIResponse  Opcode = 0x21
	TaskMgmtResp  Opcode = 0x22
	LoginResp     Opcode = 0x23
	TextResp      Opcode = 0x24
	DataIn        Opcode = 0x25
	LogoutResp    Opcode = 0x26
	R2T           Opcode = 0x31
	AsyncMessage  Opcode = 0x32
	Reject        Opcode = 0x3f
	targetOpcodes Opcode = 0x20 // bit that all opcodes of the target have
)

var opcodeNames = map[Opcode]string{
	NOPOut: "NOP-Out", SCSICommand: "SCSI Command", TaskMgmtReq: "Task Management Function Request",
	LoginReq: "Login Request", TextReq: "Text Request", DataOut: "SCSI Data-Out", LogoutReq: "Logout Request",
	SNACK: "SNACK Request", NOPIn: "NOP-In", SCSIResponse: "SCSI Response",
	TaskMgmtResp: "Task Management Function Response", LoginResp: "Login Response", TextResp: "Text Response",
	DataIn: "SCSI Data-In", LogoutResp: "Logout Response", R2T: "R2T", AsyncMessage: "Asynchronous Message",
	Reject: "Reject",
}

// String returns the standard's name of the PDU, or the number.
func (o Opcode) String() string {
	if s, ok := opcodeNames[o]; ok {
		return s
	}
	return fmt.Sprintf("opcode 0x%02x", byte(o))
}

// FromTarget reports whether PDUs with the opcode come from the target.
func (o Opcode) FromTarget() bool { return o&targetOpcodes != 0 }

// Bits of byte 1. F has the same place in all PDUs. The others depend on the opcode.
const (
	FlagF = 0x80 // final
	FlagT = 0x80 // Login: transit
	FlagC = 0x40 // Login, Text: continue

	FlagR = 0x40 // SCSI Command: data is expected to go to the initiator
	FlagW = 0x20 // SCSI Command: data is expected to come from the initiator

	FlagBidiOverflow  = 0x10 // SCSI Response: o
	FlagBidiUnderflow = 0x08 // SCSI Response: u
	FlagOverflow      = 0x04 // SCSI Response, Data-In: O
	FlagUnderflow     = 0x02 // SCSI Response, Data-In: U

	FlagA = 0x40 // Data-In: acknowledge
	FlagS = 0x01 // Data-In: status is in this PDU
)

// Task attributes of a SCSI Command (section 11.3.1); higher values are reserved.
const (
	AttrUntagged    = 0
	AttrSimple      = 1
	AttrOrdered     = 2
	AttrHeadOfQueue = 3
	AttrACA         = 4
)

// Response codes of a SCSI Response (section 11.4.3).
const (
	CommandCompleted = 0x00
	TargetFailure    = 0x01
)

// Functions of a Task Management Function Request (section 11.5.1; 9 and up are RFC 7144's).
const (
	AbortTask        = 1
	AbortTaskSet     = 2
	ClearACA         = 3
	ClearTaskSet     = 4
	LogicalUnitReset = 5
	TargetWarmReset  = 6
	TargetColdReset  = 7
	TaskReassign     = 8
	QueryTask        = 9
	QueryTaskSet     = 10
	ITNexusReset     = 11
	QueryAsyncEvent  = 12
)

// Responses of a Task Management Function Response (section 11.6.1).
const (
	FunctionComplete      = 0
	TaskDoesNotExist      = 1
	LUNDoesNotExist       = 2
	TaskStillAllegiant    = 3
	ReassignNotSupported  = 4
	FunctionNotSupported  = 5
	FunctionNotAuthorized = 6
	FunctionSucceeded     = 7 // RFC 7144
	FunctionRejected      = 255
)

// Types of a SNACK Request (section 11.16.1).
const (
	SNACKData    = 0 // Data/R2T
	SNACKStatus  = 1
	SNACKDataACK = 2
	SNACKRData   = 3
)

// A RejectReason says why a PDU was rejected (section 11.17.1).
type RejectReason byte

// Reasons of a Reject.
const (
	RejectDataDigest       RejectReason = 0x02
	RejectSNACK            RejectReason = 0x03
	RejectProtocolError    RejectReason = 0x04
	RejectNotSupported     RejectReason = 0x05
	RejectTooManyImmediate RejectReason = 0x06
	RejectTaskInProgress   RejectReason = 0x07
	RejectInvalidDataAck   RejectReason = 0x08
	RejectInvalidField     RejectReason = 0x09
	RejectOutOfResources   RejectReason = 0x0a
	RejectWaitingForLogout RejectReason = 0x0c
)

// Reasons of a Logout Request (section 11.14.1).
const (
	LogoutCloseSession    = 0
	LogoutCloseConnection = 1
	LogoutForRecovery     = 2
)

// Responses of a Logout Response (section 11.15.1).
const (
	LogoutSuccess              = 0
	LogoutCIDNotFound          = 1
	LogoutRecoveryNotSupported = 2
	LogoutCleanupFailed        = 3
)

// Events of an Asynchronous Message (section 11.9.1).
const (
	AsyncSCSIEvent         = 0
	AsyncLogoutRequest     = 1
	AsyncConnectionDropped = 2
	AsyncSessionDropped    = 3
	AsyncNegotiation       = 4
	AsyncTaskTermination   = 5
)

// A LoginStatus is the Status-Class (high byte) and Status-Detail of a Login Response
// (section 11.13.5).
type LoginStatus uint16

// Login status values. Class 2 is the initiator's fault, class 3 the target's.
const (
	LoginSuccess            LoginStatus = 0x0000
	LoginMovedTemporarily   LoginStatus = 0x0101
	LoginMovedPermanently   LoginStatus = 0x0102
	LoginInitiatorError     LoginStatus = 0x0200
	LoginAuthentication     LoginStatus = 0x0201
	LoginAuthorization      LoginStatus = 0x0202
	LoginNotFound           LoginStatus = 0x0203
	LoginRemoved            LoginStatus = 0x0204
	LoginVersion            LoginStatus = 0x0205
	LoginTooManyConnections LoginStatus = 0x0206
	LoginMissingParameter   LoginStatus = 0x0207
	LoginCannotInclude      LoginStatus = 0x0208
	LoginSessionType        LoginStatus = 0x0209
	LoginNoSession          LoginStatus = 0x020a
	LoginInvalidRequest     LoginStatus = 0x020b
	LoginTargetError        LoginStatus = 0x0300
	LoginUnavailable        LoginStatus = 0x0301
	LoginOutOfResources     LoginStatus = 0x0302
)

var loginStatusNames = map[LoginStatus]string{
	LoginSuccess: "success", LoginMovedTemporarily: "target moved temporarily",
	LoginMovedPermanently: "target moved permanently", LoginInitiatorError: "initiator error",
	LoginAuthentication: "authentication failure", LoginAuthorization: "authorization failure",
	LoginNotFound: "target not found", LoginRemoved: "target removed", LoginVersion: "unsupported version",
	LoginTooManyConnections: "too many connections", LoginMissingParameter: "missing parameter",
	LoginCannotInclude: "cannot include in session", LoginSessionType: "session type not supported",
	LoginNoSession: "session does not exist", LoginInvalidRequest: "invalid during login",
	LoginTargetError: "target error", LoginUnavailable: "service unavailable", LoginOutOfResources: "out of resources",
}

// String returns the standard's meaning of the status and its number.
func (s LoginStatus) String() string {
	if n, ok := loginStatusNames[s]; ok {
		return fmt.Sprintf("%s (0x%04x)", n, uint16(s))
	}
	return fmt.Sprintf("login status 0x%04x", uint16(s))
}

// Before reports whether serial number a comes before b (RFC 1982, 32 bits). It returns
// false both ways for numbers that are 2^31 apart.
func Before(a, b uint32) bool { return b-a-1 < 1<<31-1 }

// Padded returns n rounded up to a multiple of 4, the bytes that a segment occupies on a
// byte stream.
func Padded(n int) int { return (n + pad - 1) &^ (pad - 1) }

// BHS is a Basic Header Segment: 48 bytes, big-endian.
//
//	 0               1               2               3
//	+-+-+-----------+-+-------------+---------------+---------------+
//	|.|I| Opcode    |F|  opcode-specific fields                     |  0
//	+---------------+---------------+---------------+---------------+
//	|TotalAHSLength | DataSegmentLength                             |  4
//	+---------------+---------------+---------------+---------------+
//	| LUN or opcode-specific fields                                 |  8
//	+                                                               +
//	|                                                               | 12
//	+---------------+---------------+---------------+---------------+
//	| Initiator Task Tag                                            | 16
//	+---------------+---------------+---------------+---------------+
//	| opcode-specific fields                                        | 20
//	+                                                               +
//	:                                                               :
//	+---------------+---------------+---------------+---------------+
//
// The accessors panic if b is shorter than 48 bytes. The Datamovers ensure that it is not.
type BHS []byte

func (b BHS) u16(off int) uint16      { return binary.BigEndian.Uint16(b[off:]) }
func (b BHS) u32(off int) uint32      { return binary.BigEndian.Uint32(b[off:]) }
func (b BHS) put16(off int, v uint16) { binary.BigEndian.PutUint16(b[off:], v) }
func (b BHS) put32(off int, v uint32) { binary.BigEndian.PutUint32(b[off:], v) }

// Reset sets the opcode and byte 1, and all other fields to 0.
func (b BHS) Reset(o Opcode, byte1 byte) {
	clear(b[:BHSLen])
	b[0], b[1] = byte(o), byte1
}

// Fields of all PDUs (section 11.2.1).

// Opcode returns the opcode.
func (b BHS) Opcode() Opcode { return Opcode(b[0] & opcodeMask) }

// Immediate reports whether the I bit is set: the request bypasses the order of CmdSN.
func (b BHS) Immediate() bool { return b[0]&immediate != 0 }

// SetImmediate sets the I bit.
func (b BHS) SetImmediate() { b[0] |= immediate }

// Flags returns byte 1, whose bits depend on the opcode.
func (b BHS) Flags() byte { return b[1] }

// SetFlags sets byte 1.
func (b BHS) SetFlags(byte1 byte) { b[1] = byte1 }

// Final reports whether the F bit is set: no PDU of the same sequence follows.
func (b BHS) Final() bool { return b[1]&FlagF != 0 }

// Continue reports whether the C bit of a Login or Text PDU is set: its text continues
// in the next one.
func (b BHS) Continue() bool { return b[1]&FlagC != 0 }

// TotalAHSLength returns the length of all additional header segments in bytes.
func (b BHS) TotalAHSLength() int { return int(b[4]) * 4 }

// SetTotalAHSLength takes bytes, a multiple of 4 up to MaxAHS.
func (b BHS) SetTotalAHSLength(n int) { b[4] = byte(n / 4) }

// DataSegmentLength returns the length of the data segment in bytes, without padding.
func (b BHS) DataSegmentLength() int { return int(b.u32(4) & MaxData) }

// SetDataSegmentLength takes bytes without padding, at most MaxData.
func (b BHS) SetDataSegmentLength(n int) { b.put32(4, b.u32(4)&^MaxData|uint32(n)&MaxData) }

// ITT returns the Initiator Task Tag, which identifies the task in its session.
func (b BHS) ITT() uint32 { return b.u32(16) }

// SetITT sets the Initiator Task Tag.
func (b BHS) SetITT(v uint32) { b.put32(16, v) }

// TTT returns the Target Transfer Tag, by which the initiator answers the target.
func (b BHS) TTT() uint32 { return b.u32(20) }

// SetTTT sets the Target Transfer Tag.
func (b BHS) SetTTT(v uint32) { b.put32(20, v) }

// LUN returns the logical unit number as SAM encodes it.
func (b BHS) LUN() (l [8]byte) { return [8]byte(b[8:16]) }

// SetLUN sets the logical unit number.
func (b BHS) SetLUN(l [8]byte) { copy(b[8:16], l[:]) }

// Serial numbers (section 4.2.2). PDUs of the initiator carry CmdSN and ExpStatSN, PDUs
// of the target StatSN, ExpCmdSN and MaxCmdSN.

// CmdSN returns the serial number of the command.
func (b BHS) CmdSN() uint32 { return b.u32(24) }

// SetCmdSN sets the serial number of the command.
func (b BHS) SetCmdSN(v uint32) { b.put32(24, v) }

// ExpStatSN returns the StatSN that the initiator expects next.
func (b BHS) ExpStatSN() uint32 { return b.u32(28) }

// SetExpStatSN sets the StatSN that the initiator expects next.
func (b BHS) SetExpStatSN(v uint32) { b.put32(28, v) }

// StatSN returns the serial number of the status.
func (b BHS) StatSN() uint32 { return b.u32(24) }

// SetStatSN sets the serial number of the status.
func (b BHS) SetStatSN(v uint32) { b.put32(24, v) }

// ExpCmdSN returns the CmdSN that the target expects next.
func (b BHS) ExpCmdSN() uint32 { return b.u32(28) }

// SetExpCmdSN sets the CmdSN that the target expects next.
func (b BHS) SetExpCmdSN(v uint32) { b.put32(28, v) }

// MaxCmdSN returns the highest CmdSN that the initiator may use.
func (b BHS) MaxCmdSN() uint32 { return b.u32(32) }

// SetMaxCmdSN sets the highest CmdSN that the initiator may use.
func (b BHS) SetMaxCmdSN(v uint32) { b.put32(32, v) }

// SCSI Command (section 11.3).

// Read reports whether the command expects data to go to the initiator.
func (b BHS) Read() bool { return b[1]&FlagR != 0 }

// Write reports whether the command expects data to come from the initiator.
func (b BHS) Write() bool { return b[1]&FlagW != 0 }

// Attr returns the task attribute, AttrSimple for instance.
func (b BHS) Attr() byte { return b[1] & cmdAttrMask }

// EDTL returns the Expected Data Transfer Length in bytes.
func (b BHS) EDTL() uint32 { return b.u32(20) }

// SetEDTL sets the Expected Data Transfer Length.
func (b BHS) SetEDTL(v uint32) { b.put32(20, v) }

// CDB returns the first 16 bytes of the command descriptor block.
func (b BHS) CDB() []byte { return b[32:48] }

// SetCDB sets the first 16 bytes of the command descriptor block.
func (b BHS) SetCDB(cdb []byte) { copy(b[32:48], cdb) }

// SCSI Response (section 11.4).

// Response returns the response code, also that of a Task Management Function Response
// or a Logout Response.
func (b BHS) Response() byte { return b[2] }

// SetResponse sets the response code.
func (b BHS) SetResponse(v byte) { b[2] = v }

// Status returns the SCSI status.
func (b BHS) Status() byte { return b[3] }

// SetStatus sets the SCSI status.
func (b BHS) SetStatus(v byte) { b[3] = v }

// SNACKTag returns the SNACK Tag: the one of the R-Data SNACK that preceded the
// response, or 0. It has the same place in a SNACK Request.
func (b BHS) SNACKTag() uint32 { return b.u32(20) }

// SetSNACKTag sets the SNACK Tag.
func (b BHS) SetSNACKTag(v uint32) { b.put32(20, v) }

// ExpDataSN returns the number of Data-In and R2T PDUs that the target has sent for the command. A
// TASK REASSIGN has it at the same place: the next one that the initiator expects.
func (b BHS) ExpDataSN() uint32 { return b.u32(36) }

// SetExpDataSN sets ExpDataSN.
func (b BHS) SetExpDataSN(v uint32) { b.put32(36, v) }

// BidiResidual returns the residual count of the data-in of a bidirectional command, in bytes.
func (b BHS) BidiResidual() uint32 { return b.u32(40) }

// Residual returns the residual count in bytes. FlagOverflow or FlagUnderflow says which way.
func (b BHS) Residual() uint32 { return b.u32(44) }

// SetResidual sets the residual count.
func (b BHS) SetResidual(v uint32) { b.put32(44, v) }

// Task Management Function Request and Response (sections 11.5 and 11.6).

// Function returns the task management function, AbortTask for instance.
func (b BHS) Function() byte { return b[1] &^ FlagF }

// ReferencedTaskTag returns the Initiator Task Tag of the task that the function is about.
func (b BHS) ReferencedTaskTag() uint32 { return b.u32(20) }

// SetReferencedTaskTag sets the Initiator Task Tag of that task.
func (b BHS) SetReferencedTaskTag(v uint32) { b.put32(20, v) }

// RefCmdSN returns the CmdSN of the task that the function is about.
func (b BHS) RefCmdSN() uint32 { return b.u32(32) }

// SetRefCmdSN sets the CmdSN of that task.
func (b BHS) SetRefCmdSN(v uint32) { b.put32(32, v) }

// AdditionalInfo returns the Additional Response Information of a response (RFC 7144,
// section 6.4.1).
func (b BHS) AdditionalInfo() [3]byte { return [3]byte(b[8:11]) }

// SetAdditionalInfo sets the Additional Response Information.
func (b BHS) SetAdditionalInfo(v [3]byte) { copy(b[8:11], v[:]) }

// Data-Out, Data-In and R2T (sections 11.7 and 11.8).

// DataSN returns the serial number of the PDU: in the answer to an R2T, in the
// unsolicited data, or in the Data-In of the command.
func (b BHS) DataSN() uint32 { return b.u32(36) }

// SetDataSN sets the serial number of the PDU.
func (b BHS) SetDataSN(v uint32) { b.put32(36, v) }

// R2TSN returns the serial number of the R2T among those of its command.
func (b BHS) R2TSN() uint32 { return b.u32(36) }

// SetR2TSN sets the serial number of the R2T.
func (b BHS) SetR2TSN(v uint32) { b.put32(36, v) }

// BufferOffset returns where the data begins in that of the command, in bytes.
func (b BHS) BufferOffset() uint32 { return b.u32(40) }

// SetBufferOffset sets where the data begins.
func (b BHS) SetBufferOffset(v uint32) { b.put32(40, v) }

// DesiredDataTransferLength returns how many bytes the R2T asks for.
func (b BHS) DesiredDataTransferLength() uint32 { return b.u32(44) }

// SetDesiredDataTransferLength sets how many bytes the R2T asks for.
func (b BHS) SetDesiredDataTransferLength(v uint32) { b.put32(44, v) }

// Logout Request and Response (sections 11.14 and 11.15).

// LogoutReason returns the reason code, LogoutCloseSession for instance.
func (b BHS) LogoutReason() byte { return b[1] &^ FlagF }

// CID returns the connection ID, also that of a Login Request.
func (b BHS) CID() uint16 { return b.u16(20) }

// SetCID sets the connection ID.
func (b BHS) SetCID(v uint16) { b.put16(20, v) }

// Time2Wait returns how many seconds the initiator must wait before it reconnects.
func (b BHS) Time2Wait() uint16 { return b.u16(40) }

// SetTime2Wait sets Time2Wait in seconds.
func (b BHS) SetTime2Wait(v uint16) { b.put16(40, v) }

// Time2Retain returns for how many seconds after Time2Wait the target keeps the tasks.
func (b BHS) Time2Retain() uint16 { return b.u16(42) }

// SetTime2Retain sets Time2Retain in seconds.
func (b BHS) SetTime2Retain(v uint16) { b.put16(42, v) }

// SNACK Request (section 11.16).

// SNACKType returns the type of the request, SNACKData for instance.
func (b BHS) SNACKType() byte { return b[1] & snackTypeMask }

// BegRun returns the serial number of the first PDU that the request is about.
func (b BHS) BegRun() uint32 { return b.u32(40) }

// SetBegRun sets the serial number of that PDU.
func (b BHS) SetBegRun(v uint32) { b.put32(40, v) }

// RunLength returns how many PDUs the request is about. 0 means all from BegRun.
func (b BHS) RunLength() uint32 { return b.u32(44) }

// SetRunLength sets how many PDUs the request is about.
func (b BHS) SetRunLength(v uint32) { b.put32(44, v) }

// Reject (section 11.17).

// Reason returns why the target rejected the PDU.
func (b BHS) Reason() RejectReason { return RejectReason(b[2]) }

// SetReason sets why the target rejects the PDU.
func (b BHS) SetReason(v RejectReason) { b[2] = byte(v) }

// Asynchronous Message (section 11.9).

// AsyncEvent returns the event, AsyncLogoutRequest for instance.
func (b BHS) AsyncEvent() byte { return b[36] }

// AsyncVCode returns the vendor's code, which qualifies a vendor-specific event.
func (b BHS) AsyncVCode() byte { return b[37] }

// Parameter returns Parameter1, 2 or 3.
func (b BHS) Parameter(n int) uint16 { return b.u16(36 + 2*n) }

// SetAsync sets AsyncEvent and the three parameters.
func (b BHS) SetAsync(event byte, p1, p2, p3 uint16) {
	b[36], b[37] = event, 0
	b.put16(38, p1)
	b.put16(40, p2)
	b.put16(42, p3)
}
