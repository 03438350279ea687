// Package cdb builds the SCSI command descriptor blocks that tests send. Every block is 16
// bytes long, as in the header of a SCSI Command PDU: what a shorter CDB leaves is zero.
package cdb

import "encoding/binary"

// TestUnitReady is the CDB of a TEST UNIT READY command.
var TestUnitReady [16]byte

// Read10 returns the CDB of READ(10) of n blocks from block lba.
func Read10(lba uint32, n uint16) [16]byte { return RW10(0x28, lba, n) }

// Write10 returns the CDB of WRITE(10) of n blocks from block lba.
func Write10(lba uint32, n uint16) [16]byte { return RW10(0x2a, lba, n) }

// Read16 returns the CDB of READ(16) of n blocks from block lba.
func Read16(lba uint64, n uint32) [16]byte { return RW16(0x88, lba, n) }

// Write16 returns the CDB of WRITE(16) of n blocks from block lba.
func Write16(lba uint64, n uint32) [16]byte { return RW16(0x8a, lba, n) }

// RW10 returns the CDB of a command of 10 bytes that names n blocks from block lba.
func RW10(op byte, lba uint32, n uint16) (cdb [16]byte) {
	cdb[0] = op
	binary.BigEndian.PutUint32(cdb[2:], lba)
	binary.BigEndian.PutUint16(cdb[7:], n)
	return cdb
}

// RW16 returns the CDB of a command of 16 bytes that names n blocks from block lba.
func RW16(op byte, lba uint64, n uint32) (cdb [16]byte) {
	cdb[0] = op
	binary.BigEndian.PutUint64(cdb[2:], lba)
	binary.BigEndian.PutUint32(cdb[10:], n)
	return cdb
}

// Service actions of PERSISTENT RESERVE OUT, and types of reservations (SPC-4, sections 6.16 and 5.12).
const (
	Register, Reserve, PreemptAndAbort, RegisterAndIgnore = 0, 1, 5, 6
	ExclusiveAccess, WriteExclusiveRegistrants            = 3, 5
)

// PersistentReserveOut returns the CDB and the parameter list of a PERSISTENT RESERVE OUT command.
func PersistentReserveOut(sa, typ byte, key, saKey uint64, aptpl byte) (cdb [16]byte, list []byte) {
	list = make([]byte, 24)
	binary.BigEndian.PutUint64(list, key)
	binary.BigEndian.PutUint64(list[8:], saKey)
	list[20] = aptpl
	return [16]byte{0x5f, sa, typ, 8: 24}, list
}
