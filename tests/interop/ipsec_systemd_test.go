package interop_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/tests/interop/vm"
)

// serviceIPsec checks packaging/ipsec/ipsec.conf: with it the service has CAP_NET_ADMIN and no other right more, installs SAs and policies, and drops
// clear text. They live through an upgrade, a restart and kill -9, so that the session does, too. Without it the start fails and says what is missing.
//
// The service runs in a network namespace, because the kernel's initiators work in the first one only, and the loopback has no IPsec.
func serviceIPsec(t *testing.T, m *manager) {
	m.v.Run(t, "modprobe -a veth iscsi_tcp esp4 esp6 xfrm_user", quick)
	defer func() {
		if m.v.Broken() == nil {
			m.v.Run(t, `
iscsiadm -m session -u >&2 || true
iscsiadm -m node -T `+serviceIQN+` -p 192.0.2.2:3260 -o delete || true
ip xfrm state flush
ip xfrm policy flush
ip link del ipsec0`, quick)
			m.run(t, `
systemctl stop iser-target.service
cp -p /run/config.without /etc/iser-target/config.yaml
rm -f /etc/iser-target/*.key /etc/systemd/system/iser-target.service.d/{ipsec,net}.conf
ip netns del target`+undo(), quick)
		}
	}()
	sa := func(spi int, from, to string) string {
		return fmt.Sprintf("      - {spi: %d, source: %s, destination: %s, reqid: 1, mode: tunnel, suite: aes128-sha256, key_file: /etc/iser-target/%[1]d.key}\n", spi, from, to)
	}
	m.run(t, `
ip netns add target
ip link add ipsec0 type veth peer name ipsec0 netns target
ip addr add 192.0.2.1/24 dev ipsec0
ip link set ipsec0 up
ip -n target link set lo up
ip -n target addr add 192.0.2.2/24 dev ipsec0
ip -n target link set ipsec0 up
cp -p /etc/iser-target/config.yaml /run/config.without
cat >/run/config.with <<'.'
portals: [{listen: 192.0.2.2:3260, ipsec: required}]
targets:
  - name: `+serviceIQN+`
    initiators: ["*"]
    luns:
      - {id: 0, backend: file, path: /var/lib/iser-target/0.img, size: 64MiB}
ipsec:
  driver: static
  grace: 60s
  profiles: [{name: default, manual_keys: true}]
  static:
    sas:
`+sa(4097, "192.0.2.1", "192.0.2.2")+sa(4098, "192.0.2.2", "192.0.2.1")+`
    policies:
      - {direction: in, source: 192.0.2.1, destination: 192.0.2.2, port: 3260, mode: tunnel, reqid: 1}
      - {direction: out, source: 192.0.2.2, destination: 192.0.2.1, port: 3260, mode: tunnel, reqid: 1}
drain: 0s
.
cat /run/config.with >/etc/iser-target/config.yaml
for spi in 4097 4098; do
	head -c 48 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >`+vm.Files+`/$spi.key
	install -m 0600 -o iser-target -g iser-target `+vm.Files+`/$spi.key /etc/iser-target/$spi.key
done
mkdir -p /etc/systemd/system/iser-target.service.d
printf '[Service]\nNetworkNamespacePath=/run/netns/target\n' >/etc/systemd/system/iser-target.service.d/net.conf
systemctl daemon-reload
systemctl restart iser-target.service && exit 1 # without the capability
await logged 'ipsec driver static: .*allow AF_NETLINK in RestrictAddressFamilies'
systemctl stop iser-target.service

cd `+vm.Files+`
install -D -m 0644 packaging/ipsec/ipsec.conf /etc/systemd/system/iser-target.service.d/ipsec.conf
systemctl daemon-reload
systemctl start iser-target.service
must ActiveState active
must NRestarts 0
timeout 3 busybox nc 192.0.2.2 3260 </dev/null >&2 && exit 1
ip netns exec target awk '/^XfrmIn(NoPols|TmplMismatch|PolBlock)/ { n += $2 } END { exit n == 0 }' /proc/net/xfrm_stat`, quick)
	hardened(t, m, "0000000000001000")

	m.v.Run(t, `
sa() { # SPI FROM TO
	k=$(<`+vm.Files+`/$1.key)
	ip xfrm state add src $2 dst $3 proto esp spi $1 reqid 1 mode tunnel replay-window 32 auth-trunc 'hmac(sha256)' 0x${k:32} 128 enc 'cbc(aes)' 0x${k:0:32}
}
sa 4097 192.0.2.1 192.0.2.2
sa 4098 192.0.2.2 192.0.2.1
ip xfrm policy add src 192.0.2.1 dst 192.0.2.2 proto tcp dport 3260 dir out tmpl src 192.0.2.1 dst 192.0.2.2 proto esp reqid 1 mode tunnel
ip xfrm policy add src 192.0.2.2 dst 192.0.2.1 proto tcp sport 3260 dir in tmpl src 192.0.2.2 dst 192.0.2.1 proto esp reqid 1 mode tunnel
. /run/lib.sh
iscsiadm -m node -o new -T `+serviceIQN+` -p 192.0.2.2:3260 -I default
login 192.0.2.2:3260 `+serviceIQN+`
disk `+serviceIQN+` 0 >/run/disk
head -c 1M /dev/urandom >/run/data
dd if=/run/data of=$(cat /run/disk) bs=64k oflag=direct status=none
`+sameData, quick)
	installed := func() string {
		t.Helper()
		return m.run(t, `ip netns exec target ip -s xfrm state | grep -E 'spi 0x|^	  add '
ip netns exec target ip xfrm policy | grep -E '^	dir ' | sort
iser-target session list -o json | grep -E '"(tsih|suite)"'`, quick)
	}
	before := installed()
	if strings.Count(before, "spi 0x") != 2 || strings.Count(before, "\tdir ") != 4 || !strings.Contains(before, "esp-tunnel aes128-sha256") {
		t.Fatalf("the target has\n%s", before)
	}
	for _, c := range []struct{ name, script string }{
		{"restart", `
systemctl restart iser-target.service
logged 'sessions continue after the restart'`},
		{"upgrade", `
pid=$(show MainPID)
moved() { ! is MainPID $pid; }
iser-target upgrade
await moved
await is ActiveState active`},
	} {
		m.run(t, c.script, quick)
		if after := installed(); after != before {
			t.Errorf("after %s the target has\n%s\nbefore\n%s", c.name, after, before)
		}
		m.v.Run(t, sameData, quick)
	}
	m.run(t, `
systemctl kill --signal=KILL --kill-whom=main iser-target.service
await is NRestarts 1
await is ActiveState active`, quick)
	m.v.Run(t, sameData, long) // the initiator logs in again
	if after := installed(); strings.Split(after, `"tsih"`)[0] != strings.Split(before, `"tsih"`)[0] {
		t.Errorf("after kill -9 the target has\n%s\nbefore\n%s", after, before)
	}
}
