package daemon

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/security/limits"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A shared is a limit of a Set, whether it has keys or not.
type shared interface {
	Name() string
	Bite(who string)
	SetMax(int64)
}

// sharedOf returns the fields of s that are limits.
func sharedOf(s *limits.Set) (list []shared) {
	v := reflect.ValueOf(s).Elem()
	for i := range v.NumField() {
		if !v.Type().Field(i).IsExported() {
			continue
		}
		if l, ok := v.Field(i).Addr().Interface().(shared); ok {
			list = append(list, l)
		}
	}
	return list
}

// sectionOf returns the part of a document from a heading to the next heading of the same level.
func sectionOf(t *testing.T, path, heading string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	_, text, ok := strings.Cut(string(b), "\n"+heading+"\n")
	if !ok {
		t.Fatalf("%s has no section %q", path, heading)
	}
	level, _, _ := strings.Cut(heading, " ")
	text, _, _ = strings.Cut(text, "\n"+level+" ")
	return text
}

// Each limit of limits.Set has a name, a key of the configuration with that name that sets it, a row in
// docs/config.md, a text in docs/limits.md, a state in the control API, metrics, and an event.
func TestEachLimitIsEverywhere(t *testing.T) {
	l := newLab(t, func(l *lab) { l.more = `metrics: {listen: "127.0.0.1:0"}` })
	all := sharedOf(l.net.limits)
	keys := new(config.Limits).Bounds()
	reference := sectionOf(t, "../../../docs/config.md", "## limits")
	page, err := os.ReadFile("../../../docs/limits.md")
	if err != nil {
		t.Fatal(err)
	}
	states, before := l.Limits(), l.scrape()
	if len(all) == 0 || len(states) != len(all) {
		t.Errorf("the Set has %d fields and %d states: New must name each field", len(all), len(states))
	}
	state := func(name string) (s schema.LimitState) {
		for _, s = range l.Limits() {
			if s.Name == name {
				return s
			}
		}
		return schema.LimitState{}
	}
	for i, one := range all {
		name, who := one.Name(), fmt.Sprintf("192.0.2.%d", i+1)
		if _, ok := keys[name]; !ok {
			t.Errorf("%s: config.Limits has no such key", name)
		}
		if !strings.Contains(reference, "\n| `"+name+"` |") {
			t.Errorf("%s: no row in docs/config.md, section limits", name)
		}
		if !strings.Contains(string(page), "\n| `"+name+"` | ") {
			t.Errorf("%s: no row in docs/limits.md", name)
		}
		if s := state(name); s.Per == "" || s.Unit == "" || s.Help == "" {
			t.Errorf("%s: its state is %+v", name, s)
		}
		one.Bite(who)
		l.heard(name, who)
		after := l.scrape()
		of := "{limit=\"" + name + "\"}"
		_, gauge := after["limit_used"+of]
		_, bound := after["limit_max"+of]
		if !bound || !gauge || after["limit_reached_total"+of] != before["limit_reached_total"+of]+1 {
			t.Errorf("%s: the metrics lack it, or did not count", name)
		}
		if s := state(name); s.Reached == 0 || s.Last.IsZero() {
			t.Errorf("%s: after it was reached its state is %+v", name, s)
		}
	}
}

// heard waits for the event that somebody met a limit.
func (l *lab) heard(name, who string) {
	l.t.Helper()
	testkit.Eventually(l.t, "an event about "+name, func() bool {
		return slices.ContainsFunc(l.Events(0), func(e schema.Event) bool {
			return e.Event == "limit" && e.Attrs["limit"] == name && e.Attrs["who"] == who
		})
	})
}

// A change of a limit applies at once. If another step of the change fails, the limit returns to its
// value before.
func TestLimitsChangeLiveAndAreUndone(t *testing.T) {
	l := newLab(t)
	set := func(value string) error {
		edit := func(d *config.Document) error { return d.SetLimit("max_connections", value) }
		_, err := l.Change(t.Context(), edit, ChangeOptions{})
		return err
	}
	if err := set("77"); err != nil {
		t.Fatal(err)
	}
	if n := l.net.limits.Connections.Max(); n != 77 {
		t.Errorf("max_connections is %d, want 77", n)
	}
	l.before = func(what string) error {
		if what == "paths" { // after all steps
			return os.ErrInvalid
		}
		return nil
	}
	if err := set("78"); err == nil || !strings.Contains(err.Error(), "Nothing was changed") {
		t.Errorf("error %v", err)
	}
	b, err := os.ReadFile(l.path)
	if n := l.net.limits.Connections.Max(); n != 77 || err != nil || !strings.Contains(string(b), "max_connections: 77}") {
		t.Errorf("max_connections is %d, want 77; file: %v\n%s", n, err, b)
	}
}

// Each test that docs/limits.md names for a promise exists.
func TestPromisesHaveTests(t *testing.T) {
	promises := sectionOf(t, "../../../docs/limits.md", "## What is promised")
	names := regexp.MustCompile("`(Test\\w+)`").FindAllStringSubmatch(promises, -1)
	if len(names) < 5 {
		t.Fatalf("%d tests in docs/limits.md", len(names))
	}
	var code strings.Builder
	err := filepath.WalkDir("../../..", func(path string, _ fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, "_test.go") {
			var b []byte
			b, err = os.ReadFile(path)
			code.Write(b)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if !strings.Contains(code.String(), "\nfunc "+name[1]+"(") {
			t.Errorf("%s does not exist", name[1])
		}
	}
}
