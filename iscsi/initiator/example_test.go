package initiator_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/initiator"
	"github.com/iser-target/iser-target/iscsi/tcp"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/security"
)

// A program finds a target, logs in with digests, writes to LUN 0 and reads it again.
func Example() {
	portal, stop := serve()
	defer stop()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()

	targets, err := initiator.Discover(ctx, portal, initiator.Config{})
	check(err)
	s, err := initiator.Connect(ctx, portal, initiator.Config{Target: targets[0].Name, HeaderDigest: true, DataDigest: true})
	check(err)
	defer s.Close()

	disk, err := s.Open(ctx, 0)
	check(err)
	fmt.Println(disk.Vendor, disk.Product, disk.Size(), "bytes")

	block := make([]byte, disk.BlockSize)
	copy(block, "hello")
	check(disk.Write(ctx, block, 4096))
	check(disk.Sync(ctx))
	clear(block)
	check(disk.Read(ctx, block, 4096))
	fmt.Printf("%s\n", block[:5])

	fmt.Println(disk.Read(ctx, block, disk.Size()))
	check(s.Logout(ctx))
	// Output:
	// ISERTGT VIRTUAL-DISK 67108864 bytes
	// hello
	// LUN 0: 512 bytes at offset 67108864: the LUN has 67108864
}

// Several commands are in progress at once. Each comes back through the channel when it has ended.
func ExampleSession_Queue() {
	portal, stop := serve()
	defer stop()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	s, err := initiator.Connect(ctx, portal, initiator.Config{Target: "iqn.2026-11.io.example:disk"})
	check(err)
	defer s.Close()
	disk, err := s.Open(ctx, 0)
	check(err)

	done := make(chan *initiator.Command, 8)
	for i := range cap(done) {
		c := &initiator.Command{In: make([]byte, 4096), Done: done}
		disk.ReadCDB(c, int64(i)*4096)
		check(s.Queue(ctx, c))
	}
	s.Flush()
	bytes := 0
	for range cap(done) {
		c := <-done
		check(c.Check())
		bytes += len(c.In)
	}
	fmt.Println(bytes, "bytes")
	// Output: 32768 bytes
}

// serve serves a LUN of 64 MiB on a loopback port.
func serve() (portal string, stop func()) {
	store, err := backend.OpenMemory(backend.MemoryConfig{Size: 64 << 20, BlockSize: 512})
	check(err)
	identity, err := state.Ephemeral().Get("disk")
	check(err)
	unit, err := lun.New(store, lun.Options{Identity: identity})
	check(err)
	luns := lun.NewInventory()
	check(luns.Add(0, unit))
	all, err := security.Compile([]string{"iqn.*"})
	check(err)
	o := iscsi.Options{Logger: slog.New(slog.DiscardHandler)}
	o.Limits.Digests = true
	node := iscsi.NewNode(o)
	check(node.AddTarget(iscsi.TargetConfig{Name: "iqn.2026-11.io.example:disk", Initiators: all, LUNs: luns}))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	check(err)
	p := node.AddPortal(iscsi.PortalConfig{Listen: l.Addr().String(), TPGT: 1})
	go func() {
		for {
			nc, err := l.Accept()
			if err != nil {
				return // closed
			}
			go p.Serve(tcp.New(nc, tcp.Options{}), iscsi.ServeOptions{})
		}
	}()
	return l.Addr().String(), func() {
		l.Close()
		node.Shutdown(context.Background())
		luns.Close()
	}
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
