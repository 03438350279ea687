package daemon

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// ask returns the status and the text of /healthz or /readyz.
func (d *Daemon) ask(t *testing.T, path string) (int, string) {
	t.Helper()
	r, err := http.Get(fmt.Sprintf("http://%v%s", d.side[config.KindMetrics].addr, path))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, strings.TrimSuffix(string(b), "\n")
}

// answers checks what a probe answers.
func (d *Daemon) answers(t *testing.T, path string, status int, text string) {
	t.Helper()
	if s, got := d.ask(t, path); s != status || !strings.HasPrefix(got, text) {
		t.Errorf("%s: %d %q, want %d %q", path, s, got, status, text)
	}
}

// Readiness follows the start and a drain, and health does not. A LUN that is missing changes neither.
func TestProbes(t *testing.T) {
	l := &lab{t: t, dir: t.TempDir(), portals: `{listen: "127.0.0.1:0"}`, initiators: `"*"`, more: `metrics: {listen: "127.0.0.1:0"}`}
	l.luns = fmt.Sprintf("{id: 0, backend: memory, size: 1MiB}, {id: 1, backend: file, size: 1MiB, path: %s/absent/disk.img}", l.dir)
	d, err := New(l.doc(), Options{LogTo: t.Output()})
	if err != nil {
		t.Fatal(err)
	}
	l.Daemon = d
	d.answers(t, "/readyz", 503, "starting")
	d.answers(t, "/healthz", 200, "ok")
	d.answers(t, "/", 200, "iser-target\n/metrics ")
	d.answers(t, "/none", 404, "404")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error)
	go func() { done <- d.Run(ctx) }()
	<-d.Ready()
	d.answers(t, "/healthz", 200, "ok")
	d.answers(t, "/readyz", 200, "serving: sessions 0, targets 1, LUNs 2, not ready 1: LUN 1 of "+store)
	s := l.login("host1", store)
	if _, err := d.Drain(t.Context(), time.Minute, ""); err != nil {
		t.Fatal(err)
	}
	d.answers(t, "/readyz", 503, "draining: sessions 1, targets 1, LUNs 2")
	d.answers(t, "/healthz", 200, "ok")
	if c := (&initiator.Command{CDB: cdb.Read16(0, 1), In: make([]byte, 512)}); s.Do(c) != nil { // the unit attention, or the data: it is served
		t.Error("a session is not served while the target drains")
	}
	s.Close()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// A lock that is not released fails both probes within their time, and only one goroutine waits for it, however many ask. An initiator that is
// logged in notices nothing.
func TestProbesOfATargetThatDoesNotAnswer(t *testing.T) {
	l := newLab(t, func(l *lab) { l.more = `metrics: {listen: "127.0.0.1:0"}` })
	s := l.login("host1", store)
	if err := s.Do(&initiator.Command{CDB: cdb.TestUnitReady}); err != nil {
		t.Fatal(err)
	}
	l.mu.Lock()
	const readers = 20
	type answer struct {
		status int
		text   string
	}
	answers := make(chan answer, readers)
	for i := range readers {
		go func() {
			status, text := l.ask(t, []string{"/healthz", "/readyz"}[i%2])
			answers <- answer{status, text}
		}()
	}
	if err := s.Do(&initiator.Command{CDB: cdb.TestUnitReady}); err != nil {
		t.Error(err)
	}
	for range readers {
		if a := <-answers; a.status != 503 || !strings.HasPrefix(a.text, "the target does not answer") {
			t.Errorf("a probe says %d %q", a.status, a.text)
		}
	}
	last := l.pulse.last
	if again := l.pulse.look(func() string { t.Error("a second goroutine waits"); return "" }); again != last {
		t.Error("a second goroutine waits for the lock")
	}
	l.mu.Unlock()
	<-last.done
	l.answers(t, "/healthz", 200, "ok")
	l.answers(t, "/readyz", 200, "serving: sessions 1")
}

// A file that a reload refuses is a metric until a reload or a change is applied.
func TestReloadMetrics(t *testing.T) {
	l := newLab(t, func(l *lab) { l.more = `metrics: {listen: "127.0.0.1:0"}` })
	const ok, at = "config_last_reload_successful", "config_last_reload_success_timestamp_seconds"
	first := l.scrape()
	first.want(t, map[string]float64{ok: 1})
	if age := time.Since(time.UnixMilli(int64(first[at] * 1000))); age < 0 || age > time.Minute {
		t.Errorf("the configuration was applied %v ago", age)
	}
	good, err := os.ReadFile(l.path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(l.path, append(good, "bogus: 1\n"...), 0o600); err != nil {
		t.Fatal(err)
	}
	l.Reload("test")
	testkit.Eventually(t, "a failed reload", func() bool { return l.scrape()[ok] == 0 })
	if l.scrape()[at] != first[at] {
		t.Error("a failed reload counts as applied")
	}
	if err := os.WriteFile(l.path, good, 0o600); err != nil {
		t.Fatal(err)
	}
	l.Reload("test")
	testkit.Eventually(t, "a good reload", func() bool { return l.scrape()[ok] == 1 })
	second := l.scrape()[at]
	if second < first[at] {
		t.Errorf("applied at %v after %v", second, first[at])
	}
	l.applied.fail()
	l.luns += fmt.Sprintf(", {id: 1, backend: file, size: 1MiB, path: %s}", filepath.Join(l.dir, "1.img"))
	l.ok(ChangeOptions{})
	l.scrape().want(t, map[string]float64{ok: 1})
}
