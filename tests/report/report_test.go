package main

import (
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/fio"
	"github.com/iser-target/iser-target/tests/testkit/ports"
)

var (
	oursTCP  = column{ours, "TCP"}
	oursISER = column{ours, "iSER"}
	lioTCP   = column{"LIO", "TCP"}
	lioISER  = column{"LIO", "iSER"}
	tgtTCP   = column{"tgt", "TCP"}
)

func TestSum(t *testing.T) {
	for _, tt := range []struct {
		values []float64
		want   spread
	}{
		{[]float64{5}, spread{5, 5, 5, 1}},
		{[]float64{30, 10, 20}, spread{20, 10, 30, 3}},
		{[]float64{40, 10, 20, 30}, spread{25, 10, 40, 4}},
	} {
		if got := sum(tt.values); got != tt.want {
			t.Errorf("%v: got %+v, want %+v", tt.values, got, tt.want)
		}
	}
}

// example returns a table of two rounds and two jobs. tgt fails in both rounds, and LIO over iSER in one.
func example() *table {
	t := newTable(2, []column{oursTCP, lioTCP, tgtTCP, oursISER, lioISER}, []job{{"read", "4 KiB", false}, {"long", "128 KiB", true}})
	add := func(round int, c column, iops, bytes float64) {
		t.add(round, c, map[string]fio.Result{"read": {IOPS: iops, Bytes: 1}, "long": {IOPS: 1, Bytes: bytes}}, nil, nil)
	}
	add(0, oursTCP, 100, 10e6)
	add(1, oursTCP, 300, 30e6)
	add(0, lioTCP, 50, 20e6)
	add(1, lioTCP, 100, 20e6)
	add(0, oursISER, 400, 40e6)
	add(1, oursISER, 600, 60e6)
	add(0, lioISER, 100, 10e6)
	t.add(1, lioISER, map[string]fio.Result{"read": {IOPS: 200}}, map[string]error{"long": errors.New("fio reports error 5")}, errors.New("exit status 1"))
	t.add(0, tgtTCP, nil, nil, errors.New("tgt did not start: <script>alert(1)</script> | pipes & more"))
	t.add(1, tgtTCP, nil, nil, errors.New("not tried after round 1"))
	return t
}

func TestTable(t *testing.T) {
	x := example()
	read, long := x.jobs[0], x.jobs[1]
	if s, ok := x.spread(read, oursTCP); !ok || s != (spread{200, 100, 300, 2}) {
		t.Errorf("IOPS: %+v, %v", s, ok)
	}
	if s, ok := x.spread(long, oursTCP); !ok || s != (spread{20, 10, 30, 2}) {
		t.Errorf("MB/s: %+v, %v", s, ok)
	}
	if s, ok := x.spread(read, tgtTCP); ok {
		t.Errorf("tgt has %+v", s)
	}
	// 200 / 75, and 2 and 3 in the rounds.
	if s, ok := x.ratio(read, oursTCP, lioTCP); !ok || math.Abs(s.Median-200.0/75) > 1e-9 || s.Min != 2 || s.Max != 3 {
		t.Errorf("ratio: %+v, %v", s, ok)
	}
	// Only round 0 has both.
	if s, ok := x.ratio(long, oursISER, lioISER); !ok || s.Rounds != 1 || s.Min != 4 {
		t.Errorf("ratio of one round: %+v, %v", s, ok)
	}
	if s, ok := x.ratio(read, oursTCP, tgtTCP); ok {
		t.Errorf("ratio to tgt: %+v", s)
	}
	if got, want := x.pairs(), [][2]column{{oursTCP, lioTCP}, {oursTCP, tgtTCP}, {oursISER, oursTCP}, {oursISER, lioISER}}; !reflect.DeepEqual(got, want) {
		t.Errorf("pairs: %v, want %v", got, want)
	}
	want := []gap{
		{tgtTCP, []string{"read", "long"}, 2, []string{"round 1: tgt did not start: <script>alert(1)</script> | pipes & more", "round 2: not tried after round 1"}},
		{lioISER, []string{"long"}, 1, []string{"round 2: fio reports error 5"}},
	}
	if got := x.missing(); !reflect.DeepEqual(got, want) {
		t.Errorf("missing: %v, want %v", got, want)
	}
}

// A job that neither has a result nor failed is a gap, too.
func TestSilentHole(t *testing.T) {
	x := newTable(1, []column{oursTCP}, []job{{"a", "", false}, {"b", "", false}})
	x.add(0, oursTCP, map[string]fio.Result{"a": {IOPS: 1}}, nil, nil)
	if got := x.missing(); len(got) != 1 || got[0].Names() != "b" || !reflect.DeepEqual(got[0].Reasons, []string{"round 1: fio printed no result"}) {
		t.Errorf("%+v", got)
	}
}

func rendered(t *testing.T) (html, md string) {
	t.Helper()
	r := &report{Title: "A & B", Busy: "busy & slow", Command: "make report REPORT_TARGETS='x=<y>'", Facts: []fact{{"Machine", "<b>2</b> CPUs | more"}}}
	r.Parts = []part{newPart("One", []string{"A note <i>."}, example(), nil), newPart("Two", nil, nil, errors.New("no <machine>"))}
	b, err := r.html()
	if err != nil {
		t.Fatal(err)
	}
	return string(b), r.markdown("page.html")
}

// The page is well-formed, has no scripts and nothing from elsewhere, and names each gap.
func TestHTML(t *testing.T) {
	html, _ := rendered(t)
	for _, banned := range []string{"<script", "<b>2", "<i>", "<y>", "no <machine>", "src=", "href=", "url(", "@import"} {
		if strings.Contains(html, banned) {
			t.Errorf("the page has %q", banned)
		}
	}
	for _, want := range []string{"A &amp; B", "<strong>busy &amp; slow</strong>", "x=&lt;y&gt;", "&lt;script&gt;alert(1)&lt;/script&gt; | pipes &amp; more", "round 2: fio reports error 5", "no &lt;machine&gt;",
		"200 (100–300)", "2.67 (2.00–3.00)", "not measured, see below", "<td>iser-target, TCP / LIO, TCP", "A note &lt;i&gt;."} {
		if !strings.Contains(html, strings.Replace(want, "<td>iser-target", "<th>iser-target", 1)) {
			t.Errorf("the page lacks %q", want)
		}
	}
	d := xml.NewDecoder(strings.NewReader(html))
	d.Strict, d.AutoClose, d.Entity = false, []string{"meta", "br"}, xml.HTMLEntity
	elements := map[string]int{}
	for {
		token, err := d.Token()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if e, ok := token.(xml.StartElement); ok {
			elements[e.Name.Local]++
		}
	}
	// Ten cells, two of which have no value at all.
	if elements["svg"] != 2 || elements["rect"] != 8 || elements["line"] != 8 {
		t.Errorf("%v", elements)
	}
}

func TestMarkdown(t *testing.T) {
	_, md := rendered(t)
	for _, want := range []string{
		"```\nmake report REPORT_TARGETS='x=<y>'\n```\n",
		`| Machine | &lt;b>2&lt;/b> CPUs \| more |`,
		"**busy & slow**\n",
		"| read | IOPS | 200 (100–300) | 75.0 (50.0–100) | not measured | 500 (400–600) | 150 (100–200) |\n",
		"| long | MB/s | 20.0 (10.0–30.0) | 20.0 (20.0–20.0) | not measured | 50.0 (40.0–60.0) | 10.0 (10.0–10.0) |\n",
		"| read | 2.67 (2.00–3.00) | – | 2.50 (2.00–4.00) | 3.33 (3.00–4.00) |\n",
		`| tgt, TCP | read, long | 2 | round 1: tgt did not start: &lt;script>alert(1)&lt;/script> \| pipes & more; round 2: not tried after round 1 |`,
		"| LIO, iSER | long | 1 | round 2: fio reports error 5 |\n",
		"**Not measured.** The reason:\n\n```\nno <machine>\n```\n",
	} {
		if !strings.Contains(md, want) {
			t.Errorf("the summary lacks %q:\n%s", want, md)
		}
	}
}

func TestNumber(t *testing.T) {
	for v, want := range map[float64]string{0.123: "0.12", 9.876: "9.88", 10: "10.0", 99.94: "99.9", 100: "100", 123456.7: "123457"} {
		if got := number(v); got != want {
			t.Errorf("%v: got %s, want %s", v, got, want)
		}
	}
}

func TestParseTargets(t *testing.T) {
	list, err := parseTargets(" spdk=iscsi://192.0.2.7:3260/iqn.2016-06.io.spdk:disk1/0#pid=4711  spdk=iser://[2001:db8::1]:3260/iqn.x/1", true)
	want := []hostColumn{
		{column: column{"spdk", "TCP"}, url: "iscsi://192.0.2.7:3260/iqn.2016-06.io.spdk:disk1/0", overwrite: true, pid: 4711},
		{column: column{"spdk", "iSER"}, url: "iser://[2001:db8::1]:3260/iqn.x/1", overwrite: true},
	}
	if err != nil || !reflect.DeepEqual(list, want) {
		t.Errorf("got %+v, %v", list, err)
	}
	for s, want := range map[string]string{
		"spdk":                                "is not NAME=URL",
		"=iscsi://h/i/0":                      "is not NAME=URL",
		"a'b=iscsi://h/i/0":                   "is not NAME=URL",
		"a=http://h/i/0":                      `"http://h/i/0" is not iscsi://`,
		"a=iscsi:///i/0":                      "is not iscsi://",
		"a=iscsi://h:x/i/0":                   "invalid port",
		"tgt=iscsi://h/i/0":                   "tgt, TCP is in the report already",
		"iser-target=iser://h/i/0":            "iser-target, iSER is in the report already",
		"a=iscsi://h/i/0 a=iscsi://other/i/0": "a, TCP is in the report already",
		"a=iscsi://h/i/0#pid=x":               `a: "pid=x" is not pid=PID`,
		"a=iscsi://h/i/0#pid=1":               "is not pid=PID",
		"a=iscsi://h/i/0#4711":                "is not pid=PID",
	} {
		if _, err := parseTargets(s, false); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v, want %q", s, err, want)
		}
	}
}

// A process of -targets runs only while its target is measured.
func TestFreeze(t *testing.T) {
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer cmd.Process.Kill()
	stat, during := fmt.Sprintf("/proc/%d/stat", cmd.Process.Pid), filepath.Join(t.TempDir(), "stat")
	stopped := func(file string) bool {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Contains(string(b), "(sleep) T ")
	}
	list := []hostColumn{{}, {pid: cmd.Process.Pid, prefix: []string{"sh", "-c", "cat " + stat + " >" + during + "; exit 1"}}}
	if err := freeze(list); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "it has stopped", func() bool { return stopped(stat) })
	if _, err := list[1].measure(context.Background(), &options{program: "true"}, "", false); err == nil || stopped(during) {
		t.Errorf("measured while it was stopped: %v", err)
	}
	testkit.Eventually(t, "it has stopped again", func() bool { return stopped(stat) })
	if err := thaw(list); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "it continues", func() bool { return !stopped(stat) })
	cmd.Process.Kill()
	cmd.Wait()
	if err := freeze(list); err == nil || !strings.Contains(err.Error(), "process") {
		t.Errorf("freeze of a dead process: %v", err)
	}
}

func TestCommand(t *testing.T) {
	o := &options{rounds: 5, runtime: 3 * time.Second, overwrite: true}
	if got, want := command(o, " a=iscsi://h/i/0   b=iser://h/i/1 "),
		"make report REPORT_ROUNDS=5 REPORT_RUNTIME=3s REPORT_TARGETS='a=iscsi://h/i/0 b=iser://h/i/1' REPORT_OVERWRITE=1"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// The jobs of the examples have rows that describe them.
func TestRows(t *testing.T) {
	jobs, err := fio.Load("../../examples/fio", time.Second, 0)
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]job{}
	for _, r := range rows(jobs) {
		found[r.Name] = r
	}
	for _, want := range []job{
		{"mixed-70-30", "rw=randrw, rwmixread=70, bs=8k, iodepth=16, numjobs=4", false},
		{"write-128k", "rw=write, bs=128k, iodepth=16", true},
		{"log", "rw=write, bs=8k, fdatasync=1, ioengine=sync", false},
	} {
		if found[want.Name] != want {
			t.Errorf("got %+v, want %+v", found[want.Name], want)
		}
	}
}

// Both targets of the second part, and two that others named: one that must not be overwritten, and one that is not reachable.
func TestHost(t *testing.T) {
	if testing.Short() {
		t.Skip("builds and measures: not with -short")
	}
	program := filepath.Join(t.TempDir(), "iser-target")
	if out, err := exec.Command("go", "build", "-o", program, "../../cmd/iser-target").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	o := &options{rounds: 1, runtime: time.Second, program: program, progress: t.Logf}
	columns, stop := startOurs(context.Background(), o, t.TempDir())
	defer stop()
	if columns[0].failed != nil {
		t.Fatal(columns[0].failed)
	}
	port, err := ports.Free()
	if err != nil {
		t.Fatal(err)
	}
	o.others, err = parseTargets("other="+columns[0].url+fmt.Sprintf(" gone=iscsi://127.0.0.1:%d/%s/0", port, hostIQN), false)
	if err != nil {
		t.Fatal(err)
	}
	x, err := measureHost(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	_, noTgt := exec.LookPath("tgtd")
	for _, c := range x.columns {
		for i, j := range x.jobs {
			s, ok := x.spread(j, c)
			reasons := strings.Join(x.cells[j.Name][c].reasons, "; ")
			why := ""
			switch {
			case c.Target == "gone" && hostJobs[i].writes:
				why = "not allowed to overwrite"
			case c.Target == "gone":
				why = "connection refused"
			case c.Target == "other" && hostJobs[i].writes:
				why = "not allowed to overwrite"
			case c.Target == "tgt" && noTgt != nil:
				why = "it did not start"
			}
			if ok != (why == "") || !strings.Contains(reasons, why) || ok && s.Median <= 0 {
				t.Errorf("%v, %s: %+v, %v, reasons %q; want %q", c, j.Name, s, ok, reasons, why)
			}
		}
	}
}

// Each experiment has a job and a variant to compare with, and settings that the target accepts.
func TestExperiments(t *testing.T) {
	for _, e := range experiments {
		if len(e.jobs) == 0 || len(e.variants) < 2 {
			t.Errorf("%s: %d jobs, %d variants", e.name, len(e.jobs), len(e.variants))
		}
		for i, v := range e.variants {
			dir := filepath.Join(t.TempDir(), e.name)
			if err := v.write(dir, "127.0.0.1", 3260); err != nil {
				t.Fatal(err)
			}
			if _, err := config.Load(filepath.Join(dir, "config.yaml")); err != nil {
				t.Errorf("%s, variant %d: %v", e.name, i, err)
			}
		}
	}
	if err := tuning(context.Background(), io.Discard, &options{}, []string{"depth", "width"}); err == nil ||
		!strings.HasPrefix(err.Error(), "-tuning: depth,width: the experiments are depth,window,") {
		t.Errorf("an unknown name: %v", err)
	}
}

// The name is one that the kernel has, without a zero at its end.
func TestCongestion(t *testing.T) {
	b, err := os.ReadFile("/proc/sys/net/ipv4/tcp_available_congestion_control")
	if err != nil {
		t.Fatal(err)
	}
	if name := congestion(); !slices.Contains(strings.Fields(string(b)), name) {
		t.Errorf("%q is none of %s", name, b)
	}
}

// Both ends of a cable get the congestion control of the variant, whatever the kernel allows namespaces to set.
func TestCableCongestion(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root makes network namespaces")
	}
	ctx := t.Context()
	network, err := newCables(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := network.remove(); err != nil {
			t.Error(err)
		}
	}()
	for _, name := range []string{"reno", "cubic"} {
		if err := network.set(ctx, &cable{mtu: 1500, offload: true, congestion: name}); err != nil {
			t.Fatal(err)
		}
		for namespace, to := range map[string]string{network.target: cableInitiator, network.initiator: cableTarget} {
			out, err := output(ctx, "ip", "-n", namespace, "route", "get", to)
			if err != nil || !strings.Contains(string(out), " congctl "+name+" ") {
				t.Errorf("route to %s: %v: %s", to, err, out)
			}
		}
	}
	if err := network.set(ctx, &cable{mtu: 1500, offload: true, congestion: "nonesuch"}); err == nil {
		t.Error("an unknown congestion control is no error")
	}
}

// The files of a variant with a file system of its own are there, and unmount leaves an empty directory.
func TestMountImage(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root mounts file systems")
	}
	dir := t.TempDir()
	unmount, err := mountImage(t.Context(), dir, "ext4")
	if err != nil {
		t.Fatal(err)
	}
	var fs unix.Statfs_t
	files := (&variant{fs: "ext4"}).files(dir)
	if err := unix.Statfs(files, &fs); err != nil || fs.Type != unix.EXT4_SUPER_MAGIC {
		t.Errorf("%v, the file system is of type %x", err, fs.Type)
	}
	if err := os.WriteFile(filepath.Join(files, "disk0"), make([]byte, 4096), 0o600); err != nil {
		t.Error(err)
	}
	if err := unmount(); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(files); err != nil || len(left) > 0 {
		t.Errorf("after unmount: %v, %v", err, left)
	}
	if _, err := mountImage(t.Context(), t.TempDir(), "nonesuch"); err == nil {
		t.Error("an unknown file system is no error")
	}
}

func TestVariants(t *testing.T) {
	x := newTable(2, []column{{"one", ""}, {"two", ""}, {"three", ""}}, []job{{"read", "", false}})
	for round, v := range []float64{100, 200} {
		x.set(round, x.columns[0], x.jobs[0], fio.Result{IOPS: v}, nil)
		x.set(round, x.columns[1], x.jobs[0], fio.Result{IOPS: 3 * v}, nil)
		x.set(round, x.columns[2], x.jobs[0], fio.Result{}, errors.New("a | b"))
	}
	want := `| | read, IOPS |
|---|---|
| one | 150 (100–200) |
| two | 450 (300–600), × 3.00 |
| three | not measured: round 1: a \| b; round 2: a \| b |
`
	if got := x.variants(job.unit); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// A figure is reached if the median is within the bound, from whichever side that is.
func TestFigureRow(t *testing.T) {
	for _, tt := range []struct {
		f    figure
		want string
	}{
		{figure{work: "READ", than: "tgt", bound: 2.5, value: spread{2.5, 2, 3, 5}}, "| READ | tgt | ≥ 2.5 | 2.50 (2.00–3.00) | yes |\n"},
		{figure{work: "READ", than: "tgt", bound: 2.5, value: spread{2.4, 2, 3, 5}}, "| READ | tgt | ≥ 2.5 | 2.40 (2.00–3.00) | no |\n"},
		{figure{work: "p99.9", than: "tgt", bound: 0.5, most: true, value: spread{0.5, 0.1, 1, 5}}, "| p99.9 | tgt | ≤ 0.5 | 0.50 (0.10–1.00) | yes |\n"},
		{figure{work: "p99.9", than: "tgt", bound: 0.5, most: true, value: spread{0.6, 0.1, 1, 5}}, "| p99.9 | tgt | ≤ 0.5 | 0.60 (0.10–1.00) | no |\n"},
		{figure{work: "CPU time", unit: " µs", bound: 6, most: true, value: spread{5, 4, 7, 5}}, "| CPU time |  | ≤ 6 µs | 5.00 (4.00–7.00) µs | yes |\n"},
		{figure{work: "READ", than: "a", bound: 1, reason: "x | y"}, `| READ | a | ≥ 1 | not measured: x \| y | – |` + "\n"},
	} {
		if got := tt.f.row(); got != tt.want {
			t.Errorf("got %s, want %s", got, tt.want)
		}
	}
}

func TestCompare(t *testing.T) {
	x := example()
	read := x.jobs[0]
	if f := x.compare(read, oursTCP, lioTCP, false, 2); f.work != "read, iser-target" || f.than != "LIO" || math.Abs(f.value.Median-200.0/75) > 1e-9 || f.reason != "" {
		t.Errorf("%+v", f)
	}
	if f := x.compare(read, oursTCP, tgtTCP, false, 2); !strings.Contains(f.reason, "tgt did not start") || !strings.Contains(f.reason, "not tried after round 1") {
		t.Errorf("%+v", f)
	}
	err := figures(context.Background(), io.Discard, &options{}, []string{"tail", "taste"})
	if err == nil || !strings.HasPrefix(err.Error(), "-figures: taste: unknown: the groups are speed,tail") {
		t.Errorf("an unknown group: %v", err)
	}
}

func TestLocks(t *testing.T) {
	const text = `File: iser-target
Type: delay
Duration: 4s, Total samples = 122.86ms ( 3.07%)
      flat  flat%   sum%        cum   cum%
   50.00ms 43.69% 43.69%    53.68ms 43.69%  github.com/iser-target/iser-target/iscsi.(*memory).borrow.deferwrap1
   10.00ms 31.73% 75.42%    38.98ms 31.73%  github.com/iser-target/iser-target/iscsi.(*memory).borrow (inline)
       2ms  1.00% 76.42%        2ms  1.00%  github.com/iser-target/iser-target/iscsi.(*conn).takeSlot
         0     0%   100%    14.84ms 30.04%  github.com/iser-target/iser-target/iscsi.(*Task).afterFetch
`
	locks, err := parseLocks(text, 2*time.Second)
	if want := map[string]float64{"iscsi.(*memory).borrow": 3, "iscsi.(*conn).takeSlot": 0.1}; err != nil || len(locks) != 2 ||
		math.Abs(locks["iscsi.(*memory).borrow"]-3) > 1e-9 || math.Abs(locks["iscsi.(*conn).takeSlot"]-0.1) > 1e-9 {
		t.Errorf("got %v, %v, want %v", locks, err, want)
	}
	if _, err := parseLocks("no such file\n", time.Second); err == nil {
		t.Error("no error without a table")
	}
	// A round in which nobody waited counts as 0.
	list := longest(map[string][]float64{"a": {9}, "b": {2, 3}, "c": {4, 5, 6}, "d": {1, 1, 1}}, 3)
	if len(list) != 3 || list[0].work != "waits for locks that c held" || list[0].value != (spread{5, 4, 6, 3}) || list[1].value != (spread{2, 0, 3, 3}) ||
		list[2].value != (spread{1, 1, 1, 3}) {
		t.Errorf("%+v", list)
	}
	if list := longest(nil, 3); len(list) != 1 || list[0].reason != "" || list[0].value.Max != 0 {
		t.Errorf("nobody waited: %+v", list)
	}
}

func TestParseBench(t *testing.T) {
	got := parseBench(`goos: linux
BenchmarkRawTCP/64KiB-2         	   10000	     13300 ns/op	4927.52 MB/s	       0 B/op	       0 allocs/op
BenchmarkWrite/crc=true/64KiB-2 	   10000	     16100.5 ns/op	4070.56 MB/s	       0 B/op	       0 allocs/op
BenchmarkWrite/crc=true/4KiB
PASS
`)
	if want := map[string]float64{"RawTCP/64KiB": 13300, "Write/crc=true/64KiB": 16100.5}; !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// The jobs of the kernel's initiator have the sizes and depths of the table.
func TestKernelJobs(t *testing.T) {
	jobs := kernelFio(time.Second, 200*time.Millisecond)
	if len(jobs) != len(kernelJobs) {
		t.Fatalf("%d jobs, want %d", len(jobs), len(kernelJobs))
	}
	for _, line := range []string{"[WRITE 1 MiB, depth 4]", "rw=randwrite", "bs=1m", "iodepth=4", "runtime=1000ms", "stonewall", "filename=${DISK}"} {
		if !strings.Contains(jobs[len(jobs)-1:].String(), line+"\n") {
			t.Errorf("the last job lacks %q:\n%s", line, jobs[len(jobs)-1:])
		}
	}
}

// TestMain plays the process that ownLoopback starts: it prints the congestion control that it has.
func TestMain(m *testing.M) {
	if os.Getenv(loopbackVariable) == "" {
		os.Exit(m.Run())
	}
	if _, done, err := ownLoopback(context.Background(), "reno"); done || err != nil {
		fmt.Println(done, err)
		os.Exit(1)
	}
	fmt.Println("control:", congestion())
	os.Exit(7)
}

// The figures are measured with the congestion control that they ask for, in a network namespace of their own.
func TestOwnLoopback(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root makes network namespaces")
	}
	name := "reno"
	if congestion() == name {
		name = "cubic"
	}
	stdout := os.Stdout
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	os.Stdout = w
	code, done, reason := ownLoopback(t.Context(), name)
	os.Stdout = stdout
	w.Close()
	out, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	if string(out) != "control: "+name+"\n" || code != 7 || !done || reason != nil {
		t.Errorf("the other process: %q, exit code %d, %t, %v", out, code, done, reason)
	}
	if congestion() == name {
		t.Error("this process has the congestion control of the other one")
	}
	if _, done, err := ownLoopback(t.Context(), congestion()); done || err != nil {
		t.Errorf("without need: %t, %v", done, err)
	}
}
