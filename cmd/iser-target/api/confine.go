package api

import (
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/cmd/iser-target/daemon"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

// devices is the directory of device nodes. Links in it are those of udev.
const devices = "/dev"

// A confinement bounds the paths that callers may name to directories in which nobody but root and
// the user of this process can put a link.
type confinement struct {
	dirs      []string
	protected []string // files that callers may not name
	families  []string // the same, with those whose name continues after a dot
	owner     uint32
}

// confinement returns the bounds for the callers of s, by the running configuration.
func (s *Server) confinement() *confinement {
	cfg := s.d.Effective()
	c := &confinement{dirs: cfg.Control.Paths, owner: s.rights.owner}
	if len(c.dirs) == 0 && cfg.StateDir != "" {
		c.dirs = []string{cfg.StateDir}
	}
	for _, f := range daemon.StateFiles {
		c.families = append(c.families, filepath.Join(cfg.StateDir, f.File)) // and .spare, .lock
	}
	c.families = append(c.families, filepath.Join(cfg.StateDir, daemon.LeasesFile))
	if p := s.d.Path(); p != "" {
		c.families = append(c.families, p) // and .history
	}
	for _, p := range s.d.Document().NamedPaths() {
		if p.Kind == config.PathOwn || p.Kind == config.PathSecret {
			c.protected = append(c.protected, p.Path)
		}
	}
	return c
}

// trusted reports whether the caller of r is root or the user of this process, on the socket. They can do
// what the target can without it, so their paths have no bounds.
func trusted(r *http.Request) bool {
	c, _ := r.Context().Value(callerKey{}).(*caller)
	return c != nil && c.trusted
}

// confined returns edit with a check of the paths that it adds, for the caller of r.
func (s *Server) confined(r *http.Request, edit func(*config.Document) error) func(*config.Document) error {
	if trusted(r) {
		return edit
	}
	return func(d *config.Document) error {
		before := d.Clone()
		if err := edit(d); err != nil {
			return err
		}
		return s.checkNames(before, d)
	}
}

// checkNames refuses paths that next has and before has not, unless callers may name them. It refuses a
// change of these rights.
func (s *Server) checkNames(before, next *config.Document) error {
	was, now := before.Control(), next.Control()
	was.Access, now.Access = nil, nil // administrators may change it
	if !slices.Equal(was.Paths, now.Paths) || !reflect.DeepEqual(withoutPaths(was), withoutPaths(now)) {
		return &schema.Error{Code: schema.Forbidden, Message: "control: only access may change by a request",
			Hint: "nothing was changed; edit the configuration file of the target, or ask root there"}
	}
	if !reflect.DeepEqual(before.Process(), next.Process()) {
		return &schema.Error{Code: schema.Forbidden, Message: "process: a request may not change what the process may do",
			Hint: "nothing was changed; edit the configuration file of the target, or ask root there"}
	}
	known := before.NamedPaths()
	c := s.confinement()
	for _, p := range next.NamedPaths() {
		if slices.Contains(known, p) {
			continue
		}
		var err error
		switch p.Kind {
		case config.PathFile, config.PathSecret:
			err = c.check(p.Path, unix.S_IFREG)
		case config.PathBlock:
			err = c.check(p.Path, unix.S_IFBLK)
		case config.PathServer:
			err = errors.New("the target would connect to it")
		case config.PathPlugin:
			err = errors.New("its plug-in decides what it opens")
		default:
			err = errors.New("the target itself uses it")
		}
		if err != nil {
			return c.refusal(p.Path, err)
		}
	}
	return nil
}

func withoutPaths(c config.Control) config.Control {
	c.Paths = nil
	return c
}

// checkPath returns an error unless the caller of r may name a path of one of these types.
func (s *Server) checkPath(r *http.Request, path string, types ...uint32) error {
	if path == "" || trusted(r) {
		return nil
	}
	c := s.confinement()
	if err := c.check(path, types...); err != nil {
		return c.refusal(path, err)
	}
	return nil
}

func (c *confinement) refusal(path string, err error) error {
	where := "no directory"
	if len(c.dirs) > 0 {
		where = strings.Join(c.dirs, ", ")
	}
	return &schema.Error{Code: schema.Forbidden, Message: fmt.Sprintf("%s: callers may not name it: %v", path, err),
		Hint: "nothing was changed; requests may name what is in " + where + ", by control.paths in the configuration file of the target"}
}

// errOutside answers a path that is in none of the directories.
var errOutside = errors.New("it is not in a directory of control.paths")

// check returns an error unless path, which may be absent, is in one of the directories and has one of these types
// (inode(7)). No component of it may be a link, except of device nodes below /dev.
func (c *confinement) check(path string, types ...uint32) error {
	if !filepath.IsAbs(path) || filepath.Clean(path) != path {
		return errors.New("it is not a clean absolute path, like /srv/luns/a")
	}
	dir := ""
	for _, d := range c.dirs {
		d = filepath.Clean(d)
		if below(d, path) && len(d) > len(dir) {
			dir = d
		}
	}
	if dir == "" {
		return errOutside
	}
	how := unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_SYMLINKS}
	if (dir == devices || below(devices, dir)) && slices.Contains(types, unix.S_IFBLK) {
		dir, how.Resolve = devices, how.Resolve&^unix.RESOLVE_NO_SYMLINKS
		types = []uint32{unix.S_IFBLK}
	}
	root, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	defer unix.Close(root)
	if err := c.checkDirs(root, dir, path); err != nil {
		return err
	}
	rel, err := filepath.Rel(dir, path)
	if err != nil {
		return err
	}
	fd, err := unix.Openat2(root, rel, &how)
	switch err {
	case nil:
	case unix.ENOENT:
		if slices.Contains(types, unix.S_IFREG) {
			return c.unprotected(path, nil)
		}
		return err
	case unix.ELOOP:
		return errors.New("it is a symbolic link")
	case unix.EXDEV:
		return fmt.Errorf("it leads out of %s", dir)
	case unix.ENOSYS:
		return errors.New("the kernel, or the filter of system calls, lacks openat2(2), which confines paths")
	default:
		return err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if !slices.Contains(types, st.Mode&unix.S_IFMT) {
		return errors.New("it is not a file or device of the type that is needed")
	}
	return c.unprotected(path, &st)
}

// below reports whether path is in dir, or further down.
func below(dir, path string) bool {
	return dir == "/" && path != "/" || strings.HasPrefix(path, dir+"/")
}

// checkDirs refuses a path with a directory, from dir on, in which others than root and the user of this process
// could put a link after the check, and one that is a link itself.
func (c *confinement) checkDirs(root int, dir, path string) error {
	for at := filepath.Dir(path); ; at = filepath.Dir(at) {
		rel, err := filepath.Rel(dir, at)
		if err != nil {
			return err
		}
		fd, err := unix.Openat2(root, rel, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC | unix.O_DIRECTORY,
			Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_SYMLINKS})
		switch err {
		case nil:
		case unix.ELOOP, unix.ENOTDIR:
			return fmt.Errorf("%s is a link, or not a directory", at)
		case unix.ENOSYS:
			return errors.New("the kernel, or the filter of system calls, lacks openat2(2), which confines paths")
		default:
			return fmt.Errorf("%s: %w", at, err)
		}
		var st unix.Stat_t
		err = unix.Fstat(fd, &st)
		unix.Close(fd)
		switch {
		case err != nil:
			return err
		case st.Mode&0o022 != 0:
			return fmt.Errorf("other users can write to %s, whose mode is %#o: they could put a link there", at, st.Mode&0o7777)
		case st.Uid != 0 && st.Uid != c.owner:
			return fmt.Errorf("%s belongs to uid %d, which could put a link there", at, st.Uid)
		}
		if at == dir {
			return nil
		}
	}
}

// unprotected returns an error if path is one of the protected files. st is its state, nil for a file that does not exist.
func (c *confinement) unprotected(path string, st *unix.Stat_t) error {
	for _, p := range slices.Concat(c.families, c.protected) {
		if path == p || slices.Contains(c.families, p) && strings.HasPrefix(path, p+".") {
			return errors.New("the target itself uses it")
		}
		var other unix.Stat_t
		if st != nil && unix.Stat(p, &other) == nil && other.Dev == st.Dev && other.Ino == st.Ino {
			return errors.New("the target itself uses it, as " + p)
		}
	}
	return nil
}
