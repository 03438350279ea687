package main

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
)

// load reads and writes 4 KiB at a time until the test ends.
func (s *station) load(t *testing.T) {
	t.Helper()
	session := s.login(t)
	stop, done := make(chan struct{}), make(chan struct{})
	t.Cleanup(func() { close(stop); <-done })
	go func() {
		defer close(done)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			c := &initiator.Command{}
			if c.CDB[8] = 8; i%2 == 0 {
				c.CDB[0], c.In = 0x28, make([]byte, 4096) // READ (10)
			} else {
				c.CDB[0], c.Out = 0x2a, make([]byte, 4096) // WRITE (10)
			}
			if err := session.Do(c); err != nil {
				return
			}
		}
	}()
}

// Without a terminal, top prints one frame after the other.
func TestTopPrintsFrames(t *testing.T) {
	s := newStation(t)
	s.load(t)
	lines := strings.Split(strings.TrimSpace(s.ok(t, "top", "-n", "3", "-d", "300ms", "-o", "json")), "\n")
	if len(lines) != 3 {
		t.Fatalf("%d lines, want 3: %s", len(lines), lines)
	}
	busy := 0
	for _, line := range lines {
		var f cli.Frame
		if err := json.Unmarshal([]byte(line), &f); err != nil || len(f.Sessions) != 1 || len(f.LUNs) != 1 {
			t.Fatalf("%s: %v", line, err)
		}
		if f.Seconds < 0.3 || f.Sessions[0].Initiator != hostName || f.Sessions[0].Transport != "iser" || f.LUNs[0].Target != storeName || *f.LUNs[0].LUN != 0 {
			t.Errorf("%s", line)
		}
		for _, l := range []cli.Load{f.Sessions[0], f.LUNs[0]} {
			// Commands move 4096 bytes. A command may be in one counter, and not yet in the
			// other.
			if moved := (l.ReadBytes + l.WriteBytes) / 4096; moved > l.IOPS+4/f.Seconds || l.InFlight > 2 || l.Errors > 1 {
				t.Errorf("%s", line)
			}
			if l.IOPS*f.Seconds < 4 {
				continue // the machine was busy
			}
			busy++
			if l.ReadBytes <= 0 || l.WriteBytes <= 0 || l.Average == nil || l.P50 == nil || l.P99 == nil || *l.Average <= 0 || *l.P50 <= 0 || *l.P50 > *l.P99 {
				t.Errorf("%s", line)
			}
		}
	}
	if busy == 0 {
		t.Errorf("no load in %s", lines)
	}
	out := s.ok(t, "top", "-n", "2", "-d", "100ms", "--sort", "write")
	if strings.Count(out, "by write\n") != 2 || strings.Count(out, hostName) != 2 || strings.Contains(out, "\x1b") {
		t.Errorf("%s", out)
	}
	if out := s.ok(t, "top", "-n", "2", "-d", "100ms", "-o", "yaml"); strings.Count(out, "---\n") != 2 || !strings.Contains(out, "iops: ") {
		t.Errorf("%s", out)
	}
	s.says(t, cli.ExitUsage, "--interval", "top", "-d", "1ms")
	s.says(t, cli.ExitUsage, "--count", "top", "-n", "-1")
	s.says(t, cli.ExitUsage, "iops, read", "top", "--sort", "name")
	s.says(t, cli.ExitUnreachable, "no target answers", "top", "--socket", "/nowhere")
	s.says(t, cli.ExitOK, "latency", "__complete", "top", "--sort", "")
}

// A terminal is the master of a pseudo-terminal, with the output of the program.
type terminal struct {
	*os.File
	tty *os.File
	mu  sync.Mutex
	out strings.Builder
}

func newTerminal(t *testing.T, columns, rows uint16) *terminal {
	t.Helper()
	f, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlSetPointerInt(int(f.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(f.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	tty, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	p := &terminal{File: f, tty: tty}
	p.resize(t, columns, rows)
	done := make(chan struct{})
	go func() {
		defer close(done)
		b := make([]byte, 4096)
		for {
			n, err := f.Read(b)
			p.mu.Lock()
			p.out.Write(b[:n])
			p.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	t.Cleanup(func() {
		tty.Close() // ends the reader
		<-done
		f.Close()
	})
	return p
}

func (p *terminal) resize(t *testing.T, columns, rows uint16) {
	t.Helper()
	if err := unix.IoctlSetWinsize(int(p.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Col: columns, Row: rows}); err != nil {
		t.Fatal(err)
	}
}

func (p *terminal) settings(t *testing.T) unix.Termios {
	t.Helper()
	s, err := unix.IoctlGetTermios(int(p.tty.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	return *s
}

func (p *terminal) text() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.String()
}

// shows waits for a screen for which ok returns true, and returns its lines.
func (p *terminal) shows(t *testing.T, what string, ok func(lines []string) bool) []string {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		screens := strings.Split(p.text(), "\x1b[H")
		for i := len(screens) - 1; i > 0; i-- {
			if text, _, whole := strings.Cut(screens[i], "\x1b[J"); whole {
				if lines := strings.Split(strings.NewReplacer("\x1b[K", "", "\r", "").Replace(text), "\n"); ok(lines) {
					return lines
				}
				break
			}
		}
	}
	text := p.text()
	t.Fatalf("the terminal shows no %s: %q", what, text[max(0, len(text)-2000):])
	return nil
}

// On a terminal, top fits the screen, reads keys, and restores the terminal however it ends.
func TestTopRestoresTheTerminal(t *testing.T) {
	s := newStation(t)
	s.load(t)
	has := func(want ...string) func([]string) bool {
		return func(lines []string) bool {
			for _, w := range want {
				if !regexp.MustCompile(w).MatchString(strings.Join(lines, "\n")) {
					return false
				}
			}
			return true
		}
	}
	for _, tc := range []struct {
		name string
		end  func(t *testing.T, p *terminal, process *os.Process)
		code int
		says string
	}{
		{"q", func(t *testing.T, p *terminal, _ *os.Process) {
			if _, err := p.WriteString("q"); err != nil {
				t.Fatal(err)
			}
		}, cli.ExitOK, ""},
		{"ctrl-C", func(t *testing.T, p *terminal, _ *os.Process) {
			if _, err := p.WriteString("\x1a\x03"); err != nil { // ctrl-Z suspends other programs
				t.Fatal(err)
			}
		}, cli.ExitOK, ""},
		{"SIGTERM", func(t *testing.T, _ *terminal, process *os.Process) { process.Signal(unix.SIGTERM) }, cli.ExitOK, ""},
		{"SIGHUP", func(t *testing.T, _ *terminal, process *os.Process) { process.Signal(unix.SIGHUP) }, cli.ExitOK, ""},
		{"the end of the target", func(*testing.T, *terminal, *os.Process) { s.cmd.Process.Kill(); s.cmd.Wait() }, cli.ExitUnreachable, "target"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := newTerminal(t, 120, 24)
			before := p.settings(t)
			cmd := s.command(t, "top", "-d", "200ms")
			cmd.Stdin, cmd.Stdout, cmd.Stderr = p.tty, p.tty, p.tty
			cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
			lines := p.shows(t, "load", has(`TSIH .*IOPS`, `example:host`, `LUN .*IOPS`, `by iops`))
			if len(lines) != 7 {
				t.Errorf("%d lines, want 7: %q", len(lines), lines)
			}
			if p.settings(t) == before {
				t.Error("the terminal buffers lines")
			}
			if _, err := p.WriteString("s"); err != nil {
				t.Fatal(err)
			}
			p.shows(t, "other order", has(`by read`))
			p.resize(t, 40, 5)
			lines = p.shows(t, "smaller screen", func(lines []string) bool { return len(lines) <= 5 && len(lines[0]) < 40 })
			for _, l := range lines {
				if len(l) >= 40 {
					t.Errorf("line %q on 40 columns", l)
				}
			}
			tc.end(t, p, cmd.Process)
			cmd.Wait()
			if got := cmd.ProcessState.ExitCode(); got != tc.code {
				t.Errorf("exit code %d, want %d", got, tc.code)
			}
			if p.settings(t) != before {
				t.Error("the terminal is not restored")
			}
			testkit.Eventually(t, fmt.Sprintf("the other screen is left, and then comes %q", tc.says), func() bool {
				_, rest, left := strings.Cut(p.text(), "\x1b[?25h\x1b[?1049l")
				return left && strings.Contains(rest, tc.says)
			})
		})
	}
}
