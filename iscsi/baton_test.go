package iscsi

import (
	"sync"
	"testing"
	"testing/synctest"
)

// One goroutine at a time holds the baton, and all get it.
func TestBatonHasOneHolder(t *testing.T) {
	const goroutines, times = 8, 1000
	var b baton
	b.init()
	n := 0
	var wg sync.WaitGroup
	b.Lock()
	for range goroutines {
		wg.Go(func() {
			for range times {
				b.Lock()
				n++ // a race, if two have it
				b.Unlock()
			}
		})
	}
	b.Unlock()
	wg.Wait()
	if n != goroutines*times {
		t.Errorf("%d times the baton was taken instead of %d", n, goroutines*times)
	}
}

// Who leaves the baton wakes nobody. The second call of remind does, wake does, and the next Lock makes both needless.
func TestBatonIsLeft(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		var b baton
		b.init()
		got := 0
		waiter := func() {
			b.Lock()
			got++
		}
		b.Lock()
		go waiter()
		synctest.Wait()
		b.leave()
		synctest.Wait()
		if got != 0 || !b.isLeft() || b.remind() || got != 0 {
			t.Errorf("left: %d have it", got)
		}
		if !b.remind() {
			t.Error("the second remind does not report a wake")
		}
		synctest.Wait()
		if got != 1 || b.isLeft() || b.remind() {
			t.Errorf("after remind %d have it", got)
		}
		go waiter()
		synctest.Wait()
		b.leave()
		b.Lock()
		b.wake()
		synctest.Wait()
		if got != 1 || b.isLeft() {
			t.Errorf("while another one has it, %d got it", got)
		}
		b.leave()
		b.wake()
		synctest.Wait()
		if got != 2 {
			t.Errorf("after wake %d have it", got)
		}
	})
}
