package daemon

import (
	"bytes"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// A file that fills beyond the threshold of its LUN notifies its initiator and the operator, once, without a look of the I/O
// path. The neighbor without thresholds hears nothing. A change of the threshold disturbs no session.
func TestThresholdOfAFile(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	base := l.luns
	l.luns = base + ", " + l.disk(1, "disk.img", ", threshold_used: 128KiB")
	l.ok(ChangeOptions{})
	s := l.login("host1", store)
	attentions(t, s, 0)
	attentions(t, s, 1)
	write := func(lba uint64, blocks int) {
		t.Helper()
		c := &initiator.Command{LUN: 1, CDB: cdb.Write16(lba, uint32(blocks)), Out: bytes.Repeat([]byte{1}, 512*blocks)}
		if got := do(t, s, c); got != "" {
			t.Fatalf("WRITE: %s", got)
		}
		if got := do(t, s, &initiator.Command{LUN: 1, CDB: [16]byte{0x35}}); got != "" { // the blocks are allocated
			t.Fatalf("SYNCHRONIZE CACHE: %s", got)
		}
	}
	events := func() (n int) {
		for _, e := range l.Events(0) {
			if strings.Contains(e.Text, "threshold of used space") {
				n++
			}
		}
		return n
	}
	threshold := func(limit int64, reached bool) {
		t.Helper()
		v := l.lunState(1).Space
		if v == nil || !slices.Equal(v.Thresholds, []schema.ThresholdState{{Threshold: "used", Limit: limit, Reached: reached}}) {
			t.Errorf("space %+v, want a threshold of %d, reached %v", v, limit, reached)
		}
	}
	write(0, 64)
	l.lookAtLUNs()
	threshold(128<<10, false)
	write(64, 256)
	for range 3 {
		l.lookAtLUNs()
	}
	threshold(128<<10, true)
	if v := l.lunState(1).Space; v.Used < 160<<10 || v.Available == 0 {
		t.Errorf("space %+v", v)
	}
	if got := attentions(t, s, 1); got != "38/07" {
		t.Errorf("unit attentions %q, want 38/07", got)
	}
	if got := attentions(t, s, 0); got != "" {
		t.Errorf("unit attentions of the neighbor: %q", got)
	}
	if n := events(); n != 1 {
		t.Errorf("%d events, want 1", n)
	}

	l.luns = base + ", " + l.disk(1, "disk.img", ", threshold_used: 512KiB")
	for _, step := range l.ok(ChangeOptions{}).Steps {
		if len(step.Disturbs) > 0 {
			t.Errorf("the change disturbs %q", step.Disturbs)
		}
	}
	l.lookAtLUNs()
	threshold(512<<10, false)
	if got := attentions(t, s, 1); got != "2a/01" { // the default of the mode page
		t.Errorf("unit attentions %q, want 2a/01", got)
	}
	if n := events(); n != 2 {
		t.Errorf("%d events, want 2: it is no longer reached", n)
	}
	if got := l.lunState(0).Space; got == nil || len(got.Thresholds) != 0 {
		t.Errorf("space of the neighbor on memory: %+v", got)
	}

	// The keys are refused where the space is not known.
	l.luns = base + ", {id: 2, backend: block, path: " + filepath.Join(l.dir, "x") + ", threshold_used: 1MiB}"
	if _, err := l.apply(ChangeOptions{}); err == nil || !strings.Contains(err.Error(), "threshold_used: cannot be set for backend block") {
		t.Errorf("threshold of a block device: %v", err)
	}
	l.luns = base + ", " + l.disk(1, "disk.img", ", threshold_used: 2MiB")
	if _, err := l.apply(ChangeOptions{}); err == nil || !strings.Contains(err.Error(), "threshold_used: must be at most size, 1MiB, not 2MiB") {
		t.Errorf("threshold beyond the size: %v", err)
	}
	l.luns = base + ", " + l.disk(1, "disk.img", ", threshold_available: 1KiB")
	if _, err := l.apply(ChangeOptions{}); err == nil || !strings.Contains(err.Error(), "threshold_available: must be at least 64KiB") {
		t.Errorf("small threshold: %v", err)
	}
}
