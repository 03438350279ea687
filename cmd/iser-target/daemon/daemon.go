// Package daemon is the running target: its portals, targets, LUNs and sessions, and
// the one path by which they change while initiators are there.
//
// What is to run is said by a config.Document, and what runs is what was made of the
// last one. A change is another document: Change edits a copy, Apply brings one. The
// difference becomes a Plan; the plan is refused, or the document is saved, and then
// the steps are taken (apply.go). Changes come one after the other.
package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/cmd/iser-target/capture"
	"github.com/iser-target/iser-target/cmd/iser-target/systemd"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/security"
)

const (
	// ird and ord are the RDMA Read depths: no initiator reads from us; siw
	// takes in up to 128 Reads.
	ird, ord = 16, 128
	// shutdownTime bounds the end of the sessions when Run ends, beside what they
	// have to log out.
	shutdownTime = 12 * time.Second
)

// Options of a Daemon.
type Options struct {
	LogTo io.Writer // where the log goes
	// Path of the configuration file that the document is from, which changes are
	// written to; empty: there is none, and changes last as long as the process.
	Path string
	// Manager is who has started the process, and has passed it the sockets of portals;
	// nil: nobody.
	Manager *systemd.Manager
	Version string // of the program
	// Dashboard serves a page about d by l until end is called, which closes l; nil:
	// there is none, and dashboard.listen must be empty.
	Dashboard func(d *Daemon, l net.Listener) (end func())

	// Of tests.
	openStore func(*config.LUN) (backend.Store, error) // nil: openBackend
	waits     waits                                    // zero: defaultWaits
}

// A Daemon is a running target.
type Daemon struct {
	path    string
	version string
	started time.Time
	log     *slog.Logger
	manager *systemd.Manager
	level   slog.LevelVar
	events  events
	node    *iscsi.Node
	policy  security.ConnPolicy
	domain  *rdma.Domain
	rdma    atomic.Pointer[rdma.Options] // for connections from now on
	limits  atomic.Pointer[config.Limits]
	ready   chan struct{}

	captures *capture.Hub

	conns     atomic.Int64 // TCP connections
	newcomers newcomers    // some of them
	wg        sync.WaitGroup

	ids           *state.Identities
	reservations  *lun.Reservations
	settings      *lun.Settings
	sanitizations *lun.Sanitizations
	shrinks       shrinks

	// turn has room for one: who has put something there is changing things, and
	// alone may write what follows.
	turn    chan struct{}
	doc     *config.Document
	next    *config.Document // what the change whose turn it is makes of doc; else nil
	running context.Context  // of Run; nil before

	ended     context.Context // ends when Run is about to
	end       context.CancelFunc
	finishing sync.WaitGroup // changes that are made, whose ends are not over
	calls     calls
	waits     waits

	mu      sync.Mutex      // held for moments, while what follows is read, or written by whose turn it is
	cfg     *config.Config  // what runs
	pending []config.Change // what waits for a restart
	portals []*portal
	targets []*servedTarget
	leaving []*removal      // what nobody sees any more and has not ended yet
	parting []*partings     // sessions that end because of changes
	builds  map[string]bool // files that are being made, by path

	debug     *http.Server
	debugAddr net.Addr

	metrics     *http.Server
	metricsAddr net.Addr

	serveDashboard func(*Daemon, net.Listener) (end func()) // of Options
	endDashboard   func()                                   // nil: it is not served
	dashboardAddr  net.Addr

	// before is called before each thing that a change does, and openStore for each
	// store; tests let them fail.
	before    func(what string) error
	openStore func(*config.LUN) (backend.Store, error)
}

// New opens the stores and the listeners. Nothing is served yet, but initiators can
// connect. A LUN whose store cannot be opened is no error: it is not ready, and Run
// tries again.
func New(doc *config.Document, o Options) (*Daemon, error) {
	cfg, err := doc.Config()
	if err != nil {
		return nil, err
	}
	d := &Daemon{
		path: o.Path, doc: doc, cfg: cfg,
		version: o.Version, started: time.Now(), serveDashboard: o.Dashboard,
		policy:   security.AllowAll{},
		domain:   rdma.NewDomain(),
		ready:    make(chan struct{}),
		turn:     make(chan struct{}, 1),
		before:   func(string) error { return nil },
		manager:  o.Manager,
		builds:   map[string]bool{},
		captures: capture.NewHub(),
	}
	if d.manager == nil {
		d.manager = &systemd.Manager{}
	}
	d.openStore = d.openBackend
	if o.openStore != nil {
		d.openStore = o.openStore
	}
	if d.waits = o.waits; d.waits == (waits{}) {
		d.waits = defaultWaits
	}
	d.calls.most = d.waits.most
	d.ended, d.end = context.WithCancel(context.Background())
	d.level.Set(cfg.Log.SlogLevel())
	d.log = d.newLogger(cfg.Log, o.LogTo)
	options, err := d.nodeOptions(cfg)
	if err != nil {
		return nil, err
	}
	d.node = iscsi.NewNode(options)
	d.setLimits(cfg)
	if err := d.open(); err != nil {
		d.closeListeners()
		return nil, errors.Join(err, d.closeUnits())
	}
	return d, nil
}

func (d *Daemon) newLogger(c config.Log, w io.Writer) *slog.Logger {
	o := &slog.HandlerOptions{Level: &d.level}
	var h slog.Handler = slog.NewTextHandler(w, o)
	if c.Format == "json" {
		h = slog.NewJSONHandler(w, o)
	}
	return slog.New(&eventHandler{next: h, events: &d.events})
}

// nodeOptions are what cfg says about sessions from now on.
func (d *Daemon) nodeOptions(cfg *config.Config) (iscsi.Options, error) {
	discovery, err := cfg.DiscoveryAuth.CHAP()
	if err != nil {
		return iscsi.Options{}, fmt.Errorf("discovery_auth: %w", err)
	}
	nop := cfg.Limits.NOPInterval
	if nop == 0 {
		nop = -1
	}
	return iscsi.Options{
		QueueDepth:       cfg.Limits.QueueDepth,
		ConnectionMemory: int(cfg.Limits.ConnectionMemory),
		LoginTimeout:     cfg.Limits.LoginTimeout,
		NopInterval:      nop,
		NopTimeout:       cfg.Limits.NOPTimeout,
		ShutdownWait:     max(cfg.Drain, 1), // 0 is the default
		DiscoveryAuth:    discovery,
		Limits: keys.Limits{
			Digests:            true,
			MaxConnections:     uint16(cfg.Limits.PerSession),
			ErrorRecoveryLevel: uint8(cfg.Limits.ErrorRecoveryLevel),
		},
		Events: nodeEvents{d.log},
	}, nil
}

// setLimits makes the limits of cfg those of connections from now on.
func (d *Daemon) setLimits(cfg *config.Config) {
	d.limits.Store(&cfg.Limits)
	d.rdma.Store(&rdma.Options{
		IRD: ird, ORD: ord,
		MaxULPDU: cfg.Limits.MaxFPDU,
		NoCRC:    !bool(cfg.MPA.CRC),
		Domain:   d.domain,
	})
}

// open opens stores, portals and the debug server.
func (d *Daemon) open() error {
	if err := d.openState(d.cfg.StateDir); err != nil {
		return err
	}
	if err := d.startTargets(); err != nil {
		return err
	}
	for _, pc := range d.cfg.Portals {
		p, err := d.listen(pc)
		if err != nil {
			return err
		}
		d.portals = append(d.portals, p)
	}
	if err := d.unmatched(); err != nil {
		return err
	}
	if err := d.forgetShrinks(); err != nil {
		return fmt.Errorf("state_dir: %w", err)
	}
	if err := d.listenMetrics(d.cfg.Metrics.Listen); err != nil {
		return err
	}
	if err := d.listenDashboard(d.cfg.Dashboard.Listen); err != nil {
		return err
	}
	return d.listenDebug(d.cfg.Debug.Listen)
}

// startTargets makes the targets of the start. What is wrong with a LUN keeps that LUN
// alone from being ready.
func (d *Daemon) startTargets() error {
	var lasting []string // what needs no file to be made first: see openUnit
	for i := range d.cfg.Targets {
		c := &d.cfg.Targets[i]
		d.targets = append(d.targets, newTarget(c, d.cfg.TPGTs(c)))
		for _, l := range c.LUNs {
			if l.Backend != "file" {
				lasting = append(lasting, identityKey(c.Name, &l))
			}
		}
	}
	if err := d.ids.Make(lasting); err != nil {
		return err
	}
	if err := d.openAll(); err != nil {
		return err
	}
	for i := range d.cfg.Targets {
		tc, err := d.targets[i].config(&d.cfg.Targets[i], d.cfg)
		if err != nil {
			return err
		}
		if err := d.node.AddTarget(tc); err != nil {
			return err
		}
	}
	return nil
}

// openAll opens the stores of the start, several at one time, so that those that hang keep
// no other one from being ready.
func (d *Daemon) openAll() error {
	ctx, cancel := context.WithTimeout(context.Background(), d.waits.start)
	defer cancel()
	slots := newSlots(d.waits.slot)
	var add []func() error
	for i := range d.cfg.Targets {
		t := d.targets[i]
		for _, l := range d.cfg.Targets[i].LUNs {
			fresh := !d.ids.Known(identityKey(t.name, &l))
			open, free := d.opener(t.name, &l, fresh), slots.take(ctx)
			c, err := d.calls.begin(storeKey(t.name, &l), opening, func(c *call) (*lun.Unit, error) {
				defer free()
				return open(c)
			})
			if err != nil {
				free()
			}
			add = append(add, func() error {
				if err == nil {
					err = c.wait(ctx, d.waits.start)
				}
				served, err := d.opened(t, l, fresh, c, err)
				if err == nil {
					err = t.add(served)
				}
				if err != nil {
					return fmt.Errorf("target %s, LUN %d: %w", t.name, l.ID, err)
				}
				return nil
			})
		}
	}
	var errs []error
	for _, f := range add { // all of them: what is open is closed with its LUN
		errs = append(errs, f())
	}
	return errors.Join(errs...)
}

// Ready is closed when Run serves.
func (d *Daemon) Ready() <-chan struct{} { return d.ready }

// Run serves until ctx ends, then ends the sessions and closes the stores.
func (d *Daemon) Run(ctx context.Context) error {
	hup := make(chan os.Signal, 1)
	if d.path != "" {
		signal.Notify(hup, unix.SIGHUP) // which from here on never ends the process
	}
	d.turn <- struct{}{}
	for _, w := range d.cfg.Warnings() {
		d.log.Warn("configuration", "reason", w)
	}
	d.running = ctx
	for _, p := range d.portals {
		d.accept(p)
	}
	<-d.turn
	if d.debug != nil {
		d.log.Info("debug server", "url", fmt.Sprintf("http://%v/debug/vars", d.debugAddr))
	}
	defer d.watchdog()()
	if ctx.Err() == nil {
		d.notify("READY=1", systemd.Status(d.status()))
	}
	d.attend(ctx)
	close(d.ready)
	followed := make(chan struct{})
	go func() {
		defer close(followed)
		d.follow(ctx, hup)
	}()
	<-ctx.Done()
	d.log.Info("shutting down", eventKey, "service")
	most := d.Effective().Drain + shutdownTime
	d.stopping(most)
	d.end() // which cuts short what is under way
	return errors.Join(d.lastTurn(followed), d.shutDown(most))
}

// lastTurn waits until nothing changes any more. A file system that hangs, on which the
// configuration is, does not keep the rest from its end.
func (d *Daemon) lastTurn(followed <-chan struct{}) error {
	ctx, cancel := context.WithTimeout(context.Background(), d.waits.turn)
	defer cancel()
	select {
	case d.turn <- struct{}{}: // for good
	case <-ctx.Done():
		return fmt.Errorf("a change did not end within %v", d.waits.turn)
	}
	select {
	case <-followed:
	case <-ctx.Done():
		return fmt.Errorf("looking after the configuration file did not end within %v", d.waits.turn)
	}
	if err := wait(ctx, &d.finishing); err != nil {
		return fmt.Errorf("what changes have removed did not end within %v", d.waits.turn)
	}
	return nil
}

// shutDown ends the sessions, which have that time, and closes the stores.
func (d *Daemon) shutDown(most time.Duration) error {
	d.mu.Lock() // a change may go on that hangs
	d.closeListeners()
	d.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), most)
	defer cancel()
	err := d.node.Shutdown(ctx)
	if err == nil {
		err = wait(ctx, &d.wg)
	}
	if err != nil {
		err = fmt.Errorf("sessions did not end within %v: %w", most, err)
	}
	if err = errors.Join(err, d.closeUnits()); err == nil {
		d.log.Info("stopped")
	}
	return err
}

// wait waits for wg until ctx ends.
func wait(ctx context.Context, wg *sync.WaitGroup) error {
	done := make(chan struct{})
	go func() {
		wg.Wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (d *Daemon) closeListeners() {
	for _, p := range d.portals {
		p.l.Close()
	}
	d.closeMetrics()
	d.closeDashboard()
	d.closeDebug()
}

// Logger is the log of the daemon. Records with the attribute "event" are Events, too.
func (d *Daemon) Logger() *slog.Logger { return d.log }

// Invitation tells a newcomer what to type.
func (d *Daemon) Invitation() string {
	var b strings.Builder
	addr := d.portals[0].l.Addr()
	name := d.cfg.Targets[0].Name
	fmt.Fprintf(&b, `Serving %s at %v: one memory disk, for this machine only.
Without --config nothing is kept; see docs/config.md for a lasting set-up.

A Linux initiator on this machine, as root, over TCP:
    iscsiadm -m discovery -t st -p %v
    iscsiadm -m node -T %s -p %v --login
With libiscsi:
    iscsi-ls -s iscsi://%v
The same over RDMA, with "-I iser" behind both iscsiadm lines and iser:// for
iscsi://. siw of Linux 6.1 cannot use lo: there, and from other machines, take a
portal on the address of a real interface, as README.md describes.
    modprobe siw && modprobe ib_iser && rdma link add siw0 type siw netdev lo

`, name, addr, addr, name, addr, addr)
	return b.String()
}
