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

// Total returns the time of all phases.
func (s *Spent) Total() (total time.Duration) {
	for _, d := range s {
		total += d
	}
	return total
}

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
		l[p].add(&m[p])
	}
}

// Sizes of transfers are counted in buckets, one to each doubling from 512 bytes to 4 MiB. The first also has
// all below, the last all above.
const (
	SizeBuckets = 15
	firstSize   = 9 // the first bound is 1<<firstSize bytes
)

// SizeBound returns the largest transfer of bucket i, in bytes. The last bucket has no bound.
func SizeBound(i int) uint64 { return 1 << (firstSize + i) }

// sizeBucket returns the bucket of a transfer of n bytes, at least 1.
func sizeBucket(n uint64) int {
	return min(max(bits.Len64(n-1)-firstSize, 0), SizeBuckets-1)
}

// An Operation counts the commands of one Kind that ended with a status, when their responses have left.
type Operation struct {
	Latency                     // in PhaseTotal
	Bytes   uint64              // data moved; of KindOther, none is counted
	Sizes   [SizeBuckets]uint64 // commands that moved data; the index counts those up to its SizeBound
}

// Operations are those of each Kind.
type Operations [Kinds]Operation

// Add adds the counts of m to o.
func (o *Operations) Add(m *Operations) {
	for k := range o {
		o[k].add(&m[k].Latency)
		o[k].Bytes += m[k].Bytes
		for i, n := range m[k].Sizes {
			o[k].Sizes[i] += n
		}
	}
}

func (l *Latency) add(m *Latency) {
	l.Count += m.Count
	l.Sum += m.Sum
	for i, n := range m.Buckets {
		l.Buckets[i] += n
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

// latencies are what each command counts in. PhaseTotal is the sum of totals.
type latencies struct {
	sums    [PhaseTotal]atomic.Int64 // ns
	buckets [PhaseTotal][LatencyBuckets]atomic.Uint64
	totals  [Kinds]LatencyCount
	octets  [KindOther]atomic.Uint64
	sizes   [KindOther][SizeBuckets]atomic.Uint64
}

func (l *latencies) addTo(sum *Latencies) {
	for p := range l.buckets {
		for i := range l.buckets[p] {
			n := l.buckets[p][i].Load()
			sum[p].Buckets[i] += n
			sum[p].Count += n
		}
		sum[p].Sum += time.Duration(l.sums[p].Load())
	}
	for k := range l.totals {
		sum[PhaseTotal].add(new(l.totals[k].Latency()))
	}
}

func (l *latencies) addOperationsTo(sum *Operations) {
	for k := range l.totals {
		sum[k].add(new(l.totals[k].Latency()))
	}
	for k := range l.sizes {
		sum[k].Bytes += l.octets[k].Load()
		for i := range l.sizes[k] {
			sum[k].Sizes[i] += l.sizes[k][i].Load()
		}
	}
}

// A spentIn is what a command counts in latencies.
type spentIn struct {
	*Spent
	kind    Kind
	total   time.Duration
	moved   uint64
	size    int             // bucket of moved; -1: none
	buckets [PhaseTotal]int // -1: none
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
	l.totals[s.kind].Count(s.total)
	if s.size >= 0 {
		l.octets[s.kind].Add(s.moved)
		l.sizes[s.kind][s.size].Add(1)
	}
}

// CountSpent counts how long c took. c ended with a status, Count has counted it, and its response has left.
func (n *Nexus) CountSpent(c *Command, spent *Spent) {
	s := spentIn{Spent: spent, kind: c.row.kind(), total: spent.Total(), moved: c.moved, size: -1}
	for p, d := range spent {
		s.buckets[p] = latencyBucket(d)
	}
	if spent[PhaseReadWait] == 0 {
		s.buckets[PhaseReadWait] = -1
	}
	if s.kind != KindOther && c.moved > 0 {
		s.size = sizeBucket(c.moved)
	}
	n.counts.latencies.count(&s)
	if c.unit != nil {
		c.unit.counts[n.transport].latenciesOf(n.shard).count(&s)
	}
}

// Spent returns the time that all commands of the nexus took whose responses have left. Unlike Latencies, it takes a few loads.
func (n *Nexus) Spent() (sum time.Duration) {
	for k := range n.counts.latencies.totals {
		sum += time.Duration(n.counts.latencies.totals[k].sum.Load())
	}
	return sum
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

// Operations returns the operations of the unit for each transport.
func (u *Unit) Operations() (all [Transports]Operations) {
	for t := range u.counts {
		for i := range u.counts[t].latencies {
			if l := u.counts[t].latencies[i].Load(); l != nil {
				l.addOperationsTo(&all[t])
			}
		}
	}
	return all
}

// Operations returns the operations of the nexus, including commands for LUNs that do not exist.
func (n *Nexus) Operations() (all Operations) {
	n.counts.latencies.addOperationsTo(&all)
	return all
}

// Latencies returns the latencies of the nexus, including commands for LUNs that do not exist.
func (n *Nexus) Latencies() (all Latencies) {
	n.counts.latencies.addTo(&all)
	return all
}
