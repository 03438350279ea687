package vm

import (
	"io"
	"strings"
	"testing"
)

func TestStream(t *testing.T) {
	const mark = "0123456789abcdef 7"
	for _, c := range []struct{ name, printed, want string }{
		{"nothing", "", ""},
		{"lines", "one\n\ntwo\n", "one\n\ntwo\n"},
		{"no newline at the end", "one", "one"},
		{"the mark within a line", "x" + mark + "\n", "x" + mark + "\n"},
		{"a line longer than the buffer", strings.Repeat("x", 300<<10), strings.Repeat("x", 300<<10)},
	} {
		t.Run(c.name, func(t *testing.T) {
			var s stream
			cap := s.begin(mark, func(string, ...any) {})
			s.read(strings.NewReader(c.printed + "\n" + mark + "\nof a process in the background\n"))
			<-cap.done
			if got := cap.buf.String(); got != c.want || cap.err != nil {
				t.Errorf("got %d bytes, %.100q, %v", len(got), got, cap.err)
			}
		})
	}
}

func TestStreamBoundsOutput(t *testing.T) {
	var s stream
	cap := s.begin("mark", func(string, ...any) {})
	s.read(io.MultiReader(strings.NewReader(strings.Repeat("all work and no play\n", maxOutput/16)),
		strings.NewReader("\nmark\n")))
	<-cap.done
	if cap.err != errOutput || cap.buf.Len() > maxOutput {
		t.Errorf("%d bytes are kept, error %v", cap.buf.Len(), cap.err)
	}
}
