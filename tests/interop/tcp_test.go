package interop_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/interop/harness"
)

// open-iscsi over plain TCP, on the port that serves iSER: with and without
// digests and CHAP, one-way and mutual. Each fio has one block size: where they are
// mixed fio 3.33 may go round twice, and then wrongly finds bad seeds, on any file
// (its pull request 1522).
func TestTCP(t *testing.T) {
	v := boot(t)
	need(t, "fio")
	const iqn = "iqn.2026-11.io.example:tcp"
	d := harness.Start(t, `
  - name: `+iqn+`
    initiators: ["*"]
    luns:
      - {id: 0, backend: memory, size: 64MiB}
  - name: `+iqn+`.chap
    initiators: ["*"]
    auth:
      method: chap
      users: [{name: guest, secret: "guest-secret-0123"}]
      mutual: {name: target, secret: "target-secret-012"}
    luns:
      - {id: 0, backend: memory, size: 64MiB}
`)
	set := func(name, value string) string {
		return fmt.Sprintf("iscsiadm -m node -T $IQN -p $PORTAL -I default -o update -n '%s' -v '%s'\n", name, value)
	}
	chap := set("node.session.auth.authmethod", "CHAP") + set("node.session.auth.username", "guest") +
		set("node.session.auth.password", "guest-secret-0123")
	digests := set("node.conn[0].iscsi.HeaderDigest", "CRC32C") + set("node.conn[0].iscsi.DataDigest", "CRC32C")
	for _, tt := range []struct{ name, iqn, set string }{
		{"plain", iqn, ""},
		{"digests", iqn, digests},
		{"CHAP", iqn + ".chap", chap},
		{"mutual CHAP and digests", iqn + ".chap", chap + digests + set("node.session.auth.username_in", "target") +
			set("node.session.auth.password_in", "target-secret-012")},
	} {
		t.Run(tt.name, func(t *testing.T) {
			v.Run(t, script(d, `
IQN=`+tt.iqn+`
modprobe iscsi_tcp
iscsiadm -m discovery -t st -p $PORTAL -I default
`+tt.set+`
iscsiadm -m node -T $IQN -p $PORTAL -I default --login
iscsiadm -m session -P 1 | grep 'Iface Transport: tcp'
d=$(disk $IQN 0)
for bs in 4k 256k; do
	fio --filename=$d --direct=1 --ioengine=libaio --rw=randrw --bs=$bs --iodepth=16 --size=8m \
		--verify=crc32c --verify_fatal=1 --randrepeat=0 --output-format=terse --terse-version=3 --name=tcp
done
iscsiadm -m node -T $IQN -p $PORTAL -I default --logout
iscsiadm -m node -T $IQN -p $PORTAL -I default -o delete`), long)
		})
	}
	t.Run("wrong secret", func(t *testing.T) {
		r := v.Try(t, script(d, `
IQN=`+iqn+`.chap
iscsiadm -m discovery -t st -p $PORTAL -I default
`+chap+set("node.session.auth.password", "guest-secret-0124")+`
iscsiadm -m node -T $IQN -p $PORTAL -I default --login`), quick)
		if r.Status != 24 { // ISCSI_ERR_LOGIN_AUTH_FAILED
			t.Errorf("iscsiadm ended with %d, want 24", r.Status)
		}
		v.Run(t, forgive, quick) // the target closes after its refusal
	})
	d.AwaitVars(t, map[string]float64{"sessions": 0, "connections": 0}, 10*time.Second)
}
