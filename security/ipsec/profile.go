package ipsec

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/iser-target/iser-target/security"
)

// What the zero values of a Profile stand for.
const (
	defaultKeyBits = 128
	defaultWindow  = 32
	maxWindow      = 4096 // the largest one of Linux
)

// A FieldError says what is wrong with one key of a profile.
type FieldError struct {
	Field   string // the key in the configuration, like suites[1] or identities[0].id
	Problem string // without the key
}

// Error implements error.
func (e *FieldError) Error() string { return e.Field + ": " + e.Problem }

// Validate checks the profile. The error joins a *FieldError for each fault.
func (p *Profile) Validate() error {
	var errs []error
	fault := func(field, format string, args ...any) {
		errs = append(errs, &FieldError{field, fmt.Sprintf(format, args...)})
	}
	if p.Mode != "" && p.Mode != Tunnel && p.Mode != Transport {
		fault("mode", "%s is not a mode. Use tunnel or transport, or leave mode out to accept both", quote(string(p.Mode)))
	}
	if !slices.Contains([]int{0, 128, 192, 256}, p.MinKeyBits) {
		fault("min_key_bits", "%d is not a key length of AES. Use 128, 192 or 256", p.MinKeyBits)
	}
	if p.MinReplayWindow != 0 && (p.MinReplayWindow < defaultWindow || p.MinReplayWindow > maxWindow) {
		fault("min_replay_window", "%d is outside of the range from %d to %d packets", p.MinReplayWindow, defaultWindow, maxWindow)
	}
	if p.MaxLifetime < 0 || p.MaxLifetime != 0 && p.MaxLifetime < time.Second {
		fault("max_lifetime", "%v is too short. Use at least 1s, or leave max_lifetime out for no limit", p.MaxLifetime)
	}
	for i, name := range p.Suites {
		p.checkSuite(fmt.Sprintf("suites[%d]", i), name, slices.Index(p.Suites, name) < i, fault)
	}
	for i, r := range p.Identities {
		r.check(fmt.Sprintf("identities[%d]", i), fault)
	}
	return errors.Join(errs...)
}

func (p *Profile) checkSuite(field, name string, repeated bool, fault func(field, format string, args ...any)) {
	s, err := ParseSuite(name)
	switch {
	case err != nil:
		fault(field, "%v", err)
	case repeated:
		fault(field, "%s is listed twice", name)
	case !s.Encrypts() && !p.NullEncryption:
		fault(field, "%s does not encrypt. Set null_encryption: true if integrity alone is enough", name)
	case s.keyBits() != 0 && s.keyBits() < p.MinKeyBits:
		fault(field, "%s has a key of %d bits, but min_key_bits is %d", name, s.keyBits(), p.MinKeyBits)
	}
}

func (r IdentityRule) check(field string, fault func(field, format string, args ...any)) {
	if _, err := security.Compile([]string{r.Initiator}); err != nil {
		fault(field+".initiator", "%v", err)
	}
	switch id := strings.ToLower(r.ID); {
	case id == "":
		fault(field+".id", "it is empty. Use * to accept each identity")
	case len(id) > maxIdentity:
		fault(field+".id", "it has %d bytes, more than %d", len(id), maxIdentity)
	case strings.HasPrefix(id, "@#") || strings.HasPrefix(id, "keyid:"):
		fault(field+".id", "%s is a KEY_ID, which must not be used (RFC 7146, section 3.1). Use an address, a host name or a mail address",
			quote(r.ID))
	}
}

// maxIdentity bounds an IKE identity, in bytes.
const maxIdentity = 1024

// fastLink is the speed in Mbit/s from which on implementations must have extended sequence numbers, and should use them (RFC 7146, section 2).
const fastLink = 1000

// NeedsESN reports whether the profile requires extended sequence numbers of connections over l, and why.
func (p *Profile) NeedsESN(l Link) (required bool, why string) {
	switch {
	case p.ESN:
		return true, "esn: true"
	case !p.ESNAuto:
		return false, "esn: false"
	case l.Name == "":
		return false, "esn: auto, and the interface of the address is unknown"
	case l.Mbits <= 0:
		return false, fmt.Sprintf("esn: auto, and interface %s does not say its speed", l.Name)
	}
	why = fmt.Sprintf("esn: auto, and interface %s has %s", l.Name, rate(l.Mbits))
	if l.Mbits < fastLink {
		return false, why + ", less than 1 Gbit/s"
	}
	return true, why
}

// UnsureESN reports whether the profile would require extended sequence numbers if l said that it is fast.
func (p *Profile) UnsureESN(l Link) bool { return p.ESNAuto && !p.ESN && l.Mbits <= 0 }

func rate(mbits int) string {
	if mbits < 1000 {
		return fmt.Sprintf("%d Mbit/s", mbits)
	}
	return strconv.FormatFloat(float64(mbits)/1000, 'f', -1, 64) + " Gbit/s"
}

// accepted returns the suites that the profile accepts.
func (p *Profile) accepted() []string {
	if len(p.Suites) > 0 {
		return p.Suites
	}
	var names []string
	for _, s := range suites {
		if s.standard() && (s.Encrypts() || p.NullEncryption) && (s.keyBits() == 0 || s.keyBits() >= p.keyBits()) {
			names = append(names, s.Name)
		}
	}
	return names
}

func (p *Profile) keyBits() int {
	if p.MinKeyBits == 0 {
		return defaultKeyBits
	}
	return p.MinKeyBits
}

func (p *Profile) window() int {
	if p.MinReplayWindow == 0 {
		return defaultWindow
	}
	return p.MinReplayWindow
}

// Stricter returns the stricter of two demands. Off is the least strict one, and Required the strictest.
func Stricter(a, b Demand) Demand {
	if rank(a) >= rank(b) {
		return a
	}
	return b
}

// rank takes an unknown demand as the strictest one.
func rank(d Demand) int {
	switch d {
	case Off, "":
		return 0
	case Audit:
		return 1
	}
	return 2
}

// ParseDemand parses off, audit or required. The empty text is Off.
func ParseDemand(s string) (Demand, error) {
	switch d := Demand(s); d {
	case "":
		return Off, nil
	case Off, Audit, Required:
		return d, nil
	}
	return Off, fmt.Errorf("%s is not off, audit or required", quote(s))
}
