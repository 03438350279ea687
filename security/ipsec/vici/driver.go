package vici

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"syscall"
	"time"

	"github.com/iser-target/iser-target/security/ipsec"
	"github.com/strongswan/govici/vici"
)

// DefaultSocket is where charon listens unless its configuration says otherwise.
const DefaultSocket = "/run/charon.vici"

const (
	requestTime = 2 * time.Second        // the default of Options.Timeout
	pause       = time.Second            // after charon did not answer, before it is asked again
	keysTime    = 2 * time.Second        // from the kernel's SA to strongSwan's record of it
	firstWait   = 20 * time.Millisecond  // within keysTime
	longestWait = 250 * time.Millisecond // the same
)

// Options are those of a Driver.
type Options struct {
	Socket  string        // path of charon's socket; empty: DefaultSocket
	Timeout time.Duration // of one request; 0: 2 s
}

// A Driver is the driver vici. It adds to what another driver knows of the kernel. What it has learnt of an SA it keeps while
// strongSwan does not answer: a daemon that hangs or restarts changes nothing about SAs that the kernel still has.
type Driver struct {
	kernel  ipsec.Driver
	socket  string
	timeout time.Duration

	turn chan struct{} // holds one token; its taker may use session and asks charon

	session *session // guarded by turn; nil: to be dialled

	mu      sync.Mutex
	asked   uint64 // requests for all SAs that have begun
	known   map[key]record
	foreign map[key]bool // SAs of the kernel that strongSwan does not have; until something changes
	failed  time.Time    // when charon last did not answer
	failure error        // why; nil: it answered
	closed  bool
}

var _ interface {
	ipsec.Driver
	ipsec.Initiator
} = (*Driver)(nil)

// New returns a Driver that adds strongSwan's knowledge to that of kernel, which it closes with itself. It connects when it needs
// to.
func New(kernel ipsec.Driver, o Options) *Driver {
	d := &Driver{kernel: kernel, socket: o.Socket, timeout: o.Timeout, turn: make(chan struct{}, 1),
		known: map[key]record{}, foreign: map[key]bool{}}
	if d.socket == "" {
		d.socket = DefaultSocket
	}
	if d.timeout <= 0 {
		d.timeout = requestTime
	}
	d.turn <- struct{}{}
	return d
}

// Name returns vici.
func (d *Driver) Name() string { return "vici" }

// Check returns what the kernel lacks, and why strongSwan does not answer.
func (d *Driver) Check(ctx context.Context) []error {
	errs := d.kernel.Check(ctx)
	if err := d.ask(ctx); err != nil {
		errs = append(errs, err)
	}
	return errs
}

// Look returns what the kernel has for f, with identities and lifetimes of strongSwan. Without an answer of strongSwan the result is incomplete, and
// Look returns no error: the Judge decides whether the profile requires what is missing. Look waits up to 2 s, or 2/5 of the time that ctx leaves, for the record of an SA that
// the kernel has already.
func (d *Driver) Look(ctx context.Context, f ipsec.Flow) (ipsec.Protection, error) {
	p, err := d.kernel.Look(ctx, f)
	if err != nil || d.join(&p) {
		return p, err
	}
	begun, limit := time.Now(), keysTime
	if end, ok := ctx.Deadline(); ok {
		limit = min(limit, time.Until(end)*2/5)
	}
	for wait := firstWait; ; wait = min(2*wait, longestWait) {
		if err := d.ask(ctx); err != nil {
			p.Incomplete = err
			return p, ctx.Err()
		}
		if d.join(&p) {
			return p, nil
		}
		if time.Since(begun) >= limit {
			d.giveUp(p)
			return p, nil
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return p, ctx.Err()
		}
	}
}

// join adds to the SAs of p what is known of them. It reports whether charon need not be asked: each SA is known, or foreign.
func (d *Driver) join(p *ipsec.Protection) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	all := true
	for _, sas := range [][]ipsec.SA{p.In, p.Out} {
		for i := range sas {
			sa := &sas[i]
			k := keyOf(sa)
			r, ok := d.known[k]
			if !ok {
				all = all && d.foreign[k]
				continue
			}
			sa.IKE, sa.LocalID, sa.RemoteID = true, r.localID, r.remoteID
			if sa.Lifetime == 0 {
				sa.Lifetime = r.lifetime
			}
		}
	}
	return all
}

// Bounds of what is remembered of SAs that strongSwan does not have.
const (
	maxForeign = 1 << 16
	maxKnown   = 1 << 17
)

// giveUp remembers that strongSwan does not have the SAs of p that are not known.
func (d *Driver) giveUp(p ipsec.Protection) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, sas := range [][]ipsec.SA{p.In, p.Out} {
		for i := range sas {
			k := keyOf(&sas[i])
			if _, ok := d.known[k]; !ok && len(d.foreign) < maxForeign {
				d.foreign[k] = true
			}
		}
	}
}

func keyOf(sa *ipsec.SA) key { return key{sa.SPI, sa.Destination.Unmap().WithZone("")} }

// forget lets the next Look ask for what was foreign. Something has changed.
func (d *Driver) forget() {
	d.mu.Lock()
	defer d.mu.Unlock()
	clear(d.foreign)
}

// keep is how long Look still uses what it knows of an SA that strongSwan no longer has: after a crash of charon its SAs remain in
// the kernel until they expire.
const keep = 24 * time.Hour

// ask asks charon for all SAs. Only one goroutine asks at a time; those that waited for it share the answer if the question came
// after they did. For a moment after a failure ask returns that failure.
func (d *Driver) ask(ctx context.Context) error {
	d.mu.Lock()
	before := d.asked
	d.mu.Unlock()
	select {
	case <-d.turn:
		defer func() { d.turn <- struct{}{} }()
	case <-ctx.Done():
		return ctx.Err()
	}
	d.mu.Lock()
	answered, failure := d.asked != before, d.failure
	recent := failure != nil && time.Since(d.failed) < pause
	if !answered && !recent {
		d.asked++
	}
	d.mu.Unlock()
	if answered || recent {
		return failure
	}
	var sas map[key]record
	err := d.use(ctx, func(s *session) error {
		answer, err := s.StreamedCommandRequest("list-sas", "list-sa", vici.NewMessage())
		if err != nil {
			return err
		}
		sas = records(answer)
		return nil
	})
	if err != nil {
		return d.note(ctx, err)
	}
	d.learn(sas, time.Now())
	return nil
}

// learn makes sas what is known, besides SAs that charon has lost within the time of keep.
func (d *Driver) learn(sas map[key]record, now time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.failure = nil
	for k, r := range d.known {
		if _, ok := sas[k]; ok {
			continue
		}
		if r.gone.IsZero() {
			r.gone = now
		}
		if now.Sub(r.gone) < keep && len(sas) < maxKnown {
			sas[k] = r
		}
	}
	d.known = sas
}

// note remembers that charon did not answer, and why, unless the caller gave up. It returns the error with what to do about it.
func (d *Driver) note(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	err = d.explain(err)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.failed, d.failure = time.Now(), err
	return err
}

// use calls f with the session, which it dials if need be. Preconditions: d.turn is taken.
func (d *Driver) use(ctx context.Context, f func(*session) error) error {
	d.mu.Lock()
	closed := d.closed
	d.mu.Unlock()
	if closed {
		return errClosed
	}
	reused := d.session != nil
	for {
		if d.session == nil {
			s, err := dial(ctx, d.socket, d.timeout)
			if err != nil {
				return err
			}
			d.session = s
		}
		err := d.session.within(ctx, d.timeout, func() error { return f(d.session) })
		if err == nil {
			return nil
		}
		d.session = nil
		// charon may have restarted since the last request.
		if !reused || errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil {
			return err
		}
		reused = false
	}
}

var errClosed = errors.New("the driver vici is closed")

// explain adds to an error what to do about it.
func (d *Driver) explain(err error) error {
	var remedy string
	switch {
	case errors.Is(err, errClosed):
		return err
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		remedy = "Start strongSwan (systemctl start strongswan), or set ipsec.vici.socket"
	case errors.Is(err, fs.ErrPermission):
		remedy = "Let the group of the target use the socket (packaging/ipsec/vici.conf)"
	default:
		remedy = "Restart strongSwan (systemctl restart strongswan)"
	}
	return fmt.Errorf("strongSwan: %s: %w. %s", d.socket, err, remedy)
}

// Close ends the connections, and closes the driver of the kernel.
func (d *Driver) Close() error {
	d.mu.Lock()
	d.closed = true
	d.mu.Unlock()
	<-d.turn // at most Options.Timeout away
	if d.session != nil {
		d.session.end()
		d.session = nil
	}
	d.turn <- struct{}{}
	return d.kernel.Close()
}
