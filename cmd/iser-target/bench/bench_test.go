package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/iscsi/initiator"
	iserinitiator "github.com/iser-target/iser-target/iser/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/loopback"
)

const targetName = loopback.Name

var check, within = loopback.Check, loopback.Within

// serve serves LUN 0 on store until the test ends, and returns Options that measure it for a second.
func serve(t testing.TB, transport string, store backend.Store) Options {
	t.Helper()
	tg := loopback.Serve(t, loopback.Config{Transport: transport, LUNs: map[uint16]backend.Store{0: store}})
	return Options{Address: tg.Addr, Login: initiator.Config{Target: targetName, Transport: loopback.Transport(transport)}, RW: "randread",
		MixRead: 50, Sizes: []int{4096}, Depths: []int{4}, Jobs: 1, Runtime: time.Second}
}

func openMemory(t testing.TB) backend.Store { return loopback.Memory(t, 16<<20) }

// A run of each kind has I/Os of its directions, with latencies that fit together, and what is verified is right.
func TestRun(t *testing.T) {
	for _, tc := range []struct {
		transport, rw string
		read, write   bool
		set           func(*Options)
	}{
		{"tcp", "randread", true, false, func(o *Options) { o.Sizes, o.Depths = []int{512, 65536}, []int{1, 8} }},
		{"tcp", "randrw", true, true, func(o *Options) { o.Jobs, o.Verify, o.MixRead = 3, true, 70 }},
		{"tcp", "write", false, true, func(o *Options) { o.Verify, o.Sizes = true, []int{300 * 512} }},
		{"iser", "readwrite", true, true, func(o *Options) { o.Verify, o.Offset, o.Size = true, 1<<20, 3<<20 }},
		{"iser", "read", true, false, func(o *Options) { o.Ramp = 100 * time.Millisecond }},
		{"tcp", "randrw", true, true, func(o *Options) {
			o.Login.Transport, o.Verify, o.Jobs = initiator.TCP{Dialer: DialPolling}, true, 2
			o.Sizes = []int{4096, 128 << 10}
		}},
		{"iser", "randrw", true, true, func(o *Options) {
			o.Login.Transport, o.Verify, o.Jobs = iserinitiator.Transport{Dialer: DialPolling}, true, 2
			o.Sizes = []int{4096, 128 << 10}
		}},
	} {
		t.Run(tc.transport+"/"+tc.rw, func(t *testing.T) {
			o := serve(t, tc.transport, openMemory(t))
			o.RW = tc.rw
			tc.set(&o)
			var shown int
			results, err := Run(within(t), o, Hooks{Progress: func(p Progress) { shown++ }})
			check(t, err)
			if want := len(o.Sizes) * len(o.Depths); len(results) != want {
				t.Fatalf("%d results, want %d", len(results), want)
			}
			for _, r := range results {
				for d, want := range []bool{tc.read, tc.write} {
					x := &r.Directions[d]
					if got := x.IOs > 0; got != want || x.Bytes != x.IOs*uint64(r.Size) {
						t.Errorf("%s: direction %d has %d I/Os with %d bytes", r.Name(&o), d, x.IOs, x.Bytes)
					}
					if x.IOs > 0 && !(0 < x.Min && float64(x.Min) <= x.Mean && x.Mean <= float64(x.Max) && x.Recorded > 0 && len(x.IOPS) > 0) {
						t.Errorf("%s: %+v", r.Name(&o), x)
					}
				}
				if o.Verify != (r.Verified > 0) {
					t.Errorf("%d places were verified", r.Verified)
				}
				if r.Elapsed < o.Runtime || r.Interrupted {
					t.Errorf("it took %v, interrupted: %v", r.Elapsed, r.Interrupted)
				}
			}
			var out bytes.Buffer
			check(t, WriteTable(&out, &o, results, nil))
			if lines := strings.Count(out.String(), "\n"); lines < 1+len(results) {
				t.Errorf("the table has %d lines:\n%s", lines, &out)
			}
		})
	}
}

// lossy is a Store that returns other data than was written, but zeros as they are.
type lossy struct{ backend.Store }

func (s lossy) ReadAt(p []byte, off int64) error {
	err := s.Store.ReadAt(p, off)
	if len(p) > 2048 && p[2048] != 0 {
		p[2048] ^= 1
	}
	return err
}

// --verify finds a single wrong bit, while the run reads, and at its end.
func TestVerifyFindsOneBit(t *testing.T) {
	for _, rw := range []string{"randrw", "write"} {
		o := serve(t, "tcp", lossy{openMemory(t)})
		o.RW, o.Verify, o.Destructive, o.Depths, o.Sizes = rw, true, true, []int{1}, []int{4096}
		_, err := Run(within(t), o, Hooks{})
		if err == nil || !strings.Contains(err.Error(), "verify: the data is wrong from byte 2048 on") {
			t.Errorf("%s: the error is %v", rw, err)
		}
	}
}

// An I/O that fails ends the run with an error that names it.
func TestFailure(t *testing.T) {
	o := serve(t, "iser", failing{openMemory(t)})
	o.RW = "write"
	_, err := Run(within(t), o, Hooks{})
	if err == nil || !strings.Contains(err.Error(), "write of 4096 bytes at offset ") || !strings.Contains(err.Error(), "WRITE: ") {
		t.Errorf("the error is %v", err)
	}
}

type failing struct{ backend.Store }

func (failing) WriteAt([]byte, int64) error { return errors.New("no") }

// Inspect finds what a LUN has, wherever it is, and nothing on an empty LUN.
func TestInspect(t *testing.T) {
	for _, tc := range []struct {
		name   string
		offset int64
		data   string
		want   string
	}{
		{"empty", 0, "", ""},
		{"MBR", 510, "\x55\xaa", "an MBR partition table"},
		{"GPT", 512, "EFI PART", "a GPT partition table"},
		{"ext4", 1080, "\x53\xef", "ext4"},
		{"XFS", 0, "XFSB", "an XFS file system"},
		{"btrfs", 65600, "_BHRfS_M", "a btrfs file system"},
		{"LVM", 512, "LABELONE", "an LVM physical volume"},
		{"swap", 4086, "SWAPSPACE2", "a swap area"},
		{"a byte in the middle", 7<<20 + 12345, "x", "byte 7352377 is not zero: 78"},
		{"the last byte", 16<<20 - 1, "x", "byte 16777215 is not zero: 78"},
		{"an earlier bench", 512, signature, "the data of an earlier bench, at byte 512"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			store := openMemory(t)
			check(t, store.WriteAt([]byte(tc.data), tc.offset))
			o := serve(t, "tcp", store)
			s, err := initiator.Connect(within(t), o.Address, o.Login)
			check(t, err)
			defer s.Close()
			d, err := s.Open(within(t), 0)
			check(t, err)
			found, err := Inspect(within(t), d)
			if err != nil || (tc.want == "") != (found == "") || !strings.Contains(found, tc.want) {
				t.Errorf("found %q, %v, want %q", found, err, tc.want)
			}
			if tc.want == "" {
				return
			}
			o.RW = "randwrite"
			var data *DataError
			if _, err := Run(within(t), o, Hooks{}); !errors.As(err, &data) {
				t.Errorf("the run: %v", err)
			}
			got := make([]byte, len(tc.data))
			check(t, store.ReadAt(got, tc.offset))
			if string(got) != tc.data {
				t.Error("the run has overwritten the data")
			}
		})
	}
}

// A run whose context ends returns what it has measured.
func TestInterrupt(t *testing.T) {
	o := serve(t, "tcp", openMemory(t))
	o.Runtime, o.Depths = time.Hour, []int{1, 2}
	ctx, cancel := context.WithCancel(within(t))
	results, err := Run(ctx, o, Hooks{Progress: func(Progress) { cancel() }})
	if !Interrupted(err) || len(results) != 1 || !results[0].Interrupted || results[0].Directions[read].IOs == 0 {
		t.Errorf("%d results, %v", len(results), err)
	}
}

// --rate and --rate-iops limit a job.
func TestRates(t *testing.T) {
	for _, set := range []func(*Options){func(o *Options) { o.RateIOPS = 200 }, func(o *Options) { o.Rate = 200 * 4096 }} {
		o := serve(t, "tcp", openMemory(t))
		o.Runtime = 2 * time.Second
		set(&o)
		results, err := Run(within(t), o, Hooks{})
		check(t, err)
		if iops, _ := results[0].PerSecond(read); iops > 220 {
			t.Errorf("%.0f IOPS", iops)
		}
	}
}

// An I/O allocates nothing, neither here nor in the target.
func TestNoAllocations(t *testing.T) {
	if testkit.Race {
		t.Skip("the race detector makes sync.Pool forget at random")
	}
	for _, tc := range []struct {
		rw         string
		size       int
		skip, poll bool
	}{{rw: "randread", size: 4 << 10}, {rw: "randrw", size: 4 << 10}, {rw: "randread", size: 128 << 10, skip: true},
		{rw: "randrw", size: 4 << 10, poll: true}} {
		rw := tc.rw
		o := serve(t, "tcp", openMemory(t))
		if tc.poll {
			o.Login.Transport = initiator.TCP{Dialer: DialPolling}
		}
		o.RW, o.Size, o.SkipCopy = rw, 16<<20, tc.skip
		j, err := newJob(within(t), &o, 0, tc.size, 8)
		check(t, err)
		defer j.session.Close()
		j.measuring.Store(true)
		done := make(chan error, 1)
		go func() { done <- j.run() }()
		ios := func() uint64 { return j.tallies[read].ios.Load() + j.tallies[write].ios.Load() }
		testkit.Eventually(t, "the first I/Os", func() bool { return ios() > 1000 })
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		first := ios()
		testkit.Eventually(t, "more I/Os", func() bool { return ios() > first+5000 })
		n := ios() - first
		runtime.ReadMemStats(&after)
		j.stop()
		check(t, <-done)
		if per := float64(after.Mallocs-before.Mallocs) / float64(n); per > 0.1 {
			t.Errorf("%s: %.2f allocations per I/O", rw, per)
		}
	}
}

func TestBadOptions(t *testing.T) {
	for _, tc := range []struct {
		set  func(*Options)
		want string
	}{
		{func(o *Options) { o.RW = "trim" }, `--rw: "trim" is not one of read`},
		{func(o *Options) { o.MixRead = 101 }, "--rwmixread: 101 is not a percentage"},
		{func(o *Options) { o.Jobs = 0 }, "--numjobs: 0 is not from 1 to 64"},
		{func(o *Options) { o.Runtime = 0 }, "--runtime: 0s is not from 1s"},
		{func(o *Options) { o.Ramp = -1 }, "--ramp: "},
		{func(o *Options) { o.Rate, o.RateIOPS = 1, 1 }, "--rate: it excludes --rate-iops"},
		{func(o *Options) { o.Verify = true }, "--verify: --rw randread writes nothing"},
		{func(o *Options) { o.RW, o.Verify, o.SkipCopy = "randrw", true, true }, "--skip-rx-copy: it excludes --verify"},
		{func(o *Options) { o.Login.DataDigest, o.SkipCopy = true, true }, "--skip-rx-copy: it excludes --data-digest"},
		{func(o *Options) { o.RW, o.SkipCopy = "write", true }, "--skip-rx-copy: --rw write reads nothing"},
		{func(o *Options) { o.Sizes = []int{1000} }, "--bs: 1000 is not a multiple of 512"},
		{func(o *Options) { o.Sizes = []int{32 << 20} }, "--bs: 33554432 is not a multiple of 512 from 512 to 16777216"},
		{func(o *Options) { o.Depths = []int{0} }, "--iodepth: 0 is not from 1 to 1024"},
		{func(o *Options) { o.Sizes, o.Depths = []int{16 << 20}, []int{1024} }, "need 16384 MiB: at most 1024 MiB"},
		{func(o *Options) { o.Offset = 100 }, "--offset: 100 is not a multiple of the block size of the LUN, 512"},
		{func(o *Options) { o.Size = 100 }, "--size: 100 is not a multiple of the block size"},
		{func(o *Options) { o.Offset = 16 << 20 }, "--offset: 16777216 is behind the end of the LUN"},
		{func(o *Options) { o.Offset, o.Size = 512, 16<<20 }, "--size: 16777216 bytes at --offset 512 are behind the end"},
		{func(o *Options) { o.Jobs, o.Sizes = 3, []int{4 << 20} }, "has 1 places for I/Os of 4194304 bytes: --iodepth 4"},
	} {
		o := serve(t, "tcp", openMemory(t))
		tc.set(&o)
		var flag *FlagError
		if _, err := Run(within(t), o, Hooks{}); !errors.As(err, &flag) || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("the error is %v, want %q", err, tc.want)
		}
	}
}

func TestParse(t *testing.T) {
	for in, want := range map[string]int64{"512": 512, "4k": 4096, "4K": 4096, "4KiB": 4096, "1m": 1 << 20, "10GiB": 10 << 30, "2t": 2 << 40, "7b": 7,
		"": -1, "k": -1, "-1": -1, "4kk": -1, "1.5m": -1, "9999999t": -1, "99999999999999999999": -1} {
		got, err := ParseSize(in)
		if (err != nil) != (want < 0) || err == nil && got != want {
			t.Errorf("size %q: %d, %v", in, got, err)
		}
	}
	for in, want := range map[string]time.Duration{"30": 30 * time.Second, "1m30s": 90 * time.Second, "": -1, "x": -1, "99999999999": -1} {
		got, err := ParseTime(in)
		if (err != nil) != (want < 0) || err == nil && got != want {
			t.Errorf("time %q: %v, %v", in, got, err)
		}
	}
	for n, want := range map[int64]string{0: "0", 512: "512", 4096: "4k", 6144: "6k", 1 << 20: "1m", 1<<30 + 1: "1073741825"} {
		if got := FormatSize(n); got != want {
			t.Errorf("%d is written %s, want %s", n, got, want)
		}
	}
}

// For 1 and 2 degrees of freedom the distribution of t has a closed form.
func TestWelch(t *testing.T) {
	for _, x := range []float64{0, 0.1, 1, 2.5, 10, 300} {
		for degrees, want := range map[float64]float64{1: 1 - 2/math.Pi*math.Atan(x), 2: 1 - x/math.Sqrt(2+x*x)} {
			if got := betaInc(degrees/2, 0.5, degrees/(degrees+x*x)); math.Abs(got-want) > 1e-12 {
				t.Errorf("t %g with %g degrees of freedom: p is %g, want %g", x, degrees, got, want)
			}
		}
	}
	// Two samples each with the same variance have 2 degrees of freedom: t is 4/sqrt(2/2+2/2).
	p, ok := Welch(Summarize([]float64{1, 1 + 2}), Summarize([]float64{5, 5 + 2}))
	if want := 1 - 2*math.Sqrt2/math.Sqrt(2+8); !ok || math.Abs(p-want) > 1e-12 {
		t.Errorf("p is %g, want %g", p, want)
	}
	// A critical value of the tables: t is 2.228 with 10 degrees of freedom and p 0.05.
	if p := betaInc(5, 0.5, 10/(10+2.228*2.228)); math.Abs(p-0.05) > 1e-4 {
		t.Errorf("p is %g, want 0.05", p)
	}
	if _, ok := Welch(Summary{N: 1}, Summary{N: 9}); ok {
		t.Error("one sample has a variance")
	}
}

// The JSON has the keys of fio's, each with a value of the same type, and its tools read it.
func TestFioFormat(t *testing.T) {
	fio, err := exec.LookPath("fio")
	if err != nil {
		backendtest.Unavailable(t, "%v (tests/interop/setup.sh installs it)", err)
	}
	theirs, err := exec.Command(fio, "--name=x", "--ioengine=null", "--size=1g", "--rw=randrw", "--bs=4k", "--iodepth=4", "--time_based",
		"--runtime=2", "--rate_iops=1000", "--output-format=json").Output()
	check(t, err)
	theirs = theirs[bytes.IndexByte(theirs, '{'):]
	o := serve(t, "tcp", openMemory(t))
	o.RW, o.Runtime, o.Rate = "randrw", 2*time.Second, 1<<20
	results, err := Run(within(t), o, Hooks{})
	check(t, err)
	var ours bytes.Buffer
	check(t, WriteJSON(&ours, &o, "iscsi://x", results, false))

	a, b := map[string]any{}, map[string]any{}
	check(t, json.Unmarshal(theirs, &a))
	check(t, json.Unmarshal(ours.Bytes(), &b))
	if v, ok := a["fio version"].(string); ok && strings.HasPrefix(v, "fio-3.33") {
		sameShape(t, "", a, b)
	} else {
		t.Logf("%v is another version: only its keys are compared that 3.33 has, too", a["fio version"])
	}

	// Units: the numbers of one run fit together as in fio.
	job := b["jobs"].([]any)[0].(map[string]any)
	rd := job["read"].(map[string]any)
	number := func(key string) float64 { return rd[key].(float64) }
	if bytesPerMS, ms := number("io_bytes")/number("runtime"), number("runtime"); math.Abs(bytesPerMS*1000/1024-number("bw")) > number("bw")/50+1 || ms < 1900 || ms > 5000 {
		t.Errorf("io_bytes %v, runtime %v, bw %v", number("io_bytes"), ms, number("bw"))
	}
	if got := number("total_ios") / number("runtime") * 1000; math.Abs(got-number("iops")) > 1+got/50 {
		t.Errorf("total_ios %v, iops %v", number("total_ios"), number("iops"))
	}
	for _, group := range [][]string{{"iodepth_level"}, {"latency_ns", "latency_us", "latency_ms"}} {
		sum := 0.0
		for _, key := range group {
			for _, v := range job[key].(map[string]any) {
				sum += v.(float64)
			}
		}
		if math.Abs(sum-100) > 0.01 {
			t.Errorf("%v: %v %%", group, sum)
		}
	}

	// fio's file is a baseline, too.
	dir := t.TempDir()
	path := filepath.Join(dir, "fio.json")
	check(t, os.WriteFile(path, theirs, 0o600))
	base, err := ReadBaseline(path)
	check(t, err)
	if x, ok := base.Compare(&o, results[0], read); !ok || x.IOPS < 100 || math.IsNaN(x.P) {
		t.Errorf("compared with fio: %+v, %v", x, ok)
	}

	tool, err := exec.LookPath("fio_jsonplus_clat2csv")
	if err != nil {
		backendtest.Unavailable(t, "%v (tests/interop/setup.sh installs it with fio)", err)
	}
	ours.Reset()
	check(t, WriteJSON(&ours, &o, "iscsi://x", results, true))
	path = filepath.Join(dir, "plus.json")
	check(t, os.WriteFile(path, ours.Bytes(), 0o600))
	if out, err := exec.Command(tool, path, filepath.Join(dir, "lat.csv")).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	csv, err := os.ReadFile(filepath.Join(dir, "lat_job0.csv"))
	check(t, err)
	lines := strings.Split(strings.TrimSpace(string(csv)), "\n")
	column := slices.Index(strings.Split(lines[0], ", "), "read_clat_ns_cumulative")
	last := ""
	for _, line := range lines[1:] {
		if v := strings.TrimSpace(strings.Split(line, ",")[column]); v != "" {
			last = v
		}
	}
	if want := fmt.Sprint(results[0].Directions[read].Recorded); last != want {
		t.Errorf("the tool counts %s READs, want %s", last, want)
	}
}

// sameShape checks that b has the keys of a, with values of the same type. Percentages of what fio has not done are left out
// there. b may have the key iser_target.
func sameShape(t *testing.T, at string, a, b any) {
	switch x := a.(type) {
	case map[string]any:
		y, ok := b.(map[string]any)
		if !ok {
			t.Errorf("%s: %T instead of an object", at, b)
			return
		}
		for key, v := range x {
			switch w, ok := y[key]; {
			case at == ".jobs.job options" || key == "disk_util":
			case !ok:
				t.Errorf("%s.%s is missing", at, key)
			default:
				sameShape(t, at+"."+key, v, w)
			}
		}
		for key := range y {
			if _, ok := x[key]; !ok && key != "iser_target" && at != ".jobs.job options" {
				t.Errorf("%s.%s is not of fio", at, key)
			}
		}
	case []any:
		y, ok := b.([]any)
		if !ok || len(x) == 0 || len(y) == 0 {
			t.Errorf("%s: %v instead of %v", at, b, a)
			return
		}
		sameShape(t, at, x[0], y[0])
	default:
		if fmt.Sprintf("%T", a) != fmt.Sprintf("%T", b) {
			t.Errorf("%s: %T instead of %T", at, b, a)
		}
	}
}

// A baseline of bench has the differences of another run, and a bad file is an error.
func TestBaseline(t *testing.T) {
	result := func(rates ...float64) *Result {
		r := &Result{Size: 4096, Depth: 1, Elapsed: time.Duration(len(rates)) * time.Second}
		j := &job{}
		j.tallies = [directions]tally{newTally(), newTally()}
		for _, x := range rates {
			r.Directions[read].IOs += uint64(x)
			j.tallies[read].record(time.Duration(1e9 / x))
		}
		r.Directions[read].IOPS = rates
		r.add(j)
		r.finish()
		return r
	}
	o := &Options{RW: "read"}
	var file bytes.Buffer
	check(t, WriteJSON(&file, o, "", []*Result{result(100, 101, 99, 100)}, false))
	path := filepath.Join(t.TempDir(), "base.json")
	check(t, os.WriteFile(path, file.Bytes(), 0o600))
	base, err := ReadBaseline(path)
	check(t, err)
	x, ok := base.Compare(o, result(200, 201, 199, 200), read)
	if !ok || math.Abs(x.Change-100) > 1 || math.Abs(x.Latency+50) > 1 || x.P > 1e-6 {
		t.Errorf("twice as fast: %+v, %v", x, ok)
	}
	if x, _ := base.Compare(o, result(99, 102, 100, 99), read); x.P < 0.5 {
		t.Errorf("hardly different: %+v", x)
	}
	if _, ok := base.Compare(&Options{RW: "write"}, result(1, 2), read); ok {
		t.Error("another kind of run is compared")
	}
	for text, want := range map[string]string{"": "it is not the JSON", "{}": "it has no jobs", "[1]": "it is not the JSON", `{"jobs": 1}`: "it is not the JSON"} {
		check(t, os.WriteFile(path, []byte(text), 0o600))
		if _, err := ReadBaseline(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: the error is %v, want %q", text, err, want)
		}
	}
}
