package fair

import "time"

// Rates are what a LUN, or an initiator of it, may have per second, and what it gets when others want
// more than there is. A field of 0 limits or guarantees nothing. Bursts are what may begin at once after a
// pause, on top of the limit; 0 means as much as the limit allows in 20 ms.
type Rates struct {
	IOPS           int64 // limit of commands per second
	Bandwidth      int64 // limit of bytes per second that move to or from the medium
	IOPSBurst      int64 // commands
	BandwidthBurst int64 // bytes

	MinIOPS      int64 // guaranteed commands per second
	MinBandwidth int64 // guaranteed bytes per second
}

// leastBurst is how much of a limit may at least begin at once: timers are late.
const leastBurst = 20 * time.Millisecond

// floorSpan is how long a guarantee remembers that it got less, or more.
const floorSpan = 50 * time.Millisecond

// A limiter is the limit of one rate, by the generic cell rate algorithm.
type limiter struct {
	rate  float64 // per second; 0: no limit
	burst time.Duration
	next  time.Duration // when the rate allows more than it has let pass
}

func newLimiter(rate, burst int64) limiter {
	l := limiter{rate: float64(rate)}
	if rate > 0 {
		l.burst = max(time.Duration(float64(burst)/l.rate*float64(time.Second)), leastBurst)
	}
	return l
}

// ready returns from when on the next call may pass.
func (l *limiter) ready() time.Duration { return l.next - l.burst }

func (l *limiter) charge(now time.Duration, n int64) {
	if l.rate > 0 {
		l.next = max(l.next, now) + time.Duration(float64(n)/l.rate*float64(time.Second))
	}
}

// change sets rate and burst and keeps what is not paid for, as far as the new rate takes no longer.
func (l *limiter) change(now time.Duration, to limiter) {
	if l.rate > 0 && to.rate > 0 && l.next > now {
		to.next = now + time.Duration(float64(l.next-now)*min(l.rate/to.rate, 1))
	}
	*l = to
}

// A floor is the guarantee of one rate.
type floor struct {
	rate float64       // per second; 0: none
	due  time.Duration // when the next work is due
}

func (f *floor) charge(now time.Duration, n int64) {
	if f.rate > 0 {
		due := max(f.due, now-floorSpan) + time.Duration(float64(n)/f.rate*float64(time.Second))
		f.due = min(due, now+floorSpan)
	}
}

// A meter has the rates of a LUN or of an initiator of it.
type meter struct {
	ops, bytes       limiter
	minOps, minBytes floor
}

// set sets the rates. Work that was let pass stays counted.
func (m *meter) set(now time.Duration, r Rates) {
	m.ops.change(now, newLimiter(r.IOPS, r.IOPSBurst))
	m.bytes.change(now, newLimiter(r.Bandwidth, r.BandwidthBurst))
	m.minOps.rate, m.minBytes.rate = float64(r.MinIOPS), float64(r.MinBandwidth)
}

// limits reports whether m limits or guarantees anything.
func (m *meter) limits() bool { return m.ops.rate > 0 || m.bytes.rate > 0 || m.guarantees() }

func (m *meter) guarantees() bool { return m.minOps.rate > 0 || m.minBytes.rate > 0 }

// ready returns from when on the next call may pass.
func (m *meter) ready() time.Duration { return max(m.ops.ready(), m.bytes.ready()) }

// due returns when the next work is due by the guarantee, and false if that is later, or never.
func (m *meter) due(now time.Duration) (at time.Duration, ok bool) {
	at = never
	for _, f := range [...]*floor{&m.minOps, &m.minBytes} {
		if f.rate > 0 {
			at = min(at, f.due)
		}
	}
	return at, at <= now
}

func (m *meter) charge(now time.Duration, w Work) {
	m.ops.charge(now, w.Ops)
	m.bytes.charge(now, w.Bytes)
	m.minOps.charge(now, w.Ops)
	m.minBytes.charge(now, w.Bytes)
}

// idle reports whether m has forgotten all that it let pass.
func (m *meter) idle(now time.Duration) bool { return max(m.ops.next, m.bytes.next) <= now }

const never = time.Duration(1<<63 - 1)
