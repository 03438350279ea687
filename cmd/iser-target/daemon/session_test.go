package daemon

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// KillSession ends one session and records an event.
func TestKillSessionEndsOneSession(t *testing.T) {
	l := newLab(t)
	load(t, l.login("stays", store))
	news, cancel := l.Subscribe()
	defer cancel()
	s := l.login("victim", store)
	i := slices.IndexFunc(l.State().Sessions, func(s schema.SessionState) bool { return s.Initiator == prefix+"victim" })
	if err := l.KillSession(t.Context(), l.State().Sessions[i].TSIH, "by a test"); err != nil {
		t.Fatal(err)
	}
	select {
	case <-s.Done():
	case <-time.After(20 * time.Second):
		t.Fatal("the session did not end")
	}
	if err := l.KillSession(t.Context(), 999, ""); !errors.Is(err, ErrNotFound) {
		t.Errorf("no such session: %v", err)
	}
	<-news
	testkit.Eventually(t, "its end is an event", func() bool {
		return slices.ContainsFunc(l.Events(0), func(e schema.Event) bool {
			return e.Text == "session ended" && e.Attrs["reason"] == "by a test" && e.Attrs["initiator"] == prefix+"victim"
		})
	})
}

// ClearReservation removes a reservation whose holder is gone.
func TestClearReservationEndsIt(t *testing.T) {
	l := newLab(t)
	a, b := l.login("a", store), l.login("b", store)
	for _, s := range []*initiator.Session{a, b} {
		attentions(t, s, 0)
	}
	pr := func(s *initiator.Session, action, typ byte, key, sakey byte) string {
		c := &initiator.Command{Out: make([]byte, 24), CDB: [16]byte{0: 0x5f, 1: action, 2: typ, 8: 24}}
		c.Out[7], c.Out[15] = key, sakey
		return do(t, s, c)
	}
	if got := pr(a, 0, 0, 0, 1); got != "" {
		t.Fatal(got)
	}
	if got := pr(a, 1, 3, 1, 0); got != "" { // Exclusive Access
		t.Fatal(got)
	}
	r := &initiator.Command{CDB: cdb.Read16(0, 1), In: make([]byte, 512)}
	if got := do(t, b, r); got != "status 0x18" {
		t.Fatalf("READ of the other initiator: %s", got)
	}
	if rs := l.State().Targets[0].LUNs[0].Reservation; rs == nil || rs.Type != "exclusive access" || len(rs.Registrations) != 1 ||
		!rs.Registrations[0].Holder || rs.Registrations[0].Key != "0x0000000000000001" || !strings.HasPrefix(rs.Registrations[0].Initiator, prefix+"a,i,0x") {
		t.Errorf("reservation %+v", rs)
	}
	if err := l.ClearReservation(t.Context(), store, 0); err != nil {
		t.Fatal(err)
	}
	if got := do(t, b, r); got != "" {
		t.Errorf("READ of the other initiator: %s", got)
	}
	if got := attentions(t, a, 0); got != "2a/03" { // RESERVATIONS PREEMPTED
		t.Errorf("the holder: %s", got)
	}
	if l.State().Targets[0].LUNs[0].Reservation != nil {
		t.Error("the reservation still exists")
	}
	for _, tt := range []struct {
		target string
		lun    int
	}{{store, 0}, {store, 5}, {prefix + "nothing", 0}} {
		if err := l.ClearReservation(t.Context(), tt.target, tt.lun); !errors.Is(err, ErrNotFound) {
			t.Errorf("%v: %v", tt, err)
		}
	}
}
