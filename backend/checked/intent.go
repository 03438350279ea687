package checked

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/rdma/crc32c"
)

// The map of regions is a sequence of sectors of 512 bytes, which disks write entirely or not at all.
// A sector has the bits of 4064 regions and a checksum. A sector of zeros is valid: all its regions are
// clean.
const (
	sectorLen  = 512
	sectorBits = (sectorLen - sumLen) * 8
	maxSectors = (sumsAt - mapAt) / sectorLen
	maxSize    = maxSectors * sectorBits * regionSpan
)

// State of a region, in a word. The rest of the word counts the changes in progress.
const (
	dirty   = 1 << 31 // the bit of the region is durable
	touched = 1 << 30 // a change began since the keeper looked
	stale   = 1 << 29 // the checksums are not trusted
	// adopting is set while the keeper computes the checksums, unless the region became stale once more.
	adopting = 1 << 28
	begun    = adopting - 1
)

// intent has the state of the regions, and the map of the side file.
type intent struct {
	store   backend.Store
	wake    func()
	sectors atomic.Pointer[[]*sector]
	stale   atomic.Int64 // regions

	mu    sync.Mutex
	ended sync.Cond // a round has ended; its L is mu
	busy  bool      // a round writes sectors
	fresh []int64   // regions whose bits are set in memory, but not yet durable
	spare []int64   // the memory of the last fresh
	buf   [sectorLen]byte
}

// A sector is a sector of the map.
type sector struct {
	words   [sectorBits]atomic.Uint32
	bits    [sectorLen]byte // guarded by mu of the intent
	unsaved bool            // guarded by it, too: the side file has other bits
}

func (m *intent) init(store backend.Store, wake func()) {
	m.store, m.wake = store, wake
	m.ended.L = &m.mu
	m.sectors.Store(&[]*sector{})
}

// word returns the word of a region.
func (m *intent) word(r int64) *atomic.Uint32 {
	return &(*m.sectors.Load())[r/sectorBits].words[r%sectorBits]
}

// grow makes room for that many regions. Nobody else calls it meanwhile.
func (m *intent) grow(regions int64) {
	list := *m.sectors.Load()
	list = list[:len(list):len(list)]
	for int64(len(list))*sectorBits < regions {
		list = append(list, new(sector))
	}
	m.sectors.Store(&list)
}

var zeroBits = crc32c.Checksum(make([]byte, sectorLen-sumLen))

// sectorSum returns the checksum of a sector of the map. That of zeros is 0; the number of the
// sector is part of the others.
func sectorSum(b *[sectorLen]byte, i int64) uint32 {
	sum := crc32c.Checksum(b[:sectorLen-sumLen]) ^ zeroBits
	if sum != 0 {
		sum ^= uint32(i+1) * 0x9e3779b1
	}
	return sum
}

// load reads the map of that many regions. Regions with a bit are stale.
func (m *intent) load(regions int64) error {
	m.grow(regions)
	for i, sec := range *m.sectors.Load() {
		if err := m.store.ReadAt(sec.bits[:], mapAt+int64(i)*sectorLen); err != nil {
			return err
		}
		if binary.LittleEndian.Uint32(sec.bits[sectorLen-sumLen:]) != sectorSum(&sec.bits, int64(i)) {
			return fmt.Errorf("%w: the map of regions, sector %d", errDamaged, i)
		}
		for b := range int64(sectorBits) {
			switch r := int64(i)*sectorBits + b; {
			case sec.bits[b/8]&(1<<(b%8)) == 0:
			case r < regions:
				sec.words[b].Store(dirty | stale)
				m.stale.Add(1)
			default: // a Resize has cut it off
				sec.bits[b/8] &^= 1 << (b % 8)
			}
		}
	}
	return nil
}

// enter begins a change of regions, and returns when their bits are durable. Unless it fails, leave
// follows.
func (m *intent) enter(first, last int64) error {
	clean := false
	for r := first; r <= last; r++ {
		w := m.word(r)
		for {
			v := w.Load()
			if w.CompareAndSwap(v, v+1|touched) {
				clean = clean || v&dirty == 0
				break
			}
		}
	}
	if !clean {
		return nil
	}
	err := m.setBits(first, last)
	if err != nil {
		m.leave(first, last)
	}
	return err
}

// leave ends a change of regions.
func (m *intent) leave(first, last int64) {
	for r := first; r <= last; r++ {
		m.word(r).Add(^uint32(0))
	}
}

// ahead is how many regions get their bits in advance when one region after the other is written.
const ahead = 7

// setBits makes the bits of regions durable. Concurrent callers share the writes.
func (m *intent) setBits(first, last int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if first > 0 && m.word(first-1).Load()&dirty != 0 {
		last = min(last+ahead, int64(len(*m.sectors.Load()))*sectorBits-1)
	}
	for r := first; r <= last; r++ {
		if m.setBit(r, true) {
			m.fresh = append(m.fresh, r)
		}
	}
	for !m.areDirty(first, last) {
		if m.busy {
			m.ended.Wait()
			continue
		}
		if err := m.round(); err != nil {
			return err
		}
	}
	m.wake()
	return nil
}

// setBit sets or clears the bit of a region in memory, and reports whether it was different.
//
// Preconditions: m.mu is held.
func (m *intent) setBit(r int64, set bool) bool {
	sec := (*m.sectors.Load())[r/sectorBits]
	octet, bit := &sec.bits[r%sectorBits/8], byte(1)<<(r%sectorBits%8)
	if *octet&bit != 0 == set {
		return false
	}
	*octet ^= bit
	sec.unsaved = true
	return true
}

// areDirty reports whether the bits of regions are durable.
func (m *intent) areDirty(first, last int64) bool {
	for r := first; r <= last; r++ {
		if m.word(r).Load()&dirty == 0 {
			return false
		}
	}
	return true
}

// round makes the bits of m.fresh durable.
//
// Preconditions: m.mu is held, and m.busy false. The lock is not held during the round.
func (m *intent) round() error {
	list := m.fresh
	m.fresh, m.spare = m.spare[:0], nil
	err := m.write(list, m.store.WriteDurable)
	if err != nil {
		m.fresh = append(m.fresh, list...) // the next change of one of them tries again
	} else {
		for _, r := range list {
			m.word(r).Or(dirty | touched)
		}
	}
	m.spare = list[:0]
	return err
}

// write writes the sectors of regions that changed.
//
// Preconditions: as for round.
func (m *intent) write(list []int64, write func([]byte, int64) error) error {
	m.busy = true
	var err error
	for _, r := range list {
		i := r / sectorBits
		sec := (*m.sectors.Load())[i]
		if err != nil || !sec.unsaved {
			continue
		}
		sec.unsaved = false
		m.buf = sec.bits
		binary.LittleEndian.PutUint32(m.buf[sectorLen-sumLen:], sectorSum(&m.buf, i))
		m.mu.Unlock()
		err = write(m.buf[:], mapAt+i*sectorLen)
		m.mu.Lock()
		sec.unsaved = sec.unsaved || err != nil
	}
	m.busy = false
	m.ended.Broadcast()
	return err
}

// makeStale makes the checksums of regions untrusted. Their bits are set.
func (m *intent) makeStale(first, last int64) {
	for r := first; r <= last; r++ {
		w := m.word(r)
		for {
			v := w.Load()
			if !w.CompareAndSwap(v, v&^adopting|stale|touched) {
				continue
			}
			if v&stale == 0 {
				m.stale.Add(1)
			}
			break
		}
	}
	m.wake()
}

// isStale reports whether the checksums of a region are not trusted.
func (m *intent) isStale(r int64) bool { return m.word(r).Load()&stale != 0 }

// adopt notes that the checksums of a stale region are about to be computed from the data.
func (m *intent) adopt(r int64) { m.word(r).Or(adopting) }

// trust makes the checksums of a region trusted: they were computed from the data. It does nothing if the
// region became stale once more since adopt.
func (m *intent) trust(r int64) {
	w := m.word(r)
	for {
		v := w.Load()
		if v&(stale|adopting) != stale|adopting {
			return
		}
		if w.CompareAndSwap(v, v&^(stale|adopting)) {
			m.stale.Add(-1)
			return
		}
	}
}

// nextStale returns the first stale region from r on, or -1.
func (m *intent) nextStale(r int64) int64 {
	n := int64(len(*m.sectors.Load())) * sectorBits
	for ; r < n; r++ {
		if m.isStale(r) {
			return r
		}
	}
	return -1
}

// staleSpans returns the stale regions.
func (m *intent) staleSpans() (list []Span) {
	for r := m.nextStale(0); r >= 0; r = m.nextStale(r + 1) {
		if n := len(list); n > 0 && list[n-1].Last == r-1 {
			list[n-1].Last = r
		} else {
			list = append(list, Span{r, r})
		}
	}
	return list
}

// trustOthers trusts the checksums of the regions outside spans, which are ascending. Nobody else uses m yet.
func (m *intent) trustOthers(spans []Span) {
	for r := m.nextStale(0); r >= 0; r = m.nextStale(r + 1) {
		for len(spans) > 0 && spans[0].Last < r {
			spans = spans[1:]
		}
		if len(spans) == 0 || r < spans[0].First {
			m.adopt(r)
			m.trust(r)
		}
	}
}

// quiet appends to list the regions that were not touched since the last call, which may be cleaned after a
// sync. more reports whether there are other regions with a bit.
func (m *intent) quiet(list []int64) (_ []int64, more bool) {
	for i, sec := range *m.sectors.Load() {
		for b := range sec.words {
			switch v := sec.words[b].Load(); {
			case v&dirty == 0:
			case v&(touched|stale|adopting|begun) == 0:
				list = append(list, int64(i)*sectorBits+int64(b))
			default:
				more = true
				sec.words[b].CompareAndSwap(v, v&^touched)
			}
		}
	}
	return list, more
}

// clean clears the bits of regions in list, except those that were touched meanwhile. Their data and
// checksums are durable.
func (m *intent) clean(list []int64, write func([]byte, int64) error) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for m.busy {
		m.ended.Wait()
	}
	cleaned := list[:0]
	for _, r := range list {
		if m.word(r).CompareAndSwap(dirty, 0) {
			m.setBit(r, false)
			cleaned = append(cleaned, r)
		}
	}
	return m.write(cleaned, write)
}

// cleanAll clears the bits of all regions that are not stale, when no call is in progress and everything is
// durable.
func (m *intent) cleanAll() error {
	var list []int64
	for i, sec := range *m.sectors.Load() {
		for b := range sec.words {
			if v := sec.words[b].Load(); v&dirty != 0 && v&stale == 0 {
				sec.words[b].Store(dirty)
				list = append(list, int64(i)*sectorBits+int64(b))
			}
		}
	}
	return m.clean(list, m.store.WriteDurable)
}

// saveAll makes all bits durable once more.
func (m *intent) saveAll() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for m.busy {
		m.ended.Wait()
	}
	var list []int64
	for i, sec := range *m.sectors.Load() {
		sec.unsaved = true
		list = append(list, int64(i)*sectorBits)
	}
	return m.write(list, m.store.WriteDurable)
}

// staleAll makes the regions from first to last stale, with durable bits.
func (m *intent) staleAll(first, last int64) error {
	if err := m.enter(first, last); err != nil {
		return err
	}
	m.makeStale(first, last)
	m.leave(first, last)
	return nil
}

var errDamaged = errors.New("it is damaged")
