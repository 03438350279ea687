// Package config reads, completes and checks the configuration of the target:
// a YAML file, with ISER_TARGET_ variables of the environment above it.
// docs/config.md is the reference of all keys.
package config

import (
	_ "embed"
	"log/slog"
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

	StateDir string `key:"state_dir"` // holds the identities of the LUNs; empty: they last as long as the process
	Debug    Debug  `key:"debug"`
	Log      Log    `key:"log"`
}

// A Portal is an address to listen on.
type Portal struct {
	Listen    string   `key:"listen"`    // host:port; without host: all addresses; port 0: one that is free
	Advertise []string `key:"advertise"` // host:port; what discovery answers instead of the accepted address
	// Transports is what initiators may speak: iser, tcp; empty: both.
	Transports []string `key:"transports"`
}

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
	LUNs       []LUN    `key:"luns"` // not needed with Redirect
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
}

// Limits bound what peers can make the target do.
type Limits struct {
	QueueDepth       int           `key:"queue_depth"`       // commands in flight per session
	ConnectionMemory Size          `key:"connection_memory"` // octets of data buffers of one connection
	MaxFPDU          int           `key:"max_fpdu"`          // octets of the ULPDU of an FPDU we send
	LoginTimeout     time.Duration `key:"login_timeout"`     // from accept to the full feature phase
	NOPInterval      time.Duration `key:"nop_interval"`      // idle time before a NOP-In; 0: none
	NOPTimeout       time.Duration `key:"nop_timeout"`       // for the answer to a NOP-In
	MaxConnections   int           `key:"max_connections"`   // of all portals together
}

// MPA is about the framing on TCP (RFC 5044).
type MPA struct {
	CRC Switch `key:"crc"` // off: CRCs only if the initiator asks for them
}

// Debug is the HTTP server with expvar and pprof.
type Debug struct {
	Listen string `key:"listen"` // host:port on the loopback; empty: no server
}

// Log is what goes to standard error, and how.
type Log struct {
	Level  string `key:"level"`  // debug, info, warn or error
	Format string `key:"format"` // text or json
}

// SlogLevel is Level as package log/slog counts; info if it is none.
func (l Log) SlogLevel() slog.Level { return levels[l.Level] }

var levels = map[string]slog.Level{"debug": slog.LevelDebug, "info": slog.LevelInfo, "warn": slog.LevelWarn, "error": slog.LevelError}

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
		},
		// siw of Linux 6.1 takes a good CRC for a bad one when it comes in two
		// pieces; it does not ask for CRCs, and works without.
		MPA:      MPA{CRC: false},
		StateDir: "/var/lib/iser-target",
		Log:      Log{Level: "info", Format: "text"},
	}
}

// unset is the LUN id, before it has been read.
const unset = -1

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
