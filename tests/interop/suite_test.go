package interop_test

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/conformance/cu"
	"github.com/iser-target/iser-target/tests/interop/harness"
	"github.com/iser-target/iser-target/tests/interop/vm"
)

var table = cu.Table{
	File:    "../../docs/conformance.md",
	Begin:   "<!-- begin of the table over iSER -->",
	End:     "<!-- end of the table over iSER -->",
	Command: "go test -run TestSuite ./tests/interop -update",
}

// notRun are tests that cannot work through Linux's initiator, and why.
var notRun = map[string]string{
	"Sanitize.Reset": "not run: needs a session of libiscsi's own, and a LUN of 768 GiB",
	// It looks into that session before it finds that it has none.
	"Sanitize.OverwriteReserved": "not run: " + cu.Program + " crashes without a session of its own",
}

// heavy are tests that take long under emulation, because they move tens of MiB.
// They are run for the table, not every time: each has a relative that is, such
// as that of the command of 10 bytes.
var heavy = []string{
	"CompareAndWrite.Simple",
	"GetLBAStatus.UnmapSingle",
	"OrWrite.Verify",
	"Verify10.Simple",
	"Verify12.Simple", "Verify12.BeyondEol", "Verify12.Mismatch", "Verify12.MismatchNoCmp",
	"Verify16.Simple", "Verify16.Mismatch", "Verify16.MismatchNoCmp",
	"Write12.Simple", "Write12.BeyondEol",
	"Write16.Simple", "Write16.BeyondEol",
	"WriteAtomic16.BeyondEol",
	"WriteSame10.Unmap",
	"WriteSame16.BeyondEol", "WriteSame16.Check", "WriteSame16.Unmap",
	"WriteVerify10.BeyondEol",
	"WriteVerify12.Simple",
	"WriteVerify16.Simple", "WriteVerify16.BeyondEol",
}

// heavyLimit is their time limit.
const heavyLimit = 10 * time.Minute

// noSession is what the suite says of tests that it cannot run through a device
// file, and ends them at once. They are run for the table only.
var noSession = regexp.MustCompile(`only supported for iSCSI backends$|^Non-iSCSI multipath`)

// early are tests that expect a LUN as it was at first: the first expects zeros in
// a block that it does not write, the second no copy before its own.
var early = []string{"MultipathIO.CompareAndWrite", "ReceiveCopyResults.CopyStatus"}

// libiscsi's suite, as in tests/conformance, but through the initiator of Linux
// over iSER: its commands come by SG_IO.
func TestSuite(t *testing.T) {
	v := boot(t)
	need(t, cu.Program)
	const iqn = "iqn.2026-11.io.example:suite"
	d := harness.Start(t, `
  - name: `+iqn+`
    initiators: ["*"]
    luns:
      - {id: 0, backend: memory, size: 100MiB, removable: true, sanitize: true}
      - {id: 1, backend: memory, size: 100MiB, read_only: true}
      - {id: 2, backend: file, path: `+t.TempDir()+`/coarse, size: 100MiB}
      - {id: 3, backend: memory, size: 1GiB}
`)
	devices := strings.Fields(v.Run(t, script(d, `
{
	modprobe -a sg iscsi_tcp
	discover $PORTAL
	login $PORTAL `+iqn+`
} >&2
for n in 0 1 2 3; do disk `+iqn+` $n; done >/run/sd
{
	iscsiadm -m node -o new -T `+iqn+` -p $PORTAL -I default
	iscsiadm -m node -T `+iqn+` -p $PORTAL -I default --login
} >&2
while read -r sd; do
	address=$(readlink /sys/block/${sd#/dev/}/device)
	address=${address##*/}
	second=
	until [ -n "$second" ]; do
		sleep 0.1
		for other in /sys/class/scsi_device/*:${address#*:}/device/block/*; do
			[ ! -e $other ] || [ ${other##*/} = ${sd#/dev/} ] || second=/dev/${other##*/}
		done
	done
	sg=(/sys/block/${sd#/dev/}/device/scsi_generic/*)
	echo $sd /dev/${sg##*/} $second
done </run/sd`), quick))
	names, err := cu.Names(v.Run(t, cu.Program+" -l", quick))
	if err != nil {
		t.Fatal(err)
	}
	was, err := table.Read()
	if err != nil && !*update {
		t.Fatal(err)
	}

	machine := suiteGuest{v, devices}
	run, got := chooseTests(t, names, was)
	maps.Copy(got, machine.run(t, run))
	lost := func() (lost []string) {
		for _, name := range names {
			if o, ok := got[name]; ok && was[name].Result == cu.Pass && o.Result != cu.Pass {
				t.Logf("%s passed before: now %s: %s", name, o.Result, o.Reason)
				lost = append(lost, name)
			}
		}
		return lost
	}
	if again := lost(); again != nil {
		maps.Copy(got, machine.run(t, again)) // some tests depend on time
	}
	if *update {
		if err := table.Write(names, got); err != nil {
			t.Fatal(err)
		}
	}
	t.Log(cu.Summary(got))
	if lost() != nil {
		t.Error("tests that passed do not pass any more")
	}
	for name, o := range got {
		if o.Result == cu.Hang {
			t.Errorf("%s hangs", name)
		}
	}
	v.Run(t, "iscsiadm -m node --logout; "+forgive, quick)
	d.AwaitVars(t, map[string]float64{"sessions": 0, "connections": 0, "tasks": 0, "buffers": 0, "stags": 0},
		10*time.Second)
}

// A suiteGuest is a machine that runs tests of the suite.
type suiteGuest struct {
	vm *vm.VM
	// devices has three for each of suiteMedia: its disk over iSER, the sg device of that, and
	// its disk over TCP.
	devices []string
}

// suiteMedia are the media of the LUNs, by number.
var suiteMedia = []cu.Medium{cu.Plain, cu.ReadOnly, cu.Coarse, cu.Large}

// paths returns the devices that a test uses.
func (g suiteGuest) paths(name string) string {
	of := g.devices[3*slices.Index(suiteMedia, cu.Of(name).Medium):]
	switch strings.SplitN(name, ".", 2)[0] {
	case "NoMedia", "PreventAllow", "ReadOnly", "StartStopUnit":
		// An open /dev/sd locks its medium, and if that is read-only it cannot be opened by
		// one that writes.
		return of[1]
	case "MultipathIO":
		return of[0] + " " + of[2]
	}
	return of[0]
}

// run runs tests and returns their outcomes by name.
func (g suiteGuest) run(t *testing.T, names []string) map[string]cu.Outcome {
	t.Helper()
	body := suiteScript
	for _, name := range names {
		c := cu.Of(name)
		limit := c.Limit
		if slices.Contains(heavy, name) {
			limit = heavyLimit
		}
		args := c.Args("DEVICE")
		body += fmt.Sprintf("suite %s %v '%s' %s\n", name, limit.Seconds(),
			strings.Join(args[:len(args)-c.Paths], " "), g.paths(name))
	}
	out := filepath.Join(g.vm.Files(), "outcomes")
	defer os.RemoveAll(out)
	got := make(map[string]cu.Outcome, len(names))
	for line := range strings.Lines(g.vm.Run(t, body+"mv /run/outcomes "+vm.Files, 20*time.Minute)) {
		var name string
		var status, ms int
		if _, err := fmt.Sscan(line, &name, &status, &ms); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		output, err := os.ReadFile(filepath.Join(out, name))
		if err != nil {
			t.Fatal(err)
		}
		if status == 128+9 {
			got[name] = cu.Of(name).TimedOut()
		} else {
			got[name] = cu.Of(name).Parse("\n" + string(output))
		}
		if got[name].Result != cu.Pass {
			t.Logf("%s: %s\n%s", name, got[name].Result, output)
		}
	}
	if len(got) != len(names) {
		t.Fatalf("%d outcomes of %d tests", len(got), len(names))
	}
	return got
}

// chooseTests returns the tests to run, and the outcomes of those that are not. was are the
// outcomes of the table.
func chooseTests(t *testing.T, names []string, was map[string]cu.Outcome) (run []string, got map[string]cu.Outcome) {
	run, got = slices.Clone(early), make(map[string]cu.Outcome, len(names))
	without := 0
	for _, name := range names {
		o := was[name]
		switch reason, ok := notRun[name]; {
		case ok:
			got[name] = cu.Outcome{Result: cu.Skip, Reason: reason}
		case !*update && o.Result == cu.Skip && noSession.MatchString(o.Reason):
			got[name] = o
			without++
		case !slices.Contains(run, name) && (*update || !slices.Contains(heavy, name)):
			run = append(run, name)
		}
	}
	if without > 0 {
		t.Logf("%d tests that need a session of libiscsi's own, as the table says, are not run without -update",
			without)
	}
	return run, got
}

// suiteScript defines suite NAME SECONDS ARGUMENTS DEVICE..., which runs a test,
// leaves what it says in /run/outcomes, and prints its name, its exit status and how
// long it has taken, in milliseconds. It starts no process but the test: under
// emulation each costs more than some tests.
const suiteScript = `
mkdir /run/outcomes
suite() {
	local status=0 from=${EPOCHREALTIME/./}
	timeout -s KILL $2 iscsi-test-cu $3 "${@:4}" >/run/outcomes/$1 2>&1 </dev/null || status=$?
	echo $1 $status $(((${EPOCHREALTIME/./} - from) / 1000))
} 2>/dev/null # bash tells of processes that were killed
`
