package security

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// Patterns is a list of names and name patterns. The zero value matches
// nobody. It does not change and may be used by any goroutine.
type Patterns struct{ list [][]rune }

// Compile takes iSCSI names in which "*" stands for any characters, or none,
// and "?" for one. Case does not matter. A pattern without either must be an
// iSCSI name. The error names every pattern that is wrong.
func Compile(patterns []string) (Patterns, error) {
	var p Patterns
	var errs []error
	for _, s := range patterns {
		if err := checkPattern(s); err != nil {
			errs = append(errs, err)
			continue
		}
		p.list = append(p.list, []rune(strings.ToLower(s)))
	}
	if len(errs) > 0 {
		return Patterns{}, errors.Join(errs...)
	}
	return p, nil
}

func checkPattern(s string) error {
	switch {
	case s == "":
		return errors.New("pattern is empty")
	case len(s) > MaxName:
		return fmt.Errorf("pattern is %d octets long, more than %d", len(s), MaxName)
	case !utf8.ValidString(s):
		return fmt.Errorf("pattern %q is not UTF-8", s)
	case !strings.ContainsAny(s, "*?"):
		_, err := NormalizeName(s)
		return err
	}
	if err := checkCharacters(strings.ToLower(s), "*?"); err != nil {
		return fmt.Errorf("pattern %q %w", s, err)
	}
	return nil
}

// Match tells whether one of the patterns matches the whole of name, whatever
// the case. What is longer than a name can be matches nothing.
func (p Patterns) Match(name string) bool {
	if len(name) > MaxName || !utf8.ValidString(name) {
		return false
	}
	folded := []rune(strings.ToLower(name))
	for _, pattern := range p.list {
		if match(pattern, folded) {
			return true
		}
	}
	return false
}

// match goes back to the last "*" only, so that no pattern takes more than
// len(pattern) * len(name) steps.
func match(pattern, name []rune) bool {
	p, star, from := 0, -1, 0
	for i := 0; i < len(name); {
		switch {
		case p < len(pattern) && pattern[p] == '*':
			star, from = p, i
			p++
		case p < len(pattern) && (pattern[p] == '?' || pattern[p] == name[i]):
			p, i = p+1, i+1
		case star >= 0:
			from++
			p, i = star+1, from
		default:
			return false
		}
	}
	for p < len(pattern) && pattern[p] == '*' {
		p++
	}
	return p == len(pattern)
}
