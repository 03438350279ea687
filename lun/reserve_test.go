package lun

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
)

// passes has, for the name of a row, what a persistent reservation does with the command (SPC-4
// and SBC-3, tables of commands allowed in the presence of various reservations): Allowed or
// Conflict, for
//
//	Write Exclusive         from any other nexus
//	Exclusive Access        from any other nexus
//	registrants types       from a registered nexus
//	Write Exclusive - RR    from a nexus that is not registered
//	Exclusive Access - RR   from a nexus that is not registered
//
// Missing rows are CCACC: a new row that is not needs an entry.
var passes = map[string]string{
	"TEST UNIT READY":                  "AAAAA",
	"REQUEST SENSE":                    "AAAAA",
	"INQUIRY":                          "AAAAA",
	"REPORT LUNS":                      "AAAAA",
	"READ CAPACITY(10)":                "AAAAA",
	"READ CAPACITY(16)":                "AAAAA",
	"START STOP UNIT":                  "AAAAA", // rowCDB has START 1
	"MODE SENSE(6)":                    "ACAAC",
	"MODE SENSE(10)":                   "ACAAC",
	"REPORT SUPPORTED OPERATION CODES": "ACAAC",
	"REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS": "ACAAC",
	"READ(6)":              "ACAAC",
	"READ(10)":             "ACAAC",
	"READ(12)":             "ACAAC",
	"READ(16)":             "ACAAC",
	"VERIFY(10)":           "ACAAC",
	"VERIFY(12)":           "ACAAC",
	"VERIFY(16)":           "ACAAC",
	"PRE-FETCH(10)":        "ACAAC",
	"PRE-FETCH(16)":        "ACAAC",
	"READ DEFECT DATA(10)": "ACAAC",
	"READ DEFECT DATA(12)": "ACAAC",
	"GET LBA STATUS":       "ACAAC",
	"POPULATE TOKEN":       "ACAAC",
	"READ BUFFER":          "ACAAC",

	"LOG SENSE":                         "AAAAA",
	"PREVENT ALLOW MEDIUM REMOVAL":      "AAAAA", // rowCDB has PREVENT 0
	"REPORT TARGET PORT GROUPS":         "AAAAA",
	"REPORT TIMESTAMP":                  "AAAAA",
	"REPORT IDENTIFYING INFORMATION":    "AAAAA",
	"RECEIVE COPY STATUS(LID1)":         "AAAAA",
	"RECEIVE COPY STATUS(LID4)":         "AAAAA",
	"RECEIVE ROD TOKEN INFORMATION":     "AAAAA",
	"RECEIVE COPY OPERATING PARAMETERS": "AAAAA",
	"COPY OPERATION ABORT":              "AAAAA",
}

// always reports whether a command checks reservations itself and meets no RESERVATION CONFLICT
// before that.
func always(row *command) bool {
	switch row.op {
	case 0x16, 0x17, 0x56, 0x57, 0x5e, 0x5f:
		return true
	}
	return false
}

// Every type with every command of the table, from the holder, from a registered nexus and from
// another nexus.
func TestPersistentReservationConflicts(t *testing.T) {
	for _, typ := range types {
		t.Run(fmt.Sprintf("type %d", typ), func(t *testing.T) {
			r := newPRRig(t, setup{opt: Options{Removable: true, Sanitize: true}})
			r.ok(r.a, prRegister, 0, prList(0, keyA, 0))
			r.ok(r.b, prRegister, 0, prList(0, keyB, 0))
			r.ok(r.a, prReserve, typ, prList(keyA, 0, 0))
			for i := range commands {
				row := &commands[i]
				if always(row) || !r.unit.supports(row) {
					continue
				}
				columns := passes[row.name]
				if columns == "" {
					columns = "CCACC"
				}
				registered, other := columns[2], columns[2]
				switch typ {
				case 1:
					registered, other = columns[0], columns[0]
				case 3:
					registered, other = columns[1], columns[1]
				case 5, 7:
					other = columns[3]
				case 6, 8:
					other = columns[4]
				}
				for _, from := range []struct {
					name  string
					nexus *Nexus
					want  byte
				}{{"the holder", r.a, 'A'}, {"a registered nexus", r.b, registered}, {"another nexus", r.c, other}} {
					res := doCDB(from.nexus, &r.rig.c, [8]byte{}, rowCDB(row), rowData, all)
					got := byte('A')
					if res.status == statusReservationConflict {
						got = 'C'
						wantConflict(t, row.name, res)
					}
					if got != from.want {
						t.Errorf("%s from %s: %c, want %c", row.name, from.name, got, from.want)
					}
				}
			}
			// A nexus keeps its rights when its session ends and begins again.
			r.a.Close()
			r.a = r.enter(portA)
			wantGood(t, "WRITE(10) of the holder", r.on(r.a, "2a 00 00000000 00 0001 00", make([]byte, 512)))
		})
	}
}

// The CDB of START STOP UNIT decides: START 0 or a power condition conflicts.
func TestStartStopConflictsByCDB(t *testing.T) {
	r := newPRRig(t, setup{}).registered()
	r.ok(r.a, prReserve, 1, prList(keyA, 0, 0))
	wantConflict(t, "stop", r.on(r.b, "1b 00 0000 00 00", nil))
	wantConflict(t, "power condition", r.on(r.b, "1b 00 0000 11 00", nil))
	wantGood(t, "start", r.on(r.b, "1b 00 0000 01 00", nil))
	wantConflict(t, "WRITE(6)", r.on(r.b, "0a 000000 01 00", nil))
	wantConflict(t, "reserved bits", r.on(r.b, "2a 01 00000000 00 0001 00", nil))
	wantGood(t, "stop of the holder", r.on(r.a, "1b 00 0000 00 00", nil))
	wantConflict(t, "a stopped unit", r.on(r.b, "2a 00 00000000 00 0001 00", nil))
}

// RESERVE and RELEASE (SPC-2), 6 and 10 bytes.
func TestLegacyReserve(t *testing.T) {
	for _, s := range []struct{ reserve, release string }{
		{"16 00 00 0000 00", "17 00 00 0000 00"},
		{"56 00 00 000000 0000 00", "57 00 00 000000 0000 00"},
	} {
		r := newPRRig(t, setup{})
		reserve := func(n *Nexus) result { return r.on(n, s.reserve, nil) }
		wantGood(t, "RESERVE", reserve(r.a))
		wantGood(t, "RESERVE again", reserve(r.a))
		wantConflict(t, "RESERVE of another port", reserve(r.b))
		wantGood(t, "RELEASE of another port", r.on(r.b, s.release, nil))
		wantConflict(t, "still RESERVE of another port", reserve(r.b))
		for i := range commands {
			row := &commands[i]
			if always(row) || !r.unit.supports(row) {
				continue
			}
			res := doCDB(r.b, &r.rig.c, [8]byte{}, rowCDB(row), rowData, all)
			if got, want := res.status == statusReservationConflict, row.flags&anyReserve == 0; got != want {
				t.Errorf("%s of another port: conflict %v, want %v", row.name, got, want)
			}
			res = doCDB(r.a, &r.rig.c, [8]byte{}, rowCDB(row), rowData, all)
			if res.status == statusReservationConflict {
				t.Errorf("%s of the port that has reserved: conflict", row.name)
			}
		}
		for _, cdb := range []string{"00", "1a 00 3f 00 ff 00", "08 000000 01 00"} {
			wantConflict(t, cdb, r.on(r.b, cdb, nil))
		}
		for _, cdb := range []string{"12 00 00 00ff 00", "03 00 0000 ff 00", "a0 00 00 000000 000000ff 00 00"} {
			wantGood(t, cdb, r.on(r.b, cdb, nil))
		}
		// PERSISTENT RESERVE IN and OUT conflict also for the nexus that reserved.
		for _, n := range []*Nexus{r.a, r.b} {
			for sa := range byte(4) {
				wantConflict(t, "PERSISTENT RESERVE IN", r.on(n, fmt.Sprintf("5e %02x 0000000000 ffff 00", sa), nil))
			}
			wantConflict(t, "PERSISTENT RESERVE OUT", r.out(n, prRegister, 0, prList(0, keyA, 0)))
		}
		wantGood(t, "RELEASE", r.on(r.a, s.release, nil))
		wantGood(t, "RELEASE again", r.on(r.a, s.release, nil))
		wantGood(t, "RESERVE of another port", reserve(r.b))

		for name, end := range map[string]func(){
			"the session ends":   func() { r.b.Close() },
			"LOGICAL UNIT RESET": func() { r.c.ResetUnit([8]byte{}, true) },
			"target reset":       func() { r.c.ResetTarget(true) },
		} {
			end()
			r.b = r.enter(portB)
			r.wantReset(r.a)
			r.wantReset(r.c)
			wantGood(t, "RESERVE after "+name, reserve(r.a))
			wantGood(t, "RELEASE after "+name, r.on(r.a, s.release, nil))
			wantGood(t, "RESERVE", reserve(r.b))
		}
	}
	r := newPRRig(t, setup{})
	wantField(t, r.on(r.a, "16 01 00 0000 00", nil), 1, 0) // an extent
	// RESERVE while PERSISTENT RESERVE OUT waits for its parameter list.
	c := Command{CDB: append(unhex("5f 00 00 0000 00000018 00"), make([]byte, 6)...)}
	if !r.a.Begin(&c) {
		t.Fatal("REGISTER cannot begin")
	}
	wantGood(t, "RESERVE", r.on(r.b, "16 00 00 0000 00", nil))
	if r.a.Consume(&c, prList(0, keyA, 0), 0) || c.Status != statusReservationConflict {
		t.Errorf("REGISTER after RESERVE: status %#x", c.Status)
	}
	wantGood(t, "RELEASE", r.on(r.b, "17 00 00 0000 00", nil))
	wantField(t, r.on(r.a, "56 10 00 000000 0000 00", nil), 1, 4)
}

// SPC-4, section 5.13.3 (CRH 1): RESERVE and RELEASE with registrations.
func TestCompatibleReservationHandling(t *testing.T) {
	r := newPRRig(t, setup{})
	both := func(what string, n *Nexus, check func(testing.TB, string, result)) {
		t.Helper()
		for _, cdb := range []string{"16 00 00 0000 00", "56 00 00 000000 0000 00", "17 00 00 0000 00", "57 00 00 000000 0000 00"} {
			check(t, what, r.on(n, cdb, nil))
		}
	}
	r.ok(r.a, prRegister, 0, prList(0, keyA, 0))
	r.ok(r.b, prRegister, 0, prList(0, keyB, 0))
	for _, n := range []*Nexus{r.a, r.b, r.c} {
		both("registrations only", n, wantConflict)
	}
	for _, typ := range types {
		r.ok(r.a, prReserve, typ, prList(keyA, 0, 0))
		both("holder", r.a, wantGood)
		if typ >= 5 {
			both("registered", r.b, wantGood)
		} else {
			both("registered", r.b, wantConflict)
		}
		both("not registered", r.c, wantConflict)
		// Neither has an effect.
		wantConflict(t, "WRITE(10)", r.on(r.c, "2a 00 00000000 00 0001 00", nil))
		r.ok(r.a, prRelease, typ, prList(keyA, 0, 0))
		r.wantReleased(r.b, typ)
	}
	r.a.ResetUnit([8]byte{}, true) // leaves persistent reservations and registrations
	wantSense(t, r.on(r.see, "00", nil), 0x6, 0x29, 0x03)
	r.wantKeys(keyA, keyB)
}

// SPC-4, section 5.13.5: a loss of power, which includes a cold reset, ends what APTPL does not
// keep.
func TestReservationsPowerOn(t *testing.T) {
	r := newPRRig(t, setup{})
	r.ok(r.a, prRegister, 0, prList(0, keyA, 0))
	r.ok(r.a, prReserve, 3, prList(keyA, 0, 0))
	r.inv.PowerOn()
	for _, n := range []*Nexus{r.a, r.b, r.see} {
		wantSense(t, r.on(n, "00", nil), 0x6, 0x29, 0x00)
	}
	r.wantKeys()
	wantGood(t, "WRITE(10)", r.on(r.b, "2a 00 00000000 00 0000 00", nil))
}

// The validation of a Windows failover cluster with two nodes: keys with REGISTER AND IGNORE
// EXISTING KEY, reservations of type 5, a node that takes over by PREEMPT, and a check that the
// other one is out.
func TestWindowsClusterValidation(t *testing.T) {
	r := newPRRig(t, setup{})
	r.ok(r.a, prRegisterAndIgnore, 0, prList(0, keyA, 0))
	r.ok(r.c, prRegisterAndIgnore, 0, prList(0, keyC, 0))
	r.wantKeys(keyA, keyC)
	r.ok(r.a, prReserve, 5, prList(keyA, 0, 0))
	wantConflict(t, "RESERVE of the other node", r.out(r.c, prReserve, 5, prList(keyC, 0, 0)))
	wantGood(t, "WRITE(10) of a registered node", r.on(r.c, "2a 00 00000000 00 0001 00", make([]byte, 512)))
	wantConflict(t, "WRITE(10) of a node that is not", r.on(r.b, "2a 00 00000000 00 0001 00", nil))
	wantGood(t, "READ(10) of a node that is not", r.on(r.b, "28 00 00000000 00 0001 00", nil))
	wantConflict(t, "PREEMPT of a node that is not", r.out(r.b, prPreempt, 5, prList(keyB, keyA, 0)))
	r.ok(r.c, prPreempt, 5, prList(keyC, keyA, 0))
	r.wantAttention(r.a, registrationsPreempted)
	r.wantReservation(5, keyC)
	wantConflict(t, "WRITE(10) of the node that lost", r.on(r.a, "2a 00 00000000 00 0001 00", nil))
	wantConflict(t, "RELEASE of the node that lost", r.out(r.a, prRelease, 5, prList(keyA, 0, 0)))
	r.ok(r.a, prRegisterAndIgnore, 0, prList(0, keyA, 0))
	wantGood(t, "WRITE(10) again", r.on(r.a, "2a 00 00000000 00 0001 00", make([]byte, 512)))
	r.ok(r.c, prRelease, 5, prList(keyC, 0, 0))
	r.wantAttention(r.a, reservationsReleased)
	r.ok(r.a, prClear, 0, prList(keyA, 0, 0))
	r.wantKeys()
}

// Without a reservation, and for the holder and readers, READ and WRITE allocate nothing.
func TestNoAllocationWithReservation(t *testing.T) {
	r := newPRRig(t, setup{}).registered()
	check := func(n *Nexus, op byte, want byte) {
		t.Helper()
		x := newTransfer(op, 0, 8, 4096)
		if allocs := testing.AllocsPerRun(100, func() {
			if x.run(n, 4096); x.c.Status != want {
				t.Fatalf("status %#x, want %#x", x.c.Status, want)
			}
		}); allocs != 0 {
			t.Errorf("operation %02x: %v allocations", op, allocs)
		}
	}
	if r.unit.reservations.fence.Load() != nil {
		t.Error("registrations alone make commands look closer")
	}
	r.ok(r.a, prReserve, 5, prList(keyA, 0, 0))
	other := r.enter(Port{InitiatorName: "iqn.2026-11.io.example:other", TargetName: testPort.TargetName, TPGT: 1})
	for _, n := range []*Nexus{r.a, r.b, r.c} {
		check(n, 0x88, StatusGood)
		check(n, 0x8a, StatusGood)
	}
	check(other, 0x88, StatusGood)
	r.ok(r.a, prRelease, 5, prList(keyA, 0, 0))
	if r.unit.reservations.fence.Load() != nil {
		t.Error("a reservation that has gone makes commands look closer")
	}
}

// Many initiators at once: the state stays sound, and only the holder of an Exclusive Access
// reservation has access while it holds it.
func TestReservationExcludesUnderRaces(t *testing.T) {
	k := newKeeping(t)
	r := k.start()
	var inside sync.Mutex // held by the goroutine with the reservation
	// A goroutine that is done preempts the others: from then on a holder may meet
	// a conflict.
	var preempting atomic.Bool
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			var c Command
			key := uint64(g + 1)
			p := Port{InitiatorName: fmt.Sprintf("iqn.2026-11.io.example:%d", g)}
			out := func(n *Nexus, sa, typ byte, list []byte) byte {
				for {
					res := do(n, &c, [8]byte{}, fmt.Sprintf("5f %02x %02x 0000 00000018 00", sa, typ), list, all)
					if res.status != StatusCheckCondition || res.sense[2] != keyUnitAttention {
						return res.status
					}
				}
			}
			for i := range 30 {
				n := r.inv.NewNexus(p)
				n.OnPreempt(func([8]byte, *Command) {})
				out(n, prRegisterAndIgnore, 0, prList(0, key, byte(i&1)))
				if out(n, prReserve, 3, prList(key, 0, 0)) == StatusGood {
					alone := inside.TryLock()
					if !alone && !preempting.Load() {
						t.Error("two holders at once")
					}
					res := do(n, &c, [8]byte{}, "2a 00 00000000 00 0001 00", make([]byte, 512), all)
					if res.status == statusReservationConflict && !preempting.Load() {
						t.Error("the holder meets a conflict")
					}
					if alone {
						inside.Unlock()
					}
					out(n, prRelease, 3, prList(key, 0, 0))
				}
				do(n, &c, [8]byte{}, "5e 03 0000000000 ffff 00", nil, all)
				do(n, &c, [8]byte{}, "16 00 00 0000 00", nil, all)
				if i%5 == 0 {
					n.ResetUnit([8]byte{}, true)
				}
				n.Close()
			}
			n := r.inv.NewNexus(p)
			defer n.Close()
			preempting.Store(true)
			out(n, prPreemptAndAbort, 3, prList(key, key%4+1, 0))
			out(n, prRegisterAndIgnore, 0, prList(0, 0, 1))
		})
	}
	wg.Wait()
	r.wantReset(r.see)
	r.wantKeys()
	r.wantReservation(0, 0)
}

// ClearReservation removes what CLEAR would, on stable storage first, and RESERVE.
func TestClearReservation(t *testing.T) {
	path := filepath.Join(t.TempDir(), "reservations.json")
	kept, err := OpenReservations(path)
	if err != nil {
		t.Fatal(err)
	}
	defer kept.Close()
	r := newRig(t, setup{opt: Options{Reservations: kept}})
	register := make([]byte, 24)
	register[15], register[20] = 5, 1 // APTPL
	wantGood(t, "REGISTER", r.run("5f 00 00 00 00 00000018 00", register))
	reserve := make([]byte, 24)
	reserve[7] = 5
	wantGood(t, "RESERVE", r.run("5f 01 03 00 00 00000018 00", reserve))
	info := r.unit.Reservation()
	if info.Type != 3 || !info.APTPL || len(info.Registrations) != 1 || !info.Registrations[0].Holder || info.Registrations[0].Key != 5 {
		t.Fatalf("%+v", info)
	}
	kept.SetSync(func(*os.File) error { return errors.New("injected") })
	if cleared, err := r.unit.ClearReservation(); err == nil || cleared || r.unit.Reservation().Type != 3 {
		t.Errorf("a failure of the file: %v, %v", cleared, err)
	}
	kept.SetSync(nil)
	if cleared, err := r.unit.ClearReservation(); err != nil || !cleared {
		t.Errorf("%v, %v", cleared, err)
	}
	wantSense(t, r.run("00", nil), 0x6, 0x2a, 0x03) // RESERVATIONS PREEMPTED
	if info := r.unit.Reservation(); info.Type != 0 || len(info.Registrations) != 0 || info.Generation != 2 {
		t.Errorf("%+v", info)
	}
	if s, err := keptState(kept, testIdentity.Serial); err != nil || len(s.registrations) != 0 {
		t.Errorf("the file has %+v, %v", s, err)
	}
	wantGood(t, "RESERVE(6)", r.run("16", nil))
	if r.unit.Reservation().Legacy == "" {
		t.Error("RESERVE(6) is not told")
	}
	if cleared, err := r.unit.ClearReservation(); err != nil || !cleared || r.unit.Reservation().Legacy != "" {
		t.Errorf("RESERVE(6): %v, %v", cleared, err)
	}
	if cleared, err := r.unit.ClearReservation(); err != nil || cleared {
		t.Errorf("nothing: %v, %v", cleared, err)
	}
}
