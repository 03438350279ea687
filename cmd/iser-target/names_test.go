package main

import (
	"strings"
	"testing"

	"github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A disk that another target has served keeps its names here, and its names do not change under an initiator.
func TestLUNKeepsNames(t *testing.T) {
	s := newStation(t)
	const naa, serial = "60014053333444455556666777788889", "5b1bf6c4-0001"
	s.says(t, cli.ExitOK, "(done)", "lun", "create", "--id", "7", "--backend", "memory", "--size", "1M", "--naa", "naa."+strings.ToUpper(naa), "--serial", serial,
		"--vendor", "LIO-ORG", "--product", "disk7")
	s.says(t, cli.ExitOK, "naa."+naa, "lun", "show", "7")
	s.says(t, cli.ExitUsage, "--naa is that of targets[0].luns", "lun", "create", "--backend", "memory", "--size", "1M", "--naa", naa)
	if l := read[schema.LUNState](t, s, "lun", "show", storeName, "7"); l.NAA != naa || l.Serial != serial || l.Vendor != "LIO-ORG" || l.Product != "disk7" {
		t.Errorf("%+v", l)
	}
	in := s.login(t)
	inquiry := func(page byte) string {
		t.Helper()
		c := &initiator.Command{LUN: 7, CDB: [16]byte{0x12, min(page, 1), page, 0, 255}, In: make([]byte, 255)}
		for c.Status = 2; c.Status != 0; {
			if err := in.Do(c); err != nil {
				t.Fatal(err)
			}
		}
		return string(c.In)
	}
	if got := inquiry(0); !strings.Contains(got, "LIO-ORG disk7           ") {
		t.Errorf("INQUIRY: %q", got)
	}
	if got := inquiry(0x80); !strings.Contains(got, serial) {
		t.Errorf("page 80h: %q", got)
	}
	if got := inquiry(0x83); !strings.Contains(got, "\x01\x03\x00\x10\x60\x01\x40\x53\x33\x34\x44\x45\x55\x56\x66\x67\x77\x78\x88\x89") || !strings.Contains(got, "LIO-ORG "+serial) {
		t.Errorf("page 83h: %q", got)
	}

	// In use: refused, whatever the flags. The session stays.
	for _, flags := range [][]string{{"--dry-run"}, {"--disrupt"}, {"--now"}} {
		s.says(t, cli.ExitRefused, "log them out first", append([]string{"lun", "set", "7", "serial=other"}, flags...)...)
	}
	s.says(t, cli.ExitOK, "(done)", "lun", "set", "0", "--iops", "5000")
	if got := inquiry(0x80); !strings.Contains(got, serial) {
		t.Errorf("page 80h: %q", got)
	}
	in.Close()
	testkit.Eventually(t, "the end of the session", func() bool { return len(read[[]schema.SessionState](t, s, "session", "list")) == 0 })
	s.says(t, cli.ExitOK, "(done)", "lun", "set", "7", "serial=other")
	s.says(t, cli.ExitOK, "other", "lun", "show", "7")
}
