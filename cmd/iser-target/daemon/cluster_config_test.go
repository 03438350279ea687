package daemon

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/cmd/iser-target/handover"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
	"github.com/iser-target/iser-target/tests/testkit/etcdserver"
)

// sharedDisks are media by their paths, which gateways reach.
type sharedDisks struct {
	t     *testing.T
	mu    sync.Mutex
	disks map[string]*sharedDisk
}

// A resizableHead is a disk as one gateway has opened it.
type resizableHead struct{ backend.Store }

func (h resizableHead) Resize(size int64) error {
	return h.Store.(*diskHead).disk.Store.(backend.Resizer).Resize(size)
}

func (s *sharedDisks) open(c *config.LUN) (backend.Store, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := s.disks[c.Path]
	if d == nil {
		memory, err := backend.OpenMemory(backend.MemoryConfig{Size: 1 << 20, BlockSize: 512})
		if err != nil {
			return nil, err
		}
		d = &sharedDisk{Store: memory, t: s.t}
		s.disks[c.Path] = d
	}
	head, err := d.openFor(c)
	return resizableHead{head}, err
}

// all is a target of the cluster.
const all = prefix + "all"

// clusterLUN returns a LUN of the cluster in YAML.
func clusterLUN(id int) string {
	return fmt.Sprintf(`{id: %d, backend: nbd, path: "nbd://192.0.2.1/%[1]d", shared: true, naa: "30000000000000%02[1]d"}`, id)
}

func clusterLUNOf(id int) config.LUN {
	return config.LUN{ID: id, Backend: "nbd", Path: fmt.Sprintf("nbd://192.0.2.1/%d", id), Shared: true, NAA: fmt.Sprintf("30000000000000%02d", id)}
}

// clusterText returns the targets of a cluster: one of that name with those LUNs.
func clusterText(name string, luns ...int) string {
	var list []string
	for _, id := range luns {
		list = append(list, clusterLUN(id))
	}
	return fmt.Sprintf("# of all\ntargets:\n  - name: %s\n    initiators: [\"*\"]\n    luns: [%s]\n", name, strings.Join(list, ", "))
}

// newConfigGateway starts a gateway whose file has a target with a memory LUN. It is in the cluster of an etcd.
func newConfigGateway(t *testing.T, name string, tag int, endpoint string, disks *sharedDisks, received *handover.Received) *lab {
	l := &lab{t: t, dir: t.TempDir(), lines: &testkit.Log{},
		portals:    fmt.Sprintf(`{listen: "127.0.0.1:0", tpgt: %d}`, tag),
		initiators: `"*"`,
		luns:       `{id: 0, backend: memory, size: 4MiB}`,
		more:       fmt.Sprintf("cluster: {name: %s, etcd: [%q], lease: 10s, failback: 1h, fence_program: /bin/true}\n", name, endpoint),
	}
	l.path = filepath.Join(l.dir, "c.yaml")
	l.write()
	d, stop := run(t, l.path, Options{LogTo: io.MultiWriter(l.lines, t.Output()), Received: received, openStore: func(c *config.LUN) (backend.Store, error) {
		if c.Shared {
			return disks.open(c)
		}
		return backend.OpenMemory(backend.MemoryConfig{Size: int64(c.Size), BlockSize: 512})
	}})
	l.Daemon = d
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
	return l
}

// sharedText parses the targets of a cluster.
func sharedText(t *testing.T, text string) *config.Document {
	t.Helper()
	s, err := config.NewShared("request", []byte(text), 0)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// has waits until the gateways serve a target of the cluster with those LUNs, ready, and no others.
func has(t *testing.T, name string, luns []int, gateways ...*lab) {
	t.Helper()
	for _, l := range gateways {
		testkit.Eventually(t, fmt.Sprintf("%s has the LUNs %v", name, luns), func() bool {
			var got []int
			found := false
			for _, ts := range l.State().Targets {
				if ts.Name != name {
					continue
				}
				found = true
				for _, ls := range ts.LUNs {
					if ls.State == schema.Ready {
						got = append(got, ls.ID)
					}
				}
			}
			return (found || luns == nil) && slices.Equal(got, luns)
		})
	}
}

// reasonOf waits until a gateway says why it does not run the newest targets of the cluster.
func reasonOf(t *testing.T, l *lab, want string) {
	t.Helper()
	testkit.Eventually(t, "a gateway reports "+want, func() bool {
		_, c, err := l.ClusterConfig()
		return err == nil && strings.Contains(c.Reason, want)
	})
}

// The gateways of a cluster have the targets that etcd has, next to those of their files.
func TestClusterConfig(t *testing.T) {
	member := etcdserver.Start(t, 1)[0]
	disks := &sharedDisks{t: t, disks: map[string]*sharedDisk{}}
	a, b := newConfigGateway(t, "a", 1, member.Endpoint(), disks, nil), newConfigGateway(t, "b", 2, member.Endpoint(), disks, nil)
	home, err := openHome(&a.group.c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { home.Close() })
	files := [][]byte{a.Document().Bytes(), b.Document().Bytes()}
	load(t, b.login("neighbour", store))
	if s, c, err := a.ClusterConfig(); err != nil || c.Revision != 0 || s.SharedTargets() != 0 {
		t.Errorf("an etcd without targets: %+v, %v", c, err)
	}

	plan, err := a.ApplyCluster(t.Context(), sharedText(t, clusterText(all)), false, ChangeOptions{DryRun: true})
	if err != nil || len(plan.Steps) != 1 || len(a.State().Targets) != 1 {
		t.Errorf("dry run: %+v, %v", plan, err)
	}
	if plan, err = a.ApplyCluster(t.Context(), sharedText(t, clusterText(all, 1)), false, ChangeOptions{}); err != nil || len(plan.Steps) != 1 || !plan.Persisted {
		t.Fatalf("%+v, %v", plan, err)
	}
	has(t, all, []int{1}, a, b)
	sb := b.login("host", all)
	for id, through := range map[int]*lab{2: a, 3: b} {
		if _, err := through.Change(t.Context(), func(d *config.Document) error { return d.AddLUN(all, clusterLUNOf(id)) }, ChangeOptions{}); err != nil {
			t.Fatalf("LUN %d: %v", id, err)
		}
	}
	has(t, all, []int{1, 2, 3}, a, b)
	attentions(t, sb, 1)
	if got := reportLUNs(t, sb); !slices.Equal(got, []int{1, 2, 3}) {
		t.Errorf("through the other gateway an initiator finds the LUNs %v", got)
	}
	sa := a.login("host", all)
	testkit.Eventually(t, "a LUN that was created through one gateway can be written through one of both", func() bool {
		write := func(s *initiator.Session) string {
			attentions(t, s, 2)
			return do(t, s, &initiator.Command{LUN: 2, CDB: cdb.Write16(8, 1), Out: bytes.Repeat([]byte{2}, 512)})
		}
		return write(sa) == "" || write(sb) == ""
	})
	if !bytes.HasPrefix(b.Document().Shared().Bytes(), []byte("# of all\n")) {
		t.Errorf("the comment is gone:\n%s", b.Document().Shared().Bytes())
	}

	t.Run("conflict", func(t *testing.T) { testConfigConflict(t, home, a, b) })
	t.Run("failure", func(t *testing.T) { testConfigFailure(t, a, b) })
	t.Run("invalid", func(t *testing.T) {
		testConfigInvalid(t, home, a, b, func() *lab { return newConfigGateway(t, "e", 5, member.Endpoint(), disks, nil) })
	})
	for i, l := range []*lab{a, b} {
		now, err := os.ReadFile(l.path)
		if err != nil || !bytes.Equal(now, files[i]) {
			t.Errorf("the file of gateway %d has changed: %v\n%s", i, err, now)
		}
	}
	t.Run("move", func(t *testing.T) { testConfigMove(t, a, b) })
	t.Run("away", func(t *testing.T) { testConfigAway(t, member, disks, a) })
}

// change changes the configuration through a gateway.
func (l *lab) change(edit func(*config.Document) error, o ChangeOptions) error {
	_, err := l.Change(l.t.Context(), edit, o)
	return err
}

// setBefore sets what is called before steps, while no change is in progress.
func (l *lab) setBefore(f func(what string) error) {
	l.t.Helper()
	e, err := l.edit(l.t.Context())
	if err != nil {
		l.t.Fatal(err)
	}
	defer e.release()
	l.before = f
}

// putConfig puts a text into etcd, as somebody does with etcdctl.
func putConfig(t *testing.T, home state.Home, text func(now string) string) {
	t.Helper()
	v, err := home.Get(t.Context(), configKey)
	if err == nil {
		_, err = home.Put(t.Context(), configKey, []byte(text(string(v.Data))), v.Revision)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// testConfigConflict checks that changes through both gateways at the same time are both made. One to which another gateway comes first is made again.
func testConfigConflict(t *testing.T, home state.Home, a, b *lab) {
	var both sync.WaitGroup
	for l, id := range map[*lab]int{a: 2, b: 3} {
		both.Go(func() {
			if err := l.change(func(d *config.Document) error { return d.SetLUN(all, id, "iops", fmt.Sprint(1000*id)) }, ChangeOptions{}); err != nil {
				t.Errorf("LUN %d: %v", id, err)
			}
		})
	}
	both.Wait()
	iops := func(l *lab) string {
		c := targetOf(l.Effective(), all)
		return fmt.Sprint(lunOf(c, 2).IOPS, lunOf(c, 3).IOPS)
	}
	for _, l := range []*lab{a, b} {
		testkit.Eventually(t, "each gateway has both changes", func() bool { return iops(l) == "2000 3000" })
	}

	firsts, always := 0, false
	a.setBefore(func(what string) error {
		if what == "cluster" && (firsts == 0 || always) {
			firsts++
			putConfig(t, home, func(now string) string { return now + fmt.Sprintf("# edit %d\n", firsts) })
		}
		return nil
	})
	if err := a.change(func(d *config.Document) error { return d.SetTarget(all, "alias", "one") }, ChangeOptions{}); err != nil {
		t.Fatal(err)
	}
	if text := string(a.Document().Shared().Bytes()); firsts != 1 || !strings.Contains(text, "# edit 1\n") || !strings.Contains(text, "alias: one") {
		t.Errorf("after %d changes that came first:\n%s", firsts, text)
	}
	always = true
	if err := a.change(func(d *config.Document) error { return d.SetTarget(all, "alias", "two") }, ChangeOptions{}); !errors.Is(err, ErrStale) {
		t.Errorf("changes that always come first: %v", err)
	}
	a.setBefore(func(string) error { return nil })
	testkit.Eventually(t, "both gateways have the last text", func() bool {
		sa, sb := a.Document().Shared(), b.Document().Shared()
		return sa.Revision() == sb.Revision() && strings.Contains(string(sa.Bytes()), fmt.Sprintf("# edit %d\n", firsts)) && targetOf(b.Effective(), all).Alias == "one"
	})
}

// testConfigFailure checks what a step that fails leaves: etcd gets its text back, and no gateway keeps the change.
func testConfigFailure(t *testing.T, a, b *lab) {
	was := string(a.Document().Shared().Bytes())
	failed := false
	a.setBefore(func(what string) error {
		if what != "paths" || failed { // this gateway follows the text that etcd gets back
			return nil
		}
		failed = true
		has(t, all, []int{1, 2, 3, 4}, b) // it follows while the step is in progress
		return errInjected
	})
	err := a.change(func(d *config.Document) error { return d.AddLUN(all, clusterLUNOf(4)) }, ChangeOptions{})
	a.setBefore(func(string) error { return nil })
	if !errors.Is(err, errInjected) || !strings.HasSuffix(err.Error(), "Nothing was changed") {
		t.Errorf("a step that fails: %v", err)
	}
	has(t, all, []int{1, 2, 3}, a, b)
	for _, l := range []*lab{a, b} {
		testkit.Eventually(t, "the text is what it was", func() bool { return string(l.Document().Shared().Bytes()) == was })
	}
}

// testConfigInvalid checks that a wrong text in etcd runs on no gateway, and ends nothing. The next text that is right runs.
func testConfigInvalid(t *testing.T, home state.Home, a, b *lab, start func() *lab) {
	putConfig(t, home, func(now string) string { return now + "portals: []\n" })
	for _, l := range []*lab{a, b} {
		reasonOf(t, l, "portals: does not belong to the configuration of a cluster")
		if l.clusterMetrics().Current {
			t.Error("the metrics of a gateway say that it runs what it cannot apply")
		}
		has(t, all, []int{1, 2, 3}, l)
	}
	testkit.Eventually(t, "the state of the cluster says so of both gateways", func() bool {
		c, err := a.Cluster()
		return err == nil && len(c.Gateways) == 2 && !slices.ContainsFunc(c.Gateways, func(g schema.GatewayState) bool { return g.ConfigReason == "" || g.Config == 0 || g.Config >= c.Config })
	})
	e := start()
	if _, _, err := e.ClusterConfig(); err == nil || !strings.Contains(err.Error(), "portals: does not belong") || len(e.State().Targets) != 1 {
		t.Errorf("a gateway that starts has %d targets, and says %v", len(e.State().Targets), err)
	}
	if err := a.change(func(d *config.Document) error { return d.SetTarget(all, "alias", "x") }, ChangeOptions{}); !errors.Is(err, ErrStale) || !strings.Contains(err.Error(), "portals: does not belong") {
		t.Errorf("a change of what is wrong: %v", err)
	}
	v, err := home.Get(t.Context(), configKey)
	if err == nil {
		_, err = home.Put(t.Context(), configKey, nil, v.Revision)
	}
	if err != nil {
		t.Fatal(err)
	}
	reasonOf(t, b, "has no targets of the cluster any longer")
	has(t, all, []int{1, 2, 3}, a, b)
	if _, err := a.ApplyCluster(t.Context(), sharedText(t, clusterText(all, 1, 2)), false, ChangeOptions{}); err == nil || !strings.Contains(err.Error(), "disturbs") {
		t.Errorf("a LUN in use is removed without being asked for: %v", err)
	}
	if _, err := b.ApplyCluster(t.Context(), sharedText(t, clusterText(all, 1, 2)), false, ChangeOptions{Now: true, Disrupt: true}); err != nil {
		t.Fatal(err)
	}
	has(t, all, []int{1, 2}, a, b, e)
	for _, l := range []*lab{a, b, e} {
		testkit.Eventually(t, "nothing is wrong", func() bool {
			_, c, err := l.ClusterConfig()
			return err == nil && c.Reason == "" && c.Newest == c.Revision && l.clusterMetrics().Current
		})
	}
}

// testConfigMove checks that a target moves from the files of the gateways to the cluster without a pause. The file of one gateway has it longer than etcd.
func testConfigMove(t *testing.T, a, b *lab) {
	const moved = prefix + "moved"
	for _, l := range []*lab{a, b} {
		l.targets = fmt.Sprintf("  - {name: %q, initiators: [\"*\"], luns: [%s]}\n", moved, clusterLUN(5))
		l.write()
		l.Reload("test")
	}
	has(t, moved, []int{5}, a, b)
	sa, sb := a.login("host", moved), b.login("host", moved)
	text := clusterText(all, 1, 2) + strings.TrimPrefix(clusterText(moved, 5), "# of all\ntargets:\n")
	if _, err := a.ApplyCluster(t.Context(), sharedText(t, text), false, ChangeOptions{}); err == nil || !strings.Contains(err.Error(), `is the name of targets[1] of `+a.path) {
		t.Errorf("a target in both parts: %v", err)
	}
	if plan, err := a.ApplyCluster(t.Context(), sharedText(t, text), true, ChangeOptions{}); err != nil || len(plan.Steps) != 0 {
		t.Fatalf("the move has the steps %+v, %v", plan, err)
	}
	reasonOf(t, b, `is the name of targets[1] of `+b.path)
	b.targets = ""
	b.write()
	b.Reload("test")
	testkit.Eventually(t, "the other gateway has the target of the cluster", func() bool { return b.Document().Shared().Revision() == a.Document().Shared().Revision() })
	for _, s := range []*initiator.Session{sa, sb} {
		if got := testUnitReady(t, s, 5); strings.HasPrefix(got, "5/") {
			t.Errorf("the LUN is gone: %s", got)
		}
	}
	if now, err := os.ReadFile(a.path); err != nil || strings.Contains(string(now), moved) {
		t.Errorf("the file has the target: %v\n%s", err, now)
	}
}

// testConfigAway checks that nothing but the files changes while etcd is away, and that a gateway that starts has the targets of its file, or those that it is given. It gets the
// others when etcd is back.
func testConfigAway(t *testing.T, member *etcdserver.Member, disks *sharedDisks, a *lab) {
	shared := a.Document().Shared()
	member.Kill()
	var all3 sync.WaitGroup
	all3.Go(func() {
		err := a.change(func(d *config.Document) error { return d.SetTarget(all, "alias", "away") }, ChangeOptions{})
		if !errors.Is(err, state.ErrUnreachable) || !strings.HasSuffix(err.Error(), "Nothing was changed") || strings.Contains(err.Error(), "\n") {
			t.Errorf("a change without etcd: %v", err)
		}
		if got := a.Document().Shared(); !bytes.Equal(got.Bytes(), shared.Bytes()) || targetOf(a.Effective(), all).Alias == "away" {
			t.Errorf("without etcd the targets of the cluster have changed:\n%s", got.Bytes())
		}
		if err := a.change(func(d *config.Document) error { return d.SetTarget(store, "alias", "away") }, ChangeOptions{}); err != nil {
			t.Errorf("a change of the file without etcd: %v", err)
		}
	})
	var c, given *lab
	all3.Go(func() { c = newConfigGateway(t, "c", 3, member.Endpoint(), disks, nil) })
	all3.Go(func() {
		r := &handover.Received{Kept: true, State: handover.State{Cluster: &handover.Cluster{Text: clusterText(all, 1), Revision: 1}}}
		given = newConfigGateway(t, "d", 4, member.Endpoint(), disks, r)
	})
	all3.Wait()
	if t.Failed() {
		return
	}
	if _, _, err := c.ClusterConfig(); !errors.Is(err, ErrCluster) || len(c.State().Targets) != 1 {
		t.Errorf("a gateway that started without etcd has %d targets, and says %v", len(c.State().Targets), err)
	}
	if err := c.change(func(d *config.Document) error {
		return d.AddSharedTarget(config.Target{Name: prefix + "x", Initiators: []string{"*"}})
	}, ChangeOptions{}); err == nil || !strings.Contains(err.Error(), "not known") {
		t.Errorf("a change through it: %v", err)
	}
	if got := given.State().Targets; len(got) != 2 || got[1].Name != all {
		t.Errorf("a gateway that continues has the targets %+v", got)
	}
	member.Start()
	member.WaitHealthy()
	has(t, all, []int{1, 2}, a, c, given)
	has(t, prefix+"moved", []int{5}, c, given)
}
