package daemon

import (
	"fmt"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// The log has slow commands with the phase that was slow, and none of a quick neighbor. The threshold changes while the
// target runs.
func TestSlowCommandsAreLogged(t *testing.T) {
	disk := t.TempDir() + "/disk.img"
	l := newLab(t, func(l *lab) {
		l.more = `log: {slow_io: 50ms}`
		l.luns += `, {id: 1, backend: file, path: ` + disk + `, size: 1MiB}, {id: 2, backend: memory, size: 1MiB, iops: 4}`
	})
	s := l.login("host1", store)
	for id := range byte(3) {
		attentions(t, s, id)
	}
	if err := l.SetFaults(t.Context(), store, 1, schema.Faults{Latency: "400ms", Seed: 1}); err != nil {
		t.Fatal(err)
	}
	read := func(id byte) {
		t.Helper()
		if err := s.Do(&initiator.Command{LUN: id, CDB: cdb.Read16(5, 3), In: make([]byte, 3*512)}); err != nil {
			t.Fatal(err)
		}
	}
	for range 5 {
		read(0)
		read(1)
		read(2)
	}
	found := func(id byte, phase string) func() bool {
		return func() bool {
			for _, e := range l.eventOf("slow", "slow command") {
				if fmt.Sprint(e.Attrs["lun"]) == fmt.Sprint(id) && e.Attrs["slow_phase"] == phase {
					for key, want := range map[string]string{"command": "READ(16)", "lba": "5", "blocks": "3", "bytes": "1536", "initiator": prefix + "host1", "target": store} {
						if got := fmt.Sprint(e.Attrs[key]); got != want {
							t.Fatalf("%s is %s, want %s: %v", key, got, want, e.Attrs)
						}
					}
					if took, err := time.ParseDuration(fmt.Sprint(e.Attrs["took"])); err != nil || took < 50*time.Millisecond {
						t.Fatalf("it took %v: %v", e.Attrs["took"], err)
					}
					return true
				}
			}
			return false
		}
	}
	testkit.Eventually(t, "a slow store is in the log", found(1, "backend"))
	testkit.Eventually(t, "a wait for a rate is in the log", found(2, "queue"))
	for _, e := range l.eventOf("slow", "slow command") {
		if fmt.Sprint(e.Attrs["lun"]) == "0" {
			t.Errorf("a command for another LUN: %v", e.Attrs)
		}
	}
	before := len(l.eventOf("slow", "slow command"))
	if err := l.SetFaults(t.Context(), store, 1, schema.Faults{Latency: "1ms"}); err != nil {
		t.Fatal(err)
	}
	l.Node().WatchSlow(0)
	for range 3 {
		read(2)
	}
	if now := len(l.eventOf("slow", "slow command")); now > before+1 { // one that was left out may follow at the end of its second
		t.Errorf("%d events after the threshold was removed, %d before", now, before)
	}
}
