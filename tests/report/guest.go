package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/iser-target/iser-target/tests/interop/vm"
	"github.com/iser-target/iser-target/tests/testkit/fio"
)

const (
	guestSize   = 64 << 20
	bootLimit   = 10 * time.Minute // the machine is emulated, and often busy
	startLimit  = 5 * time.Minute
	loginLimit  = 3 * time.Minute
	guestMemory = 1536 // MiB: the files of three targets are on a tmpfs, and two more LUNs are in memory
)

// bringUp makes the initiator. Initiator and targets meet on the address of a device without a network behind it, because LIO serves iSER only in the first
// network namespace. The kernel carries what they send over lo. siw does not work on lo itself.
const bringUp = `
hostname guest
ip link set lo up
modprobe -a siw ib_iser ib_uverbs rdma_ucm sd_mod scsi_dh_alua iscsi_tcp dummy
ip link add d0 type dummy
ip link set d0 up
ip addr add 192.0.2.1/24 dev d0
rdma link add siw0 type siw netdev d0
mkdir -p /run/lock
echo InitiatorName=iqn.2026-11.io.example:guest >/etc/iscsi/initiatorname.iscsi
cat >/etc/iscsi/iscsid.conf <<.
node.startup = manual
node.session.timeo.replacement_timeout = 120
node.conn[0].timeo.login_timeout = 60
node.conn[0].timeo.logout_timeout = 15
node.conn[0].timeo.noop_out_interval = 0
node.conn[0].timeo.noop_out_timeout = 0
node.session.initial_login_retry_max = 1
node.session.cmds_max = 128
node.session.queue_depth = 32
.
iscsid --foreground --debug 2 </dev/null >/run/iscsid.log 2>&1 &
`

// versions prints a line "NAME VERSION" for each program and the kernel.
const versions = `
echo kernel $(uname -r), Debian
echo fio $(fio --version)
echo open-iscsi $(iscsiadm --version)
echo tgt $(tgtd --version || echo not installed)
`

// A guestTarget is a target in the virtual machine.
type guestTarget struct {
	name string
	// start starts it, with its LUN in the file $FILE, unless it is in memory.
	start    string
	inMemory bool
	// port is the TCP port by transport: one for each, so that disk finds the session.
	port map[string]string
	// settings are what its documentation asks for in node records of iSER, beyond bringUp.
	settings string
}

// The targets whose LUN is in memory.
const (
	oursInMemory = ours + "-memory"
	lioInMemory  = "LIO-memory"
)

// oursInGuest returns this target, with its LUN in a file or in memory. Its goroutines have one of the two CPUs that it shares with the initiator: see
// docs/tuning.md.
func oursInGuest(name string, inMemory bool, tcp, iser string) guestTarget {
	backend := "backend: file, path: $FILE"
	if inMemory {
		backend = "backend: memory"
	}
	return guestTarget{name: name, inMemory: inMemory, start: `
cat >/run/` + name + `.yaml <<.
portals: [{listen: "192.0.2.1:` + tcp + `"}, {listen: "192.0.2.1:` + iser + `"}]
targets: [{name: "` + guestIQN + name + `", initiators: ["*"], luns: [{id: 0, ` + backend + `, size: ` + fmt.Sprint(guestSize) + `}]}]
state_dir: /run/` + name + `.state
control: {socket: /run/` + name + `.sock}
.
GOMAXPROCS=1 /run/share/iser-target serve --config /run/` + name + `.yaml </dev/null >/run/` + name + `.log 2>&1 &
await grep -q msg=serving /run/` + name + `.log
`, port: map[string]string{"TCP": tcp, "iSER": iser}, settings: "-n node.conn[0].iscsi.MaxXmitDataSegmentLength -v 65536"}
}

// lioInGuest returns LIO, with its LUN in a file or in memory.
func lioInGuest(name string, inMemory bool, tcp, iser string) guestTarget {
	plugin, control := "fileio", "fd_dev_name=$FILE,fd_dev_size=$(stat -c %s $FILE),fd_buffered_io=1"
	if inMemory {
		plugin, control = "rd_mcp", fmt.Sprint("rd_pages=", guestSize/4096)
	}
	return guestTarget{name: name, inMemory: inMemory, start: `
modprobe -a target_core_mod target_core_file iscsi_target_mod ib_isert
mountpoint -q /sys/kernel/config || mount -t configfs none /sys/kernel/config
core=/sys/kernel/config/target/core/` + plugin + `_0/disk
mkdir -p $core /sys/kernel/config/target/iscsi
echo ` + control + ` >$core/control
echo 1 >$core/enable
tpg=/sys/kernel/config/target/iscsi/` + guestIQN + name + `/tpgt_1
mkdir -p $tpg/lun/lun_0
ln -s $core $tpg/lun/lun_0/disk
echo 0 >$tpg/attrib/authentication
echo 1 >$tpg/attrib/generate_node_acls
echo 0 >$tpg/attrib/demo_mode_write_protect
mkdir $tpg/np/192.0.2.1:` + tcp + `
unshare --net bash -euc "ip link set lo up; ip addr add 192.0.2.1/32 dev lo; mkdir $tpg/np/192.0.2.1:` + iser + `"
echo 1 >$tpg/np/192.0.2.1:` + iser + `/iser
echo 1 >$tpg/enable
`, port: map[string]string{"TCP": tcp, "iSER": iser}} // its I/O fails with longer segments
}

// ifaces are the interfaces of open-iscsi.
var ifaces = map[string]string{"TCP": "default", "iSER": "iser"}

// guestTargets are those of the report. LIO and tgt listen for iSER on the port on which they listen for iSCSI. With iWARP that is one port of TCP, so the two
// conflict: LIO gets the TCP portal of that port in a network namespace of its own, and tgt is measured over TCP only.
var guestTargets = []guestTarget{
	oursInGuest(ours, false, "3260", "3264"),
	lioInGuest("LIO", false, "3261", "3262"),
	{name: "tgt", start: `
tgtd -f --iscsi portal=192.0.2.1:3263 </dev/null >/run/tgt.log 2>&1 &
await tgtadm --op show --mode system
tgtadm --lld iscsi --op new --mode target --tid 1 -T ` + guestIQN + `tgt
tgtadm --lld iscsi --op new --mode logicalunit --tid 1 --lun 1 -b $FILE
tgtadm --lld iscsi --op bind --mode target --tid 1 -I ALL
`, port: map[string]string{"TCP": "3263"}},
	oursInGuest(oursInMemory, true, "3265", "3266"),
	lioInGuest(lioInMemory, true, "3267", "3268"),
}

const guestIQN = "iqn.2026-11.io.example:"

// library has functions of the scripts.
const library = `
await() {
	local n
	for ((n = 0; n < 600; n++)); do
		if "$@" >/dev/null 2>&1; then return; fi
		sleep 0.1
	done
	echo "not after 60 s: $*" >&2
	return 1
}
# disk PORT prints the disk of the session with that port.
disk() {
	local s block
	for s in /sys/class/iscsi_session/session*; do
		[ "$(<"/sys/class/iscsi_connection/connection${s##*session}:0/persistent_port")" = $1 ] || continue
		for block in "$s"/device/target*/*/block/*; do
			if [ -e "$block/size" ]; then echo "/dev/${block##*/}"; return; fi
		done
	done
	return 1
}
`

// A guest is the virtual machine.
type guest struct {
	vm       *vm.VM
	progress func(string, ...any)
	disks    map[column]string // of the columns that are logged in
}

// run runs a script. The error has the last line that it printed to its standard error.
func (g *guest) run(script string, limit time.Duration) (string, error) {
	r, err := g.vm.Script(func(string, ...any) {}, library+script, limit)
	switch {
	case err != nil:
		return "", err
	case r.Status == 128+9:
		return "", fmt.Errorf("it did not end within %v", limit)
	case r.Status != 0:
		lines := strings.Split(strings.TrimSpace(r.Stderr), "\n")
		return r.Stdout, fmt.Errorf("exit status %d: %s", r.Status, lines[len(lines)-1])
	}
	return r.Stdout, nil
}

// measureGuest boots the machine, starts the targets in it, and measures the columns in turn. The error is of what all of them require.
func measureGuest(ctx context.Context, o *options, jobs fio.Jobs, columns []column) (_ *table, facts []fact, err error) {
	o.progress("booting the virtual machine")
	v, err := vm.Boot(vm.Config{MemMiB: guestMemory, BootTimeout: bootLimit})
	if err != nil {
		return nil, nil, err
	}
	g := &guest{v, o.progress, map[column]string{}}
	defer func() { err = errors.Join(err, v.Close()) }()
	if _, err := g.run(bringUp, startLimit); err != nil {
		return nil, nil, fmt.Errorf("bringing up the initiator: %w", err)
	}
	out, err := g.run(versions, startLimit)
	if err != nil {
		return nil, nil, fmt.Errorf("asking for versions: %w", err)
	}
	for line := range strings.Lines(out) {
		name, version, _ := strings.Cut(strings.TrimSpace(line), " ")
		facts = append(facts, fact{name + " in the virtual machine", version})
	}
	if err := g.files(o, jobs); err != nil {
		return nil, nil, err
	}
	t := newTable(o.rounds, columns, rows(jobs))
	reasons := map[column]error{}
	for _, target := range guestTargets {
		if slices.ContainsFunc(columns, func(c column) bool { return c.Target == target.name }) {
			g.start(target, reasons)
		}
	}
	for round := range o.rounds {
		for i := range t.columns {
			c := t.columns[(i+round)%len(t.columns)] // none is always the first
			if ctx.Err() != nil {
				reasons[c] = errInterrupted
			}
			if reasons[c] != nil {
				t.add(round, c, nil, nil, reasons[c])
				continue
			}
			g.progress("round %d of %d: %v", round+1, o.rounds, c)
			results, failed, err := g.measure(c, jobs, o)
			t.add(round, c, results, failed, err)
			if err != nil {
				reasons[c] = fmt.Errorf("not tried after round %d", round+1)
			}
		}
	}
	return t, facts, nil
}

// guestColumns returns a column for each transport of the targets with a LUN in a file.
func guestColumns() (list []column) {
	for _, transport := range []string{"TCP", "iSER"} {
		for _, target := range guestTargets {
			if target.port[transport] != "" && !target.inMemory {
				list = append(list, column{target.name, transport})
			}
		}
	}
	return list
}

// files gives the machine the program, the jobs, and the contents of the LUNs.
func (g *guest) files(o *options, jobs fio.Jobs) error {
	program, err := os.ReadFile(o.program)
	if err != nil {
		return err
	}
	return errors.Join(
		os.WriteFile(filepath.Join(g.vm.Files(), "iser-target"), program, 0o755),
		os.WriteFile(filepath.Join(g.vm.Files(), "jobs.fio"), []byte(jobs.String()), 0o644),
		os.WriteFile(filepath.Join(g.vm.Files(), "fill"), randomBytes(guestSize), 0o644))
}

// start starts a target, logs in to it over each of its transports, and fills a LUN in memory. reasons has an error for each column that cannot be measured.
func (g *guest) start(target guestTarget, reasons map[column]error) {
	g.progress("starting %s", target.name)
	script := target.start
	if !target.inMemory {
		script = "FILE=/run/" + target.name + ".img\ncp /run/share/fill $FILE\n" + script
	}
	_, err := g.run(script, startLimit)
	if err != nil {
		err = fmt.Errorf("%s did not start: %w", target.name, err)
	}
	for _, transport := range slices.Sorted(maps.Keys(target.port)) {
		c := column{target.name, transport}
		if err != nil {
			reasons[c] = err
			continue
		}
		update := ""
		if transport == "iSER" && target.settings != "" {
			update = "$node -o update " + target.settings + "\n"
		}
		login := fmt.Sprintf("node='iscsiadm -m node -T %s%s -p 192.0.2.1:%s -I %s'\n$node -o new >&2\n%s$node --login >/dev/null\nawait disk %[3]s\ndisk %[3]s\n", guestIQN,
			target.name, target.port[transport], ifaces[transport], update)
		out, err := g.run(login, loginLimit)
		if err != nil {
			reasons[c] = fmt.Errorf("login: %w", err)
			continue
		}
		g.disks[c] = strings.TrimSpace(out)
		if target.inMemory {
			if _, err := g.run("dd if=/run/share/fill of="+g.disks[c]+" bs=1M oflag=direct", startLimit); err != nil {
				reasons[c] = fmt.Errorf("filling the LUN: %w", err)
			}
		}
	}
}

// measure runs all jobs on a column.
func (g *guest) measure(c column, jobs fio.Jobs, o *options) (map[string]fio.Result, map[string]error, error) {
	limit := 3*time.Minute + 4*time.Duration(len(jobs))*(o.runtime+o.ramp)
	_, err := g.run("rm -f /run/share/result\nDISK="+g.disks[c]+" fio --output-format=json --output=/run/share/result /run/share/jobs.fio\n", limit)
	b, readErr := os.ReadFile(filepath.Join(g.vm.Files(), "result"))
	if readErr != nil {
		return nil, nil, errors.Join(err, readErr)
	}
	results, failed, parseErr := fio.Results(b)
	if parseErr != nil {
		return nil, nil, errors.Join(err, parseErr)
	}
	return results, failed, err
}
