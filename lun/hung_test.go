package lun

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/security/limits"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A store that does not answer for store_timeout is reported, its unit takes no more commands for it,
// and it serves again when the store answers.
func TestHungStore(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		var (
			mu     sync.Mutex
			events []StoreHangsEvent
		)
		set := limits.New()
		set.StoreTimeout.SetMax(int64(5 * time.Second))
		r := newRig(t, setup{info: blocking, opt: Options{StoreTimeout: &set.StoreTimeout, Events: func(e Event) {
			if e, ok := e.(StoreHangsEvent); ok {
				mu.Lock()
				defer mu.Unlock()
				events = append(events, e)
			}
		}}})
		r.good(extentCDB(0x8a, 0, 3, 1), pattern(512, 1))
		gate := r.store.Shut()
		began := time.Now()
		first := r.stuck(r.nexus, gate, extentCDB(0x8a, 0, 3, 1), pattern(512, 2))
		time.Sleep(time.Second)
		second := r.stuck(r.nexus, gate, extentCDB(0x88, 0, 4, 1), nil)
		time.Sleep(3500 * time.Millisecond)
		if _, hangs := r.unit.Hang(); hangs || r.unit.Status() != "ready" {
			t.Fatalf("hung before its time: %s", r.unit.Status())
		}
		time.Sleep(time.Second)
		h, hangs := r.unit.Hang()
		if off := h.Since.Sub(began); !hangs || h.Commands != 2 || off < -200*time.Millisecond || off > 200*time.Millisecond {
			t.Fatalf("%+v, %v; want 2 commands since %v", h, hangs, began)
		}
		want := "the store has not answered since " + h.Since.Format(time.TimeOnly) + "; 2 commands wait"
		if got := r.unit.Status(); got != want {
			t.Errorf("status %q, want %q", got, want)
		}
		wantBusy(t, "READ", r.run(extentCDB(0x88, 0, 4, 1), nil))
		wantSense(t, r.run("00", nil), 0x2, 0x04, 0x00)
		r.good("12 00 00 00 24 00", nil)
		if got := set.StoreTimeout.State(); got.Bites != 1 || r.unit.Hangs() != 1 {
			t.Errorf("%+v, %d hangs; want one", got, r.unit.Hangs())
		}

		gate.Open()
		wantGood(t, "the WRITE", <-first.done)
		wantGood(t, "the READ", <-second.done)
		time.Sleep(2 * lookHung)
		r.good("00", nil)
		r.good(extentCDB(0x8a, 0, 3, 1), pattern(512, 3))
		wantBytes(t, r.good(extentCDB(0x88, 0, 3, 1), nil), pattern(512, 3))
		mu.Lock()
		defer mu.Unlock()
		if len(events) != 2 || events[0].Ended || events[0].Commands != 2 || !events[1].Ended ||
			!events[1].Since.Equal(events[0].Since) {
			t.Errorf("events: %+v", events)
		}
	})
}

// A sync that takes long is no reason to stop all others: it has six times as long.
func TestLongSyncIsNoHang(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		set := limits.New()
		set.StoreTimeout.SetMax(int64(5 * time.Second))
		r := newRig(t, setup{info: func(i *backend.Info) { i.Nonblocking, i.VolatileCache = false, true },
			opt: Options{StoreTimeout: &set.StoreTimeout}})
		gate := r.store.Shut(backendtest.Sync)
		s := r.stuck(r.nexus, gate, "35 00 00000000 00 0000 00", nil)
		time.Sleep(29 * time.Second)
		r.good("00", nil)
		r.good(extentCDB(0x8a, 0, 3, 1), pattern(512, 1))
		time.Sleep(4 * time.Second)
		if h, hangs := r.unit.Hang(); !hangs || h.Commands != 1 {
			t.Errorf("%+v, %v: a sync without end does not hang", h, hangs)
		}
		wantBusy(t, "WRITE", r.run(extentCDB(0x8a, 0, 3, 1), pattern(512, 1)))
		gate.Open()
		wantGood(t, "SYNCHRONIZE CACHE", <-s.done)
		time.Sleep(2 * lookHung)
		r.good("00", nil)
	})
}

// An idle unit, and one whose store answers in time, has no timer for long, and does not hang.
func TestStoreWatchEnds(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		r := newRig(t, setup{info: blocking})
		r.good(extentCDB(0x88, 0, 0, 1), nil)
		if !r.unit.watch.armed.Load() {
			t.Error("nobody watches the store during a call")
		}
		time.Sleep(2 * lookBusy)
		if r.unit.watch.armed.Load() {
			t.Error("a timer looks at an idle store")
		}
	})
}

// The lines of the log, which are events, name the unit.
func TestLinesOfAHungStore(t *testing.T) {
	var b bytes.Buffer
	log := slog.New(slog.NewTextHandler(&b, nil))
	since := time.Date(2026, 11, 22, 20, 1, 7, 0, time.UTC)
	for _, e := range []Event{StoreHangsEvent{Serial: "30", Since: since, Commands: 17}, StoreHangsEvent{Serial: "30", Since: since, Ended: true}} {
		if e.Kind() != "lun" {
			t.Errorf("kind %q", e.Kind())
		}
		e.Log(log)
	}
	for _, want := range []string{
		`level=ERROR msg="store does not answer: its LUN is BUSY until it does" naa=30 since=20:01:07 commands=17`,
		`level=INFO msg="store answers again" naa=30 since=20:01:07 after=`,
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%s\nlacks %s", b.String(), want)
		}
	}
}
