package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
	"github.com/iser-target/iser-target/cmd/iser-target/capture"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

// partingTime is what a target that was asked to stop has for the rest of the file.
const partingTime = 10 * time.Second

// maxSize is a flag: a size that a capture can be bounded by.
type maxSize config.Size

func (s *maxSize) String() string { return config.Size(*s).String() }
func (s *maxSize) Type() string   { return "size" }
func (s *maxSize) Set(v string) error {
	n, err := config.ParseSize(v)
	if err == nil && n < capture.MinSize {
		err = fmt.Errorf("it is less than %v", config.Size(capture.MinSize))
	}
	*s = maxSize(n)
	return err
}

func (p *program) capture() *cobra.Command {
	var (
		id       uint16
		name     string
		force    bool
		duration time.Duration
		max      = maxSize(64 << 20)
	)
	cmd := &cobra.Command{
		Use: "capture --session TSIH -w FILE", Short: "Record what passes on the connections of a session, for Wireshark", Args: cobra.NoArgs,
		Long: `Record what passes on the connections of a session, for Wireshark: a pcapng file,
taken inside the target, so that IPsec is not in the way. It ends when interrupted,
with the session, or at a limit. "-w -" writes to standard output.

The file has the data of the LUNs in it, and the beginning of each connection with
the login, CHAP responses included. docs/cli.md says how tshark reads it.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case id == 0:
				return usage(cmd, "--session is required: a TSIH, as session list shows it")
			case name == "":
				return usage(cmd, "-w is required: a file, or - for standard output")
			case duration < 0:
				return usage(cmd, "--duration must be more than 0, not %v", duration)
			}
			return p.record(cmd, id, int64(max), duration, name, force)
		},
	}
	f := cmd.Flags()
	f.Uint16Var(&id, "session", 0, "its number, as session list shows it (TSIH)")
	f.StringVarP(&name, "write", "w", "", "the file, which must not be there; - is standard output")
	f.BoolVar(&force, "force", false, "replace a file that is there")
	f.Var(&max, "max-size", "end when the file has this size")
	f.DurationVar(&duration, "duration", 0, "end after this time (default: with the session)")
	cmd.MarkFlagFilename("write", "pcapng")
	cmd.RegisterFlagCompletionFunc("session", func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
		return p.ask(cmd, sessions)
	})
	return cmd
}

// sessions completes TSIHs.
func sessions(ctx context.Context, c *client.Client) (list []string) {
	found, _ := c.Sessions(ctx)
	for _, s := range found {
		list = append(list, cobra.CompletionWithDesc(strconv.Itoa(int(s.TSIH)), s.Initiator))
	}
	return list
}

// record writes a capture to the file of that name, and says what became of it.
func (p *program) record(cmd *cobra.Command, id uint16, max int64, duration time.Duration, name string, force bool) error {
	if fi, err := os.Lstat(name); err == nil && name != "-" {
		switch {
		case !fi.Mode().IsRegular(): // a device would be gone for all
			return fmt.Errorf("%s is there already, and no regular file: give another name, or - for standard output", name)
		case !force:
			return &schema.Error{Code: schema.Refused, Message: "refused: " + name + " is there already, and would be replaced", Needs: []string{"force"}}
		}
	}
	w := cmd.OutOrStdout()
	if name == "-" && isTerminal(w) {
		return usage(cmd, "-w -: standard output is a terminal, which cannot do with a pcapng file")
	}
	c, err := p.client(cmd)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(cmd.Context()))
	defer cancel()
	begun := context.AfterFunc(cmd.Context(), cancel)
	k, err := c.Capture(ctx, id, max, duration)
	begun()
	if err != nil {
		return err
	}
	defer k.Close()
	if name != "-" {
		if force {
			if err := os.Remove(name); err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
		}
		file, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return err
		}
		defer file.Close()
		w = file
	}
	errOut := cmd.ErrOrStderr()
	fmt.Fprintf(errOut, "capturing session %d; interrupt to end\n", id)
	defer context.AfterFunc(cmd.Context(), func() {
		// The target ends the file properly, and says what is in it.
		parting, done := context.WithTimeout(ctx, partingTime)
		defer done()
		if c.StopCapture(parting, id) != nil {
			cancel()
		}
		time.AfterFunc(partingTime, cancel)
	})()
	sum, err := k.Copy(w)
	if file, ok := w.(*os.File); ok && name != "-" {
		if err != nil { // what is full has taken a part of a packet
			err = errors.Join(err, file.Truncate(sum.Size))
		}
		err = errors.Join(err, file.Close())
	}
	if err != nil {
		fmt.Fprintf(errOut, "session %d: the file has %d octets, and is whole as far as it goes\n", id, sum.Size)
		return err
	}
	fmt.Fprintf(errOut, "session %d: %d packets with %d octets, %d octets lost; the file has %d octets; ended: %s\n",
		id, sum.Packets, sum.Octets, sum.Lost, sum.Size, sum.Reason)
	return nil
}
