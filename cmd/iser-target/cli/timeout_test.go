package cli

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spf13/cobra"
)

// argsOf has arguments for each command that asks a target.
var argsOf = map[string][]string{
	"target list": {}, "target show": {"iqn.2026-11.io.example:store"}, "target create": {"iqn.2026-11.io.example:store", "--initiator", "*"},
	"target set": {"iqn.2026-11.io.example:store", "alias=x"}, "target delete": {"iqn.2026-11.io.example:store"},
	"lun list": {}, "config history": {}, "config diff": {}, "config rollback": {}, "config edit": {}, "lun show": {"t", "0"}, "lun stats": {"t", "0"}, "lun create": {"t", "--path", "/x", "--size", "1GiB", "--preallocate"}, "lun delete": {"t", "0"},
	"lun resize": {"t", "0", "2GiB", "--preallocate"}, "lun set": {"t", "0", "read_only=true"}, "lun reset-settings": {"t", "0"},
	"lun recover": {"t", "0"}, "lun scrub": {"t", "0", "--wait"}, "lun clone": {"t", "0", "--path", "/x"},
	"lun snapshot create": {"t", "0", "n"}, "lun snapshot delete": {"t", "0", "n"}, "lun snapshot list": {}, "lun fault": {"t", "0", "--clear"},
	"portal list": {}, "portal create": {"127.0.0.1:3260"}, "portal show": {"127.0.0.1:3260"}, "portal delete": {"127.0.0.1:3260"}, "portal set": {"127.0.0.1:3260", "ipsec=audit"},
	"session list": {}, "session show": {"1"}, "session kill": {"1"},
	"reservation list": {}, "reservation clear": {"t", "0", "--disrupt"},
	"initiator list": {}, "initiator allow": {"t", "*"}, "initiator deny": {"t", "*"},
	"auth user create": {"t", "u", "--secret-file", "/s"}, "auth user list": {"t"}, "auth user delete": {"t", "u"}, "auth user rotate": {"t", "u", "--end"},
	"cluster status": {}, "cluster balance": {}, "cluster config show": {}, "cluster config apply": {"-"}, "cluster handover": {"t", "0", "g"},
	"ipsec status": {}, "limits": {}, "limits set": {"queue_depth=64"},
	"config plan": {"-"}, "config apply": {"-"}, "config export": {},
	"events": {"--follow"}, "top": {"-n", "1"}, "explain": {"--initiator", "iqn.2026-11.io.example:a", "--target", "iqn.2026-11.io.example:store"},
	"bench":    {"iscsi://127.0.0.1:1/iqn.2026-11.io.example:store/0"},
	"selftest": {}, "status": {}, "doctor": {}, "connect": {"t"}, "capture": {"--session", "1", "-w", "-"}, "drain": {}, "upgrade": {},
}

// local are the commands that ask no target.
var local = []string{"context", "config validate", "config schema", "config import", "secret", "docs", "exit-codes", "completion", "help"}

// run executes a command line against the target at socket, and returns what Report prints and the exit code.
func run(t *testing.T, socket string, limit time.Duration, line ...string) (string, int) {
	t.Helper()
	return runDefault(t, socket, append(line, "--timeout", limit.String())...)
}

// runDefault does what run does, without --timeout.
func runDefault(t *testing.T, socket string, line ...string) (string, int) {
	t.Helper()
	root := &cobra.Command{Use: "iser-target", SilenceErrors: true, SilenceUsage: true}
	AddTo(root)
	root.SetOut(io.Discard)
	root.SetErr(io.Discard)
	root.SetIn(strings.NewReader("targets: []\nportals: [{listen: \"127.0.0.1:3260\"}]\n"))
	root.SetArgs(append(slices.Clone(line), "--socket", socket))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var out bytes.Buffer
	code := Report(&out, root.ExecuteContext(ctx))
	if ctx.Err() != nil {
		t.Errorf("%q has no time limit", line)
	}
	return out.String(), code
}

// silentTarget returns a socket that takes connections and says nothing.
func silentTarget(t *testing.T) (socket string) {
	t.Helper()
	socket = filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return socket
}

// remoteCommands returns the command lines of all commands that ask a target.
func remoteCommands(t *testing.T) (lines [][]string) {
	t.Helper()
	root := &cobra.Command{Use: "iser-target"}
	AddTo(root)
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
		lines = append(lines, append(strings.Fields(path), args...))
	}
	walk(root, "")
	if len(lines) != len(argsOf) {
		t.Errorf("%d commands, and arguments for %d", len(lines), len(argsOf))
	}
	return lines
}

// Each command ends within --timeout if the target takes its connection and says nothing.
func TestEachCommandHasATimeLimit(t *testing.T) {
	socket := silentTarget(t)
	var all sync.WaitGroup
	for _, line := range remoteCommands(t) {
		all.Go(func() { // all at one time, so that the limit can be long enough for a busy machine
			text, code := run(t, socket, 2*time.Second, line...)
			if code != ExitUnreachable || !strings.Contains(text, "accepted the connection, but has not answered for ") || !strings.Contains(text, "--timeout") {
				t.Errorf("%q: code %d: %s", line, code, text)
			}
		})
	}
	all.Wait()
	for _, wrong := range []time.Duration{0, -time.Second, 25 * time.Hour} {
		if text, code := run(t, socket, wrong, "lun", "list"); code != ExitUsage || !strings.Contains(text, "--timeout must be") {
			t.Errorf("%v: code %d: %s", wrong, code, text)
		}
	}
}

// Without --timeout, each command ends after 10 s if the target says nothing. The message has what did not answer, for how
// long, and what to do.
func TestEachCommandWaits10sForATarget(t *testing.T) {
	socket := silentTarget(t)
	var all sync.WaitGroup
	for _, line := range remoteCommands(t) {
		all.Go(func() { // all at one time, however few tests may run in parallel
			begun := time.Now()
			text, code := runDefault(t, socket, line...)
			took := time.Since(begun)
			if code != ExitUnreachable || took < timeLimit || took > timeLimit+8*time.Second ||
				!strings.Contains(text, "the target at "+socket+" accepted the connection, but has not answered for 10s\n") || !strings.Contains(text, "llow more time with --timeout.") {
				t.Errorf("%q: code %d after %v: %s", line, code, took, text)
			}
		})
	}
	all.Wait()
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
	if code != ExitUnreachable || !strings.Contains(text, "has not answered for 400ms") || time.Since(begun) < 4*limit {
		t.Errorf("capture: code %d after %v: %s", code, time.Since(begun), text)
	}
}
