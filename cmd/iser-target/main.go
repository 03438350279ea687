// Command iser-target serves files, block devices and memory as SCSI disks
// over iSER, without RDMA hardware or kernel modules.
package main

import (
	"cmp"
	"context"
	"expvar"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/cmd/iser-target/daemon"
	"github.com/iser-target/iser-target/cmd/iser-target/handover"
	"github.com/iser-target/iser-target/cmd/iser-target/systemd"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/security/limits"
)

// version is set by the linker in releases.
var version = ""

func main() {
	ownProcess = true
	ctx := context.Background()
	if len(os.Args) > 1 && os.Args[1] == supervisorName {
		signal.Notify(toPass, passed...)
	} else {
		ctx = untilSignal()
	}
	err := rootCommand(os.Stdout, os.Stderr).ExecuteContext(ctx)
	os.Exit(cli.Report(os.Stderr, err))
}

// untilSignal returns a context that the first SIGINT or SIGTERM ends. The second one ends
// the process at once.
func untilSignal() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM)
	go func() {
		<-signals
		cancel()
		dieBy((<-signals).(unix.Signal))
	}()
	return ctx
}

// dieBy ends the process by a signal.
func dieBy(s unix.Signal) {
	signal.Reset(s)
	if os.Getpid() != 1 { // as in a container: there the kernel ignores the signal
		unix.Kill(os.Getpid(), s)
		time.Sleep(time.Second) // it ends meanwhile
	}
	os.Exit(128 + int(s))
}

// serving is the daemon whose counts /debug/vars shows.
var serving atomic.Pointer[daemon.Daemon]

func init() {
	expvar.Publish("iser_target", expvar.Func(func() any {
		if d := serving.Load(); d != nil {
			return d.Vars()
		}
		return nil
	}))
}

// reloadOnHangup makes d read its configuration file again at each SIGHUP. The signal no
// longer ends the process.
func reloadOnHangup(d *daemon.Daemon) {
	hangups := make(chan os.Signal, 1)
	signal.Notify(hangups, unix.SIGHUP)
	go func() {
		for range hangups {
			d.Reload("SIGHUP")
		}
	}()
}

func rootCommand(out, errOut io.Writer) *cobra.Command {
	root := &cobra.Command{
		Use:           "iser-target",
		Short:         "An iSER and iSCSI target in user space, with software iWARP",
		Version:       versionString(),
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.SetVersionTemplate("{{.Name}} {{.Version}}\n")
	root.SetOut(out)
	root.SetErr(errOut)
	root.AddCommand(serveCommand(), initCommand(), versionCommand(), faultsCommand(), stateCommand(), supervisorCommand(), witnessCommand())
	cli.AddTo(root)
	cli.AddExamples(root)
	return root
}

func serveCommand() *cobra.Command {
	var (
		path string
		q    quick
	)
	cmd := &cobra.Command{
		Use:   "serve [--config FILE | --path PATH --size SIZE --listen ADDRESS --allow PATTERN]",
		Short: "Serve the configured targets in the foreground until SIGTERM or SIGINT",
		Long: `Serve the configured targets in the foreground until SIGTERM or SIGINT.
On SIGUSR2, a new process of the program continues what this one does: see
"iser-target upgrade --help".
On SIGHUP, the target reads the configuration file again and applies the
differences, unless they would disturb sessions. With "watch: true" in the file
it does so whenever the file changes.

On the first SIGTERM, the target ends its sessions and closes its LUNs. With "drain" in
the file, it first asks initiators to log out, and waits for that time. The second
SIGTERM ends the process at once.

Without --config, the target serves one LUN, by default a memory LUN of 1 GiB, to any
initiator on this machine. Flags describe another LUN, portal or target. Changes by
commands are then lost when the target ends: "iser-target init" with the same flags
writes a file.`,
		Example: `  iser-target serve
  iser-target serve --path disk.img --size 10G --listen :3260 --allow 'iqn.1993-08.org.debian:*'
  iser-target serve --config /etc/iser-target/config.yaml`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			document := func() (*config.Document, error) { return open(path) }
			if given(cmd) {
				if path != "" {
					return cli.Usage(cmd, "--config cannot be combined with --%s", strings.Join(quickFlags, ", --"))
				}
				document = func() (*config.Document, error) { return q.document(cmd) }
			}
			if err := restrict(path, document, cmd.ErrOrStderr()); err != nil {
				return err
			}
			if err := hideMemory(); err != nil {
				return err
			}
			if err := denyCalls(cmd.ErrOrStderr()); err != nil {
				return err
			}
			limitHeap(limits.ThisMachine())
			manager, err := systemd.FromEnvironment()
			if err != nil {
				return err
			}
			s := server{cmd: cmd, path: path, read: document, manager: manager}
			link, err := handover.FromEnvironment()
			if err != nil {
				return err
			}
			if link != nil {
				return s.take(link)
			}
			return s.begin()
		},
	}
	cmd.Flags().StringVarP(&path, "config", "c", "", "configuration file (YAML)")
	cmd.MarkFlagFilename("config", "yaml", "yml")
	q.addTo(cmd)
	return cmd
}

func open(path string) (*config.Document, error) {
	if path == "" {
		return config.DefaultDocument()
	}
	if v := os.Getenv(envDocument); v != "" {
		os.Unsetenv(envDocument)
		fd, err := strconv.Atoi(v)
		if err != nil || fd < 3 {
			return nil, fmt.Errorf("%s is %q: want a descriptor", envDocument, v)
		}
		f := os.NewFile(uintptr(fd), path)
		defer f.Close()
		b, err := io.ReadAll(io.NewSectionReader(f, 0, 1<<62))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		return config.NewDocument(path, b)
	}
	return config.OpenDocument(path)
}

func versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  cobra.NoArgs,
		Run: func(cmd *cobra.Command, _ []string) {
			fmt.Fprintln(cmd.OutOrStdout(), "iser-target", versionString())
		},
	}
}

// versionString returns the version that the linker set, or else that of the build.
func versionString() string {
	if version != "" {
		return version
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	v := cmp.Or(info.Main.Version, "(devel)")
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && len(s.Value) >= 12 {
			v += " " + s.Value[:12]
		}
	}
	return v + " " + info.GoVersion
}
