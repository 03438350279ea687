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

// A store can hang, because its server is gone or its device is stuck. Then it keeps the goroutine
// that called it, and that goroutine's thread. So no goroutine that holds a lock or is the editor
// calls a store. Each store has one goroutine for everything but I/O; callers wait for it up to a
// time limit, so a store that hangs blocks nobody. A second caller waits for the first call, too.

// waits are the time limits of calls of stores.
type waits struct {
	store   time.Duration // opening, while a change waits
	slow    time.Duration // resizing and closing, which synchronize, while a change waits
	brief   time.Duration // opening, in retries
	close   time.Duration // closing, when a LUN is removed
	start   time.Duration // opening all stores at the start
	changes time.Duration // the changes in progress at a shutdown
	sync    time.Duration // synchronizing all stores at a shutdown, while they are served
	end     time.Duration // closing all stores at a shutdown
	health  time.Duration // between two looks at the files of LUNs
	slot    time.Duration // until a store that takes long makes room for another one
	calls   int           // calls in progress, at most
}

var defaultWaits = waits{
	store:   20 * time.Second,
	slow:    45 * time.Second, // less than a request waits for other changes
	brief:   20 * time.Millisecond,
	close:   5 * time.Second,
	start:   15 * time.Second,
	changes: 10 * time.Second,
	sync:    10 * time.Second,
	end:     25 * time.Second, // with changes less than stopSlack
	health:  healthInterval,
	slot:    250 * time.Millisecond,
	calls:   1024,
}

// ErrStuck is in errors about a store that does not answer.
var ErrStuck = errors.New("the store does not answer")

// calls are the calls of stores in progress. At most max do not close a store: a call that never
// returns keeps a thread, and a Go process has at most 10000. Closing is always possible.
type calls struct {
	max int

	mu         sync.Mutex
	inProgress map[callKey]*call
	open       int // those that do not close
}

// A callKey identifies a call. There is at most one of each key.
type callKey struct {
	store   string // see storeKey
	closing bool
}

// A call is one call of a store.
type call struct {
	cs    *calls
	key   callKey
	what  string // like callOpen
	since time.Time
	done  chan struct{} // closed when the call has returned and whenBack, too
	err   error         // valid when done is closed
	unit  *lun.Unit     // likewise; what an opening call made

	abandoned bool        // guarded by cs.mu: no caller waits
	back      bool        // guarded by cs.mu: the store has answered
	whenBack  func(error) // guarded by cs.mu: called when an abandoned call is back
}

// What most calls do.
const (
	callOpen  = "opening it"
	callClose = "closing it"
	callSync  = "synchronizing it"
)

// storeKey returns the key of the store of a LUN: its path, if it has one.
func storeKey(target string, l *config.LUN) string {
	return cmp.Or(l.Path, fmt.Sprintf("%s/%d", target, l.ID))
}

// begin calls f in a goroutine. It fails with an ErrStuck if the store has a call in progress, or
// too many stores have.
func (cs *calls) begin(store, what string, f func(*call) error) (*call, error) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	c := &call{cs: cs, key: callKey{store, what == callClose}, what: what, since: time.Now(), done: make(chan struct{})}
	if old := cs.inProgress[c.key]; old != nil {
		return nil, old.stuck()
	}
	if !c.key.closing {
		if cs.open >= cs.max {
			return nil, fmt.Errorf("%w: it was not called, because %d other stores do not answer", ErrStuck, cs.open)
		}
		cs.open++
	}

	cs.inProgress[c.key] = c
	go c.run(f)
	return c, nil
}

// run makes the call.
func (c *call) run(f func(*call) error) {
	c.err = f(c)
	cs := c.cs
	cs.mu.Lock()
	c.back = true
	whenBack := c.whenBack
	cs.mu.Unlock()
	if whenBack != nil {
		whenBack(c.err)
	}
	cs.mu.Lock()
	delete(cs.inProgress, c.key)
	if !c.key.closing {
		cs.open--
	}
	cs.mu.Unlock()
	close(c.done)
}

// stuck returns the ErrStuck of a call that is not back. Its text does not change.
func (c *call) stuck() error {
	return fmt.Errorf("%w: %s has not ended since %s", ErrStuck, c.what, c.since.Format(time.TimeOnly))
}

// wait returns the error of the call. After timeout, or when ctx ends, it returns an
// ErrStuck, and the call continues.
func (c *call) wait(ctx context.Context, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	select {
	case <-c.done:
	case <-ctx.Done():
	}
	select {
	case <-c.done: // perhaps at the same time
		return c.err
	default:
		return c.stuck()
	}
}

// abandon marks c as one that no caller waits for. whenBack is called with the error of c
// when it is back. If it is back already, abandon returns false and does not use whenBack.
func (c *call) abandon(whenBack func(error)) bool {
	c.cs.mu.Lock()
	if !c.back {
		c.abandoned, c.whenBack = true, whenBack
		c.cs.mu.Unlock()
		return true
	}
	c.cs.mu.Unlock()
	<-c.done
	return false
}

// isAbandoned reports, to the goroutine of c, whether it should stop.
func (c *call) isAbandoned() bool {
	c.cs.mu.Lock()
	defer c.cs.mu.Unlock()
	return c.abandoned
}

// do calls f in a goroutine and waits until it returns, at most for timeout or until ctx ends.
// Before, it waits for calls of the store in progress. whenBack, which may be nil, is called if f
// returns later.
func (cs *calls) do(ctx context.Context, timeout time.Duration, store, what string, f func(*call) error, whenBack func(error)) error {
	end := time.Now().Add(timeout)
	busy := cs.idle(ctx, end, store)
	if busy != nil && what != callClose {
		return busy
	}
	c, err := cs.begin(store, what, f)
	if err != nil {
		return err
	}
	err = c.wait(ctx, time.Until(end))
	if errors.Is(err, ErrStuck) && c.abandon(whenBack) {
		return cmp.Or(busy, err) // busy names the call that hangs
	}
	return c.err
}

// idle waits until no call of the store is in progress, at most until end.
func (cs *calls) idle(ctx context.Context, end time.Time, store string) error {
	for c := cs.pending(store); c != nil; c = cs.pending(store) {
		if err := c.wait(ctx, time.Until(end)); errors.Is(err, ErrStuck) {
			return err
		}
	}
	return nil
}

// pending returns the call of the store in progress, or nil.
func (cs *calls) pending(store string) *call {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return cmp.Or(cs.inProgress[callKey{store, false}], cs.inProgress[callKey{store, true}])
}

// stuckFor is how long a call is in progress before the state reports it.
const stuckFor = 2 * time.Second

// stuck returns an ErrStuck if a call of the store has been in progress for stuckFor.
func (cs *calls) stuck(store string) error {
	if c := cs.pending(store); c != nil && time.Since(c.since) > stuckFor {
		return c.stuck()
	}
	return nil
}

// atOnce is how many stores are opened, or closed, at a time when all are.
const atOnce = 32

// inParallel calls f for each element of list, for atOnce at a time, and joins the errors. A call
// that takes longer than timeout no longer counts. When ctx has ended, all calls begin.
func inParallel[T any](ctx context.Context, timeout time.Duration, list []T, f func(T) error) error {
	errs := make([]error, len(list))
	slots := make(chan struct{}, atOnce)
	var wg sync.WaitGroup
	for i, x := range list {
		free := func() {}
		select {
		case slots <- struct{}{}:
			free = sync.OnceFunc(func() { <-slots })
		case <-ctx.Done():
		}
		timer := time.AfterFunc(timeout, free)
		wg.Go(func() {
			defer free()
			defer timer.Stop()
			errs[i] = f(x)
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}
