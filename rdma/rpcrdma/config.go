package rpcrdma

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/rdma/rpcrdma/wire"
)

// Port is the TCP port of NFS over RDMA (RFC 8166, section 5). NetID and NetID6 are the names by which
// rpcbind knows the transport over IPv4 and over IPv6.
const (
	Port   = 20049
	NetID  = "rdma"
	NetID6 = "rdma6"
)

// Config configures one end of a connection. The zero value of a field means its default.
type Config struct {
	// Programs answer the calls of the peer. Default: none, each call is answered by PROG_UNAVAIL.
	Programs *Programs

	// Credits is how many calls of the peer may be unanswered, 1 to 1024. Each reply grants them.
	// Default 32.
	Credits int
	// Ask is how many calls of this end shall be unanswered at most, 1 to 1024. Each call asks for
	// them. Default 32.
	Ask int

	// InlineSend and InlineReceive are the longest Sends in bytes, transport header included: 1024 to
	// 262144, in multiples of 1024. Default 4096.
	InlineSend, InlineReceive int
	// NoInvalidate announces that this end does not support remote invalidation.
	NoInvalidate bool
	// ReverseChunks allows chunks in the reverse direction. By default an end refuses them by ERR_CHUNK
	// (RFC 8167, section 5.3), as Linux neither sends nor accepts them.
	ReverseChunks bool

	// MaxArgs limits the bytes of all read chunks of one call of the peer. Default 1 MiB and 64 KiB.
	MaxArgs int
	// MaxResults limits the bytes of memory for the results of one call of the peer, see
	// Request.Buffer. Default as MaxArgs.
	MaxResults int
	// Memory limits the bytes for chunks that calls of the peer use at once. Calls wait for their turn.
	// As much can be kept for the next calls. Default 16 MiB, at least MaxArgs and MaxResults together.
	Memory int
	// MaxSegments limits the segments in the chunk lists of one call of the peer, 1 to 1024. Default 64.
	MaxSegments int

	// StallTimeout limits how long a peer may owe something without progress: to take what was sent to
	// it, or to answer an RDMA Read. Then the connection ends. Default 30 s.
	StallTimeout time.Duration
	// IdleTimeout ends a connection without calls. Default: never.
	IdleTimeout time.Duration

	// RDMA configures the stream below. Private, PeerToPeer and MaxSend are set by this package. For an end that connects, the default
	// of Nudge is 200 ms, so that siw of Linux reads the first call, and a negative Nudge means none.
	RDMA rdma.Options
}

const (
	defaultCredits  = 32
	maxCredits      = 1024
	defaultInline   = 4096
	defaultMaxData  = 1<<20 + 64<<10
	defaultMemory   = 16 << 20
	defaultSegments = 64
	defaultStall    = 30 * time.Second
	maxData         = 1 << 30
	defaultNudge    = 200 * time.Millisecond
)

// complete returns a copy of o with its defaults filled in.
func (o Config) complete() (Config, error) {
	var errs []error
	for _, f := range []struct {
		name             string
		v                *int
		def, least, most int
	}{
		{"Credits", &o.Credits, defaultCredits, 1, maxCredits},
		{"Ask", &o.Ask, defaultCredits, 1, maxCredits},
		{"InlineSend", &o.InlineSend, defaultInline, wire.MinInline, wire.MaxInline},
		{"InlineReceive", &o.InlineReceive, defaultInline, wire.MinInline, wire.MaxInline},
		{"MaxArgs", &o.MaxArgs, defaultMaxData, 1, maxData},
		{"MaxResults", &o.MaxResults, defaultMaxData, 1, maxData},
		{"MaxSegments", &o.MaxSegments, defaultSegments, 1, wire.MaxSegments},
	} {
		if *f.v = cmp.Or(*f.v, f.def); *f.v < f.least || *f.v > f.most {
			errs = append(errs, fmt.Errorf("rpcrdma: %s %d is outside %d..%d", f.name, *f.v, f.least, f.most))
		}
	}
	o.Memory = cmp.Or(o.Memory, max(defaultMemory, o.MaxArgs+o.MaxResults))
	if least := o.MaxArgs + o.MaxResults; o.Memory < least || o.Memory > 4*maxData {
		errs = append(errs, fmt.Errorf("rpcrdma: Memory %d is outside %d..%d", o.Memory, least, 4*maxData))
	}
	for _, f := range []struct {
		name string
		n    int
	}{{"InlineSend", o.InlineSend}, {"InlineReceive", o.InlineReceive}} {
		if f.n%1024 != 0 {
			errs = append(errs, fmt.Errorf("rpcrdma: %s %d is not a multiple of 1024", f.name, f.n))
		}
	}
	o.StallTimeout = cmp.Or(o.StallTimeout, defaultStall)
	if o.StallTimeout < 0 || o.IdleTimeout < 0 {
		errs = append(errs, fmt.Errorf("rpcrdma: the timeouts %v and %v must not be negative", o.StallTimeout,
			o.IdleTimeout))
	}
	if o.Programs == nil {
		o.Programs = &Programs{}
	}
	o.RDMA.MaxSend = o.InlineReceive
	o.RDMA.Private = o.private().Append(nil)
	o.RDMA.PeerToPeer = false
	return o, errors.Join(errs...)
}

// initiator returns the options of the stream of an end that connects. o is complete.
func (o *Config) initiator() rdma.Options {
	r := o.RDMA
	r.Nudge = max(0, cmp.Or(r.Nudge, defaultNudge))
	return r
}

// private returns what this end announces.
func (o *Config) private() wire.Private {
	return wire.Private{Invalidate: !o.NoInvalidate, Send: o.InlineSend, Receive: o.InlineReceive}
}
