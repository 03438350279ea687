// Package api is how a running target is managed: JSON over HTTP on a Unix socket, as
// openapi.yaml describes it. It has the server, a client, and the types that both use;
// what is read are the types of package daemon.
package api

import (
	"cmp"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/daemon"
	"github.com/iser-target/iser-target/config"
)

// An Error is the answer to a request that has failed.
type Error struct {
	Message string `json:"error"`
	Hint    string `json:"hint,omitempty"` // what to do next
	Code    Code   `json:"code"`
	// Needs are the options of the request that are missing: disrupt, allow_shrink.
	Needs []string     `json:"needs,omitempty"`
	Plan  *daemon.Plan `json:"plan,omitempty"` // what was refused
}

func (e *Error) Error() string { return e.Message }

// A Code tells errors apart.
type Code string

const (
	Invalid   Code = "invalid"     // the request, or the configuration that it would make
	NotFound  Code = "not_found"   // what it is about
	Method    Code = "method"      // there is the path, but not for this method
	Exists    Code = "exists"      // what it would add
	Edited    Code = "edited"      // the configuration file was, and not applied
	Refused   Code = "refused"     // it does harm that was not allowed
	TooLarge  Code = "too_large"   // the body
	Busy      Code = "busy"        // another change, or too many followers, for too long
	Failed    Code = "failed"      // and everything is as before
	Unreached Code = "unreachable" // of the client: there is no target behind the socket
)

// statuses are the codes' in HTTP (RFC 9110, section 15).
var statuses = map[Code]int{
	Invalid:  http.StatusBadRequest,
	NotFound: http.StatusNotFound,
	Method:   http.StatusMethodNotAllowed,
	Exists:   http.StatusConflict,
	Edited:   http.StatusConflict,
	Refused:  http.StatusConflict,
	TooLarge: http.StatusRequestEntityTooLarge,
	Busy:     http.StatusServiceUnavailable,
	Failed:   http.StatusInternalServerError,
}

// Options say how a change is to be made. In a request they are its query.
type Options struct {
	DryRun      bool          // dry_run: the plan alone
	Disrupt     bool          // disrupt: sessions may be disturbed
	AllowShrink bool          // allow_shrink: LUNs may become smaller
	Now         bool          // now: what is removed has no time to end
	Drain       time.Duration // drain: what it has; 0: daemon.DefaultDrain
}

// A Target is one that is to be added.
type Target struct {
	Name         string   `json:"name"`
	Alias        string   `json:"alias,omitempty"`
	Initiators   []string `json:"initiators"` // patterns
	PortalGroups []int    `json:"portal_groups,omitempty"`
}

func (t *Target) config() config.Target {
	return config.Target{Name: t.Name, Alias: t.Alias, Initiators: t.Initiators, PortalGroups: t.PortalGroups}
}

// A LUN is one that is to be added: the keys of the configuration.
type LUN struct {
	ID           *int     `json:"id,omitempty"` // nil: the first that is free
	Backend      string   `json:"backend"`
	Path         string   `json:"path,omitempty"`
	Size         string   `json:"size,omitempty"` // like 10GiB
	BlockSize    int      `json:"block_size,omitempty"`
	ReadOnly     bool     `json:"read_only,omitempty"`
	WriteThrough bool     `json:"write_through,omitempty"`
	Removable    bool     `json:"removable,omitempty"`
	Sanitize     bool     `json:"sanitize,omitempty"`
	Plugin       string   `json:"plugin,omitempty"`
	Options      string   `json:"options,omitempty"`
	Initiators   []string `json:"initiators,omitempty"`
	ReadOnlyFor  []string `json:"read_only_for,omitempty"`

	// How its file is made, which then must not be there.
	Preallocate bool   `json:"preallocate,omitempty"` // all blocks of it are allocated
	From        string `json:"from,omitempty"`        // file or block device that it is a copy of
}

// A ChangeUpdate is a line of the answer to one who wants to hear how far the making of a LUN
// has come. The last one has the plan or the error.
type ChangeUpdate struct {
	Progress *Progress    `json:"progress,omitempty"`
	Plan     *daemon.Plan `json:"plan,omitempty"`
	Error    *Error       `json:"error,omitempty"`
}

// A Progress is how far something has come.
type Progress struct {
	Phase string `json:"phase"` // preallocating, zeroing or copying
	Done  int64  `json:"done"`  // octets
	Total int64  `json:"total"`
}

// config is the LUN as configured; its ID is for the caller to find if there is none.
func (l *LUN) config() (config.LUN, error) {
	c := config.LUN{
		Backend: l.Backend, Path: l.Path, BlockSize: l.BlockSize, ReadOnly: l.ReadOnly, WriteThrough: l.WriteThrough,
		Removable: l.Removable, Sanitize: l.Sanitize, Plugin: l.Plugin, Options: l.Options,
		Initiators: l.Initiators, ReadOnlyFor: l.ReadOnlyFor,
	}
	if l.ID != nil {
		c.ID = *l.ID
	}
	if l.Size != "" {
		size, err := config.ParseSize(l.Size)
		if err != nil {
			return c, &Error{Code: Invalid, Message: fmt.Sprintf("size: %v", err)}
		}
		c.Size = size
	}
	return c, nil
}

// A Portal is one that is to be added.
type Portal struct {
	Listen     string   `json:"listen"`
	Advertise  []string `json:"advertise,omitempty"`
	Transports []string `json:"transports,omitempty"`
	TPGT       int      `json:"tpgt,omitempty"` // 0: 1
}

func (p *Portal) config() config.Portal {
	return config.Portal{Listen: p.Listen, Advertise: p.Advertise, Transports: p.Transports, TPGT: cmp.Or(p.TPGT, 1)}
}

// Values are keys of a LUN or target and what they are to be, as in YAML.
type Values map[string]string

// Keys are those of v, in the order in which they are set.
func (v Values) Keys() []string {
	var keys []string
	for k := range v {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// A Pattern names initiators.
type Pattern struct {
	Pattern string `json:"pattern"`
}

// A Reservation is what a LUN is reserved, or registered with, for.
type Reservation struct {
	Target string `json:"target"`
	LUN    int    `json:"lun"`
	daemon.ReservationState
}

// options are what a refusal wants, by their names in a query.
func options(flags []string) []string {
	var list []string
	for _, f := range flags {
		list = append(list, strings.ReplaceAll(strings.TrimLeft(f, "-"), "-", "_"))
	}
	return list
}
