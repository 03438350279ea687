package cli

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/aymanbagabas/go-udiff"
	"github.com/spf13/cobra"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

// A Version is a row of config history.
type Version struct {
	Version int       `json:"version"`
	Time    time.Time `json:"time"` // when the text was written
	Bytes   int64     `json:"bytes"`
	Added   int       `json:"added"` // lines that the next version, or the present text, has more
	Removed int       `json:"removed"`
}

// ownFile returns the path of the file that the target was started with. It has to be on this machine.
func (c *call) ownFile(ctx context.Context) (string, error) {
	if c.Remote() {
		return "", usage(c.cmd, "the target may be on another machine: run %s there", c.cmd.CommandPath())
	}
	st, err := c.State(ctx)
	if err != nil {
		return "", err
	}
	if st.Config == "" {
		return "", errors.New("the target was started without a configuration file: it keeps no history")
	}
	return st.Config, nil
}

// history returns config history, diff, rollback and edit.
func (p *program) history() []*cobra.Command {
	list := list(p, verb{use: "history", short: "List the earlier versions of the configuration file", args: cobra.NoArgs,
		long:    "List the earlier versions of the file that the target was started with, the oldest first,\nwith the lines that the text after each added and removed.",
		example: "  iser-target config history\n  iser-target config diff 12"},
		func(ctx context.Context, c *call) ([]Version, error) { return c.versions(ctx) }, "VERSION* WRITTEN BYTES ADDED REMOVED", func(v *Version) []any {
			return []any{v.Version, v.Time.Local().Format(time.DateTime), v.Bytes, v.Added, v.Removed}
		})
	diff := p.command(verb{use: "diff [VERSION [VERSION]]", short: "Show how versions of the configuration file differ", args: cobra.MaximumNArgs(2), complete: p.versionNumbers(2),
		long: `Show how the present configuration file differs from a version, by default the last one,
or how a version differs from another, as a unified diff. The text has the secrets of
the file. diff exits with 0, whether or not there is a difference.`,
		example: "  iser-target config diff\n  iser-target config diff 12\n  iser-target config diff 11 12",
		run: func(ctx context.Context, c *call) error {
			path, err := c.ownFile(ctx)
			if err != nil {
				return err
			}
			text, err := c.diff(path)
			if err == nil {
				err = printDiff(c.cmd.OutOrStdout(), text)
			}
			return err
		}})
	rollback := p.change(verb{use: "rollback [VERSION]", short: "Make an earlier version of the configuration file the running one", args: cobra.MaximumNArgs(1), complete: p.versionNumbers(1), shrinks: true,
		long: `Make an earlier version of the configuration file the running one, by default the last.
The target changes only what differs, and the present text becomes a version itself. See
what would happen with --dry-run first.`,
		example: "  iser-target config rollback --dry-run\n  iser-target config rollback 12 --drain 30s"},
		func(ctx context.Context, c *call, o schema.Options) (*schema.Plan, error) {
			path, err := c.ownFile(ctx)
			if err != nil {
				return nil, err
			}
			number, err := c.version(path, 0)
			if err != nil {
				return nil, err
			}
			b, err := config.ReadVersion(path, number)
			if err != nil {
				return nil, err
			}
			return c.Apply(ctx, fmt.Sprintf("version %d", number), b, o)
		})
	edit := p.change(verb{use: "edit", short: "Edit the configuration file, check it, and make it the running one", args: cobra.NoArgs, shrinks: true,
		long: `Edit a copy of the configuration file with $VISUAL, $EDITOR or vi. The text is checked
when the editor ends, and then applied like config apply. If it has errors, you can
edit it again. A text that was not applied stays in a file whose name is printed.`,
		example: "  iser-target config edit --dry-run\n  EDITOR=nano iser-target config edit"},
		func(ctx context.Context, c *call, o schema.Options) (*schema.Plan, error) {
			path, err := c.ownFile(ctx)
			if err != nil {
				return nil, err
			}
			return c.edit(path, o)
		})
	return []*cobra.Command{list, diff, rollback, edit}
}

// versions returns the history of the file of the target.
func (c *call) versions(ctx context.Context) ([]Version, error) {
	path, err := c.ownFile(ctx)
	if err != nil {
		return nil, err
	}
	all, err := config.History(path)
	if err != nil {
		return nil, err
	}
	rows := []Version{}
	texts := make([]string, 0, len(all)+1)
	for _, v := range all {
		b, err := config.ReadFile(v.Path)
		if err != nil {
			return nil, err
		}
		texts = append(texts, string(b))
	}
	now, err := config.ReadFile(path)
	if err != nil {
		return nil, err
	}
	texts = append(texts, string(now))
	for i, v := range all {
		row := Version{Version: v.Number, Time: v.Time, Bytes: v.Size}
		for line := range strings.Lines(body(udiff.Unified("a", "b", texts[i], texts[i+1]))) {
			switch line[0] {
			case '+':
				row.Added++
			case '-':
				row.Removed++
			}
		}
		rows = append(rows, row)
	}
	return rows, nil
}

// body returns a unified diff without the two lines that name its files.
func body(diff string) string {
	for range 2 {
		_, diff, _ = strings.Cut(diff, "\n")
	}
	return diff
}

// version returns the number that argument i names, or that of the last version.
func (c *call) version(path string, i int) (int, error) {
	if i < len(c.args) {
		n, err := strconv.Atoi(c.args[i])
		if err != nil || n < 1 {
			return 0, usage(c.cmd, "VERSION must be a number of config history, not %q", c.args[i])
		}
		return n, nil
	}
	all, err := config.History(path)
	if err == nil && len(all) == 0 {
		err = &schema.Error{Code: schema.NotFound, Message: path + ": has no earlier version"}
	}
	if err != nil {
		return 0, err
	}
	return all[len(all)-1].Number, nil
}

// diff returns the difference that the arguments name; empty: none.
func (c *call) diff(path string) (string, error) {
	number, err := c.version(path, 0)
	if err != nil {
		return "", err
	}
	old, err := config.ReadVersion(path, number)
	if err != nil {
		return "", err
	}
	name, now := path, []byte(nil)
	if len(c.args) == 2 {
		other, err := c.version(path, 1)
		if err != nil {
			return "", err
		}
		name = fmt.Sprintf("version %d", other)
		if now, err = config.ReadVersion(path, other); err != nil {
			return "", err
		}
	} else if now, err = config.ReadFile(path); err != nil {
		return "", err
	}
	return udiff.Unified(fmt.Sprintf("version %d", number), name, string(old), string(now)), nil
}

// printDiff writes a unified diff, in colours on a terminal.
func printDiff(w io.Writer, text string) error {
	coloured := useColour(w)
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		if line != "" {
			line = printable(strings.ReplaceAll(line, "\t", "    "))
		}
		if coloured && line != "" {
			switch line[0] {
			case '+':
				line = green + line + reset
			case '-':
				line = red + line + reset
			}
		}
		if _, err := fmt.Fprintln(w, line); err != nil {
			return err
		}
	}
	return nil
}

// versionNumbers completes up to most arguments that are versions.
func (p *program) versionNumbers(most int) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		const none = cobra.ShellCompDirectiveNoFileComp
		cl, err := p.client(cmd)
		if err != nil || len(args) >= most || cl.Remote() {
			return nil, none
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), time.Second)
		defer cancel()
		st, err := cl.State(ctx)
		if err != nil {
			return nil, none
		}
		all, _ := config.History(st.Config)
		return texts(all, func(v config.Version) string {
			return fmt.Sprintf("%d\twritten %s", v.Number, v.Time.Local().Format(time.DateTime))
		}), none
	}
}

// edit lets the user edit a copy of the file at path, and applies it.
func (c *call) edit(path string, o schema.Options) (plan *schema.Plan, err error) {
	old, err := config.ReadFile(path)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "iser-target-edit-") // mode 0700: the text has secrets
	if err != nil {
		return nil, err
	}
	copied := filepath.Join(dir, filepath.Base(path))
	keep := false
	defer func() {
		if !keep {
			os.RemoveAll(dir)
		} else if err != nil {
			fmt.Fprintf(c.cmd.ErrOrStderr(), "Your text is in %s.\n", copied)
		}
	}()
	if err := os.WriteFile(copied, old, 0o600); err != nil {
		return nil, err
	}
	for {
		if err := c.runEditor(copied); err != nil {
			return nil, err
		}
		text, err := config.ReadFile(copied)
		if err != nil {
			return nil, err
		}
		if bytes.Equal(text, old) {
			return &schema.Plan{Note: "the text is as before"}, nil
		}
		keep = true
		doc, err := config.NewDocument(path, text)
		if err == nil {
			_, err = doc.Config()
		}
		if err != nil {
			if !c.again(err) {
				return nil, err
			}
			continue
		}
		now, err := config.ReadFile(path)
		if err != nil {
			return nil, err
		}
		if !bytes.Equal(now, old) {
			return nil, fmt.Errorf("%s: changed while you edited it. Nothing was changed", path)
		}
		ctx, cancel := context.WithTimeout(c.cmd.Context(), c.work+o.Drain) // the time of the editor does not count
		plan, err := c.Apply(ctx, path, text, o)
		cancel()
		keep = err != nil || o.DryRun
		if o.DryRun && err == nil {
			fmt.Fprintf(c.cmd.ErrOrStderr(), "Your text is in %s.\n", copied)
		}
		return plan, err
	}
}

// again shows err and asks whether to edit again. Without a terminal nobody can answer.
func (c *call) again(err error) bool {
	in, out := c.cmd.InOrStdin(), c.cmd.ErrOrStderr()
	f, ok := in.(*os.File)
	if !ok || !isTerminal(f) {
		return false
	}
	Report(out, err)
	fmt.Fprint(out, "Edit again? [Y/n] ")
	answer, readErr := bufio.NewReader(in).ReadString('\n')
	answer = strings.ToLower(strings.TrimSpace(answer))
	return readErr == nil && (answer == "" || answer == "y" || answer == "yes")
}

// runEditor runs the editor of the user on a file. EDITOR may have arguments.
func (c *call) runEditor(path string) error {
	editor := "vi"
	for _, name := range []string{"EDITOR", "VISUAL"} {
		if v := os.Getenv(name); v != "" {
			editor = v
		}
	}
	cmd := exec.CommandContext(c.cmd.Context(), "sh", "-c", editor+` "$1"`, "sh", path)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = c.cmd.InOrStdin(), c.cmd.ErrOrStderr(), c.cmd.ErrOrStderr()
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("editor %s: %w. Nothing was changed. Set EDITOR to another one", editor, err)
	}
	return nil
}
