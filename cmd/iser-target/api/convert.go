package api

import (
	"cmp"
	"fmt"
	"net/http"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

// statuses has the HTTP status codes of errors (RFC 9110, section 15).
var statuses = map[schema.Code]int{
	schema.Invalid:  http.StatusBadRequest,
	schema.NotFound: http.StatusNotFound,
	schema.Method:   http.StatusMethodNotAllowed,
	schema.Exists:   http.StatusConflict,
	schema.Edited:   http.StatusConflict,
	schema.Refused:  http.StatusConflict,
	schema.TooLarge: http.StatusRequestEntityTooLarge,
	schema.Busy:     http.StatusServiceUnavailable,
	schema.Failed:   http.StatusInternalServerError,
}

// targetConfig converts the body of a request to the configuration of a target.
func targetConfig(t *schema.Target) config.Target {
	return config.Target{Name: t.Name, Alias: t.Alias, Initiators: t.Initiators, ResetsFor: t.ResetsFor, PortalGroups: t.PortalGroups}
}

// lunConfig converts the body of a request to the configuration of a LUN. Without an
// ID in the body, the caller must choose one.
func lunConfig(l *schema.LUN) (config.LUN, error) {
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
			return c, &schema.Error{Code: schema.Invalid, Message: fmt.Sprintf("size: %v", err)}
		}
		c.Size = size
	}
	return c, nil
}

// portalConfig converts the body of a request to the configuration of a portal.
func portalConfig(p *schema.Portal) config.Portal {
	return config.Portal{Listen: p.Listen, Advertise: p.Advertise, Transports: p.Transports, TPGT: cmp.Or(p.TPGT, 1)}
}
