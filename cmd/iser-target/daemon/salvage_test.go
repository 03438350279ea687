package daemon

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/tests/testkit"
)

// damage replaces a text that is once in a file of the state directory, and in its spare copy.
func (l *lab) damage(file, old, with string) {
	l.t.Helper()
	for _, path := range []string{filepath.Join(l.dir, "state", file), filepath.Join(l.dir, "state", file+".spare")} {
		b, err := os.ReadFile(path)
		if err != nil {
			l.t.Fatal(err)
		}
		if strings.Count(string(b), old) != 1 {
			l.t.Fatalf("%q is %d times in %s:\n%s", old, strings.Count(string(b), old), path, b)
		}
		if err := os.WriteFile(path, []byte(strings.Replace(string(b), old, with, 1)), 0o600); err != nil {
			l.t.Fatal(err)
		}
	}
}

// A record that is damaged in a file and in its spare copy costs one LUN: it is not ready, and says why. Its
// neighbor keeps its reservations, and stores new ones. That stays so over restarts, until the operator accepts the loss.
func TestDamageOfOneRecordCostsOneLUN(t *testing.T) {
	l := failureLab(t)
	w, end := l.start(nil)
	for lun := range byte(2) {
		if got := do(t, w.s, register(lun, 0xa0+uint64(lun))); got != "" {
			t.Fatalf("PERSISTENT RESERVE OUT of LUN %d: %s", lun, got)
		}
	}
	w.write(0, 'n')
	naa := w.lunState(1).NAA
	end()
	l.damage(reservationsFile, "0x00000000000000a1", "0x\x00\x00\x00\x00000000000a1")

	check := func(key string) {
		t.Helper()
		one, zero := l.lunState(1), l.lunState(0)
		if one.State != schema.NotReady || one.NAA != naa || !strings.Contains(one.Reason, reservationsFile+":"+naa) {
			t.Errorf("LUN 1, NAA %s, is %s: %s", one.NAA, one.State, one.Reason)
		}
		if zero.State != schema.Ready || zero.Reservation == nil || zero.Reservation.Registrations[0].Key != key {
			t.Errorf("the neighbor is %s: %s, with %+v, want key %s", zero.State, zero.Reason, zero.Reservation, key)
		}
	}
	for start, keys := range []string{"0x00000000000000a0", "0x00000000000000b0"} {
		w, end = l.start(nil)
		check(keys)
		if w.read(0) != 'n' {
			t.Error("the neighbor has lost its data")
		}
		if got := do(t, w.s, register(0, 0xb0)); got != "" {
			t.Errorf("start %d: PERSISTENT RESERVE OUT of the neighbor: %s", start, got)
		}
		if got := attentions(t, w.s, 1); got != intervention {
			t.Errorf("start %d: LUN 1: %s", start, got)
		}
		if said := texts(w.Events(0)); !strings.Contains(said, "record of a state file is damaged") || strings.Contains(said, "what is left is used") != (start == 0) {
			t.Errorf("start %d says\n%s", start, said)
		}
		end()
	}

	dir := filepath.Join(l.dir, "state")
	find := func() state.Condition {
		list := CheckState(dir)
		return list[slices.IndexFunc(list, func(c state.Condition) bool { return filepath.Base(c.Path) == reservationsFile })]
	}
	if c := find(); c.Verdict != state.Partial || len(c.Lost) != 1 || c.Lost[0].NAA != naa || !strings.HasSuffix(LUNOf(dir, naa), l.dir+"/one.img") {
		t.Errorf("%s, %v: %s", c.Verdict, c.Lost, LUNOf(dir, naa))
	}
	for _, wrong := range []string{reservationsFile + ":3000000000000000", identitiesFile + ":" + naa, reservationsFile, "c.yaml:" + naa} {
		if _, err := RepairState(dir, []string{wrong}); err == nil {
			t.Errorf("%s is discarded", wrong)
		}
	}
	if _, err := RepairState(dir, []string{reservationsFile + ":" + naa}); err != nil {
		t.Fatal(err)
	}
	if c := find(); c.Verdict != state.Good {
		t.Errorf("after the repair: %s, %v", c.Verdict, c.Reason)
	}
	w, end = l.start(nil)
	defer end()
	if one := l.lunState(1); one.State != schema.Ready || one.Reservation != nil {
		t.Errorf("after the repair LUN 1 is %s: %s, with %+v", one.State, one.Reason, one.Reservation)
	}
	if zero := l.lunState(0); zero.Reservation == nil {
		t.Error("the repair took the reservation of the neighbor")
	}
	if write, sync := w.write(1, 'x'); write != "" || sync != "" {
		t.Errorf("after the repair: %s, %s", write, sync)
	}
}

// The LUN of a damaged record is not ready, whatever the file: a write protection, for example, is not lost.
func TestDamageOfEachFileOfRecords(t *testing.T) {
	for file, record := range map[string]string{
		settingsFile: `{"naa": "NAA", "mode": {"wce": true, "swp": true}, "port_groups": [], "x": 1}`,
		sanitizeFile: `{"naa": "NAA", "x": 1}`,
		failuresFile: `{"naa": "NAA", "since": "yesterday", "reason": "a reason"}`,
	} {
		t.Run(file, func(t *testing.T) {
			l := failureLab(t)
			w, end := l.start(nil)
			w.write(0, 'n')
			naa := w.lunState(1).NAA
			end()
			text := "{\n  \"version\": 1,\n  \"units\": [\n    {\n      " + strings.Trim(strings.Replace(record, "NAA", naa, 1), "{}") + "\n    }\n  ]\n}\n"
			for _, path := range []string{file, file + ".spare"} {
				if err := os.WriteFile(filepath.Join(l.dir, "state", path), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			w, end = l.start(nil)
			defer end()
			if one := l.lunState(1); one.State != schema.NotReady || !strings.Contains(one.Reason, file+":"+naa) {
				t.Errorf("LUN 1 is %s: %s", one.State, one.Reason)
			}
			if zero := l.lunState(0); zero.State != schema.Ready || w.read(0) != 'n' {
				t.Errorf("the neighbor is %s: %s", zero.State, zero.Reason)
			}
		})
	}
}

// A damaged list of checksums costs the LUNs that have some, and one of shrinks none.
func TestDamageOfListsOfFiles(t *testing.T) {
	l := failureLab(t)
	l.luns = l.disk(0, "zero.img", "") + ", " + l.disk(1, "one.img", ", checksums: true")
	l.write()
	w, end := l.start(nil)
	w.write(0, 'n')
	w.write(1, 'o')
	end()
	for _, file := range []string{checksumsFile, shrinkFile} {
		for _, path := range []string{file, file + ".spare"} {
			if err := os.WriteFile(filepath.Join(l.dir, "state", path), []byte("garbage"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	w, end = l.start(nil)
	if one := l.lunState(1); one.State != schema.NotReady || !strings.Contains(one.Reason, "--discard "+checksumsFile) {
		t.Errorf("LUN 1 is %s: %s", one.State, one.Reason)
	}
	if zero := l.lunState(0); zero.State != schema.Ready || w.read(0) != 'n' {
		t.Errorf("the neighbor is %s: %s", zero.State, zero.Reason)
	}
	end()
	dir := filepath.Join(l.dir, "state")
	if _, err := os.Stat(filepath.Join(dir, shrinkFile+".damaged")); err != nil {
		t.Error(err)
	}
	if _, err := RepairState(dir, []string{checksumsFile}); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, checksumsFile)); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// A damaged entry of identities.json costs one LUN: its file says what it was, or it is not ready. The others keep their
// identities.
func TestDamageOfOneIdentityCostsOneLUN(t *testing.T) {
	l := failureLab(t)
	l.dir = t.TempDir() // with extended attributes
	l.path = filepath.Join(l.dir, "c.yaml")
	l.luns = l.disk(0, "zero.img", "") + ", " + l.disk(1, "one.img", "") + ", {id: 2, backend: memory, size: 1MiB}"
	l.write()
	w, end := l.start(nil)
	w.write(0, 'n')
	var naas []string
	for id := range 3 {
		naas = append(naas, w.lunState(id).NAA)
	}
	end()
	if _, _, marked := readMark(w.path); !marked {
		backendtest.Unavailable(t, "the file system has no extended attributes: docs/service.md says what that means")
	}
	l.damage(identitiesFile, naas[1], naas[1][:6]+"\x00"+naas[1][7:])
	w, end = l.start(nil)
	for id, naa := range naas {
		if s := w.lunState(id); s.State != schema.Ready || s.NAA != naa {
			t.Errorf("LUN %d is %s: %s, with NAA %s, want %s", id, s.State, s.Reason, s.NAA, naa)
		}
	}
	if said := texts(w.Events(0)); !strings.Contains(said, "is that of its file again") {
		t.Errorf("the log says\n%s", said)
	}
	end()

	l.damage(identitiesFile, naas[1], naas[1][:6]+"\x00"+naas[1][7:])
	if err := unix.Removexattr(w.path, markName); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		w, end = l.start(nil)
		if one := w.lunState(1); one.State != schema.NotReady || !strings.Contains(one.Reason, "Set identity of the LUN") {
			t.Errorf("LUN 1 is %s: %s", one.State, one.Reason)
		}
		for _, id := range []int{0, 2} {
			if s := w.lunState(id); s.State != schema.Ready || s.NAA != naas[id] {
				t.Errorf("LUN %d is %s: %s, with NAA %s, want %s", id, s.State, s.Reason, s.NAA, naas[id])
			}
		}
		if w.read(0) != 'n' {
			t.Error("the neighbor has lost its data")
		}
		end()
	}
	w, end = l.start(nil)
	if _, err := w.Change(t.Context(), func(d *config.Document) error { return d.SetLUN(store, 1, "identity", "new") }, ChangeOptions{Disrupt: true}); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "LUN 1 is ready", func() bool { return w.lunState(1).State == schema.Ready })
	if w.lunState(1).NAA == naas[1] {
		t.Error("LUN 1 has the identity that it had")
	}
	end()

	l.damage(identitiesFile, naas[2], naas[2][:6]+"\x00"+naas[2][7:])
	w, end = l.start(nil)
	key := store + "/2/memory:"
	if two := w.lunState(2); two.State != schema.NotReady || !strings.Contains(two.Reason, identitiesFile+":"+key) {
		t.Errorf("LUN 2 is %s: %s", two.State, two.Reason)
	}
	end()
	if _, err := RepairState(filepath.Join(l.dir, "state"), []string{identitiesFile + ":" + key}); err != nil {
		t.Fatal(err)
	}
	w, end = l.start(nil)
	defer end()
	if two, zero := w.lunState(2), w.lunState(0); two.State != schema.Ready || zero.NAA != naas[0] {
		t.Errorf("LUN 2 is %s: %s; the neighbor has NAA %s", two.State, two.Reason, zero.NAA)
	}
}
