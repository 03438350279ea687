package lun

import (
	"math/bits"
)

// A command is a row of the command set.
type command struct {
	op    byte
	sa    int16 // service action, or noSA
	name  string
	flags flags
	// usage is the CDB USAGE DATA of REPORT SUPPORTED OPERATION CODES behind
	// the operation code: bits that are looked at. All others must be 0. Its
	// length gives that of the CDB.
	usage string

	begin   func(*Unit, *Command) bool                 // checks the CDB, says how much data there is
	consume func(*Unit, *Command, []byte, uint64) bool // data-out
	produce func(*Unit, *Command, []byte, uint64) bool // data-in that begin has not reported
	end     func(*Unit, *Command)
}

type flags uint16

const (
	absentLUN     flags = 1 << iota // served where there is no logical unit
	keepAttention                   // does not fail because of a unit attention (SAM-5, section 5.14)
	medium                          // needs a started unit
	writes                          // changes the medium
	thin                            // only where the store can give space back
	allData                         // of no use with a part of its data-out
	atomicWrite                     // only where the store has atomic writes
	removable                       // only where the medium can be removed
	sanitizes                       // only where that is allowed; a sanitize that has failed is no obstacle
	reads                           // passes reservations that keep out writers only
	anyPersistent                   // passes all persistent reservations
	anyReserve                      // passes a RESERVE of somebody else
	exactData                       // of no use with more data-out than it takes
	anyAccess                       // served in all asymmetric access states; so is what is absentLUN
	inStandby                       // served in standby (SPC-4, section 5.11.2.5)
)

// optional are the flags of rows that some units do not have.
const optional = thin | atomicWrite | removable | sanitizes

const noSA = -1

// commands is the whole command set. A missing row is INVALID COMMAND
// OPERATION CODE; REPORT SUPPORTED OPERATION CODES reads the same rows.
var commands = []command{
	{0x00, noSA, "TEST UNIT READY", medium | anyPersistent, "\x00\x00\x00\x00\x00", noData, nil, nil, nil},
	{0x03, noSA, "REQUEST SENSE", absentLUN | keepAttention | anyPersistent | anyReserve, "\x01\x00\x00\xff\x00", requestSense, nil, nil, nil},
	{0x08, noSA, "READ(6)", medium | reads, "\x1f\xff\xff\xff\x00", beginRead, nil, produceRead, nil},
	{0x0a, noSA, "WRITE(6)", medium | writes, "\x1f\xff\xff\xff\x00", beginWrite, consumeWrite, nil, nil},
	{0x12, noSA, "INQUIRY", absentLUN | keepAttention | anyPersistent | anyReserve, "\x01\xff\xff\xff\x00", inquiry, nil, nil, nil},
	{0x15, noSA, "MODE SELECT(6)", allData | inStandby, "\x11\x00\x00\xff\x00", beginModeSelect, consumeModeSelect, nil, endModeSelect},
	{0x16, noSA, "RESERVE(6)", anyPersistent, "\x00\x00\x00\x00\x00", noData, nil, nil, endReserve},
	{0x17, noSA, "RELEASE(6)", anyPersistent | anyReserve, "\x00\x00\x00\x00\x00", noData, nil, nil, endRelease},
	{0x1a, noSA, "MODE SENSE(6)", reads | inStandby, "\x08\xff\xff\xff\x00", modeSense, nil, nil, nil},
	{0x1b, noSA, "START STOP UNIT", 0, "\x01\x00\x0f\xf7\x00", startStop, nil, nil, endStartStop},
	{0x1e, noSA, "PREVENT ALLOW MEDIUM REMOVAL", removable, "\x00\x00\x00\x01\x00", noData, nil, nil, endPreventAllow},
	{0x25, noSA, "READ CAPACITY(10)", medium | anyPersistent | inStandby, "\x00\xff\xff\xff\xff\x00\x00\x01\x00", readCapacity10, nil, nil, nil},
	{0x28, noSA, "READ(10)", medium | reads, "\x18\xff\xff\xff\xff\x1f\xff\xff\x00", beginRead, nil, produceRead, nil},
	{0x2a, noSA, "WRITE(10)", medium | writes, "\x18\xff\xff\xff\xff\x1f\xff\xff\x00", beginWrite, consumeWrite, nil, nil},
	{0x2e, noSA, "WRITE AND VERIFY(10)", medium | writes, "\x12\xff\xff\xff\xff\x1f\xff\xff\x00", beginWrite, consumeWriteVerify, nil, endVerify},
	{0x2f, noSA, "VERIFY(10)", medium | allData | reads, "\x16\xff\xff\xff\xff\x1f\xff\xff\x00", beginVerify, consumeVerify, nil, endVerify},
	{0x34, noSA, "PRE-FETCH(10)", medium | reads, "\x02\xff\xff\xff\xff\x1f\xff\xff\x00", beginSync, nil, nil, endPrefetch},
	{0x35, noSA, "SYNCHRONIZE CACHE(10)", medium, "\x06\xff\xff\xff\xff\x1f\xff\xff\x00", beginSync, nil, nil, endSync},
	{0x37, noSA, "READ DEFECT DATA(10)", medium | reads, "\x00\x1f\x00\x00\x00\x00\xff\xff\x00", readDefectData10, nil, nil, nil},
	{0x41, noSA, "WRITE SAME(10)", medium | writes | allData | exactData, "\x08\xff\xff\xff\xff\x1f\xff\xff\x00", beginWriteSame, consumeWriteSame, nil, endWriteSame},
	{0x42, noSA, "UNMAP", medium | writes | thin | allData, "\x00\x00\x00\x00\x00\x1f\xff\xff\x00", beginUnmap, consumeUnmap, nil, nil},
	{0x48, sanitizeOverwrite, "SANITIZE OVERWRITE", medium | writes | sanitizes | allData, "\xbf\x00\x00\x00\x00\x00\xff\xff\x00", beginOverwrite, consumeOverwrite, nil, nil},
	{0x48, sanitizeBlockErase, "SANITIZE BLOCK ERASE", medium | writes | sanitizes | thin, "\xbf\x00\x00\x00\x00\x00\x00\x00\x00", noData, nil, nil, endErase},
	{0x48, sanitizeCryptoErase, "SANITIZE CRYPTOGRAPHIC ERASE", medium | writes | sanitizes, "\xbf\x00\x00\x00\x00\x00\x00\x00\x00", noData, nil, nil, endErase},
	{0x48, sanitizeExitFailureMode, "SANITIZE EXIT FAILURE MODE", sanitizes, "\xbf\x00\x00\x00\x00\x00\x00\x00\x00", noData, nil, nil, endExitFailureMode},
	{0x4d, noSA, "LOG SENSE", anyPersistent | anyReserve | inStandby, "\x00\xff\xff\x00\xff\xff\xff\xff\x00", logSense, nil, nil, nil},
	{0x55, noSA, "MODE SELECT(10)", allData | inStandby, "\x11\x00\x00\x00\x00\x00\xff\xff\x00", beginModeSelect, consumeModeSelect, nil, endModeSelect},
	{0x56, noSA, "RESERVE(10)", anyPersistent, "\x00\x00\x00\x00\x00\x00\x00\x00\x00", noData, nil, nil, endReserve},
	{0x57, noSA, "RELEASE(10)", anyPersistent | anyReserve, "\x00\x00\x00\x00\x00\x00\x00\x00\x00", noData, nil, nil, endRelease},
	{0x5a, noSA, "MODE SENSE(10)", reads | inStandby, "\x18\xff\xff\x00\x00\x00\xff\xff\x00", modeSense, nil, nil, nil},
	{0x5e, prReadKeys, "PERSISTENT RESERVE IN, READ KEYS", anyPersistent | anyReserve | inStandby, "\x1f\x00\x00\x00\x00\x00\xff\xff\x00", beginPRIn, nil, nil, nil},
	{0x5e, prReadReservation, "PERSISTENT RESERVE IN, READ RESERVATION", anyPersistent | anyReserve | inStandby, "\x1f\x00\x00\x00\x00\x00\xff\xff\x00", beginPRIn, nil, nil, nil},
	{0x5e, prReportCapabilities, "PERSISTENT RESERVE IN, REPORT CAPABILITIES", anyPersistent | anyReserve | inStandby, "\x1f\x00\x00\x00\x00\x00\xff\xff\x00", prCapabilities, nil, nil, nil},
	{0x5e, prReadFullStatus, "PERSISTENT RESERVE IN, READ FULL STATUS", anyPersistent | anyReserve | inStandby, "\x1f\x00\x00\x00\x00\x00\xff\xff\x00", beginPRIn, nil, nil, nil},
	{0x5f, prRegister, "PERSISTENT RESERVE OUT, REGISTER", anyPersistent | anyReserve | allData | inStandby, "\x1f\xff\x00\x00\xff\xff\xff\xff\x00", beginPROut, consumePROut, nil, nil},
	{0x5f, prReserve, "PERSISTENT RESERVE OUT, RESERVE", anyPersistent | anyReserve | allData | inStandby, "\x1f\xff\x00\x00\xff\xff\xff\xff\x00", beginPROut, consumePROut, nil, nil},
	{0x5f, prRelease, "PERSISTENT RESERVE OUT, RELEASE", anyPersistent | anyReserve | allData | inStandby, "\x1f\xff\x00\x00\xff\xff\xff\xff\x00", beginPROut, consumePROut, nil, nil},
	{0x5f, prClear, "PERSISTENT RESERVE OUT, CLEAR", anyPersistent | anyReserve | allData | inStandby, "\x1f\xff\x00\x00\xff\xff\xff\xff\x00", beginPROut, consumePROut, nil, nil},
	{0x5f, prPreempt, "PERSISTENT RESERVE OUT, PREEMPT", anyPersistent | anyReserve | allData | inStandby, "\x1f\xff\x00\x00\xff\xff\xff\xff\x00", beginPROut, consumePROut, nil, nil},
	{0x5f, prPreemptAndAbort, "PERSISTENT RESERVE OUT, PREEMPT AND ABORT", anyPersistent | anyReserve | allData | inStandby, "\x1f\xff\x00\x00\xff\xff\xff\xff\x00", beginPROut, consumePROut, nil, nil},
	{0x5f, prRegisterAndIgnore, "PERSISTENT RESERVE OUT, REGISTER AND IGNORE EXISTING KEY", anyPersistent | anyReserve | allData | inStandby, "\x1f\xff\x00\x00\xff\xff\xff\xff\x00", beginPROut, consumePROut, nil, nil},
	{0x5f, prRegisterAndMove, "PERSISTENT RESERVE OUT, REGISTER AND MOVE", anyPersistent | anyReserve | allData | inStandby, "\x1f\xff\x00\x00\xff\xff\xff\xff\x00", beginPROut, consumePROut, nil, nil},
	{0x83, 0x00, "EXTENDED COPY(LID1)", allData, "\x1f\x00\x00\x00\x00\x00\x00\x00\x00\xff\xff\xff\xff\x00\x00", beginExtendedCopy, consumeExtendedCopy, nil, nil},
	{0x84, 0x00, "RECEIVE COPY STATUS(LID1)", anyPersistent, "\x1f\xff\x00\x00\x00\x00\x00\x00\x00\xff\xff\xff\xff\x00\x00", receiveCopyStatus, nil, nil, nil},
	{0x84, 0x03, "RECEIVE COPY OPERATING PARAMETERS", anyPersistent, "\x1f\xff\x00\x00\x00\x00\x00\x00\x00\xff\xff\xff\xff\x00\x00", receiveCopyParameters, nil, nil, nil},
	{0x88, noSA, "READ(16)", medium | reads, "\x18\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x1f\x00", beginRead, nil, produceRead, nil},
	{opCompareAndWrite, noSA, "COMPARE AND WRITE", medium | writes | allData | exactData, "\x18\xff\xff\xff\xff\xff\xff\xff\xff\x00\x00\x00\xff\x1f\x00", beginCompareAndWrite, consumeCompareAndWrite, nil, nil},
	{0x8a, noSA, "WRITE(16)", medium | writes, "\x18\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x1f\x00", beginWrite, consumeWrite, nil, nil},
	{0x8b, noSA, "ORWRITE(16)", medium | writes, "\x18\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x1f\x00", beginWrite, consumeOrWrite, nil, nil},
	{0x8e, noSA, "WRITE AND VERIFY(16)", medium | writes, "\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x1f\x00", beginWrite, consumeWriteVerify, nil, endVerify},
	{0x8f, noSA, "VERIFY(16)", medium | allData | reads, "\x16\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x1f\x00", beginVerify, consumeVerify, nil, endVerify},
	{0x90, noSA, "PRE-FETCH(16)", medium | reads, "\x02\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x1f\x00", beginSync, nil, nil, endPrefetch},
	{0x91, noSA, "SYNCHRONIZE CACHE(16)", medium, "\x06\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x1f\x00", beginSync, nil, nil, endSync},
	{0x93, noSA, "WRITE SAME(16)", medium | writes | allData | exactData, "\x09\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x1f\x00", beginWriteSame, consumeWriteSame, nil, endWriteSame},
	{opWriteAtomic16, noSA, "WRITE ATOMIC(16)", medium | writes | allData | atomicWrite, "\x18\xff\xff\xff\xff\xff\xff\xff\xff\x00\x00\xff\xff\x1f\x00", beginWriteAtomic, consumeWriteAtomic, nil, endWriteAtomic},
	{0x9e, 0x10, "READ CAPACITY(16)", medium | anyPersistent | inStandby, "\x1f\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x00", readCapacity16, nil, nil, nil},
	{0x9e, 0x12, "GET LBA STATUS", medium | reads, "\x1f\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x00\x00", getLBAStatus, nil, nil, nil},
	{0xa0, noSA, "REPORT LUNS", absentLUN | keepAttention | anyPersistent | anyReserve, "\x00\xff\x00\x00\x00\xff\xff\xff\xff\x00\x00", reportLUNs, nil, nil, nil},
	{0xa3, 0x0a, "REPORT TARGET PORT GROUPS", anyPersistent | anyReserve | anyAccess, "\x3f\x00\x00\x00\x00\xff\xff\xff\xff\x00\x00", reportPortGroups, nil, nil, nil},
	{0xa3, 0x0c, "REPORT SUPPORTED OPERATION CODES", reads | inStandby, "\x1f\x87\xff\xff\xff\xff\xff\xff\xff\x00\x00", reportOpcodes, nil, nil, nil},
	{0xa3, 0x0d, "REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS", reads | inStandby, "\x1f\x80\x00\x00\x00\xff\xff\xff\xff\x00\x00", reportTMFs, nil, nil, nil},
	{0xa4, 0x0a, "SET TARGET PORT GROUPS", anyAccess | allData, "\x1f\x00\x00\x00\x00\xff\xff\xff\xff\x00\x00", beginSetPortGroups, consumeSetPortGroups, nil, nil},
	{0xa8, noSA, "READ(12)", medium | reads, "\x18\xff\xff\xff\xff\xff\xff\xff\xff\x1f\x00", beginRead, nil, produceRead, nil},
	{0xaa, noSA, "WRITE(12)", medium | writes, "\x18\xff\xff\xff\xff\xff\xff\xff\xff\x1f\x00", beginWrite, consumeWrite, nil, nil},
	{0xae, noSA, "WRITE AND VERIFY(12)", medium | writes, "\x12\xff\xff\xff\xff\xff\xff\xff\xff\x1f\x00", beginWrite, consumeWriteVerify, nil, endVerify},
	{0xaf, noSA, "VERIFY(12)", medium | allData | reads, "\x16\xff\xff\xff\xff\xff\xff\xff\xff\x1f\x00", beginVerify, consumeVerify, nil, endVerify},
	{0xb7, noSA, "READ DEFECT DATA(12)", medium | reads, "\x1f\xff\xff\xff\xff\xff\xff\xff\xff\x00\x00", readDefectData12, nil, nil, nil},
}

// byOpcode finds the rows of an operation code. It is filled by init, because
// rows refer to functions that walk the table.
var byOpcode [256][]*command

func init() {
	for i := range commands {
		row := &commands[i]
		byOpcode[row.op] = append(byOpcode[row.op], row)
	}
}

const saMask = 0x1f // SERVICE ACTION in octet 1

// lookup finds the row of a CDB of at least 16 octets, or nil.
func lookup(cdb []byte) *command {
	for _, row := range byOpcode[cdb[0]] {
		if row.sa == noSA || row.sa == int16(cdb[1]&saMask) {
			return row
		}
	}
	return nil
}

// failRow ends a command for which there is no row that applies to the unit.
func (c *Command) failRow() bool {
	for _, row := range byOpcode[c.CDB[0]] {
		if row.sa != noSA && c.unit.supports(row) {
			return c.failCDB(1, 4) // unknown service action
		}
	}
	return c.fail(condOpcode)
}

// naca is the bit of the CONTROL octet that asks for an auto contingent
// allegiance (SAM-5, section 5.9). There is none (NORMACA 0), because with one task
// set for all an initiator that fails and goes away would keep everybody from the
// unit. The other bits are vendor specific or obsolete.
const naca = 0x04

// reserved finds the first bit of a CDB that is set and not looked at.
func (row *command) reserved(cdb []byte) (octet, bit int, ok bool) {
	for i := range len(row.usage) {
		odd := cdb[i+1] &^ row.usage[i]
		if i == len(row.usage)-1 {
			odd &= naca
		}
		if odd != 0 {
			return i + 1, bits.Len8(odd) - 1, false
		}
	}
	return 0, 0, true
}

func (row *command) cdbLen() int { return 1 + len(row.usage) }

func noData(*Unit, *Command) bool { return true }

// supports tells whether a row applies to this unit.
func (u *Unit) supports(row *command) bool {
	needs := row.flags & optional
	return needs == 0 || u.has&needs == needs
}

// rowsFor are the rows that apply to u.
func rowsFor(u *Unit) (rows []*command) {
	for _, of := range byOpcode {
		for _, row := range of {
			if u.supports(row) {
				rows = append(rows, row)
			}
		}
	}
	return rows
}
