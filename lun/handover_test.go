package lun

import (
	"encoding/json"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// throughJSON returns v as another process gets it.
func throughJSON[T any](t *testing.T, v T) (back T) {
	t.Helper()
	text, err := json.Marshal(v)
	if err == nil {
		err = json.Unmarshal(text, &back)
	}
	if err != nil {
		t.Fatal(err)
	}
	return back
}

// What a unit keeps in memory only is the same in the unit and the nexuses of another process: registrations
// without APTPL and their generation, RESERVE, modes that are not saved, a stopped medium, states of port
// groups, identifying information, unit attentions, PREVENT.
func TestHandOver(t *testing.T) {
	r := newPRRig(t, setup{opt: everything, info: volatile})
	for _, step := range []struct {
		cdb  string
		out  []byte
		from *Nexus
	}{
		{"1e 00 00 00 01 00", nil, r.c},
		{"55 10 0000000000 001c 00", unhex(strings.Repeat("00", 8) + "08 12" + strings.Repeat("00", 18)), r.a}, // WCE 0
		{"a4 0a 00000000 00000008 00 00", unhex("00000000 01 00 0001"), r.a},
	} {
		if got := r.on(step.from, step.cdb, step.out); got.status != 0 {
			t.Fatalf("%s: %+v", step.cdb, got)
		}
	}
	if got := r.out(r.a, 0, 0, prList(0, keyA, 0)); got.status != 0 {
		t.Fatalf("REGISTER: %+v", got)
	}
	r.on(r.c, "00", nil) // its unit attentions
	for range 4 {
		r.on(r.c, "00", nil)
	}
	if got := r.out(r.c, 0, 0, prList(0, keyC, 0)); got.status != 0 {
		t.Fatalf("REGISTER: %+v", got)
	}
	if got := r.out(r.a, 1, 5, prList(keyA, 0, 0)); got.status != 0 {
		t.Fatalf("RESERVE: %+v", got)
	}
	r.unit.stopped.Store(true)
	wantGood(t, "SET IDENTIFYING INFORMATION", r.on(r.a, setInfo(infoText, 2), []byte("x\x00")))
	r.unit.raise(condModeChanged, r.a)
	unit := r.unit.State()
	paths := map[*Nexus][]PathState{r.a: r.a.State(), r.b: r.b.State(), r.c: r.c.State()}
	if why := r.unit.Busy(); why != "" {
		t.Errorf("busy: %s", why)
	}

	next := newRig(t, setup{opt: everything, info: volatile})
	if err := next.unit.Restore(throughJSON(t, unit)); err != nil {
		t.Fatal(err)
	}
	if got := next.unit.State(); !reflect.DeepEqual(got, unit) {
		t.Errorf("the unit is\n%+v, want\n%+v", got, unit)
	}
	if got, want := next.unit.Reservation(), r.unit.Reservation(); !reflect.DeepEqual(got, want) || len(got.Registrations) != 2 {
		t.Errorf("reservations %+v, want %+v", got, want)
	}
	for old, st := range paths {
		n := next.inv.NewNexus(old.port)
		n.Restore(throughJSON(t, st))
		if got := n.State(); !reflect.DeepEqual(got, st) {
			t.Errorf("nexus of %v: %+v, want %+v", old.port, got, st)
		}
	}
	if list := paths[r.c]; len(list) != 1 || !slices.Equal(list[0].Attentions, []string{"2a/01", "3f/05"}) || !list[0].Prevents {
		t.Errorf("the nexus of c has %+v, want MODE PARAMETERS CHANGED, DEVICE IDENTIFIER CHANGED and PREVENT", list)
	}
}

// RESERVE belongs to the same nexus in the other process, and keeps others out.
func TestHandOverOfReserve(t *testing.T) {
	r := newPRRig(t, setup{})
	if got := r.on(r.a, "16 00 00 00 00 00", nil); got.status != 0 {
		t.Fatalf("RESERVE: %+v", got)
	}
	a, c := throughJSON(t, r.a.State()), throughJSON(t, r.c.State())
	next := newRig(t, setup{})
	na, nc := next.inv.NewNexus(portA), next.inv.NewNexus(portC)
	na.Restore(a)
	nc.Restore(c)
	write := func(n *Nexus) byte {
		return do(n, &next.c, [8]byte{}, "2a 00 00000000 00 0001 00", make([]byte, 512), all).status
	}
	if got := write(nc); got != statusReservationConflict {
		t.Errorf("WRITE of another nexus: status %#x", got)
	}
	if got := write(na); got != 0 {
		t.Errorf("WRITE of the holder: status %#x", got)
	}
	na.Close()
	if got := write(nc); got != 0 {
		t.Errorf("WRITE after the session of the holder: status %#x", got)
	}
}

// A state that cannot be is refused, and one of another version leaves the initiator informed.
func TestRestoreRefuses(t *testing.T) {
	r := newPRRig(t, setup{})
	r.out(r.a, 0, 0, prList(0, keyA, 0))
	good := r.unit.State()
	for want, spoil := range map[string]func(st *UnitState){
		"health":        func(st *UnitState) { st.Health = "fine" },
		"NAA":           func(st *UnitState) { st.Reservation.NAA = "1" },
		"who made 0":    func(st *UnitState) { st.MadeBy = nil },
		"initiator por": func(st *UnitState) { st.Reservation.Registrations[0].Initiator = "x" },
		"unknown":       func(st *UnitState) { st.PortGroups = []portGroupEntry{{1, "asleep"}} },
		"-512 bytes":    func(st *UnitState) { st.Views = [][2]int64{{0, 512}, {0, -512}} },
		"bytes at 1 ar": func(st *UnitState) { st.Views = [][2]int64{{1, math.MaxInt64}} },
		"bytes at -1 a": func(st *UnitState) { st.Views = [][2]int64{{-1, 1}} },
	} {
		st := throughJSON(t, good)
		spoil(&st)
		if err := newRig(t, setup{}).unit.Restore(st); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
	n := newRig(t, setup{}).inv.NewNexus(portB)
	n.Restore([]PathState{{LUN: 0, Attentions: []string{"77/77"}}, {LUN: 9}})
	if got := n.State(); len(got) != 1 || len(got[0].Attentions) != 1 || got[0].Attentions[0] != condReset.code() {
		t.Errorf("after an unknown attention: %+v", got)
	}
	if why := r.unit.Busy(); why != "" {
		t.Errorf("busy: %s", why)
	}
	for _, row := range byOpcode[opExtendedCopy] {
		if !slices.Contains(copyCommands[:], row.sa) {
			continue
		}
		c := &Command{row: row}
		r.unit.copying.add(c, 1)
		if why, want := r.unit.Busy(), row.name+" is in progress"; why != want {
			t.Errorf("busy: %q, want %q", why, want)
		}
		r.unit.copying.add(c, -1)
	}
	for formats, want := range map[bool]string{false: "SANITIZE is in progress", true: "FORMAT UNIT is in progress"} {
		r.unit.sanitizer.formats.Store(formats)
		r.unit.sanitizer.state.Store(sanitizeRunning)
		if why := r.unit.Busy(); why != want {
			t.Errorf("busy: %q, want %q", why, want)
		}
		r.unit.sanitizer.state.Store(sanitizeIdle)
	}
}
