package daemon

import (
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/security/limits"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A gatedLog is the log of a daemon that does not run.
type gatedLog struct {
	d   *Daemon
	out testkit.Log
}

func newGatedLog() *gatedLog {
	g := &gatedLog{d: &Daemon{net: network{limits: limits.New()}}}
	g.d.log = g.d.newLogger(config.Log{}, &g.out)
	return g
}

// A strangerFrom is a connection from an address.
type strangerFrom struct{ from net.Addr }

func (s strangerFrom) RemoteAddr() net.Addr           { return s.from }
func (strangerFrom) LocalAddr() net.Addr              { return &net.TCPAddr{} }
func (strangerFrom) Read([]byte) (int, error)         { return 0, io.EOF }
func (strangerFrom) Write(b []byte) (int, error)      { return len(b), nil }
func (strangerFrom) Close() error                     { return nil }
func (strangerFrom) SetDeadline(time.Time) error      { return nil }
func (strangerFrom) SetReadDeadline(time.Time) error  { return nil }
func (strangerFrom) SetWriteDeadline(time.Time) error { return nil }

// refuse reports a refused connection.
func (g *gatedLog) refuse(from int, reason string) {
	g.d.log.Warn("login", eventKey, "login", "remote", &net.TCPAddr{IP: net.IPv4(10, 0, byte(from>>8), byte(from)), Port: 1000 + from%7},
		"outcome", "refused", "stage", "limit", "reason", reason)
}

// events returns the events of a kind.
func (g *gatedLog) events(kind string) (list []schema.Event) {
	for _, e := range g.d.Events(0) {
		if e.Event == kind {
			list = append(list, e)
		}
	}
	return list
}

// 17,900 refusals a second from one address are one line and one event a second, with the number of
// the others. The line about a neighbour is written at once.
func TestFloodOfRefusalsIsOneLineASecond(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		g := newGatedLog()
		for range 3 {
			for range 17900 {
				g.refuse(1, "too many")
			}
			time.Sleep(logPause)
			synctest.Wait()
		}
		lines := g.out.Lines("too many")
		if len(lines) != 4 || strings.Contains(lines[0], "more") || !strings.Contains(lines[1], "more=17898") || !strings.Contains(lines[2], "more=17899") {
			t.Errorf("%q", lines)
		}
		if n := len(g.events("login")); n != 4 {
			t.Errorf("%d events", n)
		}
		g.refuse(1, "too many")
		g.refuse(2, "too many")
		g.refuse(1, "another reason")
		if n := len(g.out.Lines("reason")); n != 6 {
			t.Errorf("%d lines, want one more of the neighbour, and one of another reason", n)
		}
		time.Sleep(3 * logPause)
		synctest.Wait()
		if n := len(g.out.Lines("reason")); n != 7 {
			t.Errorf("%d lines, want one more for the last refusal", n)
		}
		if b := g.d.net.limits.LogLines.State().Bites; b != 3*17900 {
			t.Errorf("%d lines were left out", b)
		}
		for port := range 1000 { // each reason has another port
			from := &net.TCPAddr{IP: net.IPv4(10, 0, 0, 3), Port: 1 + port}
			err := &net.OpError{Op: "read", Net: "tcp", Addr: from, Err: os.ErrDeadlineExceeded}
			g.d.refuse(strangerFrom{from}, "first byte", err)
		}
		time.Sleep(3 * logPause)
		synctest.Wait()
		if lines := g.out.Lines("first byte"); len(lines) != 2 || !strings.Contains(lines[1], "more=998") {
			t.Errorf("%q, want two lines", lines)
		}
		if len(g.d.gate.pauses) != 0 || g.d.gate.timer != nil || g.d.gate.refusals != 0 {
			t.Errorf("left: %d addresses and reasons", len(g.d.gate.pauses))
		}
	})
}

// Neither many reasons of one address nor many addresses fill the log, and what the gate remembers
// is bounded.
func TestLogIsBoundedWhateverPeersDo(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		g := newGatedLog()
		for second := range 30 {
			for i := range 1000 {
				g.refuse(1, fmt.Sprintf("reason %d of second %d", i, second))
			}
			time.Sleep(logPause)
		}
		synctest.Wait()
		if n, most := len(g.out.Lines("reason")), 200*10+30*(10+2); n > most {
			t.Errorf("%d lines of one address, want %d at most", n, most)
		}
		time.Sleep(5 * logPause)
		synctest.Wait()
		before := len(g.out.Lines("reason"))
		for i := range 20_000 {
			g.refuse(i, "silent")
		}
		if n := len(g.out.Lines("reason")) - before; n > maxRefusals+1 {
			t.Errorf("%d lines of 20,000 addresses in a moment", n)
		}
		if n := len(g.d.gate.credits); n > maxLogKeys {
			t.Errorf("the gate remembers %d addresses", n)
		}
		// Lines about sessions are not lost among them.
		g.d.log.Info("session ended", eventKey, "session", "remote", "192.0.2.9:1", "tsih", 7, "reason", "logout")
		if len(g.out.Lines("192.0.2.9")) != 1 {
			t.Error("the line of a neighbour's session was left out")
		}
		g.d.gate.flush()
	})
}

// A host logs in to 1,000 targets at once: each login is a line. One that logs in and out in a loop
// gets 10 lines a second in the long run.
func TestLoginsAreLogged(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		g := newGatedLog()
		login := func(tsih int) {
			for _, text := range []string{"login", "session ended"} {
				g.d.log.Info(text, eventKey, "login", "remote", "192.0.2.1:5", "tsih", tsih, "outcome", "accepted", "initiator", "a", "target", "b")
			}
		}
		for tsih := range 1000 {
			login(tsih)
		}
		if n := len(g.out.Lines("tsih")); n != 2000 {
			t.Errorf("%d lines of 1,000 sessions", n)
		}
		for range 60 {
			for tsih := range 500 {
				login(tsih)
			}
			time.Sleep(time.Second)
		}
		synctest.Wait()
		if n := len(g.out.Lines("tsih")) - 2000; n > 60*12 {
			t.Errorf("%d lines in a minute", n)
		}
		for i := range 100 { // of RESERVE and RELEASE, by another initiator
			g.d.log.Info("reservation", eventKey, "reservation", "initiator", "c", "command", []string{"RESERVE", "RELEASE"}[i%2], "lun", 0)
		}
		if n := len(g.out.Lines("RE")); n != 2 {
			t.Errorf("%d lines of a RESERVE loop in a moment", n)
		}
		g.d.log.Info("no peer causes this", eventKey, "change")
		if len(g.out.Lines("no peer")) != 1 {
			t.Error("a line was lost that no peer causes")
		}
		g.d.gate.flush()
	})
}

func BenchmarkLogGate(b *testing.B) {
	d := &Daemon{net: network{limits: limits.New()}}
	log := d.newLogger(config.Log{}, io.Discard)
	b.ReportAllocs()
	for range b.N {
		log.Warn("login", slog.String(eventKey, "login"), slog.String("remote", "192.0.2.1:5"), slog.String("outcome", "refused"), slog.String("reason", "x"))
	}
	d.gate.flush()
}
