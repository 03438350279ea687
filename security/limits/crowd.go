package limits

import (
	"container/list"
	"net"
	"net/netip"
)

// A Progress says how far a Member has come: the further, the later it yields.
type Progress uint8

// The levels of progress of a connection.
const (
	Silent Progress = iota // the peer has connected, and has shown nothing that only an initiator knows
	Named                  // it has sent a valid first Login Request
	Proved                 // it has authenticated itself

	levels
)

// A Crowd chooses who yields when a place is needed, among the Members that have one but have not
// finished their login. Nobody can use up the places with connections from one address, or with
// connections that make no progress:
//
//   - Each level of progress keeps a quarter of the places. Of the levels that have more, the lowest
//     yields.
//   - Within the level the address with most Members yields. The new one counts, those that have
//     come further do not. If the new one's address has most, without another Member at this level,
//     there is no place for the new one.
//   - Of addresses with the same number, the one whose network (/24, or /48 of IPv6) has most yields.
//   - Of those the one that came first yields.
//
// The zero value is ready. Its methods are not safe for concurrent use.
type Crowd struct {
	groups   []*group // of addresses with Members
	of       map[string]*group
	networks map[string]*tally
	count    tally
	clock    uint64 // counts Add, so that older Members have lower numbers
}

// A tally counts Members by their progress.
type tally [levels]int

// upTo returns how many have come to level p, but no further.
func (t *tally) upTo(p Progress) (n int) {
	for _, of := range t[:p+1] {
		n += of
	}
	return n
}

// A group has the Members of one address.
type group struct {
	key     string
	index   int // in Crowd.groups
	network *tally
	count   tally
	list    [levels]list.List // of *Member, the oldest first
}

// A Member is one of a Crowd.
type Member struct {
	Value any // of the caller

	group    *group // nil: it is not in a Crowd
	level    Progress
	since    uint64
	position *list.Element
}

// In reports whether m is in a Crowd.
func (m *Member) In() bool { return m.group != nil }

// Len returns the number of Members.
func (c *Crowd) Len() int { return c.count.upTo(levels - 1) }

// Add adds a Member of that address.
func (c *Crowd) Add(from net.Addr, m *Member) {
	key := AddressKey(from)
	g := c.of[key]
	if g == nil {
		g = c.newGroup(key)
	}
	c.clock++
	m.group, m.level, m.since = g, Silent, c.clock
	c.enlist(m)
}

func (c *Crowd) newGroup(key string) *group {
	if c.of == nil {
		c.of, c.networks = map[string]*group{}, map[string]*tally{}
	}
	network := networkOf(key)
	if c.networks[network] == nil {
		c.networks[network] = &tally{}
	}
	g := &group{key: key, index: len(c.groups), network: c.networks[network]}
	c.of[key] = g
	c.groups = append(c.groups, g)
	return g
}

func (c *Crowd) enlist(m *Member) {
	c.tell(m, 1)
	m.position = m.group.list[m.level].PushBack(m)
}

func (c *Crowd) delist(m *Member) {
	c.tell(m, -1)
	m.group.list[m.level].Remove(m.position)
}

// tell counts m, or no longer.
func (c *Crowd) tell(m *Member, n int) {
	c.count[m.level] += n
	m.group.count[m.level] += n
	m.group.network[m.level] += n
}

// Advance notes that m has come to level p. It does nothing if m is not in c, or has come further.
func (c *Crowd) Advance(m *Member, p Progress) {
	if !m.In() || p <= m.level {
		return
	}
	c.delist(m)
	m.level = p
	c.enlist(m)
}

// Remove removes m, if it is in c.
func (c *Crowd) Remove(m *Member) {
	g := m.group
	if g == nil {
		return
	}
	c.delist(m)
	m.group = nil
	if g.count != (tally{}) {
		return
	}
	if *g.network == (tally{}) {
		delete(c.networks, networkOf(g.key))
	}
	delete(c.of, g.key)
	last := len(c.groups) - 1
	c.groups[g.index] = c.groups[last]
	c.groups[g.index].index = g.index
	c.groups[last] = nil
	c.groups = c.groups[:last]
}

// Victim returns the Member that yields to a new one from that address. It returns nil if the new
// one has to yield itself, or if there is no Member.
func (c *Crowd) Victim(from net.Addr) *Member {
	n := c.Len() + 1
	for level := Silent; level < levels; level++ {
		count := c.count[level]
		if level == Silent {
			count++ // the new one
		}
		if count > max(1, n/4) {
			return c.busiest(level, AddressKey(from))
		}
	}
	for level := Silent; level < levels; level++ { // there are few
		if c.count[level] > 0 {
			return c.busiest(level, "")
		}
	}
	return nil
}

// VictimOf returns the Member that yields to a new one from the same address, or nil.
func (c *Crowd) VictimOf(from net.Addr) *Member {
	g := c.of[AddressKey(from)]
	if g == nil {
		return nil
	}
	for level := range g.list {
		if e := g.list[level].Front(); e != nil {
			return e.Value.(*Member)
		}
	}
	return nil
}

// busiest returns the oldest Member at that level of the address that has most, if one more is on its
// way from the address key. It returns nil if that is this one.
func (c *Crowd) busiest(level Progress, key string) *Member {
	var victim *Member // nil: the new one
	most, mostNearby := 0, 0
	nearKey := c.networks[networkOf(key)]
	if level == Silent && key != "" && (c.of[key] == nil || c.of[key].count[Silent] == 0) {
		most, mostNearby = 1, 1
		if nearKey != nil {
			mostNearby += nearKey.upTo(level)
		}
	}
	for _, g := range c.groups {
		e := g.list[level].Front()
		if e == nil {
			continue
		}
		count, nearby := g.count.upTo(level), g.network.upTo(level)
		if g.key == key {
			count++
		}
		if g.network == nearKey {
			nearby++
		}
		m := e.Value.(*Member)
		switch {
		case count < most, count == most && nearby < mostNearby:
			continue
		case count == most && nearby == mostNearby && victim != nil && victim.since < m.since:
			continue
		}
		victim, most, mostNearby = m, count, nearby
	}
	return victim
}

// networkOf returns the network of an AddressKey: its /24, or the /48 of IPv6.
func networkOf(key string) string {
	if p, err := netip.ParsePrefix(key); err == nil {
		p, _ = p.Addr().Prefix(48)
		return p.String()
	}
	if ip, err := netip.ParseAddr(key); err == nil {
		p, _ := ip.Prefix(24)
		return p.String()
	}
	return key
}
