package limits

import (
	"os"
	"testing"
	"testing/fstest"
)

const (
	meminfo = "MemTotal:        8000000 kB\nMemFree:          100000 kB\n"
	v2mount = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
	v1mount = `32 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
39 31 0:36 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
`
)

var machines = []struct {
	name  string
	files map[string]string
	r     Rlimits
	want  Machine
}{
	{"nothing can be read", nil, Rlimits{}, Machine{CPUs: Quantity{4, "the CPUs that the process may run on"}}},
	{"no cgroup", map[string]string{
		"proc/meminfo": meminfo, "proc/sys/kernel/threads-max": "63000\n", "proc/sys/kernel/pid_max": "32768\n",
	}, Rlimits{Files: 1 << 20, Processes: 1<<64 - 1}, Machine{
		Memory:  Quantity{8000000 << 10, "the memory of the machine"},
		Threads: Quantity{32768, "kernel.pid_max"},
		Files:   Quantity{1 << 20, "RLIMIT_NOFILE"},
		CPUs:    Quantity{4, "the CPUs that the process may run on"},
	}},
	{"version 2, the slice is smaller", map[string]string{
		"proc/meminfo": meminfo, "proc/self/cgroup": "0::/a.slice/b.service\n", "proc/self/mountinfo": v2mount,
		"sys/fs/cgroup/a.slice/memory.max":            "536870912\n",
		"sys/fs/cgroup/a.slice/b.service/memory.max":  "max\n",
		"sys/fs/cgroup/a.slice/b.service/memory.high": "1073741824\n",
		"sys/fs/cgroup/a.slice/b.service/pids.max":    "4915\n",
		"sys/fs/cgroup/a.slice/b.service/cpu.max":     "150000 100000\n",
		"sys/fs/cgroup/a.slice/cpu.max":               "max 100000\n",
	}, Rlimits{Processes: 5000}, Machine{
		Memory:  Quantity{512 << 20, "memory.max of the cgroup /a.slice"},
		Threads: Quantity{4915, "pids.max of the cgroup /a.slice/b.service"},
		CPUs:    Quantity{2, "cpu.max of the cgroup /a.slice/b.service"},
	}},
	{"version 2, memory.high is smaller", map[string]string{
		"proc/self/cgroup": "0::/x\n", "proc/self/mountinfo": v2mount,
		"sys/fs/cgroup/x/memory.max": "2000000\n", "sys/fs/cgroup/x/memory.high": "1000000\n",
	}, Rlimits{Processes: 5000}, Machine{
		Memory:  Quantity{1000000, "memory.high of the cgroup /x"},
		Threads: Quantity{5000, "RLIMIT_NPROC"},
		CPUs:    Quantity{4, "the CPUs that the process may run on"},
	}},
	{"version 1", map[string]string{
		"proc/meminfo": meminfo, "proc/self/mountinfo": v1mount,
		"proc/self/cgroup":                               "8:pids:/p\n4:memory:/m/n\n2:cpu,cpuacct:/c\n0::/\n",
		"sys/fs/cgroup/memory/memory.limit_in_bytes":     "9223372036854771712\n",
		"sys/fs/cgroup/memory/m/memory.limit_in_bytes":   "268435456\n",
		"sys/fs/cgroup/memory/m/n/memory.limit_in_bytes": "9223372036854771712\n",
		"sys/fs/cgroup/pids/p/pids.max":                  "100\n",
		"sys/fs/cgroup/cpu,cpuacct/c/cpu.cfs_quota_us":   "50000\n",
		"sys/fs/cgroup/cpu,cpuacct/c/cpu.cfs_period_us":  "100000\n",
		"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us":     "-1\n",
		"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us":    "100000\n",
	}, Rlimits{}, Machine{
		Memory:  Quantity{256 << 20, "memory.limit_in_bytes of the cgroup /m"},
		Threads: Quantity{100, "pids.max of the cgroup /p"},
		CPUs:    Quantity{1, "cpu.cfs_quota_us of the cgroup /c"},
	}},
	{"a container sees its own part as the root", map[string]string{
		"proc/self/cgroup":         "0::/docker/abc\n",
		"proc/self/mountinfo":      "30 23 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup ro\n",
		"sys/fs/cgroup/memory.max": "1000000\n",
	}, Rlimits{}, Machine{
		Memory: Quantity{1000000, "memory.max of the cgroup /"},
		CPUs:   Quantity{4, "the CPUs that the process may run on"},
	}},
	{"the group is outside of the namespace", map[string]string{
		"proc/self/cgroup": "0::/../other\n", "proc/self/mountinfo": v2mount,
		"sys/fs/cgroup/memory.max": "1000000\n", "sys/fs/cgroup/other/memory.max": "5\n",
	}, Rlimits{}, Machine{
		Memory: Quantity{1000000, "memory.max of the cgroup /"},
		CPUs:   Quantity{4, "the CPUs that the process may run on"},
	}},
	{"lines that mean nothing", map[string]string{
		"proc/meminfo": "MemTotal:\nMemTotal: many kB\n", "proc/self/cgroup": "x\n0::\n",
		"proc/self/mountinfo": "1 2 3\n - cgroup2\n",
	}, Rlimits{}, Machine{CPUs: Quantity{4, "the CPUs that the process may run on"}}},
}

func TestReadMachine(t *testing.T) {
	for _, tc := range machines {
		root := fstest.MapFS{}
		for name, data := range tc.files {
			root[name] = &fstest.MapFile{Data: []byte(data)}
		}
		if got := ReadMachine(root, tc.r, 4); got != tc.want {
			t.Errorf("%s:\n got %+v\nwant %+v", tc.name, got, tc.want)
		}
	}
}

func TestThisMachine(t *testing.T) {
	m := ThisMachine()
	if m.CPUs.N < 1 || m.Files.N < 1 || m.Threads.N < 1 {
		t.Errorf("%+v", m)
	}
	if _, err := os.Stat("/proc/meminfo"); err == nil && m.Memory.N < 1<<20 {
		t.Errorf("memory: %+v", m.Memory)
	}
}
