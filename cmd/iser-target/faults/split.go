package faults

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"sync"

	"github.com/iser-target/iser-target/iscsi/pdu"
)

// A Kind says what a unit is.
type Kind string

// The kinds of units.
const (
	Startup      Kind = "MPA startup"        // an MPA Request or Reply Frame (RFC 5044, section 7.1)
	Login        Kind = "login PDU"          // an iSCSI PDU over TCP before the full feature phase
	PDU          Kind = "PDU"                // an iSCSI PDU over TCP
	FPDU         Kind = "FPDU"               // with a Send, a Read Request or a Terminate
	RDMAWrite    Kind = "RDMA Write"         // an FPDU
	ReadResponse Kind = "RDMA Read Response" // an FPDU
)

// Protected reports whether a digest or CRC may cover the unit.
func (k Kind) Protected() bool { return k != Startup && k != Login }

// A Unit is what MPA or iSCSI sends as a whole.
type Unit struct {
	Kind   Kind
	Bytes  []byte
	Header int // how many of the bytes are headers
}

// maxPrivate is the longest private data of MPA startup, in bytes (RFC 5044, section 7.1.1).
const maxPrivate = 512

// A Conversation is what the two directions of a connection have in common.
type Conversation struct {
	mu           sync.Mutex // guards what follows
	protocol     protocol
	headerDigest bool // CRC32C follows headers
	dataDigest   bool // CRC32C follows data
	agreed       map[string]string
}

type protocol int

const (
	unknown protocol = iota
	loginPhase
	fullFeature
	rdma // begins with MPA startup
)

// A Splitter finds the units of one direction of a conversation.
type Splitter struct {
	c        *Conversation
	toTarget bool
	started  bool // MPA startup has passed in this direction
}

// NewSplitters returns the splitters of the direction to the target and of that from it.
func NewSplitters() (toTarget, fromTarget *Splitter) {
	c := &Conversation{agreed: map[string]string{}}
	return &Splitter{c: c, toTarget: true}, &Splitter{c: c}
}

// Split returns the first unit of b. If b does not have all of it, need says how many bytes are
// required before Split can say more. An error ends the conversation.
func (s *Splitter) Split(b []byte) (u Unit, need int, err error) {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	if len(b) == 0 {
		return u, 1, nil
	}
	if s.c.protocol == unknown {
		if err := s.begin(b[0]); err != nil {
			return u, 0, err
		}
	}
	switch {
	case s.c.protocol != rdma:
		return s.splitPDU(b)
	case !s.started:
		return s.splitStartup(b)
	}
	return s.splitFPDU(b)
}

// begin chooses the protocol by the first byte of the initiator, as the target does.
func (s *Splitter) begin(first byte) error {
	switch {
	case !s.toTarget:
		return fmt.Errorf("the target sends before the initiator does")
	case first == 'M':
		s.c.protocol = rdma
	case pdu.Opcode(first&0x3f) == pdu.LoginReq:
		s.c.protocol = loginPhase
	default:
		return fmt.Errorf("first byte %#02x: neither an MPA Request nor a Login Request", first)
	}
	return nil
}

// splitStartup returns an MPA Request or Reply Frame: a key of 16 bytes, flags, a revision, and private
// data after its length.
func (s *Splitter) splitStartup(b []byte) (u Unit, need int, err error) {
	const header, key, markers = 20, "MPA ID Re", 0x80
	if n := min(len(b), len(key)); string(b[:n]) != key[:n] {
		return u, 0, fmt.Errorf("% x where an MPA Request or Reply is due", b[:n])
	}
	if len(b) < header {
		return u, header, nil
	}
	if b[16]&markers != 0 {
		return u, 0, fmt.Errorf("MPA startup asks for markers, which this proxy does not know")
	}
	n := int(binary.BigEndian.Uint16(b[18:]))
	if n > maxPrivate {
		return u, 0, fmt.Errorf("MPA startup with %d bytes of private data, of %d", n, maxPrivate)
	}
	if len(b) < header+n {
		return u, header + n, nil
	}
	s.started = true
	return Unit{Startup, b[:header+n], header}, 0, nil
}

// splitFPDU returns an FPDU: the length of the ULPDU, the ULPDU, a pad to a multiple of 4 bytes, and
// the CRC, which is there whether it is used or not (RFC 5044, section 4).
func (s *Splitter) splitFPDU(b []byte) (u Unit, need int, err error) {
	if len(b) < 2 {
		return u, 2, nil
	}
	n := int(binary.BigEndian.Uint16(b))
	total := pdu.Padded(2+n) + 4
	if len(b) < total {
		return u, total, nil
	}
	u = Unit{FPDU, b[:total], 2 + min(n, 18)} // the untagged header of DDP, with the byte of RDMAP
	if n < 2 {
		return u, 0, nil
	}
	const tagged = 0x80
	if b[2]&tagged != 0 {
		u.Header = 2 + min(n, 14)
	}
	switch b[3] & 0x0f { // the opcode of RDMAP (RFC 5040, section 4.1)
	case 0:
		u.Kind = RDMAWrite
	case 2:
		u.Kind = ReadResponse
	}
	return u, 0, nil
}

// splitPDU returns an iSCSI PDU with its digests (RFC 7143, section 11.2).
func (s *Splitter) splitPDU(b []byte) (u Unit, need int, err error) {
	if len(b) < pdu.BHSLen {
		return u, pdu.BHSLen, nil
	}
	h := pdu.BHS(b[:pdu.BHSLen])
	header := pdu.BHSLen + 4*h.TotalAHSLength()
	n := h.DataSegmentLength()
	if s.c.headerDigest {
		header += 4
	}
	total := header + pdu.Padded(n)
	if n > 0 && s.c.dataDigest {
		total += 4
	}
	if len(b) < total {
		return u, total, nil
	}
	u = Unit{PDU, b[:total], header}
	if s.c.protocol == loginPhase {
		u.Kind = Login
		if !s.toTarget && h.Opcode() == pdu.LoginResp {
			s.answer(h, b[header:header+n])
		}
	}
	return u, 0, nil
}

// answer takes a Login Response. The last one decides what follows in both directions: the initiator
// waits for it.
//
// Preconditions: c.mu is held.
func (s *Splitter) answer(h pdu.BHS, text []byte) {
	for _, kv := range bytes.Split(text, []byte{0}) {
		switch key, value, _ := bytes.Cut(kv, []byte("=")); string(key) {
		case "HeaderDigest", "DataDigest", "RDMAExtensions":
			s.c.agreed[string(key)] = string(value)
		}
	}
	r := pdu.ParseLoginResponse(h)
	switch {
	case r.Status != 0 || !r.Transit || r.NSG != pdu.FullFeaturePhase:
	case s.c.agreed["RDMAExtensions"] == "Yes": // MPA startup follows (RFC 7145, section 5.1)
		s.c.protocol = rdma
	default:
		s.c.protocol = fullFeature
		s.c.headerDigest = s.c.agreed["HeaderDigest"] == "CRC32C"
		s.c.dataDigest = s.c.agreed["DataDigest"] == "CRC32C"
	}
}
