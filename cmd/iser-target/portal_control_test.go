package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/cmd/iser-target/api/apitest"
	"github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/cmd/iser-target/tunnel"
	"github.com/iser-target/iser-target/iscsi/initiator"
	iserinitiator "github.com/iser-target/iser-target/iser/initiator"
	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/rdma/rpcrdma"
	"github.com/iser-target/iser-target/tests/testkit"
)

// managed returns an edit of a configuration: the portal has the control API, with the certificate server of the authority.
// The clients admin and reader have roles. more goes into the section control.
func managed(of *apitest.Authority, more string) func(string) string {
	return func(text string) string {
		text = strings.Replace(text, `portals: [{listen: "127.0.0.1:0"}]`, `portals: [{listen: "127.0.0.1:0", control: true}]`, 1)
		return strings.Replace(text, "control: {", fmt.Sprintf("control: {%s access: [{certificate: admin, role: admin}, {ou: monitoring, role: read}], tls: {cert: %s, key: %s, client_ca: %s, crl: %s}, ",
			more, of.Path("server.pem"), of.Path("server.key"), of.Path("ca.pem"), of.Path("crl.pem")), 1)
	}
}

// newManaged starts a station that managers reach at its portal. as returns the flags of a client.
func newManaged(t *testing.T, more string) (s *station, ca *apitest.Authority, as func(client string) []string) {
	t.Helper()
	ca = apitest.New(t)
	ca.Server("server")
	ca.Client("admin")
	ca.Client("reader", "monitoring")
	ca.Client("stolen", "monitoring")
	ca.Client("nobody")
	ca.Revoke("crl", time.Now().Add(time.Hour), ca.Certificate("stolen"))
	s = newStation(t, managed(ca, more))
	return s, ca, func(client string) []string { return s.portalFlags(ca, client, ca) }
}

// portalFlags returns the flags by which a client of one authority reaches the portal of s, whose certificate another one has
// signed.
func (s *station) portalFlags(ca *apitest.Authority, client string, of *apitest.Authority) []string {
	return []string{"--address", "rdma://" + s.addr, "--tls-cert", ca.Path(client + ".pem"), "--tls-key", ca.Path(client + ".key"), "--tls-ca", of.Path("ca.pem")}
}

// Commands work over the portal of the initiators, with the role of the certificate.
func TestCommandsThroughAPortal(t *testing.T) {
	s, ca, as := newManaged(t, "")
	theirs := apitest.New(t)
	theirs.Client("admin")
	with := func(client string, args ...string) []string { return append(args, as(client)...) }
	s.says(t, cli.ExitOK, storeName, with("reader", "target", "list")...)
	create := []string{"lun", "create", storeName, "--backend", "memory", "--size", "1MiB"}
	s.says(t, cli.ExitUnreachable, "requires the role operate, and certificate CN=reader,OU=monitoring has the role read", with("reader", create...)...)
	s.says(t, cli.ExitOK, "add LUN 1 of "+storeName+" (done)", with("admin", create...)...)
	s.says(t, cli.ExitUnreachable, "has no role", with("nobody", "target", "list")...)
	s.says(t, cli.ExitUnreachable, "refuses "+ca.Path("stolen.pem"), with("stolen", "target", "list")...)
	s.says(t, cli.ExitUnreachable, "does not know the authority that signed "+theirs.Path("admin.pem"),
		append([]string{"target", "list"}, s.portalFlags(theirs, "admin", ca)...)...)
	s.says(t, cli.ExitUnreachable, "is not signed by an authority in "+theirs.Path("ca.pem"),
		append([]string{"target", "list"}, s.portalFlags(ca, "admin", theirs)...)...)
	s.says(t, cli.ExitUsage, "--address requires --tls-cert", "target", "list", "--address", "rdma://"+s.addr)
	s.says(t, cli.ExitError, "the only scheme is rdma://", "target", "list", "--address", "http://"+s.addr, "--tls-cert", ca.Path("admin.pem"), "--tls-key", ca.Path("admin.key"))

	t.Setenv("XDG_CONFIG_HOME", s.dir)
	s.says(t, cli.ExitOK, "", append([]string{"context", "add", "store"}, as("admin")...)...)
	s.says(t, cli.ExitOK, "rdma://"+s.addr, "context", "list")
	s.says(t, cli.ExitOK, storeName, "target", "list", "--context", "store")

	if n := len(read[[]schema.SessionState](t, s, with("reader", "session", "list")...)); n != 0 {
		t.Errorf("%d sessions, and no initiator has logged in", n)
	}
	s.says(t, cli.ExitOK, "run doctor there", with("admin", "doctor")...)
	events := s.ok(t, "events")
	for _, want := range []string{`by="CN=admin at rdma://127.0.0.1:`, `by="CN=reader,OU=monitoring at rdma://127.0.0.1:`} {
		if !strings.Contains(events, want) {
			t.Errorf("no event with %s in\n%s", want, events)
		}
	}
}

// A client sees by a call of the target what another one does to LUNs.
func TestLUNsAreWatchedThroughAPortal(t *testing.T) {
	s, _, as := newManaged(t, "")
	watch := s.command(t, append([]string{"events", "--follow", "-o", "json"}, as("reader")...)...)
	out, err := watch.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	said := &lockedBuffer{added: make(chan struct{}, 1)}
	watch.Stderr = said
	if err := watch.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { watch.Process.Kill() })
	events := make(chan schema.Event, 100)
	go func() {
		defer close(events)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			var e schema.Event
			if json.Unmarshal(lines.Bytes(), &e) == nil {
				events <- e
			}
		}
		io.Copy(io.Discard, out)
	}()
	next := func(text string) schema.Event {
		t.Helper()
		late := time.After(30 * time.Second)
		for {
			select {
			case e, ok := <-events:
				if !ok {
					t.Fatalf("the stream ended before %q", text)
				}
				if e.Event == "lun" && e.Text == text && e.Attrs["lun"] == 1.0 {
					return e
				}
			case <-late:
				t.Fatalf("no event %q", text)
			}
		}
	}
	admin := func(args ...string) { s.ok(t, append(args, as("admin")...)...) }
	admin("lun", "create", storeName, "--backend", "memory", "--size", "1MiB")
	if e := next("LUN created"); e.Attrs["target"] != storeName || e.Attrs["octets"] != float64(1<<20) {
		t.Errorf("%+v", e)
	}
	admin("lun", "resize", storeName, "1", "2MiB")
	if e := next("LUN resized"); e.Attrs["octets"] != float64(2<<20) || e.Attrs["octets_before"] != float64(1<<20) {
		t.Errorf("%+v", e)
	}
	admin("lun", "delete", storeName, "1", "--now")
	next("LUN removed")
	s.cmd.Process.Signal(unix.SIGTERM)
	testkit.Eventually(t, "the watcher waits for the target", func() bool {
		said.next()
		return strings.Contains(said.all.String(), "; waiting for it")
	})
	watch.Process.Signal(unix.SIGINT)
	if err := watch.Wait(); err != nil {
		t.Errorf("the watcher ends with %v after an interrupt:\n%s", err, said.all.String())
	}
}

// Without control a portal rejects managers and serves initiators, and the command says so; so do the errors of other ports.
func TestPortalWithoutControlRejectsManagers(t *testing.T) {
	ca := apitest.New(t)
	ca.Client("admin")
	s := newStation(t, func(text string) string {
		return strings.Replace(text, "portals: [", `portals: [{listen: "127.0.0.2:0", transports: [tcp]}, `, 1)
	})
	only := s.addr // of the first portal
	s.addr = s.wait(t, `msg=serving portal=(127.0.0.1:\S+)`)
	flags := func() []string { return s.portalFlags(ca, "admin", ca) }
	s.says(t, cli.ExitUnreachable, "no control API at this portal: it rejects RPC-over-RDMA", append([]string{"target", "list"}, flags()...)...)
	s.wait(t, "stage=mpa reason=\"the peer asks for RPC-over-RDMA, but control of the portal is not set\"")
	if _, err := disk(t, s.addr); err != nil {
		t.Error(err)
	}
	s.addr = only
	s.says(t, cli.ExitUnreachable, "the server does not start RDMA", append([]string{"target", "list"}, flags()...)...)
	s.wait(t, `the initiator speaks iser, but the transports of the portal are \[tcp\]`)
	s.addr = "127.0.0.1:1"
	s.says(t, cli.ExitUnreachable, "no target answers on rdma://127.0.0.1:1", append([]string{"target", "list"}, flags()...)...)
}

// A change of the key affects the next connections.
func TestControlOfAPortalIsSetWhileItServes(t *testing.T) {
	s, _, as := newManaged(t, "")
	list := append([]string{"target", "list"}, as("admin")...)
	s.says(t, cli.ExitOK, "yes", "portal", "list")
	s.ok(t, "portal", "set", "127.0.0.1:0", "control=false")
	s.says(t, cli.ExitUnreachable, "rejects", list...)
	s.ok(t, "portal", "set", "127.0.0.1:0", "control=true")
	s.says(t, cli.ExitOK, storeName, list...)
}

// disk logs in over iSER and opens LUN 0.
func disk(t *testing.T, addr string) (*initiator.Disk, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	s, err := initiator.Connect(ctx, addr, initiator.Config{Target: storeName, Name: hostName, Transport: iserinitiator.Transport{}})
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { s.Close() })
	return s.Open(ctx, 0)
}

// Only the private data of RFC 8797, alone and at the beginning, makes a manager. All others get the answer of iSER.
func TestOnlyRPCMakesAManager(t *testing.T) {
	s, _, _ := newManaged(t, "")
	for _, tc := range []struct {
		name, private string
		manager       bool
	}{
		{"nothing", "", false},
		{"iSER of Linux", "40000000", false},
		{"iSER with reserved bits", "f6ab0e18", false},
		{"the identifier and 3 bytes", "f6ab0e18 010003", false},
		{"RPC-over-RDMA", "f6ab0e18 01000303", true},
		{"RPC-over-RDMA with reserved bits", "f6ab0e18 01fe0303", true},
		{"version 2", "f6ab0e18 02000303", false},
		{"another identifier", "f6ab0e19 01000303", false},
		{"behind the header of iSER", "40000000 f6ab0e18 01000303", false},
		{"with a byte behind", "f6ab0e18 01000303 00", false},
	} {
		for _, rev := range []uint8{1, 2} {
			t.Run(fmt.Sprintf("%s, revision %d", tc.name, rev), func(t *testing.T) {
				nc, err := net.Dial("tcp", s.addr)
				if err != nil {
					t.Fatal(err)
				}
				rc, private, err := rdma.Initiate(t.Context(), nc, rdma.Options{Rev: rev, Private: testkit.Unhex(tc.private)})
				if err != nil {
					t.Fatal(err)
				}
				rc.Close()
				if tc.manager != (len(private) == 8 && string(private[:4]) == "\xf6\xab\x0e\x18") || !tc.manager && len(private) != 4 {
					t.Errorf("the answer is %x", private)
				}
			})
		}
	}
}

// A recorder is a proxy that keeps what passes.
type recorder struct {
	addr string
	mu   sync.Mutex
	got  [2]bytes.Buffer // from the client, and from the target
}

func record(t *testing.T, to string) *recorder {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	r := &recorder{addr: l.Addr().String()}
	go func() {
		for {
			a, err := l.Accept()
			if err != nil {
				return
			}
			b, err := net.Dial("tcp", to)
			if err != nil {
				a.Close()
				continue
			}
			for i, c := range [][2]net.Conn{{a, b}, {b, a}} {
				go func() {
					defer a.Close()
					defer b.Close()
					buf := make([]byte, 64<<10)
					for {
						n, err := c[0].Read(buf)
						r.mu.Lock()
						r.got[i].Write(buf[:n])
						r.mu.Unlock()
						if _, werr := c[1].Write(buf[:n]); err != nil || werr != nil {
							return
						}
					}
				}()
			}
		}
	}()
	return r
}

// bytes returns what has passed from one end.
func (r *recorder) bytes(from int) []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	return bytes.Clone(r.got[from].Bytes())
}

// The network sees calls in both directions, and in them nothing but TLS: no name, no event, no answer.
func TestPeersSeeOnlyTLS(t *testing.T) {
	s, _, as := newManaged(t, "")
	r := record(t, s.addr)
	through := func(client string) []string {
		flags := as(client)
		flags[1] = "rdma://" + r.addr
		return flags
	}
	s.ok(t, append([]string{"lun", "create", storeName, "--backend", "memory", "--size", "1MiB"}, through("admin")...)...)
	if out := s.ok(t, append([]string{"events"}, through("reader")...)...); !strings.Contains(out, "LUN created") {
		t.Errorf("no event in %s", out)
	}
	data := testkit.Unhex("00000000 00000002 20495352 00000001 00000002") // CALL, RPC 2, program, version, DATA
	for from, who := range []string{"the client", "the target"} {
		b := r.bytes(from)
		if n := bytes.Count(b, data); n < 3 {
			t.Errorf("%d DATA calls of %s in %d bytes", n, who, len(b))
		}
		for _, secret := range []string{storeName, "iser-target", "/v1/", "HTTP/1.1", "LUN created", "CN=", "admin", "octets"} {
			if bytes.Contains(b, []byte(secret)) {
				t.Errorf("%q of %s is in clear text", secret, who)
			}
		}
	}
}

// Managers that are silent, send garbage, flood or do not read cost initiators at the same port nothing but time on the CPU,
// and other managers neither.
func TestInitiatorsBesideManagers(t *testing.T) {
	s, _, as := newManaged(t, "")
	d, err := disk(t, s.addr)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	call := func(proc uint32) *rpcrdma.Call {
		return &rpcrdma.Call{Program: tunnel.Program, Version: tunnel.Version, Procedure: proc}
	}
	// The attackers have an address of their own: from the same one they could keep a manager out.
	elsewhere := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 9)}}
	dial := func(ctx context.Context, do ...*rpcrdma.Call) *rpcrdma.Conn {
		nc, err := elsewhere.DialContext(ctx, "tcp", s.addr)
		if err != nil {
			return nil
		}
		c, err := rpcrdma.Initiate(ctx, nc, rpcrdma.Config{InlineSend: 8192, InlineReceive: 8192})
		if err != nil {
			return nil
		}
		for _, call := range do {
			call.Begin()
			c.Do(ctx, call)
		}
		return c
	}
	data := func(at uint64, b []byte) *rpcrdma.Call {
		c := call(2)
		e := c.Begin()
		e.Uint64(at)
		e.Opaque(b)
		return c
	}
	attacks := map[string]func(ctx context.Context){
		"silent after the startup": func(ctx context.Context) {
			if c := dial(ctx); c != nil {
				defer c.Close()
				<-ctx.Done()
			}
		},
		"silent after OPEN": func(ctx context.Context) {
			if c := dial(ctx, call(1)); c != nil {
				defer c.Close()
				<-ctx.Done()
			}
		},
		"garbage instead of TLS": func(ctx context.Context) {
			if c := dial(ctx, call(1)); c != nil {
				defer c.Close()
				c.Do(ctx, data(0, bytes.Repeat([]byte{0x5a}, 8000)))
				select {
				case <-c.Done():
				case <-ctx.Done():
				}
			}
		},
		"garbage instead of calls": func(ctx context.Context) {
			nc, err := elsewhere.DialContext(ctx, "tcp", s.addr)
			if err != nil {
				return
			}
			rc, _, err := rdma.Initiate(ctx, nc, rdma.Options{Private: testkit.Unhex("f6ab0e18 01000707")})
			if err != nil {
				return
			}
			defer rc.Close()
			defer context.AfterFunc(ctx, func() { rc.Close() })()
			for i := range 1000 {
				if rc.Post(&rdma.WorkRequest{Op: rdma.Send, Data: bytes.Repeat([]byte{byte(i)}, 1+i)}) != nil {
					return
				}
				rc.Flush()
			}
		},
		"flood of NULL": func(ctx context.Context) {
			c := dial(ctx)
			if c == nil {
				return
			}
			defer c.Close()
			for null := call(0); ctx.Err() == nil; {
				null.Begin()
				if c.Do(ctx, null) != nil {
					return
				}
			}
		},
	}
	var attackers sync.WaitGroup
	attacking, stop := context.WithCancel(ctx)
	defer stop()
	for _, attack := range attacks {
		for range 3 {
			attackers.Go(func() {
				for attacking.Err() == nil {
					attack(attacking)
				}
			})
		}
	}
	// One that has a certificate follows the events, and does not read them.
	watch := s.command(t, append([]string{"events", "--follow"}, as("reader")...)...)
	if _, err := watch.StdoutPipe(); err != nil {
		t.Fatal(err)
	}
	if err := watch.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		watch.Process.Kill()
		watch.Wait()
	}()
	want, got := make([]byte, 64<<10), make([]byte, 64<<10)
	var slowest time.Duration
	for i := range 120 {
		for j := range want {
			want[j] = byte(i + j>>8)
		}
		begin := time.Now()
		off := int64(i%16) * int64(len(want))
		if err := d.Write(ctx, want, off); err != nil {
			t.Fatalf("write %d: %v", i, err)
		}
		if err := d.Read(ctx, got, off); err != nil {
			t.Fatalf("read %d: %v", i, err)
		}
		if !bytes.Equal(want, got) {
			t.Fatalf("other data after write %d", i)
		}
		slowest = max(slowest, time.Since(begin))
		if i%40 == 0 { // another manager gets in
			s.says(t, cli.ExitOK, storeName, append([]string{"target", "list"}, as("admin")...)...)
		}
	}
	stop()
	attackers.Wait()
	if slowest > 5*time.Second {
		t.Errorf("the slowest write and read took %v", slowest)
	}
	t.Logf("the slowest of 120 writes and reads took %v", slowest)
	s.says(t, cli.ExitOK, hostName, "session", "list")
}

// An upgrade ends the connections of managers after it has answered the one who asked for it. One that follows the events comes back.
func TestUpgradeThroughAPortal(t *testing.T) {
	s, _, as := newManaged(t, "")
	t.Cleanup(func() { s.killAll(t) }) // a process whose supervisor is killed before it has begun continues
	watch := s.command(t, append([]string{"events", "--follow"}, as("reader")...)...)
	r, err := watch.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	said := &lockedBuffer{added: make(chan struct{}, 1)}
	watch.Stderr = said
	if err := watch.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { watch.Process.Kill() })
	lines := bufio.NewReader(r)
	if _, err := lines.ReadString('\n'); err != nil { // the event of the start: it follows
		t.Fatal(err)
	}
	s.says(t, cli.ExitOK, "serves", append([]string{"upgrade"}, as("admin")...)...)
	testkit.Eventually(t, "the watcher is back", func() bool {
		said.next()
		return strings.Contains(said.all.String(), "; waiting for it") && strings.Contains(said.all.String(), "the target is back; it was started again")
	})
	watch.Process.Signal(unix.SIGINT)
	io.Copy(io.Discard, lines)
	if err := watch.Wait(); err != nil {
		t.Errorf("the watcher ends with %v after an interrupt:\n%s", err, said.all.String())
	}
	s.says(t, cli.ExitOK, storeName, append([]string{"target", "list"}, as("reader")...)...)
}
