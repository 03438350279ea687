package interop_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/tests/interop/harness"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/etcdserver"
	"github.com/iser-target/iser-target/tests/testkit/rbdfake"
)

// Two gateways share an image, which Linux reaches by iSER through the one and by TCP through the other; multipathd makes a disk of both.
// On its ext4, a counter is written with O_DSYNC, and fio verifies what it writes. The owner hands over, ends, is killed and frozen, and
// etcd loses a member and its majority. No acknowledged counter is lost, no pause is longer than permitted, and the file system is clean.
func TestCluster(t *testing.T) {
	v := boot(t)
	need(t, "multipathd", "fio", "udevadm", "mkfs.ext4", "etcd")
	images := rbdfake.Install(t, "p")
	if err := os.WriteFile(filepath.Join(images, "p", "disk"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(filepath.Join(images, "p", "disk"), 96<<20); err != nil {
		t.Fatal(err)
	}
	members := etcdserver.Start(t, 3)
	const iqn = "iqn.2026-11.io.example:cluster"
	gateway := func(name string, tag int) *harness.Target {
		return harness.Config{
			Targets: `
  - name: ` + iqn + `
    initiators: ["*"]
    luns: [{id: 0, backend: rbd, path: "rbd:p/disk", shared: true, naa: "3000000000000001"}]
`,
			Portals: []harness.Portal{{TPGT: tag}},
			More:    fmt.Sprintf("cluster: {name: %s, etcd: [\"%s\"], failback: 1h}\n", name, strings.Join(etcdserver.Endpoints(members), `", "`)),
		}.Start(t)
	}
	a, b := gateway("a", 1), gateway("b", 2)
	status := func(d *harness.Target) schema.ClusterState {
		return harness.Ask[schema.ClusterState](t, d, "cluster", "status")
	}
	both := func(what string) {
		t.Helper()
		testkit.Eventually(t, what+": both gateways are there", func() bool {
			sa, sb := status(a), status(b) // one that was killed is there for the others until its lease is over
			return len(sa.Gateways) == 2 && len(sb.Gateways) == 2 && sa.Reason == "" && sb.Reason == ""
		})
	}
	both("start")
	testkit.Eventually(t, "the LUN is served", func() bool { return status(a).LUNs[0].Owner != "" })
	a.Manage(t, "cluster", "handover", "0", "a")
	defer v.Try(t, clusterDown, long)
	v.Run(t, script(a, "IQN="+iqn+"\nISER="+a.Addr()+"\nTCP="+b.Addr()+"\n"+clusterUp), long)
	run := func(body string) string {
		t.Helper()
		return v.Run(t, ". /run/cluster.sh\n"+body, long)
	}
	// event does something that moves the LUN to a gateway, and checks for how long the counter paused.
	event := func(what string, limit time.Duration, do func()) {
		t.Helper()
		run("begin")
		do()
		out := run("proceeds; pause")
		ms, err := strconv.Atoi(strings.TrimSpace(out[strings.LastIndexByte(strings.TrimSpace(out), '\n')+1:]))
		if err != nil {
			t.Fatal(err)
		}
		paused := time.Duration(ms) * time.Millisecond
		t.Logf("%s: the counter paused for %v", what, paused)
		if paused > limit {
			t.Errorf("%s: the counter paused for %v, more than %v", what, paused, limit)
		}
	}
	const planned, lost = 2 * time.Second, 8 * time.Second
	event("hand-over", planned, func() { a.Manage(t, "cluster", "handover", "0", "b") })
	event("hand-over back", planned, func() { b.Manage(t, "cluster", "handover", "0", "a") })
	event("SIGTERM", planned, func() { a.Stop(t) })
	a.Start(t)
	both("restart")
	run("await paths 2")
	event("hand-over to the new process", planned, func() { b.Manage(t, "cluster", "handover", "0", "a") })
	event("kill -9", lost, func() { a.Kill(t) })
	a.Start(t)
	both("restart")
	run("await paths 2")
	b.Manage(t, "cluster", "handover", "0", "a")
	event("frozen for 20 s", lost, func() {
		frozen := append(harnessChildren(t, a.PID()), a.PID())
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
	})
	both("thawed")
	run("await paths 2")
	event("hand-over to the thawed gateway", planned, func() { b.Manage(t, "cluster", "handover", "0", "a") })
	event("a member of etcd is lost", lost, func() {
		members[0].Kill()
		time.Sleep(8 * time.Second)
	})
	members[0].Start()
	members[0].WaitHealthy()
	event("etcd has no majority for 15 s", 25*time.Second, func() {
		members[1].Kill()
		members[2].Kill()
		time.Sleep(15 * time.Second)
		members[1].Start()
		members[2].Start()
	})
	t.Log(run("check"))
	v.Run(t, clusterDown+"\niscsiadm -m node -u\n"+forgive, long)
}

// harnessChildren returns the processes that a process has started.
func harnessChildren(t *testing.T, pid int) (list []int) {
	t.Helper()
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range tasks {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // the thread has ended
		}
		for _, text := range strings.Fields(string(b)) {
			child, err := strconv.Atoi(text)
			if err != nil {
				t.Fatal(err)
			}
			list = append(append(list, harnessChildren(t, child)...), child)
		}
	}
	return list
}

// clusterUp logs in by both paths, makes a file system on the disk of both, and starts the counter and fio on it. /run/cluster.sh has what
// the scripts that follow use.
const clusterUp = `
modprobe -a iscsi_tcp dm_multipath dm_round_robin ext4
cat >/etc/multipath.conf <<.
defaults {
	user_friendly_names no
	find_multipaths no
	polling_interval 1
	max_polling_interval 1
	path_grouping_policy group_by_prio
	prio alua
	path_checker tur
	failback immediate
	no_path_retry 60
	fast_io_fail_tmo 2
}
.
/lib/systemd/systemd-udevd --daemon
multipathd -d </dev/null >/run/multipathd.log 2>&1 &
for path in "$ISER iser" "$TCP default"; do
	read -r portal interface <<<"$path"
	iscsiadm -m node -o new -T $IQN -p $portal -I $interface
	iscsiadm -m node -T $IQN -p $portal -I $interface -o update -n 'node.conn[0].timeo.noop_out_interval' -v 1
	iscsiadm -m node -T $IQN -p $portal -I $interface -o update -n 'node.conn[0].timeo.noop_out_timeout' -v 2
	iscsiadm -m node -T $IQN -p $portal -I $interface --login
done
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
await paths 2
disk=/dev/mapper/$(multipathd show maps raw format %n)
echo "disk=$disk" >>/run/cluster.sh
multipathd show topology
mkfs.ext4 -q -E nodiscard $disk
mount $disk /mnt
dd if=/dev/zero of=/mnt/counter bs=4096 count=256 conv=fsync 2>/dev/null
rm -f /run/stop /run/acked /run/*.status /run/*.log.*
(
	status=0
	for ((n = 1; ; n++)); do
		[ ! -e /run/stop ] || break
		echo $n | dd of=/mnt/counter bs=4096 seek=$((n % 256)) count=1 conv=notrunc,sync oflag=direct,dsync 2>/run/dd.log || { status=1; cat /run/dd.log; break; }
		echo "$n $(date +%s%3N)" >>/run/acked
	done
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
	! pgrep -x fio >/dev/null && ! pgrep -x dd >/dev/null || { sleep 0.3; continue; }
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
