package wire

import (
	"encoding/binary"
	"hash/crc32"
)

// FPDU sizes in octets (RFC 5044, sections 3 and 4).
const (
	LengthLen      = 2 // ULPDU_Length
	CRCLen         = 4
	MarkerLen      = 4
	MarkerInterval = 512
	MinMULPDU      = 128
	MaxULPDU       = 64768
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// UpdateCRC adds p to a CRC32c that started as 0 (RFC 5044, section 4.4).
func UpdateCRC(crc uint32, p []byte) uint32 { return crc32.Update(crc, castagnoli, p) }

// PutCRC writes crc into the CRC field b[:4]. MPA uses the octet order of
// iSCSI digests: least significant octet first.
func PutCRC(b []byte, crc uint32) { binary.LittleEndian.PutUint32(b, crc) }

// CRC reads the CRC field b[:4].
func CRC(b []byte) uint32 { return binary.LittleEndian.Uint32(b) }

// Pad is the number of PAD octets behind a ULPDU of n octets: it brings
// ULPDU_Length, ULPDU and PAD to a multiple of 4.
func Pad(n int) int { return -(LengthLen + n) & 3 }

// MULPDU is the largest ULPDU for an effective TCP segment size of emss
// octets, so that an FPDU fills a segment (RFC 5044, section 4.5).
func MULPDU(emss int, markers bool) int {
	over := LengthLen + CRCLen + emss%4
	if markers {
		over += MarkerLen * ((emss + MarkerInterval - 1) / MarkerInterval)
	}
	return min(max(emss-over, MinMULPDU), MaxULPDU)
}

// A MarkerGrid knows where in a half-connection Markers stand: in front of the
// first FPDU and every 512 octets from there, Markers included (RFC 5044,
// section 4.3). Its value is the stream position modulo 512.
type MarkerGrid int

// AppendFPDU appends to dst the FPDU whose octets without Markers are fpdu
// (ULPDU_Length through CRC field), puts Markers where the grid wants them,
// and computes the CRC, which covers them. It returns the grid behind it.
func (g MarkerGrid) AppendFPDU(dst, fpdu []byte, withCRC bool) ([]byte, MarkerGrid) {
	start := len(dst) // where CRC coverage starts: a Marker right in front counts
	header := start   // where ULPDU_Length is
	pos := int(g)
	body := fpdu[:len(fpdu)-CRCLen]
	marker := func() {
		var ptr int
		if len(dst) != start {
			ptr = len(dst) - header
		}
		dst = append(dst, 0, 0, byte(ptr>>8), byte(ptr))
		pos = MarkerLen
	}
	if pos == 0 {
		marker()
		header = len(dst)
	}
	for len(body) > 0 {
		if pos == MarkerInterval {
			marker()
		}
		n := min(MarkerInterval-pos, len(body))
		dst = append(dst, body[:n]...)
		body, pos = body[n:], pos+n
	}
	if pos == MarkerInterval {
		marker()
	}
	var crc uint32
	if withCRC {
		crc = UpdateCRC(0, dst[start:])
	}
	dst = binary.LittleEndian.AppendUint32(dst, crc)
	return dst, MarkerGrid((pos + CRCLen) % MarkerInterval)
}

// Next is how many octets may be read from the position of the grid before
// the next Marker stands in the way; 0 means that one is next.
func (g MarkerGrid) Next() int {
	if g == 0 {
		return 0
	}
	return MarkerInterval - int(g)
}

// Advance is the grid n octets further.
func (g MarkerGrid) Advance(n int) MarkerGrid { return (g + MarkerGrid(n)) % MarkerInterval }

// MarkerPointer reads FPDUPTR from a Marker. The two low bits are taken as
// zero (RFC 5044, section 4.2); the CRC covers them as they came.
func MarkerPointer(b []byte) int { return int(be.Uint16(b[2:]) &^ 3) }
