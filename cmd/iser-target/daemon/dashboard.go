package daemon

import (
	"errors"
	"fmt"
	"net"
)

// listenDashboard starts the server of the dashboard. Without an address there is none.
func (d *Daemon) listenDashboard(addr string) error {
	if addr == "" {
		return nil
	}
	if d.serveDashboard == nil {
		return fmt.Errorf("dashboard %s: %w", addr, errors.New("this program has none"))
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return fmt.Errorf("dashboard %s: %w", addr, err)
	}
	d.dashboardAddr = l.Addr()
	d.endDashboard = d.serveDashboard(d, l)
	d.log.Info("dashboard", "url", fmt.Sprintf("http://%v/", l.Addr()))
	return nil
}

func (d *Daemon) closeDashboard() {
	if d.endDashboard != nil {
		d.endDashboard()
		d.endDashboard = nil
	}
}
