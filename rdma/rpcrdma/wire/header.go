package wire

import (
	"errors"
	"fmt"
)

// Version is the version of the protocol.
const Version = 1

// A Proc is the procedure of a header, rdma_proc (RFC 8166, section 4.2.4).
type Proc uint32

// Procedures. Nobody sends MsgP and Done any longer (section 4.6), so Append refuses both.
const (
	Msg   Proc = iota // the payload follows the header
	NoMsg             // the payload is in a chunk
	MsgP
	Done
	Error
)

var procNames = [...]string{"RDMA_MSG", "RDMA_NOMSG", "RDMA_MSGP", "RDMA_DONE", "RDMA_ERROR"}

// String returns the name that RFC 8166 gives to p.
func (p Proc) String() string {
	if int(p) < len(procNames) {
		return procNames[p]
	}
	return fmt.Sprintf("rdma_proc %d", uint32(p))
}

// A Code is the reason of an RDMA_ERROR, rdma_err (RFC 8166, section 4.5).
type Code uint32

// Codes of RDMA_ERROR.
const (
	CodeVersion Code = 1 // ERR_VERS
	CodeChunk   Code = 2 // ERR_CHUNK
)

// String returns the name that RFC 8166 gives to c.
func (c Code) String() string {
	switch c {
	case CodeVersion:
		return "ERR_VERS"
	case CodeChunk:
		return "ERR_CHUNK"
	}
	return fmt.Sprintf("rdma_err %d", uint32(c))
}

// Sizes of encoded headers in bytes, and limits.
const (
	fixedLen   = 16 // the four words that all versions share
	segmentLen = 16

	// MinLen is the size of a header without chunks. A receiver drops what is shorter, except
	// RDMA_ERROR (RFC 8166, section 4.5).
	MinLen = 28
	// ErrorLen is the size of an RDMA_ERROR with ERR_CHUNK.
	ErrorLen = 20
	// MaxSegments limits the segments in the lists of a header that Parse accepts.
	MaxSegments = 1024
)

// A Segment names memory of the requester (RFC 8166, section 3.4.3).
type Segment struct {
	Handle uint32 // the STag
	Length uint32 // bytes
	Offset uint64 // tagged offset of the first byte
}

// A ReadSegment is a Segment of a read chunk. Position is the offset in the unreduced payload stream
// where the data belongs. All segments of one chunk have the same.
type ReadSegment struct {
	Position uint32
	Segment
}

// A Chunk is a write chunk or a reply chunk. It may be empty (RFC 8166, section 3.4.6).
type Chunk []Segment

// Len returns the sum of the lengths of all segments in bytes.
func (c Chunk) Len() (n uint64) {
	for i := range c {
		n += uint64(c[i].Length)
	}
	return n
}

// A Header is the transport header of a message (RFC 8166, section 4.1.2).
//
//	0         4         8         12
//	+---------+---------+---------+---------+-------------+-------------+-------------+
//	|   XID   | version | credits |  proc   | read list   | write list  | reply chunk |
//	+---------+---------+---------+---------+-------------+-------------+-------------+
//
// In the words of section 4.7, H is a handle, L a length, OO an offset and P a position:
//
//	read list:   1 PHLOO 1 PHLOO 0
//	write list:  1 3 HLOO HLOO HLOO 1 2 HLOO HLOO 0
//	reply chunk: 1 2 HLOO HLOO, or 0
type Header struct {
	XID     uint32
	Version uint32
	Credits uint32 // asked for in a call, granted in a reply
	Proc    Proc

	// The lists of Msg and NoMsg. A parsed header owns their memory.
	Reads    []ReadSegment
	Writes   []Chunk
	Reply    Chunk
	HasReply bool // a reply chunk is present

	// Of Error: the code, and the versions that the responder supports.
	Code      Code
	Low, High uint32

	segments []Segment // behind Writes and Reply
	counts   []int     // segments per chunk
}

// Why a header is refused. A responder answers ErrVersion by ERR_VERS, and drops what is too short
// and what is a bad RDMA_ERROR. It answers every other error by ERR_CHUNK (RFC 8166, section 4.5).
var (
	ErrTooShort  = errors.New("the message is shorter than 28 bytes")
	ErrVersion   = errors.New("the version of the header is not 1")
	ErrProc      = errors.New("the procedure is not RDMA_MSG or RDMA_NOMSG")
	ErrBadError  = errors.New("the RDMA_ERROR cannot be decoded")
	ErrFlag      = errors.New("a list has a flag that is neither 0 nor 1")
	ErrTruncated = errors.New("the message ends in its chunk lists")
	ErrSegments  = fmt.Errorf("the chunk lists have more than %d segments", MaxSegments)
	ErrPosition  = errors.New("the position of a read chunk is not a multiple of 4")
	ErrOrder     = errors.New("the positions of the read chunks do not ascend")
	ErrNoPayload = errors.New("an RDMA_NOMSG names no chunk for the payload")
	ErrLong      = errors.New("an RDMA_NOMSG has bytes after its chunk lists")
	ErrTwice     = errors.New("an RDMA_MSG has a read chunk at position 0")
)

// Peek decodes the words that all versions share. ok is false if b is too short for them.
func Peek(b []byte) (xid, version, credits uint32, proc Proc, ok bool) {
	if len(b) < fixedLen {
		return 0, 0, 0, 0, false
	}
	return be.Uint32(b), be.Uint32(b[4:]), be.Uint32(b[8:]), Proc(be.Uint32(b[12:])), true
}

// Parse decodes the header that b starts with, and returns what follows it. h keeps nothing of b, and
// reuses the memory that it has. After an error the fixed fields are valid if b has at least 28 bytes
// or is an RDMA_ERROR.
func (h *Header) Parse(b []byte) (payload []byte, err error) {
	h.Reads, h.Writes, h.Reply, h.HasReply = h.Reads[:0], h.Writes[:0], nil, false
	h.segments, h.counts = h.segments[:0], h.counts[:0]
	h.Code, h.Low, h.High = 0, 0, 0
	var ok bool
	h.XID, h.Version, h.Credits, h.Proc, ok = Peek(b)
	switch {
	case !ok || len(b) < MinLen && h.Proc != Error:
		return nil, ErrTooShort
	case h.Proc == Error:
		return nil, h.parseError(b[fixedLen:]) // of any version: RFC 8166, section 7
	case h.Version != Version:
		return nil, ErrVersion
	case h.Proc > NoMsg:
		return nil, ErrProc
	}
	p := parser{b: b[fixedLen:]}
	h.parseReads(&p)
	h.parseWrites(&p)
	if p.err != nil {
		return nil, p.err
	}
	return p.b, h.check(len(p.b))
}

// parseError decodes rpc_rdma_error.
func (h *Header) parseError(b []byte) error {
	p := parser{b: b}
	h.Code = Code(p.word())
	switch {
	case h.Code == CodeVersion:
		h.Low, h.High = p.word(), p.word()
	case h.Code != CodeChunk || h.Version != Version:
		return ErrBadError
	}
	if p.err != nil {
		return ErrBadError
	}
	return nil
}

// parseReads decodes the read list.
func (h *Header) parseReads(p *parser) {
	for p.flag() {
		s := ReadSegment{Position: p.word(), Segment: p.segment()}
		n := len(h.Reads)
		switch {
		case p.err != nil:
		case n == MaxSegments:
			p.fail(ErrSegments)
		case s.Position%4 != 0:
			p.fail(ErrPosition)
		case n > 0 && s.Position < h.Reads[n-1].Position:
			p.fail(ErrOrder)
		default:
			h.Reads = append(h.Reads, s)
		}
	}
}

// parseWrites decodes the write list and the reply chunk.
func (h *Header) parseWrites(p *parser) {
	for p.flag() {
		h.parseChunk(p)
	}
	if h.HasReply = p.flag(); h.HasReply {
		h.parseChunk(p)
	}
	if p.err != nil {
		return
	}
	rest := h.segments
	for i, n := range h.counts {
		c := Chunk(rest[:n:n])
		if rest = rest[n:]; h.HasReply && i == len(h.counts)-1 {
			h.Reply = c
		} else {
			h.Writes = append(h.Writes, c)
		}
	}
}

func (h *Header) parseChunk(p *parser) {
	n := int64(p.word())
	switch {
	case p.err != nil:
	case n > int64(len(p.b)/segmentLen):
		p.fail(ErrTruncated)
	case int64(len(h.Reads)+len(h.segments)+len(h.counts))+max(n, 1) > MaxSegments:
		p.fail(ErrSegments)
	default:
		h.counts = append(h.counts, int(n))
		for range n {
			h.segments = append(h.segments, p.segment())
		}
	}
}

// check looks at the lists as a whole. rest is the number of bytes that follow them.
func (h *Header) check(rest int) error {
	zero := len(h.Reads) > 0 && h.Reads[0].Position == 0
	switch {
	case h.Proc == Msg && zero:
		return ErrTwice
	case h.Proc == NoMsg && rest > 0:
		return ErrLong
	case h.Proc == NoMsg && len(h.Reads) > 0 && !zero,
		h.Proc == NoMsg && len(h.Reads) == 0 && !h.HasReply:
		return ErrNoPayload
	}
	return nil
}

// Size returns the encoded size of h in bytes.
func (h *Header) Size() int {
	if h.Proc == Error {
		if h.Code == CodeVersion {
			return ErrorLen + 8
		}
		return ErrorLen
	}
	n := MinLen + len(h.Reads)*(8+segmentLen)
	for _, c := range h.Writes {
		n += 8 + len(c)*segmentLen
	}
	if h.HasReply {
		n += 4 + len(h.Reply)*segmentLen
	}
	return n
}

// Append encodes h to the end of b. It panics if the procedure is one that must not be sent.
func (h *Header) Append(b []byte) []byte {
	b = be.AppendUint32(b, h.XID)
	b = be.AppendUint32(b, h.Version)
	b = be.AppendUint32(b, h.Credits)
	b = be.AppendUint32(b, uint32(h.Proc))
	switch h.Proc {
	case Error:
		b = be.AppendUint32(b, uint32(h.Code))
		if h.Code == CodeVersion {
			b = be.AppendUint32(b, h.Low)
			b = be.AppendUint32(b, h.High)
		}
		return b
	case Msg, NoMsg:
	default:
		panic("rpcrdma/wire: " + h.Proc.String() + " must not be sent")
	}
	for _, s := range h.Reads {
		b = be.AppendUint32(b, 1)
		b = be.AppendUint32(b, s.Position)
		b = s.Segment.append(b)
	}
	b = be.AppendUint32(b, 0)
	for _, c := range h.Writes {
		b = be.AppendUint32(b, 1)
		b = c.append(b)
	}
	b = be.AppendUint32(b, 0)
	if !h.HasReply {
		return be.AppendUint32(b, 0)
	}
	b = be.AppendUint32(b, 1)
	return h.Reply.append(b)
}

func (c Chunk) append(b []byte) []byte {
	b = be.AppendUint32(b, uint32(len(c)))
	for i := range c {
		b = c[i].append(b)
	}
	return b
}

func (s *Segment) append(b []byte) []byte {
	b = be.AppendUint32(b, s.Handle)
	b = be.AppendUint32(b, s.Length)
	return be.AppendUint64(b, s.Offset)
}

// parser consumes words from b. After an error it returns zeros.
type parser struct {
	b   []byte
	err error
}

func (p *parser) fail(err error) {
	if p.err == nil {
		p.err, p.b = err, nil
	}
}

func (p *parser) word() uint32 {
	if len(p.b) < 4 {
		p.fail(ErrTruncated)
		return 0
	}
	v := be.Uint32(p.b)
	p.b = p.b[4:]
	return v
}

// flag decodes the flag of optional data (RFC 4506, section 4.19).
func (p *parser) flag() bool {
	switch p.word() {
	case 0:
		return false
	case 1:
		return true
	}
	p.fail(ErrFlag)
	return false
}

func (p *parser) segment() Segment {
	return Segment{p.word(), p.word(), uint64(p.word())<<32 | uint64(p.word())}
}
