package lun

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/lun/state/hometest"
)

// A prModel is what SPC-4 says about the reservations of a unit, in the simplest form.
type prModel struct {
	keys       map[string]uint64 // of the registered nexuses
	typ        byte
	holder     string // "" if all registrants hold the reservation
	generation uint32
	due        map[string]string // attentions of each nexus, as due says
}

func (m prModel) clone() prModel {
	m.keys, m.due = maps.Clone(m.keys), maps.Clone(m.due)
	return m
}

// String returns what sharedGateway.has does.
func (m *prModel) String() string {
	list := []string{fmt.Sprintf("%d@%d", m.typ, m.generation)}
	for _, n := range slices.Sorted(maps.Keys(m.keys)) {
		list = append(list, fmt.Sprintf("%s=%x%s", n, m.keys[n], map[bool]string{true: "*"}[m.holds(n)]))
	}
	return strings.Join(list, " ")
}

func (m *prModel) all() bool         { return m.typ == 7 || m.typ == 8 }
func (m *prModel) registrants() bool { return m.typ >= 5 }

func (m *prModel) holds(n string) bool {
	if m.all() {
		return m.keys[n] != 0
	}
	return m.typ != 0 && m.holder == n
}

// tell makes an attention due for all registered nexuses except by.
func (m *prModel) tell(attention, by string) {
	for n := range m.keys {
		m.tellOne(n, attention, by)
	}
}

func (m *prModel) tellOne(n, attention, by string) {
	if n == by {
		return
	}
	all := strings.Fields(m.due[n])
	if !slices.Contains(all, attention) {
		all = append(all, attention)
	}
	slices.Sort(all)
	m.due[n] = strings.Join(all, " ")
}

// take takes away an attention that is due, and reports whether it was.
func (m *prModel) take(n, attention string) bool {
	all := strings.Fields(m.due[n])
	i := slices.Index(all, attention)
	if i >= 0 {
		m.due[n] = strings.Join(slices.Delete(all, i, i+1), " ")
	}
	return i >= 0
}

// remove takes a registration away, and the reservation with its last holder.
func (m *prModel) remove(n string) {
	delete(m.keys, n)
	if m.all() && len(m.keys) == 0 || !m.all() && m.holder == n {
		m.typ, m.holder = 0, ""
	}
}

func (m *prModel) reserve(by string, typ byte) {
	m.typ, m.holder = typ, by
	if m.all() {
		m.holder = ""
	}
}

// A prStep is a PERSISTENT RESERVE OUT of a nexus.
type prStep struct {
	by         string
	sa, typ    byte
	key, saKey uint64
}

// What a step ends with.
const (
	stepGood     = "GOOD"
	stepConflict = "RESERVATION CONFLICT"
	stepRelease  = "26/04"
	stepList     = "26/00"
)

// do makes a step, and returns what it ends with.
func (m *prModel) do(s prStep) string {
	own := m.keys[s.by]
	switch {
	case s.sa == prRegisterAndIgnore:
	case s.sa == prRegister:
		if own != s.key {
			return stepConflict
		}
	case own == 0 || own != s.key:
		return stepConflict
	}
	switch s.sa {
	case prRegister, prRegisterAndIgnore:
		m.generation++
		if s.saKey != 0 {
			m.keys[s.by] = s.saKey
		} else if own != 0 {
			was := m.registrants()
			if m.remove(s.by); m.typ == 0 && was {
				m.tell("2a/04", s.by)
			}
		}
	case prReserve:
		if m.typ == 0 {
			m.reserve(s.by, s.typ)
		} else if !m.holds(s.by) || m.typ != s.typ {
			return stepConflict
		}
	case prRelease:
		switch {
		case !m.holds(s.by):
		case m.typ != s.typ:
			return stepRelease
		default:
			if m.registrants() {
				m.tell("2a/04", s.by)
			}
			m.typ, m.holder = 0, ""
		}
	case prClear:
		m.tell("2a/03", s.by)
		m.keys, m.typ, m.holder = map[string]uint64{}, 0, ""
		m.generation++
	case prPreempt, prPreemptAndAbort:
		return m.preempt(s)
	}
	return stepGood
}

func (m *prModel) preempt(s prStep) string {
	if s.saKey == 0 && m.typ != 0 && !m.all() {
		return stepList
	}
	var victims []string
	takeOver := m.all() && s.saKey == 0
	for n, key := range m.keys {
		if key == s.saKey {
			victims = append(victims, n)
			takeOver = takeOver || !m.all() && m.holds(n)
		}
	}
	switch {
	case takeOver:
		was := m.typ
		if s.saKey == 0 {
			victims = slices.Collect(maps.Keys(m.keys))
		}
		for _, n := range victims {
			if n != s.by {
				delete(m.keys, n)
				m.tellOne(n, "2a/05", s.by)
			}
		}
		if m.reserve(s.by, s.typ); was != s.typ {
			m.tell("2a/04", s.by)
		}
	case len(victims) == 0:
		return stepConflict
	default:
		for _, n := range victims {
			m.remove(n)
			m.tellOne(n, "2a/05", s.by)
		}
	}
	m.generation++
	return stepGood
}

// outcome returns what a command has ended with, in the words of the model.
func outcome(res result) string {
	switch {
	case res.status == StatusGood:
		return stepGood
	case res.status == statusReservationConflict:
		return stepConflict
	case res.status == StatusCheckCondition:
		return fmt.Sprintf("%02x/%02x", res.sense[12], res.sense[13])
	}
	return fmt.Sprintf("status %#x", res.status)
}

// 1,000 random steps through two gateways, whose ways to the home are slow, lose answers, and are cut for a time, have the results
// and leave the reservations and unit attentions of the model on both. When two steps come at the same moment, they have the results of one
// of their orders.
func TestSharedModel(t *testing.T) {
	for seed := range uint64(3) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) { testSharedModel(t, seed) })
	}
}

func testSharedModel(t *testing.T, seed uint64) {
	sharedBubbleOf(t, seed, "xy", func(t *testing.T, gr *sharedGroup, g []*sharedGateway) {
		const steps = 1000
		rng := rand.New(rand.NewPCG(seed, 0))
		nexuses := map[string]*Nexus{}
		names := []string{"a1", "b1", "a2", "c2"}
		for i, name := range names {
			nexuses[name] = g[i/2].enter(name[:1])
		}
		model := prModel{keys: map[string]uint64{}, due: map[string]string{}}
		actions := []byte{prRegister, prRegisterAndIgnore, prReserve, prReserve, prReserve, prRelease, prClear, prPreempt, prPreempt, prPreempt, prPreemptAndAbort}
		random := func(by string) prStep {
			s := prStep{by: by, typ: types[rng.IntN(len(types))], key: model.keys[by], saKey: rng.Uint64N(4)}
			s.sa = actions[rng.IntN(len(actions))]
			if rng.IntN(8) == 0 {
				s.key = rng.Uint64N(4)
			}
			switch {
			case s.key == 0:
				s.sa, s.saKey = prRegister, 1+rng.Uint64N(3)
			case model.typ != 0 && rng.IntN(4) > 0 && (s.sa == prRelease || s.sa == prReserve):
				s.typ = model.typ
			}
			return s
		}
		begin := func(s prStep) *pending { return beginOut(nexuses[s.by], s.sa, s.typ, s.key, s.saKey) }
		matches := func(m *prModel, got map[string]string) error {
			for _, g := range g {
				if g.has() != m.String() {
					return fmt.Errorf("gateway %s has %s, want %s", g.name, g.has(), m)
				}
			}
			for _, n := range names {
				if got[n] != m.due[n] {
					return fmt.Errorf("for %s %q is due, want %q", n, got[n], m.due[n])
				}
			}
			return nil
		}
		counts, cut := map[string]int{}, map[*hometest.Link]time.Time{}
		for i := 0; i < steps; {
			switch rng.IntN(12) {
			case 0:
				l := g[rng.IntN(2)].link
				if time.Since(cut[l]) < sharedTTL { // else it might lose its lease
					break
				}
				cut[l] = time.Now()
				l.Cut(true)
				time.AfterFunc(time.Duration(rng.IntN(2000))*time.Millisecond, func() { l.Cut(false) })
			case 1:
				g[rng.IntN(2)].link.Lose(sharedRecordKey+testIdentity.Serial, 1)
			case 2:
				g[rng.IntN(2)].link.Slow(time.Duration(rng.IntN(50)) * time.Millisecond)
			}
			list := []prStep{random(names[rng.IntN(2)])}
			if second := random(names[2+rng.IntN(2)]); rng.IntN(2) == 0 {
				list = append(list, second)
			} else if rng.IntN(2) == 0 {
				list[0] = second
			}
			var running []*pending
			for _, s := range list {
				running = append(running, begin(s))
			}
			var got []string
			for _, p := range running {
				<-p.done
				got = append(got, outcome(p.res))
			}
			told := map[string]string{}
			for _, n := range names {
				told[n] = due(nexuses[n])
			}
			first, second := model.clone(), model.clone()
			var want, swapped []string
			for i, s := range list {
				if i == 1 && first.take(s.by, got[1]) { // the first was so fast that the second met what it told
					want = append(want, got[1])
					counts["an attention"]++
				} else {
					want = append(want, first.do(s))
				}
			}
			for _, s := range slices.Backward(list) {
				swapped = append([]string{second.do(s)}, swapped...)
			}
			errs := []error{matches(&first, told), matches(&second, told)}
			if !slices.Equal(want, swapped) || first.String() != second.String() || !maps.Equal(first.due, second.due) {
				counts["the order counts"]++
			}
			switch {
			case slices.Equal(got, want) && errs[0] == nil:
				model = first
			case slices.Equal(got, swapped) && errs[1] == nil:
				model = second
				counts["the second came first"]++
			default:
				t.Fatalf("steps %d: %+v ended with %q, before: %s\nin this order want %q: %v\nin the other one want %q: %v", i, list, got, &model, want, errs[0], swapped, errs[1])
			}
			clear(model.due)
			for j, s := range list {
				counts[fmt.Sprintf("%s %s", prOuts[s.sa].name, got[j])]++
			}
			i += len(list)
		}
		t.Logf("ended with: %v", counts)
		for _, row := range []byte{prRegister, prRegisterAndIgnore, prReserve, prRelease, prClear, prPreempt, prPreemptAndAbort} {
			if counts[prOuts[row].name+" "+stepGood] < 10 {
				t.Errorf("%s was GOOD %d times only", prOuts[row].name, counts[prOuts[row].name+" "+stepGood])
			}
		}
		if n, all := counts["the second came first"], counts["the order counts"]; n < 10 || all-n < 10 {
			t.Errorf("of %d pairs whose order counts, the second came first in %d", all, n)
		}
	})
}

// Three gateways lose their ways to the home for longer than their leases, lose leases and answers, and take time to end commands. No command
// takes longer than its limit, and in the end all have the same reservations.
func TestSharedOutages(t *testing.T) {
	good := 0
	for seed := range uint64(10) {
		sharedBubbleOf(t, seed, "xyz", func(t *testing.T, gr *sharedGroup, g []*sharedGateway) {
			gr.limit = 8 * time.Second
			rng := rand.New(rand.NewPCG(seed, 0))
			var nexuses []*Nexus
			for i, name := range []string{"a", "b", "c", "d", "e", "f"} {
				n := g[i/2].enter(name)
				n.OnPreempt(func([8]byte, *Command) { time.Sleep(30 * time.Millisecond) })
				nexuses = append(nexuses, n)
			}
			actions := []byte{prRegisterAndIgnore, prRegisterAndIgnore, prReserve, prRelease, prClear, prPreempt, prPreemptAndAbort}
			for range 100 {
				if rng.IntN(6) == 0 {
					l := g[rng.IntN(3)].link
					l.Cut(true)
					time.AfterFunc(time.Duration(rng.IntN(12000))*time.Millisecond, func() { l.Cut(false) })
				}
				if rng.IntN(10) == 0 {
					g[rng.IntN(3)].link.Lose(sharedRecordKey+testIdentity.Serial, 1)
				}
				if rng.IntN(20) == 0 {
					g[rng.IntN(3)].link.ExpireLeases()
				}
				var running []*pending
				for range 1 + rng.IntN(4) {
					i := rng.IntN(len(nexuses))
					due(nexuses[i])
					running = append(running, beginOut(nexuses[i], actions[rng.IntN(len(actions))], types[rng.IntN(len(types))], uint64(i+1), 1+rng.Uint64N(6)))
				}
				for _, p := range running {
					<-p.done
					if p.ended > gr.limit+time.Second {
						t.Errorf("seed %d: a command took %v", seed, p.ended)
					}
					if p.res.status == StatusGood {
						good++
					}
				}
			}
			for _, g := range g {
				g.link.Cut(false)
			}
			time.Sleep(15 * time.Second) // cuts that are still to end
			for _, g := range g {
				g.join(g.unit)
			}
			due(nexuses[0])
			gr.ok(nexuses[0], prRegisterAndIgnore, 0, 0, 9)
			for _, g := range g {
				g.want(gr.all[0].has())
				if a := g.unit.group.applied(); len(a.Pending) > 0 {
					t.Errorf("seed %d: gateway %s has not applied %v", seed, g.name, a.Pending)
				}
			}
		})
	}
	if good < 200 {
		t.Errorf("%d commands only were GOOD", good)
	}
}
