package vm

import (
	"io"
	"slices"
	"strings"
	"testing"
)

func TestConsoleFindsTrouble(t *testing.T) {
	c := console{log: io.Discard}
	c.read(strings.NewReader("" +
		"[    1.448947] AMD-Vi: AMD IOMMUv2 not available on this system - This is not a bug.\r\n" +
		"[    4.574608] siw: module verification failed: tainting kernel\r\n" +
		"[    8.593229] sysrq: Show Blocked State\r\n" +
		"[    8.593300] Call Trace:\r\n" +
		"[    9.000000] WARNING: CPU: 1 PID: 77 at drivers/infiniband/ulp/iser/iser_verbs.c:1 f+0x1/0x2 [ib_iser]\r\n" +
		"[    9.100000] BUG: kernel NULL pointer dereference, address: 0000000000000008\r\n" +
		"[    9.200000] Kernel panic - not syncing: Fatal exception")) // no newline: it came last
	want := []string{
		"[    9.000000] WARNING: CPU: 1 PID: 77 at drivers/infiniband/ulp/iser/iser_verbs.c:1 f+0x1/0x2 [ib_iser]",
		"[    9.100000] BUG: kernel NULL pointer dereference, address: 0000000000000008",
		"[    9.200000] Kernel panic - not syncing: Fatal exception",
	}
	if got := c.trouble(); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := c.trouble(); got != nil {
		t.Errorf("%q are reported again", got)
	}
}

func TestConsoleKeepsTheEnd(t *testing.T) {
	c := console{log: io.Discard}
	c.read(strings.NewReader(strings.Repeat("early\n", 10*tailLines) + strings.Repeat("late\n", tailLines)))
	if got, want := c.end(), strings.TrimSuffix(strings.Repeat("late\n", tailLines), "\n"); got != want {
		t.Errorf("got %d lines, %d of them early, want %d late ones",
			strings.Count(got, "\n")+1, strings.Count(got, "early"), tailLines)
	}
	if n := len(c.tail); n > 2*tailLines {
		t.Errorf("%d lines are kept", n)
	}
}
