// Package config reads, completes and checks the configuration of the target:
// a YAML file, with ISER_TARGET_ variables of the environment above it.
// docs/config.md is the reference of all keys.
package config

import (
	_ "embed"
	"log/slog"
	"math"
	"os"
	"path/filepath"
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

	StateDir string `key:"state_dir"` // holds what is kept of LUNs; empty: identities last as long as the process
	Debug    Debug  `key:"debug"`
	Log      Log    `key:"log"`

	Control   Control   `key:"control"`
	Metrics   Metrics   `key:"metrics"`
	Dashboard Dashboard `key:"dashboard"`

	Watch bool `key:"watch"` // the file is applied when it changes

	Drain time.Duration `key:"drain"` // what sessions have to log out when the target ends
}

// A Portal is an address to listen on.
type Portal struct {
	Listen    string   `key:"listen"`    // host:port; without host: all addresses; port 0: one that is free
	Advertise []string `key:"advertise"` // host:port; what discovery answers instead of the accepted address
	// Transports is what initiators may speak: iser, tcp; empty: both.
	Transports []string `key:"transports"`
	TPGT       int      `key:"tpgt"` // 1..65535: the tag of its portal group
}

// defaultTPGT is the TPGT of a portal, before it has been read.
const defaultTPGT = 1

// Serves tells whether initiators may speak this on the portal.
func (p Portal) Serves(transport string) bool {
	return len(p.Transports) == 0 || slices.Contains(p.Transports, transport)
}

// A Target is an iSCSI target node.
type Target struct {
	Name       string   `key:"name"`       // iSCSI name, normalised
	Alias      string   `key:"alias"`      // TargetAlias; may be empty
	Initiators []string `key:"initiators"` // security.Patterns: who may log in
	Auth       Auth     `key:"auth"`
	Redirect   Redirect `key:"redirect"`
	LUNs       []LUN    `key:"luns"`
	// PortalGroups are the tags of those that lead to the target; empty: all.
	PortalGroups []int `key:"portal_groups"`
}

// ServedBy tells whether a portal leads to the target.
func (t *Target) ServedBy(p Portal) bool {
	return len(t.PortalGroups) == 0 || slices.Contains(t.PortalGroups, p.TPGT)
}

// TPGTs are the tags of the portal groups that lead to t, ascending.
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

// A Redirect sends initiators elsewhere. Its zero value does not.
type Redirect struct {
	To        string `key:"to"` // host:port
	Permanent bool   `key:"permanent"`
}

// A LUN is a logical unit and the backend it lies on. Which fields a backend
// needs and takes is said in backends.
type LUN struct {
	ID           int    `key:"id"`         // 0..16383
	Backend      string `key:"backend"`    // memory, file, block or gotgt
	Path         string `key:"path"`       // file or device
	Size         Size   `key:"size"`       // octets, a multiple of BlockSize; 0 where the backend knows it
	BlockSize    int    `key:"block_size"` // 512 or 4096 octets; 0 where the backend knows it
	ReadOnly     bool   `key:"read_only"`
	WriteThrough bool   `key:"write_through"` // every write is on stable storage before it is answered
	Removable    bool   `key:"removable"`     // the medium can be ejected
	Sanitize     bool   `key:"sanitize"`      // initiators may erase all of it at once
	Plugin       string `key:"plugin"`        // name of a registered gotgt store
	Options      string `key:"options"`       // handed to that store

	Initiators  []string `key:"initiators"`    // security.Patterns: who sees it; nil: all who may log in
	ReadOnlyFor []string `key:"read_only_for"` // security.Patterns: who may only read
}

// forSome tells whether initiators differ in what they may do with the LUN.
func (l LUN) forSome() bool { return len(l.Initiators) > 0 || len(l.ReadOnlyFor) > 0 }

// Limits bound what peers can make the target do.
type Limits struct {
	QueueDepth       int           `key:"queue_depth"`       // commands in flight per session
	ConnectionMemory Size          `key:"connection_memory"` // octets of data buffers of one connection
	MaxFPDU          int           `key:"max_fpdu"`          // octets of the ULPDU of an FPDU we send
	LoginTimeout     time.Duration `key:"login_timeout"`     // from accept to the full feature phase
	NOPInterval      time.Duration `key:"nop_interval"`      // idle time before a NOP-In; 0: none
	NOPTimeout       time.Duration `key:"nop_timeout"`       // for the answer to a NOP-In
	MaxConnections   int           `key:"max_connections"`   // of all portals together

	PerSession         int `key:"connections_per_session"` // highest MaxConnections that login agrees on
	ErrorRecoveryLevel int `key:"error_recovery_level"`    // highest that login agrees on
}

// MPA is about the framing on TCP (RFC 5044).
type MPA struct {
	CRC Switch `key:"crc"` // off: CRCs only if the initiator asks for them
}

// Debug is the HTTP server with expvar and pprof.
type Debug struct {
	Listen string `key:"listen"` // host:port on the loopback; empty: no server
}

// Control is where the target takes orders.
type Control struct {
	Socket string     `key:"socket"` // path of a Unix socket; empty: none
	Listen string     `key:"listen"` // host:port, with TLS; empty: none
	TLS    ControlTLS `key:"tls"`    // for Listen
}

// ControlTLS are the paths of PEM files.
type ControlTLS struct {
	Cert     string `key:"cert"`      // of the target
	Key      string `key:"key"`       // that belongs to Cert
	ClientCA string `key:"client_ca"` // who has signed the certificates of clients
}

// Metrics is the HTTP server with metrics for Prometheus.
type Metrics struct {
	Listen string `key:"listen"` // host:port; empty: no server
}

// Dashboard is the HTTP server with a page for people.
type Dashboard struct {
	Listen string `key:"listen"` // host:port; empty: no server
}

// Log is what goes to standard error, and how.
type Log struct {
	Level  string `key:"level"`  // debug, info, warn or error
	Format string `key:"format"` // text or json
}

// SlogLevel is Level as package log/slog counts; info if it is none.
func (l Log) SlogLevel() slog.Level { return levels[l.Level] }

var levels = map[string]slog.Level{"debug": slog.LevelDebug, "info": slog.LevelInfo, "warn": slog.LevelWarn, "error": slog.LevelError}

// DefaultSocket is the path of the control socket if nobody says otherwise. It is
// in the directory for sockets of the user that runs the target; empty if the
// user has none.
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

// ServiceSocket is the path of the control socket of packaging/systemd's service, which
// runs as a user that has no directory of its own in /run but this.
const ServiceSocket = "/run/iser-target/control.sock"

// base is what a configuration is before anything has been read: all defaults
// but those of list items.
func base() Config {
	return Config{
		Limits: Limits{
			QueueDepth:       128,
			ConnectionMemory: 64 << 20,
			MaxFPDU:          64768,
			LoginTimeout:     15 * time.Second,
			NOPInterval:      15 * time.Second,
			NOPTimeout:       30 * time.Second,
			MaxConnections:   1024,

			PerSession:         8,
			ErrorRecoveryLevel: 2,
		},
		// siw of Linux 6.1 takes a good CRC for a bad one when it comes in two
		// pieces; it does not ask for CRCs, and works without.
		MPA:      MPA{CRC: false},
		StateDir: "/var/lib/iser-target",
		Log:      Log{Level: "info", Format: "text"},
		Control:  Control{Socket: DefaultSocket()},
		Drain:    10 * time.Second,
	}
}

// unset is the LUN id, before it has been read: none that anybody writes.
const unset = math.MinInt

// complete puts defaults into the items of lists, and names into the form in
// which they are compared.
func (c *Config) complete(normalize func(string) (string, error)) {
	for i := range c.Targets {
		t := &c.Targets[i]
		if name, err := normalize(t.Name); err == nil {
			t.Name = name
		}
		for j := range t.LUNs {
			if l := &t.LUNs[j]; l.BlockSize == 0 && backends[l.Backend].blockSize {
				l.BlockSize = 512
			}
		}
	}
}

//go:embed default.yaml
var defaultYAML []byte
