package client

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"golang.org/x/sys/unix"
)

// The error tells a socket that nobody serves from one that the user may not use.
func TestErrorOfASocket(t *testing.T) {
	c := New("/run/s.sock")
	for err, want := range map[error]string{
		unix.EACCES:       "no access to /run/s.sock",
		unix.ENOENT:       "no target answers on /run/s.sock",
		unix.ECONNREFUSED: "no target answers on /run/s.sock",
	} {
		got := c.unreached(http.MethodGet, &url.Error{Op: "Get", URL: "http://x", Err: &net.OpError{Op: "dial", Net: "unix", Err: os.NewSyscallError("connect", err)}})
		var e *schema.Error
		if !errors.As(got, &e) || e.Code != schema.Unreached || !strings.HasPrefix(e.Message, want) {
			t.Errorf("%v: %v, want %q", err, got, want)
		}
	}
}

// The error tells an interrupted command from a target that is gone. Only requests that
// change something leave open whether they did.
func TestErrorWithoutAnAnswer(t *testing.T) {
	c := New("/run/s.sock")
	for _, tc := range []struct {
		err  error
		code schema.Code
		want string
	}{
		{context.Canceled, schema.Failed, "interrupted before the target at /run/s.sock answered"},
		{io.ErrUnexpectedEOF, schema.Unreached, "the connection to the target at /run/s.sock ended before it answered: unexpected EOF"},
	} {
		for _, method := range []string{http.MethodGet, http.MethodPost, http.MethodPatch, http.MethodDelete} {
			var e *schema.Error
			got := c.unreached(method, &url.Error{Op: method, URL: "http://x", Err: tc.err})
			if !errors.As(got, &e) || e.Code != tc.code || e.Message != tc.want || strings.Contains(e.Hint, "may have been made") != (method != http.MethodGet) {
				t.Errorf("%s, %v: %+v, want %q", method, tc.err, got, tc.want)
			}
		}
	}
}

// A target that sends nothing, not even heartbeats, does not hold up a command forever. One that sends heartbeats does
// not end.
func TestSilentStreamEnds(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	hang := make(chan struct{})
	server := http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, `{"number": 1, "event": "login"}`+"\n")
		for range 20 {
			http.NewResponseController(w).Flush()
			time.Sleep(60 * time.Millisecond)
			io.WriteString(w, "\n")
		}
		http.NewResponseController(w).Flush()
		<-hang
	})}
	go server.Serve(l)
	defer server.Close()
	defer close(hang)
	c := New(socket)
	c.silence = time.Second
	begun, n := time.Now(), 0
	err = c.Events(t.Context(), 0, true, func(schema.Event) error {
		n++
		return nil
	})
	var e *schema.Error
	if !errors.As(err, &e) || e.Code != schema.Unreached || e.Message != "the target at "+socket+" showed no sign of life for 1s" || n != 1 {
		t.Errorf("%d events, error %v", n, err)
	}
	if took := time.Since(begun); took < 1200*time.Millisecond {
		t.Errorf("a stream with heartbeats ended after %v", took)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := c.Events(ctx, 0, false, func(schema.Event) error { return nil }); !errors.As(err, &e) || !strings.Contains(e.Message, "accepted the connection, but has not answered for ") {
		t.Errorf("a list that does not end: %v", err)
	}
}
