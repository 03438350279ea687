package main

import (
	"context"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A user gets a secret, and another one without an interruption. The end of the rotation names the sessions that still
// use the old one, and ends no other.
func TestUsersAndRotation(t *testing.T) {
	s := newStation(t)
	login := func(name, secret string) error {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		t.Cleanup(cancel)
		d, err := initiator.Dial(ctx, "tcp", s.addr, initiator.Options{Name: hostName + name, Target: storeName})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { d.Close() })
		return d.LogIn(&initiator.CHAP{Name: "host1", Secret: secret})
	}
	made := func(args ...string) string {
		t.Helper()
		out, errOut, code := s.run(t, append([]string{"auth", "user"}, args...)...)
		found := regexp.MustCompile(`(?m)^secret of host1: ([0-9a-f]{32})$`).FindStringSubmatch(errOut)
		if code != cli.ExitOK || found == nil {
			t.Fatalf("%v: exit code %d\n%s%s", args, code, out, errOut)
		}
		if strings.Contains(out, found[1]) {
			t.Errorf("%v: the plan has the secret:\n%s", args, out)
		}
		return found[1]
	}
	users := func(want schema.UserState) {
		t.Helper()
		testkit.Eventually(t, "the state of the user", func() bool {
			list := read[[]schema.UserState](t, s, "auth", "user", "list", storeName)
			return len(list) == 1 && list[0] == want
		})
	}
	s.says(t, cli.ExitOK, storeName, "auth", "user", "add", storeName, "host1", "--dry-run")
	s.says(t, cli.ExitUsage, "wrong number of arguments", "auth", "user", "add", storeName)
	s.says(t, cli.ExitError, "no-such-file", "auth", "user", "add", storeName, "host1", "--secret-file", "no-such-file")
	if strings.Contains(s.text(t), "host1") {
		t.Fatalf("refused commands changed the configuration:\n%s", s.text(t))
	}
	first := made("add", storeName, "host1", "--initiator", hostName+"*")
	if err := login("a", first); err != nil {
		t.Fatal(err)
	}
	users(schema.UserState{Name: "host1", Initiator: hostName + "*", Sessions: 1})
	second := made("rotate", storeName, "host1")
	s.says(t, cli.ExitError, "end the rotation before another one", "auth", "user", "rotate", storeName, "host1")
	if err := login("d", "not the secret"); err == nil {
		t.Error("a login with a wrong secret was not refused")
	}
	s.says(t, cli.ExitOK, `is not that of CHAP user "host1". Compare both, or make a new one with iser-target auth user rotate `+storeName, "doctor")
	for name, secret := range map[string]string{"b": first, "c": second} {
		if err := login(name, secret); err != nil {
			t.Errorf("during the rotation: %v", err)
		}
	}
	users(schema.UserState{Name: "host1", Initiator: hostName + "*", Previous: true, Sessions: 3, Outdated: 2})
	s.says(t, cli.ExitRefused, "of "+hostName+"a, ", "auth", "user", "rotate", storeName, "host1", "--end")
	s.says(t, cli.ExitOK, "(done)", "auth", "user", "rotate", storeName, "host1", "--end", "--now")
	users(schema.UserState{Name: "host1", Initiator: hostName + "*", Sessions: 1})
	if err := login("d", first); err == nil {
		t.Error("the first secret is valid after the end of the rotation")
	}
	if err := login("e", second); err != nil {
		t.Errorf("the second secret: %v", err)
	}
	s.says(t, cli.ExitNotFound, "", "auth", "user", "remove", storeName, "host2")
	s.says(t, cli.ExitError, "targets[0].auth.users: is required", "auth", "user", "remove", storeName, "host1", "--now")
	if events := s.ok(t, "events"); strings.Contains(events, first) || strings.Contains(events, second) {
		t.Errorf("the events have a secret:\n%s", events)
	}
}
