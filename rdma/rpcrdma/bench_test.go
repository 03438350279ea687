package rpcrdma

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"runtime"
	"testing"

	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/rdma/rpcrdma/oncrpc"
	"github.com/iser-target/iser-target/tests/testkit"
)

// benchPrograms serves procEcho without a copy, and procPlain that returns nothing.
func benchPrograms() *Programs {
	p := &Programs{}
	p.Register(testProgram, testVersion, procEcho, func(_ context.Context, r *Request) error {
		r.Results.Item(r.Args.Item(1 << 20))
		return nil
	})
	return p
}

// A bencher makes calls with an item of n bytes each way.
type bencher struct {
	c    *Conn
	call Call
	data []byte
}

func newBencher(c *Conn, n int) *bencher {
	b := &bencher{c: c, data: pattern(n)}
	b.call = Call{Program: testProgram, Version: testVersion, Procedure: procEcho, MaxReply: 8}
	if n > 0 {
		b.call.Into = [][]byte{make([]byte, n)}
	}
	return b
}

func (b *bencher) step(t testing.TB, ctx context.Context) {
	b.call.Begin().Item(b.data)
	if err := b.c.Do(ctx, &b.call); err != nil {
		t.Error(err)
		return
	}
	if got := b.call.Results.Item(len(b.data)); len(got) != len(b.data) {
		t.Errorf("%d bytes of %d", len(got), len(b.data))
	}
}

var benchSizes = []struct {
	name string
	n    int
}{{"0", 0}, {"4K", 4 << 10}, {"1M", 1 << 20}}

// Calls allocate nothing, at either end, in either direction, with chunks and without.
func TestNoAllocations(t *testing.T) {
	if testkit.Race {
		t.Skip("the race detector allocates")
	}
	cfg := Config{Programs: benchPrograms(), ReverseChunks: true}
	client, service := connPair(t, cfg, cfg)
	service.EnableReverse()
	ctx := patient(t)
	for _, c := range []*Conn{client, service} {
		for _, size := range benchSizes {
			b := newBencher(c, size.n)
			for range 200 {
				b.step(t, ctx)
			}
			if n := testing.AllocsPerRun(100, func() { b.step(t, ctx) }); n != 0 {
				t.Errorf("%s bytes, reverse %t: %v allocations", size.name, c == service, n)
			}
		}
	}
}

// BenchmarkCall measures calls with an item of each size in both directions, one at a time and as many as there are credits.
func BenchmarkCall(b *testing.B) {
	for _, depth := range []int{1, 16} {
		for _, size := range benchSizes {
			b.Run(fmt.Sprintf("depth=%d/%s", depth, size.name), func(b *testing.B) {
				cfg := Config{Programs: benchPrograms(), Memory: 64 << 20, RDMA: rdma.Options{NoCRC: true}}
				client, _ := connPair(b, cfg, cfg)
				newBencher(client, 0).step(b, context.Background())
				b.SetBytes(int64(2 * size.n))
				b.ReportAllocs()
				parallel(b, depth, func() func() {
					s := newBencher(client, size.n)
					s.step(b, context.Background())
					return func() { s.step(b, context.Background()) }
				})
			})
		}
	}
}

// BenchmarkTCP measures the same calls over TCP with record marks (RFC 5531, section 11): each caller has a connection,
// which is the best case, and reads into its own memory.
func BenchmarkTCP(b *testing.B) {
	for _, depth := range []int{1, 16} {
		for _, size := range benchSizes {
			b.Run(fmt.Sprintf("depth=%d/%s", depth, size.name), func(b *testing.B) {
				b.SetBytes(int64(2 * size.n))
				b.ReportAllocs()
				parallel(b, depth, func() func() {
					near, far := tcpPair(b)
					go serveTCP(far)
					return callTCP(b, near, size.n)
				})
			})
		}
	}
}

// BenchmarkMemory measures calls of 1 MiB one at a time, which 1 or 16 callers make in turn, over RDMA and over TCP. The calls and
// their order are the same, only the memory is not: that of one caller stays in the cache of the processor.
func BenchmarkMemory(b *testing.B) {
	const n = 1 << 20
	inTurn := func(b *testing.B, callers int, start func() func()) {
		steps := make([]func(), callers)
		for i := range steps {
			steps[i] = start()
			steps[i]()
		}
		b.SetBytes(2 * n)
		b.ReportAllocs()
		b.ResetTimer()
		for i := range b.N {
			steps[i%callers]()
		}
	}
	for _, callers := range []int{1, 16} {
		b.Run(fmt.Sprintf("RDMA/callers=%d", callers), func(b *testing.B) {
			cfg := Config{Programs: benchPrograms(), Memory: 64 << 20, RDMA: rdma.Options{NoCRC: true}}
			client, _ := connPair(b, cfg, cfg)
			inTurn(b, callers, func() func() {
				s := newBencher(client, n)
				return func() { s.step(b, context.Background()) }
			})
		})
		b.Run(fmt.Sprintf("TCP/callers=%d", callers), func(b *testing.B) {
			inTurn(b, callers, func() func() {
				near, far := tcpPair(b)
				go serveTCP(far)
				return callTCP(b, near, n)
			})
		})
	}
}

// parallel runs b.N steps in depth goroutines.
func parallel(b *testing.B, depth int, start func() (step func())) {
	steps := make([]func(), depth)
	for i := range steps {
		steps[i] = start()
	}
	b.SetParallelism((depth + runtime.GOMAXPROCS(0) - 1) / runtime.GOMAXPROCS(0))
	next := make(chan func(), depth)
	for _, s := range steps {
		next <- s
	}
	b.ResetTimer()
	if depth == 1 {
		for range b.N {
			steps[0]()
		}
		return
	}
	b.RunParallel(func(pb *testing.PB) {
		s := <-next
		for pb.Next() {
			s()
		}
	})
}

const lastFragment = 1 << 31

// serveTCP answers procEcho.
func serveTCP(nc net.Conn) {
	var in, head []byte
	var results oncrpc.Encoder
	var d oncrpc.Decoder
	var h oncrpc.CallHeader
	mark := make([]byte, 4)
	bufs := make(net.Buffers, 0, 3)
	for {
		if _, err := io.ReadFull(nc, mark); err != nil {
			return
		}
		n := int(binary.BigEndian.Uint32(mark) &^ lastFragment)
		in = room(in, n)
		if _, err := io.ReadFull(nc, in); err != nil {
			return
		}
		d.Reset(in, nil)
		h.Parse(&d)
		data := d.Item(1 << 20)
		results.Reset()
		(&oncrpc.ReplyHeader{XID: h.XID}).Append(&results)
		results.Item(data)
		head = binary.BigEndian.AppendUint32(head[:0], lastFragment|uint32(results.Len()))
		head = append(head, results.Bytes()...)
		bufs = append(bufs[:0], head, data)
		w := bufs
		if _, err := w.WriteTo(nc); err != nil {
			return
		}
	}
}

// callTCP returns a function that makes a call.
func callTCP(b *testing.B, nc net.Conn, n int) func() {
	var args oncrpc.Encoder
	var head []byte
	data, into := pattern(n), make([]byte, n)
	reply := make([]byte, 4+24+4)
	xid := uint32(0)
	bufs := make(net.Buffers, 0, 2)
	return func() {
		xid++
		args.Reset()
		(&oncrpc.CallHeader{XID: xid, Program: testProgram, Version: testVersion, Procedure: procEcho}).Append(&args)
		args.Item(data)
		head = binary.BigEndian.AppendUint32(head[:0], lastFragment|uint32(args.Len()))
		head = append(head, args.Bytes()...)
		bufs = append(bufs[:0], head, data)
		w := bufs
		if _, err := w.WriteTo(nc); err != nil {
			b.Error(err)
		}
		if _, err := io.ReadFull(nc, reply); err != nil {
			b.Error(err)
		}
		if _, err := io.ReadFull(nc, into); err != nil {
			b.Error(err)
		}
	}
}
