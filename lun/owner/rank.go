package owner

import (
	"hash/fnv"
	"io"
)

// weight returns how much a gateway wants a LUN: of all gateways, the one with the greatest weight should have it (rendezvous hashing; D.
// Thaler and C. Ravishankar, 1998). So all gateways agree without a word, each gets about the same number of LUNs, and if one comes or
// goes, only its own LUNs move.
func weight(gateway, lun string) uint64 {
	h := fnv.New64a()
	io.WriteString(h, gateway)
	h.Write([]byte{0})
	io.WriteString(h, lun)
	x := h.Sum64() // FNV leaves the last bytes in the low bits: mix them
	x = (x ^ x>>33) * 0xff51afd7ed558ccd
	x = (x ^ x>>33) * 0xc4ceb9fe1a85ec53
	return x ^ x>>33
}

// rank returns how many of the gateways should have the LUN rather than name. preferred, if it is one of them, comes first.
func rank(name, lun, preferred string, gateways func(func(string) bool)) (n int) {
	own := weight(name, lun)
	for other := range gateways {
		if w := weight(other, lun); other != name && name != preferred && (other == preferred || w > own || w == own && other < name) {
			n++
		}
	}
	return n
}
