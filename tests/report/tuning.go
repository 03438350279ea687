package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
	"github.com/iser-target/iser-target/tests/testkit/fio"
	"github.com/iser-target/iser-target/tests/testkit/ports"
)

// An experiment measures what one setting changes. docs/tuning.md shows the results.
type experiment struct {
	name     string
	jobs     []tuneJob
	variants []variant
}

// A tuneJob is a job of bench over one transport.
type tuneJob struct {
	job
	scheme, flags string
}

// A variant is one value of the setting. The first one is what others are compared with.
type variant struct {
	name   string
	limits string // keys of limits
	target string // keys of the target
	file   bool   // the LUN is a file on a tmpfs, not memory
	fs     string // the LUN is a file on a file system of that type, which mkfs(8) knows
	flags  string // more of bench
	cable  *cable // nil: the loopback
	quota  int    // CPU time of the target in percent of one CPU; 0: no limit
	procs  int    // GOMAXPROCS of the target; 0: one for each CPU
	luns   int    // how many; 0: one
	debug  int    // port of the debug server; 0: none
}

// A cable is how the network between the two namespaces is set.
type cable struct {
	mtu        int
	offload    bool   // TSO, GSO and GRO
	congestion string // control of TCP, a name of net.ipv4.tcp_available_congestion_control; "": that of new namespaces
}

func read(size string, depth int) string {
	return fmt.Sprintf("--rw randread --bs %s --iodepth %d", size, depth)
}

func write(size string, depth int) string {
	return fmt.Sprintf("--rw randwrite --bs %s --iodepth %d", size, depth)
}

// both returns a job over each transport.
func both(name string, large bool, flags string) []tuneJob {
	return []tuneJob{{job{name + ", TCP", "", large}, "iscsi", flags}, {job{name + ", iSER", "", large}, "iser", flags}}
}

var experiments = []experiment{
	{"depth", both("read 4k", false, "--rw randread --bs 4k"), depths(1, 4, 16, 32, 64, 128)},
	{"window", both("read 4k, 128 deep", false, read("4k", 128)), []variant{
		{name: "`queue_depth: 128`", limits: "queue_depth: 128"},
		{name: "`queue_depth: 32`", limits: "queue_depth: 32"},
		{name: "`queue_depth: 8`", limits: "queue_depth: 8"},
	}},
	{"mtu", slices.Concat(both("read 128k, 16 deep", true, read("128k", 16)), both("write 128k, 16 deep", true, write("128k", 16)), both("read 4k, 32 deep", false, read("4k", 32))), []variant{
		{name: "MTU 1500, TSO, GSO and GRO on", cable: &cable{mtu: 1500, offload: true}},
		{name: "MTU 9000, TSO, GSO and GRO on", cable: &cable{mtu: 9000, offload: true}},
		{name: "MTU 1500, off", cable: &cable{mtu: 1500}},
		{name: "MTU 9000, off", cable: &cable{mtu: 9000}},
	}},
	{"congestion", slices.Concat(both("read 4k, 32 deep", false, read("4k", 32)), both("read 256k, 32 deep", true, read("256k", 32)), both("write 256k, 16 deep", true, write("256k", 16))), []variant{
		{name: "CUBIC", cable: &cable{mtu: 1500, offload: true, congestion: "cubic"}},
		{name: "Reno", cable: &cable{mtu: 1500, offload: true, congestion: "reno"}},
		{name: "BBR", cable: &cable{mtu: 1500, offload: true, congestion: "bbr"}},
	}},
	{"memory", slices.Concat(both("read 1m, 32 deep", true, read("1m", 32)), both("write 1m, 32 deep", true, write("1m", 32))), []variant{
		{name: "`connection_memory: 64MiB`", limits: "connection_memory: 64MiB"},
		{name: "`connection_memory: 16MiB`", limits: "connection_memory: 16MiB"},
		{name: "`connection_memory: 4MiB`", limits: "connection_memory: 4MiB"},
	}},
	{"fpdu", []tuneJob{
		{job{"read 4k, 32 deep, iSER", "", false}, "iser", read("4k", 32)},
		{job{"read 128k, 16 deep, iSER", "", true}, "iser", read("128k", 16)},
	}, []variant{
		{name: "`max_fpdu: 64768`", limits: "max_fpdu: 64768"},
		{name: "`max_fpdu: 8192`", limits: "max_fpdu: 8192"},
		{name: "`max_fpdu: 1440`", limits: "max_fpdu: 1440"},
		{name: "`max_fpdu: 512`", limits: "max_fpdu: 512"},
	}},
	{"store", slices.Concat(both("read 4k, 32 deep", false, read("4k", 32)), both("read 128k, 16 deep", true, read("128k", 16)), both("write 128k, 16 deep", true, write("128k", 16))), []variant{
		{name: "memory"},
		{name: "file in the page cache", file: true},
	}},
	{"filesystem", []tuneJob{
		{job{"read 4k, 32 deep, TCP", "", false}, "iscsi", read("4k", 32)},
		{job{"read 64k, 32 deep, TCP", "", true}, "iscsi", read("64k", 32)},
		{job{"write 4k, 32 deep, TCP", "", false}, "iscsi", write("4k", 32)},
		{job{"write 64k, 16 deep, TCP", "", true}, "iscsi", write("64k", 16)},
	}, []variant{
		{name: "ext4", fs: "ext4"},
		{name: "XFS", fs: "xfs"},
		{name: "btrfs", fs: "btrfs"},
		{name: "tmpfs", file: true},
	}},
	{"burst", both("write 64k, 8 deep", true, write("64k", 8)), []variant{
		{name: "`initial_r2t: true`", target: "initial_r2t: true"},
		{name: "`initial_r2t: false`", target: "initial_r2t: false"},
	}},
	{"polling", slices.Concat(both("read 4k, 1 deep", false, read("4k", 1)), both("write 4k, 1 deep", false, write("4k", 1)), both("read 4k, 32 deep", false, read("4k", 32))), []variant{
		{name: "`poll_time: 0`"},
		{name: "`poll_time: 100us`", limits: "poll_time: 100us"},
		{name: "`poll_time: 0`, `--hipri`", flags: "--hipri"},
		{name: "`poll_time: 100us`, `--hipri`", limits: "poll_time: 100us", flags: "--hipri"},
	}},
	{"procs", slices.Concat(both("read 4k, 1 deep", false, read("4k", 1)), both("read 4k, 32 deep", false, read("4k", 32)), both("write 64k, 8 deep", true, write("64k", 8))), []variant{
		{name: "one for each CPU"},
		{name: "`GOMAXPROCS=1`", procs: 1},
	}},
	{"quota", both("read 4k, 32 deep", false, read("4k", 32)), []variant{
		{name: "no limit"},
		{name: "2 CPUs", quota: 200},
		{name: "1 CPU", quota: 100},
		{name: "0.5 CPU", quota: 50},
	}},
}

func depths(list ...int) (variants []variant) {
	for _, n := range list {
		variants = append(variants, variant{name: fmt.Sprint("depth ", n), flags: fmt.Sprint("--iodepth ", n)})
	}
	return variants
}

// tuning runs the experiments that names lists, or all, and prints their tables.
func tuning(ctx context.Context, w io.Writer, o *options, names []string) error {
	var chosen []experiment
	for _, e := range experiments {
		if at := slices.Index(names, e.name); at >= 0 || len(names) == 0 {
			chosen = append(chosen, e)
		}
	}
	if len(chosen) < len(names) {
		var known []string
		for _, e := range experiments {
			known = append(known, e.name)
		}
		return fmt.Errorf("-tuning: %s: the experiments are %s", strings.Join(names, ","), strings.Join(known, ","))
	}
	dir, err := os.MkdirTemp("/dev/shm", "iser-target-tuning-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	for _, e := range chosen {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		before := load()
		speed, cpu, err := e.run(ctx, o, dir)
		if err != nil {
			return fmt.Errorf("%s: %w", e.name, err)
		}
		fmt.Fprintf(w, "\n%s, %d rounds of %v, load average %s to %s, TCP congestion control %s:\n\n%s\nCPU time of the target, µs per command:\n\n%s", e.name, o.rounds, o.runtime, before, load(), congestion(),
			speed.variants(job.unit), cpu.variants(func(job) string { return "µs" }))
	}
	return nil
}

// run measures all variants in turn.
func (e *experiment) run(ctx context.Context, o *options, dir string) (speed, cpu *table, err error) {
	var columns []hostColumn
	stop := []func() error{}
	defer func() {
		for _, f := range slices.Backward(stop) {
			err = errors.Join(err, f())
		}
	}()
	var network *cables
	for i, v := range e.variants {
		if v.cable != nil && network == nil {
			if network, err = newCables(ctx); err != nil {
				return nil, nil, err
			}
			stop = append(stop, network.remove)
		}
		c, end := v.start(ctx, o, filepath.Join(dir, fmt.Sprintf("%s%d", e.name, i)), network)
		columns, stop = append(columns, c), append(stop, end)
	}
	var list []column
	for _, c := range columns {
		list = append(list, c.column)
	}
	var jobs []job
	for _, j := range e.jobs {
		jobs = append(jobs, j.job)
	}
	speed, cpu = newTable(o.rounds, list, jobs), newTable(o.rounds, list, jobs)
	for round := range o.rounds {
		for _, j := range e.jobs {
			for i := range columns {
				n := (i + round) % len(columns)
				c, v := columns[n], e.variants[n]
				o.progress("%s: round %d of %d: %s: %s", e.name, round+1, o.rounds, v.name, j.Name)
				if v.cable != nil && c.failed == nil {
					c.failed = network.set(ctx, v.cable)
				}
				c.url = j.scheme + "://" + c.url
				r, err := c.measure(ctx, o, j.flags+" "+v.flags+" --socket "+filepath.Join(dir, fmt.Sprintf("%s%d", e.name, n), "control"), false)
				speed.set(round, c.column, j.job, r, err)
				if err == nil && r.CPU == 0 {
					err = errors.New("the target did not report its CPU time")
				}
				cpu.set(round, c.column, job{Name: j.Name}, fio.Result{IOPS: r.CPU}, err)
			}
		}
	}
	return speed, cpu, nil
}

// variants returns a row for each column, with the ratio to the first one.
func (t *table) variants(unit func(job) string) string {
	var b strings.Builder
	fmt.Fprint(&b, "| |")
	for _, j := range t.jobs {
		fmt.Fprintf(&b, " %s |", cellEscape.Replace(j.Name+", "+unit(j)))
	}
	fmt.Fprintf(&b, "\n|%s\n", strings.Repeat("---|", 1+len(t.jobs)))
	for _, c := range t.columns {
		fmt.Fprintf(&b, "| %s |", c.Target)
		for _, j := range t.jobs {
			text := "not measured: " + strings.Join(t.cells[j.Name][c].reasons, "; ")
			if s, ok := t.spread(j, c); ok {
				text = s.text()
				if r, ok := t.ratio(j, c, t.columns[0]); ok && c != t.columns[0] {
					text += fmt.Sprintf(", × %.2f", r.Median)
				}
			}
			fmt.Fprintf(&b, " %s |", cellEscape.Replace(text))
		}
		b.WriteString("\n")
	}
	return b.String()
}

// start starts a target for the variant, with the files of dir. The url of the column lacks the scheme.
func (v *variant) start(ctx context.Context, o *options, dir string, network *cables) (c hostColumn, stop func() error) {
	c = hostColumn{column: column{Target: v.name}, overwrite: true}
	stop, err := func() (stop func() error, err error) {
		port, err := ports.Free()
		if err != nil {
			return nil, err
		}
		host, command := "127.0.0.1", []string{o.program, "serve", "--config", filepath.Join(dir, "config.yaml")}
		if v.cable != nil {
			host, c.prefix = cableTarget, network.exec(network.initiator)
			command = append(network.exec(network.target), command...)
		}
		if v.procs > 0 {
			command = append([]string{"env", fmt.Sprint("GOMAXPROCS=", v.procs)}, command...)
		}
		quota := func() error { return nil }
		if v.quota > 0 {
			var group string
			if group, quota, err = newQuota(v.quota); err != nil {
				return nil, err
			}
			command = append([]string{"sh", "-c", `echo $$ >"$0" && exec "$@"`, filepath.Join(group, "cgroup.procs")}, command...)
		}
		if err := v.write(dir, host, port); err != nil {
			return nil, errors.Join(err, quota())
		}
		unmount := func() error { return nil }
		if v.fs != "" {
			if unmount, err = mountImage(ctx, dir, v.fs); err != nil {
				return nil, errors.Join(err, quota())
			}
		}
		api := client.New(filepath.Join(dir, "control"))
		end, err := daemon(exec.CommandContext(ctx, command[0], command[1:]...), func() error {
			_, err := api.Portals(ctx)
			return err
		})
		if err != nil {
			return nil, errors.Join(err, unmount(), quota())
		}
		stop = func() error { return errors.Join(end(), unmount(), quota()) }
		c.url = fmt.Sprintf("%s:%d/%s/0", host, port, hostIQN)
		if v.cable != nil {
			if err := network.set(ctx, v.cable); err != nil {
				return nil, errors.Join(err, stop())
			}
		}
		// Blocks that were never written are faster to read.
		for id := range max(v.luns, 1) {
			fill := c
			fill.url = fmt.Sprintf("iscsi://%s:%d/%s/%d", host, port, hostIQN, id)
			if _, err := fill.measure(ctx, o, "--rw write --bs 1m --iodepth 8", true); err != nil {
				return nil, errors.Join(err, stop())
			}
		}
		return stop, nil
	}()
	if err != nil {
		c.failed = err
		return c, func() error { return nil }
	}
	return c, stop
}

// write writes the files of the target.
func (v *variant) write(dir, host string, port int) error {
	var luns []string
	for id := range max(v.luns, 1) {
		lun := fmt.Sprintf("{id: %d, backend: memory, size: %d}", id, tuneSize)
		if v.file || v.fs != "" {
			lun = fmt.Sprintf("{id: %d, backend: file, path: %s/disk%d, size: %d}", id, v.files(dir), id, tuneSize)
		}
		luns = append(luns, lun)
	}
	text := fmt.Sprintf("portals: [{listen: \"%s:%d\"}]\ntargets:\n  - name: %s\n    initiators: [\"*\"]\n    luns: [%s]\n", host, port, hostIQN, strings.Join(luns, ", "))
	if v.debug != 0 {
		text += fmt.Sprintf("debug: {listen: \"127.0.0.1:%d\"}\n", v.debug)
	}
	if v.target != "" {
		text += "    " + v.target + "\n"
	}
	if v.limits != "" {
		text += "limits:\n  " + v.limits + "\n"
	}
	text += fmt.Sprintf("state_dir: %s/state\ncontrol: {socket: %[1]s/control}\n", dir)
	return errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(filepath.Join(dir, "config.yaml"), []byte(text), 0o600))
}

// files returns the directory in dir that has the files of LUNs.
func (v *variant) files(dir string) string {
	if v.fs != "" {
		return filepath.Join(dir, mounted)
	}
	return dir
}

// mounted is where mountImage mounts, and imageSize the size of the file system in bytes, of which XFS takes 300 MiB at least.
const (
	mounted   = "mounted"
	imageSize = 512 << 20
)

// mountImage makes a file system of that type in a sparse file of dir, and mounts it at mounted in dir. unmount ends that.
func mountImage(ctx context.Context, dir, fs string) (unmount func() error, err error) {
	image, at := filepath.Join(dir, "image"), filepath.Join(dir, mounted)
	f, err := os.Create(image)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(f.Truncate(imageSize), f.Close(), os.Mkdir(at, 0o700)); err != nil {
		return nil, err
	}
	if _, err := output(ctx, "mkfs."+fs, "-q", image); err != nil {
		return nil, err
	}
	if _, err := output(ctx, "mount", "-o", "loop", image, at); err != nil {
		return nil, err
	}
	return func() error {
		_, err := output(context.Background(), "umount", at)
		return err
	}, nil
}

// tuneSize is that of the LUNs, in bytes. bench writes it all within a second.
const tuneSize = 64 << 20

// cables is two network namespaces with a pair of veth devices between them.
type cables struct{ target, initiator string }

const (
	cableTarget    = "192.0.2.1"
	cableInitiator = "192.0.2.2"
	cableNetwork   = "192.0.2.0/24"
)

func newCables(ctx context.Context) (*cables, error) {
	n := &cables{fmt.Sprintf("tuning-t%d", os.Getpid()), fmt.Sprintf("tuning-i%d", os.Getpid())}
	for _, args := range []string{
		"netns add " + n.target,
		"netns add " + n.initiator,
		"link add cable netns " + n.target + " type veth peer name cable netns " + n.initiator,
		"-n " + n.target + " addr add " + cableTarget + "/24 dev cable",
		"-n " + n.initiator + " addr add " + cableInitiator + "/24 dev cable",
		"-n " + n.target + " link set lo up",
		"-n " + n.target + " link set cable up",
		"-n " + n.initiator + " link set cable up",
	} {
		if _, err := output(ctx, "ip", strings.Fields(args)...); err != nil {
			return nil, errors.Join(err, n.remove())
		}
	}
	return n, nil
}

func (n *cables) exec(namespace string) []string { return []string{"ip", "netns", "exec", namespace} }

// set sets both ends. A congestion control applies to connections that are opened afterwards.
func (n *cables) set(ctx context.Context, c *cable) error {
	state := map[bool]string{true: "on", false: "off"}[c.offload]
	for namespace, address := range map[string]string{n.target: cableTarget, n.initiator: cableInitiator} {
		if _, err := output(ctx, "ip", "-n", namespace, "link", "set", "cable", "mtu", fmt.Sprint(c.mtu)); err != nil {
			return err
		}
		args := append(n.exec(namespace), "ethtool", "-K", "cable", "tso", state, "gso", state, "gro", state)
		if _, err := output(ctx, args[0], args[1:]...); err != nil {
			return err
		}
		if c.congestion == "" {
			continue
		}
		// The sysctl of a namespace takes only what tcp_allowed_congestion_control has, a route all that is available.
		if _, err := output(ctx, "ip", "-n", namespace, "route", "change", cableNetwork, "dev", "cable", "proto", "kernel", "scope", "link",
			"src", address, "congctl", c.congestion); err != nil {
			return err
		}
	}
	return nil
}

// remove removes the namespaces, and so the devices.
func (n *cables) remove() (err error) {
	for _, namespace := range []string{n.target, n.initiator} {
		if _, e := os.Stat("/run/netns/" + namespace); e == nil {
			_, e = output(context.Background(), "ip", "netns", "del", namespace)
			err = errors.Join(err, e)
		}
	}
	return err
}

// newQuota makes a control group whose processes get percent of one CPU: of version 2 where that has the controller, otherwise of version 1. remove
// removes it after they have ended.
func newQuota(percent int) (dir string, remove func() error, err error) {
	const period = 100_000 // µs
	name := fmt.Sprintf("iser-target-tuning-%d-%d", os.Getpid(), percent)
	file, text := "cpu.max", fmt.Sprintf("%d %d", percent*period/100, period)
	dir = filepath.Join("/sys/fs/cgroup", name)
	if b, err := os.ReadFile("/sys/fs/cgroup/cgroup.subtree_control"); err != nil || !slices.Contains(strings.Fields(string(b)), "cpu") {
		dir, file, text = filepath.Join("/sys/fs/cgroup/cpu", name), "cpu.cfs_quota_us", fmt.Sprint(percent*period/100)
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		return "", nil, err
	}
	remove = func() error {
		// The kernel takes some time to forget processes that have ended.
		for range 50 {
			if err = os.Remove(dir); err == nil {
				return nil
			}
			time.Sleep(20 * time.Millisecond)
		}
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o644); err != nil {
		return "", nil, errors.Join(err, remove())
	}
	return dir, remove, nil
}
