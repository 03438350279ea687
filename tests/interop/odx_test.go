package interop_test

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/interop/harness"
	"github.com/iser-target/iser-target/tests/interop/vm"
)

// An odxStep is a command of sg_raw with a parameter list by SPC-4 and SBC-3, written by hand in hexadecimal:
//
//	POPULATE TOKEN (SBC-3, section 5.13): length of 2 │ flags │ 00 │ INACTIVITY TIMEOUT of 4 │ ROD TYPE of 4 │ 0000 │ length of the ranges of 2 │ ranges
//	WRITE USING TOKEN (SBC-3, section 5.50): length of 2 │ flags │ 0000000000 │ OFFSET INTO ROD of 8 │ ROD token of 512 │ 000000000000 │ length of the ranges of 2 │ ranges
//	a range: LBA of 8 │ NUMBER OF LOGICAL BLOCKS of 4 │ 00000000
//
// In the place of a ROD token is the name of its file in the guest. After a POPULATE TOKEN that succeeds, RECEIVE ROD TOKEN INFORMATION (SPC-4,
// section 6.26) stores the token under the name of into.
type odxStep struct {
	name string
	disk string // a variable of odxLib
	list string
	into string
	want string // what sg_raw makes of the sense data, or good
	does func(data, b []byte)
}

const (
	populateToken   = 0x10
	writeUsingToken = 0x11

	rangeA = "0000000000000800 00001000 00000000 0000000000004000 00000800 00000000" // of file a: data[800h:1800h] and data[4000h:4800h]
)

// zeroROD is the block device zero ROD token (SBC-3, section 4.27.4).
var zeroROD = "ffff0001 0000 01f8" + strings.Repeat("00", 504)

// blocksAt returns count blocks of p from lba on.
func blocksAt(p []byte, lba, count int) []byte { return p[lba<<9:][:count<<9] }

var odxSteps = []odxStep{
	{name: "zero token", disk: "b", list: "0226 00 0000000000 0000000000000000" + zeroROD + "000000000000 0010 0000000000000000 00010000 00000000", want: "good",
		does: func(_, b []byte) { clear(b) }},

	{name: "populate", disk: "a", list: "002e 00 00 00000258 00000000 0000 0020" + rangeA, into: "token", want: "good"},
	{name: "to a file", disk: "b", list: "0236 00 0000000000 0000000000000000 token 000000000000 0020 0000000000000123 00001000 00000000 0000000000005001 00000800 00000000", want: "good",
		does: func(data, b []byte) {
			copy(b[0x123<<9:], blocksAt(data, 0x800, 0x1000))
			copy(b[0x5001<<9:], blocksAt(data, 0x4000, 0x800))
		}},
	{name: "to memory", disk: "c", list: "0236 00 0000000000 0000000000000800 token 000000000000 0020 0000000000000000 00000800 00000000 0000000000009000 00000800 00000000", want: "good"},
	{name: "by another initiator", disk: "second_b", list: "0226 00 0000000000 0000000000000000 token 000000000000 0010 0000000000002000 00000001 00000000", want: "good",
		does: func(data, b []byte) { copy(b[0x2000<<9:], blocksAt(data, 0x800, 1)) }},
	{name: "altered", disk: "b", list: "0226 00 0000000000 0000000000000000 altered 000000000000 0010 0000000000002000 00000010 00000000",
		want: "Illegal Request: Invalid token operation, token corrupt"},
	{name: "invented", disk: "b", list: "0226 00 0000000000 0000000000000000 invented 000000000000 0010 0000000000002000 00000010 00000000",
		want: "Illegal Request: Invalid token operation, token unknown"},
	// The token has 1800h blocks (SBC-3, section 4.27.2).
	{name: "more than the token has", disk: "b", list: "0226 00 0000000000 0000000000001000 token 000000000000 0010 0000000000008000 00001000 00000000",
		want: "Copy Aborted: Copy target device data underrun, 0x800",
		does: func(data, b []byte) { copy(b[0x8000<<9:], blocksAt(data, 0x4000, 0x800)) }},
	{name: "beyond the end", disk: "b", list: "0226 00 0000000000 0000000000000000 token 000000000000 0010 000000000000fff0 00000011 00000000",
		want: "Illegal Request: Logical block address out of range, 0x10000"},

	{name: "populate memory", disk: "c", list: "002e 00 00 00000258 00000000 0000 0020 0000000000000000 00000800 00000000 0000000000009000 00000800 00000000", into: "memory", want: "good"},
	{name: "from memory", disk: "b", list: "0226 00 0000000000 0000000000000000 memory 000000000000 0010 000000000000c000 00001000 00000000", want: "good",
		does: func(data, b []byte) {
			copy(b[0xc000<<9:], blocksAt(data, 0x1000, 0x800))
			copy(b[0xc800<<9:], blocksAt(data, 0x4000, 0x800))
		}},

	// LUN 3 does not exist for the other initiator.
	{name: "populate LUN 3", disk: "m", list: "001e 00 00 00000258 00000000 0000 0010 0000000000000000 00000010 00000000", into: "mine", want: "good"},
	{name: "a LUN of another initiator", disk: "second_b", list: "0226 00 0000000000 0000000000000000 mine 000000000000 0010 0000000000000200 00000010 00000000",
		want: "Illegal Request: Invalid token operation, token unknown"},
	{name: "its own LUN", disk: "b", list: "0226 00 0000000000 0000000000000000 mine 000000000000 0010 0000000000000300 00000010 00000000", want: "good",
		does: func(_, b []byte) { clear(blocksAt(b, 0x300, 0x10)) }},

	{name: "populate for 1 s", disk: "a", list: "001e 00 00 00000001 00000000 0000 0010 0000000000000800 00000010 00000000", into: "expires", want: "good"},
	{name: "expired", disk: "b", list: "0226 00 0000000000 0000000000000000 expires 000000000000 0010 0000000000002000 00000010 00000000",
		want: "Illegal Request: Invalid token operation, token expired"},
	{name: "delete", disk: "b", list: "0226 02 0000000000 0000000000000000 token 000000000000 0010 0000000000002001 00000001 00000000", want: "good",
		does: func(data, b []byte) { copy(b[0x2001<<9:], blocksAt(data, 0x800, 1)) }},
	{name: "deleted", disk: "b", list: "0226 00 0000000000 0000000000000000 token 000000000000 0010 0000000000002000 00000010 00000000",
		want: "Illegal Request: Invalid token operation, token deleted"},

	{name: "populate with IMMED", disk: "a", list: "001e 01 00 00000258 00000000 0000 0010 0000000000000100 00001000 00000000", into: "changes", want: "good"},
	{name: "write with IMMED", disk: "b", list: "0226 01 0000000000 0000000000000000 changes 000000000000 0010 000000000000e000 00001000 00000000", want: "good",
		does: func(data, b []byte) { copy(b[0xe000<<9:], blocksAt(data, 0x100, 0x1000)) }},
	{name: "cancelled", disk: "b", list: "0226 00 0000000000 0000000000000000 changes 000000000000 0010 0000000000002000 00000010 00000000",
		want: "Illegal Request: Invalid token operation, token cancelled"},
}

// odxLib sends what odxSteps say, and prints what sg_raw prints of the answer.
const odxLib = `
# say NAME prints what became of a command. sg_raw has written to /run/raw.
say() {
	local line key= code= info=
	while read -r line; do
		case $line in
		*'Sense key: '*) key=${line##*: } ;;
		'Additional sense: '*) code=${line#*: } ;;
		'Info fld='*) line=${line#*=} info=", ${line%% *}" ;;
		esac
	done </run/raw
	echo "$1: ${key:-good}${code:+: $code}$info"
}
# send NAME DISK LENGTH CDB... sends /run/list.
send() { sg_raw -s $3 -i /run/list $2 "${@:4}" 2>/run/raw || true; say "$1"; }
# receive DISK FILE receives the ROD token information, until the copy is not in progress. Byte 5 of it is the COPY OPERATION STATUS.
receive() {
	local n
	for ((n = 0; n < 100; n++)); do
		sg_raw -r 1024 -o $2 $1 84 07 00 00 00 07 00 00 00 00 00 00 04 00 00 00 2>/run/raw || cat /run/raw
		case $(od -A n -t x1 -j 5 -N 1 $2) in *1[12]) ;; *) return ;; esac
	done
	echo still in progress
}
`

// odxScript returns the commands of steps. Lists are in files of the virtual machine.
func odxScript(t *testing.T, v *vm.VM) string {
	t.Helper()
	var s strings.Builder
	for i, step := range odxSteps {
		var parts []string
		rod, words := "", strings.Fields(step.list)
		head, tail := step.list, ""
		for at, w := range words {
			if strings.IndexFunc(w, func(r rune) bool { return !strings.ContainsRune("0123456789abcdef", r) }) >= 0 {
				rod, head, tail = w, strings.Join(words[:at], ""), strings.Join(words[at+1:], "")
			}
		}
		n := 0
		for j, text := range []string{head, tail} {
			b, err := hex.DecodeString(strings.ReplaceAll(text, " ", ""))
			if err != nil {
				t.Fatalf("%s: %v", step.name, err)
			}
			n += len(b)
			name := fmt.Sprintf("odx-%d-%d", i, j)
			if err := os.WriteFile(filepath.Join(v.Files(), name), b, 0o644); err != nil {
				t.Fatal(err)
			}
			if parts = append(parts, vm.Files+"/"+name); j == 0 && rod != "" {
				parts = append(parts, "/run/odx-"+rod)
				n += 512
			}
		}
		sa := writeUsingToken
		if step.into != "" {
			sa = populateToken
		}
		switch step.name {
		case "altered": // byte 60 of the token, which others know, and 8 of the random bytes by which the target finds it
			s.WriteString("{ head -c 60 /run/odx-token; printf '\\377'; tail -c +62 /run/odx-token; } >/run/odx-altered\n" +
				"{ head -c 260 /run/odx-token; printf invented; tail -c +269 /run/odx-token; } >/run/odx-invented\n")
		case "expired":
			s.WriteString("sleep 1.2\n")
		case "cancelled": // WRITE(10) of LBA 10feh, the last block but one of the token, by the other initiator
			s.WriteString("head -c 512 /dev/zero >/run/zeros\nsg_raw -s 512 -i /run/zeros $second_a 2a 00 00 00 10 fe 00 00 01 00 2>/run/raw || cat /run/raw\n")
		}
		fmt.Fprintf(&s, "cat %s >/run/list\nsend '%s' $%s %d 83 %02x 00 00 00 00 00 00 00 07 % 02x 00 00\n", strings.Join(parts, " "), step.name, step.disk, n, sa, []byte{0, 0, byte(n >> 8), byte(n)})
		switch {
		case step.into != "":
			fmt.Fprintf(&s, "receive $%s /run/info\ntail -c +39 /run/info >/run/odx-%s\nod -A n -t x1 -w38 -N 38 /run/info\n", step.disk, step.into)
		case strings.Contains(step.name, "IMMED"):
			fmt.Fprintf(&s, "receive $%s /run/info\nod -A n -t x1 -w36 /run/info\n", step.disk)
		}
	}
	return s.String()
}

// operationCounter finds the OPERATION COUNTER of a WRITE USING TOKEN, which depends on how much the file system copies at once.
var operationCounter = regexp.MustCompile(`( 00 00 00 20 11 01) [0-9a-f]{2} [0-9a-f]{2}`)

// odxInformation returns what RECEIVE ROD TOKEN INFORMATION has before the token that step made, or of the copy of step in the background.
func odxInformation(step *odxStep) string {
	switch count := map[string]string{"populate": "18 00", "populate memory": "10 00", "populate with IMMED": "10 00", "write with IMMED": "10 00"}[step.name]; {
	case step.into == "" && count == "":
		return ""
	case step.into == "":
		return " 00 00 00 20 11 01 XX XX ff ff ff fe 00 00 00 f1 00 00 00 00 00 00 10 00 00 00 00 00 00 00 00 00 00 00 00 00\n"
	case count == "":
		count = "00 10"
		fallthrough
	default:
		return " 00 00 02 22 10 01 00 01 ff ff ff fe 00 00 00 f1 00 00 00 00 00 00 " + count + " 00 00 00 00 00 00 00 00 00 00 02 02 00 00\n"
	}
}

// Linux copies with tokens (ODX) over iscsi_tcp and ib_iser, and what the target refuses it refuses with the sense data of SPC-4. sg_raw sends the commands: ddpt 0.97, the only
// program of Debian 12 that makes such lists, writes NUMBER OF LOGICAL BLOCKS one byte too far to the left.
func TestODX(t *testing.T) {
	v := boot(t)
	need(t, "sg_raw")
	const iqn = "iqn.2026-11.io.example:odx"
	const size = 32 << 20
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a.img"), filepath.Join(dir, "b.img")
	data := make([]byte, size)
	rand.NewChaCha8([32]byte{1}).Read(data)
	for name, content := range map[string][]byte{a: data, b: bytes.Repeat([]byte{0x55}, size)} {
		if err := os.WriteFile(name, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	d := harness.Config{Targets: `
  - name: ` + iqn + `
    initiators: ["*"]
    luns:
      - {id: 0, backend: file, path: ` + a + `, size: 32MiB}
      - {id: 1, backend: file, path: ` + b + `, size: 32MiB}
      - {id: 2, backend: memory, size: 32MiB}
      - {id: 3, backend: memory, size: 16MiB, initiators: ["` + initiatorName + `"]}
`}.Start(t)
	v.Run(t, script(d, odxLib+`
modprobe -a sg iscsi_tcp
discover $PORTAL
iscsiadm -m iface -I plain -o new
iscsiadm -m iface -I plain -o update -n iface.transport_name -v tcp
iscsiadm -m iface -I second -o new
iscsiadm -m iface -I second -o update -n iface.transport_name -v tcp
iscsiadm -m iface -I second -o update -n iface.initiatorname -v iqn.2026-11.io.example:second
iscsiadm -m node -o new -T `+iqn+` -p $PORTAL,1 -I plain
iscsiadm -m node -o new -T `+iqn+` -p $PORTAL,1 -I second
iscsiadm -m node -I second --login >&2
printf 'second_a=%s second_b=%s\n' $(disk `+iqn+` 0) $(disk `+iqn+` 1) >/run/odx.second`), quick)
	commands := odxScript(t, v)
	for _, iface := range []string{"plain", "iser"} {
		t.Run(iface, func(t *testing.T) {
			out := v.Run(t, script(d, odxLib+`
. /run/odx.second
before=$(ls /sys/class/iscsi_session)
iscsiadm -m node -I `+iface+` --login >&2
for s in $(ls /sys/class/iscsi_session); do
	case $before in *$s*) ;; *) session=/sys/class/iscsi_session/$s ;; esac
done
lun() { until ls -d $session/device/target*/*:$1/block/* 2>/dev/null; do sleep 0.1; done | sed 's/.*\//\/dev\//'; }
a=$(lun 0) b=$(lun 1) c=$(lun 2) m=$(lun 3)
`+commands+`
iscsiadm -m node -I `+iface+` --logout >&2
`+forgive), long)
			out = operationCounter.ReplaceAllString(out, "$1 XX XX")
			var text strings.Builder
			for i := range odxSteps {
				step := &odxSteps[i]
				fmt.Fprintf(&text, "%s: %s\n%s", step.name, step.want, odxInformation(step))
			}
			if out != text.String() {
				t.Errorf("%s", difference(text.String(), out))
			}
			want := make([]byte, size)
			for i := range odxSteps {
				if f := odxSteps[i].does; f != nil {
					f(data, want)
				}
			}
			got, err := os.ReadFile(b)
			if err != nil {
				t.Fatal(err)
			}
			for lba := range size >> 9 {
				if !bytes.Equal(blocksAt(got, lba, 1), blocksAt(want, lba, 1)) {
					t.Fatalf("LBA %#x of the destination differs: % x, want % x", lba, got[lba<<9:][:16], want[lba<<9:][:16])
				}
			}
			clear(blocksAt(data, 0x10fe, 1)) // by the other initiator
		})
	}
	v.Run(t, "iscsiadm -m node -I second --logout >&2\n"+forgive, quick)
	d.AwaitVars(t, map[string]float64{"sessions": 0, "connections": 0}, 10*time.Second)
}
