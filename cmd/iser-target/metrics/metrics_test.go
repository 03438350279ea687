package metrics

import (
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.yaml.in/yaml/v3"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/security/limits"
)

const docs = "../../../docs"

// The table of docs/metrics.md has each metric, and no other.
func TestEachMetricIsDocumented(t *testing.T) {
	b, err := os.ReadFile(filepath.Join(docs, "metrics.md"))
	if err != nil {
		t.Fatal(err)
	}
	var want, got []string
	for _, f := range families {
		kind := map[prometheus.ValueType]string{counter: "counter", gauge: "gauge", 0: "histogram"}[f.kind]
		labels := strings.Join(strings.Fields(f.labels), ", ")
		if labels == "" {
			labels = "–"
		}
		want = append(want, fmt.Sprintf("| `%s` | %s | %s | %s |", f.name, kind, labels, f.help))
	}
	for line := range strings.Lines(string(b)) {
		if strings.HasPrefix(line, "| `"+Prefix) {
			got = append(got, strings.TrimSpace(line))
		}
	}
	for _, row := range want {
		if !slices.Contains(got, row) {
			t.Errorf("missing in docs/metrics.md:\n%s", row)
		}
	}
	for _, row := range got {
		if !slices.Contains(want, row) {
			t.Errorf("unknown metric:\n%s", row)
		}
	}
}

// Names follow the rules of Prometheus: counters, and only counters, end in _total.
func TestNamesFollowPrometheus(t *testing.T) {
	seen := map[string]bool{}
	for _, f := range families {
		if seen[f.name] || strings.HasSuffix(f.name, "_total") != (f.kind == counter) || !strings.HasSuffix(f.help, ".") {
			t.Errorf("%s: %s", f.name, f.help)
		}
		seen[f.name] = true
	}
}

// reports returns Reports with those certificates and that state of IPsec.
func reports(expiries func() map[string]time.Time, n IPsec) Reports {
	return Reports{Version: "v1.2.3 " + runtime.Version(), Expiries: expiries, IPsec: func() IPsec { return n },
		Reload: func() (bool, time.Time) { return false, time.UnixMilli(1500) },
		Tokens: func() lun.TokenCounts { return lun.TokenCounts{Valid: 1, Made: 12, Ended: [4]uint64{5, 3, 2, 1}} },
		Polls:  func() (found, missed uint64) { return 7, 3 },
		Cluster: func() *Cluster {
			return &Cluster{Joined: true, Current: true, Gateways: 2}
		}}
}

// The version of the program is without that of the compiler, which has a label of its own. A failed reload is 0.
func TestMetricsOfTheProgram(t *testing.T) {
	w := httptest.NewRecorder()
	h := Handler(iscsi.NewNode(iscsi.Options{}), rdma.NewDomain(), limits.New(), reports(func() map[string]time.Time { return nil }, IPsec{}))
	h.ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	for _, want := range []string{
		`iser_target_build_info{goversion="` + runtime.Version() + `",version="v1.2.3"} 1`,
		"iser_target_config_last_reload_successful 0", `iser_target_polls_total{result="data"} 7`, `iser_target_polls_total{result="nothing"} 3`, "iser_target_config_last_reload_success_timestamp_seconds 1.5",
	} {
		if !strings.Contains(w.Body.String(), "\n"+want+"\n") {
			t.Errorf("no %s", want)
		}
	}
}

// An idle target can be scraped, and its metrics are consistent: Gather fails for duplicates
// and for metrics that are not described.
func TestIdleTargetCanBeScraped(t *testing.T) {
	node := iscsi.NewNode(iscsi.Options{})
	if err := node.AddTarget(iscsi.TargetConfig{Name: "iqn.2026-11.io.example:a", LUNs: lun.NewInventory()}); err != nil {
		t.Fatal(err)
	}
	r := prometheus.NewPedanticRegistry()
	if err := r.Register(&collector{node, rdma.NewDomain(), limits.New(), reports(func() map[string]time.Time {
		return map[string]time.Time{"control.tls.cert": time.Now()}
	}, IPsec{Up: true, Sessions: map[string]int{"none": 1, "esp-tunnel aes128gcm16": 1}, Denials: map[[2]string]uint64{{"accept", "clear"}: 1}})}); err != nil {
		t.Fatal(err)
	}
	got, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, f := range got {
		names[f.GetName()] = true
	}
	for _, f := range families {
		// Metrics about a LUN, a session, a refusal or a Terminate exist with their subject.
		depends := strings.Contains(f.labels, "lun") || strings.Contains(f.labels, "tsih") || f == refusals || f == terminates
		if names[f.name] == depends {
			t.Errorf("%s: exported: %t", f.name, names[f.name])
		}
	}
}

// Each connection of a session that something is required of has one series, also while the list has it twice. New keys replace the series, and it ends with the
// connection. An IKE identity that is not UTF-8 does not stop a scrape.
func TestSeriesOfConnectionsUnderIPsec(t *testing.T) {
	one := IPsecConnection{Target: "iqn.2026-11.io.example:a", Initiator: "iqn.2026-11.io.example:host", Transport: "iser", TSIH: 7,
		Verdict: "permit", Suite: "esp-tunnel aes128gcm16 esn", SPIIn: "0x00001001", SPIOut: "0x00001002", Identity: "host.example"}
	const of = `iser_target_ipsec_session_info{cid="0",identity="host.example",initiator="iqn.2026-11.io.example:host",spi_in="0x00001001",spi_out="0x00001002",` +
		`suite="esp-tunnel aes128gcm16 esn",target="iqn.2026-11.io.example:a",transport="iser",tsih="7",verdict="permit"} 1`
	rekeyed, gone, odd := one, one, one
	rekeyed.SPIIn, rekeyed.SPIOut = "0x00002001", "0x00002002"
	gone.Verdict, gone.Suite, gone.SPIIn, gone.SPIOut, gone.Identity = "mark", "", "", "", ""
	odd.CID, odd.Identity = 1, "host\xff\"\n"
	for _, tc := range []struct {
		name string
		list []IPsecConnection
		want []string
	}{
		{"protected", []IPsecConnection{one}, []string{of}},
		{"a connection twice", []IPsecConnection{one, one, rekeyed}, []string{of}},
		{"new keys", []IPsecConnection{rekeyed}, []string{strings.ReplaceAll(of, "0x00001", "0x00002")}},
		{"no keys", []IPsecConnection{gone}, []string{strings.NewReplacer("permit", "mark", "esp-tunnel aes128gcm16 esn", "", "0x00001001", "", "0x00001002", "", "host.example", "").Replace(of)}},
		{"two connections, of which one has a strange identity", []IPsecConnection{one, odd}, []string{of,
			strings.NewReplacer(`cid="0"`, `cid="1"`, "host.example", `host?\"\n`).Replace(of)}},
		{"no connection", nil, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := Handler(iscsi.NewNode(iscsi.Options{}), rdma.NewDomain(), limits.New(), reports(func() map[string]time.Time { return nil }, IPsec{Protected: tc.list}))
			w := httptest.NewRecorder()
			h.ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
			var got []string
			for line := range strings.Lines(w.Body.String()) {
				if strings.HasPrefix(line, Prefix+"ipsec_session_info") {
					got = append(got, strings.TrimSpace(line))
				}
			}
			if w.Code != 200 || !slices.Equal(got, tc.want) {
				t.Errorf("status %d, got\n%s\nwant\n%s", w.Code, strings.Join(got, "\n"), strings.Join(tc.want, "\n"))
			}
		})
	}
}

// expressions returns the strings in a JSON or YAML document whose key is expr or query.
func expressions(v any) (list []string) {
	switch v := v.(type) {
	case []any:
		for _, e := range v {
			list = append(list, expressions(e)...)
		}
	case map[string]any:
		for k, e := range v {
			if s, ok := e.(string); ok && (k == "expr" || k == "query") {
				list = append(list, s)
			}
			list = append(list, expressions(e)...)
		}
	}
	return list
}

var (
	metricOf = regexp.MustCompile(`(` + Prefix + `\w+)(?:\{([^}]*)\})?`)
	labelOf  = regexp.MustCompile(`(\w+)\s*(?:=~|!=|!~|=)`)
	groupOf  = regexp.MustCompile(`\bby \(([^)]*)\)`)
)

// unknown returns the metrics and labels of an expression that the target does not export.
func unknown(expr string) (bad []string) {
	labels := []string{"instance"} // Prometheus's own
	for _, m := range metricOf.FindAllStringSubmatch(expr, -1) {
		own := []string{"instance"}
		i := slices.IndexFunc(families, func(f *family) bool { return f.edges == nil && f.name == m[1] })
		if i < 0 {
			name, buckets := strings.CutSuffix(m[1], "_bucket")
			if name = strings.TrimSuffix(strings.TrimSuffix(name, "_sum"), "_count"); buckets {
				own = append(own, "le")
			}
			i = slices.IndexFunc(families, func(f *family) bool { return f.edges != nil && f.name == name && name != m[1] })
		}
		if i < 0 {
			bad = append(bad, m[1])
			continue
		}
		own = append(own, strings.Fields(families[i].labels)...)
		labels = append(labels, own...)
		for _, l := range labelOf.FindAllStringSubmatch(m[2], -1) {
			if !slices.Contains(own, l[1]) {
				bad = append(bad, m[1]+"{"+l[1]+"}")
			}
		}
	}
	for _, m := range groupOf.FindAllStringSubmatch(expr, -1) {
		for l := range strings.SplitSeq(m[1], ",") {
			if !slices.Contains(labels, strings.TrimSpace(l)) {
				bad = append(bad, "by "+l)
			}
		}
	}
	return bad
}

// The Grafana dashboard and the alert rules use only metrics and labels that exist.
func TestExpressionsUseKnownMetrics(t *testing.T) {
	for name, decode := range map[string]func([]byte, any) error{"grafana-dashboard.json": json.Unmarshal, "alerts.yaml": yaml.Unmarshal} {
		b, err := os.ReadFile(filepath.Join(docs, name))
		if err != nil {
			t.Fatal(err)
		}
		var v any
		if err := decode(b, &v); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		used := 0
		for _, expr := range expressions(v) {
			used += len(metricOf.FindAllString(expr, -1))
			if bad := unknown(expr); bad != nil {
				t.Errorf("%s: %s: unknown %q", name, expr, bad)
			}
		}
		if used < 9 || used != strings.Count(string(b), Prefix) {
			t.Errorf("%s: %d metrics in expressions, %d in all", name, used, strings.Count(string(b), Prefix))
		}
	}
	for _, expr := range []string{Prefix + "none", Prefix + `lun_ready{op="x"}`, "sum by (op) (" + Prefix + "lun_ready)", Prefix + "lun_ready_bucket",
		Prefix + "command_duration_seconds", Prefix + `command_duration_seconds_count{le="1"}`, Prefix + `command_duration_seconds_bucket{lun="1"}`} {
		if unknown(expr) == nil {
			t.Errorf("%s passes", expr)
		}
	}
}

// The Grafana dashboard begins with the present state as numbers, a table of the LUNs, and heatmaps. Its panels do not overlap.
func TestGrafanaPanels(t *testing.T) {
	b, err := os.ReadFile(filepath.Join(docs, "grafana-dashboard.json"))
	if err != nil {
		t.Fatal(err)
	}
	var d struct {
		Panels []struct {
			ID          int
			Type, Title string
			GridPos     struct{ X, Y, W, H int }
			Datasource  struct{ UID string }
			Targets     []struct {
				Expr, Format string
				Instant      bool
			}
		}
	}
	if err := json.Unmarshal(b, &d); err != nil {
		t.Fatal(err)
	}
	ids, kinds, taken := map[int]bool{}, map[string]int{}, map[[2]int]string{}
	for _, p := range d.Panels {
		if ids[p.ID] {
			t.Errorf("%s: another panel has the ID %d", p.Title, p.ID)
		}
		ids[p.ID] = true
		kinds[p.Type]++
		g := p.GridPos
		if g.X < 0 || g.W < 1 || g.X+g.W > 24 {
			t.Errorf("%s is at %+v", p.Title, g)
		}
		for x := g.X; x < g.X+g.W; x++ {
			for y := g.Y; y < g.Y+g.H; y++ {
				if other := taken[[2]int{x, y}]; other != "" {
					t.Fatalf("%s and %s overlap", p.Title, other)
				}
				taken[[2]int{x, y}] = p.Title
			}
		}
		if p.Type == "row" {
			continue
		}
		if p.Datasource.UID != "${datasource}" || len(p.Targets) == 0 {
			t.Errorf("%s: data source %q, %d queries", p.Title, p.Datasource.UID, len(p.Targets))
		}
		for _, q := range p.Targets {
			now := p.Type == "stat" || p.Type == "table"
			format := map[string]string{"table": "table", "heatmap": "heatmap"}[p.Type]
			if q.Instant != now || q.Format != format || !strings.Contains(q.Expr, `instance=~"$instance"`) {
				t.Errorf("%s, a %s: %+v", p.Title, p.Type, q)
			}
		}
	}
	if kinds["stat"] < 8 || kinds["table"] < 1 || kinds["heatmap"] < 2 || kinds["timeseries"] < 20 {
		t.Errorf("the kinds of the panels are %v", kinds)
	}
	if first := d.Panels[1]; first.Type != "stat" || first.GridPos.Y != 1 {
		t.Errorf("the first panel is %s, a %s", first.Title, first.Type)
	}
}

// BenchmarkScrape scrapes 1,000 LUNs that are all in use over one transport.
func BenchmarkScrape(b *testing.B) {
	inv := lun.NewInventory()
	defer inv.Close()
	for id := range uint16(1000) {
		m, err := backend.OpenMemory(backend.MemoryConfig{Size: 1 << 20})
		if err != nil {
			b.Fatal(err)
		}
		u, err := lun.New(m, lun.Options{})
		if err == nil {
			err = inv.Add(id, u)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
	n := inv.NewNexus(lun.Port{InitiatorName: "iqn.2026-11.io.example:i", TargetName: "iqn.2026-11.io.example:a", TPGT: 1})
	var tally lun.Tally
	for id := range uint16(1000) {
		c := lun.Command{LUN: lun.EncodeLUN(id), CDB: make([]byte, 16)}
		n.Begin(&c)
		n.Count(&c, 0, false)
		tally.Count(n, &c, &lun.Spent{lun.PhaseReadWait: time.Millisecond})
	}
	tally.End()
	node := iscsi.NewNode(iscsi.Options{})
	if err := node.AddTarget(iscsi.TargetConfig{Name: "iqn.2026-11.io.example:a", LUNs: inv}); err != nil {
		b.Fatal(err)
	}
	h := Handler(node, rdma.NewDomain(), limits.New(), reports(func() map[string]time.Time { return nil }, IPsec{}))
	for b.Loop() {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
		lines := 0
		for line := range strings.Lines(w.Body.String()) {
			if !strings.HasPrefix(line, "#") {
				lines++
			}
		}
		b.ReportMetric(float64(lines), "series")
		b.ReportMetric(float64(w.Body.Len()), "bytes")
	}
}

// The number of series of a LUN has a bound, whatever its initiators do: 1,200 LUNs are not too many for Prometheus.
func TestSeriesOfALUNAreBounded(t *testing.T) {
	inv := lun.NewInventory()
	defer inv.Close()
	m, err := backend.OpenMemory(backend.MemoryConfig{Size: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	u, err := lun.New(m, lun.Options{})
	if err == nil {
		err = inv.Add(0, u)
	}
	if err != nil {
		t.Fatal(err)
	}
	var tally lun.Tally
	for tr := range lun.Transports {
		for i := range 20 { // nexuses: their number does not count
			n := inv.NewNexus(lun.Port{InitiatorName: fmt.Sprintf("iqn.2026-11.io.example:%d", i), TargetName: "iqn.2026-11.io.example:a", TPGT: 1})
			n.SetTransport(tr)
			for op := range 256 {
				c := lun.Command{CDB: make([]byte, 16)}
				c.CDB[0] = byte(op)
				n.Begin(&c)
				n.Count(&c, uint64(op)<<10, false)
				tally.Count(n, &c, &lun.Spent{time.Duration(op) * time.Millisecond, time.Second, time.Millisecond, time.Hour})
			}
		}
	}
	tally.End()
	node := iscsi.NewNode(iscsi.Options{})
	if err := node.AddTarget(iscsi.TargetConfig{Name: "iqn.2026-11.io.example:a", LUNs: inv}); err != nil {
		t.Fatal(err)
	}
	w := httptest.NewRecorder()
	Handler(node, rdma.NewDomain(), limits.New(), reports(func() map[string]time.Time { return nil }, IPsec{})).ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	durations, all := 0, 0
	for line := range strings.Lines(w.Body.String()) {
		if strings.HasPrefix(line, Prefix+"lun_command_duration_seconds") {
			durations++
		} else if strings.HasPrefix(line, Prefix+"lun_") {
			all++
		}
	}
	if durations != 91*int(lun.Transports) || all > 160 {
		t.Errorf("%d series of durations, want 91 for each transport; %d others, want at most 160", durations, all)
	}
}

// The thresholds of a LUN follow its space: reached, and no longer. A neighbor without thresholds has no series of them.
func TestSeriesOfThresholds(t *testing.T) {
	inv := lun.NewInventory()
	defer inv.Close()
	var stores [2]backend.Store
	var units [2]*lun.Unit
	for i := range units {
		m, err := backend.OpenMemory(backend.MemoryConfig{Size: 1 << 20})
		if err != nil {
			t.Fatal(err)
		}
		stores[i] = m
		if units[i], err = lun.New(m, lun.Options{Events: func(lun.Event) {}}); err == nil {
			err = inv.Add(uint16(i), units[i])
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	node := iscsi.NewNode(iscsi.Options{})
	if err := node.AddTarget(iscsi.TargetConfig{Name: "iqn.2026-11.io.example:a", LUNs: inv}); err != nil {
		t.Fatal(err)
	}
	units[0].SetThresholds(0, 128<<10)
	h := Handler(node, rdma.NewDomain(), limits.New(), reports(func() map[string]time.Time { return nil }, IPsec{}))
	series := func() (got []string) {
		for _, u := range units {
			u.SampleSpace()
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
		for line := range strings.Lines(w.Body.String()) {
			if strings.HasPrefix(line, Prefix+"lun_threshold_") || strings.HasPrefix(line, Prefix+"lun_space_used_bytes") {
				got = append(got, strings.TrimSpace(line))
			}
		}
		return got
	}
	want := func(used int64, reached int) {
		t.Helper()
		const of = `{lun="0",target="iqn.2026-11.io.example:a"`
		list := []string{
			fmt.Sprintf(`%slun_space_used_bytes%s} %d`, Prefix, of, used),
			fmt.Sprintf(`%slun_space_used_bytes%s} 0`, Prefix, strings.Replace(of, `lun="0"`, `lun="1"`, 1)),
			fmt.Sprintf(`%slun_threshold_bytes%s,threshold="used"} 131072`, Prefix, of),
			fmt.Sprintf(`%slun_threshold_reached%s,threshold="used"} %d`, Prefix, of, reached),
		}
		if got := series(); !slices.Equal(got, list) {
			t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(list, "\n"))
		}
	}
	want(0, 0)
	if err := stores[0].WriteAt(make([]byte, 1), 0); err != nil { // zeros take no memory
		t.Fatal(err)
	}
	want(0, 0)
	data := make([]byte, 192<<10)
	for i := range data {
		data[i] = 1
	}
	if err := stores[0].WriteAt(data, 0); err != nil {
		t.Fatal(err)
	}
	want(192<<10, 1)
	if err := stores[0].Discard(0, 1<<20); err != nil {
		t.Fatal(err)
	}
	want(0, 0)
}
