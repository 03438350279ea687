// Package vectors has bytes that a peer may send, and what the RFCs say must follow. The tests of package rdma and
// the command `iser-target selftest` send them.
package vectors

import (
	"strings"

	"github.com/iser-target/iser-target/rdma/wire"
)

// A Refusal is a sequence of FPDUs that ends a stream.
type Refusal struct {
	ID        string      // ids of docs/requirements, and the fault in words
	ULPDUs    []string    // in hexadecimal digits, each for an FPDU of its own
	Reason    wire.Reason // that the sender learns by a Terminate
	Terminate string      // the Terminate message, in hexadecimal digits
}

// Refusals contains the errors that a peer can cause on any stream, and the Terminate header that it gets (RFC 5040, section
// 4.8 and Figure 10; RFC 5041, section 7; RFC 5044, section 8). The stream has received nothing on its queues, so that each expects
// MSN 1. It has announced no memory.
var Refusals = []Refusal{
	// MPA
	{"MPA-8-5 ULPDU shorter than a tagged header", []string{"c140 00000100 00000000000010"}, wire.ReasonMarker,
		"20030000"},
	{"DDP-4.4-1 ULPDU shorter than an untagged header", []string{"4143 00000000 00000000 00000001 000000"},
		wire.ReasonMarker, "20030000"},
	{"DDP-4.4-1 ULPDU of 1 byte", []string{"41"}, wire.ReasonMarker, "20030000"},
	{"DDP-4.4-1 empty ULPDU", []string{""}, wire.ReasonMarker, "20030000"},
	// DDP, tagged
	{"DDP-7.2-3 DDP-4.2-6 DDP-7.1-10 RDMAP-3.2-7 RDMAP-5.1-3 invalid STag",
		[]string{"c140 deadbeef 0000000000001000 0102"}, wire.ReasonInvalidSTag,
		"1100c000 0010 c140 deadbeef 0000000000001000"},
	{"DDP-7.2-7 DDP-4.1-11 DDP-6.2.2-3 MPA-C.1-1 DV 0, tagged", []string{"c040 00000100 0000000000001000 01"},
		wire.ReasonTaggedVersion,
		"1104c000 000f c040 00000100 0000000000001000"},
	{"DDP-7.2-7 DV 3, tagged", []string{"c340 00000100 0000000000001000"}, wire.ReasonTaggedVersion,
		"1104c000 000e c340 00000100 0000000000001000"},
	// DDP, untagged
	{"DDP-7.2-8 DDP-7.1-1 DDP-4.3-6 queue 3", []string{"4143 00000000 00000003 00000001 00000000"}, wire.ReasonQN,
		"1201c000 0012 4143 00000000 00000003 00000001 00000000"},
	{"DDP-7.1-1 queue 2^32-1", []string{"4143 00000000 ffffffff 00000001 00000000 01"}, wire.ReasonQN,
		"1201c000 0013 4143 00000000 ffffffff 00000001 00000000"},
	{"DDP-7.2-10 MSN 0", []string{"4143 00000000 00000000 00000000 00000000 01"}, wire.ReasonMSN,
		"1203c000 0013 4143 00000000 00000000 00000000 00000000"},
	{"DDP-7.1-9 SEC-5042.6.4.3-3 MSN ahead", []string{"4143 00000000 00000000 00000032 00000000 01"}, wire.ReasonMSN,
		"1203c000 0013 4143 00000000 00000000 00000032 00000000"},
	{"DDP-7.2-11 DDP-5.3-3 first segment with MO 4", []string{"4143 00000000 00000000 00000001 00000004 0102"}, wire.ReasonMO,
		"1204c000 0014 4143 00000000 00000000 00000001 00000004"},
	{"DDP-7.1-7 MO beyond the buffer", []string{"4143 00000000 00000000 00000001 00000041 01"}, wire.ReasonMO,
		"1204c000 0013 4143 00000000 00000000 00000001 00000041"},
	{"DDP-7.1-8 MO near 2^32",
		[]string{"0143 00000000 00000000 00000001 00000000 0102", "4143 00000000 00000000 00000001 ffffffff 0102"},
		wire.ReasonMO,
		"1204c000 0014 4143 00000000 00000000 00000001 ffffffff"},
	{"DDP-7.2-13 DV 0, untagged", []string{"4043 00000000 00000000 00000001 00000000"}, wire.ReasonUntaggedVersion,
		"1206c000 0012 4043 00000000 00000000 00000001 00000000"},
	{"DDP-7.2-13 DV 2, untagged", []string{"4243 00000000 00000000 00000001 00000000"}, wire.ReasonUntaggedVersion,
		"1206c000 0012 4243 00000000 00000000 00000001 00000000"},
	// RDMAP, operation
	{"RDMAP-4.8-24 RDMAP-7.2-3 RDMAP-4.1-7 RV 0", []string{"4103 00000000 00000000 00000001 00000000"},
		wire.ReasonRDMAPVersion,
		"0205c000 0012 4103 00000000 00000000 00000001 00000000"},
	{"RDMAP-4.8-24 RV 2", []string{"c180 00000100 0000000000001000 01"}, wire.ReasonRDMAPVersion,
		"0205c000 000f c180 00000100 0000000000001000"},
	{"RDMAP-4.8-24 RV 3", []string{"41c3 00000000 00000000 00000001 00000000"}, wire.ReasonRDMAPVersion,
		"0205c000 0012 41c3 00000000 00000000 00000001 00000000"},
	{"RDMAP-4.8-25 RDMAP-7.2-2 RDMAP-4.1-9 RDMAP-7.1-3 opcode 8",
		[]string{"4148 00000000 00000000 00000001 00000000"}, wire.ReasonOpcode,
		"0206c000 0012 4148 00000000 00000000 00000001 00000000"},
	{"RDMAP-4.1-9 opcode 15, tagged", []string{"c14f 00000100 0000000000001000"}, wire.ReasonOpcode,
		"0206c000 000e c14f 00000100 0000000000001000"},
	{"RDMAP-4.1-4 RDMAP-5.3-1 Send with T", []string{"c143 00000100 0000000000001000"}, wire.ReasonOpcode,
		"0206c000 000e c143 00000100 0000000000001000"},
	{"RDMAP-4.1-4 RDMAP-5.1-1 Write without T", []string{"4140 00000000 00000000 00000001 00000000"}, wire.ReasonOpcode,
		"0206c000 0012 4140 00000000 00000000 00000001 00000000"},
	{"RDMAP-4.1-6 RDMAP-5.3-8 Send on queue 1", []string{"4143 00000000 00000001 00000001 00000000"}, wire.ReasonOpcode,
		"0206c000 0012 4143 00000000 00000001 00000001 00000000"},
	{"RDMAP-5.2.1-6 RDMAP-4.8-7 Read Request on queue 0",
		[]string{ReadRequestHex("00000000", "00000001", "00000010", "00000100", "0000000000001000")}, wire.ReasonOpcode,
		"0206c000 002e 4141 00000000 00000000 00000001 00000000"},
	{"RDMAP-5.2.2-5 Read Response without a Request", []string{"c142 00000100 0000000000001000 01"},
		wire.ReasonOpcode,
		"0206c000 000f c142 00000100 0000000000001000"},
	{"RDMAP-4.2-2 short Read Request",
		[]string{"4141 00000000 00000001 00000001 00000000" + strings.Repeat("00", 22)}, wire.ReasonOpcode,
		"0206c000 0028 4141 00000000 00000001 00000001 00000000"},
	{"RDMAP-4.2-2 long Read Request",
		[]string{"4141 00000000 00000001 00000001 00000000" + strings.Repeat("00", 32)}, wire.ReasonTooLong,
		"1205c000 0032 4141 00000000 00000001 00000001 00000000"},
	{"RDMAP-7.2-6 Read Request with MSN 2",
		[]string{ReadRequestHex("00000001", "00000002", "00000010", "00000100", "0000000000001000")}, wire.ReasonMSN,
		"1203c000 002e 4141 00000000 00000001 00000002 00000000"},
	{"RDMAP-7.2-6 Read Request with MO 1",
		[]string{"4141 00000000 00000001 00000001 00000001" + strings.Repeat("00", 28)}, wire.ReasonMO,
		"1204c000 002e 4141 00000000 00000001 00000001 00000001"},
	// RDMAP, protection: Read Requests, whose header comes back, too
	{"RDMAP-4.8-17 RDMAP-7.2-7 RDMAP-7.1-4 RDMAP-5.2.1-13 RDMAP-5.2.1-5 RDMAP-4.8-14 invalid SrcSTag",
		[]string{ReadRequestHex("00000001", "00000001", "00000010", "deadbeef", "0000000000001000")},
		wire.ReasonReadInvalidSTag,
		"0100e000 002e" + ReadRequestHex("00000001", "00000001", "00000010", "deadbeef", "0000000000001000")},
	// RDMAP, protection: Sends with Invalidate
	{"RDMAP-4.8-22 RDMAP-7.2-4 RDMAP-5.3-14 invalidation of an unknown STag",
		[]string{"4144 deadbeef 00000000 00000001 00000000 0102"}, wire.ReasonNotInvalidated,
		"0109c000 0014 4144 deadbeef 00000000 00000001 00000000"},
}

// RegionRefusals contains errors about memory. The stream has these STags, each of 16 bytes from TO 0x1000: 0x100 for reading and writing,
// 0x200 for reading, 0x300 for writing. 0x400 belongs to another stream of the same domain. 0x500 was deregistered.
var RegionRefusals = []Refusal{
	{"DDP-8.3-2 RDMAP-3.2-12 RDMAP-8.1.1-4 DDP-8.3.1-4 revoked STag",
		[]string{"c140 00000500 0000000000001000 0102"}, wire.ReasonInvalidSTag,
		"1100c000 0010 c140 00000500 0000000000001000"},
	{"DDP-7.1-11 DDP-8.3.1-5 RDMAP-8.1.1-5 RDMAP-3.2-11 Write to a read-only STag",
		[]string{"c140 00000200 0000000000001000 0102"}, wire.ReasonInvalidSTag,
		"1100c000 0010 c140 00000200 0000000000001000"},
	{"DDP-7.2-4 DDP-7.1-12 one byte below", []string{"8140 00000100 0000000000000fff 0102"}, wire.ReasonBounds,
		"1101c000 0010 8140 00000100 0000000000000fff"},
	{"DDP-7.2-4 DDP-7.1-13 DDP-7.1-15 DDP-8.1-1 DDP-8.3.1-3 RDMAP-8.1.1-3 SEC-5042.6.2.1-1 one byte beyond",
		[]string{"c140 00000100 000000000000100f 0102"}, wire.ReasonBounds,
		"1101c000 0010 c140 00000100 000000000000100f"},
	{"DDP-7.1-12 TO after the end", []string{"c140 00000100 0000000000001011 01"}, wire.ReasonBounds,
		"1101c000 000f c140 00000100 0000000000001011"},
	{"DDP-7.2-5 DDP-8.2-2 DDP-8.2-3 DDP-8.2-4 DDP-8.3.1-2 DDP-8.3-3 RDMAP-8.1.1-2 SEC-5042.3-2 SEC-5042.6.1.1-1 " +
		"SEC-5042.6.1.1-3 SEC-5042.A-1 STag of another stream", []string{"c140 00000400 0000000000001000 " +
		"01"}, wire.ReasonStream,
		"1102c000 000f c140 00000400 0000000000001000"},
	{"DDP-7.2-6 DDP-7.1-14 TO wrap", []string{"c140 00000100 fffffffffffffffc 0102030405060708"}, wire.ReasonWrap,
		"1103c000 0016 c140 00000100 fffffffffffffffc"},
	{"RDMAP-4.8-18 RDMAP-7.2-10 RDMAP-3.2-10 one byte too many",
		[]string{ReadRequestHex("00000001", "00000001", "00000011", "00000100", "0000000000001000")},
		wire.ReasonReadBounds,
		"0101e000 002e" + ReadRequestHex("00000001", "00000001", "00000011", "00000100", "0000000000001000")},
	{"RDMAP-7.2-9 SrcTO below",
		[]string{ReadRequestHex("00000001", "00000001", "00000001", "00000100", "0000000000000fff")},
		wire.ReasonReadBounds,
		"0101e000 002e" + ReadRequestHex("00000001", "00000001", "00000001", "00000100", "0000000000000fff")},
	{"RDMAP-4.8-19 DDP-8.3.1-5 SEC-5042.6.3.5-1 write-only STag",
		[]string{ReadRequestHex("00000001", "00000001", "00000001", "00000300", "0000000000001000")},
		wire.ReasonReadAccess,
		"0102e000 002e" + ReadRequestHex("00000001", "00000001", "00000001", "00000300", "0000000000001000")},
	{"RDMAP-4.8-20 RDMAP-7.2-8 RDMAP-8.1.1-2 STag of another stream",
		[]string{ReadRequestHex("00000001", "00000001", "00000001", "00000400", "0000000000001000")},
		wire.ReasonReadStream,
		"0103e000 002e" + ReadRequestHex("00000001", "00000001", "00000001", "00000400", "0000000000001000")},
	{"RDMAP-4.8-21 RDMAP-7.2-11 SrcTO wrap",
		[]string{ReadRequestHex("00000001", "00000001", "00000008", "00000100", "fffffffffffffffc")},
		wire.ReasonReadWrap,
		"0104e000 002e" + ReadRequestHex("00000001", "00000001", "00000008", "00000100", "fffffffffffffffc")},
	{"RDMAP-4.8-22 RDMAP-7.2-5 RDMAP-5.3-13 RDMAP-8.1.1-7 SEC-5042.6.4.5-1 invalidation of another stream's STag",
		[]string{"4146 00000400 00000000 00000001 00000000"}, wire.ReasonNotInvalidated,
		"0109c000 0012 4146 00000400 00000000 00000001 00000000"},
}

// LengthRefusals contains Sends that are longer than the 64 bytes that the stream takes.
var LengthRefusals = []Refusal{
	{"DDP-7.2-12 DDP-7.1-8 RDMAP-5.3-4 RDMAP-3.2-4 RDMAP-5.3-7 Send of 65 bytes",
		[]string{"4143 00000000 00000000 00000001 00000000" + strings.Repeat("ab", 65)}, wire.ReasonTooLong,
		"1205c000 0053 4143 00000000 00000000 00000001 00000000"},
	{"DDP-7.2-12 Send of 64 + 1 bytes",
		[]string{"0143 00000000 00000000 00000001 00000000" + strings.Repeat("ab", 64),
			"4143 00000000 00000000 00000001 00000040 ab"}, wire.ReasonTooLong,
		"1205c000 0013 4143 00000000 00000000 00000001 00000040"},
}

// ReadRequestHex returns the ULPDU of a Read Request to SinkSTag 0x11111111, SinkTO
// 0x2222222233333333.
func ReadRequestHex(qn, msn, size, stag, to string) string {
	return "4141 00000000" + qn + msn + "00000000 11111111 2222222233333333" + size + stag + to
}
