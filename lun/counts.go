package lun

import "sync/atomic"

// A Transport carries the commands of a nexus. Units count them separately.
type Transport uint8

const (
	TCP        Transport = iota // iSCSI over TCP
	ISER                        // iSCSI over iSER
	Transports                  // number of transports
)

// String returns the name of the transport in metrics: "tcp" or "iser".
func (t Transport) String() string { return [...]string{"tcp", "iser"}[t] }

// A Kind is a class of commands that counts distinguish.
type Kind uint8

const (
	KindRead  Kind = iota // READ
	KindWrite             // commands with data that goes to the medium
	KindOther             // all others, UNMAP and SANITIZE among them
	Kinds                 // number of kinds
)

// String returns the name of the kind in metrics: "read", "write" or "other".
func (k Kind) String() string { return [...]string{"read", "write", "other"}[k] }

// kind returns the Kind of the commands of a row, which may be nil.
func (row *command) kind() Kind {
	switch {
	case row == nil:
		return KindOther
	case row.produce != nil:
		return KindRead
	case row.flags&(writes|thin|sanitizes) == writes:
		return KindWrite
	}
	return KindOther
}

// Counts count commands by their outcome.
type Counts struct {
	InFlight        int64             // begun and not ended
	Commands        [Kinds]uint64     // ended with a status
	Bytes           [Kinds]uint64     // data moved
	Aborted         uint64            // commands that were aborted: they ended without a status, or with TASK ABORTED
	CheckConditions [Kinds][16]uint64 // by sense key
	MediumErrors    [Kinds]uint64     // of these, those that the store could not read or write
	OtherStatuses   uint64            // neither GOOD nor CHECK CONDITION: RESERVATION CONFLICT
	Underflows      uint64            // commands with a residual count (RFC 7143, section 11.4.5.1)
	Overflows       uint64
}

// Failed returns how many commands ended with CHECK CONDITION, except those that reported a unit attention: they
// tell an initiator of an event, and each session begins with one.
func (c *Counts) Failed() (n uint64) {
	for k := range Kinds {
		n += c.FailedOf(k)
	}
	return n
}

// FailedOf returns how many of Failed were of kind k.
func (c *Counts) FailedOf(k Kind) (n uint64) {
	for key, times := range c.CheckConditions[k] {
		if key != keyUnitAttention {
			n += times
		}
	}
	return n
}

// common has the counts that each command changes.
type common struct {
	begun, aborted   atomic.Uint64
	commands, octets [Kinds]atomic.Uint64
}

// rare has the counts that few commands change.
type rare struct {
	checkConditions       [Kinds][16]atomic.Uint64
	mediumErrors          [Kinds]atomic.Uint64
	otherStatuses         atomic.Uint64
	underflows, overflows atomic.Uint64
}

func (c *common) addTo(sum *Counts) {
	// Read what ended first: nothing ends that has not begun.
	aborted := c.aborted.Load()
	ended := aborted
	for k := range Kinds {
		n := c.commands[k].Load()
		sum.Commands[k] += n
		sum.Bytes[k] += c.octets[k].Load()
		ended += n
	}
	sum.Aborted += aborted
	sum.InFlight += int64(c.begun.Load() - ended)
}

func (r *rare) addTo(sum *Counts) {
	for k := range Kinds {
		for key := range r.checkConditions[k] {
			sum.CheckConditions[k][key] += r.checkConditions[k][key].Load()
		}
		sum.MediumErrors[k] += r.mediumErrors[k].Load()
	}
	sum.OtherStatuses += r.otherStatuses.Load()
	sum.Underflows += r.underflows.Load()
	sum.Overflows += r.overflows.Load()
}

// countShards is how many copies of the same count a unit has, so that the cores that serve its
// nexuses do not take a cache line from each other.
const countShards = 8

// unitCounts are the counts of a unit. A nexus uses one shard of its transport.
type unitCounts [Transports]transportCounts

type transportCounts struct {
	shards [countShards]struct {
		common
		_ [64]byte // whatever the alignment, no line belongs to two shards
	}
	rare
	latencies [countShards]atomic.Pointer[latencies] // nil: no command yet; see latenciesOf
}

// nexusCounts are the counts of a nexus. They do not share cache lines with fields that are only
// read.
type nexusCounts struct {
	common
	_ [64]byte
	rare
	latencies latencies
}

// SetTransport sets the transport that counts name, by default TCP. Call it before the first
// command.
func (n *Nexus) SetTransport(t Transport) { n.transport = t }

// Transport returns the transport that counts name.
func (n *Nexus) Transport() Transport { return n.transport }

// Counts returns the counts of the unit for each transport.
func (u *Unit) Counts() (all [Transports]Counts) {
	for t := range u.counts {
		for i := range u.counts[t].shards {
			u.counts[t].shards[i].addTo(&all[t])
		}
		u.counts[t].rare.addTo(&all[t])
	}
	return all
}

// Counts returns the counts of the nexus, including commands for LUNs that do not exist.
func (n *Nexus) Counts() (c Counts) {
	n.counts.common.addTo(&c)
	n.counts.rare.addTo(&c)
	return c
}

// countBegun counts c, whose unit is known, as in flight.
func (c *Command) countBegun() {
	c.counted = true
	n := c.nexus
	n.counts.begun.Add(1)
	if c.unit != nil {
		c.unit.counts[n.transport].shards[n.shard].begun.Add(1)
	}
}

// Count counts the end of c, which moved that many bytes of data. If aborted is true, c has no
// status, or TASK ABORTED. Count returns false if it has counted c before, or c has not begun.
func (n *Nexus) Count(c *Command, octets uint64, aborted bool) bool {
	if !c.counted {
		return false
	}
	c.counted, c.moved = false, octets
	kind := c.row.kind()
	n.counts.count(kind, octets, aborted)
	if c.unit != nil {
		c.unit.counts[n.transport].shards[n.shard].count(kind, octets, aborted)
	}
	if aborted || c.Status == StatusGood {
		return true
	}
	n.counts.failed(c)
	if c.unit != nil {
		c.unit.counts[n.transport].failed(c)
	}
	return true
}

func (c *common) count(kind Kind, octets uint64, aborted bool) {
	if octets > 0 {
		c.octets[kind].Add(octets)
	}
	if aborted {
		c.aborted.Add(1)
	} else {
		c.commands[kind].Add(1)
	}
}

func (r *rare) failed(c *Command) {
	if c.Status == StatusCheckCondition && c.sense != nil {
		k, kind := c.cond, c.row.kind()
		r.checkConditions[kind][k.Key].Add(1)
		if k.Key == keyMediumError && k != condSanitizeFailed && k != condFormatCorrupted && k != condFormatFailed {
			r.mediumErrors[kind].Add(1)
		}
	} else {
		r.otherStatuses.Add(1)
	}
}

// CountResidual counts that the response to c, which Count has counted, has a residual count.
func (n *Nexus) CountResidual(c *Command, overflow bool) {
	n.counts.residual(overflow)
	if c.unit != nil {
		c.unit.counts[n.transport].residual(overflow)
	}
}

func (r *rare) residual(overflow bool) {
	if overflow {
		r.overflows.Add(1)
	} else {
		r.underflows.Add(1)
	}
}
