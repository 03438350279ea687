package cli

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

func TestPrintableHidesControlCharacters(t *testing.T) {
	for _, tc := range []struct{ in, want string }{
		{"", "-"},
		{"iqn.2026-11.io.example:bücher 📚", "iqn.2026-11.io.example:bücher 📚"},
		{"a\x1b[31m\nb\tc", "a?[31m?b?c"},
		{"a\u0085b\u202eb\u200bc\u2028d", "a?b?b?c?d"}, // C1, right to left, no width, line separator
		{"a\xffb", "a\ufffdb"},
	} {
		if got := printable(tc.in); got != tc.want {
			t.Errorf("printable(%q): %q, want %q", tc.in, got, tc.want)
		}
	}
}

func TestCountHasPlurals(t *testing.T) {
	for n, want := range []string{"0 LUNs", "1 LUN", "2 LUNs"} {
		if got := count(n, "LUN"); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// tableText returns what fill writes into a table, without colours.
func tableText(fill func(*table)) string {
	var b strings.Builder
	t := newTable(false)
	fill(t)
	t.writeTo(&b)
	return b.String()
}

// Text below a row is in its third column, without dashes before it.
func TestTextBelowARow(t *testing.T) {
	got := tableText(func(l *table) {
		l.row("warning", "a", "text")
		l.below("a hint\x1b")
	})
	if want := "warning  a  text\n            a hint?\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestDurationHasThreeDigits(t *testing.T) {
	for _, tc := range []struct {
		seconds float64
		want    string
	}{
		{0, "below 1µs"}, {512e-9, "below 1µs"}, {1e-6, "1µs"}, {1.2345e-6, "1.23µs"}, {0.0123456, "12.3ms"}, {1.2345, "1.23s"}, {123.456, "2m3s"},
	} {
		if got := duration(tc.seconds); got != tc.want {
			t.Errorf("duration(%v): %s, want %s", tc.seconds, got, tc.want)
		}
	}
}

// Numbers of an event have no exponent.
func TestEventLineHasPlainNumbers(t *testing.T) {
	var e schema.Event
	if err := json.Unmarshal([]byte(`{"number":7,"time":"2026-11-21T20:09:37Z","level":"INFO","event":"lun","text":"LUN ready",
		"attrs":{"octets":1073741824,"share":0.5,"target":"","why":"a\nb c","ready":true}}`), &e); err != nil {
		t.Fatal(err)
	}
	here := time.Local
	time.Local = time.FixedZone("CET", 3600) // of the reader
	defer func() { time.Local = here }()
	const want = `7 2026-11-21 21:09:37 INFO lun: LUN ready octets=1073741824 ready=true share=0.5 why="a\nb c"`
	if got := eventLine(&e); got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
}

// What a server says reaches the terminal without the characters that control it. Lines stay lines.
func TestReportShowsNoEscapeSequences(t *testing.T) {
	var b strings.Builder
	code := Report(&b, &schema.Error{
		Message: "evil \x1b]0;title\x07\x1b[2J\u202e and \u009b31m", Hint: "do \x1b[8mthis\x1b[0m", Code: schema.Failed,
	})
	want := "iser-target: evil ?]0;title??[2J? and ?31m\nDo ?[8mthis?[0m.\n"
	if code != ExitError || b.String() != want {
		t.Errorf("exit code %d, %q, want %q", code, b.String(), want)
	}
	b.Reset()
	Report(&b, errors.Join(errors.New("first\r"), errors.New("second")))
	if want := "iser-target: first?\nsecond\n"; b.String() != want {
		t.Errorf("%q, want %q", b.String(), want)
	}
}

// The line of an error in a configuration follows it, with a mark below the column.
func TestReportShowsLines(t *testing.T) {
	d, err := config.NewDocument("f", []byte("portals: [{listen: 127.0.0.1:3260, tgpt: 7}]\ntargets: []\ndrain: 1h\n"))
	if err != nil {
		t.Fatal(err)
	}
	_, err = d.Config()
	want := `iser-target: f:1:36: portals[0].tgpt: unknown key, did you mean tpgt?
portals: [{listen: 127.0.0.1:3260, tgpt: ...
                                   ^
f:3:8: drain: must be 0 to 10m, not 1h0m0s
drain: 1h
       ^
`
	var b strings.Builder
	if code := Report(&b, err); code != ExitError || b.String() != want {
		t.Errorf("exit code %d,\n%s\nwant\n%s", code, b.String(), want)
	}
}

// Rows of what is down are red on a terminal, and the columns stay aligned.
func TestColours(t *testing.T) {
	fill := func(t *table) {
		t.head("LUN STATE PATH")
		t.row(0, "ready", "a")
		t.row(1, "not ready", "b")
		t.line("a line")
		t.row(2, "degraded", "c")
	}
	var b strings.Builder
	l := newTable(true)
	fill(l)
	l.writeTo(&b)
	want := "LUN  STATE      PATH\n0    ready      a\n" + red + "1    not ready  b" + reset + "\na line\n" + yellow + "2  degraded  c" + reset + "\n"
	if b.String() != want {
		t.Errorf("%q, want %q", b.String(), want)
	}
	if plain := tableText(fill); plain != strings.NewReplacer(red, "", yellow, "", reset, "").Replace(want) {
		t.Errorf("without colours: %q", plain)
	}
}

// Numbers sort as numbers, and objects without the field come last in both orders.
func TestSortList(t *testing.T) {
	type object struct {
		Name string `json:"name,omitempty"`
		Size int64  `json:"size"`
	}
	for by, want := range map[string]string{"size": "b a c", "-size": "c a b", "name": "a b c", "-name": "c b a", ".size": "b a c", "": "a b c"} {
		list := []object{{"a", 10}, {"b", 9}, {"c", 1 << 40}}
		p := &program{sortBy: by}
		if by != "" {
			var err error
			if p.sortPath, err = parsePath(strings.TrimPrefix(by, "-")); err != nil {
				t.Fatal(err)
			}
		}
		if err := sortList(p, list); err != nil {
			t.Fatal(err)
		}
		if got := list[0].Name + " " + list[1].Name + " " + list[2].Name; got != want {
			t.Errorf("by %q: %s, want %s", by, got, want)
		}
	}
	p := &program{sortBy: "-name"}
	p.sortPath, _ = parsePath("name")
	list := []object{{"", 1}, {"a", 2}, {"b", 3}}
	if err := sortList(p, list); err != nil || list[2].Size != 1 || list[0].Name != "b" {
		t.Errorf("%v, %v", list, err)
	}
}
