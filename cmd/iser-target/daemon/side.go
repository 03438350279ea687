package daemon

import (
	"context"
	"expvar"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/handover"
	"github.com/iser-target/iser-target/cmd/iser-target/httpd"
	"github.com/iser-target/iser-target/cmd/iser-target/metrics"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/rdma"
)

// A sideServer is an HTTP server of the daemon for people and tools, not for initiators.
type sideServer struct {
	key       string // of its section in the configuration
	name      string
	path      string                                      // that the log shows
	at        func(*config.Config) config.WebListener     // an empty address: the server is off
	serve     func(net.Listener, *httpd.Web) (end func()) // nil: the program does not have the server
	log       *slog.Logger
	listeners *handover.Listeners

	web  atomic.Pointer[httpd.Web] // of the server that is on; nil: it has none, or is off
	addr net.Addr                  // where it listens, or listened last
	end  func()                    // nil: it is off
}

// Limits of side servers. Prometheus needs few connections.
const (
	metricsConnections = 32
	metricsTime        = time.Minute
	debugConnections   = 16
	// debugTime bounds an answer, and so also profiles and traces: net/http/pprof
	// refuses longer ones.
	debugTime = 5 * time.Minute
)

// newSideServers returns the side servers by the kinds of changes that move them.
func (d *Daemon) newSideServers(dashboard func(*Daemon, net.Listener, *httpd.Web) (end func())) map[string]*sideServer {
	var serveDashboard func(net.Listener, *httpd.Web) func()
	if dashboard != nil {
		serveDashboard = func(l net.Listener, w *httpd.Web) func() { return dashboard(d, l, w) }
	}
	servers := map[string]*sideServer{
		config.KindMetrics: {
			name: "metrics server", path: "/metrics", log: d.log,
			at: func(c *config.Config) config.WebListener { return c.Metrics },
			serve: func(l net.Listener, w *httpd.Web) func() {
				mux := http.NewServeMux()
				mux.Handle("GET /metrics", metrics.Handler(d.node, d.net.domain, d.net.limits, metrics.Reports{
					Version: d.version, Expiries: d.expiries, IPsec: d.ipsecMetrics, Reload: d.applied.last, Tokens: d.tokens.Counts,
					Polls: d.net.polling.Counts, Cluster: d.clusterMetrics,
				}))
				mux.Handle("GET /healthz", httpd.Probe(d.Health))
				mux.Handle("GET /readyz", httpd.Probe(d.Readiness))
				mux.Handle("GET /{$}", httpd.Probe(func(context.Context) (string, error) {
					return "iser-target\n/metrics  metrics for Prometheus\n/healthz  whether the process answers\n/readyz   whether it serves", nil
				}))
				return serveHTTP(l, w, mux, metricsConnections, metricsTime)
			},
		},
		config.KindDashboard: {
			name: "dashboard", path: "/", log: d.log,
			at:    func(c *config.Config) config.WebListener { return c.Dashboard },
			serve: serveDashboard,
		},
		config.KindDebug: {
			name: "debug server", path: "/debug/vars", log: d.log,
			at: func(c *config.Config) config.WebListener { return config.WebListener{Listen: c.Debug.Listen} },
			serve: func(l net.Listener, _ *httpd.Web) func() {
				return serveHTTP(l, nil, debugMux(), debugConnections, debugTime)
			},
		},
	}
	for kind, s := range servers {
		s.key, s.listeners = kind, &d.listeners
	}
	return servers
}

// listen serves at the address that cfg has for s, and no longer at the one before.
func (s *sideServer) listen(cfg *config.Config) error {
	w, err := s.webOf(cfg)
	if err != nil {
		return err
	}
	return s.open(cfg, w)
}

// webOf returns TLS and login of s by cfg.
func (s *sideServer) webOf(cfg *config.Config) (*httpd.Web, error) {
	w, err := httpd.NewWeb(s.at(cfg).WebConfig, s.log)
	if err != nil {
		return nil, fmt.Errorf("%s.web_config: %w", s.key, err)
	}
	return w, nil
}

// open does what listen does, with w.
func (s *sideServer) open(cfg *config.Config, w *httpd.Web) error {
	s.close()
	addr := s.at(cfg).Listen
	if addr == "" {
		return nil
	}
	if s.serve == nil {
		return fmt.Errorf("%s %s: this program does not have it", s.name, addr)
	}
	l, _, err := s.listeners.Listen(s.name, func() (net.Listener, error) { return net.Listen("tcp", addr) })
	if err != nil {
		return fmt.Errorf("%s %s: %w", s.name, addr, err)
	}
	s.web.Store(w)
	s.addr, s.end = l.Addr(), s.serve(w.Listen(l), w)
	s.log.Info(s.name, "url", fmt.Sprintf("%s://%v%s", w.Scheme(), l.Addr(), s.path))
	return nil
}

// close ends the server, if it is on.
func (s *sideServer) close() {
	if s.end != nil {
		s.end()
		s.end = nil
		s.web.Store(nil)
	}
}

// serveHTTP serves h on l with the login of w, to that many connections at a time. timeout bounds an answer.
func serveHTTP(l net.Listener, w *httpd.Web, h http.Handler, connections int, timeout time.Duration) (end func()) {
	srv := httpd.NewServer(w.Handler(httpd.Guard(h)), nil)
	srv.WriteTimeout = timeout
	go srv.Serve(httpd.Limit(l, connections))
	return func() { srv.Close() }
}

// debugMux serves expvar at /debug/vars and pprof at /debug/pprof/.
func debugMux() *http.ServeMux {
	mux := http.NewServeMux()
	mux.Handle("GET /debug/vars", expvar.Handler())
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	mux.Handle("GET /debug/pprof/mutex", &mutexContention)
	mux.Handle("GET /debug/pprof/block", &blockContention)
	return mux
}

// Vars returns counts that return to their first values when all initiators are gone. The
// program publishes them with expvar.
func (d *Daemon) Vars() map[string]int64 {
	st, rd := d.node.Stats(), rdma.ReadStats()
	return map[string]int64{
		"sessions":        int64(st.Sessions),
		"connections":     int64(st.Connections),
		"tcp_connections": d.net.limits.Connections.Used(),
		"tasks":           int64(st.TasksInFlight),
		"buffers":         int64(st.BuffersOut),
		"buffer_octets":   int64(st.BufferOctets),
		"logins_accepted": int64(st.LoginsAccepted),
		"logins_refused":  int64(st.LoginsRefused),
		"streams":         rd.Conns,
		"stags":           rd.STags,
		"goroutines":      int64(runtime.NumGoroutine()),
	}
}
