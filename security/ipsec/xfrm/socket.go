package xfrm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/iser-target/iser-target/security/ipsec"
	"golang.org/x/sys/unix"
)

// SocketPolicy demands that all packets which arrive at the socket came in ESP in the mode, whatever the policies of the machine say. Set it on
// a listener before it listens: the kernel then drops a SYN in clear text without an answer, and accepted sockets inherit the policy. family
// is unix.AF_INET or unix.AF_INET6, that of the socket. A socket for both families lets IPv4 pass, so use one with
// IPV6_V6ONLY and a second one. The other direction depends on the SA of the peer: see PinPolicy.
//
// The error names the missing capability or kernel option.
func SocketPolicy(fd, family int, mode ipsec.Mode) error {
	if family == unix.AF_INET6 {
		only, err := unix.GetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY)
		if err != nil {
			return fmt.Errorf("socket policy: %w", err)
		}
		if only == 0 {
			return errors.New("socket policy: the socket also takes IPv4, for which the policy would not hold. Set IPV6_V6ONLY and use a second socket")
		}
	}
	return setPolicy(fd, family, dirIn, ipsec.SA{Mode: mode})
}

// PinPolicy demands that the kernel sends packets of a connected socket in ESP only, by sa or one that replaces it with the same mode,
// endpoints and ReqID. It holds after all policies of the machine are gone: packets then wait instead of leaving in clear text.
func PinPolicy(fd, family int, sa ipsec.SA) error {
	return setPolicy(fd, family, dirOut, sa)
}

// setPolicy gives the socket a policy with one template (RFC 4301, section 4.4.1). Without addresses and ReqID the template fits each SA of
// its mode, in the incoming direction.
func setPolicy(fd, family int, dir byte, sa ipsec.SA) error {
	level, option := unix.IPPROTO_IP, unix.IP_XFRM_POLICY
	switch family {
	case unix.AF_INET:
	case unix.AF_INET6:
		level, option = unix.IPPROTO_IPV6, unix.IPV6_XFRM_POLICY
	default:
		return fmt.Errorf("socket policy: address family %d is not IPv4 or IPv6", family)
	}
	b, err := socketPolicy(family, dir, sa)
	if err != nil {
		return fmt.Errorf("socket policy: %w", err)
	}
	// The kernel compiles the policy with the module xfrm_user, but does not load it for that. A socket of its family loads it.
	if err := loadUser(); err != nil {
		return err
	}
	if err := unix.SetsockoptString(fd, level, option, string(b)); err != nil {
		return explain("set the policy of a socket", err)
	}
	return nil
}

func loadUser() error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_XFRM)
	if err != nil {
		return explain("set the policy of a socket", err)
	}
	return unix.Close(fd)
}

// socketPolicy returns xfrm_userpolicy_info, followed by one xfrm_user_tmpl.
func socketPolicy(family int, dir byte, sa ipsec.SA) ([]byte, error) {
	b := make([]byte, sizePolicy+sizeTemplate)
	native.PutUint16(b[40:], uint16(family)) // the selector takes all packets of the socket
	for i := range 4 {
		native.PutUint64(b[sizeSelector+8*i:], infinity) // limits in bytes and packets
	}
	b[160] = dir
	t := b[sizePolicy:]
	tunnel := netip.Addr{}
	switch sa.Mode {
	case ipsec.Transport:
	case ipsec.Tunnel:
		t[48] = 1
		tunnel = sa.Destination
		if dir == dirOut && (!sa.Source.IsValid() || !sa.Destination.IsValid()) {
			return nil, errors.New("the SA has no endpoints")
		}
	default:
		return nil, fmt.Errorf("mode %q is not tunnel or transport", string(sa.Mode))
	}
	outer := family
	if tunnel.IsValid() {
		outer = unix.AF_INET6
		if tunnel.Is4() {
			outer = unix.AF_INET
		}
		copy(t, sa.Destination.AsSlice())
		copy(t[28:], sa.Source.AsSlice())
	}
	binary.BigEndian.PutUint32(t[16:], 0) // each SPI
	t[20] = unix.IPPROTO_ESP
	native.PutUint16(t[24:], uint16(outer))
	native.PutUint32(t[44:], uint32(sa.ReqID))
	for i := range 3 {
		native.PutUint32(t[52+4*i:], ^uint32(0)) // each algorithm; the profile decides
	}
	return b, nil
}
