package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
	"github.com/iser-target/iser-target/tests/testkit/etcdserver"
	"github.com/iser-target/iser-target/tests/testkit/rbdfake"
)

// How long nobody may answer when a LUN moves. Without other load it is 0.5 s, and the lease and 1 s; see docs/cluster.md.
const (
	planned   = 10 * time.Second
	unplanned = 40 * time.Second
)

// A cable leads to a server, until it is cut: then nothing passes, and nothing is closed.
type cable struct {
	l  net.Listener
	to string

	mu  sync.Mutex
	cut bool
	end chan struct{} // closed when it is mended
}

func newCable(t *testing.T, to string) *cable {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &cable{l: l, to: to, end: make(chan struct{})}
	close(c.end)
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			near, err := l.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("tcp", c.to)
			if err != nil {
				near.Close()
				continue
			}
			go c.carry(near, far)
			go c.carry(far, near)
		}
	}()
	return c
}

func (c *cable) carry(to, from net.Conn) {
	defer to.Close()
	b := make([]byte, 32<<10)
	for {
		n, err := from.Read(b)
		c.mu.Lock()
		end := c.end
		c.mu.Unlock()
		<-end
		if n > 0 {
			if _, err := to.Write(b[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

func (c *cable) set(cut bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case cut && !c.cut:
		c.end = make(chan struct{})
	case !cut && c.cut:
		close(c.end)
	}
	c.cut = cut
}

// A path is the way of the witness to a gateway.
type path struct {
	name string
	mu   sync.Mutex
	addr string
}

func (p *path) set(addr string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.addr = addr
}

// A witness writes a counter to a LUN that gateways share, and reads it, through all of their paths all the time. It checks that each
// answer is right, and that no gateway answers a command that was sent after the next owner has answered.
type witness struct {
	t    *testing.T
	stop chan struct{}
	done sync.WaitGroup

	mu      sync.Mutex
	acked   uint64 // the last counter that was answered
	sent    uint64 // the last one that was sent
	owner   string // who answered last
	since   time.Time
	owners  int // how often that has changed
	last    time.Time
	longest time.Duration // between two answers to writes
}

// watch begins to use the paths until the test ends.
func watch(t *testing.T, paths ...*path) *witness {
	w := &witness{t: t, stop: make(chan struct{}), last: time.Now()}
	for _, p := range paths {
		w.done.Go(func() { w.use(p, w.write) })
		w.done.Go(func() { w.use(p, w.read) })
	}
	t.Cleanup(func() {
		close(w.stop)
		w.done.Wait()
	})
	return w
}

// use logs in again and again, and does one command after the other.
func (w *witness) use(p *path, do func(*path, *initiator.Session) error) {
	for {
		p.mu.Lock()
		addr := p.addr
		p.mu.Unlock()
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		s, err := initiator.Login(ctx, addr, initiator.Options{Name: hostName, Target: storeName})
		cancel()
		for err == nil {
			select {
			case <-w.stop:
				s.Close()
				return
			default:
			}
			err = do(p, s)
		}
		if s != nil {
			s.Close()
		}
		select {
		case <-w.stop:
			return
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// answered notes a good answer to a command that was sent at begun. The lock is held.
func (w *witness) answered(p *path, begun time.Time) {
	switch {
	case w.owner == p.name:
	case begun.Before(w.since) && w.owner != "": // it was on its way when the next owner answered
	default:
		w.owner, w.since = p.name, time.Now()
		w.owners++
	}
}

// command runs a command within a time. A path that does not answer is left.
func command(s *initiator.Session, c *initiator.Command) error {
	stop := time.AfterFunc(3*time.Second, func() { s.Close() })
	defer stop.Stop()
	return s.Do(c)
}

// good reports whether a command was successful. It requires the sense data of a path that is not the active one.
func (w *witness) good(p *path, c *initiator.Command) bool {
	if c.Status == 0 {
		return true
	}
	if c.Status == 0x08 { // BUSY: a command has waited for so long that the store counts as hung
		time.Sleep(10 * time.Millisecond)
		return false
	}
	sense := fmt.Sprintf("%x/%02x/%02x", c.Sense[2], c.Sense[12], c.Sense[13])
	switch {
	case strings.HasPrefix(sense, "6/"), sense == "2/04/0a", sense == "2/04/0b", sense == "2/04/01":
	default:
		w.t.Errorf("gateway %s answers %s", p.name, sense)
	}
	time.Sleep(2 * time.Millisecond)
	return false
}

func (w *witness) write(p *path, s *initiator.Session) error {
	w.mu.Lock()
	mine := w.owner == p.name || w.owner == "" || time.Since(w.last) > 50*time.Millisecond
	if !mine { // one writer at a time, so that the counter only grows
		w.mu.Unlock()
		time.Sleep(5 * time.Millisecond)
		return nil
	}
	w.sent++
	n := w.sent
	w.mu.Unlock()
	c := &initiator.Command{LUN: 1, CDB: cdb.Write16(n%64, 1), Out: make([]byte, 512)}
	binary.BigEndian.PutUint64(c.Out, n)
	begun := time.Now()
	if err := command(s, c); err != nil {
		return err
	}
	if !w.good(p, c) {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.answered(p, begun)
	w.acked = max(w.acked, n)
	now := time.Now()
	w.longest = max(w.longest, now.Sub(w.last))
	w.last = now
	return nil
}

func (w *witness) read(p *path, s *initiator.Session) error {
	w.mu.Lock()
	acked := w.acked
	w.mu.Unlock()
	c := &initiator.Command{LUN: 1, CDB: cdb.Read16(acked%64, 1), In: make([]byte, 512)}
	begun := time.Now()
	if err := command(s, c); err != nil {
		return err
	}
	if !w.good(p, c) {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.answered(p, begun)
	if got := binary.BigEndian.Uint64(c.In); got < acked || got > w.sent {
		w.t.Errorf("gateway %s reads %d, and %d was written", p.name, got, acked)
	}
	return nil
}

// fresh begins to measure.
func (w *witness) fresh() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.longest, w.owners = 0, 0
}

// moved waits until a gateway answers, and checks that it took over once, and how long nobody answered.
func (w *witness) moved(what, to string, limit time.Duration) {
	w.t.Helper()
	testkit.Eventually(w.t, what+": gateway "+to+" answers", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.owner == to && time.Since(w.last) < 100*time.Millisecond
	})
	time.Sleep(300 * time.Millisecond)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.t.Logf("%s: nobody answered for %v", what, w.longest)
	if w.owners != 1 {
		w.t.Errorf("%s: the gateways answered in turn, %d changes", what, w.owners)
	}
	if w.longest > limit {
		w.t.Errorf("%s: nobody answered for %v, more than %v", what, w.longest, limit)
	}
}

// discover returns the answer to SendTargets=All, as texts KEY=VALUE.
func discover(t *testing.T, addr string) (found []string) {
	t.Helper()
	d, err := initiator.Dial(t.Context(), "tcp", addr, initiator.Options{Name: hostName})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	err = d.LogIn(nil)
	pairs, err2 := d.SendTargets("All")
	if err != nil || err2 != nil {
		t.Fatalf("discovery: %v, %v", err, err2)
	}
	for _, p := range pairs {
		found = append(found, p.Key+"="+p.Value)
	}
	return found
}

// useOwn writes and reads LUN 0 of a gateway, which is its own, by a session, until stop. stop checks that each answer was right, and how long the longest took.
func useOwn(t *testing.T, what string, s *station) (stop func()) {
	t.Helper()
	session := login(t, s.addr, initiator.Options{Name: hostName + "-neighbor"})
	outcome(t, session, &initiator.Command{CDB: cdb.TestUnitReady}) // UNIT ATTENTION
	end, done := make(chan struct{}), make(chan struct{})
	var longest time.Duration
	n := uint64(0)
	go func() {
		defer close(done)
		for {
			select {
			case <-end:
				return
			case <-time.After(5 * time.Millisecond):
			}
			n++
			w := &initiator.Command{CDB: cdb.Write16(n%64, 1), Out: binary.BigEndian.AppendUint64(make([]byte, 504), n)}
			r := &initiator.Command{CDB: w.CDB, In: make([]byte, 512)}
			r.CDB[0] = 0x88 // READ(16)
			for _, c := range []*initiator.Command{w, r} {
				begun := time.Now()
				err := session.Do(c)
				for err == nil && c.Status == 2 && c.Sense[12] == 0x3f && c.Sense[13] == 0x0e { // REPORTED LUNS DATA HAS CHANGED: it was not executed
					err = session.Do(c)
				}
				if err != nil || c.Status != 0 {
					t.Errorf("%s, command %d of the neighbor: %v, status %#x, sense % x", what, n, err, c.Status, c.Sense)
					return
				}
				longest = max(longest, time.Since(begun))
			}
			if !bytes.Equal(r.In, w.Out) {
				t.Errorf("%s: the neighbor reads something else than it has written", what)
				return
			}
		}
	}()
	return func() {
		t.Helper()
		close(end)
		<-done
		session.Close()
		t.Logf("%s: the longest of %d commands of the neighbor took %v", what, 2*n, longest)
		if longest > 2*time.Second || n == 0 {
			t.Errorf("%s: of %d commands of the neighbor, one took %v", what, 2*n, longest)
		}
	}
}

// startGateway starts a gateway of a cluster with LUN 1 on an image of rbdfake, and a LUN 0 of its own.
func startGateway(t *testing.T, name string, tag int, etcd, lease string, edits ...func(string) string) *station {
	t.Helper()
	s := &station{dir: t.TempDir()}
	s.configure(t, func(text string) string {
		text = strings.Replace(text, `{listen: "127.0.0.1:0"}`, fmt.Sprintf(`{listen: "127.0.0.1:0", tpgt: %d}`, tag), 1)
		text = strings.Replace(text, "size: 1MiB}]", "size: 1MiB}, {id: 1, backend: rbd, path: 'rbd:p/disk', size: 1MiB, shared: true, naa: \"3000000000000001\"}]", 1)
		for _, edit := range edits {
			text = edit(text)
		}
		return text + fmt.Sprintf("cluster: {name: %s, etcd: [%q], lease: %s, failback: 1h}\n", name, etcd, lease)
	})
	s.startProgram(t, executable(t))
	return s
}

// Two gateways in processes of their own share an image. The owner hands over, ends, is killed, hangs, and loses etcd. Each time the other
// one takes over in time. Nothing that was answered is lost, and no gateway answers after the next one has. A LUN that is not shared is
// served all the time.
func TestClusterOfProcesses(t *testing.T) {
	images := rbdfake.Install(t, "p")
	member := etcdserver.Start(t, 1)[0]
	endpoint, err := url.Parse(member.Endpoint())
	if err != nil {
		t.Fatal(err)
	}
	wire := newCable(t, endpoint.Host)
	a := startGateway(t, "a", 1, "http://"+wire.l.Addr().String(), "6s")
	b := startGateway(t, "b", 2, member.Endpoint(), "6s")
	pa, pb := &path{name: "a", addr: a.addr}, &path{name: "b", addr: b.addr}
	testkit.Eventually(t, "the gateways know each other", func() bool {
		st := read[schema.ClusterState](t, b, "cluster", "status")
		return len(st.Gateways) == 2 && st.LUNs[0].Owner != ""
	})
	testkit.Eventually(t, "discovery through a gateway names the portals of both", func() bool {
		found := discover(t, b.addr)
		return slices.Equal(found, []string{"TargetName=" + storeName, "TargetAddress=" + b.addr + ",2", "TargetAddress=" + a.addr + ",1"})
	})
	a.ok(t, "cluster", "handover", "1", "a")
	w := watch(t, pa, pb)
	both := func(what string) {
		testkit.Eventually(t, what+": both gateways are there", func() bool {
			for _, s := range []*station{a, b} { // one that was killed is there for the others until its lease is over
				var st schema.ClusterState
				out, _, code := s.run(t, "cluster", "status", "-o", "json")
				if code != cli.ExitOK || json.Unmarshal([]byte(out), &st) != nil || len(st.Gateways) != 2 || st.Reason != "" {
					return false
				}
			}
			return true
		})
	}
	back := func(what string) {
		a.startProgram(t, executable(t))
		pa.set(a.addr)
		both(what)
		w.fresh()
		a.ok(t, "cluster", "handover", "1", "a")
		w.moved(what, "a", planned)
	}
	testkit.Eventually(t, "the owner answers", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.owner == "a" && w.acked > 0
	})

	defer useOwn(t, "all the time", b)()
	w.fresh()
	a.says(t, cli.ExitOK, "LUN 1 of "+storeName+" is served by b", "cluster", "handover", "1", "b")
	w.moved("hand-over", "b", planned)
	a.says(t, cli.ExitRefused, "is not there", "cluster", "handover", "1", "c")
	a.says(t, cli.ExitRefused, "is not shared", "cluster", "handover", "0", "b")
	a.says(t, cli.ExitOK, "spread evenly", "cluster", "balance", "--dry-run")
	a.says(t, cli.ExitOK, "served by b, as chosen: b", "cluster", "status")

	w.fresh()
	a.ok(t, "cluster", "handover", "1", "a")
	w.moved("hand-over back", "a", planned)

	a.ok(t, "lun", "resize", storeName, "1", "2MiB")
	testkit.Eventually(t, "both gateways know the new size", func() bool {
		size := func(s *station) int64 { return read[schema.LUNState](t, s, "lun", "show", storeName, "1").Size }
		return size(a) == 2<<20 && size(b) == 2<<20
	})
	b.says(t, cli.ExitRefused, "ask the gateway that serves the LUN", "lun", "resize", storeName, "1", "3MiB")

	// LUNs come and go at run time. The first gateway creates the image, and what one gateway deletes the other one serves.
	create := []string{"lun", "create", storeName, "--id", "2", "--backend", "rbd", "--path", "rbd:p/second", "--size", "1MiB", "--shared", "--naa", "3000000000000002"}
	owner := func(s *station, lun int) string {
		for _, l := range read[schema.ClusterState](t, s, "cluster", "status").LUNs {
			if l.ID == lun {
				return l.Owner
			}
		}
		return "not shared"
	}
	a.ok(t, create...)
	b.ok(t, create...)
	testkit.Eventually(t, "both gateways know the owner of the new LUN", func() bool { return owner(a, 2) != "" && owner(a, 2) == owner(b, 2) })
	a.ok(t, "lun", "delete", storeName, "2", "--disrupt")
	testkit.Eventually(t, "the other gateway serves it", func() bool { return owner(a, 2) == "not shared" && owner(b, 2) == "b" })
	b.ok(t, "lun", "delete", storeName, "2", "--disrupt")

	w.fresh()
	if err := a.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	w.moved("SIGTERM", "b", planned)
	a.cmd.Wait()
	back("restart after SIGTERM")

	text := func(want string) func() bool {
		return func() bool {
			list := read[schema.LUNState](t, b, "lun", "show", storeName, "1").Settings
			return slices.ContainsFunc(list, func(s schema.SettingState) bool { return s.Setting == "identifying_text" && s.Saved == want })
		}
	}
	set := &initiator.Command{LUN: 1, Out: []byte("of a\x00"), CDB: [16]byte{0: 0xa4, 1: 0x06, 9: 5, 10: 2 << 1}} // SET IDENTIFYING INFORMATION
	s := login(t, a.addr, initiator.Options{Name: hostName + "2"})
	testkit.Eventually(t, "the text is set through the owner", func() bool { return command(s, set) == nil && set.Status == 0 })
	s.Close()
	w.fresh()
	if err := a.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	w.moved("kill -9", "b", unplanned)
	testkit.Eventually(t, "the text survives its gateway", text("of a"))
	a.cmd.Wait()
	back("restart after kill -9")

	w.fresh()
	frozen := append(rbdDaemons(t, images, "p+disk"), a.cmd.Process.Pid)
	for _, pid := range frozen {
		if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
	}
	w.moved("frozen", "b", unplanned)
	for _, pid := range frozen {
		if err := syscall.Kill(pid, syscall.SIGCONT); err != nil && err != syscall.ESRCH { // the daemon was fenced
			t.Fatal(err)
		}
	}
	time.Sleep(time.Second)
	w.moved("thawed", "b", unplanned)
	both("thawed")
	w.fresh()
	a.ok(t, "cluster", "handover", "1", "a")
	w.moved("hand-over to the thawed gateway", "a", planned)

	w.fresh()
	stop := useOwn(t, "cut off from etcd", a)
	wire.set(true)
	w.moved("cut off from etcd", "b", unplanned)
	stop()
	wire.set(false)
	both("mended")
	w.fresh()
	b.ok(t, "cluster", "handover", "1", "a")
	w.moved("hand-over before an upgrade", "a", planned)
	w.fresh()
	a.ok(t, "upgrade")
	w.moved("upgrade", "b", planned)
	both("upgrade")
	w.fresh()
	b.ok(t, "cluster", "handover", "1", "a")
	w.moved("hand-over after an upgrade", "a", planned)
	b.says(t, cli.ExitOK, "2 gateways, and shared LUNs 1", "doctor")
	if left, err := filepath.Glob(filepath.Join(images, ".locks", "*")); err != nil || len(left) != 1 {
		t.Errorf("locks: %v, %v", left, err)
	}
}

// A SANITIZE whose gateway is killed is continued by the one that takes over. What initiators write after its end stays, also when the first
// gateway is back. A LUN that is not shared is served all the time.
func TestClusterSanitize(t *testing.T) {
	rbdfake.Install(t, "p")
	member := etcdserver.Start(t, 1)[0]
	const size = 32 << 20
	edit := func(text string) string {
		return strings.Replace(text, "size: 1MiB, shared: true", "size: 32MiB, sanitize: true, shared: true", 1)
	}
	a, b := startGateway(t, "a", 1, member.Endpoint(), "6s", edit), startGateway(t, "b", 2, member.Endpoint(), "6s", edit)
	owner := func(s *station, want string) {
		t.Helper()
		testkit.Eventually(t, want+" serves the LUN", func() bool {
			st := read[schema.ClusterState](t, s, "cluster", "status")
			return len(st.LUNs) == 1 && st.LUNs[0].Owner == want && len(st.Gateways) == 2
		})
	}
	testkit.Eventually(t, "both gateways are there", func() bool { return len(read[schema.ClusterState](t, a, "cluster", "status").Gateways) == 2 })
	a.ok(t, "cluster", "handover", "1", "a")
	owner(b, "a")
	// on runs a command on LUN 1 through a gateway until it has an answer other than UNIT ATTENTION and those of a LUN that moves.
	on := func(s *station, c *initiator.Command) string {
		t.Helper()
		session := login(t, s.addr, initiator.Options{Name: hostName})
		defer session.Close()
		c.LUN = 1
		sense := ""
		testkit.Eventually(t, "an answer", func() bool {
			if err := command(session, c); err != nil {
				t.Fatal(err)
			}
			sense = ""
			if c.Status != 0 {
				sense = fmt.Sprintf("%x/%02x/%02x", c.Sense[2], c.Sense[12], c.Sense[13])
			}
			return !strings.HasPrefix(sense, "6/") && !slices.Contains([]string{"2/04/01", "2/04/0a", "2/04/0b"}, sense)
		})
		return sense
	}
	const inProgress = "2/04/1b"
	text := []byte("written before")
	if sense := on(a, &initiator.Command{CDB: cdb.Write16(size/512-1, 1), Out: append(text, make([]byte, 512-len(text))...)}); sense != "" {
		t.Fatalf("WRITE: %s", sense)
	}
	defer useOwn(t, "all the time", b)()
	// OVERWRITE, 31 passes, IMMED: several seconds.
	list := []byte{31, 0, 0, 1, 0x5a}
	if sense := on(a, &initiator.Command{CDB: [16]byte{0: 0x48, 1: 0x81, 8: byte(len(list))}, Out: list}); sense != "" {
		t.Fatalf("SANITIZE: %s", sense)
	}
	if sense := on(a, &initiator.Command{CDB: cdb.TestUnitReady}); sense != inProgress {
		t.Fatalf("TEST UNIT READY says %q, so the SANITIZE was too fast for the test", sense)
	}
	if err := a.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	a.cmd.Wait()
	if sense := on(b, &initiator.Command{CDB: cdb.TestUnitReady}); sense != inProgress {
		t.Errorf("TEST UNIT READY at the next gateway says %q, want SANITIZE IN PROGRESS", sense)
	}
	b.says(t, cli.ExitOK, "sanitize in progress", "lun", "list", storeName)
	testkit.Eventually(t, "the SANITIZE ends", func() bool { return on(b, &initiator.Command{CDB: cdb.TestUnitReady}) != inProgress })
	check := func(what string, s *station, want []byte) {
		t.Helper()
		c := &initiator.Command{CDB: cdb.Read16(size/512-1, 1), In: make([]byte, 512)}
		if sense := on(s, c); sense != "" || !bytes.Equal(c.In, want) {
			t.Errorf("%s: %s, and the block begins with % x, want % x", what, sense, c.In[:8], want[:8])
		}
	}
	check("after the SANITIZE", b, bytes.Repeat([]byte{0x5a}, 512))
	text = bytes.Repeat([]byte("after "), 86)[:512]
	if sense := on(b, &initiator.Command{CDB: cdb.Write16(size/512-1, 1), Out: text}); sense != "" {
		t.Fatalf("WRITE: %s", sense)
	}
	a.startProgram(t, executable(t))
	owner(b, "b")
	b.ok(t, "cluster", "handover", "1", "a")
	owner(b, "a")
	check("at the first gateway", a, text)
	b.ok(t, "cluster", "handover", "1", "b")
	check("at the second gateway", b, text)
}
