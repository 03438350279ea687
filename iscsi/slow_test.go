package iscsi

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/lun"
)

// The phases of a slow command add up to its time, and the longest one has its name.
func TestPhasesOfASlowCommand(t *testing.T) {
	for _, tc := range []struct {
		spent  lun.Spent
		waited time.Duration
		want   string
	}{
		{lun.Spent{lun.PhaseReceive: 5, lun.PhaseBackend: 4}, 0, "receive"},
		{lun.Spent{lun.PhaseReceive: 5, lun.PhaseBackend: 40}, 30, "queue"},
		{lun.Spent{lun.PhaseReceive: 5, lun.PhaseBackend: 40}, 10, "backend"},
		{lun.Spent{lun.PhaseBackend: 40}, 50, "queue"}, // two clocks
		{lun.Spent{lun.PhaseReadWait: 7}, 0, "wait"},
		{lun.Spent{lun.PhaseSend: 7}, 0, "send"},
	} {
		c := SlowCommand{Spent: tc.spent, Waited: tc.waited}
		phases, longest := c.Phases()
		sum := time.Duration(0)
		for _, d := range phases {
			sum += d
		}
		if longest != tc.want || sum != tc.spent.Total() {
			t.Errorf("%v: %v, %s; want %s, %v in all", tc, phases, longest, tc.want, tc.spent.Total())
		}
	}
	var b strings.Builder
	c := SlowCommand{Initiator: "i", Target: "t", LUN: 3, Command: "WRITE(10)", LBA: 8, Blocks: 16, Bytes: 8192, Took: time.Second, Spent: lun.Spent{lun.PhaseSend: time.Second}, Lost: 9}
	c.Log(slog.New(slog.NewTextHandler(&b, nil)))
	for _, want := range []string{"initiator=i", "lun=3", `command=WRITE(10)`, "lba=8", "blocks=16", "bytes=8192", "slow_phase=send", "send=1s", "queue=0s", "not_logged=9"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %s in %s", want, b.String())
		}
	}
}

// Slow commands that nobody reads cost no memory, and hold up no other.
func TestSlowCommandsThatNobodyReads(t *testing.T) {
	nd := NewNode(Options{})
	nd.WatchSlow(1)
	c := &conn{node: nd, sess: &session{node: nd}}
	for range maxSlow + 10 {
		(&Task{conn: c, cmd: lun.Command{CDB: make([]byte, 16)}}).noteSlow(time.Second)
	}
	for range maxSlow {
		<-nd.SlowCommands()
	}
	(&Task{conn: c, cmd: lun.Command{CDB: make([]byte, 16)}}).noteSlow(time.Second)
	if last := <-nd.SlowCommands(); last.Lost != 10 || last.Command != "TEST UNIT READY" {
		t.Errorf("%+v", last)
	}
}
