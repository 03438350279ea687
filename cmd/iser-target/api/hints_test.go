package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/config"
)

// TestHints: what the system does not let the target do has a hint of its own, also where
// the configuration file is what it is about.
func TestHints(t *testing.T) {
	dir := t.TempDir()
	_, missing := config.ReadFile(dir + "/none.yaml")
	for _, tc := range []struct {
		err  error
		code Code
		hint string
	}{
		{&os.PathError{Op: "open", Path: "/x/y", Err: unix.ENOENT}, Failed, "has to be there"},
		{&os.PathError{Op: "open", Path: "/x/y", Err: unix.EACCES}, Failed, "has to be allowed"},
		{fmt.Errorf("f: %w", &os.PathError{Op: "mkdir", Path: "/x/y", Err: unix.EROFS}), Failed, "has to be allowed"},
		{fmt.Errorf("f: %w", unix.ENOSPC), Failed, "make room"},
		{&os.PathError{Op: "open", Path: "/x/y", Err: unix.EEXIST}, Exists, "give another path"},
		{missing, Invalid, "nothing has changed"},
		{errors.New("what nobody has thought of"), Failed, ""},
	} {
		if e := errorOf(tc.err); e.Code != tc.code || !strings.Contains(e.Hint, tc.hint) || tc.hint == "" && e.Hint != "" {
			t.Errorf("%v: code %s, hint %q; want %s, %q", tc.err, e.Code, e.Hint, tc.code, tc.hint)
		}
	}
}

// TestUnreached tells a socket that nobody serves from one that the user may not use.
func TestUnreached(t *testing.T) {
	c := NewClient("/run/s.sock")
	for err, want := range map[error]string{
		unix.EACCES:       "not allowed to use /run/s.sock",
		unix.ENOENT:       "no target answers on /run/s.sock",
		unix.ECONNREFUSED: "no target answers on /run/s.sock",
	} {
		got := c.unreached(http.MethodGet, &url.Error{Op: "Get", URL: "http://x", Err: &net.OpError{Op: "dial", Net: "unix", Err: os.NewSyscallError("connect", err)}})
		var e *Error
		if !errors.As(got, &e) || e.Code != Unreached || !strings.HasPrefix(e.Message, want) {
			t.Errorf("%v: %v, want %q", err, got, want)
		}
	}
}

// TestUnanswered tells an interrupted command from a target that is gone, and only what
// would have changed something leaves open whether it has.
func TestUnanswered(t *testing.T) {
	c := NewClient("/run/s.sock")
	for _, tc := range []struct {
		err  error
		code Code
		want string
	}{
		{context.Canceled, Failed, "interrupted before the target at /run/s.sock answered"},
		{context.DeadlineExceeded, Unreached, "the target at /run/s.sock has not answered in time"},
		{io.ErrUnexpectedEOF, Unreached, "the target at /run/s.sock went away before it answered: unexpected EOF"},
	} {
		for _, method := range []string{http.MethodGet, http.MethodPost, http.MethodPatch, http.MethodDelete} {
			var e *Error
			got := c.unreached(method, &url.Error{Op: method, URL: "http://x", Err: tc.err})
			if !errors.As(got, &e) || e.Code != tc.code || e.Message != tc.want || strings.Contains(e.Hint, "is not known") != (method != http.MethodGet) {
				t.Errorf("%s, %v: %+v, want %q", method, tc.err, got, tc.want)
			}
		}
	}
}
