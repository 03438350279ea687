package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/cmd/iser-target/handover"
	"github.com/iser-target/iser-target/cmd/iser-target/httpd"
	"github.com/iser-target/iser-target/cmd/iser-target/privilege"
	"github.com/iser-target/iser-target/config"
)

// ownProcess is true if this process is the program. A test that calls the command must not be replaced.
var ownProcess bool

// envUser overrides process.user.
const envUser = "ISER_TARGET_PROCESS_USER"

// envDocument has the descriptor of a configuration that was read from a pipe, for the program that is executed again.
const envDocument = "ISER_TARGET_DOCUMENT"

// restrict gives up the rights that the configuration, which read returns, does not leave to the process. path is its file. That executes the program again, so it
// comes before all that has an effect. A process that continues another one has the rights of that one. errOut gets warnings.
func restrict(path string, read func() (*config.Document, error), errOut io.Writer) error {
	if done := privilege.Done(); done || !ownProcess || handover.Expected() {
		return nil
	}
	if name := os.Getenv(envUser); name != "" && os.Geteuid() == 0 {
		// Who starts the target has chosen the user, so the file may belong to that one: it is read afterwards.
		u, err := account(name)
		if err != nil {
			return fmt.Errorf("%s: %w", envUser, err)
		}
		return (&privilege.Wish{User: u}).Apply()
	}
	doc, err := read()
	if err != nil {
		return err
	}
	cfg, err := doc.Config()
	if err != nil {
		return err
	}
	w, env, err := wishOf(cfg, path)
	if err != nil {
		return err
	}
	if path != "" && w.User == nil && os.Geteuid() == 0 {
		fmt.Fprintln(errOut, "iser-target: warning: the target stays root. Set process.user in the configuration, or start it as another user, like the service in docs/service.md")
	}
	var document *os.File
	if fi, err := os.Stat(path); path != "" && (err != nil || !fi.Mode().IsRegular()) { // it cannot be read again
		if document, err = memoryFile(doc.Bytes()); err != nil {
			return err
		}
		defer document.Close()
		env = append(env, envDocument+"="+strconv.Itoa(int(document.Fd())))
	}
	err = w.Apply(append(env, privilege.Marker())...)
	if errors.Is(err, privilege.ErrStays) {
		fmt.Fprintf(errOut, "iser-target: warning: %v\n", err)
		return nil
	}
	if err == nil && document != nil { // nothing to give up, but the pipe is empty now
		return os.Setenv(envDocument, strconv.Itoa(int(document.Fd())))
	}
	return err
}

// denyCalls takes system calls from the process that the target never needs. errOut gets a warning if the kernel cannot do that.
func denyCalls(errOut io.Writer) error {
	if !ownProcess {
		return nil
	}
	err := privilege.DenyCalls()
	if errors.Is(err, privilege.ErrNoFilter) {
		fmt.Fprintf(errOut, "iser-target: warning: %v\n", err)
		return nil
	}
	return err
}

// memoryFile returns a file with that content that an executed program inherits.
func memoryFile(b []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate("configuration", 0)
	if err != nil {
		return nil, fmt.Errorf("memfd_create: %w", err)
	}
	f := os.NewFile(uintptr(fd), "configuration")
	if _, err := f.WriteAt(b, 0); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// wishOf returns what the process keeps by cfg, and variables for the program that is executed again.
func wishOf(cfg *config.Config, path string) (*privilege.Wish, []string, error) {
	p := &cfg.Process
	w := &privilege.Wish{Keep: p.Capabilities}
	for i, name := range p.Capabilities {
		if !slices.Contains(privilege.Names(), name) {
			return nil, nil, fmt.Errorf("process.capabilities[%d]: %s is not a capability; see capabilities(7)", i, name)
		}
	}
	var env []string
	if p.User != "" {
		u, err := account(p.User)
		if err != nil {
			return nil, nil, fmt.Errorf("process.user: %w", err)
		}
		w.User = u
		if cfg.UsesIPsec() && os.Geteuid() == 0 {
			w.Keep = append(slices.Clone(w.Keep), "CAP_NET_ADMIN")
		}
	}
	if p.User != "" && os.Geteuid() == 0 || len(p.Paths) > 0 {
		var err error
		if env, err = prepare(cfg, w.User); err != nil {
			return nil, nil, fmt.Errorf("process: %w", err)
		}
	}
	if len(p.Paths) == 0 {
		return w, env, nil
	}
	w.Paths = p.Paths
	program, err := os.Executable()
	if err != nil {
		return nil, nil, err
	}
	socket := cfg.Control.Socket
	if len(env) > 0 {
		socket = config.ServiceSocket
	}
	w.Write = []string{cfg.StateDir, parent(path), parent(socket)}
	w.Read = append(cfg.ServerPaths(), parent(program))
	for _, f := range []string{cfg.Cluster.TLS.CA, cfg.Cluster.TLS.Cert, cfg.Cluster.TLS.Key, cfg.Cluster.FenceProgram, cfg.Control.TLS.Cert, cfg.Control.TLS.Key, cfg.Control.TLS.ClientCA, cfg.Control.TLS.CRL} {
		w.Read = append(w.Read, parent(f))
	}
	for _, c := range cfg.WebConfigs() {
		files, err := httpd.WebFiles(c.File)
		if err != nil {
			return nil, nil, fmt.Errorf("%s: %w", c.Key, err)
		}
		for _, f := range files {
			w.Read = append(w.Read, parent(f))
		}
	}
	for _, sa := range cfg.IPsec.Static.SAs {
		w.Read = append(w.Read, parent(sa.KeyFile))
	}
	if cmd := cfg.IPsec.Exec.Command; len(cmd) > 0 {
		w.Read = append(w.Read, parent(cmd[0]))
	}
	for _, f := range cfg.SecretFiles() {
		w.Read = append(w.Read, parent(f))
	}
	missing := func(s string) bool { return s == "" }
	w.Write, w.Read = slices.DeleteFunc(w.Write, missing), slices.DeleteFunc(w.Read, missing)
	return w, env, nil
}

// parent returns the directory of a file, or "" without a file.
func parent(file string) string {
	if file == "" {
		return ""
	}
	return filepath.Dir(file)
}

// account returns the user with that name or number.
func account(name string) (*privilege.User, error) {
	u, err := user.Lookup(name)
	if err != nil {
		var unknown user.UnknownUserError
		if !errors.As(err, &unknown) {
			return nil, err
		}
		if u, err = user.LookupId(name); err != nil {
			return nil, fmt.Errorf("there is no user %q on this machine", name)
		}
	}
	a := &privilege.User{Name: u.Username}
	if a.UID, err = strconv.Atoi(u.Uid); err != nil {
		return nil, err
	}
	if a.GID, err = strconv.Atoi(u.Gid); err != nil {
		return nil, err
	}
	if a.UID == 0 {
		return nil, fmt.Errorf("%s is root", name)
	}
	groups, err := u.GroupIds()
	if err != nil {
		return nil, err
	}
	for _, g := range groups {
		n, err := strconv.Atoi(g)
		if err != nil {
			return nil, err
		}
		a.Groups = append(a.Groups, n)
	}
	return a, nil
}

// prepare makes the directories that the process cannot make later: that of the state, and, as root, one for the control socket if the
// configuration has it at the place of root's. They belong to u, unless that is nil. It returns variables with what differs then.
func prepare(cfg *config.Config, u *privilege.User) (env []string, err error) {
	dirs := []string{cfg.StateDir}
	if os.Geteuid() == 0 && cfg.Control.Socket != "" && cfg.Control.Socket == config.DefaultSocket() {
		dirs = append(dirs, filepath.Dir(config.ServiceSocket))
		env = []string{"ISER_TARGET_CONTROL_SOCKET=" + config.ServiceSocket}
	}
	for _, dir := range dirs {
		if dir == "" {
			continue
		}
		if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
			return nil, err
		}
		switch err := os.Mkdir(dir, 0o700); {
		case errors.Is(err, os.ErrExist): // and may have another owner for a reason; the user finds out
		case err != nil:
			return nil, err
		case u != nil:
			if err := os.Lchown(dir, u.UID, u.GID); err != nil {
				return nil, err
			}
		}
	}
	return env, nil
}
