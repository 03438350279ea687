package tests

import (
	"fmt"
	"net"
	"testing"

	"github.com/iser-target/iser-target/cmd/iser-target/capture"
	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// BenchmarkIO is the way of a READ and of a WRITE, initiator included, over
// loopback to a memory LUN. allocs/op counts both ends. Connections can be captured, and are not.
func BenchmarkIO(b *testing.B) {
	for _, crc := range []bool{true, false} {
		for _, kib := range []int{4, 64, 1024} {
			for _, depth := range []int{1, 32} {
				for _, write := range []bool{false, true} {
					op := map[bool]string{false: "READ", true: "WRITE"}[write]
					b.Run(fmt.Sprintf("%s/%dKiB/QD%d/crc=%t", op, kib, depth, crc), func(b *testing.B) {
						benchmarkIO(b, write, kib<<10, depth, crc)
					})
				}
			}
		}
	}
}

func benchmarkIO(b *testing.B, write bool, size, depth int, crc bool) {
	o := rdma.Options{NoCRC: !crc}
	tapped := func(nc net.Conn) net.Conn { return capture.NewHub().Tap(nc.(*net.TCPConn)) } // as the daemon has it
	tg := startTarget(b, targetOptions{rdma: o, wrap: tapped})
	s := tg.login(b, initiator.Options{RDMA: o})
	blocks := uint32(size / 512)
	cmds := make([]*initiator.Command, depth)
	for i := range cmds {
		c := &initiator.Command{}
		lba := uint64(i) * uint64(blocks)
		if write {
			c.CDB, c.Out = cdb.Write16(lba, blocks), make([]byte, size)
			c.Out[0] = 1
		} else {
			c.CDB, c.In = cdb.Read16(lba, blocks), make([]byte, size)
		}
		do(b, s, &initiator.Command{CDB: cdb.Write16(lba, blocks), Out: random(size)})
		do(b, s, c)
		cmds[i] = c
	}
	b.SetBytes(int64(size))
	b.ReportAllocs()
	b.ResetTimer()
	for i := range b.N {
		c := cmds[i%depth]
		if i >= depth {
			if err := c.Wait(); err != nil || c.Status != 0 {
				b.Fatal(err, c.Status)
			}
		}
		if err := s.Start(c); err != nil {
			b.Fatal(err)
		}
	}
	for i := range min(depth, b.N) {
		if err := cmds[i].Wait(); err != nil {
			b.Fatal(err)
		}
	}
}
