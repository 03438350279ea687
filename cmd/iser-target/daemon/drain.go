package daemon

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/cmd/iser-target/systemd"
	"github.com/iser-target/iser-target/config"
)

// The end of the daemon: initiators leave if they have time for that (Daemon.empty), the stores are synchronized
// while they are still served (Daemon.syncUnits), sessions are cut and the stores closed (Daemon.shutDown).
// Only the last step is an outage.

// A departure is how the daemon ends.
type departure struct {
	within   time.Duration // for initiators to log out
	to       string        // where they are sent; empty: nowhere
	restart  bool          // perhaps: nobody asked initiators to leave
	upgraded bool          // another process continues
}

// departing is the order to end, which comes once.
type departing struct {
	ordered atomic.Bool
	orders  chan departure
}

// ErrDraining refuses a second drain.
var ErrDraining = errors.New("the target is being drained already")

// Drain makes the daemon end: initiators are asked to log out within that time, and their logins are sent to
// the address, or refused if it is empty. Then Run returns. Drain does not wait. The error is a config.Error if
// the address is wrong, or ErrDraining.
func (d *Daemon) Drain(ctx context.Context, within time.Duration, to string) (*schema.DrainState, error) {
	if to != "" {
		err := d.Effective().CheckElsewhere("to", to)
		d.locked(func() {
			for _, p := range d.served.portals { // port 0 has become another one
				if err == nil && p.l.Addr().String() == to {
					err = &config.Error{Key: "to", Reason: fmt.Sprintf("%q is a portal of the target: the redirect would loop", to)}
				}
			}
		})
		if err != nil {
			return nil, err
		}
	}
	if d.departing.ordered.Swap(true) {
		return nil, ErrDraining
	}
	state := &schema.DrainState{Sessions: d.sessions(), Within: config.FormatDuration(within), To: to}
	d.log.InfoContext(ctx, "draining", eventKey, "service", "sessions", state.Sessions, "within", within, "to", to)
	d.departing.orders <- departure{within: within, to: to}
	return state, nil
}

// sessions returns the number of normal sessions.
func (d *Daemon) sessions() (n int) {
	for _, s := range d.node.Sessions() {
		if !s.Discovery {
			n++
		}
	}
	return n
}

// awaitEnd waits until the daemon has to end, and makes the initiators leave. When ctx ends during a drain,
// that ends at once.
func (d *Daemon) awaitEnd(ctx context.Context) (how departure) {
	select {
	case <-d.upgraded:
		return departure{upgraded: true}
	case how = <-d.departing.orders:
		d.empty(ctx, how)
		return how
	case <-ctx.Done():
		d.departing.ordered.Store(true)
		cfg := d.Effective()
		how = departure{within: cfg.Drain, to: cfg.DrainTo, restart: cfg.Drain == 0}
	}
	d.log.Info("shutting down", eventKey, "service", "sessions", d.sessions(), "drain", how.within)
	d.stopping(how.within)
	d.changes.end() // cuts short what is in progress
	d.empty(context.Background(), how)
	return how
}

// empty makes the initiators leave.
func (d *Daemon) empty(ctx context.Context, how departure) {
	if how.within == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, how.within)
	defer cancel()
	if left, err := d.node.Empty(ctx, how.to); err != nil {
		d.log.Warn("sessions are cut that did not log out", eventKey, "service", "sessions", left, "within", how.within)
	}
}

// syncUnits synchronizes all stores, so that closing them takes a moment. It leaves out those that hang, and
// those that take longer than d.waits.sync. Errors come again when the stores are closed.
func (d *Daemon) syncUnits() {
	var list []*removal
	d.locked(func() {
		for _, t := range d.served.targets {
			for _, l := range t.luns {
				if l.attempt == nil && l.fault == nil {
					list = append(list, &removal{t: t, l: l})
				}
			}
		}
	})
	ctx, cancel := context.WithTimeout(context.Background(), d.waits.sync)
	defer cancel()
	inParallel(ctx, d.waits.slot, list, func(r *removal) error {
		if _, hangs := r.l.unit.Hang(); hangs || ctx.Err() != nil {
			return nil
		}
		err := d.calls.do(ctx, d.waits.sync, storeKey(r.t.name, &r.l.LUN), callSync, func(*call) error { return r.l.unit.Sync() }, nil)
		if err != nil && !errors.Is(err, ErrStuck) && !errors.Is(err, backend.ErrClosed) && !errors.Is(err, backend.ErrMoved) {
			d.log.Warn("store was not synchronized", eventKey, "service", "target", r.t.name, "lun", r.l.ID, "reason", err)
		}
		return nil
	})
}

// stopping notifies the service manager that the shutdown begins and how long it may take.
func (d *Daemon) stopping(drain time.Duration) {
	status := fmt.Sprintf("stopping: sessions %d", d.sessions())
	if drain > 0 {
		status += fmt.Sprintf(", asked to log out within %v", drain)
	}
	leave := time.Duration(0)
	if d.group != nil {
		leave = d.group.leaveTime()
	}
	d.notify("STOPPING=1", systemd.Extend(drain+leave+d.waits.sync+shutdownTime+stopSlack), systemd.Status(status))
}
