package daemon

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

const (
	prefix = "iqn.2026-11.io.example:"
	store  = prefix + "store"
)

// A lab is a daemon whose configuration a test composes from parts.
type lab struct {
	*Daemon
	t     *testing.T
	dir   string
	path  string
	lines *testkit.Log
	hooks ipsecHooks
	// Parts of the configuration.
	portals, initiators, resets, luns, more, targets string
}

// newLab returns a lab that runs until the test ends. The functions change its parts first.
func newLab(t *testing.T, o ...func(*lab)) *lab {
	l := &lab{t: t, dir: t.TempDir(), lines: &testkit.Log{},
		portals:    `{listen: "127.0.0.1:0"}`,
		initiators: `"*"`,
		luns:       `{id: 0, backend: memory, size: 4MiB}`,
	}
	for _, f := range o {
		f(l)
	}
	l.path = filepath.Join(l.dir, "c.yaml")
	l.write()
	var end func() error
	l.Daemon, end = run(t, l.path, Options{LogTo: io.MultiWriter(l.lines, t.Output()), ipsec: l.hooks})
	t.Cleanup(func() {
		if err := end(); err != nil {
			t.Error(err)
		}
	})
	return l
}

// text returns the configuration.
func (l *lab) text() string {
	return fmt.Sprintf(`# of a test
state_dir: %s/state
portals: [%s]
targets:
  - name: %s
    initiators: [%s]
    resets_for: [%s]
    luns: [%s]
%s
%s`, l.dir, l.portals, store, l.initiators, l.resets, l.luns, l.targets, l.more)
}

// write writes the configuration to the file.
func (l *lab) write() {
	l.t.Helper()
	if err := os.WriteFile(l.path, []byte(l.text()), 0o600); err != nil {
		l.t.Fatal(err)
	}
}

// doc returns the configuration as a document.
func (l *lab) doc() *config.Document {
	l.t.Helper()
	doc, err := config.NewDocument(l.path, []byte(l.text()))
	if err != nil {
		l.t.Fatal(err)
	}
	return doc
}

// apply applies the configuration.
func (l *lab) apply(o ChangeOptions) (*schema.Plan, error) {
	l.t.Helper()
	return l.Apply(l.t.Context(), l.doc(), o)
}

// ok applies the configuration and requires that all steps are done.
func (l *lab) ok(o ChangeOptions) *schema.Plan {
	l.t.Helper()
	p, err := l.apply(o)
	if err != nil {
		l.t.Fatal(err)
	}
	for _, s := range p.Steps {
		if !s.Done && !s.Restart {
			l.t.Fatalf("step %+v is not done", s)
		}
	}
	return p
}

func (l *lab) addr() string { return l.State().Portals[0].Address }

// login logs in as the initiator with that name after prefix.
func (l *lab) login(name, target string) *initiator.Session {
	l.t.Helper()
	s, err := l.tryLogin(name, target)
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { s.Close() })
	return s
}

func (l *lab) tryLogin(name, target string) (*initiator.Session, error) {
	ctx, cancel := context.WithTimeout(l.t.Context(), 20*time.Second)
	defer cancel()
	return initiator.Login(ctx, l.addr(), initiator.Options{Name: prefix + name, Target: target})
}

// do runs a command and returns its outcome: "" for status 0, else "key/asc/ascq".
func do(t *testing.T, s *initiator.Session, c *initiator.Command) string {
	t.Helper()
	if err := s.Do(c); err != nil {
		t.Fatal(err)
	}
	return outcome(c)
}

func outcome(c *initiator.Command) string {
	if c.Status == 0 {
		return ""
	}
	if len(c.Sense) < 14 {
		return fmt.Sprintf("status %#x", c.Status)
	}
	return fmt.Sprintf("%x/%02x/%02x", c.Sense[2], c.Sense[12], c.Sense[13])
}

func testUnitReady(t *testing.T, s *initiator.Session, lun byte) string {
	t.Helper()
	return do(t, s, &initiator.Command{LUN: lun})
}

// attentions returns the unit attentions that a LUN has for the session, and then the
// first other outcome.
func attentions(t *testing.T, s *initiator.Session, lun byte) (list string) {
	t.Helper()
	for {
		switch got := testUnitReady(t, s, lun); {
		case strings.HasPrefix(got, "6/"):
			list += got[2:] + " "
		default:
			return strings.TrimSpace(list + got)
		}
	}
}

func capacity(t *testing.T, s *initiator.Session, lun byte) int {
	t.Helper()
	c := &initiator.Command{LUN: lun, In: make([]byte, 8), CDB: [16]byte{0x25}}
	if got := do(t, s, c); got != "" {
		t.Fatalf("READ CAPACITY(10): %s", got)
	}
	return (int(binary.BigEndian.Uint32(c.In)) + 1) * int(binary.BigEndian.Uint32(c.In[4:]))
}

func reportLUNs(t *testing.T, s *initiator.Session) (ids []int) {
	t.Helper()
	c := &initiator.Command{In: make([]byte, 16384), CDB: [16]byte{0: 0xa0, 8: 0x40}}
	if got := do(t, s, c); got != "" {
		t.Fatalf("REPORT LUNS: %s", got)
	}
	for at := 8; at < 8+int(binary.BigEndian.Uint32(c.In)); at += 8 {
		ids = append(ids, int(binary.BigEndian.Uint16(c.In[at:])&0x3fff))
	}
	return ids
}

// load writes to LUN 0 and reads back until the test ends. Unit attentions are expected;
// every other failure is an error.
func load(t *testing.T, s *initiator.Session) {
	t.Helper()
	stop := make(chan struct{})
	var wg sync.WaitGroup
	begun := make(chan struct{}) // the first round has ended
	begin := sync.OnceFunc(func() { close(begun) })
	wg.Go(func() {
		defer begin()
		w := &initiator.Command{CDB: cdb.Write16(1024, 8), Out: make([]byte, 4096)}
		r := &initiator.Command{CDB: cdb.Read16(1024, 8), In: make([]byte, 4096)}
		for rounds := 0; ; rounds++ {
			select {
			case <-stop:
				return
			default:
			}
			for i := range w.Out {
				w.Out[i] = byte(rounds + i)
			}
			for _, c := range []*initiator.Command{w, r} {
				for {
					if err := s.Do(c); err != nil {
						t.Errorf("session under load: %v", err)
						return
					}
					got := outcome(c)
					if got == "" {
						break
					}
					if !strings.HasPrefix(got, "6/") {
						t.Errorf("session under load: %s", got)
						return
					}
				}
			}
			if !bytes.Equal(w.Out, r.In) {
				t.Error("data read differs from data written")
				return
			}
			begin()
		}
	})
	t.Cleanup(func() {
		close(stop)
		wg.Wait()
	})
	<-begun
}

func backendOpen(path string, size int64) (backend.Store, error) {
	s, _, err := backend.OpenFile(backend.FileConfig{Path: path, Size: size})
	return s, err
}

var errInjected = errors.New("injected")

// quickDir returns a directory in memory, if the system has one: the time that a shared disk
// takes for syncs is not the subject of the test.
func quickDir(t *testing.T) string {
	dir, err := os.MkdirTemp("/dev/shm", "iser-target")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}
