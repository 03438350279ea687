package cli

import (
	"bytes"
	"context"
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

// Limits of the time between two frames.
const (
	minInterval = 100 * time.Millisecond
	maxInterval = time.Hour
)

// A top shows the load of sessions and LUNs.
type top struct {
	p        *program
	c        *client.Client
	interval time.Duration
	count    int // frames; 0: until interrupted
	order    int // index in orders
	last     *Frame
}

// top returns the command that shows the load.
func (p *program) top() *cobra.Command {
	t := &top{p: p}
	var order string
	names := make([]string, len(orders))
	for i, o := range orders {
		names[i] = o.name
	}
	cmd := p.output(verb{use: "top", short: "Show the load of sessions and LUNs continuously", args: cobra.NoArgs,
		long: `Show the load of sessions and LUNs continuously: commands and data per second, mean
and 99th percentile of the latency of reads (R) and writes (W) from the arrival of a
command to its response, the mean number of commands in progress (DEPTH), and errors
since the last frame. A narrow terminal has no means and shows fewer names.

On a terminal, press q to quit and s to change the order. Elsewhere, and with --count,
top prints one frame after the other. -o json writes each on one line.`,
		run: func(_ context.Context, c *call) error {
			cmd, ctx := c.cmd, c.cmd.Context()
			if t.interval < minInterval || t.interval > maxInterval {
				return usage(cmd, "--interval must be from %v to %v, not %v", minInterval, maxInterval, t.interval)
			}
			if t.count < 0 {
				return usage(cmd, "--count must not be negative")
			}
			if t.order = slices.Index(names, order); t.order < 0 {
				return usage(cmd, "--sort must be one of %s, not %q", strings.Join(names, ", "), order)
			}
			t.c = c.Client
			if p.format == "table" && t.count == 0 && isTerminal(cmd.OutOrStdout()) {
				return t.live(ctx, cmd.InOrStdin(), cmd.OutOrStdout().(*os.File))
			}
			return t.frames(ctx, cmd.OutOrStdout())
		}})
	f := cmd.Flags()
	f.DurationVarP(&t.interval, "interval", "d", time.Second, "time between two frames")
	f.IntVarP(&t.count, "count", "n", 0, "end after this number of frames (default: run until interrupted)")
	f.StringVar(&order, "sort", names[0], "order: "+strings.Join(names, ", "))
	cmd.RegisterFlagCompletionFunc("sort", cobra.FixedCompletions(names, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func (t *top) sample(ctx context.Context) (sample, error) {
	ctx, cancel := context.WithTimeout(ctx, t.p.timeout)
	defer cancel()
	st, err := t.c.State(ctx)
	return sample{time.Now(), &st}, err
}

// measure calls each with nil, and then with a frame for each interval, until it has
// measured count frames, each fails, or ctx ends, which is not an error.
func (t *top) measure(ctx context.Context, each func(*Frame) error) error {
	before, err := t.sample(ctx)
	if err == nil {
		err = each(nil)
	}
	for n := 0; err == nil && (t.count == 0 || n < t.count); n++ {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(t.interval): // plus the time of a sample
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

// frames prints one frame after the other.
func (t *top) frames(ctx context.Context, w io.Writer) error {
	between := ""
	return t.measure(ctx, func(f *Frame) error {
		if f == nil {
			return nil
		}
		f.sort(t.order)
		return t.p.printOne(w, f, func() string {
			text := between + strings.Join(t.lines(f, 0, len(f.Sessions)+len(f.LUNs)), "\n")
			between = "\n"
			return text
		})
	})
}

// errQuit ends a measurement.
var errQuit = errors.New("quit")

// live shows the latest frame on a terminal, and restores the terminal at the end.
func (t *top) live(ctx context.Context, in io.Reader, out *os.File) (err error) {
	ctx, stop := signal.NotifyContext(ctx, unix.SIGHUP, unix.SIGQUIT) // in addition to those that end ctx
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
				keys = nil // the input has ended
			case key == 'q' || key == 'Q' || key == keyInterrupt || key == keyQuit:
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

// screenful returns the lines for a screen of that size.
func (t *top) screenful(columns, rows int) []string {
	if t.last == nil {
		return []string{"measuring..."}
	}
	t.last.sort(t.order)
	return t.lines(t.last, columns, rows-headRows)
}

// headRows is the number of lines of a frame besides sessions and LUNs.
const headRows = 5

// lines returns a frame as text with at most max sessions and LUNs. It shortens names to fit
// into the columns, unless that is 0.
func (t *top) lines(f *Frame, columns, max int) []string {
	sum := Load{}
	for i := range f.LUNs {
		sum.IOPS, sum.ReadBytes, sum.WriteBytes = sum.IOPS+f.LUNs[i].IOPS, sum.ReadBytes+f.LUNs[i].ReadBytes, sum.WriteBytes+f.LUNs[i].WriteBytes
	}
	lines := []string{fmt.Sprintf("%s  %s, %s  %.0f IOPS, %s MB/s read, %s MB/s written", f.Time.Format(time.TimeOnly),
		count(len(f.Sessions), "session"), count(len(f.LUNs), "LUN"), sum.IOPS, megabytes(sum.ReadBytes), megabytes(sum.WriteBytes)),
		"sorted by " + orders[t.order].name}
	sessions, luns := share(max, len(f.Sessions), len(f.LUNs))
	names := []string{"INITIATOR", "TARGET"}
	if columns > 0 && columns < narrow {
		names = names[:1]
	}
	lines = append(lines, loadTable([]string{"TSIH", "VIA"}, names, f.Sessions[:sessions], columns, func(l *Load) (left, right []string) {
		return []string{fmt.Sprint(l.TSIH), l.Transport}, []string{l.Initiator, l.Target}[:len(names)]
	})...)
	lines = append(lines, "")
	return append(lines, loadTable([]string{"LUN"}, []string{"TARGET"}, f.LUNs[:luns], columns, func(l *Load) (left, right []string) {
		return []string{fmt.Sprint(*l.LUN)}, []string{l.Target}
	})...)
}

// share returns how many of a and of b fit into room. Each gets half, and what the other
// does not need.
func share(room, a, b int) (int, int) {
	room = max(room, 0)
	n := min(a, max(room/2, room-b))
	return n, min(b, room-n)
}

// narrow is the number of columns from which there is room for all numbers and names.
const narrow = 110

// A loadColumn has a number of each load.
type loadColumn struct {
	head string
	wide bool // left out of a narrow table
	text func(*Load) string
}

// loadTable returns a table of loads, with identifiers, numbers and names.
func loadTable(left, right []string, list []Load, columns int, identify func(*Load) (left, right []string)) []string {
	number := []loadColumn{
		{"IOPS", false, func(l *Load) string { return fmt.Sprintf("%.0f", l.IOPS) }},
		{"R MB/s", false, func(l *Load) string { return megabytes(l.ReadBytes) }},
		{"W MB/s", false, func(l *Load) string { return megabytes(l.WriteBytes) }},
		{"R AVG", true, func(l *Load) string { return latencyText(l.Read.Average) }},
		{"W AVG", true, func(l *Load) string { return latencyText(l.Write.Average) }},
		{"R P99", false, func(l *Load) string { return latencyText(l.Read.P99) }},
		{"W P99", false, func(l *Load) string { return latencyText(l.Write.P99) }},
		{"DEPTH", false, func(l *Load) string { return fmt.Sprintf("%.1f", l.Depth) }},
		{"ERR", true, func(l *Load) string { return fmt.Sprint(l.Errors) }},
	}
	if columns > 0 && columns < narrow {
		number = slices.DeleteFunc(number, func(n loadColumn) bool { return n.wide })
	}
	head := slices.Clone(left)
	for _, n := range number {
		head = append(head, n.head)
	}
	rows := [][]string{head}
	names := [][]string{right}
	for i := range list {
		l := &list[i]
		first, last := identify(l)
		for _, n := range number {
			first = append(first, n.text(l))
		}
		rows = append(rows, first)
		names = append(names, last)
	}
	lines := columnsOf(rows, tabwriter.AlignRight)
	for i := range lines {
		lines[i] = strings.TrimPrefix(lines[i], gap)
	}
	if columns > 0 {
		width := (columns - len(lines[0]) - 1) / len(right)
		for _, n := range names[1:] {
			for i := range n {
				n[i] = tail(n[i], width-len(gap))
			}
		}
	}
	for i, n := range columnsOf(names, 0) {
		lines[i] += gap + n
	}
	return lines
}

// gap separates columns.
const gap = "  "

// columnsOf returns the rows as lines with aligned columns.
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
				fmt.Fprint(w, "\t") // ends an aligned column
			}
		}
		fmt.Fprintln(w)
	}
	w.Flush()
	return strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n")
}

// tail shortens a name to width characters. It keeps the end, in which names differ.
func tail(name string, width int) string {
	const cut = ".."
	if len(name) <= width || width <= len(cut) {
		return name
	}
	return cut + name[len(name)-width+len(cut):]
}

func megabytes(perSecond float64) string { return fmt.Sprintf("%.1f", perSecond/1e6) }

// latencyText returns seconds with three digits, or - without any.
func latencyText(v *float64) string {
	if v == nil {
		return "-"
	}
	return duration(*v)
}
