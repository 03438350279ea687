package interop_test

import (
	"fmt"
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

// A manager is systemd in the guest: process 1 of a PID namespace, with mounts of its
// own, so that nothing of it is left for the tests after it but what it has installed.
type manager struct {
	v *vm.VM
}

// debianUnits are those that the service depends on. There are no others: nothing
// is started that a test does not start.
const debianUnits = `
basic.target local-fs-pre.target local-fs.target multi-user.target network-online.target network.target paths.target
remote-fs-pre.target shutdown.target slices.target sockets.target sysinit.target timers.target umount.target
systemd-journald-dev-log.socket systemd-journald.service systemd-journald.socket`

// startManager starts systemd, which lives as long as t.
func startManager(t *testing.T, v *vm.VM) *manager {
	t.Helper()
	m := &manager{v}
	t.Cleanup(func() {
		if v.Broken() == nil {
			v.Run(t, `
pid=$(cat /run/manager.pid)
kill -KILL $pid
while [ -e /proc/$pid ]; do sleep 0.1; done`, quick)
		}
	})
	v.Run(t, `
`+cgroups+`
cat >/run/manager.sh <<'.'
set -e
mkdir -p /run/manager # from a test before
mount -t tmpfs -o mode=755 tmpfs /run/manager
mkdir /run/manager/share /run/manager/units /run/manager/lock
mount --bind /run/share /run/manager/share
mount -n --move /run/manager /run
for d in /etc/systemd/system /etc/iser-target /var/lib/iser-target /srv; do
	mkdir -p $d
	mount -t tmpfs -o mode=755 tmpfs $d
done
for u in `+strings.Join(strings.Fields(debianUnits), " ")+`; do cp /lib/systemd/system/$u /run/units/; done
cat >/run/units/interop.target <<!
[Unit]
DefaultDependencies=no
Wants=systemd-journald.service
!
exec env -i PATH=$PATH container=interop SYSTEMD_UNIT_PATH=/etc/systemd/system:/run/units \
	/lib/systemd/systemd --system --unit=interop.target --show-status=no
.
unshare --fork --kill-child --pid --mount-proc --mount sh /run/manager.sh </dev/null >/run/manager.out 2>&1 &
while kill -0 $! && [ $SECONDS -lt 90 ]; do
	if pgrep -P $! -x systemd >/run/manager.pid &&
		nsenter -t $(cat /run/manager.pid) -m -p systemctl -q is-active interop.target systemd-journald.service; then
		exit
	fi
	sleep 0.1
done 2>/dev/null
cat /run/manager.out >&2
exit 1`, 2*time.Minute)
	return m
}

// cgroups mounts the control groups, which nobody else in the guest needs.
const cgroups = `
mkdir -p /sys/fs/cgroup
mountpoint -q /sys/fs/cgroup || mount -t cgroup2 cgroup2 /sys/fs/cgroup`

// script returns the script that runs s where systemd is.
func (m *manager) script(t *testing.T, s string) string {
	t.Helper()
	const name = "manager-script"
	if err := os.WriteFile(filepath.Join(m.v.Files(), name), []byte(inManager+s), 0o600); err != nil {
		t.Fatal(err)
	}
	return "nsenter -t $(cat /run/manager.pid) -m -p bash -euo pipefail " + vm.Files + "/" + name
}

func (m *manager) run(t *testing.T, s string, limit time.Duration) string {
	t.Helper()
	return m.v.Run(t, m.script(t, s), limit)
}

func (m *manager) try(t *testing.T, s string, limit time.Duration) vm.Result {
	t.Helper()
	return m.v.Try(t, m.script(t, s), limit)
}

// inManager is what scripts where systemd is begin with.
const inManager = `
# show PROPERTY prints a property of the service.
show() { systemctl show -p "$1" --value iser-target.service; }

# await COMMAND... waits until it succeeds.
await() {
	local end=$((SECONDS + 30))
	until "$@"; do
		if [ $SECONDS -ge $end ]; then
			echo "not within 30 s: $*" >&2
			systemctl --no-pager --full status iser-target.service >&2
			return 1
		fi
		sleep 0.1
	done
}
# is PROPERTY VALUE; must is the same, and says what is wrong.
is() { [ "$(show "$1")" = "$2" ]; }
must() { is "$@" || { echo "$1 is $(show "$1"), want $2" >&2; return 1; } }
logged() { journalctl --sync; journalctl -o cat -u iser-target.service | grep -e "$1" >/dev/null; }
`

const serviceIQN = "iqn.2026-11.io.example:service"

// serviceConfig is the configuration that is installed.
const serviceConfig = `# of the test
portals:
  - listen: 0.0.0.0:3260
    advertise: ["` + vm.GuestAddr + `:3260"]
targets:
  - name: ` + serviceIQN + `
    initiators: ["*"]
    luns:
      - {id: 0, backend: file, path: /var/lib/iser-target/0.img, size: 64MiB, sanitize: true}
      - {id: 1, backend: memory, size: 64MiB, sanitize: true}
drain: 5s
`

// block returns the commands of the first fenced block after heading in a Markdown file.
func block(t *testing.T, file, heading string) string {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut(string(b), "\n"+heading+"\n")
	_, rest, ok2 := strings.Cut(rest, "\n```\n")
	commands, _, ok3 := strings.Cut(rest, "\n```\n")
	if !ok || !ok2 || !ok3 {
		t.Fatalf("%s has no block of commands after %q", file, heading)
	}
	return commands
}

// stage copies files of the repository to a directory that the guest sees, until the test ends.
func stage(t *testing.T, v *vm.VM, dirs ...string) {
	t.Helper()
	for _, dir := range dirs {
		t.Cleanup(func() { os.RemoveAll(filepath.Join(v.Files(), dir)) })
		if err := os.CopyFS(filepath.Join(v.Files(), dir), os.DirFS(filepath.Join("../..", dir))); err != nil {
			t.Fatal(err)
		}
	}
}

// installService starts systemd and the service, with that configuration. It installs the units by the commands of docs/service.md, as they stand there.
func installService(t *testing.T, v *vm.VM, config string) *manager {
	t.Helper()
	stage(t, v, "packaging", "examples")
	bin := filepath.Join(v.Files(), "bin")
	t.Cleanup(func() { os.RemoveAll(bin) })
	if err := os.Mkdir(bin, 0o755); err != nil {
		t.Fatal(err)
	}
	harness.Copy(t, filepath.Join(bin, "iser-target"))
	if err := os.WriteFile(filepath.Join(v.Files(), "examples", "service.yaml"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	m := startManager(t, v)
	// enable --now is back when the service has told that it is ready.
	install := strings.ReplaceAll(block(t, "../../docs/service.md", "## systemd"), "FILE", "service")
	m.run(t, "cd "+vm.Files+"\n"+install+`
must ActiveState active
must SubState running
logged msg=serving
ls /etc/systemd/system/multi-user.target.wants/iser-target.service`, quick)
	return m
}

// The units of packaging/systemd under a systemd that runs.
func TestSystemd(t *testing.T) {
	v := boot(t)
	need(t, "/lib/systemd/systemd", cu.Program, "iscsi-ls", "fio")
	m := installService(t, v, serviceConfig)
	defer v.Try(t, "set +e\niscsiadm -m node --logout\n"+forgive, quick)

	for _, test := range []struct {
		name string
		run  func(t *testing.T, m *manager)
	}{
		{"hardening", serviceHardening},
		{"commands", serviceCommands},
		{"system calls", serviceCalls},
		{"reload", serviceReload},
		{"upgrade", serviceUpgrade},
		{"upgraded", serviceUpgraded},
		{"restart", serviceRestart},
		{"stop", serviceStop},
		{"socket", serviceSocket},
		{"watchdog", serviceWatchdog},
		{"IPsec", serviceIPsec},
		{"drop-ins", serviceDropIns},
	} {
		if !t.Run(test.name, func(t *testing.T) { test.run(t, m) }) {
			if v.Broken() == nil {
				m.try(t, "journalctl --no-pager -n 60 -u iser-target.service -u iser-target.socket", quick)
			}
			return
		}
	}
}

// serviceHardening checks, by what the kernel says of the process, that the directives work.
func serviceHardening(t *testing.T, m *manager) {
	hardened(t, m, strings.Repeat("0", 16), "own user")
}

// hardened checks that the service has those capabilities and no other rights than the unit gives it. more is what the kernel says besides.
func hardened(t *testing.T, m *manager, caps string, more ...string) {
	t.Helper()
	got := m.run(t, `
pid=$(show MainPID)
sed -nE 's/^(Uid|Gid|Groups|CapEff|CapPrm|CapBnd|CapAmb|NoNewPrivs|Seccomp):\s+/\1 /p' /proc/$pid/status | tr '\t' ' ' | sed 's/ *$//'
echo "id $(id -u iser-target) $(id -g iser-target)"
stat -c '%a %U:%G %n' /var/lib/iser-target /run/iser-target /run/iser-target/control.sock /etc/iser-target /etc/iser-target/config.yaml
for d in / /usr /etc /var/lib /srv /sys/kernel /sys/fs/cgroup /etc/iser-target /var/lib/iser-target /run/iser-target; do
	if nsenter -t $pid -m touch $d/probe 2>/dev/null; then
		echo "writes $d"
		nsenter -t $pid -m rm $d/probe
	fi
done
if nsenter -t $pid -m sh -c 'echo 1 >/proc/sys/vm/drop_caches' 2>/dev/null; then echo "writes /proc/sys"; fi
touch /tmp/probe
nsenter -t $pid -m find /tmp /home -mindepth 1
rm /tmp/probe
echo dev $(nsenter -t $pid -m find /dev -xdev '(' -type b -o -type c ')' -printf '%f\n' | sort)
grep -o 'hidepid=[a-z]*' /proc/$pid/mountinfo | sort -u
for ns in mnt uts user; do
	[ $(readlink /proc/$pid/ns/$ns) = $(readlink /proc/1/ns/$ns) ] || echo "own $ns"
done
`, quick)
	id := regexp.MustCompile(`(?m)^id (\d+) (\d+)$`).FindStringSubmatch(got)
	if id == nil || id[1] == "0" || id[2] == "0" {
		t.Fatal("the service's user is not there, or is root")
	}
	four := func(id string) string { return strings.TrimSpace(strings.Repeat(id+" ", 4)) }
	want := strings.Join(append([]string{
		"Uid " + four(id[1]), "Gid " + four(id[2]), "Groups " + id[2],
		// SEC-5042.6.5-1
		"CapPrm " + caps, "CapEff " + caps, "CapBnd " + caps, "CapAmb " + caps, "NoNewPrivs 1", "Seccomp 2", id[0],
		"700 iser-target:iser-target /var/lib/iser-target",
		"700 iser-target:iser-target /run/iser-target",
		"600 iser-target:iser-target /run/iser-target/control.sock",
		"750 iser-target:iser-target /etc/iser-target",
		"600 iser-target:iser-target /etc/iser-target/config.yaml",
		"writes /etc/iser-target", "writes /var/lib/iser-target", "writes /run/iser-target",
		"dev full null ptmx random tty urandom zero", "hidepid=invisible", "own mnt", "own uts",
	}, more...), "\n")
	if got = strings.TrimSpace(got); got != want {
		t.Errorf("the kernel says\n%s\nwant\n%s", got, want)
	}
}

// serviceCommands checks that root finds the control socket of the service without an option,
// that nobody else gets in, and that changes are written to /etc/iser-target.
func serviceCommands(t *testing.T, m *manager) {
	got := m.run(t, `
iser-target target list
iser-target lun create `+serviceIQN+` --id 2 --path /var/lib/iser-target/2.img --size 16MiB
iser-target lun resize `+serviceIQN+` 2 32MiB
stat -c 'size %s %U' /var/lib/iser-target/2.img
head -n 1 /etc/iser-target/config.yaml
grep -c 2.img /etc/iser-target/config.yaml
stat -c '%a %U' /etc/iser-target/config.yaml
iser-target lun delete `+serviceIQN+` 2 --now
rm /var/lib/iser-target/2.img
! grep 2.img /etc/iser-target/config.yaml
status=0
setpriv --reuid 65534 --regid 65534 --clear-groups iser-target lun list --socket /run/iser-target/control.sock || status=$?
echo "nobody: $status"
await is StatusText 'serving: sessions 0, targets 1, LUNs 2'
`, quick)
	for _, want := range []string{serviceIQN, "\nsize 33554432 iser-target\n",
		"\n# of the test\n1\n600 iser-target\n", "\nnobody: 5\n"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q", want)
		}
	}
}

// suiteOn returns a script that runs tests of the suite on a LUN, and fails if one of them
// does.
func suiteOn(lun int, names ...string) string {
	s := ""
	for _, name := range names {
		args := cu.Of(name).Args(fmt.Sprintf("iscsi://%s:3260/%s/%d", vm.GuestAddr, serviceIQN, lun))
		s += fmt.Sprintf("timeout 60 %s %s </dev/null >/run/suite 2>&1 || { cat /run/suite >&2; exit 1; }\n"+
			"grep -E 'passed|SKIPPED' /run/suite | sed 's,^,%s: ,'\n", cu.Program, strings.Join(args, " "), name)
	}
	return s
}

// serviceCalls checks that the unit refuses no system call that the target makes. Each refused
// call kills the process here, and everything continues as before: the services of the LUNs,
// the changes of the configuration and the start itself.
func serviceCalls(t *testing.T, m *manager) {
	m.run(t, dropIn("calls", "SystemCallErrorNumber=kill"), quick)
	m.run(t, "echo $(show MainPID) $(show NRestarts) >/run/process", quick)
	m.v.Run(t, loggedIn+`
d=$(cat /run/disk)
blkdiscard -z -o 1M -l 1M $d
blkdiscard -o 1M -l 1M $d
sg_get_lba_status --lba=2048 $d
sg_sync $d
sg_persist --out --register --param-sark=1 --param-aptpl $d
sg_persist --out --register --param-rk=1 --param-sark=0 $d
blkdiscard -z -l 1M $(disk `+serviceIQN+` 1)
blkdiscard -l 1M $(disk `+serviceIQN+` 1)
sg_sanitize --block --early --quick $d
iscsiadm -m node --logout
`+suiteOn(0, "ExtendedCopy.Simple")+suiteOn(1, "ExtendedCopy.Simple"), long)
	m.run(t, `
cd /var/lib/iser-target
iser-target lun create `+serviceIQN+` --id 2 --path $PWD/2.img --size 8MiB --preallocate
head -c 1M /dev/urandom >source
chown iser-target: source
iser-target lun create `+serviceIQN+` --id 3 --path $PWD/3.img --from $PWD/source
cmp 3.img source
iser-target lun resize `+serviceIQN+` 2 4MiB --allow-shrink
iser-target lun create `+serviceIQN+` --id 4 --backend memory --size 8MiB
for n in 2 3 4; do iser-target lun delete `+serviceIQN+` $n --now; done
iser-target portal add 127.0.0.1:3270
iser-target portal remove 127.0.0.1:3270 --now
iser-target events >/dev/null
iser-target reservation show
iser-target explain --initiator iqn.2026-11.io.example:any --target `+serviceIQN+`
systemctl reload iser-target.service
[ "$(show MainPID) $(show NRestarts)" = "$(cat /run/process)" ]
systemctl stop iser-target.service
must Result success
systemctl start iser-target.service`, quick)
	// That it is the end is no empty promise.
	if r := m.try(t, dropIn("calls", "SystemCallErrorNumber=kill", "SystemCallFilter=~listen"), quick); r.Status == 0 {
		t.Error("the service starts although it may not listen")
	}
	m.run(t, `
logged status=31/SYS
again() { ! is NRestarts 0; }
await again
# Only this forgets how often it was started again, unless systemd has unloaded the unit: tests below want 0.
systemctl stop iser-target.service
systemctl reset-failed`+undo("calls")+`
must NRestarts 0`, quick)
}

// dropIn returns a script that sets directives of the service and starts it again.
func dropIn(name string, directives ...string) string {
	return `
mkdir -p /etc/systemd/system/iser-target.service.d
cat >/etc/systemd/system/iser-target.service.d/` + name + `.conf <<'.'
[Service]
` + strings.Join(directives, "\n") + `
.
systemctl daemon-reload
systemctl restart iser-target.service
`
}

// undo returns a script that removes drop-ins.
func undo(names ...string) string {
	s := "\n"
	for _, name := range names {
		s += "rm /etc/systemd/system/iser-target.service.d/" + name + ".conf\n"
	}
	return s + "systemctl daemon-reload\nsystemctl restart iser-target.service\n"
}

// loggedIn logs in over iSER, writes what is at /run/data to the first MiB of LUN 0 and
// prints the disk. It fills /run/data.
const loggedIn = `
. /run/lib.sh
discover ` + vm.GuestAddr + `:3260
login ` + vm.GuestAddr + `:3260 ` + serviceIQN + `
iscsiadm -m session | grep ^iser: >&2
disk ` + serviceIQN + ` 0 >/run/disk
head -c 1M /dev/urandom >/run/data
dd if=/run/data of=$(cat /run/disk) bs=64k oflag=direct status=none
` + sameData

// sameData reads that MiB again.
const sameData = "dd if=$(cat /run/disk) bs=64k count=16 iflag=direct status=none | cmp - /run/data\n"

// serviceReload checks that systemctl reload applies what differs, while a session stays. A
// file with an error changes nothing.
func serviceReload(t *testing.T, m *manager) {
	m.v.Run(t, loggedIn, quick)
	m.run(t, `
pid=$(show MainPID)
sessions=$(iser-target session list -o json | grep -E '"(tsih|initiator)"')
config=/etc/iser-target/config.yaml
cp -p $config /run/config.was
sed -i 's,^drain:,      - {id: 2\, backend: memory\, size: 8MiB}\n&,' $config
systemctl reload iser-target.service
await sh -c 'iser-target lun show `+serviceIQN+` 2 >/dev/null'
echo 'bogus: 1' >>$config
systemctl reload iser-target.service
await logged bogus
iser-target lun show `+serviceIQN+` 2
cp -p /run/config.was $config
systemctl reload iser-target.service
await logged 'refused: remove LUN 2' # the session would be disturbed
iser-target config apply --now
! iser-target lun show `+serviceIQN+` 2
[ "$(iser-target session list -o json | grep -E '"(tsih|initiator)"')" = "$sessions" ]
must MainPID $pid
must ActiveState active`, quick)
	m.v.Run(t, sameData+"iscsiadm -m node --logout\n", quick)
}

// sessionNow prints what differs for another session.
const sessionNow = "iser-target session list -o json | grep -E '\"(tsih|started)\"'"

// serviceUpgrade checks that systemd follows an upgrade to the new process, which then is the only one, and that the
// session continues.
func serviceUpgrade(t *testing.T, m *manager) {
	m.v.Run(t, loggedIn, quick)
	m.run(t, `
before=$(`+sessionNow+`)
pid=$(show MainPID)
moved() { ! is MainPID $pid; }
for n in 1 2 3; do
	iser-target upgrade
	await moved
	pid=$(show MainPID)
	await is ActiveState active
	must SubState running
	must NRestarts 0
done
one() { [ "$(pgrep -c -x iser-target)" = 1 ]; }
await one
after=$(`+sessionNow+`)
echo "before $before, after $after"
[ "$before" = "$after" ]`, quick)
	m.v.Run(t, sameData+"iscsiadm -m node --logout\n", quick)
	m.run(t, `
systemctl kill --signal=KILL --kill-whom=main iser-target.service
await is NRestarts 1
await is ActiveState active
systemctl restart iser-target.service`, quick)
}

const neighborIQN = "iqn.2026-11.io.example:neighbor"

// sinceMark prints what the journal has of the service since mark.
const sinceMark = `
mark() { journalctl --sync; journalctl -n 1 -o cat --show-cursor | sed -n 's/^-- cursor: //p' >/run/cursor; }
since() { journalctl --sync; journalctl -o cat --after-cursor="$(cat /run/cursor)" -u iser-target.service; }
orderly() { # that no process was ended by force, and every LINE is there
	since >/run/since
	if grep -E 'SIGKILL|not our child|Failed with result|timed out|status=[^0]' /run/since; then return 1; fi
	for line; do grep -e "$line" /run/since >/dev/null || { echo "not logged: $line" >&2; cat /run/since >&2; return 1; }; done
}
`

// serviceUpgraded checks that systemd waits for the orderly end of a process that serves after upgrades, as for one that it
// started: systemctl restart keeps the sessions and I/O in progress, and systemctl stop ends them. A neighbor that logged in over TCP
// keeps its reservation and data in memory.
func serviceUpgraded(t *testing.T, m *manager) {
	m.run(t, `
sed -i 's/^drain: 5s/drain: 0s/' /etc/iser-target/config.yaml
systemctl reload iser-target.service
await logged 'configuration file was applied'
iser-target target create `+neighborIQN+` --initiator '*'
iser-target lun create `+neighborIQN+` --id 0 --backend memory --size 16MiB`, quick)
	m.v.Run(t, loggedIn+`
modprobe iscsi_tcp
iscsiadm -m discovery -t st -p `+vm.GuestAddr+`:3260 -I default
iscsiadm -m node -T `+neighborIQN+` -p `+vm.GuestAddr+`:3260 -I default --login
neighbor=$(disk `+neighborIQN+` 0)
echo $neighbor >/run/neighbor
dd if=/run/data of=$neighbor bs=64k oflag=direct status=none
sg_persist --out --register --param-sark=5 $neighbor
sg_persist --out --reserve --param-rk=5 --prout-type=3 $neighbor
rm -f /run/fio.*
touch /run/fio.go
(
	status=0
	while [ -e /run/fio.go ] && [ $status = 0 ]; do
		fio --ioengine=libaio --direct=1 --filename=$(cat /run/disk) --offset=8m --iodepth=8 --rw=randrw --bs=16k --size=8m \
			--verify=crc32c --verify_fatal=1 --randrepeat=0 --name=upgraded >>/run/fio.out 2>&1 || status=$?
	done
	echo $status >/run/fio.status
) </dev/null >/run/fio.log 2>&1 &`, quick)
	m.run(t, sinceMark+`
sessions() { iser-target session list -o json | grep -E '"(tsih|started)"'; }
tsih() { sessions | grep tsih; }
program=/run/iser-target.program
cp -p /usr/bin/iser-target $program
install() { cp -p $1 /usr/bin/iser-target.new; mv /usr/bin/iser-target.new /usr/bin/iser-target; }
upgrade() {
	local pid=$(show MainPID)
	iser-target upgrade
	moved() { ! is MainPID $pid; }
	await moved
	one() { [ "$(pgrep -c -x iser-target)" = 1 ]; }
	await one
	# systemd is the parent, so it learns of the end of the process.
	[ "$(sed -n 's/^PPid:\t//p' /proc/$(show MainPID)/status)" = 1 ]
}
mark
before=$(sessions)
upgrade
upgrade
[ "$before" = "$(sessions)" ]
# A new process that ends changes nothing.
pid=$(show MainPID)
printf '#!/bin/sh\nexit 7\n' >/run/bad
chmod 755 /run/bad
install /run/bad
status=0
$program upgrade 2>/run/refused || status=$?
cat /run/refused >&2
[ $status = 1 ]
grep 'ended. Its messages are in the log' /run/refused
install $program
must MainPID $pid
must ActiveState active
[ "$before" = "$(sessions)" ]
was=$(tsih)
pid=$(show MainPID)
systemctl restart iser-target.service
must ActiveState active
must NRestarts 0
[ "$(show MainPID)" != $pid ]
orderly 'msg="sessions wait for the restart"' 'msg=stopped' 'msg="sessions continue after the restart"'
[ "$was" = "$(tsih)" ]
upgrade
[ "$was" = "$(tsih)" ]`, long)
	m.v.Run(t, `
rm /run/fio.go
for ((n = 0; n < 600; n++)); do
	[ -e /run/fio.status ] && break
	sleep 0.1
done
[ $(cat /run/fio.status) = 0 ] || { cat /run/fio.out >&2; exit 1; }
`+sameData+`
neighbor=$(cat /run/neighbor)
dd if=$neighbor bs=64k count=16 iflag=direct status=none | cmp - /run/data
sg_persist --in --read-reservation $neighbor | grep -i 'key=0x5'`, long)
	m.run(t, sinceMark+`
SECONDS=0
systemctl stop iser-target.service
echo "stopped in $SECONDS s"
must ActiveState inactive
must Result success
orderly 'msg="shutting down"' 'msg=stopped' 'iser-target.service: Deactivated successfully'
systemctl start iser-target.service
# Whoever kills the old process before the new one serves ends both.
printf '#!/bin/sh\ntouch /run/iser-target/began\nsleep 300\n' >/run/bad
mv /usr/bin/iser-target /run/iser-target.program
install() { cp -p $1 /usr/bin/iser-target.new; mv /usr/bin/iser-target.new /usr/bin/iser-target; }
install /run/bad
/run/iser-target.program upgrade >/run/killed 2>&1 &
await test -e /run/iser-target/began
install /run/iser-target.program
before=$(show NRestarts)
systemctl kill --signal=KILL --kill-whom=main iser-target.service
await is NRestarts $((before + 1))
await is ActiveState active
gone() { ! pgrep -u iser-target sleep; }
await gone
wait`, long)
	m.v.Run(t, sameData+`
iscsiadm -m node -T `+neighborIQN+` -p `+vm.GuestAddr+`:3260 -I default --logout
iscsiadm -m node -T `+serviceIQN+` --logout
`+forgive, quick)
	m.run(t, `
iser-target target delete `+neighborIQN+` --now
sed -i 's/^drain: 0s/drain: 5s/' /etc/iser-target/config.yaml
systemctl reload iser-target.service
await is StatusText 'serving: sessions 0, targets 1, LUNs 2'`, quick)
}

// serviceRestart checks that a restart without a drain keeps the session: systemd keeps its socket.
func serviceRestart(t *testing.T, m *manager) {
	m.run(t, `
sed -i 's/^drain: 5s/drain: 0s/' /etc/iser-target/config.yaml
systemctl reload iser-target.service
await logged 'configuration file was applied'`, quick)
	m.v.Run(t, loggedIn, quick)
	m.run(t, `
tsih() { iser-target session list -o json | grep '"tsih"'; }
before=$(tsih)
for n in 1 2 3; do
	systemctl restart iser-target.service
	must ActiveState active
done
logged 'sessions continue after the restart'
[ "$before" = "$(tsih)" ]
must NFileDescriptorStore 0`, quick)
	m.v.Run(t, sameData+"iscsiadm -m node --logout\n", quick)
	m.run(t, `
sed -i 's/^drain: 0s/drain: 5s/' /etc/iser-target/config.yaml
systemctl reload iser-target.service
await is StatusText 'serving: sessions 0, targets 1, LUNs 2'`, quick)
}

// serviceStop checks that systemctl stop lets the initiator log out, ends within the time of
// "drain", and without force. The initiator finds its data after the next start.
func serviceStop(t *testing.T, m *manager) {
	m.v.Run(t, loggedIn, quick)
	m.run(t, `
await is StatusText 'serving: sessions 1, targets 1, LUNs 2'
SECONDS=0
systemctl stop iser-target.service
echo "stopped in $SECONDS s"
[ $SECONDS -le 20 ] # drain: 5s, and 12 s
must ActiveState inactive
must Result success
must ExecMainStatus 0
ls -d /run/iser-target >&2 && exit 1
logged msg=stopped
! logged SIGKILL
systemctl start iser-target.service`, quick)
	m.v.Run(t, sameData+"iscsiadm -m node --logout\n", quick)
}

// serviceSocket checks that with the socket unit the port is open before the target is, and
// stays open when it dies: an initiator that connects meanwhile waits.
func serviceSocket(t *testing.T, m *manager) {
	const ls = "timeout 30 iscsi-ls iscsi://" + vm.GuestAddr + ":3260 | grep " + serviceIQN + "\n"
	m.run(t, `
systemctl stop iser-target.service
systemctl start iser-target.socket
inode() { ss -Htlne 'sport = :3260' | grep -o 'ino:[0-9]*'; }
was=$(inode)
must ActiveState inactive
`+ls+`
must ActiveState active
must NRestarts 0
systemctl kill --signal=KILL --kill-whom=main iser-target.service
`+ls+`
await is ActiveState active
logged 'code=killed, status=9/KILL'
systemctl restart iser-target.service
`+ls+`
[ "$(inode)" = "$was" ]
iser-target portal list
systemctl stop iser-target.socket iser-target.service
[ -z "$(inode)" ]
systemctl start iser-target.service
`+ls, quick)
}

// serviceWatchdog checks that systemd replaces a process that does not answer.
func serviceWatchdog(t *testing.T, m *manager) {
	m.run(t, dropIn("watchdog", "WatchdogSec=6s")+`
pid=$(show MainPID)
kill -STOP $pid
stalled() { [ "$(show MainPID)" = $pid ] || [ "$(show ActiveState)" != active ]; }
! stalled
await stalled
other() { [ "$(show MainPID)" != $pid ] && is ActiveState active; }
await other
logged 'Watchdog timeout'
iser-target target list
`+undo("watchdog"), quick)
}

// serviceDropIns checks the rows of the table in docs/service.md: what is configured works with
// the drop-in, and not without.
func serviceDropIns(t *testing.T, m *manager) {
	// Two disks, as udev would have them; the guest has no udev.
	disks := strings.Fields(m.v.Run(t, `
modprobe sd_mod
modprobe scsi_debug dev_size_mb=16 num_tgts=2 lbpu=1 lbpws=1
for ((n = 0; n < 100; n++)); do
	disks=$(ls -d /sys/bus/pseudo/drivers/scsi_debug/adapter0/host*/target*/*/block/* 2>/dev/null | sed 's,.*/,/dev/,')
	[ $(wc -w <<<"$disks") = 2 ] && break
	sleep 0.1
done
chgrp disk $disks
chmod 660 $disks
echo $disks`, quick))
	if len(disks) != 2 {
		t.Fatalf("scsi_debug has disks %q, want two", disks)
	}
	defer func() {
		if m.v.Broken() == nil {
			m.v.Run(t, m.script(t, "systemctl stop iser-target.service")+"\nrmmod scsi_debug", quick)
		}
	}()
	m.run(t, `
mkdir /srv/luns
truncate -s 8M /srv/luns/4.img
chown -R iser-target: /srv/luns
config=/etc/iser-target/config.yaml
sed -i 's,^drain:,      - {id: 2\, backend: block\, path: `+disks[0]+`}\n      - {id: 3\, backend: block\, path: `+disks[1]+`}\n      - {id: 4\, backend: file\, path: /srv/luns/4.img\, size: 8MiB}\n&,' $config
systemctl restart iser-target.service`, quick)
	// states checks the states of the LUNs 2, 3 and 4, with the reasons. One that is just
	// being opened again, which it is every second, says so where that takes long.
	states := func(want ...string) {
		t.Helper()
		var wrong []string
		for begun := time.Now(); time.Since(begun) < 20*time.Second; {
			wrong = nil
			lines := slices.Collect(strings.Lines(m.run(t, "iser-target lun list "+serviceIQN+" | tail -n 3", quick)))
			if len(lines) != len(want) {
				t.Fatalf("%d LUNs, want %d", len(lines), len(want))
			}
			for i, line := range lines {
				want := fmt.Sprintf("^%s %d %s", regexp.QuoteMeta(serviceIQN), 2+i, want[i])
				if line = strings.Join(strings.Fields(line), " "); !regexp.MustCompile(want).MatchString(line) {
					wrong = append(wrong, fmt.Sprintf("LUN %d is listed as %q, want %s", 2+i, line, want))
				}
			}
			if wrong == nil {
				return
			}
		}
		t.Error(strings.Join(wrong, "\n"))
	}
	states("not ready .*no such file", "not ready .*no such file", "not ready .*read-only file system")
	m.run(t, `
mkdir -p /etc/systemd/system/iser-target.service.d
sed 's,/dev/sdb,`+disks[0]+`,' `+vm.Files+`/packaging/systemd/block.conf >/etc/systemd/system/iser-target.service.d/block.conf
sed -i 's,^targets:,  - listen: 0.0.0.0:860\n&,' /etc/iser-target/config.yaml
`+dropIn("other", "ReadWritePaths=/srv/luns", "CapabilityBoundingSet=CAP_NET_BIND_SERVICE", "AmbientCapabilities=CAP_NET_BIND_SERVICE"), quick)
	states("ready ", "not ready .*operation not permitted", "ready ")
	m.v.Run(t, suiteOn(2, "ExtendedCopy.Simple", "Read10.DpoFua")+`
. /run/lib.sh
discover `+vm.GuestAddr+`:860
login `+vm.GuestAddr+`:860 `+serviceIQN+`
head -c 1M /dev/urandom >/run/data
dd if=/run/data of=$(disk `+serviceIQN+` 2) bs=64k oflag=direct status=none
cmp -n 1M `+disks[0]+` /run/data
blkdiscard -l 1M $(disk `+serviceIQN+` 2)
blkdiscard -z -o 1M -l 1M $(disk `+serviceIQN+` 2)
iscsiadm -m node --logout
`, quick)
}
