package config

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"

	"github.com/spf13/viper"

	"github.com/iser-target/iser-target/security"
)

const (
	envPrefix = "ISER_TARGET"
	maxFile   = 1 << 20 // octets of a file: a bound, not a need
)

// envOfTests are variables with our prefix that the tests read; the target,
// which inherits them there, does not.
var envOfTests = []string{"ISER_TARGET_REQUIRE_INTEROP", "ISER_TARGET_VM_DIR"}

// Load reads the file at path and returns a configuration that is complete
// and valid. The error joins one *Error for everything that is wrong: source,
// key and reason, each on a line of its own.
func Load(path string) (*Config, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, &Error{Source: path, Reason: reasonOf(err)}
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, &Error{Source: path, Reason: reasonOf(err)}
	}
	if len(b) > maxFile {
		return nil, &Error{Source: path, Reason: fmt.Sprintf("is larger than %v", Size(maxFile))}
	}
	c, err := load(path, b)
	if err != nil {
		return nil, err
	}
	fi, err := f.Stat()
	if err == nil {
		err = c.checkFileMode(fi)
	}
	if err != nil {
		return nil, &Error{Source: path, Reason: reasonOf(err)}
	}
	return c, nil
}

// Default returns the configuration that is used when there is no file: one
// LUN of memory, on the loopback, for any initiator. The environment counts
// here, too.
func Default() (*Config, error) { return load("default configuration", defaultYAML) }

// reasonOf drops the path from an error of package os: it is said already.
func reasonOf(err error) string {
	if e, ok := err.(*os.PathError); ok {
		return e.Err.Error()
	}
	return err.Error()
}

// load does what Load says with the contents of a file.
func load(source string, file []byte) (*Config, error) {
	tree, err := parseYAML(file)
	if err != nil {
		// One line each: a YAML decoder may report several at a time.
		return nil, &Error{Source: source, Reason: strings.Join(strings.Fields(err.Error()), " ")}
	}
	c := base()
	var fromFile decoder
	fromFile.decode("", tree, reflect.ValueOf(&c).Elem())

	overrides, names, envErrs := readEnvironment()
	fromEnv := decoder{text: true}
	fromEnv.decode("", overrides, reflect.ValueOf(&c).Elem())
	for _, e := range fromEnv.errs {
		envErrs = append(envErrs, &Error{Key: names[e.Key], Reason: e.Reason})
	}

	// What could not be decoded would be reported as missing, too: only the
	// parts that were are checked.
	c.complete(security.NormalizeName)
	for _, e := range c.readSecrets() {
		if name, ok := names[e.Key]; ok {
			envErrs = append(envErrs, &Error{Key: name, Reason: e.Reason})
		} else {
			fromFile.errs = append(fromFile.errs, e)
		}
	}
	errs := fromFile.errs
	for _, e := range c.check() {
		switch name, ok := names[e.Key]; {
		case ok && !slices.ContainsFunc(envErrs, func(o *Error) bool { return o.Key == name }):
			envErrs = append(envErrs, &Error{Key: name, Reason: e.Reason})
		case !ok && !slices.ContainsFunc(fromFile.errs, func(o *Error) bool { return overlap(o.Key, e.Key) }):
			errs = append(errs, e)
		}
	}
	for _, e := range errs {
		e.Source = source
	}
	for _, e := range envErrs {
		e.Source = "environment"
	}
	if err := append(errs, envErrs...).join(); err != nil {
		return nil, err
	}
	return &c, nil
}

// overlap tells whether one of two keys is the other or leads to it.
func overlap(a, b string) bool {
	if len(a) > len(b) {
		a, b = b, a
	}
	return strings.HasPrefix(b, a) && (len(a) == len(b) || a == "" || b[len(a)] == '.' || b[len(a)] == '[')
}

// parseYAML decodes a document with viper's decoder. Viper's own tree of
// settings is not used: it loses keys without a value and the case of others,
// so that wrong keys would pass.
func parseYAML(b []byte) (map[string]any, error) {
	d, err := viper.NewCodecRegistry().Decoder("yaml")
	if err != nil {
		return nil, err
	}
	tree := map[string]any{}
	if err := d.Decode(b, tree); err != nil {
		return nil, err
	}
	if n := secondDocument(b); n > 0 {
		return nil, fmt.Errorf("yaml: line %d: a second document begins", n)
	}
	return tree, nil
}

// secondDocument returns the number of the line that begins a document behind
// another, which the decoder would ignore; 0 if there is none.
func secondDocument(b []byte) int {
	content, n := false, 0
	for line := range bytes.Lines(b) {
		n++
		line = bytes.TrimRight(line, " \t\r\n")
		switch {
		case bytes.HasPrefix(line, []byte("---")) && (len(line) == 3 || line[3] == ' ' || line[3] == '\t'):
			if content {
				return n
			}
			content = len(line) > 3
		case len(line) > 0 && line[0] != '#' && line[0] != '%':
			content = true
		}
	}
	return 0
}

// EnvNames returns the variables that override scalar keys, each with its key:
// ISER_TARGET_LOG_LEVEL, log.level.
func EnvNames() map[string]string {
	names := map[string]string{}
	var walk func(path string, t reflect.Type)
	walk = func(path string, t reflect.Type) {
		for i, key := range keysOf(t) {
			switch f := t.Field(i).Type; {
			case f.Kind() == reflect.Struct:
				walk(join(path, key), f)
			case f.Kind() != reflect.Slice && f != reflect.TypeFor[security.Secret](): // the environment is no place for secrets
				key := join(path, key)
				names[envPrefix+"_"+strings.ToUpper(strings.ReplaceAll(key, ".", "_"))] = key
			}
		}
	}
	walk("", reflect.TypeFor[Config]())
	return names
}

// readEnvironment returns what the environment says as a tree of settings, the
// name of the variable behind each of its keys, and what is wrong with other
// variables. A variable without a value counts as not set.
func readEnvironment() (tree map[string]any, names map[string]string, errs errorList) {
	v := viper.New()
	v.SetEnvPrefix(envPrefix)
	v.SetEnvKeyReplacer(strings.NewReplacer(".", "_"))
	names = map[string]string{}
	known := EnvNames()
	for name, key := range known {
		if err := v.BindEnv(key); err != nil {
			errs.addf(name, "%v", err)
		}
		if v.IsSet(key) {
			names[key] = name
		}
	}
	for _, e := range os.Environ() {
		name, _, _ := strings.Cut(e, "=")
		if !strings.HasPrefix(name, envPrefix+"_") || slices.Contains(envOfTests, name) || known[name] != "" {
			continue
		}
		errs.addf(name, "unknown variable%s", suggest(name, slices.Sorted(maps.Keys(known))))
	}
	slices.SortFunc(errs, func(a, b *Error) int { return strings.Compare(a.Key, b.Key) })
	return v.AllSettings(), names, errs
}
