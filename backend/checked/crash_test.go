package checked

import (
	"bytes"
	"fmt"
	"maps"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/protection"
)

// A medium is a disk with a volatile cache: a loss of power keeps of what was written since the last sync any
// part, in sectors of 512 bytes.
type medium struct {
	mu      sync.Mutex
	now     map[int64][sectorLen]byte // what is read; sectors that are absent are zeros
	durable map[int64][sectorLen]byte // what a loss of power keeps in any case
	pending map[int64][]byte          // sectors that may be lost, with each content since the last sync
	calls   *int                      // writes and syncs of all media
	size    int64
	bs      uint32
}

func newMedium(size int64, bs uint32, calls *int) *medium {
	return &medium{
		now: map[int64][sectorLen]byte{}, durable: map[int64][sectorLen]byte{}, pending: map[int64][]byte{}, calls: calls, size: size, bs: bs,
	}
}

// powerLoss returns the medium after a loss of power, or after kill -9, which keeps everything that was written.
func (m *medium) powerLoss(r *rand.Rand, killed bool) *medium {
	next := newMedium(m.size, m.bs, m.calls)
	maps.Copy(next.durable, m.durable)
	for at, versions := range m.pending {
		k := r.IntN(len(versions)/sectorLen + 1) // 0: none of them
		if killed {
			k = len(versions) / sectorLen
		}
		if k > 0 {
			next.durable[at] = [sectorLen]byte(versions[(k-1)*sectorLen:])
		}
	}
	maps.Copy(next.now, next.durable)
	return next
}

func (m *medium) Info() backend.Info {
	return backend.Info{Size: m.size, BlockSize: m.bs, PhysicalBlockSize: m.bs, VolatileCache: true}
}

func (m *medium) ReadAt(p []byte, off int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.Info().CheckRange(off, int64(len(p))); err != nil {
		return err
	}
	for len(p) > 0 {
		sector := off &^ (sectorLen - 1)
		b := m.now[sector]
		n := copy(p, b[off-sector:])
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// errPower ends each call after the loss of power.
var errPower = fmt.Errorf("no power")

// write writes in sectors.
//
// Preconditions: m.mu is held.
func (m *medium) write(p []byte, off int64) error {
	if err := m.Info().CheckRange(off, int64(len(p))); err != nil {
		return err
	}
	for len(p) > 0 { // the loss of power may be between two sectors
		if *m.calls--; *m.calls < 0 {
			return errPower
		}
		sector := off &^ (sectorLen - 1)
		n := min(int64(len(p)), sector+sectorLen-off)
		b := m.now[sector]
		copy(b[off-sector:], p[:n])
		m.now[sector] = b
		m.pending[sector] = append(m.pending[sector], b[:]...)
		p, off = p[n:], off+n
	}
	return nil
}

func (m *medium) WriteAt(p []byte, off int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.write(p, off)
}

func (m *medium) WriteDurable(p []byte, off int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.write(p, off); err != nil {
		return err
	}
	for sector := off &^ (sectorLen - 1); sector < off+int64(len(p)); sector += sectorLen {
		m.durable[sector] = m.now[sector]
		delete(m.pending, sector)
	}
	return nil
}

func (m *medium) Sync() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if *m.calls--; *m.calls < 0 {
		return errPower
	}
	for sector := range m.pending {
		m.durable[sector] = m.now[sector]
	}
	clear(m.pending)
	return nil
}

func (m *medium) Discard(off, n int64) error { return m.WriteAt(make([]byte, n), off) }
func (m *medium) Zero(off, n int64) error    { return m.WriteAt(make([]byte, n), off) }
func (m *medium) Close() error               { return m.Sync() }

// Extent reports sectors that were never written as a hole.
func (m *medium) Extent(off int64) (mapped bool, n int64, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	at := off &^ (sectorLen - 1)
	_, mapped = m.now[at]
	for at += sectorLen; at < m.size; at += sectorLen {
		if _, is := m.now[at]; is != mapped {
			break
		}
	}
	return mapped, at - off, nil
}

// Resize implements backend.Resizer for the one size.
func (m *medium) Resize(int64) error { return nil }

// After a loss of power, or kill -9, at any moment, each block that was synced reads as it was, each other block
// reads as something that was written, and no block is corrupt. Only regions without a bit are verified then, and in
// them a flipped bit is found. Protection information is that of the data, and the tags of what was synced remain.
func TestPowerLoss(t *testing.T) {
	for name, typ := range types {
		t.Run(name, func(t *testing.T) { testPowerLoss(t, typ) })
	}
}

func testPowerLoss(t *testing.T, typ protection.Type) {
	const (
		size  = 3 * regionSpan
		spots = 12 // blocks that the test writes, in all regions
	)
	rounds := 400
	if testing.Short() {
		rounds = 60
	}
	verified := 0
	for seed := range uint64(rounds) {
		r := rand.New(rand.NewPCG(seed, 5))
		calls := 1 << 60
		data, sums := newMedium(size, 512, &calls), newMedium(kinds[typ].sideSize(size, 512), 512, &calls)
		s, err := openOn(data, sums, Config{ID: NewID(), Create: true, Protection: typ})
		must(t, "openOn", err)
		for r := range int64(3) { // without a keeper, so that a seed is a course of events
			s.intent.adopt(r)
			s.intent.trust(r)
		}
		id := fmt.Sprintf("%x", s.side.id)
		at := func(i int) int64 { return int64(i%3)*regionSpan + int64(i/3)*512*7 }
		var synced, last [spots]byte
		var tried [spots][]byte
		list := []int64(nil)
		calls = r.IntN(120)
		for {
			i := r.IntN(spots)
			switch k := r.IntN(10); {
			case k < 5:
				if r.IntN(3) == 0 { // only in one region, so that others become clean
					i -= i % 3
				}
				last[i]++
				tried[i] = append(tried[i], last[i])
				err = writeVersion(s, last[i], at(i))
			case k < 7:
				if err = s.Sync(); err == nil {
					synced = last
					tried = [spots][]byte{}
				}
			default: // the keeper
				list, _ = s.intent.quiet(list[:0])
				if len(list) > 0 {
					if err = s.syncBoth(); err == nil {
						synced, tried = last, [spots][]byte{}
						err = s.intent.clean(list, s.sums.WriteAt)
					}
				}
			}
			if err != nil {
				break
			}
		}
		calls = 1 << 60
		killed := seed%4 == 0
		data, sums = data.powerLoss(r, killed), sums.powerLoss(r, killed)
		s, err = openOn(data, sums, Config{ID: id, Protection: typ})
		must(t, fmt.Sprintf("seed %d: open after the loss", seed), err)
		p := make([]byte, 512)
		for pass := range 2 { // before and after the stale regions have new checksums
			for i := range spots {
				if err := s.ReadAt(p, at(i)); err != nil {
					t.Fatalf("seed %d, pass %d, block %d: %v", seed, pass, i, err)
				}
				ok := p[0] == synced[i]
				for _, v := range tried[i] {
					ok = ok || p[0] == v
				}
				if !ok {
					t.Fatalf("seed %d, pass %d, block %d has version %d, want %d or one of %v", seed, pass, i, p[0], synced[i], tried[i])
				}
				if typ != protection.None {
					wantTags(t, s, fmt.Sprintf("seed %d, pass %d, block %d", seed, pass, i), at(i), len(tried[i]) == 0)
				}
			}
			for r := s.intent.nextStale(0); pass == 0 && r >= 0; r = s.intent.nextStale(r + 1) {
				must(t, "adopt", s.adopt(r, make([]byte, adoptStep)))
			}
			if pass == 0 {
				verified += 3 - int(s.Counts().Stale/regionSpan)
			}
		}
		for i := range spots {
			b := data.now[at(i)]
			if typ != protection.None && b[0] == 0 {
				continue // it was never written, or that is lost: nothing protects it
			}
			b[9] ^= 4
			data.now[at(i)] = b
			if s.ReadAt(p, at(i)) == nil {
				t.Fatalf("seed %d: a flipped bit of block %d was not found", seed, i)
			}
		}
	}
	if verified == 0 {
		t.Error("no region was ever clean: the test shows nothing")
	}
}

// writeVersion writes a block, with tags of the initiator if there are any.
func writeVersion(s *Store, version byte, at int64) error {
	block := filled(version)
	if s.typ == protection.None {
		return s.WriteAt(block, at)
	}
	t := s.typ.Generate(block, uint64(at/s.bs), nil)
	return s.WriteProtected(protected(block, protection.New(t.Guard(), uint16(version)|0x700, t.Ref())), at, false)
}

// protected returns a block with protection information.
func protected(block []byte, t protection.Tuple) []byte {
	p := append(bytes.Clone(block), make([]byte, protection.Len)...)
	t.Put(p[len(block):])
	return p
}

// wantTags checks the protection information of a block of writeVersion. synced: it has the tags that it got.
func wantTags(t *testing.T, s *Store, what string, at int64, synced bool) {
	t.Helper()
	p := make([]byte, s.wireLen())
	must(t, what, s.ReadProtected(p, at, protection.CheckAll))
	tag := protection.Get(p[s.bs:])
	switch {
	case p[0] == 0 && tag == protection.Unwritten:
	case protection.CRC(p[:s.bs]) != tag.Guard():
		t.Errorf("%s: guard %#x of version %d", what, tag.Guard(), p[0])
	case synced && tag.App() != uint16(p[0])|0x700:
		t.Errorf("%s: application tag %#x of version %d", what, tag.App(), p[0])
	}
}

func filled(version byte) []byte {
	p := make([]byte, 512)
	for i := range p {
		p[i] = version
	}
	return p
}

// The keeper clears bits of regions that nobody writes to, so a crash later leaves nothing to compute.
func TestKeeperCleans(t *testing.T) {
	calls := 1 << 60
	data, sums := newMedium(2*regionSpan, 512, &calls), newMedium(kinds[0].sideSize(2*regionSpan, 512), 512, &calls)
	s, err := openOn(data, sums, Config{ID: NewID(), Create: true})
	must(t, "openOn", err)
	s.idle = 10 * time.Millisecond
	go s.keep()
	settle(t, s)
	must(t, "WriteAt", s.WriteAt(filled(1), 0))
	for end := time.Now().Add(20 * time.Second); s.intent.word(0).Load() != 0 || s.intent.word(1).Load() != 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("regions keep their bits")
		}
	}
	s.endKeeper()
	must(t, "Sync", sums.Sync())
	s, err = openOn(data, sums, Config{ID: fmt.Sprintf("%x", s.side.id)})
	must(t, "openOn", err)
	if n := s.Counts().Stale; n != 0 {
		t.Errorf("%d bytes are stale", n)
	}
}
