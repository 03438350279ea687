package interop_test

import (
	"os"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/tests/interop/harness"
)

// scsi_dh_alua of Linux takes the states of a path from REPORT TARGET PORT GROUPS,
// and follows what SET TARGET PORT GROUPS of sg3_utils makes of them.
func TestALUA(t *testing.T) {
	v := boot(t)
	need(t, "sg_rtpg", "sg_stpg", "sg_turs")
	const iqn = "iqn.2026-11.io.example:alua"
	d := harness.Start(t, `
  - name: `+iqn+`
    initiators: ["*"]
    luns:
      - {id: 0, backend: memory, size: 16MiB}
`)
	got := v.Run(t, script(d, `
modprobe scsi_dh_alua
discover $PORTAL >&2; login $PORTAL `+iqn+` >&2
d=$(disk `+iqn+` 0)
state() { cat /sys/block/${d##*/}/device/access_state; }
waitfor() { for i in $(seq 50); do [ "$(state)" = "$1" ] && break; sleep 0.1; done; state; }
cat /sys/block/${d##*/}/device/dh_state
waitfor active/optimized
sg_rtpg --decode --extended $d | grep -E 'target port group id|asymmetric access state|T_SUP|Relative target port' >&2
sg_stpg --standby $d >&2
sg_turs $d >&2 || echo "TEST UNIT READY: $?"
sg_rtpg $d | grep -c 'asymmetric access state : 0x02'
# The kernel asks again when a command fails with TARGET PORT IN STANDBY STATE.
timeout 20 dd if=$d of=/dev/null bs=512 count=1 iflag=direct 2>/dev/null || echo standby is not read
sg_stpg --active $d >&2
timeout 20 dd if=$d of=/dev/null bs=512 count=1 iflag=direct 2>/dev/null && echo active is read
dmesg | grep -o 'alua: supports implicit and explicit TPGS' | head -1
logout `+iqn+" >&2"), long)
	want := `alua
active/optimized
TEST UNIT READY: 2
1
standby is not read
active is read
alua: supports implicit and explicit TPGS
`
	if got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
	v.Run(t, forgive, quick)
}

// The cache mode that an initiator has saved is there after a restart.
func TestSavedCacheMode(t *testing.T) {
	v := boot(t)
	need(t, "sg_wr_mode")
	const iqn = "iqn.2026-11.io.example:saved"
	d := harness.Start(t, `
  - name: `+iqn+`
    initiators: ["*"]
    luns:
      - {id: 0, backend: file, path: `+t.TempDir()+`/disk.img, size: 16MiB}
`)
	mode := func() string {
		t.Helper()
		return strings.TrimSpace(v.Run(t, script(d, `
discover $PORTAL >&2; login $PORTAL `+iqn+` >&2
d=$(disk `+iqn+` 0)
cat /sys/block/${d##*/}/device/scsi_disk/*/cache_type`), quick))
	}
	if got := mode(); got != "write back" {
		t.Errorf("cache_type is %q at first", got)
	}
	// The page as MODE SENSE has it, with WCE 0.
	v.Run(t, script(d, `
sg_wr_mode --page=8 --save --contents=08,12,00,00,00,00,00,00,00,00,00,00,00,00,00,00,00,00,00,00 $(disk `+iqn+` 0) >&2
logout `+iqn), quick)
	d.Stop(t)
	d.Start(t)
	if got := mode(); got != "write through" {
		t.Errorf("cache_type is %q after WCE 0 was saved", got)
	}
	v.Run(t, script(d, "logout "+iqn), quick)
}

// A file that was extended is a larger disk, without a new login.
func TestGrownDisk(t *testing.T) {
	v := boot(t)
	const iqn = "iqn.2026-11.io.example:grown"
	disk := t.TempDir() + "/disk.img"
	d := harness.Start(t, `
  - name: `+iqn+`
    initiators: ["*"]
    luns:
      - {id: 0, backend: file, path: `+disk+`, size: 16MiB}
`)
	v.Run(t, script(d, "discover $PORTAL; login $PORTAL "+iqn+"; blockdev --getsize64 $(disk "+iqn+" 0)"), quick)
	if err := os.Truncate(disk, 48<<20); err != nil {
		t.Fatal(err)
	}
	d.Reload(t, "16MiB", "48MiB")
	got := v.Run(t, script(d, `
d=$(disk `+iqn+` 0)
dd if=$d of=/dev/null bs=4096 count=1 iflag=direct 2>/dev/null
dmesg | grep -o 'Capacity data has changed' | head -1
echo 1 >/sys/block/${d##*/}/device/rescan
blockdev --getsize64 $d
dd if=/dev/zero of=$d bs=1M seek=47 count=1 oflag=direct 2>/dev/null && echo written
logout `+iqn+" >&2"), quick)
	if want := "Capacity data has changed\n50331648\nwritten\n"; got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
}

// iscsid looks for disks when a LUN is added: the event of REPORTED LUNS DATA HAS
// CHANGED comes by Asynchronous Message.
func TestAddedLUN(t *testing.T) {
	v := boot(t)
	const iqn = "iqn.2026-11.io.example:added"
	d := harness.Start(t, `
  - name: `+iqn+`
    initiators: ["*"]
    luns:
      - {id: 0, backend: memory, size: 16MiB}
`)
	v.Run(t, script(d, "discover $PORTAL; login $PORTAL "+iqn+"; disk "+iqn+" 0"), quick)
	const one = "      - {id: 0, backend: memory, size: 16MiB}\n"
	d.Reload(t, one, one+"      - {id: 7, backend: memory, size: 24MiB}\n")
	got := v.Run(t, script(d, `
blockdev --getsize64 $(disk `+iqn+` 7)
dd if=/dev/zero of=$(disk `+iqn+` 7) bs=1M count=1 oflag=direct 2>/dev/null && echo written
logout `+iqn+" >&2"), long)
	if want := "25165824\nwritten\n"; got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
}
