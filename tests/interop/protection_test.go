package interop_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend/protection"
	"github.com/iser-target/iser-target/tests/interop/harness"
	"github.com/iser-target/iser-target/tests/interop/vm"
)

// onWire returns n blocks of pattern from lba on, with protection information of type 1.
func onWire(n int, lba uint32) (p []byte) {
	for i := range n {
		block := bytes.Repeat([]byte{byte(i) + 1, 0x5a}, 256)
		p = append(p, block...)
		p = binary.BigEndian.AppendUint64(p, uint64(protection.New(protection.CRC(block), 0x4242, lba+uint32(i))))
	}
	return p
}

// Linux knows the protection type over iscsi_tcp and ib_iser, and uses the LUN as any other, without errors. With sg_raw and
// ddpt it writes and reads protection information itself, a wrong guard is refused, and so is data that
// changed below the target.
func TestProtection(t *testing.T) {
	v := boot(t)
	need(t, "fio", "sg_raw", "sg_readcap", "sg_inq", "ddpt", "sdparm")
	const iqn = "iqn.2026-11.io.example:pi"
	dir := t.TempDir()
	img := filepath.Join(dir, "type1.img")
	d := harness.Config{Targets: `
  - name: ` + iqn + `
    initiators: ["*"]
    luns:
      - {id: 0, backend: file, path: ` + img + `, size: 16MiB, protection: 1}
      - {id: 1, backend: memory, size: 16MiB, protection: 3}
      - {id: 2, backend: memory, size: 16MiB}
`}.Start(t)
	const blocks = 600 // 312 KB: more than one piece of the target
	wire := onWire(blocks, 64)
	wrong := bytes.Clone(wire[:8*520])
	wrong[3*520+512] ^= 0x80 // the guard of LBA 67
	for name, content := range map[string][]byte{"wire": wire, "wrong": wrong} {
		if err := os.WriteFile(filepath.Join(v.Files(), "pi-"+name), content, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	v.Run(t, script(d, `
modprobe -a sg iscsi_tcp
discover $PORTAL
iscsiadm -m iface -I plain -o new
iscsiadm -m iface -I plain -o update -n iface.transport_name -v tcp
iscsiadm -m node -o new -T `+iqn+` -p $PORTAL -I plain`), quick)
	for _, iface := range []string{"plain", "iser"} {
		t.Run(iface, func(t *testing.T) {
			out := v.Run(t, script(d, fmt.Sprintf(`
IQN=%s
dmesg --clear
iscsiadm -m node -T $IQN -p $PORTAL -I %s --login >/dev/null
for n in 0 1 2; do disk $IQN $n; done >/run/disks
{ read -r a; read -r b; read -r c; } </run/disks
kind() { cat /sys/block/${1#/dev/}/device/scsi_disk/*/protection_type; }
echo "types $(kind $a) $(kind $b) $(kind $c)"
dmesg | grep -o '[A-Za-z]*abling DIF Type . protection' || true
sg_readcap --16 $a | grep -i 'protection:'
sg_readcap --16 $b | grep -i 'protection:'
sg_inq --page=ei $a | grep -E 'SPT|GRD_CHK|REF_CHK'
for dev in $a $b; do
	fio --filename=$dev --direct=1 --ioengine=libaio --rw=randwrite --bs=16k --iodepth=8 --size=4m \
		--verify=crc32c --verify_fatal=1 --randrepeat=0 --output-format=terse --terse-version=3 --name=pi >/dev/null
done
S=%s
raw() { sg_raw "$@" 2>/run/raw; }
# WRITE(16) and READ(16) of 600 blocks from LBA 64, with WRPROTECT and RDPROTECT 001b
raw -s %[4]d -i $S/pi-wire $a 8a 20 00 00 00 00 00 00 00 40 00 00 02 58 00 00 || cat /run/raw
raw -r %[4]d -o /run/back $a 88 20 00 00 00 00 00 00 00 40 00 00 02 58 00 00 || cat /run/raw
cmp /run/back $S/pi-wire && echo same
raw -s 4160 -i $S/pi-wrong $a 8a 20 00 00 00 00 00 00 00 40 00 00 00 08 00 00 || { echo "refused $?"; grep -iE 'guard|asc|info' /run/raw; }
ddpt if=$a bs=512 iflag=pt of=/run/ddpt protect=1 skip=64 count=600 2>/run/ddpt.log || cat /run/ddpt.log
cmp /run/ddpt $S/pi-wire && echo ddpt reads the same
ddpt if=$S/pi-wire bs=512 of=$a oflag=pt protect=0,1 seek=64 count=600 2>/run/ddpt.log || cat /run/ddpt.log
ddpt if=$a bs=512 iflag=pt of=/run/ddpt protect=3 skip=64 count=600 2>/run/ddpt.log || cat /run/ddpt.log
cmp /run/ddpt $S/pi-wire && echo ddpt wrote the same
dd if=$a of=/dev/null bs=64k iflag=direct status=none && echo read all
sdparm --set=ATMPE=1 $b >/dev/null && sdparm --page=atag --set=AT_LBAT=0x1234,AT_COUNT=32768 $b >/dev/null
sdparm --get=ATMPE $b | grep -o 'ATMPE *[01]' | tr -s ' '
dd if=/dev/zero of=$b bs=512 count=1 seek=20000 oflag=direct status=none
raw -r 520 -o /run/tag $b 88 60 00 00 00 00 00 00 4e 20 00 00 00 01 00 00 || cat /run/raw
echo "tag$(od -An -tx1 -j514 -N2 /run/tag)"
sdparm --clear=ATMPE $b >/dev/null
sdparm --get=ATMPE $b | grep -o 'ATMPE *[01]' | tr -s ' '
sdparm --set=ATMPE=1 $c >/dev/null 2>&1 || echo "not without protection information: $?"`, iqn, iface, vm.Files, len(wire))), long)
			for _, want := range []string{
				"types 1 3 0\n", "DIF Type 1 protection", "DIF Type 3 protection", "prot_en=1, p_type=0, p_i_exponent=0 [type 1 protection]",
				"prot_en=1, p_type=2, p_i_exponent=0 [type 3 protection]", "GRD_CHK=1", "\nsame\n", "refused", "ddpt reads the same\n", "ddpt wrote the same\n", "read all\n",
				"\nATMPE 1\n", "\ntag 12 34\nATMPE 0\n", "not without protection information: 5",
			} {
				if !strings.Contains(out, want) {
					t.Errorf("no %q in\n%s", want, out)
				}
			}

			// Somebody changes a byte of the file: the read says so. The neighbor's I/O continues.
			f, err := os.OpenFile(img, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			_, err = f.WriteAt([]byte{0xee}, 70*512+9)
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
			if err != nil {
				t.Fatal(err)
			}
			out = v.Run(t, script(d, fmt.Sprintf(`
{ read -r a; read -r b; read -r c; } </run/disks
for cdb in "28 00 00 00 00 40 00 00 08 00" "28 20 00 00 00 40 00 00 08 00"; do
	sg_raw -r 4160 -o /run/back $a $cdb 2>/run/raw || { echo "damage: $?"; cat /run/raw; }
done
fio --filename=$c --direct=1 --ioengine=libaio --rw=randwrite --bs=16k --iodepth=8 --size=2m \
	--verify=crc32c --verify_fatal=1 --randrepeat=0 --output-format=terse --terse-version=3 --name=neighbour >/dev/null && echo the neighbour works
iscsiadm -m node -T %s -p $PORTAL -I %s --logout >/dev/null
`+forgive, iqn, iface)), long)
			if n := strings.Count(strings.ToLower(out), "guard check failed"); n != 2 || !strings.Contains(out, "the neighbour works") {
				t.Errorf("%d reads failed by the guard, want 2:\n%s", n, out)
			}
		})
	}
	d.AwaitVars(t, map[string]float64{"sessions": 0, "connections": 0}, 10*time.Second)
}
