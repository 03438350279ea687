package interop_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/interop/harness"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// watchdog returns the variables by which systemd would ask for pings, and counts them.
func watchdog(t *testing.T) (env []string, pings *atomic.Int64) {
	t.Helper()
	name := filepath.Join(t.TempDir(), "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: name, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	pings = new(atomic.Int64)
	read := make(chan struct{})
	go func() {
		defer close(read)
		for b := make([]byte, 4096); ; {
			n, err := conn.Read(b)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if strings.Contains(string(b[:n]), "WATCHDOG=1") {
				pings.Add(1)
			}
		}
	}()
	t.Cleanup(func() { conn.Close(); <-read })
	return []string{"NOTIFY_SOCKET=" + name, "WATCHDOG_USEC=600000"}, pings
}

// register returns PERSISTENT RESERVE OUT, REGISTER AND IGNORE EXISTING KEY, with APTPL.
func register(key uint64) *initiator.Command {
	list := make([]byte, 24)
	binary.BigEndian.PutUint64(list[8:], key)
	list[20] = 1
	return &initiator.Command{CDB: [16]byte{0: 0x5f, 1: 6, 8: 24}, Out: list}
}

// The file system of the configuration, the state directory and the control socket hangs for real. I/O,
// logins, lists, metrics and the watchdog continue. What has to be stored fails in time, and says where. The
// target ends at SIGTERM, and what it has acknowledged before is there at the next start.
//
// docs/limits.md: "state_timeout".
func TestFrozenStateDirectory(t *testing.T) {
	v := volume(t)
	targets := "  - name: " + honestIQN + "\n    initiators: [\"*\"]\n    luns:\n      - {id: 0, backend: file, path: %s/0.img, size: 16MiB}\n"
	const more = "drain: 1s\nlimits: {state_timeout: 1s}\n"
	env, pings := watchdog(t)
	control := harness.Config{Targets: fmt.Sprintf(targets, t.TempDir()), More: more}.Start(t)
	d := harness.Config{Targets: fmt.Sprintf(targets, t.TempDir()), More: more, Dir: v.Dir, Env: env}.Start(t)
	near, far := logIn(t, d, honestIQN, "near"), logIn(t, control, honestIQN, "near")
	if err := good(near, register(1)); err != nil {
		t.Fatal(err)
	}

	var change sync.WaitGroup
	defer change.Wait()
	defer v.Thaw(t)
	v.Freeze(t)
	if share := shareOf(t, near, far); share < 80 {
		t.Errorf("the honest initiator keeps %.0f %%, want 80 %%", share)
	}
	in(t, promptly, "PERSISTENT RESERVE OUT", func() {
		c := register(2)
		if err := near.Do(c); err != nil || c.Status != statusCheckCondition || len(c.Sense) < 14 || c.Sense[2] != 4 || c.Sense[12] != 0x44 {
			t.Errorf("PERSISTENT RESERVE OUT: %v, status %#x, sense % x; want HARDWARE ERROR, 44h/00h", err, c.Status, c.Sense)
		}
	})
	// A change waits for the file of the configuration. Nothing below waits for the change.
	change.Go(func() {
		if _, _, code := d.Try(t, "limits", "set", "max_connections=1000"); code == 0 {
			t.Error("a change was made whose file could not be written")
		}
	})
	before := pings.Load()
	testkit.Eventually(t, "the watchdog is told", func() bool { return pings.Load() > before+5 })
	for _, args := range [][]string{{"target", "list"}, {"lun", "list"}, {"lun", "show", honestIQN, "0"}, {"session", "list"},
		{"portal", "list"}, {"limits"}, {"events"}} {
		in(t, promptly, strings.Join(args, " "), func() { d.Manage(t, args...) })
	}
	in(t, promptly, "the metrics", func() { d.Metrics(t) })
	in(t, promptly, "another login", func() {
		read := &initiator.Command{CDB: cdb.Read16(0, 8), In: make([]byte, 4096)}
		if err := good(logIn(t, d, honestIQN, "another"), read); err != nil {
			t.Error(err)
		}
	})
	wait := d.Terminate(t, stopping)
	in(t, promptly, "the end of the session", func() { near.Err() })
	v.Thaw(t)
	in(t, testkit.Patience, "the end of the process", func() {
		if code := wait(); code != 1 {
			t.Errorf("exit code %d, want 1", code)
		}
	})
	d.Start(t)
	keys := &initiator.Command{CDB: [16]byte{0: 0x5e, 8: 0xff}, In: make([]byte, 255)}
	if err := good(logIn(t, d, honestIQN, "near"), keys); err != nil {
		t.Fatal(err)
	}
	// PERSISTENT RESERVE IN, READ KEYS: the length of the list is at 4, the keys begin at 8 (SPC-4, section 6.15.2).
	if n, key := binary.BigEndian.Uint32(keys.In[4:]), binary.BigEndian.Uint64(keys.In[8:]); n != 8 || key > 2 || key == 0 {
		t.Errorf("%d bytes of keys, the first is %d; want key 1, or 2 of the command whose result was not known", n, key)
	}
}
