package interop_test

import (
	"strings"
	"testing"
)

// The kernel refers to the pages of a LUN in memory while it sends them (rdma/llp/pages.go). ESP must not encrypt them where they lie: all initiators read
// what was written, again and again, whether their path has ESP or not.
func TestIPsecLeavesMemory(t *testing.T) {
	v := speedTarget(t)
	t.Cleanup(func() { v.Run(t, "rm -f /run/random\n", quick) })
	out := v.Run(t, `
. /run/ipsec.sh
pipes() { ls -l /proc/$(pgrep -x iser-target)/fd | grep -c pipe: || true; }
before=$(pipes)
head -c 16M /dev/urandom >/run/random
dd if=/run/random of=$(device iscsi_tcp 3261) oflag=direct bs=1M status=none
want=$(sha256sum </run/random)
for round in 1 2; do
	for port in 3260 3261; do
		for transport in iscsi_tcp iser; do
			for bs in 64k 1M; do
				got=$(dd if=$(device $transport $port) iflag=direct bs=$bs status=none | sha256sum)
				[ "$got" = "$want" ] || echo "round $round, $transport, port $port, $bs: other data"
			done
		done
	done
done
[ $(pipes) -gt $before ] || echo "the target has sent no pages"
`, 4*long)
	if out = strings.TrimSpace(out); out != "" {
		t.Error(out)
	}
}
