package initiator_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/initiator"
	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/iscsi/pdu"
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

// A program outlives the end of its session: it logs in again with the same ISID, and repeats the READ that has failed.
func Example_reconnect() {
	portal, stop := serve()
	defer stop()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	cfg := initiator.Config{Target: "iqn.2026-11.io.example:disk", ISID: [6]byte{0x80, 1, 2, 3, 4, 5}}
	s, err := initiator.Connect(ctx, portal, cfg)
	check(err)
	read := func() error {
		disk, err := s.Open(ctx, 0)
		if err != nil {
			return err
		}
		return disk.Read(ctx, make([]byte, disk.BlockSize), 0)
	}

	s.Close() // as if the network had failed
	for err = read(); errors.Is(err, net.ErrClosed) && ctx.Err() == nil; err = read() {
		fmt.Println(s.Err())
		if s, err = initiator.Connect(ctx, portal, cfg); err != nil {
			break // or try again after a pause
		}
	}
	check(err)
	fmt.Println("read")
	check(s.Logout(ctx))
	// Output:
	// the session is closed: use of closed network connection
	// read
}

// A program that drives a Carrier itself decides about each bit of what it sends. This one logs in to a discovery session, and
// asks for the targets.
func ExampleCarrier() {
	portal, stop := serve()
	defer stop()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	c, err := initiator.TCP{}.Dial(ctx, portal)
	check(err)
	defer c.Close()
	exchange := func(h pdu.BHS, data []byte) (answer initiator.PDU) {
		h.SetDataSegmentLength(len(data))
		check(c.Post(h, data))
		c.Flush()
		check(c.Receive(&answer))
		return answer
	}

	login := pdu.LoginRequest{Transit: true, CSG: pdu.LoginOperationalNegotiation, NSG: pdu.FullFeaturePhase, CmdSN: 1}
	p := exchange(login.Append(nil), keys.AppendPair(nil, keys.Pair{Key: "InitiatorName", Value: initiator.DefaultName},
		keys.Pair{Key: "SessionType", Value: "Discovery"}))
	fmt.Println(p.BHS.Opcode(), pdu.ParseLoginResponse(p.BHS).Status)
	check(c.EnterFullFeature(initiator.Params{MaxSendSegment: 8192}, func(uint32) *initiator.Command { return nil }))

	text := make(pdu.BHS, pdu.BHSLen)
	text.Reset(pdu.TextReq, pdu.FlagF)
	text.SetITT(7)
	text.SetTTT(pdu.ReservedTag)
	text.SetCmdSN(1)
	p = exchange(text, keys.AppendPair(nil, keys.Pair{Key: "SendTargets", Value: "All"}))
	pairs, err := keys.ParseText(p.Data)
	check(err)
	fmt.Println(p.BHS.Opcode(), p.BHS.ITT(), pairs[0])
	// Output:
	// Login Response success (0x0000)
	// Text Response 7 {TargetName iqn.2026-11.io.example:disk}
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
