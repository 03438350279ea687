package interop_test

import (
	"context"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/interop/harness"
	"github.com/iser-target/iser-target/tests/testkit"
)

const (
	chapIQN    = "iqn.2026-11.io.example:chap"
	chapUser   = "honest"
	chapSecret = "honest-secret-0123"

	distance  = 50 * time.Millisecond // one way, from the honest initiator to the target
	gettingIn = 20 * time.Second      // most that its login may take, retransmissions of SYN included
)

const chapTarget = `
  - name: ` + chapIQN + `
    initiators: ["*"]
    auth: {method: chap, users: [{name: ` + chapUser + `, secret: "` + chapSecret + `"}]}
    luns:
      - {id: 0, backend: memory, size: 16MiB}
  - name: ` + honestIQN + `
    initiators: ["*"]
    luns:
      - {id: 0, backend: memory, size: 16MiB}
`

// farAway listens where an initiator finds the target that is at to, distance away, and returns its
// address. Each byte is late by that, in both directions; bandwidth is not bounded.
func farAway(t *testing.T, to string) (addr string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			from, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { passLate(from, to) })
		}
	})
	t.Cleanup(func() { l.Close(); wg.Wait() })
	return l.Addr().String()
}

// passLate passes on what comes on one connection, and what comes back, until one end has closed.
func passLate(from net.Conn, address string) {
	defer from.Close()
	to, err := net.Dial("tcp", address)
	if err != nil {
		return
	}
	defer to.Close()
	var wg sync.WaitGroup
	wg.Go(func() { copyLate(to, from) })
	copyLate(from, to)
	wg.Wait()
}

// copyLate copies until one of the connections has ended, then ends both. Each piece leaves distance after
// it has come.
func copyLate(dst, src net.Conn) {
	defer dst.Close()
	defer src.Close()
	type piece struct {
		due  time.Time
		data []byte
	}
	pieces := make(chan piece, 1024)
	go func() {
		defer close(pieces)
		for {
			b := make([]byte, 16<<10)
			n, err := src.Read(b)
			if n > 0 {
				pieces <- piece{time.Now().Add(distance), b[:n]}
			}
			if err != nil {
				return
			}
		}
	}()
	for p := range pieces {
		time.Sleep(time.Until(p.due)) // the network's time
		if _, err := dst.Write(p.data); err != nil {
			src.Close()
		}
	}
}

// A flood is what many addresses do to a target.
type flood struct {
	made   atomic.Int64 // connections
	failed atomic.Int64 // that could not be made
	cancel context.CancelFunc
	wg     sync.WaitGroup
	begun  time.Time
}

// startFlood lets addresses of 127.0.1.1 to 127.0.3.254 open perSecond connections a second, if
// the machine can. Each sends say and then waits; an address keeps its last connections, so many that all
// together have 4,000. The flood ends with t.
func startFlood(t *testing.T, addr string, perSecond int, say []byte) *flood {
	t.Helper()
	const workers, kept = 32, 4000
	ctx, cancel := context.WithCancel(t.Context())
	f := &flood{cancel: cancel, begun: time.Now()}
	for w := range workers {
		f.wg.Go(func() {
			last := make([]net.Conn, kept/workers)
			defer func() {
				for _, c := range last {
					if c != nil {
						c.Close()
					}
				}
			}()
			for i := 0; ctx.Err() == nil; i++ {
				n := i*workers + w
				due := f.begun.Add(time.Duration(n) * time.Second / time.Duration(perSecond))
				if wait := time.Until(due); wait > 0 {
					time.Sleep(wait) // the rate of the flood
				}
				from := &net.TCPAddr{IP: net.IPv4(127, 0, byte(1+n/254%3), byte(1+n%254))}
				d := net.Dialer{LocalAddr: from, Timeout: time.Second}
				c, err := d.DialContext(ctx, "tcp", addr)
				if err != nil {
					f.failed.Add(1)
					continue
				}
				f.made.Add(1)
				c.(*net.TCPConn).SetLinger(0) // leaves no TIME_WAIT behind
				c.Write(say)
				if old := last[i%len(last)]; old != nil {
					old.Close()
				}
				last[i%len(last)] = c
			}
		})
	}
	t.Cleanup(func() { f.end() })
	return f
}

// end ends the flood and returns how many connections per second it has made.
func (f *flood) end() (rate float64) {
	f.cancel()
	rate = float64(f.made.Load()) / time.Since(f.begun).Seconds()
	f.wg.Wait()
	return rate
}

// getIn logs in from far away, with CHAP: once, without a second try. It returns how long it took.
func getIn(t *testing.T, addr string) time.Duration {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), gettingIn)
	defer cancel()
	begun := time.Now()
	d, err := initiator.Dial(ctx, "tcp", addr, initiator.Options{Name: "iqn.2026-11.io.example:honest", Target: chapIQN})
	if err == nil {
		defer d.Close()
		err = d.LogIn(&initiator.CHAP{Name: chapUser, Secret: chapSecret})
	}
	took := time.Since(begun)
	if err != nil {
		t.Errorf("the login of the honest initiator, after %v: %v", took.Round(time.Millisecond), err)
	}
	return took
}

// halfOpen returns the first Login Request of a login that continues with CHAP: a dialog that its initiator
// leaves there.
func halfOpen() []byte {
	text := []byte("InitiatorName=iqn.2026-11.io.example:stranger\x00TargetName=" + chapIQN + "\x00SessionType=Normal\x00AuthMethod=CHAP\x00")
	h := pdu.BHS(pdu.LoginRequest{CSG: pdu.SecurityNegotiation, NSG: pdu.SecurityNegotiation, ISID: [6]byte{0: 0x80}}.Append(nil))
	h.SetDataSegmentLength(len(text))
	return append(append(append([]byte(nil), h...), text...), make([]byte, pdu.Padded(len(text))-len(text))...)
}

// Strangers of 762 addresses connect thousands of times a second, and say nothing, or begin a login and leave
// it. An initiator that is 50 ms away gets in, each time that it tries.
//
// docs/limits.md: "Places".
func TestLoginDuringAFloodFromManyAddresses(t *testing.T) {
	for _, tt := range []struct {
		name string
		say  []byte
	}{{"silent connections", nil}, {"half-open logins", halfOpen()}} {
		t.Run(tt.name, func(t *testing.T) {
			enoughFiles(t)
			d := harness.Start(t, chapTarget)
			far := farAway(t, d.Listen()[0])
			getIn(t, far)
			f := startFlood(t, d.Listen()[0], 8000, tt.say)
			f.full(t, d, "max_connections")
			f.getIn(t, far)
		})
	}
}

// full waits until the flood has taken all places of d, which that limit bounds, and connections yield.
func (f *flood) full(t *testing.T, d *harness.Target, limit string) {
	t.Helper()
	testkit.Eventually(t, "the flood has taken all places", func() bool {
		return d.Metrics(t)[`iser_target_limit_reached_total{limit="`+limit+`"}`] > 0
	})
}

// getIn logs in three times, one after the other, and ends the flood.
func (f *flood) getIn(t *testing.T, addr string) {
	t.Helper()
	slowest := time.Duration(0)
	for range 3 {
		slowest = max(slowest, getIn(t, addr))
	}
	t.Logf("%.0f connections/s, %d not made; the slowest of 3 logins took %v", f.end(), f.failed.Load(), slowest.Round(time.Millisecond))
}

// enoughFiles skips t if this process may not have the descriptors of a flood.
func enoughFiles(t *testing.T) {
	t.Helper()
	const files = 8192
	var l syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &l); err != nil || l.Cur < files {
		lack(t, fmt.Errorf("RLIMIT_NOFILE is %d (%v), a flood takes %d", l.Cur, err, files))
	}
}

// While 900 sessions of 60 initiators are there, up to 10,000 connections come in a second. A login from
// 50 ms away succeeds, and no session is lost.
//
// docs/limits.md: "Places".
func TestLoginDuringAFloodNextToManySessions(t *testing.T) {
	enoughFiles(t)
	const names, each = 60, 15
	d := harness.Start(t, chapTarget)
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	var sessions [names * each]*initiator.Dialog
	for i := range sessions {
		o := initiator.Options{Name: fmt.Sprint("iqn.2026-11.io.example:", i%names), Target: honestIQN, ISID: [6]byte{0: 0x80, 5: byte(i / names)}}
		s, err := initiator.Dial(ctx, "tcp", d.Listen()[0], o)
		if err == nil {
			defer s.Close()
			err = s.LogIn(nil)
		}
		if err != nil {
			t.Fatalf("session %d: %v", i+1, err)
		}
		sessions[i] = s
	}
	f := startFlood(t, d.Listen()[0], 10000, halfOpen())
	f.full(t, d, "max_connections")
	f.getIn(t, farAway(t, d.Listen()[0]))
	for i, s := range sessions {
		if status, _, _, err := s.Do([8]byte{}, make([]byte, 6), nil, 0); err != nil || status != statusGood {
			t.Fatalf("session %d after the flood: %v, status %#x", i+1, err, status)
		}
	}
}
