package interop_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/tests/interop/vm"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/verbs"
)

// TestVerbs runs the programs of rdma-core and perftest over siw against the engine of package rdma. The options of the engine
// are the defaults, so it demands CRCs, and siw sends and checks them.
func TestVerbs(t *testing.T) {
	need(t, "rping", "rstream", "ucmatose", "ib_send_lat", "ib_write_bw", "ib_read_bw")
	v := bootOnTap(t)
	t.Run("clients", func(t *testing.T) { verbsClients(t, v) })
	t.Run("servers", func(t *testing.T) { verbsServers(t, v) })
	t.Run("endings", func(t *testing.T) { verbsEndings(t, v) })
}

// nothingLeft checks that t leaves no stream, STag or goroutine of ours.
func nothingLeft(t *testing.T) {
	t.Helper()
	stats, goroutines := rdma.ReadStats(), runtime.NumGoroutine()
	t.Cleanup(func() {
		if t.Failed() {
			return
		}
		testkit.Eventually(t, "streams and STags are gone", func() bool { return rdma.ReadStats() == stats })
		testkit.Eventually(t, "goroutines are gone", func() bool { return runtime.NumGoroutine() <= goroutines })
	})
}

// objects is a script that prints the objects of verbs.
const objects = "rdma resource show | sed -n '/siw1/s/ *$//p'"

// nothingLeftInGuest checks that t leaves no object of verbs in the guest.
func nothingLeftInGuest(t *testing.T, v *vm.VM) {
	t.Helper()
	before := strings.TrimSpace(v.Run(t, objects, long))
	t.Cleanup(func() {
		if t.Failed() {
			v.Try(t, objects+"; dmesg | tail -n 40", long)
			return
		}
		v.Run(t, fmt.Sprintf(`
while left=$(%s) && [ "$left" != %q ]; do
	echo "$left"
	sleep 0.5
done`, objects, before), long)
	})
}

// nudge is how long siw may leave the first message unread.
const nudge = 200 * time.Millisecond

// A guestProgram is a program that runs in the guest.
type guestProgram struct {
	t       *testing.T
	v       *vm.VM
	command string
	files   string // the beginning of the names of its files
}

// guestPrograms counts them.
var guestPrograms atomic.Int32

// A guestCommand is a command line for the guest.
type guestCommand struct {
	line string
	port int // it listens there; 0: it does not listen
}

// startPrograms starts programs that may take as long as limit. Those that listen come first, and do so when the others start. The
// machine is emulated, so one script for many programs saves most of the time.
func startPrograms(t *testing.T, v *vm.VM, limit time.Duration, commands ...guestCommand) (programs []*guestProgram) {
	t.Helper()
	var listeners, others, ports strings.Builder
	for _, c := range commands {
		p := &guestProgram{t, v, c.line, fmt.Sprintf("/run/verbs%d", guestPrograms.Add(1))}
		programs = append(programs, p)
		script := &others
		if c.port != 0 {
			script = &listeners
			fmt.Fprintf(&ports, " %d", c.port)
		}
		fmt.Fprintf(script, "begin %s '%s'\n", p.files, c.line)
	}
	fmt.Fprintf(&listeners, `for port in%s; do
	while [ -z "$(ss -Htln "sport = :$port")" ]; do sleep 0.05; done
done
`, ports.String())
	v.Run(t, fmt.Sprintf(`
begin() {
	{
		status=0
		timeout -k 1 %.0f bash -c 'echo $$ >$0.pid; exec '"$2" $1 </dev/null >$1.out 2>&1 || status=$?
		echo $status >$1.new
		mv $1.new $1.status
	} </dev/null >/dev/null 2>&1 &
}
`, limit.Seconds())+listeners.String()+others.String(), long)
	return programs
}

// end waits for the program. It returns its exit status and logs its output.
func (p *guestProgram) end() int {
	p.t.Helper()
	statuses, _ := endPrograms(p.t, p.v, "", "", p)
	return statuses[0]
}

// endPrograms waits for programs. It returns their exit statuses and logs their output. The scripts before and after run in the same
// shell, and it returns what the latter prints.
func endPrograms(t *testing.T, v *vm.VM, before, after string, programs ...*guestProgram) (statuses []int, printed string) {
	t.Helper()
	var files strings.Builder
	for _, p := range programs {
		files.WriteString(" " + p.files)
	}
	printed = v.Run(t, before+fmt.Sprintf(`
for files in%s; do
	while [ ! -e $files.status ]; do sleep 0.05; done
	cat $files.out >&2
	cat $files.status
done
`, files.String())+after, 2*testkit.Patience+quick)
	for _, p := range programs {
		var line string
		line, printed, _ = strings.Cut(printed, "\n")
		status, err := strconv.Atoi(line)
		if err != nil {
			t.Fatalf("exit status of %s: %v", p.command, err)
		}
		statuses = append(statuses, status)
	}
	return statuses, printed
}

// succeed ends the test if the program or its counterpart in the engine failed.
func (p *guestProgram) succeed(err error) {
	p.t.Helper()
	if status := p.end(); status != 0 || err != nil {
		p.t.Fatalf("exit status %d of %s; the engine: %v", status, p.command, err)
	}
}

// listenVerbs listens for a client of the guest.
func listenVerbs(t *testing.T) (l *net.TCPListener, port int) {
	t.Helper()
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.ParseIP(tapHost)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	if err := l.SetDeadline(time.Now().Add(long)); err != nil {
		t.Fatal(err)
	}
	return l, l.Addr().(*net.TCPAddr).Port
}

// respond accepts a stream, which has CRCs.
func respond(ctx context.Context, l net.Listener, o rdma.Options) (*rdma.Conn, error) {
	nc, err := l.Accept()
	if err != nil {
		return nil, err
	}
	c, err := rdma.Respond(ctx, nc, o, func(*rdma.Request) rdma.Answer { return rdma.Answer{} })
	return withCRC(c, err)
}

// initiate connects to a server of the guest, and the stream has CRCs.
func initiate(ctx context.Context, port int, o rdma.Options) (*rdma.Conn, error) {
	nc, err := dialGuest(port)
	if err != nil {
		return nil, err
	}
	return initiateOn(ctx, nc, o)
}

// initiateOn does what initiate does on a connection.
func initiateOn(ctx context.Context, nc net.Conn, o rdma.Options) (*rdma.Conn, error) {
	c, _, err := rdma.Initiate(ctx, nc, o)
	if err != nil {
		nc.Close() // Initiate leaves that to its caller if the peer has rejected
	}
	return withCRC(c, err)
}

func dialGuest(port int) (net.Conn, error) {
	return net.DialTimeout("tcp", net.JoinHostPort(tapGuest, strconv.Itoa(port)), 10*time.Second)
}

func withCRC(c *rdma.Conn, err error) (*rdma.Conn, error) {
	if err == nil && !c.CRC() {
		return nil, errors.Join(errors.New("MPA-4.4-3: no CRC, which the engine has demanded"), c.Close())
	}
	return c, err
}

// perftests are the programs of perftest, with the operations of the client that they count.
var perftests = []struct {
	program, args string
	count         func(rdma.Messages) uint64
}{
	{"ib_send_lat", "-n 100 -s 4096", func(m rdma.Messages) uint64 { return m.Sends }},
	{"ib_write_bw", "-n 100 -s 65536", func(m rdma.Messages) uint64 { return m.Writes }},
	{"ib_read_bw", "-n 100 -s 65536", func(m rdma.Messages) uint64 { return m.ReadRequests }},
}

// A verbsClient is a run of a program as a client of the engine.
type verbsClient struct {
	name, command string // "PORT" stands for the port
	// serve is the engine. It runs in a goroutine of its own.
	serve func(t *testing.T, l *net.TCPListener) error
	// fails says that both sides have to fail, and the engine with that text. "": both have to succeed.
	fails string
}

// verbsClients runs the programs as clients of a responder of the engine, all at the same time.
func verbsClients(t *testing.T, v *vm.VM) {
	var all []verbsClient
	for _, size := range []int{64, 65000} {
		all = append(all, verbsClient{
			name:    fmt.Sprintf("rping of %d bytes", size),
			command: fmt.Sprintf("rping -c -a %s -p PORT -C 10 -V -S %d", tapHost, size),
			serve: func(t *testing.T, l *net.TCPListener) error {
				c, err := respond(t.Context(), l, rdma.Options{})
				if err != nil {
					return err
				}
				defer c.Close()
				pings := 0
				err = verbs.PingServer{Pinged: func(n int) error { pings = n; return nil }}.Serve(c)
				if err == nil && pings != 10 {
					err = fmt.Errorf("%d pings of 10", pings)
				}
				return err
			},
		})
	}
	const count, transfers, bytes = 30, 4, 40_000
	all = append(all, verbsClient{
		name:    "rstream",
		command: fmt.Sprintf("rstream -s %s -p PORT -I %d -C %d -S %d -T v", tapHost, count, transfers, bytes),
		serve: func(t *testing.T, l *net.TCPListener) error {
			nc, err := l.Accept()
			if err != nil {
				return err
			}
			s, err := verbs.AcceptSocket(t.Context(), nc, rdma.Options{})
			if err != nil {
				return err
			}
			defer s.Close()
			echoed, err := io.CopyBuffer(struct{ io.Writer }{s}, struct{ io.Reader }{s}, make([]byte, 16384))
			if want := int64(16 + count*transfers*bytes); err == nil && echoed != want { // the programs synchronize with 16 bytes first
				err = fmt.Errorf("%d bytes of %d", echoed, want)
			}
			return err
		},
	})
	const connections = 5
	all = append(all, verbsClient{
		name:    "ucmatose",
		command: fmt.Sprintf("ucmatose -s %s -p PORT -c %d -C 0", tapHost, connections),
		serve:   func(t *testing.T, l *net.TCPListener) error { return connect(t, v, l, connections) },
	}, verbsClient{
		name:    "Markers",
		command: fmt.Sprintf("rping -c -a %s -p PORT -C 1", tapHost),
		serve: func(t *testing.T, l *net.TCPListener) error {
			c, err := respond(t.Context(), l, rdma.Options{Markers: true})
			if err != nil {
				return err
			}
			defer c.Close()
			return verbs.PingServer{}.Serve(c)
		},
		fails: "the peer has sent nothing since the Reply asked for Markers",
	})
	for _, tt := range perftests {
		all = append(all, verbsClient{
			name:    tt.program,
			command: fmt.Sprintf("%s -R -F -p PORT %s %s", tt.program, tt.args, tapHost),
			serve: func(t *testing.T, l *net.TCPListener) error {
				domain := rdma.NewDomain()
				err := verbs.PerftestServer{}.Serve(t.Context(), l, rdma.Options{Domain: domain})
				if n := tt.count(domain.Counts().Received); err == nil && n < 100 {
					err = fmt.Errorf("%d operations of at least 100", n)
				}
				return err
			},
		})
	}

	nothingLeftInGuest(t, v)
	nothingLeft(t)
	var commands []guestCommand
	var ended []chan error
	for _, c := range all {
		l, port := listenVerbs(t)
		end := make(chan error, 1)
		go func() { end <- c.serve(t, l) }()
		commands = append(commands, guestCommand{line: strings.Replace(c.command, "PORT", strconv.Itoa(port), 1)})
		ended = append(ended, end)
	}
	programs := startPrograms(t, v, 2*testkit.Patience, commands...)
	var errs []error
	for _, c := range ended {
		errs = append(errs, <-c) // at the latest when its program has no time left
	}
	statuses, _ := endPrograms(t, v, "", "", programs...)
	for i, c := range all {
		t.Run(c.name, func(t *testing.T) {
			err := errs[i]
			ok := statuses[i] == 0 && err == nil
			if c.fails != "" {
				ok = statuses[i] != 0 && err != nil && strings.Contains(err.Error(), c.fails)
			}
			if !ok {
				t.Errorf("exit status %d of %s; the engine: %v", statuses[i], commands[i].line, err)
			}
		})
	}
}

// connect accepts the connections of ucmatose, which sends no messages, and ends them as its server does. siw drops a Reply that the
// end of the stream comes with, so it has to read the Replies first.
func connect(t *testing.T, v *vm.VM, l *net.TCPListener, connections int) (err error) {
	var conns []*rdma.Conn
	defer func() {
		for _, c := range conns {
			err = errors.Join(err, c.Close())
		}
	}()
	for range connections {
		c, err := respond(t.Context(), l, rdma.Options{})
		if err != nil {
			return err
		}
		conns = append(conns, c)
		if c.Peer().Depths.PeerToPeer {
			return errors.New("siw asks for the peer-to-peer model; then the engine could send first, as ucmatose -C requires")
		}
	}
	for _, c := range conns {
		for end := time.Now().Add(testkit.Patience); ; time.Sleep(time.Millisecond) {
			if _, owed := c.Taken(); owed == 0 {
				break
			} else if time.Now().After(end) {
				return fmt.Errorf("%d bytes of a Reply are not acknowledged", owed)
			}
		}
	}
	r, err := v.Script(t.Logf, fmt.Sprintf(`while [ -n "$(ss -Htn 'dport = :%d' | grep -v '^ESTAB *0 ' || true)" ]; do sleep 0.05; done`,
		l.Addr().(*net.TCPAddr).Port), long)
	if err == nil && r.Status != 0 {
		err = fmt.Errorf("exit status %d of the script", r.Status)
	}
	return err
}

// A verbsServer is a run of a program as a server of the engine.
type verbsServer struct {
	name, command string // "PORT" stands for the port
	run           func(t *testing.T, port int) error
}

// serversPort is the port of the first server.
const serversPort = 7190

// verbsServers runs the programs as servers of a requester of the engine, which nudges siw. They all listen from the beginning, and
// the requester uses one after the other.
func verbsServers(t *testing.T, v *vm.VM) {
	nudged := rdma.Options{Nudge: nudge}
	ping := func(t *testing.T, port, size, pings int) error {
		c, err := initiate(t.Context(), port, nudged)
		if err != nil {
			return err
		}
		defer c.Close()
		g := verbs.NewPinger(c, size)
		defer g.Close()
		for n := range pings {
			if err := g.Ping(); err != nil {
				return fmt.Errorf("ping %d: %w", n+1, err)
			}
		}
		return nil
	}
	var all []verbsServer
	for _, size := range []int{64, 65000} {
		all = append(all, verbsServer{
			name:    fmt.Sprintf("rping of %d bytes", size),
			command: fmt.Sprintf("rping -s -a %s -p PORT -V -S %d", tapGuest, size),
			run:     func(t *testing.T, port int) error { return ping(t, port, size, 10) },
		})
	}
	const count, transfers, size = 30, 4, 40_000
	const connections, messages, bytes = 3, 10, 100
	all = append(all, verbsServer{
		name:    "Markers",
		command: fmt.Sprintf("rping -s -a %s -p PORT -V -S 64", tapGuest),
		run: func(t *testing.T, port int) error {
			_, err := initiate(t.Context(), port, rdma.Options{Markers: true})
			var reject *rdma.RejectedError
			if !errors.As(err, &reject) || !strings.HasPrefix(err.Error(), "the Request asked for Markers, which the responder may not support") {
				t.Errorf("a Request that asks siw for Markers: %v", err)
			}
			return ping(t, port, 64, 1) // the program did not hear of the first one
		},
	}, verbsServer{
		name:    "rstream",
		command: fmt.Sprintf("rstream -p PORT -I %d -C %d -S %d -T v", count, transfers, size),
		run: func(t *testing.T, port int) error {
			nc, err := dialGuest(port)
			if err != nil {
				return err
			}
			s, err := verbs.ConnectSocket(t.Context(), nc, nudged)
			if err != nil {
				return err
			}
			defer s.Close()
			s.Conn().SetReceiveDeadline(time.Now().Add(testkit.Patience))
			return stream(s, count, transfers, size)
		},
	}, verbsServer{
		name:    "ucmatose",
		command: fmt.Sprintf("ucmatose -p PORT -c %d -C %d -S %d", connections, messages, bytes),
		run:     func(t *testing.T, port int) error { return exchange(t, port, nudged, connections, messages, bytes) },
	})
	for _, tt := range perftests {
		all = append(all, verbsServer{
			name:    tt.program,
			command: fmt.Sprintf("%s -R -F -p PORT %s", tt.program, tt.args),
			run: func(t *testing.T, port int) error {
				domain := rdma.NewDomain()
				err := perftest(t, tt.program, port, rdma.Options{Domain: domain, Nudge: nudge})
				if n := tt.count(domain.Counts().Sent); err == nil && n < 100 {
					err = fmt.Errorf("%d operations of at least 100", n)
				}
				return err
			},
		})
	}

	nothingLeftInGuest(t, v)
	var commands []guestCommand
	for i, s := range all {
		port := serversPort + i
		commands = append(commands, guestCommand{strings.Replace(s.command, "PORT", strconv.Itoa(port), 1), port})
	}
	programs := startPrograms(t, v, 2*testkit.Patience, commands...)
	for i, s := range all {
		t.Run(s.name, func(t *testing.T) {
			nothingLeft(t)
			if err := s.run(t, commands[i].port); err != nil {
				t.Errorf("the engine, with %s: %v", commands[i].line, err)
			}
		})
	}
	before := ""
	if t.Failed() { // a program may wait in vain
		for _, p := range programs {
			before += "kill -KILL $(<" + p.files + ".pid) || true\n"
		}
	}
	statuses, _ := endPrograms(t, v, before, "", programs...)
	for i, status := range statuses {
		if status != 0 {
			t.Errorf("exit status %d of %s", status, commands[i].line)
		}
	}
}

// exchange receives and sends messages on connections to ucmatose, and ends them with it.
func exchange(t *testing.T, port int, o rdma.Options, connections, messages, bytes int) error {
	var conns []*rdma.Conn
	for range connections {
		c, err := initiate(t.Context(), port, o)
		if err != nil {
			return err
		}
		defer c.Close()
		conns = append(conns, c)
	}
	var errs []error
	for i, c := range conns {
		var ev rdma.Event
		for range messages {
			if err := c.Receive(&ev); err != nil || len(ev.Data) != bytes {
				errs = append(errs, fmt.Errorf("connection %d: %v, %d bytes", i, err, len(ev.Data)))
				break
			}
		}
		for range messages {
			errs = append(errs, c.Post(&rdma.WorkRequest{Op: rdma.Send, Data: make([]byte, bytes)}))
		}
		c.Flush()
	}
	for i, c := range conns {
		var ev rdma.Event
		if i == 0 { // both end the stream
			errs = append(errs, c.CloseWrite())
		}
		if err := c.Receive(&ev); !errors.Is(err, io.EOF) {
			errs = append(errs, fmt.Errorf("connection %d: %v after the messages", i, err))
		}
	}
	return errors.Join(errs...)
}

// perftest makes 100 operations with a server of perftest.
func perftest(t *testing.T, program string, port int, o rdma.Options) error {
	latency := program == "ib_send_lat"
	c, err := verbs.DialPerftest(t.Context(), func() (net.Conn, error) { return dialGuest(port) }, o, latency)
	if err != nil {
		return err
	}
	defer c.Close()
	for n := 0; n < 100 && err == nil; n++ {
		switch program {
		case "ib_send_lat":
			err = c.Ping(make([]byte, 4096))
		case "ib_write_bw":
			err = c.Write(make([]byte, 65536))
		case "ib_read_bw":
			err = c.Read(make([]byte, 65536))
		}
	}
	if err == nil {
		err = c.Finish(!latency)
	}
	if err == nil {
		err = c.AwaitServer()
	}
	return err
}

// stream does what the client of rstream -T v does: both ends send a byte that counts, and compare it.
func stream(s *verbs.Socket, count, transfers, size int) error {
	var sent, received byte
	transfer := func(n int) error {
		b := make([]byte, n)
		for i := range b {
			b[i] = sent
			sent++
		}
		_, err := s.Write(b)
		return err
	}
	answer := func(n int) error {
		b := make([]byte, n)
		if _, err := io.ReadFull(s, b); err != nil {
			return err
		}
		for i := range b {
			if b[i] != received {
				return fmt.Errorf("byte %d of a transfer is %#x, want %#x", i, b[i], received)
			}
			received++
		}
		return nil
	}
	err := transfer(16)
	if err == nil {
		err = answer(16)
	}
	if err != nil {
		return fmt.Errorf("before the first transfer: %w", err)
	}
	// After its last round rstream closes its end at once. siw then resets the stream if it has not read our last messages, and what
	// it has not sent yet is lost.
	cut := func(err error) bool { return errors.Is(err, syscall.ECONNRESET) }
	for round := range count {
		for range transfers {
			if err := transfer(size); err != nil {
				return fmt.Errorf("sending in round %d: %w", round, err)
			}
		}
		for range transfers {
			err := answer(size)
			if round == count-1 && cut(err) {
				return nil
			}
			if err != nil {
				return fmt.Errorf("receiving in round %d: %w", round, err)
			}
		}
	}
	if err := s.Shutdown(); !cut(err) {
		return err
	}
	return nil
}
