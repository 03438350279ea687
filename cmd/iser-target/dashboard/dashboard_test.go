package dashboard

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/daemon"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// A fake is a target with the state and events of a test.
type fake struct {
	mu      sync.Mutex
	state   schema.State
	events  []schema.Event
	limits  []schema.LimitState
	cluster *schema.ClusterState // nil: none
	sick    error                // of both probes
}

func (f *fake) Health(context.Context) (string, error) { return "ok", f.sick }

func (f *fake) Readiness(context.Context) (string, error) { return "serving", f.sick }

func (f *fake) Cluster() (*schema.ClusterState, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.cluster == nil {
		return nil, daemon.ErrCluster
	}
	return f.cluster, nil
}

func (f *fake) Limits() []schema.LimitState {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.limits
}

func (f *fake) State() schema.State {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.state
}

func (f *fake) Events(since uint64) []schema.Event {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(f.events), func(e schema.Event) bool { return e.Number <= since })
}

// serve serves f on the loopback until the test ends.
func serve(t *testing.T, f *fake) (url string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(Serve(f, l, nil))
	return "http://" + l.Addr().String()
}

func request(t *testing.T, method, url, host string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	if host != "" {
		req.Host = host
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(b)
}

// secured fails t if an answer lacks the headers that restrict the browser.
func secured(t *testing.T, resp *http.Response) {
	t.Helper()
	csp := resp.Header.Get("Content-Security-Policy")
	for _, want := range []string{"default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'", "frame-ancestors 'none'", "form-action 'none'", "base-uri 'none'"} {
		if !slices.Contains(strings.Split(csp, "; "), want) {
			t.Errorf("%s: no %q in the policy %q", resp.Status, want, csp)
		}
	}
	if strings.Contains(csp, "unsafe") || strings.Contains(csp, "*") || strings.Contains(csp, "data:") {
		t.Errorf("policy %q", csp)
	}
	for k, want := range map[string]string{
		"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY",
		"Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin",
		"Access-Control-Allow-Origin": "",
	} {
		if got := resp.Header.Get(k); got != want {
			t.Errorf("%s: %s is %q, want %q", resp.Status, k, got, want)
		}
	}
}

func TestAnswersByMethodAndPath(t *testing.T) {
	url := serve(t, &fake{})
	for _, tc := range []struct {
		method, path string
		status       int
		kind         string
	}{
		{"GET", "/", 200, "text/html; charset=utf-8"},
		{"HEAD", "/", 200, "text/html; charset=utf-8"},
		{"GET", "/app.js", 200, "text/javascript; charset=utf-8"},
		{"GET", "/style.css", 200, "text/css; charset=utf-8"},
		{"GET", "/icon.svg", 200, "image/svg+xml"},
		{"GET", "/api/state", 200, "application/json"},
		{"HEAD", "/api/state", 200, "application/json"},
		{"GET", "/index.html", 404, ""},
		{"GET", "/page/", 404, ""},
		{"GET", "/../dashboard.go", 404, ""},
		{"GET", "/api", 404, ""},
		{"POST", "/", 405, ""},
		{"PUT", "/app.js", 405, ""},
		{"DELETE", "/api/state", 405, ""},
		{"PATCH", "/api/state", 405, ""},
		{"OPTIONS", "/api/state", 405, ""},
		{"TRACE", "/", 405, ""},
	} {
		t.Run(tc.method+" "+tc.path, func(t *testing.T) {
			resp, body := request(t, tc.method, url+tc.path, "")
			if resp.StatusCode != tc.status || tc.kind != "" && resp.Header.Get("Content-Type") != tc.kind {
				t.Errorf("%s, %s", resp.Status, resp.Header.Get("Content-Type"))
			}
			if tc.status == 405 && resp.Header.Get("Allow") != "GET, HEAD" {
				t.Errorf("Allow: %q", resp.Header.Get("Allow"))
			}
			if (tc.method == "HEAD") != (body == "") {
				t.Errorf("%d bytes of body", len(body))
			}
			secured(t, resp)
		})
	}
	first, _ := request(t, "GET", url+"/app.js", "")
	req, _ := http.NewRequestWithContext(t.Context(), "GET", url+"/app.js", nil)
	req.Header.Set("If-None-Match", first.Header.Get("ETag"))
	again, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	again.Body.Close()
	if again.StatusCode != http.StatusNotModified {
		t.Errorf("the copy of the browser: %s", again.Status)
	}
}

// The page keeps to its policy: no inline script or style, nothing from elsewhere.
func TestPageKeepsToItsPolicy(t *testing.T) {
	for name, never := range map[string]string{
		"index.html": `(?i)<script(?:>|[^>]*[^>]>[^<])|<style|\sstyle=|\son\w+=|https?:|javascript:|(?:src|href)="[^"]*//`,
		"app.js":     `innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|import\b|https?://(?:www\.w3\.org/2000/svg)?[^"w]|localStorage|document\.cookie`,
		"style.css":  `(?i)@import|url\(|https?:`,
	} {
		b, err := files.ReadFile("page/" + name)
		if err != nil {
			t.Fatal(err)
		}
		if found := regexp.MustCompile(never).Find(b); found != nil {
			t.Errorf("%s has %q", name, found)
		}
	}
}

// A server on the loopback refuses foreign names that resolve to it.
func TestForeignNameOfTheLoopbackIsRefused(t *testing.T) {
	url := serve(t, &fake{})
	for host, want := range map[string]int{
		"localhost": 200, "LOCALHOST:80": 200, "127.0.0.1": 200, "127.0.0.1:9": 200, "[::1]": 200, "[::1]:80": 200,
		"evil.example": 421, "evil.example:80": 421, "localhost.evil.example": 421, "127.0.0.1.evil.example": 421,
	} {
		resp, body := request(t, "GET", url+"/api/state", host)
		if resp.StatusCode != want {
			t.Errorf("%s: %s, want %d", host, resp.Status, want)
		}
		if want != 200 && strings.Contains(body, "sessions") {
			t.Errorf("%s: %s", host, body)
		}
		secured(t, resp)
	}
}

// Silent connections do not keep a browser out.
func TestConnectionsAreLimited(t *testing.T) {
	url := serve(t, &fake{})
	addr := strings.TrimPrefix(url, "http://")
	for range 2 * maxConnections {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Get(url + "/api/state")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	if resp.StatusCode != http.StatusOK {
		t.Errorf("%s: %s", resp.Status, b)
	}
	secured(t, resp)
}

func TestWrongQueryIsRefused(t *testing.T) {
	for raw, want := range map[string]string{
		"":                                  "",
		"after=5":                           "",
		"events=7":                          "",
		"events=x":                          "query: events: ",
		"after=-1":                          "query: after: ",
		"after=1&after=2":                   "query: after is given 2 times",
		"luns.rows=1000&sessions.rows=0":    "",
		"luns.rows=1001":                    "query: luns.rows: not 0 to 1000",
		"sessions.rows=-1":                  "query: sessions.rows: not 0 to 1000",
		"sessions.rows=x":                   "query: sessions.rows: ",
		"luns.sort=name&sessions.sort=iops": "",
		"luns.sort=size":                    `query: luns.sort="size" is unknown`,
		"luns.find=%00%ff&sessions.find=a":  "",
		"targets.find=a":                    `query: targets.find="a" is unknown`,
		"luns":                              `query: luns="" is unknown`,
		"%zz":                               "query: invalid URL escape",
	} {
		_, err := parseQuery(raw)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", raw, err, want)
		}
	}
	resp, body := request(t, "GET", serve(t, &fake{})+"/api/state?luns.rows=x", "")
	if resp.StatusCode != http.StatusBadRequest || !strings.Contains(body, "luns.rows") {
		t.Errorf("%s: %s", resp.Status, body)
	}
	secured(t, resp)
}

// FuzzQuery checks that an answer stays within its limits for any query.
func FuzzQuery(f *testing.F) {
	for _, raw := range []string{"", "after=5&events=7", "luns.rows=1000&luns.sort=name&luns.find=a%20b", "sessions.rows=-1", "luns.rows=1001", "after=18446744073709551616", "%zz", "luns.rows=1&luns.rows=2"} {
		f.Add(raw)
	}
	s := newSampler(many(3))
	f.Fuzz(func(t *testing.T, raw string) {
		q, err := parseQuery(raw)
		if err != nil {
			return
		}
		for _, l := range []list{q.sessions, q.luns} {
			if l.rows < 0 || l.rows > maxRows || !slices.Contains(orders, l.sort) {
				t.Errorf("%q: %+v", raw, l)
			}
		}
		a := s.answer(q, nil)
		if len(a.LUNs.Rows) > q.luns.rows || len(a.Sessions.Rows) > q.sessions.rows || a.LUNs.All != 3 || a.LUNs.Matching > 3 {
			t.Errorf("%q: %d of %d LUNs, %d sessions", raw, len(a.LUNs.Rows), a.LUNs.Matching, len(a.Sessions.Rows))
		}
	})
}

// After end nothing listens, and open connections are closed.
func TestEndClosesEverything(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	end := Serve(&fake{}, l, nil)
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	end()
	end()
	c.SetReadDeadline(time.Now().Add(20 * time.Second))
	if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil {
		t.Errorf("a connection that was open: %d bytes, %v", n, err)
	}
	if c, err := net.Dial("tcp", l.Addr().String()); err == nil {
		c.Close()
		t.Error("the server still listens")
	}
}

// clock returns a clock that starts at begin and advances by an Interval with each call.
func clock(begin time.Time) func() time.Time {
	at := begin.Add(-Interval)
	return func() time.Time {
		at = at.Add(Interval)
		return at
	}
}

// latency returns the counters of n commands that each took up to the bound of index i.
func latency(n uint64, i int) []schema.PhaseState {
	return []schema.PhaseState{
		{Phase: "backend", Timing: schema.Timing{Count: n, Buckets: []uint64{n}}},
		{Phase: "total", Timing: schema.Timing{Count: n, Buckets: append(make([]uint64, i), n)}},
	}
}

func near(got, want float64) bool { return math.Abs(got-want) <= 1e-9*math.Abs(want) }

func check(t *testing.T, what string, l schema.Load, iops, read, write float64) {
	t.Helper()
	if !near(l.IOPS, iops) || !near(l.ReadBytes, read) || !near(l.WriteBytes, write) {
		t.Errorf("%s: %v/s, read %v/s, write %v/s, want %v, %v, %v", what, l.IOPS, l.ReadBytes, l.WriteBytes, iops, read, write)
	}
}

// Rates are the difference of two samples. New and reopened LUNs count from zero.
func TestRatesAreTheDifferenceOfTwoSamples(t *testing.T) {
	began := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	lun := func(id int, state string, c schema.CounterState) schema.LUNState {
		return schema.LUNState{Target: "t", ID: id, State: state, Counters: c}
	}
	session := func(tsih uint16, started time.Time, c schema.CounterState) schema.SessionState {
		return schema.SessionState{TSIH: tsih, Started: started, Tasks: 3, Counters: c}
	}
	f := &fake{state: schema.State{
		LatencyBounds: []float64{0.001, 0.002, 0.004},
		Targets: []schema.TargetState{{LUNs: []schema.LUNState{
			lun(0, schema.Ready, schema.CounterState{Reads: 100, ReadBytes: 1000, Latency: latency(100, 0)}),
			lun(1, schema.Ready, schema.CounterState{Writes: 50, WriteBytes: 500}),
		}}},
		Sessions: []schema.SessionState{session(1, began, schema.CounterState{Reads: 100, ReadBytes: 1000})},
	}}
	s := &sampler{src: f, now: clock(began)}
	s.sample()
	a := s.answer(query{sessions: list{rows: 9}, luns: list{rows: 9}}, nil)
	check(t, "the first sample", a.Total, 0, 0, 0)
	if len(a.Points) != 0 || len(a.LUNs.Rows) != 2 {
		t.Errorf("the first sample: %+v", a)
	}

	f.state.Targets = []schema.TargetState{{LUNs: []schema.LUNState{
		lun(0, schema.Ready, schema.CounterState{Reads: 140, Others: 20, ReadBytes: 5000, InFlight: 2, Latency: []schema.PhaseState{{Phase: "total", Timing: schema.Timing{Count: 160, Buckets: []uint64{100, 60}}}}}),
		lun(1, schema.Ready, schema.CounterState{Writes: 10, WriteBytes: 100}),       // opened again
		lun(2, schema.Ready, schema.CounterState{Writes: 30, WriteBytes: 300}),       // new
		lun(3, schema.Draining, schema.CounterState{Reads: 1e6, ReadBytes: 1 << 40}), // being removed
	}}}
	f.state.Sessions = []schema.SessionState{
		session(1, began.Add(time.Second), schema.CounterState{Reads: 4, ReadBytes: 40}), // a new session with that TSIH
		session(2, began, schema.CounterState{Writes: 8, WriteBytes: 80}),
	}
	s.sample()
	a = s.answer(query{sessions: list{rows: 9, sort: "name"}, luns: list{rows: 9, sort: "name"}}, nil)
	check(t, "all", a.Total, 50, 2000, 200)
	if a.Total.InFlight != 2 || a.Total.P50 == nil || !near(*a.Total.P50, 0.0015) || a.Total.P99 == nil || !near(*a.Total.P99, 0.00199) {
		t.Errorf("all: %+v", a.Total)
	}
	want := map[int][3]float64{0: {30, 2000, 0}, 1: {5, 0, 50}, 2: {15, 0, 150}, 3: {}}
	for _, l := range a.LUNs.Rows {
		check(t, fmt.Sprintf("LUN %d", l.ID), l.Load, want[l.ID][0], want[l.ID][1], want[l.ID][2])
	}
	for i, w := range [][3]float64{{2, 20, 0}, {4, 0, 40}} {
		r := a.Sessions.Rows[i]
		check(t, fmt.Sprintf("session %d", r.TSIH), r.Load, w[0], w[1], w[2])
		if r.InFlight != 3 || r.P50 != nil {
			t.Errorf("session %+v", r)
		}
	}
	if len(a.LUNs.Rows) != 4 || len(a.Points) != 1 || a.Points[0].Number != 1 {
		t.Errorf("%+v", a)
	}
}

// An answer has the gateways of the cluster, and who serves each shared LUN. Without a cluster it has neither.
func TestAnswerHasTheCluster(t *testing.T) {
	f := &fake{state: schema.State{Targets: []schema.TargetState{{Name: "t", LUNs: []schema.LUNState{
		{Target: "t", ID: 0, State: schema.Ready, Health: schema.Healthy},
		{Target: "t", ID: 1, State: schema.Ready, Health: schema.Healthy},
		{Target: "t", ID: 2, State: schema.Ready, Health: schema.Healthy},
		{Target: "t", ID: 3, State: schema.NotReady, Reason: "no gateway of the cluster has opened the medium yet"},
		{Target: "t", ID: 4, State: schema.Ready, Health: schema.Healthy},
	}}}}}
	s := &sampler{src: f, now: clock(time.Now())}
	q := query{luns: list{rows: 9, sort: "name"}}
	s.sample()
	if a := s.answer(q, nil); a.Cluster != nil || a.LUNs.Rows[1].Reason != "" {
		t.Errorf("without a cluster: %+v, %+v", a.Cluster, a.LUNs.Rows)
	}
	f.cluster = &schema.ClusterState{Name: "a", Conflict: "portal group 1", Gateways: []schema.GatewayState{{Name: "a", LUNs: 1}, {Name: "b", LUNs: 1, Draining: true}}, LUNs: []schema.SharedLUNState{
		{Target: "t", ID: 0, Owner: "a", Here: true}, {Target: "t", ID: 1, Owner: "b"}, {Target: "t", ID: 2}, {Target: "t", ID: 3},
	}}
	for i := range maxGateways {
		f.cluster.Gateways = append(f.cluster.Gateways, schema.GatewayState{Name: fmt.Sprint("c", i)})
	}
	s.sample()
	a := s.answer(q, nil)
	if c := a.Cluster; c == nil || c.Name != "a" || c.Conflict != "portal group 1" || c.Unserved != 2 || c.All != maxGateways+2 || len(c.Gateways) != maxGateways || !c.Gateways[1].Draining {
		t.Errorf("%+v", c)
	}
	want := map[int]string{0: "served here", 1: "served by b", 2: "served by no gateway", 3: "no gateway of the cluster has opened the medium yet", 4: ""}
	for _, l := range a.LUNs.Rows {
		if l.Reason != want[l.ID] {
			t.Errorf("LUN %d: %q, want %q", l.ID, l.Reason, want[l.ID])
		}
	}
	if a := s.answer(query{luns: list{rows: 9, find: "served by b"}}, nil); len(a.LUNs.Rows) != 1 || a.LUNs.Rows[0].ID != 1 {
		t.Errorf("LUNs that b serves: %+v", a.LUNs.Rows)
	}
}

// The points of five minutes are kept, and a query gets those that it lacks.
func TestQueryGetsTheMissingPoints(t *testing.T) {
	s := &sampler{src: &fake{}, now: clock(time.Now())}
	for range maxPoints + 10 {
		s.sample()
	}
	for after, want := range map[uint64][2]uint64{0: {10, maxPoints}, 100: {101, 59}, 159: {0, 0}, 1000: {10, maxPoints}} {
		p := s.answer(query{after: after}, nil).Points
		if uint64(len(p)) != want[1] || len(p) > 0 && (p[0].Number != want[0] || p[len(p)-1].Number != 159) {
			t.Errorf("after %d: %d points", after, len(p))
		}
	}
}

// many returns a target with n LUNs, of which one is not ready, and 200 sessions.
func many(n int) *fake {
	f := &fake{state: schema.State{LatencyBounds: []float64{1, 2}}}
	t := schema.TargetState{Name: "iqn.2026-11.io.example:many"}
	for i := range n {
		l := schema.LUNState{Target: t.Name, ID: i, Backend: "file", State: schema.Ready, Health: schema.Healthy, Size: 1 << 30,
			Counters: schema.CounterState{Reads: uint64(i) * 1000, ReadBytes: uint64(n-i) << 30, Latency: latency(uint64(i), 1)}}
		if i == n/2 {
			l.State, l.Reason = schema.NotReady, "the disk is away"
		}
		t.LUNs = append(t.LUNs, l)
	}
	for i := range 200 {
		f.state.Sessions = append(f.state.Sessions, schema.SessionState{TSIH: uint16(i), Target: t.Name, Initiator: fmt.Sprintf("iqn.2026-11.io.example:host%d", i)})
	}
	f.state.Targets = []schema.TargetState{t}
	return f
}

// An answer has the rows that the query selects, LUNs that are not ready first.
func TestAnswerHasTheSelectedRows(t *testing.T) {
	f := many(1000)
	s := &sampler{src: f, now: clock(time.Now())}
	load := f.state
	f.state = schema.State{}
	s.sample()
	f.state = load
	s.sample()
	for _, tc := range []struct {
		raw      string
		matching int
		ids      []int
	}{
		{"luns.rows=3", 1000, []int{500, 999, 998}},
		{"luns.rows=3&luns.sort=bytes", 1000, []int{500, 0, 1}},
		{"luns.rows=3&luns.sort=name", 1000, []int{500, 0, 1}},
		{"luns.rows=0", 1000, nil},
		{"luns.find=NOT+READY", 1, []int{500}},
		{"luns.find=away", 1, []int{500}},
		{"luns.find=lun+99&luns.rows=2&luns.sort=name", 11, []int{99, 990}},
		{"luns.find=nowhere", 0, nil},
	} {
		q, err := parseQuery(tc.raw)
		if err != nil {
			t.Fatal(err)
		}
		a := s.answer(q, nil)
		var ids []int
		for _, r := range a.LUNs.Rows {
			ids = append(ids, r.ID)
		}
		if a.LUNs.All != 1000 || a.LUNs.Matching != tc.matching || !slices.Equal(ids, tc.ids) || a.NotReady != 1 {
			t.Errorf("%s: %d of %d: %v, want %d: %v", tc.raw, a.LUNs.Matching, a.LUNs.All, ids, tc.matching, tc.ids)
		}
	}
	q, _ := parseQuery("sessions.find=host19&sessions.sort=latency")
	if a := s.answer(q, nil); a.Sessions.Matching != 11 || a.Sessions.All != 200 || len(a.Sessions.Rows) != 11 {
		t.Errorf("%d of %d sessions, %d rows", a.Sessions.Matching, a.Sessions.All, len(a.Sessions.Rows))
	}
	q, _ = parseQuery("")
	b, err := json.Marshal(s.answer(q, nil))
	if err != nil {
		t.Fatal(err)
	}
	if len(b) > 24<<10 {
		t.Errorf("an answer of %d bytes", len(b))
	}
}

// A LUN that is ready and not healthy is shown with its health, the time and the reason, before its healthy
// neighbors. One that is not ready is shown as that.
func TestHealthOfLUNs(t *testing.T) {
	f := many(100)
	since := time.Date(2026, 11, 23, 10, 0, 0, 0, time.UTC)
	luns := f.state.Targets[0].LUNs
	for id, health := range map[int]string{70: "failed", 80: "degraded", 90: "orphaned"} {
		luns[id].Health, luns[id].HealthSince, luns[id].Reason = health, &since, "the reason of "+health
	}
	luns[50].Health = "failed" // its store is closed, too
	s := &sampler{src: f, now: clock(since)}
	s.sample()
	q, err := parseQuery("luns.rows=5&luns.sort=name")
	if err != nil {
		t.Fatal(err)
	}
	a := s.answer(q, nil)
	var got []string
	for _, r := range a.LUNs.Rows {
		b, err := json.Marshal(map[string]any{"id": r.ID, "state": r.State, "health": r.Health, "since": r.Since, "reason": r.Reason})
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, string(b))
	}
	want := []string{
		`{"health":"","id":50,"reason":"the disk is away","since":null,"state":"not ready"}`,
		`{"health":"failed","id":70,"reason":"the reason of failed","since":"2026-11-23T10:00:00Z","state":"ready"}`,
		`{"health":"degraded","id":80,"reason":"the reason of degraded","since":"2026-11-23T10:00:00Z","state":"ready"}`,
		`{"health":"orphaned","id":90,"reason":"the reason of orphaned","since":"2026-11-23T10:00:00Z","state":"ready"}`,
		`{"health":"","id":0,"reason":"","since":null,"state":"ready"}`,
	}
	if !slices.Equal(got, want) || a.NotReady != 1 || a.Unwell != 3 {
		t.Errorf("%d not ready, %d not healthy:\n%s", a.NotReady, a.Unwell, strings.Join(got, "\n"))
	}
	if q, err = parseQuery("luns.find=FAILED"); err != nil {
		t.Fatal(err)
	}
	if r := s.answer(q, nil).LUNs; r.Matching != 1 || r.Rows[0].ID != 70 {
		t.Errorf("the filter finds %+v", r)
	}
}

// A session on which IPsec is required is shown with suite, SPIs and IKE identity, by which the filter finds it, or with why it is not protected.
func TestSessionsUnderIPsec(t *testing.T) {
	f := many(1)
	f.state.Sessions = f.state.Sessions[:3]
	for i, p := range []*schema.ConnectionProtection{
		{Verdict: "permit", Suite: "esp-tunnel aes128gcm16 esn", SPIIn: "0x00001001", SPIOut: "0x00001002", Identity: "host.example"},
		{Verdict: "mark", SPIOut: "0x00002002", Reason: "the keys are missing"},
		nil,
	} {
		f.state.Sessions[i].Connections = []schema.ConnectionState{{IPsec: p}}
	}
	s := &sampler{src: f, now: clock(time.Now())}
	s.sample()
	rows := map[uint16]sessionRow{}
	for _, r := range s.answer(query{sessions: list{rows: 9}}, nil).Sessions.Rows {
		rows[r.TSIH] = r
	}
	for i, want := range [][2]string{
		{"esp-tunnel aes128gcm16 esn, SPIs 0x00001001 in, 0x00001002 out, identity host.example", ""},
		{"not protected", "the keys are missing"},
		{"", ""},
	} {
		if r := rows[f.state.Sessions[i].TSIH]; r.IPsec != want[0] || r.Unprotected != want[1] {
			t.Errorf("session %d: %q, %q, want %q", i, r.IPsec, r.Unprotected, want)
		}
	}
	for _, find := range []string{"0x00001001", "0x00001002", "host.example"} {
		q, err := parseQuery("sessions.find=" + find)
		if err != nil {
			t.Fatal(err)
		}
		if l := s.answer(q, nil).Sessions; l.Matching != 1 || l.Rows[0].TSIH != f.state.Sessions[0].TSIH {
			t.Errorf("%s finds %+v", find, l)
		}
	}
}

// The latest events and refused logins come first, and their number is limited.
func TestLatestEventsComeFirst(t *testing.T) {
	var events []schema.Event
	for i := range uint64(1024) {
		e := schema.Event{Number: i + 1, Event: "login", Attrs: map[string]any{"outcome": "accepted"}}
		if i%10 == 0 {
			e.Attrs["outcome"] = "refused"
		}
		events = append(events, e)
	}
	s := newSampler(&fake{state: schema.State{Portals: []schema.PortalState{}}})
	a := s.answer(query{}, events)
	if len(a.Events) != maxEvents || a.Events[0].Number != 1024 || len(a.Refused) != maxRefused || a.Refused[0].Number != 1021 || a.Refused[1].Number != 1011 {
		t.Errorf("%d events, %d refusals", len(a.Events), len(a.Refused))
	}
	_, body := request(t, "GET", serve(t, &fake{events: events})+"/api/state?events=1020", "")
	var got answer
	if err := json.Unmarshal([]byte(body), &got); err != nil || len(got.Events) != 4 || len(got.Refused) != 1 {
		t.Errorf("after event 1020: %v, %s", err, body)
	}
	b, err := json.Marshal(s.answer(query{}, nil))
	if err != nil || strings.Contains(string(b), "null") {
		t.Errorf("%v: %s", err, b)
	}
}

func TestReservationInWords(t *testing.T) {
	two := []schema.RegistrationState{{Initiator: "a"}, {Initiator: "b", Holder: true}}
	for _, tc := range []struct {
		r    *schema.ReservationState
		want string
	}{
		{nil, ""},
		{&schema.ReservationState{Legacy: "a"}, "RESERVE by a"},
		{&schema.ReservationState{Registrations: two[:1]}, "none, 1 registered"},
		{&schema.ReservationState{Type: "write exclusive", Registrations: two}, "write exclusive by b"},
		{&schema.ReservationState{Type: "write exclusive, all registrants", Registrations: append(two[1:2:2], two[1])}, "write exclusive, all registrants, 2 registered"},
	} {
		if got := reservation(tc.r); got != tc.want {
			t.Errorf("%+v: %q, want %q", tc.r, got, tc.want)
		}
	}
}

// BenchmarkSample measures a sample of 1,000 LUNs and 200 sessions, without State.
func BenchmarkSample(b *testing.B) {
	s := newSampler(many(1000))
	s.now = clock(s.at)
	for b.Loop() {
		s.sample()
	}
}

// BenchmarkAnswer measures the cost of each page in every Interval.
func BenchmarkAnswer(b *testing.B) {
	s := newSampler(many(1000))
	q, err := parseQuery("luns.find=lun")
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := json.Marshal(s.answer(q, nil)); err != nil {
			b.Fatal(err)
		}
	}
}

// The page names limits that are near their bounds or were reached within the last hour, and no others.
func TestPressingLimitsAreNamed(t *testing.T) {
	now := time.Now()
	s := newSampler(&fake{limits: []schema.LimitState{
		{Name: "near", Unit: schema.Count, Max: 10, Used: 8},
		{Name: "far", Unit: schema.Count, Max: 10, Used: 7},
		{Name: "lately", Unit: schema.Count, Max: 10, Reached: 1, Last: now},
		{Name: "before", Unit: schema.Count, Max: 10, Reached: 1, Last: now.Add(-2 * time.Hour)},
	}})
	got := s.answer(query{}, nil).Limits
	if len(got) != 2 || got[0] != "near: 8 of 10 in use" || !strings.HasPrefix(got[1], "lately: 0 of 10 in use; reached once, last at ") {
		t.Errorf("limits %q", got)
	}
	if got := newSampler(&fake{}).answer(query{}, nil).Limits; got == nil || len(got) != 0 {
		t.Errorf("without limits: %#v, want an empty list for the page", got)
	}
}

// The server of the page answers probes: with the text and status 200, or the reason and status 503.
func TestProbes(t *testing.T) {
	url, sick := serve(t, &fake{}), serve(t, &fake{sick: errors.New("starting")})
	for _, tt := range []struct {
		url, body string
		status    int
	}{
		{url + "/healthz", "ok\n", 200}, {url + "/readyz", "serving\n", 200},
		{sick + "/healthz", "starting\n", 503}, {sick + "/readyz", "starting\n", 503},
	} {
		for _, method := range []string{"GET", "HEAD"} {
			resp, body := request(t, method, tt.url, "")
			if method == "HEAD" {
				tt.body = ""
			}
			if resp.StatusCode != tt.status || string(body) != tt.body || resp.Header.Get("Cache-Control") != "no-store" || resp.Header.Get("Content-Type") != "text/plain; charset=utf-8" {
				t.Errorf("%s %s: %s, %q, %v; want %d and %q", method, tt.url, resp.Status, body, resp.Header, tt.status, tt.body)
			}
		}
	}
	if resp, _ := request(t, "POST", url+"/healthz", ""); resp.StatusCode != 405 {
		t.Errorf("POST: %s", resp.Status)
	}
}
