package bench

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/iser-target/iser-target/iscsi/initiator"
)

// epoch is what clock counts from.
var epoch = time.Now()

func clock() time.Duration { return time.Since(epoch) }

// Directions of I/O, as indexes.
const (
	read = iota
	write
	directions
)

// maxLatency is the longest latency that is measured. Longer ones count as this.
const maxLatency = 10 * time.Minute

// A tally is what a job has done in one direction.
type tally struct {
	ios       atomic.Uint64 // since the job began
	repeats   Repeats       // since the job began
	latency   *hdrhistogram.Histogram
	sum       float64 // of latencies and their squares, in ns: the histogram rounds
	squares   float64
	low, high int64
}

func newTally() tally {
	return tally{latency: hdrhistogram.New(1, int64(maxLatency), 3)}
}

// record counts the latency of an I/O.
func (t *tally) record(d time.Duration) {
	n := int64(min(d, maxLatency))
	t.latency.RecordValue(n)
	t.sum += float64(n)
	t.squares += float64(n) * float64(n)
	if t.low == 0 || n < t.low {
		t.low = n
	}
	t.high = max(t.high, n)
}

// A slot is one of the I/Os that a job has in progress.
type slot struct {
	initiator.Command
	buf     []byte
	began   time.Duration // of the first submission
	due     time.Duration // of the next one, if the I/O waits for that
	place   int64
	dir     int
	version uint32 // of Verify: what the place had before this WRITE

	// For watch, which another goroutine calls: when the I/O was submitted last, 0 unless it is in progress, and where it is: the place
	// times directions, plus dir.
	sent, where atomic.Int64
}

// A job is one session with its I/Os, for one goroutine.
type job struct {
	o       *Options
	size    int // bytes of an I/O
	session *initiator.Session
	disk    *initiator.Disk
	first   int64 // byte offset of its part of the LUN
	places  int64 // I/Os that fit into that
	next    int64 // of sequential I/O
	random  *rand.Rand
	done    chan *initiator.Command
	ios     []slot
	idle    []*slot
	refused refusals
	memory  *memory // of Verify, or nil

	tallies   [directions]tally
	depths    [8]uint64     // I/Os that found this many in progress: 1, 2, 4, ... 64 and more
	repeated  atomic.Uint64 // I/Os, in both directions
	measuring atomic.Bool   // the ramp is over
	stopping  atomic.Bool
	wake      chan struct{} // stop has been called
}

// newJob logs in. number is that of the job.
func newJob(ctx context.Context, o *Options, number, size, depth int) (*job, error) {
	cfg := o.Login
	cfg.QueueDepth = depth
	s, err := initiator.Connect(ctx, o.Address, cfg)
	if err != nil {
		return nil, err
	}
	d, err := s.Open(ctx, o.LUN)
	if err != nil {
		s.Close()
		return nil, err
	}
	part := o.Size / int64(o.Jobs) / int64(size)
	j := &job{o: o, size: size, session: s, disk: d, first: o.Offset + int64(number)*part*int64(size), places: part,
		random: rand.New(rand.NewPCG(o.Seed, uint64(number))), done: make(chan *initiator.Command, depth), ios: make([]slot, depth),
		wake: make(chan struct{}, 1)}
	j.refused.init(depth)
	for i := range j.tallies {
		j.tallies[i] = newTally()
	}
	if o.Verify {
		j.memory = &memory{seed: o.Seed + uint64(number), versions: make([]uint32, part)}
	}
	for i := range j.ios {
		x := &j.ios[i]
		x.buf, x.Done, x.Tag, x.SkipCopy = make([]byte, size), j.done, x, o.SkipCopy
		if o.writes() {
			fill(x.buf, j.random)
		}
		j.idle = append(j.idle, x)
	}
	return j, nil
}

// signature begins each block of 512 bytes that bench writes, so that inspect can say where the data come from.
const signature = "ISERBNCH"

// fill fills b with random bytes, which storage can neither compress nor deduplicate, and signatures.
func fill(b []byte, r *rand.Rand) {
	for i := 0; i+8 <= len(b); i += 8 {
		if i%512 == 0 {
			copy(b[i:], signature)
		} else {
			binary.LittleEndian.PutUint64(b[i:], r.Uint64())
		}
	}
}

// stop makes run return when the I/Os in progress have ended.
func (j *job) stop() {
	j.stopping.Store(true)
	select {
	case j.wake <- struct{}{}:
	default:
	}
}

// run does I/O until stop is called, or until the first error.
func (j *job) run() error {
	pace := newPacer(j.o, j.size, clock())
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		wait, err := j.submit(&pace)
		if err != nil {
			return err
		}
		j.session.Flush()
		if j.stopping.Load() && len(j.idle) == len(j.ios) {
			return nil
		}
		var c *initiator.Command
		select {
		case c = <-j.done:
		default:
			var late <-chan time.Time
			if wait > 0 {
				timer.Reset(wait)
				late = timer.C
			}
			select {
			case c = <-j.done:
			case <-j.wake:
			case <-late:
			}
		}
		now := clock()
		for c != nil {
			if err := j.ended(c.Tag.(*slot), now); err != nil {
				return err
			}
			select {
			case c = <-j.done:
			default:
				c = nil
			}
		}
	}
}

// submit queues what may be submitted now: first what has to be repeated. It returns how long the next I/O has to wait if it waits for a
// time, and not for the end of another one.
func (j *job) submit(pace *pacer) (wait time.Duration, err error) {
	if len(j.refused.waiting) > 0 {
		if j.stopping.Load() {
			j.abandon()
			return 0, nil
		}
		for {
			var x *slot
			if x, wait = j.refused.next(clock(), j.flying()); x == nil {
				break
			}
			if err := j.queue(x); err != nil {
				return 0, err
			}
		}
	}
	for len(j.idle) > 0 && !j.stopping.Load() {
		now := clock()
		if !j.refused.room(now, j.flying()) {
			break
		}
		if w := pace.wait(now); w > 0 {
			if wait == 0 || w < wait {
				wait = w
			}
			break
		}
		x := j.idle[len(j.idle)-1]
		if err := j.start(x); err != nil {
			return 0, err
		}
		j.idle = j.idle[:len(j.idle)-1]
		pace.took(1)
	}
	return wait, nil
}

// flying returns how many I/Os the target has.
func (j *job) flying() int { return len(j.ios) - len(j.idle) - len(j.refused.waiting) }

// abandon gives up the I/Os that wait to be repeated. The target has not done them.
func (j *job) abandon() {
	for _, x := range j.refused.waiting {
		if j.memory != nil {
			if x.dir == write {
				j.memory.versions[x.place] = x.version
			}
			j.memory.give(x.place)
		}
		j.idle = append(j.idle, x)
	}
	j.refused.waiting = j.refused.waiting[:0]
}

// start chooses an I/O and queues it.
func (j *job) start(x *slot) error {
	x.dir = write
	if p := j.o.readPercent(); p == 100 || p > 0 && j.random.IntN(100) < p {
		x.dir = read
	}
	if j.o.random() {
		x.place = j.random.Int64N(j.places)
	} else {
		x.place = j.next
		j.next = (j.next + 1) % j.places
	}
	if j.memory != nil {
		x.place = j.memory.take(x.place)
	}
	j.aim(x)
	n := j.flying() + 1
	i := 0
	for n > 1 && i < len(j.depths)-1 {
		n, i = n/2, i+1
	}
	j.depths[i]++
	x.began = clock()
	return j.queue(x)
}

// queue submits x.
func (j *job) queue(x *slot) error {
	x.where.Store(x.place*directions + int64(x.dir))
	x.sent.Store(int64(clock()))
	if err := j.session.Queue(context.Background(), &x.Command); err != nil {
		return j.wrong(x, err)
	}
	return nil
}

// watch returns an error if the target has had an I/O for longer than ioTime. Another goroutine than that of run calls it.
func (j *job) watch(now time.Duration) error {
	for i := range j.ios {
		x := &j.ios[i]
		sent := x.sent.Load()
		if sent == 0 || now-time.Duration(sent) <= ioTime {
			continue
		}
		if where := x.where.Load(); x.sent.Load() == sent {
			return j.at(int(where%directions), where/directions, errSilent)
		}
	}
	return nil
}

// aim sets the command of x.
func (j *job) aim(x *slot) {
	off := j.first + x.place*int64(j.size)
	if x.dir == read {
		x.In, x.Out = x.buf, nil
		j.disk.ReadCDB(&x.Command, off)
		return
	}
	x.In, x.Out = nil, x.buf
	j.disk.WriteCDB(&x.Command, off)
	if j.memory != nil {
		x.version = j.memory.versions[x.place]
		j.memory.write(x.place, x.buf)
	}
}

// ended takes the result of an I/O.
func (j *job) ended(x *slot, now time.Duration) error {
	x.sent.Store(0)
	if x.Err == nil && x.Status != initiator.Good {
		again, err := j.again(x, now)
		if again || err != nil {
			return err
		}
	}
	if err := j.result(x); err != nil {
		return err
	}
	j.refused.ended()
	t := &j.tallies[x.dir]
	t.ios.Add(1)
	if j.measuring.Load() {
		t.record(now - x.began)
	}
	if j.memory != nil {
		if x.dir == read {
			if err := j.memory.check(x.place, x.buf); err != nil {
				return j.wrong(x, err)
			}
		}
		j.memory.give(x.place)
	}
	j.idle = append(j.idle, x)
	return nil
}

// result returns the error of an I/O that has ended. All of its data must have been transferred.
func (j *job) result(x *slot) error {
	err := x.Check()
	if err == nil && x.Residual != 0 {
		err = fmt.Errorf("%d bytes were not transferred", x.Residual)
	}
	if err != nil {
		return j.wrong(x, err)
	}
	return nil
}

func (j *job) wrong(x *slot, err error) error { return j.at(x.dir, x.place, err) }

// at adds to err which I/O has failed.
func (j *job) at(dir int, place int64, err error) error {
	return fmt.Errorf("%s of %d bytes at offset %d: %w", [...]string{"read", "write"}[dir], j.size, j.first+place*int64(j.size), err)
}

// verifyLen is how many bytes readBack reads at once, unless an I/O is longer.
const verifyLen = 1 << 20

// readBack verifies all that the job has written, and counts the places in done. It reads neighbours together.
func (j *job) readBack(ctx context.Context, done *atomic.Int64) error {
	versions := j.memory.versions
	most := max(verifyLen/j.size, 1)
	buf := make([]byte, most*j.size)
	for place := 0; place < len(versions); {
		n := 0
		for n < most && place+n < len(versions) && versions[place+n] != 0 {
			n++
		}
		if n == 0 {
			place++
			continue
		}
		if err := readWithin(ctx, j.disk, buf[:n*j.size], j.first+int64(place)*int64(j.size)); err != nil {
			return fmt.Errorf("verify: %w", err)
		}
		for i := range n {
			if err := j.memory.check(int64(place), buf[i*j.size:][:j.size]); err != nil {
				return fmt.Errorf("%d bytes at offset %d: %w", j.size, j.first+int64(place)*int64(j.size), err)
			}
			place++
		}
		done.Add(int64(n))
	}
	return nil
}

// written returns how many places the job has written.
func (m *memory) written() (n int64) {
	for _, v := range m.versions {
		if v != 0 {
			n++
		}
	}
	return n
}

// A pacer spaces I/Os evenly.
type pacer struct {
	interval, next time.Duration
}

func newPacer(o *Options, size int, now time.Duration) pacer {
	p := pacer{next: now}
	switch {
	case o.RateIOPS > 0:
		p.interval = time.Duration(float64(time.Second) / float64(o.RateIOPS))
	case o.Rate > 0:
		p.interval = time.Duration(float64(time.Second) * float64(size) / float64(o.Rate))
	}
	return p
}

// wait returns how long the next I/O has to wait.
func (p *pacer) wait(now time.Duration) time.Duration {
	if p.interval == 0 {
		return 0
	}
	p.next = max(p.next, now-time.Second) // what was missed in more than a second is lost
	return max(p.next-now, 0)
}

func (p *pacer) took(n int) { p.next += time.Duration(n) * p.interval }

// A memory knows what a job has written to each place.
type memory struct {
	seed     uint64
	versions []uint32 // 0: nothing yet
	busy     map[int64]bool
}

// take returns a place near to at that no I/O uses, and uses it.
func (m *memory) take(at int64) int64 {
	if m.busy == nil {
		m.busy = make(map[int64]bool, maxDepth)
	}
	for m.busy[at] {
		at = (at + 1) % int64(len(m.versions))
	}
	m.busy[at] = true
	return at
}

func (m *memory) give(at int64) { delete(m.busy, at) }

// write fills b with the next version of a place.
func (m *memory) write(place int64, b []byte) {
	m.versions[place]++
	if m.versions[place] == 0 {
		m.versions[place] = 1
	}
	m.content(place, func(i int, word uint64) bool { binary.LittleEndian.PutUint64(b[i:], word); return true }, len(b))
}

// check returns an error if b is not what was written to a place last. What was there before is not known.
func (m *memory) check(place int64, b []byte) (err error) {
	if m.versions[place] == 0 {
		return nil
	}
	m.content(place, func(i int, word uint64) bool {
		if got := binary.LittleEndian.Uint64(b[i:]); got != word {
			err = fmt.Errorf("verify: the data is wrong from byte %d on: %016x instead of %016x", i, got, word)
		}
		return err == nil
	}, len(b))
	return err
}

// content calls each with the words of a place and their offsets, until it returns false.
func (m *memory) content(place int64, each func(int, uint64) bool, n int) {
	state := m.seed ^ uint64(place)*0x9e3779b97f4a7c15 ^ uint64(m.versions[place])<<32
	for i := 0; i+8 <= n; i += 8 {
		word := binary.LittleEndian.Uint64([]byte(signature))
		if i%512 != 0 { // splitmix64
			state += 0x9e3779b97f4a7c15
			z := (state ^ state>>30) * 0xbf58476d1ce4e5b9
			z = (z ^ z>>27) * 0x94d049bb133111eb
			word = z ^ z>>31
		}
		if !each(i, word) {
			return
		}
	}
}
