package limits

import (
	"io/fs"
	"math"
	"os"
	"path"
	"runtime"
	"strconv"
	"strings"
	"syscall"
)

// A Machine says what the machine, the cgroups of the process and its rlimits allow it. Of each the
// smallest bound counts. A Quantity of 0 is not known, or not bounded.
type Machine struct {
	Memory  Quantity // bytes; other programs may use some of it
	Threads Quantity
	Files   Quantity // file descriptors
	CPUs    Quantity // a part of a CPU counts as one
}

// A Quantity is an amount, and what bounds it, for messages.
type Quantity struct {
	N    int64
	From string // as in "memory.max of the cgroup /system.slice/x.service"
}

// lower makes q the amount n if that is less. An n below 1 says nothing.
func (q *Quantity) lower(n int64, from string) {
	if n > 0 && (q.N == 0 || n < q.N) {
		*q = Quantity{n, from}
	}
}

// Rlimits are the soft resource limits of a process. A field of 0 bounds nothing.
type Rlimits struct {
	Files     uint64 // RLIMIT_NOFILE
	Processes uint64 // RLIMIT_NPROC, of the user; it does not bind root
}

const rlimitNPROC = 6 // not in package syscall

// ThisMachine returns what this process is allowed now.
func ThisMachine() Machine {
	var r Rlimits
	var l syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &l) == nil {
		r.Files = l.Cur
	}
	if os.Getuid() != 0 && syscall.Getrlimit(rlimitNPROC, &l) == nil {
		r.Processes = l.Cur
	}
	return ReadMachine(os.DirFS("/"), r, runtime.NumCPU())
}

// ReadMachine returns what the files below root, which is like "/", and the resource limits allow a
// process that may run on that many CPUs. It skips what it cannot read.
func ReadMachine(root fs.FS, r Rlimits, cpus int) Machine {
	var m Machine
	m.CPUs.lower(int64(cpus), "the CPUs that the process may run on")
	m.Memory.lower(memTotal(root), "the memory of the machine")
	for _, name := range []string{"threads-max", "pid_max"} {
		m.Threads.lower(number(root, "proc/sys/kernel/"+name), "kernel."+name)
	}
	m.Threads.lower(clamp(r.Processes), "RLIMIT_NPROC")
	m.Files.lower(clamp(r.Files), "RLIMIT_NOFILE")
	for _, h := range hierarchies(root) {
		for _, dir := range h.dirs() {
			m.readGroup(root, h, dir)
		}
	}
	return m
}

// readGroup takes in the bounds of one cgroup.
func (m *Machine) readGroup(root fs.FS, h hierarchy, dir string) {
	of := " of the cgroup " + path.Join("/", strings.TrimPrefix(dir, h.mount))
	file := func(q *Quantity, name string) { q.lower(number(root, path.Join(dir, name)), name+of) }
	if h.v2 {
		file(&m.Memory, "memory.max")
		file(&m.Memory, "memory.high") // above it the kernel slows the process down
		file(&m.Threads, "pids.max")
		quota, period, _ := strings.Cut(text(root, path.Join(dir, "cpu.max")), " ")
		m.CPUs.lower(wholeCPUs(parse(quota), parse(period)), "cpu.max"+of)
		return
	}
	if h.controllers["memory"] {
		file(&m.Memory, "memory.limit_in_bytes")
	}
	if h.controllers["pids"] {
		file(&m.Threads, "pids.max")
	}
	if h.controllers["cpu"] {
		quota, period := number(root, path.Join(dir, "cpu.cfs_quota_us")), number(root, path.Join(dir, "cpu.cfs_period_us"))
		m.CPUs.lower(wholeCPUs(quota, period), "cpu.cfs_quota_us"+of)
	}
}

// wholeCPUs returns quota/period, rounded up, or 0 if one of them says nothing.
func wholeCPUs(quota, period int64) int64 {
	if quota <= 0 || period <= 0 {
		return 0
	}
	return (quota + period - 1) / period
}

// A hierarchy is a mounted cgroup hierarchy, and where the process is in it.
type hierarchy struct {
	v2          bool
	controllers map[string]bool // of version 1
	mount       string          // directory of the mount, without the first slash
	group       string          // the group of the process below mount; "." is mount itself
}

// dirs returns the directories of the group and of all its ancestors that the process can see.
func (h hierarchy) dirs() []string {
	var list []string
	for g := h.group; ; g = path.Dir(g) {
		list = append(list, path.Join(h.mount, g))
		if g == "." {
			return list
		}
	}
}

// hierarchies returns the cgroup hierarchies of the process, from proc/self (cgroups(7)).
func hierarchies(root fs.FS) []hierarchy {
	groups := map[string]string{} // by controller; "" is version 2
	for line := range strings.Lines(text(root, "proc/self/cgroup")) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) == 3 {
			for name := range strings.SplitSeq(f[1], ",") {
				groups[name] = f[2]
			}
		}
	}
	var list []hierarchy
	for line := range strings.Lines(text(root, "proc/self/mountinfo")) {
		// 35 31 0:32 /root /mount/point rw,relatime [optional fields] - cgroup source rw,memory
		before, after, _ := strings.Cut(strings.TrimSpace(line), " - ")
		f, g := strings.Fields(before), strings.Fields(after)
		if len(f) < 5 || len(g) < 3 || g[0] != "cgroup" && g[0] != "cgroup2" {
			continue
		}
		h := hierarchy{v2: g[0] == "cgroup2", controllers: map[string]bool{}, mount: strings.TrimPrefix(f[4], "/")}
		group, known := groups[""], h.v2
		for name := range strings.SplitSeq(g[2], ",") {
			if p, ok := groups[name]; ok && !h.v2 {
				group, known, h.controllers[name] = p, true, true
			}
		}
		if known {
			h.group = below(f[3], group)
			list = append(list, h)
		}
	}
	return list
}

// below returns the path of a group relative to the root of its mount; "." if it is not below that,
// as in a container that sees only its own part of the hierarchy.
func below(mountRoot, group string) string {
	rest, ok := strings.CutPrefix(group, strings.TrimSuffix(mountRoot, "/")+"/")
	if rel := path.Clean(rest); ok && fs.ValidPath(rel) {
		return rel
	}
	return "."
}

// memTotal returns MemTotal of /proc/meminfo in bytes.
func memTotal(root fs.FS) int64 {
	for line := range strings.Lines(text(root, "proc/meminfo")) {
		if f := strings.Fields(line); len(f) >= 2 && f[0] == "MemTotal:" {
			return parse(f[1]) << 10
		}
	}
	return 0
}

func number(root fs.FS, name string) int64 { return parse(text(root, name)) }

// parse returns a number that bounds something, and 0 for words like "max" and for "-1".
func parse(s string) int64 {
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0
	}
	return clamp(n)
}

// clamp returns n as an int64, and 0 for numbers so large that they mean no bound.
func clamp(n uint64) int64 {
	if n >= math.MaxInt64>>1 {
		return 0
	}
	return int64(n)
}

func text(root fs.FS, name string) string {
	b, err := fs.ReadFile(root, name)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}
