package interop_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/tests/interop/harness"
	"github.com/iser-target/iser-target/tests/interop/vm"
)

// staticConfig is the configuration of a target with manual keys: a portal that requires IPsec, and one of a neighbor. %[1]d and %[2]d are the SPIs of
// what comes in and goes out.
const staticConfig = `
portals:
  - listen: 192.0.2.2:3260
    ipsec: required
  - listen: 192.0.2.2:3261
    tpgt: 2
targets:
  - name: ` + storeIQN + `
    initiators: ["*"]
    luns:
      - {id: 0, backend: file, path: /var/lib/iser-target/0.img, size: 16MiB}
ipsec:
  driver: static
  grace: 60s
  profiles: [{name: default, mode: tunnel, esn: true, manual_keys: true}]
  static:
    sas:
      - {spi: %[1]d, source: 192.0.2.1, destination: 192.0.2.2, reqid: 1, mode: tunnel, suite: aes128-sha256, key_file: /etc/iser-target/%[1]d.key, esn: true, replay_window: 1024}
      - {spi: %[2]d, source: 192.0.2.2, destination: 192.0.2.1, reqid: 1, mode: tunnel, suite: aes128-sha256, key_file: /etc/iser-target/%[2]d.key, esn: true, replay_window: 1024}
    policies:
      - {direction: in, source: 192.0.2.1, destination: 192.0.2.2, port: 3260, mode: tunnel, reqid: 1}
      - {direction: out, source: 192.0.2.2, destination: 192.0.2.1, port: 3260, mode: tunnel, reqid: 1}
state_dir: /var/lib/iser-target
control: {socket: /run/iser-target.sock}
`

// staticLib adds to /run/ipsec.sh what initiators with manual keys need, and a stranger: a network namespace on the wire without policies.
const staticLib = `
ip netns add stranger
ip link add stranger type veth peer name wire-s netns wire
ip -n wire link set dev wire-s master wire
ip -n wire link set dev wire-s up
ip link set stranger netns stranger
ip -n stranger addr add 192.0.2.3/24 dev stranger
ip -n stranger link set stranger up
cat >>/run/ipsec.sh <<'.'
# key SPI makes the key of an SA, for both machines.
key() {
	head -c 48 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >/run/$1.key
	on sh -c "umask 077; cat >/etc/iser-target/$1.key" </run/$1.key
}
# sa SPI FROM TO installs an SA on the initiator, like the target's.
sa() {
	local k
	k=$(</run/$1.key)
	ip xfrm state add src $2 dst $3 proto esp spi $1 reqid 1 mode tunnel replay-window 1024 flag esn \
		auth-trunc 'hmac(sha256)' 0x${k:32} 128 enc 'cbc(aes)' 0x${k:0:32}
}
# machine DIRECTION FROM TO PORT installs a policy on the initiator.
machine() { ip xfrm policy add src $2 dst $3 proto tcp $4 3260 dir $1 tmpl src $2 dst $3 proto esp reqid 1 mode tunnel; }
# serve starts the target. Its first process is the supervisor of those of upgrades.
serve() {
	on /run/share/iser-target serve --config /etc/iser-target/config.yaml </dev/null >>/run/serve.log 2>&1 &
	await on /run/share/iser-target session list --socket /run/iser-target.sock >/dev/null 2>&1
}
cli() { on /run/share/iser-target "$@" --socket /run/iser-target.sock; }
# installed prints the SAs and the policies of the target, with the time of each SA's installation.
installed() {
	on ip -s xfrm state | grep -E 'spi 0x|^	  add '
	on ip xfrm policy | grep -E '^	dir ' | sort
}
.
`

// A staticLab is a target with manual keys, in a namespace of its own, with two sessions under required and one of a neighbor.
type staticLab struct {
	t *testing.T
	v *vm.VM
}

func newStaticLab(t *testing.T) *staticLab {
	t.Helper()
	l := &staticLab{t, boot(t)}
	need(t, "tcpdump", "fio", "busybox", "nsenter")
	harness.Copy(t, filepath.Join(l.v.Files(), "iser-target"))
	t.Cleanup(func() {
		if t.Failed() && l.v.Broken() == nil {
			l.v.Try(t, "tail -n 60 /run/serve.log >&2\n. /run/ipsec.sh\ninstalled >&2\nip xfrm state >&2\non cat /proc/net/xfrm_stat >&2", quick)
		}
		l.v.Run(t, "rm -f /run/stranger.go /run/stranger.end\nip netns del stranger || true\n"+ipsecDown+"rm -f /run/serve.log /run/*.key\n", long)
	})
	l.v.Run(t, ipsecUp+staticLib, quick)
	l.configure(4097, 4098)
	l.run(`
for spi in 4097 4098; do key $spi; done
sa 4097 192.0.2.1 192.0.2.2
sa 4098 192.0.2.2 192.0.2.1
machine out 192.0.2.1 192.0.2.2 dport
machine in 192.0.2.2 192.0.2.1 sport
ip netns exec wire tcpdump -n -i wire-t -U -w /run/wire.pcap </dev/null >/run/tcpdump.log 2>&1 &
await grep -q listening /run/tcpdump.log
serve`)
	l.v.Run(t, `
. /run/lib.sh
for session in "3260 iser" "3260 default" "3261 default"; do
	read -r port iface <<<"$session"
	iscsiadm -m node -o new -T `+storeIQN+` -p 192.0.2.2:$port -I $iface # replaces the record of another interface
	iscsiadm -m node -T `+storeIQN+` -p 192.0.2.2:$port -I $iface --login
done
`+ipsecLoad+`
. /run/ipsec.sh
await device iser 3260
await device iscsi_tcp 3260
await device iscsi_tcp 3261`, long)
	return l
}

// configure writes the configuration of the target with those SPIs.
func (l *staticLab) configure(in, out int) {
	l.t.Helper()
	if err := os.WriteFile(filepath.Join(l.v.Files(), "config.yaml"), fmt.Appendf(nil, staticConfig, in, out), 0o600); err != nil {
		l.t.Fatal(err)
	}
	l.run("on install -m 0600 /run/share/config.yaml /etc/iser-target/config.yaml")
}

// run runs a script and returns its output.
func (l *staticLab) run(script string) string {
	l.t.Helper()
	return l.v.Run(l.t, ". /run/ipsec.sh\n"+script, long)
}

// clean fails if something but ESP and ARP was on the wire, besides the neighbor's packets and those that the stranger sent.
func (l *staticLab) clean() {
	l.t.Helper()
	out := l.run(`
sleep 1 # tcpdump is behind
tcpdump -n -r /run/wire.pcap esp | awk 'END { print NR " packets of ESP"; exit NR < 100 }' >&2
tcpdump -n -r /run/wire.pcap 'not esp and not arp and not ip6 and not tcp port 3261 and not src host 192.0.2.3'`)
	if out != "" {
		l.t.Errorf("on the wire, besides ESP:\n%s", out)
	}
}

// ib_iser and iscsi_tcp under required with manual keys. The sessions, what the kernel drops, and the SAs with their sequence numbers live through upgrades,
// also through one that fails. After kill -9 the next process takes over the same SAs, and replaces others.
func TestIPsecHandover(t *testing.T) {
	l := newStaticLab(t)
	if got := l.run("cli session list -o json"); strings.Count(got, `"esp-tunnel aes128-sha256 esn"`) != 2 || strings.Count(got, `"tsih"`) != 3 {
		t.Fatalf("sessions:\n%s", got)
	}
	before := l.run("installed")
	if strings.Count(before, "spi 0x") != 2 || strings.Count(before, "\tdir ") != 4 {
		t.Fatalf("the target has\n%s", before)
	}
	same := func(when string) {
		t.Helper()
		if after := l.run("installed"); after != before {
			t.Errorf("%s the target has\n%s\nbefore\n%s", when, after, before)
		}
	}

	// The stranger sends a SYN in clear text every 500 ms, also while processes take turns. Each is dropped.
	l.run(`
timeout 2 ip netns exec stranger busybox nc 192.0.2.2 3261 </dev/null >&2 || true
answered() { tcpdump -n -r /run/wire.pcap 'src port 3261 and dst host 192.0.2.3 and tcp[tcpflags] & tcp-syn != 0' 2>/dev/null | grep -q .; }
await answered # where IPsec is not required
touch /run/stranger.go
ip netns exec stranger sh -c 'while [ -e /run/stranger.go ]; do timeout 0.5 busybox nc 192.0.2.2 3260; done; touch /run/stranger.end' </dev/null >/run/stranger.log 2>&1 &
load iser $(device iser 3260) 0
load tcp $(device iscsi_tcp 3260) 1m
for name in iser tcp; do await rounds $name 1; done`)
	sessions := func() string { return l.run(`cli session list -o json | grep -E '"(tsih|started)"'`) }
	was := sessions()
	first := l.run("cli upgrade")
	if !strings.Contains(first, "sessions 3 continue") {
		t.Errorf("upgrade: %s", first)
	}
	same("after an upgrade")
	// The new process cannot read a key, and the old one continues.
	failed := l.v.Try(t, ". /run/ipsec.sh\non mv /etc/iser-target/4097.key /etc/iser-target/away\ncli upgrade", long)
	if out := failed.Stdout + failed.Stderr; failed.Status == 0 || !strings.Contains(out, "4097.key: no such file") || !strings.Contains(out, "The target continues as it was") {
		t.Errorf("an upgrade without a key: status %d, %s", failed.Status, out)
	}
	same("after an upgrade that failed")
	second := l.run(`
for name in iser tcp; do
	n=$(wc -l </run/fio.rounds.$name)
	await rounds $name $((n + 2))
done
on mv /etc/iser-target/away /etc/iser-target/4097.key
cli upgrade
for name in iser tcp; do
	n=$(wc -l </run/fio.rounds.$name)
	await rounds $name $((n + 2))
done
load_ends iser tcp`)
	same("after the second upgrade")
	if now := sessions(); now != was {
		t.Errorf("sessions %s, before the upgrades %s", now, was)
	}
	if bad := l.run("grep -E 'IPsec driver|keys are gone|protection is not|protection is gone' /run/serve.log || true"); bad != "" {
		t.Errorf("log of the target:\n%s", bad)
	}
	l.clean()
	l.run(`
n=$(tcpdump -n -r /run/wire.pcap 'src host 192.0.2.3 and dst port 3260 and tcp[tcpflags] & tcp-syn != 0' | wc -l)
echo "$n SYNs in clear text" >&2
[ $n -ge 20 ]
on awk '/^XfrmIn(NoPols|TmplMismatch|PolBlock)/ { n += $2 } END { exit n < 20 }' /proc/net/xfrm_stat`)

	// After kill -9 the same SAs continue with their sequence numbers, so that the initiator comes back.
	pid := regexp.MustCompile(`process (\d+) serves`).FindStringSubmatch(second)
	if pid == nil {
		t.Fatalf("upgrade: %s", second)
	}
	const killed = "\nawait sh -c '! pgrep -x iser-target >/dev/null'"
	l.run("rm -f /run/stranger.go\nawait test -e /run/stranger.end # the kernel answers for a port that nobody has\nkill -KILL " + pid[1] + killed)
	same("after kill -9")
	l.run(`
serve
dd if=$(device iser 3260) of=/dev/null bs=4k count=16 iflag=direct status=none
dd if=$(device iscsi_tcp 3260) of=/dev/null bs=4k count=16 iflag=direct status=none`)
	same("after the start that follows kill -9")

	// Other SAs replace those that a process left that was killed.
	l.run(`kill -KILL $(pgrep -x iser-target)` + killed)
	l.configure(8193, 8194)
	l.run(`
for spi in 8193 8194; do key $spi; done
serve
ip xfrm state flush
sa 8193 192.0.2.1 192.0.2.2
sa 8194 192.0.2.2 192.0.2.1
dd if=$(device iser 3260) of=/dev/null bs=4k count=16 iflag=direct status=none
dd if=$(device iscsi_tcp 3260) of=/dev/null bs=4k count=16 iflag=direct status=none`)
	now := l.run("installed")
	if strings.Count(now, "spi 0x") != 2 || !strings.Contains(now, "spi 0x00002001") || !strings.Contains(now, "spi 0x00002002") || strings.Count(now, "\tdir ") != 4 {
		t.Errorf("with other SAs in the configuration the target has\n%s", now)
	}
	l.clean() // SEC-3723.5.7-2

	// The end removes them.
	l.run(`
iscsiadm -m session -u >&2
kill $(pgrep -x iser-target)` + killed)
	if now := l.v.Run(t, ". /run/ipsec.sh\non ip xfrm state\non ip xfrm policy", quick); now != "" {
		t.Errorf("after its end the target leaves\n%s", now)
	}
}
