package daemon

import (
	"context"

	"github.com/iser-target/iser-target/config"
)

// setLog applies the level of the log, and how long slow commands take.
func (d *Daemon) setLog(l config.Log) {
	d.level.Set(l.SlogLevel())
	d.node.WatchSlow(l.SlowIO)
}

// logSlow logs the slow commands until ctx ends. The gate of the log bounds the lines of each initiator.
func (d *Daemon) logSlow(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case c := <-d.node.SlowCommands():
			c.Log(d.log, eventKey, "slow")
		}
	}
}
