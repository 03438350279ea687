package xfrm

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"time"

	"github.com/iser-target/iser-target/security/ipsec"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Sizes and offsets of the kernel's structures, in bytes (include/uapi/linux/xfrm.h). Numbers are in the order of the
// host, except SPIs and ports.
const (
	sizeSelector = 56
	sizeSA       = 224 // xfrm_usersa_info
	sizePolicy   = 168 // xfrm_userpolicy_info
	sizeTemplate = 64  // xfrm_user_tmpl
	sizeName     = 64  // of an algorithm
	sizeKey      = 72  // offset of the key after name, key length and ICV length
	flagESN      = 128 // XFRM_STATE_ESN
	infinity     = math.MaxUint64
)

var native = nl.NativeEndian()

// A selector says which packets a policy or an SA is for.
type selector struct {
	family             uint16 // 0: all packets
	source, dst        netip.Prefix
	sport, smask       uint16
	dport, dmask       uint16
	proto              uint8 // 0: each
	ifindex            int32
	badPrefix, present bool
}

// matches reports whether packets of TCP from source to dst are selected.
func (s selector) matches(source, dst netip.AddrPort) bool {
	if s.family == 0 {
		return true
	}
	return !s.badPrefix && s.source.Contains(source.Addr()) && s.dst.Contains(dst.Addr()) &&
		(source.Port()^s.sport)&s.smask == 0 && (dst.Port()^s.dport)&s.dmask == 0 &&
		(s.proto == 0 || s.proto == unix.IPPROTO_TCP) && s.ifindex == 0
}

func parseSelector(b []byte) selector {
	s := selector{
		dport: binary.BigEndian.Uint16(b[32:]), dmask: binary.BigEndian.Uint16(b[34:]),
		sport: binary.BigEndian.Uint16(b[36:]), smask: binary.BigEndian.Uint16(b[38:]),
		family: native.Uint16(b[40:]), proto: b[44], ifindex: int32(native.Uint32(b[48:])), present: true,
	}
	s.dst = netip.PrefixFrom(parseAddr(b[:16], s.family), int(b[42]))
	s.source = netip.PrefixFrom(parseAddr(b[16:32], s.family), int(b[43]))
	s.badPrefix = !s.dst.IsValid() || !s.source.IsValid()
	return s
}

// parseAddr parses an address of 16 bytes. It is invalid for a family other than AF_INET and AF_INET6.
func parseAddr(b []byte, family uint16) netip.Addr {
	switch family {
	case unix.AF_INET:
		return netip.AddrFrom4([4]byte(b[:4]))
	case unix.AF_INET6:
		return netip.AddrFrom16([16]byte(b[:16]))
	}
	return netip.Addr{}
}

// A state is an SA with what decides whether a flow uses it.
type state struct {
	ipsec.SA
	proto    uint8
	selector selector
	mark     bool // only packets with a mark use it
	ifID     uint32
}

// usable reports whether packets can use the SA. One that waits for keys has no algorithms.
func (s state) usable() bool {
	return s.proto == unix.IPPROTO_ESP && s.SPI != 0 && (s.AEAD.Name != "" || s.Encryption.Name != "" || s.Authentication.Name != "")
}

// A template is the SA that a policy requires.
type template struct {
	source, dst netip.Addr
	spi         uint32
	proto       uint8
	mode        ipsec.Mode
	reqID       uint32
	optional    bool
}

// A policy is one of the machine.
type policy struct {
	selector  selector
	dir       uint8 // XFRM_POLICY_IN, XFRM_POLICY_OUT and others
	action    uint8 // 0: allow
	priority  uint32
	templates []template
	mark      bool
	sub       bool // of the type that does not count
	ifID      uint32
}

var errShort = errors.New("the message is too short")

// parseSA parses a message of type XFRM_MSG_NEWSA, without its header. The result holds no part of b, which has keys in it.
func parseSA(b []byte) (state, error) {
	if len(b) < sizeSA {
		return state{}, fmt.Errorf("SA: %w: %d bytes", errShort, len(b))
	}
	family := native.Uint16(b[212:])
	s := state{
		selector: parseSelector(b), proto: b[76],
		SA: ipsec.SA{
			SPI: binary.BigEndian.Uint32(b[72:]), Destination: parseAddr(b[56:72], family), Source: parseAddr(b[80:96], family),
			ReqID: int(native.Uint32(b[208:])), Mode: mode(b[214]), ReplayWindow: int(b[215]), ESN: b[216]&flagESN != 0,
		},
	}
	if n := native.Uint64(b[104:]); n != infinity {
		s.LifetimeBytes = n
	}
	s.Lifetime = seconds(native.Uint64(b[136:]))
	// The kernel does not say who made the keys. IKE daemons set a lifetime, and keys that were set by hand have none.
	s.IKE = s.Lifetime > 0
	if added := native.Uint64(b[176:]); added != 0 && added < math.MaxInt64 {
		s.Added = time.Unix(int64(added), 0)
	}
	err := attributes(b[sizeSA:], func(kind uint16, v []byte) error {
		switch kind {
		case nl.XFRMA_ALG_AEAD:
			var err error
			s.AEAD, err = parseAlgorithm(v, true)
			s.AEAD.KeyBits -= saltBits(s.AEAD)
			return err
		case nl.XFRMA_ALG_CRYPT:
			var err error
			s.Encryption, err = parseAlgorithm(v, false)
			s.Encryption.KeyBits -= saltBits(s.Encryption)
			return err
		case nl.XFRMA_ALG_AUTH_TRUNC:
			var err error
			s.Authentication, err = parseAlgorithm(v, true)
			return err
		case nl.XFRMA_ALG_AUTH:
			if s.Authentication.Name != "" {
				return nil // XFRMA_ALG_AUTH_TRUNC says more
			}
			var err error
			s.Authentication, err = parseAlgorithm(v, false)
			s.Authentication.ICVBits = truncation[s.Authentication.Name]
			return err
		case nl.XFRMA_REPLAY_ESN_VAL:
			if len(v) < 24 {
				return fmt.Errorf("replay state: %w", errShort)
			}
			s.ReplayWindow = int(min(native.Uint32(v[20:]), math.MaxInt32))
		case nl.XFRMA_MARK:
			s.mark = true
		case nl.XFRMA_IF_ID:
			if len(v) < 4 {
				return fmt.Errorf("interface id: %w", errShort)
			}
			s.ifID = native.Uint32(v)
		}
		return nil
	})
	if err != nil {
		return state{}, fmt.Errorf("SA 0x%08x: %w", s.SPI, err)
	}
	return s, nil
}

// truncation has the length of the ICV, in bits, that the kernel takes where a message does not say it.
var truncation = map[string]int{"hmac(sha1)": 96, "hmac(sha256)": 96, "hmac(sha384)": 192, "hmac(sha512)": 256, "xcbc(aes)": 96, "hmac(md5)": 96}

// saltBits returns how much of what the kernel calls the key is salt.
func saltBits(a ipsec.Algorithm) int {
	bits := 0
	switch a.Name {
	case "rfc4106(gcm(aes))", "rfc4543(gcm(aes))", "rfc3686(ctr(aes))", "rfc7539esp(chacha20,poly1305)":
		bits = 32
	case "rfc4309(ccm(aes))":
		bits = 24
	}
	return min(bits, a.KeyBits)
}

func parseAlgorithm(b []byte, withICV bool) (ipsec.Algorithm, error) {
	need := sizeName + 4
	if withICV {
		need = sizeKey
	}
	if len(b) < need {
		return ipsec.Algorithm{}, fmt.Errorf("algorithm: %w", errShort)
	}
	name, _, _ := bytes.Cut(b[:sizeName], []byte{0})
	a := ipsec.Algorithm{Name: string(name), KeyBits: int(min(native.Uint32(b[sizeName:]), math.MaxInt32))}
	if withICV {
		a.ICVBits = int(min(native.Uint32(b[sizeName+4:]), math.MaxInt32))
	}
	return a, nil
}

// parsePolicy parses a message of type XFRM_MSG_NEWPOLICY, without its header.
func parsePolicy(b []byte) (policy, error) {
	if len(b) < sizePolicy {
		return policy{}, fmt.Errorf("policy: %w: %d bytes", errShort, len(b))
	}
	p := policy{selector: parseSelector(b), priority: native.Uint32(b[152:]), dir: b[160], action: b[161]}
	err := attributes(b[sizePolicy:], func(kind uint16, v []byte) error {
		switch kind {
		case nl.XFRMA_TMPL:
			if len(v)%sizeTemplate != 0 {
				return fmt.Errorf("templates: %w: %d bytes", errShort, len(v))
			}
			for ; len(v) > 0; v = v[sizeTemplate:] {
				family := native.Uint16(v[24:])
				p.templates = append(p.templates, template{
					dst: parseAddr(v, family), spi: binary.BigEndian.Uint32(v[16:]), proto: v[20], source: parseAddr(v[28:], family),
					reqID: native.Uint32(v[44:]), mode: mode(v[48]), optional: v[50] != 0,
				})
			}
		case nl.XFRMA_POLICY_TYPE:
			p.sub = len(v) > 0 && v[0] != 0
		case nl.XFRMA_MARK:
			p.mark = true
		case nl.XFRMA_IF_ID:
			if len(v) < 4 {
				return fmt.Errorf("interface id: %w", errShort)
			}
			p.ifID = native.Uint32(v)
		}
		return nil
	})
	if err != nil {
		return policy{}, fmt.Errorf("policy %d: %w", p.priority, err)
	}
	return p, nil
}

// attributes calls f for each attribute of b.
func attributes(b []byte, f func(kind uint16, value []byte) error) error {
	for len(b) > 0 {
		if len(b) < unix.SizeofRtAttr {
			return fmt.Errorf("attribute: %w", errShort)
		}
		n := int(native.Uint16(b))
		if n < unix.SizeofRtAttr || n > len(b) {
			return fmt.Errorf("attribute: %w: it has %d of %d bytes", errShort, len(b), n)
		}
		if err := f(native.Uint16(b[2:])&^unix.NLA_F_NESTED, b[unix.SizeofRtAttr:n]); err != nil {
			return err
		}
		b = b[min((n+unix.RTA_ALIGNTO-1)&^(unix.RTA_ALIGNTO-1), len(b)):]
	}
	return nil
}

func mode(b byte) ipsec.Mode {
	switch b {
	case 0:
		return ipsec.Transport
	case 1:
		return ipsec.Tunnel
	case 4:
		return "beet"
	}
	return ipsec.Mode(fmt.Sprintf("mode %d", b))
}

func seconds(n uint64) time.Duration {
	if n == infinity {
		return 0
	}
	return time.Duration(min(n, math.MaxInt64/uint64(time.Second))) * time.Second
}
