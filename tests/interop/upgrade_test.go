package interop_test

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/interop/harness"
)

// The target is upgraded ten times while fio writes and verifies over ib_iser and over TCP. fio sees no error and no
// pause above a second, and the kernel neither an error nor the loss of a connection, which leave checks: the
// initiator does not log in again.
func TestUpgrade(t *testing.T) {
	const (
		upgrades = 10
		longest  = time.Second
	)
	v := boot(t)
	need(t, "fio")
	const iqn = "iqn.2026-11.io.example:upgrade"
	dir := t.TempDir()
	d := harness.Start(t, fmt.Sprintf(`
  - name: %s.iser
    initiators: ["*"]
    luns: [{id: 0, backend: file, path: %s/iser.img, size: 32MiB}]
  - name: %[1]s.tcp
    initiators: ["*"]
    luns: [{id: 0, backend: file, path: %[2]s/tcp.img, size: 32MiB}]
`, iqn, dir))
	v.Run(t, script(d, `
discover $PORTAL
login $PORTAL `+iqn+`.iser
modprobe iscsi_tcp
iscsiadm -m discovery -t st -p $PORTAL -I default
iscsiadm -m node -T `+iqn+`.tcp -p $PORTAL -I default --login
rm -f /run/fio.*
touch /run/fio.go
for transport in iser tcp; do
	disk=$(disk `+iqn+`.$transport 0)
	(
		status=0
		while [ -e /run/fio.go ] && [ $status = 0 ]; do
			fio --ioengine=libaio --direct=1 --filename=$disk --iodepth=16 --rw=randrw --bs=16k --size=8m \
				--verify=crc32c --verify_fatal=1 --randrepeat=0 --output-format=terse --terse-version=3 \
				--name=$transport >>/run/fio.$transport 2>&1 || status=$?
		done
		echo $status >/run/fio.status.$transport
	) </dev/null >/run/fio.log.$transport 2>&1 &
done`), long)
	before := harness.Ask[[]struct {
		TSIH    uint16
		Started time.Time
	}](t, d, "session", "list")
	pause := regexp.MustCompile(`sessions (\d+) continue after a pause of (\S+)`)
	slowest := time.Duration(0)
	for range upgrades {
		time.Sleep(2 * time.Second) // of fio
		m := pause.FindStringSubmatch(d.Manage(t, "upgrade"))
		if m == nil || m[1] != strconv.Itoa(len(before)) {
			t.Fatalf("not all sessions continue: %q", m)
		}
		took, err := time.ParseDuration(m[2])
		if err != nil {
			t.Fatal(err)
		}
		slowest = max(slowest, took)
	}
	time.Sleep(2 * time.Second)
	after := harness.Ask[[]struct {
		TSIH    uint16
		Started time.Time
	}](t, d, "session", "list")
	if len(before) != 2 || fmt.Sprint(before) != fmt.Sprint(after) {
		t.Errorf("sessions %v, before the upgrades %v", after, before)
	}
	out := v.Run(t, script(d, `
rm /run/fio.go
for ((n = 0; n < 200; n++)); do
	[ -e /run/fio.status.iser ] && [ -e /run/fio.status.tcp ] && break
	sleep 0.5
done
cat /run/fio.log.* >&2
for transport in iser tcp; do
	[ $(cat /run/fio.status.$transport) = 0 ]
	# Fields 15 and 56 of version 3: the longest completion of a read and of a write, in microseconds.
	awk -F';' -v t=$transport '/^3;/ { n++; if ($15 > r) r = $15; if ($56 > w) w = $56 } END { print t, n, r, w }' /run/fio.$transport
done
iscsiadm -m node -T `+iqn+`.tcp -p $PORTAL -I default --logout
logout `+iqn+`.iser`), long)
	for _, transport := range []string{"iser", "tcp"} {
		m := regexp.MustCompile(`(?m)^` + transport + ` (\d+) (\d+) (\d+)$`).FindStringSubmatch(out)
		if m == nil {
			t.Fatalf("fio over %s has no result:\n%s", transport, out)
		}
		read, _ := strconv.Atoi(m[2])
		write, _ := strconv.Atoi(m[3])
		t.Logf("%s: fio ran %s times; slowest read %d µs, slowest write %d µs", transport, m[1], read, write)
		if time.Duration(max(read, write))*time.Microsecond > longest {
			t.Errorf("over %s a command took longer than %v", transport, longest)
		}
	}
	t.Logf("slowest of %d upgrades: %v", upgrades, slowest)
	if slowest > longest {
		t.Errorf("initiators waited for %v, want at most %v", slowest, longest)
	}
	if n := strings.Count(d.Log(), "upgraded: another process continues"); n != upgrades {
		t.Errorf("the log tells of %d upgrades, want %d", n, upgrades)
	}
}
