package main

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/spf13/cobra"

	"github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/config"
)

// A quick has the flags that describe a target with one LUN, instead of a configuration file.
type quick struct {
	listen, path, size, target string
	allow                      []string
}

// quickFlags are the names of its flags.
var quickFlags = []string{"path", "size", "allow", "listen", "target"}

func (q *quick) addTo(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&q.path, "path", "", "file or block device of LUN 0 (default: memory); the target creates a missing file")
	f.StringVar(&q.size, "size", "", "size of LUN 0, like 10G (default: that of the file or device, or 1GiB of memory)")
	f.StringArrayVar(&q.allow, "allow", nil, "pattern of initiators that may log in; repeatable (default on a loopback address: all)")
	f.StringVar(&q.listen, "listen", "127.0.0.1:3260", "address of the portal, like 192.0.2.1, or :3260 for all addresses")
	f.StringVar(&q.target, "target", "iqn.2026-11.io.github.iser-target:default", "iSCSI name of the target")
	cmd.MarkFlagFilename("path")
}

// given reports whether a user has described a target by flags.
func given(cmd *cobra.Command) bool {
	for _, name := range quickFlags {
		if f := cmd.Flags().Lookup(name); f != nil && f.Changed {
			return true
		}
	}
	return false
}

// flagOf has the flags by what their errors are about in a configuration.
var flagOf = map[string]string{
	"portals[0].listen": "--listen", "targets[0].name": "--target", "targets[0].luns[0].path": "--path", "targets[0].luns[0].size": "--size",
}

var allowKey = regexp.MustCompile(`^targets\[0\]\.initiators(\[\d+\])?$`)

// document returns a configuration, and errors that name flags.
func (q *quick) document(cmd *cobra.Command) (*config.Document, error) {
	lun := config.LUN{Backend: "memory"}
	size := q.size
	if q.path != "" {
		var err error
		if lun.Path, err = filepath.Abs(q.path); err != nil {
			return nil, err
		}
		lun.Backend = "file"
		fi, err := os.Stat(lun.Path)
		switch {
		case err == nil && fi.Mode()&(os.ModeDevice|os.ModeCharDevice) == os.ModeDevice:
			lun.Backend = "block"
		case err == nil && fi.Mode().IsRegular() && size == "":
			size = config.Size(fi.Size()).String()
		case err == nil && !fi.Mode().IsRegular():
			return nil, cli.Usage(cmd, "--path: %s is neither a file nor a block device", lun.Path)
		case err == nil:
		case !errors.Is(err, os.ErrNotExist):
			return nil, err
		case size == "":
			return nil, cli.Usage(cmd, "--size is required: %s does not exist", lun.Path)
		default:
			if _, err := os.Stat(filepath.Dir(lun.Path)); err != nil {
				return nil, cli.Usage(cmd, "--path: %v", err)
			}
		}
	} else {
		size = cmp.Or(size, "1GiB")
	}
	if size != "" {
		var err error
		if lun.Size, err = config.ParseSize(size); err != nil {
			return nil, cli.Usage(cmd, "--size: %v", err)
		}
	}
	listen := cli.WithPort(q.listen)
	if host, _, err := net.SplitHostPort(listen); err == nil && len(q.allow) == 0 {
		if !config.Loopback(host) {
			return nil, cli.Usage(cmd, `--allow is required, because others reach %s: a pattern of initiators that may log in, "*" for all`, listen)
		}
		q.allow = []string{"*"}
	}
	text := "portals: []\ntargets: []\n"
	switch {
	case q.path == "": // nothing is left when the process ends
		text += "state_dir: \"\"\n"
	case os.Geteuid() != 0:
		stateDir := os.Getenv("XDG_STATE_HOME")
		if stateDir == "" {
			home, err := os.UserHomeDir()
			if err != nil {
				return nil, err
			}
			stateDir = filepath.Join(home, ".local/state")
		}
		text += fmt.Sprintf("state_dir: %q\n", filepath.Join(stateDir, "iser-target"))
	}
	d, err := config.NewDocument("command line", []byte(text))
	if err != nil {
		return nil, err
	}
	if err := d.AddPortal(config.Portal{Listen: listen}); err != nil {
		return nil, err
	}
	t := config.NewTarget()
	t.Name, t.Initiators, t.LUNs = q.target, q.allow, []config.LUN{lun}
	if err := d.AddTarget(t); err != nil {
		return nil, err
	}
	if _, err := d.Config(); err != nil {
		return nil, byFlags(cmd, err)
	}
	return d, nil
}

// byFlags returns errors of a configuration as errors of flags, where flags have caused all of them.
func byFlags(cmd *cobra.Command, err error) error {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return err
	}
	var lines []string
	for _, one := range joined.Unwrap() {
		e, ok := one.(*config.Error)
		if !ok {
			return err
		}
		name := flagOf[e.Key]
		if allowKey.MatchString(e.Key) {
			name = "--allow"
		}
		if name == "" {
			return err
		}
		lines = append(lines, name+": "+e.Reason)
	}
	return cli.Usage(cmd, "%s", strings.Join(lines, "\n"))
}

// defaultConfig is where the service has its configuration.
const defaultConfig = "/etc/iser-target/config.yaml"

func initCommand() *cobra.Command {
	var q quick
	cmd := &cobra.Command{
		Use:   "init [FILE] [--path PATH] [--size SIZE] [--listen ADDRESS] [--allow PATTERN]",
		Short: "Write a configuration file",
		Long: `Write a configuration file for a target with one LUN, by default ` + defaultConfig + `.
A file that exists is not changed. FILE - is standard output.`,
		Example: `  iser-target init --path /var/lib/iser-target/zero.img --size 10G --listen 192.0.2.10 --allow 'iqn.1993-08.org.debian:*'
  iser-target init - --path /dev/sdb`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			path := defaultConfig
			if len(args) > 0 {
				path = args[0]
			}
			d, err := q.document(cmd)
			if err != nil {
				return err
			}
			if path == "-" {
				_, err := cmd.OutOrStdout().Write(d.Bytes())
				return err
			}
			err = d.Create(path)
			if errors.Is(err, os.ErrNotExist) {
				return fmt.Errorf("%w; create the directory (mkdir %s) or name another FILE", err, filepath.Dir(path))
			}
			if err != nil {
				return err
			}
			c, err := d.Config()
			if err != nil {
				return err
			}
			for _, w := range c.Warnings() {
				fmt.Fprintf(cmd.ErrOrStderr(), "%s: warning: %s\n", path, w)
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s written. Start the target with \"iser-target serve --config %s\", and see \"iser-target connect\".\n", path, path)
			return err
		},
	}
	q.addTo(cmd)
	return cmd
}
