package initiator

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync/atomic"

	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// A Region is a part of a LUN that one writer has for itself: 256 blocks of 512 bytes. What it reads must be what it wrote
// last.
type Region struct {
	LUN     byte
	First   uint64 // LBA
	content [256]uint64
}

// block returns the content of a block.
func block(lba, version uint64) []byte {
	b := make([]byte, 512)
	for i := 0; i < len(b) && version > 0; i += 16 {
		binary.BigEndian.PutUint64(b[i:], lba)
		binary.BigEndian.PutUint64(b[i+8:], version)
	}
	return b
}

// blocks returns the content of n blocks from at on.
func (r *Region) blocks(at, n uint64) (b []byte) {
	for i := range n {
		b = append(b, block(r.First+at+i, r.content[at+i])...)
	}
	return b
}

// Pipeline writes and reads the region with several commands in flight, until stop is closed, and counts them. A
// command that fails, or reads other data, is an error.
func (r *Region) Pipeline(s *Session, stop <-chan struct{}, done *atomic.Int64) error {
	const depth, span = 16, 16
	version := uint64(0)
	for {
		var list [depth]*Command
		var want [depth][]byte
		for i := range list {
			at, n := uint64(i*span), uint64(1+rand.IntN(span))
			if rand.IntN(2) == 0 {
				for j := range n {
					version++
					r.content[at+j] = version
				}
				out := r.blocks(at, n)
				list[i] = &Command{LUN: r.LUN, CDB: cdb.Write16(r.First+at, uint32(n)), Out: out, Immediate: rand.IntN(2) * len(out)}
			} else {
				want[i] = r.blocks(at, n)
				list[i] = &Command{LUN: r.LUN, CDB: cdb.Read16(r.First+at, uint32(n)), In: make([]byte, len(want[i]))}
			}
			if err := s.Start(list[i]); err != nil {
				return err
			}
		}
		for i, c := range list {
			switch err := c.Wait(); {
			case err != nil:
				return err
			case c.Status != 0:
				return fmt.Errorf("status %#x, sense % x", c.Status, c.Sense)
			case want[i] != nil && !bytes.Equal(c.In, want[i]):
				return fmt.Errorf("READ of LBA %d returns other data", r.First+uint64(i*span))
			}
			done.Add(1)
		}
		select {
		case <-stop:
			return nil
		default:
		}
	}
}

// Steps does what Pipeline does, one command at a time.
func (r *Region) Steps(d *Dialog, stop <-chan struct{}, done *atomic.Int64) error {
	lun := [8]byte{1: r.LUN}
	for version := uint64(1); ; version++ {
		at := version % 256
		r.content[at] = version
		w, rd := cdb.Write16(r.First+at, 1), cdb.Read16(r.First+at, 1)
		if status, sense, _, err := d.Do(lun, w[:], r.blocks(at, 1), 0); err != nil || status != 0 {
			return fmt.Errorf("WRITE: status %#x, sense % x, %w", status, sense, err)
		}
		status, sense, in, err := d.Do(lun, rd[:], nil, 512)
		if err != nil || status != 0 || !bytes.Equal(in, r.blocks(at, 1)) {
			return fmt.Errorf("READ: status %#x, sense % x, %w, or other data", status, sense, err)
		}
		done.Add(1)
		select {
		case <-stop:
			return nil
		default:
		}
	}
}
