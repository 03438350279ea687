package interop_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/interop/harness"
	"github.com/iser-target/iser-target/tests/interop/vm"
)

// speedConfig is the configuration of a target with a portal that requires IPsec, and one that does not, for that backend.
const speedConfig = `
portals:
  - listen: 192.0.2.2:3260
    ipsec: required
  - listen: 192.0.2.2:3261
    tpgt: 2
targets:
  - name: ` + storeIQN + `
    initiators: ["*"]
    luns:
      - {id: 0, backend: %s}
ipsec:
  driver: xfrm
  profiles: [{name: default, mode: tunnel, suites: [aes128gcm16], esn: true, manual_keys: true}]
control: {socket: /run/iser-target.sock}
state_dir: /run/speed.state
`

// speedUp installs SAs with AES-128-GCM and ESN on both machines, starts the target and logs in over each transport to each portal.
const speedUp = `
. /run/ipsec.sh
for spi in 4097 4098; do
	if [ $spi = 4097 ]; then ends='src 192.0.2.1 dst 192.0.2.2'; else ends='src 192.0.2.2 dst 192.0.2.1'; fi
	echo "xfrm state add $ends proto esp spi $spi reqid 1 mode tunnel replay-window 1024 flag esn aead rfc4106(gcm(aes)) 0x$(head -c 20 /dev/urandom | od -An -v -tx1 | tr -d ' \n') 128"
done >/run/share/batch
for machine in 'out in' 'in out'; do
	read -r to from <<<"$machine"
	{
		cat /run/share/batch
		echo "xfrm policy add src 192.0.2.1 dst 192.0.2.2 proto tcp dport 3260 dir $to tmpl src 192.0.2.1 dst 192.0.2.2 proto esp reqid 1 mode tunnel"
		echo "xfrm policy add src 192.0.2.2 dst 192.0.2.1 proto tcp sport 3260 dir $from tmpl src 192.0.2.2 dst 192.0.2.1 proto esp reqid 1 mode tunnel"
	} >/run/share/batch.$to
	if [ $to = out ]; then ip -batch /run/share/batch.$to; else on ip -batch /run/share/batch.$to; fi
done
on install -m 0600 /run/share/config.yaml /etc/iser-target/config.yaml
on /run/share/iser-target serve --config /etc/iser-target/config.yaml </dev/null >>/run/iser-target.log 2>&1 &
await grep -q 'msg=serving.*192.0.2.2:3261' /run/iser-target.log
. /run/lib.sh
for port in 3260 3261; do
	for iface in iser default; do
		iscsiadm -m node -o new -T ` + storeIQN + ` -p 192.0.2.2:$port -I $iface # replaces the record of another interface
		iscsiadm -m node -T ` + storeIQN + ` -p 192.0.2.2:$port -I $iface --login
	done
done
` + ipsecLoad + `
. /run/ipsec.sh
for port in 3260 3261; do
	for transport in iser iscsi_tcp; do await device $transport $port; done
done
# speed takes SECONDS NAME DEVICE RW BS DEPTH and prints the commands per second.
cat >>/run/ipsec.sh <<'.'
speed() {
	echo -n "$2 "
	fio --ioengine=libaio --direct=1 --filename=$3 --rw=rand$4 --bs=$5 --iodepth=$6 --size=16m --time_based --runtime=$1 \
		--output-format=terse --terse-version=3 --name=speed | awk -F';' -v rw=$4 '/^3;/ { print rw == "read" ? $8 : $49 }'
}
.
`

// speedTarget runs the script prepare in the virtual machine, starts the target of speedConfig, until the test ends, and logs in.
func speedTarget(tb testing.TB, backend, prepare string) *vm.VM {
	tb.Helper()
	v := boot(tb)
	need(tb, "nsenter")
	harness.Copy(tb, filepath.Join(v.Files(), "iser-target"))
	if err := os.WriteFile(filepath.Join(v.Files(), "config.yaml"), fmt.Appendf(nil, speedConfig, backend), 0o600); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if tb.Failed() && v.Broken() == nil {
			v.Try(tb, "tail -n 40 /run/iser-target.log >&2", quick)
		}
		v.Run(tb, ipsecDown+"rm -rf /run/iser-target.log /run/speed.state\n", long)
	})
	v.Run(tb, prepare+ipsecUp+speedUp, 2*long)
	return v
}

// speedTime is how long each fio of BenchmarkIPsec runs, in seconds.
const speedTime = 2

// A speedCase is what fio does.
type speedCase struct {
	transport, rw, size string
	depth               int
}

func speedCases() (list []speedCase) {
	for _, transport := range []string{"iscsi_tcp", "iser"} {
		for _, rw := range []string{"read", "write"} {
			list = append(list, speedCase{transport, rw, "4k", 16}, speedCase{transport, rw, "64k", 8})
		}
	}
	return list
}

// BenchmarkIPsec compares the commands per second of the Linux initiator with and without ESP, in the virtual machine. An iteration is a round of all
// cases; both portals take turns. It prints the medians as a table.
func BenchmarkIPsec(b *testing.B) {
	v := speedTarget(b, "memory, size: 16MiB", "")
	need(b, "fio")
	out := v.Run(b, ". /run/ipsec.sh\non /run/share/iser-target session list -o json --socket /run/iser-target.sock", quick)
	if strings.Count(out, `"esp-tunnel aes128gcm16 esn"`) != 2 || strings.Count(out, `"tsih"`) != 4 {
		b.Fatalf("sessions:\n%s", out)
	}
	cases := speedCases()
	results := map[string][]float64{} // by index of the case and port, in the order of rounds
	round := 0
	for b.Loop() {
		var script strings.Builder
		script.WriteString(". /run/ipsec.sh\n")
		for i, c := range cases {
			ports := []int{3261, 3260}
			if round%2 == 1 {
				slices.Reverse(ports)
			}
			for _, port := range ports {
				fmt.Fprintf(&script, "speed %d %d:%d $(device %s %d) %s %s %d\n", speedTime, i, port, c.transport, port, c.rw, c.size, c.depth)
			}
		}
		for line := range strings.Lines(v.Run(b, script.String(), 10*time.Minute)) {
			var name string
			var n float64
			if _, err := fmt.Sscan(line, &name, &n); err != nil || n <= 0 {
				b.Fatalf("fio printed %q", line)
			}
			results[name] = append(results[name], n)
		}
		round++
	}
	var table strings.Builder
	table.WriteString("| transport | I/O | without ESP | with ESP | ratio |\n|---|---|---|---|---|\n")
	for i, c := range cases {
		plain, esp := results[strconv.Itoa(i)+":3261"], results[strconv.Itoa(i)+":3260"]
		if len(plain) != round || len(esp) != round {
			b.Fatalf("%+v: %d and %d results of %d rounds", c, len(plain), len(esp), round)
		}
		p, e := median(plain), median(esp)
		fmt.Fprintf(&table, "| `%s` | %s, %s, depth %d | %.0f/s | %.0f/s | %.2f |\n", strings.Replace(c.transport, "iser", "ib_iser", 1), c.rw,
			strings.Replace(c.size, "k", " KiB", 1), c.depth, p, e, e/p)
	}
	b.Logf("medians of %d rounds of %d s each:\n%s", round, speedTime, table.String())
}

func median(values []float64) float64 {
	s := slices.Sorted(slices.Values(values))
	n := len(s)
	return (s[(n-1)/2] + s[n/2]) / 2
}
