package wire

import "fmt"

// An Opcode is an RDMAP operation (RFC 5040, section 4.1, Figure 4).
type Opcode byte

// Opcodes of RFC 5040. SE stands for "with Solicited Event".
const (
	OpWrite Opcode = iota
	OpReadRequest
	OpReadResponse
	OpSend
	OpSendInvalidate
	OpSendSE
	OpSendSEInvalidate
	OpTerminate
)

// opcodes is Figure 4: the DDP model and the queue of each operation.
var opcodes = [16]struct {
	name       string
	tagged     bool
	qn         uint32
	invalidate bool
}{
	OpWrite:            {name: "RDMA Write", tagged: true},
	OpReadRequest:      {name: "RDMA Read Request", qn: QNReadRequest},
	OpReadResponse:     {name: "RDMA Read Response", tagged: true},
	OpSend:             {name: "Send"},
	OpSendInvalidate:   {name: "Send with Invalidate", invalidate: true},
	OpSendSE:           {name: "Send with Solicited Event"},
	OpSendSEInvalidate: {name: "Send with Solicited Event and Invalidate", invalidate: true},
	OpTerminate:        {name: "Terminate", qn: QNTerminate},
}

// String returns the name that RFC 5040 gives to o.
func (o Opcode) String() string {
	if o.Valid() {
		return opcodes[o].name
	}
	return fmt.Sprintf("reserved opcode %d", byte(o))
}

// Valid reports whether RFC 5040 defines o.
func (o Opcode) Valid() bool { return o < 16 && opcodes[o].name != "" }

// Tagged reports whether o uses the tagged buffer model.
func (o Opcode) Tagged() bool { return opcodes[o].tagged }

// QN returns the queue of an untagged operation.
func (o Opcode) QN() uint32 { return opcodes[o].qn }

// Invalidates reports whether the header carries an STag to invalidate.
func (o Opcode) Invalidates() bool { return opcodes[o].invalidate }

// Solicited reports whether o is one of the two Sends with Solicited Event.
func (o Opcode) Solicited() bool { return o == OpSendSE || o == OpSendSEInvalidate }

const rdmapVersion = 0x40 // RV = 01b

// Control returns the RDMAP control byte of o (RFC 5040, section 4.1).
func (o Opcode) Control() byte { return rdmapVersion | byte(o) }

// ParseControl returns the opcode of an RDMAP control byte. ok is false if the version
// is not 1. ParseControl ignores the reserved bits.
func ParseControl(b byte) (o Opcode, ok bool) { return Opcode(b & 0x0f), b&0xc0 == rdmapVersion }

// ReadRequestLen is the size of the RDMA Read Request header in bytes.
const ReadRequestLen = 28

// ReadRequest is the RDMA Read Request header (RFC 5040, section 4.4).
//
//	0          4        12         16        20       28
//	+----------+--------+----------+---------+--------+
//	| SinkSTag | SinkTO | RDMARDSZ | SrcSTag | SrcTO  |
//	+----------+--------+----------+---------+--------+
type ReadRequest struct {
	SinkSTag STag
	SinkTO   uint64
	Size     uint32 // bytes
	SrcSTag  STag
	SrcTO    uint64
}

// Put encodes r into b[:ReadRequestLen].
func (r ReadRequest) Put(b []byte) {
	be.PutUint32(b[0:], uint32(r.SinkSTag))
	be.PutUint64(b[4:], r.SinkTO)
	be.PutUint32(b[12:], r.Size)
	be.PutUint32(b[16:], uint32(r.SrcSTag))
	be.PutUint64(b[20:], r.SrcTO)
}

// ParseReadRequest decodes b, the whole message.
func ParseReadRequest(b []byte) (r ReadRequest, err error) {
	if len(b) != ReadRequestLen {
		return r, fmt.Errorf("RDMA Read Request header of %d bytes", len(b))
	}
	return ReadRequest{
		SinkSTag: STag(be.Uint32(b[0:])),
		SinkTO:   be.Uint64(b[4:]),
		Size:     be.Uint32(b[12:]),
		SrcSTag:  STag(be.Uint32(b[16:])),
		SrcTO:    be.Uint64(b[20:]),
	}, nil
}
