//go:build !race

package checked

import (
	"bytes"
	"errors"
	"testing"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/protection"
)

// No allocation per call. With the race detector, a sync.Pool drops a part of what it gets.
func TestNoAllocations(t *testing.T) {
	s, _ := openFiles(t, t.TempDir(), "", backend.FileConfig{Size: testSize})
	settle(t, s)
	p := bytes.Repeat([]byte{1}, 64<<10)
	must(t, "WriteAt", s.WriteAt(p, 0))
	pi := openProtected(t, protection.Type1, testSize, 512)
	wire := make([]byte, 64*pi.wireLen())
	must(t, "WriteProtected", pi.WriteProtected(wire, 0, false))
	for name, f := range map[string]func() error{
		"ReadAt":  func() error { return s.ReadAt(p, 0) },
		"WriteAt": func() error { return s.WriteAt(p, 0) },
		"ragged":  func() error { return errors.Join(s.WriteAt(p[:1000], 7), s.ReadAt(p[:1000], 7)) },
		"with protection information": func() error {
			return errors.Join(pi.WriteProtected(wire, 0, false), pi.ReadProtected(wire, 0, protection.CheckNothing), pi.WriteAt(p, 0), pi.ReadAt(p, 0))
		},
		"Zero": func() error { return s.Zero(0, 4096) },
	} {
		if n := testing.AllocsPerRun(200, func() {
			if err := f(); err != nil {
				t.Fatal(err)
			}
		}); n > 0.5 { // the pool may be emptied once
			t.Errorf("%s allocates %v times", name, n)
		}
	}
}
