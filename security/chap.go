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

type chapHash struct {
	algorithm CHAPAlgorithm
	name      string
	new       func() hash.Hash
}

// chapHashes has the algorithms, most preferred first.
var chapHashes = []chapHash{
	{CHAPSHA3256, "sha3-256", func() hash.Hash { return sha3.New256() }},
	{CHAPSHA256, "sha256", sha256.New},
	{CHAPSHA1, "sha1", sha1.New},
	{CHAPMD5, "md5", md5.New},
}

// ParseCHAPAlgorithms returns the algorithms with these names; for no names, all algorithms,
// the strongest first.
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
			return nil, fmt.Errorf("%q is not one of %s", name, strings.Join(known, ", "))
		}
		if slices.Contains(list[:i], all[row]) {
			return nil, fmt.Errorf("%q appears twice", name)
		}
		list[i] = all[row]
	}
	return list, nil
}

// hash returns a new hash of algorithm a, which chapHashes must have.
func (a CHAPAlgorithm) hash() hash.Hash { return chapHashes[a.row()].new() }

// row returns the index of a in chapHashes; -1: not found.
func (a CHAPAlgorithm) row() int {
	return slices.IndexFunc(chapHashes, func(h chapHash) bool { return h.algorithm == a })
}

const (
	// MinSecret is the least length of a secret, in bytes, that is safe without IPsec encryption: 96 bits (RFC 7143,
	// section 9.2.1). See Secret.Short.
	MinSecret = 12
	// MaxSecret is the greatest length of a secret, in bytes, like open-iscsi's.
	MaxSecret = 256
	// MaxCHAPName is the greatest length of CHAP_N, in bytes: a simple-value (RFC 7143,
	// section 6.1).
	MaxCHAPName = 255
)

// A Secret is a CHAP secret. Printed and logged, it reads "(hidden)".
type Secret string

// ParseSecret parses a secret: "0x" and an even number of hexadecimal digits, or else the
// bytes of s. Errors do not contain the secret.
func ParseSecret(s string) (Secret, error) {
	if digits, ok := strings.CutPrefix(s, "0x"); ok {
		b, err := hex.DecodeString(digits)
		if err != nil {
			return "", errors.New("secret begins with 0x: an even number of hexadecimal digits must be next")
		}
		s = string(b)
	}
	if err := Secret(s).check(); err != nil {
		return "", err
	}
	return Secret(s), nil
}

func (s Secret) check() error {
	if len(s) == 0 {
		return errors.New("secret has 0 bytes, less than 1")
	}
	if len(s) > MaxSecret {
		return fmt.Errorf("secret has %d bytes, more than %d", len(s), MaxSecret)
	}
	return nil
}

// Short reports whether s has less than 96 bits. Logins with it require IPsec encryption (RFC 3723, section 2.4.1).
func (s Secret) Short() bool { return len(s) < MinSecret }

const hidden = "(hidden)"

// Format implements fmt.Formatter: it writes "(hidden)" for every verb.
func (Secret) Format(f fmt.State, _ rune) { io.WriteString(f, hidden) }

// MarshalText implements encoding.TextMarshaler: it returns "(hidden)".
func (Secret) MarshalText() ([]byte, error) { return []byte(hidden), nil }

// A CHAPIdentity is a CHAP name and its secret. The zero value is no identity.
type CHAPIdentity struct {
	Name   string // CHAP_N; need not be an iSCSI name
	Secret Secret
}

func (i CHAPIdentity) check() error {
	if i.Name == "" || len(i.Name) > MaxCHAPName || strings.ContainsRune(i.Name, 0) {
		return fmt.Errorf("CHAP name must have 1 to %d bytes and no NUL", MaxCHAPName)
	}
	if err := i.Secret.check(); err != nil {
		return fmt.Errorf("%q: %w", i.Name, err)
	}
	return nil
}

// A CHAPUser is the identity of one or more initiators.
type CHAPUser struct {
	CHAPIdentity

	// Previous is a second secret that is valid, too, so that the hosts of a user can change to Secret
	// one after the other; empty: none.
	Previous Secret

	// Initiator is a pattern of the iSCSI names that may use this identity
	// (RFC 7143, section 9.2); empty: any.
	Initiator string

	// Target is the identity of the target for this user; zero: CHAPConfig.Target.
	Target CHAPIdentity
}

// A CHAPConfig has the identities of initiators and target.
type CHAPConfig struct {
	Algorithms []CHAPAlgorithm // most preferred first
	Users      []CHAPUser
	Target     CHAPIdentity // zero: the target does not authenticate itself
}

// CHAP authenticates initiators, and the target to them (RFC 7143, sections 9.2.1 and
// 12.1.3). It is immutable and safe for concurrent use.
type CHAP struct {
	algorithms []CHAPAlgorithm
	users      map[string]chapUser // by CHAP_N
	decoy      Secret              // for unknown users
}

type chapUser struct {
	CHAPUser
	initiators Patterns
}

// NewCHAP checks a configuration and returns its CHAP. The error is about the first problem
// and does not contain a secret.
func NewCHAP(cfg CHAPConfig) (*CHAP, error) {
	c := &CHAP{algorithms: slices.Clone(cfg.Algorithms), users: map[string]chapUser{}, decoy: Secret(random(MinSecret))}
	if len(c.algorithms) == 0 || len(cfg.Users) == 0 {
		return nil, errors.New("CHAP requires at least one algorithm and one user")
	}
	for _, a := range c.algorithms {
		if a.row() < 0 {
			return nil, fmt.Errorf("CHAP algorithm %d is not known", a)
		}
	}
	of := map[Secret]string{} // names of users, by secret
	for _, u := range cfg.Users {
		if err := u.check(); err != nil {
			return nil, err
		}
		if u.Previous != "" {
			if err := u.Previous.check(); err != nil {
				return nil, fmt.Errorf("%q: previous %w", u.Name, err)
			}
			of[u.Previous] = u.Name
		}
		if u.Target == (CHAPIdentity{}) {
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
			return nil, fmt.Errorf("CHAP user %q appears twice", u.Name)
		}
		c.users[u.Name] = chapUser{u, initiators}
		of[u.Secret] = u.Name
	}
	for _, u := range c.users {
		if u.Target == (CHAPIdentity{}) {
			continue
		}
		if err := u.Target.check(); err != nil {
			return nil, err
		}
		// Section 9.2.1. So an initiator that reflects the target's challenge cannot use
		// the target's response as its own.
		if name, same := of[u.Target.Secret]; same {
			return nil, fmt.Errorf("CHAP user %q and the target, %q, have the same secret", name, u.Target.Name)
		}
	}
	return c, nil
}

// Choose returns the most preferred algorithm of those that an initiator offers; false if c
// has none of them.
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
	Octets    string // CHAP_C
}

// NewCHAPChallenge returns an unpredictable challenge as long as the hash of a, at least 16 bytes.
func NewCHAPChallenge(a CHAPAlgorithm) CHAPChallenge {
	return CHAPChallenge{Algorithm: a, ID: random(1)[0], Octets: random(a.hash().Size())}
}

// random returns n random bytes.
func random(n int) string {
	b := make([]byte, n)
	rand.Read(b) // never fails
	return string(b)
}

// Response returns CHAP_R: the hash of identifier, secret and challenge (RFC 1994, section
// 4.1).
func (ch CHAPChallenge) Response(s Secret) []byte {
	h := ch.Algorithm.hash()
	h.Write([]byte{ch.ID})
	io.WriteString(h, string(s))
	io.WriteString(h, ch.Octets)
	return h.Sum(nil)
}

// A CHAPProof identifies the user, and the secret, by which an initiator has authenticated itself. It does not
// tell the secret. The zero value is that of no authentication.
type CHAPProof string

// Proof returns the CHAPProof of a user with that secret.
func Proof(name string, s Secret) CHAPProof {
	h := hmac.New(sha256.New, []byte("iser-target: proof of a CHAP login"))
	fmt.Fprintf(h, "%d:%s", len(name), name)
	io.WriteString(h, string(s))
	return CHAPProof(hex.EncodeToString(h.Sum(nil)[:16]))
}

// A CHAPLogin is the outcome of an authentication.
type CHAPLogin struct {
	Target CHAPIdentity // the identity of the target for this user; may be zero
	Proof  CHAPProof
	Short  bool // the secret, or that of Target, requires IPsec encryption: see Secret.Short
}

// Authenticate checks that response is the answer of the user name to ch, and that the initiator, a
// normalized iSCSI name, may be this user. The error is for the log: the initiator learns only that the login has failed.
func (c *CHAP) Authenticate(ch CHAPChallenge, name string, response []byte, initiator string) (CHAPLogin, error) {
	u, known := c.users[name]
	secrets := [2]Secret{u.Secret, u.Previous}
	for i := range secrets {
		if secrets[i] == "" { // takes as long as for a known user with two secrets
			secrets[i] = c.decoy
		}
	}
	right := [2]bool{}
	for i, s := range secrets {
		right[i] = hmac.Equal(ch.Response(s), response) && s != c.decoy // in constant time
	}
	switch {
	case !known:
		return CHAPLogin{}, fmt.Errorf("CHAP user %.80q is not known", name)
	case !right[0] && !right[1]:
		return CHAPLogin{}, fmt.Errorf("response of CHAP user %q is wrong", name)
	case !u.initiators.Match(initiator):
		return CHAPLogin{}, fmt.Errorf("this initiator may not be CHAP user %q", name)
	}
	with := secrets[0]
	if !right[0] {
		with = secrets[1]
	}
	return CHAPLogin{u.Target, Proof(name, with), with.Short() || u.Target != (CHAPIdentity{}) && u.Target.Secret.Short()}, nil
}

// Excludes returns why a session that authenticated itself as name, with that proof, could not log in
// again, or "" if it could. An empty name is that of a session that did not authenticate itself.
func (c *CHAP) Excludes(name string, p CHAPProof, initiator string) string {
	u, known := c.users[name]
	switch {
	case name == "":
		return "session has not authenticated itself, which the target requires now"
	case !known:
		return "CHAP user is no longer among those of the target"
	case p != Proof(name, u.Secret) && (u.Previous == "" || p != Proof(name, u.Previous)):
		return "secret of its CHAP user is no longer valid"
	case !u.initiators.Match(initiator):
		return "initiator may no longer be its CHAP user"
	}
	return ""
}
