package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/cmd/iser-target/api"
	"github.com/iser-target/iser-target/cmd/iser-target/daemon"
	"github.com/iser-target/iser-target/cmd/iser-target/dashboard"
	"github.com/iser-target/iser-target/cmd/iser-target/handover"
	"github.com/iser-target/iser-target/cmd/iser-target/httpd"
	"github.com/iser-target/iser-target/cmd/iser-target/systemd"
	"github.com/iser-target/iser-target/config"
)

// A server is the execution of the command serve.
type server struct {
	cmd     *cobra.Command
	path    string // of the configuration file, or empty
	read    func() (*config.Document, error)
	manager *systemd.Manager
}

// begin serves like a program that nobody has handed anything to.
func (s *server) begin() error {
	doc, err := s.read()
	if err != nil {
		return err
	}
	kept, reason := s.kept(doc)
	d, sockets, err := s.open(doc, kept)
	if err != nil {
		if sockets != nil {
			sockets.Close()
		}
		return err
	}
	if reason != nil {
		d.Logger().Warn("sessions do not continue after the restart", "reason", reason)
	}
	if s.path == "" {
		fmt.Fprint(s.cmd.OutOrStdout(), d.Invitation())
	}
	end, err := sockets.Serve(d)
	if err != nil {
		ended, cancel := context.WithCancel(s.cmd.Context())
		cancel()
		return errors.Join(err, d.Run(ended)) // closes what is open
	}
	return s.run(d, end)
}

// kept returns what the process before has left with the service manager, or nil. After a change of the configuration that is
// without the sessions: they may have no right to it any longer. The error says why sessions do not continue.
func (s *server) kept(doc *config.Document) (*handover.Received, error) {
	r, err := handover.FromKept(s.manager.Kept)
	if r != nil && r.Document != string(doc.Bytes()) {
		r.Sessions, r.LUNs = nil, nil
		return r, errors.New("the configuration has changed")
	}
	return r, err
}

// take continues what the process at the other end of link does.
func (s *server) take(link *handover.Link) error {
	defer link.Close()
	r, err := link.Offer(versionString(), func(text string) error {
		_, err := s.document(text)
		return err
	})
	if err != nil {
		return err
	}
	if r == nil { // the other process has ended, and nobody else serves
		return s.begin()
	}
	main := make(chan struct{})
	s.manager.After(main)
	doc, err := s.document(r.Document)
	if err != nil {
		return link.Fail(err)
	}
	d, sockets, err := s.open(doc, r)
	if err != nil {
		return link.Fail(err)
	}
	end, err := sockets.Serve(d)
	if err == nil {
		err = d.CheckReceived()
	}
	if err == nil {
		err = link.AwaitGo()
	}
	if err != nil { // the process ends with what is open: the other one has it, too
		return link.Fail(err)
	}
	d.Listeners().Own()
	if err := link.Send(handover.Message{Kind: handover.Serving}); err != nil {
		d.Logger().Info("the process before has ended", "reason", err) // and nobody else serves
	}
	go func() {
		defer close(main)
		defer link.Close()
		if err := link.AwaitClose(); err != nil {
			d.Logger().Warn("the process before has not ended the hand-over", "reason", err)
		}
	}()
	return s.run(d, end)
}

// document returns the configuration that another process has.
func (s *server) document(text string) (*config.Document, error) {
	name := s.path
	if name == "" {
		name = "the configuration of the other process"
	}
	doc, err := config.NewDocument(name, []byte(text))
	if err != nil {
		return nil, err
	}
	_, err = doc.Config()
	return doc, err
}

// open returns the daemon of doc, which continues r if that is not nil, and the sockets of its control API. It returns those with
// an error, too, if they are open.
func (s *server) open(doc *config.Document, r *handover.Received) (d *daemon.Daemon, sockets *api.Sockets, err error) {
	program, notFound := started()
	successor := func() (*exec.Cmd, error) {
		if notFound != nil {
			return nil, notFound
		}
		cmd := exec.Command(program, os.Args[1:]...)
		cmd.Args[0] = os.Args[0]
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
		// The signals of a terminal go to the supervisor, which passes them on.
		cmd.SysProcAttr = &unix.SysProcAttr{Setpgid: true}
		return cmd, nil
	}
	d, err = daemon.New(doc, daemon.Options{
		LogTo: s.cmd.ErrOrStderr(), Path: s.path, Manager: s.manager, Version: versionString(),
		Dashboard: func(d *daemon.Daemon, l net.Listener, w *httpd.Web) func() { return dashboard.Serve(d, l, w) },
		Control: func(d *daemon.Daemon) (err error) {
			sockets, err = api.Open(d.Listeners(), d.Effective().Control, d.Logger())
			return err
		},
		Received: r, Successor: successor, Witness: witnessProcess,
	})
	return d, sockets, err
}

// started returns the path of the program as it was named at the start: links are followed when the
// program is started again.
func started() (string, error) {
	name := os.Args[0]
	if !strings.Contains(name, "/") {
		path, err := exec.LookPath(name)
		if err != nil {
			return os.Executable()
		}
		name = path
	}
	return filepath.Abs(name)
}

// run serves until the command is canceled, or another process continues. end ends the control API.
func (s *server) run(d *daemon.Daemon, end func()) error {
	context.AfterFunc(s.cmd.Context(), end)
	defer end()
	serving.Store(d)
	if s.path != "" {
		reloadOnHangup(d)
	}
	upgradeOnSignal(d)
	ctx, cancel := context.WithCancel(s.cmd.Context())
	defer cancel()
	d.Supervisor().Watch(func() {
		d.Logger().Warn("the supervisor has ended, and the target ends, too")
		cancel()
	})
	err := d.Run(ctx)
	if !errors.Is(err, daemon.ErrUpgraded) {
		return err
	}
	came := make(chan os.Signal, 16)
	signal.Notify(came, passed...)
	if s.cmd.Context().Err() != nil { // too late for this process
		came <- unix.SIGTERM
	}
	end() // answers the requests in progress
	if link := d.Successor(); link != nil {
		return becomeSupervisor(link, came)
	}
	return nil
}

// upgradeOnSignal makes another process continue at each SIGUSR2. The log has the outcome.
func upgradeOnSignal(d *daemon.Daemon) {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGUSR2)
	go func() {
		for range signals {
			_, _ = d.Upgrade(daemon.By(context.Background(), "SIGUSR2")) // which logs the error
		}
	}()
}
