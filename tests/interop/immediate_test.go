package interop_test

import (
	"fmt"
	"testing"

	"github.com/iser-target/iser-target/tests/interop/harness"
)

// Linux sends as much immediate data of a WRITE in one Send as its node record allows, up to 64 KiB, so that a
// WRITE of 64 KiB takes no RDMA Read (RFC 7145, section 6.4). fio finds its data again, on the session that does so,
// and on one with the default next to it.
func TestImmediateDataOverISER(t *testing.T) {
	v := boot(t)
	need(t, "fio")
	const large, small = "iqn.2026-11.io.example:large", "iqn.2026-11.io.example:small"
	d := harness.Start(t, `
  - name: `+large+`
    initiators: ["*"]
    luns: [{id: 0, backend: memory, size: 32MiB}]
  - name: `+small+`
    initiators: ["*"]
    luns: [{id: 0, backend: memory, size: 32MiB}]
`)
	v.Run(t, script(d, fmt.Sprintf(`
discover $PORTAL
iscsiadm -m node -p $PORTAL -T %s -o update -n node.conn[0].iscsi.MaxXmitDataSegmentLength -v 262144
login $PORTAL %[1]s
login $PORTAL %s`, large, small)), quick)
	got := v.Run(t, `
for s in /sys/class/iscsi_session/session*; do
	c=/sys/class/iscsi_connection/connection${s##*session}:0
	echo $(<$s/targetname) $(<$c/max_xmit_dlength)
done | sort`, quick)
	if want := large + " 65536\n" + small + " 8192\n"; got != want {
		t.Errorf("ISER-6.4-1: longest data segments\n%swant\n%s", got, want)
	}

	// reads returns how many Read Requests the target has sent.
	reads := func() int {
		n, ok := d.Metrics(t)[`iser_target_rdma_messages_total{direction="sent",op="read_request"}`]
		if !ok {
			t.Fatal("no metric of Read Requests")
		}
		return int(n)
	}
	const commands = 64 // of 64 KiB each
	write := `
fio --ioengine=libaio --direct=1 --filename=$(disk %s 0) --iodepth=8 --rw=randwrite --bs=64k --size=4m --verify=crc32c --verify_fatal=1 \
	--randrepeat=0 --output-format=terse --terse-version=3 --name=immediate`
	for _, tt := range []struct {
		iqn         string
		least, most int // Read Requests
	}{
		{large, 0, 0},
		{small, commands, 2 * commands},
	} {
		before := reads()
		v.Run(t, script(d, fmt.Sprintf(write, tt.iqn)), long)
		if n := reads() - before; n < tt.least || n > tt.most {
			t.Errorf("%s: %d Read Requests for %d WRITEs of 64 KiB, want %d to %d", tt.iqn, n, commands, tt.least, tt.most)
		}
	}

	// Longer WRITEs have both: immediate data, and RDMA Reads for the rest.
	both := `
fio --ioengine=libaio --direct=1 --iodepth=4 --rw=randrw --bsrange=512-512k --size=16m --verify=crc32c --verify_fatal=1 \
	--randrepeat=0 --output-format=terse --terse-version=3 --name=large --filename=$(disk %s 0) --name=small --filename=$(disk %s 0)`
	v.Run(t, script(d, fmt.Sprintf(both, large, small)), long)
	v.Run(t, script(d, "logout "+large+"; logout "+small), quick)
}
