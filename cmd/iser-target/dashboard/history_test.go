package dashboard

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// grow adds n READs of 4 KiB, each up to the first latency bound, to counters.
func grow(c *schema.CounterState, n uint64) {
	c.Reads += n
	c.ReadBytes += n * 4096
	if c.Operations == nil {
		c.Operations = []schema.OperationState{{Op: "read"}, {Op: "write"}}
	}
	read := &c.Operations[0]
	read.Count += n
	read.Seconds += float64(n) * 0.001
	if read.Buckets == nil {
		read.Buckets = []uint64{0}
	}
	read.Buckets = []uint64{read.Buckets[0] + n}
}

// A counting is a target whose LUNs have counters that grow.
type counting struct {
	fake
	luns []schema.CounterState
}

func (c *counting) State() schema.State {
	st := schema.State{LatencyBounds: []float64{0.001, 0.002}, Targets: []schema.TargetState{{Name: "iqn.2026-11.io.example:a"}}}
	for i, k := range c.luns {
		k.Operations = slices.Clone(k.Operations)
		st.Targets[0].LUNs = append(st.Targets[0].LUNs, schema.LUNState{Target: st.Targets[0].Name, ID: i, State: schema.Ready, Health: schema.Healthy, Counters: k, Size: 1 << 30})
	}
	return st
}

// A day of samples gives 5 minutes, 1 hour and 24 hours of points, and no more. The points of each span add up to all commands.
func TestHistoryOfADay(t *testing.T) {
	c := &counting{luns: make([]schema.CounterState, 2)}
	begin := time.Unix(1_800_000_000, 0)
	s := &sampler{src: c, now: clock(begin)}
	s.sample()
	const samples = 25 * 3600 / 2
	for range samples {
		grow(&c.luns[1], 20) // 10 per second
		s.sample()
	}
	q := historyQuery{lun: 1, tsih: -1, target: "iqn.2026-11.io.example:a"}
	for i, want := range []struct {
		points int
		length time.Duration
	}{{150, 5 * time.Minute}, {120, time.Hour}, {288, 24 * time.Hour}} {
		for _, lun := range []int{-1, 1} {
			q := historyQuery{span: i, lun: lun, tsih: -1, target: q.target}
			a := s.chart(q)
			if len(a.Points) != want.points || a.Seconds != want.length.Seconds() {
				t.Fatalf("%s of LUN %d: %d points of %v s", spans[i].name, lun, len(a.Points), a.Seconds)
			}
			for j, p := range a.Points {
				if math.Abs(p.Reads-10) > 0.01 || math.Abs(p.Read-40960) > 50 || *p.ReadSize != 4096 || p.Read99 == nil || *p.Read99 <= 0 || p.Write99 != nil || p.Errors != 0 {
					t.Fatalf("%s of LUN %d: point %d is %+v", spans[i].name, lun, j, p)
				}
				if j > 0 && p.At-a.Points[j-1].At != spans[i].every.Milliseconds() {
					t.Fatalf("%s: %d ms between points", spans[i].name, p.At-a.Points[j-1].At)
				}
			}
			last := a.Points[len(a.Points)-1].At
			if age := a.Time.UnixMilli() - last; age < 0 || age >= spans[i].every.Milliseconds() {
				t.Errorf("%s: the last point is %d ms old", spans[i].name, age)
			}
			q.after = a.Points[len(a.Points)-3].At
			if got := s.chart(q).Points; len(got) != 2 || got[1].At != last {
				t.Errorf("%s: %d points after the last but two", spans[i].name, len(got))
			}
		}
	}
	q.lun = 0
	if a := s.chart(q); a == nil || len(a.Points) != 0 {
		t.Error("a LUN without commands has points")
	}
}

// The memory of the history is bounded, whatever the number of LUNs. A LUN that becomes busy takes the place of one that is idle.
func TestHistoryIsBounded(t *testing.T) {
	c := &counting{luns: make([]schema.CounterState, maxSeries+10)}
	s := &sampler{src: c, now: clock(time.Unix(1_800_000_000, 0))}
	s.sample()
	for i := range c.luns {
		grow(&c.luns[i], 1)
	}
	s.sample()
	if n := len(s.history.luns); n != maxSeries {
		t.Fatalf("%d series, want %d", n, maxSeries)
	}
	var late lunKey
	for i := range c.luns {
		if k := (lunKey{"iqn.2026-11.io.example:a", i}); s.history.luns[k] == nil {
			late = k
		}
	}
	wait := func() {
		for range int(idleAfter / Interval) {
			s.sample()
		}
	}
	grow(&c.luns[late.id], 1)
	s.sample()
	if s.history.luns[late] != nil {
		t.Error("a LUN that had commands a moment ago has lost its history")
	}
	wait()
	grow(&c.luns[late.id], 1)
	s.sample()
	if n := len(s.history.luns); n != maxSeries || s.history.luns[late] == nil {
		t.Errorf("%d series, and the busy LUN has one: %v", n, s.history.luns[late] != nil)
	}
	points := 0
	for _, sp := range spans {
		points += sp.points
	}
	if bytes := points * int(unsafe.Sizeof(moment{})); bytes > 32<<10 {
		t.Errorf("a series has %d bytes, docs/dashboard.md says less than 32 KiB", bytes)
	}
	c.luns = c.luns[:1]
	s.sample()
	if n := len(s.history.luns); n > 1 {
		t.Errorf("%d series of one LUN", n)
	}
}

// Idle LUNs have no rows if there are many, and are counted. Those in trouble, and those that a query looks for, have rows.
func TestIdleLUNsAreHidden(t *testing.T) {
	f := &fake{}
	for i := range 20 {
		name := fmt.Sprintf("iqn.2026-11.io.example:t%02d", i)
		tg := schema.TargetState{Name: name, Alias: fmt.Sprintf("alias%d", i), Sessions: []uint16{1, 2}}
		for id := range 10 {
			tg.LUNs = append(tg.LUNs, schema.LUNState{Target: name, ID: id, State: schema.Ready, Health: schema.Healthy, Size: 1 << 20})
		}
		f.state.Targets = append(f.state.Targets, tg)
	}
	f.state.Targets[7].LUNs[3].State = schema.NotReady
	s := &sampler{src: f, now: clock(time.Unix(1_800_000_000, 0))}
	s.sample()
	next := schema.State{Targets: slices.Clone(f.state.Targets)}
	next.Targets[12].LUNs = slices.Clone(next.Targets[12].LUNs)
	next.Targets[12].LUNs[5].Counters = schema.CounterState{Writes: 100, WriteBytes: 1 << 20}
	f.state = next
	s.sample()
	ask := func(raw string) *answer {
		q, err := parseQuery(raw)
		if err != nil {
			t.Fatal(err)
		}
		return s.answer(q, nil)
	}
	a := ask("")
	if len(a.LUNs.Rows) != 2 || a.LUNs.Hidden != 198 || a.LUNs.Targets != 20 || len(a.LUNs.Groups) != 20 || a.LUNs.All != 200 || a.LUNs.Matching != 200 {
		t.Fatalf("%d rows, %d hidden, %d groups of %d targets", len(a.LUNs.Rows), a.LUNs.Hidden, len(a.LUNs.Groups), a.LUNs.Targets)
	}
	if g := a.LUNs.Groups[0]; g.Target != "iqn.2026-11.io.example:t07" || g.Trouble != 1 || g.Hidden != 9 || g.LUNs != 10 || g.Size != 10<<20 || g.Alias != "alias7" || g.Sessions != 2 {
		t.Errorf("the first group is %+v", *g)
	}
	if g := a.LUNs.Groups[1]; g.Target != "iqn.2026-11.io.example:t12" || g.IOPS != 50 || g.WriteBytes != 1<<19 || g.Hidden != 9 {
		t.Errorf("the second group is %+v", *g)
	}
	if len(a.Trouble) != 1 || a.Trouble[0].ID != 3 || a.NotReady != 1 {
		t.Errorf("in trouble are %v", a.Trouble)
	}
	if a := ask("luns.open=iqn.2026-11.io.example:t07&luns.open=iqn.2026-11.io.example:t12"); len(a.LUNs.Rows) != 20 || a.LUNs.Hidden != 180 {
		t.Errorf("opened: %d rows, %d hidden", len(a.LUNs.Rows), a.LUNs.Hidden)
	}
	if a := ask("luns.find=t03"); len(a.LUNs.Rows) != 10 || len(a.LUNs.Groups) != 1 || a.LUNs.Groups[0].Matching != 10 || a.LUNs.Hidden != 0 {
		t.Errorf("found: %d rows in %d groups", len(a.LUNs.Rows), len(a.LUNs.Groups))
	}
	for range int(idleAfter/Interval) - 1 {
		s.sample()
	}
	if a := ask(""); len(a.LUNs.Rows) != 2 {
		t.Errorf("%d rows just before the LUN is idle", len(a.LUNs.Rows))
	}
	s.sample()
	if a := ask(""); len(a.LUNs.Rows) != 1 {
		t.Errorf("%d rows when the LUN is idle", len(a.LUNs.Rows))
	}
	few := &sampler{src: &fake{state: schema.State{Targets: f.state.Targets[:1]}}, now: clock(time.Unix(1_800_000_000, 0))}
	few.sample()
	few.sample()
	if a := few.answer(query{luns: list{sort: "iops", rows: 25}}, nil); len(a.LUNs.Rows) != 10 {
		t.Errorf("of 10 idle LUNs %d have rows", len(a.LUNs.Rows))
	}
}

// /api/history has facts about an object. Wrong queries and objects that do not exist get one line that says what is wrong.
func TestHistoryOfAnObject(t *testing.T) {
	f := many(3)
	l := &f.state.Targets[0].LUNs[0]
	l.NAA, l.Path, l.Initiators, l.Health, l.Reason = "naa.6001", "/srv/a.img", []string{"iqn.2026-11.io.example:host1"}, "orphaned", "the file was deleted"
	f.state.Sessions[5].Connections = []schema.ConnectionState{{CID: 1, Remote: "192.0.2.7:4000", Local: "192.0.2.1:3260"}}
	base := serve(t, f)
	get := func(query string) (int, string, chartAnswer) {
		t.Helper()
		resp, body := request(t, http.MethodGet, base+"/api/history?"+query, "")
		secured(t, resp)
		var a chartAnswer
		if resp.StatusCode == http.StatusOK {
			if err := json.Unmarshal([]byte(body), &a); err != nil {
				t.Fatal(err)
			}
		}
		return resp.StatusCode, strings.TrimSpace(body), a
	}
	name := url.QueryEscape(f.state.Targets[0].Name)
	status, body, a := get("span=24h&lun=0&target=" + name)
	for _, want := range []string{"1 GiB, in blocks of 0 bytes", "naa.6001", "/srv/a.img", "host1", "the file was deleted", "iser-target lun show iqn.2026-11.io.example:many 0"} {
		if !strings.Contains(body, want) {
			t.Errorf("no %q in %s", want, body)
		}
	}
	if status != 200 || a.State != "orphaned" || a.Seconds != 86400 || a.Every != 300 {
		t.Errorf("%d: state %q, %v s in steps of %v s", status, a.State, a.Seconds, a.Every)
	}
	if status, body, _ := get("session=5"); status != 200 || !strings.Contains(body, "192.0.2.7:4000 to 192.0.2.1:3260") || !strings.Contains(body, "iser-target session show 5") {
		t.Errorf("session: %d %s", status, body)
	}
	if status, _, a := get(""); status != 200 || a.Facts != nil || a.Every != 2 {
		t.Errorf("total: %d %+v", status, a)
	}
	for query, want := range map[string]struct {
		status int
		says   string
	}{
		"lun=9&target=" + name:     {404, "LUN 9 of iqn.2026-11.io.example:many: not found"},
		"lun=0&target=none":        {404, "LUN 0 of none: not found"},
		"session=4000":             {404, "session 4000: not found"},
		"lun=0":                    {400, "give target with lun"},
		"target=a":                 {400, "give target with lun"},
		"session=1&lun=1&target=a": {400, "give target with lun"},
		"span=1w":                  {400, `span="1w": not 5m, 1h or 24h`},
		"span=5m&span=1h":          {400, "span is given 2 times"},
		"after=x":                  {400, `after="x"`},
		"lun=70000&target=a":       {400, `lun="70000"`},
		"session=-1":               {400, `session="-1"`},
		"all=1":                    {400, `all="1": unknown`},
		"%zz":                      {400, "query"},
	} {
		if status, body, _ := get(query); status != want.status || !strings.Contains(body, want.says) || strings.Contains(body, "\n") {
			t.Errorf("%s: %d %q, want %d %q", query, status, body, want.status, want.says)
		}
	}
	if resp, body := request(t, http.MethodGet, base+"/api/state?"+strings.Repeat("luns.open=a&", maxOpen+1)+"after=0", ""); resp.StatusCode != 400 || !strings.Contains(body, "101 times") {
		t.Errorf("too many open targets: %d %s", resp.StatusCode, body)
	}
}
