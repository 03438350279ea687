package interop_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/tests/interop/harness"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/etcdserver"
	"github.com/iser-target/iser-target/tests/testkit/rbdfake"
)

// Three gateways with 20 LUNs are upgraded one after the other, by a restart and by iser-target upgrade, while fio writes to each LUN and verifies.
// Each gateway gets its LUNs back afterwards. No command takes 3 s.
func TestClusterRolls(t *testing.T) {
	v := boot(t)
	v.Yield(t)
	need(t, "multipathd", "fio", "udevadm", "etcd")
	const luns, size = 20, 8 << 20
	images := rbdfake.Install(t, "p")
	list := ""
	for i := range luns {
		name := filepath.Join(images, "p", fmt.Sprint("disk", i))
		if err := os.WriteFile(name, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(name, size); err != nil {
			t.Fatal(err)
		}
		list += fmt.Sprintf("      - {id: %d, backend: rbd, path: 'rbd:p/disk%d', shared: true, naa: \"30000000000001%02x\"}\n", i, i, i)
	}
	endpoints := strings.Join(etcdserver.Endpoints(etcdserver.Start(t, 3)), `", "`)
	var gateways []*harness.Target
	for i, name := range []string{"a", "b", "c"} {
		gateways = append(gateways, harness.Config{
			Targets: fmt.Sprintf("  - name: %s\n    initiators: [\"*\"]\n    luns:\n%s", clusterTarget, list),
			Portals: []harness.Portal{{TPGT: i + 1}},
			// LUNs go back when udev in the guest has done the most of what follows from the paths that were gone (see clusterPaths).
			More: fmt.Sprintf("cluster: {name: %s, etcd: [\"%s\"], failback: 60s}\n", name, endpoints),
		}.Start(t))
	}
	settled := func() (owned [3]int, ok bool) {
		for i, d := range gateways {
			st := harness.Ask[schema.ClusterState](t, d, "cluster", "status")
			if len(st.Gateways) != len(gateways) || st.Reason != "" || len(st.LUNs) != luns {
				return owned, false
			}
			for _, l := range st.LUNs {
				if l.Owner == "" || l.Owner != l.Favorite {
					return owned, false
				}
				if l.Here {
					owned[i]++
				}
			}
		}
		return owned, owned[0]+owned[1]+owned[2] == luns
	}
	settle := func(what string) {
		t.Helper()
		testkit.Eventually(t, what+": each LUN has its favorite", func() bool {
			_, ok := settled()
			return ok
		})
	}
	settle("start")
	owned, _ := settled()
	t.Logf("the gateways serve %v LUNs", owned)
	// rest waits until udev in the guest has nothing to do.
	rest := func() {
		t.Helper()
		for range 5 {
			if strings.Contains(v.Run(t, "if udevadm settle -t 100; then echo at rest; fi", long), "at rest") {
				return
			}
		}
		t.Fatal("udev is not at rest after 500 s")
	}
	defer v.Try(t, clusterDown, long)
	v.Run(t, script(gateways[0], fmt.Sprintf("IQN=%s\nISER=%s\nTCP='%s %s'\n", clusterTarget, gateways[0].Addr(), gateways[1].Addr(), gateways[2].Addr())+
		clusterPaths+fmt.Sprintf("await paths %d\n", 3*luns)), long)
	rest()

	// pauses runs fio while do runs, and checks for how long its longest commands took.
	pauses := func(what string, do func()) {
		t.Helper()
		v.Run(t, ". /run/cluster.sh\n"+rollingLoad, long)
		rest()
		do()
		settle(what)
		out := v.Run(t, fmt.Sprintf(". /run/cluster.sh\nawait paths %d\nsleep 2\npkill -INT -o -x fio\nawait test -e /run/fio.status\ncat /run/fio.log >&2\ncat /run/fio.json\n", 3*luns), long)
		type direction struct {
			IOs     int `json:"total_ios"`
			Latency struct {
				Max int64 `json:"max"`
			} `json:"lat_ns"`
		}
		var report struct {
			Jobs []struct {
				Name  string    `json:"jobname"`
				Error int       `json:"error"`
				Write direction `json:"write"`
				Read  direction `json:"read"`
			} `json:"jobs"`
		}
		if err := json.Unmarshal([]byte(out[strings.IndexByte(out, '{'):]), &report); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if len(report.Jobs) != luns {
			t.Fatalf("%s: fio reports %d jobs", what, len(report.Jobs))
		}
		longest, of := time.Duration(0), ""
		for _, j := range report.Jobs {
			if j.Error != 0 || j.Write.IOs == 0 || j.Read.IOs == 0 {
				t.Errorf("%s: job %s: error %d, %d writes, %d reads", what, j.Name, j.Error, j.Write.IOs, j.Read.IOs)
			}
			if most := time.Duration(max(j.Write.Latency.Max, j.Read.Latency.Max)); most > longest {
				longest, of = most, j.Name
			}
		}
		t.Logf("%s: the longest command of 20 LUNs took %v (%s)", what, longest.Round(time.Millisecond), of)
		if longest >= 3*time.Second {
			t.Errorf("%s: a command of %s took %v, want less than 3 s", what, of, longest)
		}
	}
	pauses("nothing", func() {})
	for i, d := range gateways {
		pauses(fmt.Sprintf("restart of gateway %c", 'a'+i), func() {
			d.Stop(t)
			d.Start(t)
		})
	}
	for i, d := range gateways {
		pauses(fmt.Sprintf("upgrade of gateway %c", 'a'+i), func() { d.Manage(t, "upgrade") })
	}
	v.Run(t, clusterDown+"\niscsiadm -m node -u\n"+forgive, long)
}

// rollingLoad starts a job of fio for each disk.
const rollingLoad = `
rm -f /run/fio.*
jobs=""
for disk in $(multipathd show maps raw format %n); do
	jobs="$jobs --name=$disk --filename=/dev/mapper/$disk"
done
(
	status=0
	fio --output-format=json --output=/run/fio.json --thread --ioengine=psync --direct=1 --sync=dsync --rw=randwrite --bs=4k --rate_iops=2 \
		--verify=crc32c --verify_backlog=4 --verify_fatal=1 --time_based --runtime=600 $jobs || status=$?
	echo $status >/run/fio.status
) </dev/null >/run/fio.log 2>&1 &
sleep 20 # until all jobs have begun
`
