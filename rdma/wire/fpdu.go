package wire

import (
	"encoding/binary"

	"github.com/iser-target/iser-target/rdma/crc32c"
)

// FPDU sizes in bytes (RFC 5044, sections 3 and 4).
const (
	LengthLen      = 2 // ULPDU_Length
	CRCLen         = 4
	MarkerLen      = 4
	MarkerInterval = 512
	MinMULPDU      = 128
	MaxULPDU       = 64768
)

// UpdateCRC returns crc extended by p. A CRC32c starts as 0 (RFC 5044, section 4.4).
func UpdateCRC(crc uint32, p []byte) uint32 { return crc32c.Update(crc, p) }

// AppendCRC appends the CRC field to b. MPA uses the byte order of iSCSI digests: least significant
// byte first.
func AppendCRC(b []byte, crc uint32) []byte { return binary.LittleEndian.AppendUint32(b, crc) }

// CRC returns the CRC field b[:4].
func CRC(b []byte) uint32 { return binary.LittleEndian.Uint32(b) }

// Pad returns the number of PAD bytes after a ULPDU of n bytes. They bring
// ULPDU_Length, ULPDU and PAD to a multiple of 4.
func Pad(n int) int { return -(LengthLen + n) & 3 }

// ULPDULength returns the ULPDU_Length that the FPDU b starts with.
func ULPDULength(b []byte) int { return int(be.Uint16(b)) }

// FPDULen returns the size in bytes of an FPDU without Markers for a ULPDU of n bytes.
func FPDULen(n int) int { return LengthLen + n + Pad(n) + CRCLen }

// MULPDU returns the size of the largest ULPDU for an effective TCP segment size of
// emss bytes, so that an FPDU fills a segment (RFC 5044, section 4.5).
func MULPDU(emss int, markers bool) int {
	over := LengthLen + CRCLen + emss%4
	if markers {
		over += MarkerLen * ((emss + MarkerInterval - 1) / MarkerInterval)
	}
	return min(max(emss-over, MinMULPDU), MaxULPDU)
}

// A MarkerGrid is a position in a half-connection with Markers, modulo 512. Markers stand before
// the first FPDU and every 512 bytes from there, Markers included (RFC 5044, section 4.3).
type MarkerGrid int

// AppendFPDU appends an FPDU to dst. fpdu holds its bytes without Markers, from
// ULPDU_Length to the CRC field. AppendFPDU inserts the Markers and computes the CRC,
// which covers them. It returns the grid after the FPDU.
func (g MarkerGrid) AppendFPDU(dst, fpdu []byte, withCRC bool) ([]byte, MarkerGrid) {
	start := len(dst) // the CRC starts here, and covers a Marker right before the FPDU
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
	return AppendCRC(dst, crc), MarkerGrid((pos + CRCLen) % MarkerInterval)
}

// Next returns how many bytes come before the next Marker. 0 means that the Marker is next.
func (g MarkerGrid) Next() int { return int(MarkerInterval-g) % MarkerInterval }

// Advance returns the grid n bytes later.
func (g MarkerGrid) Advance(n int) MarkerGrid { return (g + MarkerGrid(n)) % MarkerInterval }

// MarkerPointer returns the FPDUPTR of a Marker. The two low bits count as zero (RFC
// 5044, section 4.2), but the CRC covers them as they came.
func MarkerPointer(b []byte) int { return int(be.Uint16(b[2:]) &^ 3) }
