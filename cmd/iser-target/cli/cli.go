// Package cli is the commands by which people and scripts manage a running target.
// docs/cli.md describes them; they ask by package api.
package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

// What the program exits with.
const (
	ExitOK          = 0
	ExitError       = 1
	ExitUsage       = 2
	ExitRefused     = 3
	ExitNotFound    = 4
	ExitUnreachable = 5
)

const exitCodes = `Exit codes:
  0  done
  1  error; nothing has changed unless the message says so
  2  usage: the command line is wrong
  3  refused: it would do harm; the message names the flag that allows it
     (--disrupt, --drain, --now, --allow-shrink, --force)
  4  not found: what the command is about
  5  no target answers where one should, or it does not let the command in
`

// A usageError is a command line that is wrong.
type usageError struct {
	cmd *cobra.Command
	err error
}

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

func usage(cmd *cobra.Command, format string, a ...any) error {
	return &usageError{cmd, fmt.Errorf(format, a...)}
}

// Report tells w what err is and what to do next, and returns the exit code.
func Report(w io.Writer, err error) int {
	if err == nil {
		return ExitOK
	}
	fmt.Fprintf(w, "iser-target: %v\n", err)
	var (
		u *usageError
		e *schema.Error
	)
	switch {
	case errors.As(err, &u):
		fmt.Fprintf(w, "see %s --help\n", u.cmd.CommandPath())
		return ExitUsage
	case strings.HasPrefix(err.Error(), "unknown command"): // of cobra, which has no type for it
		fmt.Fprintln(w, "see iser-target --help")
		return ExitUsage
	case !errors.As(err, &e):
		return ExitError
	}
	if hint := hintOf(e); hint != "" {
		fmt.Fprintln(w, hint)
	}
	switch e.Code {
	case schema.Refused:
		return ExitRefused
	case schema.NotFound:
		return ExitNotFound
	case schema.Unreached:
		return ExitUnreachable
	}
	return ExitError
}

// hintOf says what to do next, in terms of the command line.
func hintOf(e *schema.Error) string {
	switch e.Code {
	case schema.Refused:
		var flags []string
		for _, n := range e.Needs {
			flags = append(flags, "--"+strings.ReplaceAll(n, "_", "-"))
		}
		hint := "if that is meant, add " + strings.Join(flags, " ")
		if e.Plan == nil {
			return hint
		}
		if slices.Contains(e.Needs, "disrupt") {
			hint += "; --drain TIME or --now say how long what is removed has to end, and imply --disrupt"
		}
		return "see more with --dry-run; " + hint
	case schema.NotFound:
		return "see iser-target target list, lun list, portal list, session list or reservation show for what there is"
	case schema.Invalid:
		if strings.HasPrefix(e.Message, "query: ") { // of a flag
			return "nothing has changed"
		}
		return "nothing has changed; see docs/config.md for all keys"
	case schema.Edited:
		return "see iser-target config plan for what was edited, and then iser-target config apply"
	}
	return e.Hint
}

// timeLimit bounds a request: a change may wait for others, and for what is to end.
const timeLimit = 2 * time.Minute

// A program is what the commands have in common.
type program struct {
	socket  string
	address string
	tls     client.TLSFiles
	output  string
}

// AddTo adds the commands to root, and has it tell wrong command lines from errors.
func AddTo(root *cobra.Command) {
	p := &program{}
	for _, c := range []*cobra.Command{
		p.target(), p.lun(), p.portal(), p.session(), p.reservation(), p.initiator(), p.config(), p.events(), p.top(), p.explain(), p.doctor(), p.capture(),
	} {
		p.whereFlags(c)
		root.AddCommand(c)
	}
	root.AddCommand(&cobra.Command{
		Use: "exit-codes", Short: "What the program exits with", Long: exitCodes, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprint(cmd.OutOrStdout(), exitCodes)
			return err
		},
	}, docs())
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return &usageError{cmd, flagError(err)} })
	root.InitDefaultCompletionCmd() // which would answer what it does not know with its help, to be sourced
	if c, _, err := root.Find([]string{"completion"}); err == nil {
		c.RunE = wantsCommand
	}
	typeArgs(root)
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

// flagError is err of a flag without what only Go programmers know.
func flagError(err error) error {
	var number *strconv.NumError
	if !errors.As(err, &number) {
		return err
	}
	what := "is no whole number"
	if errors.Is(number, strconv.ErrRange) {
		what = "is out of range"
	}
	return errors.New(strings.TrimSuffix(err.Error(), number.Error()) + what)
}

// typeArgs makes usageErrors of what is wrong with arguments. Those of a command that has
// no others tell how it is used.
func typeArgs(cmd *cobra.Command) {
	if check := cmd.Args; check != nil {
		cmd.Args = func(cmd *cobra.Command, args []string) error {
			switch err := check(cmd, args); {
			case err == nil:
				if i := slices.Index(args, ""); i >= 0 { // of a script with a variable that is not set
					return usage(cmd, "argument %d is empty", i+1)
				}
				return nil
			case cmd.HasSubCommands():
				return &usageError{cmd, err}
			default:
				return usage(cmd, "wrong number of arguments, %d: use it as %s", len(args), cmd.UseLine())
			}
		}
	}
	for _, c := range cmd.Commands() {
		typeArgs(c)
	}
}

// group is a command that has others.
func group(use, short string, commands ...*cobra.Command) *cobra.Command {
	g := &cobra.Command{Use: use, Short: short, Args: cobra.NoArgs, RunE: wantsCommand}
	g.AddCommand(commands...)
	return g
}

func wantsCommand(cmd *cobra.Command, _ []string) error {
	return usage(cmd, "%s wants a command", cmd.CommandPath())
}

// whereFlags are those that say where the target is.
func (p *program) whereFlags(c *cobra.Command) {
	f := c.PersistentFlags()
	f.StringVar(&p.socket, "socket", "", "control socket of the target (default: $"+envSocket+", else "+orNone(config.DefaultSocket())+")")
	f.StringVar(&p.address, "address", "", "host:port of a target on another machine (default: $"+envAddress+")")
	c.MarkPersistentFlagFilename("socket")
	for _, file := range p.files() {
		f.StringVar(file.to, file.flag, "", "PEM file with "+file.what+", for --address (default: $"+file.env+")")
		c.MarkPersistentFlagFilename(file.flag, "pem", "crt", "key")
	}
}

const (
	envSocket  = "ISER_TARGET_CONTROL_SOCKET"
	envAddress = "ISER_TARGET_CLIENT_ADDRESS"
)

// A tlsFile is one that --address wants.
type tlsFile struct {
	to              *string
	flag, env, what string
}

func (p *program) files() []tlsFile {
	return []tlsFile{
		{&p.tls.Cert, "tls-cert", "ISER_TARGET_CLIENT_TLS_CERT", "a certificate of a client"},
		{&p.tls.Key, "tls-key", "ISER_TARGET_CLIENT_TLS_KEY", "its private key"},
		{&p.tls.CA, "tls-ca", "ISER_TARGET_CLIENT_TLS_CA", "the certificates of those who sign for targets"},
	}
}

// client is one of the target that flags name, or else variables. A flag counts more
// than a variable, and an address more than a socket.
func (p *program) client(cmd *cobra.Command) (*client.Client, error) {
	if p.socket != "" && p.address != "" {
		return nil, usage(cmd, "--socket and --address exclude each other")
	}
	address := p.address
	if address == "" && p.socket == "" {
		address = os.Getenv(envAddress)
	}
	if address == "" {
		socket := cmp.Or(p.socket, os.Getenv(envSocket), localSocket())
		if socket == "" {
			return nil, &schema.Error{Code: schema.Unreached, Message: "where the target is is not known: without XDG_RUNTIME_DIR there is no default",
				Hint: "say by --socket where it is (control.socket in its configuration)"}
		}
		return client.New(socket), nil
	}
	for _, f := range p.files() {
		if *f.to == "" {
			*f.to = os.Getenv(f.env)
		}
		if *f.to == "" && f.to != &p.tls.CA {
			return nil, usage(cmd, "a target at an address wants --%s: PEM file with %s", f.flag, f.what)
		}
	}
	return client.NewTLS(address, p.tls)
}

// localSocket is where a target of this user is, or else the one of the service.
func localSocket() string {
	if s := config.DefaultSocket(); exists(s) || !exists(config.ServiceSocket) {
		return s
	}
	return config.ServiceSocket
}

// exists tells that there is something at path that this user can see.
func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// A verb is a command that asks once.
type verb struct {
	use, short, long string
	args             cobra.PositionalArgs
	complete         cobra.CompletionFunc
	shrinks          bool // it may make a LUN smaller
	run              func(ctx context.Context, cmd *cobra.Command, c *client.Client, args []string) error
}

func (p *program) command(v verb) *cobra.Command {
	return &cobra.Command{
		Use: v.use, Short: v.short, Long: v.long, Args: v.args, ValidArgsFunction: v.complete,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := p.checkOutput(cmd); err != nil {
				return err
			}
			c, err := p.client(cmd)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), timeLimit)
			defer cancel()
			return v.run(ctx, cmd, c, args)
		},
	}
}

// change is a verb that changes something, with its flags.
func (p *program) change(v verb, change func(ctx context.Context, cmd *cobra.Command, c *client.Client, args []string, o schema.Options) (*schema.Plan, error)) *cobra.Command {
	var o schema.Options
	v.run = func(_ context.Context, cmd *cobra.Command, c *client.Client, args []string) error {
		if o.Now && o.Drain != 0 {
			return usage(cmd, "--now and --drain exclude each other")
		}
		if o.Drain < 0 || o.Drain > time.Hour {
			return usage(cmd, "--drain must be up to 1h, not %v", o.Drain)
		}
		do := o
		// Who says how sessions are to end means that they are to.
		do.Disrupt = o.Disrupt || o.Now || o.Drain > 0
		ctx, cancel := context.WithTimeout(cmd.Context(), timeLimit+o.Drain)
		defer cancel()
		plan, err := change(ctx, cmd, c, args, do)
		if err != nil {
			return err
		}
		return p.print(cmd.OutOrStdout(), plan, func(t *table) { planTable(t, plan, o.DryRun) })
	}
	cmd := p.command(v)
	f := cmd.Flags()
	f.BoolVar(&o.DryRun, "dry-run", false, "say what would be done, and do nothing")
	f.BoolVar(&o.Disrupt, "disrupt", false, "disturb sessions where that cannot be helped")
	f.BoolVar(&o.Now, "now", false, "give what is removed no time to end (implies --disrupt)")
	if v.shrinks {
		f.BoolVar(&o.AllowShrink, "allow-shrink", false, "let LUNs become smaller: what is behind the new end is lost")
	}
	f.DurationVar(&o.Drain, "drain", 0, "time that what is removed has to end, after which it is cut off (implies --disrupt; default 10s)")
	p.outputFlag(cmd)
	return cmd
}

// absolute is a path for the target, which need not run in the same directory as the
// command, nor on the same machine.
func absolute(cmd *cobra.Command, c *client.Client, path string) (string, error) {
	if c.Remote() && !filepath.IsAbs(path) {
		return "", usage(cmd, "%s: the target may be on another machine: give the whole path there", path)
	}
	return filepath.Abs(path)
}

// lunArgs are a target and the number of a LUN of it.
func lunArgs(cmd *cobra.Command, args []string) (target string, id int, err error) {
	id, err = strconv.Atoi(args[1])
	if err != nil || id < 0 {
		return "", 0, usage(cmd, "LUN %q is no number", args[1])
	}
	return args[0], id, nil
}

// names completes the first argument by names of targets, and the second by what second
// offers.
func (p *program) names(second func(ctx context.Context, c *client.Client, target string) []string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		return p.ask(cmd, func(ctx context.Context, c *client.Client) (list []string) {
			switch {
			case len(args) == 0:
				targets, _ := c.Targets(ctx)
				for _, t := range targets {
					list = append(list, t.Name)
				}
			case len(args) == 1 && second != nil:
				list = second(ctx, c, args[0])
			}
			return list
		})
	}
}

// completeTime is how long a shell waits for a target that does not answer.
const completeTime = 2 * time.Second

func (p *program) ask(cmd *cobra.Command, list func(context.Context, *client.Client) []string) ([]string, cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(context.Background(), completeTime)
	defer cancel()
	c, err := p.client(cmd)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return list(ctx, c), cobra.ShellCompDirectiveNoFileComp
}

// luns completes numbers of LUNs.
func luns(ctx context.Context, c *client.Client, target string) (list []string) {
	found, _ := c.LUNs(ctx, target)
	for _, l := range found {
		list = append(list, strconv.Itoa(l.ID))
	}
	return list
}
