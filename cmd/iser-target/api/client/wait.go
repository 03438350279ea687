package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"sync"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// errSilent ends a request whose target shows no sign of life.
var errSilent = errors.New("the target is silent")

// A wait is the time from a request to the end of its answer. It ends the request if the target shows no sign of life
// for a limit: a status 1xx, the header of the answer, or bytes of it.
type wait struct {
	c      *Client
	method string
	ctx    context.Context // of the request
	cancel context.CancelCauseFunc
	begun  time.Time

	mu        sync.Mutex
	timer     *time.Timer
	limit     time.Duration // 0: none
	what      string        // the target did not do for the limit
	connected bool
	signs     int  // how often the target has shown that it works on the request
	noticed   bool // Client.waiting was called
}

// watch begins a wait for the answer to a request of that method. The caller calls stop at the end.
func (c *Client) watch(ctx context.Context, method string) *wait {
	w := &wait{c: c, method: method, begun: time.Now(), limit: c.limit, what: "has not answered"}
	ctx, w.cancel = context.WithCancelCause(ctx)
	w.ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GotConn: func(httptrace.GotConnInfo) {
			w.mu.Lock()
			w.connected = true
			w.mu.Unlock()
		},
		Got1xxResponse: func(int, textproto.MIMEHeader) error {
			w.sign()
			return nil
		},
	})
	if w.limit > 0 {
		w.timer = time.AfterFunc(w.limit, func() { w.cancel(errSilent) })
	}
	return w
}

// stop ends the wait, and the request if its answer is not complete.
func (w *wait) stop() {
	w.mu.Lock()
	if w.timer != nil {
		w.timer.Stop()
	}
	w.mu.Unlock()
	w.cancel(nil)
}

// heard notes a sign of life.
func (w *wait) heard() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.timer != nil && w.limit > 0 && w.timer.Stop() { // else it is over
		w.timer.Reset(w.limit)
	}
}

// sign notes that the target works on the request.
func (w *wait) sign() {
	w.mu.Lock()
	w.signs++
	took := time.Since(w.begun)
	notice := w.c.waiting != nil && !w.noticed && w.limit > 0 && took >= w.c.limit
	w.noticed = w.noticed || notice
	if w.limit > 0 {
		w.limit = max(w.limit, 3*schema.ProcessingEvery)
	}
	w.mu.Unlock()
	w.heard()
	if notice {
		w.c.waiting(took)
	}
}

// expect changes the limit, and what the target did not do when it is over. 0 is none.
func (w *wait) expect(limit time.Duration, what string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.limit, w.what = limit, what
	switch {
	case w.timer != nil && !w.timer.Stop() || w.ctx.Err() != nil: // it is over
	case limit > 0:
		w.timer = time.AfterFunc(limit, func() { w.cancel(errSilent) })
	default:
		w.timer = nil
	}
}

// silent ends the request because the target has shown no sign of life for that time.
func (w *wait) silent(d time.Duration) {
	w.mu.Lock()
	w.limit = d
	w.mu.Unlock()
	w.cancel(errSilent)
}

// fail returns the error of the request, which has failed with err.
func (w *wait) fail(err error) error {
	silent := context.Cause(w.ctx) == errSilent
	if !silent && !errors.Is(err, context.DeadlineExceeded) {
		return w.c.unreached(w.method, err)
	}
	w.mu.Lock()
	limit, what, connected, signs := w.limit, w.what, w.connected, w.signs
	w.mu.Unlock()
	took := limit
	if past := time.Since(w.begun); !silent && (signs > 0 || limit == 0 || past < limit) { // else the caller has the same limit
		took = roughly(past)
	}
	hint := "check whether the process of the target hangs (systemctl status iser-target), or allow more time with --timeout"
	if w.method != http.MethodGet {
		hint = "the change may have been made; check with list or show whether it was. Allow more time with --timeout"
	}
	if silent {
		err = context.DeadlineExceeded
	}
	e := &schema.Error{Code: schema.Unreached, Hint: hint, Cause: err}
	switch {
	case !connected:
		e.Message = fmt.Sprintf("cannot connect to the target at %s within %v", w.c.where, took)
		e.Hint = "check whether it runs, and whether a firewall drops packets to it, or allow more time with --timeout"
	case !silent && signs > 0:
		e.Message = fmt.Sprintf("the target at %s still works on the change after %v", w.c.where, took)
	case signs > 0 && what == "has not answered":
		e.Message = fmt.Sprintf("the target at %s began the change, but showed no sign of life for %v", w.c.where, took)
	case what == "has not answered":
		e.Message = fmt.Sprintf("the target at %s accepted the connection, but has not answered for %v", w.c.where, took)
	default:
		e.Message = fmt.Sprintf("the target at %s %s for %v", w.c.where, what, took)
	}
	return e
}

// roughly returns d for people.
func roughly(d time.Duration) time.Duration {
	if d < time.Second {
		return d.Round(time.Millisecond)
	}
	return d.Round(100 * time.Millisecond)
}

// A heardBody is the body of an answer that calls heard after each Read.
type heardBody struct {
	io.ReadCloser
	heard func()
}

// Read implements io.Reader.
func (b *heardBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if n > 0 {
		b.heard()
	}
	return n, err
}
