package daemon

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/lun"
)

// Change makes what edit does to a copy of the document true. If edit fails, or the
// outcome is no valid configuration, nothing has changed. An ErrRefused tells which
// option is missing. ctx bounds the wait for other changes; a change that has begun comes
// to its end, whose parts are bounded.
func (d *Daemon) Change(ctx context.Context, edit func(*config.Document) error, o ChangeOptions) (*schema.Plan, error) {
	return d.change(ctx, o, ofRunning, func() (*config.Document, error) {
		if err := d.checkEdited(); err != nil {
			return nil, err
		}
		next := d.Document()
		return next, edit(next)
	})
}

// Apply makes the document true, which takes the place of the one there is. What it
// has in common with that stays as it is.
func (d *Daemon) Apply(ctx context.Context, doc *config.Document, o ChangeOptions) (*schema.Plan, error) {
	return d.change(ctx, o, ofElsewhere, func() (*config.Document, error) { return doc, nil })
}

// ApplyOwn is Apply of a document that is the text of the file. It fails with ErrEdited if
// the file says something else when the change has its turn: what was changed meanwhile is
// not taken back.
func (d *Daemon) ApplyOwn(ctx context.Context, doc *config.Document, o ChangeOptions) (*schema.Plan, error) {
	if d.path == "" {
		return nil, fmt.Errorf("file of the target, which was started without one: %w", ErrNotFound)
	}
	return d.change(ctx, o, ofFile, func() (*config.Document, error) {
		b, err := config.ReadFile(d.path)
		if err == nil && !bytes.Equal(b, doc.Bytes()) {
			err = d.edited()
		}
		return doc, err
	})
}

// applyFile is Apply of the file. It is read when the change has its turn: what was
// changed before has been written to it by then.
func (d *Daemon) applyFile(ctx context.Context) error {
	_, err := d.change(ctx, ChangeOptions{}, ofFile, func() (*config.Document, error) { return config.OpenDocument(d.path) })
	return err
}

// An origin is where the document of a change comes from, and so what the file may say
// when it is saved.
type origin int

const (
	ofElsewhere origin = iota // whatever it says
	ofRunning                 // what runs: the document is an edit of that
	ofFile                    // the same as the document: it is not written to
)

// change makes what next returns true, or with DryRun says what that would be, which waits
// for nobody. from tells what the file may say. What is removed ends behind the change,
// while others are made.
func (d *Daemon) change(ctx context.Context, o ChangeOptions, from origin, next func() (*config.Document, error)) (*schema.Plan, error) {
	if o.DryRun {
		doc, err := next()
		if err != nil {
			return nil, err
		}
		cfg, err := doc.Config()
		if err != nil {
			return nil, err
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		if from == ofElsewhere && d.next != nil && bytes.Equal(doc.Bytes(), d.next.Bytes()) {
			return &schema.Plan{Steps: []schema.Step{}}, nil // it is being made: nothing is left to do
		}
		return d.plan(cfg), nil
	}
	if err := d.takeTurn(ctx); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(d.ended, cancel)() // which is not to wait for what a change lets end
	c, plan, err := d.commit(ctx, o, from, next)
	if err != nil {
		return plan, err
	}
	defer d.finishing.Done()
	c.finish()
	note(plan, d.path == "", c.notes)
	return plan, nil
}

// commit makes what next returns true, but for what c.finish ends, behind which the caller
// has to call finishing.Done. It is the caller's turn, which ends.
func (d *Daemon) commit(ctx context.Context, o ChangeOptions, from origin, next func() (*config.Document, error)) (*change, *schema.Plan, error) {
	defer d.endTurn()
	doc, err := next()
	if err != nil {
		return nil, nil, err
	}
	return d.become(ctx, doc, from, o)
}

func (d *Daemon) takeTurn(ctx context.Context) error {
	select {
	case d.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("another change is under way: %w", ctx.Err())
	case <-d.ended.Done():
		return ErrEnding
	}
}

func (d *Daemon) endTurn() { <-d.turn }

// checkEdited fails with ErrEdited if the file says something else than the document. It
// may be the turn of another change, which has written to the file already, or comes to
// its end meanwhile.
func (d *Daemon) checkEdited() error {
	if d.path == "" {
		return nil
	}
	doc, next := d.documents()
	for {
		b, err := config.ReadFile(d.path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil // it is written again
		case err != nil:
			return err
		case bytes.Equal(b, doc.Bytes()), next != nil && bytes.Equal(b, next.Bytes()):
			return nil
		}
		was, wasNext := doc, next
		if doc, next = d.documents(); doc == was && next == wasNext {
			return d.edited()
		}
	}
}

// documents are the one that runs and the one that the change whose turn it is makes run,
// or nil.
func (d *Daemon) documents() (doc, next *config.Document) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.doc, d.next
}

// becoming notes the document that a change makes run; nil: none any more.
func (d *Daemon) becoming(next *config.Document) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.next = next
}

func (d *Daemon) edited() error {
	return fmt.Errorf("%s: %w: look at it with config plan, and then apply it", d.path, ErrEdited)
}

// become makes next true, but for what is to end. It is the caller's turn.
func (d *Daemon) become(ctx context.Context, next *config.Document, from origin, o ChangeOptions) (*change, *schema.Plan, error) {
	cfg, err := next.Config()
	if err != nil {
		return nil, nil, err
	}
	plan := d.plan(cfg)
	if err := allowed(plan, o); err != nil {
		d.log.WarnContext(ctx, "change refused", eventKey, "config", "reason", err)
		return nil, plan, err
	}
	if err := d.prepare(ctx, plan, cfg); err != nil {
		return nil, plan, err
	}
	if err := d.publish(ctx, o.File); err != nil {
		return nil, plan, err
	}
	c := &change{d: d, ctx: ctx, o: o, plan: plan, cfg: cfg}
	d.becoming(next)
	defer d.becoming(nil)
	err = d.save(next, from) // from here on a start comes to what is new
	saved := err == nil
	if saved {
		err = c.run()
	}
	if err != nil {
		if err2 := errors.Join(c.rollBack(), d.restore(next, from, saved)); err2 == nil {
			err = fmt.Errorf("everything is as before: %w", err)
		} else {
			err = fmt.Errorf("failed: %w; and not all could be undone: %w", err, err2)
		}
		d.log.ErrorContext(ctx, "change failed", eventKey, "config", "reason", err)
		return nil, plan, err
	}
	if o.File != nil {
		o.File.Keep()
	}
	d.mu.Lock()
	d.doc, d.cfg, d.pending = next, d.effective(cfg), pending(plan)
	d.mu.Unlock()
	plan.Persisted = d.path != ""
	for i := range plan.Steps {
		plan.Steps[i].Done = !plan.Steps[i].Restart
		d.log.InfoContext(ctx, "change", eventKey, "config", "change", describe(plan.Steps[i].Change), "restart", plan.Steps[i].Restart)
	}
	if len(planned(plan, cfg)) > 0 {
		if err := d.keepShrinks(nil); err != nil {
			c.notes = append(c.notes, err.Error())
		}
	}
	c.part()
	return c, plan, nil
}

// prepare does what has to be on stable storage before the configuration is, and does no
// harm if that never comes: a LUN whose file is to be made anew will not be taken for
// the one that had lain on a file of that name.
//
// It fails if that needs what an earlier change has removed and what has not ended yet.
func (d *Daemon) prepare(ctx context.Context, plan *schema.Plan, cfg *config.Config) error {
	for _, s := range plan.Steps {
		for _, l := range opened(s.Change, cfg) {
			if err := d.isFree(s.Change.Target, &l, s.Change.Op == config.Add); err != nil {
				return err
			}
			if l.Backend != "file" {
				continue
			}
			var absent bool // valid when the call is back
			_, err := d.calls.do(ctx, d.waits.store, storeKey(s.Change.Target, &l), "looking for it", func(*call) (*lun.Unit, error) {
				_, err := os.Stat(l.Path)
				absent = errors.Is(err, fs.ErrNotExist)
				return nil, nil
			}, nil)
			if err != nil {
				return fmt.Errorf("nothing has changed: LUN %d of target %s: %w", l.ID, s.Change.Target, err)
			}
			if absent {
				if err := d.ids.Forget(identityKey(s.Change.Target, &l)); err != nil {
					return err
				}
			}
		}
	}
	if s := planned(plan, cfg); len(s) > 0 {
		return d.keepShrinks(s)
	}
	return nil
}

// publish gives the file for a LUN its name, before the configuration can have that: a
// start that found no file there would make an empty one.
func (d *Daemon) publish(ctx context.Context, file *FileBuilder) error {
	if file == nil {
		return nil
	}
	if err := d.before("file"); err != nil {
		return err
	}
	return file.publish(ctx)
}

// opened are the LUNs that a step opens.
func opened(ch config.Change, cfg *config.Config) []config.LUN {
	t := targetOf(cfg, ch.Target)
	switch l := lunOf(t, ch.LUN); {
	case t == nil:
	case ch.Kind == kindTarget && ch.Op == config.Add:
		return t.LUNs
	case ch.Kind == kindLUN && l != nil && (ch.Op == config.Add || ch.Op == config.Update && ch.Key == "path"):
		return []config.LUN{*l}
	}
	return nil
}

// save writes the document to the file, unless the file says so already. It fails with
// ErrEdited when the file says what it may not, by from.
func (d *Daemon) save(doc *config.Document, from origin) error {
	if d.path == "" {
		return nil
	}
	if err := d.before("save"); err != nil {
		return err
	}
	if b, err := config.ReadFile(d.path); err == nil && bytes.Equal(b, doc.Bytes()) {
		return nil
	}
	switch from {
	case ofElsewhere:
		return doc.SaveAs(d.path)
	case ofFile:
		return d.edited()
	}
	err := doc.SaveOver(d.path, d.doc.Bytes())
	if errors.Is(err, config.ErrChanged) {
		err = d.edited()
	}
	return err
}

// restore makes the file what it was before a change to next that has failed, unless the
// file is where next is from. What somebody else has written meanwhile stays.
func (d *Daemon) restore(next *config.Document, from origin, saved bool) error {
	err := d.keepShrinks(nil)
	if d.path == "" || from == ofFile {
		return err
	}
	b, rerr := config.ReadFile(d.path)
	switch {
	case rerr == nil && !bytes.Equal(b, next.Bytes()): // that was not written, or is not there any more
		return err
	case rerr != nil && !saved:
		return err
	case rerr != nil && !errors.Is(rerr, fs.ErrNotExist):
		return errors.Join(err, rerr)
	}
	rerr = d.doc.SaveOver(d.path, next.Bytes())
	if errors.Is(rerr, config.ErrChanged) {
		rerr = nil
	}
	return errors.Join(err, rerr)
}

// pending are the steps that wait for a restart.
func pending(p *schema.Plan) (list []config.Change) {
	for _, s := range p.Steps {
		if s.Restart {
			list = append(list, s.Change)
		}
	}
	return list
}

func note(p *schema.Plan, volatile bool, notes []string) {
	if volatile && len(p.Steps) > 0 {
		notes = append(notes, "there is no configuration file: this lasts as long as the process")
	}
	for _, s := range p.Steps {
		if s.Restart {
			notes = append(notes, describe(s.Change)+" takes effect when the target is started again")
		}
	}
	for i, n := range notes {
		if i > 0 {
			p.Note += "; "
		}
		p.Note += n
	}
}

// effective is what runs once cfg has been applied: what needs a restart is as it was.
func (d *Daemon) effective(cfg *config.Config) *config.Config {
	c, old := *cfg, d.cfg
	c.StateDir, c.Log.Format = old.StateDir, old.Log.Format
	c.Control = old.Control
	return &c
}

// A change is what has been done of a plan.
type change struct {
	d     *Daemon
	ctx   context.Context
	o     ChangeOptions
	plan  *schema.Plan
	cfg   *config.Config
	undo  []func() error
	notes []string

	done    map[string]bool // objects whose updates have been made
	leaving []*removal
	ending  []func(*iscsi.SessionInfo) string // why a session has to end; empty: it has not
	parting []parting
}

// turnDrain is how long what is removed has to end, at most, before the change can go on:
// others wait for their turn meanwhile.
const turnDrain = 30 * time.Second

// turnDrain is how long what the change itself waits for has to end.
func (c *change) turnDrain() time.Duration { return min(c.o.drain(), turnDrain) }

// lasting is the context of what has to be done although the change is to be cut short.
func (c *change) lasting() context.Context { return context.WithoutCancel(c.ctx) }

// run takes the steps.
func (c *change) run() error {
	c.done = map[string]bool{}
	for i := range c.plan.Steps {
		s := &c.plan.Steps[i]
		if s.Restart {
			continue
		}
		if name := object(s.Change); s.Change.Op == config.Update {
			if c.done[name] {
				continue // with the first of its keys
			}
			c.done[name] = true
		}
		if err := c.step(s.Change); err != nil {
			return fmt.Errorf("%s: %w", describe(s.Change), err)
		}
	}
	if err := c.d.before("paths"); err != nil {
		return err
	}
	return c.refreshPaths()
}

// step takes the step to the state that c.cfg describes; an update does so for all keys
// of its object.
func (c *change) step(ch config.Change) error {
	if err := c.d.before(describe(ch)); err != nil {
		return err
	}
	act, ok := actions[action{ch.Kind, ch.Op}]
	if !ok {
		return errors.New("is not known to the running target")
	}
	return act(c, ch)
}

type action struct {
	kind string
	op   config.Op
}

// actions is how each difference is made good. What is not here needs a restart: see
// effective.
var actions map[action]func(*change, config.Change) error

func init() {
	actions = map[action]func(*change, config.Change) error{
		{kindTarget, config.Add}:           (*change).addTarget,
		{kindTarget, config.Remove}:        (*change).removeTarget,
		{kindTarget, config.Update}:        (*change).updateTarget,
		{kindLUN, config.Add}:              (*change).addLUN,
		{kindLUN, config.Remove}:           (*change).removeLUN,
		{kindLUN, config.Update}:           (*change).updateLUN,
		{kindPortal, config.Add}:           (*change).addPortal,
		{kindPortal, config.Remove}:        (*change).removePortal,
		{kindPortal, config.Update}:        (*change).updatePortal,
		{kindLimits, config.Update}:        (*change).updateOptions,
		{kindMPA, config.Update}:           (*change).updateOptions,
		{kindDiscoveryAuth, config.Update}: (*change).updateOptions,
		{kindDrain, config.Update}:         (*change).updateOptions,
		{kindDebug, config.Update}:         (*change).updateDebug,
		{kindMetrics, config.Update}:       (*change).updateMetrics,
		{kindDashboard, config.Update}:     (*change).updateDashboard,
		{kindLog, config.Update}:           (*change).updateLog,
		{kindWatch, config.Update}:         func(*change, config.Change) error { return nil }, // follow looks at it
	}
}

// undoing remembers how to take back what has just been done.
func (c *change) undoing(f func() error) { c.undo = append(c.undo, f) }

// rollBack takes back what has been done, the last first.
func (c *change) rollBack() error {
	var errs []error
	for _, f := range slices.Backward(c.undo) {
		errs = append(errs, f())
	}
	return errors.Join(errs...)
}

// targetConfig is the target of that name in the new configuration.
func (c *change) targetConfig(name string) *config.Target {
	return targetOf(c.cfg, name)
}

func targetOf(cfg *config.Config, name string) *config.Target {
	i := slices.IndexFunc(cfg.Targets, func(t config.Target) bool { return t.Name == name })
	if i < 0 {
		return nil
	}
	return &cfg.Targets[i]
}

func lunOf(t *config.Target, id int) *config.LUN {
	if t == nil {
		return nil
	}
	i := slices.IndexFunc(t.LUNs, func(l config.LUN) bool { return l.ID == id })
	if i < 0 {
		return nil
	}
	return &t.LUNs[i]
}

func portalOf(cfg *config.Config, listen string) *config.Portal {
	i := slices.IndexFunc(cfg.Portals, func(p config.Portal) bool { return p.Listen == listen })
	if i < 0 {
		return nil
	}
	return &cfg.Portals[i]
}

func (c *change) addTarget(ch config.Change) error {
	d, tc := c.d, c.targetConfig(ch.Target)
	if d.target(tc.Name) != nil {
		return nil
	}
	t := newTarget(tc, c.cfg.TPGTs(tc))
	for _, l := range tc.LUNs {
		if err := c.open(t, l); err != nil {
			return err
		}
	}
	ic, err := t.config(tc, c.cfg)
	if err == nil {
		err = d.node.AddTarget(ic)
	}
	if err != nil {
		return err
	}
	d.mu.Lock()
	d.targets = append(d.targets, t)
	d.mu.Unlock()
	c.undoing(func() error {
		d.dropTarget(t)
		c.endSessions(func(s *iscsi.SessionInfo) bool { return s.Target == t.name }, "target was taken back")
		return d.node.RemoveTarget(t.name)
	})
	return nil
}

// dropTarget takes t out of the list.
func (d *Daemon) dropTarget(t *servedTarget) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.targets = slices.DeleteFunc(slices.Clone(d.targets), func(o *servedTarget) bool { return o == t })
}

func (c *change) removeTarget(ch config.Change) error {
	d, t := c.d, c.d.target(ch.Target)
	if t == nil {
		return nil
	}
	tc := targetOf(d.cfg, ch.Target)
	ic, err := t.config(tc, d.cfg)
	if err != nil {
		return err
	}
	if err := d.node.RemoveTarget(t.name); err != nil {
		return err
	}
	d.dropTarget(t)
	c.undoing(func() error {
		d.mu.Lock()
		d.targets = append(d.targets, t)
		d.mu.Unlock()
		return d.node.AddTarget(ic)
	})
	c.ending = append(c.ending, func(s *iscsi.SessionInfo) string {
		if s.Target == t.name {
			return "target was removed"
		}
		return ""
	})
	// Its sessions keep the LUNs to the end: they may have something to write.
	for _, l := range t.luns {
		c.leaving = append(c.leaving, c.removal(t, l))
	}
	return nil
}

func (c *change) updateTarget(ch config.Change) error {
	d, t, tc := c.d, c.d.target(ch.Target), c.targetConfig(ch.Target)
	ic, err := t.config(tc, c.cfg)
	if err != nil {
		return err
	}
	was, err := t.config(targetOf(d.cfg, ch.Target), d.cfg)
	if err != nil {
		return err
	}
	if err := d.node.UpdateTarget(ic); err != nil {
		return err
	}
	c.undoing(func() error { return d.node.UpdateTarget(was) })
	c.ending = append(c.ending, func(s *iscsi.SessionInfo) string { return excluded(s, tc, &ic) })
	return nil
}

// excluded is why a session could not be with the target as it is described now.
func excluded(s *iscsi.SessionInfo, tc *config.Target, ic *iscsi.TargetConfig) string {
	switch {
	case s.Target != tc.Name:
	case !ic.Initiators.Match(s.Initiator):
		return "initiator is no longer among those of the target"
	case !slices.Contains(ic.PortalGroups, s.TPGT):
		return "portal group does not lead to the target any more"
	case !s.Discovery && s.Params.CHAPName != "" && tc.Auth.Method == "chap" &&
		!slices.ContainsFunc(tc.Auth.Users, func(u config.User) bool { return u.Name == s.Params.CHAPName }):
		return "CHAP user is no longer among those of the target"
	}
	return ""
}

func (c *change) addLUN(ch config.Change) error {
	t := c.d.target(ch.Target)
	if t == nil {
		return ErrNotFound
	}
	if t.luns[ch.LUN] != nil {
		return nil // with its target
	}
	return c.open(t, *lunOf(c.targetConfig(ch.Target), ch.LUN))
}

// open makes a LUN and lets initiators have it.
func (c *change) open(t *servedTarget, l config.LUN) error {
	d := c.d
	if err := c.letGo(l.Path); err != nil {
		return err
	}
	served, err := d.openLUN(c.ctx, d.waits.store, t, l)
	if err != nil {
		return err
	}
	d.mu.Lock()
	err = t.add(served)
	d.mu.Unlock()
	if err != nil {
		return errors.Join(err, c.giveUp(t, served, d.waits.close))
	}
	c.undoing(func() error {
		d.mu.Lock()
		delete(t.luns, l.ID)
		d.mu.Unlock()
		t.inventory.Remove(uint16(l.ID)).CutOff()
		return c.giveUp(t, served, d.waits.close)
	})
	return nil
}

// giveUp closes the store of a LUN that the change has opened, or opens anew.
func (c *change) giveUp(t *servedTarget, l *servedLUN, most time.Duration) error {
	log := c.d.log.With("target", t.name, "lun", l.ID)
	return c.d.closeLUN(c.lasting(), most, t, l, func(err error) { log.Warn("the store has closed at last", "reason", err) })
}

func (c *change) removeLUN(ch config.Change) error {
	t := c.d.target(ch.Target)
	if t == nil || t.luns[ch.LUN] == nil {
		return nil // with its target
	}
	c.hide(t, ch.LUN)
	return nil
}

// hide takes a LUN away from its initiators. Its commands end, and its store is closed,
// when the change is complete, or before when something else needs what it lies on.
func (c *change) hide(t *servedTarget, id int) {
	r := c.removal(t, t.luns[id])
	r.hide()
	c.leaving = append(c.leaving, r)
	c.undoing(func() error { return c.takeBack(r) })
}

// takeBack gives initiators a LUN again that was to be removed.
func (c *change) takeBack(r *removal) error {
	d, l := c.d, r.l
	if r.isClosing() {
		return fmt.Errorf("LUN %d of target %s: %w", l.ID, r.t.name, ErrStuck)
	}
	d.forget(r)
	if r.isClosed() {
		var err error
		if l, err = d.openOrWait(c.lasting(), d.waits.store, r.t, r.l.LUN); err != nil {
			return err
		}
		l.unit.InheritFrom(r.l.unit)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return r.t.add(l)
}

// letGo ends the removal of a LUN that lies on path.
func (c *change) letGo(path string) error {
	if path == "" {
		return nil
	}
	for _, r := range c.leaving {
		if r.l.Path == path && !r.isClosed() {
			if !r.hidden { // with its target
				r.hide()
				c.undoing(func() error { return c.takeBack(r) })
			}
			c.notes = append(c.notes, r.finish(c.turnDrain())...)
			if !r.isClosed() {
				return fmt.Errorf("%s is still in use by commands for LUN %d of target %s", path, r.l.ID, r.t.name)
			}
		}
	}
	return nil
}

// updateLUN makes a LUN what the configuration says now. Who sees it and its size change
// in place. Anything else makes it another LUN, which is not ready in between.
func (c *change) updateLUN(ch config.Change) error {
	t := c.d.target(ch.Target)
	if t == nil || t.luns[ch.LUN] == nil {
		return ErrNotFound
	}
	next := *lunOf(c.targetConfig(ch.Target), ch.LUN)
	if replaces(t.luns[ch.LUN].LUN, next) || t.luns[ch.LUN].fault != nil {
		return c.replace(t, next)
	}
	if err := c.remask(t, next); err != nil {
		return err
	}
	return c.resize(t, next)
}

// replaces tells whether a LUN has to be opened anew to become next.
func replaces(l, next config.LUN) bool {
	return l.Backend != next.Backend || l.Path != next.Path || l.BlockSize != next.BlockSize || l.ReadOnly != next.ReadOnly ||
		l.WriteThrough != next.WriteThrough || l.Removable != next.Removable || l.Sanitize != next.Sanitize ||
		l.Plugin != next.Plugin || l.Options != next.Options
}

// become makes l what its LUN is from now on.
func (c *change) become(t *servedTarget, l *servedLUN) {
	d, was := c.d, t.luns[l.ID]
	d.mu.Lock()
	t.luns[l.ID] = l
	d.mu.Unlock()
	c.undoing(func() error {
		d.mu.Lock()
		defer d.mu.Unlock()
		t.luns[l.ID] = was
		return nil
	})
}

func (c *change) remask(t *servedTarget, next config.LUN) error {
	served := t.luns[next.ID]
	old, err := maskOf(served.LUN)
	if err != nil {
		return err
	}
	mask, err := maskOf(next)
	if err != nil {
		return err
	}
	if slices.Equal(served.Initiators, next.Initiators) && slices.Equal(served.ReadOnlyFor, next.ReadOnlyFor) {
		return nil
	}
	if err := t.inventory.SetMask(uint16(next.ID), mask); err != nil {
		return err
	}
	c.undoing(func() error { return t.inventory.SetMask(uint16(next.ID), old) })
	l := *served
	l.Initiators, l.ReadOnlyFor = next.Initiators, next.ReadOnlyFor
	c.become(t, &l)
	return nil
}

func (c *change) resize(t *servedTarget, next config.LUN) error {
	d, served := c.d, t.luns[next.ID]
	if served.Size == next.Size {
		return nil
	}
	if next.Size != 0 { // 0: as the medium has it
		old := served.unit.Size()
		outgrows := func(so bool) error {
			if next.Backend != "file" || int64(next.Size) < old {
				return nil
			}
			return d.mayOutgrow(next.Path, old, so)
		}
		to := func(ctx context.Context, size int64) error {
			if err := outgrows(true); err != nil && size != old { // what is taken back has to be, in any case
				return err
			}
			_, err := d.calls.do(ctx, d.waits.slow, storeKey(t.name, &next), fmt.Sprintf("giving it %d octets", size),
				func(*call) (*lun.Unit, error) { return nil, served.unit.Resize(size) },
				func(_ *lun.Unit, err error) { // the change is not made
					if err == nil {
						err = served.unit.Resize(old)
					}
					if err == nil {
						err = outgrows(false)
					}
					d.log.Warn("the store answers that nobody waited for", "target", t.name, "lun", next.ID, "octets", served.unit.Size(), "reason", err)
				})
			if !errors.Is(err, ErrStuck) { // else when it is back
				err = errors.Join(err, outgrows(false))
			}
			return err
		}
		if err := to(c.ctx, int64(next.Size)); err != nil {
			return err
		}
		c.undoing(func() error { return to(c.lasting(), old) })
	}
	l := *served
	l.Size = next.Size
	c.become(t, &l)
	return nil
}

// replace opens a LUN anew. The data of a memory LUN stays if its size and blocks do.
func (c *change) replace(t *servedTarget, next config.LUN) error {
	d, old := c.d, t.luns[next.ID]
	if err := c.letGo(next.Path); err != nil {
		return err
	}
	between, err := lun.NewOpening(uint32(next.BlockSize), d.unitOptions(&next, old.unit.Identity()))
	if err != nil {
		return err
	}
	t.inventory.Replace(uint16(next.ID), between)
	c.undoing(func() error {
		t.inventory.Replace(uint16(next.ID), between)
		last := t.luns[next.ID]
		l, failed := c.openAnew(t, last, old.LUN)
		if failed != nil { // it is tried again
			var err error
			if l, err = d.notReady(t, old.LUN, old.fresh, nil, failed); err != nil {
				return errors.Join(failed, err)
			}
		}
		if last.unit.Identity() != old.unit.Identity() { // it was to be another disk
			last = old
		}
		l.unit.InheritFrom(last.unit)
		t.inventory.Replace(uint16(next.ID), l.unit)
		d.mu.Lock()
		t.luns[next.ID] = l
		d.mu.Unlock()
		if old.fault != nil { // it was not ready before
			failed = nil
		}
		return errors.Join(failed, t.inventory.SetMask(uint16(next.ID), mustMask(old.LUN)))
	})
	ctx, cancel := context.WithTimeout(c.ctx, c.turnDrain())
	left, err := d.node.Drain(ctx, t.inventory, uint16(next.ID))
	cancel()
	if err != nil {
		c.notes = append(c.notes, fmt.Sprintf("%d commands for LUN %d were cut off", left, next.ID))
	}
	l, err := c.reopen(t, old, next)
	if err != nil {
		return err
	}
	mask, err := maskOf(next)
	if err == nil {
		err = t.inventory.SetMask(uint16(next.ID), mask)
	}
	if err != nil {
		return errors.Join(err, c.giveUp(t, l, d.waits.close))
	}
	t.inventory.Replace(uint16(next.ID), l.unit)
	d.mu.Lock()
	t.luns[next.ID] = l
	d.mu.Unlock()
	return nil
}

// mustMask is the mask of a LUN that had it before.
func mustMask(l config.LUN) lun.Mask {
	m, err := maskOf(l)
	if err != nil {
		return func(string) lun.Access { return lun.NoAccess }
	}
	return m
}

// reopen closes the unit of a LUN that is out of reach and makes another one of what it
// lies on, or of what next does. If that is the same disk its reservations stay.
func (c *change) reopen(t *servedTarget, l *servedLUN, next config.LUN) (*servedLUN, error) {
	anew, err := c.openAnew(t, l, next)
	if err == nil {
		anew.unit.InheritFrom(l.unit)
	}
	return anew, err
}

func (c *change) openAnew(t *servedTarget, l *servedLUN, next config.LUN) (*servedLUN, error) {
	d := c.d
	if l.fault == nil && l.Backend == "memory" && next.Backend == "memory" && l.BlockSize == next.BlockSize {
		id, err := d.ids.Get(identityKey(t.name, &next))
		if err != nil {
			return nil, err
		}
		unit, err := lun.New(l.unit.Detach(), d.unitOptions(&next, id))
		if err != nil {
			return nil, err
		}
		if int64(next.Size) != unit.Size() {
			err = unit.Resize(int64(next.Size))
		}
		return &servedLUN{LUN: next, unit: unit}, err
	}
	if !l.closed {
		if err := c.giveUp(t, l, d.waits.slow); err != nil && !errors.Is(err, backend.ErrClosed) {
			return nil, err
		}
		d.mu.Lock()
		l.closed = true
		d.mu.Unlock()
	}
	return d.openLUN(c.lasting(), d.waits.store, t, next)
}

func (c *change) addPortal(ch config.Change) error {
	d := c.d
	p, err := d.listen(*portalOf(c.cfg, ch.Portal))
	if err != nil {
		return err
	}
	d.mu.Lock()
	d.portals = append(d.portals, p)
	d.mu.Unlock()
	d.accept(p)
	c.undoing(func() error {
		d.dropPortal(p)
		return p.l.Close()
	})
	return nil
}

// dropPortal takes p out of the list and out of what discovery answers.
func (d *Daemon) dropPortal(p *portal) {
	d.node.RemovePortal(p.cur.Load().Portal)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.portals = slices.DeleteFunc(slices.Clone(d.portals), func(o *portal) bool { return o == p })
}

// portal is the one that is configured so, or nil. It is the caller's turn.
func (d *Daemon) portal(listen string) *portal {
	i := slices.IndexFunc(d.portals, func(p *portal) bool { return p.cur.Load().cfg.Listen == listen })
	if i < 0 {
		return nil
	}
	return d.portals[i]
}

func (c *change) removePortal(ch config.Change) error {
	d, p := c.d, c.d.portal(ch.Portal)
	if p == nil {
		return ErrNotFound
	}
	if p.passed {
		return errors.New("its socket belongs to the service manager: take it out of the socket unit and out of the configuration, and start both again")
	}
	cur := p.cur.Load()
	d.dropPortal(p)
	if err := p.l.Close(); err != nil {
		return err
	}
	c.undoing(func() error {
		again, err := d.listen(cur.cfg)
		if err != nil {
			return err
		}
		d.mu.Lock()
		d.portals = append(d.portals, again)
		d.mu.Unlock()
		d.accept(again)
		return nil
	})
	c.ending = append(c.ending, func(s *iscsi.SessionInfo) string { return p.reason(s, "portal was removed") })
	return nil
}

// reason is why, if the session has a connection by way of p.
func (p *portal) reason(s *iscsi.SessionInfo, why string) string {
	if p.connections(s) > 0 {
		return why
	}
	return ""
}

func (c *change) updatePortal(ch config.Change) error {
	d, p, next := c.d, c.d.portal(ch.Portal), portalOf(c.cfg, ch.Portal)
	if p == nil {
		return ErrNotFound
	}
	old := d.describePortal(p, *next)
	c.undoing(func() error {
		d.describePortal(p, old.cfg)
		return nil
	})
	if old.cfg.TPGT != next.TPGT {
		c.ending = append(c.ending, func(s *iscsi.SessionInfo) string {
			if s.TPGT == uint16(next.TPGT) {
				return "" // it is new
			}
			return p.reason(s, "portal is in another portal group")
		})
	}
	return nil
}

// refreshPaths tells targets which portal groups lead to them now.
func (c *change) refreshPaths() error {
	d := c.d
	for _, t := range d.targets {
		tc := c.targetConfig(t.name)
		if tc == nil {
			continue
		}
		ic, err := t.config(tc, c.cfg)
		if err != nil {
			return err
		}
		if oc := targetOf(d.cfg, t.name); oc != nil {
			if slices.Equal(d.cfg.TPGTs(oc), ic.PortalGroups) {
				continue
			}
			was, err := t.config(oc, d.cfg)
			if err != nil {
				return err
			}
			c.undoing(func() error {
				t.inventory.SetPorts(was.PortalGroups...)
				return d.node.UpdateTarget(was)
			})
		}
		if err := d.node.UpdateTarget(ic); err != nil {
			return err
		}
		t.inventory.SetPorts(ic.PortalGroups...)
	}
	return nil
}

func (c *change) updateOptions(config.Change) error {
	d := c.d
	o, err := d.nodeOptions(c.cfg)
	if err != nil {
		return err
	}
	was, err := d.nodeOptions(d.cfg)
	if err != nil {
		return err
	}
	d.node.SetOptions(o)
	d.setLimits(c.cfg)
	c.undoing(func() error {
		d.node.SetOptions(was)
		d.setLimits(d.cfg)
		return nil
	})
	return nil
}

func (c *change) updateLog(config.Change) error {
	d := c.d
	d.level.Set(c.cfg.Log.SlogLevel())
	c.undoing(func() error {
		d.level.Set(d.cfg.Log.SlogLevel())
		return nil
	})
	return nil
}

// relisten moves a server to where address says that it listens.
func (c *change) relisten(close func(), listen func(string) error, address func(*config.Config) string) error {
	close()
	c.undoing(func() error {
		close()
		return listen(address(c.d.cfg))
	})
	return listen(address(c.cfg))
}

func (c *change) updateDebug(config.Change) error {
	return c.relisten(c.d.closeDebug, c.d.listenDebug, func(cfg *config.Config) string { return cfg.Debug.Listen })
}

func (c *change) updateMetrics(config.Change) error {
	return c.relisten(c.d.closeMetrics, c.d.listenMetrics, func(cfg *config.Config) string { return cfg.Metrics.Listen })
}

func (c *change) updateDashboard(config.Change) error {
	return c.relisten(c.d.closeDashboard, c.d.listenDashboard, func(cfg *config.Config) string { return cfg.Dashboard.Listen })
}

// endSessions ends sessions at once.
func (c *change) endSessions(match func(*iscsi.SessionInfo) bool, reason string) {
	for _, s := range c.d.node.Sessions() {
		if match(&s) {
			c.d.endSession(c.ctx, s.TSIH, 0, reason) // it ends in any case
		}
	}
}

// endSlack is how long the end of a session may take beyond the time it was given.
const endSlack = 5 * time.Second

func (d *Daemon) endSession(ctx context.Context, tsih uint16, grace time.Duration, reason string) error {
	ctx, cancel := context.WithTimeout(ctx, grace+endSlack)
	defer cancel()
	err := d.node.EndSession(ctx, tsih, grace, errors.New(reason))
	if errors.Is(err, iscsi.ErrNoSession) {
		return nil // it has ended by itself
	}
	return err
}
