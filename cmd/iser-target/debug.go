package main

import (
	"expvar"
	"net"
	"net/http"
	"net/http/pprof"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/rdma"
)

// debugged is the server whose counts /debug/vars shows; expvar's names are
// those of the process.
var debugged atomic.Pointer[server]

func init() {
	expvar.Publish("iser_target", expvar.Func(func() any {
		if s := debugged.Load(); s != nil {
			return s.vars()
		}
		return nil
	}))
}

// vars is what should be back where it was when all initiators are gone.
func (s *server) vars() map[string]int64 {
	st, rd := s.node.Stats(), rdma.ReadStats()
	return map[string]int64{
		"sessions":        int64(st.Sessions),
		"connections":     int64(st.Connections),
		"tcp_connections": s.conns.Load(),
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

// listenDebug starts the debug server: expvar at /debug/vars, pprof at
// /debug/pprof/.
func (s *server) listenDebug(addr string) error {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.Handle("GET /debug/vars", expvar.Handler())
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	s.debug = &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	s.dbgAddr = l.Addr()
	debugged.Store(s)
	go s.debug.Serve(l)
	return nil
}
