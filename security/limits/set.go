package limits

import (
	"cmp"
	"sync"
	"sync/atomic"
	"time"
)

// A Set has all limits of a process. Its fields are the limits; New gives each its name and its
// default bound.
type Set struct {
	// Places.
	Connections Limit // TCP connections of all portals
	Reserved    Limit // those of them that names with few sessions, or none, get: see LogIn
	PerAddress  Keyed // TCP connections of an address
	PerPortal   Keyed // TCP connections of a portal
	Sessions    Keyed // of an initiator name and CHAP user with a target
	PerUser     Keyed // sessions of a CHAP user
	Discoveries Keyed // discovery sessions of an address
	logins      logins

	OrderTimeout       Limit // of a command that stops those of others and waits for its initiator
	DataTimeout        Limit // of data that the target awaits and of which none comes
	SendTimeout        Limit // of what the target sends and of which the initiator takes nothing
	TaskWait           Limit // of a task for other tasks, until it is reported
	MaxTime2Wait       Limit // DefaultTime2Wait of a session at ErrorRecoveryLevel 2
	MaxTime2Retain     Limit // DefaultTime2Retain that a login agrees on at most
	LostSessions       Limit // sessions without a connection that wait for one
	LostSessionsByName Keyed // of these, of one initiator name

	// Registrations bounds those of PERSISTENT RESERVE OUT that one initiator makes with one LUN. Use is
	// not counted here.
	Registrations Limit

	Tokens       Limit // ROD tokens
	TokensByName Keyed // of these, of one initiator name

	// Memory.
	Memory Limit // that initiators make the target use

	// Calls of stores: see package lun/fair.
	BackendCalls       Limit // under way in the process
	BackendCallsPerLUN Limit // under way at a LUN
	HeavyCommands      Limit // that run at a time

	StateTimeout Limit // of a file of the state directory
	// Time.
	FenceTimeout Limit // from the abort of a command until nobody waits any longer for its store
	StoreTimeout Limit // of one call of a store, until the store counts as hung
	LogLines     Limit // that one address causes in a second, in the long run

	// Descriptors has all file descriptors that are open. Its owner measures the use.
	Descriptors Limit

	observer atomic.Pointer[func(Bite)]
	all      []stater
}

// New returns a Set with the default bounds.
func New() *Set {
	s := &Set{}
	s.limit(&s.Connections, "max_connections", PerProcess, Count, 2048, "TCP connections of all portals")
	s.limit(&s.MaxTime2Wait, "max_time2wait", PerSession, Duration, int64(30*time.Second),
		"DefaultTime2Wait of a session at ErrorRecoveryLevel 2")
	s.limit(&s.MaxTime2Retain, "max_time2retain", PerSession, Duration, int64(20*time.Second),
		"DefaultTime2Retain that a login agrees on at most")
	s.limit(&s.LostSessions, "lost_sessions", PerProcess, Count, 32,
		"sessions without a connection that wait for one")
	s.keyed(&s.LostSessionsByName, "lost_sessions_per_initiator", PerInitiator, Count, 4,
		"the same, of one initiator")
	s.limit(&s.Reserved, "reserved_connections", PerProcess, Count, 256,
		"connections kept for initiator names with few sessions, or none")
	s.keyed(&s.PerAddress, "connections_per_address", PerAddress, Count, 1792, "TCP connections of an address")
	s.keyed(&s.PerPortal, "connections_per_portal", PerPortal, Count, 2048, "TCP connections of a portal")
	s.keyed(&s.Sessions, "sessions_per_initiator", PerInitiator, Count, 16, "sessions of an initiator with a target")
	s.keyed(&s.PerUser, "sessions_per_user", PerUser, Count, 1792, "sessions of a CHAP user")
	s.keyed(&s.Discoveries, "discovery_per_address", PerAddress, Count, 32, "discovery sessions of an address")
	s.limit(&s.OrderTimeout, "order_timeout", PerInitiator, Duration, int64(5*time.Second),
		"time for which a command that waits for its initiator stops those of others")
	s.limit(&s.DataTimeout, "data_timeout", PerConnection, Duration, int64(30*time.Second),
		"time for which data that the target awaits may make no progress")
	s.limit(&s.SendTimeout, "send_timeout", PerConnection, Duration, int64(60*time.Second),
		"time for which an initiator may take nothing of what waits for it")
	s.limit(&s.TaskWait, "task_wait", PerConnection, Duration, int64(30*time.Second),
		"time for which a task waits for other tasks, until that is reported")
	s.limit(&s.Registrations, "registrations_per_initiator", PerInitiator, Count, 32,
		"persistent reservation keys that an initiator registers with a LUN")
	s.limit(&s.Tokens, "tokens", PerProcess, Count, 2048, "ROD tokens of POPULATE TOKEN that are valid")
	s.keyed(&s.TokensByName, "tokens_per_initiator", PerInitiator, Count, 512, "the same, of one initiator")
	s.Memory.auto = defaultMemory(machine())
	s.limit(&s.Memory, "memory", PerProcess, Bytes, 0, "memory that initiators make the target use")
	s.callLimits()
	s.limit(&s.StateTimeout, "state_timeout", PerProcess, Duration, int64(10*time.Second),
		"time in which state_dir stores a change")
	s.limit(&s.FenceTimeout, "fence_timeout", PerProcess, Duration, int64(time.Second),
		"time that an aborted command may take to leave its store")
	s.limit(&s.StoreTimeout, "store_timeout", PerLUN, Duration, int64(10*time.Second),
		"time of one call of a store, until the store counts as hung")
	s.Descriptors.auto = cmp.Or(machine().Files.N, 1<<30)
	s.limit(&s.Descriptors, "descriptors", PerProcess, Count, 0, "file descriptors: LUNs, connections, state, control")
	s.limit(&s.LogLines, "log_lines_per_address", PerAddress, PerSecond, 10, "lines of log that an address causes per second")
	return s
}

// limit makes l a limit of s.
func (s *Set) limit(l *Limit, name string, scope Scope, unit Unit, max int64, help string) {
	l.set, l.name, l.scope, l.unit, l.help = s, name, scope, unit, help
	l.SetMax(max)
	s.all = append(s.all, l)
}

// keyed makes k a limit of s with a count for each key of the scope.
func (s *Set) keyed(k *Keyed, name string, scope Scope, unit Unit, max int64, help string) {
	s.limit(&k.Limit, name, scope, unit, max, help)
	s.all[len(s.all)-1] = k
}

// machine is ThisMachine, read once.
var machine = sync.OnceValue(ThisMachine)

// leastMemory is the default bound of memory on the smallest machine: some connections need that.
const leastMemory = 32 << 20

// defaultMemory returns the bound of memory for m: a quarter of what the process may have. LUNs in
// memory, the page cache and other programs need the rest.
func defaultMemory(m Machine) int64 {
	if m.Memory.N == 0 {
		return 1 << 30
	}
	return max(m.Memory.N/4, leastMemory)
}
