// Package dashboard serves a page that shows what a target does: sessions, LUNs, load
// and events (docs/dashboard.md). It changes nothing and asks nobody who they are.
//
// A sampler looks at the target every Interval, and works out rates and latencies once
// for all who look; the page asks for the last sample, at /api/state.
package dashboard

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/json"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
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

// What readers may take.
const (
	maxConnections = 64
	maxRows        = 1000 // of one list of an answer
	writeTime      = 30 * time.Second
)

//go:embed page
var files embed.FS

// A Source is the target that is shown.
type Source interface {
	State() schema.State
	Events(since uint64) []schema.Event
}

var _ Source = (*daemon.Daemon)(nil)

// policy is all that the page may do: use its own files, and ask where it comes from.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

// types are those of the files, by extension: what the machine's own table says of them
// does not count.
var types = map[string]string{
	".html": "text/html; charset=utf-8",
	".css":  "text/css; charset=utf-8",
	".js":   "text/javascript; charset=utf-8",
	".svg":  "image/svg+xml",
}

// headers are those of every answer.
var headers = map[string]string{
	"Content-Security-Policy":      policy,
	"Cross-Origin-Opener-Policy":   "same-origin",
	"Cross-Origin-Resource-Policy": "same-origin",
	"Referrer-Policy":              "no-referrer",
	"X-Content-Type-Options":       "nosniff",
	"X-Frame-Options":              "DENY",
}

// Serve serves the dashboard of src by l until end is called, which closes l.
func Serve(src Source, l net.Listener) (end func()) {
	s := newSampler(src)
	server := httpd.NewServer(withHeaders(guard(handler(src, s), l.Addr())), withHeaders(nil))
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

// withHeaders has h answer with the headers; nil: that there are too many connections.
func withHeaders(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for k, v := range headers {
			w.Header().Set(k, v)
		}
		if h == nil {
			http.Error(w, httpd.TooMany(r).Error(), http.StatusServiceUnavailable)
			return
		}
		h.ServeHTTP(w, r)
	})
}

// guard keeps a server on the loopback to those
// who call it by an address or as localhost: a name of others that leads here (DNS
// rebinding) would make this page readable for the page of theirs.
func guard(next http.Handler, addr net.Addr) http.Handler {
	own := false
	if a, err := netip.ParseAddrPort(addr.String()); err == nil {
		own = a.Addr().IsLoopback()
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if own && !isLocal(r.Host) {
			http.Error(w, "this server is called localhost, or by its address", http.StatusMisdirectedRequest)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// isLocal tells whether host, with or without a port, is an address or localhost.
func isLocal(host string) bool {
	u := url.URL{Host: host}
	name := u.Hostname()
	if strings.EqualFold(name, "localhost") {
		return true
	}
	_, err := netip.ParseAddr(name)
	return err == nil
}

// handler answers GET and HEAD.
func handler(src Source, s *sampler) http.Handler {
	mux := http.NewServeMux()
	entries, err := fs.ReadDir(files, "page")
	if err != nil {
		panic(err) // it is compiled in
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
	return mux
}

func serveFile(name string, b []byte) http.HandlerFunc {
	tag := fmt.Sprintf(`"%x"`, sha256.Sum256(b))
	kind := types[path.Ext(name)]
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", kind)
		w.Header().Set("Cache-Control", "no-cache") // ask, every time, whether it is still that
		w.Header().Set("ETag", tag)
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(b))
	}
}

// A query is which part of a sample is asked for.
type query struct {
	after    uint64 // points with numbers above that
	events   uint64 // the same of events
	sessions list
	luns     list
}

// A list is which rows of a list are asked for.
type list struct {
	find string // what a row has to contain
	sort string // a key of orders
	rows int    // at most
}

// parseQuery reads after, events, and find, sort and rows of sessions and luns, as in
// "luns.rows=100".
func parseQuery(raw string) (query, error) {
	q := query{sessions: list{sort: "iops", rows: 25}, luns: list{sort: "iops", rows: 25}}
	values, err := url.ParseQuery(raw)
	if err != nil {
		return q, fmt.Errorf("query: %w", err)
	}
	for key, v := range values {
		if len(v) != 1 {
			return q, fmt.Errorf("query: %s is there %d times", key, len(v))
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
