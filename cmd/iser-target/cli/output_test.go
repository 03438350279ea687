package cli

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
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

// Text below a row is in its third column, without dashes before it.
func TestTextBelowARow(t *testing.T) {
	var b strings.Builder
	l := &table{tabwriter.NewWriter(&b, 0, 8, 2, ' ', 0)}
	l.row("warning", "a", "text")
	l.below("a hint\x1b")
	l.w.Flush()
	if want := "warning  a  text\n            a hint?\n"; b.String() != want {
		t.Errorf("%q, want %q", b.String(), want)
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
