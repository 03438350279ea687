package xfrm

import (
	"encoding/binary"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/security/ipsec"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// The messages of these tests come from the encoders of the netlink library, which know the structures independently of this package.

func saInfo(change func(*nl.XfrmUsersaInfo)) []byte {
	m := &nl.XfrmUsersaInfo{Family: unix.AF_INET, Reqid: 7, Mode: 1, ReplayWindow: 32}
	m.Id.Daddr.FromIP(net.ParseIP("192.0.2.1"))
	m.Saddr.FromIP(net.ParseIP("192.0.2.2"))
	m.Id.Proto = unix.IPPROTO_ESP
	m.Id.Spi = nl.Swap32(0xc0ffee01)
	m.Lft.HardByteLimit, m.Lft.HardPacketLimit = nl.XFRM_INF, nl.XFRM_INF
	m.Lft.HardAddExpiresSeconds = 3960
	m.Curlft.AddTime = 1790000000
	if change != nil {
		change(m)
	}
	return m.Serialize()
}

func attr(kind int, value []byte) []byte { return nl.NewRtAttr(kind, value).Serialize() }

func aead(name string, keyBytes, icv int) []byte {
	a := nl.XfrmAlgoAEAD{AlgKeyLen: uint32(8 * keyBytes), AlgICVLen: uint32(icv), AlgKey: make([]byte, keyBytes)}
	copy(a.AlgName[:], name)
	return attr(nl.XFRMA_ALG_AEAD, a.Serialize())
}

func crypt(name string, keyBytes int) []byte {
	a := nl.XfrmAlgo{AlgKeyLen: uint32(8 * keyBytes), AlgKey: make([]byte, keyBytes)}
	copy(a.AlgName[:], name)
	return attr(nl.XFRMA_ALG_CRYPT, a.Serialize())
}

func auth(name string, keyBytes, icv int) []byte {
	a := nl.XfrmAlgoAuth{AlgKeyLen: uint32(8 * keyBytes), AlgTruncLen: uint32(icv), AlgKey: make([]byte, keyBytes)}
	copy(a.AlgName[:], name)
	return attr(nl.XFRMA_ALG_AUTH_TRUNC, a.Serialize())
}

func replayESN(window uint32) []byte {
	r := nl.XfrmReplayStateEsn{ReplayWindow: window, BmpLen: (window + 31) / 32}
	return attr(nl.XFRMA_REPLAY_ESN_VAL, r.Serialize())
}

func join(parts ...[]byte) (all []byte) {
	for _, p := range parts {
		all = append(all, p...)
	}
	return all
}

func TestParseSA(t *testing.T) {
	esn := func(m *nl.XfrmUsersaInfo) { m.Flags, m.ReplayWindow = nl.XFRM_STATE_ESN, 0 }
	for _, tc := range []struct {
		name, want string // suite with mode and ESN
		window     int
		life       time.Duration
		message    []byte
	}{
		{"SEC-7146.2-3 ESN with a large window", "esp-tunnel aes128gcm16 esn", 1024, 3960 * time.Second,
			join(saInfo(esn), aead("rfc4106(gcm(aes))", 20, 128), replayESN(1024))},
		{"a large window without ESN", "esp-tunnel aes256gcm16", 128, 3960 * time.Second,
			join(saInfo(func(m *nl.XfrmUsersaInfo) { m.ReplayWindow = 0 }), aead("rfc4106(gcm(aes))", 36, 128), replayESN(128))},
		{"small window, transport mode, no lifetime", "esp-transport aes128-sha1", 32, 0,
			join(saInfo(func(m *nl.XfrmUsersaInfo) { m.Mode, m.Lft.HardAddExpiresSeconds = 0, 0 }), auth("hmac(sha1)", 20, 96), crypt("cbc(aes)", 16))},
		{"AES-GMAC", "esp-tunnel aes128gmac", 32, 3960 * time.Second, join(saInfo(nil), aead("rfc4543(gcm(aes))", 20, 128))},
		{"chacha20poly1305", "esp-tunnel chacha20poly1305", 32, 3960 * time.Second, join(saInfo(nil), aead("rfc7539esp(chacha20,poly1305)", 36, 128))},
		{"null", "esp-tunnel null-sha256", 32, 3960 * time.Second, join(saInfo(nil), auth("hmac(sha256)", 32, 128), crypt("ecb(cipher_null)", 0))},
		{"integrity without its length", "esp-tunnel aes256-aesxcbc", 32, 3960 * time.Second,
			join(saInfo(nil), func() []byte {
				a := nl.XfrmAlgo{AlgKeyLen: 128, AlgKey: make([]byte, 16)}
				copy(a.AlgName[:], "xcbc(aes)")
				return attr(nl.XFRMA_ALG_AUTH, a.Serialize())
			}(), crypt("cbc(aes)", 32))},
		{"an infinite lifetime is none", "esp-tunnel aes128gcm16", 32, 0,
			join(saInfo(func(m *nl.XfrmUsersaInfo) { m.Lft.HardAddExpiresSeconds = nl.XFRM_INF }), aead("rfc4106(gcm(aes))", 20, 128))},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s, err := parseSA(tc.message)
			if err != nil {
				t.Fatal(err)
			}
			if got := s.String(); got != tc.want {
				t.Errorf("%s, want %s", got, tc.want)
			}
			if s.ReplayWindow != tc.window || s.Lifetime != tc.life || s.IKE != (tc.life > 0) || s.LifetimeBytes != 0 {
				t.Errorf("window %d, lifetime %v, IKE %v, bytes %d", s.ReplayWindow, s.Lifetime, s.IKE, s.LifetimeBytes)
			}
			if s.SPI != 0xc0ffee01 || s.ReqID != 7 || s.Source != netip.MustParseAddr("192.0.2.2") || s.Destination != netip.MustParseAddr("192.0.2.1") ||
				!s.usable() || s.mark || s.Added.Unix() != 1790000000 {
				t.Errorf("%+v", s)
			}
		})
	}
	// An SPI without keys, as an IKE daemon reserves it, is not usable.
	if s, err := parseSA(saInfo(nil)); err != nil || s.usable() {
		t.Errorf("%+v, %v", s, err)
	}
	m := nl.XfrmMark{Value: 1, Mask: 1}
	if s, err := parseSA(join(saInfo(nil), attr(nl.XFRMA_MARK, m.Serialize()), attr(nl.XFRMA_IF_ID, nl.Uint32Attr(5)))); err != nil || !s.mark || s.ifID != 5 {
		t.Errorf("%+v, %v", s, err)
	}
}

func TestParseFaults(t *testing.T) {
	whole := join(saInfo(nil), aead("rfc4106(gcm(aes))", 20, 128), replayESN(64), attr(nl.XFRMA_IF_ID, nl.Uint32Attr(5)))
	errors := 0
	for n := range len(whole) {
		if _, err := parseSA(whole[:n]); err != nil {
			errors++
			if !strings.Contains(err.Error(), "too short") {
				t.Fatalf("%d bytes: %v", n, err)
			}
		}
	}
	if errors < len(whole)-5 {
		t.Errorf("%d of %d cut messages are errors", errors, len(whole))
	}
	for _, b := range [][]byte{{1, 0, 0, 0}, {5, 0, 22, 0}, {3, 0, 0, 0}} {
		if _, err := parseSA(join(saInfo(nil), b)); err == nil {
			t.Errorf("attribute % x is accepted", b)
		}
	}
	if _, err := parsePolicy(join(policyInfo(0, nil), attr(nl.XFRMA_TMPL, make([]byte, 63)))); err == nil {
		t.Error("a template of 63 bytes is accepted")
	}
}

func policyInfo(dir uint8, change func(*nl.XfrmUserpolicyInfo)) []byte {
	m := &nl.XfrmUserpolicyInfo{Dir: dir, Priority: 100}
	m.Sel.Family = unix.AF_INET
	m.Sel.Daddr.FromIP(net.ParseIP("192.0.2.1"))
	m.Sel.PrefixlenD = 32
	m.Sel.Saddr.FromIP(net.ParseIP("192.0.2.0"))
	m.Sel.PrefixlenS = 24
	m.Sel.Proto = unix.IPPROTO_TCP
	m.Sel.Dport, m.Sel.DportMask = nl.Swap16(3260), 0xffff
	if change != nil {
		change(m)
	}
	return m.Serialize()
}

func tmpl(change func(*nl.XfrmUserTmpl)) []byte {
	m := &nl.XfrmUserTmpl{Family: unix.AF_INET, Reqid: 7, Mode: 1, Aalgos: ^uint32(0), Ealgos: ^uint32(0)}
	m.XfrmId.Proto = unix.IPPROTO_ESP
	m.XfrmId.Daddr.FromIP(net.ParseIP("192.0.2.1"))
	m.Saddr.FromIP(net.ParseIP("192.0.2.2"))
	if change != nil {
		change(m)
	}
	return attr(nl.XFRMA_TMPL, m.Serialize())
}

func TestParsePolicy(t *testing.T) {
	p, err := parsePolicy(join(policyInfo(dirIn, nil), tmpl(nil)))
	if err != nil || len(p.templates) != 1 {
		t.Fatalf("%+v, %v", p, err)
	}
	want := template{source: netip.MustParseAddr("192.0.2.2"), dst: netip.MustParseAddr("192.0.2.1"), proto: 50, mode: ipsec.Tunnel, reqID: 7}
	if p.templates[0] != want || p.priority != 100 || p.dir != dirIn || p.action != 0 || p.sub || p.mark {
		t.Errorf("%+v", p)
	}
	for _, tc := range []struct {
		from, to string
		want     bool
	}{
		{"192.0.2.2:40000", "192.0.2.1:3260", true},
		{"192.0.2.2:40000", "192.0.2.1:3261", false},
		{"192.0.2.2:40000", "192.0.2.3:3260", false},
		{"198.51.100.2:40000", "192.0.2.1:3260", false},
		{"[2001:db8::2]:40000", "[2001:db8::1]:3260", false},
	} {
		if got := p.selector.matches(netip.MustParseAddrPort(tc.from), netip.MustParseAddrPort(tc.to)); got != tc.want {
			t.Errorf("from %s to %s: %v", tc.from, tc.to, got)
		}
	}
}

func TestParseNotices(t *testing.T) {
	transport := saInfo(func(m *nl.XfrmUsersaInfo) { m.Mode = 0 })
	a, b := netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("192.0.2.1")
	for _, tc := range []struct {
		name string
		kind uint16
		data []byte
		want []ipsec.Change
	}{
		{"new SA in tunnel mode", nl.XFRM_MSG_NEWSA, saInfo(nil), []ipsec.Change{{Kind: ipsec.Added, SPI: 0xc0ffee01}}},
		{"changed SA in transport mode", nl.XFRM_MSG_UPDSA, transport, []ipsec.Change{{Kind: ipsec.Added, SPI: 0xc0ffee01, Remote: a}, {Kind: ipsec.Added, SPI: 0xc0ffee01, Remote: b}}},
		{"removed SA", nl.XFRM_MSG_DELSA, join(make([]byte, 24), attr(nl.XFRMA_SA, transport)), []ipsec.Change{{Kind: ipsec.Removed, SPI: 0xc0ffee01, Remote: a}, {Kind: ipsec.Removed, SPI: 0xc0ffee01, Remote: b}}},
		{"expired SA", nl.XFRM_MSG_EXPIRE, join(saInfo(nil), make([]byte, 8)), []ipsec.Change{{Kind: ipsec.Expired, SPI: 0xc0ffee01}}},
		{"flush of SAs", nl.XFRM_MSG_FLUSHSA, make([]byte, 4), []ipsec.Change{{Kind: ipsec.Removed}}},
		{"new policy", nl.XFRM_MSG_NEWPOLICY, nil, []ipsec.Change{{Kind: ipsec.Policy}}},
		{"flush of policies", nl.XFRM_MSG_FLUSHPOLICY, nil, []ipsec.Change{{Kind: ipsec.Policy}}},
		{"missing keys", nl.XFRM_MSG_ACQUIRE, nil, []ipsec.Change{{Kind: ipsec.Acquired}}},
		{"a new SA cut short", nl.XFRM_MSG_NEWSA, saInfo(nil)[:100], []ipsec.Change{{Kind: ipsec.Lost}}},
		{"a removed SA cut short", nl.XFRM_MSG_DELSA, make([]byte, 10), []ipsec.Change{{Kind: ipsec.Lost}}},
		{"another message", nl.XFRM_MSG_NEWAE, nil, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := parseNotices(message(tc.kind, tc.data))
			if len(got) != len(tc.want) {
				t.Fatalf("%+v, want %+v", got, tc.want)
			}
			for i := range got {
				if got[i] != tc.want[i] {
					t.Errorf("%+v, want %+v", got[i], tc.want[i])
				}
			}
		})
	}
}

// message returns a netlink message with its header.
func message(kind uint16, data []byte) []byte {
	b := make([]byte, unix.SizeofNlMsghdr)
	binary.NativeEndian.PutUint32(b, uint32(unix.SizeofNlMsghdr+len(data)))
	binary.NativeEndian.PutUint16(b[4:], kind)
	return append(b, data...)
}

func FuzzParseSA(f *testing.F) {
	f.Add(join(saInfo(nil), aead("rfc4106(gcm(aes))", 20, 128), replayESN(64)))
	f.Add(join(saInfo(nil), auth("hmac(sha1)", 20, 96), crypt("cbc(aes)", 16), attr(nl.XFRMA_IF_ID, nl.Uint32Attr(5))))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := parseSA(b)
		if err != nil {
			return
		}
		if s.ReplayWindow < 0 || s.Lifetime < 0 || s.AEAD.KeyBits < 0 || s.Encryption.KeyBits < 0 || len(s.AEAD.Name) > sizeName {
			t.Errorf("%+v", s)
		}
		(&snapshot{states: []state{s}}).look(ipsec.Flow{Local: netip.AddrPortFrom(s.Destination, 3260), Remote: netip.AddrPortFrom(s.Source, 1)})
	})
}

func FuzzParsePolicy(f *testing.F) {
	f.Add(join(policyInfo(0, nil), tmpl(nil)))
	f.Add(join(policyInfo(1, func(m *nl.XfrmUserpolicyInfo) { m.Sel.Family = unix.AF_INET6; m.Sel.PrefixlenD = 128 }), attr(nl.XFRMA_POLICY_TYPE, []byte{1, 0, 0, 0, 0, 0})))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := parsePolicy(b)
		if err != nil {
			return
		}
		s := snapshot{policies: []policy{p}}
		s.look(ipsec.Flow{Local: netip.MustParseAddrPort("192.0.2.1:3260"), Remote: netip.MustParseAddrPort("192.0.2.2:1")})
		s.look(ipsec.Flow{Local: netip.MustParseAddrPort("[2001:db8::1]:3260"), Remote: netip.MustParseAddrPort("[2001:db8::2]:1")})
	})
}

func FuzzParseNotices(f *testing.F) {
	f.Add(message(nl.XFRM_MSG_NEWSA, saInfo(nil)))
	f.Add(join(message(nl.XFRM_MSG_DELSA, join(make([]byte, 24), attr(nl.XFRMA_SA, saInfo(nil)))), message(nl.XFRM_MSG_ACQUIRE, nil)))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, c := range parseNotices(b) {
			if c.Kind == "" {
				t.Errorf("%+v", c)
			}
		}
	})
}
