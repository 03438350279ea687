package limits

import "sync"

// logins counts the connections that have logged in to targets, by the names of their initiators.
type logins struct {
	mu    sync.Mutex // a leaf
	all   int64
	names map[string]int64 // connections of each name
}

// LogIn takes a place for a connection of that initiator name that logs in to a target. It returns
// false, with the limit that is in the way, if the places that are left are kept for others:
//
//   - All but reserved_connections are for everyone.
//   - Half of the reserved ones are for names that have less than an equal share of the others.
//   - The rest is for names that have no connection.
//
// A login that replaces a connection, which has ended, is never refused: replaces says so. LogOut
// gives the place back.
func (s *Set) LogIn(name string, replaces bool) (ok bool, at *Limit) {
	l := &s.logins
	l.mu.Lock()
	defer l.mu.Unlock()
	reserved := s.Reserved.Max()
	open := max(s.Connections.Max()-reserved, 0)
	has := l.names[name]
	switch {
	case replaces, has == 0, l.all < open:
	case l.all >= open+reserved/2, (has+1)*int64(len(l.names)) > open:
		return false, &s.Reserved
	}
	if l.names == nil {
		l.names = map[string]int64{}
	}
	l.names[name]++
	l.all++
	s.Reserved.used.Store(max(l.all-open, 0))
	return true, nil
}

// LogOut gives back the place of a connection of that name.
func (s *Set) LogOut(name string) {
	l := &s.logins
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.names[name]--; l.names[name] <= 0 {
		delete(l.names, name)
	}
	l.all--
	s.Reserved.used.Store(max(l.all-max(s.Connections.Max()-s.Reserved.Max(), 0), 0))
}
