// Package header numbers the requests of the initiators that tests write.
package header

import "github.com/iser-target/iser-target/iscsi/pdu"

// Numbers are what an initiator counts on one connection (RFC 7143, section 4.2.2). The
// zero value is ready.
type Numbers struct {
	ITT       uint32 // tag of the last request
	CmdSN     uint32 // of the next request that is not immediate
	ExpStatSN uint32 // of the next answer
}

// Request returns the header of a request with the next tag. Unless it is immediate, it takes
// the next CmdSN.
func (n *Numbers) Request(op pdu.Opcode, flags byte, immediate bool) pdu.BHS {
	h := make(pdu.BHS, pdu.BHSLen)
	h.Reset(op, flags)
	n.ITT++
	h.SetITT(n.ITT)
	h.SetCmdSN(n.CmdSN)
	h.SetExpStatSN(n.ExpStatSN)
	if immediate {
		h.SetImmediate()
	} else {
		n.CmdSN++
	}
	return h
}
