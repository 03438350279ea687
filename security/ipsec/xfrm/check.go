package xfrm

import (
	"errors"
	"fmt"

	"github.com/iser-target/iser-target/security/ipsec"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// How to get what is missing.
const (
	getCapability = "CAP_NET_ADMIN is missing. Run: systemctl edit iser-target, and add AmbientCapabilities=CAP_NET_ADMIN below [Service]"
	getUser       = "the kernel lacks CONFIG_XFRM_USER. Run: modprobe xfrm_user"
	getESP        = "the kernel lacks CONFIG_INET_ESP. Run: modprobe esp4"
	getESP6       = "the kernel lacks CONFIG_INET6_ESP. Run: modprobe esp6"
)

// explain adds what is missing when the kernel refused to do something.
func explain(action string, err error) error {
	why := ""
	switch {
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		why = getCapability
	case errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.ENOPROTOOPT), errors.Is(err, unix.EOPNOTSUPP):
		why = getUser
	case errors.Is(err, unix.EAFNOSUPPORT):
		why = "the kernel lacks the address family, or CONFIG_XFRM_USER. Run: modprobe xfrm_user, and allow AF_NETLINK in RestrictAddressFamilies of the unit"
	default:
		return fmt.Errorf("cannot %s: %w", action, err)
	}
	return fmt.Errorf("cannot %s: %w: %s", action, err, why)
}

// Check returns what is missing to read SAs and policies, to set policies of sockets and to encrypt. It changes nothing.
func Check() []error {
	if _, err := dump(); err != nil {
		return []error{err} // the rest would fail for the same reason
	}
	var missing []error
	if err := checkSocket(); err != nil {
		missing = append(missing, err)
	}
	for _, f := range []struct {
		family int
		why    string
	}{{unix.AF_INET, getESP}, {unix.AF_INET6, getESP6}} {
		if err := checkESP(f.family); err != nil {
			missing = append(missing, fmt.Errorf("cannot use ESP: %w: %s", err, f.why))
		}
	}
	return missing
}

func checkSocket() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("cannot open a socket: %w", err)
	}
	defer unix.Close(fd)
	return SocketPolicy(fd, unix.AF_INET, ipsec.Tunnel)
}

// checkESP asks the kernel to add an SA with integrity but without a cipher, not even the one for none. A kernel with ESP refuses it as invalid,
// after it loaded its module. One without refuses the protocol. So nothing is added.
func checkESP(family int) error {
	req := nl.NewNetlinkRequest(nl.XFRM_MSG_NEWSA, unix.NLM_F_ACK)
	b := make([]byte, sizeSA)
	b[0+75] = 1 // SPI 1 is reserved (RFC 4303, section 2.1)
	b[76] = unix.IPPROTO_ESP
	// Documentation addresses (RFC 5737, RFC 3849).
	from, to := []byte{192, 0, 2, 1}, []byte{192, 0, 2, 2}
	if family == unix.AF_INET6 {
		from, to = append([]byte{0x20, 0x01, 0x0d, 0xb8}, make([]byte, 12)...), append([]byte{0x20, 0x01, 0x0d, 0xb8}, make([]byte, 12)...)
		from[15], to[15] = 1, 2
	}
	copy(b[56:], to)
	copy(b[80:], from)
	for i := range 4 {
		native.PutUint64(b[96+8*i:], infinity)
	}
	native.PutUint16(b[40:], uint16(family))
	native.PutUint16(b[212:], uint16(family))
	b[214] = 1 // tunnel
	req.AddRawData(append(b, nl.NewRtAttr(nl.XFRMA_ALG_AUTH_TRUNC, algorithm("hmac(sha256)", 256, 128)).Serialize()...))
	_, err := req.Execute(unix.NETLINK_XFRM, 0)
	if errors.Is(err, unix.EINVAL) {
		return nil
	}
	if err == nil {
		return errors.New("the kernel accepts an SA without a cipher")
	}
	return err
}

// algorithm returns xfrm_algo_auth with a key of zeros.
func algorithm(name string, keyBits, icvBits int) []byte {
	b := make([]byte, sizeKey+keyBits/8)
	copy(b[:sizeName-1], name)
	native.PutUint32(b[sizeName:], uint32(keyBits))
	native.PutUint32(b[sizeName+4:], uint32(icvBits))
	return b
}
