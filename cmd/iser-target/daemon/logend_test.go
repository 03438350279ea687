package daemon

import (
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/testkit"
)

// A pager is a reader of the log that does not read until it is closed.
type pager struct {
	testkit.Log
	closed chan struct{}
}

func (p *pager) Write(b []byte) (int, error) {
	<-p.closed
	return p.Log.Write(b)
}

// While nobody reads the log, initiators log in and are served. Later it has what was in memory and
// the number of the lines that were not.
func TestLogThatNobodyReads(t *testing.T) {
	l := newLab(t)
	neighbor := l.login("neighbor", store)
	attentions(t, neighbor, 0)
	p := &pager{closed: make(chan struct{})}
	l.logTo.mu.Lock()
	before := l.logTo.w
	l.logTo.w = p
	l.logTo.mu.Unlock()

	const line = "a line of the log that nobody reads, long enough to fill the memory for it"
	const lines = 2 * logQueue / len(line)
	inTime(t, "service while nobody reads the log", func() {
		for range 20 {
			s := l.login("newcomer", store)
			attentions(t, s, 0)
			s.Close()
		}
		for range lines {
			l.log.Info(line)
		}
		if got := testUnitReady(t, neighbor, 0); got != "" {
			t.Errorf("the neighbor has %s", got)
		}
	})
	l.logTo.mu.Lock()
	if n := len(l.logTo.queue); n > logQueue {
		t.Errorf("%d bytes wait", n)
	}
	l.logTo.mu.Unlock()

	close(p.closed)
	const told = "lines of the log were left out: nobody read it"
	testkit.Eventually(t, "the log tells what it lacks", func() bool { return len(l.eventOf("service", told)) > 0 })
	n, ok := l.eventOf("service", told)[0].Attrs["lines"].(uint64)
	if left := uint64(lines - strings.Count(p.String(), line)); !ok || n < left || n > left+100 { // 100: of logins
		t.Errorf("it lacks %d lines, want %d and those of 20 logins", n, left)
	}
	l.log.Info("read again")
	if !strings.Contains(p.String(), "read again") {
		t.Error("a line is not written at once when the log is read again")
	}
	l.logTo.mu.Lock()
	l.logTo.w = before
	l.logTo.mu.Unlock()
}

// The end of the target does not wait for a reader of the log.
func TestEndWithLogThatNobodyReads(t *testing.T) {
	p := &pager{closed: make(chan struct{})}
	defer close(p.closed)
	e := logEnd{w: p, lostLines: func(uint64) {}}
	inTime(t, "the end", func() {
		e.Write([]byte("a line\n"))
		begun := time.Now()
		e.end()
		if took := time.Since(begun); took < logEndTime {
			t.Errorf("it gave the reader %v", took)
		}
	})
}
