// Package checked adds checksums to a backend.Store. A Store of this package keeps the CRC32C of
// each block in a side file, and verifies it whenever the block is read. A block that differs from
// its checksum ends in a CorruptError with its offset, never in wrong data.
//
// With a protection type, a Store keeps protection information of T10 instead (package protection): 8
// bytes for each block, which initiators can read and write with the block. Here it is called a
// checksum, too. The differences are in protected.go.
//
// # Unit
//
// A checksum belongs to one logical block of the LUN, not to a larger unit. Initiators write whole
// blocks, so a write never has to read and verify neighbours, and a torn write damages no other
// block. A mismatch names the exact LBA, and a write of that block mends it. The side file has 4
// bytes for each block: 0.8 % of the size with blocks of 512 bytes, 0.1 % with 4096. Checksums are
// stored so that those of blocks of zeros are 0: where the data has a hole, the side file has one, too.
//
// # Crashes
//
// Data and checksums are two files, so a crash can keep one without the other. The side file
// therefore has a map with a bit for each region of 16 MiB. The bit is durable before the first
// write into the region begins, and is cleared some time after the writes have ended and both files
// were synced. After a crash the regions with a bit are stale: their checksums are computed from the
// data in the background. Until then, and only there, a block that differs from its checksum is
// trusted. A sync of the LUN costs nothing more: checksums that it does not make durable belong to
// regions with a bit.
//
// # Concurrency
//
// A read takes no lock. If a block does not match, a write may be in progress, so the read looks
// again while it excludes writes. Writes exclude each other by pieces of 64 KiB.
package checked

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/protection"
	"github.com/iser-target/iser-target/rdma/crc32c"
)

const (
	regionSpan = 16 << 20 // bytes of data that a bit of the map is about
	pieceSpan  = 64 << 10 // bytes of data that a lock is about
	stripes    = 256      // locks; piece i belongs to lock i%stripes
	sumLen     = 4        // bytes of a checksum without protection
	maxSumLen  = protection.Len
	chunk      = 4096 // checksums that are read or written at once
	eraseStep  = 16 * regionSpan
	maxBad     = 4096 // bad blocks that a Store remembers
	maxBlock   = 4096
)

// A Store is a backend.Store with checksums.
type Store struct {
	below    backend.Store
	info     backend.Info // apart from Size: see size
	bs       int64        // bytes of a block
	zero     uint32       // CRC32C of a block of zeros
	kind     *kind
	typ      protection.Type // of kind
	sumLen   int             // bytes of a checksum
	tags     atomic.Pointer[protection.AppTags]
	awaiting atomic.Bool // SetAppTags was not called yet, and the keeper waits for it
	size     atomic.Int64
	side     *sideFile
	sums     backend.Store // of side
	intent   intent
	locks    [stripes]paddedMutex
	works    sync.Pool
	resizing sync.Mutex // held by Grow, Resize and Recover, before mu
	resting  sync.Mutex // held by the keeper while it does something, and by Grow
	atRest   atomic.Bool

	mu     sync.RWMutex // held for reading by calls, for writing by Close
	closed bool         // guarded by mu

	verified, mismatches, untrusted atomic.Uint64
	adopted                         atomic.Uint64
	bad                             badBlocks
	corrupt                         func(off int64, notReported uint64)
	reported                        atomic.Int64 // when corrupt was called last, in ns since 1970
	notReported                     atomic.Uint64

	wake chan struct{} // has a value: the keeper has work
	stop chan struct{} // closed: the keeper ends
	done chan struct{} // closed: it has ended
	idle time.Duration // see cleanAfter
}

// A paddedMutex has a cache line of its own.
type paddedMutex struct {
	sync.Mutex
	_ [56]byte
}

// A work is the memory of one call.
type work struct {
	sums       [chunk * maxSumLen]byte
	head, tail [maxBlock]byte // blocks of which the call uses a part
}

func newStore(below backend.Store, side *sideFile, c Config) *Store {
	info := below.Info()
	info.AtomicUnit, info.AtomicWrite = 0, 0 // the block and its checksum are two writes: see OpenMemory
	s := &Store{
		below: below, info: info, bs: int64(info.BlockSize), side: side, sums: side.store, corrupt: c.Corrupt,
		kind: side.kind, typ: side.kind.typ, sumLen: side.kind.sumLen,
		wake: make(chan struct{}, 1), stop: make(chan struct{}), done: make(chan struct{}), idle: cleanAfter,
	}
	s.awaiting.Store(c.AwaitAppTags)
	s.zero = crc32c.Checksum(make([]byte, s.bs))
	s.size.Store(info.Size)
	s.works.New = func() any { return new(work) }
	s.intent.init(side.store, s.wakeKeeper)
	return s
}

// Info implements backend.Store.
func (s *Store) Info() backend.Info {
	info := s.info
	info.Size = s.size.Load()
	return info
}

// enter begins a call on [off, off+n). Unless it fails, leave follows.
func (s *Store) enter(off, n int64, changes bool) error {
	s.mu.RLock()
	var err error
	switch {
	case s.closed:
		err = backend.ErrClosed
	case changes && s.info.ReadOnly:
		err = backend.ErrReadOnly
	default:
		err = s.checkRange(off, n)
	}
	if err != nil {
		s.mu.RUnlock()
	}
	return err
}

func (s *Store) leave() { s.mu.RUnlock() }

func (s *Store) checkRange(off, n int64) error {
	return backend.Info{Size: s.size.Load()}.CheckRange(off, n)
}

// lock excludes other changes of the pieces of [off, end), until unlock. Locks are taken in
// ascending order, so no two calls wait for one another.
func (s *Store) lock(off, end int64) {
	s.eachLock(off, end, (*paddedMutex).lock)
}

func (s *Store) unlock(off, end int64) {
	s.eachLock(off, end, (*paddedMutex).unlock)
}

func (m *paddedMutex) lock()   { m.Mutex.Lock() }
func (m *paddedMutex) unlock() { m.Mutex.Unlock() }

// wait returns when the present holder of m has released it.
func (m *paddedMutex) wait() {
	m.lock()
	m.unlock()
}

// eachLock calls f for the locks of [off, end), which is not empty, in ascending order.
func (s *Store) eachLock(off, end int64, f func(*paddedMutex)) {
	first, last := off/pieceSpan, (end-1)/pieceSpan
	from, to := first%stripes, last%stripes
	switch {
	case last-first >= stripes-1:
		from, to = 0, stripes-1
	case from > to: // around the end
		for i := int64(0); i <= to; i++ {
			f(&s.locks[i])
		}
		to = stripes - 1
	}
	for i := from; i <= to; i++ {
		f(&s.locks[i])
	}
}

// align returns the range of the whole blocks that [off, off+n) touches.
func (s *Store) align(off, n int64) (first, end int64) {
	return off &^ (s.bs - 1), (off + n + s.bs - 1) &^ (s.bs - 1)
}

// sum returns what the side file stores for a block at off.
func (s *Store) sum(block []byte, off int64) uint64 {
	if s.typ != protection.None {
		return stored(s.typ.Generate(block, uint64(off/s.bs), s.tags.Load()))
	}
	return uint64(crc32c.Checksum(block) ^ s.zero)
}

// sumAt returns the offset in the side file of the checksum of the block at off.
func (s *Store) sumAt(off int64) int64 { return sumsAt + off/s.bs*int64(s.sumLen) }

// ReadAt implements backend.Store. It returns a backend.CorruptError for the first block that differs from
// its checksum; p is indeterminate then.
func (s *Store) ReadAt(p []byte, off int64) error {
	n := int64(len(p))
	if err := s.enter(off, n, false); err != nil {
		return err
	}
	defer s.leave()
	if n == 0 {
		return nil
	}
	w := s.works.Get().(*work)
	defer s.works.Put(w)
	if first := off &^ (s.bs - 1); first != off { // the end of a block
		block := w.head[:s.bs]
		if err := s.readBlocks(w, block, first); err != nil {
			return err
		}
		k := copy(p, block[off-first:])
		p, off = p[k:], off+int64(k)
	}
	if whole := int64(len(p)) &^ (s.bs - 1); whole > 0 {
		if err := s.readBlocks(w, p[:whole], off); err != nil {
			return err
		}
		p, off = p[whole:], off+whole
	}
	if len(p) > 0 { // the beginning of a block
		block := w.head[:s.bs]
		if err := s.readBlocks(w, block, off); err != nil {
			return err
		}
		copy(p, block)
	}
	return nil
}

// readBlocks reads and verifies whole blocks.
func (s *Store) readBlocks(w *work, p []byte, off int64) error {
	if err := s.below.ReadAt(p, off); err != nil {
		return err
	}
	_, err := s.verify(w, p, off, s.below.ReadAt, false)
	return err
}

// verify compares blocks with their checksums. read reads a block that differs again. With all,
// verify does not end at the first bad block; it returns how many there are, and the error of the first. An application tag
// is no damage then: see judge.
func (s *Store) verify(w *work, p []byte, off int64, read func([]byte, int64) error, all bool) (bad int, first error) {
	checks := protection.CheckAll
	if all {
		checks &^= protection.CheckApp
	}
	for len(p) > 0 {
		n := min(len(p), chunk*int(s.bs))
		sums := w.sums[:n/int(s.bs)*s.sumLen]
		if err := s.readSums(sums, off); err != nil {
			return bad, err
		}
		for i := 0; i < len(sums); i += s.sumLen {
			block := p[:s.bs]
			if s.differs(block, off, s.getSum(sums[i:]), checks) {
				switch _, err := s.lookAgain(block, off, read, checks); {
				case err == nil:
				case all && errors.Is(err, backend.ErrCorrupt):
					if bad++; first == nil {
						first = err
					}
				default:
					return bad, err
				}
			}
			p, off = p[s.bs:], off+s.bs
		}
		s.verified.Add(uint64(len(sums) / s.sumLen))
	}
	return bad, first
}

// readSums reads the checksums of the blocks from off on.
func (s *Store) readSums(sums []byte, off int64) error {
	err := s.sums.ReadAt(sums, s.sumAt(off))
	if err == nil {
		return nil
	}
	if err := s.checkRange(off, int64(len(sums)/s.sumLen)*s.bs); err != nil {
		return err // a Resize has cut it off meanwhile
	}
	return fmt.Errorf("read %s: %w", s.kind.content, s.hideRange(err))
}

// hideRange returns err as one that is not about the range of the Store.
func (s *Store) hideRange(err error) error {
	if errors.Is(err, backend.ErrRange) {
		return fmt.Errorf("the %s is too short", s.kind.file)
	}
	return err
}

// differs reports whether a block at off differs from its checksum. Of protection information, checks says what counts.
func (s *Store) differs(block []byte, off int64, sum uint64, checks protection.Checks) bool {
	if s.typ != protection.None {
		return s.typ.CheckRead(block, tuple(sum), uint64(off/s.bs), checks, s.tags.Load()) != 0
	}
	return s.sum(block, off) != sum
}

// lookAgain reads a block that differs from its checksum again, while it excludes changes, and returns its checksum.
func (s *Store) lookAgain(block []byte, off int64, read func([]byte, int64) error, checks protection.Checks) (sum uint64, err error) {
	s.lock(off, off+s.bs)
	defer s.unlock(off, off+s.bs)
	if err := s.checkRange(off, s.bs); err != nil {
		return 0, err
	}
	if err := read(block, off); err != nil {
		return 0, err
	}
	if sum, err = s.storedSum(off); err != nil {
		return 0, err
	}
	return s.judge(block, off, sum, checks)
}

// storedSum reads one checksum.
func (s *Store) storedSum(off int64) (uint64, error) {
	w := s.works.Get().(*work)
	defer s.works.Put(w)
	b := w.sums[:s.sumLen]
	if err := s.readSums(b, off); err != nil {
		return 0, err
	}
	return s.getSum(b), nil
}

// judge returns a CorruptError unless the block has that checksum, or is in a stale region. It returns the checksum that
// the block has, or has to get. Of protection information, checks says what counts. An application tag that initiators
// have declared and that differs is no damage: nobody knows which of the two is wrong.
//
// Preconditions: the lock of the block is held.
func (s *Store) judge(block []byte, off int64, sum uint64, checks protection.Checks) (uint64, error) {
	stale := s.intent.isStale(off / regionSpan)
	field := protection.Field(0)
	if s.typ != protection.None {
		if stale && s.repairs(block, sum) {
			s.untrusted.Add(1)
			return s.repaired(block, off, sum), nil
		}
		switch field = s.typ.CheckRead(block, tuple(sum), uint64(off/s.bs), checks, s.tags.Load()); field {
		case 0:
			return sum, nil
		case protection.App:
			return sum, &backend.CorruptError{Offset: off, Field: field}
		}
	} else if now := s.sum(block, off); now == sum {
		return sum, nil
	} else if stale {
		s.untrusted.Add(1)
		return now, nil
	}
	s.mismatches.Add(1)
	s.bad.add(off)
	s.report(off)
	return sum, &backend.CorruptError{Offset: off, Field: field}
}

// reportInterval is the shortest time between two calls of Config.Corrupt.
const reportInterval = time.Second

// report calls Config.Corrupt, but not too often.
func (s *Store) report(off int64) {
	if s.corrupt == nil {
		return
	}
	now, last := time.Now().UnixNano(), s.reported.Load()
	if since := time.Duration(now - last); since >= 0 && since < reportInterval || !s.reported.CompareAndSwap(last, now) {
		s.notReported.Add(1)
		return
	}
	s.corrupt(off, s.notReported.Swap(0))
}

// WriteAt implements backend.Store. A part of a block that is corrupt cannot be written: the
// CorruptError says so, and nothing was changed.
func (s *Store) WriteAt(p []byte, off int64) error {
	return s.change(p, off, int64(len(p)), opWrite)
}

// WriteDurable implements backend.Store.
func (s *Store) WriteDurable(p []byte, off int64) error {
	return s.change(p, off, int64(len(p)), opWriteDurable)
}

// Discard implements backend.Store.
func (s *Store) Discard(off, n int64) error { return s.erase(off, n, opDiscard) }

// Zero implements backend.Store.
func (s *Store) Zero(off, n int64) error { return s.erase(off, n, opZero) }

// An op is a call that changes data.
type op int

const (
	opWrite op = iota
	opWriteDurable
	opDiscard
	opZero
	opFormat // as opZero, and nothing is checked until it is written
)

// call makes the call of the store below.
func (s *Store) call(c *content) error {
	switch c.op {
	case opWrite:
		return s.below.WriteAt(c.p, c.off)
	case opWriteDurable:
		return s.below.WriteDurable(c.p, c.off)
	case opDiscard:
		return s.below.Discard(c.off, c.end-c.off)
	}
	return s.below.Zero(c.off, c.end-c.off)
}

// erase changes a range in steps, so that it does not keep all others out for long.
func (s *Store) erase(off, n int64, o op) error {
	if err := s.enter(off, n, true); err != nil {
		return err
	}
	s.leave()
	for n > 0 {
		step := min(n, eraseStep-off%eraseStep)
		if err := s.change(nil, off, step, o); err != nil {
			return err
		}
		off, n = off+step, n-step
	}
	return nil
}

// change changes [off, off+n) to p, or to zeros if p is nil, and its checksums.
func (s *Store) change(p []byte, off, n int64, o op) error {
	if err := s.enter(off, n, true); err != nil {
		return err
	}
	defer s.leave()
	if n == 0 {
		return nil
	}
	first, end := s.align(off, n)
	s.lock(first, end)
	defer s.unlock(first, end)
	if err := s.checkRange(off, n); err != nil { // a Resize that began meanwhile does not wait for this call
		return err
	}
	w := s.works.Get().(*work)
	defer s.works.Put(w)
	return s.changeLocked(w, &content{p: p, off: off, end: off + n, op: o}, first, end)
}

// changeLocked does what change does for whole blocks.
//
// Preconditions: the locks of [first, end) are held, and all of them are in the Store.
func (s *Store) changeLocked(w *work, c *content, first, end int64) error {
	if err := s.merge(w, c, first, end); err != nil {
		return err
	}
	r, last := first/regionSpan, (end-1)/regionSpan
	if err := s.intent.enter(r, last); err != nil {
		return fmt.Errorf("note a change in the %s: %w", s.kind.file, s.hideRange(err))
	}
	defer s.intent.leave(r, last)
	if err := s.call(c); err != nil {
		s.mend(w, c, first, end)
		return err
	}
	if err := s.writeSums(w, c, first, end); err != nil {
		s.intent.makeStale(r, last)
		return fmt.Errorf("write %s: %w", s.kind.content, s.hideRange(err))
	}
	s.bad.remove(first, end)
	return nil
}

// content is what blocks become.
type content struct {
	p          []byte // nil: zeros
	off, end   int64  // of p
	op         op
	wire       []byte // p with protection information after each block; nil: it is generated
	head, tail uint64 // the checksums of a first and last block of which off and end are within
}

// merge reads and verifies the first and the last block if only a part of them changes, and
// computes their new checksums.
//
// Preconditions: the locks of [first, end) are held.
func (s *Store) merge(w *work, c *content, first, end int64) error {
	if c.off == first && c.end == end {
		return nil
	}
	one := func(block []byte, at int64) (uint64, error) {
		if err := s.below.ReadAt(block, at); err != nil {
			return 0, err
		}
		sum, err := s.storedSum(at)
		if err == nil {
			_, err = s.judge(block, at, sum, protection.CheckAll&^protection.CheckApp)
		}
		if err != nil {
			return 0, err
		}
		from, to := max(c.off, at)-at, min(c.end, at+s.bs)-at
		if c.p == nil {
			clear(block[from:to])
		} else {
			copy(block[from:to], c.p[at+from-c.off:])
		}
		return s.sum(block, at), nil
	}
	var err error
	if c.off > first || c.end < first+s.bs {
		if c.head, err = one(w.head[:s.bs], first); err != nil {
			return err
		}
	}
	if last := end - s.bs; c.end < end && last != first {
		c.tail, err = one(w.tail[:s.bs], last)
	}
	return err
}

// newSum returns the checksum that the block at that offset gets.
func (s *Store) newSum(c *content, at int64) uint64 {
	switch {
	case at < c.off || at <= c.off && at+s.bs > c.end:
		return c.head
	case at+s.bs > c.end:
		return c.tail
	case c.wire != nil:
		return stored(protection.Get(c.wire[(at-c.off)/s.bs*(s.bs+protection.Len)+s.bs:]))
	case c.p == nil && c.op == opZero && s.typ != protection.None:
		return stored(s.typ.OfZeros(uint64(at/s.bs), s.tags.Load()))
	case c.p == nil:
		return 0
	}
	return s.sum(c.p[at-c.off:][:s.bs], at)
}

// writeSums writes the checksums of [first, end).
func (s *Store) writeSums(w *work, c *content, first, end int64) error {
	if c.p == nil && (c.op != opZero || s.typ == protection.None) {
		return s.eraseSums(w, c, first, end)
	}
	write := s.sums.WriteAt
	if c.op == opWriteDurable && s.typ != protection.None { // tags cannot be computed again
		write = s.sums.WriteDurable
	}
	for at := first; at < end; {
		i := 0
		pos := s.sumAt(at)
		for ; at < end && i < len(w.sums); i += s.sumLen {
			s.putSum(w.sums[i:], s.newSum(c, at))
			at += s.bs
		}
		if err := write(w.sums[:i], pos); err != nil {
			return err
		}
	}
	return nil
}

// punchFrom is how many bytes of checksums are worth a hole.
const punchFrom = 64 << 10

// eraseSums writes the checksums of zeros to [first, end).
func (s *Store) eraseSums(w *work, c *content, first, end int64) error {
	pos, n := s.sumAt(first), (end-first)/s.bs*int64(s.sumLen)
	if n >= punchFrom {
		if err := s.sums.Discard(pos, n); err != nil {
			return err
		}
	} else {
		clear(w.sums[:min(n, int64(len(w.sums)))])
		for at := int64(0); at < n; at += int64(len(w.sums)) {
			if err := s.sums.WriteAt(w.sums[:min(n-at, int64(len(w.sums)))], pos+at); err != nil {
				return err
			}
		}
	}
	for _, at := range [...]int64{first, end - s.bs} { // blocks of which a part remains
		if sum := s.newSum(c, at); sum != 0 {
			s.putSum(w.sums[:], sum)
			if err := s.sums.WriteAt(w.sums[:s.sumLen], s.sumAt(at)); err != nil {
				return err
			}
		}
	}
	return nil
}

// mend gives the blocks of a change that has failed the checksums of what they are now: the old
// data or the new. A block that is neither stays corrupt until it is written. If mend cannot read or
// write either, it makes the regions stale.
//
// Preconditions: the locks of [first, end) are held.
func (s *Store) mend(w *work, c *content, first, end int64) {
	block := make([]byte, s.bs) // a change that fails may allocate
	for at := first; at < end; at += s.bs {
		old, err := s.storedSum(at)
		if err == nil {
			err = s.below.ReadAt(block, at)
		}
		if err == nil {
			if next := s.newSum(c, at); !s.isOf(block, at, old) && s.isOf(block, at, next) {
				s.putSum(w.sums[:], next)
				err = s.sums.WriteAt(w.sums[:s.sumLen], s.sumAt(at))
			}
		}
		if err != nil {
			s.intent.makeStale(at/regionSpan, (end-1)/regionSpan)
			return
		}
	}
}

// Sync implements backend.Store. It does not sync the side file: see the package. Protection information is not only
// computed, so a side file that has it is synced.
func (s *Store) Sync() error {
	if err := s.enter(0, 0, false); err != nil {
		return err
	}
	defer s.leave()
	if err := s.below.Sync(); err != nil || s.typ == protection.None {
		return err
	}
	return s.sums.Sync()
}

// Close implements backend.Store. After it, no region of the side file is stale unless it was
// before, or the sync has failed.
func (s *Store) Close() error {
	s.mu.RLock()
	closed := s.closed
	s.mu.RUnlock()
	if !closed {
		s.endKeeper()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return backend.ErrClosed
	}
	s.closed = true
	err := s.below.Close()
	if err == nil && !s.info.ReadOnly && !s.atRest.Load() {
		if err = s.sums.Sync(); err == nil {
			err = s.intent.cleanAll()
		}
	}
	return errors.Join(err, s.sums.Close())
}

// Counts says what a Store did, and how it is.
type Counts struct {
	Verified   uint64 // blocks that were compared with their checksums
	Mismatches uint64 // of these, blocks that differed
	Untrusted  uint64 // blocks of stale regions that differed, which is not an error there
	Bad        int    // blocks that are known to be corrupt, up to 4096
	Stale      int64  // bytes of the regions whose checksums have to be computed
	Adopted    uint64 // blocks of stale regions that got another checksum
}

// Counts returns the counts of s.
func (s *Store) Counts() Counts {
	bad, _ := s.bad.get()
	return Counts{
		Verified: s.verified.Load(), Mismatches: s.mismatches.Load(), Untrusted: s.untrusted.Load(), Adopted: s.adopted.Load(),
		Bad: bad, Stale: s.intent.stale.Load() * regionSpan,
	}
}

// badBlocks are the blocks that are known to be corrupt.
type badBlocks struct {
	n  atomic.Int64 // len(at)
	mu sync.Mutex
	at map[int64]struct{}
}

func (b *badBlocks) add(off int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.at == nil {
		b.at = map[int64]struct{}{}
	}
	if len(b.at) < maxBad {
		b.at[off] = struct{}{}
		b.n.Store(int64(len(b.at)))
	}
}

// remove forgets the blocks of [first, end).
func (b *badBlocks) remove(first, end int64) {
	if b.n.Load() == 0 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for off := range b.at {
		if off >= first && off < end {
			delete(b.at, off)
		}
	}
	b.n.Store(int64(len(b.at)))
}

// list returns the blocks.
func (b *badBlocks) list() []int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Sorted(maps.Keys(b.at))
}

// get returns how many blocks there are, and the first.
func (b *badBlocks) get() (n int, first int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	first = -1
	for off := range b.at {
		if first < 0 || off < first {
			first = off
		}
	}
	return len(b.at), first
}
