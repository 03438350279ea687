package daemon

import (
	"errors"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
)

// Connections that do not log in make room for an initiator. Those that logged in stay, and
// when they take all places no other can log in.
func TestNewcomersMakeRoom(t *testing.T) {
	l := newLab(t, func(l *lab) { l.more = "limits: {max_connections: 4, connections_per_address: 9, login_timeout: 10m}" })
	sessions := []*initiator.Session{l.login("first", store)}
	var strangers []net.Conn
	stranger := func(says string) {
		t.Helper()
		nc, err := net.Dial("tcp", l.addr())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { nc.Close() })
		if _, err := nc.Write([]byte(says)); err != nil {
			t.Fatal(err)
		}
		strangers = append(strangers, nc)
	}
	wantGone := func(n int) {
		t.Helper()
		for ; n > 0; n-- {
			nc := strangers[0]
			strangers = strangers[1:]
			nc.SetReadDeadline(time.Now().Add(10 * time.Second))
			if _, err := nc.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("connection of a stranger: %v", err)
			}
		}
	}
	for _, says := range []string{
		"",           // no first byte
		"MPA ID Req", // in MPA startup
		"\x43",       // in a Login Request
		"", "", "", "",
	} {
		stranger(says)
	}
	wantGone(4) // of four places, a session has one
	discovery, err := initiator.Login(t.Context(), l.addr(), initiator.Options{Name: prefix + "finds"})
	if err != nil {
		t.Fatal(err)
	}
	defer discovery.Close()
	wantGone(1)
	stranger("")
	wantGone(1)
	sessions = append(sessions, l.login("second", store))
	wantGone(1)
	sessions = append(sessions, l.login("third", store))
	wantGone(1)
	fourth := l.login("fourth", store) // displaces discovery, which has come further than the strangers
	if p, err := discovery.Next(t.Context()); err == nil {
		t.Errorf("SEC-5042.6.4.2-1: discovery session gets %v", p)
	}

	if s, err := l.tryLogin("fifth", store); err == nil {
		s.Close()
		t.Error("DDP-8.3.2-2, RDMAP-8.1.2-2, SEC-5042.3-1: a fifth session was admitted")
	}
	for _, s := range append(sessions, fourth) {
		if got := do(t, s, &initiator.Command{}); got != "" && !strings.HasPrefix(got, "6/29/") {
			t.Errorf("SEC-5042.6.4.1-2: TEST UNIT READY: %s", got)
		}
	}
	fourth.Close()
	testkit.Eventually(t, "a place is free", func() bool { return l.net.limits.Connections.Used() == 3 })
	l.login("fifth", store)

	// The events say of each end why. Those of the same kind within a second are one event.
	testkit.Eventually(t, "events of discovery, which ended, and of eight strangers", func() bool {
		displaced, ended := uint64(0), 0
		for _, e := range l.Events(0) {
			switch reason, _ := e.Attrs["reason"].(string); {
			case strings.Contains(reason, "limits.max_connections is 4, and this one had not logged in"):
				more, _ := e.Attrs["more"].(uint64)
				displaced += 1 + more
			case e.Attrs["outcome"] == "refused" || e.Text == "session ended":
				ended++
			}
		}
		if ended != 2 { // the fifth, and the fourth
			t.Errorf("%d other ends", ended)
		}
		return displaced == 9
	})
}

// Newcomers have a quarter of the memory at most, however many places there are.
func TestNewcomersLeaveMemory(t *testing.T) {
	const strangers, places = 200, 32 << 20 / 4 / newcomerBytes
	l := newLab(t, func(l *lab) { l.more = "limits: {memory: 32MiB, login_timeout: 10m}" })
	for range strangers {
		nc, err := net.Dial("tcp", l.addr())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { nc.Close() })
	}
	testkit.Eventually(t, "all have come", func() bool { return l.net.limits.Memory.State().Bites == strangers-places })
	if n := l.net.limits.Connections.Used(); n != places {
		t.Errorf("%d connections, want %d", n, places)
	}
	l.login("first", store)
}
