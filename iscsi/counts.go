package iscsi

import (
	"maps"
	"sync"

	"github.com/iser-target/iser-target/lun"
)

// A LoginOutcome is what became of a connection attempt. There are few different
// ones: initiators choose none of the words.
type LoginOutcome struct {
	Transport string // "iser" or "tcp", when that was decided
	Accepted  bool
	Stage     string // where login was: "before login", a login stage, or "mpa"
	Status    string // what the initiator was told of a refusal; empty: nothing
}

// loginCounts count outcomes. Its zero value is ready.
type loginCounts struct {
	mu sync.Mutex
	of map[LoginOutcome]uint64
}

func (l *loginCounts) count(o LoginOutcome) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.of == nil {
		l.of = map[LoginOutcome]uint64{}
	}
	l.of[o]++
}

// Logins counts connection attempts by their outcome, since the start.
func (nd *Node) Logins() map[LoginOutcome]uint64 {
	nd.logins.mu.Lock()
	defer nd.logins.mu.Unlock()
	return maps.Clone(nd.logins.of)
}

// A TargetInfo is a target at one time.
type TargetInfo struct {
	Name string // normalised
	LUNs *lun.Inventory
}

// Targets are all targets, ascending by name.
func (nd *Node) Targets() []TargetInfo {
	nd.mu.Lock()
	defer nd.mu.Unlock()
	list := make([]TargetInfo, len(nd.targets))
	for i, t := range nd.targets {
		list[i] = TargetInfo{t.Name, t.LUNs}
	}
	return list
}

// Memory is how many octets of data buffers the connections have in use, and how
// many they may have.
func (nd *Node) Memory() (used, limit int64) {
	nd.mu.Lock()
	defer nd.mu.Unlock()
	for c := range nd.conns {
		limit += int64(c.opt.ConnectionMemory)
	}
	return nd.buffers.octets.Load(), limit
}
