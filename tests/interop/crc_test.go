package interop_test

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/tests/interop/harness"
	"github.com/iser-target/iser-target/tests/interop/vm"
)

const (
	tapHost, tapGuest = "198.18.77.1", "198.18.77.2" // of the network between host and guest (RFC 2544)
	// longVerify names a variable with the time of TestSegments per case, a duration.
	longVerify = "ISER_TARGET_CRC_TIME"
)

// bootOnTap boots a machine with siw1 on eth1, which is a tap device: segments reach the guest as the
// target's TCP sends them, and are not merged by GRO.
func bootOnTap(t *testing.T) *vm.VM {
	t.Helper()
	if testing.Short() && !required {
		t.Skip("boots a virtual machine: not with -short")
	}
	if err := vm.Missing(vm.Config{}); err != nil {
		lack(t, err)
	}
	need(t, "iscsid", "iscsiadm", "rdma", "ip", "fio", "ethtool")
	tap := fmt.Sprintf("isertap%d", os.Getpid()%10000)
	ip := func(args ...string) error {
		out, err := exec.Command("ip", args...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(out)))
		}
		return nil
	}
	if err := ip("tuntap", "add", "dev", tap, "mode", "tap"); err != nil {
		lack(t, err)
	}
	t.Cleanup(func() {
		if err := ip("tuntap", "del", "dev", tap, "mode", "tap"); err != nil {
			t.Error(err)
		}
	})
	for _, args := range [][]string{{"addr", "add", tapHost + "/30", "dev", tap}, {"link", "set", tap, "up"}} {
		if err := ip(args...); err != nil {
			t.Fatal(err)
		}
	}
	v := vm.Start(t, vm.Config{Tap: tap})
	v.Run(t, bringUp+`
ip link set eth1 up
ip addr add `+tapGuest+`/30 dev eth1
rdma link add siw1 type siw netdev eth1
ethtool -K eth1 gro off
`, time.Minute)
	return v
}

// siw of Linux 6.1 takes a CRC whose bytes come in two segments for a wrong one (siw_get_trailer). FPDUs
// have a multiple of 4 bytes, and so have the segments of TCP on Ethernet: no CRC is cut, and the target asks
// for CRCs (MPA-4.4-3, MPA-1.2-2). Where segments do not have that, it does not ask.
func TestSegments(t *testing.T) {
	v := bootOnTap(t)
	limit := 20 * time.Second
	if s := os.Getenv(longVerify); s != "" {
		var err error
		if limit, err = time.ParseDuration(s); err != nil {
			t.Fatalf("%s: %v", longVerify, err)
		}
	}
	for i, tt := range []struct {
		mtu  int
		more string
		crc  bool
	}{
		{1500, "", true}, // segments of 1448 bytes
		{9000, "mpa: {crc: on}\n", true},
		{1498, "", false}, // of 1446 bytes
	} {
		t.Run(fmt.Sprintf("MTU %d", tt.mtu), func(t *testing.T) {
			iqn := fmt.Sprintf("iqn.2026-11.io.example:segments%d", i)
			d := harness.Config{
				Targets: `
  - name: ` + iqn + `
    initiators: ["*"]
    luns:
      - {id: 0, backend: memory, size: 64MiB}
`,
				Portals: []harness.Portal{{Host: tapHost}},
				More:    tt.more,
			}.Start(t)
			v.Run(t, script(d, fmt.Sprintf(`
ip link set eth1 mtu %d
discover $PORTAL
login $PORTAL %s
`, tt.mtu, iqn)), quick)
			if l := harness.Ask[[]schema.SessionState](t, d, "session", "list"); len(l) != 1 || l[0].Connections[0].Framing.CRC != tt.crc {
				t.Errorf("%+v: want CRC %t", l, tt.crc)
			}
			v.Run(t, script(d, fmt.Sprintf(`
end=$((SECONDS + %[2]d))
while :; do # one pass after the other: with time_based fio takes its own later writes for faults, on any disk
	fio --ioengine=libaio --direct=1 --filename=$(disk %[1]s 0) --iodepth=8 --rw=randrw --bsrange=512-512k --size=48m \
		--verify=crc32c --verify_fatal=1 --randrepeat=0 --output-format=terse --terse-version=3 --name=segments
	[ $SECONDS -lt $end ] || break
done
logout %[1]s
! dmesg | grep -E 'detected conn error|I/O error'
`, iqn, int(limit.Seconds()))), limit+5*time.Minute)
		})
	}
}
