package cli

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

// rateFlags are the flags of the rates of a LUN, each with the text that the user gave.
type rateFlags struct{ iops, bandwidth, burst, minIOPS, minBandwidth string }

// A rateFlag is a flag, and the key of the configuration that it sets.
type rateFlag struct {
	to               *string
	flag, key, usage string
}

func (r *rateFlags) all() []rateFlag {
	return []rateFlag{
		{&r.iops, "iops", "iops", "commands per second that all initiators together get, at most"},
		{&r.bandwidth, "bandwidth", "bandwidth", "data per second that they get, at most, like 100MiB"},
		{&r.burst, "burst", "burst", "unused time of these limits that may be made up for at once, like 2s"},
		{&r.minIOPS, "min-iops", "min_iops", "commands per second that other LUNs leave to this one"},
		{&r.minBandwidth, "min-bandwidth", "min_bandwidth", "data per second that other LUNs leave to this one"},
	}
}

// add adds the flags to cmd.
func (r *rateFlags) add(cmd *cobra.Command) {
	for _, one := range r.all() {
		cmd.Flags().StringVar(one.to, one.flag, "", one.usage)
	}
}

// set adds the flags that the user gave to v. 0 and none remove the key.
func (r *rateFlags) set(cmd *cobra.Command, v schema.Values) error {
	for _, one := range r.all() {
		if !cmd.Flags().Changed(one.flag) {
			continue
		}
		if _, twice := v[one.key]; twice {
			return usage(cmd, "--%s and %s=%s exclude each other", one.flag, one.key, v[one.key])
		}
		switch *one.to {
		case "":
			return usage(cmd, "--%s is empty: give a value, or none", one.flag)
		case "0", "none":
			v[one.key] = ""
		default:
			v[one.key] = *one.to
		}
	}
	return nil
}

// of sets the rates of l, which is to be created, to the flags that the user gave.
func (r *rateFlags) of(cmd *cobra.Command, l *schema.LUN) (err error) {
	v := schema.Values{}
	if err := r.set(cmd, v); err != nil {
		return err
	}
	number := func(flag, text string) (n int) {
		if text != "" && err == nil {
			if n, err = strconv.Atoi(text); err != nil {
				err = usage(cmd, "--%s must be a whole number, not %q", flag, text)
			}
		}
		return n
	}
	l.IOPS, l.MinIOPS = number("iops", v["iops"]), number("min-iops", v["min_iops"])
	l.Bandwidth, l.MinBandwidth, l.Burst = v["bandwidth"], v["min_bandwidth"], v["burst"]
	return err
}

// rateText returns the limits and guarantees of r in words; "" if it has none.
func rateText(r *schema.RateState) string {
	var parts []string
	add := func(set bool, format string, v any) {
		if set {
			parts = append(parts, fmt.Sprintf(format, v))
		}
	}
	add(r.IOPS > 0, "at most %d commands/s", r.IOPS)
	add(r.Bandwidth > 0, "at most %s/s", size(r.Bandwidth))
	add(r.Burst > 0, "burst %s", config.FormatDuration(time.Duration(r.Burst*float64(time.Second))))
	add(r.MinIOPS > 0, "at least %d commands/s", r.MinIOPS)
	add(r.MinBandwidth > 0, "at least %s/s", size(r.MinBandwidth))
	return strings.Join(parts, ", ")
}
