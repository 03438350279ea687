// Package schema defines what a target and its clients exchange as JSON: its
// state, plans, events, requests and errors. It imports nothing of the target.
package schema

import "time"

// A State is a snapshot of a running target.
type State struct {
	Version string    `json:"version,omitempty"` // of the program
	Started time.Time `json:"started"`
	PID     int       `json:"pid,omitempty"` // of the process, as it knows itself
	// CPUSeconds is the CPU time of the process so far, user and system.
	CPUSeconds float64        `json:"cpu_seconds"`
	Config     string         `json:"config,omitempty"`  // path of the configuration file; empty: changes last until the process exits
	Pending    []string       `json:"pending,omitempty"` // changes that take effect at the next start
	Portals    []PortalState  `json:"portals"`
	Targets    []TargetState  `json:"targets"`
	Sessions   []SessionState `json:"sessions"`
	// LatencyBounds are the upper bounds of the buckets of each PhaseState, in seconds, ascending.
	LatencyBounds []float64          `json:"latency_bounds,omitempty"`
	Certificates  []CertificateState `json:"certificates,omitempty"` // of control.listen, metrics.web_config and dashboard.web_config
}

// A CertificateState describes a certificate, or a revocation list, that control.listen, the metrics server or the dashboard uses.
type CertificateState struct {
	Key     string    `json:"key"` // of the configuration, which names the file
	Path    string    `json:"path"`
	Subject string    `json:"subject"`
	Expires time.Time `json:"expires"`
}

// ExpiresSoon reports whether c has expired, or will soon: in 30 days, or a revocation list, which is
// renewed more often, within a day.
func (c CertificateState) ExpiresSoon(now time.Time) bool {
	soon := 30 * 24 * time.Hour
	if c.Key == RevocationKey {
		soon = 24 * time.Hour
	}
	return c.Expires.Sub(now) < soon
}

// RevocationKey is the CertificateState.Key of revocation lists.
const RevocationKey = "control.tls.crl"

// A PortalState describes a portal.
type PortalState struct {
	Listen      string   `json:"listen"`  // as configured
	Address     string   `json:"address"` // that the socket is bound to
	TPGT        int      `json:"tpgt"`    // portal group
	Advertise   []string `json:"advertise,omitempty"`
	Transports  []string `json:"transports"`
	Connections int      `json:"connections"` // of sessions
	IPsec       string   `json:"ipsec"`       // off, audit or required
	Control     bool     `json:"control"`     // the control API is here, too
}

// A TargetState describes a target.
type TargetState struct {
	Name         string     `json:"name"`
	Alias        string     `json:"alias,omitempty"`
	Initiators   []string   `json:"initiators,omitempty"`
	Networks     []string   `json:"networks,omitempty"`   // that initiators may log in from; empty: all
	ResetsFor    []string   `json:"resets_for,omitempty"` // initiators whose resets reach others
	Auth         string     `json:"auth"`                 // none or chap
	Algorithms   []string   `json:"algorithms,omitempty"` // of CHAP, most preferred first; empty: all
	Users        []string   `json:"users,omitempty"`      // of CHAP, with the pattern of names that each may have
	Mutual       string     `json:"mutual,omitempty"`     // name of the target in mutual CHAP
	Redirect     string     `json:"redirect,omitempty"`
	Permanent    bool       `json:"redirect_permanent,omitempty"`
	PortalGroups []int      `json:"portal_groups"` // whose portals serve the target
	IPsec        string     `json:"ipsec"`         // off, audit or required
	IPsecProfile string     `json:"ipsec_profile,omitempty"`
	Negotiation  LoginState `json:"negotiation"`
	LUNs         []LUNState `json:"luns"`
	Sessions     []uint16   `json:"sessions,omitempty"` // TSIHs
}

// A LoginState has what a login agrees on at most (RFC 7143, section 13).
type LoginState struct {
	InitialR2T               bool  `json:"initial_r2t"`
	FirstBurstLength         int64 `json:"first_burst_length"`           // bytes
	MaxBurstLength           int64 `json:"max_burst_length"`             // bytes
	MaxOutstandingR2T        int   `json:"max_outstanding_r2t"`          // of a command
	MaxRecvDataSegmentLength int64 `json:"max_recv_data_segment_length"` // bytes; of the target
}

// A UserState describes a CHAP user of a target.
type UserState struct {
	Name       string `json:"name"`
	Initiator  string `json:"initiator,omitempty"`
	SecretFile string `json:"secret_file,omitempty"` // empty: the configuration has the secret
	Previous   bool   `json:"previous"`              // a previous secret is valid, too
	Sessions   int    `json:"sessions"`
	Outdated   int    `json:"outdated"` // sessions that have used the previous secret
}

// Healthy is LUNState.Health of a LUN whose data can be trusted. docs/service.md describes the other values.
const Healthy = "ok"

// Values of LUNState.State.
const (
	Ready    = "ready"
	NotReady = "not ready"
	Draining = "draining" // removed: initiators no longer see it, and its last commands end
)

// A LUNState describes a LUN of a target.
type LUNState struct {
	Target       string            `json:"target"`
	ID           int               `json:"id"`
	Backend      string            `json:"backend"`
	Path         string            `json:"path,omitempty"`
	Size         int64             `json:"size"` // bytes; 0: unknown
	BlockSize    int               `json:"block_size"`
	NAA          string            `json:"naa"`
	Serial       string            `json:"serial"`
	Vendor       string            `json:"vendor"`
	Product      string            `json:"product"`
	State        string            `json:"state"`
	Reason       string            `json:"reason,omitempty"` // why State is not Ready
	ReadOnly     bool              `json:"read_only"`
	WriteThrough bool              `json:"write_through"`
	Health       string            `json:"health"`                 // Healthy, or degraded, failed, orphaned
	HealthSince  *time.Time        `json:"health_since,omitempty"` // of a LUN that is ready
	Removable    bool              `json:"removable"`
	Identity     string            `json:"identity,omitempty"` // the key of the configuration
	Sanitize     bool              `json:"sanitize"`
	Shared       bool              `json:"shared"`                  // gateways share it: see ClusterState
	Protection   int               `json:"protection,omitempty"`    // type of T10 protection information: 1 or 3; 0: none
	Checksums    *ChecksumState    `json:"checksums,omitempty"`     // nil: the LUN has none
	Space        *SpaceState       `json:"space,omitempty"`         // nil: not known
	Initiators   []string          `json:"initiators,omitempty"`    // that see the LUN; empty: all
	ReadOnlyFor  []string          `json:"read_only_for,omitempty"` // initiators that may only read
	RateState                      // of all initiators together
	Rates        []InitiatorRate   `json:"rates,omitempty"`
	Waiting      int               `json:"waiting"` // commands that wait for their turn at the backend
	Counters     CounterState      `json:"counters"`
	Reservation  *ReservationState `json:"reservation,omitempty"` // nil: no reservation and no registration
	Faults       *FaultState       `json:"faults,omitempty"`      // that an operator injects; nil: none
	Settings     []SettingState    `json:"settings,omitempty"`    // that initiators change; empty: the LUN has no store
}

// A SpaceState is what a LUN takes of its medium, as of the last look.
type SpaceState struct {
	Used       int64            `json:"used"`      // bytes
	Available  int64            `json:"available"` // bytes, which others may share
	Thresholds []ThresholdState `json:"thresholds,omitempty"`
}

// A ThresholdState is a threshold of the configuration.
type ThresholdState struct {
	Threshold string `json:"threshold"` // available or used
	Limit     int64  `json:"limit"`     // bytes
	Reached   bool   `json:"reached"`
}

// A SettingState describes a setting of a LUN that an initiator changes for all: write_protect (SWP),
// write_cache (WCE), descriptor_sense (D_SENSE), separate_task_sets (TST), thresholds of initiators, application_tags (ATMPE), application_tag_ranges, medium,
// access_state_N of portal group N, identifying_information (its length) and identifying_text, which may have any characters.
type SettingState struct {
	Setting string `json:"setting"`
	Value   string `json:"value"`
	Default string `json:"default"`
	Saved   string `json:"saved"`        // its value after a reset or a restart
	By      string `json:"by,omitempty"` // the initiator that changed it last, if known
}

// A RateState has the limits and guarantees of those who use a LUN. 0 means none.
type RateState struct {
	IOPS         int     `json:"iops,omitempty"`
	Bandwidth    int64   `json:"bandwidth,omitempty"` // bytes per second
	Burst        float64 `json:"burst,omitempty"`     // seconds
	MinIOPS      int     `json:"min_iops,omitempty"`
	MinBandwidth int64   `json:"min_bandwidth,omitempty"` // bytes per second
}

// An InitiatorRate is the RateState of each initiator whose name matches.
type InitiatorRate struct {
	Initiators []string `json:"initiators"` // patterns
	RateState
}

// A ReservationState describes the reservation of a LUN and the registrations with it.
type ReservationState struct {
	Type          string              `json:"type,omitempty"` // of the persistent reservation; empty: registrations only
	Generation    uint32              `json:"generation"`
	APTPL         bool                `json:"aptpl"` // survives a restart
	Registrations []RegistrationState `json:"registrations,omitempty"`
	Legacy        string              `json:"legacy,omitempty"` // initiator port that holds a RESERVE
}

// A RegistrationState describes a registration.
type RegistrationState struct {
	Initiator  string `json:"initiator"` // initiator port
	TargetPort int    `json:"target_port"`
	Key        string `json:"key"` // 0x and 16 hex digits
	Holder     bool   `json:"holder"`
}

// A SessionState describes a session.
type SessionState struct {
	TSIH      uint16 `json:"tsih"`
	Initiator string `json:"initiator"`
	ISID      string `json:"isid"`
	Target    string `json:"target,omitempty"`
	TPGT      int    `json:"tpgt"`
	Discovery bool   `json:"discovery"`
	Transport string `json:"transport"`      // iser or tcp
	User      string `json:"user,omitempty"` // CHAP name
	// OutdatedSecret says that the session has used the previous secret of its user.
	OutdatedSecret bool      `json:"outdated_secret,omitempty"`
	Started        time.Time `json:"started"`
	LUNs           []int     `json:"luns"`
	Tasks          int       `json:"tasks"` // in progress at this moment
	// Depth is the mean number of commands in progress over the last 5 to 10 s, or since the login: the time that all
	// commands took which ended, per second (Little's law). If none ended, it is Tasks.
	Depth       float64           `json:"depth"`
	Counters    CounterState      `json:"counters"`
	Parameters  map[string]string `json:"parameters"`
	Connections []ConnectionState `json:"connections"`
}

// A ConnectionState describes a connection of a session.
type ConnectionState struct {
	CID       int       `json:"cid"`
	Transport string    `json:"transport"`
	Remote    string    `json:"remote"`
	Local     string    `json:"local"`
	Started   time.Time `json:"started"`
	Received  uint64    `json:"received"` // PDUs
	// Framing is what MPA has agreed on. It is absent over TCP.
	Framing *FramingState `json:"framing,omitempty"`
	// IPsec says how IPsec protects the connection; nil: nothing is required of it.
	IPsec *ConnectionProtection `json:"ipsec,omitempty"`
}

// A FramingState describes MPA on a connection.
type FramingState struct {
	CRC        bool `json:"crc"`         // FPDUs carry CRCs
	MarkersIn  bool `json:"markers_in"`  // the initiator sends Markers
	MarkersOut bool `json:"markers_out"` // the target sends Markers
	ORD        int  `json:"ord"`         // RDMA Reads at a time
}

// A CounterState counts the SCSI commands of a session, or of a LUN since it was
// opened. The difference of two CounterStates describes the time between them.
type CounterState struct {
	Reads      uint64           `json:"reads"` // commands that ended with a status
	Writes     uint64           `json:"writes"`
	Others     uint64           `json:"others"`
	ReadBytes  uint64           `json:"read_bytes"` // data that was moved
	WriteBytes uint64           `json:"write_bytes"`
	Errors     uint64           `json:"errors"`    // commands that ended with CHECK CONDITION, except unit attentions
	Aborted    uint64           `json:"aborted"`   // commands that were aborted: without a status, or with TASK ABORTED
	Residuals  uint64           `json:"residuals"` // commands that ended with a residual count
	InFlight   int              `json:"in_flight"`
	Latency    []PhaseState     `json:"latency,omitempty"`
	Operations []OperationState `json:"operations,omitempty"`
}

// A Timing describes how long commands took whose responses were sent.
type Timing struct {
	Count   uint64  `json:"count"`
	Seconds float64 `json:"seconds"` // sum over all commands
	P50     float64 `json:"p50"`     // seconds, over all commands so far; estimated from Buckets
	P99     float64 `json:"p99"`
	// Buckets[i] counts the commands that took at most State.LatencyBounds[i], and longer than the
	// bound before. One more bucket counts those above all bounds. Zeros at the end are left out.
	Buckets []uint64 `json:"buckets,omitempty"`
}

// An OperationState describes the commands of a kind: the time from their arrival to their response, sizes and errors.
type OperationState struct {
	Op     string `json:"op"`     // read, write or other
	Errors uint64 `json:"errors"` // as in CounterState
	Timing
	// Sizes[i] counts the commands that moved at most SizeBound(i) bytes, and more than the bound before. One more
	// counts those above all bounds. Zeros at the end are left out.
	Sizes []uint64 `json:"sizes,omitempty"`
}

// A PhaseState describes how long commands whose response was sent spent in one
// phase. Phase read_wait counts only commands that waited for data.
type PhaseState struct {
	Phase string `json:"phase"` // receive, backend, read_wait, send or total
	Timing
}

// An Explanation says whether a target would admit an initiator, and why.
type Explanation struct {
	Admitted bool      `json:"admitted"`
	Status   string    `json:"status"` // of the Login Response
	Rules    []Rule    `json:"rules"`  // in the order of a login, up to the rule that decides
	LUNs     []LUNView `json:"luns,omitempty"`
}

// A Rule is one check of a login.
type Rule struct {
	Rule   string `json:"rule"`
	Passed bool   `json:"passed"`
	Why    string `json:"why"`
}

// A LUNView describes a LUN as one initiator sees it.
type LUNView struct {
	ID     int    `json:"id"`
	Access string `json:"access"` // "read and write", "read only" or "none"
	Why    string `json:"why"`
}

// An Event is an entry of the target's log that an auditor needs.
type Event struct {
	Number uint64         `json:"number"` // from 1, without gaps
	Time   time.Time      `json:"time"`
	Event  string         `json:"event"` // the kind, like login or config
	Level  string         `json:"level"`
	Text   string         `json:"text"`
	Attrs  map[string]any `json:"attrs"`
}
