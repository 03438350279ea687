// Package nfs holds as much of NFSv4.1 (RFC 8881) as it takes to test rdma/rpcrdma against Linux: a file server in memory that a
// kernel can mount, and the numbers that it shares with nfsprobe, a client for Linux' server.
package nfs

import (
	"fmt"

	"github.com/iser-target/iser-target/rdma/rpcrdma/oncrpc"
)

// Programs and procedures (RFC 8881, sections 16 and 20).
const (
	Program  = 100003
	Version  = 4
	Compound = 1

	CallbackVersion = 1
)

// Operations (RFC 8881, section 18).
const (
	OpAccess          = 3
	OpClose           = 4
	OpCommit          = 5
	OpCreate          = 6
	OpDelegReturn     = 8
	OpGetattr         = 9
	OpGetFH           = 10
	OpLookup          = 15
	OpLookupp         = 16
	OpOpen            = 18
	OpOpenDowngrade   = 21
	OpPutFH           = 22
	OpPutRootFH       = 24
	OpRead            = 25
	OpReaddir         = 26
	OpRemove          = 28
	OpRename          = 29
	OpRestoreFH       = 31
	OpSaveFH          = 32
	OpSetattr         = 34
	OpWrite           = 38
	OpBindConn        = 41
	OpExchangeID      = 42
	OpCreateSession   = 43
	OpDestroySession  = 44
	OpFreeStateid     = 45
	OpSecinfoNoName   = 52
	OpSequence        = 53
	OpTestStateid     = 55
	OpDestroyClientID = 57
	OpReclaimComplete = 58
	OpCBRecall        = 4
	OpCBSequence      = 11
)

// Statuses.
const (
	OK          = 0
	ErrNoEnt    = 2
	ErrExist    = 17
	ErrNotDir   = 20
	ErrIsDir    = 21
	ErrInval    = 22
	ErrNotEmpty = 66
	ErrStale    = 70
	ErrNotSupp  = 10004
	ErrDelay    = 10008
	ErrNoFH     = 10020
	ErrBadSes   = 10052
	ErrBadID    = 10025
)

// Flags of CREATE_SESSION and of OPEN.
const (
	BackChannel        = 2     // CREATE_SESSION4_FLAG_CONN_BACK_CHAN
	WantReadDelegation = 0x100 // OPEN4_SHARE_ACCESS_WANT_READ_DELEG
)

// Directions of BIND_CONN_TO_SESSION.
const (
	ForeOrBoth = 3 // CDFC4_FORE_OR_BOTH, asked for
	Both       = 3 // CDFS4_BOTH, answered
)

// A Channel is channel_attrs4 (RFC 8881, section 18.36).
type Channel struct{ Padding, MaxRequest, MaxResponse, MaxCached, MaxOps, MaxRequests uint32 }

// Append encodes c, without rdma_ird.
func (c Channel) Append(e *oncrpc.Encoder) {
	for _, v := range [...]uint32{c.Padding, c.MaxRequest, c.MaxResponse, c.MaxCached, c.MaxOps, c.MaxRequests, 0} {
		e.Uint32(v)
	}
}

// Parse decodes c, and skips rdma_ird.
func (c *Channel) Parse(d *oncrpc.Decoder) {
	for _, v := range [...]*uint32{&c.Padding, &c.MaxRequest, &c.MaxResponse, &c.MaxCached, &c.MaxOps, &c.MaxRequests} {
		*v = d.Uint32()
	}
	for range d.Count(1, 4) {
		d.Uint32()
	}
}

// A StatusError is the status of an operation.
type StatusError struct{ Op, Status uint32 }

// Error implements error.
func (e *StatusError) Error() string { return fmt.Sprintf("operation %d: status %d", e.Op, e.Status) }

// Op decodes the number and the status of the next result of a COMPOUND. It fails if that is not OK.
func Op(d *oncrpc.Decoder, want uint32) error {
	op, status := d.Uint32(), d.Uint32()
	switch {
	case d.Err() != nil:
		return d.Err()
	case op != want || status != OK:
		return &StatusError{op, status}
	}
	return nil
}
