package lun

import (
	"math/bits"
	"slices"
)

// Operation codes that other places name, too.
const (
	opModeSelect6     = 0x15
	opModeSense6      = 0x1a
	opStartStop       = 0x1b
	opPreventAllow    = 0x1e
	opPRIn            = 0x5e
	opPROut           = 0x5f
	opExtendedCopy    = 0x83
	opReceiveCopy     = 0x84
	opRead16          = 0x88
	opCompareAndWrite = 0x89
	opWrite16         = 0x8a
	opWriteAtomic16   = 0x9c
)

// A command is a row of the command set.
type command struct {
	op    byte
	hasSA bool // sa, the service action, is part of the operation code
	sa    byte
	name  string
	flags flags
	// usage is the CDB USAGE DATA of REPORT SUPPORTED OPERATION CODES after the
	// operation code: the bits that the command evaluates. All others must be 0.
	// Its length gives that of the CDB.
	usage string
	// allowedByCDB, if not nil, reports whether a persistent reservation of somebody
	// else lets this CDB pass (SBC-3, commands allowed in the presence of various
	// reservations).
	allowedByCDB func(cdb []byte) bool
	phases
}

// phases are what a command does, in this order. A nil phase does nothing.
type phases struct {
	begin   func(*Unit, *Command) bool                 // checks the CDB, and sets how much data follows
	consume func(*Unit, *Command, []byte, uint64) bool // data-out
	produce func(*Unit, *Command, []byte, uint64) bool // data-in, unless begin has called report
	end     func(*Unit, *Command)
}

// Phases that several rows share.
var (
	read           = phases{begin: beginRead, produce: produceRead}
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
)

type flags uint16

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
)

// optional are the flags of rows that some units do not have.
const optional = thin | atomicWrite | removable | sanitizes

// Parts of the usage of several rows.
const (
	lba8     = "\xff\xff\xff\xff\xff\xff\xff\xff"
	range10  = "\xff\xff\xff\xff\x1f\xff\xff\x00" // LBA, GROUP NUMBER, length, CONTROL
	range12  = "\xff\xff\xff\xff\xff\xff\xff\xff\x1f\x00"
	range16  = lba8 + "\xff\xff\xff\xff\x1f\x00"
	report12 = "\x00\x00\x00\x00\xff\xff\xff\xff\x00\x00" // length, CONTROL
	copy16   = "\x00\x00\x00\x00\x00\x00\x00\xff\xff\xff\xff\x00\x00"
	none6    = "\x00\x00\x00\x00\x00"
	none10   = "\x00\x00\x00\x00\x00\x00\x00\x00\x00"
)

// commands is the whole command set. A missing row is INVALID COMMAND
// OPERATION CODE; REPORT SUPPORTED OPERATION CODES reads the same rows.
var commands = slices.Concat([]command{
	{op: 0x00, name: "TEST UNIT READY", flags: medium | anyPersistent, usage: none6, phases: phases{begin: noData}},
	{op: 0x03, name: "REQUEST SENSE", flags: absentLUN | keepAttention | anyPersistent | anyReserve,
		usage: "\x01\x00\x00\xff\x00", phases: phases{begin: requestSense}},
	{op: 0x08, name: "READ(6)", flags: medium | reads, usage: "\x1f\xff\xff\xff\x00", phases: read},
	{op: 0x0a, name: "WRITE(6)", flags: medium | writes, usage: "\x1f\xff\xff\xff\x00", phases: write},
	{op: 0x12, name: "INQUIRY", flags: absentLUN | keepAttention | anyPersistent | anyReserve,
		usage: "\x01\xff\xff\xff\x00", phases: phases{begin: inquiry}},
	{op: opModeSelect6, name: "MODE SELECT(6)", flags: allData | inStandby,
		usage: "\x11\x00\x00\xff\x00", phases: modeSelect},
	{op: 0x16, name: "RESERVE(6)", flags: anyPersistent, usage: none6, phases: reserveUnit},
	{op: 0x17, name: "RELEASE(6)", flags: anyPersistent | anyReserve, usage: none6, phases: releaseUnit},
	{op: opModeSense6, name: "MODE SENSE(6)", flags: reads | inStandby,
		usage: "\x08\xff\xff\xff\x00", phases: phases{begin: modeSense}},
	{op: opStartStop, name: "START STOP UNIT",
		usage: "\x01\x00\x0f\xf7\x00", allowedByCDB: startsOnly, phases: phases{begin: startStop, end: endStartStop}},
	{op: opPreventAllow, name: "PREVENT ALLOW MEDIUM REMOVAL", flags: removable, usage: "\x00\x00\x00\x01\x00",
		allowedByCDB: allowsRemoval, phases: phases{begin: noData, end: endPreventAllow}},
	{op: 0x25, name: "READ CAPACITY(10)", flags: medium | anyPersistent | inStandby,
		usage: "\x00\xff\xff\xff\xff\x00\x00\x01\x00", phases: phases{begin: readCapacity10}},
	{op: 0x28, name: "READ(10)", flags: medium | reads, usage: "\x18" + range10, phases: read},
	{op: 0x2a, name: "WRITE(10)", flags: medium | writes, usage: "\x18" + range10, phases: write},
	{op: 0x2e, name: "WRITE AND VERIFY(10)", flags: medium | writes, usage: "\x12" + range10, phases: writeAndVerify},
	{op: 0x2f, name: "VERIFY(10)", flags: medium | allData | reads, usage: "\x16" + range10, phases: verify},
	{op: 0x34, name: "PRE-FETCH(10)", flags: medium | reads, usage: "\x02" + range10, phases: prefetch},
	{op: 0x35, name: "SYNCHRONIZE CACHE(10)", flags: medium, usage: "\x06" + range10, phases: synchronize},
	{op: 0x37, name: "READ DEFECT DATA(10)", flags: medium | reads,
		usage: "\x00\x1f\x00\x00\x00\x00\xff\xff\x00", phases: phases{begin: readDefectData10}},
	{op: 0x41, name: "WRITE SAME(10)", flags: medium | writes | allData | exactData,
		usage: "\x08" + range10, phases: writeSame},
	{op: 0x42, name: "UNMAP", flags: medium | writes | thin | allData,
		usage: "\x00\x00\x00\x00\x00\x1f\xff\xff\x00", phases: phases{begin: beginUnmap, consume: consumeUnmap}},
	{op: 0x48, hasSA: true, sa: sanitizeOverwrite, name: "SANITIZE OVERWRITE",
		flags: medium | writes | sanitizes | allData, usage: "\xbf\x00\x00\x00\x00\x00\xff\xff\x00",
		phases: phases{begin: beginOverwrite, consume: consumeOverwrite}},
	{op: 0x48, hasSA: true, sa: sanitizeBlockErase, name: "SANITIZE BLOCK ERASE",
		flags: medium | writes | sanitizes | thin, usage: "\xbf\x00\x00\x00\x00\x00\x00\x00\x00", phases: erase},
	{op: 0x48, hasSA: true, sa: sanitizeCryptoErase, name: "SANITIZE CRYPTOGRAPHIC ERASE",
		flags: medium | writes | sanitizes, usage: "\xbf\x00\x00\x00\x00\x00\x00\x00\x00", phases: erase},
	{op: 0x48, hasSA: true, sa: sanitizeExitFailureMode, name: "SANITIZE EXIT FAILURE MODE", flags: sanitizes,
		usage: "\xbf\x00\x00\x00\x00\x00\x00\x00\x00", phases: phases{begin: noData, end: endExitFailureMode}},
	{op: 0x4d, name: "LOG SENSE", flags: anyPersistent | anyReserve | inStandby,
		usage: "\x00\xff\xff\x00\xff\xff\xff\xff\x00", phases: phases{begin: logSense}},
	{op: 0x55, name: "MODE SELECT(10)", flags: allData | inStandby,
		usage: "\x11\x00\x00\x00\x00\x00\xff\xff\x00", phases: modeSelect},
	{op: 0x56, name: "RESERVE(10)", flags: anyPersistent, usage: none10, phases: reserveUnit},
	{op: 0x57, name: "RELEASE(10)", flags: anyPersistent | anyReserve, usage: none10, phases: releaseUnit},
	{op: 0x5a, name: "MODE SENSE(10)", flags: reads | inStandby,
		usage: "\x18\xff\xff\x00\x00\x00\xff\xff\x00", phases: phases{begin: modeSense}},
	persistentReserveIn(prReadKeys, "READ KEYS", beginPRIn),
	persistentReserveIn(prReadReservation, "READ RESERVATION", beginPRIn),
	persistentReserveIn(prReportCapabilities, "REPORT CAPABILITIES", prCapabilities),
	persistentReserveIn(prReadFullStatus, "READ FULL STATUS", beginPRIn),
	{op: opExtendedCopy, hasSA: true, sa: 0x00, name: "EXTENDED COPY(LID1)", flags: allData,
		usage: "\x1f\x00" + copy16, phases: phases{begin: beginExtendedCopy, consume: consumeExtendedCopy}},
	{op: opReceiveCopy, hasSA: true, sa: 0x00, name: "RECEIVE COPY STATUS(LID1)", flags: anyPersistent,
		usage: "\x1f\xff" + copy16, phases: phases{begin: receiveCopyStatus}},
	{op: opReceiveCopy, hasSA: true, sa: 0x03, name: "RECEIVE COPY OPERATING PARAMETERS", flags: anyPersistent,
		usage: "\x1f\xff" + copy16, phases: phases{begin: receiveCopyParameters}},
	{op: opRead16, name: "READ(16)", flags: medium | reads, usage: "\x18" + range16, phases: read},
	{op: opCompareAndWrite, name: "COMPARE AND WRITE", flags: medium | writes | allData | exactData,
		usage:  "\x18" + lba8 + "\x00\x00\x00\xff\x1f\x00",
		phases: phases{begin: beginCompareAndWrite, consume: consumeCompareAndWrite}},
	{op: opWrite16, name: "WRITE(16)", flags: medium | writes, usage: "\x18" + range16, phases: write},
	{op: 0x8b, name: "ORWRITE(16)", flags: medium | writes,
		usage: "\x18" + range16, phases: phases{begin: beginWrite, consume: consumeOrWrite}},
	{op: 0x8e, name: "WRITE AND VERIFY(16)", flags: medium | writes, usage: "\x12" + range16, phases: writeAndVerify},
	{op: 0x8f, name: "VERIFY(16)", flags: medium | allData | reads, usage: "\x16" + range16, phases: verify},
	{op: 0x90, name: "PRE-FETCH(16)", flags: medium | reads, usage: "\x02" + range16, phases: prefetch},
	{op: 0x91, name: "SYNCHRONIZE CACHE(16)", flags: medium, usage: "\x06" + range16, phases: synchronize},
	{op: 0x93, name: "WRITE SAME(16)", flags: medium | writes | allData | exactData,
		usage: "\x09" + range16, phases: writeSame},
	{op: opWriteAtomic16, name: "WRITE ATOMIC(16)", flags: medium | writes | allData | atomicWrite,
		usage:  "\x18" + lba8 + "\x00\x00\xff\xff\x1f\x00",
		phases: phases{begin: beginWriteAtomic, consume: consumeWriteAtomic, end: endWriteAtomic}},
	{op: 0x9e, hasSA: true, sa: 0x10, name: "READ CAPACITY(16)", flags: medium | anyPersistent | inStandby,
		usage: "\x1f\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x00", phases: phases{begin: readCapacity16}},
	{op: 0x9e, hasSA: true, sa: 0x12, name: "GET LBA STATUS", flags: medium | reads,
		usage: "\x1f\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x00\x00", phases: phases{begin: getLBAStatus}},
	{op: 0xa0, name: "REPORT LUNS", flags: absentLUN | keepAttention | anyPersistent | anyReserve,
		usage: "\x00\xff\x00\x00\x00\xff\xff\xff\xff\x00\x00", phases: phases{begin: reportLUNs}},
	{op: 0xa3, hasSA: true, sa: 0x0a, name: "REPORT TARGET PORT GROUPS", flags: anyPersistent | anyReserve | anyAccess,
		usage: "\x3f" + report12, phases: phases{begin: reportPortGroups}},
	{op: 0xa3, hasSA: true, sa: 0x0c, name: "REPORT SUPPORTED OPERATION CODES", flags: reads | inStandby,
		usage: "\x1f\x87\xff\xff\xff\xff\xff\xff\xff\x00\x00", phases: phases{begin: reportOpcodes}},
	{op: 0xa3, hasSA: true, sa: 0x0d, name: "REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS", flags: reads | inStandby,
		usage: "\x1f\x80\x00\x00\x00\xff\xff\xff\xff\x00\x00", phases: phases{begin: reportTMFs}},
	{op: 0xa4, hasSA: true, sa: 0x0a, name: "SET TARGET PORT GROUPS", flags: anyAccess | allData,
		usage: "\x1f" + report12, phases: phases{begin: beginSetPortGroups, consume: consumeSetPortGroups}},
	{op: 0xa8, name: "READ(12)", flags: medium | reads, usage: "\x18" + range12, phases: read},
	{op: 0xaa, name: "WRITE(12)", flags: medium | writes, usage: "\x18" + range12, phases: write},
	{op: 0xae, name: "WRITE AND VERIFY(12)", flags: medium | writes, usage: "\x12" + range12, phases: writeAndVerify},
	{op: 0xaf, name: "VERIFY(12)", flags: medium | allData | reads, usage: "\x16" + range12, phases: verify},
	{op: 0xb7, name: "READ DEFECT DATA(12)", flags: medium | reads,
		usage: "\x1f\xff\xff\xff\xff\xff\xff\xff\xff\x00\x00", phases: phases{begin: readDefectData12}},
}, persistentReserveOut())

// persistentReserveIn returns a row of PERSISTENT RESERVE IN.
func persistentReserveIn(sa byte, action string, begin func(*Unit, *Command) bool) command {
	return command{
		op: opPRIn, hasSA: true, sa: sa, name: "PERSISTENT RESERVE IN, " + action,
		flags: anyPersistent | anyReserve | inStandby,
		usage: "\x1f\x00\x00\x00\x00\x00\xff\xff\x00", phases: phases{begin: begin},
	}
}

// persistentReserveOut returns the rows of PERSISTENT RESERVE OUT.
func persistentReserveOut() (rows []command) {
	for sa := range prOuts {
		rows = append(rows, command{
			op: opPROut, hasSA: true, sa: byte(sa), name: "PERSISTENT RESERVE OUT, " + prOuts[sa].name,
			flags: anyPersistent | anyReserve | allData | inStandby,
			usage: "\x1f\xff\x00\x00\xff\xff\xff\xff\x00", phases: phases{begin: beginPROut, consume: consumePROut},
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
		if !row.hasSA || row.sa == cdb[1]&saMask {
			return row
		}
	}
	return nil
}

// failRow fails a command without a row that applies to the unit.
func (c *Command) failRow() bool {
	for _, row := range byOpcode[c.CDB[0]] {
		if row.hasSA && c.unit.supports(row) {
			return c.failCDB(1, 4) // unknown service action
		}
	}
	return c.fail(condOpcode)
}

// naca is the bit of the CONTROL byte that asks for an auto contingent allegiance (SAM-5, section
// 5.9). The target has none (NORMACA 0), because with one task set for all initiators, one that
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
