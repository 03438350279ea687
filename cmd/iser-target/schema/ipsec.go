package schema

import (
	"cmp"
	"strings"
	"time"
)

// A ConnectionProtection says how IPsec protects a connection that it is required or audited for.
type ConnectionProtection struct {
	Demand   string `json:"demand"`             // audit or required
	Verdict  string `json:"verdict"`            // permit, mark or deny
	Suite    string `json:"suite,omitempty"`    // like esp-tunnel aes128gcm16 esn; empty: not protected
	SPIIn    string `json:"spi_in,omitempty"`   // 0x and 8 hex digits
	SPIOut   string `json:"spi_out,omitempty"`  //
	Identity string `json:"identity,omitempty"` // IKE identity of the initiator; empty: unknown
	Reason   string `json:"reason,omitempty"`   // why the verdict is not permit
	// Class is that of Reason: driver, keys, clear, profile, identity or program.
	Class string `json:"reason_class,omitempty"`
}

// Details returns the suite, the SPIs and the identity, as far as they are known.
func (p *ConnectionProtection) Details() string {
	var parts []string
	if p.Suite != "" {
		parts = append(parts, p.Suite)
	}
	if p.SPIIn != "" || p.SPIOut != "" {
		parts = append(parts, "SPIs "+cmp.Or(p.SPIIn, "none")+" in, "+cmp.Or(p.SPIOut, "none")+" out")
	}
	if p.Identity != "" {
		parts = append(parts, "identity "+p.Identity)
	}
	return strings.Join(parts, ", ")
}

// Protection returns that of the connection of s which is protected least; nil: nothing is required of them.
func (s *SessionState) Protection() (worst *ConnectionProtection) {
	for i := range s.Connections {
		if p := s.Connections[i].IPsec; p != nil && (worst == nil || worst.Verdict == "permit") {
			worst = p
		}
	}
	return worst
}

// An IPsecState describes what is known about IPsec.
type IPsecState struct {
	Driver      string            `json:"driver"` // none: nothing requires IPsec
	Grace       string            `json:"grace"`
	Unanswered  string            `json:"unanswered"`        // how long a session continues while the driver does not answer
	Missing     []string          `json:"missing,omitempty"` // what the driver lacks to enforce required, with the commands that mend it
	Failure     string            `json:"failure,omitempty"` // what is wrong with the driver now, with what to do about it
	Portals     []IPsecPortal     `json:"portals"`
	Targets     []IPsecTarget     `json:"targets,omitempty"` // of which something is required
	Connections []IPsecConnection `json:"connections"`       // of which something is required
	Denials     []IPsecDenials    `json:"denials,omitempty"`
	Notices     uint64            `json:"notices"`  // changes of keys and policies
	Failures    uint64            `json:"failures"` // calls of the driver that failed or took too long
}

// An IPsecPortal describes what a portal requires.
type IPsecPortal struct {
	Listen  string   `json:"listen"`
	Demand  string   `json:"demand"`
	Profile string   `json:"profile,omitempty"`
	Sockets []string `json:"sockets"` // addresses
	Policy  bool     `json:"policy"`  // the sockets drop clear text
}

// An IPsecTarget describes what a target requires.
type IPsecTarget struct {
	Name    string `json:"name"`
	Demand  string `json:"demand"`
	Profile string `json:"profile,omitempty"`
}

// An IPsecConnection describes a connection and what covers it.
type IPsecConnection struct {
	TSIH      uint16 `json:"tsih,omitempty"` // 0: it has not logged in
	Initiator string `json:"initiator,omitempty"`
	Target    string `json:"target,omitempty"`
	Portal    string `json:"portal"`
	Local     string `json:"local"`
	Remote    string `json:"remote"`
	ConnectionProtection
	Unknown   bool      `json:"unknown,omitempty"` // the driver did not answer: the rest is not known
	InPolicy  bool      `json:"in_policy"`         // a policy demands ESP
	OutPolicy bool      `json:"out_policy"`
	SAs       []IPsecSA `json:"sas,omitempty"`
	// ESN says whether extended sequence numbers are required, and why; empty: unknown. ESNUnsure: nobody knows whether the interface is fast enough to require them.
	ESN       string `json:"esn,omitempty"`
	ESNUnsure bool   `json:"esn_unsure,omitempty"`
}

// An IPsecSA describes an SA.
type IPsecSA struct {
	Direction    string    `json:"direction"` // in or out
	SPI          string    `json:"spi"`
	Source       string    `json:"source"`
	Destination  string    `json:"destination"`
	ReqID        int       `json:"reqid"`
	Suite        string    `json:"suite"`
	ReplayWindow int       `json:"replay_window"`      // packets
	Lifetime     float64   `json:"lifetime,omitempty"` // seconds; 0: none
	Expires      time.Time `json:"expires,omitzero"`   // zero: never, or unknown
	IKE          bool      `json:"ike"`                // a key exchange made the keys
	LocalID      string    `json:"local_id,omitempty"`
	RemoteID     string    `json:"remote_id,omitempty"`
}

// IPsecDenials counts connections that were refused or ended.
type IPsecDenials struct {
	Moment string `json:"moment"` // accept, login or change
	Reason string `json:"reason"` // driver, keys, clear, profile, identity or program
	Count  uint64 `json:"count"`
}
