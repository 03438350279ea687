package interop_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/interop/harness"
	"github.com/iser-target/iser-target/tests/interop/vm"
)

// TestPool runs lun create --pool and lun delete --delete-volume with LVM and dm-thin of Linux: dry runs, a LUN that the target refuses,
// a snapshot of LVM that another LUN serves, lun snapshot and lun clone, and a pool that becomes full. LUN 0, in memory, is the neighbor.
func TestPool(t *testing.T) {
	need(t, "iscsid", "iscsiadm", "lvcreate", "thin_check", "losetup")
	if err := vm.Missing(vm.Config{}); err != nil {
		lack(t, err)
	}
	v := vm.Start(t, vm.Config{})
	t.Logf("booted in %v", v.BootTime.Round(time.Millisecond))
	harness.Copy(t, filepath.Join(v.Files(), "iser-target"))
	for name, content := range map[string]string{"pool.yaml": poolConfig, "iscsid.conf": "node.startup = manual\n"} {
		if err := os.WriteFile(filepath.Join(v.Files(), name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	v.Run(t, "cat >/run/lib.sh <<'.'\n"+lib+".\n"+poolUp, long)
	out := v.Run(t, poolWork, long)
	for _, bad := range []string{"a flush to a full pool succeeded", "a write to a full pool succeeded"} {
		if strings.Contains(out, bad) {
			t.Error(bad)
		}
	}
	for _, want := range []string{
		"dry: note: makes volume /dev/vg0/store-lun1 (128MiB)\n", "dry: volumes: thin\n",
		"in use: 1, volumes: thin\n",
		"refused: 1, the volume was removed again, volumes: thin\n",
		"created: add LUN 1 of " + poolIQN + " (done)\n", "tag: iser-target:" + poolIQN + "/1/",
		"again: 1: /dev/vg0/store-lun1 exists: LUN 1 of " + poolIQN + " uses it. Nothing was changed\n",
		"snapshot has what was acknowledged, and nothing later\n",
		"made: snapshot s1 of LUN 1 of " + poolIQN + ": vg0/store-lun1-snap-s1, 128MiB\n",
		"listed: vg0/store-lun1-snap-s1\n", "clones: volumes: back now snap store-lun1 store-lun1-snap-s1 store-lun3 thin\n",
		"cleaned: volumes: snap store-lun1 store-lun3 thin\n",
		"full: Hardware Error, Write error\n",
		"warning: pool lvm:vg0/thin is 100% full",
		"neighbor works\n", "old data reads back\n",
		"not ours: 3, volumes: snap store-lun1 store-lun3 thin\n",
		"deleted: volumes: snap store-lun3 thin, LUNs: 0 2 3\n",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
}

const poolIQN = "iqn.2026-11.io.example:pool"

const poolConfig = `
control: {socket: /run/control}
portals: [{listen: "127.0.0.1:3260"}]
targets:
  - name: ` + poolIQN + `
    alias: store
    initiators: ["*"]
    luns: [{id: 0, backend: memory, size: 16MiB}]
state_dir: /run/state
`

// poolUp makes a thin pool of 64 MiB, which fails writes at once when it is full, and starts the target and the initiator.
const poolUp = `
ip link set lo up
modprobe -a sd_mod iscsi_tcp loop dm_thin_pool dm_snapshot
mkdir -p /run/lock /run/lvm
/lib/systemd/systemd-udevd --daemon
echo 'activation { monitoring = 0 }' >/etc/lvm/lvmlocal.conf
truncate -s 256M /run/pv.img
vgcreate vg0 $(losetup --find --show /run/pv.img)
lvcreate --type thin-pool --size 64M --name thin vg0
lvchange --errorwhenfull y vg0/thin
cp /run/share/iser-target /run/
/run/iser-target serve --config /run/share/pool.yaml </dev/null >/run/serve.out 2>/run/serve.log &
for ((n = 0; n < 300; n++)); do
	if grep -q msg=serving /run/serve.log; then break; fi
	sleep 0.1
done
grep msg=serving /run/serve.log || { cat /run/serve.log >&2; exit 1; }
echo InitiatorName=` + initiatorName + ` >/etc/iscsi/initiatorname.iscsi
cp /run/share/iscsid.conf /etc/iscsi/
iscsid --foreground </dev/null >/run/iscsid.log 2>&1 &
until iscsiadm -m discovery -t sendtargets -p 127.0.0.1; do sleep 1; done
`

const poolWork = `
. /run/lib.sh
export ISER_TARGET_CONTROL_SOCKET=/run/control
create() { /run/iser-target lun create ` + poolIQN + ` "$@"; }
volumes() { echo volumes: $(lvs --noheadings -o lv_name vg0); }
# code COMMAND... runs it, prints its exit code, and leaves its messages in /run/said.
code() { local c=0; "$@" >/run/said 2>&1 || c=$?; cat /run/said >&2; echo $c; }
in_pool="--pool lvm:vg0/thin --size 128MiB"

create $in_pool --dry-run | sed 's/^/dry: /'
echo "dry: $(volumes)"
echo "in use: $(code create $in_pool --id 0), $(volumes)"
# The target notices the missing directory when it opens the device.
echo "refused: $(code create $in_pool --checksums --checksums-path /run/none/sums), $(grep -io 'the volume was removed again' /run/said | tr T t), $(volumes)"
create $in_pool | sed 's/^/created: /'
echo "tag: $(lvs --noheadings -o lv_tags vg0/store-lun1 | tr -d ' ')"
echo "again: $(code create $in_pool --id 7 --volume store-lun1): $(head -n 1 /run/said | sed 's/^iser-target: //')"

create $in_pool --id 3 --write-through
iscsiadm -m node --login
until n=$(disk ` + poolIQN + ` 0) && d=$(disk ` + poolIQN + ` 1); do sleep 0.1; done 2>/dev/null
head -c 8M /dev/urandom >/run/one
head -c 8M /dev/urandom >/run/two
dd if=/run/one of=$d bs=1M oflag=direct status=none
lvcreate --yes --snapshot --setactivationskip n --name snap vg0/store-lun1
dd if=/run/two of=$d bs=1M oflag=direct status=none
create --backend block --path /dev/vg0/snap --read-only
iscsiadm -m session --rescan
until s=$(disk ` + poolIQN + ` 2); do sleep 0.1; done 2>/dev/null
dd if=$s bs=1M count=8 iflag=direct status=none | cmp - /run/one
dd if=$d bs=1M count=8 iflag=direct status=none | cmp - /run/two
echo "snapshot has what was acknowledged, and nothing later"

# The same by lun snapshot and lun clone. The writes are in the cache of the kernel when the snapshot is made.
dd if=/run/one of=$d bs=1M oflag=direct status=none
/run/iser-target lun snapshot create ` + poolIQN + ` 1 s1 | sed 's/^/made: /'
dd if=/run/two of=$d bs=1M oflag=direct status=none
clone() { /run/iser-target lun clone ` + poolIQN + ` "$@"; }
clone 1@s1 --volume back --id 5 --dry-run
clone 1@s1 --volume back --id 5
clone 1 --volume now --id 6
iscsiadm -m session --rescan
until b=$(disk ` + poolIQN + ` 5) && w=$(disk ` + poolIQN + ` 6); do sleep 0.1; done 2>/dev/null
dd if=$b bs=1M count=8 iflag=direct status=none | cmp - /run/one
dd if=$w bs=1M count=8 iflag=direct status=none | cmp - /run/two
dd if=/run/two of=$b bs=1M count=1 oflag=direct status=none
echo "listed: $(echo $(/run/iser-target lun snapshot list -o jsonpath='[*].path'))"
echo "clones: $(volumes)"
echo 1 >/sys/block/${b#/dev/}/device/delete
echo 1 >/sys/block/${w#/dev/}/device/delete
for n5 in 5 6; do /run/iser-target lun delete ` + poolIQN + ` $n5 --delete-volume --disrupt; done
/run/iser-target lun snapshot delete ` + poolIQN + ` 1 s1
echo "cleaned: $(volumes)"

# The kernel keeps what it was sent in its cache, so only a flush, or a LUN with write-through, meets the full
# pool. Of a block device, the cache of the kernel reports EIO, whatever the error of the device was.
w=$(disk ` + poolIQN + ` 3)
if dd if=/dev/urandom of=$d bs=1M seek=8 oflag=direct conv=fsync 2>/run/dd; then echo "a flush to a full pool succeeded"; fi
cat /run/dd >&2
dmesg -C
if dd if=/run/one of=$w bs=1M oflag=direct conv=fsync 2>/run/dd; then echo "a write to a full pool succeeded"; fi
cat /run/dd >&2
dmesg >&2
echo "full: $(dmesg | grep -o 'Hardware Error' | head -n 1), $(dmesg | grep -o 'Add. Sense: Write error' | head -n 1 | sed 's/.*: //')"
create $in_pool --dry-run 2>&1 || true
dd if=/run/one of=$n bs=1M oflag=direct status=none
dd if=$n bs=1M count=8 iflag=direct status=none | cmp - /run/one
echo "neighbor works"
dd if=$d bs=1M count=8 iflag=direct status=none | cmp - /run/two
echo "old data reads back"

iscsiadm -m node --logout
delete() { /run/iser-target lun delete ` + poolIQN + ` "$@"; }
echo "not ours: $(code delete 2 --delete-volume), $(volumes)"
delete 1 --delete-volume --dry-run
delete 1 --delete-volume
echo "deleted: $(volumes), LUNs: $(echo $(/run/iser-target lun list -o jsonpath='[*].id'))"
`
