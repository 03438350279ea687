package cli

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

const gib = 1 << 30

// Without a terminal, a bar prints a line every lineEvery, and none for quick work.
func TestBarWithoutATerminalPrintsLines(t *testing.T) {
	var out bytes.Buffer
	b := newBar(&out)
	now := b.last
	b.now = func() time.Time { return now }
	for i := range int64(120) { // 12 s
		b.show(schema.Progress{Phase: "copying", Done: i << 20, Total: 200 << 20})
		now = now.Add(100 * time.Millisecond)
	}
	b.end()
	const want = "copying  25% 50.0 MiB of 200.0 MiB, 10.0 MiB/s, 15s left\ncopying  50% 100.0 MiB of 200.0 MiB, 10.0 MiB/s, 10s left\n"
	if out.String() != want {
		t.Errorf("%q, want %q", out.String(), want)
	}
}

// On a terminal, the line changes in place and fits, with a bar if the terminal is wide.
func TestBarFitsTheTerminal(t *testing.T) {
	var out bytes.Buffer
	b := newBar(&out)
	b.terminal = true
	b.show(schema.Progress{Phase: "preallocating", Done: gib, Total: 2 * gib})
	b.show(schema.Progress{Phase: "copying", Done: 0, Total: gib})
	b.end()
	b.end()
	lines := strings.Split(out.String(), "\n")
	if len(lines) != 3 || lines[2] != "" {
		t.Fatalf("%q: want a line for each phase", out.String())
	}
	for i, phase := range []string{"preallocating", "copying"} {
		if !strings.HasPrefix(lines[i], "\r"+phase) || !strings.HasSuffix(lines[i], "\x1b[K") {
			t.Errorf("line %q", lines[i])
		}
	}
	for _, p := range []schema.Progress{{}, {Phase: "zeroing", Done: 3, Total: 0}, {Phase: "copying", Done: 2 * gib, Total: gib}, {Phase: "preallocating", Done: gib, Total: 2 * gib}} {
		for columns := 1; columns < 120; columns++ {
			line := b.line(p, b.began.Add(time.Minute), columns)
			if len(line) > columns || columns > 90 && p.Total > 0 && !strings.Contains(line, "[=") {
				t.Errorf("%+v in %d columns: %q", p, columns, line)
			}
		}
	}
}
