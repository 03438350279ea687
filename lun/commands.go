package lun

import (
	"fmt"
	"math/bits"
	"slices"
)

// Operation codes that other places name, too.
const (
	opTestUnitReady     = 0x00
	opModeSelect6       = 0x15
	opModeSense6        = 0x1a
	opStartStop         = 0x1b
	opPreventAllow      = 0x1e
	opSendDiagnostic    = 0x1d
	opReadCapacity10    = 0x25
	opReadDefectData10  = 0x37
	opModeSelect10      = 0x55
	opPRIn              = 0x5e
	opPROut             = 0x5f
	opExtendedCopy      = 0x83
	opReceiveCopy       = 0x84
	opRead16            = 0x88
	opCompareAndWrite   = 0x89
	opWrite16           = 0x8a
	opWriteAtomic16     = 0x9c
	opServiceActionIn16 = 0x9e
	opReadDefectData12  = 0xb7
)

const saReadCapacity16 = 0x10

// A command is a row of the command set.
type command struct {
	op    byte
	sa    int // service action, or noSA: the operation code alone names the command
	name  string
	flags flags
	// usage is the CDB USAGE DATA of REPORT SUPPORTED OPERATION CODES after the operation code: the
	// bits that the command evaluates. All others must be 0. Its length gives that of the CDB.
	usage string
	phases
}

const noSA = -1

func (row *command) hasSA() bool { return row.sa != noSA }

// phases are what a command does, in this order. A nil phase does nothing.
type phases struct {
	begin   func(*Unit, *Command) bool                 // checks the CDB, and sets how much data follows
	consume func(*Unit, *Command, []byte, uint64) bool // data-out
	produce func(*Unit, *Command, []byte, uint64) bool // data-in, unless begin has called report
	end     func(*Unit, *Command)
	lends   bool // the data-in is that of the store at the LBA
}

// Phases that several rows share, or that are long.
var (
	read           = phases{begin: beginRead, produce: produceRead, lends: true}
	write          = phases{begin: beginWrite, consume: consumeWrite}
	writeAndVerify = phases{begin: beginWrite, consume: consumeWriteVerify, end: endVerify}
	writeSame      = phases{begin: beginWriteSame, consume: consumeWriteSame, end: endWriteSame}
	verify         = phases{begin: beginVerify, consume: consumeVerify, end: endVerify}
	prefetch       = phases{begin: beginSync, end: endPrefetch}
	synchronize    = phases{begin: beginSync, end: endSync}
	modeSelect     = phases{begin: beginModeSelect, consume: consumeModeSelect, end: endModeSelect}
	reserveUnit    = phases{begin: noData, end: endReserve}
	releaseUnit    = phases{begin: noData, end: endRelease}
	erase          = phases{begin: noData, end: endErase}
	writeAtomic    = phases{begin: beginWriteAtomic, consume: consumeWriteAtomic, end: endWriteAtomic}
)

type flags uint32

const (
	absentLUN     flags = 1 << iota // served where the LUN does not exist
	keepAttention                   // does not fail because of a unit attention (SAM-5, section 5.14)
	medium                          // needs a started unit
	writes                          // changes the medium
	thin                            // only where the store can give space back
	allData                         // of no use with a part of its data-out
	atomicWrite                     // only where the store has atomic writes
	removable                       // only where the medium can be removed
	sanitizes                       // only where sanitizing is allowed; a failed sanitize is no obstacle
	reads                           // passes reservations that keep out only writers
	anyPersistent                   // passes all persistent reservations
	anyReserve                      // passes a RESERVE of somebody else
	exactData                       // of no use with more data-out than it takes
	anyAccess                       // served in all asymmetric access states; so is a command with absentLUN
	inStandby                       // served in standby (SPC-4, section 5.11.2.5)
	changes                         // changes what other initiators see: not from those that may only read
	formats                         // a failed FORMAT UNIT is no obstacle
	protects                        // with protection information, the CDB has a protect field in byte 1
	aloneOnly                       // not where other gateways have the unit, too
	formatsTypes                    // with protection information, the CDB has FMTPINFO
	setsAccess                      // only where initiators set the states of target port groups
)

// Flags of several rows.
const (
	optional = thin | atomicWrite | removable | sanitizes | setsAccess | aloneOnly // some units do not have these rows
	anyLUN   = absentLUN | keepAttention | anyPersistent | anyReserve
	anyPR    = anyPersistent | anyReserve | inStandby
)

// Parts of the usage of several rows.
const (
	lba8     = "\xff\xff\xff\xff\xff\xff\xff\xff"
	range10  = "\xff\xff\xff\xff\x1f\xff\xff\x00" // LBA, GROUP NUMBER, length, CONTROL
	range12  = "\xff\xff\xff\xff\xff\xff\xff\xff\x1f\x00"
	range16  = lba8 + "\xff\xff\xff\xff\x1f\x00"
	report12 = "\x00\x00\x00\x00\xff\xff\xff\xff\x00\x00" // length, CONTROL
	// identifying12 ends with the length, the type and CONTROL.
	identifying12 = "\x00\x00\x00\x00\xff\xff\xff\xff\xfe\x00"
	copy16        = "\x00\x00\x00\x00\x00\x00\x00\xff\xff\xff\xff\x00\x00"
	token16       = "\x1f\x00\x00\x00\x00" + len4 + len4 + "\x1f\x00" // list identifier, length, GROUP NUMBER, CONTROL
	len4          = "\xff\xff\xff\xff"
	none6         = "\x00\x00\x00\x00\x00"
	none10        = "\x00\x00\x00\x00\x00\x00\x00\x00\x00"
	erase10       = "\xbf\x00\x00\x00\x00\x00\x00\x00\x00"
	prIn          = "\x1f\x00\x00\x00\x00\x00\xff\xff\x00"
)

// commands is the whole command set. A missing row is INVALID COMMAND
// OPERATION CODE; REPORT SUPPORTED OPERATION CODES reads the same rows.
var commands = slices.Concat([]command{
	{opTestUnitReady, noSA, "TEST UNIT READY", medium | anyPersistent, none6, phases{begin: noData}},
	{0x03, noSA, "REQUEST SENSE", anyLUN, "\x01\x00\x00\xff\x00", phases{begin: requestSense}},
	{0x04, noSA, "FORMAT UNIT", medium | formatsTypes | writes | formats | allData, "\x3f\x00\x00\x00\x00",
		phases{begin: beginFormat, consume: consumeFormat, end: endFormat}},
	{0x08, noSA, "READ(6)", medium | reads, "\x1f\xff\xff\xff\x00", read},
	{0x0a, noSA, "WRITE(6)", medium | writes, "\x1f\xff\xff\xff\x00", write},
	{0x12, noSA, "INQUIRY", anyLUN, "\x01\xff\xff\xff\x00", phases{begin: inquiry}},
	{opModeSelect6, noSA, "MODE SELECT(6)", allData | inStandby | changes, "\x11\x00\x00\xff\x00", modeSelect},
	{0x16, noSA, "RESERVE(6)", anyPersistent | changes | aloneOnly, none6, reserveUnit},
	{0x17, noSA, "RELEASE(6)", anyPersistent | anyReserve | aloneOnly, none6, releaseUnit},
	{opModeSense6, noSA, "MODE SENSE(6)", reads | inStandby, "\x08\xff\xff\xff\x00", phases{begin: modeSense}},
	{opStartStop, noSA, "START STOP UNIT", changes, "\x01\x00\x0f\xf7\x00",
		phases{begin: startStop, end: endStartStop}},
	{opSendDiagnostic, noSA, "SEND DIAGNOSTIC", medium | inStandby, "\xf7\x00\xff\xff\x00",
		phases{begin: beginSendDiagnostic, end: endSendDiagnostic}},
	{opPreventAllow, noSA, "PREVENT ALLOW MEDIUM REMOVAL", removable | changes, "\x00\x00\x00\x01\x00",
		phases{begin: noData, end: endPreventAllow}},
	{opReadCapacity10, noSA, "READ CAPACITY(10)", medium | anyPersistent | inStandby, "\x00\xff\xff\xff\xff\x00\x00\x01\x00",
		phases{begin: readCapacity10}},
	{0x28, noSA, "READ(10)", medium | protects | reads, "\x18" + range10, read},
	{0x2a, noSA, "WRITE(10)", medium | protects | writes, "\x18" + range10, write},
	{0x2e, noSA, "WRITE AND VERIFY(10)", medium | protects | writes, "\x12" + range10, writeAndVerify},
	{0x2f, noSA, "VERIFY(10)", medium | protects | allData | reads, "\x16" + range10, verify},
	{0x34, noSA, "PRE-FETCH(10)", medium | reads, "\x02" + range10, prefetch},
	{0x35, noSA, "SYNCHRONIZE CACHE(10)", medium, "\x06" + range10, synchronize},
	{0x3b, noSA, "WRITE BUFFER", anyAccess, "\x1f\xff\xff\xff\xff\xff\xff\xff\x00",
		phases{begin: beginWriteBuffer, consume: consumeWriteBuffer}},
	{0x3c, noSA, "READ BUFFER", reads | anyAccess, "\x1f\xff\xff\xff\xff\xff\xff\xff\x00", phases{begin: readBuffer}},
	{opReadDefectData10, noSA, "READ DEFECT DATA(10)", medium | reads, "\x00\x1f\x00\x00\x00\x00\xff\xff\x00",
		phases{begin: readDefectData10}},
	{0x41, noSA, "WRITE SAME(10)", medium | protects | writes | allData | exactData, "\x08" + range10, writeSame},
	{0x42, noSA, "UNMAP", medium | writes | thin | allData, "\x00\x00\x00\x00\x00\x1f\xff\xff\x00",
		phases{begin: beginUnmap, consume: consumeUnmap}},
	{0x48, sanitizeOverwrite, "SANITIZE OVERWRITE", medium | writes | sanitizes | formats | allData,
		"\xbf\x00\x00\x00\x00\x00\xff\xff\x00", phases{begin: beginOverwrite, consume: consumeOverwrite}},
	{0x48, sanitizeBlockErase, "SANITIZE BLOCK ERASE", medium | writes | sanitizes | formats | thin, erase10, erase},
	{0x48, sanitizeCryptoErase, "SANITIZE CRYPTOGRAPHIC ERASE", medium | writes | sanitizes | formats, erase10, erase},
	{0x48, sanitizeExitFailureMode, "SANITIZE EXIT FAILURE MODE", sanitizes | changes, erase10,
		phases{begin: noData, end: endExitFailureMode}},
	{0x4c, noSA, "LOG SELECT", inStandby | changes, "\x02\xff\xff\x00\x00\x00\x00\x00\x00", phases{begin: logSelect}},
	{0x4d, noSA, "LOG SENSE", anyPR, "\x00\xff\xff\x00\xff\xff\xff\xff\x00", phases{begin: logSense}},
	{opModeSelect10, noSA, "MODE SELECT(10)", allData | inStandby | changes, "\x11\x00\x00\x00\x00\x00\xff\xff\x00",
		modeSelect},
	{0x56, noSA, "RESERVE(10)", anyPersistent | changes | aloneOnly, none10, reserveUnit},
	{0x57, noSA, "RELEASE(10)", anyPersistent | anyReserve | aloneOnly, none10, releaseUnit},
	{0x5a, noSA, "MODE SENSE(10)", reads | inStandby, "\x18\xff\xff\x00\x00\x00\xff\xff\x00", phases{begin: modeSense}},
	{opPRIn, prReadKeys, "PERSISTENT RESERVE IN, READ KEYS", anyPR, prIn, phases{begin: beginPRIn}},
	{opPRIn, prReadReservation, "PERSISTENT RESERVE IN, READ RESERVATION", anyPR, prIn, phases{begin: beginPRIn}},
	{opPRIn, prReportCapabilities, "PERSISTENT RESERVE IN, REPORT CAPABILITIES", anyPR, prIn,
		phases{begin: prCapabilities}},
	{opPRIn, prReadFullStatus, "PERSISTENT RESERVE IN, READ FULL STATUS", anyPR, prIn, phases{begin: beginPRIn}},
	{opExtendedCopy, saCopyLID1, "EXTENDED COPY(LID1)", allData, "\x1f\x00" + copy16,
		phases{begin: beginExtendedCopy, consume: consumeExtendedCopy}},
	{opExtendedCopy, saCopyLID4, "EXTENDED COPY(LID4)", allData, "\x1f\x00" + copy16,
		phases{begin: beginExtendedCopy, consume: consumeExtendedCopy4}},
	{opExtendedCopy, saPopulateToken, "POPULATE TOKEN", medium | reads | allData, token16,
		phases{begin: beginPopulateToken, consume: consumePopulateToken}},
	{opExtendedCopy, saWriteUsingToken, "WRITE USING TOKEN", medium | writes | allData, token16,
		phases{begin: beginWriteUsingToken, consume: consumeWriteUsingToken}},
	{opExtendedCopy, saCopyAbort, "COPY OPERATION ABORT", anyPersistent, "\x1f" + len4 + "\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00",
		phases{begin: noData, end: endCopyAbort}},
	{opReceiveCopy, saStatusLID1, "RECEIVE COPY STATUS(LID1)", anyPersistent, "\x1f\xff" + copy16,
		phases{begin: receiveCopyStatus}},
	{opReceiveCopy, saCopyParameters, "RECEIVE COPY OPERATING PARAMETERS", anyPersistent, "\x1f\xff" + copy16,
		phases{begin: receiveCopyParameters}},
	{opReceiveCopy, saStatusLID4, "RECEIVE COPY STATUS(LID4)", anyPersistent, "\x1f" + len4 + "\x00\x00\x00\x00" + len4 + "\x00\x00",
		phases{begin: receiveCopyStatus4}},
	{opReceiveCopy, saTokenInformation, "RECEIVE ROD TOKEN INFORMATION", anyPersistent,
		"\x1f" + len4 + "\x00\x00\x00\x00" + len4 + "\x00\x00", phases{begin: receiveTokenInformation}},
	{opRead16, noSA, "READ(16)", medium | protects | reads, "\x18" + range16, read},
	{opCompareAndWrite, noSA, "COMPARE AND WRITE", medium | protects | writes | allData | exactData,
		"\x18" + lba8 + "\x00\x00\x00\xff\x1f\x00", phases{begin: beginCompareAndWrite, consume: consumeCompareAndWrite}},
	{opWrite16, noSA, "WRITE(16)", medium | protects | writes, "\x18" + range16, write},
	{0x8b, noSA, "ORWRITE(16)", medium | protects | writes, "\x18" + range16, phases{begin: beginWrite, consume: consumeOrWrite}},
	{0x8e, noSA, "WRITE AND VERIFY(16)", medium | protects | writes, "\x12" + range16, writeAndVerify},
	{0x8f, noSA, "VERIFY(16)", medium | protects | allData | reads, "\x16" + range16, verify},
	{0x90, noSA, "PRE-FETCH(16)", medium | reads, "\x02" + range16, prefetch},
	{0x91, noSA, "SYNCHRONIZE CACHE(16)", medium, "\x06" + range16, synchronize},
	{0x93, noSA, "WRITE SAME(16)", medium | protects | writes | allData | exactData, "\x09" + range16, writeSame},
	{opWriteAtomic16, noSA, "WRITE ATOMIC(16)", medium | protects | writes | allData | atomicWrite,
		"\x18" + lba8 + "\x00\x00\xff\xff\x1f\x00", writeAtomic},
	{opServiceActionIn16, saReadCapacity16, "READ CAPACITY(16)", medium | anyPersistent | inStandby, "\x1f" + lba8 + len4 + "\x01\x00",
		phases{begin: readCapacity16}},
	{opServiceActionIn16, 0x12, "GET LBA STATUS", medium | reads, "\x1f" + lba8 + len4 + "\x00\x00", phases{begin: getLBAStatus}},
	{0xa0, noSA, "REPORT LUNS", anyLUN, "\x00\xff\x00\x00\x00" + len4 + "\x00\x00", phases{begin: reportLUNs}},
	{0xa3, 0x05, "REPORT IDENTIFYING INFORMATION", anyPersistent | anyReserve, "\x1f" + identifying12,
		phases{begin: reportIdentifying}},
	{0xa3, 0x0a, "REPORT TARGET PORT GROUPS", anyPersistent | anyReserve | anyAccess, "\x3f" + report12,
		phases{begin: reportPortGroups}},
	{0xa3, 0x0c, "REPORT SUPPORTED OPERATION CODES", reads | inStandby, "\x1f\x87\xff\xff\xff\xff\xff\xff\xff\x00\x00",
		phases{begin: reportOpcodes}},
	{0xa3, 0x0d, "REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS", reads | inStandby,
		"\x1f\x80\x00\x00\x00" + len4 + "\x00\x00", phases{begin: reportTMFs}},
	{0xa3, 0x0f, "REPORT TIMESTAMP", anyPersistent | anyReserve, "\x1f" + report12, phases{begin: reportTimestamp}},
	{0xa4, 0x06, "SET IDENTIFYING INFORMATION", allData | changes, "\x1f" + identifying12,
		phases{begin: beginSetIdentifying, consume: consumeSetIdentifying, end: endSetIdentifying}},
	{0xa4, 0x0a, "SET TARGET PORT GROUPS", anyAccess | allData | changes | setsAccess, "\x1f" + report12,
		phases{begin: beginSetPortGroups, consume: consumeSetPortGroups}},
	{0xa4, 0x0f, "SET TIMESTAMP", allData | changes, "\x1f" + report12,
		phases{begin: beginSetTimestamp, consume: consumeSetTimestamp}},
	{0xa8, noSA, "READ(12)", medium | protects | reads, "\x18" + range12, read},
	{0xaa, noSA, "WRITE(12)", medium | protects | writes, "\x18" + range12, write},
	{0xae, noSA, "WRITE AND VERIFY(12)", medium | protects | writes, "\x12" + range12, writeAndVerify},
	{0xaf, noSA, "VERIFY(12)", medium | protects | allData | reads, "\x16" + range12, verify},
	{opReadDefectData12, noSA, "READ DEFECT DATA(12)", medium | reads, "\x1f" + lba8 + "\x00\x00", phases{begin: readDefectData12}},
}, persistentReserveOut())

// persistentReserveOut returns the rows of PERSISTENT RESERVE OUT.
func persistentReserveOut() (rows []command) {
	for sa := range prOuts {
		class := anyPR | allData
		if prOuts[sa].changes {
			class |= changes
		}
		rows = append(rows, command{
			opPROut, sa, "PERSISTENT RESERVE OUT, " + prOuts[sa].name, class,
			"\x1f\xff\x00\x00\xff\xff\xff\xff\x00", phases{begin: beginPROut, consume: consumePROut},
		})
	}
	return rows
}

// byOpcode has the rows of each operation code. init fills it, because rows refer to functions
// that walk the table.
var byOpcode [256][]*command

func init() {
	for i := range commands {
		row := &commands[i]
		byOpcode[row.op] = append(byOpcode[row.op], row)
	}
}

const saMask = 0x1f // SERVICE ACTION in byte 1

// lookup returns the row of a CDB of at least 16 bytes, or nil.
func lookup(cdb []byte) *command {
	for _, row := range byOpcode[cdb[0]] {
		if !row.hasSA() || row.sa == int(cdb[1]&saMask) {
			return row
		}
	}
	return nil
}

// CommandName returns the name of the command of a CDB of at least 16 bytes, as in SPC-4 and SBC-3.
func CommandName(cdb []byte) string {
	if row := lookup(cdb); row != nil {
		return row.name
	}
	return fmt.Sprintf("command %02Xh", cdb[0])
}

// failRow fails a command without a row that applies to the unit.
func (c *Command) failRow() bool {
	for _, row := range byOpcode[c.CDB[0]] {
		if row.hasSA() && c.unit.supports(row) {
			return c.failCDB(1, 4) // unknown service action
		}
	}
	return c.fail(condOpcode)
}

// naca is the bit of the CONTROL byte that asks for an auto contingent allegiance (SAM-5, section
// 5.9). The target has none (NORMACA 0), because with one task set for all initiators, the default, one that
// fails and goes away would keep all others from the unit. The other bits are vendor specific or
// obsolete.
const naca = 0x04

// reserved finds the first bit of a CDB that is set and that the command does not evaluate.
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

// supports reports whether a row applies to this unit.
func (u *Unit) supports(row *command) bool {
	needs := row.flags & optional
	return needs == 0 || u.has&needs == needs
}

// rowsFor returns the rows that apply to u.
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
