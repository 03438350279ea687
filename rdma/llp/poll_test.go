package llp

import (
	"errors"
	"io"
	"math"
	"net"
	"os"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/testkit"
)

// readOnce calls Read on a goroutine of its own.
func readOnce(r io.Reader) <-chan error {
	ended := make(chan error, 1)
	go func() {
		_, err := r.Read(make([]byte, 8))
		ended <- err
	}()
	return ended
}

// await returns what Read has returned.
func await(t *testing.T, ended <-chan error) error {
	t.Helper()
	select {
	case err := <-ended:
		return err
	case <-time.After(testkit.Patience):
		t.Fatal("Read does not return")
		return nil
	}
}

// pollers returns a Poller that polls, and the other end of its connection.
func pollers(t *testing.T, p *Polling) (r *Poller, peer *net.TCPConn) {
	t.Helper()
	ours, other := testkit.Pair(t)
	r = p.Reader(NewSocket(ours))
	r.soon = true
	return r, other.(*net.TCPConn)
}

// A Read that polls ends as others do: with data, with the stream, at its deadline, and with the connection.
func TestPollerEnds(t *testing.T) {
	for _, tc := range []struct {
		name string
		act  func(r *Poller, peer *net.TCPConn)
		want error
	}{
		{"data", func(_ *Poller, peer *net.TCPConn) { peer.Write([]byte("abc")) }, nil},
		{"end", func(_ *Poller, peer *net.TCPConn) { peer.Close() }, io.EOF},
		{"reset", func(_ *Poller, peer *net.TCPConn) { peer.SetLinger(0); peer.Close() }, syscall.ECONNRESET},
		{"deadline", func(r *Poller, _ *net.TCPConn) { r.s.nc.SetReadDeadline(time.Now()) }, os.ErrDeadlineExceeded},
		{"closed", func(r *Poller, _ *net.TCPConn) { r.s.nc.Close() }, net.ErrClosed},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := &Polling{Most: 1}
			p.SetTime(math.MaxInt64)
			r, peer := pollers(t, p)
			ended := readOnce(r)
			testkit.Eventually(t, "it polls", func() bool { return p.places.Load() == 1 })
			select {
			case err := <-ended:
				t.Fatalf("it returned before anything happened: %v", err)
			case <-time.After(10 * time.Millisecond):
			}
			tc.act(r, peer)
			if err := await(t, ended); !errors.Is(err, tc.want) {
				t.Errorf("it returned %v, want %v", err, tc.want)
			}
			if found, missed := p.Counts(); found != map[bool]uint64{true: 1}[tc.want == nil] || missed != 0 || p.places.Load() != 0 {
				t.Errorf("found %d, missed %d, and %d places are taken", found, missed, p.places.Load())
			}
		})
	}
}

// A connection polls only after data that came within the time, and for no longer.
func TestPollerSleeps(t *testing.T) {
	p := &Polling{Most: 1}
	p.SetTime(time.Millisecond)
	r, peer := pollers(t, p)
	exchange := func(pause func()) {
		t.Helper()
		ended := readOnce(r)
		pause()
		if _, err := peer.Write([]byte("a")); err != nil {
			t.Fatal(err)
		}
		if err := await(t, ended); err != nil {
			t.Fatal(err)
		}
	}
	exchange(func() {
		testkit.Eventually(t, "the time has passed", func() bool {
			_, missed := p.Counts()
			return missed == 1
		})
	})
	if r.soon {
		t.Error("it polls next time although data did not come soon")
	}
	exchange(func() { time.Sleep(20 * time.Millisecond) })
	if _, missed := p.Counts(); missed != 1 {
		t.Error("it polled although the data before did not come soon")
	}
	p.SetTime(time.Minute)
	exchange(func() {})
	if !r.soon {
		t.Error("it sleeps next time although data came soon")
	}
	p.SetTime(0)
	found, _ := p.Counts()
	exchange(func() { time.Sleep(time.Millisecond) })
	if now, missed := p.Counts(); now != found || missed != 1 {
		t.Error("it polled for no time")
	}
}

// No more connections poll than have a place; the others sleep, and read nevertheless. One that may poll all the time rests.
func TestPollingPlaces(t *testing.T) {
	p := &Polling{Most: 1}
	p.SetTime(time.Minute)
	first, firstPeer := pollers(t, p)
	one := readOnce(first)
	testkit.Eventually(t, "the first polls", func() bool { return p.places.Load() == 1 })
	second, secondPeer := pollers(t, p)
	two := readOnce(second)
	if _, err := secondPeer.Write([]byte("a")); err != nil {
		t.Fatal(err)
	}
	if err := await(t, two); err != nil {
		t.Fatal(err)
	}
	if found, _ := p.Counts(); found != 0 {
		t.Error("both polled")
	}
	if _, err := firstPeer.Write([]byte("a")); err != nil {
		t.Fatal(err)
	}
	if err := await(t, one); err != nil {
		t.Fatal(err)
	}
	if found, _ := p.Counts(); found != 1 {
		t.Errorf("the first found data %d times", found)
	}
	others := false
	p.Rest, p.Others = time.Hour, func() bool { return others }
	if first.rests(time.Now()) {
		t.Error("it rests, for nobody")
	}
	others = true
	for _, want := range []bool{true, false} {
		if got := first.rests(time.Now()); got != want {
			t.Errorf("it rests for others: %v", got)
		}
	}
}

// While a connection polls on the only P, other goroutines run.
func TestPollerYields(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	p := &Polling{Most: 1}
	p.SetTime(math.MaxInt64)
	r, peer := pollers(t, p)
	ended := readOnce(r)
	began, turns := time.Now(), 0
	for ; turns < 1000; turns++ {
		runtime.Gosched()
	}
	// Go preempts a goroutine that does not yield after 10 ms, so the turns would take 10 s.
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("%d turns took %v", turns, took)
	}
	peer.Close()
	if err := await(t, ended); err != io.EOF {
		t.Error(err)
	}
}
