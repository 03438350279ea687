package interop_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/tests/interop/harness"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A burstCount counts how the data of the writes of a captured session came.
type burstCount struct {
	immediate   int // SCSI Commands with data
	unsolicited int // Data-Out PDUs that no R2T asked for
	solicited   int // Data-Out PDUs that an R2T asked for
	together    int // the most R2Ts of a command that were outstanding
}

// countBursts reads a capture of a session over TCP with the portal at that port.
func countBursts(t *testing.T, capture string, port int) (n burstCount) {
	t.Helper()
	const command, dataOut, r2t, none = 0x01, 0x05, 0x31, "0xffffffff"
	cmd := exec.Command("tshark", "-2", "-r", capture, "-d", fmt.Sprintf("tcp.port==%d,iscsi", port), "-Y", "iscsi.opcode", "-T", "fields",
		"-e", "iscsi.opcode", "-e", "iscsi.initiatortasktag", "-e", "iscsi.targettransfertag", "-e", "iscsi.scsidata.F", "-e", "iscsi.datasegmentlength")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %v\n%s", cmd, err, stderr.String())
	}
	open := map[string]int{}
	for line := range strings.Lines(string(out)) {
		f := strings.Split(strings.TrimRight(line, "\n"), "\t")
		opcodes, itts, lengths := strings.Split(f[0], ","), strings.Split(f[1], ","), strings.Split(f[4], ",")
		ttts, finals := strings.Split(f[2], ","), strings.Split(f[3], ",")
		for i, s := range opcodes { // a frame may have several PDUs; those without a TTT or F have no value
			op, err := strconv.ParseUint(s, 0, 8)
			if err != nil || len(itts) != len(opcodes) || len(lengths) != len(opcodes) {
				t.Fatalf("fields of a frame: %q", f)
			}
			take := func(list *[]string) (first string) {
				if len(*list) > 0 {
					first, *list = (*list)[0], (*list)[1:]
				}
				return first
			}
			switch op {
			case command:
				if lengths[i] != "0x00000000" && lengths[i] != "0" {
					n.immediate++
				}
			case r2t:
				take(&ttts)
				open[itts[i]]++
				n.together = max(n.together, open[itts[i]])
			case dataOut:
				final := take(&finals)
				if take(&ttts) == none {
					n.unsolicited++
					continue
				}
				n.solicited++
				if final == "1" || final == "True" {
					open[itts[i]]--
				}
			default: // NOPs and Data-In have tags, too
				if op == 0x00 || op == 0x20 || op == 0x25 {
					take(&ttts)
				}
				if op == 0x25 {
					take(&finals)
				}
			}
		}
	}
	return n
}

// Linux sends unsolicited data where the target and the node record allow it, with immediate data and without, and
// answers several R2Ts of a command. fio finds its data again. Where the node record asks for R2Ts, nothing is
// unsolicited.
func TestUnsolicitedData(t *testing.T) {
	v := boot(t)
	need(t, "fio", "tshark")
	const iqn = "iqn.2026-11.io.example:bursts"
	d := harness.Config{Targets: `
  - name: ` + iqn + `
    initiators: ["*"]
    initial_r2t: false
    first_burst_length: 48KiB
    max_burst_length: 64KiB
    max_outstanding_r2t: 4
    max_recv_data_segment_length: 16KiB # less than the first burst, so that it takes several PDUs
    luns:
      - {id: 0, backend: memory, size: 16MiB}
`, More: `
limits:
  error_recovery_level: 0
`}.Start(t)
	v.Run(t, script(d, `
modprobe iscsi_tcp
iscsiadm -m discovery -t st -p $PORTAL -I default`), quick)
	for i, tt := range []struct {
		r2t, immediate string
		outstanding    int
	}{
		{"No", "Yes", 1},
		{"No", "No", 4},
		{"Yes", "Yes", 1},
	} {
		t.Run(fmt.Sprintf("InitialR2T=%s, ImmediateData=%s", tt.r2t, tt.immediate), func(t *testing.T) {
			v.Run(t, script(d, fmt.Sprintf(`
IQN=%s
for set in InitialR2T=%s ImmediateData=%s FirstBurstLength=262144 MaxOutstandingR2T=%d; do
	iscsiadm -m node -T $IQN -p $PORTAL -I default -o update -n node.session.iscsi.${set%%=*} -v ${set#*=}
done
iscsiadm -m node -T $IQN -p $PORTAL -I default --login
disk $IQN 0`, iqn, tt.r2t, tt.immediate, tt.outstanding)), quick)
			s := harness.Ask[[]schema.SessionState](t, d, "session", "list")
			if len(s) != 1 {
				t.Fatalf("%d sessions", len(s))
			}
			file := filepath.Join(t.TempDir(), "capture.pcapng")
			ended := make(chan int, 1)
			go func() {
				_, _, code := d.Try(t, "capture", "--session", strconv.Itoa(int(s[0].TSIH)), "-w", file)
				ended <- code
			}()
			testkit.Eventually(t, "the beginning of the capture", func() bool { // it has the login
				info, err := os.Stat(file)
				return err == nil && info.Size() > 1024
			})
			v.Run(t, script(d, `
IQN=`+iqn+`
d=$(disk $IQN 0)
fio --filename=$d --direct=1 --ioengine=libaio --rw=randwrite --bs=256k --iodepth=4 --size=4m \
	--verify=crc32c --verify_fatal=1 --randrepeat=0 --output-format=terse --terse-version=3 --name=bursts
iscsiadm -m node -T $IQN -p $PORTAL -I default --logout`), long)
			select {
			case code := <-ended:
				if code != 0 {
					t.Fatalf("the capture ended with %d", code)
				}
			case <-time.After(30 * time.Second):
				t.Fatal("the capture does not end with the session")
			}
			got := countBursts(t, file, d.Port)
			t.Logf("case %d: %+v", i, got)
			if (got.immediate > 0) != (tt.immediate == "Yes") || (got.unsolicited > 0) != (tt.r2t == "No") || got.solicited == 0 ||
				(got.together > 1) != (tt.outstanding > 1) || got.together > tt.outstanding {
				t.Errorf("%+v", got)
			}
		})
	}
	d.AwaitVars(t, map[string]float64{"sessions": 0, "connections": 0}, 10*time.Second)
}
