package wire

import (
	"errors"
	"fmt"
)

// Sizes in bytes and limits of MPA startup frames (RFC 5044, section 7.1.1).
const (
	StartupLen     = 20  // fixed part of a Request or Reply Frame
	MaxPrivateData = 512 // PD_Length
	EnhancedLen    = 4   // RFC 6581, section 9: before the private data
	NoDepth        = 0x3fff
)

const (
	requestKey = "MPA ID Req Frame"
	replyKey   = "MPA ID Rep Frame"

	flagMarkers  byte = 0x80
	flagCRC      byte = 0x40
	flagReject   byte = 0x20
	flagEnhanced byte = 0x10 // RFC 6581, section 6: the S bit

	bitPeerToPeer uint16 = 0x8000 // A, word 0
	bitSendRTR    uint16 = 0x4000 // B, word 0
	bitWriteRTR   uint16 = 0x8000 // C, word 1
	bitReadRTR    uint16 = 0x4000 // D, word 1
	depthMask     uint16 = 0x3fff
)

// Errors of startup frames. All of them are MPA error code 4 and close the TCP
// connection at once (RFC 5044, section 8).
var (
	ErrKey         = errors.New("not an MPA startup frame (bad key)")
	ErrRequestKey  = errors.New("MPA Request where a Reply is due (both ends are initiators)")
	ErrReplyKey    = errors.New("MPA Reply where a Request is due")
	ErrRevision    = errors.New("unsupported MPA revision")
	ErrPrivateData = errors.New("bad MPA private data length")
)

// A Startup is an MPA Request or Reply Frame (RFC 5044, section 7.1.1, with
// the enhanced data of RFC 6581, section 9).
//
//	0                               16     17     18      20
//	+-------------------------------+------+------+-------+--------------+
//	| Key                           |MCRS  | Rev  |PD_Len | private data |
//	+-------------------------------+------+------+-------+--------------+
type Startup struct {
	Reply    bool
	Markers  bool // M: the sender asks for Markers in what it receives
	CRC      bool // C: the sender asks for CRCs
	Reject   bool // R, in a Reply
	Rev      uint8
	Enhanced bool // S: the frame has Depths
	Depths   Depths
	Private  []byte // the ULP's private data, after Depths
}

// Depths is the enhanced data of RFC 6581, section 9. IRD and ORD count RDMA Read
// Requests from the view of the frame's sender. NoDepth leaves the value to the ULPs.
type Depths struct {
	PeerToPeer bool // A
	RTR        RTR  // B, C, D
	IRD, ORD   uint16
}

// RTR is a set of ready-to-receive messages (RFC 6581, section 4.4).
type RTR struct{ Send, Write, Read bool }

// Append appends f to b. It returns ErrPrivateData if f.Private is longer than
// MaxPrivateData, or than MaxPrivateData-EnhancedLen in an enhanced frame.
func (f *Startup) Append(b []byte) ([]byte, error) {
	n := len(f.Private)
	if f.Enhanced {
		n += EnhancedLen
	}
	if n > MaxPrivateData {
		return b, fmt.Errorf("%w: %d bytes", ErrPrivateData, n)
	}
	key := requestKey
	if f.Reply {
		key = replyKey
	}
	flags := bit(f.Markers, flagMarkers) | bit(f.CRC, flagCRC) | bit(f.Reject, flagReject) |
		bit(f.Enhanced, flagEnhanced)
	b = append(b, key...)
	b = append(b, flags, f.Rev)
	b = be.AppendUint16(b, uint16(n))
	if f.Enhanced {
		b = f.Depths.append(b)
	}
	return append(b, f.Private...), nil
}

func (d Depths) append(b []byte) []byte {
	w0 := d.IRD&depthMask | bit(d.PeerToPeer, bitPeerToPeer) | bit(d.RTR.Send, bitSendRTR)
	w1 := d.ORD&depthMask | bit(d.RTR.Write, bitWriteRTR) | bit(d.RTR.Read, bitReadRTR)
	return be.AppendUint16(be.AppendUint16(b, w0), w1)
}

// ParseStartup decodes the fixed part of a frame, b[:StartupLen]. It returns how many
// bytes of private data follow, which go to SetPrivate. reply selects which of the two
// keys is expected. ParseStartup ignores reserved bits.
func ParseStartup(b []byte, reply bool) (f Startup, private int, err error) {
	if len(b) < StartupLen {
		return f, 0, ErrKey
	}
	switch key := string(b[:16]); {
	case key == requestKey && reply:
		return f, 0, ErrRequestKey
	case key == replyKey && !reply:
		return f, 0, ErrReplyKey
	case key != requestKey && key != replyKey:
		return f, 0, ErrKey
	}
	flags := b[16]
	f = Startup{
		Reply:    reply,
		Markers:  flags&flagMarkers != 0,
		CRC:      flags&flagCRC != 0,
		Reject:   flags&flagReject != 0 && reply,
		Rev:      b[17],
		Enhanced: flags&flagEnhanced != 0,
	}
	private = int(be.Uint16(b[18:]))
	switch {
	case f.Rev != 1 && f.Rev != 2:
		return f, 0, fmt.Errorf("%w %d", ErrRevision, f.Rev)
	case f.Enhanced && f.Rev < 2:
		return f, 0, fmt.Errorf("%w: enhanced data needs revision 2, frame has %d", ErrRevision, f.Rev)
	case private > MaxPrivateData:
		return f, 0, fmt.Errorf("%w: %d bytes, %d allowed", ErrPrivateData, private, MaxPrivateData)
	case f.Enhanced && private < EnhancedLen:
		return f, 0, fmt.Errorf("%w: %d bytes cannot hold the enhanced data", ErrPrivateData, private)
	}
	return f, private, nil
}

// SetPrivate sets Depths and Private from the bytes after the fixed part. f keeps a slice of b.
func (f *Startup) SetPrivate(b []byte) {
	if f.Enhanced {
		w0, w1 := be.Uint16(b), be.Uint16(b[2:])
		f.Depths = Depths{
			PeerToPeer: w0&bitPeerToPeer != 0,
			RTR:        RTR{Send: w0&bitSendRTR != 0, Write: w1&bitWriteRTR != 0, Read: w1&bitReadRTR != 0},
			IRD:        w0 & depthMask,
			ORD:        w1 & depthMask,
		}
		b = b[EnhancedLen:]
	}
	f.Private = b
}
