package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

const serviceTarget = "iqn.2026-11.io.example:store"

// serviceConfig returns the path of a configuration with a memory LUN and the portals.
func serviceConfig(t *testing.T, more string, portals ...string) string {
	t.Helper()
	return write(t, "c.yaml", fmt.Sprintf(`
state_dir: ""
control: {socket: ""}
portals: [{listen: "%s"}]
targets:
  - name: %s
    initiators: ["*"]
    luns: [{id: 0, backend: memory, size: 1MiB}]
%s`, strings.Join(portals, `"}, {listen: "`), serviceTarget, more))
}

// A manager plays the service manager of the program.
type manager struct {
	conn  *net.UnixConn
	env   []string
	files []*os.File
}

func newManager(t *testing.T, env ...string) *manager {
	t.Helper()
	path := filepath.Join(t.TempDir(), "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return &manager{conn: conn, env: append(env, "NOTIFY_SOCKET="+path)}
}

// open opens a socket for the program, and returns its address.
func (m *manager) open(t *testing.T, addr string) string {
	t.Helper()
	var lc net.ListenConfig
	lc.SetMultipathTCP(false) // as managers do
	l, err := lc.Listen(context.Background(), "tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	f, err := l.(*net.TCPListener).File()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	m.files = append(m.files, f)
	return l.Addr().String()
}

// start runs the program. A shell sets LISTEN_PID to its own pid, which the program keeps.
func (m *manager) start(t *testing.T, config string) *process {
	t.Helper()
	cmd := exec.Command("sh", "-c", `LISTEN_PID=$$ WATCHDOG_PID=$$ exec "$0" "$@"`, executable(t), "serve", "--config", config)
	cmd.ExtraFiles = m.files
	cmd.Env = append(os.Environ(), m.env...)
	if len(m.files) > 0 {
		cmd.Env = append(cmd.Env, "LISTEN_FDS="+strconv.Itoa(len(m.files)))
	}
	return launch(t, cmd)
}

// next returns the next notification with that assignment, and skips others.
func (m *manager) next(t *testing.T, assignment string) map[string]string {
	t.Helper()
	m.conn.SetReadDeadline(time.Now().Add(20 * time.Second))
	var seen []string
	buf := make([]byte, 1<<16)
	for {
		n, err := m.conn.Read(buf)
		if err != nil {
			t.Fatalf("no %s, %v; there were %q", assignment, err, seen)
		}
		seen = append(seen, string(buf[:n]))
		got := map[string]string{}
		found := false
		for line := range strings.SplitSeq(string(buf[:n]), "\n") {
			key, value, _ := strings.Cut(line, "=")
			got[key] = value
			found = found || strings.HasPrefix(line, assignment)
		}
		if found {
			return got
		}
	}
}

func monotonic(t *testing.T) int64 {
	t.Helper()
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		t.Fatal(err)
	}
	return now.Nano() / 1000
}

func logIn(t *testing.T, addr string) *initiator.Session {
	t.Helper()
	s := login(t, addr, initiator.Options{Target: serviceTarget})
	// The target sends unexpected PDUs, like the request to log out, only to an initiator
	// that has sent a command. It may meet the unit attention.
	if err := s.Do(&initiator.Command{CDB: cdb.Read16(0, 1), In: make([]byte, 512)}); err != nil {
		t.Fatal(err)
	}
	return s
}

// The program notifies as sd_notify(3) requires: READY when it serves, a status, RELOADING
// with the time around SIGHUP, pings for the watchdog, STOPPING.
func TestNotifications(t *testing.T) {
	m := newManager(t, "WATCHDOG_USEC=300000")
	missing := filepath.Join(t.TempDir(), "absent", "disk.img")
	config := write(t, "c.yaml", fmt.Sprintf(`
state_dir: %s
control: {socket: ""}
drain: 1s
portals: [{listen: "127.0.0.1:0"}]
targets:
  - name: %s
    initiators: ["*"]
    luns: [{id: 0, backend: memory, size: 1MiB}, {id: 1, backend: file, path: %s, size: 1MiB}]
`, t.TempDir(), serviceTarget, missing))
	p := m.start(t, config)
	ready := m.next(t, "READY=1")
	if s := ready["STATUS"]; !strings.HasPrefix(s, "serving: sessions 0, targets 1, LUNs 2, not ready 1: LUN 1 of "+serviceTarget) || !strings.Contains(s, missing) {
		t.Errorf("status when ready: %q", s)
	}
	p.addr = p.wait(t, `msg=serving portal=(\S+)`)
	for range 3 {
		m.next(t, "WATCHDOG=1")
	}
	s := logIn(t, p.addr)
	m.next(t, "STATUS=serving: sessions 1,")

	before := monotonic(t)
	if err := p.cmd.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	got := m.next(t, "RELOADING=1")
	if at, err := strconv.ParseInt(got["MONOTONIC_USEC"], 10, 64); err != nil || at < before || at > monotonic(t) {
		t.Errorf("MONOTONIC_USEC=%s, sent after %d", got["MONOTONIC_USEC"], before)
	}
	m.next(t, "READY=1")
	p.wait(t, `(configuration file was applied)`)

	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	got = m.next(t, "STOPPING=1")
	// drain, the end of the sessions, and what stores take.
	if got["EXTEND_TIMEOUT_USEC"] != "68000000" || got["STATUS"] != "stopping: sessions 1, asked to log out within 1s" {
		t.Errorf("at the end: %q", got)
	}
	m.next(t, "WATCHDOG=1") // it is watched to the end
	s.Close()
	if err := p.cmd.Wait(); err != nil {
		t.Error(err)
	}
}

// The program ignores variables of the service manager that are for another process.
func TestVariablesOfAnotherProcessAreIgnored(t *testing.T) {
	cmd := exec.Command(executable(t), "serve", "--config", serviceConfig(t, "", "127.0.0.1:0"))
	cmd.Env = append(os.Environ(), "LISTEN_PID=1", "LISTEN_FDS=7", "WATCHDOG_PID=1", "WATCHDOG_USEC=1")
	p := launch(t, cmd)
	p.wait(t, `msg=serving portal=(\S+)`)
}

// Passed sockets become the portals of the same address, whatever their names are. The
// program opens the other portals itself.
func TestPassedSocketsBecomePortals(t *testing.T) {
	m := newManager(t, "LISTEN_FDNAMES=one:two")
	second, first := m.open(t, "127.0.0.1:0"), m.open(t, "[::]:0")
	_, port, err := net.SplitHostPort(first)
	if err != nil {
		t.Fatal(err)
	}
	config := serviceConfig(t, "drain: 1s", "0.0.0.0:"+port, second, "127.0.0.1:0")
	// Who connects before the target is there waits for it.
	nc, err := net.Dial("tcp", second)
	if err != nil {
		t.Fatal(err)
	}
	nc.Close()
	p := m.start(t, config)
	m.next(t, "READY=1")
	var addrs []string
	for range 3 {
		addrs = append(addrs, p.wait(t, `msg=serving portal=(\S+)`))
	}
	if addrs[0] != "[::]:"+port || addrs[1] != second {
		t.Errorf("portals are on %v, the sockets on %s and %s", addrs, first, second)
	}
	for _, addr := range []string{"127.0.0.1:" + port, second, addrs[2]} {
		logIn(t, addr).Close()
	}

	// A portal on a socket that was passed cannot go while the manager has it.
	text, err := os.ReadFile(config)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(config, []byte(strings.Replace(string(text), `{listen: "`+second+`"}, `, "", 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	p.wait(t, `(the socket belongs to the service manager)`)
	m.next(t, "READY=1")
	logIn(t, second).Close()
}

// A passed socket that the program cannot serve is an error that names it.
func TestUnsuitableSocketIsRefused(t *testing.T) {
	udp := func(t *testing.T, m *manager) {
		c, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		f, err := c.File()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		m.files = append(m.files, f)
	}
	stream := func(t *testing.T, m *manager) {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "s"), Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		f, err := l.File()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		m.files = append(m.files, f)
	}
	mptcp := func(t *testing.T, m *manager) {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_MPTCP)
		if err == nil {
			err = unix.Listen(fd, 1)
		}
		if err != nil {
			backendtest.Unavailable(t, "no Multipath TCP in this kernel: %v", err)
		}
		f := os.NewFile(uintptr(fd), "")
		t.Cleanup(func() { f.Close() })
		m.files = append(m.files, f)
	}
	tcp := func(t *testing.T, m *manager) { m.open(t, "127.0.0.1:0") }
	for _, tt := range []struct {
		name string
		env  string
		open func(*testing.T, *manager)
		want string
	}{
		{"no portal", "LISTEN_FDNAMES=extra", tcp, `(sockets of the service manager that no portal listens on: 127.0.0.1:\d+ .extra.)`},
		{"MPTCP", "A=", mptcp, `(its protocol is number 262)`},
		{"UDP", "A=", udp, `(socket "LISTEN_FD_3" does not listen on TCP)`},
		{"Unix", "A=", stream, `(socket "LISTEN_FD_3" does not listen on TCP: its protocol is number 0)`},
		{"names", "LISTEN_FDNAMES=a:b", tcp, `(LISTEN_FDNAMES is "a:b", want 1 names)`},
		{"count", "LISTEN_FDS=x", func(*testing.T, *manager) {}, `(LISTEN_FDS is "x", want a number of sockets)`},
		{"watchdog", "WATCHDOG_USEC=-1", tcp, `(WATCHDOG_USEC must be a positive number)`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m := newManager(t, tt.env)
			tt.open(t, m)
			p := m.start(t, serviceConfig(t, "", "127.0.0.1:0"))
			p.wait(t, tt.want)
			var exit *exec.ExitError
			if err := p.cmd.Wait(); !errors.As(err, &exit) || exit.ExitCode() != 1 {
				t.Errorf("exit: %v", err)
			}
		})
	}
	t.Run("NOTIFY_SOCKET", func(t *testing.T) {
		m := &manager{env: []string{"NOTIFY_SOCKET=vsock:2:1"}}
		m.start(t, serviceConfig(t, "", "127.0.0.1:0")).wait(t, `(NOTIFY_SOCKET is "vsock:2:1", want an absolute path)`)
	})
}

// A stop cuts sessions at once, although one of them does not log out, and announces that. What was acknowledged
// is there after the next start, and the initiators come back at once.
func TestStopIsShort(t *testing.T) {
	dir := t.TempDir()
	path := write(t, "c.yaml", fmt.Sprintf(`
state_dir: %[1]s/state
control: {socket: ""}
portals: [{listen: "127.0.0.1:0"}]
targets:
  - name: %[2]s
    initiators: ["*"]
    luns: [{id: 0, backend: file, path: %[1]s/disk.img, size: 64MiB}]
`, dir, serviceTarget))
	p := start(t, "serve", "--config", path)
	s, neighbor := logIn(t, p.addr), login(t, p.addr, initiator.Options{Target: serviceTarget, ISID: [6]byte{0x80, 5: 9}})
	defer neighbor.Close()
	data := bytes.Repeat([]byte("iser"), 1<<18)
	w := &initiator.Command{CDB: cdb.Write16(0, 2048), Out: data}
	if err := s.Do(w); err != nil || w.Status != 0 {
		t.Fatalf("%v, status %d", err, w.Status)
	}
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	got, err := s.Next(ctx)
	if err != nil || got.BHS.Opcode() != pdu.AsyncMessage || got.BHS.AsyncEvent() != pdu.AsyncConnectionDropped || got.BHS.Parameter(2) != 0 {
		t.Errorf("%v %x, want event 2 with Time2Wait 0", err, []byte(got.BHS))
	}
	cut := time.Now()
	if err := p.cmd.Wait(); err != nil {
		t.Error(err)
	}
	if took := time.Since(cut); took > 2*time.Second { // 0.1 s and a busy machine; it was "drain" and more
		t.Errorf("the target ended %v after it had cut the sessions", took)
	}
	again := start(t, "serve", "--config", path)
	s = logIn(t, again.addr)
	defer s.Close()
	r := &initiator.Command{CDB: cdb.Read16(0, 2048), In: make([]byte, len(data))}
	if err := s.Do(r); err != nil || r.Status != 0 || !bytes.Equal(r.In, data) {
		t.Errorf("%v, status %d, or other data", err, r.Status)
	}
}

// drain makes initiators log out, sends their logins to another portal, and ends the target with code 0. A
// session that does not log out is served until the time is over.
func TestDrain(t *testing.T) {
	s := newStation(t)
	leaves, stays := logIn(t, s.addr), login(t, s.addr, initiator.Options{Target: storeName, ISID: [6]byte{0x80, 5: 9}})
	defer stays.Close()
	read := func() error {
		c := &initiator.Command{CDB: cdb.Read16(0, 1), In: make([]byte, 512)}
		for c.Status = 2; c.Status != 0; { // the first meets a unit attention
			if err := stays.Do(c); err != nil {
				return err
			}
		}
		return nil
	}
	if err := read(); err != nil {
		t.Fatal(err)
	}
	s.says(t, cli.ExitUsage, "--within must be", "drain", "--within", "25h")
	s.says(t, cli.ExitUsage, "--to must be HOST:PORT", "drain", "--to", "elsewhere")
	s.says(t, cli.ExitError, "would loop", "drain", "--to", s.addr)

	const to = "192.0.2.9:3260"
	if out := s.ok(t, "drain", "--within", "5s", "--to", to, "--detach"); out != "sessions 2: asked to log out within 5s and sent to "+to+"\n" {
		t.Errorf("%q", out)
	}
	begun := time.Now()
	s.says(t, cli.ExitError, "is being drained already", "drain")
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	for _, i := range []*initiator.Session{leaves, stays} {
		if got, err := i.Next(ctx); err != nil || got.BHS.AsyncEvent() != pdu.AsyncLogoutRequest {
			t.Fatalf("%v %x", err, []byte(got.BHS))
		}
	}
	if err := leaves.Logout(ctx); err != nil {
		t.Error(err)
	}
	if _, err := initiator.Login(ctx, s.addr, initiator.Options{Target: storeName}); err == nil || !strings.Contains(err.Error(), "0x0101") && !strings.Contains(err.Error(), "moved") {
		t.Errorf("a login meets %v, want target moved temporarily", err)
	}
	if err := read(); err != nil {
		t.Errorf("the initiator that stays: %v", err)
	}
	if err := s.cmd.Wait(); err != nil {
		t.Error(err)
	}
	if took := time.Since(begun); took < 4*time.Second || took > time.Minute {
		t.Errorf("the target ended after %v, want 5s", took)
	}
}

// ISCSI-11.9-1: on SIGTERM, the target asks initiators to log out and waits at most for
// "drain".
func TestSIGTERMWaitsForLogouts(t *testing.T) {
	for _, tt := range []struct {
		name, drain    string
		logout, second bool
		least, most    time.Duration
		exit           string
	}{
		{"logs out", "10m", true, false, 0, time.Minute, ""},
		{"stays", "1s", false, false, time.Second, time.Minute, ""},
		{"second SIGTERM", "10m", false, true, 0, time.Minute, "signal: terminated"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := start(t, "serve", "--config", serviceConfig(t, "drain: "+tt.drain, "127.0.0.1:0"))
			s := logIn(t, p.addr)
			// A silent connection does not delay the end.
			nc, err := net.Dial("tcp", p.addr)
			if err != nil {
				t.Fatal(err)
			}
			defer nc.Close()
			began := time.Now()
			if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			for asked := false; !asked; {
				got, err := s.Next(ctx)
				if err != nil {
					t.Fatalf("no request to log out: %v", err)
				}
				asked = got.BHS.Opcode() == pdu.AsyncMessage
			}
			if tt.logout {
				if err := s.Logout(ctx); err != nil {
					t.Error(err)
				}
			}
			if tt.second {
				if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
					t.Fatal(err)
				}
			}
			exit := ""
			if err := p.cmd.Wait(); err != nil {
				exit = err.Error()
			}
			if took := time.Since(began); exit != tt.exit || took < tt.least || took > tt.most {
				t.Errorf("ended after %v with %q, want %v to %v and %q\n%s", took, exit, tt.least, tt.most, tt.exit, p.output.all.String())
			}
		})
	}
}

// store receives what the program leaves with the manager until it ends, and has it passed to the next process.
func (m *manager) store(t *testing.T) (names []string) {
	t.Helper()
	buf, oob := make([]byte, 1<<16), make([]byte, 256)
	for {
		m.conn.SetReadDeadline(time.Now().Add(20 * time.Second))
		n, oobn, _, _, err := m.conn.ReadMsgUnix(buf, oob)
		if err != nil {
			t.Fatalf("the program stores nothing: %v", err)
		}
		var fds []int
		if list, err := unix.ParseSocketControlMessage(oob[:oobn]); err == nil && len(list) == 1 {
			fds, _ = unix.ParseUnixRights(&list[0])
		}
		switch text := string(buf[:n]); {
		case strings.HasPrefix(text, "FDSTORE=1\nFDNAME="):
			name, _, _ := strings.Cut(strings.TrimPrefix(text, "FDSTORE=1\nFDNAME="), "\n")
			f := os.NewFile(uintptr(fds[0]), name)
			t.Cleanup(func() { f.Close() })
			m.files, names = append(m.files, f), append(names, name)
		case text == "BARRIER=1":
			unix.Close(fds[0])
			return names
		}
	}
}

// A restart by a manager that keeps files costs no session, and no data in memory. If the configuration has changed
// meanwhile, the initiators log in again.
func TestRestartKeepsSessions(t *testing.T) {
	m := newManager(t, "FDSTORE=100")
	env := slices.Clip(m.env)
	config := serviceConfig(t, "", freeAddress(t))
	p := m.start(t, config)
	p.addr = p.wait(t, `msg=serving portal=(\S+)`)
	session := logIn(t, p.addr)
	data := bytes.Repeat([]byte("in memory"), 57)[:512]
	if err := session.Do(&initiator.Command{CDB: cdb.Write16(3, 1), Out: data}); err != nil {
		t.Fatal(err)
	}
	stop := func() {
		t.Helper()
		p.cmd.Process.Signal(syscall.SIGTERM)
		m.env = append(env, "LISTEN_FDNAMES="+strings.Join(m.store(t), ":"))
		if err := p.cmd.Wait(); err != nil {
			t.Fatal(err)
		}
	}
	for range 3 {
		stop()
		late := &initiator.Command{CDB: cdb.Read16(3, 1), In: make([]byte, 512)} // while nobody serves
		if err := session.Start(late); err != nil {
			t.Fatal(err)
		}
		p = m.start(t, config)
		if err := late.Wait(); err != nil || late.Status != 0 || !bytes.Equal(late.In, data) {
			t.Fatalf("READ after the restart: %v, status %#x, data %q", err, late.Status, late.In[:16])
		}
		m.next(t, "FDSTOREREMOVE=1") // else a socket would stay open when its session ends
		m.next(t, "READY=1")
		for _, f := range m.files {
			f.Close()
		}
		m.files = nil
	}
	stop()
	text, err := os.ReadFile(config)
	if err == nil {
		err = os.WriteFile(config, append(text, "watch: true\n"...), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	p = m.start(t, config)
	p.wait(t, `("sessions do not continue after the restart" reason="the configuration has changed")`)
	for _, f := range m.files {
		f.Close()
	}
	endsSoon(t, session)
	logIn(t, p.wait(t, `msg=serving portal=(\S+)`))
}
