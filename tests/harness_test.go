package tests

import (
	"context"
	"io"
	"log/slog"
	"net"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iser"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/security"
	"github.com/iser-target/iser-target/tests/initiator"
)

const targetName = "iqn.2026-11.io.example:store"

// A target is the whole of it in this process, on a loopback port.
type target struct {
	node  *iscsi.Node
	addr  string
	store backend.Store

	l  net.Listener
	wg sync.WaitGroup
}

type targetOptions struct {
	node  iscsi.Options
	rdma  rdma.Options
	store backend.Store // default: 64 MiB of memory
	lun   lun.Options
	log   io.Writer
}

// startTarget serves one LUN to initiators named iqn.2026-11.io.github.*
// until the test ends, and then checks that nothing is left behind.
func startTarget(t testing.TB, o targetOptions) *target {
	t.Helper()
	before := rdma.ReadStats()
	goroutines := runtime.NumGoroutine()
	if o.store == nil {
		s, err := backend.OpenMemory(backend.MemoryConfig{Size: 64 << 20, BlockSize: 512})
		if err != nil {
			t.Fatal(err)
		}
		o.store = s
	}
	if o.log == nil {
		o.log = t.Output()
	}
	level := slog.LevelDebug
	if _, ok := t.(*testing.B); ok {
		level = slog.LevelError
	}
	o.node.Logger = slog.New(slog.NewTextHandler(o.log, &slog.HandlerOptions{Level: level}))
	if o.node.LogoutWait == 0 {
		o.node.LogoutWait = 200 * time.Millisecond
	}
	id, err := lun.Ephemeral().Get("test")
	if err != nil {
		t.Fatal(err)
	}
	o.lun.Identity = id
	unit, err := lun.New(o.store, o.lun)
	if err != nil {
		t.Fatal(err)
	}
	inv := lun.NewInventory()
	if err := inv.Add(0, unit); err != nil {
		t.Fatal(err)
	}
	who, err := security.Compile([]string{"iqn.2026-11.io.github.*"})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	tg := &target{node: iscsi.NewNode(o.node), addr: l.Addr().String(), store: o.store, l: l}
	if err := tg.node.AddTarget(iscsi.TargetConfig{Name: targetName, Initiators: who, LUNs: inv}); err != nil {
		t.Fatal(err)
	}
	portal := tg.node.AddPortal(iscsi.PortalConfig{Listen: tg.addr, TPGT: 1})
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
				dm, err := iser.Accept(context.Background(), nc, iser.Options{RDMA: o.rdma})
				if err != nil {
					return
				}
				defer dm.Close()
				portal.Serve(dm)
			}()
		}
	}()
	t.Cleanup(func() {
		l.Close()
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := tg.node.Shutdown(ctx); err != nil {
			t.Errorf("shutdown: %v", err)
		}
		tg.wg.Wait()
		st := tg.node.Stats()
		if st.Sessions != 0 || st.Connections != 0 || st.TasksInFlight != 0 || st.BuffersOut != 0 {
			t.Errorf("left behind: %+v", st)
		}
		if err := inv.Close(); err != nil {
			t.Errorf("closing the LUN: %v", err)
		}
		for end := time.Now().Add(5 * time.Second); ; time.Sleep(time.Millisecond) {
			now, n := rdma.ReadStats(), runtime.NumGoroutine()
			if now == before && n <= goroutines {
				break
			}
			if time.Now().After(end) {
				buf := make([]byte, 1<<20)
				t.Errorf("left behind: %+v, was %+v; %d goroutines, were %d\n%s", now, before, n, goroutines, buf[:runtime.Stack(buf, true)])
				break
			}
		}
	})
	return tg
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

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
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
