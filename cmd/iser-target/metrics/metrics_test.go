package metrics

import (
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
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

// An idle target can be scraped, and its metrics are consistent: Gather fails for duplicates
// and for metrics that are not described.
func TestIdleTargetCanBeScraped(t *testing.T) {
	node := iscsi.NewNode(iscsi.Options{})
	if err := node.AddTarget(iscsi.TargetConfig{Name: "iqn.2026-11.io.example:a", LUNs: lun.NewInventory()}); err != nil {
		t.Fatal(err)
	}
	r := prometheus.NewPedanticRegistry()
	if err := r.Register(&collector{node, rdma.NewDomain(), limits.New(), func() map[string]time.Time {
		return map[string]time.Time{"control.tls.cert": time.Now()}
	}, func() IPsec {
		return IPsec{Up: true, Sessions: map[string]int{"none": 1, "esp-tunnel aes128gcm16": 1}, Denials: map[[2]string]uint64{{"accept", "clear"}: 1}}
	}}); err != nil {
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
	for id := range uint16(1000) {
		c := lun.Command{LUN: lun.EncodeLUN(id), CDB: make([]byte, 16)}
		n.Begin(&c)
		n.Count(&c, 0, false)
		n.CountSpent(&c, &lun.Spent{lun.PhaseReadWait: time.Millisecond})
	}
	node := iscsi.NewNode(iscsi.Options{})
	if err := node.AddTarget(iscsi.TargetConfig{Name: "iqn.2026-11.io.example:a", LUNs: inv}); err != nil {
		b.Fatal(err)
	}
	h := Handler(node, rdma.NewDomain(), limits.New(), func() map[string]time.Time { return nil }, func() IPsec { return IPsec{} })
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
