package rpcrdma

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/rdma"
	rdmap "github.com/iser-target/iser-target/rdma/wire"
	"github.com/iser-target/iser-target/tests/testkit"
)

const xid = "12345678"

// The service answers each of these calls with these bytes, and the connection stays.
func TestResponderAnswers(t *testing.T) {
	errChunk := xid + "00000001 00000020 00000004 00000002"
	null := nullOf(xid)
	for _, tt := range []struct{ name, message, answer string }{
		{"RPCRDMA-2.3.2-3 RPCRDMA-4.2.2-1 RPCRDMA-4.2.1-1 BRPC-5-1 a NULL call", header(xid, "00000020", noChunks) + null,
			header(xid, "00000020", noChunks) + okReply(xid)},
		{"RPCRDMA-3.3.1-2 RPCRDMA-4.2.3-1 0 credits asked for", header(xid, "00000000", noChunks) + null,
			header(xid, "00000020", noChunks) + okReply(xid)},
		{"RPCRDMA-4.5-4 version 7", xid + "00000007 00000020 00000000" + noChunks + null,
			xid + "00000007 00000020 00000004 00000001 00000001 00000001"},
		{"BRPC-5.1-2 version 2", xid + "00000002 00000010 00000000" + noChunks + null,
			xid + "00000002 00000020 00000004 00000001 00000001 00000001"},
		{"RPCRDMA-4.5-2 procedure 5", xid + "00000001 00000020 00000005" + noChunks, errChunk},
		{"RPCRDMA-4.5-2 RDMA_MSGP", xid + "00000001 00000020 00000002" + noChunks, errChunk},
		{"RPCRDMA-4.5-2 a flag of 2", header(xid, "00000020", "00000002 00000000 00000000") + null, errChunk},
		{"RPCRDMA-4.5-2 a truncated list", header(xid, "00000020", "00000000 00000001 00000005"), errChunk},
		{"RPCRDMA-4.5-2 a position of 0x95", header(xid, "00000020",
			"00000001 00000095 00000001 00000004 0000000000000000 00000000 00000000 00000000") + null, errChunk},
		{"RPCRDMA-4.5-2 RDMA_NOMSG without chunks", xid + "00000001 00000020 00000001" + noChunks, errChunk},
		{"RPCRDMA-4.5-2 RDMA_NOMSG with a write list only", xid + "00000001 00000020 00000001 00000000" +
			"00000001 00000001 00000001 00000004 0000000000000000 00000000 00000000", errChunk},
		{"RPCRDMA-4.5-2 RDMA_NOMSG with a reply chunk only", xid + "00000001 00000020 00000001 00000000 00000000" +
			"00000001 00000001 00000001 00000004 0000000000000000", errChunk},
		{"RPCRDMA-4.2.1-2 BRPC-5.1-4 another XID in the call", header(xid, "00000020", noChunks) + nullOf("12345679"), errChunk},
		{"BRPC-5.1-5 a msg_type of 2", header(xid, "00000020", noChunks) + xid + "00000002" + strings.Repeat("00000000", 8),
			errChunk},
		{"BRPC-5.1-5 a msg_type of 7", header(xid, "00000020", noChunks) + xid + "00000007" + strings.Repeat("00000000", 8),
			errChunk},
		{"no payload", header(xid, "00000020", noChunks), errChunk},
		{"more segments than allowed", header(xid, "00000020", "00000000 00000001 00000041"+
			strings.Repeat("00000001 00000004 0000000000000000", 65)+"00000000 00000000") + null, errChunk},
		{"more bytes than allowed", header(xid, "00000020",
			"00000001 00000028 00000001 fffffff0 0000000000000000 00000000 00000000 00000000") + null, errChunk},
		{"another version of RPC", header(xid, "00000020", noChunks) + xid + "00000000 00000003 20000001 00000003 00000000" +
			"0000000000000000 0000000000000000",
			header(xid, "00000020", noChunks) + xid + "00000001 00000001 00000000 00000002 00000002"},
		{"another program", header(xid, "00000020", noChunks) + xid + "00000000 00000002 20000009 00000003 00000000" +
			"0000000000000000 0000000000000000", header(xid, "00000020", noChunks) + xid +
			"00000001 00000000 0000000000000000 00000001"},
		{"a truncated credential", header(xid, "00000020", noChunks) + xid + "00000000 00000002 20000001 00000003 00000000" +
			"00000001 00000100", header(xid, "00000020", noChunks) + xid + "00000001 00000000 0000000000000000 00000004"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p, _ := rawClient(t, private4096, Config{Programs: testPrograms(newWaits())})
			p.send(tt.message)
			p.want("answer", tt.answer)
			p.silent("after it")
		})
	}
}

// The service drops these messages without an answer.
func TestResponderDrops(t *testing.T) {
	for _, tt := range []struct{ name, message string }{
		{"RPCRDMA-4.2.4-3 an RDMA_ERROR", xid + "00000001 00000020 00000004 00000002"},
		{"RPCRDMA-4.2.4-3 ERR_VERS", xid + "00000001 00000020 00000004 00000001 00000001 00000001"},
		{"RDMA_DONE", xid + "00000001 00000020 00000003" + noChunks},
		{"nothing", ""}, {"4 bytes", xid}, {"24 bytes", header(xid, "00000020", "00000000 00000000")},
		{"BRPC-2-2 BRPC-2.4-3 a reply without a call", header(xid, "00000020", noChunks) + okReply(xid)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p, c := rawClient(t, private4096, Config{Programs: testPrograms(newWaits())})
			p.silent("before it") // RPCRDMA-3.3.1-7: an idle responder sends nothing either
			for range 100 {       // they take no credits
				p.send(tt.message)
			}
			p.silent("after it")
			if limit, inflight := c.Credits(); limit != 1 || inflight != 0 {
				t.Errorf("BRPC-4.1-5: limit %d, in flight %d", limit, inflight)
			}
		})
	}
}

// V-RPCRDMA-5 and V-RPCRDMA-6: a result of 5001 bytes goes into two segments of a write chunk.
func TestWriteChunks(t *testing.T) {
	p, _ := rawClient(t, private4096, Config{Programs: testPrograms(newWaits())})
	one, two := make([]byte, 4096), bytes.Repeat([]byte{0xee}, 4096)
	reply := make([]byte, 8192)
	s1, s2 := p.expose(one, 0x1000, rdma.RemoteWrite), p.expose(two, 0x9000, rdma.RemoteWrite)
	s3 := p.expose(reply, 0x20000, rdma.RemoteWrite)
	p.send(header(xid, "00000020", "00000000 00000001 00000002"+s1+s2+"00000000 00000001 00000001"+s3) +
		callOf(xid, procRead) + "00001389")
	p.want("RPCRDMA-3.4.6-3 RPCRDMA-4.3.3-2 RPCRDMA-4.3.3-3 RPCRDMA-3.5.3-5", header(xid, "00000020", "00000000 00000001 00000002"+s1+
		s2[:9]+"00000389"+s2[17:]+"00000000 00000001 00000001"+s3[:9]+"00000000"+s3[17:])+okReply(xid)+"00001389")
	want := pattern(5001)
	if !bytes.Equal(one, want[:4096]) || !bytes.Equal(two[:905], want[4096:]) {
		t.Error("RPCRDMA-3.4.6-2 RPCRDMA-3.5.2-2: the data is not in the chunk when the reply arrives")
	}
	if !bytes.Equal(two[905:908], []byte{0xee, 0xee, 0xee}) {
		t.Error("RPCRDMA-3.4.6.2-1: padding was written")
	}
}

func TestWriteList(t *testing.T) {
	ok := "00000001 00000000 0000000000000000 00000000"
	for _, tt := range []struct {
		name        string
		first, then int // sizes of the two results
		// The chunks of the call, and in the reply: bytes that each chunk of 64 has, or -1 for an empty one.
		chunks, filled []int
		inline         string // results in the message
	}{
		{"RPCRDMA-4.3.2-1 RPCRDMA-3.5.2-1 a small result uses its chunk", 10, 0, []int{64}, []int{10}, "00000001 0000000a 00000000"},
		{"RPCRDMA-4.3.2-2 two results, two chunks", 8, 12, []int{64, 64}, []int{8, 12},
			"00000001 00000008 00000001 0000000c"},
		{"RPCRDMA-4.3.2.2-1 the second result is the first item", 0, 8, []int{64, 64}, []int{8, 0},
			"00000000 00000001 00000008"},
		{"RPCRDMA-4.3.2.2-2 no result", 0, 0, []int{64, 64}, []int{0, 0}, "00000000 00000000"},
		{"an empty chunk", 4, 8, []int{-1, 64}, []int{-1, 8}, "00000001 00000004 00010203 00000001 00000008"},
		{"one chunk, two results", 8, 4, []int{64}, []int{8}, "00000001 00000008 00000001 00000004 00010203"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p, _ := rawClient(t, noInvalid, Config{Programs: testPrograms(newWaits())})
			var call, reply string
			var memory [][]byte
			for i, n := range tt.chunks {
				if n < 0 {
					call += "00000001 00000000"
					reply += "00000001 00000000"
					memory = append(memory, nil)
					continue
				}
				b := bytes.Repeat([]byte{0xee}, n)
				memory = append(memory, b)
				s := p.expose(b, 0x100, rdma.RemoteWrite)
				call += "00000001 00000001" + s
				reply += "00000001 00000001" + s[:9] + fmt.Sprintf("%08x", tt.filled[i]) + s[17:]
			}
			p.send(header(xid, "00000020", "00000000"+call+"00000000 00000000") + callOf(xid, procTwo) +
				fmt.Sprintf("%08x %08x", tt.first, tt.then))
			p.want("RPCRDMA-4.3.1-1", header(xid, "00000020", "00000000"+reply+"00000000 00000000")+xid+ok+tt.inline)
			for i, n := range tt.filled {
				if n >= 0 && (!bytes.Equal(memory[i][:n], pattern(n)) || memory[i][n] != 0xee) {
					t.Errorf("chunk %d: %x", i, memory[i])
				}
			}
		})
	}
}

// RPCRDMA-3.4.4-1: however the requester cuts its chunks into segments, the result is the same.
func TestSegments(t *testing.T) {
	data := pattern(4099)
	for _, tt := range []struct {
		name string
		cuts []int
		pad  int // bytes of padding in the chunk
	}{
		{"one segment", []int{4099}, 0}, {"odd segments", []int{1, 7, 1000, 3091}, 0}, {"an empty segment", []int{0, 4099}, 0},
		{"RPCRDMA-3.4.5.2-3 padding in a segment of its own", []int{4099, 1}, 1},
		{"60 segments", append(bytes2ints(59, 10), 4099-590), 0},
	} {
		for _, zero := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, RDMA_NOMSG %t", tt.name, zero), func(t *testing.T) {
				p, _ := rawOn2(t, Config{Programs: testPrograms(newWaits()), RDMA: rdma.Options{ORD: 1}})
				all := append(bytes.Clone(data), make([]byte, tt.pad)...)
				list, off := "", 0
				for _, n := range tt.cuts {
					list += "00000001 0000002c" + p.expose(all[off:off+n], 0xffffffff00000000+uint64(off), rdma.RemoteRead)
					off += n
				}
				head := callOf(xid, procEcho) + "00001003"
				reply := make([]byte, 8192)
				into := p.expose(reply, 0x7fff, rdma.RemoteWrite)
				tail := "00000000 00000000 00000001 00000001" + into
				if zero { // RPCRDMA-3.5.3-3, RPCRDMA-3.5.3-7, RPCRDMA-6.1-3
					b := unhex(head)
					p.send(xid + "00000001 00000020 00000001 00000001 00000000" + p.expose(b, 5, rdma.RemoteRead) + list + tail)
				} else {
					p.send(header(xid, "00000020", list+tail) + head)
				}
				// The reply of 24 + 4 + 4100 bytes does not fit 4096.
				p.want("RPCRDMA-3.5.3-4", xid+"00000001 00000020 00000001 00000000 00000000 00000001 00000001"+into[:9]+
					"00001020"+into[17:])
				if want := unhex(okReply(xid) + "00001003"); !bytes.Equal(reply[:28], want) || !bytes.Equal(reply[28:28+4099], data) {
					t.Errorf("the reply is %x...", reply[:40])
				}
				if reply[28+4099] != 0 {
					t.Error("RPCRDMA-3.5.3-6: the padding is not zero")
				}
			})
		}
	}
}

func bytes2ints(n, v int) []int {
	s := make([]int, n)
	for i := range s {
		s[i] = v
	}
	return s
}

// rawOn2 returns what rawClient does, with a peer that does not support remote invalidation.
func rawOn2(t testing.TB, cfg Config) (*rawPeer, *Conn) { return rawClient(t, noInvalid, cfg) }

func TestResponderRefusesChunks(t *testing.T) {
	errChunk := xid + "00000001 00000020 00000004 00000002"
	p, _ := rawClient(t, noInvalid, Config{Programs: testPrograms(newWaits())})
	memory := bytes.Repeat([]byte{0xee}, 200)
	small := p.expose(memory[:100], 0x100, rdma.RemoteWrite)
	source := p.expose(make([]byte, 400), 0, rdma.RemoteRead)
	for _, tt := range []struct{ name, message string }{
		{"RPCRDMA-4.5.3-2 a reply chunk of 100 bytes", header(xid, "00000020", "00000000 00000000 00000001 00000001"+small) +
			callOf(xid, procTwo) + "00001388 00000000"},
		{"RPCRDMA-4.5.3-2 RPCRDMA-3.4.6-1 a write chunk of 100 bytes", header(xid, "00000020", "00000000 00000001 00000001"+small+"00000000 00000000") +
			callOf(xid, procRead) + "00000065"},
		{"no reply chunk", header(xid, "00000020", noChunks) + callOf(xid, procRead) + "00000ff0"},
		{"RPCRDMA-8.2.2-1 a reduced credential", header(xid, "00000020", "00000001 00000020"+source[:9]+"00000008"+source[17:]+
			"00000000 00000000 00000000") + xid + "00000000 00000002 20000001 00000003 00000000 00000001 00000008"},
		{"a reduced word", header(xid, "00000020", "00000001 00000028"+source[:9]+"00000004"+source[17:]+
			"00000000 00000000 00000000") + callOf(xid, procRead)},
		{"a chunk for the type of the message", header(xid, "00000020", "00000001 00000004"+source[:9]+"00000004"+source[17:]+
			"00000000 00000000 00000000") + xid},
		{"another XID in the position zero chunk", xid + "00000001 00000020 00000001 00000001 00000000" + source +
			"00000000 00000000 00000000"},
		{"RPCRDMA-8.2.2-3 a read chunk with privacy", header(xid, "00000020", "00000001 00000050"+source[:9]+"00000004"+
			source[17:]+"00000000 00000000 00000000") + xid + "00000000 00000002 20000001 00000003 00000001 00000006 00000014" +
			"00000001 00000000 00000001 00000003 00000000 0000000000000000 00000004"},
	} {
		for range 3 { // RPCRDMA-4.5.3-3: also when the call is sent again
			p.send(tt.message)
			p.want(tt.name, errChunk)
		}
		p.silent(tt.name)
	}
	if !bytes.Equal(memory, bytes.Repeat([]byte{0xee}, 200)) {
		t.Error("RPCRDMA-4.5.3-2: a chunk that is too small was written to")
	}
}

// RPCRDMA-8.2.2-3: with integrity nothing is placed in a write chunk.
func TestProtectedResults(t *testing.T) {
	p, _ := rawClient(t, noInvalid, Config{Programs: testPrograms(newWaits())})
	s := p.expose(make([]byte, 64), 0, rdma.RemoteWrite)
	gss := "00000006 00000014 00000001 00000000 00000001 00000002 00000000 0000000000000000"
	p.send(header(xid, "00000020", "00000000 00000001 00000001"+s+"00000000 00000000") +
		xid + "00000000 00000002 20000001 00000003 00000003" + gss + "00000004")
	p.want("RPCRDMA-8.2.2-3", header(xid, "00000020", "00000000 00000001 00000001"+s[:9]+"00000000"+s[17:]+
		"00000000 00000000")+okReply(xid)+"00000004 00010203")
}

func TestInvalidation(t *testing.T) {
	for _, tt := range []struct {
		name, private string
		no, want      bool
	}{
		{"RPCRDMA-8797.4.1-1 both", private4096, false, true},
		{"RPCRDMA-8797.4.1-3 not the peer", noInvalid, false, false},
		{"RPCRDMA-8797.4.1-3 not this end", private4096, true, false},
		{"RPCRDMA-8797.4.1-3 no private data", "", false, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWaits()
			p, _ := rawClient(t, tt.private, Config{Programs: testPrograms(w), NoInvalidate: tt.no})
			// Calls whose replies come in another order.
			xids := []string{"00000001", "00000002", "00000003"}
			stags := map[string]string{}
			for i, x := range xids {
				s := p.expose(make([]byte, 64), 0, rdma.RemoteWrite)
				stags[x] = s[:8]
				p.send(header(x, "00000020", "00000000 00000000 00000001 00000001"+s) + callOf(x, procWait))
				<-w.entered
				if i > 0 {
					w.leave <- struct{}{}
				}
			}
			w.leave <- struct{}{}
			for range xids {
				m, ev := p.message()
				if ev.Invalidates != tt.want || ev.Invalidates && fmt.Sprintf("%08x", uint32(ev.Invalidated)) != stags[m[:8]] {
					t.Errorf("RPCRDMA-8797.4.1-2: XID %s invalidates %t %#x, its STag is %s", m[:8], ev.Invalidates, ev.Invalidated,
						stags[m[:8]])
				}
			}
			// A call without chunks has nothing to invalidate.
			p.send(header(xid, "00000020", noChunks) + nullOf(xid))
			if _, ev := p.message(); ev.Invalidates {
				t.Error("a reply to a call without chunks invalidates")
			}
		})
	}
}

// Thresholds of a responder, header included.
func TestResponderThreshold(t *testing.T) {
	for _, tt := range []struct {
		name, private string
		most          int
	}{
		{"RPCRDMA-3.3.3-3 no private data", "", 1024}, {"RPCRDMA-8797.4.2-3 4096", private4096, 4096},
		{"1024", private1024, 1024}, {"65536 of the peer", "f6ab0e18 01013f3f", 4096},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p, c := rawClient(t, tt.private, Config{Programs: testPrograms(newWaits())})
			if !bytes.Equal(p.private, unhex(private4096)) {
				t.Errorf("RPCRDMA-8797.4-4: the Reply has %x", p.private)
			}
			if send, _ := c.Thresholds(); send != tt.most {
				t.Errorf("threshold %d", send)
			}
			// RPCRDMA-3.3.3-2: the first call has 1024 bytes, or as many as were announced.
			body := strings.Repeat("ab", tt.most-28-40-4)
			p.send(header(xid, "00000020", noChunks) + callOf(xid, procPlain) + fmt.Sprintf("%08x", len(body)/2) + body)
			m, _ := p.message()
			if want := header(xid, "00000020", noChunks); !strings.HasPrefix(m, strings.ReplaceAll(want, " ", "")) {
				t.Errorf("a call of %d bytes: %s", tt.most, m)
			}
			// RPCRDMA-3.3.2-1 RPCRDMA-4.2.4-4: a reply of exactly the threshold is one Send, a longer one is in the reply chunk.
			reply := make([]byte, 8192)
			s := p.expose(reply, 0, rdma.RemoteWrite)
			for _, over := range []int{-4, 0, 4} {
				n := tt.most + over - (28 + 4 + 16) - 24 - 4 // header with reply chunk, RPC header, count
				p.send(header(xid, "00000020", "00000000 00000000 00000001 00000001"+s) + callOf(xid, procRead) +
					fmt.Sprintf("%08x", n))
				m, ev := p.message()
				long := m[24:32] == "00000001"
				if len(m)/2 > tt.most || long != (over > 0) || !long && len(m)/2 != tt.most+over {
					t.Fatalf("RPCRDMA-3.3-1: a reply of %d bytes is a Send of %d bytes, long: %t", tt.most+over, len(m)/2, long)
				}
				if ev.Invalidates {
					s = p.expose(reply, 0, rdma.RemoteWrite)
				}
			}
			p.silent("RPCRDMA-3.3.2-1")
		})
	}
}

// What ends the connection leaves the others as they are.
func TestResponderEnds(t *testing.T) {
	for _, tt := range []struct {
		name   string
		do     func(p *rawPeer, w *waits)
		reason rdmap.Reason
	}{
		{"RPCRDMA-3.3.1-9 BRPC-4-1 more calls than credits", func(p *rawPeer, w *waits) {
			for i := range 5 {
				x := fmt.Sprintf("%08x", i)
				p.send(header(x, "00000020", noChunks) + callOf(x, procWait))
			}
		}, rdmap.ReasonNoBuffer},
		{"BRPC-5.3-4 a Send that is too long", func(p *rawPeer, w *waits) {
			p.send(header(xid, "00000020", noChunks) + strings.Repeat("00", 4096-28+4))
		}, rdmap.ReasonTooLong},
		{"RPCRDMA-3.1-1 an RDMA Write", func(p *rawPeer, w *waits) { p.write(0x1234, 0, []byte("x")) }, rdmap.ReasonInvalidSTag},
		{"RPCRDMA-3.1-1 an RDMA Read", func(p *rawPeer, w *waits) {
			p.post(&rdma.WorkRequest{Op: rdma.Read, Data: make([]byte, 4), STag: 0x1234})
			p.rc.Flush()
		}, rdmap.ReasonReadInvalidSTag},
		{"RPCRDMA-8797.4.1-4 a call that invalidates", func(p *rawPeer, w *waits) {
			p.post(&rdma.WorkRequest{Op: rdma.SendInvalidate, STag: 0x1234, Data: unhex(header(xid, "00000020", noChunks) + nullOf(xid))})
			p.rc.Flush()
		}, rdmap.ReasonNotInvalidated},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWaits()
			cfg := Config{Programs: testPrograms(w), Credits: 4}
			neighbour, _ := connPair(t, Config{}, cfg)
			p, c := rawClient(t, private4096, cfg)
			tt.do(p, w)
			p.ends(tt.name, tt.reason)
			within(t, "the end", c.Done())
			doNull(t, neighbour)
			c.workers.Wait()
			if c.busy != 0 || c.outstanding != 0 {
				t.Errorf("%d slots are in use, %d calls are unanswered", c.busy, c.outstanding)
			}
		})
	}
}

// RPCRDMA-4.5.3-1: the requester has revoked the STag of its chunk.
func TestRevokedChunk(t *testing.T) {
	p, c := rawClient(t, private4096, Config{Programs: testPrograms(newWaits())})
	p.send(header(xid, "00000020", "00000001 00000028 00000bad 00000008 0000000000000000 00000000 00000000 00000000") +
		callOf(xid, procRead))
	p.ends("RPCRDMA-4.5.3-1", rdmap.Reason{})
	within(t, "the end", c.Done())
	c.workers.Wait()
	if c.busy != 0 || c.reserved != 0 || c.outstanding != 0 || c.fetching != 0 {
		t.Errorf("in use: %d slots, %d bytes, %d calls, %d reads", c.busy, c.reserved, c.outstanding, c.fetching)
	}
}

// RPCRDMA-3.3.1-5, RPCRDMA-3.3.1-6, BRPC-4.3.2-1: all credits can be used at once, RPCRDMA-3.3.3-4 from the start. BRPC-4.3-1: the
// first calls may arrive before this end has received anything.
func TestAllCredits(t *testing.T) {
	w := newWaits()
	p, _ := rawClient(t, private4096, Config{Programs: testPrograms(w), Credits: 16})
	for range 3 {
		for i := range 16 {
			x := fmt.Sprintf("%08x", i)
			p.send(header(x, "00000001", noChunks) + callOf(x, procWait))
		}
		for range 16 {
			<-w.entered
		}
		for range 16 {
			w.leave <- struct{}{}
		}
		for range 16 {
			if m, _ := p.message(); m[16:24] != "00000010" {
				t.Errorf("credits %s", m[16:24])
			}
		}
	}
}

// RPCRDMA-3.4.5.1-1: all of the chunk was read when the reply arrives, RPCRDMA-3.3.1-8 with one Read at a time.
func TestReadsBeforeReply(t *testing.T) {
	p, _ := rawClient(t, noInvalid, Config{Programs: testPrograms(newWaits()), RDMA: rdma.Options{ORD: 1}})
	for i := range 8 {
		x := fmt.Sprintf("%08x", i)
		b := pattern(2000)
		s := p.expose(b, 0, rdma.RemoteRead)
		p.send(header(x, "00000020", "00000001 0000002c"+s+"00000000 00000000 00000000") + callOf(x, procEcho) + "000007d0")
	}
	for range 8 {
		if m, _ := p.message(); !strings.HasSuffix(m, fmt.Sprintf("000007d0%x", pattern(2000))) {
			t.Fatalf("RPCRDMA-3.4.5.1-1: %s", m)
		}
	}
}

// Memory for chunks is limited: calls wait for their turn, and all are answered.
func TestStarvedCalls(t *testing.T) {
	w := newWaits()
	cfg := Config{Programs: testPrograms(w), MaxArgs: 64 << 10, MaxResults: 64 << 10, Memory: 128 << 10}
	client, service := connPair(t, Config{}, cfg)
	doNull(t, client)
	errs := make(chan error, 32)
	for range cap(errs) {
		go func() {
			data := pattern(40 << 10)
			call := &Call{Program: testProgram, Version: testVersion, Procedure: procEcho, MaxReply: 4,
				Into: [][]byte{make([]byte, len(data))}}
			call.Begin().Item(data)
			err := client.Do(patient(t), call)
			if err == nil && !bytes.Equal(call.Results.Item(len(data)), data) {
				err = fmt.Errorf("the data differs")
			}
			errs <- err
		}()
	}
	for range cap(errs) {
		if err := <-errs; err != nil {
			t.Fatal(err)
		}
	}
	testkit.Eventually(t, "no memory is reserved", func() bool {
		service.mu.Lock()
		defer service.mu.Unlock()
		return service.reserved == 0 && service.kept <= 128<<10
	})
}

// RPCRDMA-6.3-1: programs share a connection, and BRPC-7-3 they are told apart by their numbers.
func TestTwoPrograms(t *testing.T) {
	programs := testPrograms(newWaits())
	programs.Register(testProgram+1, 1, procPlain, func(_ context.Context, r *Request) error {
		r.Results.Uint32(42)
		return r.Args.End()
	})
	client, _ := connPair(t, Config{}, Config{Programs: programs})
	call := &Call{Program: testProgram + 1, Version: 1, Procedure: procPlain, MaxReply: 4}
	call.Begin()
	do(t, client, call)
	if v := call.Results.Uint32(); v != 42 {
		t.Errorf("RPCRDMA-6.3-1: %d", v)
	}
	doNull(t, client)
}
