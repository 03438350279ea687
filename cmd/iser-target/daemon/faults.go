package daemon

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/lun"
)

// defaultFaultTime is how long faults last if the request does not say.
const defaultFaultTime = "1m"

// SetFaults injects faults between a LUN and its backend, instead of those before.
func (d *Daemon) SetFaults(ctx context.Context, target string, id int, f schema.Faults) error {
	l, err := d.lun(target, id)
	if err != nil {
		return err
	}
	faults, err := parseFaults(&f)
	if err == nil {
		err = l.unit.SetFaults(faults)
	}
	if err != nil {
		return &schema.Error{Code: schema.Invalid, Message: fmt.Sprintf("LUN %d of %s: %v", id, target, err),
			Hint: "GET /v1/openapi.yaml describes the request"}
	}
	d.log.WarnContext(ctx, "faults are injected", eventKey, "lun", "target", target, "lun", id, "seed", f.Seed, "read_error", f.ReadError,
		"write_error", f.WriteError, "sync_error", f.SyncError, "hang", f.Hang, "latency", faults.Latency, "sense", f.Sense, "for", faults.For)
	return nil
}

// ClearFaults ends the injection of faults.
func (d *Daemon) ClearFaults(ctx context.Context, target string, id int) error {
	l, err := d.lun(target, id)
	if err != nil {
		return err
	}
	if !l.unit.ClearFaults() {
		return fmt.Errorf("faults of LUN %d of %s: %w", id, target, ErrNotFound)
	}
	d.log.InfoContext(ctx, "faults were cleared", eventKey, "lun", "target", target, "lun", id)
	return nil
}

// parseFaults returns f with its texts as numbers.
func parseFaults(f *schema.Faults) (lun.Faults, error) {
	parsed := lun.Faults{Seed: f.Seed, ReadError: f.ReadError, WriteError: f.WriteError, SyncError: f.SyncError, Hang: f.Hang}
	for _, t := range []struct {
		name, text string
		to         *time.Duration
	}{{"latency", cmp.Or(f.Latency, "0"), &parsed.Latency}, {"for", cmp.Or(f.For, defaultFaultTime), &parsed.For}} {
		d, err := time.ParseDuration(t.text)
		if err != nil {
			return parsed, fmt.Errorf("%s: %q is not a time like 30s", t.name, t.text)
		}
		*t.to = d
	}
	if f.Sense == "" {
		return parsed, nil
	}
	parts := strings.Split(f.Sense, "/")
	to := []*byte{&parsed.Sense.Key, &parsed.Sense.ASC, &parsed.Sense.ASCQ}
	for i, part := range parts {
		n, err := strconv.ParseUint(part, 16, 8)
		if len(parts) != len(to) || err != nil {
			return parsed, fmt.Errorf("sense: %q is not a sense key, ASC and ASCQ in hexadecimal, like 3/11/00", f.Sense)
		}
		*to[i] = byte(n)
	}
	if parsed.Sense.Key == 0 {
		return parsed, fmt.Errorf("sense: key 0 is NO SENSE: give one from 1 to f")
	}
	return parsed, nil
}

// faultState returns the faults of a unit, or nil.
func faultState(u *lun.Unit) *schema.FaultState {
	f := u.Faults()
	if f == nil {
		return nil
	}
	s := &schema.FaultState{Until: f.Until, Injected: f.Injected, Faults: schema.Faults{
		Seed: f.Seed, ReadError: f.ReadError, WriteError: f.WriteError, SyncError: f.SyncError, Hang: f.Hang, For: f.For.String()}}
	if f.Latency > 0 {
		s.Latency = f.Latency.String()
	}
	if k := f.Sense; k != (lun.Sense{}) {
		s.Sense = fmt.Sprintf("%x/%02x/%02x", k.Key, k.ASC, k.ASCQ)
	}
	return s
}
