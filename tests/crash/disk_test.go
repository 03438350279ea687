package crash

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// versions counts the contents that were ever written to a block.
var versions atomic.Uint64

// A version is one content of a block: a number of versions, and the block that it was written to.
// All blocks of a WRITE SAME have the version of the first one. 0 is the zeros of a block that was never
// written, or unmapped.
type version uint64

const (
	lbaBits = 20 // of a version; a LUN of a test has fewer blocks
	lunBits = 4
)

// version returns a new version of a block.
func (d *disk) version(lba int) version {
	return version((versions.Add(1)<<lunBits|uint64(d.lun))<<lbaBits | uint64(lba))
}

// before returns a version that is older than v, of the same block.
func (v version) before() version { return v - 1<<(lunBits+lbaBits) }

// String names the version and its block.
func (v version) String() string {
	if v == 0 {
		return "version 0"
	}
	return fmt.Sprintf("version %d of LUN %d, block %d", v>>(lunBits+lbaBits), v>>lbaBits&(1<<lunBits-1), v&(1<<lbaBits-1))
}

// content returns what size bytes of a block hold in a version: the version, the seed of the test, and
// numbers that both choose.
func (d *disk) content(v version, size int) []byte {
	b := make([]byte, size)
	if v == 0 {
		return b
	}
	binary.BigEndian.PutUint64(b, uint64(v))
	binary.BigEndian.PutUint64(b[8:], d.seed)
	rng := rand.NewPCG(d.seed, uint64(v))
	for i := 16; i < size; i += 8 {
		binary.BigEndian.PutUint64(b[i:], rng.Uint64())
	}
	return b
}

// versionOf returns the version that a block holds, or an error if it holds a part of one, or one of
// another test.
func (d *disk) versionOf(b []byte) (version, error) {
	v, seed := version(binary.BigEndian.Uint64(b)), binary.BigEndian.Uint64(b[8:])
	want := d.content(v, len(b))
	if bytes.Equal(b, want) {
		return v, nil
	}
	if seed != d.seed && bytes.Equal(b, (&disk{seed: seed}).content(v, len(b))) {
		return 0, fmt.Errorf("holds %v, of the seed %d", v, seed)
	}
	n := 0
	for b[n] == want[n] {
		n++
	}
	return 0, fmt.Errorf("is torn: %v ends after %d bytes of %d", v, n, len(b))
}

// A disk knows what the blocks of a LUN may hold. No two commands that it hands out share a block, so
// that at most one write of a block is in flight.
type disk struct {
	lun  byte
	size int    // of a block, in bytes
	seed uint64 // of the contents

	mu     sync.Mutex
	blocks []block
}

// A block is what the disk knows of one.
type block struct {
	acked   version   // the version of the last write that was acknowledged
	flight  []version // that of a write whose answer has not come; at most one
	pending bool      // a command has the block
}

func newDisk(lun byte, size, blocks int) *disk {
	return &disk{lun: lun, size: size, blocks: make([]block, blocks)}
}

// take hands out a random range of at most n blocks, and returns the versions that were acknowledged.
func (d *disk) take(rng *rand.Rand, n int) (lba int, old []version) {
	for {
		n := 1 + rng.IntN(n)
		lba := rng.IntN(len(d.blocks) - n + 1)
		d.mu.Lock()
		blocks := d.blocks[lba : lba+n]
		if !slices.ContainsFunc(blocks, func(b block) bool { return b.pending }) {
			for i := range blocks {
				blocks[i].pending = true
				old = append(old, blocks[i].acked)
			}
		}
		d.mu.Unlock()
		if old != nil {
			return lba, old
		}
	}
}

// send notes that versions from lba on leave for the target.
func (d *disk) send(lba int, versions []version) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i, v := range versions {
		d.blocks[lba+i].flight = append(d.blocks[lba+i].flight, v)
	}
}

// done takes n blocks from lba back: a write of them was acknowledged, or refused before it began.
func (d *disk) done(lba, n int, acknowledged bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range d.blocks[lba : lba+n] {
		b := &d.blocks[lba+i]
		if acknowledged {
			b.acked = b.flight[len(b.flight)-1]
		}
		b.flight, b.pending = nil, false
	}
}

// check compares the blocks from lba on with what they may hold, and returns what is wrong. From then
// on they may hold only what they have.
func (d *disk) check(lba int, data []byte) (faults []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := 0; len(data) > 0; i, data = i+1, data[d.size:] {
		b := &d.blocks[lba+i]
		v, err := d.versionOf(data[:d.size])
		switch {
		case err != nil:
			faults = append(faults, fmt.Sprintf("LUN %d, block %d: %v", d.lun, lba+i, err))
		case v != b.acked && !slices.Contains(b.flight, v):
			faults = append(faults, fmt.Sprintf("LUN %d, block %d: holds %v, but %v was acknowledged, and in flight was %v",
				d.lun, lba+i, v, b.acked, b.flight))
		}
		*b = block{acked: v}
	}
	return faults
}

// readAll reads the whole LUN through a port and checks it.
func (d *disk) readAll(p port) (faults []string, err error) {
	step := (64 << 10) / d.size
	for lba := 0; lba < len(d.blocks); lba += step {
		n := min(step, len(d.blocks)-lba)
		r := &request{lun: d.lun, cdb: cdb.Read16(uint64(lba), uint32(n)), in: make([]byte, n*d.size)}
		if _, err := good(p, r); err != nil {
			return faults, err
		}
		faults = append(faults, d.check(lba, r.in)...)
	}
	return faults, nil
}

// The counts are what a load has done.
type counts struct {
	acknowledged, unanswered, syncs, reads atomic.Int64
}

// fua is the bit of WRITE and COMPARE AND WRITE.
const fua = 0x08

// step executes one random command. lost reports that the connection ended without an answer. Any
// other error is one of the target.
func (d *disk) step(p port, rng *rand.Rand, n *counts) (lost bool, err error) {
	most := max(32<<10/d.size, 1)
	if rng.IntN(16) == 0 {
		most = 128 << 10 / d.size
	}
	r := &request{lun: d.lun}
	if rng.IntN(2) == 0 {
		r.immediate = 8192
	}
	switch k := rng.IntN(100); {
	case k < 45: // WRITE, with FUA or without
		lba, old := d.take(rng, most)
		next := make([]version, len(old))
		for i := range next {
			next[i] = d.version(lba + i)
			r.out = append(r.out, d.content(next[i], d.size)...)
		}
		r.cdb = cdb.Write16(uint64(lba), uint32(len(old)))
		if k < 15 {
			r.cdb[1] = fua
		}
		return d.write(p, r, lba, next, n)
	case k < 55: // WRITE SAME, of a pattern
		lba, old := d.take(rng, most)
		v := d.version(lba)
		r.cdb, r.out = cdb.RW16(0x93, uint64(lba), uint32(len(old))), d.content(v, d.size)
		return d.write(p, r, lba, slices.Repeat([]version{v}, len(old)), n)
	case k < 60: // WRITE SAME, of zeros, with the UNMAP bit
		lba, old := d.take(rng, most)
		r.cdb, r.out = cdb.RW16(0x93, uint64(lba), uint32(len(old))), make([]byte, d.size)
		r.cdb[1] = 0x08
		return d.write(p, r, lba, make([]version, len(old)), n)
	case k < 67: // UNMAP
		lba, old := d.take(rng, most)
		r.cdb, r.out = [16]byte{0: 0x42, 8: 24}, make([]byte, 24)
		binary.BigEndian.PutUint16(r.out, 22)
		binary.BigEndian.PutUint16(r.out[2:], 16)
		binary.BigEndian.PutUint64(r.out[8:], uint64(lba))
		binary.BigEndian.PutUint32(r.out[16:], uint32(len(old)))
		return d.write(p, r, lba, make([]version, len(old)), n)
	case k < 80: // COMPARE AND WRITE, now and then with another content than that of the medium
		return d.compareAndWrite(p, r, rng, n)
	case k < 92: // READ
		lba, old := d.take(rng, most)
		r.cdb, r.in = cdb.Read16(uint64(lba), uint32(len(old))), make([]byte, len(old)*d.size)
		if lost, err := good(p, r); err != nil {
			return lost, err
		}
		n.reads.Add(1)
		if faults := d.check(lba, r.in); len(faults) > 0 {
			return false, fmt.Errorf("READ: %s", faults[0])
		}
		return false, nil
	default: // SYNCHRONIZE CACHE
		r.cdb[0] = 0x91
		lost, err := good(p, r)
		if err == nil {
			n.syncs.Add(1)
		}
		return lost, err
	}
}

// write executes a command that writes versions from lba on.
func (d *disk) write(p port, r *request, lba int, next []version, n *counts) (lost bool, err error) {
	d.send(lba, next)
	if lost, err := good(p, r); err != nil {
		n.unanswered.Add(1)
		return lost, err
	}
	n.acknowledged.Add(1)
	d.done(lba, len(next), true)
	return false, nil
}

// compareAndWrite executes COMPARE AND WRITE.
func (d *disk) compareAndWrite(p port, r *request, rng *rand.Rand, n *counts) (lost bool, err error) {
	const miscompare = 0x0e
	lba, old := d.take(rng, 2)
	differs := rng.IntN(4) == 0
	next := make([]version, len(old))
	for i, v := range old {
		if differs {
			v = d.version(lba + i)
		}
		r.out = append(r.out, d.content(v, d.size)...)
	}
	for i := range next {
		next[i] = d.version(lba + i)
		r.out = append(r.out, d.content(next[i], d.size)...)
	}
	r.cdb = [16]byte{0: 0x89, 13: byte(len(old))}
	binary.BigEndian.PutUint64(r.cdb[2:], uint64(lba))
	if rng.IntN(2) == 0 {
		r.cdb[1] = fua
	}
	if !differs {
		return d.write(p, r, lba, next, n)
	}
	lost, err = good(p, r)
	switch {
	case lost:
		return true, err
	case err == nil:
		return false, fmt.Errorf("COMPARE AND WRITE of other contents to LUN %d, block %d: GOOD", d.lun, lba)
	case r.status != 2 || len(r.sense) < 3 || r.sense[2]&0x0f != miscompare:
		return false, err
	}
	d.done(lba, len(old), false)
	return false, nil
}
