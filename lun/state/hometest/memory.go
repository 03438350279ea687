package hometest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/iser-target/iser-target/lun/state"
)

// A Memory is a home in memory that several processes share, each through a Link of its own. It is best used on the fake clock of
// testing/synctest.
type Memory struct {
	mu      sync.Mutex
	random  *rand.Rand
	values  map[string]kept
	last    state.Revision
	watches map[*memoryWatch]bool
	leases  map[*memoryLease]bool
	begun   int // leases, which have that as their ID
}

type kept struct {
	state.Value
	lease *memoryLease
}

type memoryWatch struct {
	link   *Link
	prefix string
	queue  []state.Value
	wake   chan struct{}
}

// NewMemory returns an empty home. The seed decides how long its links take.
func NewMemory(seed uint64) *Memory {
	return &Memory{random: rand.New(rand.NewPCG(seed, 0)), values: map[string]kept{}, watches: map[*memoryWatch]bool{}, leases: map[*memoryLease]bool{}}
}

// set stores or removes a value. m.mu is held.
func (m *Memory) set(key string, data []byte, l *memoryLease) state.Revision {
	m.last++
	v := state.Value{Key: key}
	if data == nil {
		delete(m.values, key)
	} else {
		v.Data, v.Revision = bytes.Clone(data), m.last
		m.values[key] = kept{v, l}
	}
	for w := range m.watches {
		if strings.HasPrefix(key, w.prefix) {
			w.queue = append(w.queue, v)
			w.notify()
		}
	}
	return v.Revision
}

func (w *memoryWatch) notify() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// A Link is the way of one process to a Memory, a state.Lessor whose calls end after 2 s.
type Link struct {
	*Memory
	// guarded by Memory.mu:
	slowest time.Duration
	lose    map[string]int // by key: the answer to which Put is lost, counting down
	isCut   bool
	healed  chan struct{} // closed while it is not cut
}

// Link returns a new way to the home. Each direction takes up to slowest.
func (m *Memory) Link(slowest time.Duration) *Link {
	l := &Link{Memory: m, slowest: slowest, healed: make(chan struct{}), lose: map[string]int{}}
	close(l.healed)
	return l
}

// Slow makes each direction take up to slowest from now on.
func (l *Link) Slow(slowest time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.slowest = slowest
}

// Lose loses the answer to the nth Put of the key from now on that is stored. The Put is an ErrUnsure.
func (l *Link) Lose(key string, n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lose[key] = n
}

// ExpireLeases ends the leases that began through the link.
func (l *Link) ExpireLeases() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for lease := range l.leases {
		if lease.link == l {
			lease.expire()
		}
	}
}

// Cut stops what passes the link, or lets it continue.
func (l *Link) Cut(cut bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case cut && !l.isCut:
		l.healed = make(chan struct{})
	case !cut && l.isCut:
		close(l.healed)
		for w := range l.watches {
			w.notify()
		}
	}
	l.isCut = cut
}

// pass takes the time of one direction.
func (l *Link) pass(ctx context.Context) error {
	l.mu.Lock()
	d := time.Duration(l.random.Int64N(int64(l.slowest) + 1))
	l.mu.Unlock()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
	l.mu.Lock()
	healed := l.healed
	l.mu.Unlock()
	select {
	case <-healed:
	case <-ctx.Done():
	}
	if ctx.Err() != nil {
		return fmt.Errorf("%w: %w", state.ErrUnreachable, context.Cause(ctx))
	}
	return nil
}

// call does f at the memory. begun says that it may have been done, if the answer is lost.
func (l *Link) call(ctx context.Context, f func() error) (begun bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if err := l.pass(ctx); err != nil {
		return false, err
	}
	l.mu.Lock()
	err = f()
	l.mu.Unlock()
	if lost := l.pass(ctx); lost != nil {
		return true, lost
	}
	return true, err
}

// Get implements state.Home.
func (l *Link) Get(ctx context.Context, key string) (v state.Value, err error) {
	_, err = l.call(ctx, func() error { v = l.values[key].Value; return nil })
	v.Key = key
	return v, err
}

// Put implements state.Home.
func (l *Link) Put(ctx context.Context, key string, data []byte, base state.Revision) (state.Revision, error) {
	return l.PutIf(ctx, key, data, base, func() error { return nil })
}

// PutIf does what Put does, but the home refuses the value with the error of may, if that has one when the value gets there.
func (l *Link) PutIf(ctx context.Context, key string, data []byte, base state.Revision, may func() error) (state.Revision, error) {
	return l.put(ctx, key, data, base, nil, may)
}

// put stores a value of the lease, which may be nil, unless may fails.
func (l *Link) put(ctx context.Context, key string, data []byte, base state.Revision, lease *memoryLease, may func() error) (r state.Revision, err error) {
	begun, err := l.call(ctx, func() error {
		if err := may(); err != nil {
			return err
		}
		if l.values[key].Revision != base {
			return state.ErrConflict
		}
		r = l.set(key, data, lease)
		return nil
	})
	l.mu.Lock()
	if n := l.lose[key]; begun && err == nil && n > 0 {
		if l.lose[key] = n - 1; n == 1 {
			err = state.ErrUnreachable
		}
	}
	l.mu.Unlock()
	if begun && errors.Is(err, state.ErrUnreachable) {
		err = fmt.Errorf("%w: %w", err, state.ErrUnsure)
	}
	return r, err
}

// List implements state.Home.
func (l *Link) List(ctx context.Context, prefix string) (list []state.Value, err error) {
	_, err = l.call(ctx, func() error {
		for _, key := range slices.Sorted(maps.Keys(l.values)) {
			if strings.HasPrefix(key, prefix) {
				list = append(list, l.values[key].Value)
			}
		}
		return nil
	})
	return list, err
}

// Watch implements state.Home.
func (l *Link) Watch(ctx context.Context, prefix string) (<-chan state.Value, error) {
	w := &memoryWatch{link: l, prefix: prefix, wake: make(chan struct{}, 1)}
	if _, err := l.call(ctx, func() error { l.watches[w] = true; return nil }); err != nil {
		return nil, err
	}
	out := make(chan state.Value)
	go func() {
		defer close(out)
		defer func() {
			l.mu.Lock()
			delete(l.watches, w)
			l.mu.Unlock()
		}()
		for {
			select {
			case <-w.wake:
			case <-ctx.Done():
				return
			}
			for {
				if l.pass(ctx) != nil {
					return
				}
				l.mu.Lock()
				if len(w.queue) == 0 {
					l.mu.Unlock()
					break
				}
				v := w.queue[0]
				w.queue = w.queue[1:]
				l.mu.Unlock()
				select {
				case out <- v:
				case <-ctx.Done():
					return
				}
			}
		}
	}()
	return out, nil
}

// Close implements state.Home.
func (l *Link) Close() error { return nil }

type memoryLease struct {
	id    string
	link  *Link
	ttl   time.Duration
	timer *time.Timer
	ended bool // guarded by Memory.mu
}

// Lease implements state.Lessor.
func (l *Link) Lease(ctx context.Context, ttl time.Duration) (state.Lease, error) {
	if ttl <= 0 {
		return nil, fmt.Errorf("a lease of %v", ttl)
	}
	lease := &memoryLease{link: l, ttl: ttl}
	_, err := l.call(ctx, func() error {
		l.begun++
		lease.id = strconv.Itoa(l.begun)
		l.leases[lease] = true
		lease.timer = time.AfterFunc(ttl, func() {
			l.mu.Lock()
			defer l.mu.Unlock()
			lease.expire()
		})
		return nil
	})
	return lease, err
}

// expire removes the values. Memory.mu is held.
func (le *memoryLease) expire() {
	m := le.link.Memory
	le.ended = true
	le.timer.Stop()
	delete(m.leases, le)
	for _, key := range slices.Sorted(maps.Keys(m.values)) {
		if m.values[key].lease == le {
			m.set(key, nil, nil)
		}
	}
}

// EndLease implements state.Lessor.
func (l *Link) EndLease(ctx context.Context, id string) error {
	_, err := l.call(ctx, func() error {
		for lease := range l.leases {
			if lease.id == id {
				lease.expire()
			}
		}
		return nil
	})
	return err
}

func (le *memoryLease) ID() string { return le.id }

func (le *memoryLease) TTL() time.Duration { return le.ttl }

func (le *memoryLease) Renew(ctx context.Context) error {
	_, err := le.link.call(ctx, func() error {
		if le.ended {
			return state.ErrLeaseEnded
		}
		le.timer.Reset(le.ttl)
		return nil
	})
	return err
}

func (le *memoryLease) Put(ctx context.Context, key string, data []byte, base state.Revision) (state.Revision, error) {
	return le.link.put(ctx, key, data, base, le, func() error {
		if le.ended {
			return state.ErrLeaseEnded
		}
		return nil
	})
}

func (le *memoryLease) PutHeld(ctx context.Context, key string, data []byte, base state.Revision, held string) (state.Revision, error) {
	return le.link.put(ctx, key, data, base, nil, func() error {
		if le.link.values[held].lease != le {
			return state.ErrConflict
		}
		return nil
	})
}

func (le *memoryLease) End(ctx context.Context) error {
	_, err := le.link.call(ctx, func() error { le.expire(); return nil })
	return err
}
