package tcp

import (
	"net"
	"testing"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
)

// A watcher sees what is read from a connection, and where Unread says that PDUs begin.
type watcher struct {
	net.Conn
	c            *Conn
	got          []byte
	begins       map[int]bool
	ahead, later int // how often there were unread octets, and rest was not 0
}

func (w *watcher) Read(p []byte) (int, error) {
	n, err := w.Conn.Read(p)
	if w.c != nil && n > 0 {
		unread, rest := w.c.Unread()
		w.begins[len(w.got)-len(unread)+rest] = true
		w.ahead += min(len(unread), 1)
		w.later += min(rest, 1)
	}
	w.got = append(w.got, p[:n]...)
	return n, err
}

// Wherever Unread says that a PDU begins, one does: among commands, immediate data that is
// longer than the window, and Data-Out.
func TestUnread(t *testing.T) {
	for _, digests := range []bool{false, true} {
		w := &watcher{begins: map[int]bool{}}
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
		for at < len(w.got) {
			begins[at] = true
			h := pdu.BHS(w.got[at:][:pdu.BHSLen])
			login = login && h.Opcode() == pdu.LoginReq
			n := pdu.BHSLen + h.TotalAHSLength() + pdu.Padded(h.DataSegmentLength())
			if digests && !login {
				n += digestLen * (1 + min(h.DataSegmentLength(), 1))
			}
			at += n
		}
		begins[at] = true
		for at := range w.begins {
			if !begins[at] {
				t.Errorf("octet %d is no beginning", at)
			}
		}
		if len(w.begins) < 100 || w.ahead < 20 || w.later < 100 {
			t.Errorf("%d beginnings, %d with octets unread, %d with a rest", len(w.begins), w.ahead, w.later)
		}
	}
}
