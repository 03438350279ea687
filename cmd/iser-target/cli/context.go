package cli

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
	"github.com/iser-target/iser-target/config"
)

// contexts is the file with the targets that a user manages.
type contexts struct {
	Current  string              `yaml:"current,omitempty"` // that commands use which name none
	Contexts map[string]location `yaml:"contexts"`          // by name
}

// A location says how to reach a target: by Socket, or by Address and the files.
type location struct {
	Socket  string `yaml:"socket,omitempty" json:"socket,omitempty"`
	Address string `yaml:"address,omitempty" json:"address,omitempty"`
	Cert    string `yaml:"tls_cert,omitempty" json:"tls_cert,omitempty"`
	Key     string `yaml:"tls_key,omitempty" json:"tls_key,omitempty"`
	CA      string `yaml:"tls_ca,omitempty" json:"tls_ca,omitempty"`
}

// A contextState is a row of context list.
type contextState struct {
	Name     string `json:"name"`
	Current  bool   `json:"current"`
	location `yaml:",inline"`
}

const envContext = "ISER_TARGET_CLIENT_CONTEXT"

// maxContexts bounds the file of contexts, in bytes.
const maxContexts = 1 << 20

var contextName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)

// contextsPath returns the path of the file of contexts.
func contextsPath() (string, error) {
	dir, err := os.UserConfigDir()
	if err != nil {
		return "", fmt.Errorf("contexts: %w", err)
	}
	return filepath.Join(dir, "iser-target", "contexts.yaml"), nil
}

// readContexts reads the file of contexts. Without one there is no context. It refuses a file that another user can
// change: it says where commands go, and with which key.
func readContexts() (*contexts, string, error) {
	c := &contexts{Contexts: map[string]location{}}
	path, err := contextsPath()
	if err != nil {
		return c, "", nil // a user without a home has no contexts
	}
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return c, path, nil
	}
	if err != nil {
		return nil, path, err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err == nil {
		err = config.CheckOwner(fi)
	}
	if err == nil && (!fi.Mode().IsRegular() || fi.Size() > maxContexts) {
		err = fmt.Errorf("not a regular file of at most %d bytes", maxContexts)
	}
	if err == nil {
		d := yaml.NewDecoder(f)
		d.KnownFields(true)
		if err = d.Decode(c); errors.Is(err, io.EOF) { // an empty file
			err = nil
		}
	}
	if err == nil {
		err = c.check()
	}
	if err != nil {
		return nil, path, fmt.Errorf("%s: %w", path, err)
	}
	return c, path, nil
}

// check returns an error if the file was edited and is wrong.
func (c *contexts) check() error {
	for _, name := range slices.Sorted(maps.Keys(c.Contexts)) {
		l := c.Contexts[name]
		switch {
		case !contextName.MatchString(name):
			return fmt.Errorf("contexts: %q is not a name of letters, digits, dots and hyphens", name)
		case (l.Socket == "") == (l.Address == ""):
			return fmt.Errorf("contexts.%s: one of socket and address is required", name)
		case l.Address != "" && (l.Cert == "" || l.Key == ""):
			return fmt.Errorf("contexts.%s: address requires tls_cert and tls_key", name)
		}
	}
	if _, ok := c.Contexts[c.Current]; c.Current != "" && !ok {
		return fmt.Errorf("current: %q is not one of the contexts", c.Current)
	}
	return nil
}

// write replaces the file by c.
func (c *contexts) write(path string) error {
	if path == "" {
		return errors.New("contexts: neither XDG_CONFIG_HOME nor HOME is set")
	}
	b, err := yaml.Marshal(c)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".contexts") // mode 0600
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil {
		err = f.Sync()
	}
	if err2 := f.Close(); err == nil {
		err = err2
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// named returns the context with that name, or the current one if name is empty; nil: none.
func (c *contexts) named(name string) (*location, error) {
	name = cmp.Or(name, c.Current)
	if name == "" {
		return nil, nil
	}
	l, ok := c.Contexts[name]
	if !ok {
		return nil, fmt.Errorf("context %q does not exist. See iser-target context list", name)
	}
	return &l, nil
}

// client returns a client of the target at l. The files of flags override its own.
func (l *location) client(p *program) (*client.Client, error) {
	if l.Socket != "" {
		return client.New(l.Socket), nil
	}
	return client.NewTLS(l.Address, client.TLSFiles{Cert: cmp.Or(p.tls.Cert, l.Cert), Key: cmp.Or(p.tls.Key, l.Key), CA: cmp.Or(p.tls.CA, l.CA)})
}

// where returns the address or the socket.
func (l *location) where() string { return cmp.Or(l.Address, l.Socket) }

// contextCommands returns the commands about contexts.
func (p *program) contextCommands() *cobra.Command {
	edit := func(do func(*contexts) error) error {
		c, path, err := readContexts()
		if err == nil {
			err = do(c)
		}
		if err == nil {
			err = c.write(path)
		}
		return err
	}
	add := &cobra.Command{
		Use: "create NAME", Aliases: aliases["create"], Short: "Add a target that commands can name with --context, or replace one", Args: cobra.ExactArgs(1),
		Long: "Add a target, with --socket, or with --address and the files of --tls-cert, --tls-key and --tls-ca.\nThe first context becomes the current one.",
		RunE: func(cmd *cobra.Command, args []string) error {
			l, err := p.location(cmd)
			if err != nil {
				return err
			}
			if !contextName.MatchString(args[0]) {
				return usage(cmd, "%q is not a name of up to 64 letters, digits, dots and hyphens", args[0])
			}
			return edit(func(c *contexts) error {
				if c.Contexts == nil {
					c.Contexts = map[string]location{}
				}
				if len(c.Contexts) == 0 {
					c.Current = args[0]
				}
				c.Contexts[args[0]] = *l
				return nil
			})
		},
	}
	use := &cobra.Command{
		Use: "use NAME", Short: "Make a context the one of commands that name none", Args: cobra.ExactArgs(1), ValidArgsFunction: completeContexts,
		RunE: func(_ *cobra.Command, args []string) error {
			return edit(func(c *contexts) error {
				_, err := c.named(args[0])
				c.Current = args[0]
				return err
			})
		},
	}
	remove := &cobra.Command{
		Use: "delete NAME", Aliases: aliases["delete"], Short: "Delete a context; the target stays as it is", Args: cobra.ExactArgs(1), ValidArgsFunction: completeContexts,
		RunE: func(_ *cobra.Command, args []string) error {
			return edit(func(c *contexts) error {
				if _, err := c.named(args[0]); err != nil {
					return err
				}
				delete(c.Contexts, args[0])
				if c.Current == args[0] {
					c.Current = ""
				}
				return nil
			})
		},
	}
	list := &cobra.Command{
		Use: "list", Aliases: aliases["list"], Short: "List the contexts", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := p.checkOutput(cmd); err != nil {
				return err
			}
			c, _, err := readContexts()
			if err != nil {
				return err
			}
			rows := []contextState{}
			for _, name := range slices.Sorted(maps.Keys(c.Contexts)) {
				rows = append(rows, contextState{name, name == c.Current, c.Contexts[name]})
			}
			return p.print(cmd.OutOrStdout(), rows, func(t *table) {
				t.head("CURRENT NAME TARGET")
				for i := range rows {
					t.row(map[bool]string{true: "*"}[rows[i].Current], rows[i].Name, rows[i].where())
				}
			})
		},
	}
	p.outputFlag(list)
	return group("context", "Name the targets that you manage", add, use, list, remove)
}

// location returns what the flags of context create name.
func (p *program) location(cmd *cobra.Command) (*location, error) {
	switch {
	case (p.socket == "") == (p.address == ""):
		return nil, usage(cmd, "name the target with one of --socket and --address")
	case p.address != "" && (p.tls.Cert == "" || p.tls.Key == ""):
		return nil, usage(cmd, "--address requires --tls-cert and --tls-key")
	case p.socket != "" && p.tls != client.TLSFiles{}:
		return nil, usage(cmd, "--socket takes no certificates")
	}
	l := &location{Address: p.address}
	for _, f := range []struct {
		from string
		to   *string
	}{{p.socket, &l.Socket}, {p.tls.Cert, &l.Cert}, {p.tls.Key, &l.Key}, {p.tls.CA, &l.CA}} {
		if f.from == "" {
			continue
		}
		path, err := filepath.Abs(f.from) // commands run in other directories later
		if err != nil {
			return nil, err
		}
		*f.to = path
	}
	return l, nil
}

// contextNames returns the names of the contexts, for completion.
func contextNames(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	c, _, err := readContexts()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return slices.Sorted(maps.Keys(c.Contexts)), cobra.ShellCompDirectiveNoFileComp
}

// completeContexts completes an argument that is a context.
func completeContexts(cmd *cobra.Command, args []string, part string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return contextNames(cmd, args, part)
}
