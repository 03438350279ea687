package lun

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/iser-target/iser-target/backend/protection"
	"github.com/iser-target/iser-target/lun/invariant"
)

// Names of settings that initiators change for all. That of an access state ends with the tag of
// the target port group.
const (
	settingWriteProtect    = "write_protect"      // SWP
	settingWriteCache      = "write_cache"        // WCE
	settingDescriptorSense = "descriptor_sense"   // D_SENSE
	settingTaskSets        = "separate_task_sets" // TST
	settingMedium          = "medium"             // ready, stopped or ejected
	settingAccess          = "access_state_"

	settingAppTags      = "application_tags"       // ATMPE
	settingAppTagRanges = "application_tag_ranges" // of the Application Tag mode page

	settingThresholdReports = "threshold_attentions"       // LBPERE
	settingThresholdSingle  = "threshold_single_initiator" // SITUA
	settingThreshold        = "initiator_threshold_"       // with one of ThresholdNames
)

// A Setting is a state of a unit that initiators change for all.
type Setting struct {
	Name    string
	Value   string
	Default string
	Saved   string // its value after a reset and after a restart
	By      string // the initiator that changed it last; empty: none since the unit opened
}

// onOff names the state of a bit.
func onOff(modes, bit uint32) string {
	if modes&bit != 0 {
		return "on"
	}
	return "off"
}

// medium returns the value of the setting medium.
func (u *Unit) medium() string {
	switch {
	case u.ejected.Load():
		return "ejected"
	case u.stopped.Load():
		return "stopped"
	}
	return "ready"
}

// Settings returns the settings of the unit. It does not wait for the store.
func (u *Unit) Settings() []Setting {
	if u.Absent() {
		return nil
	}
	now, saved := u.mode.Load(), u.modeSaved.Load()
	var list []Setting
	for _, m := range modeNames {
		if u.modeMutable&^provisioningModes&m.mode != 0 {
			list = append(list, Setting{Name: m.name, Value: onOff(now, m.mode), Default: onOff(u.modeDefault.Load(), m.mode), Saved: onOff(saved, m.mode)})
		}
	}
	list = append(list, u.tagSettings()...)
	list = append(list, u.thresholdSettings()...)
	list = append(list, Setting{Name: settingMedium, Value: u.medium(), Default: "ready", Saved: "ready"})
	if g := u.access.Load(); g != nil && !u.opt.ImplicitAccess {
		for _, tag := range slices.Sorted(maps.Keys(*g)) {
			value := accessStates[(*g)[tag]].name
			list = append(list, Setting{Name: accessName(tag), Value: value, Default: accessStates[ActiveOptimized].name, Saved: value})
		}
	}
	list = append(list, u.identifyingSettings()...)
	u.mu.Lock()
	defer u.mu.Unlock()
	for i := range list {
		list[i].By = u.changedBy[list[i].Name]
	}
	return list
}

func accessName(tag uint16) string { return fmt.Sprintf("%s%d", settingAccess, tag) }

// changed notes that c changed a setting, and reports it.
//
// Preconditions: u.mu is not held.
func (c *Command) changed(setting, value string) {
	u := c.unit
	u.mu.Lock()
	if u.changedBy == nil {
		u.changedBy = map[string]string{}
	}
	u.changedBy[setting] = c.nexus.port.InitiatorName
	u.mu.Unlock()
	u.opt.Events(SettingChangedEvent{
		Target: c.nexus.port.TargetName, LUN: c.itl.id, Initiator: c.nexus.port.InitiatorName,
		Command: c.row.name, Setting: setting, Value: value,
	})
}

// forgetChangedBy forgets the initiators that changed the mode parameters, or the identifying information, last.
//
// Preconditions: u.mu is held.
func (u *Unit) forgetChangedBy(modes, identifying bool) {
	invariant.Held(&u.mu)
	if modes {
		for _, m := range modeNames {
			delete(u.changedBy, m.name)
		}
		for _, name := range ThresholdNames {
			delete(u.changedBy, settingThreshold+name)
		}
		delete(u.changedBy, settingAppTagRanges)
	}
	if identifying {
		delete(u.changedBy, settingIdentifying)
		delete(u.changedBy, settingIdentifyingText)
	}
}

// changedModes calls changed for the modes that differ.
func (c *Command) changedModes(old, now uint32) {
	for _, m := range modeNames {
		if (old^now)&m.mode != 0 {
			c.changed(m.name, onOff(now, m.mode))
		}
	}
}

// changedAccess calls changed for the states of port groups that differ.
func (c *Command) changedAccess(old, now portGroups) {
	for _, tag := range slices.Sorted(maps.Keys(now)) {
		if old[tag] != now[tag] {
			c.changed(accessName(tag), accessStates[now[tag]].name)
		}
	}
}

// changedMedium calls changed if the medium is not in the state that it was in.
func (c *Command) changedMedium(was string) {
	if now := c.unit.medium(); now != was {
		c.changed(settingMedium, now)
	}
}

var errNoSettings = errors.New("the LUN has no store now, so its settings cannot be reset; nothing was changed")

// ResetSettings restores the defaults of all Settings, also of those that are saved, and notifies
// all initiators of what changed. It reports whether anything did. An error of storage leaves all
// as it was. After an error of the store the defaults are in force, but earlier writes may be lost.
func (u *Unit) ResetSettings() (changed bool, err error) {
	if u.Absent() {
		return false, errNoSettings
	}
	p, err := u.settings.take(nil, u.opt.Settings)
	if err != nil {
		return false, err
	}
	defer u.settings.give()
	var access *portGroups
	var identifying *identifyingEntry
	var modes bool
	shared := u.opt.Settings.Shared()
	err = u.keep(p, func(e settingsEntry) settingsEntry {
		changed = e.Mode != nil || len(e.PortGroups) > 0
		return u.freshSettings()
	}, func(e settingsEntry) {
		if shared {
			old, now, informed := u.adopt(e, nil)
			changed = changed || informed || old != now
			return
		}
		if identifying = u.identifying.Swap(nil); !u.opt.ImplicitAccess {
			access = u.access.Swap(nil)
		}
		u.setSaved(u.defaults())
	})
	if err != nil {
		return false, err
	}
	if !shared {
		u.settingsMu.Lock()
		modes = (u.mode.Load()^u.modeDefault.Load())&u.modeMutable != 0
		modes = u.levels.Swap(u.levelsDefault.Load()) != u.levelsDefault.Load() || modes
		modes = tagsOf(&u.tags) != (protection.AppTags{}) || modes
		u.tags.Store(nil)
		err = u.setModes(nil, u.modeMutable, u.modeDefault.Load())
		u.useTags()
		u.settingsMu.Unlock()
	}
	if modes {
		u.raise(condModeChanged, nil)
	}
	altered := access != nil && slices.ContainsFunc(slices.Collect(maps.Values(*access)), func(s AccessState) bool {
		return s != ActiveOptimized
	})
	if altered {
		u.raise(condAccessChanged, nil)
	}
	if identifying != nil {
		u.raise(condIdentifierChanged, nil)
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	clear(u.changedBy)
	stopped, ejected := u.stopped.Swap(false), u.ejected.Swap(false)
	if ejected {
		u.raiseLocked(condMediumChanged, nil)
	}
	return changed || modes || altered || identifying != nil || stopped || ejected, err
}
