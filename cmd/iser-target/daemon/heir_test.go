package daemon

import (
	"context"
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/lun/state/hometest"
	"github.com/iser-target/iser-target/tests/testkit"
)

// An heir ends the leases of a process only if the kernel that runs has released its lock.
func TestHeir(t *testing.T) {
	boot, err := bootID()
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		boot         string
		locked       bool
		text         func(line string) string
		ended, stays bool
	}{
		"dead":               {boot: boot, ended: true},
		"cut short":          {boot: boot, ended: true, text: func(line string) string { return line + "tail of a longer line\n" }},
		"alive":              {boot: boot, locked: true, stays: true},
		"of another machine": {boot: "other"},
		"not whole":          {boot: boot, text: func(line string) string { return line[:len(line)/2] }},
		"about to be locked": {boot: boot, text: func(string) string { return "" }, stays: true},
		"without etcd":       {boot: boot, text: func(line string) string { return strings.Replace(line, `["x"]`, "[]", 1) }},
		"of no process":      {text: func(string) string { return "{}\n" }},
	} {
		t.Run(name, func(t *testing.T) {
			home := hometest.NewMemory(1).Link(0)
			lease, err := home.Lease(t.Context(), time.Minute)
			if err != nil {
				t.Fatal(err)
			}
			line, err := json.Marshal(estate{tc.boot, testimony{Cluster: config.Cluster{Etcd: []string{"x"}, Lease: time.Minute}, Leases: []string{lease.ID()}}})
			if err != nil {
				t.Fatal(err)
			}
			text := string(line) + "\n"
			if tc.text != nil {
				text = tc.text(text)
			}
			file := filepath.Join(t.TempDir(), LeasesFile+".x")
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			if tc.locked {
				f, err := os.Open(file)
				if err != nil {
					t.Fatal(err)
				}
				defer f.Close()
				if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
					t.Fatal(err)
				}
			}
			h := heir{filepath.Dir(file), func(*config.Cluster) (state.Lessor, error) { return home, nil }, slog.New(slog.DiscardHandler)}
			h.inherit(t.Context())
			if ended := lease.Renew(t.Context()) != nil; ended != tc.ended {
				t.Errorf("the lease is over: %v, want %v", ended, tc.ended)
			}
			if _, err := os.Stat(file); (err == nil) != tc.stays {
				t.Errorf("the file: %v, want that it stays: %v", err, tc.stays)
			}
		})
	}
}

// A process keeps its leases in a file, locked, as long as it has any.
func TestLeasesAreRecorded(t *testing.T) {
	for _, left := range []bool{true, false} {
		dir := t.TempDir()
		w := &witness{cluster: config.Cluster{Etcd: []string{"x"}, Lease: time.Minute}, log: slog.New(slog.DiscardHandler),
			file: filepath.Join(dir, LeasesFile+".x"), changed: make(chan struct{}, 1), dirty: make(chan struct{}, 1)}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			w.record(ctx)
		}()
		has := func(want string) {
			t.Helper()
			testkit.Eventually(t, "the file has the leases "+want, func() bool {
				b, _ := os.ReadFile(w.file)
				return strings.Count(string(b), "\n") == 1 && strings.Contains(string(b), `"Leases":`+want)
			})
		}
		w.set("a long name of a lease", true)
		w.set("1", true)
		has(`["a long name of a lease","1"]`)
		w.set("a long name of a lease", false)
		has(`["1"]`)
		h := heir{filepath.Dir(w.file), func(*config.Cluster) (state.Lessor, error) {
			t.Error("the heir takes the process for dead")
			return hometest.NewMemory(1).Link(0), nil
		}, w.log}
		h.inherit(t.Context())
		if !left {
			w.set("1", false)
		}
		cancel()
		<-done
		h.inherit(t.Context()) // the process is not at its end
		if _, err := os.Stat(w.file); (err == nil) != left {
			t.Errorf("leases are left: %v, and the file: %v", left, err)
		}
	}
}
