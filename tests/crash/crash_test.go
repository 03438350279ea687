// Package crash ends the program at random moments and breaks its connections, and checks that all
// data is what initiators were told.
package crash

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	// go test must not take a result of another program for today's
	_ "github.com/iser-target/iser-target/cmd/iser-target/api"
	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
	_ "github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/tests/interop/harness"
	"github.com/iser-target/iser-target/tests/testkit"
)

func TestMain(m *testing.M) {
	code := m.Run()
	harness.Cleanup()
	os.Exit(code)
}

const (
	store    = "iqn.2026-11.io.example:store"
	changing = "iqn.2026-11.io.example:changing"
	extra    = "iqn.2026-11.io.example:extra"
	overISER = "iqn.2026-11.io.example:host-iser"
	overTCP  = "iqn.2026-11.io.example:host-tcp"

	diskSize        = 1 << 20 // of each LUN; small, so that blocks are written often
	writeThroughLUN = 2
	checkedLUN      = 4
	copiedLUN       = 5
	depth           = 10 // commands that each session has in flight
)

// variable returns the number that an environment variable has.
func variable(t *testing.T, name string, otherwise uint64) uint64 {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return otherwise
	}
	n, err := strconv.ParseUint(text, 0, 64)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return n
}

// A world is a target, and what its initiators and the client of its control API know.
type world struct {
	*harness.Target
	dir   string
	api   *client.Client
	disks []*disk
	res   reservations
	chg   changes

	data            counts
	commands, turns atomic.Int64 // PERSISTENT RESERVE OUT, and changes, that were acknowledged
	taken           int64        // how many of those in flight at a kill had been carried out
	starts          []time.Duration
}

// newWorld starts a target with LUNs of 512 and 4096 bytes per block, one of which is write-through, and one with checksums.
func newWorld(t *testing.T) *world { return newWorldIn(t, t.TempDir()) }

// newWorldIn starts the target of newWorld with all files in dir.
func newWorldIn(t *testing.T, dir string) *world {
	w := &world{dir: dir}
	w.Target = harness.Config{Dir: w.dir, Targets: fmt.Sprintf(`
  - name: %[1]s
    initiators: ["*"]
    luns:
      - {id: 0, backend: file, path: %[3]s/0.img, size: %[4]d}
      - {id: 1, backend: file, path: %[3]s/1.img, size: %[4]d, block_size: 4096}
      - {id: 2, backend: file, path: %[3]s/2.img, size: %[4]d, write_through: true}
      - {id: 3, backend: file, path: %[3]s/3.img, size: %[4]d}
      - {id: 4, backend: file, path: %[3]s/4.img, size: %[4]d, checksums: true}
      - {id: 5, backend: file, path: %[3]s/5.img, size: %[4]d}
  - name: %[2]s
    initiators: ["*"]`, store, changing, w.dir, diskSize)}.Start(t)
	w.disks = []*disk{newDisk(0, 512, diskSize/512), newDisk(1, 4096, diskSize/4096), newDisk(2, 512, diskSize/512), newDisk(4, 512, diskSize/512), newDisk(5, 512, diskSize/512)}
	w.res = reservations{lun: 3, names: [2]string{overISER, overTCP}, acked: registrations{keys: map[string]uint64{}}}
	w.chg = changes{dir: filepath.Join(w.dir, "changing"), target: changing, extra: extra, acked: configured{luns: map[int]lunState{}}}
	if err := os.Mkdir(w.chg.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	w.api = client.New(filepath.Join(w.dir, "control"))
	return w
}

// login logs in over iSER and TCP.
func (w *world) login(t *testing.T) []port {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	a, err := loginISER(ctx, w.Listen()[0], overISER, store)
	if err != nil {
		t.Fatal(err)
	}
	b, err := loginTCP(ctx, w.Listen()[0], overTCP, store, false)
	if err != nil {
		t.Fatal(err)
	}
	w.res.ports = [2]port{a, b}
	return []port{a, b}
}

// run puts load on the target, and kills it after d.
func (w *world) run(t *testing.T, seed uint64, d time.Duration) {
	t.Helper()
	ports := w.login(t)
	var killed atomic.Bool
	var wg sync.WaitGroup
	// each runs f until the target is killed, which is the only reason for an error.
	each := func(stream uint64, f func(*rand.Rand) (lost bool, err error)) {
		rng := rand.New(rand.NewPCG(seed, stream))
		wg.Go(func() {
			for {
				if lost, err := f(rng); err != nil {
					if !lost || !killed.Load() {
						t.Errorf("before the kill: %v", err)
					}
					return
				}
			}
		})
	}
	stream := uint64(0)
	for _, p := range ports {
		for range depth {
			stream++
			each(stream, func(rng *rand.Rand) (bool, error) { return w.disks[rng.IntN(len(w.disks))].step(p, rng, &w.data) })
		}
	}
	each(1000, func(rng *rand.Rand) (bool, error) {
		lost, err := w.res.step(rng)
		if err == nil {
			w.commands.Add(1)
		}
		return lost, err
	})
	each(1001, func(rng *rand.Rand) (bool, error) {
		lost, err := w.chg.step(t.Context(), w.api, rng)
		if err == nil {
			w.turns.Add(1)
		}
		return lost, err
	})
	time.Sleep(d) // of the load
	killed.Store(true)
	w.Kill(t)
	wg.Wait()
	for _, p := range ports {
		p.Close()
	}
}

// again starts the target again.
func (w *world) again(t *testing.T) {
	t.Helper()
	begun := time.Now()
	w.Start(t)
	w.starts = append(w.starts, time.Since(begun))
}

// check returns all in which the target differs from what it acknowledged.
func (w *world) check(t *testing.T) (faults []string) {
	t.Helper()
	ports := w.login(t)
	for i, d := range w.disks {
		more, err := d.readAll(ports[i%len(ports)])
		if err != nil {
			t.Fatal(err)
		}
		faults = append(faults, more...)
	}
	after := func(flight, acked, got string) {
		if got == flight && got != acked {
			w.taken++
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	was, flight := w.res.acked.String(), fmt.Sprint(w.res.flight)
	more, err := w.res.check(ctx, w.api, store)
	if err != nil {
		t.Fatal(err)
	}
	after(flight, was, w.res.acked.String())
	faults = append(faults, more...)
	was, flight = w.chg.acked.String(), fmt.Sprint(w.chg.flight)
	if more, err = w.chg.check(ctx, w.api); err != nil {
		t.Fatal(err)
	}
	after(flight, was, w.chg.acked.String())
	for _, p := range ports {
		p.Close()
	}
	return append(faults, more...)
}

// TestKill ends the program with kill -9 while initiators write over iSER and TCP, reserve, and while
// LUNs are created, resized and deleted. After the next start each block holds the last content that
// was acknowledged or one that was in flight, and so do reservations and configuration.
// CRASH_ROUNDS and CRASH_SEED choose how often, and which commands.
func TestKill(t *testing.T) {
	rounds, seed := variable(t, "CRASH_ROUNDS", 5), variable(t, "CRASH_SEED", uint64(time.Now().UnixNano()))
	t.Logf("CRASH_SEED=%d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	w := newWorld(t)
	for _, d := range w.disks {
		d.seed = seed
	}
	begun := time.Now()
	for round := range rounds {
		w.run(t, rng.Uint64(), 20*time.Millisecond+time.Duration(rng.ExpFloat64()*float64(150*time.Millisecond)))
		w.again(t)
		faults := w.check(t)
		for _, f := range faults[:min(len(faults), 10)] {
			t.Errorf("round %d: %s", round, f)
		}
		if t.Failed() {
			t.Fatalf("round %d: %d faults; CRASH_SEED=%d", round, len(faults), seed)
		}
	}
	slices.Sort(w.starts)
	n := len(w.starts)
	if w.data.acknowledged.Load() == 0 || w.commands.Load() == 0 || w.turns.Load() == 0 {
		t.Error("a part of the load did nothing")
	}
	t.Logf("kills: %d; acknowledged: %d writes, %d syncs, %d PERSISTENT RESERVE OUT, %d changes; verified: %d reads; in flight at a kill: %d writes; "+
		"reservations or changes in flight that were carried out: %d; next start: median %v, slowest %v; in all %v",
		n, w.data.acknowledged.Load(), w.data.syncs.Load(), w.commands.Load(), w.turns.Load(), w.data.reads.Load(), w.data.unanswered.Load(),
		w.taken, w.starts[n/2].Round(time.Millisecond), w.starts[n-1].Round(time.Millisecond), time.Since(begun).Round(time.Second))
}

// TestKillFindsLies shows that the check after a kill sees data that is lost: the test changes it
// while the target does not run.
func TestKillFindsLies(t *testing.T) {
	for name, tt := range map[string]struct {
		lie  func(*testing.T, *world)
		want string
	}{
		"lost write": {func(t *testing.T, w *world) {
			b, at := w.written(t, w.disks[0])
			w.change(t, w.disks[0], at, w.disks[0].content(b.acked.before(), 512))
		}, "but version"},
		"lost write of zeros": {func(t *testing.T, w *world) {
			_, at := w.written(t, w.disks[2])
			w.change(t, w.disks[2], at, make([]byte, 512))
		}, "holds version 0, but version"},
		"write to another block": {func(t *testing.T, w *world) {
			d := w.disks[0]
			b, at := w.written(t, d)
			w.change(t, d, at, d.content(b.acked^1, d.size))
		}, "but version"},
		"write of an earlier test": {func(t *testing.T, w *world) {
			d := w.disks[0]
			b, at := w.written(t, d)
			w.change(t, d, at, (&disk{seed: d.seed + 7}).content(b.acked, d.size))
		}, ", of the seed 7"},
		"torn block": {func(t *testing.T, w *world) {
			b, at := w.written(t, w.disks[1])
			w.change(t, w.disks[1], at+2048, w.disks[1].content(b.acked.before(), 2048))
		}, "is torn: version"},
		"lost registration": {func(_ *testing.T, w *world) {
			w.res.acked.keys, w.res.flight = map[string]uint64{overISER: 1}, nil
		}, "reservations of LUN 3"},
		"lost change": {func(_ *testing.T, w *world) {
			w.chg.acked.luns, w.chg.flight = map[int]lunState{999: {size: 512}}, nil
		}, "LUN 999 of 512 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.run(t, 1, 50*time.Millisecond)
			tt.lie(t, w)
			w.again(t)
			faults := w.check(t)
			if len(faults) != 1 || !strings.Contains(faults[0], tt.want) {
				t.Errorf("the check found %q, want one fault with %q", faults, tt.want)
			}
		})
	}
}

// written returns a block that holds a version, and the offset of it in the file. The target does not
// run, before and after.
func (w *world) written(t *testing.T, d *disk) (b *block, at int64) {
	t.Helper()
	for seed := uint64(2); ; seed++ {
		for i := range d.blocks {
			if b := &d.blocks[i]; b.acked != 0 && b.flight == nil {
				return b, int64(i * d.size)
			}
		}
		w.again(t) // on a busy machine there may be no such block yet
		if faults := w.check(t); len(faults) > 0 {
			t.Fatal(faults)
		}
		w.run(t, seed, 50*time.Millisecond)
	}
}

// change writes to the file of a LUN.
func (w *world) change(t *testing.T, d *disk, at int64, data []byte) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(w.dir, fmt.Sprintf("%d.img", d.lun)), os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteAt(data, at)
	if err = errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
}
