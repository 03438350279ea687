package lun

import (
	"encoding/binary"
	"fmt"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/protection"
)

const (
	typeDisk   = 0x00
	absentUnit = 0x7f // PERIPHERAL QUALIFIER 011b, type 1fh

	versionSPC4  = 0x06
	hisup        = 0x10
	dataFormat   = 0x02
	cmdque       = 0x02
	multip       = 0x10
	rmb          = 0x80
	tpgs         = 0x30 // implicit and explicit asymmetric access
	tpgsExplicit = 0x20
	threePC      = 0x08
	protect      = 0x01
)

// versionDescriptors are SAM-5, SPC-4, SBC-3 and iSCSI; to the last, the
// session's iSCSIProtocolLevel is added (RFC 7144, section 4.2).
var versionDescriptors = [...]uint16{0x00a0, 0x0460, 0x04c0, versionISCSI}

const versionISCSI = 0x0960

// inquiry executes INQUIRY (SPC-4, section 6.6).
func inquiry(u *Unit, c *Command) bool {
	evpd, page := c.CDB[1]&1 != 0, c.CDB[2]
	allocation := uint32(binary.BigEndian.Uint16(c.CDB[3:]))
	if evpd {
		return vpd(u, c, page, allocation)
	}
	if page != 0 {
		return c.failCDB(2, noField)
	}
	b := c.zeroed(96)
	b[2], b[3], b[4] = versionSPC4, hisup|dataFormat, byte(len(b)-5)
	if u == nil {
		b[0] = absentUnit
		copy(b[8:36], fmt.Sprintf("%-28s", ""))
		return c.report(b, allocation)
	}
	if u.has&removable != 0 {
		b[1] = rmb
	}
	b[5], b[7] = tpgs|threePC, cmdque
	if u.opt.ImplicitAccess {
		b[5] &^= tpgsExplicit
	}
	if u.protection != protection.None {
		b[5] |= protect
	}
	if len(c.nexus.targets(u)) > 1 {
		b[6] = multip
	}
	copy(b[8:], fmt.Sprintf("%-8s%-16s%-4s", u.opt.Vendor, u.opt.Product, u.opt.Revision))
	for i, v := range versionDescriptors {
		if v == versionISCSI {
			v += uint16(c.nexus.level)
		}
		binary.BigEndian.PutUint16(b[58+2*i:], v)
	}
	return c.report(b, allocation)
}

// vpdPages are the vital product data pages, in the order of page 00h. A page appends what
// follows its header of four bytes.
var vpdPages = []struct {
	code   byte
	thin   bool // only of a unit with thin provisioning
	append func(u *Unit, n *Nexus, b []byte) []byte
}{
	{0x00, false, nil},
	{0x80, false, func(u *Unit, _ *Nexus, b []byte) []byte { return append(b, u.serial()...) }},
	{0x83, false, appendDesignators},
	{0x86, false, appendExtended},
	{0x87, false, func(_ *Unit, _ *Nexus, b []byte) []byte {
		return append(b, allPages, allSubpages, 0, 0) // Mode Page Policy: all pages are shared
	}},
	{0x88, false, appendPorts},
	{0x8f, false, appendThirdPartyCopy},
	{0xb0, false, appendBlockLimits},
	{0xb1, false, appendCharacteristics},
	{0xb2, true, appendProvisioning},
}

func vpd(u *Unit, c *Command, page byte, allocation uint32) bool {
	if u == nil {
		return c.fail(condNoLUN)
	}
	for _, p := range vpdPages {
		if p.code != page || p.thin && !u.isThin() {
			continue
		}
		b := append(c.buf[:0], typeDisk, page, 0, 0)
		if page == 0 {
			for _, q := range vpdPages {
				if !q.thin || u.isThin() {
					b = append(b, q.code)
				}
			}
		} else {
			b = p.append(u, c.nexus, b)
		}
		binary.BigEndian.PutUint16(b[2:], uint16(len(b)-4))
		return c.report(b, allocation)
	}
	return c.failCDB(2, noField)
}

// Designators (SPC-4, section 7.8.6.1).
const (
	setBinary, setASCII, setUTF8           = 1, 2, 3
	desT10, desNAA, desRelativePort        = 1, 3, 4
	desPortGroup, desSCSI                  = 5, 8
	assocUnit, assocPort, assocDevice      = 0x00, 0x10, 0x20
	protocolISCSI, piv                byte = 0x50, 0x80
)

// appendDesignators appends the Device Identification page (SPC-4, section 7.8.6).
func appendDesignators(u *Unit, n *Nexus, b []byte) []byte {
	add := func(set, flags byte, id string) {
		b = append(b, set, flags, 0, byte(len(id)))
		b = append(b, id...)
	}
	add(setBinary, assocUnit|desNAA, string(u.naa()))
	add(setASCII, assocUnit|desT10, fmt.Sprintf("%-8s%s", u.opt.Vendor, u.serial()))
	tag := string([]byte{0, 0, byte(n.port.TPGT >> 8), byte(n.port.TPGT)})
	add(protocolISCSI|setBinary, piv|assocPort|desRelativePort, tag)
	add(protocolISCSI|setBinary, piv|assocPort|desPortGroup, tag)
	add(protocolISCSI|setUTF8, piv|assocPort|desSCSI, terminated(n.targetPort(n.port.TPGT)))
	add(protocolISCSI|setUTF8, piv|assocDevice|desSCSI, terminated(n.port.TargetName))
	return b
}

// targetPort returns the name of a target port (RFC 7143, section 4.4.2).
func (n *Nexus) targetPort(relative uint16) string {
	return fmt.Sprintf("%s,t,0x%04x", n.port.TargetName, relative)
}

// appendPorts appends the SCSI Ports page (SPC-4, section 7.8.14): every target port with its name.
func appendPorts(u *Unit, n *Nexus, b []byte) []byte {
	for _, port := range n.targets(u) {
		name := terminated(n.targetPort(port))
		b = append(b, 0, 0, byte(port>>8), byte(port), 0, 0, 0, 0, // no initiator port
			0, 0, 0, byte(4+len(name)),
			protocolISCSI|setUTF8, piv|assocPort|desSCSI, 0, byte(len(name)))
		b = append(b, name...)
	}
	return b
}

// appendExtended appends the Extended INQUIRY Data page (SPC-4, section 7.8.7).
func appendExtended(u *Unit, _ *Nexus, b []byte) []byte {
	p := make([]byte, 64)
	if u.protection != protection.None {
		const grdChk, appChk, refChk = 0x04, 0x02, 0x01
		p[4] = u.protectionTypes()<<3 | grdChk | appChk
		if u.protection == protection.Type1 {
			p[4] |= refChk
		}
	}
	p[5] = 0x07 // HEADSUP, ORDSUP, SIMPSUP
	if u.info.VolatileCache {
		p[6] = 0x01 // V_SUP
	}
	p[13] = maxSenseLen // MAXIMUM SUPPORTED SENSE DATA LENGTH
	return append(b, p[4:]...)
}

// terminated pads a SCSI name string with at least one NUL to a multiple of 4.
func terminated(s string) string { return s + "\x00\x00\x00\x00"[:4-len(s)%4] }

// appendBlockLimits appends the Block Limits page (SBC-3, section 6.6.3).
func appendBlockLimits(u *Unit, _ *Nexus, b []byte) []byte {
	be := binary.BigEndian
	p := make([]byte, 64) // offsets as in the standard
	if u.wsnz() {
		p[4] = 0x01 // WSNZ
	}
	p[5] = byte(u.maxCompareWrite()) // MAXIMUM COMPARE AND WRITE LENGTH
	be.PutUint16(p[6:], uint16(u.info.PhysicalBlockSize>>u.shift))
	be.PutUint32(p[8:], maxTransfer>>u.shift)
	be.PutUint32(p[12:], optimalTransfer>>u.shift)
	if u.isThin() {
		be.PutUint32(p[20:], uint32(uint64(maxUnmap)>>u.shift))
		be.PutUint32(p[24:], maxUnmapDescs)
		be.PutUint32(p[28:], u.info.DiscardGranularity>>u.shift)
		if a := u.info.DiscardAlignment; a != backend.DiscardUnaligned {
			const ugavalid = 1 << 31
			be.PutUint32(p[32:], ugavalid|uint32(a>>u.shift))
		}
	}
	be.PutUint64(p[36:], maxWriteSame>>u.shift)
	be.PutUint32(p[44:], u.info.AtomicWrite>>u.shift) // no boundary
	be.PutUint32(p[48:], u.info.AtomicUnit>>u.shift)  // ATOMIC ALIGNMENT; 0: none
	be.PutUint32(p[52:], u.info.AtomicUnit>>u.shift)  // ATOMIC TRANSFER LENGTH GRANULARITY; 0: 1
	return append(b, p[4:]...)
}

// appendCharacteristics appends the Block Device Characteristics page (SBC-3, section 6.6.2):
// nothing rotates, and after a block erase or a cryptographic erase, reads return zeros.
func appendCharacteristics(u *Unit, _ *Nexus, b []byte) []byte {
	const wabereq, wacereq = 0x40, 0x10 // 01b
	p := make([]byte, 64)
	p[5] = 1
	if u.has&sanitizes != 0 {
		p[7] = wacereq
		if u.isThin() {
			p[7] |= wabereq
		}
	}
	return append(b, p[4:]...)
}

// appendProvisioning appends the Logical Block Provisioning page (SBC-3, section 6.6.4): UNMAP
// and both WRITE SAME with UNMAP, after which reads return zeros; thin.
func appendProvisioning(u *Unit, _ *Nexus, b []byte) []byte {
	const lbpu, lbpws, lbpws10, lbprz, thinType = 0x80, 0x40, 0x20, 0x04, 2
	return append(b, byte(u.space.exponent), lbpu|lbpws|lbpws10|lbprz, thinType, 0)
}

// reportLUNs executes REPORT LUNS (SPC-4, section 6.33).
func reportLUNs(_ *Unit, c *Command) bool {
	const header = 8
	b := append(c.buf[:0], 0, 0, 0, 0, 0, 0, 0, 0)
	switch c.CDB[2] {
	case 0x00, 0x02:
		// The initiator learns of them now. A later change either is in the list
		// below, or raises the attention again.
		for _, l := range c.nexus.list() {
			l.due.And(^dueBit(condLUNsChanged))
		}
		for _, l := range c.nexus.list() {
			f := EncodeLUN(l.id)
			b = append(b, f[:]...)
		}
	case 0x01: // well known logical units only: the target has none
	default:
		return c.failCDB(2, noField)
	}
	binary.BigEndian.PutUint32(b, uint32(len(b)-header))
	return c.report(b, binary.BigEndian.Uint32(c.CDB[6:]))
}
