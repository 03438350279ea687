package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

// A Finding is what doctor has looked at.
type Finding struct {
	Severity string `json:"severity"` // ok, warning or problem
	About    string `json:"about"`
	Text     string `json:"text"`
	Hint     string `json:"hint,omitempty"` // what to do
}

const (
	fine    = "ok"
	warning = "warning"
	problem = "problem"
)

// errUnwell ends doctor when there are problems.
var errUnwell = errors.New("there are problems")

func (p *program) doctor() *cobra.Command {
	return p.list(verb{use: "doctor", short: "Look for what is wrong with a running target, and say what to do", args: cobra.NoArgs,
		long: `Look for what is wrong with a running target: its configuration file, LUNs that
are not ready, targets that nobody can reach, disks that will be full, logins that
were refused. It changes nothing, and exits with 1 if there are problems; warnings
are none. Disks are looked at where it runs, which should be where the target does.`,
		run: func(ctx context.Context, cmd *cobra.Command, c *client.Client, _ []string) error {
			st, err := c.State(ctx)
			if err != nil {
				return err
			}
			list := []Finding{{fine, "target", "answers", ""}}
			list = append(list, checkFile(ctx, c, &st)...)
			list = append(list, checkTargets(&st)...)
			if c.Remote() {
				list = append(list, elsewhere("disks"))
			} else {
				list = append(list, checkSpace(&st, spaceTime)...)
			}
			refused, err := checkLogins(ctx, c)
			if err != nil {
				return err
			}
			list = append(list, refused...)
			if err := p.print(cmd.OutOrStdout(), list, func(t *table) {
				for _, f := range list {
					first, more, _ := strings.Cut(f.Text, "\n") // a file may have many errors
					t.row(f.Severity, f.About, first)
					for l := range strings.Lines(more) {
						t.below(strings.TrimSpace(l))
					}
					if f.Hint != "" {
						t.below("  " + f.Hint)
					}
				}
			}); err != nil {
				return err
			}
			for _, f := range list {
				if f.Severity == problem {
					return errUnwell
				}
			}
			return nil
		}})
}

// checkFile compares the file with what runs.
func checkFile(ctx context.Context, c *client.Client, st *schema.State) []Finding {
	const about = "configuration"
	if st.Config == "" {
		return []Finding{{warning, about, "there is no file: changes last as long as the process", "start it with --config"}}
	}
	var list []Finding
	for _, text := range st.Pending {
		list = append(list, Finding{warning, about, text + " waits for a restart", "restart the target when that is convenient"})
	}
	if c.Remote() {
		return append(list, elsewhere(about))
	}
	b, err := config.ReadFile(st.Config)
	if err != nil {
		return append(list, Finding{problem, about, err.Error(), "the target could not be started again; iser-target config export has the configuration"})
	}
	plan, err := c.Plan(ctx, st.Config, b)
	switch {
	case err != nil:
		list = append(list, Finding{problem, about, err.Error(), "correct the file: the target could not be started again"})
	case len(plan.Steps) > len(st.Pending):
		list = append(list, Finding{warning, about, st.Config + " was edited and not applied", "iser-target config plan, and then config apply"})
	default:
		list = append(list, Finding{fine, about, st.Config + " is what runs", ""})
	}
	return list
}

// elsewhere is what cannot be looked at from here.
func elsewhere(about string) Finding {
	return Finding{warning, about, "not looked at: the target may be on another machine", "run doctor there"}
}

// checkTargets looks for LUNs that do not work and targets that cannot be used.
func checkTargets(st *schema.State) (list []Finding) {
	if len(st.Targets) == 0 {
		list = append(list, Finding{warning, "targets", "there are none", "iser-target target create"})
	}
	for _, t := range st.Targets {
		about := "target " + t.Name
		before := len(list)
		if len(t.PortalGroups) == 0 {
			list = append(list, Finding{problem, about, "no portal leads to it", "see portal_groups of the target and tpgt of the portals"})
		}
		if len(t.LUNs) == 0 && t.Redirect == "" {
			list = append(list, Finding{warning, about, "has no LUNs", "iser-target lun create " + t.Name})
		}
		for _, l := range t.LUNs {
			if l.State == schema.NotReady {
				list = append(list, Finding{problem, fmt.Sprintf("LUN %d of %s", l.ID, t.Name), "is not ready: " + l.Reason, "it is tried again; put right what it lacks"})
			}
		}
		if len(list) == before {
			list = append(list, Finding{fine, about, count(len(t.LUNs), "LUN") + ", " + count(len(t.Sessions), "session"), ""})
		}
	}
	return list
}

// A fileUse is what a file, and the file system that it is on, have of room, in octets.
type fileUse struct {
	dev        uint64
	used, free int64
}

// useOf looks at a file; tests let it hang.
var useOf = func(path string) (fileUse, error) {
	var file unix.Stat_t
	var fs unix.Statfs_t
	if err := unix.Stat(path, &file); err != nil {
		return fileUse{}, err
	}
	if err := unix.Statfs(path, &fs); err != nil {
		return fileUse{}, err
	}
	return fileUse{file.Dev, file.Blocks * 512, int64(fs.Bavail) * fs.Bsize}, nil
}

// spaceTime is how long all disks together have to answer.
const spaceTime = 3 * time.Second

// checkSpace looks for file systems that cannot take all that LUNs on them may still
// write, and for such as do not answer.
func checkSpace(st *schema.State, most time.Duration) (list []Finding) {
	type disk struct {
		free, wanted int64 // octets
		path         string
	}
	disks, order := map[uint64]*disk{}, []*disk{}
	end := time.Now().Add(most)
	for _, t := range st.Targets {
		for _, l := range t.LUNs {
			if l.Backend != "file" || l.ReadOnly {
				continue
			}
			var file fileUse
			var err error
			back := make(chan struct{})
			go func() {
				defer close(back)
				file, err = useOf(l.Path)
			}()
			select {
			case <-back:
			case <-time.After(max(time.Until(end), 10*time.Millisecond)):
				return append(list, Finding{problem, "disk of " + l.Path, fmt.Sprintf("does not answer within %v", most), "see to what it is on: a server that is gone, or a device that is stuck"})
			}
			if err != nil {
				continue
			}
			d := disks[file.dev]
			if d == nil {
				d = &disk{free: file.free, path: l.Path}
				disks[file.dev], order = d, append(order, d)
			}
			d.wanted += max(l.Size-file.used, 0)
		}
	}
	for _, d := range order {
		if d.wanted > d.free {
			list = append(list, Finding{warning, "disk of " + d.path,
				fmt.Sprintf("LUNs on it may write %s more, and %s are free", rounded(d.wanted), rounded(d.free)), "writes fail when it is full: make room, or move LUNs"})
		}
	}
	return list
}

// rounded is a number of octets for people.
func rounded(n int64) string {
	for _, u := range []struct {
		name string
		bits int
	}{{"TiB", 40}, {"GiB", 30}, {"MiB", 20}, {"KiB", 10}} {
		if n >= 1<<u.bits {
			return fmt.Sprintf("%.1f %s", float64(n)/float64(int64(1)<<u.bits), u.name)
		}
	}
	return fmt.Sprintf("%d octets", n)
}

// maxRefused is how many refused logins are shown.
const maxRefused = 5

// checkLogins finds the last logins that were refused, of those from the same initiator for
// the same reason one.
func checkLogins(ctx context.Context, c *client.Client) (list []Finding, err error) {
	type refusal struct{ initiator, target, reason string }
	var last []refusal // of list
	err = c.Events(ctx, 0, false, func(e schema.Event) error {
		if e.Event != "login" || e.Attrs["outcome"] != "refused" {
			return nil
		}
		text := func(key string) string {
			if v, ok := e.Attrs[key]; ok {
				return fmt.Sprint(v)
			}
			return ""
		}
		hint := ""
		if i, t := text("initiator"), text("target"); i != "" && t != "" {
			hint = fmt.Sprintf("iser-target explain --initiator %s --target %s", i, t)
			if at := text("local"); at != "" { // another portal may lead to the target
				hint += " --portal " + at
			}
		}
		this := refusal{text("initiator"), text("target"), text("reason")}
		if at := slices.Index(last, this); at >= 0 {
			list, last = slices.Delete(list, at, at+1), slices.Delete(last, at, at+1)
		}
		last = append(last, this)
		list = append(list, Finding{warning, "login", strings.Join(strings.Fields(fmt.Sprintf("%s from %s was refused: %s", text("initiator"), text("remote"), text("reason"))), " "), hint})
		if len(list) > maxRefused {
			list, last = list[1:], last[1:]
		}
		return nil
	})
	return list, err
}
