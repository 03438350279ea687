package rdma

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/iser-target/iser-target/rdma/wire"
	"github.com/iser-target/iser-target/rdma/wire/vectors"
)

// FuzzStream receives arbitrary bytes after startup. They end in an error with a reason, need
// limited memory, and write nothing outside of registered memory (MPA-9.1-2, MPA2-12-1, DDP-8.3.1-3,
// RDMAP-8.1.1-3).
func FuzzStream(f *testing.F) {
	stream, _, _ := traffic(rand.New(rand.NewPCG(7, 7)), 4, false)
	f.Add(stream[:min(len(stream), 4000)], uint8(0))
	for _, tt := range slices.Concat(vectors.Refusals, vectors.RegionRefusals, vectors.LengthRefusals) {
		var b []byte
		for _, u := range tt.ULPDUs {
			b = append(b, frame(unhex(u))...)
		}
		f.Add(b, uint8(0))
	}
	for _, u := range []string{
		vectors.ReadRequestHex("00000001", "00000001", "00000010", "00000100", "0000000000001000"),
		"4147 00000000 00000002 00000001 00000000 1202c000 0076 4143 00000000 00000000 00000009 00000000",
		"c142 11111111 0000000000000000 3031323334353637",
		"4146 00000100 00000000 00000001 00000000 7a",
	} {
		for mode := range uint8(4) {
			b := frame(unhex(u))
			if mode&1 != 0 {
				b, _ = wire.MarkerGrid(0).AppendFPDU(nil, b, true)
			}
			f.Add(b, mode)
		}
	}
	f.Fuzz(func(t *testing.T, stream []byte, mode uint8) {
		c := bufferConn(Options{NoCRC: mode&2 != 0, MaxSend: 1000, IRD: 2, ORD: 2}, int(mode&1))
		guarded := bytes.Repeat([]byte{0xee}, 48)
		expose(c, 0x100, guarded[16:32], 0x1000, RemoteRead|RemoteWrite)
		sink := bytes.Repeat([]byte{0xee}, 24)
		wr := &WorkRequest{Op: Read, Data: sink[8:16], STag: 1}
		if err := c.Post(wr); err != nil {
			t.Fatal(err)
		}
		sinkSTag(c, 0x11111111)
		c.Flush()
		c.nc.(*bufferNet).in = bytes.NewReader(stream)
		reads := 0
		var ev Event
		for events := 0; ; events++ {
			if err := c.Receive(&ev); err != nil {
				break
			}
			if ev.Read != nil {
				reads++
			} else if len(ev.Data) > 1000 {
				t.Fatalf("a Send of %d bytes", len(ev.Data))
			}
			if events > len(stream)/wire.UntaggedLen+1 {
				t.Fatal("more events than the stream has messages")
			}
		}
		c.Close()
		if reads != 1 {
			t.Fatalf("the Read was returned %d times", reads)
		}
		if !bytes.Equal(guarded[:16], guarded[32:]) || guarded[0] != 0xee || !bytes.Equal(sink[:8], sink[16:]) ||
			sink[0] != 0xee {
			t.Fatal("written outside of registered memory")
		}
		if cap(c.rx.asm) > 1000 || cap(c.rx.marked)+cap(c.rx.plain) > 1<<20 {
			t.Fatal("the receiver has grown")
		}
	})
}

// FuzzFPDUStream checks that the segments of TCP change nothing.
func FuzzFPDUStream(f *testing.F) {
	f.Add(uint64(1), []byte{1}, false)
	f.Add(uint64(2), []byte{255, 1, 7}, true)
	f.Add(uint64(3), []byte{0, 0, 200}, false)
	f.Fuzz(func(t *testing.T, seed uint64, cuts []byte, markers bool) {
		stream, sends, memory := traffic(rand.New(rand.NewPCG(seed, 1)), 5, markers)
		i := 0
		chunk := func() int {
			i++
			if len(cuts) == 0 {
				return len(stream)
			}
			n := int(cuts[i%len(cuts)])
			return max(1, n*n)
		}
		m := 0
		if markers {
			m = 1
		}
		drinkUp(t, stream, sends, memory, m, chunk)
	})
}

// FuzzReply sends arbitrary bytes instead of a Reply.
func FuzzReply(f *testing.F) {
	f.Add(unhex(repKey+"50020008 00010020 80000000"), true)
	f.Add(unhex(repKey+"40010000"), false)
	f.Add(unhex(repKey+"70020004 00000008"), true)
	f.Fuzz(func(t *testing.T, b []byte, enhanced bool) {
		before := ReadStats()
		rev := uint8(1)
		if enhanced {
			rev = 2
		}
		nc := &bufferNet{in: bytes.NewReader(b)}
		c, private, err := Initiate(t.Context(), nc, Options{Rev: rev, PeerToPeer: enhanced})
		if err == nil {
			if len(private) > wire.MaxPrivateData || c.ORD() > defaultDepth || c.IRD() > defaultDepth {
				t.Fatalf("ORD %d, IRD %d, %d bytes of private data", c.ORD(), c.IRD(), len(private))
			}
			c.Close()
		}
		nc = &bufferNet{in: bytes.NewReader(b)}
		if c, err := Respond(t.Context(), nc, Options{}, func(*Request) Answer { return Answer{} }); err == nil {
			c.Close()
		}
		// Reads count as STags until they are returned.
		if s := ReadStats(); s.Conns != before.Conns {
			t.Fatalf("%+v, before %+v", s, before)
		}
	})
}
