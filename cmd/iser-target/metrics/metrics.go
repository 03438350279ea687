// Package metrics exports the counters of the target to Prometheus. It counts nothing: a
// scrape reads the counters of packages iscsi, lun, rdma and security/limits.
//
// The label sets are bounded. Targets and LUNs come from the configuration, session labels
// exist as long as the session, and all other labels have a fixed set of values.
package metrics

import (
	"cmp"
	"fmt"
	"net/http"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/rdma/wire"
	"github.com/iser-target/iser-target/security/limits"
)

// Prefix begins the names of all metrics of the target, unlike those of the Go runtime and
// of the process.
const Prefix = "iser_target_"

// A family is a metric for all values of its labels.
type family struct {
	name, help string
	kind       prometheus.ValueType
	labels     string // space separated
	edges      []int  // of a histogram: the latency buckets whose bounds are exported; not nil
	desc       *prometheus.Desc
}

const (
	counter = prometheus.CounterValue
	gauge   = prometheus.GaugeValue
)

// families lists the metrics of the target.
var families []*family

// newFamily adds a metric to families.
func newFamily(kind prometheus.ValueType, name, help, labels string) *family {
	f := &family{name: Prefix + name, help: help, kind: kind, labels: labels}
	f.desc = prometheus.NewDesc(f.name, help, strings.Fields(labels), nil)
	families = append(families, f)
	return f
}

// newHistogram adds a histogram of latencies in seconds to families.
func newHistogram(edges []int, name, help, labels string) *family {
	f := newFamily(0, name, help, labels)
	f.edges = edges
	return f
}

// every returns each step-th latency bucket from first to last. Four buckets double the time.
func every(first, step, last int) (list []int) {
	for i := first; i <= last; i += step {
		list = append(list, i)
	}
	return list
}

const (
	ofLUN     = "target lun transport"
	ofSession = "target initiator tsih transport"
)

var (
	sessions         = newFamily(gauge, "sessions", "Sessions in full feature phase.", "target transport")
	discovery        = newFamily(gauge, "discovery_sessions", "Discovery sessions.", "")
	connections      = newFamily(gauge, "connections", "Connections, including those in login.", "")
	sessionsFinished = newFamily(counter, "sessions_finished_total", "Sessions that ended.", "")
	logins           = newFamily(counter, "logins_accepted_total", "Connections whose login was accepted.", "transport")
	refusals         = newFamily(counter, "logins_refused_total", "Connections whose login was refused or failed, by the stage of the login and the status sent to the initiator.", "transport stage status")
	tasks            = newFamily(gauge, "tasks", "Task slots in use, by requests and by PDUs being sent.", "")
	memory           = newFamily(gauge, "buffer_bytes", "Memory of data buffers in use.", "")
	memoryLimit      = newFamily(gauge, "buffer_limit_bytes", "Limit of the memory of data buffers, for all connections together.", "")
	buffers          = newFamily(gauge, "buffers", "Number of data buffers in use.", "")

	buildInfo       = newFamily(gauge, "build_info", "1, with the version of the program and of the Go compiler.", "version goversion")
	reloadSucceeded = newFamily(gauge, "config_last_reload_successful", "1 if the configuration file was applied at the last attempt, else 0.", "")
	reloadTime      = newFamily(gauge, "config_last_reload_success_timestamp_seconds", "When the configuration was applied last, by the start, a reload or a change, in seconds since 1970.", "")

	certificates = newFamily(gauge, "certificate_expires_timestamp_seconds", "When the first certificate, or revocation list, of the file expires, in seconds since 1970.", "key")

	ipsecUp       = newFamily(gauge, "ipsec_up", "1 if a driver of IPsec runs, answers and notices changes, else 0.", "")
	ipsecSessions = newFamily(gauge, "ipsec_sessions", "Sessions by their protection: none (nothing is required), marked (not as required), or the suite.", "protection")
	ipsecInfo     = newFamily(gauge, "ipsec_session_info", "1 for each connection of a session that something is required of, with its verdict, suite, SPIs and the IKE identity of the initiator. New keys begin another series.", ofSession+" cid verdict suite spi_in spi_out identity")
	ipsecDenials  = newFamily(counter, "ipsec_denials_total", "Connections that IPsec does not protect as required, by the moment they were refused or ended and the class of the reason: driver, keys, clear, profile, identity or program.", "moment reason")
	ipsecNotices  = newFamily(counter, "ipsec_key_events_total", "Changes of IPsec keys and policies that the driver reported.", "")
	ipsecFailures = newFamily(counter, "ipsec_driver_failures_total", "Calls of the IPsec driver that failed or took too long.", "")

	clusterGateways = newFamily(gauge, "cluster_gateways", "Gateways of the cluster that are there; absent without a cluster.", "")
	clusterJoined   = newFamily(gauge, "cluster_joined", "1 if the target has a lease in etcd, so that it can serve shared LUNs, else 0; absent without a cluster.", "")
	clusterConfig   = newFamily(gauge, "cluster_config_current", "1 if the target runs the targets of the cluster as etcd has them, as far as it knows, else 0; absent without a cluster.", "")
	sharedServed    = newFamily(gauge, "shared_lun_served", "1 if some gateway serves the shared LUN, as far as this one knows, else 0.", "target lun")
	sharedHere      = newFamily(gauge, "shared_lun_here", "1 if this gateway serves the shared LUN, else 0.", "target lun")

	tokensMade  = newFamily(counter, "tokens_made_total", "ROD tokens that POPULATE TOKEN made.", "")
	tokensEnded = newFamily(counter, "tokens_ended_total", "ROD tokens that ended, by the reason: expired, changed (their data), revoked (the LUN is gone or was reopened) or deleted (by an initiator).", "reason")

	limitMax     = newFamily(gauge, "limit_max", "Bound of a limit; a duration in seconds.", "limit")
	limitUsed    = newFamily(gauge, "limit_used", "Use of what the limit bounds, in the process or by the one that uses most; always 0 for a duration.", "limit")
	limitReached = newFamily(counter, "limit_reached_total", "Times that the limit refused or delayed something.", "limit")

	// The histogram of all commands together is fine. Those of LUNs and sessions, of which
	// a target may have 1,000, are coarse: each bound is four times the one before.
	latencies = newHistogram(every(0, 2, lun.LatencyBuckets-2), "command_duration_seconds", "Duration of SCSI commands, by phase; the total also by op.", "transport phase op")
	sizes     = newHistogram([]int{}, "command_size_bytes", "Data transferred by SCSI commands that transferred any.", "transport op")

	detached = newFamily(gauge, "detached_commands", "Aborted commands that have not come back from their store. Their LUNs are BUSY.", "")
	fencings = newHistogram(every(0, 4, lun.LatencyBuckets-2), "fencing_duration_seconds", "Duration of task management functions that end commands, and of PREEMPT AND ABORT.", "function")

	lunHung       = newFamily(gauge, "lun_store_hung", "1 if the store of the LUN has not answered for limits.store_timeout, else 0.", "target lun")
	lunCalls      = newFamily(gauge, "lun_store_calls", "Commands that are in the store of the LUN, or wait for their turn there.", "target lun")
	lunHangs      = newFamily(counter, "lun_store_hangs_total", "How often the store of the LUN began to hang.", "target lun")
	lunHealth     = newFamily(gauge, "lun_health", "1 for the present health of the LUN, and 0 for the others.", "target lun health")
	lunVerified   = newFamily(counter, "lun_checksums_verified_total", "Blocks that were compared with their checksums.", "target lun")
	lunMismatches = newFamily(counter, "lun_checksum_mismatches_total", "Blocks that differed from their checksums when they were read.", "target lun")
	lunCorrupt    = newFamily(gauge, "lun_corrupt_blocks", "Blocks that are known to differ from their checksums, up to 4096.", "target lun")
	lunPending    = newFamily(gauge, "lun_checksums_pending_bytes", "Data whose checksums are still computed.", "target lun")
	lunScrub      = newFamily(gauge, "lun_scrub_progress", "Part of the LUN that the last scrub has read, from 0 to 1; absent before the first one.", "target lun")
	lunUsed       = newFamily(gauge, "lun_space_used_bytes", "Space that a LUN on memory or in a file takes.", "target lun")
	lunAvailable  = newFamily(gauge, "lun_space_available_bytes", "Space that the medium of a LUN on memory or in a file has left, which others may share.", "target lun")
	lunThreshold  = newFamily(gauge, "lun_threshold_bytes", "Threshold of the configuration, available or used.", "target lun threshold")
	lunReached    = newFamily(gauge, "lun_threshold_reached", "1 if the threshold of the configuration is reached, else 0.", "target lun threshold")
	lunReady      = newFamily(gauge, "lun_ready", "1 if the LUN is ready, else 0.", "target lun")
	lunSize       = newFamily(gauge, "lun_size_bytes", "Capacity of the LUN.", "target lun")
	lunCommands   = newFamily(counter, "lun_commands_total", "SCSI commands that ended with a status.", ofLUN+" op")
	lunBytes      = newFamily(counter, "lun_bytes_total", "Data transferred by SCSI commands.", ofLUN+" op")
	lunInFlight   = newFamily(gauge, "lun_commands_in_flight", "SCSI commands in progress at the moment of the scrape.", ofLUN)
	lunWaiting    = newFamily(gauge, "lun_commands_waiting", "SCSI commands that wait for their turn at the backend, because of a rate or a bound of calls.", "target lun")
	lunWaited     = newFamily(counter, "lun_wait_seconds_total", "Time that SCSI commands waited for their turn at the backend.", "target lun")
	lunAborted    = newFamily(counter, "lun_commands_aborted_total", "SCSI commands that were aborted. Those that another session aborted have the status TASK ABORTED.", ofLUN)
	lunErrors     = newFamily(counter, "lun_errors_total", "SCSI commands that ended with CHECK CONDITION, by sense key.", ofLUN+" op sense_key")
	lunMedium     = newFamily(counter, "lun_medium_errors_total", "SCSI commands that ended with MEDIUM ERROR because the store could not read or write.", ofLUN+" op")
	lunStatuses   = newFamily(counter, "lun_other_statuses_total", "SCSI commands that ended with RESERVATION CONFLICT or another status than GOOD and CHECK CONDITION.", ofLUN)
	lunResidual   = newFamily(counter, "lun_residuals_total", "SCSI commands with a residual count.", ofLUN+" residual")

	lunLatencies = newHistogram(every(16, 8, 88), "lun_command_duration_seconds", "Duration of SCSI commands for the LUN, by phase; the total also by op.", ofLUN+" phase op")

	sessionCommands    = newFamily(counter, "session_commands_total", "SCSI commands of the session that ended with a status.", ofSession+" op")
	sessionBytes       = newFamily(counter, "session_bytes_total", "Data transferred by SCSI commands of the session.", ofSession+" op")
	sessionTasks       = newFamily(gauge, "session_tasks", "Unanswered requests of the session, including those that wait for others.", ofSession)
	sessionErrors      = newFamily(counter, "session_errors_total", "SCSI commands of the session that ended with CHECK CONDITION, except unit attentions.", ofSession+" op")
	sessionAborted     = newFamily(counter, "session_commands_aborted_total", "SCSI commands of the session that were aborted. Those that another session aborted have the status TASK ABORTED.", ofSession)
	sessionResidual    = newFamily(counter, "session_residuals_total", "SCSI commands of the session with a residual count.", ofSession+" residual")
	sessionLatencies   = newHistogram(every(16, 8, 88), "session_command_duration_seconds", "Duration of SCSI commands of the session, by phase; the total also by op.", ofSession+" phase op")
	sessionConnections = newFamily(gauge, "session_connections", "Connections of the session.", ofSession)
	sessionMemory      = newFamily(gauge, "session_buffer_bytes", "Memory of data buffers that the connections of the session use.", ofSession)
	sessionMemoryLimit = newFamily(gauge, "session_buffer_limit_bytes", "Limit of the memory of data buffers for the connections of the session.", ofSession)

	polls = newFamily(counter, "polls_total", "Times that a connection polled for commands, by what came of it.", "result")

	streams       = newFamily(gauge, "rdma_streams", "RDMA streams.", "")
	stags         = newFamily(gauge, "rdma_stags", "STags that are valid for peers, including the sinks of RDMA Reads.", "")
	fpdus         = newFamily(counter, "rdma_fpdus_total", "FPDUs sent or received.", "direction")
	messages      = newFamily(counter, "rdma_messages_total", "RDMAP messages except Terminates.", "direction op")
	invalidations = newFamily(counter, "rdma_invalidations_total", "Sends with Invalidate.", "direction")
	ordStalls     = newFamily(counter, "rdma_ord_stalls_total", "RDMA Reads that waited for an earlier one because of ORD.", "")
	stagFaults    = newFamily(counter, "rdma_stag_faults_total", "Messages refused because of their STag or tagged offset.", "")
	crcErrors     = newFamily(counter, "rdma_crc_errors_total", "FPDUs with a wrong CRC.", "")
	terminates    = newFamily(counter, "rdma_terminates_total", "Terminates, by layer/type/code of RFC 5040, section 4.8.", "direction code reason")
)

// send sends one value of f.
func (f *family) send(ch chan<- prometheus.Metric, v float64, labels ...string) {
	ch <- prometheus.MustNewConstMetric(f.desc, f.kind, v, labels...)
}

// sendHistogram sends one histogram of f.
func (f *family) sendHistogram(ch chan<- prometheus.Metric, l *lun.Latency, labels ...string) {
	buckets, next, upTo := make(map[float64]uint64, len(f.edges)), 0, uint64(0)
	for _, edge := range f.edges {
		for ; next <= edge; next++ {
			upTo += l.Buckets[next]
		}
		buckets[lun.LatencyBound(edge).Seconds()] = upTo
	}
	ch <- prometheus.MustNewConstHistogram(f.desc, l.Count, l.Sum.Seconds(), buckets, labels...)
}

// sendTimes sends the histograms of f: one of each phase with op "all", except that the total has one of each
// op. So the sum over op is right for each phase, and no series repeats the others.
func (f *family) sendTimes(ch chan<- prometheus.Metric, phases *lun.Latencies, ops *lun.Operations, empty bool, labels ...string) {
	send := func(l *lun.Latency, phase lun.Phase, op string) {
		if l.Count > 0 || empty {
			f.sendHistogram(ch, l, append(labels[:len(labels):len(labels)], phase.String(), op)...)
		}
	}
	for p := range lun.PhaseTotal {
		send(&phases[p], p, "all")
	}
	for k := range lun.Kinds {
		send(&ops[k].Latency, lun.PhaseTotal, k.String())
	}
}

// sendSizes sends the sizes of READs and writes.
func sendSizes(ch chan<- prometheus.Metric, transport string, ops *lun.Operations) {
	for k := range lun.KindOther {
		buckets, upTo := make(map[float64]uint64, lun.SizeBuckets-1), uint64(0)
		for i, n := range ops[k].Sizes {
			if upTo += n; i < lun.SizeBuckets-1 {
				buckets[float64(lun.SizeBound(i))] = upTo
			}
		}
		ch <- prometheus.MustNewConstHistogram(sizes.desc, upTo, float64(ops[k].Bytes), buckets, transport, k.String())
	}
}

// A collector reads the counters of one target.
type collector struct {
	node    *iscsi.Node
	domain  *rdma.Domain
	limits  *limits.Set
	reports Reports
}

// Reports are the sources of metrics that are no counters of a package. None of the functions is nil.
type Reports struct {
	Version  string                         // of the program
	Expiries func() map[string]time.Time    // of certificates, by key
	IPsec    func() IPsec                   // of the guard and its driver
	Reload   func() (ok bool, at time.Time) // whether the last one succeeded, and the last success
	Tokens   func() lun.TokenCounts         // ROD tokens of POPULATE TOKEN
	Polls    func() (found, missed uint64)  // see llp.Polling
	Cluster  func() *Cluster                // nil: the target is in none
}

// Cluster has the numbers of the metrics of clusters.
type Cluster struct {
	Joined   bool // the gateway has a lease
	Current  bool // the targets of the cluster that etcd has run here
	Gateways int
	LUNs     []SharedLUN
}

// SharedLUN is a LUN that gateways share.
type SharedLUN struct {
	Target       string
	ID           int
	Served, Here bool
}

// IPsec has the numbers of the metrics of IPsec.
type IPsec struct {
	Up        bool                 // a driver runs, and has not failed
	Sessions  map[string]int       // by protection
	Protected []IPsecConnection    // connections of sessions that something is required of
	Denials   map[[2]string]uint64 // by moment and class of the reason
	Notices   uint64
	Failures  uint64
}

// An IPsecConnection is how IPsec protects a connection of a session. Empty texts are unknown.
type IPsecConnection struct {
	Target, Initiator, Transport string
	TSIH, CID                    uint16
	Verdict                      string // permit, mark or deny
	Suite, SPIIn, SPIOut         string // SPIs with 0x and 8 hex digits
	Identity                     string // IKE identity of the initiator
}

// Handler returns a handler that serves the metrics of a target, of the Go runtime and of
// the process in the formats of Prometheus.
func Handler(node *iscsi.Node, domain *rdma.Domain, shared *limits.Set, reports Reports) http.Handler {
	r := prometheus.NewRegistry()
	r.MustRegister(&collector{node, domain, shared, reports}, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return promhttp.HandlerFor(r, promhttp.HandlerOpts{MaxRequestsInFlight: 4})
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, f := range families {
		ch <- f.desc
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	c.collectNode(ch)
	c.collectLimits(ch)
	c.collectIPsec(ch)
	c.collectProgram(ch)
	c.collectTokens(ch)
	found, missed := c.reports.Polls()
	polls.send(ch, float64(found), "data")
	polls.send(ch, float64(missed), "nothing")
	c.collectCluster(ch)
	for key, at := range c.reports.Expiries() {
		certificates.send(ch, float64(at.Unix()), key)
	}
	for _, t := range c.node.Targets() {
		for _, e := range t.LUNs.Entries() {
			collectLUN(ch, t.Name, e)
		}
	}
	c.collectSessions(ch)
	c.collectRDMA(ch)
}

func (c *collector) collectNode(ch chan<- prometheus.Metric) {
	st := c.node.Stats()
	connections.send(ch, float64(st.Connections))
	sessionsFinished.send(ch, float64(st.SessionsFinished))
	tasks.send(ch, float64(st.TasksInFlight))
	buffers.send(ch, float64(st.BuffersOut))
	detached.send(ch, float64(st.DetachedTasks))
	for function, took := range c.node.Fencing() {
		fencings.sendHistogram(ch, &took, function)
	}
	used, limit := c.node.Memory()
	memory.send(ch, float64(used))
	memoryLimit.send(ch, float64(limit))
	accepted := map[string]uint64{"tcp": 0, "iser": 0}
	for o, n := range c.node.Logins() {
		if o.Accepted { // in whatever stage
			accepted[o.Transport] += n
			continue
		}
		refusals.send(ch, float64(n), o.Transport, o.Stage, cmp.Or(o.Status, "none"))
	}
	for transport, n := range accepted {
		logins.send(ch, float64(n), transport)
	}
	phases, ops := c.node.Latencies(), c.node.Operations()
	for t := range lun.Transports {
		latencies.sendTimes(ch, &phases[t], &ops[t], true, t.String())
		sendSizes(ch, t.String(), &ops[t])
	}
}

func (c *collector) collectProgram(ch chan<- prometheus.Metric) {
	compiler := runtime.Version()
	buildInfo.send(ch, 1, strings.TrimSuffix(c.reports.Version, " "+compiler), compiler)
	ok, at := c.reports.Reload()
	succeeded := 0.0
	if ok {
		succeeded = 1
	}
	reloadSucceeded.send(ch, succeeded)
	reloadTime.send(ch, float64(at.UnixMilli())/1000)
}

func (c *collector) collectCluster(ch chan<- prometheus.Metric) {
	n := c.reports.Cluster()
	if n == nil {
		return
	}
	is := map[bool]float64{true: 1}
	clusterJoined.send(ch, is[n.Joined])
	clusterGateways.send(ch, float64(n.Gateways))
	clusterConfig.send(ch, is[n.Current])
	for _, l := range n.LUNs {
		id := strconv.Itoa(l.ID)
		sharedServed.send(ch, is[l.Served], l.Target, id)
		sharedHere.send(ch, is[l.Here], l.Target, id)
	}
}

func (c *collector) collectTokens(ch chan<- prometheus.Metric) {
	n := c.reports.Tokens()
	tokensMade.send(ch, float64(n.Made))
	for i, reason := range lun.TokenEnds {
		tokensEnded.send(ch, float64(n.Ended[i]), reason)
	}
}

func (c *collector) collectIPsec(ch chan<- prometheus.Metric) {
	n := c.reports.IPsec()
	up := 0.0
	if n.Up {
		up = 1
	}
	ipsecUp.send(ch, up)
	for protection, sessions := range n.Sessions {
		ipsecSessions.send(ch, float64(sessions), protection)
	}
	type key struct{ tsih, cid uint16 }
	sent := map[key]bool{} // while a connection is reinstated, the list has the old one as well
	for _, c := range n.Protected {
		if k := (key{c.TSIH, c.CID}); !sent[k] {
			sent[k] = true
			ipsecInfo.send(ch, 1, c.Target, c.Initiator, fmt.Sprint(c.TSIH), c.Transport, fmt.Sprint(c.CID),
				c.Verdict, c.Suite, c.SPIIn, c.SPIOut, strings.ToValidUTF8(c.Identity, "?")) // from a peer, by way of the IKE daemon
		}
	}
	for of, times := range n.Denials {
		ipsecDenials.send(ch, float64(times), of[0], of[1])
	}
	ipsecNotices.send(ch, float64(n.Notices))
	ipsecFailures.send(ch, float64(n.Failures))
}

func (c *collector) collectLimits(ch chan<- prometheus.Metric) {
	for _, l := range c.limits.State() {
		bound, used := float64(l.Max), float64(l.Used)
		if l.Unit == limits.Duration {
			bound, used = time.Duration(l.Max).Seconds(), 0
		}
		limitMax.send(ch, bound, l.Name)
		limitUsed.send(ch, used, l.Name)
		limitReached.send(ch, float64(l.Bites), l.Name)
	}
}

// senseKeys has the names of SPC-4, section 4.5.6.
var senseKeys = [16]string{
	"no_sense", "recovered_error", "not_ready", "medium_error", "hardware_error", "illegal_request", "unit_attention", "data_protect",
	"blank_check", "vendor_specific", "copy_aborted", "aborted_command", "reserved", "volume_overflow", "miscompare", "completed",
}

// always marks the sense keys that alerts use. They are exported before their first error.
var always = [16]bool{3: true, 4: true, 11: true}

func collectLUN(ch chan<- prometheus.Metric, target string, e lun.Entry) {
	id, ready := fmt.Sprint(e.LUN), 0.0
	if e.Unit.Status() == "ready" {
		ready = 1
	}
	lunReady.send(ch, ready, target, id)
	for h, name := range lun.Healths {
		is := 0.0
		if e.Unit.Health() == lun.Health(h) {
			is = 1
		}
		lunHealth.send(ch, is, target, id, name)
	}
	hung := 0.0
	if _, hangs := e.Unit.Hang(); hangs {
		hung = 1
	}
	if n, ok := e.Unit.Checksums(); ok {
		lunVerified.send(ch, float64(n.Verified), target, id)
		lunMismatches.send(ch, float64(n.Mismatches), target, id)
		lunCorrupt.send(ch, float64(n.Bad), target, id)
		lunPending.send(ch, float64(n.Stale), target, id)
		if s, err := e.Unit.Scrub(); err == nil {
			lunScrub.send(ch, float64(s.Done)/float64(max(s.Total, 1)), target, id)
		}
	}
	if v, ok := e.Unit.Space(); ok {
		lunUsed.send(ch, float64(v.Used), target, id)
		lunAvailable.send(ch, float64(v.Free), target, id)
		for i, one := range v.Thresholds {
			if one.Limit == 0 {
				continue
			}
			reached := 0.0
			if one.Reached {
				reached = 1
			}
			lunThreshold.send(ch, float64(one.Limit), target, id, lun.ThresholdNames[i])
			lunReached.send(ch, reached, target, id, lun.ThresholdNames[i])
		}
	}
	calls := e.Unit.StoreCalls()
	lunHung.send(ch, hung, target, id)
	lunCalls.send(ch, float64(calls.UnderWay+calls.Waiting), target, id)
	lunHangs.send(ch, float64(e.Unit.Hangs()), target, id)
	size := e.Unit.Size()
	if e.Unit.Absent() {
		size = 0
	}
	lunSize.send(ch, float64(size), target, id)
	lunWaiting.send(ch, float64(calls.Waiting), target, id)
	lunWaited.send(ch, calls.Delayed.Seconds(), target, id)
	phases, ops := e.Unit.Latencies(), e.Unit.Operations()
	for t := range lun.Transports {
		lunLatencies.sendTimes(ch, &phases[t], &ops[t], false, target, id, t.String())
	}
	for t, n := range e.Unit.Counts() {
		of := []string{target, id, lun.Transport(t).String()}
		with := func(last string) []string { return append(of[:3:3], last) }
		for k := range lun.Kinds {
			lunCommands.send(ch, float64(n.Commands[k]), with(k.String())...)
			lunBytes.send(ch, float64(n.Bytes[k]), with(k.String())...)
			lunMedium.send(ch, float64(n.MediumErrors[k]), with(k.String())...)
			for key, errs := range n.CheckConditions[k] {
				if errs > 0 || always[key] {
					lunErrors.send(ch, float64(errs), append(with(k.String()), senseKeys[key])...)
				}
			}
		}
		lunInFlight.send(ch, float64(n.InFlight), of...)
		lunAborted.send(ch, float64(n.Aborted), of...)
		lunStatuses.send(ch, float64(n.OtherStatuses), of...)
		lunResidual.send(ch, float64(n.Underflows), with("underflow")...)
		lunResidual.send(ch, float64(n.Overflows), with("overflow")...)
	}
}

func (c *collector) collectSessions(ch chan<- prometheus.Metric) {
	type key struct{ target, transport string }
	count, discoveries := map[key]int{}, 0
	for _, t := range c.node.Targets() {
		for tr := range lun.Transports {
			count[key{t.Name, tr.String()}] = 0
		}
	}
	for _, s := range c.node.Sessions() {
		if s.Discovery {
			discoveries++
			continue
		}
		transport := s.Transport.String()
		count[key{s.Target, transport}]++
		of := []string{s.Target, s.Initiator, fmt.Sprint(s.TSIH), transport}
		with := func(last string) []string { return append(of[:4:4], last) }
		for k := range lun.Kinds {
			sessionCommands.send(ch, float64(s.Counts.Commands[k]), with(k.String())...)
			sessionBytes.send(ch, float64(s.Counts.Bytes[k]), with(k.String())...)
			sessionErrors.send(ch, float64(s.Counts.FailedOf(k)), with(k.String())...)
		}
		if s.Latencies != nil {
			sessionLatencies.sendTimes(ch, s.Latencies, s.Operations, false, of...)
		}
		used, limit := 0, 0
		for i := range s.Conns {
			used, limit = used+s.Conns[i].Memory, limit+s.Conns[i].MemoryLimit
		}
		sessionTasks.send(ch, float64(s.Tasks), of...)
		sessionAborted.send(ch, float64(s.Counts.Aborted), of...)
		sessionResidual.send(ch, float64(s.Counts.Underflows), with("underflow")...)
		sessionResidual.send(ch, float64(s.Counts.Overflows), with("overflow")...)
		sessionConnections.send(ch, float64(len(s.Conns)), of...)
		sessionMemory.send(ch, float64(used), of...)
		sessionMemoryLimit.send(ch, float64(limit), of...)
	}
	discovery.send(ch, float64(discoveries))
	for k, n := range count {
		sessions.send(ch, float64(n), k.target, k.transport)
	}
}

func (c *collector) collectRDMA(ch chan<- prometheus.Metric) {
	live := rdma.ReadStats()
	streams.send(ch, float64(live.Conns))
	stags.send(ch, float64(live.STags))
	n := c.domain.Counts()
	for _, d := range []struct {
		name       string
		m          *rdma.Messages
		terminates map[wire.Reason]uint64
	}{{"sent", &n.Sent, n.TerminatesSent}, {"received", &n.Received, n.TerminatesReceived}} {
		fpdus.send(ch, float64(d.m.FPDUs), d.name)
		messages.send(ch, float64(d.m.Writes), d.name, "write")
		messages.send(ch, float64(d.m.ReadRequests), d.name, "read_request")
		messages.send(ch, float64(d.m.ReadResponses), d.name, "read_response")
		messages.send(ch, float64(d.m.Sends), d.name, "send")
		invalidations.send(ch, float64(d.m.Invalidations), d.name)
		for r, times := range d.terminates {
			code, reason := "unknown", "unknown"
			if r != rdma.Unknown {
				code, reason = fmt.Sprintf("%d/%d/%02x", r.Layer, r.EType, r.Code), r.Text()
			}
			terminates.send(ch, float64(times), d.name, code, reason)
		}
	}
	ordStalls.send(ch, float64(n.ORDStalls))
	stagFaults.send(ch, float64(n.STagFaults))
	crcErrors.send(ch, float64(n.CRCErrors))
}
