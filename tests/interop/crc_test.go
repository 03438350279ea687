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
	"github.com/iser-target/iser-target/tests/testkit"
)

// longVerify names a variable with the time of TestSegments per case, a duration.
const longVerify = "ISER_TARGET_CRC_TIME"

// tapNumber distinguishes the tap devices of test processes that run at the same time.
var tapNumber = os.Getpid() % 10000

// tapHost and tapGuest are the addresses of host and guest in a network of their own (RFC 2544).
var tapHost, tapGuest = tapAddr(1), tapAddr(2)

func tapAddr(host int) string {
	n := 4*tapNumber + host
	return fmt.Sprintf("198.18.%d.%d", n>>8, n&0xff)
}

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
	tap := fmt.Sprintf("isertap%d", tapNumber)
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
	t.Run("CRCs cut in two", func(t *testing.T) { cutCRCs(t, v) })
	t.Run("Markers", func(t *testing.T) { refuseMarkers(t, v) })
}

// cutCRCs asks siw for CRCs on segments of 1446 bytes. FPDUs have 1444, so a long stream comes to cut one. siw then ends the connection, and the log of the target
// says why. After the administrator has turned CRCs off, the session continues and no I/O has failed.
func cutCRCs(t *testing.T, v *vm.VM) {
	const iqn = "iqn.2026-11.io.example:cut"
	d := harness.Config{
		Targets: `
  - name: ` + iqn + `
    initiators: ["*"]
    luns:
      - {id: 0, backend: memory, size: 64MiB}
`,
		Portals: []harness.Portal{{Host: tapHost}},
		More:    "mpa: {crc: on}\n",
	}.Start(t)
	v.Run(t, script(d, fmt.Sprintf(`
ip link set eth1 mtu 1498
discover $PORTAL
login $PORTAL %[1]s
disk=$(disk %[1]s 0)
head -c 16M /dev/urandom >/run/cut
dd if=/run/cut of=$disk bs=256k oflag=direct conv=notrunc
{
	status=0
	for ((n = 0; n < 4; n++)); do
		dd if=$disk bs=16M count=1 iflag=direct | cmp - /run/cut || status=$?
	done
	echo $status >/run/cut.new
	mv /run/cut.new /run/cut.status
} </dev/null >/run/cut.log 2>&1 &
`, iqn)), long)
	testkit.Eventually(t, "siw refuses a CRC", func() bool { return strings.Contains(d.Log(), "peer terminated the stream: MPA: CRC mismatch") })
	d.Reload(t, "{crc: on}", "{crc: off}")
	v.Run(t, script(d, fmt.Sprintf(`
while [ ! -e /run/cut.status ]; do sleep 0.1; done
cat /run/cut.log >&2
[ "$(</run/cut.status)" = 0 ]
logout %s
dmesg | grep 'detected conn error'
! dmesg | grep 'I/O error'
dmesg --clear
`, iqn)), long)
}

// refuseMarkers asks siw for Markers, which it does not have: no login succeeds, and the log of the target says why. Without Markers
// the next one does.
func refuseMarkers(t *testing.T, v *vm.VM) {
	const iqn = "iqn.2026-11.io.example:markers"
	d := harness.Config{
		Targets: `
  - name: ` + iqn + `
    initiators: ["*"]
    luns:
      - {id: 0, backend: memory, size: 16MiB}
`,
		Portals: []harness.Portal{{Host: tapHost}},
		More:    "mpa: {markers: off}\n",
	}.Start(t)
	v.Run(t, script(d, "ip link set eth1 mtu 1500\ndiscover $PORTAL"), quick)
	d.Reload(t, "{markers: off}", "{markers: on}")
	v.Run(t, script(d, fmt.Sprintf(`
for value in conn[0].timeo.login_timeout session.initial_login_retry_max; do # Linux retries for one times the other, in seconds
	iscsiadm -m node -p $PORTAL -T %[1]s -o update -n node.$value -v 2
done
if login $PORTAL %[1]s; then exit 1; fi
`, iqn)), long)
	if !strings.Contains(d.Log(), "the peer has sent nothing since the Reply asked for Markers, which it may not support") {
		t.Error("the log does not say why the login has failed")
	}
	d.Reload(t, "{markers: on}", "{markers: off}")
	v.Run(t, script(d, fmt.Sprintf(`
iscsiadm -m node -p $PORTAL -T %[1]s -o update -n node.conn[0].timeo.login_timeout -v 15
login $PORTAL %[1]s
dd if=$(disk %[1]s 0) of=/dev/null bs=1M count=4 iflag=direct
logout %[1]s
! dmesg | grep 'I/O error'
`, iqn)), quick)
}
