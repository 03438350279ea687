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

// A target is managed by its own commands while the kernel's initiator uses it
// over iSER: fio, which verifies all that it writes, goes round and round on
// LUN 0 of one of two targets, from the first step to the last.
func TestManage(t *testing.T) {
	v := boot(t)
	need(t, "fio", "tshark")
	const (
		main  = "iqn.2026-11.io.example:managed"
		other = "iqn.2026-11.io.example:managed.other"
		drain = 6 * time.Second
	)
	d := harness.Config{
		Targets: `
  - name: ` + main + ` # fio is here
    initiators: ["*"]
    luns:
      - {id: 0, backend: file, path: ` + t.TempDir() + `/disk.img, size: 48MiB}
  - name: ` + other + `
    initiators: ["*"]
    luns:
      - {id: 0, backend: memory, size: 16MiB}
`,
		More: "drain: " + drain.String() + "\n",
	}.Start(t)
	defer v.Try(t, "touch /run/fio.stop; pkill -x fio || true\n"+forgive, quick)
	v.Run(t, script(d, "discover $PORTAL; login $PORTAL "+main+"; login $PORTAL "+other+"\ndisk=$(disk "+main+" 0)\n"+manageUp), quick)
	run := func(t *testing.T, body string) string {
		t.Helper()
		return v.Run(t, ". /run/manage.sh\n"+body, long)
	}
	// step is a subtest. What a step leaves behind is what the next one expects.
	step := func(name string, f func(t *testing.T)) {
		t.Helper()
		if !t.Run(name, f) {
			t.FailNow()
		}
	}
	// session is the only session with a target.
	session := func(t *testing.T, target string) schema.SessionState {
		t.Helper()
		sessions := harness.Ask[[]schema.SessionState](t, d, "session", "list")
		sessions = slices.DeleteFunc(sessions, func(s schema.SessionState) bool { return s.Target != target })
		if len(sessions) != 1 || len(sessions[0].Connections) != 1 || sessions[0].Transport != "iser" {
			t.Fatalf("sessions with %s: %+v, want one over iSER", target, sessions)
		}
		return sessions[0]
	}
	// same fails t if the session is not as it was, or has done nothing since.
	same := func(t *testing.T, was schema.SessionState) {
		t.Helper()
		is := session(t, was.Target)
		a, b := was.Connections[0], is.Connections[0]
		if is.TSIH != was.TSIH || !is.Started.Equal(was.Started) || a.Remote != b.Remote || a.CID != b.CID || !a.Started.Equal(b.Started) {
			t.Errorf("the session was\n%+v\nand is\n%+v", was, is)
		}
		if b.Received == a.Received {
			t.Error("the session has done nothing")
		}
	}
	refused := func(t *testing.T, flag string, args ...string) {
		t.Helper()
		if _, stderr, code := d.Try(t, args...); code != cli.ExitRefused || !strings.Contains(stderr, flag) {
			t.Errorf("exit code %d, want %d with a hint at %s", code, cli.ExitRefused, flag)
		}
	}
	begun := session(t, main)

	step("lun resize", func(t *testing.T) {
		run(t, "await works")
		d.Manage(t, "lun", "resize", main, "0", "64MiB")
		got := run(t, `
await noticed 'Capacity data has changed' >&2
echo 1 >/sys/block/$disk/device/rescan
blockdev --getsize64 /dev/$disk
dd if=/dev/zero of=/dev/$disk bs=1M seek=63 count=1 oflag=direct status=none
await works`)
		if want := fmt.Sprintln(64 << 20); got != want {
			t.Errorf("the guest sees a size of %q, want %q", got, want)
		}
		refused(t, "--allow-shrink", "lun", "resize", main, "0", "48MiB")
		same(t, begun)
	})

	// The guest finds LUNs by itself: iscsid looks for them when it is told REPORTED
	// LUNS DATA HAS CHANGED.
	step("lun create", func(t *testing.T) {
		for range 2 {
			d.Manage(t, "lun", "create", main, "--backend", "memory", "--size", "24MiB")
		}
		got := run(t, `
for n in 1 2; do
	gone=$(disk `+main+` $n)
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
		run(t, "await used $gone1; await used $gone2; await works; ! untouched")
		same(t, begun)
	})

	// Each of them while a fio is busy with it, which ends with an error. The one
	// on LUN 0 does not notice.
	for _, del := range []struct {
		lun  string
		how  []string
		most time.Duration
	}{
		{"1", []string{"--drain", "5s"}, 15 * time.Second},
		{"2", []string{"--now"}, 10 * time.Second},
	} {
		step("lun delete "+del.how[0], func(t *testing.T) {
			args := []string{"lun", "delete", main, del.lun}
			refused(t, "--drain TIME or --now", args...)
			run(t, "used $gone"+del.lun)
			from := time.Now()
			d.Manage(t, append(args, del.how...)...)
			if took := time.Since(from); took > del.most {
				t.Errorf("it has taken %v, want at most %v", took, del.most)
			}
			for _, l := range harness.Ask[[]schema.LUNState](t, d, "lun", "list", main) {
				if fmt.Sprint(l.ID) == del.lun {
					t.Errorf("there still is %+v", l)
				}
			}
			run(t, `
gone=$gone`+del.lun+`
await test -s /run/$gone.status
test $(</run/$gone.status) != 0
echo 1 >/sys/block/$gone/device/delete
await works
untouched >/run/errors || true
dmesg --clear
! grep -v "dev $gone," /run/errors`)
			same(t, begun)
		})
	}

	step("config plan, config apply", func(t *testing.T) {
		text, err := os.ReadFile(d.ConfigFile())
		if err != nil {
			t.Fatal(err)
		}
		was := session(t, main)
		out := session(t, other)
		parts := strings.SplitAfterN(string(text), other+"\n", 2)
		next := parts[0] + strings.Replace(parts[1], `["*"]`, `["iqn.2026-11.io.example:nobody"]`, 1)
		file := filepath.Join(t.TempDir(), "next.yaml")
		if err := os.WriteFile(file, []byte(next), 0o600); err != nil {
			t.Fatal(err)
		}
		named := fmt.Sprintf("session %d of %s", out.TSIH, initiatorName)
		plan := harness.Ask[schema.Plan](t, d, "config", "plan", file)
		if len(plan.Steps) != 1 || plan.Steps[0].Change.Target != other || !slices.Equal(plan.Steps[0].Disturbs, []string{named}) {
			t.Errorf("the plan is %+v, want one step that disturbs %s", plan, named)
		}
		refused(t, named, "config", "apply", file)
		run(t, "await works")
		same(t, was)
		session(t, other)
		plan = harness.Ask[schema.Plan](t, d, "config", "apply", file, "--disrupt", "--drain", "3s")
		if len(plan.Steps) != 1 || !plan.Steps[0].Done || !plan.Persisted {
			t.Errorf("what was done is %+v", plan)
		}
		run(t, "await works")
		same(t, was)
		if n := len(harness.Ask[[]schema.SessionState](t, d, "session", "list")); n != 1 {
			t.Errorf("there are %d sessions, want 1", n)
		}
		if got, err := os.ReadFile(d.ConfigFile()); err != nil || string(got) != next {
			t.Errorf("the configuration file is\n%s\nwant\n%s\n%v", got, next, err)
		}
		// And back. The initiator has tried ever since.
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
		d.Manage(t, "config", "apply", file)
	})

	step("session kill", func(t *testing.T) {
		was := session(t, main)
		run(t, "await writes")
		d.Manage(t, "session", "kill", fmt.Sprint(was.TSIH), "--reason", "a test")
		run(t, "await works")
		if is := session(t, main); is.TSIH == was.TSIH || !is.Started.After(was.Started) {
			t.Errorf("the session was\n%+v\nand is\n%+v", was, is)
		}
	})

	// Of the middle of a session that goes on. What it began with is there, too.
	step("capture", func(t *testing.T) {
		was := session(t, main)
		// Kept beside the log of the console, for whoever wants to look.
		file := filepath.Join(filepath.Dir(v.LogName), "session.pcapng")
		run(t, "await writes")
		d.Manage(t, "capture", "--session", fmt.Sprint(was.TSIH), "-w", file, "--force", "--duration", "2s")
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
		run(t, "await works")
		same(t, was)
	})

	// In the middle of a round: what was written before is read after.
	step("SIGTERM", func(t *testing.T) {
		round := run(t, "await writes; cat /run/fio.round")
		from := time.Now()
		d.Stop(t)
		if took := time.Since(from); took > drain+5*time.Second {
			t.Errorf("the target has ended after %v, want at most %v and a little", took, drain)
		} else {
			t.Logf("the target has ended after %v", took)
		}
		if again := run(t, "cat /run/fio.round"); again != round {
			t.Fatalf("round %s of fio is over, want to see it go on", round)
		}
		run(t, "grep 'Target requests logout within "+fmt.Sprint(drain.Seconds())+" seconds' /run/iscsid.log")
		d.Start(t)
		run(t, "await rounds $((1 + "+strings.TrimSpace(round)+"))")
		session(t, main)
	})

	run(t, `
touch /run/fio.stop
await test -s /run/fio.status
cat /run/fio.log
test $(</run/fio.status) = 0
! dmesg | grep -E "$disk.*error|recovery timed out"`)

	// Nobody else uses the LUN meanwhile. The block layer, which would make one
	// command of adjacent requests, is told not to.
	step("metrics", func(t *testing.T) {
		labels := map[string]string{
			"lun":     `{lun="0",op="%s",target="` + main + `",transport="iser"}`,
			"session": fmt.Sprintf(`{initiator="%s",op="%%s",target="%s",transport="iser",tsih="%d"}`, initiatorName, main, session(t, main).TSIH),
		}
		before, was := d.Metrics(t), harness.Ask[schema.LUNState](t, d, "lun", "show", main, "0").Counters
		run(t, `
echo 2 >/sys/block/$disk/queue/nomerges
fio --ioengine=libaio --direct=1 --filename=/dev/$disk --iodepth=16 --rw=randrw --bs=64k --size=16m \
	--randrepeat=0 --output-format=json --output=`+vm.Files+`/fio.json --name=metrics`)
		after, is := d.Metrics(t), harness.Ask[schema.LUNState](t, d, "lun", "show", main, "0").Counters
		b, err := os.ReadFile(filepath.Join(v.Files(), "fio.json"))
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
		total := `{lun="0",phase="total",target="` + main + `",transport="iser"}`
		if count, sum := grown(duration+"count"+total), grown(duration+"sum"+total); count != commands || sum <= 0 || sum > seconds {
			t.Errorf("%v commands have taken %v s, want %v, and less than the %v s of fio", count, sum, commands, seconds)
		}
	})
	v.Run(t, script(d, forgive+"logout "+main), quick)
	v.Run(t, script(d, "logout "+other), quick)
	d.AwaitVars(t, map[string]float64{"sessions": 0, "connections": 0, "tasks": 0, "buffers": 0, "stags": 0}, 10*time.Second)
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
