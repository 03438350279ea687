package daemon

import (
	"sync"
	"time"

	"github.com/iser-target/iser-target/iscsi"
)

// depthInterval is how often the daemon notes the time that the commands of each session took so far. A mean covers the
// last one to two intervals, or the time since the login.
const depthInterval = 5 * time.Second

// depths has what the mean number of commands in progress of a session is calculated from. Commands do nothing for it.
type depths struct {
	mu    sync.Mutex
	marks [2]depthMark // the older one first
}

// A depthMark has the time that the commands of each session had taken at a time.
type depthMark struct {
	at   time.Time
	sums map[depthKey]time.Duration
}

// A depthKey tells a session from a later one with the same TSIH.
type depthKey struct {
	tsih    uint16
	started int64 // Unix time in ns
}

// begin forgets all marks: sessions that began before now have no mean until the next mark.
func (d *depths) begin(now time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.marks = [2]depthMark{{at: now}, {at: now}}
}

// note adds a mark, and forgets the older one.
func (d *depths) note(now time.Time, list []iscsi.SessionTime) {
	m := depthMark{now, make(map[depthKey]time.Duration, len(list))}
	for _, s := range list {
		m.sums[depthKey{s.TSIH, s.Started.UnixNano()}] = s.Sum
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.marks = [2]depthMark{d.marks[1], m}
}

// mean returns the mean number of commands in progress of s: the time that all commands took which ended, per time
// (Little's law). If none ended, it is the number of tasks now.
func (d *depths) mean(s *iscsi.SessionInfo, now time.Time) float64 {
	instant := float64(s.Tasks)
	if s.Operations == nil {
		return instant
	}
	var sum time.Duration
	for k := range s.Operations {
		sum += s.Operations[k].Sum
	}
	since, before, found := s.Started, time.Duration(0), false
	d.mu.Lock()
	oldest := d.marks[0].at
	for _, m := range d.marks {
		if was, ok := m.sums[depthKey{s.TSIH, s.Started.UnixNano()}]; ok {
			since, before, found = m.at, was, true
			break
		}
	}
	d.mu.Unlock()
	period := now.Sub(since)
	if !found && since.Before(oldest) || period <= 0 || sum <= before {
		return instant
	}
	return (sum - before).Seconds() / period.Seconds()
}
