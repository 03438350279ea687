package config

import (
	"path/filepath"
	"strings"

	"github.com/iser-target/iser-target/backend/nbd/nbduri"
	"github.com/iser-target/iser-target/backend/rbd/rbduri"
)

// checkProcess checks the section process. The names of users and capabilities belong to the machine that serves, which
// looks for them.
func (c *Config) checkProcess(errs *errorList) {
	for i, p := range c.Process.Paths {
		if !filepath.IsAbs(p) {
			errs.addf(index("process.paths", i), "must be an absolute path, not %q", p)
		}
	}
	for i, name := range c.Process.Capabilities {
		if !strings.HasPrefix(name, "CAP_") {
			errs.addf(index("process.capabilities", i), "must be a name of capabilities(7), like CAP_SYS_RESOURCE, not %q", name)
		}
	}
	if c.Process.User == "0" || c.Process.User == "root" {
		errs.addf("process.user", "must be another user than root, so that the process loses rights")
	}
	if len(c.Process.Paths) == 0 {
		return
	}
	for i, t := range c.Targets {
		for j, l := range t.LUNs {
			if l.Backend == "nbd" || l.Backend == "rbd" {
				continue // path is a URI. See ServerPaths
			}
			for _, f := range []struct{ key, path string }{{"path", l.Path}, {"checksums_path", l.ChecksumsPath}} {
				if f.path != "" && !c.Process.opens(f.path, c.StateDir) {
					errs.addf(index("targets", i, "luns", j)+"."+f.key, "%s is not in a directory of process.paths, which are all that the process can open", f.path)
				}
			}
		}
	}
}

// ServerPaths returns the directories that a target reads to reach the servers of its LUNs: that of ceph.conf, and those of certificates of NBD.
func (c *Config) ServerPaths() (list []string) {
	for _, t := range c.Targets {
		for _, l := range t.LUNs {
			switch l.Backend {
			case "nbd":
				if a, err := nbduri.Parse(l.Path); err == nil && a.Certificates != "" {
					list = append(list, a.Certificates)
				}
			case "rbd":
				if i, err := rbduri.Parse(l.Path); err == nil {
					list = append(list, filepath.Dir(i.Conf))
				}
			}
		}
	}
	return list
}

// opens reports whether the process can open path, by its name. It can open what is in stateDir.
func (p *Process) opens(path, stateDir string) bool {
	path, err := filepath.Abs(path)
	if err != nil {
		return false
	}
	for _, dir := range append([]string{stateDir}, p.Paths...) {
		if dir == "" {
			continue
		}
		if rel, err := filepath.Rel(dir, path); err == nil && filepath.IsLocal(rel) {
			return true
		}
	}
	return false
}
