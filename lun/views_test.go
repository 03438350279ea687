package lun

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A fakeSplicer copies from a store.
type fakeSplicer struct {
	backend.Store
	err    error // of Splice
	freeze func(r byteRange) error
	frozen chan byteRange
}

func (s *fakeSplicer) CanSplice() bool { return true }

func (s *fakeSplicer) Splice(pipe int, off, n int64) error {
	if s.err != nil {
		return s.err
	}
	p := make([]byte, n)
	if err := s.ReadAt(p, off); err != nil {
		return err
	}
	_, err := unix.Write(pipe, p)
	return err
}

func (s *fakeSplicer) Freeze(off, n int64) error {
	s.frozen <- byteRange{off, n}
	return s.freeze(byteRange{off, n})
}

// A fakeViewer counts what changes ask of it.
type fakeViewer struct{ presses, lags atomic.Int32 }

func (v *fakeViewer) Press() { v.presses.Add(1) }
func (v *fakeViewer) Lag()   { v.lags.Add(1) }

// splices gives the unit of r a fakeSplicer, whose Freeze succeeds.
func (r *rig) splices() *fakeSplicer {
	s := &fakeSplicer{Store: r.store, freeze: func(byteRange) error { return nil }, frozen: make(chan byteRange, 10)}
	r.unit.splicer = s
	return s
}

// refer reads blocks by a View, which it returns, however many changes have waited.
func refer(t testing.TB, n *Nexus, lba, blocks uint64, pipe testkit.Pipe, viewer Viewer) *View {
	t.Helper()
	c := Command{CDB: append([]byte(nil), unhex(extentCDB(0x88, 0, lba, blocks))...)}
	v := &View{}
	ok := n.Begin(&c)
	for tries := 0; ok && tries < 1000 && !n.Refers(&c); tries++ {
		for i := range c.unit.ranges {
			c.unit.ranges[i].copied.Store(0)
		}
	}
	if !ok || !n.Refer(&c, 0, blocks*512, pipe.In, v, viewer) {
		t.Fatalf("no View: status %#x, sense % x", c.Status, c.Sense())
	}
	n.End(&c)
	return v
}

// Each command that changes blocks of a View asks its connection for the acknowledgment, and waits for it. Other blocks of the same stripe do not
// wait. A READ that begins meanwhile has no View.
func TestChangesWaitForViews(t *testing.T) {
	const lba = 109
	patient := everything
	patient.ViewWait = time.Hour
	list := copyList(1, 2, []string{cscdZero, cscdOne}, []string{blocks(0, 0, 1, 500, lba)})
	run := func(cdb string, out []byte) func(*odxRig) result {
		return func(r *odxRig) result { return do(r.nexus, new(Command), [8]byte{}, cdb, out, all) }
	}
	changes := map[string]func(*odxRig) result{
		"WRITE":                run(extentCDB(0x8a, 0, lba, 1), pattern(512, 2)),
		"WRITE with FUA":       run(extentCDB(0x8a, fua, lba, 1), pattern(512, 2)),
		"WRITE AND VERIFY":     run(extentCDB(0x8e, 2, lba, 1), pattern(512, 2)),
		"ORWRITE":              run(extentCDB(0x8b, 0, lba, 1), pattern(512, 2)),
		"WRITE SAME":           run(extentCDB(0x93, 0, lba, 1), pattern(512, 2)),
		"WRITE SAME of zeros":  run(extentCDB(0x93, 0, lba, 1), make([]byte, 512)),
		"WRITE SAME and UNMAP": run(extentCDB(0x93, wsUnmap, lba, 1), make([]byte, 512)),
		"UNMAP":                run("42 00 00000000 00 0018 00", unhex("0016 0010 00000000 000000000000006d 00000001 00000000")),
		"WRITE ATOMIC":         run("9c 00 000000000000006d 0000 0001 00 00", pattern(512, 2)),
		"COMPARE AND WRITE":    run("89 00 000000000000006d 000000 01 00 00", append(pattern(512, 1), pattern(512, 2)...)),
		"EXTENDED COPY":        run(copyCDB(list), unhex(list)),
		"the zero token": func(r *odxRig) result {
			return writeToken(r.nexus, 0, 1, 0, zeroToken, blockRange{lba, 1})
		},
		"a token of another unit": func(r *odxRig) result {
			return writeToken(r.nexus, 0, 1, 0, r.token(1, blockRange{700, 1}), blockRange{lba, 1})
		},
	}
	for name, change := range changes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newODXRig(t, setup{opt: patient, info: func(i *backend.Info) { i.VolatileCache, i.AtomicWrite = true, 4096 }}, setup{})
			s, pipe, viewer := r.splices(), testkit.NewPipe(t), &fakeViewer{}
			s.freeze = func(byteRange) error { return errors.New("not now") }
			r.write(0, lba, pattern(512, 1))
			r.write(0, lba-1, pattern(512, 1)) // and the block before
			v := refer(t, r.nexus, lba, 8, pipe, viewer)
			done := make(chan result, 1)
			go func() { done <- change(r) }()
			testkit.Eventually(t, "a question", func() bool { return viewer.presses.Load() > 0 })
			wantGood(t, "a WRITE of the block before", do(r.nexus, new(Command), [8]byte{}, extentCDB(0x8a, 0, lba-1, 1), pattern(512, 3), all))
			select {
			case res := <-done:
				t.Fatalf("it has not waited: status %#x, sense % x", res.status, res.sense)
			default:
			}
			if w := refer(t, r.nexus, lba+4, 8, testkit.NewPipe(t), viewer); w.unit != nil {
				t.Error("a View begins while a change waits")
			}
			got := pipe.Content(t) // the initiator receives
			v.End()
			wantGood(t, name, <-done)
			wantBytes(t, got[:512], pattern(512, 1))
			if bytes.Equal(r.read(0, lba, 1), got[:512]) {
				t.Error("nothing has changed")
			}
			if viewer.lags.Load() != 0 || len(s.frozen) != 0 {
				t.Errorf("%d times too slow, %d ranges frozen", viewer.lags.Load(), len(s.frozen))
			}
			if r.unit.ranges.viewed(allStripes) || r.unit.ranges.announced(allStripes) || len(r.unit.views.list) != 0 {
				t.Error("something is left")
			}
		})
	}
}

// After viewWait a change does not wait for an initiator any longer. The store gets what the View shows to other pages, all of it and whole pages, and the View
// is over. Later changes do not wait for other Views of that connection, either, only for those of others. What cannot be frozen shows a WRITE, but no
// command that is all or nothing or ORDERED, which are BUSY, for viewLimit.
func TestChangesDoNotWaitLong(t *testing.T) {
	r := newRig(t, setup{size: 4 << 20, opt: everything, info: func(i *backend.Info) { i.AtomicWrite = 4096 }})
	s, slow, other := r.splices(), &fakeViewer{}, &fakeViewer{}
	write := func(lba, n uint64) (res result, waits bool) { // for an initiator
		before := slow.presses.Load() + other.presses.Load()
		res = do(r.nexus, new(Command), [8]byte{}, extentCDB(0x8a, 0, lba, n), pattern(int(n)*512, 2), all)
		return res, slow.presses.Load()+other.presses.Load() > before
	}
	first := refer(t, r.nexus, 300, 128, testkit.NewPipe(t), slow)
	second := refer(t, r.nexus, 1000, 128, testkit.NewPipe(t), slow)
	third := refer(t, r.nexus, 2000, 128, testkit.NewPipe(t), other)
	began := time.Now()
	res, waits := write(427, 1)
	wantGood(t, "WRITE", res)
	if took := time.Since(began); took < viewWait || slow.lags.Load() != 1 || !waits {
		t.Errorf("after %v, with %d questions, %d times too slow", took, slow.presses.Load(), slow.lags.Load())
	}
	const align = backend.FreezeAlign
	if want, got := (byteRange{300 * 512 / align * align, align * 2}), <-s.frozen; got != want {
		t.Errorf("%+v is frozen, want %+v", got, want)
	}
	if !first.gone || second.gone || third.gone || len(r.unit.views.list) != 2 {
		t.Errorf("gone: %t, %t, %t", first.gone, second.gone, third.gone)
	}
	if res, waits := write(300, 1); res.status != 0 || waits || len(s.frozen) != 0 {
		t.Errorf("a WRITE of what is frozen: status %#x, it waits: %t, %d ranges frozen", res.status, waits, len(s.frozen))
	}
	if res, waits := write(1000, 8); res.status != 0 || waits || (<-s.frozen).n == 0 || !second.gone {
		t.Errorf("a WRITE of another View of the connection: status %#x, it waits: %t, gone %t", res.status, waits, second.gone)
	}
	if res, waits := write(2000, 8); res.status != 0 || !waits || (<-s.frozen).n == 0 || other.lags.Load() != 1 {
		t.Errorf("a WRITE of a View of another connection: status %#x, it waits: %t", res.status, waits)
	}
	for _, v := range []*View{first, second, third} {
		v.End()
	}

	s.freeze = func(byteRange) error { return errors.New("not now") }
	v := refer(t, r.nexus, 300, 8, testkit.NewPipe(t), slow)
	strict := map[string]func() result{
		"COMPARE AND WRITE": func() result {
			return do(r.nexus, new(Command), [8]byte{}, "89 00 000000000000012c 000000 01 00 00", append(r.good(extentCDB(0x88, 0, 300, 1), nil), pattern(512, 4)...), all)
		},
		"WRITE ATOMIC": func() result {
			return do(r.nexus, new(Command), [8]byte{}, "9c 00 000000000000012c 0000 0001 00 00", pattern(512, 5), all)
		},
		"ORWRITE": func() result {
			return do(r.nexus, new(Command), [8]byte{}, extentCDB(0x8b, 0, 300, 1), pattern(512, 6), all)
		},
		"an ORDERED WRITE": func() result {
			return do(r.nexus, &Command{Ordered: true}, [8]byte{}, extentCDB(0x8a, 0, 300, 1), pattern(512, 7), all)
		},
		"an ORDERED WRITE SAME": func() result {
			return do(r.nexus, &Command{Ordered: true}, [8]byte{}, extentCDB(0x93, 0, 300, 1), pattern(512, 8), all)
		},
	}
	before := r.good(extentCDB(0x88, 0, 300, 1), nil)
	for name, f := range strict {
		if res := f(); res.status != StatusBusy || res.sense != nil {
			t.Errorf("%s of a View that cannot be frozen: status %#x, sense % x", name, res.status, res.sense)
		}
		<-s.frozen
	}
	wantBytes(t, r.good(extentCDB(0x88, 0, 300, 1), nil), before)
	if res, _ := write(300, 1); res.status != 0 {
		t.Errorf("a WRITE of a View that cannot be frozen: status %#x", res.status)
	}
	v.lagged = v.lagged.Add(-viewLimit)
	for name, f := range strict {
		wantGood(t, name, f())
	}
	v.End()
}

// Where changes have to wait for Views again and again, READs copy for a while. Others do not.
func TestViewsRest(t *testing.T) {
	r := newRig(t, setup{size: 4 << 20})
	s, stripe := r.splices(), &r.unit.ranges[0]
	s.frozen = make(chan byteRange, 100)
	wait := func() { // a WRITE waits for two blocks of stripe 0
		v := refer(t, r.nexus, 300, 2, testkit.NewPipe(t), &fakeViewer{})
		wantGood(t, "WRITE", do(r.nexus, new(Command), [8]byte{}, extentCDB(0x8a, 0, 301, 1), pattern(512, 2), all))
		v.End()
	}
	refers := func(lba, blocks uint64) bool {
		c := Command{CDB: unhex(extentCDB(0x88, 0, lba, blocks))}
		if !r.nexus.Begin(&c) {
			t.Fatal("the READ fails")
		}
		return r.nexus.Refers(&c)
	}
	wait()
	if stripe.waited.Load() == 0 || !refers(0, 64) {
		t.Error("READs copy after one WRITE has waited")
	}
	stripe.waited.Store(viewClock() - int64(viewNear))
	wait()
	if !refers(0, 64) {
		t.Error("READs copy after WRITEs have waited at long intervals")
	}
	stripe.waited.Store(viewClock() + int64(time.Hour)) // the next wait is near, however busy the machine is
	wait()
	stripe.copied.Store(stripe.copied.Load() + int64(time.Hour))
	if refers(0, 64) || refers(2047, 2) {
		t.Error("READs refer after WRITEs have waited at short intervals")
	}
	if !refers(2048, 64) || r.unit.ranges[1].waited.Load() != 0 {
		t.Error("READs of another MiB copy")
	}
	stripe.copied.Store(viewClock())
	if !refers(0, 64) {
		t.Error("READs copy later on")
	}
}

// A change that waits for a View ends when its command is aborted, and when the unit is closed.
func TestWaitForViewIsAborted(t *testing.T) {
	r := newRig(t, setup{size: 4 << 20, opt: Options{ViewWait: time.Hour}})
	s := r.splices()
	viewer := &fakeViewer{}
	v := refer(t, r.nexus, 300, 8, testkit.NewPipe(t), viewer)
	defer v.End()
	var abort atomic.Bool
	done := make(chan result, 1)
	go func() {
		done <- do(r.nexus, &Command{Abort: &abort}, [8]byte{}, extentCDB(0x8a, 0, 300, 1), pattern(512, 2), all)
	}()
	testkit.Eventually(t, "a question", func() bool { return viewer.presses.Load() > 0 })
	abort.Store(true)
	wantSense(t, <-done, 0xb, 0x00, 0x00)
	r.unit.opt.ViewWait = viewWait
	r.unit.gate.Shut()
	if res := do(r.nexus, new(Command), [8]byte{}, extentCDB(0x8a, 0, 300, 1), pattern(512, 2), all); res.status != StatusCheckCondition || len(s.frozen) != 0 {
		t.Errorf("status %#x of a unit that is closed", res.status)
	}
}

// After the end of its connection a View stays for a while, and changes do not wait for it: the initiator may still receive what is on its way.
func TestAbandonedView(t *testing.T) {
	r := newRig(t, setup{size: 4 << 20})
	s, viewer := r.splices(), &fakeViewer{}
	v := refer(t, r.nexus, 300, 8, testkit.NewPipe(t), viewer)
	w := refer(t, r.nexus, 300, 8, testkit.NewPipe(t), viewer)
	v.Abandon()
	w.End()
	if v.unit != nil || len(r.unit.views.list) != 1 || !r.unit.ranges.viewed(stripesOf(300*512, 1)) {
		t.Fatal("the View is over")
	}
	wantGood(t, "WRITE", do(r.nexus, new(Command), [8]byte{}, extentCDB(0x8a, 0, 300, 1), pattern(512, 2), all))
	if len(s.frozen) != 1 || viewer.presses.Load() != 0 {
		t.Errorf("%d ranges are frozen, and the connection was asked %d times", len(s.frozen), viewer.presses.Load())
	}
	if len(r.unit.views.list) != 0 || r.unit.ranges.viewed(allStripes) {
		t.Error("the View stays")
	}
	v = refer(t, r.nexus, 300, 8, testkit.NewPipe(t), viewer)
	v.Abandon()
	r.unit.views.list[0].End() // what the timer does
	if len(r.unit.views.list) != 0 || r.unit.ranges.viewed(allStripes) {
		t.Error("the View stays")
	}
}

// What is on its way to an initiator is known to the unit that continues with the store: after an upgrade, and after the store was closed and opened again.
func TestViewsOfThePredecessor(t *testing.T) {
	for name, follow := range map[string]func(old, next *Unit) error{
		"upgrade": func(old, next *Unit) error { return next.Restore(throughJSON(t, old.State())) },
		"reopened": func(old, next *Unit) error {
			absent, err := NewAbsent(512, Options{Identity: old.Identity()})
			if err != nil {
				return err
			}
			absent.InheritFrom(old)
			next.InheritFrom(absent)
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			old, r := newRig(t, setup{size: 4 << 20}), newRig(t, setup{size: 4 << 20})
			old.splices()
			s, viewer := r.splices(), &fakeViewer{}
			v := refer(t, old.nexus, 300, 8, testkit.NewPipe(t), viewer)
			w := refer(t, old.nexus, 5000, 8, testkit.NewPipe(t), viewer)
			if err := follow(old.unit, r.unit); err != nil {
				t.Fatal(err)
			}
			v.End()
			w.Abandon()
			if len(r.unit.views.list) != 2 {
				t.Fatalf("%d Views", len(r.unit.views.list))
			}
			wantGood(t, "WRITE", do(r.nexus, new(Command), [8]byte{}, extentCDB(0x8a, 0, 307, 2), pattern(1024, 1), all))
			if len(s.frozen) != 1 || viewer.presses.Load() != 0 {
				t.Errorf("%d ranges are frozen, and the connection was asked %d times", len(s.frozen), viewer.presses.Load())
			}
			if len(r.unit.views.list) != 1 {
				t.Fatalf("%d Views are left", len(r.unit.views.list))
			}
			r.unit.views.list[0].End() // what the timer does
			if r.unit.ranges.viewed(allStripes) {
				t.Error("a View stays")
			}
		})
	}
	memory := newRig(t, setup{})
	st := memory.unit.State()
	st.Views = [][2]int64{{0, 512}}
	if err := memory.unit.Restore(st); err != nil || len(memory.unit.views.list) != 0 {
		t.Errorf("a store without Views: %v, %d Views", err, len(memory.unit.views.list))
	}
}

// A SANITIZE waits for the acknowledgment of READs, and they do not show it.
func TestSanitizeWaitsForViews(t *testing.T) {
	r := newRig(t, sanitizable)
	s, viewer := r.splices(), &fakeViewer{}
	v := refer(t, r.nexus, 300, 8, testkit.NewPipe(t), viewer)
	erased := func() bool { return r.unit.sanitizer.progress.Load() > 0 || !r.unit.isSanitizing() }
	s.freeze = func(byteRange) error {
		if erased() {
			t.Error("the SANITIZE has begun to erase")
		}
		return nil
	}
	wantGood(t, "SANITIZE", do(r.nexus, new(Command), [8]byte{}, "48 82 00 00 00 00 00 00 00 00", nil, all))
	testkit.Eventually(t, "the question", func() bool { return viewer.presses.Load() > 0 })
	testkit.Eventually(t, "the end", func() bool { return !r.unit.isSanitizing() })
	if len(s.frozen) != 1 || viewer.lags.Load() != 1 || !v.gone {
		t.Errorf("%d ranges are frozen, %d times too slow", len(s.frozen), viewer.lags.Load())
	}
	v = refer(t, r.nexus, 300, 8, testkit.NewPipe(t), &fakeViewer{})
	s.freeze = func(byteRange) error { return errors.New("not now") }
	wantGood(t, "SANITIZE", do(r.nexus, new(Command), [8]byte{}, "48 02 00 00 00 00 00 00 00 00", nil, all))
	v.End()
}

// A READ by a View meets what others meet: errors of the store, which are not data; a store that cannot splice, of which it copies.
func TestReferFails(t *testing.T) {
	r := newRig(t, setup{size: 4 << 20})
	s, pipe := r.splices(), testkit.NewPipe(t)
	r.good(extentCDB(0x8a, 0, 300, 600), pattern(600*512, 1))
	s.err = errors.New("a bad sector")
	c := Command{CDB: unhex(extentCDB(0x88, 0, 300, 600))}
	var v View
	if !r.nexus.Begin(&c) || r.nexus.Refer(&c, 0, 600*512, pipe.In, &v, nil) {
		t.Fatal("no error")
	}
	if c.Status != StatusCheckCondition || v.unit != nil || len(r.unit.views.list) != 0 {
		t.Errorf("status %#x, and %d Views", c.Status, len(r.unit.views.list))
	}
	s.err = fmt.Errorf("wrapped: %w", backend.ErrNoSplice)
	w := refer(t, r.nexus, 300, 600, pipe, nil)
	if w.unit != nil || len(r.unit.views.list) != 0 {
		t.Error("a View of a copy")
	}
	wantBytes(t, pipe.Content(t), pattern(600*512, 1))
	r.store.Fail(backendtest.ReadAt, errors.New("a bad sector"))
	c = Command{CDB: unhex(extentCDB(0x88, 0, 300, 600))}
	if !r.nexus.Begin(&c) || r.nexus.Refer(&c, 0, 600*512, pipe.In, &v, nil) || c.Status != StatusCheckCondition {
		t.Errorf("a copy that fails: status %#x", c.Status)
	}
}

// What a READ by a View has is not newer than its end, whatever changes the blocks while the initiator receives it, with all commands at once on a file. An
// initiator that is slow does not change that.
func TestViewsShowNothingNewer(t *testing.T) {
	r := filePair(t, backendtest.SpliceDir(t), 8<<20)
	u := r.nexus.list()[0].unit
	const blocks, places = 64, 16
	block := func(lba, version uint64) []byte {
		b := make([]byte, 512)
		for i := 0; i < len(b); i += 8 {
			binary.BigEndian.PutUint64(b[i:], version)
		}
		return b
	}
	var begun [places]atomic.Uint64 // the version of the last WRITE that has begun
	var wg sync.WaitGroup
	var reads, views atomic.Int32
	slow := new(fakeViewer)
	begin := time.Now()
	enough := func() bool { // or too much
		took := time.Since(begin)
		return took > time.Second && views.Load() > 0 && slow.lags.Load() > 0 || took > 30*time.Second
	}
	write := func(n *Nexus, c *Command, place uint64, kind int) {
		version := begun[place].Add(1)
		lba := place * blocks
		data := bytes.Repeat(block(lba, version), blocks)
		var res result
		switch kind {
		case 0:
			res = do(n, c, [8]byte{}, extentCDB(0x8a, 0, lba, blocks), data, all)
		case 1:
			res = do(n, c, [8]byte{}, extentCDB(0x93, 0, lba, blocks), data[:512], all)
		default:
			old := do(n, c, [8]byte{}, extentCDB(0x88, 0, lba, 1), nil, all).in
			res = do(n, c, [8]byte{}, fmt.Sprintf("89 00 %016x 000000 01 00 00", lba), append(old, data[:512]...), all)
			if res.status == StatusCheckCondition { // MISCOMPARE: another one was faster
				res.status = 0
			}
		}
		if res.status != 0 {
			t.Errorf("kind %d: status %#x, sense % x", kind, res.status, res.sense)
		}
	}
	for i := range 2 {
		n := r.login()
		wg.Go(func() {
			c := new(Command)
			for !enough() {
				write(n, c, rand.Uint64N(places), rand.IntN(3))
				time.Sleep(time.Duration(i) * time.Millisecond)
			}
		})
	}
	for i := range 3 {
		n, pipe, viewer := r.login(), testkit.NewPipe(t), new(fakeViewer)
		if i == 0 {
			viewer = slow
		}
		wg.Go(func() {
			for !enough() {
				place := rand.Uint64N(places)
				v := refer(t, n, place*blocks, blocks, pipe, viewer)
				newest := begun[place].Load()
				if v.unit != nil {
					views.Add(1)
				}
				if viewer == slow { // slower than viewWait
					time.Sleep(viewWait * 3 / 2)
				} else {
					time.Sleep(time.Duration(rand.IntN(300)) * time.Microsecond)
				}
				got := pipe.Content(t)
				v.End()
				reads.Add(1)
				for j := 0; j < len(got); j += 8 {
					if version := binary.BigEndian.Uint64(got[j:]); version > newest {
						t.Errorf("version %d at byte %d, where the latest WRITE was %d when the READ ended", version, j, newest)
						return
					}
				}
			}
		})
	}
	wg.Wait()
	if views.Load() == 0 || slow.lags.Load() == 0 || !u.splicer.CanSplice() {
		t.Errorf("%d READs, %d of them by Views, %d times too slow", reads.Load(), views.Load(), slow.lags.Load())
	}
	t.Logf("%d READs, %d of them by Views, %d times too slow", reads.Load(), views.Load(), slow.lags.Load())
	if len(u.views.list) != 0 || u.ranges.viewed(allStripes) || u.ranges.announced(allStripes) {
		t.Error("something is left")
	}
}
