package ipsec

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// A Suite is what protects the payload of an SA: an AEAD, or encryption and integrity.
type Suite struct {
	Name                             string // strongSwan's, like aes128gcm16 or aes128-sha256
	AEAD, Encryption, Authentication Algorithm
}

// Encrypts reports whether the suite hides the payload. AES-GMAC and null encryption do not.
func (s Suite) Encrypts() bool {
	return s.AEAD.Name != "" && s.AEAD.Name != gmac || s.Encryption.Name != "" && s.Encryption.Name != null
}

// Counter reports whether the suite is broken by a second packet with the same key and sequence number, as counter modes and
// the modes built on them are (RFC 3723, section 5.9).
func (s Suite) Counter() bool { return s.AEAD.Name != "" }

// keyBits returns the length of the key that decides over the strength of the suite: of the encryption, or of AES-GMAC. It is 0
// for integrity by a MAC alone.
func (s Suite) keyBits() int {
	if s.AEAD.Name != "" {
		return s.AEAD.KeyBits
	}
	return s.Encryption.KeyBits
}

// The kernel's names of the algorithms that suites are made of.
const (
	gcm    = "rfc4106(gcm(aes))"
	gmac   = "rfc4543(gcm(aes))"
	chacha = "rfc7539esp(chacha20,poly1305)"
	cbc    = "cbc(aes)"
	null   = "ecb(cipher_null)"
)

// ciphers and macs make the suites with two algorithms. The lengths of the ICV are those of RFC 2404, 4868 and 3566.
var (
	ciphers = []Suite{
		{Name: "aes128", Encryption: Algorithm{Name: cbc, KeyBits: 128}},
		{Name: "aes192", Encryption: Algorithm{Name: cbc, KeyBits: 192}},
		{Name: "aes256", Encryption: Algorithm{Name: cbc, KeyBits: 256}},
		{Name: "null", Encryption: Algorithm{Name: null}},
	}
	macs = []Suite{
		{Name: "sha1", Authentication: Algorithm{"hmac(sha1)", 160, 96}},
		{Name: "sha256", Authentication: Algorithm{"hmac(sha256)", 256, 128}},
		{Name: "sha384", Authentication: Algorithm{"hmac(sha384)", 384, 192}},
		{Name: "sha512", Authentication: Algorithm{"hmac(sha512)", 512, 256}},
		{Name: "aesxcbc", Authentication: Algorithm{"xcbc(aes)", 128, 96}},
	}
)

// suites lists all suites that a profile can name, the preferred ones first.
var suites = func() []Suite {
	var all []Suite
	for _, bits := range []int{128, 192, 256} {
		all = append(all, Suite{Name: fmt.Sprintf("aes%dgcm16", bits), AEAD: Algorithm{gcm, bits, 128}})
	}
	all = append(all, Suite{Name: "chacha20poly1305", AEAD: Algorithm{chacha, 256, 128}})
	for _, c := range ciphers {
		for _, m := range macs {
			all = append(all, Suite{Name: c.Name + "-" + m.Name, Encryption: c.Encryption, Authentication: m.Authentication})
		}
	}
	for _, bits := range []int{128, 192, 256} {
		all = append(all, Suite{Name: fmt.Sprintf("aes%dgmac", bits), AEAD: Algorithm{gmac, bits, 128}})
	}
	return all
}()

// Suites returns the names of all suites that a profile can name.
func Suites() []string {
	names := make([]string, len(suites))
	for i, s := range suites {
		names[i] = s.Name
	}
	return names
}

// standard reports whether RFC 7146, sections 2.1 and 2.2, names the algorithms of s. SHA-2 takes the place of SHA-1
// where both ends have it.
func (s Suite) standard() bool { return s.AEAD.Name != chacha }

// ParseSuite parses a suite as strongSwan writes it, without Diffie-Hellman group and without esn or noesn. The error says
// what is wrong with name, and lists the accepted ones.
func ParseSuite(name string) (Suite, error) {
	if i := slices.IndexFunc(suites, func(s Suite) bool { return s.Name == name }); i >= 0 {
		return suites[i], nil
	}
	return Suite{}, fmt.Errorf("suite %s: %w. Use one of %s", quote(name), suiteFault(name), strings.Join(Suites(), ", "))
}

// suiteFault returns the most precise reason why name is not a suite.
func suiteFault(name string) error {
	parts := strings.Split(strings.ToLower(name), "-")
	known := func(list []Suite, s string) bool {
		return slices.ContainsFunc(list, func(x Suite) bool { return x.Name == s })
	}
	for _, s := range parts {
		switch {
		case s == "des" || strings.HasPrefix(s, "des_") || strings.HasPrefix(s, "des-"):
			return errors.New("DES must not be used (RFC 7143, section 9.3.2)")
		case s == "esn" || s == "noesn":
			return fmt.Errorf("%s is not an algorithm; the key esn requires extended sequence numbers", s)
		case strings.HasPrefix(s, "modp") || strings.HasPrefix(s, "ecp") || strings.HasPrefix(s, "curve") || strings.HasPrefix(s, "x25519"):
			return fmt.Errorf("%s is a key exchange, which the IKE daemon chooses", quote(s))
		}
	}
	switch {
	case name == "":
		return errors.New("the name is empty")
	case known(suites, strings.ToLower(name)):
		return errors.New("names are in small letters")
	case len(parts) == 1 && known(ciphers, parts[0]):
		return errors.New("encryption must not be without integrity (RFC 7143, section 9.3.2)")
	case len(parts) == 1 && known(macs, parts[0]):
		return errors.New("encryption is missing; null is for none")
	case len(parts) == 2 && known(suites, parts[0]):
		return fmt.Errorf("%s includes integrity", quote(parts[0]))
	case len(parts) == 2 && known(ciphers, parts[0]):
		return fmt.Errorf("integrity algorithm %s is not accepted", quote(parts[1]))
	case len(parts) <= 2:
		return fmt.Errorf("encryption algorithm %s is not accepted", quote(parts[0]))
	}
	return errors.New("it has more than two parts")
}

// quote quotes s for a message. It cuts what is longer than a name can be.
func quote(s string) string {
	if len(s) > 64 {
		s = s[:64] + "…"
	}
	return fmt.Sprintf("%q", s)
}

// Suite returns the suite of the SA. It reports false for one that ParseSuite does not know.
func (sa SA) Suite() (Suite, bool) {
	i := slices.IndexFunc(suites, func(s Suite) bool {
		return s.AEAD == sa.AEAD && sameCipher(s.Encryption, sa.Encryption) && s.Authentication == sa.Authentication
	})
	if i < 0 {
		return Suite{}, false
	}
	return suites[i], true
}

// sameCipher compares without the ICV, which encryption does not have, and takes both names of null encryption.
func sameCipher(a, b Algorithm) bool {
	return a.Name == b.Name && a.KeyBits == b.KeyBits || a.Name == null && b.isNull()
}

func (a Algorithm) isNull() bool {
	return a.Name == null || a.Name == "cipher_null" || a.Name == "digest_null"
}

// String returns how messages and lists show the SA, like "esp-tunnel aes128gcm16 esn". They show a suite that ParseSuite
// does not know by the kernel's names.
func (sa SA) String() string {
	s := "esp-" + string(sa.Mode) + " " + sa.suiteName()
	if sa.ESN {
		s += " esn"
	}
	return s
}

func (sa SA) suiteName() string {
	if s, ok := sa.Suite(); ok {
		return s.Name
	}
	var parts []string
	for _, a := range []Algorithm{sa.AEAD, sa.Encryption, sa.Authentication} {
		switch {
		case a.Name == "":
		case a.ICVBits != 0:
			parts = append(parts, fmt.Sprintf("%s/%d/%d", a.Name, a.KeyBits, a.ICVBits))
		default:
			parts = append(parts, fmt.Sprintf("%s/%d", a.Name, a.KeyBits))
		}
	}
	return strings.Join(parts, "-")
}
