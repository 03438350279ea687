package daemon

import (
	"strings"
	"testing"

	"github.com/iser-target/iser-target/security/limits"
)

// The Go runtime gets the threads that all hanging stores can take, also after a change, so that it does
// not end the process. A machine that does not have them is worth a warning.
func TestThreadsFollowTheLimits(t *testing.T) {
	var set int
	was := setMaxThreads
	setMaxThreads = func(n int) int { set = n; return 0 }
	t.Cleanup(func() { setMaxThreads = was })

	l := newLab(t, func(l *lab) { l.more = "limits: {backend_calls: 4096}" })
	need := l.neededThreads(l.served.cfg)
	if need < 2*4096 || set != int(max(need, leastThreads)) {
		t.Errorf("the runtime may have %d threads, and %d are needed", set, need)
	}
	set = 0
	l.more = "limits: {backend_calls: 100}"
	l.ok(ChangeOptions{})
	if set != leastThreads {
		t.Errorf("after the change the runtime may have %d threads, want %d", set, leastThreads)
	}

	var log strings.Builder
	l.log = l.newLogger(l.served.cfg.Log, &log)
	l.checkThreads(l.served.cfg, limits.Quantity{N: 10000, From: "pids.max"})
	if log.Len() > 0 {
		t.Errorf("enough threads: %s", &log)
	}
	l.checkThreads(l.served.cfg, limits.Quantity{N: 300, From: "pids.max"})
	for _, part := range []string{"too few threads", "allowed=300", "by=pids.max", "limits.backend_calls is 100", "TasksMax"} {
		if !strings.Contains(log.String(), part) {
			t.Errorf("no %q in %s", part, &log)
		}
	}
}
