package daemon

import (
	"context"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"os/exec"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/rdma/wire"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// A scrape has the values of /metrics by name and labels.
type scrape map[string]float64

// scrape reads /metrics.
func (l *lab) scrape() scrape {
	l.t.Helper()
	r, err := http.Get(fmt.Sprintf("http://%v/metrics", l.side[config.KindMetrics].addr))
	if err != nil {
		l.t.Fatal(err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil || r.StatusCode != http.StatusOK {
		l.t.Fatalf("%s, %v: %s", r.Status, err, b)
	}
	s := scrape{}
	for line := range strings.Lines(string(b)) {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "#") {
			continue
		}
		at := strings.LastIndexByte(line, ' ')
		v, err := strconv.ParseFloat(line[at+1:], 64)
		if err != nil {
			l.t.Fatalf("%q: %v", line, err)
		}
		s[strings.TrimPrefix(line[:at], "iser_target_")] = v
	}
	return s
}

// with counts the series whose name and labels contain what.
func (s scrape) with(what string) (n int) {
	for k := range s {
		if strings.Contains(k, what) {
			n++
		}
	}
	return n
}

func (s scrape) want(t *testing.T, what map[string]float64) {
	t.Helper()
	for k, v := range what {
		if got, ok := s[k]; got != v || !ok {
			t.Errorf("%s is %v (there: %t), want %v", k, got, ok, v)
		}
	}
}

func metricsLab(t *testing.T) *lab {
	return newLab(t, func(l *lab) {
		l.more = `metrics: {listen: "127.0.0.1:0"}`
		l.initiators = fmt.Sprintf("%q", prefix+"h*")
		l.luns = `{id: 0, backend: memory, size: 4MiB}, {id: 7, backend: memory, size: 1MiB, read_only: true}`
	})
}

// The work of the initiators of a worked lab: commands, and bytes of each.
const writes, reads, size = 5, 7, 128 << 10

// A worked is a lab in which one initiator has worked over iSER and one over TCP, and two
// were refused.
type worked struct {
	*lab
	s      *initiator.Session // over iSER
	domain *rdma.Domain       // of its initiator, whose counts mirror those of the target
}

func newWorked(t *testing.T) *worked {
	t.Helper()
	l := metricsLab(t)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	domain := rdma.NewDomain() // of the initiator: its counts are ours, the other way round
	s, err := initiator.Login(ctx, l.addr(), initiator.Options{Name: prefix + "h1", Target: store, RDMA: rdma.Options{Domain: domain}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	attentions(t, s, 0) // one UNIT ATTENTION and a GOOD
	for i := range uint64(writes) {
		if got := do(t, s, &initiator.Command{CDB: cdb.Write16(i*256, 256), Out: make([]byte, size)}); got != "" {
			t.Fatal(got)
		}
	}
	for i := range uint64(reads) {
		if got := do(t, s, &initiator.Command{CDB: cdb.Read16(i*256, 256), In: make([]byte, size)}); got != "" {
			t.Fatal(got)
		}
	}
	// An underflow, an LBA out of range, and a LUN that is read only.
	if got := do(t, s, &initiator.Command{CDB: cdb.Read16(0, 1), In: make([]byte, 4096)}); got != "" {
		t.Fatal(got)
	}
	if got := do(t, s, &initiator.Command{CDB: cdb.Read16(1<<30, 1), In: make([]byte, 512)}); got != "5/21/00" {
		t.Fatal(got)
	}
	attentions(t, s, 7)
	if got := do(t, s, &initiator.Command{LUN: 7, CDB: cdb.Write16(0, 1), Out: make([]byte, 512)}); got != "7/27/00" {
		t.Fatal(got)
	}

	// Another initiator uses TCP, and two are refused.
	d, err := initiator.Dial(ctx, "tcp", l.addr(), initiator.Options{Name: prefix + "h2", Target: store})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	if err := d.LogIn(nil); err != nil {
		t.Fatal(err)
	}
	read := cdb.Read16(0, 8)
	if status, _, _, err := d.Do([8]byte{}, read[:], nil, 4096); status != 0 || err != nil { // which is sent again after a unit attention
		t.Fatal(status, err)
	}
	if _, err := l.tryLogin("other", store); err == nil {
		t.Fatal("an initiator that may not log in did")
	}
	if _, err := l.tryLogin("h3", prefix+"none"); err == nil {
		t.Fatal("there is no such target")
	}
	return &worked{l, s, domain}
}

// session returns the labels of the session over iSER, and op.
func (w *worked) session(op string) string {
	return fmt.Sprintf(`{initiator="%sh1",%starget="%s",transport="iser",tsih="%d"}`, prefix, op, store, w.s.TSIH)
}

// lun returns the labels of a LUN, and more.
func (w *worked) lun(id int, transport, more string) string {
	return fmt.Sprintf(`{lun="%d",%starget="%s",transport="%s"}`, id, more, store, transport)
}

// Errors of the store are apart by what the command did, and a neighbor of the LUN has none.
func TestMediumErrorMetrics(t *testing.T) {
	l := newLab(t, func(l *lab) {
		l.more = `metrics: {listen: "127.0.0.1:0"}`
		l.luns += ", {id: 1, backend: memory, size: 1MiB}"
	})
	s := l.login("host1", store)
	for id := range byte(2) {
		attentions(t, s, id)
	}
	if err := l.SetFaults(t.Context(), store, 0, schema.Faults{ReadError: 1, WriteError: 1}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []*initiator.Command{
		{CDB: cdb.Read16(0, 1), In: make([]byte, 512)}, {CDB: cdb.Write16(0, 1), Out: make([]byte, 512)}, {CDB: cdb.Write16(1, 1), Out: make([]byte, 512)},
		{LUN: 1, CDB: cdb.Read16(0, 1), In: make([]byte, 512)},
	} {
		if err := s.Do(c); err != nil || c.Status != 2*(1-c.LUN) {
			t.Errorf("LUN %d: status %#x, %v", c.LUN, c.Status, err)
		}
	}
	of := func(id int, op string) string {
		return fmt.Sprintf(`lun_medium_errors_total{lun="%d",op="%s",target="%s",transport="iser"}`, id, op, store)
	}
	l.scrape().want(t, map[string]float64{of(0, "read"): 1, of(0, "write"): 2, of(0, "other"): 0, of(1, "read"): 0, of(1, "write"): 0})
}

// promtool finds nothing against the names, types and texts of the metrics.
func TestMetricsByPromtool(t *testing.T) {
	promtool, err := exec.LookPath("promtool")
	if err != nil {
		backendtest.Unavailable(t, "%v (tests/interop/setup.sh installs it)", err)
	}
	w := newWorked(t)
	r, err := http.Get(fmt.Sprintf("http://%v/metrics", w.side[config.KindMetrics].addr))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	check := exec.CommandContext(t.Context(), promtool, "check", "metrics")
	check.Stdin = r.Body
	if out, err := check.CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("%v\n%s", err, out)
	}
}

// The metrics agree with the work of the initiators.
func TestMetricsAddUp(t *testing.T) {
	w := newWorked(t)
	const last = `command_size_bytes_sum{op="read",transport="tcp"}` // counts when TCP has taken the answer
	testkit.Eventually(t, "connections that were refused are gone, and the last command counts", func() bool {
		return w.Node().Stats().Connections == 2 && w.scrape()[last] > 0
	})
	got := w.scrape()
	got.want(t, map[string]float64{
		`lun_commands_total` + w.lun(0, "iser", `op="write",`):                          writes,
		`lun_commands_total` + w.lun(0, "iser", `op="read",`):                           reads + 2,
		`lun_commands_total` + w.lun(0, "iser", `op="other",`):                          2,
		`lun_bytes_total` + w.lun(0, "iser", `op="write",`):                             writes * size,
		`lun_bytes_total` + w.lun(0, "iser", `op="read",`):                              reads*size + 512,
		`lun_residuals_total` + w.lun(0, "iser", `residual="underflow",`):               2,
		`lun_residuals_total` + w.lun(0, "iser", `residual="overflow",`):                0,
		`lun_errors_total` + w.lun(0, "iser", `op="read",sense_key="illegal_request",`): 1,
		`lun_errors_total` + w.lun(0, "iser", `op="other",sense_key="unit_attention",`): 1,
		`lun_errors_total` + w.lun(0, "iser", `op="write",sense_key="medium_error",`):   0,
		`lun_errors_total` + w.lun(7, "iser", `op="write",sense_key="data_protect",`):   1,
		`lun_commands_in_flight` + w.lun(0, "iser", ""):                                 0,
		`lun_commands_aborted_total` + w.lun(0, "iser", ""):                             0,
		`lun_commands_total` + w.lun(0, "tcp", `op="read",`):                            2,
		`lun_bytes_total` + w.lun(0, "tcp", `op="read",`):                               4096,
		`lun_ready{lun="0",target="` + store + `"}`:                                     1,
		`lun_size_bytes{lun="0",target="` + store + `"}`:                                4 << 20,
		`session_commands_total` + w.session(`op="write",`):                             writes + 1,
		`session_commands_total` + w.session(`op="read",`):                              reads + 2,
		`session_bytes_total` + w.session(`op="write",`):                                writes * size,
		`session_bytes_total` + w.session(`op="read",`):                                 reads*size + 512,
		`session_errors_total` + w.session(`op="write",`):                               1,
		`session_errors_total` + w.session(`op="read",`):                                1,
		`session_errors_total` + w.session(`op="other",`):                               0, // unit attentions do not count
		`command_size_bytes_sum{op="write",transport="iser"}`:                           writes * size,
		last: 4096,
		`command_size_bytes_count{op="write",transport="iser"}`:        writes,
		`session_residuals_total` + w.session(`residual="underflow",`): 3, // of LUN 7, too
		`session_residuals_total` + w.session(`residual="overflow",`):  0,
		`session_connections` + w.session(""):                          1,
		`session_tasks` + w.session(""):                                0,
		`sessions{target="` + store + `",transport="iser"}`:            1,
		`sessions{target="` + store + `",transport="tcp"}`:             1,
		`discovery_sessions`:                                           0,
		`connections`:                                                  2,
		`logins_accepted_total{transport="iser"}`:                      1,
		`logins_accepted_total{transport="tcp"}`:                       1,
		refused(pdu.LoginAuthorization):                                1,
		refused(pdu.LoginNotFound):                                     1,
		`rdma_streams`:                                                 2, // both ends are here
		`rdma_crc_errors_total`:                                        0,
		`rdma_stag_faults_total`:                                       0,
	})
	if used, limit := got["buffer_bytes"], got["buffer_limit_bytes"]; used > limit || limit != 2*64<<20 {
		t.Errorf("%v of %v octets of buffers", used, limit)
	}
}

// commands is the number of commands over iSER.
const commands = reads + 2 + writes + 1 + 4

// duration names the number of commands in the histogram of a phase except the total.
func duration(phase, transport string) string {
	return fmt.Sprintf(`command_duration_seconds_count{op="all",phase="%s",transport="%s"}`, phase, transport)
}

// counted waits until the histograms have all commands, and returns a scrape. An initiator
// can get a response before it is counted.
func (w *worked) counted(t *testing.T) (got scrape) {
	t.Helper()
	testkit.Eventually(t, "all responses have left", func() bool {
		got = w.scrape()
		return got[duration("send", "iser")] == commands && got[duration("send", "tcp")] == 2
	})
	return got
}

// The histograms have each command in each of its phases. Only the WRITEs of 128 KiB were in
// read_wait.
func TestLatenciesHaveEachCommand(t *testing.T) {
	w := newWorked(t)
	got := w.counted(t)
	got.want(t, map[string]float64{
		duration("receive", "iser"):   commands,
		duration("backend", "iser"):   commands,
		duration("read_wait", "iser"): writes,
		duration("send", "iser"):      commands,
		duration("read_wait", "tcp"):  0,
		`command_duration_seconds_bucket{op="all",phase="send",transport="iser",le="+Inf"}`:    commands,
		`lun_command_duration_seconds_count` + w.lun(0, "iser", `op="write",phase="total",`):   writes,
		`lun_command_duration_seconds_count` + w.lun(0, "iser", `op="read",phase="total",`):    reads + 2,
		`lun_command_duration_seconds_count` + w.lun(0, "iser", `op="other",phase="total",`):   2,
		`lun_command_duration_seconds_count` + w.lun(0, "iser", `op="all",phase="read_wait",`): writes,
		`lun_command_duration_seconds_count` + w.lun(0, "tcp", `op="read",phase="total",`):     2,
		`lun_command_duration_seconds_count` + w.lun(7, "iser", `op="other",phase="total",`):   2,
		`session_command_duration_seconds_count` + w.session(`op="read",phase="total",`):       reads + 2,
		`session_command_duration_seconds_count` + w.session(`op="all",phase="read_wait",`):    writes,
	})
	if a, b := got.with(`session_command_duration_seconds`), 13*7+13*4; a != b {
		t.Errorf("%d series of the latencies of sessions, want %d", a, b)
	}
	if a, b := got.with(`lun_command_duration_seconds`), (13*7 + 13*4 + 13*5); a != b {
		t.Errorf("%d series of the latencies of LUNs, want %d", a, b)
	}
}

// State agrees with the work of the initiators.
func TestStateAddsUp(t *testing.T) {
	w := newWorked(t)
	w.counted(t)
	st := w.State()
	counters := func(c schema.CounterState) schema.CounterState {
		sum := 0.0
		for _, p := range c.Latency {
			want, in := c.Reads+c.Writes+c.Others, uint64(0)
			for _, n := range p.Buckets {
				in += n
			}
			if p.Phase == "read_wait" {
				want = writes
			}
			if p.Count != want || in != want || len(p.Buckets) > len(st.LatencyBounds)+1 || p.P50 > p.P99 || p.Seconds <= 0 && p.Phase != "receive" {
				t.Errorf("of %d commands %+v", want, p)
			}
			if sum += p.Seconds; p.Phase == "total" && math.Abs(sum-2*p.Seconds) > 1e-6 {
				t.Errorf("%v in all, %v in the phases", p.Seconds, sum-p.Seconds)
			}
		}
		if len(c.Latency) != 5 {
			t.Errorf("latencies %+v", c.Latency)
		}
		for op, want := range map[string][2]uint64{"read": {c.Reads, c.ReadBytes}, "write": {c.Writes, c.WriteBytes}, "other": {c.Others}} {
			o, sized, least := c.Operation(op), uint64(0), uint64(0)
			sum -= 2 * o.Seconds
			for i, n := range o.Sizes {
				sized += n
				if i > 0 {
					least += n * uint64(schema.SizeBound(i-1))
				}
			}
			if o.Count != want[0] || sized > o.Count || least > want[1] || 2*least+512*sized < want[1] || o.P50 > o.P99 {
				t.Errorf("of %d commands with %d bytes: %+v", want[0], want[1], o)
			}
		}
		if math.Abs(sum) > 1e-6 {
			t.Errorf("the operations took %v s less than all commands", sum/2)
		}
		c.Latency, c.Operations = nil, nil
		return c
	}
	if got, want := counters(st.Targets[0].LUNs[0].Counters), (schema.CounterState{
		Reads: reads + 4, Writes: writes, Others: 2, ReadBytes: reads*size + 512 + 4096, WriteBytes: writes * size, Errors: 1, Residuals: 3,
	}); !reflect.DeepEqual(got, want) {
		t.Errorf("LUN 0: %+v, want %+v", got, want)
	}
	i := slices.IndexFunc(st.Sessions, func(i schema.SessionState) bool { return i.TSIH == w.s.TSIH })
	if got, want := counters(st.Sessions[i].Counters), (schema.CounterState{
		Reads: reads + 2, Writes: writes + 1, Others: 4, ReadBytes: reads*size + 512, WriteBytes: writes * size, Errors: 2, Residuals: 3,
	}); !reflect.DeepEqual(got, want) {
		t.Errorf("session: %+v, want %+v", got, want)
	}
}

// The RDMA metrics agree with the counts of the initiator. The refused iSER logins had
// streams of their own, without RDMA.
func TestRDMAMetricsAddUp(t *testing.T) {
	w := newWorked(t)
	got := w.counted(t)
	n := w.domain.Counts()
	got.want(t, map[string]float64{
		`rdma_messages_total{direction="sent",op="write"}`:             float64(n.Received.Writes),
		`rdma_messages_total{direction="sent",op="read_request"}`:      float64(n.Received.ReadRequests),
		`rdma_messages_total{direction="received",op="read_response"}`: float64(n.Sent.ReadResponses),
		`rdma_invalidations_total{direction="sent"}`:                   float64(n.Received.Invalidations),
	})
	if n.Received.Writes < reads || n.Received.ReadRequests < writes || n.Received.Invalidations == 0 || n.Received.FPDUs == 0 || n.Sent.FPDUs == 0 {
		t.Errorf("the initiator counts %+v", n)
	}
}

// An STag that is not valid is counted, and ends the session.
func TestSTagFaultIsCounted(t *testing.T) {
	w := newWorked(t)
	rc := w.s.Stream()
	bad := rdma.WorkRequest{Op: rdma.Write, STag: 0x12345678, Data: make([]byte, 8)}
	if err := rc.Post(&bad); err != nil {
		t.Fatal(err)
	}
	rc.Flush()
	<-w.s.Done()
	testkit.Eventually(t, "the session is over", func() bool { return w.scrape().with(w.session("")) == 0 })
	code := wire.ReasonInvalidSTag
	w.scrape().want(t, map[string]float64{
		`rdma_stag_faults_total`: 1,
		fmt.Sprintf(`rdma_terminates_total{code="1/1/00",direction="sent",reason="%s"}`, code.Text()): 1,
		`sessions{target="` + store + `",transport="iser"}`:                                           0,
		`sessions_finished_total`:                           1,
		`lun_bytes_total` + w.lun(0, "iser", `op="write",`): writes * size,
	})
}

func refused(s pdu.LoginStatus) string {
	return fmt.Sprintf(`logins_refused_total{stage="operational",status="%v",transport="iser"}`, s)
}

// The metrics of a session end with it, so that scrapes do not grow.
func TestMetricsOfSessionsEnd(t *testing.T) {
	l := metricsLab(t)
	churn := func(name string) {
		s := l.login(name, store)
		testUnitReady(t, s, 0)
		if n := l.scrape().with(prefix + name); n == 0 {
			t.Errorf("session of %s has no series", name)
		}
		if err := s.Logout(t.Context()); err != nil {
			t.Fatal(err)
		}
		s.Close()
		testkit.Eventually(t, "the session is gone", func() bool { return l.Node().Stats().Sessions == 0 })
	}
	churn("h0")
	before := l.scrape()
	for i := range 20 {
		churn(fmt.Sprintf("h%d", i+1))
	}
	after := l.scrape()
	if n := after.with("initiator="); n != 0 {
		t.Errorf("%d series of sessions that have ended", n)
	}
	if a, b := before.with("lun_")+before.with("logins_"), after.with("lun_")+after.with("logins_"); a != b {
		t.Errorf("%d series after 21 sessions, %d after one", b, a)
	}
	after.want(t, map[string]float64{"sessions_finished_total": 21, `logins_accepted_total{transport="iser"}`: 21})
}

// Under load, counters never decrease, and the address of the server can change.
func TestMetricsUnderLoad(t *testing.T) {
	l := metricsLab(t)
	load(t, l.login("h1", store))
	last := l.scrape()
	for range 20 {
		next := l.scrape()
		for k, v := range last {
			if strings.Contains(k, "_total") && next[k] < v {
				t.Errorf("%s fell from %v to %v", k, v, next[k])
			}
		}
		for k, v := range next {
			if strings.Contains(k, "in_flight") && (v < 0 || v > 4) {
				t.Errorf("%s is %v", k, v)
			}
		}
		last = next
	}
	if v := last[`lun_bytes_total{lun="0",op="write",target="`+store+`",transport="iser"}`]; v == 0 {
		t.Error("no load was counted")
	}
	l.more = ""
	l.ok(ChangeOptions{})
	if _, err := http.Get(fmt.Sprintf("http://%v/metrics", l.side[config.KindMetrics].addr)); err == nil {
		t.Error("metrics are served although the configuration has none")
	}
	l.more = `metrics: {listen: "127.0.0.1:0"}`
	l.ok(ChangeOptions{})
	l.scrape()
}

// Silent connections do not keep Prometheus out.
func TestMetricsConnectionsAreLimited(t *testing.T) {
	l := metricsLab(t)
	for range 2 * metricsConnections {
		c, err := net.Dial("tcp", l.side[config.KindMetrics].addr.String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	c := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 20 * time.Second}
	rsp, err := c.Get("http://" + l.side[config.KindMetrics].addr.String() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer rsp.Body.Close()
	if b, err := io.ReadAll(rsp.Body); err != nil || rsp.StatusCode != http.StatusOK || !strings.Contains(string(b), "iser_target_sessions") {
		t.Errorf("status %s, %d bytes, %v", rsp.Status, len(b), err)
	}
}
