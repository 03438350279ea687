package httpd

import (
	"context"
	"io"
	"net/http"
)

// Probe returns a handler for probes of load balancers and container runtimes. It answers with the text of check and status 200,
// or with the error and status 503. The context of check is that of the request.
func Probe(check func(ctx context.Context) (text string, err error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Cache-Control", "no-store")
		h.Set("Content-Type", "text/plain; charset=utf-8")
		h.Set("X-Content-Type-Options", "nosniff")
		text, err := check(r.Context())
		if err != nil {
			w.WriteHeader(http.StatusServiceUnavailable)
			text = err.Error()
		}
		io.WriteString(w, text+"\n") // a client that has gone needs no answer
	})
}
