// Package daemon runs a target: its portals, targets, LUNs and sessions, and the changes
// to them while initiators use them.
//
// A config.Document says what runs. A change is another document: Change edits a copy of
// the running one, Apply takes a new one. The daemon computes the difference as a plan. It
// refuses the plan, or saves the document and takes the steps (change.go). Changes are
// made one after the other; the right to make one is an editor. The targets of a cluster are a part of the document that is kept in etcd
// (cluster_config.go).
package daemon

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/cmd/iser-target/capture"
	"github.com/iser-target/iser-target/cmd/iser-target/handover"
	"github.com/iser-target/iser-target/cmd/iser-target/httpd"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/cmd/iser-target/systemd"
	"github.com/iser-target/iser-target/cmd/iser-target/waitset"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/fair"
	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/rdma/llp"
	"github.com/iser-target/iser-target/security/limits"
)

const (
	// ird and ord are the RDMA Read depths. No initiator reads from the target.
	ird, ord = 16, config.MaxORD
	// shutdownTime is what sessions have to end at a shutdown, once they are cut.
	shutdownTime = 12 * time.Second
)

// Options of a Daemon.
type Options struct {
	LogTo io.Writer // of the log
	// Path is the configuration file of the document. Changes are written to it. Empty:
	// changes last until the process exits.
	Path string
	// Manager is the service manager that started the process and passed it the sockets
	// of portals; nil: none.
	Manager *systemd.Manager
	Version string // of the program
	// Dashboard serves a page about d on l, with the login of w, until end is called, which closes l. nil: the
	// program has no dashboard, and dashboard.listen must be empty.
	Dashboard func(d *Daemon, l net.Listener, w *httpd.Web) (end func())
	// Control opens the sockets of the control API of d, before files are created. nil: it has no sockets.
	Control func(d *Daemon) error
	// Received is what the daemon continues; nil: it begins.
	Received *handover.Received
	// Successor returns a command that runs the program of the file that this one was started from, with the same
	// arguments. nil: Upgrade is not possible.
	Successor func() (*exec.Cmd, error)
	// Witness returns a command that calls Witness with its standard input. nil: when the process is killed, the other gateways of a cluster wait
	// until its lease expires.
	Witness func() (*exec.Cmd, error)

	// For tests.
	openStore func(*config.LUN) (backend.Store, error)    // nil: openBackend
	openHome  func(*config.Cluster) (state.Lessor, error) // nil: openHome
	waits     waits                                       // zero: defaultWaits
	ipsec     ipsecHooks                                  // zero: defaultIPsecHooks
}

// A Daemon is a running target.
type Daemon struct {
	path    string
	version string
	started time.Time
	log     *slog.Logger
	level   slog.LevelVar
	events  events
	gate    logGate
	logTo   logEnd
	manager *systemd.Manager
	ready   chan struct{}
	reloads chan string // reasons to read the configuration file again

	accepting atomic.Bool // portals accept logins
	pulse     pulse
	depths    depths
	applied   applied

	node          *iscsi.Node
	net           network
	ipsec         *protection
	state         *stateFiles
	group         *group // nil: the target is in no cluster
	changes       changes
	calls         calls
	stores        *fair.Process // what the LUNs share to call their stores
	tokens        *lun.Tokens   // ROD tokens of all LUNs
	waits         waits
	departing     departing
	listeners     handover.Listeners
	received      *handover.Received // what New continues
	successor     func() (*exec.Cmd, error)
	upgraded      chan struct{}          // closed when another process continues
	continued     []func()               // run the connections of sessions that Run continues
	supervisor    *handover.Supervisor   // nil: the process has no supervisor of its own
	lost          error                  // why the process that continued does not; before upgraded is closed
	successorLink *os.File               // to the process that continues, if this one is to be its supervisor
	side          map[string]*sideServer // by kind of change
	certificates  atomic.Pointer[func() []schema.CertificateState]
	managers      atomic.Pointer[func(*Manager) error] // nil: none is served

	mu     sync.Mutex // held for moments; before shrinks.mu and the locks of node
	served served
	ending ending
	builds map[string]bool // files in progress, by path

	// before is called before each step of a change, and openStore for each store. Tests
	// let them fail.
	before    func(what string) error
	openStore func(*config.LUN) (backend.Store, error)
	openHome  func(*config.Cluster) (state.Lessor, error)
	witness   func() (*exec.Cmd, error)
}

// network is what connections need before they belong to a session.
type network struct {
	domain    *rdma.Domain
	rdma      atomic.Pointer[rdma.Options] // of the next connections
	limits    *limits.Set
	login     atomic.Int64 // limits.login_timeout, in nanoseconds
	polling   llp.Polling
	captures  *capture.Hub
	newcomers newcomers
	waiting   *waitset.Set // connections that wait for their initiators; of Run
	wg        sync.WaitGroup
}

// stateFiles are the files of the state directory. Without one they are in memory, or nil.
type stateFiles struct {
	dir           string // empty: in memory
	ids           *state.Identities
	reservations  *lun.Reservations
	settings      *lun.Settings
	sanitizations *lun.Sanitizations
	failures      *lun.SyncFailures
	shrinks       shrinks
	checksums     checksums
	salvaged      []error // why files are not what they were
}

// New opens the stores and listens on the portals. Initiators can connect, but only Run
// serves them. If a store cannot be opened, its LUN is not ready, and Run retries.
func New(doc *config.Document, o Options) (*Daemon, error) {
	cfg, err := doc.Config()
	if err != nil {
		return nil, err
	}
	d := &Daemon{
		path: o.Path, version: o.Version, started: time.Now(),
		manager: cmp.Or(o.Manager, &systemd.Manager{}),
		ready:   make(chan struct{}),
		reloads: make(chan string, 1),
		net:     network{domain: rdma.NewDomain(), captures: capture.NewHub(), limits: limits.New()},
		changes: changes{lock: make(chan struct{}, 1)},
		served:  served{doc: doc, cfg: cfg},
		builds:  map[string]bool{},
		events:  events{log: rand.Text()},
		state:   &stateFiles{},
		before:  func(string) error { return nil },
		waits:   cmp.Or(o.waits, defaultWaits),

		received: o.Received, successor: o.Successor, upgraded: make(chan struct{}),
	}
	d.applied.succeed()
	d.net.newcomers.limits = d.net.limits
	d.net.polling.Most, d.net.polling.Rest = runtime.GOMAXPROCS(0)/2, time.Millisecond
	d.net.polling.Others = func() bool { return d.net.limits.Connections.Used() > 1 }
	d.ipsec = newProtection(d, o.ipsec)
	d.openStore = o.openStore
	if d.openStore == nil {
		d.openStore = d.openBackend
	}
	d.openHome, d.witness = o.openHome, o.Witness
	if d.openHome == nil {
		d.openHome = openHome
	}
	d.calls = calls{max: d.waits.calls, inProgress: map[callKey]*call{}}
	d.changes.ended, d.changes.end = context.WithCancel(context.Background())
	d.level.Set(cfg.Log.SlogLevel())
	d.logTo.w = o.LogTo
	d.logTo.lostLines = func(n uint64) {
		d.log.Warn("lines of the log were left out: nobody read it", eventKey, "service", "lines", n)
	}
	d.log = d.newLogger(cfg.Log, &d.logTo)
	d.side = d.newSideServers(o.Dashboard)
	d.net.limits.Observe(d.reportBite)
	d.stores = fair.NewProcess(d.net.limits)
	d.tokens = lun.NewTokens(d.net.limits)
	options, err := d.nodeOptions(cfg)
	if err != nil {
		return nil, err
	}
	d.node = iscsi.NewNode(options)
	d.depths.begin(d.started)
	d.setLog(cfg.Log)
	d.departing.orders = make(chan departure, 1)
	d.setLimits(cfg)
	err = d.receive()
	if err == nil {
		err = d.open(o.Control)
	}
	if err == nil {
		err = d.continueAll()
	}
	if err != nil {
		d.closeListeners()
		err = errors.Join(err, d.closeUnits(), d.ipsec.close())
		d.logTo.end()
		return nil, err
	}
	return d, nil
}

// newLogger returns a log that also records events.
func (d *Daemon) newLogger(c config.Log, w io.Writer) *slog.Logger {
	o := &slog.HandlerOptions{Level: &d.level}
	var h slog.Handler = slog.NewTextHandler(w, o)
	if c.Format == "json" {
		h = slog.NewJSONHandler(w, o)
	}
	d.gate.limits = d.net.limits
	return slog.New(&gateHandler{Handler: &eventHandler{next: h, events: &d.events}, gate: &d.gate})
}

// nodeOptions returns what cfg says about new sessions.
func (d *Daemon) nodeOptions(cfg *config.Config) (iscsi.Options, error) {
	discovery, err := cfg.DiscoveryAuth.CHAP()
	if err != nil {
		return iscsi.Options{}, fmt.Errorf("discovery_auth: %w", err)
	}

	return iscsi.Options{
		QueueDepth:       cfg.Limits.QueueDepth,
		ConnectionMemory: int(cfg.Limits.ConnectionMemory),
		LoginTimeout:     cfg.Limits.LoginTimeout,
		NopInterval:      cmp.Or(cfg.Limits.NOPInterval, -1), // 0 is the default
		NopTimeout:       cfg.Limits.NOPTimeout,
		DiscoveryAuth:    discovery,
		Limits: keys.Limits{
			Digests:            true,
			MaxConnections:     uint16(cfg.Limits.PerSession),
			ErrorRecoveryLevel: uint8(cfg.Limits.ErrorRecoveryLevel),
		},
		Events: d.report,
		Shared: d.net.limits,
	}, nil
}

// setLimits applies the limits of cfg to new connections.
func (d *Daemon) setLimits(cfg *config.Config) {
	d.net.limits.Apply(cfg.Limits.Bounds())
	d.limitDescriptors()
	d.limitThreads(cfg)
	d.net.login.Store(int64(cfg.Limits.LoginTimeout))
	d.net.polling.SetTime(cfg.Limits.PollTime)
	if cfg.Limits.PollTime > 0 && d.net.polling.Most == 0 {
		d.log.Warn("connections do not poll", eventKey, "service", "reason", "limits.poll_time requires two CPUs: on the only one, polling would take it from other connections")
	}
	d.net.rdma.Store(&rdma.Options{
		IRD: ird, ORD: ord,
		MaxULPDU: cfg.Limits.MaxFPDU,
		NoCRC:    cfg.MPA.CRC == config.CRCOff,
		WholeCRC: cfg.MPA.CRC == config.CRCAuto,
		Markers:  bool(cfg.MPA.Markers),
		Domain:   d.net.domain,

		UnstatedORD: cfg.MPA.UnstatedORD,
	})
}

// open opens portals, side servers and stores.
func (d *Daemon) open(control func(*Daemon) error) error {
	e, err := d.edit(context.Background())
	if err != nil {
		return err
	}
	defer e.release()
	if err := d.openGroup(d.served.cfg); err != nil {
		return err
	}
	cfg := d.served.cfg // with the targets of the cluster
	d.checkThreads(cfg, limits.ThisMachine().Threads)
	if err := d.checkDescriptors(cfg); err != nil {
		return err
	}
	if err := e.listenAll(cfg, control); err != nil {
		return err
	}
	// Files come last, so that a start that fails before leaves none.
	if err := d.openState(cfg.StateDir); err != nil {
		return err
	}
	d.group.record()
	d.warnOfFreshState(cfg)
	if err := d.adoptSerials(); err != nil {
		return err
	}
	if err := e.startTargets(); err != nil {
		return err
	}
	if err := e.forgetShrinks(); err != nil {
		return fmt.Errorf("state_dir: %w", err)
	}
	return nil
}

// listenAll opens portals, control sockets and side servers. Initiators that connect wait until Run.
func (e *editor) listenAll(cfg *config.Config, control func(*Daemon) error) error {
	d := e.d
	if err := d.ipsec.use(cfg); err != nil {
		return err
	}
	if err := d.ipsec.blocks.Clear(portalAddresses(cfg, false)); err != nil {
		d.log.Warn("IPsec policies of an earlier run may be left", eventKey, "ipsec", "reason", err)
	}
	for _, pc := range cfg.Portals {
		if _, err := e.openPortal(pc, policyOf(cfg, pc)); err != nil {
			return err
		}
	}
	if err := d.checkSockets(); err != nil {
		return err
	}
	if control != nil {
		if err := control(d); err != nil {
			return err
		}
	}
	for _, kind := range []string{config.KindMetrics, config.KindDashboard, config.KindDebug} {
		if err := d.side[kind].listen(cfg); err != nil {
			return err
		}
	}
	return nil
}

// startTargets opens the targets of the start. A LUN that cannot be opened does not keep
// the others from being ready.
func (e *editor) startTargets() error {
	d, cfg := e.d, e.d.served.cfg
	var keys []string // of LUNs without a file; openUnit stores that of a file or RBD image after creating it
	for i := range cfg.Targets {
		c := &cfg.Targets[i]
		e.listTarget(newTarget(c, cfg.TPGTs(c)))
		for _, l := range c.LUNs {
			if key := identityKey(c.Name, &l); l.Backend != "file" && l.Backend != "rbd" && !l.Shared && d.state.ids.Lost(key) == nil {
				keys = append(keys, key)
			}
		}
	}
	if err := d.state.ids.Make(keys); err != nil {
		return err
	}
	d.pruneFailures()
	if err := e.openAll(); err != nil {
		return err
	}
	for i := range cfg.Targets {
		tc, err := d.served.targets[i].config(&cfg.Targets[i], cfg)
		if err != nil {
			return err
		}
		if err := d.node.AddTarget(tc); err != nil {
			return err
		}
	}
	return nil
}

// openAll opens the stores of the start, several at a time, so that stores that hang do
// not delay the others.
func (e *editor) openAll() error {
	d := e.d
	type starting struct {
		t      *servedTarget
		l      config.LUN
		served *servedLUN
	}
	var list []*starting
	for i, t := range d.served.targets {
		for _, l := range d.served.cfg.Targets[i].LUNs {
			list = append(list, &starting{t: t, l: l})
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), d.waits.start)
	defer cancel()
	err := inParallel(ctx, d.waits.slot, list, func(s *starting) (err error) {
		s.served, err = e.openOrRetry(ctx, d.waits.start, s.t, s.l)
		return err
	})
	for _, s := range list { // all of them: closeUnits closes the stores of LUNs that were added
		if s.served != nil {
			err = errors.Join(err, s.t.add(s.served))
		}
	}
	return err
}

// locked calls f with d.mu held.
func (d *Daemon) locked(f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f()
}

// Ready returns a channel that is closed when Run serves.
func (d *Daemon) Ready() <-chan struct{} { return d.ready }

// Run serves until ctx ends, or until Drain has emptied the daemon. Then it ends the sessions and closes the
// stores. After an upgrade it returns ErrUpgraded, and has closed nothing: the caller ends the process.
func (d *Daemon) Run(ctx context.Context) error {
	defer d.logTo.end()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	e, err := d.edit(context.Background())
	if err != nil {
		return err
	}
	if d.net.waiting, err = waitset.New(); err != nil {
		e.release()
		return err
	}
	go d.net.waiting.Run()
	context.AfterFunc(ctx, d.net.waiting.Close)
	d.warn()
	d.changes.serving = ctx
	for _, p := range d.served.portals {
		e.accept(p)
	}
	d.accepting.Store(true)
	e.release()
	if d.group != nil {
		if err := d.group.join(); err != nil {
			d.log.Error("the target cannot join its cluster", eventKey, "cluster", "reason", err)
		}
		d.group.done.Go(d.group.followConfig)
	}
	for _, run := range d.continued {
		d.net.wg.Go(run)
	}
	d.ipsec.apply(d.served.cfg) // to sessions that continue: their keys may have changed meanwhile
	defer d.watchdog()()
	if ctx.Err() == nil {
		d.notify("READY=1", systemd.Status(d.status()))
	}
	d.attend(ctx)
	close(d.ready)
	var followed sync.WaitGroup
	followed.Go(func() { d.follow(ctx) })
	d.net.wg.Go(func() { d.watchHealth(ctx) })
	d.net.wg.Go(func() { d.logSlow(ctx) })
	d.net.wg.Go(func() {
		every(ctx, depthInterval, func() { d.depths.note(time.Now(), d.node.SessionTimes()) })
	})
	how := d.awaitEnd(ctx)
	if how.upgraded {
		return cmp.Or(d.lost, ErrUpgraded)
	}
	if d.group != nil {
		d.group.leave(context.Background()) // while sessions are there, so that initiators find the other paths
	}
	d.syncUnits()
	if how.restart {
		d.deposit()
	}
	d.stopping(0)
	d.changes.end()
	stop()
	return errors.Join(d.endChanges(&followed), d.shutDown(shutdownTime))
}

// endChanges waits until no change is in progress, and permits no other. If the file system of the
// configuration hangs, it gives up after a time limit, so that the rest of the daemon ends.
func (d *Daemon) endChanges(followed *sync.WaitGroup) error {
	ctx, cancel := context.WithTimeout(context.Background(), d.waits.changes)
	defer cancel()
	select {
	case d.changes.lock <- struct{}{}: // never released
	case <-ctx.Done():
		return fmt.Errorf("a change did not end within %v", d.waits.changes)
	}
	if err := wait(ctx, followed); err != nil {
		return fmt.Errorf("reading the configuration file did not end within %v", d.waits.changes)
	}
	if err := wait(ctx, &d.changes.cleanups); err != nil {
		return fmt.Errorf("LUNs and sessions that changes removed did not end within %v", d.waits.changes)
	}
	return nil
}

// shutDown ends the sessions within timeout and closes the stores.
func (d *Daemon) shutDown(timeout time.Duration) error {
	d.locked(d.closeListeners) // a change that hangs may still be in progress
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	err := d.node.Shutdown(ctx)
	if err == nil {
		err = wait(ctx, &d.net.wg)
	}
	if err != nil {
		err = fmt.Errorf("sessions did not end within %v: %w", timeout, err)
	}
	err = errors.Join(err, d.closeUnits(), d.ipsec.close())
	d.gate.flush()
	if err == nil {
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

// closeListeners closes the portals and the side servers.
func (d *Daemon) closeListeners() {
	for _, p := range d.served.portals {
		p.close()
	}
	for _, s := range d.side {
		s.close()
	}
}

// Logger returns the log of the daemon. Records with the attribute "event" are also events.
func (d *Daemon) Logger() *slog.Logger { return d.log }

// Supervisor returns the supervisor of this process, or nil.
func (d *Daemon) Supervisor() *handover.Supervisor { return d.supervisor }

// Successor returns, after an upgrade, the link to the process that continues, if this process is to be its
// supervisor, and nil otherwise.
func (d *Daemon) Successor() *os.File { return d.successorLink }

// Invitation returns the commands by which a new user can try the target.
func (d *Daemon) Invitation() string {
	var b strings.Builder
	addr := d.served.portals[0].l.Addr()
	name := d.served.cfg.Targets[0].Name
	l := d.served.cfg.Targets[0].LUNs[0]
	what, lost := "one memory disk", "the data and all changes are"
	if l.Backend != "memory" {
		what, lost = l.Path, "changes by commands are"
	}
	if a, ok := addr.(*net.TCPAddr); !ok || !a.IP.IsLoopback() {
		fmt.Fprintf(&b, `Serving %s at %v: %s.
Without --config %s lost when the target exits; "iser-target init" writes a file.
"iser-target connect" prints the commands for initiators.

`, name, addr, what, lost)
		return b.String()
	}
	fmt.Fprintf(&b, `Serving %s at %v: %s, for this machine only.
Without --config %s lost when the target exits; docs/config.md describes the file.

A Linux initiator on this machine, as root, over TCP:
    iscsiadm -m discovery -t st -p %v
    iscsiadm -m node -T %s -p %v --login
With libiscsi:
    iscsi-ls -s iscsi://%v
The same over RDMA: add "-I iser" to both iscsiadm lines, and use iser:// instead of
iscsi://. siw of Linux 6.1 cannot use lo: there, and from other machines, use a portal
on the address of a real interface, as README.md describes.
    modprobe siw && modprobe ib_iser && rdma link add siw0 type siw netdev lo

`, name, addr, what, lost, addr, name, addr, addr)
	return b.String()
}
