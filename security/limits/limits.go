// Package limits has the bounds of what initiators, addresses and LUNs share: places, memory, calls
// of stores, time and lines of log. Every bound is a Limit in a Set. The YAML, `iser-target limits`,
// the metrics and the events all show the Set, so a new bound is one field here, one key in the
// configuration, and calls of Take and Give where it bites. docs/limits.md explains the design.
package limits

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// A Scope says for whom a Limit counts.
type Scope string

// The scopes, from the widest to the narrowest.
const (
	PerProcess    Scope = "process"
	PerPortal     Scope = "portal"
	PerAddress    Scope = "address" // an IPv4 address, or a /64 of IPv6: see AddressKey
	PerUser       Scope = "user"    // a CHAP name
	PerInitiator  Scope = "initiator"
	PerLUN        Scope = "lun"
	PerSession    Scope = "session"
	PerConnection Scope = "connection"
)

// A Unit says what the numbers of a Limit mean.
type Unit string

// The units.
const (
	Count     Unit = "count"
	Bytes     Unit = "bytes"
	Duration  Unit = "duration" // nanoseconds
	PerSecond Unit = "per second"
)

// A Limit bounds one thing. Its methods are safe for concurrent use and allocate nothing.
type Limit struct {
	name  string
	help  string
	scope Scope
	unit  Unit

	set   *Set
	auto  int64 // what a bound of 0 stands for, if that follows from the machine
	max   atomic.Int64
	used  atomic.Int64 // of the process, or of the key that uses most
	bites atomic.Uint64
	count atomic.Pointer[func() (used int64, by string)] // who counts what is in use instead of used
	last  atomic.Int64                                   // when it bit last, in nanoseconds of the wall clock; 0: never
}

// Name returns the key of l below `limits` in the YAML.
func (l *Limit) Name() string { return l.name }

// Max returns the bound, in the unit of l.
func (l *Limit) Max() int64 { return l.max.Load() }

// Time returns the bound of a limit with unit Duration.
func (l *Limit) Time() time.Duration { return time.Duration(l.max.Load()) }

// SetMax changes the bound. 0 means the default where that follows from the machine. What is in use
// beyond the bound stays until it is given back.
func (l *Limit) SetMax(n int64) {
	if n == 0 {
		n = l.auto
	}
	l.max.Store(n)
}

// Measure makes f say how much is in use, and by which key, where somebody counts without Take and
// Give.
func (l *Limit) Measure(f func() (used int64, by string)) { l.count.Store(&f) }

// Used returns how much is in use: in the process, or by the key that uses most.
func (l *Limit) Used() int64 {
	if f := l.count.Load(); f != nil {
		used, _ := (*f)()
		return used
	}
	return l.used.Load()
}

// Take takes n if that leaves the use within the bound. It does not count as a bite: callers that
// refuse or wait because of it call Bite.
func (l *Limit) Take(n int64) bool {
	if l.used.Add(n) <= l.max.Load() {
		return true
	}
	l.used.Add(-n)
	return false
}

// Add takes n, also beyond the bound. Give gives it back.
func (l *Limit) Add(n int64) { l.used.Add(n) }

// Give gives back what Take or Add has taken.
func (l *Limit) Give(n int64) { l.used.Add(-n) }

// quiet is how long a Limit must not have bitten for the next bite to be news again.
const quiet = time.Minute

// Bite counts that l has refused something, or made it wait. who says whom, as in an address or a
// name. The first bite after a quiet minute is reported to the observer of the Set.
func (l *Limit) Bite(who string) {
	l.bites.Add(1)
	now := time.Now().UnixNano()
	before := l.last.Swap(now)
	if before != 0 && now-before < int64(quiet) || l.set == nil {
		return
	}
	if f := l.set.observer.Load(); f != nil {
		(*f)(Bite{Limit: l, Who: who, Max: l.Max(), Used: l.Used()})
	}
}

// A Bite is news: a Limit has begun to refuse, or to make wait.
type Bite struct {
	Limit *Limit
	Who   string
	Max   int64
	Used  int64
}

// A State is a Limit at one time.
type State struct {
	Name  string    `json:"name"`
	Scope Scope     `json:"per"`
	Unit  Unit      `json:"unit"`
	Help  string    `json:"help"`
	Max   int64     `json:"max"`
	Used  int64     `json:"used"`  // of the process, or of the key that uses most
	By    string    `json:"by"`    // that key; empty for the process
	Bites uint64    `json:"bites"` // since the start
	Last  time.Time `json:"last,omitzero"`
}

// State returns l at this time.
func (l *Limit) State() State {
	s := State{Name: l.name, Scope: l.scope, Unit: l.unit, Help: l.help, Max: l.Max(), Used: l.Used(), Bites: l.bites.Load()}
	if f := l.count.Load(); f != nil {
		s.Used, s.By = (*f)()
	}
	if at := l.last.Load(); at != 0 {
		s.Last = time.Unix(0, at)
	}
	return s
}

// A Keyed bounds one thing for each key of a scope: an address, a name, a LUN. Keys that use nothing
// take no memory.
type Keyed struct {
	Limit
	mu   sync.Mutex // a leaf
	uses map[string]int64
	most string // the key that uses most, as far as known
}

// Take takes n for the key if that leaves its use within the bound.
func (k *Keyed) Take(key string, n int64) bool { return k.take(key, n, k.Max()) }

// Add takes n for the key, also beyond the bound.
func (k *Keyed) Add(key string, n int64) { k.take(key, n, 1<<62) }

func (k *Keyed) take(key string, n, bound int64) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	now := k.uses[key] + n
	if now > bound {
		return false
	}
	if k.uses == nil {
		k.uses = map[string]int64{}
	}
	k.uses[key] = now
	if key == k.most || now > k.used.Load() {
		k.most = key
		k.used.Store(now)
	}
	return true
}

// Give gives back what Take or Add has taken for the key.
func (k *Keyed) Give(key string, n int64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	now := k.uses[key] - n
	if now > 0 {
		k.uses[key] = now
	} else {
		delete(k.uses, key)
	}
	if key != k.most {
		return
	}
	k.most, now = "", 0
	for o, n := range k.uses {
		if n > now || n == now && o < k.most {
			k.most, now = o, n
		}
	}
	k.used.Store(now)
}

// UsedBy returns how much the key uses.
func (k *Keyed) UsedBy(key string) int64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.uses[key]
}

// Most returns the key that uses most; empty if none uses anything.
func (k *Keyed) Most() string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.most
}

// State returns k at this time.
func (k *Keyed) State() State {
	s := k.Limit.State()
	s.By = k.Most()
	return s
}

// stater is a Limit or a Keyed.
type stater interface {
	State() State
	Name() string
	SetMax(int64)
}

// Observe makes f hear of the first Bite of each Limit, and of the first one after each quiet minute.
// f returns soon. It may be called with locks held, so it calls nothing of the target.
func (s *Set) Observe(f func(Bite)) { s.observer.Store(&f) }

// State returns all limits, in the order of the fields of Set.
func (s *Set) State() []State {
	list := make([]State, len(s.all))
	for i, l := range s.all {
		list[i] = l.State()
	}
	return list
}

// Apply sets the bounds by their names. Names that the Set does not have are ignored: they bound
// something that is not shared.
func (s *Set) Apply(bounds map[string]int64) {
	for _, l := range s.all {
		if n, ok := bounds[l.Name()]; ok {
			l.SetMax(n)
		}
	}
}

// String returns the bound in words for messages, as in "limits.max_connections is 1024".
func (l *Limit) String() string {
	if l.unit == Duration {
		return fmt.Sprintf("limits.%s is %v", l.name, l.Time())
	}
	return fmt.Sprintf("limits.%s is %d", l.name, l.Max())
}
