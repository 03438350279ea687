package oncrpc

import (
	"errors"
	"fmt"
)

// RPCVersion is the version of ONC RPC.
const RPCVersion = 2

// Types of messages, msg_type (RFC 5531, section 9).
const (
	MsgCall  = 0
	MsgReply = 1
)

// A Status says how a server has answered a call: accept_stat, or above them reject_stat (RFC 5531,
// section 9).
type Status uint32

// Statuses of an accepted call, and of a denied one.
const (
	Success Status = iota
	ProgUnavail
	ProgMismatch
	ProcUnavail
	GarbageArgs
	SystemErr

	denied      Status = 1 << 31
	RPCMismatch        = denied
	AuthError          = denied + 1
)

var statusNames = map[Status]string{Success: "SUCCESS", ProgUnavail: "PROG_UNAVAIL", ProgMismatch: "PROG_MISMATCH",
	ProcUnavail: "PROC_UNAVAIL", GarbageArgs: "GARBAGE_ARGS", SystemErr: "SYSTEM_ERR", RPCMismatch: "RPC_MISMATCH",
	AuthError: "AUTH_ERROR"}

// String returns the name that RFC 5531 gives to s.
func (s Status) String() string {
	if name, ok := statusNames[s]; ok {
		return name
	}
	return fmt.Sprintf("status %#x", uint32(s))
}

// Authentication flavors (RFC 5531, section 8.2).
const (
	AuthNone uint32 = 0
	AuthSys  uint32 = 1
	AuthGSS  uint32 = 6
)

// MaxAuth is the longest body of an Auth in bytes.
const MaxAuth = 400

// An Auth is a credential or a verifier, opaque_auth (RFC 5531, section 8.2).
type Auth struct {
	Flavor uint32
	Body   []byte
}

// Services of RPCSEC_GSS that protect arguments and results (RFC 2203, section 5.2.2).
const (
	gssVersion   = 1
	gssIntegrity = 2
	gssPrivacy   = 3
)

// Protects reports whether a credential is one of RPCSEC_GSS with integrity or privacy. No transport
// may then move parts of the message (RFC 8166, section 8.2.2.3).
func (a *Auth) Protects() bool {
	if a.Flavor != AuthGSS || len(a.Body) < 16 || be.Uint32(a.Body) != gssVersion {
		return false
	}
	service := be.Uint32(a.Body[12:])
	return service == gssIntegrity || service == gssPrivacy
}

// Sys is the body of a credential with AUTH_SYS (RFC 5531, appendix A).
type Sys struct {
	Stamp    uint32
	Machine  string
	UID, GID uint32
	GIDs     []uint32 // at most 16
}

// Auth returns the credential.
func (s *Sys) Auth() Auth {
	var e Encoder
	e.Uint32(s.Stamp)
	e.String(s.Machine)
	e.Uint32(s.UID)
	e.Uint32(s.GID)
	e.Uint32(uint32(len(s.GIDs)))
	for _, gid := range s.GIDs {
		e.Uint32(gid)
	}
	return Auth{AuthSys, e.Bytes()}
}

const (
	maxMachine = 255
	maxGIDs    = 16
)

// ParseSys decodes the credential a.
func ParseSys(a Auth) (s Sys, err error) {
	if a.Flavor != AuthSys {
		return s, fmt.Errorf("the credential has flavor %d, not AUTH_SYS: %w", a.Flavor, ErrGarbage)
	}
	d := Decoder{b: a.Body}
	s = Sys{Stamp: d.Uint32(), Machine: d.String(maxMachine), UID: d.Uint32(), GID: d.Uint32()}
	for range d.Count(maxGIDs, 4) {
		s.GIDs = append(s.GIDs, d.Uint32())
	}
	return s, d.End()
}

// A CallHeader begins a call (RFC 5531, section 9).
//
//	0      4      8      12        16        20          24
//	+------+------+------+---------+---------+-----------+------------+----------+
//	| XID  |  0   |  2   | program | version | procedure | credential | verifier |
//	+------+------+------+---------+---------+-----------+------------+----------+
type CallHeader struct {
	XID                         uint32
	Program, Version, Procedure uint32
	Credential, Verifier        Auth
}

// Append encodes h.
func (h *CallHeader) Append(e *Encoder) {
	for _, v := range [...]uint32{h.XID, MsgCall, RPCVersion, h.Program, h.Version, h.Procedure} {
		e.Uint32(v)
	}
	h.Credential.append(e)
	h.Verifier.append(e)
}

func (a *Auth) append(e *Encoder) {
	e.Uint32(a.Flavor)
	e.Opaque(a.Body)
}

// Size returns the encoded size of h in bytes.
func (h *CallHeader) Size() int { return 24 + h.Credential.size() + h.Verifier.size() }

func (a *Auth) size() int { return 8 + len(a.Body) + Pad(len(a.Body)) }

func (a *Auth) parse(d *Decoder) {
	a.Flavor = d.Uint32()
	a.Body = d.Opaque(MaxAuth)
}

// ErrRPCVersion reports a call of another version of ONC RPC. A server answers it by RPC_MISMATCH.
var ErrRPCVersion = errors.New("the call is not of version 2 of ONC RPC")

// Parse decodes the header of a call. Auths refer to the message.
func (h *CallHeader) Parse(d *Decoder) error {
	*h = CallHeader{XID: d.Uint32()}
	if d.Uint32() != MsgCall {
		d.Fail(ErrGarbage)
	}
	if d.Uint32() != RPCVersion {
		d.Fail(ErrRPCVersion)
	}
	h.Program, h.Version, h.Procedure = d.Uint32(), d.Uint32(), d.Uint32()
	h.Credential.parse(d)
	h.Verifier.parse(d)
	return d.Err()
}

// A ReplyHeader begins a reply (RFC 5531, section 9).
//
//	0      4      8             12
//	+------+------+-------------+------------+---------------+--------------------------+
//	| XID  |  1   | 0: accepted |  verifier  | accept_stat   | PROG_MISMATCH: low, high |
//	+------+------+-------------+------------+---------------+--------------------------+
//	| XID  |  1   | 1: denied   | reject_stat| RPC_MISMATCH: low, high; or AUTH_ERROR: why|
//	+------+------+-------------+------------+--------------------------------------------+
type ReplyHeader struct {
	XID       uint32
	Status    Status
	Verifier  Auth   // of an accepted call
	Low, High uint32 // the versions that the server has: ProgMismatch and RPCMismatch
	Why       uint32 // auth_stat of AuthError
}

// Append encodes h.
func (h *ReplyHeader) Append(e *Encoder) {
	e.Uint32(h.XID)
	e.Uint32(MsgReply)
	if h.Status >= denied {
		e.Uint32(1)
		e.Uint32(uint32(h.Status - denied))
	} else {
		e.Uint32(0)
		h.Verifier.append(e)
		e.Uint32(uint32(h.Status))
	}
	switch h.Status {
	case ProgMismatch, RPCMismatch:
		e.Uint32(h.Low)
		e.Uint32(h.High)
	case AuthError:
		e.Uint32(h.Why)
	}
}

// MaxReplyHeader is the size in bytes of the longest encoded ReplyHeader.
const MaxReplyHeader = 12 + 8 + MaxAuth + 12

// Parse decodes the header of a reply. Verifier refers to the message.
func (h *ReplyHeader) Parse(d *Decoder) error {
	*h = ReplyHeader{XID: d.Uint32()}
	if d.Uint32() != MsgReply {
		d.Fail(ErrGarbage)
	}
	switch d.Uint32() {
	case 0:
		h.Verifier.parse(d)
		h.Status = Status(d.Uint32())
		if h.Status > SystemErr {
			d.Fail(ErrGarbage)
		}
	case 1:
		if v := d.Uint32(); v <= 1 {
			h.Status = denied + Status(v)
		} else {
			d.Fail(ErrGarbage)
		}
	default:
		d.Fail(ErrGarbage)
	}
	switch h.Status {
	case ProgMismatch, RPCMismatch:
		h.Low, h.High = d.Uint32(), d.Uint32()
	case AuthError:
		h.Why = d.Uint32()
	}
	return d.Err()
}

// PeekType returns the XID and the type of the message that b starts with.
func PeekType(b []byte) (xid, msgType uint32, ok bool) {
	if len(b) < 8 {
		return 0, 0, false
	}
	return be.Uint32(b), be.Uint32(b[4:]), true
}
