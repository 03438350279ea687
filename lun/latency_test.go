package lun

import (
	"sync"
	"testing"
	"time"
)

// A latency is in the bucket between its bounds, of which the upper one belongs to it.
func TestLatencyBuckets(t *testing.T) {
	if first, last := LatencyBound(0), LatencyBound(LatencyBuckets-2); first != 1024 || last < 30*time.Second || last > 31*time.Second {
		t.Errorf("bounds from %v to %v", first, last)
	}
	for i := range LatencyBuckets - 1 {
		bound := LatencyBound(i)
		if i > 0 && (bound <= LatencyBound(i-1) || bound > LatencyBound(i-1)*5/4) {
			t.Errorf("bound %d is %v, behind %v", i, bound, LatencyBound(i-1))
		}
		if at, above := latencyBucket(bound), latencyBucket(bound+1); at != i || above != i+1 {
			t.Errorf("%v is in bucket %d, 1 ns more in %d; want %d and %d", bound, at, above, i, i+1)
		}
	}
	for d, want := range map[time.Duration]int{-1: 0, 0: 0, 1: 0, time.Hour: LatencyBuckets - 1, 1<<63 - 1: LatencyBuckets - 1} {
		if got := latencyBucket(d); got != want {
			t.Errorf("%v is in bucket %d, want %d", d, got, want)
		}
	}
}

// The nexus and the unit count each command once in each phase that it had.
func TestLatencies(t *testing.T) {
	r := newRig(t, setup{})
	other := r.login()
	other.SetTransport(ISER)
	var cmd Command
	var tally Tally
	spend := func(n *Nexus, lun uint16, spent Spent) {
		do(n, &cmd, EncodeLUN(lun), "28000000000000000100", nil, all)
		n.Count(&cmd, 512, false)
		tally.Count(n, &cmd, &spent)
	}
	spend(r.nexus, 0, Spent{PhaseBackend: 3 * time.Millisecond, PhaseSend: time.Microsecond})
	spend(r.nexus, 0, Spent{PhaseReceive: time.Second, PhaseBackend: time.Millisecond, PhaseReadWait: 5 * time.Millisecond})
	spend(other, 0, Spent{PhaseSend: time.Hour})
	spend(r.nexus, 9, Spent{PhaseBackend: time.Microsecond}) // there is no such unit
	tally.End()

	check := func(what string, got Latencies, sums [Phases]time.Duration, counts [Phases]uint64) {
		t.Helper()
		for p := range Phases {
			n := uint64(0)
			for _, k := range got[p].Buckets {
				n += k
			}
			if got[p].Sum != sums[p] || got[p].Count != counts[p] || n != counts[p] {
				t.Errorf("%s, %v: %v, %d, in buckets %d; want %v, %d", what, p, got[p].Sum, got[p].Count, n, sums[p], counts[p])
			}
		}
	}
	unit := r.unit.Latencies()
	check("unit", unit[TCP],
		[Phases]time.Duration{time.Second, 4 * time.Millisecond, 5 * time.Millisecond, time.Microsecond, time.Second + 9*time.Millisecond + time.Microsecond},
		[Phases]uint64{2, 2, 1, 2, 2})
	check("unit, other transport", unit[ISER], [Phases]time.Duration{PhaseSend: time.Hour, PhaseTotal: time.Hour}, [Phases]uint64{1, 1, 0, 1, 1})
	check("nexus", r.nexus.Latencies(),
		[Phases]time.Duration{time.Second, 4*time.Millisecond + time.Microsecond, 5 * time.Millisecond, time.Microsecond, time.Second + 9*time.Millisecond + 2*time.Microsecond},
		[Phases]uint64{3, 3, 1, 3, 3})
	check("other nexus", other.Latencies(), [Phases]time.Duration{PhaseSend: time.Hour, PhaseTotal: time.Hour}, [Phases]uint64{1, 1, 0, 1, 1})
	if b := unit[TCP][PhaseBackend].Buckets; b[latencyBucket(3*time.Millisecond)] != 1 || b[latencyBucket(time.Millisecond)] != 1 {
		t.Errorf("backend: %v", b)
	}

	sum := unit[TCP]
	sum.Add(&unit[ISER])
	check("both transports", sum,
		[Phases]time.Duration{time.Second, 4 * time.Millisecond, 5 * time.Millisecond, time.Hour + time.Microsecond, time.Hour + time.Second + 9*time.Millisecond + time.Microsecond},
		[Phases]uint64{3, 3, 1, 3, 3})
}

// Nexuses that count at the same time lose nothing, not even the first command of a shard.
func TestLatenciesOfManyNexuses(t *testing.T) {
	r := newRig(t, setup{})
	const nexuses, commands = 2*countShards + 1, 50
	var wg sync.WaitGroup
	for range nexuses {
		n := r.login()
		wg.Go(func() {
			var c Command
			var tally Tally
			do(n, &c, [8]byte{}, "28000000000000000100", nil, 512)
			for range commands {
				tally.Count(n, &c, &Spent{PhaseBackend: time.Millisecond})
			}
			tally.End()
		})
	}
	wg.Wait()
	if l := r.unit.Latencies()[TCP][PhaseTotal]; l.Count != nexuses*commands || l.Sum != nexuses*commands*time.Millisecond {
		t.Errorf("%d, %v", l.Count, l.Sum)
	}
}

// A reader who sees that a command counts in PhaseTotal finds its times with the next look.
func TestLatenciesOfCommandsThatCount(t *testing.T) {
	r := newRig(t, setup{})
	n := r.login()
	const commands = 20000
	done := make(chan struct{})
	go func() {
		defer close(done)
		var c Command
		do(n, &c, [8]byte{}, "28000000000000000100", nil, 512)
		for range commands {
			var tally Tally
			tally.Count(n, &c, &Spent{PhaseReceive: time.Millisecond, PhaseBackend: time.Millisecond})
			tally.End()
		}
	}()
	for count := uint64(0); count < commands; {
		count = r.unit.Latencies()[TCP][PhaseTotal].Count
		l := r.unit.Latencies()[TCP]
		if least := time.Duration(count) * time.Millisecond; l[PhaseReceive].Sum < least || l[PhaseBackend].Sum < least || l[PhaseTotal].Sum < 2*least || l[PhaseBackend].Count < count {
			t.Fatalf("%d commands, with %v, %v and %v in all", count, l[PhaseReceive].Sum, l[PhaseBackend].Sum, l[PhaseTotal].Sum)
		}
	}
	<-done
}

// Reads, writes and other commands have latencies and sizes of their own, in the unit and in the nexus.
func TestOperations(t *testing.T) {
	r := newRig(t, setup{})
	var c Command
	var tally Tally
	spend := func(cdb string, moved uint64, took time.Duration) {
		do(r.nexus, &c, [8]byte{}, cdb, make([]byte, 1024), all)
		r.nexus.Count(&c, moved, false)
		tally.Count(r.nexus, &c, &Spent{PhaseBackend: took / 2, PhaseSend: took - took/2})
	}
	before := r.nexus.Operations()
	spend("28000000000000000200", 1024, time.Millisecond)
	spend("28000000000000000200", 1025, 3*time.Millisecond)
	spend("2a000000000000000200", 1024, time.Second)
	spend("2a007fffffff00000200", 0, time.Minute) // beyond the end: nothing moves
	spend("000000000000", 0, time.Microsecond)
	tally.End()
	all := r.unit.Operations()[TCP]
	if all != r.nexus.Operations() || before != (Operations{}) {
		t.Error("the nexus differs from the unit")
	}
	for k, want := range map[Kind]Operation{
		KindRead:  {Latency: Latency{Count: 2, Sum: 4 * time.Millisecond}, Bytes: 2049},
		KindWrite: {Latency: Latency{Count: 2, Sum: time.Minute + time.Second}, Bytes: 1024},
		KindOther: {Latency: Latency{Count: 1, Sum: time.Microsecond}},
	} {
		if got := all[k]; got.Count != want.Count || got.Sum != want.Sum || got.Bytes != want.Bytes {
			t.Errorf("%v: %d commands, %v, %d bytes; want %d, %v, %d", k, got.Count, got.Sum, got.Bytes, want.Count, want.Sum, want.Bytes)
		}
	}
	if got := all[KindRead]; got.Sizes != [SizeBuckets]uint64{1: 1, 2: 1} || got.Buckets[latencyBucket(3*time.Millisecond)] != 1 {
		t.Errorf("reads: %v, %v", got.Sizes, got.Buckets)
	}
	if got := all[KindWrite]; got.Sizes != [SizeBuckets]uint64{1: 1} || got.Buckets[LatencyBuckets-1] != 1 {
		t.Errorf("writes: %v, %v", got.Sizes, got.Buckets)
	}
	both := all
	both.Add(&all)
	if both[KindRead].Count != 4 || both[KindRead].Bytes != 4098 || both[KindRead].Sizes[2] != 2 {
		t.Errorf("the sum: %+v", both[KindRead])
	}
	for n, want := range map[uint64]int{1: 0, 512: 0, 513: 1, 4 << 20: SizeBuckets - 2, 4<<20 + 1: SizeBuckets - 1, 1 << 63: SizeBuckets - 1} {
		if got := sizeBucket(n); got != want || want < SizeBuckets-1 && n > SizeBound(want) {
			t.Errorf("%d bytes are in bucket %d, want %d", n, got, want)
		}
	}
}

// Counting what a command took allocates nothing.
func TestTallyAllocatesNothing(t *testing.T) {
	r := newRig(t, setup{})
	var c Command
	do(r.nexus, &c, [8]byte{}, "28000000000000000200", nil, all)
	var tally Tally
	spent := Spent{PhaseBackend: time.Millisecond}
	if n := testing.AllocsPerRun(100, func() {
		c.counted = true
		r.nexus.Count(&c, 1024, false)
		tally.Count(r.nexus, &c, &spent)
		tally.End()
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
