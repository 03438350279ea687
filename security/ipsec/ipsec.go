package ipsec

import (
	"context"
	"net/netip"
	"time"
)

// A Demand says what a portal or a target requires of its connections.
type Demand string

const (
	Off      Demand = "off"      // nothing is checked
	Audit    Demand = "audit"    // connections that the profile forbids are marked, and continue
	Required Demand = "required" // the kernel drops clear text, and the target ends connections that the profile forbids
)

// A Mode is how ESP encapsulates packets (RFC 4301, section 4.1).
type Mode string

const (
	Tunnel    Mode = "tunnel"    // the whole packet is inside, between gateways or hosts
	Transport Mode = "transport" // the payload is inside
)

// A Flow is a TCP connection, from the view of the target. Addresses are not IPv4 in IPv6, and have no zone.
type Flow struct {
	Local, Remote netip.AddrPort
}

// An Algorithm is what an SA uses, by the kernel's name (rfc4106(gcm(aes)), cbc(aes), hmac(sha256)).
type Algorithm struct {
	Name    string `json:"name"`
	KeyBits int    `json:"key_bits"` // of the key alone, without the salt
	ICVBits int    `json:"icv_bits,omitempty"`
}

// An SA is a security association for packets in one direction.
type SA struct {
	SPI               uint32        `json:"spi"`
	Source            netip.Addr    `json:"source"`      // of the ESP packets
	Destination       netip.Addr    `json:"destination"` // of the ESP packets
	ReqID             int           `json:"reqid"`
	Mode              Mode          `json:"mode"`
	AEAD              Algorithm     `json:"aead"` // empty: Encryption and Authentication count
	Encryption        Algorithm     `json:"encryption"`
	Authentication    Algorithm     `json:"authentication"`
	ESN               bool          `json:"esn"`
	ReplayWindow      int           `json:"replay_window"`      // packets; 0: no replay protection
	Lifetime          time.Duration `json:"lifetime,omitempty"` // hard; 0: none in time
	LifetimeBytes     uint64        `json:"lifetime_bytes,omitempty"`
	Added             time.Time     `json:"added"`
	LocalID, RemoteID string        // IKE identities; empty: the driver does not know them
	IKE               bool          // a key exchange made the keys; false: unknown or manual
}

// A Link is an interface of the machine. The zero value is unknown.
type Link struct {
	Name  string
	Mbits int // speed in Mbit/s; 0: the interface does not say it, as virtual ones and many of virtual machines
}

// A Protection is what covers a flow at one moment. Without SAs in one direction that direction has no keys, but the policy
// may still keep clear text out.
type Protection struct {
	In, Out []SA // that packets of the flow may use, newest first
	// InPolicy and OutPolicy say that a policy of the kernel demands ESP for the flow, so clear text neither enters nor leaves.
	InPolicy, OutPolicy bool
	Link                Link // that has the local address
	// Incomplete is why SAs lack what an IKE daemon knows of them: IKE, RemoteID and Lifetime. Nil: the driver knows all that it can know.
	Incomplete error
}

// A Driver knows the SAs and policies of one machine. Its methods may be called concurrently.
type Driver interface {
	// Name returns the value of ipsec.driver.
	Name() string
	// Check returns what the driver lacks to enforce Required on this machine: each error names the capability, kernel option,
	// socket or program that is missing, and the command that mends it.
	Check(ctx context.Context) []error
	// Look returns what protects f now.
	Look(ctx context.Context, f Flow) (Protection, error)
	// Watch calls changed, from one goroutine, after SAs or policies have changed, until ctx ends. It returns the error that
	// prevents it from noticing further changes; the caller then retries.
	Watch(ctx context.Context, changed func(Change)) error
	// Close releases what the driver holds, and removes what it installed.
	Close() error
}

// An Initiator is a driver that can ask the IKE daemon to negotiate keys for a flow (ipsec.vici.initiate).
type Initiator interface {
	Initiate(ctx context.Context, f Flow) error
}

// A Decider is a driver that gives verdicts itself, like a program of the site (exec).
type Decider interface {
	Decide(ctx context.Context, q Question) (Verdict, error)
}

// A Change says what changed.
type Change struct {
	Kind   ChangeKind
	SPI    uint32     // 0: many, or a policy
	Remote netip.Addr // invalid: unknown, each flow may be affected
}

// A ChangeKind is a kind of Change.
type ChangeKind string

const (
	Added    ChangeKind = "added"    // an SA
	Removed  ChangeKind = "removed"  // an SA
	Expired  ChangeKind = "expired"  // soft or hard lifetime
	Acquired ChangeKind = "acquired" // the kernel needs keys that it does not have
	Policy   ChangeKind = "policy"   // a policy was added, changed or removed
	Lost     ChangeKind = "lost"     // notices were lost: everything may have changed
)

// A Moment is when a Guard asks.
type Moment string

const (
	AtAccept Moment = "accept" // before the first byte is answered
	AtLogin  Moment = "login"  // when names are known and authenticated
	AtChange Moment = "change" // when keys or policies have changed
)

// A Question is what a Guard asks about a connection.
type Question struct {
	Moment    Moment
	Flow      Flow
	Initiator string // normalised iSCSI name; empty before the login
	Target    string // the same; empty before the login and in discovery
	// Demand and Profile are those of the portal or of the target. When both have demands, a Guard asks for each of them and
	// takes the stricter verdict.
	Demand  Demand
	Profile *Profile
}

// An Action is what happens to the connection.
type Action string

const (
	Permit Action = "permit" // the profile is met, or nothing is required
	Mark   Action = "mark"   // the connection continues, and everything that shows it says why it should not
	Deny   Action = "deny"   // the connection ends
)

// A Class is a kind of reason. Metrics and events use it, so that they do not depend on the words of reasons.
type Class string

const (
	ClassDriver   Class = "driver"   // the driver gave no answer
	ClassKeys     Class = "keys"     // policies require ESP, and keys are missing
	ClassClear    Class = "clear"    // clear text is possible
	ClassProfile  Class = "profile"  // the SAs are not good enough
	ClassIdentity Class = "identity" // the IKE identity is not one of the initiator
	ClassProgram  Class = "program"  // a Decider says so
)

// Classes are all classes.
var Classes = []Class{ClassDriver, ClassKeys, ClassClear, ClassProfile, ClassIdentity, ClassProgram}

// A Verdict answers a Question.
type Verdict struct {
	Action   Action `json:"action"`
	Reason   string `json:"reason,omitempty"` // of Mark and Deny: the problem, then what mends it
	Class    Class  `json:"-"`                // of Reason; empty without one
	Suite    string `json:"suite,omitempty"`  // like esp-tunnel aes128gcm16 esn; empty: not protected
	SPIIn    uint32 `json:"spi_in,omitempty"`
	SPIOut   uint32 `json:"spi_out,omitempty"`
	Identity string `json:"identity,omitempty"` // IKE identity of the initiator; empty: unknown
	// KeysGone says that the flow had the right policy and has no SA now. A session with keys gone has the time of ipsec.grace
	// to get new ones, because deletion of an SA is no reason to end it (RFC 7146, section 3; SEC-3723.3.5-1).
	KeysGone bool `json:"keys_gone,omitempty"`
}

// Protected reports whether ESP covers the connection.
func (v Verdict) Protected() bool { return v.Suite != "" }

// A Profile says which protection is good enough. The zero value takes what RFC 7146 allows, except manual keys.
type Profile struct {
	Name            string
	Mode            Mode           // empty: tunnel or transport; a socket policy of a portal then demands tunnel mode
	Suites          []string       // strongSwan's names: aes128gcm16, aes256gcm16, aes128-sha256, aes128gmac, null-sha256; empty: those of RFC 7146 with encryption
	MinKeyBits      int            // of encryption; 0: 128
	NullEncryption  bool           // integrity alone is enough
	ESN             bool           // extended sequence numbers are required
	ESNAuto         bool           // they are required where the Link has 1 Gbit/s or more (RFC 7146, section 2)
	MinReplayWindow int            // packets; 0: 32
	MaxLifetime     time.Duration  // hard lifetime of an SA; 0: not checked
	ManualKeys      bool           // SAs without a key exchange are good enough
	Identities      []IdentityRule // IKE identities of initiators; empty: not checked
}

// An IdentityRule ties IKE identities to initiator names.
type IdentityRule struct {
	Initiator string // pattern, as security.Patterns
	ID        string // IKE identity; * matches any characters
}
