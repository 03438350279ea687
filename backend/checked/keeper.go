package checked

import (
	"errors"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/protection"
)

const (
	// cleanAfter is how long nothing is written to a region before the keeper clears its bit.
	cleanAfter = 10 * time.Second
	// adoptStep is how many bytes the keeper reads at a time. Changes of them wait meanwhile.
	adoptStep = 1 << 20
	// adoptTime is how long the keeper computes checksums before it looks after other work.
	adoptTime = 100 * time.Millisecond
	// adoptRetry is how long the keeper waits after it could not read or write something.
	adoptRetry = time.Minute
)

// wakeKeeper wakes the keeper, which has work.
func (s *Store) wakeKeeper() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// endKeeper ends the keeper and waits for it. It may be called again.
func (s *Store) endKeeper() {
	s.resizing.Lock()
	defer s.resizing.Unlock()
	select {
	case <-s.stop:
	default:
		close(s.stop)
	}
	<-s.done
}

// keep runs the keeper, a goroutine that computes the checksums of stale regions and clears bits.
func (s *Store) keep() {
	defer close(s.done)
	if s.info.ReadOnly {
		return
	}
	k := keeper{s: s, look: time.Now().Add(s.idle)}
	for {
		wait, ended := k.turn()
		if ended {
			return
		}
		t := time.NewTimer(wait)
		select {
		case <-s.stop:
			t.Stop()
			return
		case <-s.wake:
		case <-t.C:
		}
		t.Stop()
	}
}

// A keeper is the state of the keeper.
type keeper struct {
	s     *Store
	list  []int64
	look  time.Time // when it looks for regions to clean
	retry time.Time // when it computes checksums again after a failure
}

// turn does what there is to do, and returns how long there is no more, or that the keeper ends.
func (k *keeper) turn() (wait time.Duration, ended bool) {
	s := k.s
	s.resting.Lock()
	defer s.resting.Unlock()
	if s.atRest.Load() {
		return s.idle, false
	}
	if s.intent.stale.Load() > 0 && !s.awaiting.Load() && !time.Now().Before(k.retry) {
		switch err := s.adoptAll(make([]byte, adoptStep)); {
		case errors.Is(err, backend.ErrClosed):
			return 0, true
		case err != nil:
			k.retry = time.Now().Add(adoptRetry)
		}
	}
	more := true
	if !time.Now().Before(k.look) {
		k.list, more = s.intent.quiet(k.list[:0])
		if len(k.list) > 0 && (s.syncBoth() != nil || s.intent.clean(k.list, s.sums.WriteAt) != nil) {
			more = true // the regions keep their bits
		}
		k.look = time.Now().Add(s.idle)
	}
	if !more && s.intent.stale.Load() == 0 {
		return 1 << 62, false // until a region gets a bit
	}
	return max(time.Until(k.look), time.Millisecond), false
}

// syncBoth makes data and checksums durable. If that fails for the checksums, those in memory may be lost,
// too: their regions become stale.
func (s *Store) syncBoth() error {
	if err := s.below.Sync(); err != nil {
		return err
	}
	err := s.sums.Sync()
	if err != nil && !errors.Is(err, backend.ErrUnsynced) {
		for i, sec := range *s.intent.sectors.Load() {
			for b := range sec.words {
				if r := int64(i)*sectorBits + int64(b); sec.words[b].Load()&dirty != 0 {
					s.intent.makeStale(r, r)
				}
			}
		}
	}
	return err
}

// adoptAll computes the checksums of stale regions, until it takes long. It pauses as long as it works, because
// initiators need the store, too.
func (s *Store) adoptAll(buf []byte) error {
	var failed error
	began := time.Now()
	for r := s.intent.nextStale(0); r >= 0; r = s.intent.nextStale(r + 1) {
		switch err := s.adopt(r, buf); {
		case errors.Is(err, backend.ErrClosed):
			return err
		case err != nil:
			failed = err
		}
		if failed == nil && time.Since(began) > adoptTime {
			s.wakeKeeper()
			return nil
		}
	}
	return failed
}

// adopt computes the checksums of a stale region from its data.
func (s *Store) adopt(r int64, buf []byte) error {
	s.intent.adopt(r)
	for off := r * regionSpan; off < min((r+1)*regionSpan, s.size.Load()); {
		began := time.Now()
		n, err := s.adoptPiece(off, (r+1)*regionSpan, buf)
		if err != nil {
			return err
		}
		off += n
		select {
		case <-s.stop:
			return backend.ErrClosed
		case <-time.After(time.Since(began)):
		}
	}
	s.intent.trust(r)
	return nil
}

// adoptPiece computes the checksums of some bytes at off, and returns how many; 0: a Resize has changed the end.
func (s *Store) adoptPiece(off, end int64, buf []byte) (int64, error) {
	end = min(end, s.size.Load())
	if off >= end {
		return 0, nil
	}
	mapped, n, err := backend.Extent(s.below, off)
	if err != nil {
		return 0, err
	}
	n = min(n, end-off)
	if mapped || n < s.bs {
		n = min(int64(len(buf)), end-off)
	}
	n &^= s.bs - 1
	s.lock(off, off+n)
	defer s.unlock(off, off+n)
	if s.checkRange(off, n) != nil {
		return 0, nil
	}
	w := s.works.Get().(*work)
	defer s.works.Put(w)
	if n > int64(len(buf)) || !mapped {
		// The range had a hole before it was locked. It counts only if it still has.
		again, k, err := backend.Extent(s.below, off)
		if err != nil {
			return 0, err
		}
		if !again && k >= n && s.typ != protection.None {
			return n, s.adoptHole(w, off, n)
		}
		if !again && k >= n {
			return n, s.eraseSums(w, &content{off: off, end: off + n}, off, off+n)
		}
		n = min(n, int64(len(buf)))
	}
	p := buf[:n]
	if err := s.below.ReadAt(p, off); err != nil {
		return 0, err
	}
	for at := int64(0); at < n; {
		k := min(n-at, chunk*s.bs)
		sums := w.sums[:k/s.bs*int64(s.sumLen)]
		if err := s.readSums(sums, off+at); err != nil {
			return 0, err
		}
		pos, changed := s.sumAt(off+at), uint64(0)
		for i := 0; i < len(sums); i += s.sumLen {
			old := s.getSum(sums[i:])
			if sum := s.adoptedSum(p[at:][:s.bs], off+at, old); sum != old {
				s.putSum(sums[i:], sum)
				changed++
			}
			at += s.bs
		}
		if changed > 0 {
			s.adopted.Add(changed)
			if err := s.sums.WriteAt(sums, pos); err != nil {
				return 0, err
			}
		}
	}
	s.bad.remove(off, off+n)
	return n, nil
}
