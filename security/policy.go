package security

import "net"

// A ConnPolicy admits or refuses an accepted TCP connection, before the target answers the
// MPA Request and allocates memory for the connection. It is the place to require IPsec (RFC
// 7146; RFC 7143, section 9.3): the kernel does ESP and an IKE daemon negotiates keys, so a
// target can only check whether they cover the two addresses.
type ConnPolicy interface {
	// Admit returns the reason to refuse the connection, or nil. It must be safe for
	// concurrent use.
	Admit(local, remote net.Addr) error
}

// AllowAll admits all connections, for a target that relies on its network. It does not check
// IPsec.
type AllowAll struct{}

// Admit implements ConnPolicy.
func (AllowAll) Admit(_, _ net.Addr) error { return nil }
