package protection

// polynomial of the guard: x^16 + x^15 + x^11 + x^9 + x^8 + x^7 + x^5 + x^4 + x^2 + x + 1 (SBC-3, section 4.22.4).
const polynomial = 0x8bb7

// slices is how many bytes update takes at a time, and foldBlock how many fold does.
const (
	slices    = 16
	foldBlock = 64
)

// tables[k][b] is the CRC of the byte b followed by k zeros.
var tables = func() (t [slices][256]uint16) {
	for b := range 256 {
		crc := uint16(b) << 8
		for range 8 {
			carry := crc&0x8000 != 0
			if crc <<= 1; carry {
				crc ^= polynomial
			}
		}
		t[0][b] = crc
	}
	for k := 1; k < slices; k++ {
		for b, crc := range t[k-1] {
			t[k][b] = crc<<8 ^ t[0][crc>>8]
		}
	}
	return t
}()

// CRC returns the guard of a block. That of zeros is 0.
//
// The race detector leaves it alone: it would look at each byte, and the tests of backend/checked would take minutes longer. What reads and
// writes the block besides has no such exception.
//
//go:norace
func CRC(p []byte) uint16 {
	if n := len(p) / foldBlock * foldBlock; folds && n > 0 {
		var rest [slices]byte
		fold(&p[0], n, &rest)
		return update(update(0, rest[:]), p[n:])
	}
	return update(0, p)
}

// update returns crc extended by p.
//
//go:norace
func update(crc uint16, p []byte) uint16 {
	for t := &tables; len(p) >= slices; p = p[slices:] {
		_ = p[slices-1]
		crc = t[15][p[0]^byte(crc>>8)] ^ t[14][p[1]^byte(crc)] ^ t[13][p[2]] ^ t[12][p[3]] ^
			t[11][p[4]] ^ t[10][p[5]] ^ t[9][p[6]] ^ t[8][p[7]] ^
			t[7][p[8]] ^ t[6][p[9]] ^ t[5][p[10]] ^ t[4][p[11]] ^
			t[3][p[12]] ^ t[2][p[13]] ^ t[1][p[14]] ^ t[0][p[15]]
	}
	for _, b := range p {
		crc = crc<<8 ^ tables[0][byte(crc>>8)^b]
	}
	return crc
}
