package rdma

import (
	"fmt"
	"io"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/tests/testkit"
)

var sizes = []struct {
	name string
	n    int
}{{"4K", 4 << 10}, {"64K", 64 << 10}, {"1M", 1 << 20}}

// windowed limits the work requests that are not done.
type windowed chan *WorkRequest

func (w windowed) WorkDone(wr *WorkRequest, err error) {
	if err != nil {
		panic(err)
	}
	w <- wr
}

// BenchmarkRawTCP measures the ceiling for BenchmarkWrite: the same bytes through a net.Conn, with
// Reads as large as the Writes.
func BenchmarkRawTCP(b *testing.B) {
	for _, size := range sizes {
		b.Run(size.name, func(b *testing.B) {
			w, r := tcpPair(b)
			out, in := make([]byte, size.n), make([]byte, size.n)
			done := make(chan error)
			go func() {
				for range b.N {
					if _, err := io.ReadFull(r, in); err != nil {
						done <- err
						return
					}
				}
				done <- nil
			}()
			b.SetBytes(int64(size.n))
			b.ReportAllocs()
			b.ResetTimer()
			for range b.N {
				if _, err := w.Write(out); err != nil {
					b.Fatal(err)
				}
			}
			if err := <-done; err != nil {
				b.Fatal(err)
			}
		})
	}
}

// BenchmarkWrite measures a stream of RDMA Writes with a Send at its end.
func BenchmarkWrite(b *testing.B) {
	for _, kind := range []struct {
		name       string
		crc, pages bool
	}{{"crc=true", true, false}, {"crc=false", false, false}, {"crc=false,pages", false, true}} {
		for _, size := range sizes {
			b.Run(kind.name+"/"+size.name, func(b *testing.B) { benchmarkWrite(b, size.n, kind.crc, kind.pages) })
		}
	}
}

// benchmarkWrite measures RDMA Writes of n bytes. pages: the kernel refers to them, as to the pages of a LUN in memory.
func benchmarkWrite(b *testing.B, n int, crc, pages bool) {
	i, r := pair(b, Options{NoCRC: !crc}, Options{NoCRC: !crc})
	i.Grow()
	r.Grow()
	var region Region
	stag := r.Register(&region, make([]byte, n), 0, RemoteWrite)
	arrived := make(chan error)
	go func() {
		var ev Event
		arrived <- r.Receive(&ev)
	}()
	data := make([]byte, n)
	if pages {
		m, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { unix.Munmap(m) })
		data = m
	}
	free := make(windowed, 16)
	for range cap(free) {
		free <- &WorkRequest{Op: Write, Data: data, STag: stag, Done: free, Pages: pages}
	}
	b.SetBytes(int64(n))
	b.ReportAllocs()
	b.ResetTimer()
	for range b.N {
		post(b, i, <-free)
	}
	post(b, i, &WorkRequest{Op: Send})
	if err := <-arrived; err != nil {
		b.Fatal(err)
	}
}

// BenchmarkRead measures RDMA Reads, as many at once as ORD allows.
func BenchmarkRead(b *testing.B) {
	for _, depth := range []int{1, 16} {
		for _, size := range sizes {
			b.Run(fmt.Sprintf("depth=%d/%s", depth, size.name), func(b *testing.B) {
				i, r := pair(b, Options{}, Options{})
				var region Region
				stag := i.Register(&region, make([]byte, size.n), 0, RemoteRead)
				post(b, i, &WorkRequest{Op: Send})
				receive(b, r)
				go i.Receive(new(Event))
				b.SetBytes(int64(size.n))
				b.ReportAllocs()
				left := b.N
				reqs := make([]WorkRequest, min(depth, left))
				for k := range reqs {
					reqs[k] = WorkRequest{Op: Read, Data: make([]byte, size.n), STag: stag}
				}
				b.ResetTimer()
				for k := range reqs {
					post(b, r, &reqs[k])
				}
				left -= len(reqs)
				var ev Event
				for range b.N {
					if err := r.Receive(&ev); err != nil || ev.Err != nil {
						b.Fatal(err, ev.Err)
					}
					if left > 0 {
						left--
						post(b, r, ev.Read)
					}
				}
			})
		}
	}
}

// BenchmarkRawPingPong measures the ceiling for BenchmarkPingPong.
func BenchmarkRawPingPong(b *testing.B) {
	w, r := tcpPair(b)
	go func() {
		var buf [96]byte
		for {
			if _, err := io.ReadFull(r, buf[:]); err != nil {
				return
			}
			r.Write(buf[:])
		}
	}()
	var buf [96]byte
	b.ReportAllocs()
	for b.Loop() {
		w.Write(buf[:])
		if _, err := io.ReadFull(w, buf[:]); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkPingPong measures a Send each way, as long as an iSER control PDU.
func BenchmarkPingPong(b *testing.B) {
	i, r := pair(b, Options{}, Options{})
	go func() {
		answer := &WorkRequest{Op: Send, Head: make([]byte, 76)}
		var ev Event
		for r.Receive(&ev) == nil {
			if r.Post(answer) != nil {
				return
			}
			r.Flush()
		}
	}()
	ping := &WorkRequest{Op: Send, Head: make([]byte, 76)}
	var ev Event
	b.ReportAllocs()
	for b.Loop() {
		if err := i.Post(ping); err != nil {
			b.Fatal(err)
		}
		i.Flush()
		if err := i.Receive(&ev); err != nil {
			b.Fatal(err)
		}
	}
}

// Send, Write and Read allocate nothing, at either end.
func TestNoAllocations(t *testing.T) {
	if testkit.Race {
		t.Skip("the race detector allocates")
	}
	i, r := pair(t, Options{}, Options{})
	post(t, i, &WorkRequest{Op: Send})
	receive(t, r)
	var to, from Region
	sink := i.Register(&to, make([]byte, 256<<10), 0, RemoteWrite)
	source := i.Register(&from, make([]byte, 256<<10), 0, RemoteRead)
	answered := make(windowed, 1)
	answer := &WorkRequest{Op: SendSE, Head: make([]byte, 76), Done: answered}
	go func() { // the initiator answers a Send by a Send
		var ev Event
		for i.Receive(&ev) == nil {
			if i.Post(answer) != nil {
				return
			}
			i.Flush()
			<-answered
		}
	}()
	done := make(windowed, 2)
	for _, n := range []int{100, 4 << 10, 64 << 10, 256 << 10} {
		write := &WorkRequest{Op: Write, Data: make([]byte, n), STag: sink, Done: done}
		send := &WorkRequest{Op: Send, Head: make([]byte, 76), Done: done}
		read := &WorkRequest{Op: Read, Data: make([]byte, n), STag: source}
		var ev Event
		step := func() {
			for _, wr := range []*WorkRequest{write, send, read} {
				if err := r.Post(wr); err != nil {
					t.Fatal(err)
				}
			}
			r.Flush()
			for range 2 { // the answer and the Read
				if err := r.Receive(&ev); err != nil || ev.Err != nil {
					t.Fatal(err, ev.Err)
				}
			}
			<-done
			<-done
		}
		for range 2 * remeasure {
			step()
		}
		if a := testing.AllocsPerRun(remeasure-1, step); a != 0 {
			t.Errorf("%d bytes: %v allocations", n, a)
		}
	}
}
