package daemon

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/state"
)

// groupRecords are what all gateways have of shared LUNs besides reservations and media.
type groupRecords struct {
	settings      *lun.Settings      // nil: see err
	failures      *lun.SyncFailures  // nil: see err
	sanitizations *lun.Sanitizations // nil: see err
	err           error              // why they cannot be opened
}

// usable reports whether they can be used. k may be nil.
func (k *groupRecords) usable() bool { return k != nil && k.err == nil }

// reason returns why they cannot be used, unless that is only because etcd does not answer. k may be nil.
func (k *groupRecords) reason() error {
	if k == nil || errors.Is(k.err, state.ErrUnreachable) {
		return nil
	}
	return k.err
}

// close ends them. k may be nil.
func (k *groupRecords) close() error {
	if !k.usable() {
		return nil
	}
	return errors.Join(k.settings.Close(), k.failures.Close(), k.sanitizations.Close())
}

// records returns the records of shared LUNs. They are nil if etcd has not answered yet: no such LUN is ready then.
func (g *group) records() groupRecords {
	k := g.kept.Load()
	if !k.usable() {
		return groupRecords{}
	}
	return *k
}

// An ownersHome is the home of values that only the gateway changes that owns the LUN, by whose serial the keys end.
type ownersHome struct {
	state.Home
	g *group
}

// Put implements state.Home.
func (h ownersHome) Put(ctx context.Context, key string, data []byte, base state.Revision) (state.Revision, error) {
	l, err := h.g.find(key[strings.LastIndexByte(key, '/')+1:])
	if err != nil {
		return 0, err
	}
	if u := l.gate.unit.Load(); u != nil {
		return u.Put(ctx, key, data, base)
	}
	return 0, fmt.Errorf("%w: this gateway has left the others", state.ErrConflict)
}

// openRecords opens the records, unless it has done that.
func (g *group) openRecords(ctx context.Context) (err error) {
	g.opening.Lock()
	defer g.opening.Unlock()
	if g.kept.Load().usable() {
		return nil
	}
	k := &groupRecords{}
	if k.settings, err = lun.OpenSharedSettings(ctx, g.home); err == nil {
		k.failures, err = lun.OpenSharedSyncFailures(ctx, g.home)
	}
	if err == nil {
		k.sanitizations, err = lun.OpenSharedSanitizations(ctx, ownersHome{g.home, g})
	}
	if k.err = err; err == nil {
		limit := &g.d.net.limits.StateTimeout
		late := func() { limit.Bite("cluster") }
		k.settings.SetLimit(limit.Time, late)
		k.failures.SetLimit(limit.Time, late)
		k.sanitizations.SetLimit(limit.Time, late)
	}
	g.kept.Store(k)
	return err
}

// followRecords puts in force what other gateways change in the records, until the group is closed.
func (g *group) followRecords() {
	for told := ""; g.ctx.Err() == nil; sleepFor(g.ctx, time.Second) {
		ctx, cancel := context.WithTimeout(g.ctx, joinTime)
		err := g.openRecords(ctx)
		cancel()
		if err == nil {
			err = g.listen()
		}
		if err == nil {
			<-g.ctx.Done()
			return
		}
		if text := err.Error(); text != told && g.ctx.Err() == nil {
			g.d.log.Error("settings of shared LUNs cannot be followed", eventKey, "cluster", "reason", err)
			told = text
		}
	}
}

// listen begins to follow the records.
func (g *group) listen() error {
	k := g.kept.Load()
	ctx, cancel := context.WithCancel(g.ctx)
	err := k.settings.Follow(ctx, g.tell((*lun.Unit).AdoptSettings))
	if err == nil {
		err = k.failures.Follow(ctx, g.tell((*lun.Unit).AdoptFailure))
	}
	if err != nil {
		cancel()
		return err
	}
	context.AfterFunc(g.ctx, cancel)
	return nil
}

// tell returns a function that calls adopt with the unit of a shared LUN.
func (g *group) tell(adopt func(*lun.Unit)) func(serial string) {
	return func(serial string) {
		var unit *lun.Unit
		g.mu.Lock() // a unit that is being made has the record of before, or is found here
		if l := g.luns[serial]; l != nil {
			unit = l.unit
		}
		g.mu.Unlock()
		if unit != nil {
			adopt(unit)
		}
	}
}

// mayRecover refuses to recover a shared LUN whose store another gateway has open: a store that has failed would fail again. g may be nil.
func (g *group) mayRecover(l *config.LUN) error {
	if g == nil || !l.Shared {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.gw == nil {
		return nil
	}
	if server := g.gw.Server(sharedIdentity(l).Serial); server != "" && server != g.c.Name {
		return clusterError(fmt.Sprintf("gateway %s serves the LUN. Nothing was changed. Recover it there, or hand it over first", server))
	}
	return nil
}

// unlearnMedium notes that a gateway has removed what the home had of a medium. It is put back if the medium is open here.
func (g *group) unlearnMedium(serial string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.media, serial)
	l := g.luns[serial]
	if l == nil || l.medium == nil {
		return
	}
	info := l.medium.Info()
	g.done.Go(func() {
		ctx, cancel := context.WithTimeout(g.ctx, joinTime)
		defer cancel()
		if err := g.noteMedium(ctx, serial, info); err != nil {
			g.d.log.Warn("other gateways do not learn what a medium is like", eventKey, "cluster", "naa", serial, "reason", err)
		}
	})
}

// erase removes from etcd what is there of a shared LUN that was removed here and that no other gateway has: what its medium is like, its
// preference, a failed sync, and a sanitize. Settings and reservations stay, as in the state directory.
func (g *group) erase(c *config.LUN) {
	if g == nil {
		return
	}
	ctx, cancel := context.WithTimeout(g.ctx, handTime)
	defer cancel()
	serial := sharedIdentity(c).Serial
	log := g.d.log.With(eventKey, "cluster", "naa", serial)
	g.mu.Lock()
	gw := g.gw
	has, known := g.whoHas()
	g.mu.Unlock()
	if gw == nil || gw.Err() != nil || !known || has[serial] {
		return
	}
	err := gw.Prefer(ctx, serial, "")
	if failures := g.records().failures; err == nil && failures != nil {
		_, err = failures.Remove(serial, state.Patience{})
	}
	for _, key := range []string{lun.SharedSanitizeKey, mediumKey} { // the medium last: it names what is left
		if err == nil {
			err = g.removeValue(ctx, key+serial)
		}
	}
	if err != nil {
		log.Warn("values of a removed LUN stay in etcd", "reason", err)
	}
	g.mu.Lock()
	var left []string
	for naa := range g.media {
		if !has[naa] && naa != serial && g.luns[naa] == nil {
			left = append(left, naa)
		}
	}
	g.mu.Unlock()
	if len(left) > 0 {
		slices.Sort(left)
		log.Warn("etcd has values of LUNs that no gateway has", "left", strings.Join(left, " "))
	}
}

// whoHas returns the shared LUNs that a gateway has that is there. known is false if one of them does not say. g.mu is held.
func (g *group) whoHas() (has map[string]bool, known bool) {
	has, known = map[string]bool{}, true
	for serial := range g.luns {
		has[serial] = true
	}
	if g.gw == nil {
		return has, false
	}
	for _, m := range g.gw.Members() {
		n := noteOf(m)
		if n.LUNs == nil {
			known = false
		}
		if m.Name == g.c.Name {
			continue // of a moment ago
		}
		for _, serial := range n.LUNs {
			has[serial] = true
		}
	}
	return has, known
}

// removeValue removes what the home has under the key.
func (g *group) removeValue(ctx context.Context, key string) error {
	for {
		v, err := g.home.Get(ctx, key)
		if err != nil || v.Data == nil {
			return err
		}
		if _, err = g.home.Put(ctx, v.Key, nil, v.Revision); !errors.Is(err, state.ErrConflict) {
			return err
		}
	}
}
