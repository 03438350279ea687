package interop_test

import (
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/interop/harness"
)

// interfaces are what open-iscsi calls the transports.
var interfaces = []struct{ transport, iface string }{
	{"iser", "iser"},
	{"tcp", "default"},
}

// Two targets and three portals in three groups, one of them IPv6. Over both
// transports, at whichever portal, discovery tells of all that lead to a target
// and of no other, and each can be logged in to where it is said to be.
func TestPortals(t *testing.T) {
	v := boot(t)
	if l, err := net.Listen("tcp", "[::1]:0"); err != nil {
		lack(t, fmt.Errorf("no IPv6: %w", err))
	} else {
		l.Close()
	}
	const iqn = "iqn.2026-11.io.example:portals"
	d := harness.Config{
		Targets: `
  - name: ` + iqn + `.here
    initiators: ["*"]
    luns:
      - {id: 0, backend: memory, size: 16MiB}
  - name: ` + iqn + `.there
    portal_groups: [2, 3]
    initiators: ["*"]
    luns:
      - {id: 0, backend: memory, size: 16MiB}
`,
		Portals: []harness.Portal{{TPGT: 1}, {TPGT: 2}, {TPGT: 3, Host: "::1"}},
	}.Start(t)
	var want []string
	for i, addr := range d.Addrs() {
		want = append(want, fmt.Sprintf("%s,%d %s.here", addr, i+1, iqn))
		if i > 0 {
			want = append(want, fmt.Sprintf("%s,%d %s.there", addr, i+1, iqn))
		}
	}
	slices.Sort(want)
	for _, tt := range interfaces {
		t.Run(tt.transport, func(t *testing.T) {
			for _, portal := range []string{d.Addrs()[0], d.Addrs()[2]} {
				got := strings.Split(strings.TrimSpace(v.Run(t,
					script(d, "modprobe iscsi_tcp; heard iscsiadm -m discovery -t st -I "+tt.iface+" -p "+portal),
					quick)), "\n")
				if slices.Sort(got); !slices.Equal(got, want) {
					t.Errorf("discovery at %s prints\n%s\nwant\n%s", portal, strings.Join(got, "\n"),
						strings.Join(want, "\n"))
				}
			}
			// The tag of the group is what the target has said in the login.
			v.Run(t, "iscsiadm -m node --login", quick)
			got := strings.Split(strings.TrimSpace(v.Run(t,
				`iscsiadm -m session | sed -E 's/^(.*): \[[0-9]+\] (.*) \(non-flash\)$/\1 \2/'`, quick)), "\n")
			for i := range got {
				got[i] = strings.TrimPrefix(got[i], tt.transport+" ")
			}
			if slices.Sort(got); !slices.Equal(got, want) {
				t.Errorf("the sessions are\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
			}
			d.AwaitVars(t, map[string]float64{"sessions": float64(len(want))}, 10*time.Second)
			v.Run(t, "iscsiadm -m node --logout; iscsiadm -m node -o delete", quick)
		})
	}
	d.AwaitVars(t, map[string]float64{"sessions": 0, "connections": 0}, 10*time.Second)
}

// An initiator that logs in where a target was is sent to where it is.
func TestRedirect(t *testing.T) {
	v := boot(t)
	const iqn = "iqn.2026-11.io.example:redirect"
	is := harness.Start(t, `
  - name: `+iqn+`
    initiators: ["*"]
    luns:
      - {id: 0, backend: memory, size: 16MiB}
`)
	was := harness.Start(t, `
  - name: `+iqn+`
    initiators: ["*"]
    redirect: {to: "`+is.Addr()+`"}
`)
	for _, tt := range interfaces {
		t.Run(tt.transport, func(t *testing.T) {
			got := v.Run(t, script(was, `
modprobe iscsi_tcp
heard iscsiadm -m discovery -t st -p $PORTAL -I `+tt.iface+`
iscsiadm -m node -T `+iqn+` -p $PORTAL --login
dd if=$(disk `+iqn+` 0) of=/dev/null bs=64k count=1 iflag=direct
iscsiadm -m session -P 1`), quick)
			for _, want := range []string{
				"Current Portal: " + is.Addr() + ",1\n",
				"Persistent Portal: " + was.Addr() + ",1\n",
				"Iface Transport: " + tt.transport + "\n",
			} {
				if !strings.Contains(got, want) {
					t.Errorf("iscsiadm does not print %q", want)
				}
			}
			is.AwaitVars(t, map[string]float64{"sessions": 1}, 10*time.Second)
			v.Run(t, "iscsiadm -m node --logout; iscsiadm -m node -o delete; "+forgive, quick)
		})
	}
	is.AwaitVars(t, map[string]float64{"sessions": 0, "connections": 0}, 10*time.Second)
	was.AwaitVars(t, map[string]float64{"sessions": 0, "connections": 0}, 10*time.Second)
}

// CHAP in discovery and in login, one-way and mutual, over both transports.
// TestTCP has more of logins over TCP.
func TestCHAP(t *testing.T) {
	v := boot(t)
	const (
		iqn    = "iqn.2026-11.io.example:chap"
		secret = "guest-secret-0123"  // of the initiator
		ours   = "target-secret-012"  // of the target
		find   = "finder-secret-012"  // of the initiator in discovery
		found  = "discovery-secret-0" // of the target in discovery
	)
	d := harness.Config{
		Targets: `
  - name: ` + iqn + `
    initiators: ["*"]
    auth:
      method: chap
      users: [{name: guest, secret: "` + secret + `"}]
      mutual: {name: target, secret: "` + ours + `"}
    luns:
      - {id: 0, backend: memory, size: 16MiB}
`,
		More: `
discovery_auth:
  method: chap
  users: [{name: finder, secret: "` + find + `"}]
  mutual: {name: node, secret: "` + found + `"}
`,
	}.Start(t)
	const (
		refused    = 24 // ISCSI_ERR_LOGIN_AUTH_FAILED
		distrusted = 19 // ISCSI_ERR_FATAL_LOGIN
	)
	chap := func(mode, prefix string, values ...string) (s string) {
		for i, key := range []string{"username", "password", "username_in", "password_in"}[:len(values)] {
			if i == 0 {
				s += mode + " -o update -n " + prefix + "authmethod -v CHAP\n"
			}
			s += fmt.Sprintf("%s -o update -n %s%s -v %s\n", mode, prefix, key, values[i])
		}
		return s
	}
	// Linux notifies iscsid of the answer to a Login Request before it has completed that request. iscsid may send the next one meanwhile, from another
	// CPU. The kernel refuses it ("Login/Text in progress. Cannot start new task."), and then iscsid tries again for 30 s, in vain. Logins with CHAP
	// take several requests. On the CPU that receives the answer, iscsid cannot run before the kernel has completed the request.
	need(t, "taskset")
	v.Run(t, `
modprobe iscsi_tcp
for irq in /proc/irq/*/smp_affinity; do
	echo 1 2>/dev/null >$irq || true # some stay where they are
done
taskset -p 1 $(pgrep -x iscsid)`, quick)
	for _, transport := range interfaces {
		db := "iscsiadm -m discoverydb -t st -p $PORTAL -I " + transport.iface
		for _, tt := range []struct {
			name   string
			values []string
			status int
		}{
			{"one-way", []string{"finder", find}, 0},
			{"mutual", []string{"finder", find, "node", found}, 0},
			{"without", nil, refused},
			{"wrong secret", []string{"finder", secret}, refused},
			{"wrong secret of the target", []string{"finder", find, "node", ours}, distrusted},
		} {
			t.Run(transport.transport+" discovery "+tt.name, func(t *testing.T) {
				r := v.Try(t, script(d, db+` -o new
trap '`+db+` -o delete' EXIT
`+chap(db, "discovery.sendtargets.auth.", tt.values...)+`
heard `+db+` --discover`), quick)
				if r.Status != tt.status {
					t.Errorf("iscsiadm ended with %d, want %d", r.Status, tt.status)
				}
				if tells := strings.Contains(r.Stdout, d.Addr()+",1 "+iqn+"\n"); tells != (tt.status == 0) {
					t.Errorf("told of the target: %v", tells)
				}
			})
		}
		node := "iscsiadm -m node -T " + iqn + " -p $PORTAL -I " + transport.iface
		for _, tt := range []struct {
			name   string
			values []string
			status int
		}{
			{"one-way", []string{"guest", secret}, 0},
			{"mutual", []string{"guest", secret, "target", ours}, 0},
			{"without", nil, refused},
			{"wrong secret", []string{"guest", find}, refused},
			{"wrong secret of the target", []string{"guest", secret, "target", found}, distrusted},
		} {
			t.Run(transport.transport+" login "+tt.name, func(t *testing.T) {
				r := v.Try(t, script(d, node+` -o new
trap '`+node+` -o delete' EXIT
`+chap(node, "node.session.auth.", tt.values...)+`
`+node+` --login
dd if=$(disk `+iqn+` 0) of=/dev/null bs=64k count=1 iflag=direct
`+node+` --logout`), quick)
				if r.Status != tt.status {
					t.Errorf("iscsiadm ended with %d, want %d", r.Status, tt.status)
				}
			})
		}
	}
	v.Run(t, forgive, quick) // the target closes after its refusals
	for platform, iface := range map[string]string{"linux": "default", "linux-iser": "iser"} {
		t.Run("connect "+platform, func(t *testing.T) {
			commands := d.Manage(t, "connect", "--for", platform, "--portal", d.Addr())
			v.Run(t, script(d, fmt.Sprintf("export SECRET=%s TARGET_SECRET=%s\ncat >/run/connect <<'.'\n%s\n.\nbash -eu /run/connect\n", secret, ours, commands)+`
iscsiadm -m session -P 1 | grep -A3 'Target: `+iqn+`'
iscsiadm -m session -P 1 | grep -x '[[:space:]]*Iface Name: `+iface+`'
dd if=$(disk `+iqn+` 0) of=/dev/null bs=64k count=1 iflag=direct
iscsiadm -m node -T `+iqn+` --logout
iscsiadm -m node -T `+iqn+` -o delete
`), quick)
		})
	}
	d.AwaitVars(t, map[string]float64{"sessions": 0, "connections": 0}, 10*time.Second)
}
