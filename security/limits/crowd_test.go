package limits

import (
	"cmp"
	"fmt"
	"net"
	"slices"
	"testing"
	"time"
)

// at returns an address of host h of network n.
func at(n, h int) net.Addr {
	return &net.TCPAddr{IP: net.IPv4(10, byte(n>>8), byte(n), byte(h)), Port: 40000}
}

// A flood is a simulated run of a Crowd: an attacker that connects steadily, and honest hosts that
// log in over a slow network.
type flood struct {
	crowd  Crowd
	places int
	lost   map[*login]bool
	turned int // connections that were turned away
}

// A login is an honest one.
type login struct {
	from   net.Addr
	begins time.Duration
	member Member
	done   bool
}

// connect gives m a place, if the Crowd has one for it.
func (f *flood) connect(from net.Addr, m *Member) bool {
	if f.crowd.Len() == f.places {
		v := f.crowd.Victim(from)
		if v == nil {
			f.turned++
			return false
		}
		f.crowd.Remove(v)
		if l, ok := v.Value.(*login); ok {
			f.lost[l] = true
		}
	}
	f.crowd.Add(from, m)
	return true
}

// An attack says what the attacker does.
type attack struct {
	from  func(i int) net.Addr // of its ith connection
	names bool                 // it also sends a valid first Login Request with each
}

const (
	perSecond  = 10_000
	roundTrip  = 50 * time.Millisecond
	roundTrips = 8
)

// run lets the honest logins happen during the attack, which has gone on for a while.
func (f *flood) run(a attack, honest []*login) {
	f.lost = map[*login]bool{}
	var steps []func()
	var times []time.Duration
	step := func(t time.Duration, do func()) {
		times = append(times, t)
		steps = append(steps, do)
	}
	end := honest[len(honest)-1].begins + (roundTrips+1)*roundTrip
	for i := range int((end + time.Second) * perSecond / time.Second) {
		step(time.Duration(i)*time.Second/perSecond-time.Second, func() {
			from, m := a.from(i), &Member{}
			if f.connect(from, m) && a.names {
				f.crowd.Advance(m, Named)
			}
		})
	}
	for _, l := range honest {
		l.member.Value = l
		step(l.begins, func() { f.lost[l] = !f.connect(l.from, &l.member) })
		for i := range roundTrips {
			step(l.begins+time.Duration(i+1)*roundTrip, func() {
				switch {
				case f.lost[l]:
				case i == roundTrips-1:
					f.crowd.Remove(&l.member)
					l.done = true
				case i == 0: // of iSER: the MPA startup is over, and the first Login Request comes
					f.crowd.Advance(&l.member, Named)
				}
			})
		}
	}
	order := make([]int, len(steps))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(i, j int) int { return cmp.Compare(times[i], times[j]) })
	for _, i := range order {
		steps[i]()
	}
}

// Initiators 50 ms away log in while 900 of 1,024 places are taken by sessions and an attacker opens
// 10,000 connections a second, which are as many as all other places every 12 ms.
func TestSlowLoginsGetInDuringAFlood(t *testing.T) {
	for name, a := range map[string]attack{
		"one address":                        {from: func(int) net.Addr { return at(1, 1) }},
		"one address with names":             {from: func(int) net.Addr { return at(1, 1) }, names: true},
		"100 addresses of a network":         {from: func(i int) net.Addr { return at(1, i%100) }},
		"100 addresses of as many networks":  {from: func(i int) net.Addr { return at(1+i%100, 1) }},
		"100 addresses beside the initiator": {from: func(i int) net.Addr { return at(200, 100+i%100) }},
		"100 addresses with names":           {from: func(i int) net.Addr { return at(1+i%100, 1) }, names: true},
		"1000 addresses of four networks":    {from: func(i int) net.Addr { return at(1+i%4, i/4%250) }},
		"1000 addresses of four, with names": {from: func(i int) net.Addr { return at(1+i%4, i/4%250) }, names: true},
	} {
		t.Run(name, func(t *testing.T) {
			f := flood{places: 1024 - 900}
			var honest []*login
			for i := range 40 {
				from := at(200, i%6) // with names: a host logs in once at a time
				if !a.names {
					from = at(200, i/4%5) // four logins at the same time
				}
				honest = append(honest, &login{from: from, begins: time.Duration(i) * 73 * time.Millisecond})
			}
			f.run(a, honest)
			in := 0
			for _, l := range honest {
				if l.done {
					in++
				}
			}
			if in != len(honest) {
				t.Errorf("%d of %d logins got in", in, len(honest))
			}
		})
	}
}

// An attacker that has as many networks as there are places can turn away a connection that has shown
// nothing, but none that has sent a valid first Login Request.
func TestProgressIsNotLostToSilence(t *testing.T) {
	var c Crowd
	var named []*Member
	for i := range 90 {
		m := &Member{Value: fmt.Sprint("login ", i)}
		c.Add(at(200, i%3), m)
		c.Advance(m, Named)
		named = append(named, m)
	}
	for i := range 34 {
		c.Add(at(i, 1), &Member{})
	}
	for i := range 100_000 {
		from := at(i%60_000, 1)
		if v := c.Victim(from); v != nil {
			c.Remove(v)
			c.Add(from, &Member{})
		}
	}
	for _, m := range named {
		if !m.In() {
			t.Fatalf("%v yielded to a silent connection", m.Value)
		}
	}
}

// Authenticated connections go last. Silent ones also get places while others stall.
func TestLevelsKeepAQuarterEach(t *testing.T) {
	var c Crowd
	add := func(n, h int, p Progress) *Member {
		m := &Member{Value: fmt.Sprint(n, h, p)}
		c.Add(at(n, h), m)
		c.Advance(m, p)
		return m
	}
	proved := add(1, 1, Proved)
	var stalled []*Member
	for h := range 10 {
		stalled = append(stalled, add(2, h, Named))
	}
	silent := add(3, 1, Silent)
	if v := c.Victim(at(4, 1)); v != stalled[0] {
		t.Errorf("%+v yields, want the first that stalls", v)
	}
	c.Remove(stalled[0])
	for h := range 9 {
		add(3, h, Silent)
	}
	if v := c.Victim(at(3, 1)); v != silent {
		t.Errorf("%+v yields, want the first silent one of the busiest address", v)
	}
	for _, m := range stalled {
		c.Remove(m)
	}
	if !proved.In() || c.Len() != 11 {
		t.Errorf("%d are left", c.Len())
	}
}

// The Crowd keeps nothing of those that have gone.
func TestCrowdForgets(t *testing.T) {
	var c Crowd
	var all []*Member
	for i := range 1000 {
		m := &Member{}
		c.Add(at(i%7, i%50), m)
		c.Advance(m, Progress(i%3))
		all = append(all, m)
	}
	if v := c.VictimOf(at(0, 0)); v != all[0] {
		t.Errorf("of an address %+v yields", v)
	}
	for _, m := range all {
		c.Remove(m)
		c.Remove(m) // does nothing
		c.Advance(m, Proved)
	}
	if c.Len() != 0 || len(c.groups) != 0 || len(c.of) != 0 || len(c.networks) != 0 || c.Victim(at(1, 1)) != nil || c.VictimOf(at(1, 1)) != nil {
		t.Errorf("left: %+v", c)
	}
}

func BenchmarkVictim(b *testing.B) {
	var c Crowd
	for i := range 2048 {
		c.Add(at(i, 1), &Member{})
	}
	for i := range b.N {
		from := at(i%4096, 2)
		c.Remove(c.Victim(from))
		c.Add(from, &Member{})
	}
}

// One name gets all but the reserved places. Names with few connections get a half of those, and names
// with none the rest.
func TestPlacesAreKeptForOtherNames(t *testing.T) {
	s := New()
	s.Connections.SetMax(80)
	s.Reserved.SetMax(16)
	in := func(name string, replaces bool) bool {
		ok, _ := s.LogIn(name, replaces)
		return ok
	}
	if !in("host with paths", false) {
		t.Fatal("the first login was refused")
	}
	n := 0
	for in("greedy", false) {
		n++
	}
	if n != 63 || s.Reserved.Used() != 0 {
		t.Errorf("one name got %d of 80 places, with 16 reserved; %d of those are in use", n, s.Reserved.Used())
	}
	for range 3 {
		if !in("host with paths", false) {
			t.Error("the other paths of a host were refused")
		}
	}
	if !in("greedy", true) {
		t.Error("a reinstatement was refused")
	}
	for i := range 12 {
		if name := fmt.Sprint("host ", i); !in(name, false) {
			t.Errorf("%s was refused", name)
		}
	}
	if in("host with paths", false) {
		t.Error("a name with connections got a place that is kept for names without")
	}
	if s.Reserved.Used() != 16 {
		t.Errorf("%d of the reserved places are in use, want 16", s.Reserved.Used())
	}
	for range 64 {
		s.LogOut("greedy")
	}
	for i := range 12 {
		s.LogOut(fmt.Sprint("host ", i))
	}
	for range 4 {
		s.LogOut("host with paths")
	}
	if s.Reserved.Used() != 0 || s.logins.all != 0 || len(s.logins.names) != 0 {
		t.Errorf("left: %d connections of %d names", s.logins.all, len(s.logins.names))
	}
}
