package interop_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/interop/harness"
	"github.com/iser-target/iser-target/tests/interop/vm"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
	"github.com/iser-target/iser-target/tests/testkit/cephcluster"
	"github.com/iser-target/iser-target/tests/testkit/etcdserver"
	"github.com/iser-target/iser-target/tests/testkit/rbdfake"
)

const clusterTarget = "iqn.2026-11.io.example:cluster"

// Keys of the registrations of Linux and of another node.
const linuxKey, nodeKey = 0xa, 0xb

// A cluster is two gateways that share an image, which Linux reaches by iSER through the one and by TCP through the other; multipathd
// makes a disk of both. On its ext4, a counter is written with O_DSYNC, and fio verifies what it writes. Linux holds a reservation that
// keeps others from writing.
type cluster struct {
	t       *testing.T
	v       *vm.VM
	members []*etcdserver.Member
	a, b    *harness.Target
}

// newCluster starts the gateways and what Linux does.
func newCluster(t *testing.T, v *vm.VM, path string, env ...string) *cluster {
	t.Helper()
	c := &cluster{t: t, v: v, members: etcdserver.Start(t, 3)}
	c.a, c.b = c.gateway("a", 1, path, env), c.gateway("b", 2, path, env)
	c.both("start")
	testkit.Eventually(t, "the LUN is served", func() bool { return c.status(c.a).LUNs[0].Owner != "" })
	c.a.Manage(t, "cluster", "handover", "0", "a")
	t.Cleanup(func() { v.Try(t, clusterDown, long) })
	v.Run(t, script(c.a, "IQN="+clusterTarget+"\nISER="+c.a.Addr()+"\nTCP="+c.b.Addr()+"\n"+clusterPaths+clusterUp), long)
	c.reserved("start")
	return c
}

func (c *cluster) gateway(name string, tag int, path string, env []string) *harness.Target {
	return harness.Config{
		Targets: fmt.Sprintf(`
  - name: %s
    initiators: ["*"]
    luns: [{id: 0, backend: rbd, path: %q, shared: true, naa: "3000000000000001"}]
`, clusterTarget, path),
		Portals: []harness.Portal{{TPGT: tag}},
		More:    fmt.Sprintf("cluster: {name: %s, etcd: [\"%s\"], failback: 1h}\n", name, strings.Join(etcdserver.Endpoints(c.members), `", "`)),
		Env:     env,
	}.Start(c.t)
}

func (c *cluster) status(d *harness.Target) schema.ClusterState {
	return harness.Ask[schema.ClusterState](c.t, d, "cluster", "status")
}

// both waits until the gateways know each other.
func (c *cluster) both(what string) {
	c.t.Helper()
	testkit.Eventually(c.t, what+": both gateways are there", func() bool {
		sa, sb := c.status(c.a), c.status(c.b) // one that was killed is there for the others until its lease is over
		return len(sa.Gateways) == 2 && len(sb.Gateways) == 2 && sa.Reason == "" && sb.Reason == ""
	})
}

// run runs a script in the guest that may use the functions of clusterUp.
func (c *cluster) run(body string) string {
	c.t.Helper()
	return c.v.Run(c.t, ". /run/cluster.sh\n"+body, long)
}

// event does something that moves the LUN to a gateway, and checks for how long the counter paused, and that the reservation holds.
func (c *cluster) event(what string, limit time.Duration, do func()) {
	c.t.Helper()
	c.run("begin")
	do()
	out := c.run("proceeds; pause")
	ms, err := strconv.Atoi(strings.TrimSpace(out[strings.LastIndexByte(strings.TrimSpace(out), '\n')+1:]))
	if err != nil {
		c.t.Fatal(err)
	}
	paused := time.Duration(ms) * time.Millisecond
	c.t.Logf("%s: the counter paused for %v", what, paused)
	if paused > limit {
		c.t.Errorf("%s: the counter paused for %v, more than %v", what, paused, limit)
	}
	c.reserved(what)
}

// A nodePath is a session of another node through a gateway.
type nodePath struct {
	*initiator.Session
	gateway string
}

// node logs in as another node, through all gateways that take it.
func (c *cluster) node() (paths []nodePath) {
	c.t.Helper()
	for name, d := range map[string]*harness.Target{"a": c.a, "b": c.b} {
		ctx, cancel := context.WithTimeout(c.t.Context(), 10*time.Second)
		s, err := initiator.Login(ctx, d.Listen()[0], initiator.Options{Name: "iqn.2026-11.io.example:node", Target: clusterTarget})
		cancel()
		if err != nil {
			c.t.Fatalf("gateway %s: %v", name, err)
		}
		c.t.Cleanup(func() { s.Close() })
		paths = append(paths, nodePath{s, name})
	}
	return paths
}

// do runs a command of the node, again after each unit attention and while the LUN moves, and returns the status.
func (c *cluster) do(p nodePath, command func() *initiator.Command) byte {
	c.t.Helper()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		m := command()
		if err := p.Do(m); err != nil {
			c.t.Fatalf("gateway %s: %v", p.gateway, err)
		}
		again := m.Status == 0x08 || m.Status == 2 && (m.Sense[2]&0x0f == 6 || m.Sense[12] == 0x04 && m.Sense[13] == 0x0a)
		if !again || time.Now().After(end) {
			return m.Status
		}
	}
}

// nodeWrite returns a WRITE of the node to the last block.
func (c *cluster) nodeWrite() *initiator.Command {
	return &initiator.Command{CDB: cdb.Write16(clusterSize/512-1, 1), Out: make([]byte, 512)}
}

func prOut(sa byte, key, saKey uint64) func() *initiator.Command {
	return func() *initiator.Command {
		m := &initiator.Command{}
		m.CDB, m.Out = cdb.PersistentReserveOut(sa, cdb.WriteExclusiveRegistrants, key, saKey, 0)
		return m
	}
}

// reserved checks that the LUN is reserved for Linux: all gateways show the same registrations, and no write of another node is executed.
func (c *cluster) reserved(what string) {
	c.t.Helper()
	paths := c.node()
	var keys [][]byte
	conflicts := 0
	for _, p := range paths {
		var m *initiator.Command
		if st := c.do(p, func() *initiator.Command {
			m = &initiator.Command{CDB: [16]byte{0x5e, 0, 8: 64}, In: make([]byte, 64)} // PERSISTENT RESERVE IN, READ KEYS
			return m
		}); st != 0 {
			c.t.Errorf("%s: READ KEYS through gateway %s: status %#x", what, p.gateway, st)
		}
		keys = append(keys, m.In)
		switch st := c.do(p, c.nodeWrite); st {
		case 0x18: // RESERVATION CONFLICT
			conflicts++
		case 0:
			c.t.Errorf("%s: another node writes through gateway %s", what, p.gateway)
		}
		p.Close()
	}
	want := bytes.Repeat([]byte{0, 0, 0, 0, 0, 0, 0, linuxKey}, 2)
	for _, k := range keys {
		if !bytes.Equal(k, keys[0]) || !bytes.Equal(k[8:24], want) || k[7] != 16 {
			c.t.Errorf("%s: the keys are % x, want those of two paths of Linux, and the same through all gateways", what, keys)
			break
		}
	}
	if conflicts == 0 {
		c.t.Errorf("%s: no gateway refuses writes because of the reservation", what)
	}
}

// For how long the counter may pause. Linux notices a gateway that is silent later than one that was killed, whose connections are reset.
const planned, unplanned, silent = 2 * time.Second, 8 * time.Second, 12 * time.Second

// frozenOSD is the same while Ceph notices that an OSD is frozen, after 5 s at the earliest, and its other OSDs take over.
const frozenOSD = 20 * time.Second

// lose makes the gateways end in all ways.
func (c *cluster) lose() {
	t, a, b := c.t, c.a, c.b
	t.Helper()
	c.event("hand-over", planned, func() { a.Manage(t, "cluster", "handover", "0", "b") })
	c.event("hand-over back", planned, func() { b.Manage(t, "cluster", "handover", "0", "a") })
	c.event("SIGTERM", planned, func() {
		a.Stop(t)
		a.Start(t)
		c.both("restart")
	})
	c.run("await paths 2")
	c.event("hand-over to the new process", planned, func() { b.Manage(t, "cluster", "handover", "0", "a") })
	c.event("kill -9", unplanned, func() {
		a.Kill(t)
		c.run("await counts")
		a.Start(t)
		c.both("restart")
	})
	c.run("await paths 2")
	b.Manage(t, "cluster", "handover", "0", "a")
	c.event("frozen for 20 s", silent, func() {
		frozen := append(descendants(a.PID()), a.PID())
		for _, pid := range frozen {
			if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(20 * time.Second)
		for _, pid := range frozen {
			if err := syscall.Kill(pid, syscall.SIGCONT); err != nil && err != syscall.ESRCH {
				t.Fatal(err)
			}
		}
		c.both("thawed")
	})
	c.run("await paths 2")
	c.event("hand-over to the thawed gateway", planned, func() { b.Manage(t, "cluster", "handover", "0", "a") })
}

// fence makes Linux and the node put each other out, as fence_scsi does, through the gateway that does not serve the LUN. It ends what
// clusterUp has begun.
func (c *cluster) fence() {
	t := c.t
	t.Helper()
	paths := c.node()
	write := func(want byte, when string) {
		t.Helper()
		for _, p := range paths {
			if p.gateway == "a" { // the owner
				if st := c.do(p, c.nodeWrite); st != want {
					t.Errorf("%s: a write of the node ends with status %#x, want %#x", when, st, want)
				}
			}
		}
	}
	join := func() {
		t.Helper()
		for _, p := range paths {
			if st := c.do(p, prOut(cdb.RegisterAndIgnore, 0, nodeKey)); st != 0 {
				t.Fatalf("REGISTER of the node through gateway %s: status %#x", p.gateway, st)
			}
		}
	}
	join()
	write(0, "the node is registered")
	c.run(fmt.Sprintf("sg_persist --out --preempt-abort --param-rk=%#x --param-sark=%#x --prout-type=5 /dev/$(standby)", linuxKey, nodeKey))
	write(0x18, "Linux has fenced the node")
	c.run("await counts")
	c.a.Kill(t)
	c.run("await counts")
	c.a.Start(t)
	c.both("restart")
	c.run("await paths 2")
	c.b.Manage(t, "cluster", "handover", "0", "a")
	c.run("await counts")
	paths = c.node()
	write(0x18, "Linux has fenced the node, and the owner was killed")
	join()
	write(0, "the node is registered again")
	t.Log(c.run("check"))
	i := slices.IndexFunc(paths, func(p nodePath) bool { return p.gateway == "b" })
	if st := c.do(paths[i], prOut(cdb.PreemptAndAbort, nodeKey, linuxKey)); st != 0 {
		t.Errorf("PREEMPT AND ABORT of the node: status %#x", st)
	}
	write(0, "the node has fenced Linux")
	c.run(`! dd if=/dev/zero of=$disk bs=4096 count=1 oflag=direct,dsync`)
}

// The gateways are lost in all ways, and etcd loses a member and its majority. No acknowledged counter is lost, no pause is longer than
// permitted, no answer breaks the reservation, and the file system is clean.
func TestCluster(t *testing.T) {
	v := boot(t)
	need(t, "multipathd", "fio", "udevadm", "mkfs.ext4", "etcd", "sg_persist")
	images := rbdfake.Install(t, "p")
	if err := os.WriteFile(filepath.Join(images, "p", "disk"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(filepath.Join(images, "p", "disk"), clusterSize); err != nil {
		t.Fatal(err)
	}
	c := newCluster(t, v, "rbd:p/disk")
	c.lose()
	c.event("a member of etcd is lost", unplanned, func() {
		c.members[0].Kill()
		time.Sleep(8 * time.Second)
	})
	c.members[0].Start()
	c.members[0].WaitHealthy()
	c.event("etcd has no majority for 15 s", 25*time.Second, func() {
		c.members[1].Kill()
		c.members[2].Kill()
		time.Sleep(15 * time.Second)
		c.members[1].Start()
		c.members[2].Start()
		c.both("the majority is back")
	})
	c.b.Manage(t, "cluster", "handover", "0", "a")
	c.fence()
	v.Run(t, clusterDown+"\niscsiadm -m node -u\n"+forgive, long)
}

// The same on Ceph, of which an OSD is lost and another one hangs.
func TestClusterOnCeph(t *testing.T) {
	ceph := cephcluster.New(t, cephcluster.Options{OSDs: 3, Copies: 2, GiB: 2, BlueStore: true})
	v := boot(t)
	need(t, "multipathd", "fio", "udevadm", "mkfs.ext4", "etcd", "sg_persist")
	if _, err := ceph.Run(t.Context(), "rbd", "create", "--size", fmt.Sprint(clusterSize>>20), cephcluster.Pool+"/disk"); err != nil {
		t.Fatal(err)
	}
	c := newCluster(t, v, "rbd:"+cephcluster.Pool+"/disk?conf="+ceph.Conf)
	c.lose()
	c.event("an OSD is lost", unplanned, func() {
		ceph.Signal("osd.0", syscall.SIGKILL)
		time.Sleep(5 * time.Second)
	})
	if err := ceph.Restart(t.Context(), "osd.0"); err != nil {
		t.Fatal(err)
	}
	c.event("an OSD is frozen for 20 s", frozenOSD, func() {
		thaw := ceph.Freeze("osd.1")
		time.Sleep(20 * time.Second)
		thaw()
	})
	c.fence()
	v.Run(t, clusterDown+"\niscsiadm -m node -u\n"+forgive, long)
}

const clusterSize = 96 << 20

// descendants returns the processes that a process has started.
func descendants(pid int) (list []int) {
	for _, child := range testkit.Children(pid) {
		list = append(append(list, descendants(child)...), child)
	}
	return list
}

// clusterPaths logs in to $IQN by iSER at the portal $ISER, and by TCP at each of $TCP, and starts multipathd. Paths are checked every $POLLING seconds, or every second. /run/cluster.sh has what the scripts that follow use.
//
// udev runs several programs for each path that comes or goes. Emulated, that takes a second of a CPU instead of some ms. So that I/O need not wait for it, as on
// a real machine, udev has a low priority, and multipathd finds all paths at once.
const clusterPaths = `
: ${POLLING:=1}
modprobe -a iscsi_tcp dm_multipath dm_round_robin ext4
cat >/etc/multipath.conf <<.
defaults {
	user_friendly_names no
	find_multipaths no
	polling_interval $POLLING
	max_polling_interval $POLLING
	path_grouping_policy group_by_prio
	prio alua
	path_checker tur
	failback immediate
	no_path_retry 60
	fast_io_fail_tmo 2
}
.
nice -n 19 /lib/systemd/systemd-udevd --daemon
for path in "$ISER iser" $(printf '%s/default ' $TCP); do
	read -r portal interface <<<"${path/\// }"
	iscsiadm -m node -o new -T $IQN -p $portal -I $interface
	iscsiadm -m node -T $IQN -p $portal -I $interface -o update -n 'node.conn[0].timeo.noop_out_interval' -v $POLLING
	iscsiadm -m node -T $IQN -p $portal -I $interface -o update -n 'node.conn[0].timeo.noop_out_timeout' -v $((2 * POLLING))
	iscsiadm -m node -T $IQN -p $portal -I $interface --login
done
udevadm settle -t 200
multipathd -d </dev/null >/run/multipathd.log 2>&1 &
cat >/run/cluster.sh <<'.'
# await COMMAND... succeeds as soon as the command does.
await() {
	local end=$((SECONDS + 90))
	while [ $SECONDS -lt $end ]; do
		if "$@"; then return; fi
		sleep 0.2
	done
	echo "in vain: $*" >&2
	multipathd show topology >&2
	tail -n 30 /run/multipathd.log >&2
	tail -n 5 /run/acked >&2
	dmesg | tail -n 30 >&2
	return 1
}
# paths N: so many paths work, active or standby.
paths() { [ "$(multipathd show paths raw format "%t %T" | grep -cE '^active (ready|ghost)$')" = $1 ]; }
# begin begins to measure, while the counter counts.
begin() { await counts; wc -l </run/acked >/run/begun; }
# counts: the counter is answered.
counts() {
	local before=$(wc -l </run/acked)
	sleep 0.5
	[ $(wc -l </run/acked) -gt $((before + 1)) ]
}
# proceeds: the counter and fio are not at their end, and the counter counts again.
proceeds() { await counts; ! test -e /run/counter.status; ! test -e /run/fio.status; }
# standby prints the path that is not active.
standby() { multipathd show paths raw format "%d %T" | awk '$2 == "ghost" { print $1 }'; }
# pause prints the longest time between two answers since begin, in ms.
pause() { tail -n +$(</run/begun) /run/acked | awk '{ if (last && $2 - last > most) most = $2 - last; last = $2 } END { print most }'; }
# check ends the counter and fio, and looks for what was acknowledged, in the file and in the file system.
check() {
	touch /run/stop
	await test -e /run/counter.status
	await test -e /run/fio.status
	cat /run/counter.log /run/fio.log
	[ $(</run/counter.status) = 0 ] && [ $(</run/fio.status) = 0 ]
	umount /mnt
	fsck.ext4 -fn $disk
	mount -o ro $disk /mnt
	awk '{ at[$1 % 256] = $1 } END { for (i in at) print i, at[i] }' /run/acked | while read -r i n; do
		got=$(dd if=/mnt/counter bs=4096 count=1 skip=$i iflag=direct 2>/dev/null | head -n 1)
		[ "$got" -ge $n ] || { echo "block $i has $got, and $n was acknowledged"; exit 1; }
	done
	echo "acknowledged: $(wc -l </run/acked)"
	umount /mnt
}
.
. /run/cluster.sh
`

// clusterUp makes a file system on the disk of both paths, and starts the counter and fio on it, after clusterPaths.
const clusterUp = `
await paths 2
udevadm settle -t 100
disk=/dev/mapper/$(multipathd show maps raw format %n)
echo "disk=$disk" >>/run/cluster.sh
multipathd show topology
for path in $(multipathd show paths raw format "%d"); do
	sg_persist --out --register --param-sark=0xa /dev/$path
done
sg_persist --out --reserve --param-rk=0xa --prout-type=5 /dev/$path
mkfs.ext4 -q -E nodiscard $disk
mount $disk /mnt
dd if=/dev/zero of=/mnt/counter bs=4096 count=256 conv=fsync 2>/dev/null
rm -f /run/stop /run/acked /run/*.status /run/*.log.*
cat >/run/counter.pl <<'.'
use Fcntl;
use IO::Handle;
sysopen(my $blocks, "/mnt/counter", O_WRONLY | O_DSYNC) or die $!;
open(my $uptime, "<", "/proc/uptime") or die $!;
open(my $acked, ">", "/run/acked") or die $!;
$acked->autoflush;
for (my $n = 1; !-e "/run/stop"; $n++) {
	sysseek($blocks, $n % 256 * 4096, 0) or die $!;
	(syswrite($blocks, pack("a4096", "$n\n")) // 0) == 4096 or die "number $n: $!";
	sysseek($uptime, 0, 0) or die $!;
	sysread($uptime, my $now, 64) or die $!;
	printf $acked "%d %d\n", $n, $now * 1000 or die $!;
	select(undef, undef, undef, 0.05); # leaves the CPUs, which are emulated, to the others
}
.
(
	status=0
	perl /run/counter.pl || status=$?
	echo $status >/run/counter.status
) </dev/null >/run/counter.log 2>&1 &
(
	status=0
	until [ -e /run/stop ] || [ $status != 0 ]; do
		fio --ioengine=libaio --direct=1 --filename=/mnt/fio --iodepth=4 --rw=randrw --bs=16k --size=8m \
			--verify=crc32c --verify_fatal=1 --randrepeat=0 --output-format=terse --terse-version=3 --name=cluster || status=$?
	done
	echo $status >/run/fio.status
) </dev/null >/run/fio.log 2>&1 &
await test -s /run/acked
await counts
`

// clusterDown ends all that clusterUp has begun.
const clusterDown = `
touch /run/stop
for ((n = 0; n < 100; n++)); do
	! pgrep -x fio >/dev/null && ! pgrep -x perl >/dev/null || { sleep 0.3; continue; }
	break
done
umount /mnt || true
if pgrep -x multipathd >/dev/null; then
	multipathd shutdown
	while pgrep -x multipathd >/dev/null; do sleep 0.1; done
	multipath -F
fi
pkill -x systemd-udevd || true
`
