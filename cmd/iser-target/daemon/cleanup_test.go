package daemon

import (
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// removing makes a removal with a long drain and sends its outcome.
func (l *lab) removing(edit func(*config.Document) error) <-chan *schema.Plan {
	l.t.Helper()
	done := make(chan *schema.Plan, 1)
	go func() {
		p, err := l.Change(l.t.Context(), edit, ChangeOptions{Disrupt: true, Drain: time.Minute})
		if err != nil {
			l.t.Error(err)
		}
		done <- p
	}()
	return done
}

// While a LUN drains, the target serves others, refuses changes that need the LUN, and can
// cut the drain short.
func TestDrainingLUNBlocksOnlyWhatNeedsIt(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name    string
		end     func(l *lab, free func()) // of the drain
		outcome string                    // of the command that drains
		note    string
	}{
		{"drained", func(_ *lab, free func()) { free() }, "", ""},
		{"cut off", func(l *lab, _ func()) {
			if !l.CutOff(l.t.Context(), store, 1) {
				l.t.Error("CutOff found no drain")
			}
		}, "5/25/00", "1 commands for LUN 1 were cut off after "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l, h, _ := newHangingLab(t, testWaits, nil, func(l *lab) { l.luns += "," + l.disk(1, "one", "") })
			s := l.login("host1", store)
			attentions(t, s, 1)
			load(t, l.login("other", store))
			disk := filepath.Join(l.dir, "one")
			free := h.hang("read " + disk)
			defer free()
			r := &initiator.Command{LUN: 1, CDB: cdb.Read16(0, 1), In: make([]byte, 512)}
			if err := s.Start(r); err != nil {
				t.Fatal(err)
			}
			testkit.Eventually(t, "the command hangs", func() bool { return h.count("read "+disk) == 1 })
			removed := l.removing(func(d *config.Document) error { return d.RemoveLUN(store, 1) })
			testkit.Eventually(t, "LUN 1 drains", func() bool { return l.lunState(1).State == schema.Draining })
			if st := l.lunState(1); !strings.Contains(st.Reason, "it was removed: it drains until ") {
				t.Errorf("LUN 1: %+v", st)
			}
			l.serves(s)
			if got := reportLUNs(t, s); !slices.Equal(got, []int{0}) {
				t.Errorf("LUNs %v", got)
			}
			zero := l.luns
			for name, luns := range map[string]string{
				"the number": `{id: 0, backend: memory, size: 4MiB},` + l.disk(1, "two", ""),
				"the file":   `{id: 0, backend: memory, size: 4MiB},` + l.disk(2, "one", ""),
				"both":       zero,
			} {
				l.luns = luns
				if _, err := l.apply(ChangeOptions{}); !errors.Is(err, ErrBeingRemoved) ||
					!strings.Contains(err.Error(), "LUN 1 of "+store+" was removed and is still in use: it drains until ") {
					t.Errorf("%s: error %v", name, err)
				}
				if p, err := l.apply(ChangeOptions{DryRun: true}); !errors.Is(err, ErrBeingRemoved) {
					t.Errorf("%s: plan %+v, %v", name, p, err)
				}
			}
			select {
			case p := <-removed:
				t.Fatalf("the removal ended: %+v", p)
			default:
			}
			tt.end(l, free)
			if p := <-removed; p == nil || len(p.Steps) != 1 || !p.Steps[0].Done || tt.note == "" && p.Note != "" || !strings.Contains(p.Note, tt.note) {
				t.Errorf("plan %+v", p)
			}
			free()
			if err := r.Wait(); err != nil || outcome(r) != tt.outcome {
				t.Errorf("the command: %v, %q", err, outcome(r))
			}
			if l.CutOff(t.Context(), store, 1) {
				t.Error("CutOff found a drain after the end")
			}
			testkit.Eventually(t, "nothing is draining", func() bool { return l.lunState(1).State == "" })
			l.luns = zero
			l.ok(ChangeOptions{})
			if got := attentions(t, s, 1); !strings.HasPrefix(got, "29/00") {
				t.Errorf("LUN 1 again: %s", got)
			}
		})
	}
}

// While sessions of a removed target have time to log out, a new target may have its name,
// unless it needs the LUNs of the old one. Cutting the old one off does not end sessions of
// the new one.
func TestTargetMayReplaceOneThatEnds(t *testing.T) {
	t.Parallel()
	const second = prefix + "second"
	l, _, _ := newHangingLab(t, testWaits, nil, func(l *lab) {
		l.targets = "  - {name: \"" + second + "\", initiators: [\"*\"], luns: [" + l.disk(5, "five", "") + "]}"
	})
	s := l.login("host1", store)
	gone := l.login("host2", second) // and does not log out
	attentions(t, gone, 5)
	removed := l.removing(func(d *config.Document) error { return d.RemoveTarget(second) })
	testkit.Eventually(t, "the target is unlisted", func() bool { return len(l.State().Targets) == 1 })
	l.serves(s)
	w := &initiator.Command{LUN: 5, CDB: cdb.Write16(0, 1), Out: make([]byte, 512)}
	if got := do(t, gone, w); got != "" { // it may have data to write
		t.Errorf("WRITE before the logout: %s", got)
	}
	if _, err := l.apply(ChangeOptions{}); !errors.Is(err, ErrBeingRemoved) || !strings.Contains(err.Error(), "the sessions of its target end") {
		t.Errorf("the target again: %v", err)
	}
	if _, err := l.Change(t.Context(), func(d *config.Document) error {
		return d.AddTarget(config.Target{Name: second, InitialR2T: true, Initiators: []string{"*"}})
	}, ChangeOptions{}); err != nil {
		t.Errorf("a target of that name without LUNs: %v", err)
	}
	again := l.login("host3", second)
	if !l.CutOff(t.Context(), second, -1) {
		t.Error("CutOff found no drain")
	}
	inTime(t, "the end", func() {
		if p := <-removed; p == nil {
			t.Error("no plan")
		}
		<-gone.Done()
	})
	if got := reportLUNs(t, again); len(got) > 1 {
		t.Errorf("LUNs %v", got)
	}
	l.ok(ChangeOptions{})
	if got := l.State().Targets[1].LUNs; len(got) != 1 || got[0].State != schema.Ready {
		t.Errorf("LUNs %+v", got)
	}
}
