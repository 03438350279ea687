package cli

import (
	"errors"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// isTerminal tells whether f is a terminal.
func isTerminal(f any) bool {
	file, ok := f.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS)
	return err == nil
}

// windowSize is that of the terminal f, or one that every terminal has.
func windowSize(f any) (columns, rows int) {
	if file, ok := f.(*os.File); ok {
		if s, err := unix.IoctlGetWinsize(int(file.Fd()), unix.TIOCGWINSZ); err == nil && s.Col > 0 && s.Row > 0 {
			return int(s.Col), int(s.Row)
		}
	}
	return 80, 24
}

// A screen is a terminal that somebody looks at and types on.
type screen struct {
	in    *os.File // nil: nobody types
	out   *os.File
	saved unix.Termios // of in
}

// What terminals like those of xterm do (ECMA-48, and xterm's private modes).
const (
	otherScreen = "\x1b[?1049h\x1b[?25l" // another buffer, and no cursor
	firstScreen = "\x1b[?25h\x1b[?1049l"
	home        = "\x1b[H"
	eraseLine   = "\x1b[K" // from the cursor on
	eraseBelow  = "\x1b[J"
)

// openScreen has the terminal show another screen than that with the command line, and
// keys come one by one. Those that end a process still do; none suspends it, because
// the terminal would stay as it is now.
func openScreen(in io.Reader, out *os.File) (*screen, error) {
	s := &screen{out: out}
	if file, ok := in.(*os.File); ok && isTerminal(file) {
		t, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS)
		if err != nil {
			return nil, os.NewSyscallError("tcgetattr", err)
		}
		s.in, s.saved = file, *t
		t.Lflag &^= unix.ICANON | unix.ECHO
		t.Cc[unix.VMIN], t.Cc[unix.VTIME], t.Cc[unix.VSUSP] = 1, 0, 0
		if err := unix.IoctlSetTermios(int(file.Fd()), unix.TCSETS, t); err != nil {
			return nil, os.NewSyscallError("tcsetattr", err)
		}
	}
	if _, err := out.WriteString(otherScreen); err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

// close makes the terminal what it was.
func (s *screen) close() error {
	_, err := s.out.WriteString(firstScreen)
	if s.in != nil {
		err = errors.Join(err, os.NewSyscallError("tcsetattr", unix.IoctlSetTermios(int(s.in.Fd()), unix.TCSETSW, &s.saved)))
	}
	return err
}

// keys has what is typed. Its goroutine ends with the process, or with the terminal.
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

// draw shows the lines that content makes for so much room, as far as there is any.
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
		b.WriteString(string(r[:min(len(r), columns-1)])) // on the last column, the cursor would be no further
		b.WriteString(eraseLine)
	}
	b.WriteString(eraseBelow)
	_, err := s.out.WriteString(b.String())
	return err
}
