package interop_test

import (
	"bytes"
	"compress/gzip"
	"context"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"image/color"
	"image/png"
	"io"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"golang.org/x/crypto/bcrypt"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/interop/harness"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

const dashboardTarget = "iqn.2026-11.io.example:shown"

// picture is the one of docs/dashboard.md; -update takes it again.
const picture = "../../docs/dashboard.png"

// A shown is a target with a dashboard, its load, and a page of Chromium that shows it.
type shown struct {
	*harness.Target
	url string
	// bytes that the initiators have read and written, and commands.
	read, written, commands atomic.Uint64
	ending                  atomic.Bool // a session that has load is ended, or about to be

	page context.Context // of chromedp
	mu   sync.Mutex
	bad  []string // what a page must not do
	urls []string // that it has asked for
}

const stranger = "iqn.2026-11.io.example:stranger"

// show starts all that is shown.
func show(t *testing.T, targets string) *shown {
	t.Helper()
	need(t, "chromium")
	l, err := net.Listen("tcp", "127.0.0.1:0") // a target that is started again must have the address it had
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close()
	s := &shown{url: "http://" + addr + "/", Target: harness.Config{
		Targets: targets,
		More: `
dashboard: {listen: "` + addr + `"}
drain: 1s # nobody logs out when asked
`,
	}.Start(t)}
	s.loadISER(t, "iqn.2026-11.io.example:host-iser")
	s.loadTCP(t, "iqn.2026-11.io.example:host-tcp")
	s.refused(t, `iqn.2026-11.io.example:<b id=markup>`)
	s.refused(t, stranger)
	s.browse(t)
	return s
}

// Chromium shows what the initiators do, and what is done to them.
func TestDashboard(t *testing.T) {
	deleted := filepath.Join(t.TempDir(), "deleted.img")
	s := show(t, `
  - name: `+dashboardTarget+`
    initiators: ["iqn.2026-11.io.example:host*"]
    luns:
      - {id: 0, backend: memory, size: 64MiB}
      - {id: 1, backend: memory, size: 32MiB}
      - {id: 2, backend: file, path: /nonexistent/missing.img, size: 1GiB}
      - {id: 3, backend: file, path: `+deleted+`, size: 8MiB}
`)
	if err := os.Remove(deleted); err != nil {
		t.Fatal(err)
	}
	s.eventually(t, "sessions", `sessions`, func(text string) error {
		return lacks(text, "host-iser", "iSER", "host-tcp", "TCP", "LUN 0–3")
	})
	s.eventually(t, "the LUN that is not ready", `luns`, func(text string) error {
		return lacks(text, "LUN 2", "not ready", "missing.img: open: no such file or directory", "64.0 MiB", "1.00 GiB")
	})
	s.eventually(t, "the LUN whose file was deleted", `luns`, func(text string) error {
		return lacks(text, "LUN 3", "orphaned", "since ", "the file was deleted or renamed", "ready")
	})
	s.eventually(t, "health", `health`, func(text string) error { return lacks(text, "1 LUN not ready, 1 LUN not healthy") })
	s.alarm(t, "bad", "(2) iser-target 127.0.0.1:", "icon-bad.svg")
	s.eventually(t, "the LUNs that need attention", "trouble", func(text string) error { return lacks(text, "LUN 2", "not ready", "LUN 3", "orphaned") })
	s.eventually(t, "refused logins", `refused`, func(text string) error {
		return lacks(text, stranger, "authorization failure", "<b id=markup>")
	})
	s.eventually(t, "events", `events`, func(text string) error {
		return lacks(text, "…:host-iser logged in to …:shown over iSER from 127.0.0.1:", "…:host-tcp logged in to …:shown over TCP from 127.0.0.1:",
			"Refused the login of …:stranger to …:shown from 127.0.0.1:", "Serving on 127.0.0.1:", " ago")
	})
	if n := s.number(t, `document.querySelectorAll("#markup").length`); n != 0 {
		t.Error("what an initiator says has become markup")
	}
	t.Run("rates", s.rates)
	t.Run("charts", s.charts)
	t.Run("drawer", s.drawer)
	t.Run("filter", s.filter)
	t.Run("narrow", s.narrow)
	if *update {
		s.takePicture(t)
	}
	t.Run("killed session", s.kill)
	s.behaved(t)
	t.Run("restart", s.restart)
}

// Chromium shows the dashboard to a user that logs in, by a web configuration file.
func TestDashboardWithLogin(t *testing.T) {
	need(t, "chromium")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close()
	hash, err := bcrypt.GenerateFromPassword([]byte("first"), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	web := filepath.Join(t.TempDir(), "web.yml")
	if err := os.WriteFile(web, fmt.Appendf(nil, "basic_auth_users: {alice: %s}\n", hash), 0o600); err != nil {
		t.Fatal(err)
	}
	s := &shown{url: "http://alice:first@" + addr + "/", Target: harness.Config{
		Targets: `
  - name: ` + dashboardTarget + `
    initiators: ["*"]
    luns: [{id: 0, backend: memory, size: 64MiB}]
`,
		More: "dashboard: {listen: \"" + addr + "\", web_config: " + web + "}\n",
	}.Start(t)}
	s.loadTCP(t, "iqn.2026-11.io.example:host-tcp")
	s.browse(t)
	s.eventually(t, "sessions", `sessions`, func(text string) error { return lacks(text, "host-tcp", "TCP", "LUN 0") })
}

// lacks returns an error that names the words that are missing in text.
func lacks(text string, words ...string) error {
	for _, w := range words {
		if !strings.Contains(text, w) {
			return fmt.Errorf("no %q", w)
		}
	}
	return nil
}

// refused attempts a login that the target does not accept.
func (s *shown) refused(t *testing.T, name string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), long)
	defer cancel()
	session, err := initiator.Login(ctx, s.address(), initiator.Options{Name: name, Target: dashboardTarget})
	var refusal *initiator.LoginError
	if !errors.As(err, &refusal) {
		if err == nil {
			session.Close()
		}
		t.Fatalf("login as %s: %v, want a refusal", name, err)
	}
}

func (s *shown) address() string { return fmt.Sprintf("127.0.0.1:%d", s.Port) }

// pace is how often each initiator begins a command: so that the load is about the same
// at all times, and the machine has time for a browser.
const pace = 10 * time.Millisecond

// loadISER reads and writes over iSER until t ends, or the session is ended.
func (s *shown) loadISER(t *testing.T, name string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), long)
	defer cancel()
	session, err := initiator.Login(ctx, s.address(), initiator.Options{Name: name, Target: dashboardTarget})
	if err != nil {
		t.Fatal(err)
	}
	const blocks = 128
	for lun := range byte(2) { // which takes the unit attentions
		c := &initiator.Command{LUN: lun}
		for c.Status = 2; c.Status != 0; {
			if err := session.Do(c); err != nil {
				t.Fatal(err)
			}
		}
	}
	out := &initiator.Command{CDB: cdb.Write16(0, blocks), Out: make([]byte, blocks*512)}
	in := &initiator.Command{CDB: cdb.Read16(0, 2*blocks), In: make([]byte, 2*blocks*512)}
	s.load(t, func() error {
		out.LUN = 1 - out.LUN
		if err := session.Do(out); err != nil || out.Status != 0 {
			return fmt.Errorf("WRITE: status %#x, %w", out.Status, err)
		}
		s.written.Add(blocks * 512)
		if err := session.Do(in); err != nil || in.Status != 0 {
			return fmt.Errorf("READ: status %#x, %w", in.Status, err)
		}
		s.read.Add(2 * blocks * 512)
		s.commands.Add(2)
		return nil
	}, session.Close)
}

// loadTCP reads over TCP until t ends.
func (s *shown) loadTCP(t *testing.T, name string) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	d, err := initiator.Dial(ctx, "tcp", s.address(),
		initiator.Options{Name: name, Target: dashboardTarget, ISID: [6]byte{0, 2, 0x3d, 0, 0, 9}})
	if err != nil {
		t.Fatal(err)
	}
	if err := d.LogIn(nil); err != nil {
		t.Fatal(err)
	}
	const blocks = 16
	cdb := cdb.Read16(0, blocks)
	s.load(t, func() error {
		status, _, data, err := d.Do([8]byte{}, cdb[:], nil, blocks*512)
		if err != nil || status != 0 {
			return fmt.Errorf("READ: status %#x, %w", status, err)
		}
		s.read.Add(uint64(len(data)))
		s.commands.Add(1)
		return nil
	}, d.Close)
}

// load calls do at the pace until t ends. It must not fail before a session is ended.
func (s *shown) load(t *testing.T, do, end func() error) {
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(pace)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
			}
			if err := do(); err != nil {
				if !s.ending.Load() {
					t.Errorf("load: %v", err)
				}
				return
			}
		}
	})
	t.Cleanup(func() {
		close(stop)
		wg.Wait()
		end()
	})
}

// browse opens the page in a new Chromium, which knows no other machine.
func (s *shown) browse(t *testing.T) {
	t.Helper()
	options := append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath("chromium"), chromedp.NoSandbox, chromedp.DisableGPU,
		chromedp.Flag("disable-quic", true), chromedp.Flag("disable-component-update", true),
		chromedp.Flag("host-resolver-rules", "MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"),
		chromedp.WSURLReadTimeout(time.Minute), chromedp.WindowSize(1280, 1000))
	ctx, cancel := chromedp.NewExecAllocator(context.Background(), options...)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewContext(ctx, chromedp.WithErrorf(t.Logf), chromedp.WithListener(s.watch))
	t.Cleanup(func() {
		if err := chromedp.Cancel(ctx); err != nil { // it waits for the end of the browser
			t.Logf("end of Chromium: %v", err)
		}
		cancel()
	})
	s.page = ctx
	if err := chromedp.Do(ctx); err != nil { // the browser ends with the context of this
		t.Fatal(err)
	}
	s.do(t, chromedp.EmulateViewport(1280, 1000), chromedp.Navigate(s.url))
}

// watch takes down what the page does that it must not.
func (s *shown) watch(ev any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch ev := ev.(type) {
	case *network.EventRequestWillBeSent:
		s.urls = append(s.urls, ev.Request.URL)
		if !strings.HasPrefix(ev.Request.URL, s.url) {
			s.bad = append(s.bad, "request to "+ev.Request.URL)
		}
	case *network.EventResponseReceived:
		if ev.Response.Status >= 400 {
			s.bad = append(s.bad, fmt.Sprintf("%s: status %d", ev.Response.URL, ev.Response.Status))
		}
	case *runtime.EventExceptionThrown:
		s.bad = append(s.bad, fmt.Sprintf("exception: %s %+v", ev.ExceptionDetails.Text, ev.ExceptionDetails.Exception))
	case *runtime.EventConsoleAPICalled:
		s.bad = append(s.bad, fmt.Sprintf("console.%s %v", ev.Type, ev.Args))
	case *log.EventEntryAdded:
		s.bad = append(s.bad, fmt.Sprintf("%s: %s %s", ev.Entry.Level, ev.Entry.Text, ev.Entry.URL))
	}
}

// behaved fails t if the page has complained, or gone anywhere but to the target.
func (s *shown) behaved(t *testing.T) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range s.bad {
		t.Error(b)
	}
	asked := strings.Join(s.urls, " ")
	if err := lacks(asked, "/app.js", "/style.css", "/icon.svg", "/api/state"); err != nil {
		t.Errorf("%v among the requests: %s", err, asked)
	}
}

func (s *shown) do(t *testing.T, steps ...chromedp.Action[chromedp.Void]) {
	t.Helper()
	value(t, s, chromedp.Steps(steps...))
}

// value returns the result of an action.
func value[T any](t *testing.T, s *shown, a chromedp.Action[T]) T {
	t.Helper()
	ctx, cancel := context.WithTimeout(s.page, long)
	defer cancel()
	v, err := chromedp.Run(ctx, a)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func (s *shown) text(t *testing.T, id string) string {
	t.Helper()
	return value(t, s, chromedp.Evaluate[string](fmt.Sprintf(`document.getElementById(%q).textContent`, id)))
}

func (s *shown) number(t *testing.T, js string) float64 {
	t.Helper()
	return value(t, s, chromedp.Evaluate[float64](js))
}

// eventually waits until the element of that id is as check requires.
func (s *shown) eventually(t *testing.T, what, id string, check func(text string) error) {
	t.Helper()
	for begun := time.Now(); ; time.Sleep(200 * time.Millisecond) {
		text := s.text(t, id)
		err := check(text)
		if err == nil {
			return
		}
		if time.Since(begun) > quick {
			t.Fatalf("%s: %v; #%s says %q", what, err, id, text)
		}
	}
}

var units = map[string]float64{
	"": 1, "B/s": 1, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "µs": 1e-6, "ms": 1e-3, "s": 1,
}

// quantity parses a number with a unit of the page.
func quantity(text string) (float64, error) {
	number, unit, _ := strings.Cut(text, " ")
	v, err := strconv.ParseFloat(strings.ReplaceAll(number, ",", ""), 64)
	scale, ok := units[unit]
	if err != nil || !ok {
		return 0, fmt.Errorf("%q is no quantity", text)
	}
	return v * scale, nil
}

// rates checks that the rates agree with what the initiators count, and that there is a
// latency.
func (s *shown) rates(t *testing.T) {
	const window = 6 * time.Second // about three samples
	counts := func() [3]float64 {
		return [3]float64{float64(s.read.Load()), float64(s.written.Load()), float64(s.commands.Load())}
	}
	for begun := time.Now(); ; {
		from, at := counts(), time.Now()
		time.Sleep(window)
		to, seconds := counts(), time.Since(at).Seconds()
		var off []string
		for i, id := range []string{"tile-read", "tile-write", "tile-iops"} {
			text := s.text(t, id)
			got, err := quantity(text)
			if want := (to[i] - from[i]) / seconds; err != nil || want == 0 || got < want*0.7 || got > want*1.4 {
				off = append(off, fmt.Sprintf("%s says %q, the initiators count %.0f/s (%v)", id, text, want, err))
			}
		}
		for _, id := range []string{"tile-read-p99", "tile-write-p99"} {
			if p99, err := quantity(s.text(t, id)); err != nil || p99 <= 0 || p99 > 60 {
				off = append(off, fmt.Sprintf("%s: %v s (%v)", id, p99, err))
			}
		}
		if depth := s.number(t, `Number(document.getElementById("tile-depth").textContent)`); !(depth > 0 && depth < 1000) {
			off = append(off, fmt.Sprintf("queue depth %v", depth))
		}
		if off == nil {
			return
		}
		if time.Since(begun) > quick {
			t.Fatal(strings.Join(off, "; "))
		}
		t.Logf("again, the load changes: %s", strings.Join(off, "; "))
	}
}

// charts checks that the charts have lines of several points.
func (s *shown) charts(t *testing.T) {
	for _, curve := range []string{"read", "write", "read50", "read99", "write50", "write99"} {
		js := fmt.Sprintf(`(document.querySelector("path.curve.%s").getAttribute("d").match(/L/g) ?? []).length`, curve)
		for begun := time.Now(); s.number(t, js) < 3; time.Sleep(200 * time.Millisecond) {
			if time.Since(begun) > quick {
				t.Fatalf("the line of %s has %v pieces", curve, s.number(t, js))
			}
		}
	}
	if h := s.number(t, `document.querySelector("path.curve.read").getBBox().height`); h <= 0 {
		t.Errorf("the line of read is %v pixels high", h)
	}
	label := value(t, s,
		chromedp.Evaluate[string](`document.querySelector("#throughput svg").getAttribute("aria-label")`))
	if err := lacks(label, "Read", "Write", "B/s"); err != nil {
		t.Errorf("%v in %q", err, label)
	}
}

// filter checks that the filter leaves what it should.
func (s *shown) filter(t *testing.T) {
	s.view(t, "luns")
	defer s.view(t, "overview")
	s.do(t, chromedp.SendKeys(chromedp.CSS("#luns-find"), "missing"))
	s.eventually(t, "LUNs that match", "luns-count", func(text string) error { return lacks(text, "1 of 4") })
	if n := s.number(t, `document.querySelectorAll("#luns tbody tr:not(.group)").length`); n != 1 {
		t.Errorf("%v LUNs match", n)
	}
	s.do(t, chromedp.SendKeys(chromedp.CSS("#luns-find"), strings.Repeat("\b", len("missing"))))
	s.eventually(t, "all LUNs", "luns-count", func(text string) error {
		if text != "4" {
			return errors.New("not 4")
		}
		return nil
	})
}

// narrow checks that nothing stands over the edge on a telephone.
func (s *shown) narrow(t *testing.T) {
	defer s.view(t, "overview")
	for _, width := range []int64{390, 1280} {
		s.do(t, chromedp.EmulateViewport(width, 1000))
		for _, view := range append(views, oneLUN) {
			s.view(t, view)
			if got := s.number(t, `document.documentElement.scrollWidth`); got > float64(width) {
				t.Errorf("%s is %v pixels wide on %d", view, got, width)
			}
		}
	}
}

// kill checks that a session that is killed disappears from the page.
func (s *shown) kill(t *testing.T) {
	for _, one := range harness.Ask[[]schema.SessionState](t, s.Target, "session", "list") {
		if one.Transport == "iser" {
			s.ending.Store(true)
			s.Manage(t, "session", "kill", strconv.Itoa(int(one.TSIH)), "--reason", "of a test")
		}
	}
	s.eventually(t, "the session that is left", "sessions", func(text string) error {
		if strings.Contains(text, "host-iser") {
			return errors.New("the killed session is there")
		}
		return lacks(text, "host-tcp")
	})
	s.eventually(t, "the event", "events", func(text string) error { return lacks(text, "of a test") })
}

// restart checks a page that stays open while the target restarts: it says that there is no
// answer, and then shows the next process and nothing of the one before.
func (s *shown) restart(t *testing.T) {
	s.Stop(t)
	s.eventually(t, "no target", "health", func(text string) error { return lacks(text, "No answer") })
	s.alarm(t, "bad", "(!) iser-target 127.0.0.1:", "icon-bad.svg")
	if text := s.text(t, "lost"); lacks(text, "The page shows the state at ", "systemctl status iser-target", "journalctl -u iser-target") != nil {
		t.Errorf("the page says %q", text)
	}
	if now := s.number(t, `[...document.querySelectorAll("svg text")].filter((e) => e.textContent === "now" && e.getClientRects().length > 0).length`); now != 0 {
		t.Errorf("%v charts call old numbers those of now", now)
	}
	s.Start(t)
	s.eventually(t, "the target that was started again", "health",
		func(text string) error { return lacks(text, "2 LUNs not ready") }) // the deleted file is missing now
	s.eventually(t, "its events", "events", func(text string) error {
		if strings.Contains(text, "host-") {
			return errors.New("an event of the process before is there")
		}
		return lacks(text, "Serving")
	})
	s.eventually(t, "what to do without a session", "sessions-empty", func(text string) error {
		return lacks(text, "No initiator is logged in.", "iscsiadm -m discovery -t sendtargets -p 10.0.2.2:", "iscsiadm -m node -T "+dashboardTarget+" -p 10.0.2.2:") // the address that is advertised
	})
	if gone := value(t, s, chromedp.Evaluate[bool](`document.getElementById("lost").hidden`)); !gone {
		t.Error("it still says that there is no answer")
	}
}

// views are the tabs of the page.
var views = []string{"overview", "sessions", "luns", "events"}

// oneLUN is the address of the drawer of a LUN.
const oneLUN = "lun/" + dashboardTarget + "/0"

// view shows a view, or an object, by the address in the page.
func (s *shown) view(t *testing.T, name string) {
	t.Helper()
	s.do(t, chromedp.Evaluate[chromedp.Void](fmt.Sprintf(`location.hash = %q; undefined`, name)))
	on := fmt.Sprintf(`!document.getElementById("view-%s")?.hidden && !document.getElementById("drawer").open`, name)
	if strings.Contains(name, "/") {
		on = `document.getElementById("drawer").open && document.getElementById("drawer-facts").children.length > 0`
	}
	for begun := time.Now(); !value(t, s, chromedp.Evaluate[bool](on)); time.Sleep(50 * time.Millisecond) {
		if time.Since(begun) > quick {
			t.Fatalf("#%s is not shown", name)
		}
	}
}

// alarm checks how the pill, the title and the icon of the tab show the state.
func (s *shown) alarm(t *testing.T, class, title, icon string) {
	t.Helper()
	if got := value(t, s, chromedp.Evaluate[string](`document.getElementById("health").className`)); got != "pill "+class {
		t.Errorf("the pill is %q, want %s", got, class)
	}
	if got := value(t, s, chromedp.Evaluate[string](`document.title`)); !strings.HasPrefix(got, title) {
		t.Errorf("the title of the tab is %q, want %q", got, title)
	}
	if got := value(t, s, chromedp.Evaluate[string](`document.getElementById("icon").getAttribute("href")`)); got != icon {
		t.Errorf("the icon of the tab is %s, want %s", got, icon)
	}
}

// drawer checks that a LUN and a session have charts of their own, with the load that the initiators cause, and that the lengths of time can
// be chosen.
func (s *shown) drawer(t *testing.T) {
	defer s.view(t, "overview")
	s.view(t, oneLUN)
	s.eventually(t, "facts", "drawer-facts", func(text string) error { return lacks(text, "memory", "64 MiB", "NAA") })
	for _, curve := range []string{"reads", "writes", "read50", "read99", "write50", "write99", "read", "write", "read_size", "write_size", "errors"} {
		js := fmt.Sprintf(`(document.querySelector("#drawer path.curve.%s").getAttribute("d")?.match(/L/g) ?? []).length`, curve)
		for begun := time.Now(); s.number(t, js) < 3; time.Sleep(200 * time.Millisecond) {
			if time.Since(begun) > quick {
				t.Fatalf("the line of %s of the LUN has %v pieces", curve, s.number(t, js))
			}
		}
	}
	sizes := value(t, s, chromedp.Evaluate[string](`document.querySelector("#own-sizes svg").getAttribute("aria-label")`))
	if err := lacks(sizes, "Write 64.0 KiB"); err != nil { // loadISER writes 128 blocks at a time
		t.Errorf("%v in %q", err, sizes)
	}
	s.do(t, chromedp.Evaluate[chromedp.Void](`{const e = document.getElementById("drawer-span"); e.value = "24h"; e.dispatchEvent(new Event("change"))}; undefined`))
	s.eventually(t, "a day", "own-commands", func(text string) error { return lacks(text, "−24 h", "−4 h") })
	s.do(t, chromedp.Evaluate[chromedp.Void](`{const e = document.getElementById("drawer-span"); e.value = "5m"; e.dispatchEvent(new Event("change"))}; undefined`))
	s.view(t, "sessions")
	s.do(t, chromedp.Evaluate[chromedp.Void](`document.querySelector("#sessions tbody a").click(); undefined`))
	s.eventually(t, "facts of a session", "drawer-facts", func(text string) error { return lacks(text, "Initiator", "iqn.2026-11.io.example:host-", "127.0.0.1:") })
	for begun := time.Now(); s.number(t, `Number(document.querySelector("#own-commands svg").dataset.points)`) < 3; time.Sleep(200 * time.Millisecond) {
		if time.Since(begun) > quick {
			t.Fatal("the session has no points")
		}
	}
	s.do(t, chromedp.Evaluate[chromedp.Void](`document.getElementById("drawer-close").click(); undefined`))
	testkit.Eventually(t, "the closed drawer restores the address", func() bool {
		return value(t, s, chromedp.Evaluate[string](`location.hash`)) == "#sessions"
	})
}

// axe is axe-core 4.14.1 of Deque Systems, which finds barriers for people with disabilities. Its license is MPL-2.0. The file is that of
// "npm pack axe-core", compressed.
//
//go:embed testdata/axe.min.js.gz
var axe []byte

// accessible runs axe-core on all views and the drawer, in both color schemes, at the sizes of a desk and of a phone, and takes a screenshot
// of each.
func (s *shown) accessible(t *testing.T) {
	t.Helper()
	r, err := gzip.NewReader(bytes.NewReader(axe))
	if err != nil {
		t.Fatal(err)
	}
	source, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	s.do(t, chromedp.Evaluate[chromedp.Void](string(source)+"; undefined"))
	defer s.view(t, "overview")
	for _, width := range []int64{1280, 390} {
		for _, scheme := range []string{"light", "dark"} {
			s.do(t, chromedp.EmulateViewport(width, 1000), emulate(scheme))
			for _, view := range append(views, oneLUN) {
				s.view(t, view)
				found := value(t, s, chromedp.Evaluate[[]string](`axe.run({resultTypes: ["violations"]}).then((r) => r.passes.length < 15 ? ["only " + r.passes.length + " rules were checked"] : r.violations.map((v) =>
					v.id + ": " + v.help + ": " + v.nodes.slice(0, 3).map((n) => n.html.slice(0, 200)).join(" | ")))`, chromedp.EvalAwaitPromise))
				for _, v := range found {
					t.Errorf("%s, %d pixels, %s: %s", view, width, scheme, v)
				}
				what, _, _ := strings.Cut(view, "/")
				s.screenshot(t, fmt.Sprintf("%s-%d-%s", what, width, scheme), width)
			}
		}
	}
	s.do(t, chromedp.EmulateViewport(1280, 1000), emulate("light"))
}

// emulate makes the browser prefer a color scheme, and no motion, so that a screenshot shows the final colors.
func emulate(scheme string) chromedp.Action[chromedp.Void] {
	return chromedp.Func(func(ctx context.Context, t *chromedp.Target) error {
		_, err := cdp.Call(ctx, t, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{
			{Name: "prefers-color-scheme", Value: scheme}, {Name: "prefers-reduced-motion", Value: "reduce"}}})
		return err
	})
}

// screenshot takes a picture of what a person sees, and checks that it is not blank. -screenshots keeps it.
func (s *shown) screenshot(t *testing.T, name string, width int64) {
	t.Helper()
	b := value(t, s, chromedp.CaptureScreenshot())
	picture, err := png.Decode(bytes.NewReader(b))
	if err != nil {
		t.Fatalf("screenshot %s: %v", name, err)
	}
	colors, at := map[color.Color]bool{}, picture.Bounds()
	for y := at.Min.Y; y < at.Max.Y; y += 3 {
		for x := at.Min.X; x < at.Max.X; x++ {
			colors[picture.At(x, y)] = true
		}
	}
	if int64(at.Dx()) != width || len(colors) < 32 {
		t.Errorf("screenshot %s: %d pixels wide, %d colors", name, at.Dx(), len(colors))
	}
	if *screenshots != "" {
		if err := os.WriteFile(filepath.Join(*screenshots, name+".png"), b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

var screenshots = flag.String("screenshots", "", "keep the screenshots of the dashboard in this directory")

// With 200 LUNs of 10 targets the page shows what matters, stays quick, does not grow with idle LUNs on a phone, and has no barriers.
func TestDashboardWith200LUNs(t *testing.T) {
	var targets strings.Builder
	for i := range 10 {
		name := dashboardTarget
		if i > 0 {
			name += fmt.Sprint(i)
		}
		fmt.Fprintf(&targets, "\n  - name: %s\n    initiators: [\"iqn.2026-11.io.example:host*\"]\n    luns:\n", name)
		for id := range 20 {
			if i >= 3 && i < 7 && id == 5 {
				fmt.Fprintf(&targets, "      - {id: %d, backend: file, path: /nonexistent/%d.img, size: 1GiB}\n", id, i)
				continue
			}
			fmt.Fprintf(&targets, "      - {id: %d, backend: memory, size: 8MiB}\n", id)
		}
	}
	s := show(t, targets.String())
	s.eventually(t, "health", "health", func(text string) error { return lacks(text, "4 LUNs not ready") })
	s.alarm(t, "bad", "(4) iser-target 127.0.0.1:", "icon-bad.svg")
	s.eventually(t, "the busy LUNs", "luns", func(text string) error {
		return lacks(text, "LUN 0", "LUN 1", "20 LUNs, 2 sessions", "Show 18 idle LUNs", "1 down")
	})
	if got, want := s.number(t, `document.querySelectorAll("#luns tr.group").length`), 10.0; got != want {
		t.Errorf("%v targets, want %v", got, want)
	}
	// Two that are busy, and four that are down.
	if got, want := s.number(t, `document.querySelectorAll("#luns tbody tr:not(.group)").length`), 6.0; got != want {
		t.Errorf("%v rows of LUNs, want %v", got, want)
	}
	if got, err := quantity(value(t, s, chromedp.Evaluate[string](`[...document.querySelectorAll("#luns tr.group")].find((tr) => tr.textContent.includes("2 sessions")).querySelector("[data-label=IOPS]").textContent`))); err != nil || got <= 0 {
		t.Errorf("the total of the busy target is %v (%v)", got, err)
	}
	t.Run("quick", s.quickPage)
	t.Run("phone", s.idleOnAPhone)
	s.accessible(t)
	s.behaved(t)
}

// quickPage measures how long the page takes to show a sample. It says how long that was.
func (s *shown) quickPage(t *testing.T) {
	s.view(t, "luns")
	defer s.view(t, "overview")
	for begun := time.Now(); s.number(t, `document.querySelectorAll("#luns tbody tr:not(.group)").length`) < 200; time.Sleep(100 * time.Millisecond) {
		if time.Since(begun) > quick {
			t.Fatal("the idle LUNs are not shown")
		}
		s.do(t, chromedp.Evaluate[chromedp.Void](`[...document.querySelectorAll(".idle-button")].filter((b) => b.textContent.startsWith("Show")).forEach((b) => b.click());
			document.getElementById("luns-more").click(); undefined`))
	}
	const samples = 6
	times := map[float64]float64{} // duration by start
	for begun := time.Now(); len(times) < samples; time.Sleep(500 * time.Millisecond) {
		if time.Since(begun) > quick {
			t.Fatalf("the page has shown %d samples", len(times))
		}
		m := value(t, s, chromedp.Evaluate[[]float64](`performance.getEntriesByName("show").flatMap((e) => [e.startTime, e.duration])`))
		if len(m) == 2 {
			times[m[0]] = m[1]
		}
	}
	all := slices.Sorted(maps.Values(times))
	t.Logf("the page with %v rows takes %.1f ms to show a sample, at most %.1f ms", s.number(t, `document.querySelectorAll("#luns tbody tr").length`), all[samples/2], all[samples-1])
	if all[samples/2] > 100 { // it does this every 2 s; a few milliseconds on a machine that is not busy
		t.Errorf("the page takes %v ms to show a sample", all)
	}
	s.do(t, chromedp.Evaluate[chromedp.Void](`[...document.querySelectorAll(".idle-button")].filter((b) => b.textContent.startsWith("Hide")).forEach((b) => b.click()); undefined`))
	for begun := time.Now(); s.number(t, `document.querySelectorAll("#luns tbody tr:not(.group)").length`) > 6; time.Sleep(100 * time.Millisecond) {
		if time.Since(begun) > quick {
			t.Fatal("the idle LUNs are not hidden again")
		}
	}
}

// idleOnAPhone checks that more idle LUNs make the page of a phone no longer.
func (s *shown) idleOnAPhone(t *testing.T) {
	s.do(t, chromedp.EmulateViewport(390, 844))
	defer s.do(t, chromedp.EmulateViewport(1280, 1000))
	s.view(t, "luns")
	defer s.view(t, "overview")
	const height = `document.documentElement.scrollHeight`
	before := s.number(t, height)
	for id := 20; id < 40; id++ {
		s.Manage(t, "lun", "create", dashboardTarget+"9", "--id", strconv.Itoa(id), "--backend", "memory", "--size", "1MiB")
	}
	s.eventually(t, "more LUNs", "luns-count", func(text string) error { return lacks(text, "220") })
	s.eventually(t, "more idle LUNs", "luns", func(text string) error { return lacks(text, "Show 40 idle LUNs") })
	if after := s.number(t, height); after > before || after > 3000 {
		t.Errorf("the page is %v pixels high with 220 LUNs, %v with 200", after, before)
	} else {
		t.Logf("on a phone the list of 220 LUNs is %v pixels high", after)
	}
}

// takePicture waits until there is something on the charts.
func (s *shown) takePicture(t *testing.T) {
	for s.number(t, `Number(document.querySelector("#latency svg").dataset.points)`) < 25 {
		time.Sleep(time.Second)
	}
	s.do(t, chromedp.EmulateViewport(1280, 880))
	b := value(t, s, chromedp.CaptureScreenshot())
	if err := os.WriteFile(picture, b, 0o644); err != nil {
		t.Fatal(err)
	}
}
