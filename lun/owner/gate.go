package owner

import (
	"sync/atomic"
	"time"
)

// epoch is what monotonic times count from.
var epoch = time.Now()

// A gate says whether a gateway holds its lease for sure. It closes by itself.
//
// It looks at two clocks, and the earlier one counts: the monotonic clock of Linux stops while a machine is suspended, and the other one
// can be set back.
type gate struct {
	monotonic, wall atomic.Int64 // when it closes: since epoch, and Unix time, ns
}

// extend leaves the gate open until so long after from.
func (g *gate) extend(from time.Time, by time.Duration) {
	end := from.Add(by)
	g.monotonic.Store(int64(end.Sub(epoch)))
	g.wall.Store(end.UnixNano())
}

// isOpen reports whether the gate is open. nil is not.
func (g *gate) isOpen() bool {
	if g == nil {
		return false
	}
	now := time.Now()
	return int64(now.Sub(epoch)) < g.monotonic.Load() && now.UnixNano() < g.wall.Load()
}
