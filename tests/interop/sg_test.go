package interop_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/interop/harness"
)

// sgTests are commands of sg3_utils and sdparm, run one after the other on fresh
// LUNs. What they print is in testdata/sg. The disks:
//
//	$d  LUN 0 over iSER
//	$e  the same LUN over TCP, of another initiator
//	$r  LUN 1 over iSER: removable, may be sanitized; its sg device, because an
//	    open disk locks the medium
//	$c  LUN 2 over iSER
//	$ds, $cs  the sg devices of $d and $c
//
// sg_read_buffer 1.46 asks for 0 bytes, whatever --length says, so sg_raw reads the echo buffer.
var sgTests = []struct {
	name     string
	commands string
}{
	{"inquiry", `
sg_inq $d
sg_inq $r
sg_vpd --all $d
sg_vpd --page=sv $r
sg_luns --decode $d
sg_readcap --16 $d
sg_turs --verbose $d
sg_requests $d
`},
	{"opcodes", `
sg_opcodes $d
sg_opcodes --opcode=0x42 $d
sg_opcodes --opcode=0x9e,0x12 --rctd $d
sg_opcodes --opcode=0xc0 $d
sg_opcodes --tmf $d
`},
	{"ports", `
sg_rtpg --decode --extended $d
sg_rtpg --decode $e
sg_stpg --active $d
sg_rtpg --decode $e
sg_stpg --optimized $d
sg_rtpg --decode $d
sg_stpg --tp=7 --optimized $d
`},
	{"modes", `
sg_modes --all $d
sg_modes --list $d
sg_modes --page=8 --control=3 $d
sdparm --all $d
sdparm --get=WCE,RCD $d
sg_logs $d
sg_logs --page=ie $d
sg_logs --page=we $d
sg_logs --page=gsp $d | sed 's/= [1-9][0-9]*$/= N/'
sg_logs --page=0x3e $d
`},
	{"logs", `
sg_write_same --lba=0 --num=8 --in=/run/aa $d
sg_logs --page=we $d
sg_logs --page=we --reset --select $d
sg_turs --verbose $e
sg_turs $e
sg_turs $d
sg_logs --page=we $d
sg_write_same --lba=0 --num=4 --in=/run/aa $e
sg_logs --page=we $d
sg_logs --page=re --reset --select $d
sg_turs $e
sg_logs --page=we $e
sg_logs --page=0x3e --reset --select $d
sg_logs --page=we --reset --select --sp $d
`},
	{"sense", `
sdparm --get=D_SENSE,TST $d
sdparm --set=D_SENSE=1,TST=1 $d
sg_turs --verbose $e
sdparm --get=D_SENSE,TST $e
sg_write_same --lba=131071 --num=2 --in=/run/aa $d
sg_verify --lba=0 --count=1 --ebytchk=1 --ndo=512 --in=/run/aa --verbose $d
sg_requests $d
sg_requests --desc $d
sdparm --set=D_SENSE=0,TST=0 $e
sg_turs --verbose $d
sdparm --get=D_SENSE,TST $d
`},
	{"timestamp", `
sg_timestamp --origin --no-timestamp $d
sg_timestamp --milliseconds=86400000 $d
sg_turs --verbose $e
sg_timestamp --origin $e | sed 's/^864[0-9]*$/864.../'
`},
	{"identifying", `
sg_ident --itype=127 --raw $d | od -A n -t x1
sg_ident --itype=2 $d
printf 'rack 7' | sg_ident --itype=2 --set $d
printf 'rack 7\0' | sg_ident --itype=2 --set $d
sg_turs --verbose $e
sg_turs $d
sg_ident --itype=2 --ascii $e
printf 'asset 0815' | sg_ident --set $e
sg_turs --verbose $d
sg_ident $d
head -c 512 /dev/zero | tr '\0' x | sg_ident --set $d
sg_turs --verbose $e
sg_ident --raw $e | wc -c
head -c 257 /dev/zero | tr '\0' x | sg_ident --itype=2 --set --verbose $d
sg_ident --itype=2 --clear $d
sg_ident --itype=2 $d
sg_ident --itype=4 --verbose $d
`},
	{"echo", `
sg_raw --request=4 $d 3c 03 00 00 00 00 00 00 04 00
sg_raw --request=4 $d 3c 0b 00 00 00 00 00 00 04 00
sg_read_buffer --mode=echo --verbose $d
sg_write_buffer --mode=echo --length=4 --in=/run/aabb --skip=510 $d
sg_raw --request=4 $d 3c 0a 00 00 00 00 00 00 04 00
sg_read_buffer --mode=echo --verbose $e
sg_write_buffer --mode=echo --length=257 --in=/run/00 --verbose $d
sg_write_buffer --mode=data --length=4 --in=/run/00 --verbose $d
sg_read_buffer --mode=data --verbose $d
sg_raw --request=4 $d 3c 0a 00 00 00 00 00 00 04 00
sg_write_buffer --mode=echo --length=256 --in=/run/aa $e
sg_raw --request=300 --binary $e 3c 0a 00 00 00 00 00 01 2c 00 | od -A n -t x1 -w1 -v | uniq -c
sg_raw --request=4 $d 3c 0a 00 00 00 00 00 00 04 00
`},
	{"provisioning", `
sg_get_lba_status --lba=0 $d
sg_write_same --lba=0 --num=256 --in=/run/aa $d
sg_logs --page=lbp $d
sg_get_lba_status --lba=0 $d
blocks $d 0 256
sg_unmap --force --lba=128 --num=128 $d
sg_get_lba_status --lba=0 $d
sg_get_lba_status --lba=128 --brief $d
blocks $d 128 128
sg_write_same --16 --unmap --lba=0 --num=128 --in=/run/00 $d
sg_get_lba_status --lba=0 --brief $d
sg_write_same --16 --lba=64 --num=64 --in=/run/aa $d
sg_write_same --16 --ndob --lba=64 --num=32 $d
blocks $d 64 32
blocks $d 96 32
sg_write_same --lba=131071 --num=2 --in=/run/aa $d
sg_unmap --force --lba=131071 --num=2 $d
sg_write_same --16 --anchor --unmap --lba=0 --num=8 --in=/run/00 $d
sdparm --set=LBPERE=1 $d
sg_wr_mode --page=0x1c,2 --contents=5c,2,0,1c,0,0,0,0,0,0,0,0,0,0,0,0,0,1,0,0,0,0,0,0,81,2,0,0,0,0,0,10 $d
sg_modes --page=0x1c,2 $d
sg_write_same --lba=2048 --num=2048 --in=/run/aa $d
awaitAttention 'Received an indication that the LUN reached a thin provisioning soft threshold.'
sg_turs --verbose $d
sg_logs --page=lbp $d
sg_wr_mode --page=0x1c,2 --contents=5c,2,0,1c,0,0,0,0,0,0,0,0,0,0,0,0,0,1,0,0,0,0,0,0,80,2,0,0,0,0,0,10 $d
`},
	{"compare", `
sg_write_same --lba=0 --num=8 --in=/run/aa $d
sg_compare_and_write --lba=1 --num=1 --in=/run/aabb $d
blocks $d 0 1
blocks $d 1 1
sg_compare_and_write --lba=1 --num=1 --in=/run/aabb $d
sg_compare_and_write --lba=1 --num=1 --in=/run/bbaa $e
blocks $e 1 1
sg_compare_and_write --lba=0 --num=65 --in=/run/zero66k $d
sg_verify --lba=0 --count=8 $d
sg_verify --lba=0 --count=1 --ebytchk=1 --ndo=512 --in=/run/aa $d
sg_verify --lba=0 --count=1 --ebytchk=1 --ndo=512 --in=/run/00 $d
sg_write_verify --lba=4 --num=1 --bytchk=1 --in=/run/00 $d
blocks $d 4 1
sg_write_x --16 --atomic=0 --lba=5 --num=1 --in=/run/00 $d
blocks $d 5 1
sg_sync $d
`},
	{"copy", `
sg_write_same --lba=0 --num=64 --in=/run/aa $d
sg_xcopy if=$ds of=$cs bs=512 count=64 skip=0 seek=128
blocks $c 128 64
blocks $c 127 1
blocks $c 192 1
sg_xcopy if=$ds of=$cs bs=512 count=64 skip=131040 seek=0
sg_copy_results --params $d
sg_copy_results --status --list_id=9 $d
`},
	{"reservations", `
sg_persist --in --report-capabilities $d
sg_persist --in --read-keys $d
sg_persist --out --register --param-sark=0xa $d
sg_persist --out --register --param-sark=0xb $e
sg_persist --in --read-keys $d
sg_persist --in --read-full-status $e
sg_persist --out --reserve --param-rk=0xa --prout-type=3 $d
sg_persist --in --read-reservation $e
blocks $d 0 1
sg_read if=$e bs=512 count=1 blk_sgio=1
sg_write_same --lba=0 --num=1 --in=/run/aa $e
sg_persist --out --release --param-rk=0xb --prout-type=3 $e
sg_persist --in --read-reservation $e
sg_persist --out --preempt --param-rk=0xb --param-sark=0xa --prout-type=3 $e
sg_turs --verbose $d
sg_turs $d
sg_persist --in --read-keys $d
sg_persist --in --read-reservation $d
sg_write_same --lba=0 --num=1 --in=/run/aa $e
sg_write_same --lba=0 --num=1 --in=/run/aa $d
sg_persist --out --register --param-sark=0xc $d
sg_persist --out --reserve --param-rk=0xc --prout-type=1 $d
sg_persist --out --release --param-rk=0xb --prout-type=3 $e
sg_persist --out --reserve --param-rk=0xc --prout-type=5 $d
sg_persist --in --read-reservation $e
sg_write_same --lba=0 --num=1 --in=/run/aa $e
sg_persist --out --clear --param-rk=0xb $e
sg_turs --verbose $d
sg_persist --in --read-keys $d
sg_persist --in --read-reservation $d
`},
	{"medium", `
sg_start --eject $r
sg_turs --verbose $r
sg_requests $r
sg_start --load $r
sg_turs $r
sg_prevent $r
sg_start --eject $r
sg_prevent --allow $r
sg_write_same --lba=0 --num=8 --in=/run/aa $r
sg_sanitize --block --quick --wait $r
sg_get_lba_status --lba=0 --brief $r
sg_sanitize --block --quick --wait $d
sg_reset --device $r
sg_turs --verbose $r
`},
}

// sg3_utils and sdparm print what they printed before, character by character,
// except for names and numbers that differ from run to run.
func TestSG(t *testing.T) {
	v := boot(t)
	need(t, "sg_inq", "sdparm")
	const iqn = "iqn.2026-11.io.example:sg"
	d := harness.Start(t, `
  - name: `+iqn+`
    initiators: ["*"]
    luns:
      - {id: 0, backend: memory, size: 64MiB}
      - {id: 1, backend: memory, size: 16MiB, removable: true, sanitize: true}
      - {id: 2, backend: memory, size: 16MiB}
`)
	v.Run(t, script(d, "IQN="+iqn+"\n"+sgPrepare), quick)
	for _, tt := range sgTests {
		t.Run(tt.name, func(t *testing.T) {
			d.Stop(t) // what is in memory is fresh after it
			d.Start(t)
			defer func() {
				v.Run(t, "iscsiadm -m node --logout\n"+forgive, quick)
				d.AwaitVars(t, map[string]float64{"sessions": 0, "tasks": 0, "buffers": 0, "stags": 0}, 10*time.Second)
			}()
			v.Run(t, ". /run/lib.sh\nIQN="+iqn+"\n"+sgUp, quick)
			out := v.Run(t,
				". /run/sg.sh\nwhile read -r line; do run; done <<'.'\n"+strings.TrimSpace(tt.commands)+"\n.\n", long)
			got := out
			for _, m := range masks {
				got = m.pattern.ReplaceAllString(got, m.with)
			}
			file := filepath.Join("testdata", "sg", tt.name+".txt")
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if got != string(want) {
				t.Errorf("differs from %s, which -update writes anew:\n%s", file, difference(string(want), got))
			}
		})
	}
}

// masks are what stands in testdata for what differs from run to run.
var masks = []struct {
	pattern *regexp.Regexp
	with    string
}{
	{regexp.MustCompile(`\b3[0-9a-f]{15}\b`), "3IDENTIFIER"},
	{regexp.MustCompile(`0x3[0-9a-f]{15}\b`), "0x3IDENTIFIER"},
	{regexp.MustCompile(`/dev/s[dg][a-z0-9]+`), "/dev/DISK"},
	{regexp.MustCompile(`\b0x00023d[0-9a-f]{6}\b`), "0xISID"},
}

// difference shows where two texts differ, line by line from the first to the
// last that does.
func difference(want, got string) string {
	w, g := strings.Split(want, "\n"), strings.Split(got, "\n")
	from := 0
	for from < min(len(w), len(g)) && w[from] == g[from] {
		from++
	}
	to := 0
	for to < min(len(w), len(g))-from && w[len(w)-1-to] == g[len(g)-1-to] {
		to++
	}
	return fmt.Sprintf("line %d, got\n%s\nwant\n%s", from+1, strings.Join(g[from:len(g)-to], "\n"),
		strings.Join(w[from:len(w)-to], "\n"))
}

// sgPrepare makes records of two initiators, and what is written to disks.
const sgPrepare = `
modprobe -a sg iscsi_tcp
discover $PORTAL
iscsiadm -m iface -I second -o new
iscsiadm -m iface -I second -o update -n iface.transport_name -v tcp
iscsiadm -m iface -I second -o update -n iface.initiatorname -v iqn.2026-11.io.example:second
iscsiadm -m node -o new -T $IQN -p $PORTAL -I second
fill() { head -c 512 /dev/zero | tr '\0' "$1"; }
fill '\000' >/run/00
fill '\252' >/run/aa
{ fill '\252'; fill '\273'; } >/run/aabb
{ fill '\273'; fill '\252'; } >/run/bbaa
head -c 66560 /dev/zero >/run/zero66k
`

// sgUp logs in as the two, and leaves /run/sg.sh for the commands: run
// runs $line and prints it, what that prints, and its exit status if it fails.
const sgUp = `
iscsiadm -m node -I iser --login
for n in 0 1 2; do disk $IQN $n; done >/run/disks
iscsiadm -m node -I second --login
{
	read -r d <&3; read -r r <&3; read -r c <&3
	session=$(readlink -f /sys/block/${d#/dev/}/device | grep -o 'session[0-9]*')
	until e=$(ls -d /sys/class/iscsi_session/session*/device/target*/*:0/block/* | grep -v "^/sys/class/iscsi_session/$session/"); do sleep 0.1; done
	generic() { echo /dev/$(basename /sys/block/${1#/dev/}/device/scsi_generic/*); }
	cat <<-.
	d=$d ds=$(generic $d)
	e=/dev/${e##*/}
	r=$(generic $r)
	c=$c cs=$(generic $c)
	.
} 3</run/disks >/run/sg.sh
cat >>/run/sg.sh <<'.'
# blocks DISK LBA N says what is in there.
blocks() {
	dd if=$1 bs=512 skip=$2 count=$3 iflag=direct status=none | od -A n -t x1 -w512 -v | tr ' ' '\n' | sort -u | tr '\n' ' '
	echo
}
# awaitAttention TEXT sends commands to $d until the kernel has logged the unit
# attention. The target raises it when it looks at the space next, and the first
# command after that has it, also one of the kernel or of udev.
awaitAttention() {
	local n
	for ((n = 0; n < 60; n++)); do
		sg_turs $d >/dev/null 2>&1
		dmesg | grep -oF "$1" && return
		sleep 0.5
	done
	return 1
}
run() {
	local status=0
	echo "\$ $line"
	eval "$line" 2>&1 || status=$?
	[ $status = 0 ] || echo "exit status $status"
	echo
}
.
# Who logs in is told of a reset, once.
. /run/sg.sh
for disk in $d $e $r $c; do sg_turs $disk || true; done
`
