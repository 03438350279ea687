package owner

import (
	"hash/fnv"
	"io"
)

// hash returns a number for a name, the same in all gateways.
func hash(name string) uint64 {
	h := fnv.New64a()
	io.WriteString(h, name)
	return mix(h.Sum64()) // FNV leaves the last bytes in the low bits
}

// mix spreads each bit over all (the finalizer of MurmurHash3).
func mix(x uint64) uint64 {
	x = (x ^ x>>33) * 0xff51afd7ed558ccd
	x = (x ^ x>>33) * 0xc4ceb9fe1a85ec53
	return x ^ x>>33
}

// weight returns how much a LUN belongs to a gateway, by the hashes of their names: of all gateways, the one with the greatest weight should
// have it (rendezvous hashing; D. Thaler and C. Ravishankar, 1998). So all gateways agree without a word, each gets about the same
// number of LUNs, and if one comes or goes, only its own LUNs move.
func weight(gateway, lun uint64) uint64 { return mix(gateway ^ lun) }
