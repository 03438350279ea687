package keys

import (
	"slices"
	"strconv"
	"strings"
)

// use says when a key may be used (RFC 7143, section 13).
type use uint8

const (
	leading     use = iota // LO: login of the leading connection
	initialize             // IO: login
	always                 // ALL: login and full feature phase
	fullFeature            // FFPO: full feature phase
)

// flags are further rules for a key, or-ed together.
type flags uint8

const (
	anyStage     flags = 1 << iota // also in the security stage
	securityOnly                   // only in the security stage
	declared                       // a declaration: has no answer
	connection                     // scope is the connection (CO), not the session (SW)
	targetSends                    // only the target sends it
	firstRequest                   // belongs in the first Login Request
	orZero                         // 0 is admissible, too
)

// discovery says what a key means in a discovery session.
type discovery uint8

const (
	applies discovery = iota
	// "Irrelevant when: SessionType=Discovery". The answer is the usual one, because
	// initiators read Irrelevant as 0 or No, but the default stays in force.
	ignored
	// RFC 7145, section 5.1, forbids to negotiate RDMAExtensions there.
	irrelevant
)

// A value is the value of a key, in the field that its kind uses.
type value struct {
	n    uint64
	b    bool
	s    string
	list []string
}

// A kind is the syntax of a value.
type kind struct {
	// parse returns the value of s and reports whether it is valid for k.
	parse  func(k *key, s string) (value, bool)
	format func(v value) string
	picks  bool // the result is one of a list, in value.s
	long   bool // may have more than maxValue bytes
}

var (
	number  = &kind{parse: parseNumber, format: func(v value) string { return strconv.FormatUint(v.n, 10) }}
	boolean = &kind{parse: parseBoolean,
		format: func(v value) string { return map[bool]string{true: "Yes", false: "No"}[v.b] }}
	list   = &kind{parse: parseList, format: func(v value) string { return v.s }, picks: true, long: true}
	choice = &kind{parse: func(_ *key, s string) (value, bool) { return value{list: []string{s}}, true }, picks: true}
	name   = &kind{parse: func(_ *key, s string) (value, bool) { return value{s: s}, s != "" && len(s) <= maxName }}
	text   = &kind{parse: func(_ *key, s string) (value, bool) { return value{s: s}, len(s) <= maxValue }}
	// exchange is the syntax of the keys of CHAP, whose values may be longer than others.
	exchange = &kind{parse: func(_ *key, s string) (value, bool) { return value{s: s}, true }, long: true}
	// nothing is the syntax of obsolete keys, which have no valid value.
	nothing = &kind{parse: func(*key, string) (value, bool) { return value{}, false }}
)

// parseNumber parses a numerical-value in the range of k. No key in the table has ranges
// a~b as values.
func parseNumber(k *key, s string) (value, bool) {
	n, ok := ParseNumber(s)
	return value{n: n}, ok && (k.lo <= n && n <= k.hi || n == 0 && k.flags&orZero != 0)
}

// parseBoolean parses a boolean-value.
func parseBoolean(_ *key, s string) (value, bool) {
	return value{b: s == "Yes"}, s == "Yes" || s == "No"
}

// parseList parses a list-of-values.
func parseList(_ *key, s string) (value, bool) {
	v := value{list: strings.Split(s, ",")}
	return v, !slices.ContainsFunc(v.list, func(item string) bool { return len(item) > maxValue })
}

// The functions below compute the result of our own choice and an offer. That of first is
// empty if we support nothing of the offer.

func minimum(own, offer value) value { return value{n: min(own.n, offer.n)} }
func maximum(own, offer value) value { return value{n: max(own.n, offer.n)} }
func and(own, offer value) value     { return value{b: own.b && offer.b} }
func or(own, offer value) value      { return value{b: own.b || offer.b} }
func first(own, offer value) value {
	for _, item := range offer.list {
		if slices.Contains(own.list, item) {
			return value{s: item}
		}
	}
	return value{}
}

// A key is one row: RFC 7143, sections 12 and 13, and RFC 7145, section 6.
type key struct {
	name      string
	use       use
	flags     flags
	discovery discovery
	kind      *kind
	lo, hi    uint64 // range of a number
	def       string // default; empty for a key without one
	result    func(own, offer value) value
	own       func(l *Limits, p *Params) value // our choice
	set       func(p *Params, v value)

	fail   uint16 // status if nothing in a list is supported; 0: Reject is enough
	refuse string // why every offer is an error, or empty
}

// count returns the value of a number.
func count[N uint8 | uint16 | uint32](n N) value { return value{n: uint64(n)} }

// fixed returns a choice that no limit changes.
func fixed(n uint32) func(*Limits, *Params) value {
	return func(*Limits, *Params) value { return count(n) }
}

// outstanding returns our choice of MaxOutstandingR2T. It must be 1 at an ErrorRecoveryLevel above 0 (RFC 7143, section 13.19),
// which the initiator may offer later.
func outstanding(l *Limits, _ *Params) value {
	if l.ErrorRecoveryLevel > 0 {
		return count[uint16](1)
	}
	return count(l.MaxOutstandingR2T)
}

func yes(*Limits, *Params) value { return value{b: true} }

func oneOf(list ...string) func(*Limits, *Params) value {
	return func(*Limits, *Params) value { return value{list: list} }
}

func digests(l *Limits, p *Params) value {
	if l.Digests && !l.RDMA && !p.RDMAExtensions { // RFC 7145, section 6.1
		return value{list: []string{"None", "CRC32C"}}
	}
	return value{list: []string{"None"}}
}

func authMethods(l *Limits, _ *Params) value {
	if l.chap {
		return value{list: []string{"CHAP"}}
	}
	return value{list: []string{"None"}}
}

var table = []*key{
	// Security: RFC 7143, section 12.
	{name: "AuthMethod", use: initialize, flags: securityOnly | connection, kind: list, result: first,
		own: authMethods, fail: statusAuthFailure},
	{name: "CHAP_A", use: initialize, flags: securityOnly | connection | declared, kind: exchange},
	{name: "CHAP_I", use: initialize, flags: securityOnly | connection | declared, kind: exchange},
	{name: "CHAP_C", use: initialize, flags: securityOnly | connection | declared, kind: exchange},
	{name: "CHAP_N", use: initialize, flags: securityOnly | connection | declared, kind: exchange,
		set: func(p *Params, v value) { p.CHAPName = v.s }},
	{name: "CHAP_R", use: initialize, flags: securityOnly | connection | declared, kind: exchange},

	// Names and session type: RFC 7143, sections 13.3 to 13.9, 13.21 and 13.26. An
	// unknown SessionType has a login status of its own.
	{name: "InitiatorName", use: initialize, flags: anyStage | declared | firstRequest, kind: name,
		set: func(p *Params, v value) { p.InitiatorName = v.s }},
	{name: "InitiatorAlias", use: always, flags: anyStage | declared, kind: text,
		set: func(p *Params, v value) { p.InitiatorAlias = v.s }},
	{name: "TargetName", use: initialize, flags: anyStage | declared | firstRequest, kind: name,
		set: func(p *Params, v value) { p.TargetName = v.s }},
	{name: "SessionType", use: initialize, flags: anyStage | declared | firstRequest, kind: choice, def: "Normal",
		result: first, own: oneOf("Normal", "Discovery"), fail: statusSessionType,
		set: func(p *Params, v value) { p.Discovery = v.s == "Discovery" }},
	{name: "TargetAlias", use: always, flags: anyStage | declared | targetSends, kind: text},
	{name: "TargetAddress", use: always, flags: anyStage | declared | targetSends, kind: text},
	{name: "TargetPortalGroupTag", use: initialize, flags: anyStage | declared | targetSends, kind: number, hi: 65535},
	{name: "SendTargets", use: fullFeature, refuse: "is not part of a negotiation"},
	{name: "X#NodeArchitecture", use: leading, flags: declared, kind: text},

	// Operation: the rest of RFC 7143, section 13.
	{name: "HeaderDigest", use: initialize, flags: connection, kind: list, def: "None", result: first, own: digests,
		set: func(p *Params, v value) { p.HeaderDigest = v.s == "CRC32C" }},
	{name: "DataDigest", use: initialize, flags: connection, kind: list, def: "None", result: first, own: digests,
		set: func(p *Params, v value) { p.DataDigest = v.s == "CRC32C" }},
	{name: "MaxConnections", use: leading, discovery: ignored, kind: number, lo: 1, hi: 65535, def: "1",
		result: minimum, own: func(l *Limits, _ *Params) value { return count(l.MaxConnections) },
		set: func(p *Params, v value) { p.MaxConnections = uint16(v.n) }},
	{name: "InitialR2T", use: leading, discovery: ignored, kind: boolean, def: "Yes", result: or,
		own: func(l *Limits, _ *Params) value { return value{b: *l.InitialR2T} },
		set: func(p *Params, v value) { p.InitialR2T = v.b }},
	{name: "ImmediateData", use: leading, discovery: ignored, kind: boolean, def: "Yes", result: and,
		own: func(l *Limits, _ *Params) value { return value{b: *l.ImmediateData} },
		set: func(p *Params, v value) { p.ImmediateData = v.b }},
	{name: "MaxRecvDataSegmentLength", use: always, flags: declared | connection, kind: number, lo: 512,
		hi: maxLength, def: "8192", set: func(p *Params, v value) { p.MaxRecvDataSegmentLength = uint32(v.n) }},
	{name: "MaxBurstLength", use: leading, discovery: ignored, kind: number, lo: 512, hi: maxLength, def: "262144",
		result: minimum, own: func(l *Limits, _ *Params) value { return count(l.MaxBurstLength) },
		set: func(p *Params, v value) { p.MaxBurstLength = uint32(v.n) }},
	{name: "FirstBurstLength", use: leading, discovery: ignored, kind: number, lo: 512, hi: maxLength, def: "65536",
		result: minimum,
		own:    func(l *Limits, p *Params) value { return count(min(l.FirstBurstLength, p.MaxBurstLength)) },
		set:    func(p *Params, v value) { p.FirstBurstLength = uint32(v.n) }},
	{name: "DefaultTime2Wait", use: leading, kind: number, hi: 3600, def: "2", result: maximum, own: fixed(2),
		set: func(p *Params, v value) { p.DefaultTime2Wait = uint16(v.n) }},
	{name: "DefaultTime2Retain", use: leading, kind: number, hi: 3600, def: "20", result: minimum,
		own: func(l *Limits, _ *Params) value { return count(l.DefaultTime2Retain) },
		set: func(p *Params, v value) { p.DefaultTime2Retain = uint16(v.n) }},
	{name: "MaxOutstandingR2T", use: leading, discovery: ignored, kind: number, lo: 1, hi: 65535, def: "1",
		result: minimum, own: outstanding, set: func(p *Params, v value) { p.MaxOutstandingR2T = uint16(v.n) }},
	{name: "DataPDUInOrder", use: leading, discovery: ignored, kind: boolean, def: "Yes", result: or, own: yes,
		set: func(p *Params, v value) { p.DataPDUInOrder = v.b }},
	{name: "DataSequenceInOrder", use: leading, discovery: ignored, kind: boolean, def: "Yes", result: or, own: yes,
		set: func(p *Params, v value) { p.DataSequenceInOrder = v.b }},
	{name: "ErrorRecoveryLevel", use: leading, kind: number, hi: 2, def: "0", result: minimum,
		own: func(l *Limits, p *Params) value {
			if p.Discovery { // RFC 7143, section 13.21
				return value{}
			}
			return count(l.ErrorRecoveryLevel)
		},
		set: func(p *Params, v value) { p.ErrorRecoveryLevel = uint8(v.n) }},
	{name: "TaskReporting", use: leading, discovery: ignored, kind: list, def: "RFC3720", result: first,
		own: oneOf("FastAbort", "ResponseFence", "RFC3720"), set: func(p *Params, v value) { p.TaskReporting = v.s }},
	{name: "iSCSIProtocolLevel", use: leading, discovery: ignored, kind: number, hi: 31, def: "1", result: minimum,
		own: fixed(2), // RFC 7144
		set: func(p *Params, v value) { p.ISCSIProtocolLevel = uint8(v.n) }},

	// Obsolete: RFC 7143, section 13.25.
	{name: "IFMarker", use: initialize, flags: connection, kind: nothing},
	{name: "OFMarker", use: initialize, flags: connection, kind: nothing},
	{name: "IFMarkInt", use: initialize, flags: connection, kind: nothing},
	{name: "OFMarkInt", use: initialize, flags: connection, kind: nothing},

	// iSER: RFC 7145, section 6. Without RDMAExtensions=Yes the target answers them, too,
	// but they have no effect.
	{name: "RDMAExtensions", use: leading, discovery: irrelevant, kind: boolean, def: "No", result: and,
		own: func(l *Limits, p *Params) value {
			return value{b: l.RDMA || l.StepUp && !p.HeaderDigest && !p.DataDigest}
		},
		set: func(p *Params, v value) { p.RDMAExtensions = v.b }},
	{name: "TargetRecvDataSegmentLength", use: initialize, flags: connection, kind: number, lo: 512, hi: maxLength,
		def: "8192", result: minimum,
		own: func(l *Limits, _ *Params) value { return count(l.TargetRecvDataSegmentLength) },
		set: func(p *Params, v value) { p.TargetRecvDataSegmentLength = uint32(v.n) }},
	{name: "InitiatorRecvDataSegmentLength", use: initialize, flags: connection, kind: number, lo: 512,
		hi: maxLength, def: "8192", result: minimum,
		own: func(l *Limits, _ *Params) value { return count(l.InitiatorRecvDataSegmentLength) },
		set: func(p *Params, v value) { p.InitiatorRecvDataSegmentLength = uint32(v.n) }},
	{name: "MaxOutstandingUnexpectedPDUs", use: leading, flags: declared | orZero, kind: number, lo: 2,
		hi: 1<<32 - 1, def: "0",
		set: func(p *Params, v value) { p.MaxOutstandingUnexpectedPDUs = uint32(v.n) }},
	{name: "MaxAHSLength", use: leading, flags: declared | orZero, kind: number, lo: 2, hi: 1<<32 - 1, def: "256",
		set: func(p *Params, v value) { p.MaxAHSLength = uint32(v.n) }},
	// The default of both is No. Declared and default values are distinguished.
	{name: "TaggedBufferForSolicitedDataOnly", use: leading, flags: declared, kind: boolean,
		set: func(p *Params, v value) { p.TaggedBufferForSolicitedDataOnly, p.TaggedBufferDeclared = v.b, true }},
	{name: "iSERHelloRequired", use: leading, flags: declared, kind: boolean,
		set: func(p *Params, v value) { p.ISERHelloRequired, p.ISERHelloDeclared = v.b, true }},
}

// reset sets k in p to its default, if it has one.
func (k *key) reset(p *Params) {
	if k.def == "" || k.set == nil {
		return
	}
	v, ok := k.kind.parse(k, k.def)
	if !ok {
		panic("keys: invalid default of " + k.name)
	}
	if k.kind.picks {
		v.s = k.def
	}
	k.set(p, v)
}
