package api

import (
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// A work shows a client that the target works on its request.
type work struct {
	stop func() // ends it; the caller must call it before it writes the answer, and may call it again
}

// showWork sends a status 102 at once, and then every schema.ProcessingEvery, if r asks for that.
func showWork(w http.ResponseWriter, r *http.Request) work {
	if !prefersProcessing(r) {
		return work{func() {}}
	}
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(schema.ProcessingEvery)
		defer tick.Stop()
		for {
			http.NewResponseController(w).SetWriteDeadline(time.Now().Add(writeTime))
			w.WriteHeader(http.StatusProcessing)
			select {
			case <-end:
				return
			case <-tick.C:
			}
		}
	}()
	var once sync.Once
	return work{func() {
		once.Do(func() { close(end) })
		<-ended
	}}
}

// prefersProcessing reports whether the client of r accepts a status 102.
func prefersProcessing(r *http.Request) bool {
	return r.ProtoAtLeast(1, 1) && slices.ContainsFunc(r.Header.Values(schema.PreferHeader), func(v string) bool {
		return slices.ContainsFunc(strings.Split(v, ","), func(p string) bool {
			return strings.EqualFold(strings.TrimSpace(p), schema.PreferProcessing)
		})
	})
}
