package schema

import (
	"maps"
	"slices"
	"time"
)

// A Target is the body of a request that adds a target.
type Target struct {
	Name         string   `json:"name"`
	Alias        string   `json:"alias,omitempty"`
	Initiators   []string `json:"initiators"`           // patterns
	Networks     []string `json:"networks,omitempty"`   // that initiators may log in from; empty: all
	ResetsFor    []string `json:"resets_for,omitempty"` // patterns of initiators whose resets reach others
	PortalGroups []int    `json:"portal_groups,omitempty"`
	IPsec        string   `json:"ipsec,omitempty"` // off, audit or required
	IPsecProfile string   `json:"ipsec_profile,omitempty"`
	Cluster      bool     `json:"cluster,omitempty"` // all gateways of the cluster have it
}

// A LUN is the body of a request that adds a LUN. Its fields are the keys of the configuration.
type LUN struct {
	ID           *int   `json:"id,omitempty"` // nil: the first free number
	Backend      string `json:"backend"`
	Path         string `json:"path,omitempty"`
	Size         string `json:"size,omitempty"` // like 10GiB
	BlockSize    int    `json:"block_size,omitempty"`
	ReadOnly     bool   `json:"read_only,omitempty"`
	WriteThrough bool   `json:"write_through,omitempty"`
	Removable    bool   `json:"removable,omitempty"`
	Identity     string `json:"identity,omitempty"`
	Serial       string `json:"serial,omitempty"`
	NAA          string `json:"naa,omitempty"`
	Vendor       string `json:"vendor,omitempty"`
	Product      string `json:"product,omitempty"`
	Sanitize     bool   `json:"sanitize,omitempty"`
	Shared       bool   `json:"shared,omitempty"`
	Checksums    bool   `json:"checksums,omitempty"`
	// ChecksumsPath is the side file of the checksums.
	ChecksumsPath string `json:"checksums_path,omitempty"`
	Protection    int    `json:"protection,omitempty"` // type of T10 protection information: 1 or 3; 0: none
	// ThresholdAvailable and ThresholdUsed are thresholds of space, like 10GiB.
	ThresholdAvailable string   `json:"threshold_available,omitempty"`
	ThresholdUsed      string   `json:"threshold_used,omitempty"`
	Plugin             string   `json:"plugin,omitempty"`
	Options            string   `json:"options,omitempty"`
	Initiators         []string `json:"initiators,omitempty"`
	ReadOnlyFor        []string `json:"read_only_for,omitempty"`
	IOPS               int      `json:"iops,omitempty"`
	Bandwidth          string   `json:"bandwidth,omitempty"` // per second, like 100MiB
	Burst              string   `json:"burst,omitempty"`     // like 2s
	MinIOPS            int      `json:"min_iops,omitempty"`
	MinBandwidth       string   `json:"min_bandwidth,omitempty"`
	Rates              []Rate   `json:"rates,omitempty"`

	// Preallocate and From let the target create the file, which must not exist.
	Preallocate bool   `json:"preallocate,omitempty"` // allocate all its blocks
	From        string `json:"from,omitempty"`        // file or block device to copy
	// Clone makes the file, which must not exist, a clone of that of another LUN.
	Clone *CloneSource `json:"clone,omitempty"`
}

// A Rate is a limit or guarantee of each initiator whose name matches, in a request.
type Rate struct {
	Initiators   []string `json:"initiators"` // patterns
	IOPS         int      `json:"iops,omitempty"`
	Bandwidth    string   `json:"bandwidth,omitempty"`
	Burst        string   `json:"burst,omitempty"`
	MinIOPS      int      `json:"min_iops,omitempty"`
	MinBandwidth string   `json:"min_bandwidth,omitempty"`
}

// A ChangeUpdate is one line of the answer to a request that creates or extends a file.
// The last line has the plan or the error.
type ChangeUpdate struct {
	Progress *Progress `json:"progress,omitempty"`
	Plan     *Plan     `json:"plan,omitempty"`
	Error    *Error    `json:"error,omitempty"`
}

// A Progress says how much of a file is complete.
type Progress struct {
	Phase string `json:"phase"` // preallocating, zeroing or copying
	Done  int64  `json:"done"`  // bytes
	Total int64  `json:"total"`
}

// A Portal is the body of a request that adds a portal.
type Portal struct {
	Listen     string   `json:"listen"`
	Advertise  []string `json:"advertise,omitempty"`
	Transports []string `json:"transports,omitempty"`
	TPGT       int      `json:"tpgt,omitempty"` // 0: 1
	// IPsec is off, audit or required; empty: off.
	IPsec        string `json:"ipsec,omitempty"`
	IPsecProfile string `json:"ipsec_profile,omitempty"`
	// Control makes the control API available here, over RDMA.
	Control bool `json:"control,omitempty"`
}

// Values are the new values of keys of a LUN, target or portal, as in YAML.
type Values map[string]string

// Keys returns the keys of v in the order in which the target sets them.
func (v Values) Keys() []string {
	return slices.Sorted(maps.Keys(v))
}

// A User is the body of a request that adds a CHAP user to a target, or gives one another secret.
type User struct {
	Name       string `json:"name"`
	Secret     string `json:"secret,omitempty"`      // one of Secret and SecretFile
	SecretFile string `json:"secret_file,omitempty"` // on the machine of the target
	Initiator  string `json:"initiator,omitempty"`   // pattern of the initiators that may be this user; empty: all
}

// A Pattern is the body of a request that adds a pattern of initiator names.
type Pattern struct {
	Pattern string `json:"pattern"`
}

// A Reservation is the ReservationState of a LUN in a list.
type Reservation struct {
	Target string `json:"target"`
	LUN    int    `json:"lun"`
	ReservationState
}

// A DrainRequest asks for the end of the target.
type DrainRequest struct {
	// Within is how long initiators have to log out, like 30s; at most 24h.
	Within string `json:"within"`
	// To is where they are sent, HOST:PORT; empty: nowhere.
	To string `json:"to,omitempty"`
}

// MaxDrain bounds DrainRequest.Within.
const MaxDrain = 24 * time.Hour

// A DrainState says how the end of the target has begun.
type DrainState struct {
	Sessions int    `json:"sessions"`
	Within   string `json:"within"`
	To       string `json:"to,omitempty"`
}

// An Upgrade is the outcome of an upgrade.
type Upgrade struct {
	Before   string `json:"before"`   // version of the program that ended
	Version  string `json:"version"`  // of the program that serves now
	PID      int    `json:"pid"`      // of its process
	Sessions int    `json:"sessions"` // that continue
	Cut      int    `json:"cut"`      // sessions that did not come to rest, and whose initiators log in again
	Pause    string `json:"pause"`    // how long initiators waited
}

// Done answers a request that has no plan.
type Done struct {
	Done bool `json:"done"`
}

// A Recovery is the outcome of a recovery of a LUN.
type Recovery struct {
	Before string `json:"before"`         // its health before
	Health string `json:"health"`         // its health now
	Lost   string `json:"lost,omitempty"` // which data may be lost
}

// EventLogHeader is the HTTP header of an answer with events that names their numbering. The numbers of another numbering
// begin at 1: the target was started again, or another process continues it.
const EventLogHeader = "Event-Log"

// A client that sends PreferHeader (RFC 7240) with PreferProcessing gets a status 102 (RFC 2518, section 10.1) at once, and
// then every ProcessingEvery, until its change has an answer. Others get none, because not all HTTP clients accept it.
const (
	PreferHeader     = "Prefer"
	PreferProcessing = "processing"
	ProcessingEvery  = 2 * time.Second
)

// CaptureOptions select what a capture records, and when it ends.
type CaptureOptions struct {
	Max      int64         // bytes of the file; 0: 64 MiB
	Duration time.Duration // 0: until the session ends
	Snaplen  int           // most bytes of a packet in the file; 0: all
	Headers  bool          // leave out data
	LUN      *uint16       // only its commands, and what belongs to no LUN; nil: all LUNs
}

// SummaryTrailer is the HTTP trailer that follows the file of a capture. It has a Summary as JSON.
const SummaryTrailer = "Capture-Summary"

// A Summary is the result of a capture.
type Summary struct {
	Packets uint64 `json:"packets"` // in the file
	Octets  uint64 `json:"octets"`  // bytes of the streams
	Lost    uint64 `json:"lost"`    // bytes that are missing because the reader was too slow
	Size    int64  `json:"size"`    // of the file, in bytes
	Reason  string `json:"reason"`  // why the capture ended
	Full    bool   `json:"full"`    // it ended because the file has reached its limit
}
