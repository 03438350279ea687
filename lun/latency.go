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

// A Tally counts how long commands took. It adds up what several commands of the same kind have in common, so that these take fewer
// operations that exclude other processors. The zero value is ready. Commands count when End is called, or before.
type Tally struct {
	nexus *Nexus
	unit  *Unit // of the commands, or nil
	kind  Kind
	in    [2]*latencies // of nexus and, unless it is nil, of unit

	sums        [PhaseTotal]time.Duration
	moved       uint64
	phases      [PhaseTotal]streak
	total, size streak
}

// A streak is a number of commands in a row that count in the same bucket.
type streak struct {
	of     [2][]atomic.Uint64 // the buckets in Tally.in
	bucket int
	n      uint64
}

func (s *streak) add(bucket int) {
	if bucket != s.bucket {
		s.end()
		s.bucket = bucket
	}
	s.n++
}

func (s *streak) end() {
	if s.n == 0 {
		return
	}
	for _, of := range s.of {
		if of != nil {
			of[s.bucket].Add(s.n)
		}
	}
	s.n = 0
}

// Count counts how long c took, a command of n. c ended with a status, Nexus.Count has counted it, and its response has left.
func (t *Tally) Count(n *Nexus, c *Command, spent *Spent) {
	if kind := c.row.kind(); t.nexus != n || t.unit != c.unit || t.kind != kind {
		t.End()
		t.begin(n, c.unit, kind)
	}
	for p, d := range spent {
		t.sums[p] += d
		if p != int(PhaseReadWait) || d > 0 {
			t.phases[p].add(latencyBucket(d))
		}
	}
	t.total.add(latencyBucket(spent.Total()))
	if t.kind != KindOther && c.moved > 0 {
		t.moved += c.moved
		t.size.add(sizeBucket(c.moved))
	}
}

// begin prepares t, a zero Tally, for commands of that kind of n for u.
func (t *Tally) begin(n *Nexus, u *Unit, kind Kind) {
	t.nexus, t.unit, t.kind, t.in[0] = n, u, kind, &n.counts.latencies
	if u != nil {
		t.in[1] = u.counts[n.transport].latenciesOf(n.shard)
	}
	for i, l := range t.in {
		if l == nil {
			continue
		}
		for p := range t.phases {
			t.phases[p].of[i] = l.buckets[p][:]
		}
		t.total.of[i] = l.totals[kind].buckets[:]
		if kind != KindOther {
			t.size.of[i] = l.sizes[kind][:]
		}
	}
}

// End counts what Count has added up. The number of commands in PhaseTotal comes last: a later look has all of those that it has.
func (t *Tally) End() {
	if t.nexus == nil {
		return
	}
	for _, l := range t.in {
		if l == nil {
			continue
		}
		var total time.Duration
		for p, d := range t.sums {
			if d > 0 {
				l.sums[p].Add(int64(d))
				total += d
			}
		}
		l.totals[t.kind].sum.Add(int64(total))
		if t.moved > 0 {
			l.octets[t.kind].Add(t.moved)
		}
	}
	for p := range t.phases {
		t.phases[p].end()
	}
	t.size.end()
	t.total.end()
	*t = Tally{} // keeps no memory of a unit that is removed
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
