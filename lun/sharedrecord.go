package lun

import (
	"errors"
	"fmt"
	"slices"

	"github.com/iser-target/iser-target/lun/state"
)

var sharedFormat = state.Format[sharedRecord]{Name: "shared reservations", Version: 1}

// A sharedRecord is the value of a logical unit in a home that several gateways share. Unlike a unitEntry it has all
// registrations, whatever their APTPL, and it stays when the last one has gone, because its operations are counted.
type sharedRecord struct {
	Version       int                  `json:"version"`
	NAA           string               `json:"naa"`        // Identity.Serial
	Epoch         uint64               `json:"epoch"`      // counts losses of power
	Operation     uint64               `json:"operation"`  // counts the changes, from 1
	Generation    uint32               `json:"generation"` // PRGENERATION
	APTPL         bool                 `json:"aptpl"`
	Type          byte                 `json:"type"` // 0: no reservation
	Registrations []sharedRegistration `json:"registrations"`
	Log           []operationEntry     `json:"log"` // the last operations, oldest first; the last one has the number Operation
}

type sharedRegistration struct {
	registrationEntry
	Number uint64 `json:"number"` // the operation that made it
}

// An operationEntry says what an operation means to the nexuses of other gateways.
type operationEntry struct {
	ID      string        `json:"id"`     // no other operation has it
	Action  string        `json:"action"` // the name of the command, or another of sharedActions
	By      string        `json:"by"`     // the gateway
	Notices []noticeEntry `json:"notices,omitempty"`
	Aborts  bool          `json:"aborts,omitempty"`  // PREEMPT AND ABORT
	Aborted []nexusEntry  `json:"aborted,omitempty"` // their commands end
}

type nexusEntry struct {
	Initiator  string `json:"initiator"`   // initiator port
	TargetPort uint16 `json:"target_port"` // relative target port identifier
}

type noticeEntry struct {
	nexusEntry
	Attention string `json:"attention"` // ASC and ASCQ, "2a/05"
}

// An operation is a change of the reservations of a unit.
type operation struct {
	id, action, by string
	effects        prEffects
}

// Actions that are not those of PERSISTENT RESERVE OUT.
const (
	actionClear     = "clear"      // see Unit.ClearReservation
	actionPowerLoss = "power loss" // see Inventory.PowerOn, and member.join
)

// The log of a record is as long as both bounds allow, but has at least one operation. A gateway that missed more has to guess.
const (
	maxLog     = 16
	maxLogSize = 1024 // notices and aborted nexuses
)

// prAttentions are the unit attentions that operations raise.
var prAttentions = []Sense{condReservationsPreempted, condReservationsReleased, condRegistrationsPreempted}

// A position is how far a gateway has followed the reservations of a unit. It goes with a prState.
type position struct {
	known     bool // false: since the start of the process, the gateway has not known them
	revision  state.Revision
	epoch     uint64
	operation uint64
	log       []operation // the last ones, oldest first
}

// find returns the number of the operation with that ID, or 0 if it is not in the log.
func (p *position) find(id string) uint64 {
	i := slices.IndexFunc(p.log, func(op operation) bool { return op.id == id })
	if i < 0 {
		return 0
	}
	return p.operation - uint64(len(p.log)-1-i)
}

// after returns the operations after one. It returns false if the log does not reach back so far.
func (p *position) after(operation uint64) (list []operation, ok bool) {
	n := p.operation - operation
	if n > uint64(len(p.log)) {
		return nil, false
	}
	return p.log[uint64(len(p.log))-n:], true
}

// next returns the position after op. Registrations of s that old does not have get the number of op.
func (p *position) next(old, s *prState, op operation) position {
	n := position{known: true, revision: p.revision, epoch: p.epoch, operation: p.operation + 1}
	if op.action == actionPowerLoss {
		n.epoch++
	}
	n.log = append(slices.Clone(p.log), op)
	size := func() (n1 int) {
		for _, op := range n.log {
			n1 += len(op.effects.notices) + len(op.effects.aborted)
		}
		return n1
	}
	for len(n.log) > maxLog || len(n.log) > 1 && size() > maxLogSize {
		n.log = n.log[1:]
	}
	s.registrations = slices.Clone(s.registrations)
	for i := range s.registrations {
		r := &s.registrations[i]
		if j := old.find(r.nexus); j >= 0 {
			r.number = old.registrations[j].number
		} else {
			r.number = n.operation
		}
	}
	return n
}

// encode returns the record of a unit with the reservations s.
func (p *position) encode(naa string, s *prState) sharedRecord {
	rec := sharedRecord{
		Version: sharedFormat.Version, NAA: naa, Epoch: p.epoch, Operation: p.operation, Generation: s.generation, APTPL: s.aptpl, Type: s.typ,
		Registrations: make([]sharedRegistration, len(s.registrations)), Log: make([]operationEntry, len(p.log)),
	}
	for i, r := range s.registrations {
		rec.Registrations[i] = sharedRegistration{s.encode(r), r.number}
	}
	for i, op := range p.log {
		e := operationEntry{ID: op.id, Action: op.action, By: op.by, Aborts: op.effects.aborts}
		for _, n := range op.effects.notices {
			e.Notices = append(e.Notices, noticeEntry{encodeNexus(n.nexus), n.attention.code()})
		}
		for _, n := range op.effects.aborted {
			e.Aborted = append(e.Aborted, encodeNexus(n))
		}
		rec.Log[i] = e
	}
	return rec
}

func encodeNexus(n nexusName) nexusEntry { return nexusEntry{n.initiator.String(), n.target} }

// Check implements state.State.
func (r sharedRecord) Check() error {
	_, _, err := r.decode()
	return err
}

// decode reverses encode. It refuses what no unit could have got into.
func (r sharedRecord) decode() (p position, s prState, err error) {
	switch {
	case r.NAA == "":
		return p, s, errors.New("naa is empty")
	case r.Registrations == nil || r.Log == nil:
		return p, s, errors.New("is damaged: the members registrations and log have to be lists")
	case r.Operation == 0 || r.Epoch > r.Operation:
		return p, s, fmt.Errorf("operation %d, epoch %d", r.Operation, r.Epoch)
	case len(r.Log) == 0 || len(r.Log) > maxLog || uint64(len(r.Log)) > r.Operation:
		return p, s, fmt.Errorf("the log has %d operations, want 1 to %d", len(r.Log), min(maxLog, r.Operation))
	}
	entries := make([]registrationEntry, len(r.Registrations))
	for i, e := range r.Registrations {
		entries[i] = e.registrationEntry
	}
	if s, err = decodeRegistrations(r.Type, entries); err != nil {
		return p, s, err
	}
	for i, e := range r.Registrations {
		if e.Number == 0 || e.Number > r.Operation {
			return p, s, fmt.Errorf("registrations[%d]: number %d, want 1 to %d", i, e.Number, r.Operation)
		}
		s.registrations[i].number = e.Number
	}
	s.generation, s.aptpl = r.Generation, r.APTPL
	p = position{known: true, epoch: r.Epoch, operation: r.Operation}
	for i, e := range r.Log {
		op, err := e.decode()
		if err == nil && p.find(op.id) != 0 {
			err = fmt.Errorf("id %.100q is there twice", op.id)
		}
		if err != nil {
			return p, s, fmt.Errorf("log[%d]: %w", i, err)
		}
		p.log = append(p.log, op)
	}
	return p, s, nil
}

// decode returns the operation.
func (e operationEntry) decode() (op operation, err error) {
	switch {
	case e.ID == "":
		return op, errors.New("the id is empty")
	case e.Action == "":
		return op, errors.New("the action is empty")
	case len(e.Aborted) > 0 && !e.Aborts:
		return op, errors.New("aborts is false, but aborted is not empty")
	}
	op = operation{id: e.ID, action: e.Action, by: e.By, effects: prEffects{aborts: e.Aborts}}
	for i, n := range e.Notices {
		name, err := decodeNexus(n.Initiator, n.TargetPort)
		k := slices.IndexFunc(prAttentions, func(k Sense) bool { return k.code() == n.Attention })
		if err == nil && k < 0 {
			err = fmt.Errorf("attention %.20q is none of a reservation", n.Attention)
		}
		if err != nil {
			return op, fmt.Errorf("notices[%d]: %w", i, err)
		}
		op.effects.notices = append(op.effects.notices, notice{name, prAttentions[k]})
	}
	for i, n := range e.Aborted {
		name, err := decodeNexus(n.Initiator, n.TargetPort)
		if err != nil {
			return op, fmt.Errorf("aborted[%d]: %w", i, err)
		}
		op.effects.aborted = append(op.effects.aborted, name)
	}
	return op, nil
}

// guess returns what to tell the nexuses of a unit that missed operations, which led from old to now: rather too much than
// too little. Who lost a registration, even one that was made again, is told of a PREEMPT AND ABORT.
func guess(old, now *prState) prEffects {
	e := prEffects{aborts: true}
	for _, r := range old.registrations {
		if i := now.find(r.nexus); i < 0 || now.registrations[i].number != r.number {
			e.aborted = append(e.aborted, r.nexus)
			e.notices = append(e.notices, notice{r.nexus, condRegistrationsPreempted})
		} else if prTypes[old.typ].registrants && now.typ != old.typ {
			e.notices = append(e.notices, notice{r.nexus, condReservationsReleased})
		}
	}
	return e
}
