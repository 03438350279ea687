package cli

import (
	"fmt"
	"os"
	"testing"
	"time"
)

// A scratch target is a leftover if its process has ended, or if it is older than any selftest.
func TestIsLeftover(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	name := func(age time.Duration, place string, pid int) string {
		return fmt.Sprintf("%s%d.%s.%d.0123abcd", scratchPrefix, now.Add(-age).Unix(), place, pid)
	}
	const noProcess = 1 << 30 // above the highest pid_max
	for _, tt := range []struct {
		what, name string
		want       bool
	}{
		{"of this process", scratchName(now), false},
		{"of a process that has ended", name(time.Minute, place(), noProcess), true},
		{"of another machine", name(time.Minute, "00000000", noProcess), false},
		{"of another machine, old", name(scratchLife+time.Second, "00000000", noProcess), true},
		{"of a process with the same id, old", name(scratchLife+time.Second, place(), os.Getpid()), true},
		{"of somebody else", "iqn.2026-11.io.example:store", false},
		{"too few parts", scratchPrefix + "1.2", false},
		{"no numbers", scratchPrefix + "a.b.c.d", false},
		{"process 0", name(time.Minute, place(), 0), false},
	} {
		if got := isLeftover(tt.name, now); got != tt.want {
			t.Errorf("%s: %s: %t", tt.what, tt.name, got)
		}
	}
}

// The digest of a configuration says nothing of its secrets.
func TestConfigDigestHidesSecrets(t *testing.T) {
	digest := func(secret, target string) string {
		d, err := configDigest(fmt.Appendf(nil, "targets:\n- name: %s\n  auth: {users: [{name: a, secret: %s, previous_secret: %[2]s}]}\n", target, secret))
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	if digest("one", "a") != digest("[other]", "a") || digest("one", "a") == digest("one", "b") {
		t.Error("the digest does not depend on the configuration, without secrets, alone")
	}
	if _, err := configDigest([]byte("a: [")); err == nil {
		t.Error("no error of text that is not YAML")
	}
}
