package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
)

// Bounds of the time between two frames.
const (
	minInterval = 100 * time.Millisecond
	maxInterval = time.Hour
)

// top shows the load of sessions and LUNs.
type top struct {
	p        *program
	c        *client.Client
	interval time.Duration
	count    int // frames; 0: until it is interrupted
	order    int // index in orders
	last     *Frame
}

func (p *program) top() *cobra.Command {
	t := &top{p: p}
	var order string
	names := make([]string, len(orders))
	for i, o := range orders {
		names[i] = o.name
	}
	cmd := &cobra.Command{
		Use: "top", Short: "Show the load of sessions and LUNs, again and again", Args: cobra.NoArgs,
		Long: `Show the load of sessions and LUNs, again and again: commands and data by the second,
latencies from the arrival of a command to its status, commands that are in flight,
and errors since the last time.

On a terminal, q ends it and s sorts by something else. Elsewhere, and with --count,
one frame follows the other; -o json writes each on a line of its own.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := p.checkOutput(cmd); err != nil {
				return err
			}
			if t.interval < minInterval || t.interval > maxInterval {
				return usage(cmd, "--interval must be from %v to %v, not %v", minInterval, maxInterval, t.interval)
			}
			if t.count < 0 {
				return usage(cmd, "--count must not be negative")
			}
			if t.order = slices.Index(names, order); t.order < 0 {
				return usage(cmd, "--sort must be one of %s, not %q", strings.Join(names, ", "), order)
			}
			var err error
			if t.c, err = p.client(cmd); err != nil {
				return err
			}
			if p.output == "table" && t.count == 0 && isTerminal(cmd.OutOrStdout()) {
				return t.live(cmd.Context(), cmd.InOrStdin(), cmd.OutOrStdout().(*os.File))
			}
			return t.frames(cmd.Context(), cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.DurationVarP(&t.interval, "interval", "d", time.Second, "time between two frames")
	f.IntVarP(&t.count, "count", "n", 0, "end after so many frames")
	f.StringVar(&order, "sort", names[0], strings.Join(names, ", "))
	cmd.RegisterFlagCompletionFunc("sort", cobra.FixedCompletions(names, cobra.ShellCompDirectiveNoFileComp))
	p.outputFlag(cmd)
	return cmd
}

func (t *top) sample(ctx context.Context) (sample, error) {
	ctx, cancel := context.WithTimeout(ctx, timeLimit)
	defer cancel()
	st, err := t.c.State(ctx)
	return sample{time.Now(), &st}, err
}

// measure calls each with a frame for each interval, and nil before the first, until it
// has done so often enough, each fails, or ctx ends, which is how it is meant to end.
func (t *top) measure(ctx context.Context, each func(*Frame) error) error {
	before, err := t.sample(ctx)
	if err == nil {
		err = each(nil)
	}
	for n := 0; err == nil && (t.count == 0 || n < t.count); n++ {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(t.interval): // at least that, whatever a sample takes
		}
		var now sample
		if now, err = t.sample(ctx); err == nil {
			f := frame(before, now)
			before = now
			err = each(&f)
		}
	}
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// frames writes one frame behind the other.
func (t *top) frames(ctx context.Context, w io.Writer) error {
	first := true
	return t.measure(ctx, func(f *Frame) error {
		if f == nil {
			return nil
		}
		f.sort(t.order)
		switch t.p.output {
		case "json":
			return json.NewEncoder(w).Encode(f)
		case "yaml":
			if _, err := fmt.Fprintln(w, "---"); err != nil {
				return err
			}
			return printYAML(w, f)
		}
		lines := t.lines(f, 0, len(f.Sessions)+len(f.LUNs))
		if !first {
			lines = append([]string{""}, lines...)
		}
		first = false
		_, err := fmt.Fprintln(w, strings.Join(lines, "\n"))
		return err
	})
}

// errQuit ends a measurement.
var errQuit = errors.New("quit")

// live shows frames in place of each other on a terminal, which is as it was afterwards.
func (t *top) live(ctx context.Context, in io.Reader, out *os.File) (err error) {
	ctx, stop := signal.NotifyContext(ctx, unix.SIGHUP, unix.SIGQUIT) // beside those that end ctx
	defer stop()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	s, err := openScreen(in, out)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	resized := make(chan os.Signal, 1)
	signal.Notify(resized, unix.SIGWINCH)
	defer signal.Stop(resized)

	frames, done := make(chan *Frame), make(chan error, 1)
	go func() {
		done <- t.measure(ctx, func(f *Frame) error {
			select {
			case frames <- f:
				return nil
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		})
	}()
	keys := s.keys()
	for {
		select {
		case err := <-done:
			return err
		case t.last = <-frames:
		case <-resized:
		case key, ok := <-keys:
			switch {
			case !ok:
				keys = nil // nobody types any more
			case key == 'q' || key == 'Q':
				cancel(errQuit)
			case key == 's' || key == 'S':
				t.order = (t.order + 1) % len(orders)
			}
		}
		if err := s.draw(t.screenful); err != nil {
			return err
		}
	}
}

// screenful is what there is to show in so many columns and rows.
func (t *top) screenful(columns, rows int) []string {
	if t.last == nil {
		return []string{"measuring..."}
	}
	t.last.sort(t.order)
	return t.lines(t.last, columns, rows-headRows)
}

// headRows are the lines that have neither a session nor a LUN.
const headRows = 5

// lines are a frame as text, with so many sessions and LUNs at most. Names are cut so that
// they fit in the columns; 0: they are whole.
func (t *top) lines(f *Frame, columns, most int) []string {
	sum := Load{}
	for i := range f.LUNs {
		sum.IOPS, sum.ReadBytes, sum.WriteBytes = sum.IOPS+f.LUNs[i].IOPS, sum.ReadBytes+f.LUNs[i].ReadBytes, sum.WriteBytes+f.LUNs[i].WriteBytes
	}
	lines := []string{fmt.Sprintf("%s  %s, %s  %.0f IOPS, %s MB/s read, %s MB/s written  by %s", f.Time.Format(time.TimeOnly),
		count(len(f.Sessions), "session"), count(len(f.LUNs), "LUN"), sum.IOPS, megabytes(sum.ReadBytes), megabytes(sum.WriteBytes), orders[t.order].name)}
	sessions, luns := share(most, len(f.Sessions), len(f.LUNs))
	lines = append(lines, "")
	lines = append(lines, loadTable([]string{"TSIH", "VIA"}, []string{"INITIATOR", "TARGET"}, f.Sessions[:sessions], columns, func(l *Load) (left, right []string) {
		return []string{fmt.Sprint(l.TSIH), l.Transport}, []string{l.Initiator, l.Target}
	})...)
	lines = append(lines, "")
	return append(lines, loadTable([]string{"LUN"}, []string{"TARGET"}, f.LUNs[:luns], columns, func(l *Load) (left, right []string) {
		return []string{fmt.Sprint(*l.LUN)}, []string{l.Target}
	})...)
}

// share is how many of a and b there is room for; who needs less leaves the rest to the
// other.
func share(room, a, b int) (int, int) {
	room = max(room, 0)
	n := min(a, max(room/2, room-b))
	return n, min(b, room-n)
}

// loadTable is a table of loads: what identifies each, the numbers, and names.
func loadTable(left, right []string, list []Load, columns int, identify func(*Load) (left, right []string)) []string {
	rows := [][]string{slices.Concat(left, []string{"IOPS", "R MB/s", "W MB/s", "AVG ms", "P50 ms", "P99 ms", "TASKS", "ERR"})}
	names := [][]string{right}
	for i := range list {
		l := &list[i]
		first, last := identify(l)
		rows = append(rows, append(first, fmt.Sprintf("%.0f", l.IOPS), megabytes(l.ReadBytes), megabytes(l.WriteBytes),
			milliseconds(l.Average), milliseconds(l.P50), milliseconds(l.P99), fmt.Sprint(l.InFlight), fmt.Sprint(l.Errors)))
		names = append(names, last)
	}
	lines := columnsOf(rows, tabwriter.AlignRight)
	for i := range lines {
		lines[i] = strings.TrimPrefix(lines[i], gap) // there is nothing on the left
	}
	if columns > 0 {
		most := (columns - len(lines[0]) - 1) / len(right)
		for _, n := range names[1:] {
			for i := range n {
				n[i] = tail(n[i], most-len(gap))
			}
		}
	}
	for i, n := range columnsOf(names, 0) {
		lines[i] += gap + n
	}
	return lines
}

// gap is between columns.
const gap = "  "

// columnsOf are rows with each column as wide as it has to be.
func columnsOf(rows [][]string, flags uint) []string {
	var b bytes.Buffer
	w := tabwriter.NewWriter(&b, 0, 8, len(gap), ' ', flags)
	for _, row := range rows {
		for i, c := range row {
			if i > 0 && flags == 0 {
				fmt.Fprint(w, "\t")
			}
			fmt.Fprint(w, printable(c))
			if flags != 0 {
				fmt.Fprint(w, "\t") // which ends a column that is aligned
			}
		}
		fmt.Fprintln(w)
	}
	w.Flush()
	return strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n")
}

// tail is the end of a name in so many characters: its begin is that of many.
func tail(name string, most int) string {
	const cut = ".."
	if len(name) <= most || most <= len(cut) {
		return name
	}
	return cut + name[len(name)-most+len(cut):]
}

func megabytes(perSecond float64) string { return fmt.Sprintf("%.1f", perSecond/1e6) }

func milliseconds(v *float64) string {
	if v == nil {
		return "-"
	}
	return fmt.Sprintf("%.2f", *v*1e3)
}
