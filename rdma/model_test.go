package rdma

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"sync"
	"testing"
)

// plan is a random sequence of operations of one end and what a naive model expects: the Sends that the
// other end receives, its memory at each Send, and the data of the Reads.
type plan struct {
	posts []*WorkRequest
	sends []Event  // with the bytes of Data
	sinks []uint32 // CRC32 of the memory that is written to, at each Send
	reads [][]byte
}

const modelMemory = 128 << 10

// newPlan plans n operations against an end that has registered sink and source. It registers regions
// for Sends with Invalidate as it needs them.
func newPlan(rng *rand.Rand, n int, peer *Conn, sink, source *Region) (p plan) {
	shadow := make([]byte, modelMemory)
	for range n {
		data := make([]byte, []int{0, 1, rng.IntN(100), rng.IntN(2000), rng.IntN(60000)}[rng.IntN(5)])
		for i := range data {
			data[i] = byte(rng.Uint32())
		}
		to := rng.IntN(modelMemory - len(data) + 1)
		wr := &WorkRequest{Data: data, TO: 1<<63 + uint64(to)}
		switch k := rng.IntN(10); {
		case k < 3:
			wr.Op, wr.STag = Write, sink.STag()
			copy(shadow[to:], data)
		case k < 6:
			wr.Op, wr.STag = Read, source.STag()
			p.reads = append(p.reads, source.buf[to:][:len(data)])
		default:
			ev := Event{Data: bytes.Clone(data), Solicited: k%2 == 1, Invalidates: k > 7}
			wr.Op = map[int]Op{6: Send, 7: SendSE, 8: SendInvalidate, 9: SendSEInvalidate}[k]
			if ev.Invalidates {
				ev.Invalidated = peer.Register(new(Region), nil, 0, RemoteRead)
				wr.STag = ev.Invalidated
			}
			cut := rng.IntN(len(data)+1) % 200
			wr.Head, wr.Data = data[:cut], data[cut:]
			p.sends = append(p.sends, ev)
			p.sinks = append(p.sinks, crc32.ChecksumIEEE(shadow))
		}
		p.posts = append(p.posts, wr)
	}
	return p
}

// TestModel runs random operations of both ends at once against the model (RDMAP-3.2-1).
func TestModel(t *testing.T) {
	for seed, o := range []Options{
		{}, {NoCRC: true}, {MaxULPDU: 512, ORD: 2}, {Markers: true, IRD: 1}, {MaxULPDU: 9000, ORD: 1, IRD: 3},
	} {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			o.MaxSend = 64 << 10
			var c [2]*Conn
			c[0], c[1] = pair(t, o, o)
			post(t, c[0], &WorkRequest{Op: Send})
			receive(t, c[1])
			var sink, source [2]Region
			var plans [2]plan
			for i := range c {
				c[i].Register(&sink[i], make([]byte, modelMemory), 1<<63, RemoteWrite)
				c[i].Register(&source[i], random(modelMemory), 1<<63, RemoteRead)
			}
			for i := range c {
				plans[i] = newPlan(rand.New(rand.NewPCG(uint64(seed), uint64(i))), 300, c[1-i], &sink[1-i],
					&source[1-i])
			}
			var wg sync.WaitGroup
			for i := range c {
				wg.Go(func() {
					for k, wr := range plans[i].posts {
						if err := c[i].Post(wr); err != nil {
							t.Error(err)
						}
						if k%7 == 0 {
							c[i].Flush()
						}
					}
					c[i].Flush()
				})
				wg.Go(func() {
					if err := follow(c[i], &plans[i], &plans[1-i], sink[i].buf); err != nil {
						t.Error(err)
						c[0].Close()
						c[1].Close()
					}
					go c[i].Receive(new(Event)) // answers the other end
				})
			}
			wg.Wait()
		})
	}
}

// follow receives on c and compares with the plans of both ends.
func follow(c *Conn, ours, theirs *plan, sink []byte) error {
	reads, sends := 0, 0
	for reads < len(ours.reads) || sends < len(theirs.sends) {
		var ev Event
		if err := c.Receive(&ev); err != nil {
			return err
		}
		if ev.Read != nil { // RDMAP-5.2.1-11, RDMAP-5.5-7
			if ev.Err != nil || !bytes.Equal(ev.Read.Data, ours.reads[reads]) {
				return fmt.Errorf("Read %d: %v, %d bytes, not what was expected", reads, ev.Err, len(ev.Read.Data))
			}
			reads++
			continue
		}
		// The Sends come in order, each as one message: RDMAP-3.1-3, RDMAP-5.3-2, RDMAP-5.3-5,
		// RDMAP-5.5-6, RDMAP-5.5-10, DDP-5.2-4, DDP-5.3-6, DDP-5.4-3, MPA-4.4-7.
		want := theirs.sends[sends]
		if !bytes.Equal(ev.Data, want.Data) || ev.Solicited != want.Solicited ||
			ev.Invalidates != want.Invalidates || ev.Invalidated != want.Invalidated {
			return fmt.Errorf("Send %d: %d bytes, %+v", sends, len(want.Data), ev)
		}
		// All earlier Writes are placed: DDP-4.1-7, DDP-5.4-2, RDMAP-B-1.
		if crc32.ChecksumIEEE(sink) != theirs.sinks[sends] {
			return fmt.Errorf("Send %d: the memory is not what the Writes before it produce", sends)
		}
		sends++
	}
	return nil
}
