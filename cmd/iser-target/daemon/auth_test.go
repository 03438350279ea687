package daemon

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
)

// Authentication that is turned on, another secret, and a user for fewer initiators reach the sessions that are in:
// the plan names them alone. Two secrets at a time let hosts change one after the other.
func TestAuthenticationReachesSessions(t *testing.T) {
	const second = prefix + "second"
	l := newLab(t)
	load(t, l.login("stays", store))
	auth := func(auth string) {
		l.targets = fmt.Sprintf("  - {name: %q, initiators: ['*'], auth: {%s}, luns: [{id: 0, backend: memory, size: 1MiB}]}", second, auth)
	}
	login := func(name, user, secret string) error {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		t.Cleanup(cancel)
		d, err := initiator.Dial(ctx, "tcp", l.addr(), initiator.Options{Name: prefix + name, Target: second})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { d.Close() })
		if user == "" {
			return d.LogIn(nil)
		}
		return d.LogIn(chapOf(user, secret))
	}
	must := func(name, user, secret string) {
		t.Helper()
		if err := login(name, user, secret); err != nil {
			t.Fatalf("login of %s: %v", name, err)
		}
	}
	in := func(want ...string) {
		t.Helper()
		var got []string
		testkit.Eventually(t, fmt.Sprintf("the sessions are %v", want), func() bool {
			got = nil
			for _, s := range l.State().Sessions {
				if s.Target == second {
					name := strings.TrimPrefix(s.Initiator, prefix)
					if s.OutdatedSecret {
						name += " outdated"
					}
					got = append(got, name)
				}
			}
			slices.Sort(got)
			return slices.Equal(got, want)
		})
	}
	refused := func(who ...string) {
		t.Helper()
		p, err := l.apply(ChangeOptions{})
		var e *ErrRefused
		if !errors.As(err, &e) {
			t.Fatalf("%+v, %v, want a refusal", p, err)
		}
		var got []string
		for _, s := range p.Steps {
			for _, d := range s.Disturbs {
				_, name, _ := strings.Cut(d, " of "+prefix)
				got = append(got, name)
			}
		}
		slices.Sort(got)
		if got = slices.Compact(got); !slices.Equal(got, who) {
			t.Errorf("the plan disturbs %v, want %v", got, who)
		}
	}
	forced := ChangeOptions{Disrupt: true, Drain: 100 * time.Millisecond}

	auth("method: none")
	l.ok(ChangeOptions{})
	must("a", "", "")
	in("a")
	const twoUsers = "method: chap, users: [{name: u, secret: secret number one}, {name: v, secret: secret of the other}]"
	auth(twoUsers)
	refused("a")
	in("a")
	l.ok(forced)
	in()
	must("a", "u", "secret number one")
	must("b", "v", "secret of the other")
	must("c", "u", "secret number one")

	auth(strings.Replace(twoUsers, "number one", "number two", 1))
	refused("a", "c")
	in("a", "b", "c")
	both := strings.Replace(twoUsers, "number one", "number two, previous_secret: secret number one", 1)
	auth(both)
	if p := l.ok(ChangeOptions{}); strings.Contains(fmt.Sprintf("%+v", p), "number") {
		t.Errorf("the plan has a secret: %+v", p)
	}
	in("a outdated", "b", "c outdated")
	must("d", "u", "secret number one")
	must("e", "u", "secret number two")
	if err := login("f", "u", "secret of the other"); err == nil {
		t.Error("a login with the secret of another user")
	}
	in("a outdated", "b", "c outdated", "d outdated", "e")
	auth(strings.Replace(both, ", previous_secret: secret number one", "", 1))
	refused("a", "c", "d")
	l.ok(forced)
	in("b", "e")
	if err := login("a", "u", "secret number one"); err == nil {
		t.Error("a login with the secret of before")
	}

	narrow := strings.Replace(strings.Replace(twoUsers, "number one", "number two", 1), "{name: v, ", "{name: v, initiator: '"+prefix+"z', ", 1)
	auth(narrow)
	refused("b")
	l.ok(forced)
	in("e")
	auth("method: none")
	l.ok(ChangeOptions{})
	in("e")
}
