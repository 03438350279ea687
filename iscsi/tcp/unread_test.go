package tcp

import (
	"net"
	"testing"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/testkit"
)

// Where Unread reports that a PDU begins, one does: among commands, immediate data that is longer than the
// window, and Data-Out.
func TestUnread(t *testing.T) {
	for _, digests := range []bool{false, true} {
		w := &testkit.Watcher{Begins: map[int]bool{}}
		t.Run(map[bool]string{false: "plain", true: "digests"}[digests], func(t *testing.T) {
			tg := startTarget(t, func(tg *target, o *iscsi.Options) {
				o.Limits.FirstBurstLength = 256 << 10
				tg.wrap = func(nc net.Conn) net.Conn {
					w.Conn = nc
					return w
				}
			})
			keys := []string{"MaxBurstLength=262144", "FirstBurstLength=131072"}
			if digests {
				keys = append(keys, "HeaderDigest=CRC32C", "DataDigest=CRC32C")
			}
			c := tg.login(t, keys...)
			for range 20 {
				c.writeAll(0, random(200<<10), 0, 100000, 262144)
				c.writeAll(0, random(160<<10), 4096, 65536, 262144)
				c.writeAll(0, random(128<<10), 100<<10, 5000, 262144)
				c.read(0, 8, 262144)
			}
		})
		if t.Failed() {
			return
		}
		begins := map[int]bool{}
		at, login := 0, true
		for at < len(w.Got) {
			begins[at] = true
			h := pdu.BHS(w.Got[at:][:pdu.BHSLen])
			login = login && h.Opcode() == pdu.LoginReq
			n := pdu.BHSLen + h.TotalAHSLength() + pdu.Padded(h.DataSegmentLength())
			if digests && !login {
				n += digestLen * (1 + min(h.DataSegmentLength(), 1))
			}
			at += n
		}
		begins[at] = true
		for at := range w.Begins {
			if !begins[at] {
				t.Errorf("byte %d is no beginning", at)
			}
		}
		if len(w.Begins) < 100 || w.Ahead < 20 || w.Later < 100 {
			t.Errorf("%d beginnings, %d with bytes unread, %d with a rest", len(w.Begins), w.Ahead, w.Later)
		}
	}
}
