package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/api"
	"github.com/iser-target/iser-target/cmd/iser-target/handover"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
	"github.com/iser-target/iser-target/tests/testkit/rbdfake"
)

// TestMain makes the test binary the program itself if a variable asks for that, so that
// tests can send signals to a process and check its exit code.
func TestMain(m *testing.M) {
	rbdfake.Main()
	if os.Getenv("BE_ISER_TARGET") != "" {
		if at := os.Getenv("KILL_AT"); at != "" {
			handover.Observe = func(what string) {
				if what == at {
					syscall.Kill(os.Getpid(), syscall.SIGKILL)
					select {}
				}
			}
		}
		main() // the variable stays, for the programs that this one starts
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// run executes a command line in this process.
func run(t *testing.T, args ...string) (out string, err error) {
	t.Helper()
	var b bytes.Buffer
	root := rootCommand(&b, &b)
	root.SetArgs(args)
	err = root.ExecuteContext(context.Background())
	return b.String(), err
}

// write creates a file for the time of the test and returns its path.
func write(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// Command lines that need no target.
func TestCommandsWithoutATarget(t *testing.T) {
	good := write(t, "good.yaml", `
portals: [{listen: "127.0.0.1:0"}]
targets:
  - name: iqn.2026-11.io.example:store
    initiators: ["*"]
    luns: [{id: 0, backend: memory, size: 1MiB}]
`)
	open := write(t, "open.yaml", `
portals: [{listen: "0.0.0.0:0"}]
targets: [{name: "iqn.2026-11.io.example:store", initiators: ["*"]}]
`)
	bad := write(t, "bad.yaml", "portals: [{listen: nowhere}]\ntargts: []\n")
	for _, tt := range []struct {
		args      []string
		out, fail string // what the output, or the error, contains
	}{
		{args: []string{"version"}, out: "iser-target "},
		{args: []string{"config", "validate", good}, out: "valid: portals 1, targets 1, LUNs 1"},
		{args: []string{"config", "validate", open}, out: open + ": warning: targets[0].auth: no authentication"},
		{args: []string{"config", "validate", open}, out: "valid: portals 1"},
		{args: []string{"config", "validate", bad}, fail: "targts"},
		{args: []string{"config", "validate", bad}, fail: "portals[0].listen"},
		{args: []string{"config", "validate", "/does/not/exist.yaml"}, fail: "/does/not/exist.yaml"},
		{args: []string{"config", "validate"}, fail: "wrong number of arguments, 0: usage: iser-target config validate FILE"},
		{args: []string{"--version"}, out: "iser-target " + versionString() + "\n"},
		{args: []string{"serve", "more"}, fail: "wrong number of arguments, 1: usage: iser-target serve [--config FILE | "},
		{args: []string{"lun", "resize", "0"}, fail: "wrong number of arguments, 1: usage: iser-target lun resize [TARGET] LUN [+]SIZE"},
		{args: []string{"lun", "more"}, fail: `unknown command "more" for "iser-target lun"`},
		{args: []string{"events", "--lun", "20s"}, fail: `invalid argument "20s" for "--lun" flag: is not a whole number`},
		{args: []string{"events", "--since", "yesterday"}, fail: `--since "yesterday": want a duration like 1h, a time like 2026-11-25T14:00, or the number of an event`},
		{args: []string{"events", "--since", "-1h"}, fail: "--since -1h: the duration must be above 0"},
		{args: []string{"events", "--kind", "login,logout"}, fail: `--kind "logout": want one of service, login, `},
		{args: []string{"events", "--level", "debug"}, fail: `--level "debug": want one of info, warn, error`},
		{args: []string{"session", "kill", "1", "--reason"}, fail: "flag needs an argument"},
		{args: []string{"serve", "--config", bad}, fail: "targts"},
		{args: []string{"nonsense"}, fail: "unknown command"},
		{args: []string{"completion", "bash"}, out: "iser-target"},
	} {
		out, err := run(t, tt.args...)
		switch {
		case tt.fail == "" && err != nil, tt.fail != "" && (err == nil || !strings.Contains(err.Error(), tt.fail)):
			t.Errorf("%v: error %v, want %q", tt.args, err, tt.fail)
		case !strings.Contains(out, tt.out):
			t.Errorf("%v: output %q, want %q in it", tt.args, out, tt.out)
		}
	}
}

// serve fails if it cannot listen on an address, and names it. It leaves no file.
func TestServeFailsWithoutItsAddresses(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	dir := filepath.Join(t.TempDir(), "state")
	config := func(listen, lun, more string) string {
		return write(t, "c.yaml", fmt.Sprintf(`
state_dir: %s
portals: [{listen: "%s"}]
targets: [{name: "iqn.2026-11.io.example:store", initiators: ["*"], luns: [%s]}]
%s`, dir, listen, lun, more))
	}
	disk := filepath.Join(filepath.Dir(dir), "disk.img")
	file := "{id: 0, backend: file, size: 1MiB, path: " + disk + "}"
	other := filepath.Join(t.TempDir(), "socket")
	l, err := api.Listen(other, "", &handover.Listeners{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, tt := range []struct{ name, config, want string }{
		{"port in use", config(taken.Addr().String(), file, ""), "bind: address already in use. End the program that has it, which ss -ltnp shows, or use another port"},
		{"debug port in use", config("127.0.0.1:0", file, "debug: {listen: \""+taken.Addr().String()+"\"}"), "debug server"},
		{"dashboard port in use", config("127.0.0.1:0", file, "dashboard: {listen: \""+taken.Addr().String()+"\"}"), "dashboard " + taken.Addr().String() + ": listen tcp"},
		{"socket in use", config("127.0.0.1:0", file, "control: {socket: "+other+"}"), "another target serves on this socket"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(context.Background())
			cancel()
			root := rootCommand(io.Discard, io.Discard)
			root.SetArgs([]string{"serve", "--config", tt.config})
			if err := root.ExecuteContext(ctx); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q in it", err, tt.want)
			}
			for _, path := range []string{disk, dir} {
				if _, err := os.Stat(path); !os.IsNotExist(err) {
					t.Errorf("the failed start leaves %s: %v", path, err)
				}
			}
		})
	}
}

// A process is the program in a process of its own.
type process struct {
	cmd    *exec.Cmd
	output *lockedBuffer
	addr   string
}

// A lockedBuffer takes what a program writes, however much, so that no test makes it wait.
type lockedBuffer struct {
	all strings.Builder // that wait has seen

	mu    sync.Mutex
	rest  []byte        // that wait has not seen
	added chan struct{} // has an element after rest has grown
}

// Write implements io.Writer.
func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.rest = append(b.rest, p...)
	select {
	case b.added <- struct{}{}:
	default:
	}
	return len(p), nil
}

// next moves a line from rest to all, if there is one.
func (b *lockedBuffer) next() (line string, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	part, rest, ok := bytes.Cut(b.rest, []byte("\n"))
	if ok {
		line, b.rest = string(part), rest
		fmt.Fprintln(&b.all, line)
	}
	return line, ok
}

// start runs the program and waits until it serves.
func start(t *testing.T, args ...string) *process {
	t.Helper()
	p := launch(t, exec.Command(executable(t), args...))
	p.addr = p.wait(t, `msg=serving portal=(\S+)`)
	return p
}

func executable(t *testing.T) string {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return exe
}

// launch runs the program.
func launch(t *testing.T, cmd *exec.Cmd) *process {
	t.Helper()
	cmd.Env = append(cmd.Environ(), "BE_ISER_TARGET=1")
	p := &process{cmd: cmd, output: &lockedBuffer{added: make(chan struct{}, 1)}}
	cmd.Stdout, cmd.Stderr = p.output, p.output
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		if t.Failed() {
			t.Logf("%v has written:\n%s%s", cmd.Args, p.output.all.String(), p.output.rest)
		}
	})
	return p
}

// login logs in to a target, storeName unless o says another.
func login(t *testing.T, addr string, o initiator.Options) *initiator.Session {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if o.Target == "" {
		o.Target = storeName
	}
	s, err := initiator.Login(ctx, addr, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// wait waits for a line of the output that matches expr, and returns its last group.
func (p *process) wait(t *testing.T, expr string) string {
	t.Helper()
	re := regexp.MustCompile(expr)
	for {
		for line, ok := p.output.next(); ok; line, ok = p.output.next() {
			if m := re.FindStringSubmatch(line); m != nil {
				return m[len(m)-1]
			}
		}
		select {
		case <-p.output.added:
		case <-time.After(20 * time.Second):
			t.Fatalf("no %q:\n%s", expr, p.output.all.String())
		}
	}
}

// SIGTERM ends the program with exit code 0, even with a session.
func TestServeEndsWithSIGTERM(t *testing.T) {
	dir := t.TempDir()
	disk := filepath.Join(dir, "disk.img")
	p := launch(t, exec.Command(executable(t), "serve", "--config", write(t, "c.yaml", fmt.Sprintf(`
state_dir: %s/state
drain: 1s
portals: [{listen: "127.0.0.1:0"}]
debug: {listen: "127.0.0.1:0"}
targets:
  - name: iqn.2026-11.io.example:store
    initiators: ["iqn.2026-11.io.github.*"]
    luns: [{id: 0, backend: file, path: %s, size: 8MiB}]
`, dir, disk))))
	url := p.wait(t, `msg="debug server" url=(\S+)`)
	p.addr = p.wait(t, `msg=serving portal=(\S+)`)

	s := login(t, p.addr, initiator.Options{})
	want := bytes.Repeat([]byte("0123456789abcdef"), 256)
	w := &initiator.Command{CDB: cdb.Write16(8, 8), Out: want}
	for w.Status = 2; w.Status != 0; { // the first meets a unit attention
		if err := s.Do(w); err != nil {
			t.Fatal(err)
		}
	}

	rsp, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer rsp.Body.Close()
	var vars struct {
		Target map[string]int64 `json:"iser_target"`
	}
	if err := json.NewDecoder(rsp.Body).Decode(&vars); err != nil || vars.Target["sessions"] != 1 || vars.Target["goroutines"] < 2 {
		t.Errorf("debug server: %v, %v", vars, err)
	}

	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	p.wait(t, `(msg=stopped)`)
	if err := p.cmd.Wait(); err != nil {
		t.Errorf("exit: %v\n%s", err, p.output.all.String())
	}
	if got, err := os.ReadFile(disk); err != nil || len(got) != 8<<20 || !bytes.Equal(got[4096:8192], want) {
		t.Errorf("the file has %d bytes, %v", len(got), err)
	}
}

// tcpLogin sends a Login Request over plain TCP and returns the status of the
// answer, or an error if the connection ends without one.
func tcpLogin(addr, target string) (pdu.LoginStatus, error) {
	nc, err := net.Dial("tcp", addr)
	if err != nil {
		return 0, err
	}
	defer nc.Close()
	nc.SetDeadline(time.Now().Add(20 * time.Second))
	text := []byte("InitiatorName=iqn.2026-11.io.github.iser-target:initiator\x00TargetName=" + target + "\x00SessionType=Normal\x00")
	bhs := pdu.BHS(pdu.LoginRequest{Transit: true, CSG: pdu.LoginOperationalNegotiation, NSG: pdu.FullFeaturePhase, ISID: [6]byte{0, 2, 0x3d}, CmdSN: 1}.Append(nil))
	bhs.SetDataSegmentLength(len(text))
	if _, err := nc.Write(append(bhs, append(text, make([]byte, pdu.Padded(len(text))-len(text))...)...)); err != nil {
		return 0, err
	}
	var rsp [48]byte
	if _, err := io.ReadFull(nc, rsp[:]); err != nil {
		return 0, err
	}
	return pdu.ParseLoginResponse(rsp[:]).Status, nil
}

// One port serves both transports, and a portal can be restricted to one.
func TestPortalServesItsTransports(t *testing.T) {
	p := start(t, "serve", "--config", write(t, "c.yaml", `
state_dir: ""
portals: [{listen: "127.0.0.1:0"}, {listen: "127.0.0.2:0", transports: [iser]}, {listen: "127.0.0.3:0", transports: [tcp]}]
targets:
  - name: iqn.2026-11.io.example:store
    initiators: ["*"]
    luns: [{id: 0, backend: memory, size: 1MiB}]
`))
	addrs := []string{p.addr, p.wait(t, `msg=serving portal=(\S+)`), p.wait(t, `msg=serving portal=(\S+)`)}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	for i, serves := range []struct{ iser, tcp bool }{{true, true}, {true, false}, {false, true}} {
		s, err := initiator.Login(ctx, addrs[i], initiator.Options{Target: "iqn.2026-11.io.example:store"})
		if (err == nil) != serves.iser {
			t.Errorf("portal %d: login over iser: %v", i, err)
		}
		if err == nil {
			p.wait(t, `(msg=login transport=iser .*outcome=accepted)`)
			s.Close()
		} else {
			p.wait(t, `(msg=login .*outcome=refused stage=portal .*the initiator speaks iser)`)
		}
		status, err := tcpLogin(addrs[i], "iqn.2026-11.io.example:store")
		if (err == nil) != serves.tcp || status != 0 {
			t.Errorf("portal %d: login over tcp: %v, status %v", i, err, status)
		}
		if serves.tcp {
			p.wait(t, `(msg=login transport=tcp .*outcome=accepted)`)
		} else {
			p.wait(t, `(msg=login .*outcome=refused stage=portal .*the initiator speaks tcp)`)
		}
		// ISER-4.1-9, ISER-6.3-2: a login on the byte stream ends in iSER where both
		// are served.
		s, err = initiator.Login(ctx, addrs[i], initiator.Options{Target: "iqn.2026-11.io.example:store", ISID: [6]byte{7}, Stream: true, Hello: true})
		if both := serves.iser && serves.tcp; (err == nil) != both {
			t.Errorf("portal %d: login on the byte stream: %v", i, err)
		}
		switch {
		case err == nil:
			p.wait(t, `(msg=login transport=iser .*outcome=accepted .*isid=070000000000)`)
			if err := s.Do(&initiator.Command{CDB: cdb.Read16(0, 1), In: make([]byte, 512)}); err != nil {
				t.Error(err)
			}
			s.Close()
		case serves.tcp:
			if !strings.Contains(err.Error(), "RDMAExtensions=No") {
				t.Errorf("portal %d: %v", i, err)
			}
			p.wait(t, `(msg=login transport=tcp .*outcome=accepted .*isid=070000000000)`)
		}
	}
}

// ISCSI-8.1.4-2: login_timeout counts from the first SYN to the full feature phase,
// whatever the initiator sends meanwhile.
func TestLoginTimeoutCountsFromTheConnection(t *testing.T) {
	p := start(t, "serve", "--config", write(t, "c.yaml", `
state_dir: ""
portals: [{listen: "127.0.0.1:0"}]
limits: {login_timeout: 1s}
targets: [{name: "iqn.2026-11.io.example:store", initiators: ["*"], luns: [{id: 0, backend: memory, size: 1MiB}]}]
`))
	ended := func() time.Duration {
		begin := time.Now()
		nc, err := net.Dial("tcp", p.addr)
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		time.Sleep(500 * time.Millisecond) // of login_timeout
		nc.Write([]byte("M"))
		time.Sleep(300 * time.Millisecond) // of login_timeout
		nc.Write([]byte("PA ID Req Frame\x50\x02\x00\x08\x00\x80\x00\x01\x80\x00\x00\x00"))
		io.Copy(io.Discard, nc)
		return time.Since(begin)
	}
	for try := 1; ; try++ {
		d := ended()
		if d < 950*time.Millisecond {
			t.Fatalf("the connection ended after %v", d)
		}
		if d < 1500*time.Millisecond { // that is a second from the first byte
			break
		}
		if try == 5 { // a busy machine can be late, but not always
			t.Fatalf("the connection ended after %v", d)
		}
	}
	p.wait(t, `(msg=login .*outcome=refused .*timeout)`)
}

// Every connection attempt is logged on one line with its outcome and reason.
func TestRefusalsAreLogged(t *testing.T) {
	p := start(t, "serve", "--config", write(t, "c.yaml", `
state_dir: ""
portals: [{listen: "127.0.0.1:0"}]
targets:
  - name: iqn.2026-11.io.example:store
    initiators: ["iqn.1993-08.org.debian:*"]
    luns: [{id: 0, backend: memory, size: 1MiB}]
`))
	send := func(text string) {
		nc, err := net.Dial("tcp", p.addr)
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		nc.Write([]byte(text))
		nc.(*net.TCPConn).CloseWrite()
		io.Copy(io.Discard, nc)
	}
	send("")
	p.wait(t, `(msg=login .*outcome=refused stage="first byte" .*the initiator sent nothing)`)
	send("GET / HTTP/1.1\r\nHost: nobody\r\n\r\n")
	p.wait(t, `(msg=login .*outcome=refused stage="first byte" .*neither an MPA Request)`)
	send("MPA ID Rep Frame\x00\x01\x00\x00")
	p.wait(t, `(msg=login .*outcome=refused stage=mpa .*MPA Reply where a Request is due)`)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	for _, tt := range []struct{ target, want string }{
		{"iqn.2026-11.io.example:store", `outcome=refused stage=operational reason=.*initiator=iqn.2026-11.io.github`},
		{"iqn.2026-11.io.example:other", `outcome=refused stage=operational reason=.*target=iqn.2026-11.io.example:other`},
	} {
		if _, err := initiator.Login(ctx, p.addr, initiator.Options{Target: tt.target}); err == nil {
			t.Fatalf("login to %s was accepted", tt.target)
		}
		p.wait(t, `(`+tt.want+`)`)
	}
}

// A LUN keeps its identity over restarts. An emptied file is another disk.
func TestLUNKeepsItsIdentity(t *testing.T) {
	dir := t.TempDir()
	disk := filepath.Join(dir, "disk.img")
	cfg := write(t, "c.yaml", fmt.Sprintf(`
state_dir: %s/state
portals: [{listen: "127.0.0.1:0"}]
targets:
  - name: iqn.2026-11.io.example:store
    initiators: ["*"]
    luns: [{id: 0, backend: file, path: %s, size: 1MiB}, {id: 1, backend: memory, size: 1MiB}]
`, dir, disk))
	serials := func() (s [2]string) {
		t.Helper()
		p := start(t, "serve", "--config", cfg)
		ini := login(t, p.addr, initiator.Options{})
		for lun := range s {
			c := &initiator.Command{LUN: byte(lun), In: make([]byte, 64), CDB: [16]byte{0x12, 1, 0x80, 0, 64}}
			if err := ini.Do(c); err != nil || c.Status != 0 {
				t.Fatalf("INQUIRY: %v, status %#x", err, c.Status)
			}
			s[lun] = string(c.In[4 : 4+c.In[3]])
		}
		ini.Close()
		p.cmd.Process.Kill() // identities survive that
		p.cmd.Wait()
		return s
	}
	first, second := serials(), serials()
	if first != second || first[0] == first[1] || len(first[0]) != 16 {
		t.Errorf("serials %q, after a restart %q", first, second)
	}
	if err := os.Truncate(disk, 0); err != nil {
		t.Fatal(err)
	}
	if third := serials(); third[0] == first[0] || third[1] != first[1] {
		t.Errorf("serials %q; with an empty file %q", first, third)
	}
}

// A LUN with a gotgt backend reads, writes and syncs.
func TestLUNOfGotgt(t *testing.T) {
	disk := write(t, "disk.img", string(make([]byte, 1<<20)))
	p := start(t, "serve", "--config", write(t, "c.yaml", `
state_dir: `+t.TempDir()+`
portals: [{listen: "127.0.0.1:0"}]
targets:
  - name: iqn.2026-11.io.example:store
    initiators: ["*"]
    luns: [{id: 7, backend: gotgt, plugin: file, path: `+disk+`}]
`))
	s := login(t, p.addr, initiator.Options{})
	want := bytes.Repeat([]byte("gotgt!"), 2048)[:8192]
	w := &initiator.Command{LUN: 7, CDB: cdb.Write16(16, 16), Out: want}
	for w.Status = 2; w.Status != 0; { // the first meets a unit attention
		if err := s.Do(w); err != nil {
			t.Fatal(err)
		}
	}
	sync := &initiator.Command{LUN: 7, CDB: [16]byte{0x35}}
	r := &initiator.Command{LUN: 7, CDB: cdb.Read16(16, 16), In: make([]byte, len(want))}
	for _, c := range []*initiator.Command{sync, r} {
		if err := s.Do(c); err != nil || c.Status != 0 {
			t.Fatalf("CDB %x: %v, status %#x", c.CDB, err, c.Status)
		}
	}
	if onDisk, err := os.ReadFile(disk); err != nil || !bytes.Equal(r.In, want) || !bytes.Equal(onDisk[8192:][:len(want)], want) {
		t.Errorf("what was written is not what is read, or not in the file: %v", err)
	}
}

// status executes a command, again after each unit attention, and returns its status.
func status(t *testing.T, s *initiator.Session, c *initiator.Command) byte {
	t.Helper()
	for range 8 {
		if err := s.Do(c); err != nil {
			t.Fatal(err)
		}
		if c.Status != 2 || c.Sense[2]&0x0f != 6 {
			break
		}
	}
	return c.Status
}

// prOut returns PERSISTENT RESERVE OUT with a service action, type, keys and APTPL.
func prOut(sa, typ byte, key, saKey uint64, aptpl byte) *initiator.Command {
	c := &initiator.Command{}
	c.CDB, c.Out = cdb.PersistentReserveOut(sa, typ, key, saKey, aptpl)
	return c
}

// A persistent reservation with APTPL survives kill -9, and another initiator
// can preempt it and abort the commands of its holder.
func TestReservationSurvivesKill(t *testing.T) {
	cfg := write(t, "c.yaml", `
state_dir: `+t.TempDir()+`
portals: [{listen: "127.0.0.1:0"}]
targets:
  - name: iqn.2026-11.io.example:store
    initiators: ["*"]
    luns: [{id: 0, backend: memory, size: 1MiB}]
`)
	login := func(p *process, n byte) *initiator.Session {
		t.Helper()
		return login(t, p.addr, initiator.Options{Name: fmt.Sprintf("iqn.2026-11.io.github.iser-target:%d", n), ISID: [6]byte{0, 2, 0x3d, 0, 0, n}})
	}
	write := func() *initiator.Command {
		return &initiator.Command{CDB: cdb.Write16(0, 1), Out: make([]byte, 512)}
	}

	p := start(t, "serve", "--config", cfg)
	a := login(p, 1)
	if st := status(t, a, prOut(cdb.Register, 0, 0, 0xaaaa, 1)); st != 0 {
		t.Fatalf("REGISTER: status %#x", st)
	}
	if st := status(t, a, prOut(cdb.Reserve, cdb.ExclusiveAccess, 0xaaaa, 0, 0)); st != 0 {
		t.Fatalf("RESERVE: status %#x", st)
	}
	p.cmd.Process.Kill()
	p.cmd.Wait()

	p = start(t, "serve", "--config", cfg)
	a, b := login(p, 1), login(p, 2)
	const conflict = 0x18
	if st := status(t, b, write()); st != conflict {
		t.Errorf("WRITE of another initiator after the restart: status %#x, want RESERVATION CONFLICT", st)
	}
	if st := status(t, a, write()); st != 0 {
		t.Errorf("WRITE of the holder after the restart: status %#x", st)
	}
	if st := status(t, b, prOut(cdb.Register, 0, 0, 0xbbbb, 1)); st != 0 {
		t.Fatalf("REGISTER: status %#x", st)
	}
	if st := status(t, b, prOut(cdb.PreemptAndAbort, cdb.ExclusiveAccess, 0xbbbb, 0xaaaa, 0)); st != 0 {
		t.Fatalf("PREEMPT AND ABORT: status %#x", st)
	}
	if sa, sb := status(t, a, write()), status(t, b, write()); sa != conflict || sb != 0 {
		t.Errorf("after PREEMPT AND ABORT: WRITE of the old holder has status %#x, of the new one %#x", sa, sb)
	}
}
