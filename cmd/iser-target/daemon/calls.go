package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/lun"
)

// A store that hangs, because its server is gone or its device is stuck, keeps the
// goroutine that asks it for something, and the thread below, for as long as it likes. So
// nobody who has a lock, or a turn, asks a store himself: a goroutine does, is waited for
// for a time, and then left alone. It is the only one of that store: who asks for more
// waits for it, too, and when it is back things go on from there.

// waits are how long stores may take before nobody waits for them any more.
type waits struct {
	store time.Duration // to open while a change waits
	slow  time.Duration // to have another size, or to close, which synchronizes, while a change waits
	brief time.Duration // to open while nobody waits
	close time.Duration // to close, when a LUN is removed
	start time.Duration // to open at the start, all together
	turn  time.Duration // to let changes come to their end at the end
	end   time.Duration // to close at the end, all together
	slot  time.Duration // to let another one begin, then
	most  int           // stores that are waited for at one time: see calls
}

var defaultWaits = waits{
	store: 20 * time.Second,
	slow:  45 * time.Second, // less than who waits for a turn has
	brief: 20 * time.Millisecond,
	close: 5 * time.Second,
	start: 15 * time.Second,
	turn:  10 * time.Second,
	end:   25 * time.Second, // less, with turn, than stopSlack
	slot:  250 * time.Millisecond,
	most:  1024,
}

// ErrStuck is in errors about a store that does not answer.
var ErrStuck = errors.New("the store does not answer")

// calls are what stores have been asked and have not answered yet. There are no more than
// most, for what never comes back keeps a thread, of which a process has 10000; but to close
// what is open is always possible.
type calls struct {
	most int

	mu    sync.Mutex
	under map[callKey]*call
	open  int // those that do not close
}

// A callKey is what there is one call for at a time.
type callKey struct {
	store   string // see storeKey
	closing bool
}

// A call is what a store has been asked.
type call struct {
	cs    *calls
	key   callKey
	what  string // like "opening it"
	since time.Time
	done  chan struct{} // closed when it is back, and what was to follow is done
	err   error         // valid then
	unit  *lun.Unit     // and so is what opening has made

	left bool        // guarded by cs.mu: nobody wants what comes of it
	back bool        // guarded by cs.mu
	late func(error) // guarded by cs.mu: follows when it is left
}

// storeKey is what a LUN lies on.
func storeKey(target string, l *config.LUN) string {
	return cmp.Or(l.Path, fmt.Sprintf("%s/%d", target, l.ID))
}

// closing is the what of a call that closes.
const closing = "closing it"

// begin has a goroutine ask the store. An ErrStuck tells that it is being asked for
// something already, or that there are as many as there may be.
func (cs *calls) begin(store, what string, f func(*call) (*lun.Unit, error)) (*call, error) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	c := &call{cs: cs, key: callKey{store, what == closing}, what: what, since: time.Now(), done: make(chan struct{})}
	if old := cs.under[c.key]; old != nil {
		return nil, old.stuck()
	}
	if !c.key.closing {
		if cs.open >= cs.most {
			return nil, fmt.Errorf("%w: nobody has asked it, for there are %d others that do not answer", ErrStuck, cs.open)
		}
		cs.open++
	}
	if cs.under == nil {
		cs.under = map[callKey]*call{}
	}
	cs.under[c.key] = c
	go c.run(f)
	return c, nil
}

func (c *call) run(f func(*call) (*lun.Unit, error)) {
	c.unit, c.err = f(c)
	cs := c.cs
	cs.mu.Lock()
	c.back = true
	late := c.late
	cs.mu.Unlock()
	if late != nil {
		late(c.err)
	}
	cs.mu.Lock()
	delete(cs.under, c.key)
	if !c.key.closing {
		cs.open--
	}
	cs.mu.Unlock()
	close(c.done)
}

// stuck says that c is not back. It says the same each time.
func (c *call) stuck() error {
	return fmt.Errorf("%w: %s has not come to an end since %s", ErrStuck, c.what, c.since.Format(time.TimeOnly))
}

// wait returns what has come of the call, or an ErrStuck after that time, or when ctx
// ends. The call goes on then.
func (c *call) wait(ctx context.Context, most time.Duration) error {
	timer := time.NewTimer(most)
	defer timer.Stop()
	select {
	case <-c.done:
		return c.err
	case <-timer.C:
	case <-ctx.Done():
	}
	select {
	case <-c.done: // at the same time
		return c.err
	default:
		return c.stuck()
	}
}

// leave tells that nobody wants what comes of the call: late, with its error, follows
// it. If it is back already, late does not follow, and leave returns false.
func (c *call) leave(late func(error)) bool {
	c.cs.mu.Lock()
	if !c.back {
		c.left, c.late = true, late
		c.cs.mu.Unlock()
		return true
	}
	c.cs.mu.Unlock()
	<-c.done
	return false
}

// isLeft tells the goroutine of the call that it need not begin anything more.
func (c *call) isLeft() bool {
	c.cs.mu.Lock()
	defer c.cs.mu.Unlock()
	return c.left
}

// do asks a store and waits until f is back, for that time or until ctx ends at most, and
// before for what the store is being asked already. late, which may be nil, follows if
// f is back later.
func (cs *calls) do(ctx context.Context, most time.Duration, store, what string, f func(*call) (*lun.Unit, error), late func(*lun.Unit, error)) (*lun.Unit, error) {
	end := time.Now().Add(most)
	busy := cs.idle(ctx, most, store)
	if busy != nil && what != closing {
		return nil, busy
	}
	c, err := cs.begin(store, what, f)
	if err != nil {
		return nil, err
	}
	err = c.wait(ctx, max(time.Until(end), 0))
	if errors.Is(err, ErrStuck) && c.leave(func(err error) {
		if late != nil {
			late(c.unit, err)
		}
	}) {
		if busy != nil { // which says more
			err = busy
		}
		return nil, err
	}
	return c.unit, c.err
}

// idle waits until the store is not being asked for anything.
func (cs *calls) idle(ctx context.Context, most time.Duration, store string) error {
	end := time.Now().Add(most)
	for {
		c := cs.about(store)
		if c == nil {
			return nil
		}
		if err := c.wait(ctx, max(time.Until(end), 0)); errors.Is(err, ErrStuck) {
			return err
		}
	}
}

// about is what the store is being asked, or nil.
func (cs *calls) about(store string) *call {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return cmp.Or(cs.under[callKey{store, false}], cs.under[callKey{store, true}])
}

// stuckFor is after which time a call is told of: most take no time at all.
const stuckFor = 2 * time.Second

// stuck is an ErrStuck if the store is being asked for something, for a while already.
func (cs *calls) stuck(store string) error {
	if c := cs.about(store); c != nil && time.Since(c.since) > stuckFor {
		return c.stuck()
	}
	return nil
}

// atOnce is how many stores are opened, or closed, at one time when all are.
const atOnce = 32

// slots let so many begin at one time. One that takes its time does not count any more.
type slots struct {
	c    chan struct{}
	most time.Duration
}

func newSlots(most time.Duration) slots { return slots{make(chan struct{}, atOnce), most} }

// take waits for a slot, or until ctx ends: then all may begin. free gives it back.
func (s slots) take(ctx context.Context) (free func()) {
	select {
	case s.c <- struct{}{}:
	case <-ctx.Done():
		return func() {}
	}
	once := sync.OnceFunc(func() { <-s.c })
	timer := time.AfterFunc(s.most, once)
	return func() {
		timer.Stop()
		once()
	}
}
