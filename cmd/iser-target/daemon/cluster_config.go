package daemon

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/lun/state"
)

// The targets that all gateways of a cluster have are one text in etcd: the shared part of the running document. A change of such a target
// replaces the text, if it is still the one that runs here, before its steps. Each gateway follows the text, and makes it its own by a change.

const (
	// configKey is the key of the text in the home.
	configKey = "config"
	// configRetry is the time until the daemon tries again to apply a text. It doubles up to maxConfigRetry.
	configRetry    = 3 * time.Second
	maxConfigRetry = time.Minute
	// noTargets is the text of a cluster that keeps no targets.
	noTargets = "targets: []\n"
	// maxConfigReason bounds the reason that other gateways learn, in bytes.
	maxConfigReason = 300
)

// A groupConfig is what a gateway knows of the targets of its cluster. group.mu guards it.
type groupConfig struct {
	running int64            // revision of the text that runs here; 0: etcd has none, or has not answered
	newest  int64            // of the text that etcd had when it was read last
	reason  string           // why the newest does not run here; empty: it does
	refused *config.Document // the newest, if it does not fit to the file of this gateway; else nil
}

var (
	// ErrStale answers a change of the targets of the cluster that another gateway has changed at the same time.
	ErrStale = errors.New("the targets of the cluster were changed through another gateway at the same time")
	// errCurrent ends a change to the text that runs already.
	errCurrent = errors.New("it runs already")
)

// configSource returns the name of the text in errors.
func (g *group) configSource() string {
	return "etcd " + g.c.Etcd[0] + ": " + strings.TrimPrefix(strings.TrimRight(g.c.Prefix, "/"), "/") + "/" + configKey
}

// readConfig returns the text that etcd has.
func (g *group) readConfig(ctx context.Context) (state.Value, error) {
	ctx, cancel := context.WithTimeout(ctx, joinTime)
	defer cancel()
	v, err := g.home.Get(ctx, configKey)
	if err != nil {
		return v, fmt.Errorf("targets of the cluster: %w", err)
	}
	return v, nil
}

// parseConfig returns the shared part that v is. was is the one that runs, or nil.
func (g *group) parseConfig(v state.Value, was *config.Document) (*config.Document, error) {
	text := v.Data
	if text == nil {
		if was != nil && was.SharedTargets() > 0 { // somebody has removed the key, or etcd has lost it
			return nil, fmt.Errorf("%s: etcd has no targets of the cluster any longer. Those that run stay. Store them again with cluster config show and cluster config apply", g.configSource())
		}
		text = []byte(noTargets)
	}
	return config.NewShared(g.configSource(), text, int64(v.Revision))
}

// startConfig adds the targets of the cluster to the configuration of the start: those that the process before had, or else those that
// etcd has, if it answers. If neither can be had, the target starts with those of its file.
func (g *group) startConfig(answers bool) error {
	d := g.d
	v, given := state.Value{}, false
	if r := d.received; r != nil && r.Cluster != nil { // its sessions use these targets
		v, given = state.Value{Data: []byte(r.Cluster.Text), Revision: state.Revision(r.Cluster.Revision)}, true
	} else if answers {
		var err error
		if v, err = g.readConfig(g.ctx); err != nil {
			d.log.Error("etcd does not answer: the targets of the cluster are not known", eventKey, "cluster", "reason", err)
			return nil
		}
	} else {
		return nil
	}
	shared, err := g.parseConfig(v, nil)
	var cfg *config.Config
	next := d.served.doc.Clone()
	if err == nil {
		next.SetShared(shared)
		cfg, err = next.Config()
	}
	switch {
	case err != nil && given && !d.received.Kept:
		return err
	case err != nil:
		g.noteConfig(v, shared, err)
		return nil
	}
	d.locked(func() { d.served.doc, d.served.cfg = next, cfg })
	g.runs(next)
	return nil
}

// runs notes that a document runs. g may be nil.
func (g *group) runs(doc *config.Document) {
	s := doc.Shared()
	if g == nil || s == nil {
		return
	}
	g.mu.Lock()
	c := &g.config
	if c.running = s.Revision(); c.running >= c.newest || c.running == 0 {
		*c = groupConfig{running: c.running, newest: c.running}
	}
	g.mu.Unlock()
	g.nudge()
}

// noteConfig notes, and logs, why a text does not run here.
func (g *group) noteConfig(v state.Value, shared *config.Document, reason error) {
	text := strings.ReplaceAll(reason.Error(), "\n", "; ")
	if len(text) > maxConfigReason {
		text = strings.ToValidUTF8(text[:maxConfigReason], "") + "..."
	}
	g.mu.Lock()
	c := &g.config
	news := c.reason != text || c.newest != int64(v.Revision)
	c.newest, c.reason, c.refused = int64(v.Revision), text, nil
	if _, wrong := errors.AsType[*config.Error](reason); wrong {
		c.refused = shared
	}
	g.mu.Unlock()
	if news {
		g.d.log.Error("targets of the cluster are not applied", eventKey, "cluster", "revision", int64(v.Revision), "reason", reason)
		g.nudge()
	}
}

// followConfig makes the targets of the cluster those of this gateway whenever they have changed, until the group is closed.
func (g *group) followConfig() {
	for g.ctx.Err() == nil {
		ctx, cancel := context.WithCancel(g.ctx)
		if values, err := g.home.Watch(ctx, configKey); err == nil {
			g.takeConfigs(values)
		}
		cancel()
		sleepFor(g.ctx, time.Second)
	}
}

// takeConfigs applies the text whenever values has news of it, until values or the group ends. It tries again what fails.
func (g *group) takeConfigs(values <-chan state.Value) {
	for wait := configRetry; ; {
		var again <-chan time.Time
		switch err := g.takeConfig(); {
		case err == nil:
		case errors.Is(err, state.ErrUnreachable):
			again = time.After(configRetry)
		default: // an attempt may have reopened LUNs, so others come later and later
			again = time.After(wait)
			wait = min(2*wait, maxConfigRetry)
		}
		select {
		case <-g.ctx.Done():
			return
		case _, ok := <-values:
			if !ok {
				return
			}
			wait = configRetry
		case <-again:
		}
	}
}

// takeConfig applies the text that etcd has.
func (g *group) takeConfig() error {
	ctx, cancel := context.WithTimeout(By(g.ctx, "targets of the cluster"), reloadWait)
	defer cancel()
	return g.d.takeShared(ctx)
}

// takeShared makes the text that etcd has a part of the running document, if it is not yet. It may disturb sessions, because that was
// decided where the text was changed. Errors other than the silence of etcd are noted for the other gateways.
func (d *Daemon) takeShared(ctx context.Context) error {
	g := d.group
	v, err := g.readConfig(ctx) // before the turn: a silent etcd keeps no change waiting
	if err != nil {
		return err
	}
	if s := d.Document().Shared(); s != nil && s.Revision() == int64(v.Revision) {
		g.runs(d.Document()) // an earlier text may have been refused
		return nil
	}
	var shared *config.Document
	_, err = d.changeOnce(ctx, ChangeOptions{Disrupt: true, AllowShrink: true, follow: true}, fromCluster, func() (_ *config.Document, err error) {
		if v, err = g.readConfig(ctx); err != nil {
			return nil, err
		}
		next := d.Document()
		was := next.Shared()
		if was != nil && was.Revision() == int64(v.Revision) {
			return nil, errCurrent
		}
		if shared, err = g.parseConfig(v, was); err != nil {
			return nil, err
		}
		next.SetShared(shared)
		return next, nil
	})
	switch {
	case err == nil:
		d.log.InfoContext(ctx, "targets of the cluster were applied", eventKey, "cluster", "revision", int64(v.Revision))
	case errors.Is(err, errCurrent):
		return nil
	case errors.Is(err, ErrEnding), errors.Is(err, state.ErrUnreachable), ctx.Err() != nil:
	default:
		g.noteConfig(v, shared, err)
	}
	return err
}

// withShared returns doc, of a file, with the targets of the cluster: those that run, or newer ones that did not fit to the file so far.
func (d *Daemon) withShared(doc *config.Document) *config.Document {
	doc = doc.Clone()
	if g := d.group; g != nil {
		g.mu.Lock()
		refused := g.config.refused
		g.mu.Unlock()
		if refused != nil {
			doc.SetShared(refused)
			if _, err := doc.Config(); err == nil {
				return doc
			}
		}
	}
	running, _ := d.documents()
	doc.SetShared(running.Shared())
	return doc
}

// storeShared puts the shared part of doc into etcd, if it is an edit. It fails with ErrStale if etcd has another text than the one that was
// edited. undo, which is never nil, puts back what etcd had. It fails if etcd has the new text, or may have it, nevertheless.
func (e *editor) storeShared(ctx context.Context, doc *config.Document) (undo func() error, err error) {
	undo = func() error { return nil }
	next := doc.Shared()
	if next == nil || !next.Unkept() {
		return undo, nil
	}
	d, g := e.d, e.d.group
	if err := d.before("cluster"); err != nil {
		return undo, err
	}
	v, err := g.readConfig(ctx)
	switch {
	case err != nil:
		return undo, err
	case int64(v.Revision) != next.Revision():
		return undo, ErrStale
	case bytes.Equal(v.Data, next.Bytes()):
		doc.SharedKept(g.configSource(), next.Revision())
		return undo, nil
	}
	revision, err := g.home.Put(ctx, configKey, next.Bytes(), v.Revision)
	if errors.Is(err, state.ErrUnsure) {
		now, readErr := g.readConfig(context.WithoutCancel(ctx))
		switch {
		case readErr != nil:
			return func() error {
				return errors.New("etcd may have stored it all the same: then the gateways apply it when etcd answers")
			}, fmt.Errorf("targets of the cluster: %w", err)
		case now.Revision == v.Revision: // it was not, and will not be
		case bytes.Equal(now.Data, next.Bytes()):
			revision, err = now.Revision, nil
		default:
			err = ErrStale
		}
	}
	switch {
	case errors.Is(err, state.ErrConflict):
		return undo, ErrStale
	case err != nil:
		return undo, fmt.Errorf("targets of the cluster: %w", err)
	}
	doc.SharedKept(g.configSource(), int64(revision))
	before := v.Data
	if before == nil {
		before = []byte(noTargets) // the others keep what runs when the text is gone
	}
	return func() error {
		if _, err := g.home.Put(context.WithoutCancel(ctx), configKey, before, revision); err != nil {
			return fmt.Errorf("etcd keeps the targets of the cluster as they were to be, and the gateways apply them: %w", err)
		}
		return nil
	}, nil
}

// ApplyCluster makes shared, of config.NewShared, the targets that the gateways of the cluster have, in the place of those in etcd. With move,
// targets of the same names leave the file of this gateway.
func (d *Daemon) ApplyCluster(ctx context.Context, shared *config.Document, move bool, o ChangeOptions) (*schema.Plan, error) {
	g := d.group
	if g == nil {
		return nil, errNoCluster
	}
	from := fromCluster
	if move {
		from = fromRunning
	}
	return d.change(ctx, o, from, func() (*config.Document, error) {
		if move {
			if err := d.checkEdited(); err != nil {
				return nil, err
			}
		}
		v, err := g.readConfig(ctx)
		if err != nil {
			return nil, fmt.Errorf("%w. Nothing was changed", err)
		}
		next := d.Document()
		next.ReplaceShared(shared, int64(v.Revision))
		if move {
			_, err = next.MoveShared()
		}
		return next, err
	})
}

// ClusterConfig returns the targets of the cluster as they run here.
func (d *Daemon) ClusterConfig() (*config.Document, *schema.ClusterConfig, error) {
	g := d.group
	if g == nil {
		return nil, nil, errNoCluster
	}
	s := d.Document().Shared()
	g.mu.Lock()
	c := g.config
	g.mu.Unlock()
	if s == nil {
		return nil, nil, clusterError("this gateway does not know the targets of its cluster: " + cmp.Or(c.reason, "etcd has not answered yet"))
	}
	return s, &schema.ClusterConfig{Revision: s.Revision(), Newest: c.newest, Reason: c.reason, Text: string(s.Bytes())}, nil
}

// awaitSize waits until the gateway that serves a shared LUN has noted that it has a size in bytes.
func (g *group) awaitSize(ctx context.Context, c *config.LUN) error {
	serial := sharedIdentity(c).Serial
	for end := time.Now().Add(firstOpen); ; {
		g.mu.Lock()
		has, server, wake := g.media[serial].info.Size, "", g.wake
		if l := g.luns[serial]; l != nil {
			server = l.server
		}
		g.mu.Unlock()
		left := time.Until(end)
		switch {
		case has == int64(c.Size):
			return nil
		case left <= 0:
			return fmt.Errorf("gateway %s, which serves the LUN, has not set its size within %v. Its log says why", cmp.Or(server, "none"), firstOpen)
		}
		select {
		case <-wake:
		case <-time.After(left):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// servesHere reports whether this gateway serves a shared LUN.
func (g *group) servesHere(c *config.LUN) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	l := g.luns[sharedIdentity(c).Serial]
	return l != nil && l.gate.Admits()
}
