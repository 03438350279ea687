package daemon

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/gated"
	"github.com/iser-target/iser-target/backend/rbd"
	"github.com/iser-target/iser-target/cmd/iser-target/metrics"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/owner"
	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/lun/state/etcd"
)

// A group is what the daemon has to do with the cluster of its configuration. It opens the store of a shared LUN when the gateway becomes
// its owner (it is the owner.Medium), and closes it afterwards. The logical unit stays all the time, over a gated.Store, as soon as
// any gateway has noted what the medium is like.
type group struct {
	d    *Daemon
	c    config.Cluster
	home state.Lessor
	// reservations of all shared LUNs. A unit joins those of the other gateways when this one does, or later.
	reservations *lun.SharedReservations
	kept         atomic.Pointer[groupRecords] // nil: etcd has not answered yet
	opening      sync.Mutex                   // held while records are opened
	ctx          context.Context              // ends with close
	end          context.CancelFunc
	witness      *witness           // nil: it has no such process
	witnessed    context.Context    // ends with dismiss
	dismiss      context.CancelFunc // of the witness
	recorded     chan struct{}      // closed when the file of the leases is as it stays; nil: nobody writes it
	done         sync.WaitGroup
	news         chan struct{} // has room for one: owners or gateways may have changed
	moves        chan struct{} // the same, for followMoves

	telling sync.Mutex // held by tellAccess, and not acquired with mu

	mu     sync.Mutex // guards the fields below; not held during a call of a store or of the home
	gw     *owner.Gateway
	luns   map[string]*sharedLUN          // by the serial of the identity
	media  map[string]noted               // the same, also of LUNs that this gateway does not have
	own    map[string][]uint16            // tags of the portal groups that lead to each target
	others map[string][]uint16            // those of other gateways, also of absent ones
	there  map[string]map[string][]uint16 // those of the other gateways that were there at the last look, by gateway and target
	absent map[string]absentNote          // gateways that have left a short time ago
	ports  []portalNote                   // portals of this gateway
	config groupConfig
	wake   chan struct{} // closed when media have changed
}

// A noted medium is what the home has of it.
type noted struct {
	info     backend.Info
	revision state.Revision
}

// Keys of the home besides those of package owner.
const mediumKey = "media/"

const (
	// joinTime is how long the start waits for etcd.
	joinTime = 3 * time.Second
	// firstOpen is how long a change waits for the first gateway that opens a shared LUN.
	firstOpen = 15 * time.Second
	// handTime is how long a gateway that ends waits for others to take its LUNs, and handTimeLUN how much longer for each of them, divided by moves.
	handTime    = 10 * time.Second
	handTimeLUN = time.Second
	// fenceTime bounds a fence program.
	fenceTime = 30 * time.Second
)

// A sharedLUN is a LUN that gateways share.
type sharedLUN struct {
	target string
	cfg    config.LUN
	gate   lateGate

	// guarded by group.mu:
	unit   *lun.Unit
	store  *gated.Store  // of unit
	medium backend.Store // nil: not open here
	closed chan struct{} // closed when the medium before is
	server string        // the gateway that serves it, or has until a moment ago; empty: none
	since  time.Time     // when that was last so; zero: it is so
}

// A lateGate is that of an owner.Unit, as soon as there is one.
type lateGate struct{ unit atomic.Pointer[owner.Unit] }

// Admits implements gated.Gate.
func (g *lateGate) Admits() bool {
	u := g.unit.Load()
	return u != nil && u.Admits()
}

// MayAnswer implements gated.Gate.
func (g *lateGate) MayAnswer() bool {
	u := g.unit.Load()
	return u != nil && u.MayAnswer()
}

// sharedIdentity returns the identity of a LUN that gateways share, which follows from its NAA so that it is the same on all of them.
func sharedIdentity(l *config.LUN) (id state.Identity) {
	naa, _ := config.ParseNAA(l.NAA) // the configuration is valid
	if len(naa) != len(id.NAA) || naa[0]>>4 != 3 {
		sum := sha256.Sum256(naa)
		naa = sum[:len(id.NAA)]
		naa[0] = naa[0]&0x0f | 0x30
	}
	copy(id.NAA[:], naa)
	id.Serial = hex.EncodeToString(id.NAA[:])
	return id
}

// A gatewayNote is what a gateway tells the others.
type gatewayNote struct {
	Version string              `json:"version"`
	Tags    map[string][]uint16 `json:"tags"` // of the portal groups that lead to each target
	Portals []portalNote        `json:"portals,omitempty"`
	LUNs    []string            `json:"luns"` // shared ones that it has, by their NAA; nil: it is of a version that does not say
	// Absent are gateways that have left a short time ago. So one that has just come knows them as well.
	Absent map[string]absentNote `json:"absent,omitempty"`
	// Config is the revision of the targets of the cluster that run there, and ConfigReason why a newer one does not.
	Config       int64  `json:"config,omitempty"`
	ConfigReason string `json:"config_reason,omitempty"`
}

// An absentNote is what is known of a gateway that has left. Its portal groups stay for absentTime. Otherwise a gateway that restarts would change the target port
// groups of all LUNs twice, and initiators would ask for all of them again.
type absentNote struct {
	Tags  map[string][]uint16 `json:"tags"`
	Until time.Time           `json:"until"`
}

const absentTime = 10 * time.Minute

// A portalNote is a portal of a gateway, as the others announce it in discovery.
type portalNote struct {
	Listen    string   `json:"listen,omitempty"`
	Advertise []string `json:"advertise,omitempty"`
	TPGT      uint16   `json:"tpgt"`
	Protected bool     `json:"protected,omitempty"` // by IPsec
}

// openGroup connects to etcd, and adds the targets of the cluster to the configuration. It waits for an answer for a short time only.
func (d *Daemon) openGroup(cfg *config.Config) error {
	if cfg.Cluster.Name == "" {
		return nil
	}
	home, err := d.openHome(&cfg.Cluster)
	if err != nil {
		return fmt.Errorf("cluster: %w", err)
	}
	var w *witness
	if d.witness != nil {
		w = &witness{cluster: cfg.Cluster, command: d.witness, log: d.log, changed: make(chan struct{}, 1), dirty: make(chan struct{}, 1)}
		if cfg.StateDir != "" {
			w.file = filepath.Join(cfg.StateDir, LeasesFile+"."+rand.Text())
		}
		home = watchedHome{home, w}
	}
	g := &group{d: d, c: cfg.Cluster, home: home, news: make(chan struct{}, 1), moves: make(chan struct{}, 1), luns: map[string]*sharedLUN{}, media: map[string]noted{},
		others: map[string][]uint16{}, there: map[string]map[string][]uint16{}, absent: map[string]absentNote{}, wake: make(chan struct{})}
	g.reservations, err = lun.NewSharedReservations(lun.SharedOptions{Home: home, Gateway: cfg.Cluster.Name, TTL: cfg.Cluster.Lease, Limit: d.net.limits.StateTimeout.Time})
	if err != nil {
		return fmt.Errorf("cluster: %w", errors.Join(err, home.Close()))
	}
	g.ctx, g.end = context.WithCancel(context.Background())
	d.group = g
	if w != nil {
		g.witness = w
		g.witnessed, g.dismiss = context.WithCancel(context.Background())
		go w.run(g.witnessed)
		if w.file != "" {
			h := heir{cfg.StateDir, d.openHome, d.log}
			go h.inherit(g.ctx) // close does not wait for it: the file system may hang
		}
	}
	ctx, cancel := context.WithTimeout(g.ctx, joinTime)
	defer cancel()
	list, silent := home.List(ctx, mediumKey)
	if silent != nil {
		d.log.Error("etcd does not answer: shared LUNs are not ready, and the targets of the cluster are not known", eventKey, "cluster", "reason", silent)
	}
	for _, v := range list {
		g.learnMedium(v)
	}
	if err := g.openRecords(ctx); err != nil && !errors.Is(err, state.ErrUnreachable) {
		d.log.Error("settings of shared LUNs cannot be read: they are not ready", eventKey, "cluster", "reason", err)
	}
	g.done.Go(g.followMedia)
	g.done.Go(g.followRecords)
	err = g.startConfig(silent == nil)
	g.mu.Lock()
	g.own = targetTags(d.served.cfg)
	g.mu.Unlock()
	return err
}

// record begins to keep the leases of this process in the state directory.
func (g *group) record() {
	if g == nil || g.witness == nil || g.witness.file == "" {
		return
	}
	g.recorded = make(chan struct{})
	go func() {
		defer close(g.recorded)
		g.witness.record(g.witnessed)
	}()
}

// openHome returns the home of the group in etcd.
func openHome(c *config.Cluster) (state.Lessor, error) {
	o := etcd.Config{Endpoints: c.Etcd, Prefix: c.Prefix}
	if strings.HasPrefix(c.Etcd[0], "https:") {
		o.TLS = &tls.Config{MinVersion: tls.VersionTLS12}
		if f := c.TLS.CA; f != "" {
			pem, err := os.ReadFile(f)
			if err != nil {
				return nil, fmt.Errorf("tls.ca: %w", err)
			}
			if o.TLS.RootCAs = x509.NewCertPool(); !o.TLS.RootCAs.AppendCertsFromPEM(pem) {
				return nil, fmt.Errorf("tls.ca: %s has no certificate in PEM", f)
			}
		}
		if c.TLS.Cert != "" {
			cert, err := tls.LoadX509KeyPair(c.TLS.Cert, c.TLS.Key)
			if err != nil {
				return nil, fmt.Errorf("tls.cert: %w", err)
			}
			o.TLS.Certificates = []tls.Certificate{cert}
		}
	}
	return etcd.Open(o)
}

// followMedia learns what media are like, until the group is closed.
func (g *group) followMedia() {
	for g.ctx.Err() == nil {
		ctx, cancel := context.WithCancel(g.ctx)
		values, err := g.home.Watch(ctx, mediumKey)
		if err == nil {
			var list []state.Value
			if list, err = g.home.List(ctx, mediumKey); err == nil {
				for _, v := range list {
					g.learnMedium(v)
				}
				for v := range values {
					g.learnMedium(v)
				}
			}
		}
		cancel()
		select {
		case <-g.ctx.Done():
		case <-time.After(time.Second):
		}
	}
}

// learnMedium notes what a medium is like, and adopts its size where it is not open.
func (g *group) learnMedium(v state.Value) {
	var info backend.Info
	serial := strings.TrimPrefix(v.Key, mediumKey)
	if v.Data == nil {
		g.unlearnMedium(serial)
		return
	}
	if json.Unmarshal(v.Data, &info) != nil || info.Validate() != nil {
		return
	}
	g.mu.Lock()
	if v.Revision <= g.media[serial].revision {
		g.mu.Unlock()
		return
	}
	g.media[serial] = noted{info, v.Revision}
	close(g.wake)
	g.wake = make(chan struct{})
	l := g.luns[serial]
	var unit *lun.Unit
	if l != nil && l.store != nil && l.medium == nil {
		l.store.SetSize(info.Size)
		unit = l.unit
	}
	g.mu.Unlock()
	if unit != nil {
		unit.AdoptSize()
	}
}

var errNotOpened = errors.New("no gateway of the cluster has opened the medium yet")

var errNotJoined = errors.New("the target is in no cluster before its next start, so that the LUN is not ready")

// openShared makes the logical unit of a shared LUN. It waits until a gateway has opened its medium for the first time, if this one has
// joined the others.
func (g *group) openShared(target string, c *config.LUN, isAbandoned func() bool) (*lun.Unit, error) {
	if g == nil {
		return nil, errNotJoined
	}
	id := sharedIdentity(c)
	g.mu.Lock()
	l := g.luns[id.Serial]
	if l == nil {
		l = &sharedLUN{target: target, cfg: *c, closed: make(chan struct{})}
		close(l.closed)
		g.luns[id.Serial] = l
		if err := g.add(id.Serial, l); err != nil {
			delete(g.luns, id.Serial)
			g.mu.Unlock()
			return nil, err
		}
	}
	for end := time.Now().Add(firstOpen); ; {
		medium, known := g.media[id.Serial]
		kept := g.kept.Load()
		if known && kept.usable() {
			unit, err := g.makeUnit(l, medium.info, id)
			joined := g.gw != nil
			g.mu.Unlock()
			if err == nil && joined {
				g.joinReservations(unit)
			}
			g.nudge()
			return unit, err
		}
		wake, joined := g.wake, g.gw != nil
		g.mu.Unlock()
		if left := time.Until(end); !joined || left <= 0 {
			return nil, cmp.Or(kept.reason(), errNotOpened)
		}
		select {
		case <-wake:
		case <-time.After(100 * time.Millisecond):
			if isAbandoned() {
				return nil, errAbandoned
			}
		case <-g.ctx.Done():
			return nil, errNotOpened
		}
		g.mu.Lock()
	}
}

// joinReservations makes a unit take part in the reservations of the other gateways. It waits for a moment only: the unit tries further.
func (g *group) joinReservations(units ...*lun.Unit) {
	ctx, cancel := context.WithTimeout(g.ctx, joinTime)
	defer cancel()
	var wg sync.WaitGroup
	for _, u := range units {
		wg.Go(func() {
			if err := u.JoinShared(ctx); err != nil {
				g.d.log.Warn("reservations of a shared LUN are out of reach, and commands are BUSY", eventKey, "cluster", "naa", u.Identity().Serial, "reason", err)
			}
		})
	}
	wg.Wait()
}

// makeUnit makes the logical unit of l. g.mu is held.
func (g *group) makeUnit(l *sharedLUN, info backend.Info, id state.Identity) (*lun.Unit, error) {
	store := gated.New(info, &l.gate)
	unit, err := g.d.newUnit(store, &l.cfg, id)
	if err != nil {
		return nil, err
	}
	states, settles := g.access(id.Serial, l)
	unit.SetAccess(states, settles)
	if l.medium != nil {
		if err := unit.ResumeSanitize(g.ctx); err != nil { // it does not wait: the unit is new
			return nil, err
		}
		if err := store.Adopt(l.medium); err != nil {
			return nil, err
		}
	}
	l.unit, l.store = unit, store
	return unit, nil
}

// add gives the gateway a part in l. g.mu is held.
func (g *group) add(serial string, l *sharedLUN) error {
	if g.gw == nil {
		return nil // join does it
	}
	u, err := g.gw.Add(serial)
	if err == nil {
		l.gate.unit.Store(u)
	}
	return err
}

// forget ends the part of the gateway in a LUN, after others have taken it over if they can.
func (g *group) forget(ctx context.Context, c *config.LUN) error {
	if g == nil {
		return nil
	}
	serial := sharedIdentity(c).Serial
	g.mu.Lock()
	gw, l := g.gw, g.luns[serial]
	g.mu.Unlock()
	if l == nil {
		return nil
	}
	var err error
	if gw != nil {
		err = gw.Remove(ctx, serial)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if err == nil && g.luns[serial] == l {
		delete(g.luns, serial)
	}
	return err
}

// join makes the gateway known to the others, and begins to claim LUNs.
func (g *group) join() error {
	g.mu.Lock()
	var units []*lun.Unit
	for _, l := range g.luns {
		if l.unit != nil {
			units = append(units, l.unit)
		}
	}
	g.mu.Unlock()
	g.joinReservations(units...)
	g.mu.Lock()
	defer g.mu.Unlock()
	gw, err := owner.Join(owner.Options{
		Name: g.c.Name, Home: g.home, Medium: g, TTL: g.c.Lease, Failback: cmp.Or(g.c.Failback, time.Millisecond), Moves: moves(), Note: g.note(),
		News: g.nudge, Changed: g.changed,
	})
	if err != nil {
		return fmt.Errorf("cluster: %w", err)
	}
	g.gw = gw
	for serial, l := range g.luns {
		if err := g.add(serial, l); err != nil {
			return err
		}
	}
	g.done.Go(g.follow)
	g.done.Go(g.followMoves)
	return nil
}

// note returns what this gateway tells the others. g.mu is held.
func (g *group) note() json.RawMessage {
	n := gatewayNote{
		Version: g.d.version, Tags: g.own, Portals: g.ports, LUNs: slices.AppendSeq([]string{}, maps.Keys(g.luns)), Absent: g.absent,
		Config: g.config.running, ConfigReason: g.config.reason,
	}
	slices.Sort(n.LUNs)
	text, err := json.Marshal(n)
	if err != nil {
		panic(err) // cannot happen: strings and numbers
	}
	return text
}

// targetTags returns the tags of the portal groups that lead to each target.
func targetTags(cfg *config.Config) map[string][]uint16 {
	tags := map[string][]uint16{}
	for i := range cfg.Targets {
		tags[cfg.Targets[i].Name] = cfg.TPGTs(&cfg.Targets[i])
	}
	return tags
}

// leave hands the LUNs over to the other gateways, as far as they take them within the time, and leaves the group. join may follow.
func (g *group) leave(ctx context.Context) {
	g.mu.Lock()
	gw := g.gw
	g.mu.Unlock()
	if gw == nil {
		return
	}
	had := g.serves()
	ctx, cancel := context.WithTimeout(ctx, g.leaveTime())
	defer cancel()
	if err := gw.Drain(ctx); err != nil {
		g.d.log.Warn("LUNs are not handed over", eventKey, "cluster", "reason", err)
	}
	if had > 0 && len(gw.Members()) > 1 {
		g.sendAway(ctx, gw)
	}
	gw.Close()
	g.mu.Lock()
	g.gw = nil
	for _, l := range g.luns {
		l.gate.unit.Store(nil)
		if l.store != nil {
			l.store.SetAway(true) // commands do not wait here
		}
	}
	g.mu.Unlock()
	g.nudge()
}

// leaveTime bounds how long leave takes.
func (g *group) leaveTime() time.Duration {
	return handTime + time.Duration(g.serves())*handTimeLUN/time.Duration(moves())
}

// moves returns how many LUNs the gateway gives to others at a time. To open a store keeps a CPU busy, on others that have as many.
func moves() int { return min(runtime.GOMAXPROCS(0), 4) }

// serves returns how many LUNs this gateway serves.
func (g *group) serves() (n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, l := range g.luns {
		if l.gate.Admits() {
			n++
		}
	}
	return n
}

// sendAway waits until other gateways serve all LUNs, and gives the initiators a moment to find out while they still have this path: one
// that is cut while it has commands costs them seconds.
func (g *group) sendAway(ctx context.Context, gw *owner.Gateway) {
	taken, cancel := context.WithTimeout(ctx, handTime/4)
	defer cancel()
	for {
		g.mu.Lock()
		waits := 0
		for serial := range g.luns {
			if gw.Server(serial) == "" {
				waits++
			}
		}
		g.mu.Unlock()
		if waits == 0 || !sleepFor(taken, 20*time.Millisecond) {
			break
		}
	}
	if g.d.sessions() > 0 {
		sleepFor(ctx, partingTime)
	}
}

// partingTime is what initiators have to use another path. multipathd looks at all paths once a second, as docs/cluster.md recommends, and sorts
// them one disk after the other. A path that is cut before it is sorted out delays the disk until the initiator gives the session up.
const partingTime = 3 * time.Second

// sleepFor waits, and reports false if ctx ends first.
func sleepFor(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// close ends the group, after leave.
func (g *group) close() error {
	g.end()
	g.done.Wait()
	g.reservations.Close()
	if g.witness != nil {
		g.dismiss()
	}
	if g.recorded != nil {
		select {
		case <-g.recorded:
		case <-time.After(time.Second): // the file system hangs
		}
	}
	err := g.home.Close()
	return errors.Join(err, g.kept.Load().close()) // after that: no change is under way any longer
}

// nudge wakes follow and followMoves. It does not wait.
func (g *group) nudge() {
	for _, c := range [...]chan struct{}{g.news, g.moves} {
		select {
		case c <- struct{}{}:
		default:
		}
	}
}

// changed implements owner.Options.Changed.
func (g *group) changed(serial string, serves bool, reason error) {
	g.mu.Lock()
	l := g.luns[serial]
	g.mu.Unlock()
	if l == nil {
		return
	}
	g.tellAccess(serial, l) // before the others know: an initiator whose path they end tries this one next
	g.nudge()
	log := g.d.log.With(eventKey, "cluster", "target", l.target, "lun", l.cfg.ID)
	switch {
	case serves:
		log.Info("shared LUN is served here")
	case reason != nil:
		log.Error("shared LUN is not served here", "reason", reason)
	default:
		log.Info("shared LUN is not served here any longer")
	}
}

// followMoves notifies the initiators through which target ports the LUNs are served, whenever that has changed, until the group is closed. Unlike
// follow it does not wait for a change of the configuration.
func (g *group) followMoves() {
	tick := time.NewTicker(time.Second) // the lease may be late
	defer tick.Stop()
	for {
		select {
		case <-g.ctx.Done():
			return
		case <-g.moves:
		case <-tick.C:
		}
		g.mu.Lock()
		left := g.gw == nil
		g.mu.Unlock()
		if left {
			return
		}
		g.tellAccesses()
	}
}

// follow notifies the other gateways of what leads to this one, and the initiators of what leads to the others, whenever that has changed, until the group is closed.
func (g *group) follow() {
	told, tick := "", time.NewTicker(time.Second) // the configuration may have changed
	defer tick.Stop()
	for {
		select {
		case <-g.ctx.Done():
			return
		case <-g.news:
		case <-tick.C:
		}
		var own map[string][]uint16
		var ports []portalNote
		shared := map[string]bool{} // targets
		g.d.locked(func() {
			cfg := g.d.served.cfg
			own, ports = targetTags(cfg), portalNotes(g.d.served.portals)
			for i := range cfg.Targets {
				shared[cfg.Targets[i].Name] = slices.ContainsFunc(cfg.Targets[i].LUNs, func(l config.LUN) bool { return l.Shared })
			}
		})
		g.mu.Lock()
		if g.gw == nil {
			g.mu.Unlock()
			return
		}
		g.own, g.ports = own, ports
		gw := g.gw
		gw.SetNote(g.note())
		conflict := g.learnTags(g.gw.Members(), time.Now())
		g.mu.Unlock()
		if conflict != told && conflict != "" {
			g.d.log.Error("gateways share portal groups", eventKey, "cluster", "reason", conflict)
		}
		told = conflict
		g.d.node.SetPeers(g.peers(gw, shared))
		g.d.locked(func() {
			for _, t := range g.d.served.targets {
				if c := targetOf(g.d.served.cfg, t.name); c != nil {
					g.d.setPorts(t, g.d.served.cfg.TPGTs(c))
				}
			}
		})
		g.tellAccesses()
	}
}

// tellAccesses does what tellAccess does for all LUNs.
func (g *group) tellAccesses() {
	g.mu.Lock()
	luns := maps.Clone(g.luns)
	g.mu.Unlock()
	for serial, l := range luns {
		g.tellAccess(serial, l)
	}
}

// tellAccess notifies the initiators through which target ports l is served, if that has changed, and the commands that wait for its store.
func (g *group) tellAccess(serial string, l *sharedLUN) {
	g.telling.Lock()
	defer g.telling.Unlock()
	g.mu.Lock()
	gw, unit, store := g.gw, l.unit, l.store
	if gw == nil || unit == nil {
		g.mu.Unlock()
		return
	}
	states, settles := g.access(serial, l)
	server := gw.Server(serial)
	g.mu.Unlock()
	unit.SetAccess(states, settles)
	g.mu.Lock() // after that, so that commands that wait learn the state
	defer g.mu.Unlock()
	if g.gw == gw {
		store.SetAway(server != "" && server != g.c.Name)
	}
}

// learnTags notes the portal groups of the other gateways, of which members are there. It returns what is wrong with them, or "". g.mu is held.
func (g *group) learnTags(members []owner.Member, now time.Time) (conflict string) {
	clear(g.others)
	before := g.there
	g.there = map[string]map[string][]uint16{}
	for _, m := range members {
		if m.Name == g.c.Name {
			continue
		}
		n := noteOf(m)
		g.there[m.Name] = n.Tags
		for target, tags := range n.Tags {
			for _, tag := range tags {
				if slices.Contains(g.own[target], tag) {
					conflict = fmt.Sprintf("portal group %d of %s is one of gateway %s, too. Give the portals of each gateway tags of their own (tpgt)", tag, target, m.Name)
				}
			}
			g.others[target] = append(g.others[target], tags...)
		}
		for name, a := range n.Absent {
			if a.Until.After(g.absent[name].Until) {
				g.absent[name] = a
			}
		}
	}
	for name, tags := range before {
		if _, there := g.there[name]; !there {
			g.absent[name] = absentNote{tags, now.Add(absentTime)}
		}
	}
	for name, a := range g.absent {
		if _, there := g.there[name]; there || name == g.c.Name || now.After(a.Until) {
			delete(g.absent, name)
			continue
		}
		for target, tags := range a.Tags {
			g.others[target] = append(g.others[target], tags...)
		}
	}
	return conflict
}

// noteOf returns what a gateway tells. One of another version tells nothing that this one knows.
func noteOf(m owner.Member) (n gatewayNote) {
	if json.Unmarshal(m.Note, &n) != nil {
		return gatewayNote{}
	}
	return n
}

// portalNotes describes portals to the other gateways.
func portalNotes(list []*portal) (notes []portalNote) {
	for _, p := range list {
		c := p.cur.Load().PortalConfig
		n := portalNote{Listen: c.Listen, TPGT: c.TPGT, Protected: c.Protected}
		if len(c.Advertise) > 0 {
			n.Listen, n.Advertise = "", c.Advertise
		}
		notes = append(notes, n)
	}
	return notes
}

// peers returns the portals of the other gateways that lead to the targets in shared, which have LUNs that gateways share.
func (g *group) peers(gw *owner.Gateway, shared map[string]bool) map[string][]iscsi.PortalConfig {
	peers := map[string][]iscsi.PortalConfig{}
	for _, m := range gw.Members() {
		if m.Name == g.c.Name {
			continue
		}
		n := noteOf(m)
		for target, tags := range n.Tags {
			for _, p := range n.Portals {
				if shared[target] && slices.Contains(tags, p.TPGT) {
					peers[target] = append(peers[target], iscsi.PortalConfig{Listen: p.Listen, Advertise: p.Advertise, TPGT: p.TPGT, Protected: p.Protected})
				}
			}
		}
	}
	return peers
}

// setPorts makes the inventory of t know all portal groups that lead to it, and those of other gateways that lead to its shared LUNs.
func (d *Daemon) setPorts(t *servedTarget, own []uint16) {
	var others []uint16
	if g := d.group; g != nil {
		g.mu.Lock()
		others = slices.Clone(g.others[t.name])
		g.mu.Unlock()
	}
	t.inventory.SetPorts(own, others)
}

// access returns the states of all portal groups that lead to l. While nobody serves it, they stay as they were for a moment, until settles: then commands
// wait in the store, and initiators need not ask again and again. g.mu is held.
func (g *group) access(serial string, l *sharedLUN) (states map[uint16]lun.AccessState, settles time.Time) {
	server := ""
	if l.gate.Admits() {
		server = g.c.Name // which the others learn next
	} else if g.gw != nil {
		if server = g.gw.Server(serial); server == g.c.Name {
			server = ""
		}
	}
	switch {
	case server != "":
		l.server, l.since = server, time.Time{}
	case l.since.IsZero():
		l.since = time.Now()
		settles = l.since.Add(patience)
	case time.Since(l.since) > patience:
		l.server = ""
	default:
		settles = l.since.Add(patience)
	}
	states = map[uint16]lun.AccessState{}
	note := func(gateway string, tags []uint16) {
		at := lun.Transitioning
		switch l.server {
		case "":
		case gateway:
			at = lun.ActiveOptimized
		default:
			at = lun.Standby
		}
		for _, tag := range tags {
			states[tag] = at
		}
	}
	for name, a := range g.absent { // first: another gateway may have the tag by now
		note(name, a.Tags[l.target])
	}
	for name, tags := range g.there {
		note(name, tags[l.target])
	}
	note(g.c.Name, g.own[l.target])
	return states, settles
}

// patience is how long the states of portal groups stay as they were while nobody serves a LUN.
const patience = 3 * time.Second

// find returns a LUN of the group.
func (g *group) find(serial string) (*sharedLUN, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	l := g.luns[serial]
	if l == nil {
		return nil, fmt.Errorf("LUN %s: %w", serial, ErrNotFound)
	}
	return l, nil
}

// boundBy calls f, and stops waiting for it when ctx ends; late is called then when f is back.
func boundBy(ctx context.Context, f func() error, late func(error)) error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		go func() { late(<-done) }()
		return context.Cause(ctx)
	}
}

// Fence implements owner.Medium.
func (g *group) Fence(ctx context.Context, serial, gateway, address string) error {
	l, err := g.find(serial)
	if err != nil {
		return err
	}
	g.d.log.Warn("the last opening of a shared LUN is fenced", eventKey, "cluster", "target", l.target, "lun", l.cfg.ID, "gateway", gateway, "client", address)
	switch {
	case l.cfg.Backend == "rbd":
		return rbd.Fence(ctx, l.cfg.Path, address)
	case gateway == g.c.Name: // the process before is gone, and so is the connection
		return nil
	}
	return g.runFence(ctx, l, gateway)
}

// runFence runs the fence program.
func (g *group) runFence(ctx context.Context, l *sharedLUN, gateway string) error {
	ctx, cancel := context.WithTimeout(ctx, fenceTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, g.c.FenceProgram, l.cfg.Path, gateway)
	cmd.Env = rbd.Environment()
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	text := strings.TrimSpace(string(out))
	text = text[strings.LastIndexByte(text, '\n')+1:]
	return fmt.Errorf("fence_program %s: %w: %.300s", g.c.FenceProgram, err, text)
}

// An addressed store knows how a later owner can fence it.
type addressed interface {
	Address(ctx context.Context) (string, error)
}

// Address implements owner.Medium.
func (g *group) Address(ctx context.Context, serial string) (string, error) {
	l, err := g.find(serial)
	if err != nil {
		return "", err
	}
	g.mu.Lock()
	medium := l.medium
	g.mu.Unlock()
	if a, ok := medium.(addressed); ok {
		return a.Address(ctx)
	}
	return "", nil
}

// Open implements owner.Medium.
func (g *group) Open(ctx context.Context, serial string) error {
	l, err := g.find(serial)
	if err != nil {
		return err
	}
	g.mu.Lock()
	closed := l.closed
	g.mu.Unlock()
	select {
	case <-closed:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	learned := make(chan error, 1)
	go func() { learned <- g.learnSanitize(ctx, serial) }()
	var medium backend.Store
	err = boundBy(ctx, func() (err error) {
		if l.cfg.Backend == "rbd" && l.cfg.Size > 0 && !l.cfg.ReadOnly {
			if _, err := rbd.Create(l.cfg.Path, int64(l.cfg.Size)); err != nil {
				return err
			}
		}
		medium, err = g.d.openStore(&l.cfg)
		return err
	}, func(err error) {
		if err == nil {
			medium.Close()
		}
	})
	if err != nil {
		return err
	}
	if err = <-learned; err == nil {
		err = g.noteMedium(ctx, serial, medium.Info())
	}
	if err == nil {
		err = g.adopt(ctx, serial, l, medium)
	}
	if err != nil {
		return errors.Join(err, boundBy(ctx, medium.Close, func(error) {}))
	}
	return nil
}

// learnSanitize asks the home whether a sanitize of the LUN has to continue. No other gateway can change that any longer.
func (g *group) learnSanitize(ctx context.Context, serial string) error {
	if err := g.openRecords(ctx); err != nil {
		return err
	}
	return g.records().sanitizations.Refresh(ctx, serial)
}

// adopt puts an open medium below the unit, if there is one already.
func (g *group) adopt(ctx context.Context, serial string, l *sharedLUN, medium backend.Store) error {
	var unit *lun.Unit
	for {
		g.mu.Lock()
		if l.unit == unit { // it knows already whether a sanitize has to continue
			break
		}
		unit = l.unit
		if _, ok, _ := g.records().sanitizations.Get(serial); ok {
			l.store.SetAway(true) // commands that wait for the medium would keep the sanitize from it
		}
		g.mu.Unlock()
		if err := unit.ResumeSanitize(ctx); err != nil {
			return err
		}
	}
	if unit != nil {
		if err := l.store.Adopt(medium); err != nil {
			g.mu.Unlock()
			unit.Moved()
			return err
		}
	}
	l.medium = medium
	g.mu.Unlock()
	if unit != nil {
		unit.AdoptSize()
		return nil
	}
	g.d.locked(func() { // the next tick opens it
		if t := g.d.served.target(l.target); t != nil && t.luns[l.cfg.ID] != nil {
			t.luns[l.cfg.ID].retryAt = time.Time{}
		}
	})
	return nil
}

// noteMedium puts what a medium is like where all gateways learn it, if that is news.
func (g *group) noteMedium(ctx context.Context, serial string, info backend.Info) error {
	g.mu.Lock()
	was := g.media[serial]
	g.mu.Unlock()
	if was.info == info {
		return nil
	}
	data, err := json.Marshal(info)
	if err != nil {
		return err
	}
	for {
		v, err := g.home.Get(ctx, mediumKey+serial)
		if err != nil {
			return err
		}
		revision, err := g.home.Put(ctx, mediumKey+serial, data, v.Revision)
		if errors.Is(err, state.ErrConflict) {
			continue // of an owner that was too late
		}
		if err == nil {
			g.learnMedium(state.Value{Key: mediumKey + serial, Data: data, Revision: revision})
		}
		return err
	}
}

// Close implements owner.Medium.
func (g *group) Close(ctx context.Context, serial string) error {
	l, err := g.find(serial)
	if err != nil {
		return err
	}
	g.mu.Lock()
	medium, store, unit := l.medium, l.store, l.unit
	closed := make(chan struct{})
	l.medium, l.closed = nil, closed
	g.mu.Unlock()
	if medium == nil {
		close(closed)
		return nil
	}
	return boundBy(ctx, func() error {
		defer close(closed)
		if unit == nil {
			return medium.Close()
		}
		if unit.Moved() {
			store.SetAway(true) // so that it does not wait for this medium or the next one
		}
		err := store.Release()
		unit.AdoptSize() // what is known is that of the medium when it was closed
		return err
	}, func(err error) {
		if err != nil {
			g.d.log.Warn(lateAnswer, "target", l.target, "lun", l.cfg.ID, "reason", err)
		}
	})
}

// lost makes the group open the store of a shared LUN again, which has failed.
func (g *group) lost(c *config.LUN) {
	g.mu.Lock()
	l := g.luns[sharedIdentity(c).Serial]
	g.mu.Unlock()
	if l != nil {
		if u := l.gate.unit.Load(); u != nil {
			u.Reopen()
		}
	}
}

// ErrCluster refuses what the cluster of the target does not permit.
var ErrCluster = errors.New("not possible in a cluster")

var errNoCluster = clusterError("the target is in no cluster. Set cluster.name and cluster.etcd in its configuration file, and start it again")

// A clusterError is an ErrCluster.
type clusterError string

func (e clusterError) Error() string { return string(e) }

func (clusterError) Is(target error) bool { return target == ErrCluster }

// gateway returns the gateway of the group, or an error with the reason why that is not possible.
func (d *Daemon) gateway() (*group, *owner.Gateway, error) {
	g := d.group
	if g == nil {
		return nil, nil, errNoCluster
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.gw == nil {
		return nil, nil, clusterError("the target has left its cluster, or has not joined it yet")
	}
	return g, g.gw, nil
}

// Cluster returns the state of the group that the target is in.
func (d *Daemon) Cluster() (*schema.ClusterState, error) {
	g, gw, err := d.gateway()
	if err != nil {
		return nil, err
	}
	st := &schema.ClusterState{Name: g.c.Name, Gateways: []schema.GatewayState{}, LUNs: []schema.SharedLUNState{}}
	if err := gw.Err(); err != nil {
		st.Reason = err.Error()
	}
	owns, has := map[string]int{}, map[string]bool{}
	g.mu.Lock()
	st.Config = max(g.config.newest, g.config.running)
	st.Conflict = g.learnTags(gw.Members(), time.Now())
	for _, serial := range slices.Sorted(maps.Keys(g.luns)) {
		l := g.luns[serial]
		s := schema.SharedLUNState{Target: l.target, ID: l.cfg.ID, NAA: serial, Owner: gw.Owner(serial), Favorite: gw.Favorite(serial), Preferred: gw.Preferred(serial), Here: l.gate.Admits()}
		owns[s.Owner]++
		has[serial] = true
		st.LUNs = append(st.LUNs, s)
	}
	g.mu.Unlock()
	slices.SortFunc(st.LUNs, func(a, b schema.SharedLUNState) int {
		return cmp.Or(strings.Compare(a.Target, b.Target), cmp.Compare(a.ID, b.ID))
	})
	for _, m := range gw.Members() {
		n := noteOf(m)
		unable := 0
		for _, serial := range m.Unable { // perhaps of a LUN that nobody has any longer
			if has[serial] {
				unable++
			}
		}
		st.Gateways = append(st.Gateways, schema.GatewayState{Name: m.Name, Version: n.Version, Draining: m.Draining, LUNs: owns[m.Name], Unable: unable, Config: n.Config, ConfigReason: n.ConfigReason})
	}
	return st, nil
}

// HandOver makes another gateway the owner of a shared LUN, now and whenever it is there; "": the one that the name of the LUN gives.
func (d *Daemon) HandOver(ctx context.Context, target string, id int, to string) error {
	g, gw, err := d.gateway()
	if err != nil {
		return err
	}
	l, err := d.lun(target, id)
	if err != nil {
		return err
	}
	if !l.Shared {
		return clusterError(fmt.Sprintf("LUN %d of %s is not shared: it has no other gateway", id, target))
	}
	if to != "" && !slices.ContainsFunc(gw.Members(), func(m owner.Member) bool { return m.Name == to }) {
		return clusterError(fmt.Sprintf("gateway %q is not there: see iser-target cluster status", to))
	}
	if err := gw.Prefer(ctx, sharedIdentity(&l.LUN).Serial, to); err != nil {
		return err
	}
	g.d.log.InfoContext(ctx, "shared LUN has another preference", eventKey, "cluster", "target", target, "lun", id, "gateway", to)
	return nil
}

// Balance spreads the shared LUNs evenly over the gateways, and returns the moves, which it does not wait for. With dryRun it makes none.
func (d *Daemon) Balance(ctx context.Context, dryRun bool) ([]schema.ClusterMove, error) {
	g, gw, err := d.gateway()
	if err != nil {
		return nil, err
	}
	moves := []schema.ClusterMove{}
	for _, m := range gw.Balance() {
		move := schema.ClusterMove{NAA: m.LUN, From: m.From, To: m.To}
		if l, err := g.find(m.LUN); err == nil {
			move.Target, move.ID = l.target, l.cfg.ID
		}
		if !dryRun {
			if err := gw.Prefer(ctx, m.LUN, m.To); err != nil {
				return moves, err
			}
		}
		moves = append(moves, move)
	}
	return moves, nil
}

// clusterMetrics returns the numbers of the metrics of the group, or nil without one.
func (d *Daemon) clusterMetrics() *metrics.Cluster {
	g := d.group
	if g == nil {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	n := &metrics.Cluster{Joined: g.gw != nil && g.gw.Err() == nil, Current: g.config.reason == ""}
	if g.gw != nil {
		n.Gateways = len(g.gw.Members())
	}
	for serial, l := range g.luns {
		s := metrics.SharedLUN{Target: l.target, ID: l.cfg.ID, Here: l.gate.Admits()}
		s.Served = s.Here || g.gw != nil && g.gw.Server(serial) != ""
		n.LUNs = append(n.LUNs, s)
	}
	return n
}
