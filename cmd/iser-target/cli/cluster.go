package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// handTime is how long handover waits for the new owner.
const handTime = 30 * time.Second

// cluster returns the commands about gateways that share LUNs.
func (p *program) cluster() *cobra.Command {
	status := show(p, verb{use: "status", short: "Show the gateways of the cluster, and which of them serves each shared LUN",
		args: cobra.NoArgs,
		long: `Show the gateways of the cluster, and which of them serves each shared LUN, as this
gateway knows it. A LUN whose owner is not the gateway that should have it goes there
after cluster.failback. docs/cluster.md describes clusters.`,
		example: `  iser-target cluster status
  iser-target cluster status -o json`},
		func(ctx context.Context, c *call) (schema.ClusterState, error) { return c.Cluster(ctx) }, clusterTable)
	return group("cluster", "Show and move LUNs that gateways share", status, p.handover(), p.balance(), p.clusterConfig())
}

// clusterConfig returns the commands about the targets that all gateways have.
func (p *program) clusterConfig() *cobra.Command {
	show := p.output(verb{use: "show", short: "Print the targets that all gateways have, for administrators with secrets", args: cobra.NoArgs,
		long: `Print the targets that all gateways of the cluster have, as they run on the gateway
that is asked. -o json adds their revision in etcd.`,
		example: `  iser-target cluster config show > cluster.yaml`,
		run: func(ctx context.Context, c *call) error {
			s, err := c.ClusterConfig(ctx)
			if err != nil {
				return err
			}
			if err := checkText([]byte(s.Text)); err != nil {
				return err
			}
			if p.path == nil && p.format == "table" {
				_, err = io.WriteString(c.cmd.OutOrStdout(), s.Text)
				return err
			}
			return p.print(c.cmd.OutOrStdout(), s, nil)
		}})
	var move bool
	apply := p.change(verb{use: "apply FILE", short: "Make the targets of a file those of all gateways", args: cobra.ExactArgs(1), complete: yamlFiles, shrinks: true,
		long: `Make the targets of a file those of all gateways of the cluster, in the place of those
in etcd. The file has the key targets alone, and all LUNs are shared. - reads standard
input. The plan is that of the gateway that is asked. The other gateways follow at once,
and allow what you allow here: see cluster status.`,
		example: `  iser-target cluster config apply cluster.yaml --dry-run`},
		func(ctx context.Context, c *call, o schema.Options) (*schema.Plan, error) {
			source, b, err := c.readDocument(ctx)
			if err != nil {
				return nil, err
			}
			return c.ApplyCluster(ctx, source, b, move, o)
		})
	apply.Flags().BoolVar(&move, "move", false, "remove targets of the same names from the configuration file of the gateway that is asked")
	return group("config", "Show and change the targets that all gateways have", show, apply)
}

func clusterTable(t *table, s schema.ClusterState) {
	t.row("gateway", s.Name)
	if s.Reason != "" {
		t.row("serves nothing", s.Reason)
	}
	if s.Conflict != "" {
		t.row("conflict", s.Conflict)
	}
	if s.Config != 0 {
		t.row("configuration", fmt.Sprintf("revision %d", s.Config))
	}
	for _, g := range s.Gateways {
		says := fmt.Sprintf("LUNs %d, version %s", g.LUNs, g.Version)
		if g.Draining {
			says += ", draining"
		}
		if g.Unable > 0 {
			says += fmt.Sprintf(", LUNs that it cannot serve %d", g.Unable)
		}
		if g.Config != 0 || s.Config != 0 {
			says += fmt.Sprintf(", configuration %d", g.Config)
		}
		if g.ConfigReason != "" {
			says += ", cannot apply a newer one: " + g.ConfigReason
		}
		t.row("member "+g.Name, says)
	}
	for _, l := range s.LUNs {
		owner := l.Owner
		if owner == "" {
			owner = "nobody"
		}
		says := "served by " + owner
		switch {
		case l.Preferred != "":
			says += ", as chosen: " + l.Preferred
		case l.Favorite != l.Owner && l.Favorite != "":
			says += ", and should be by " + l.Favorite
		}
		t.row(fmt.Sprintf("LUN %d of %s", l.ID, l.Target), says)
	}
}

// handover returns the command that moves a LUN.
func (p *program) handover() *cobra.Command {
	var release, detach bool
	cmd := p.command(verb{names: targetOptional, use: "handover [TARGET] LUN [GATEWAY]", short: "Let another gateway serve a shared LUN",
		args: cobra.RangeArgs(2, 3), complete: p.complete(targets, luns, gateways),
		long: `Let another gateway serve a shared LUN, now and whenever that gateway is there. The
present one completes the commands in progress and closes the store before. --release
ends the choice: the LUN goes to the gateway that its name gives.`,
		example: `  iser-target cluster handover store 1 gw-b
  iser-target cluster handover store 1 --release`,
		parse: func(c *call) error {
			if release != (len(c.args) == 2) {
				return usage(c.cmd, "name a gateway, or use --release")
			}
			return c.parseLUN()
		},
		run: func(ctx context.Context, c *call) error {
			to := ""
			if !release {
				to = c.args[2]
			}
			if err := c.HandOver(ctx, c.target, c.lun, to); err != nil {
				return err
			}
			if detach || release {
				_, err := fmt.Fprintf(c.cmd.OutOrStdout(), "LUN %d of %s: done\n", c.lun, c.target)
				return err
			}
			return awaitOwner(c, to)
		}})
	f := cmd.Flags()
	f.BoolVar(&release, "release", false, "end the choice of a gateway")
	f.BoolVar(&detach, "detach", false, "do not wait until the gateway serves the LUN")
	return cmd
}

// awaitOwner waits until a gateway serves the LUN.
func awaitOwner(c *call, to string) error {
	ctx, cancel := context.WithTimeout(c.cmd.Context(), handTime)
	defer cancel()
	for {
		s, err := c.Cluster(ctx)
		if err != nil {
			return err
		}
		for _, l := range s.LUNs {
			if l.Target == c.target && l.ID == c.lun && l.Owner == to {
				_, err := fmt.Fprintf(c.cmd.OutOrStdout(), "LUN %d of %s is served by %s\n", c.lun, c.target, to)
				return err
			}
		}
		select {
		case <-ctx.Done():
			if c.cmd.Context().Err() != nil {
				return errors.New("interrupted; the hand-over continues")
			}
			return &schema.Error{Code: schema.Failed, Message: fmt.Sprintf("gateway %s has not taken LUN %d of %s within %v", to, c.lun, c.target, handTime),
				Hint: "see its log, and iser-target cluster status; the choice stays until --release"}
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// balance returns the command that spreads LUNs evenly.
func (p *program) balance() *cobra.Command {
	var dry bool
	cmd := p.output(verb{use: "balance [--dry-run]", short: "Spread the shared LUNs evenly over the gateways", args: cobra.NoArgs,
		long: `Spread the shared LUNs evenly over the gateways, with the fewest moves. Each move is
that of handover, so the LUN stays there until handover --release.`,
		example: `  iser-target cluster balance --dry-run`,
		run: func(ctx context.Context, c *call) error {
			moves, err := c.Balance(ctx, dry)
			if err != nil {
				return err
			}
			return p.print(c.cmd.OutOrStdout(), moves, func(t *table) {
				if len(moves) == 0 {
					t.line("no move: the LUNs are spread evenly")
				}
				for _, m := range moves {
					name := "naa " + m.NAA
					if m.Target != "" {
						name = fmt.Sprintf("LUN %d of %s", m.ID, m.Target)
					}
					t.line("%s: %s -> %s", name, m.From, m.To)
				}
			})
		}})
	cmd.Flags().BoolVar(&dry, "dry-run", false, "show the moves, and make none")
	return cmd
}

// checkCluster finds what keeps shared LUNs from being served, or from being taken over.
func checkCluster(ctx context.Context, c *client.Client) ([]Finding, error) {
	s, err := c.Cluster(ctx)
	var refused *schema.Error
	if errors.As(err, &refused) && (refused.Code == schema.Refused || refused.Code == schema.NotFound) { // it is in none, or older
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return clusterFindings(&s), nil
}

func clusterFindings(s *schema.ClusterState) (list []Finding) {
	if s.Reason != "" {
		list = append(list, Finding{problem, "cluster", "this gateway serves no shared LUN: " + s.Reason, "check the members of etcd (cluster.etcd)"})
	}
	if s.Conflict != "" {
		list = append(list, Finding{problem, "cluster", s.Conflict, ""})
	}
	for _, l := range s.LUNs {
		if l.Owner == "" {
			list = append(list, Finding{problem, "cluster", fmt.Sprintf("no gateway serves LUN %d of %s", l.ID, l.Target), "the logs of the gateways say why they cannot open or fence it"})
		}
	}
	takers := 0
	for _, g := range s.Gateways {
		if g.ConfigReason != "" {
			list = append(list, Finding{problem, "cluster", fmt.Sprintf("gateway %s runs configuration %d of the cluster, and cannot apply a newer one: %s", g.Name, g.Config, g.ConfigReason), ""})
		}
		if !g.Draining {
			takers++
		}
		if g.Unable > 0 {
			list = append(list, Finding{warning, "cluster", fmt.Sprintf("gateway %s cannot serve %d LUNs", g.Name, g.Unable), "its log says why; give all gateways the same shared LUNs"})
		}
	}
	if takers < 2 && s.Reason == "" {
		list = append(list, Finding{warning, "cluster", fmt.Sprintf("%d gateway takes LUNs, so that nobody takes over if it ends", takers), "start the others"})
	}
	if len(list) == 0 {
		list = append(list, Finding{fine, "cluster", fmt.Sprintf("%d gateways, and shared LUNs %d", takers, len(s.LUNs)), ""})
	}
	return list
}

// gateways completes the names of gateways.
func gateways(ctx context.Context, c *client.Client, _ []string) (names []string) {
	s, _ := c.Cluster(ctx)
	for _, g := range s.Gateways {
		names = append(names, g.Name)
	}
	return names
}
