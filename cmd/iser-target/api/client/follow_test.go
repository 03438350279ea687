package client_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A relay passes the connections of one Unix socket on to another, until cut.
type relay struct {
	l  net.Listener
	to string

	mu    sync.Mutex
	conns []net.Conn
}

func newRelay(t *testing.T, to string) (r *relay, socket string) {
	socket = filepath.Join(t.TempDir(), "r")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	r = &relay{l: l, to: to}
	t.Cleanup(func() { l.Close(); r.cut() })
	go func() {
		for {
			near, err := l.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("unix", to)
			if err != nil {
				near.Close()
				continue
			}
			r.mu.Lock()
			r.conns = append(r.conns, near, far)
			r.mu.Unlock()
			for _, pair := range [][2]net.Conn{{near, far}, {far, near}} {
				go func() {
					io.Copy(pair[0], pair[1])
					pair[0].Close()
					pair[1].Close()
				}()
			}
		}
	}()
	return r, socket
}

// cut ends all connections.
func (r *relay) cut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.conns {
		c.Close()
	}
	r.conns = nil
}

// A collector has the events that Follow has passed.
type collector struct {
	mu   sync.Mutex
	list []schema.Event
}

func (c *collector) add(e schema.Event) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.list = append(c.list, e)
	return nil
}

// since returns the numbers of the events from index i on.
func (c *collector) since(i int) (numbers []uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range c.list[i:] {
		numbers = append(numbers, e.Number)
	}
	return numbers
}

// wanted returns the numbers of the events of a target.
func wanted(t *testing.T, socket string) []uint64 {
	t.Helper()
	var all collector
	if err := client.New(socket).Events(t.Context(), 0, false, all.add); err != nil {
		t.Fatal(err)
	}
	return all.since(0)
}

// Follow passes each event once, through connections that end and a target that is started again.
func TestFollowConnectsAgain(t *testing.T) {
	dir := t.TempDir()
	s, err := serve(dir)
	if err != nil {
		t.Fatal(err)
	}
	stopped := false
	defer func() {
		if !stopped {
			s.stop()
		}
	}()
	r, socket := newRelay(t, s.socket)
	c := client.New(socket)
	defer c.Close()
	ctx, cancel := context.WithCancel(t.Context())
	var got collector
	done := make(chan error, 1)
	go func() { done <- c.Follow(ctx, 0, got.add) }()
	direct := client.New(s.socket)
	change := func(i int) {
		t.Helper()
		if _, err := direct.Allow(t.Context(), store, fmt.Sprintf("iqn.2001-04.com.example:h%d", i), schema.Options{}); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 5 {
		change(i)
		r.cut()
		change(100 + i)
	}
	first := wanted(t, s.socket)
	testkit.Eventually(t, "all events of the first process", func() bool { return len(got.since(0)) >= len(first) })
	if have := got.since(0); !slices.Equal(have, first) || len(first) < 10 {
		t.Errorf("events %v, want %v", have, first)
	}
	direct.Close()
	s.stop()
	stopped = true
	if s, err = serve(dir); err != nil {
		t.Fatal(err)
	}
	stopped = false
	// More events than the first process had: a number alone would not show the restart.
	for i := range len(first) + 3 {
		change(200 + i)
	}
	second := wanted(t, s.socket)
	testkit.Eventually(t, "all events of the second process", func() bool { return len(got.since(len(first))) >= len(second) })
	if have := got.since(len(first)); !slices.Equal(have, second) || second[0] != 1 || len(second) <= len(first) {
		t.Errorf("events after the restart %v, want %v", have, second)
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("Follow ends with %v", err)
	}
}

// Follow reports what does not pass: that there is no target at first, an answer that refuses, and the error of the callback.
func TestFollowReportsWhatDoesNotPass(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	none := func(schema.Event) error { return nil }
	if err := client.New(socket).Follow(ctx, 0, none); !errors.Is(err, schema.Unreached) {
		t.Errorf("no target: %v", err)
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	var (
		mu      sync.Mutex
		queries []string
	)
	server := http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		queries = append(queries, r.URL.Query().Get("since"))
		switch len(queries) {
		case 1:
			w.Header().Set(schema.EventLogHeader, "a")
			io.WriteString(w, `{"number": 41, "event": "login"}`+"\n")
		case 2:
			w.WriteHeader(http.StatusServiceUnavailable)
			io.WriteString(w, `{"error": "8 clients follow the events", "code": "busy"}`)
		default:
			w.WriteHeader(http.StatusForbidden)
			io.WriteString(w, `{"error": "role none", "code": "forbidden"}`)
		}
	})}
	go server.Serve(l)
	defer server.Close()
	if err := client.New(socket).Follow(ctx, 40, none); !errors.Is(err, schema.Forbidden) {
		t.Errorf("a caller without a role: %v", err)
	}
	mu.Lock()
	if want := []string{"40", "41", "41"}; !slices.Equal(queries, want) {
		t.Errorf("requests since %v, want %v", queries, want)
	}
	queries = nil
	mu.Unlock()
	own := errors.New("enough")
	if err := client.New(socket).Follow(ctx, 40, func(schema.Event) error { return own }); err != own {
		t.Errorf("a callback that fails: %v", err)
	}
}

// Follow ends with its context while the target is gone.
func TestFollowEndsWithItsContext(t *testing.T) {
	s, err := serve(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	c := client.New(s.socket)
	connected := make(chan struct{})
	done := make(chan error, 1)
	go func() {
		done <- c.Follow(ctx, 0, func(e schema.Event) error {
			if e.Number == 1 {
				close(connected)
			}
			return nil
		})
	}()
	<-connected
	s.stop()
	select {
	case err := <-done:
		t.Errorf("Follow ends with the target: %v", err)
	case <-time.After(500 * time.Millisecond):
	}
	cancel()
	select {
	case err := <-done:
		if !errors.Is(err, context.Canceled) {
			t.Errorf("Follow ends with %v", err)
		}
	case <-time.After(testkit.Patience):
		t.Error("Follow does not end with its context")
	}
}

// errors.Is finds the code of each kind of error, and what ended a request.
func TestErrorsHaveCodesAndCauses(t *testing.T) {
	s, err := serve(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer s.stop()
	c := client.New(s.socket)
	defer c.Close()
	ctx := t.Context()
	canceled, cancel := context.WithCancel(ctx)
	cancel()
	late, cancel := context.WithTimeout(ctx, time.Nanosecond)
	defer cancel()
	check := func(what string, err error, want ...error) {
		t.Helper()
		for _, w := range want {
			if !errors.Is(err, w) {
				t.Errorf("%s: %v is not %v", what, err, w)
			}
		}
		for _, code := range []schema.Code{schema.Invalid, schema.NotFound, schema.Exists, schema.Refused, schema.Busy, schema.Failed, schema.Unreached} {
			if errors.Is(err, code) && !slices.Contains(want, error(code)) {
				t.Errorf("%s: %v is %v, too", what, err, code)
			}
		}
	}
	_, err = c.Session(ctx, 9)
	check("no such session", err, schema.NotFound)
	_, err = c.RemoveLUN(ctx, store, 9, schema.Options{})
	check("no such LUN", err, schema.NotFound)
	id := 0
	_, err = c.AddLUN(ctx, store, schema.LUN{ID: &id, Backend: "memory", Size: "1MiB"}, schema.Options{})
	check("a number twice", err, schema.Exists)
	_, err = c.AddLUN(ctx, store, schema.LUN{Backend: "memory", Size: "much"}, schema.Options{})
	check("a wrong size", err, schema.Invalid)
	_, err = c.SetLUN(ctx, store, 0, schema.Values{"size": "1MiB"}, schema.Options{})
	check("a smaller LUN", err, schema.Refused)
	_, err = c.State(canceled)
	check("canceled", err, schema.Failed, context.Canceled)
	_, err = c.State(late)
	check("too late", err, schema.Unreached, context.DeadlineExceeded)
	_, err = client.New(s.socket + "x").State(ctx)
	check("no socket", err, schema.Unreached)
}
