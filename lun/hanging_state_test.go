package lun

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/tests/testkit"
)

// stateLimit is how long a command waits for the state directory.
const stateLimit = 10 * time.Second

// A hangingState is a state directory whose file system hangs from hang to free.
type hangingState struct {
	reservations *Reservations
	settings     *Settings
	gate         chan struct{}
}

func newHangingState(t *testing.T) *hangingState {
	t.Helper()
	dir := t.TempDir()
	reservations, err := OpenReservations(filepath.Join(dir, "reservations.json"))
	if err != nil {
		t.Fatal(err)
	}
	settings, err := OpenSettings(filepath.Join(dir, "settings.json"))
	if err != nil {
		t.Fatal(err)
	}
	reservations.SetLimit(func() time.Duration { return stateLimit }, nil)
	settings.SetLimit(func() time.Duration { return stateLimit }, nil)
	return &hangingState{reservations: reservations, settings: settings}
}

// options returns the options of a unit that uses the state directory.
func (h *hangingState) options() Options {
	return Options{Reservations: h.reservations, Settings: h.settings, Events: func(Event) {}}
}

// hang makes all syncs wait for free. Syncs are quick before.
func (h *hangingState) hang() {
	h.gate = make(chan struct{})
	sync := func(*os.File) error { <-h.gate; return nil }
	h.reservations.SetSync(sync)
	h.settings.SetSync(sync)
}

// free lets the file system continue, and waits until all is stored.
func (h *hangingState) free() {
	close(h.gate)
	synctest.Wait()
}

func (h *hangingState) close() { _ = errors.Join(h.reservations.Close(), h.settings.Close()) }

// A pending is a command in progress.
type pending struct {
	begun time.Time
	abort atomic.Bool
	done  chan struct{}
	res   result
	ended time.Duration
}

// begin runs a command, with memory of its own, and returns when it waits or has ended.
func begin(n *Nexus, lun byte, cdb string, list []byte) *pending {
	p := &pending{begun: time.Now(), done: make(chan struct{})}
	go func() {
		p.res = do(n, &Command{Abort: &p.abort}, [8]byte{0, lun}, cdb, list, all)
		p.ended = time.Since(p.begun)
		close(p.done)
	}()
	synctest.Wait()
	return p
}

// atOnce returns the result of a command that must not wait.
func atOnce(t *testing.T, what string, n *Nexus, lun byte, cdb string, list []byte) result {
	t.Helper()
	p := begin(n, lun, cdb, list)
	select {
	case <-p.done:
		return p.res
	default:
		t.Fatalf("%s waits for the state directory", what)
		return result{}
	}
}

// prOutCDB returns a PERSISTENT RESERVE OUT with a list of 24 bytes.
func prOutCDB(sa, scopeType byte) string {
	return fmt.Sprintf("5f %02x %02x 0000 00000018 00", sa, scopeType)
}

// While a PERSISTENT RESERVE OUT with APTPL waits for a dead file system, everybody else continues: other
// commands of the unit, its state, a reset, and reservations of other units.
func TestDeadStateDirectoryStopsNobody(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		h := newHangingState(t)
		defer h.close()
		r := newPRRig(t, setup{opt: h.options()})
		other := h.options()
		other.Identity = testIdentity
		other.Identity.NAA[7]++
		other.Identity.Serial = "3001020304050608"
		m, err := backend.OpenMemory(backend.MemoryConfig{Size: 1 << 20})
		if err != nil {
			t.Fatal(err)
		}
		u, err := New(m, other)
		if err != nil {
			t.Fatal(err)
		}
		if err := r.inv.Add(1, u); err != nil {
			t.Fatal(err)
		}
		for _, n := range []*Nexus{r.a, r.b} {
			for range 2 { // REPORTED LUNS DATA HAS CHANGED, and POWER ON of the new unit
				r.on(n, "00", nil)
				do(n, &r.rig.c, [8]byte{0, 1}, "00", nil, all)
			}
		}
		r.ok(r.a, prRegister, 0, prList(0, keyA, 1))
		h.hang()
		p := begin(r.b, 0, prOutCDB(prRegister, 0), prList(0, keyB, 1))

		for what, c := range map[string]struct{ cdb, out string }{
			"PERSISTENT RESERVE IN": {"5e 00 0000000000 ffff 00", ""},
			"READ":                  {"28 00 00000000 00 0001 00", ""},
			"TEST UNIT READY":       {"00", ""},
			"MODE SENSE":            {"1a 00 08 00 ff 00", ""},
		} {
			wantGood(t, what, atOnce(t, what, r.a, 0, c.cdb, unhex(c.out)))
		}
		wantGood(t, "WRITE", atOnce(t, "WRITE", r.a, 0, "2a 00 00000000 00 0001 00", make([]byte, 512)))
		wantGood(t, "REGISTER of another unit", atOnce(t, "REGISTER of another unit", r.a, 1,
			prOutCDB(prRegister, 0), prList(0, keyA, 0)))
		wantGood(t, "RESERVE of another unit", atOnce(t, "RESERVE of another unit", r.a, 1,
			prOutCDB(prReserve, 1), prList(keyA, 0, 0)))
		if info := r.unit.Reservation(); len(info.Registrations) != 1 {
			t.Errorf("the state has %+v, want the registration that is stored", info)
		}
		reset := make(chan struct{})
		go func() { r.a.ResetUnit([8]byte{}, true); close(reset) }()
		if synctest.Wait(); len(p.done) != 0 {
			t.Error("the command that waits has ended")
		}
		select {
		case <-reset:
		default:
			t.Error("LUN RESET waits for the state directory")
		}
		<-p.done
		wantSense(t, p.res, 0x4, 0x44, 0x00)
		if p.ended != stateLimit {
			t.Errorf("answered after %v, want %v", p.ended, stateLimit)
		}
		h.free()
		if s, err := keptState(h.reservations, testIdentity.Serial); err != nil || len(s.registrations) != 1 {
			t.Errorf("kept are %+v, %v: the failed registration came back", s, err)
		}
	})
}

// Commands of one unit that change reservations wait for the one that is being stored: at most 31, each
// until it is aborted or the time is over. None is in force then, nor later.
func TestReservationsWaitForTheirTurn(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		h := newHangingState(t)
		defer h.close()
		r := newPRRig(t, setup{opt: h.options()})
		r.ok(r.a, prRegister, 0, prList(0, keyA, 1))
		h.hang()
		first := begin(r.b, 0, prOutCDB(prRegister, 0), prList(0, keyB, 1))
		time.Sleep(time.Second)
		var list []*pending
		for range maxTurns - 1 {
			list = append(list, begin(r.c, 0, prOutCDB(prRegister, 0), prList(0, keyC, 1)))
		}
		if res := atOnce(t, "one command too many", r.c, 0, prOutCDB(prRegister, 0), prList(0, keyC, 1)); res.status != statusBusy {
			t.Errorf("one command too many: status %#x, want BUSY", res.status)
		}
		list[0].abort.Store(true)
		first.abort.Store(true)
		time.Sleep(time.Second)
		for name, p := range map[string]*pending{"waits": list[0], "is being stored": first} {
			select {
			case <-p.done:
			default:
				t.Errorf("the command that %s does not end when it is aborted", name)
			}
		}
		for _, p := range list[1:] {
			<-p.done
			wantSense(t, p.res, 0x4, 0x44, 0x00)
			if p.ended > stateLimit+time.Second {
				t.Errorf("answered after %v, want about %v", p.ended, stateLimit)
			}
		}
		h.free()
		r.wantKeys(keyA)
		r.ok(r.c, prRegister, 0, prList(0, keyC, 1))
		r.wantKeys(keyA, keyC)
		if s, err := keptState(h.reservations, testIdentity.Serial); err != nil || len(s.registrations) != 2 {
			t.Errorf("kept are %+v, %v, want those of A and C", s, err)
		}
	})
}

// A first registration that is being stored keeps RESERVE out, as if it were in force: both at once
// must not be.
func TestReserveDuringTheFirstRegistration(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		h := newHangingState(t)
		defer h.close()
		r := newPRRig(t, setup{opt: h.options()})
		h.hang()
		p := begin(r.a, 0, prOutCDB(prRegister, 0), prList(0, keyA, 1))
		if res := atOnce(t, "RESERVE(6)", r.b, 0, "16", nil); res.status != statusReservationConflict {
			t.Errorf("RESERVE(6): status %#x, want RESERVATION CONFLICT", res.status)
		}
		h.free()
		<-p.done
		wantGood(t, "REGISTER", p.res)
		r.wantKeys(keyA)
	})
}

// A unit that takes the place of another one does not wait. A registration that the old one was storing
// fails, and is not in the file later.
func TestReplacedWhileStoring(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		h := newHangingState(t)
		defer h.close()
		r := newPRRig(t, setup{opt: h.options()})
		r.ok(r.a, prRegister, 0, prList(0, keyA, 1))
		h.hang()
		p := begin(r.b, 0, prOutCDB(prRegister, 0), prList(0, keyB, 1))
		o := h.options()
		o.Identity = r.unit.opt.Identity
		next, err := New(r.unit.store, o)
		if err != nil {
			t.Fatal(err)
		}
		next.InheritFrom(r.unit)
		h.free()
		<-p.done
		wantSense(t, p.res, 0x4, 0x44, 0x00)
		if n := len(next.Reservation().Registrations); n != 1 {
			t.Errorf("the new unit has %d registrations, want 1", n)
		}
		if s, err := keptState(h.reservations, testIdentity.Serial); err != nil || len(s.registrations) != 1 {
			t.Errorf("kept are %+v, %v, want that of A", s, err)
		}
	})
}

// Saved mode pages and the states of target port groups that wait for a dead file system hold up no
// reset and no other mode, and are not in force.
func TestSettingsOnADeadStateDirectory(t *testing.T) {
	groups := unhex("00000000 03 00 0102")
	for name, c := range map[string]struct {
		cdb  string
		list []byte
	}{
		"MODE SELECT":            {"15 11 0000 10 00", unhex("00 00 00 00" + protected)},
		"MODE SELECT, no pages":  {"15 11 0000 00 00", nil},
		"SET TARGET PORT GROUPS": {"a4 0a 00000000 00000008 00 00", groups},
	} {
		testkit.Bubble(t, func(t *testing.T) {
			h := newHangingState(t)
			defer h.close()
			r, _ := newPortsRig(t, h.options())
			h.hang()
			before := r.unit.mode.Load()
			p := begin(r.a, 0, c.cdb, c.list)
			reset := make(chan struct{})
			go func() { r.b.ResetUnit([8]byte{}, true); close(reset) }()
			synctest.Wait()
			select {
			case <-reset:
			default:
				t.Errorf("%s: LUN RESET waits for the state directory", name)
			}
			atOnce(t, "MODE SELECT without SP", r.b, 0, "15 10 0000 00 00", nil)
			<-p.done
			wantSense(t, p.res, 0x4, 0x44, 0x00)
			h.free()
			if _, ok, err := h.settings.Get(testIdentity.Serial); ok || err != nil {
				t.Errorf("%s: it was stored after its failure: %v", name, err)
			}
			if r.unit.mode.Load() != before || r.unit.access.Load() != nil {
				t.Errorf("%s: it is in force after its failure", name)
			}
		})
	}
}
