package bench

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/iser-target/iser-target/iscsi/initiator"
)

const (
	// ioTime limits how long the target may take for one I/O. It is that of Linux disks (/sys/block/*/device/timeout).
	ioTime = 30 * time.Second
	// repeatTime limits how long an I/O is repeated. Linux has the same limit: five retries of 30 s, and the first try.
	repeatTime = 3 * time.Minute
	// pauseTime is how long an I/O waits after BUSY or TASK SET FULL, as in Linux. While the target refuses all I/Os, it doubles up to
	// 32 times that.
	pauseTime   = 3 * time.Millisecond
	maxDoubling = 5
	// raiseTime is the time without a refusal after which one more I/O may be in progress.
	raiseTime = 100 * time.Millisecond
)

// errSilent is why a run ends whose I/Os do not.
var errSilent = fmt.Errorf("the target has not answered for %v", ioTime)

// Repeats counts I/Os that the target did not do at first. They were repeated.
type Repeats struct {
	Busy, TaskSetFull uint64
	// Attentions counts unit attentions by their additional sense.
	Attentions map[initiator.Sense]uint64
}

// add adds those of another job.
func (r *Repeats) add(other *Repeats) {
	r.Busy += other.Busy
	r.TaskSetFull += other.TaskSetFull
	for sense, n := range other.Attentions {
		r.attention(sense, n)
	}
}

func (r *Repeats) attention(s initiator.Sense, n uint64) {
	if r.Attentions == nil {
		r.Attentions = map[initiator.Sense]uint64{}
	}
	r.Attentions[s] += n
}

// Total returns how often I/Os were repeated.
func (r *Repeats) Total() uint64 {
	n := r.Busy + r.TaskSetFull
	for _, a := range r.Attentions {
		n += a
	}
	return n
}

// senses returns the unit attentions in ascending order.
func (r *Repeats) senses() []initiator.Sense {
	return slices.SortedFunc(maps.Keys(r.Attentions), func(a, b initiator.Sense) int {
		return (int(a.ASC)<<8 | int(a.ASCQ)) - (int(b.ASC)<<8 | int(b.ASCQ))
	})
}

// String returns the counts in words.
func (r *Repeats) String() string {
	var list []string
	for _, s := range r.senses() {
		list = append(list, fmt.Sprintf("%d after %v", r.Attentions[s], s))
	}
	if r.Busy > 0 {
		list = append(list, fmt.Sprintf("%d after BUSY", r.Busy))
	}
	if r.TaskSetFull > 0 {
		list = append(list, fmt.Sprintf("%d after TASK SET FULL", r.TaskSetFull))
	}
	return strings.Join(list, ", ")
}

// refusals are the I/Os of a job that the target did not do, and how many more it is given. Until the first one, limit is the depth
// of the job, so nothing waits.
type refusals struct {
	depth  int
	limit  int // I/Os in progress at most
	lowest int // value of limit
	// waiting are those to repeat, in the order of their refusals.
	waiting []*slot
	raise   time.Duration // when limit may grow
	resume  time.Duration // when the target gets I/Os again, after it has refused its only one
	streak  int           // refusals of only I/Os since one succeeded
}

func (r *refusals) init(depth int) {
	r.depth, r.limit, r.lowest, r.waiting = depth, depth, depth, make([]*slot, 0, depth)
}

// add notes that the target has refused x while it had others in progress.
func (r *refusals) add(x *slot, now time.Duration, others int) {
	r.limit = max(1, min(r.limit, others))
	r.lowest = min(r.lowest, r.limit)
	r.raise = now + raiseTime
	x.due = now + pauseTime
	if others == 0 {
		x.due = now + pauseTime<<min(r.streak, maxDoubling)
		r.resume = x.due
		r.streak++
	}
	r.waiting = append(r.waiting, x)
}

// ended notes that an I/O succeeded.
func (r *refusals) ended() { r.resume, r.streak = 0, 0 }

// room reports whether the target may get a new I/O when it has others in progress. What is repeated comes before.
func (r *refusals) room(now time.Duration, others int) bool {
	if r.limit < r.depth && now >= r.raise {
		r.limit++
		r.raise = now + raiseTime
	}
	return others < r.limit && (others > 0 || len(r.waiting) == 0) && now >= r.resume
}

// next removes and returns the first I/O that can be repeated now. Without one it returns how long the first one has to wait;
// 0 if it waits for the end of others.
func (r *refusals) next(now time.Duration, others int) (x *slot, wait time.Duration) {
	if len(r.waiting) == 0 || others >= r.limit {
		return nil, 0
	}
	first := 0
	for i, x := range r.waiting {
		if x.due < r.waiting[first].due {
			first = i
		}
	}
	x = r.waiting[first]
	if due := max(x.due, r.resume); due > now {
		return nil, due - now
	}
	r.waiting = slices.Delete(r.waiting, first, first+1)
	return x, 0
}

// again repeats an I/O as an initiator of Linux does: at once after a unit attention, and after a pause, with less I/Os in progress, after
// BUSY and TASK SET FULL. The target has not done the I/O then (SAM-5, sections 5.3.1 and 5.14). It returns false for other statuses.
func (j *job) again(x *slot, now time.Duration) (bool, error) {
	n := &j.tallies[x.dir].repeats
	switch sense := initiator.ParseSense(x.Sense); {
	case x.Status == initiator.CheckCondition && sense.Key == initiator.UnitAttention:
		n.attention(sense, 1)
	case x.Status == initiator.Busy:
		n.Busy++
	case x.Status == initiator.TaskSetFull:
		n.TaskSetFull++
	default:
		return false, nil
	}
	if now-x.began > repeatTime {
		return false, j.wrong(x, fmt.Errorf("repeated for %v: %w", repeatTime, x.Check()))
	}
	j.repeated.Add(1)
	if x.Status == initiator.CheckCondition {
		if j.stopping.Load() {
			j.refused.waiting = append(j.refused.waiting, x) // for abandon
			return true, nil
		}
		return true, j.queue(x)
	}
	j.refused.add(x, now, j.flying()-1)
	return true, nil
}

// readWithin reads, and returns an error after ioTime.
func readWithin(ctx context.Context, d *initiator.Disk, p []byte, off int64) error {
	ctx, cancel := context.WithTimeoutCause(ctx, ioTime, errSilent)
	defer cancel()
	return d.Read(ctx, p, off)
}
