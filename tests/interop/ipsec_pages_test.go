package interop_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/tests/interop/harness"
)

// TestIPsecPages runs the configurations of the pages about drivers, logs in, and compares what ipsec status and doctor print with the pages. The SAs of the initiator
// stand for an IKE daemon. TestIPsec has a session with the driver vici.
func TestIPsecPages(t *testing.T) {
	v := boot(t)
	need(t, "openssl", "nsenter")
	harness.Copy(t, filepath.Join(v.Files(), "iser-target"))
	const (
		policies = `
policy() { ip xfrm policy add src $2 dst $3 proto tcp $4 3260 dir $1 tmpl src $2 dst $3 proto esp reqid 1 mode tunnel; }
policy out 192.0.2.1 192.0.2.2 dport
policy in 192.0.2.2 192.0.2.1 sport
`
		// An IKE daemon sets lifetimes.
		daemon = `
sa() {
	"${@:4}" ip xfrm state add src $2 dst $3 proto esp spi $1 reqid 1 mode tunnel replay-window 128 flag esn limit time-hard 4200 \
		aead 'rfc4106(gcm(aes))' 0x$(printf %040d 7) 128
}
for machine in env on; do
	sa 0x1001 192.0.2.1 192.0.2.2 $machine
	sa 0x1002 192.0.2.2 192.0.2.1 $machine
done
on ip xfrm policy add src 192.0.2.1 dst 192.0.2.2 proto tcp dport 3260 dir in tmpl src 192.0.2.1 dst 192.0.2.2 proto esp reqid 1 mode tunnel
on ip xfrm policy add src 192.0.2.2 dst 192.0.2.1 proto tcp sport 3260 dir out tmpl src 192.0.2.2 dst 192.0.2.1 proto esp reqid 1 mode tunnel
` + policies
		// The other machine has the same keys.
		manual = `
sa() {
	local k
	k=$(on cat /etc/iser-target/$1.key)
	ip xfrm state add src $2 dst $3 proto esp spi $1 reqid 1 mode tunnel replay-window 1024 flag esn \
		auth-trunc 'hmac(sha256)' 0x${k:32} 128 enc 'cbc(aes)' 0x${k:0:32}
}
sa 4097 192.0.2.1 192.0.2.2
sa 4098 192.0.2.2 192.0.2.1
` + policies
	)
	for _, tc := range []struct{ driver, peer string }{{"xfrm", daemon}, {"static", manual}, {"exec", ""}} {
		t.Run(tc.driver, func(t *testing.T) {
			page := "../../docs/ipsec-" + tc.driver + ".md"
			script := ""
			if tc.driver != "xfrm" {
				script = blocksOf(t, page, "A configuration", "sh")
			}
			if err := os.WriteFile(filepath.Join(v.Files(), "config.yaml"), []byte(blocksOf(t, page, "A configuration", "yaml")), 0o600); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if t.Failed() && v.Broken() == nil {
					v.Try(t, "tail -n 30 /run/serve.log >&2", quick)
				}
				v.Run(t, ipsecDown+"rm -f /run/serve.log /usr/local/bin/verdict\n", long)
			})
			if tc.driver == "exec" {
				page, err := os.ReadFile(page)
				if err != nil {
					t.Fatal(err)
				}
				_, program, _ := strings.Cut(string(page), "```sh\n")
				program, _, _ = strings.Cut(program, "```")
				if err := os.WriteFile(filepath.Join(v.Files(), "verdict"), []byte(program), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			v.Run(t, ipsecUp, quick)
			v.Run(t, onTarget(t, v, "install -m 0600 /run/share/config.yaml /etc/iser-target/config.yaml\n"+script), quick)
			out := v.Run(t, ". /run/lib.sh\n. /run/ipsec.sh\n"+tc.peer+`
on /run/share/iser-target serve --config /etc/iser-target/config.yaml </dev/null >/run/serve.log 2>&1 &
cli() { on /run/share/iser-target "$@" --socket /run/iser-target.sock; }
await cli session list >/dev/null 2>&1
iscsiadm -m node -o new -T `+storeIQN+` -p 192.0.2.2:3260 -I default >&2
iscsiadm -m node -T `+storeIQN+` -p 192.0.2.2:3260 -I default --login >&2
echo '$ iser-target ipsec status'
cli ipsec status
echo '$ iser-target doctor | grep ipsec'
cli doctor | grep ipsec || true`, long)
			if got, want := steady(out), steady(blocksOf(t, page, "Check it", "")); got != want {
				t.Errorf("the page has\n%s\nand the target prints\n%s", want, out)
			}
		})
	}
}

// steady returns what two runs print alike: without ports of initiators and times, and with one space for several.
func steady(text string) string {
	for _, r := range [][2]string{{`192\.0\.2\.1:\d+`, "192.0.2.1:PORT"}, {`\d{4}-\d\d-\d\dT[0-9:]+Z`, "TIME"}, {`(?m)^key changes.*$`, "key changes"}, {` +`, " "}, {`(?m) $`, ""}} {
		text = regexp.MustCompile(r[0]).ReplaceAllString(text, r[1])
	}
	return strings.TrimSpace(text)
}
