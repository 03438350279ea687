package daemon

import (
	"fmt"
	"net"
	"os"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/rdma/llp"
	"github.com/iser-target/iser-target/security/limits"
)

// Linux gives a new descriptor the lowest number that is free. So a descriptor with a high number says
// that all below it are taken, and nobody has to count.

// reservedDescriptors are the last ones, for what must work in a flood of connections: listeners, the
// control socket, the state directory, and files that are open for a moment.
const reservedDescriptors = 64

// limitDescriptors applies limits.descriptors, which cannot be more than the process may open.
func (d *Daemon) limitDescriptors() {
	l := &d.net.limits.Descriptors
	if n := limits.ThisMachine().Files.N; n > 0 && n < l.Max() {
		l.SetMax(n)
	}
	l.Measure(openDescriptors)
	backend.LimitSpares(l.Max() - reservedDescriptors)
	llp.LimitPipes(l.Max() - reservedDescriptors)
}

// fewDescriptors reports whether the connection has one of the last descriptors.
func (d *Daemon) fewDescriptors(nc *net.TCPConn) (few bool) {
	raw, err := nc.SyscallConn()
	if err != nil {
		return false // it is closed
	}
	most := d.net.limits.Descriptors.Max() - reservedDescriptors
	_ = raw.Control(func(fd uintptr) { few = int64(fd) >= most })
	return few
}

// checkDescriptors refuses a configuration that cannot be served with the descriptors of the process,
// and warns if not all connections can.
func (d *Daemon) checkDescriptors(cfg *config.Config) error {
	need, luns := neededDescriptors(cfg)
	most := d.net.limits.Descriptors.Max()
	full := need + int64(cfg.Limits.MaxConnections)
	switch {
	case need > most:
		return fmt.Errorf("descriptors: the configuration needs %d (LUNs %d, portals %d, the rest %d), but the process may open %d. "+
			"Set LimitNOFILE=%d in its systemd unit, or ulimit -n", need, luns, len(cfg.Portals), need-luns-int64(len(cfg.Portals)), most, full)
	case full > most:
		d.log.Warn("too few descriptors for limits.max_connections", "luns", luns, "connections", most-need, "allowed", most,
			"reason", fmt.Sprintf("connections beyond %d are refused; set LimitNOFILE=%d", most-need, full))
	}
	return nil
}

// neededDescriptors returns how many descriptors cfg needs without connections, and how many of these
// the LUNs need.
func neededDescriptors(cfg *config.Config) (need, luns int64) {
	for i := range cfg.Targets {
		for _, l := range cfg.Targets[i].LUNs {
			switch l.Backend {
			case "memory":
			case "rbd":
				luns += 4 // a listener, a connection, and the monitor and the messages of the daemon
			default:
				luns++
			}
		}
	}
	return luns + int64(len(cfg.Portals)) + reservedDescriptors, luns
}

// openDescriptors returns how many descriptors are open, or 0 without /proc.
func openDescriptors() (n int64, by string) {
	dir, err := os.Open("/proc/self/fd")
	if err != nil {
		return 0, ""
	}
	defer dir.Close()
	names, err := dir.Readdirnames(0)
	if err != nil {
		return 0, ""
	}
	return int64(len(names) - 1), "" // without dir
}
