package vm

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"sync"
)

// maxOutput is how much of a script's output is kept, in bytes, per stream.
const maxOutput = 16 << 20

var errOutput = errors.New("the script printed more than 16 MiB")

// A stream reads one output port of the guest. What comes belongs to the
// capture that began last, up to its end mark.
type stream struct {
	mu  sync.Mutex
	now *capture // nil between scripts
}

// A capture is what one script printed on one stream.
type capture struct {
	mark []byte               // the line that ends it, with its newline
	logf func(string, ...any) // gets every line as it comes
	buf  bytes.Buffer         // what was printed
	err  error                // why buf is not all of it
	done chan struct{}        // closed at the end mark
}

// begin starts a capture that ends with the line mark.
func (s *stream) begin(mark string, logf func(string, ...any)) *capture {
	c := &capture{mark: []byte(mark + "\n"), logf: logf, done: make(chan struct{})}
	s.mu.Lock()
	s.now = c
	s.mu.Unlock()
	return c
}

// drop ends the capture without its mark, so that logf is not called again.
func (s *stream) drop() {
	s.mu.Lock()
	s.now = nil
	s.mu.Unlock()
}

// read reads r until it ends. Output that no script owns, such as that of a
// process left in the background, is lost.
func (s *stream) read(r io.Reader) {
	br := bufio.NewReaderSize(r, 64<<10)
	for {
		line, err := br.ReadSlice('\n') // a longer line comes in pieces
		if len(line) > 0 {
			s.mu.Lock()
			if s.now != nil && s.now.add(line) {
				s.now = nil
			}
			s.mu.Unlock()
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return
		}
	}
}

// add takes a line and reports whether it was the end mark.
func (c *capture) add(line []byte) bool {
	if bytes.Equal(line, c.mark) {
		// The agent puts a newline before the mark, so that the mark is a line
		// of its own whatever the script printed.
		c.buf.Truncate(max(c.buf.Len()-1, 0))
		close(c.done)
		return true
	}
	if c.buf.Len()+len(line) > maxOutput {
		c.err = errOutput
		c.buf.Reset()
	}
	c.buf.Write(line)
	if text := bytes.TrimRight(line, "\r\n"); len(text) > 0 {
		c.logf("%s", text)
	}
	return false
}
