package tests

import (
	"context"
	"log/slog"
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/tcp"
	"github.com/iser-target/iser-target/iser"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/security"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
)

const targetName = "iqn.2026-11.io.example:store"

// A target is the whole of it in this process, on a loopback port.
type target struct {
	node  *iscsi.Node
	addr  string
	store *backendtest.Faulty // of LUN 0
	log   *logBuffer

	inventories []*lun.Inventory

	l  net.Listener
	wg sync.WaitGroup
}

type targetOptions struct {
	node   iscsi.Options
	rdma   rdma.Options
	portal iscsi.PortalConfig
	stream stream
	tap    *tap                    // sees what the Datamover of the one connection does
	quiet  bool                    // nothing is logged
	wrap   func(net.Conn) net.Conn // what the target's end of a connection becomes; nil: nothing
	luns   int                     // default 1; each has 64 MiB of memory and blocks of 512 bytes
}

// A stream tells how the connections of a target begin.
type stream uint8

const (
	rdmaFirst  stream = iota // with MPA
	loginFirst               // with login on the byte stream, then MPA
	noRDMA                   // the same, but iSER is not possible
)

// startTarget serves LUNs to initiators named iqn.2026-11.io.github.* until
// the test ends, and then checks that nothing is left behind.
func startTarget(t testing.TB, o targetOptions) *target {
	t.Helper()
	before := rdma.ReadStats()
	goroutines := runtime.NumGoroutine()
	_, fuzzing := t.(*testing.F)
	tg := &target{log: &logBuffer{t: t}}
	level := slog.LevelDebug
	if _, ok := t.(*testing.B); ok {
		level = slog.LevelError
	}
	if o.quiet {
		level = slog.LevelError + 1
	}
	o.node.Logger = slog.New(slog.NewTextHandler(tg.log, &slog.HandlerOptions{Level: level}))
	if o.node.LogoutWait == 0 {
		o.node.LogoutWait = 2 * time.Second
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	tg.node, tg.addr, tg.l = iscsi.NewNode(o.node), l.Addr().String(), l
	tg.store = tg.addTarget(t, targetName, max(o.luns, 1))
	o.portal.Listen, o.portal.TPGT = tg.addr, 1
	if o.stream == loginFirst {
		o.portal.StepUp = func(p iscsi.Params, tasks int) (iscsi.EnableDatamover, error) {
			return iser.Allocate(iser.Options{RDMA: o.rdma}, p, tasks)
		}
	}
	portal := tg.node.AddPortal(o.portal)
	tg.wg.Add(1)
	go func() {
		defer tg.wg.Done()
		for {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			tg.wg.Add(1)
			go func() {
				defer tg.wg.Done()
				if o.wrap != nil {
					nc = o.wrap(nc)
				}
				if o.stream != rdmaFirst {
					portal.Serve(tcp.New(nc, tcp.Options{}), iscsi.ServeOptions{})
					return
				}
				dm, err := iser.Accept(context.Background(), nc, iser.Options{RDMA: o.rdma})
				if err != nil {
					return
				}
				defer dm.Close()
				if o.tap != nil {
					portal.Serve(o.tap.on(dm), iscsi.ServeOptions{})
					return
				}
				portal.Serve(dm, iscsi.ServeOptions{})
			}()
		}
	}()
	t.Cleanup(func() {
		l.Close()
		ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
		defer cancel()
		if err := tg.node.Shutdown(ctx); err != nil {
			t.Errorf("shutdown: %v", err)
		}
		tg.wg.Wait()
		if !tg.idle() {
			t.Errorf("left behind: %+v", tg.node.Stats())
		}
		for _, inv := range tg.inventories {
			if err := inv.Close(); err != nil {
				t.Errorf("closing the LUN: %v", err)
			}
		}
		testkit.Eventually(t, "no more STags and goroutines than before", func() bool {
			// fuzzing starts its own
			return rdma.ReadStats() == before && (fuzzing || runtime.NumGoroutine() <= goroutines)
		})
	})
	return tg
}

// addTarget makes a target with LUNs of 64 MiB and returns the store of LUN 0.
func (tg *target) addTarget(t testing.TB, name string, luns int) (first *backendtest.Faulty) {
	t.Helper()
	inv := lun.NewInventory()
	tg.inventories = append(tg.inventories, inv)
	for i := range luns {
		s, err := backend.OpenMemory(backend.MemoryConfig{Size: 64 << 20, BlockSize: 512})
		if err != nil {
			t.Fatal(err)
		}
		store := &backendtest.Faulty{Store: s}
		if i == 0 {
			first = store
		}
		id, err := state.Ephemeral().Get("test")
		if err != nil {
			t.Fatal(err)
		}
		unit, err := lun.New(store, lun.Options{Identity: id})
		if err != nil {
			t.Fatal(err)
		}
		if err := inv.Add(uint16(i), unit); err != nil {
			t.Fatal(err)
		}
	}
	who, err := security.Compile([]string{"iqn.2026-11.io.github.*"})
	if err != nil {
		t.Fatal(err)
	}
	if err := tg.node.AddTarget(iscsi.TargetConfig{Name: name, Initiators: who, ResetsFor: who, LUNs: inv}); err != nil {
		t.Fatal(err)
	}
	return first
}

// login opens a session to tg that the test closes at its end.
func (tg *target) login(t testing.TB, o initiator.Options) *initiator.Session {
	t.Helper()
	if o.Target == "" {
		o.Target = targetName
	}
	s, err := initiator.Login(testContext(t), tg.addr, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.Close()
		<-s.Done()
	})
	return s
}

// idle reports whether nothing of any connection is left.
func (tg *target) idle() bool {
	st := tg.node.Stats()
	return st.Sessions == 0 && st.Connections == 0 && st.TasksInFlight == 0 && st.BuffersOut == 0
}

// waitIdle waits until nothing of any connection is left.
func (tg *target) waitIdle(t testing.TB) {
	t.Helper()
	testkit.Eventually(t, "an idle target", tg.idle)
}

// stored returns the content of LUN 0 from block lba on.
func (tg *target) stored(t testing.TB, lba, octets int) []byte {
	t.Helper()
	b := make([]byte, octets)
	if err := tg.store.Store.ReadAt(b, int64(lba)*512); err != nil {
		t.Fatal(err)
	}
	return b
}

// A logBuffer is what the target logs, for the test and for its output.
type logBuffer struct {
	t testing.TB
	testkit.Log
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.t.Output().Write(p)
	return l.Log.Write(p)
}

// wantLine waits for one line with msg that contains all of parts.
func (l *logBuffer) wantLine(msg string, parts ...string) {
	l.t.Helper()
	var lines []string
	testkit.Eventually(l.t, "a log line "+msg, func() bool {
		lines = l.Lines("msg=" + msg + " ")
		return len(lines) > 0
	})
	if len(lines) > 1 {
		l.t.Errorf("%d lines instead of one:\n%s", len(lines), strings.Join(lines, ""))
	}
	for _, part := range parts {
		if !strings.Contains(lines[0], part) {
			l.t.Errorf("no %q in the line\n%s", part, lines[0])
		}
	}
}

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	t.Cleanup(cancel)
	return ctx
}

// do runs a command that must end with GOOD; a unit attention is taken first.
func do(t testing.TB, s *initiator.Session, c *initiator.Command) {
	t.Helper()
	for range 3 {
		if err := s.Do(c); err != nil {
			t.Fatal(err)
		}
		if c.Status == 0x02 && len(c.Sense) > 2 && c.Sense[2]&0x0f == 0x06 {
			continue
		}
		break
	}
	if c.Status != 0 {
		t.Fatalf("CDB % x: status %#02x, sense % x", c.CDB, c.Status, c.Sense)
	}
}
