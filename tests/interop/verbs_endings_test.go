package interop_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/rdma/wire"
	"github.com/iser-target/iser-target/tests/interop/vm"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/verbs"
)

const (
	neighbourPort = 7176
	endingsPort   = 7180             // the first one of the programs that listen
	soon          = 10 * time.Second // from what ends a stream to the end of our side; the guest is emulated
	patient       = time.Second      // the deadline of our side when its program has stopped
	underWay      = 128 << 10        // bytes that a stream receives before it waits for all others

	requestsUnderWay = 4 << 10 // the same for a stream that receives RDMA Read Requests
)

// An encounter is the traffic of a program with the engine. It has no end of its own.
type encounter struct {
	ctx     context.Context
	o       rdma.Options
	l       net.Listener // for a program that is a client
	port    int
	gate    gate
	streams chan *rdma.Conn
	enough  atomic.Bool // the engine as a client of perftest makes no more operations, and ends the run
	lent    lent
}

// lent is memory of the engine that a program has access to, until the test takes it back.
type lent struct {
	c      *rdma.Conn
	region *rdma.Region
	memory []byte
	// revoked says that the program's operations are refused from now on.
	revoked, filled bool
}

// taken fills memory that was taken back.
const taken = 0xa5

// lends passes memory to the test.
func (e *encounter) lends(c *rdma.Conn, r *rdma.Region, memory []byte) {
	e.lent = lent{c: c, region: r, memory: memory}
}

// fill writes to the memory, which is the test's again.
func (l *lent) fill() {
	if l.filled {
		return
	}
	l.filled = true
	for i := range l.memory {
		l.memory[i] = taken
	}
}

// untouched reports whether nobody has written to the memory since.
func (l *lent) untouched() bool { return len(bytes.Trim(l.memory, string([]byte{taken}))) == 0 }

// A gate holds the streams of an encounter back, which costs the guest no time, until the traffic of all encounters is under way.
type gate struct {
	full, open chan struct{}
	once       sync.Once // closes full
	after      int       // bytes that a stream receives before
}

// reached closes full: the traffic is under way.
func (g *gate) reached() { g.once.Do(func() { close(g.full) }) }

// A gated connection holds back what comes after g.after bytes.
type gated struct {
	*net.TCPConn
	g        *gate
	received int
}

// Read implements net.Conn.
func (c *gated) Read(p []byte) (int, error) {
	if c.received >= c.g.after {
		c.g.reached()
		<-c.g.open
	}
	n, err := c.TCPConn.Read(p)
	c.received += n
	return n, err
}

// gatedListener accepts gated connections.
type gatedListener struct {
	*net.TCPListener
	g *gate
}

// Accept implements net.Listener.
func (l gatedListener) Accept() (net.Conn, error) {
	nc, err := l.AcceptTCP()
	if err != nil {
		return nil, err
	}
	return &gated{TCPConn: nc, g: l.g}, nil
}

// dial connects to the program.
func (e *encounter) dial() (net.Conn, error) {
	nc, err := dialGuest(e.port)
	if err != nil {
		return nil, err
	}
	return &gated{TCPConn: nc.(*net.TCPConn), g: &e.gate}, nil
}

// met passes a stream to the test.
func (e *encounter) met(c *rdma.Conn) { e.streams <- c }

// A victim is a program whose stream ends.
type victim struct {
	name    string
	command func(port int) string
	streams int // the last one is that of the data
	listens bool
	run     func(e *encounter) error // returns when our side has ended
	// passive says that siw serves our operations without the program, so that they continue after it has stopped.
	passive bool
	// deaf says that the program may not notice the end of its stream.
	deaf bool
	// refused is why the engine refuses operations of the program on memory that was taken back, if it has such memory.
	refused wire.Reason
}

var victims = []victim{
	{
		name:    "rping as a client",
		command: func(port int) string { return fmt.Sprintf("rping -c -a %s -p %d -S 65000", tapHost, port) },
		streams: 1, deaf: true,
		run: func(e *encounter) error {
			c, err := respond(e.ctx, e.l, e.o)
			if err != nil {
				return err
			}
			defer c.Close()
			e.met(c)
			return verbs.PingServer{}.Serve(c)
		},
	},
	{
		name: "rstream as a client",
		command: func(port int) string {
			return fmt.Sprintf("rstream -s %s -p %d -I 1000000 -C 4 -S 40000 -T v", tapHost, port)
		},
		streams: 1, deaf: true,
		run: func(e *encounter) error {
			nc, err := e.l.Accept()
			if err != nil {
				return err
			}
			s, err := verbs.AcceptSocket(e.ctx, nc, e.o)
			if err != nil {
				return err
			}
			defer s.Close()
			e.met(s.Conn())
			_, err = io.CopyBuffer(struct{ io.Writer }{s}, struct{ io.Reader }{s}, make([]byte, 16384))
			return err
		},
	},
	{
		name: "ib_write_bw as a client",
		command: func(port int) string {
			return fmt.Sprintf("ib_write_bw -R -F -p %d -n 1000000 -s 65536 %s", port, tapHost)
		},
		streams: 2,
		run: func(e *encounter) error {
			return verbs.PerftestServer{Connected: e.met}.Serve(e.ctx, e.l, e.o)
		},
	},
	{
		name:    "rping as a server",
		command: func(port int) string { return fmt.Sprintf("rping -s -a %s -p %d -S 65000", tapGuest, port) },
		streams: 1, listens: true, deaf: true,
		run: func(e *encounter) error {
			nc, err := e.dial()
			if err != nil {
				return err
			}
			c, err := initiateOn(e.ctx, nc, e.o)
			if err != nil {
				return err
			}
			defer c.Close()
			e.met(c)
			g := verbs.NewPinger(c, 65000)
			defer g.Close()
			for err == nil {
				err = g.Ping()
			}
			return err
		},
	},
	{
		name:    "rstream as a server",
		command: func(port int) string { return fmt.Sprintf("rstream -p %d -I 1000000 -C 4 -S 40000 -T v", port) },
		streams: 1, listens: true, deaf: true,
		run: func(e *encounter) error {
			nc, err := e.dial()
			if err != nil {
				return err
			}
			s, err := verbs.ConnectSocket(e.ctx, nc, e.o)
			if err != nil {
				return err
			}
			defer s.Close()
			e.met(s.Conn())
			return stream(s, 1_000_000, 4, 40_000)
		},
	},
	{
		name:    "ib_read_bw as a server",
		command: func(port int) string { return fmt.Sprintf("ib_read_bw -R -F -p %d -n 1000000 -s 65536", port) },
		streams: 2, listens: true, passive: true,
		run: func(e *encounter) error {
			c, err := verbs.DialPerftest(e.ctx, e.dial, e.o, false)
			if err != nil {
				return err
			}
			defer c.Close()
			data, control := c.Streams()
			e.met(control)
			e.met(data)
			for !e.enough.Load() {
				if err := c.Read(make([]byte, 65536)); err != nil {
					return err
				}
			}
			return c.Finish(true)
		},
	},
}

// workers are programs with operations that are outstanding in each direction and role.
var workers = []victim{
	{
		name: "RDMA Writes of a client",
		command: func(port int) string {
			return fmt.Sprintf("ib_write_bw -R -F -p %d -n 1000000 -s 65536 %s", port, tapHost)
		},
		streams: 2, refused: wire.ReasonInvalidSTag,
		run: func(e *encounter) error {
			return verbs.PerftestServer{Connected: e.met, Registered: e.lends}.Serve(e.ctx, e.l, e.o)
		},
	},
	{
		name: "RDMA Reads of a client",
		command: func(port int) string {
			return fmt.Sprintf("ib_read_bw -R -F -p %d -n 1000000 -s 65536 %s", port, tapHost)
		},
		streams: 2, refused: wire.ReasonReadInvalidSTag,
		run: func(e *encounter) error {
			return verbs.PerftestServer{Connected: e.met, Registered: e.lends}.Serve(e.ctx, e.l, e.o)
		},
	},
	{
		name:    "RDMA Reads of the engine",
		command: func(port int) string { return fmt.Sprintf("ib_read_bw -R -F -p %d -n 1000000 -s 65536", port) },
		streams: 2, listens: true,
		run: func(e *encounter) error { return e.work(keepReads) },
	},
	{
		name:    "RDMA Writes of the engine",
		command: func(port int) string { return fmt.Sprintf("ib_write_bw -R -F -p %d -n 1000000 -s 65536", port) },
		streams: 2, listens: true,
		run: func(e *encounter) error { return e.work(keepWrites) },
	},
	victims[0], // rping, with RDMA Reads and Writes of the engine as a responder
	victims[3], // rping, with those of siw as a responder
	victims[1], // rstream, with RDMA Writes and Sends in both directions
	victims[4],
}

// work connects to a server of perftest, and keeps operations outstanding until their stream ends.
func (e *encounter) work(keep func(g *gate, c *rdma.Conn, stag rdma.STag, to uint64) error) error {
	c, err := verbs.DialPerftest(e.ctx, e.dial, e.o, false)
	if err != nil {
		return err
	}
	defer c.Close()
	data, control := c.Streams()
	e.met(control)
	e.met(data)
	stag, to := c.Memory()
	return keep(&e.gate, data, stag, to)
}

// outstanding is how many operations of ours are under way. With Reads, half of them wait for ORD.
const outstanding = 16

// keepReads keeps Reads outstanding. It returns why the stream has ended, unless a Read was not returned before or has ended for
// another reason.
func keepReads(_ *gate, c *rdma.Conn, stag rdma.STag, to uint64) error {
	c.SetORD(outstanding / 2)
	for range outstanding {
		if err := c.Post(&rdma.WorkRequest{Op: rdma.Read, Data: make([]byte, 65536), STag: stag, TO: to}); err != nil {
			return err
		}
	}
	c.Flush()
	var failed error
	for n := outstanding; ; {
		var ev rdma.Event
		err := c.Receive(&ev)
		switch {
		case err != nil && n != 0:
			return fmt.Errorf("%d Reads were not returned: %v", n, err)
		case err != nil && failed != nil && !errors.Is(failed, err):
			return fmt.Errorf("a Read has ended with %v, the stream with %v", failed, err)
		case err != nil:
			if posted := c.Post(&rdma.WorkRequest{Op: rdma.Read}); !errors.Is(posted, rdma.ErrClosed) {
				return fmt.Errorf("Post after the end: %v", posted)
			}
			return err
		case ev.Read == nil:
			return errors.New("a Send has come")
		case ev.Err != nil:
			failed = ev.Err
		default:
			if c.Post(ev.Read) == nil {
				c.Flush()
				continue
			}
		}
		n--
	}
}

// writesDone receives how Writes of keepWrites end.
type writesDone chan error

// WorkDone implements rdma.Completer.
func (d writesDone) WorkDone(_ *rdma.WorkRequest, err error) { d <- err }

// keepWrites keeps Writes outstanding. It returns why the stream has ended, unless a Write has ended for another reason than that our
// side has ended it.
func keepWrites(g *gate, c *rdma.Conn, stag rdma.STag, to uint64) error {
	done, ended := make(writesDone, outstanding), make(chan error, 1)
	go func() {
		var ev rdma.Event
		ended <- c.Receive(&ev)
	}()
	var failed, refused error
	n, written := 0, 0
	for data := make([]byte, 65536); ; {
		for n < outstanding && refused == nil {
			if refused = c.Post(&rdma.WorkRequest{Op: rdma.Write, Data: data, STag: stag, TO: to, Done: done}); refused == nil {
				n++
			}
		}
		c.Flush()
		if n == 0 {
			break
		}
		if err := <-done; err != nil {
			failed = err
		} else if written += len(data); written >= g.after {
			g.reached()
		}
		n--
	}
	err := <-ended
	if !errors.Is(refused, rdma.ErrClosed) || failed != nil && !errors.Is(failed, rdma.ErrClosed) {
		return fmt.Errorf("a Write has ended with %v, a Post with %v, the stream with %v", failed, refused, err)
	}
	return err
}

// carried returns how many bytes TCP has carried for c in both directions.
func carried(t *testing.T, c *rdma.Conn) (n uint64) {
	t.Helper()
	raw, err := c.Socket().(syscall.Conn).SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) {
			if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
				n = info.Bytes_acked + info.Bytes_received
			}
		})
	}
	if err != nil {
		t.Fatalf("the stream has ended: %v", err)
	}
	return n
}

// An ending is how the streams of encounters end.
type ending struct {
	name  string
	begin func(t *testing.T, v *vm.VM, all []meeting)
	judge func(err error) bool // of our side
	// log is the line of siw in the log of the kernel, if any, for each encounter.
	log string
	// once is a line that siw may log, once.
	once string
	// fatal says that the test ends the program, which hears nothing.
	fatal bool
	// held says that streams are held back until begin has returned.
	held bool
	// only excludes the programs for which listens differs. nil: none.
	only *bool
	// workers says that the programs are workers, and not victims.
	workers bool
}

// A meeting is an encounter whose traffic is under way.
type meeting struct {
	*encounter
	victim victim
	p      *guestProgram
	conns  []*rdma.Conn // the last one is that of the data
	ended  <-chan error // gets what our side returns
}

func (m meeting) data() *rdma.Conn { return m.conns[len(m.conns)-1] }

var endings = []ending{
	{
		name:  "kill -9",
		begin: func(t *testing.T, v *vm.VM, all []meeting) { v.Run(t, signal("KILL", all), quick) },
		judge: inTime,
		fatal: true,
	},
	{
		name: "kill -STOP",
		begin: func(t *testing.T, v *vm.VM, all []meeting) {
			v.Run(t, signal("STOP", all), quick)
			for _, m := range all {
				if m.victim.passive {
					from := carried(t, m.data())
					testkit.Eventually(t, "siw continues without the program", func() bool { return carried(t, m.data()) > from+underWay })
					m.enough.Store(true)
				}
			}
			for _, m := range all {
				for _, c := range m.conns {
					if err := c.SetReceiveDeadline(time.Now().Add(patient)); err != nil {
						t.Fatal(err)
					}
				}
			}
		},
		judge: func(err error) bool { return errors.Is(err, os.ErrDeadlineExceeded) },
		fatal: true,
	},
	{
		name: "reset by the guest",
		begin: func(t *testing.T, v *vm.VM, all []meeting) {
			var streams []string
			for _, m := range all {
				_, ours, _ := net.SplitHostPort(m.data().LocalAddr().String())
				_, theirs, _ := net.SplitHostPort(m.data().RemoteAddr().String())
				streams = append(streams, fmt.Sprintf("( sport = :%s and dport = :%s )", theirs, ours))
			}
			v.Run(t, fmt.Sprintf("ss -HKtn state established '%s'", strings.Join(streams, " or ")), quick)
		},
		judge: func(err error) bool { return errors.Is(err, syscall.ECONNRESET) },
		only:  new(bool),
	},
	{
		name: "reset by the engine",
		begin: func(t *testing.T, _ *vm.VM, all []meeting) {
			for _, m := range all {
				if err := m.data().Socket().(*gated).SetLinger(0); err != nil {
					t.Fatal(err)
				}
				m.data().Close()
			}
		},
		judge: func(err error) bool { return errors.Is(err, rdma.ErrClosed) },
		only:  &listens,
	},
	{
		name: "terminated by the engine",
		begin: func(t *testing.T, _ *vm.VM, all []meeting) {
			terminates := func() uint64 { return all[0].o.Domain.Counts().TerminatesSent[wire.ReasonCatastrophic] }
			before := terminates()
			for _, m := range all {
				m.data().Terminate(wire.ReasonCatastrophic, errEnough)
			}
			testkit.Eventually(t, "the Terminates were sent", func() bool { return terminates() == before+uint64(len(all)) })
		},
		held:  true, // a Terminate has 2 s to leave, behind what TCP has taken before
		judge: inTime,
		log:   "siw: got TERMINATE. layer 2, type 0, code 7", // siw takes layer and type for each other
	},
	{
		name: "half closed by the engine",
		begin: func(t *testing.T, _ *vm.VM, all []meeting) {
			for _, m := range all {
				if m.lent.c != nil {
					m.lent.revoked = true
					if m.lent.c.Revoke(m.lent.region) {
						m.lent.fill() // operations on it are on their way
					}
				}
				if err := m.data().CloseWrite(); err != nil {
					t.Fatal(err)
				}
			}
		},
		judge: func(err error) bool {
			return err == nil || errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, rdma.ErrClosed)
		},
		// Our direction may end before the Terminate that refuses a Read, or after it.
		once:    "siw: got TERMINATE. layer 1, type 0, code 0",
		held:    true,
		workers: true,
	},
	{
		name: "closed by the engine",
		begin: func(t *testing.T, _ *vm.VM, all []meeting) {
			for _, m := range all {
				if err := m.data().Close(); err != nil {
					t.Fatal(err)
				}
			}
		},
		judge:   func(err error) bool { return errors.Is(err, rdma.ErrClosed) },
		held:    true,
		workers: true,
	},
}

var (
	errEnough = errors.New("the engine has enough")
	listens   = true
)

// inTime reports whether something else than a deadline has ended our side. A server of ours takes the end of a stream for that of a run.
func inTime(err error) bool { return !errors.Is(err, os.ErrDeadlineExceeded) }

// verbsEndings ends the streams of programs while operations are outstanding on them, those of all programs at once. A stream of
// another program, in the same protection domain, continues.
func verbsEndings(t *testing.T, v *vm.VM) {
	nothingLeft(t)
	nothingLeftInGuest(t, v)
	domain := rdma.NewDomain()
	n := startNeighbour(t, v, domain)
	rest := strings.TrimSpace(v.Run(t, "dmesg --clear\n"+objects, quick))
	for _, end := range endings {
		t.Run(end.name, func(t *testing.T) {
			all := meet(t, v, domain, end)
			proceed := func() {
				for _, m := range all {
					close(m.gate.open)
				}
			}
			if end.held {
				end.begin(t, v, all)
				proceed()
			} else {
				proceed()
				end.begin(t, v, all)
			}
			late, cancel := context.WithTimeout(t.Context(), soon)
			defer cancel()
			for _, m := range all {
				t.Run(m.victim.name, func(t *testing.T) {
					select {
					case err := <-m.ended:
						t.Logf("our side ends: %v", err)
						var why *rdma.StreamError
						if m.lent.revoked && !(errors.As(err, &why) && why.Reason == m.victim.refused && !why.Remote) {
							t.Errorf("the error of our side is %v, want %v", err, m.victim.refused)
						} else if !m.lent.revoked && !end.judge(err) {
							t.Errorf("the error of our side is %v", err)
						}
						m.lent.fill() // Serve has deregistered it
					case <-late.Done():
						t.Errorf("our side has not ended after %v\n%s", soon, testkit.Stacks())
					}
				})
			}
			afterwards(t, v, all, end, rest)
			for _, m := range all {
				if !m.lent.untouched() {
					t.Errorf("%s: memory that was taken back has changed", m.victim.name)
				}
			}
			n.goesOn(t)
		})
	}
}

// meet starts the programs that can end like that, and returns when their traffic is under way.
func meet(t *testing.T, v *vm.VM, domain *rdma.Domain, end ending) (all []meeting) {
	t.Helper()
	nothingLeft(t)
	var commands []guestCommand
	programs := victims
	if end.workers {
		programs = workers
	}
	for i, tt := range programs {
		if end.only != nil && *end.only != tt.listens {
			continue
		}
		e := &encounter{ctx: t.Context(), o: rdma.Options{Domain: domain}, streams: make(chan *rdma.Conn, tt.streams),
			gate: gate{full: make(chan struct{}), open: make(chan struct{}), after: underWay}}
		if tt.refused == wire.ReasonReadInvalidSTag {
			e.gate.after = requestsUnderWay
		}
		c := guestCommand{}
		if tt.listens {
			e.o.Nudge, e.port = nudge, endingsPort+i
			c.port = e.port
		} else {
			l, port := listenVerbs(t)
			e.l, e.port = gatedListener{l, &e.gate}, port
		}
		c.line = tt.command(e.port)
		commands = append(commands, c)
		all = append(all, meeting{encounter: e, victim: tt})
	}
	// The engine answers clients while the script starts the others: siw waits for a Reply for a time only.
	begin := func(m *meeting) {
		ended := make(chan error, 1)
		m.ended = ended
		go func() { ended <- m.victim.run(m.encounter) }()
	}
	for i := range all {
		if !all[i].victim.listens {
			begin(&all[i])
		}
	}
	started := startPrograms(t, v, 2*testkit.Patience, commands...)
	for i := range all {
		if m := &all[i]; m.victim.listens {
			begin(m)
		}
	}
	for i := range all {
		m := &all[i]
		m.p = started[i]
		for range m.victim.streams {
			select {
			case c := <-m.streams:
				m.conns = append(m.conns, c)
			case err := <-m.ended:
				m.p.end()
				t.Fatalf("%s: before the traffic: %v", m.victim.name, err)
			}
		}
	}
	for _, m := range all {
		select {
		case <-m.gate.full:
		case err := <-m.ended:
			t.Fatalf("%s: before the traffic is under way: %v", m.victim.name, err)
		case <-time.After(testkit.Patience):
			t.Fatalf("%s: the traffic is not under way\n%s", m.victim.name, testkit.Stacks())
		}
	}
	return all
}

// signal returns a script that sends a signal to the programs.
func signal(name string, all []meeting) string {
	var s strings.Builder
	for _, m := range all {
		fmt.Fprintf(&s, "kill -%s $(<%s.pid)\n", name, m.p.files)
	}
	return s.String()
}

// afterwards waits until the programs have ended, and checks what they leave in the guest.
func afterwards(t *testing.T, v *vm.VM, all []meeting, end ending, rest string) {
	t.Helper()
	var deaf []meeting // they may have ended
	var programs []*guestProgram
	for _, m := range all {
		programs = append(programs, m.p)
		if end.fatal || m.victim.deaf {
			deaf = append(deaf, m)
		}
	}
	statuses, log := endPrograms(t, v, "{\n"+signal("KILL", deaf)+"} 2>/dev/null || true\n", fmt.Sprintf(`
while left=$(%s) && [ "$left" != %q ]; do
	echo "$left" >&2
	sleep 0.1
done
dmesg --read-clear --level emerg,alert,crit,err,warn --notime | { grep -vE 'speed is unknown, defaulting|hrtimer: interrupt took' || true; }
`, objects, rest), programs...)
	for i, m := range all {
		if statuses[i] == 124 { // of timeout
			t.Errorf("%s has not noticed the end of its stream", m.p.command)
		}
	}
	want := ""
	if end.log != "" {
		want = strings.Repeat(end.log+"\n", len(all))
	}
	if end.once != "" {
		log = strings.Replace(log, end.once+"\n", "", 1)
	}
	if log != want {
		t.Errorf("the kernel of the guest reports %q, want %q", log, want)
	}
}

// A neighbour is another program, which pings all the time.
type neighbour struct{ pings atomic.Int64 }

func startNeighbour(t *testing.T, v *vm.VM, domain *rdma.Domain) *neighbour {
	t.Helper()
	const size = 1000
	p := startPrograms(t, v, 10*time.Minute, guestCommand{fmt.Sprintf("rping -s -a %s -p %d -V -S %d", tapGuest, neighbourPort, size), neighbourPort})[0]
	n := &neighbour{}
	c, err := initiate(t.Context(), neighbourPort, rdma.Options{Domain: domain, Nudge: nudge})
	if err != nil {
		p.end()
		t.Fatal(err)
	}
	stop, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		g := verbs.NewPinger(c, size)
		defer c.Close()
		defer g.Close()
		for {
			select {
			case <-stop:
				ended <- nil
				return
			case <-time.After(20 * time.Millisecond):
			}
			if err := g.Ping(); err != nil {
				ended <- err
				return
			}
			n.pings.Add(1)
		}
	}()
	t.Cleanup(func() {
		close(stop)
		p.succeed(<-ended)
	})
	n.goesOn(t)
	return n
}

// goesOn waits for further pings.
func (n *neighbour) goesOn(t *testing.T) {
	t.Helper()
	before := n.pings.Load()
	testkit.Eventually(t, "the neighbour continues", func() bool { return n.pings.Load() >= before+3 })
}
