package iscsi

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/security/limits"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// waitLimit is limits.task_wait in these tests.
const waitLimit = 4 * time.Second

// otherLUN is that of the neighbour.
var otherLUN = [8]byte{0, 1}

// newWaitNode returns a node on which nothing but limits.task_wait is ever over, and a session of a neighbour with a LUN of its own.
func newWaitNode(t *testing.T) (n *testNode, l *limits.Set, neighbour *testConn) {
	l = limits.New()
	l.TaskWait.SetMax(int64(waitLimit))
	for _, other := range []*limits.Limit{&l.DataTimeout, &l.OrderTimeout, &l.SendTimeout, &l.StoreTimeout} {
		other.SetMax(int64(time.Hour))
	}
	n = newTestNode(t, func(o *Options) { o.Shared = l })
	u, err := lun.New(newStore(t), lun.Options{Identity: state.Identity{NAA: [8]byte{0x30, 7: 9}, Serial: "3000000000000009"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := n.inv.Add(1, u); err != nil {
		t.Fatal(err)
	}
	neighbour = n.connect(func(tc *testConn) { tc.isid[5] = 9 }).login()
	h := neighbour.scsi(pdu.FlagF, 0, cdb.TestUnitReady)
	h.SetLUN(otherLUN)
	neighbour.write(h, nil)
	neighbour.wantStatus(h, lun.StatusCheckCondition) // POWER ON OCCURRED
	return n, l, neighbour
}

// readsElsewhere lets tc read from LUN 1.
func (tc *testConn) readsElsewhere() {
	tc.tb.Helper()
	h := tc.scsi(readF, 4096, cdb.Read10(0, 8))
	h.SetLUN(otherLUN)
	tc.write(h, nil)
	tc.wantStatus(h, lun.StatusGood)
}

// link returns how a chain names the command or function h of an initiator.
func link(what string, h pdu.BHS, initiator, waits string) string {
	return fmt.Sprintf("%s with ITT %#x to LUN 0 of %s ", what, h.ITT(), initiator) + "|" + "waits for " + waits
}

// wantChain requires one report more within the limit and a look, with these links, and that the neighbour is served meanwhile.
func (n *testNode) wantChain(l *limits.Set, neighbour *testConn, began time.Time, others int, chain ...string) {
	n.tb.Helper()
	const text = "a task waits for others"
	for time.Since(began) < waitLimit-time.Millisecond {
		neighbour.readsElsewhere()
		time.Sleep(100 * time.Millisecond)
		if len(n.log.Lines(text)) > 0 && time.Since(began) < waitLimit {
			n.tb.Fatalf("reported after %v: %s", time.Since(began), n.log)
		}
	}
	time.Sleep(waitLimit / 2) // the next look, and the look that begins
	neighbour.readsElsewhere()
	time.Sleep(2 * waitLimit) // a report is not repeated
	synctest.Wait()
	lines := n.log.Lines(text)
	if len(lines) != 1 || l.TaskWait.State().Bites != 1 {
		n.tb.Fatalf("%d reports, %d times the limit:\n%s", len(lines), l.TaskWait.State().Bites, n.log)
	}
	line := lines[0]
	for _, part := range []string{"level=WARN", "limit=4s", fmt.Sprintf("others=%d", others), "target=" + targetName} {
		if !strings.Contains(line, part) {
			n.tb.Errorf("%s is not in %s", part, line)
		}
	}
	_, at, _ := strings.Cut(line, "chain=")
	for _, of := range chain {
		head, waits, _ := strings.Cut(of, "|")
		_, rest, ok := strings.Cut(at, head)
		if !ok {
			n.tb.Fatalf("%q is not in the rest of the chain: %s\nof %s", head, at, line)
		}
		if at = rest; !strings.Contains(strings.SplitN(at, ";", 2)[0], waits) {
			n.tb.Fatalf("%q does not follow %q: %s", waits, head, at)
		}
	}
	if strings.Contains(at, ";") {
		n.tb.Errorf("the chain has more than %d links: %s", len(chain), line)
	}
	n.tb.Log(line)
}

// A task that waits for longer than limits.task_wait for other tasks is reported once, with the chain of tasks up to the one
// that waits for something else, whichever sessions they are of. A session with another LUN is served as before.
func TestTaskWaitNamesTheChain(t *testing.T) {
	bubble(t, "a store that hangs, three sessions", func(t *testing.T) {
		n, l, neighbour := newWaitNode(t)
		a, b := n.connect().login(), n.enter()
		c := n.connect(func(tc *testConn) { tc.isid[5] = 3 }).login()
		gate := n.store.Shut()
		first := a.command(writeF|pdu.AttrSimple, 512, cdb.Write10(0, 1), make([]byte, 512))
		<-gate.Entered
		ordered := b.command(pdu.FlagF|pdu.AttrOrdered, 0, cdb.TestUnitReady, nil)
		synctest.Wait()
		time.Sleep(waitLimit) // so that the report about the third is not the first
		last := c.command(pdu.FlagF|pdu.AttrSimple, 0, cdb.TestUnitReady, nil)
		synctest.Wait()
		time.Sleep(2 * waitLimit)
		neighbour.readsElsewhere()
		synctest.Wait()
		lines := n.log.Lines("a task waits for others")
		if len(lines) != 2 {
			t.Fatalf("%d reports:\n%s", len(lines), n.log)
		}
		at := lines[1]
		for _, part := range []string{"chain=", fmt.Sprintf("TEST UNIT READY with ITT %#x to LUN 0 of %s", last.ITT(), initiatorName),
			"waits for commands of other sessions that came before it; ",
			fmt.Sprintf("ORDERED TEST UNIT READY with ITT %#x to LUN 0 of %s", ordered.ITT(), rival),
			"waits for commands of other sessions that came before it; ",
			fmt.Sprintf("WRITE(10) with ITT %#x to LUN 0 of %s", first.ITT(), initiatorName), "waits for its LUN"} {
			_, rest, ok := strings.Cut(at, part)
			if !ok {
				t.Fatalf("%q is not in %q of %s", part, at, lines[1])
			}
			at = rest
		}
		t.Log(lines[1])
		gate.Open()
		a.wantStatus(first, 0)
		b.wantStatus(ordered, 0)
		c.wantStatus(last, 0)
		for _, tc := range []*testConn{a, b, c, neighbour} {
			tc.logout()
		}
		if l.TaskWait.State().Bites != 2 {
			t.Errorf("%d times the limit", l.TaskWait.State().Bites)
		}
	})
	bubble(t, "an initiator that is silent", func(t *testing.T) {
		n, l, neighbour := newWaitNode(t)
		a := n.connect().login()
		a.hold()
		began := time.Now()
		write := a.command(writeF|pdu.AttrSimple, 4096, cdb.Write10(0, 8), nil)
		a.wantGets(1)
		ordered := a.command(pdu.FlagF|pdu.AttrOrdered, 0, cdb.TestUnitReady, nil)
		last := a.command(pdu.FlagF|pdu.AttrSimple, 0, cdb.TestUnitReady, nil)
		n.wantChain(l, neighbour, began, 1,
			link("ORDERED TEST UNIT READY", ordered, initiatorName, "older commands of its session"),
			link("WRITE(10)", write, initiatorName, "4096 bytes of data from its initiator"))
		a.releaseGet()
		a.wantStatus(write, 0)
		a.wantStatus(ordered, 0)
		a.wantStatus(last, 0)
		a.logout()
		neighbour.logout()
	})
	bubble(t, "a function", func(t *testing.T) {
		n, l, neighbour := newWaitNode(t)
		l.FenceTimeout.SetMax(int64(time.Hour))
		a := n.connect().login()
		gate := n.store.Shut()
		began := time.Now()
		write := a.command(writeF|pdu.AttrSimple, 512, cdb.Write10(0, 1), make([]byte, 512))
		<-gate.Entered
		f := a.tmf(pdu.AbortTaskSet, [8]byte{}, pdu.ReservedTag, 0)
		n.wantChain(l, neighbour, began, 0,
			link("ABORT TASK SET", f, initiatorName, "tasks that it ends"),
			link("WRITE(10)", write, initiatorName, "its LUN"))
		gate.Open()
		a.wantTMF(f, pdu.FunctionComplete)
		a.logout()
		neighbour.logout()
	})
	bubble(t, "a gap in the CmdSNs", func(t *testing.T) {
		n, l, neighbour := newWaitNode(t)
		a := n.connect().login()
		missing := a.CmdSN
		a.CmdSN++
		began := time.Now()
		first := a.command(pdu.FlagF|pdu.AttrSimple, 0, cdb.TestUnitReady, nil)
		second := a.command(pdu.FlagF|pdu.AttrSimple, 0, cdb.TestUnitReady, nil)
		n.wantChain(l, neighbour, began, 1,
			link("TEST UNIT READY", first, initiatorName, fmt.Sprintf("CmdSN %d, which its initiator has not sent", missing)))
		next := a.CmdSN
		a.CmdSN = missing
		filler := a.command(pdu.FlagF|pdu.AttrSimple, 0, cdb.TestUnitReady, nil)
		a.CmdSN = next
		got := map[uint32]bool{}
		for range 3 {
			got[a.want(pdu.SCSIResponse).h.ITT()] = true
		}
		for _, h := range []pdu.BHS{first, second, filler} {
			if !got[h.ITT()] {
				t.Errorf("no answer to %#x", h.ITT())
			}
		}
		a.logout()
		neighbour.logout()
	})
}

// A command that waits for its initiator alone, or for its store, is not reported: other limits are for that.
func TestTaskWaitIsAboutTasks(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n, l, neighbour := newWaitNode(t)
		a := n.connect().login()
		a.hold()
		write := a.command(writeF|pdu.AttrSimple, 4096, cdb.Write10(0, 8), nil)
		a.wantGets(1)
		gate := n.store.Shut()
		read := a.command(readF|pdu.AttrSimple, 512, cdb.Read10(0, 1), nil)
		<-gate.Entered
		time.Sleep(5 * waitLimit)
		if bites := l.TaskWait.State().Bites; bites != 0 {
			t.Errorf("%d reports:\n%s", bites, n.log)
		}
		gate.Open()
		a.wantStatus(read, 0)
		a.releaseGet()
		a.wantStatus(write, 0)
		a.logout()
		neighbour.logout()
	})
}
