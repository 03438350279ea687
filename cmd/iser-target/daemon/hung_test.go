package daemon

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// dialog logs in to the lab's target over that transport.
func (l *lab) dialog(transport, name string) *initiator.Dialog {
	l.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	l.t.Cleanup(cancel)
	d, err := initiator.Dial(ctx, transport, l.addr(), initiator.Options{Name: prefix + name, Target: store})
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { d.Close() })
	if err := d.LogIn(nil); err != nil {
		l.t.Fatal(err)
	}
	return d
}

// wantStatus runs a command for a LUN, which must end with that status.
func (l *lab) wantStatus(d *initiator.Dialog, id byte, cdb [16]byte, in int, status byte) (sense []byte) {
	l.t.Helper()
	got, sense, _, err := d.Do([8]byte{1: id}, cdb[:], nil, in)
	if err != nil || got != status {
		l.t.Fatalf("LUN %d: %v, status %#x, sense % x; want status %#x", id, err, got, sense, status)
	}
	return sense
}

// A LUN whose store hangs in the middle of a command is fenced: its initiator logs in again, resets of
// others are answered, the LUN says why it is BUSY, and it can be removed. Other LUNs are served.
func TestStoreThatHangsDuringACommand(t *testing.T) {
	t.Parallel()
	for _, transport := range []string{"iser", "tcp"} {
		t.Run(transport, func(t *testing.T) {
			l, h, _ := newHangingLab(t, testWaits, nil, func(l *lab) {
				l.resets = `"*"`
				l.luns += "," + l.disk(1, "one", "")
				l.more = "limits: {fence_timeout: 200ms, store_timeout: 1s}\n"
			})
			disk := filepath.Join(l.dir, "one")
			free := h.hang("read " + disk)
			defer free()
			victim, other := l.dialog(transport, "victim"), l.dialog(transport, "other")
			hung, read := make(chan struct{}), cdb.Read10(0, 1)
			go func() {
				defer close(hung)
				victim.Do([8]byte{1: 1}, read[:], nil, 512) // fails with its connection
			}()
			testkit.Eventually(t, "the READ hangs", func() bool { return h.count("read "+disk) == 1 })
			l.wantStatus(other, 0, cdb.Read10(0, 1), 512, 0)

			testkit.Eventually(t, "the state says that the store hangs", func() bool {
				st := l.lunState(1)
				return st.State == schema.NotReady && strings.HasPrefix(st.Reason, "the store has not answered since ") &&
					strings.HasSuffix(st.Reason, "; 1 command waits")
			})
			if sense := l.wantStatus(other, 1, cdb.TestUnitReady, 0, lun.StatusCheckCondition); sense[2] != 0x02 || sense[12] != 0x04 {
				t.Errorf("TEST UNIT READY: sense % x", sense)
			}
			l.wantStatus(other, 1, cdb.Read10(0, 1), 512, lun.StatusBusy)
			if response, err := other.TMF(pdu.LogicalUnitReset, [8]byte{1: 1}); err != nil || response != pdu.FunctionComplete {
				t.Errorf("LOGICAL UNIT RESET: %v, response %d", err, response)
			}
			again := l.dialog(transport, "victim") // the same initiator port
			<-hung
			l.wantStatus(again, 0, cdb.Read10(0, 1), 512, 0)
			l.wantStatus(again, 1, cdb.Read10(0, 1), 512, lun.StatusBusy)
			if n := l.node.Stats().DetachedTasks; n != 1 {
				t.Errorf("%d commands are detached, want 1", n)
			}
			l.wantLUNEvents("store does not answer: its LUN is BUSY until it does")

			free()
			testkit.Eventually(t, "the LUN is ready", func() bool { return l.lunState(1).State == schema.Ready })
			for _, d := range []*initiator.Dialog{again, other} {
				l.wantStatus(d, 1, cdb.Read10(0, 1), 512, 0)
			}
			l.wantLUNEvents("store does not answer: its LUN is BUSY until it does", "store answers again")
		})
	}
}

// wantLUNEvents waits until the events of kind "lun" about stores that hang are these.
func (l *lab) wantLUNEvents(want ...string) {
	l.t.Helper()
	testkit.Eventually(l.t, "the events "+strings.Join(want, ", "), func() bool {
		var got []string
		for _, e := range l.Events(0) {
			if e.Event == "lun" && strings.HasPrefix(e.Text, "store ") {
				got = append(got, e.Text)
			}
		}
		return slices.Equal(got, want)
	})
}

// A session whose command hangs in its store can be killed, and its LUN removed, without waiting for
// the store.
func TestSessionAndLUNOfAStoreThatHangsCanBeRemoved(t *testing.T) {
	t.Parallel()
	l, h, _ := newHangingLab(t, testWaits, nil, func(l *lab) {
		l.luns += "," + l.disk(1, "one", "")
		l.more = "limits: {fence_timeout: 200ms}\n"
	})
	disk := filepath.Join(l.dir, "one")
	free := h.hang("read " + disk)
	defer free()
	s := l.login("victim", store)
	attentions(t, s, 1)
	if err := s.Start(&initiator.Command{LUN: 1, CDB: cdb.Read16(0, 1), In: make([]byte, 512)}); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the READ hangs", func() bool { return h.count("read "+disk) == 1 })
	if err := l.KillSession(t.Context(), l.State().Sessions[0].TSIH, "by a test"); err != nil {
		t.Error(err)
	}
	if n := len(l.State().Sessions); n != 0 {
		t.Errorf("%d sessions are left", n)
	}
	again := l.login("victim", store)
	if got := attentions(t, again, 1); !strings.HasSuffix(got, "2/04/00") {
		t.Errorf("LUN 1: %s", got)
	}
	begin := time.Now()
	remove := func(d *config.Document) error { return d.RemoveLUN(store, 1) }
	if _, err := l.Change(t.Context(), remove, ChangeOptions{Now: true, Disrupt: true}); err != nil {
		t.Error(err)
	}
	if took := time.Since(begin); took > soon {
		t.Errorf("the removal took %v", took)
	}
	if got := reportLUNs(t, again); !slices.Equal(got, []int{0}) {
		t.Errorf("LUNs %v", got)
	}
}

// The end of the target does not wait long for a store that has hung before. When the store answers
// after that, the log is no longer the target's.
func TestEndWithAStoreThatHangs(t *testing.T) {
	t.Parallel()
	w := testWaits
	w.end = time.Hour
	l, h, end := newHangingLab(t, w, nil, func(l *lab) {
		l.luns += "," + l.disk(1, "one", "")
		l.more = "drain: 0s\nlimits: {fence_timeout: 200ms, store_timeout: 1s}\n"
	})
	disk := filepath.Join(l.dir, "one")
	free := h.hang("read " + disk)
	defer free()
	defer h.hang("close " + disk)()
	s := l.login("victim", store)
	attentions(t, s, 1)
	if err := s.Start(&initiator.Command{LUN: 1, CDB: cdb.Read16(0, 1), In: make([]byte, 512)}); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the store hangs", func() bool {
		return strings.Contains(l.lunState(1).Reason, "the store has not answered since ")
	})
	inTime(t, "the end", func() {
		if err := end(); !errors.Is(err, ErrStuck) || !strings.Contains(err.Error(), "LUN 1 of "+store) {
			t.Errorf("the target ended with %v", err)
		}
	})
	l.logTo.mu.Lock()
	var late testkit.Log
	l.logTo.w = &late
	l.logTo.mu.Unlock()
	free()
	l.wantLUNEvents("store does not answer: its LUN is BUSY until it does", "store answers again")
	if got := late.String(); got != "" {
		t.Errorf("after the end the target logs %s", got)
	}
}
