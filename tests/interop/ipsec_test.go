package interop_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/interop/harness"
	"github.com/iser-target/iser-target/tests/interop/vm"
)

const (
	ipsecPage = "../../docs/ipsec.md"
	storeIQN  = "iqn.2026-11.io.example:store" // of the page
)

// pageBlocks returns the fenced blocks of docs/ipsec.md below a heading, in a language, one after another.
func pageBlocks(t *testing.T, heading, language string) string {
	t.Helper()
	return blocksOf(t, ipsecPage, heading, language)
}

// blocksOf does the same for any page.
func blocksOf(t *testing.T, page, heading, language string) string {
	t.Helper()
	b, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	_, text, ok := strings.Cut(string(b), "\n## "+heading+"\n")
	if !ok {
		t.Fatalf("%s has no heading %q", page, heading)
	}
	text, _, _ = strings.Cut(text, "\n## ")
	var blocks strings.Builder
	for _, m := range regexp.MustCompile("(?ms)^( *)```"+language+"\n(.*?)^ *```$").FindAllStringSubmatch(text, -1) {
		for line := range strings.Lines(m[2]) {
			blocks.WriteString(strings.TrimPrefix(line, m[1]))
		}
	}
	if blocks.Len() == 0 {
		t.Fatalf("%s has no block of %s below %q", page, language, heading)
	}
	return blocks.String()
}

// ipsecUp makes the machine of the target and the wire: network namespaces. The guest itself is the initiator, because the kernel's
// initiators work only in its first namespace. On the bridge between them packets are as a stranger sees them. The target has
// /etc/swanctl, /run and some more for itself.
//
// /run/ipsec.sh has on COMMAND..., which runs a command on the target, and await COMMAND....
const ipsecUp = `
modprobe -a bridge veth iscsi_tcp esp4 esp6 xfrm_user
ip netns add target
ip netns add wire
ip link add ipsec0 type veth peer name wire-i netns wire
ip -n target link add ipsec0 type veth peer name wire-t netns wire
ip -n wire link add wire type bridge
for l in wire-i wire-t; do
	ip -n wire link set dev $l master wire
	ip -n wire link set dev $l up
done
ip -n wire link set dev wire up
ip addr add 192.0.2.1/24 dev ipsec0
ip addr add 192.0.2.3/24 dev ipsec0
ip link set ipsec0 up
ip -n target link set lo up
ip -n target addr add 192.0.2.2/24 dev ipsec0
ip -n target link set ipsec0 up
rdma link add siw1 type siw netdev ipsec0
mkdir -p /run/ns /run/target /etc/swanctl/conf.d
mount --bind /run/ns /run/ns
mount --make-private /run/ns
touch /run/ns/target
unshare --mount=/run/ns/target true
cat >/run/ipsec.sh <<'.'
on() { nsenter --mount=/run/ns/target --net=/run/netns/target "$@"; }
await() {
	local end=$((SECONDS + 90))
	until "$@"; do
		if [ $SECONDS -ge $end ]; then
			echo "in vain: $*" >&2
			return 1
		fi
		sleep 0.2
	done
}
# What a page runs on either machine. There is no systemd that could start services.
systemctl() {
	case "$*" in
	"enable --now strongswan")
		charon-systemd </dev/null >/run/charon.log 2>&1 &
		await test -S /run/charon.vici
		;;
	"restart strongswan iser-target")
		/run/share/iser-target serve --config /etc/iser-target/config.yaml </dev/null >/run/iser-target.log 2>&1 &
		await serves $!
		;;
	daemon-reload) ;;
	*) echo "not known: systemctl $*" >&2; return 1 ;;
	esac
}
serves() {
	! grep -q 'msg=serving.*192.0.2.2:3261' /run/iser-target.log || return 0
	[ -e /proc/$1 ] || { cat /run/iser-target.log >&2; exit 1; }
	return 1
}
# stranger SECONDS connects from the address 192.0.2.3, for which there are no policies.
stranger() {
	local status=0
	ip route add 192.0.2.2/32 dev ipsec0 src 192.0.2.3
	busybox nc -w $1 192.0.2.2 3260 </dev/null >&2 || status=$?
	ip route del 192.0.2.2/32 dev ipsec0
	return $status
}
scp() { nsenter --mount=/run/ns/target cat "${1#*:}" >"$2/${1##*/}"; }
cd /run/share
.
. /run/ipsec.sh
on bash -euo pipefail -c '
mount -t tmpfs tmpfs /run/target
mkdir /run/target/share /run/target/lock
mount --bind /run/share /run/target/share
cp /run/ipsec.sh /run/target/
mount -n --move /run/target /run
for d in /etc/swanctl /etc/iser-target /var/lib/iser-target /etc/systemd/system; do
	mkdir -p $d
	mount -t tmpfs -o mode=755 tmpfs $d
done
mkdir /etc/swanctl/conf.d
echo "include conf.d/*.conf" >/etc/swanctl/swanctl.conf'
echo "include conf.d/*.conf" >/etc/swanctl/swanctl.conf
`

// ipsecDown removes all that ipsecUp and the tests have made.
const ipsecDown = `
. /run/ipsec.sh
rm -f /run/fio.go
iscsiadm -m session -u || true
for name in fio tcpdump iser-target charon-systemd; do
	pkill -x $name || true
	for ((n = 0; n < 100; n++)); do
		pgrep -x $name >/dev/null || break
		sleep 0.2
	done
done
ip xfrm state flush
ip xfrm policy flush
umount /run/ns/target /run/ns || true
ip netns del target || true
ip netns del wire || true
ip link del ipsec0 2>/dev/null || true
rm -rf /etc/swanctl/conf.d/* /run/charon.vici
` + forgive

// onTarget returns the script that runs body on the target.
func onTarget(t *testing.T, v *vm.VM, body string) string {
	t.Helper()
	const name = "target-script"
	if err := os.WriteFile(filepath.Join(v.Files(), name), []byte(". /run/ipsec.sh\n"+body), 0o600); err != nil {
		t.Fatal(err)
	}
	return ". /run/ipsec.sh\non bash -euo pipefail " + vm.Files + "/" + name + "\n"
}

// capture begins a capture on the wire, and captured prints what is neither ESP, IKE nor ARP, except packets of IPv6, which nothing
// uses, and the portal without IPsec.
const (
	capture = `
ip netns exec wire tcpdump -n -i wire-i -U -w /run/wire.pcap </dev/null >/run/tcpdump.log 2>&1 &
await grep -q listening /run/tcpdump.log
`
	captured = `
sleep 1 # tcpdump is behind
tcpdump -n -r /run/wire.pcap 'esp' | awk 'END { print NR " packets of ESP" }' >&2
tcpdump -n -r /run/wire.pcap 'not esp and not udp port 500 and not udp port 4500 and not arp and not ip6 and not tcp port 3261 and not src host 192.0.2.3'
`
)

// ipsecLoad adds functions for sessions and fio to /run/ipsec.sh.
const ipsecLoad = `
cat >>/run/ipsec.sh <<'.'
# device TRANSPORT PORT prints the disk of a session.
device() {
	local s c block
	for s in /sys/class/iscsi_session/session*; do
		c=/sys/class/iscsi_connection/connection${s##*session}:0
		[ "$(<$c/persistent_port)" = $2 ] || continue
		grep -q "$1" $(readlink -f $s/device/..)/scsi_host/host*/proc_name || continue
		for block in $s/device/target*/*:0/block/*; do
			[ -e $block/size ] && echo /dev/${block##*/} && return
		done
	done
	return 1
}
# load NAME DEVICE OFFSET runs fio with verification until load_ends.
load() {
	touch /run/fio.go
	(
		status=0
		while [ -e /run/fio.go ] && [ $status = 0 ]; do
			fio --ioengine=libaio --direct=1 --filename=$2 --offset=$3 --iodepth=4 --rw=randrw --bs=4k --size=128k \
				--verify=crc32c --verify_fatal=1 --randrepeat=0 --output-format=terse --terse-version=3 --name=$1 || status=$?
			echo round >>/run/fio.rounds.$1
		done
		echo $status >/run/fio.status.$1
	) </dev/null >/run/fio.log.$1 2>&1 &
}
rounds() { [ "$(wc -l </run/fio.rounds.$1)" -ge $2 ]; }
# load_ends NAME... expects that fio has found nothing wrong.
load_ends() {
	rm -f /run/fio.go
	local name
	for name; do
		await test -s /run/fio.status.$name
		cat /run/fio.log.$name >&2
		[ $(</run/fio.status.$name) = 0 ]
	done
	rm -f /run/fio.*
}
.
`

// The page docs/ipsec.md, followed word for word on two machines: its commands, its configuration and the files of packaging/ipsec.
// Then what it says of what happens.
func TestIPsec(t *testing.T) {
	v := boot(t)
	need(t, "charon-systemd", "swanctl", "nft", "tcpdump", "fio", "busybox", "nsenter")
	copyTo := func(name, from string) {
		t.Helper()
		b, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		to := filepath.Join(v.Files(), name)
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(to, b, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	harness.Copy(t, filepath.Join(v.Files(), "iser-target"))
	files, err := filepath.Glob("../../packaging/ipsec/*")
	if err != nil || len(files) == 0 {
		t.Fatalf("packaging/ipsec: %v, %v", files, err)
	}
	for _, name := range files {
		copyTo("packaging/ipsec/"+filepath.Base(name), name)
	}
	// What the test adds to the page's configuration: a portal without IPsec, and where the command line finds the target.
	config := pageBlocks(t, "On the target", "yaml")
	config = strings.Replace(config, "targets:\n", "  - listen: 192.0.2.2:3261\n    tpgt: 2\ntargets:\n", 1) +
		"state_dir: /var/lib/iser-target\ncontrol: {socket: /run/iser-target.sock}\n"
	if err := os.WriteFile(filepath.Join(v.Files(), "config.yaml"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() && v.Broken() == nil {
			v.Try(t, ". /run/ipsec.sh\non tail -n 40 /run/iser-target.log >&2 || true\ntail -n 20 /run/charon.log >&2", quick)
		}
		v.Run(t, ipsecDown, long)
		if err := os.RemoveAll(filepath.Join(v.Files(), "packaging")); err != nil {
			t.Error(err)
		}
	})
	v.Run(t, ipsecUp, quick)
	cli := func(args string) string {
		t.Helper()
		return v.Run(t, ". /run/ipsec.sh\non /run/share/iser-target "+args+" --socket /run/iser-target.sock\n", quick)
	}

	v.Run(t, ". /run/ipsec.sh\n"+capture, quick)
	v.Run(t, onTarget(t, v, "install -m 0600 /run/share/config.yaml /etc/iser-target/config.yaml\n"+pageBlocks(t, "On the target", "sh")), long)
	v.Run(t, ". /run/lib.sh\n. /run/ipsec.sh\n"+pageBlocks(t, "On the initiator", "sh"), long)
	// The second session is over TCP, through the same SAs (SEC-3723.3.2-1). The third is the neighbor's, without IPsec.
	v.Run(t, `
. /run/lib.sh
for port in 3260 3261; do
	iscsiadm -m node -o new -T `+storeIQN+` -p 192.0.2.2:$port -I default
	iscsiadm -m node -T `+storeIQN+` -p 192.0.2.2:$port -I default --login
done
`+ipsecLoad+`
. /run/ipsec.sh
await device iser 3260
await device iscsi_tcp 3260
await device iscsi_tcp 3261`, long)
	sessions := func() (list []sessionState) {
		t.Helper()
		if err := json.Unmarshal([]byte(cli("session list -o json")), &list); err != nil {
			t.Fatal(err)
		}
		return list
	}
	before := sessions()
	protected := 0
	for _, s := range before {
		for _, c := range s.Connections {
			if c.IPsec == nil {
				continue
			}
			protected++
			if c.IPsec.Verdict != "permit" || c.IPsec.Suite != "esp-tunnel aes128gcm16 esn" || c.IPsec.Identity != "initiator.example.com" {
				t.Errorf("session %d: %+v", s.TSIH, c.IPsec)
			}
		}
	}
	if len(before) != 3 || protected != 2 {
		t.Fatalf("%d sessions, %d with IPsec, want 3 and 2:\n%s", len(before), protected, cli("ipsec status"))
	}

	// New keys every 5 s, and an IKE SA with new keys, too: fio finds no fault, and the sessions stay (SEC-3723.5.4-1).
	v.Run(t, `
. /run/ipsec.sh
load iser $(device iser 3260) 0
load tcp $(device iscsi_tcp 3260) 1m
for n in 1 2 3 4; do
	sleep 5
	swanctl --rekey --child iscsi
done >&2
on swanctl --rekey --ike iser-target >&2
await rounds iser 2
await rounds tcp 2
load_ends iser tcp
on swanctl --list-sas 2>/dev/null | grep -E 'iscsi: #([5-9]|[1-9][0-9])' >&2`, long)
	if after := sessions(); fmt.Sprint(tsihs(after)) != fmt.Sprint(tsihs(before)) {
		t.Errorf("after rekeying the sessions are %v, before %v", after, before)
	}
	clean := func() {
		t.Helper()
		if out := v.Run(t, ". /run/ipsec.sh\n"+captured, quick); out != "" {
			t.Errorf("on the wire, besides ESP and IKE:\n%s", out)
		}
	}
	clean() // SEC-7146.2-1, SEC-3723.5.7-1

	// Clear text gets no answer: neither by the rules of nftables, nor by the policies of the portal alone.
	for _, rules := range []string{"", "on nft delete table inet iser_target\n"} {
		v.Run(t, `
. /run/ipsec.sh
`+rules+`
if stranger 5; then
	echo "the target has accepted a connection in clear text" >&2
	exit 1
fi
tcpdump -n -r /run/wire.pcap 'src host 192.0.2.3 and tcp dst port 3260' | grep -q .`, quick)
	}
	if out := v.Run(t, ". /run/ipsec.sh\non grep -E '^XfrmIn(TmplMismatch|NoPols|PolBlock|StateInvalid)' /proc/net/xfrm_stat", quick); !regexp.MustCompile(`\t[1-9]`).MatchString(out) {
		t.Errorf("the kernel has counted no packet in clear text:\n%s", out)
	}
	clean()

	// SAs that do not encrypt: the target closes the connection, and says why.
	v.Run(t, `
. /run/ipsec.sh
null() { # SPI FROM TO
	echo "xfrm state add src $2 dst $3 proto esp spi $1 reqid 9 mode tunnel replay-window 32 auth-trunc hmac(sha256) 0x$(printf %064d $1) 128 enc ecb(cipher_null) \"\""
}
policy() { # DIRECTION FROM TO PORT
	echo "xfrm policy add src $2 dst $3 proto tcp $4 3260 dir $1 tmpl src $2 dst $3 proto esp reqid 9 mode tunnel"
}
for machine in "out in" "in out"; do
	read -r to from <<<"$machine"
	{
		null 4097 192.0.2.3 192.0.2.2
		null 4098 192.0.2.2 192.0.2.3
		policy $to 192.0.2.3 192.0.2.2 dport
		policy $from 192.0.2.2 192.0.2.3 sport
	} >/run/share/batch
	if [ $to = out ]; then ip -batch /run/share/batch; else on ip -batch /run/share/batch; fi
done
stranger 30 || true # a reset is as good
await on grep -q 'remote=192.0.2.3.*does not encrypt' /run/iser-target.log`, long)

	// The IKE identity of this machine is not that of another initiator's name.
	r := v.Try(t, `
iscsiadm -m iface -I other -o new
iscsiadm -m iface -I other -o update -n iface.transport_name -v tcp
iscsiadm -m iface -I other -o update -n iface.initiatorname -v iqn.2026-11.io.example:other
iscsiadm -m node -o new -T `+storeIQN+` -p 192.0.2.2:3260 -I other
iscsiadm -m node -T `+storeIQN+` -p 192.0.2.2:3260 -I other --login`, quick)
	if r.Status != 24 { // ISCSI_ERR_LOGIN_AUTH_FAILED
		t.Errorf("the login with another name ended with %d, want 24", r.Status)
	}
	v.Run(t, ". /run/ipsec.sh\nawait on grep -q 'IKE identity .*initiator.example.com.* does not belong to initiator iqn.2026-11.io.example:other' /run/iser-target.log\n"+
		"iscsiadm -m node -T "+storeIQN+" -I other -o delete", quick)

	// The keys vanish: I/O stalls, and nothing leaves in clear text. New keys come in time: the sessions stay, and nothing is lost
	// (SEC-7146.3-4, SEC-3723.3.5-1). The neighbor has its I/O all the time.
	v.Run(t, `
. /run/ipsec.sh
load iser $(device iser 3260) 0
load tcp $(device iscsi_tcp 3260) 1m
load plain $(device iscsi_tcp 3261) 2m
for name in iser tcp plain; do await rounds $name 1; done
on ip xfrm state flush
n=$(wc -l </run/fio.rounds.plain)
await rounds plain $((n + 2))
swanctl --terminate --ike iser-target --timeout 20 >&2 || true
swanctl --initiate --child iscsi --timeout 60 >&2 || true # the trap may be quicker
for name in iser tcp; do
	n=$(wc -l </run/fio.rounds.$name)
	await rounds $name $((n + 2))
done
load_ends iser tcp plain`, long)
	if after := sessions(); fmt.Sprint(tsihs(after)) != fmt.Sprint(tsihs(before)) {
		t.Errorf("after new keys the sessions are %v, before %v", after, before)
	}
	clean()

	// No new keys come: strongSwan is dead on both machines. The sessions end in time, and that of the neighbor stays.
	v.Run(t, `
. /run/ipsec.sh
for tmo in /sys/class/iscsi_session/session*/recovery_tmo; do
	echo 5 >$tmo || true # the kernel waits that long before it gives up a disk whose session has ended, instead of 120 s
done
load plain $(device iscsi_tcp 3261) 2m
await rounds plain 1
pkill -KILL -x charon-systemd
on ip xfrm state flush
n=$(wc -l </run/fio.rounds.plain)
await on grep -q 'msg="session ended"' /run/iser-target.log
await rounds plain $((n + 2))
load_ends plain`, long)
	for begun := time.Now(); len(sessions()) != 1; time.Sleep(time.Second) {
		if time.Since(begun) > 90*time.Second {
			t.Fatalf("sessions without keys do not end: %v", sessions())
		}
	}
	if left := sessions(); left[0].Connections[0].IPsec != nil {
		t.Errorf("the session that is left is %+v, want that of the portal without IPsec", left[0])
	}
	clean() // SEC-3723.5.7-2
}

// A sessionState is what the test reads of session list.
type sessionState struct {
	TSIH        uint16
	Connections []struct {
		IPsec *struct{ Verdict, Suite, Identity string }
	}
}

func tsihs(list []sessionState) (ids []uint16) {
	for _, s := range list {
		ids = append(ids, s.TSIH)
	}
	return ids
}
