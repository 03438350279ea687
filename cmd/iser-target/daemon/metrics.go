package daemon

import (
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/httpd"
	"github.com/iser-target/iser-target/cmd/iser-target/metrics"
)

// metricsConnections are more than those who scrape need.
const metricsConnections = 32

// listenMetrics starts the server of /metrics. Without an address there is none.
func (d *Daemon) listenMetrics(addr string) error {
	if addr == "" {
		return nil
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return fmt.Errorf("metrics server %s: %w", addr, err)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", metrics.Handler(d.node, d.domain))
	d.metrics = httpd.NewServer(mux, nil)
	d.metrics.WriteTimeout = time.Minute
	d.metricsAddr = l.Addr()
	go d.metrics.Serve(httpd.Limit(l, metricsConnections))
	d.log.Info("metrics server", "url", fmt.Sprintf("http://%v/metrics", l.Addr()))
	return nil
}

func (d *Daemon) closeMetrics() {
	if d.metrics != nil {
		d.metrics.Close()
		d.metrics = nil
	}
}
