package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/viper"
	"go.yaml.in/yaml/v3"

	"github.com/iser-target/iser-target/security"
)

const (
	envPrefix = "ISER_TARGET"
	// MaxFile is the largest size of a configuration file, in bytes.
	MaxFile = 1 << 20

	// maxKeys bounds the keys of a mapping: the decoder compares each with each.
	maxKeys = 256

	defaultSource = "default configuration"
)

// envOfOthers lists variables with envPrefix that the commands and the tests read. The target
// may be started from the same environment and ignores them.
var envOfOthers = []string{
	"ISER_TARGET_CLIENT_ADDRESS", "ISER_TARGET_CLIENT_CONTEXT", "ISER_TARGET_CLIENT_TLS_CERT", "ISER_TARGET_CLIENT_TLS_KEY", "ISER_TARGET_CLIENT_TLS_CA",
	"ISER_TARGET_REQUIRE_INTEROP", "ISER_TARGET_VM_DIR",
}

// Load reads the file at path and the environment, and returns a complete and valid configuration.
// The error joins one *Error for each problem, each on its own line with source, key and reason.
func Load(path string) (*Config, error) {
	d, err := OpenDocument(path)
	if err != nil {
		return nil, err
	}
	return d.Config()
}

var (
	errTooLarge = fmt.Errorf("is larger than %v", Size(MaxFile))
	errNobody   = errors.New("is a pipe that no process writes to")
)

// pipeWait bounds the wait for the writer of a pipe.
const pipeWait = 10 * time.Second

// ReadFile reads a file that may be a configuration. It fails if the file is larger than
// MaxFile or is a pipe without a writer. Errors name the file.
func ReadFile(path string) ([]byte, error) {
	b, _, err := readFile(path)
	if err != nil {
		return nil, &Error{Source: path, Reason: reasonOf(err), class: err}
	}
	return b, nil
}

// readFile reads a whole file and its FileInfo.
func readFile(path string) ([]byte, fs.FileInfo, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // does not wait for the writer of a pipe
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return nil, nil, err
	}
	pipe := fi.Mode()&fs.ModeNamedPipe != 0
	if pipe {
		if err := f.SetReadDeadline(time.Now().Add(pipeWait)); err != nil {
			return nil, nil, err
		}
	}
	b, err := io.ReadAll(io.LimitReader(f, MaxFile+1))
	switch {
	case err != nil:
		return nil, nil, err
	case len(b) > MaxFile:
		return nil, nil, errTooLarge
	case pipe && len(b) == 0:
		return nil, nil, errNobody
	}
	return b, fi, nil
}

// reasonOf returns the text of err without the path of an *os.PathError.
func reasonOf(err error) string {
	if e, ok := err.(*os.PathError); ok {
		return e.Err.Error()
	}
	return err.Error()
}

// quoted matches what the errors of a YAML decoder quote of the text, which may be a secret.
var quoted = regexp.MustCompile("unknown anchor '.*' referenced|`[^`]*`")

// oneLine returns the text of an error of a YAML decoder on one line, without what it quotes of the text. The
// decoder may report several errors.
func oneLine(err error) string {
	text := strings.Join(strings.Fields(err.Error()), " ")
	return quoted.ReplaceAllStringFunc(text, func(s string) string {
		if s[0] == '`' {
			return "a value"
		}
		return "unknown anchor. Put a value that begins with * in quotes"
	})
}

// configOf returns the configuration of the settings in a file, which it does not change. Errors have positions in the
// text of v, if it is not nil. shared says which targets are in another text, or is nil.
func configOf(source string, settings map[string]any, v *version, shared *sharedPart) (*Config, error) {
	c := base()
	var fromFile decoder
	fromFile.decode("", settings, reflect.ValueOf(&c).Elem())

	overrides, names, envErrs := readEnvironment()
	fromEnv := decoder{text: true}
	fromEnv.decode("", overrides, reflect.ValueOf(&c).Elem())
	for _, e := range fromEnv.errs {
		envErrs = append(envErrs, &Error{Key: names[e.Key], Reason: e.Reason})
	}

	// A value that could not be decoded would be reported as missing, too, so only errors
	// about other keys count.
	c.complete()
	for _, e := range c.readSecrets() {
		if name, ok := names[e.Key]; ok {
			envErrs = append(envErrs, &Error{Key: name, Reason: e.Reason})
		} else {
			fromFile.errs = append(fromFile.errs, e)
		}
	}
	errs := fromFile.errs
	var wrong errorList
	if len(errs) <= maxErrors { // else join drops them
		own := len(c.Targets)
		if shared != nil {
			own = min(own, shared.own)
		}
		wrong = c.check(own)
	}
	for _, e := range wrong {
		switch name, ok := names[e.Key]; {
		case ok && !slices.ContainsFunc(envErrs, func(o *Error) bool { return o.Key == name }):
			envErrs = append(envErrs, &Error{Key: name, Reason: e.Reason})
		case !ok && !slices.ContainsFunc(fromFile.errs, func(o *Error) bool { return overlap(o.Key, e.Key) }):
			errs = append(errs, e)
		}
	}
	locators := map[*version]*locator{}
	for _, e := range errs[:min(len(errs), maxErrors)] { // join drops the others
		text := v
		if shared.assign(e, source) {
			text = shared.v
		}
		if text == nil {
			continue
		}
		if locators[text] == nil {
			locators[text] = newLocator(text)
		}
		e.At = locators[text].position(e)
	}
	for _, e := range envErrs {
		e.Source = "environment"
	}
	if err := append(errs, envErrs...).join(); err != nil {
		return nil, err
	}
	return &c, nil
}

// overlap reports whether one of two keys equals the other or leads to it.
func overlap(a, b string) bool {
	if len(a) > len(b) {
		a, b = b, a
	}
	return strings.HasPrefix(b, a) && (len(a) == len(b) || a == "" || b[len(a)] == '.' || b[len(a)] == '[')
}

// parseYAML parses a document to nodes and to their settings. A document without content is a
// node without content. Viper's own settings would not do: they lose keys without a value and
// the case of other keys, so that wrong keys would pass.
func parseYAML(b []byte) (*yaml.Node, map[string]any, error) {
	var doc yaml.Node
	if err := yaml.Unmarshal(b, &doc); err != nil {
		return nil, nil, err
	}
	var large error
	walk(&doc, func(n *yaml.Node) {
		if keys := len(n.Content) / 2; n.Kind == yaml.MappingNode && keys > maxKeys && large == nil {
			large = fmt.Errorf("yaml: line %d: a mapping has %d keys, more than %d", n.Line, keys, maxKeys)
		}
	})
	if large != nil {
		return nil, nil, large
	}
	settings := map[string]any{}
	if len(doc.Content) > 0 {
		if n := doc.Content[0]; n.Kind != yaml.MappingNode && n.Tag != "!!null" {
			return nil, nil, fmt.Errorf("yaml: line %d: a configuration must be a mapping of keys, like portals and targets", n.Line)
		}
		if err := doc.Decode(&settings); err != nil {
			return nil, nil, err
		}
	}
	if n := secondDocument(b); n > 0 {
		return nil, nil, fmt.Errorf("yaml: line %d: a second document begins", n)
	}
	return &doc, settings, nil
}

// secondDocument returns the number of the line that begins a second document, which the
// decoder would ignore; 0 if there is one document.
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
			case f.Kind() != reflect.Slice && f != reflect.TypeFor[security.Secret](): // other users may see the environment
				key := join(path, key)
				names[envPrefix+"_"+strings.ToUpper(strings.ReplaceAll(key, ".", "_"))] = key
			}
		}
	}
	walk("", reflect.TypeFor[Config]())
	return names
}

// readEnvironment returns the settings in the environment, the name of the variable for each
// of their keys, and the errors of other variables. A variable without a value is not set.
func readEnvironment() (tree map[string]any, names map[string]string, errs errorList) {
	v := viper.New()
	v.SetEnvPrefix(envPrefix)
	v.SetEnvKeyReplacer(strings.NewReplacer(".", "_"))
	names = map[string]string{}
	known := EnvNames()
	for name, key := range known {
		v.BindEnv(key) // fails only without a key
		if v.IsSet(key) {
			names[key] = name
		}
	}
	for _, e := range os.Environ() {
		name, _, _ := strings.Cut(e, "=")
		if !strings.HasPrefix(name, envPrefix+"_") || slices.Contains(envOfOthers, name) || known[name] != "" {
			continue
		}
		errs.addf(name, "unknown variable%s", suggest(name, slices.Sorted(maps.Keys(known))))
	}
	slices.SortFunc(errs, func(a, b *Error) int { return strings.Compare(a.Key, b.Key) })
	return v.AllSettings(), names, errs
}
