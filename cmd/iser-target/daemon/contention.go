package daemon

import (
	"net/http"
	"net/http/pprof"
	"runtime"
	"sync"
)

// A contention profile says where goroutines waited for locks or for each other. The runtime records
// that only while somebody asks for it with ?seconds=N, because it makes each wait more expensive.
type contention struct {
	name string
	set  func(recorded bool)

	mu    sync.Mutex
	users int
}

// blockRate is the mean time of waiting, in ns, for each event in a profile of blocks. Waits that are longer are
// all in it.
const blockRate = 10_000

var (
	mutexContention = contention{name: "mutex", set: func(recorded bool) {
		rate := 0
		if recorded {
			rate = 1 // all
		}
		runtime.SetMutexProfileFraction(rate)
	}}
	blockContention = contention{name: "block", set: func(recorded bool) {
		rate := 0
		if recorded {
			rate = blockRate
		}
		runtime.SetBlockProfileRate(rate)
	}}
)

func (c *contention) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.FormValue("seconds") != "" {
		c.use(1)
		defer c.use(-1)
	}
	pprof.Handler(c.name).ServeHTTP(w, r)
}

// use counts requests in progress. The rates are those of the whole process.
func (c *contention) use(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	was := c.users
	c.users += n
	if (was > 0) != (c.users > 0) {
		c.set(c.users > 0)
	}
}
