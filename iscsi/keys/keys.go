// Package keys negotiates the text keys of iSCSI (RFC 7143, sections 6 and 13)
// and iSER (RFC 7145, section 6). The keys are rows of one table; the answers,
// the defaults and the tests all walk it. The package does no I/O.
//
// A caller parses the text of a request with ParseText, hands every pair to
// Offer, which appends what must be answered, and asks Finish for the Params
// once both sides are ready. It intercepts SendTargets and adds what it alone
// knows: TargetPortalGroupTag, TargetAlias and TargetAddress. CHAP is also the
// caller's: of its keys, this package knows the stage and that each comes once.
package keys

import "fmt"

// Params is what a login agreed on. It is built once by a Negotiation and
// travels by value from then on, so that a running connection cannot see it
// change. Lengths are bytes.
type Params struct {
	InitiatorName, InitiatorAlias, TargetName string // as they came, not normalised

	Discovery bool // SessionType

	CHAPName string // the initiator's CHAP_N; empty if AuthMethod is None

	InitialR2T, ImmediateData            bool
	MaxBurstLength, FirstBurstLength     uint32
	MaxOutstandingR2T, MaxConnections    uint16
	DefaultTime2Wait, DefaultTime2Retain uint16 // seconds
	ErrorRecoveryLevel                   uint8
	DataPDUInOrder, DataSequenceInOrder  bool
	HeaderDigest, DataDigest             bool // true: CRC32C

	// MaxRecvDataSegmentLength was declared by the initiator: the limit
	// towards it on plain TCP and in discovery. With RDMAExtensions it means
	// nothing (RFC 7145, section 6.2).
	MaxRecvDataSegmentLength uint32

	RDMAExtensions bool
	// These two limit the data segments of control-type PDUs with
	// RDMAExtensions: target to initiator, and initiator to target.
	InitiatorRecvDataSegmentLength, TargetRecvDataSegmentLength uint32
	TaggedBufferForSolicitedDataOnly, ISERHelloRequired         bool
	TaggedBufferDeclared, ISERHelloDeclared                     bool   // the value above is no default
	MaxOutstandingUnexpectedPDUs, MaxAHSLength                  uint32 // the initiator's; 0: no limit

	TaskReporting      string
	ISCSIProtocolLevel uint8
}

// A Stage is a stage of a connection, numbered as CSG and NSG are on the wire
// (RFC 7143, section 11.12.3).
type Stage uint8

const (
	Security    Stage = 0 // SecurityNegotiation
	Operational Stage = 1 // LoginOperationalNegotiation
	FullFeature Stage = 3 // FullFeaturePhase
)

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

// Limits is what this target is ready to agree on. The zero value of a field
// means its default. Lengths are bytes.
type Limits struct {
	// RDMA tells that the connection is an iSER one: RDMAExtensions=Yes is
	// agreed on, and there are no digests.
	RDMA bool

	// StepUp tells that the connection can become an iSER one after login:
	// RDMAExtensions=Yes is agreed on unless there is a digest already.
	StepUp bool

	// Digests allows CRC32C for headers and data without RDMAExtensions.
	Digests bool

	// InitialR2T and ImmediateData are our own choice; nil means Yes. With
	// InitialR2T=No an initiator may send FirstBurstLength bytes per command
	// before it is asked: with ib_iser that is 32 Sends for each of 113
	// commands, all of which need a receive buffer.
	InitialR2T, ImmediateData *bool

	// FirstBurstLength: at most that much unsolicited data per command; 65536.
	FirstBurstLength uint32

	// MaxBurstLength: at most that much data per R2T; 1 MiB. No data sequence
	// needs more: ib_iser's commands carry 512 KiB by default, and larger
	// ones are served by several R2Ts.
	MaxBurstLength uint32

	// TargetRecvDataSegmentLength: data segments from the initiator with RDMA;
	// 8192, what ib_iser offers.
	TargetRecvDataSegmentLength uint32

	// InitiatorRecvDataSegmentLength: data segments to the initiator with
	// RDMA; 8192, since nothing we send is longer.
	InitiatorRecvDataSegmentLength uint32

	// MaxRecvDataSegmentLength is declared without RDMA; 262144.
	MaxRecvDataSegmentLength uint32

	// MaxConnections of a session; 1.
	MaxConnections uint16

	// ErrorRecoveryLevel: at most that one; 0. The minimum of it and of what the
	// initiator offers is agreed on: open-iscsi offers 0 and fails the login otherwise.
	ErrorRecoveryLevel uint8

	chap bool // RequireCHAP has been called
}

const maxLength = 1<<24 - 1 // of bursts and data segments: RFC 7143, sections 13.12 to 13.14

// Validate reports whether all limits lie where the keys themselves allow them.
// A Negotiation with other limits fails every offer.
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
		{"ErrorRecoveryLevel", uint32(l.ErrorRecoveryLevel), 0, 2},
	} {
		if f.v < f.lo || f.v > f.hi {
			return fmt.Errorf("limit of %s is %d, not within %d..%d", f.name, f.v, f.lo, f.hi)
		}
	}
	if l.FirstBurstLength > l.MaxBurstLength {
		return fmt.Errorf("limit of FirstBurstLength is %d, more than that of MaxBurstLength, %d", l.FirstBurstLength, l.MaxBurstLength)
	}
	return nil
}

// complete returns l with defaults in place of zeros.
func (l Limits) complete() Limits {
	yes := true
	if l.InitialR2T == nil {
		l.InitialR2T = &yes
	}
	if l.ImmediateData == nil {
		l.ImmediateData = &yes
	}
	for _, f := range []struct {
		v   *uint32
		def uint32
	}{
		{&l.FirstBurstLength, 65536},
		{&l.MaxBurstLength, 1 << 20},
		{&l.TargetRecvDataSegmentLength, 8192},
		{&l.InitiatorRecvDataSegmentLength, 8192},
		{&l.MaxRecvDataSegmentLength, 262144},
	} {
		if *f.v == 0 {
			*f.v = f.def
		}
	}
	if l.MaxConnections == 0 {
		l.MaxConnections = 1
	}
	return l
}

// An Error ends a negotiation. Status is what a Login Response says about it,
// class<<8|detail (RFC 7143, section 11.13.5); in the full feature phase every
// Error is a Reject with reason "protocol error".
type Error struct {
	Status      uint16
	Key, Reason string // Key may be empty
}

func (e *Error) Error() string {
	if e.Key == "" {
		return e.Reason
	}
	return e.Key + ": " + e.Reason
}

// Login statuses that a negotiation can end with.
const (
	statusInitiatorError   = 0x0200
	statusAuthFailure      = 0x0201
	statusMissingParameter = 0x0207
	statusSessionType      = 0x0209
	statusTargetError      = 0x0300
)
