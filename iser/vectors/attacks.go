package vectors

import (
	"encoding/binary"

	"github.com/iser-target/iser-target/rdma/wire"
)

// An Attack is a ULPDU by which an initiator reaches for memory of the target, while the target waits for the answer to an RDMA Read
// Request of 4096 bytes. It ends the stream.
type Attack struct {
	ID     string // ids of docs/requirements, and the fault in words
	Reason wire.Reason
	// ULPDU returns the ULPDU for the Read Request r. msn is that of the initiator's next Send, whose message would be nop.
	ULPDU func(r wire.ReadRequest, msn uint32, nop []byte) []byte
}

// sinkLen is the length of the Read Request, in bytes.
const sinkLen = 4096

// Tagged returns the ULPDU of the last segment of a tagged message.
func Tagged(op wire.Opcode, stag wire.STag, to uint64, data []byte) []byte {
	b := make([]byte, wire.TaggedLen, wire.TaggedLen+len(data))
	wire.Tagged{Last: true, ULP: op.Control(), STag: stag, TO: to}.Put(b)
	return append(b, data...)
}

// Untagged returns the ULPDU of an untagged message.
func Untagged(op wire.Opcode, msn uint32, data []byte) []byte {
	b := make([]byte, wire.UntaggedLen, wire.UntaggedLen+len(data))
	wire.Untagged{Last: true, ULP: op.Control(), QN: op.QN(), MSN: msn}.Put(b)
	return append(b, data...)
}

// Attacks contains what an initiator may not do: it can reach nothing of the target but the sink of the Read
// that it has been asked, by the Response to that.
var Attacks = []Attack{
	{"ISER-8.3.2-3 RDMA Write to the sink of a Read", wire.ReasonInvalidSTag, func(r wire.ReadRequest, _ uint32, _ []byte) []byte {
		return Tagged(wire.OpWrite, r.SinkSTag, r.SinkTO, make([]byte, sinkLen))
	}},
	{"ISER-1.5.3-2 RDMA Write to any STag", wire.ReasonInvalidSTag, func(r wire.ReadRequest, _ uint32, _ []byte) []byte {
		return Tagged(wire.OpWrite, r.SinkSTag^0x1234, 0, make([]byte, sinkLen))
	}},
	{"ISER-1.5.4-2 ISER-8.3.2-3 SEC-5042.6.3.1-1 RDMA Read of the sink of a Read", wire.ReasonReadAccess,
		func(r wire.ReadRequest, _ uint32, _ []byte) []byte {
			b := make([]byte, wire.ReadRequestLen)
			wire.ReadRequest{SinkSTag: 1, Size: sinkLen, SrcSTag: r.SinkSTag, SrcTO: r.SinkTO}.Put(b)
			return Untagged(wire.OpReadRequest, 1, b)
		}},
	{"ISER-8.3.1-3 Response to another STag", wire.ReasonInvalidSTag, func(r wire.ReadRequest, _ uint32, _ []byte) []byte {
		return Tagged(wire.OpReadResponse, r.SinkSTag+1, r.SinkTO, make([]byte, sinkLen))
	}},
	{"SEC-5042.6.2.1-2 SEC-5042.6.3.4-1 Response beyond the sink", wire.ReasonBounds, func(r wire.ReadRequest, _ uint32, _ []byte) []byte {
		return Tagged(wire.OpReadResponse, r.SinkSTag, r.SinkTO, make([]byte, sinkLen+1))
	}},
	{"SEC-5042.6.4.5-2 invalidation of the sink of a Read", wire.ReasonNotInvalidated, func(r wire.ReadRequest, msn uint32, nop []byte) []byte {
		u := Untagged(wire.OpSendInvalidate, msn, nop)
		binary.BigEndian.PutUint32(u[2:], uint32(r.SinkSTag))
		return u
	}},
}
