package daemon

import (
	"math"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// The mean covers the time since the older mark, or since the login. A session that began before all marks has its tasks, and
// so has one whose commands have not ended.
func TestDepthIsMeanOfTheLastMarks(t *testing.T) {
	begin := time.Now()
	at := func(seconds float64) time.Time { return begin.Add(time.Duration(seconds * float64(time.Second))) }
	var d depths
	d.begin(begin)
	session := func(tsih uint16, started time.Time, sum time.Duration) *iscsi.SessionInfo {
		o := &lun.Operations{}
		o[lun.KindRead].Sum, o[lun.KindWrite].Sum = sum/4, sum-sum/4
		return &iscsi.SessionInfo{TSIH: tsih, Started: started, Tasks: 7, Operations: o}
	}
	want := func(what string, s *iscsi.SessionInfo, now float64, want float64) {
		t.Helper()
		if got := d.mean(s, at(now)); math.Abs(got-want) > 1e-9 {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	continued := at(-100)
	want("new session", session(1, at(1), 8*time.Second), 3, 4)
	want("no time", session(1, at(1), time.Second), 1, 7)
	want("nothing ended", session(1, at(1), 0), 3, 7)
	want("continued, no mark", session(2, continued, time.Hour), 3, 7)
	want("discovery", &iscsi.SessionInfo{TSIH: 3, Started: at(1)}, 3, 0)

	d.note(at(5), []iscsi.SessionTime{{TSIH: 1, Started: at(1), Sum: 10 * time.Second}, {TSIH: 2, Started: continued, Sum: time.Hour}})
	want("since the only mark", session(1, at(1), 16*time.Second), 7, 3)
	want("continued, with a mark", session(2, continued, time.Hour+time.Second), 7, 0.5)
	want("later session with the same TSIH", session(1, at(6), 2*time.Second), 7, 2)

	d.note(at(10), []iscsi.SessionTime{{TSIH: 1, Started: at(1), Sum: 20 * time.Second}})
	want("since the older mark", session(1, at(1), 34*time.Second), 11, 4)
	d.note(at(15), []iscsi.SessionTime{{TSIH: 1, Started: at(1), Sum: 34 * time.Second}})
	want("the oldest is forgotten", session(1, at(1), 38*time.Second), 16, 3)
	want("idle again", session(1, at(1), 20*time.Second), 16, 7)
	if n := len(d.marks[0].sums) + len(d.marks[1].sums); n != 2 {
		t.Errorf("%d sessions are remembered, want 2", n)
	}
}

// A session that waits for a slow store most of the time has a depth while it has no task. That of an idle neighbor is far smaller.
func TestDepthOfSessions(t *testing.T) {
	disk := t.TempDir() + "/disk.img"
	l := newLab(t, func(l *lab) { l.luns += `, {id: 1, backend: file, path: ` + disk + `, size: 1MiB}` })
	busy, idle := l.login("host1", store), l.login("host2", store)
	attentions(t, busy, 1)
	attentions(t, idle, 1)
	if err := l.SetFaults(t.Context(), store, 1, schema.Faults{Latency: "300ms", Seed: 1}); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the depth of the busy session is that of its command", func() bool {
		if err := busy.Do(&initiator.Command{LUN: 1, CDB: cdb.Read16(5, 3), In: make([]byte, 3*512)}); err != nil {
			t.Fatal(err)
		}
		of := map[string]schema.SessionState{}
		for _, s := range l.State().Sessions {
			of[s.Initiator] = s
		}
		b, i := of[prefix+"host1"], of[prefix+"host2"]
		t.Logf("busy %.3f with %d tasks, idle %.3f with %d tasks", b.Depth, b.Tasks, i.Depth, i.Tasks)
		return b.Tasks == 0 && i.Tasks == 0 && b.Depth > 0.01 && b.Depth < 2 && i.Depth < b.Depth
	})
}
