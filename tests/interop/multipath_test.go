package interop_test

import (
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/interop/harness"
)

// One LUN, two paths: a session over iSER to one portal, one over TCP to
// another, of a target port group that scsi_dh_alua asks for. multipathd makes a
// disk of both. Under fio, which verifies all that it writes, first the one path
// is lost and comes back, then the other; no I/O is lost.
func TestMultipath(t *testing.T) {
	v := boot(t)
	need(t, "multipathd", "fio", "udevadm", "sg_rtpg")
	const iqn = "iqn.2026-11.io.example:multipath"
	iser, tcp := harness.NewProxy(t), harness.NewProxy(t)
	d := harness.Config{
		Targets: `
  - name: ` + iqn + `
    initiators: ["*"]
    luns:
      - {id: 0, backend: memory, size: 64MiB}
`,
		Portals: []harness.Portal{{Proxy: iser, TPGT: 1}, {Proxy: tcp, TPGT: 2}},
	}.Start(t)
	defer v.Try(t, multipathDown, quick)
	v.Run(t, script(d, `
IQN=`+iqn+`
ISER=`+d.Addrs()[0]+`
TCP=`+d.Addrs()[1]+`
`+multipathUp), long)
	run := func(body string) {
		t.Helper()
		v.Run(t, ". /run/multipath.sh\n"+body, long)
	}

	run("await used $iser; await used $tcp")
	iser.Refuse() // as a target that is gone: the connection is reset
	run("await path $iser failed faulty; await used $tcp; goes_on; ! used $iser")
	iser.Pass()
	run("await path $iser active ready; await used $iser; goes_on")
	tcp.Hold() // as a cable that is cut: nothing answers
	run("await path $tcp failed faulty; await used $iser; goes_on; ! used $tcp")
	tcp.Pass()
	run("await path $tcp active ready; await used $tcp; await used $iser; goes_on")

	run(`
touch /run/fio.stop
await test -s /run/fio.status
cat /run/fio.log
test $(</run/fio.status) = 0
alua $iser
alua $tcp
# The messages of a handler that has attached; any other is trouble.
! dmesg | grep alua: | grep -vE 'handler registered$|supports implicit and explicit TPGS$|port group .* rel port|transition timeout set|state A non-preferred supports'`)
	v.Run(t, multipathDown+"\niscsiadm -m node -u\n"+forgive, quick)
	d.AwaitVars(t, map[string]float64{"sessions": 0, "connections": 0, "tasks": 0, "buffers": 0, "stags": 0},
		10*time.Second)
}

// multipathUp logs in by both paths, waits for the disk of both, and starts fio
// on it. /run/multipath.sh is what the scripts that follow know: the devices in
// $iser and $tcp, and the functions below.
const multipathUp = `
modprobe -a iscsi_tcp dm_multipath dm_round_robin
cat >/etc/multipath.conf <<.
defaults {
	user_friendly_names no
	find_multipaths no
	polling_interval 1
	max_polling_interval 1
	path_grouping_policy group_by_prio
	path_selector "round-robin 0"
	failback immediate
	no_path_retry fail
	fast_io_fail_tmo 2
}
.
/lib/systemd/systemd-udevd --daemon
multipathd -d </dev/null >/run/multipathd.log 2>&1 &
for path in "$ISER iser" "$TCP default"; do
	read -r portal interface <<<"$path"
	# Its portals only, or every target port would have sessions of both kinds.
	iscsiadm -m node -o new -T $IQN -p $portal -I $interface
	# What a pulled cable costs: a second of silence, two for the answer, and two
	# (multipathd's fast_io_fail_tmo) until the session fails what it has.
	update() { iscsiadm -m node -T $IQN -p $portal -I $interface -o update -n "$1" -v $2; }
	update 'node.conn[0].timeo.noop_out_interval' 1
	update 'node.conn[0].timeo.noop_out_timeout' 2
	iscsiadm -m node -T $IQN -p $portal -I $interface --login
done
# device TRANSPORT prints the name of the disk of a session.
device() {
	local session host block
	for session in /sys/class/iscsi_session/session*; do
		host=$(readlink -f "$session/device/..")
		grep -q "$1" "$host"/scsi_host/host*/proc_name || continue
		for block in "$session"/device/target*/*:0/block/*; do
			[ -e "$block/size" ] && echo "${block##*/}" && return
		done
	done
	return 1
}
until device iser && device tcp; do sleep 0.1; done >/dev/null
cat >/run/multipath.sh <<.
iser=$(device iser)
tcp=$(device tcp)
.
cat >>/run/multipath.sh <<'.'
# await COMMAND... succeeds as soon as the command does.
await() {
	local end=$((SECONDS + 60))
	while [ $SECONDS -lt $end ]; do
		if "$@"; then return; fi
		sleep 0.2
	done
	echo "in vain: $*" >&2
	multipathd show topology >&2
	tail -n 20 /run/multipathd.log /run/fio.log >&2
	return 1
}
# path DEVICE STATE CHECKER: what device mapper and multipathd think of a path.
path() { multipathd show paths raw format "%d %t %T" | grep -x "$1 $2 $3"; }
# used DEVICE: data is read and written there.
used() {
	local before after
	read -ra before </sys/block/$1/stat
	sleep 1
	read -ra after </sys/block/$1/stat
	[ ${before[0]} != ${after[0]} ] && [ ${before[4]} != ${after[4]} ]
}
# goes_on: fio has found nothing wrong.
goes_on() { ! test -e /run/fio.status; }
# alua DEVICE: scsi_dh_alua knows the state of the path.
alua() {
	grep -x alua /sys/block/$1/device/dh_state
	grep -x active/optimized /sys/block/$1/device/access_state
	sg_rtpg -d /dev/$1 | grep 'active/optimized'
}
.
. /run/multipath.sh
await path $iser active ready
await path $tcp active ready
alua $iser
alua $tcp
disk=/dev/mapper/$(multipathd show maps raw format %n)
dmsetup table $disk | grep -E '1 alua 1 1 round-robin 0 2 1 '
rm -f /run/fio.*
# fio verifies at the end of a round; one follows the other until it is told.
(
	status=0
	until [ -e /run/fio.stop ] || [ $status != 0 ]; do
		fio --ioengine=libaio --direct=1 --filename=$disk --iodepth=8 --rw=randrw --bs=16k --size=8m \
			--verify=crc32c --verify_fatal=1 --randrepeat=0 --output-format=terse --terse-version=3 --name=multipath || status=$?
	done
	echo $status >/run/fio.status
) </dev/null >/run/fio.log 2>&1 &
`

// multipathDown ends fio, the disk, multipathd and udevd.
const multipathDown = `
touch /run/fio.stop
for ((n = 0; n < 100; n++)); do
	! pgrep -x fio >/dev/null || { sleep 0.5; continue; }
	break
done
if pgrep -x multipathd >/dev/null; then
	multipathd shutdown
	while pgrep -x multipathd >/dev/null; do sleep 0.1; done
	multipath -F
fi
pkill -x systemd-udevd || true
`
