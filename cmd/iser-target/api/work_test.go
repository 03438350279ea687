package api

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// A client waits longer than its limit for a target that works on a change, and tells its user. It does not for one that says
// nothing. Other clients than ours get only the answer.
func TestTargetShowsThatItWorks(t *testing.T) {
	const (
		limit = 300 * time.Millisecond
		long  = schema.ProcessingEvery + limit
	)
	hang := make(chan struct{})
	mux := http.NewServeMux()
	handle := func(pattern string, h func(*Server, http.ResponseWriter, *http.Request) error) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			if err := h(nil, w, r); err != nil {
				writeError(w, err)
			}
		})
	}
	handle("DELETE /v1/sessions/1", value(func(*Server, *http.Request) (any, error) {
		time.Sleep(long)
		return schema.Done{Done: true}, nil
	}))
	handle("DELETE /v1/sessions/2", value(func(*Server, *http.Request) (any, error) {
		time.Sleep(long)
		return nil, invalid("no session")
	}))
	handle("POST /v1/targets/t/luns", func(_ *Server, w http.ResponseWriter, r *http.Request) error {
		return answerUpdates(w, r, func(r *http.Request, out *updateWriter) (*schema.Plan, error) {
			time.Sleep(long) // for its turn
			out.line(schema.ChangeUpdate{Progress: &schema.Progress{Phase: "copying", Done: 1, Total: 1}})
			time.Sleep(2 * limit) // without progress
			return &schema.Plan{Note: "done"}, nil
		})
	})
	handle("DELETE /v1/sessions/3", func(*Server, http.ResponseWriter, *http.Request) error {
		<-hang
		return errors.New("ended")
	})
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := http.Server{Handler: mux}
	go server.Serve(l)
	defer server.Close()
	defer close(hang)

	var notices atomic.Int32
	c := client.New(socket)
	c.Limit(limit, time.Minute)
	c.WhileWaiting(func(time.Duration) { notices.Add(1) })
	if err := c.KillSession(t.Context(), 1, ""); err != nil || notices.Load() != 1 {
		t.Errorf("a change that takes long: %v, %d notices", err, notices.Load())
	}
	var e *schema.Error
	if err := c.KillSession(t.Context(), 2, ""); !errors.As(err, &e) || e.Code != schema.Invalid {
		t.Errorf("a change that fails after long: %v", err)
	}
	steps := 0
	plan, err := c.MakeLUN(t.Context(), "t", schema.LUN{}, schema.Options{}, func(schema.Progress) { steps++ })
	if err != nil || plan.Note != "done" || steps != 1 {
		t.Errorf("a change with progress: %v, %v, %d steps", plan, err, steps)
	}
	begun := time.Now()
	err = c.KillSession(t.Context(), 3, "")
	if !errors.As(err, &e) || e.Code != schema.Unreached || !strings.Contains(e.Message, "has not answered for 300ms") || time.Since(begun) > long {
		t.Errorf("a silent target: %v after %v", err, time.Since(begun))
	}

	informational := 0
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{Got1xxResponse: func(int, textproto.MIMEHeader) error {
		informational++
		return nil
	}})
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}}
	defer transport.CloseIdleConnections()
	for prefer, want := range map[string]int{"": 0, "respond-async": 0, "wait=10, Processing": 2} {
		r, err := http.NewRequestWithContext(ctx, http.MethodDelete, "http://t/v1/sessions/1", nil)
		if err != nil {
			t.Fatal(err)
		}
		if prefer != "" {
			r.Header.Set("Prefer", prefer)
		}
		informational = 0
		resp, err := (&http.Client{Transport: transport}).Do(r)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK || informational != want {
			t.Errorf("Prefer %q: status %d after %d informational ones, want %d", prefer, resp.StatusCode, informational, want)
		}
	}
}
