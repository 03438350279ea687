package waitset

import (
	"errors"
	"net"
	"os"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/tests/testkit"
)

// limit bounds what has to happen.
const limit = 30 * time.Second

func newSet(t *testing.T) *Set {
	t.Helper()
	s, err := New()
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.Run()
	}()
	t.Cleanup(func() {
		s.Close()
		<-done
	})
	return s
}

func write(t *testing.T, nc net.Conn, text string) {
	t.Helper()
	if _, err := nc.Write([]byte(text)); err != nil {
		t.Fatal(err)
	}
}

// came returns what can be read from fd, at most 10 bytes, and consumes nothing.
func came(fd int) int {
	var b [10]byte
	n, _, _ := unix.Recvfrom(fd, b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
	return n
}

// want requires that the next end of a Wait has that reason.
func want(t *testing.T, ended <-chan error, reason error) {
	t.Helper()
	select {
	case err := <-ended:
		if !errors.Is(err, reason) {
			t.Fatalf("ended with %v, want %v", err, reason)
		}
	case <-time.After(limit):
		t.Fatalf("a Wait has not ended, want %v", reason)
	}
}

func TestWaitEnds(t *testing.T) {
	s := newSet(t)
	late := time.Now().Add(time.Hour)
	ended := make(chan error, 10)
	end := func(err error) { ended <- err }
	mine := errors.New("another takes its place")

	for _, tt := range []struct {
		name   string
		enough func(int) bool
		act    func(w *Wait, ours *net.TCPConn, peer net.Conn)
		why    error
	}{
		{"data", nil, func(_ *Wait, _ *net.TCPConn, peer net.Conn) { write(t, peer, "x") }, nil},
		{"enough data", func(fd int) bool { return came(fd) == 3 }, func(w *Wait, _ *net.TCPConn, peer net.Conn) {
			for i := range 3 {
				write(t, peer, "x")
				if i == 1 && s.Len() != 1 {
					t.Error("two of three bytes are enough")
				}
			}
		}, nil},
		{"the peer closes", func(int) bool { return false }, func(_ *Wait, _ *net.TCPConn, peer net.Conn) {
			write(t, peer, "x")
			peer.Close()
		}, nil},
		{"the peer resets", func(int) bool { return false }, func(_ *Wait, _ *net.TCPConn, peer net.Conn) {
			peer.(*net.TCPConn).SetLinger(0)
			peer.Close()
		}, nil},
		{"Wake", nil, func(w *Wait, _ *net.TCPConn, _ net.Conn) {
			if !w.Wake(mine) {
				t.Error("Wake ends nothing")
			}
		}, mine},
		{"Wake after Close", nil, func(w *Wait, ours *net.TCPConn, _ net.Conn) {
			ours.Close()
			w.Wake(nil)
		}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ours, peer := testkit.Pair(t)
			w := s.Add(ours, late, tt.enough, end)
			if s.Len() != 1 {
				t.Fatalf("%d connections wait", s.Len())
			}
			tt.act(w, ours, peer)
			want(t, ended, tt.why)
			if s.Len() != 0 || w.Wake(mine) {
				t.Error("a Wait has ended, but is there")
			}
		})
	}
}

// What has come before Add is enough, too, and a connection may wait again and again.
func TestWaitAgain(t *testing.T) {
	s := newSet(t)
	ended := make(chan error, 1)
	ours, peer := testkit.Pair(t)
	for range 20 {
		write(t, peer, "x")
		testkit.Eventually(t, "the byte has come", func() (is bool) {
			raw, err := ours.SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			raw.Control(func(fd uintptr) { is = came(int(fd)) == 1 })
			return is
		})
		s.Add(ours, time.Now().Add(time.Hour), nil, func(err error) { ended <- err })
		want(t, ended, nil)
		s.Add(ours, time.Now().Add(time.Hour), func(fd int) bool { return came(fd) == 2 }, func(err error) { ended <- err })
		write(t, peer, "x")
		want(t, ended, nil)
		if n, err := ours.Read(make([]byte, 10)); n != 2 {
			t.Fatalf("%d bytes, %v", n, err)
		}
	}
}

// Waits end in the order of their deadlines, in whatever order they came.
func TestDeadlines(t *testing.T) {
	s := newSet(t)
	order := make(chan int, 3)
	ended := make(chan error, 3)
	begin := time.Now()
	for _, i := range []int{2, 0, 1} {
		ours, _ := testkit.Pair(t)
		s.Add(ours, begin.Add(time.Duration(1+i)*300*time.Millisecond), nil, func(err error) {
			order <- i
			ended <- err
		})
	}
	for i := range 3 {
		want(t, ended, os.ErrDeadlineExceeded)
		if got := <-order; got != i {
			t.Errorf("%d ends as number %d", got, i)
		}
		if early := time.Duration(1+i)*300*time.Millisecond - time.Since(begin); early > 0 {
			t.Errorf("%v too early", early)
		}
	}
	ours, _ := testkit.Pair(t)
	s.Add(ours, begin, nil, func(err error) { ended <- err }) // it has passed
	want(t, ended, os.ErrDeadlineExceeded)
}

// A descriptor that was closed and is in use again belongs to the new connection only.
func TestDescriptorsAreUsedAgain(t *testing.T) {
	s := newSet(t)
	late := time.Now().Add(time.Hour)
	first, second := make(chan error, 1), make(chan error, 1)
	ours, _ := testkit.Pair(t)
	w := s.Add(ours, late, nil, func(err error) { first <- err })
	ours.Close()
	again, peer := testkit.Pair(t)
	s.Add(again, late, nil, func(err error) { second <- err })
	w.Wake(net.ErrClosed)
	want(t, first, net.ErrClosed)
	write(t, peer, "x")
	want(t, second, nil)
}

// Close ends all Waits, and later ones at once.
func TestClose(t *testing.T) {
	s := newSet(t)
	ended := make(chan error, 2)
	for range 2 {
		ours, _ := testkit.Pair(t)
		s.Add(ours, time.Now().Add(time.Hour), nil, func(err error) { ended <- err })
		s.Close()
		want(t, ended, ErrClosed)
	}
	ours, _ := testkit.Pair(t)
	ours.Close()
	s.Add(ours, time.Now().Add(time.Hour), nil, func(err error) { ended <- err })
	select {
	case err := <-ended:
		if err == nil {
			t.Error("a closed connection waits without an error")
		}
	case <-time.After(limit):
		t.Error("a closed connection waits")
	}
}

// Waits need no goroutines.
func TestNoGoroutines(t *testing.T) {
	s := newSet(t)
	before := runtime.NumGoroutine()
	for range 100 {
		ours, _ := testkit.Pair(t)
		s.Add(ours, time.Now().Add(time.Hour), nil, func(error) {})
	}
	if n := runtime.NumGoroutine(); n > before+2 || s.Len() != 100 {
		t.Errorf("%d goroutines, %d before; %d connections wait", n, before, s.Len())
	}
}
