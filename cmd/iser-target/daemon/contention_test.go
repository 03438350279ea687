package daemon

import (
	"compress/gzip"
	"io"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
)

// contend makes two goroutines wait for a lock, until stop is closed.
func contend(stop chan struct{}) {
	var mu sync.Mutex
	var all sync.WaitGroup
	for range 2 {
		all.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				mu.Lock()
				time.Sleep(time.Millisecond)
				mu.Unlock()
			}
		})
	}
	all.Wait()
}

// Profiles of locks and of waits have what happened during the request. When the last of two requests has
// ended, the runtime no longer records.
func TestContentionProfiles(t *testing.T) {
	stop := make(chan struct{})
	var all sync.WaitGroup
	all.Go(func() { contend(stop) })
	defer all.Wait()
	defer close(stop)
	mux := debugMux()
	for _, name := range []string{"mutex", "block"} {
		var requests sync.WaitGroup
		for _, seconds := range []string{"1", "2"} {
			requests.Go(func() {
				w := httptest.NewRecorder()
				mux.ServeHTTP(w, httptest.NewRequest("GET", "/debug/pprof/"+name+"?seconds="+seconds, nil))
				z, err := gzip.NewReader(w.Body)
				if err != nil {
					t.Errorf("%s for %s s: status %d: %v", name, seconds, w.Code, err)
					return
				}
				if n := runtime.SetMutexProfileFraction(-1); name == "mutex" && seconds == "1" && n != 1 {
					t.Errorf("the end of the first request leaves the second with the fraction %d", n)
				}
				// The table of strings of a profile has the names of its functions.
				b, err := io.ReadAll(z)
				if err != nil || !strings.Contains(string(b), "daemon.contend.func1") {
					t.Errorf("%s for %s s: the function that waits is missing: %v", name, seconds, err)
				}
			})
		}
		requests.Wait()
	}
	if n := runtime.SetMutexProfileFraction(-1); n != 0 {
		t.Errorf("locks are recorded with the fraction %d although nobody asks", n)
	}
	if n := mutexContention.users + blockContention.users; n != 0 {
		t.Errorf("%d users are left", n)
	}
}
