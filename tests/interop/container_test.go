package interop_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/tests/conformance/cu"
	"github.com/iser-target/iser-target/tests/interop/vm"
)

type object = map[string]any

// A mount of a container.
type mount struct {
	Destination string   `json:"destination"`
	Type        string   `json:"type"`
	Source      string   `json:"source"`
	Options     []string `json:"options"`
}

// ociMounts are those that engines make for every container.
var ociMounts = []mount{
	{"/proc", "proc", "proc", []string{"nosuid", "noexec", "nodev"}},
	{"/dev", "tmpfs", "tmpfs", []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
	{"/dev/pts", "devpts", "devpts", []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620",
		"gid=5"}},
	{"/dev/shm", "tmpfs", "shm", []string{"nosuid", "noexec", "nodev", "mode=1777", "size=65536k"}},
	{"/dev/mqueue", "mqueue", "mqueue", []string{"nosuid", "noexec", "nodev"}},
	{"/sys", "sysfs", "sysfs", []string{"nosuid", "noexec", "nodev", "ro"}},
	{"/sys/fs/cgroup", "cgroup", "cgroup", []string{"ro", "nosuid", "noexec", "nodev"}},
}

// bundle returns config.json of the OCI's runtime specification, as an engine builds it from an
// image and the options of "docker run". dirs maps paths in the container to the directories of
// the guest that are mounted there.
func (m *image) bundle(t *testing.T, options []string, dirs map[string]string, seccomp any) object {
	t.Helper()
	bad := func(args ...any) {
		t.Helper()
		t.Fatalf("docs/service.md: docker run: %s", fmt.Sprint(args...))
	}
	var readonly, noNewPrivileges, noCapabilities bool
	mounts, mounted := slices.Clone(ociMounts), make(map[string]bool)
	for i := 0; i < len(options); i++ {
		o := options[i]
		if o == "--read-only" {
			readonly = true
			continue
		}
		if i++; i == len(options) {
			bad(o, " has no value")
		}
		switch v := options[i]; o {
		case "--cap-drop":
			noCapabilities = v == "ALL"
		case "--security-opt":
			noNewPrivileges = v == "no-new-privileges"
		case "-p":
			if !slices.Contains(m.ports, v[strings.LastIndex(v, ":")+1:]) {
				bad("-p ", v, ": the image does not expose it")
			}
		case "-v":
			parts := strings.Split(v, ":")
			if len(parts) < 2 || dirs[parts[1]] == "" {
				bad("-v ", v, ": nothing is to be there")
			}
			mounted[parts[1]] = true
			mounts = append(mounts, mount{parts[1], "bind", dirs[parts[1]],
				append([]string{"rbind", "rprivate"}, parts[2:]...)})
		default:
			bad(o, " is not known to the test")
		}
	}
	for _, v := range m.volumes {
		if !mounted[v] {
			bad("the volume ", v, " of the image has no -v")
		}
	}
	if !readonly || !noNewPrivileges || !noCapabilities || len(mounted) != len(dirs) {
		bad("the options do not say what the text does: ", options)
	}
	uid, gid, _ := strings.Cut(m.user, ":")
	u, err1 := strconv.Atoi(uid)
	g, err2 := strconv.Atoi(gid)
	if err1 != nil || err2 != nil || u == 0 || g == 0 {
		t.Fatalf("Dockerfile: USER %s, want two numbers that are not 0", m.user)
	}
	none := []string{}
	return object{
		"ociVersion": "1.0.2",
		"process": object{
			"user": object{"uid": u, "gid": g},
			"args": slices.Concat(m.entrypoint, m.cmd),
			"env": append([]string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
				m.env...),
			"cwd": "/",
			"capabilities": object{"bounding": none, "effective": none, "inheritable": none, "permitted": none,
				"ambient": none},
			"noNewPrivileges": noNewPrivileges,
		},
		"root":   object{"path": "rootfs", "readonly": readonly},
		"mounts": mounts,
		"linux": object{
			"namespaces": []object{
				{"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}, {"type": "cgroup"},
				{"type": "network", "path": "/run/netns/box"},
			},
			"resources": object{"devices": []object{{"allow": false, "access": "rwm"}}},
			"seccomp":   seccomp,
			"maskedPaths": []string{"/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/sched_debug",
				"/proc/scsi", "/sys/firmware"},
			"readonlyPaths": []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"},
		},
	}
}

// defaultSeccomp returns the filter that engines set by default, for a process without
// capabilities, in the form of the runtime specification.
func defaultSeccomp(t *testing.T, v *vm.VM) any {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(v.Machine(), "seccomp.json"))
	if err != nil {
		t.Fatal(err)
	}
	type condition struct {
		Arches []string `json:"arches"`
		Caps   []string `json:"caps"`
	}
	type rule struct {
		Names    []string   `json:"names"`
		Action   string     `json:"action"`
		ErrnoRet *int       `json:"errnoRet,omitempty"`
		Args     []object   `json:"args,omitempty"`
		Includes *condition `json:"includes,omitempty"` // when the rule is one; not of the specification
		Excludes *condition `json:"excludes,omitempty"` // when it is not; by capabilities only
	}
	var p struct {
		DefaultAction   string   `json:"defaultAction"`
		DefaultErrnoRet *int     `json:"defaultErrnoRet,omitempty"`
		Architectures   []string `json:"architectures"`
		Syscalls        []rule   `json:"syscalls"`
	}
	if err := json.Unmarshal(b, &p); err != nil {
		t.Fatal(err)
	}
	p.Architectures = []string{"SCMP_ARCH_X86_64"}
	var rules []rule
	for _, r := range p.Syscalls {
		if in := r.Includes; in != nil && (len(in.Caps) > 0 || len(in.Arches) > 0 &&
			!slices.Contains(in.Arches, "amd64")) {
			continue
		}
		if r.Excludes != nil && len(r.Excludes.Arches) > 0 {
			t.Fatalf("seccomp.json: %v: the test does not know such exceptions", r)
		}
		r.Includes, r.Excludes = nil, nil
		rules = append(rules, r)
	}
	if len(rules) == 0 || p.DefaultAction != "SCMP_ACT_ERRNO" {
		t.Fatalf("seccomp.json lets everything pass: %s", b)
	}
	p.Syscalls = rules
	return p
}

// A containerBox is a container in the guest, made from the image of the Dockerfile.
type containerBox struct {
	v *vm.VM
	m *image
}

// Library of the scripts of containerBox: the functions start, await and box.
const boxLib = ". /run/box/lib.sh\n"

const boxVersion = "1.2.3-container"

// The image of the Dockerfile, run by crun as docs/service.md says: without privileges, with
// a root file system that is read-only and the filter of system calls that engines set. The
// port is forwarded by a process, as engines do on the loopback.
func TestContainer(t *testing.T) {
	v := boot(t)
	need(t, "crun", "/lib/systemd/systemd-socket-proxyd", "iscsi-ls", "iscsi-perf", cu.Program)
	out := filepath.Join(v.Files(), "out")
	if err := os.Mkdir(out, 0o755); err != nil {
		t.Fatal(err)
	}
	b := containerBox{v, buildImage(t, out, map[string]string{"VERSION": boxVersion})}
	b.writeBundles(t)
	b.removeAtEnd(t)
	b.make(t)

	t.Run("image", b.hasOnlyTheTarget)
	t.Run("read-only and without privileges", b.runsWithoutPrivileges)
	t.Run("nat.yaml", b.hidesItsAddress)
	t.Run("SIGTERM", b.endsGently)
	t.Run("second SIGTERM", b.endsAtOnce)
}

// writeBundles writes the configurations of the container to files that the guest sees.
func (b containerBox) writeBundles(t *testing.T) {
	t.Helper()
	// docker run OPTIONS iser-target
	words := strings.Fields(strings.ReplaceAll(block(t, "../../docs/service.md", "### Running the image"), "\\\n", " "))
	if len(words) < 3 || words[0] != "docker" || words[1] != "run" || words[len(words)-1] != "iser-target" {
		t.Fatalf("docs/service.md: %q, want docker run ... iser-target", words)
	}
	dirs := map[string]string{"/var/lib/iser-target": "/run/box/volume", "/etc/iser-target": "/run/box/config"}
	filter := defaultSeccomp(t, b.v)
	options := words[2 : len(words)-1]
	writeJSON(t, b.v, "config.json", b.m.bundle(t, options, dirs, filter))
	// With a configuration that changes are written to.
	writable := strings.ReplaceAll(strings.Join(options, " "), ":/etc/iser-target:ro", ":/etc/iser-target")
	writeJSON(t, b.v, "writable.json", b.m.bundle(t, strings.Fields(writable), dirs, filter))
	nat, err := os.ReadFile("../../examples/nat.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(b.v.Files(), "nat.yaml"), nat, 0o644); err != nil {
		t.Fatal(err)
	}
}

// removeAtEnd removes what make makes when the test ends.
func (b containerBox) removeAtEnd(t *testing.T) {
	t.Helper()
	t.Cleanup(func() {
		if b.v.Broken() == nil {
			b.v.Try(t, `
set +e
iscsiadm -m node --logout
pkill -KILL iscsi-perf
crun delete --force box
pkill -x systemd-socket-
ip link del box0
ip netns del box
ip addr del 203.0.113.7/32 dev eth0
`+forgive, quick)
		}
	})
}

// make unpacks the image, makes its volume and its network, and writes boxLib.
func (b containerBox) make(t *testing.T) {
	t.Helper()
	root := ""
	for _, f := range b.m.files {
		root += fmt.Sprintf("mkdir -p $(dirname rootfs%s)\ncp -r %s/out/%s rootfs%[1]s\nchown -R %[4]s rootfs%[1]s\n",
			f.to, vm.Files, f.from, f.owner)
	}
	b.v.Run(t, cgroups+`
mkdir -p /run/box/config
cd /run/box
`+root+`
# A new volume gets what the image has at its place.
cp -a rootfs/var/lib/iser-target volume
ip netns add box
modprobe veth
ip link add box0 type veth peer name eth0 netns box
ip addr add 10.88.0.1/24 dev box0
ip link set box0 up
ip -n box addr add 10.88.0.2/24 dev eth0
ip -n box link set eth0 up
ip -n box link set lo up
ip addr add 203.0.113.7/32 dev eth0
systemd-socket-activate -l 203.0.113.7:13260 /lib/systemd/systemd-socket-proxyd 10.88.0.2:3260 </dev/null >/run/box/proxy.log 2>&1 &
cat >/run/box/lib.sh <<'.'
# start FILE runs the container with a config.json.
start() {
	cp `+vm.Files+`/$1 /run/box/config.json
	cd /run/box
	rm -f status
	(
		status=0
		crun --cgroup-manager=cgroupfs run box </dev/null >/run/box/log 2>&1 || status=$?
		echo $status >/run/box/status
	) >/dev/null 2>&1 &
	await grep -qE 'msg"?[=:]"?serving' log
}
# await COMMAND... waits until it succeeds.
await() {
	local end=$((SECONDS + 30))
	until "$@"; do
		if [ $SECONDS -ge $end ]; then
			echo "not within 30 s: $*" >&2
			cat /run/box/log >&2
			return 1
		fi
		sleep 0.1
	done
}
box() { crun exec --user `+b.m.user+` box `+b.m.entrypoint[0]+` "$@"; }
.
`, quick)
}

// hasOnlyTheTarget checks that the image has nothing but the program, the CA certificates and its volume.
func (b containerBox) hasOnlyTheTarget(t *testing.T) {
	got := b.v.Run(t, "cd /run/box/rootfs; find . -mindepth 1 -printf '%y %U:%G /%P\n' | sort", quick)
	const want = `d 0:0 /etc
d 0:0 /etc/ssl
d 0:0 /etc/ssl/certs
d 0:0 /var
d 0:0 /var/lib
d 65532:65532 /var/lib/iser-target
f 0:0 /etc/ssl/certs/ca-certificates.crt
f 0:0 /iser-target
`
	if got != want {
		t.Errorf("the image has\n%swant\n%s", got, want)
	}
}

// runsWithoutPrivileges checks what the kernel says of the process.
func (b containerBox) runsWithoutPrivileges(t *testing.T) {
	got := b.v.Run(t, boxLib+`
cp `+vm.Files+`/nat.yaml /run/box/config/config.yaml
start config.json
pid=$(crun state box | sed -nE 's/.*"pid": *([0-9]+).*/\1/p')
sed -nE 's/^(Uid|Gid|Groups|CapEff|CapPrm|CapBnd|CapAmb|NoNewPrivs|Seccomp):\s*/\1 /p' /proc/$pid/status | tr '\t' ' ' | sed 's/ *$//'
for d in / /etc /etc/iser-target /var /var/lib /sys /proc /var/lib/iser-target; do
	if touch /proc/$pid/root$d/probe 2>/dev/null; then
		echo "writes $d"
		rm /proc/$pid/root$d/probe
	fi
done
`+"timeout "+b.m.patience+" crun exec --user "+b.m.user+" box "+strings.Join(b.m.healthcheck, " ")+` >&2
echo healthy
box version
box lun list >&2
`, quick)
	none := strings.Repeat("0", 16)
	want := strings.Join([]string{
		"Uid 65532 65532 65532 65532", "Gid 65532 65532 65532 65532", "Groups",
		"CapPrm " + none, "CapEff " + none, "CapBnd " + none, "CapAmb " + none, "NoNewPrivs 1", "Seccomp 2",
		"writes /var/lib/iser-target", "healthy", "iser-target " + boxVersion,
	}, "\n")
	if got = strings.TrimSpace(got); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// hidesItsAddress uses examples/nat.yaml as it is: initiators never see the address that the target has.
func (b containerBox) hidesItsAddress(t *testing.T) {
	const url, as = "iscsi://203.0.113.7:13260", "iqn.1993-08.org.debian:01:box"
	args := cu.Of("ExtendedCopy.Simple").Args(url + "/iqn.2026-11.io.example:nat/0")
	got := b.v.Run(t, boxLib+`
timeout 30 iscsi-ls -i `+as+` `+url+`
timeout 60 `+cu.Program+` -i `+as+` `+strings.Join(args, " ")+` </dev/null >/run/suite 2>&1 || { cat /run/suite >&2; exit 1; }
. /run/lib.sh
iscsiadm -m iface -I nat -o new
iscsiadm -m iface -I nat -o update -n iface.transport_name -v iser
iscsiadm -m iface -I nat -o update -n iface.initiatorname -v `+as+`
heard iscsiadm -m discovery -t sendtargets -p 203.0.113.7:13260 -I nat
iscsiadm -m node -T iqn.2026-11.io.example:nat -p 203.0.113.7:13260 -I nat --login >&2
iscsiadm -m session
disk iqn.2026-11.io.example:nat 0 >/run/disk
head -c 1M /dev/urandom >/run/data
dd if=/run/data of=$(cat /run/disk) bs=64k oflag=direct status=none
`+sameData, quick)
	for _, want := range []string{"Portal:203.0.113.7:13260,1", "203.0.113.7:13260,1 iqn.2026-11.io.example:nat",
		"[2001:db8::7]:3260,1 iqn.2026-11.io.example:nat", "iser: ["} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q", want)
		}
	}
	if strings.Contains(got, "10.88.0.2") {
		t.Error("discovery tells of the container's own address")
	}
}

// endsGently checks that SIGTERM ends the container and that its data stays on the volume.
func (b containerBox) endsGently(t *testing.T) {
	b.v.Run(t, boxLib+`
SECONDS=0
crun kill box TERM
await test -e /run/box/status
[ $SECONDS -le 25 ]
tail -n 1 /run/box/log | grep '"msg":"stopped"'
[ $(cat /run/box/status) = 0 ]
start config.json # what was written is on the volume
`+sameData+`
iscsiadm -m node --logout
crun kill box TERM
await test -e /run/box/status
[ $(cat /run/box/status) = 0 ]
`, quick)
}

// endsAtOnce checks that a second SIGTERM ends the target as if it had died of the signal, which the
// kernel keeps the first process of a namespace from.
func (b containerBox) endsAtOnce(t *testing.T) {
	b.v.Run(t, boxLib+`
cd /run/box
sed 's,^portals:,drain: 10m\n&,' `+vm.Files+`/nat.yaml | sed 's,initiators:.*,initiators: ["*"],' >config/config.yaml
chown -R 65532:65532 config
start writable.json
box lun create iqn.2026-11.io.example:nat --id 1 --path /var/lib/iser-target/1.img --size 8MiB
grep 1.img config/config.yaml
iscsi-perf iscsi://203.0.113.7:13260/iqn.2026-11.io.example:nat/1 </dev/null >/run/box/perf 2>&1 &
await sh -c 'crun exec --user `+b.m.user+` box /iser-target session list | grep iqn'
kill -STOP $! # it does not log out
crun kill box TERM
await grep -q 'shutting down' log
sleep 1
[ ! -e status ]
crun kill box TERM
await test -e status
echo "status $(cat status)"
[ $(cat status) = 143 ]
kill -KILL $!
`, quick)
}

// writeJSON writes a document to a file that the guest sees.
func writeJSON(t *testing.T, v *vm.VM, name string, doc any) {
	t.Helper()
	b, err := json.MarshalIndent(doc, "", "\t")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(v.Files(), name), b, 0o644); err != nil {
		t.Fatal(err)
	}
}
