package lun

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/lun/state/hometest"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A settingsGateway is a gateway that shares the settings and sync failures of its unit.
type settingsGateway struct {
	*rig
	link   *hometest.Link
	events atomic.Int32
}

// startSettings starts a gateway.
func startSettings(t *testing.T, m *hometest.Memory) *settingsGateway {
	t.Helper()
	g := &settingsGateway{link: m.Link(5 * time.Millisecond)}
	s, err := OpenSharedSettings(t.Context(), g.link)
	if err != nil {
		t.Fatal(err)
	}
	f, err := OpenSharedSyncFailures(t.Context(), g.link)
	if err != nil {
		t.Fatal(err)
	}
	limit := func() time.Duration { return stateLimit }
	s.SetLimit(limit, nil)
	f.SetLimit(limit, nil)
	g.rig = newRig(t, setup{opt: Options{Settings: s, SyncFailures: f, ImplicitAccess: true, Events: func(Event) { g.events.Add(1) }}})
	err = errors.Join(s.Follow(t.Context(), func(string) { g.unit.AdoptSettings() }), f.Follow(t.Context(), func(string) { g.unit.AdoptFailure() }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		g.link.Cut(false)
		if err := errors.Join(s.Close(), f.Close()); err != nil {
			t.Error(err)
		}
	})
	return g
}

// settle is longer than a gateway takes to learn of a change.
const settle = time.Second

// wantProtected checks SWP in the current and in the saved values, and in what a WRITE meets.
func (g *settingsGateway) wantProtected(swp bool) {
	g.t.Helper()
	page, header := control, "0f 00 10 00 8"
	if swp {
		page, header = protected, "0f 00 90 00 8"
	}
	for _, cdb := range []string{"1a 08 0a 00 ff 00", "1a 08 ca 00 ff 00"} {
		wantBytes(g.t, g.good(cdb, nil), unhex(header+page[1:]))
	}
	res := g.run(extentCDB(0x2a, 0, 0, 1), make([]byte, 512))
	if swp {
		wantSense(g.t, res, 0x7, 0x27, 0x02)
	} else {
		wantGood(g.t, "WRITE", res)
	}
}

func (g *settingsGateway) wantDue(n *Nexus, want string) {
	g.t.Helper()
	if got := due(n); got != want {
		g.t.Errorf("attentions %q are due, want %q", got, want)
	}
}

// What an initiator saves through one gateway is in force on all of them, their initiators are notified, and a gateway that starts later has it.
// Without SP nothing can be changed, because there is one copy of the pages.
func TestSharedSettings(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		m := hometest.NewMemory(1)
		a, b := startSettings(t, m), startSettings(t, m)
		neighbor := a.login()
		wantGood(t, "SWP 1 through a", a.save("00 00 00 00"+protected))
		a.wantProtected(true)
		time.Sleep(settle)
		b.wantDue(b.nexus, "2a/01")
		a.wantDue(neighbor, "2a/01")
		a.wantDue(a.nexus, "")
		b.wantProtected(true)

		for _, g := range []*settingsGateway{a, b} {
			res := g.modeSelect(false, "00 00 00 00"+control)
			wantSense(t, res, 0x5, 0x24, 0x00)
			g.wantProtected(true)
		}
		wantGood(t, "an empty list", a.save(""))
		a.reset(a.nexus)
		a.wantProtected(true)

		text := "of b\x00"
		b.good(setInfo(infoText, len(text)), []byte(text))
		time.Sleep(settle)
		a.wantDue(neighbor, "29/03 3f/05")
		a.wantDue(a.nexus, "3f/05")
		b.wantDue(b.nexus, "")
		wantInfo(t, a.rig, a.nexus, infoText, text)
		a.good(setInfo(infoPeripheral, 3), []byte("abc"))
		time.Sleep(settle)
		b.wantDue(b.nexus, "3f/05")
		for _, g := range []*settingsGateway{a, b, startSettings(t, m)} {
			g.wantProtected(true)
			wantInfo(t, g.rig, g.nexus, infoText, text)
			wantInfo(t, g.rig, g.nexus, infoPeripheral, "abc")
		}

		a.wantDue(neighbor, "3f/05")
		if changed, err := b.unit.ResetSettings(); !changed || err != nil {
			t.Errorf("ResetSettings = %v, %v", changed, err)
		}
		time.Sleep(settle)
		for _, g := range []*settingsGateway{a, b} {
			g.wantDue(g.nexus, "2a/01 3f/05")
			g.wantProtected(false)
			wantInfo(t, g.rig, g.nexus, infoText, "")
		}
		if changed, err := a.unit.ResetSettings(); changed || err != nil {
			t.Errorf("ResetSettings of defaults = %v, %v", changed, err)
		}
	})
}

// Two gateways that change different pages, or other settings, at the same time: all changes are there, on both, and each initiator learns of that of
// the other one.
func TestSharedSettingsAtOnce(t *testing.T) {
	for seed := range uint64(8) {
		testkit.Bubble(t, func(t *testing.T) {
			m := hometest.NewMemory(seed)
			a, b := startSettings(t, m), startSettings(t, m)
			thresholds := "00 00 00 00" + provisioningPage(0, 0x80, 0, 100, 0)
			one := begin(a.nexus, 0, fmt.Sprintf("15 11 0000 %02x 00", len(unhex("00 00 00 00"+protected))), unhex("00 00 00 00"+protected))
			two := begin(b.nexus, 0, fmt.Sprintf("15 11 0000 %02x 00", len(unhex(thresholds))), unhex(thresholds))
			<-one.done
			<-two.done
			wantGood(t, "the Control page", one.res)
			wantGood(t, "the Logical Block Provisioning page", two.res)
			time.Sleep(settle)
			for _, g := range []*settingsGateway{a, b} {
				g.wantDue(g.nexus, "2a/01")
				g.wantProtected(true)
				wantBytes(t, g.good("1a 08 1c 02 ff 00", nil)[4:], unhex("d"+provisioningPage(0, 0x80, 0, 100, 0)[1:]))
			}
			list := []*pending{
				begin(a.nexus, 0, setInfo(infoPeripheral, 1), []byte("a")),
				begin(b.nexus, 0, setInfo(infoText, 2), []byte("b\x00")),
				begin(a.nexus, 0, fmt.Sprintf("15 11 0000 %02x 00", len(unhex("00 00 00 00"+control))), unhex("00 00 00 00"+control)),
			}
			for _, p := range list {
				<-p.done
				wantGood(t, "a change at the same time", p.res)
			}
			time.Sleep(settle)
			for _, g := range []*settingsGateway{a, b} {
				due(g.nexus)
				g.wantProtected(false)
				wantInfo(t, g.rig, g.nexus, infoPeripheral, "a")
				wantInfo(t, g.rig, g.nexus, infoText, "b\x00")
			}
		})
	}
}

// While its home does not answer, a change of settings fails in time, and other commands continue. A gateway that was cut off learns then what
// the others have changed meanwhile, and has what they have.
func TestSharedSettingsWithoutHome(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		m := hometest.NewMemory(1)
		a, b := startSettings(t, m), startSettings(t, m)
		text := "of b\x00"
		a.link.Cut(true)
		p := begin(a.nexus, 0, fmt.Sprintf("15 11 0000 %02x 00", len(unhex("00 00 00 00"+protected))), unhex("00 00 00 00"+protected))
		wantGood(t, "READ", atOnce(t, "READ", a.nexus, 0, "28 00 00000000 00 0001 00", nil))
		b.good(setInfo(infoText, len(text)), []byte(text))
		<-p.done
		wantSense(t, p.res, 0x4, 0x44, 0x00)
		if p.ended > stateLimit {
			t.Errorf("answered after %v, want %v at most", p.ended, stateLimit)
		}
		a.wantProtected(false)
		wantInfo(t, a.rig, a.nexus, infoText, "")
		b.wantProtected(false)
		a.link.Cut(false)
		time.Sleep(5 * settle)
		a.wantDue(a.nexus, "3f/05")
		for _, g := range []*settingsGateway{a, b} {
			g.wantProtected(false)
			wantInfo(t, g.rig, g.nexus, infoText, text)
		}
		wantGood(t, "SWP 1 in the end", a.save("00 00 00 00"+protected))
		time.Sleep(settle)
		b.wantDue(b.nexus, "2a/01")
		b.wantProtected(true)
	})
}

// A change whose answer was lost is in force on all gateways or on none, whatever its initiator was told.
func TestSharedSettingsUnsure(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		m := hometest.NewMemory(1)
		a, b := startSettings(t, m), startSettings(t, m)
		key := sharedSettingsKey + testIdentity.Serial
		a.link.Lose(key, 1)
		wantGood(t, "a change of which the home knows", a.save("00 00 00 00"+protected))
		time.Sleep(settle)
		b.wantDue(b.nexus, "2a/01")
		b.wantProtected(true)
		if v, err := a.link.Get(t.Context(), key); err != nil || v.Data == nil {
			t.Fatal(err)
		} else if _, err := a.link.Put(t.Context(), key, []byte("{"), v.Revision); err != nil {
			t.Fatal(err)
		}
		time.Sleep(settle)
		for _, g := range []*settingsGateway{a, b} { // what is in force stays, and nothing can be changed
			g.wantProtected(true)
			wantSense(t, g.save("00 00 00 00"+control), 0x4, 0x44, 0x00)
		}
		if a.events.Load() == 0 || b.events.Load() == 0 {
			t.Error("nobody learns of a damaged record")
		}
	})
}

// What another gateway changes while a unit takes the place of another one, in this process or the next one, is in force, and the initiators that
// stay are notified of it.
func TestSharedSettingsContinue(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		m := hometest.NewMemory(1)
		a, b := startSettings(t, m), startSettings(t, m)
		unit, path := a.unit.State(), a.nexus.State()
		same := startSettings(t, m)
		if err := same.unit.Restore(unit); err != nil {
			t.Fatal(err)
		}
		same.nexus.Restore(path)
		same.wantDue(same.nexus, "")

		a.link.Cut(true)
		text := "of b\x00"
		b.good(setInfo(infoText, len(text)), []byte(text))
		wantGood(t, "SWP 1 through b", b.save("00 00 00 00"+protected))
		next := startSettings(t, m)
		if err := next.unit.Restore(unit); err != nil {
			t.Fatal(err)
		}
		next.nexus.Restore(path)
		next.wantDue(next.nexus, "2a/01 3f/05")
		next.wantProtected(true)
		wantInfo(t, next.rig, next.nexus, infoText, text)

		store, err := backend.OpenMemory(backend.MemoryConfig{Size: 1 << 20})
		if err != nil {
			t.Fatal(err)
		}
		u, err := New(store, Options{Identity: testIdentity, Settings: next.unit.opt.Settings, ImplicitAccess: true})
		if err != nil {
			t.Fatal(err)
		}
		u.InheritFrom(a.unit)
		a.inv.Replace(0, u).Close()
		a.wantDue(a.nexus, "28/00 2a/01 3f/05")
		a.wantProtected(true)
	})
}

// Settings that gateways share cannot be those of a unit whose caches each gateway has for itself.
func TestSharedSettingsRequire(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		s, err := OpenSharedSettings(t.Context(), hometest.NewMemory(1).Link(0))
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range []Options{{Settings: s}, {Settings: s, ImplicitAccess: true}} {
			store, err := backend.OpenMemory(backend.MemoryConfig{Size: 1 << 20})
			if err != nil {
				t.Fatal(err)
			}
			info := store.Info()
			volatile(&info)
			if _, err := New(describedStore{&backendtest.Faulty{Store: store}, info}, o); err == nil {
				t.Errorf("a unit with %+v", o)
			}
		}
	})
}

// A sync that fails on one gateway is on record for all: the next owner fails its syncs, too, until the unit is recovered through any of them.
func TestSharedSyncFailure(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		m := hometest.NewMemory(1)
		a, b := startSettings(t, m), startSettings(t, m)
		const sync = "35 00 00000000 00 0000 00"
		wantFails := func(gateways ...*settingsGateway) {
			t.Helper()
			for _, g := range gateways {
				wantSense(t, g.run(sync, nil), 0x4, 0x0c, 0x00)
				if f := g.unit.SyncFailure(); f == nil || f.Reason != backend.ErrUnsynced.Error() || g.unit.Health() != Failed && g != a {
					t.Errorf("the failure is %+v, health %v", f, g.unit.Health())
				}
			}
		}
		b.good(sync, nil)
		a.store.Fail(backendtest.Sync, backend.ErrUnsynced)
		wantSense(t, a.run(sync, nil), 0x4, 0x0c, 0x00)
		a.store.Fail(backendtest.Sync, nil) // another store
		time.Sleep(settle)
		wantFails(a, b, startSettings(t, m))
		if err := b.unit.DropFailure(); err != nil { // the LUN is deleted on b
			t.Error(err)
		}
		c := startSettings(t, m)
		wantFails(a, c)
		if err := c.unit.ForgetFailure(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(settle)
		for _, g := range []*settingsGateway{a, c, startSettings(t, m)} {
			g.good(sync, nil)
			if f := g.unit.SyncFailure(); f != nil {
				t.Errorf("after the recovery the failure is %+v", f)
			}
		}
	})
}
