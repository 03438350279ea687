package daemon

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/iscsi"
)

// changes orders the changes of a Daemon: they are made one after the other.
type changes struct {
	lock     chan struct{}   // has room for one: the editor
	serving  context.Context // of Run, nil before; the editor's
	ended    context.Context // ends when Run begins to shut down
	end      context.CancelFunc
	cleanups sync.WaitGroup // of changes that are committed
}

// An editor is the right to change what runs. At most one exists: Daemon.edit makes it
// when the one before is released. Only its holder writes Daemon.served, and so may read
// that without Daemon.mu. What requires the right is a method of editor.
type editor struct {
	d      *Daemon
	absent []string // files that the change creates
}

// write calls f, which changes Daemon.served, with Daemon.mu held.
func (e *editor) write(f func()) { e.d.locked(f) }

// edit waits until no change is in progress and returns the right to make one. It fails
// when ctx ends or the daemon shuts down.
func (d *Daemon) edit(ctx context.Context) (*editor, error) {
	select {
	case d.changes.lock <- struct{}{}:
		return &editor{d: d}, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("another change is in progress: %w", ctx.Err())
	case <-d.changes.ended.Done():
		return nil, ErrEnding
	}
}

// tryEdit returns the right to make a change, or nil if a change is in progress.
func (d *Daemon) tryEdit() *editor {
	select {
	case d.changes.lock <- struct{}{}:
		return &editor{d: d}
	default:
		return nil
	}
}

// release ends the right of e.
func (e *editor) release() { <-e.d.changes.lock }

// Change applies edit to a copy of the running document and makes the result the running
// configuration. If edit fails or the result is not valid, nothing changes. An ErrRefused
// names the missing options. ctx bounds the wait for other changes. A change that has
// begun is completed, within the time limits of its parts.
func (d *Daemon) Change(ctx context.Context, edit func(*config.Document) error, o ChangeOptions) (*schema.Plan, error) {
	return d.change(ctx, o, fromRunning, func() (*config.Document, error) {
		if err := d.checkEdited(); err != nil {
			return nil, err
		}
		next := d.Document()
		return next, edit(next)
	})
}

// Apply makes doc the running configuration. What doc has in common with the running
// document is not touched. The targets of the cluster stay.
func (d *Daemon) Apply(ctx context.Context, doc *config.Document, o ChangeOptions) (*schema.Plan, error) {
	return d.change(ctx, o, fromElsewhere, func() (*config.Document, error) { return d.withShared(doc), nil })
}

// ApplyOwn applies a document that is the text of the configuration file. It fails with
// ErrEdited if the file has another text when the change begins, so that it does not undo
// a change that was made meanwhile.
func (d *Daemon) ApplyOwn(ctx context.Context, doc *config.Document, o ChangeOptions) (*schema.Plan, error) {
	if d.path == "" {
		return nil, fmt.Errorf("configuration file: the target was started without one: %w", ErrNotFound)
	}
	return d.change(ctx, o, fromFile, func() (*config.Document, error) {
		b, err := config.ReadFile(d.path)
		if err == nil && !bytes.Equal(b, doc.Bytes()) {
			err = d.edited()
		}
		return d.withShared(doc), err
	})
}

// applyFile applies the configuration file. It reads the file when the change begins,
// after earlier changes have written it.
func (d *Daemon) applyFile(ctx context.Context) error {
	_, err := d.change(ctx, ChangeOptions{}, fromFile, func() (*config.Document, error) {
		doc, err := config.OpenDocument(d.path)
		if err != nil {
			return nil, err
		}
		return d.withShared(doc), nil
	})
	return err
}

// maxStale bounds how often a change is made again because another gateway has changed the targets of the cluster.
const maxStale = 5

// change makes the document that next returns the running one, or only plans that with
// DryRun, which waits for no other change. from says what the file may contain. What the
// change removes ends after the editor is released, while other changes are made. If another gateway has changed the targets of the cluster
// meanwhile, change applies these, and calls next again.
func (d *Daemon) change(ctx context.Context, o ChangeOptions, from origin, next func() (*config.Document, error)) (*schema.Plan, error) {
	if o.DryRun {
		return d.dryRun(ctx, o, from, next)
	}
	for tries := 1; ; tries++ {
		plan, err := d.changeOnce(ctx, o, from, next)
		if !errors.Is(err, ErrStale) || tries == maxStale {
			return plan, err
		}
		if newer := d.takeShared(ctx); newer != nil {
			return plan, fmt.Errorf("%w. This gateway cannot apply them: %w", err, newer)
		}
	}
}

// changeOnce makes the document that next returns the running one. It fails with ErrStale if the targets of the cluster are not those that run.
func (d *Daemon) changeOnce(ctx context.Context, o ChangeOptions, from origin, next func() (*config.Document, error)) (*schema.Plan, error) {
	e, err := d.edit(ctx)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	end := context.AfterFunc(d.changes.ended, cancel) // a shutdown does not wait until removed LUNs drain
	rest, plan, err := e.commit(ctx, from, next, o)
	if err != nil {
		end()
		cancel()
		return plan, err
	}
	finish := func() []string {
		defer d.changes.cleanups.Done()
		defer cancel()
		defer end()
		return rest.run()
	}
	if from != fromCluster {
		d.applied.succeed()
	}
	if o.follow {
		go finish()
		return plan, nil
	}
	note(plan, !plan.Persisted, finish())
	return plan, nil
}

// loaded returns the document that next returns, and its configuration.
func loaded(next func() (*config.Document, error)) (*config.Document, *config.Config, error) {
	doc, err := next()
	if err != nil {
		return nil, nil, err
	}
	cfg, err := doc.Config()
	return doc, cfg, err
}

// dryRun plans the change to the document that next returns.
func (d *Daemon) dryRun(ctx context.Context, o ChangeOptions, from origin, next func() (*config.Document, error)) (*schema.Plan, error) {
	doc, cfg, err := loaded(next)
	if err != nil {
		return nil, err
	}
	forecast := d.ipsec.forecast(ctx, cfg)
	d.mu.Lock()
	if n := d.served.next; from == fromElsewhere && n != nil && doc.Equal(n) {
		d.mu.Unlock()
		return &schema.Plan{Steps: []schema.Step{}}, nil // a change in progress applies this document already
	}
	plan := d.plan(cfg, forecast)
	d.mu.Unlock()
	if err := errors.Join(checkNames(plan), d.probe(ctx, plan, cfg, o.File)); err != nil {
		return nil, err
	}
	return plan, nil
}

// commit makes the document that next returns the running one, and releases e: it plans, saves the
// document to the file, takes the steps, and undoes all of it if one fails. Afterwards the caller
// must run the cleanup, and then call changes.cleanups.Done.
func (e *editor) commit(ctx context.Context, from origin, next func() (*config.Document, error), o ChangeOptions) (*cleanup, *schema.Plan, error) {
	defer e.release()
	d := e.d
	doc, cfg, err := loaded(next)
	if err != nil {
		return nil, nil, err
	}
	forecast := d.ipsec.forecast(ctx, cfg)
	d.mu.Lock()
	plan := d.plan(cfg, forecast)
	d.mu.Unlock()
	if err := cmp.Or(checkNames(plan), allowed(plan, o)); err != nil {
		if !o.follow { // takeShared logs it once
			d.log.WarnContext(ctx, "change refused", eventKey, "config", "reason", err)
		}
		return nil, plan, err
	}
	if err := e.prepare(ctx, plan, cfg); err != nil {
		return nil, plan, err
	}
	if err := d.publish(ctx, o.File); err != nil {
		return nil, plan, err
	}
	c := &change{editor: e, ctx: ctx, o: o, from: from, plan: plan, cfg: cfg}
	c.edited = doc.Shared() != nil && doc.Shared().Unkept()
	takeBack, err := e.storeShared(ctx, doc)
	e.write(func() { d.served.next = doc })
	defer e.write(func() { d.served.next = nil })
	if err == nil {
		err = e.save(doc, from) // from here on a start finds the new configuration
	}
	saved := err == nil
	if saved {
		err = c.run()
	}
	if err != nil {
		if undo := errors.Join(c.rollBack(), e.restore(doc, from, saved), takeBack()); undo == nil {
			err = fmt.Errorf("%w. Nothing was changed", err)
		} else {
			err = fmt.Errorf("%w. Undoing the change failed, too, in part: %w", err, undo)
		}
		if !o.follow && !errors.Is(err, ErrStale) {
			d.log.ErrorContext(ctx, "change failed", eventKey, "config", "reason", err)
		}
		return nil, plan, err
	}
	if o.File != nil {
		o.File.Keep()
	}
	c.complete(doc)
	if len(forecast) > 0 {
		c.ending = append(c.ending, func(s *iscsi.SessionInfo) string { return forecastOf(s, forecast) })
	}
	d.ipsec.apply(d.served.cfg)
	return c.cleanup(), plan, nil
}

// complete makes next the running document after all steps were taken.
func (c *change) complete(next *config.Document) {
	d := c.d
	c.write(func() {
		d.served.doc, d.served.cfg, d.served.pending = next, c.effective(), pending(c.plan)
		d.limitThreads(d.served.cfg)
	})
	d.group.runs(next)
	c.plan.Persisted = d.path != "" || c.from == fromCluster || c.edited
	for i := range c.plan.Steps {
		s := &c.plan.Steps[i]
		s.Done = !s.Restart
		d.log.InfoContext(c.ctx, "change", eventKey, "config", "change", s.Change, "restart", s.Restart)
	}
	for _, tell := range c.news {
		tell()
	}
	if len(filesToShrink(c.plan, c.cfg)) > 0 {
		if err := c.keepShrinks(nil); err != nil {
			c.notes = append(c.notes, err.Error())
		}
	}
}

// pending returns the changes of p that take effect at the next start.
func pending(p *schema.Plan) (list []config.Change) {
	for _, s := range p.Steps {
		if s.Restart {
			list = append(list, s.Change)
		}
	}
	return list
}

// atNextStart describes a pending change.
func atNextStart(ch config.Change) string {
	return ch.String() + " takes effect at the next start of the target"
}

// note writes the notes, and what else the user should know, to p.
func note(p *schema.Plan, volatile bool, notes []string) {
	if volatile && len(p.Steps) > 0 {
		notes = append(notes, "without a configuration file the change lasts until the process exits")
	}
	if later := pending(p); len(later) == 1 {
		notes = append(notes, atNextStart(later[0]))
	} else if len(later) > 1 { // the steps say which
		notes = append(notes, fmt.Sprintf("%d changes take effect at the next start of the target", len(later)))
	}
	p.Note = strings.Join(notes, "; ")
}

// effective returns the configuration that runs after the change. Keys that take effect
// at the next start keep their values.
func (c *change) effective() *config.Config {
	cfg, old := *c.cfg, c.d.served.cfg
	cfg.StateDir, cfg.Log.Format, cfg.Process, cfg.Cluster = old.StateDir, old.Log.Format, old.Process, old.Cluster
	cfg.Control = old.Control
	cfg.Control.Access, cfg.Control.Paths = c.cfg.Control.Access, c.cfg.Control.Paths
	return &cfg
}

// A change is an editor with what it has done of a plan so far.
type change struct {
	*editor
	ctx   context.Context
	o     ChangeOptions
	from  origin
	plan  *schema.Plan
	cfg   *config.Config // the next one
	undo  []func() error
	notes []string

	edited bool // the targets of the cluster: the other gateways follow

	news     []func() // what complete logs about LUNs
	removals []*removal
	ending   []func(*iscsi.SessionInfo) string // each returns why a session has to end, or ""
}

// maxEditDrain bounds what the commands for a LUN have to end while the change waits for
// them: other changes wait meanwhile.
const maxEditDrain = 30 * time.Second

// editDrain returns the time that commands have to end while c waits for them.
func (c *change) editDrain() time.Duration { return min(c.o.drain(), maxEditDrain) }

// lasting returns the context of work that a shutdown must not cut short.
func (c *change) lasting() context.Context { return context.WithoutCancel(c.ctx) }

// run takes the steps of the plan.
func (c *change) run() error {
	if err := c.useIPsec(); err != nil {
		return err
	}
	updated := map[string]bool{} // objects whose updates are done
	for _, s := range c.plan.Steps {
		name := s.Change.Object()
		if s.Restart || updated[name] { // the step of its first key did them all
			continue
		}
		updated[name] = s.Change.Op == config.Update
		if err := c.step(s.Change); err != nil {
			return fmt.Errorf("%v: %w", s.Change, err)
		}
	}
	if err := c.refreshListeners(); err != nil {
		return err
	}
	if err := c.d.before("paths"); err != nil {
		return err
	}
	return c.refreshPaths()
}

// useIPsec makes the driver of the next configuration the one that answers.
func (c *change) useIPsec() error {
	now := c.d.served.cfg
	if !changesIPsec(now, c.cfg) && !addsIPsec(c.plan) {
		return nil
	}
	if err := c.d.ipsec.use(c.cfg); err != nil {
		return errors.Join(err, c.d.ipsec.goBack(now))
	}
	c.onUndo(func() error { return c.d.ipsec.goBack(now) })
	return nil
}

// addsIPsec reports whether p adds what may require IPsec.
func addsIPsec(p *schema.Plan) bool {
	return slices.ContainsFunc(p.Steps, func(s schema.Step) bool {
		return s.Change.Op == config.Add && (s.Change.Kind == config.KindPortal || s.Change.Kind == config.KindTarget)
	})
}

// step makes one difference true, as c.cfg describes it. An update does so for all keys
// of its object.
func (c *change) step(ch config.Change) error {
	if err := c.d.before(ch.String()); err != nil {
		return err
	}
	return actions[action{ch.Kind, ch.Op}](c, ch)
}

// An action is a kind of step.
type action struct {
	kind string
	op   config.Op
}

// actions has the function of each kind of step. A kind that is not in it takes effect at
// the next start: see effective.
var actions map[action]func(*change, config.Change) error

func init() {
	actions = map[action]func(*change, config.Change) error{
		{config.KindTarget, config.Add}:           (*change).addTarget,
		{config.KindTarget, config.Remove}:        (*change).removeTarget,
		{config.KindTarget, config.Update}:        (*change).updateTarget,
		{config.KindLUN, config.Add}:              (*change).addLUN,
		{config.KindLUN, config.Remove}:           (*change).removeLUN,
		{config.KindLUN, config.Update}:           (*change).updateLUN,
		{config.KindPortal, config.Add}:           (*change).addPortal,
		{config.KindPortal, config.Remove}:        (*change).removePortal,
		{config.KindPortal, config.Update}:        (*change).updatePortal,
		{config.KindLimits, config.Update}:        (*change).updateOptions,
		{config.KindMPA, config.Update}:           (*change).updateOptions,
		{config.KindDiscoveryAuth, config.Update}: (*change).updateOptions,
		{config.KindDrain, config.Update}:         readWhereUsed,
		{config.KindDrainTo, config.Update}:       readWhereUsed,
		{config.KindDebug, config.Update}:         (*change).updateSideServer,
		{config.KindMetrics, config.Update}:       (*change).updateSideServer,
		{config.KindDashboard, config.Update}:     (*change).updateSideServer,
		{config.KindLog, config.Update}:           (*change).updateLog,
		{config.KindWatch, config.Update}:         readWhereUsed,
		{config.KindControl, config.Update}:       readWhereUsed,
		{config.KindIPsec, config.Update}:         readWhereUsed, // see useIPsec
	}
}

// readWhereUsed does nothing: awaitEnd, follow and the control API read their keys when they need them.
func readWhereUsed(*change, config.Change) error { return nil }

// onUndo adds f to what rollBack does.
func (c *change) onUndo(f func() error) { c.undo = append(c.undo, f) }

// tell makes an event about a LUN when the change is complete.
func (c *change) tell(text string, t *servedTarget, id int, attrs ...any) {
	c.news = append(c.news, func() {
		c.d.log.InfoContext(c.ctx, text, append([]any{eventKey, "lun", "target", t.name, "lun", id}, attrs...)...)
	})
}

// tellSize makes an event of a size in bytes that was changed.
func (c *change) tellSize(t *servedTarget, id int, before, now int64) {
	if before != now {
		c.tell("LUN resized", t, id, "octets_before", before, "octets", now)
	}
}

// rollBack undoes what was done, the last first.
func (c *change) rollBack() error {
	var errs []error
	for _, f := range slices.Backward(c.undo) {
		errs = append(errs, f())
	}
	return errors.Join(errs...)
}
