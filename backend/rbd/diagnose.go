package rbd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/iser-target/iser-target/backend/rbd/rbduri"
)

// A Trouble is something that keeps a target from using images.
type Trouble struct {
	URI  string // of the image; empty: all images
	Text string // what is wrong
	Mend string // the command that mends it
}

// The programs that Diagnose needs besides, from the package of rbd.
const (
	radosProgram = "rados"
	confProgram  = "ceph-conf"
)

// Diagnose returns what keeps a target from using these images, in their order, or nothing. It looks as the user as, or as the user of this process if
// that is nil. Clusters have limit to answer, all at the same time. It opens no image and changes nothing.
func Diagnose(ctx context.Context, uris []string, as *syscall.Credential, limit time.Duration) (list []Trouble) {
	x := &examiner{as: as, limit: limit}
	if t := x.programs(ctx); len(t) > 0 {
		return t
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	clusters, found := map[rbduri.Image]func() ([]string, *Trouble){}, make([]*Trouble, len(uris))
	var running sync.WaitGroup
	for n, uri := range uris {
		i, err := rbduri.Parse(uri)
		if err != nil {
			found[n] = &Trouble{Text: err.Error()}
			continue
		}
		key := rbduri.Image{Conf: i.Conf, User: i.User, Pool: i.Pool} // the pool is in a hint
		if clusters[key] == nil {
			clusters[key] = sync.OnceValues(func() ([]string, *Trouble) { return x.cluster(ctx, i) })
		}
		pools := clusters[key]
		running.Go(func() {
			has, t := pools()
			if t == nil {
				t = x.image(ctx, i, has)
			}
			found[n] = t
		})
	}
	running.Wait()
	for n, t := range found {
		if t != nil {
			list = append(list, Trouble{uris[n], t.Text, t.Mend})
		}
	}
	return list
}

// An examiner runs programs as a user.
type examiner struct {
	as    *syscall.Credential
	limit time.Duration
}

// run runs a program and returns its output. The error has what it said.
func (x *examiner) run(ctx context.Context, program string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = Environment()
	cmd.Dir = "/"
	cmd.WaitDelay = time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: x.as}
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.Output()
	if ctx.Err() != nil {
		return "", errNoAnswer
	}
	if err != nil {
		return "", fmt.Errorf("%s: %w: %s", program, err, strings.TrimSpace(said.String()))
	}
	return string(out), nil
}

// programs looks for the programs and the driver of QEMU.
func (x *examiner) programs(ctx context.Context) (list []Trouble) {
	if _, err := exec.LookPath(daemonProgram); err != nil {
		list = append(list, Trouble{Text: daemonProgram + " is not installed", Mend: "apt-get install qemu-system-common qemu-block-extra"})
	} else {
		ctx, cancel := context.WithTimeout(ctx, x.limit)
		defer cancel()
		// It must fail, because it has no conf, but not before it knows the driver.
		_, err := x.run(ctx, daemonProgram, "--blockdev", "driver=rbd,node-name=none,pool=none,image=none,conf=/dev/null/none")
		switch {
		case err == nil:
		case errors.Is(err, errNoAnswer):
			list = append(list, Trouble{Text: fmt.Sprintf("%s does not end within %v", daemonProgram, x.limit), Mend: "apt-get install --reinstall qemu-system-common qemu-block-extra"})
		case slices.ContainsFunc([]string{"Unknown driver", "does not accept value", "Invalid parameter"}, func(s string) bool { return strings.Contains(err.Error(), s) }):
			list = append(list, Trouble{Text: daemonProgram + " has no driver for RBD", Mend: "apt-get install qemu-block-extra"})
		}
	}
	for _, p := range []string{clientProgram, radosProgram, confProgram} {
		if _, err := exec.LookPath(p); err != nil {
			return append(list, Trouble{Text: p + " is not installed", Mend: "apt-get install ceph-common"})
		}
	}
	return list
}

// authCommand returns the command that gives the user of an image a key.
func authCommand(i *rbduri.Image, keyring string) string {
	return fmt.Sprintf("ceph auth get-or-create client.%s mon 'profile rbd' osd 'profile rbd pool=%s' > %s", i.User, i.Pool, keyring)
}

// cluster returns the pools of the cluster of an image, which its monitors know, or why they do not answer.
func (x *examiner) cluster(ctx context.Context, i *rbduri.Image) (pools []string, t *Trouble) {
	out, err := x.run(ctx, radosProgram, "--conf="+i.Conf, "--id="+i.User, "lspools")
	if err == nil {
		return strings.Fields(out), nil
	}
	local, cancel := context.WithTimeout(context.WithoutCancel(ctx), x.limit) // what follows is on this machine
	defer cancel()
	if t := x.readable(local, i.Conf, "the configuration of Ceph"); t != nil {
		if t.Mend == "" {
			t.Mend = "ceph config generate-minimal-conf, on a machine of the cluster, prints what belongs into " + i.Conf
		}
		return nil, t
	}
	value := func(key string) string {
		out, _ := x.run(local, confProgram, "-c", i.Conf, "--name", "client."+i.User, "--show-config-value", key)
		return strings.TrimSpace(out)
	}
	keyrings := strings.FieldsFunc(value("keyring"), func(r rune) bool { return strings.ContainsRune(",; \t", r) })
	text := err.Error()
	if strings.Contains(text, "no keyring found") || strings.Contains(text, "unable to find a keyring") {
		for _, k := range keyrings {
			if t := x.readable(local, k, "the keyring"); t != nil && t.Mend != "" {
				return nil, t
			}
		}
		return nil, &Trouble{
			Text: fmt.Sprintf("there is no keyring for client.%s. Ceph looks for %s", i.User, strings.Join(keyrings, ", ")),
			Mend: authCommand(i, slices.Concat(keyrings, []string{i.Conf + ".keyring"})[0]),
		}
	}
	switch hosts := value("mon_host"); {
	case errors.Is(err, errNoAnswer):
		return nil, &Trouble{
			Text: fmt.Sprintf("the monitors in %s (%s) do not answer within %v", i.Conf, hosts, x.limit),
			Mend: "systemctl start ceph-mon.target, on their machines; if they run, correct mon_host or the network",
		}
	case strings.Contains(text, "handle_auth_bad_method") || strings.Contains(text, "Permission denied"):
		return nil, &Trouble{
			Text: fmt.Sprintf("the cluster refuses client.%s: there is no such user, or its key is not that in %s", i.User, strings.Join(keyrings, ", ")),
			Mend: authCommand(i, slices.Concat(keyrings, []string{i.Conf + ".keyring"})[0]),
		}
	case strings.Contains(text, "cannot identify monitors"):
		return nil, &Trouble{
			Text: i.Conf + " names no monitors (mon_host)",
			Mend: "ceph config generate-minimal-conf, on a machine of the cluster, prints what belongs into " + i.Conf,
		}
	}
	return nil, &Trouble{Text: lastLine(text), Mend: fmt.Sprintf("ceph --conf %s --id %s status shows more", i.Conf, i.User)}
}

// lastLine returns the last line of a text.
func lastLine(s string) string { return s[strings.LastIndexByte(s, '\n')+1:] }

// image looks for the pool and the image.
func (x *examiner) image(ctx context.Context, i *rbduri.Image, pools []string) *Trouble {
	if !slices.Contains(pools, i.Pool) {
		return &Trouble{Text: "the cluster has no pool " + i.Pool, Mend: fmt.Sprintf("ceph osd pool create %s && rbd pool init %s", i.Pool, i.Pool)}
	}
	_, err := x.run(ctx, clientProgram, "info", "--conf="+i.Conf, "--id="+i.User, "--format=json", i.String())
	if err == nil {
		return nil
	}
	switch text := err.Error(); {
	case errors.Is(err, errNoAnswer):
		return &Trouble{
			Text: fmt.Sprintf("the monitors answer, but the OSDs of pool %s do not within %v", i.Pool, x.limit),
			Mend: "systemctl start ceph-osd.target, on their machines; ceph health detail names them",
		}
	case strings.Contains(text, "Operation not permitted"):
		return &Trouble{
			Text: fmt.Sprintf("client.%s lacks capabilities for pool %s", i.User, i.Pool),
			Mend: fmt.Sprintf("ceph auth caps client.%s mon 'profile rbd' osd 'profile rbd pool=%s'", i.User, i.Pool),
		}
	case strings.Contains(text, "namespace"):
		return &Trouble{
			Text: fmt.Sprintf("the pool %s has no namespace %s", i.Pool, i.Namespace),
			Mend: fmt.Sprintf("rbd namespace create %s/%s", i.Pool, i.Namespace),
		}
	case strings.Contains(text, "No such file or directory"):
		return &Trouble{
			Text: fmt.Sprintf("the pool %s has no image %s", i.Pool, i.Name),
			Mend: fmt.Sprintf("rbd create %s --size SIZE, or rename or restore the image that had the data", i),
		}
	default:
		return &Trouble{Text: lastLine(text), Mend: fmt.Sprintf("rbd info --conf %s --id %s %s shows more", i.Conf, i.User, i)}
	}
}

// readable returns why the user cannot read a file. Mend is empty if the file does not exist.
func (x *examiner) readable(ctx context.Context, path, what string) *Trouble {
	may := func(flag, path string) bool {
		_, err := x.run(ctx, "test", flag, path)
		return err == nil
	}
	if may("-r", path) {
		return nil
	}
	for _, dir := range ancestors(path) {
		if _, err := os.Stat(dir); err == nil && !may("-x", dir) {
			return &Trouble{Text: fmt.Sprintf("%s %s is in a directory that %s may not enter: %s", what, path, x.who(), dir), Mend: "chmod o+x " + dir}
		}
	}
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return &Trouble{Text: fmt.Sprintf("%s %s does not exist", what, path)}
	}
	return &Trouble{Text: fmt.Sprintf("%s %s is not readable for %s", what, path, x.who()), Mend: fmt.Sprintf("chgrp %d %s && chmod g+r %s", x.group(), path, path)}
}

// ancestors returns the directories above a file, from the root.
func ancestors(path string) (dirs []string) {
	for dir := filepath.Dir(path); ; dir = filepath.Dir(dir) {
		dirs = append(dirs, dir)
		if dir == filepath.Dir(dir) {
			slices.Reverse(dirs)
			return dirs
		}
	}
}

func (x *examiner) who() string {
	if x.as != nil {
		return fmt.Sprintf("uid %d", x.as.Uid)
	}
	return fmt.Sprintf("uid %d", os.Geteuid())
}

func (x *examiner) group() int {
	if x.as != nil {
		return int(x.as.Gid)
	}
	return os.Getegid()
}
