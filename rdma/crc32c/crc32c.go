// Package crc32c computes the CRC32c of MPA (RFC 5044, section 4.4) and of iSCSI's digests (RFC 7143, section 13.1).
package crc32c

import "hash/crc32"

var table = crc32.MakeTable(crc32.Castagnoli)

// Checksum returns the CRC32c of p.
func Checksum(p []byte) uint32 { return Update(0, p) }

// Update returns crc extended by p. A CRC32c starts as 0.
func Update(crc uint32, p []byte) uint32 {
	if n := len(p) / block * block; folds && n > 0 {
		crc = ^fold(^crc, &p[0], n)
		p = p[n:]
	}
	return crc32.Update(crc, table, p)
}

// block is how many bytes fold reads at a time.
const block = 256
