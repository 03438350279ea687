// Package hometest has the tests that every state.Home has to pass.
package hometest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/iser-target/iser-target/lun/state"
)

// patience is how long a test waits for a home.
const patience = 2 * time.Minute

// Run tests the homes that place makes. Each call of place makes an empty one; the function that it returns opens
// that one, again after it was closed.
func Run(t *testing.T, place func(t *testing.T) (open func() state.Home)) {
	for _, tc := range []struct {
		name string
		test func(h *home)
	}{
		{"values", testValues},
		{"revisions", testRevisions},
		{"conflict", testConflict},
		{"one winner", testOneWinner},
		{"list", testList},
		{"watch", testWatch},
		{"slow watcher", testSlowWatcher},
		{"watch ends", testWatchEnds},
		{"ended context", testEndedContext},
		{"closed", testClosed},
	} {
		t.Run(tc.name, func(t *testing.T) {
			open := place(t)
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			h := &home{T: t, Home: open(), ctx: ctx, open: open}
			defer func() { h.Close() }()
			tc.test(h)
		})
	}
}

// RunLessor tests the leases of homes that place makes, as for Run.
func RunLessor(t *testing.T, place func(t *testing.T) (open func() state.Home)) {
	open := place(t)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	h := &home{T: t, Home: open(), ctx: ctx, open: open}
	defer func() { h.Close() }()
	lessor := h.Home.(state.Lessor)
	begin := func(ttl time.Duration) (state.Lease, time.Time) {
		began := time.Now()
		l, err := lessor.Lease(ctx, ttl)
		if err != nil || l.TTL() < ttl || l.TTL() > ttl+8*time.Second {
			t.Fatalf("a lease of %v: %v", ttl, err)
		}
		return l, began
	}
	put := func(l state.Lease, key string) state.Revision {
		r, err := l.Put(ctx, key, []byte("of "+key), 0)
		if err != nil || r == 0 {
			t.Fatalf("Put %s with a lease: %v", key, err)
		}
		return r
	}
	news, err := h.Watch(ctx, "")
	if err != nil {
		t.Fatal(err)
	}
	neighbor := h.put("neighbor", "stays", 0)
	kept, _ := begin(time.Minute)
	left, began := begin(2 * time.Second)
	r := put(kept, "kept")
	put(left, "left")
	r = func() state.Revision { // as Home.Put does
		if _, err := kept.Put(ctx, "kept", []byte("x"), r+1000); !errors.Is(err, state.ErrConflict) {
			t.Errorf("Put with a wrong base: %v", err)
		}
		r, err := kept.Put(ctx, "kept", []byte("of kept"), r)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}()
	var gone time.Duration
	for gone == 0 {
		if err := kept.Renew(ctx); err != nil {
			t.Fatal(err)
		}
		h.want("kept", "of kept", r)
		switch v, err := h.Get(ctx, "left"); {
		case err != nil:
			t.Fatal(err)
		case v.Data == nil:
			gone = time.Since(began)
		}
		time.Sleep(100 * time.Millisecond)
	}
	if gone < left.TTL() || gone > left.TTL()+5*time.Second {
		t.Errorf("a value with a lease of %v was gone after %v", left.TTL(), gone)
	}
	if err := left.Renew(ctx); !errors.Is(err, state.ErrLeaseEnded) {
		t.Errorf("Renew after that: %v", err)
	}
	if _, err := left.Put(ctx, "other", []byte("x"), 0); !errors.Is(err, state.ErrLeaseEnded) {
		t.Errorf("Put after that: %v", err)
	}
	if err := left.End(ctx); err != nil {
		t.Errorf("End after that: %v", err)
	}
	if err := kept.End(ctx); err != nil {
		t.Error(err)
	}
	h.want("kept", "", 0)
	h.want("other", "", 0)
	h.want("neighbor", "stays", neighbor)
	for removed := map[string]bool{}; !removed["kept"] || !removed["left"]; {
		select {
		case v := <-news:
			if v.Data == nil {
				removed[v.Key] = true
			}
		case <-ctx.Done():
			t.Fatalf("the watch tells of the removal of %v", removed)
		}
	}
	lost, _ := begin(time.Minute)
	put(lost, "lost")
	other := open().(state.Lessor) // of another process
	defer other.Close()
	for range 2 { // the second time it is over
		if err := other.EndLease(ctx, lost.ID()); err != nil {
			t.Errorf("EndLease: %v", err)
		}
	}
	h.want("lost", "", 0)
	h.want("neighbor", "stays", neighbor)
	if err := lost.Renew(ctx); !errors.Is(err, state.ErrLeaseEnded) {
		t.Errorf("Renew after EndLease: %v", err)
	}
	if _, err := lost.Put(ctx, "lost", []byte("x"), 0); !errors.Is(err, state.ErrLeaseEnded) {
		t.Errorf("Put after EndLease: %v", err)
	}
	if _, err := lessor.Lease(ctx, 0); err == nil {
		t.Error("a lease of 0s is accepted")
	}
	holder, _ := begin(time.Minute)
	late, _ := begin(time.Minute)
	put(holder, "held")
	putHeld := func(l state.Lease, data []byte, base state.Revision, held string, fails bool) state.Revision {
		t.Helper()
		r, err := l.PutHeld(ctx, "work", data, base, held)
		if fails != errors.Is(err, state.ErrConflict) || errors.Is(err, state.ErrUnsure) || !fails && err != nil {
			t.Errorf("PutHeld by the holder of %s: %v, want a conflict: %v", held, err, fails)
		}
		return r
	}
	putHeld(late, []byte("x"), 0, "held", true)
	putHeld(holder, []byte("x"), 0, "nothing", true)
	putHeld(holder, []byte("x"), 0, "neighbor", true) // has no lease
	h.want("work", "", 0)
	work := putHeld(holder, []byte("begun"), 0, "held", false)
	h.want("work", "begun", work)
	putHeld(late, nil, work, "held", true)
	putHeld(holder, []byte("x"), work+1000, "held", true)
	work = putHeld(holder, []byte("continued"), work, "held", false)
	if err := holder.End(ctx); err != nil {
		t.Fatal(err)
	}
	h.want("work", "continued", work) // it is not of the lease
	putHeld(holder, nil, work, "held", true)
	put(late, "held")
	putHeld(holder, nil, work, "held", true)
	h.want("work", "continued", work)
	putHeld(late, nil, work, "held", false)
	h.want("work", "", 0)
	h.want("neighbor", "stays", neighbor)
}

// A home is one under test.
type home struct {
	*testing.T
	state.Home
	ctx  context.Context
	open func() state.Home
}

// put stores text, which must succeed.
func (h *home) put(key, text string, base state.Revision) state.Revision {
	h.Helper()
	r, err := h.Put(h.ctx, key, []byte(text), base)
	if err != nil || r == 0 {
		h.Fatalf("Put %s = %d, %v; want a revision", key, r, err)
	}
	return r
}

// remove removes a value, which must succeed.
func (h *home) remove(key string, base state.Revision) {
	h.Helper()
	if r, err := h.Put(h.ctx, key, nil, base); r != 0 || err != nil {
		h.Fatalf("removing %s = %d, %v; want revision 0", key, r, err)
	}
}

// want checks the value of a key.
func (h *home) want(key, text string, r state.Revision) {
	h.Helper()
	v, err := h.Get(h.ctx, key)
	if err != nil || v.Key != key || string(v.Data) != text || v.Revision != r || v.Data == nil != (r == 0) {
		h.Fatalf("Get %s = %q, revision %d, %v; want %q, revision %d", key, v.Data, v.Revision, err, text, r)
	}
}

// reopen closes the home and opens it again.
func (h *home) reopen() {
	h.Helper()
	if err := h.Close(); err != nil {
		h.Fatal(err)
	}
	h.Home = h.open()
}

func testValues(h *home) {
	h.want("a", "", 0)
	r := h.put("a", "one", 0)
	h.want("a", "one", r)
	r2 := h.put("a", "two", r)
	other := h.put("b", strings.Repeat("long ", 20000), 0)
	h.want("a", "two", r2)
	h.reopen()
	v, err := h.Get(h.ctx, "a")
	if err != nil || string(v.Data) != "two" || v.Revision == 0 {
		h.Fatalf("after closing and opening: %q, revision %d, %v", v.Data, v.Revision, err)
	}
	h.remove("a", v.Revision)
	h.want("a", "", 0)
	if v, err = h.Get(h.ctx, "b"); err != nil || len(v.Data) != 100000 || other == 0 {
		h.Fatalf("the other key has %d bytes, %v", len(v.Data), err)
	}
	h.reopen()
	h.want("a", "", 0)
}

// testRevisions checks that a revision names one value: it does not come back when the value does, nor after a removal.
func testRevisions(h *home) {
	seen := map[state.Revision]bool{}
	r := state.Revision(0)
	for i := range 12 {
		if i%4 == 3 {
			h.remove("a", r)
			r = 0
			continue
		}
		r = h.put("a", "the same", r)
		if seen[r] {
			h.Fatalf("revision %d is there twice", r)
		}
		seen[r] = true
	}
}

func testConflict(h *home) {
	r := h.put("a", "one", 0)
	r2 := h.put("a", "two", r)
	neighbor := h.put("b", "b", 0)
	for _, tc := range []struct {
		key  string
		base state.Revision
	}{{"a", 0}, {"a", r}, {"a", r2 + 1000}, {"none", r2}} {
		for _, data := range [][]byte{[]byte("three"), nil} {
			_, err := h.Put(h.ctx, tc.key, data, tc.base)
			if !errors.Is(err, state.ErrConflict) || errors.Is(err, state.ErrUnreachable) || errors.Is(err, state.ErrUnsure) {
				h.Errorf("Put %s %q with base %d = %v, want a conflict", tc.key, data, tc.base, err)
			}
		}
	}
	h.want("a", "two", r2)
	h.want("none", "", 0)
	h.want("b", "b", neighbor)
}

// testOneWinner checks that of those who change a value at the same time each change counts once, and the neighbor keeps its value.
func testOneWinner(h *home) {
	const workers, steps = 4, 10
	neighbor := h.put("neighbor", "mine", 0)
	h.put("count", "0", 0)
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for done := 0; done < steps; {
				v, err := h.Get(h.ctx, "count")
				if err != nil {
					h.Error(err)
					return
				}
				n, _ := strconv.Atoi(string(v.Data))
				switch _, err = h.Put(h.ctx, "count", []byte(strconv.Itoa(n+1)), v.Revision); {
				case err == nil:
					done++
				case !errors.Is(err, state.ErrConflict):
					h.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	if v, err := h.Get(h.ctx, "count"); err != nil || string(v.Data) != strconv.Itoa(workers*steps) {
		h.Errorf("the count is %q, %v; want %d", v.Data, err, workers*steps)
	}
	h.want("neighbor", "mine", neighbor)
}

func testList(h *home) {
	var want []state.Value
	for _, key := range []string{"x.b", "y", "x.a", "x", "w"} {
		r := h.put(key, "of "+key, 0)
		if strings.HasPrefix(key, "x") {
			want = append(want, state.Value{Key: key, Data: []byte("of " + key), Revision: r})
		}
	}
	slices.SortFunc(want, func(a, b state.Value) int { return strings.Compare(a.Key, b.Key) })
	h.remove("x.c", 0)
	if list, err := h.List(h.ctx, "x"); err != nil || fmt.Sprint(list) != fmt.Sprint(want) {
		h.Errorf("List x = %v, %v\nwant %v", list, err, want)
	}
	if list, err := h.List(h.ctx, ""); err != nil || len(list) != 5 {
		h.Errorf("List of all = %v, %v; want 5", list, err)
	}
	if list, err := h.List(h.ctx, "none"); err != nil || len(list) != 0 {
		h.Errorf("List none = %v, %v", list, err)
	}
}

// next returns the next value of a watch.
func (h *home) next(values <-chan state.Value) state.Value {
	h.Helper()
	select {
	case v, ok := <-values:
		if !ok {
			h.Fatal("the watch has ended")
		}
		return v
	case <-h.ctx.Done():
		h.Fatal("the watch has no value")
	}
	panic("unreachable")
}

func testWatch(h *home) {
	old := h.put("x.old", "before", 0)
	values, err := h.Watch(h.ctx, "x.")
	if err != nil {
		h.Fatal(err)
	}
	h.put("y", "of another prefix", 0)
	r := h.put("x.a", "one", 0)
	if v := h.next(values); v.Key != "x.a" || string(v.Data) != "one" || v.Revision != r {
		h.Errorf("the watch has %v, want the value of x.a", v)
	}
	if _, err := h.Put(h.ctx, "x.a", []byte("two"), r+1000); err == nil {
		h.Error("a conflict was stored")
	}
	h.remove("x.old", old)
	if v := h.next(values); v.Key != "x.old" || v.Data != nil || v.Revision != 0 {
		h.Errorf("the watch has %v, want the removal of x.old", v)
	}
}

// testSlowWatcher checks that a reader that is slow stops no change, and gets the last value of each key.
func testSlowWatcher(h *home) {
	values, err := h.Watch(h.ctx, "")
	if err != nil {
		h.Fatal(err)
	}
	last := map[string]state.Revision{}
	for i := range 20 {
		for _, key := range []string{"a", "b"} {
			last[key] = h.put(key, strconv.Itoa(i), last[key])
		}
	}
	got := map[string]state.Revision{}
	for got["a"] != last["a"] || got["b"] != last["b"] {
		v := h.next(values)
		if v.Revision <= got[v.Key] && got[v.Key] != 0 {
			h.Fatalf("%s has revision %d after %d", v.Key, v.Revision, got[v.Key])
		}
		got[v.Key] = v.Revision
	}
}

func testWatchEnds(h *home) {
	ctx, cancel := context.WithCancel(h.ctx)
	one, err := h.Watch(ctx, "")
	if err != nil {
		h.Fatal(err)
	}
	two, err := h.Watch(h.ctx, "")
	if err != nil {
		h.Fatal(err)
	}
	ended := func(values <-chan state.Value) {
		h.Helper()
		for {
			select {
			case _, ok := <-values:
				if !ok {
					return
				}
			case <-h.ctx.Done():
				h.Fatal("the watch does not end")
			}
		}
	}
	cancel()
	ended(one)
	h.put("a", "one", 0)
	if v := h.next(two); v.Key != "a" {
		h.Errorf("the other watch has %v", v)
	}
	if err := h.Close(); err != nil {
		h.Fatal(err)
	}
	ended(two)
}

func testEndedContext(h *home) {
	r := h.put("a", "one", 0)
	ctx, cancel := context.WithCancel(h.ctx)
	cancel()
	_, put := h.Put(ctx, "a", []byte("two"), r)
	_, get := h.Get(ctx, "a")
	_, list := h.List(ctx, "")
	for _, err := range []error{put, get, list} {
		if !errors.Is(err, state.ErrUnreachable) || !errors.Is(err, context.Canceled) || errors.Is(err, state.ErrConflict) {
			h.Errorf("after its end the error is %v, want ErrUnreachable", err)
		}
	}
	h.want("a", "one", r)
}

func testClosed(h *home) {
	r := h.put("a", "one", 0)
	if err := h.Close(); err != nil {
		h.Fatal(err)
	}
	_, put := h.Put(h.ctx, "a", []byte("two"), r)
	_, get := h.Get(h.ctx, "a")
	_, list := h.List(h.ctx, "")
	_, watch := h.Watch(h.ctx, "")
	for _, err := range []error{put, get, list, watch} {
		if !errors.Is(err, fs.ErrClosed) {
			h.Errorf("after Close the error is %v", err)
		}
	}
	if err := h.Close(); err != nil {
		h.Errorf("closing twice: %v", err)
	}
}
