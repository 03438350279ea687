package config

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/iser-target/iser-target/security"
)

// An Error is one problem with one key.
type Error struct {
	Source string   // file name or "environment"; empty in errors of Validate
	At     Position // of the key in the text of the source
	Key    string   // like targets[0].luns[1].size, or the name of a variable; empty: the whole source
	Reason string

	class error // for errors.Is; may be nil
}

// Unwrap returns what errors.Is compares, or nil.
func (e *Error) Unwrap() error { return e.class }

// Error implements error: source with line and column, key and reason on one line.
func (e *Error) Error() string {
	where := e.Source
	if e.At.Line > 0 {
		where += ":" + strconv.Itoa(e.At.Line)
	}
	if e.At.Column > 0 {
		where += ":" + strconv.Itoa(e.At.Column)
	}
	parts := []string{where, e.Key, e.Reason}
	return strings.Join(slices.DeleteFunc(parts, func(s string) bool { return s == "" }), ": ")
}

// errorList collects Errors.
type errorList []*Error

func (l *errorList) addf(key, format string, args ...any) {
	*l = append(*l, &Error{Key: key, Reason: fmt.Sprintf(format, args...)})
}

// A decoder decodes a tree of maps, lists and scalars, as a YAML decoder returns it, into
// structs. Unlike general decoders it names the path of every value in its errors.
type decoder struct {
	errs errorList
	text bool // all scalars are strings, as in the environment
}

// decode decodes in into v, the value at path. Keys that in lacks keep their value in v. A
// list replaces a list.
func (d *decoder) decode(path string, in any, v reflect.Value) {
	switch v.Interface().(type) {
	case Size:
		d.scalar(path, in, "a size like 10GiB", func(s string) (any, error) { return ParseSize(s) }, v)
		return
	case time.Duration:
		d.scalar(path, in, "a duration like 15s", func(s string) (any, error) { return parseDuration(s) }, v)
		return
	case Switch:
		d.scalar(path, in, "on or off", parseSwitch, v)
		return
	case CRCPolicy:
		d.scalar(path, in, "auto, on or off", parseCRCPolicy, v)
		return
	case ESNPolicy:
		d.scalar(path, in, "auto, true or false", parseESNPolicy, v)
		return
	case security.Secret:
		d.secret(path, in, v)
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		d.decodeStruct(path, in, v)
	case reflect.Slice:
		d.decodeSlice(path, in, v)
	case reflect.String:
		s, ok := in.(string)
		if !ok {
			hint := ""
			switch in.(type) {
			case int, int64, uint64, float64, bool, time.Time:
				hint = ". Put it in quotes"
			}
			d.errs.addf(path, "must be a string, not %s%s", describeAt(path, in), hint)
			return
		}
		v.SetString(s)
	case reflect.Int:
		d.scalar(path, in, "a whole number", func(s string) (any, error) { return strconv.Atoi(s) }, v)
	case reflect.Bool:
		d.scalar(path, in, "true or false", func(s string) (any, error) {
			if s != "true" && s != "false" {
				return nil, strconv.ErrSyntax
			}
			return s == "true", nil
		}, v)
	default:
		panic("config: no way to decode a " + v.Type().String())
	}
}

// scalar decodes the text of a YAML scalar, whatever type YAML gave it. A YAML string is
// accepted only for types that have units.
func (d *decoder) scalar(path string, in any, want string, parse func(string) (any, error), v reflect.Value) {
	plain := v.Type() == reflect.TypeFor[int]() || v.Type() == reflect.TypeFor[bool]()
	var out any
	err := strconv.ErrSyntax
	switch text := in.(type) {
	case string:
		if !plain || d.text {
			out, err = parse(text)
		}
	case int, int64, uint64, bool:
		out, err = parse(fmt.Sprint(in))
	}
	switch {
	case errors.Is(err, strconv.ErrSyntax), errors.Is(err, strconv.ErrRange):
		d.errs.addf(path, "must be %s, not %s", want, describeAt(path, in))
	case err != nil:
		d.errs.addf(path, "%v", err)
	default:
		v.Set(reflect.ValueOf(out))
	}
}

// secret decodes a secret. Its errors do not contain the value.
func (d *decoder) secret(path string, in any, v reflect.Value) {
	s, ok := in.(string)
	if !ok {
		d.errs.addf(path, "must be a string. Put a secret that looks like a number in quotes")
		return
	}
	secret, err := security.ParseSecret(s)
	if err != nil {
		d.errs.addf(path, "%v", err)
		return
	}
	v.Set(reflect.ValueOf(secret))
}

func parseSwitch(s string) (any, error) {
	switch s {
	case "on", "true":
		return Switch(true), nil
	case "off", "false":
		return Switch(false), nil
	}
	return nil, strconv.ErrSyntax
}

func (d *decoder) decodeStruct(path string, in any, v reflect.Value) {
	known := keysOf(v.Type())
	m, ok := in.(map[string]any)
	if !ok {
		d.errs.addf(path, "must be a map with the keys %s, not %s", strings.Join(known, ", "), describeAt(path, in))
		return
	}
	for _, key := range slices.Sorted(maps.Keys(m)) {
		i := slices.Index(known, key)
		if i >= 0 {
			d.decode(under(path, key), m[key], v.Field(i))
		} else if hint := suggest(key, known); hint == "" && inAuth.MatchString(path) { // it may be a secret
			d.errs.addf(path, "has an unknown key. The keys are %s", strings.Join(known, ", "))
		} else {
			d.errs.addf(join(path, key), "unknown key%s", hint)
		}
	}
}

func (d *decoder) decodeSlice(path string, in any, v reflect.Value) {
	list, ok := in.([]any)
	if !ok {
		d.errs.addf(path, "must be a list, not %s", describeAt(path, in))
		return
	}
	out := reflect.MakeSlice(v.Type(), len(list), len(list))
	for i, item := range list {
		switch item := out.Index(i).Addr().Interface().(type) {
		case *LUN:
			item.ID = unset
		case *Portal:
			item.TPGT = defaultTPGT
		case *Target:
			*item = NewTarget()
		}
		d.decode(fmt.Sprintf("%s[%d]", path, i), item, out.Index(i))
	}
	v.Set(out)
}

// keysOf returns the keys of a struct type, in the order of its fields. The caller must not change them.
func keysOf(t reflect.Type) []string {
	if keys, ok := keysOfTypes.Load(t); ok {
		return keys.([]string)
	}
	keys := make([]string, t.NumField())
	for i := range keys {
		keys[i] = t.Field(i).Tag.Get("key")
	}
	keysOfTypes.Store(t, keys)
	return keys
}

// keysOfTypes has the results of keysOf by reflect.Type: a configuration with thousands of LUNs asks as often.
var keysOfTypes sync.Map

// join extends path by key, which it quotes unless it looks like a key.
func join(path, key string) string {
	if key == "" || strings.ContainsAny(key, ". []\"") || strconv.Quote(key) != `"`+key+`"` {
		key = strconv.Quote(key)
	}
	return under(path, key)
}

// inAuth matches the keys of the authentication.
var inAuth = regexp.MustCompile(`(^|\.)(auth|discovery_auth)($|[.\[])`)

// describeAt describes the value of a key. It does not show it in the authentication, because it may be a secret in a wrong place.
func describeAt(path string, in any) string {
	if inAuth.MatchString(path) {
		return kindOf(in)
	}
	return describe(in)
}

// kindOf describes a value without showing it.
func kindOf(in any) string {
	switch in.(type) {
	case string:
		return "a string"
	case int, int64, uint64, float64:
		return "a number"
	case bool:
		return "true or false"
	}
	return describe(in)
}

func describe(in any) string {
	switch in := in.(type) {
	case nil:
		return "empty"
	case string:
		if len(in) > 60 {
			return strconv.Quote(in[:60]) + "..."
		}
		return strconv.Quote(in)
	case int, int64, uint64, float64, bool:
		return fmt.Sprint(in)
	case []any:
		return "a list"
	case map[string]any:
		return "a map"
	case map[any]any:
		return "a map with keys that are not strings"
	}
	return fmt.Sprintf("a %T", in)
}

// suggest returns ", did you mean X?" for the known key X that is most like key, or "".
func suggest(key string, known []string) string {
	if best := Nearest(key, known); best != "" {
		return fmt.Sprintf(", did you mean %s?", best)
	}
	return ""
}

// Nearest returns the known name that is most like name, or "" if at least three letters differ, or two of a name
// with up to four.
func Nearest(name string, known []string) string {
	best, least := "", 3
	if len(name) < 5 {
		least = 2
	}
	for _, k := range known {
		if n := distance(strings.ToLower(name), strings.ToLower(k)); n < least && n < len(k) {
			best, least = k, n
		}
	}
	return best
}

// distance returns the Levenshtein distance of two strings, in bytes, where two neighbours that changed their places count
// as one change. Keys longer than all known keys are far from each of them.
func distance(a, b string) int {
	if len(a) > 64 {
		return len(a)
	}
	before, last, row := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		before, last, row = last, row, before
		row[0] = i + 1
		for j := range len(b) {
			cost := last[j]
			if a[i] != b[j] {
				cost++
			}
			row[j+1] = min(cost, row[j]+1, last[j+1]+1)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				row[j+1] = min(row[j+1], before[j-1]+1)
			}
		}
	}
	return row[len(b)]
}
