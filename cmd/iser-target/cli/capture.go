package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/iser-target/iser-target/cmd/iser-target/capture"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

// endTime bounds the wait for the rest of the file after a target was asked to stop.
const endTime = 10 * time.Second

// A maxSize is the value of --max-size.
type maxSize config.Size

// String implements pflag.Value.
func (s *maxSize) String() string { return config.Size(*s).String() }

// Type implements pflag.Value.
func (s *maxSize) Type() string { return "size" }

// Set implements pflag.Value.
func (s *maxSize) Set(v string) error {
	n, err := config.ParseSize(v)
	if err == nil && n < capture.MinSize {
		err = fmt.Errorf("less than %v", config.Size(capture.MinSize))
	}
	*s = maxSize(n)
	return err
}

// capture returns the command that records a session.
func (p *program) capture() *cobra.Command {
	var (
		id       uint16
		name     string
		force    bool
		duration time.Duration
		max      = maxSize(64 << 20)
	)
	cmd := p.command(verb{use: "capture --session TSIH -w FILE", short: "Record the traffic of a session for Wireshark", args: cobra.NoArgs,
		long: `Record the traffic of a session as a pcapng file for Wireshark. The target records
inside, at its sockets, so the file is readable even if IPsec encrypts the network.
The capture ends when interrupted, with the session, or at a limit. "-w -" writes to
standard output.

The file has the data of the LUNs, and the beginning of each connection with the
login, including CHAP responses. docs/cli.md shows how to read it with tshark.`,
		example: "  iser-target capture --session 1 -w one.pcapng --duration 30s",
		run: func(_ context.Context, c *call) error {
			switch {
			case id == 0:
				return usage(c.cmd, "--session is required: a TSIH of session list")
			case name == "":
				return usage(c.cmd, "-w is required: a file, or - for standard output")
			case duration < 0:
				return usage(c.cmd, "--duration must be more than 0, not %v", duration)
			}
			return c.record(id, int64(max), duration, name, force)
		}})
	f := cmd.Flags()
	f.Uint16Var(&id, "session", 0, "TSIH of the session, as session list shows it")
	f.StringVarP(&name, "write", "w", "", "file to create, or - for standard output")
	f.BoolVar(&force, "force", false, "replace an existing file")
	f.Var(&max, "max-size", "end when the file has this size")
	f.DurationVar(&duration, "duration", 0, "end after this time (default: when the session ends)")
	cmd.MarkFlagFilename("write", "pcapng")
	cmd.RegisterFlagCompletionFunc("session", p.complete(sessions))
	return cmd
}

// record writes a capture to the file name, and prints the result.
func (c *call) record(id uint16, max int64, duration time.Duration, name string, force bool) error {
	if fi, err := os.Lstat(name); err == nil && name != "-" {
		switch {
		case !fi.Mode().IsRegular(): // --force must not remove a device
			return fmt.Errorf("%s exists and is not a regular file: give another name, or - for standard output", name)
		case !force:
			return &schema.Error{Code: schema.Refused, Message: "refused: " + name + " exists. Nothing was changed", Needs: []string{"force"}, Hint: "use --force to replace it"}
		}
	}
	w := c.cmd.OutOrStdout()
	if name == "-" && isTerminal(w) {
		return usage(c.cmd, "-w -: standard output is a terminal, and a pcapng file is binary")
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(c.cmd.Context()))
	defer cancel()
	begun := context.AfterFunc(c.cmd.Context(), cancel)
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
	errOut := c.cmd.ErrOrStderr()
	fmt.Fprintf(errOut, "capturing session %d; interrupt to end\n", id)
	defer context.AfterFunc(c.cmd.Context(), func() {
		// The target completes the file and reports what it has.
		ctx, done := context.WithTimeout(ctx, endTime)
		defer done()
		if c.StopCapture(ctx, id) != nil {
			cancel()
		}
		time.AfterFunc(endTime, cancel)
	})()
	sum, err := k.Copy(w)
	if file, ok := w.(*os.File); ok && name != "-" {
		if err != nil { // a full disk may have a part of a packet
			err = errors.Join(err, file.Truncate(sum.Size))
		}
		err = errors.Join(err, file.Close())
	}
	if err != nil {
		fmt.Fprintf(errOut, "session %d: the file is incomplete, but its %d bytes are valid\n", id, sum.Size)
		return err
	}
	fmt.Fprintf(errOut, "session %d: %s with %s, %s lost; the file has %s; ended: %s\n",
		id, count(sum.Packets, "packet"), count(sum.Octets, "byte"), count(sum.Lost, "byte"), count(sum.Size, "byte"), sum.Reason)
	return nil
}
