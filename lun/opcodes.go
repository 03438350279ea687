package lun

import "encoding/binary"

const (
	rctd          = 0x80 // RCTD: with command timeouts descriptors
	descLen       = 8
	timeoutsLen   = 12
	supportNo     = 1
	supportYes    = 3
	ctdpOne       = 0x80
	ctdpAll       = 0x02
	servactv      = 0x01
	reportAll     = 0
	reportOp      = 1
	reportOpAndSA = 2
	reportEither  = 3
)

// noTimeouts is a command timeouts descriptor without time-outs.
var noTimeouts = [timeoutsLen]byte{1: timeoutsLen - 2}

// reportOpcodes executes REPORT SUPPORTED OPERATION CODES (SPC-4, section 6.35).
func reportOpcodes(u *Unit, c *Command) bool {
	cdb := c.CDB
	timeouts := cdb[2]&rctd != 0
	op, sa := cdb[3], int(binary.BigEndian.Uint16(cdb[4:]))
	allocation := binary.BigEndian.Uint32(cdb[6:])
	b := c.buf[:0]
	option := cdb[2] & 0x07
	if option == reportAll {
		b = append(b, 0, 0, 0, 0)
		for _, row := range rowsFor(u) {
			d := [descLen]byte{0: row.op, 7: byte(row.cdbLen())}
			if row.hasSA() {
				d[3], d[5] = byte(row.sa), servactv
			}
			if timeouts {
				d[5] |= ctdpAll
			}
			b = append(b, d[:]...)
			if timeouts {
				b = append(b, noTimeouts[:]...)
			}
		}
		binary.BigEndian.PutUint32(b, uint32(len(b)-4))
		return c.report(b, allocation)
	}
	rows := byOpcode[op]
	hasSA := len(rows) > 0 && rows[0].hasSA()
	switch {
	case option > reportEither:
		return c.failCDB(2, 2)
	case option == reportOp && hasSA, option == reportOpAndSA && len(rows) > 0 && !hasSA:
		return c.failCDB(2, 2)
	}
	var found *command
	for _, row := range rows {
		if (row.sa == sa || !row.hasSA() && (option == reportOp || sa == 0)) && u.supports(row) {
			found = row
		}
	}
	if found == nil {
		return c.report(append(b, 0, supportNo, 0, 0), allocation)
	}
	b = append(b, 0, supportYes, 0, byte(found.cdbLen()), found.op)
	if timeouts {
		b[1] |= ctdpOne
	}
	b = append(b, found.usage...)
	b[5] |= found.protectMask(u)
	if found.hasSA() {
		b[5] = b[5]&^saMask | byte(found.sa)
	}
	if timeouts {
		b = append(b, noTimeouts[:]...)
	}
	return c.report(b, allocation)
}

// reportTMFs executes REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS (SPC-4, section 6.36): ABORT
// TASK, ABORT TASK SET, CLEAR TASK SET, LOGICAL UNIT RESET and target reset, which stands for
// iSCSI's two; with iSCSIProtocolLevel 2 also QUERY TASK, QUERY TASK SET, I_T NEXUS RESET and
// QUERY ASYNCHRONOUS EVENT.
func reportTMFs(_ *Unit, c *Command) bool {
	const ats, atss, ctss, lurs, qts, trs, repd = 0x80, 0x40, 0x10, 0x08, 0x04, 0x02, 0x80
	const qaes, qtss, itnrs = 0x04, 0x02, 0x01
	allocation := binary.BigEndian.Uint32(c.CDB[6:])
	if allocation < 4 {
		return c.failCDB(6, noField)
	}
	n := 4
	if c.CDB[2]&repd != 0 {
		n = 16
	}
	b := c.zeroed(n)
	b[0] = ats | atss | ctss | lurs | trs
	if c.nexus.level >= 2 {
		b[0], b[1] = b[0]|qts, qaes|qtss|itnrs
	}
	b[3] = byte(n - 4)
	return c.report(b, allocation)
}
