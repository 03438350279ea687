package interop_test

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/tests/interop/harness"
)

// blockConfig is the configuration of a target that reads the kernel's tables.
const blockConfig = `
portals:
  - listen: 192.0.2.2:3260
    ipsec: required
targets:
  - name: ` + storeIQN + `
    initiators: ["*"]
    luns:
      - {id: 0, backend: memory, size: 1MiB}
ipsec:
  driver: xfrm
  profiles: [{name: default, mode: tunnel, manual_keys: true}]
state_dir: /var/lib/iser-target
control: {socket: /run/iser-target.sock}
`

// blockLib adds to /run/ipsec.sh SAs and policies of both machines, and what a test of clear text needs.
const blockLib = `
cat >>/run/ipsec.sh <<'.'
k=0x$(printf '%032d' 7)$(printf '%064d' 9)
# sas installs the SAs of one machine.
sas() {
	"$@" ip xfrm state add src 192.0.2.1 dst 192.0.2.2 proto esp spi 4097 reqid 1 mode tunnel replay-window 32 auth-trunc 'hmac(sha256)' 0x${k:34} 128 enc 'cbc(aes)' ${k:0:34}
	"$@" ip xfrm state add src 192.0.2.2 dst 192.0.2.1 proto esp spi 4098 reqid 1 mode tunnel replay-window 32 auth-trunc 'hmac(sha256)' 0x${k:34} 128 enc 'cbc(aes)' ${k:0:34}
}
# policy MACHINE... DIRECTION FROM TO PORT adds a policy of a machine.
policy() { ip xfrm policy add src $2 dst $3 proto tcp $4 3260 dir $1 tmpl src $2 dst $3 proto esp reqid 1 mode tunnel; }
# knock sends a SYN in ESP, and says whether the target's kernel answers in ESP.
knock() { if timeout 2 bash -c 'exec 3<>/dev/tcp/192.0.2.2/3260' 2>/dev/null; then echo answered; else echo silence; fi; }
# clear counts the packets of the portal that were on the wire in clear text.
clear_text() { sleep 1; tcpdump -n -r /run/wire.pcap 'src host 192.0.2.2 and tcp src port 3260' 2>/dev/null | wc -l; }
# blocked counts what the kernel did not let leave.
blocked() { on awk '/^XfrmOutPolBlock/ { print $2 }' /proc/net/xfrm_stat; }
own() { [ "$(on ip xfrm policy | grep -c 'priority 4294967295')" = 2 ]; }
.
. /run/ipsec.sh
sas env
sas on
declare -f policy >/run/policy.sh
policy out 192.0.2.1 192.0.2.2 dport
policy in 192.0.2.2 192.0.2.1 sport
cat >/run/policies.sh <<'.'
policy in 192.0.2.1 192.0.2.2 dport
policy out 192.0.2.2 192.0.2.1 sport
.
on bash -ec "$(cat /run/policy.sh /run/policies.sh)"
ip netns exec wire tcpdump -n -i wire-t -U -w /run/wire.pcap </dev/null >/run/tcpdump.log 2>&1 &
await grep -q listening /run/tcpdump.log
on /run/share/iser-target serve --config /run/share/config.yaml </dev/null >/run/serve.log 2>&1 &
await on /run/share/iser-target session list --socket /run/iser-target.sock >/dev/null 2>&1
`

// SEC-3723.5.7-2: the SYN-ACK of a portal under required does not leave in clear text when the policies of the machine are gone while its SAs remain. The target's own
// policies keep it back, and come back themselves after a flush. While the target cannot do that, the rules of nftables drop the SYN-ACK, and without them it is on the wire.
func TestIPsecSYNACK(t *testing.T) {
	v := boot(t)
	need(t, "tcpdump", "nft", "nsenter")
	harness.Copy(t, filepath.Join(v.Files(), "iser-target"))
	rules, err := os.ReadFile("../../packaging/ipsec/iser-target.nft")
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{"config.yaml": []byte(blockConfig), "iser-target.nft": rules} {
		if err := os.WriteFile(filepath.Join(v.Files(), name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if t.Failed() && v.Broken() == nil {
			v.Try(t, "tail -n 30 /run/serve.log >&2\n. /run/ipsec.sh\non ip xfrm policy >&2\non ip -s xfrm state >&2\non cat /proc/net/xfrm_stat >&2\ntcpdump -n -r /run/wire.pcap >&2", quick)
		}
		v.Run(t, "pkill -CONT -x iser-target || true\n"+ipsecDown+"rm -f /run/serve.log /run/policy.sh /run/policies.sh\n", long)
	})
	v.Run(t, ipsecUp+blockLib, quick)
	run := func(script string) string {
		t.Helper()
		return strings.TrimSpace(v.Run(t, ". /run/ipsec.sh\n"+script, quick))
	}
	number := func(script string) int {
		t.Helper()
		n, err := strconv.Atoi(run(script))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	// knock sends a SYN, and checks how many packets of the portal are on the wire in clear text, and whether the target's own policies kept some back.
	knock := func(when, answer string, clear, kept bool) {
		t.Helper()
		before, was := number("blocked"), number("clear_text")
		if got := run("knock"); got != answer {
			t.Errorf("%s: %s, want %s", when, got, answer)
		}
		if n := number("clear_text") - was; n > 0 != clear {
			t.Errorf("%s: %d packets in clear text on the wire", when, n)
		}
		if n := number("blocked") - before; n > 0 != kept {
			t.Errorf("%s: the kernel kept %d packets back", when, n)
		}
	}
	run("own")
	knock("with policies", "answered", false, false)

	run("on ip xfrm policy delete dir in src 192.0.2.1 dst 192.0.2.2 proto tcp dport 3260\non ip xfrm policy delete dir out src 192.0.2.2 dst 192.0.2.1 proto tcp sport 3260")
	knock("after an IKE daemon removed its policies", "silence", false, true)

	run("on ip xfrm policy flush\nawait own")
	knock("after a flush of all policies", "silence", false, true)

	run("pkill -STOP -x iser-target\non ip xfrm policy flush")
	knock("while the target cannot restore its policies", "silence", true, false)

	run("on nft -f /run/share/iser-target.nft")
	knock("with the rules of nftables alone", "silence", false, false)
	if got := run("on nft list chain inet iser_target output | grep -c 'counter packets [1-9]' || true"); got != "1" {
		t.Errorf("the rules of nftables have dropped nothing:\n%s", run("on nft list table inet iser_target"))
	}

	run("on nft delete table inet iser_target\npkill -CONT -x iser-target\nawait own")
	knock("after the target continued", "silence", false, true)
	run(`on bash -ec "$(cat /run/policy.sh /run/policies.sh)"`)
	knock("with policies again", "answered", false, false)

	run("kill $(pgrep -x iser-target)\nawait sh -c '! pgrep -x iser-target >/dev/null'")
	if left := run("on ip xfrm policy | grep -c 4294967295 || true"); left != "0" {
		t.Errorf("the target leaves %s policies at its end", left)
	}
}
