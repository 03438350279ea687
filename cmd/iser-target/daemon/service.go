package daemon

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/cmd/iser-target/systemd"
)

const (
	// statusInterval is how often the service manager's line is brought up to date.
	statusInterval = 2 * time.Second
	// namedReasons is how many LUNs that are not ready the line gives reasons for.
	namedReasons = 3
	// stopSlack is what the end may take beyond sessions: stores are synchronized.
	stopSlack = 45 * time.Second
)

// unmatched is an error if sockets were passed that no portal is on: who connects to
// them would wait for ever.
func (d *Daemon) unmatched() error {
	if len(d.manager.Sockets) == 0 {
		return nil
	}
	var list []string
	for _, s := range d.manager.Sockets {
		list = append(list, fmt.Sprintf("%v (%s)", s.Addr(), s.Name))
		s.Close()
	}
	return fmt.Errorf("sockets of the service manager that no portal listens on: %s", strings.Join(list, ", "))
}

// notify tells the service manager. That it cannot be told is no reason to stop.
func (d *Daemon) notify(assignments ...string) {
	if err := d.manager.Notify(assignments...); err != nil {
		d.log.Warn("service manager", "reason", err)
	}
}

// reloading tells the service manager that f reads the configuration again.
func (d *Daemon) reloading(f func()) {
	d.notify(systemd.Reloading()...)
	f()
	d.notify("READY=1", systemd.Status(d.status()))
}

// attend keeps the service manager informed until ctx ends: by a line about the state,
// and, if it watches, that the daemon is able to serve.
func (d *Daemon) attend(ctx context.Context) {
	if !d.manager.Present() {
		return
	}
	d.wg.Go(func() {
		tick := time.NewTicker(statusInterval)
		defer tick.Stop()
		last := ""
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			if now := d.status(); now != last {
				d.notify(systemd.Status(now))
				last = now
			}
		}
	})
}

// watchdog tells the service manager, until the function that it returns is called, that
// the daemon is able to serve: three times in the interval, each time after the locks
// that every login, every list and every change needs have been taken. If one of them is
// never free again, nothing is told, and the manager starts the daemon anew. A change
// that waits for commands holds none of them, nor does a store that does not answer,
// which another process would not make answer either.
func (d *Daemon) watchdog() (stop func()) {
	if d.manager.Watchdog == 0 || !d.manager.Present() {
		return func() {}
	}
	ctx, stop := context.WithCancel(context.Background())
	go func() {
		tick := time.NewTicker(max(d.manager.Watchdog/3, time.Microsecond))
		defer tick.Stop()
		for {
			d.mu.Lock()
			d.node.Sessions()
			d.mu.Unlock()
			d.notify("WATCHDOG=1")
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	}()
	return stop
}

// status is the state in one line: what an operator wants to see first.
func (d *Daemon) status() string {
	sessions := len(d.node.Sessions())
	d.mu.Lock()
	defer d.mu.Unlock()
	var (
		luns     int
		notReady []string
	)
	for _, t := range d.targets {
		for _, id := range slices.Sorted(maps.Keys(t.luns)) {
			luns++
			l := t.luns[id]
			reason := l.unit.Status()
			if err := d.calls.stuck(storeKey(t.name, &l.LUN)); l.fault != nil {
				reason = l.fault.Error()
			} else if err != nil {
				reason = err.Error()
			} else if reason == schema.Ready {
				continue
			}
			notReady = append(notReady, fmt.Sprintf("LUN %d of %s: %s", id, t.name, cut(reason, 200)))
		}
	}
	s := fmt.Sprintf("serving: sessions %d, targets %d, LUNs %d", sessions, len(d.targets), luns)
	if n := len(notReady); n > 0 {
		s += fmt.Sprintf(", not ready %d: %s", n, strings.Join(notReady[:min(n, namedReasons)], "; "))
		if n > namedReasons {
			s += "; …"
		}
	}
	return s
}

// cut shortens s to n octets at most, and what cutting leaves of a character.
func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "") + "…"
}

// stopping tells the service manager that the end begins, and how long it may take.
func (d *Daemon) stopping(most time.Duration) {
	n := len(d.node.Sessions())
	d.notify("STOPPING=1", systemd.Extend(most+stopSlack),
		systemd.Status(fmt.Sprintf("stopping: sessions %d, asked to log out within %v", n, d.Effective().Drain)))
}
