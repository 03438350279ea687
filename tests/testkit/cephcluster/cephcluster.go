// Package cephcluster brings small Ceph clusters up on this machine, from Debian's packages.
package cephcluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"text/template"
	"time"
)

// packages has the programs of a cluster, in Debian 12.
const packages = "ceph-mon ceph-osd ceph-common"

// Pool is the pool of images that every cluster has.
const Pool = "rbd"

// Options describe a cluster.
type Options struct {
	OSDs      int  // 1 and more
	Copies    int  // of each object, at most OSDs
	GiB       int  // of each OSD
	BlueStore bool // on a sparse file; otherwise the OSDs have their objects in memory
}

// A Cluster is one monitor and some OSDs on the loopback, as child processes. All its files are in one directory.
type Cluster struct {
	Options
	Dir  string
	Conf string // path of ceph.conf
	All  []*Daemon
}

// A Daemon is a process of a cluster.
type Daemon struct {
	Name  string // mon.a or osd.N
	cmd   *exec.Cmd
	ended chan struct{}
}

// Ended reports whether the process is over.
func (d *Daemon) Ended() bool {
	select {
	case <-d.ended:
		return true
	default:
		return false
	}
}

// Missing returns an error if a program of a cluster is not installed.
func Missing() error {
	for _, p := range []string{"ceph-mon", "ceph-osd", "ceph-authtool", "monmaptool", "ceph", "rbd"} {
		if _, err := exec.LookPath(p); err != nil {
			return fmt.Errorf("%w. apt-get install %s", err, packages)
		}
	}
	return nil
}

// The monitor is alone, so nothing has to wait for elections. A PG is readable for a lease of osd heartbeat grace and the ratio, which other OSDs
// renew. With one copy nobody does, and after a longer stall of the machine the PG would stay unreadable.
var confText = template.Must(template.New("").Parse(`[global]
fsid = {{.FSID}}
mon host = [v2:127.0.0.1:{{.Port}}/0]
public network = 127.0.0.0/8
cluster network = 127.0.0.0/8
run dir = {{.Dir}}
keyring = {{.Dir}}/keyring
admin socket = {{.Dir}}/$name.asok
log file = {{.Dir}}/$name.log
log to stderr = false
err to stderr = true
auth allow insecure global id reclaim = false
mon allow pool size one = true
mon allow pool delete = true
mon max pg per osd = 1000
mon data avail warn = 2
mon data avail crit = 1
osd pool default size = {{.Copies}}
osd pool default min size = 1
osd pool default pg num = 16
osd pool default pgp num = 16
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd pool default read lease ratio = {{.Lease}}
osd heartbeat grace = 5
[client]
admin socket =
log file =
[mon]
mon data = {{.Dir}}/$name
mon cluster log file = {{.Dir}}/cluster.log
paxos propose interval = 0.05
paxos min wait = 0.01
mon osd down out interval = 600
mon osd min down reporters = 1
mon osd reporter subtree level = osd
[osd]
osd data = {{.Dir}}/$name
osd objectstore = {{.Store}}
memstore device bytes = {{.Bytes}}
bluestore block size = {{.Bytes}}
bluestore cache autotune = false
bluestore cache size = 134217728
osd op num shards = 2
osd op num threads per shard = 2
osd heartbeat interval = 1
osd max markdown count = 100000
`))

// Start brings a cluster up in an empty directory, with the pool rbd. After an error nothing runs.
func Start(ctx context.Context, dir string, o Options) (c *Cluster, err error) {
	if err := Missing(); err != nil {
		return nil, err
	}
	if o.OSDs < 1 || o.Copies < 1 || o.Copies > o.OSDs {
		return nil, fmt.Errorf("%d copies on %d OSDs: want at least one of each, and no more copies than OSDs", o.Copies, o.OSDs)
	}
	if list, err := os.ReadDir(dir); err != nil || len(list) > 0 {
		return nil, errors.Join(err, fmt.Errorf("%s is not an empty directory", dir))
	}
	c = &Cluster{Options: o, Dir: dir, Conf: filepath.Join(dir, "ceph.conf")}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.Stop())
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	if err := c.monitor(ctx); err != nil {
		return nil, fmt.Errorf("monitor: %w", err)
	}
	for i := range o.OSDs {
		if err := c.osd(ctx, i); err != nil {
			return nil, fmt.Errorf("osd.%d: %w", i, err)
		}
	}
	up := fmt.Sprintf(`"num_up_osds":%d,`, o.OSDs)
	if err := c.until(ctx, func() bool {
		out, err := c.Run(ctx, "ceph", "osd", "stat", "-f", "json")
		return err == nil && strings.Contains(string(out), up)
	}); err != nil {
		return nil, fmt.Errorf("OSDs: %w", err)
	}
	if _, err := c.Run(ctx, "ceph", "osd", "pool", "create", Pool, "16", "16"); err != nil {
		return nil, err
	}
	if _, err := c.Run(ctx, "rbd", "pool", "init", Pool); err != nil {
		return nil, err
	}
	return c, nil
}

// monitor makes the keys and the monitor, and starts it.
func (c *Cluster) monitor(ctx context.Context) error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	port := l.Addr().(*net.TCPAddr).Port
	l.Close()
	fsid, err := uuid()
	if err != nil {
		return err
	}
	store, lease := "memstore", "0.8"
	if c.BlueStore {
		store = "bluestore"
	}
	if c.Copies == 1 {
		lease = "120"
	}
	var text bytes.Buffer
	if err := confText.Execute(&text, map[string]any{
		"FSID": fsid, "Port": port, "Dir": c.Dir, "Copies": c.Copies, "Lease": lease, "Store": store, "Bytes": int64(c.GiB) << 30,
	}); err != nil {
		return err
	}
	if err := os.WriteFile(c.Conf, text.Bytes(), 0o600); err != nil {
		return err
	}
	keyring, monmap := filepath.Join(c.Dir, "keyring"), filepath.Join(c.Dir, "monmap")
	if _, err := c.Run(ctx, "ceph-authtool", "-C", keyring); err != nil {
		return err
	}
	keys := map[string][]string{
		"mon.":         {"--cap", "mon", "allow *"},
		"client.admin": {"--cap", "mon", "allow *", "--cap", "osd", "allow *"},
	}
	for i := range c.OSDs {
		keys[fmt.Sprintf("osd.%d", i)] = []string{"--cap", "mon", "allow profile osd", "--cap", "osd", "allow *"}
	}
	for name, caps := range keys {
		if _, err := c.Run(ctx, "ceph-authtool", append([]string{keyring, "--gen-key", "-n", name}, caps...)...); err != nil {
			return err
		}
	}
	if _, err := c.Run(ctx, "monmaptool", "--create", "--fsid", fsid, "--addv", "a", fmt.Sprintf("[v2:127.0.0.1:%d]", port), monmap); err != nil {
		return err
	}
	if err := os.Mkdir(filepath.Join(c.Dir, "mon.a"), 0o700); err != nil {
		return err
	}
	if _, err := c.Run(ctx, "ceph-mon", "--mkfs", "-i", "a", "-c", c.Conf, "--monmap", monmap, "--keyring", keyring); err != nil {
		return err
	}
	if err := c.begin("mon.a"); err != nil {
		return err
	}
	return c.until(ctx, func() bool {
		_, err := c.Run(ctx, "ceph", "quorum_status")
		return err == nil
	})
}

// osd makes an OSD and starts it.
func (c *Cluster) osd(ctx context.Context, i int) error {
	id, err := uuid()
	if err != nil {
		return err
	}
	n := fmt.Sprint(i)
	if _, err := c.Run(ctx, "ceph", "osd", "new", id, n); err != nil {
		return err
	}
	if err := os.Mkdir(filepath.Join(c.Dir, "osd."+n), 0o700); err != nil {
		return err
	}
	if _, err := c.Run(ctx, "ceph-osd", "--mkfs", "-i", n, "-c", c.Conf, "--osd-uuid", id); err != nil {
		return err
	}
	return c.begin("osd." + n)
}

// begin starts the daemon of that name.
func (c *Cluster) begin(name string) error {
	kind, id, _ := strings.Cut(name, ".")
	log, err := os.OpenFile(filepath.Join(c.Dir, name+".out"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	d := &Daemon{Name: name, cmd: exec.Command("ceph-"+kind, "-f", "-i", id, "-c", c.Conf), ended: make(chan struct{})}
	d.cmd.Stdout, d.cmd.Stderr = log, log
	// Of a group of its own, so that a Ctrl-C is not for it. The signal is sent at the end of the thread that has started it.
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		err := d.cmd.Start()
		started <- err
		if err == nil {
			d.cmd.Wait()
			close(d.ended)
		}
	}()
	if err := <-started; err != nil {
		return err
	}
	if i := slices.IndexFunc(c.All, func(d *Daemon) bool { return d.Name == name }); i >= 0 {
		c.All[i] = d
	} else {
		c.All = append(c.All, d)
	}
	return nil
}

// find returns the daemon of that name.
func (c *Cluster) find(name string) *Daemon {
	for _, d := range c.All {
		if d.Name == name {
			return d
		}
	}
	panic("no daemon " + name)
}

// Signal sends a signal to a daemon. After SIGKILL it is gone.
func (c *Cluster) Signal(name string, s syscall.Signal) {
	d := c.find(name)
	d.cmd.Process.Signal(s)
	if s == syscall.SIGKILL {
		<-d.ended
	}
}

// Restart starts an OSD that was killed, and waits until all objects have all their copies. The OSDs of a cluster without BlueStore have lost theirs.
func (c *Cluster) Restart(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	if _, err := c.Run(ctx, "ceph", "osd", "down", name); err != nil { // it may not have been noticed yet
		return err
	}
	if err := c.begin(name); err != nil {
		return err
	}
	var osds struct {
		OSDs []struct {
			Up int `json:"up"`
		} `json:"osds"`
		Pools []struct {
			Pool int `json:"pool"`
			PGs  int `json:"pg_num"`
		} `json:"pools"`
	}
	if err := c.until(ctx, func() bool {
		out, err := c.Run(ctx, "ceph", "osd", "dump", "-f", "json")
		up := 0
		if err == nil && json.Unmarshal(out, &osds) == nil {
			for _, o := range osds.OSDs {
				up += o.Up
			}
		}
		return up == c.OSDs
	}); err != nil {
		return err
	}
	for _, p := range osds.Pools {
		for n := range p.PGs { // there is no manager that would know of all
			if err := c.until(ctx, func() bool {
				out, err := c.Run(ctx, "ceph", "tell", fmt.Sprintf("%d.%x", p.Pool, n), "query", "-f", "json")
				var pg struct {
					State string `json:"state"`
				}
				return err == nil && json.Unmarshal(out, &pg) == nil && strings.HasPrefix(pg.State, "active+clean")
			}); err != nil {
				return err
			}
		}
	}
	return nil
}

// Freeze stops daemons, all if none is named, and returns a function that lets them continue.
func (c *Cluster) Freeze(names ...string) (thaw func()) {
	if len(names) == 0 {
		for _, d := range c.All {
			names = append(names, d.Name)
		}
	}
	for _, n := range names {
		c.Signal(n, syscall.SIGSTOP)
	}
	return func() {
		for _, n := range slices.Backward(names) {
			c.Signal(n, syscall.SIGCONT)
		}
	}
}

// Stop ends all daemons, the monitor last.
func (c *Cluster) Stop() error {
	var errs error
	for i := len(c.All) - 1; i >= 0; i-- {
		d := c.All[i]
		d.cmd.Process.Signal(syscall.SIGTERM)
		d.cmd.Process.Signal(syscall.SIGCONT)
		select {
		case <-d.ended:
		case <-time.After(10 * time.Second):
			errs = errors.Join(errs, fmt.Errorf("%s has not ended within 10 s of SIGTERM, and was killed", d.Name))
			c.Signal(d.Name, syscall.SIGKILL)
		}
	}
	return errs
}

// until waits until done returns true.
func (c *Cluster) until(ctx context.Context, done func() bool) error {
	for !done() {
		for _, d := range c.All {
			select {
			case <-d.ended:
				return fmt.Errorf("%s ended: %v. See %s/%s.out and .log", d.Name, d.cmd.ProcessState, c.Dir, d.Name)
			default:
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("not in time. See %s/*.log: %w", c.Dir, ctx.Err())
		case <-time.After(100 * time.Millisecond):
		}
	}
	return nil
}

// Run runs a program of Ceph as client.admin, and returns its output.
func (c *Cluster) Run(ctx context.Context, program string, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = append(os.Environ(), "CEPH_CONF="+c.Conf, "CEPH_ARGS=")
	var errOut bytes.Buffer
	cmd.Stderr = &errOut
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("%s %s: %w: %s", program, strings.Join(args, " "), err, bytes.TrimSpace(errOut.Bytes()))
	}
	return out, err
}

// uuid returns a new UUID.
func uuid() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/uuid")
	return strings.TrimSpace(string(b)), err
}
