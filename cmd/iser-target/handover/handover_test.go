package handover

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// pair returns both ends of a Link.
func pair(t *testing.T) (giver, taker *Link) {
	t.Helper()
	giver, f, err := NewLink()
	if err != nil {
		t.Fatal(err)
	}
	if taker, err = linkOf(f); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		giver.Close()
		taker.Close()
	})
	return giver, taker
}

// next returns the next message, which must be of that kind.
func next(t *testing.T, l *Link, kind string) Message {
	t.Helper()
	m, err := l.Await(time.Now().Add(10 * time.Second))
	if err != nil || m.Kind != kind {
		t.Fatalf("message %+v, %v; want %s", m, err, kind)
	}
	return m
}

// offer runs Offer, and returns its results when it ends.
func offer(l *Link, check func(string) error) func() (*Received, error) {
	type result struct {
		r   *Received
		err error
	}
	done := make(chan result, 1)
	go func() {
		r, err := l.Offer("v2", check)
		done <- result{r, err}
	}()
	return func() (*Received, error) {
		d := <-done
		return d.r, d.err
	}
}

// The files of a State come under their names, more of them than fit into one message.
func TestFilesAndState(t *testing.T) {
	giver, taker := pair(t)
	var document string
	ended := offer(taker, func(text string) error {
		document = text
		return nil
	})
	if m := next(t, giver, Hello); m.Version != "v2" || m.Oldest > Format || m.Newest < Format {
		t.Errorf("hello: %+v", m)
	}
	if err := giver.SendJSON(Prepare, Plan{Format: Format, Document: "portals: []"}); err != nil {
		t.Fatal(err)
	}
	next(t, giver, Ready)
	var s Sender
	defer s.Close()
	const files = 2*maxFiles + 1
	for i := range files {
		f, err := os.Create(filepath.Join(t.TempDir(), "f"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.WriteString(MemoryName("t", i)); err != nil {
			t.Fatal(err)
		}
		s.Add(KindMemory, MemoryName("t", i), int(f.Fd()))
	}
	if err := s.Send(giver, &State{Format: Format, Version: "v1", Document: strings.Repeat("#", 3*maxMessage)}); err != nil {
		t.Fatal(err)
	}
	r, err := ended()
	if err != nil || document != "portals: []" || len(r.Document) != 3*maxMessage {
		t.Fatalf("%+v, %v, document %q", r, err, document)
	}
	defer r.Close()
	n := 0
	err = r.TakeAll(KindMemory, func(name string, f *os.File) error {
		defer f.Close()
		n++
		b, err := io.ReadAll(io.NewSectionReader(f, 0, 100))
		if err != nil || string(b) != name || f.Name() != name {
			t.Fatalf("file %s of %s has %q, %v", f.Name(), name, b, err)
		}
		if flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
			t.Errorf("a program that the taker starts would have the file: %v", err)
		}
		return nil
	})
	if err != nil || n != files || r.Take(KindMemory, MemoryName("t", 0)) != nil {
		t.Errorf("%d files, want %d: %v", n, files, err)
	}
}

// What the taker does not understand ends with its reason at the giver, and what was received is closed.
func TestRefusals(t *testing.T) {
	good := func(string) error { return nil }
	state := func(st State) func(*testing.T, *Link) {
		return func(t *testing.T, l *Link) {
			if err := l.SendJSON(Whole, st); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, tt := range []struct {
		name  string
		plan  any
		check func(string) error
		send  func(*testing.T, *Link)
		want  string
	}{
		{name: "format of the plan", plan: Plan{Format: Format + 1}, want: "format 2"},
		{name: "configuration", plan: Plan{Format: Format}, check: func(string) error { return errors.New("key x: unknown") }, want: "key x: unknown"},
		{name: "no plan", plan: "text", want: "message prepare: json"},
		{name: "format of the state", plan: Plan{Format: Format}, send: state(State{Format: 0}), want: "format 0"},
		{name: "missing files", plan: Plan{Format: Format}, send: state(State{Format: Format, Files: []File{{KindLock, "a"}}}), want: "0 files came, and the state lists 1"},
		{name: "a file twice", plan: Plan{Format: Format}, send: func(t *testing.T, l *Link) {
			var s Sender
			s.Add(KindLock, "a", 0)
			s.Add(KindLock, "a", 0)
			if err := s.Send(l, &State{Format: Format}); err != nil {
				t.Fatal(err)
			}
		}, want: "file lock a is listed twice"},
		{name: "state without a file", plan: Plan{Format: Format}, send: func(t *testing.T, l *Link) {
			if err := l.Send(Message{Kind: Whole}); err != nil {
				t.Fatal(err)
			}
		}, want: "message state with 0 files"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			giver, taker := pair(t)
			if tt.check == nil {
				tt.check = good
			}
			ended := offer(taker, tt.check)
			next(t, giver, Hello)
			if err := giver.SendJSON(Prepare, tt.plan); err != nil {
				t.Fatal(err)
			}
			if tt.send != nil {
				next(t, giver, Ready)
				tt.send(t, giver)
			}
			if m := next(t, giver, Failed); !strings.Contains(m.Reason, tt.want) {
				t.Errorf("reason %q, want %q in it", m.Reason, tt.want)
			}
			if r, err := ended(); r != nil || err == nil {
				t.Errorf("Offer returns %v, %v", r, err)
			}
		})
	}
}

// The giver may end at any time: before the state the taker begins as an ordinary program, after it the taker
// continues.
func TestEndOfTheGiver(t *testing.T) {
	giver, taker := pair(t)
	ended := offer(taker, func(string) error { return nil })
	next(t, giver, Hello)
	giver.Close()
	if r, err := ended(); r != nil || err != nil {
		t.Errorf("Offer returns %v, %v", r, err)
	}
	giver, taker = pair(t)
	giver.Close()
	if err := taker.AwaitGo(); err != nil {
		t.Errorf("AwaitGo: %v", err)
	}
	giver, taker = pair(t)
	if err := giver.Send(Message{Kind: Ready}); err != nil {
		t.Fatal(err)
	}
	if err := taker.AwaitGo(); err == nil {
		t.Error("AwaitGo accepts another message")
	}
}

// Whatever a packet has, it is a message or an error.
func FuzzMessage(f *testing.F) {
	for _, m := range []Message{{Kind: Hello, Version: "v", Oldest: 1, Newest: 2}, {Kind: Failed, Reason: "r"}} {
		b, err := json.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) == 0 || len(b) > maxMessage {
			return
		}
		giver, taker := pair(t)
		if _, err := giver.conn.Write(b); err != nil {
			t.Fatal(err)
		}
		m, err := taker.Await(time.Now().Add(10 * time.Second))
		if valid := json.Unmarshal(bytes.Clone(b), new(Message)) == nil; valid != (err == nil) {
			t.Errorf("message %+v, %v", m, err)
		}
	})
}

// Clients that connect during a pause are accepted after it, and Close ends Accept in a pause.
func TestListenerPauses(t *testing.T) {
	var all Listeners
	l, received, err := all.Listen("a", func() (net.Listener, error) { return net.Listen("tcp", "127.0.0.1:0") })
	if err != nil || received {
		t.Fatal(err)
	}
	accepted := make(chan error, 2)
	accept := func() {
		c, err := l.Accept()
		if err == nil {
			c.Close()
		}
		accepted <- err
	}
	all.Pause()
	go accept()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	select {
	case err := <-accepted:
		t.Fatalf("accepted during the pause: %v", err)
	case <-time.After(20 * time.Millisecond):
	}
	all.Resume()
	if err := <-accepted; err != nil {
		t.Fatal(err)
	}
	all.Pause()
	go accept()
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if err := <-accepted; !errors.Is(err, net.ErrClosed) {
		t.Errorf("Accept after Close: %v", err)
	}
	all.Resume()
}
