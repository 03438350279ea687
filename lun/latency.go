package lun

import (
	"math/bits"
	"sync/atomic"
	"time"
)

// A Phase is a part of the time from the PDU of a command to its response.
type Phase uint8

const (
	// It waits for the rest of its PDU, CmdSNs before its own, task slots, ORDERED
	// commands, and data buffers.
	PhaseReceive Phase = iota
	PhaseBackend       // the logical unit executes it
	// Its data arrive: unsolicited, or from the RDMA Read or R2T to the last byte.
	PhaseReadWait
	PhaseSend  // data or response is queued for sending, until TCP has taken it
	PhaseTotal // the sum
	Phases     // number of phases
)

// String returns the name of the phase in metrics.
func (p Phase) String() string {
	return [...]string{"receive", "backend", "read_wait", "send", "total"}[p]
}

// Spent is the time that a command took in each phase, except PhaseTotal.
type Spent [PhaseTotal]time.Duration

// Latencies are counted in buckets, four to each doubling from 1.024 µs to 30 s. The first also
// has all below, the last all above.
const (
	LatencyBuckets = 101
	firstOctave    = 10 // the first bound is 1<<firstOctave ns
)

// LatencyBound returns the highest latency of bucket i. The last bucket has no bound.
func LatencyBound(i int) time.Duration {
	if i == 0 {
		return 1 << firstOctave
	}
	octave, quarter := (i-1)/4, (i-1)%4
	return time.Duration(5+quarter) << (firstOctave - 2 + octave)
}

// latencyBucket returns the bucket of d.
func latencyBucket(d time.Duration) int {
	n := uint64(max(d-1, 0)) // a bound belongs to the bucket below
	octave := bits.Len64(n) - 1 - firstOctave
	if octave < 0 {
		return 0
	}
	quarter := n >> (firstOctave - 2 + octave) & 3
	return min(1+4*octave+int(quarter), LatencyBuckets-1)
}

// A Latency counts how long commands took in a phase.
type Latency struct {
	Count   uint64
	Sum     time.Duration
	Buckets [LatencyBuckets]uint64 // the index counts those up to its LatencyBound
}

// Latencies are those of commands that ended with a status, counted when their responses have
// left. PhaseReadWait has only commands that waited for data.
type Latencies [Phases]Latency

// Add adds the counts of m to l.
func (l *Latencies) Add(m *Latencies) {
	for p := range l {
		l[p].Count += m[p].Count
		l[p].Sum += m[p].Sum
		for i, n := range m[p].Buckets {
			l[p].Buckets[i] += n
		}
	}
}

// A LatencyCount counts how long something took. It is safe for concurrent use.
type LatencyCount struct {
	sum     atomic.Int64 // ns
	buckets [LatencyBuckets]atomic.Uint64
}

// Count counts a duration.
func (l *LatencyCount) Count(d time.Duration) {
	l.sum.Add(int64(d))
	l.buckets[latencyBucket(d)].Add(1)
}

// Latency returns all that was counted.
func (l *LatencyCount) Latency() (all Latency) {
	all.Sum = time.Duration(l.sum.Load())
	for i := range l.buckets {
		all.Buckets[i] = l.buckets[i].Load()
		all.Count += all.Buckets[i]
	}
	return all
}

// latencies are what each command counts in. They fill one page.
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

// A spentIn is a Spent with the bucket of each phase; -1 is none.
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

// CountSpent counts how long c took. c ended with a status, and its response has left.
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

// latenciesOf returns the latencies of a shard. Few units have commands from nexuses of all
// shards and by all transports, so the first command of each allocates the memory.
func (u *transportCounts) latenciesOf(shard uint8) *latencies {
	p := &u.latencies[shard]
	if l := p.Load(); l != nil {
		return l
	}
	p.CompareAndSwap(nil, new(latencies))
	return p.Load()
}

// Latencies returns the latencies of the unit for each transport.
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

// Latencies returns the latencies of the nexus, including commands for LUNs that do not exist.
func (n *Nexus) Latencies() (all Latencies) {
	n.counts.latencies.addTo(&all)
	return all
}
