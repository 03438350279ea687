package invariant

import (
	"strings"
	"sync"
	"testing"
)

// panicOf returns the message of the panic of f, or "".
func panicOf(f func()) (message string) {
	defer func() {
		if p := recover(); p != nil {
			message = p.(string)
		}
	}()
	f()
	return ""
}

func TestHeldPanicsOnAFreeLock(t *testing.T) {
	for name, lock := range map[string]interface {
		Lock
		sync.Locker
	}{"sync.Mutex": &sync.Mutex{}, "sync.RWMutex": &sync.RWMutex{}} {
		got := panicOf(func() { Held(lock) })
		if want := Enabled; strings.Contains(got, name+" is not held") != want {
			t.Errorf("a free %s: panic %q, want a panic: %v", name, got, want)
		}
		lock.Lock() // Held left it free: this returns.
		if got := panicOf(func() { Held(lock) }); got != "" {
			t.Errorf("a held %s: panic %q", name, got)
		}
		lock.Unlock()
	}
}

func TestHeldAcceptsAReadLock(t *testing.T) {
	var lock sync.RWMutex
	lock.RLock()
	defer lock.RUnlock()
	if got := panicOf(func() { Held(&lock) }); got != "" {
		t.Errorf("panic %q", got)
	}
}

func TestCheckPanicsOnAFalseCondition(t *testing.T) {
	if got := panicOf(func() { Check(true, "never") }); got != "" {
		t.Errorf("a true condition: panic %q", got)
	}
	want := ""
	if Enabled {
		want = "invariant: 3 tasks left"
	}
	if got := panicOf(func() { Check(false, "%d tasks left", 3) }); got != want {
		t.Errorf("a false condition: panic %q, want %q", got, want)
	}
}

// Held allocates nothing: it may stand on the I/O path.
func TestHeldAllocatesNothing(t *testing.T) {
	var lock sync.Mutex
	lock.Lock()
	if n := testing.AllocsPerRun(100, func() { Held(&lock) }); n != 0 {
		t.Errorf("Held allocates %v times", n)
	}
}
