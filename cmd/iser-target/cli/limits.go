package cli

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

// limits returns the commands about the limits of what initiators share.
func (p *program) limits() *cobra.Command {
	var near bool
	cmd := list(p, verb{use: "limits", short: "Show the limits of what initiators share, and their use",
		args: cobra.NoArgs,
		long: `Show the limits of what initiators, addresses and LUNs share: for whom each counts,
the bound, how much is in use and by whom that uses most, how often the limit refused
or delayed something since the start of the target, and when it did so last.
docs/limits.md describes them.`},
		func(ctx context.Context, c *call) ([]schema.LimitState, error) {
			all, err := c.Limits(ctx)
			if near {
				now := time.Now()
				all = slices.DeleteFunc(all, func(l schema.LimitState) bool { return !l.Pressing(now) })
			}
			return all, err
		},
		"LIMIT PER MAX USED % REACHED LAST BY", limitRow)
	cmd.Flags().BoolVar(&near, "near", false,
		"only limits that are used to 80 % or more, or were reached within the last hour")
	cmd.AddCommand(p.setLimits())
	return cmd
}

// limitRow returns the columns of a limit.
func limitRow(l *schema.LimitState) []any {
	used, percent, last := l.Amount(l.Used), "", ""
	if p, ok := l.Percent(); ok {
		percent = fmt.Sprint(p)
	}
	if l.Unit == schema.Duration {
		used = ""
	}
	if !l.Last.IsZero() {
		last = l.Last.Local().Format(time.DateTime)
	}
	return []any{l.Name, l.Per, l.Amount(l.Max), used, percent, l.Reached, last, l.By}
}

func (p *program) setLimits() *cobra.Command {
	keys := texts(slices.Sorted(maps.Keys(new(config.Limits).Bounds())), func(key string) string { return key + "=" })
	complete := cobra.FixedCompletions(keys, cobra.ShellCompDirectiveNoFileComp|cobra.ShellCompDirectiveNoSpace)
	return p.change(verb{use: "set KEY=VALUE...", short: "Set limits",
		args: cobra.MinimumNArgs(1), complete: complete,
		long: `Set limits in one change. Keys and values are those of limits in the configuration
file (docs/config.md). An empty value restores the default. What is in use beyond a
lower limit stays until it is given back.`,
		example: "  iser-target limits set max_connections=4096 login_timeout=30s\n  iser-target limits set max_connections="},
		func(ctx context.Context, c *call, o schema.Options) (*schema.Plan, error) {
			v, err := c.values(c.args)
			if err != nil {
				return nil, err
			}
			return c.SetLimits(ctx, v, o)
		})
}

// values returns the keys and values of arguments like KEY=VALUE.
func (c *call) values(args []string) (schema.Values, error) {
	v := schema.Values{}
	for _, a := range args {
		key, value, ok := strings.Cut(a, "=")
		if !ok || key == "" {
			return nil, usage(c.cmd, "%q is not KEY=VALUE", a)
		}
		if _, twice := v[key]; twice {
			return nil, usage(c.cmd, "%s is given twice", key)
		}
		v[key] = value
	}
	return v, nil
}

// checkLimits finds limits that are near their bounds, or were reached lately.
func checkLimits(ctx context.Context, c *client.Client) (list []Finding, err error) {
	all, err := c.Limits(ctx)
	now := time.Now()
	for i := range all {
		if all[i].Pressing(now) {
			list = append(list, Finding{warning, "limit", all[i].String(),
				"see iser-target limits; docs/limits.md says what it protects"})
		}
	}
	return list, err
}
