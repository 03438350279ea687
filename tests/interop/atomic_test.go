package interop_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/interop/harness"
	"github.com/iser-target/iser-target/tests/interop/vm"
)

// TestAtomic boots the newest kernel of Debian's backports, because RWF_ATOMIC exists since Linux 6.11. The target runs in the guest, its
// medium is scsi_debug with atomic writes, and its initiator is iscsi_tcp. Traces of the SCSI layer show that a WRITE ATOMIC(16) of the
// initiator is one WRITE ATOMIC(16) of the medium, whether the LUN is the device or a file on it.
func TestAtomic(t *testing.T) {
	dir := os.Getenv("ISER_TARGET_ATOMIC")
	if dir == "" {
		t.Skip("downloads a kernel of 120 MB: make atomic")
	}
	need(t, "iscsid", "iscsiadm", "sg_write_x", "sg_vpd", "python3", "mkfs.ext4", "mkfs.xfs", "xz")
	if err := vm.Missing(vm.Config{}); err != nil {
		lack(t, err)
	}
	if out, err := exec.Command("./newest-kernel.sh", dir).CombinedOutput(); err != nil {
		t.Fatalf("newest-kernel.sh: %v\n%s", err, out)
	}
	// The media are in the memory of the guest, and XFS requires 300 MB.
	v := vm.Start(t, vm.Config{Dir: dir, MemMiB: 2048})
	t.Logf("booted in %v", v.BootTime.Round(time.Millisecond))
	harness.Copy(t, filepath.Join(v.Files(), "iser-target"))
	for name, content := range map[string]string{
		"atomic.yaml": atomicConfig, "writev.py": atomicWriter,
		"iscsid.conf": "node.startup = manual\nnode.session.cmds_max = 128\nnode.session.queue_depth = 32\n",
	} {
		if err := os.WriteFile(filepath.Join(v.Files(), name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	v.Run(t, "cat >/run/lib.sh <<'.'\n"+lib+".\n"+atomicUp, long)
	for _, tt := range []struct {
		name string
		lun  int
		unit int // bytes, as the medium promises
		size int // bytes of a write that the medium takes as one
	}{
		{"device", 0, 1024, 256 << 10},
		{"ext4", 1, 4096, 4096},
		{"XFS", 2, 4096, 4096},
	} {
		t.Run(tt.name, func(t *testing.T) {
			out := v.Run(t, fmt.Sprintf("LUN=%d UNIT=%d SIZE=%d\n%s", tt.lun, tt.unit, tt.size, atomicWrites), long)
			want := []string{
				"RWF_ATOMIC: 1 and 1 WRITE ATOMIC(16)\n", // of pwritev2 on the initiator, and of the target
				"RWF_ATOMIC reads back\n",
				"FUA: 1 and 1 WRITE ATOMIC(16)\n",
				"neighbors are as they were\n",
				"too long: Invalid field in cdb\n", "not aligned: Invalid field in cdb\n", "refused: 0 WRITE ATOMIC(16)\n",
			}
			if tt.size > tt.unit {
				want = append(want, "three units: 1 and 1 WRITE ATOMIC(16)\n", "three units read back\n")
			}
			for _, want := range want {
				if !strings.Contains(out, want) {
					t.Errorf("no %q in\n%s", want, out)
				}
			}
		})
	}
	t.Run("without", func(t *testing.T) {
		out := v.Run(t, "D=$(. /run/lib.sh; disk "+atomicIQN+" 3)\n"+`sg_write_x --16 --atomic=0 --lba=0 --num=8 --bs=512 -v --in=/run/fives $D 2>&1 || true`, quick)
		if !strings.Contains(out, "Invalid command operation code") {
			t.Errorf("WRITE ATOMIC(16) of a LUN on a medium without atomic writes: %s", out)
		}
	})
	v.Run(t, atomicDown, quick)
}

const atomicIQN = "iqn.2026-11.io.example:atomic"

const atomicConfig = `
portals:
  - listen: 127.0.0.1:3260
targets:
  - name: ` + atomicIQN + `
    initiators: ["*"]
    luns:
      - {id: 0, backend: block, path: /run/media/device}
      - {id: 1, backend: file, path: /run/media/ext4/disk.img, size: 16MiB}
      - {id: 2, backend: file, path: /run/media/xfs/disk.img, size: 16MiB}
      - {id: 3, backend: file, path: /run/media/tmpfs.img, size: 16MiB}
state_dir: /run/state
`

// atomicWriter writes BYTES of fives at an OFFSET of a FILE with RWF_ATOMIC, which takes direct I/O.
const atomicWriter = `
import mmap, os, sys
name, offset, n = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
m = mmap.mmap(-1, n)
m.write(b"\x05" * n)
fd = os.open(name, os.O_RDWR | os.O_DIRECT)
assert os.pwritev(fd, [m], offset, 0x40) == n
`

// atomicUp makes three media of scsi_debug, whose atomic writes have a granularity of 1 KiB, and starts the target and the initiator.
const atomicUp = `
ip link set lo up
modprobe -a sd_mod iscsi_tcp sg ext4 xfs
modprobe scsi_debug add_host=3 per_host_store=1 dev_size_mb=310 sector_size=512 physblk_exp=0 opt_blks=0 \
	atomic_wr=1 atomic_wr_max_length=512 atomic_wr_align=2 atomic_wr_gran=2
mkdir -p /run/media/ext4 /run/media/xfs /run/lock
n=0
for host in /sys/bus/pseudo/drivers/scsi_debug/adapter*; do
	until block=$(ls -d $host/host*/target*/*/block/*); do sleep 0.1; done 2>/dev/null
	media[n++]=/dev/${block##*/}
done
echo "${media[*]}" >/run/media/names
ln -s ${media[0]} /run/media/device
mkfs.ext4 -q -b 4096 ${media[1]} && mount ${media[1]} /run/media/ext4
mkfs.xfs -q ${media[2]} && mount ${media[2]} /run/media/xfs
for disk in /run/media/ext4/disk.img /run/media/xfs/disk.img; do
	head -c 16M /dev/zero | tr '\0' '\3' >$disk # all of it has blocks
done
head -c 16M /dev/zero | tr '\0' '\3' >/run/media/tmpfs.img
head -c 16M /dev/zero | tr '\0' '\3' | dd of=${media[0]} bs=1M oflag=direct status=none
sync
head -c 1M /dev/zero | tr '\0' '\5' >/run/fives
cp /run/share/iser-target /run/
/run/iser-target serve --config /run/share/atomic.yaml </dev/null >/run/serve.out 2>/run/serve.log &
for ((n = 0; n < 300; n++)); do
	if grep -q msg=serving /run/serve.log; then break; fi
	sleep 0.1
done
grep msg=serving /run/serve.log || { cat /run/serve.log >&2; exit 1; }
echo InitiatorName=` + initiatorName + ` >/etc/iscsi/initiatorname.iscsi
cp /run/share/iscsid.conf /etc/iscsi/
iscsid --foreground </dev/null >/run/iscsid.log 2>&1 &
until iscsiadm -m discovery -t sendtargets -p 127.0.0.1; do sleep 1; done
iscsiadm -m node --login
mount -t tracefs tracefs /sys/kernel/tracing
echo 1 >/sys/kernel/tracing/events/scsi/scsi_dispatch_cmd_start/enable
`

// atomicWrites writes to $LUN, whose medium has a unit of $UNIT bytes, and takes $SIZE bytes as one. The LUN is full of threes.
const atomicWrites = `
. /run/lib.sh
d=$(disk ` + atomicIQN + ` $LUN)
read -ra media </run/media/names
m=${media[LUN]}
trace=/sys/kernel/tracing/trace
# atomics DISK prints how many WRITE ATOMIC(16) the kernel has sent to it.
atomics() {
	local h c t l
	IFS=: read -r h c t l <<<"$(basename $(readlink -f /sys/block/${1#/dev/}/device))"
	grep "host_no=$h channel=$c id=$t lun=$l .*raw=9c" $trace | wc -l || true
}
both() { echo "$(atomics $d) and $(atomics $m) WRITE ATOMIC(16)"; }
limits() { echo $(cat /sys/block/${1#/dev/}/queue/atomic_write_unit_{min,max}_bytes); }
# blocks LBA N prints them.
blocks() { dd if=$d bs=512 skip=$1 count=$2 iflag=direct status=none; }
threes() { blocks $1 $2 | tr -d '\3' | cmp - /dev/null; }
others() { for n in 0 1 2 3; do [ $n = $LUN ] || dd if=$(disk ` + atomicIQN + ` $n) bs=1M count=16 iflag=direct status=none | md5sum; done; }
before=$(others)
unit=$((UNIT / 512)) size=$((SIZE / 512))

sg_vpd --page=bl $d >/run/bl
grep -i atomic /run/bl >&2
read -r min max <<<"$(limits $d)"
echo "limits in bytes: of the initiator $min to $max, of the medium $(limits $m)" >&2
[ $min = $UNIT ]
[ $LUN != 0 ] || [ "$(limits $d)" = "$(limits $m)" ]
grep -qw "Maximum atomic transfer length: $((max / 512))" /run/bl
grep -qw "Atomic alignment: $unit" /run/bl
grep -qw "Atomic transfer length granularity: $unit" /run/bl

echo >$trace
python3 /run/share/writev.py $d 1048576 $SIZE
cat $trace >&2
echo "RWF_ATOMIC: $(both)"
blocks 2048 $size | cmp -n $SIZE - /run/fives
threes $((2048 - unit)) $unit
threes $((2048 + size)) $unit
echo "RWF_ATOMIC reads back"

x() { sg_write_x --16 --atomic=0 --bs=512 "$@" --in=/run/fives $d; }
echo >$trace
x --fua --lba=4096 --num=$unit
echo "FUA: $(both)"
blocks 4096 $unit | cmp -n $UNIT - /run/fives
if [ $size -gt $unit ]; then
	echo >$trace
	x --lba=8192 --num=$((3 * unit))
	echo "three units: $(both)"
	blocks 8192 $((3 * unit)) | cmp -n $((3 * UNIT)) - /run/fives
	threes $((8192 + 3 * unit)) $unit
	echo "three units read back"
fi
[ "$(others)" = "$before" ] && echo "neighbors are as they were"

echo >$trace
refused() { x -v "$@" 2>&1 | tee /dev/stderr | grep -io 'invalid field in cdb' | head -n 1; }
echo "too long: $(refused --lba=0 --num=$((2 * max / 512)))"
echo "not aligned: $(refused --lba=1 --num=$unit)"
echo "refused: $(atomics $m) WRITE ATOMIC(16)"
`

const atomicDown = `
iscsiadm -m node --logout
pkill -TERM -x iser-target
while pgrep -x iser-target >/dev/null; do sleep 0.1; done
tail -n 1 /run/serve.log | grep msg=stopped
umount /run/media/ext4 /run/media/xfs
`
