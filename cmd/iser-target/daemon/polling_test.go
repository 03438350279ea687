package daemon

import (
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
)

// While a session polls, others log in and work next to it. It stops when its initiator does, and when the configuration says so.
func TestPolling(t *testing.T) {
	if runtime.GOMAXPROCS(0) < 2 {
		defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(2))
	}
	l := newLab(t, func(l *lab) { l.more = "limits: {poll_time: 1ms}" })
	s := l.login("busy", store)
	found := func() uint64 {
		n, _ := l.net.polling.Counts()
		return n
	}
	// work runs commands one by one until end is called.
	work := func() (end func()) {
		stop, ended := make(chan struct{}), make(chan error, 1)
		go func() {
			var err error
			for err == nil {
				select {
				case <-stop:
					ended <- nil
					return
				default:
					err = s.Do(&initiator.Command{})
				}
			}
			ended <- err
		}()
		return func() {
			t.Helper()
			close(stop)
			if err := <-ended; err != nil {
				t.Error(err)
			}
		}
	}
	end := work()
	testkit.Eventually(t, "it polls", func() bool { return found() > 100 })
	for range 10 {
		began := time.Now()
		neighbor := l.login("neighbor", store)
		for range 10 {
			do(t, neighbor, &initiator.Command{})
		}
		neighbor.Close()
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("a neighbor needed %v to log in and for 10 commands", took)
		}
	}
	end()
	testkit.Eventually(t, "nobody polls", func() bool {
		n, missed := l.net.polling.Counts()
		time.Sleep(20 * time.Millisecond)
		again, missedAgain := l.net.polling.Counts()
		return n == again && missed == missedAgain
	})

	l.more = "limits: {poll_time: 0}"
	l.ok(ChangeOptions{})
	before := found()
	end = work()
	time.Sleep(50 * time.Millisecond)
	end()
	if n := found(); n != before {
		t.Errorf("it polled %d times although poll_time is 0", n-before)
	}
}

// With one CPU nobody polls, and the log says why.
func TestPollingNeedsTwoCPUs(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	l := newLab(t, func(l *lab) { l.more = "limits: {poll_time: 1ms}" })
	s := l.login("a", store)
	for range 100 {
		do(t, s, &initiator.Command{})
	}
	if found, missed := l.net.polling.Counts(); found+missed > 0 || !strings.Contains(l.lines.String(), "limits.poll_time requires two CPUs") {
		t.Errorf("it polled %d times, and the log is:\n%s", found+missed, l.lines)
	}
}
