package rdma

import (
	crand "crypto/rand"
	"math/rand/v2"
	"sync"
	"sync/atomic"

	"github.com/iser-target/iser-target/rdma/wire"
)

// Access is what a peer may do with a Region.
type Access uint8

const (
	RemoteRead  Access = 1 << iota // be the source of an RDMA Read
	RemoteWrite                    // be the sink of an RDMA Write
)

// A Domain is a protection domain. Its streams know of each other, so an STag of
// another stream can be distinguished from an STag that never existed. An STag is
// valid for one stream only, whatever the Domain.
type Domain struct {
	conns  sync.Map // of *Conn
	counts domainCounts
}

// NewDomain returns an empty protection domain.
func NewDomain() *Domain { return &Domain{} }

// knows reports whether stag belongs to another stream of the domain.
func (d *Domain) knows(stag wire.STag, not *Conn) bool {
	for c := range d.conns.Range {
		if c := c.(*Conn); c != not && (c.mem.find(stag) != nil || c.isSink(stag)) {
			return true
		}
	}
	return false
}

// A Region is memory that the peer of one stream can reach by an STag. The caller
// owns the Region and may register it again after Deregister.
type Region struct {
	buf    []byte
	base   uint64
	access Access
	stag   wire.STag

	// Guarded by memory.mu:
	valid   bool
	busy    int  // placements and RDMA Read Responses in progress
	waiting bool // a Deregister waits for busy to become 0
}

// STag returns the name that the peer uses for the Region.
func (r *Region) STag() wire.STag { return r.stag }

// memory holds the STags of one stream.
type memory struct {
	mu      sync.Mutex
	idle    sync.Cond             // a Region's busy count has become 0
	regions map[wire.STag]*Region // nil until newSTag
	rng     *rand.ChaCha8         // the same
}

var liveSTags atomic.Int64

func (m *memory) init() {
	m.idle.L = &m.mu
}

// newSTag draws an STag that nobody can predict (RFC 5040, section 8.1.1): 32 bits of
// ChaCha8 with a seed from the kernel. It is never 0 and not in use.
//
// Preconditions: c.mem.mu is held.
func (c *Conn) newSTag() wire.STag {
	m := &c.mem
	held(&m.mu)
	if m.rng == nil { // a connection that logs in needs no STag
		var seed [32]byte
		crand.Read(seed[:])
		m.rng, m.regions = rand.NewChaCha8(seed), map[wire.STag]*Region{}
	}
	for {
		s := wire.STag(m.rng.Uint64())
		if s != 0 && m.regions[s] == nil && !c.readPending(s) {
			return s
		}
	}
}

// isSink reports whether stag is the sink of a Read whose Response is due.
func (c *Conn) isSink(stag wire.STag) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for wr := c.reads.head; wr != nil; wr = wr.next {
		if wr.sink == stag {
			return true
		}
	}
	return false
}

func (m *memory) find(stag wire.STag) *Region {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.regions[stag]
}

// Register gives the peer access to buf and returns the STag. The first byte has the
// tagged offset base; base+len(buf) must not exceed 2^64.
func (c *Conn) Register(r *Region, buf []byte, base uint64, access Access) wire.STag {
	m := &c.mem
	m.mu.Lock()
	defer m.mu.Unlock()
	*r = Region{buf: buf, base: base, access: access, stag: c.newSTag(), valid: true}
	m.regions[r.stag] = r
	liveSTags.Add(1)
	return r.stag
}

// Deregister takes the access to a Region back. When it returns, neither the peer nor
// this side uses the memory. It waits for an RDMA Read Response that is being sent,
// and interrupts a placement that is in progress.
func (c *Conn) Deregister(r *Region) {
	m := &c.mem
	m.mu.Lock()
	defer m.mu.Unlock()
	m.invalidate(r)
	for r.busy > 0 {
		r.waiting = true
		c.interruptRead()
		m.idle.Wait()
	}
	r.waiting = false
	r.buf = nil
}

// Revoke takes the access to a Region back without waiting. It reports whether nothing uses the memory
// any longer. If not, a Deregister has to follow before the owner touches the memory.
func (c *Conn) Revoke(r *Region) (idle bool) {
	m := &c.mem
	m.mu.Lock()
	defer m.mu.Unlock()
	m.invalidate(r)
	if r.busy > 0 {
		return false
	}
	r.buf = nil
	return true
}

// invalidate removes the STag of r.
//
// Preconditions: m.mu is held.
func (m *memory) invalidate(r *Region) {
	held(&m.mu)
	if r.valid {
		r.valid = false
		delete(m.regions, r.stag)
		liveSTags.Add(-1)
	}
}

// release ends an access that use has begun.
func (m *memory) release(r *Region) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if r.busy--; r.busy == 0 && r.waiting {
		m.idle.Broadcast()
	}
}

// revoked reports whether a Deregister or the peer has invalidated the Region.
func (m *memory) revoked(r *Region) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return !r.valid
}

// useReasons are the Reasons for the faults of an access. They differ between RDMA Write
// (DDP, RFC 5041, section 7) and RDMA Read (RDMAP, RFC 5040, section 7.2).
type useReasons struct{ stag, stream, access, wrap, bounds wire.Reason }

var (
	// DDP has no code for a missing right, so such an STag counts as invalid.
	writeReasons = useReasons{wire.ReasonInvalidSTag, wire.ReasonStream, wire.ReasonInvalidSTag, wire.ReasonWrap,
		wire.ReasonBounds}
	readReasons = useReasons{wire.ReasonReadInvalidSTag, wire.ReasonReadStream, wire.ReasonReadAccess,
		wire.ReasonReadWrap, wire.ReasonReadBounds}
)

// use checks an access of n bytes at the tagged offset to. It returns the memory,
// which stays in use until release.
func (c *Conn) use(stag wire.STag, to, n uint64, want Access, why *useReasons) (*Region, []byte, error) {
	m := &c.mem
	m.mu.Lock()
	r := m.regions[stag]
	if r == nil {
		m.mu.Unlock()
		switch {
		case c.isSink(stag): // it grants nothing but the Response to its Read
			return nil, nil, fault(why.access, "STag %#x is the sink of an RDMA Read, TO %#x", stag, to)
		case c.opt.Domain.knows(stag, c):
			return nil, nil, fault(why.stream, "STag %#x belongs to another stream, TO %#x", stag, to)
		}
		return nil, nil, fault(why.stag, "STag %#x, TO %#x", stag, to)
	}
	defer m.mu.Unlock()
	switch {
	case r.access&want == 0:
		return nil, nil, fault(why.access, "STag %#x does not allow it, TO %#x", stag, to)
	case wraps(to, n):
		return nil, nil, fault(why.wrap, "STag %#x, %d bytes at TO %#x", stag, n, to)
	case to < r.base || to-r.base > uint64(len(r.buf)) || n > uint64(len(r.buf))-(to-r.base):
		return nil, nil, fault(why.bounds, "STag %#x, %d bytes at TO %#x, it has %d at %#x", stag, n, to, len(r.buf),
			r.base)
	}
	r.busy++
	return r, r.buf[to-r.base:][:n:n], nil
}

// wraps reports whether n bytes from the tagged offset to reach beyond 2^64-1.
func wraps(to, n uint64) bool { return n > 0 && to+(n-1) < to }

// invalidateRemote invalidates the STag of a Send with Invalidate (RFC 5040, section 5.3).
func (c *Conn) invalidateRemote(stag wire.STag) error {
	m := &c.mem
	m.mu.Lock()
	defer m.mu.Unlock()
	r := m.regions[stag]
	if r == nil {
		return fault(wire.ReasonNotInvalidated, "STag %#x is not of this stream", stag)
	}
	m.invalidate(r)
	return nil
}

// close invalidates every STag of the stream.
func (m *memory) close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range m.regions {
		m.invalidate(r)
	}
}
