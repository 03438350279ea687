// Package interop_test holds the target to what a stock Linux initiator needs:
// the tests boot a virtual machine and use its ib_iser over siw.
package interop_test

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/interop/harness"
	"github.com/iser-target/iser-target/tests/interop/vm"
	"github.com/iser-target/iser-target/tests/testkit/rbdfake"
)

var update = flag.Bool("update", false,
	"write what the tests expect: the table over iSER in docs/conformance.md, testdata/sg")

// guest is the machine that all tests share; see boot.
var guest struct {
	mu sync.Mutex
	vm *vm.VM
}

func TestMain(m *testing.M) {
	rbdfake.Main()
	code := m.Run()
	if guest.vm != nil {
		if err := guest.vm.Close(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	harness.Cleanup()
	os.Exit(code)
}

// required reports whether a test that cannot run must fail.
var required = os.Getenv("ISER_TARGET_REQUIRE_INTEROP") == "1"

// need skips t, or fails it where ISER_TARGET_REQUIRE_INTEROP is 1, if this
// machine lacks one of the tools.
func need(t testing.TB, tools ...string) {
	t.Helper()
	for _, tool := range tools {
		if _, err := exec.LookPath(tool); err != nil {
			lack(t, fmt.Errorf("%w (tests/interop/setup.sh installs it)", err))
		}
	}
}

// lack ends t for want of what err tells.
func lack(t testing.TB, err error) {
	t.Helper()
	if required {
		t.Fatalf("ISER_TARGET_REQUIRE_INTEROP is 1, but %v", err)
	}
	t.Skip(err)
}

// boot returns a machine with siw0 on eth0, ib_iser, iscsid and the verbs of
// user space. All tests share one; after one that has failed the next gets a new
// one. What a test leaves behind of sessions, node records and mounts is
// removed after it; a process, or what else cannot be, fails it. So does a
// connection that was lost, or I/O that failed, even if the initiator made good
// for it; a test that means to do that ends with forgive.
func boot(t testing.TB) *vm.VM {
	t.Helper()
	if testing.Short() && !required {
		t.Skip("boots a virtual machine: not with -short")
	}
	if err := vm.Missing(vm.Config{}); err != nil {
		lack(t, err)
	}
	need(t, "iscsid", "iscsiadm", "rdma", "ip")
	guest.mu.Lock()
	defer guest.mu.Unlock()
	fresh := guest.vm == nil
	if fresh {
		v, err := vm.Boot(vm.Config{})
		if err != nil {
			t.Fatal(err)
		}
		guest.vm = v
		t.Logf("booted in %v", v.BootTime.Round(time.Millisecond))
	}
	v := guest.vm
	t.Cleanup(func() { leave(t, v) })
	if fresh {
		v.Run(t, bringUp, time.Minute)
	}
	return v
}

// leave cleans up after t, or ends the machine if t has failed: nobody knows what it
// has left there.
func leave(t testing.TB, v *vm.VM) {
	defer func() {
		if !t.Failed() {
			return
		}
		guest.mu.Lock()
		defer guest.mu.Unlock()
		if err := v.Close(); err != nil {
			t.Error(err)
		}
		guest.vm = nil
	}()
	if t.Failed() {
		return
	}
	if r := v.Try(t, cleanUp, time.Minute); r.Stdout != "" || r.Status != 0 {
		t.Errorf("status %d of the clean-up; what the initiator's kernel tells of, and what is left:\n%s", r.Status,
			r.Stdout)
	}
}

// bringUp makes the initiator of a machine that has just booted. While siw connects, ib_iser holds iscsid in the kernel until TCP gives
// up a SYN that nobody answers: with the six retries of the default after 127 s, which the kernel, after 120 s, reports as a hung task.
const bringUp = `
hostname guest
echo 3 >/proc/sys/net/ipv4/tcp_syn_retries
ip link set lo up
modprobe -a virtio_net
ip link set eth0 up
ip addr add ` + vm.GuestAddr + `/24 dev eth0
ip addr add ` + vm.GuestAddr6 + `/64 dev eth0 nodad
ip route add default via ` + vm.HostAddr + `
modprobe -a siw ib_iser ib_uverbs rdma_ucm sd_mod scsi_dh_alua
rdma link add siw0 type siw netdev eth0
mkdir -p /run/lock
echo InitiatorName=` + initiatorName + ` >/etc/iscsi/initiatorname.iscsi
cat >/etc/iscsi/iscsid.conf <<.
node.startup = manual
discovery.sendtargets.timeo.active_timeout = 10
node.session.timeo.replacement_timeout = 120
node.conn[0].timeo.login_timeout = 15
node.conn[0].timeo.logout_timeout = 15
node.conn[0].timeo.noop_out_interval = 5
node.conn[0].timeo.noop_out_timeout = 30
node.session.initial_login_retry_max = 2
node.session.cmds_max = 128
node.session.queue_depth = 32
.
cat >/run/lib.sh <<'.'
` + lib + `
.
iscsid --foreground --debug 2 </dev/null >/run/iscsid.log 2>&1 &
`

// cleanUp leaves the guest to the next test as that expects it, and prints what is
// wrong. It starts no process unless it has to.
const cleanUp = `
shopt -s nullglob
while read -r _ mount _; do
	[ $mount != /mnt ] || umount /mnt
done </proc/mounts
left=(/sys/class/iscsi_session/*)
[ ${#left[@]} = 0 ] || iscsiadm -m session -u >&2 || true
left=(/etc/iscsi/{nodes,send_targets,ifaces}/*)
[ ${#left[@]} = 0 ] || rm -r "${left[@]}"
dmesg --read-clear | grep -E 'detected conn error|siw: .*error|I/O error|critical .* error|recovery timed out|EXT4-fs (error|warning)' || true
read -r pids </run/agent.pids
for ((n = 0; n < 50; n++)); do
	left=(/sys/class/iscsi_session/* /sys/block/dm-*)
	for p in /proc/[0-9]*; do
		case " $pids $$ " in *" ${p#/proc/} "*) continue ;; esac
		[ -e $p/exe ] && read -r comm <$p/comm || continue # of the kernel, or gone
		[ $comm = iscsid ] || left+=("process ${p#/proc/}: $comm")
	done 2>/dev/null
	[ ${#left[@]} != 0 ] || exit 0
	sleep 0.1 # it may be about to end
done
printf '%s\n' "${left[@]}"
`

// forgive drops what the kernel has told of lost connections up to now.
const forgive = "dmesg --clear\n"

// lib is what scripts of the tests begin with, by ". /run/lib.sh".
const lib = `
# discover PORTAL prints the targets there and makes node records of them.
discover() { heard iscsiadm -m discovery -t sendtargets -p "$1" -I iser; }

# heard ISCSIADM... runs a discovery over iSER, and again if it has not heard the
# target's answer: where that comes before the kernel has confirmed that the
# request was sent, iscsiadm (2.1.8) takes it in while it waits for the one, and
# then waits for it in vain.
heard() {
	local n status
	for n in 1 2 3; do
		status=0
		"$@" 2>/run/heard || status=$?
		cat /run/heard >&2
		grep -q 'did not get response PDU' /run/heard || break
	done
	return $status
}

# login PORTAL TARGET
login() { iscsiadm -m node -p "$1" -T "$2" --login; }

# logout TARGET
logout() { iscsiadm -m node -T "$1" --logout; }

# disk TARGET LUN prints the device, as soon as the kernel has found it.
disk() {
	local n session block
	for ((n = 0; n < 200; n++)); do
		for session in /sys/class/iscsi_session/session*; do
			[ "$(<"$session/targetname")" = "$1" ] || continue
			for block in "$session"/device/target*/*:"$2"/block/*; do
				[ -e "$block/size" ] || continue
				echo "/dev/${block##*/}"
				return
			done
		done 2>/dev/null
		sleep 0.1
	done
	echo "no LUN $2 of $1 after 20 s" >&2
	return 1
}
`

const initiatorName = "iqn.2026-11.io.example:guest"
