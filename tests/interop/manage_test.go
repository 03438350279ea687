package interop_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/tests/interop/harness"
	"github.com/iser-target/iser-target/tests/interop/vm"
)

const (
	managed      = "iqn.2026-11.io.example:managed"
	managedOther = "iqn.2026-11.io.example:managed.other"
	managedDrain = 6 * time.Second
)

// A management is a target that its own commands manage while the kernel's initiator uses
// it over iSER.
type management struct {
	v     *vm.VM
	d     *harness.Target
	begun schema.SessionState // the first session with managed
}

// TestManage manages a target while fio, which verifies all that it writes, runs on LUN 0 of
// one of its two targets, from the first step to the last. Each step expects what the one
// before has left.
func TestManage(t *testing.T) {
	v := boot(t)
	need(t, "fio", "tshark")
	d := harness.Config{
		Targets: `
  - name: ` + managed + ` # fio is here
    initiators: ["*"]
    luns:
      - {id: 0, backend: file, path: ` + t.TempDir() + `/disk.img, size: 48MiB}
  - name: ` + managedOther + `
    initiators: ["*"]
    luns:
      - {id: 0, backend: memory, size: 16MiB}
`,
		More: "drain: " + managedDrain.String() + "\n",
	}.Start(t)
	defer v.Try(t, "touch /run/fio.stop; pkill -x fio || true\n"+forgive, quick)
	v.Run(t, script(d, "discover $PORTAL; login $PORTAL "+managed+"; login $PORTAL "+managedOther+
		"\ndisk=$(disk "+managed+" 0)\n"+manageUp), quick)
	m := &management{v: v, d: d}
	m.begun = m.session(t, managed)
	for _, step := range []struct {
		name string
		run  func(t *testing.T)
	}{
		{"lun resize", m.resize},
		{"lun create", m.create},
		{"lun delete --drain", func(t *testing.T) { m.delete(t, "1", 15*time.Second, "--drain", "5s") }},
		{"lun delete --now", func(t *testing.T) { m.delete(t, "2", 10*time.Second, "--now") }},
		{"config plan, config apply", m.apply},
		{"session kill", m.kill},
		{"capture", m.capture},
		{"SIGTERM", m.stop},
		{"fio has found nothing wrong", m.endOfFio},
		{"metrics", m.metrics},
	} {
		if !t.Run(step.name, step.run) {
			t.FailNow()
		}
	}
	v.Run(t, script(d, forgive+"logout "+managed), quick)
	v.Run(t, script(d, "logout "+managedOther), quick)
	d.AwaitVars(t, map[string]float64{"sessions": 0, "connections": 0, "tasks": 0, "buffers": 0, "stags": 0},
		10*time.Second)
}

// run runs a script in the guest, which knows the functions of manageUp.
func (m *management) run(t *testing.T, body string) string {
	t.Helper()
	return m.v.Run(t, ". /run/manage.sh\n"+body, long)
}

// session returns the only session with a target.
func (m *management) session(t *testing.T, target string) schema.SessionState {
	t.Helper()
	sessions := harness.Ask[[]schema.SessionState](t, m.d, "session", "list")
	sessions = slices.DeleteFunc(sessions, func(s schema.SessionState) bool { return s.Target != target })
	if len(sessions) != 1 || len(sessions[0].Connections) != 1 || sessions[0].Transport != "iser" {
		t.Fatalf("sessions with %s: %+v, want one over iSER", target, sessions)
	}
	return sessions[0]
}

// same fails t if the session is not the same as was, or has been idle since.
func (m *management) same(t *testing.T, was schema.SessionState) {
	t.Helper()
	is := m.session(t, was.Target)
	a, b := was.Connections[0], is.Connections[0]
	if is.TSIH != was.TSIH || !is.Started.Equal(was.Started) || a.Remote != b.Remote || a.CID != b.CID ||
		!a.Started.Equal(b.Started) {
		t.Errorf("the session was\n%+v\nand is\n%+v", was, is)
	}
	if b.Received == a.Received {
		t.Error("the session has done nothing")
	}
}

// refused fails t unless the target refuses a command and its message names flag.
func (m *management) refused(t *testing.T, flag string, args ...string) {
	t.Helper()
	if _, stderr, code := m.d.Try(t, args...); code != cli.ExitRefused || !strings.Contains(stderr, flag) {
		t.Errorf("exit code %d, want %d with a hint at %s", code, cli.ExitRefused, flag)
	}
}

// resize makes LUN 0 larger. The guest notices, and a smaller size is refused.
func (m *management) resize(t *testing.T) {
	m.run(t, "await works")
	m.d.Manage(t, "lun", "resize", managed, "0", "64MiB")
	got := m.run(t, `
await noticed 'Capacity data has changed' >&2
echo 1 >/sys/block/$disk/device/rescan
blockdev --getsize64 /dev/$disk
dd if=/dev/zero of=/dev/$disk bs=1M seek=63 count=1 oflag=direct status=none
await works`)
	if want := fmt.Sprintln(64 << 20); got != want {
		t.Errorf("the guest sees a size of %q, want %q", got, want)
	}
	m.refused(t, "--allow-shrink", "lun", "resize", managed, "0", "48MiB")
	m.same(t, m.begun)
}

// create adds two LUNs and starts fio on each. The guest finds them: iscsid scans when it is
// told REPORTED LUNS DATA HAS CHANGED.
func (m *management) create(t *testing.T) {
	for range 2 {
		m.d.Manage(t, "lun", "create", managed, "--backend", "memory", "--size", "24MiB")
	}
	got := m.run(t, `
for n in 1 2; do
gone=$(disk `+managed+` $n)
blockdev --getsize64 $gone
gone=${gone#/dev/}
echo "gone$n=$gone" >>/run/manage.sh
(
	status=0
	fio --ioengine=libaio --direct=1 --filename=/dev/$gone --iodepth=16 --rw=randrw --bs=64k --time_based --runtime=600 \
		--randrepeat=0 --output-format=terse --terse-version=3 --name=$gone || status=$?
	echo $status >/run/$gone.status
) </dev/null >/run/$gone.log 2>&1 &
done`)
	if want := strings.Repeat(fmt.Sprintln(24<<20), 2); got != want {
		t.Errorf("the guest sees sizes of %q, want %q", got, want)
	}
	m.run(t, "await used $gone1; await used $gone2; await works; ! untouched")
	m.same(t, m.begun)
}

// delete removes a LUN while a fio is busy with it, which ends with an error. The fio on LUN 0
// does not notice.
func (m *management) delete(t *testing.T, lun string, most time.Duration, how ...string) {
	args := []string{"lun", "delete", managed, lun}
	m.refused(t, "--drain", args...)
	m.run(t, "used $gone"+lun)
	from := time.Now()
	m.d.Manage(t, append(args, how...)...)
	if took := time.Since(from); took > most {
		t.Errorf("it has taken %v, want at most %v", took, most)
	}
	for _, l := range harness.Ask[[]schema.LUNState](t, m.d, "lun", "list", managed) {
		if fmt.Sprint(l.ID) == lun {
			t.Errorf("there still is %+v", l)
		}
	}
	m.run(t, `
gone=$gone`+lun+`
await test -s /run/$gone.status
test $(</run/$gone.status) != 0
echo 1 >/sys/block/$gone/device/delete
await works
untouched >/run/errors || true
dmesg --clear
! grep -v "dev $gone," /run/errors`)
	m.same(t, m.begun)
}

// apply takes the other target away from its initiator by a file, and gives it back.
func (m *management) apply(t *testing.T) {
	text, err := os.ReadFile(m.d.ConfigFile())
	if err != nil {
		t.Fatal(err)
	}
	was := m.session(t, managed)
	out := m.session(t, managedOther)
	parts := strings.SplitAfterN(string(text), managedOther+"\n", 2)
	next := parts[0] + strings.Replace(parts[1], `["*"]`, `["iqn.2026-11.io.example:nobody"]`, 1)
	file := filepath.Join(t.TempDir(), "next.yaml")
	if err := os.WriteFile(file, []byte(next), 0o600); err != nil {
		t.Fatal(err)
	}
	named := fmt.Sprintf("session %d of %s", out.TSIH, initiatorName)
	planned, _, code := m.d.Try(t, "config", "plan", file, "-o", "json")
	var plan schema.Plan
	if err := json.Unmarshal([]byte(planned), &plan); err != nil || code != cli.ExitRefused { // apply without a flag would be refused
		t.Errorf("exit code %d, %v", code, err)
	}
	if len(plan.Steps) != 1 || plan.Steps[0].Change.Target != managedOther ||
		!slices.Equal(plan.Steps[0].Disturbs, []string{named}) {
		t.Errorf("the plan is %+v, want one step that disturbs %s", plan, named)
	}
	m.refused(t, named, "config", "apply", file)
	m.run(t, "await works")
	m.same(t, was)
	m.session(t, managedOther)
	plan = harness.Ask[schema.Plan](t, m.d, "config", "apply", file, "--disrupt", "--drain", "3s")
	if len(plan.Steps) != 1 || !plan.Steps[0].Done || !plan.Persisted {
		t.Errorf("what was done is %+v", plan)
	}
	m.run(t, "await works")
	m.same(t, was)
	if n := len(harness.Ask[[]schema.SessionState](t, m.d, "session", "list")); n != 1 {
		t.Errorf("there are %d sessions, want 1", n)
	}
	if got, err := os.ReadFile(m.d.ConfigFile()); err != nil || string(got) != next {
		t.Errorf("the configuration file is\n%s\nwant\n%s\n%v", got, next, err)
	}
	// And back. The initiator has tried ever since.
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	m.d.Manage(t, "config", "apply", file)
}

// kill ends the session of fio, and the initiator logs in again.
func (m *management) kill(t *testing.T) {
	was := m.session(t, managed)
	m.run(t, "await writes")
	m.d.Manage(t, "session", "kill", fmt.Sprint(was.TSIH), "--reason", "a test")
	m.run(t, "await works")
	if is := m.session(t, managed); is.TSIH == was.TSIH || !is.Started.After(was.Started) {
		t.Errorf("the session was\n%+v\nand is\n%+v", was, is)
	}
}

// capture records the middle of a session that continues. The file has its login, too.
func (m *management) capture(t *testing.T) {
	was := m.session(t, managed)
	// Kept next to the log of the console, for later analysis.
	file := filepath.Join(filepath.Dir(m.v.LogName), "session.pcapng")
	m.run(t, "await writes")
	m.d.Manage(t, "capture", "--session", fmt.Sprint(was.TSIH), "-w", file, "--force", "--duration", "2s")
	seen := dissect(t, file, 1, 200) // it begins and ends in the middle of things
	for _, want := range []string{
		"iwarp_mpa.rev 2",
		"iwarp_rdma.opcode 0x00", // RDMA Write
		"iwarp_rdma.opcode 0x01", // RDMA Read Request
		"iwarp_rdma.opcode 0x02", // RDMA Read Response
		"iscsi.opcode 0x01",      // SCSI Command
		"iscsi.opcode 0x21",      // SCSI Response
		"iscsi.opcode 0x03",      // Login Request
		"iscsi.opcode 0x23",      // Login Response
	} {
		if !seen[want] {
			t.Errorf("the capture has no frame with %s", want)
		}
	}
	m.run(t, "await works")
	m.same(t, was)
}

// stop ends the target in the middle of a round of fio and starts it again: the guest reads
// what it wrote before.
func (m *management) stop(t *testing.T) {
	round := m.run(t, "await writes; cat /run/fio.round")
	from := time.Now()
	m.d.Stop(t)
	if took := time.Since(from); took > managedDrain+5*time.Second {
		t.Errorf("the target has ended after %v, want at most %v and a little", took, managedDrain)
	} else {
		t.Logf("the target has ended after %v", took)
	}
	if again := m.run(t, "cat /run/fio.round"); again != round {
		t.Fatalf("round %s of fio is over, want to see it go on", round)
	}
	m.run(t, "grep 'Target requests logout within "+fmt.Sprint(managedDrain.Seconds())+" seconds' /run/iscsid.log")
	m.d.Start(t)
	m.run(t, "await rounds $((1 + "+strings.TrimSpace(round)+"))")
	m.session(t, managed)
}

// endOfFio ends fio on LUN 0, which has verified all that it wrote.
func (m *management) endOfFio(t *testing.T) {
	m.run(t, `
touch /run/fio.stop
await test -s /run/fio.status
cat /run/fio.log
test $(</run/fio.status) = 0
! dmesg | grep -E "$disk.*error|recovery timed out"`)
}

// metrics compares what the target counts with what fio counts. Nobody else uses the LUN
// meanwhile. The block layer, which would make one command of adjacent requests, is told not
// to.
func (m *management) metrics(t *testing.T) {
	labels := map[string]string{
		"lun": `{lun="0",op="%s",target="` + managed + `",transport="iser"}`,
		"session": fmt.Sprintf(`{initiator="%s",op="%%s",target="%s",transport="iser",tsih="%d"}`, initiatorName,
			managed, m.session(t, managed).TSIH),
	}
	before, was := m.d.Metrics(t), harness.Ask[schema.LUNState](t, m.d, "lun", "show", managed, "0").Counters
	m.run(t, `
echo 2 >/sys/block/$disk/queue/nomerges
fio --ioengine=libaio --direct=1 --filename=/dev/$disk --iodepth=16 --rw=randrw --bs=64k --size=16m \
--randrepeat=0 --output-format=json --output=`+vm.Files+`/fio.json --name=metrics`)
	after, is := m.d.Metrics(t), harness.Ask[schema.LUNState](t, m.d, "lun", "show", managed, "0").Counters
	b, err := os.ReadFile(filepath.Join(m.v.Files(), "fio.json"))
	if err != nil {
		t.Fatal(err)
	}
	var report struct{ Jobs []map[string]json.RawMessage }
	if err := json.Unmarshal(b, &report); err != nil || len(report.Jobs) != 1 {
		t.Fatalf("fio's report: %v\n%s", err, b)
	}
	grown := func(series string) float64 {
		if _, ok := after[series]; !ok {
			t.Errorf("there is no %s", series)
		}
		return after[series] - before[series]
	}
	seconds := 0.0 // that fio has seen its requests take
	for op, shown := range map[string]struct{ commands, bytes uint64 }{
		"read":  {is.Reads - was.Reads, is.ReadBytes - was.ReadBytes},
		"write": {is.Writes - was.Writes, is.WriteBytes - was.WriteBytes},
	} {
		var fio struct {
			IOs   float64                   `json:"total_ios"`
			Bytes float64                   `json:"io_bytes"`
			Lat   struct{ Mean, N float64 } `json:"lat_ns"`
		}
		if err := json.Unmarshal(report.Jobs[0][op], &fio); err != nil || fio.IOs == 0 {
			t.Fatalf("fio's report of %s: %v\n%s", op, err, b)
		}
		seconds += fio.Lat.Mean * fio.Lat.N / 1e9
		if float64(shown.commands) != fio.IOs || float64(shown.bytes) != fio.Bytes {
			t.Errorf("%s: lun show has %+v more, fio counts %+v", op, shown, fio)
		}
		for of, labels := range labels {
			for what, want := range map[string]float64{"commands": fio.IOs, "bytes": fio.Bytes} {
				series := "iser_target_" + of + "_" + what + "_total" + fmt.Sprintf(labels, op)
				if got := grown(series); got != want {
					t.Errorf("%s has grown by %v, fio counts %v", series, got, want)
				}
			}
		}
	}
	// The target sees a part of the time that passes for fio.
	commands := 0.0
	for _, op := range []string{"read", "write", "other"} {
		commands += grown("iser_target_lun_commands_total" + fmt.Sprintf(labels["lun"], op))
	}
	const duration = "iser_target_lun_command_duration_seconds_"
	count, sum := 0.0, 0.0
	for _, op := range []string{"read", "write", "other"} {
		total := `{lun="0",op="` + op + `",phase="total",target="` + managed + `",transport="iser"}`
		count, sum = count+grown(duration+"count"+total), sum+grown(duration+"sum"+total)
	}
	if count != commands || sum <= 0 ||
		sum > seconds {
		t.Errorf("%v commands have taken %v s, want %v, and less than the %v s of fio", count, sum, commands, seconds)
	}
}

// manageUp starts fio on $disk. /run/manage.sh is what the scripts that follow
// know: the device and the functions below.
const manageUp = `
cat >/run/manage.sh <<.
. /run/lib.sh
disk=${disk#/dev/}
.
cat >>/run/manage.sh <<'.'
# await COMMAND... succeeds as soon as the command does.
await() {
	local end=$((SECONDS + 100))
	while [ $SECONDS -lt $end ]; do
		if "$@"; then return; fi
		sleep 0.2
	done
	echo "in vain: $*" >&2
	dmesg | tail -n 30 >&2
	tail -n 20 /run/iscsid.log >&2
	tail -n 1 /run/fio.log >&2
	return 1
}
# noticed MESSAGE: by the kernel.
noticed() { dmesg | grep "$1"; }
# untouched prints what the kernel tells of errors.
untouched() { dmesg | grep -E 'conn error|siw: .*error|I/O error|critical .* error|timed out'; }
# used DEVICE: data is read and written there.
used() {
	local before after
	read -ra before </sys/block/$1/stat
	sleep 0.5
	read -ra after </sys/block/$1/stat
	[ ${before[0]} != ${after[0]} ] && [ ${before[4]} != ${after[4]} ]
}
# works: fio is at it, and has found nothing wrong.
works() {
	if [ -e /run/fio.status ]; then
		cat /run/fio.log >&2
		exit 1
	fi
	used $disk
}
# writes: a round of fio that has begun after this has written 512 KiB.
writes() {
	local round stat
	round=$(</run/fio.round)
	await rounds $((round + 1))
	read -ra stat </sys/block/$disk/stat
	await written $((stat[6] + 1024))
}
# rounds N: fio is in round N, or a later one.
rounds() {
	! test -e /run/fio.status || exit 1
	[ $(</run/fio.round) -ge $1 ]
}
# written N: sectors, since the disk was found.
written() { awk '$7 < '$1' { exit 1 }' /sys/block/$disk/stat; }
.
. /run/manage.sh
rm -f /run/fio.* /run/sd*.*
echo 1 >/run/fio.round
# fio verifies at the end of a round, of which one follows the other until it is
# told. The rate makes the writing last: of 24 MiB half are written, in 3 s at least.
(
	status=0
	until [ -e /run/fio.stop ] || [ $status != 0 ]; do
		fio --ioengine=libaio --direct=1 --filename=/dev/$disk --iodepth=16 --rw=randrw --bs=16k --size=24m --rate=4m,4m \
			--verify=crc32c --verify_fatal=1 --randrepeat=0 --output-format=terse --terse-version=3 --name=manage || status=$?
		echo $(($(</run/fio.round) + 1)) >/run/fio.round
	done
	echo $status >/run/fio.status
) </dev/null >/run/fio.log 2>&1 &
`
