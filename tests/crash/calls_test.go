//go:build amd64

package crash

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/tests/interop/harness"
	"github.com/iser-target/iser-target/tests/testkit"
)

// environment returns the environment of this process without variables that the program takes for its own.
func environment() []string {
	return slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "ISER_TARGET_") })
}

// A site is a directory with all that the program keeps, and the program.
type site struct {
	program, log string
	dir          string // is replaced as a whole
	api          *client.Client
	starts       int
}

func newSite(t *testing.T) *site {
	t.Helper()
	top := t.TempDir()
	s := &site{program: filepath.Join(top, "iser-target"), log: filepath.Join(top, "log"), dir: filepath.Join(top, "site")}
	harness.Copy(t, s.program)
	s.api = client.New(filepath.Join(s.dir, "socket"))
	if err := os.Mkdir(s.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf(`
state_dir: %[1]s/state
control: {socket: %[1]s/socket}
portals: [{listen: "127.0.0.1:0"}]
targets:
  - name: %[2]s
    initiators: ["*"]
    luns:
      - {id: 0, backend: file, path: %[1]s/0.img, size: 64KiB}
      - {id: 1, backend: file, path: %[1]s/1.img, size: 64KiB}
`, s.dir, store)
	if err := os.WriteFile(s.config(), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(s.dir, "from.img"), bytes.Repeat([]byte("iser"), 16<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *site) config() string { return filepath.Join(s.dir, "config.yaml") }

// state waits until the target answers, and returns its state.
func (s *site) state(ended <-chan error) (*schema.State, error) {
	for end := time.Now().Add(testkit.Patience); ; time.Sleep(2 * time.Millisecond) {
		st, err := s.api.State(context.Background())
		if err == nil && len(st.Portals) > 0 {
			return &st, nil
		}
		select {
		case why := <-ended:
			return nil, fmt.Errorf("the start has failed: %v", why)
		default:
		}
		if time.Now().After(end) {
			return nil, err
		}
	}
}

// run starts the program, calls f with its state, and kills it.
func (s *site) run(t *testing.T, f func(*schema.State) error) error {
	t.Helper()
	s.starts++
	out, err := os.OpenFile(s.log, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	cmd := exec.Command(s.program, "serve", "--config", s.config())
	cmd.Env, cmd.Stdout, cmd.Stderr = environment(), out, out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	st, err := s.state(ended)
	if err != nil {
		text, _ := os.ReadFile(s.log)
		return fmt.Errorf("%w: %s", err, text)
	}
	err = f(st)
	cmd.Process.Kill()
	<-ended
	return err
}

// describe returns what a state is about, without what no start keeps. identities are the LUNs whose
// identity counts; nil: all.
func describe(st *schema.State, identities map[int]bool) string {
	var b strings.Builder
	for _, t := range st.Targets {
		fmt.Fprintf(&b, "target %s\n", t.Name)
		for _, l := range t.LUNs {
			fmt.Fprintf(&b, "LUN %d at %s of %d bytes is %s (%s), read-only %v", l.ID, filepath.Base(l.Path), l.Size, l.State, l.Reason, l.ReadOnly)
			if identities == nil || identities[l.ID] {
				fmt.Fprintf(&b, ", %s", l.NAA)
			}
			if data, err := os.ReadFile(l.Path); err == nil {
				fmt.Fprintf(&b, ", %x", crc32.ChecksumIEEE(data))
			}
			if fi, err := os.Stat(l.Path); err != nil || fi.Size() != l.Size {
				fmt.Fprintf(&b, ", its file has another size, or %v", err)
			}
			if r := l.Reservation; r != nil {
				for _, reg := range r.Registrations {
					fmt.Fprintf(&b, ", %s has key %s, holder %v", reg.Initiator, reg.Key, reg.Holder)
				}
			}
			for _, set := range l.Settings {
				fmt.Fprintf(&b, ", %s %s", set.Setting, set.Saved)
			}
			b.WriteByte('\n')
		}
	}
	return b.String()
}

// An operation is a change that one request makes.
type operation struct {
	name string
	do   func(*site, *schema.State) error
	// spared are the classes of syncs that the operation does not need: nothing of the kind has changed.
	spared []string
	// renewed is the LUN that is another disk afterwards, with an identity of its own; 0: none is.
	renewed int
}

func change(f func(context.Context, *client.Client, string) error) func(*site, *schema.State) error {
	return func(s *site, _ *schema.State) error {
		ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
		defer cancel()
		return f(ctx, s.api, s.dir)
	}
}

// command returns the operation that executes a command with data-out on LUN 0.
func command(cdb [16]byte, out []byte) func(*site, *schema.State) error {
	return func(_ *site, st *schema.State) error {
		ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
		defer cancel()
		p, err := loginTCP(ctx, st.Portals[0].Address, overTCP, store, false)
		if err != nil {
			return err
		}
		defer p.Close()
		_, err = good(p, &request{cdb: cdb, out: out, immediate: len(out)})
		return err
	}
}

// reserveOut returns the operation PERSISTENT RESERVE OUT.
func reserveOut(action byte, key, saKey uint64) func(*site, *schema.State) error {
	list := make([]byte, 24)
	binary.BigEndian.PutUint64(list, key)
	binary.BigEndian.PutUint64(list[8:], saKey)
	list[20] = 1 // APTPL
	return command([16]byte{0x5f, action, 1, 8: 24}, list)
}

const firstKey = 0x1111

var operations = []operation{
	{name: "lun create", do: change(func(ctx context.Context, c *client.Client, dir string) error {
		id := 5
		_, err := c.AddLUN(ctx, store, schema.LUN{ID: &id, Backend: "file", Path: filepath.Join(dir, "5.img"), Size: "64KiB"}, schema.Options{})
		return err
	})},
	{name: "lun create --preallocate", do: change(func(ctx context.Context, c *client.Client, dir string) error {
		id := 5
		_, err := c.AddLUN(ctx, store, schema.LUN{ID: &id, Backend: "file", Path: filepath.Join(dir, "5.img"), Size: "64KiB", Preallocate: true}, schema.Options{})
		return err
	})},
	{name: "lun create --from", do: change(func(ctx context.Context, c *client.Client, dir string) error {
		id := 5
		_, err := c.AddLUN(ctx, store, schema.LUN{ID: &id, Backend: "file", Path: filepath.Join(dir, "5.img"), From: filepath.Join(dir, "from.img")}, schema.Options{})
		return err
	})},
	{name: "lun set path", do: change(func(ctx context.Context, c *client.Client, dir string) error {
		_, err := c.SetLUN(ctx, store, 1, schema.Values{"path": filepath.Join(dir, "5.img")}, schema.Options{})
		return err
	}), renewed: 1},
	{name: "lun grow", do: change(func(ctx context.Context, c *client.Client, _ string) error {
		_, err := c.SetLUN(ctx, store, 1, schema.Values{"size": "128KiB"}, schema.Options{})
		return err
	}),
		// A start extends a file that is too small, and only a shrink requires shrink.json.
		spared: []string{"names of state files", "contents of state files", "file of a LUN"}},
	{name: "lun shrink", do: change(func(ctx context.Context, c *client.Client, _ string) error {
		_, err := c.SetLUN(ctx, store, 1, schema.Values{"size": "32KiB"}, schema.Options{AllowShrink: true})
		return err
	})},
	{name: "lun set", do: change(func(ctx context.Context, c *client.Client, _ string) error {
		_, err := c.SetLUN(ctx, store, 1, schema.Values{"read_only": "true"}, schema.Options{})
		return err
	}), spared: []string{"file of a LUN"}},
	{name: "lun delete", do: change(func(ctx context.Context, c *client.Client, _ string) error {
		_, err := c.RemoveLUN(ctx, store, 1, schema.Options{Now: true})
		return err
	}), spared: []string{"file of a LUN"}},
	{name: "target create", do: change(func(ctx context.Context, c *client.Client, _ string) error {
		_, err := c.AddTarget(ctx, schema.Target{Name: extra, Initiators: []string{"*"}}, schema.Options{})
		return err
	})},
	{name: "REGISTER", do: reserveOut(register, firstKey, 0x2222)},
	{name: "RESERVE", do: reserveOut(reserve, firstKey, 0)},
	// SPC-4, section 6.11: the Caching page with WCE 0, saved (PF and SP).
	{name: "MODE SELECT", do: command([16]byte{0x15, 0x11, 4: 24}, append([]byte{3: 0, 4: 0x08, 5: 0x12}, make([]byte, 18)...)), spared: []string{"file of a LUN"}},
	{name: "CLEAR", do: reserveOut(clearAll, firstKey, 0)},
}

// A recording is what an operation did, step by step.
type recording struct {
	*site
	base     *tree
	steps    []step
	begun    int // how many steps there were when the operation began
	answered int // and when it was acknowledged
	old      string
	oldLUNs  map[int]bool
	next     string            // with all identities
	loose    string            // with those of the LUNs before the operation
	text     string            // of the configuration before
	seen     map[string]string // what a tree that was started before turned out to be
}

// recordOperation prepares a site and executes op there.
func recordOperation(t *testing.T, op operation) *recording {
	t.Helper()
	r := &recording{site: newSite(t), oldLUNs: map[int]bool{0: true, 1: op.renewed != 1}, seen: map[string]string{}}
	if err := r.run(t, func(st *schema.State) error { return reserveOut(register, 0, firstKey)(r.site, st) }); err != nil {
		t.Fatal(err)
	}
	f := newForest(r.dir)
	var err error
	if r.base, err = f.look(); err != nil {
		t.Fatal(err)
	}
	if err := r.run(t, func(st *schema.State) error { r.old = describe(st, nil); return nil }); err != nil {
		t.Fatal(err)
	}
	if err := r.base.put(r.dir); err != nil {
		t.Fatal(err)
	}
	rec := record(t, r.dir, r.log, r.program, "serve", "--config", r.config())
	// The numbers of files are those of the recorder.
	st, err := r.state(nil)
	r.begun = rec.count()
	if err == nil {
		err = op.do(r.site, st)
	}
	r.answered = rec.count()
	if err == nil {
		st, err = r.state(nil)
	}
	if err != nil {
		text, _ := os.ReadFile(r.log)
		t.Fatalf("%v\n%s", err, text)
	}
	r.next, r.loose = describe(st, nil), describe(st, r.oldLUNs)
	r.steps = rec.stop(t)
	if len(r.steps) < 5 || r.steps[0].now == nil {
		t.Fatalf("only %d steps", len(r.steps))
	}
	r.base, r.steps = r.steps[0].now, r.steps[1:]
	r.begun, r.answered = r.begun-1, r.answered-1
	r.text = r.base.read("config.yaml")
	return r
}

// check starts the program on a tree, as a crash after n steps may have left it, and returns what is wrong.
func (r *recording) check(t *testing.T, after *tree, n int) error {
	t.Helper()
	key := after.key()
	got, ok := r.seen[key]
	if !ok {
		if err := after.put(r.dir); err != nil {
			t.Fatal(err)
		}
		strict, loose := "", ""
		if err := r.run(t, func(st *schema.State) error {
			strict, loose = describe(st, nil), describe(st, r.oldLUNs)
			return nil
		}); err != nil {
			strict = err.Error()
		}
		switch {
		case !after.keeps(r.text):
			got = "broken: neither the configuration nor its history has the old text"
		case strict == r.next:
			got = "new"
		case strict == r.old:
			got = "old"
		case loose == r.loose:
			got = "new, with another identity"
		default:
			got = "broken:\n" + strict
		}
		r.seen[key] = got
	}
	switch {
	case strings.HasPrefix(got, "broken"):
		return fmt.Errorf("%s\nold was:\n%s\nnew was:\n%s", got, r.old, r.next)
	case n >= r.answered && got != "new":
		return fmt.Errorf("the operation was acknowledged, and the state is %s", got)
	}
	return nil
}

// TestEachSystemCall ends the program after each system call that changes a file, for each operation
// that changes what the program keeps: what is there afterwards, what is there after a loss of power,
// and mixtures, are the old state or the new one, and the new one from the acknowledgement on. Each sync
// that the program leaves out is found. CRASH_ROUNDS chooses how many of these states are tried.
func TestEachSystemCall(t *testing.T) {
	rounds, seed := int(variable(t, "CRASH_ROUNDS", 5)), variable(t, "CRASH_SEED", uint64(time.Now().UnixNano()))
	t.Logf("CRASH_SEED=%d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	calls, starts := 0, 0
	ever := map[string]bool{} // classes of syncs that the test has missed once
	for _, op := range operations {
		t.Run(op.name, func(t *testing.T) {
			r := recordOperation(t, op)
			defer func() { t.Logf("%d steps, answered after %d, %d starts", len(r.steps), r.answered, r.starts) }()
			defer func() { calls, starts = calls+len(r.steps), starts+r.starts }()
			points := append(rng.Perm(len(r.steps) + 1)[:min(rounds/2, len(r.steps)+1)], r.answered)
			for _, n := range points {
				now := r.base
				if n > 0 {
					now = r.steps[n-1].now
				}
				d := durableAfter(r.base, r.steps[:n], nil)
				for i, after := range []*tree{now, d.tree(now, nil), d.tree(now, rng)} {
					if err := r.check(t, after, n); err != nil {
						what := []string{"kill", "loss of power", "loss of power except for a part"}[i]
						t.Fatalf("%s after %d of %d steps, acknowledged after %d: %v\n%s", what, n, len(r.steps), r.answered, err, r.list(n))
					}
				}
			}
			for class, found := range r.mutants(t, op.spared) {
				ever[class] = ever[class] || found
				if !found {
					t.Errorf("without the syncs of %s no loss of power shows a difference:\n%s", class, r.list(len(r.steps)))
				}
			}
		})
	}
	for _, class := range []string{"text of the configuration", "names next to the configuration", "history", "names of state files",
		"contents of state files", "file of a LUN"} {
		if !ever[class] {
			t.Errorf("no operation requires a sync of %s", class)
		}
	}
	t.Logf("%d operations with %d steps, %d starts", len(operations), calls, starts)
}

// list returns the steps until n.
func (r *recording) list(n int) string {
	var b strings.Builder
	for i, s := range r.steps[:n] {
		fmt.Fprintf(&b, "%d: %s\n", i+1, s.what)
	}
	return b.String()
}

// classOf returns what the sync of a step is for. Leaving out one sync of a class may do no harm: a state
// file has a spare copy, and a later sync of a directory makes up for an earlier one.
func classOf(s step) string {
	name := strings.TrimPrefix(s.what, "sync of ")
	switch {
	case s.dir == "" && s.file == 0, name == ".config.yaml.old": // which has what an editor wrote, here nothing
		return ""
	case name == ".config.yaml.new":
		return "text of the configuration"
	case name == ".":
		return "names next to the configuration"
	case strings.HasPrefix(name, "config.yaml.history"):
		return "history"
	case name == "state":
		return "names of state files"
	case strings.HasPrefix(name, "state/"):
		return "contents of state files"
	case strings.HasSuffix(name, ".img"), strings.HasPrefix(name, "#"):
		return "file of a LUN"
	}
	return "other"
}

// mutants leaves out the syncs of one class after the other, from the beginning of the operation to
// its acknowledgement, and returns which ones a loss of power shows. Those in spared it does not try.
func (r *recording) mutants(t *testing.T, spared []string) (found map[string]bool) {
	t.Helper()
	found = map[string]bool{}
	for i, s := range r.steps {
		class := classOf(s)
		_, tried := found[class]
		if i < r.begun || i >= r.answered || class == "" || tried || slices.Contains(spared, class) {
			continue
		}
		found[class] = false
		for n := r.answered; n > i && !found[class]; n-- {
			d := durableAfter(r.base, r.steps[:n], func(i int) bool { return i >= r.begun && classOf(r.steps[i]) == class })
			found[class] = r.check(t, d.tree(r.steps[n-1].now, nil), n) != nil
		}
	}
	return found
}
