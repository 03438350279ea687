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
	// statusInterval is how often the status line for the service manager is updated.
	statusInterval = 2 * time.Second
	// namedReasons is how many LUNs that are not ready the status line names.
	namedReasons = 3
	// stopSlack is what a shutdown takes after the sessions have ended: stores are synchronized.
	stopSlack = 45 * time.Second
)

// checkSockets fails if the service manager passed a socket that no portal uses:
// initiators that connect to it would wait forever.
func (d *Daemon) checkSockets() error {
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

// notify notifies the service manager. An error is logged only.
func (d *Daemon) notify(assignments ...string) {
	if err := d.manager.Notify(assignments...); err != nil {
		d.log.Warn("service manager", "reason", err)
	}
}

// reloading calls f, and tells the service manager that it reloads meanwhile.
func (d *Daemon) reloading(f func()) {
	d.notify(systemd.Reloading()...)
	f()
	d.notify("READY=1", systemd.Status(d.status()))
}

// attend sends the status line to the service manager until ctx ends.
func (d *Daemon) attend(ctx context.Context) {
	if !d.manager.Present() {
		return
	}
	last := ""
	d.net.wg.Go(func() {
		every(ctx, statusInterval, func() {
			if now := d.status(); now != last {
				d.notify(systemd.Status(now))
				last = now
			}
		})
	})
}

// every calls f in that interval until ctx ends.
func every(ctx context.Context, interval time.Duration, f func()) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			f()
		}
	}
}

// watchdog notifies the service manager three times per watchdog interval, until stop is
// called. Each time it first takes the locks that every login, list and change needs. If
// one of them is never released, the notifications end and the manager restarts the
// daemon. A change that waits for commands holds none of these locks, and neither does a
// call of a store that hangs, which a restart would not repair.
func (d *Daemon) watchdog() (stop func()) {
	if d.manager.Watchdog == 0 || !d.manager.Present() {
		return func() {}
	}
	ctx, stop := context.WithCancel(context.Background())
	alive := func() {
		d.take()
		d.notify("WATCHDOG=1")
	}
	go func() {
		alive()
		every(ctx, max(d.manager.Watchdog/3, time.Microsecond), alive)
	}()
	return stop
}

// status returns the state in one line, for operators.
func (d *Daemon) status() string {
	sessions := len(d.node.Sessions())
	d.mu.Lock()
	defer d.mu.Unlock()
	var (
		luns     int
		notReady []string
	)
	for _, t := range d.served.targets {
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
	doing := "serving"
	if d.departing.ordered.Load() {
		doing = "draining"
	}
	s := fmt.Sprintf("%s: sessions %d, targets %d, LUNs %d", doing, sessions, len(d.served.targets), luns)
	if n := len(notReady); n > 0 {
		s += fmt.Sprintf(", not ready %d: %s", n, strings.Join(notReady[:min(n, namedReasons)], "; "))
		if n > namedReasons {
			s += "; …"
		}
	}
	return s
}

// cut shortens s to at most n bytes, at the end of a character.
func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "") + "…"
}
