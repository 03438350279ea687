// Package dashboard serves a page that shows the activity of a target: sessions, LUNs, load
// and events (docs/dashboard.md). It is read-only.
//
// A sampler reads the state of the target every Interval, and computes rates and latencies
// once for all readers. The page gets the last sample from /api/state.
package dashboard

import (
	"bytes"
	"context"
	"crypto/sha256"
	"embed"
	"encoding/json"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/daemon"
	"github.com/iser-target/iser-target/cmd/iser-target/httpd"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// Limits of readers.
const (
	maxConnections = 64
	maxRows        = 1000 // of one list of an answer
	writeTime      = 30 * time.Second
)

//go:embed page
var files embed.FS

// A Source is the target that the dashboard shows.
type Source interface {
	State() schema.State
	Cluster() (*schema.ClusterState, error) // fails with an ErrCluster if the target is in no cluster at present
	Events(since uint64) []schema.Event
	Limits() []schema.LimitState
	Health(ctx context.Context) (string, error)
	Readiness(ctx context.Context) (string, error)
}

var _ Source = (*daemon.Daemon)(nil)

// policy lets the page only use its own files and send requests to its own server.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

// types has the media types of the files by extension. The table of the machine is not used.
var types = map[string]string{
	".html": "text/html; charset=utf-8",
	".css":  "text/css; charset=utf-8",
	".js":   "text/javascript; charset=utf-8",
	".svg":  "image/svg+xml",
}

// headers has the headers of every answer.
var headers = map[string]string{
	"Content-Security-Policy":      policy,
	"Cross-Origin-Opener-Policy":   "same-origin",
	"Cross-Origin-Resource-Policy": "same-origin",
	"Referrer-Policy":              "no-referrer",
	"X-Content-Type-Options":       "nosniff",
	"X-Frame-Options":              "DENY",
}

// Serve serves the dashboard of src on l, with the login of w, until end is called, which closes l.
func Serve(src Source, l net.Listener, w *httpd.Web) (end func()) {
	s := newSampler(src)
	server := httpd.NewServer(w.Handler(httpd.Guard(handler(src, s))), nil)
	server.Handler = withHeaders(server.Handler)
	server.WriteTimeout = writeTime
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() { s.run(stop) })
	wg.Go(func() { server.Serve(httpd.Limit(l, maxConnections)) })
	return sync.OnceFunc(func() {
		close(stop)
		server.Close()
		wg.Wait()
	})
}

// withHeaders returns h with the headers added.
func withHeaders(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for k, v := range headers {
			w.Header().Set(k, v)
		}
		h.ServeHTTP(w, r)
	})
}

// handler returns the handler of the files, of /api/state and of /api/history, for GET and HEAD.
func handler(src Source, s *sampler) http.Handler {
	mux := http.NewServeMux()
	entries, err := fs.ReadDir(files, "page")
	if err != nil {
		panic(err) // the files are embedded
	}
	for _, e := range entries {
		b, err := files.ReadFile("page/" + e.Name())
		if err != nil {
			panic(err)
		}
		pattern := "GET /" + e.Name()
		if e.Name() == "index.html" {
			pattern = "GET /{$}"
		}
		mux.HandleFunc(pattern, serveFile(e.Name(), b))
	}
	mux.Handle("GET /healthz", httpd.Probe(src.Health))
	mux.Handle("GET /readyz", httpd.Probe(src.Readiness))
	mux.HandleFunc("GET /api/state", func(w http.ResponseWriter, r *http.Request) {
		q, err := parseQuery(r.URL.RawQuery)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		b, err := json.Marshal(s.answer(q, src.Events(q.events)))
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		w.Write(b)
	})
	mux.HandleFunc("GET /api/history", func(w http.ResponseWriter, r *http.Request) {
		q, err := parseHistoryQuery(r.URL.RawQuery)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		found := s.chart(q)
		if found == nil {
			http.Error(w, q.what()+": not found", http.StatusNotFound)
			return
		}
		b, err := json.Marshal(found)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		w.Write(b)
	})
	return mux
}

// serveFile returns a handler of one file, with its hash as ETag.
func serveFile(name string, b []byte) http.HandlerFunc {
	tag := fmt.Sprintf(`"%x"`, sha256.Sum256(b))
	kind := types[path.Ext(name)]
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", kind)
		w.Header().Set("Cache-Control", "no-cache") // the browser revalidates its copy every time
		w.Header().Set("ETag", tag)
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(b))
	}
}

// A query selects a part of a sample.
type query struct {
	after    uint64 // points with higher numbers
	events   uint64 // events with higher numbers
	sessions list
	luns     list
}

// A list selects rows of a list.
type list struct {
	find string   // text that a row contains, in lower case
	sort string   // one of orders
	rows int      // at most
	open []string // targets whose idle LUNs have rows
}

// maxOpen bounds list.open.
const maxOpen = 100

// parseQuery parses after, events, and find, sort and rows of sessions and luns, as in
// "luns.rows=100", and luns.open, which can be repeated.
func parseQuery(raw string) (query, error) {
	q := query{sessions: list{sort: "iops", rows: 25}, luns: list{sort: "iops", rows: 25}}
	values, err := url.ParseQuery(raw)
	if err != nil {
		return q, fmt.Errorf("query: %w", err)
	}
	for key, v := range values {
		if key == "luns.open" {
			if len(v) > maxOpen {
				return q, fmt.Errorf("query: luns.open is given %d times, more than %d", len(v), maxOpen)
			}
			q.luns.open = v
			continue
		}
		if len(v) != 1 {
			return q, fmt.Errorf("query: %s is given %d times", key, len(v))
		}
		of, what, _ := strings.Cut(key, ".")
		l := map[string]*list{"sessions": &q.sessions, "luns": &q.luns}[of]
		switch {
		case key == "after":
			q.after, err = strconv.ParseUint(v[0], 10, 64)
		case key == "events":
			q.events, err = strconv.ParseUint(v[0], 10, 64)
		case l != nil && what == "find":
			l.find = strings.ToLower(v[0])
		case l != nil && what == "sort" && slices.Contains(orders, v[0]):
			l.sort = v[0]
		case l != nil && what == "rows":
			if l.rows, err = strconv.Atoi(v[0]); err == nil && (l.rows < 0 || l.rows > maxRows) {
				err = fmt.Errorf("not 0 to %d", maxRows)
			}
		default:
			return q, fmt.Errorf("query: %s=%q is unknown", key, v[0])
		}
		if err != nil {
			return q, fmt.Errorf("query: %s: %w", key, err)
		}
	}
	return q, nil
}
