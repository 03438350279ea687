package lun

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"math/bits"
	"slices"

	"github.com/iser-target/iser-target/backend"
)

// A PathState is what a logical unit owes to one nexus, or has from it, and keeps in memory only.
type PathState struct {
	LUN        uint16   `json:"lun"`
	Attentions []string `json:"attentions,omitempty"` // that are due: ASC and ASCQ, "29/00"
	Prevents   bool     `json:"prevents,omitempty"`   // PREVENT ALLOW MEDIUM REMOVAL
	Reserves   bool     `json:"reserves,omitempty"`   // it holds the unit by RESERVE
}

// code returns ASC and ASCQ of a unit attention.
func (k Sense) code() string { return fmt.Sprintf("%02x/%02x", k.ASC, k.ASCQ) }

// State returns what another process needs to continue the nexus. No command is in progress.
func (n *Nexus) State() []PathState {
	list := make([]PathState, 0, len(n.list()))
	for _, l := range n.list() {
		st := PathState{LUN: l.id}
		for due := l.due.Load(); due != 0; due &= due - 1 {
			st.Attentions = append(st.Attentions, attentions[bits.TrailingZeros32(due)].code())
		}
		l.unit.mu.Lock()
		st.Prevents = l.prevents
		l.unit.mu.Unlock()
		r := &l.unit.reservations
		r.mu.Lock()
		st.Reserves = r.legacy == n
		r.mu.Unlock()
		list = append(list, st)
	}
	return list
}

// Restore gives a new nexus the state of one of another process. A logical unit that is not in list keeps its
// unit attentions: the initiator does not know it. What list has of logical units that do not exist is
// dropped.
func (n *Nexus) Restore(list []PathState) {
	for _, st := range list {
		i, ok := slices.BinarySearchFunc(n.list(), st.LUN, func(l *itl, id uint16) int { return cmp.Compare(l.id, id) })
		if !ok {
			continue
		}
		l := n.list()[i]
		var due uint32
		for _, code := range st.Attentions {
			if i := slices.IndexFunc(attentions, func(k Sense) bool { return k.code() == code }); i >= 0 {
				due |= 1 << i
			} else {
				due |= dueBit(condReset) // of a version that has other attentions: the initiator looks at everything
			}
		}
		l.due.Store(due)
		l.raiseUnknown()
		l.unit.mu.Lock()
		l.prevents = st.Prevents
		l.unit.mu.Unlock()
		r := &l.unit.reservations
		r.mu.Lock()
		if st.Reserves && r.legacy == nil {
			r.legacy = n
			r.publish()
		}
		r.mu.Unlock()
	}
}

// A UnitState is what a logical unit keeps in memory only, for all nexuses.
type UnitState struct {
	WriteCache   bool              `json:"write_cache"`                  // WCE, as it is
	WriteProtect bool              `json:"write_protect"`                // SWP
	DescSense    bool              `json:"descriptor_sense,omitempty"`   // D_SENSE
	TaskSets     bool              `json:"separate_task_sets,omitempty"` // TST 001b
	Stopped      bool              `json:"stopped,omitempty"`
	Ejected      bool              `json:"ejected,omitempty"`
	Thresholds   *thresholdsEntry  `json:"thresholds,omitempty"` // of initiators; nil: those of the configuration
	AppTags      *appTagsEntry     `json:"application_tags,omitempty"`
	Crossed      uint8             `json:"crossed,omitempty"` // thresholds that are reached: see crossed
	Clock        *clockState       `json:"clock,omitempty"`   // that an initiator has set
	PortGroups   []portGroupEntry  `json:"port_groups,omitempty"`
	Identifying  *identifyingEntry `json:"identifying,omitempty"`
	ChangedBy    map[string]string `json:"changed_by,omitempty"` // initiators, by setting
	Unsynced     bool              `json:"unsynced,omitempty"`   // a sync has failed
	Failure      *SyncFailure      `json:"failure,omitempty"`    // when and why it has
	Health       string            `json:"health"`
	Generation   uint32            `json:"generation"`            // PRGENERATION
	APTPL        bool              `json:"aptpl,omitempty"`       // of the registrations
	Reservation  *unitEntry        `json:"reservation,omitempty"` // registrations; null: none
	MadeBy       []string          `json:"made_by,omitempty"`     // the initiator that made each registration
	Shared       *sharedPosition   `json:"shared,omitempty"`      // of Options.Shared; nil: it does not know the reservations
	Views        [][2]int64        `json:"views,omitempty"`       // positions and lengths in bytes
}

// Busy returns what the unit does without a command of a session, or an empty string. It has no State then.
func (u *Unit) Busy() string {
	switch copies := u.copying.name(); {
	case u.isSanitizing() && u.sanitizer.formats.Load():
		return "FORMAT UNIT is in progress"
	case u.isSanitizing():
		return "SANITIZE is in progress"
	case copies != "":
		return copies + " is in progress"
	case u.detachedIn.Load() > 0:
		return "aborted commands have not come back from the store"
	case u.failure.storing.Load():
		return "the failure of a sync is being stored"
	}
	return ""
}

// State returns what another process needs besides the store, the state directory and the state of the
// nexuses. No command is in progress.
func (u *Unit) State() UnitState {
	modes := u.mode.Load()
	st := UnitState{
		WriteCache: modes&modeWCE != 0, WriteProtect: modes&modeSWP != 0,
		DescSense: modes&modeDSense != 0, TaskSets: modes&modeTST != 0,
		Stopped: u.stopped.Load(), Ejected: u.ejected.Load(), Health: u.Health().String(),
		Unsynced: u.unsynced.Load() || u.SyncFailure() != nil || u.Health() == Failed, Failure: u.SyncFailure(),
	}
	st.Clock = u.clock.Load().state()
	st.Thresholds, st.Crossed = u.newThresholdsEntry(modes, levels(u.levels.Load())), u.crossed()
	st.AppTags = newAppTagsEntry(modes, tagsOf(&u.tags))
	if g := u.access.Load(); g != nil && !u.opt.ImplicitAccess {
		st.PortGroups = g.entries()
	}
	st.Identifying = u.identifying.Load()
	for _, r := range u.views.ranges() {
		st.Views = append(st.Views, [2]int64{r.pos, r.n})
	}
	u.mu.Lock()
	st.ChangedBy = maps.Clone(u.changedBy)
	u.mu.Unlock()
	r := &u.reservations
	r.mu.Lock()
	defer r.mu.Unlock()
	st.Generation, st.APTPL = r.persistent.generation, r.persistent.aptpl
	if len(r.persistent.registrations) > 0 {
		e := encodeUnit(u.opt.Identity.Serial, &r.persistent)
		st.Reservation = &e
		for _, reg := range r.persistent.registrations {
			st.MadeBy = append(st.MadeBy, reg.by)
		}
	}
	st.Shared = u.group.position()
	return st
}

// Restore gives u, which nobody knows yet, the state of the unit of another process with the same identity.
func (u *Unit) Restore(st UnitState) error {
	var persistent prState
	if e := st.Reservation; e != nil {
		var err error
		switch persistent, err = e.decode(); {
		case err != nil:
			return fmt.Errorf("reservation: %w", err)
		case e.NAA != u.opt.Identity.Serial:
			return fmt.Errorf("reservation of NAA %s, and the unit has %s", e.NAA, u.opt.Identity.Serial)
		case len(st.MadeBy) != len(persistent.registrations):
			return fmt.Errorf("%d registrations, and who made %d of them", len(persistent.registrations), len(st.MadeBy))
		}
		for i := range persistent.registrations {
			persistent.registrations[i].by = st.MadeBy[i]
		}
	}
	persistent.generation, persistent.aptpl = st.Generation, st.APTPL
	if err := st.Shared.check(len(persistent.registrations)); err != nil {
		return err
	}
	if st.PortGroups != nil {
		if err := (settingsEntry{PortGroups: st.PortGroups}).Check(); err != nil {
			return err
		}
		set := portGroups{}
		for _, g := range st.PortGroups {
			set[g.Tag], _ = g.state()
		}
		u.access.Store(&set)
	}
	health := slices.Index(Healths[:], st.Health)
	if health < 0 {
		return fmt.Errorf("health %.40q: want one of %q", st.Health, Healths)
	}
	if err := st.AppTags.check(); err != nil {
		return err
	}
	if err := st.Identifying.check(); err != nil {
		return err
	}
	views := make([]byteRange, 0, len(st.Views))
	for _, v := range st.Views {
		if v[0] < 0 || v[1] <= 0 || v[1] > math.MaxInt64-v[0] {
			return fmt.Errorf("%d bytes at %d are on their way to an initiator", v[1], v[0])
		}
		views = append(views, byteRange{v[0], v[1]})
	}
	u.addLeft(views)
	u.SetHealth(Health(health))
	u.stopped.Store(st.Stopped)
	u.ejected.Store(st.Ejected)
	modes := (&modeEntry{
		WCE: st.WriteCache, SWP: st.WriteProtect, DescriptorSense: st.DescSense, SeparateTaskSets: st.TaskSets,
	}).modes()
	provisioning, l := st.Thresholds.values(u.modeDefault.Load(), levels(u.levelsDefault.Load()))
	atmpe, tags := st.AppTags.values()
	known := knownSettings{modeValues{u.mode.Load()&^u.modeMutable | (modes|provisioning|atmpe)&u.modeMutable, l, tags}, st.Identifying}
	if u.opt.Settings.Shared() { // another gateway may have changed them meanwhile
		u.known = &known
	} else {
		u.setCurrent(known.modes)
		u.identifying.Store(st.Identifying)
	}
	u.cross(st.Crossed)
	u.clock.Store(st.Clock.clock())
	if st.Unsynced {
		u.unsynced.Store(true)
		u.failure.is.CompareAndSwap(nil, st.Failure)
		u.NoteSyncFailure(backend.ErrUnsynced)
	}
	u.mu.Lock()
	u.changedBy = maps.Clone(st.ChangedBy)
	u.mu.Unlock()
	r := &u.reservations
	r.mu.Lock()
	defer r.mu.Unlock()
	r.persistent = persistent
	u.group.restore(st.Shared)
	r.publish()
	return nil
}

// AtWork reports whether the store has commands, or commands wait for it.
func (u *Unit) AtWork() bool {
	calls := u.gate.State()
	return calls.UnderWay+calls.Waiting > 0
}

// Memory returns the stores of the data and of the protection information, or nil for what is not in memory.
func (u *Unit) Memory() (data, side *backend.Memory) {
	if s, ok := u.checks(); ok {
		return s.Memory()
	}
	data, _ = u.store.(*backend.Memory)
	return data, nil
}

// Descriptor returns the descriptor of the store's file or device, or -1 if it has none.
func (u *Unit) Descriptor() int {
	if h, ok := u.store.(backend.Holder); ok {
		return h.Descriptor()
	}
	return -1
}
