package crc32c

import (
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"testing"
)

// The CRC32C of 32 bytes is that of RFC 7143, appendix A.4. That of 123456789 is the check value in catalogs of CRCs.
func TestChecksum(t *testing.T) {
	ascending, descending := make([]byte, 32), make([]byte, 32)
	for i := range ascending {
		ascending[i], descending[i] = byte(i), byte(31-i)
	}
	ones := make([]byte, 32)
	for i := range ones {
		ones[i] = 0xff
	}
	for _, tc := range []struct {
		data []byte
		want uint32
	}{
		{make([]byte, 32), 0x8a9136aa},
		{ones, 0x62a8ab43},
		{ascending, 0x46dd794e},
		{descending, 0x113fdb5c},
		{[]byte("123456789"), 0xe3069283},
		{nil, 0},
	} {
		if got := Checksum(tc.data); got != tc.want {
			t.Errorf("the CRC32c of %x is %#x, want %#x", tc.data, got, tc.want)
		}
	}
}

// Whatever the length, the alignment and the CRC so far, Update has the result of the standard library.
func TestUpdate(t *testing.T) {
	random := rand.NewChaCha8([32]byte{1})
	data := make([]byte, 5*block+64)
	random.Read(data)
	table := crc32.MakeTable(crc32.Castagnoli)
	for n := range 5 * block {
		for _, from := range []int{0, 1, 8, 63} {
			crc, p := uint32(random.Uint64()), data[from:from+n]
			if got, want := Update(crc, p), crc32.Update(crc, table, p); got != want {
				t.Fatalf("%d bytes from %d after %#x: %#x, want %#x", n, from, crc, got, want)
			}
		}
	}
}

// BenchmarkChecksum compares with the standard library.
func BenchmarkChecksum(b *testing.B) {
	table := crc32.MakeTable(crc32.Castagnoli)
	for _, n := range []int{48, 1448, 4 << 10, 64 << 10, 1 << 20} {
		data := make([]byte, n)
		for name, sum := range map[string]func() uint32{
			"std":  func() uint32 { return crc32.Checksum(data, table) },
			"ours": func() uint32 { return Checksum(data) },
		} {
			b.Run(fmt.Sprintf("%d/%s", n, name), func(b *testing.B) {
				b.SetBytes(int64(n))
				for b.Loop() {
					sum()
				}
			})
		}
	}
}
