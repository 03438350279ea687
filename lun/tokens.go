package lun

import (
	"cmp"
	"crypto/rand"
	"crypto/subtle"
	"encoding/binary"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/lun/invariant"
	"github.com/iser-target/iser-target/security/limits"
)

// Lengths of a ROD token and of its parts, in bytes (SPC-4, tables 111 and 112).
const (
	tokenLen       = 512
	tokenHeader    = 8
	tokenRandom    = 256 // where EXTENDED ROD TOKEN DATA begins: random bytes to the end
	tokenTargetLen = tokenRandom - tokenTarget
	tokenTarget    = 128 // where TARGET DEVICE DESCRIPTOR begins
	secretLen      = 32
)

// ROD types (SPC-4, table 110).
const (
	rodDefault    = 0x00800000
	rodVulnerable = 0x00800001
	rodAny        = 0x0080ffff
	rodZero       = 0xffff0001
)

var (
	condTokenCause     = Sense{keyIllegalRequest, 0x23, 0x00} // INVALID TOKEN OPERATION, CAUSE NOT REPORTABLE
	condTokenType      = Sense{keyIllegalRequest, 0x23, 0x01} // UNSUPPORTED TOKEN TYPE
	condTokenUnknown   = Sense{keyIllegalRequest, 0x23, 0x04} // TOKEN UNKNOWN
	condTokenCorrupt   = Sense{keyIllegalRequest, 0x23, 0x05} // TOKEN CORRUPT
	condTokenRevoked   = Sense{keyIllegalRequest, 0x23, 0x06} // TOKEN REVOKED: by an administrator
	condTokenExpired   = Sense{keyIllegalRequest, 0x23, 0x07} // TOKEN EXPIRED
	condTokenCancelled = Sense{keyIllegalRequest, 0x23, 0x08} // TOKEN CANCELLED: the data has changed
	condTokenDeleted   = Sense{keyIllegalRequest, 0x23, 0x09} // TOKEN DELETED: by an initiator
	condTokenLength    = Sense{keyIllegalRequest, 0x23, 0x0a} // INVALID TOKEN LENGTH
	condNoTokens       = Sense{keyIllegalRequest, 0x55, 0x0d} // INSUFFICIENT RESOURCES TO CREATE ROD TOKEN
)

// Tokens are the ROD tokens of a process (SPC-4, section 5.17.6): names for the data that ranges of a logical unit had at
// one time. There are no snapshots behind them. Whatever changes a byte of these ranges ends the token first, so a token
// stands for that data or for nothing (point in time copy, change vulnerable). The end of the process ends all tokens.
type Tokens struct {
	limit *limits.Limit
	by    *limits.Keyed

	mu     sync.Mutex        // a leaf, except for the limits
	number uint64            // guarded by mu: of the last token, from a random one on
	of     map[secret]*token // guarded by mu: the tokens that are valid
	over   map[secret]Sense  // guarded by mu: why tokens ended, for the last maxEnded
	order  []secret          // guarded by mu: of over, a ring
	next   int               // guarded by mu: in order
	counts [len(TokenEnds)]atomic.Uint64
	made   atomic.Uint64
}

// A secret is random bytes of a token, by which Tokens find it.
type secret [secretLen]byte

// maxEnded is for how many tokens the target knows why they ended. WRITE USING TOKEN with older ones meets TOKEN UNKNOWN.
const maxEnded = 4096

// TokenEnds are the reasons for which tokens end, as TokenCounts counts them.
var TokenEnds = [...]string{"expired", "changed", "revoked", "deleted"}

// endOf are the additional sense codes of TokenEnds.
var endOf = [len(TokenEnds)]Sense{condTokenExpired, condTokenCancelled, condTokenRevoked, condTokenDeleted}

// NewTokens returns an empty set, which set bounds.
func NewTokens(set *limits.Set) *Tokens {
	var b [8]byte
	rand.Read(b[:])
	return &Tokens{
		limit: &set.Tokens, by: &set.TokensByName, number: binary.BigEndian.Uint64(b[:]),
		of: map[secret]*token{}, over: map[secret]Sense{},
	}
}

// TokenCounts says how many tokens there are, and were since the start.
type TokenCounts struct {
	Valid int
	Made  uint64
	Ended [len(TokenEnds)]uint64 // by TokenEnds
}

// Counts returns the counts at this time.
func (t *Tokens) Counts() (c TokenCounts) {
	t.mu.Lock()
	c.Valid = len(t.of)
	t.mu.Unlock()
	c.Made = t.made.Load()
	for i := range t.counts {
		c.Ended[i] = t.counts[i].Load()
	}
	return c
}

// A byteRange is n bytes at pos of a store.
type byteRange struct{ pos, n int64 }

func (r byteRange) end() int64 { return r.pos + r.n }

// overlaps reports whether both have a byte in common.
func (r byteRange) overlaps(o byteRange) bool {
	return r.pos < o.end() && o.pos < r.end() && r.n > 0 && o.n > 0
}

// A token is a ROD token that is valid, or was.
type token struct {
	bytes   [tokenLen]byte
	unit    *Unit
	ranges  []byteRange // in the order of the data; they do not overlap
	sorted  []byteRange // by position, or the same as ranges
	size    int64       // bytes of all ranges
	by      string      // the initiator that made it
	timeout time.Duration

	ended atomic.Uint32 // 0, or 1 + the index of the reason in TokenEnds; set before the data changes

	// own is the range that a WRITE USING TOKEN is writing that has taken the token over: see Tokens.takeOver.
	own *atomic.Pointer[byteRange]

	uses  int         // guarded by Tokens.mu: commands in progress that use it
	timer *time.Timer // guarded by Tokens.mu: ends it
}

func (k *token) secret() secret { return secret(k.bytes[tokenRandom:][:secretLen]) }

// failure returns condNone, or why the token is not valid any longer.
func (k *token) failure() Sense {
	if i := k.ended.Load(); i != 0 {
		return endOf[i-1]
	}
	return condNone
}

// covers reports whether r has a byte of the token's data.
func (k *token) covers(r byteRange) bool {
	i := sort.Search(len(k.sorted), func(i int) bool { return k.sorted[i].end() > r.pos })
	return i < len(k.sorted) && k.sorted[i].overlaps(r)
}

// extent returns the smallest range that has all data of the token.
func (k *token) extent() byteRange {
	first, last := k.sorted[0], k.sorted[len(k.sorted)-1]
	return byteRange{first.pos, last.end() - first.pos}
}

// unitTokens are the tokens for data of one unit. They do not change; others take their place.
type unitTokens struct {
	list []*token // by the position of their first byte
	ends []int64  // the furthest end of the tokens up to that one
	// spans counts the ranges of tokens in pieces of spanLen bytes of the store. Piece i belongs to span i%tokenSpans. Most
	// writes find only zeros there.
	spans [tokenSpans]uint32
}

const (
	tokenSpans = 4096
	spanLen    = 1 << 20
)

// spansOf returns the pieces of r, the first and how many, but no more than there are spans.
func (r byteRange) spansOf() (first, n int64) {
	first = r.pos / spanLen
	return first, min((r.end()-1)/spanLen-first+1, tokenSpans)
}

// with returns the tokens with k, or without k.
func (s *unitTokens) with(k *token, in bool) *unitTokens {
	next := &unitTokens{}
	change := ^uint32(0) // -1
	if s != nil {
		next.spans = s.spans
		next.list = slices.DeleteFunc(slices.Clone(s.list), func(o *token) bool { return o == k })
	}
	if in {
		at, _ := slices.BinarySearchFunc(next.list, k, func(a, b *token) int { return cmp.Compare(a.extent().pos, b.extent().pos) })
		next.list = slices.Insert(next.list, at, k)
		change = 1
	}
	if len(next.list) == 0 {
		return nil
	}
	for _, r := range k.ranges {
		first, n := r.spansOf()
		for i := range n {
			next.spans[(first+i)%tokenSpans] += change
		}
	}
	next.ends = make([]int64, len(next.list))
	furthest := int64(0)
	for i, o := range next.list {
		furthest = max(furthest, o.extent().end())
		next.ends[i] = furthest
	}
	return next
}

// mayCover reports whether a token may have a byte of r.
func (s *unitTokens) mayCover(r byteRange) bool {
	first, n := r.spansOf()
	for i := range n {
		if s.spans[(first+i)%tokenSpans] != 0 {
			return true
		}
	}
	return false
}

// changing ends the tokens for n bytes at pos. Everything that changes the store calls it before. Without tokens it costs one
// atomic load, and with tokens for other ranges mostly one more look.
func (u *Unit) changing(pos, n int64) {
	if s := u.tokens.Load(); s != nil && n > 0 && s.mayCover(byteRange{pos, n}) {
		u.opt.Tokens.changing(s, byteRange{pos, n})
	}
}

// changing does what Unit.changing does.
func (t *Tokens) changing(s *unitTokens, r byteRange) {
	i := sort.Search(len(s.list), func(i int) bool { return s.list[i].extent().pos >= r.end() })
	for i--; i >= 0 && s.ends[i] > r.pos; i-- {
		if k := s.list[i]; k.ended.Load() == 0 && k.covers(r) && !k.isOwn(r) {
			t.end(k, condTokenCancelled)
		}
	}
}

// isOwn reports whether r is what the WRITE USING TOKEN is writing that has taken the token over.
func (k *token) isOwn(r byteRange) bool {
	if k.own == nil {
		return false
	}
	own := k.own.Load()
	return own != nil && own.pos <= r.pos && r.end() <= own.end()
}

// endTokens ends all tokens for data of the unit.
func (u *Unit) endTokens(why Sense) {
	if s := u.tokens.Load(); s != nil {
		for _, k := range s.list {
			u.opt.Tokens.end(k, why)
		}
	}
}

// shutTokens ends all tokens for data of the unit, and lets nobody make others.
func (u *Unit) shutTokens() {
	u.opt.Tokens.mu.Lock()
	u.noTokens = true
	u.opt.Tokens.mu.Unlock()
	u.endTokens(condTokenRevoked)
}

// openTokens undoes shutTokens, for a unit that comes back.
func (u *Unit) openTokens() {
	u.opt.Tokens.mu.Lock()
	defer u.opt.Tokens.mu.Unlock()
	u.noTokens = false
}

// add makes k a valid token. From then on the unit ends it when its data changes, so the caller keeps that from changing.
//
// Preconditions: the stripes of all ranges are held exclusively.
func (t *Tokens) add(k *token) Sense {
	if !t.by.Take(k.by, 1) {
		t.by.Bite(k.by)
		return condNoTokens
	}
	if !t.limit.Take(1) {
		t.by.Give(k.by, 1)
		t.limit.Bite(k.by)
		return condNoTokens
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if k.unit.noTokens {
		t.limit.Give(1)
		t.by.Give(k.by, 1)
		return condNoTokens
	}
	t.number++
	binary.BigEndian.PutUint64(k.bytes[tokenHeader:], t.number)
	rand.Read(k.bytes[tokenRandom:])
	t.of[k.secret()] = k
	t.made.Add(1)
	t.list(k, true)
	k.timer = time.AfterFunc(k.timeout, func() { t.expire(k) })
	return condNone
}

// list makes the unit of k know k, or forget k.
//
// Preconditions: t.mu is held.
func (t *Tokens) list(k *token, in bool) {
	invariant.Held(&t.mu)
	k.unit.tokens.Store(k.unit.tokens.Load().with(k, in))
}

// end makes k invalid for that reason, and reports whether it did: k may have been invalid already. A reader of the token's data
// that finds the token still valid afterwards has read what was there before the change.
func (t *Tokens) end(k *token, why Sense) bool {
	if !k.ended.CompareAndSwap(0, endedBy(why)) {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.forget(k, why)
	return true
}

// endedBy returns the value of token.ended for that reason.
func endedBy(why Sense) uint32 { return uint32(1 + slices.Index(endOf[:], why)) }

// forget does what follows when k.ended was set.
//
// Preconditions: t.mu is held.
func (t *Tokens) forget(k *token, why Sense) {
	invariant.Held(&t.mu)
	t.list(k, false)
	if k.own != nil {
		return // it counted as one that ended when it was taken over
	}
	t.counts[endedBy(why)-1].Add(1)
	k.timer.Stop()
	s := k.secret()
	delete(t.of, s)
	t.limit.Give(1)
	t.by.Give(k.by, 1)
	if len(t.order) < maxEnded {
		t.order = append(t.order, s)
	} else {
		delete(t.over, t.order[t.next])
		t.order[t.next] = s
		t.next = (t.next + 1) % maxEnded
	}
	t.over[s] = why
}

// expire ends k after its inactivity timeout, unless a command uses it.
func (t *Tokens) expire(k *token) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if k.uses == 0 && k.ended.CompareAndSwap(0, endedBy(condTokenExpired)) {
		t.forget(k, condTokenExpired)
	}
}

// use finds the token with these tokenLen bytes, and keeps it from expiring until done is called (SPC-4, section 5.17.6.7).
// Instead of a token it may return why that is not valid (section 5.17.6.5.2).
func (t *Tokens) use(b []byte) (*token, Sense) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := secret(b[tokenRandom:][:secretLen])
	if why, ok := t.over[s]; ok {
		return nil, why
	}
	switch k := t.of[s]; {
	case k == nil:
		return nil, condTokenUnknown
	case subtle.ConstantTimeCompare(k.bytes[:], b) == 0:
		return nil, condTokenCorrupt
	default:
		k.uses++
		return k, condNone
	}
}

// done ends what use began. The inactivity timeout begins again.
func (t *Tokens) done(k *token) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if k.uses--; k.uses == 0 && k.ended.Load() == 0 {
		k.timer.Reset(k.timeout)
	}
}

// takeOver ends k for everybody but the caller, which is about to write onto data of k in an order that keeps what it has not
// read. It returns another token for the same data, which ends when somebody else changes that. The caller calls giveUp.
func (t *Tokens) takeOver(k *token) (*token, Sense) {
	rest := &token{
		bytes: k.bytes, unit: k.unit, ranges: k.ranges, sorted: k.sorted, size: k.size, by: k.by,
		own: &atomic.Pointer[byteRange]{},
	}
	t.mu.Lock()
	t.list(rest, true) // before k ends, or a change between both would be missed
	t.mu.Unlock()
	if !t.end(k, condTokenCancelled) {
		t.giveUp(rest)
		return nil, k.failure()
	}
	return rest, condNone
}

// giveUp forgets what takeOver returned.
func (t *Tokens) giveUp(k *token) { t.end(k, condTokenCancelled) }
