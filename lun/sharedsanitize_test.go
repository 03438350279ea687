package lun

import (
	"context"
	"errors"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/backend/gated"
	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/lun/state/hometest"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A sharedDisk is a medium that one of several gateways has open.
type sharedDisk struct {
	*testing.T
	medium backend.Store
	owner  atomic.Pointer[diskGateway] // as the home knows it
	memory *hometest.Memory
}

// A diskGateway is one of them. It is the gate of its store, and its home.
type diskGateway struct {
	*rig
	*hometest.Link
	disk  *sharedDisk
	kept  *Sanitizations
	gated *gated.Store
	open  atomic.Bool // the gate
}

func (g *diskGateway) Admits() bool    { return g.open.Load() }
func (g *diskGateway) MayAnswer() bool { return g.open.Load() }

// Put implements state.Home for OpenSharedSanitizations. As with a lease, the home itself refuses a Put that arrives after the disk has moved.
func (g *diskGateway) Put(ctx context.Context, key string, data []byte, base state.Revision) (state.Revision, error) {
	return g.PutIf(ctx, key, data, base, func() error {
		if g.disk.owner.Load() != g {
			return state.ErrConflict
		}
		return nil
	})
}

// newSharedDisk returns a disk of 4 MiB, and two gateways, of which the first one has it.
func newSharedDisk(t *testing.T) (d *sharedDisk, a, b *diskGateway) {
	t.Helper()
	m, err := backend.OpenMemory(backend.MemoryConfig{Size: 4 << 20})
	if err != nil {
		t.Fatal(err)
	}
	d = &sharedDisk{T: t, medium: m, memory: hometest.NewMemory(1)}
	a, b = d.start(), d.start()
	a.take()
	a.good(extentCDB(0x8a, 0, 0, 8192), pattern(4<<20, 1))
	return d, a, b
}

// diskLimit is how long a command waits for the home.
const diskLimit = 300 * time.Millisecond

// start starts a gateway.
func (d *sharedDisk) start() *diskGateway {
	d.Helper()
	g := &diskGateway{disk: d, Link: d.memory.Link(time.Millisecond)}
	var err error
	if g.kept, err = OpenSharedSanitizations(d.Context(), g); err != nil {
		d.Fatal(err)
	}
	g.kept.SetLimit(func() time.Duration { return diskLimit }, nil)
	g.gated = gated.New(d.medium.Info(), g)
	g.rig = &rig{t: d.T, inv: NewInventory()}
	g.unit, err = New(g.gated, Options{Identity: testIdentity, Sanitize: true, ImplicitAccess: true, Sanitizations: g.kept})
	if err == nil {
		err = g.inv.Add(0, g.unit)
	}
	if err != nil {
		d.Fatal(err)
	}
	d.Cleanup(func() {
		g.Cut(false)
		g.gated.SetAway(true)
		if err := errors.Join(g.inv.Close(), g.kept.Close()); err != nil {
			d.Error(err)
		}
	})
	g.nexus = g.inv.NewNexus(testPort)
	g.run("00", nil) // takes the unit attention
	return g
}

// leave makes the gateway close the medium, if it has it open.
func (g *diskGateway) leave() {
	g.t.Helper()
	g.open.Store(false)
	if g.unit.Moved() {
		g.gated.SetAway(true)
	}
	if err := g.gated.Release(); err != nil {
		g.t.Fatal(err)
	}
	g.gated.SetAway(true)
}

// take makes the gateway the owner, and opens the medium, whatever the owner before does.
func (g *diskGateway) take() {
	g.t.Helper()
	g.disk.owner.Store(g)
	ctx, cancel := context.WithTimeout(g.t.Context(), 20*time.Second)
	defer cancel()
	if err := g.kept.Refresh(ctx, testIdentity.Serial); err != nil {
		g.t.Fatal(err)
	}
	g.gated.SetAway(true)
	if err := g.unit.ResumeSanitize(ctx); err != nil {
		g.t.Fatal(err)
	}
	g.store = &backendtest.Faulty{Store: g.disk.medium}
	if err := g.gated.Adopt(undead{g.store}); err != nil {
		g.t.Fatal(err)
	}
	g.open.Store(true)
}

// move moves the disk to the gateway.
func (g *diskGateway) move() {
	g.t.Helper()
	g.disk.owner.Load().leave()
	g.take()
}

// wantRecord checks whether the home has a record.
func (d *sharedDisk) wantRecord(want bool) {
	d.Helper()
	list, err := d.memory.Link(0).List(context.Background(), SharedSanitizeKey)
	if err != nil || (len(list) == 1) != want || len(list) > 1 {
		d.Errorf("the home has %v, %v; want a record: %v", list, err, want)
	}
}

// wantErased waits until a sanitize has succeeded, and checks that nothing does it again.
func (g *diskGateway) wantErased(others ...*diskGateway) {
	g.t.Helper()
	testkit.Eventually(g.t, "end of the sanitize", func() bool { return g.run("00", nil).status == StatusGood })
	wantBytes(g.t, g.good(extentCDB(0x88, 0, 0, 8192), nil), make([]byte, 4<<20))
	g.disk.wantRecord(false)
	g.good(extentCDB(0x8a, 0, 0, 8192), pattern(4<<20, 2))
	for _, o := range append(others, g) {
		o.move()
		wantBytes(g.t, o.good(extentCDB(0x88, 0, 0, 8192), nil), pattern(4<<20, 2))
	}
}

// The gateway that takes a LUN over continues what the one before has begun, also FORMAT UNIT, and the one before never does.
func TestSanitizeMoves(t *testing.T) {
	for name, cdb := range map[string]string{"SANITIZE": "48 82 0000000000 0000 00", "FORMAT UNIT": "04 10 00 00 00 00"} {
		var list []byte
		ascq := byte(0x1b)
		if name == "FORMAT UNIT" {
			list, ascq = unhex("00 02 0000"), 0x04
		}
		t.Run(name+", hand-over", func(t *testing.T) {
			d, a, b := newSharedDisk(t)
			held, release := a.hold(backendtest.Sync)
			a.good(cdb, list) // IMMED
			<-held
			wantSense(t, a.run(extentCDB(0x28, 0, 0, 1), nil), 0x2, 0x04, ascq)
			d.wantRecord(true)
			time.AfterFunc(50*time.Millisecond, release)
			a.leave()
			<-a.unit.sanitizer.run.done
			if got := a.unit.Status(); got != "ready" {
				t.Errorf("the unit of the gateway that the disk has left is %q", got)
			}
			a.good("12 00 0000 24 00", nil)
			b.take()
			b.wantErased(a, b)
		})
		t.Run(name+", kill", func(t *testing.T) {
			d, a, b := newSharedDisk(t)
			held, release := a.hold(backendtest.Sync)
			a.good(cdb, list)
			<-held
			a.open.Store(false) // a kill -9, or a freeze
			b.take()
			held, let := b.hold(backendtest.Sync)
			<-held
			wantSense(t, b.run(extentCDB(0x28, 0, 0, 1), nil), 0x2, 0x04, ascq)
			release() // a late owner changes nothing
			time.Sleep(50 * time.Millisecond)
			d.wantRecord(true)
			let()
			b.wantErased()
			a.leave()
			a.take()
			wantBytes(t, a.good(extentCDB(0x88, 0, 0, 8192), nil), pattern(4<<20, 2))
		})
		t.Run(name+", opened again", func(t *testing.T) {
			_, a, b := newSharedDisk(t)
			held, release := a.hold(backendtest.Sync)
			a.good(cdb, list)
			<-held
			a.store.FailIO(backend.ErrClosed) // as a daemon that was killed
			a.store.Fail(backendtest.Sync, backend.ErrClosed)
			release()
			time.Sleep(20 * time.Millisecond)
			a.leave()
			a.take()
			a.wantErased(b)
		})
	}
}

// A SANITIZE that waits for its end is not GOOD when its LUN moves.
func TestSanitizeWaitsAndMoves(t *testing.T) {
	_, a, b := newSharedDisk(t)
	held, release := a.hold(backendtest.Sync)
	status := make(chan result)
	go func() {
		n := a.inv.NewNexus(testPort)
		var c Command
		do(n, &c, [8]byte{}, "00", nil, all)
		status <- do(n, &c, [8]byte{}, blockErase, nil, all)
	}()
	<-held
	time.AfterFunc(50*time.Millisecond, release)
	a.leave()
	wantSense(t, <-status, 0x2, 0x04, 0x0a) // ASYMMETRIC ACCESS STATE TRANSITION
	b.take()
	b.wantErased(a)
}

// A gateway that gets its LUN back waits for the end of the calls that an interrupted sanitize still has under way: they would write later otherwise.
func TestSanitizeEndsBeforeItResumes(t *testing.T) {
	_, a, b := newSharedDisk(t)
	held, release := a.hold(backendtest.Sync)
	a.good("48 82 0000000000 0000 00", nil)
	<-held
	a.leave()
	ended := make(chan error, 1)
	go func() { ended <- a.unit.ResumeSanitize(t.Context()) }()
	select {
	case err := <-ended:
		release()
		t.Fatalf("the unit has not waited: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := a.unit.ResumeSanitize(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("it waits for longer than it may: %v", err)
	}
	release()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	a.take()
	a.wantErased(b)
}

// A failed sanitize keeps the medium from all gateways, until one succeeds on any of them.
func TestSanitizeFailsAndMoves(t *testing.T) {
	d, a, b := newSharedDisk(t)
	a.store.Fail(backendtest.Sync, syscall.EIO)
	wantSense(t, a.run(blockErase, nil), 0x3, 0x31, 0x03)
	d.wantRecord(true)
	b.move()
	wantSense(t, b.run(extentCDB(0x28, 0, 0, 1), nil), 0x3, 0x31, 0x03)
	b.good(blockErase, nil)
	b.wantErased(a)
}

// A gateway that has lost its LUN, and does not know it yet, begins nothing that a later one would continue.
func TestSanitizeOfLateOwner(t *testing.T) {
	d, a, b := newSharedDisk(t)
	d.owner.Store(b)
	wantSense(t, a.run(blockErase, nil), 0x2, 0x04, 0x0a)
	d.wantRecord(false)
	wantBytes(t, a.good(extentCDB(0x88, 0, 0, 8192), nil), pattern(4<<20, 1))
	a.leave()
	b.take()
	wantBytes(t, b.good(extentCDB(0x88, 0, 0, 8192), nil), pattern(4<<20, 1))
	b.good(blockErase, nil)
	b.wantErased(a)
}

// While the home does not answer, a sanitize does not end, because the next owner would erase what initiators have written since. Then it does.
func TestSanitizeOutlastsItsHome(t *testing.T) {
	d, a, b := newSharedDisk(t)
	held, release := a.hold(backendtest.Sync)
	a.good("48 82 0000000000 0000 00", nil)
	<-held
	a.Cut(true)
	release()
	for end := time.Now().Add(3 * diskLimit); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		wantSense(t, a.run(extentCDB(0x28, 0, 0, 1), nil), 0x2, 0x04, 0x1b)
	}
	d.wantRecord(true)
	a.Cut(false)
	a.wantErased(b)

	for _, stored := range []bool{false, true} { // what was on its way when the home was cut off arrives after the LUN has moved, or before
		a.move()
		a.Cut(true) // one that may not have been stored keeps everybody from the medium, until the next owner knows
		wantSense(t, a.run(blockErase, nil), 0x3, 0x31, 0x03)
		wantSense(t, a.run(extentCDB(0x2a, 0, 0, 1), make([]byte, 512)), 0x3, 0x31, 0x03)
		if !stored {
			b.move()
		}
		a.Cut(false)
		if err := a.kept.Refresh(t.Context(), testIdentity.Serial); err != nil { // after what was on its way
			t.Fatal(err)
		}
		d.wantRecord(stored)
		if stored {
			b.move()
		}
		testkit.Eventually(t, "the next owner knows", func() bool { return b.run("00", nil).status == StatusGood })
		want := make([]byte, 4<<20)
		if !stored {
			want = pattern(4<<20, 2)
		}
		wantBytes(t, b.good(extentCDB(0x88, 0, 0, 8192), nil), want)
		d.wantRecord(false)
	}
}
