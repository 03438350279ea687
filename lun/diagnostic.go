package lun

import "encoding/binary"

// Values of SELF-TEST CODE in SEND DIAGNOSTIC (SPC-4, section 6.42). The target has no self-tests in the background, whose
// results would need a log page.
const (
	selfTestDefault  = 0
	selfTestShort    = 5
	selfTestExtended = 6
)

// Bits of SEND DIAGNOSTIC, byte 1.
const (
	diagnosticPF       = 0x10
	diagnosticSelfTest = 0x04
	selfTestShift      = 5
)

// beginSendDiagnostic checks the CDB of SEND DIAGNOSTIC (SPC-4, section 6.42). The target has no diagnostic pages. No
// self-test affects other initiators, so DEVOFFL and UNITOFFL mean nothing.
func beginSendDiagnostic(_ *Unit, c *Command) bool {
	b := c.CDB[1]
	switch code := b >> selfTestShift; {
	case code != selfTestDefault && code != selfTestShort && code != selfTestExtended,
		code != selfTestDefault && b&diagnosticSelfTest != 0:
		return c.failCDB(1, 7)
	case b&diagnosticPF != 0 && (code != selfTestDefault || b&diagnosticSelfTest != 0):
		return c.failCDB(1, 4) // PF is about pages
	case binary.BigEndian.Uint16(c.CDB[3:]) != 0:
		return c.failCDB(3, noField)
	}
	return true
}

// endSendDiagnostic executes SEND DIAGNOSTIC. The default self-test and the short one read the first block, the last one and
// 62 others. The extended one reads all blocks.
func endSendDiagnostic(u *Unit, c *Command) {
	code := c.CDB[1] >> selfTestShift
	if code == selfTestDefault && c.CDB[1]&diagnosticSelfTest == 0 {
		return // no test, and no page
	}
	sp := scratch.Get().(*[]byte)
	defer scratch.Put(sp)
	size, p := u.Size(), *sp
	if code == selfTestExtended {
		for pos := int64(0); pos < size; pos += int64(len(p)) {
			if !u.selfTest(c, p[:min(int64(len(p)), size-pos)], pos) {
				return
			}
		}
		return
	}
	const samples = 64
	block := int64(u.info.BlockSize)
	last := size/block - 1
	for i := range min(int64(samples), last+1) {
		lba := int64(0)
		if last > 0 {
			lba = int64(float64(last) * float64(i) / float64(min(samples-1, last)))
		}
		if !u.selfTest(c, p[:block], min(lba, last)*block) {
			return
		}
	}
}

// selfTest reads p at pos, and fails c if the medium cannot be read there. A self-test ends early, and well, where the
// unit has become smaller.
func (u *Unit) selfTest(c *Command, p []byte, pos int64) bool {
	if c.aborted() {
		return c.fail(condAborted)
	}
	n := min(int64(len(p)), u.Size()-pos)
	if n <= 0 {
		return true
	}
	err := u.readHeavily(c, p[:n], pos)
	if err == nil || u.Size() < pos+n {
		return true
	}
	if storeFailed(err) {
		c.lba = uint64(pos) >> u.shift
		c.reportStoreError(err)
		return c.fail(condSelfTestFailed)
	}
	return c.readDone(err)
}
