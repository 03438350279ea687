package api

import (
	"cmp"
	"fmt"
	"net/http"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

// statuses has the HTTP status codes of errors (RFC 9110, section 15).
var statuses = map[schema.Code]int{
	schema.Invalid:   http.StatusBadRequest,
	schema.Forbidden: http.StatusForbidden,
	schema.NotFound:  http.StatusNotFound,
	schema.Method:    http.StatusMethodNotAllowed,
	schema.Exists:    http.StatusConflict,
	schema.Edited:    http.StatusConflict,
	schema.Refused:   http.StatusConflict,
	schema.TooLarge:  http.StatusRequestEntityTooLarge,
	schema.Busy:      http.StatusServiceUnavailable,
	schema.Failed:    http.StatusInternalServerError,
}

// targetConfig converts the body of a request to the configuration of a target.
func targetConfig(t *schema.Target) config.Target {
	c := config.NewTarget()
	c.Name, c.Alias, c.Initiators, c.Networks = t.Name, t.Alias, t.Initiators, t.Networks
	c.ResetsFor, c.PortalGroups = t.ResetsFor, t.PortalGroups
	c.IPsec, c.IPsecProfile = t.IPsec, t.IPsecProfile
	return c
}

// lunConfig converts the body of a request to the configuration of a LUN. Without an
// ID in the body, the caller must choose one.
func lunConfig(l *schema.LUN) (config.LUN, error) {
	c := config.LUN{
		Backend: l.Backend, Path: l.Path, BlockSize: l.BlockSize, ReadOnly: l.ReadOnly, WriteThrough: l.WriteThrough,
		Removable: l.Removable, Identity: l.Identity, Serial: l.Serial, NAA: l.NAA, Vendor: l.Vendor, Product: l.Product, Sanitize: l.Sanitize, Shared: l.Shared, Checksums: l.Checksums, ChecksumsPath: l.ChecksumsPath, Protection: l.Protection, Plugin: l.Plugin, Options: l.Options,
		Initiators: l.Initiators, ReadOnlyFor: l.ReadOnlyFor,
	}
	all, err := rateConfig("", &schema.Rate{
		IOPS: l.IOPS, Bandwidth: l.Bandwidth, Burst: l.Burst, MinIOPS: l.MinIOPS, MinBandwidth: l.MinBandwidth,
	})
	if err != nil {
		return c, err
	}
	c.IOPS, c.Bandwidth, c.Burst = all.IOPS, all.Bandwidth, all.Burst
	c.MinIOPS, c.MinBandwidth = all.MinIOPS, all.MinBandwidth
	for i := range l.Rates {
		r, err := rateConfig(fmt.Sprintf("rates[%d].", i), &l.Rates[i])
		if err != nil {
			return c, err
		}
		c.Rates = append(c.Rates, r)
	}
	if l.ID != nil {
		c.ID = *l.ID
	}
	for _, f := range []struct {
		key, text string
		to        *config.Size
	}{
		{"size", l.Size, &c.Size},
		{"threshold_available", l.ThresholdAvailable, &c.ThresholdAvailable}, {"threshold_used", l.ThresholdUsed, &c.ThresholdUsed},
	} {
		if f.text == "" {
			continue
		}
		if *f.to, err = config.ParseSize(f.text); err != nil {
			return c, &schema.Error{Code: schema.Invalid, Message: fmt.Sprintf("%s: %v", f.key, err)}
		}
	}
	return c, nil
}

// rateConfig converts a rate in a request. path begins the names of its keys in errors.
func rateConfig(path string, r *schema.Rate) (config.Rate, error) {
	c := config.Rate{Initiators: r.Initiators, IOPS: r.IOPS, MinIOPS: r.MinIOPS}
	for _, f := range []struct {
		key, text string
		to        *config.Size
	}{{"bandwidth", r.Bandwidth, &c.Bandwidth}, {"min_bandwidth", r.MinBandwidth, &c.MinBandwidth}} {
		if f.text == "" {
			continue
		}
		size, err := config.ParseSize(f.text)
		if err != nil {
			return c, &schema.Error{Code: schema.Invalid, Message: fmt.Sprintf("%s%s: %v", path, f.key, err)}
		}
		*f.to = size
	}
	if r.Burst != "" {
		d, err := time.ParseDuration(r.Burst)
		if err != nil {
			return c, &schema.Error{Code: schema.Invalid,
				Message: fmt.Sprintf("%sburst: %q is not a duration like 2s", path, r.Burst)}
		}
		c.Burst = d
	}
	return c, nil
}

// portalConfig converts the body of a request to the configuration of a portal.
func portalConfig(p *schema.Portal) config.Portal {
	return config.Portal{Listen: p.Listen, Advertise: p.Advertise, Transports: p.Transports, TPGT: cmp.Or(p.TPGT, 1), IPsec: p.IPsec, IPsecProfile: p.IPsecProfile, Control: p.Control}
}
