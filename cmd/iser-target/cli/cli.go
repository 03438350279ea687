// Package cli has the commands that manage a running target, for people and scripts.
// docs/cli.md describes them. They use the control API by package client.
package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ohler55/ojg/jp"
	"github.com/spf13/cobra"

	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

// Exit codes of the program.
const (
	ExitOK          = 0
	ExitError       = 1
	ExitUsage       = 2
	ExitRefused     = 3
	ExitNotFound    = 4
	ExitUnreachable = 5
)

const exitCodes = `Exit codes:
  0  success
  1  error; nothing was changed unless the message says so
  2  usage: the command line is wrong
  3  refused: the command would disturb sessions or lose data; the message names
     the flag that allows it (--disrupt, --drain, --now, --allow-shrink, --force)
  4  not found: the target, LUN, portal or session does not exist
  5  unreachable: no target answers, or it refuses the client or its role
`

// A usageError is the error of a wrong command line.
type usageError struct {
	cmd *cobra.Command
	err error
}

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

// Usage returns an error of a wrong command line of cmd.
func Usage(cmd *cobra.Command, format string, a ...any) error { return usage(cmd, format, a...) }

// usage returns a usageError of cmd.
func usage(cmd *cobra.Command, format string, a ...any) error {
	return &usageError{cmd, fmt.Errorf(format, a...)}
}

// Report writes err and a hint about the next step to w, and returns the exit code.
func Report(w io.Writer, err error) int {
	if err == nil {
		return ExitOK
	}
	// A server, and what it names, may contain escape sequences for the terminal. Several errors have a line each.
	prefix := "iser-target: "
	for _, one := range parts(err) {
		for _, line := range strings.Split(one.Error(), "\n") {
			fmt.Fprintln(w, prefix+shown(strings.ReplaceAll(line, "\t", "  ")))
			prefix = ""
		}
		if wrong, ok := one.(*config.Error); ok && wrong.At.Caret() != "" {
			fmt.Fprintln(w, wrong.At.Caret())
		}
	}
	var (
		u *usageError
		e *schema.Error
	)
	switch {
	case errors.As(err, &u):
		fmt.Fprintf(w, "See %s --help.\n", u.cmd.CommandPath())
		return ExitUsage
	case strings.HasPrefix(err.Error(), "unknown command"): // of cobra, which has no type for it
		fmt.Fprintln(w, "See iser-target --help.")
		return ExitUsage
	case !errors.As(err, &e):
		return ExitError
	}
	if hint := hintOf(e); hint != "" {
		fmt.Fprintln(w, shown(sentence(hint)))
	}
	return cmp.Or(exits[e.Code], ExitError)
}

// parts returns the errors that err joins, or err.
func parts(err error) (list []error) {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return []error{err}
	}
	var texts []string
	for _, e := range joined.Unwrap() {
		list = append(list, parts(e)...)
		texts = append(texts, e.Error())
	}
	if strings.Join(texts, "\n") != err.Error() { // not by errors.Join
		return []error{err}
	}
	return list
}

var exits = map[schema.Code]int{
	schema.Refused: ExitRefused, schema.NotFound: ExitNotFound, schema.Unreached: ExitUnreachable, schema.Forbidden: ExitUnreachable,
}

// hintOf returns what to do next, in terms of the command line.
func hintOf(e *schema.Error) string {
	switch {
	case e.Code == schema.Refused && e.Plan != nil:
		return strings.Join(append(remediesOf(e.Plan.Needs()), "--dry-run shows the plan."), " ")
	case e.Code == schema.NotFound && strings.HasPrefix(e.Hint, "GET "):
		kind, _, _ := strings.Cut(e.Message, " ")
		return cmp.Or(lists[kind], "see iser-target target list, lun list, portal list, session list or reservation list")
	case e.Code == schema.Invalid && strings.HasPrefix(e.Hint, "GET "): // about requests, not the command line
		return "nothing was changed"
	case e.Code == schema.Edited:
		return "see the edit with iser-target config plan, and apply it with iser-target config apply"
	}
	return e.Hint
}

// lists has the hints about what exists, by the first word of an error.
var lists = map[string]string{
	"target": "see iser-target target list", "LUN": "see iser-target lun list", "snapshot": "see iser-target lun snapshot list", "portal": "see iser-target portal list",
	"session": "see iser-target session list", "reservation": "see iser-target reservation list",
}

// remediesOf returns sentences about the flags that allow a refused plan.
func remediesOf(n schema.Needs) (hints []string) {
	if n.Disrupt {
		hints = append(hints, "Use --drain 30s to let I/O finish, or --now to abort it.")
	}
	if n.Shrink {
		hints = append(hints, "Use --allow-shrink if the data beyond the new end may be lost.")
	}
	return hints
}

// sentence returns a hint with a capital letter, unless it begins with a name, and a full stop.
func sentence(hint string) string {
	first, _, _ := strings.Cut(hint, " ")
	if !strings.ContainsFunc(first, func(r rune) bool { return r < 'a' || r > 'z' }) {
		hint = strings.ToUpper(hint[:1]) + hint[1:]
	}
	return strings.TrimSuffix(hint, ".") + "."
}

// timeLimit is the default of --timeout.
const timeLimit = 10 * time.Second

// workLimit is what a change may take without --timeout, if the target shows that it works on it: a change may wait for
// others, and for commands to end. It is also the longest time without progress of work that reports it.
const workLimit = 2 * time.Minute

// maxTimeLimit is the longest --timeout.
const maxTimeLimit = 24 * time.Hour

// A program has the flags that all commands share.
type program struct {
	socket  string
	address string
	context string
	tls     client.TLSFiles
	timeout time.Duration
	format  string  // of -o
	path    jp.Expr // of -o jsonpath; nil: another format

	noHeaders bool // of lists
	watch     bool
	sortBy    string
	sortPath  jp.Expr
}

// AddTo adds the commands to root. Report tells their wrong command lines from errors.
func AddTo(root *cobra.Command) {
	p := &program{}
	for _, c := range []*cobra.Command{
		p.target(), p.lun(), p.portal(), p.session(), p.reservation(), p.initiator(), p.auth(), p.contextCommands(), p.ipsec(), p.cluster(), p.limits(), p.config(), p.events(), p.top(), p.bench(), p.selftest(), p.explain(), p.status(), p.doctor(), p.capture(), p.connect(), p.drain(), p.upgrade(),
	} {
		p.whereFlags(c)
		root.AddCommand(c)
	}
	root.AddCommand(&cobra.Command{
		Use: "exit-codes", Short: "List the exit codes", Long: exitCodes, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprint(cmd.OutOrStdout(), exitCodes)
			return err
		},
	}, docs(), secret())
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return &usageError{cmd, flagError(err)} })
	root.InitDefaultCompletionCmd() // it would answer an unknown shell with its help, on standard output
	if c, _, err := root.Find([]string{"completion"}); err == nil {
		c.RunE = requireCommand
	}
	typeArgs(root)
}

// flagError returns an error of a flag without the terms of Go.
func flagError(err error) error {
	var number *strconv.NumError
	if !errors.As(err, &number) {
		return err
	}
	what := "is not a whole number"
	if errors.Is(number, strconv.ErrRange) {
		what = "is out of range"
	}
	return errors.New(strings.TrimSuffix(err.Error(), number.Error()) + what)
}

// typeArgs turns the errors of wrong arguments into usageErrors, for cmd and all commands
// below it. They have the usage line.
func typeArgs(cmd *cobra.Command) {
	if check := cmd.Args; check != nil {
		cmd.Args = func(cmd *cobra.Command, args []string) error {
			switch err := check(cmd, args); {
			case err == nil:
				if i := slices.Index(args, ""); i >= 0 { // a script may use a variable that is not set
					return usage(cmd, "argument %d is empty", i+1)
				}
				return nil
			case cmd.HasSubCommands():
				cmd.SuggestionsMinimumDistance = 2
				if like := cmd.SuggestionsFor(args[0]); len(like) > 0 {
					err = fmt.Errorf("%w; did you mean %s?", err, strings.Join(like, " or "))
				}
				return &usageError{cmd, err}
			default:
				return usage(cmd, "wrong number of arguments, %d: usage: %s", len(args), cmd.UseLine())
			}
		}
	}
	for _, c := range cmd.Commands() {
		typeArgs(c)
	}
}

// aliases has other names of commands, which users of other tools type.
var aliases = map[string][]string{
	"target": {"targets"}, "lun": {"luns"}, "portal": {"portals"}, "session": {"sessions"}, "initiator": {"initiators"},
	"reservation": {"reservations"}, "snapshot": {"snapshots"}, "context": {"contexts"}, "user": {"users"},
	"list": {"ls"}, "delete": {"rm", "remove"}, "create": {"add"}, "allow": {"create", "add"}, "deny": {"delete", "remove", "rm"}, "kill": {"delete", "remove", "rm"}, "clear": {"delete", "remove", "rm"},
}

// group returns a command that only has subcommands.
func group(use, short string, commands ...*cobra.Command) *cobra.Command {
	g := &cobra.Command{Use: use, Aliases: aliases[use], Short: short, Args: cobra.NoArgs, RunE: requireCommand}
	g.AddCommand(commands...)
	return g
}

func requireCommand(cmd *cobra.Command, _ []string) error {
	return usage(cmd, "%s requires a command", cmd.CommandPath())
}

// whereFlags adds the flags that locate the target.
func (p *program) whereFlags(c *cobra.Command) {
	f := c.PersistentFlags()
	f.StringVar(&p.socket, "socket", "", "Unix socket of the control API of the target (default: $"+envSocket+", else "+cmp.Or(config.DefaultSocket(), "none")+")")
	f.StringVar(&p.address, "address", "", "host:port of the control API of a target on another machine, or rdma://host:port of its portal (default: $"+envAddress+")")
	f.StringVar(&p.context, "context", "", "name of the target in context list (default: $"+envContext+", else the current one)")
	f.DurationVar(&p.timeout, "timeout", timeLimit, "how long the target may take to answer; if given, also to complete a change or to make progress, which may take 2m otherwise")
	c.RegisterFlagCompletionFunc("context", contextNames)
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

// A tlsFile is a file that --address requires.
type tlsFile struct {
	to              *string
	flag, env, what string
}

func (p *program) files() []tlsFile {
	return []tlsFile{
		{&p.tls.Cert, "tls-cert", "ISER_TARGET_CLIENT_TLS_CERT", "the certificate of the client"},
		{&p.tls.Key, "tls-key", "ISER_TARGET_CLIENT_TLS_KEY", "the private key of that certificate"},
		{&p.tls.CA, "tls-ca", "ISER_TARGET_CLIENT_TLS_CA", "the certificates that sign those of targets"},
	}
}

// client returns a client of the target that the flags name, or else the variables, or else the current context. A flag
// overrides a variable, and the variable of the address that of the socket.
func (p *program) client(cmd *cobra.Command) (*client.Client, error) {
	if p.timeout <= 0 || p.timeout > maxTimeLimit {
		return nil, usage(cmd, "--timeout must be more than 0 and up to %v, not %v", maxTimeLimit, p.timeout)
	}
	c, err := p.locate(cmd)
	if err == nil {
		c.Limit(p.timeout, p.work(cmd))
		c.WhileWaiting(func(d time.Duration) {
			fmt.Fprintf(cmd.ErrOrStderr(), "The target still works on the change after %v. Interrupt to stop waiting for it.\n", d.Round(time.Second))
		})
	}
	return c, err
}

// work returns how long the target may work on a change of cmd.
func (p *program) work(cmd *cobra.Command) time.Duration {
	if cmd.Flags().Changed("timeout") {
		return p.timeout
	}
	return max(p.timeout, workLimit)
}

// asksNoTarget refuses the flags that locate a target, which cmd inherits, and leaves them out of its help.
func asksNoTarget(cmd *cobra.Command) *cobra.Command {
	where := &cobra.Command{}
	new(program).whereFlags(where)
	cmd.Flags().AddFlagSet(where.PersistentFlags()) // instead of those that cmd inherits
	names := []string{"socket", "address", "context", "timeout", "tls-cert", "tls-key", "tls-ca"}
	for _, name := range names {
		cmd.Flags().MarkHidden(name)
	}
	do := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		for _, name := range names {
			if cmd.Flags().Changed(name) {
				return usage(cmd, "--%s means nothing here: %s asks no target", name, cmd.CommandPath())
			}
		}
		return do(cmd, args)
	}
	return cmd
}

// locate returns the client without its time limit.
func (p *program) locate(cmd *cobra.Command) (*client.Client, error) {
	if p.socket != "" && p.address != "" {
		return nil, usage(cmd, "--socket and --address exclude each other")
	}
	if p.context != "" && (p.socket != "" || p.address != "") {
		return nil, usage(cmd, "--context excludes --socket and --address")
	}
	name := p.context
	if p.socket == "" && p.address == "" && name == "" {
		name = os.Getenv(envContext)
	}
	if name != "" || p.socket == "" && p.address == "" && os.Getenv(envAddress) == "" && os.Getenv(envSocket) == "" {
		all, _, err := readContexts()
		if err != nil {
			return nil, err
		}
		at, err := all.named(name)
		if err != nil {
			return nil, err
		}
		if at != nil {
			return at.client(p)
		}
	}
	address := p.address
	if address == "" && p.socket == "" {
		address = os.Getenv(envAddress)
	}
	if address == "" {
		socket := cmp.Or(p.socket, os.Getenv(envSocket), localSocket())
		if socket == "" {
			return nil, &schema.Error{Code: schema.Unreached, Message: "cannot find the target: neither --socket nor XDG_RUNTIME_DIR is set",
				Hint: "name its socket with --socket (control.socket in its configuration)"}
		}
		return client.New(socket), nil
	}
	for _, f := range p.files() {
		if *f.to = cmp.Or(*f.to, os.Getenv(f.env)); *f.to == "" && f.to != &p.tls.CA {
			return nil, usage(cmd, "--address requires --%s, a PEM file with %s", f.flag, f.what)
		}
	}
	return client.NewTLS(address, p.tls)
}

// localSocket returns the default socket of this user, or that of the system service if only
// that exists.
func localSocket() string {
	if s := config.DefaultSocket(); exists(s) || !exists(config.ServiceSocket) {
		return s
	}
	return config.ServiceSocket
}

// exists reports whether this user can see a file at path.
func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// A verb is a command that sends one request.
type verb struct {
	use, short, long, example string
	args                      cobra.PositionalArgs
	names                     naming            // whether the first argument is a target
	parse                     func(*call) error // sets what args name; may be nil
	complete                  cobra.CompletionFunc
	shrinks                   bool // it may make a LUN smaller
	adds                      bool // it only adds, and disturbs nobody
	run                       func(context.Context, *call) error
}

// A call is one execution of a verb.
type call struct {
	*client.Client
	cmd    *cobra.Command
	limit  time.Duration // --timeout
	work   time.Duration // of a change
	args   []string
	target string // with lun, set by parseLUN
	lun    int
	tsih   uint16 // set by parseTSIH
}

// command returns the command of v.
func (p *program) command(v verb) *cobra.Command {
	name, _, _ := strings.Cut(v.use, " ")
	return &cobra.Command{
		Use: v.use, Aliases: aliases[name], Short: v.short, Long: v.long, Example: v.example, Args: v.argsOrFewer(), ValidArgsFunction: v.complete,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := p.checkOutput(cmd); err != nil {
				return err
			}
			c, err := p.client(cmd)
			if err != nil {
				return err
			}
			call := &call{Client: c, cmd: cmd, limit: p.timeout, work: p.work(cmd), args: args}
			ctx, cancel := context.WithTimeout(cmd.Context(), call.work) // the client limits each request
			defer cancel()
			if err := call.nameTarget(ctx, &v); err != nil {
				return err
			}
			if v.parse != nil {
				if err := v.parse(call); err != nil {
					return err
				}
			}
			err = v.run(ctx, call)
			if v.names != noTarget {
				err = call.suggestTarget(ctx, err)
			}
			return err
		},
	}
}

// change returns the command of v, whose request is change, with the flags of all changes.
func (p *program) change(v verb, change func(context.Context, *call, schema.Options) (*schema.Plan, error)) *cobra.Command {
	return p.changeThen(v, func(ctx context.Context, c *call, o schema.Options) (*schema.Plan, func() error, error) {
		plan, err := change(ctx, c, o)
		return plan, nil, err
	})
}

// changeThen returns the command of v, like change. It calls what the request returns, unless that is nil, after it has
// printed the plan.
func (p *program) changeThen(v verb, change func(context.Context, *call, schema.Options) (*schema.Plan, func() error, error)) *cobra.Command {
	var o schema.Options
	v.run = func(_ context.Context, c *call) error {
		if o.Now && o.Drain != 0 {
			return usage(c.cmd, "--now and --drain exclude each other")
		}
		if o.Drain < 0 || o.Drain > time.Hour {
			return usage(c.cmd, "--drain must be up to 1h, not %v", o.Drain)
		}
		do := o
		// A user who says how sessions end agrees that they end.
		do.Disrupt = o.Disrupt || o.Now || o.Drain > 0
		ctx, cancel := context.WithTimeout(c.cmd.Context(), c.work+o.Drain)
		defer cancel()
		plan, then, err := change(ctx, c, do)
		if err != nil {
			return c.byFlags(err)
		}
		if do.DryRun {
			err = p.print(c.cmd.OutOrStdout(), plan, func(t *table) { planTable(t, plan, &do) })
			return errors.Join(err, wouldRefuse(plan, &do))
		}
		err = p.print(c.cmd.OutOrStdout(), plan, func(t *table) { planTable(t, plan, nil) })
		if then != nil {
			err = errors.Join(err, then())
		}
		return err
	}
	cmd := p.output(v)
	f := cmd.Flags()
	f.BoolVar(&o.DryRun, "dry-run", false, "show the plan and change nothing")
	f.BoolVar(&o.Disrupt, "disrupt", false, "allow the change to disturb or end sessions")
	f.BoolVar(&o.Now, "now", false, "abort the commands of what is removed at once (implies --disrupt)")
	if v.shrinks {
		f.BoolVar(&o.AllowShrink, "allow-shrink", false, "allow LUNs to become smaller, which loses the data beyond the new end")
	}
	f.DurationVar(&o.Drain, "drain", 0, "let the commands of what is removed finish for up to this time, then abort them (implies --disrupt; default 10s)")
	if v.adds { // scripts may give them to all changes
		for _, name := range []string{"disrupt", "now", "drain"} {
			f.MarkHidden(name)
		}
	}
	return cmd
}

// ofObject matches the place of an object in a configuration, before a key of it.
var ofObject = regexp.MustCompile(`^(targets\[\d+\]\.luns|targets|portals)\[\d+\]\.`)

// byFlags returns an error about keys of the object that the command makes or changes as one about the flags, or the
// KEY=VALUE, that the user gave.
func (c *call) byFlags(err error) error {
	var e *schema.Error
	if !errors.As(err, &e) || len(e.Problems) == 0 {
		return err
	}
	var lines []string
	for _, p := range e.Problems {
		key := strings.TrimPrefix(p.Key, ofObject.FindString(p.Key))
		name := ""
		if flag := "--" + strings.ReplaceAll(key, "_", "-"); c.cmd.Flags().Lookup(flag[2:]) != nil {
			name = flag
		}
		for _, a := range c.args {
			if given, _, ok := strings.Cut(a, "="); ok && given == key {
				name = key
			}
		}
		if c.cmd.Name() == "resize" && key == "size" {
			name = "SIZE"
		}
		if name == "" || key == p.Key {
			return err
		}
		if !strings.HasPrefix(p.Reason, "is ") && !strings.HasPrefix(p.Reason, "must ") {
			name += ":"
		}
		lines = append(lines, name+" "+p.Reason)
	}
	return usage(c.cmd, "%s", strings.Join(lines, "\n"))
}

// absolute returns path for the target, which may run in another directory or on another machine
// than the command.
func (c *call) absolute(path string) (string, error) {
	if c.Remote() && !filepath.IsAbs(path) {
		return "", usage(c.cmd, "%s: the target may be on another machine: give an absolute path", path)
	}
	return filepath.Abs(path)
}

// parseLUN sets c.target and c.lun from the first two arguments.
func (c *call) parseLUN() (err error) {
	c.target = c.args[0]
	if c.lun, err = strconv.Atoi(c.args[1]); err != nil || c.lun < 0 {
		return usage(c.cmd, "LUN %q is not a number", c.args[1])
	}
	return nil
}

// parseTSIH sets c.tsih from the first argument.
func (c *call) parseTSIH() error {
	n, err := strconv.ParseUint(c.args[0], 10, 16)
	if err != nil {
		return usage(c.cmd, "TSIH %q is not a number up to 65535", c.args[0])
	}
	c.tsih = uint16(n)
	return nil
}

// completeTime bounds the time that a shell waits for a target that does not answer.
const completeTime = 2 * time.Second

// complete completes each argument with what the list in its place gets from the target.
func (p *program) complete(lists ...func(ctx context.Context, c *client.Client, args []string) []string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) (found []string, _ cobra.ShellCompDirective) {
		ctx, cancel := context.WithTimeout(context.Background(), completeTime)
		defer cancel()
		if c, err := p.client(cmd); err == nil && len(args) < len(lists) {
			found = lists[len(args)](ctx, c, args)
		}
		return found, cobra.ShellCompDirectiveNoFileComp
	}
}

// targets completes the names of targets.
func targets(ctx context.Context, c *client.Client, _ []string) []string {
	found, _ := c.Targets(ctx)
	return texts(found, func(t schema.TargetState) string { return t.Name })
}

// luns completes the numbers of the LUNs of a target.
func luns(ctx context.Context, c *client.Client, args []string) []string {
	target, _ := findTarget(ctx, c, args[0])
	found, _ := c.LUNs(ctx, target)
	return texts(found, func(l schema.LUNState) string {
		return cobra.CompletionWithDesc(strconv.Itoa(l.ID), printable(strings.TrimSpace(fmt.Sprintf("%v %s %s", size(l.Size), l.Backend, l.Path))))
	})
}

// refused completes the names of initiators whose login was refused, the last first. The target reports no name that is not
// valid, so a shell gets none with $ or blanks.
func refused(ctx context.Context, c *client.Client, _ []string) (names []string) {
	reasons := map[string]any{}
	c.Events(ctx, 0, false, func(e schema.Event) error {
		if name, _ := e.Attrs["initiator"].(string); e.Event == "login" && e.Attrs["outcome"] == "refused" && name != "" {
			names = append(slices.DeleteFunc(names, func(n string) bool { return n == name }), name)
			reasons[name] = e.Attrs["reason"]
		}
		return nil
	})
	slices.Reverse(names)
	return texts(names, func(name string) string {
		return cobra.CompletionWithDesc(name, printable(fmt.Sprint("refused: ", reasons[name])))
	})
}

// initiators completes the names of initiators: those that were refused, and those with a session.
func initiators(ctx context.Context, c *client.Client, args []string) []string {
	found, _ := c.Sessions(ctx)
	return append(refused(ctx, c, args), texts(found, func(s schema.SessionState) string { return s.Initiator })...)
}

// completeKeys completes KEY= with the keys of object, a struct of the configuration, without those in but, after the
// arguments that lists complete.
func (p *program) completeKeys(object any, but []string, lists ...func(ctx context.Context, c *client.Client, args []string) []string) cobra.CompletionFunc {
	var keys []string
	t := reflect.TypeOf(object)
	for i := range t.NumField() {
		if key := t.Field(i).Tag.Get("key"); key != "" && !slices.Contains(but, key) {
			keys = append(keys, key+"=")
		}
	}
	slices.Sort(keys)
	before := p.complete(lists...)
	return func(cmd *cobra.Command, args []string, part string) ([]string, cobra.ShellCompDirective) {
		if len(args) < len(lists) {
			return before(cmd, args, part)
		}
		return keys, cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
	}
}

// portals completes the addresses of portals.
func portals(ctx context.Context, c *client.Client, _ []string) []string {
	found, _ := c.Portals(ctx)
	return texts(found, func(s schema.PortalState) string { return s.Listen })
}

// sessions completes the TSIHs of sessions.
func sessions(ctx context.Context, c *client.Client, _ []string) []string {
	found, _ := c.Sessions(ctx)
	return texts(found, func(s schema.SessionState) string {
		return cobra.CompletionWithDesc(strconv.Itoa(int(s.TSIH)), s.Initiator)
	})
}

func texts[T any](list []T, text func(T) string) (all []string) {
	for _, v := range list {
		all = append(all, text(v))
	}
	return all
}
