package daemon

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
)

// Initiators log in from the networks of a target, over each transport, and discovery hides it elsewhere. A change of
// the networks reaches the sessions that are in, and no others.
func TestNetworksOfATarget(t *testing.T) {
	const second = prefix + "second"
	l := newLab(t)
	load(t, l.login("stays", store))
	networks := func(list string) {
		l.targets = fmt.Sprintf("  - {name: %q, initiators: ['*'], networks: [%s], luns: [{id: 0, backend: memory, size: 1MiB}]}", second, list)
	}
	login := func(transport string) error {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		t.Cleanup(cancel)
		d, err := initiator.Dial(ctx, transport, l.addr(), initiator.Options{Name: prefix + "a", Target: second})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { d.Close() })
		return d.LogIn(nil)
	}
	explained := func(from, rule string) {
		t.Helper()
		e := l.Explain(prefix+"a", second, "", from)
		for _, r := range e.Rules {
			if r.Rule == "networks" {
				if got := fmt.Sprintf("%t %s", e.Admitted, r.Why); got != rule {
					t.Errorf("explain from %q: %s, want %s", from, got, rule)
				}
				return
			}
		}
		t.Errorf("explain from %q has no rule about networks: %+v", from, e)
	}
	networks(`10.0.0.0/8, "2001:db8::/32"`)
	l.ok(ChangeOptions{})
	for _, transport := range []string{"tcp", "iser"} {
		if err := login(transport); err == nil || !strings.Contains(err.Error(), "0202") && !strings.Contains(strings.ToLower(err.Error()), "authoriz") {
			t.Errorf("%s from an address outside: %v, want a refusal", transport, err)
		}
	}
	explained("127.0.0.1", "false 127.0.0.1 is in none of 10.0.0.0/8, 2001:db8::/32")
	explained("10.1.2.3", "true 10.1.2.3 is in 10.0.0.0/8")
	explained("2001:db8::1", "true 2001:db8::1 is in 2001:db8::/32")
	explained("", "true connections from 10.0.0.0/8, 2001:db8::/32 are admitted")
	explained("somewhere", `false "somewhere" is not an address`)
	refusals := 0
	for _, e := range l.Events(0) {
		if e.Attrs["outcome"] == "refused" && strings.Contains(fmt.Sprint(e.Attrs["reason"]), "address of the initiator is in no network of the target") {
			refusals++
		}
	}
	if refusals == 0 {
		t.Error("no event says why the login was refused")
	}

	networks("10.0.0.0/8, 127.0.0.0/30")
	l.ok(ChangeOptions{})
	if err := login("tcp"); err != nil {
		t.Fatalf("from an address inside: %v", err)
	}
	networks("10.0.0.0/8, 127.0.0.2")
	p, err := l.apply(ChangeOptions{})
	var refused *ErrRefused
	if !errors.As(err, &refused) || len(p.Steps) != 1 || len(p.Steps[0].Disturbs) != 1 || !strings.HasSuffix(p.Steps[0].Disturbs[0], "of "+prefix+"a") {
		t.Fatalf("a network less: %+v, %v", p, err)
	}
	l.ok(ChangeOptions{Disrupt: true, Drain: 100 * time.Millisecond})
	testkit.Eventually(t, "the session of the address outside ends, and that of the neighbour stays", func() bool {
		list := l.State().Sessions
		return len(list) == 1 && list[0].Initiator == prefix+"stays"
	})
}
