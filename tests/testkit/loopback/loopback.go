// Package loopback serves a target within a test, for tests of what initiators do.
package loopback

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"runtime"
	"sync"
	"testing"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/initiator"
	"github.com/iser-target/iser-target/iscsi/tcp"
	"github.com/iser-target/iser-target/iser"
	iserinitiator "github.com/iser-target/iser-target/iser/initiator"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/security"
	"github.com/iser-target/iser-target/tests/testkit"
)

// Name is the TargetName.
const Name = "iqn.2026-11.io.example:store"

// Config says what is served.
type Config struct {
	Transport string        // "tcp" or "iser"
	Node      iscsi.Options // without its Logger: nothing is logged
	Auth      *security.CHAP
	LUNs      map[uint16]backend.Store
}

// A Target listens on a port of the loopback interface.
type Target struct {
	Node *iscsi.Node
	Addr string // HOST:PORT
}

// Serve serves c to initiators named iqn.* until the test ends, and then checks that nothing is left behind.
func Serve(t testing.TB, c Config) *Target {
	t.Helper()
	before, goroutines := rdma.ReadStats(), runtime.NumGoroutine()
	c.Node.Logger = slog.New(slog.DiscardHandler)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	Check(t, err)
	tg := &Target{Node: iscsi.NewNode(c.Node), Addr: l.Addr().String()}
	luns := lun.NewInventory()
	for id, store := range c.LUNs {
		identity, err := state.Ephemeral().Get(fmt.Sprint("lun", id))
		Check(t, err)
		unit, err := lun.New(store, lun.Options{Identity: identity})
		Check(t, err)
		Check(t, luns.Add(id, unit))
	}
	all, err := security.Compile([]string{"iqn.*"})
	Check(t, err)
	Check(t, tg.Node.AddTarget(iscsi.TargetConfig{Name: Name, Initiators: all, LUNs: luns, Auth: c.Auth}))
	portal := tg.Node.AddPortal(iscsi.PortalConfig{Listen: tg.Addr, TPGT: 1})
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				if c.Transport == "tcp" {
					portal.Serve(tcp.New(nc, tcp.Options{}), iscsi.ServeOptions{})
				} else if dm, err := iser.Accept(context.Background(), nc, iser.Options{}); err == nil {
					portal.Serve(dm, iscsi.ServeOptions{})
					dm.Close()
				}
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
		defer cancel()
		Check(t, tg.Node.Shutdown(ctx))
		serving.Wait()
		Check(t, luns.Close())
		testkit.Eventually(t, "no more STags and goroutines than before", func() bool {
			return rdma.ReadStats() == before && runtime.NumGoroutine() <= goroutines
		})
	})
	return tg
}

// Memory returns a store with size bytes of memory and blocks of 512 bytes.
func Memory(t testing.TB, size int64) backend.Store {
	t.Helper()
	store, err := backend.OpenMemory(backend.MemoryConfig{Size: size, BlockSize: 512})
	Check(t, err)
	return store
}

// Transport returns the transport of an initiator, "tcp" or "iser".
func Transport(name string) initiator.Transport {
	if name == "iser" {
		return iserinitiator.Transport{}
	}
	return initiator.TCP{}
}

// Check ends the test if err is an error.
func Check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Within returns a context that ends with the test, and after testkit.Patience.
func Within(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	t.Cleanup(cancel)
	return ctx
}
