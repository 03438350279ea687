package security

import "net"

// A ConnPolicy decides about a TCP connection that has been accepted, before
// the MPA Request on it is answered and before any memory is set aside for it.
// It is where a requirement for IPsec belongs: ESP is done by the kernel and
// keys are made by an IKE daemon, so that all a target can do is to look
// whether the two addresses are covered by them (RFC 7146; RFC 7143, section
// 9.3), and to refuse the connection if they are not.
type ConnPolicy interface {
	// Admit returns the reason why the connection is refused, or nil. It may
	// be called by several goroutines at a time.
	Admit(local, remote net.Addr) error
}

// AllowAll is the policy of a target that relies on its network. It checks no
// IPsec, and does not claim to.
type AllowAll struct{}

func (AllowAll) Admit(_, _ net.Addr) error { return nil }
