package cli

import (
	"errors"
	"io"
	"os"
	"strings"

	"golang.org/x/term"
)

// isTerminal reports whether f is a terminal.
func isTerminal(f any) bool {
	file, ok := f.(*os.File)
	return ok && term.IsTerminal(int(file.Fd()))
}

// windowSize returns the size of the terminal f, or 80 by 24 if it is unknown.
func windowSize(f any) (columns, rows int) {
	if file, ok := f.(*os.File); ok {
		if columns, rows, err := term.GetSize(int(file.Fd())); err == nil && columns > 0 && rows > 0 {
			return columns, rows
		}
	}
	return 80, 24
}

// A screen is a terminal that shows one page of text and reads keys.
type screen struct {
	in    *os.File // nil: no keys
	out   *os.File
	saved *term.State // of in
}

// Keys that end or interrupt a process, which a terminal in raw mode only sends.
const (
	keyInterrupt = 'C' - '@'
	keyQuit      = '\\' - '@'
)

// Control sequences of xterm and its like (ECMA-48, and xterm's private modes).
const (
	otherScreen = "\x1b[?1049h\x1b[?25l" // another buffer, no cursor
	firstScreen = "\x1b[?25h\x1b[?1049l"
	home        = "\x1b[H"
	eraseLine   = "\x1b[K" // from the cursor to the end
	eraseBelow  = "\x1b[J"
)

// openScreen switches the terminal to another screen than that of the command line, and its
// keys to raw mode.
func openScreen(in io.Reader, out *os.File) (*screen, error) {
	s := &screen{out: out}
	if file, ok := in.(*os.File); ok && isTerminal(file) {
		saved, err := term.MakeRaw(int(file.Fd()))
		if err != nil {
			return nil, os.NewSyscallError("tcsetattr", err)
		}
		s.in, s.saved = file, saved
	}
	if _, err := out.WriteString(otherScreen); err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

// close restores the terminal.
func (s *screen) close() error {
	_, err := s.out.WriteString(firstScreen)
	if s.in != nil {
		err = errors.Join(err, os.NewSyscallError("tcsetattr", term.Restore(int(s.in.Fd()), s.saved)))
	}
	return err
}

// keys returns the keys that the user types. Its goroutine ends with the process or the terminal.
func (s *screen) keys() <-chan byte {
	if s.in == nil {
		return nil
	}
	keys := make(chan byte)
	go func() {
		defer close(keys)
		b := make([]byte, 1)
		for {
			if n, err := s.in.Read(b); n == 0 || err != nil {
				return
			}
			keys <- b[0]
		}
	}()
	return keys
}

// draw shows the lines that content returns for the size of the terminal.
func (s *screen) draw(content func(columns, rows int) []string) error {
	columns, rows := windowSize(s.out)
	lines := content(columns, rows)
	var b strings.Builder
	b.WriteString(home)
	for i, line := range lines[:min(len(lines), rows)] {
		if i > 0 {
			b.WriteString("\r\n")
		}
		r := []rune(line)
		b.WriteString(string(r[:min(len(r), columns-1)])) // on the last column, eraseLine would erase the last character
		b.WriteString(eraseLine)
	}
	b.WriteString(eraseBelow)
	_, err := s.out.WriteString(b.String())
	return err
}
