package lun

import (
	"math/bits"
	"sync/atomic"
	"time"
)

// A Phase is a part of the time that a command takes, from its PDU to its response.
type Phase uint8

const (
	PhaseReceive  Phase = iota // it waits for its turn: for the rest of its PDU, CmdSNs before its own, task slots, ORDERED commands, data buffers
	PhaseBackend               // the logical unit executes it
	PhaseReadWait              // its data comes: unsolicited, or from asking for it by RDMA Read or R2T to its last octet
	PhaseSend                  // data or response is queued for sending, until TCP has taken it
	PhaseTotal                 // the sum
	Phases                     // how many there are
)

func (p Phase) String() string {
	return [...]string{"receive", "backend", "read_wait", "send", "total"}[p]
}

// Spent is what a command has spent in each phase but PhaseTotal.
type Spent [PhaseTotal]time.Duration

// Latencies are kept in buckets, four to each doubling from 1.024 µs to 30 s. The first
// has all below, the last all above.
const (
	LatencyBuckets = 101
	firstOctave    = 10 // the first bound is 1<<firstOctave ns
)

// LatencyBound is the highest latency that belongs into bucket i, which is not the last
// one.
func LatencyBound(i int) time.Duration {
	if i == 0 {
		return 1 << firstOctave
	}
	octave, quarter := (i-1)/4, (i-1)%4
	return time.Duration(5+quarter) << (firstOctave - 2 + octave)
}

// latencyBucket is where d belongs.
func latencyBucket(d time.Duration) int {
	n := uint64(max(d-1, 0)) // a bound belongs to the bucket below
	octave := bits.Len64(n) - 1 - firstOctave
	if octave < 0 {
		return 0
	}
	quarter := n >> (firstOctave - 2 + octave) & 3
	return min(1+4*octave+int(quarter), LatencyBuckets-1)
}

// A Latency is how long commands have taken for a phase.
type Latency struct {
	Count   uint64
	Sum     time.Duration
	Buckets [LatencyBuckets]uint64 // those up to LatencyBound of the index
}

// Latencies are those of commands that have ended with a status, counted when their
// responses have left. In PhaseReadWait there are those only that waited for data.
type Latencies [Phases]Latency

// Add adds those of m.
func (l *Latencies) Add(m *Latencies) {
	for p := range l {
		l[p].Count += m[p].Count
		l[p].Sum += m[p].Sum
		for i, n := range m[p].Buckets {
			l[p].Buckets[i] += n
		}
	}
}

// latencies is what each command counts in. It fills one page.
type latencies struct {
	sums    [PhaseTotal]atomic.Int64 // in ns; that of PhaseTotal is the sum of these
	buckets [Phases][LatencyBuckets]atomic.Uint64
}

func (l *latencies) addTo(sum *Latencies) {
	for p := range l.buckets {
		for i := range l.buckets[p] {
			n := l.buckets[p][i].Load()
			sum[p].Buckets[i] += n
			sum[p].Count += n
		}
	}
	for p := range l.sums {
		d := time.Duration(l.sums[p].Load())
		sum[p].Sum += d
		sum[PhaseTotal].Sum += d
	}
}

// A spentIn is a Spent with the buckets that it belongs into; -1 is none.
type spentIn struct {
	*Spent
	buckets [Phases]int
}

func (l *latencies) count(s *spentIn) {
	for p, d := range s.Spent {
		if d > 0 {
			l.sums[p].Add(int64(d))
		}
	}
	for p, i := range s.buckets {
		if i >= 0 {
			l.buckets[p][i].Add(1)
		}
	}
}

// CountSpent counts how long c took, which has ended with a status, and whose response
// has left.
func (n *Nexus) CountSpent(c *Command, spent *Spent) {
	s := spentIn{Spent: spent}
	total := time.Duration(0)
	for p, d := range spent {
		s.buckets[p] = latencyBucket(d)
		total += d
	}
	s.buckets[PhaseTotal] = latencyBucket(total)
	if spent[PhaseReadWait] == 0 {
		s.buckets[PhaseReadWait] = -1
	}
	n.counts.latencies.count(&s)
	if c.unit != nil {
		c.unit.counts[n.transport].latenciesOf(n.shard).count(&s)
	}
}

// latenciesOf are those of a shard. Few units have commands from nexuses of all shards
// and by all transports, so each gets its memory with the first one.
func (u *transportCounts) latenciesOf(shard uint8) *latencies {
	p := &u.latencies[shard]
	if l := p.Load(); l != nil {
		return l
	}
	p.CompareAndSwap(nil, new(latencies))
	return p.Load()
}

// Latencies are those of the unit, for each transport.
func (u *Unit) Latencies() (all [Transports]Latencies) {
	for t := range u.counts {
		for i := range u.counts[t].latencies {
			if l := u.counts[t].latencies[i].Load(); l != nil {
				l.addTo(&all[t])
			}
		}
	}
	return all
}

// Latencies are those of the nexus, with the commands for LUNs that there are not.
func (n *Nexus) Latencies() (all Latencies) {
	n.counts.latencies.addTo(&all)
	return all
}
