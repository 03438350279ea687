package cli

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
)

// argsOf has arguments for each command that asks a target.
var argsOf = map[string][]string{
	"target list": {}, "target show": {"iqn.2026-11.io.example:store"}, "target create": {"iqn.2026-11.io.example:store", "--initiator", "*"},
	"target set": {"iqn.2026-11.io.example:store", "alias=x"}, "target delete": {"iqn.2026-11.io.example:store"},
	"lun list": {}, "lun show": {"t", "0"}, "lun create": {"t", "--path", "/x", "--size", "1GiB", "--preallocate"}, "lun delete": {"t", "0"},
	"lun resize": {"t", "0", "2GiB", "--preallocate"}, "lun set": {"t", "0", "read_only=true"}, "lun reset-settings": {"t", "0"},
	"lun recover": {"t", "0"}, "lun scrub": {"t", "0", "--wait"}, "lun fault": {"t", "0", "--clear"},
	"portal list": {}, "portal add": {"127.0.0.1:3260"}, "portal remove": {"127.0.0.1:3260"}, "portal set": {"127.0.0.1:3260", "ipsec=audit"},
	"session list": {}, "session show": {"1"}, "session kill": {"1"},
	"reservation show": {}, "reservation clear": {"t", "0", "--disrupt"},
	"initiator allow": {"t", "*"}, "initiator deny": {"t", "*"},
	"auth user add": {"t", "u", "--secret-file", "/s"}, "auth user list": {"t"}, "auth user remove": {"t", "u"}, "auth user rotate": {"t", "u", "--end"},
	"ipsec status": {}, "limits": {}, "limits set": {"queue_depth=64"},
	"config plan": {"-"}, "config apply": {"-"}, "config export": {},
	"events": {"--follow"}, "top": {"-n", "1"}, "explain": {"--initiator", "iqn.2026-11.io.example:a", "--target", "iqn.2026-11.io.example:store"},
	"bench":    {"iscsi://127.0.0.1:1/iqn.2026-11.io.example:store/0"},
	"selftest": {}, "doctor": {}, "capture": {"--session", "1", "-w", "-"}, "drain": {}, "upgrade": {},
}

// local are the commands that ask no target.
var local = []string{"context", "config validate", "secret", "docs", "exit-codes", "completion", "help"}

// run executes a command line against the target at socket, and returns what Report prints and the exit code.
func run(t *testing.T, socket string, limit time.Duration, line ...string) (string, int) {
	t.Helper()
	root := &cobra.Command{Use: "iser-target", SilenceErrors: true, SilenceUsage: true}
	AddTo(root)
	root.SetOut(io.Discard)
	root.SetErr(io.Discard)
	root.SetIn(strings.NewReader("targets: []\nportals: [{listen: \"127.0.0.1:3260\"}]\n"))
	root.SetArgs(append(line, "--socket", socket, "--timeout", limit.String()))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var out bytes.Buffer
	code := Report(&out, root.ExecuteContext(ctx))
	if ctx.Err() != nil {
		t.Errorf("%q has no time limit", line)
	}
	return out.String(), code
}

// Each command ends within --timeout if the target takes its connection and says nothing.
func TestEachCommandHasATimeLimit(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	root := &cobra.Command{Use: "iser-target"}
	AddTo(root)
	seen := 0
	var walk func(c *cobra.Command, path string)
	walk = func(c *cobra.Command, path string) {
		for _, sub := range c.Commands() {
			walk(sub, strings.TrimSpace(path+" "+sub.Name()))
		}
		for _, name := range local {
			if path == name || strings.HasPrefix(path, name+" ") {
				return
			}
		}
		args, ok := argsOf[path]
		if !ok {
			if !c.HasSubCommands() {
				t.Errorf("no arguments for %q", path)
			}
			return
		}
		seen++
		t.Run(path, func(t *testing.T) {
			if path == "events" {
				args = nil // with --follow, see TestSilentStreamEnds
			}
			text, code := run(t, socket, 50*time.Millisecond, append(strings.Fields(path), args...)...)
			if code != ExitUnreachable || !strings.Contains(text, "--timeout") {
				t.Errorf("code %d: %s", code, text)
			}
		})
	}
	walk(root, "")
	if seen != len(argsOf) {
		t.Errorf("%d commands, and arguments for %d", seen, len(argsOf))
	}
	for _, wrong := range []time.Duration{0, -time.Second, 25 * time.Hour} {
		if text, code := run(t, socket, wrong, "lun", "list"); code != ExitUsage || !strings.Contains(text, "--timeout must be") {
			t.Errorf("%v: code %d: %s", wrong, code, text)
		}
	}
}

// Work that makes progress is not cut off by --timeout, and work without progress is. A capture of a session without traffic
// lasts as long as the target answers.
func TestTimeLimitIsForProgress(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	const limit = 400 * time.Millisecond
	hang, silent := make(chan struct{}), make(chan struct{})
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/targets/{target}/luns", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/jsonl")
		for range 8 { // twice the limit
			io.WriteString(w, `{"progress": {"phase": "copying", "done": 1, "total": 2}}`+"\n")
			http.NewResponseController(w).Flush()
			time.Sleep(limit / 4)
		}
		select {
		case <-hang:
		case <-r.Context().Done(): // the target removes the file
		}
	})
	mux.HandleFunc("GET /v1/sessions/1/capture", func(w http.ResponseWriter, r *http.Request) {
		http.NewResponseController(w).Flush()
		select {
		case <-hang:
		case <-r.Context().Done():
		}
	})
	mux.HandleFunc("GET /v1/sessions/1", func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-silent:
			select {
			case <-hang:
			case <-r.Context().Done():
			}
		default:
			io.WriteString(w, `{"tsih": 1}`)
		}
	})
	server := http.Server{Handler: mux}
	go server.Serve(l)
	defer server.Close()
	defer close(hang)
	begun := time.Now()
	text, code := run(t, socket, limit, "lun", "create", "iqn.2026-11.io.example:t", "--path", "/x", "--size", "1GiB", "--preallocate")
	if code != ExitUnreachable || !strings.Contains(text, "reported no progress for 400ms") || time.Since(begun) < 2*limit {
		t.Errorf("code %d after %v: %s", code, time.Since(begun), text)
	}
	begun = time.Now()
	time.AfterFunc(4*limit, func() { close(silent) })
	text, code = run(t, socket, limit, "capture", "--session", "1", "-w", filepath.Join(t.TempDir(), "one.pcapng"))
	if code != ExitUnreachable || !strings.Contains(text, "did not answer in time") || time.Since(begun) < 4*limit {
		t.Errorf("capture: code %d after %v: %s", code, time.Since(begun), text)
	}
}
