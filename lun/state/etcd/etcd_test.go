package etcd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/lun/state/hometest"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/etcdserver"
)

// open opens a home, for the time of the test.
func open(t *testing.T, c Config) *Home {
	t.Helper()
	if c.Prefix == "" {
		c.Prefix = "/test"
	}
	if c.Timeout == 0 {
		c.Timeout = testkit.Patience
	}
	h, err := Open(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.Close() })
	return h
}

// raw returns etcd's own client.
func raw(t *testing.T, endpoints ...string) *clientv3.Client {
	t.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: endpoints, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func put(t *testing.T, h state.Home, key, text string, base state.Revision) state.Revision {
	t.Helper()
	r, err := h.Put(t.Context(), key, []byte(text), base)
	if err != nil {
		t.Fatalf("Put %s: %v", key, err)
	}
	return r
}

func want(t *testing.T, h state.Home, key, text string, r state.Revision) {
	t.Helper()
	v, err := h.Get(t.Context(), key)
	if err != nil || string(v.Data) != text || v.Revision != r {
		t.Fatalf("Get %s = %q, revision %d, %v; want %q, revision %d", key, v.Data, v.Revision, err, text, r)
	}
}

func TestHome(t *testing.T) {
	members := etcdserver.Start(t, 1)
	n := 0
	place := func(t *testing.T) func() state.Home {
		n++
		prefix := fmt.Sprintf("/test/%d", n) // the homes are each other's neighbors
		return func() state.Home {
			return open(t, Config{Endpoints: etcdserver.Endpoints(members), Prefix: prefix})
		}
	}
	hometest.Run(t, place)
	t.Run("leases", func(t *testing.T) { hometest.RunLessor(t, place) })
}

func TestCheck(t *testing.T) {
	for _, tc := range []struct {
		c    Config
		want string
	}{
		{Config{Prefix: "/a"}, "no endpoint of etcd is named"},
		{Config{Prefix: "/a", Endpoints: []string{"127.0.0.1:2379"}}, "first path segment"},
		{Config{Prefix: "/a", Endpoints: []string{"http://localhost"}}, "want http://HOST:PORT"},
		{Config{Prefix: "/a", Endpoints: []string{"ftp://localhost:1"}}, "want http://HOST:PORT"},
		{Config{Prefix: "/a", Endpoints: []string{"http://a:1/b"}}, "want http://HOST:PORT"},
		{Config{Prefix: "/a", Endpoints: []string{"http://a:1", "https://b:1"}}, "the other endpoints are http"},
		{Config{Prefix: "//", Endpoints: []string{"http://a:1"}}, "a name is required"},
		{Config{Prefix: "/a", Endpoints: []string{"http://a:1"}, User: "u"}, "require each other"},
		{Config{Prefix: "/a", Endpoints: []string{"http://a:1"}, Timeout: -1}, "is negative"},
	} {
		if _, err := Open(tc.c); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("Open %+v = %v, want %q", tc.c, err, tc.want)
		}
	}
}

// A home refuses what etcd would refuse or could not tell apart, and stores what is just below the limit.
func TestLimits(t *testing.T) {
	h := open(t, Config{Endpoints: etcdserver.Endpoints(etcdserver.Start(t, 1))})
	if _, err := h.Put(t.Context(), "a", make([]byte, MaxValue+1), 0); err == nil || !strings.Contains(err.Error(), "limit of 1433600") {
		t.Errorf("a long value: %v", err)
	}
	if _, err := h.Put(t.Context(), "a", make([]byte, MaxValue), 0); err != nil {
		t.Errorf("the longest value: %v", err)
	}
	if _, err := h.Put(t.Context(), "", []byte("x"), 0); err == nil || !strings.Contains(err.Error(), "1 to 4096") {
		t.Errorf("an empty key: %v", err)
	}
	r, err := h.Put(t.Context(), "empty", []byte{}, 0)
	if v, err2 := h.Get(t.Context(), "empty"); err != nil || err2 != nil || v.Data == nil || len(v.Data) != 0 || v.Revision != r {
		t.Errorf("an empty value is %v, %v, %v", v, err, err2)
	}
	for i := range 3*page + 1 {
		put(t, h, fmt.Sprintf("many/%04d", i), "x", 0)
	}
	if list, err := h.List(t.Context(), "many/"); err != nil || len(list) != 3*page+1 || list[2*page].Key != fmt.Sprintf("many/%04d", 2*page) {
		t.Errorf("List has %d values, %v", len(list), err)
	}
}

// Nothing of a home is left after Close, which ends its calls.
func TestClose(t *testing.T) {
	members := etcdserver.Start(t, 1)
	h := open(t, Config{Endpoints: etcdserver.Endpoints(members)})
	put(t, h, "a", "one", 0)
	values, err := h.Watch(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	members[0].Freeze()
	failed := make(chan error)
	go func() {
		_, err := h.Get(t.Context(), "a")
		failed <- err
	}()
	testkit.Eventually(t, "a call is in progress", func() bool { return strings.Contains(testkit.Stacks(), "etcd.(*Home).Get(") })
	if err := h.Close(); err != nil {
		t.Error(err)
	}
	if err := <-failed; err == nil || !strings.Contains(err.Error(), "closed") {
		t.Errorf("the call ended with %v", err)
	}
	if v, ok := <-values; ok {
		t.Errorf("the watch has %v after Close", v)
	}
	testkit.Eventually(t, "no goroutine is left", func() bool {
		s := testkit.Stacks()
		return !strings.Contains(s, "google.golang.org/grpc") && !strings.Contains(s, "go.etcd.io/etcd/client")
	})
}

// What feed keeps for a reader that does not read is bounded by the number of keys.
func TestFeed(t *testing.T) {
	in, out := make(chan state.Value), make(chan state.Value)
	go feed(t.Context(), in, out)
	for i := range 300 {
		in <- state.Value{Key: fmt.Sprint(i % 3), Revision: state.Revision(i + 1)}
	}
	for i := range 3 {
		if v := <-out; v.Key != fmt.Sprint(i) || v.Revision != state.Revision(298+i) {
			t.Errorf("value %d is %v", i, v)
		}
	}
	in <- state.Value{Key: "0"}
	if v := <-out; v.Key != "0" || v.Revision != 0 {
		t.Errorf("the removal is %v", v)
	}
	close(in)
}

// A proxy passes connections on to etcd.
type proxy struct {
	net.Listener
	to string

	mu    sync.Mutex
	cut   bool
	conns map[net.Conn]bool
	sent  bytes.Buffer // to etcd
}

func newProxy(t *testing.T, endpoint string) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{Listener: l, to: strings.TrimPrefix(endpoint, "http://"), conns: map[net.Conn]bool{}}
	t.Cleanup(func() {
		l.Close()
		p.set(true)
	})
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go p.pass(c)
		}
	}()
	return p
}

func (p *proxy) endpoint() string { return "http://" + p.Addr().String() }

// Write notes what was sent to etcd.
func (p *proxy) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.sent.Write(b)
}

// has reports whether text was sent to etcd.
func (p *proxy) has(text string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return bytes.Contains(p.sent.Bytes(), []byte(text))
}

func (p *proxy) pass(c net.Conn) {
	defer c.Close()
	to, err := net.Dial("tcp", p.to)
	if err != nil {
		return
	}
	defer to.Close()
	p.mu.Lock()
	cut := p.cut
	p.conns[c], p.conns[to] = true, true
	p.mu.Unlock()
	if cut {
		return
	}
	go func() {
		io.Copy(c, to)
		c.Close()
	}()
	io.Copy(io.MultiWriter(to, p), c)
}

// set cuts all connections, or lets new ones through.
func (p *proxy) set(cut bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = cut
	for c := range p.conns {
		c.Close()
	}
	clear(p.conns)
}

// An etcd that is frozen costs its callers their time. A Put that was sent is unsure, and after the next Get it cannot
// be stored any longer. Other homes keep their values.
func TestFrozen(t *testing.T) {
	members := etcdserver.Start(t, 1)
	h := open(t, Config{Endpoints: etcdserver.Endpoints(members), Timeout: time.Second})
	patient := open(t, Config{Endpoints: etcdserver.Endpoints(members)})
	neighbor := open(t, Config{Endpoints: etcdserver.Endpoints(members), Prefix: "/test2"})
	dir := state.OpenDirectory(t.TempDir(), nil)
	defer dir.Close()
	r := put(t, patient, "a", "one", 0)
	rn := put(t, neighbor, "a", "mine", 0)
	want(t, patient, "a", "one", r)
	// h has its connection, so that the Put below is sent.
	testkit.Eventually(t, "h answers", func() bool { _, err := h.Get(t.Context(), "a"); return err == nil })

	members[0].Freeze()
	_, err := h.Put(t.Context(), "a", []byte("two"), r)
	if !errors.Is(err, state.ErrUnsure) || !errors.Is(err, state.ErrUnreachable) || !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, state.ErrConflict) {
		t.Errorf("Put = %v, want ErrUnsure", err)
	}
	_, get := h.Get(t.Context(), "b")
	_, list := h.List(t.Context(), "b")
	_, watch := h.Watch(t.Context(), "b")
	for _, err := range []error{get, list, watch} {
		if !errors.Is(err, state.ErrUnreachable) || errors.Is(err, state.ErrUnsure) || !strings.Contains(err.Error(), members[0].Endpoint()) {
			t.Errorf("the error is %v, want ErrUnreachable with the endpoint", err)
		}
	}
	put(t, dir, "a", "a directory is not disturbed", 0)
	members[0].Thaw()

	var v state.Value
	testkit.Eventually(t, "Get answers again", func() bool { v, err = h.Get(t.Context(), "a"); return err == nil })
	if text := string(v.Data); (text != "one" || v.Revision != r) && (text != "two" || v.Revision == r) {
		t.Errorf("Get = %q, revision %d; the old one was %d", text, v.Revision, r)
	}
	// The same Put arrives late.
	c := raw(t, members[0].Endpoint())
	resp, err := c.Txn(t.Context()).If(clientv3.Compare(clientv3.ModRevision(h.values+"a"), "=", int64(v.Revision)), clientv3.Compare(clientv3.ModRevision(h.fenceKey), "=", 0)).
		Then(clientv3.OpPut(h.values+"a", "late")).Commit()
	if err != nil || resp.Succeeded {
		t.Errorf("a late Put is stored, %v", err)
	}
	want(t, patient, "a", string(v.Data), v.Revision)
	r2 := put(t, patient, "a", "three", v.Revision)
	want(t, patient, "a", "three", r2)
	want(t, neighbor, "a", "mine", rn)
	if list, err := patient.List(t.Context(), ""); err != nil || len(list) != 1 {
		t.Errorf("List shows %v, %v", list, err)
	}

	// The fence's lease has ended, which only costs another one.
	if h.lease == 0 {
		t.Fatal("the fence has no lease")
	}
	if _, err := c.Revoke(t.Context(), h.lease); err != nil {
		t.Fatal(err)
	}
	h.timeout = testkit.Patience
	fence := h.fence
	r3 := put(t, h, "a", "four", r2)
	want(t, h, "a", "four", r3)
	if h.fence == fence || fence == 0 {
		t.Errorf("the fence is %d after %d", h.fence, fence)
	}
}

// An etcd that is killed in a Put leaves it unsure at once. While it is away, nothing is sent and nothing unsure.
func TestKilled(t *testing.T) {
	members := etcdserver.Start(t, 1)
	p := newProxy(t, members[0].Endpoint())
	h := open(t, Config{Endpoints: []string{p.endpoint()}})
	r := put(t, h, "a", "one", 0)
	members[0].Freeze()
	failed := make(chan error)
	go func() {
		_, err := h.Put(t.Context(), "a", []byte("in a killed process"), r)
		failed <- err
	}()
	testkit.Eventually(t, "the Put is sent", func() bool { return p.has("in a killed process") })
	members[0].Kill()
	if err := <-failed; !errors.Is(err, state.ErrUnsure) || !errors.Is(err, state.ErrUnreachable) {
		t.Errorf("Put = %v, want ErrUnsure", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := h.Put(ctx, "b", []byte("not sent"), 0); errors.Is(err, state.ErrUnsure) || !errors.Is(err, state.ErrUnreachable) {
		t.Errorf("Put while nobody listens = %v, want ErrUnreachable only", err)
	}
	members[0].Start()
	v, err := h.Get(t.Context(), "a")
	if err != nil || string(v.Data) != "one" || v.Revision != r {
		t.Errorf("Get = %q, revision %d, %v", v.Data, v.Revision, err)
	}
	want(t, h, "b", "", 0)
	want(t, h, "a", "two", put(t, h, "a", "two", r))
}

// A watch that etcd has compacted what it missed still reports the last values and the removals.
func TestCompaction(t *testing.T) {
	members := etcdserver.Start(t, 1)
	p := newProxy(t, members[0].Endpoint())
	h := open(t, Config{Endpoints: []string{p.endpoint()}})
	other := open(t, Config{Endpoints: etcdserver.Endpoints(members)})
	c := raw(t, members[0].Endpoint())
	changed := put(t, other, "x.changed", "0", 0)
	removed := put(t, other, "x.removed", "0", 0)
	again := put(t, other, "x.again", "0", 0)
	put(t, other, "x.kept", "0", 0)
	values, err := h.Watch(t.Context(), "x.")
	if err != nil {
		t.Fatal(err)
	}
	changed = put(t, other, "x.changed", "1", changed)
	if v := <-values; v.Key != "x.changed" || v.Revision != changed {
		t.Fatalf("the watch has %v", v)
	}
	p.set(true)
	for i := range 10 {
		changed = put(t, other, "x.changed", fmt.Sprint(i), changed)
	}
	if _, err := other.Put(t.Context(), "x.removed", nil, removed); err != nil {
		t.Fatal(err)
	}
	if _, err := other.Put(t.Context(), "x.again", nil, again); err != nil {
		t.Fatal(err)
	}
	again = put(t, other, "x.again", "back", 0)
	created := put(t, other, "x.created", "new", 0)
	put(t, other, "y", "of another prefix", 0)
	if _, err := c.Compact(t.Context(), int64(created)); err != nil {
		t.Fatal(err)
	}
	p.set(false)
	got := map[string]state.Value{}
	for len(got) < 4 {
		v := <-values
		got[v.Key] = v
	}
	for key, r := range map[string]state.Revision{"x.changed": changed, "x.removed": 0, "x.again": again, "x.created": created} {
		if v, ok := got[key]; !ok || v.Revision != r || (v.Data == nil) != (r == 0) {
			t.Errorf("the watch has %v of %s, want revision %d", v, key, r)
		}
	}
	created = put(t, other, "x.created", "after", created)
	if v := <-values; v.Key != "x.created" || v.Revision != created {
		t.Errorf("after the compaction the watch has %v", v)
	}
}

// Of three members one may be lost, the leader included: no answered Put is. Without a quorum calls end in time.
func TestMembersLost(t *testing.T) {
	members := etcdserver.Start(t, 3)
	h := open(t, Config{Endpoints: etcdserver.Endpoints(members)})
	values, err := h.Watch(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	var seen atomic.Int64
	go func() {
		for v := range values {
			seen.Store(int64(v.Revision))
		}
	}()
	r := put(t, h, "count", "0", 0)
	n := 0
	// count adds one, whatever it takes.
	count := func() {
		t.Helper()
		testkit.Eventually(t, "the count is stored", func() bool {
			v, err := h.Get(t.Context(), "count")
			if err != nil {
				return false
			}
			if string(v.Data) == fmt.Sprint(n+1) { // that was unsure
				r = v.Revision
				n++
				return true
			}
			if string(v.Data) != fmt.Sprint(n) {
				t.Fatalf("the count is %s, want %d", v.Data, n)
			}
			next, err := h.Put(t.Context(), "count", []byte(fmt.Sprint(n+1)), v.Revision)
			if err != nil {
				if !errors.Is(err, state.ErrUnreachable) {
					t.Fatal(err)
				}
				return false
			}
			r = next
			n++
			return true
		})
	}
	count()
	var leader *etcdserver.Member
	testkit.Eventually(t, "there is a leader", func() bool {
		for _, m := range members {
			if m.IsLeader() {
				leader = m
			}
		}
		return leader != nil
	})
	leader.Kill()
	for range 5 {
		count()
	}
	testkit.Eventually(t, "the watch has followed", func() bool { return seen.Load() == int64(r) })

	second := members[0]
	if second == leader {
		second = members[1]
	}
	second.Kill()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, err := h.Get(ctx, "count"); !errors.Is(err, state.ErrUnreachable) {
		t.Errorf("Get without a quorum = %v, want ErrUnreachable", err)
	}
	ctx, cancel = context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, err := h.Put(ctx, "other", []byte("x"), 0); !errors.Is(err, state.ErrUnreachable) {
		t.Errorf("Put without a quorum = %v, want ErrUnreachable", err)
	}
	second.Start()
	for range 5 {
		count()
	}
	testkit.Eventually(t, "the watch has followed", func() bool { return seen.Load() == int64(r) })
	leader.Start()
	count()
	want(t, h, "count", fmt.Sprint(n), r)
}
