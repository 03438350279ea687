package interop_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/interop/harness"
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
func show(t *testing.T) *shown {
	t.Helper()
	need(t, "chromium")
	l, err := net.Listen("tcp", "127.0.0.1:0") // a target that is started again must have the address it had
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close()
	deleted := filepath.Join(t.TempDir(), "deleted.img")
	s := &shown{url: "http://" + addr + "/", Target: harness.Config{
		Targets: `
  - name: ` + dashboardTarget + `
    initiators: ["iqn.2026-11.io.example:host*"]
    luns:
      - {id: 0, backend: memory, size: 64MiB}
      - {id: 1, backend: memory, size: 32MiB}
      - {id: 2, backend: file, path: /nonexistent/missing.img, size: 1GiB}
      - {id: 3, backend: file, path: ` + deleted + `, size: 8MiB}
`,
		More: `
dashboard: {listen: "` + addr + `"}
drain: 1s # nobody logs out when asked
`,
	}.Start(t)}
	if err := os.Remove(deleted); err != nil {
		t.Fatal(err)
	}
	s.loadISER(t, "iqn.2026-11.io.example:host-iser")
	s.loadTCP(t, "iqn.2026-11.io.example:host-tcp")
	s.refused(t, `iqn.2026-11.io.example:<b id=markup>`)
	s.refused(t, stranger)
	s.browse(t)
	return s
}

// Chromium shows what the initiators do, and what is done to them.
func TestDashboard(t *testing.T) {
	s := show(t)
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
	s.eventually(t, "refused logins", `refused`, func(text string) error {
		return lacks(text, stranger, "authorization failure", "<b id=markup>")
	})
	s.eventually(t, "events", `events`, func(text string) error {
		return lacks(text, "login accepted",
			"login refused", stranger)
	})
	if n := s.number(t, `document.querySelectorAll("#markup").length`); n != 0 {
		t.Error("what an initiator says has become markup")
	}
	t.Run("rates", s.rates)
	t.Run("charts", s.charts)
	t.Run("filter", s.filter)
	t.Run("narrow", s.narrow)
	if *update {
		s.takePicture(t)
	}
	t.Run("killed session", s.kill)
	s.behaved(t)
	t.Run("restart", s.restart)
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
		p50, err50 := quantity(s.text(t, "tile-p50"))
		p99, err99 := quantity(s.text(t, "tile-p99"))
		if err := errors.Join(err50, err99); err != nil || p50 <= 0 || p99 < p50 || p99 > 60 {
			off = append(off, fmt.Sprintf("latency %v and %v s (%v)", p50, p99, err))
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
	for _, curve := range []string{"read", "write", "p50", "p99"} {
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
	s.do(t, chromedp.SendKeys(chromedp.CSS("#luns-find"), "missing"))
	s.eventually(t, "LUNs that match", "luns-count", func(text string) error { return lacks(text, "1 of 4") })
	if n := s.number(t, `document.querySelectorAll("#luns tbody tr").length`); n != 1 {
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
	for _, width := range []int64{390, 1280} {
		s.do(t, chromedp.EmulateViewport(width, 1000))
		if got := s.number(t, `document.documentElement.scrollWidth`); got > float64(width) {
			t.Errorf("the page is %v pixels wide on %d", got, width)
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
	s.Start(t)
	s.eventually(t, "the target that was started again", "health",
		func(text string) error { return lacks(text, "2 LUNs not ready") }) // the deleted file is missing now
	s.eventually(t, "its events", "events", func(text string) error {
		if strings.Contains(text, "host-") {
			return errors.New("an event of the process before is there")
		}
		return lacks(text, "serving")
	})
	if gone := value(t, s, chromedp.Evaluate[bool](`document.getElementById("lost").hidden`)); !gone {
		t.Error("it still says that there is no answer")
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
