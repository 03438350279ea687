package limits

import (
	"net"
	"sync"
	"testing"
	"time"
)

func TestTakeStaysWithinTheBound(t *testing.T) {
	s := New()
	l := &s.Connections
	l.SetMax(3)
	var wg sync.WaitGroup
	var took [8]bool
	for i := range took {
		wg.Go(func() { took[i] = l.Take(1) })
	}
	wg.Wait()
	n := 0
	for _, ok := range took {
		if ok {
			n++
		}
	}
	if n != 3 || l.Used() != 3 {
		t.Errorf("%d of 8 took a place, %d in use; want 3 and 3", n, l.Used())
	}
	l.SetMax(1) // what is in use stays
	if l.Take(1) || l.Used() != 3 {
		t.Errorf("took a fourth place, or lost one: %d in use", l.Used())
	}
	l.Give(3)
	if !l.Take(1) {
		t.Error("no place after all were given back")
	}
}

func TestEachKeyHasItsOwnBound(t *testing.T) {
	s := New()
	k := &Keyed{}
	s.keyed(k, "places", PerAddress, Count, 2, "places")
	for _, key := range []string{"a", "a", "b"} {
		if !k.Take(key, 1) {
			t.Fatalf("%s: refused within the bound", key)
		}
	}
	if k.Take("a", 1) {
		t.Error("a took three of two places")
	}
	if by, used := k.Most(), k.Used(); by != "a" || used != 2 {
		t.Errorf("%s uses most, %d; want a, 2", by, used)
	}
	k.Give("a", 2)
	if by, used := k.Most(), k.Used(); by != "b" || used != 1 {
		t.Errorf("%s uses most, %d; want b, 1", by, used)
	}
	k.Give("b", 1)
	if len(k.uses) != 0 || k.Used() != 0 {
		t.Errorf("%d keys and %d places are left", len(k.uses), k.Used())
	}
	if st := s.State(); st[len(st)-1].Name != "places" || st[len(st)-1].By != "" {
		t.Errorf("state: %+v", st)
	}
}

// The first bite is news, and the first one after a quiet minute.
func TestBiteIsNewsOnce(t *testing.T) {
	s := New()
	var news []Bite
	s.Observe(func(b Bite) { news = append(news, b) })
	l := &s.Connections
	l.Bite("192.0.2.1")
	l.Bite("192.0.2.2")
	if len(news) != 1 || news[0].Who != "192.0.2.1" || news[0].Limit != l {
		t.Fatalf("news: %+v", news)
	}
	l.last.Store(time.Now().Add(-2 * quiet).UnixNano())
	l.Bite("192.0.2.3")
	if len(news) != 2 || l.State().Bites != 3 {
		t.Errorf("%d news, %d bites; want 2 and 3", len(news), l.State().Bites)
	}
}

func TestApply(t *testing.T) {
	s := New()
	s.Apply(map[string]int64{"max_connections": 7, "queue_depth": 128})
	if n := s.Connections.Max(); n != 7 {
		t.Errorf("max_connections is %d, want 7", n)
	}
	if got := s.Connections.String(); got != "limits.max_connections is 7" {
		t.Error(got)
	}
}

func TestAddressKey(t *testing.T) {
	for _, tc := range []struct{ addr, key string }{
		{"192.0.2.1:3260", "192.0.2.1"},
		{"[::ffff:192.0.2.1]:3260", "192.0.2.1"},
		{"[2001:db8:1:2:3:4:5:6]:3260", "2001:db8:1:2::/64"},
		{"[fe80::1%eth0]:3260", "fe80::/64"},
	} {
		a, err := net.ResolveTCPAddr("tcp", tc.addr)
		if err != nil {
			t.Fatal(err)
		}
		if got := AddressKey(a); got != tc.key {
			t.Errorf("AddressKey(%s) = %s, want %s", tc.addr, got, tc.key)
		}
	}
	if got := AddressKey(&net.UnixAddr{Name: "/run/x"}); got != "/run/x" {
		t.Errorf("a Unix address has the key %s", got)
	}
}
