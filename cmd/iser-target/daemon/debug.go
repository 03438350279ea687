package daemon

import (
	"expvar"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/httpd"
	"github.com/iser-target/iser-target/rdma"
)

// debugged is the server whose counts /debug/vars shows; expvar's names are
// those of the process.
var debugged atomic.Pointer[Daemon]

func init() {
	expvar.Publish("iser_target", expvar.Func(func() any {
		if d := debugged.Load(); d != nil {
			return d.vars()
		}
		return nil
	}))
}

// vars is what should be back where it was when all initiators are gone.
func (d *Daemon) vars() map[string]int64 {
	st, rd := d.node.Stats(), rdma.ReadStats()
	return map[string]int64{
		"sessions":        int64(st.Sessions),
		"connections":     int64(st.Connections),
		"tcp_connections": d.conns.Load(),
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

const (
	debugConnections = 16
	// debugTime bounds the answers of the debug server, and with them the profiles and
	// traces, for which net/http/pprof refuses more.
	debugTime = 5 * time.Minute
)

// listenDebug starts the debug server: expvar at /debug/vars, pprof at
// /debug/pprof/. Without an address there is none.
func (d *Daemon) listenDebug(addr string) error {
	if addr == "" {
		return nil
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return fmt.Errorf("debug server %s: %w", addr, err)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /debug/vars", expvar.Handler())
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	d.debug = httpd.NewServer(mux, nil)
	d.debug.WriteTimeout = debugTime
	d.debugAddr = l.Addr()
	debugged.Store(d)
	go d.debug.Serve(httpd.Limit(l, debugConnections))
	return nil
}

func (d *Daemon) closeDebug() {
	if d.debug != nil {
		d.debug.Close()
		d.debug = nil
	}
}
