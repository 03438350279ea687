package lun

import (
	"errors"
	"fmt"

	"github.com/iser-target/iser-target/backend/protection"
	"github.com/iser-target/iser-target/lun/state"
)

// Settings keeps what initiators set permanently in logical units: saved mode pages, the states
// of target port groups, and identifying information. Those of all units are in one file. Several goroutines may use it at once.
type Settings = state.Keeper[settingsEntry]

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

// ExamineSettings looks at the file of OpenSettings.
func ExamineSettings(path string, known []string) state.Condition {
	return state.ExamineRecords(settingsFormat, path, known)
}

// SalvageSettings does what state.Salvage does, for that file.
func SalvageSettings(path string, known []string) ([]state.Loss, error) {
	return state.Salvage(settingsFormat, path, known)
}

var settingsFormat = state.Format[state.Records[settingsEntry]]{Name: "settings", Version: 1}

// restoreSettings loads what the file keeps of the unit.
func (u *Unit) restoreSettings() error {
	modes, l := u.modeDefault.Load(), levels(u.levelsDefault.Load())
	var tags protection.AppTags
	if u.opt.Settings != nil {
		kept, ok, err := u.opt.Settings.Get(u.opt.Identity.Serial)
		if err != nil {
			return err
		}
		if !ok {
			kept = settingsEntry{NAA: u.opt.Identity.Serial, PortGroups: []portGroupEntry{}}
		}
		u.kept = kept
		if kept.Mode != nil {
			var provisioning, atmpe uint32
			provisioning, l = kept.Mode.Thresholds.values(modes, l)
			atmpe, tags = kept.Mode.AppTags.values()
			modes = modes&^u.modeMutable | (kept.Mode.modes()|provisioning|atmpe)&u.modeMutable
		}
	}
	u.modeSaved.Store(modes)
	u.mode.Store(modes)
	u.levelsSaved.Store(uint64(l))
	u.levels.Store(uint64(l))
	u.tagsSaved.Store(&tags)
	u.tags.Store(&tags)
	u.useTags()
	u.identifying.Store(u.kept.Identifying)
	if len(u.kept.PortGroups) > 0 && !u.opt.ImplicitAccess {
		set := portGroups{}
		for _, g := range u.kept.PortGroups {
			set[g.Tag], _ = g.state()
		}
		u.access.Store(&set)
	}
	return nil
}

// keep stores e as the record of the unit, if Options.Settings is set, and calls commit, which puts
// it in force, with u.settingsMu held. After an error the old record counts.
//
// Preconditions: the caller has the turn u.settings. u.settingsMu is not held.
func (u *Unit) keep(e settingsEntry, p state.Patience, commit func()) error {
	p.Commit = func() bool {
		u.settingsMu.Lock()
		defer u.settingsMu.Unlock()
		if u.opt.Settings != nil {
			u.kept = e
		}
		commit()
		return true
	}
	if u.opt.Settings == nil {
		p.Commit()
		return nil
	}
	_, err := u.opt.Settings.Put(e, p)
	return err
}

// keptSettings returns the record of the unit.
func (u *Unit) keptSettings() settingsEntry {
	u.settingsMu.Lock()
	defer u.settingsMu.Unlock()
	return u.kept
}
