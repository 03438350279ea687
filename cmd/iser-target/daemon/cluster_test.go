package daemon

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/owner"
	"github.com/iser-target/iser-target/lun/state/etcd"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
	"github.com/iser-target/iser-target/tests/testkit/etcdserver"
)

// A sharedDisk is a medium that gateways reach. It checks that one of them has it open at a time.
type sharedDisk struct {
	backend.Store
	t *testing.T

	mu    sync.Mutex
	open  *diskHead
	fails atomic.Bool // the next sync fails, and later ones of that diskHead
}

// newSharedDisk returns a disk of 4 MiB.
func newSharedDisk(t *testing.T) *sharedDisk {
	t.Helper()
	memory, err := backend.OpenMemory(backend.MemoryConfig{Size: 4 << 20, BlockSize: 512})
	if err != nil {
		t.Fatal(err)
	}
	return &sharedDisk{Store: memory, t: t}
}

// A diskHead is the disk as one gateway has opened it.
type diskHead struct {
	backend.Store
	disk   *sharedDisk
	failed atomic.Bool
}

func (h *diskHead) Sync() error {
	if h.disk.fails.Swap(false) {
		h.failed.Store(true)
		return errSync
	}
	if h.failed.Load() {
		return backend.ErrUnsynced
	}
	return h.Store.Sync()
}

func (h *diskHead) SyncFailed() bool { return h.failed.Load() }

func (h *diskHead) Close() error {
	h.disk.mu.Lock()
	defer h.disk.mu.Unlock()
	if h.disk.open == h {
		h.disk.open = nil
	}
	return nil
}

func (d *sharedDisk) openFor(*config.LUN) (backend.Store, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.open != nil {
		d.t.Error("two gateways have the disk open")
	}
	d.open = &diskHead{Store: d.Store, disk: d}
	return d.open, nil
}

// newGateway starts a gateway with LUN 1, which it shares, and a LUN of its own.
func newGateway(t *testing.T, name string, tag int, member *etcdserver.Member, open func(*config.LUN) (backend.Store, error)) (l *lab, end func()) {
	l = &lab{t: t, dir: t.TempDir(), lines: &testkit.Log{},
		portals:    fmt.Sprintf(`{listen: "127.0.0.1:0", tpgt: %d}`, tag),
		initiators: `"*"`,
		luns:       `{id: 0, backend: memory, size: 1MiB}, {id: 1, backend: nbd, path: "nbd://192.0.2.1/disk", shared: true, naa: "3000000000000001"}`,
		more:       fmt.Sprintf("cluster: {name: %s, etcd: [%q], lease: 10s, failback: 1h, fence_program: /bin/true}\n", name, member.Endpoint()),
	}
	l.path = filepath.Join(l.dir, "c.yaml")
	l.write()
	d, stop := run(t, l.path, Options{LogTo: io.MultiWriter(l.lines, t.Output()), openStore: func(c *config.LUN) (backend.Store, error) {
		if c.Shared {
			return open(c)
		}
		return backend.OpenMemory(backend.MemoryConfig{Size: int64(c.Size), BlockSize: 512})
	}})
	l.Daemon = d
	var once sync.Once
	end = func() {
		once.Do(func() {
			if err := stop(); err != nil {
				t.Error(err)
			}
		})
	}
	t.Cleanup(end)
	return l, end
}

// portGroupStates returns the state of each target port group by its tag, as REPORT TARGET PORT GROUPS has it.
func portGroupStates(t *testing.T, s *initiator.Session, lun byte) map[int]int {
	t.Helper()
	c := &initiator.Command{LUN: lun, In: make([]byte, 256), CDB: [16]byte{0: 0xa3, 1: 0x0a, 8: 1}}
	for got := do(t, s, c); got != ""; got = do(t, s, c) {
		if !strings.HasPrefix(got, "6/") {
			t.Fatalf("REPORT TARGET PORT GROUPS: %s", got)
		}
	}
	states := map[int]int{}
	for at := 4; at < 4+int(binary.BigEndian.Uint32(c.In)); at += 12 {
		states[int(binary.BigEndian.Uint16(c.In[at+2:]))] = int(c.In[at] & 0x0f)
	}
	return states
}

// waitFor waits for a state of both port groups, through a session of each gateway. 0 is active/optimized, 2 standby.
func waitFor(t *testing.T, want map[int]int, sessions ...*initiator.Session) {
	t.Helper()
	for _, s := range sessions {
		testkit.Eventually(t, "the LUN is ready", func() bool { return !strings.HasSuffix(attentions(t, s, 1), "2/04/01") })
		testkit.Eventually(t, fmt.Sprintf("the port groups are %v", want), func() bool {
			attentions(t, s, 1)
			return fmt.Sprint(portGroupStates(t, s, 1)) == fmt.Sprint(want)
		})
		attentions(t, s, 1) // of a change for which the last command has waited
	}
}

// Two gateways share a LUN: all paths tell which one serves it, and that is another one after a hand-over, and when a gateway ends. What
// one has written the other one reads. A LUN of a gateway's own is not concerned.
func TestCluster(t *testing.T) {
	member := etcdserver.Start(t, 1)[0]
	disk := newSharedDisk(t)
	a, endA := newGateway(t, "a", 1, member, disk.openFor)
	b, _ := newGateway(t, "b", 2, member, disk.openFor)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	sa, sb := a.login("host", store), b.login("host", store)
	testkit.Eventually(t, "both gateways know the other", func() bool {
		ca, errA := a.Cluster()
		cb, errB := b.Cluster()
		return errA == nil && errB == nil && len(ca.Gateways) == 2 && len(cb.Gateways) == 2 && ca.LUNs[0].Owner != "" && ca.LUNs[0].Owner == cb.LUNs[0].Owner
	})
	if err := a.HandOver(ctx, store, 1, "a"); err != nil {
		t.Fatal(err)
	}
	waitFor(t, map[int]int{1: 0, 2: 2}, sa, sb)
	write := func(s *initiator.Session, fill byte) string {
		return do(t, s, &initiator.Command{LUN: 1, CDB: cdb.Write16(8, 1), Out: bytes.Repeat([]byte{fill}, 512)})
	}
	read := func(s *initiator.Session) byte {
		c := &initiator.Command{LUN: 1, CDB: cdb.Read16(8, 1), In: make([]byte, 512)}
		if got := do(t, s, c); got != "" {
			t.Errorf("READ: %s", got)
		}
		return c.In[0]
	}
	if got := write(sa, 1); got != "" {
		t.Errorf("WRITE through the active path: %s", got)
	}
	if got := write(sb, 2); got != "2/04/0b" { // TARGET PORT IN STANDBY STATE
		t.Errorf("WRITE through the standby path: %s", got)
	}
	for _, s := range []*initiator.Session{sa, sb} {
		if got := capacity(t, s, 1); got != 4<<20 {
			t.Errorf("the LUN has %d bytes", got)
		}
		inquiry := &initiator.Command{LUN: 1, CDB: [16]byte{0: 0x12, 4: 36}, In: make([]byte, 36)}
		if got := do(t, s, inquiry); got != "" || inquiry.In[5]&0x30 != 0x10 { // TPGS: implicit
			t.Errorf("INQUIRY: %s, TPGS %#x", got, inquiry.In[5]&0x30)
		}
	}
	if err := b.HandOver(ctx, store, 1, "b"); err != nil {
		t.Fatal(err)
	}
	waitFor(t, map[int]int{1: 2, 2: 0}, sa, sb)
	if got := read(sb); got != 1 {
		t.Errorf("the other gateway reads %d", got)
	}
	if got := write(sa, 3); got != "2/04/0b" {
		t.Errorf("WRITE through what was the active path: %s", got)
	}
	if err := a.HandOver(ctx, store, 1, "a"); err != nil {
		t.Fatal(err)
	}
	waitFor(t, map[int]int{1: 0, 2: 2}, sa, sb)
	testSharedSettings(t, sa, sb)
	testSharedFailure(t, disk, a, b, sa)
	if err := a.HandOver(ctx, store, 1, "a"); err != nil {
		t.Fatal(err)
	}
	waitFor(t, map[int]int{1: 0, 2: 2}, sa, sb)
	testSharedReservations(t, a, b, sa, sb)
	endA()                                  // as by SIGTERM
	waitFor(t, map[int]int{1: 2, 2: 0}, sb) // the gateway may be back soon
	if got := len(b.State().Targets[0].LUNs[1].Reservation.Registrations); got != 1 {
		t.Errorf("%d registrations after the end of the gateway that they came through, want 1", got)
	}
	if got := identifyingText(t, sb); got != "of a" {
		t.Errorf("the text is %q after the end of the gateway that it came through", got)
	}
	if got := write(sb, 4); got != "" {
		t.Errorf("WRITE through the path that is left: %s", got)
	}
	if got := testUnitReady(t, sb, 0); strings.HasPrefix(got, "2/") {
		t.Errorf("the LUN of its own: %s", got)
	}
	for _, err := range []error{b.HandOver(ctx, store, 1, "nobody"), b.HandOver(ctx, store, 0, "b"), b.HandOver(ctx, store, 7, "b")} {
		if err == nil {
			t.Error("a hand-over that is not possible succeeds")
		}
	}
	testErase(t, b, member)
}

// An initiator whose command finds its path in standby after a hand-over tries the other one. REPORT TARGET PORT GROUPS there must not have the states
// from before, not even while a change of the configuration is under way: Linux would give up that path, too, until multipathd has looked at it. While it waits,
// the gateway's own LUN is served, to that session and to others.
func TestPathsOfHandOver(t *testing.T) {
	member := etcdserver.Start(t, 1)[0]
	disk := newSharedDisk(t)
	var opens atomic.Pointer[chan bool]
	open := func(c *config.LUN) (backend.Store, error) {
		if wait := opens.Load(); wait != nil {
			<-*wait
		}
		return disk.openFor(c)
	}
	a, _ := newGateway(t, "a", 1, member, open)
	b, _ := newGateway(t, "b", 2, member, open)
	testkit.Eventually(t, "both gateways know the other", func() bool {
		ca, errA := a.Cluster()
		cb, errB := b.Cluster()
		return errA == nil && errB == nil && len(ca.Gateways) == 2 && len(cb.Gateways) == 2
	})
	sa, sb := a.login("host", store), b.login("host", store)
	if err := a.HandOver(t.Context(), store, 1, "a"); err != nil {
		t.Fatal(err)
	}
	waitFor(t, map[int]int{1: 0, 2: 2}, sa, sb)
	neighbors := map[*lab]*initiator.Session{a: a.login("neighbor", store), b: b.login("neighbor", store)}
	write := func(s *initiator.Session) string {
		for {
			if got := do(t, s, &initiator.Command{LUN: 1, CDB: cdb.Write16(8, 1), Out: make([]byte, 512)}); !strings.HasPrefix(got, "6/") {
				return got
			}
		}
	}
	for _, to := range []struct {
		gateway  string
		from, to *lab
		old, new *initiator.Session
		states   map[int]int
	}{
		{"b", a, b, sa, sb, map[int]int{1: 2, 2: 0}}, {"a", b, a, sb, sa, map[int]int{1: 0, 2: 2}},
	} {
		begun, checked, changed := make(chan bool), make(chan bool), make(chan bool)
		go to.to.locked(func() {
			close(begun)
			<-checked
			close(changed)
		})
		<-begun
		opened := make(chan bool)
		opens.Store(&opened)
		endChange, letOpen := sync.OnceFunc(func() { close(checked) }), sync.OnceFunc(func() { close(opened) })
		t.Cleanup(endChange) // if the test fails, the gateways can end
		t.Cleanup(letOpen)
		moved, written, reported := make(chan error, 1), make(chan string, 1), make(chan map[int]int, 1)
		go func() { moved <- to.from.HandOver(t.Context(), store, 1, to.gateway) }()
		testkit.Eventually(t, "the other gateway is the owner", func() bool {
			c, err := to.from.Cluster()
			return err == nil && c.LUNs[0].Owner == to.gateway
		})
		time.Sleep(100 * time.Millisecond) // it has heard that nobody serves the LUN
		go func() {
			got := ""
			for got == "" {
				got = write(to.old)
			}
			written <- got
		}()
		go func() { reported <- portGroupStates(t, to.new, 1) }()
		select {
		case got := <-written:
			t.Errorf("to %s: WRITE through the old path does not wait: %s", to.gateway, got)
			written <- got
		case states := <-reported:
			t.Errorf("to %s: the new path does not wait and reports %v", to.gateway, states)
			reported <- to.states
		case <-time.After(100 * time.Millisecond):
		}
		for what, s := range map[string]*initiator.Session{"the session": to.new, "another session": neighbors[to.to]} {
			began := time.Now()
			if got := attentions(t, s, 0); strings.HasPrefix(got, "2/") {
				t.Errorf("to %s: LUN 0 through %s: %s", to.gateway, what, got)
			}
			if got := do(t, s, &initiator.Command{CDB: cdb.Write16(0, 1), Out: make([]byte, 512)}); got != "" || time.Since(began) > time.Second {
				t.Errorf("to %s: WRITE to LUN 0 through %s, while its LUN 1 moves: %s after %v", to.gateway, what, got, time.Since(began))
			}
		}
		letOpen()
		if got := <-written; got != "2/04/0b" {
			t.Errorf("to %s: WRITE through the old path: %s", to.gateway, got)
		}
		for _, states := range []map[int]int{<-reported, portGroupStates(t, to.new, 1)} {
			if fmt.Sprint(states) != fmt.Sprint(to.states) {
				t.Errorf("to %s: the new path reports %v, want %v", to.gateway, states, to.states)
			}
		}
		endChange()
		<-changed
		if got := write(to.new); got != "" {
			t.Errorf("to %s: WRITE through the new path: %s", to.gateway, got)
		}
		if err := <-moved; err != nil {
			t.Fatal(err)
		}
	}
}

// testErase checks what stays in etcd after the last gateway has deleted LUN 1: what the state directory keeps of an own LUN.
func testErase(t *testing.T, l *lab, member *etcdserver.Member) {
	t.Helper()
	home, err := etcd.Open(etcd.Config{Endpoints: []string{member.Endpoint()}, Prefix: "/iser-target"})
	if err != nil {
		t.Fatal(err)
	}
	defer home.Close()
	const serial = "3000000000000001"
	// has returns the prefixes of the values that etcd has of the LUN.
	has := func() (list []string) {
		values, err := home.List(t.Context(), "")
		if err != nil {
			t.Fatal(err)
		}
		for _, v := range values {
			if prefix, ok := strings.CutSuffix(v.Key, serial); ok {
				list = append(list, prefix)
			}
		}
		return list
	}
	if got := has(); !slices.Contains(got, mediumKey) || !slices.Contains(got, "preferred/") {
		t.Errorf("before its removal etcd has %q of the LUN", got)
	}
	l.luns = `{id: 0, backend: memory, size: 1MiB}`
	l.ok(ChangeOptions{Disrupt: true, Now: true})
	testkit.Eventually(t, "the values of the LUN are removed", func() bool { return fmt.Sprint(has()) == "[reservations/ settings/]" })
}

// testSharedReservations checks that both gateways have the reservations of either: b has a path of its own, and is active or not.
func testSharedReservations(t *testing.T, a, b *lab, sa, sb *initiator.Session) {
	t.Helper()
	out := func(s *initiator.Session, action, typ byte, key, next uint64) string {
		t.Helper()
		c := &initiator.Command{LUN: 1, Out: make([]byte, 24), CDB: [16]byte{0: 0x5f, 1: action, 2: typ, 8: 24}}
		binary.BigEndian.PutUint64(c.Out, key)
		binary.BigEndian.PutUint64(c.Out[8:], next)
		return do(t, s, c)
	}
	write := func(s *initiator.Session) string {
		return do(t, s, &initiator.Command{LUN: 1, CDB: cdb.Write16(8, 1), Out: make([]byte, 512)})
	}
	stranger := a.login("stranger", store)
	attentions(t, stranger, 1)
	const register, reserve, preemptAndAbort, registrantsOnly = 0, 1, 5, 5
	for what, got := range map[string]string{
		"REGISTER through a": out(sa, register, 0, 0, 0xa), "REGISTER through b": out(sb, register, 0, 0, 0xb), "RESERVE through b, the standby path": out(sb, reserve, registrantsOnly, 0xb, 0),
	} {
		if got != "" {
			t.Errorf("%s: %s", what, got)
		}
	}
	for _, l := range []*lab{a, b} {
		if r := l.State().Targets[0].LUNs[1].Reservation; r == nil || len(r.Registrations) != 2 || r.Type != reservationTypes[registrantsOnly] {
			t.Errorf("a gateway has the reservation %+v", r)
		}
	}
	if got := write(stranger); got != "status 0x18" {
		t.Errorf("WRITE of an initiator without registration, through a: %s", got)
	}
	if got := write(sa); got != "" {
		t.Errorf("WRITE of a registered initiator: %s", got)
	}
	if got := out(sb, preemptAndAbort, registrantsOnly, 0xb, 0xa); got != "" {
		t.Errorf("PREEMPT AND ABORT through b: %s", got)
	}
	if got := write(sa); got != "6/2a/05" { // REGISTRATIONS PREEMPTED
		t.Errorf("the first command of the preempted initiator: %s", got)
	}
	if got := write(sa); got != "status 0x18" {
		t.Errorf("WRITE of the preempted initiator: %s", got)
	}
}

// writeProtect saves SWP of LUN 1 by MODE SELECT.
func writeProtect(t *testing.T, s *initiator.Session, on bool) string {
	t.Helper()
	page := []byte{0, 0, 0, 0, 0x0a, 0x0a, 0x02, 0x10, 0, 0x40, 0, 0, 0xff, 0xff, 0, 0}
	if on {
		page[8] = 0x08
	}
	return do(t, s, &initiator.Command{LUN: 1, Out: page, CDB: [16]byte{0: 0x15, 1: 0x11, 4: byte(len(page))}})
}

// testSharedSettings checks that what is set through one gateway is in force on the other one, with the attention. LUN 1 is write protected
// then.
func testSharedSettings(t *testing.T, sa, sb *initiator.Session) {
	t.Helper()
	wantAttention := func(s *initiator.Session, want string) {
		t.Helper()
		testkit.Eventually(t, "the attention "+want, func() bool { return strings.Contains(attentions(t, s, 1), want) })
	}
	write := func(s *initiator.Session) string {
		return do(t, s, &initiator.Command{LUN: 1, CDB: cdb.Write16(8, 1), Out: make([]byte, 512)})
	}
	if got := writeProtect(t, sb, true); got != "" {
		t.Errorf("MODE SELECT through the standby path: %s", got)
	}
	wantAttention(sa, "2a/01")              // MODE PARAMETERS CHANGED
	if got := write(sa); got != "7/27/02" { // LOGICAL UNIT SOFTWARE WRITE PROTECTED
		t.Errorf("WRITE to a LUN that was protected through the other path: %s", got)
	}
	if got := writeProtect(t, sa, false); got != "" {
		t.Errorf("MODE SELECT through the active path: %s", got)
	}
	wantAttention(sb, "2a/01")
	text := []byte("of a\x00")
	if got := do(t, sa, &initiator.Command{LUN: 1, Out: text, CDB: [16]byte{0: 0xa4, 1: 0x06, 9: byte(len(text)), 10: 2 << 1}}); got != "" {
		t.Errorf("SET IDENTIFYING INFORMATION: %s", got)
	}
	wantAttention(sb, "3f/05") // DEVICE IDENTIFIER CHANGED
}

// identifyingText returns what REPORT IDENTIFYING INFORMATION has as the text of LUN 1.
func identifyingText(t *testing.T, s *initiator.Session) string {
	t.Helper()
	c := &initiator.Command{LUN: 1, In: make([]byte, 64), CDB: [16]byte{0: 0xa3, 1: 0x05, 9: 64, 10: 2 << 1}}
	if got := do(t, s, c); got != "" {
		t.Errorf("REPORT IDENTIFYING INFORMATION: %s", got)
	}
	return strings.TrimRight(string(c.In[4:]), "\x00")
}

// testSharedFailure checks that a sync that failed on one gateway is on record on both, until it is recovered where the LUN is served.
func testSharedFailure(t *testing.T, disk *sharedDisk, a, b *lab, sa *initiator.Session) {
	t.Helper()
	synchronize := func() string { return do(t, sa, &initiator.Command{LUN: 1, CDB: [16]byte{0x35}}) }
	health := func(l *lab, want lun.Health) func() bool {
		return func() bool {
			l.lookAtLUNs()
			return l.lunState(1).Health == want.String()
		}
	}
	disk.fails.Store(true)
	if got := synchronize(); got != "3/0c/00" {
		t.Errorf("SYNCHRONIZE CACHE that fails: %s", got)
	}
	for _, l := range []*lab{a, b} {
		testkit.Eventually(t, "the LUN is failed", health(l, lun.Failed))
	}
	if _, err := b.Recover(t.Context(), store, 1); !errors.Is(err, ErrCluster) {
		t.Errorf("recovery on the gateway that does not serve the LUN: %v", err)
	}
	if _, err := a.Recover(t.Context(), store, 1); err != nil {
		t.Errorf("recovery: %v", err)
	}
	for _, l := range []*lab{a, b} {
		testkit.Eventually(t, "the LUN is healthy again", health(l, lun.Healthy))
	}
}

// While etcd is frozen, a change of the settings of a shared LUN fails in time, and an own LUN is not disturbed.
func TestClusterSettingsWithoutEtcd(t *testing.T) {
	member := etcdserver.Start(t, 1)[0]
	l, _ := newGateway(t, "a", 1, member, newSharedDisk(t).openFor)
	s, neighbor := l.login("host", store), l.login("neighbor", store)
	waitFor(t, map[int]int{1: 0}, s)
	attentions(t, neighbor, 0)
	l.net.limits.StateTimeout.SetMax(int64(time.Second))
	member.Freeze()
	defer member.Thaw()
	answer, began := make(chan string, 1), time.Now()
	go func() { answer <- writeProtect(t, s, true) }()
	for waits := true; waits; {
		select {
		case got := <-answer:
			if took := time.Since(began); got != "4/44/00" || took < time.Second/2 {
				t.Errorf("MODE SELECT while etcd is frozen: %s after %v", got, took)
			}
			waits = false
		default:
			if got := do(t, neighbor, &initiator.Command{CDB: cdb.Write16(8, 1), Out: make([]byte, 512)}); got != "" {
				t.Errorf("WRITE to the own LUN: %s", got)
			}
		}
	}
}

// A gateway that ends and comes back changes no state of a LUN that another one serves: initiators get no attention. A gateway that comes meanwhile
// knows it as well.
func TestGatewayComesAndGoesQuietly(t *testing.T) {
	member := etcdserver.Start(t, 1)[0]
	disk := newSharedDisk(t)
	b, _ := newGateway(t, "b", 2, member, disk.openFor)
	sb := b.login("host", store)
	waitFor(t, map[int]int{2: 0}, sb)
	gateways := func(n int) {
		t.Helper()
		testkit.Eventually(t, fmt.Sprint(n, " gateways are there"), func() bool {
			st, err := b.Cluster()
			return err == nil && len(st.Gateways) == n
		})
		time.Sleep(2 * time.Second) // longer than between two looks of a gateway
	}
	a, endA := newGateway(t, "a", 1, member, disk.openFor)
	want := map[int]int{1: 2, 2: 0}
	waitFor(t, want, sb, a.login("host", store))
	for range 2 {
		endA()
		gateways(1)
		if got := attentions(t, sb, 1); strings.Contains(got, "2a/06") {
			t.Errorf("the initiator is notified of a gateway that has left: %s", got)
		}
		if got := portGroupStates(t, sb, 1); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("without the gateway, the port groups are %v", got)
		}
		a, endA = newGateway(t, "a", 1, member, disk.openFor)
		waitFor(t, want, a.login("host", store))
		gateways(2)
		if got := attentions(t, sb, 1); strings.Contains(got, "2a/06") {
			t.Errorf("the initiator is notified of a gateway that is back: %s", got)
		}
	}
	endA()
	gateways(1)
	c, _ := newGateway(t, "c", 3, member, disk.openFor)
	waitFor(t, map[int]int{1: 2, 2: 0, 3: 2}, c.login("host", store), sb)
}

// The portal groups of a gateway that has left are known for absentTime, unless another one has them.
func TestAbsentGateways(t *testing.T) {
	member := func(name string, n gatewayNote) owner.Member {
		text, err := json.Marshal(n)
		if err != nil {
			t.Fatal(err)
		}
		return owner.Member{Name: name, Note: text}
	}
	tags := func(tag uint16) map[string][]uint16 { return map[string][]uint16{store: {tag}} }
	g := &group{c: config.Cluster{Name: "a"}, own: tags(1), others: map[string][]uint16{}, absent: map[string]absentNote{}}
	a, b := member("a", gatewayNote{Tags: tags(1)}), member("b", gatewayNote{Tags: tags(2)})
	now := time.Now()
	look := func(after time.Duration, want []uint16, members ...owner.Member) {
		t.Helper()
		if conflict := g.learnTags(members, now.Add(after)); conflict != "" {
			t.Error(conflict)
		}
		if got := g.others[store]; !slices.Equal(got, want) {
			t.Errorf("after %v the portal groups of others are %v, want %v", after, got, want)
		}
	}
	look(0, nil, a)
	look(0, []uint16{2}, a, b)
	look(time.Second, []uint16{2}, a)
	look(absentTime, []uint16{2}, a)
	look(absentTime+2*time.Second, nil, a)
	look(absentTime+3*time.Second, nil, a)
	look(0, []uint16{2}, a, b)
	look(0, []uint16{2}, a)
	look(0, []uint16{2}, a, b) // it is back
	// Another gateway knows of one that left, and of this one.
	until := now.Add(time.Minute)
	c := member("c", gatewayNote{Tags: tags(3), Absent: map[string]absentNote{"a": {tags(1), until}, "b": {tags(2), until}, "d": {tags(4), until}}})
	look(0, []uint16{2, 3, 4}, a, b, c)
	look(time.Minute+time.Second, []uint16{2, 3}, a, b, c)
	look(2*time.Minute, []uint16{2, 3}, a, b, c)
}
