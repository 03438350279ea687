package security

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

// Patterns is a list of names and name patterns. The zero value matches no name. It is
// immutable and safe for concurrent use.
type Patterns struct{ list [][]rune }

// Compile compiles patterns of iSCSI names in which "*" stands for any number of characters
// and "?" for one. Case does not matter. A pattern without either must be an iSCSI name. The
// error names every wrong pattern.
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
		return fmt.Errorf("pattern has %d bytes, more than %d", len(s), MaxName)
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

// Match reports whether one of the patterns matches the whole name. Case does not matter. No
// pattern matches a string that is longer than MaxName.
func (p Patterns) Match(name string) bool {
	if len(name) > MaxName || !utf8.ValidString(name) {
		return false
	}
	folded := []rune(strings.ToLower(name))
	return slices.ContainsFunc(p.list, func(pattern []rune) bool { return match(pattern, folded) })
}

// match reports whether pattern matches name. It backtracks to the last "*" only, so it takes
// at most len(pattern) * len(name) steps.
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
