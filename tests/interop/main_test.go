// Package interop_test holds the target to what a stock Linux initiator needs:
// the tests boot a virtual machine and use its ib_iser over siw.
package interop_test

import (
	"fmt"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/interop/harness"
	"github.com/iser-target/iser-target/tests/interop/vm"
)

// guest is the machine that all tests share; see boot.
var guest struct {
	mu sync.Mutex
	vm *vm.VM
}

func TestMain(m *testing.M) {
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

// required tells whether a test that cannot run must fail.
var required = os.Getenv("ISER_TARGET_REQUIRE_INTEROP") == "1"

// need skips t, or fails it where ISER_TARGET_REQUIRE_INTEROP is 1, if this
// machine lacks one of the tools.
func need(t *testing.T, tools ...string) {
	t.Helper()
	for _, tool := range tools {
		if _, err := exec.LookPath(tool); err != nil {
			lack(t, fmt.Errorf("%w (tests/interop/setup.sh installs it)", err))
		}
	}
}

// lack ends t for want of what err tells.
func lack(t *testing.T, err error) {
	t.Helper()
	if required {
		t.Fatalf("ISER_TARGET_REQUIRE_INTEROP is 1, but %v", err)
	}
	t.Skip(err)
}

// boot returns a machine with siw0 on eth0, ib_iser, iscsid and the verbs of
// user space. All tests share one; if one of them has broken it, the next gets a
// new one. What a test leaves behind of sessions, node records and mounts is
// removed after it. A connection that was lost, or I/O that failed, fails the
// test, even if the initiator made good for it; a test that means to do that
// ends with forgive.
func boot(t *testing.T) *vm.VM {
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
	if guest.vm != nil && guest.vm.Broken() != nil {
		guest.vm.Close() // what is wrong has been reported
		guest.vm = nil
	}
	if guest.vm == nil {
		v, err := vm.Boot(vm.Config{})
		if err != nil {
			t.Fatal(err)
		}
		guest.vm = v
		t.Logf("booted in %v", v.BootTime.Round(time.Millisecond))
		v.Run(t, bringUp, time.Minute)
	}
	v := guest.vm
	t.Cleanup(func() {
		if v.Broken() != nil {
			return
		}
		if r := v.Try(t, cleanUp, time.Minute); r.Stdout != "" || r.Status != 0 {
			t.Errorf("status %d of the clean-up; the initiator's kernel tells of\n%s", r.Status, r.Stdout)
		}
	})
	return v
}

// bringUp makes the initiator of a machine that has just booted.
const bringUp = `
hostname guest
ip link set lo up
modprobe -a virtio_net
ip link set eth0 up
ip addr add ` + vm.GuestAddr + `/24 dev eth0
ip route add default via ` + vm.HostAddr + `
modprobe -a siw ib_iser ib_uverbs rdma_ucm sd_mod
rdma link add siw0 type siw netdev eth0
mkdir -p /run/lock
echo InitiatorName=` + initiatorName + ` >/etc/iscsi/initiatorname.iscsi
cat >/etc/iscsi/iscsid.conf <<.
node.startup = manual
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

// cleanUp leaves the guest to the next test as that expects it.
const cleanUp = `
umount -q /mnt || true
iscsiadm -m node -u >/dev/null 2>&1 || true
iscsiadm -m node -o delete >/dev/null 2>&1 || true
iscsiadm -m discoverydb -o delete >/dev/null 2>&1 || true
dmesg --read-clear | grep -E 'detected conn error|siw: .*error|I/O error|critical .* error|recovery timed out|EXT4-fs (error|warning)' || true
! iscsiadm -m session >&2
`

// forgive drops what the kernel has told of lost connections up to now.
const forgive = "dmesg --clear\n"

// lib is what scripts of the tests begin with, by ". /run/lib.sh".
const lib = `
# discover PORTAL prints the targets there and makes node records of them.
discover() { iscsiadm -m discovery -t sendtargets -p "$1" -I iser; }

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
