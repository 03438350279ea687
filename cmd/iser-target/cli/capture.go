package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
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

// Bounds of -W.
const (
	leastFiles = 2
	mostFiles  = 1000
)

// A recorder has what the flags of capture say.
type recorder struct {
	*call
	id    uint16
	o     schema.CaptureOptions
	name  string
	force bool
	files int // of a ring; 0: one file

	quiet bool // print no messages
}

// capture returns the command that records a session.
func (p *program) capture() *cobra.Command {
	var (
		k    recorder
		lun  uint16
		max  = maxSize(64 << 20)
		each = maxSize(0)
	)
	cmd := p.command(verb{use: "capture TSIH -w FILE", short: "Record the traffic of a session for Wireshark", args: cobra.MaximumNArgs(1), complete: p.complete(sessions),
		long: `Record the traffic of a session as a pcapng file for Wireshark. The target records
inside, at its sockets, so the file is readable even if IPsec encrypts the network.
The capture ends when interrupted, with the session, or at a limit. "-w -" writes to
standard output.
--headers-only leaves out the data, --snaplen all but the beginning of each packet, and
--lun the commands of other LUNs. With -C and -W, the capture fills a ring of files, of
which the oldest is replaced: FILE one.pcapng gives one.0.pcapng, one.1.pcapng, ...
Some milliseconds are missing between two files.
The file has the data of the LUNs, and the beginning of each connection with the
login, including CHAP responses. docs/cli.md shows how to read it with tshark.`,
		example: "  iser-target capture 1 -w one.pcapng --duration 30s\n" +
			"  iser-target capture 1 -w one.pcapng --headers-only --lun 0 -C 100MiB -W 10",
		run: func(_ context.Context, c *call) error {
			f := c.cmd.Flags()
			k.call, k.o.Max = c, int64(max)
			if f.Changed("lun") {
				k.o.LUN = &lun
			}
			if len(c.args) > 0 {
				if f.Changed("session") {
					return usage(c.cmd, "--session and the argument TSIH exclude each other")
				}
				if err := c.parseTSIH(); err != nil {
					return err
				}
				k.id = c.tsih
			}
			switch {
			case k.id == 0:
				return usage(c.cmd, "name the session: a TSIH of session list")
			case k.name == "":
				return usage(c.cmd, "-w is required: a file, or - for standard output")
			case k.o.Duration < 0:
				return usage(c.cmd, "--duration must be more than 0, not %v", k.o.Duration)
			case f.Changed("snaplen") && (k.o.Snaplen < capture.MinSnap || k.o.Snaplen > capture.MaxSnap):
				return usage(c.cmd, "--snaplen must be %d to %d bytes, not %d", capture.MinSnap, capture.MaxSnap, k.o.Snaplen)
			case lun > maxLUN:
				return usage(c.cmd, "--lun must be up to %d, not %d", maxLUN, lun)
			case f.Changed("file-size") != f.Changed("files"):
				return usage(c.cmd, "-C and -W go together: the size of each file of a ring, and their number")
			case !f.Changed("files"):
				_, err := k.record(k.name, k.force)
				return err
			case f.Changed("max-size"):
				return usage(c.cmd, "--max-size excludes -C and -W")
			case k.name == "-":
				return usage(c.cmd, "-w - excludes -C and -W")
			case k.files < leastFiles || k.files > mostFiles:
				return usage(c.cmd, "-W must be %d to %d files, not %d", leastFiles, mostFiles, k.files)
			}
			k.o.Max = int64(each)
			return k.ring()
		}})
	f := cmd.Flags()
	f.Uint16Var(&k.id, "session", 0, "the same as TSIH")
	f.StringVarP(&k.name, "write", "w", "", "file to create, or - for standard output")
	f.BoolVar(&k.force, "force", false, "replace an existing file")
	f.Var(&max, "max-size", "end when the file has this size")
	f.DurationVar(&k.o.Duration, "duration", 0, "end after this time (default: when the session ends)")
	f.BoolVar(&k.o.Headers, "headers-only", false, "leave out the data of LUNs, except what a login or a text has")
	f.IntVar(&k.o.Snaplen, "snaplen", 0, "record the first `BYTES` of each packet, 192 to 4096 (default: all)")
	f.Uint16Var(&lun, "lun", 0, "record only the commands of the LUN with this `NUMBER`, and what belongs to no LUN")
	f.VarP(&each, "file-size", "C", "size of each file of a ring, with -W")
	f.IntVarP(&k.files, "files", "W", 0, "number of files of a ring, with -C")
	cmd.MarkFlagFilename("write", "pcapng")
	cmd.RegisterFlagCompletionFunc("session", p.complete(sessions))
	return cmd
}

// maxLUN is the largest number in the flat addressing of SAM-5.
const maxLUN = 1<<14 - 1

// ring records into a ring of files.
func (k *recorder) ring() error {
	for i := range k.files {
		if err := k.mayWrite(k.ringName(i), k.force); err != nil {
			return err
		}
	}
	var sum schema.Summary
	end := time.Now().Add(k.o.Duration)
	timed := k.o.Duration > 0
	files := 0
	for {
		one, err := k.record(k.ringName(files%k.files), k.force || files >= k.files)
		var e *schema.Error
		if files > 0 && errors.As(err, &e) && e.Code == schema.NotFound { // between two files
			sum.Reason = "the session ended"
			break
		}
		if err != nil && files > 0 && k.cmd.Context().Err() != nil {
			sum.Reason = "interrupted"
			break
		}
		if err != nil {
			return err
		}
		files++
		sum.Packets, sum.Octets, sum.Lost, sum.Size, sum.Reason = sum.Packets+one.Packets, sum.Octets+one.Octets, sum.Lost+one.Lost, sum.Size+one.Size, one.Reason
		if !one.Full {
			break
		}
		if k.quiet = true; timed {
			if k.o.Duration = time.Until(end); k.o.Duration <= 0 {
				sum.Reason = "the time is over"
				break
			}
		}
	}
	_, err := fmt.Fprintf(k.cmd.ErrOrStderr(), "session %d: %s with %s, %s lost; %s, of which the last %d are there, up to %s; ended: %s\n", k.id, count(sum.Packets, "packet"), count(sum.Octets, "byte"),
		count(sum.Lost, "byte"), count(files, "file"), min(files, k.files), k.ringName((files-1)%k.files), sum.Reason)
	return err
}

// ringName returns the name of a file of the ring: a number comes before the extension.
func (k *recorder) ringName(i int) string {
	ext := filepath.Ext(k.name)
	digits := len(strconv.Itoa(k.files - 1))
	return fmt.Sprintf("%s.%0*d%s", strings.TrimSuffix(k.name, ext), digits, i, ext)
}

// mayWrite returns an error if a file of that name exists that may not be replaced.
func (k *recorder) mayWrite(name string, force bool) error {
	fi, err := os.Lstat(name)
	switch {
	case err != nil || name == "-":
	case !fi.Mode().IsRegular(): // --force must not remove a device
		return fmt.Errorf("%s exists and is not a regular file: give another name, or - for standard output", name)
	case !force:
		return &schema.Error{Code: schema.Refused, Message: "refused: " + name + " exists. Nothing was changed", Needs: []string{"force"}, Hint: "use --force to replace it"}
	}
	return nil
}

// record writes a capture to the file name, and prints the result unless k fills a ring.
func (k *recorder) record(name string, force bool) (schema.Summary, error) {
	c := k.call
	var sum schema.Summary
	if err := k.mayWrite(name, force); err != nil {
		return sum, err
	}
	w := c.cmd.OutOrStdout()
	if name == "-" && isTerminal(w) {
		return sum, usage(c.cmd, "-w -: standard output is a terminal, and a pcapng file is binary")
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(c.cmd.Context()))
	defer cancel()
	begun := context.AfterFunc(c.cmd.Context(), cancel)
	got, err := c.Capture(ctx, k.id, k.o)
	begun()
	if err != nil {
		return sum, err
	}
	defer got.Close()
	if name != "-" {
		if force {
			if err := os.Remove(name); err != nil && !errors.Is(err, os.ErrNotExist) {
				return sum, err
			}
		}
		file, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return sum, err
		}
		defer file.Close()
		w = file
	}
	errOut := c.cmd.ErrOrStderr()
	if !k.quiet {
		fmt.Fprintf(errOut, "capturing session %d; interrupt to end\n", k.id)
	}
	defer context.AfterFunc(c.cmd.Context(), func() {
		// The target completes the file and reports what it has.
		ctx, done := context.WithTimeout(ctx, endTime)
		defer done()
		if c.StopCapture(ctx, k.id) != nil {
			cancel()
		}
		time.AfterFunc(endTime, cancel)
	})()
	sum, err = got.Copy(w)
	if file, ok := w.(*os.File); ok && name != "-" {
		if err != nil { // a full disk may have a part of a packet
			err = errors.Join(err, file.Truncate(sum.Size))
		}
		err = errors.Join(err, file.Close())
	}
	if err != nil {
		fmt.Fprintf(errOut, "session %d: the file is incomplete, but its %d bytes are valid\n", k.id, sum.Size)
		return sum, err
	}
	if k.files > 0 {
		return sum, nil
	}
	fmt.Fprintf(errOut, "session %d: %s with %s, %s lost; the file has %s; ended: %s\n",
		k.id, count(sum.Packets, "packet"), count(sum.Octets, "byte"), count(sum.Lost, "byte"), count(sum.Size, "byte"), sum.Reason)
	return sum, nil
}
