package interop_test

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/interop/vm"
)

const packagedIQN = "iqn.2026-11.io.github.iser-target:default"

// packages builds the packages of a version, and returns their directory's name in the guest.
func packages(t *testing.T, v *vm.VM, version, arches string) (dir string) {
	t.Helper()
	dir = "packages-" + version
	build := exec.Command("../../packaging/build.sh", filepath.Join(v.Files(), dir), version)
	build.Env = append(build.Environ(), "ARCHES="+arches)
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return vm.Files + "/" + dir
}

// The packages of "make packages" under a systemd that runs: apt and rpm install, upgrade and remove them. The program for arm64 runs in an emulator.
func TestPackages(t *testing.T) {
	if os.Getenv("ISER_TARGET_PACKAGES") != "1" {
		t.Skip("takes several minutes: make packages-test")
	}
	v := boot(t)
	need(t, "/lib/systemd/systemd", "apt-get", "rpm", "fio", "qemu-aarch64", "ansible-playbook")
	first, second := packages(t, v, "0.1.0", "amd64"), packages(t, v, "0.2.0", "amd64 arm64")
	m := startManager(t, v)
	defer v.Try(t, "set +e\niscsiadm -m node --logout\n"+forgive, quick)
	// The packages bring what the manager's other tests put into place themselves. Below that are the directories of the host, whose root file system the guest has
	// under its own. Some machines forbid that packages start services, and the index of all man pages takes minutes.
	m.run(t, `
umount /etc/iser-target /var/lib/iser-target
rm -rf /etc/iser-target /var/lib/iser-target
rm -f /usr/sbin/policy-rc.d /var/lib/man-db/auto-update
for u in service socket; do ln -s /usr/lib/systemd/system/iser-target.$u /run/units/; done`, quick)
	for _, test := range []struct {
		name string
		run  func(t *testing.T, m *manager, first, second string)
	}{
		{"deb", debPackages},
		{"rpm", rpmPackages},
		{"ansible", ansiblePackages},
	} {
		if !t.Run(test.name, func(t *testing.T) { test.run(t, m, first, second) }) {
			if v.Broken() == nil {
				m.try(t, "journalctl --no-pager -n 60 -u iser-target.service", quick)
			}
			return
		}
	}
	t.Run("image", imageForAnotherPlatform)
	t.Run("arm64", func(t *testing.T) { armPackages(t, filepath.Join(v.Files(), filepath.Base(second))) })
}

// armPackages runs the program for arm64 in an emulator, as a target and as the initiator that tests it. The target is not root's, because giving up capabilities takes an
// execution of itself, which emulators do not follow.
func armPackages(t *testing.T, built string) {
	dir, err := os.MkdirTemp("", "arm64-") // t.TempDir is for its owner
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	program, config, socket := filepath.Join(dir, "iser-target"), filepath.Join(dir, "config.yaml"), filepath.Join(dir, "control.sock")
	content, err := os.ReadFile(filepath.Join(built, "iser-target-linux-arm64"))
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	text := fmt.Sprintf("portals: [{listen: %q}]\ntargets: [{name: %s, initiators: [\"*\"]}]\nstate_dir: \"\"\ncontrol: {socket: %s}\n", l.Addr(), packagedIQN, socket)
	if err := errors.Join(os.WriteFile(program, content, 0o755), os.WriteFile(config, []byte(text), 0o600), os.Chmod(dir, 0o755)); err != nil {
		t.Fatal(err)
	}
	emulate := func(args ...string) *exec.Cmd {
		cmd := exec.CommandContext(t.Context(), "qemu-aarch64", append([]string{program}, args...)...)
		cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "ISER_TARGET_") }) // those of tests
		return cmd
	}
	if out, err := emulate("version").CombinedOutput(); err != nil || !strings.Contains(string(out), "0.2.0") {
		t.Errorf("version: %v\n%s", err, out)
	}
	var log bytes.Buffer
	serve := emulate("serve", "--config", config)
	serve.Stdout, serve.Stderr = &log, &log
	if os.Getuid() == 0 {
		const nobody = 65534
		serve.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
		if err := errors.Join(os.Chown(dir, nobody, nobody), os.Chown(config, nobody, nobody)); err != nil {
			t.Fatal(err)
		}
	}
	if err := serve.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- serve.Wait() }()
	defer func() {
		serve.Process.Signal(syscall.SIGTERM)
		if err := <-ended; err != nil || t.Failed() {
			t.Errorf("serve: %v\n%s", err, log.String())
		}
	}()
	for begun := time.Now(); emulate("session", "list", "--socket", socket).Run() != nil; {
		select {
		case err := <-ended:
			ended <- err
			t.Fatal("the target has ended")
		case <-time.After(100 * time.Millisecond):
		}
		if time.Since(begun) > time.Minute {
			t.Fatal("no target answers after a minute")
		}
	}
	out, err := emulate("selftest", "--socket", socket).CombinedOutput()
	if err != nil {
		t.Errorf("selftest: %v\n%s", err, out)
	}
	t.Logf("%s", out)
	for name, want := range map[string]string{"iser-target_0.2.0-1_arm64.deb": "arm64\n", "iser-target-0.2.0-1.aarch64.rpm": "aarch64"} {
		ask := exec.CommandContext(t.Context(), "dpkg-deb", "-f", name, "Architecture")
		if strings.HasSuffix(name, ".rpm") {
			ask = exec.CommandContext(t.Context(), "rpm", "-qp", "--qf", "%{ARCH}", name)
		}
		ask.Dir = built
		if out, err := ask.Output(); err != nil || string(out) != want {
			t.Errorf("%s is for %q, %v", name, out, err)
		}
	}
}

// packagesLib is what both formats need. apt knows no other packages than those that are installed.
const packagesLib = sinceMark + `
apt() { apt-get -qq -y -o APT::Sandbox::User=root -o Dir::State::lists=/run/lists -o Dpkg::Use-Pty=0 "$@" </dev/null >&2; }
mkdir -p /run/lists/partial
tsih() { iser-target session list -o json | grep '"tsih"'; }
`

// admit opens the target to iSER: rdma_cm of Linux does not resolve 127.0.0.1. packaged logs in, and begins I/O that fio verifies; verified ends it.
const (
	admit    = "\niser-target portal add " + vm.GuestAddr + ":3260\n"
	packaged = `
. /run/lib.sh
discover ` + vm.GuestAddr + `:3260
login ` + vm.GuestAddr + `:3260 ` + packagedIQN + `
disk ` + packagedIQN + ` 0 >/run/disk
rm -f /run/fio.*
touch /run/fio.go
(
	status=0
	while [ -e /run/fio.go ] && [ $status = 0 ]; do
		fio --ioengine=libaio --direct=1 --filename=$(cat /run/disk) --iodepth=8 --rw=randrw --bs=16k --size=1m --rate_iops=50 \
			--verify=crc32c --verify_fatal=1 --randrepeat=0 --name=packaged >>/run/fio.out 2>&1 || status=$?
	done
	echo $status >/run/fio.status
) </dev/null >/run/fio.log 2>&1 &
`
	verified = `
rm /run/fio.go
for ((n = 0; n < 600; n++)); do
	[ -e /run/fio.status ] && break
	sleep 0.1
done
[ $(cat /run/fio.status) = 0 ] || { cat /run/fio.out >&2; exit 1; }
iscsiadm -m node --logout
`
)

// apart is how long apt and dpkg may take under emulation, next to fio.
const apart = 10 * time.Minute

func debPackages(t *testing.T, m *manager, first, second string) {
	m.run(t, packagesLib+`
apt install `+first+`/iser-target_0.1.0-1_amd64.deb
must ActiveState active
systemctl is-enabled iser-target.service
iser-target version | grep 0.1.0
stat -c '%a %U:%G %n' /etc/iser-target /etc/iser-target/config.yaml /var/lib/iser-target >/run/modes
diff - /run/modes <<'.'
750 iser-target:iser-target /etc/iser-target
600 iser-target:iser-target /etc/iser-target/config.yaml
700 iser-target:iser-target /var/lib/iser-target
.
for f in man/man1/iser-target-lun-create.1.gz man/man5/iser-target.yaml.5.gz man/man8/iser-target.8.gz bash-completion/completions/iser-target iser-target/config.schema.json doc/iser-target/examples/chap.yaml; do test -s /usr/share/$f; done
gzip -dc /usr/share/man/man1/iser-target.1.gz | grep -q '^\.TH'
bash -n /usr/share/bash-completion/completions/iser-target`+admit, apart)
	m.v.Run(t, packaged, quick)
	// The program has changed its configuration, about which dpkg must not ask.
	m.run(t, packagesLib+`
iser-target lun create --id 1 --path /var/lib/iser-target/1.img --size 8MiB
before=$(tsih)
mark
apt install `+second+`/iser-target_0.2.0-1_amd64.deb
must ActiveState active
must NRestarts 0
orderly 'msg="sessions continue after the restart"'
[ "$before" = "$(tsih)" ]
iser-target lun show 1
/proc/$(show MainPID)/exe version | grep 0.2.0`, apart)
	m.v.Run(t, verified, apart)
	m.run(t, packagesLib+`
systemctl disable --now iser-target.service
dpkg -i `+first+`/iser-target_0.1.0-1_amd64.deb >&2
must ActiveState inactive
! systemctl is-enabled iser-target.service
systemctl enable --now iser-target.service`, apart)
	m.run(t, packagesLib+`
dpkg -r iser-target >&2
! pgrep -x iser-target
test ! -e /usr/bin/iser-target
# It comes back with its configuration. If that is wrong, the installation says so, and does not fail.
cp -p /etc/iser-target/config.yaml /run/config.was
echo 'bogus: 1' >>/etc/iser-target/config.yaml
dpkg -i `+second+`/iser-target_0.2.0-1_amd64.deb 2>/run/messages >&2
cat /run/messages >&2
grep 'the service does not start: run journalctl' /run/messages
cp -p /run/config.was /etc/iser-target/config.yaml
systemctl restart iser-target.service
must ActiveState active
iser-target lun show 1`, apart)
	m.run(t, `
dpkg -P iser-target >&2
! pgrep -x iser-target
# Data that nobody asked to delete stays.
test -s /var/lib/iser-target/1.img
find /etc /usr /var/lib -xdev -name '*iser-target*' ! -path /var/lib/iser-target >/run/left
diff /dev/null /run/left
rm -r /var/lib/iser-target`, apart)
}

func rpmPackages(t *testing.T, m *manager, first, second string) {
	m.run(t, packagesLib+`
rpm -i --nodeps `+first+`/iser-target-0.1.0-1.x86_64.rpm >&2
must ActiveState inactive
systemctl start iser-target.service
must ActiveState active
iser-target version | grep 0.1.0
stat -c '%a %U:%G' /etc/iser-target/config.yaml | grep -x '600 iser-target:iser-target'
rpm -V --nodeps iser-target`+admit, apart)
	m.v.Run(t, packaged, quick)
	m.run(t, packagesLib+`
before=$(tsih)
mark
rpm -U --nodeps `+second+`/iser-target-0.2.0-1.x86_64.rpm >&2
must ActiveState active
orderly 'msg="sessions continue after the restart"'
[ "$before" = "$(tsih)" ]
/proc/$(show MainPID)/exe version | grep 0.2.0`, apart)
	m.v.Run(t, verified, apart)
	m.run(t, packagesLib+`
rpm -e iser-target >&2
! pgrep -x iser-target
test ! -e /usr/bin/iser-target
test -s /etc/iser-target/config.yaml
rm -r /etc/iser-target /var/lib/iser-target`, apart)
}

// ansiblePackages runs the role of packaging/ansible on the machine itself: from nothing, again, with a change, and with a mistake.
func ansiblePackages(t *testing.T, m *manager, first, _ string) {
	role, err := filepath.Abs("../../packaging/ansible/roles")
	if err != nil {
		t.Fatal(err)
	}
	const lib = ". /run/play.sh\n"
	m.run(t, packagesLib+`
cat >/run/site.yaml <<'.'
- hosts: all
  gather_facts: false
  become: true
  roles:
    - role: iser_target
      vars:
        iser_target_package: `+first+`/iser-target_0.1.0-1_amd64.deb
        iser_target_secrets: {host1: 0123456789abcdef0123456789abcdef}
        iser_target_unit: ReadWritePaths=/srv
        iser_target_config:
          portals: [{listen: "127.0.0.1:3260"}]
          targets:
            - name: iqn.2026-11.io.example:store
              initiators: ["*"]
              auth: {method: chap, users: [{name: host1, secret_file: /etc/iser-target/host1.secret}]}
              luns:
                - {id: 0, backend: file, path: /srv/0.img, size: 8MiB}
.
cat >/run/play.sh <<'.'
# play runs the role; played is the same, and says what is wrong.
play() {
	ANSIBLE_ROLES_PATH=`+role+` ANSIBLE_HOME=/run/ansible ANSIBLE_LOCAL_TEMP=/run/ansible ANSIBLE_REMOTE_TEMP=/run/ansible LC_ALL=C.UTF-8 \
		ansible-playbook -i localhost, -c local -e ansible_python_interpreter=/usr/bin/python3 /run/site.yaml >/run/play.out 2>&1
}
played() { play || { cat /run/play.out >&2; return 1; }; }
.
chmod 1777 /srv
`+lib+`played
must ActiveState active
systemctl is-enabled iser-target.service
iser-target lun show 0 >&2
stat -c '%a %U' /etc/iser-target/host1.secret /etc/iser-target/config.yaml | sort -u | grep -x '600 iser-target'
show MainPID >/run/was`, apart)
	m.run(t, lib+`
played
grep changed=0 /run/play.out >&2 || { cat /run/play.out >&2; exit 1; }`, apart)
	m.run(t, lib+`
echo '                - {id: 1, backend: memory, size: 8MiB}' >>/run/site.yaml
played
iser-target lun show 1 >&2
must MainPID $(cat /run/was)`, apart)
	m.run(t, lib+`
cp -p /etc/iser-target/config.yaml /run/config.was
sed -i 's/size: 8MiB}$/size: 8MiB, colour: red}/' /run/site.yaml
! play
grep 'colour: unknown key' /run/play.out >&2
cmp /run/config.was /etc/iser-target/config.yaml
must MainPID $(cat /run/was)
dpkg -P iser-target >&2
rm -rf /var/lib/iser-target`, apart)
}
