// Package vectors has messages that break the format of iSER (RFC 7145, section 9). The tests of the target and the command
// `iser-target selftest` send them.
package vectors

import (
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/iser"
)

// NOP returns the message of a NOP-Out that asks for an answer, with that many bytes of data without a pad. It calls change with its header, and
// appends bytes behind the data.
type NOP func(change func(pdu.BHS), data, behind int) []byte

// A FormatError is a message that ends the stream with a Terminate of wire.ReasonOperation (RFC 7145, section 10.1.3.3).
type FormatError struct {
	ID      string // ids of docs/requirements, and the fault in words
	Message func(nop NOP) []byte
}

// hello returns an iSER Hello.
func hello() []byte {
	b := make([]byte, iser.HeaderLen)
	iser.Hello{MaxVer: 10, MinVer: 10, IRD: 1}.Put(b)
	return b
}

func asIs(pdu.BHS) {}

// FormatErrors contains messages in the full feature phase.
var FormatErrors = []FormatError{
	{"ISER-10.1.3.3-1 ISER-10.1.3.3-2 ISER-9.1-3 opcode 0", func(NOP) []byte { return make([]byte, 76) }},
	{"ISER-9.1-3 opcode 4", func(NOP) []byte { return append([]byte{0x40}, make([]byte, 75)...) }},
	{"a HelloReply", func(NOP) []byte { return append([]byte{0x30, 0xaa}, make([]byte, 26)...) }},
	{"ISER-10.1.3.3-1 27 bytes", func(NOP) []byte { return hello()[:27] }},
	{"ISER-9.3-1 ISER-10.1.3.3-1 Hello of 32 bytes", func(NOP) []byte { return append(hello(), 0, 0, 0, 0) }},
	{"no byte", func(NOP) []byte { return nil }},
	{"header without PDU", func(NOP) []byte { return append([]byte{0x10}, make([]byte, 27)...) }},
	{"75 bytes", func(nop NOP) []byte { return nop(asIs, 0, 0)[:75] }},
	{"ISER-10.1.4.1-1 DataSegmentLength beyond the message",
		func(nop NOP) []byte { return nop(func(h pdu.BHS) { h.SetDataSegmentLength(9) }, 8, 0) }},
	{"ISER-10.1.4.1-1 TotalAHSLength beyond the message",
		func(nop NOP) []byte { return nop(func(h pdu.BHS) { h.SetTotalAHSLength(12) }, 8, 0) }},
	{"a pad where none belongs", func(nop NOP) []byte { return nop(asIs, 8, 1) }},
	{"pad of 4", func(nop NOP) []byte { return nop(asIs, 5, 4) }},
}
