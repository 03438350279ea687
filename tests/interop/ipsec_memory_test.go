package interop_test

import (
	"strings"
	"testing"
)

// The kernel refers to the pages of a LUN in memory, and to those of the page cache, while it sends them (rdma/llp/pages.go). ESP must not encrypt them where they lie: all
// initiators read what was written, again and again, whether their path has ESP or not, and the page cache has it, too.
func TestIPsecLeavesMemory(t *testing.T) {
	for name, tc := range map[string]struct{ backend, prepare, last string }{
		"memory": {"memory, size: 16MiB", "", ""},
		"block": {"block, path: /dev/loop0", "modprobe loop\ntruncate -s 16M /run/lun.img\nlosetup /dev/loop0 /run/lun.img\n", `
[ "$(sha256sum </dev/loop0)" = "$want" ] || echo "the device has other data"`},
	} {
		t.Run(name, func(t *testing.T) {
			v := speedTarget(t, tc.backend, tc.prepare)
			t.Cleanup(func() { v.Run(t, "if [ -e /dev/loop0 ]; then losetup -D; fi\nrm -f /run/random /run/lun.img\n", quick) })
			out := v.Run(t, `
. /run/ipsec.sh
pipes() { ls -l /proc/$(pgrep -x iser-target)/fd | grep -c pipe: || true; }
before=$(pipes)
head -c 16M /dev/urandom >/run/random
dd if=/run/random of=$(device iscsi_tcp 3261) oflag=direct bs=1M status=none
want=$(sha256sum </run/random)
for bs in 64k 1M; do
	for port in 3260 3261; do
		for transport in iscsi_tcp iser; do
			got=$(dd if=$(device $transport $port) iflag=direct bs=$bs status=none | sha256sum)
			[ "$got" = "$want" ] || echo "$bs, $transport, port $port: other data"
		done
	done
done
[ $(pipes) -gt $before ] || echo "the target has sent no pages"
`+tc.last, 4*long)
			if out = strings.TrimSpace(out); out != "" {
				t.Error(out)
			}
		})
	}
}
