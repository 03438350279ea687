package cli

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// lineEvery is the time between two lines without a terminal.
const lineEvery = 5 * time.Second

// A bar shows progress: on a terminal in one line that changes, elsewhere with a line from
// time to time.
type bar struct {
	w        io.Writer
	terminal bool
	now      func() time.Time
	last     time.Time // of a line
	phase    string
	began    time.Time // of the phase
	first    int64     // bytes done at that time
	drawn    bool      // the line of the terminal is not empty
}

func newBar(w io.Writer) *bar {
	return &bar{w: w, terminal: isTerminal(w), now: time.Now, last: time.Now()}
}

func (b *bar) show(p schema.Progress) {
	now := b.now()
	if p.Phase != b.phase {
		b.end()
		b.phase, b.began, b.first = p.Phase, now, p.Done
	}
	switch {
	case b.terminal:
		columns, _ := windowSize(b.w)
		fmt.Fprintf(b.w, "\r%s\x1b[K", b.line(p, now, columns-1))
		b.drawn = true
	case now.Sub(b.last) >= lineEvery:
		b.last = now
		fmt.Fprintln(b.w, b.line(p, now, 0))
	}
}

// end moves to the next line.
func (b *bar) end() {
	if b.drawn {
		b.drawn = false
		fmt.Fprintln(b.w)
	}
}

// line returns a line of at most that many columns, or of any length if columns is 0. It has
// a bar if it fits.
func (b *bar) line(p schema.Progress, now time.Time, columns int) string {
	share := 1.0
	if p.Total > 0 {
		share = min(max(float64(p.Done)/float64(p.Total), 0), 1)
	}
	numbers := fmt.Sprintf("%3.0f%% %s of %s", 100*share, rounded(p.Done), rounded(p.Total))
	if t, n := now.Sub(b.began).Seconds(), float64(p.Done-b.first); t >= 1 && n > 0 {
		numbers += fmt.Sprintf(", %s/s, %v left", rounded(int64(n/t)), time.Duration(float64(p.Total-p.Done)/n*t*float64(time.Second)).Round(time.Second))
	}
	text := p.Phase + " " + numbers
	if columns <= 0 {
		return text
	}
	if room := columns - len(text) - len("[] "); room >= 10 {
		room = min(room, 40)
		full := int(share * float64(room))
		text = p.Phase + " [" + strings.Repeat("=", full) + strings.Repeat(" ", room-full) + "] " + numbers
	}
	return text[:min(len(text), columns)]
}
