package cli

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/iser-target/iser-target/backend/rbd"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// checkCeph finds what keeps the target from using its RBD images, as the user that the target runs as. limit is what all clusters together have to answer.
func checkCeph(ctx context.Context, st *schema.State, limit time.Duration) (list []Finding) {
	var uris, abouts []string
	for _, t := range st.Targets {
		for _, l := range t.LUNs {
			if l.Backend == "rbd" {
				uris, abouts = append(uris, l.Path), append(abouts, fmt.Sprintf("Ceph for LUN %d of %s", l.ID, t.Name))
			}
		}
	}
	if len(uris) == 0 {
		return nil
	}
	as, err := credentialOf(st.PID)
	switch {
	case err != nil:
		return []Finding{{warning, "Ceph", fmt.Sprintf("not checked: the user of the target is not known: %v", err), "run doctor where the target runs, as root"}}
	case int(as.Uid) == os.Geteuid() && int(as.Gid) == os.Getegid():
		as = nil
	case os.Geteuid() != 0:
		return []Finding{{warning, "Ceph", fmt.Sprintf("not checked: the target runs as uid %d, and doctor as uid %d", as.Uid, os.Geteuid()), "run doctor as root"}}
	}
	for _, t := range rbd.Diagnose(ctx, uris, as, limit) {
		f := Finding{problem, "Ceph", t.Text, t.Mend}
		for n, uri := range uris {
			if uri == t.URI {
				f.About = abouts[n]
			}
		}
		list = append(list, f)
	}
	if len(list) == 0 {
		list = append(list, Finding{fine, "Ceph", "the cluster answers, and has " + count(len(uris), "image"), ""})
	}
	return list
}

// credentialOf returns the effective user and groups of a process.
func credentialOf(pid int) (*syscall.Credential, error) {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	if err != nil {
		return nil, err
	}
	fields := map[string][]string{}
	for line := range strings.Lines(string(b)) {
		name, values, _ := strings.Cut(line, ":")
		fields[name] = strings.Fields(values)
	}
	number := func(s string) uint32 {
		n, bad := strconv.ParseUint(s, 10, 32)
		if bad != nil {
			err = bad
		}
		return uint32(n)
	}
	if len(fields["Uid"]) != 4 || len(fields["Gid"]) != 4 { // real, effective, saved, of the file system
		return nil, fmt.Errorf("/proc/%d/status has no users", pid)
	}
	c := &syscall.Credential{Uid: number(fields["Uid"][1]), Gid: number(fields["Gid"][1])}
	for _, g := range fields["Groups"] {
		c.Groups = append(c.Groups, number(g))
	}
	return c, err
}
