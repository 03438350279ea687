package iscsi

import (
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/lun"
)

// maxSlow is how many slow commands wait for the reader of Node.SlowCommands. More are left out.
const maxSlow = 256

// slowCommands are the commands that took at least threshold.
type slowCommands struct {
	threshold atomic.Int64 // ns; 0: none is noted
	list      chan SlowCommand
	lost      atomic.Uint64 // that list had no room for
}

// A SlowCommand is a command that ended with a status and took at least the threshold of Node.WatchSlow, from its PDU to
// the end of its response.
type SlowCommand struct {
	Initiator, Target string
	TSIH              uint16
	LUN               uint16
	Command           string // name of SPC or SBC
	LBA, Blocks       uint64 // that it named; 0, 0: none
	Bytes             uint64 // data moved
	Took              time.Duration
	Spent             lun.Spent
	Waited            time.Duration // for its turn at the store, as part of lun.PhaseBackend
	Lost              uint64        // slow commands before this one that nobody had time to read
}

// WatchSlow makes SlowCommands return the commands that take at least threshold, from now on. 0 ends that.
func (nd *Node) WatchSlow(threshold time.Duration) { nd.slow.threshold.Store(int64(threshold)) }

// SlowCommands returns the channel of the slow commands. A command never waits for its reader.
func (nd *Node) SlowCommands() <-chan SlowCommand { return nd.slow.list }

// noteSlow notes that t took so long. It is on the path of I/O, and takes no lock that a logger may hold.
func (t *Task) noteSlow(took time.Duration) {
	s, all := t.conn.sess, &t.conn.node.slow
	id, _ := lun.DecodeLUN(t.cmd.LUN)
	c := SlowCommand{
		Initiator: s.key.initiator, Target: s.key.target, TSIH: s.tsih, LUN: id, Command: lun.CommandName(t.cmd.CDB),
		Bytes: t.cmd.Moved(), Took: took, Spent: t.spent, Waited: t.cmd.Waited(), Lost: all.lost.Swap(0),
	}
	c.LBA, c.Blocks = t.cmd.Extent()
	select {
	case all.list <- c:
	default:
		all.lost.Add(c.Lost + 1)
	}
}

// Phases returns the time that c took in each phase for people, and the name of the longest one: receive, queue (for its
// turn at the store), backend, wait (for data of the initiator) and send.
func (c *SlowCommand) Phases() (phases [5]time.Duration, longest string) {
	names := [5]string{"receive", "queue", "backend", "wait", "send"}
	phases = [5]time.Duration{
		c.Spent[lun.PhaseReceive], min(c.Waited, c.Spent[lun.PhaseBackend]), max(c.Spent[lun.PhaseBackend]-c.Waited, 0),
		c.Spent[lun.PhaseReadWait], c.Spent[lun.PhaseSend],
	}
	most := 0
	for i, d := range phases {
		if d > phases[most] {
			most = i
		}
	}
	return phases, names[most]
}

// Log writes c as one line.
func (c *SlowCommand) Log(l *slog.Logger, extra ...any) {
	p, longest := c.Phases()
	ms := func(d time.Duration) string { return d.Round(10 * time.Microsecond).String() }
	attrs := append(extra, "initiator", c.Initiator, "target", c.Target, "lun", c.LUN, "command", c.Command, "lba", c.LBA, "blocks", c.Blocks, "bytes", c.Bytes,
		"took", ms(c.Took), "slow_phase", longest, "receive", ms(p[0]), "queue", ms(p[1]), "backend", ms(p[2]), "wait", ms(p[3]), "send", ms(p[4]), "tsih", c.TSIH)
	if c.Lost > 0 {
		attrs = append(attrs, "not_logged", c.Lost)
	}
	l.Warn("slow command", attrs...)
}
