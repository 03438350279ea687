// Package config reads, completes and checks the configuration of the target: a YAML file, with
// ISER_TARGET_ variables of the environment above it. docs/config.md is the reference of all keys.
package config

import (
	"cmp"
	_ "embed"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"time"
)

// Config is a whole configuration. The key tag is the name of a field in the
// file; a field with a default has it when Load returns.
type Config struct {
	Portals []Portal `key:"portals"`
	Targets []Target `key:"targets"`
	Limits  Limits   `key:"limits"`
	MPA     MPA      `key:"mpa"`

	DiscoveryAuth Auth `key:"discovery_auth"` // before discovery

	StateDir string   `key:"state_dir"` // directory of LUN identities and state; empty: they end with the process
	Debug    Listener `key:"debug"`     // of expvar and pprof, on the loopback
	Log      Log      `key:"log"`

	IPsec IPsec `key:"ipsec"`

	Control   Control     `key:"control"`
	Process   Process     `key:"process"`   // what the process may do
	Metrics   WebListener `key:"metrics"`   // of the metrics for Prometheus
	Dashboard WebListener `key:"dashboard"` // of the dashboard page

	Cluster Cluster `key:"cluster"` // gateways that share LUNs

	Watch bool `key:"watch"` // apply the file when it changes

	Drain   time.Duration `key:"drain"`    // time that sessions get to log out when the target shuts down
	DrainTo string        `key:"drain_to"` // where initiators are sent meanwhile
}

// A Portal is an address to listen on.
type Portal struct {
	Listen    string   `key:"listen"`    // host:port; without host: all addresses; port 0: any free port
	Advertise []string `key:"advertise"` // host:port; discovery reports these instead of the accepted address
	// Transports lists what initiators may speak: iser, tcp; empty: both.
	Transports []string `key:"transports"`
	TPGT       int      `key:"tpgt"` // 1..65535: the tag of its portal group
	// IPsec is an ipsec.Demand; empty: off. IPsecProfile names one of IPsec.Profiles; empty: see IPsec.Profile.
	IPsec        string `key:"ipsec"`
	IPsecProfile string `key:"ipsec_profile"`
	// Control says that managers with a certificate reach the control API here, over RDMA.
	Control bool `key:"control"`
}

// ServesManagers reports whether managers reach the control API through a portal.
func (c *Config) ServesManagers() bool {
	return slices.ContainsFunc(c.Portals, func(p Portal) bool { return p.Control })
}

// defaultTPGT is the TPGT of a portal that names none.
const defaultTPGT = 1

// Serves reports whether initiators may use the transport, iser or tcp, on the portal.
func (p Portal) Serves(transport string) bool {
	return len(p.Transports) == 0 || slices.Contains(p.Transports, transport)
}

// A Target is an iSCSI target node.
type Target struct {
	Name       string   `key:"name"`       // iSCSI name, normalised
	Alias      string   `key:"alias"`      // TargetAlias; may be empty
	Initiators []string `key:"initiators"` // security.Patterns: initiators that may log in
	Networks   []string `key:"networks"`   // security.Networks: where they may log in from; nil: everywhere
	ResetsFor  []string `key:"resets_for"` // security.Patterns: initiators whose resets reach others; nil: none
	Auth       Auth     `key:"auth"`
	Redirect   Redirect `key:"redirect"`
	LUNs       []LUN    `key:"luns"`
	// PortalGroups are the tags of the portal groups that lead to the target; empty: all.
	PortalGroups []int `key:"portal_groups"`
	// IPsec and IPsecProfile mean for the sessions of the target what those of Portal mean for connections.
	IPsec        string `key:"ipsec"`
	IPsecProfile string `key:"ipsec_profile"`

	// What a login agrees on at most, under the names of RFC 7143, section 13.
	InitialR2T        bool `key:"initial_r2t"`
	FirstBurst        Size `key:"first_burst_length"`           // bytes
	MaxBurst          Size `key:"max_burst_length"`             // bytes
	MaxOutstandingR2T int  `key:"max_outstanding_r2t"`          // R2Ts of a command
	MaxRecvSegment    Size `key:"max_recv_data_segment_length"` // bytes; of the target
}

// NewTarget returns a Target whose keys with a default have it.
func NewTarget() Target {
	return Target{InitialR2T: true, FirstBurst: 64 << 10, MaxBurst: 1 << 20, MaxOutstandingR2T: 1, MaxRecvSegment: 256 << 10}
}

// ServedBy reports whether the portal p leads to the target.
func (t *Target) ServedBy(p Portal) bool {
	return len(t.PortalGroups) == 0 || slices.Contains(t.PortalGroups, p.TPGT)
}

// TPGTs returns the tags of the portal groups that lead to t, ascending.
func (c *Config) TPGTs(t *Target) []uint16 {
	var tags []uint16
	for _, p := range c.Portals {
		if t.ServedBy(p) {
			tags = append(tags, uint16(p.TPGT))
		}
	}
	slices.Sort(tags)
	return slices.Compact(tags)
}

// A Redirect sends initiators to another portal. The zero value does not.
type Redirect struct {
	To        string `key:"to"` // host:port
	Permanent bool   `key:"permanent"`
}

// A LUN is a logical unit and its backend. The table backends lists the fields that each
// backend requires and accepts.
type LUN struct {
	ID           int    `key:"id"`         // 0..16383
	Backend      string `key:"backend"`    // memory, file, block, nbd, rbd or gotgt
	Path         string `key:"path"`       // file, device or URI of a server
	Size         Size   `key:"size"`       // bytes, a multiple of BlockSize; 0: the backend's size
	BlockSize    int    `key:"block_size"` // 512 or 4096 bytes; 0: the backend's block size
	ReadOnly     bool   `key:"read_only"`
	WriteThrough bool   `key:"write_through"` // every write is on stable storage before its response
	Removable    bool   `key:"removable"`     // the medium can be ejected
	Sanitize     bool   `key:"sanitize"`      // initiators may erase the whole LUN with SANITIZE
	Shared       bool   `key:"shared"`        // the gateways of Cluster share the LUN: one serves it at a time
	Checksums    bool   `key:"checksums"`     // blocks have checksums in a side file, which reads verify
	// ChecksumsPath is the side file; of a file the default is Path with ".sums".
	ChecksumsPath string `key:"checksums_path"`
	// Protection is the type of T10 protection information that blocks have, 1 or 3; 0: none.
	Protection int    `key:"protection"`
	Identity   string `key:"identity"` // of a file that state_dir does not know; IdentityFile, IdentityNew or empty
	// What the LUN is called towards initiators, so that a disk keeps its names when it moves here; empty: the target's.
	Serial  string `key:"serial"`  // page 80h
	NAA     string `key:"naa"`     // page 83h: 16 or 32 hexadecimal digits
	Vendor  string `key:"vendor"`  // of INQUIRY: up to 8 characters
	Product string `key:"product"` // up to 16 characters
	Plugin  string `key:"plugin"`  // name of a registered gotgt store
	Options string `key:"options"` // passed to that store

	// What a thin LUN takes of its medium, in bytes: initiators and operators are told when that is reached. 0: not.
	ThresholdAvailable Size `key:"threshold_available"` // space that is left
	ThresholdUsed      Size `key:"threshold_used"`      // space that the LUN takes

	Initiators  []string `key:"initiators"`    // security.Patterns: initiators that see the LUN; nil: all that may log in
	ReadOnlyFor []string `key:"read_only_for"` // security.Patterns: initiators that may only read

	// How fast all initiators together may use the LUN, and how fast they may at least.
	IOPS         int           `key:"iops"`          // commands per second that move data; 0: no limit
	Bandwidth    Size          `key:"bandwidth"`     // bytes per second; 0: no limit
	Burst        time.Duration `key:"burst"`         // the time without use that may be made up for at once
	MinIOPS      int           `key:"min_iops"`      // commands per second that others leave to the LUN
	MinBandwidth Size          `key:"min_bandwidth"` // bytes per second that others leave to the LUN
	Rates        []Rate        `key:"rates"`         // of each initiator
}

// What LUN.Identity says about a file that another target has served.
const (
	IdentityFile = "file" // it keeps the identity of its mark
	IdentityNew  = "new"  // it gets another one
)

// A Rate says how fast each of some initiators may use a LUN, and how fast it may at least. Its
// fields mean for one initiator what those of LUN mean for all together.
type Rate struct {
	Initiators   []string      `key:"initiators"` // security.Patterns; the first Rate that matches a name counts
	IOPS         int           `key:"iops"`
	Bandwidth    Size          `key:"bandwidth"`
	Burst        time.Duration `key:"burst"`
	MinIOPS      int           `key:"min_iops"`
	MinBandwidth Size          `key:"min_bandwidth"`
}

// Rate returns the rate of all initiators of l together.
func (l LUN) Rate() Rate {
	return Rate{IOPS: l.IOPS, Bandwidth: l.Bandwidth, Burst: l.Burst, MinIOPS: l.MinIOPS, MinBandwidth: l.MinBandwidth}
}

// forSome reports whether initiators differ in what they may do with the LUN.
func (l LUN) forSome() bool { return len(l.Initiators) > 0 || len(l.ReadOnlyFor) > 0 }

// Limits bound what peers can make the target do.
type Limits struct {
	QueueDepth         int           `key:"queue_depth"`                 // commands in flight per session
	ConnectionMemory   Size          `key:"connection_memory"`           // bytes of data buffers of one connection
	Memory             Size          `key:"memory"`                      // bytes that all initiators make the target use; 0: from the machine
	BackendCalls       int           `key:"backend_calls"`               // of stores under way in the process; 0: from the machine
	BackendCallsPerLUN int           `key:"backend_calls_per_lun"`       // of its store under way at a LUN
	HeavyCommands      int           `key:"heavy_commands"`              // that use a CPU at a time; 0: from the machine
	MaxFPDU            int           `key:"max_fpdu"`                    // bytes of the ULPDU of an FPDU that the target sends
	LoginTimeout       time.Duration `key:"login_timeout"`               // from accept to the full feature phase
	NOPInterval        time.Duration `key:"nop_interval"`                // idle time before a NOP-In; 0: no NOP-In
	NOPTimeout         time.Duration `key:"nop_timeout"`                 // time to answer a NOP-In
	PollTime           time.Duration `key:"poll_time"`                   // that a connection polls before it sleeps
	OrderTimeout       time.Duration `key:"order_timeout"`               // of a command that stops others and waits for its initiator
	DataTimeout        time.Duration `key:"data_timeout"`                // of data that the target awaits and of which none comes
	SendTimeout        time.Duration `key:"send_timeout"`                // of what the target sends and of which nothing is taken
	TaskWait           time.Duration `key:"task_wait"`                   // of a task for other tasks, until that is reported
	MaxTime2Wait       time.Duration `key:"max_time2wait"`               // of a session at ErrorRecoveryLevel 2
	MaxTime2Retain     time.Duration `key:"max_time2retain"`             // that a login agrees on
	LostSessions       int           `key:"lost_sessions"`               // sessions without a connection that wait for one
	LostSessionsByName int           `key:"lost_sessions_per_initiator"` // of these, of one initiator
	Tokens             int           `key:"tokens"`                      // ROD tokens of POPULATE TOKEN
	TokensByName       int           `key:"tokens_per_initiator"`        // of these, of one initiator
	MaxConnections     int           `key:"max_connections"`             // of all portals together

	Reserved    int `key:"reserved_connections"`    // for names with few sessions, or none; 0: an eighth of MaxConnections
	PerAddress  int `key:"connections_per_address"` // 0: all that are not reserved
	PerPortal   int `key:"connections_per_portal"`  // 0: MaxConnections
	Sessions    int `key:"sessions_per_initiator"`  // of an initiator name with a target
	PerUser     int `key:"sessions_per_user"`       // of a CHAP user; 0: as many as there are connections that are not reserved
	Discoveries int `key:"discovery_per_address"`   // discovery sessions
	LogLines    int `key:"log_lines_per_address"`   // per second

	PerSession         int `key:"connections_per_session"` // highest MaxConnections that login agrees on
	ErrorRecoveryLevel int `key:"error_recovery_level"`    // highest level that login agrees on

	Registrations int `key:"registrations_per_initiator"` // of persistent reservations, with one LUN

	StateTimeout time.Duration `key:"state_timeout"` // to store a change in state_dir
	FenceTimeout time.Duration `key:"fence_timeout"` // from the abort of a command until nobody waits for its store
	StoreTimeout time.Duration `key:"store_timeout"` // of one call of a store, until the store counts as hung
	Descriptors  int           `key:"descriptors"`   // file descriptors; 0: RLIMIT_NOFILE
}

// Bounds returns the bounds of l by their keys: numbers, bytes, and nanoseconds of durations.
func (l *Limits) Bounds() map[string]int64 {
	bounds := map[string]int64{}
	v := reflect.ValueOf(l).Elem()
	for i := range v.NumField() {
		if f := v.Field(i); f.CanInt() {
			bounds[v.Type().Field(i).Tag.Get("key")] = f.Int()
		}
	}
	l.places(bounds)
	return bounds
}

// places sets the bounds of places that follow from others.
func (l *Limits) places(bounds map[string]int64) {
	all := int64(l.MaxConnections)
	reserved := cmp.Or(int64(l.Reserved), all/8)
	for _, b := range []struct {
		key   string
		bound int64
	}{
		{"reserved_connections", reserved},
		{"connections_per_address", all - reserved},
		{"connections_per_portal", all},
		{"sessions_per_user", all - reserved},
	} {
		bounds[b.key] = cmp.Or(bounds[b.key], b.bound)
	}
}

// MPA configures the framing on TCP (RFC 5044).
type MPA struct {
	CRC     CRCPolicy `key:"crc"`     // whether the target asks for CRCs
	Markers Switch    `key:"markers"` // on: initiators have to insert Markers
	// UnstatedORD bounds the RDMA Reads at a time towards an initiator that does not say how many it accepts.
	UnstatedORD int `key:"unstated_ord"`
}

// A Listener configures the address of an HTTP server.
type Listener struct {
	Listen string `key:"listen"` // host:port; empty: no server
}

// A WebListener configures an HTTP server that can have TLS and a login.
type WebListener struct {
	Listen string `key:"listen"` // host:port; empty: no server
	// WebConfig is the path of a web configuration file of Prometheus exporters; empty: neither TLS nor login.
	WebConfig string `key:"web_config"`
}

// Control configures the addresses of the control API, and the rights of its callers.
type Control struct {
	Socket      string     `key:"socket"`       // path of a Unix socket; empty: none
	SocketGroup string     `key:"socket_group"` // group that may connect to Socket; empty: only its owner may
	Listen      string     `key:"listen"`       // host:port, with TLS; empty: none
	TLS         ControlTLS `key:"tls"`          // for Listen
	Access      []Access   `key:"access"`       // roles of callers
	Paths       []string   `key:"paths"`        // directories in which callers may name files and devices; empty: state_dir
}

// An Access gives some callers of the control API a role. It names one of User, Group, Certificate and
// OU. The highest role that a caller has counts.
type Access struct {
	User        string `key:"user"`        // of this machine, by name or number
	Group       string `key:"group"`       // the same
	Certificate string `key:"certificate"` // common name or alternative name of a client certificate
	OU          string `key:"ou"`          // organizational unit of a client certificate
	Role        string `key:"role"`        // one of Roles
}

// A Process says which rights the process keeps. The zero value takes nothing from it that it may need.
type Process struct {
	User         string   `key:"user"`         // to become, by name or number; empty: the one that starts it
	Capabilities []string `key:"capabilities"` // kept besides those that the target needs
	Paths        []string `key:"paths"`        // what LUNs are in, and all that can be opened; empty: everything
}

// A Cluster is a group of gateways that share LUNs, and agree in etcd which of them serves one. The zero value is none.
type Cluster struct {
	Name   string     `key:"name"`   // of this gateway; empty: it is in no group
	Etcd   []string   `key:"etcd"`   // URLs of the members of etcd
	Prefix string     `key:"prefix"` // of the keys of the group in etcd
	TLS    ClusterTLS `key:"tls"`    // for https
	// Lease is how long a gateway is silent until others take its LUNs over, and Failback how long it is back until it gets them
	// again.
	Lease    time.Duration `key:"lease"`
	Failback time.Duration `key:"failback"`
	// FenceProgram keeps gateways from a medium that is no RBD image; empty: no such LUN is shared.
	FenceProgram string `key:"fence_program"`
}

// ClusterTLS has the paths of PEM files.
type ClusterTLS struct {
	CA   string `key:"ca"`   // CA that signs the certificates of etcd; empty: those of the system
	Cert string `key:"cert"` // certificate of the target, for etcd; empty: none
	Key  string `key:"key"`  // private key of Cert
}

// Roles lists the roles of callers of the control API. Each includes those before it.
var Roles = []string{"read", "operate", "admin"}

// ControlTLS has the paths of PEM files.
type ControlTLS struct {
	Cert     string `key:"cert"`      // certificate of the target
	Key      string `key:"key"`       // private key of Cert
	ClientCA string `key:"client_ca"` // CA that signs the certificates of clients
	CRL      string `key:"crl"`       // revocation lists of CAs; empty: revocation is not checked
}

// Log configures the log on standard error.
type Log struct {
	Level  string `key:"level"`  // debug, info, warn or error
	Format string `key:"format"` // text or json
	// SlowIO is how long a command takes at least that is logged; 0: none is.
	SlowIO time.Duration `key:"slow_io"`
}

// SlogLevel returns Level as a slog.Level; LevelInfo if Level is not valid.
func (l Log) SlogLevel() slog.Level { return levels[l.Level] }

var levels = map[string]slog.Level{"debug": slog.LevelDebug, "info": slog.LevelInfo, "warn": slog.LevelWarn, "error": slog.LevelError}

// DefaultSocket returns the default path of the control socket, in the runtime directory of
// the user that runs the target: /run for root, else $XDG_RUNTIME_DIR. It returns "" if the
// user has no runtime directory.
func DefaultSocket() string {
	const name = "iser-target.sock"
	if os.Geteuid() == 0 {
		return "/run/" + name
	}
	if dir := os.Getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(dir) {
		return filepath.Join(dir, name)
	}
	return ""
}

// ServiceSocket is the path of the control socket of the service in packaging/systemd, whose
// user has only this directory in /run.
const ServiceSocket = "/run/iser-target/control.sock"

// base returns a configuration with all defaults except those of list items.
func base() Config {
	return Config{
		Limits: Limits{
			QueueDepth:         128,
			ConnectionMemory:   64 << 20,
			BackendCallsPerLUN: 64,
			MaxFPDU:            64768,
			LoginTimeout:       15 * time.Second,
			NOPInterval:        15 * time.Second,
			NOPTimeout:         30 * time.Second,
			OrderTimeout:       5 * time.Second,
			DataTimeout:        30 * time.Second,
			SendTimeout:        60 * time.Second,
			TaskWait:           30 * time.Second,
			MaxTime2Wait:       30 * time.Second,
			MaxTime2Retain:     20 * time.Second,
			LostSessions:       32,
			LostSessionsByName: 4,
			Tokens:             2048,
			TokensByName:       512,
			MaxConnections:     2048,

			Sessions:    16,
			Discoveries: 32,
			LogLines:    10,

			PerSession:         8,
			ErrorRecoveryLevel: 2,

			FenceTimeout: time.Second,
			StoreTimeout: 10 * time.Second,

			Registrations: 32,

			StateTimeout: 10 * time.Second,
		},
		MPA:      MPA{CRC: CRCAuto, UnstatedORD: 1},
		StateDir: "/var/lib/iser-target",
		Log:      Log{Level: "info", Format: "text", SlowIO: 10 * time.Second},
		Control:  Control{Socket: DefaultSocket()},
		Cluster:  Cluster{Prefix: "/iser-target", Lease: 5 * time.Second, Failback: 30 * time.Second},
		IPsec: IPsec{
			Driver: "xfrm", Grace: 10 * time.Second, DriverTimeout: 10 * time.Second,
			VICI: IPsecVICI{Socket: "/run/charon.vici"},
			Exec: IPsecExec{Timeout: 2 * time.Second},
		},
	}
}

// unset is the id of a LUN that names none.
const unset = math.MinInt

// complete sets the defaults of list items and normalizes target names.
func (c *Config) complete() {
	for i := range c.Targets {
		t := &c.Targets[i]
		t.Name = normalName(t.Name)
		for j := range t.LUNs {
			if l := &t.LUNs[j]; l.BlockSize == 0 && backends[l.Backend].blockSize {
				l.BlockSize = 512
			}
		}
	}
}

//go:embed default.yaml
var defaultYAML []byte
