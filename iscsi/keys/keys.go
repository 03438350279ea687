// Package keys negotiates the text keys of iSCSI (RFC 7143, sections 6 and 13)
// and iSER (RFC 7145, section 6). The keys are rows of one table, which the answers, the
// defaults and the tests use. The package does no I/O.
//
// A caller parses the text of a request with ParseText and passes every pair to Offer, which
// appends the answers. When both sides are ready, Finish returns the Params. The caller handles
// SendTargets, and adds TargetPortalGroupTag, TargetAlias and TargetAddress. The caller also
// performs CHAP: this package checks only that its keys come in the right stage, and each once.
package keys

import (
	"cmp"
	"fmt"
)

// Params is the result of a login. A Negotiation builds it once. It is passed by value,
// so that it cannot change under a running connection. Lengths are bytes.
type Params struct {
	InitiatorName, InitiatorAlias, TargetName string // as they came, not normalized

	Discovery bool // SessionType

	CHAPName  string // the initiator's CHAP_N; empty if AuthMethod is None
	CHAPProof string // what the caller keeps about the secret; not of the negotiation

	InitialR2T, ImmediateData            bool
	MaxBurstLength, FirstBurstLength     uint32
	MaxOutstandingR2T, MaxConnections    uint16
	DefaultTime2Wait, DefaultTime2Retain uint16 // seconds
	ErrorRecoveryLevel                   uint8
	DataPDUInOrder, DataSequenceInOrder  bool
	HeaderDigest, DataDigest             bool // true: CRC32C

	// MaxRecvDataSegmentLength is the initiator's limit, on plain TCP and in discovery.
	// With RDMAExtensions it has no meaning (RFC 7145, section 6.2).
	MaxRecvDataSegmentLength uint32
	// Declared is the MaxRecvDataSegmentLength that the target has declared. With RDMAExtensions it has no meaning, either.
	Declared uint32

	RDMAExtensions bool
	// With RDMAExtensions, these two limit the data segments of control-type PDUs:
	// from target to initiator, and from initiator to target.
	InitiatorRecvDataSegmentLength, TargetRecvDataSegmentLength uint32
	TaggedBufferForSolicitedDataOnly, ISERHelloRequired         bool
	TaggedBufferDeclared, ISERHelloDeclared                     bool   // the initiator declared the value above
	MaxOutstandingUnexpectedPDUs, MaxAHSLength                  uint32 // the initiator's; 0: no limit

	TaskReporting      string
	ISCSIProtocolLevel uint8
}

// A Stage is a stage of a connection, numbered as CSG and NSG are on the wire
// (RFC 7143, section 11.12.3).
type Stage uint8

// The stages of RFC 7143.
const (
	Security    Stage = 0 // SecurityNegotiation
	Operational Stage = 1 // LoginOperationalNegotiation
	FullFeature Stage = 3 // FullFeaturePhase
)

// String returns the name of the stage for messages.
func (s Stage) String() string {
	switch s {
	case Security:
		return "security stage"
	case Operational:
		return "operational stage"
	case FullFeature:
		return "full feature phase"
	}
	return fmt.Sprintf("stage %d", uint8(s))
}

// Limits is what this target agrees to at most. The zero value of a field means its
// default, which its comment ends with. Lengths are bytes.
type Limits struct {
	// RDMA says that the connection uses iSER already: it agrees to RDMAExtensions=Yes
	// and to no digests.
	RDMA bool

	// StepUp says that the connection can change to iSER after login: it agrees to
	// RDMAExtensions=Yes unless it has agreed to a digest.
	StepUp bool

	// Digests allows CRC32C for headers and data without RDMAExtensions.
	Digests bool

	// InitialR2T and ImmediateData are the target's own choice; nil means Yes. With InitialR2T=No
	// an initiator may send FirstBurstLength bytes per command without an R2T. With ib_iser that
	// means 32 Sends for each of 113 commands, and all of them need a receive buffer.
	InitialR2T, ImmediateData *bool

	// FirstBurstLength limits the unsolicited data of a command; 65536.
	FirstBurstLength uint32

	// MaxBurstLength limits the data per R2T; 1 MiB. More is not needed: the commands
	// of ib_iser carry 512 KiB by default, and larger ones use several R2Ts.
	MaxBurstLength uint32

	// TargetRecvDataSegmentLength limits data segments from the initiator with RDMA;
	// 65536. ib_iser offers what its configuration says, 8192 by default.
	TargetRecvDataSegmentLength uint32

	// InitiatorRecvDataSegmentLength limits data segments to the initiator with RDMA;
	// 8192, because the target sends nothing longer.
	InitiatorRecvDataSegmentLength uint32

	// MaxRecvDataSegmentLength is what the target declares without RDMA; 262144.
	MaxRecvDataSegmentLength uint32

	// MaxOutstandingR2T limits the R2Ts of a command that the target may have outstanding; 1. It has no effect
	// unless ErrorRecoveryLevel is 0.
	MaxOutstandingR2T uint16

	// MaxConnections limits the connections of a session; 1.
	MaxConnections uint16

	// DefaultTime2Retain limits for how many seconds a session is kept; 20.
	DefaultTime2Retain uint16

	// ErrorRecoveryLevel limits the level; 0. The result is the minimum of it and the
	// initiator's offer. open-iscsi offers 0 and fails the login for any other level.
	ErrorRecoveryLevel uint8

	chap bool // RequireCHAP has been called
}

const maxLength = 1<<24 - 1 // of bursts and data segments: RFC 7143, sections 13.12 to 13.14

// Validate returns an error if a limit is outside the range of its key. A Negotiation
// with such limits refuses every offer.
func (l Limits) Validate() error {
	l = l.complete()
	for _, f := range []struct {
		name      string
		v, lo, hi uint32
	}{
		{"FirstBurstLength", l.FirstBurstLength, 512, maxLength},
		{"MaxBurstLength", l.MaxBurstLength, 512, maxLength},
		{"TargetRecvDataSegmentLength", l.TargetRecvDataSegmentLength, 512, maxLength},
		{"InitiatorRecvDataSegmentLength", l.InitiatorRecvDataSegmentLength, 512, maxLength},
		{"MaxRecvDataSegmentLength", l.MaxRecvDataSegmentLength, 512, maxLength},
		{"DefaultTime2Retain", uint32(l.DefaultTime2Retain), 1, 3600},
		{"ErrorRecoveryLevel", uint32(l.ErrorRecoveryLevel), 0, 2},
	} {
		if f.v < f.lo || f.v > f.hi {
			return fmt.Errorf("the limit of %s is %d, which is outside %d..%d", f.name, f.v, f.lo, f.hi)
		}
	}
	if l.FirstBurstLength > l.MaxBurstLength {
		return fmt.Errorf("the limit of FirstBurstLength is %d, more than that of MaxBurstLength, %d",
			l.FirstBurstLength, l.MaxBurstLength)
	}
	return nil
}

// complete returns l with its defaults filled in.
func (l Limits) complete() Limits {
	yes := true
	l.InitialR2T = cmp.Or(l.InitialR2T, &yes)
	l.ImmediateData = cmp.Or(l.ImmediateData, &yes)
	l.FirstBurstLength = cmp.Or(l.FirstBurstLength, 65536)
	l.MaxBurstLength = cmp.Or(l.MaxBurstLength, 1<<20)
	l.TargetRecvDataSegmentLength = cmp.Or(l.TargetRecvDataSegmentLength, 65536)
	l.InitiatorRecvDataSegmentLength = cmp.Or(l.InitiatorRecvDataSegmentLength, 8192)
	l.MaxRecvDataSegmentLength = cmp.Or(l.MaxRecvDataSegmentLength, 262144)
	l.MaxOutstandingR2T = cmp.Or(l.MaxOutstandingR2T, 1)
	l.MaxConnections = cmp.Or(l.MaxConnections, 1)
	l.DefaultTime2Retain = cmp.Or(l.DefaultTime2Retain, 20)
	return l
}

// An Error ends a negotiation. Status is for the Login Response, class<<8|detail (RFC 7143, section
// 11.13.5). In the full feature phase every Error causes a Reject with reason "protocol error".
type Error struct {
	Status      uint16
	Key, Reason string // Key may be empty
}

// Error implements error.
func (e *Error) Error() string {
	if e.Key == "" {
		return e.Reason
	}
	return e.Key + ": " + e.Reason
}

// Login statuses of an Error.
const (
	statusInitiatorError   = 0x0200
	statusAuthFailure      = 0x0201
	statusMissingParameter = 0x0207
	statusSessionType      = 0x0209
	statusTargetError      = 0x0300
)
