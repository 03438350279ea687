package security

import (
	"crypto/hmac"
	"crypto/md5"
	"crypto/rand"
	"crypto/sha1"
	"crypto/sha256"
	"crypto/sha3"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"slices"
	"strings"
)

// A CHAPAlgorithm is the hash of a CHAP response, by its number in CHAP_A (RFC
// 7143, section 12.1.3; the registry of PPP authentication algorithms).
type CHAPAlgorithm uint8

// CHAP algorithms.
const (
	CHAPMD5     CHAPAlgorithm = 5
	CHAPSHA1    CHAPAlgorithm = 6
	CHAPSHA256  CHAPAlgorithm = 7
	CHAPSHA3256 CHAPAlgorithm = 8
)

// chapHashes is what we know of the algorithms, in our order of preference.
var chapHashes = []struct {
	algorithm CHAPAlgorithm
	name      string
	new       func() hash.Hash
}{
	{CHAPSHA3256, "sha3-256", func() hash.Hash { return sha3.New256() }},
	{CHAPSHA256, "sha256", sha256.New},
	{CHAPSHA1, "sha1", sha1.New},
	{CHAPMD5, "md5", md5.New},
}

// ParseCHAPAlgorithms returns the algorithms of these names, and all that are
// there, from the strongest to the weakest, if there are no names.
func ParseCHAPAlgorithms(names []string) ([]CHAPAlgorithm, error) {
	var all []CHAPAlgorithm
	var known []string
	for _, h := range chapHashes {
		all, known = append(all, h.algorithm), append(known, h.name)
	}
	if len(names) == 0 {
		return all, nil
	}
	list := make([]CHAPAlgorithm, len(names))
	for i, name := range names {
		row := slices.Index(known, name)
		if row < 0 {
			return nil, fmt.Errorf("%q is none of %s", name, strings.Join(known, ", "))
		}
		if slices.Contains(list[:i], all[row]) {
			return nil, fmt.Errorf("%q is there twice", name)
		}
		list[i] = all[row]
	}
	return list, nil
}

// hash is a new hash of algorithm a, which NewCHAP has found in chapHashes.
func (a CHAPAlgorithm) hash() hash.Hash { return chapHashes[a.row()].new() }

// row is where a is in chapHashes; -1 if it is not.
func (a CHAPAlgorithm) row() int {
	for i, h := range chapHashes {
		if h.algorithm == a {
			return i
		}
	}
	return -1
}

const (
	// MinSecret is the least length of a secret, in octets. A secret of less
	// than 96 bits needs IPsec encryption (RFC 7143, section 9.2.1), which
	// this target cannot verify.
	MinSecret = 12
	// MaxSecret is the greatest, as with open-iscsi.
	MaxSecret = 256
	// MaxCHAPName is the longest CHAP_N that we take or send, in octets: a
	// simple-value (RFC 7143, section 6.1).
	MaxCHAPName = 255
)

// A Secret is a CHAP secret, octet by octet. It does not show in anything that
// is printed or logged.
type Secret string

// ParseSecret takes a secret as it is written in a file: "0x" and an even
// number of hexadecimal digits, or else the text itself. The errors do not say
// what the secret is.
func ParseSecret(s string) (Secret, error) {
	if digits, ok := strings.CutPrefix(s, "0x"); ok {
		b, err := hex.DecodeString(digits)
		if err != nil {
			return "", errors.New("secret begins with 0x, but does not go on with an even number of hexadecimal digits")
		}
		s = string(b)
	}
	if err := Secret(s).check(); err != nil {
		return "", err
	}
	return Secret(s), nil
}

func (s Secret) check() error {
	if len(s) < MinSecret {
		return fmt.Errorf("secret has %d octets, less than %d (96 bits)", len(s), MinSecret)
	}
	if len(s) > MaxSecret {
		return fmt.Errorf("secret has %d octets, more than %d", len(s), MaxSecret)
	}
	return nil
}

const hidden = "(hidden)"

// Format writes no part of s, whatever the verb.
func (Secret) Format(f fmt.State, _ rune) { io.WriteString(f, hidden) }

// MarshalText returns no part of s.
func (Secret) MarshalText() ([]byte, error) { return []byte(hidden), nil }

// A CHAPIdentity is who authenticates, and the proof. Its zero value is nobody.
type CHAPIdentity struct {
	Name   string // CHAP_N; need not be an iSCSI name
	Secret Secret
}

func (i CHAPIdentity) isNobody() bool { return i == CHAPIdentity{} }

func (i CHAPIdentity) check() error {
	if i.Name == "" || len(i.Name) > MaxCHAPName || strings.ContainsRune(i.Name, 0) {
		return fmt.Errorf("CHAP name must have 1 to %d octets, none of them NUL", MaxCHAPName)
	}
	if err := i.Secret.check(); err != nil {
		return fmt.Errorf("%q: %w", i.Name, err)
	}
	return nil
}

// A CHAPUser is an initiator, or several that share an identity.
type CHAPUser struct {
	CHAPIdentity

	// Initiator is a pattern of the iSCSI names that may use this identity
	// (RFC 7143, section 9.2); empty: any.
	Initiator string

	// Target is who the target is to this user; nobody: CHAPConfig.Target.
	Target CHAPIdentity
}

// A CHAPConfig says who may log in and who the target is.
type CHAPConfig struct {
	Algorithms []CHAPAlgorithm // in order of preference
	Users      []CHAPUser
	Target     CHAPIdentity // nobody: the target does not authenticate itself
}

// CHAP authenticates initiators, and the target to them (RFC 7143, sections
// 9.2.1 and 12.1.3). It does not change and may be used by any goroutine.
type CHAP struct {
	algorithms []CHAPAlgorithm
	users      map[string]chapUser // by CHAP_N
	decoy      Secret              // of a user that there is not
}

type chapUser struct {
	CHAPUser
	initiators Patterns
}

// NewCHAP checks a configuration. The error is about the first thing that is
// wrong; it names no secret.
func NewCHAP(cfg CHAPConfig) (*CHAP, error) {
	c := &CHAP{algorithms: slices.Clone(cfg.Algorithms), users: map[string]chapUser{}, decoy: Secret(random(MinSecret))}
	if len(c.algorithms) == 0 || len(cfg.Users) == 0 {
		return nil, errors.New("CHAP needs an algorithm and a user at least")
	}
	for _, a := range c.algorithms {
		if a.row() < 0 {
			return nil, fmt.Errorf("there is no CHAP algorithm %d", a)
		}
	}
	of := map[Secret]string{} // by secret of a user: its name
	for _, u := range cfg.Users {
		if err := u.check(); err != nil {
			return nil, err
		}
		if u.Target.isNobody() {
			u.Target = cfg.Target
		}
		if u.Initiator == "" {
			u.Initiator = "*"
		}
		initiators, err := Compile([]string{u.Initiator})
		if err != nil {
			return nil, fmt.Errorf("CHAP user %q: %w", u.Name, err)
		}
		if _, taken := c.users[u.Name]; taken {
			return nil, fmt.Errorf("CHAP user %q is there twice", u.Name)
		}
		c.users[u.Name] = chapUser{u, initiators}
		of[u.Secret] = u.Name
	}
	for _, u := range c.users {
		if u.Target.isNobody() {
			continue
		}
		if err := u.Target.check(); err != nil {
			return nil, err
		}
		// Section 9.2.1. Hence a response that repeats what we would have
		// answered ourselves is the response of no user.
		if name, same := of[u.Target.Secret]; same {
			return nil, fmt.Errorf("CHAP user %q and the target, %q, have the same secret", name, u.Target.Name)
		}
	}
	return c, nil
}

// Choose returns the algorithm that we like best of those that an initiator
// offers; false if there is none.
func (c *CHAP) Choose(offer []CHAPAlgorithm) (CHAPAlgorithm, bool) {
	for _, a := range c.algorithms {
		if slices.Contains(offer, a) {
			return a, true
		}
	}
	return 0, false
}

// A CHAPChallenge is CHAP_A, CHAP_I and CHAP_C.
type CHAPChallenge struct {
	Algorithm CHAPAlgorithm
	ID        uint8
	Octets    string
}

// NewCHAPChallenge returns an unpredictable challenge, as long as the hash of
// a: 16 octets at least.
func NewCHAPChallenge(a CHAPAlgorithm) CHAPChallenge {
	return CHAPChallenge{Algorithm: a, ID: random(1)[0], Octets: random(a.hash().Size())}
}

// random returns n random octets.
func random(n int) string {
	b := make([]byte, n)
	rand.Read(b) // never fails
	return string(b)
}

// Response is CHAP_R: the hash of identifier, secret and challenge (RFC 1994,
// section 4.1).
func (ch CHAPChallenge) Response(s Secret) []byte {
	h := ch.Algorithm.hash()
	h.Write([]byte{ch.ID})
	io.WriteString(h, string(s))
	io.WriteString(h, ch.Octets)
	return h.Sum(nil)
}

// Authenticate tells whether response is what the user of that name answers to
// ch, and whether an initiator of that iSCSI name, normalised, may be this user.
// It returns who the target is to this user, which may be nobody. The error is
// for the log: an initiator learns only that it has failed.
func (c *CHAP) Authenticate(ch CHAPChallenge, name string, response []byte, initiator string) (CHAPIdentity, error) {
	u, known := c.users[name]
	if !known {
		u.Secret = c.decoy // so that it takes as long
	}
	right := hmac.Equal(ch.Response(u.Secret), response) // in constant time
	switch {
	case !known:
		return CHAPIdentity{}, fmt.Errorf("there is no CHAP user %.80q", name)
	case !right:
		return CHAPIdentity{}, fmt.Errorf("response of CHAP user %q is wrong", name)
	case !u.initiators.Match(initiator):
		return CHAPIdentity{}, fmt.Errorf("CHAP user %q is not for this initiator", name)
	}
	return u.Target, nil
}
