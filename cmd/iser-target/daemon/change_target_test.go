package daemon

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// A change of a target ends the sessions that it no longer admits, and no others.
func TestChangeOfTargetEndsOnlyItsSessions(t *testing.T) {
	l := newLab(t)
	stays := l.login("stays", store)
	load(t, stays)
	tsihs := func() (names []string) {
		for _, s := range l.State().Sessions {
			names = append(names, strings.TrimPrefix(s.Initiator, prefix)+"@"+strings.TrimPrefix(s.Target, prefix))
		}
		slices.Sort(names)
		return names
	}
	const second = prefix + "second"
	target := func(more string) string {
		return "  - {name: \"" + second + "\", initiators: [" + more + "], luns: [{id: 0, backend: memory, size: 1MiB}]}"
	}
	l.targets = target(`"*"`)
	l.ok(ChangeOptions{})
	a, b := l.login("a", second), l.login("b", second)
	if got := attentions(t, a, 0); got != "29/00" {
		t.Fatalf("LUN 0 of a new target: %s", got)
	}
	if got := tsihs(); !slices.Equal(got, []string{"a@second", "b@second", "stays@store"}) {
		t.Fatalf("sessions %v", got)
	}

	l.targets = target(`"` + prefix + `a"`)
	p, err := l.apply(ChangeOptions{})
	var refused *ErrRefused
	if !errors.As(err, &refused) || len(p.Steps) != 1 || len(p.Steps[0].Disturbs) != 1 || !strings.HasSuffix(p.Steps[0].Disturbs[0], "of "+prefix+"b") {
		t.Fatalf("%+v, %v", p, err)
	}
	l.ok(ChangeOptions{Disrupt: true, Drain: 200 * time.Millisecond})
	select {
	case <-b.Done():
	case <-time.After(20 * time.Second):
		t.Fatal("the session of an initiator that is no longer allowed does not end")
	}
	if got := tsihs(); !slices.Equal(got, []string{"a@second", "stays@store"}) {
		t.Errorf("sessions %v", got)
	}
	if _, err := l.tryLogin("b", second); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("login of an initiator that is not allowed: %v", err)
	}
	if got := attentions(t, a, 0); got != "" {
		t.Errorf("the session that is allowed: %s", got)
	}

	// A session that is asked to log out keeps its LUNs until it does, or its time ends.
	l.targets = ""
	removed := make(chan time.Duration)
	go func() {
		begin := time.Now()
		l.ok(ChangeOptions{Disrupt: true, Drain: time.Minute})
		removed <- time.Since(begin)
	}()
	testkit.Eventually(t, "the target is gone", func() bool { return len(l.State().Targets) == 1 })
	w := &initiator.Command{CDB: cdb.Write16(0, 1), Out: make([]byte, 512)}
	if got := do(t, a, w); got != "" {
		t.Errorf("WRITE before the logout: %s", got)
	}
	if err := a.Logout(t.Context()); err != nil {
		t.Fatal(err)
	}
	a.Close()
	if d := <-removed; d > 30*time.Second {
		t.Errorf("the removal took %v", d)
	}
	if got := tsihs(); !slices.Equal(got, []string{"stays@store"}) {
		t.Errorf("sessions %v", got)
	}
	if _, err := l.tryLogin("a", second); err == nil {
		t.Error("login to the removed target")
	}
}
