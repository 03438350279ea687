package main

import (
	"fmt"
	"net"
	"sync"

	"github.com/spf13/cobra"

	"github.com/iser-target/iser-target/cmd/iser-target/faults"
)

// faultsCommand returns the command that disturbs connections. Help does not list it, because nobody
// needs it who runs a target.
func faultsCommand() *cobra.Command {
	var o faults.Options
	var listen string
	cmd := &cobra.Command{
		Use:   "faults --listen ADDRESS --to ADDRESS",
		Short: "Pass connections on to a target and disturb them",
		Long: `Pass connections on to a target and disturb them, to test initiators and targets.

The proxy works on whole units: iSCSI PDUs over TCP, and FPDUs of MPA. It prints each
fault. The same seed disturbs the same units of a connection in the same way. MPA startup
and the login over TCP pass unharmed unless you give --startup, because no digest covers
them. A portal must advertise the address of the proxy, or initiators go to the target.

Without digests, and without CRC over iSER, initiator and target cannot notice changed
data: --corrupt then changes what is on the disk.`,
		Example: "  iser-target faults --listen 127.0.0.1:3261 --to 127.0.0.1:3260 --seed 7 --corrupt 0.001 --cut 0.0001",
		Hidden:  true,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			out := cmd.OutOrStdout()
			var mu sync.Mutex
			o.Log = func(line string) {
				mu.Lock()
				defer mu.Unlock()
				fmt.Fprintln(out, line)
			}
			p, err := faults.New(o)
			if err != nil {
				return err
			}
			l, err := net.Listen("tcp", listen)
			if err != nil {
				return err
			}
			o.Log(fmt.Sprintf("listening on %v for %s, seed %d", l.Addr(), o.To, o.Seed))
			return p.Serve(cmd.Context(), l)
		},
	}
	f := cmd.Flags()
	f.StringVar(&listen, "listen", "", "address to listen on")
	f.StringVar(&o.To, "to", "", "address of the target's portal")
	f.Uint64Var(&o.Seed, "seed", 1, "number that chooses the units")
	f.Float64Var(&o.Drop, "drop", 0, "probability that a unit does not arrive (never an RDMA Write: no layer notices that)")
	f.Float64Var(&o.Corrupt, "corrupt", 0, "probability that one bit of a unit changes, in header or data")
	f.Float64Var(&o.Cut, "cut", 0, "probability that the connection ends in the middle of a unit")
	f.Float64Var(&o.Withhold, "withhold", 0, "probability that an RDMA Read Response does not arrive")
	f.DurationVar(&o.Delay, "delay", 0, "longest time that a unit, and all behind it, arrive later")
	f.Float64Var(&o.Delayed, "delayed", 1, "probability that a unit is delayed, with --delay")
	f.BoolVar(&o.Startup, "startup", false, "also disturb MPA startup and the login over TCP")
	cmd.MarkFlagRequired("listen")
	cmd.MarkFlagRequired("to")
	return cmd
}
