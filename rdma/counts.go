package rdma

import (
	"maps"
	"sync"
	"sync/atomic"

	"github.com/iser-target/iser-target/rdma/wire"
)

// Messages counts the RDMAP messages of one direction.
type Messages struct {
	FPDUs         uint64 // all DDP segments
	Writes        uint64 // RDMA Writes
	ReadRequests  uint64
	ReadResponses uint64
	Sends         uint64 // of all four kinds
	Invalidations uint64 // Sends with Invalidate, also counted in Sends
}

// Counts counts what the streams of a Domain have done.
type Counts struct {
	Sent, Received Messages
	ORDStalls      uint64 // RDMA Reads that waited because ORD Reads were unanswered
	CRCErrors      uint64 // FPDUs with a wrong CRC
	STagFaults     uint64 // segments and invalidations that name memory the peer must not use
	// Terminates by Reason. A Terminate with a Reason that the RFCs do not define
	// counts as Unknown.
	TerminatesSent, TerminatesReceived map[wire.Reason]uint64
}

// Unknown stands for every Reason that RFC 5040 and its companions do not define.
var Unknown = wire.Reason{Layer: 0xff, EType: 0xff, Code: 0xff}

// direction counts for one goroutine at a time: the one that sends or the one that receives.
type direction struct {
	fpdus    atomic.Uint64
	messages [wire.OpTerminate + 1]atomic.Uint64 // whole ones, by opcode
	_        [128 - 9*8]byte
}

func (d *direction) addTo(m *Messages) {
	count := func(op wire.Opcode) uint64 { return d.messages[op].Load() }
	m.FPDUs += d.fpdus.Load()
	m.Writes += count(wire.OpWrite)
	m.ReadRequests += count(wire.OpReadRequest)
	m.ReadResponses += count(wire.OpReadResponse)
	invalidations := count(wire.OpSendInvalidate) + count(wire.OpSendSEInvalidate)
	m.Invalidations += invalidations
	m.Sends += count(wire.OpSend) + count(wire.OpSendSE) + invalidations
}

// countShards is the number of shards of each count. Streams use different shards,
// so that the cores that serve them do not fight over one cache line.
const countShards = 16

type countShard struct{ sent, received direction }

// domainCounts counts for a Domain. A stream uses one shard.
type domainCounts struct {
	shards    [countShards]countShard
	next      atomic.Uint32
	ordStalls atomic.Uint64
	crcErrors atomic.Uint64
	faults    atomic.Uint64

	mu             sync.Mutex // guards what a stream counts once
	sent, received map[wire.Reason]uint64
}

func (d *domainCounts) shard() *countShard { return &d.shards[d.next.Add(1)%countShards] }

// Counts returns the counts since NewDomain, including streams that have ended.
func (d *Domain) Counts() (c Counts) {
	n := &d.counts
	for i := range n.shards {
		n.shards[i].sent.addTo(&c.Sent)
		n.shards[i].received.addTo(&c.Received)
	}
	c.ORDStalls, c.CRCErrors, c.STagFaults = n.ordStalls.Load(), n.crcErrors.Load(), n.faults.Load()
	n.mu.Lock()
	defer n.mu.Unlock()
	c.TerminatesSent, c.TerminatesReceived = maps.Clone(n.sent), maps.Clone(n.received)
	return c
}

func (d *domainCounts) terminateSent(r wire.Reason)     { d.terminate(&d.sent, r) }
func (d *domainCounts) terminateReceived(r wire.Reason) { d.terminate(&d.received, r) }

func (d *domainCounts) terminate(in *map[wire.Reason]uint64, r wire.Reason) {
	r, ok := r.Canonical()
	if !ok {
		r = Unknown
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if *in == nil {
		*in = map[wire.Reason]uint64{}
	}
	(*in)[r]++
}

// fault counts why a message of the peer was refused.
func (d *domainCounts) fault(r wire.Reason) {
	switch r {
	case wire.ReasonCRC:
		d.crcErrors.Add(1)
	case wire.ReasonInvalidSTag, wire.ReasonBounds, wire.ReasonStream, wire.ReasonWrap,
		wire.ReasonReadInvalidSTag, wire.ReasonReadBounds, wire.ReasonReadAccess, wire.ReasonReadStream,
		wire.ReasonReadWrap, wire.ReasonNotInvalidated:
		d.faults.Add(1)
	}
}
