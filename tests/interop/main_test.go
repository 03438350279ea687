// Package interop_test holds the target to what a stock Linux initiator needs:
// the tests boot a virtual machine and use its ib_iser over siw.
package interop_test

import (
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

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
	os.Exit(code)
}

// boot returns a machine with siw0 on eth0, ib_iser, iscsid and the verbs of
// user space. All tests share one; if one of them has broken it, the next gets a
// new one. Without the means to boot it the test is skipped, or fails where
// ISER_TARGET_REQUIRE_INTEROP is 1.
func boot(t *testing.T) *vm.VM {
	t.Helper()
	required := os.Getenv("ISER_TARGET_REQUIRE_INTEROP") == "1"
	if testing.Short() && !required {
		t.Skip("boots a virtual machine: not with -short")
	}
	if err := vm.Missing(vm.Config{}); err != nil {
		if required {
			t.Fatalf("ISER_TARGET_REQUIRE_INTEROP is 1, but %v", err)
		}
		t.Skip(err)
	}
	guest.mu.Lock()
	defer guest.mu.Unlock()
	if guest.vm != nil {
		if guest.vm.Broken() == nil {
			return guest.vm
		}
		guest.vm.Close() // what is wrong has been reported
		guest.vm = nil
	}
	v, err := vm.Boot(vm.Config{})
	if err != nil {
		t.Fatal(err)
	}
	guest.vm = v
	t.Logf("booted in %v", v.BootTime.Round(time.Millisecond))
	v.Run(t, bringUp, time.Minute)
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
iscsid --foreground --debug 3 </dev/null >/run/iscsid.log 2>&1 &
`

const initiatorName = "iqn.2026-11.io.example:guest"
