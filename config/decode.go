package config

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/iser-target/iser-target/security"
)

// An Error is one problem with one key.
type Error struct {
	Source string // file name or "environment"; empty in errors of Validate
	Key    string // like targets[0].luns[1].size, or the name of a variable; empty: the whole source
	Reason string

	class error // for errors.Is; may be nil
}

// Unwrap returns what errors.Is compares, or nil.
func (e *Error) Unwrap() error { return e.class }

// Error implements error: source, key and reason on one line.
func (e *Error) Error() string {
	parts := []string{e.Source, e.Key, e.Reason}
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
			d.errs.addf(path, "must be a string, not %s%s", describe(in), hint)
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
		d.errs.addf(path, "must be %s, not %s", want, describe(in))
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
		what := describe(in)
		if slices.ContainsFunc(known, isSecret) { // somebody may have put it one level too high
			what = kindOf(in)
		}
		d.errs.addf(path, "must be a map with the keys %s, not %s", strings.Join(known, ", "), what)
		return
	}
	for _, key := range slices.Sorted(maps.Keys(m)) {
		i := slices.Index(known, key)
		if i < 0 {
			d.errs.addf(join(path, key), "unknown key%s", suggest(key, known))
			continue
		}
		d.decode(join(path, key), m[key], v.Field(i))
	}
}

func (d *decoder) decodeSlice(path string, in any, v reflect.Value) {
	list, ok := in.([]any)
	if !ok {
		what := describe(in)
		if e := v.Type().Elem(); e.Kind() == reflect.Struct && slices.ContainsFunc(keysOf(e), isSecret) {
			what = kindOf(in)
		}
		d.errs.addf(path, "must be a list, not %s", what)
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

// keysOf returns the keys of a struct type, in the order of its fields.
func keysOf(t reflect.Type) []string {
	keys := make([]string, t.NumField())
	for i := range keys {
		keys[i] = t.Field(i).Tag.Get("key")
	}
	return keys
}

// join extends path by key, which it quotes unless it looks like a key.
func join(path, key string) string {
	if key == "" || strings.ContainsAny(key, ". []\"") || strconv.Quote(key) != `"`+key+`"` {
		key = strconv.Quote(key)
	}
	return under(path, key)
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

// distance returns the Levenshtein distance of two strings, in bytes. Keys longer than all
// known keys are far from each of them.
func distance(a, b string) int {
	if len(a) > 64 {
		return len(a)
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, diagonal+1)
		}
	}
	return row[len(b)]
}
