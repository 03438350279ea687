package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/iscsi/initiator"
)

const (
	sampleTime = time.Second
	// loginTime limits how long the sessions of a run may take to log in.
	loginTime = 30 * time.Second
	// endTime limits how long the I/Os in progress at the end of a run may take.
	endTime = ioTime
	// leaveTime limits it after an interrupt.
	leaveTime = 2 * time.Second
)

// errLogin is why a login ends that a target does not answer.
var errLogin = fmt.Errorf("the target has not answered for %v", loginTime)

// A Result is what a run has measured.
type Result struct {
	Size, Depth int
	Began       time.Time
	Elapsed     time.Duration // of the measurement, without the ramp
	Directions  [directions]Direction
	Depths      [8]uint64 // I/Os that found this many in progress: 1, 2, 4, ... 64 and more
	Initiator   Usage     // of this process
	Target      *Target   // nil: not known
	Verified    int64     // I/Os that were read again at the end and were right
	Interrupted bool      // before its time was over
	Err         error     // why it ended before its time; nil: it did not, or it was interrupted
	LowestDepth int       // I/Os in progress of a job at most after BUSY or TASK SET FULL; Depth without them
}

// A Direction has the I/Os of one direction. Latencies are ns.
type Direction struct {
	IOs, Bytes      uint64
	Latency         *hdrhistogram.Histogram
	Min, Max        int64
	Mean, Deviation float64
	Recorded        uint64    // latencies
	Repeats         Repeats   // of the whole run, with its ramp
	IOPS, Bandwidth []float64 // per second, in each second
	sum, squares    float64
}

// A Usage is what a process has used during a run.
type Usage struct {
	User, System                       time.Duration
	Switches, MajorFaults, MinorFaults int64
}

// A Target is what the target measured during a run, for the sessions of the run.
type Target struct {
	CPU    time.Duration // of the whole process, sessions of others included; 0: not known
	Phases []Phase
}

// A Phase is the time that commands spent in one phase, as top and the metrics name them.
type Phase struct {
	Name  string
	Count uint64
	Sum   time.Duration
}

// A Progress is the state of the present run.
type Progress struct {
	Run, Runs   int // the first is 1
	Size, Depth int
	Ramp        bool
	Elapsed, Of time.Duration
	IOPS        [directions]float64 // in the last second
	Bandwidth   [directions]float64 // bytes per second
	Repeated    uint64              // I/Os since the run began, see Repeats

	// After the I/O of a run that verifies: how many of the places that were written are verified so far.
	Verified, Written int64
}

// Hooks are what a caller takes part in. Each may be nil.
type Hooks struct {
	Progress func(Progress)
	// Target returns what the target has measured so far for the sessions with these TSIHs.
	Target func(ctx context.Context, tsihs []uint16) (*Target, error)
	// Note gets a line for the user.
	Note func(string)
}

// Run does all runs of o, in the order of block sizes and then depths. With an error, the results are those of the runs before.
// If ctx ends, the results have what was measured, and the error is that of ctx.
func Run(ctx context.Context, o Options, h Hooks) ([]*Result, error) {
	if err := o.Check(); err != nil {
		return nil, err
	}
	if err := prepare(ctx, &o, h); err != nil {
		return nil, err
	}
	var results []*Result
	for _, size := range o.Sizes {
		for _, depth := range o.Depths {
			p := Progress{Run: len(results) + 1, Runs: len(o.Sizes) * len(o.Depths), Size: size, Depth: depth}
			r, err := one(ctx, &o, h, p)
			if r != nil {
				results = append(results, r)
			}
			if err == nil {
				err = ctx.Err()
			}
			if err != nil {
				return results, err
			}
		}
	}
	return results, nil
}

// prepare checks o against the LUN, and the LUN before it is overwritten.
func prepare(ctx context.Context, o *Options, h Hooks) error {
	login, cancel := context.WithTimeoutCause(ctx, loginTime, errLogin)
	defer cancel()
	s, err := initiator.Connect(login, o.Address, o.Login)
	if err != nil {
		return err
	}
	defer s.Close()
	d, err := s.Open(login, o.LUN)
	if err != nil {
		return err
	}
	if err := o.checkDisk(d); err != nil {
		return err
	}
	if o.writes() && !o.Destructive {
		found, err := Inspect(ctx, d)
		if err != nil {
			return fmt.Errorf("looking for data: %w. Nothing was written", err)
		}
		if found != "" {
			return &DataError{LUN: o.LUN, Found: found}
		}
	}
	if n := s.Connections(); n < o.Login.Connections && h.Note != nil {
		h.Note(fmt.Sprintf("the target agreed to %d of %d connections for each session", n, o.Login.Connections))
	}
	logout, cancel := context.WithTimeout(ctx, endTime)
	defer cancel()
	s.Logout(logout) // an error does not matter
	return nil
}

// A DataError refuses to overwrite data.
type DataError struct {
	LUN   int
	Found string
}

// Error implements error.
func (e *DataError) Error() string {
	return fmt.Sprintf("LUN %d has data: %s. Nothing was written", e.LUN, e.Found)
}

// one does one run.
func one(ctx context.Context, o *Options, h Hooks, p Progress) (*Result, error) {
	jobs, err := begin(ctx, o, p)
	if err != nil {
		return nil, err
	}
	defer func() {
		for _, j := range jobs {
			j.session.Close()
		}
	}()
	var tsihs []uint16
	for _, j := range jobs {
		tsihs = append(tsihs, j.session.Params().TSIH)
	}
	var running sync.WaitGroup
	failed := make(chan error, len(jobs))
	for _, j := range jobs {
		running.Go(func() {
			if err := j.run(); err != nil {
				failed <- err
			}
		})
	}
	m := &measurement{o: o, h: h, p: p, jobs: jobs, tsihs: tsihs, failed: failed}
	r, err := m.run(ctx)
	for _, j := range jobs {
		j.stop()
	}
	patience := endTime
	if ctx.Err() != nil {
		patience = leaveTime
	}
	late := time.AfterFunc(patience, func() {
		for _, j := range jobs {
			j.session.Close() // its I/Os end with an error
		}
	})
	if err != nil {
		for _, j := range jobs {
			j.session.Close()
		}
	}
	running.Wait()
	switch ended := late.Stop(); {
	case err != nil:
	case ctx.Err() != nil:
		err = ctx.Err()
	case !ended:
		err = fmt.Errorf("I/Os were still in progress %v after the end of the run", endTime)
	default:
		select {
		case err = <-failed:
		default:
		}
	}
	if r == nil {
		return nil, err
	}
	for _, j := range jobs {
		r.add(j)
	}
	r.finish()
	if err != nil && ctx.Err() == nil {
		r.Err = err
	}
	if err == nil && o.Verify {
		if r.Verified, err = readBack(ctx, h, p, jobs); err != nil && ctx.Err() == nil {
			r.Err = err
		}
	}
	for _, j := range jobs {
		if err == nil {
			j.session.Logout(ctx) // an error does not matter
		}
	}
	return r, err
}

// readBack verifies what all jobs have written, and returns how many places were right. It shows its progress each second.
func readBack(ctx context.Context, h Hooks, p Progress, jobs []*job) (verified int64, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var done atomic.Int64
	var running sync.WaitGroup
	for _, j := range jobs {
		p.Written += j.memory.written()
		running.Go(func() {
			if err := j.readBack(ctx, &done); err != nil {
				cancel(err) // the first one is the reason
			}
		})
	}
	ended := make(chan struct{})
	go func() {
		running.Wait()
		close(ended)
	}()
	tick := time.NewTicker(sampleTime)
	defer tick.Stop()
	for {
		select {
		case <-ended:
			return done.Load(), context.Cause(ctx)
		case <-tick.C:
			if p.Verified = done.Load(); h.Progress != nil {
				h.Progress(p)
			}
		}
	}
}

// begin logs in all jobs.
func begin(ctx context.Context, o *Options, p Progress) (jobs []*job, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, loginTime, errLogin)
	defer cancel()
	for i := range o.Jobs {
		j, err := newJob(ctx, o, i, p.Size, p.Depth)
		if err != nil {
			for _, j := range jobs {
				j.session.Close()
			}
			return nil, fmt.Errorf("job %d: %w", i+1, err)
		}
		jobs = append(jobs, j)
	}
	return jobs, nil
}

// A measurement samples running jobs.
type measurement struct {
	o      *Options
	h      Hooks
	p      Progress
	jobs   []*job
	tsihs  []uint16
	failed chan error
}

// counts are the sums of all jobs.
type counts struct{ ios, bytes [directions]uint64 }

func (m *measurement) counts() (c counts) {
	for _, j := range m.jobs {
		for d := range c.ios {
			n := j.tallies[d].ios.Load()
			c.ios[d] += n
			c.bytes[d] += n * uint64(j.size)
		}
	}
	return c
}

// run lets the jobs work for their time, and returns a result without the latencies.
func (m *measurement) run(ctx context.Context) (*Result, error) {
	if m.o.Ramp > 0 {
		m.p.Ramp = true
		if done, err := m.sample(ctx, m.o.Ramp, nil); err != nil || done {
			return nil, err
		}
		m.p.Ramp = false
	}
	r := &Result{Size: m.p.Size, Depth: m.p.Depth, Began: time.Now()}
	before, err := m.target(ctx)
	if err != nil {
		return nil, err
	}
	usage, first, began := usageNow(), m.counts(), clock()
	for _, j := range m.jobs {
		j.measuring.Store(true)
	}
	interrupted, err := m.sample(ctx, m.o.Runtime, r)
	for _, j := range m.jobs {
		j.measuring.Store(false)
	}
	last := m.counts()
	r.Elapsed, r.Interrupted = clock()-began, interrupted
	r.Initiator = usageNow().minus(usage)
	for d := range r.Directions {
		r.Directions[d].IOs, r.Directions[d].Bytes = last.ios[d]-first.ios[d], last.bytes[d]-first.bytes[d]
	}
	if before != nil {
		after, err := m.target(context.WithoutCancel(ctx))
		if err != nil {
			return r, err
		}
		r.Target = after.minus(before)
	}
	return r, err
}

func (m *measurement) target(ctx context.Context) (*Target, error) {
	if m.h.Target == nil {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, loginTime)
	defer cancel()
	return m.h.Target(ctx, m.tsihs)
}

// sample takes samples for a time, and adds them to r unless that is nil. It reports whether ctx has ended.
func (m *measurement) sample(ctx context.Context, of time.Duration, r *Result) (interrupted bool, err error) {
	began := clock()
	was, at := m.counts(), began
	tick := time.NewTicker(sampleTime)
	defer tick.Stop()
	end := time.NewTimer(of)
	defer end.Stop()
	for {
		select {
		case <-ctx.Done():
			return true, nil
		case err := <-m.failed:
			return false, err
		case <-end.C:
			if r != nil && len(r.Directions[0].IOPS) == 0 { // a time of one second may end before its tick
				m.add(r, was, at)
			}
			return false, nil
		case <-tick.C:
		}
		now := clock()
		for _, j := range m.jobs {
			if err := j.watch(now); err != nil {
				return false, err
			}
		}
		rates := m.add(r, was, at)
		was, at = m.counts(), now
		if m.h.Progress != nil {
			p := m.p
			p.Elapsed, p.Of, p.Repeated = now-began, of, 0
			for _, j := range m.jobs {
				p.Repeated += j.repeated.Load()
			}
			for d := range rates {
				p.IOPS[d], p.Bandwidth[d] = rates[d][0], rates[d][1]
			}
			m.h.Progress(p)
		}
	}
}

// add adds a sample of what has happened since was, and returns the rates of I/Os and bytes.
func (m *measurement) add(r *Result, was counts, at time.Duration) (rates [directions][2]float64) {
	is, seconds := m.counts(), (clock() - at).Seconds()
	for d := range rates {
		rates[d] = [2]float64{float64(is.ios[d]-was.ios[d]) / seconds, float64(is.bytes[d]-was.bytes[d]) / seconds}
		if r != nil {
			r.Directions[d].IOPS = append(r.Directions[d].IOPS, rates[d][0])
			r.Directions[d].Bandwidth = append(r.Directions[d].Bandwidth, rates[d][1])
		}
	}
	return rates
}

// add adds the latencies of a job that has ended.
func (r *Result) add(j *job) {
	for d := range r.Directions {
		t, x := &j.tallies[d], &r.Directions[d]
		if x.Latency == nil {
			x.Latency = hdrhistogram.New(1, int64(maxLatency), 3)
		}
		x.Latency.Merge(t.latency)
		if t.low > 0 && (x.Min == 0 || t.low < x.Min) {
			x.Min = t.low
		}
		x.Max = max(x.Max, t.high)
		x.sum += t.sum
		x.squares += t.squares
		x.Repeats.add(&t.repeats)
	}
	if low := j.refused.lowest; r.LowestDepth == 0 || low < r.LowestDepth {
		r.LowestDepth = low
	}
	for i, n := range j.depths {
		r.Depths[i] += n
	}
}

// finish computes means.
func (r *Result) finish() {
	for d := range r.Directions {
		x := &r.Directions[d]
		x.Recorded = uint64(x.Latency.TotalCount())
		if n := float64(x.Recorded); n > 0 {
			x.Mean = x.sum / n
			x.Deviation = math.Sqrt(max(x.squares/n-x.Mean*x.Mean, 0))
		}
	}
}

// PerSecond returns the I/Os and the bytes per second of a direction.
func (r *Result) PerSecond(d int) (iops, bandwidth float64) {
	if s := r.Elapsed.Seconds(); s > 0 {
		return float64(r.Directions[d].IOs) / s, float64(r.Directions[d].Bytes) / s
	}
	return 0, 0
}

// usageNow returns what this process has used so far.
func usageNow() Usage {
	var u unix.Rusage
	unix.Getrusage(unix.RUSAGE_SELF, &u) // cannot fail
	return Usage{User: time.Duration(u.Utime.Nano()), System: time.Duration(u.Stime.Nano()), Switches: u.Nvcsw + u.Nivcsw,
		MajorFaults: u.Majflt, MinorFaults: u.Minflt}
}

func (u Usage) minus(v Usage) Usage {
	return Usage{u.User - v.User, u.System - v.System, u.Switches - v.Switches, u.MajorFaults - v.MajorFaults, u.MinorFaults - v.MinorFaults}
}

// minus returns what has happened since before.
func (t *Target) minus(before *Target) *Target {
	if t == nil {
		return nil
	}
	d := &Target{CPU: t.CPU - before.CPU}
	for _, p := range t.Phases {
		for _, q := range before.Phases {
			if q.Name == p.Name {
				p.Count -= min(q.Count, p.Count)
				p.Sum -= min(q.Sum, p.Sum)
			}
		}
		d.Phases = append(d.Phases, p)
	}
	return d
}

// Interrupted reports whether err is the end of the context of Run.
func Interrupted(err error) bool { return errors.Is(err, context.Canceled) }
