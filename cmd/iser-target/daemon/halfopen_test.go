package daemon

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/rdma/wire"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
)

// loginBytes returns the first Login Request of a login that continues, and the second one, which completes it.
func loginBytes(t *testing.T) (first, second []byte) {
	t.Helper()
	h, text := initiator.Options{Name: prefix + "half", Target: store}.Complete().LoginRequest()
	second = bytes.Clone(h)
	pdu.BHS(second).SetDataSegmentLength(0)
	h.SetFlags(h.Flags() &^ 0x80) // T
	return slices.Concat(h, text, make([]byte, pdu.Padded(len(text))-len(text))), second
}

func mpaBytes(t *testing.T) []byte {
	t.Helper()
	mpa, err := (&wire.Startup{Rev: 2, CRC: true, Enhanced: true, Depths: wire.Depths{IRD: 128, ORD: 128},
		Private: []byte{0x80, 0, 0, 0}}).Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	return mpa
}

func dial(t *testing.T, to string) net.Conn {
	t.Helper()
	nc, err := net.Dial("tcp", to)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nc.Close() })
	nc.SetDeadline(time.Now().Add(30 * time.Second))
	return nc
}

// Connections that wait without a goroutine end like others: at login_timeout, when another takes their place, when
// their initiator closes, and with the daemon. The log says why.
func TestHalfOpenConnectionsEnd(t *testing.T) {
	first, _ := loginBytes(t)
	mpa := mpaBytes(t)
	kinds := []struct {
		name  string
		says  []byte
		hears int    // bytes, at least
		why   string // at the time limit
	}{
		{"silent", nil, 0, "waiting for the first byte: "},
		{"half a Login Request", first[:30], 0, "i/o timeout"},
		{"half an MPA Request", mpa[:19], 0, "after 19 bytes of an MPA startup frame: "},
		{"MPA done", mpa, len(mpa), "i/o timeout"},
		{"in the middle of a login", first, pdu.BHSLen, "i/o timeout"},
	}
	ends := []struct {
		name    string
		timeout string
		act     func(l *lab, nc net.Conn)
		why     string // "": that of the kind
	}{
		{"time limit", "1s", func(*lab, net.Conn) {}, ""},
		{"displaced", "10m", func(l *lab, _ net.Conn) {
			if !l.net.newcomers.shed(&net.TCPAddr{IP: net.IPv4(127, 0, 0, 9)}, fmt.Errorf("a reason: %w", errDisplaced)) {
				t.Error("there is no newcomer")
			}
		}, "a reason: " + errDisplaced.Error()},
		{"closed", "10m", func(_ *lab, nc net.Conn) { nc.(*net.TCPConn).CloseWrite() }, "EOF"},
	}
	for _, end := range ends {
		for _, kind := range kinds {
			t.Run(kind.name+", "+end.name, func(t *testing.T) {
				l := newLab(t, func(l *lab) { l.more = "limits: {login_timeout: " + end.timeout + "}" })
				nc := dial(t, l.addr())
				if _, err := nc.Write(kind.says); err != nil {
					t.Fatal(err)
				}
				if _, err := io.CopyN(io.Discard, nc, int64(kind.hears)); err != nil {
					t.Fatal(err)
				}
				testkit.Eventually(t, "the connection waits", func() bool {
					return l.net.waiting.Len() == 1 || end.timeout == "1s" && l.net.limits.Connections.Used() == 0
				})
				end.act(l, nc)
				if _, err := io.Copy(io.Discard, nc); errors.Is(err, os.ErrDeadlineExceeded) {
					t.Fatal("the connection has not ended")
				}
				testkit.Eventually(t, "nothing is left", func() bool {
					return l.net.waiting.Len() == 0 && l.net.limits.Connections.Used() == 0
				})
				why := end.why
				if why == "" {
					why = kind.why
				}
				testkit.Eventually(t, "one refusal that says "+why, func() bool {
					return strings.Count(l.lines.String(), "outcome=refused") == 1 && strings.Contains(l.lines.String(), why)
				})
			})
		}
	}
	t.Run("shutdown", func(t *testing.T) { // newLab requires that the daemon ends in time
		l := newLab(t, func(l *lab) { l.more = "limits: {login_timeout: 10m}" })
		for _, kind := range kinds {
			nc := dial(t, l.addr())
			if _, err := nc.Write(kind.says); err != nil {
				t.Fatal(err)
			}
			if _, err := io.CopyN(io.Discard, nc, int64(kind.hears)); err != nil {
				t.Fatal(err)
			}
		}
		testkit.Eventually(t, "all wait", func() bool { return l.net.waiting.Len() == len(kinds) })
	})
}

// A login works however slowly its bytes come, and the connection has no goroutine between them.
func TestLoginInSingleBytes(t *testing.T) {
	l := newLab(t)
	first, second := loginBytes(t)
	nc := dial(t, l.addr())
	served := func() bool { return strings.Contains(testkit.Stacks(), "daemon.(*arrival).") }
	for i, says := range [][]byte{first, second} {
		for j := range says {
			if _, err := nc.Write(says[j : j+1]); err != nil {
				t.Fatal(err)
			}
			if j%50 == 0 {
				testkit.Eventually(t, "the connection waits", func() bool { return l.net.waiting.Len() == 1 })
			}
		}
		var h [pdu.BHSLen]byte
		if _, err := io.ReadFull(nc, h[:]); err != nil {
			t.Fatal(err)
		}
		rsp := pdu.ParseLoginResponse(pdu.BHS(h[:]))
		if rsp.Status != pdu.LoginSuccess {
			t.Fatalf("status %v of request %d", rsp.Status, i)
		}
		if _, err := io.CopyN(io.Discard, nc, int64(pdu.Padded(rsp.DataSegmentLength))); err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			testkit.Eventually(t, "the connection waits without a goroutine", func() bool {
				return l.net.waiting.Len() == 1 && !served()
			})
		}
	}
	testkit.Eventually(t, "a goroutine serves the connection after its login", served)
	if n := l.net.waiting.Len(); n != 0 {
		t.Errorf("%d connections wait in the full feature phase", n)
	}
}

// floodTo is the variable that makes this test the process of the attacker.
const floodTo = "DAEMON_TEST_FLOOD_TO"

// flood opens connections to an address and keeps them until its input ends.
func flood(t *testing.T, to string, n int) {
	first, _ := loginBytes(t)
	says := [][]byte{nil, first[:30], mpaBytes(t)[:19]}
	for i := range n {
		nc, err := net.Dial("tcp", to)
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		if _, err := nc.Write(says[i%len(says)]); err != nil {
			t.Fatal(err)
		}
	}
	io.Copy(io.Discard, os.Stdin)
}

// While 10,000 half-open connections stand, they have no goroutines, and a neighbor logs in and works as before.
func TestHalfOpenNeighbor(t *testing.T) {
	const n = 10000
	if to := os.Getenv(floodTo); to != "" {
		flood(t, to, n)
		return
	}
	l := newLab(t, func(l *lab) {
		l.more = "limits: {memory: 2GiB, max_connections: 12000, connections_per_address: 12000, login_timeout: 10m}"
	})
	before := runtime.NumGoroutine()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe, "-test.run=^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), floodTo+"="+l.addr())
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		stdin.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("flood: %v\n%s", err, &out)
		}
		// With -race the target is busy with so many ends for a while, and how long it takes to stop meanwhile is not tested here.
		for end := time.Now().Add(time.Minute); l.net.limits.Connections.Used() > 0; time.Sleep(10 * time.Millisecond) {
			if time.Now().After(end) {
				t.Errorf("%d connections are open", l.net.limits.Connections.Used())
				break
			}
		}
	}()
	for end := time.Now().Add(2 * time.Minute); l.net.waiting.Len() < n; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d connections wait, %d are open", l.net.waiting.Len(), l.net.limits.Connections.Used())
		}
	}
	if more := runtime.NumGoroutine() - before; more > 50 {
		t.Errorf("%d goroutines more", more)
	}
	var worst time.Duration
	for range 20 {
		began := time.Now()
		s := l.login("neighbor", store)
		for range 2 { // the first gets a unit attention
			do(t, s, &initiator.Command{})
		}
		worst = max(worst, time.Since(began))
		s.Close()
	}
	t.Logf("the slowest login took %v", worst)
	if worst > 5*time.Second {
		t.Errorf("a login took %v", worst)
	}
	if n != l.net.waiting.Len() {
		t.Errorf("%d of %d connections wait", l.net.waiting.Len(), n)
	}
}
