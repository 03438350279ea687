package cli

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"
	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/cmd/iser-target/selftest"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/iscsi/initiator"
	"github.com/iser-target/iser-target/security"
)

const (
	// scratchPrefix begins the names of scratch targets. Their other parts are the start in Unix seconds, where the process runs, its id and a
	// random number.
	scratchPrefix = "iqn.2026-11.io.github.iser-target:selftest."
	// scratchSize is the size of the scratch LUN. Memory LUNs take memory for what is written.
	scratchSize = "64MiB"
	// scratchLife is the time that a selftest may take. An older scratch target has lost its process.
	scratchLife = 30 * time.Minute
)

// errSelftest is the error of selftest if a case fails.
var errSelftest = errors.New("selftest: cases have failed")

// A selftestReport is what selftest prints.
type selftestReport struct {
	Started   time.Time         `json:"started"`
	Seconds   float64           `json:"seconds"`
	Version   string            `json:"version"`                  // of this program
	Target    string            `json:"target_version,omitempty"` // of the program that serves
	Kernel    string            `json:"kernel"`                   // of this machine
	Go        string            `json:"go"`
	CPUs      int               `json:"cpus"`
	Config    string            `json:"config_sha256,omitempty"` // of the configuration without its secrets, before the scratch target
	Address   string            `json:"address"`
	Name      string            `json:"target"`
	LUN       int               `json:"lun"`
	Scratch   bool              `json:"scratch"` // selftest has made the LUN
	Removed   []string          `json:"removed_leftovers,omitempty"`
	Passed    int               `json:"passed"`
	Failed    int               `json:"failed"`
	Skipped   int               `json:"skipped"`
	Cases     []selftest.Result `json:"cases"`
	Interrupt bool              `json:"interrupted,omitempty"`
}

// A selftestCommand has the flags of selftest.
type selftestCommand struct {
	p                       *program
	transport, portal, name string
	destructive, all        bool
}

// selftest returns the command that tests a running target.
func (p *program) selftest() *cobra.Command {
	s := &selftestCommand{p: p}
	cmd := &cobra.Command{
		Use: "selftest [URL]", Short: "Run conformance cases against a running target, and print a report", Args: cobra.MaximumNArgs(1),
		Long: `Run conformance cases against a running target, over iSCSI/TCP and iSER, and print
a report for a ticket. The cases cover login, PDUs, the FPDUs of iWARP, and SCSI
commands. Each names the rows of docs/requirements that it checks.

Without a URL, selftest adds a scratch target with a LUN in memory through the
control API, which only selftest may log in to. It removes that target at its
end, also if it is interrupted. If it was killed, the next selftest does that. With a
URL like iscsi://HOST[:PORT]/TARGET/LUN, selftest overwrites that LUN, which
requires --destructive. The target of the URL must admit --initiator-name without CHAP.

selftest exits with 1 if a case fails. A skipped case says why.`,
		Example: `  iser-target selftest
  iser-target selftest --transport iser -o json >report.json
  iser-target selftest iscsi://192.0.2.10/iqn.2026-11.io.example:scratch/0 --destructive`,
		RunE: func(cmd *cobra.Command, args []string) error { return s.run(cmd, args) },
	}
	f := cmd.Flags()
	f.StringVar(&s.transport, "transport", "both", "transport: tcp, iser or both")
	f.StringVar(&s.portal, "portal", "", "HOST:PORT of the target (default: its first portal that serves the transports)")
	f.StringVar(&s.name, "initiator-name", initiator.DefaultName+"-selftest", "iSCSI name of selftest")
	f.BoolVar(&s.destructive, "destructive", false, "overwrite the LUN of the URL")
	f.BoolVar(&s.all, "all", false, "list the cases that pass, too")
	p.outputFlag(cmd)
	cmd.RegisterFlagCompletionFunc("transport", cobra.FixedCompletions([]string{"both", "iser", "tcp"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// run does what the flags say.
func (s *selftestCommand) run(cmd *cobra.Command, args []string) error {
	if err := s.p.checkOutput(cmd); err != nil {
		return err
	}
	o := selftest.Options{Name: s.name, Transports: []string{s.transport}}
	switch s.transport {
	case "both":
		o.Transports = selftest.Transports
	case "tcp", "iser":
	default:
		return usage(cmd, "--transport must be tcp, iser or both, not %q", s.transport)
	}
	if _, err := security.NormalizeName(s.name); err != nil {
		return usage(cmd, "--initiator-name: %q: %v", s.name, err)
	}
	if s.portal != "" {
		if _, _, err := net.SplitHostPort(s.portal); err != nil {
			return usage(cmd, "--portal: %q is not HOST:PORT", s.portal)
		}
	}
	r := &selftestReport{Started: time.Now().UTC(), Version: cmd.Root().Version, Kernel: kernel(), Go: runtime.Version(), CPUs: runtime.NumCPU()}
	ctx, cancel := context.WithTimeout(cmd.Context(), scratchLife-time.Minute)
	defer cancel()
	c, err := s.p.client(cmd)
	if err == nil {
		err = s.describe(ctx, c, r)
	}
	if len(args) == 1 {
		return s.runURL(ctx, cmd, args[0], &o, r)
	}
	if err != nil {
		return err
	}
	if s.destructive {
		return usage(cmd, "--destructive requires a URL")
	}
	return s.runScratch(ctx, cmd, c, &o, r)
}

// describe adds to r what the control API says about the target.
func (s *selftestCommand) describe(ctx context.Context, c *client.Client, r *selftestReport) error {
	ctx, cancel := context.WithTimeout(ctx, s.p.timeout)
	defer cancel()
	st, err := c.State(ctx)
	if err != nil {
		return err
	}
	r.Target = st.Version
	text, err := c.Export(ctx)
	if err != nil {
		return err
	}
	r.Config, err = configDigest(text)
	return err
}

// runURL tests the LUN of a URL.
func (s *selftestCommand) runURL(ctx context.Context, cmd *cobra.Command, arg string, o *selftest.Options, r *selftestReport) error {
	u, err := initiator.ParseURL(arg)
	switch {
	case err != nil:
		return &usageError{cmd, err}
	case u.Target == "" || u.LUN < 0:
		return usage(cmd, "%s names no LUN: a URL is like iscsi://HOST[:PORT]/TARGET/LUN", arg)
	case s.portal != "":
		return usage(cmd, "--portal is not for a URL")
	case !s.destructive:
		return &schema.Error{Code: schema.Refused, Message: "selftest overwrites " + arg + ". Nothing was written",
			Hint: "use --destructive, or leave out the URL to test a scratch LUN"}
	case u.Scheme == "iser" && s.transport == "both":
		o.Transports = []string{"iser"}
	case u.Scheme == "iser" && s.transport == "tcp":
		return usage(cmd, "--transport tcp is not for iser://")
	}
	// The control API may be that of another target.
	r.Target, r.Config = "", ""
	o.Address, o.Target, o.LUN = u.Address, u.Target, u.LUN
	return s.test(ctx, cmd, o, r)
}

// runScratch tests a scratch LUN, which it makes and removes.
func (s *selftestCommand) runScratch(ctx context.Context, cmd *cobra.Command, c *client.Client, o *selftest.Options, r *selftestReport) error {
	if err := s.removeLeftovers(ctx, c, r); err != nil {
		return err
	}
	portals, err := c.Portals(ctx)
	if err != nil {
		return err
	}
	portal, err := s.choose(portals, o.Transports, c.Remote())
	if err != nil {
		return err
	}
	o.Address = portal.Address
	o.Target = scratchName(time.Now())
	defer func() {
		// cmd.Context may have ended.
		ctx, cancel := context.WithTimeout(context.Background(), s.p.work(cmd))
		defer cancel()
		_, err := c.RemoveTarget(ctx, o.Target, schema.Options{Disrupt: true, Now: true})
		var gone *schema.Error
		if err != nil && !(errors.As(err, &gone) && gone.Code == schema.NotFound) {
			fmt.Fprintln(cmd.ErrOrStderr(), shown(fmt.Sprintf("iser-target: %s: cannot be removed: %v. The next selftest removes it.", o.Target, err)))
		}
	}()
	scratch := schema.Target{Name: o.Target, Alias: "selftest", Initiators: []string{s.name}, PortalGroups: []int{portal.TPGT}}
	if _, err := c.AddTarget(ctx, scratch, schema.Options{}); err != nil {
		return err
	}
	if _, err := c.SetTarget(ctx, o.Target, schema.Values{"initial_r2t": "false"}, schema.Options{}); err != nil {
		return err
	}
	zero := 0
	if _, err := c.AddLUN(ctx, o.Target, schema.LUN{ID: &zero, Backend: "memory", Size: scratchSize}, schema.Options{}); err != nil {
		return err
	}
	r.Scratch = true
	return s.test(ctx, cmd, o, r)
}

// test runs the cases and prints the report.
func (s *selftestCommand) test(ctx context.Context, cmd *cobra.Command, o *selftest.Options, r *selftestReport) error {
	r.Address, r.Name, r.LUN = o.Address, o.Target, o.LUN
	terminal := isTerminal(cmd.ErrOrStderr())
	o.Progress = func(done, of int, c *selftest.Result) {
		if terminal {
			columns, _ := windowSize(cmd.ErrOrStderr())
			line := fmt.Sprintf("%d of %d: %s: %s", done+1, of, c.Transport, c.Case)
			fmt.Fprintf(cmd.ErrOrStderr(), "\r%.*s\x1b[K", max(columns-1, 0), line)
		}
	}
	var err error
	r.Cases, err = selftest.Run(ctx, *o)
	if terminal {
		fmt.Fprint(cmd.ErrOrStderr(), "\r\x1b[K")
	}
	r.Seconds = time.Since(r.Started).Seconds()
	r.Passed, r.Failed, r.Skipped = selftest.Count(r.Cases)
	if err != nil && len(r.Cases) == 0 {
		return err
	}
	if r.Interrupt = err != nil; r.Interrupt {
		err = fmt.Errorf("interrupted: %d cases have results: %w", len(r.Cases), err)
	} else if r.Failed > 0 {
		err = errSelftest
	}
	return errors.Join(err, s.p.print(cmd.OutOrStdout(), r, func(t *table) { s.table(t, r) }))
}

// table prints the report for people.
func (s *selftestCommand) table(t *table, r *selftestReport) {
	for _, line := range [][2]string{
		{"started", r.Started.Format(time.RFC3339)},
		{"version", r.Version},
		{"target version", r.Target},
		{"kernel", r.Kernel},
		{"go", fmt.Sprintf("%s, %d CPUs", r.Go, r.CPUs)},
		{"configuration", r.Config},
		{"address", r.Address},
		{"LUN", fmt.Sprintf("%s, LUN %d", r.Name, r.LUN)},
	} {
		if line[1] != "" {
			t.row(line[0], line[1])
		}
	}
	for _, name := range r.Removed {
		t.row("removed", name+", which an earlier selftest had left")
	}
	t.gap()
	shownCases := slices.DeleteFunc(slices.Clone(r.Cases), func(c selftest.Result) bool { return c.Outcome == selftest.Pass && !s.all })
	if len(shownCases) > 0 {
		t.head("RESULT TRANSPORT GROUP CASE ROWS REASON")
		for _, c := range shownCases {
			t.row(c.Outcome, c.Transport, c.Group, c.Case, strings.Join(c.Rows, " "), c.Reason)
		}
		t.gap()
	}
	t.head("TRANSPORT GROUP PASS FAIL SKIP")
	type key struct{ transport, group string }
	var order []key
	groups := map[key][]selftest.Result{}
	for _, c := range r.Cases {
		k := key{c.Transport, c.Group}
		if groups[k] == nil {
			order = append(order, k)
		}
		groups[k] = append(groups[k], c)
	}
	for _, k := range order {
		pass, fail, skip := selftest.Count(groups[k])
		t.row(k.transport, k.group, pass, fail, skip)
	}
	t.row("all", "", r.Passed, r.Failed, r.Skipped)
}

// choose returns the portal to use. Its Address can be connected to.
func (s *selftestCommand) choose(portals []schema.PortalState, transports []string, remote bool) (schema.PortalState, error) {
	for _, p := range portals {
		if s.portal != "" {
			if p.Listen != s.portal && p.Address != s.portal && !slices.Contains(p.Advertise, s.portal) {
				continue
			}
			p.Address = s.portal
			return p, nil
		}
		if p.IPsec == "required" || slices.ContainsFunc(transports, func(t string) bool { return !slices.Contains(p.Transports, t) }) {
			continue
		}
		host, port, err := net.SplitHostPort(p.Address)
		if err != nil {
			continue
		}
		if ip := net.ParseIP(host); ip == nil || ip.IsUnspecified() {
			switch {
			case len(p.Advertise) > 0:
				p.Address = p.Advertise[0]
				return p, nil
			case remote:
				continue
			}
			p.Address = net.JoinHostPort("127.0.0.1", port)
		}
		return p, nil
	}
	return schema.PortalState{}, &schema.Error{Code: schema.NotFound,
		Message: fmt.Sprintf("no portal serves %s without IPsec at an address that is known. Nothing was changed", strings.Join(transports, " and ")),
		Hint:    "name one with --portal, or a transport with --transport"}
}

// removeLeftovers removes the scratch targets of processes that have ended.
func (s *selftestCommand) removeLeftovers(ctx context.Context, c *client.Client, r *selftestReport) error {
	targets, err := c.Targets(ctx)
	if err != nil {
		return err
	}
	for _, t := range targets {
		if !isLeftover(t.Name, time.Now()) {
			continue
		}
		if _, err := c.RemoveTarget(ctx, t.Name, schema.Options{Disrupt: true, Now: true}); err != nil {
			return err
		}
		r.Removed = append(r.Removed, t.Name)
	}
	return nil
}

// scratchName returns the name of the scratch target of this process.
func scratchName(now time.Time) string {
	var b [4]byte
	rand.Read(b[:])
	return fmt.Sprintf("%s%d.%s.%d.%s", scratchPrefix, now.Unix(), place(), os.Getpid(), hex.EncodeToString(b[:]))
}

// isLeftover reports whether name is that of a scratch target whose process has ended.
func isLeftover(name string, now time.Time) bool {
	rest, ok := strings.CutPrefix(name, scratchPrefix)
	parts := strings.Split(rest, ".")
	if !ok || len(parts) != 4 {
		return false
	}
	start, err := strconv.ParseInt(parts[0], 10, 64)
	pid, err2 := strconv.Atoi(parts[2])
	switch {
	case err != nil || err2 != nil || pid <= 0:
		return false
	case now.Sub(time.Unix(start, 0)) > scratchLife:
		return true
	}
	return parts[1] == place() && errors.Is(unix.Kill(pid, 0), unix.ESRCH)
}

// place identifies the boot and the process id namespace of this process, without naming the machine.
func place() string {
	boot, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	namespace, _ := os.Readlink("/proc/self/ns/pid")
	sum := sha256.Sum256(append(boot, namespace...))
	return hex.EncodeToString(sum[:4])
}

// kernel returns the name, release and architecture of the kernel.
func kernel() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return runtime.GOOS
	}
	return strings.Join([]string{unix.ByteSliceToString(u.Sysname[:]), unix.ByteSliceToString(u.Release[:]), unix.ByteSliceToString(u.Machine[:])}, " ")
}

// configDigest returns the SHA-256 of a document without the values of secrets.
func configDigest(text []byte) (string, error) {
	var n yaml.Node
	if err := yaml.Unmarshal(text, &n); err != nil {
		return "", err
	}
	hideSecrets(&n)
	b, err := yaml.Marshal(&n)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:]), nil
}

// hideSecrets replaces the values of secrets in n.
func hideSecrets(n *yaml.Node) {
	for i, c := range n.Content {
		if n.Kind == yaml.MappingNode && i%2 == 1 && config.IsSecretKey(n.Content[i-1].Value) {
			*c = yaml.Node{Kind: yaml.ScalarNode, Value: "hidden"}
			continue
		}
		hideSecrets(c)
	}
}
