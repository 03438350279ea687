package cli

import (
	"os"
	"regexp"
	"slices"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// --since takes the number of an event, a duration, or a time: that of this machine's zone, or of the zone that it names.
func TestParseSince(t *testing.T) {
	zone := time.FixedZone("test", 2*3600)
	now := time.Date(2026, 11, 25, 14, 30, 0, 0, zone)
	for s, want := range map[string]filter{
		"":                     {},
		"0":                    {},
		"17":                   {number: 17},
		"1h":                   {from: now.Add(-time.Hour)},
		"90m30s":               {from: now.Add(-90*time.Minute - 30*time.Second)},
		"2026-11-25T14:00":     {from: now.Add(-30 * time.Minute)},
		"2026-11-25 14:00":     {from: now.Add(-30 * time.Minute)},
		"2026-11-25T14:00:01":  {from: now.Add(-30*time.Minute + time.Second)},
		"2026-11-25 14:00:01":  {from: now.Add(-30*time.Minute + time.Second)},
		"2026-11-25T12:00:00Z": {from: now.Add(-30 * time.Minute)},
		"2026-11-25":           {from: time.Date(2026, 11, 25, 0, 0, 0, 0, zone)},
	} {
		var f filter
		if err := f.parseSince(s, now); err != nil || f.number != want.number || !f.from.Equal(want.from) {
			t.Errorf("%q: number %d, from %v, %v; want %d, %v", s, f.number, f.from, err, want.number, want.from)
		}
	}
	for _, s := range []string{"-1", "0s", "-1h", " 1", "1x", "yesterday", "2026-13-01", "14:00", "18446744073709551616"} {
		var f filter
		if err := f.parseSince(s, now); err == nil {
			t.Errorf("%q is taken", s)
		}
	}
}

// A filter passes what names its subject, and several pass what all of them pass.
func TestFilterOfEvents(t *testing.T) {
	at := time.Date(2026, 11, 25, 14, 30, 0, 0, time.UTC)
	number := func(n uint16) *uint16 { return &n }
	e := schema.Event{Number: 5, Time: at, Event: "lun", Level: "WARN",
		Attrs: map[string]any{"target": "iqn.2026-11.io.example:store", "lun": 0.0, "tsih": 7.0, "initiator": "iqn.2026-11.io.example:host"}}
	for _, f := range []filter{
		{}, {number: 4}, {from: at}, {kinds: []string{"login", "lun"}}, {level: "info"}, {level: "warn"}, {target: "iqn.2026-11.io.example:store"},
		{lun: number(0)}, {session: number(7)}, {initiator: "iqn.2026-11.io.example:host"}, {level: "warn", lun: number(0), session: number(7)},
	} {
		if !f.selects(&e) {
			t.Errorf("%+v does not select %+v", f, e)
		}
	}
	for _, f := range []filter{
		{number: 5}, {from: at.Add(1)}, {kinds: []string{"login"}}, {level: "error"}, {target: "iqn.2026-11.io.example:other"},
		{lun: number(1)}, {session: number(0)}, {initiator: "iqn.2026-11.io.example:store"}, {level: "warn", lun: number(1)},
	} {
		if f.selects(&e) {
			t.Errorf("%+v selects %+v", f, e)
		}
	}
	bare := schema.Event{Number: 1, Time: at, Event: "service", Level: "INFO", Attrs: map[string]any{"lun": "0"}}
	for _, f := range []filter{{lun: number(0)}, {session: number(0)}, {target: "-"}, {initiator: "-"}} {
		if f.selects(&bare) {
			t.Errorf("%+v selects an event that names no such subject", f)
		}
	}
}

// --kind knows the kinds of the documentation.
func TestKindsOfEvents(t *testing.T) {
	b, err := os.ReadFile("../../../docs/cli.md")
	if err != nil {
		t.Fatal(err)
	}
	table := regexp.MustCompile(`(?s)\n\| kind \| events \|\n\|---\|---\|\n(.*?)\n\n`).FindSubmatch(b)
	if table == nil {
		t.Fatal("docs/cli.md has no table of kinds")
	}
	var kinds []string
	for _, m := range regexp.MustCompile("(?m)^\\| `(\\w+)` ").FindAllSubmatch(table[1], -1) {
		kinds = append(kinds, string(m[1]))
	}
	if !slices.Equal(kinds, eventKinds) {
		t.Errorf("docs/cli.md has the kinds %q, and --kind %q", kinds, eventKinds)
	}
}
