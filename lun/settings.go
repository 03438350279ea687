package lun

import (
	"context"
	"errors"
	"fmt"

	"github.com/iser-target/iser-target/lun/invariant"
	"github.com/iser-target/iser-target/lun/state"
)

// Settings keeps what initiators set permanently in logical units: saved mode pages, the states
// of target port groups, and identifying information. Those of all units are in one file, or in a home that gateways share.
// Several goroutines may use it at once.
type Settings = state.Keeper[settingsEntry]

// sharedSettingsKey and the NAA are the key of a settingsEntry in a home that gateways share.
const sharedSettingsKey = "settings/"

// A settingsEntry is the record of a unit.
type settingsEntry struct {
	NAA        string           `json:"naa"`         // Identity.Serial
	Mode       *modeEntry       `json:"mode"`        // saved mode pages; null: none are saved
	PortGroups []portGroupEntry `json:"port_groups"` // those with a state that was set, ascending by tag
	// Identifying is nil if initiators wrote nothing.
	Identifying *identifyingEntry `json:"identifying,omitempty"`
}

type modeEntry struct {
	WCE              bool `json:"wce"`               // Caching
	SWP              bool `json:"swp"`               // Control
	DescriptorSense  bool `json:"d_sense,omitempty"` // Control
	SeparateTaskSets bool `json:"tst,omitempty"`     // Control: TST 001b
	// Thresholds is nil if they are those of the configuration.
	Thresholds *thresholdsEntry `json:"thresholds,omitempty"`
	AppTags    *appTagsEntry    `json:"application_tags,omitempty"` // nil: none
}

type portGroupEntry struct {
	Tag   uint16 `json:"tag"`
	State string `json:"state"` // of accessStates
}

func (e settingsEntry) Unit() string { return e.NAA }

func (e settingsEntry) Check() error {
	if e.PortGroups == nil {
		return errors.New("port_groups is null, want a list")
	}
	if err := e.Identifying.check(); err != nil {
		return err
	}
	if e.Mode != nil {
		if err := e.Mode.AppTags.check(); err != nil {
			return err
		}
	}
	for i, g := range e.PortGroups {
		if _, ok := g.state(); !ok {
			return fmt.Errorf("port_groups[%d]: state %.40q is unknown", i, g.State)
		}
		if g.Tag == 0 || i > 0 && g.Tag <= e.PortGroups[i-1].Tag {
			return fmt.Errorf("port_groups[%d]: tag %d: want tags that ascend from 1", i, g.Tag)
		}
	}
	return nil
}

func (g portGroupEntry) state() (s AccessState, ok bool) {
	for s := ActiveOptimized; s <= Unavailable; s++ {
		if s.String() == g.State {
			return s, true
		}
	}
	return 0, false
}

// OpenSettings opens the file at path, as state.Open does. A damaged file is an error: without it
// a unit that was write protected would not be.
func OpenSettings(path string) (*Settings, error) {
	return state.OpenKeeper(settingsFormat, path)
}

// OpenSharedSettings opens the settings that home has under the keys settings/NAA, as state.OpenKeeperIn does. Other gateways have units
// for the same NAA. The caller uses Follow, to call AdoptSettings of the unit whose record has changed.
//
// The mode pages of such a unit are those of all gateways: the current values are the saved ones. So MODE SELECT without SP is refused
// (SPC-4, section 6.9).
func OpenSharedSettings(ctx context.Context, home state.Home) (*Settings, error) {
	return state.OpenKeeperIn(ctx, settingsFormat, home, sharedSettingsKey)
}

// ExamineSettings looks at the file of OpenSettings.
func ExamineSettings(path string, known []string) state.Condition {
	return state.ExamineRecords(settingsFormat, path, known)
}

// SalvageSettings does what state.Salvage does, for that file.
func SalvageSettings(path string, known []string) ([]state.Loss, error) {
	return state.Salvage(settingsFormat, path, known)
}

var settingsFormat = state.Format[state.Records[settingsEntry]]{Name: "settings", Version: 1}

// freshSettings returns the record of a unit of which nothing is kept.
func (u *Unit) freshSettings() settingsEntry {
	return settingsEntry{NAA: u.opt.Identity.Serial, PortGroups: []portGroupEntry{}}
}

// modesOf returns the mode parameters that e saves. e may be nil: the defaults.
func (u *Unit) modesOf(e *modeEntry) modeValues {
	v := u.defaults()
	if e == nil {
		return v
	}
	provisioning, l := e.Thresholds.values(v.modes, v.levels)
	atmpe, tags := e.AppTags.values()
	return modeValues{v.modes&^u.modeMutable | (e.modes()|provisioning|atmpe)&u.modeMutable, l, tags}
}

// restoreSettings loads what is kept of the unit.
func (u *Unit) restoreSettings() error {
	kept := u.freshSettings()
	if u.opt.Settings != nil {
		e, ok, err := u.opt.Settings.Get(u.opt.Identity.Serial)
		if err != nil {
			return err
		}
		if ok {
			kept = e
		}
	}
	v := u.modesOf(kept.Mode)
	u.setSaved(v)
	u.setCurrent(v)
	u.identifying.Store(kept.Identifying)
	if len(kept.PortGroups) > 0 && !u.opt.ImplicitAccess {
		set := portGroups{}
		for _, g := range kept.PortGroups {
			set[g.Tag], _ = g.state()
		}
		u.access.Store(&set)
	}
	return nil
}

// setSaved makes v the mode parameters after a reset.
func (u *Unit) setSaved(v modeValues) {
	u.modeSaved.Store(v.modes)
	u.levelsSaved.Store(uint64(v.levels))
	u.tagsSaved.Store(&v.tags)
}

// setCurrent makes v the mode parameters of now. Unlike setModes it does not sync the store.
func (u *Unit) setCurrent(v modeValues) {
	u.mode.Store(v.modes)
	u.levels.Store(uint64(v.levels))
	u.tags.Store(&v.tags)
	u.useTags()
}

// keep stores what edit makes of the record of the unit, if Options.Settings is set, and calls commit with it, which puts
// it in force, with u.settingsMu held. edit may be called several times, and neither function waits. After an error the old record
// counts. If another gateway has changed the record, that change is in force before.
//
// Preconditions: the caller has the turn u.settings. u.settingsMu is not held.
func (u *Unit) keep(p state.Patience, edit func(settingsEntry) settingsEntry, commit func(settingsEntry)) error {
	if u.opt.Settings == nil {
		u.settingsMu.Lock()
		defer u.settingsMu.Unlock()
		commit(edit(u.freshSettings()))
		return nil
	}
	var was, e settingsEntry // of the last edit
	p.Commit = func() bool {
		u.settingsMu.Lock()
		defer u.settingsMu.Unlock()
		if u.opt.Settings.Shared() {
			u.adopt(was, nil)
		}
		commit(e)
		return true
	}
	_, err := u.opt.Settings.Update(u.opt.Identity.Serial, p, func(r settingsEntry, ok bool) settingsEntry {
		if was = r; !ok {
			was = u.freshSettings()
		}
		e = edit(was)
		return e
	})
	return err
}

// AdoptSettings puts in force what another gateway has changed in the shared settings, and notifies all initiators of that. Call it from
// Settings.Follow only: so it comes in the order of the changes.
func (u *Unit) AdoptSettings() {
	if !u.opt.Settings.Shared() {
		return
	}
	e, ok, err := u.opt.Settings.Get(u.opt.Identity.Serial)
	switch {
	case err != nil: // what is in force stays
		u.notStored(err)
		return
	case !ok:
		e = u.freshSettings()
	}
	u.settingsMu.Lock()
	defer u.settingsMu.Unlock()
	u.adopt(e, nil)
}

// knownSettings are what initiators of a unit know that had it before another Unit, or another process, took its place.
type knownSettings struct {
	modes       modeValues
	identifying *identifyingEntry
}

// raiseUnknown makes the attentions due about shared settings that the nexus does not know, because they have changed before u.seen had it.
func (l *itl) raiseUnknown() {
	u := l.unit
	if u.known == nil {
		return
	}
	if u.current() != u.known.modes {
		l.raise(condModeChanged)
	}
	if !u.identifying.Load().equal(u.known.identifying) {
		l.raise(condIdentifierChanged)
	}
}

// adopt puts shared settings in force, and notifies all nexuses except by, which may be nil, of what changed. It returns the mode
// parameters before and after that, and whether the identifying information has changed.
//
// Preconditions: u.settingsMu is held.
func (u *Unit) adopt(e settingsEntry, by *Nexus) (old, now modeValues, identifying bool) {
	invariant.Held(&u.settingsMu)
	old, now = u.current(), u.modesOf(e.Mode)
	u.setSaved(now)
	u.setCurrent(now)
	was := u.identifying.Swap(e.Identifying)
	identifying = !was.equal(e.Identifying)
	if old != now {
		u.raise(condModeChanged, by)
	}
	if identifying {
		u.raise(condIdentifierChanged, by)
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.forgetChangedBy(old != now, identifying)
	return old, now, identifying
}
