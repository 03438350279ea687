package daemon

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// pulseTime is what the locks that every login, list and change needs may take until a probe fails.
const pulseTime = 2 * time.Second

// A pulse tells probes whether the daemon answers. However many ask, one goroutine at most waits for the locks.
type pulse struct {
	mu   sync.Mutex
	last *beat
}

// A beat is one look at the daemon.
type beat struct {
	done   chan struct{} // closed when the locks were free
	status string        // valid then
}

// look returns a beat that began before, and has not ended, or begins one.
func (p *pulse) look(status func() string) *beat {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.last != nil {
		select {
		case <-p.last.done:
		default:
			return p.last
		}
	}
	b := &beat{done: make(chan struct{})}
	p.last = b
	go func() {
		b.status = status()
		close(b.done)
	}()
	return b
}

// take takes and releases the locks that every login, list and change needs.
func (d *Daemon) take() {
	d.mu.Lock()
	d.node.Sessions()
	d.mu.Unlock()
}

// beat returns the status line. The error says that the daemon does not answer.
func (d *Daemon) beat(ctx context.Context) (string, error) {
	b := d.pulse.look(func() string {
		d.take()
		return d.status()
	})
	ctx, cancel := context.WithTimeout(ctx, pulseTime)
	defer cancel()
	select {
	case <-b.done:
		return b.status, nil
	case <-ctx.Done():
		return "", fmt.Errorf("the target does not answer: locks that logins and changes need were not free within %v", pulseTime)
	}
}

// Health returns "ok" if the process answers, also while it starts or drains and whatever the state of its LUNs. The error says that only a
// restart of the process helps. Health takes at most 2 s.
func (d *Daemon) Health(ctx context.Context) (string, error) {
	if _, err := d.beat(ctx); err != nil {
		return "", err
	}
	return "ok", nil
}

// Readiness returns a line about sessions, targets and LUNs if initiators may log in now. The error says why they may not: the
// target starts, drains or shuts down, or does not answer. LUNs that are not ready are named and do not count: the others
// are served, and an initiator with several paths decides for each LUN. Readiness takes at most 2 s.
func (d *Daemon) Readiness(ctx context.Context) (string, error) {
	status, err := d.beat(ctx)
	switch {
	case err != nil:
		return "", err
	case !d.accepting.Load():
		return "", errors.New("starting")
	case d.departing.ordered.Load(): // "draining" and the rest of the line
		return "", errors.New(status)
	}
	return status, nil
}
