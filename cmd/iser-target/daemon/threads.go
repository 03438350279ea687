package daemon

import (
	"runtime/debug"

	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/security/limits"
)

const (
	// ownThreads are those of the program without calls of stores: the Go runtime, timers, the log.
	ownThreads = 128
	// leastThreads is the limit that Go sets by itself.
	leastThreads = 10000
)

// setMaxThreads is replaced by tests.
var setMaxThreads = debug.SetMaxThreads

// neededThreads returns how many threads the process has if no store answers. Each call of a store that
// is under way has a thread: those of commands (see package lun/fair), and those of the daemon itself.
func (d *Daemon) neededThreads(cfg *config.Config) int64 {
	_, luns := neededDescriptors(cfg)
	return 2*d.net.limits.BackendCalls.Max() + luns + int64(d.waits.calls) + ownThreads
}

// limitThreads lets the Go runtime have the threads that cfg needs: with too few it ends the process.
func (d *Daemon) limitThreads(cfg *config.Config) {
	setMaxThreads(int(max(d.neededThreads(cfg), leastThreads)))
}

// checkThreads warns if the process may not have the threads that cfg needs. They are needed only when
// many stores hang at a time, so it does not refuse.
func (d *Daemon) checkThreads(cfg *config.Config, may limits.Quantity) {
	need := d.neededThreads(cfg)
	if may.N == 0 || need <= may.N {
		return
	}
	d.log.Warn("too few threads if all stores hang", "needed", need, "allowed", may.N, "by", may.From,
		"limit", d.net.limits.BackendCalls.String(), "hint", "set TasksMax in its systemd unit, or a lower limits.backend_calls")
}
