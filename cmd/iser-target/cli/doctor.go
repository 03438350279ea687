package cli

import (
	"context"
	"errors"
	"fmt"
	"net"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

// A Finding is the result of one check of doctor.
type Finding struct {
	Severity string `json:"severity"` // ok, warning or problem
	About    string `json:"about"`
	Text     string `json:"text"`
	Hint     string `json:"hint,omitempty"` // what to do next
}

const (
	fine    = "ok"
	warning = "warning"
	problem = "problem"
)

// errUnwell is the error of doctor if it finds problems.
var errUnwell = errors.New("doctor found problems")

// doctor returns the command that checks a running target.
func (p *program) doctor() *cobra.Command {
	return p.output(verb{use: "doctor", short: "Check a running target for problems, and suggest remedies", args: cobra.NoArgs,
		long: `Check a running target for problems: its configuration file, LUNs that are not
ready, targets without a portal, disks that may fill up, refused logins, and limits
that are used to 80 % or were reached within the last hour, and IPsec that cannot be
enforced, gateways of its cluster, and what LUNs on RBD images require. doctor changes nothing. It exits with 1 if it finds a problem; warnings do not count. Run it
on the machine of the target, because it checks the disks of its own machine.`,
		run: func(ctx context.Context, c *call) error {
			st, err := c.State(ctx)
			if err != nil {
				return err
			}
			list := []Finding{{fine, "target", "answers", ""}}
			list = append(list, checkFile(ctx, c.Client, &st)...)
			list = append(list, checkTargets(&st)...)
			list = append(list, checkCRCs(&st)...)
			if c.Remote() {
				list = append(list, elsewhere("disks"))
			} else {
				list = append(list, checkSpace(&st, spaceTime)...)
				list = append(list, checkCeph(ctx, &st, c.limit/2)...)
			}
			refused, err := checkLogins(ctx, c.Client)
			if err != nil {
				return err
			}
			list = append(list, refused...)
			list = append(list, checkCertificates(&st, time.Now())...)
			pressing, err := checkLimits(ctx, c.Client)
			if err != nil {
				return err
			}
			list = append(list, pressing...)
			gateways, err := checkCluster(ctx, c.Client)
			if err != nil {
				return err
			}
			list = append(list, gateways...)
			protection, err := checkIPsec(ctx, c.Client)
			if err != nil {
				return err
			}
			list = append(list, protection...)
			if err := p.print(c.cmd.OutOrStdout(), list, func(t *table) { printFindings(t, list) }); err != nil {
				return err
			}
			if slices.ContainsFunc(list, func(f Finding) bool { return f.Severity == problem }) {
				return errUnwell
			}
			return nil
		}})
}

func printFindings(t *table, list []Finding) {
	for _, f := range list {
		first, more, _ := strings.Cut(f.Text, "\n") // a file may have several errors
		t.row(f.Severity, f.About, first)
		for l := range strings.Lines(more) {
			t.below(strings.TrimSpace(l))
		}
		if f.Hint != "" {
			t.below("  " + f.Hint)
		}
	}
}

// checkFile compares the configuration file with the running configuration.
func checkFile(ctx context.Context, c *client.Client, st *schema.State) []Finding {
	const about = "configuration"
	if st.Config == "" {
		return []Finding{{warning, about, "no configuration file: changes are lost when the target stops", "start the target with --config"}}
	}
	list := checkPending(st)
	if c.Remote() {
		return append(list, elsewhere(about))
	}
	b, err := config.ReadFile(st.Config)
	if err != nil {
		return append(list, Finding{problem, about, err.Error(), "the target cannot start again with it; iser-target config export prints the running configuration"})
	}
	plan, err := c.Plan(ctx, st.Config, b)
	var refused *schema.Error
	switch {
	case errors.As(err, &refused) && refused.Code == schema.Forbidden:
		list = append(list, Finding{warning, about, "not compared with the file: that requires the role admin", "run doctor as an administrator"})
	case err != nil:
		list = append(list, Finding{problem, about, err.Error(), "correct the file; the target cannot start again with it"})
	case len(plan.Steps) > len(st.Pending):
		list = append(list, Finding{warning, about, st.Config + " was edited, but not applied", "see the edit with iser-target config plan, and apply it with iser-target config apply"})
	default:
		list = append(list, Finding{fine, about, st.Config + " is the running configuration", ""})
	}
	return list
}

// checkCertificates finds certificates and revocation lists of the control API, metrics and dashboard that have expired, or soon will.
func checkCertificates(st *schema.State, now time.Time) (list []Finding) {
	for _, c := range st.Certificates {
		severity, says := warning, "expires at "
		switch {
		case c.Expires.Before(now):
			severity, says = problem, "has expired at "
		case !c.ExpiresSoon(now):
			continue
		}
		list = append(list, Finding{severity, c.Key, fmt.Sprintf("%s of %s %s%s", c.Path, c.Subject, says, c.Expires.UTC().Format(time.RFC3339)),
			"replace the file; the target reads it at the next connection"})
	}
	if len(list) == 0 && len(st.Certificates) > 0 {
		list = append(list, Finding{fine, "certificates", "no certificate expires soon", ""})
	}
	return list
}

// elsewhere returns the warning for a check that requires the machine of the target.
func elsewhere(about string) Finding {
	return Finding{warning, about, "not checked: the target may be on another machine", "run doctor there"}
}

// checkCRCs finds iSER connections on which nothing notices data that the network changes: FPDUs without CRCs (RFC 5044, section
// 4.4), beyond this machine and without ESP.
func checkCRCs(st *schema.State) (list []Finding) {
	for _, s := range st.Sessions {
		for _, c := range s.Connections {
			host, _, err := net.SplitHostPort(c.Remote)
			protected := c.IPsec != nil && c.IPsec.Suite != ""
			if c.Framing == nil || c.Framing.CRC || protected || err == nil && config.Loopback(host) {
				continue
			}
			list = append(list, Finding{warning, fmt.Sprintf("session %d", s.TSIH), "has no CRCs on its connection from " + c.Remote,
				"mpa.crc in docs/config.md says when the target asks for them"})
		}
	}
	return list
}

// checkTargets finds LUNs that are not ready and targets that initiators cannot use.
func checkTargets(st *schema.State) (list []Finding) {
	if len(st.Targets) == 0 {
		list = append(list, Finding{warning, "targets", "no targets", "create one with iser-target target create"})
	}
	for _, t := range st.Targets {
		about := "target " + t.Name
		before := len(list)
		if len(t.PortalGroups) == 0 {
			list = append(list, Finding{problem, about, "no portal serves it", "check portal_groups of the target and tpgt of the portals"})
		}
		if len(t.LUNs) == 0 && t.Redirect == "" {
			list = append(list, Finding{warning, about, "has no LUNs", "create one with iser-target lun create " + t.Name})
		}
		for _, l := range t.LUNs {
			about := fmt.Sprintf("LUN %d of %s", l.ID, t.Name)
			switch {
			case l.State == schema.NotReady:
				list = append(list, Finding{problem, about, "is not ready: " + l.Reason, "remove the cause; the target retries"})
			case l.State == schema.Ready && l.Health != schema.Healthy:
				list = append(list, Finding{problem, about, "is " + l.Health + ": " + l.Reason, fmt.Sprintf("remove the cause; then iser-target lun recover %s %d", t.Name, l.ID)})
			}
		}
		for _, l := range t.LUNs {
			if l.Faults != nil {
				list = append(list, Finding{warning, fmt.Sprintf("LUN %d of %s", l.ID, t.Name), reason(&l), "end them with iser-target lun fault --clear"})
			}
		}
		if len(list) == before {
			list = append(list, Finding{fine, about, count(len(t.LUNs), "LUN") + ", " + count(len(t.Sessions), "session"), ""})
		}
	}
	return list
}

// A fileUse has the space of a file and of its file system, in bytes.
type fileUse struct {
	dev        uint64
	used, free int64
}

// useOf returns the fileUse of a file. Tests replace it.
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

// spaceTime bounds the checks of all disks together.
const spaceTime = 3 * time.Second

// checkSpace finds file systems that lack the space for their LUNs, and those that do not
// answer within timeout.
func checkSpace(st *schema.State, timeout time.Duration) (list []Finding) {
	type disk struct {
		free, wanted int64 // bytes
		path         string
	}
	disks, order := map[uint64]*disk{}, []*disk{}
	end := time.Now().Add(timeout)
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
				return append(list, Finding{problem, "disk of " + l.Path, fmt.Sprintf("does not answer within %v", timeout), "check the server or device that it is on"})
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
				fmt.Sprintf("its LUNs may take %s more, but only %s are free", rounded(d.wanted), rounded(d.free)), "free space or move LUNs; writes fail when the disk is full"})
		}
	}
	return list
}

// rounded returns a number of bytes with a unit.
func rounded(n int64) string {
	for _, u := range []struct {
		name string
		bits int
	}{{"TiB", 40}, {"GiB", 30}, {"MiB", 20}, {"KiB", 10}} {
		if n >= 1<<u.bits {
			return fmt.Sprintf("%.1f %s", float64(n)/float64(int64(1)<<u.bits), u.name)
		}
	}
	return fmt.Sprintf("%d bytes", n)
}

// compact returns n bytes like rounded, as one word.
func compact(n int64) string {
	if n < 1<<10 {
		return fmt.Sprintf("%dB", n)
	}
	return strings.ReplaceAll(rounded(n), " ", "")
}

// maxRefused bounds the refused logins that doctor shows.
const maxRefused = 5

// wrongResponse matches the reason of a login with a wrong CHAP secret.
var wrongResponse = regexp.MustCompile(`response of CHAP user (".*") is wrong`)

// checkLogins finds the last refused logins. Of those with the same initiator, target and
// reason it returns the last one.
func checkLogins(ctx context.Context, c *client.Client) (list []Finding, err error) {
	type refusal struct{ initiator, target, reason string }
	var last []refusal // of each Finding in list
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
			if at := text("local"); at != "" { // the login may succeed at another portal
				hint += " --portal " + at
			}
		}
		if m := wrongResponse.FindStringSubmatch(text("reason")); m != nil { // explain checks no secrets
			hint = fmt.Sprintf("the secret of the initiator is not that of CHAP user %s. Compare both, or make a new one with iser-target auth user rotate %s %s", m[1], text("target"), m[1])
			if text("target") == "" {
				hint = fmt.Sprintf("the secret of the initiator for discovery is not that of CHAP user %s in discovery_auth. Compare both", m[1])
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
