package iscsi

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/security/limits"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// A cancelingMover calls off a GetData as TCP does, and knows how much of it has come.
type cancelingMover struct {
	*fakeMover
	came    map[uint32]uint64 // by ITT
	placing map[uint32]bool   // by ITT: in the middle of a Data-Out PDU

	taken, owed uint64
}

func canceling(tc *testConn) {
	tc.m.rdma = false
	tc.dm = &cancelingMover{fakeMover: tc.m, came: map[uint32]uint64{}, placing: map[uint32]bool{}}
}

func (m *cancelingMover) Taken() (taken, owed uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.taken, m.owed
}

// drains lets the initiator take n bytes of what waits, and more wait: then owed in all.
func (tc *testConn) drains(n, owed uint64) {
	m := tc.dm.(*cancelingMover)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.taken, m.owed = m.taken+n, owed
}

func (m *cancelingMover) CancelData(t *Task) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	i := slices.Index(m.gets, t)
	if i < 0 || m.placing[m.bound[t]] {
		return false
	}
	m.gets = slices.Delete(m.gets, i, i+1)
	m.asked = slices.DeleteFunc(m.asked, func(u *Task) bool { return u == t })
	delete(m.data, t)
	return true
}

func (m *cancelingMover) Fetched(t *Task) (came uint64, missing int, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	came = m.came[m.bound[t]]
	return came, len(m.data[t]) - int(came), m.data[t] != nil
}

// comes lets n more bytes for h come.
func (tc *testConn) comes(h pdu.BHS, n uint64) {
	m := tc.dm.(*cancelingMover)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.came[h.ITT()] += n
}

// ends lets the data for h be complete.
func (tc *testConn) ends(h pdu.BHS) {
	tc.m.mu.Lock()
	defer tc.m.mu.Unlock()
	for _, t := range tc.m.gets {
		if tc.m.bound[t] == h.ITT() {
			tc.m.endGet(t, nil)
			return
		}
	}
	tc.tb.Fatalf("no GetData for %#x", h.ITT())
}

// A stalledPair has a session whose data does not come, and a neighbour.
type stalledPair struct {
	*testNode
	*testConn
	neighbour *testConn
	limits    *limits.Set
	began     time.Time
}

func newStalledPair(t *testing.T, change ...func(*testConn)) *stalledPair {
	l, no := limits.New(), false
	n := newTestNode(t, func(o *Options) { o.Shared, o.Limits.InitialR2T = l, &no })
	p := &stalledPair{testNode: n, limits: l}
	p.neighbour = n.connect(func(tc *testConn) { tc.isid[5] = 9 }).login()
	p.testConn = n.connect(change...).login()
	p.m.mu.Lock()
	p.m.holdGets = true
	p.m.mu.Unlock()
	p.began = time.Now()
	return p
}

// writes sends a WRITE of that many bytes, whose data does not come.
func (p *stalledPair) writes(bytes int) pdu.BHS {
	h := p.command(writeF, uint32(bytes), cdb.Write10(0, uint16(bytes/blockLen)), nil)
	synctest.Wait()
	return h
}

// passes lets time pass until that long after the beginning. The neighbour is served meanwhile, and
// nothing comes for the other.
func (p *stalledPair) passes(until time.Duration) {
	p.testNode.tb.Helper()
	for time.Since(p.began) < until {
		p.neighbour.wantStatus(p.neighbour.command(readF, 4096, cdb.Read10(0, 8), nil), lun.StatusGood)
		p.wantNothing()
		if p.m.isClosed() {
			p.testNode.tb.Fatalf("closed after %v", time.Since(p.began))
		}
		time.Sleep(min(time.Second, until-time.Since(p.began)))
	}
}

// wantLate takes INITIATOR RESPONSE TIMEOUT for h, which comes in the half after the limit.
func (p *stalledPair) wantLate(h pdu.BHS, from, limit time.Duration) {
	p.testNode.tb.Helper()
	p.passes(from + limit - time.Millisecond)
	p.wantSense(h, 0x0b, 0x4b, 0x06)
	if d := time.Since(p.began) - from; d < limit || d > limit*3/2 {
		p.testNode.tb.Errorf("ended after %v, the limit is %v", d, limit)
	}
	p.neighbour.ping()
}

// wantTold checks the lines of the log about commands that ended.
func (p *stalledPair) wantTold(ends string, missing int, hs ...pdu.BHS) {
	p.testNode.tb.Helper()
	synctest.Wait() // the line may follow the answer
	lines := p.log.Lines("data of a command did not come")
	if len(lines) != len(hs) || p.limits.DataTimeout.State().Bites != uint64(len(hs)) {
		p.testNode.tb.Fatalf("%d times the limit, log: %q", p.limits.DataTimeout.State().Bites, lines)
	}
	for _, h := range hs {
		if !slices.ContainsFunc(lines, func(l string) bool {
			for _, part := range []string{"level=WARN", "initiator=" + initiatorName, "target=" + targetName, "lun=0",
				fmt.Sprintf("itt=%#x", h.ITT()), fmt.Sprintf("missing=%d ", missing), "ends=" + ends} {
				if !strings.Contains(l, part) {
					return false
				}
			}
			return true
		}) {
			p.testNode.tb.Errorf("no line about %#x: %q", h.ITT(), lines)
		}
	}
}

// Commands whose data does not come end together when the limit is over, and their Buffers are free.
// The session works on: pings, a further WRITE, and a neighbour never notice.
func TestDataThatDoesNotCome(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		p := newStalledPair(t, canceling)
		a := p.writes(8192)
		b := p.writes(8192)
		p.passes(20 * time.Second)
		p.ping()
		if n := p.Stats().BuffersOut; n != 2 {
			t.Errorf("%d Buffers in use, want 2", n)
		}
		p.passes(30*time.Second - time.Millisecond)
		ended := map[uint32]pdu.BHS{a.ITT(): a, b.ITT(): b}
		for range 2 {
			r := p.want(pdu.SCSIResponse)
			h := ended[r.h.ITT()]
			delete(ended, r.h.ITT())
			if s := r.data; h == nil || len(s) < 16 || s[4] != 0x0b || s[14] != 0x4b || s[15] != 0x06 {
				t.Fatalf("SCSI Response %x %x", []byte(r.h), s)
			}
			wantResidual(t, r, pdu.FlagUnderflow, 8192)
		}
		if d := time.Since(p.began); d > 45*time.Second {
			t.Errorf("ended after %v", d)
		}
		p.wantTold("command", 8192, a, b)
		if s := p.Stats(); s.BuffersOut != 0 || s.Sessions != 2 {
			t.Errorf("%+v", s)
		}
		p.m.hold(false, false)
		p.wantStatus(p.writes(8192), lun.StatusGood)
		p.ping()
		p.logout()
		p.neighbour.logout()
	})
}

// Data that comes begins the limit again, if it is enough: an initiator cannot keep a command with a
// byte now and then.
func TestDataThatTrickles(t *testing.T) {
	for _, tt := range []struct {
		bytes uint64
		comes int // times, every 20 s
		lasts time.Duration
	}{
		{64 << 10, 5, 100 * time.Second},
		{64<<10 - 1, 1, 0},
		{1, 1, 0},
	} {
		bubble(t, fmt.Sprintf("%d bytes", tt.bytes), func(t *testing.T) {
			p := newStalledPair(t, canceling)
			h := p.writes(1 << 20)
			for i := range tt.comes {
				p.passes(time.Duration(i+1) * 20 * time.Second)
				p.comes(h, tt.bytes)
			}
			p.wantLate(h, tt.lasts, 30*time.Second)
			p.logout()
			p.neighbour.logout()
		})
	}
}

// Initiators send data in the order in which the target asks for it, perhaps over a slow network. A
// command may wait as long as data of earlier commands moves. Data of later commands does not help.
func TestDataInOrder(t *testing.T) {
	bubble(t, "earlier data moves", func(t *testing.T) {
		p := newStalledPair(t, canceling)
		first := p.writes(1 << 20)
		second := p.writes(1 << 20)
		for at := 20 * time.Second; at < 100*time.Second; at += 20 * time.Second {
			p.passes(at)
			p.comes(first, 64<<10)
		}
		p.passes(100 * time.Second)
		p.ends(first)
		p.wantStatus(first, lun.StatusGood)
		p.wantLate(second, 100*time.Second, 30*time.Second)
		p.wantTold("command", 1<<20, second)
		p.logout()
		p.neighbour.logout()
	})
	bubble(t, "earlier unsolicited data moves", func(t *testing.T) {
		p := newStalledPair(t, canceling)
		first := p.scsi(pdu.FlagW, 8192, cdb.Write10(0, 16))
		p.write(first, nil)
		second := p.writes(8192)
		p.passes(20 * time.Second)
		p.write(p.dataOutPDU(first, true, 0, 0), make([]byte, 8192))
		p.wantStatus(first, lun.StatusGood)
		p.wantLate(second, 20*time.Second, 30*time.Second)
		p.logout()
		p.neighbour.logout()
	})
	bubble(t, "later data moves", func(t *testing.T) {
		p := newStalledPair(t, canceling)
		first := p.writes(1 << 20)
		second := p.writes(1 << 20)
		p.passes(20 * time.Second)
		p.comes(second, 64<<10)
		p.passes(25 * time.Second)
		p.ends(second)
		p.wantStatus(second, lun.StatusGood)
		p.wantLate(first, 0, 30*time.Second)
		p.logout()
		p.neighbour.logout()
	})
}

// Each connection of a session has its own time: the timer of one does not touch the commands of another.
func TestDataOfSeveralConnections(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		l := limits.New()
		n := newTestNode(t, func(o *Options) { o.Shared, o.Limits.MaxConnections = l, 4 })
		a := n.connect(canceling)
		a.writeLogin(a.loginRequest(true, 1, 3), append(append(slices.Clone(names), without(linuxKeys, "MaxConnections")...),
			"MaxConnections=4")...)
		a.loggedIn()
		time.Sleep(time.Second) // so that the timer of a looks first
		b := a.join(1, canceling)
		a.m.hold(true, false)
		b.m.hold(true, false)
		ends := func(tc *testConn, h pdu.BHS, asked time.Time) {
			t.Helper()
			tc.wantSense(h, 0x0b, 0x4b, 0x06)
			if d := time.Since(asked); d < 30*time.Second || d > 45*time.Second {
				t.Errorf("ended after %v", d)
			}
		}
		askedB := time.Now()
		onB := b.on(a).command(writeF, 4096, cdb.Write10(8, 8), nil)
		time.Sleep(20 * time.Second)
		askedA := time.Now()
		onA := a.on(b).command(writeF, 4096, cdb.Write10(0, 8), nil)
		ends(b, onB, askedB)
		a.wantNothing()
		ends(a, onA, askedA)
		synctest.Wait()
		if n := l.DataTimeout.State().Bites; n != 2 {
			t.Errorf("%d times the limit, want 2", n)
		}
		b.on(a).logout()
		a.wait()
	})
}

// The limit changes while commands wait.
func TestDataTimeoutChangesLive(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		p := newStalledPair(t, canceling)
		p.limits.DataTimeout.SetMax(int64(time.Hour))
		h := p.writes(8192)
		p.passes(30 * time.Minute)
		p.limits.DataTimeout.SetMax(int64(time.Second))
		p.wantSense(h, 0x0b, 0x4b, 0x06)
		if d := time.Since(p.began) - 30*time.Minute; d > lookAtLeast {
			t.Errorf("ended %v after the change", d)
		}
		p.logout()
		p.neighbour.logout()
	})
}

// In the middle of a Data-Out PDU nothing else of its connection can come: the connection ends, and
// the event says why. If the rest comes before that, the command ends alone.
func TestDataOutThatDoesNotEnd(t *testing.T) {
	for _, comes := range []bool{false, true} {
		bubble(t, fmt.Sprintf("rest comes %t", comes), func(t *testing.T) {
			p := newStalledPair(t, canceling)
			m := p.dm.(*cancelingMover)
			h := p.writes(8192)
			m.placing[h.ITT()] = true
			p.comes(h, 100)
			p.passes(30*time.Second - time.Millisecond)
			for len(p.log.Lines("data of a command did not come")) == 0 {
				p.passes(time.Since(p.began) + time.Second)
			}
			if comes {
				m.mu.Lock()
				m.endGet(m.gets[0], ErrCanceled)
				m.mu.Unlock()
				p.wantSense(h, 0x0b, 0x4b, 0x06)
				p.wantTold("connection", 8092, h)
				p.logout()
				p.neighbour.logout()
				return
			}
			if err := p.wait(); err == nil || !strings.Contains(err.Error(), "rest of a Data-Out PDU for the SCSI Command with ITT "+
				fmt.Sprintf("%#x to LUN 0 has not come, 8092 bytes are missing: limits.data_timeout is 30s", h.ITT())) {
				t.Error(err)
			}
			if d := time.Since(p.began); d < 30*time.Second || d > 60*time.Second {
				t.Errorf("ended after %v", d)
			}
			p.neighbour.logout()
		})
	}
}

// Over RDMA the responses to Reads come in order. When one is overdue, so is all that follows, and the
// connection ends.
func TestReadResponseThatDoesNotCome(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		p := newStalledPair(t)
		h := p.writes(8192)
		p.passes(30 * time.Second)
		if err := p.wait(); err == nil || !strings.Contains(err.Error(), "RDMA Read Response for the SCSI Command with ITT "+
			fmt.Sprintf("%#x to LUN 0 has not come, 8192 bytes are missing: limits.data_timeout is 30s", h.ITT())) {
			t.Error(err)
		}
		if d := time.Since(p.began); d > 45*time.Second {
			t.Errorf("ended after %v", d)
		}
		synctest.Wait()
		p.wantTold("connection", 8192, h)
		if s := p.Stats(); s.Sessions != 1 || s.BuffersOut != 0 {
			t.Errorf("%+v", s)
		}
		p.neighbour.wantStatus(p.neighbour.command(readF, 4096, cdb.Read10(0, 8), nil), lun.StatusGood)
		p.neighbour.logout()
	})
}

// Unsolicited data that a command has announced, and that does not come, ends the command, too. What
// comes of it later is rejected, and does no harm. A refused command keeps its reason.
func TestUnsolicitedDataThatDoesNotCome(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(h pdu.BHS)
		data   int // immediate
		sense  lun.Sense
	}{
		"none":         {func(pdu.BHS) {}, 0, senseNotTaken},
		"a part":       {func(pdu.BHS) {}, 1024, senseNotTaken},
		"of a refused": {func(h pdu.BHS) { h.SetFlags(pdu.FlagW | pdu.AttrACA) }, 0, senseInvalidIU},
	} {
		bubble(t, name, func(t *testing.T) {
			p := newStalledPair(t)
			h := p.scsi(pdu.FlagW, 8192, cdb.Write10(0, 16))
			tt.change(h)
			p.write(h, make([]byte, tt.data))
			later := p.command(readF, 4096, cdb.Read10(0, 8), nil)
			p.wantStatus(later, lun.StatusGood)
			p.passes(30*time.Second - time.Millisecond)
			p.wantSense(h, tt.sense.Key, tt.sense.ASC, tt.sense.ASCQ)
			if d := time.Since(p.began); d < 30*time.Second || d > 45*time.Second {
				t.Errorf("ended after %v", d)
			}
			late := p.dataOutPDU(h, true, 0, uint32(tt.data))
			p.write(late, make([]byte, 512))
			p.wantReject(pdu.RejectInvalidField, late)
			p.ping()
			if s := p.Stats(); s.BuffersOut != 0 || s.Sessions != 2 {
				t.Errorf("%+v", s)
			}
			p.logout()
			p.neighbour.logout()
		})
	}
}

// A command that another session has taken away waits for its data, and no longer than any other.
func TestTakenCommandWhoseDataDoesNotCome(t *testing.T) {
	for _, unsolicited := range []bool{false, true} {
		bubble(t, fmt.Sprintf("unsolicited %t", unsolicited), func(t *testing.T) {
			p := newStalledPair(t, canceling)
			h := p.scsi(writeF, 8192, cdb.Write10(0, 16))
			if unsolicited {
				h.SetFlags(pdu.FlagW | pdu.AttrSimple)
			}
			p.write(h, nil)
			p.passes(time.Second)
			p.neighbour.wantTMF(p.neighbour.tmf(pdu.ClearTaskSet, [8]byte{}, pdu.ReservedTag, 0), pdu.FunctionComplete)
			p.passes(30*time.Second - time.Millisecond)
			p.wantAborted(h, 8192)
			if d := time.Since(p.began); d < 30*time.Second || d > 45*time.Second {
				t.Errorf("ended after %v", d)
			}
			if s := p.Stats(); s.BuffersOut != 0 {
				t.Errorf("%+v", s)
			}
			p.ping()
			p.logout()
			p.neighbour.logout()
		})
	}
}

// talks sends a NOP-Out that asks for no answer.
func (tc *testConn) talks() {
	h := tc.Request(pdu.NOPOut, pdu.FlagF, true)
	h.SetITT(pdu.ReservedTag)
	h.SetTTT(pdu.ReservedTag)
	tc.write(h, nil)
}

// An initiator that talks, but takes no answers, loses its connection when the limit is over, with all that
// waits for it. Taking a byte now and then does not help it. One that takes what waits, or enough of it,
// stays, however slow it is.
func TestAnswersThatAreNotTaken(t *testing.T) {
	const never = time.Hour
	for _, tt := range []struct {
		name        string
		takes, owed uint64 // every 50 s
		lasts       time.Duration
	}{
		{"none", 0, 1 << 20, 0},
		{"a byte", 1, 1 << 20, 0},
		{"not quite enough", 64<<10 - 1, 1 << 20, 0},
		{"enough", 64 << 10, 1 << 20, 300 * time.Second},
		{"all", 48, 48, 300 * time.Second},
		{"all, and then nothing waits", 48, 0, never},
		{"as much as can be seen, and then nothing waits", 47, 0, never},
	} {
		bubble(t, tt.name, func(t *testing.T) {
			p := newStalledPair(t, canceling)
			p.m.hold(false, true)
			p.command(readF, 1<<20, cdb.Read10(0, 2048), nil)
			synctest.Wait()
			if n := p.Stats().BuffersOut; n != 1 {
				t.Fatalf("%d Buffers wait", n)
			}
			p.drains(0, max(tt.owed, 48))
			stops := min(max(tt.lasts, 50*time.Second), 400*time.Second)
			for at := time.Second; at <= stops; at += time.Second {
				p.passes(at)
				p.talks()
				if at%(50*time.Second) == 0 {
					p.drains(tt.takes, tt.owed)
				}
			}
			if tt.lasts == never {
				p.m.hold(false, false)
				p.want(pdu.SCSIResponse)
				p.logout()
				p.neighbour.logout()
				return
			}
			for !p.m.isClosed() {
				if time.Since(p.began) > tt.lasts+91*time.Second {
					t.Fatal("still there")
				}
				p.neighbour.wantStatus(p.neighbour.command(readF, 4096, cdb.Read10(0, 8), nil), lun.StatusGood)
				p.talks()
				time.Sleep(time.Second)
			}
			if d := time.Since(p.began) - tt.lasts; d < 60*time.Second {
				t.Errorf("ended after %v", d)
			}
			if err := p.wait(); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("initiator takes no answers: %d bytes have waited", tt.owed)) ||
				!strings.Contains(err.Error(), "limits.send_timeout is 1m0s") {
				t.Error(err)
			}
			synctest.Wait()
			if s := p.Stats(); s.Sessions != 1 || s.BuffersOut != 0 || p.limits.SendTimeout.State().Bites != 1 {
				t.Errorf("%+v, %d times the limit", s, p.limits.SendTimeout.State().Bites)
			}
			if l := p.log.Lines("session ended"); len(l) != 1 || !strings.Contains(l[0], "initiator takes no answers") || !strings.Contains(l[0], "level=WARN") {
				t.Errorf("log: %q", l)
			}
			p.neighbour.logout()
		})
	}
}

// The limit changes while answers wait.
func TestSendTimeoutChangesLive(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		p := newStalledPair(t, canceling)
		p.limits.SendTimeout.SetMax(int64(time.Hour))
		p.drains(0, 1)
		p.passes(10 * time.Minute)
		p.limits.SendTimeout.SetMax(int64(time.Second))
		began := time.Now()
		if err := p.wait(); err == nil || !strings.Contains(err.Error(), "limits.send_timeout is 1s") {
			t.Error(err)
		}
		if d := time.Since(began); d > 2*lookAtLeast {
			t.Errorf("ended after %v", d)
		}
		p.neighbour.logout()
	})
}
