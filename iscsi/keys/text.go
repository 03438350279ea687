package keys

import (
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

const (
	// MaxText limits the text of one negotiation, in bytes. RFC 7143, section 6.1,
	// requires at least 8192.
	MaxText = 16384

	maxKey   = 63  // bytes of a key-name: RFC 7143, section 6.1
	maxValue = 255 // bytes of a simple-value: RFC 7143, section 6.1
	maxName  = 223 // bytes of an iSCSI name: RFC 7143, section 4.2.7.1
)

// A Pair is one key=value.
type Pair struct{ Key, Value string }

// ParseText splits the text of a request, key=value NUL key=value NUL ... (RFC 7143, section 6.1).
// The caller has joined the data segments of PDUs with the C bit. ParseText skips empty items and
// returns an *Error for any other item that is not a pair. The pairs do not refer to b.
func ParseText(b []byte) ([]Pair, error) {
	if len(b) == 0 {
		return nil, nil
	}
	if len(b) > MaxText {
		return nil, textError("", "text of %d bytes is longer than %d", len(b), MaxText)
	}
	if b[len(b)-1] != 0 {
		return nil, textError("", "the last key=value does not end with NUL")
	}
	s := string(b)
	pairs := make([]Pair, 0, strings.Count(s, "\x00"))
	for s != "" {
		var item string
		item, s, _ = strings.Cut(s, "\x00")
		if item == "" {
			continue
		}
		key, value, ok := strings.Cut(item, "=")
		if !ok {
			return nil, textError("", "%s has no \"=\"", quote(item))
		}
		if reason := checkKey(key); reason != "" {
			return nil, textError("", "key %s %s", quote(key), reason)
		}
		if !utf8.ValidString(value) {
			return nil, textError(key, "value %s is not UTF-8", quote(value))
		}
		pairs = append(pairs, Pair{key, value})
	}
	return pairs, nil
}

// AppendPair appends the pairs to dst, each with its NUL.
func AppendPair(dst []byte, pairs ...Pair) []byte {
	for _, p := range pairs {
		dst = append(dst, p.Key+"="+p.Value+"\x00"...)
	}
	return dst
}

// ParseNumber parses a numerical-value (RFC 7143, section 6.1): a decimal-constant or a
// hex-constant below 2^64.
func ParseNumber(s string) (n uint64, ok bool) {
	digits, base := s, 10
	if len(s) > 2 && s[0] == '0' && s[1]|0x20 == 'x' {
		digits, base = s[2:], 16
	} else if len(s) > 1 && s[0] == '0' {
		return 0, false
	}
	n, err := strconv.ParseUint(digits, base, 64) // accepts neither sign nor "_" in these bases
	return n, err == nil
}

// MaxBinary limits a binary-value, in bytes (RFC 7143, section 12.1.3).
const MaxBinary = 1024

var (
	errBinary     = errors.New("the value is neither a hex-constant nor a base64-constant")
	errLongBinary = fmt.Errorf("the value is longer than %d bytes", MaxBinary)
)

// ParseBinary parses a binary-value of a key without a fixed length (RFC 7143, section
// 6.1): a hex-constant or a base64-constant of 1 to MaxBinary bytes. If the number of
// hexadecimal digits is odd, the first byte has only one.
func ParseBinary(s string) ([]byte, error) {
	if len(s) < 3 || s[0] != '0' {
		return nil, errBinary
	}
	digits := s[2:]
	b, err := []byte(nil), errBinary
	switch s[1] | 0x20 {
	case 'x':
		if len(digits)%2 == 1 {
			digits = "0" + digits
		}
		b, err = hex.DecodeString(digits)
	case 'b':
		if !strings.ContainsAny(digits, "\r\n") { // which package base64 skips
			b, err = base64.StdEncoding.DecodeString(digits)
		}
	}
	if err != nil || len(b) == 0 {
		return nil, errBinary
	}
	if len(b) > MaxBinary {
		return nil, errLongBinary
	}
	return b, nil
}

// checkKey returns why key is not a key-name, or "". It accepts a lower-case letter at the start:
// keys are case-sensitive, so such a key is only not understood. It accepts "#", which the syntax
// does not allow but X#NodeArchitecture contains (RFC 7143, section 13.26).
func checkKey(key string) string {
	if key == "" {
		return "is empty"
	}
	if len(key) > maxKey {
		return fmt.Sprintf("is longer than %d bytes", maxKey)
	}
	if !isLetter(key[0]) {
		return "does not begin with a letter"
	}
	for i := range len(key) {
		if c := key[i]; !isLetter(c) && !strings.ContainsRune("0123456789.-+@_#", rune(c)) {
			return fmt.Sprintf("contains %q", c)
		}
	}
	return ""
}

func isLetter(c byte) bool { return 'a' <= c|0x20 && c|0x20 <= 'z' }

// quote quotes and shortens what a peer sent for a log line.
func quote(s string) string {
	const limit = 80
	if len(s) > limit {
		return fmt.Sprintf("%q...", s[:limit])
	}
	return fmt.Sprintf("%q", s)
}

// textError returns the Error for an invalid text, with the status "initiator error".
func textError(key, format string, args ...any) *Error {
	return &Error{Status: statusInitiatorError, Key: key, Reason: fmt.Sprintf(format, args...)}
}

// arranged has the keys that come first in a request for a Negotiation. The names and the session type say
// who logs in to what, and the result of other keys can depend on that, and on RDMAExtensions (RFC 7145,
// section 6.3).
var arranged = []string{"SessionType", "InitiatorName", "TargetName", "RDMAExtensions"}

// Arrange sorts the pairs of a request for a Negotiation, because text has no order.
func Arrange(pairs []Pair) {
	rank := func(p Pair) int {
		if i := slices.Index(arranged, p.Key); i >= 0 {
			return i
		}
		return len(arranged)
	}
	slices.SortStableFunc(pairs, func(a, b Pair) int { return rank(a) - rank(b) })
}

// Names returns how many of the pairs, which are arranged, are names or the session type.
func Names(pairs []Pair) int {
	i := slices.IndexFunc(pairs, func(p Pair) bool { return !slices.Contains(arranged[:3], p.Key) })
	if i < 0 {
		return len(pairs)
	}
	return i
}
