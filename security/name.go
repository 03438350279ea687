// Package security decides which initiators may use the target: iSCSI names and the patterns
// that admit them, CHAP, and the policy that a connection must meet before the target answers.
package security

import (
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// MaxName is the length of the longest iSCSI name, in bytes (RFC 7143, section 4.2.7.1).
const MaxName = 223

// NormalizeName returns the iSCSI name s in lower case, the form in which names are compared.
// It fails if s is not an iqn., eui. or naa. name (RFC 7143, sections 4.2.7.3 to 4.2.7.6) or
// has characters that RFC 3722 prohibits. Beyond ASCII it accepts letters, marks and digits.
// It does not check that these are in normalization form C: names are compared by bytes.
func NormalizeName(s string) (string, error) {
	if len(s) > MaxName {
		return "", fmt.Errorf("iSCSI name has %d bytes, more than %d", len(s), MaxName)
	}
	if !utf8.ValidString(s) {
		return "", fmt.Errorf("iSCSI name %q is not UTF-8", s)
	}
	name := strings.ToLower(s)
	if len(name) > MaxName { // some letters are longer in lower case
		return "", fmt.Errorf("iSCSI name has %d bytes in lower case, more than %d", len(name), MaxName)
	}
	if err := checkCharacters(name, ""); err != nil {
		return "", fmt.Errorf("iSCSI name %q %w", s, err)
	}
	kind, rest, _ := strings.Cut(name, ".")
	check, ok := kinds[kind]
	if !ok || len(name) == len(kind) {
		return "", fmt.Errorf("iSCSI name %q does not begin with \"iqn.\", \"eui.\" or \"naa.\"", s)
	}
	if reason := check(rest); reason != "" {
		return "", fmt.Errorf("iSCSI name %q %s", s, reason)
	}
	return name, nil
}

// kinds has, by type designator, functions that return what is wrong with the rest of a name.
var kinds = map[string]func(rest string) string{
	"iqn": checkQualified,
	"eui": func(rest string) string { return checkHex(rest, "16 hexadecimal digits", 16) },
	"naa": func(rest string) string { return checkHex(rest, "16 or 32 hexadecimal digits", 16, 32) },
}

// checkQualified returns what is wrong with rest as yyyy-mm.domain[:string], or "".
func checkQualified(rest string) string {
	date, domain, ok := strings.Cut(rest, ".")
	if _, err := time.Parse("2006-01", date); !ok || err != nil {
		return "must have a date, yyyy-mm, and a dot next"
	}
	domain, _, _ = strings.Cut(domain, ":")
	if slices.Contains(strings.Split(domain, "."), "") {
		return "has an empty label in its domain name"
	}
	return ""
}

func checkHex(rest, want string, lengths ...int) string {
	if slices.Contains(lengths, len(rest)) && strings.Trim(rest, "0123456789abcdef") == "" {
		return ""
	}
	return "must have " + want + " next"
}

// checkCharacters returns an error about the first character that a name in lower case must
// not contain. It allows those in also.
func checkCharacters(name, also string) error {
	for _, r := range name {
		switch {
		case 'a' <= r && r <= 'z', '0' <= r && r <= '9', strings.ContainsRune("-.:", r), strings.ContainsRune(also, r):
		case r >= utf8.RuneSelf && !unicode.IsUpper(r) && (unicode.IsLetter(r) || unicode.IsMark(r) || unicode.IsDigit(r)):
		default:
			return fmt.Errorf("contains %q", r)
		}
	}
	return nil
}
