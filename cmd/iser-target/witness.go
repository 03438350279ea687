package main

import (
	"errors"
	"os"
	"os/exec"
	"os/signal"

	"github.com/spf13/cobra"

	"github.com/iser-target/iser-target/cmd/iser-target/daemon"
)

// witnessName is the command of a witness.
const witnessName = "witness"

// witnessProcess returns the command for daemon.Options.Witness.
func witnessProcess() (*exec.Cmd, error) {
	cmd := exec.Command("/proc/self/exe", witnessName) // the file of the program may be another one by now
	cmd.Args[0] = os.Args[0]
	return cmd, nil
}

func witnessCommand() *cobra.Command {
	return &cobra.Command{
		Use: witnessName, Short: "Tell the other gateways of a cluster if this one is killed", Args: cobra.NoArgs, Hidden: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if st, err := os.Stdin.Stat(); err != nil || st.Mode()&os.ModeNamedPipe == 0 {
				return errors.New("serve starts this command")
			}
			signal.Ignore(passed...) // the service manager ends what a process that was killed has left
			nameProcess()
			return daemon.Witness(cmd.Context(), os.Stdin)
		},
	}
}
