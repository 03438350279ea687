package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"golang.org/x/sys/unix"
)

// A fioFile is the JSON of fio 3.33, with its names and units: bw is KiB per second, latencies are ns, runtimes ms, CPU times percent. A job
// is one Run with all its jobs, as with fio's group_reporting. The object iser_target is not of fio.
type fioFile struct {
	Version     string   `json:"fio version"`
	Timestamp   int64    `json:"timestamp"`
	TimestampMS int64    `json:"timestamp_ms"`
	Time        string   `json:"time"`
	Jobs        []fioJob `json:"jobs"`
}

type fioJob struct {
	Name              string            `json:"jobname"`
	GroupID           int               `json:"groupid"`
	Error             int               `json:"error"` // errno
	ETA               int               `json:"eta"`
	Elapsed           int64             `json:"elapsed"` // s
	Options           map[string]string `json:"job options"`
	Read              fioDirection      `json:"read"`
	Write             fioDirection      `json:"write"`
	Trim              fioDirection      `json:"trim"`
	Sync              fioSync           `json:"sync"`
	JobRuntime        int64             `json:"job_runtime"` // ms
	UserCPU           fixed             `json:"usr_cpu"`
	SystemCPU         fixed             `json:"sys_cpu"`
	Switches          int64             `json:"ctx"`
	MajorFaults       int64             `json:"majf"`
	MinorFaults       int64             `json:"minf"`
	DepthLevel        shares            `json:"iodepth_level"`
	DepthSubmit       shares            `json:"iodepth_submit"`
	DepthComplete     shares            `json:"iodepth_complete"`
	LatencyNS         shares            `json:"latency_ns"`
	LatencyUS         shares            `json:"latency_us"`
	LatencyMS         shares            `json:"latency_ms"`
	LatencyDepth      int               `json:"latency_depth"`
	LatencyTarget     int               `json:"latency_target"`
	LatencyPercentile fixed             `json:"latency_percentile"`
	LatencyWindow     int               `json:"latency_window"`

	Own *ownPart `json:"iser_target,omitempty"`
}

type fioDirection struct {
	IOBytes   uint64     `json:"io_bytes"`
	IOKBytes  uint64     `json:"io_kbytes"`
	BWBytes   uint64     `json:"bw_bytes"`
	BW        uint64     `json:"bw"`
	IOPS      fixed      `json:"iops"`
	Runtime   int64      `json:"runtime"`
	TotalIOs  uint64     `json:"total_ios"`
	ShortIOs  uint64     `json:"short_ios"`
	DropIOs   uint64     `json:"drop_ios"`
	SLat      fioLatency `json:"slat_ns"`
	CLat      fioLatency `json:"clat_ns"`
	Lat       fioLatency `json:"lat_ns"`
	BWMin     uint64     `json:"bw_min"`
	BWMax     uint64     `json:"bw_max"`
	BWAgg     fixed      `json:"bw_agg"`
	BWMean    fixed      `json:"bw_mean"`
	BWDev     fixed      `json:"bw_dev"`
	BWSamples int        `json:"bw_samples"`
	IOPSMin   uint64     `json:"iops_min"`
	IOPSMax   uint64     `json:"iops_max"`
	IOPSMean  fixed      `json:"iops_mean"`
	IOPSDev   fixed      `json:"iops_stddev"`
	IOPSCount int        `json:"iops_samples"`
}

type fioLatency struct {
	Min        int64  `json:"min"`
	Max        int64  `json:"max"`
	Mean       fixed  `json:"mean"`
	Deviation  fixed  `json:"stddev"`
	N          uint64 `json:"N"`
	Percentile shares `json:"percentile,omitempty"`
	Bins       shares `json:"bins,omitempty"` // of json+
}

type fioSync struct {
	TotalIOs uint64     `json:"total_ios"`
	Lat      fioLatency `json:"lat_ns"`
}

// ownPart is what bench knows and fio has no place for.
type ownPart struct {
	URL         string     `json:"url"`
	Depth       int        `json:"iodepth"`
	Samples     ownSamples `json:"samples"` // of each second
	Target      *ownTarget `json:"target,omitempty"`
	Verified    int64      `json:"verified,omitempty"`
	Interrupted bool       `json:"interrupted,omitempty"`
	Failure     string     `json:"failure,omitempty"` // why the run ended before its time
	Repeats     ownRepeats `json:"repeated"`
}

// ownRepeats counts the I/Os that were repeated, by the reason.
type ownRepeats struct {
	Read        ownReasons `json:"read"`
	Write       ownReasons `json:"write"`
	LowestDepth int        `json:"lowest_iodepth"` // I/Os in progress of a job at most after BUSY or TASK SET FULL
}

type ownReasons struct {
	Busy        uint64 `json:"busy"`
	TaskSetFull uint64 `json:"task_set_full"`
	Attentions  shares `json:"unit_attention"` // by ASC/ASCQ
}

func reasons(r *Repeats) ownReasons {
	o := ownReasons{Busy: r.Busy, TaskSetFull: r.TaskSetFull, Attentions: shares{}}
	for _, s := range r.senses() {
		o.Attentions = append(o.Attentions, share{fmt.Sprintf("%02x/%02x", s.ASC, s.ASCQ), r.Attentions[s]})
	}
	return o
}

type ownSamples struct {
	ReadIOPS  []fixed `json:"read_iops"`
	WriteIOPS []fixed `json:"write_iops"`
}

type ownTarget struct {
	CPUSeconds fixed      `json:"cpu_seconds"`
	Phases     []ownPhase `json:"phases"`
}

type ownPhase struct {
	Phase   string `json:"phase"`
	Count   uint64 `json:"count"`
	Seconds fixed  `json:"seconds"`
}

// fixed is a number with six decimals, as fio writes them.
type fixed float64

// MarshalJSON implements json.Marshaler.
func (f fixed) MarshalJSON() ([]byte, error) {
	return strconv.AppendFloat(nil, float64(f), 'f', 6, 64), nil
}

// shares is a JSON object that keeps its order.
type shares []share

type share struct {
	key   string
	value any
}

// MarshalJSON implements json.Marshaler.
func (s shares) MarshalJSON() ([]byte, error) {
	b := []byte{'{'}
	for i, x := range s {
		if i > 0 {
			b = append(b, ',')
		}
		v, err := json.Marshal(x.value)
		if err != nil {
			return nil, err
		}
		b = append(append(append(strconv.AppendQuote(b, x.key), ':'), v...), []byte(nil)...)
	}
	return append(b, '}'), nil
}

// UnmarshalJSON implements json.Unmarshaler. It takes any value: a baseline has no use for them.
func (s *shares) UnmarshalJSON([]byte) error { return nil }

// percentiles are those of fio.
var percentiles = []float64{1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 99.5, 99.9, 99.95, 99.99}

// WriteJSON writes results as fio does with --output-format=json, or with plus as with json+.
func WriteJSON(w io.Writer, o *Options, url string, results []*Result, plus bool) error {
	now := time.Now()
	f := fioFile{Version: "fio-3.33", Timestamp: now.Unix(), TimestampMS: now.UnixMilli(), Time: now.Format(time.ANSIC), Jobs: []fioJob{}}
	for _, r := range results {
		f.Jobs = append(f.Jobs, r.fio(o, url, plus))
	}
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(f)
}

// Name returns the name of a run.
func (r *Result) Name(o *Options) string {
	return fmt.Sprintf("%s-bs%s-qd%d", o.RW, FormatSize(int64(r.Size)), r.Depth)
}

func (r *Result) fio(o *Options, url string, plus bool) fioJob {
	seconds := r.Elapsed.Seconds()
	percent := func(d time.Duration) fixed {
		if seconds == 0 {
			return 0
		}
		return fixed(100 * d.Seconds() / seconds)
	}
	j := fioJob{
		Name: r.Name(o), Elapsed: int64(math.Ceil((o.Ramp + r.Elapsed).Seconds())), Options: o.fio(r),
		JobRuntime: r.Elapsed.Milliseconds(), UserCPU: percent(r.Initiator.User), SystemCPU: percent(r.Initiator.System),
		Switches: r.Initiator.Switches, MajorFaults: r.Initiator.MajorFaults, MinorFaults: r.Initiator.MinorFaults,
		DepthLevel: depthLevels(r.Depths), DepthSubmit: depthBatches(), DepthComplete: depthBatches(),
		LatencyDepth: r.Depth, LatencyPercentile: 100,
		Read: r.fioDirection(read, plus), Write: r.fioDirection(write, plus),
	}
	j.Trim = (&Result{}).fioDirection(read, false)
	j.Sync.Lat.Percentile = nil
	j.LatencyNS, j.LatencyUS, j.LatencyMS = r.spread()
	j.Own = &ownPart{URL: url, Depth: r.Depth, Verified: r.Verified, Interrupted: r.Interrupted,
		Repeats: ownRepeats{reasons(&r.Directions[read].Repeats), reasons(&r.Directions[write].Repeats), r.LowestDepth},
		Samples: ownSamples{ReadIOPS: fixeds(r.Directions[read].IOPS), WriteIOPS: fixeds(r.Directions[write].IOPS)}}
	if r.Err != nil {
		j.Error, j.Own.Failure = int(unix.EIO), r.Err.Error()
	}
	if t := r.Target; t != nil {
		j.Own.Target = &ownTarget{CPUSeconds: fixed(t.CPU.Seconds())}
		for _, p := range t.Phases {
			j.Own.Target.Phases = append(j.Own.Target.Phases, ownPhase{p.Name, p.Count, fixed(p.Sum.Seconds())})
		}
	}
	return j
}

func fixeds(list []float64) []fixed {
	f := []fixed{}
	for _, x := range list {
		f = append(f, fixed(x))
	}
	return f
}

// fio returns the options of a run in fio's words.
func (o *Options) fio(r *Result) map[string]string {
	m := map[string]string{
		"name": r.Name(o), "ioengine": "iser-target", "rw": o.RW, "bs": FormatSize(int64(r.Size)), "iodepth": strconv.Itoa(r.Depth),
		"numjobs": strconv.Itoa(o.Jobs), "runtime": strconv.FormatFloat(o.Runtime.Seconds(), 'f', -1, 64), "time_based": "1",
		"size": strconv.FormatInt(o.Size, 10), "offset": strconv.FormatInt(o.Offset, 10), "randseed": strconv.FormatUint(o.Seed, 10),
		"group_reporting": "1",
	}
	if o.Ramp > 0 {
		m["ramp_time"] = strconv.FormatFloat(o.Ramp.Seconds(), 'f', -1, 64)
	}
	if o.RW == "randrw" || o.RW == "readwrite" || o.RW == "rw" {
		m["rwmixread"] = strconv.Itoa(o.MixRead)
	}
	if o.Rate > 0 {
		m["rate"] = strconv.FormatInt(o.Rate, 10)
	}
	if o.RateIOPS > 0 {
		m["rate_iops"] = strconv.FormatInt(o.RateIOPS, 10)
	}
	if o.Verify {
		m["verify"] = "pattern"
	}
	return m
}

func (r *Result) fioDirection(d int, plus bool) fioDirection {
	x := &r.Directions[d]
	f := fioDirection{IOBytes: x.Bytes, IOKBytes: x.Bytes >> 10, TotalIOs: x.IOs}
	zeros := shares{}
	for _, p := range percentiles {
		zeros = append(zeros, share{strconv.FormatFloat(p, 'f', 6, 64), 0})
	}
	if x.IOs == 0 {
		return f // as fio, without percentiles
	}
	iops, bw := r.PerSecond(d)
	f.BWBytes, f.BW, f.IOPS, f.Runtime = uint64(bw), uint64(bw)>>10, fixed(iops), r.Elapsed.Milliseconds()
	lat := fioLatency{Min: x.Min, Max: x.Max, Mean: fixed(x.Mean), Deviation: fixed(x.Deviation), N: x.Recorded}
	f.CLat, f.Lat = lat, lat
	for i := range zeros {
		zeros[i].value = value(x.Latency, percentiles[i], x.Max)
	}
	f.CLat.Percentile = zeros
	if plus {
		for _, b := range x.Latency.Distribution() {
			if b.Count > 0 {
				f.CLat.Bins = append(f.CLat.Bins, share{strconv.FormatInt(min(b.To, x.Max), 10), b.Count})
			}
		}
		f.Lat.Bins = f.CLat.Bins
	}
	kib := make([]float64, len(x.Bandwidth))
	for i, b := range x.Bandwidth {
		kib[i] = b / 1024
	}
	if s := Summarize(kib); s.N > 0 {
		f.BWMin, f.BWMax, f.BWMean, f.BWDev, f.BWSamples = uint64(slices.Min(kib)), uint64(slices.Max(kib)), fixed(s.Mean), fixed(s.Deviation), s.N
		f.BWAgg = 100
	}
	if s := Summarize(x.IOPS); s.N > 0 {
		f.IOPSMin, f.IOPSMax, f.IOPSMean, f.IOPSDev, f.IOPSCount = uint64(slices.Min(x.IOPS)), uint64(slices.Max(x.IOPS)), fixed(s.Mean), fixed(s.Deviation), s.N
	}
	return f
}

// value returns a percentile, which is at most the maximum. The histogram rounds up.
func value(h *hdrhistogram.Histogram, percentile float64, most int64) int64 {
	return min(h.ValueAtPercentile(percentile), most)
}

// depthLevels returns which shares of the I/Os found how many in progress, in percent.
func depthLevels(n [8]uint64) shares {
	var all uint64
	n[6] += n[7]
	for _, x := range n[:7] {
		all += x
	}
	s := shares{}
	for i, key := range []string{"1", "2", "4", "8", "16", "32", ">=64"} {
		s = append(s, share{key, fixed(100 * float64(n[i]) / float64(max(all, 1)))})
	}
	return s
}

// depthBatches returns what fio says of a submission and completion one by one.
func depthBatches() shares {
	s := shares{}
	for _, key := range []string{"0", "4", "8", "16", "32", "64", ">=64"} {
		v := fixed(0)
		if key == "4" { // up to 4
			v = 100
		}
		s = append(s, share{key, v})
	}
	return s
}

// spread returns which shares of the latencies are up to which bounds, in percent, in the three objects of fio.
func (r *Result) spread() (ns, us, ms shares) {
	units := []struct {
		to     *shares
		unit   int64
		bounds []int64
	}{
		{&ns, 1, []int64{2, 4, 10, 20, 50, 100, 250, 500, 750, 1000}},
		{&us, 1e3, []int64{2, 4, 10, 20, 50, 100, 250, 500, 750, 1000}},
		{&ms, 1e6, []int64{2, 4, 10, 20, 50, 100, 250, 500, 750, 1000, 2000}},
	}
	var all uint64
	var bars []hdrhistogram.Bar
	for d := range r.Directions {
		if h := r.Directions[d].Latency; h != nil {
			bars = append(bars, h.Distribution()...)
			all += uint64(h.TotalCount())
		}
	}
	upTo := func(bound int64) (n int64) {
		for _, b := range bars {
			if b.From < bound {
				n += b.Count
			}
		}
		return n
	}
	part := func(n int64) fixed { return fixed(100 * float64(n) / float64(max(all, 1))) }
	var below int64
	for _, u := range units {
		for _, b := range u.bounds {
			n := upTo(b * u.unit)
			*u.to = append(*u.to, share{strconv.FormatInt(b, 10), part(n - below)})
			below = n
		}
	}
	ms = append(ms, share{">=2000", part(int64(all) - below)})
	return ns, us, ms
}

// A Baseline is an earlier file of bench or fio.
type Baseline struct{ jobs map[string]fioJob }

// maxBaseline limits the size of a file with a baseline, in bytes.
const maxBaseline = 64 << 20

// ReadBaseline reads a file that bench wrote with -o json, or fio with --output-format=json.
func ReadBaseline(path string) (*Baseline, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxBaseline+1))
	if err != nil {
		return nil, err
	}
	if len(b) > maxBaseline {
		return nil, fmt.Errorf("%s: it has more than %d MiB", path, maxBaseline>>20)
	}
	if i := slices.Index(b, '{'); i > 0 && !strings.HasPrefix(strings.TrimSpace(string(b)), "{") {
		b = b[i:] // fio writes its notes before
	}
	var file fioFile
	if err := json.Unmarshal(b, &file); err != nil {
		return nil, fmt.Errorf("%s: it is not the JSON of bench or fio: %w", path, err)
	}
	if len(file.Jobs) == 0 {
		return nil, fmt.Errorf("%s: it is not the JSON of bench or fio: it has no jobs", path)
	}
	base := &Baseline{map[string]fioJob{}}
	for _, j := range file.Jobs {
		if j.Own == nil { // fio's own: the options say what it did
			size, err := ParseSize(j.Options["bs"])
			depth := j.Options["iodepth"]
			if depth == "" {
				depth = "1"
			}
			if err != nil {
				continue
			}
			j.Name = fmt.Sprintf("%s-bs%s-qd%s", j.Options["rw"], FormatSize(size), depth)
		}
		if _, twice := base.jobs[j.Name]; !twice {
			base.jobs[j.Name] = j
		}
	}
	return base, nil
}

// A Difference compares a direction of a run with the baseline.
type Difference struct {
	IOPS float64 // of the baseline
	// Change is the change of IOPS in percent, Latency that of the mean latency.
	Change, Latency float64
	// P is the two-sided p-value of Welch's t-test over the IOPS of each second; NaN: there are less than two samples.
	P float64
}

// Compare compares a direction of r. ok is false if the baseline has no such run.
func (b *Baseline) Compare(o *Options, r *Result, d int) (x Difference, ok bool) {
	j, ok := b.jobs[r.Name(o)]
	was := j.Read
	if d == write {
		was = j.Write
	}
	if !ok || was.IOPS == 0 {
		return x, false
	}
	iops, _ := r.PerSecond(d)
	x = Difference{IOPS: float64(was.IOPS), Change: 100 * (iops/float64(was.IOPS) - 1), P: math.NaN()}
	if was.Lat.Mean > 0 {
		x.Latency = 100 * (r.Directions[d].Mean/float64(was.Lat.Mean) - 1)
	}
	if p, ok := Welch(Summarize(r.Directions[d].IOPS), Summary{was.IOPSCount, float64(was.IOPSMean), float64(was.IOPSDev)}); ok {
		x.P = p
	}
	return x, true
}
